//! Segments of a maximum size as one address range with walls that no item crosses.
//!
//! A buffer that is larger than a segment gets one of its own size; buffers that are never live
//! with it share that. These segments lie at the bottom, and above them as many segments of the
//! maximum size as needed. A plan with segments is therefore an ordinary plan whose items do not
//! cross the walls.
//!
//! Invariants: every segment begins at a multiple of all alignments; `fit(o, s) >= o`, and
//! `fit(o, s)..fit(o, s) + s` lies within one segment for every `s` up to the maximum size.

use super::error::PlanError;
use super::problem::{Problem, TOTAL_MAX};
use super::shape::{Shapes, gcd};
use lowtide_core::bytes::ByteSize;

/// The boundaries of segments.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Walls {
    /// The segments of their own sizes.
    own: Vec<Range>,
    /// The start of the segments of maximum size, the distance between them, and their size.
    begin: u64,
    stride: u64,
    size: u64,
}

/// From where to where.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Range {
    start: u64,
    end: u64,
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
            let common = (align / gcd(align, own)).checked_mul(own);
            let Some(common) = common.filter(|common| *common <= TOTAL_MAX >> 32) else {
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
            own.push(Range { start: begin, end });
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
        let own = self.own.iter();
        let own = own.map(|own| Range { start: own.start / unit, end: own.end / unit }).collect();
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
        let own = self.own.iter().find(|own| (own.start..own.end).contains(&offset));
        let regular =
            || self.begin + (offset.max(self.begin) - self.begin) / self.stride * self.stride;
        own.map_or_else(regular, |own| own.start)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_lies_across_a_wall_and_nothing_lower_would_do() {
        let own = vec![Range { start: 0, end: 5 }, Range { start: 6, end: 13 }];
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
