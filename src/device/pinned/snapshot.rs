//! The figures of a pinned pool at one instant, taken under one lock.
//!
//! Plain values in the glossary's words; it calls no driver. What a device arena says of granules
//! holds here of whole segments, the only unit that goes back. A segment on its way counts as
//! active, one on its way out as idle, so that `committed` errs upward.
//!
//! Invariants: `requested <= live`; `live + pending + quarantined + holes = active`;
//! `active + idle = committed`;
//! `page_locked + pageable + arriving = committed`.

use super::books::{Books, Counted};
use super::config::PinnedKind;
use crate::bytes::ByteSize;
use crate::device::driver::Backend;

/// A pool's figures.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedSnapshot {
    /// The pool's name.
    pub name: String,
    /// The driver in use.
    pub backend: Backend,
    /// What kind of memory it was opened for.
    pub kind: PinnedKind,
    /// What callers asked for.
    pub requested: ByteSize,
    /// Blocks held by callers, after rounding.
    pub live: ByteSize,
    /// The most that was live since the pool was opened.
    pub live_peak: ByteSize,
    /// Blocks that were freed while a copy of them was queued, and whose copies are not known to be
    /// complete. They are free again after [`PinnedPool::maintain`](super::PinnedPool::maintain) or
    /// an allocation that needs them.
    pub pending: ByteSize,
    /// Blocks that were freed and of which it cannot be shown that no copy uses them: a wait or the
    /// record of an event failed. They are neither reused nor freed until the process ends.
    pub quarantined: ByteSize,
    /// Segments that hold a block which is not free, or are on their way.
    pub active: ByteSize,
    /// Wholly free segments.
    pub idle: ByteSize,
    /// All segments. For a pool this is also the address space it holds.
    pub committed: ByteSize,
    /// The most that was committed since the pool was opened, without what was on its way.
    pub committed_peak: ByteSize,
    /// What of it is page-locked.
    pub page_locked: ByteSize,
    /// What of it is not.
    pub pageable: ByteSize,
    /// What of it the driver is just asked for.
    pub arriving: ByteSize,
    /// What of the active segments is free.
    pub holes: ByteSize,
    /// What the block indices take of the heap: some 8 KiB a segment, and 40 bytes a block.
    pub metadata: ByteSize,
    /// The longest free span in one segment.
    pub largest_free: ByteSize,
    /// The most that may be committed.
    pub limit: ByteSize,
    /// How much may be idle before any is given back.
    pub high_watermark: ByteSize,
    /// How much stays idle at most, once it is.
    pub low_watermark: ByteSize,
    /// The number of segments.
    pub segments: u64,
    /// Blocks handed out since the pool was opened.
    pub allocs_total: u64,
    /// Blocks freed since then.
    pub frees_total: u64,
    /// Allocations that failed since then, by reason.
    pub alloc_failures_total: PinnedFailures,
    /// Driver calls that gave a segment.
    pub segments_obtained_total: u64,
    /// Bytes of those segments.
    pub obtained_bytes_total: u64,
    /// Driver calls that took a segment back.
    pub segments_given_back_total: u64,
    /// Bytes of those segments.
    pub given_back_bytes_total: u64,
    /// Segments that were to be page-locked and are pageable, as the pool's kind allows.
    pub fallbacks_total: u64,
}

/// The few figures of a pool that a sampler reads at every tick.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PinnedGlance {
    /// Blocks held by callers, after rounding.
    pub live: ByteSize,
    /// All segments.
    pub committed: ByteSize,
    /// Wholly free segments.
    pub idle: ByteSize,
}

/// How many allocations failed, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedFailures {
    /// The pool's limit.
    pub limit: u64,
    /// The host had no more memory.
    pub memory: u64,
    /// The process may not lock so much.
    pub lock_limit: u64,
    /// The number of segments.
    pub segments: u64,
    /// A length or an alignment that no memory has.
    pub size: u64,
    /// The driver failed for another reason.
    pub driver: u64,
}

