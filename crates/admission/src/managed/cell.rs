//! The state machine behind `Managed<T>`: one lock, short critical sections, everything slow
//! outside it.
//!
//! The phase changes under the lock; the loader, the cleanup and every waker run outside it. Wakers
//! are also dropped outside it, because dropping one may drop a task that holds a guard of the same
//! cell. It has no idle policy beyond its own times.
//!
//! A load that exceeds its timeout is given up: the phase becomes `Failed`, and the thread that
//! still runs the loader counts as hung until the loader returns. The value that it then returns is
//! cleaned up. A load that has no room evicts other resources, with this cell unlocked, since that
//! takes the others' locks.
//!
//! Invariants: `guards > 0 => Ready`; wakers held = callers that wait and have not been woken, at
//! most `waiting`; `hung <= HUNG_LOADS_MAX`; only the load whose number is in the phase ends it; a
//! claimed resource is `Unloading`, and the holder of the claim unloads it or puts it back.

use std::collections::BTreeMap;
use std::convert::identity;
use std::fmt;
use std::mem::{self, ManuallyDrop};
use std::ops::Deref;
use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::thread::{self, ThreadId};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment, short};
use lowtide_core::fork::Birth;
use lowtide_core::log;
use lowtide_core::rate::TokenBucket;
use lowtide_core::sync::{Mutex, MutexGuard, caught, foreground, lock};

use super::builder::{ManagedBuilder, is_unloading};
use super::error::{LoadFailure, ResourceError};
use super::resource::{AnyResource, RecentUses, ResourceStats, UnloadReason, score};
use crate::admission::Admission;
use crate::cost::{Cost, Rejected};
use crate::eviction::{Claimable, Eviction, EvictionClaim, EvictionError, Idle};
use crate::permit::{Permit, Waiting};
use crate::reclaim::PAUSE_MIN;

/// Threads of one resource that may hang in its loader: the first, and that of one more attempt.
const HUNG_LOADS_MAX: usize = 2;
/// The least time for which a shutdown waits for a clean-up that it began.
const CLEAN_UP_MIN: Duration = Duration::from_secs(1);
/// The break-even interval between uses of a resource, in times of its load: requests may evict it
/// if its uses are further apart, so that loads take a tenth of the time at most. As in the
/// five-minute rule (Gray and Putzolu, 1987), with a guess for the price of the memory.
const BREAK_EVEN_LOADS: u32 = 10;
/// The bounds of that interval. Guesses: a load also takes CPU time, and room from requests; a
/// resource that was not used for minutes is not missed.
const BREAK_EVEN: [Duration; 2] = [Duration::from_secs(10), Duration::from_secs(300)];
/// Log lines about loads and unloads of a resource at once, and the time for one more; of rejected
/// loads the first after this time without one.
const LINES: (u32, Duration) = (10, Duration::from_secs(10));

/// The longest time that a caller waits for room for a load. An estimate, as for requests: shorter
/// than the timeouts of most clients.
const LOAD_WAIT: Duration = Duration::from_secs(2);

enum ResourcePhase<T> {
    Empty,
    Loading(LoadInProgress),
    /// Its guards share the value.
    Ready {
        value: Arc<T>,
        permit: Option<Permit>,
    },
    Unloading,
    Failed {
        until: Moment,
        failure: LoadFailure,
    },
}

/// A load in progress.
struct LoadInProgress {
    /// Its number: `CellState::loads_begun` when it began.
    number: u64,
    /// The thread that runs the loader, once it runs.
    thread: Option<ThreadId>,
    /// The time when it is given up; [`Moment::NEVER`] without a timeout, and after the loader has
    /// returned.
    deadline: Moment,
    /// Its reservation.
    permit: Option<Permit>,
    /// `true` while a caller waits for its room in the queue of requests. Nothing of it runs.
    waits_for_room: bool,
}

/// The value and its reservation; released in this order.
type Loaded<T> = (T, Option<Permit>);

pub(super) struct CellState<T> {
    phase: ResourcePhase<T>,
    guards: usize,
    /// Callers that wait.
    pub(super) waiting: usize,
    pub(super) wakers: BTreeMap<u64, Waker>,
    /// The number of waker keys assigned so far.
    pub(super) tickets: u64,
    /// Threads that wait to unload it.
    drainers: Vec<Arc<Bell>>,
    pub(super) closed: bool,
    loaded_at: Moment,
    /// The smoothed time of the loads that succeeded; `None` before.
    reload_time: Option<Duration>,
    uses: RecentUses,
    failures_in_a_row: u32,
    loads_begun: u64,
    /// Loaders that have not returned since their loads were given up.
    hung: usize,
    /// Loads that ended without a value and whose waiters get the error: that of the phase, or why
    /// the last of them, which waited for room in vain, was rejected.
    pub(super) ended: u64,
    refusal: Option<Rejected>,
    /// No load asks reclaimers before: they did not release enough.
    asks_from: Moment,
    /// Limits the log lines about loads and unloads.
    lines: TokenBucket,
    /// The counters and the last figures; what follows from the rest of the state is added when
    /// they are read.
    stats: ResourceStats,
}

