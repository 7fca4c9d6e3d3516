//! The figures of a pinned pool: those of its arena, and those that the arena does not know.
//!
//! Plain values; this module calls no driver. The parts are read one after the other, so calls of
//! other threads may be included in some and not in others.
//!
//! Invariants, without such calls: `page_locked + pageable = arena.committed`;
//! `pending + quarantined <= arena.live`.

use super::config::PinnedKind;
use crate::types::snapshot::ArenaSnapshot;
use lowtide_core::bytes::ByteSize;

/// The figures of a pinned pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PinnedSnapshot {
    /// The figures of the pool's arena. Its live blocks are those of buffers, and the pending and
    /// quarantined ones.
    pub arena: ArenaSnapshot,
    /// The kind of memory that the pool was opened for.
    pub kind: PinnedKind,
    /// Bytes of blocks whose buffers were dropped while a copy was queued that is not known to be
    /// complete. They become free in [`PinnedPool::maintain`](super::PinnedPool::maintain), or in
    /// an allocation that needs them.
    pub pending: ByteSize,
    /// Bytes of blocks whose buffers were dropped, and that a copy may still use, because a wait or
    /// the recording of an event failed. They are neither reused nor freed until the process ends.
    pub quarantined: ByteSize,
    /// Committed bytes that are page-locked.
    pub page_locked: ByteSize,
    /// Committed bytes that are pageable.
    pub pageable: ByteSize,
    /// The number of segments that are pageable because locking failed, as the pool's kind allows.
    pub fallbacks_total: u64,
    /// Idle memory above which some is released.
    pub high_watermark: ByteSize,
    /// Idle memory that stays after a release.
    pub low_watermark: ByteSize,
}

impl PinnedSnapshot {
    /// Returns the bytes of blocks held by callers, after rounding.
    #[must_use]
    pub const fn live(&self) -> ByteSize {
        self.arena.live.saturating_sub(self.pending).saturating_sub(self.quarantined)
    }

    /// Checks the identities, which hold if no other thread uses the pool.
    ///
    /// # Panics
    /// If an identity is violated.
    pub fn validate(&self) {
        self.arena.validate();
        let committed = self.page_locked.saturating_add(self.pageable);
        assert_eq!(committed, self.arena.committed, "page_locked + pageable = committed");
        let unfinished = self.pending.saturating_add(self.quarantined);
        assert!(unfinished <= self.arena.live, "pending + quarantined <= live: {self:?}");
    }
}
