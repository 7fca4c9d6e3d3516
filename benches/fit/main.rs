//! The admin command `fit`: random schedules without real memory, and a service in a real cgroup.
//!
//! `cargo bench -p lowtide-benches --bench fit`. In a run, a service under load in a cgroup of 1
//! GiB gets the command to fit in 512 MiB, the limit is lowered as soon as it fits, and raised
//! again. A schedule does the same in virtual time with another process, load and limit each; see
//! `sim`.
//!
//! Exit codes: 0 all goals held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../controller/sim/chance.rs"]
#[allow(dead_code, reason = "the simulator of the controller uses more of it")]
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod service;
#[allow(dead_code, reason = "the tests read more")]
mod sim;
mod stage;

use std::process::ExitCode;

use clap::Parser;
use lowtide::BoxError;

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
        let schedules = schedules(&cli);
        Ok(runs(cli.runs)? && schedules)
    })
}

/// Runs the schedules. Returns `true` if all held.
fn schedules(cli: &Cli) -> bool {
    let (mut possible, mut refused, mut other) = (0, 0, 0);
    for seed in cli.from..cli.from + cli.seeds {
        match sim::run(seed) {
            Ok(seen) => possible += u64::from(seen.possible),
            Err(fault) => {
                let is_refused = matches!(fault, sim::Fault::Refused(_));
                *(if is_refused { &mut refused } else { &mut other }) += 1;
                println!("seed {seed}: {fault:?}");
            }
        }
    }
    println!("of {} schedules, {} are possible", cli.seeds, possible + refused);
    println!("figure fleet.fit.refused_although_possible {refused} of {}", cli.seeds);
    refused + other == 0
}

/// Runs the service. Returns `true` if it always fitted in time and was never killed.
fn runs(count: u64) -> Result<bool, BoxError> {
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    let (mut seconds, mut kills) = (0.0_f64, 0);
    for nth in 0..count {
        let run = runtime.block_on(stage::run(nth))?;
        let stage::Run { outcome, before, usage, peak, served, follows, .. } = &run;
        println!(
            "run {nth}: {outcome}\n  usage {before}, {usage} when the limit was lowered, at most \
             {peak} below it; served {served:.0?} requests/s; admission follows the larger limit \
             after {follows:.2} s"
        );
        seconds = seconds.max(run.seconds);
        kills += run.kills;
    }
    if count > 0 {
        println!("figure fleet.fit.seconds {seconds:.2} s");
        println!("figure fleet.fit.kills {kills} kills");
    }
    Ok(kills == 0 && seconds <= SECONDS_MAX)
}
