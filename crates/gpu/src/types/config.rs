//! The configuration of an arena: plain values.
//!
//! This module reads no environment and knows no profile. The first line of a recording holds a
//! part of the configuration.
//!
//! Invariant: every value is valid; values that do not fit the driver are rounded or halved at
//! open.

use std::time::Duration;

use crate::record::Recorder;
use crate::types::sleep::SleepConfig;
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The default decay time: jemalloc's `dirty_decay_ms`, 10 s.
const DECAY: DecayTime = DecayTime::Within(Duration::from_secs(10));

/// The default maximum size of a handle.
const HANDLE_MAX: ByteSize = ByteSize::mib(64);

/// The default minimum number of handles.
const HANDLES_MIN: u32 = 64;

/// The default size of a thread cache: one block of each size from 1 to 128 MiB that is a power of
/// two, as in a benchmark of cuArena.
const THREAD_CACHE: ByteSize = ByteSize::mib(256);

/// The configuration of a device arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// The name in metrics and errors.
    pub name: String,
    /// The maximum of committed memory, over both regions and including commits in progress;
    /// [`ByteSize::MAX`] for no limit, zero for no memory.
    pub limit: ByteSize,
    /// Address space of each of the two regions, rounded up to whole granules; small blocks get an
    /// additional eighth and one granule. [`ByteSize::MAX`] (default): twice the device's memory or
    /// three times `limit` at open, whichever is less, but at least 4 GiB. If the driver refuses
    /// that, less for both regions: as much as leaves some addresses to others, first down to the
    /// device's memory. On a driver that allocates segments no addresses are reserved, and this is
    /// the maximum block size.
    pub reserve: ByteSize,
    /// The smallest unit that is committed and released, for drivers whose calls cost per unit and
    /// not per byte: a power of two and a multiple of the driver's granularity. Default: that
    /// granularity. Larger units need fewer calls, but a live block keeps more memory committed.
    pub granule: Option<ByteSize>,
    /// The maximum size of a handle, which a driver with handles allocates and releases as a whole
    /// ([`Capabilities::handles`](crate::driver::Capabilities::handles)): the cost of a commit
    /// grows with the number of handles. Blocks that cover several granules, and adjoining blocks
    /// on a wake, get handles of more than one granule. Default: 64 MiB, the maximum of NVIDIA
    /// DALI. Rounded down to whole granules; below two granules, 0 included, each handle is one
    /// granule. Drivers without handles, such as the host driver, or without remaps ignore it.
    pub handle_max: ByteSize,
    /// The minimum number of handles: a handle has at most `committed / handles_min` bytes. With
    /// 64, handles reach 64 MiB only when 4 GiB are committed. An idle granule in a handle in use
    /// cannot leave, so a few large handles would waste much of a small arena. Default: 64. 0 and
    /// 1: no such limit. Drivers without handles or remaps ignore it.
    pub handles_min: u32,
    /// Time that idle memory stays. Memory used within this time is not released, and idle memory
    /// stays at most a sixteenth longer. jemalloc's curve, which releases half of the memory by
    /// half of the time, would make driver calls in each pause; on a device these are expensive.
    pub decay: DecayTime,
    /// The amount to commit at a time.
    pub growth: Growth,
    /// Bytes of free blocks of frequent sizes that each thread may cache for its next allocations,
    /// at most 1,024 blocks; zero for no cache. All caches are emptied before memory is committed,
    /// and a cache without the requested block is emptied if it holds more than about a hundredth
    /// of the live memory; neither if at most a quarter of this size is live, or half of the live
    /// memory is cached. Blocks that were not needed between two decays leave the cache. Nothing is
    /// cached if idle memory is released immediately. On a driver with asynchronous work each lane
    /// has a cache instead, for blocks that only it used; a commit for another lane empties it only
    /// if all caches together hold more than this size. With more than eight lanes each caches
    /// less, so that all together keep about as much as eight.
    pub thread_cache: ByteSize,
    /// When the arena sleeps without a call, and how it wakes.
    pub sleep: SleepConfig,
    /// Records the events of the arena; none by default. A recorder serves one arena. Thread
    /// caches are off with a recorder.
    pub recorder: Option<Recorder>,
}

impl ArenaConfig {
    /// Creates a configuration with the defaults: no limit, addresses by the device's memory,
    /// handles of at most 64 MiB, decay of 10 s, no growth beyond the request, 256 MiB thread
    /// cache, no recorder, no idle sleep.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            limit: ByteSize::MAX,
            reserve: ByteSize::MAX,
            granule: None,
            handle_max: HANDLE_MAX,
            handles_min: HANDLES_MIN,
            decay: DECAY,
            growth: Growth::SameAsRequested,
            thread_cache: THREAD_CACHE,
            sleep: SleepConfig::default(),
            recorder: None,
        }
    }
}

/// The amount that an arena commits at a time for a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// Only the granules that the block needs.
    #[default]
    SameAsRequested,
    /// Doubling steps, like ONNX Runtime's `kNextPowerOfTwo`: fewer driver calls, more unused
    /// memory. Memory committed beyond the block is idle and decays.
    NextPowerOfTwo {
        /// The first step.
        initial: ByteSize,
        /// The first step after a shrink.
        after_shrink: ByteSize,
        /// The maximum step; a larger block gets only the granules that it needs. Zero equals
        /// [`Growth::SameAsRequested`].
        cap: ByteSize,
    },
}

/// Returns a decay time in nanoseconds, at most 584 years; `None` for never.
pub(crate) fn decay_nanos(time: DecayTime) -> Option<u64> {
    match time {
        DecayTime::AtOnce => Some(0),
        DecayTime::Within(time) => Some(u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)),
        DecayTime::Never => None,
    }
}
