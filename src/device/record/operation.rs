//! What a recording holds: its header, its operations and what came of each. Plain values.
//!
//! How they are written stands in `text`, how they are read in `parse`.
//!
//! Invariant: nothing here names an address: a place is a region and an offset from its beginning,
//! the same on every machine.

use std::time::Duration;

use super::hash::OperationHash;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::device::compact::{CompactOptions, StopReason};
use crate::device::config::{ArenaConfig, Growth};
use crate::device::driver::Backend;
use crate::device::region::Region;
use crate::device::sleep::{ArenaState, Contents, SleepReport, WakeReport};

/// How the arena of a recording was opened.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The version of the format: 2 is written, and 1 is read as well.
    pub version: u64,
    /// Its name; the first 256 bytes of it.
    pub name: String,
    /// Its driver.
    pub backend: Backend,
    /// Whether work went on after a call that started it.
    pub asynchronous: bool,
    /// What its clock showed.
    pub started: Duration,
    /// The most that it might commit; [`ByteSize::MAX`] for no limit.
    pub limit: ByteSize,
    /// The address space that was asked for.
    pub reserve: ByteSize,
    /// How long idle memory stayed.
    pub decay: DecayTime,
    /// By how much it committed at a time.
    pub growth: Growth,
    /// What it got; `None` where that is not known.
    pub layout: Option<Layout>,
}

impl Header {
    /// How to open an arena as this one was, to replay on; without fronts, history and recorder.
    /// With the same granule, where that is known: a driver whose granularity is larger refuses it
    /// ([`DeviceError::Granule`](crate::device::DeviceError::Granule)).
    #[must_use]
    pub fn config(&self) -> ArenaConfig {
        ArenaConfig {
            limit: self.limit,
            reserve: self.reserve,
            granule: self.layout.map(|layout| layout.granularity),
            decay: self.decay,
            growth: self.growth,
            front: ByteSize::ZERO,
            ..ArenaConfig::new(self.name.clone())
        }
    }
}

/// Granules and address space of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "three facts")]
pub struct Layout {
    /// The smallest unit that is committed: the arena's granule.
    pub granularity: ByteSize,
    /// Address space of each region, in the order of [`Region::ALL`].
    pub reserved: [ByteSize; 2],
}

/// One operation, and what came of it. Numbers of blocks and lanes ascend and are never given
/// twice.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// A block was handed out.
    Alloc {
        /// Its number.
        id: u64,
        /// What was asked for.
        asked: Asked,
        /// Where it is; `None` where that is not known.
        place: Option<Place>,
    },
    /// A block was refused.
    Refuse {
        /// What was asked for.
        asked: Asked,
        /// Why; `None` where that is not known.
        why: Option<Why>,
    },
    /// A block was freed.
    Free {
        /// Its number.
        id: u64,
        /// After which work its memory may be used again.
        after: After,
    },
    /// A buffer was to have another size.
    Resize {
        /// The number of its block, before and after.
        id: u64,
        /// What was asked for.
        bytes: ByteSize,
        /// What came of it.
        outcome: Resized,
    },
    /// A compaction moved a block: a part of what came of the next [`Operation::Compact`].
    Move {
        /// The number of the block.
        id: u64,
        /// Its region.
        region: Region,
        /// Where it was, from the region's beginning.
        from: ByteSize,
        /// Where it is.
        to: ByteSize,
        /// Its size.
        size: ByteSize,
    },
    /// A block is used by one more lane.
    Use {
        /// The number of the block.
        id: u64,
        /// The number of the lane.
        lane: u64,
    },
    /// A block is to stay where it is.
    Pin {
        /// The number of the block.
        id: u64,
    },
    /// A pin was dropped.
    Unpin {
        /// The number of the block.
        id: u64,
    },
    /// A lane was made.
    Lane {
        /// Its number.
        lane: u64,
        /// The number of its stream; one that the recording has not shown is new.
        stream: u64,
    },
    /// A lane is gone, with all that used it.
    LaneEnd {
        /// Its number.
        lane: u64,
    },
    /// A run on a lane ended.
    EndRun {
        /// The number of the lane.
        lane: u64,
        /// Whether the driver did its part.
        done: bool,
    },
    /// The limit was set.
    Limit {
        /// The most that may be committed; [`ByteSize::MAX`] for no limit.
        limit: ByteSize,
    },
    /// The decay time was set.
    DecayTime {
        /// How long idle memory may stay.
        time: DecayTime,
    },
    /// Idle memory was looked at.
    Decay {
        /// The time that was given, since the recording began.
        now: Duration,
        /// What came of it.
        outcome: GivenUp,
    },
    /// Idle memory was given back; a purge is a trim that keeps nothing.
    Trim {
        /// How much might stay committed.
        keep: ByteSize,
        /// What came of it.
        outcome: GivenUp,
    },
    /// The same with growth begun anew.
    Shrink {
        /// What came of it.
        outcome: GivenUp,
    },
    /// A region was compacted.
    Compact {
        /// How.
        options: CompactOptions,
        /// Why it ended.
        stopped: StopReason,
        /// Blocks moved.
        moves: u64,
        /// Their bytes.
        moved: ByteSize,
        /// Moves left out.
        skipped: u64,
    },
    /// Every block that was had by address was freed.
    Reset {
        /// How many.
        blocks: u64,
        /// Their bytes.
        bytes: ByteSize,
    },
    /// The arena was to be closed.
    Close {
        /// What came of it.
        outcome: Closed,
    },
    /// What becomes of the contents of a buffer in a sleep was said.
    Contents {
        /// The number of its block.
        id: u64,
        /// What; `None` for what the options of the sleep say.
        contents: Option<Contents>,
    },
    /// The arena was to fall asleep.
    Sleep {
        /// What was to become of the contents of the stable region.
        stable: Contents,
        /// The same of the dynamic region.
        dynamic: Contents,
        /// What came of it.
        outcome: Fallen,
    },
    /// The arena was woken, by whom it may be: an operation that woke it comes after this, and
    /// found it awake.
    Wake {
        /// What that did; `None` where it failed, and the arena sleeps on.
        woken: Option<WakeReport>,
    },
}

