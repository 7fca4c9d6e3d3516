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
use std::{iter, thread};

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
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        let (begun, failed, clock) = (AtomicU64::new(0), AtomicU64::new(0), SystemClock::new());
        let start = clock.now();
        // Runs schedules until all have been taken.
        let run = || {
            let next = || begun.fetch_add(1, Ordering::Relaxed);
            for nth in iter::repeat_with(next).take_while(|nth| *nth < cli.count) {
                let Err(failure) = Schedule::of(cli.from + nth).run() else { continue };
                if failed.fetch_add(1, Ordering::Relaxed) < SHOWN {
                    let seed = failure.schedule.seed;
                    eprintln!("{failure}");
                    eprintln!("again: cargo bench --bench schedules -- --from {seed} --count 1");
                }
            }
        };
        thread::scope(|scope| (0..2).for_each(|_| drop(scope.spawn(run))));
        let seconds = (clock.now() - start).as_secs_f64();
        println!("{} schedules in {seconds:.1} s", cli.count);
        let mut figures = Figures::default();
        figures.add("schedules.run", count(cli.count), "schedules");
        figures.at_most("schedules.failed", count(failed.into_inner()), "schedules", 0.0);
        Ok(figures.print())
    })
}
