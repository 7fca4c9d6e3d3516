//! The cost of the heap profiler that runs from the start: instructions of an allocation and its
//! release, by callgrind, and resident memory.
//!
//! The program runs itself with the profiler on and off in jemalloc's settings; it is the same
//! build. It replaces the blocks of a ring one after the other, since a single block would always be the same
//! address. Instructions are the difference of two runs, without start and end.
//!
//! The build itself costs more than one without the feature, at every setting; see
//! docs/OPERATING.md, "Taking a heap profile".

use std::hint::black_box;

use common::callgrind::per_step;
use common::figures::{Figures, median};
use common::process::resident_at_rest;
use lowtide::BoxError;
use lowtide::heap::{self, Profiler};

/// The interval of the image's build: 2^23 bytes are 8 MiB.
const INTERVAL: u32 = 23;
/// Keeps pages, whose release by time would disturb the count.
const QUIET: &str = "background_thread:false,dirty_decay_ms:-1,muzzy_decay_ms:-1";
/// The sizes that are measured: the name, the bytes of a block, the blocks of the shorter run, and the
/// goal of the instructions with the profiler over those without it.
const SIZES: [(&str, &str, u32, f64); 3] =
    [("64B", "64", 40_000, 1.02), ("4KiB", "4096", 40_000, 1.05), ("64KiB", "65536", 10_000, 1.05)];
/// The goal of the added resident bytes.
const RESIDENT_MAX: f64 = 1_048_576.0;
/// The blocks of the ring.
const BLOCKS: usize = 64;
/// The allocations of a thread of the run whose resident memory is read.
const CHURN: usize = 4_000;
/// The runs of which the median resident memory is taken.
const RUNS: usize = 15;

/// Is the process that allocates and frees blocks of these bytes; or, by the name `resident`, that
/// allocates on some threads, and prints the resident KiB.
pub(crate) fn be(kind: &str, steps: usize) -> Result<(), BoxError> {
    if let Profiler::Active { .. } = heap::profiler() {
        heap::cache_unwind_rules()?; // as the start of a `Memory` does
    }
    if kind == "resident" {
        let work = || [4096, 65_536].into_iter().for_each(|size| ring(size, CHURN));
        println!("{}", resident_at_rest(work)?);
    } else {
        ring(kind.parse()?, steps);
    }
    Ok(())
}

fn ring(size: usize, count: usize) {
    let mut blocks: Vec<Vec<u8>> = (0..BLOCKS).map(|_| Vec::new()).collect();
    for (_, at) in (0..count).zip((0..BLOCKS).cycle()) {
        blocks[at] = Vec::with_capacity(black_box(size));
    }
    black_box(blocks);
}

/// Prints the figures. Returns `true` if every goal held.
pub(crate) fn measure() -> Result<bool, BoxError> {
    let (off, active) = ("prof:false", format!("prof:true,lg_prof_sample:{INTERVAL}"));
    let mut figures = Figures::default();
    for (name, bytes, count, ratio_max) in SIZES {
        let count = |conf: &str| per_step(&format!("{QUIET},{conf}"), bytes, count);
        let (off, active) = (count(off)?, count(&active)?);
        println!("{name}: {off:.1} instructions, {active:.1} active");
        let name = format!("questions.profiler.{name}.instructions_ratio");
        figures.at_most(name, active / off, "ratio", ratio_max);
    }
    let (mut resident_off, mut resident_active) = (Vec::new(), Vec::new());
    for _ in 0..RUNS {
        for (conf, resident) in [(off, &mut resident_off), (&*active, &mut resident_active)] {
            resident.push(common::number_of(conf, "resident")?);
        }
    }
    let added = (median(&resident_active) - median(&resident_off)) * 1024.0;
    figures.at_most("questions.profiler.rss_bytes", added, "bytes", RESIDENT_MAX);
    Ok(figures.print())
}
