//! A service under a memory limit of 256 MiB, in three setups: jemalloc with short decay times, the
//! same with a limit on concurrent requests, and lowtide.
//!
//! `cargo run --release --example comparison` runs each setup in its own process under the same
//! load: 12 clients that send JSON of 5 MiB, and 20 clients that send JSON of 2 KiB. It prints a
//! table and the bounds that must hold. It exits with 1 if a bound does not hold. It takes about a
//! minute.
//!
//! The concurrency limit of 8 is tuned to this load: all 12 large requests at once exceed the
//! memory limit. It counts requests, so small ones wait behind large ones. If large and small
//! requests have routes of their own, a limit for each route avoids that.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "proxy/chance.rs"]
mod chance;
#[path = "comparison/load.rs"]
mod load;
#[path = "../benches/common/process.rs"]
#[allow(dead_code, unreachable_pub, reason = "benches use more of it")]
mod process;
#[path = "comparison/report.rs"]
mod report;
#[path = "tide/load.rs"]
#[allow(dead_code, reason = "the demonstration sends texts")]
mod requests;
#[path = "comparison/run.rs"]
mod run;
#[path = "comparison/service.rs"]
mod service;

use std::time::Duration;

use clap::{Parser, ValueEnum as _};
use lowtide::{BoxError, ByteSize};

use crate::service::Setup;

#[global_allocator]
static HEAP: lowtide::heap::Heap = lowtide::heap::Heap;

/// The memory limit of the service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// The size of a large body, and the number of clients that send them.
const BIG: ByteSize = ByteSize::mib(5);
const BIG_CLIENTS: usize = 12;
/// The same for small bodies.
const SMALL: ByteSize = ByteSize::kib(2);
const SMALL_CLIENTS: usize = 20;

/// Compare jemalloc, a concurrency limit and lowtide under the same memory limit and load.
#[derive(Debug, Parser)]
struct Cli {
    /// Send requests to each setup for this many seconds, from 2 to 600.
    #[arg(long, value_name = "N", default_value_t = 12)]
    #[arg(value_parser = clap::value_parser!(u64).range(2..=600))]
    seconds: u64,
    /// Run the service in this setup.
    #[arg(long, hide = true)]
    serve: Option<Setup>,
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    match cli.serve {
        Some(setup) => service::serve(setup),
        None => compare(Duration::from_secs(cli.seconds)),
    }
}

/// Runs each setup and prints the results. Fails if a bound does not hold.
fn compare(lasts: Duration) -> Result<(), BoxError> {
    println!(
        "a service that parses JSON under a limit of {LIMIT}; for {} s {BIG_CLIENTS} clients\n\
         send bodies of {BIG} and {SMALL_CLIENTS} send bodies of {SMALL}",
        lasts.as_secs()
    );
    match process::group(LIMIT) {
        Ok(_) => println!("a memory cgroup enforces the limit\n"),
        Err(cause) => println!(
            "no memory cgroup ({cause}):\nthis program kills a service whose anonymous memory \
             exceeds the limit\n"
        ),
    }
    println!("{}", report::HEADING);
    let mut outcomes = Vec::new();
    for setup in Setup::value_variants() {
        let outcome = run::run(*setup, lasts)?;
        println!("{}", report::row(*setup, &outcome));
        outcomes.push((*setup, outcome));
    }
    println!("\n{}", report::LEGEND);
    if outcomes.iter().all(|(_, outcome)| outcome.killed_after.is_none()) {
        println!("This load does not exceed the limit on this machine: nothing was killed.");
    }
    requests::must_hold(&report::bounds(&outcomes))
}
