//! A coarse map of an arena: for each of some hundred cells of address space, what lies in it.
//!
//! For pages that show an arena again and again. Unlike [`DeviceArena::map`] it lists no block, has
//! no address, and leaves the fronts of threads alone: what those keep shows as live. Blocks whose
//! memory is on its way show as asleep.
//!
//! Invariants: `active + idle <= size` of every cell; of the sums of a region, `active + idle` is
//! what is committed; `cells <= cells_max`.

use super::arena::DeviceArena;
use super::books::Books;
use super::index::Span;
use super::picture::GranuleState;
use super::region::Region;
use crate::bytes::ByteSize;

/// Bytes of the smallest cell: less is not told apart in a picture of an arena.
const CELL_MIN: u64 = 4 << 10;

/// Where everything in an arena lies, in cells.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaCells {
    /// The smallest unit that is committed.
    pub granularity: ByteSize,
    /// In the order of [`Region::ALL`]; none in a forked child.
    pub regions: Vec<RegionCells>,
}

/// A region in cells, from its first offset up to the last that has memory or a block.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RegionCells {
    /// Its name.
    pub region: &'static str,
    /// Bytes of each cell: a power of two.
    pub cell: ByteSize,
    /// Its live blocks.
    pub blocks: u64,
    /// From the first address on.
    pub cells: Vec<Cell>,
}

/// What lies in one cell. The rest of it is bare.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Cell {
    /// Bytes of live blocks; more than is active where they are asleep.
    pub live: ByteSize,
    /// Bytes of freed blocks that the device may still use.
    pub pending: ByteSize,
    /// Bytes with memory, of granules that a block touches.
    pub active: ByteSize,
    /// Bytes with memory, of granules that none touches.
    pub idle: ByteSize,
}

impl DeviceArena {
    /// Where everything lies now, each region in at most `cells_max` cells (at least 2).
    ///
    /// Holds the lock for a walk over all blocks, some 10 ns for each, and allocates the cells and
    /// an entry for each run of committed granules. Nothing in a forked child.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide::clock::SystemClock;
    /// # use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let config = ArenaConfig::new("embedder");
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let activations = arena.alloc::<u8>(1 << 20, Region::Dynamic)?;
    /// let cells = arena.cells(64);
    /// let live: u64 = cells.regions[1].cells.iter().map(|cell| cell.live.get()).sum();
    /// assert_eq!((cells.regions[1].blocks, live), (1, 1 << 20));
    /// # drop(activations);
    /// # Ok::<(), lowtide::device::DeviceError>(())
    /// ```
    #[must_use]
    pub fn cells(&self, cells_max: usize) -> ArenaCells {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return ArenaCells { granularity: ByteSize::ZERO, regions: Vec::new() };
        }
        let books = shared.books();
        let of = |&region: &Region| region_cells(&books, region, cells_max);
        let regions = Region::ALL.iter().map(of).collect();
        ArenaCells { granularity: ByteSize::new(books.bytes_of(1)), regions }
    }
}

fn region_cells(books: &Books, region: Region, cells_max: usize) -> RegionCells {
    let books_of = books.region(region);
    let mut strip = Strip::new(cells_max);
    let mut backed = Vec::new();
    for (run, state) in books_of.segment.stretches().into_iter().flat_map(|it| it.backed) {
        strip.add(run, |cell| &mut cell.backed);
        match state {
            Some(GranuleState::Active) => strip.add(run, |cell| &mut cell.active),
            Some(GranuleState::Idle) => {}
            None => backed.push(run),
        }
    }
    let mut touched = Touched { backed: &backed, at: None };
    let granule = books.bytes_of(1);
    let mut pending = books_of.pending.spans().peekable();
    let mut blocks = 0;
    for live in books_of.live_spans() {
        while let Some(freed) = pending.next_if(|freed| freed.offset < live.offset) {
            strip.add(freed, |cell| &mut cell.pending);
            touched.touch(freed, granule, &mut strip);
        }
        blocks += 1;
        strip.add(live, |cell| &mut cell.live);
        touched.touch(live, granule, &mut strip);
    }
    for freed in pending {
        strip.add(freed, |cell| &mut cell.pending);
        touched.touch(freed, granule, &mut strip);
    }
    touched.flush(&mut strip);
    let cell = ByteSize::new(strip.size);
    RegionCells { region: region.name(), cell, blocks, cells: strip.finish() }
}

/// The cells while they are filled.
struct Strip {
    size: u64,
    most: usize,
    sums: Vec<Sums>,
}

#[derive(Clone, Copy, Default)]
struct Sums {
    live: u64,
    pending: u64,
    backed: u64,
    active: u64,
}

impl Strip {
    fn new(cells_max: usize) -> Self {
        Self { size: CELL_MIN, most: cells_max.max(2), sums: Vec::new() }
    }

    /// Adds the bytes of a span to one sum of each cell that it lies in.
    #[inline]
    fn add(&mut self, span: Span, sum: impl Fn(&mut Sums) -> &mut u64) {
        if span.size == 0 {
            return;
        }
        self.reach(span.end());
        let mut at = span.offset;
        while at < span.end() {
            let nth = at / self.size;
            let end = ((nth + 1) * self.size).min(span.end());
            if let Some(sums) = usize::try_from(nth).ok().and_then(|nth| self.sums.get_mut(nth)) {
                *sum(sums) += end - at;
            }
            at = end;
        }
    }

