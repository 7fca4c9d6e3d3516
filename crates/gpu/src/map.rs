//! A map of an arena: its blocks and granules at one instant.
//!
//! [`DeviceArena::map`](crate::DeviceArena::map) takes it. A granule that is being committed or
//! released counts as committed. A block whose memory is not committed yet, or that is growing in
//! place, counts as free, as in a snapshot.
//!
//! Invariants: the spans of a segment are within it, in address order, and do not overlap; every
//! live or pending byte is backed, so that `live + pending + holes + idle = committed`.

use std::ops::Range;

use crate::api::arena::DeviceArena;
use crate::index::Span;
use crate::state::arena::ArenaState;
use crate::state::backing::{Backing, CommittedRange, GranuleState};
use crate::state::segment::Run;
use crate::types::Region;
use lowtide_core::bytes::ByteSize;

/// A map of one segment of an arena: all addresses of a region, or one segment of the driver.
///
/// Ranges are offsets in the segment, in address order. Granules that are neither active nor idle
/// have no memory; the space between live and pending blocks is free.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct SegmentMap {
    /// Its region.
    pub region: Region,
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// Its first address.
    pub base: u64,
    /// Its address space in bytes.
    pub size: ByteSize,
    /// Committed granules that a block touches.
    pub active: Vec<Range<u64>>,
    /// Committed granules that no block touches.
    pub idle: Vec<Range<u64>>,
    /// Blocks held by callers, after rounding.
    pub live: Vec<Range<u64>>,
    /// Blocks freed by the caller that the device may still use.
    pub pending: Vec<Range<u64>>,
}

/// Returns the segments of a region.
fn segments(state: &ArenaState, region: Region) -> Vec<SegmentMap> {
    let of = state.region(region);
    let ground = &of.segment;
    let arrived = |span: &Span| ground.missing(*span).is_nothing();
    let mut live: Vec<_> = of.live_spans().filter(arrived).collect();
    let mut pending: Vec<_> = of.pending.spans().collect();
    live.sort_unstable_by_key(|span| span.offset);
    pending.sort_unstable_by_key(|span| span.offset);
    let map = |CommittedRange { at, span, backed }: CommittedRange| {
        let within = |inner: &Span| inner.offset - span.offset..inner.end() - span.offset;
        let blocks = |all: &[Span]| -> Vec<_> {
            let first = all.partition_point(|block| block.offset < span.offset);
            let inside = all[first..].iter().take_while(|block| block.offset < span.end());
            inside.map(within).collect()
        };
        let granules: Vec<_> = backed.into_iter().flat_map(|run| by_state(ground, run)).collect();
        let runs = |state| -> Vec<_> {
            let found = granules.iter().filter(|(_, of_run)| *of_run == state);
            found.map(|(run, _)| within(run)).collect()
        };
        SegmentMap {
            region,
            granularity: ByteSize::new(state.bytes_of(1)),
            base: at.get(),
            size: ByteSize::new(span.size),
            active: runs(GranuleState::Active),
            idle: runs(GranuleState::Idle),
            live: blocks(&live),
            pending: blocks(&pending),
        }
    };
    ground.stretches().into_iter().map(map).collect()
}

/// Cuts a run of backed granules into runs of one state, in address order. A granule is active if a
/// live, arriving or pending block touches it.
fn by_state(
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
    /// Returns a map of all blocks and granules, segment by segment; empty in a forked child.
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
    /// assert_eq!(map[1].live.len(), 1);
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn map(&self) -> Vec<SegmentMap> {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return Vec::new();
        }
        inner.empty_caches();
        inner.run_now(|state| Region::ALL.into_iter().flat_map(|it| segments(state, it)).collect())
    }

    /// Returns the current usage of both regions, each in at most `cells_max` cells (at least 2).
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
    /// let live: u64 = occupancy[1].cells.iter().map(|(_, [live, ..])| live.get()).sum();
    /// assert_eq!((occupancy[1].blocks, live), (1, 1 << 20));
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> Vec<RegionOccupancy> {
        let occupancy = self.inner().run_here(|state| {
            Region::ALL.into_iter().map(|it| region_cells(state, it, cells_max)).collect()
        });
        occupancy.unwrap_or_default()
    }
}

