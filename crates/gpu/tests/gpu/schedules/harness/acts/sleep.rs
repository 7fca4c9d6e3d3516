//! Acts about sleep: the arena falls asleep and wakes, contents are kept or not, and leases name
//! streams.
//!
//! A sleep waits for calls that place, move or give back: in the midst of such a call it is left
//! out. So it is while somebody acts in the midst of a call.
//!
//! Invariant: contents are discarded only in regions of which the schedule says so, or of buffers
//! that were said to be discarded.

use std::future::Future as _;
use std::pin::pin;
use std::task::{Context, Waker};
use std::time::Duration;

use lowtide_gpu::clock::Clock as _;
use lowtide_gpu::{Contents, DeviceError, Region, SleepOptions, SleepReport};

use super::super::world::{Act, Worker, World};

pub(super) fn sleep(world: &World, worker: &mut Worker) -> Act {
    let mut contents = |region| {
        let from = if world.schedule.discards(region) { 0 } else { 1 };
        Contents::ALL[from + worker.chance.below(3 - from)]
    };
    let (stable, dynamic) = (contents(Region::Stable), contents(Region::Dynamic));
    let options = SleepOptions { drain: Duration::ZERO, stable, dynamic };
    fall(world, || world.arena.sleep(options).map(Some))
}

pub(super) fn sleep_if_idle(world: &World, worker: &mut Worker) -> Act {
    let clock = world.sim.clock();
    clock.advance(Duration::from_millis(worker.chance.below(20_000) as u64));
    fall(world, || world.arena.sleep_if_idle(clock.now()))
}

fn fall(world: &World, sleep: impl FnOnce() -> Result<Option<SleepReport>, DeviceError>) -> Act {
    let Ok(_alone) = world.drowsy.try_write() else { return Ok(()) };
    // In turns: a call that this is in the midst of.
    if world.arena.is_busy() {
        return Ok(());
    }
    match sleep() {
        Ok(Some(slept)) => {
            let snapshot = world.arena.snapshot();
            let has_left = snapshot.committed == slept.stayed;
            let booked = world.host.as_ref().map(|host| host.booked());
            let is_booked = booked.is_none_or(|booked| booked.bytes >= snapshot.offloaded);
            if world.schedule.turns && !(has_left && is_booked) {
                return Err(format!("{slept:?}, and after it {snapshot:?}, {booked:?}"));
            }
            Ok(())
        }
        Ok(None)
        | Err(
            DeviceError::Leased { .. }
            | DeviceError::SleepCancelled { .. }
            | DeviceError::State { .. },
        ) => Ok(()),
        Err(error) => world.allowed(error),
    }
}

/// Host memory for the next sleep, and perhaps for more than that.
pub(super) fn prepare(world: &World, worker: &mut Worker) -> Act {
    let mut contents = || Contents::ALL[worker.chance.below(3)];
    let options = SleepOptions { drain: Duration::ZERO, stable: contents(), dynamic: contents() };
    match world.arena.prepare_stores(options) {
        Err(DeviceError::State { .. }) => Ok(()),
        prepared => world.take(prepared).map(drop),
    }
}

pub(super) fn wake(world: &World, _: &mut Worker) -> Act {
    match world.arena.wake() {
        Err(DeviceError::State { .. }) => Ok(()),
        woken => world.take(woken).map(drop),
    }
}

pub(super) fn set_contents(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let choice = worker.chance.below(4);
    let contents = Contents::ALL.get(choice).copied();
    let held = &mut worker.held[nth];
    let Some(_lease) = world.take(world.arena.enter())? else { return Ok(()) };
    // What was discarded before was so rightly.
    let _ = world.is_lost(held)?;
    held.buffer.set_contents(contents).map_err(|error| error.to_string())?;
    held.keeps = match contents {
        Some(contents) => contents != Contents::Discard,
        None => !world.schedule.discards(held.buffer.region()),
    };
    Ok(())
}

/// A lease that names its stream, and is kept.
pub(super) fn enter_lane(world: &World, worker: &mut Worker) -> Act {
    let track = worker.some_track();
    let lease = world.take(track.lane.enter())?;
    worker.leases.extend(lease.map(|lease| (lease, vec![track])));
    Ok(())
}

pub(super) fn name_stream(_: &World, worker: &mut Worker) -> Act {
    let track = worker.some_track();
    if let Some((lease, tracks)) = worker.leases.last_mut() {
        lease.record_use(&track.lane).map_err(|error| error.to_string())?;
        tracks.push(track);
    }
    Ok(())
}

/// Begins to enter without a thread, and gives that up. The thread that wakes the arena is waited
/// for: it is no worker, and what it does would be of no turn.
pub(super) fn begin_to_enter(world: &World, _: &mut Worker) -> Act {
    if world.schedule.captures && !world.schedule.turns {
        return Ok(()); // one might begin before that thread has ended
    }
    {
        let mut entering = pin!(world.arena.enter_async());
        drop(entering.as_mut().poll(&mut Context::from_waker(Waker::noop())));
    }
    // After that it makes no call.
    world.take(world.arena.enter()).map(drop)
}
