//! Counts the loads of resources, so that a load can be told to have run alone.
//!
//! Invariant: `ended <= begun`.

use std::sync::atomic::{AtomicU64, Ordering};

/// The loads of resources with an `OwnArena` that started and that ended.
#[derive(Debug, Default)]
pub(super) struct Loads {
    begun: AtomicU64,
    ended: AtomicU64,
}

#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct LoadCounts {
    pub(super) begun: u64,
    pub(super) ended: u64,
}

impl Loads {
    pub(super) fn counts(&self) -> LoadCounts {
        let count = |total: &AtomicU64| total.load(Ordering::SeqCst);
        LoadCounts { ended: count(&self.ended), begun: count(&self.begun) }
    }
}

/// Counts the end of a load, also if it panics.
pub(super) struct Loading<'a>(&'a Loads);

impl<'a> Loading<'a> {
    pub(super) fn begin(loads: &'a Loads) -> Self {
        loads.begun.fetch_add(1, Ordering::SeqCst);
        Self(loads)
    }
}

impl Drop for Loading<'_> {
    fn drop(&mut self) {
        self.0.ended.fetch_add(1, Ordering::SeqCst);
    }
}
