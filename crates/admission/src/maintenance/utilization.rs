//! How full the ledgers are on average: the reserved part of their allowances, for load reports.
//!
//! The control loop adds what it finds at each tick; others read the average from
//! [`PressureState`](super::PressureState). Load balancers divide the rate of requests by it. By
//! Little's law that is the rate that the allowance can carry, if both are averages over the same
//! time, and apart from loaded resources, which are part of what is reserved. One sample would say
//! little.
//!
//! Invariant: an average is within the range of the values that were added to it.

use std::array;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// The ledgers with an average of their own: the host's, and those of 16 devices. Further devices
/// are added to the last one, which is as full as the fullest of them.
const LEDGERS: usize = 17;

/// The time constant of averages for load reports. An estimate: some turnovers of requests, and
/// about as long as balancers wait before they use a report.
#[doc(hidden)]
pub const REPORT_WINDOW: Duration = Duration::from_secs(2);

/// The time for which a rejection shows in load reports and in the saturation. A client that is
/// rejected soon tries again, so a service that rejects one request a second is as full as one that
/// rejects a hundred. Balancers look about once a second.
#[doc(hidden)]
pub const SHED_SHOWN: Duration = Duration::from_secs(1);

/// Returns the weight of what was measured during the last `step` in a mean over time in which a
/// value counts for a third (`1/e`) after `window`.
#[doc(hidden)]
#[must_use]
pub fn mean_weight(step: Duration, window: Duration) -> f64 {
    1.0 - (-step.as_secs_f64() / window.as_secs_f64()).exp()
}

/// The averages, in the state that the control loop publishes.
#[derive(Debug)]
pub(super) struct Utilizations([AtomicU64; LEDGERS]);

impl Default for Utilizations {
    fn default() -> Self {
        Self(array::from_fn(|_| AtomicU64::new(f64::NAN.to_bits())))
    }
}

impl Utilizations {
    /// Returns the averages, the host's first, then the devices' in their order; `None` for a
    /// ledger without a limit.
    pub(super) fn each(&self) -> impl Iterator<Item = Option<f64>> {
        let load = |place: &AtomicU64| f64::from_bits(place.load(Ordering::Relaxed));
        self.0.iter().map(load).map(|average| Some(average).filter(|average| !average.is_nan()))
    }

    /// Adds the current values of the ledgers, which are `None` without a limit. Called by the
    /// control loop.
    pub(super) fn add(&self, step: Duration, mut now: impl Iterator<Item = Option<f64>>) {
        let weight = mean_weight(step, REPORT_WINDOW);
        for (nth, place) in self.0.iter().enumerate() {
            let mut value = now.next().flatten();
            if nth + 1 == LEDGERS {
                value = now.by_ref().flatten().chain(value).reduce(f64::max);
            }
            let before = f64::from_bits(place.load(Ordering::Relaxed));
            let after = match value {
                Some(value) if before.is_nan() => value,
                Some(value) => before + weight * (value - before),
                None => f64::NAN,
            };
            place.store(after.to_bits(), Ordering::Relaxed);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(10);

    fn each(utilizations: &Utilizations) -> Vec<Option<f64>> {
        utilizations.each().collect()
    }

    #[test]
    fn an_average_follows_its_ledger_within_a_few_windows() {
        let utilizations = Utilizations::default();
        assert_eq!(each(&utilizations), [None; LEDGERS]);
        utilizations.add(Duration::ZERO, [Some(0.5), None].into_iter());
        assert_eq!(each(&utilizations)[..2], [Some(0.5), None]);
        // A ledger that is full for every other tick.
        for tick in 0..2_000 {
            utilizations.add(TICK, [Some(f64::from(tick % 2)), Some(0.25)].into_iter());
        }
        let found = each(&utilizations);
        assert!((found[0].expect("limited") - 0.5).abs() < 0.01, "{found:?}");
        assert_eq!(found[1], Some(0.25));
        let mut ticks = 0;
        while each(&utilizations)[0].is_some_and(|average| average > 0.02) {
            utilizations.add(TICK, [Some(0.0)].into_iter());
            ticks += 1;
        }
        // ln(.5 / .02) = 3.2
        let windows = TICK.as_secs_f64() * f64::from(ticks) / REPORT_WINDOW.as_secs_f64();
        assert!((3.0..3.5).contains(&windows), "from .5 to .02");
        utilizations.add(TICK, [None].into_iter());
        assert_eq!(each(&utilizations)[0], None, "its limit is gone");
    }

    #[test]
    fn devices_without_a_place_of_their_own_share_the_last_one() {
        let utilizations = Utilizations::default();
        let of = |nth: u32| Some(f64::from(nth) / 100.0);
        utilizations.add(TICK, (0..30).rev().map(of));
        let found = each(&utilizations);
        assert_eq!(found[..2], [Some(0.29), Some(0.28)]);
        assert_eq!(found[LEDGERS - 1], Some(0.13), "the fullest of the rest");
        utilizations.add(TICK, (0..17).map(|_| None).chain([Some(0.7)]));
        assert!(each(&utilizations)[LEDGERS - 1].is_some_and(|average| average > 0.13));
    }
}
