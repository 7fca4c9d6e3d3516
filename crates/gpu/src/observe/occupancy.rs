//! A coarse map of an arena: usage in a few hundred cells of address space.
//!
//! For pages that refresh often. Unlike [`DeviceArena::map`](crate::DeviceArena::map) it lists no
//! blocks and no addresses, and keeps thread caches: their blocks show as live. Blocks whose memory
//! is still being committed show as asleep. Empty addresses, the majority, have no cell.
//!
//! Invariants: `active + idle <= size` of every cell; summed over a region, `active + idle` is its
//! committed memory; `cells <= cells_max`.

use crate::index::Span;
use crate::observe::map::by_state;
use crate::state::arena::ArenaState;
use crate::state::backing::GranuleState;
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

/// The size of the smallest cell in bytes: a picture of an arena does not resolve smaller ones.
const CELL_MIN: u64 = 4 << 10;

/// A map of an arena in cells.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaOccupancy {
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// The regions in the order of [`Region::ALL`]; empty in a forked child.
    pub regions: Vec<RegionOccupancy>,
}

/// A region in cells of one size.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionOccupancy {
    /// The region's name.
    pub region: &'static str,
    /// Bytes of each cell: a power of two.
    pub cell: ByteSize,
    /// The number of live blocks.
    pub blocks: u64,
    /// Cells with memory or a block, in address order.
    pub occupancy: Vec<OccupancyCell>,
}

/// The usage of one cell. The rest of the cell has no memory.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct OccupancyCell {
    /// The cell's index in the region, from 0.
    pub nth: u64,
    /// Bytes of live blocks; more than `active` if they are asleep.
    pub live: ByteSize,
    /// Bytes of freed blocks that the device may still use.
    pub pending: ByteSize,
    /// Committed bytes of granules that a block touches.
    pub active: ByteSize,
    /// Committed bytes of granules that no block touches.
    pub idle: ByteSize,
}

/// Returns the usage of a region in at most `cells_max` cells (at least 2).
pub(crate) fn region_cells(
    state: &ArenaState,
    region: Region,
    cells_max: usize,
) -> RegionOccupancy {
    let of = state.region(region);
    let strip = || CellSums::new(cells_max.max(2));
    let (mut backed, mut active) = (strip(), strip());
    let runs = of.segment.stretches().into_iter().flat_map(|it| it.backed);
    for (run, state) in runs.flat_map(|run| by_state(&of.segment, run)) {
        backed.add(run);
        if state == GranuleState::Active {
            active.add(run);
        }
    }
    // Usually all blocks have memory, so that the cells are known and any order works. A sleeping
    // block may lie in other cells.
    let spread = spread(of.live_spans_unordered(), &backed);
    let (live, blocks) = spread.unwrap_or_else(|| {
        let (mut live, mut blocks) = (strip(), 0);
        for block in of.live_spans() {
            live.add(block);
            blocks += 1;
        }
        (live, blocks)
    });
    let mut pending = strip();
    of.pending.spans().for_each(|freed| pending.add(freed));
    let (cell, occupancy) = joined([live, pending, active, backed], cells_max.max(2));
    RegionOccupancy { region: region.name(), cell: ByteSize::new(cell), blocks, occupancy }
}

/// Adds spans, in any order, to the cells with memory, and returns the number of spans. Returns
/// `None` if one lies in another cell.
fn spread(spans: impl Iterator<Item = Span>, backed: &CellSums) -> Option<(CellSums, u64)> {
    let shift = backed.size.trailing_zeros(); // a power of two
    let mut sums: Vec<_> = backed.sums.iter().map(|(nth, _)| (*nth, 0)).collect();
    // Runs of cells: the first cell, the one after the last, and the index of the first.
    let mut runs: Vec<(u64, u64, usize)> = Vec::new();
    for (place, (nth, _)) in sums.iter().enumerate() {
        match runs.last_mut() {
            Some((_, after, _)) if after == nth => *after += 1,
            _ => runs.push((*nth, nth + 1, place)),
        }
    }
    let (mut found, mut count) = ((0, 0, 0), 0);
    for span in spans {
        count += 1;
        let mut at = span.offset;
        while at < span.end() {
            let nth = at >> shift;
            if nth < found.0 || nth >= found.1 {
                let next = runs.partition_point(|(_, after, _)| *after <= nth);
                found = *runs.get(next).filter(|(first, ..)| *first <= nth)?;
            }
            let end = ((nth + 1) << shift).min(span.end());
            let (_, sum) = sums.get_mut(found.2 + usize::try_from(nth - found.0).ok()?)?;
            *sum += end - at;
            at = end;
        }
    }
    Some((CellSums { size: backed.size, most: backed.most, sums }, count))
}

