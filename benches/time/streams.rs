//! Streams: what lanes cost the driver, and what a stream for each request costs in memory, over
//! the simulation of CUDA's driver; and how fast that is.
//!
//! Its work is never done by itself: whoever needs memory that a stream may still work on gets it
//! in the order of the device or not at all. Calls and bytes do not depend on the machine.
//!
//! Invariant: no run unmaps memory that queued work refers to.

#![expect(clippy::cast_precision_loss, reason = "counts of a bench are small")]
#![expect(unsafe_code, reason = "a lane is of a stream that the caller vouches for")]

use std::sync::Arc;
use std::time::Instant;

use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{DriverCosts, Pattern, SimDriver, SimOptions};
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, DeviceArena, Lane, Region};

use crate::common::figures::Figures;

/// Requests, each on a stream of its own.
const REQUESTS: u64 = 1_000;
/// Allocations on one lane.
const STEADY: usize = 10_000;
/// Of pairs of calls.
const BATCHES: usize = 101;
/// Calls of the simulation.
const EVENTS: u64 = 1_000_000;

fn device() -> Arc<SimDriver> {
    let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
    Arc::new(SimDriver::new(options))
}

fn open(sim: &Arc<SimDriver>) -> Result<DeviceArena, BoxError> {
    let driver: Arc<SimDriver> = Arc::clone(sim);
    let config = ArenaConfig { limit: ByteSize::gib(16), ..ArenaConfig::new("streams") };
    Ok(DeviceArena::open(driver, Arc::new(sim.clock()), config)?)
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    fresh(figures)?;
    steady(figures)?;
    simulation(figures)
}

/// A stream for each request, which is destroyed while its work is queued.
fn fresh(figures: &mut Figures) -> Result<(), BoxError> {
    let sim = device();
    let arena = open(&sim)?;
    let mut after_two = ByteSize::ZERO;
    for request in 0..REQUESTS {
        let stream = sim.stream_create()?;
        // SAFETY: the simulation looks whether a stream is there.
        let lane = unsafe { arena.lane(stream) }?;
        let buffer = lane.alloc::<u8>(1 << 30, Region::Dynamic)?;
        let lease = lane.enter()?;
        if let Some(at) = buffer.address(&lease)? {
            sim.fill(stream, at, ByteSize::mib(2), Pattern::new(request))?;
        }
        drop((lease, buffer, lane));
        sim.stream_destroy(stream)?;
        if request == 1 {
            after_two = arena.glance().committed;
        }
    }
    let growth = arena.glance().committed.as_f64() - after_two.as_f64();
    figures.add("streams.fresh.committed_growth_bytes", growth, "bytes");
    arena.close()?;
    figures.add("streams.unsafe_unmaps", sim.unsafe_unmaps() as f64, "unmaps");
    Ok(())
}

/// One lane that allocates what it freed, once it has committed what that takes.
fn steady(figures: &mut Figures) -> Result<(), BoxError> {
    let sim = device();
    let arena = open(&sim)?;
    // SAFETY: as above.
    let lane = unsafe { arena.lane(sim.stream_create()?) }?;
    let sizes: [usize; 8] = std::array::from_fn(|nth| 3 << (10 + 2 * nth));
    let mut held = Vec::new();
    for size in sizes {
        held.push(lane.alloc::<u8>(size, Region::Dynamic)?);
    }
    let mut turns = |count: usize| -> Result<(), BoxError> {
        for turn in 0..count {
            let nth = turn % sizes.len();
            held[nth] = lane.alloc(sizes[nth], Region::Dynamic)?;
        }
        Ok(())
    };
    turns(STEADY / 10)?; // commits what the old and the new block of a turn need
    let before = sim.calls_total();
    let start = Instant::now();
    turns(STEADY)?;
    let nanos = start.elapsed().as_nanos() as f64 / STEADY as f64;
    let calls = (sim.calls_total() - before) as f64 / STEADY as f64;
    figures.add("streams.steady.driver_calls_per_allocation", calls, "calls");
    figures.add("streams.steady.mean_ns", nanos, "ns");
    drop(held);
    pair(figures, &lane)
}

/// An allocation and its free, of a size that is hot.
fn pair(figures: &mut Figures, lane: &Lane) -> Result<(), BoxError> {
    let batch = || -> Result<f64, BoxError> {
        let start = Instant::now();
        for _ in 0..STEADY {
            drop(lane.alloc::<u8>(1 << 20, Region::Dynamic)?);
        }
        Ok(start.elapsed().as_nanos() as f64 / STEADY as f64)
    };
    let mut batches = (0..BATCHES).map(|_| batch()).collect::<Result<Vec<_>, _>>()?;
    batches.sort_by(f64::total_cmp);
    figures.add("streams.pair.median_ns", batches[BATCHES / 2], "ns");
    Ok(())
}

/// Work that waits across two streams, waited for from time to time.
fn simulation(figures: &mut Figures) -> Result<(), BoxError> {
    let sim = device();
    let size = ByteSize::mib(2);
    let at = sim.reserve(size)?;
    sim.commit(at, size, size)?;
    let (one, two) = (sim.stream_create()?, sim.stream_create()?);
    let event = sim.event_create()?;
    let start = Instant::now();
    while sim.calls_total() < EVENTS {
        for turn in 0..100 {
            sim.fill(one, at, ByteSize::new(64), Pattern::new(turn))?;
            sim.event_record(event, one)?;
            sim.stream_wait_event(two, event)?;
            sim.fill(two, at, ByteSize::new(64), Pattern::new(turn))?;
        }
        sim.synchronize()?;
    }
    let rate = sim.calls_total() as f64 / start.elapsed().as_secs_f64();
    figures.add("simulation.events_per_second", rate, "calls/s");
    Ok(())
}
