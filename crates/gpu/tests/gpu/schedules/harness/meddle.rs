//! Acts of other workers during a worker's driver call, and calls that fail.
//!
//! An act of another worker runs just before a driver call of the arena, in the thread that makes
//! it: a thread that comes at the worst moment, and the same in every run of the seed. Only such
//! acts are taken as cannot wait for the call that they are in the midst of.
//!
//! Invariant: nothing meddles with what meddles.

use std::cell::Cell;
use std::sync::atomic::Ordering;
use std::sync::{Arc, TryLockError};

use lowtide_cuda_sim::{Call, SimDriver, SimError};
use lowtide_gpu::SleepState;

use super::Memory;
use super::acts::{self, Amid};
use super::world::{Worker, World};

/// Calls that others meddle with, and what they can do then.
const MOMENTS: &[(Call, Amid)] = &[
    (Call::EventCreate, Amid::Events),
    (Call::EventRecord, Amid::Events),
    (Call::EventQuery, Amid::Events),
    (Call::EventSynchronize, Amid::Events),
    (Call::StreamWaitEvent, Amid::Events),
    (Call::StreamWaitEvent, Amid::Events),
    (Call::HostFree, Amid::Events),
    (Call::HostAlloc, Amid::Moves),
    (Call::Offload, Amid::Moves),
    (Call::Restore, Amid::Moves),
    (Call::StreamSynchronize, Amid::Moves),
    (Call::Create, Amid::Commits),
    (Call::Unmap, Amid::Moves), // the division of a handle, perhaps
    (Call::StreamIsCapturing, Amid::Moves),
    (Call::Synchronize, Amid::Moves),
    (Call::Copy, Amid::Moves),
];

/// Calls of the arena that fail, and how.
const FAILURES: &[(Call, SimError)] = &[
    (Call::Create, SimError::OutOfMemory),
    (Call::Create, SimError::Unknown),
    (Call::Map, SimError::OutOfMemory),
    (Call::SetAccess, SimError::Unknown),
    (Call::Unmap, SimError::InvalidValue),
    (Call::Copy, SimError::InvalidValue),
    (Call::EventCreate, SimError::OutOfMemory),
    (Call::EventRecord, SimError::Unknown),
    (Call::EventQuery, SimError::Unknown),
    (Call::EventSynchronize, SimError::Unknown),
    (Call::StreamWaitEvent, SimError::InvalidValue),
    (Call::StreamIsCapturing, SimError::Unknown),
    (Call::Synchronize, SimError::Unknown),
    (Call::HostAlloc, SimError::OutOfMemory),
    (Call::Offload, SimError::Unknown),
    (Call::Restore, SimError::Unknown),
    (Call::StreamSynchronize, SimError::Unknown),
    (Call::HostFree, SimError::Unknown),
];

/// The same of segments, in place of those of virtual memory.
const SEGMENT_MOMENTS: &[(Call, Amid)] = &[
    (Call::Alloc, Amid::Commits),
    (Call::Free, Amid::Commits),
    (Call::AllocAsync, Amid::Commits),
    (Call::FreeAsync, Amid::Commits),
    (Call::PoolTrim, Amid::Commits),
];

const SEGMENT_FAILURES: &[(Call, SimError)] = &[
    (Call::Alloc, SimError::OutOfMemory),
    (Call::Alloc, SimError::Unknown),
    (Call::Free, SimError::Unknown),
    (Call::AllocAsync, SimError::OutOfMemory),
    (Call::AllocAsync, SimError::Unknown),
    (Call::FreeAsync, SimError::InvalidValue),
    (Call::PoolTrim, SimError::Unknown),
];

/// One of the device's calls, out of a table or, half the time on a device with segments, out of
/// that for those.
fn one_of<T: Copy>(worker: &mut Worker, memory: Memory, usual: &[T], of_segments: &[T]) -> T {
    let is_usual = memory == Memory::Virtual || worker.one_in(2);
    let table = if is_usual { usual } else { of_segments };
    table[worker.chance.below(table.len())]
}

thread_local! {
    static MEDDLES: Cell<bool> = const { Cell::new(false) };
}

/// Plans, one time in four, that another worker acts in the midst of a driver call to come.
pub(super) fn plan(world: &Arc<World>, worker: &mut Worker, own: usize) {
    if !worker.one_in(4) {
        return;
    }
    let (call, amid) = one_of(worker, world.schedule.memory, MOMENTS, SEGMENT_MOMENTS);
    let nth = worker.chance.below(3) as u64;
    let count = world.workers.len();
    let other = (own + 1 + worker.chance.below(count - 1)) % count;
    let world_then = Arc::downgrade(world);
    world.sim.before(call, nth, move || {
        if let Some(world) = world_then.upgrade()
            && !MEDDLES.replace(true)
        {
            meddle(&world, other, amid);
            MEDDLES.set(false);
        }
    });
}

fn meddle(world: &Arc<World>, other: usize, amid: Amid) {
    if world.over.load(Ordering::Relaxed) {
        return;
    }
    let mut worker = match world.workers[other].try_lock() {
        Ok(worker) => worker,
        Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
        Err(TryLockError::WouldBlock) => return, // it is at work itself
    };
    for _ in 0..=worker.chance.below(5) {
        // Who is on the way down or up makes this call perhaps, and nobody gets in before it
        // arrives. Where none is, none sets out before the act has ended.
        let awake = world.drowsy.try_read().ok();
        let on_the_way = [SleepState::Draining, SleepState::Waking].contains(&world.arena.state());
        let most = if awake.is_none() || on_the_way { Amid::Moves } else { amid };
        let act = acts::choose(&mut worker.chance, most.max(amid));
        // It looks for itself whether it may.
        let _awake = awake.filter(|_| !act.sleeps);
        if !world.perform(act, &mut worker) {
            break;
        }
    }
}

impl Worker {
    /// Plans, one time in sixteen, that a call fails.
    pub(super) fn plan_failure(&mut self, sim: &SimDriver, memory: Memory) {
        if self.one_in(16) {
            let (call, error) = one_of(self, memory, FAILURES, SEGMENT_FAILURES);
            sim.fail_nth(Some(call), self.chance.below(4) as u64, error);
        }
    }
}
