//! The figures of an arena at one instant, taken under one lock.
//!
//! Plain values in the terms of the glossary; this module calls no driver. A commit or decommit in
//! progress counts as committed, so `committed` errs upward. A block whose memory is not committed
//! yet counts as a hole.
//!
//! Invariants, for the arena and for each region: `requested <= live`;
//! `(live - asleep) + pending + holes = active`; `active + idle = committed <= reserved`.

use std::time::Duration;

use crate::driver::Backend;
use crate::types::Region;
use crate::types::sleep::SleepState;
use lowtide_core::bytes::ByteSize;

/// The figures of an arena.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ArenaSnapshot {
    /// The arena's name.
    pub name: String,
    /// The driver's backend.
    pub backend: Backend,
    /// Bytes that callers requested.
    pub requested: ByteSize,
    /// Bytes of blocks held by callers, after rounding.
    pub live: ByteSize,
    /// Bytes of live blocks that have no memory because the arena sleeps.
    pub asleep: ByteSize,
    /// Bytes of host memory that hold the contents of sleeping blocks, are kept for the next sleep,
    /// or could not be released to the driver. While the arena falls asleep, the memory into which
    /// contents are being copied does not count yet.
    pub offloaded: ByteSize,
    /// The maximum of `live` since the arena was opened. Errs upward by at most the thread caches.
    pub live_peak: ByteSize,
    /// Bytes of free blocks in thread caches. They are part of the holes.
    pub cached: ByteSize,
    /// Bytes of granules that a block touches; of whole segments on drivers that allocate segments.
    pub active: ByteSize,
    /// Bytes of committed granules that no block touches.
    pub idle: ByteSize,
    /// Bytes of granules with committed memory.
    pub committed: ByteSize,
    /// The maximum of `committed` since the arena was opened, without commits in progress.
    pub committed_peak: ByteSize,
    /// Bytes of reserved address space; equal to `committed` on drivers that allocate segments.
    pub reserved: ByteSize,
    /// Bytes of the arena's metadata: an estimate for raw blocks, none for thread caches.
    pub metadata: ByteSize,
    /// Bytes freed by the caller that the device may still use. Zero on the host backend.
    pub pending: ByteSize,
    /// Bytes of active granules that are neither live nor pending.
    pub holes: ByteSize,
    /// The longest free span of committed memory: a lower bound that the largest 32 free spans of
    /// small and of large blocks give, exact if there are no more.
    pub largest_free: ByteSize,
    /// The limit of committed memory.
    pub limit: ByteSize,
    /// Bytes of blocks exported to foreign code ([`Buffer::export`](crate::Buffer::export)).
    pub exported: ByteSize,
    /// The number of exported blocks.
    pub exported_count: u64,
    /// Bytes of freed blocks that a graph may have captured: they stay live until
    /// [`DeviceArena::release_captured`](crate::DeviceArena::release_captured).
    pub captured: ByteSize,
    /// Bytes of imported memory ([`DeviceArena::import`](crate::DeviceArena::import)) that is not
    /// released yet. Not part of other figures: the arena does not commit it.
    pub imported: ByteSize,
    /// The number of imported ranges.
    pub imported_count: u64,
    /// The number of leases held.
    pub leases: u32,
    /// The sleep state.
    pub state: SleepState,
    /// The number of sleeps since the arena was opened.
    pub sleeps_total: u64,
    /// The number of wakes.
    pub wakes_total: u64,
    /// The number of failed wakes.
    pub wake_failures_total: u64,
    /// The number of blocks allocated since the arena was opened.
    pub allocs_total: u64,
    /// The number of blocks freed since then.
    pub frees_total: u64,
    /// The number of allocations served by a thread cache, without the arena's lock.
    pub thread_cache_allocs_total: u64,
    /// The number of blocks allocated on their own granules
    /// ([`DeviceArena::reserve`](crate::DeviceArena::reserve)).
    pub reserves_total: u64,
    /// The number of blocks resized in place.
    pub resizes_total: u64,
    /// The number of blocks that compactions moved.
    pub moves_total: u64,
    /// Bytes that compactions moved.
    pub moved_bytes_total: u64,
    /// The largest block allocated.
    pub alloc_size_max: ByteSize,
    /// The number of allocations that failed because the arena's limit was reached.
    pub alloc_failures_limit_total: u64,
    /// The number of those that failed because the device was out of memory, or the host that
    /// provides its memory.
    pub alloc_failures_device_total: u64,
    /// The number of those for which the region had no free span of addresses, or is smaller than
    /// the block.
    pub alloc_failures_addresses_total: u64,
    /// The number of those that failed because the driver failed for another reason.
    pub alloc_failures_driver_total: u64,
    /// The number of driver calls that committed memory.
    pub commits_total: u64,
    /// The number of driver calls that decommitted memory.
    pub decommits_total: u64,
    /// Bytes committed by those calls.
    pub committed_bytes_total: u64,
    /// Bytes decommitted by those calls.
    pub decommitted_bytes_total: u64,
    /// The number of driver calls that moved memory of idle granules to other granules, instead of
    /// a decommit and a commit.
    pub remaps_total: u64,
    /// Bytes moved by those calls.
    pub remapped_bytes_total: u64,
    /// The number of shortage callbacks called.
    pub shortage_callbacks_total: u64,
    /// The number of shortage callbacks that panicked.
    pub shortage_panics_total: u64,
    /// The number of release functions of imported memory called.
    pub releases_total: u64,
    /// The number of release functions that panicked.
    pub release_panics_total: u64,
    /// The number of CUDA errors that views of freed buffers left with cudarc; zero without CUDA.
    /// Each is removed from cudarc's context, so that no later call returns it.
    pub parked_errors_total: u64,
    /// The number of trims and purges.
    pub trims_total: u64,
    /// Bytes released by those.
    pub trimmed_bytes_total: u64,
    /// The number of shrinks.
    pub shrinks_total: u64,
    /// Bytes released by those.
    pub shrunk_bytes_total: u64,
    /// The number of contended lock acquisitions.
    pub lock_contended_total: u64,
    /// Total time that threads have waited for the arena's lock.
    pub lock_wait_total: Duration,
    /// The figures of each region, in the order of [`Region::ALL`]; a default snapshot, which is of
    /// no arena, names one region twice.
    pub regions: [RegionSnapshot; 2],
}

