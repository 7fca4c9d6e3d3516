//! Eviction: a resource that makes room by evicting others, and one that is evicted.
//!
//! Called outside the lock of the resource that has no room, since it takes the others' locks.
//!
//! Invariant: a claimed resource is `Unloading`, and the holder of the claim unloads it or puts it
//! back.

use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::time::Duration;

use crate::admission::Admission;
use crate::cost::{Cost, Rejected};
use crate::eviction::{Claimable, Eviction, EvictionClaim, EvictionError};
use crate::permit::{Permit, Waiting};
use crate::reclaim::PAUSE_MIN;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;
use lowtide_core::sync::{MutexGuard, lock};

use super::super::error::{LoadFailure, ResourceError};
use super::super::resource::UnloadReason;
use super::{Cell, CellState, Loaded, ResourcePhase};

/// The longest time that a caller waits for room for a load. An estimate, as for requests: shorter
/// than the timeouts of most clients.
const LOAD_WAIT: Duration = Duration::from_secs(2);

impl<T: Send + Sync + 'static> Cell<T> {
    /// Reserves room for the load of this number, or claims resources whose eviction makes room for
    /// it. If it `asks`, reclaimers run first, unless they failed to make room a moment ago.
    pub(in super::super) fn find_room(
        &self,
        number: u64,
        cost: Cost,
        asks: bool,
    ) -> Result<Option<Eviction>, Rejected> {
        let asks = asks && self.clock.now() >= lock(&self.state).asks_from;
        let find = |of: &Admission| of.state().reserve_or_evict(cost, asks, &self.parts.name);
        let permit = match self.admission.as_ref().map(find).transpose()? {
            Some(Eviction::Booked(permit)) => Some(permit),
            None => None,
            eviction => return Ok(eviction),
        };
        self.has_room(number, permit);
        Ok(None)
    }

    /// Ends the load of this number, for which there is no room. If it waited for room, all that
    /// wait for it are rejected as well. The next caller tries again.
    pub(in super::super) fn refuse_load(&self, number: u64, rejected: Rejected) -> ResourceError {
        let mut state = lock(&self.state);
        if state.loading(number).is_some_and(|loading| loading.waits_for_room) {
            (state.ended, state.refusal) = (state.ended + 1, Some(rejected.clone()));
        }
        self.end_refused(number, state);
        ResourceError::Rejected { name: Arc::clone(&self.parts.name), rejected }
    }

    /// Enters the queue of requests for the room of the load of this number, before all that were
    /// not admitted: most loads are for a request that was. Returns `None` if it is full, or if
    /// there is no control loop.
    pub(in super::super) fn wait_for_room(
        &self,
        number: u64,
        cost: Cost,
        rejected: &Rejected,
    ) -> Option<Waiting> {
        let admission = self.admission.as_ref().filter(|_| rejected.may_wait())?;
        let waiting = admission.state().wait_for_load(cost, LOAD_WAIT)?;
        lock(&self.state).loading(number)?.waits_for_room = true;
        Some(waiting)
    }

    /// Records that the load of this number has left the queue. Returns `false` if it was given up
    /// meanwhile.
    pub(in super::super) fn may_load(&self, number: u64) -> bool {
        let mut state = lock(&self.state);
        let loading = state.loading(number);
        loading.map(|loading| loading.waits_for_room = false).is_some()
    }

    /// Waits for the room of the load of this number; without room, the load ends.
    pub(super) fn settle_room(&self, number: u64, eviction: Eviction) -> bool {
        let made = eviction.run();
        if !self.birth.is_here() {
            let _ = ManuallyDrop::new(made);
            return false;
        }
        match made {
            Ok(permit) => {
                self.has_room(number, Some(permit));
                return true;
            }
            Err(EvictionError::NoThread(kind)) => {
                self.end_load(number, Err(LoadFailure::NoThread(kind)), Duration::ZERO);
            }
            // The waiters look for other room, or are rejected.
            Err(EvictionError::Stuck) => self.end_refused(number, lock(&self.state)),
            Err(EvictionError::NoRoom) => {
                let mut state = lock(&self.state);
                state.asks_from = self.clock.now() + PAUSE_MIN;
                self.end_refused(number, state);
            }
        }
        false
    }

    /// Starts the timeout of the load of this number, which has room now.
    fn has_room(&self, number: u64, permit: Option<Permit>) {
        let timeout = self.parts.load_timeout;
        let deadline = timeout.map_or(Moment::NEVER, |timeout| self.clock.now() + timeout);
        // Without a deadline it cannot have been given up.
        if let Some(loading) = lock(&self.state).loading(number) {
            (loading.permit, loading.deadline) = (permit, deadline);
        }
    }

    fn end_refused(&self, number: u64, mut state: MutexGuard<'_, CellState<T>>) {
        state.stats.loads_refused_total += u64::from(state.loading(number).is_some());
        self.abandon(number, state);
    }

    /// Ends the load of this number, for example because its future waited for room and was
    /// dropped. Another waiter takes it over.
    pub(in super::super) fn abandon(&self, number: u64, mut state: MutexGuard<'_, CellState<T>>) {
        if state.loading(number).is_some() {
            state.phase = ResourcePhase::Empty;
            self.wake_all(state);
        }
    }

    /// Returns the time from which it may be evicted if nothing changes.
    pub(super) fn evictable_from(&self, state: &CellState<T>) -> Option<Moment> {
        let unused = state.guards == 0 && state.waiting == 0 && !state.closed;
        unused.then(|| state.loaded_at + self.parts.min_residency)
    }
}

impl<T: Send + Sync + 'static> Claimable for Cell<T> {
    fn claim(self: Arc<Self>, _: ByteSize) -> Option<EvictionClaim> {
        let now = self.clock.now();
        let mut state = lock(&self.state);
        let reserved = matches!(&state.phase, ResourcePhase::Ready { permit: Some(_), .. });
        let may_go = self.evictable_from(&state).is_some_and(|from| from <= now);
        let loaded = if reserved && may_go { state.take() } else { None };
        drop(state);
        let loaded = loaded?;
        let cost = loaded.1.as_ref().map_or(Cost::ZERO, Permit::cost);
        let mut claim = ResourceClaim { cell: self, loaded: Some(loaded) };
        let unload = move |cause: &Arc<str>| {
            claim.cell.take_apart(claim.loaded.take()?, UnloadReason::Eviction, Some(cause)).1
        };
        Some((cost, Box::new(unload)))
    }
}

/// A resource that was taken out of use. Dropping the claim puts the resource back.
struct ResourceClaim<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    /// `None` once the unload has begun.
    loaded: Option<Loaded<T>>,
}

impl<T: Send + Sync + 'static> Drop for ResourceClaim<T> {
    fn drop(&mut self) {
        let Some(loaded) = self.loaded.take() else { return };
        if !self.cell.birth.is_here() {
            let _ = ManuallyDrop::new(loaded);
            return;
        }
        let mut state = lock(&self.cell.state);
        let (value, permit) = loaded;
        state.phase = ResourcePhase::Ready { value: Arc::new(value), permit };
        self.cell.wake_all(state);
    }
}
