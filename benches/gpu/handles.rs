//! Handles and host stores of 40 GiB: driver calls of a wake, the bytes that are committed before
//! its first copy, host pages that are locked before a lease, and committed over live memory on
//! recorded traces and on a large random one, with handles of up to 64 MiB.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use common::figures::{Figures, count};
use common::player::Player;
use common::sim::Bed;
use common::trace::Trace;
use lowtide::clock::Clock as _;
use lowtide::{BoxError, ByteSize};
use lowtide_cuda_sim::trial::FaultInjectingDriver;
use lowtide_cuda_sim::{Call, SimOptions};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, Contents, Region, SleepOptions};

use common::chance::Chance;

/// The bytes that are live.
const LIVE: ByteSize = ByteSize::gib(40);

/// Measures wakes of blocks of 512 MiB, and of 1,000 of 40 MiB with a hole of 5 % after each.
pub(crate) fn wake(figures: &mut Figures) -> Result<(), BoxError> {
    let (calls, first) = wake_calls(&[512; 80], 1)?;
    figures.at_most("gpu.wake.calls", count(calls), "calls", 2_500.0);
    let goal = ByteSize::mib(256).as_f64();
    figures.at_most("gpu.wake.bytes_before_first_copy", count(first), "bytes", goal);
    let (calls, _) = wake_calls(&[40, 2].repeat(1_000), 2)?;
    figures.at_most("gpu.wake.holes.calls", count(calls), "calls", 6_000.0);
    Ok(())
}

/// Allocates blocks of so many MiB, of which every `step`-th stays, puts the arena to sleep with
/// its contents kept, and wakes it. Returns the driver calls of the wake, and the bytes committed
/// before its first copy.
fn wake_calls(sizes: &[usize], step: usize) -> Result<(u64, u64), BoxError> {
    let options = SimOptions { capacity: ByteSize::gib(90), ..SimOptions::default() };
    let config = ArenaConfig { limit: ByteSize::gib(80), ..ArenaConfig::new("wake") };
    let bed = Bed::open(options, config)?;
    let alloc = |size: &usize| bed.arena.alloc::<u8>(size << 20, Region::Dynamic);
    let all = sizes.iter().map(alloc).collect::<Result<Vec<_>, _>>()?;
    let live: Vec<_> = all.into_iter().step_by(step).collect();
    bed.arena.sleep(SleepOptions { dynamic: Contents::Keep, ..SleepOptions::default() })?;
    let (before, committed) = (bed.sim.calls_total(), Arc::new(AtomicU64::new(0)));
    let (sim, seen) = (Arc::downgrade(&bed.sim), Arc::clone(&committed));
    bed.sim.before(Call::Restore, 0, move || {
        if let Some(sim) = sim.upgrade() {
            seen.store(sim.leaks().committed.get(), Ordering::Relaxed);
        }
    });
    bed.arena.wake()?;
    let calls = bed.sim.calls_total() - before;
    drop(live);
    bed.close()?;
    Ok((calls, committed.load(Ordering::Relaxed)))
}

/// The contents that sleep in a ring: fewer, as the simulation holds every byte that it copies.
const LIVE_OF_RING: ByteSize = ByteSize::mib(64);

/// Measures calls that lock or free host pages, from the start of a wake to its lease.
pub(crate) fn leases(figures: &mut Figures) -> Result<(), BoxError> {
    let usual = ArenaConfig::new("").sleep.stores_max;
    let mut most = 0;
    for (stores_max, is_ring) in [(usual, false), (ByteSize::ZERO, false), (ByteSize::MAX, true)] {
        most = most.max(calls_before_lease(stores_max, is_ring)?);
    }
    figures.at_most("gpu.lease.calls_before", count(most), "calls", 0.0);
    Ok(())
}

