//! Greedy dives from the bottom to the top, for parts that are too large to search.
//!
//! Items are placed in the order of their offsets, as in the exact search, without backtracking.
//! Among the lowest items, the next is the one whose sections have the most left to place;
//! near-ties are decided by a bonus, which is random for all but the first dives. Many dives find
//! solutions that a single one misses.
//!
//! Items of the same sections differ only in size and bonus. They form one class, and only the
//! first of a class is considered. A heap holds the classes by keys that may be stale: since
//! offsets only rise and totals only fall, the first key that is still correct is the minimum.
//!
//! Only for parts without walls, whose items each need one window at their start, with no fixed
//! item.
//!
//! Invariant: no key in the heap is larger than its current value.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::collections::binary_heap::PeekMut;

use super::part::{Item, Subproblem};

/// The bits of a key for the size left to place, at most 31.
const COARSE: u32 = 31;

/// Keys that are looked at between two questions whether to stop: some 0.1 ms.
const KEYS_PER_STOP: u32 = 512;

/// The sort key of a class: the lowest offset of its first item; the size left to place in its
/// sections, largest first; the class's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct HeapKey(u128);

impl HeapKey {
    fn new(offset: u64, rest: u32, class: u32) -> Self {
        Self(u128::from(offset) << 64 | u128::from(rest) << 32 | u128::from(class))
    }

    #[expect(clippy::cast_possible_truncation, reason = "the parts of a key")]
    const fn parts(self) -> (u64, u32, u32) {
        ((self.0 >> 64) as u64, (self.0 >> 32) as u32, self.0 as u32)
    }
}

/// Items of the same sections, as a range of the order.
#[derive(Clone, Copy, Debug)]
struct ItemClass {
    next: u32,
    end: u32,
}

/// The rule for choosing among items with about the same size left to place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Bonus {
    /// The largest.
    None,
    /// The item's whole size.
    Size,
    /// Up to this fraction of the item's size, drawn at random.
    Drawn(u64),
}

/// A part on its way to the top.
#[derive(Debug)]
pub(super) struct Dive<'a> {
    part: &'a Subproblem,
    /// Items by class; within a class in placement order.
    order: Vec<u32>,
    /// The start of each class's items.
    starts: Vec<u32>,
    classes: Vec<ItemClass>,
    bonus: Vec<u64>,
    /// The shift that scales the size left to place into the key.
    shift: u32,
    heap: BinaryHeap<Reverse<HeapKey>>,
    /// The size to place in each section: the total, and the rest.
    all: NeedTotals,
    left: NeedTotals,
    /// The first free offset of each section.
    tops: NeedTotals,
    /// The offsets of the last run, by the items' numbers, and the number of items that it placed.
    pub(super) offsets: Vec<u64>,
    pub(super) placed: u64,
    chance: Chance,
}

impl<'a> Dive<'a> {
    /// Returns `true` if the part suits a dive.
    pub(super) fn suits(part: &Subproblem) -> bool {
        let plain = !part.is_sliding && part.pieces.len() == part.items.len();
        plain && part.walls.is_none() && part.items.iter().all(|item| item.fixed.is_none())
    }

    pub(super) fn new(part: &'a Subproblem) -> Self {
        debug_assert!(Self::suits(part), "gaps, windows or fixed offsets");
        let spans = part.items.iter().map(|item| (item.from, item.to, item.height));
        let all = NeedTotals::of(part.sections, spans);
        let (order, starts) = classes(part);
        Self {
            part,
            order,
            starts,
            classes: Vec::new(),
            bonus: vec![0; part.items.len()],
            shift: (2 * part.bound).checked_ilog2().unwrap_or(0).saturating_sub(COARSE),
            heap: BinaryHeap::new(),
            left: NeedTotals::new(part.sections),
            tops: NeedTotals::new(part.sections),
            all,
            offsets: vec![0; part.items.len()],
            chance: Chance::new(0x2545_F491_4F6C_DD1D),
            placed: 0,
        }
    }

