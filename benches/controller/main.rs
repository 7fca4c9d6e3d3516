//! The controller in virtual time, with many seeds; `crates/admission/tests/admission/simulated.rs`
//! runs a few.
//!
//! Scenarios, each from a seed; days of the controller and of a device arena; and the advice on
//! smaller limits compared with their effect. A run that fails is shown with its seed, and `--from
//! SEED --seeds 1` runs it again.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod arena;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
#[allow(dead_code, reason = "the tests use more of it")]
mod sim;

use std::process::ExitCode;

use clap::Parser;

use crate::common::figures::count as exact;
use crate::sim::advice::{self, Advised, LOADS};
use crate::sim::claims;
use crate::sim::days;
use crate::sim::load::MIXES;
use crate::sim::scenario::{Kind, Scenario};

/// Seconds of traffic that are recorded for an advice.
const ADVISED_S: f64 = 300.0;
/// The relative difference that is accepted between two periods of the arena.
const ARENA_DRIFT: f64 = 0.005;
/// Failures that are shown in full.
const SHOWN: usize = 40;

#[derive(Clone, Debug, Parser)]
#[command(about = "The whole controller in virtual time")]
struct Cli {
    /// The number of scenarios.
    #[arg(long, default_value_t = 3000)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The number of days of traffic.
    #[arg(long, default_value_t = 90)]
    days: u32,
    /// Seeds of each comparison of the advice on limits with what they do; 0 for none.
    #[arg(long, default_value_t = 3)]
    advice: u64,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let mut failed = scenarios(&cli);
        if cli.advice > 0 {
            failed += advised(cli.advice);
        }
        if cli.days > 0 {
            failed += virtual_days(cli.from, cli.days);
        }
        figure("failed", count(failed), "runs");
        Ok(failed == 0)
    })
}

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure controller.{name} {value:.3} {unit}");
}

/// All seeds; how many failed.
fn scenarios(cli: &Cli) -> usize {
    let mut failures = Vec::new();
    let mut slowest = 0.0_f64;
    for seed in cli.from..cli.from + cli.seeds {
        let scenario = Scenario::of(seed);
        match claims::judge(&scenario) {
            Ok(seen) => {
                if scenario.kind == Kind::Change {
                    slowest = slowest.max(claims::settles(&scenario, &seen));
                }
            }
            Err(failure) => failures.push(failure),
        }
    }
    for failure in failures.iter().take(SHOWN) {
        eprintln!("{failure}");
    }
    for kind in Kind::ALL {
        let failed = failures.iter().filter(|one| one.scenario.kind == kind).count();
        figure(&format!("{}.failed", kind.name()), count(failed), "runs");
    }
    figure("runs", exact(cli.seeds), "runs");
    figure("change.settles_s", slowest, "s");
    failures.len()
}

/// Compares the advice on smaller limits with their effect. Returns the number of killed runs.
fn advised(seeds: u64) -> usize {
    let mut all = Vec::new();
    for mix in MIXES {
        for (load, of) in LOADS {
            for seed in 0..seeds {
                let Some(advised) = advice::compare(seed, mix, of, ADVISED_S) else { continue };
                println!("{} {load}, seed {seed}: {advised:?}", mix.name);
                all.push(advised);
            }
        }
    }
    let runs = count(all.len()).max(1.0);
    let figure = |name: &str, of: &dyn Fn(&Advised) -> f64| {
        let percent = 100.0 * all.iter().map(of).sum::<f64>() / runs;
        println!("figure questions.advice.{name}_percent {percent:.3} %");
    };
    figure("smallest.predicted", &|one| one.smallest.predicted);
    figure("smallest.real", &|one| one.smallest.real);
    figure("half.predicted", &|one| one.half.predicted);
    figure("half.real", &|one| one.half.real);
    all.iter().filter(|one| one.killed).count()
}

/// Runs days of the controller and of an arena. Returns 1 if they failed.
fn virtual_days(seed: u64, days: u32) -> usize {
    let month = days::run(seed, days, sim::load::DAY);
    figure("days.run", f64::from(month.days), "days");
    figure("days.ticks", exact(month.seen.ticks), "ticks");
    figure("days.jobs_per_hour", month.jobs_per_hour, "jobs");
    figure("days.k_drift", month.k_drift, "ratio");
    figure("days.allowance_drift", month.allowance_drift, "MiB");
    figure("days.physical_drift", month.physical_drift, "MiB");
    figure("days.claim_drift", month.claim_drift, "ratio");
    let mut faults = month.faults;
    match arena::run(seed, usize::try_from(days).unwrap_or(0)) {
        Ok(all) => faults.extend(arena_drift(&all)),
        Err(error) => faults.push(format!("the arena: {error}")),
    }
    for fault in &faults {
        eprintln!("{days} days, seed {seed}: {fault}");
    }
    figure("days.held", f64::from(if faults.is_empty() { days } else { 0 }), "days");
    usize::from(!faults.is_empty())
}

/// Compares the mean of each series in the arena's last period with that in its second: pools fill
/// in the first. Returns the differences; fewer than three periods are not compared.
fn arena_drift(days: &[arena::Day]) -> Vec<String> {
    let mut periods = days.chunks_exact(arena::PERIOD).skip(1);
    let (Some(first), Some(last)) = (periods.next(), periods.next_back()) else {
        return Vec::new();
    };
    let mut faults = Vec::new();
    for (name, of) in arena::Day::SERIES {
        let mean = |days: &[arena::Day]| days.iter().map(of).sum::<f64>() / count(days.len());
        let (first, last) = (mean(first), mean(last));
        let drift = last / first - 1.0;
        println!("{name}: {first:.3} at first, {last:.3} at last");
        figure(&format!("days.arena.{name}_drift"), drift, "ratio");
        if drift.abs() > ARENA_DRIFT {
            faults.push(format!("{name} drifts by {drift}"));
        }
    }
    faults
}

fn count(number: usize) -> f64 {
    exact(u64::try_from(number).unwrap_or(u64::MAX))
}
