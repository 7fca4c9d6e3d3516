//! The controller in virtual time, with many seeds; `crates/admission/tests/admission/simulated.rs`
//! runs a few.
//!
//! Scenarios, each from a seed; days of traffic; and the advice on smaller limits compared with their
//! effect. A run that fails is shown with its seed, and `--from SEED --seeds 1` runs it again.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../../crates/admission/tests/admission/sim/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod sim;

use std::process::ExitCode;

use clap::Parser;
use common::figures::{Figures, count};

use crate::sim::days::{Advised, LOADS};
use crate::sim::scenario::{DAY, MIXES, Scenario};
use crate::sim::{claims, days};

/// Seconds of traffic that are recorded for an advice.
const ADVISED_S: f64 = 300.0;

/// The whole controller in virtual time.
#[derive(Clone, Debug, Parser)]
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
        let mut failed = scenarios(&cli);
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
fn scenarios(cli: &Cli) -> u64 {
    let mut failed = 0;
    for seed in cli.from..cli.from + cli.seeds {
        if let Err(failure) = claims::judge(&Scenario::of(seed)) {
            failed += 1;
            eprintln!("{failure}");
        }
    }
    failed
}

/// Compares the advice on smaller limits with their effect. Returns the number of killed runs.
fn advised(seeds: u64, figures: &mut Figures) -> u64 {
    let (mut killed, mut all) = (0, Vec::new());
    for mix in MIXES {
        for (load, of) in LOADS {
            for seed in 0..seeds {
                let Some(advised) = days::compare(seed, mix, of, ADVISED_S) else { continue };
                println!("{} {load}, seed {seed}: {advised:?}", mix.name);
                let Advised { smallest, half, .. } = advised;
                all.push([smallest.predicted, smallest.real, half.predicted, half.real]);
                killed += u64::from(advised.killed);
            }
        }
    }
    let names = ["smallest.predicted", "smallest.real", "half.predicted", "half.real"];
    for (at, name) in names.into_iter().enumerate() {
        let mean = all.iter().map(|one| one[at]).sum::<f64>() / count(all.len().max(1) as u64);
        figures.add(format!("questions.advice.{name}_percent"), 100.0 * mean, "%");
    }
    killed
}

/// Runs days of the controller. Returns 1 if they failed.
fn virtual_days(seed: u64, days: u32, figures: &mut Figures) -> u64 {
    let month = days::run(seed, days, DAY);
    let mut add = |name: &str, value, unit| {
        figures.add(format!("controller.days.{name}"), value, unit);
    };
    add("allowance_drift", month.allowance_drift, "MiB");
    add("physical_drift", month.physical_drift, "MiB");
    let faults = month.faults;
    for fault in &faults {
        eprintln!("{days} days, seed {seed}: {fault}");
    }
    add("held", f64::from(if faults.is_empty() { days } else { 0 }), "days");
    u64::from(!faults.is_empty())
}
