//! The configuration of a pinned pool: plain values.
//!
//! It reads no environment and knows no driver.
//!
//! Invariants: `low_watermark <= high_watermark` in every open pool; the segment size is rounded
//! and clamped, never rejected.

use crate::driver::{HOST_GRANULARITY, HostMemory};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

/// The default segment size. 16 MiB: a guess. On a virtual machine mlock took 5 to 12 ms for it,
/// and releasing it 1 ms; the cost of CUDA's calls is to be measured.
const SEGMENT: ByteSize = ByteSize::mib(16);

/// The largest segment that several buffers share. It bounds the driver calls for one segment to 15
/// (halved down to [`HOST_GRANULARITY`]).
const SEGMENT_MAX: ByteSize = ByteSize::gib(1);

/// The default of idle memory that stays: one segment, and four before any is released. A guess, to
/// be measured.
const LOW_WATERMARK: ByteSize = SEGMENT;
const HIGH_WATERMARK: ByteSize = ByteSize::mib(64);

/// The part of the limit that a shared segment takes at most, so that a small buffer does not hold
/// most of a small pool.
const LIMIT_PART: u64 = 8;

/// The part of a shared segment that a buffer takes at most; a larger one has its own segment, made
/// to measure. So no more than a quarter of a full segment is left over.
const SEGMENT_PART: u64 = 4;

/// The kind of memory of a pool.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum PinnedKind {
    /// Page-locked; the allocation fails if locking fails.
    #[default]
    PageLocked,
    /// Page-locked as far as the system allows, then pageable, with slower copies. Buffers and the
    /// snapshot report their kind.
    PageLockedOrPageable,
    /// Pageable.
    Pageable,
}

impl PinnedKind {
    /// Returns its name in metrics and endpoints.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::PageLocked => "page_locked",
            Self::PageLockedOrPageable => "page_locked_or_pageable",
            Self::Pageable => "pageable",
        }
    }

    /// Returns the kind of memory requested first.
    pub(super) const fn first(self) -> HostMemory {
        match self {
            Self::PageLocked | Self::PageLockedOrPageable => HostMemory::PageLocked,
            Self::Pageable => HostMemory::Pageable,
        }
    }
}

/// The configuration of a pinned pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PinnedConfig {
    /// The name in errors and metrics.
    pub name: String,
    /// The maximum of committed memory, including allocations in progress; [`ByteSize::MAX`] for no
    /// limit, zero for no memory.
    pub limit: ByteSize,
    /// The kind of memory.
    pub kind: PinnedKind,
    /// The size of one driver allocation, rounded up to whole 64 KiB, clamped between 64 KiB and 1
    /// GiB, and at most an eighth of the limit. If the driver is out of memory for it, a half, a
    /// quarter, ... A buffer larger than a quarter of it gets its own segment.
    pub segment: ByteSize,
    /// Idle memory above which some is released; [`ByteSize::MAX`] for never.
    pub high_watermark: ByteSize,
    /// Idle memory that stays after a release. At most the high watermark: if you set that below 16
    /// MiB, set this too.
    pub low_watermark: ByteSize,
}

impl PinnedConfig {
    /// Creates a configuration with the defaults: no limit, page-locked, segments of 16 MiB; above
    /// 64 MiB idle, all but 16 MiB are released.
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

    /// Rejects invalid values.
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

/// Returns the bytes to allocate for a block of `need` bytes (whole granules), with
/// `headroom >= need` left under `limit`; `segment` is the size of a shared one.
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
