//! A map of an arena, and its output in PyTorch's `memory_viz` format.
//!
//! Plain values and text: no driver, no lock, no clock. A map has the blocks and granules at one
//! instant, and the last events before it; [`DeviceArena::map`](crate::DeviceArena::map) takes it.
//!
//! Invariants: the spans of a segment are within it, in address order, and do not overlap; every
//! live or pending byte is backed, so that `live + pending + holes + idle = committed`.

#[cfg(feature = "memory-viz")]
mod memory_viz;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

use std::time::Duration;

pub use crate::state::backing::GranuleState;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

/// A map of an arena at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaMap {
    /// The arena's name.
    pub name: String,
    /// The device number; 0 on the host backend.
    pub device: u32,
    /// The time of the map, by the arena's clock.
    pub taken: Moment,
    /// The same instant as time since the Unix epoch.
    pub since_epoch: Duration,
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// The arena's segments.
    pub segments: Vec<SegmentMap>,
    /// The kept events, oldest first. The last one leads to the state of the segments.
    pub events: Vec<MapEvent>,
}

/// One segment of an arena: all addresses of a region, or one segment of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentMap {
    /// The name of its region.
    pub region: String,
    /// Its first address.
    pub base: u64,
    /// Its address space in bytes.
    pub size: ByteSize,
    /// Runs of granules with committed memory, in address order. The other granules have none.
    pub granules: Vec<GranuleRun>,
    /// Live and pending blocks, in address order; the space between them is free.
    pub blocks: Vec<BlockSpan>,
}

/// Adjacent granules in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GranuleRun {
    /// Their offset in the segment.
    pub offset: ByteSize,
    /// Their size in bytes.
    pub size: ByteSize,
    /// Their state.
    pub state: GranuleState,
}

/// A block that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockSpan {
    /// Its offset in the segment.
    pub offset: ByteSize,
    /// Its size after rounding.
    pub size: ByteSize,
    /// The requested size; equal to `size` if unknown.
    pub requested: ByteSize,
    /// Its state.
    pub state: BlockState,
}

/// The state of a block that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockState {
    /// Held by a caller.
    Live,
    /// Freed by the caller; the device may still use it.
    Pending,
}

/// An event in an arena, at a moment of the arena's clock.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum MapEvent {
    /// A block was allocated.
    Alloc {
        /// The moment.
        at: Moment,
        /// The first address.
        address: u64,
        /// The requested size; after a move by a compaction, the rounded size.
        size: ByteSize,
    },
    /// A block was freed.
    Free {
        /// The moment.
        at: Moment,
        /// The first address.
        address: u64,
        /// The size, as for [`MapEvent::Alloc`].
        size: ByteSize,
    },
    /// Memory was committed.
    Commit {
        /// The moment.
        at: Moment,
        /// The first address.
        address: u64,
        /// The size of the granules.
        size: ByteSize,
    },
    /// Memory was released to the driver.
    Decommit {
        /// The moment.
        at: Moment,
        /// The first address.
        address: u64,
        /// The size of the granules.
        size: ByteSize,
    },
    /// An allocation failed for lack of memory.
    OutOfMemory {
        /// The moment.
        at: Moment,
        /// The size of the block.
        requested: ByteSize,
        /// The bytes left below the limit; zero if the device was out of memory without a limit.
        headroom: ByteSize,
    },
}

impl MapEvent {
    /// Returns the moment of the event.
    #[must_use]
    pub const fn at(&self) -> Moment {
        match *self {
            Self::Alloc { at, .. }
            | Self::Free { at, .. }
            | Self::Commit { at, .. }
            | Self::Decommit { at, .. }
            | Self::OutOfMemory { at, .. } => at,
        }
    }
}

impl ArenaMap {
    /// Writes the map as a snapshot for PyTorch's `memory_viz` (the page of that name, or
    /// `_memory_viz.py`): a pickle. Needs the feature `memory-viz`, off by default.
    ///
    /// Each range of committed memory is a segment there, as with PyTorch's expandable segments. A
    /// block's stack is one line: the arena and the region.
    ///
    /// # Errors
    /// The errors of `to`.
    #[cfg(feature = "memory-viz")]
    pub fn write_memory_viz(&self, to: impl std::io::Write) -> std::io::Result<()> {
        memory_viz::write(self, to)
    }

    /// Checks the invariants.
    ///
    /// # Panics
    /// If an invariant is violated.
    pub fn validate(&self) {
        for segment in &self.segments {
            segment.validate();
        }
        assert!(self.events.is_sorted_by_key(MapEvent::at), "events in the order of time");
    }
}

impl SegmentMap {
    /// Returns the start and the end of each maximal range with committed memory.
    fn stretches(&self) -> Vec<(u64, u64)> {
        let mut stretches: Vec<(u64, u64)> = Vec::new();
        for run in &self.granules {
            let (start, end) = bounds(run.offset, run.size);
            match stretches.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                _ => stretches.push((start, end)),
            }
        }
        stretches
    }

    fn validate(&self) {
        let mut end = 0;
        for run in &self.granules {
            let (start, run_end) = bounds(run.offset, run.size);
            assert!(end <= start && start < run_end, "granules in order: {run:?}");
            end = run_end;
        }
        assert!(end <= self.size.get(), "granules lie within the segment");
        let stretches = self.stretches();
        let mut end = 0;
        for block in &self.blocks {
            let (start, block_end) = bounds(block.offset, block.size);
            assert!(end <= start && start < block_end, "blocks in order: {block:?}");
            assert!(block.requested <= block.size, "requested <= size: {block:?}");
            end = block_end;
            let nth = stretches.partition_point(|&(_, stretch_end)| stretch_end <= start);
            let backed = stretches.get(nth).is_some_and(|&(from, to)| from <= start && end <= to);
            assert!(backed, "a block without memory: {block:?}");
        }
    }
}

/// Returns the start and the end of a span, in bytes.
const fn bounds(offset: ByteSize, size: ByteSize) -> (u64, u64) {
    (offset.get(), offset.saturating_add(size).get())
}
