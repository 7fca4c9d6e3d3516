//! Room on demand: requests that wait for room, models that are evicted, a cache that shrinks,
//! services that leak, and clients that hold memory or connections and make no progress.
//!
//! `schedules` runs random schedules of requests that wait. `zipf` evicts models under requests by
//! Zipf's law and compares the hits with those of other policies. Both are in virtual time. `cache`
//! loads a service whose cache fills the limit, and `leak` exhausts services by leaks, under two
//! policies. A schedule or a case that fails is shown with its seed and can be run again alone.
//! `hostage` and `h2` attack a real service.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod cache;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
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
    part: Part,
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
    Leak,
    /// Is the service that is attacked, at this address.
    #[command(hide = true)]
    ServeAttacked { at: SocketAddr },
    /// Is the service that leaks.
    #[command(hide = true)]
    ServeLeaking,
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
    common::main(|cli: Cli| run(&cli.part))
}

/// Runs a part. Returns `true` if every goal held.
fn run(part: &Part) -> Result<bool, BoxError> {
    match part {
        Part::Schedules(schedules) => Ok(run_schedules(schedules)),
        Part::Zipf(arguments) => Ok(evictions::measure(arguments)),
        Part::Hostage(arguments) => hostage::measure(arguments),
        Part::H2 => hostage::measure_connections(),
        Part::Cache(arguments) => cache::measure(arguments),
        Part::Leak => leak::measure(),
        Part::ServeAttacked { at } => hostage::service::serve(*at).map(|()| true),
        Part::ServeLeaking => leak::serve().map(|()| true),
    }
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
