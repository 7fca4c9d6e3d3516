//! The cost of the heap profiler that runs from the start: instructions of an allocation and its
//! release, by callgrind, and resident memory.
//!
//! `cargo bench -p lowtide-benches --features profiling --bench questions_profiler`. The program
//! runs itself with the profiler on and off in jemalloc's settings; it is the same build. It
//! replaces the blocks of a ring one after the other, since a single block would always be the same
//! address. Instructions are the difference of two runs, without start and end.
//!
//! The build itself costs more than one without the feature, at every setting; see
//! docs/OPERATING.md, "Taking a heap profile".
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that prints figures")]

#[path = "../callgrind.rs"]
mod callgrind;

use std::hint::black_box;
use std::process::Command;
use std::sync::Barrier;

use clap::{Args, Parser, Subcommand};
use lowtide::BoxError;
use lowtide::heap::{self, Profiler};
use procfs::process::Process;

lowtide::global_allocator!(balanced);

/// The interval of the image's build: 2^23 bytes are 8 MiB.
const INTERVAL: u32 = 23;
/// Keeps pages, whose release by time would disturb the count.
const QUIET: &str = "background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1";
const SIZES: [Size; 3] = [
    Size { name: "64B", bytes: 64, count: 40_000, ratio_max: 1.02 },
    Size { name: "4KiB", bytes: 4 << 10, count: 40_000, ratio_max: 1.05 },
    Size { name: "64KiB", bytes: 64 << 10, count: 10_000, ratio_max: 1.05 },
];
/// The goal of the added resident bytes.
const RESIDENT_MAX: i64 = 1 << 20;
/// The blocks of the ring.
const BLOCKS: usize = 64;
/// The threads and allocations of the run whose resident memory is read.
const THREADS: usize = 8;
const CHURN: u64 = 4_000;
/// The runs of which the median resident memory is taken.
const RUNS: usize = 15;

/// A size of blocks that is measured.
struct Size {
    name: &'static str,
    bytes: usize,
    /// The blocks of the shorter run.
    count: u64,
    /// The goal: instructions with the profiler over those without it.
    ratio_max: f64,
}

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
    /// The mean bytes between two samples, as a power of 2.
    #[arg(long, default_value_t = INTERVAL)]
    lg_interval: u32,
    /// As cargo calls it.
    #[arg(long, hide = true)]
    bench: bool,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Allocates and frees blocks.
    #[command(hide = true)]
    Ring(Ring),
    /// Allocates on some threads, and prints the resident bytes.
    #[command(hide = true)]
    Resident,
}

#[derive(Debug, Args)]
struct Ring {
    size: usize,
    count: u64,
}

fn main() -> Result<(), BoxError> {
    let cli = Cli::parse();
    if let Profiler::Active { .. } = heap::profiler() {
        heap::cache_unwind_rules()?; // as the start of a `Memory` does
    }
    match cli.part {
        Some(Part::Ring(Ring { size, count })) => ring(size, count),
        Some(Part::Resident) => println!("{}", resident()?),
        None => measure(cli.lg_interval)?,
    }
    Ok(())
}

fn ring(size: usize, count: u64) {
    let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| Vec::new()).collect();
    for (_, at) in (0..count).zip((0..BLOCKS).cycle()) {
        blocks[at] = Vec::with_capacity(black_box(size));
    }
    black_box(blocks);
}

/// Returns the resident bytes of this process while some threads, which have allocated, wait. Idle
/// pages are purged first, since a service's decay releases them within seconds.
fn resident() -> Result<u64, BoxError> {
    let done = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                ring(4 << 10, CHURN);
                ring(64 << 10, CHURN);
                done.wait();
                done.wait();
            });
        }
        done.wait();
        heap::purge_now()?;
        let rollup = Process::myself()?.smaps_rollup()?;
        let maps = rollup.memory_map_rollup.0;
        let resident = maps.iter().filter_map(|map| map.extension.map.get("Rss")).sum();
        done.wait();
        Ok(resident)
    })
}

/// Prints the figures. A missed goal is an error.
fn measure(lg_interval: u32) -> Result<(), BoxError> {
    let (off, active) = ("prof:false", format!("prof:true,lg_prof_sample:{lg_interval}"));
    let mut missed = Vec::new();
    for Size { name, bytes, count, ratio_max } in SIZES {
        let off = per_block(off, bytes, count)?;
        let active = per_block(&active, bytes, count)?;
        let ratio = active / off;
        println!("{name}: {off:.1} instructions, {active:.1} active");
        println!("figure questions.profiler.{name}.instructions_ratio {ratio:.3} ratio");
        if ratio > ratio_max {
            missed.push(format!("{name}: {ratio:.3}, expected at most {ratio_max}"));
        }
    }
    let added = median_resident(&active)? - median_resident(off)?;
    println!("figure questions.profiler.rss_bytes {added} bytes");
    if added > RESIDENT_MAX {
        missed.push(format!("{added} resident bytes, expected at most {RESIDENT_MAX}"));
    }
    if missed.is_empty() { Ok(()) } else { Err(missed.join("; ").into()) }
}

fn myself(conf: &str, mut command: Command) -> Command {
    command.env("_RJEM_MALLOC_CONF", format!("{QUIET},{conf}"));
    command
}

/// Returns the instructions for each block.
fn per_block(conf: &str, size: usize, count: u64) -> Result<f64, BoxError> {
    let program = std::env::current_exe()?;
    let run = |count: u64| {
        let mut command = myself(conf, callgrind::callgrind(&program));
        command.arg("ring").arg(size.to_string()).arg(count.to_string());
        callgrind::instructions(&mut command)
    };
    let more = f64::from(u32::try_from(count * 5)?);
    Ok((run(count * 6)? - run(count)?) / more)
}

fn median_resident(conf: &str) -> Result<i64, BoxError> {
    let mut found = Vec::with_capacity(RUNS);
    for _ in 0..RUNS {
        let mut command = Command::new(std::env::current_exe()?);
        command.env("_RJEM_MALLOC_CONF", conf);
        let output = command.arg("resident").output()?;
        found.push(String::from_utf8(output.stdout)?.trim().parse::<i64>()?);
    }
    found.sort_unstable();
    Ok(found[RUNS / 2])
}
