//! What an arena is opened with: plain values, resolved by whoever opens it.
//!
//! It reads no environment and knows no profile.
//!
//! Invariant: every value is valid; what does not fit the driver is rounded or halved at open.

use std::time::Duration;

use super::record::Recorder;
use super::sleep::SleepConfig;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;

/// Address space of a region unless told otherwise. 512 GiB: above the memory of any one GPU of
/// today (288 GiB), and 1/256 of the 128 TiB that an `x86_64` process has.
const RESERVE: ByteSize = ByteSize::gib(512);

/// How long idle memory stays unless told otherwise: as long as jemalloc's `dirty_decay_ms`, 10 s.
const DECAY: DecayTime = DecayTime::Within(Duration::from_secs(10));

/// What a thread's front keeps unless told otherwise: two blocks of 8 MiB. A guess.
const FRONT: ByteSize = ByteSize::mib(16);

/// By how much an arena commits at a time, when it needs memory for a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum Growth {
    /// The granules that the block needs and no more.
    #[default]
    SameAsRequested,
    /// Steps that double, as ONNX Runtime's `kNextPowerOfTwo`: fewer driver calls, more memory that
    /// nothing needs. What is committed beyond the block is idle and decays.
    NextPowerOfTwo {
        /// The first step.
        initial: ByteSize,
        /// The first step after a shrink.
        after_shrink: ByteSize,
        /// No step is larger; a block larger than this gets what it needs and no more. Zero: as
        /// [`Growth::SameAsRequested`].
        cap: ByteSize,
    },
}

/// How to open a device arena.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArenaConfig {
    /// The name by which metrics and errors call it.
    pub name: String,
    /// The most that may be committed at any time, both regions together, including what is being
    /// committed; [`ByteSize::MAX`] for no limit, zero for none at all.
    pub limit: ByteSize,
    /// Address space for each of the two regions, rounded up to whole granules; an eighth of it and
    /// a granule more for small blocks. Where the driver refuses that, an eighth of the largest
    /// half, quarter, ... of it that it accepts. Of a driver that gives memory in segments no
    /// addresses are reserved: this is the largest block then.
    pub reserve: ByteSize,
    /// The smallest unit that is committed and given back, for drivers whose calls cost by the
    /// number of units and not by bytes: a power of two and a multiple of the driver's granularity,
    /// which it is where nothing else is said. In larger units fewer calls are made, and a live
    /// block keeps more committed.
    pub granule: Option<ByteSize>,
    /// How long idle memory stays: nothing that was used within it is given back by a decay, and
    /// nothing stays more than a sixteenth longer. jemalloc's curve, which gives half of it back by
    /// half of the time, would cost driver calls in each pause; these are dear on a device.
    pub decay: DecayTime,
    /// By how much it commits at a time.
    pub growth: Growth,
    /// Free blocks of hot sizes that each thread may keep for its next request, out of reach of
    /// other threads until memory is short or they cool; zero for none. Nothing is kept where idle
    /// memory is given back at once. On a driver whose work goes on after its calls return it is
    /// the lanes that keep something, each what it alone used; of more than eight lanes each keeps
    /// less, so that all together keep about as much as eight.
    pub front: ByteSize,
    /// How many of its last events the arena keeps for a [map](super::DeviceArena::map); none by
    /// default, 262,144 at most, 40 bytes each. Where some are kept, no front is.
    pub history: usize,
    /// When the arena falls asleep by itself, and how it wakes.
    pub sleep: SleepConfig,
    /// Writes down what the arena does; none by default. One arena for each recorder. Where there
    /// is one, no front is.
    pub recorder: Option<Recorder>,
}

impl ArenaConfig {
    /// No limit, 512 GiB of addresses a region, idle memory given back within 10 s, no more
    /// committed than is asked for, 16 MiB kept for each thread, no events, no recorder, never
    /// asleep by itself.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            limit: ByteSize::MAX,
            reserve: RESERVE,
            granule: None,
            decay: DECAY,
            growth: Growth::SameAsRequested,
            front: FRONT,
            history: 0,
            sleep: SleepConfig::default(),
            recorder: None,
        }
    }
}
