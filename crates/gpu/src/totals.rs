//! The counters of an arena: sums that never decrease. Plain values, under the accounting's lock.
//!
//! Invariant: those of [`ArenaSnapshot`](super::ArenaSnapshot).

use std::time::Duration;

use super::snapshot::AllocFailures;

/// Counts since the arena was opened.
#[derive(Debug, Default)]
pub(super) struct Totals {
    pub(super) allocs: u64,
    pub(super) frees: u64,
    /// The part by caches of dropped lanes.
    pub(super) front_allocs: u64,
    pub(super) failures: AllocFailures,
    pub(super) commits: u64,
    pub(super) decommits: u64,
    pub(super) committed_bytes: u64,
    pub(super) decommitted_bytes: u64,
    pub(super) remaps: u64,
    pub(super) remapped_bytes: u64,
    /// Calls of callbacks on shortage, and how many of those panicked.
    pub(super) shortage_calls: u64,
    pub(super) shortage_panics: u64,
    pub(super) reserves: u64,
    pub(super) resizes: u64,
    pub(super) moves: u64,
    pub(super) moved_bytes: u64,
    pub(super) trims: u64,
    pub(super) trimmed_bytes: u64,
    pub(super) shrinks: u64,
    pub(super) shrunk_bytes: u64,
    /// The largest block handed out.
    pub(super) alloc_size_max: u64,
    /// Times that a thread found the lock taken, and how long they waited for it.
    pub(super) contended: u64,
    pub(super) waited: Duration,
}
