//! The contents of a recording: its header, its operations and their outcomes. Plain values.
//!
//! `format` writes and reads them.
//!
//! Invariant: no value contains an address: a place is a region and an offset from its start, the
//! same on every machine.

use std::time::Duration;

use super::hash::OperationHash;
use crate::driver::Backend;
pub use crate::state::event::{After, BlockKind};
use crate::state::region::Region;
use crate::types::compact::{CompactOptions, StopReason};
use crate::types::config::Growth;
use crate::types::sleep::{Contents, SleepReport, SleepState, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;

/// The settings of the recorded arena.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Header {
    /// The version of the format: 2 is written, and 1 can be read as well.
    pub version: u64,
    /// The arena's name, truncated to 256 bytes.
    pub name: String,
    /// The driver's backend.
    pub backend: Backend,
    /// `true` if the driver has asynchronous work.
    pub asynchronous: bool,
    /// The time of the arena's clock at the open.
    pub started: Duration,
    /// The limit of committed memory; [`ByteSize::MAX`] for none.
    pub limit: ByteSize,
    /// The requested address space.
    pub reserve: ByteSize,
    /// The decay time of idle memory.
    pub decay: DecayTime,
    /// The growth policy of commits.
    pub growth: Growth,
    /// The granularity and the reserved address space; `None` if unknown.
    pub layout: Option<Layout>,
}

/// The granule and the address space of an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "three facts")]
pub struct Layout {
    /// The smallest unit that is committed: the arena's granule.
    pub granularity: ByteSize,
    /// The address space of each region, in the order of [`Region::ALL`].
    pub reserved: [ByteSize; 2],
}

/// An operation with its outcome. Numbers of blocks and lanes ascend and are never reused.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Operation {
    /// A block was allocated.
    Alloc {
        /// The number of the block.
        id: u64,
        /// The request.
        asked: Asked,
        /// The place; `None` if unknown.
        place: Option<Place>,
    },
    /// A request for a block failed.
    Refuse {
        /// The request.
        asked: Asked,
        /// The reason; `None` if unknown.
        why: Option<Why>,
    },
    /// A block was freed.
    Free {
        /// The number of the block.
        id: u64,
        /// The work that must complete before its memory is reused.
        after: After,
    },
    /// A buffer was resized.
    Resize {
        /// The number of its block, which stays the same.
        id: u64,
        /// The requested size.
        bytes: ByteSize,
        /// The outcome.
        outcome: Resized,
    },
    /// A compaction moved a block: a part of the outcome of the next [`Operation::Compact`].
    Move {
        /// The number of the block.
        id: u64,
        /// Its region.
        region: Region,
        /// The old offset from the region's start.
        from: ByteSize,
        /// The new offset.
        to: ByteSize,
        /// Its size.
        size: ByteSize,
    },
    /// Another lane uses a block.
    Use {
        /// The number of the block.
        id: u64,
        /// The number of the lane.
        lane: u64,
    },
    /// A block was pinned to its place.
    Pin {
        /// The number of the block.
        id: u64,
    },
    /// A pin was dropped.
    Unpin {
        /// The number of the block.
        id: u64,
    },
    /// A lane was created.
    Lane {
        /// The number of the lane.
        lane: u64,
        /// The number of its stream; a number that is new in the recording is a new stream.
        stream: u64,
    },
    /// A lane and everything that used it were dropped.
    LaneEnd {
        /// The number of the lane.
        lane: u64,
    },
    /// A run on a lane ended.
    EndRun {
        /// The number of the lane.
        lane: u64,
        /// `true` if the driver calls succeeded.
        done: bool,
    },
    /// The limit was set.
    Limit {
        /// The limit of committed memory; [`ByteSize::MAX`] for none.
        limit: ByteSize,
    },
    /// The decay time was set.
    DecayTime {
        /// The decay time of idle memory.
        time: DecayTime,
    },
    /// A decay pass ran.
    Decay {
        /// The time of the pass, since the start of the recording.
        now: Duration,
        /// The outcome.
        outcome: GivenUp,
    },
    /// Idle memory was released; a purge is a trim that keeps nothing.
    Trim {
        /// The bytes that may stay committed.
        keep: ByteSize,
        /// The outcome.
        outcome: GivenUp,
    },
    /// Like a trim, and growth starts again from its initial step.
    Shrink {
        /// The outcome.
        outcome: GivenUp,
    },
    /// A region was compacted.
    Compact {
        /// The options.
        options: CompactOptions,
        /// The reason that the compaction ended.
        stopped: StopReason,
        /// The number of moves.
        moves: u64,
        /// The bytes of the moved blocks.
        moved: ByteSize,
        /// The number of skipped moves.
        skipped: u64,
    },
    /// All raw blocks were freed.
    Reset {
        /// The number of blocks.
        blocks: u64,
        /// The bytes of the freed blocks.
        bytes: ByteSize,
    },
    /// The arena was asked to close.
    Close {
        /// The outcome.
        outcome: Closed,
    },
    /// The treatment of a buffer's contents in a sleep was set.
    Contents {
        /// The number of its block.
        id: u64,
        /// The treatment; `None` for the one in the options of the sleep.
        contents: Option<Contents>,
    },
    /// The arena was asked to sleep.
    Sleep {
        /// The treatment of the contents of the stable region.
        stable: Contents,
        /// The treatment of the contents of the dynamic region.
        dynamic: Contents,
        /// The outcome.
        outcome: Fallen,
    },
    /// The arena woke up. An operation that caused the wake comes after this one, and found the
    /// arena awake.
    Wake {
        /// The figures of the wake; `None` if it failed, and the arena is still asleep.
        woken: Option<WakeReport>,
    },
}

