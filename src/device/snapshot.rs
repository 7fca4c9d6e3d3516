//! The figures of an arena at one instant, taken under one lock.
//!
//! Plain values in the glossary's words; it calls no driver. A commit or decommit under way counts
//! as committed, so that `committed` errs upward, and a block whose memory is still on its way
//! counts as a hole.
//!
//! Invariants, for the arena and for each region: `requested <= live`;
//! `(live - asleep) + pending + holes = active`; `active + idle = committed <= reserved`.

use std::time::Duration;

use super::driver::Backend;
use super::region::Region;
use super::sleep::ArenaState;
use crate::bytes::ByteSize;

/// An arena's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaSnapshot {
    /// The arena's name.
    pub name: String,
    /// The driver in use.
    pub backend: Backend,
    /// What callers asked for.
    pub requested: ByteSize,
    /// Blocks held by callers, after rounding.
    pub live: ByteSize,
    /// What of the live blocks has no memory behind it now: the arena sleeps.
    pub asleep: ByteSize,
    /// Host memory that holds contents of those, stays for the next sleep, or was not taken back
    /// by the driver.
    pub offloaded: ByteSize,
    /// The most that was live since the arena was opened. Errs upward by at most what the threads'
    /// fronts hold.
    pub live_peak: ByteSize,
    /// Free blocks of hot sizes that the threads' fronts keep for the next request. They lie in the
    /// holes.
    pub cached: ByteSize,
    /// Granules that a block touches; whole segments, where memory comes in those.
    pub active: ByteSize,
    /// Granules with memory behind them that no block touches.
    pub idle: ByteSize,
    /// Granules with memory behind them.
    pub committed: ByteSize,
    /// The most that was committed since the arena was opened, without what was on its way.
    pub committed_peak: ByteSize,
    /// Address space held; what is committed, where memory comes in segments.
    pub reserved: ByteSize,
    /// The arena's own books; of blocks had by address an estimate, of the fronts nothing.
    pub metadata: ByteSize,
    /// Freed by the caller, and perhaps still in use by the device. Zero on the host rung.
    pub pending: ByteSize,
    /// What of the active granules is neither live nor pending.
    pub holes: ByteSize,
    /// The longest free span with memory behind it.
    pub largest_free: ByteSize,
    /// The most that may be committed.
    pub limit: ByteSize,
    /// Blocks whose addresses are lent to foreign code ([`Buffer::export`](super::Buffer::lend)).
    pub exported: ByteSize,
    /// How many of them.
    pub exported_count: u64,
    /// Memory of others that was adopted ([`DeviceArena::import`](super::DeviceArena::adopt)) and
    /// is not released yet. In no other figure: the arena commits none of it.
    pub imported: ByteSize,
    /// How many pieces of it.
    pub imported_count: u64,
    /// Leases held now.
    pub leases: u32,
    /// Whether its memory can be used.
    pub state: ArenaState,
    /// Times that it fell asleep since it was opened.
    pub sleeps_total: u64,
    /// Times that it woke.
    pub wakes_total: u64,
    /// Times that it could not be woken.
    pub wake_failures_total: u64,
    /// Blocks handed out since the arena was opened.
    pub allocs_total: u64,
    /// Blocks freed since then.
    pub frees_total: u64,
    /// Those of the blocks handed out that came from a thread's front, without the arena's lock.
    pub thread_cache_allocs_total: u64,
    /// Blocks handed out that share their granules with no other.
    pub reserves_total: u64,
    /// Blocks that changed their size where they stood.
    pub resizes_total: u64,
    /// Blocks that compactions moved since then.
    pub moves_total: u64,
    /// Their bytes.
    pub moved_bytes_total: u64,
    /// The largest block handed out.
    pub alloc_size_max: ByteSize,
    /// Allocations that failed since then, by reason.
    pub alloc_failures_total: AllocFailures,
    /// Driver calls that committed memory.
    pub commits_total: u64,
    /// Driver calls that decommitted memory.
    pub decommits_total: u64,
    /// Bytes committed by those calls.
    pub committed_bytes_total: u64,
    /// Bytes decommitted by those calls.
    pub decommitted_bytes_total: u64,
    /// Driver calls that moved the memory of idle granules to where some was needed, in place of a
    /// decommit and a commit.
    pub remaps_total: u64,
    /// Bytes moved by those calls.
    pub remapped_bytes_total: u64,
    /// Calls of callbacks that were made because memory was short.
    pub shortage_callbacks_total: u64,
    /// Those of them that panicked.
    pub shortage_panics_total: u64,
    /// Release functions of adopted memory that were called.
    pub releases_total: u64,
    /// Those of them that panicked.
    pub release_panics_total: u64,
    /// Errors of CUDA that freed buffers' views left with cudarc; zero without CUDA.
    pub parked_errors_total: u64,
    /// Trims and purges that were asked for.
    pub trims_total: u64,
    /// Bytes that those gave back.
    pub trimmed_bytes_total: u64,
    /// Shrinks that were asked for.
    pub shrinks_total: u64,
    /// Bytes that those gave back.
    pub shrunk_bytes_total: u64,
    /// Times that a thread found a lock of the arena taken.
    pub lock_contended_total: u64,
    /// How long threads have waited for the arena's lock.
    pub lock_wait_total: Duration,
    /// The same for each region, in the order of [`Region::ALL`].
    pub regions: [RegionSnapshot; 2],
}