/// A block that was asked for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Asked {
    /// How it was asked for.
    pub kind: BlockKind,
    /// In which region.
    pub region: Region,
    /// How many bytes, before rounding.
    pub bytes: ByteSize,
    /// Its alignment.
    pub align: ByteSize,
    /// The number of the lane that it is taken on.
    pub lane: Option<u64>,
}

/// How a block was asked for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockKind {
    /// By [`DeviceArena::alloc`](crate::device::DeviceArena::alloc), or on a lane.
    #[default]
    Buffer,
    /// By [`DeviceArena::alloc_raw`](crate::device::DeviceArena::alloc_raw).
    Raw,
    /// By [`DeviceArena::reserve`](crate::device::DeviceArena::reserve).
    Reserve,
}

/// Where a block is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a place is these three")]
pub struct Place {
    /// Its region.
    pub region: Region,
    /// From the region's beginning.
    pub offset: ByteSize,
    /// What was given, after rounding.
    pub size: ByteSize,
}

/// Why a block was refused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// The arena's limit.
    Limit,
    /// The device had no more.
    Device,
    /// The region had no free span of addresses.
    Addresses,
    /// No region of the arena could ever hold it.
    TooLarge,
    /// The driver failed.
    Driver,
}

/// After which work the memory of a freed block may be used again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum After {
    /// Of the lanes that used it.
    Lanes,
    /// Nobody said which lanes used it: all work of the device.
    All,
}

/// What came of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resized {
    /// It has its size, where it stood.
    InPlace(Place),
    /// It has its size, elsewhere.
    Moved(Place),
    /// It is as it was.
    Refused(Why),
}

/// What came of giving idle memory back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts")]
pub struct GivenUp {
    /// How much.
    pub released: ByteSize,
    /// Whether the driver did its part.
    pub done: bool,
}

/// What came of a close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Closed {
    /// It is closed.
    Done,
    /// Blocks are live: it works on.
    LiveBlocks,
    /// It is closed; the driver did not take everything back.
    Failed,
}

/// What came of falling asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallen {
    /// It is asleep.
    Asleep(SleepReport),
    /// It is not, or not as it should be.
    Failed {
        /// Why.
        why: Sleepless,
        /// The state that it was in afterwards.
        state: ArenaState,
    },
}

/// Why an arena did not fall asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sleepless {
    /// Leases were held, or buffers lent.
    Leased,
    /// Somebody entered meanwhile, or memory was freed all the time.
    Cancelled,
    /// A stream captured a graph.
    Capturing,
    /// There was no room on the host for the contents, or who was asked for it panicked.
    Budget,
    /// It was not awake.
    State,
    /// The driver failed.
    Driver,
}

/// An operation, where and when.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// Its line, from 1.
    pub line: u64,
    /// How long after the recording began.
    pub at: Duration,
    /// What it was.
    pub operation: Operation,
}

/// The last line of a recording that was brought to an end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Closing {
    /// When, since the recording began.
    pub at: Duration,
    /// How many operations were recorded.
    pub operations: u64,
    /// Whether all came from one thread. If not, the order in which they were booked need not be
    /// that in which places were found.
    pub one_thread: bool,
    /// Why it ended.
    pub ended: Ended,
    /// What came of them.
    pub hash: OperationHash,
}

/// Why a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The arena was gone.
    Gone,
    /// [`Recorder::finish`](super::Recorder::finish) was called.
    Finished,
    /// It was as long as it might be.
    Full,
}
