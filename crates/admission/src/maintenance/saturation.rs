//! The saturation of a service: one number for autoscalers, which tells how near it is to rejecting
//! requests for lack of memory ([`PressureState::saturation`](super::PressureState::saturation)).
//!
//! Pure: the control loop, its owner, passes what it found at each tick. What requests have
//! reserved is compared with the room for them, not with the limit: memory that no request owns
//! makes the room smaller, and is otherwise no load, or an autoscaler could never remove the
//! instances that hold it. The reservation of one more request of a thirty-second of the ceiling
//! counts too, so that the number rises while the room becomes smaller without any request.
//!
//! A tick is an instant, and load comes in bursts, while a scrape comes every 15 s to 30 s. So the
//! number is a mean over time, and not a peak, which each burst would raise to 1.
//!
//! Invariants: `0 <= saturation <= 1`, and not NaN; it does not fall if requests reserve more, if
//! more memory is required at the same correction factor, or if memory becomes short.

use std::time::Duration;

use lowtide_core::clock::Moment;

/// The time after which a value counts for a third of what it did: `1/e`. Between two scrapes at
/// least half of the number is replaced.
const AVERAGED: Duration = Duration::from_secs(15);

/// The mean over time.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Saturation {
    mean: f64,
    at: Option<Moment>,
    /// The requests that were shed by the last tick, and the time of the last tick that found a
    /// further one.
    sheds: u64,
    pub(super) shed_at: Option<Moment>,
}

impl Saturation {
    /// Adds the value of a tick, for the time since the last one. Returns the mean.
    pub(super) fn add(&mut self, now: Moment, value: f64) -> f64 {
        let weight = self.at.replace(now).map_or(1.0, |last| mean_weight(now - last, AVERAGED));
        self.mean = (self.mean + weight * (value - self.mean)).clamp(0.0, 1.0);
        self.mean
    }

    /// Returns `true` if a request was shed in the last second.
    pub(super) fn has_recent_shed(&mut self, now: Moment, sheds_total: u64) -> bool {
        if std::mem::replace(&mut self.sheds, sheds_total) < sheds_total {
            self.shed_at = Some(now);
        }
        self.shed_at.is_some_and(|at| now - at < SHED_SHOWN)
    }
}

// How full the ledgers are on average: the reserved part of their allowances, for load reports.
//
// The control loop adds what it finds at each tick; others read the average from
// [`PressureState`](super::PressureState). Load balancers divide the rate of requests by it. By
// Little's law that is the rate that the allowance can carry, if both are averages over the same
// time, and apart from loaded resources, which are part of what is reserved. One sample would say
// little.
//
// Invariant: an average is within the range of the values that were added to it.
/// The ledgers with an average of their own: the host's, and those of 16 devices. Further devices
/// are added to the last one, which is as full as the fullest of them.
pub(super) const LEDGERS: usize = 17;

/// The time constant of averages for load reports. An estimate: some turnovers of requests, and
/// about as long as balancers wait before they use a report.
pub const REPORT_WINDOW: Duration = Duration::from_secs(2);

/// The time for which a rejection shows in load reports and in the saturation. A client that is
/// rejected soon tries again, so a service that rejects one request a second is as full as one that
/// rejects a hundred. Balancers look about once a second.
pub const SHED_SHOWN: Duration = Duration::from_secs(1);

/// Returns the weight of what was measured during the last `step` in a mean over time in which a
/// value counts for a third (`1/e`) after `window`.
#[must_use]
pub fn mean_weight(step: Duration, window: Duration) -> f64 {
    1.0 - (-step.as_secs_f64() / window.as_secs_f64()).exp()
}

