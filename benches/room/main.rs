//! Room on demand: requests that wait for room, and models that are evicted, in virtual time; and
//! services that leak, in real time.
//!
//! `schedules` runs random schedules of requests that wait. `zipf` evicts models under requests by
//! Zipf's law and compares the hits with those of other policies. `leak` exhausts services by
//! leaks, under two policies. Without a part, all run. A schedule or a case that fails is shown
//! with its seed and can be run again alone.
//!
//! Exit codes: 0 every goal held; 1 one was missed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

mod evictions;
mod leak;
mod schedules;
mod zipf;

use std::process::ExitCode;

use clap::{Args, Parser, Subcommand};

lowtide::global_allocator!(balanced);

/// Failures that are shown.
const SHOWN: u64 = 20;

#[derive(Debug, Parser)]
#[command(about = "Requests that wait for room, evictions, and services that leak")]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// Cargo says this when benches are asked for.
    #[arg(long, hide = true, global = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Random schedules of requests that wait for room.
    Schedules(Schedules),
    /// Evictions of models under requests by Zipf's law, compared with other policies.
    Zipf(evictions::Arguments),
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
    if !std::env::args().any(|argument| argument == "--bench") {
        println!("room: a bench of seven minutes: run `cargo bench --bench room`");
        return ExitCode::SUCCESS;
    }
    let parts = match Cli::parse().part {
        Some(part) => vec![part],
        None => vec![
            Part::Schedules(Schedules { count: 100_000, from: 0 }),
            Part::Zipf(evictions::Arguments::default()),
            Part::Leak { serve: false },
        ],
    };
    let mut holds = true;
    for part in &parts {
        holds &= match part {
            Part::Schedules(schedules) => run_schedules(schedules),
            Part::Zipf(arguments) => evictions::measure(arguments),
            Part::Leak { serve } => run_leak(*serve),
        };
    }
    if holds { ExitCode::SUCCESS } else { ExitCode::FAILURE }
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
    let (mut failed, mut waited, mut rejected) = (0, 0, 0);
    for seed in *from..from.saturating_add(*count) {
        match schedules::run(seed) {
            Ok(seen) => {
                waited += seen.waited;
                rejected += seen.rejected;
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
    failed == 0
}
