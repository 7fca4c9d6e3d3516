//! Callbacks that release memory when an arena has none left: the last step before an error.
//!
//! They run after the arena's own steps: thread caches, idle memory, pending work of streams. No
//! lock is held while one runs, so it may use the arena freely: free, allocate, purge, compact.
//!
//! Runs do not overlap. A thread that is short during another thread's run waits for its end and
//! checks if that was enough, so ten threads that are short do not unload ten models. Only then it
//! starts its own run. A thread inside a callback, of this arena or of another, waits for no run,
//! and its allocations fail if there is no room: so there is neither recursion nor a deadlock.
//!
//! Invariants: a callback starts only while it is registered; a run calls each callback that was
//! registered at its start at most once, in the order of registration; a thread that makes a run
//! waits for none.

use lowtide_core::log;
use std::cell::Cell;
use std::fmt;
use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::engine::commit::Attempt;
use crate::engine::refusal::{AllocFailure, Cause};
use crate::exec::inner::ArenaInner;
use crate::state::region::Region;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Condvar, Mutex, caught, lock, wait};

/// The resource that is short.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ShortageInfo {
    /// The allocation would exceed the limit.
    Limit {
        /// Bytes above the limit after all idle memory is released: this many bytes of granules
        /// must become idle.
        over: ByteSize,
    },
    /// The device is out of memory, and the arena has no idle memory.
    Device,
    /// The region has no free span of addresses that is long enough.
    Addresses,
}

/// The argument of a shortage callback.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Shortage<'a> {
    /// The arena's name.
    pub arena: &'a str,
    /// The region of the allocation. Idle memory of either region helps; addresses only of this
    /// one.
    pub region: Region,
    /// The size of the block.
    pub requested: ByteSize,
    /// The resource that is short.
    pub cause: ShortageInfo,
}

type Callback = Box<dyn Fn(&Shortage<'_>) -> bool + Send + Sync>;

/// A callback, for as long as it is registered or runs.
struct Registration {
    number: u64,
    /// Taken out when it is dropped.
    callback: Option<Callback>,
}

impl Drop for Registration {
    /// A callback's captures are foreign code; no panic leaves a drop.
    fn drop(&mut self) {
        let callback = self.callback.take();
        let _ = caught(|| drop(callback));
    }
}

/// The callbacks of an arena, and the turn to call them.
pub(crate) struct Callbacks {
    state: Mutex<CallbacksState>,
    ended: Condvar,
    birth: Birth,
}

#[derive(Default)]
struct CallbacksState {
    /// In the order of their numbers.
    entries: Vec<Arc<Registration>>,
    /// The number of the last one.
    numbered: u64,
    /// A run is under way.
    running: bool,
}

/// Keeps a callback registered; see [`DeviceArena::on_shortage`].
#[must_use = "the callback is registered for as long as this is kept"]
pub struct ShortageCallback {
    callbacks: Arc<Callbacks>,
    number: u64,
}

impl DeviceArena {
    /// Registers a callback that releases memory when this arena has none left: after thread
    /// caches, its own idle memory and pending work of streams, and before an allocation, a resize
    /// or a wake fails. All registered callbacks are called in order of registration, on the thread
    /// that is short. Each returns `true` if it released memory. If any did, the allocation is
    /// retried once.
    ///
    /// A callback runs without a lock and may use the arena. Its own allocations call no callbacks;
    /// they fail if the arena is being woken. It must not wait for a thread that allocates here,
    /// which may be waiting for this run; nor for a lock that another thread holds while allocating
    /// here: use `try_lock`. A panic is counted and logged; the other callbacks still run.
    ///
    /// It stays registered until the return value is dropped. No call starts after that; a call in
    /// progress on another thread finishes, and the callback is dropped then. A callback that holds
    /// a handle of the arena keeps it open until then. In a forked child no callback is registered.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use lowtide_gpu::ByteSize;
    /// use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    ///
    /// let config = ArenaConfig { limit: ByteSize::mib(8), ..ArenaConfig::new("model") };
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let cache = Arc::new(Mutex::new(vec![arena.alloc::<u8>(6 << 20, Region::Dynamic)?]));
    /// let evict = arena.on_shortage({
    ///     let cache = Arc::clone(&cache);
    ///     move |_| cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
    /// });
    /// let needed = arena.alloc::<u8>(4 << 20, Region::Dynamic)?; // evicts the cache
    /// assert!(cache.lock().unwrap().is_empty());
    /// # drop((evict, needed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn on_shortage(
        &self,
        callback: impl Fn(&Shortage<'_>) -> bool + Send + Sync + 'static,
    ) -> ShortageCallback {
        let callbacks = Arc::clone(&self.inner().callbacks);
        let number = callbacks.register(Box::new(callback));
        ShortageCallback { callbacks, number }
    }
}

impl Drop for ShortageCallback {
    /// Waits for no call. In a forked child does nothing.
    fn drop(&mut self) {
        self.callbacks.forget(self.number);
    }
}

impl fmt::Debug for ShortageCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ShortageCallback").field("number", &self.number).finish_non_exhaustive()
    }
}

