//! The figures of a pinned pool at one instant, taken under one lock.
//!
//! Plain values in the terms of the glossary; it calls no driver. The meaning of granules in a
//! device arena applies here to whole segments, the only unit that is released. An arriving segment
//! counts as active, a leaving one as idle, so `committed` errs upward.
//!
//! Invariants: `requested <= live`; `live + pending + quarantined + holes = active`;
//! `active + idle = committed`; `page_locked + pageable + arriving = committed`.

use super::books::{Counted, PinnedBooks};
use super::config::PinnedKind;
use crate::driver::Backend;
use lowtide_core::bytes::ByteSize;

/// The figures of a pinned pool.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PinnedSnapshot {
    /// The pool's name.
    pub name: String,
    /// The driver's backend.
    pub backend: Backend,
    /// The kind of memory that it was opened for.
    pub kind: PinnedKind,
    /// Bytes that callers requested.
    pub requested: ByteSize,
    /// Bytes of blocks held by callers, after rounding.
    pub live: ByteSize,
    /// The maximum of `live` since the pool was opened.
    pub live_peak: ByteSize,
    /// Bytes of blocks freed while a copy of them was queued that is not known to be complete. They
    /// become free in [`PinnedPool::maintain`](super::PinnedPool::maintain), or in an allocation
    /// that needs them.
    pub pending: ByteSize,
    /// Bytes of freed blocks that a copy may still use, because a wait or the recording of an event
    /// failed. They are neither reused nor freed until the process ends.
    pub quarantined: ByteSize,
    /// Bytes of segments with a block that is not free, and of arriving segments.
    pub active: ByteSize,
    /// Bytes of wholly free segments.
    pub idle: ByteSize,
    /// Bytes of all segments, which are also the pool's address space.
    pub committed: ByteSize,
    /// The maximum of `committed` since the pool was opened, without arriving segments.
    pub committed_peak: ByteSize,
    /// Committed bytes that are page-locked.
    pub page_locked: ByteSize,
    /// Committed bytes that are pageable.
    pub pageable: ByteSize,
    /// Committed bytes whose driver call is in progress.
    pub arriving: ByteSize,
    /// Free bytes of active segments.
    pub holes: ByteSize,
    /// Bytes of the block indexes: about 8 KiB per segment, and 40 bytes per block.
    pub metadata: ByteSize,
    /// The longest free span in one segment.
    pub largest_free: ByteSize,
    /// The limit of committed memory.
    pub limit: ByteSize,
    /// Idle memory above which some is released.
    pub high_watermark: ByteSize,
    /// Idle memory that stays after a release.
    pub low_watermark: ByteSize,
    /// The number of segments.
    pub segments: u64,
    /// The number of blocks allocated since the pool was opened.
    pub allocs_total: u64,
    /// The number of blocks freed since then.
    pub frees_total: u64,
    /// Failed allocations since then, by reason.
    pub alloc_failures_total: PinnedFailures,
    /// The number of driver calls that allocated a segment.
    pub segments_obtained_total: u64,
    /// Bytes of those segments.
    pub obtained_bytes_total: u64,
    /// The number of driver calls that released a segment.
    pub segments_released_total: u64,
    /// Bytes of those segments.
    pub released_bytes_total: u64,
    /// The number of segments that are pageable because locking failed, as the pool's kind allows.
    pub fallbacks_total: u64,
}

/// The figures of a pool for frequent sampling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct PinnedGlance {
    /// Bytes of blocks held by callers, after rounding.
    pub live: ByteSize,
    /// Bytes of all segments.
    pub committed: ByteSize,
    /// Bytes of wholly free segments.
    pub idle: ByteSize,
}

/// The number of failed allocations, by reason.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PinnedFailures {
    /// The pool's limit was reached.
    pub limit: u64,
    /// The host was out of memory.
    pub memory: u64,
    /// The process may not lock that much memory.
    pub lock_limit: u64,
    /// The pool had the maximum number of segments.
    pub segments: u64,
    /// The length or the alignment is not supported.
    pub size: u64,
    /// The driver failed for another reason.
    pub driver: u64,
}

impl PinnedFailures {
    /// Returns each reason's name in metrics, and its count.
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

    /// Returns the sum of all reasons.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.limit + self.memory + self.lock_limit + self.segments + self.size + self.driver
    }
}

/// The name and options of a pool.
#[derive(Clone, Debug)]
pub(super) struct Label {
    pub(super) name: String,
    pub(super) backend: Backend,
    pub(super) kind: PinnedKind,
    pub(super) high_watermark: ByteSize,
    pub(super) low_watermark: ByteSize,
}

impl PinnedSnapshot {
    /// Creates the figures from the accounting; all zero without it (in a forked child).
    pub(super) fn of(label: &Label, books: Option<&PinnedBooks>) -> Self {
        let counted = books.map(PinnedBooks::counted).unwrap_or_default();
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
            segments_released_total: counted.totals.segments_given_back,
            released_bytes_total: counted.totals.given_back_bytes,
            fallbacks_total: counted.totals.fallbacks,
        }
    }

    /// Returns the unneeded memory: `committed - live`.
    #[must_use]
    pub const fn retained(&self) -> ByteSize {
        self.committed.saturating_sub(self.live)
    }

    /// Checks the identities.
    ///
    /// # Panics
    /// If an identity is violated.
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
        let totals = (self.obtained_bytes_total, self.released_bytes_total);
        let difference = totals.0.checked_sub(totals.1);
        let arrived = self.committed.saturating_sub(self.arriving).get();
        assert_eq!(difference, Some(arrived), "obtained - given back = committed - arriving");
    }
}
