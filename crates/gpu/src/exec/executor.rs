//! Runs operations of the engine on the calling thread.
//!
//! The executor takes the lock of the state, lets the operation make its next step, and releases
//! the lock before it serves the request of the step: a driver call, a wait, or other code. So no
//! driver call is made and no foreign code runs with the lock held. Contended acquisitions are
//! counted.
//!
//! Invariants: whenever the lock is free, the state is in its slot, and the published counts of
//! moves are those of the state; every thread that waits for a change is notified when the lock is
//! released after a change.

use std::ops::ControlFlow;
#[cfg(test)]
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;

use crate::engine::context::{OpContext, OpRequest, run_outside, step};
use crate::state::ArenaState;
use crate::types::Region;
use lowtide_core::clock::Clock;
use lowtide_core::fork::Birth;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};
use lowtide_core::sync::{Condvar, Mutex, MutexGuard, lock, try_lock, wait};

/// The state of an arena, and its lock.
pub(crate) struct Executor {
    guarded: Mutex<StateSlot>,
    changed: Condvar,
    /// The number of moved blocks of each region, for readers without the lock.
    moves: [AtomicU64; 2],
    pub(crate) clock: Arc<dyn Clock>,
    /// In a forked child a thread that does not exist may hold the lock.
    pub(crate) birth: Birth,
}

/// The slot of the state under the lock.
pub(crate) struct StateSlot {
    /// The state; `None` while an operation makes a step.
    state: Option<Box<ArenaState>>,
    /// The number of threads that wait for a change.
    watchers: u32,
}

impl StateSlot {
    #[inline]
    pub(crate) fn state(&mut self) -> &mut ArenaState {
        self.state.as_deref_mut().expect("no operation makes a step")
    }
}

#[cfg(test)]
impl Deref for StateSlot {
    type Target = ArenaState;

    fn deref(&self) -> &ArenaState {
        self.state.as_deref().expect("no operation makes a step")
    }
}

#[cfg(test)]
impl DerefMut for StateSlot {
    fn deref_mut(&mut self) -> &mut ArenaState {
        self.state()
    }
}

impl Executor {
    pub(crate) fn new(state: ArenaState, clock: Arc<dyn Clock>) -> Self {
        let slot = StateSlot { state: Some(Box::new(state)), watchers: 0 };
        let (guarded, changed) = (Mutex::new(slot), Condvar::new());
        let moves = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { guarded, changed, moves, clock, birth: Birth::now() }
    }

    /// Locks the state. Measures the wait if another thread holds the lock. The caller publishes a
    /// change of the state before it releases the lock.
    #[inline]
    pub(crate) fn lock(&self) -> MutexGuard<'_, StateSlot> {
        try_lock(&self.guarded).unwrap_or_else(|| self.lock_contended())
    }

    #[cold]
    fn lock_contended(&self) -> MutexGuard<'_, StateSlot> {
        let from = self.clock.now();
        let mut slot = lock(&self.guarded);
        let totals = &mut slot.state().totals;
        totals.lock_contended_total += 1;
        totals.lock_wait_total += self.clock.now() - from;
        slot
    }

    /// Locks the state if no other thread holds the lock.
    #[cfg(all(test, not(lowtide_loom)))]
    pub(crate) fn try_lock(&self) -> Option<MutexGuard<'_, StateSlot>> {
        try_lock(&self.guarded)
    }

    /// Returns the number of moved blocks of a region when the lock was last released.
    #[inline]
    pub(crate) fn moves(&self, region: Region) -> u64 {
        self.moves[region as usize].load(Ordering::Relaxed)
    }

    /// Reads or changes the state, without a wait or a driver call. Does not call the sink of a
    /// recorder: for callers that hold a lock.
    #[inline]
    pub(crate) fn run_now<T>(&self, act: impl FnOnce(&mut ArenaState) -> T) -> T {
        let mut slot = self.lock();
        let outcome = act(slot.state());
        self.publish(&slot);
        outcome
    }

    /// Publishes the counts of moves before the lock is released, so that the next lease sees them,
    /// and notifies the threads that wait for a change.
    #[inline]
    pub(crate) fn publish(&self, slot: &StateSlot) {
        let Some(state) = &slot.state else { return };
        for region in Region::ALL {
            let (published, moves) = (&self.moves[region as usize], state.region(region).moves);
            // Read first: a cache line that all threads write would slow down its readers.
            if published.load(Ordering::Relaxed) != moves {
                published.store(moves, Ordering::Relaxed);
            }
        }
        if slot.watchers > 0 {
            self.changed.notify_all();
        }
    }

    /// Returns the state without the lock, for the only owner of the executor.
    pub(crate) fn get_mut(&mut self) -> Option<&mut ArenaState> {
        let slot = self.guarded.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.state.as_deref_mut()
    }

    /// Makes the steps of an operation to its end, from a locked state.
    pub(crate) fn drive<'a, F: Future>(
        &'a self,
        mut slot: MutexGuard<'a, StateSlot>,
        cx: &OpContext<'_>,
        mut operation: Pin<&mut F>,
    ) -> F::Output {
        loop {
            let step = step(cx, &mut slot.state, operation.as_mut());
            // A repeated wait has changed nothing.
            if !matches!(step, ControlFlow::Continue(OpRequest::Wait { is_repeated: true })) {
                self.publish(&slot);
            }
            match step {
                ControlFlow::Break(outcome) => return outcome,
                ControlFlow::Continue(OpRequest::Wait { .. }) => {
                    slot.watchers += 1;
                    slot = wait(&self.changed, slot);
                    slot.watchers -= 1;
                    continue;
                }
                ControlFlow::Continue(OpRequest::WaitUntil(bell, deadline)) => {
                    drop(slot);
                    cx.clock.wait_until(&bell, deadline);
                }
                ControlFlow::Continue(OpRequest::Outside) => {
                    drop(slot);
                    run_outside(cx, operation.as_mut());
                    if !self.birth.is_here() {
                        return end_in_child(cx, operation.as_mut());
                    }
                }
            }
            slot = self.lock();
        }
    }
}

/// Ends an operation whose foreign code forked, in the child: a thread that does not exist there
/// may hold the lock, so the operation continues without the state.
///
/// # Panics
/// If the operation needs the state: it did not expect a fork.
#[cold]
fn end_in_child<F: Future>(cx: &OpContext<'_>, operation: Pin<&mut F>) -> F::Output {
    match step(cx, &mut None, operation) {
        ControlFlow::Break(outcome) => outcome,
        ControlFlow::Continue(_) => panic!("in the child of a fork, an arena makes no calls"),
    }
}
