//! A map of an arena: its blocks and granules at one instant.
//!
//! [`DeviceArena::map`](crate::DeviceArena::map) takes it. A granule that is being committed or
//! released counts as committed. A block whose memory is not committed yet, or that is growing in
//! place, counts as free, as in a snapshot.
//!
//! Invariants: the spans of a segment are within it, in address order, and do not overlap; every
//! live or pending byte is backed, so that `live + pending + holes + idle = committed`.

use crate::index::Span;
use crate::state::arena::ArenaState;

use crate::api::arena::DeviceArena;
use crate::occupancy::{ArenaOccupancy, region_cells};
pub use crate::state::backing::GranuleState;
use crate::state::backing::{AddressRange, Backing};
use crate::state::segment::Run;
use crate::types::Region;
use lowtide_core::bytes::ByteSize;

/// A map of an arena at one instant.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaMap {
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// The arena's segments; none in a forked child.
    pub segments: Vec<SegmentMap>,
}

/// One segment of an arena: all addresses of a region, or one segment of the driver.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentMap {
    /// Its region.
    pub region: Region,
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

/// Returns the segments of a region.
pub(crate) fn segments(state: &ArenaState, region: Region) -> Vec<SegmentMap> {
    let of = state.region(region);
    let ground = &of.segment;
    let arrived = |span: &Span| ground.missing(*span).is_nothing();
    let live = of.live_spans().filter(arrived).map(|span| (span, BlockState::Live));
    let pending = of.pending.spans().map(|span| (span, BlockState::Pending));
    let mut blocks: Vec<_> = live.chain(pending).collect();
    blocks.sort_unstable_by_key(|(span, _)| span.offset);
    let map = |AddressRange { at, span, backed }: AddressRange| {
        let within =
            |inner: Span| (ByteSize::new(inner.offset - span.offset), ByteSize::new(inner.size));
        let first = blocks.partition_point(|(block, _)| block.offset < span.offset);
        let inside = blocks[first..].iter().take_while(|(block, _)| block.offset < span.end());
        let blocks = inside.map(|&(block, state)| {
            let (offset, size) = within(block);
            BlockSpan { offset, size, state }
        });
        let granules = backed.into_iter().flat_map(|run| by_state(ground, run));
        let granules = granules.map(|(run, state)| {
            let (offset, size) = within(run);
            GranuleRun { offset, size, state }
        });
        SegmentMap {
            region,
            base: at.get(),
            size: ByteSize::new(span.size),
            granules: granules.collect(),
            blocks: blocks.collect(),
        }
    };
    ground.stretches().into_iter().map(map).collect()
}

/// Cuts a run of backed granules into runs of one state, in address order. A granule is active if a
/// live, arriving or pending block touches it.
pub(super) fn by_state(
    ground: &Backing,
    (span, state): (Span, Option<GranuleState>),
) -> Vec<(Span, GranuleState)> {
    if let Some(state) = state {
        return vec![(span, state)];
    }
    let granule = ground.granularity();
    let mut touched = ground.touched_runs(Run::of(&ground.granules_of(span)));
    touched.sort_unstable_by_key(|run| run.range().start);
    let (mut runs, mut at) = (Vec::new(), span.offset);
    for run in touched {
        let (offset, size) = (run.range().start as u64 * granule, run.granules() * granule);
        runs.push((Span { offset: at, size: offset - at }, GranuleState::Idle));
        runs.push((Span { offset, size }, GranuleState::Active));
        at = offset + size;
    }
    runs.push((Span { offset: at, size: span.end() - at }, GranuleState::Idle));
    runs.retain(|(run, _)| run.size > 0);
    runs
}

impl DeviceArena {
    /// Returns a map of all blocks and granules; empty in a forked child.
    ///
    /// Copies the metadata under the lock: time and memory grow with the number of blocks and
    /// granules. Thread caches are flushed first; blocks that other threads cache meanwhile show as
    /// live.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// let config = ArenaConfig::new("embedder");
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let activations = arena.alloc::<f32>(1 << 20, Region::Dynamic)?;
    /// let map = arena.map();
    /// assert_eq!(map.segments[1].blocks.len(), 1);
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return ArenaMap::default();
        }
        inner.empty_caches();
        inner.run_now(|state| ArenaMap {
            granularity: ByteSize::new(state.bytes_of(1)),
            segments: Region::ALL.iter().flat_map(|&region| segments(state, region)).collect(),
        })
    }

    /// Returns the current usage, each region in at most `cells_max` cells (at least 2).
    ///
    /// Walks all blocks under the lock, a few ns each if the arena is awake, and allocates the
    /// cells and an entry for each run of committed granules. Empty in a forked child.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let config = ArenaConfig::new("embedder");
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let activations = arena.alloc::<u8>(1 << 20, Region::Dynamic)?;
    /// let occupancy = arena.occupancy(64);
    /// let live: u64 = occupancy.regions[1].occupancy.iter().map(|cell| cell.live.get()).sum();
    /// assert_eq!((occupancy.regions[1].blocks, live), (1, 1 << 20));
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> ArenaOccupancy {
        let occupancy = self.inner().run_here(|state| {
            let of = |&region: &Region| region_cells(state, region, cells_max);
            let regions = Region::ALL.iter().map(of).collect();
            ArenaOccupancy { granularity: ByteSize::new(state.bytes_of(1)), regions }
        });
        occupancy.unwrap_or_default()
    }
}