    /// Has cells up to this offset, twice as large ones where they would be too many.
    #[inline]
    fn reach(&mut self, end: u64) {
        let wanted = |size: u64| usize::try_from(end.div_ceil(size)).unwrap_or(usize::MAX);
        if wanted(self.size) <= self.sums.len() {
            return;
        }
        while wanted(self.size) > self.most {
            self.size *= 2;
            let halves = self.sums.len().div_ceil(2);
            for nth in 0..halves {
                let one = self.sums.get(2 * nth).copied().unwrap_or_default();
                let other = self.sums.get(2 * nth + 1).copied().unwrap_or_default();
                if let Some(sums) = self.sums.get_mut(nth) {
                    *sums = one.with(other);
                }
            }
            self.sums.truncate(halves);
        }
        let cells = wanted(self.size).max(self.sums.len());
        self.sums.resize(cells, Sums::default());
    }

    fn finish(self) -> Vec<Cell> {
        let cell = |sums: Sums| {
            debug_assert!(sums.active <= sums.backed && sums.backed <= self.size);
            Cell {
                live: ByteSize::new(sums.live),
                pending: ByteSize::new(sums.pending),
                active: ByteSize::new(sums.active),
                idle: ByteSize::new(sums.backed - sums.active),
            }
        };
        self.sums.into_iter().map(cell).collect()
    }
}

impl Sums {
    const fn with(self, other: Self) -> Self {
        Self {
            live: self.live + other.live,
            pending: self.pending + other.pending,
            backed: self.backed + other.backed,
            active: self.active + other.active,
        }
    }
}

/// Granules that blocks touch, joined as they come, and booked where there is memory.
struct Touched<'a> {
    /// Runs of granules with memory of which it is not known whether a block touches them.
    backed: &'a [Span],
    /// Where the granules that are joined so far begin and end.
    at: Option<(u64, u64)>,
}

impl Touched<'_> {
    #[inline]
    fn touch(&mut self, span: Span, granule: u64, strip: &mut Strip) {
        let start = span.offset / granule * granule;
        let end = span.end().next_multiple_of(granule);
        match &mut self.at {
            Some((_, until)) if start <= *until => *until = end.max(*until),
            _ => {
                self.flush(strip);
                self.at = Some((start, end));
            }
        }
    }

    fn flush(&mut self, strip: &mut Strip) {
        let Some((start, end)) = self.at.take() else { return };
        while let Some((run, rest)) = self.backed.split_first() {
            if run.offset >= end {
                return;
            }
            let (from, to) = (run.offset.max(start), run.end().min(end));
            if from < to {
                let both = Span { offset: from, size: to - from };
                strip.add(both, |cell| &mut cell.active);
            }
            if run.end() > end {
                return; // the next may touch it too
            }
            self.backed = rest;
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::clock::ManualClock;
    use crate::device::{ArenaConfig, HostDriver};

    fn arena(reserve: ByteSize) -> DeviceArena {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        let config = ArenaConfig { reserve, ..ArenaConfig::new("a") };
        DeviceArena::open(driver, clock, config).expect("opens")
    }

    fn sum(region: &RegionCells, of: fn(&Cell) -> ByteSize) -> ByteSize {
        region.cells.iter().map(of).sum()
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
            let cells = arena.cells(cells_max);
            let snapshot = arena.snapshot();
            for (told, found) in snapshot.regions.iter().zip(&cells.regions) {
                assert!(found.cells.len() <= cells_max, "{} cells", found.cells.len());
                let live = told.live.saturating_add(told.cached);
                assert_eq!(sum(found, |cell| cell.live), live, "{cells_max}");
                assert_eq!(sum(found, |cell| cell.active), told.active, "{cells_max}");
                assert_eq!(sum(found, |cell| cell.idle), told.idle, "{cells_max}");
                for cell in &found.cells {
                    assert!(cell.active.saturating_add(cell.idle) <= found.cell, "{cell:?}");
                    assert!(cell.live <= found.cell, "{cell:?}");
                }
            }
        }
    }

    #[test]
    fn an_empty_arena_has_no_cells_and_one_that_sleeps_shows_what_is_asleep() {
        use crate::device::{Contents, SleepOptions};
        let arena = arena(ByteSize::mib(64));
        assert!(arena.cells(64).regions.iter().all(|region| region.cells.is_empty()));
        let held = arena.alloc::<u8>(3 << 20, Region::Stable).expect("room");
        let (stable, dynamic) = (Contents::Discard, Contents::Discard);
        arena.sleep(SleepOptions { stable, dynamic, ..Default::default() }).expect("asleep");
        let region = &arena.cells(64).regions[0];
        assert_eq!(sum(region, |cell| cell.live), ByteSize::mib(3));
        assert_eq!(sum(region, |cell| cell.active.saturating_add(cell.idle)), ByteSize::ZERO);
        drop(held);
    }
}
