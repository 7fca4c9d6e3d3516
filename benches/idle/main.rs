//! Idle: what the crate costs a service that does nothing.
//!
//! Child processes of this program stand idle side by side: without a `Memory`, with one that has
//! its default settings, and with one that wants no jemalloc threads. From outside they are read
//! for CPU time by thread, threads by name and resident memory, so that reading costs them
//! nothing. The time that starting takes is measured in processes of their own.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

mod child;
#[path = "../common/mod.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod common;
mod look;
mod report;

use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use lowtide::BoxError;

use crate::child::Kind;
use crate::common::process::Process;
use crate::look::Look;
use crate::report::Standing;

lowtide::global_allocator!(balanced);

/// Processes of each kind that stand idle.
const OF_EACH: usize = 3;
/// After the start, before CPU time is counted: what starting left to do is done then.
const SETTLE: Duration = Duration::from_secs(2);
/// Processes that are started for the time it takes.
const STARTS: usize = 30;

#[derive(Clone, Copy, Debug, Parser)]
#[command(about = "What the crate costs a service that does nothing")]
struct Cli {
    /// Watch for 6 seconds in place of 32.
    #[arg(long)]
    quick: bool,
    /// Be an idle process of this kind.
    #[arg(long, hide = true)]
    be: Option<Kind>,
    /// Start, say how long that took, and end.
    #[arg(long, hide = true)]
    start: bool,
    /// Judges the number of threads alone.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match cli.be {
        Some(kind) => child::be(kind, cli.start).map(|()| true),
        None => measure(cli.quick, cli.counted),
    })
}

/// Measures everything and prints it; whether every goal held.
fn measure(quick: bool, counted: bool) -> Result<bool, BoxError> {
    let watched = Duration::from_secs(if quick { 6 } else { 32 });
    let mut starts = Vec::new();
    for kind in [Kind::Managed, Kind::NoThreads] {
        let times: Result<Vec<f64>, BoxError> =
            (0..STARTS).map(|_| child::start_millis(kind)).collect();
        starts.push((kind, times?));
    }
    let mut idlers = Vec::new();
    for _ in 0..OF_EACH {
        for kind in Kind::ALL {
            idlers.push((kind, child::spawn(kind)?));
        }
    }
    println!(
        "{OF_EACH} idle processes of each kind, watched for {} s; {STARTS} starts of each\n",
        watched.as_secs()
    );
    std::thread::sleep(SETTLE);
    let before = looks(&idlers)?;
    let start = Instant::now();
    std::thread::sleep(watched);
    let after = looks(&idlers)?;
    let seconds = start.elapsed().as_secs_f64();
    let standings: Vec<Standing> = idlers
        .iter()
        .zip(before.into_iter().zip(after))
        .map(|((kind, _), (before, after))| Standing::between(*kind, &before, after, seconds))
        .collect();
    Ok(report::print(&standings, &starts, counted))
}

fn looks(idlers: &[(Kind, Process)]) -> Result<Vec<Look>, BoxError> {
    idlers.iter().map(|(_, idler)| Look::at(idler.child.id())).collect()
}