    /// Places all items, unless the peak is certain to reach `enough`; returns the peak. After
    /// `stop` it places the rest quickly, by the current keys.
    pub(super) fn run(
        &mut self,
        bonus: Bonus,
        enough: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        self.start(bonus);
        let (mut peak, mut looked_at, mut in_haste) = (0, 0_u32, false);
        // The topmost of a section may lack what its height is rounded up by.
        let enough_of_heights = enough.saturating_add(self.part.grain - 1);
        while let Some(mut top) = self.heap.peek_mut() {
            looked_at = looked_at.wrapping_add(1);
            in_haste = in_haste || looked_at.is_multiple_of(KEYS_PER_STOP) && stop();
            let (known_offset, known_rest, number_of_class) = top.0.parts();
            let class = &mut self.classes[number_of_class as usize];
            let number = self.order[class.next as usize] as usize;
            let item = &self.part.items[number];
            let offset = aligned(self.tops.most(item.from, item.to), item);
            if offset != known_offset && !in_haste {
                top.0 = HeapKey::new(offset, known_rest, number_of_class);
                continue;
            }
            let left = self.left.most(item.from, item.to);
            let rest = rest(left + self.bonus[number], self.shift);
            if rest != known_rest && !in_haste {
                top.0 = HeapKey::new(offset, rest, number_of_class);
                continue;
            }
            let least = if in_haste { 0 } else { offset + left };
            if least >= enough_of_heights || offset + item.size >= enough {
                return None;
            }
            self.offsets[number] = offset;
            self.placed += 1;
            peak = peak.max(offset + item.size);
            self.tops.set(item.from, item.to, offset + item.height);
            self.left.remove(item.from, item.to, item.height);
            class.next += 1;
            if class.next < class.end {
                let next = self.order[class.next as usize] as usize;
                let rest = self::rest(left - item.height + self.bonus[next], self.shift);
                top.0 = HeapKey::new(offset + item.height, rest, number_of_class);
            } else {
                PeekMut::pop(top);
            }
        }
        Some(peak)
    }

    fn start(&mut self, bonus: Bonus) {
        let items = &self.part.items;
        self.placed = 0;
        for (own, item) in self.bonus.iter_mut().zip(items) {
            *own = match bonus {
                Bonus::None => 0,
                Bonus::Size => item.size,
                Bonus::Drawn(part) => {
                    let drawn = u128::from(self.chance.below(1 << 16));
                    u64::try_from((u128::from(item.size / part) * drawn) >> 16).unwrap_or(0)
                }
            };
        }
        self.left = self.all.clone();
        self.tops = NeedTotals::new(self.part.sections);
        self.classes.clear();
        let mut keys = std::mem::take(&mut self.heap).into_vec();
        keys.clear();
        let ends = self.starts[1..].iter();
        for ((&next, &end), class) in self.starts.iter().zip(ends).zip(0_u32..) {
            let members = &mut self.order[next as usize..end as usize];
            members.sort_unstable_by_key(|member| {
                let (bonus, size) = (self.bonus[*member as usize], items[*member as usize].size);
                (Reverse((bonus, size)), *member)
            });
            self.classes.push(ItemClass { next, end });
            let first = members[0] as usize;
            let item = &items[first];
            let rest = rest(self.all.most(item.from, item.to) + self.bonus[first], self.shift);
            keys.push(Reverse(HeapKey::new(0, rest, class)));
        }
        self.heap = BinaryHeap::from(keys);
    }
}

