//! A device's retained primary context, made current for each call.
//!
//! A thread may have no context (the worker, a thread that drops a buffer) or another device's
//! context; users of cudarc share the device's primary context with this crate. A thread may also
//! respect the graph captures of other threads (`CUstreamCaptureMode`, global by default), so an
//! unsafe call during a capture would fail and invalidate it, no matter which stream captures. Each
//! call therefore makes the context current and relaxes the thread's mode, then restores both, even
//! if the thread had no context or a panic unwinds. No code of the program runs in between: log
//! subscribers see an error after the restore.
//!
//! A relaxed mode protects every capture from every call here except one: waiting for the whole
//! context invalidates captures in any mode
//! ([`Driver::synchronize`](crate::Driver)).
//!
//! Invariants: `retains = releases` after the drop, in the process that opened it; a call leaves
//! the thread's context and mode unchanged.
#![expect(unsafe_code, reason = "registering an exit handler is a C call")]

use std::marker::PhantomData;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Once, OnceLock};

use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;

use super::calls::Calls;
use super::table::{CAPTURE_RELAXED, STREAM_NON_BLOCKING};
use crate::DriverError;
use crate::error::DriverResult;

/// A primary context and a private stream in it, for copies that are waited for and for
/// stream-ordered work.
#[derive(Debug)]
pub(super) struct DeviceContext {
    calls: Calls,
    device: i32,
    /// The context; 0 before it is retained.
    handle: usize,
    birth: Birth,
    /// The private stream; 0 before it is created.
    pub(super) stream: usize,
    /// Bytes in use on the device when the context was created.
    pub(super) overhead: Option<ByteSize>,
}

/// Restores the calling thread's context and capture mode when dropped.
struct EnteredContext<'a> {
    calls: &'a Calls,
    /// The context to restore, 0 for none; `None` if it is unchanged.
    context: Option<usize>,
    /// The mode to restore; `None` if it is unchanged.
    mode: Option<u32>,
    _running: CallInProgress,
    /// Both belong to the thread, so this value must be dropped there.
    _here: PhantomData<*const ()>,
}

impl<'a> EnteredContext<'a> {
    /// Makes a context current on this thread, unless the calls need none, and relaxes the thread's
    /// capture mode.
    fn new(calls: &'a Calls, context: Option<usize>) -> DriverResult<Self> {
        let running = CallInProgress::enter()?;
        let mut entered =
            Self { calls, context: None, mode: None, _running: running, _here: PhantomData };
        if let Some(context) = context {
            let before = calls.context_current()?;
            if before != context {
                calls.context_set(context)?;
                entered.context = Some(before);
            }
        }
        let mut mode = CAPTURE_RELAXED;
        calls.capture_mode(&mut mode)?;
        entered.mode = Some(mode).filter(|&mode| mode != CAPTURE_RELAXED);
        Ok(entered)
    }
}

impl Drop for EnteredContext<'_> {
    fn drop(&mut self) {
        if let Some(mode) = &mut self.mode {
            let _ = self.calls.capture_mode(mode);
        }
        if let Some(context) = self.context {
            // If this fails the context is gone, and its owner will find out.
            let _ = self.calls.context_set(context);
        }
    }
}

impl DeviceContext {
    /// Wraps the calls for a device, whose context is not retained yet.
    pub(super) fn new(calls: Calls, device: i32) -> Self {
        Self { calls, device, handle: 0, birth: Birth::now(), stream: 0, overhead: None }
    }

    /// Retains the primary context of the device, and creates the stream, once. The first call in a
    /// process creates the context, which is slow.
    pub(super) fn retain(&mut self) -> DriverResult {
        if self.handle != 0 {
            return Ok(());
        }
        let entered = EnteredContext::new(&self.calls, None)?;
        self.handle = self.calls.context_retain(self.device)?;
        drop(entered);
        watch();
        self.stream = self.call(|calls| calls.create_stream(STREAM_NON_BLOCKING))?;
        // If the query fails the value is unknown, and the trial of the memory reports the cause.
        let info = self.call(Calls::memory_info).ok();
        self.overhead = info.map(|(free, total)| total.saturating_sub(free));
        Ok(())
    }

    /// Returns the calls that need no context.
    pub(super) const fn calls(&self) -> &Calls {
        &self.calls
    }

    /// Returns the number of the context.
    pub(super) const fn number(&self) -> u64 {
        self.handle as u64
    }

    /// Returns `true` if this is still the process that opened it.
    pub(super) fn is_here(&self) -> bool {
        self.birth.is_here()
    }

    /// Makes calls in this context with the thread's capture mode relaxed, regardless of the
    /// thread's own context. `act` runs no code of the program.
    ///
    /// The list of results that mean a lost context is not complete: a device that fell off the
    /// bus answers 999, 806 or 46. After any other refusal, a query that changes nothing decides.
    ///
    /// # Errors
    /// [`DriverError::Forked`] in a forked child; those of `act`.
    pub(super) fn call<T>(&self, act: impl FnOnce(&Calls) -> DriverResult<T>) -> DriverResult<T> {
        if !self.is_here() {
            return Err(DriverError::Forked);
        }
        let enter = || EnteredContext::new(&self.calls, Some(self.handle));
        let entered = enter().map_err(|error| judged(error, || enter().map(drop)))?;
        let query = || self.calls.memory_info().map(drop);
        let outcome = act(&self.calls).map_err(|error| judged(error, query));
        drop(entered);
        self.calls.log_not_undone();
        outcome
    }
}

/// Returns a refusal as a loss of the context if a query is refused too.
fn judged(error: DriverError, query: impl FnOnce() -> DriverResult) -> DriverError {
    match error {
        DriverError::Refused { call, code, message } => match query() {
            Err(again) if again.code().is_some() => {
                DriverError::ContextLost { call, code, message }
            }
            _ => DriverError::Refused { call, code, message },
        },
        error => error,
    }
}

impl Drop for DeviceContext {
    /// Destroys the stream and the spare events, and releases the context, if it was retained. Does
    /// nothing in a forked child, and while the process exits.
    fn drop(&mut self) {
        if self.handle == 0 || !self.is_here() {
            return;
        }
        if self.stream != 0 {
            let _ = self.call(|calls| {
                calls.destroy_spare_events();
                calls.stream_destroy(self.stream)
            });
        }
        if let Ok(_running) = CallInProgress::enter() {
            let _relaxed = EnteredContext::new(&self.calls, None);
            let _ = self.calls.context_release(self.device);
        }
    }
}

// The end of the driver's use when the process exits.
//
// The driver shuts down in an exit handler of its own, and a call by another thread after that may
// crash the process. Exit handlers run in the reverse order of their registration: the one here is
// registered after `cuInit` and the first context, so it runs before the driver's. It refuses
// later calls and waits for those in progress. The threads themselves go on and are not joined:
// one that waits for the exiting thread would block the exit.
//
// Invariant: when the handler returns, no call of a `DeviceContext` is in progress or begins,
// unless one took longer than the longest wait.

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
pub(super) struct CallInProgress(());

impl CallInProgress {
    /// Records the begin of a call.
    ///
    /// # Errors
    /// Code 4 once the process exits.
    pub(super) fn enter() -> DriverResult<Self> {
        RUNNING.fetch_add(1, Ordering::SeqCst);
        let running = Self(());
        if IS_OVER.load(Ordering::SeqCst) {
            return Err(DriverError::of_cuda("cuCtxSetCurrent", DEINITIALIZED, ByteSize::ZERO));
        }
        Ok(running)
    }
}

impl Drop for CallInProgress {
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