/// Returns the most such calls of three wakes. Before commits, another thread runs a decay and
/// releases stores.
fn calls_before_lease(stores_max: ByteSize, is_ring: bool) -> Result<u64, BoxError> {
    let mut config = ArenaConfig { reserve: LIVE, ..ArenaConfig::new("stores") };
    config.sleep.stores_max = stores_max;
    let Bed { sim, arena } = Bed::open(SimOptions::default(), config)?;
    let live = if is_ring { LIVE_OF_RING } else { LIVE };
    if is_ring {
        sim.set_store_lock_limit(ByteSize::ZERO);
    }
    let block = arena.alloc::<u8>(live.as_usize().ok_or("64 bits")?, Region::Stable)?;
    let calls = || -> u64 {
        let locking = [Call::HostAlloc, Call::HostFree, Call::HostRegister, Call::HostUnregister];
        locking.iter().map(|call| sim.calls(*call)).sum()
    };
    let mut most = 0;
    for _ in 0..3 {
        arena.sleep(SleepOptions { drain: Duration::ZERO, ..SleepOptions::default() })?;
        sim.clock().advance(Duration::from_secs(1));
        let (worker, clock) = (arena.clone(), sim.clock());
        sim.before(Call::Create, 3, move || {
            worker.decay(clock.now()).map(drop).unwrap_or_default();
            worker.release_stores();
        });
        let before = calls();
        let lease = arena.enter()?;
        most = most.max(calls() - before);
        drop(lease);
        arena.purge()?;
    }
    drop(block);
    arena.close()?;
    Ok(most)
}

/// The seeds of the large traces.
const SEEDS: u64 = 4;
/// The events of a large trace after its wake.
const EVENTS: u64 = 4_000;

/// Measures large traces. The driver is the host's, with the rule that memory leaves in whole handles.
pub(crate) fn traces(figures: &mut Figures) -> Result<(), BoxError> {
    let mut worst = 0.0_f64;
    for seed in 0..SEEDS {
        let mut driver = FaultInjectingDriver::new();
        (driver.capabilities.handles, driver.capabilities.remap) = (true, true);
        let driver = Arc::new(driver);
        let config = ArenaConfig { decay: DecayTime::AtOnce, ..ArenaConfig::new("trace") };
        let player = Player::new(&Trace::default(), driver.clone(), config)?;
        worst = worst.max(after_wake(&player, seed)?);
        player.arena.close()?;
        driver.assert_no_faults();
    }
    figures.at_most("gpu.trace.committed_per_live", worst, "ratio", 1.03);
    Ok(())
}

/// Fills an arena with 40 GiB, lets it sleep and wake, and then lets random blocks come and go,
/// with 10 to 40 GiB live. Returns the largest ratio of committed over live memory.
fn after_wake(bed: &Player, seed: u64) -> Result<f64, BoxError> {
    let mut chance = Chance::new(seed);
    // From 64 KiB to 1 GiB, each power of two as likely.
    let mut size = move || {
        let power = 16 + chance.below(14);
        ((1_usize << power) + chance.below(1 << power), chance.below(usize::MAX))
    };
    let mut blocks: Vec<Buffer<u8>> = Vec::new();
    while bed.arena.glance().live < LIVE {
        blocks.push(bed.arena.alloc(size().0, Region::Dynamic)?);
    }
    let discard = SleepOptions { dynamic: Contents::Discard, ..SleepOptions::default() };
    bed.arena.sleep(discard)?;
    bed.arena.wake()?;
    let (mut worst, mut target) = (0.0_f64, ByteSize::gib(25));
    for event in 0..EVENTS {
        let (bytes, random) = size();
        if event % 500 == 0 {
            target = ByteSize::gib(10 + random as u64 % 31);
        }
        if bed.arena.glance().live > target && !blocks.is_empty() {
            drop(blocks.swap_remove(random % blocks.len()));
        } else {
            blocks.push(bed.arena.alloc(bytes, Region::Dynamic)?);
        }
        bed.decay()?;
        let now = bed.arena.glance();
        if now.live >= ByteSize::gib(10) {
            worst = worst.max(now.committed.as_f64() / now.live.as_f64());
        }
    }
    Ok(worst)
}
