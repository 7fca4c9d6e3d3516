//! A map of an arena, and pictures of it: an SVG file, PyTorch's `memory_viz` format.
//!
//! Plain values and text: no driver, no lock, no clock. A map says where everything lay at one
//! instant, and what happened shortly before; it is taken by
//! [`DeviceArena::map`](super::DeviceArena::map).
//!
//! Invariants: the spans of a segment lie within it, in address order, and do not overlap; every
//! live or pending byte is backed, so that `live + pending + holes + idle = committed`.

#[cfg(feature = "memory-viz")]
mod memory_viz;
mod svg;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// Where everything in an arena lies, at one instant.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaMap {
    /// The arena's name.
    pub name: String,
    /// The number of its device; 0 on the host rung.
    pub device: u32,
    /// When the map was taken, on the arena's clock.
    pub taken: Moment,
    /// The same instant as time since the Unix epoch.
    pub since_epoch: Duration,
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// Its segments.
    pub segments: Vec<SegmentMap>,
    /// What happened before, oldest first, as far as the arena keeps it. The last event leads to
    /// what the segments show.
    pub events: Vec<Event>,
}

/// One segment of an arena: all addresses of a region, or one that the driver gave whole.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentMap {
    /// The name of its region.
    pub region: String,
    /// Its first address.
    pub base: u64,
    /// Its address space.
    pub size: ByteSize,
    /// Runs of granules with memory behind them, in address order; the others are bare.
    pub granules: Vec<GranuleRun>,
    /// Live and pending blocks, in address order; what lies between is free.
    pub blocks: Vec<BlockSpan>,
}

/// Adjoining granules in one state.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct GranuleRun {
    /// Where in the segment they begin.
    pub offset: ByteSize,
    /// How many bytes they are.
    pub size: ByteSize,
    /// Their state.
    pub state: GranuleState,
}

/// What a granule with memory behind it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum GranuleState {
    /// A live or pending block touches it.
    Active,
    /// No block touches it: it may be given back.
    Idle,
}

/// A block that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct BlockSpan {
    /// Where in the segment it begins.
    pub offset: ByteSize,
    /// Its size after rounding.
    pub size: ByteSize,
    /// What was asked for; its size where the arena does not know.
    pub requested: ByteSize,
    /// Its state.
    pub state: BlockState,
}

/// The state of a block that is not free.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BlockState {
    /// Held by a caller.
    Live,
    /// Freed by the caller, and perhaps still used by the device.
    Pending,
}

/// Something that happened in an arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Event {
    /// When, on the arena's clock.
    pub at: Moment,
    /// What.
    pub act: Act,
    /// Where; 0 where there is no place.
    pub address: u64,
    /// Of a block: what was asked for. Of granules: their bytes.
    pub size: ByteSize,
}

/// What happened.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Act {
    /// A block was handed out.
    Alloc,
    /// A block was freed, and no device used it any more.
    Free,
    /// Memory was committed.
    Commit,
    /// Memory was given back.
    Decommit,
    /// There was no memory for a block.
    OutOfMemory {
        /// What the limit left to be committed; zero without a limit, when the device had no more.
        headroom: ByteSize,
    },
}

impl ArenaMap {
    /// A map of nothing.
    pub(super) const fn empty(name: String) -> Self {
        Self {
            name,
            device: 0,
            taken: Moment::ORIGIN,
            since_epoch: Duration::ZERO,
            granularity: ByteSize::ZERO,
            segments: Vec::new(),
            events: Vec::new(),
        }
    }

    /// A picture of the address space, as a file of its own: what is live, pending, free, idle,
    /// active, bare. Sizes stand beside it; a pointer that rests on a block shows its own.
    ///
    /// At most 4 MiB whatever the map, and mostly under 100 KiB: what is narrower than two pixels
    /// is drawn as a shade, and long bare stretches as a line.
    #[must_use]
    pub fn to_svg(&self) -> String {
        svg::draw(self)
    }

    /// Writes the map as a snapshot for PyTorch's `memory_viz` (the page of that name, or
    /// `_memory_viz.py`): a pickle. With the feature `memory-viz`, which is off by default.
    ///
    /// Each stretch of committed memory is a segment there, as with PyTorch's expandable segments.
    /// A block's stack is one line: the arena and the region.
    ///
    /// # Errors
    /// Those of `to`.
    #[cfg(feature = "memory-viz")]
    pub fn write_memory_viz(&self, to: impl std::io::Write) -> std::io::Result<()> {
        memory_viz::write(self, to)
    }

    /// Checks the invariants.
    ///
    /// # Panics
    /// Where one does not hold.
    pub fn validate(&self) {
        for segment in &self.segments {
            segment.validate();
        }
        assert!(self.events.is_sorted_by_key(|event| event.at), "events in the order of time");
    }
}

impl SegmentMap {
    /// Bytes of granules in a state.
    fn backed(&self, state: GranuleState) -> ByteSize {
        self.granules.iter().filter(|run| run.state == state).map(|run| run.size).sum()
    }

    /// Bytes of blocks in a state.
    fn taken(&self, state: BlockState) -> ByteSize {
        self.blocks.iter().filter(|block| block.state == state).map(|block| block.size).sum()
    }

    /// The stretches with memory behind them, as long as they go: where they begin and end.
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

/// Where a span begins and ends, in bytes.
const fn bounds(offset: ByteSize, size: ByteSize) -> (u64, u64) {
    (offset.get(), offset.saturating_add(size).get())
}
