//! The place of a caller among the waiters for a resource: of a future, or of a blocked thread.
//!
//! It polls the cell and leaves its task's waker there. The waker is replaced at each poll and
//! removed when the future is dropped. The first waiter starts the load: a thread runs it itself,
//! a future on a new thread.
//! If there is no room for the load, the first waiter also waits in the queue of requests, and the
//! others wait for it.
//! Wakers are dropped outside the lock, because dropping one may drop a task that holds a guard of
//! the same cell.
//!
//! Invariant: `waits is some <=> it is counted in waiting`; it has at most one waker in the cell.

use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};

use lowtide_core::clock::{Bell, Moment};
use lowtide_core::sync::{MutexGuard, caught, lock};

use crate::cost::{Cost, Rejected};
use crate::permit::Waiting;

use super::cell::{CallerStep, Cell, CellState, Use};
use super::error::ResourceError;

/// The place of a caller among the waiters.
pub(super) struct Ticket<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    /// Its key among the wakers, and the loads that had ended when it arrived.
    waits: Option<(u64, u64)>,
    /// The load that it wants room for.
    room: Option<LoadWait>,
    /// Set once the wait for room has timed out.
    is_over: bool,
    /// `true` if it runs the load on the thread that polls.
    loads_here: bool,
}

/// A load that waits in the queue of requests.
struct LoadWait {
    number: u64,
    cost: Cost,
    waiting: Waiting,
}

impl<T: Send + Sync + 'static> Ticket<T> {
    pub(super) fn new(cell: Arc<Cell<T>>, loads_here: bool) -> Self {
        Self { cell, waits: None, room: None, is_over: false, loads_here }
    }

    /// Blocks this thread until there is a value, or an error.
    pub(super) fn wait(mut self) -> Result<Use<T>, ResourceError> {
        let bell = Bell::new();
        let waker = Waker::from(Arc::clone(&bell));
        // Ends: the end of what it waits for rings the bell: room, a load or a clean-up.
        loop {
            if let Poll::Ready(found) = self.poll(&Context::from_waker(&waker)) {
                return found;
            }
            self.cell.clock.wait_until(&bell, Moment::NEVER);
        }
    }

    /// Returns a guard, once there is a value.
    #[inline]
    pub(super) fn poll(&mut self, cx: &Context<'_>) -> Poll<Result<Use<T>, ResourceError>> {
        let guard = if self.waits.is_none() { Cell::guard_at_once(&self.cell) } else { None };
        guard.map_or_else(|| self.poll_slowly(cx), |guard| Poll::Ready(Ok(guard)))
    }

    #[cold]
    fn poll_slowly(&mut self, cx: &Context<'_>) -> Poll<Result<Use<T>, ResourceError>> {
        let cell = Arc::clone(&self.cell);
        if let Err(error) = cell.check_may_wait() {
            return Poll::Ready(Err(error));
        }
        // Cloning may panic, which must not lose a load that began.
        let mut waker = Some(cx.waker().clone());
        let room = self.poll_room(cx);
        let mut state = lock(&cell.state);
        let seen = self.waits.map_or(state.ended, |(_, seen)| seen);
        let step = match room {
            Poll::Ready(Err(error)) => Err(error),
            Poll::Pending if !state.closed => Ok(CallerStep::Wait),
            Poll::Ready(Ok(())) | Poll::Pending => Cell::step(&cell, &mut state, seen),
        };
        let found = match step {
            Ok(CallerStep::Have(guard)) => Ok(guard),
            Err(error) => Err(error),
            Ok(step) => {
                // Before the lock is released: a load that begins now may be given up at once.
                let replaced = self.wait_for_change(&mut state, seen, waker.take());
                drop(state);
                let _ = caught(|| drop(replaced));
                let begun = Cell::begin(&cell, step, self.loads_here);
                // The loader may have forked, and this may be the child.
                if let Err(error) = cell.check_here() {
                    return Poll::Ready(Err(error));
                }
                let Err((number, cost, rejected)) = begun else { return Poll::Pending };
                match self.enter(number, cost, rejected) {
                    // Its first turn in the queue.
                    Ok(()) => return self.poll_slowly(cx),
                    Err(error) => {
                        state = lock(&cell.state);
                        Err(error)
                    }
                }
            }
        };
        let replaced = self.leave(&cell, state);
        // A panic in it must not lose the guard that is already counted.
        let _ = caught(|| drop((replaced, waker)));
        Poll::Ready(found)
    }

    /// Enters the queue of requests for the room of this load.
    fn enter(&mut self, number: u64, cost: Cost, rejected: Rejected) -> Result<(), ResourceError> {
        let waiting = if self.is_over {
            None // the wait has timed out: reclaimers released less than they promised
        } else {
            self.cell.wait_for_room(number, cost, &rejected)
        };
        match waiting {
            Some(waiting) => {
                self.room = Some(LoadWait { number, cost, waiting });
                Ok(())
            }
            None => Err(self.cell.refuse_load(number, rejected)),
        }
    }

    /// Waits for the room of its load, and starts the load. Is ready if it waits for none.
    fn poll_room(&mut self, cx: &Context<'_>) -> Poll<Result<(), ResourceError>> {
        let Some(LoadWait { number, cost, waiting }) = &self.room else {
            return Poll::Ready(Ok(()));
        };
        let (number, cost) = (*number, *cost);
        // Ends: each iteration needs a wake of the queue.
        let found = loop {
            let is_last = !ready!(waiting.poll_turn(cx));
            self.is_over = is_last;
            // Reclaimers ran before the wait; only the last attempt runs them again.
            match self.cell.find_room(number, cost, is_last) {
                Err(rejected) if !is_last && rejected.may_wait() => waiting.lacks(&rejected),
                found => break found,
            }
        };
        self.room = None;
        let eviction = found.map_err(|rejected| self.cell.refuse_load(number, rejected))?;
        if self.cell.may_load(number) {
            Cell::load_elsewhere(&self.cell, number, eviction);
        }
        Poll::Ready(Ok(()))
    }

    /// Leaves the task's waker and returns the previous one, to be dropped outside the lock.
    fn wait_for_change(
        &mut self,
        state: &mut CellState<T>,
        seen: u64,
        waker: Option<Waker>,
    ) -> Option<Waker> {
        let (key, _) = *self.waits.get_or_insert_with(|| {
            state.waiting += 1;
            state.tickets += 1;
            (state.tickets, seen)
        });
        state.wakers.insert(key, waker?)
    }

    /// Waits no longer, and leaves a load that waits for room to another waiter.
    fn leave(&mut self, cell: &Cell<T>, mut state: MutexGuard<'_, CellState<T>>) -> Option<Waker> {
        let (key, _) = self.waits.take()?;
        state.waiting -= 1;
        let waker = state.wakers.remove(&key);
        drop(state);
        if let Some(room) = self.room.take() {
            cell.abandon(room.number, lock(&cell.state));
        }
        waker
    }
}

impl<T: Send + Sync + 'static> Drop for Ticket<T> {
    fn drop(&mut self) {
        if self.waits.is_none() || !self.cell.birth.is_here() {
            return;
        }
        let cell = Arc::clone(&self.cell);
        let _left = self.leave(&cell, lock(&cell.state));
    }
}
