//! The ceiling: how much of the limit requests, resources and other memory may fill together.
//!
//! The rest of the limit is for growth that no reservation predicted, until the control loop reacts
//! to it. At first that growth is unknown, so the ceiling starts low. It rises by [`STEP`] with
//! each generation of measured requests that used it and did not exceed it, up to what the measured
//! growth allows. Requests that are not measured are no evidence, since all of them may outgrow
//! their reservations before the correction factor shows it. If more is required than the ceiling
//! allows, it falls by the excess at once. If memory becomes critical, it falls to its start.
//!
//! Pure: the control loop, its owner, passes a sample with each tick.
//!
//! Invariants: `ceiling = max(start, min(earned, limit - reserve))`, with
//! `reserve = max(fixed, unlearned, growth x (tick + lateness))` and
//! `fixed = max((1 - most) x limit, min(16 MiB, (1 - start) x limit))`; in a generation the earned
//! part rises by at most [`STEP`].

use std::time::Duration;

use lowtide_core::bytes::ByteSize;

use super::correction::RequestRate;
use super::pressure::Level;

/// The smallest reserve, in a limit large enough for it.
const RESERVE_MIN: ByteSize = ByteSize::mib(16);
/// The part of the limit by which the ceiling rises with a generation of requests.
const STEP: f64 = 0.02;
/// A generation is evidence if this part of the ceiling was required at some time.
const USED: f64 = 0.75;
/// The largest growth and lateness are kept for this many ticks to twice as many. 1,000, so that
/// 99.9 % of the ticks stay below the largest value.
const TICKS: u32 = 1_000;

/// A sample of the host.
#[derive(Clone, Copy, Debug)]
pub(super) struct CeilingSample {
    /// A known limit.
    pub(super) limit: ByteSize,
    /// Physical less purgeable bytes.
    pub(super) required: ByteSize,
    /// The part of the required bytes that no reservation covers.
    pub(super) uncovered: ByteSize,
    /// `true` if requests are measured.
    pub(super) is_measured: bool,
    /// The reservations of requests whose need has not been measured.
    pub(super) unlearned: ByteSize,
    pub(super) level: Level,
    pub(super) turnover: RequestRate,
    /// The time between two ticks, and by how much this one is late.
    pub(super) tick: Duration,
    pub(super) late: Duration,
}

/// The parts of a ceiling.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct CeilingParts {
    /// The ceiling at the start, below which it does not fall.
    pub start: ByteSize,
    /// The ceiling that the requests so far have earned.
    pub earned: ByteSize,
    /// The part of the limit that is always left free.
    pub fixed: ByteSize,
    /// The reservations of requests whose need has not been measured.
    pub unlearned: ByteSize,
    /// The most by which memory without a reservation grows until the control loop reacts: the
    /// fastest growth between two of the last 1,000 to 2,000 ticks, times the longest such time.
    pub growth: ByteSize,
}

impl CeilingParts {
    /// Returns all parts with their names in metrics.
    #[must_use]
    pub const fn by_name(&self) -> [(&'static str, ByteSize); 5] {
        let Self { start, earned, fixed, unlearned, growth } = *self;
        [
            ("start", start),
            ("earned", earned),
            ("reserve_fixed", fixed),
            ("reserve_unlearned", unlearned),
            ("reserve_growth", growth),
        ]
    }

    /// Returns the ceiling in this limit.
    fn ceiling(&self, limit: ByteSize) -> ByteSize {
        let reserve = self.fixed.max(self.unlearned).max(self.growth);
        self.earned.min(limit.saturating_sub(reserve)).max(self.start)
    }
}

/// The state of the ceiling. Owned by the control loop.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Ceiling {
    /// The bounds, as parts of the limit.
    start: f64,
    most: f64,
    /// The earned part of the limit.
    earned: f64,
    generation: RequestGeneration,
    /// What was required, and the part of it that no reservation covered.
    last: Option<(ByteSize, ByteSize)>,
    /// Bytes per second.
    growth: Largest,
    /// Seconds between two samples.
    reaction: Largest,
}

