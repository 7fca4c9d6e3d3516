//! A model of a region: its blocks and free spans, on which moves are tried and undone.
//!
//! Plain values in address order. The model knows neither budget nor goal. Its size grows with the
//! number of blocks, not with bytes or granules.
//!
//! Invariant: blocks and free spans tile `[0, end)`, no two free spans touch, and `active` is the
//! number of granules that a block touches.

use std::collections::{BTreeMap, BTreeSet};

use super::plan::{Hold, LayoutPart};
use crate::index::Span;

/// A block of the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ModelBlock {
    pub(super) span: Span,
    pub(super) hold: Hold,
}

/// The blocks and free spans of a region.
#[derive(Clone, Debug, Default)]
pub(super) struct LayoutModel {
    pub(super) granule: u64,
    /// The size and hold of each block, by offset.
    blocks: BTreeMap<u64, (u64, Hold)>,
    /// The size of each free span, by offset.
    free: BTreeMap<u64, u64>,
    /// The size and offset of each free span, before the wall and after it.
    by_size: [BTreeSet<(u64, u64)>; 2],
    /// The wall, which no block passes.
    wall: Option<u64>,
    /// The number of granules that a block touches.
    pub(super) active: u64,
}

impl LayoutModel {
    /// Creates a model of these parts, which are in address order and tile the region.
    pub(super) fn new(parts: &[LayoutPart], granule: u64) -> Self {
        let wall = parts.iter().find(|part| part.hold == Some(Hold::Wall));
        let wall = wall.map(|wall| wall.span.offset);
        let mut model = Self { granule, wall, ..Self::default() };
        for part in parts {
            match part.hold {
                Some(hold) => {
                    model.active += model.alone(part.span);
                    model.blocks.insert(part.span.offset, (part.span.size, hold));
                }
                None => model.note_free(part.span),
            }
        }
        model
    }

    /// Returns the largest free span; of equal ones the lowest.
    pub(super) fn largest(&self) -> Option<Span> {
        let sides = self.by_size.iter();
        let size = sides.filter_map(|side| Some(side.last()?.0)).max()?;
        let mut lowest = self.by_size.iter().filter_map(|side| side.range((size, 0)..).next());
        lowest.next().map(|&(size, offset)| Span { offset, size })
    }

    /// Returns the free spans that hold this many bytes, the smallest first, on the same side
    /// of the wall as the offset `beside`.
    pub(super) fn at_least(&self, size: u64, beside: u64) -> impl DoubleEndedIterator<Item = Span> {
        let spans = self.by_size[self.side(beside)].range((size, 0)..);
        spans.map(|&(size, offset)| Span { offset, size })
    }

    /// Returns blocks and free spans in address order.
    pub(super) fn parts(&self) -> Vec<LayoutPart> {
        let part = |offset, size, hold| LayoutPart { span: Span { offset, size }, hold };
        let blocks = self.blocks.iter().map(|(&at, &(size, hold))| part(at, size, Some(hold)));
        let free = self.free.iter().map(|(&at, &size)| part(at, size, None));
        let mut parts: Vec<LayoutPart> = blocks.chain(free).collect();
        parts.sort_unstable_by_key(|part| part.span.offset);
        parts
    }

    /// Returns the last block that begins before an offset.
    pub(super) fn before(&self, offset: u64) -> Option<ModelBlock> {
        self.blocks.range(..offset).next_back().map(block)
    }

    /// Returns the first block that begins at an offset or after it.
    pub(super) fn after(&self, offset: u64) -> Option<ModelBlock> {
        self.blocks.range(offset..).next().map(block)
    }

    /// Returns the free span that ends at an offset.
    pub(super) fn gap_below(&self, offset: u64) -> Option<Span> {
        let (&start, &size) = self.free.range(..offset).next_back()?;
        (start + size == offset).then_some(Span { offset: start, size })
    }

    /// Returns the free span that begins at an offset.
    pub(super) fn gap_above(&self, offset: u64) -> Option<Span> {
        self.free.get(&offset).map(|&size| Span { offset, size })
    }

    /// Returns the blocks that touch a span, in address order.
    pub(super) fn touching(&self, span: Span) -> Vec<ModelBlock> {
        let below = self.blocks.range(..span.end()).rev().map(block);
        let mut touching: Vec<ModelBlock> =
            below.take_while(|block| block.span.end() > span.offset).collect();
        touching.reverse();
        touching
    }

    /// Returns the number of granules that a span touches and that no block before or after it
    /// touches.
    pub(super) fn alone(&self, span: Span) -> u64 {
        let first = span.offset / self.granule;
        let end = span.end().div_ceil(self.granule);
        let below = self.before(span.offset).map_or(0, |b| b.span.end().div_ceil(self.granule));
        let above = self.after(span.end()).map_or(u64::MAX, |b| b.span.offset / self.granule);
        end.min(above).saturating_sub(first.max(below))
    }

    /// Takes a block off the model. Its span becomes free.
    pub(super) fn lift(&mut self, block: ModelBlock) {
        self.blocks.remove(&block.span.offset);
        self.active -= self.alone(block.span);
        let mut free = block.span;
        if let Some(below) = self.gap_below(free.offset) {
            self.forget_free(below);
            free = Span { offset: below.offset, size: below.size + free.size };
        }
        if let Some(above) = self.gap_above(free.end()) {
            self.forget_free(above);
            free.size += above.size;
        }
        self.note_free(free);
    }

    /// Puts a block on the model, into a free span that holds it.
    pub(super) fn put(&mut self, block: ModelBlock) {
        let span = block.span;
        let around = self.free.range(..=span.offset).next_back();
        let around = around.map(|(&offset, &size)| Span { offset, size });
        let Some(around) = around.filter(|around| span.end() <= around.end()) else {
            debug_assert!(false, "{span:?} is not free");
            return;
        };
        self.forget_free(around);
        self.note_free(Span { offset: around.offset, size: span.offset - around.offset });
        self.note_free(Span { offset: span.end(), size: around.end() - span.end() });
        self.active += self.alone(span);
        self.blocks.insert(span.offset, (span.size, block.hold));
    }

    fn note_free(&mut self, span: Span) {
        if span.size > 0 {
            self.free.insert(span.offset, span.size);
            let side = self.side(span.offset);
            self.by_size[side].insert((span.size, span.offset));
        }
    }

    fn forget_free(&mut self, span: Span) {
        self.free.remove(&span.offset);
        let side = self.side(span.offset);
        self.by_size[side].remove(&(span.size, span.offset));
    }

    /// Returns the side of the wall on which an offset is: 0 before, 1 after.
    fn side(&self, offset: u64) -> usize {
        usize::from(self.wall.is_some_and(|wall| offset > wall))
    }
}

fn block((&offset, &(size, hold)): (&u64, &(u64, Hold))) -> ModelBlock {
    ModelBlock { span: Span { offset, size }, hold }
}
