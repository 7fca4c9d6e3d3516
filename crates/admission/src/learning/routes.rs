//! The records of a bounded number of routes.
//!
//! Invariant: at most [`ROUTES_MAX`] records and one for all other routes.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

/// The maximum number of routes that are recorded separately; later ones share one estimate.
pub const ROUTES_MAX: usize = 256;

/// A route can be replaced if none of the last requests, this many, used it. An estimate: 64 for
/// each route.
const UNUSED: u64 = 64 * ROUTES_MAX as u64;

/// What is recorded of the requests of a route.
pub(super) trait Record {
    /// Returns `true` if it contains a measurement.
    fn has_learned(&self) -> bool;
}

/// At most [`ROUTES_MAX`] routes, and one for all others.
pub(super) struct Routes<K, R> {
    known: BTreeMap<K, Known<R>>,
    rest: Arc<R>,
    /// The number of requests so far.
    requests: u64,
}

struct Known<R> {
    record: Arc<R>,
    /// The number of its last request.
    used: u64,
}

impl<K: Ord, R: Record> Routes<K, R> {
    /// Creates an empty set. `rest` is the record of all routes beyond its bound.
    pub(super) fn new(rest: R) -> Self {
        Self { known: BTreeMap::new(), rest: Arc::new(rest), requests: 0 }
    }

    /// Returns the record of a key, for a request.
    pub(super) fn of(&mut self, key: K, create: impl FnOnce() -> R) -> Arc<R> {
        self.requests += 1;
        let now = self.requests;
        if let Some(route) = self.known.get_mut(&key) {
            route.used = now;
            return Arc::clone(&route.record);
        }
        self.add(key, create)
    }

    /// Adds a route if there is room for it.
    #[cold]
    fn add(&mut self, key: K, create: impl FnOnce() -> R) -> Arc<R> {
        let now = self.requests;
        if self.known.len() >= ROUTES_MAX {
            // Clients choose paths: routes without a running request are removed if they have no
            // measurement or are not used any more.
            self.known.retain(|_, Known { record, used }| {
                let is_of_use = || now - *used < UNUSED && record.has_learned();
                Arc::strong_count(record) > 1 || is_of_use()
            });
        }
        if self.known.len() >= ROUTES_MAX {
            return Arc::clone(&self.rest);
        }
        let route = Arc::new(create());
        self.known.insert(key, Known { record: Arc::clone(&route), used: now });
        route
    }
}

impl<K, R> fmt::Debug for Routes<K, R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Routes").field("known", &self.known.len()).finish_non_exhaustive()
    }
}
