//! The end of the driver's use when the process exits.
//!
//! The driver shuts down in an exit handler of its own, and a call by another thread after that may
//! crash the process. Exit handlers run in the reverse order of their registration: the one here is
//! registered after `cuInit` and the first context, so it runs before the driver's. It refuses
//! later calls and waits for those in progress. The threads themselves go on and are not joined:
//! one that waits for the exiting thread would block the exit.
//!
//! Invariant: when the handler returns, no call of a [`DeviceContext`](super::context::DeviceContext) is in
//! progress or begins, unless one took longer than the longest wait.
#![expect(unsafe_code, reason = "registering an exit handler is a C call")]

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

use super::calls::Answer;
use crate::DriverError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;

/// `CUDA_ERROR_DEINITIALIZED`
const DEINITIALIZED: u32 = 4;

/// The longest wait for calls in progress: in turns of a millisecond, a second. A guess: longer
/// than any call but a wait for the device's work, which must not hold up an exit.
const TURNS_MAX: u32 = 1_000;

static IS_OVER: AtomicBool = AtomicBool::new(false);
static RUNNING: AtomicUsize = AtomicUsize::new(0);
/// The process that registered the handler, which a forked child inherits.
static OWNER: OnceLock<Birth> = OnceLock::new();

/// A call in progress, until it is dropped.
pub(super) struct Running(());

impl Running {
    /// Records the begin of a call.
    ///
    /// # Errors
    /// Code 4 once the process exits.
    pub(super) fn enter() -> Answer<Self> {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        let running = Self(());
        if IS_OVER.load(Ordering::SeqCst) {
            return Err(DriverError::of_cuda("cuCtxSetCurrent", DEINITIALIZED, ByteSize::ZERO));
        }
        Ok(running)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        RUNNING.fetch_sub(1, Ordering::SeqCst);
    }
}

extern "C" fn end() {
    if !OWNER.get().is_some_and(|birth| birth.is_here()) {
        return;
    }
    IS_OVER.store(true, Ordering::SeqCst);
    for _ in 0..TURNS_MAX {
        if RUNNING.load(Ordering::SeqCst) == 0 {
            return;
        }
        // SAFETY: no precondition. The waits of `std` use thread-local values, gone at an exit.
        let _ = unsafe { libc::usleep(1_000) };
    }
}

/// Registers the handler, once. Call it after a context was retained.
pub(super) fn watch() {
    static REGISTER: Once = Once::new();
    REGISTER.call_once(|| {
        let _ = OWNER.set(Birth::now());
        // SAFETY: `end` has the required type and a static lifetime. A failure (ENOMEM) leaves the
        // exit unwatched.
        let _ = unsafe { libc::atexit(end) };
    });
}