impl PinnedFailures {
    /// Each reason's name, as metrics show it, and its count.
    #[must_use]
    pub const fn by_reason(&self) -> [(&'static str, u64); 6] {
        [
            ("limit", self.limit),
            ("memory", self.memory),
            ("lock_limit", self.lock_limit),
            ("segments", self.segments),
            ("size", self.size),
            ("driver", self.driver),
        ]
    }

    /// All of them.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.limit + self.memory + self.lock_limit + self.segments + self.size + self.driver
    }
}

/// What a pool is called and was opened with.
#[derive(Clone, Debug)]
pub(super) struct Label {
    pub(super) name: String,
    pub(super) backend: Backend,
    pub(super) kind: PinnedKind,
    pub(super) high_watermark: ByteSize,
    pub(super) low_watermark: ByteSize,
}

impl PinnedSnapshot {
    /// The figures in the books; without books (in a forked child) all are zero.
    pub(super) fn of(label: &Label, books: Option<&Books>) -> Self {
        let counted = books.map(Books::counted).unwrap_or_default();
        let Counted { requested, live, live_peak, idle, committed, committed_peak, .. } = counted;
        let Counted { pending, quarantined, .. } = counted;
        let active = committed - idle;
        Self {
            name: label.name.clone(),
            backend: label.backend,
            kind: label.kind,
            requested: ByteSize::new(requested),
            live: ByteSize::new(live),
            live_peak: ByteSize::new(live_peak),
            pending: ByteSize::new(pending),
            quarantined: ByteSize::new(quarantined),
            active: ByteSize::new(active),
            idle: ByteSize::new(idle),
            committed: ByteSize::new(committed),
            committed_peak: ByteSize::new(committed_peak),
            page_locked: ByteSize::new(counted.page_locked),
            pageable: ByteSize::new(counted.pageable),
            arriving: ByteSize::new(counted.arriving),
            holes: ByteSize::new(active - live - pending - quarantined),
            metadata: ByteSize::new(counted.metadata),
            largest_free: ByteSize::new(counted.largest_free),
            limit: ByteSize::new(counted.limit),
            high_watermark: label.high_watermark,
            low_watermark: label.low_watermark,
            segments: counted.segments,
            allocs_total: counted.totals.allocs,
            frees_total: counted.totals.frees,
            alloc_failures_total: counted.totals.failures,
            segments_obtained_total: counted.totals.segments_obtained,
            obtained_bytes_total: counted.totals.obtained_bytes,
            segments_given_back_total: counted.totals.segments_given_back,
            given_back_bytes_total: counted.totals.given_back_bytes,
            fallbacks_total: counted.totals.fallbacks,
        }
    }

    /// Memory kept that nothing needs: `committed - live`.
    #[must_use]
    pub const fn retained(&self) -> ByteSize {
        self.committed.saturating_sub(self.live)
    }

    /// Checks the identities.
    ///
    /// # Panics
    /// Where one does not hold.
    pub fn validate(&self) {
        let sum = |parts: &[ByteSize]| parts.iter().copied().sum::<ByteSize>();
        assert!(self.requested <= self.live, "requested <= live: {self:?}");
        let taken = sum(&[self.live, self.pending, self.quarantined]);
        let parts = "live + pending + quarantined + holes = active";
        assert_eq!(sum(&[taken, self.holes]), self.active, "{parts}");
        assert_eq!(sum(&[self.active, self.idle]), self.committed, "active + idle = committed");
        let kinds = sum(&[self.page_locked, self.pageable, self.arriving]);
        assert_eq!(kinds, self.committed, "page_locked + pageable + arriving = committed");
        assert!(self.largest_free <= self.committed, "largest_free <= committed: {self:?}");
        assert!(self.live <= self.live_peak, "live <= live_peak");
        let there = self.committed.saturating_sub(self.arriving);
        assert!(there <= self.committed_peak, "committed - arriving <= committed_peak");
        assert!(self.frees_total <= self.allocs_total, "frees_total <= allocs_total");
        let totals = (self.obtained_bytes_total, self.given_back_bytes_total);
        let difference = totals.0.checked_sub(totals.1);
        let arrived = self.committed.saturating_sub(self.arriving).get();
        assert_eq!(difference, Some(arrived), "obtained - given back = committed - arriving");
    }
}
