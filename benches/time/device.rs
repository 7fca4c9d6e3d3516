//! Lanes, sleep and wake over the simulation of CUDA's driver: calls, which do not depend on the
//! machine.

use std::time::Duration;

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{Pattern, SimOptions};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, Region, SleepOptions};

use crate::chance::Chance;
use crate::common::figures::{Figures, count};
use crate::common::sim::Bed;

/// Requests, each on a stream of its own.
const REQUESTS: u64 = 1_000;

/// Measures lanes: a stream for each request, which is destroyed while its work is queued. Work is
/// never done by itself: who needs memory that a stream may still work on gets it in the order of
/// the device or not at all.
pub(crate) fn streams(figures: &mut Figures) -> Result<(), BoxError> {
    let config = ArenaConfig { limit: ByteSize::gib(16), ..ArenaConfig::new("streams") };
    let bed = Bed::open(SimOptions::default(), config)?;
    for request in 0..REQUESTS {
        let stream = bed.sim.stream_create()?;
        let lane = bed.lane(stream)?;
        let buffer = lane.alloc::<u8>(1 << 30, Region::Dynamic)?;
        let lease = lane.enter()?;
        if let Some(at) = buffer.address(&lease)? {
            bed.sim.fill(stream, at, ByteSize::mib(2), Pattern::new(request))?;
        }
        drop((lease, buffer, lane));
        bed.sim.stream_destroy(stream)?;
    }
    bed.arena.close()?;
    figures.add("streams.unsafe_unmaps", count(bed.sim.unsafe_unmaps()), "unmaps");
    Ok(())
}

/// Blocks that sleep, of half to one and a half times their mean size.
const BLOCKS: usize = 10_000;
/// Bytes of all together.
const TOTAL: usize = 10 << 30;

/// Measures sleep and wake, all contents kept: each handle is unmapped and released, created,
/// mapped and made accessible again, and its bytes are copied out and back.
pub(crate) fn sleep(figures: &mut Figures) -> Result<(), BoxError> {
    let bed = Bed::open(SimOptions::default(), ArenaConfig::new("sleep"))?;
    let (mut chance, mean) = (Chance::new(42), TOTAL / BLOCKS);
    let mut held = Vec::with_capacity(BLOCKS);
    for nth in 0..BLOCKS {
        let size = mean / 2 + chance.below(mean);
        held.push(bed.arena.alloc::<u8>(size, Region::ALL[nth % 2])?);
    }
    let (handles, before) = (bed.sim.leaks().handles, bed.sim.calls_total());
    let options = SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() };
    let (slept, woken) = (bed.arena.sleep(options)?, bed.arena.wake()?);
    let calls = bed.sim.calls_total() - before;
    if slept.copied != woken.copied || bed.arena.snapshot().asleep != ByteSize::ZERO {
        return Err(format!("{slept:?}, but {woken:?}").into());
    }
    bed.sim.assert_no_faults();
    let per_handle = count(calls) / count(handles as u64);
    figures.add("sleep.driver_calls_per_handle", per_handle, "calls");
    Ok(())
}