/// The next action of a caller.
pub(super) enum CallerStep<T: Send + Sync + 'static> {
    /// Its guard is counted.
    Have(Use<T>),
    /// It must find room of this cost for the load of this number, and run it ([`Cell::begin`]).
    Load(u64, Cost),
    Wait,
}

pub(super) struct Cell<T: Send + Sync + 'static> {
    parts: ManagedBuilder<T>,
    pub(super) clock: Arc<dyn Clock>,
    admission: Option<Admission>,
    pub(super) birth: Birth,
    pub(super) state: Mutex<CellState<T>>,
}

impl<T: Send + Sync + 'static> Cell<T> {
    pub(super) fn new(
        parts: ManagedBuilder<T>,
        clock: Arc<dyn Clock>,
        admission: Option<Admission>,
    ) -> Self {
        let state = CellState {
            phase: ResourcePhase::Empty,
            guards: 0,
            waiting: 0,
            wakers: BTreeMap::new(),
            tickets: 0,
            drainers: Vec::new(),
            closed: false,
            loaded_at: Moment::ORIGIN,
            reload_time: None,
            uses: RecentUses::new(),
            failures_in_a_row: 0,
            loads_begun: 0,
            hung: 0,
            ended: 0,
            refusal: None,
            asks_from: Moment::ORIGIN,
            lines: TokenBucket::new(LINES.0, LINES.1, clock.now()),
            stats: ResourceStats { name: Arc::clone(&parts.name), ..ResourceStats::default() },
        };
        Self { parts, clock, admission, birth: Birth::now(), state: Mutex::new(state) }
    }

    pub(super) fn warm(cell: &Arc<Self>) -> Result<(), ResourceError> {
        cell.check_may_wait()?;
        let mut state = lock(&cell.state);
        if matches!(state.phase, ResourcePhase::Ready { .. }) && !state.closed {
            return Ok(());
        }
        let seen = state.ended;
        let step = Self::step(cell, &mut state, seen)?;
        drop(state);
        let begun = Self::begin(cell, step, false);
        begun.map_err(|(number, _, rejected)| cell.refuse_load(number, rejected))
    }

    /// Runs a load on this thread if it is `here`, otherwise on a new one, after making room for
    /// it. Returns its number and cost with the rejection if there is no room.
    pub(super) fn begin(
        cell: &Arc<Self>,
        step: CallerStep<T>,
        here: bool,
    ) -> Result<(), (u64, Cost, Rejected)> {
        let CallerStep::Load(number, cost) = step else { return Ok(()) };
        let found = cell.find_room(number, cost, true);
        let eviction = found.map_err(|rejected| (number, cost, rejected))?;
        if here {
            cell.load(number, eviction);
        } else {
            Self::load_elsewhere(cell, number, eviction);
        }
        Ok(())
    }

    /// Returns the caller's next action. A load that failed, or for which there was no room in
    /// time, after `seen` was read counts as the caller's own.
    pub(super) fn step(
        cell: &Arc<Self>,
        state: &mut CellState<T>,
        seen: u64,
    ) -> Result<CallerStep<T>, ResourceError> {
        let name = || Arc::clone(&cell.parts.name);
        if state.closed {
            return Err(ResourceError::Closed { name: name() });
        }
        if let Some(guard) = Self::guard(cell, state, true) {
            return Ok(CallerStep::Have(guard));
        }
        let is_own = state.ended > seen;
        if let Some(rejected) = state.refusal.as_ref().filter(|_| is_own) {
            return Err(ResourceError::Rejected { name: name(), rejected: rejected.clone() });
        }
        match &state.phase {
            ResourcePhase::Loading(LoadInProgress { thread: Some(thread), .. })
                if *thread == thread::current().id() =>
            {
                return Err(ResourceError::Recursive { name: name() });
            }
            ResourcePhase::Loading(_) | ResourcePhase::Unloading => {
                return Ok(CallerStep::Wait);
            }
            ResourcePhase::Failed { until, failure } => {
                let now = cell.clock.now();
                // No further thread is started while so many hang; one of them may return at any
                // time.
                let all_hang = state.hung >= HUNG_LOADS_MAX;
                if is_own || now < *until || all_hang {
                    let pause = if all_hang { cell.parts.backoff[1] } else { Duration::ZERO };
                    let (failure, retry_in) = (failure.clone(), (*until - now).max(pause));
                    return Err(ResourceError::Load { name: name(), failure, retry_in });
                }
            }
            ResourcePhase::Ready { .. } | ResourcePhase::Empty => {}
        }
        let cost = cell.cost(state);
        state.loads_begun += 1;
        let number = state.loads_begun;
        // The loader and its timeout start when there is room.
        let (thread, deadline, permit, waits_for_room) = (None, Moment::NEVER, None, false);
        let loading = LoadInProgress { number, thread, deadline, permit, waits_for_room };
        let before = mem::replace(&mut state.phase, ResourcePhase::Loading(loading));
        // The error of a loader may panic when it is dropped. The caller has a load to begin.
        let _ = caught(|| drop(before));
        Ok(CallerStep::Load(number, cost))
    }

    /// Returns the bytes that the next load reserves: the builder's cost, or the measured bytes of
    /// the last load if they are more. Zero in a budget for which the builder set no cost.
    fn cost(&self, state: &CellState<T>) -> Cost {
        let learned = state.stats.measured.unwrap_or_default();
        let asks = |said: ByteSize, learned| if said.is_zero() { said } else { said.max(learned) };
        let said = self.parts.cost;
        let Cost { host, device } =
            self.admission.as_ref().map_or(said, |admission| admission.state().by_budget(said));
        Cost { host: asks(host, learned.host), device: asks(device, learned.device) }
    }

    pub(super) fn load_elsewhere(cell: &Arc<Self>, number: u64, eviction: Option<Eviction>) {
        let loading = Arc::clone(cell);
        let thread = thread::Builder::new().name("lowtide-load".to_owned());
        if let Err(error) = thread.spawn(move || loading.load(number, eviction)) {
            let failure = LoadFailure::NoThread(error.kind());
            cell.end_load(number, Err(failure), Duration::ZERO);
        }
    }

    /// Runs the load of this number on this thread, outside the lock, after the eviction made room.
    fn load(&self, number: u64, eviction: Option<Eviction>) {
        if let Some(loading) = lock(&self.state).loading(number) {
            loading.thread = Some(thread::current().id());
        }
        if eviction.is_some_and(|eviction| !self.settle_room(number, eviction)) {
            return;
        }
        let start = self.clock.now();
        let returned = |loaded| self.loader_returned(number, loaded);
        let loaded = caught(|| self.parts.load(returned));
        let loaded = loaded.unwrap_or_else(|message| Err(LoadFailure::Panicked(message)));
        self.end_load(number, loaded, self.clock.now() - start);
    }

    /// Passes on what the loader returned, and lets the load no longer time out; or cleans it up if
    /// the load was given up.
    fn loader_returned(&self, nth: u64, loaded: Result<T, LoadFailure>) -> Result<T, LoadFailure> {
        // In a child that the loader forked nothing is cleaned up.
        let Some(mut state) = self.here() else { return loaded };
        if let Some(loading) = state.loading(nth) {
            loading.deadline = Moment::NEVER;
            return loaded;
        }
        drop(state);
        if let Ok(value) = loaded
            && self.parts.clean_up(value).is_err()
        {
            lock(&self.state).stats.unload_panics_total += 1;
        }
        // No caller sees this error: the waiters got theirs when the load timed out.
        Err(LoadFailure::new("the load timed out"))
    }

    /// Ends the load of this number; one that was given up before ends as a hung loader.
    fn end_load(&self, number: u64, loaded: Result<T, LoadFailure>, took: Duration) {
        if !self.birth.is_here() {
            let _ = ManuallyDrop::new(loaded);
            return;
        }
        let held = self.parts.load_scope.as_ref().filter(|_| loaded.is_ok());
        let held = held.and_then(|load_scope| caught(|| load_scope.held()).unwrap_or_default());
        // Before the lock: the text of a loader's error is foreign code.
        let text = |error: &LoadFailure| caught(|| error.to_string()).unwrap_or_else(identity);
        let failure = loaded.as_ref().err().map(text);
        let now = self.clock.now();
        let mut state = lock(&self.state);
        let Some(loading) = state.loading(number) else {
            debug_assert!(loaded.is_err(), "a late value was not cleaned up");
            state.hung -= 1;
            drop(state);
            let resource = &*self.parts.name;
            log!(warn, target: "lowtide", resource, took = %short(took), "hung loader returned");
            return;
        };
        let mut permit = loading.permit.take();
        match loaded {
            Ok(value) => {
                // A hung loader may hold memory in the same arena.
                let held = held.filter(|_| state.hung == 0);
                if let Some(permit) = &mut permit {
                    permit.settle_at(held.unwrap_or_default());
                }
                state.stats.measured = held.or(state.stats.measured);
                state.stats.loads_ok_total += 1;
                state.failures_in_a_row = 0;
                state.loaded_at = now;
                state.stats.load_time = took;
                state.reload_time = Some(state.reload_time.unwrap_or(took) / 4 * 3 + took / 4);
                state.phase = ResourcePhase::Ready { value: Arc::new(value), permit };
            }
            Err(error) => {
                drop(permit);
                self.fail(&mut state, error, now);
            }
        }
        let (measured, logs) = (state.stats.measured, state.lines.take(now).is_ok());
        self.wake_all(state);
        if logs {
            let (resource, took) = (&*self.parts.name, short(took));
            match failure {
                None => {
                    let Cost { host, device, .. } = measured.unwrap_or_default();
                    log!(info, target: "lowtide", resource, %took, %host, %device, "resource loaded");
                }
                Some(error) => log!(warn, target: "lowtide", resource, %took, error, "load failed"),
            }
        }
    }

    fn fail(&self, state: &mut CellState<T>, failure: LoadFailure, now: Moment) {
        state.stats.loads_failed_total += 1;
        (state.ended, state.refusal) = (state.ended + 1, None);
        state.failures_in_a_row = state.failures_in_a_row.saturating_add(1);
        let until = now + self.parts.pause(state.failures_in_a_row);
        state.phase = ResourcePhase::Failed { until, failure };
    }

    /// Gives up a load that exceeded its timeout: releases its reservation and wakes its waiters
    /// with the error. The thread that runs the loader continues until the loader returns.
    fn give_up_hung_load(&self, now: Moment) {
        let mut state = lock(&self.state);
        let ResourcePhase::Loading(loading) = &mut state.phase else { return };
        if now < loading.deadline {
            return;
        }
        // Before the waiters are woken: one of them may try again at once.
        drop(loading.permit.take());
        state.hung += 1;
        let (hung, timeout) = (state.hung, self.parts.load_timeout.unwrap_or_default());
        self.fail(&mut state, LoadFailure::TimedOut { timeout, hung }, now);
        self.wake_all(state);
        let resource = &*self.parts.name;
        log!(warn, target: "lowtide", resource, timeout = %short(timeout), hung, "load timed out");
    }

    /// Wakes all waiters after releasing the lock. A waker that panics does not affect the others.
    fn wake_all(&self, mut state: MutexGuard<'_, CellState<T>>) {
        let wakers = mem::take(&mut state.wakers);
        state.ring_drainers();
        drop(state);
        for waker in wakers.into_values() {
            let _ = caught(|| waker.wake());
        }
    }

    fn due(&self, state: &CellState<T>) -> Moment {
        if !matches!(state.phase, ResourcePhase::Ready { .. }) || state.guards > 0 {
            return Moment::NEVER;
        }
        if state.closed {
            return Moment::ORIGIN;
        }
        match self.parts.idle {
            Some(idle) if state.waiting == 0 => {
                let used = state.stats.last_used.unwrap_or_default().max(state.loaded_at);
                (used + idle).max(state.loaded_at + self.parts.min_residency)
            }
            _ => Moment::NEVER,
        }
    }

    /// Unloads the resource once it has no guards: on this thread, or for a shutdown on a thread of
    /// its own, of which it waits for [`CLEAN_UP_MIN`] at least.
    pub(super) fn unload_within(
        cell: &Arc<Self>,
        reason: UnloadReason,
        patience: Duration,
    ) -> Result<bool, ResourceError> {
        cell.check_here()?;
        let mut deadline = cell.clock.now() + patience;
        let bell = Bell::new();
        lock(&cell.state).drainers.push(Arc::clone(&bell));
        // Ends at the deadline at the latest: each iteration waits until then, or for a change.
        let found = loop {
            if reason == UnloadReason::Shutdown {
                if Self::unload_elsewhere(cell) {
                    deadline = deadline.max(cell.clock.now() + CLEAN_UP_MIN);
                }
            } else if cell.unload_if(reason, None).is_some() {
                break Ok(true);
            }
            cell.check_here()?;
            let now = cell.clock.now();
            {
                let state = lock(&cell.state);
                if matches!(state.phase, ResourcePhase::Empty | ResourcePhase::Failed { .. }) {
                    break Ok(false);
                }
                if now >= deadline {
                    let name = Arc::clone(&cell.parts.name);
                    let (guards, waiting) = (state.guards, state.waiting);
                    break Err(match state.phase {
                        ResourcePhase::Unloading => ResourceError::CleaningUp { name },
                        _ => ResourceError::Busy { name, guards, waiting, waited: patience },
                    });
                }
            }
            cell.clock.wait_until(&bell, deadline);
        };
        cell.check_here()?;
        lock(&cell.state).drainers.retain(|other| !Arc::ptr_eq(other, &bell));
        found
    }

    /// Unloads the resource for a shutdown, on a thread of its own, if it has no guards. Returns
    /// `true` if it does.
    fn unload_elsewhere(cell: &Arc<Self>) -> bool {
        let Some(loaded) = lock(&cell.state).take() else { return false };
        let (cell, loaded) = (Arc::clone(cell), Arc::new(Mutex::new(Some(loaded))));
        let take_apart = move || {
            let loaded = lock(&loaded).take();
            drop(loaded.map(|loaded| cell.take_apart(loaded, UnloadReason::Shutdown, None)));
        };
        let thread = thread::Builder::new().name("lowtide-unload".to_owned());
        if thread.spawn(take_apart.clone()).is_err() {
            take_apart();
        }
        true
    }

    /// Cleans up outside the lock, releases the reservation unless it is an eviction, which
    /// returns it, then allows new loads. Returns what was released, as far as it is measured.
    fn take_apart(
        &self,
        (value, mut permit): Loaded<T>,
        reason: UnloadReason,
        cause: Option<&Arc<str>>,
    ) -> (Cost, Option<Permit>) {
        let start = self.clock.now();
        // The program's own code: it may close an arena, for example, which waits for the device.
        let own = foreground();
        let recovered = self.parts.take_apart(value);
        drop(own);
        if !self.birth.is_here() {
            return (Cost::ZERO, None); // the clean-up forked, and this is the child
        }
        // Only after the cleanup: its bytes stay reserved until they are released.
        permit = permit.filter(|_| cause.is_some());
        let took = self.clock.now() - start;
        let mut state = lock(&self.state);
        debug_assert!(matches!(state.phase, ResourcePhase::Unloading) && state.guards == 0);
        state.phase = ResourcePhase::Empty;
        state.stats.unloads[reason as usize] += 1;
        state.stats.unload_panics_total += u64::from(recovered.is_err());
        let recovered = recovered.ok().flatten().unwrap_or_default();
        state.stats.recovered_total =
            state.stats.recovered_total.and_host(recovered.host).and_device(recovered.device);
        state.stats.unload_time = took;
        let at = start + took;
        let logs = state.lines.take(at).is_ok();
        state.stats.last_unload = Some((at, reason));
        if let Some(cause) = cause {
            state.stats.last_eviction = Some(Arc::clone(cause));
        }
        self.wake_all(state);
        if logs {
            let resource = &*self.parts.name;
            let (Cost { host, device }, took) = (recovered, short(took));
            let (cause, reason) = (cause.map(tracing::field::display), reason.name());
            log!(info, target: "lowtide", resource, reason, %host, %device, %took, cause,
                "resource unloaded");
        }
        (recovered, permit)
    }

    /// Returns the state; `None` in a forked child, where another thread may have held the lock.
    fn here(&self) -> Option<MutexGuard<'_, CellState<T>>> {
        self.birth.is_here().then(|| lock(&self.state))
    }

    pub(super) fn check_here(&self) -> Result<(), ResourceError> {
        if self.birth.is_here() {
            return Ok(());
        }
        Err(ResourceError::Forked { name: Arc::clone(&self.parts.name) })
    }

    /// Like [`Cell::check_here`], for a thread that may have to wait for a load.
    pub(super) fn check_may_wait(&self) -> Result<(), ResourceError> {
        self.check_here()?;
        if is_unloading() {
            return Err(ResourceError::Unloading { name: Arc::clone(&self.parts.name) });
        }
        Ok(())
    }
}

