//! Sleep and wake: driver calls for each handle, and that the number of blocks adds none if the
//! handles are the same.
//!
//! Over the simulation of CUDA's driver, all contents kept: each handle is unmapped and released,
//! created, mapped and made accessible again, and its bytes are copied out and back. Calls and
//! bytes do not depend on the machine.
//!
//! Invariant: the bytes that come back are those that went.

#![expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]

use std::sync::Arc;
use std::time::Duration;

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{DriverCosts, SimDriver, SimOptions};
use lowtide_gpu::{ArenaConfig, DeviceArena, Region, SleepOptions};

use crate::chance::Chance;
use crate::common::figures::Figures;

/// Blocks that sleep.
const BLOCKS: usize = 10_000;
/// Bytes of all together.
const TOTAL: usize = 10 << 30;

/// The result of a cycle.
struct Cycle {
    calls: u64,
    handles: usize,
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let default = ArenaConfig::new("sleep");
    let (many, few) = (cycle(BLOCKS, &default)?, cycle(BLOCKS / 100, &default)?);
    let per_handle = |cycle: &Cycle| cycle.calls as f64 / cycle.handles as f64;
    figures.add("sleep.driver_calls_per_handle", per_handle(&many), "calls");
    figures.add("sleep.driver_calls.large_blocks", few.calls as f64, "calls");
    // Large blocks have large handles, and so fewer calls: with equal handles only blocks differ.
    let equal = ArenaConfig { handle_max: ByteSize::ZERO, ..default };
    let (many, few) = (cycle(BLOCKS, &equal)?, cycle(BLOCKS / 100, &equal)?);
    let blocks = many.calls as f64 / few.calls as f64;
    figures.add("sleep.driver_calls.100x_blocks_ratio", blocks, "ratio");
    Ok(())
}

/// Sleeps and wakes with so many blocks, of half to one and a half times their mean size.
fn cycle(blocks: usize, config: &ArenaConfig) -> Result<Cycle, BoxError> {
    let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
    let sim = Arc::new(SimDriver::new(options));
    let (driver, clock) = (Arc::clone(&sim), Arc::new(sim.clock()));
    let arena = DeviceArena::open(driver, clock, config.clone())?;
    let mut chance = Chance::new(42);
    let mean = TOTAL / blocks;
    let mut held = Vec::with_capacity(blocks);
    for nth in 0..blocks {
        let size = mean / 2 + chance.below(mean);
        held.push(arena.alloc::<u8>(size, Region::ALL[nth % 2])?);
    }
    let handles = sim.leaks().handles;
    let before = sim.calls_total();
    let slept = arena.sleep(SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() })?;
    let woken = arena.wake()?;
    let calls = sim.calls_total() - before;
    if slept.offloaded != woken.restored || arena.snapshot().asleep != ByteSize::ZERO {
        return Err(format!("{slept:?}, but {woken:?}").into());
    }
    sim.assert_no_faults();
    Ok(Cycle { calls, handles })
}
