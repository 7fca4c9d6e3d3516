//! A reduced problem: parts that do not overlap in time, with small numbers for sizes and times.
//!
//! Sizes are divided by the common divisor of sizes and possible offsets. Time is reduced to
//! sections: spans in which no lifetime begins or ends, without those whose buffers are all
//! included in a neighbour's. This module places nothing.
//!
//! Invariants: two items overlap in time if their pieces share a section; an offset in units times
//! `unit` is an offset in bytes, and some best plan has only such offsets.

use std::ops::Range;

use lowtide_core::bytes::ByteSize;

use super::error::PlanError;
use super::problem::{Problem, TOTAL_MAX};
use super::shape::{ShapeNeed, Shapes, gcd, lcm, most_live};

/// The need of an item in some sections, in units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ItemNeed {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) low: u64,
    pub(super) high: u64,
}

/// One shape, in units and sections.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Item {
    /// Its number in the part.
    pub(super) number: u32,
    /// Its number among all shapes.
    pub(super) shape: u32,
    /// The end of its highest window.
    pub(super) size: u64,
    /// The distance from its offset to the first offset at which another item can begin above it.
    pub(super) height: u64,
    pub(super) align: u64,
    pub(super) fixed: Option<u64>,
    /// From its first section to its last one, gaps included.
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) pieces: Range<u32>,
    /// `true` if it has one piece, which begins at its offset.
    pub(super) is_plain: bool,
}

impl Item {
    /// Returns the least distance by which it raises any item above it.
    pub(super) const fn least_lift(&self) -> u64 {
        if self.is_plain { self.height } else { 1 }
    }
}

/// Items that meet in time, directly or through others.
#[derive(Clone, Debug, Default)]
pub(super) struct Subproblem {
    pub(super) items: Vec<Item>,
    pub(super) pieces: Vec<ItemNeed>,
    pub(super) sections: u32,
    /// All offsets are multiples of it.
    pub(super) grain: u64,
    /// `true` if an item needs a window that begins above its own start: the order of offsets is
    /// then not the order from below.
    pub(super) is_sliding: bool,
    /// Offsets that no item may cross.
    pub(super) walls: Walls,
    /// No plan has a smaller peak.
    pub(super) bound: u64,
}

impl Subproblem {
    pub(super) fn pieces(&self, item: usize) -> &[ItemNeed] {
        let Range { start, end } = self.items[item].pieces.clone();
        &self.pieces[start as usize..end as usize]
    }

    /// The least units that a piece takes of its sections, except for the topmost one.
    pub(super) const fn weight(&self, piece: &ItemNeed) -> u64 {
        (piece.high - piece.low).next_multiple_of(self.grain)
    }

    /// The height that offsets come to.
    pub(super) fn peak(&self, offsets: &[u64]) -> u64 {
        let top = |(item, offset): (&Item, &u64)| offset + item.size;
        self.items.iter().zip(offsets).map(top).max().unwrap_or(0)
    }

    /// The lowest offset from here on at which an item is aligned and meets no wall.
    #[inline]
    pub(super) fn fit(&self, offset: u64, align: u64, size: u64) -> u64 {
        let aligned = if align > 1 { offset.next_multiple_of(align) } else { offset };
        if self.walls.is_none() { aligned } else { self.walls.fit(aligned, size) }
    }

    /// Returns the least distance of `above`'s offset from that of `below`; `None` if they never
    /// overlap in time.
    pub(super) fn lift(&self, below: usize, above: usize) -> Option<i64> {
        let (low, high) = (&self.items[below], &self.items[above]);
        if low.to <= high.from || high.to <= low.from {
            return None;
        }
        let (mut lows, mut highs) = (self.pieces(below), self.pieces(above));
        let mut most = None;
        while let (Some(a), Some(b)) = (lows.first(), highs.first()) {
            if a.from < b.to && b.from < a.to {
                let top =
                    if self.is_sliding { a.high } else { a.high.next_multiple_of(self.grain) };
                most = most.max(Some(top.cast_signed() - b.low.cast_signed()));
            }
            if a.to <= b.to { lows = &lows[1..] } else { highs = &highs[1..] }
        }
        most
    }
}

