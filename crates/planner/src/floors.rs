//! Feasibility of the remaining items above their floors, section by section, and the sections that
//! ended branches.
//!
//! A floor is the lowest offset at which any remaining item of a section can begin. Items are
//! visited from the lowest up: the first to touch a section sets its floor. It changes nothing of
//! the search.
//!
//! Invariant: no solution is ruled out that the search would find.

use super::body::{Body, ItemGroup, key, offset_of, rank_of};
use super::part::ItemNeed;

/// Room to work in, and the blame.
#[derive(Debug)]
pub(super) struct Floors {
    /// Bit sets of sections: those with a floor, and those that an item crosses into the next one.
    seen: Vec<u64>,
    /// Items that must be raised first, with their least offsets afterwards.
    stranded: Vec<u64>,
    cuts: Vec<u32>,
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
        bodies: &[Body],
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
        bodies: &[Body],
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
