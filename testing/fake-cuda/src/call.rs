//! The path of every exported call: counted, failed on request, kept from panicking across the
//! boundary.
//!
//! Invariant: each call is counted once, whatever it answers.

use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind};

use crate::state::state;

/// The answer of a call: a result of cuda.h other than success is the error.
pub(crate) type Answer<T = ()> = Result<T, u32>;

pub(crate) const INVALID_VALUE: u32 = 1;
pub(crate) const OUT_OF_MEMORY: u32 = 2;
pub(crate) const NOT_INITIALIZED: u32 = 3;
pub(crate) const NO_DEVICE: u32 = 100;
pub(crate) const INVALID_DEVICE: u32 = 101;
pub(crate) const INVALID_CONTEXT: u32 = 201;
pub(crate) const INVALID_PTX: u32 = 218;
pub(crate) const INVALID_HANDLE: u32 = 400;
pub(crate) const NOT_FOUND: u32 = 500;
pub(crate) const NOT_READY: u32 = 600;
pub(crate) const CONTEXT_DESTROYED: u32 = 709;
pub(crate) const NOT_PERMITTED: u32 = 800;
pub(crate) const NOT_SUPPORTED: u32 = 801;
pub(crate) const UNKNOWN: u32 = 999;

thread_local! {
    /// `true` while this thread runs a function of the host for the device.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// Runs a function of the host: it may call nothing of CUDA (800).
pub(crate) fn as_callback(function: impl FnOnce()) {
    let before = IN_CALLBACK.replace(true);
    function();
    IN_CALLBACK.set(before);
}

/// Makes a call of this name.
pub(crate) fn called(name: &'static str, call: impl FnOnce() -> Answer) -> u32 {
    let made = catch_unwind(AssertUnwindSafe(|| {
        let planned = state().count(name);
        // cuda.h, cuLaunchHostFunc: "The host function must not make any CUDA API calls."
        if IN_CALLBACK.get() {
            return Err(NOT_PERMITTED);
        }
        planned.map_or_else(call, Err)
    }));
    match made {
        Ok(Ok(())) => 0,
        Ok(Err(code)) => code,
        Err(panic) => {
            let text = panic.downcast_ref::<String>().cloned();
            let text = text.or_else(|| panic.downcast_ref::<&str>().map(|it| (*it).to_owned()));
            let text = text.unwrap_or_default();
            state().on_record(format!("{name} panicked: {text}"));
            UNKNOWN
        }
    }
}
