//! Overload: what keeps a service alive when more comes in than its memory can hold.
//!
//! The proxy of `examples/proxy` runs as a child process in a memory cgroup of its own, under
//! open-loop load from this process: requests come at seeded Poisson times whether or not the
//! last ones were answered, each holds its memory for seconds, and latency counts from the time at
//! which a request was to be sent. The same load meets each policy in turn. lowtide's service takes
//! the `LOWTIDE_*` variables that this process has.
//!
//! Exit codes: 0 done; 1 lowtide's service was killed, or a cell could not be run, or (`--ci`)
//! nothing died without admission; 2 no memory cgroup can be made here.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../examples/proxy/app.rs"]
#[allow(dead_code, reason = "the proxy itself uses more of it")]
mod app;
mod cell;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
mod load;
#[path = "../../examples/proxy/model.rs"]
#[allow(dead_code, reason = "the demonstration looks at its arena")]
mod model;
mod offer;
mod service;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use clap::Parser;
use common::figures::Figures;
use lowtide::{BoxError, ByteSize};

use crate::cell::{Cell, Runner};
use crate::offer::{Mix, Policy, Sending};

lowtide::global_allocator!(balanced);

/// A service in a small memory cgroup, under more load than it can hold.
#[derive(Clone, Debug, Parser)]
#[expect(clippy::struct_excessive_bools, reason = "arguments of a command")]
struct Cli {
    /// These policies: none, rss10, static80 (percent), envoy80 (percent), lowtide.
    #[arg(long, value_delimiter = ',', default_value = "none,rss10,lowtide")]
    policy: Vec<Policy>,
    /// Load, times what fits; several in turn.
    #[arg(long, value_delimiter = ',', default_value = "4")]
    load: Vec<f64>,
    /// Which sizes of bodies.
    #[arg(long, default_value = "heavy")]
    mix: Mix,
    /// The factor by which estimates are multiplied, to make them wrong; 0 gives none.
    #[arg(long, default_value_t = 1.0)]
    estimate: f64,
    /// Of arrivals, sizes and holds, the same for each policy; of what `--survive` draws.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// The time for which requests are offered: 10 s, with `--survive` and `--measured` 30 s.
    #[arg(long, value_parser = humantime::parse_duration)]
    lasts: Option<Duration>,
    /// The limit of the service's memory cgroup.
    #[arg(long, default_value = "256m")]
    limit: ByteSize,
    /// The time that each body takes to send; it holds what has arrived for as much longer.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    body: Duration,
    /// A request holds its body once, and not twice. Use it with `--estimate 0.5`.
    #[arg(long)]
    one_copy: bool,
    /// Envoy's program, for the policy envoy80.
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// So many runs of lowtide, drawn by the seed over loads, estimates and mixes.
    #[arg(long, value_name = "RUNS")]
    survive: Option<u32>,
    /// Sheds where the load fits, and goodput beside the best static budget: 20 minutes.
    #[arg(long)]
    measured: bool,
    /// 400 small requests at once, and the same with six at a time.
    #[arg(long)]
    burst: bool,
    /// Three short runs of lowtide and one without admission, which has to die: under 90 seconds.
    #[arg(long)]
    ci: bool,
    /// Be the service.
    #[arg(long, hide = true)]
    serve: Option<String>,
}

fn main() -> ExitCode {
    let has = |wanted: &str| std::env::args().any(|word| word == wanted);
    if has("--bench")
        && !has("--serve")
        && let Err(cause) = cell::check()
    {
        eprintln!("overload: needs a memory cgroup of its own (root, or a delegated one): {cause}");
        return ExitCode::from(2);
    }
    common::main(|cli: Cli| match &cli.serve {
        Some(settings) => service::serve(settings).map(|()| true),
        None => all(&cli),
    })
}

/// Runs what was asked for and prints what came of it. Returns `true` if lowtide's service
/// survived.
fn all(cli: &Cli) -> Result<bool, BoxError> {
    // A descriptor for each request under way, here and in the child.
    common::process::raise_descriptors()?;
    let usual = if cli.survive.is_some() || cli.measured { 30 } else { 10 };
    let base = Cell {
        policy: Policy::None,
        load: 0.0,
        mix: cli.mix,
        estimate: cli.estimate,
        limit_bytes: cli.limit.get(),
        lasts: cli.lasts.unwrap_or_else(|| Duration::from_secs(usual)),
        seed: cli.seed,
        sending: Sending { body: cli.body, ..Sending::default() },
        one_copy: cli.one_copy,
        envoy: cli.envoy.clone(),
        waits_in_proxy: false,
    };
    let mut runner = Runner { base, figures: Figures::default(), lost: 0 };
    let held = if cli.burst {
        cell::burst(&runner.base, &mut runner.figures)?
    } else if cli.ci {
        runner.ci()?
    } else if let Some(runs) = cli.survive {
        runner.survive(runs)?
    } else if cli.measured {
        runner.measured()?
    } else {
        runner.chosen(cli)?
    };
    Ok(runner.figures.print() && held && runner.lost == 0)
}
