//! The naive model of a block index: a map of live spans; what is free is what they leave.
//!
//! [`Pair`] plays each act on the index and on the model, and compares what both say and what both
//! are afterwards. It draws nothing by chance: tests and the fuzz target bring the acts.
//!
//! Invariant, after every act: the index's blocks are the model's spans, each under its name.

use std::collections::BTreeMap;

use lowtide_gpu::index::{ALIGN, BlockId, BlockIndex, End, Request, Span};

/// Released names that are kept to be tried again.
const STALE_MAX: usize = 16;

/// One act. `nth` counts the live blocks in address order, round and round.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Act {
    /// Take so many bytes; what a granule costs is drawn from `cost`, 0 for nothing.
    Take { size: u64, align: u64, end: End, cost: u64 },
    /// Take exactly this.
    TakeAt { offset: u64, size: u64 },
    /// Release a block.
    Release { nth: usize },
    /// Resize a block.
    Resize { nth: usize, size: u64 },
    /// Exchange two blocks.
    Exchange { nth: usize, other: usize },
}

/// An index and its model.
pub(crate) struct Pair {
    index: BlockIndex,
    span: u64,
    /// By offset: size and name.
    live: BTreeMap<u64, (u64, BlockId)>,
    stale: Vec<BlockId>,
    /// `true` if so little is free that every free block is looked at.
    small: bool,
}

impl Pair {
    /// Both with `span` bytes, all free.
    pub(crate) fn new(span: u64, small: bool) -> Self {
        let index = BlockIndex::new(span);
        Self { index, span, live: BTreeMap::new(), stale: Vec::new(), small }
    }

    /// Live blocks.
    pub(crate) fn live(&self) -> usize {
        self.live.len()
    }

    /// The size of each block in address order, and whether it is live.
    pub(crate) fn layout(&self) -> Vec<(u64, bool)> {
        self.index.blocks().map(|(span, name)| (span.size, name.is_some())).collect()
    }

    /// Returns the free spans in address order.
    pub(crate) fn free(&self) -> Vec<Span> {
        let mut free = Vec::new();
        let mut end = 0;
        let live = self.live.iter().map(|(&offset, &(size, _))| (offset, size));
        for (offset, size) in live.chain([(self.span, 0)]) {
            if offset > end {
                free.push(Span { offset: end, size: offset - end });
            }
            end = offset + size;
        }
        free
    }

    /// Plays an act on both. Whether the index did it.
    pub(crate) fn play(&mut self, act: Act) -> bool {
        match act {
            Act::Take { size, align, end, cost } => self.take(Request { size, align, end }, cost),
            Act::TakeAt { offset, size } => self.take_at(offset, size),
            Act::Release { nth } => self.release(nth),
            Act::Resize { nth, size } => self.resize(nth, size),
            Act::Exchange { nth, other } => self.exchange(nth, other),
        }
    }

    /// Releases everything.
    pub(crate) fn clear(&mut self) {
        while self.release(0) {}
    }

    fn take(&mut self, request: Request, cost: u64) -> bool {
        let free = self.free();
        let align = request.align.max(ALIGN);
        let size = request.size.max(1).checked_next_multiple_of(ALIGN);
        let taken = self.index.take(request, |place| price(place, cost));
        let Some((id, span)) = taken else {
            let fits = |hole: &Span| size.is_some_and(|size| fit(*hole, size, align).is_some());
            if self.small {
                assert!(!free.iter().any(fits), "{request:?} fits, and failed");
            }
            // What the index promises: with 17/16 of size and alignment free in one it succeeds.
            let sure = size.and_then(|size| size.checked_add(align)?.div_ceil(16).checked_mul(17));
            let largest = free.iter().map(|hole| hole.size).max().unwrap_or(0);
            assert!(sure.is_none_or(|sure| largest < sure), "{request:?} beside {largest}");
            return false;
        };
        assert_eq!(Some(span.size), size);
        let hole = free.iter().find(|hole| hole.offset <= span.offset && span.end() <= hole.end());
        let hole = *hole.expect("a block that is taken was free");
        let (low, high) = fit(hole, span.size, align).expect("and large enough");
        let cut = if request.end == End::Low { low } else { high };
        assert_eq!(span.offset, cut, "{request:?} is cut from its end of {hole:?}");
        if self.small && cost.is_multiple_of(4) {
            // The tightest fit, and of equals the one nearest to the end.
            let fits = free.iter().filter(|hole| fit(**hole, span.size, align).is_some());
            let best = fits.min_by_key(|hole| {
                let far = if request.end == End::Low { hole.offset } else { !hole.offset };
                (hole.size, far)
            });
            assert_eq!(best, Some(&hole), "{request:?} among {free:?}");
        }
        self.enliven(span, id);
        true
    }

    fn take_at(&mut self, offset: u64, size: u64) -> bool {
        let span = Span { offset, size };
        let free = offset.checked_add(size).is_some_and(|end| {
            self.free().iter().any(|hole| hole.offset <= offset && end <= hole.end())
        });
        let aligned = offset.is_multiple_of(ALIGN) && size.is_multiple_of(ALIGN);
        let id = self.index.take_at(span);
        assert_eq!(id.is_some(), size > 0 && aligned && free, "{span:?}");
        if let Some(id) = id {
            self.enliven(span, id);
        }
        id.is_some()
    }

