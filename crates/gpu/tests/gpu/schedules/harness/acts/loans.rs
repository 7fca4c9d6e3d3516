//! Acts about loans: a buffer's address is with code that has streams of its own, of which the
//! arena never hears.
//!
//! Invariant: foreign work on a lent buffer comes after what its owner did before, and before what
//! its owner does next, by the program's own events; who has the memory after the owner is for the
//! arena to see to.

use lowtide_cuda_sim::Pattern;
use lowtide_gpu::DeviceErrorWith;

use super::super::world::{Act, Away, Worker, World};
use super::memory;

pub(super) fn export(world: &World, worker: &mut Worker) -> Act {
    let Some(nth) = worker.some_held() else { return Ok(()) };
    let foreign = world.stranger()?;
    let (buffer, rest) = worker.held.swap_remove(nth).part();
    match buffer.export() {
        Ok(exported) => {
            let away = Away { exported, rest, foreign };
            // Before the loan it may have slept.
            let _ = away.is_lost()?;
            let ordered = world.order_streams(away.rest.home.stream(), away.foreign.stream());
            worker.away.push(away);
            ordered
        }
        Err(DeviceErrorWith { value: buffer, error }) => {
            worker.held.push(rest.with(*buffer));
            world.allowed(error)
        }
    }
}

/// Foreign code writes it, or looks what is in it; without a lease.
pub(super) fn work(world: &World, worker: &mut Worker) -> Act {
    if worker.away.is_empty() {
        return Ok(());
    }
    let nth = worker.chance.below(worker.away.len());
    work_on(world, worker, nth)
}

fn work_on(world: &World, worker: &mut Worker, nth: usize) -> Act {
    let (mark, writes) = (worker.mark(), worker.one_in(2));
    let away = &mut worker.away[nth];
    let (at, on) = (away.exported.address(), away.foreign.stream());
    if writes && !away.rest.is_shared {
        away.rest.is_lost.set(false);
        (away.rest.mark, away.rest.written) = (mark, away.exported.buffer().bytes());
        let (size, pattern) = (away.rest.written, Pattern::new(mark));
        return world.insist(|sim| sim.fill(on, at, size, pattern));
    }
    if away.rest.written.is_zero() || away.is_lost()? {
        return Ok(());
    }
    let (size, pattern) = (away.rest.written, Pattern::new(away.rest.mark));
    world.insist(|sim| sim.check(on, at, size, pattern)).map(drop)
}

/// The address comes back while the foreign stream may be at work: the buffer is freed, or used by
/// its owner's stream after that work.
pub(super) fn end(world: &World, worker: &mut Worker) -> Act {
    if worker.away.is_empty() {
        return Ok(());
    }
    let nth = worker.chance.below(worker.away.len());
    work_on(world, worker, nth)?;
    let Away { exported, rest, foreign } = worker.away.swap_remove(nth);
    if worker.one_in(2) {
        let (size, region) = (exported.buffer().len(), exported.buffer().region());
        drop(exported);
        worker.later.extend(rest.also);
        // As likely as not where the foreign stream is at work.
        let next = world.take(rest.home.lane.alloc(size, region))?;
        return memory::hold(world, worker, next, rest.home);
    }
    let buffer = exported.end();
    let ordered = world.order_streams(foreign.stream(), rest.home.stream());
    worker.held.push(rest.with(buffer));
    ordered
}
