//! The access of an operation to the state and to the world outside of the state.
//!
//! An operation is an `async` function over an [`OpContext`]. No runtime polls it: each poll is one
//! step, made by [`step`] with the state lent to the context. Between two awaits an operation reads
//! and changes the state freely, and all of that is atomic. To have the lock released, an operation
//! awaits a request: a wait, a driver call, or other code. So an operation knows no lock or thread,
//! and a test can interleave its steps with other operations in any order.
//!
//! Invariants: the state is lent only during a step; a step ends with its outcome or with exactly
//! one request; an operation that is dropped between a call and its answer leaves the marks of the
//! call in the state, so that the ranges of the call are never used again.
#![expect(unsafe_code, reason = "the calls of drivers that take memory away are unsafe")]

use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::ops::ControlFlow;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::callbacks::Callbacks;
use crate::driver::{DeviceAddress, Driver, DriverError, StreamHandle};
use crate::state::{ArenaState, PlacedRun, StreamEvent, StreamKey};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};

/// The request of an operation, after which it makes its next step.
#[derive(Debug)]
pub(crate) enum OpRequest {
    /// Step again after another operation has changed the state. Nothing has changed since the
    /// last wait if it is repeated.
    Wait { is_repeated: bool },
    /// Step again when the bell rings, or at the deadline.
    WaitUntil(Arc<Bell>, Moment),
    /// Call [`run_outside`] with the lock released, and step again.
    Outside,
}

/// The caches of an arena, which are outside its state. They are called with the lock released
/// ([`OpContext::outside`]).
pub(crate) trait Surroundings {
    /// Returns `true` if a cache may hold a block. May be called in a step.
    fn caches_hold(&self) -> bool;

    /// Frees the cached blocks that the taker's stream may use without a wait, because memory would
    /// be committed otherwise; those of all caches if together they hold more than one may. Returns
    /// `true` if there were any.
    fn empty_caches_for(&self, taker: Option<StreamKey>) -> bool;

    /// Updates the live share of the limit, which decides if the caches keep blocks. May be called
    /// in a step.
    fn note_live(&self, live: u64, limit: u64);

    /// Keeps the caches of threads and lanes empty from here on, and frees the blocks in them.
    /// Returns `true` if there were any.
    fn shut_caches(&self) -> bool;

    /// Ends one [`Surroundings::shut_caches`].
    fn reopen_caches(&self);

    /// Keeps the caches empty while the arena sleeps. May be called in a step: takes no lock that
    /// is held while the state's lock is taken.
    fn set_asleep(&self, is_asleep: bool);
}

/// Lends the state to an operation, and takes the operation's requests.
pub(crate) struct OpContext<'a> {
    state: RefCell<Option<Box<ArenaState>>>,
    request: Cell<Option<OpRequest>>,
    /// The driver, called with the lock released.
    pub(crate) driver: &'a dyn Driver,
    /// The clock, for operations that need the time.
    pub(crate) clock: &'a dyn Clock,
    pub(crate) surroundings: &'a dyn Surroundings,
    /// The callbacks for shortage of memory, called with the lock released.
    pub(crate) callbacks: &'a Callbacks,
}

/// Returns the state to its owner at the end of a step, also if the step panics.
struct Lent<'a, 'b> {
    cx: &'a OpContext<'b>,
    slot: &'a mut Option<Box<ArenaState>>,
}

impl Drop for Lent<'_, '_> {
    fn drop(&mut self) {
        *self.slot = self.cx.state.take();
    }
}

/// Runs the next step of an operation on a state. Returns its outcome, or its request.
pub(crate) fn step<F: Future + ?Sized>(
    cx: &OpContext<'_>,
    slot: &mut Option<Box<ArenaState>>,
    operation: Pin<&mut F>,
) -> ControlFlow<F::Output, OpRequest> {
    cx.state.replace(slot.take());
    let lent = Lent { cx, slot };
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    drop(lent);
    match polled {
        Poll::Ready(outcome) => ControlFlow::Break(outcome),
        Poll::Pending => ControlFlow::Continue(cx.request.take().expect("it waits for something")),
    }
}

/// Runs the code that an operation asked to run with the lock released.
pub(crate) fn run_outside<F: Future + ?Sized>(cx: &OpContext<'_>, operation: Pin<&mut F>) {
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    let is_back = polled.is_pending() && cx.request.take().is_none();
    assert!(is_back, "an operation that left the lock takes it again");
}

/// Keeps the caches of an arena empty until it is dropped.
pub(crate) struct ShutCaches<'a>(&'a dyn Surroundings);

impl<'a> ShutCaches<'a> {
    /// Empties the caches; also returns `true` if they held a block.
    pub(crate) fn shut(surroundings: &'a dyn Surroundings) -> (Self, bool) {
        let held = surroundings.shut_caches();
        (Self(surroundings), held)
    }
}

impl Drop for ShutCaches<'_> {
    fn drop(&mut self) {
        self.0.reopen_caches();
    }
}

impl<'a> OpContext<'a> {
    pub(crate) fn new(
        driver: &'a dyn Driver,
        clock: &'a dyn Clock,
        surroundings: &'a dyn Surroundings,
        callbacks: &'a Callbacks,
    ) -> Self {
        let (state, request) = (RefCell::new(None), Cell::new(None));
        Self { state, request, driver, clock, surroundings, callbacks }
    }

