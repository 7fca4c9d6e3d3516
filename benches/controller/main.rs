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

use crate::common::figures::{Figures, count as exact};
use crate::sim::advice::{self, Advised, LOADS};
use crate::sim::claims;
use crate::sim::days;
use crate::sim::load::MIXES;
use crate::sim::scenario::Scenario;

/// Seconds of traffic that are recorded for an advice.
const ADVISED_S: f64 = 300.0;
/// The relative difference that is accepted between two periods of the arena.
const ARENA_DRIFT: f64 = 0.005;

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
        let mut figures = Figures::default();
        let mut failed = scenarios(&cli, &mut figures);
        if cli.advice > 0 {
            failed += advised(cli.advice, &mut figures);
        }
        if cli.days > 0 {
            failed += virtual_days(cli.from, cli.days, &mut figures);
        }
        figures.at_most("controller.failed", count(failed), "runs", 0.0);
        Ok(figures.print())
    })
}

/// All seeds; how many failed.
fn scenarios(cli: &Cli, figures: &mut Figures) -> usize {
    let mut failed = 0;
    for seed in cli.from..cli.from + cli.seeds {
        if let Err(failure) = claims::judge(&Scenario::of(seed)) {
            failed += 1;
            eprintln!("{failure}");
        }
    }
    figures.add("controller.runs", exact(cli.seeds), "runs");
    failed
}

/// Compares the advice on smaller limits with their effect. Returns the number of killed runs.
fn advised(seeds: u64, figures: &mut Figures) -> usize {
    let mut killed = 0;
    let mut sums = [0.0; 5];
    for mix in MIXES {
        for (load, of) in LOADS {
            for seed in 0..seeds {
                let Some(advised) = advice::compare(seed, mix, of, ADVISED_S) else { continue };
                println!("{} {load}, seed {seed}: {advised:?}", mix.name);
                let Advised { smallest, half, .. } = advised;
                let more = [smallest.predicted, smallest.real, half.predicted, half.real, 1.0];
                sums.iter_mut().zip(more).for_each(|(sum, more)| *sum += more);
                killed += usize::from(advised.killed);
            }
        }
    }
    for (name, sum) in
        ["smallest.predicted", "smallest.real", "half.predicted", "half.real"].into_iter().zip(sums)
    {
        figures.add(
            format!("questions.advice.{name}_percent"),
            100.0 * sum / sums[4].max(1.0),
            "%",
        );
    }
    killed
}

/// Runs days of the controller and of an arena. Returns 1 if they failed.
fn virtual_days(seed: u64, days: u32, figures: &mut Figures) -> usize {
    let month = days::run(seed, days, sim::load::DAY);
    let mut add = |name: &str, value, unit| {
        figures.add(format!("controller.days.{name}"), value, unit);
    };
    add("allowance_drift", month.allowance_drift, "MiB");
    add("physical_drift", month.physical_drift, "MiB");
    let mut faults = month.faults;
    match arena::run(seed, usize::try_from(days).unwrap_or(0)) {
        Ok(all) => {
            for (name, drift) in arena::drifts(&all) {
                if drift.abs() > ARENA_DRIFT {
                    faults.push(format!("{name} drifts by {drift}"));
                }
            }
        }
        Err(error) => faults.push(format!("the arena: {error}")),
    }
    for fault in &faults {
        eprintln!("{days} days, seed {seed}: {fault}");
    }
    add("held", f64::from(if faults.is_empty() { days } else { 0 }), "days");
    usize::from(!faults.is_empty())
}

fn count(number: usize) -> f64 {
    exact(number as u64)
}
