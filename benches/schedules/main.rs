//! Many random schedules of an arena with streams; `crates/gpu/tests/gpu/schedules` runs a few.
//!
//! It counts how many ran, and how long they took. Two threads run schedules, a seed each; a
//! schedule that fails is shown with its seed, order and workers, and can be run again alone.
//!
//! Exit codes: 0 all held; 1 one failed.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]

#[path = "../index/chance.rs"]
#[allow(dead_code, reason = "others use more of it")]
mod chance;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
#[path = "../../crates/gpu/tests/gpu/schedules/harness/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod harness;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use clap::Parser;
use lowtide::clock::{Clock as _, SystemClock};

use crate::harness::Schedule;

/// Failures that are shown in full.
const SHOWN: u64 = 5;

#[derive(Clone, Debug, Parser)]
#[command(about = "Random schedules of an arena beside streams, over the simulation")]
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

#[derive(Debug, Default)]
struct Totals {
    next: AtomicU64,
    run: AtomicU64,
    failed: AtomicU64,
    acts: AtomicU64,
    sleeps: AtomicU64,
    moves: AtomicU64,
    refused: AtomicU64,
    driver_calls: AtomicU64,
    unsafe_unmaps: AtomicU64,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let (totals, clock) = (Totals::default(), SystemClock::new());
        let start = clock.now();
        thread::scope(|scope| {
            for _ in 0..cli.threads.max(1) {
                scope.spawn(|| run(&totals, cli.from, cli.count));
            }
        });
        let seconds = (clock.now() - start).as_secs_f64();
        println!("{} schedules in {seconds:.1} s", totals.run.load(Ordering::Relaxed));
        let figure = |name: &str, of: &AtomicU64, unit: &str| {
            println!("figure schedules.{name} {} {unit}", of.load(Ordering::Relaxed));
        };
        figure("run", &totals.run, "schedules");
        figure("failed", &totals.failed, "schedules");
        figure("acts", &totals.acts, "acts");
        figure("sleeps", &totals.sleeps, "sleeps");
        figure("moves", &totals.moves, "moves");
        figure("refused", &totals.refused, "bookings");
        figure("driver_calls", &totals.driver_calls, "calls");
        figure("unsafe_unmaps", &totals.unsafe_unmaps, "unmaps");
        Ok(totals.failed.load(Ordering::Relaxed) == 0)
    })
}

/// Runs schedules until all have been taken.
fn run(totals: &Totals, from: u64, count: u64) {
    loop {
        let nth = totals.next.fetch_add(1, Ordering::Relaxed);
        if nth >= count {
            return;
        }
        let add = |to: &AtomicU64, more: u64| to.fetch_add(more, Ordering::Relaxed);
        let outcome = Schedule::of(from + nth).run();
        add(&totals.run, 1);
        match outcome {
            Ok(done) => {
                add(&totals.acts, done.acts);
                add(&totals.sleeps, done.sleeps);
                add(&totals.moves, done.moves);
                add(&totals.refused, done.refused);
                add(&totals.driver_calls, done.driver_calls);
                add(&totals.unsafe_unmaps, done.unsafe_unmaps);
            }
            Err(failure) => {
                add(&totals.unsafe_unmaps, failure.unsafe_unmaps);
                if add(&totals.failed, 1) < SHOWN {
                    let seed = failure.schedule.seed;
                    eprintln!("{failure}");
                    eprintln!("again: cargo bench --bench schedules -- --from {seed} --count 1");
                }
            }
        }
    }
}