/// The requests that have ended since the ceiling rose or fell.
#[derive(Clone, Copy, Debug, Default)]
struct RequestGeneration {
    ended: u64,
    held: u64,
    is_evidence: bool,
}

impl Ceiling {
    pub(super) fn new(start: f64, most: f64) -> Self {
        Self { start, most, earned: start, ..Self::default() }
    }

    /// Updates the state and returns the ceiling with its parts.
    pub(super) fn update(&mut self, sample: CeilingSample) -> (ByteSize, CeilingParts) {
        let CeilingSample { limit, turnover, .. } = sample;
        let now = (sample.required, sample.uncovered);
        let before = self.last.replace(now).unwrap_or(now);
        // Both must have grown: when a request ends, its memory becomes uncovered without growth.
        let grown = now.0.saturating_sub(before.0).min(now.1.saturating_sub(before.1)).as_f64();
        let seconds = turnover.time.max(sample.tick).as_secs_f64();
        self.growth.add(if seconds > 0.0 { grown / seconds } else { 0.0 });
        self.reaction.add((sample.tick + sample.late).as_secs_f64());
        let fixed = limit.scaled(1.0 - self.most);
        let fixed = fixed.max(RESERVE_MIN.min(limit.scaled(1.0 - self.start)));
        let growth = ByteSize::new(1).scaled(self.growth.get() * self.reaction.get());
        let (start, earned) = (limit.scaled(self.start), limit.scaled(self.earned));
        let unlearned = sample.unlearned;
        let mut parts = CeilingParts { start, earned, fixed, unlearned, growth };
        self.learn(sample, parts.ceiling(limit));
        parts.earned = limit.scaled(self.earned);
        (parts.ceiling(limit), parts)
    }

    fn learn(&mut self, sample: CeilingSample, ceiling: ByteSize) {
        let CeilingSample { limit, required, turnover, .. } = sample;
        let excess = required.saturating_sub(ceiling);
        if sample.level == Level::Critical {
            return self.fall_to(self.start);
        }
        if !excess.is_zero() {
            return self.fall_to(ceiling.saturating_sub(excess).as_f64() / limit.as_f64());
        }
        let generation = &mut self.generation;
        generation.is_evidence |= sample.is_measured && required >= ceiling.scaled(USED);
        generation.held = generation.held.max(turnover.held);
        generation.ended = generation.ended.saturating_add(turnover.ended);
        if generation.ended >= generation.held.max(1) {
            if generation.is_evidence {
                self.earned = (self.earned + STEP).min(self.most);
            }
            self.generation =
                RequestGeneration { held: turnover.held, ..RequestGeneration::default() };
        }
    }

    /// Lowers the earned part, but not below its start. Ignores NaN, which a limit of 0 yields.
    fn fall_to(&mut self, earned: f64) {
        self.earned = self.earned.min(earned).max(self.start);
        self.generation = RequestGeneration::default();
    }
}

/// The largest value of the last [`TICKS`] ticks, or of up to twice as many.
#[derive(Clone, Copy, Debug, Default)]
struct Largest {
    now: f64,
    before: f64,
    ticks: u32,
}

impl Largest {
    fn add(&mut self, value: f64) {
        if self.ticks == TICKS {
            *self = Self { before: self.now, ..Self::default() };
        }
        self.now = self.now.max(value);
        self.ticks += 1;
    }

    fn get(self) -> f64 {
        self.now.max(self.before)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const LIMIT: ByteSize = ByteSize::mib(1000);
    const TICK: Duration = Duration::from_millis(10);

    /// A tick with so many MiB required, all of them reserved, in which 10 requests ended.
    fn tick(required: u64) -> CeilingSample {
        CeilingSample {
            limit: LIMIT,
            required: ByteSize::mib(required),
            uncovered: ByteSize::ZERO,
            is_measured: true,
            unlearned: ByteSize::ZERO,
            level: Level::None,
            turnover: RequestRate { time: TICK, ended: 10, held: 100 },
            tick: TICK,
            late: Duration::ZERO,
        }
    }

    /// Returns the ceiling in MiB after so many such ticks.
    fn after(ceiling: &mut Ceiling, ticks: u32, sample: CeilingSample) -> u64 {
        let last = (0..ticks).map(|_| ceiling.update(sample).0).last();
        last.expect("a tick").get() >> 20
    }

    #[test]
    fn it_rises_by_two_points_with_each_generation_that_used_it_up_to_its_bound() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        let risen: Vec<u64> = (0..8).map(|_| after(&mut ceiling, 10, tick(700))).collect();
        assert_eq!(risen, [820, 840, 860, 880, 900, 920, 930, 930]);
    }

