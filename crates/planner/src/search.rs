//! Exact search: decides whether the items of a part fit below a given height, and finds offsets.
//!
//! Depth first, from below. Only solutions in which no item could be lower with all others in place
//! are considered; items are placed in the order of their offsets, each on the items below it. (The
//! idea is MiniMalloc's: Moffitt, ASPLOS 2023.) It knows no clock and no best plan: the caller
//! probes one height after the other.
//!
//! A branch ends early by these rules:
//! * floors: no remaining item can begin in a section below the lowest remaining item there; floor
//!   plus the remaining size of the section must not exceed the height (`search`);
//! * an item that could still be placed wholly below an offset is placed before it;
//! * an item below the last offset that can no longer be placed there must first be raised by
//!   another item;
//! * items that separate in time are searched separately, so that one group does not repeat the
//!   other's attempts;
//! * a remainder that failed once, at offsets as low, fails again. It is recognized by a 64-bit
//!   hash.
//!
//! Invariants: every list on the stack is in the order of its keys; `totals` is the sum of the
//! remaining sizes in each section; `Found` comes with offsets below the height for all items.

use super::part::{Item, ItemNeed, Subproblem};

/// States that are remembered as dead ends: 256 KiB.
const DEAD_ENDS: usize = 1 << 14;

/// Nodes between two questions whether to stop: about 0.5 ms.
const NODES_PER_STOP: u64 = 32;

/// The result of a search.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum SearchOutcome {
    /// Offsets were found.
    Found,
    /// It is proved that there are none in which each pair of items has one order from below.
    Failed,
    /// The nodes or the time ran out.
    OutOfBudget,
}

/// A group whose items are being placed.
#[derive(Clone, Copy, Debug)]
struct Frame {
    group: ItemGroup,
    /// No item may come before this key.
    least: u64,
    hash: u64,
    /// The placed item, and the offset from which on no item can be placed next.
    at: usize,
    ceiling: u64,
    /// The remainder after it: its place on the stack, its groups, and the current group.
    mark: usize,
    groups: usize,
    next: usize,
}

/// A search over one part.
#[derive(Debug)]
pub(super) struct ExactSearch<'a> {
    pub(super) part: &'a Subproblem,
    /// The items by their ranks in the order.
    bodies: Vec<Item>,
    totals: Vec<u64>,
    pub(super) floors: Floors,
    stack: Vec<u64>,
    groups: Vec<ItemGroup>,
    frames: Vec<Frame>,
    /// The items that an item raises.
    raised: Vec<u64>,
    dead_ends: Vec<(u64, u64)>,
    offsets: Vec<u64>,
    height: u64,
    /// Nodes of the last run.
    pub(super) nodes: u64,
    runs: u64,
}

impl<'a> ExactSearch<'a> {
    pub(super) fn new(part: &'a Subproblem) -> Self {
        debug_assert!(part.items.len() <= ITEMS_MAX, "more items than ranks");
        let sections = part.sections as usize;
        Self {
            part,
            bodies: Vec::new(),
            totals: vec![0; sections],
            floors: Floors::new(sections),
            stack: Vec::new(),
            groups: Vec::new(),
            frames: Vec::new(),
            raised: Vec::new(),
            dead_ends: vec![(0, 0); DEAD_ENDS],
            offsets: vec![0; part.items.len()],
            height: 0,
            nodes: 0,
            runs: 0,
        }
    }

    /// Looks for offsets below `height`, preferring items in this order, with at most `limit` nodes
    /// and until `stop` is set.
    pub(super) fn run(
        &mut self,
        order: &[u32],
        height: u64,
        limit: u64,
        stop: &mut dyn FnMut() -> bool,
    ) -> SearchOutcome {
        debug_assert!(height < HEIGHT_MAX, "a height that keys have no room for");
        (self.height, self.nodes, self.runs) = (height, 0, self.runs + 1);
        self.start(order);
        let all = ItemGroup { start: 0, end: self.stack.len(), from: 0, to: self.part.sections };
        let least = |body: &Item| body.fixed.unwrap_or(0) + body.size;
        let mut done = if self.bodies.iter().any(|body| least(body) > height) {
            Some(SearchOutcome::Failed)
        } else {
            self.enter(all, 0)
        };
        loop {
            if self.nodes > limit || self.nodes.is_multiple_of(NODES_PER_STOP) && stop() {
                break;
            }
            done = match done {
                None => self.advance(),
                Some(verdict) if self.frames.is_empty() => {
                    self.floors.blame.settle();
                    return verdict;
                }
                Some(SearchOutcome::Found) => self.next_group(),
                Some(_) => {
                    self.take_back();
                    None
                }
            };
        }
        self.floors.blame.settle();
        SearchOutcome::OutOfBudget
    }

