//! Acts about work: on a buffer's own stream and on others, and streams that come and go.
//!
//! Invariant: work on one buffer is ordered by the program's own events, but for the uses that the
//! arena was told of, which only read.

use std::sync::PoisonError;

use lowtide_cuda_sim::Pattern;

use super::super::world::{Act, Track, Worker, World};

pub(super) fn write(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let mark = worker.mark();
    let held = &mut worker.held[nth];
    if held.is_shared { Ok(()) } else { world.fill(held, mark) }
}

pub(super) fn check(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let held = &worker.held[nth];
    world.check(held, &held.home)
}

pub(super) fn check_raw(world: &World, worker: &mut Worker) -> Act {
    let Some(raw) = worker.raws.first() else { return Ok(()) };
    let Some(mark) = raw.mark else { return Ok(()) };
    let Some(_lease) = world.take(world.arena.enter())? else { return Ok(()) };
    let (at, size, pattern) = (raw.block.at, raw.block.requested, Pattern::new(mark));
    world.insist(|sim| sim.check(raw.home.stream(), at, size, pattern)).map(drop)
}

/// Another stream reads it, and the arena is told; nobody else waits for that.
pub(super) fn share(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let other = worker.some_track();
    let held = &mut worker.held[nth];
    world.order(&held.home, &other)?;
    held.buffer.record_use(&other.lane).map_err(|error| error.to_string())?;
    held.is_shared = true;
    held.also.push(other.clone());
    world.check(held, &other)
}

/// Another stream uses it between two events of the program's own; the arena hears nothing of it.
pub(super) fn visit(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let (other, mark, writes) = (worker.some_track(), worker.mark(), worker.one_in(2));
    let held = &mut worker.held[nth];
    world.order(&held.home, &other)?;
    if writes && !held.is_shared {
        let home = std::mem::replace(&mut held.home, other.clone());
        let filled = world.fill(held, mark);
        held.home = home;
        filled?;
    } else {
        world.check(held, &other)?;
    }
    world.order(&other, &held.home)
}

pub(super) fn send(world: &World, worker: &mut Worker) -> Act {
    if let Some(nth) = worker.some_held() {
        let held = worker.held.swap_remove(nth);
        world.post.lock().unwrap_or_else(PoisonError::into_inner).push(held);
    }
    Ok(())
}

pub(super) fn receive(world: &World, worker: &mut Worker) -> Act {
    let held = world.post.lock().unwrap_or_else(PoisonError::into_inner).pop();
    worker.held.extend(held);
    Ok(())
}

pub(super) fn end_run(world: &World, worker: &mut Worker) -> Act {
    let track = worker.some_track();
    world.take(track.lane.end_run()).map(drop)
}

/// A stream of its own for what comes; the old one ends with its last buffer.
pub(super) fn fresh(world: &World, worker: &mut Worker) -> Act {
    let track = world.track()?;
    let nth = worker.chance.below(worker.tracks.len());
    let old = std::mem::replace(&mut worker.tracks[nth], track);
    worker.later.push(old);
    Ok(())
}

/// Another lane of the same stream, in the place of the one it had.
pub(super) fn second_lane(world: &World, worker: &mut Worker) -> Act {
    let nth = worker.chance.below(worker.tracks.len());
    let second = world.second(&worker.tracks[nth])?;
    let old: Track = std::mem::replace(&mut worker.tracks[nth], second);
    worker.later.push(old);
    Ok(())
}

pub(super) fn advance(world: &World, worker: &mut Worker) -> Act {
    world.sim.advance(worker.chance.below(16));
    Ok(())
}

pub(super) fn run_all(world: &World, _: &mut Worker) -> Act {
    world.sim.run_all();
    Ok(())
}