    #[test]
    fn a_load_that_leaves_most_of_it_free_is_no_evidence() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        assert_eq!(after(&mut ceiling, 1000, tick(500)), 800);
        let idle = RequestRate { time: TICK, ended: 0, held: 0 };
        assert_eq!(after(&mut ceiling, 1000, CeilingSample { turnover: idle, ..tick(700) }), 800);
        let (mut ceiling, is_measured) = (Ceiling::new(0.80, 0.93), false);
        let unmeasured = CeilingSample { is_measured, ..tick(700) };
        assert_eq!(after(&mut ceiling, 1000, unmeasured), 800, "their growth is not known");
    }

    #[test]
    fn it_falls_at_once_by_the_excess_and_to_its_start_if_memory_is_critical() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        assert_eq!(after(&mut ceiling, 100, tick(750)), 930);
        assert_eq!(after(&mut ceiling, 1, tick(950)), 910);
        assert_eq!(after(&mut ceiling, 9, tick(750)), 910, "a generation begins");
        assert_eq!(after(&mut ceiling, 1, tick(750)), 930);
        let critical = CeilingSample { level: Level::Critical, ..tick(750) };
        assert_eq!(after(&mut ceiling, 1, critical), 800);
        assert_eq!(after(&mut ceiling, 1, tick(2000)), 800, "and never lower");
    }

    #[test]
    fn growth_without_a_reservation_times_the_longest_reaction_stays_free() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        assert_eq!(after(&mut ceiling, 100, tick(750)), 930);
        // 20 MiB in 10 ms, and once 40 ms from one tick to the next.
        let grown = CeilingSample { uncovered: ByteSize::mib(20), ..tick(770) };
        assert_eq!(after(&mut ceiling, 1, grown), 930, "20 MiB are less than 70");
        let late = CeilingSample { late: 3 * TICK, ..grown };
        assert_eq!(after(&mut ceiling, 1, late), 920, "80 MiB are not");
        assert_eq!(after(&mut ceiling, 2 * TICKS, grown), 930, "forgotten");
    }

    #[test]
    fn a_request_that_ends_is_not_growth() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        assert_eq!(after(&mut ceiling, 100, tick(750)), 930);
        let freed = CeilingSample { uncovered: ByteSize::mib(300), ..tick(740) };
        let (_, parts) = ceiling.update(freed);
        assert_eq!(parts.growth, ByteSize::ZERO);
    }

    #[test]
    fn room_for_requests_of_unknown_need_stays_free() {
        let mut ceiling = Ceiling::new(0.80, 0.93);
        assert_eq!(after(&mut ceiling, 100, tick(750)), 930);
        let unlearned = CeilingSample { unlearned: ByteSize::mib(150), ..tick(750) };
        assert_eq!(after(&mut ceiling, 1, unlearned), 850);
        assert_eq!(after(&mut ceiling, 1, tick(750)), 930);
    }

    #[test]
    fn a_small_limit_keeps_sixteen_mib_free_and_a_ceiling_that_was_set_stays() {
        let in_limit = |mib: u64, start, most| {
            let sample = CeilingSample { limit: ByteSize::mib(mib), ..tick(mib * 3 / 4) };
            after(&mut Ceiling::new(start, most), 100, sample)
        };
        assert_eq!(in_limit(128, 0.80, 0.93), 112);
        assert_eq!(in_limit(80, 0.80, 0.93), 64);
        assert_eq!(in_limit(40, 0.80, 0.93), 32);
        assert_eq!(in_limit(1000, 0.90, 0.90), 900);
        assert_eq!(in_limit(1000, 1.00, 1.00), 1000);
    }
}