    fn release(&mut self, nth: usize) -> bool {
        let Some((span, id)) = self.nth(nth) else { return false };
        self.live.remove(&span.offset);
        assert_eq!(self.index.release(id), Some(span));
        assert_eq!(self.index.release(id), None, "a second release");
        if self.stale.len() == STALE_MAX {
            self.stale.remove(0);
        }
        self.stale.push(id);
        true
    }

    fn resize(&mut self, nth: usize, size: u64) -> bool {
        let Some((span, id)) = self.nth(nth) else { return false };
        let next = self.live.range(span.end()..).next().map_or(self.span, |(&offset, _)| offset);
        let size = size.max(1).checked_next_multiple_of(ALIGN);
        let fits = size.filter(|&size| size <= next - span.offset);
        let is = fits.map(|size| Span { size, ..span });
        assert_eq!(self.index.resize(id, size.unwrap_or(u64::MAX)), is);
        if let Some(is) = is {
            self.live.insert(is.offset, (is.size, id));
        }
        is.is_some()
    }

    fn exchange(&mut self, nth: usize, other: usize) -> bool {
        let (Some((left, a)), Some((right, b))) = (self.nth(nth), self.nth(other)) else {
            return false;
        };
        let outcome = self.index.exchange(a, b);
        let (low, high) = if left.offset < right.offset { (left, right) } else { (right, left) };
        if low.end() != high.offset && left.size != right.size {
            assert!(!outcome);
            return false;
        }
        assert!(outcome);
        if a != b {
            let (first, last) = if left.offset < right.offset { (a, b) } else { (b, a) };
            self.live.remove(&high.offset);
            self.live.insert(low.offset, (high.size, last));
            self.live.insert(high.end() - low.size, (low.size, first));
        }
        true
    }

    /// Compares everything.
    pub(crate) fn check(&self) {
        self.index.validate();
        let mut blocks = Vec::new();
        blocks.extend(self.free().into_iter().map(|span| (span.offset, span.size, None)));
        blocks.extend(self.live.iter().map(|(&offset, &(size, id))| (offset, size, Some(id))));
        blocks.sort_unstable_by_key(|&(offset, ..)| offset);
        let found = self.index.blocks().map(|(span, name)| (span.offset, span.size, name));
        assert!(found.eq(blocks), "the blocks are the model's");
        for (&offset, &(size, id)) in &self.live {
            assert_eq!(self.index.span_of(id), Some(Span { offset, size }));
        }
        let live: u64 = self.live.values().map(|&(size, _)| size).sum();
        assert_eq!(self.index.live(), live);
        let largest = self.free().iter().map(|span| span.size).max().unwrap_or(0);
        assert_eq!(self.index.largest(|span| span.size), largest);
    }

    /// Tries every released name that is kept, in every way.
    pub(crate) fn try_stale(&mut self) {
        for &id in &self.stale {
            assert_eq!(self.index.span_of(id), None);
            assert_eq!(self.index.release(id), None);
            assert_eq!(self.index.resize(id, 1), None);
            assert!(!self.index.exchange(id, id));
        }
    }

    fn enliven(&mut self, span: Span, id: BlockId) {
        let known = self.live.values().any(|&(_, other)| other == id) || self.stale.contains(&id);
        assert!(!known, "a name is given once");
        self.live.insert(span.offset, (span.size, id));
    }

    fn nth(&self, nth: usize) -> Option<(Span, BlockId)> {
        let nth = nth.checked_rem(self.live.len())?;
        let (&offset, &(size, id)) = self.live.iter().nth(nth)?;
        Some((Span { offset, size }, id))
    }
}

/// The lowest and the highest offset in a free block at which the request fits.
fn fit(hole: Span, size: u64, align: u64) -> Option<(u64, u64)> {
    let low = hole.offset.checked_next_multiple_of(align)?;
    let high = hole.end().checked_sub(size)? / align * align;
    (low <= high && low.checked_add(size)? <= hole.end()).then_some((low, high))
}

/// A cost that is a function of the place and otherwise arbitrary; 0 everywhere for 0.
fn price(place: Span, cost: u64) -> u64 {
    (place.offset / ALIGN).wrapping_mul(cost | 1).rotate_left(17) % (cost % 4 + 1)
}

/// Six bytes as an act: kind, shape, and two numbers that stand for sizes, places and blocks.
pub(crate) fn read(bytes: &[u8]) -> Option<Act> {
    let &[kind, shape, a, b, c, d] = bytes else { return None };
    let (first, second) = (u16::from_le_bytes([a, b]), u16::from_le_bytes([c, d]));
    let end = if shape & 1 == 0 { End::Low } else { End::High };
    // Sizes of all orders: 8 bits of mantissa, shifted by up to 15.
    let size = u64::from(first & 0xFF) << (first >> 12);
    let size = if shape == u8::MAX { u64::MAX - size } else { size };
    Some(match kind % 8 {
        0..3 => {
            let align = 1 << (second % 24);
            Act::Take { size, align, end, cost: u64::from(shape >> 6) }
        }
        3 => Act::TakeAt {
            offset: u64::from(second) * ALIGN / 4,
            size: size.checked_next_multiple_of(ALIGN).unwrap_or(size),
        },
        4..6 => Act::Release { nth: first.into() },
        6 => Act::Resize { nth: second.into(), size },
        _ => Act::Exchange { nth: first.into(), other: second.into() },
    })
}
