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

use std::fmt;
use std::ops::{ControlFlow, Deref, DerefMut};
use std::pin::{Pin, pin};

use crate::driver::Driver;
use crate::engine::context::{Caller, OpContext, OpStep, Surroundings, run_outside, step};
use crate::exec::callbacks;
use crate::state::arena::ArenaState;
use crate::types::Region;
use lowtide_core::clock::Clock;
use lowtide_core::fork::Birth;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};
use lowtide_core::sync::{Condvar, Mutex, MutexGuard, is_background, lock, try_lock, wait};

/// The state of an arena, its lock, and everything that operations on it need.
pub(crate) struct Executor {
    guarded: Mutex<StateSlot>,
    changed: Condvar,
    /// The number of moved blocks of each region, for readers without the lock.
    moves: [AtomicU64; 2],
    birth: Birth,
}

/// The slot of the state under the lock.
struct StateSlot {
    /// The state; `None` while an operation makes a step.
    state: Option<Box<ArenaState>>,
    /// The number of threads that wait for a change.
    watchers: u32,
}

/// What operations need besides the state.
#[derive(Clone, Copy)]
pub(crate) struct World<'a> {
    pub(crate) driver: &'a dyn Driver,
    pub(crate) clock: &'a dyn Clock,
    pub(crate) surroundings: &'a dyn Surroundings,
}

/// The locked state.
pub(crate) struct LockedState<'a> {
    executor: &'a Executor,
    /// The slot; `None` only in [`LockedState::wait`].
    slot: Option<MutexGuard<'a, StateSlot>>,
}

impl Executor {
    pub(crate) fn new(state: ArenaState) -> Self {
        let slot = StateSlot { state: Some(Box::new(state)), watchers: 0 };
        let (guarded, changed) = (Mutex::new(slot), Condvar::new());
        let moves = [AtomicU64::new(0), AtomicU64::new(0)];
        Self { guarded, changed, moves, birth: Birth::now() }
    }

