//! The costs of lanes: time per pair of an allocation and its free, and driver calls of a request
//! with a view.
//!
//! Pairs run over the simulation without costs: no pair makes a call, so the times are the arena's
//! own. The cases take turns in each round, and a ratio is the median of the rounds' ratios. Views
//! run over the fake libcuda, with unmodified cudarc.
//!
//! Invariant: a round frees everything that it allocates.
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use common::figures::{Figures, count};
use common::sim::Bed;
use cudarc::driver::CudaContext;
use lowtide::BoxError;
use lowtide_cuda_sim::SimOptions;
use lowtide_fake_cuda::{Fake, Options};
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, Lane, Region};

/// Rounds of the cases.
const ROUNDS: usize = 60;
/// Pairs of each case in a round, about.
const PAIRS: usize = 6_144;
/// The size of the pairs.
const SIZE: usize = 64 << 10;
/// The sizes of a forward pass: the activations and scratch buffers of its layers.
const SIZES: usize = 24;
const UNIT: usize = 192 << 10;
/// The buffers of a forward pass that are live at a time.
const LIVE: usize = 12;
/// Requests before the one whose calls are counted.
const WARM: usize = 8;

type Block = Buffer<u8>;
type Case = fn(&Lane) -> Result<(), DeviceError>;

/// The cases that are compared with ping-pong pairs, and their goals.
const CASES: [(&str, Case, f64); 2] = [("gpu.pair.512", burst, 4.0), ("gpu.forward", forward, 4.0)];

fn block(lane: &Lane, size: usize) -> Result<Block, DeviceError> {
    lane.alloc(size, Region::Dynamic)
}

/// One block after the other.
fn ping_pong(lane: &Lane) -> Result<(), DeviceError> {
    (0..PAIRS).try_for_each(|_| block(lane, SIZE).map(|of| drop(black_box(of))))
}

/// 512 blocks, then the end of all, in the order of their ages.
fn burst(lane: &Lane) -> Result<(), DeviceError> {
    const BLOCKS: usize = 512;
    let mut held = Vec::with_capacity(BLOCKS);
    (0..PAIRS / BLOCKS).try_for_each(|_| {
        for _ in 0..BLOCKS {
            held.push(block(lane, SIZE)?);
        }
        held.clear();
        Ok(())
    })
}

/// Each layer's buffer replaces the one of twelve layers before.
fn forward(lane: &Lane) -> Result<(), DeviceError> {
    let mut held: [Option<Block>; LIVE] = [const { None }; LIVE];
    for step in 0..PAIRS {
        let slot = &mut held[step % LIVE];
        *slot = None;
        *slot = Some(block(lane, (step % SIZES + 1) * UNIT)?);
    }
    Ok(())
}

pub(crate) fn pairs(figures: &mut Figures) -> Result<(), BoxError> {
    let open = || -> Result<(Bed, Lane), BoxError> {
        let bed = Bed::open(SimOptions::default(), ArenaConfig::new("pairs"))?;
        let lane = bed.lane(bed.sim.stream_create()?)?;
        Ok((bed, lane))
    };
    let nanos = |(_, lane): &(Bed, Lane), case: Case| {
        let start = Instant::now();
        case(lane).map(|()| start.elapsed().as_secs_f64() * 1e9 / count(PAIRS as u64))
    };
    // Each case has an arena of its own, as programs have: none sees what another left behind.
    let beds = [open()?, open()?, open()?];
    for round in 0..=ROUNDS {
        let pair = nanos(&beds[0], ping_pong)?;
        let mut took = Vec::new();
        for ((name, case, goal), bed) in CASES.into_iter().zip(&beds[1..]) {
            took.push((format!("{name}.ratio"), nanos(bed, case)? / pair, goal));
        }
        if round > 0 {
            // In the first, sizes become hot, and memory is committed.
            figures.add("gpu.pair.ping_pong_ns", pair, "ns");
            for (name, ratio, goal) in took {
                figures.at_most(name, ratio, "ratio", goal);
            }
        }
    }
    Ok(())
}

/// The calls of a warm request that allocates, clears the buffer through a view, and ends.
pub(crate) fn views(figures: &mut Figures) -> Result<(), BoxError> {
    let fake = Fake::start(Options { order: 2, devices: 1, ..Options::default() });
    let driver = Arc::new(CudaDriver::open(CudaOptions::default())?);
    let context = CudaContext::new(0)?;
    let arena =
        DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), ArenaConfig::new("views"))?;
    let stream = context.new_stream()?;
    let lane = arena.cuda_lane(&stream)?;
    let request = || -> Result<(), BoxError> {
        let mut buffer = lane.alloc::<u8>(SIZE, Region::Dynamic)?;
        let lease = lane.enter()?;
        stream.memset_zeros(&mut buffer.cuda_mut(&lease)?)?;
        Ok(())
    };
    (0..WARM).try_for_each(|_| request())?;
    let (calls, created) = (fake.calls_total(), fake.calls(c"cuEventCreate"));
    request()?;
    let (calls, created) = (fake.calls_total() - calls, fake.calls(c"cuEventCreate") - created);
    // The calls of cudarc itself to clear a slice with its two events.
    let mut slice = stream.alloc_zeros::<u8>(SIZE)?;
    let before = fake.calls_total();
    stream.memset_zeros(&mut slice)?;
    figures.add("gpu.view.calls_of_cudarc", count(fake.calls_total() - before), "calls");
    drop(slice);
    figures.at_most("gpu.view.calls", count(calls), "calls", 6.0);
    figures.at_most("gpu.view.event_creations", count(created), "calls", 0.0);
    stream.synchronize()?;
    drop(lane);
    arena.close()?;
    driver.synchronize()?;
    Ok(())
}