#[cfg(not(lowtide_loom))]
thread_local! {
    /// `true` while this thread calls callbacks, of any arena.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}
#[cfg(lowtide_loom)]
loom::thread_local! {
    static WITHIN: Cell<bool> = Cell::new(false);
}

/// Returns `true` if this thread is within a callback, of any arena.
pub(crate) fn is_within() -> bool {
    WITHIN.with(Cell::get)
}

impl Callbacks {
    pub(crate) fn new() -> Self {
        let state = Mutex::new(CallbacksState::default());
        Self { state, ended: Condvar::new(), birth: Birth::now() }
    }

    fn register(&self, callback: Callback) -> u64 {
        let entry = |number| Arc::new(Registration { number, callback: Some(callback) });
        if !self.birth.is_here() {
            drop(entry(0));
            return 0;
        }
        let mut state = lock(&self.state);
        state.numbered += 1;
        let number = state.numbered;
        state.entries.push(entry(number));
        number
    }

    fn forget(&self, number: u64) {
        if !self.birth.is_here() {
            return;
        }
        let mut state = lock(&self.state);
        let found = state.entries.binary_search_by_key(&number, |entry| entry.number);
        let entry = found.ok().map(|nth| state.entries.remove(nth));
        drop(state);
        drop(entry); // its captures may lock anything
    }

    /// Takes the turn to call callbacks, if there are any; also returns `true` if another run was
    /// waited for. `None` within a callback while the turn is taken.
    pub(crate) fn turn(&self) -> Option<(CallbackTurn<'_>, bool)> {
        let mut state = lock(&self.state);
        let within = is_within();
        let mut waited = false;
        while !state.entries.is_empty() {
            if !state.running {
                state.running = true;
                WITHIN.with(|of| of.set(true));
                return Some((
                    CallbackTurn { callbacks: self, last: state.numbered, within },
                    waited,
                ));
            }
            if within {
                return None;
            }
            waited = true;
            state = wait(&self.ended, state);
        }
        None
    }

    /// The first callback after a number, up to another.
    fn next(&self, after: u64, last: u64) -> Option<Arc<Registration>> {
        let state = lock(&self.state);
        let nth = state.entries.partition_point(|entry| entry.number <= after);
        state.entries.get(nth).filter(|entry| entry.number <= last).map(Arc::clone)
    }
}

/// The turn to call the callbacks.
pub(crate) struct CallbackTurn<'a> {
    callbacks: &'a Callbacks,
    /// The last callback that was registered when it began.
    last: u64,
    /// The thread was within a callback of another arena before.
    within: bool,
}

/// The result of a run.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct RunResult {
    pub(crate) calls: u64,
    pub(crate) panics: u64,
    /// `true` if a callback released memory, or may have.
    pub(crate) gave: bool,
}

impl CallbackTurn<'_> {
    /// Calls all of them.
    pub(crate) fn ask(&self, shortage: &Shortage<'_>) -> RunResult {
        let mut asked = RunResult::default();
        let mut after = 0;
        while let Some(entry) = self.callbacks.next(after, self.last) {
            after = entry.number;
            let Some(callback) = &entry.callback else { continue };
            asked.calls += 1;
            match caught(|| callback(shortage)) {
                Ok(gave) => asked.gave |= gave,
                Err(message) => {
                    asked.panics += 1;
                    asked.gave = true; // its progress is unknown
                    let arena = shortage.arena;
                    log!(warn, arena, message, "shortage callback panicked");
                }
            }
            if !self.callbacks.birth.is_here() {
                break; // it forked, and this is the child
            }
        }
        asked
    }
}

impl Drop for CallbackTurn<'_> {
    fn drop(&mut self) {
        WITHIN.with(|of| of.set(self.within));
        if self.callbacks.birth.is_here() {
            lock(&self.callbacks.state).running = false;
            self.callbacks.ended.notify_all();
        }
    }
}

impl ArenaInner {
    /// Calls the callbacks and retries; the earlier error stands if no callback released memory.
    pub(crate) fn ask_for_room<T>(
        &self,
        region: Region,
        mut refusal: AllocFailure,
        attempt: &Attempt<'_, T>,
    ) -> Result<T, AllocFailure> {
        let Some((turn, waited)) = self.callbacks.turn() else { return Err(refusal) };
        if waited {
            // Memory released for another thread may be enough for this one as well.
            match self.after_pending(attempt) {
                Err(again) if again.is_shortage() => refusal = again,
                outcome => return outcome,
            }
        }
        let (requested, cause) = numbers(&refusal);
        let asked = turn.ask(&Shortage { arena: &self.name, region, requested, cause });
        if self.check_here().is_err() {
            return Err(AllocFailure { cause: Cause::Uncounted, error: DeviceError::Forked });
        }
        let mut books = self.lock();
        books.totals.shortage_calls += asked.calls;
        books.totals.shortage_panics += asked.panics;
        drop(books);
        log!(
            debug,
            arena = self.name,
            calls = asked.calls,
            released = asked.gave,
            "shortage callbacks called"
        );
        if asked.gave { self.after_pending(attempt) } else { Err(refusal) }
    }
}

/// Returns the figures of a refusal for callbacks.
pub(super) fn numbers(refusal: &AllocFailure) -> (ByteSize, ShortageInfo) {
    let requested = match refusal.error {
        DeviceError::OutOfMemory { requested, .. }
        | DeviceError::OutOfAddresses { requested, .. } => requested,
        _ => ByteSize::ZERO,
    };
    let cause = match refusal.cause {
        Cause::Limit { over } => ShortageInfo::Limit { over: ByteSize::new(over) },
        Cause::Addresses => ShortageInfo::Addresses,
        Cause::Device | Cause::Driver | Cause::Uncounted => ShortageInfo::Device,
    };
    (requested, cause)
}

impl fmt::Debug for Callbacks {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Callbacks").finish_non_exhaustive()
    }
}
