//! A coarse map of an arena: usage in a few hundred cells of address space.
//!
//! For pages that refresh often: [`DeviceArena::occupancy`](crate::DeviceArena::occupancy) takes it.
//! It lists no blocks and no addresses, and keeps thread caches: their blocks show as live. Blocks
//! whose memory is still being committed show as asleep. A granule that is being committed or
//! released counts as committed. Empty addresses, the majority, have no cell.
//!
//! Invariants: `active + idle <= size` of every cell; summed over a region, `active + idle` is its
//! committed memory; `cells <= cells_max`.

use crate::api::arena::DeviceArena;
use crate::index::Span;
use crate::state::ArenaState;
use crate::types::Region;
use lowtide_core::bytes::ByteSize;

impl DeviceArena {
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
    let runs = of.segment.backed_spans();
    let mut used: Vec<Span> = runs.iter().map(|(run, _)| *run).collect();
    if !state.sleep.is_awake() || of.arriving > 0 || of.pins.lost().next().is_some() {
        // Some blocks have no memory, and may lie in other cells.
        used.extend(of.live_spans_unordered());
    }
    used.sort_unstable_by_key(|span| span.offset);
    let (cell, cells) = cells_over(&used, cells_max.max(2));
    let (region, granularity) = (region.name(), ByteSize::new(state.bytes_of(1)));
    let mut map = RegionOccupancy { region, granularity, cell, blocks: 0, cells };
    for block in of.live_spans_unordered() {
        map.blocks += 1;
        map.add(block, LIVE);
    }
    of.pending.spans().for_each(|freed| map.add(freed, PENDING));
    for (run, is_active) in runs {
        map.add(run, if is_active { ACTIVE } else { IDLE });
    }
    map
}

// The places of the sums of a cell.
const LIVE: usize = 0;
const PENDING: usize = 1;
const ACTIVE: usize = 2;
const IDLE: usize = 3;

/// Returns the size of the cells of spans in address order, the smallest with which there are at
/// most `cells_max`, and the cells.
fn cells_over(spans: &[Span], cells_max: usize) -> (ByteSize, Vec<(u64, [ByteSize; 4])>) {
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
            return (ByteSize::new(size), cells);
        }
        size *= 2;
    }
}

impl RegionOccupancy {
    /// Adds the bytes of a span, which lies in the cells, to one of their sums.
    fn add(&mut self, span: Span, of: usize) {
        let mut at = span.offset;
        while at < span.end() {
            let nth = at / self.cell.get();
            let end = ((nth + 1) * self.cell.get()).min(span.end());
            let cell = self.cells.partition_point(|cell| cell.0 < nth);
            let sum = &mut self.cells[cell].1[of];
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
