//! Takes a map of an arena: what its books say, under their lock.
//!
//! A granule on its way in or out counts as committed, and a block whose memory is still on its
//! way as free, as in a snapshot.
//!
//! Invariant: the map shows one instant; its events lead up to that instant.

use super::arena::DeviceArena;
use super::books::Books;
use super::picture::{ArenaMap, BlockSpan, BlockState, GranuleRun, GranuleState, SegmentMap};
use super::region::Region;
use crate::bytes::ByteSize;

impl DeviceArena {
    /// Where everything lies now, and the events that are kept; nothing in a forked child.
    ///
    /// Holds the lock while it copies the books: time and memory go with the number of blocks and
    /// granules. What was asked for is known of each region and not of each block: a block shows
    /// its rounded size there. What threads keep for their next request is given back first; what
    /// other threads put aside meanwhile shows as live.
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        let shared = self.shared();
        let empty = ArenaMap::empty(shared.name.clone());
        if shared.check_here().is_err() {
            return empty;
        }
        shared.empty_fronts();
        let books = shared.books();
        let taken = shared.clock.now();
        let segments = Region::ALL.iter().map(|&region| segment(&books, region)).collect();
        let events = books.history.events();
        let granularity = ByteSize::new(books.bytes_of(1));
        drop(books);
        let since_epoch = shared.clock.since_epoch();
        ArenaMap { taken, since_epoch, granularity, segments, events, ..empty }
    }
}

fn segment(books: &Books, region: Region) -> SegmentMap {
    let region_books = books.region(region);
    let segment = &region_books.segment;
    let blocks: Vec<_> = region_books
        .live_spans()
        .filter(|&span| segment.wanting(span) == 0)
        .map(|span| {
            let (offset, size) = (ByteSize::new(span.offset), ByteSize::new(span.size));
            BlockSpan { offset, size, requested: size, state: BlockState::Live }
        })
        .collect();
    let mut granules = Vec::new();
    let mut touched = Touched::new(&blocks);
    for run in segment.backed_runs() {
        let (at, size) = segment.place_of(run);
        let offset = at.offset_from(segment.base()).unwrap_or_default();
        let end = offset.saturating_add(size);
        touched.cut(offset.get(), end.get(), books.bytes_of(1), &mut granules);
    }
    SegmentMap {
        region: region.name().to_owned(),
        base: segment.base().get(),
        size: ByteSize::new(segment.reserved()),
        granules,
        blocks,
    }
}

/// Tells active granules from idle ones by the blocks that touch them, in one pass.
struct Touched<'a> {
    blocks: &'a [BlockSpan],
    next: usize,
}

impl<'a> Touched<'a> {
    const fn new(blocks: &'a [BlockSpan]) -> Self {
        Self { blocks, next: 0 }
    }

    /// Cuts backed granules into runs of one state.
    fn cut(&mut self, start: u64, end: u64, granule: u64, runs: &mut Vec<GranuleRun>) {
        let mut at = start;
        while at < end {
            let run_start = at;
            let (idle_to, active_to) = self.next_after(at, end, granule);
            at = if idle_to > at { idle_to } else { active_to };
            let state = if idle_to > run_start { GranuleState::Idle } else { GranuleState::Active };
            let (offset, size) = (ByteSize::new(run_start), ByteSize::new(at - run_start));
            match runs.last_mut().filter(|last| last.state == state) {
                Some(last) if last.offset.saturating_add(last.size) == offset => {
                    last.size = last.size.saturating_add(size);
                }
                _ => runs.push(GranuleRun { offset, size, state }),
            }
        }
    }

    /// Up to where granules from `at` on are idle, and to where the first block after that keeps
    /// them active.
    fn next_after(&mut self, at: u64, end: u64, granule: u64) -> (u64, u64) {
        let block_end = |block: &BlockSpan| block.offset.get() + block.size.get();
        while self.blocks.get(self.next).is_some_and(|block| block_end(block) <= at) {
            self.next += 1;
        }
        match self.blocks.get(self.next) {
            Some(block) if block.offset.get() < end => {
                let first = block.offset.get() / granule * granule;
                let last = block_end(block).next_multiple_of(granule);
                (first.max(at), last.min(end))
            }
            _ => (end, end),
        }
    }
}
