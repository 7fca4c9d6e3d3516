//! The controller in virtual time, with many seeds; `crates/admission/tests/admission/simulated.rs`
//! runs a few.
//!
//! Scenarios, each from a seed; days of the controller and of a device arena; goodput compared with
//! the best fixed budget, and the advice on smaller limits compared with their effect. A run that
//! fails is shown with its seed and can be run again alone.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod arena;
#[allow(dead_code, reason = "the tests use more of it")]
mod sim;

use std::process::ExitCode;

use clap::Parser;

use crate::sim::advice::{self, Advised, LOADS};
use crate::sim::claims::{self, Failure};
use crate::sim::load::{CLASSES, MIXES};
use crate::sim::scenario::{Kind, Scenario};
use crate::sim::seen::Seen;
use crate::sim::{best, days};

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
    /// Only this seed, with what it learned each half second.
    #[arg(long)]
    seed: Option<u64>,
    /// Requests are not measured: the correction factor alone corrects their estimates.
    #[arg(long)]
    unmeasured: bool,
    /// The number of days of traffic.
    #[arg(long, default_value_t = 90)]
    days: u32,
    /// Seeds of each comparison with a fixed budget; 0 for none.
    #[arg(long, default_value_t = 3)]
    compare: u64,
    /// Seeds of each comparison of the advice on limits with what they do; 0 for none.
    #[arg(long, default_value_t = 3)]
    advice: u64,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("controller: a bench of a minute: run `cargo bench --bench controller`");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    if let Some(seed) = cli.seed {
        return one(Scenario { measured: !cli.unmeasured, ..Scenario::of(seed) });
    }
    let mut failed = scenarios(&cli);
    if cli.compare > 0 {
        failed += compared(cli.compare);
    }
    if cli.advice > 0 {
        failed += advised(cli.advice);
    }
    if cli.days > 0 {
        failed += virtual_days(cli.from, cli.days);
    }
    figure("failed", count(failed), "runs");
    if failed == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

fn figure(name: &str, value: f64, unit: &str) {
    println!("figure controller.{name} {value:.3} {unit}");
}

/// One seed, in full.
fn one(scenario: Scenario) -> ExitCode {
    let seen = claims::run(&scenario, lowtide_admission::Settings::default(), None);
    for look in seen.looks.iter().step_by(10) {
        println!(
            "{:>6.2} s  K {:.3}  booked {:>6.1}  allowance {:>7.1}\
            \u{20} physical {:>6.1}  required {:>6.1}",
            look.second, look.k, look.reserved, look.allowance, look.physical, look.required
        );
    }
    println!("levels {:?}", seen.levels);
    println!("purges {:?}, sheds by reason {:?}", seen.purges, seen.reasons);
    let faults = claims::faults(&scenario, &seen);
    println!("{}", Failure { scenario, faults: faults.clone() });
    if faults.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// All seeds; how many failed.
fn scenarios(cli: &Cli) -> usize {
    let mut failures = Vec::new();
    let mut all: Vec<(Scenario, Seen)> = Vec::new();
    let mut slowest = 0.0_f64;
    for seed in cli.from..cli.from + cli.seeds {
        let scenario = Scenario { measured: !cli.unmeasured, ..Scenario::of(seed) };
        match claims::judge(&scenario) {
            Ok(mut seen) => {
                if scenario.kind == Kind::Change {
                    slowest = slowest.max(claims::settles(&scenario, &seen));
                }
                seen.looks.clear();
                all.push((scenario, seen));
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
    figure("runs", count(all.len() + failures.len()), "runs");
    summary(&all);
    figure("change.settles_s", slowest, "s");
    failures.len()
}

/// The worst of the runs that held.
fn summary(all: &[(Scenario, Seen)]) {
    let of = |kind: Kind| all.iter().filter(move |(scenario, _)| scenario.kind == kind);
    let worst =
        |kind: Kind, value: fn(&(Scenario, Seen)) -> f64| of(kind).map(value).fold(0.0, f64::max);
    let peak = all.iter().map(|(_, seen)| seen.peak).fold(0.0, f64::max);
    figure("peak", 100.0 * peak, "%");
    let changes = worst(Kind::Overload, |(one, seen)| seen.changes_per_second(2.0, one.lasts));
    figure("overload.level_changes_per_s", changes, "1/s");
    let rejected = |(_, seen): &(Scenario, Seen)| seen.shed_mib() / seen.offered_mib().max(1e-9);
    let learned = |(_, seen): &(Scenario, Seen)| seen.learned.shed_ratio();
    figure("fits.shed_bytes_ratio", worst(Kind::Fits, learned), "ratio");
    figure("fits.with_start.shed_bytes_ratio", worst(Kind::Fits, rejected), "ratio");
    let after = |(one, seen): &(Scenario, Seen)| {
        let fell = match one.load {
            sim::load::Load::Step { at, .. } => at,
            _ => 0.0,
        };
        seen.last_shed.map_or(0.0, |at| (at - fell).max(0.0) * 1e3)
    };
    figure("fall.last_shed_ms", worst(Kind::Fall, after), "ms");
}

/// Beside the best fixed budgets; how many of ours died.
fn compared(seeds: u64) -> usize {
    let mut failed = 0;
    for mix in MIXES {
        for factor in [0.5, 1.0, 2.0] {
            let found = best::compare(seeds, mix, factor);
            let name = format!("4x.{}.truth{factor}", mix.name);
            figure(&format!("{name}.goodput_mib_s"), found.ours, "MiB/s");
            figure(&format!("{name}.best_fixed_mib_s"), found.best, "MiB/s");
            figure(&format!("{name}.best_fixed_budget"), 100.0 * found.budget, "%");
            figure(&format!("{name}.goodput_ratio"), found.ours / found.best, "ratio");
            figure(&format!("{name}.level_changes_per_s"), found.changes, "1/s");
            for (class, share) in CLASSES.iter().zip(found.shares) {
                figure(&format!("{name}.share.{class}"), share, "ratio");
            }
            failed += usize::from(found.killed);
        }
    }
    failed
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

#[expect(clippy::cast_precision_loss, reason = "counts of one run are far below 2^52")]
fn exact(number: u64) -> f64 {
    number as f64
}
