//! The configuration of an arena: plain values.
//!
//! It reads no environment and knows no profile.
//!
//! Invariant: every value is valid; values that do not fit the driver are rounded or halved at
//! open.

use std::time::Duration;

use crate::observe::record::Recorder;
use crate::types::sleep::SleepConfig;
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The default address space of a region. 512 GiB: more than the memory of any current GPU (288
/// GiB), and 1/256 of the 128 TiB that an `x86_64` process has.
const RESERVE: ByteSize = ByteSize::gib(512);

/// The default decay time: jemalloc's `dirty_decay_ms`, 10 s.
const DECAY: DecayTime = DecayTime::Within(Duration::from_secs(10));

/// The default size of a thread cache: two blocks of 8 MiB. A guess.
const FRONT: ByteSize = ByteSize::mib(16);

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

/// The configuration of a device arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// The name in metrics and errors.
    pub name: String,
    /// The maximum of committed memory, over both regions and including commits in progress;
    /// [`ByteSize::MAX`] for no limit, zero for no memory.
    pub limit: ByteSize,
    /// Address space of each of the two regions, rounded up to whole granules; small blocks get an
    /// additional eighth and one granule. If the driver refuses that, an eighth of the largest
    /// half, quarter, ... that it accepts. On a driver that allocates segments no addresses are
    /// reserved, and this is the maximum block size.
    pub reserve: ByteSize,
    /// The smallest unit that is committed and released, for drivers whose calls cost per unit and
    /// not per byte: a power of two and a multiple of the driver's granularity. Default: that
    /// granularity. Larger units need fewer calls, but a live block keeps more memory committed.
    pub granule: Option<ByteSize>,
    /// Time that idle memory stays. Memory used within this time is not released, and idle memory
    /// stays at most a sixteenth longer. jemalloc's curve, which releases half of the memory by
    /// half of the time, would make driver calls in each pause; on a device these are expensive.
    pub decay: DecayTime,
    /// The amount to commit at a time.
    pub growth: Growth,
    /// Bytes of free blocks of frequent sizes that each thread may cache for its next allocations.
    /// Other threads cannot use them until memory is short or they age; zero for no cache. Nothing
    /// is cached if idle memory is released immediately. On a driver with asynchronous work each
    /// lane has a cache instead, for blocks that only it used; with more than eight lanes each
    /// caches less, so that all together keep about as much as eight.
    pub thread_cache: ByteSize,
    /// The number of past events to keep for a [map](crate::DeviceArena::map): 0 by default, at
    /// most 262,144, 40 bytes each. Thread caches are off if events are kept.
    pub history: usize,
    /// When the arena sleeps without a call, and how it wakes.
    pub sleep: SleepConfig,
    /// Records the operations of the arena; none by default. A recorder serves one arena. Thread
    /// caches are off with a recorder.
    pub recorder: Option<Recorder>,
}

impl ArenaConfig {
    /// Creates a configuration with the defaults: no limit, 512 GiB of addresses per region, decay
    /// of 10 s, no growth beyond the request, 16 MiB thread cache, no events, no recorder, no idle
    /// sleep.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            limit: ByteSize::MAX,
            reserve: RESERVE,
            granule: None,
            decay: DECAY,
            growth: Growth::SameAsRequested,
            thread_cache: FRONT,
            history: 0,
            sleep: SleepConfig::default(),
            recorder: None,
        }
    }
}
