//! Options and results of compactions.

use thiserror::Error;

use crate::driver::DeviceAddress;
use crate::types::error::DeviceError;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

/// The goal of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Goal {
    /// As many idle granules as possible; a decay or purge then releases them.
    /// For arenas with more addresses than memory. On drivers that allocate whole segments: idle
    /// segments.
    Granules,
    /// One free span of addresses of at least this size, or the largest possible; [`ByteSize::MAX`]
    /// to join all free space. For arenas whose addresses are as scarce as memory. Within one
    /// segment, on drivers that allocate segments.
    Contiguous(ByteSize),
}

/// Options of a compaction.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CompactOptions {
    /// The region. Blocks of the other region do not move.
    pub region: Region,
    /// The goal.
    pub goal: Goal,
    /// The maximum of bytes moved in this call; a larger block does not move. With less than about
    /// two granules it may be impossible to clear any.
    pub budget: ByteSize,
    /// `true` if raw blocks may move as well; their owner takes the new addresses from the
    /// callback, and does not use them meanwhile. Default: `false`.
    pub moves_raw: bool,
}

impl CompactOptions {
    /// Creates options for idle granules in this region, without a budget.
    #[must_use]
    pub const fn new(region: Region) -> Self {
        Self { region, goal: Goal::Granules, budget: ByteSize::MAX, moves_raw: false }
    }
}

/// A block that was moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Moved {
    /// Its region.
    pub region: Region,
    /// Its address before the move.
    pub from: DeviceAddress,
    /// Its address after the move.
    pub to: DeviceAddress,
    /// Its size.
    pub size: ByteSize,
}

/// The reason a compaction ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum StopReason {
    /// All moves of the plan that were still valid are done.
    Finished,
    /// A lease was held or requested, which blocks moves, or another compaction of the arena is
    /// running.
    Busy,
    /// An error occurred before the plan was completed; see [`CompactError::done`].
    #[default]
    Failed,
}

impl StopReason {
    /// Returns the reason's name in events.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Finished => "finished",
            Self::Busy => "busy",
            Self::Failed => "failed",
        }
    }
}

/// The result of a compaction.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct CompactReport {
    /// The number of moves. A block moves more than once only if others need its place meanwhile.
    pub moves: u64,
    /// Bytes moved.
    pub moved: ByteSize,
    /// The number of planned moves skipped: the block or its new place had changed, there was no
    /// memory for it, or events could not prove that no work uses the block.
    pub skipped: u64,
    /// Bytes of granules that became idle: those left by the moves, minus those made active.
    pub recovered: ByteSize,
    /// The longest free span of addresses in the region afterwards.
    pub largest_span: ByteSize,
    /// The reason the compaction ended. After [`StopReason::Busy`] more may be possible: try again
    /// later.
    pub stopped: StopReason,
}

/// A failed compaction, and its result until then. Completed moves stay.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("compaction failed after {} moves: {error}", done.moves)]
#[non_exhaustive]
pub struct CompactError {
    /// The error.
    #[source]
    pub error: DeviceError,
    /// The result of the moves before it; boxed, so that a result is small.
    pub done: Box<CompactReport>,
}

impl From<CompactError> for DeviceError {
    fn from(failed: CompactError) -> Self {
        failed.error
    }
}
