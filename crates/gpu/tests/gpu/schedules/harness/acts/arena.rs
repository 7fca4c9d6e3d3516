//! Acts about the arena as a whole: what it gives back, moves, and is limited to.
//!
//! Invariant: the limit is never below what the schedule began with divided by four.

use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{CompactOptions, DeviceError, Region};

use super::super::world::{Act, Worker, World};

pub(super) fn purge(world: &World, _: &mut Worker) -> Act {
    world.take(world.arena.purge())?;
    world.arena.release_stores();
    Ok(())
}

pub(super) fn trim(world: &World, worker: &mut Worker) -> Act {
    let granules = worker.chance.below(16) as u64;
    let keep = ByteSize::new(world.schedule.granule.get() * granules);
    world.take(world.arena.trim(keep)).map(drop)
}

pub(super) fn shrink(world: &World, _: &mut Worker) -> Act {
    world.take(world.arena.shrink()).map(drop)
}

/// Time passes, up to twice the decay time, and the arena is looked after.
pub(super) fn decay(world: &World, worker: &mut Worker) -> Act {
    let clock = world.sim.clock();
    clock.advance(Duration::from_millis(worker.chance.below(20_000) as u64));
    world.take(world.arena.decay(clock.now())).map(drop)
}

pub(super) fn decay_time(world: &World, worker: &mut Worker) -> Act {
    let times = [DecayTime::AtOnce, DecayTime::Never, DecayTime::from_millis(10_000)];
    world.arena.set_decay(times[worker.chance.below(times.len())]);
    Ok(())
}

pub(super) fn limit(world: &World, worker: &mut Worker) -> Act {
    let quarter = world.schedule.limit.get() / 4;
    let quarters = 1 + worker.chance.below(6) as u64;
    world.arena.set_limit(ByteSize::new(quarter * quarters));
    Ok(())
}

/// Leases without a lane let unknown streams use memory, so mostly the device is waited for first.
pub(super) fn compact(world: &World, worker: &mut Worker) -> Act {
    let contiguous = match worker.chance.below(4) {
        0 => Some(ByteSize::MAX),
        1 => Some(world.schedule.granule),
        _ => None,
    };
    let budget = if worker.one_in(2) { ByteSize::MAX } else { ByteSize::kib(20) };
    if !worker.one_in(4) {
        world.take(world.arena.wait_for_pending())?;
    }
    for region in Region::ALL {
        let options = CompactOptions { contiguous, budget, ..CompactOptions::new(region) };
        let done = world.arena.compact(options, |_| {}).map_err(DeviceError::from);
        world.take(done)?;
    }
    Ok(())
}

/// A lease that is kept: nothing moves or sleeps until it is given up.
pub(super) fn enter(world: &World, worker: &mut Worker) -> Act {
    let lease = world.take(world.arena.enter())?;
    worker.leases.extend(lease.map(|lease| (lease, Vec::new())));
    Ok(())
}

pub(super) fn leave(_: &World, worker: &mut Worker) -> Act {
    if let Some((lease, tracks)) = worker.leases.pop() {
        drop(lease);
        worker.later.extend(tracks);
    }
    Ok(())
}

pub(super) fn look(world: &World, _: &mut Worker) -> Act {
    world.arena.validate();
    let snapshot = world.arena.snapshot();
    let awake = snapshot.live.saturating_sub(snapshot.asleep);
    if snapshot.pending > snapshot.active || awake > snapshot.active {
        return Err(format!("more live or pending than active: {snapshot:?}"));
    }
    Ok(())
}
