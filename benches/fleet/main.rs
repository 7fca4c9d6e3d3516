//! A fleet: three services of 128, 256 and 512 MiB behind a real Envoy, which distributes requests
//! by the load that the services report, and by its other policies.
//!
//! Envoy has the configuration of `deploy/envoy`, with the addresses of this machine and the policy
//! that is measured. The load is open-loop and memory-bound: each request holds its memory for
//! seconds. Together the services can hold it, but the small one cannot hold a third of it. Each
//! policy meets the same requests, in pairs of runs that alternate. What is offered in the first 20
//! s does not count: until Envoy's blackout period is over, all services have the same weight, and
//! lowtide learns the needs of requests.
//!
//! Exit codes: 0 done; 1 a service was killed, a run failed, or (`--ci`) ORCA left too many
//! requests unserved.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
mod balancer;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../envoy/mod.rs"]
mod envoy;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
#[path = "../overload/hold.rs"]
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
mod run;
#[path = "../overload/schedule.rs"]
mod schedule;
mod service;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use lowtide::BoxError;

use crate::balancer::POLICIES;
use crate::common::figures::{Figures, part};
use crate::run::Run;

lowtide::global_allocator!(balanced);

/// How often each policy is measured, each time with another seed.
const PAIRS: u32 = 3;

#[derive(Clone, Debug, Parser)]
#[command(about = "Three services with different memory limits behind Envoy")]
struct Cli {
    /// Envoy's program.
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// One short pair: ORCA has to leave less than half as many requests unserved as round robin.
    #[arg(long)]
    ci: bool,
    /// Be a service.
    #[arg(long, hide = true)]
    serve: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| if cli.serve { service::serve() } else { measure(&cli) })
}

/// Measures all pairs, and prints the figures. Returns `true` if no service was killed and, with
/// `--ci`, ORCA left fewer requests unserved.
fn measure(cli: &Cli) -> Result<bool, BoxError> {
    common::process::raise_descriptors()?;
    let envoy = cli.envoy.clone().ok_or("no --envoy: expected Envoy's program")?;
    // The time that does not count is more than Envoy's blackout period.
    let (pairs, warm, lasts) = if cli.ci { (1, 10, 12) } else { (PAIRS, 20, 30) };
    let mut figures = Figures::default();
    let mut all_held = true;
    for pair in 0..pairs {
        let run = Run {
            envoy: envoy.clone(),
            seed: 7 + u64::from(pair),
            warm: Duration::from_secs(warm),
            lasts: Duration::from_secs(lasts),
            is_quick: cli.ci,
        };
        let mut policies = POLICIES.map(|(name, _)| name).to_vec();
        policies.truncate(if cli.ci { 2 } else { 3 });
        // What changes on the machine meanwhile falls on all of them.
        if pair % 2 == 1 {
            policies.reverse();
        }
        let mut outcomes = BTreeMap::new();
        for policy in policies {
            let (outcome, is_killed) = run.measure(policy, &mut figures)?;
            println!("seed {} {policy}: {outcome:.1?}", run.seed);
            all_held &= !is_killed;
            outcomes.insert(policy, outcome);
        }
        let base = outcomes["round_robin"];
        for (policy, one) in outcomes.iter().filter(|(policy, _)| **policy != "round_robin") {
            for (name, at) in [("goodput_ratio", 0), ("shed_ratio", 1)] {
                figures.add(format!("fleet.{policy}.{name}"), part(one[at], base[at]), "ratio");
            }
        }
        if 2.0 * outcomes["orca"][2] >= base[2] {
            println!("load reports did not halve the requests that are not served");
            all_held &= !cli.ci;
        }
    }
    figures.print();
    Ok(all_held)
}