    fn start(&mut self, order: &[u32]) {
        let part = self.part;
        self.bodies.clear();
        self.bodies.extend(order.iter().map(|item| part.items[*item as usize].clone()));
        self.stack.clear();
        self.groups.clear();
        self.frames.clear();
        self.totals.fill(0);
        for rank in 0..self.bodies.len() {
            let body = &self.bodies[rank];
            let lowest = body.fixed.unwrap_or_else(|| part.fit(0, 1, body.size));
            self.stack.push(key(lowest, rank));
            self.add(rank);
        }
        self.stack.sort_unstable();
    }

    /// The offsets that were found, by the item's number.
    pub(super) fn offsets(&self) -> Vec<u64> {
        let mut offsets = vec![0; self.bodies.len()];
        for (body, offset) in self.bodies.iter().zip(&self.offsets) {
            offsets[body.number as usize] = *offset;
        }
        offsets
    }

    fn pieces(&self, rank: usize) -> &'a [ItemNeed] {
        self.part.pieces(self.bodies[rank].number as usize)
    }

    fn add(&mut self, rank: usize) {
        self.change(rank, |total, weight| total + weight);
    }

    fn remove(&mut self, rank: usize) {
        self.change(rank, |total, weight| total - weight);
    }

    /// Changes the totals of an item's sections by its weight in each.
    fn change(&mut self, rank: usize, change: impl Fn(u64, u64) -> u64) {
        for piece in self.pieces(rank) {
            let weight = self.part.weight(piece);
            let totals = &mut self.totals[piece.from as usize..piece.to as usize];
            totals.iter_mut().for_each(|total| *total = change(*total, weight));
        }
    }

    /// Begins with a group; returns at once if it is known to fail.
    fn enter(&mut self, group: ItemGroup, least: u64) -> Option<SearchOutcome> {
        if group.start == group.end {
            return Some(SearchOutcome::Found);
        }
        let list = &self.stack[group.start..group.end];
        let hash = list.iter().fold(self.runs, |hash, key| hash.wrapping_add(mixed(*key)));
        let (known, known_least) = self.dead_ends[slot(hash)];
        if known == hash && known_least <= least {
            return Some(SearchOutcome::Failed);
        }
        self.nodes += 1;
        let mut ceiling = u64::MAX;
        if !self.part.is_sliding {
            let room = self.height.next_multiple_of(self.part.grain);
            let (part, bodies) = (self.part, &self.bodies);
            let pieces = |rank: usize| part.pieces(bodies[rank].number as usize);
            let heights = (self.height, room);
            match self.floors.of(list, least, heights, group, bodies, pieces, &self.totals) {
                Some(found) => ceiling = found,
                None => {
                    self.dead_ends[slot(hash)] = (hash, least);
                    return Some(SearchOutcome::Failed);
                }
            }
        }
        let (mark, groups) = (self.stack.len(), self.groups.len());
        let at = group.start;
        self.frames.push(Frame { group, least, hash, at, ceiling, mark, groups, next: groups });
        None
    }

    /// Places the next item of the last frame; if there is none, the group failed.
    fn advance(&mut self) -> Option<SearchOutcome> {
        let Frame { group, least, hash, ceiling, .. } = *self.last();
        while self.last().at < group.end {
            let at = self.last().at;
            let own = self.stack[at];
            if offset_of(own) >= ceiling {
                break;
            }
            if own >= least {
                self.remove(rank_of(own));
                let mark = self.stack.len();
                if self.place(group, at) {
                    self.take_apart(ItemGroup { start: mark, end: self.stack.len(), ..group });
                    return self.enter_group();
                }
                self.take_back();
            } else {
                self.last().at += 1;
            }
        }
        self.dead_ends[slot(hash)] = (hash, least);
        self.frames.pop();
        Some(SearchOutcome::Failed)
    }

    /// The frame that is searched: callers have pushed one.
    fn last(&mut self) -> &mut Frame {
        let last = self.frames.len() - 1;
        &mut self.frames[last]
    }

    /// Enters the next of the groups that are left after the last frame's item; without one its
    /// group is placed.
    fn enter_group(&mut self) -> Option<SearchOutcome> {
        let Frame { next, at, mark, groups, .. } = *self.last();
        let own = self.stack[at];
        if next < self.groups.len() {
            let least = if self.part.is_sliding { 0 } else { own };
            return self.enter(self.groups[next], least);
        }
        self.offsets[rank_of(own)] = offset_of(own);
        self.add(rank_of(own));
        self.stack.truncate(mark);
        self.groups.truncate(groups);
        self.frames.pop();
        Some(SearchOutcome::Found)
    }

    fn next_group(&mut self) -> Option<SearchOutcome> {
        self.last().next += 1;
        self.enter_group()
    }

    /// Takes the last frame's item back, so that it tries the one after.
    fn take_back(&mut self) {
        let Frame { at, mark, groups, .. } = *self.last();
        self.add(rank_of(self.stack[at]));
        self.stack.truncate(mark);
        self.groups.truncate(groups);
        let frame = self.last();
        (frame.at, frame.next) = (at + 1, groups);
    }

    /// Pushes the remainder of a group after one placement; `false` if one of the other items can
    /// no longer be placed.
    fn place(&mut self, group: ItemGroup, placed: usize) -> bool {
        let (offset, rank) = (offset_of(self.stack[placed]), rank_of(self.stack[placed]));
        let (from, to, is_plain) =
            (self.bodies[rank].from, self.bodies[rank].to, self.bodies[rank].is_plain);
        let top = offset + self.bodies[rank].height;
        let mark = self.stack.len();
        self.raised.clear();
        for at in group.start..group.end {
            let own = self.stack[at];
            let other = &self.bodies[rank_of(own)];
            if other.to <= from || to <= other.from {
                self.stack.push(own);
                continue;
            }
            if at == placed {
                continue;
            }
            let least = if is_plain && other.is_plain {
                top
            } else {
                let lift = self.part.lift(self.bodies[rank].number as usize, other.number as usize);
                lift.map_or(0, |lift| offset.saturating_add_signed(lift))
            };
            let least = self.part.fit(least, other.align, other.size);
            if least <= offset_of(own) {
                self.stack.push(own);
            } else if least + other.size > self.height || other.fixed.is_some() {
                self.floors.blame.span(from.max(other.from), to.min(other.to));
                return false;
            } else {
                self.raised.push(key(least, rank_of(own)));
            }
        }
        self.raised.sort_unstable();
        self.merge(mark);
        true
    }

    /// Merges the raised ones into the sorted list that ends the stack.
    fn merge(&mut self, mark: usize) {
        let mut low = self.stack.len();
        self.stack.resize(low + self.raised.len(), 0);
        let (mut high, mut next) = (self.raised.len(), self.stack.len());
        while high > 0 {
            next -= 1;
            if low > mark && self.stack[low - 1] > self.raised[high - 1] {
                low -= 1;
                self.stack[next] = self.stack[low];
            } else {
                high -= 1;
                self.stack[next] = self.raised[high];
            }
        }
    }

    /// Lists the groups into which one splits at sections that no item crosses.
    fn take_apart(&mut self, group: ItemGroup) {
        let list = &self.stack[group.start..group.end];
        let spans = list.iter().map(|key| &self.bodies[rank_of(*key)]);
        let Some(cuts) = self.floors.cuts(spans.map(|body| (body.from, body.to)), group) else {
            if group.start < group.end {
                self.groups.push(group);
            }
            return;
        };
        for pair in cuts.windows(2) {
            let (from, to) = (pair[0], pair[1]);
            let start = self.stack.len();
            for at in group.start..group.end {
                let own = self.stack[at];
                let body = &self.bodies[rank_of(own)];
                if body.from >= from && body.to <= to {
                    self.stack.push(own);
                }
            }
            if start < self.stack.len() {
                self.groups.push(ItemGroup { start, end: self.stack.len(), from, to });
            }
        }
    }
}

