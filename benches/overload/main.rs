//! Overload: what keeps a service alive when more comes in than its memory can hold.
//!
//! The proxy of `examples/proxy` runs as a child process in a memory cgroup of its own, under
//! open-loop load from another process: requests come at seeded Poisson times whether or not the
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
mod books;
mod burst;
mod cases;
mod cell;
#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
#[path = "../../examples/proxy/chance.rs"]
mod chance;
mod charge;
#[path = "../../examples/proxy/embed.rs"]
mod embed;
mod envoy;
#[path = "../envoy/mod.rs"]
mod envoy_process;
mod figures;
#[path = "../../examples/proxy/forward.rs"]
mod forward;
mod gates;
mod goals;
mod hold;
mod load;
mod measures;
mod mix;
#[path = "../../examples/proxy/model.rs"]
#[allow(dead_code, reason = "the demonstration looks at its arena")]
mod model;
mod modes;
mod oracle;
mod policy;
mod process;
mod runner;
mod schedule;
mod service;
mod table;
#[path = "../../examples/proxy/upstream.rs"]
mod upstream;
mod watch;

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::{BoxError, ByteSize};

use crate::figures::Figures;
use crate::mix::Mix;
use crate::policy::Policy;
use crate::runner::Runner;
use crate::schedule::Sending;

lowtide::global_allocator!(balanced);

#[derive(Clone, Debug, Parser)]
#[command(about = "A service in a small memory cgroup, under more load than it can hold")]
#[expect(clippy::struct_excessive_bools, reason = "arguments of a command")]
struct Cli {
    /// These policies alone: none, conc48 (a number), rss250, rss10, fresh, static (the best) or
    /// static80 (percent), envoy80 (percent), lowtide.
    #[arg(long, value_delimiter = ',')]
    policy: Vec<Policy>,
    /// Load, times what fits; several in turn. With `--policy`, 4 where it is not given.
    #[arg(long, value_delimiter = ',')]
    load: Vec<f64>,
    /// Which sizes of bodies.
    #[arg(long, value_delimiter = ',')]
    mix: Vec<Mix>,
    /// The factor by which estimates are multiplied, to make them wrong; 0 gives none.
    #[arg(long, value_delimiter = ',')]
    estimate: Vec<f64>,
    /// Of arrivals, sizes and holds, the same for each policy; of what `--survive` draws.
    #[arg(long, default_value_t = 7)]
    seed: u64,
    /// The time for which requests are offered: 8 s, in the grid 20 s, of drawn runs 30 s.
    #[arg(long, value_parser = humantime::parse_duration)]
    lasts: Option<Duration>,
    /// The limit of the service's memory cgroup.
    #[arg(long, default_value = "256m")]
    limit: ByteSize,
    /// The time that each body takes to send; it holds what has arrived for as much longer.
    #[arg(long, default_value = "0s", value_parser = humantime::parse_duration)]
    body: Duration,

    /// Bodies do not announce their length.
    #[arg(long)]
    chunked: bool,

