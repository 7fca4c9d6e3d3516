//! Many random schedules of an arena with streams; `crates/gpu/tests/gpu/schedules` runs a few.
//!
//! It counts how many ran, and how long they took. Two threads run schedules, a seed each; a
//! schedule that fails is shown with its seed, order and workers, and can be run again alone.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../../crates/gpu/tests/gpu/schedules/harness/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod harness;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use clap::Parser;
use common::chance; // for the harness
use common::figures::{Figures, count};
use lowtide::clock::{Clock as _, SystemClock};

use crate::harness::Schedule;

/// Failures that are shown in full.
const SHOWN: u64 = 5;

/// Random schedules of an arena beside streams, over the simulation.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// The number of schedules.
    #[arg(long, default_value_t = 20_000)]
    count: u64,
    /// The first seed.
    #[arg(long, default_value_t = 0)]
    from: u64,
    /// The number of schedules that run at a time.
    #[arg(long, default_value_t = 2)]
    threads: usize,
}

/// What is counted.
#[derive(Default)]
struct Counts {
    begun: AtomicU64,
    failed: AtomicU64,
    unsafe_unmaps: AtomicU64,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let (counts, clock) = (Counts::default(), SystemClock::new());
        let start = clock.now();
        thread::scope(|scope| {
            for _ in 0..cli.threads {
                scope.spawn(|| run(&cli, &counts));
            }
        });
        let seconds = (clock.now() - start).as_secs_f64();
        println!("{} schedules in {seconds:.1} s", cli.count);
        let mut figures = Figures::default();
        figures.add("schedules.run", count(cli.count), "schedules");
        let failed = count(counts.failed.into_inner());
        figures.at_most("schedules.failed", failed, "schedules", 0.0);
        let unmaps = count(counts.unsafe_unmaps.into_inner());
        figures.add("schedules.unsafe_unmaps", unmaps, "unmaps");
        Ok(figures.print())
    })
}

/// Runs schedules until all have been taken.
fn run(cli: &Cli, counts: &Counts) {
    loop {
        let nth = counts.begun.fetch_add(1, Ordering::Relaxed);
        if nth >= cli.count {
            return;
        }
        let unmaps = match Schedule::of(cli.from + nth).run() {
            Ok(done) => done.unsafe_unmaps,
            Err(failure) => {
                if counts.failed.fetch_add(1, Ordering::Relaxed) < SHOWN {
                    let seed = failure.schedule.seed;
                    eprintln!("{failure}");
                    eprintln!("again: cargo bench --bench schedules -- --from {seed} --count 1");
                }
                failure.unsafe_unmaps
            }
        };
        counts.unsafe_unmaps.fetch_add(unmaps, Ordering::Relaxed);
    }
}
