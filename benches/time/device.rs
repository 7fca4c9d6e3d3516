//! Lanes, sleep and wake over the simulation of CUDA's driver: calls and bytes, which do not depend
//! on the machine; and how long a `Memory` takes to give everything idle back by itself.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use common::figures::{Figures, count};
use common::sim::Bed;
use lowtide::config::{DeviceChoice, Profile};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_cuda_sim::{Pattern, SimOptions};
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, Region, SleepOptions};

use crate::chance::Chance;

/// Requests, each on a stream of its own.
const REQUESTS: u64 = 1_000;
/// Allocations on one lane.
const STEADY: usize = 10_000;

fn open() -> Result<Bed, BoxError> {
    let config = ArenaConfig { limit: ByteSize::gib(16), ..ArenaConfig::new("streams") };
    Bed::open(SimOptions::default(), config)
}

/// Measures lanes. Work is never done by itself: who needs memory that a stream may still work on
/// gets it in the order of the device or not at all.
pub(crate) fn streams(figures: &mut Figures) -> Result<(), BoxError> {
    fresh(figures)?;
    steady(figures)
}

/// A stream for each request, which is destroyed while its work is queued.
fn fresh(figures: &mut Figures) -> Result<(), BoxError> {
    let bed = open()?;
    let mut after_two = ByteSize::ZERO;
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
        if request == 1 {
            after_two = bed.arena.glance().committed;
        }
    }
    let growth = bed.arena.glance().committed.as_f64() - after_two.as_f64();
    figures.add("streams.fresh.committed_growth_bytes", growth, "bytes");
    bed.arena.close()?;
    figures.add("streams.unsafe_unmaps", count(bed.sim.unsafe_unmaps()), "unmaps");
    Ok(())
}

/// One lane that allocates what it freed, once it has committed what that takes.
fn steady(figures: &mut Figures) -> Result<(), BoxError> {
    let bed = open()?;
    let lane = bed.lane(bed.sim.stream_create()?)?;
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
    let before = bed.sim.calls_total();
    turns(STEADY)?;
    let calls = count(bed.sim.calls_total() - before) / count(STEADY as u64);
    figures.add("streams.steady.driver_calls_per_allocation", calls, "calls");
    Ok(())
}

/// Blocks that sleep.
const BLOCKS: usize = 10_000;
/// Bytes of all together.
const TOTAL: usize = 10 << 30;

/// Measures sleep and wake, all contents kept: each handle is unmapped and released, created,
/// mapped and made accessible again, and its bytes are copied out and back. The number of blocks
/// must add no calls if the handles are the same.
pub(crate) fn sleep(figures: &mut Figures) -> Result<(), BoxError> {
    let default = ArenaConfig::new("sleep");
    let (calls, handles) = cycle(BLOCKS, &default)?;
    figures.add("sleep.driver_calls_per_handle", calls / handles, "calls");
    figures.add("sleep.driver_calls.large_blocks", cycle(BLOCKS / 100, &default)?.0, "calls");
    // Large blocks have large handles, and so fewer calls: with equal handles only blocks differ.
    let equal = ArenaConfig { handle_max: ByteSize::ZERO, ..default };
    let blocks = cycle(BLOCKS, &equal)?.0 / cycle(BLOCKS / 100, &equal)?.0;
    figures.add("sleep.driver_calls.100x_blocks_ratio", blocks, "ratio");
    Ok(())
}

/// Sleeps and wakes with so many blocks, of half to one and a half times their mean size. Returns
/// the calls, and the handles before.
fn cycle(blocks: usize, config: &ArenaConfig) -> Result<(f64, f64), BoxError> {
    let bed = Bed::open(SimOptions::default(), config.clone())?;
    let (mut chance, mean) = (Chance::new(42), TOTAL / blocks);
    let mut held = Vec::with_capacity(blocks);
    for nth in 0..blocks {
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
    Ok((count(calls), count(handles as u64)))
}

const TICK: Duration = Duration::from_millis(50);
/// The worker may have been told to act and not yet have begun: so long it gets to begin.
const BREATH: Duration = Duration::from_micros(500);
/// The longest real time that the threads may take to come back to the clock.
const PATIENCE: Duration = Duration::from_secs(10);
/// Decay times after which it is given up.
const PATIENCE_DECAYS: u32 = 20;

/// Measures the decay times until everything idle is given back after a burst: the longest of the
/// profiles. Nobody calls the arena after it: control thread and worker do what is done, on a clock
/// that the bench moves by 50 ms at a time, once both threads wait for it.
pub(crate) fn silence(figures: &mut Figures) -> Result<(), BoxError> {
    let all = Profile::ALL.into_iter().map(decays_to_zero).collect::<Result<Vec<_>, _>>()?;
    let worst = all.into_iter().fold(0.0, f64::max);
    figures.add("decay.idle_to_zero.decays", worst, "decays");
    Ok(())
}

fn decays_to_zero(profile: Profile) -> Result<f64, BoxError> {
    let clock = Arc::new(ManualClock::new());
    let shared: Arc<dyn Clock> = clock.clone();
    let builder = Memory::builder().clock(shared).profile(profile).device(DeviceChoice::Host);
    let memory = builder.background_threads(0).start()?;
    let arena = memory.devices().open_arena("burst")?;
    let DecayTime::Within(decay) = memory.config().device_decay.value else {
        return Err("the profile's decay time is no time".into());
    };
    burst(&arena)?;
    let freed = clock.now();
    while !arena.glance().idle.is_zero() || !arena.snapshot().cached.is_zero() {
        if clock.now() - freed > decay * PATIENCE_DECAYS {
            let glance = arena.glance();
            return Err(format!("{}: idle memory stays: {glance:?}", profile.name()).into());
        }
        clock.advance(TICK);
        if !clock.wait_for_waiters(2, PATIENCE) {
            return Err("the threads of the memory do not wait".into());
        }
        thread::sleep(BREATH);
    }
    let (took, left) = (clock.now() - freed, arena.glance().committed);
    if !left.is_zero() {
        return Err(format!("nothing is live, and {left} stay").into());
    }
    if !memory.shutdown_blocking(PATIENCE).is_clean() {
        return Err("an unclean end".into());
    }
    Ok(took.as_secs_f64() / decay.as_secs_f64())
}

/// Half a gibibyte in each region, in blocks of many sizes, some of them hot, at one moment: all
/// of it was last used then.
fn burst(arena: &DeviceArena) -> Result<(), DeviceError> {
    for turn in 0..100 {
        let blocks: Result<Vec<_>, _> = (0..24_usize)
            .map(|nth| arena.alloc::<u8>((64 << 10) << (nth % 12), Region::ALL[turn % 2]))
            .collect();
        drop(blocks?);
    }
    Ok(())
}
