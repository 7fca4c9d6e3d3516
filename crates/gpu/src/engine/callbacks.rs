//! Callbacks that release memory when an arena has no idle memory left: the last step before an
//! error.
//!
//! Callbacks run after the arena's own steps: thread caches, idle memory, pending work of streams.
//! No lock is held while a callback runs, so it may use the arena freely: free, allocate, purge,
//! compact.
//!
//! Runs do not overlap. If a thread is short of memory during another thread's run, it waits for
//! the end of that run and checks if the released memory was enough; only then does it start its
//! own run. So ten threads that are short of memory do not unload ten models. A thread inside a
//! callback, of this arena or of another, waits for no run, and its allocations fail if there is no
//! room. So there is neither recursion nor a deadlock.
//!
//! Invariants: a callback starts only while it is registered; a run calls each callback that was
//! registered at its start at most once, in the order of registration; a thread that makes a run
//! waits for none.

use crate::types::Shortage;
use std::cell::Cell;
use std::sync::Arc;

use lowtide_core::fork::Birth;
use lowtide_core::log;
use lowtide_core::sync::{Condvar, Mutex, caught, lock, wait};

pub(crate) type Callback = Box<dyn Fn(&Shortage<'_>) -> bool + Send + Sync>;

/// The result of a run of callbacks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Called {
    pub(crate) calls: u64,
    pub(crate) panics: u64,
    /// `true` if a callback released memory, or may have.
    pub(crate) released: bool,
}

/// A callback, while it is registered or runs.
struct Registration {
    number: u64,
    /// The callback; taken out when the registration is dropped.
    callback: Option<Callback>,
}

impl Drop for Registration {
    /// Drops the callback. Its captures are foreign code, so a panic is caught.
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
    /// The registrations, in the order of their numbers.
    entries: Vec<Arc<Registration>>,
    /// The number of the last registration.
    numbered: u64,
    /// `true` while a thread calls the callbacks.
    is_running: bool,
}

#[cfg(not(lowtide_loom))]
thread_local! {
    /// `true` while this thread calls callbacks, of any arena.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
    /// `true` while this thread is within a call of a host budget, which is foreign code.
    static WITHIN_BUDGET: Cell<bool> = const { Cell::new(false) };
}
#[cfg(lowtide_loom)]
loom::thread_local! {
    static WITHIN: Cell<bool> = Cell::new(false);
    static WITHIN_BUDGET: Cell<bool> = Cell::new(false);
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

    pub(crate) fn register(&self, callback: Callback) -> u64 {
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

    pub(crate) fn forget(&self, number: u64) {
        if !self.birth.is_here() {
            return;
        }
        let mut state = lock(&self.state);
        let found = state.entries.binary_search_by_key(&number, |entry| entry.number);
        let entry = found.ok().map(|nth| state.entries.remove(nth));
        drop(state);
        drop(entry); // the captures may take any lock
    }

    /// Takes the turn to call the callbacks, if there are any; also returns `true` after a wait for
    /// another run. Returns `None` if this thread is within a callback and another run is in
    /// progress.
    pub(crate) fn take_turn(&self) -> Option<(CallbackTurn<'_>, bool)> {
        let mut state = lock(&self.state);
        let within = is_within();
        let mut waited = false;
        while !state.entries.is_empty() {
            if !state.is_running {
                state.is_running = true;
                WITHIN.with(|of| of.set(true));
                let turn = CallbackTurn { callbacks: self, last: state.numbered, within };
                return Some((turn, waited));
            }
            if within {
                return None;
            }
            waited = true;
            state = wait(&self.ended, state);
        }
        None
    }
}

/// The turn of a thread to call the callbacks. Ends when dropped.
pub(crate) struct CallbackTurn<'a> {
    callbacks: &'a Callbacks,
    /// The number of the last callback that was registered when the turn began.
    last: u64,
    /// `true` if the thread was within a callback of another arena before.
    within: bool,
}

impl Drop for CallbackTurn<'_> {
    fn drop(&mut self) {
        let is_here = self.callbacks.birth.is_here();
        WITHIN.with(|of| of.set(is_here && self.within));
        if is_here {
            lock(&self.callbacks.state).is_running = false;
            self.callbacks.ended.notify_all();
        }
    }
}

impl CallbackTurn<'_> {
    /// Calls all callbacks. Returns `None` if a callback forked, in the child.
    pub(crate) fn call(&self, shortage: &Shortage<'_>) -> Option<Called> {
        let mut called = Called::default();
        let mut after = 0;
        while let Some(entry) = self.next(after) {
            after = entry.number;
            let Some(callback) = &entry.callback else { continue };
            called.calls += 1;
            match caught(|| callback(shortage)) {
                Ok(released) => called.released |= released,
                Err(message) => {
                    called.panics += 1;
                    called.released = true; // some memory may have been released before the panic
                    let arena = shortage.arena;
                    log!(warn, arena, message, "shortage callback panicked");
                }
            }
            if !self.callbacks.birth.is_here() {
                return None;
            }
        }
        Some(called)
    }

    /// Returns the first callback of the turn whose number is greater than `after`.
    fn next(&self, after: u64) -> Option<Arc<Registration>> {
        let state = lock(&self.callbacks.state);
        let nth = state.entries.partition_point(|entry| entry.number <= after);
        state.entries.get(nth).filter(|entry| entry.number <= self.last).map(Arc::clone)
    }
}

/// Returns `true` if this thread is within a call of a host budget. Such a thread may be the one
/// that puts the arena to sleep, and so must not wait for the end of that sleep.
pub(crate) fn is_within_budget() -> bool {
    WITHIN_BUDGET.with(Cell::get)
}

/// Calls or drops the foreign code of a budget, with no lock held. The error is the message of a
/// panic in that code.
pub(crate) fn call_budget<T>(act: impl FnOnce() -> T) -> Result<T, String> {
    let before = WITHIN_BUDGET.with(|of| of.replace(true));
    let outcome = caught(act);
    WITHIN_BUDGET.with(|of| of.set(before));
    outcome
}
