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
#[path = "../../crates/gpu/tests/gpu/schedules/harness/mod.rs"]
#[allow(dead_code, reason = "the tests use more of it")]
mod harness;

use std::process::ExitCode;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use clap::Parser;
use common::figures::{Figures, count};
use lowtide::clock::{Clock as _, SystemClock};

use crate::harness::Schedule;

/// Failures of a thread that are shown in full.
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

/// What is counted, in the order of the figures.
const COUNTS: [(&str, &str); 8] = [
    ("run", "schedules"),
    ("failed", "schedules"),
    ("acts", "acts"),
    ("sleeps", "sleeps"),
    ("moves", "moves"),
    ("refused", "bookings"),
    ("driver_calls", "calls"),
    ("unsafe_unmaps", "unmaps"),
];

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let (next, clock) = (AtomicU64::new(0), SystemClock::new());
        let start = clock.now();
        let mut totals = [0; COUNTS.len()];
        thread::scope(|scope| {
            let running: Vec<_> = (0..cli.threads.max(1))
                .map(|_| scope.spawn(|| run(&next, cli.from, cli.count)))
                .collect();
            for found in running.into_iter().map(|one| one.join().expect("no thread panics")) {
                totals.iter_mut().zip(found).for_each(|(total, more)| *total += more);
            }
        });
        let seconds = (clock.now() - start).as_secs_f64();
        println!("{} schedules in {seconds:.1} s", totals[0]);
        let mut figures = Figures::default();
        for ((name, unit), total) in COUNTS.into_iter().zip(totals) {
            figures.add(format!("schedules.{name}"), count(total), unit);
        }
        figures.set_goals(&[("schedules.failed", 0.0)]);
        Ok(figures.print())
    })
}

/// Runs schedules until all have been taken, and returns the counts.
fn run(next: &AtomicU64, from: u64, count: u64) -> [u64; COUNTS.len()] {
    let mut totals = [0; COUNTS.len()];
    loop {
        let nth = next.fetch_add(1, Ordering::Relaxed);
        if nth >= count {
            return totals;
        }
        let found = match Schedule::of(from + nth).run() {
            Ok(done) => [
                1,
                0,
                done.acts,
                done.sleeps,
                done.moves,
                done.refused,
                done.driver_calls,
                done.unsafe_unmaps,
            ],
            Err(failure) => {
                if totals[1] < SHOWN {
                    let seed = failure.schedule.seed;
                    eprintln!("{failure}");
                    eprintln!("again: cargo bench --bench schedules -- --from {seed} --count 1");
                }
                [1, 1, 0, 0, 0, 0, 0, failure.unsafe_unmaps]
            }
        };
        totals.iter_mut().zip(found).for_each(|(total, more)| *total += more);
    }
}
