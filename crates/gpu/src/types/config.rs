//! Settings of an arena's state, and the defaults for reading a recording without settings.

use std::time::Duration;

use crate::types::sleep::SleepConfig;
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The address space of a region if neither the device's memory nor a limit is known, and in the
/// reading of a recording without one. 512 GiB: more than the memory of any current GPU (288 GiB),
/// and 1/256 of the 128 TiB that an `x86_64` process has.
pub(crate) const RESERVE: ByteSize = ByteSize::gib(512);

/// The default decay time: jemalloc's `dirty_decay_ms`, 10 s.
pub(crate) const DECAY: DecayTime = DecayTime::Within(Duration::from_secs(10));

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

/// The settings of an arena's state.
#[derive(Clone, Debug)]
pub(crate) struct StateConfig {
    pub(crate) name: String,
    pub(crate) limit: ByteSize,
    pub(crate) handle_max: ByteSize,
    pub(crate) handles_min: u32,
    pub(crate) decay: DecayTime,
    pub(crate) growth: Growth,
    pub(crate) sleep: SleepConfig,
}
