//! Idle: what the crate costs a service that does nothing.
//!
//! Child processes of this program stand idle side by side: without a `Memory`, and with one that has
//! its default settings. From outside they are read for CPU time by thread, threads by name and
//! resident memory, so that reading costs them nothing. The time that starting takes is measured in
//! processes of their own.
//!
//! Invariant: what a managed process has and a bare one has not is a started `Memory` with an arena
//! and a resource, and nothing else.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::io::Read as _;
use std::process::ExitCode;
use std::time::{Duration, Instant};

use clap::Parser;
use common::figures::{Figures, count, median};
use common::own;
use common::process::{Process, kernel_value, threads};
use lowtide::memory::Builder;
use lowtide::{BoxError, Memory};

lowtide::global_allocator!(balanced);

/// The kinds of processes: a recorder of metrics and no `Memory`; one with its default settings.
const KINDS: [&str; 2] = ["bare", "managed"];
/// Processes of each kind that stand idle.
const OF_EACH: usize = 3;
/// After the start, before CPU time is counted: what starting left to do is done then.
const SETTLE: Duration = Duration::from_secs(2);
/// Processes that are started for the time it takes.
const STARTS: usize = 30;
/// Goals, in the units of their figures.
const CPU_MAX_PERCENT: f64 = 0.05;
const THREADS: f64 = 2.0;
const RESIDENT_MAX_MIB: f64 = 2.0;
const START_MAX_MS: f64 = 10.0;

/// What the crate costs a service that does nothing.
#[derive(Clone, Debug, Parser)]
struct Cli {
    /// Be an idle process of this kind.
    #[arg(long, hide = true)]
    be: Option<String>,
    /// Start, say how long that took, and end.
    #[arg(long, hide = true)]
    start: bool,
    /// Judges the number of threads alone, and watches for 6 seconds in place of 32.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match &cli.be {
        Some(kind) => be(kind, cli.start).map(|()| true),
        None => measure(cli.counted),
    })
}

/// Is such a process until standard input ends, or with `start_only` until it has started.
fn be(kind: &str, start_only: bool) -> Result<(), BoxError> {
    let managed = Memory::builder().prometheus()?; // each kind has a recorder
    let builder = (kind == "managed").then_some(managed);
    let before = Instant::now();
    let memory = builder.map(Builder::start);
    let took = before.elapsed();
    let memory = memory.transpose()?;
    let _held = match &memory {
        Some(memory) => {
            let arena = memory.devices().open_arena("idle")?;
            let resource = memory.managed("idle", || Ok(vec![0_u8; 1024])).register()?;
            Some((arena, resource))
        }
        None => None,
    };
    println!("{}", took.as_secs_f64() * 1e3);
    if !start_only {
        std::io::stdin().read_to_end(&mut Vec::new())?;
    }
    Ok(())
}

/// Starts a process. Returns it with the time that `Memory::start` took, in milliseconds.
fn start(kind: &str, only: Option<&str>) -> Result<(Process, f64), BoxError> {
    let mut command = own()?;
    command.args(["--be", kind]).args(only);
    let mut process = Process::start(command)?;
    let millis = process.first_line()?;
    Ok((process, millis))
}

/// Looks at a process: its CPU time in seconds, the number of our threads, and its resident memory,
/// and of that what is its own, in MiB.
fn look(process: &Process) -> Result<[f64; 4], BoxError> {
    let id = process.child.id();
    let threads = threads(id)?;
    let nanos = threads.iter().map(|thread| thread.1).sum();
    let ours = threads.iter().filter(|thread| thread.0.starts_with("lowtide-")).count();
    // Read last: it walks the process's pages.
    let mib =
        |key| kernel_value(format!("/proc/{id}/smaps_rollup"), key).map(|kib| count(kib) / 1024.0);
    let private = mib("Private_Dirty:")? + mib("Private_Clean:")?;
    Ok([count(nanos) / 1e9, count(ours as u64), mib("Rss:")?, private])
}

/// Measures everything and prints it; whether every goal held. Each figure is the median over the
/// processes of a kind, or the difference of two medians.
fn measure(counted: bool) -> Result<bool, BoxError> {
    let watched = Duration::from_secs(if counted { 6 } else { 32 });
    let mut figures = Figures::new(counted);
    let mut idlers = Vec::new();
    for _ in 0..OF_EACH {
        for kind in KINDS {
            idlers.push((kind, start(kind, None)?.0));
        }
    }
    std::thread::sleep(SETTLE);
    let looks = || idlers.iter().map(|(_, one)| look(one)).collect::<Result<Vec<_>, _>>();
    let (before, begun) = (looks()?, Instant::now());
    std::thread::sleep(watched);
    let (mut after, seconds) = (looks()?, begun.elapsed().as_secs_f64());
    for (after, before) in after.iter_mut().zip(before) {
        after[0] = (after[0] - before[0]) / seconds * 100.0;
    }
    let of = |kind: &str, at: usize| {
        let of_kind = idlers.iter().zip(&after).filter(|((of, _), _)| *of == kind);
        median(&of_kind.map(|(_, look)| look[at]).collect::<Vec<_>>())
    };
    let over_bare = |at| of("managed", at) - of("bare", at);
    let starts = (0..STARTS).map(|_| Ok(start("managed", Some("--start"))?.1));
    let starts = starts.collect::<Result<Vec<_>, BoxError>>()?;
    let slowest = starts.iter().copied().fold(0.0, f64::max);
    figures.at_most("idle_managed_threads", of("managed", 1), "threads", THREADS);
    figures.add("idle_managed_private", over_bare(3), "MiB");
    figures.add("idle_managed_start_p50", median(&starts), "ms");
    figures.timed("idle_managed_cpu", over_bare(0), "%", CPU_MAX_PERCENT);
    figures.timed("idle_managed_resident", over_bare(2), "MiB", RESIDENT_MAX_MIB);
    figures.timed("idle_managed_start_max", slowest, "ms", START_MAX_MS);
    Ok(figures.print())
}
