//! One way from the bottom to the top, with foresight: for parts that are too large to search.
//!
//! Items are placed in the order of their offsets, as the exact search does it, and none is taken
//! back. The height is the bound at first. What is placed must leave room for everything: no item
//! that is left may be raised to where it and what is left of one of its sections pass the height.
//! Of the lowest items the one with the least room to spare is tried first; where none of some
//! tries leaves enough room, the one that lacks least is placed and the height grows by that.
//!
//! Only for parts without walls whose items each need one window at their start, none fixed.
//!
//! Invariant: `offset + largest total of a section <= height` for every item that is left.

use super::part::Part;
use super::totals::Totals;

/// A part on its way to the top.
#[derive(Debug)]
pub(super) struct Dive<'a> {
    part: &'a Part,
    /// The items that are left, in the order of their first sections.
    left: Vec<Left>,
    totals: Totals,
    height: u64,
    offsets: Vec<u64>,
    tried: Vec<usize>,
}

/// An item that is left.
#[derive(Clone, Copy, Debug)]
struct Left {
    from: u32,
    to: u32,
    /// The lowest offset at which it can be placed now; `PLACED` where it is.
    offset: u64,
    height: u64,
    /// No smaller than the largest total of its sections: totals fall, and it is looked up again
    /// only where it matters.
    most: u64,
    align: u64,
    item: u32,
    /// Among equals the largest goes first.
    weight: u64,
}

const PLACED: u64 = u64::MAX;

/// How a dive chooses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Manner {
    /// How many items are tried for a place before room is made.
    pub(super) tries: usize,
    /// What counts among equals: an item's size, its sections, or both.
    pub(super) by_size: bool,
    pub(super) by_width: bool,
}

/// Manners, the most promising first.
pub(super) const MANNERS: [Manner; 4] = [
    Manner { tries: 8, by_size: true, by_width: true },
    Manner { tries: 8, by_size: true, by_width: false },
    Manner { tries: 8, by_size: false, by_width: true },
    Manner { tries: 64, by_size: true, by_width: true },
];

impl<'a> Dive<'a> {
    /// Whether a part can be dived through.
    pub(super) fn suits(part: &Part) -> bool {
        let plain = !part.is_sliding && part.pieces.len() == part.items.len();
        plain && part.walls.is_none() && part.items.iter().all(|item| item.fixed.is_none())
    }

    pub(super) fn new(part: &'a Part) -> Self {
        debug_assert!(Self::suits(part), "gaps, windows or fixed offsets");
        let (left, tried) = (Vec::with_capacity(part.items.len()), Vec::new());
        let totals = Totals::new(part.sections);
        Self { part, left, totals, height: 0, offsets: vec![0; part.items.len()], tried }
    }

    /// The offsets of the last run, by the items' numbers.
    pub(super) fn offsets(&self) -> &[u64] {
        &self.offsets
    }

    /// Goes all the way in this manner, unless the height comes to `enough` or it is told to stop;
    /// says the peak.
    pub(super) fn run(
        &mut self,
        manner: Manner,
        enough: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        self.start(manner);
        let mut placed = 0;
        for step in 0..self.left.len() {
            if step % 64 == 0 && stop() {
                return None;
            }
            let at = self.choose(manner);
            self.put(at);
            placed += 1;
            if self.height >= enough {
                return None;
            }
            if placed * 4 > self.left.len() {
                self.left.retain(|left| left.offset != PLACED);
                placed = 0;
            }
            if self.left.is_empty() {
                break;
            }
        }
        Some(self.part.peak(&self.offsets))
    }

    fn start(&mut self, manner: Manner) {
        self.height = self.part.bound.next_multiple_of(self.part.grain);
        self.totals.clear();
        for item in &self.part.items {
            self.totals.add(item.from, item.to, item.height);
        }
        self.left.clear();
        for (item, number) in self.part.items.iter().zip(0..) {
            let width = u64::from(item.to - item.from);
            let weight = match (manner.by_size, manner.by_width) {
                (true, true) => item.size.saturating_mul(width),
                (true, false) => item.size,
                (false, true) => width,
                (false, false) => 0,
            };
            self.left.push(Left {
                from: item.from,
                to: item.to,
                offset: 0,
                height: item.height,
                most: self.totals.most(item.from, item.to),
                align: item.align,
                item: number,
                weight,
            });
        }
        self.left.sort_by_key(|left| (left.from, left.item));
        // The topmost of a section may lack what it is rounded up by.
        let most = self.left.iter().map(|left| left.most).max().unwrap_or(0);
        self.height = self.height.max(most);
    }

    /// The item to place next.
    fn choose(&mut self, manner: Manner) -> usize {
        let (mut best, mut least_lack) = (0, u64::MAX);
        self.tried.clear();
        while self.tried.len() < manner.tries {
            let Some(at) = self.lowest() else { break };
            self.tried.push(at);
            let lack = self.lack(at, least_lack);
            if lack < least_lack {
                (best, least_lack) = (at, lack);
            }
            if lack == 0 {
                break;
            }
        }
        self.height += if least_lack == u64::MAX { 0 } else { least_lack };
        best
    }

    /// The lowest item that was not tried, of equally low ones the one with least room to spare.
    fn lowest(&mut self) -> Option<usize> {
        loop {
            let mut best: Option<(usize, (u64, u64))> = None;
            let mut lowest = PLACED - 1;
            for (at, left) in self.left.iter().enumerate() {
                if left.offset > lowest {
                    continue;
                }
                let rank = (left.most, left.weight);
                let better = left.offset < lowest || best.is_none_or(|(_, best)| rank > best);
                if better && !self.tried.contains(&at) {
                    lowest = left.offset;
                    best = Some((at, rank));
                }
            }
            let (at, (known, _)) = best?;
            let Left { from, to, .. } = self.left[at];
            let most = self.totals.most(from, to);
            if most == known {
                return Some(at);
            }
            self.left[at].most = most;
        }
    }

    /// By how much the height is too small where this item is placed next; some number of at least
    /// `least`, where it is no smaller than that.
    fn lack(&mut self, at: usize, least: u64) -> u64 {
        let own = self.left[at];
        let top = own.offset + own.height;
        self.totals.remove(own.from, own.to, own.height);
        let mut lack = 0;
        for other_at in 0..self.left.len() {
            let other = &mut self.left[other_at];
            if other.from >= own.to {
                break;
            }
            if other.to <= own.from || other.offset >= top || other_at == at {
                continue;
            }
            let raised = if other.align > 1 { top.next_multiple_of(other.align) } else { top };
            if raised + other.most <= self.height + lack {
                continue;
            }
            other.most = self.totals.most(other.from, other.to);
            lack = lack.max((raised + other.most).saturating_sub(self.height));
            if lack >= least {
                break;
            }
        }
        self.totals.add(own.from, own.to, own.height);
        lack
    }

    /// Places an item, and raises those that it is in the way of.
    fn put(&mut self, at: usize) {
        let own = self.left[at];
        let top = own.offset + own.height;
        self.totals.remove(own.from, own.to, own.height);
        self.offsets[own.item as usize] = own.offset;
        self.left[at].offset = PLACED;
        for other in &mut self.left {
            if other.from >= own.to {
                break;
            }
            if other.to > own.from && other.offset < top {
                other.offset =
                    if other.align > 1 { top.next_multiple_of(other.align) } else { top };
            }
        }
    }
}
