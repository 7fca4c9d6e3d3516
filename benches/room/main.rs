//! Room on demand: requests that wait for room, models that are evicted, a cache that shrinks,
//! services that leak, and clients that hold memory or connections and make no progress.
//!
//! `schedules` runs random schedules of requests that wait. `zipf` evicts models under requests by
//! Zipf's law and compares the hits with those of other policies. Both are in virtual time. `cache`
//! loads a service whose cache fills the limit, and `leak` exhausts services by leaks, under two
//! policies. Without a part, these run. A schedule or a case that fails is shown with its seed and
//! can be run again alone. `hostage` and `h2` attack a real service.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod cache;
#[path = "../../examples/tide/cgroup.rs"]
#[allow(dead_code, reason = "the tide enters its cgroup itself")]
mod cgroup;
mod evictions;
mod hostage;
mod leak;
#[path = "../proxy/mod.rs"]
mod proxy;
mod schedules;
mod zipf;

use std::net::SocketAddr;
use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};
use lowtide::BoxError;

lowtide::global_allocator!(balanced);

/// Failures that are shown.
const SHOWN: u64 = 20;

#[derive(Debug, Parser)]
#[command(about = "Requests that wait for room, evictions, caches, leaks and hostile clients")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true, global = true)]
    bench: bool,
    /// The program has started itself again with more descriptors.
    #[arg(long, hide = true, global = true)]
    raised: bool,
    /// Be the service that is attacked, at this address.
    #[arg(long, hide = true)]
    serve: Option<SocketAddr>,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Random schedules of requests that wait for room.
    Schedules(Schedules),
    /// Evictions of models under requests by Zipf's law, compared with other policies.
    Zipf(evictions::Arguments),
    /// Clients that hold memory or connections of a real service hostage: two minutes.
    Hostage(hostage::Arguments),
    /// 10,000 connections of HTTP/2 to a service of 256 MiB.
    H2,
    /// A cache of 80 % of the limit under load.
    Cache(cache::Arguments),
    /// Services that a leak exhausts, under the policies `exit` and `serve-one`.
    Leak {
        /// This process is the service.
        #[arg(long, hide = true)]
        serve: bool,
    },
}

#[derive(Debug, Args)]
struct Schedules {
    /// The number of schedules.
    #[arg(long, default_value_t = 100_000)]
    count: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
}

fn main() -> ExitCode {
    // Cargo's tests start benches too, without that word and with arguments of their own.
    if !std::env::args().any(|argument| ["--bench", "--serve"].contains(&argument.as_str())) {
        println!("room: a bench of seven minutes: run `cargo bench --bench room`");
        return ExitCode::SUCCESS;
    }
    match run(Cli::parse()) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            eprintln!("room: {error}");
            ExitCode::FAILURE
        }
    }
}

/// Runs what was asked for. Returns `true` if every goal held.
fn run(cli: Cli) -> Result<bool, BoxError> {
    if let Some(at) = cli.serve {
        return hostage::service::serve(at).map(|()| true);
    }
    let parts = match cli.part {
        Some(part) => vec![part],
        None => vec![
            Part::Schedules(Schedules { count: 100_000, from: 0 }),
            Part::Zipf(evictions::Arguments::default()),
            Part::Cache(cache::Arguments::default()),
            Part::Leak { serve: false },
        ],
    };
    let mut holds = true;
    for part in &parts {
        if matches!(part, Part::Hostage(_) | Part::H2) && !cli.raised {
            hostage::with_descriptors()?;
        }
        holds &= match part {
            Part::Schedules(schedules) => run_schedules(schedules),
            Part::Zipf(arguments) => evictions::measure(arguments),
            Part::Hostage(arguments) => hostage::measure(arguments)?,
            Part::H2 => hostage::measure_connections()?,
            Part::Cache(arguments) => cache::measure(arguments),
            Part::Leak { serve } => run_leak(*serve),
        };
    }
    Ok(holds)
}

/// Runs the services that leak, or one of them. Returns `true` if every goal held.
fn run_leak(serve: bool) -> bool {
    let done = if serve { leak::serve().map(|()| true) } else { leak::measure() };
    done.unwrap_or_else(|error| {
        eprintln!("error: {error}");
        false
    })
}

/// Runs schedules and prints their figures. Returns `true` if none failed.
fn run_schedules(Schedules { count, from }: &Schedules) -> bool {
    let (mut failed, mut waited, mut rejected, mut resumed) = (0, 0, 0, 0);
    for seed in *from..from.saturating_add(*count) {
        match schedules::run(seed) {
            Ok(seen) => {
                waited += seen.waited;
                rejected += seen.rejected;
                resumed += seen.resumed;
            }
            Err(fault) => {
                failed += 1;
                if failed <= SHOWN {
                    eprintln!("seed {seed}: {fault:?}");
                    eprintln!(
                        "again: cargo bench --bench room -- schedules --from {seed} --count 1"
                    );
                }
            }
        }
    }
    println!("seeds {from} to {}", from.saturating_add(*count));
    println!("figure room.schedules.run {count} schedules");
    println!("figure room.schedules.failed {failed} schedules");
    println!("figure room.schedules.waited {waited} requests");
    println!("figure room.schedules.rejected {rejected} requests");
    println!("figure room.schedules.resumed {resumed} requests");
    failed == 0
}
