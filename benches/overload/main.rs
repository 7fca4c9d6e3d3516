//! Overload: what keeps a service alive when more comes in than its memory can hold.
//!
//! The proxy of `examples/proxy` runs as a child process in a memory cgroup of its own, under
//! open-loop load from this process, which is outside that cgroup: requests come at seeded Poisson
//! times whether or not the last ones were answered, and latency counts from the time at which a
//! request was to be sent. The same load meets each policy in turn. It judges nothing but one
//! thing: whether the kernel killed the service under lowtide.
//!
//! Exit codes: 0 done; 1 lowtide's service was killed, or a run could not be made; 2 no memory
//! cgroup can be made here.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
mod charge;
mod corpus;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
mod load;
#[path = "../../examples/proxy/model.rs"]
mod model;
mod run;
mod service;
mod table;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::{BoxError, ByteSize};

use crate::corpus::Corpus;
use crate::run::{Outcome, Plan};
use crate::service::Policy;

#[global_allocator]
static HEAP: lowtide::host::Heap = lowtide::host::Heap;

lowtide::heap_profile!(balanced);

#[derive(Clone, Debug, Parser)]
#[command(about = "A service in a small memory cgroup, under more load than it can hold")]
struct Cli {
    /// One repetition of shorter runs, at the lowest and the highest rate: under 40 seconds.
    #[arg(long)]
    quick: bool,
    /// Requests a second that are offered, in turn.
    #[arg(long, value_delimiter = ',', default_values_t = [15, 60, 180])]
    rates: Vec<u32>,
    /// How often each pair of policy and rate is run.
    #[arg(long, default_value_t = 3)]
    repetitions: u32,
    /// How long requests are offered in one run.
    #[arg(long, default_value = "4s", value_parser = humantime::parse_duration)]
    lasts: Duration,
    /// The limit of the service's memory cgroup.
    #[arg(long, default_value = "256m")]
    limit: ByteSize,
    /// Seed of arrivals, sizes and texts; each repetition has its own, the same for each policy.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// Run only these policies.
    #[arg(long)]
    only: Vec<Policy>,
    /// Be the service, under this policy.
    #[arg(long, hide = true)]
    serve: Option<Policy>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

impl Cli {
    /// The runs in the order in which they are made: the policies take turns.
    fn plans(&self) -> Vec<Plan> {
        let policies = if self.only.is_empty() { Policy::ALL.to_vec() } else { self.only.clone() };
        let mut rates = self.rates.clone();
        if self.quick && rates.len() > 2 {
            rates.drain(1..rates.len() - 1);
        }
        let mut plans = Vec::new();
        for repetition in 0..if self.quick { 1 } else { self.repetitions.max(1) } {
            for &rate in &rates {
                plans.extend(policies.iter().map(|&policy| Plan {
                    policy,
                    rate,
                    lasts: if self.quick { self.lasts.min(QUICK) } else { self.lasts },
                    limit: self.limit,
                    seed: self.seed + u64::from(repetition),
                }));
            }
        }
        plans
    }
}

/// How long requests are offered in a quick run.
const QUICK: Duration = Duration::from_millis(2500);

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| argument == "--bench" || argument == "--serve") {
        println!("overload: a bench of minutes, not a test: run `cargo bench --bench overload`");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    if let Some(policy) = cli.serve {
        return match service::serve(policy) {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("overload, {}: {error}", policy.name());
                ExitCode::FAILURE
            }
        };
    }
    if let Err(cause) = run::check() {
        eprintln!("overload: needs a memory cgroup of its own (root, or a delegated one): {cause}");
        return ExitCode::from(2);
    }
    match all(&cli) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("overload: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Makes every run and prints what came of it; whether lowtide's service survived all of its runs.
fn all(cli: &Cli) -> Result<bool, BoxError> {
    let start = Instant::now();
    let corpus = Corpus::of_this_project()?;
    let plans = cli.plans();
    println!(
        "a proxy with its text service in a memory cgroup of {}, open-loop load; bodies {}; seed \
         {}; {} runs",
        cli.limit,
        load::mix(),
        cli.seed,
        plans.len()
    );
    let mut outcomes: Vec<(Plan, Outcome)> = Vec::new();
    for plan in plans {
        let outcome = run::run(&plan, &corpus)?;
        println!("{}", table::line(&plan, &outcome));
        outcomes.push((plan, outcome));
    }
    println!("\nmedians\n{}", table::table(&outcomes));
    print!("{}{}", table::figures(&outcomes), table::sender(&outcomes));
    println!("took {:.0} s", start.elapsed().as_secs_f64());
    let killed = |(plan, outcome): &(Plan, Outcome)| plan.policy == Policy::Lowtide && outcome.died;
    let survived = !outcomes.iter().any(killed);
    if !survived {
        println!("FAILED: the service under lowtide did not survive every run");
    }
    Ok(survived)
}
