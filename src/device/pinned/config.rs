//! What a pinned pool is opened with: plain values, resolved by whoever opens it.
//!
//! It reads no environment and knows no driver.
//!
//! Invariants: `low_watermark <= high_watermark` in every pool that was opened; the segment's size
//! is rounded and held within bounds, never refused.

use crate::bytes::ByteSize;
use crate::device::driver::{HOST_GRANULARITY, HostMemory};
use crate::device::error::DeviceError;

/// What a segment has unless told otherwise. 16 MiB: a guess. On a virtual machine mlock took 5 to
/// 12 ms for it, and giving it back 1 ms; what CUDA's calls cost is to be measured.
const SEGMENT: ByteSize = ByteSize::mib(16);

/// The largest segment that several buffers share. With it the driver is asked at most 15 times
/// for one segment (halved down to [`HOST_GRANULARITY`]).
const SEGMENT_MAX: ByteSize = ByteSize::gib(1);

/// Idle memory that stays unless told otherwise: one segment, and four before any is given back.
/// A guess, to be measured.
const LOW_WATERMARK: ByteSize = SEGMENT;
const HIGH_WATERMARK: ByteSize = ByteSize::mib(64);

/// The part of the limit that a shared segment takes at most, so that a small buffer does not hold
/// most of a small pool.
const LIMIT_PART: u64 = 8;

/// The part of a shared segment that a buffer takes at most; a larger one has its own segment, made
/// to measure. So no more than a quarter of a full segment is left over.
const SEGMENT_PART: u64 = 4;

/// What kind of memory a pool is made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PinnedKind {
    /// Page-locked; where that is refused, the allocation fails.
    #[default]
    PageLocked,
    /// Page-locked as far as the system allows, pageable beyond: slower copies, not fewer. Buffers,
    /// and the snapshot, say which they are.
    PageLockedOrPageable,
    /// Pageable.
    Pageable,
}

impl PinnedKind {
    /// The name under which metrics and endpoints show it.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PageLocked => "page_locked",
            Self::PageLockedOrPageable => "page_locked_or_pageable",
            Self::Pageable => "pageable",
        }
    }

    /// What is asked for first.
    pub(super) const fn first(self) -> HostMemory {
        match self {
            Self::PageLocked | Self::PageLockedOrPageable => HostMemory::PageLocked,
            Self::Pageable => HostMemory::Pageable,
        }
    }
}

/// How to open a pinned pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// The name by which errors and figures call it.
    pub name: String,
    /// The most that may be committed at any time, including what is on its way;
    /// [`ByteSize::MAX`] for no limit, zero for none at all.
    pub limit: ByteSize,
    /// What kind of memory.
    pub kind: PinnedKind,
    /// What is obtained from the driver at a time, rounded up to whole 64 KiB, held between that
    /// and 1 GiB, and at most an eighth of the limit. Where the driver has no such piece left,
    /// half of it, a quarter, ... A buffer larger than a quarter of this has a segment of its own.
    pub segment: ByteSize,
    /// How much may be idle before any of it is given back; [`ByteSize::MAX`] for never.
    pub high_watermark: ByteSize,
    /// How much stays idle at most, once the high watermark was passed. Not above that one: who
    /// lowers the high watermark below 16 MiB sets this as well.
    pub low_watermark: ByteSize,
}

impl PinnedConfig {
    /// No limit, page-locked, segments of 16 MiB; above 64 MiB idle, all but 16 MiB go back.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            limit: ByteSize::MAX,
            kind: PinnedKind::default(),
            segment: SEGMENT,
            high_watermark: HIGH_WATERMARK,
            low_watermark: LOW_WATERMARK,
        }
    }

    /// Refuses what cannot be made to fit.
    pub(super) fn check(&self) -> Result<(), DeviceError> {
        if self.low_watermark > self.high_watermark {
            let (low, high) = (self.low_watermark, self.high_watermark);
            return Err(DeviceError::Watermarks { low, high });
        }
        Ok(())
    }

    /// The size of a shared segment, as far as the limit does not matter.
    pub(super) fn segment_size(&self) -> u64 {
        rounded(self.segment.max(HOST_GRANULARITY).min(SEGMENT_MAX).get()).unwrap_or(GRANULARITY)
    }
}

const GRANULARITY: u64 = HOST_GRANULARITY.get();

/// Up to whole granules of host memory; `None` beyond the numbers.
pub(super) const fn rounded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(GRANULARITY)
}

/// How much to obtain for a block of `need` bytes (whole granules), with `headroom >= need` left
/// under `limit`; `segment` is the size of a shared one.
pub(super) fn segment_for(need: u64, segment: u64, limit: u64, headroom: u64) -> u64 {
    debug_assert!(need <= headroom, "{need} in {headroom}");
    let part = rounded(limit / LIMIT_PART).unwrap_or(u64::MAX);
    let shared = segment.min(part).max(GRANULARITY);
    let whole = if need > shared / SEGMENT_PART { need } else { shared };
    whole.min(headroom - headroom % GRANULARITY).max(need)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segment_holds_the_block_fits_the_headroom_and_wastes_no_quarter_of_what_it_holds() {
        const MIB: u64 = 1 << 20;
        let sized = |need, headroom| segment_for(need, 16 * MIB, u64::MAX, headroom);
        assert_eq!(sized(GRANULARITY, u64::MAX), 16 * MIB);
        assert_eq!(sized(4 * MIB, u64::MAX), 16 * MIB);
        assert_eq!(sized(4 * MIB + GRANULARITY, u64::MAX), 4 * MIB + GRANULARITY);
        assert_eq!(sized(40 * MIB, u64::MAX), 40 * MIB);
        assert_eq!(sized(GRANULARITY, MIB + 1), MIB);
        assert_eq!(segment_for(GRANULARITY, 16 * MIB, 4 * MIB, 4 * MIB), MIB / 2);
        assert_eq!(segment_for(GRANULARITY, 16 * MIB, GRANULARITY, GRANULARITY), GRANULARITY);
    }

    #[test]
    fn a_segments_size_is_made_to_fit() {
        for (written, meant) in [
            (ByteSize::ZERO, HOST_GRANULARITY),
            (ByteSize::new(1), HOST_GRANULARITY),
            (ByteSize::kib(65), ByteSize::kib(128)),
            (ByteSize::mib(16), ByteSize::mib(16)),
            (ByteSize::MAX, ByteSize::gib(1)),
        ] {
            let config = PinnedConfig { segment: written, ..PinnedConfig::new("a") };
            assert_eq!(config.segment_size(), meant.get(), "{written}");
        }
    }
}
