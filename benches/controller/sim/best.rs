//! Goodput at four times what fits, beside the best fixed budget that survives.
//!
//! A fixed budget admits estimates up to so many MiB, whatever they hold. It has our purges and
//! levels of memory beside it, which no such limit has by itself. The best one is looked for from
//! above, in steps of 2 % of the limit: the first that lives through every seed.
//!
//! Invariant: both see the same arrivals.

use lowtide_admission::Settings;

use super::claims::run;
use super::load::{Load, Mix};
use super::plant::Build;
use super::scenario::{Kind, Late, Sampler, Scenario, Truth};
use super::seen::Seen;

use std::time::Duration;

/// Seconds of load in a run.
const LASTS: f64 = 20.0;
/// A step of the search, as a part of the limit.
const STEP: f64 = 0.02;
const STEPS: u32 = 150;

/// The result of one mix and one truth.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Compared {
    /// MiB a second, by estimates.
    pub(crate) ours: f64,
    pub(crate) best: f64,
    /// The best budget, as a part of the limit.
    pub(crate) budget: f64,
    /// The part of its proportional share that each class got with us, and with the best budget.
    pub(crate) shares: [f64; 3],
    pub(crate) best_shares: [f64; 3],
    /// The worst of ours.
    pub(crate) changes: f64,
    pub(crate) killed: bool,
}

/// A steady scenario of 256 MiB at this many times what fits.
pub(crate) fn steady(seed: u64, mix: Mix, factor: f64, times: f64) -> Scenario {
    let build =
        Build { limit: 256.0, base: 20.0, decay: Some(1.0), caches: 2.0, holes: 0.02, files: 0.3 };
    Scenario {
        seed,
        kind: Kind::Overload,
        build,
        mix,
        load: Load::Constant(times),
        lasts: LASTS,
        truth: Truth { factor, noise: 0.2, change: None },
        arrives: 0.1,
        lingers: Duration::from_millis(2),
        grows: false,
        measured: false,
        sampler: Sampler { late: Late::Sometimes(0.002), stale: false, blind: None },
        worker_late: Duration::from_millis(2),
        neighbour: None,
        limits: Vec::new(),
        resource: None,
    }
}

/// Compares over these seeds.
pub(crate) fn compare(seeds: u64, mix: Mix, factor: f64) -> Compared {
    let all: Vec<_> = (0..seeds).map(|seed| steady(seed, mix, factor, 4.0)).collect();
    let seen: Vec<_> = all.iter().map(|one| run(one, Settings::default(), None)).collect();
    let lives = |seen: &[Seen]| seen.iter().all(|one| one.killed.is_none());
    let mut best = (0.0, 0.0, [0.0; 3]);
    for step in (1..=STEPS).rev() {
        let budget = STEP * f64::from(step);
        let tried: Vec<_> = all
            .iter()
            .map(|one| run(one, Settings::default(), Some(budget * one.build.limit)))
            .take_while(|one| one.killed.is_none())
            .collect();
        if tried.len() == all.len() {
            best = (budget, goodput(&tried), shares(&tried));
            break;
        }
    }
    let changes = seen.iter().map(|one| one.changes_per_second(2.0, LASTS)).fold(0.0, f64::max);
    Compared {
        ours: goodput(&seen),
        best: best.1,
        budget: best.0,
        shares: shares(&seen),
        best_shares: best.2,
        changes,
        killed: !lives(&seen),
    }
}

fn goodput(all: &[Seen]) -> f64 {
    let count = f64::from(u32::try_from(all.len()).unwrap_or(1).max(1));
    all.iter().map(Seen::served_mib).sum::<f64>() / LASTS / count
}

fn shares(all: &[Seen]) -> [f64; 3] {
    let count = f64::from(u32::try_from(all.len()).unwrap_or(1).max(1));
    std::array::from_fn(|class| all.iter().map(|one| one.shares()[class]).sum::<f64>() / count)
}
