//! Hooks that run just before a driver call, to make rare interleavings certain.
//!
//! A hook runs in the thread that makes the call, with no lock of the simulation held, and before
//! the call is counted, charged or can fail. Only calls of the [`Driver`](crate::device::Driver)
//! trait, which arenas make, trigger hooks; direct calls of a test do not.
//!
//! Invariant: each hook runs at most once.

use super::SimDriver;
use super::call::Call;
use lowtide_core::sync::atomic::{AtomicUsize, Ordering};
use lowtide_core::sync::{Mutex, lock};

type Act = Box<dyn FnOnce() + Send>;

/// The acts that wait for their call.
#[derive(Default)]
pub(super) struct Hooks {
    /// Most tests have no hook; a call then costs one more load.
    count: AtomicUsize,
    waiting: Mutex<Vec<(Call, u64, Act)>>,
}

impl Hooks {
    /// Runs what waits for this call.
    pub(super) fn before(&self, call: Call) {
        if self.count.load(Ordering::Acquire) == 0 {
            return;
        }
        let mut due = Vec::new();
        let mut waiting = lock(&self.waiting);
        let mut at = 0;
        while at < waiting.len() {
            let (of, left, _) = &mut waiting[at];
            if *of != call {
                at += 1;
            } else if *left > 0 {
                *left -= 1;
                at += 1;
            } else {
                due.push(waiting.remove(at).2);
            }
        }
        self.count.store(waiting.len(), Ordering::Release);
        drop(waiting);
        due.into_iter().for_each(|act| act());
    }
}

impl SimDriver {
    /// Runs `act` before the arena's next call of this kind but `nth`, in the thread that makes the
    /// call. A commit counts as [`Call::Create`], a decommit as [`Call::Unmap`], a remap as
    /// [`Call::Map`], each once for any number of handles.
    pub fn before(&self, call: Call, nth: u64, act: impl FnOnce() + Send + 'static) {
        let mut waiting = lock(&self.hooks.waiting);
        waiting.push((call, nth, Box::new(act)));
        self.hooks.count.store(waiting.len(), Ordering::Release);
    }
}