/// The best offsets of a part so far.
#[derive(Debug)]
pub(super) struct PartPlan {
    pub(super) peak: u64,
    pub(super) offsets: Vec<u64>,
}

/// A whole problem, made small.
#[derive(Clone, Debug, Default)]
pub(super) struct Subproblems {
    /// The one with the highest bound first.
    pub(super) list: Vec<Subproblem>,
    /// Bytes.
    pub(super) unit: u64,
}

impl Subproblems {
    /// Splits a problem into parts. O(n log n).
    pub(super) fn of(shapes: &Shapes, walls: &Walls) -> Self {
        let unit = unit(shapes, walls);
        let walls = walls.in_units(unit);
        let mut order: Vec<u32> = (0..).take(shapes.list.len()).collect();
        order.retain(|at| !shapes.needs(*at as usize).is_empty());
        order.sort_by_key(|at| (shapes.needs(*at as usize)[0].first, *at));
        let (mut parts, mut from, mut end) = (Vec::new(), 0, i64::MIN);
        for at in 0..=order.len() {
            let needs = order.get(at).map(|shape| shapes.needs(*shape as usize));
            if needs.is_none_or(|needs| needs[0].first >= end) && from < at {
                let walls = walls.clone();
                parts.push(part(shapes, &order[from..at], unit, walls));
                from = at;
            }
            end = end.max(needs.and_then(<[ShapeNeed]>::last).map_or(end, |need| need.end));
        }
        parts.sort_by_key(|part| std::cmp::Reverse(part.bound));
        Self { list: parts, unit }
    }

    /// No plan has a smaller peak, in units.
    pub(super) fn bound(&self) -> u64 {
        self.list.iter().map(|part| part.bound).max().unwrap_or(0)
    }
}

/// Returns the common divisor of all offsets of some best plan.
fn unit(shapes: &Shapes, walls: &Walls) -> u64 {
    let needs = (0..shapes.list.len()).flat_map(|at| shapes.needs(at));
    let of_sizes = needs.fold(0, |unit, need| gcd(gcd(unit, need.low), need.high));
    let of_fixed = |unit, fixed: Option<u64>| fixed.map_or(unit, |offset| gcd(unit, offset));
    let mut unit = shapes.list.iter().fold(of_sizes, |unit, shape| of_fixed(unit, shape.fixed));
    if unit == 0 {
        return 1;
    }
    unit = walls.gcd(unit);
    loop {
        // An alignment that divides the unit costs nothing, a multiple of it is one in units.
        let agreed = shapes.list.iter().fold(unit, |unit, shape| {
            let agrees = unit.is_multiple_of(shape.align) || shape.align.is_multiple_of(unit);
            if agrees { unit } else { gcd(unit, shape.align) }
        });
        if agreed == unit {
            return unit;
        }
        unit = agreed;
    }
}

