//! The admin command `fit`: random schedules without real memory, and a service in a real cgroup.
//!
//! `cargo bench -p lowtide-benches --bench fit`. In a run, a service under load in a cgroup of
//! 1 GiB is told to fit in 512 MiB, the limit is lowered as soon as it fits, and raised again. A
//! schedule does the same in virtual time with another process, load and limit each; see `sim`.
//!
//! Exit codes: 0 all goals held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
#[path = "../controller/sim/chance.rs"]
#[allow(dead_code, reason = "the simulator of the controller uses more of it")]
mod chance;
#[path = "../overload/charge.rs"]
#[allow(dead_code, reason = "the bench of overload reads more")]
mod charge;
#[path = "../overload/figures.rs"]
#[allow(dead_code, reason = "the bench of overload uses more of it")]
mod figures;
mod service;
#[allow(dead_code, reason = "the tests read more")]
mod sim;
mod stage;

use std::path::PathBuf;

use clap::{Parser, Subcommand};
use lowtide::BoxError;

use stage::Run;

lowtide::global_allocator!(balanced);

/// The longest time until the service fits.
const SECONDS_MAX: f64 = 5.0;

#[derive(Debug, Parser)]
#[command(about = "The admin command fit: schedules in virtual time, runs in a cgroup")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// The number of random schedules.
    #[arg(long, default_value_t = 100)]
    seeds: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The number of runs in a cgroup; 0 for none.
    #[arg(long, default_value_t = 5)]
    runs: u64,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Is the service.
    #[command(hide = true)]
    Serve {
        /// The entrance of its cgroup.
        entrance: PathBuf,
    },
}

fn main() -> Result<(), BoxError> {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench" || argument == "serve") {
        println!("fit: a bench of two minutes: run `cargo bench --bench fit`");
        return Ok(());
    }
    let cli = Cli::parse();
    if let Some(Part::Serve { entrance }) = cli.part {
        return service::serve(&entrance);
    }
    let schedules = schedules(&cli);
    let runs = runs(cli.runs)?;
    if schedules && runs { Ok(()) } else { Err("a goal was missed".into()) }
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
        show(nth, &run);
        seconds = seconds.max(run.seconds);
        kills += run.kills;
    }
    if count > 0 {
        println!("figure fleet.fit.seconds {seconds:.2} s");
        println!("figure fleet.fit.kills {kills} kills");
    }
    Ok(kills == 0 && seconds <= SECONDS_MAX)
}

fn show(nth: u64, run: &Run) {
    let Run { outcome, kills, before, usage, peak, follows, .. } = run;
    let [first, small, again] = run.served;
    println!("run {nth}: {outcome}");
    println!(
        "  {:.2} s, {kills} kills; usage {before}, {usage} when the limit was lowered, at most \
         {peak} below it; served {first:.0}, {small:.0}, {again:.0} requests/s; admission follows \
         the larger limit after {follows:.2} s",
        run.seconds
    );
}