impl<T: Send + Sync + 'static> AnyResource for Cell<T> {
    fn name(&self) -> &str {
        &self.parts.name
    }

    fn next_due(&self) -> Moment {
        let Some(state) = self.here() else { return Moment::NEVER };
        match &state.phase {
            ResourcePhase::Loading(loading) => loading.deadline,
            _ => self.due(&state),
        }
    }

    fn unload_if(&self, reason: UnloadReason, due: Option<Moment>) -> Option<Cost> {
        self.check_here().ok()?;
        if let Some(now) = due {
            self.give_up_hung_load(now);
        }
        let mut state = lock(&self.state);
        let (due_at, kept_for) = (self.due(&state), self.parts.min_residency);
        if due.is_some_and(|now| due_at == Moment::NEVER || now < due_at) {
            return None;
        }
        // A waiter is about to use it. Idleness checks this in `due`; other reasons ignore it.
        let stays = || state.waiting > 0 || self.clock.now() < state.loaded_at + kept_for;
        if reason == UnloadReason::Pressure && stays() {
            return None;
        }
        let reason = if state.closed { UnloadReason::Shutdown } else { reason };
        let loaded = state.take()?;
        drop(state);
        Some(self.take_apart(loaded, reason, None).0)
    }

    fn close(self: Arc<Self>, wait: Duration) -> Result<(), ResourceError> {
        if let Some(mut state) = self.here() {
            state.closed = true;
            if matches!(&state.phase, ResourcePhase::Loading(loading) if loading.waits_for_room) {
                state.phase = ResourcePhase::Empty;
            }
            self.wake_all(state);
        }
        Self::unload_within(&self, UnloadReason::Shutdown, wait).map(|_| ())
    }

    fn stats(&self) -> ResourceStats {
        let Some(state) = self.here() else {
            let (name, cost) = (Arc::clone(&self.parts.name), self.parts.cost);
            return ResourceStats { name, cost, ..ResourceStats::default() };
        };
        let now = self.clock.now();
        ResourceStats {
            loaded: matches!(state.phase, ResourcePhase::Ready { .. }),
            loading: matches!(state.phase, ResourcePhase::Loading(_)),
            guards: state.guards,
            waiting: state.waiting,
            cost: self.cost(&state),
            use_interval: state.uses.interval(state.loaded_at, now),
            due: Some(self.due(&state)).filter(|due| *due != Moment::NEVER),
            ..state.stats.clone()
        }
    }

    fn idle(self: Arc<Self>) -> Option<Idle> {
        let (state, now) = (self.here()?, self.clock.now());
        let stays = self.evictable_from(&state)?;
        let ResourcePhase::Ready { permit: Some(permit), .. } = &state.phase else { return None };
        let cost = permit.cost();
        let bytes = cost.host.saturating_add(cost.device);
        let (loaded_at, [least, most]) = (state.loaded_at, BREAK_EVEN);
        let reload = state.reload_time.unwrap_or_default();
        let break_even = reload.saturating_mul(BREAK_EVEN_LOADS).clamp(least, most);
        let interval = state.uses.interval(loaded_at, now);
        Some(Idle {
            admission: permit.state(),
            cost,
            stays_for: stays - now,
            loaded_for: loaded_at + break_even - now,
            used_for: (loaded_at + break_even - now).max(break_even.saturating_sub(interval)),
            unload_time: state.stats.unload_time,
            score: score(bytes, interval, state.stats.load_time),
            is_divisible: false,
            resource: Arc::clone(&self) as Arc<dyn Claimable>,
        })
    }
}