/// Items by class, the class with the largest item times its sections first, and where each class
/// begins and the last one ends.
fn classes(part: &Subproblem) -> (Vec<u32>, Vec<u32>) {
    let count = u32::try_from(part.items.len()).unwrap_or(u32::MAX);
    let class = |item: u32| {
        let own = &part.items[item as usize];
        (own.from, own.to, own.align)
    };
    let mut order: Vec<u32> = (0..count).collect();
    order.sort_unstable_by_key(|item| (class(*item), *item));
    let mut classes = Vec::new();
    let mut rest = order.as_slice();
    while let Some(first) = rest.first() {
        let end = rest.partition_point(|item| class(*item) <= class(*first));
        let (members, others) = rest.split_at(end);
        classes.push(members);
        rest = others;
    }
    classes.sort_by_cached_key(|members| {
        let area = |item: &u32| {
            let own = &part.items[*item as usize];
            own.size.saturating_mul(u64::from(own.to - own.from))
        };
        Reverse(members.iter().map(area).max())
    });
    let mut starts = vec![0];
    for members in &classes {
        starts.push(starts[starts.len() - 1] + u32::try_from(members.len()).unwrap_or(u32::MAX));
    }
    (classes.concat(), starts)
}

const fn aligned(offset: u64, item: &Item) -> u64 {
    if item.align > 1 { offset.next_multiple_of(item.align) } else { offset }
}

/// The more is left the smaller.
fn rest(left: u64, shift: u32) -> u32 {
    u32::MAX - u32::try_from(left >> shift).unwrap_or(u32::MAX)
}

// A number for each section, with range updates and O(1) range maximum.
//
// Sections are grouped in blocks. Each block knows the maximum up to and from each section; over
// blocks, the maximum of each run of 1, 2, 4, and so on is known. It knows nothing of items.
//
// Invariant: after every call the cached maxima agree with `values`.

/// The fewest sections of a block, as a power of two, and the most blocks.
const BLOCK_MIN: u32 = 6;
const BLOCKS_MAX: usize = 256;

/// The numbers.
#[derive(Clone, Debug)]
pub(super) struct NeedTotals {
    /// The number of sections in a block, as a power of two.
    shift: u32,
    values: Vec<u64>,
    /// The maximum of the block up to here, and from here on.
    before: Vec<u64>,
    after: Vec<u64>,
    /// `runs[k][b]`: the maximum of `2^k` blocks from `b` on.
    runs: Vec<Vec<u64>>,
}

impl NeedTotals {
    /// Zero for so many sections.
    pub(super) fn new(sections: u32) -> Self {
        let count = sections.max(1) as usize;
        let mut shift = BLOCK_MIN;
        while count.div_ceil(1 << shift) > BLOCKS_MAX {
            shift += 1;
        }
        let blocks = count.div_ceil(1 << shift);
        let lengths = (0..=blocks.ilog2()).map(|run| blocks + 1 - (1 << run));
        let runs = lengths.map(|length| vec![0; length]).collect();
        let zeros = || vec![0; count];
        Self { shift, values: zeros(), before: zeros(), after: zeros(), runs }
    }

    /// Sums the needs of spans. O(spans + sections).
    pub(super) fn of(sections: u32, spans: impl Iterator<Item = (u32, u32, u64)>) -> Self {
        let mut all = Self::new(sections);
        let mut ends = vec![0; all.values.len() + 1];
        for (from, to, size) in spans {
            all.values[from as usize] += size;
            ends[to as usize] += size;
        }
        let mut sum = 0;
        for (value, end) in all.values.iter_mut().zip(&ends) {
            sum += *value;
            sum -= end;
            *value = sum;
        }
        for block in 0..all.runs[0].len() {
            let start = block << all.shift;
            all.settle(start, (start + (1 << all.shift)).min(all.values.len()));
            all.runs[0][block] = all.after[start];
        }
        all.settle_runs(0, all.runs[0].len() - 1);
        all
    }

    /// Takes from the sections of a span. O(sections of the span + blocks).
    pub(super) fn remove(&mut self, from: u32, to: u32, size: u64) {
        self.change(from, to, |total| total - size);
    }

