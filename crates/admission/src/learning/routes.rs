//! The records of a bounded number of routes.
//!
//! Invariant: at most [`ROUTES_MAX`] records and one for all other routes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The maximum number of routes that are recorded separately; later ones share one estimate.
pub const ROUTES_MAX: usize = 256;

/// What is recorded of the requests of a route.
pub trait Record {
    /// Returns `true` if there is anything.
    fn has_learned(&self) -> bool;
}

/// At most [`ROUTES_MAX`] routes, and one for all others.
pub struct Routes<K, R> {
    known: BTreeMap<K, Arc<R>>,
    rest: Arc<R>,
}

impl<K: Ord, R: Record> Routes<K, R> {
    /// Creates an empty set, with the record of the routes that exceed its bound.
    pub fn new(rest: R) -> Self {
        Self { known: BTreeMap::new(), rest: Arc::new(rest) }
    }

    /// Returns the record of a key.
    pub fn of(&mut self, key: K, create: impl FnOnce() -> R) -> Arc<R> {
        if let Some(route) = self.known.get(&key) {
            return Arc::clone(route);
        }
        if self.known.len() >= ROUTES_MAX {
            // Clients choose paths: routes without a measurement and without a running request are
            // removed.
            self.known.retain(|_, route| Arc::strong_count(route) > 1 || route.has_learned());
        }
        if self.known.len() >= ROUTES_MAX {
            return Arc::clone(&self.rest);
        }
        let route = Arc::new(create());
        self.known.insert(key, Arc::clone(&route));
        route
    }
}

impl<K, R> fmt::Debug for Routes<K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes").field("known", &self.known.len()).finish_non_exhaustive()
    }
}