impl<T: Send + Sync + 'static> Drop for Cell<T> {
    fn drop(&mut self) {
        let state = self.state.get_mut().unwrap_or_else(PoisonError::into_inner);
        let phase = mem::replace(&mut state.phase, ResourcePhase::Empty);
        let ResourcePhase::Ready { value, permit } = phase else { return };
        if !self.birth.is_here() {
            // It belongs to the parent: the device and threads that it would use do not exist in
            // this process.
            let _ = ManuallyDrop::new((value, permit));
            return;
        }
        let _ = Arc::into_inner(value).map(|value| self.parts.take_apart(value));
        drop(permit);
    }
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// Reserves room for the load of this number, or claims resources whose eviction makes room for
    /// it. If it `asks`, reclaimers run first, unless they failed to make room a moment ago.
    pub(super) fn find_room(
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
    pub(super) fn refuse_load(&self, number: u64, rejected: Rejected) -> ResourceError {
        let (mut state, now) = (lock(&self.state), self.clock.now());
        let before = state.stats.last_refusal.replace((now, rejected.to_string().into()));
        let (resource, Cost { host, device }) = (&*self.parts.name, self.cost(&state));
        if state.loading(number).is_some_and(|loading| loading.waits_for_room) {
            (state.ended, state.refusal) = (state.ended + 1, Some(rejected.clone()));
        }
        self.end_refused(number, state);
        if before.is_none_or(|(at, _)| now - at >= LINES.1) {
            log!(warn, target: "lowtide", resource, %host, %device, error = %rejected, "load refused");
        }
        ResourceError::Rejected { name: Arc::clone(&self.parts.name), rejected }
    }

    /// Enters the queue of requests for the room of the load of this number, before all that were
    /// not admitted: most loads are for a request that was. Returns `None` if it is full, or if
    /// there is no control loop.
    pub(super) fn wait_for_room(
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
    pub(super) fn may_load(&self, number: u64) -> bool {
        lock(&self.state).loading(number).map(|it| it.waits_for_room = false).is_some()
    }

    /// Waits for the room of the load of this number; without room, the load ends.
    fn settle_room(&self, number: u64, eviction: Eviction) -> bool {
        let made = eviction.run();
        if !self.birth.is_here() {
            let _ = ManuallyDrop::new(made);
            return false;
        }
        match made.map(|permit| self.has_room(number, Some(permit))) {
            Ok(()) => return true,
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
    pub(super) fn abandon(&self, number: u64, mut state: MutexGuard<'_, CellState<T>>) {
        if state.loading(number).is_some() {
            state.phase = ResourcePhase::Empty;
            self.wake_all(state);
        }
    }

    /// Returns the time from which it may be evicted if nothing changes.
    fn evictable_from(&self, state: &CellState<T>) -> Option<Moment> {
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

// The guards of a resource, and taking the value out when none is left.
//
// Invariant: a value is taken out only with `guards = 0`, and then the caller cleans it up.
impl<T> CellState<T> {
    /// Returns the load of this number, unless it has been given up.
    fn loading(&mut self, number: u64) -> Option<&mut LoadInProgress> {
        let ResourcePhase::Loading(loading) = &mut self.phase else { return None };
        (loading.number == number).then_some(loading)
    }

    fn ring_drainers(&self) {
        self.drainers.iter().for_each(|bell| bell.ring());
    }

    /// Takes the value out if it has no guards. The caller cleans it up.
    fn take(&mut self) -> Option<Loaded<T>> {
        if self.guards > 0 {
            return None;
        }
        match mem::replace(&mut self.phase, ResourcePhase::Unloading) {
            ResourcePhase::Ready { value, permit } => Some((Arc::into_inner(value)?, permit)),
            other => {
                self.phase = other;
                None
            }
        }
    }
}

/// A guard. The resource stays loaded while a guard lives.
#[must_use = "the resource may be unloaded when the guard is dropped"]
pub struct Use<T: Send + Sync + 'static> {
    // Fields are dropped in this order: the value is no longer shared when the count falls.
    value: Arc<T>,
    _counted: CountedGuard<T>,
}

/// One of `CellState::guards`.
struct CountedGuard<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    /// `true` if it is a use.
    counts: bool,
}

impl<T: Send + Sync + 'static> Deref for Use<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + Sync + fmt::Debug + 'static> fmt::Debug for Use<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&**self, f)
    }
}