    /// Makes all sections of a span the same. O(sections of the span + blocks).
    pub(super) fn set(&mut self, from: u32, to: u32, value: u64) {
        self.change(from, to, |_| value);
    }

    /// Changes the numbers of a span; the order of values must be preserved.
    fn change(&mut self, from: u32, to: u32, change: impl Fn(u64) -> u64) {
        let (from, to) = (from as usize, to as usize);
        if from >= to {
            return;
        }
        let (first, last) = (from >> self.shift, (to - 1) >> self.shift);
        for block in first..=last {
            let start = block << self.shift;
            let end = (start + (1 << self.shift)).min(self.values.len());
            let is_whole = from <= start && end <= to;
            let (low, high) = (from.max(start), to.min(end));
            self.values[low..high].iter_mut().for_each(|value| *value = change(*value));
            if is_whole {
                // The position of the maximum does not change.
                self.before[low..high].iter_mut().for_each(|value| *value = change(*value));
                self.after[low..high].iter_mut().for_each(|value| *value = change(*value));
            } else {
                self.settle(start, end);
            }
            self.runs[0][block] = self.after[start];
        }
        self.settle_runs(first, last);
    }

    /// Finds the largest of all runs that have a block of these.
    fn settle_runs(&mut self, first: usize, last: usize) {
        for run in 1..self.runs.len() {
            let (half, whole) = (1 << (run - 1), 1 << run);
            let (shorter, longer) = self.runs.split_at_mut(run);
            let (shorter, longer) = (&shorter[run - 1], &mut longer[0]);
            let end = (last + 1).min(longer.len());
            for at in (first + 1).saturating_sub(whole)..end {
                longer[at] = shorter[at].max(shorter[at + half]);
            }
        }
    }

    /// Finds the largest up to and from each section of a block.
    fn settle(&mut self, start: usize, end: usize) {
        let mut most = 0;
        for at in start..end {
            most = self.values[at].max(most);
            self.before[at] = most;
        }
        most = 0;
        for at in (start..end).rev() {
            most = self.values[at].max(most);
            self.after[at] = most;
        }
    }

    /// The largest of a span that is not empty. O(1), but for spans within a block: O(sections).
    pub(super) fn most(&self, from: u32, to: u32) -> u64 {
        let (from, last) = (from as usize, to as usize - 1);
        let (first_block, last_block) = (from >> self.shift, last >> self.shift);
        if first_block == last_block {
            return self.values[from..=last].iter().copied().fold(0, u64::max);
        }
        let most = self.after[from].max(self.before[last]);
        let between = last_block - first_block - 1;
        if between == 0 {
            return most;
        }
        let run = between.ilog2();
        let list = &self.runs[run as usize];
        most.max(list[first_block + 1]).max(list[last_block - (1 << run)])
    }
}

// A small deterministic random generator, for randomized placement orders.
//
// Not for secrets, and not for statistics. (xorshift64*, S. Vigna 2016.)
//
// Invariant: the same seed produces the same numbers.

/// A generator.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    /// Any seed will do.
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `end`, which is not zero and below 2^32.
    pub(super) const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let draw = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
        (draw * end) >> 32
    }
}

#[cfg(test)]
mod tests {
    use super::super::part::Subproblems;
    use super::super::part::Walls;
    use super::super::problem::Demand;
    use super::super::problem::Problem;
    use super::super::shape::Shapes;
    use super::*;
    use lowtide_core::bytes::ByteSize;

    /// One part: a buffer is live all the time.
    fn problem(seed: u64) -> Problem {
        let mut chance = Chance::new(seed);
        let mut problem = Problem::new();
        let mut add = |size: u64, align: u64, live: std::ops::Range<i64>| {
            let demand = Demand { align, ..Demand::new("some", ByteSize::new(size), live) };
            problem.add(demand).expect("a plain buffer");
        };
        add(8, 1, 0..50);
        for _ in 0..120 {
            let first = chance.below(49).cast_signed();
            let end = first + 1 + chance.below(12).cast_signed();
            add(1 + chance.below(40), 1 << chance.below(4), first..end.min(50));
        }
        problem
    }