/// Returns cells with all four sums (live, pending, active, backed), of the smallest size with
/// which there are at most `cells_max`.
fn joined(mut strips: [CellSums; 4], cells_max: usize) -> (u64, Vec<OccupancyCell>) {
    let mut size = strips.iter().map(|strip| strip.size).max().unwrap_or(CELL_MIN);
    // Ends, because each turn doubles the cells and at last one cell holds everything.
    loop {
        strips.iter_mut().for_each(|strip| strip.fold_to(size));
        let mut places: Vec<_> =
            strips.iter().flat_map(|strip| strip.sums.iter().map(|(nth, _)| *nth)).collect();
        places.sort_unstable();
        places.dedup();
        if places.len() > cells_max {
            size *= 2;
            continue;
        }
        let mut sums = strips.map(|strip| strip.sums.into_iter().peekable());
        let cell = |nth| {
            let [live, pending, active, backed] = sums
                .each_mut()
                .map(|sums| sums.next_if(|(at, _)| *at == nth).map_or(0, |(_, sum)| sum));
            debug_assert!(active <= backed && backed <= size, "{active} <= {backed} <= {size}");
            let [live, pending, active, idle] =
                [live, pending, active, backed - active].map(ByteSize::new);
            OccupancyCell { nth, live, pending, active, idle }
        };
        return (size, places.into_iter().map(cell).collect());
    }
}

/// The bytes of spans in address order, by cell. Cells without any are left out.
struct CellSums {
    size: u64,
    most: usize,
    /// The index of each cell, and its bytes.
    sums: Vec<(u64, u64)>,
}

impl CellSums {
    const fn new(most: usize) -> Self {
        Self { size: CELL_MIN, most, sums: Vec::new() }
    }

    /// Adds the bytes of a span, which begins at or after the end of the last span.
    #[inline]
    fn add(&mut self, span: Span) {
        if span.size == 0 {
            return;
        }
        // Ends, because a span of any length lies in two cells at last, and so do all others.
        while span.size / self.size >= (self.most - self.most.min(self.sums.len())) as u64
            && span.size / self.size > 0
        {
            self.fold_to(self.size * 2);
        }
        let mut at = span.offset;
        while at < span.end() {
            let nth = at / self.size;
            let end = ((nth + 1) * self.size).min(span.end());
            match self.sums.last_mut() {
                Some((last, sum)) if *last == nth => *sum += end - at,
                _ => self.sums.push((nth, end - at)),
            }
            at = end;
        }
        while self.sums.len() > self.most {
            self.fold_to(self.size * 2);
        }
    }

    /// Enlarges the cells to this size.
    fn fold_to(&mut self, size: u64) {
        if size == self.size {
            return;
        }
        let times = size / self.size;
        self.size = size;
        self.sums.iter_mut().for_each(|(nth, _)| *nth /= times);
        self.sums.dedup_by(|(nth, sum), (before, sum_before)| {
            let is_one = nth == before;
            if is_one {
                *sum_before += *sum;
            }
            is_one
        });
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

    fn sum(region: &RegionOccupancy, of: fn(&OccupancyCell) -> ByteSize) -> ByteSize {
        region.occupancy.iter().map(of).sum()
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
            for (told, found) in snapshot.regions.iter().zip(&occupancy.regions) {
                assert!(found.occupancy.len() <= cells_max, "{} cells", found.occupancy.len());
                assert!(found.occupancy.is_sorted_by(|one, next| one.nth < next.nth));
                let live = told.live.saturating_add(told.cached);
                assert_eq!(sum(found, |cell| cell.live), live, "{cells_max}");
                assert_eq!(sum(found, |cell| cell.active), told.active, "{cells_max}");
                assert_eq!(sum(found, |cell| cell.idle), told.idle, "{cells_max}");
                for cell in &found.occupancy {
                    assert!(cell.active.saturating_add(cell.idle) <= found.cell, "{cell:?}");
                    assert!(cell.live <= found.cell, "{cell:?}");
                }
            }
        }
    }

    #[test]
    fn addresses_without_anything_have_no_cell() {
        let arena = arena(ByteSize::gib(1024));
        let small = arena.alloc::<u8>(100, Region::Dynamic).expect("room");
        let large = arena.alloc::<u8>(3 << 20, Region::Dynamic).expect("room");
        let region = arena.occupancy(512).regions.remove(1);
        assert_eq!(region.blocks, 2);
        let ends = region.occupancy.first().zip(region.occupancy.last());
        let (first, last) = ends.expect("some cells");
        assert!(last.nth - first.nth > 512, "they lie far apart, as small and large blocks do");
        assert!(region.cell <= ByteSize::kib(64), "and are drawn finely: {}", region.cell);
        drop((small, large));
    }

    #[test]
    fn an_empty_arena_has_no_cells_and_one_that_sleeps_shows_what_is_asleep() {
        use crate::{Contents, SleepOptions};
        let arena = arena(ByteSize::mib(64));
        assert!(arena.occupancy(64).regions.iter().all(|region| region.occupancy.is_empty()));
        let held = arena.alloc::<u8>(3 << 20, Region::Stable).expect("room");
        let (stable, dynamic) = (Contents::Discard, Contents::Discard);
        arena.sleep(SleepOptions { stable, dynamic, ..Default::default() }).expect("asleep");
        let region = &arena.occupancy(64).regions[0];
        assert_eq!(sum(region, |cell| cell.live), ByteSize::mib(3));
        assert_eq!(sum(region, |cell| cell.active.saturating_add(cell.idle)), ByteSize::ZERO);
        drop(held);
    }
}
