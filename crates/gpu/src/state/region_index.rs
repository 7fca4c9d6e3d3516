//! The addresses of a region in two ranges: large blocks from the low end, small blocks in a
//! separate range at the high end.
//!
//! A small block that stays would pin a granule among large blocks, so small blocks share granules
//! with small blocks. The small range is a ninth of the addresses, which cost nothing. If the small
//! range is full, or memory is short, a small block is placed among the large ones. Between the
//! ranges is a wall, a granule without an owner, so that no free span crosses the border.
//!
//! This module joins two indexes under one set of block ids, and decides nothing about memory.
//!
//! Invariants: large range, wall and small range tile `[0, span)`; an id always refers to one
//! range.

use crate::index::{BlockId, BlockIndex, End, Request, Span};
use crate::types::Region;

/// The small range gets one in this many addresses.
const SMALL_PART: u64 = 9;

/// The number of granules from which on there are two ranges: with fewer, each granule counts. A
/// guess.
pub(crate) const APART_FROM: u64 = 64;

/// The id of one live block of an arena. No id is used twice: it has the marks of the region and of
/// the range.
pub(crate) type BlockName = BlockId;

impl BlockId {
    /// Returns the end of the region at which the block's range is.
    pub(crate) const fn end(self) -> End {
        if self.marks() & 1 == 0 { End::Low } else { End::High }
    }

    /// Returns the block's region.
    pub(crate) const fn region(self) -> Region {
        if self.marks() & 2 == 0 { Region::Stable } else { Region::Dynamic }
    }
}

/// The blocks of a region.
#[derive(Debug)]
pub(crate) struct RegionIndex {
    pub(crate) region: Region,
    /// The index of the range at each end.
    ranges: [BlockIndex; 2],
}

/// Returns the bytes of addresses that a region needs so that its large range has `large` of them:
/// a multiple of the granule, as `large` is.
pub(crate) fn span_for(large: u64, granule: u64) -> u64 {
    if large / granule < APART_FROM {
        return large;
    }
    let small = (large / (SMALL_PART - 1)).next_multiple_of(granule);
    large.saturating_add(small).saturating_add(granule)
}

impl RegionIndex {
    /// Creates an index of free addresses. With fewer than [`APART_FROM`] granules there is no
    /// small range.
    pub(crate) fn new(region: Region, span: u64, granule: u64) -> Self {
        let part = if span / granule < APART_FROM { 0 } else { span / SMALL_PART };
        let small = part / granule * granule;
        let wall = if small > 0 { granule } else { 0 };
        let low = Span { offset: 0, size: span - small - wall };
        let high = Span { offset: span - small, size: small };
        let of = |range, end| BlockIndex::over(range, end as u32 | (region as u32) << 1, 0);
        Self { region, ranges: [of(low, End::Low), of(high, End::High)] }
    }

    /// Returns the bytes of addresses that large blocks can have.
    pub(crate) const fn large(&self) -> u64 {
        self.bounds(End::Low).size
    }

    /// Returns the wall between the ranges, if there are two.
    pub(crate) const fn wall(&self) -> Option<Span> {
        let offset = self.large();
        let span = Span { offset, size: self.bounds(End::High).offset - offset };
        if span.size > 0 { Some(span) } else { None }
    }

    /// Like [`BlockIndex::take`], in the range at the request's end. A small block that finds no
    /// address there is placed among the large ones, unless it is to stay `within` the range.
    pub(crate) fn take(
        &mut self,
        request: Request,
        within: bool,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockName, Span)> {
        let [low, high] = &mut self.ranges;
        if matches!(request.end, End::High) && high.span() > 0 {
            let taken = high.take(request, &cost);
            if taken.is_some() || within {
                return taken;
            }
        }
        low.take(Request { end: End::Low, ..request }, cost)
    }

    /// Returns all offsets of the range at an end.
    pub(crate) const fn bounds(&self, end: End) -> Span {
        self.ranges[end as usize].range()
    }

    /// Returns the end whose range an offset lies in.
    pub(crate) const fn end_at(&self, offset: u64) -> End {
        if offset >= self.bounds(End::High).offset { End::High } else { End::Low }
    }

    /// Like [`BlockIndex::take_cheapest`], in both ranges for a small block.
    pub(crate) fn take_cheapest(
        &mut self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockName, Span)> {
        let low = Request { end: End::Low, ..request };
        let [low_index, high_index] = &mut self.ranges;
        if request.end == End::High
            && let Some(high) = high_index.cheapest(request, &cost)
            && low_index.cheapest(low, &cost).is_none_or(|low| high <= low)
        {
            return high_index.take_cheapest(request, cost);
        }
        low_index.take_cheapest(low, cost)
    }

