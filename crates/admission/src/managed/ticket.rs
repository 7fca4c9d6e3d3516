//! The place of a future among the waiters for a resource.
//!
//! It polls the cell and leaves its task's waker there. The waker is replaced at each poll and
//! removed when the future is dropped. It does not load: the first waiter starts a thread for that.
//! Wakers are dropped outside the lock, because dropping one may drop a task that holds a guard of
//! the same cell.
//!
//! Invariant: `waits is some <=> it is counted in waiting`; it has at most one waker in the cell.

use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::eviction::Eviction;
use lowtide_core::sync::{caught, lock};

use super::cell::{Cell, State, Step};
use super::error::AcquireError;

/// The place of a future among the waiters.
pub(super) struct Ticket<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    /// Its key among the wakers, and the number of failures seen when it arrived.
    waits: Option<(u64, u64)>,
}

impl<T: Send + Sync + 'static> Ticket<T> {
    pub(super) fn new(cell: Arc<Cell<T>>) -> Self {
        Self { cell, waits: None }
    }

    /// Returns the value of a counted guard and its cell, once there is one.
    #[expect(clippy::type_complexity, reason = "the parts of a guard, used in one place")]
    pub(super) fn poll(
        &mut self,
        cx: &Context<'_>,
    ) -> Poll<Result<(Arc<Cell<T>>, Arc<T>), AcquireError>> {
        let cell = Arc::clone(&self.cell);
        if let Err(error) = cell.check_may_wait() {
            return Poll::Ready(Err(error));
        }
        let mut state = lock(&cell.state);
        let seen = self.waits.map_or(state.loads_failed, |(_, seen)| seen);
        let step = match cell.step(&mut state, seen) {
            Ok(Step::Have(value)) => Some(Ok((Arc::clone(&cell), value))),
            Err(error) => Some(Err(error)),
            Ok(Step::Wait) => None,
            Ok(Step::Load(number)) => {
                drop(state);
                return self.load(&cell, number, None, (seen, cx));
            }
            Ok(Step::Short(number, cost)) => {
                drop(state);
                match cell.make_room(number, cost) {
                    Ok(eviction) => return self.load(&cell, number, eviction, (seen, cx)),
                    Err(error) => {
                        state = lock(&cell.state);
                        Some(Err(error))
                    }
                }
            }
        };
        let (replaced, poll) = match step {
            Some(found) => (self.leave(&mut state), Poll::Ready(found)),
            None => (self.wait_for_change(&mut state, seen, cx), Poll::Pending),
        };
        drop(state);
        // A panic in it must not lose the guard that is already counted.
        let _ = caught(|| drop(replaced));
        poll
    }

    /// Waits for a load that a separate thread begins.
    fn load<R>(
        &mut self,
        cell: &Arc<Cell<T>>,
        number: u64,
        eviction: Option<Eviction>,
        (seen, cx): (u64, &Context<'_>),
    ) -> Poll<R> {
        let replaced = self.wait_for_change(&mut lock(&cell.state), seen, cx);
        let _ = caught(|| drop(replaced));
        Cell::load_elsewhere(cell, number, eviction);
        Poll::Pending
    }

    /// Leaves the task's waker and returns the previous one, to be dropped outside the lock.
    fn wait_for_change(
        &mut self,
        state: &mut State<T>,
        seen: u64,
        cx: &Context<'_>,
    ) -> Option<Waker> {
        let (key, _) = *self.waits.get_or_insert_with(|| {
            state.waiting += 1;
            state.tickets += 1;
            (state.tickets, seen)
        });
        state.wakers.insert(key, cx.waker().clone())
    }

    fn leave(&mut self, state: &mut State<T>) -> Option<Waker> {
        let (key, _) = self.waits.take()?;
        state.waiting -= 1;
        state.wakers.remove(&key)
    }
}

impl<T: Send + Sync + 'static> Drop for Ticket<T> {
    fn drop(&mut self) {
        if self.waits.is_none() || !self.cell.birth.is_here() {
            return;
        }
        let cell = Arc::clone(&self.cell);
        let mut state = lock(&cell.state);
        let _left = self.leave(&mut state);
        drop(state);
    }
}