/// One part of the shapes, whose sections follow each other without a break.
fn part(shapes: &Shapes, members: &[u32], unit: u64, walls: Walls) -> Subproblem {
    let sections = sections(shapes, members);
    let index = |time: i64| {
        u32::try_from(sections.partition_point(|first| *first < time)).unwrap_or(u32::MAX)
    };
    let mut part = Subproblem { sections: index(i64::MAX), walls, ..Subproblem::default() };
    for (number, &shape) in (0..).zip(members) {
        let first = u32::try_from(part.pieces.len()).unwrap_or(u32::MAX);
        for need in shapes.needs(shape as usize) {
            let (low, high) = (need.low / unit, need.high / unit);
            let (from, to) = (index(need.first), index(need.end));
            debug_assert!(from < to, "a need without a section");
            part.pieces.push(ItemNeed { from, to, low, high });
            part.is_sliding |= low > 0;
        }
        let last = u32::try_from(part.pieces.len()).unwrap_or(u32::MAX);
        let own = &part.pieces[first as usize..];
        let source = &shapes.list[shape as usize];
        part.items.push(Item {
            number,
            shape,
            size: own.iter().map(|piece| piece.high).max().unwrap_or(0),
            height: 0,
            align: if unit.is_multiple_of(source.align) { 1 } else { source.align / unit },
            fixed: source.fixed.map(|offset| offset / unit),
            from: own.first().map_or(0, |piece| piece.from),
            to: own.last().map_or(0, |piece| piece.to),
            pieces: first..last,
            is_plain: own.len() == 1 && own[0].low == 0,
        });
    }
    let grains = part.items.iter().map(|item| gcd(item.align, item.fixed.unwrap_or(0)));
    part.grain = if part.is_sliding { 1 } else { grains.fold(0, gcd).max(1) };
    for item in &mut part.items {
        item.height = item.size.next_multiple_of(part.grain);
    }
    part.bound = bound(&part);
    part
}

/// The first steps of the sections that are kept: where something begins, and something ends
/// before anything else begins.
fn sections(shapes: &Shapes, members: &[u32]) -> Vec<i64> {
    let needs = members.iter().flat_map(|shape| shapes.needs(*shape as usize));
    let mut events: Vec<(i64, bool)> =
        needs.flat_map(|need| [(need.first, true), (need.end, false)]).collect();
    events.sort_unstable(); // ends before starts
    let mut kept = Vec::new();
    let mut begun = None;
    for (time, begins) in events {
        if begins {
            begun = Some(time);
        } else {
            kept.extend(begun.take());
        }
    }
    kept
}

/// Returns the largest sum of needs at one time, with the certain loss to alignments.
fn bound(part: &Subproblem) -> u64 {
    let single = part.items.iter().map(|item| item.fixed.unwrap_or(0) + item.size).max();
    let pad = part.pieces.iter().map(|piece| part.weight(piece) - (piece.high - piece.low)).max();
    let most =
        most_live(part.pieces.iter().map(|piece| (piece.from, piece.to, part.weight(piece))));
    // The topmost one needs no room above it.
    single.unwrap_or(0).max(most - pad.unwrap_or(0))
}

// Segments of a maximum size as one address range with walls that no item crosses.
//
// A buffer that is larger than a segment gets one of its own size; buffers that are never live
// with it share that. These segments lie at the bottom, and above them as many segments of the
// maximum size as needed. A plan with segments is therefore an ordinary plan whose items do not
// cross the walls.
//
// Invariants: every segment begins at a multiple of all alignments; `fit(o, s) >= o`, and
// `fit(o, s)..fit(o, s) + s` lies within one segment for every `s` up to the maximum size.

/// The boundaries of segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Walls {
    /// The segments of their own sizes.
    own: Vec<Range<u64>>,
    /// The start of the segments of maximum size, the distance between them, and their size.
    begin: u64,
    stride: u64,
    size: u64,
}

impl Walls {
    /// Returns `true` if there are no walls.
    pub(super) const fn is_none(&self) -> bool {
        self.size == 0
    }

