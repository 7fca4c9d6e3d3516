//! Probes of a part's height: the next height, the order, and the number of nodes.
//!
//! Far from the bound, each probe halves the distance to it; near the bound, the bound itself is
//! probed. After a failure the height moves half way back to the best known height, and after a
//! success the next step is twice as long. The bound is probed in between from time to time. A
//! height is probed with all orders of a round before the next one. If no height is left between,
//! the rounds get longer. Sections that ended branches are remembered: their items move to the
//! front from the second round on. It reads no clock: the caller stops between probes.
//!
//! Invariants: `low <= peak`; every height below `low` was proved to be too small, and `peak` was
//! reached.

use super::dive::Chance;
use super::order::Traits;
use super::part::{PartPlan, Subproblem};
use super::search::{ExactSearch, SearchOutcome};

/// The sort key of the items in a search, largest first.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Trait {
    /// Sections, and steps, from its first to its last.
    Width,
    Duration,
    /// The largest total of its sections, and the sum of all of them.
    Total,
    Totals,
    Size,
    Area,
    /// The number of items that it overlaps in time, and their total size.
    Met,
    MetSize,
    /// The number of sections with a total near the bound.
    Tight,
    /// The earliest start, and the latest end.
    Early,
    Late,
}

/// The orders of a round: by the first trait, then by the second. Each of them was the only one to
/// solve one of the instances of `crates/planner/tests/data/planning` at few nodes.
const ORDERS: [(Trait, Trait); 16] = [
    (Trait::Total, Trait::Area),
    (Trait::Width, Trait::Total),
    (Trait::Area, Trait::Total),
    (Trait::Late, Trait::Duration),
    (Trait::Early, Trait::Tight),
    (Trait::Total, Trait::Met),
    (Trait::Met, Trait::Area),
    (Trait::Early, Trait::Area),
    (Trait::MetSize, Trait::Width),
    (Trait::Total, Trait::Duration),
    (Trait::Tight, Trait::Early),
    (Trait::Width, Trait::Late),
    (Trait::Totals, Trait::Area),
    (Trait::Early, Trait::Size),
    (Trait::Tight, Trait::Met),
    (Trait::Late, Trait::Area),
];

/// A section is tight where less than a 50th of the height is left.
const TIGHT: u64 = 50;

/// Nodes are spent at the goal in this ratio to those on the way, if the goal is far: with half of
/// them at the goal nothing was found there, and D and J of MiniMalloc's set improved more slowly.
const GOAL_PART: u64 = 8;

/// The most that blame moves an item: its weight is that of its most blamed section.
const WEIGHT_ONE: u64 = 1 << 10;

/// The probes of one part.
#[derive(Debug)]
pub(super) struct Probe<'a> {
    search: ExactSearch<'a>,
    /// By order and item: both keys in one number.
    scores: Vec<Vec<u64>>,
    chance: Chance,
    pub(super) low: u64,
    /// The height's fraction of the way from the peak to the bound: as a power of one half.
    shrink: u32,
    /// `true` if the height lies on the way to the goal, `false` if it is the goal.
    descends: bool,
    round: u32,
    rounds_at_goal: u32,
    /// Nodes spent at the goal, and on the way to it.
    at_goal: u64,
    on_way: u64,
    /// The next order, and the number tried of the round at this height.
    at: usize,
    tried: usize,
    pub(super) nodes: u64,
}

impl<'a> Probe<'a> {
    /// Probes of a part for which offsets of this peak are known.
    pub(super) fn new(part: &'a Subproblem, traits: &[Traits], peak: u64) -> Self {
        let values = Values::of(part, traits);
        Self {
            search: ExactSearch::new(part),
            scores: ORDERS.iter().map(|(first, second)| values.scores(*first, *second)).collect(),
            chance: Chance::new(0x51_7C_C1_B7_27_22_0A_95),
            low: part.bound,
            shrink: 1,
            descends: is_far(peak, part.bound),
            round: 0,
            rounds_at_goal: 0,
            at_goal: 0,
            on_way: 0,
            at: 0,
            tried: 0,
            nodes: 0,
        }
    }

    /// Probes once, from the best plan towards `goal`. `is_enough` is `true` if a smaller peak is of
    /// no use; `stop` is checked regularly.
    pub(super) fn step(
        &mut self,
        best: &mut PartPlan,
        goal: u64,
        is_enough: bool,
        nodes: u64,
        stop: &mut dyn FnMut() -> bool,
    ) {
        debug_assert!(self.low < best.peak && goal < best.peak, "nothing to probe");
        let low = self.low.max(goal);
        if low + 1 == best.peak || is_enough {
            self.descends = false;
        }
        let shrink = if self.descends { self.shrink } else { 0 };
        let height = best.peak - ((best.peak - low) >> shrink).max(1);
        let round = if self.descends { self.round } else { self.rounds_at_goal };
        let order = self.order(round);
        // Enough for a descent to the bottom and as many ways back.
        let limit = (2 * order.len() as u64 + 64) << (round / 2).min(32);
        let verdict = self.search.run(&order, height, limit.min(nodes), stop);
        let spent = self.search.nodes;
        self.nodes += spent;
        *(if self.descends { &mut self.on_way } else { &mut self.at_goal }) += spent;
        match verdict {
            SearchOutcome::Found => {
                best.offsets = self.search.offsets();
                best.peak = self.search.part.peak(&best.offsets);
                self.tried = 0; // and the order that found it comes first again
                self.shrink = self.shrink.saturating_sub(1).max(1);
                self.descends &= is_far(best.peak, self.low);
            }
            SearchOutcome::Failed => {
                self.low = height + 1;
                (self.tried, self.rounds_at_goal) = (0, 0);
            }
            SearchOutcome::OutOfBudget => self.missed(height + 1 < best.peak),
        }
    }

