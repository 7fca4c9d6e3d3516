//! Host memory for the contents of sleeping arenas: what a wake does to it before its lease, and
//! the first touch by several threads.
#![expect(unsafe_code, reason = "memory that was touched is unmapped")]

use std::sync::Arc;
use std::time::Duration;

use lowtide::clock::{Clock as _, SystemClock};
use lowtide::device::driver::{Driver, TouchedMemory};
use lowtide::device::{ArenaConfig, DeviceArena, Region, SleepOptions};
use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::{Call, DriverCosts, SimDriver, SimOptions};

use crate::common::figures::Figures;

/// The contents that sleep; of a ring fewer: the simulation holds every byte that it copies.
const LIVE: ByteSize = ByteSize::gib(40);
const LIVE_OF_RING: ByteSize = ByteSize::mib(64);

/// Sleeps and wakes of one arena.
const TURNS: usize = 3;

/// The memory that is touched, in each of so many rounds.
const TOUCHED: ByteSize = ByteSize::mib(256);
const ROUNDS: usize = 15;

pub(crate) fn leases(figures: &mut Figures) -> Result<(), BoxError> {
    let mut most = 0;
    for (stores_max, is_ring) in
        [(None, false), (Some(ByteSize::ZERO), false), (Some(ByteSize::MAX), true)]
    {
        most = most.max(calls_before_lease(stores_max, is_ring)?);
    }
    figures.at_most("gpu.lease.calls_before", f64::from(most), "calls", 0.0);
    Ok(())
}

pub(crate) fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let (median, best) = touch_ratios()?;
    figures.at_least("gpu.stores.touch_threads_ratio", median, "x", 1.8);
    figures.add("gpu.stores.touch_threads_ratio_best", best, "x");
    Ok(())
}

/// Returns the maximum number of calls that lock or free host pages, from the start of a wake to
/// its lease. Before commits, another thread runs a decay and releases stores.
fn calls_before_lease(stores_max: Option<ByteSize>, is_ring: bool) -> Result<u32, BoxError> {
    let options = SimOptions { costs: DriverCosts::zero(), ..SimOptions::default() };
    let sim = Arc::new(SimDriver::new(options));
    let live = if is_ring { LIVE_OF_RING } else { LIVE };
    if is_ring {
        sim.set_store_lock_limit(ByteSize::ZERO);
    }
    let mut config = ArenaConfig { reserve: LIVE, ..ArenaConfig::new("stores") };
    config.sleep.stores_max = stores_max.unwrap_or(config.sleep.stores_max);
    let clock = Arc::new(sim.clock());
    let arena = DeviceArena::open(Arc::clone(&sim) as Arc<dyn Driver>, clock, config)?;
    let block = arena.alloc::<u8>(live.as_usize().ok_or("64 bits")?, Region::Stable)?;
    let calls = || -> u64 {
        let locking = [Call::HostAlloc, Call::HostFree, Call::HostRegister, Call::HostUnregister];
        locking.iter().map(|call| sim.calls(*call)).sum()
    };
    let mut most = 0;
    for _ in 0..TURNS {
        arena.sleep(SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() })?;
        sim.clock().advance(Duration::from_secs(1));
        let (worker, clock) = (arena.clone(), sim.clock());
        sim.before(Call::Create, 3, move || {
            worker.decay(clock.now()).map(drop).unwrap_or_default();
            worker.release_stores();
        });
        let before = calls();
        let lease = arena.enter()?;
        most = most.max(u32::try_from(calls() - before)?);
        drop(lease);
        arena.purge()?;
    }
    drop(block);
    arena.close()?;
    Ok(most)
}

/// Returns the ratio of the times of one thread and of two that touch the same amount of memory, by
/// turns: of the medians, and of the shortest.
fn touch_ratios() -> Result<(f64, f64), BoxError> {
    let clock = SystemClock::new();
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        for (threads, times) in (1..).zip(&mut times) {
            let start = clock.now();
            let memory = TouchedMemory::map(TOUCHED, None, threads)?;
            times.push(clock.now() - start);
            // SAFETY: nothing uses it.
            unsafe { memory.unmap() }?;
        }
    }
    times.iter_mut().for_each(|times| times.sort_unstable());
    let ratio = |nth: usize| times[0][nth].as_secs_f64() / times[1][nth].as_secs_f64();
    Ok((ratio(ROUNDS / 2), ratio(0)))
}
