//! Room on demand: requests that wait for room, models that are evicted, a cache that shrinks,
//! services that leak, and clients that hold memory or connections and make no progress.
//!
//! `schedules` runs random schedules of requests that wait. `zipf` evicts models under requests by
//! Zipf's law and compares the hits with those of other policies. Both are in virtual time. `cache`
//! loads a service whose cache fills the limit, and `leak` exhausts services by leaks, under two
//! policies. A schedule that fails is shown with its seed and can be run again alone. `hostage` and
//! `h2` attack a real service.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod attacked;
mod attacks;
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

use clap::{Parser, Subcommand};
use lowtide::BoxError;

use crate::common::figures::{Figures, count};

lowtide::global_allocator!(balanced);

#[derive(Debug, Parser)]
#[command(about = "Requests that wait for room, evictions, caches, leaks and hostile clients")]
struct Cli {
    #[command(subcommand)]
    part: Part,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Random schedules of requests that wait for room.
    Schedules {
        /// The number of schedules.
        #[arg(long, default_value_t = 100_000)]
        count: u64,
        /// The first seed.
        #[arg(long, default_value_t = 0)]
        from: u64,
    },
    /// Evictions of models under requests by Zipf's law, compared with other policies.
    Zipf,
    /// Clients that hold memory or connections of a real service hostage: two minutes.
    Hostage,
    /// 10,000 connections of HTTP/2 to a service of 256 MiB.
    H2,
    /// A cache of 80 % of the limit under load.
    Cache,
    /// Services that a leak exhausts, under the policies `exit` and `serve-one`.
    Leak,
    /// Is the service that is attacked, at this address.
    #[command(hide = true)]
    ServeAttacked { at: SocketAddr },
    /// Is the service with a cache.
    #[command(hide = true)]
    ServeCache {
        #[arg(long)]
        registered: bool,
    },
    /// Is the service that leaks.
    #[command(hide = true)]
    ServeLeaking,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| run(&cli.part))
}

/// Runs a part. Returns `true` if every goal held.
fn run(part: &Part) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    match part {
        Part::Schedules { count, from } => schedules(*count, *from, &mut figures),
        Part::Zipf => evictions::measure(&mut figures),
        Part::Hostage => hostage::measure(&mut figures)?,
        Part::H2 => hostage::measure_connections(&mut figures)?,
        Part::Cache => cache::measure(&mut figures)?,
        Part::Leak => leak::measure(&mut figures)?,
        Part::ServeAttacked { at } => attacked::serve(*at)?,
        Part::ServeCache { registered } => cache::serve(*registered)?,
        Part::ServeLeaking => leak::serve()?,
    }
    Ok(figures.print())
}

/// Runs schedules and adds their figures.
fn schedules(run: u64, from: u64, figures: &mut Figures) {
    let mut failed = 0;
    for seed in from..from.saturating_add(run) {
        if let Err(fault) = schedules::run(seed) {
            failed += 1;
            eprintln!("seed {seed}: {fault}");
        }
    }
    figures.add("room.schedules.run", count(run), "schedules");
    figures.at_most("room.schedules.failed", count(failed), "schedules", 0.0);
}