    /// After a round: the goal and what lies on the way to it are tried in turn. `is_apart` is
    /// `true` if there are heights between the last one and the best.
    fn missed(&mut self, is_apart: bool) {
        self.at = (self.at + 1) % ORDERS.len();
        self.tried += 1;
        if self.tried < ORDERS.len() {
            return;
        }
        self.tried = 0;
        if !self.descends {
            self.rounds_at_goal += 1;
            self.descends = true;
            return;
        }
        if is_apart {
            self.shrink += 1;
        } else {
            (self.shrink, self.round) = (2, self.round + 1);
        }
        self.descends = self.at_goal.saturating_mul(GOAL_PART) > self.on_way;
    }

    /// Returns a proved lower bound of the part's height.
    pub(super) fn proved(&self) -> u64 {
        let part = self.search.part;
        // If windows slide, an item may be below another one at a step and above it at the next,
        // which the search does not cover.
        if part.is_sliding { part.bound } else { self.low }
    }

    /// The next order: that of the table in the first round, then one that blame and chance move.
    fn order(&mut self, round: u32) -> Vec<u32> {
        let scores = &self.scores[self.at];
        let (blame, part) = (&self.search.floors.blame, self.search.part);
        let mean = blame.mean();
        let is_first = round == 0;
        let mut keys: Vec<(u64, u32)> = Vec::with_capacity(scores.len());
        for (item, score) in (0_u32..).zip(scores) {
            let own = &part.items[item as usize];
            let weight = blame.weight(own.from, own.to, mean, WEIGHT_ONE).min(1 << 16);
            let noise = WEIGHT_ONE + self.chance.below(WEIGHT_ONE / 2);
            let moved = (score >> 10) * (weight + WEIGHT_ONE / 8) / WEIGHT_ONE * noise;
            keys.push((if is_first { *score } else { moved }, item));
        }
        keys.sort_unstable_by_key(|(score, item)| (std::cmp::Reverse(*score), *item));
        keys.into_iter().map(|(_, item)| item).collect()
    }
}

/// Returns `true` if half of the way to the goal is more than a search usually finds at once.
const fn is_far(peak: u64, low: u64) -> bool {
    peak - low > low / 50
}

/// The traits of all items.
struct Values<'a> {
    part: &'a Subproblem,
    traits: &'a [Traits],
    totals: Vec<u64>,
}

impl<'a> Values<'a> {
    fn of(part: &'a Subproblem, traits: &'a [Traits]) -> Self {
        let mut totals = vec![0; part.sections as usize];
        for piece in &part.pieces {
            for total in &mut totals[piece.from as usize..piece.to as usize] {
                *total += part.weight(piece);
            }
        }
        Self { part, traits, totals }
    }

    /// Both traits in one number: 21 bits of the one, 21 bits of the other.
    fn scores(&self, first: Trait, second: Trait) -> Vec<u64> {
        let scaled = |values: Vec<u64>| {
            let most = values.iter().max().copied().unwrap_or(0).max(1);
            let scale = move |value: u64| u128::from(value) * ((1 << 21) - 1) / u128::from(most);
            values.into_iter().map(move |value| u64::try_from(scale(value)).unwrap_or(0))
        };
        let (first, second) = (scaled(self.all(first)), scaled(self.all(second)));
        first.zip(second).map(|(first, second)| first << 21 | second).collect()
    }

    fn all(&self, which: Trait) -> Vec<u64> {
        (0..self.part.items.len()).map(|item| self.one(which, item)).collect()
    }

    fn one(&self, which: Trait, at: usize) -> u64 {
        let (item, items) = (&self.part.items[at], &self.part.items);
        let totals = &self.totals[item.from as usize..item.to as usize];
        let width = u64::from(item.to - item.from);
        let met = || items.iter().filter(|other| other.from < item.to && item.from < other.to);
        match which {
            Trait::Width => width,
            Trait::Duration => self.traits[at].duration,
            Trait::Total => totals.iter().max().copied().unwrap_or(0),
            Trait::Totals => totals.iter().copied().fold(0, u64::saturating_add),
            Trait::Size => item.size,
            Trait::Area => item.size.saturating_mul(width),
            Trait::Met => met().count() as u64,
            Trait::MetSize => met().map(|other| other.size).sum(),
            Trait::Tight => {
                let near = self.part.bound - self.part.bound / TIGHT;
                totals.iter().filter(|total| **total >= near).count() as u64
            }
            Trait::Early => u64::from(self.part.sections - item.from),
            Trait::Late => u64::from(item.to),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::part::{Subproblems, Walls};
    use super::super::problem::{Demand, Gap, Problem};
    use super::super::shape::Shapes;
    use super::*;
    use lowtide_core::bytes::ByteSize;

    /// The bug: the sum of so many sections wrapped.
    #[test]
    fn totals_of_very_many_sections_do_not_overflow() {
        let mut problem = Problem::new();
        let gap = |at: i64| Gap { span: 2 * at + 1..2 * at + 2, window: None };
        let all = Demand::new("all", ByteSize::new(1 << 46), 0..1 << 20);
        let some = Demand::new("some", ByteSize::new(1), 0..1 << 20);
        problem.add(all).expect("it can be posed");
        problem
            .add(Demand { gaps: (0..1 << 18).map(gap).collect(), ..some })
            .expect("it can be posed");
        let shapes = Shapes::of(&problem).expect("nothing is shared");
        let parts = Subproblems::of(&shapes, &Walls::default());
        let traits = Traits::of(&parts.list[0], &shapes);
        let totals = Values::of(&parts.list[0], &traits).all(Trait::Totals);
        assert_eq!(totals, [u64::MAX; 2]);
    }
}