    /// Returns `false` in a forked child, in which a thread that does not exist may hold the lock.
    #[inline]
    pub(crate) fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// Locks the state. Measures the wait if another thread holds the lock.
    #[inline]
    pub(crate) fn lock_state(&self, clock: &dyn Clock) -> LockedState<'_> {
        self.try_lock_state().unwrap_or_else(|| self.lock_state_contended(clock))
    }

    #[cold]
    fn lock_state_contended(&self, clock: &dyn Clock) -> LockedState<'_> {
        let from = clock.now();
        let mut locked = LockedState { executor: self, slot: Some(lock(&self.guarded)) };
        locked.totals.lock_contended_total += 1;
        locked.totals.lock_wait_total += clock.now() - from;
        locked
    }

    /// Locks the state if no other thread holds the lock.
    #[inline]
    pub(crate) fn try_lock_state(&self) -> Option<LockedState<'_>> {
        Some(LockedState { executor: self, slot: Some(try_lock(&self.guarded)?) })
    }

    /// Returns the number of moved blocks of a region when the lock was last released.
    #[inline]
    pub(crate) fn moves(&self, region: Region) -> u64 {
        self.moves[region.number()].load(Ordering::Relaxed)
    }

    /// Reads or changes the state, without a wait or a driver call.
    #[inline]
    pub(crate) fn run_now<T>(
        &self,
        clock: &dyn Clock,
        act: impl FnOnce(&mut ArenaState) -> T,
    ) -> T {
        // Without `LockedState`, which would make a drop of a block 2 % slower.
        let Some(mut guard) = try_lock(&self.guarded) else {
            return act(&mut self.lock_state_contended(clock));
        };
        let state = guard.state.as_deref_mut().expect("no operation makes a step");
        let outcome = act(state);
        self.publish(state);
        if guard.watchers > 0 {
            self.notify();
        }
        outcome
    }

    /// Publishes the counts of moves before the lock is released, so that the next lease sees them.
    #[inline]
    fn publish(&self, state: &ArenaState) {
        for region in Region::ALL {
            let (published, moves) = (&self.moves[region.number()], state.region(region).moves);
            // Read first: a cache line that all threads write would slow down its readers.
            if published.load(Ordering::Relaxed) != moves {
                published.store(moves, Ordering::Relaxed);
            }
        }
    }

    /// Notifies the threads that wait for a change.
    #[cold]
    fn notify(&self) {
        self.changed.notify_all();
    }

    /// Returns the state without the lock, for the only owner of the executor.
    pub(crate) fn get_mut(&mut self) -> Option<&mut ArenaState> {
        let slot = self.guarded.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.state.as_deref_mut()
    }

    /// Runs an operation to its end.
    pub(crate) fn run<T>(
        &self,
        world: World<'_>,
        operation: impl AsyncFnOnce(&OpContext<'_>) -> T,
    ) -> T {
        let cx = OpContext::new(world.clock, caller(), world.surroundings);
        self.drive(self.lock_state(world.clock), world, &cx, pin!(operation(&cx)))
    }

    /// Makes a first step, and if that is not enough, runs the operation that continues it to its
    /// end. The lock is not released in between.
    #[inline]
    pub(crate) fn run_after<B, T>(
        &self,
        world: World<'_>,
        first: impl FnOnce(&mut ArenaState) -> ControlFlow<T, B>,
        operation: impl AsyncFnOnce(&OpContext<'_>, B) -> T,
    ) -> T {
        let mut locked = self.lock_state(world.clock);
        match first(&mut locked) {
            ControlFlow::Break(outcome) => outcome,
            ControlFlow::Continue(begun) => {
                let cx = OpContext::new(world.clock, caller(), world.surroundings);
                self.drive(locked, world, &cx, pin!(operation(&cx, begun)))
            }
        }
    }

    /// Makes the steps of an operation, from a locked state.
    fn drive<'a, F: Future>(
        &'a self,
        mut locked: LockedState<'a>,
        World { driver, clock, .. }: World<'_>,
        cx: &OpContext<'_>,
        mut operation: Pin<&mut F>,
    ) -> F::Output {
        loop {
            let step = locked.step(cx, operation.as_mut());
            if let OpStep::Wait { is_repeated } = step {
                locked = locked.wait(is_repeated);
                continue;
            }
            drop(locked);
            match step {
                OpStep::Done(outcome) => return outcome,
                OpStep::Call(call) => cx.complete(call.perform(driver)),
                OpStep::Wait { .. } => {}
                OpStep::WaitUntil(bell, deadline) => {
                    clock.wait_until(&bell, deadline);
                }
                OpStep::Outside => {
                    run_outside(cx, operation.as_mut());
                    if !self.is_here() {
                        return end_in_child(cx, operation.as_mut());
                    }
                }
            }
            locked = self.lock_state(clock);
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
        OpStep::Done(outcome) => outcome,
        _ => panic!("in the child of a fork, an arena makes no calls"),
    }
}

/// Describes this thread.
fn caller() -> Caller {
    Caller {
        is_within_callback: callbacks::is_within(),
        is_within_budget: callbacks::is_within_budget(),
        is_background: is_background(),
    }
}

impl LockedState<'_> {
    /// Releases the lock until another thread has changed the state. May return earlier. A
    /// repeated wait notifies no other thread: this thread has changed nothing since the last one.
    pub(crate) fn wait(mut self, is_repeated: bool) -> Self {
        let executor = self.executor;
        // Taken out so that the drop of `self` does nothing.
        let Some(mut slot) = self.slot.take() else { return self };
        if let Some(state) = &slot.state {
            executor.publish(state);
        }
        slot.watchers += 1;
        if slot.watchers > 1 && !is_repeated {
            executor.changed.notify_all(); // this thread may have changed the state
        }
        let mut slot = wait(&executor.changed, slot);
        slot.watchers -= 1;
        Self { executor, slot: Some(slot) }
    }

    /// Lets an operation make its next step on the state.
    fn step<F: Future>(&mut self, cx: &OpContext<'_>, operation: Pin<&mut F>) -> OpStep<F::Output> {
        match self.slot.as_deref_mut() {
            Some(slot) => step(cx, &mut slot.state, operation),
            None => unreachable!("only a wait has no slot"),
        }
    }
}

impl Deref for LockedState<'_> {
    type Target = ArenaState;

    #[inline]
    fn deref(&self) -> &ArenaState {
        match &self.slot {
            Some(slot) => slot.state.as_deref().expect("no operation makes a step"),
            None => unreachable!("only a wait has no slot"),
        }
    }
}

impl DerefMut for LockedState<'_> {
    #[inline]
    fn deref_mut(&mut self) -> &mut ArenaState {
        match &mut self.slot {
            Some(slot) => slot.state.as_deref_mut().expect("no operation makes a step"),
            None => unreachable!("only a wait has no slot"),
        }
    }
}

impl Drop for LockedState<'_> {
    /// Publishes the changes, and notifies the threads that wait for a change.
    #[inline]
    fn drop(&mut self) {
        let Some(slot) = &self.slot else { return };
        if let Some(state) = &slot.state {
            self.executor.publish(state);
        }
        if slot.watchers > 0 {
            self.executor.notify();
        }
    }
}

impl fmt::Debug for Executor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Executor").finish_non_exhaustive()
    }
}