// A coarse map of an arena: usage in a few hundred cells of address space.
//
// For pages that refresh often. Unlike [`DeviceArena::map`](crate::DeviceArena::map) it lists no
// blocks and no addresses, and keeps thread caches: their blocks show as live. Blocks whose memory
// is still being committed show as asleep. Empty addresses, the majority, have no cell.
//
// Invariants: `active + idle <= size` of every cell; summed over a region, `active + idle` is its
// committed memory; `cells <= cells_max`.

/// The size of the smallest cell in bytes: a picture of an arena does not resolve smaller ones.
const CELL_MIN: u64 = 4 << 10;

/// A region in cells of one size; from [`DeviceArena::occupancy`].
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionOccupancy {
    /// The region's name.
    pub region: &'static str,
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// Bytes of each cell: a power of two.
    pub cell: ByteSize,
    /// The number of live blocks.
    pub blocks: u64,
    /// Cells with memory or a block, in address order: the cell's index in the region, from 0, and
    /// the bytes in it of live blocks (more than the active ones if they are asleep), of freed
    /// blocks that the device may still use, of active granules, and of idle ones. The rest of the
    /// cell has no memory.
    pub cells: Vec<(u64, [ByteSize; 4])>,
}

/// Returns the usage of a region in at most `cells_max` cells (at least 2).
fn region_cells(state: &ArenaState, region: Region, cells_max: usize) -> RegionOccupancy {
    let of = state.region(region);
    let runs = of.segment.stretches().into_iter().flat_map(|it| it.backed);
    let runs: Vec<_> = runs.flat_map(|run| by_state(&of.segment, run)).collect();
    let mut used: Vec<Span> = runs.iter().map(|(run, _)| *run).collect();
    if !state.sleep.is_awake() || of.arriving > 0 || of.pins.lost().next().is_some() {
        // Some blocks have no memory, and may lie in other cells.
        used.extend(of.live_spans_unordered());
    }
    used.sort_unstable_by_key(|span| span.offset);
    let mut cells = Cells::over(&used, cells_max.max(2));
    let mut blocks = 0;
    for block in of.live_spans_unordered() {
        blocks += 1;
        cells.add(block, LIVE);
    }
    of.pending.spans().for_each(|freed| cells.add(freed, PENDING));
    for (run, state) in runs {
        cells.add(run, if state == GranuleState::Active { ACTIVE } else { IDLE });
    }
    let (cell, granularity) = (ByteSize::new(cells.size), ByteSize::new(state.bytes_of(1)));
    RegionOccupancy { region: region.name(), granularity, cell, blocks, cells: cells.cells }
}

// The places of the sums of a cell.
const LIVE: usize = 0;
const PENDING: usize = 1;
const ACTIVE: usize = 2;
const IDLE: usize = 3;

/// Cells of one size, in address order.
struct Cells {
    size: u64,
    cells: Vec<(u64, [ByteSize; 4])>,
    /// The index of the cell that was found last.
    last: usize,
}

impl Cells {
    /// Creates the cells of spans in address order: of the smallest size with which there are at
    /// most `cells_max`.
    fn over(spans: &[Span], cells_max: usize) -> Self {
        let mut size = CELL_MIN;
        // Ends, because each turn doubles the cells and at last two cells hold everything.
        loop {
            let mut cells: Vec<(u64, [ByteSize; 4])> = Vec::new();
            let is_enough = spans.iter().all(|span| {
                let next = cells.last().map_or(0, |last| last.0 + 1);
                let (first, end) = ((span.offset / size).max(next), span.end().div_ceil(size));
                let room = (cells_max - cells.len()) as u64;
                let nths = first..end.min(first.saturating_add(room));
                cells.extend(nths.map(|nth| (nth, [ByteSize::ZERO; 4])));
                end.saturating_sub(first) <= room
            });
            if is_enough {
                return Self { size, cells, last: 0 };
            }
            size *= 2;
        }
    }

