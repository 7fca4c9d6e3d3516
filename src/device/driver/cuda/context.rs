//! A device's primary context, retained, and made current for each call.
//!
//! A thread may have none (the worker, a thread that drops a buffer) or another device's; cudarc's
//! users share the primary context of a device with us. The context that a thread had is current
//! again afterwards, so that nobody's own calls go to our device.
//!
//! Invariant: `retains = releases` once it is dropped, in the process that opened it.

use super::calls::{Answer, Calls};
use crate::bytes::ByteSize;
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

    /// For calls that need no context.
    pub(super) const fn calls(&self) -> &Calls {
        &self.calls
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

/// A context, and a stream of our own in it: for copies that are waited for, and for what goes in
/// the order of a stream.
#[derive(Debug)]
pub(super) struct Seat {
    pub(super) context: Context,
    pub(super) own: usize,
    /// What the device held then.
    pub(super) floor: Option<ByteSize>,
}

impl Seat {
    /// Retains the context of a device and makes the stream; holds nothing where either fails.
    pub(super) fn take(calls: Calls, device: i32) -> Answer<Self> {
        let context = Context::retain(calls, device)?;
        let own = context.call(Calls::stream_create)?;
        // Where it cannot be had it is unknown, and a trial of the memory says what is wrong.
        let info = context.call(Calls::memory_info).ok();
        let floor = info.map(|(free, total)| total.saturating_sub(free));
        Ok(Self { context, own, floor })
    }

    /// As [`Context::call`].
    pub(super) fn call<T>(&self, act: impl FnOnce(&Calls) -> Answer<T>) -> Answer<T> {
        self.context.call(act)
    }
}

impl Drop for Seat {
    /// In a forked child does nothing.
    fn drop(&mut self) {
        if self.context.is_here() {
            let _ = self.call(|calls| calls.stream_destroy(self.own));
        }
    }
}