/// The figures of an arena for frequent sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaGlance {
    /// Bytes of blocks held by callers, after rounding.
    pub live: ByteSize,
    /// Bytes of granules with committed memory.
    pub committed: ByteSize,
    /// Bytes of committed granules that no block touches.
    pub idle: ByteSize,
}

impl ArenaSnapshot {
    /// Returns the number of failed allocations by reason, with each reason's name in metrics.
    #[must_use]
    pub const fn alloc_failures(&self) -> [(&'static str, u64); 4] {
        [
            ("limit", self.alloc_failures_limit_total),
            ("device", self.alloc_failures_device_total),
            ("addresses", self.alloc_failures_addresses_total),
            ("driver", self.alloc_failures_driver_total),
        ]
    }

    /// Returns the unneeded memory: `committed - (live - asleep)`.
    #[must_use]
    pub fn retained(&self) -> ByteSize {
        self.committed.saturating_sub(self.live.saturating_sub(self.asleep))
    }

    /// Checks the identities.
    ///
    /// # Panics
    /// If an identity is violated.
    pub fn validate(&self) {
        self.regions.iter().for_each(RegionSnapshot::validate);
        assert!(self.live <= self.live_peak, "live <= live_peak");
        assert!(self.frees_total <= self.allocs_total, "frees_total <= allocs_total");
        assert!(self.exported <= self.live, "exported <= live");
        assert!(self.captured <= self.live, "captured <= live");
    }
}

/// The figures of a region, with the meanings of [`ArenaSnapshot`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct RegionSnapshot {
    /// The region.
    pub region: Region,
    /// Bytes that callers requested.
    pub requested: ByteSize,
    /// Bytes of blocks held by callers, after rounding.
    pub live: ByteSize,
    /// Bytes of live blocks that have no memory because the arena sleeps.
    pub asleep: ByteSize,
    /// Bytes of free blocks in thread caches.
    pub cached: ByteSize,
    /// Bytes of granules that a block touches.
    pub active: ByteSize,
    /// Bytes of committed granules that no block touches.
    pub idle: ByteSize,
    /// Bytes of granules with committed memory.
    pub committed: ByteSize,
    /// Bytes of reserved address space.
    pub reserved: ByteSize,
    /// Bytes freed by the caller that the device may still use.
    pub pending: ByteSize,
    /// Bytes of active granules that are neither live nor pending.
    pub holes: ByteSize,
    /// The longest free span of committed memory: a lower bound that the largest 32 free spans of
    /// small and of large blocks give, exact if there are no more.
    pub largest_free: ByteSize,
}

impl RegionSnapshot {
    /// Checks the identities.
    ///
    /// # Panics
    /// If an identity is violated.
    pub fn validate(&self) {
        assert!(self.requested <= self.live, "requested <= live: {self:?}");
        assert!(self.asleep <= self.live, "asleep <= live: {self:?}");
        let awake = self.live.saturating_sub(self.asleep);
        let active = [awake, self.pending, self.holes].into_iter().sum::<ByteSize>();
        assert_eq!(active, self.active, "(live - asleep) + pending + holes = active: {self:?}");
        let committed = self.active.saturating_add(self.idle);
        assert_eq!(committed, self.committed, "active + idle = committed: {self:?}");
        assert!(self.cached <= self.holes, "cached <= holes: {self:?}");
        assert!(self.committed <= self.reserved, "committed <= reserved: {self:?}");
        assert!(self.largest_free <= self.committed, "largest_free <= committed: {self:?}");
    }
}
