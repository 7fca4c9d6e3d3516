//! The counters of an arena: sums that never decrease. Plain values, protected by the state's lock.
//!
//! Invariant: those of [`ArenaSnapshot`](crate::ArenaSnapshot).

use std::time::Duration;

use crate::types::snapshot::AllocFailures;

/// Counts since the arena was opened.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) allocs: u64,
    pub(crate) frees: u64,
    /// The allocations from caches of dropped lanes.
    pub(crate) cache_allocs: u64,
    pub(crate) failures: AllocFailures,
    pub(crate) commits: u64,
    pub(crate) decommits: u64,
    pub(crate) committed_bytes: u64,
    pub(crate) decommitted_bytes: u64,
    pub(crate) remaps: u64,
    pub(crate) remapped_bytes: u64,
    /// The number of calls of shortage callbacks, and the number of those that panicked.
    pub(crate) shortage_calls: u64,
    pub(crate) shortage_panics: u64,
    pub(crate) reserves: u64,
    pub(crate) resizes: u64,
    pub(crate) moves: u64,
    pub(crate) moved_bytes: u64,
    pub(crate) trims: u64,
    pub(crate) trimmed_bytes: u64,
    pub(crate) shrinks: u64,
    pub(crate) shrunk_bytes: u64,
    /// The size of the largest block handed out.
    pub(crate) alloc_size_max: u64,
    /// The number of times that a thread found the lock taken, and the total time of those waits.
    pub(crate) contended: u64,
    pub(crate) waited: Duration,
}