    /// One small request in a hundred needs a hundred times its body.
    #[arg(long)]
    giants: bool,
    /// Open connections of the proxy at most; more wait to be accepted.
    #[arg(long, default_value_t = 1024)]
    connections: usize,
    /// A request holds its body once, and not twice. Use it with `--estimate 0.5`.
    #[arg(long)]
    one_copy: bool,
    /// Envoy's program, for the policy envoy80.
    #[arg(long, value_name = "FILE")]
    envoy: Option<PathBuf>,
    /// Every policy, load and mix: an hour and a half.
    #[arg(long)]
    grid: bool,
    /// So many runs of lowtide, drawn by the seed over loads, estimates and mixes.
    #[arg(long, value_name = "RUNS")]
    survive: Option<u32>,
    /// Sheds where the load fits, and goodput beside the best static budget: 20 minutes.
    #[arg(long)]
    measured: bool,
    /// The cases of lowtide's own alone: a fall of the load, and a device that binds.
    #[arg(long)]
    cases: bool,
    /// 400 small requests at once, and the same with six at a time; and a load of 1.2 times what
    /// fits for five seconds, with and without the queue.
    #[arg(long)]
    burst: bool,
    /// Three short runs of lowtide and one without admission, which has to die: under 90 seconds.
    #[arg(long)]
    ci: bool,
    /// Be the service.
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
        println!("overload: a bench of minutes, not a test: run `cargo bench --bench overload`");
        return ExitCode::SUCCESS;
    }
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        // Not clap's own exit code, which is 2 and means something else here.
        Err(error) => {
            let _ = error.print();
            return if error.use_stderr() { ExitCode::FAILURE } else { ExitCode::SUCCESS };
        }
    };
    let child = match (&cli.serve, &cli.generate) {
        (Some(settings), _) => Some(service::serve(settings)),
        (_, Some(order)) => Some(load::generate(order)),
        _ => None,
    };
    if let Some(ended) = child {
        return code(ended.map(|()| true));
    }
    if let Err(cause) = cell::check() {
        eprintln!("overload: needs a memory cgroup of its own (root, or a delegated one): {cause}");
        return ExitCode::from(2);
    }
    code(all(&cli))
}

fn code(ended: Result<bool, BoxError>) -> ExitCode {
    match ended {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("overload: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what was asked for and prints what came of it; whether lowtide's service survived.
fn all(cli: &Cli) -> Result<bool, BoxError> {
    let start = Instant::now();
    let usual = match (cli.grid, cli.survive, cli.ci) {
        (true, _, _) => 20,
        (_, Some(_), _) => 30,
        _ if cli.measured => 30,
        (_, _, true) => 10,
        _ => 8,
    };
    let mut runner = Runner {
        limit: cli.limit,
        lasts: cli.lasts.unwrap_or_else(|| Duration::from_secs(usual)),
        seed: cli.seed,
        connections: cli.connections,
        sending: Sending {
            body_millis: schedule::millis(cli.body),
            is_chunked: cli.chunked,
            copies: 0,
            has_giants: cli.giants,
        },
        one_copy: cli.one_copy,
        envoy: cli.envoy.clone(),
        figures: Figures::default(),
        bases: Vec::new(),
        lost: Vec::new(),
    };
    if cli.burst {
        let held = burst::run(cli.limit.get(), &mut runner.figures)?;
        cases::burst(&mut runner)?;
        print!("{}", runner.figures.text());
        return Ok(held && runner.lost.is_empty());
    }
    println!(
        "the proxy and a service that holds bodies, in a memory cgroup of {}; open-loop load for \
         {} s a cell, seed {}",
        cli.limit,
        runner.lasts.as_secs_f64(),
        cli.seed
    );
    let mixes = if cli.mix.is_empty() { Mix::ALL.to_vec() } else { cli.mix.clone() };
    for mix in mixes {
        println!("{}", mix::explained(mix, cli.limit));
    }
    println!("\n{}", table::heading());
    let given = [cli.policy.len(), cli.load.len(), cli.mix.len(), cli.estimate.len()];
    let chosen = given.iter().any(|&count| count > 0);
    let held = if cli.ci {
        modes::ci(&mut runner)?
    } else if let Some(runs) = cli.survive {
        modes::survive(&mut runner, runs)?
    } else if cli.measured {
        modes::measured(&mut runner)?
    } else if cli.cases {
        cases::all(&mut runner).map(|()| true)?
    } else if cli.grid {
        modes::grid(&mut runner)?
    } else if chosen {
        modes::chosen(&mut runner, cli)?
    } else {
        modes::short(&mut runner)?
    };
    println!("\n{}\n\n{}", table::legend(&runner.bases), goals::told(&runner.figures));
    print!("{}", runner.figures.text());
    println!("took {:.0} s", start.elapsed().as_secs_f64());
    if !runner.lost.is_empty() {
        println!("FAILED: the service under lowtide did not survive {}", runner.lost.join(", "));
    }
    Ok(held && runner.lost.is_empty())
}