    /// The peak of a dive, in bytes, verified.
    fn peak(
        problem: &Problem,
        bonus: Bonus,
        enough: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> Option<u64> {
        let shapes = Shapes::of(problem).expect("nothing is shared");
        let parts = Subproblems::of(&shapes, &Walls::default());
        assert_eq!((parts.list.len(), parts.unit), (1, 1));
        let mut dive = Dive::new(&parts.list[0]);
        let peak = dive.run(bonus, enough, stop)?;
        let mut offsets = vec![0; problem.demands().len()];
        for (item, offset) in parts.list[0].items.iter().zip(&dive.offsets) {
            offsets[shapes.list[item.shape as usize].root.index()] = *offset;
        }
        let verified = problem.verify(&offsets).expect("nothing overlaps, all is aligned");
        assert_eq!(verified.get(), peak);
        Some(peak)
    }

    #[test]
    fn nothing_that_dives_place_overlaps_and_none_is_left_out_in_haste() {
        for seed in 1..40 {
            let problem = problem(seed);
            for bonus in [Bonus::None, Bonus::Size, Bonus::Drawn(1), Bonus::Drawn(64)] {
                for hurries in [false, true] {
                    let found = peak(&problem, bonus, u64::MAX, &mut || hurries);
                    assert!(found.is_some(), "seed {seed}, {bonus:?}");
                }
            }
        }
    }

    #[test]
    fn a_dive_gives_up_only_where_it_would_not_come_below_enough() {
        for seed in 1..40 {
            let problem = problem(seed);
            let whole = peak(&problem, Bonus::None, u64::MAX, &mut || false).expect("no limit");
            let above = peak(&problem, Bonus::None, whole + 1, &mut || false);
            assert_eq!(above, Some(whole), "seed {seed}");
            assert_eq!(peak(&problem, Bonus::None, whole, &mut || false), None, "seed {seed}");
        }
    }
}

#[cfg(test)]
mod totals_tests {
    use super::Chance;
    use super::*;

    #[test]
    fn the_largest_of_a_span_is_that_of_a_list() {
        let mut chance = Chance::new(7);
        for sections in [1_u32, 2, 63, 64, 65, 200, 1000, 20_000] {
            let mut totals = NeedTotals::new(sections);
            let mut list = vec![0_u64; sections as usize];
            let mut spans = Vec::new();
            for _ in 0..300 {
                let draw = |chance: &mut Chance, end: u32| {
                    u32::try_from(chance.below(u64::from(end))).expect("below it")
                };
                let from = draw(&mut chance, sections);
                let to = from + 1 + draw(&mut chance, sections - from);
                let span = from as usize..to as usize;
                if chance.below(3) > 0 || spans.is_empty() {
                    let size = chance.below(100);
                    totals.change(from, to, |total| total + size);
                    list[span].iter_mut().for_each(|sum| *sum += size);
                    spans.push((from, to, size));
                } else {
                    let (from, to, size) = spans.swap_remove(0);
                    totals.remove(from, to, size);
                    list[from as usize..to as usize].iter_mut().for_each(|sum| *sum -= size);
                }
                let from = draw(&mut chance, sections);
                let to = from + 1 + draw(&mut chance, sections - from);
                let most = list[from as usize..to as usize].iter().max().copied();
                assert_eq!(Some(totals.most(from, to)), most, "{from}..{to} of {sections}");
            }
            let mut other = NeedTotals::of(sections, spans.iter().copied());
            assert_eq!(other.values, totals.values);
            assert_eq!((&other.before, &other.after), (&totals.before, &totals.after));
            assert_eq!(other.runs, totals.runs);
            other.set(0, sections, 5_000);
            assert_eq!(other.most(0, sections), 5_000);
        }
    }
}