/// The few figures of an arena that a sampler reads at every tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ArenaGlance {
    /// Blocks held by callers, after rounding.
    pub live: ByteSize,
    /// Granules with memory behind them.
    pub committed: ByteSize,
    /// Granules with memory behind them that no block touches.
    pub idle: ByteSize,
}

impl ArenaSnapshot {
    /// An arena of which nothing is known but its name, in a forked child.
    pub(super) fn unknown(name: &str, backend: Backend) -> Self {
        const NONE: ByteSize = ByteSize::ZERO;
        Self {
            name: name.to_owned(),
            backend,
            requested: NONE,
            live: NONE,
            asleep: NONE,
            offloaded: NONE,
            live_peak: NONE,
            cached: NONE,
            active: NONE,
            idle: NONE,
            committed: NONE,
            committed_peak: NONE,
            reserved: NONE,
            metadata: NONE,
            pending: NONE,
            holes: NONE,
            largest_free: NONE,
            limit: NONE,
            exported: NONE,
            exported_count: 0,
            imported: NONE,
            imported_count: 0,
            leases: 0,
            state: ArenaState::default(),
            sleeps_total: 0,
            wakes_total: 0,
            wake_failures_total: 0,
            allocs_total: 0,
            frees_total: 0,
            thread_cache_allocs_total: 0,
            reserves_total: 0,
            resizes_total: 0,
            moves_total: 0,
            moved_bytes_total: 0,
            alloc_size_max: NONE,
            alloc_failures_total: AllocFailures::default(),
            commits_total: 0,
            decommits_total: 0,
            committed_bytes_total: 0,
            decommitted_bytes_total: 0,
            remaps_total: 0,
            remapped_bytes_total: 0,
            shortage_callbacks_total: 0,
            shortage_panics_total: 0,
            releases_total: 0,
            release_panics_total: 0,
            parked_errors_total: 0,
            trims_total: 0,
            trimmed_bytes_total: 0,
            shrinks_total: 0,
            shrunk_bytes_total: 0,
            lock_contended_total: 0,
            lock_wait_total: Duration::ZERO,
            regions: Region::ALL.map(RegionSnapshot::unknown),
        }
    }

    /// Memory kept that nothing needs: `committed - (live - asleep)`.
    #[must_use]
    pub fn retained(&self) -> ByteSize {
        self.committed.saturating_sub(self.live.saturating_sub(self.asleep))
    }

    /// Checks the identities.
    ///
    /// # Panics
    /// Where one does not hold.
    pub fn validate(&self) {
        for region in &self.regions {
            region.validate();
        }
        let total = |part: fn(&RegionSnapshot) -> ByteSize| self.regions.iter().map(part).sum();
        assert_eq!(self.requested, total(|region| region.requested));
        assert_eq!(self.live, total(|region| region.live));
        assert_eq!(self.asleep, total(|region| region.asleep));
        assert_eq!(self.cached, total(|region| region.cached));
        assert_eq!(self.active, total(|region| region.active));
        assert_eq!(self.idle, total(|region| region.idle));
        assert_eq!(self.committed, total(|region| region.committed));
        assert_eq!(self.reserved, total(|region| region.reserved));
        assert_eq!(self.holes, total(|region| region.holes));
        assert!(self.live <= self.live_peak, "live <= live_peak");
        assert!(self.frees_total <= self.allocs_total, "frees_total <= allocs_total");
        assert!(self.exported <= self.live, "lent <= live");
    }
}

/// A region's figures; the words are those of [`ArenaSnapshot`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionSnapshot {
    /// Which region.
    pub region: Region,
    /// What callers asked for.
    pub requested: ByteSize,
    /// Blocks held by callers, after rounding.
    pub live: ByteSize,
    /// What of the live blocks has no memory behind it now.
    pub asleep: ByteSize,
    /// Free blocks that the threads' fronts keep.
    pub cached: ByteSize,
    /// Granules that a block touches.
    pub active: ByteSize,
    /// Granules with memory behind them that no block touches.
    pub idle: ByteSize,
    /// Granules with memory behind them.
    pub committed: ByteSize,
    /// Address space held.
    pub reserved: ByteSize,
    /// Freed by the caller, and perhaps still in use by the device.
    pub pending: ByteSize,
    /// What of the active granules is neither live nor pending.
    pub holes: ByteSize,
    /// The longest free span with memory behind it.
    pub largest_free: ByteSize,
}

impl RegionSnapshot {
    /// Checks the identities.
    ///
    /// # Panics
    /// Where one does not hold.
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

    /// A region of which nothing is known, in a forked child.
    pub(super) const fn unknown(region: Region) -> Self {
        const NONE: ByteSize = ByteSize::ZERO;
        Self {
            region,
            requested: NONE,
            live: NONE,
            asleep: NONE,
            cached: NONE,
            active: NONE,
            idle: NONE,
            committed: NONE,
            reserved: NONE,
            pending: NONE,
            holes: NONE,
            largest_free: NONE,
        }
    }
}

/// How many allocations failed, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct AllocFailures {
    /// The arena's limit.
    pub limit: u64,
    /// The device, or the host behind it, had no more memory.
    pub device: u64,
    /// The region had no free span of addresses, or could never have one.
    pub addresses: u64,
    /// The driver failed for another reason.
    pub driver: u64,
}

impl AllocFailures {
    /// Each reason's name, as metrics show it, and its count.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 4] {
        [
            ("limit", self.limit),
            ("device", self.device),
            ("addresses", self.addresses),
            ("driver", self.driver),
        ]
    }

    /// All of them.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.limit + self.device + self.addresses + self.driver
    }
}