/// Adds the current values of the ledgers to their averages, the host's first, then the devices' in
/// their order; `None` for a ledger without a limit.
pub(super) fn add_utilizations(
    averages: &mut [Option<f64>; LEDGERS],
    step: Duration,
    mut now: impl Iterator<Item = Option<f64>>,
) {
    let weight = mean_weight(step, REPORT_WINDOW);
    for (nth, average) in averages.iter_mut().enumerate() {
        let mut value = now.next().flatten();
        if nth + 1 == LEDGERS {
            value = now.by_ref().flatten().chain(value).reduce(f64::max);
        }
        *average = match (*average, value) {
            (Some(before), Some(value)) => Some(before + weight * (value - before)),
            (_, value) => value,
        };
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::correction::{Correction, Measured};
    use crate::ledger::Ledger;
    use lowtide_core::bytes::ByteSize;

    const CEILING: ByteSize = ByteSize::mib(800);

    fn after(seconds: u64) -> Moment {
        Moment::after_origin(Duration::from_secs(seconds))
    }

    fn near(found: f64, expected: f64) -> bool {
        (found - expected).abs() < 1e-3
    }

    /// Marsaglia's xorshift.
    struct Random(u64);

    impl Random {
        fn next(&mut self) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            self.0
        }

        /// A number from 0 to 1.
        fn part(&mut self) -> f64 {
            f64::from(u32::try_from(self.next() % 101).expect("small")) / 100.0
        }

        /// Mostly sizes around the ceiling, and the ends of the range.
        fn bytes(&mut self) -> ByteSize {
            match self.next() % 16 {
                0 => ByteSize::ZERO,
                1 => ByteSize::MAX,
                2 => ByteSize::new(self.next()),
                _ => ByteSize::new(self.next() % (CEILING.get() * 5 / 4)),
            }
        }
    }

    /// A ledger after some samples, in which requests hold what they have reserved.
    fn ledger(random: &mut Random) -> (Ledger, Correction, Measured) {
        let ledger = Ledger::new();
        let mut correction = Correction::starting_at(1.0 + 4.0 * random.part());
        let mut measured = Measured { ceiling: CEILING, ..Measured::default() };
        ledger.correct(&mut correction, measured);
        for _ in 0..random.next() % 4 {
            let _ = ledger.try_book(random.bytes());
            // It is never released, since the ledger goes too.
            let hold = ledger.try_reserve_resource(random.bytes());
            let _ = hold.map(|mut hold| ledger.settle(&mut hold));
            measured.physical = random.bytes();
            measured.purgeable = random.bytes().min(measured.physical);
            ledger.correct(&mut correction, measured);
        }
        (ledger, correction, measured)
    }

    #[test]
    fn it_is_in_its_range_and_rises_with_reservations_and_with_required_memory() {
        let mut compared = 0;
        for seed in 1..=20_000_u64 {
            let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let (ledger, correction, measured) = ledger(&mut random);
            let freed = random.bytes();
            let value = ledger.saturation(freed);
            let in_range = |value: f64| (0.0..=1.0).contains(&value);
            assert!(in_range(value), "seed {seed}: {value}");
            assert!(ledger.saturation(ByteSize::ZERO) >= value, "seed {seed}: an unload raised it");
            // Memory that no request owns grows.
            let physical = measured.physical.saturating_add(random.bytes());
            let [(lean, factor), (fat, other)] = [measured.physical, physical].map(|physical| {
                ledger.correct(&mut correction.clone(), Measured { physical, ..measured });
                (ledger.saturation(freed), ledger.correction_factor())
            });
            assert!(in_range(lean) && in_range(fat), "seed {seed}: {lean}, {fat}");
            let same_factor = (factor - other).abs() < 1e-9;
            assert!(!same_factor || fat >= lean, "seed {seed}: {lean}, then {fat}");
            compared += u32::from(same_factor && fat > lean);
            let _ = ledger.book_exempt(random.bytes());
            let more = ledger.saturation(freed);
            assert!(in_range(more) && more >= fat, "seed {seed}: {fat}, then {more}");
        }
        assert!(compared > 500, "{compared} rises");
    }

    #[test]
    fn the_mean_is_in_its_range_rises_with_each_value_and_ends_at_a_constant_one() {
        for seed in 1..=2_000_u64 {
            let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15));
            let (mut low, mut high) = (Saturation::default(), Saturation::default());
            let mut now = Moment::ORIGIN;
            for _ in 0..50 {
                now = now + Duration::from_millis(random.next() % 60_000);
                let value = random.part();
                let more = value + (1.0 - value) * random.part();
                let (below, above) = (low.add(now, value), high.add(now, more));
                let is_in_range = (0.0..=1.0).contains(&below) && (0.0..=1.0).contains(&above);
                assert!(is_in_range && below <= above, "seed {seed}: {below}, {above}");
            }
            let ends = high.add(now + Duration::from_secs(3600), 0.25);
            assert!(near(ends, 0.25), "seed {seed}: {ends}");
        }
    }

    #[test]
    fn a_quarter_of_a_minute_counts_for_sixty_three_percent() {
        let mut saturation = Saturation::default();
        assert!(near(saturation.add(after(7), 0.5), 0.5), "the first value is all there is");
        assert!(near(saturation.add(after(7), 1.0), 0.5), "no time has passed");
        assert!(near(saturation.add(after(22), 1.0), 1.0 - 0.5 / std::f64::consts::E));
        assert!(near(saturation.add(after(3), 0.0), 0.816), "a clock that went back");
        // In steps as well as at once.
        let mut other = Saturation::default();
        (0..=10).for_each(|tenth| {
            let at = Moment::after_origin(Duration::from_millis(1_500 * tenth));
            other.add(at, if tenth == 0 { 0.5 } else { 1.0 });
        });
        assert!(near(other.mean, 1.0 - 0.5 / std::f64::consts::E));
    }

    #[test]
    fn a_rejection_counts_for_a_second() {
        let mut saturation = Saturation::default();
        let mut sheds = |millis, total| {
            saturation.has_recent_shed(Moment::after_origin(Duration::from_millis(millis)), total)
        };
        assert!(!sheds(0, 0));
        assert!(sheds(10, 3) && sheds(1_009, 3) && !sheds(1_010, 3));
        assert!(sheds(2_000, 4) && sheds(2_900, 5) && sheds(3_800, 5));
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod utilization_tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(10);

    #[test]
    fn an_average_follows_its_ledger_within_a_few_windows() {
        let mut averages = [None; LEDGERS];
        add_utilizations(&mut averages, Duration::ZERO, [Some(0.5), None].into_iter());
        assert_eq!(averages[..2], [Some(0.5), None]);
        // A ledger that is full for every other tick.
        for tick in 0..2_000 {
            add_utilizations(
                &mut averages,
                TICK,
                [Some(f64::from(tick % 2)), Some(0.25)].into_iter(),
            );
        }
        let found = averages;
        assert!((found[0].expect("limited") - 0.5).abs() < 0.01, "{found:?}");
        assert_eq!(found[1], Some(0.25));
        let mut ticks = 0;
        while averages[0].is_some_and(|average| average > 0.02) {
            add_utilizations(&mut averages, TICK, [Some(0.0)].into_iter());
            ticks += 1;
        }
        // ln(.5 / .02) = 3.2
        let windows = TICK.as_secs_f64() * f64::from(ticks) / REPORT_WINDOW.as_secs_f64();
        assert!((3.0..3.5).contains(&windows), "from .5 to .02");
        add_utilizations(&mut averages, TICK, [None].into_iter());
        assert_eq!(averages[0], None, "its limit is gone");
    }

    #[test]
    fn devices_without_a_place_of_their_own_share_the_last_one() {
        let mut averages = [None; LEDGERS];
        let of = |nth: u32| Some(f64::from(nth) / 100.0);
        add_utilizations(&mut averages, TICK, (0..30).rev().map(of));
        let found = averages;
        assert_eq!(found[..2], [Some(0.29), Some(0.28)]);
        assert_eq!(found[LEDGERS - 1], Some(0.13), "the fullest of the rest");
        add_utilizations(&mut averages, TICK, (0..17).map(|_| None).chain([Some(0.7)]));
        assert!(averages[LEDGERS - 1].is_some_and(|average| average > 0.13));
    }
}