    /// Like [`BlockIndex::take_at`].
    pub(crate) fn take_at(&mut self, span: Span) -> Option<BlockName> {
        self.ranges[self.end_at(span.offset) as usize].take_at(span)
    }

    /// Like [`BlockIndex::release`].
    pub(crate) fn release(&mut self, id: BlockName) -> Option<Span> {
        self.ranges[id.end() as usize].release(id)
    }

    /// Like [`BlockIndex::span_of`].
    pub(crate) fn span_of(&self, id: BlockName) -> Option<Span> {
        self.ranges[id.end() as usize].span_of(id)
    }

    /// Like [`BlockIndex::resize`]; a block stays in its range.
    pub(crate) fn resize(&mut self, id: BlockName, size: u64) -> Option<Span> {
        self.ranges[id.end() as usize].resize(id, size)
    }

    /// Like [`BlockIndex::exchange`], for two blocks of one range.
    pub(crate) fn exchange(&mut self, id: BlockName, other: BlockName) -> bool {
        self.ranges[id.end() as usize].exchange(id, other)
    }

    /// Returns the bytes of all live blocks.
    pub(crate) fn live(&self) -> u64 {
        self.ranges.iter().map(BlockIndex::live).sum()
    }

    /// Returns the bytes of the indexes themselves.
    pub(crate) fn metadata(&self) -> usize {
        self.ranges.iter().map(BlockIndex::metadata).sum()
    }

    /// Like [`BlockIndex::largest_of`], with this many looks in each range.
    pub(crate) fn largest_of(&self, looks: usize, measure: impl Fn(Span) -> u64) -> u64 {
        let ranges = self.ranges.iter();
        ranges.map(|index| index.largest_of(looks, &measure)).fold(0, u64::max)
    }

    /// Like [`BlockIndex::blocks`]: the blocks of the low range, then those of the high range. The
    /// wall is not included.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (Span, Option<BlockName>)> {
        self.ranges.iter().flat_map(BlockIndex::blocks)
    }

    /// Like [`BlockIndex::live_blocks_unordered`], for both ranges.
    pub(crate) fn live_unordered(&self) -> impl Iterator<Item = Span> {
        self.ranges.iter().flat_map(BlockIndex::live_blocks_unordered)
    }

    /// Like [`RegionIndex::blocks`], for one range.
    pub(crate) fn blocks_of(&self, end: End) -> impl Iterator<Item = (Span, Option<BlockName>)> {
        self.ranges[end as usize].blocks()
    }

    /// # Panics
    /// If an invariant is violated.
    pub(crate) fn validate(&self) {
        self.ranges.iter().for_each(BlockIndex::validate);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 1 << 20;

    fn request(size: u64, end: End) -> Request {
        Request { size, align: 256, end }
    }

    #[test]
    fn small_blocks_have_a_range_of_their_own_and_go_among_the_large_when_it_is_full() {
        let mut ranges =
            RegionIndex::new(Region::Dynamic, span_for(64 * GRANULE, GRANULE), GRANULE);
        assert_eq!(ranges.large(), 64 * GRANULE);
        let wall = ranges.wall().expect("two ranges");
        let (mut above, mut below) = (0, 0);
        while let Some((name, span)) = ranges.take(request(GRANULE / 2, End::High), false, |_| 0) {
            assert_eq!(ranges.span_of(name), Some(span));
            assert_eq!(name.end() == End::High, span.offset >= wall.end());
            *(if span.offset >= wall.end() { &mut above } else { &mut below }) += 1;
            assert!(span.end() <= wall.offset || span.offset >= wall.end());
        }
        assert_eq!((above, below), (16, 128), "all addresses but the wall's");
        ranges.validate();
    }

    #[test]
    fn blocks_of_two_ranges_do_not_change_places() {
        let mut ranges =
            RegionIndex::new(Region::Dynamic, span_for(64 * GRANULE, GRANULE), GRANULE);
        let (small, _) = ranges.take(request(512, End::High), false, |_| 0).expect("room");
        let (large, _) = ranges.take(request(512, End::Low), false, |_| 0).expect("room");
        assert!(!ranges.exchange(small, large));
        let small = ranges.release(small).expect("live");
        assert!(small.offset > 64 * GRANULE && ranges.take_at(small).is_some());
        ranges.validate();
    }

    #[test]
    fn a_few_granules_are_one_range() {
        assert_eq!(span_for(63 * GRANULE, GRANULE), 63 * GRANULE);
        let mut ranges = RegionIndex::new(Region::Dynamic, 63 * GRANULE, GRANULE);
        assert_eq!((ranges.large(), ranges.wall()), (63 * GRANULE, None));
        let (_, span) = ranges.take(request(512, End::High), false, |_| 0).expect("room");
        assert_eq!(span.offset, 0);
    }
}
