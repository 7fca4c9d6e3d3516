//! Calls a host budget, which is foreign code, and marks the calling thread meanwhile.
//!
//! Invariant: a thread is marked exactly while it is within such a call.

use std::cell::Cell;

use lowtide_core::sync::caught;

#[cfg(not(lowtide_loom))]
thread_local! {
    /// `true` while this thread is within a call of a host budget.
    static WITHIN: Cell<bool> = const { Cell::new(false) };
}
#[cfg(lowtide_loom)]
loom::thread_local! {
    static WITHIN: Cell<bool> = Cell::new(false);
}

/// Returns `true` if this thread is within a call of a host budget. Such a thread may be the one
/// that puts the arena to sleep, and so must not wait for the end of that sleep.
pub(crate) fn is_within() -> bool {
    WITHIN.with(Cell::get)
}

/// Calls or drops the foreign code of a budget, with no lock held. The error is the message of a
/// panic in that code.
pub(crate) fn call(act: &mut dyn FnMut()) -> Result<(), String> {
    let before = WITHIN.with(|of| of.replace(true));
    let outcome = caught(act);
    WITHIN.with(|of| of.set(before));
    outcome
}
