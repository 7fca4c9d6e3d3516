//! Sequential placement: each item goes to a gap that is free for its whole lifetime.
//!
//! The quality of a plan depends on the order, which the caller chooses; `order` has many. There is
//! no backtracking. First fit takes the lowest gap, best fit the smallest sufficient one; the last
//! two are exactly the rules of GGML's allocator and of ONNX Runtime's memory pattern.
//!
//! Invariant: no two placed items overlap.

use super::part::{Item, Subproblem};

/// The number of items between two checks of `stop`: about a millisecond for large parts.
const ITEMS_PER_STOP: u32 = 128;

/// Which of the gaps that are large enough an item takes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum FitRule {
    /// The lowest gap.
    First,
    /// The smallest sufficient gap, of equal ones the lowest; above all items if there is none.
    Best,
    /// The smallest sufficient gap, of equal ones the highest; above all items if there is none.
    BestHighest,
    /// Like `Best`, with the space between the topmost item and the peak so far as one more gap.
    BestBelowPeak,
}

/// The positions of the items placed so far.
#[derive(Debug)]
pub(super) struct Placer<'a> {
    part: &'a Subproblem,
    /// Sorted by offset.
    placed: Vec<Placed>,
    /// Ranges in which an item cannot begin: for items with gaps or windows.
    closed: Vec<(i64, i64)>,
    offsets: Vec<u64>,
    peak: u64,
    is_plain: bool,
}

/// One item that has its place.
#[derive(Clone, Copy, Debug)]
struct Placed {
    offset: u64,
    top: u64,
    from: u32,
    to: u32,
    item: u32,
}

impl<'a> Placer<'a> {
    pub(super) fn new(part: &'a Subproblem) -> Self {
        let count = part.items.len();
        let is_plain = !part.is_sliding && part.pieces.len() == count;
        let (placed, closed) = (Vec::with_capacity(count), Vec::new());
        Self { part, placed, closed, offsets: vec![0; count], peak: 0, is_plain }
    }

    /// Places all items in this order, those with fixed offsets first; stops if the peak reaches
    /// `enough` or `stop` is set. Returns the peak if it is below `enough`.
    ///
    /// O(items x items); if the order is that of first sections (`is_online`), ended items are
    /// dropped: O(items x live).
    pub(super) fn run(
        &mut self,
        order: &[u32],
        fit: FitRule,
        is_online: bool,
        enough: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        self.placed.clear();
        self.peak = 0;
        let is_fixed = |item: &&u32| self.part.items[**item as usize].fixed.is_some();
        let fixed: Vec<u32> = order.iter().filter(is_fixed).copied().collect();
        for item in fixed {
            let offset = self.part.items[item as usize].fixed.unwrap_or(0);
            self.put(item, offset);
        }
        let mut now = 0;
        for (&item, done) in order.iter().zip(1_u32..) {
            if done % ITEMS_PER_STOP == 0 && stop() {
                return None;
            }
            let own = &self.part.items[item as usize];
            if is_online && own.from > now {
                now = own.from;
                self.placed.retain(|other| other.to > now);
            }
            if own.fixed.is_none() {
                let offset = self.find(item, fit);
                self.put(item, offset);
            }
            if self.peak >= enough {
                return None;
            }
        }
        Some(self.peak)
    }

    /// Returns the offset of each item, by number.
    pub(super) fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    fn put(&mut self, item: u32, offset: u64) {
        let own = &self.part.items[item as usize];
        let top = offset + own.height;
        let placed = Placed { offset, top, from: own.from, to: own.to, item };
        let at = self.placed.partition_point(|other| other.offset <= offset);
        self.placed.insert(at, placed);
        self.offsets[item as usize] = offset;
        self.peak = self.peak.max(offset + own.size);
    }

    fn find(&mut self, item: u32, fit: FitRule) -> u64 {
        let own = &self.part.items[item as usize];
        let mut gaps = Gaps { part: self.part, own, at: 0, size: own.height, fit, best: None };
        gaps.at = self.part.fit(0, 1, own.size);
        if self.is_plain {
            for other in &self.placed {
                let apart = other.to <= own.from || own.to <= other.from;
                if !apart && gaps.pass(other.offset, other.top) {
                    break;
                }
            }
        } else {
            self.close(item as usize);
            gaps.size = 0;
            for (first, end) in &self.closed {
                if gaps.pass(first.cast_unsigned(), end.cast_unsigned()) {
                    break;
                }
            }
        }
        gaps.take(self.peak, own.size)
    }

    /// Lists the offsets, in their order, at which an item would overlap others.
    fn close(&mut self, item: usize) {
        self.closed.clear();
        for other in &self.placed {
            let (below, above) = (other.item as usize, item);
            let (Some(up), Some(down)) =
                (self.part.lift(below, above), self.part.lift(above, below))
            else {
                continue;
            };
            let offset = other.offset.cast_signed();
            let (first, end) = ((offset - down + 1).max(0), offset + up);
            if first < end {
                self.closed.push((first, end));
            }
        }
        self.closed.sort_unstable();
    }
}

/// The search for a gap, from below.
struct Gaps<'a> {
    part: &'a Subproblem,
    own: &'a Item,
    /// No offset below it is free.
    at: u64,
    size: u64,
    fit: FitRule,
    /// The remaining space of the best gap, and its offset.
    best: Option<(u64, u64)>,
}

impl Gaps<'_> {
    /// Skips an occupied range; returns `true` if the gap is found.
    #[inline]
    fn pass(&mut self, first: u64, end: u64) -> bool {
        // If items are represented by the offsets that they exclude, `size` is 0 and a gap ends at
        // the first such offset.
        let end_of_gap = first;
        if self.at + self.size <= end_of_gap && self.offer(end_of_gap - self.at - self.size) {
            return true;
        }
        if end > self.at {
            self.at = self.part.fit(end, self.own.align, self.own.size);
        }
        false
    }

    /// Offers the gap at `at`, of which so much is left; says whether it is taken at once.
    #[inline]
    fn offer(&mut self, left: u64) -> bool {
        let better = match self.best {
            None => true,
            Some((least, _)) => left < least || left == least && self.fit == FitRule::BestHighest,
        };
        // A gap of no length is between two that adjoin, unless nothing is to be placed there.
        if better && (self.size > 0 || left > 0) {
            self.best = Some((left, self.at));
        }
        self.fit == FitRule::First && self.best.is_some()
    }

    fn take(mut self, peak: u64, size: u64) -> u64 {
        if self.fit == FitRule::BestBelowPeak && self.at + size <= peak {
            self.offer(peak - self.at - size);
        }
        self.best.map_or(self.at, |(_, at)| at)
    }
}