    /// Gives items larger than a segment their fixed places, and computes the walls.
    pub(super) fn of(
        problem: &Problem,
        shapes: &mut Shapes,
        limit: ByteSize,
    ) -> Result<Self, PlanError> {
        let name = |at: usize, shapes: &Shapes| {
            problem.demands()[shapes.list[at].root.index()].name.clone()
        };
        let size = limit.get();
        let mut align = 1;
        for at in 0..shapes.list.len() {
            if shapes.list[at].fixed.is_some() || size == 0 {
                return Err(PlanError::NoSegment { name: name(at, &*shapes), limit });
            }
            let own = shapes.list[at].align;
            let Some(common) = lcm(align, own).filter(|common| *common <= TOTAL_MAX >> 32) else {
                return Err(PlanError::NoSegment { name: name(at, &*shapes), limit });
            };
            align = common;
        }
        let mut large: Vec<usize> =
            (0..shapes.list.len()).filter(|at| shapes.size(*at) > size).collect();
        large.sort_by_key(|at| (std::cmp::Reverse(shapes.size(*at)), *at));
        let mut groups: Vec<Vec<usize>> = Vec::new();
        for at in large {
            let apart = |group: &&mut Vec<usize>| group.iter().all(|o| !shapes.meet(at, *o));
            match groups.iter_mut().find(apart) {
                Some(group) => group.push(at),
                None => groups.push(vec![at]),
            }
        }
        let (mut own, mut begin) = (Vec::new(), 0);
        for group in groups {
            let end = begin + group.first().map_or(0, |at| shapes.size(*at));
            own.push(begin..end);
            group.into_iter().for_each(|at| shapes.list[at].fixed = Some(begin));
            begin = end.next_multiple_of(align);
        }
        if size > TOTAL_MAX {
            return Ok(Self::default()); // nothing reaches a wall
        }
        Ok(Self { own, begin, stride: size.next_multiple_of(align), size })
    }

    /// Returns the common divisor of all wall offsets and a number.
    pub(super) fn gcd(&self, unit: u64) -> u64 {
        let ends = self.own.iter().fold(unit, |unit, own| gcd(gcd(unit, own.start), own.end));
        gcd(gcd(gcd(ends, self.begin), self.stride), self.size)
    }

    /// The same in units.
    pub(super) fn in_units(&self, unit: u64) -> Self {
        let own = self.own.iter().map(|own| own.start / unit..own.end / unit).collect();
        let (begin, stride, size) = (self.begin / unit, self.stride / unit, self.size / unit);
        Self { own, begin, stride, size }
    }

    /// The lowest offset from here on at which so many bytes meet no wall.
    pub(super) fn fit(&self, offset: u64, size: u64) -> u64 {
        if self.is_none() {
            return offset;
        }
        let mut offset = offset;
        let first = self.own.partition_point(|own| own.end <= offset);
        for own in &self.own[first..] {
            offset = offset.max(own.start);
            if offset + size <= own.end {
                return offset;
            }
        }
        let into = offset.max(self.begin) - self.begin;
        let within = into % self.stride;
        let fits = within + size <= self.size;
        self.begin + if fits { into } else { into - within + self.stride }
    }

    /// Returns the start of the segment that contains an offset.
    pub(super) fn start(&self, offset: u64) -> u64 {
        if self.is_none() {
            return 0;
        }
        let own = self.own.iter().find(|own| own.contains(&offset));
        let regular =
            || self.begin + (offset.max(self.begin) - self.begin) / self.stride * self.stride;
        own.map_or_else(regular, |own| own.start)
    }
}

#[cfg(test)]
mod walls_tests {
    use super::*;

    #[test]
    fn nothing_lies_across_a_wall_and_nothing_lower_would_do() {
        let own = vec![0..5, 6..13];
        let walls = Walls { own, begin: 14, stride: 4, size: 3 };
        let within = |low: u64, high: u64| {
            let begin = |nth: u64| 14 + 4 * nth;
            [(0, 5), (6, 13)]
                .into_iter()
                .chain((0..9).map(|nth| (begin(nth), begin(nth) + 3)))
                .any(|(start, end)| start <= low && high <= end)
        };
        for offset in 0..30 {
            for size in 1..=3 {
                let fit = walls.fit(offset, size);
                let least = (offset..).find(|low| within(*low, low + size));
                assert_eq!(Some(fit), least, "{size} at {offset}");
                assert!(walls.start(fit) <= fit);
            }
        }
    }
}
