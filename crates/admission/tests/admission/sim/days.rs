//! Long runs. A month of days: quiet nights, a busy morning, minutes of overload, hours of little.
//!
//! What is learned by day must be gone by night, each night the same, and what an idle service does
//! must not become more.
//!
//! Invariant: nights are compared at three o'clock, hours after the last request.

use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::{ByteSize, LimitAdvice, RejectReason, Settings};

use super::claims::{self, Look, Seen};
use super::scenario::{Kind, Load, MIB, MIXES, Mix, Scenario, Shape};
use super::world::World;

/// Looks a day, one an hour; nights are compared at three o'clock.
const LOOKS: u32 = 24;
const NIGHT: usize = 3;
/// Jobs of the worker an hour at most: one publication a second, and some for the busy hours.
const JOBS_PER_HOUR: f64 = 4600.0;

/// The result of a month.
#[derive(Clone, Debug)]
pub(crate) struct Month {
    pub(crate) seen: Seen,
    /// The most that two nights after the first differ in MiB of the allowance and of what is
    /// physical. Zero where there are not two.
    pub(crate) allowance_drift: f64,
    pub(crate) physical_drift: f64,
    pub(crate) faults: Vec<String>,
}

/// Runs so many days of so many seconds.
pub(crate) fn run(seed: u64, days: u32, day: f64) -> Month {
    let scenario = Scenario {
        kind: Kind::Days,
        load: Load { low: 0.0, high: 4.0, shape: Shape::Days { day } },
        lasts: day * f64::from(days),
        resource: Some(0.2),
        measured: true,
        ..Scenario::steady(seed, MIXES[0], 1.0, 1.0)
    };
    let world = World::new(scenario.clone(), Settings::default());
    world.play(Moment::after_origin(Duration::from_secs_f64(scenario.lasts)));
    let seen = world.finish();
    let each = usize::try_from(LOOKS).unwrap_or(1);
    let nights: Vec<Look> = seen.looks.iter().skip(NIGHT).step_by(each).copied().collect();
    let spread = |of: fn(&Look) -> f64| {
        let each = nights.iter().skip(1).map(of);
        (each.clone().fold(f64::MIN, f64::max) - each.fold(f64::MAX, f64::min)).max(0.0)
    };
    let reserved = nights.iter().map(|look| look.reserved).fold(0.0, f64::max);
    let allowance_drift = spread(|look| look.allowance);
    let physical_drift = spread(|look| look.physical);
    let claim_drift = halves_apart(nights.get(1..).unwrap_or_default());
    let jobs = per_hour(seen.jobs, scenario.lasts / 3600.0);
    // What it is, and the most that it may be.
    let claims = [
        ("nights that differ in number from the days", f64::from(days) - length(&nights), 0.0),
        ("kills", f64::from(u8::from(seen.killed.is_some())), 0.0),
        ("jobs that panicked", per_hour(seen.end.panics, 1.0), 0.0),
        ("purges that came before their pace", per_hour(seen.hasty, 1.0), 0.0),
        ("MiB that stay booked at night", reserved, 0.0),
        ("drift of K", spread(|look| look.k), 0.01),
        ("drift of the allowance in MiB", allowance_drift, 2.0),
        ("drift of what is held in MiB", physical_drift, 16.5),
        ("drift of the learned reservation", claim_drift, 0.1),
        ("jobs an hour", jobs, JOBS_PER_HOUR),
        ("requests that were shed and had room", per_hour(seen.wasted, 1.0), 0.0),
    ];
    let is_wrong = |(_, value, most): &(&str, f64, f64)| value.abs() > *most;
    let wrong = claims.into_iter().filter(is_wrong);
    let faults = wrong.map(|(what, value, _)| format!("{what}: {value}")).collect();
    Month { seen, allowance_drift, physical_drift, faults }
}

/// The part by which the mean reservation of the second half differs from that of the first.
fn halves_apart(nights: &[Look]) -> f64 {
    let (first, second) = nights.split_at(nights.len() / 2);
    let mean = |of: &[Look]| {
        let sum: f64 = of.iter().map(|look| look.claim).sum();
        sum / length(of)
    };
    if first.is_empty() { 0.0 } else { (mean(second) / mean(first) - 1.0).abs() }
}

fn length(nights: &[Look]) -> f64 {
    f64::from(u32::try_from(nights.len()).unwrap_or(u32::MAX))
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

// The advice on a smaller limit, and the effect of that limit. Traffic is recorded with a large limit.
// Then the same traffic runs with the smallest limit that the record advises, and with half of it.
// Invariant: requests arrive at the same rate, whatever the limit.

/// MiB of the limit of the record.
const RECORDED: f64 = 1024.0;
/// The loads that are recorded, in parts of what fits that limit.
pub(crate) const LOADS: [(&str, Load); 3] = [
    ("steady", Load::constant(0.2)),
    ("waves", Load { low: 0.02, high: 0.3, shape: Shape::Sine { period: 20.0 } }),
    ("spikes", Load { low: 0.02, high: 0.6, shape: Shape::Spikes { period: 15.0, width: 1.0 } }),
];

/// The part of the requests that a limit rejects for lack of memory.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Rejections {
    pub(crate) predicted: f64,
    pub(crate) real: f64,
}

/// The smallest limit of an advice, and what it and half of it do.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Advised {
    pub(crate) limit: ByteSize,
    pub(crate) smallest: Rejections,
    pub(crate) half: Rejections,
    pub(crate) killed: bool,
}

/// Records so many seconds of a load, and runs them again with smaller limits. `None` if there is
/// no advice.
pub(crate) fn compare(seed: u64, mix: Mix, load: Load, lasts: f64) -> Option<Advised> {
    let mut scenario = Scenario::steady(seed, mix, 1.0, 1.0);
    scenario.build.limit = RECORDED;
    let scenario = Scenario { load, lasts, measured: true, ..scenario };
    let advice = record(&scenario);
    let limit = advice.smallest_limit()?;
    let mut killed = false;
    let [smallest, half] = [limit, limit.scaled(0.5)].map(|limit| {
        let real = rejected(&scenario, limit);
        killed |= real.is_none();
        Rejections { predicted: advice.at(limit).rejected_share(), real: real.unwrap_or(1.0) }
    });
    Some(Advised { limit, smallest, half, killed })
}

/// Runs a scenario, and returns the advice at the end of its load.
fn record(scenario: &Scenario) -> LimitAdvice {
    let world = World::new(scenario.clone(), Settings::default());
    world.play(Moment::after_origin(Duration::from_secs_f64(scenario.lasts)));
    world.advice()
}

/// Returns the part of the requests that this limit rejects for lack of memory, or `None` if the
/// process is killed.
fn rejected(scenario: &Scenario, limit: ByteSize) -> Option<f64> {
    let mut smaller = scenario.clone();
    smaller.build.limit = limit.as_f64() / MIB;
    smaller.load = scenario.load.times(scenario.fitting_rate() / smaller.fitting_rate());
    let seen = claims::run(&smaller, Settings::default());
    let reasons = [RejectReason::Full, RejectReason::Pressure, RejectReason::Exhausted];
    let rejected: u64 = reasons.iter().map(|reason| seen.reasons[*reason as usize]).sum();
    let part = ByteSize::new(rejected).as_f64() / ByteSize::new(seen.offered.max(1)).as_f64();
    seen.killed.is_none().then_some(part)
}