    /// Reads or changes the state.
    ///
    /// # Panics
    /// If this is called within itself, or by code that runs outside the lock.
    #[inline]
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut ArenaState) -> R) -> R {
        act(self.state.borrow_mut().as_deref_mut().expect("the state is lent during a step"))
    }

    /// Releases the lock until other operations have changed the state such that the condition is
    /// false. The condition only reads. So a repeated wait notifies no other operation: two that
    /// wait would wake each other in turns.
    pub(crate) async fn wait_while(&self, condition: impl Fn(&ArenaState) -> bool) {
        let mut is_repeated = false;
        while self.with(|state| condition(state)) {
            self.ask(OpRequest::Wait { is_repeated }).await;
            is_repeated = true;
        }
    }

    /// Waits for the next result of a driver call on granules, while such a call is in progress and
    /// the condition holds.
    pub(super) async fn wait_for_result(&self, condition: impl Fn(&ArenaState) -> bool) {
        let results = self.with(|state| state.results);
        self.wait_while(|state| {
            let memory = state.memory();
            let is_in_progress = memory.leaving + memory.committing > 0;
            state.results == results && is_in_progress && condition(state)
        })
        .await;
    }

    /// Releases the lock until the bell rings or the deadline passes.
    pub(crate) async fn wait_until(&self, bell: Arc<Bell>, deadline: Moment) {
        self.ask(OpRequest::WaitUntil(bell, deadline)).await;
    }

    /// Makes a driver call, or runs other code that is not part of the engine, with the lock
    /// released. The ranges of a call are marked before it. The caller awaits the result at once:
    /// it is requested before the first poll.
    pub(crate) fn outside<R>(&self, act: impl FnOnce() -> R) -> impl Future<Output = R> {
        self.request.set(Some(OpRequest::Outside));
        let (mut is_asked, mut act, mut result) = (false, Some(act), None);
        poll_fn(move |_| {
            if !std::mem::replace(&mut is_asked, true) {
                return Poll::Pending;
            }
            if let Some(act) = act.take() {
                result = Some(act());
                return Poll::Pending; // takes the lock again
            }
            result.take().map_or(Poll::Pending, Poll::Ready)
        })
    }

    /// Writes a log line, which gets the arena's name, with the lock released.
    pub(super) async fn log(&self, write: impl FnOnce(&str)) {
        let arena = self.with(|state| state.name.clone());
        self.outside(|| write(&arena)).await;
    }

    fn ask(&self, request: OpRequest) -> impl Future<Output = ()> {
        self.request.set(Some(request));
        let mut is_asked = false;
        poll_fn(move |_| {
            if std::mem::replace(&mut is_asked, true) { Poll::Ready(()) } else { Poll::Pending }
        })
    }
}

// Driver calls that several operations make. They are safe because an operation makes a call only
// after it has marked the ranges of the call in the state: the marks are the precondition of the
// driver's unsafe calls.
//
// Invariant: until the answer of a call is recorded, its marks keep other operations from its
// ranges; if no answer is recorded, the ranges stay marked.

impl OpContext<'_> {
    /// Commits a run of bare granules, marked as committing, or as leaving by the same operation.
    pub(super) fn commit(&self, run: PlacedRun) -> impl Future<Output = Result<(), DriverError>> {
        let PlacedRun { at, size, handle, .. } = run;
        // SAFETY: the granules are marked by the operation, and bare.
        self.outside(move || unsafe { self.driver.commit(at, size, handle) })
    }

    /// Releases a run of committed granules, whole handles, or a whole segment on drivers that
    /// allocate segments: marked as leaving, or as committing by the same operation. Every use of
    /// it is complete.
    pub(super) fn decommit(&self, run: PlacedRun) -> impl Future<Output = Result<(), DriverError>> {
        let PlacedRun { at, size, handle, .. } = run;
        let is_whole = self.with(|state| state.is_whole());
        self.outside(move || {
            if is_whole {
                // SAFETY: a whole segment that is marked as leaving and unused.
                return unsafe { self.driver.segment_destroy(at, size) };
            }
            // SAFETY: the granules are marked by the operation, and every use of them is complete.
            unsafe { self.driver.decommit(at, size, handle) }
        })
    }

    /// Copies between two committed ranges that do not overlap. The operation holds both blocks,
    /// and no work uses them.
    pub(super) fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    ) -> impl Future<Output = Result<(), DriverError>> {
        // SAFETY: two committed ranges that the operation holds, and that no work uses.
        self.outside(move || unsafe { self.driver.copy(from, to, size) })
    }

    /// Returns `true` if a stream captures a graph. The stream exists until the answer is recorded.
    pub(super) async fn is_capturing(&self, stream: StreamHandle) -> Result<bool, DriverError> {
        // SAFETY: the stream exists until the answer is recorded.
        self.outside(move || unsafe { self.driver.is_capturing(stream) }).await
    }

    /// Waits for the work of a stream that exists until the answer is recorded.
    pub(super) async fn synchronize(&self, stream: StreamHandle) -> Result<(), DriverError> {
        // SAFETY: the stream exists until the answer is recorded.
        self.outside(move || unsafe { self.driver.stream_synchronize(stream) }).await
    }

    /// Returns `true` if an event that the operation holds is complete.
    pub(super) async fn query_event(&self, event: StreamEvent) -> Result<bool, DriverError> {
        // SAFETY: the event is the state's, which destroys events at its end only.
        self.outside(move || unsafe { self.driver.event_query(event.handle) }).await
    }

    /// Waits for an event that the operation holds.
    pub(super) async fn wait_for_event(&self, event: StreamEvent) -> Result<(), DriverError> {
        // SAFETY: the event is the state's, which destroys events at its end only.
        self.outside(move || unsafe { self.driver.event_synchronize(event.handle) }).await
    }
}