/// A request for a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Asked {
    /// The kind of request.
    pub kind: BlockKind,
    /// The region.
    pub region: Region,
    /// The requested bytes, before rounding.
    pub bytes: ByteSize,
    /// The alignment.
    pub align: ByteSize,
    /// The number of the lane on which it is allocated.
    pub lane: Option<u64>,
}

/// The place of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "a place is these three")]
pub struct Place {
    /// The region.
    pub region: Region,
    /// The offset from the region's start.
    pub offset: ByteSize,
    /// The size, after rounding.
    pub size: ByteSize,
}

/// The reason that a request failed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Why {
    /// The arena's limit was reached.
    Limit,
    /// The device has no memory left.
    Device,
    /// The region has no free range of addresses.
    Addresses,
    /// The request is larger than any region of the arena.
    TooLarge,
    /// A driver call failed.
    Driver,
}

/// The outcome of a resize.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Resized {
    /// The block was resized in place.
    InPlace(Place),
    /// The block was resized and moved.
    Moved(Place),
    /// The resize failed, and the block is unchanged.
    Refused(Why),
}

/// The outcome of releasing idle memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts")]
pub struct GivenUp {
    /// The bytes released.
    pub released: ByteSize,
    /// `true` if the driver calls succeeded.
    pub done: bool,
}

/// The outcome of a close.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Closed {
    /// The arena is closed.
    Done,
    /// Blocks are live, so the arena stays open.
    LiveBlocks,
    /// The arena is closed, but the driver failed to release something.
    Failed,
}

/// The outcome of a sleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fallen {
    /// The arena is asleep.
    Asleep(SleepReport),
    /// The sleep failed, completely or in part.
    Failed {
        /// The reason.
        why: Sleepless,
        /// The state of the arena afterwards.
        state: SleepState,
    },
}

/// The reason that an arena did not fall asleep.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Sleepless {
    /// Leases were held, or buffers exported.
    Leased,
    /// Another thread entered meanwhile, or memory was freed continuously.
    Cancelled,
    /// A stream was capturing a graph.
    Capturing,
    /// The host had no room for the contents, or the budget callback panicked.
    Budget,
    /// The arena was not awake.
    State,
    /// A driver call failed.
    Driver,
}

/// An operation, with its line and time.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Entry {
    /// The line number, from 1.
    pub line: u64,
    /// The time since the start of the recording.
    pub at: Duration,
    /// The operation.
    pub operation: Operation,
}

/// The last line of a recording that was ended properly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Closing {
    /// The time since the start of the recording.
    pub at: Duration,
    /// The number of recorded operations.
    pub operations: u64,
    /// `true` if all operations came from one thread. Otherwise the order in which they were
    /// recorded may differ from the order in which places were chosen.
    pub one_thread: bool,
    /// The reason that the recording ended.
    pub ended: Ended,
    /// The hash of the outcomes.
    pub hash: OperationHash,
}

/// The reason that a recording ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Ended {
    /// The arena was dropped.
    Gone,
    /// [`Recorder::finish`](super::Recorder::finish) was called.
    Finished,
    /// The recording reached its size limit.
    Full,
}