impl<T: Send + Sync + 'static> Drop for CountedGuard<T> {
    fn drop(&mut self) {
        let Self { cell, counts } = self;
        let Some(mut state) = cell.here() else { return };
        state.guards -= 1;
        if *counts {
            let now = cell.clock.now();
            state.stats.last_used = state.stats.last_used.max(Some(now));
            state.uses.record(now);
        }
        if state.guards == 0 {
            state.ring_drainers();
        }
    }
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// Takes a guard if the resource is loaded and this thread may wait for it.
    pub(super) fn guard_at_once(cell: &Arc<Self>) -> Option<Use<T>> {
        if is_unloading() { None } else { Self::try_acquire(cell, true) }
    }

    /// Takes a guard if the resource is loaded. It is a use if `counts` is set.
    pub(super) fn try_acquire(cell: &Arc<Self>, counts: bool) -> Option<Use<T>> {
        let mut state = cell.here()?;
        Self::guard(cell, &mut state, counts)
    }

    /// Takes a guard if the resource is loaded and not closed.
    fn guard(cell: &Arc<Self>, state: &mut CellState<T>, counts: bool) -> Option<Use<T>> {
        let ResourcePhase::Ready { value, .. } = &state.phase else { return None };
        if state.closed {
            return None;
        }
        let value = Arc::clone(value);
        state.guards += 1;
        Some(Use { value, _counted: CountedGuard { cell: Arc::clone(cell), counts } })
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod guard_tests {
    use std::sync::{Arc, OnceLock, mpsc};
    use std::time::Duration;

    use lowtide_core::clock::{Clock, ManualClock, Moment};
    use lowtide_core::sync::{Mutex, lock};

    use crate::managed::{Managed, ResourceError};

    const IDLE: Duration = Duration::from_secs(10);

    struct Bed {
        clock: ManualClock,
        managed: Managed<u8>,
    }

    impl Bed {
        fn new() -> Self {
            let clock = ManualClock::new();
            let managed = Managed::builder("a", || Ok(1)).idle(IDLE);
            let managed = managed.build(Arc::new(clock.clone()), None);
            Self { clock, managed }
        }

        /// Uses it, after so many milliseconds.
        fn use_after(&self, millis: u64) {
            self.clock.advance(Duration::from_millis(millis));
            assert_eq!(*self.managed.acquire_blocking().expect("loads"), 1);
        }

        fn last_used(&self) -> Option<Moment> {
            self.managed.stats().last_used
        }
    }

    fn at(millis: u64) -> Moment {
        Moment::ORIGIN + Duration::from_millis(millis)
    }

    #[test]
    fn each_use_ends_at_its_own_time() {
        let bed = Bed::new();
        for nth in 1..=3 {
            bed.use_after(100);
            bed.clock.advance(Duration::from_millis(20));
            assert_eq!(bed.last_used(), Some(at(nth * 120 - 20)));
        }
        assert_eq!(bed.managed.next_due(), at(340) + IDLE);
        drop(bed.managed.peek());
        bed.clock.advance(IDLE);
        assert_eq!(bed.last_used(), Some(at(340)), "a look is no use");
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    #[test]
    fn a_resource_stays_loaded_for_its_idle_time_after_the_last_of_its_guards() {
        let bed = Bed::new();
        let held = bed.managed.acquire_blocking().expect("loads");
        for _ in 0..3 {
            bed.clock.advance(IDLE);
            bed.use_after(0);
            assert_eq!(bed.managed.next_due(), Moment::NEVER);
        }
        drop(held);
        assert!(!bed.managed.unload_if_due(bed.clock.now()), "it was used just now");
        bed.clock.advance(IDLE - Duration::from_millis(1));
        assert!(!bed.managed.unload_if_due(bed.clock.now()));
        bed.clock.advance(Duration::from_millis(1));
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_thread_that_waits_to_unload_is_woken_by_the_last_guard() {
        let bed = Bed::new();
        bed.use_after(0);
        let held = bed.managed.acquire_blocking().expect("loaded");
        let (sender, unloaded) = mpsc::channel();
        let managed = bed.managed.clone();
        let unload = std::thread::spawn(move || sender.send(managed.unload_now(IDLE)));
        assert!(bed.clock.wait_for_waiters(1, PATIENCE));
        drop(held);
        let unloaded = unloaded.recv_timeout(PATIENCE);
        bed.clock.advance(IDLE);
        assert!(unload.join().expect("no panic").is_ok());
        assert!(matches!(unloaded, Ok(Ok(true))), "{unloaded:?}");
    }

    #[test]
    fn a_value_that_is_loaded_after_the_resource_was_closed_has_no_guards() {
        let (clock, managed) = (ManualClock::new(), Arc::new(OnceLock::<Managed<u8>>::new()));
        let closed = Arc::clone(&managed);
        let load = move || {
            let managed = closed.get().ok_or("not set")?;
            assert!(managed.close(Duration::ZERO).is_err(), "it is loading");
            Ok(1)
        };
        let built = Managed::builder("a", load).build(Arc::new(clock), None);
        let managed = managed.get_or_init(|| built);
        for _ in 0..2 {
            let error = managed.acquire_blocking().expect_err("closed");
            assert!(matches!(error, ResourceError::Closed { .. }), "{error:?}");
        }
        assert!(managed.stats().loaded && managed.peek().is_none());
        assert!(managed.unload_if_due(Moment::ORIGIN));
    }

    /// Also if no load would have to be waited for: whether it is loaded is not known before.
    #[test]
    fn a_cleanup_acquires_no_resource_even_if_that_is_loaded() {
        let loaded = Bed::new();
        loaded.use_after(0);
        let other = loaded.managed.clone();
        let unload = move |_| {
            let error = other.acquire_blocking().expect_err("in a cleanup");
            assert!(matches!(error, ResourceError::Unloading { .. }), "{error:?}");
        };
        let managed = Managed::builder("b", || Ok(1)).unload(unload);
        let managed = managed.build(Arc::new(ManualClock::new()), None);
        drop(managed.acquire_blocking().expect("loads"));
        assert!(managed.unload_now(Duration::ZERO).expect("has no guards"));
        assert_eq!(managed.stats().unload_panics_total, 0);
    }

    #[test]
    fn a_cleanup_that_ends_another_resource_is_still_one_afterwards() {
        let (ends, other) = (Bed::new(), Bed::new());
        ends.use_after(0);
        let ends = Mutex::new(Some(ends));
        let unload = move |_| {
            drop(lock(&ends).take());
            let error = other.managed.acquire_blocking().expect_err("in a cleanup");
            assert!(matches!(error, ResourceError::Unloading { .. }), "{error:?}");
        };
        let managed = Managed::builder("b", || Ok(1)).unload(unload);
        let managed = managed.build(Arc::new(ManualClock::new()), None);
        drop(managed.acquire_blocking().expect("loads"));
        assert!(managed.unload_now(Duration::ZERO).expect("has no guards"));
        assert_eq!(managed.stats().unload_panics_total, 0);
    }

    #[test]
    fn each_use_counts_for_the_interval() {
        let bed = Bed::new();
        bed.use_after(0);
        (0..31).for_each(|_| bed.use_after(1));
        bed.clock.advance(Duration::from_millis(1));
        let interval = |bed: &Bed| bed.managed.stats().use_interval;
        assert_eq!(interval(&bed), Duration::from_millis(1), "32 uses in 32 ms");
        (0..64).for_each(|_| bed.use_after(1));
        assert_eq!(interval(&bed).as_micros(), 31 * 1000 / 32, "the last 32 in 31 ms");
    }
}
