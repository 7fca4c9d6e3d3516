//! Refusals: how many of random programs' are false, and what they cost, over the simulation of
//! CUDA's driver.
//!
//! A refusal for the limit is false where, by the error's own figures, the active granules and
//! those that the block needs are within it, or where a free span with memory holds the block.
//!
//! Invariant: counts do not depend on the machine; times have no goal.

#![expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]

use std::sync::Arc;
use std::time::Instant;

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{DriverCosts, SimDriver, SimOptions};
use lowtide_gpu::clock::{Clock, SystemClock};
use lowtide_gpu::{ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, Growth, Region};

use crate::chance::Chance;
use crate::common::figures::Figures;

/// The driver's unit.
const GRANULE: ByteSize = ByteSize::kib(64);
const LIMIT: ByteSize = ByteSize::mib(16);
/// Allocations and frees of each program.
const STEPS: usize = 20_000;
/// Blocks of the arena whose refusals are timed, and how many are.
const BLOCKS: usize = 20_000;
const TIMED: u32 = 2_000;

#[derive(Default)]
struct Counted {
    refused: u64,
    wrong: u64,
}

pub(crate) fn measure(seeds: &[u64], figures: &mut Figures) -> Result<(), BoxError> {
    let doubling =
        Growth::NextPowerOfTwo { initial: GRANULE, after_shrink: GRANULE, cap: ByteSize::mib(4) };
    let mut counted = Counted::default();
    for &seed in seeds {
        for growth in [Growth::SameAsRequested, doubling] {
            for remap in [true, false] {
                program(seed, growth, remap, &mut counted)?;
            }
        }
    }
    if counted.refused < 1_000 {
        return Err(format!("only {} refusals: too tame", counted.refused).into());
    }
    figures.add("oom.refusals", counted.refused as f64, "refusals");
    figures.add("oom.false_refusals", counted.wrong as f64, "refusals");
    cost(figures)
}

fn device(remap: bool) -> Arc<SimDriver> {
    let costs = DriverCosts::zero();
    let (granularity, handle_min) = (GRANULE, GRANULE);
    let options = SimOptions { costs, granularity, handle_min, remap, ..SimOptions::default() };
    Arc::new(SimDriver::new(options))
}

fn open(
    growth: Growth,
    limit: ByteSize,
    sim: Arc<SimDriver>,
    clock: impl Clock + 'static,
) -> Result<DeviceArena, BoxError> {
    let config =
        ArenaConfig { limit, growth, reserve: ByteSize::gib(8), ..ArenaConfig::new("refusals") };
    Ok(DeviceArena::open(sim, Arc::new(clock), config)?)
}

/// Blocks of 256 B to 8 MiB, evenly by logarithm, come and go near the limit.
fn program(seed: u64, growth: Growth, remap: bool, counted: &mut Counted) -> Result<(), BoxError> {
    let sim = device(remap);
    let clock = sim.clock();
    let (arena, mut chance) = (open(growth, LIMIT, sim, clock)?, Chance::new(seed));
    let mut held: Vec<Buffer<u8>> = Vec::new();
    for _ in 0..STEPS {
        if !held.is_empty() && chance.below(9) < 4 {
            drop(held.swap_remove(chance.below(held.len())));
            continue;
        }
        let region = Region::ALL[chance.below(2)];
        let size = usize::try_from(chance.size() >> 3)?.max(1);
        match arena.alloc::<u8>(size, region) {
            Ok(buffer) => held.push(buffer),
            Err(error) => {
                counted.refused += 1;
                counted.wrong += u64::from(is_false(&arena, region, &error)?);
            }
        }
    }
    arena.validate();
    Ok(())
}

fn is_false(arena: &DeviceArena, region: Region, error: &DeviceError) -> Result<bool, BoxError> {
    let DeviceError::OutOfMemory { requested, active, limit, bound: Bound::Limit, .. } = *error
    else {
        return Err(format!("refused for another reason: {error}").into());
    };
    let needed = requested.next_multiple_of(GRANULE).ok_or("a size beyond all numbers")?;
    let largest = arena.snapshot().regions[region.number()].largest_free;
    Ok(active.saturating_add(needed) <= limit || largest >= requested)
}

/// Measures refusals in an arena of many blocks: the first, with a plan of what a compaction would
/// gain, and one of a crowd.
fn cost(figures: &mut Figures) -> Result<(), BoxError> {
    let arena = open(Growth::SameAsRequested, ByteSize::gib(4), device(true), SystemClock::new())?;
    let mut chance = Chance::new(1);
    let mut held = Vec::new();
    for _ in 0..2 * BLOCKS {
        let size = 1 + chance.below(96 << 10);
        held.push(arena.alloc::<u8>(size, Region::Dynamic)?);
    }
    while held.len() > BLOCKS {
        drop(held.swap_remove(chance.below(held.len())));
    }
    arena.purge()?;
    arena.set_limit(arena.snapshot().committed);
    for (name, count) in [("first_us", 1), ("mean_us", TIMED)] {
        let start = Instant::now();
        for _ in 0..count {
            if arena.alloc::<u8>(8 << 20, Region::Dynamic).is_ok() {
                return Err("there was to be no room".into());
            }
        }
        let micros = start.elapsed().as_secs_f64() * 1e6 / f64::from(count);
        figures.add(format!("oom.refusal_of_20000_blocks.{name}"), micros, "us");
    }
    Ok(())
}
