//! Acts about blocks: had, freed, resized, pinned.
//!
//! A freed buffer's lanes are dropped at the worker's next turn, and not here: see `Worker::later`.
//!
//! Invariant: what was had is written at once, under a mark of its own.

use std::cell::Cell;

use lowtide_cuda_sim::Pattern;
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, Region};

use super::super::world::{Act, Held, HeldRaw, Track, Worker, World};

/// A size of up to 32 KiB, mostly small.
fn size(worker: &mut Worker) -> usize {
    let bits = 5 + worker.chance.below(11);
    1 + worker.chance.below(1 << bits)
}

pub(super) fn region(worker: &mut Worker) -> Region {
    if worker.one_in(8) { Region::Stable } else { Region::Dynamic }
}

/// Writes what was had; where it was not, its lane is dropped later.
pub(super) fn hold(
    world: &World,
    worker: &mut Worker,
    buffer: Option<Buffer<u8>>,
    home: Track,
) -> Act {
    let Some(buffer) = buffer else {
        worker.later.push(home);
        return Ok(());
    };
    let mut held = held(world, buffer, home);
    let filled = world.fill(&mut held, worker.mark());
    worker.held.push(held);
    filled
}

pub(super) fn held(world: &World, buffer: Buffer<u8>, home: Track) -> Held {
    Held {
        keeps: !world.schedule.discards(buffer.region()),
        is_lost: Cell::new(false),
        buffer,
        pin: None,
        mark: 0,
        written: ByteSize::ZERO,
        is_shared: false,
        home,
        also: Vec::new(),
    }
}

pub(super) fn alloc(world: &World, worker: &mut Worker) -> Act {
    let (home, region, size) = (worker.some_track(), region(worker), size(worker));
    let buffer = world.take(home.lane.alloc(size, region))?;
    hold(world, worker, buffer, home)
}

pub(super) fn alloc_on_none(world: &World, worker: &mut Worker) -> Act {
    let (home, region, size) = (worker.some_track(), region(worker), size(worker));
    let buffer = world.take(world.arena.alloc(size, region))?;
    hold(world, worker, buffer, home)
}

pub(super) fn reserve(world: &World, worker: &mut Worker) -> Act {
    let (home, region, size) = (worker.some_track(), region(worker), size(worker));
    let buffer = world.take(world.arena.reserve(size, region))?;
    hold(world, worker, buffer, home)
}

pub(super) fn alloc_raw(world: &World, worker: &mut Worker) -> Act {
    let (home, region, size) = (worker.some_track(), region(worker), size(worker));
    let align = ByteSize::new(1 << worker.chance.below(12));
    let block = world.take(world.arena.alloc_raw(ByteSize::of(size), align, region))?;
    let Some(block) = block else { return Ok(()) };
    let mut raw = HeldRaw { block, mark: None, home };
    let lease = world.take(world.arena.enter());
    let filled = match lease {
        Ok(Some(_lease)) => {
            let mark = worker.mark();
            // Nobody is told what becomes of a block by address.
            raw.mark = Some(mark).filter(|_| !world.schedule.discards(region));
            let (at, size, pattern) = (raw.block.at, raw.block.requested, Pattern::new(mark));
            world.insist(|sim| sim.fill(raw.home.stream(), at, size, pattern))
        }
        Ok(None) => Ok(()),
        Err(fault) => Err(fault),
    };
    worker.raws.push(raw);
    filled
}

pub(super) fn free_raw(world: &World, worker: &mut Worker) -> Act {
    if worker.raws.is_empty() {
        return Ok(());
    }
    let raw = worker.raws.swap_remove(worker.chance.below(worker.raws.len()));
    world.arena.free(raw.block.at).map_err(|error| error.to_string())?;
    worker.later.push(raw.home);
    Ok(())
}

pub(super) fn free(_: &World, worker: &mut Worker) -> Act {
    if let Some(nth) = worker.some_held() {
        let Held { buffer, pin, home, also, .. } = worker.held.swap_remove(nth);
        drop((buffer, pin));
        worker.later.push(home);
        worker.later.extend(also);
    }
    Ok(())
}

pub(super) fn finish(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let last = worker.held.len() - 1;
    worker.held.swap(nth, last);
    let held = &worker.held[last];
    world.check(held, &held.home)?;
    let Some(Held { buffer, pin, home, also, .. }) = worker.held.pop() else { return Ok(()) };
    drop((buffer, pin));
    worker.later.push(home);
    worker.later.extend(also);
    Ok(())
}

pub(super) fn resize(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let size = size(worker);
    let held = &mut worker.held[nth];
    if world.take(held.buffer.resize(size))?.is_some() {
        held.written = held.written.min(held.buffer.bytes());
        // What was said of its contents may be forgotten with the block.
        held.keeps &= !world.schedule.discards(held.buffer.region());
    }
    Ok(())
}

pub(super) fn pin(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let pinned = world.take(worker.held[nth].buffer.pin())?;
    worker.held[nth].pin = pinned;
    Ok(())
}

pub(super) fn unpin(_: &World, worker: &mut Worker) -> Act {
    let pinned = worker.held.iter_mut().find(|held| held.pin.is_some());
    drop(pinned.and_then(|held| held.pin.take()));
    Ok(())
}
