//! The costs of lanes: time per pair of an allocation and its free, and driver calls of a request
//! with a view.
//!
//! Pairs run over the simulation without costs: no pair makes a call, so the times are the arena's
//! own. The cases take turns in each round, and a ratio is the median of the rounds' ratios. The
//! four loops of cuArena's benchmark are compared with the times that its arena took on this
//! machine, clock included. Views run over the fake libcuda, with unmodified cudarc.
//!
//! Invariant: a round frees everything that it allocates.
#![expect(unsafe_code, reason = "a lane of the simulation's stream")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use cudarc::driver::CudaContext;
use lowtide::BoxError;
use lowtide_cuda_sim::{SimDriver, SimOptions};
use lowtide_fake_cuda::{Fake, Guard, Options};
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{
    ArenaConfig, Buffer, ByteSize, CompactOptions, DeviceArena, DeviceError, Goal, Lane, Region,
};

use crate::common::figures::{Figures, median};

/// Rounds of the cases.
const ROUNDS: usize = 60;
/// Pairs of each case in a round, about.
const PAIRS: usize = 6_144;
/// Rounds of each loop of cuArena's benchmark for one of ours.
const LOOPS: usize = 8;
/// The size of the pairs.
const SIZE: usize = 64 << 10;
/// The sizes of a forward pass: the activations and scratch buffers of its layers.
const SIZES: usize = 24;
const UNIT: usize = 192 << 10;
/// The buffers of a forward pass that are live at a time.
const LIVE: usize = 12;
/// Requests before the one whose calls are counted.
const WARM: usize = 8;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// An arena over the simulation and one of its lanes.
struct Bed {
    arena: DeviceArena,
    lane: Lane,
}

type Block = Buffer<u8>;

impl Bed {
    fn new() -> Result<Self, BoxError> {
        let driver = Arc::new(SimDriver::new(SimOptions::default()));
        let stream = driver.stream_create()?;
        let clock = Arc::new(ManualClock::new());
        let arena = DeviceArena::open(driver, clock, ArenaConfig::new("pairs"))?;
        // SAFETY: the simulation checks handles, so any number is safe with it.
        let lane = unsafe { arena.lane(stream) }?;
        Ok(Self { arena, lane })
    }

    fn block(&self, size: usize) -> Result<Block, DeviceError> {
        self.lane.alloc(size, Region::Dynamic)
    }

    fn blocks(&self, sizes: &[usize]) -> Result<Vec<Block>, DeviceError> {
        sizes.iter().map(|&size| self.block(size)).collect()
    }

    /// Nanoseconds of a pair: one block after the other.
    fn ping_pong(&self) -> Result<f64, DeviceError> {
        nanos(PAIRS, || (0..PAIRS).try_for_each(|_| self.block(SIZE).map(|of| drop(black_box(of)))))
    }

    /// Nanoseconds of a pair: this many blocks, then the end of all, in the order of their ages.
    fn burst(&self, live: usize) -> Result<f64, DeviceError> {
        let mut held = Vec::with_capacity(live);
        nanos(PAIRS / live * live, || {
            (0..PAIRS / live).try_for_each(|_| {
                for _ in 0..live {
                    held.push(self.block(SIZE)?);
                }
                held.clear();
                Ok(())
            })
        })
    }

    /// Nanoseconds of a pair of a forward pass: each layer's buffer replaces the one of twelve
    /// layers before.
    fn forward(&self) -> Result<f64, DeviceError> {
        let mut held: [Option<Block>; LIVE] = [const { None }; LIVE];
        nanos(PAIRS, || {
            for step in 0..PAIRS {
                let slot = &mut held[step % LIVE];
                *slot = None;
                *slot = Some(self.block((step % SIZES + 1) * UNIT)?);
            }
            held = [const { None }; LIVE];
            Ok(())
        })
    }

    /// Microseconds to allocate blocks of these sizes and to free them all.
    fn together(&self, sizes: &[usize]) -> Result<f64, DeviceError> {
        micros(|| {
            drop(black_box(self.blocks(sizes)?));
            Ok(())
        })
    }

    /// Microseconds to allocate and free blocks of these sizes, one after the other.
    fn one_by_one(&self, sizes: &[usize]) -> Result<f64, DeviceError> {
        micros(|| sizes.iter().try_for_each(|&size| self.block(size).map(|of| drop(black_box(of)))))
    }

    /// Microseconds to allocate a block of the size of two that were freed separately, after a
    /// compaction made room.
    fn after_compaction(&self, size: usize) -> Result<f64, DeviceError> {
        let all = self.blocks(&[size; 8])?.into_iter().enumerate();
        let kept: Vec<_> = all.filter(|(nth, _)| nth % 2 == 1).collect();
        let goal = Goal::Contiguous(ByteSize::of(2 * size));
        self.arena
            .compact(CompactOptions { goal, ..CompactOptions::new(Region::Dynamic) }, |_| {})?;
        let mut block = None;
        let took = micros(|| {
            block = Some(self.block(2 * size)?);
            Ok(())
        });
        drop((block, kept));
        took
    }
}

