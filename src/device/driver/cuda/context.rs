//! A device's primary context, retained, and made current for each call.
//!
//! A thread may have none (the worker, a thread that drops a buffer) or another device's; cudarc's
//! users share the primary context of a device with us. The context that a thread had is current
//! again afterwards, so that nobody's own calls go to our device.
//!
//! Invariant: `retains = releases` once it is dropped, in the process that opened it.

use super::calls::{Answer, Calls};
use crate::fork::Birth;

/// A retained primary context.
#[derive(Debug)]
pub(super) struct Context {
    calls: Calls,
    device: i32,
    handle: usize,
    birth: Birth,
}

impl Context {
    /// Retains the primary context of a device. The first in a process makes it, which takes long.
    pub(super) fn retain(calls: Calls, device: i32) -> Answer<Self> {
        let handle = calls.context_retain(device)?;
        Ok(Self { calls, device, handle, birth: Birth::now() })
    }

    /// How many calls were made.
    pub(super) fn calls_made(&self) -> u64 {
        self.calls.made()
    }

    /// Its number.
    pub(super) const fn number(&self) -> u64 {
        self.handle as u64
    }

    /// Whether this is still the process that opened it.
    pub(super) fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// Makes calls in this context, whatever the thread had.
    pub(super) fn call<T>(&self, act: impl FnOnce(&Calls) -> Answer<T>) -> Answer<T> {
        let before = self.calls.context_current()?;
        if before == self.handle {
            return act(&self.calls);
        }
        self.calls.context_set(self.handle)?;
        let outcome = act(&self.calls);
        if before != 0 {
            // Where that fails the context that was current is gone, and its owner finds out.
            let _ = self.calls.context_set(before);
        }
        outcome
    }
}

impl Drop for Context {
    /// Releases it: one call. In a forked child does nothing.
    fn drop(&mut self) {
        if self.birth.is_here() {
            let _ = self.calls.context_release(self.device);
        }
    }
}
