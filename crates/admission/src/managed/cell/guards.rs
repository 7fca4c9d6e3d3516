//! The guards of a resource: counting them, and taking the value out when none is left.
//!
//! Called with the lock held. It waits for nothing and runs no foreign code.
//!
//! Invariant: a value is taken out only with `guards = 0`, and then the caller cleans it up.

use std::mem;
use std::sync::Arc;

use super::{Loaded, Loading, Phase, State};

impl<T> State<T> {
    /// Returns the load of this number, unless it has been given up.
    pub(super) fn loading(&mut self, number: u64) -> Option<&mut Loading> {
        match &mut self.phase {
            Phase::Loading(loading) if loading.number == number => Some(loading),
            _ => None,
        }
    }

    /// Counts a guard, if there is a value.
    pub(super) fn guarded(&mut self) -> Option<Arc<T>> {
        let Phase::Ready(loaded) = &self.phase else { return None };
        let value = Arc::clone(&loaded.value);
        self.guards += 1;
        Some(value)
    }

    /// Takes the value out if it has no guards. The caller cleans it up.
    pub(super) fn unguarded(&mut self) -> Option<Loaded<T>> {
        if self.guards > 0 || !matches!(self.phase, Phase::Ready(_)) {
            return None;
        }
        match mem::replace(&mut self.phase, Phase::Unloading) {
            Phase::Ready(loaded) => Some(loaded),
            other => {
                self.phase = other;
                None
            }
        }
    }

    pub(super) fn ring_drainers(&self) {
        for bell in &self.drainers {
            bell.ring();
        }
    }
}
