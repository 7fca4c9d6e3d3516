//! The admin command `fit`: random schedules without real memory, and a service in a real cgroup.
//!
//! `cargo bench -p lowtide-benches --bench fit`. In a run, a service under load in a cgroup of 1
//! GiB gets the command to fit in 512 MiB, the limit is lowered as soon as it fits, and raised
//! again. A schedule does the same in virtual time with another process, load and limit each; see
//! `controller/sim/fit.rs`.
//!
//! Exit codes: 0 all goals held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod service;
#[path = "../controller/sim/mod.rs"]
#[allow(dead_code, reason = "the bench `controller` uses more of it")]
mod sim;
mod stage;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

use crate::common::figures::{Figures, count};

lowtide::global_allocator!(balanced);

/// The longest time until the service fits.
const SECONDS_MAX: f64 = 5.0;

#[derive(Debug, Parser)]
#[command(about = "The admin command fit: schedules in virtual time, runs in a cgroup")]
struct Cli {
    /// The number of random schedules.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The number of runs in a cgroup; 0 for none.
    #[arg(long, default_value_t = 5)]
    runs: u64,
    /// Is the service.
    #[arg(long, hide = true)]
    serve: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        if cli.serve {
            return service::serve().map(|()| true);
        }
        let mut figures = Figures::default();
        let schedules = schedules(&cli, &mut figures);
        runs(cli.runs, &mut figures)?;
        Ok(figures.print() && schedules)
    })
}

/// Runs the schedules. Returns `true` if no claim failed.
fn schedules(cli: &Cli, figures: &mut Figures) -> bool {
    let (mut possible, mut refused, mut failed) = (0, 0, 0);
    for seed in cli.from..cli.from + cli.seeds {
        match sim::fit::run(seed) {
            Ok(seen) => {
                possible += u64::from(seen.possible);
                if seen.possible && seen.seconds.is_none() {
                    refused += 1;
                    println!("seed {seed}: {seen:?}");
                }
            }
            Err(fault) => {
                failed += 1;
                println!("seed {seed}: {fault}");
            }
        }
    }
    println!("of {} schedules, {possible} are possible", cli.seeds);
    figures.at_most("fleet.fit.refused_although_possible", count(refused), "schedules", 0.0);
    failed == 0
}

/// Runs the service, and adds its figures.
fn runs(runs: u64, figures: &mut Figures) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (mut seconds, mut kills) = (0.0_f64, 0);
    for nth in 0..runs {
        let (of_run, killed) = runtime.block_on(stage::run(nth))?;
        seconds = seconds.max(of_run);
        kills += killed;
    }
    if runs > 0 {
        figures.at_most("fleet.fit.seconds", seconds, "s", SECONDS_MAX);
        figures.at_most("fleet.fit.kills", count(kills), "kills", 0.0);
    }
    Ok(())
}
