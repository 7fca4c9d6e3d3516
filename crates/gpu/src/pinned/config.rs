//! The configuration of a pinned pool: plain values.
//!
//! This module reads no environment and knows no driver.
//!
//! Invariants: `low_watermark <= high_watermark` in every open pool; the segment size is rounded
//! and clamped, never rejected.

use crate::driver::{HOST_GRANULARITY, HostMemory};
use crate::types::{ArenaConfig, Growth};
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The default segment size. 16 MiB: a guess. On a virtual machine mlock took 5 to 12 ms for it,
/// and releasing it 1 ms; the cost of CUDA's calls is to be measured.
const SEGMENT: ByteSize = ByteSize::mib(16);

/// The largest segment that several buffers share.
const SEGMENT_MAX: ByteSize = ByteSize::gib(1);

/// The defaults of idle memory that stays: one segment, or four before any is released. A guess, to
/// be measured.
const LOW_WATERMARK: ByteSize = SEGMENT;
const HIGH_WATERMARK: ByteSize = ByteSize::mib(64);

/// The divisor of the limit for the maximum size of a shared segment, so that a small buffer does
/// not hold most of a small pool.
const LIMIT_PART: u64 = 8;

lowtide_core::named_enum! {
    /// The kind of memory of a pool.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
    #[non_exhaustive]
    pub enum PinnedKind {
        /// Page-locked. The first allocation of a segment fails if the segment cannot be locked: on
        /// the host driver a process without `CAP_IPC_LOCK` may lock `RLIMIT_MEMLOCK` bytes.
        #[default]
        PageLocked = "page_locked",
        /// Page-locked as far as the system allows, then pageable, with slower copies. Buffers and
        /// the snapshot report their kind.
        PageLockedOrPageable = "page_locked_or_pageable",
        /// Pageable.
        Pageable = "pageable",
    }
}

impl PinnedKind {
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
    /// GiB, and at most an eighth of the limit. A larger buffer has its own segment of its size,
    /// and so has each buffer if the driver is out of memory for more.
    pub segment: ByteSize,
    /// Time that idle memory stays, as in [`ArenaConfig::decay`].
    pub decay: DecayTime,
    /// Idle memory above which some is released immediately; [`ByteSize::MAX`] for never.
    pub high_watermark: ByteSize,
    /// Idle memory that stays after such a release. At most the high watermark: if you set that
    /// below 16 MiB, set this too.
    pub low_watermark: ByteSize,
}

impl PinnedConfig {
    /// Creates a configuration with the defaults: no limit, page-locked, segments of 16 MiB, decay
    /// of 10 s; above 64 MiB idle, all but 16 MiB are released.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            limit: ByteSize::MAX,
            kind: PinnedKind::default(),
            segment: SEGMENT,
            decay: ArenaConfig::new("").decay,
            high_watermark: HIGH_WATERMARK,
            low_watermark: LOW_WATERMARK,
        }
    }

    /// Returns the configuration of the pool's arena. It grows by segments and has no caches,
    /// because its blocks are raw.
    pub(super) fn arena(&self) -> ArenaConfig {
        let segment = self.segment_size();
        ArenaConfig {
            limit: self.limit,
            reserve: ByteSize::new(1 << 62), // only offsets: the driver allocates segments
            granule: Some(HOST_GRANULARITY),
            decay: self.decay,
            growth: Growth::NextPowerOfTwo {
                initial: segment,
                after_shrink: segment,
                cap: segment,
            },
            thread_cache: ByteSize::ZERO,
            ..ArenaConfig::new(self.name.clone())
        }
    }

    /// Returns the size of a shared segment.
    pub(super) fn segment_size(&self) -> ByteSize {
        let part = ByteSize::new(self.limit.get() / LIMIT_PART);
        let segment = self.segment.min(SEGMENT_MAX).min(part).max(HOST_GRANULARITY);
        segment.next_multiple_of(HOST_GRANULARITY).unwrap_or(HOST_GRANULARITY)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_segments_size_is_made_to_fit() {
        for (written, limit, meant) in [
            (ByteSize::ZERO, ByteSize::MAX, HOST_GRANULARITY),
            (ByteSize::new(1), ByteSize::MAX, HOST_GRANULARITY),
            (ByteSize::kib(65), ByteSize::MAX, ByteSize::kib(128)),
            (ByteSize::mib(16), ByteSize::MAX, ByteSize::mib(16)),
            (ByteSize::MAX, ByteSize::MAX, ByteSize::gib(1)),
            (ByteSize::mib(16), ByteSize::mib(4), ByteSize::kib(512)),
            (ByteSize::mib(16), ByteSize::ZERO, HOST_GRANULARITY),
        ] {
            let config = PinnedConfig { segment: written, limit, ..PinnedConfig::new("a") };
            assert_eq!(config.segment_size(), meant, "{written}");
        }
    }
}
