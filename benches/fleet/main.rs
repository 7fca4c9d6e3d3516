//! A fleet: three services of 128, 256 and 512 MiB behind a real Envoy, which distributes requests
//! by the load that the services report, and by its other policies.
//!
//! Envoy has the configuration of `deploy/envoy`, with the addresses of this machine and the policy
//! that is measured. The load is open-loop and memory-bound: each request holds its memory for
//! seconds. Together the services can hold it, but the small one cannot hold a third of it. Each
//! policy meets the same requests, in pairs of runs that alternate. What is offered before the end
//! of `--warm` does not count: until Envoy's blackout period is over, all services have the same
//! weight, and lowtide learns the needs of requests.
//!
//! Exit codes: 0 done; 1 a service was killed, a run failed, or (`--ci`) ORCA left too many
//! requests unserved.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
mod balancer;
#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
#[path = "../overload/charge.rs"]
#[allow(dead_code, reason = "the bench `overload` watches a cgroup")]
mod charge;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../envoy/mod.rs"]
mod envoy;
#[path = "../overload/figures.rs"]
#[allow(dead_code, reason = "the bench `overload` reads its figures")]
mod figures;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
#[path = "../overload/hold.rs"]
#[allow(dead_code, reason = "the bench `overload` has an arena")]
mod hold;
#[path = "../overload/load.rs"]
#[allow(dead_code, reason = "the bench `overload` reads more of a request")]
mod load;
#[path = "../overload/mix.rs"]
#[allow(dead_code, reason = "the bench `overload` computes what fits one service")]
mod mix;
#[path = "../../examples/proxy/model.rs"]
#[allow(dead_code, reason = "the demonstration looks at its arena")]
mod model;
#[path = "../overload/process.rs"]
mod process;
mod run;
#[path = "../overload/schedule.rs"]
mod schedule;
mod service;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lowtide::{BoxError, ByteSize};

use crate::balancer::Policy;
use crate::figures::{Figures, count, part};
use crate::mix::Mix;
use crate::run::{Outcome, Run};

lowtide::global_allocator!(balanced);

#[derive(Clone, Debug, Parser)]
#[command(about = "Three services with different memory limits behind Envoy")]
#[expect(clippy::struct_excessive_bools, reason = "arguments of a command")]
struct Cli {
    /// Envoy's program.
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// The policies of each pair: orca, round-robin, least-request.
    #[arg(long, value_delimiter = ',', default_value = "round-robin,orca,least-request")]
    policy: Vec<Policy>,
    /// How often each policy is measured, each time with another seed.
    #[arg(long, default_value_t = 3)]
    pairs: u32,
    /// Of arrivals, sizes and holds.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// The memory that requests hold on average, in parts of what the three services can hold.
    #[arg(long, default_value_t = 0.95)]
    load: f64,
    /// Which sizes of bodies.
    #[arg(long, default_value = "small")]
    mix: Mix,
    /// Further copies of its body that each request holds, besides two.
    #[arg(long, default_value_t = 2)]
    copies: u32,
    /// Memory that each service holds from its start, such as a cache or a small model.
    #[arg(long, default_value = "32m")]
    resident: ByteSize,
    /// The time that is offered load and does not count: more than Envoy's blackout period.
    #[arg(long, default_value = "20s", value_parser = humantime::parse_duration)]
    warm: Duration,
    /// The time that counts.
    #[arg(long, default_value = "30s", value_parser = humantime::parse_duration)]
    lasts: Duration,
    /// Envoy retries rejected requests once, as in `deploy/envoy`.
    #[arg(long)]
    retries: bool,
    /// Shows the weights of the services each second.
    #[arg(long)]
    weights: bool,
    /// One short pair: ORCA has to leave less than half as many requests unserved as round robin.
    #[arg(long)]
    ci: bool,
    /// Be a service.
    #[arg(long, hide = true)]
    serve: Option<String>,
    /// Be the load process.
    #[arg(long, hide = true)]
    generate: Option<String>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true)]
    bench: bool,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    let ours = ["--bench", "--serve", "--generate"];
    if !std::env::args().any(|argument| ours.contains(&argument.as_str())) {
        println!("fleet: a bench of minutes, not a test: run `cargo bench --bench fleet`");
        return ExitCode::SUCCESS;
    }
    let cli = Cli::parse();
    let ended = match (&cli.serve, &cli.generate) {
        (Some(settings), _) => service::serve(settings).map(|()| true),
        (_, Some(order)) => load::generate(order).map(|()| true),
        _ => measure(cli),
    };
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("fleet: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Measures all pairs, and prints the figures. Returns `true` if no service was killed and, with
/// `--ci`, ORCA left fewer requests unserved.
fn measure(mut cli: Cli) -> Result<bool, BoxError> {
    let program = cli.envoy.clone().ok_or("no --envoy: expected Envoy's program")?;
    if cli.ci {
        cli.policy = vec![Policy::RoundRobin, Policy::Orca];
        (cli.pairs, cli.warm, cli.lasts) = (1, Duration::from_secs(10), Duration::from_secs(12));
    }
    let mut figures = Figures::default();
    let mut all_held = true;
    for pair in 0..cli.pairs {
        let run = Run {
            envoy: program.clone(),
            seed: cli.seed + u64::from(pair),
            load: cli.load,
            mix: cli.mix,
            copies: cli.copies,
            resident: cli.resident,
            warm: cli.warm,
            lasts: cli.lasts,
            has_retries: cli.retries,
            is_quick: cli.ci,
            shows_weights: cli.weights,
        };
        if pair == 0 {
            println!("{}", run.explained());
        }
        let mut outcomes = Vec::new();
        let mut policies = cli.policy.clone();
        // What changes on the machine meanwhile falls on all of them.
        if pair % 2 == 1 {
            policies.reverse();
        }
        for policy in policies {
            let outcome = run.measure(policy)?;
            println!("seed {} {}", run.seed, outcome.line(policy));
            all_held &= outcome.oom_kills == 0;
            outcome.add(policy, &mut figures);
            outcomes.push((policy, outcome));
        }
        let is_better = compare(&outcomes, &mut figures);
        all_held &= is_better || !cli.ci;
    }
    print!("{}", figures.text());
    Ok(all_held)
}

/// Adds the ratios to round robin. Returns `true` if ORCA was measured and left less than half as
/// many requests unserved.
fn compare(outcomes: &[(Policy, Outcome)], figures: &mut Figures) -> bool {
    let of = |wanted| outcomes.iter().find(|(policy, _)| *policy == wanted).map(|(_, one)| one);
    let Some(base) = of(Policy::RoundRobin) else { return false };
    for policy in [Policy::Orca, Policy::LeastRequest] {
        let Some(one) = of(policy) else { continue };
        let goodput = part(one.goodput_mib, base.goodput_mib);
        figures.add(&format!("fleet.{}.goodput_ratio", policy.name()), goodput, "ratio");
        let shed = part(count(one.shed), count(base.shed));
        figures.add(&format!("fleet.{}.shed_ratio", policy.name()), shed, "ratio");
    }
    let is_better = of(Policy::Orca).is_some_and(|orca| 2 * orca.unserved() < base.unserved());
    if !is_better {
        println!("load reports did not halve the requests that are not served");
    }
    is_better
}