    /// Adds the bytes of a span, which lies in the cells, to one of their sums.
    fn add(&mut self, span: Span, of: usize) {
        let mut at = span.offset;
        while at < span.end() {
            let nth = at / self.size;
            if self.cells.get(self.last).is_none_or(|cell| cell.0 != nth) {
                self.last = self.cells.partition_point(|cell| cell.0 < nth);
            }
            let end = ((nth + 1) * self.size).min(span.end());
            let sum = &mut self.cells[self.last].1[of];
            *sum = sum.saturating_add(ByteSize::new(end - at));
            at = end;
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{ArenaConfig, DeviceArena, HostDriver};
    use lowtide_core::clock::ManualClock;

    fn arena(reserve: ByteSize) -> DeviceArena {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        let config = ArenaConfig { reserve, ..ArenaConfig::new("a") };
        DeviceArena::open(driver, clock, config).expect("opens")
    }

    fn sum(region: &RegionOccupancy, of: usize) -> ByteSize {
        region.cells.iter().map(|cell| cell.1[of]).sum()
    }

    #[test]
    fn the_sums_of_the_cells_are_the_figures_of_the_snapshot() {
        let arena = arena(ByteSize::mib(256));
        let mut held = Vec::new();
        let mut chance = 7_u64; // a seed
        for round in 0..400 {
            chance = chance.wrapping_mul(0x5851_F42D_4C95_7F2D).wrapping_add(1);
            let size = 256 + usize::try_from(chance >> 44).expect("small");
            let region = Region::ALL[round % 2];
            held.push(arena.alloc::<u8>(size, region).expect("room"));
            if chance >> 63 == 0 {
                let nth = usize::try_from(chance >> 50).expect("small") % held.len();
                drop(held.swap_remove(nth));
            }
        }
        for cells_max in [2, 7, 512, 4096] {
            let occupancy = arena.occupancy(cells_max);
            let snapshot = arena.snapshot();
            for (told, found) in snapshot.regions.iter().zip(&occupancy) {
                assert!(found.cells.len() <= cells_max, "{} cells", found.cells.len());
                assert!(found.cells.is_sorted_by(|one, next| one.0 < next.0));
                let live = told.live.saturating_add(told.cached);
                assert_eq!(sum(found, LIVE), live, "{cells_max}");
                assert_eq!(sum(found, ACTIVE), told.active, "{cells_max}");
                assert_eq!(sum(found, IDLE), told.idle, "{cells_max}");
                for (nth, sums) in &found.cells {
                    let used = sums[ACTIVE].saturating_add(sums[IDLE]);
                    assert!(used <= found.cell && sums[LIVE] <= found.cell, "{nth}: {sums:?}");
                }
            }
        }
    }

    #[test]
    fn addresses_without_anything_have_no_cell() {
        let arena = arena(ByteSize::gib(1024));
        let small = arena.alloc::<u8>(100, Region::Dynamic).expect("room");
        let large = arena.alloc::<u8>(3 << 20, Region::Dynamic).expect("room");
        let region = arena.occupancy(512).remove(1);
        assert_eq!(region.blocks, 2);
        let ends = region.cells.first().zip(region.cells.last());
        let (first, last) = ends.expect("some cells");
        assert!(last.0 - first.0 > 512, "they lie far apart, as small and large blocks do");
        assert!(region.cell <= ByteSize::kib(64), "and are drawn finely: {}", region.cell);
        drop((small, large));
    }

    #[test]
    fn an_empty_arena_has_no_cells_and_one_that_sleeps_shows_what_is_asleep() {
        use crate::{Contents, SleepOptions};
        let arena = arena(ByteSize::mib(64));
        assert!(arena.occupancy(64).iter().all(|region| region.cells.is_empty()));
        let held = arena.alloc::<u8>(3 << 20, Region::Stable).expect("room");
        let (stable, dynamic) = (Contents::Discard, Contents::Discard);
        arena.sleep(SleepOptions { stable, dynamic, ..Default::default() }).expect("asleep");
        let region = &arena.occupancy(64)[0];
        assert_eq!(sum(region, LIVE), ByteSize::mib(3));
        assert_eq!(sum(region, ACTIVE).saturating_add(sum(region, IDLE)), ByteSize::ZERO);
        drop(held);
    }
}
