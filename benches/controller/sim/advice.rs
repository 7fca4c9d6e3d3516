//! Compares the advice on a smaller limit with the effect of that limit.
//!
//! Traffic is recorded with a large limit. Then the same traffic runs with the smallest limit that
//! the record advises, and with half of it.
//!
//! Invariant: requests arrive at the same rate, whatever the limit.

use std::time::Duration;

use lowtide_admission::clock::Moment;
use lowtide_admission::{ByteSize, LimitAdvice, RejectReason, Settings};

use super::claims;
use super::scenario::{Load, MIB, Mix, Scenario, Shape};
use super::world::World;

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
