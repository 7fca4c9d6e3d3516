//! A month of days: quiet nights, a busy morning, minutes of overload, hours of little.
//!
//! What is learned by day must be gone by night, each night the same, and what an idle service does
//! must not become more.
//!
//! Invariant: nights are compared at three o'clock, hours after the last request.

use std::time::Duration;

use lowtide_admission::Settings;
use lowtide_admission::clock::Moment;

use super::load::{Load, MIXES, Shape};
use super::scenario::{Kind, Scenario};
use super::seen::{Look, Seen};
use super::world::World;

/// Looks a day, one an hour; nights are compared at three o'clock.
const LOOKS: u32 = 24;
const NIGHT: usize = 3;
/// Jobs of the worker an hour at most: one publication a second, and some for the busy hours.
const JOBS_PER_HOUR: f64 = 4600.0;

/// The result of a month.
#[derive(Clone, Debug)]
pub(crate) struct Month {
    pub(crate) days: u32,
    pub(crate) seen: Seen,
    /// Jobs of the worker an hour, on average.
    pub(crate) jobs_per_hour: f64,
    /// The most that two nights after the first differ: K, and MiB of the allowance and of what is
    /// physical. Zero where there are not two.
    pub(crate) k_drift: f64,
    pub(crate) allowance_drift: f64,
    pub(crate) physical_drift: f64,
    /// The part by which the mean learned reservation differs from the first half of those nights
    /// to the second.
    pub(crate) claim_drift: f64,
    pub(crate) faults: Vec<String>,
}

/// The scenario of so many days of so many seconds.
pub(crate) fn month(seed: u64, days: u32, day: f64) -> Scenario {
    let steady = Scenario::steady(seed, MIXES[0], 1.0, 1.0);
    Scenario {
        kind: Kind::Days,
        load: Load { low: 0.0, high: 4.0, shape: Shape::Days { day } },
        lasts: day * f64::from(days),
        resource: Some(0.2),
        measured: true,
        ..steady
    }
}

/// Runs so many days of so many seconds.
pub(crate) fn run(seed: u64, days: u32, day: f64) -> Month {
    let scenario = month(seed, days, day);
    let world = World::new(scenario.clone(), Settings::default());
    world.play(Moment::after_origin(Duration::from_secs_f64(scenario.lasts)));
    let seen = world.finish();
    let each = usize::try_from(LOOKS).unwrap_or(1);
    let nights: Vec<Look> = seen.looks.iter().skip(NIGHT).step_by(each).copied().collect();
    let spread = |of: fn(&Look) -> f64| {
        let each = nights.iter().skip(1).map(of);
        (each.clone().fold(f64::MIN, f64::max) - each.fold(f64::MAX, f64::min)).max(0.0)
    };
    let mut month = Month {
        days,
        jobs_per_hour: per_hour(seen.jobs, scenario.lasts / 3600.0),
        k_drift: spread(|look| look.k),
        allowance_drift: spread(|look| look.allowance),
        physical_drift: spread(|look| look.physical),
        claim_drift: halves_apart(nights.get(1..).unwrap_or_default()),
        seen,
        faults: Vec::new(),
    };
    month.judge(&nights);
    month
}

impl Month {
    fn judge(&mut self, nights: &[Look]) {
        let mut faults = Vec::new();
        let mut claim = |holds: bool, what: String| {
            if !holds {
                faults.push(what);
            }
        };
        let seen = &self.seen;
        claim(nights.len() == usize::try_from(self.days).unwrap_or(0), {
            format!("{} nights in {} days", nights.len(), self.days)
        });
        claim(seen.killed.is_none(), format!("killed at {:?} s", seen.killed));
        claim(seen.end.panics == 0, format!("{} jobs panicked", seen.end.panics));
        claim(seen.hasty == 0, format!("{} purges came before their pace", seen.hasty));
        let reserved = nights.iter().map(|look| look.reserved).fold(0.0, f64::max);
        claim(reserved == 0.0, format!("{reserved} MiB stay booked at night"));
        claim(self.k_drift <= 0.01, format!("K drifts by {}", self.k_drift));
        claim(self.allowance_drift <= 2.0, {
            format!("the allowance drifts by {} MiB", self.allowance_drift)
        });
        claim(self.physical_drift <= 16.5, {
            format!("what is held drifts by {} MiB", self.physical_drift)
        });
        claim(self.claim_drift <= 0.1, {
            format!("the learned reservation drifts by {}", self.claim_drift)
        });
        claim(self.jobs_per_hour <= JOBS_PER_HOUR, {
            format!("{} jobs an hour", self.jobs_per_hour)
        });
        claim(seen.wasted == 0, format!("{} were shed that had room", seen.wasted));
        self.faults = faults;
    }
}

/// The part by which the mean reservation of the second half differs from that of the first.
fn halves_apart(nights: &[Look]) -> f64 {
    let (first, second) = nights.split_at(nights.len() / 2);
    let mean = |of: &[Look]| {
        let sum: f64 = of.iter().map(|look| look.claim).sum();
        sum / f64::from(u32::try_from(of.len()).unwrap_or(u32::MAX))
    };
    if first.is_empty() { 0.0 } else { (mean(second) / mean(first) - 1.0).abs() }
}

#[expect(clippy::cast_precision_loss, reason = "jobs of a month are far below 2^52")]
fn per_hour(jobs: u64, hours: f64) -> f64 {
    jobs as f64 / hours
}

impl Scenario {
    /// Returns the time between two looks at the learned factor.
    pub(super) fn look_every(&self) -> Duration {
        match self.load.shape {
            Shape::Days { day } => Duration::from_secs_f64(day / f64::from(LOOKS)),
            _ => Duration::from_millis(50),
        }
    }
}