/// Nanoseconds of one of this many pairs.
fn nanos(pairs: usize, act: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    Ok(micros(act)? * 1e3 / pairs as f64)
}

fn micros(act: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let start = Instant::now();
    act()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// The cases that are compared with ping-pong pairs, and their goals.
const CASES: [(&str, Option<usize>, f64); 4] = [
    ("gpu.pair.8", Some(8), 2.5),
    ("gpu.pair.128", Some(128), 3.0),
    ("gpu.pair.512", Some(512), 4.0),
    ("gpu.forward", None, 4.0),
];

/// The loops of cuArena's benchmark, the microseconds that its arena took, and the goals.
const CU_ARENA: [(&str, f64, f64); 4] = [
    ("gpu.cuarena.b1", 0.06, 1.3),
    ("gpu.cuarena.b2", 47.7, 1.3),
    ("gpu.cuarena.b4", 0.65, 1.3),
    ("gpu.cuarena.b5", 0.05, 1.5),
];

pub(crate) fn pairs(figures: &mut Figures) -> Result<(), BoxError> {
    // Each case has an arena of its own, as programs have: none sees what another left behind.
    let beds: Vec<_> = (0..=CASES.len()).map(|_| Bed::new()).collect::<Result<_, _>>()?;
    let others: Vec<_> = CU_ARENA.iter().map(|_| Bed::new()).collect::<Result<_, _>>()?;
    let doubled: [usize; 8] = std::array::from_fn(|nth| MIB << nth);
    let (mut alone, mut ratios, mut loops) =
        (Vec::new(), [const { Vec::new() }; 4], [const { Vec::new() }; 4]);
    for round in 0..=ROUNDS {
        let pair = beds[0].ping_pong()?;
        let cases = CASES.iter().zip(&beds[1..]).map(|((_, live, _), bed)| match live {
            Some(live) => bed.burst(*live),
            None => bed.forward(),
        });
        let cases = cases.collect::<Result<Vec<_>, _>>()?;
        let mut took = [const { Vec::new() }; 4];
        for _ in 0..LOOPS {
            took[0].push(others[0].together(&[8 * MIB])?);
            took[1].push(others[1].together(&[KIB; 512])?);
            took[2].push(others[2].one_by_one(&doubled)?);
            took[3].push(others[3].after_compaction(32 * MIB)?);
        }
        if round == 0 {
            continue; // sizes become hot, and memory is committed
        }
        alone.push(pair);
        ratios.iter_mut().zip(cases).for_each(|(all, case)| all.push(case / pair));
        loops.iter_mut().zip(took).for_each(|(all, took)| all.extend(took));
    }
    figures.add("gpu.pair.ping_pong_ns", median(&alone), "ns");
    for ((name, _, goal), ratios) in CASES.into_iter().zip(ratios) {
        figures.at_most(format!("{name}.ratio"), median(&ratios), "ratio", goal);
    }
    uncached(figures)?;
    for ((name, theirs, goal), took) in CU_ARENA.into_iter().zip(loops) {
        figures.at_most(format!("{name}.ratio"), median(&took) / theirs, "ratio", goal);
    }
    Ok(())
}

/// Nanoseconds of pairs that no cache serves: each free is pending until the next allocation.
fn uncached(figures: &mut Figures) -> Result<(), BoxError> {
    let bed = Bed::new()?;
    bed.arena.set_thread_cache(ByteSize::ZERO);
    for (name, live) in [("1", 1), ("512", 512)] {
        let all = (0..=ROUNDS).map(|_| bed.burst(live)).collect::<Result<Vec<_>, _>>()?;
        figures.add(format!("gpu.pair.uncached.{name}_ns"), median(&all), "ns");
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
    for _ in 0..WARM {
        request()?;
    }
    let (calls, created) = counts(&fake);
    request()?;
    let (calls, created) = (counts(&fake).0 - calls, counts(&fake).1 - created);
    // The calls of cudarc itself to clear a slice with its two events.
    let mut slice = stream.alloc_zeros::<u8>(SIZE)?;
    let before = fake.calls_total();
    stream.memset_zeros(&mut slice)?;
    figures.add("gpu.view.calls_of_cudarc", (fake.calls_total() - before) as f64, "calls");
    drop(slice);
    figures.at_most("gpu.view.calls", calls as f64, "calls", 6.0);
    figures.at_most("gpu.view.event_creations", created as f64, "calls", 0.0);
    stream.synchronize()?;
    drop(lane);
    arena.close()?;
    driver.synchronize()?;
    Ok(())
}

fn counts(fake: &Guard) -> (u64, u64) {
    (fake.calls_total(), fake.calls(c"cuEventCreate"))
}
