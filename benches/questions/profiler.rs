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

use std::hint::black_box;
use std::process::ExitCode;
use std::sync::Barrier;

use clap::{Parser, Subcommand};
use common::callgrind;
use common::figures::{Figures, median};
use lowtide::BoxError;
use lowtide::heap::{self, Profiler};
use procfs::process::Process;

lowtide::global_allocator!(balanced);

/// The interval of the image's build: 2^23 bytes are 8 MiB.
const INTERVAL: u32 = 23;
/// Keeps pages, whose release by time would disturb the count.
const QUIET: &str = "background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1";
/// The sizes that are measured: the name, the bytes of a block, the blocks of the shorter run, and the
/// goal of the instructions with the profiler over those without it.
const SIZES: [(&str, usize, u64, f64); 3] =
    [("64B", 64, 40_000, 1.02), ("4KiB", 4 << 10, 40_000, 1.05), ("64KiB", 64 << 10, 10_000, 1.05)];
/// The goal of the added resident bytes.
const RESIDENT_MAX: f64 = 1_048_576.0;
/// The blocks of the ring.
const BLOCKS: usize = 64;
/// The threads and allocations of the run whose resident memory is read.
const THREADS: usize = 8;
const CHURN: u64 = 4_000;
/// The runs of which the median resident memory is taken.
const RUNS: usize = 15;

#[derive(Debug, Parser)]
struct Cli {
    #[command(subcommand)]
    part: Option<Part>,
}

#[derive(Debug, Subcommand)]
enum Part {
    /// Allocates and frees blocks.
    #[command(hide = true)]
    Ring { size: usize, count: u64 },
    /// Allocates on some threads, and prints the resident bytes.
    #[command(hide = true)]
    Resident,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        if let Profiler::Active { .. } = heap::profiler() {
            heap::cache_unwind_rules()?; // as the start of a `Memory` does
        }
        match cli.part {
            Some(Part::Ring { size, count }) => ring(size, count),
            Some(Part::Resident) => println!("{}", resident()?),
            None => return measure(),
        }
        Ok(true)
    })
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

/// Prints the figures. Returns `true` if every goal held.
fn measure() -> Result<bool, BoxError> {
    let (off, active) = ("prof:false", format!("prof:true,lg_prof_sample:{INTERVAL}"));
    let mut figures = Figures::default();
    for (name, bytes, count, ratio_max) in SIZES {
        let (off, active) = (per_block(off, bytes, count)?, per_block(&active, bytes, count)?);
        println!("{name}: {off:.1} instructions, {active:.1} active");
        let name = format!("questions.profiler.{name}.instructions_ratio");
        figures.at_most(name, active / off, "ratio", ratio_max);
    }
    let (mut resident_off, mut resident_active) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        for (conf, resident) in [(off, &mut resident_off), (&*active, &mut resident_active)] {
            resident.push(resident_of(conf)?);
        }
    }
    let added = median(&resident_active) - median(&resident_off);
    figures.at_most("questions.profiler.rss_bytes", added, "bytes", RESIDENT_MAX);
    Ok(figures.print())
}

/// Returns the instructions for each block.
fn per_block(conf: &str, size: usize, count: u64) -> Result<f64, BoxError> {
    let run = |count: u64| {
        let mut command = callgrind::callgrind(std::env::current_exe()?);
        command.env("_RJEM_MALLOC_CONF", format!("{QUIET},{conf}"));
        command.args(["--bench", "ring", &size.to_string(), &count.to_string()]);
        Ok::<_, BoxError>(callgrind::instructions(&mut command)?)
    };
    Ok((run(count * 6)? - run(count)?) / f64::from(u32::try_from(count * 5)?))
}

/// Returns the resident bytes of a process with these settings.
fn resident_of(conf: &str) -> Result<f64, BoxError> {
    let mut command = common::own()?;
    let output = command.env("_RJEM_MALLOC_CONF", conf).arg("resident").output()?;
    Ok(String::from_utf8(output.stdout)?.trim().parse()?)
}