/// A key's share of a hash. (The finalizer of splitmix64, S. Vigna 2015.)
const fn mixed(key: u64) -> u64 {
    let mixed = key.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

#[expect(clippy::cast_possible_truncation, reason = "it is below the number of dead ends")]
const fn slot(hash: u64) -> usize {
    (hash % DEAD_ENDS as u64) as usize
}

// The items of an exact search, the keys that stand for them, and groups of keys.
//
// A key is the offset at which an item is tried, with its rank in the order in the low bits, so
// keys compare by offset first. `search` places the items; `floors` rules branches out.

/// Bits of a key that are an item's rank.
const RANK_BITS: u32 = 16;

/// The most items that a search has numbers for, and the height below which its keys have room.
pub(super) const ITEMS_MAX: usize = 1 << RANK_BITS;
pub(super) const HEIGHT_MAX: u64 = 1 << (62 - RANK_BITS);

/// A list of keys on the stack that meet in time, and the sections that they are in.
#[derive(Clone, Copy, Debug)]
pub(super) struct ItemGroup {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// An item's lowest offset, and its rank: keys are in the order in which items may be placed.
pub(super) const fn key(offset: u64, rank: usize) -> u64 {
    offset << RANK_BITS | rank as u64
}

pub(super) const fn offset_of(key: u64) -> u64 {
    key >> RANK_BITS
}

pub(super) const fn rank_of(key: u64) -> usize {
    (key & ((1 << RANK_BITS) - 1)) as usize
}

// Feasibility of the remaining items above their floors, section by section, and the sections that
// ended branches.
//
// A floor is the lowest offset at which any remaining item of a section can begin. Items are
// visited from the lowest up: the first to touch a section sets its floor. It changes nothing of
// the search.
//
// Invariant: no solution is ruled out that the search would find.

/// Room to work in, and the blame.
#[derive(Debug)]
pub(super) struct Floors {
    /// Bit sets of sections: those with a floor, and those that an item crosses into the next one.
    seen: Vec<u64>,
    /// Items that must be raised first, with their least offsets afterwards.
    stranded: Vec<u64>,
    cuts: Vec<u32>,
    /// Which sections ended branches, in the last run and, less so, in those before.
    pub(super) blame: Blame,
}

impl Floors {
    pub(super) fn new(sections: usize) -> Self {
        Self {
            seen: vec![0; sections.div_ceil(64)],
            stranded: Vec::new(),
            cuts: Vec::new(),
            blame: Blame { counts: vec![0; sections], weights: vec![WEIGHT; sections] },
        }
    }

    /// Returns the offset from which on no item can be placed next; `None` if the rest cannot fit.
    #[expect(clippy::too_many_arguments, reason = "the parts of a search, borrowed apart")]
    pub(super) fn of<'a>(
        &mut self,
        list: &[u64],
        least: u64,
        (height, room): (u64, u64),
        group: ItemGroup,
        bodies: &[Item],
        pieces: impl Fn(usize) -> &'a [ItemNeed],
        totals: &[u64],
    ) -> Option<u64> {
        let first = list.partition_point(|key| *key < least);
        let lowest = offset_of(*list.get(first)?);
        let mut ceiling = u64::MAX;
        for key in list {
            ceiling = ceiling.min(offset_of(*key) + bodies[rank_of(*key)].size);
        }
        self.strand(list, first, lowest, height, bodies)?;
        let (mut next, mut waits) = (first, 0);
        let words = group.from as usize / 64..(group.to as usize).div_ceil(64);
        self.seen[words].fill(0);
        let (mut left, mut most) = (group.to - group.from, 0);
        while left > 0 {
            let (one, other) = (list.get(next), self.stranded.get(waits));
            let own = match (one, other) {
                (Some(one), Some(other)) if other < one => *other,
                (Some(one), _) => *one,
                (None, Some(other)) => *other,
                (None, None) => break,
            };
            if one == Some(&own) {
                next += 1
            } else {
                waits += 1
            }
            let most_that_fits = room.saturating_sub(offset_of(own));
            for piece in pieces(rank_of(own)) {
                for word in piece.from as usize / 64..=(piece.to as usize - 1) / 64 {
                    let mask = bits(piece.from, piece.to, word);
                    let mut fresh = mask & !self.seen[word];
                    self.seen[word] |= mask;
                    left = left.saturating_sub(fresh.count_ones());
                    while fresh != 0 {
                        let section = word * 64 + fresh.trailing_zeros() as usize;
                        most = most.max(totals[section]);
                        if totals[section] > most_that_fits {
                            self.blame.counts[section] += 1;
                            return None;
                        }
                        fresh &= fresh - 1;
                    }
                }
            }
        }
        Some(ceiling.min(room.saturating_sub(most) + 1))
    }

    /// Lists the items that were passed: each has to lie on another one that is still to come.
    fn strand(
        &mut self,
        list: &[u64],
        first: usize,
        lowest: u64,
        height: u64,
        bodies: &[Item],
    ) -> Option<()> {
        self.stranded.clear();
        for (at, own) in list[..first].iter().enumerate() {
            let body = &bodies[rank_of(*own)];
            let mut raised = u64::MAX;
            for (other_at, other) in list.iter().enumerate() {
                let below = &bodies[rank_of(*other)];
                if below.from < body.to && body.from < below.to && other_at != at {
                    raised = raised.min(offset_of(*other).max(lowest) + below.least_lift());
                }
            }
            if body.fixed.is_some() || raised.saturating_add(body.size) > height {
                self.blame.span(body.from, body.to);
                return None;
            }
            self.stranded.push(key(raised, rank_of(*own)));
        }
        self.stranded.sort_unstable();
        Some(())
    }

    /// Splits items in time: the first section, the sections that no item crosses into, and the
    /// end; `None` if there is no split.
    pub(super) fn cuts(
        &mut self,
        spans: impl Iterator<Item = (u32, u32)>,
        group: ItemGroup,
    ) -> Option<Vec<u32>> {
        let words = group.from as usize / 64..(group.to as usize).div_ceil(64);
        self.seen[words].fill(0);
        for (from, to) in spans {
            if to - from > 1 {
                for word in from as usize / 64..=(to as usize - 2) / 64 {
                    self.seen[word] |= bits(from, to - 1, word);
                }
            }
        }
        self.cuts.clear();
        self.cuts.push(group.from);
        for word in group.from as usize / 64..(group.to as usize).div_ceil(64) {
            let within =
                if group.to - group.from > 1 { bits(group.from, group.to, word) } else { 0 };
            let mut open = within & !self.seen[word];
            while open != 0 {
                let section = u32::try_from(word).unwrap_or(0) * 64 + open.trailing_zeros();
                if section + 1 < group.to {
                    self.cuts.push(section + 1);
                }
                open &= open - 1;
            }
        }
        if self.cuts.len() == 1 {
            return None;
        }
        self.cuts.push(group.to);
        Some(self.cuts.clone())
    }
}

/// The bits of a word that stand for sections of a range which has some there.
const fn bits(from: u32, to: u32, word: usize) -> u64 {
    let (first, end) = (word * 64, word * 64 + 64);
    let above = if from as usize > first { u64::MAX << (from % 64) } else { u64::MAX };
    let below = if (to as usize) < end { u64::MAX >> (64 - to % 64) } else { u64::MAX };
    above & below
}

/// The weight of a section with the most blame.
const WEIGHT: u64 = 1 << 16;

/// The number of branches that each section ended.
#[derive(Debug)]
pub(super) struct Blame {
    counts: Vec<u64>,
    weights: Vec<u64>,
}

impl Blame {
    /// Blames the sections of a span.
    pub(super) fn span(&mut self, from: u32, to: u32) {
        for count in &mut self.counts[from as usize..to as usize] {
            *count += 1;
        }
    }

    /// Turns the counts of a run into weights; those of earlier runs lose an eighth.
    pub(super) fn settle(&mut self) {
        let sum = self.counts.iter().sum::<u64>().max(1);
        let sections = self.counts.len() as u64;
        for (weight, count) in self.weights.iter_mut().zip(&mut self.counts) {
            let share = u128::from(*count) * u128::from(WEIGHT * sections) / u128::from(sum);
            *weight = *weight - *weight / 8 + u64::try_from(share).unwrap_or(WEIGHT);
            *count = 0;
        }
    }

    /// The largest weight of a section of the span, where `one` is the mean of all.
    pub(super) fn weight(&self, from: u32, to: u32, mean: u64, one: u64) -> u64 {
        let most = self.weights[from as usize..to as usize].iter().max();
        let share = u128::from(most.copied().unwrap_or(0)) * u128::from(one);
        u64::try_from(share / u128::from(mean.max(1))).unwrap_or(u64::MAX)
    }

    pub(super) fn mean(&self) -> u64 {
        self.weights.iter().sum::<u64>() / (self.weights.len() as u64).max(1)
    }
}
