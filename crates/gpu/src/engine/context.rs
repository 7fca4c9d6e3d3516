//! The access of an operation to the state and to the world outside of the state.
//!
//! An operation is an `async` function over an [`OpContext`]. No runtime polls it: each poll is one
//! step, made by [`step`] with the state lent to the context. Between two awaits an operation reads
//! and changes the state freely, and all of that is atomic. To have the lock released, an operation
//! awaits a request: a driver call, a wait, or other code. So an operation knows no driver, lock or
//! thread, and a test can interleave its steps with other operations in any order.
//!
//! Invariants: the state is lent only during a step; a step ends with its outcome or with exactly
//! one request; an operation that is dropped between a call and its answer leaves the marks of the
//! call in the state, so that the ranges of the call are never used again.
#![expect(unsafe_code, reason = "the calls of drivers that take memory away are unsafe")]

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use crate::driver::{
    DeviceAddress, Driver, DriverError, EventHandle, HostStore, StoreSpan, StreamHandle,
};
use crate::state::arena::ArenaState;
use crate::state::streams::StreamKey;
use crate::types::error::Shortage;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock, Moment};

/// The result of one step of an operation.
#[derive(Debug)]
pub(crate) enum OpStep<T> {
    /// The operation has ended.
    Done(T),
    /// Make this driver call, and step again with its answer.
    Call(Call),
    /// Step again after another operation has changed the state. Nothing has changed since the
    /// last wait if it is repeated.
    Wait { is_repeated: bool },
    /// Step again when the bell rings, or at the deadline.
    WaitUntil(Arc<Bell>, Moment),
    /// Call [`run_outside`] with the lock released, and step again.
    Outside,
}

/// The request of an operation.
enum ContextRequest {
    Call(Call),
    Wait {
        is_repeated: bool,
    },
    WaitUntil(Arc<Bell>, Moment),
    /// The operation runs outside of the lock, and needs the lock again.
    Inside,
    /// Release the lock, and run the operation outside of it.
    Outside,
}

/// The facts about the thread that runs an operation.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Caller {
    /// The thread is inside a shortage callback, and must not wait for another one.
    pub(crate) is_within_callback: bool,
    /// The thread is inside a call of a host budget, and must not wait for the end of a sleep.
    pub(crate) is_within_budget: bool,
    /// The thread does background work, which never waits for the whole device.
    pub(crate) is_background: bool,
}

/// The result of a run of callbacks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Called {
    pub(crate) calls: u64,
    pub(crate) panics: u64,
    /// `true` if a callback released memory, or may have.
    pub(crate) released: bool,
}

/// The parts of an arena outside its state. They are called with the lock released
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

    /// Takes the turn to call the callbacks for a shortage, if there are any. Returns `true` after
    /// a wait for another thread's run; `None` if this thread must not wait for that run.
    fn take_callback_turn(&self) -> Option<bool>;

    /// Ends the turn to call the callbacks.
    fn end_callback_turn(&self);

    /// Calls the callbacks. Returns `None` if a callback forked, in the child.
    fn call_callbacks(&self, shortage: &Shortage<'_>) -> Option<Called>;

    /// Calls or drops the foreign code of a host budget, and marks the thread meanwhile
    /// ([`Caller::is_within_budget`]). The error is the message of a panic in that code.
    fn call_budget(&self, act: &mut dyn FnMut()) -> Result<(), String>;
}

/// Lends the state to an operation, and takes the operation's requests.
pub(crate) struct OpContext<'a> {
    state: RefCell<Option<Box<ArenaState>>>,
    request: Cell<Option<ContextRequest>>,
    answer: Cell<Option<Result<u64, DriverError>>>,
    /// The clock, for operations that need the time.
    pub(crate) clock: &'a dyn Clock,
    caller: Caller,
    /// `true` while the operation has the turn to call the callbacks.
    has_turn: Cell<bool>,
    pub(crate) surroundings: &'a dyn Surroundings,
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

/// Runs the next step of an operation on a state.
pub(crate) fn step<F: Future + ?Sized>(
    cx: &OpContext<'_>,
    slot: &mut Option<Box<ArenaState>>,
    operation: Pin<&mut F>,
) -> OpStep<F::Output> {
    cx.state.replace(slot.take());
    let lent = Lent { cx, slot };
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    drop(lent);
    answer_of(polled, cx)
}

/// Runs the code that an operation asked to run with the lock released.
pub(crate) fn run_outside<F: Future + ?Sized>(cx: &OpContext<'_>, operation: Pin<&mut F>) {
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    let is_back =
        matches!((polled, cx.request.take()), (Poll::Pending, Some(ContextRequest::Inside)));
    assert!(is_back, "an operation that left the lock takes it again");
}

fn answer_of<T>(polled: Poll<T>, cx: &OpContext<'_>) -> OpStep<T> {
    if let Poll::Ready(outcome) = polled {
        return OpStep::Done(outcome);
    }
    match cx.request.take() {
        Some(ContextRequest::Call(call)) => OpStep::Call(call),
        Some(ContextRequest::Wait { is_repeated }) => OpStep::Wait { is_repeated },
        Some(ContextRequest::WaitUntil(bell, deadline)) => OpStep::WaitUntil(bell, deadline),
        Some(ContextRequest::Outside) => OpStep::Outside,
        None | Some(ContextRequest::Inside) => {
            unreachable!("an operation that waits has asked for something")
        }
    }
}

/// The turn to call the callbacks. Ends when dropped.
pub(super) struct CallbackTurn<'a, 'b>(&'a OpContext<'b>);

impl<'a, 'b> CallbackTurn<'a, 'b> {
    /// Takes the turn if there are callbacks; also returns `true` if another run was waited for.
    /// Returns `None` if this thread must not wait for that.
    pub(super) async fn take(cx: &'a OpContext<'b>) -> Option<(Self, bool)> {
        let take = || {
            let has_waited = cx.surroundings.take_callback_turn()?;
            cx.has_turn.set(true);
            Some((Self(cx), has_waited))
        };
        cx.outside(take).await
    }
}

impl Drop for CallbackTurn<'_, '_> {
    fn drop(&mut self) {
        self.0.has_turn.set(false);
        self.0.surroundings.end_callback_turn();
    }
}

/// Keeps the caches of an arena empty until it is dropped.
pub(super) struct ShutCaches<'a>(&'a dyn Surroundings);

impl<'a> ShutCaches<'a> {
    /// Empties the caches; also returns `true` if they held a block.
    pub(super) async fn shut(cx: &OpContext<'a>) -> (Self, bool) {
        let surroundings = cx.surroundings;
        let shut = || {
            let held = surroundings.shut_caches();
            (Self(surroundings), held)
        };
        cx.outside(shut).await
    }
}

impl Drop for ShutCaches<'_> {
    fn drop(&mut self) {
        self.0.reopen_caches();
    }
}

impl<'a> OpContext<'a> {
    pub(crate) fn new(
        clock: &'a dyn Clock,
        caller: Caller,
        surroundings: &'a dyn Surroundings,
    ) -> Self {
        let (state, request) = (RefCell::new(None), Cell::new(None));
        let (answer, has_turn) = (Cell::new(None), Cell::new(false));
        Self { state, request, answer, clock, caller, has_turn, surroundings }
    }

    /// Returns `true` if the operation must not wait for a wake: its thread is inside a shortage
    /// callback, or the operation has the turn to call them. The wake may wait for that turn.
    pub(super) fn is_within_callback(&self) -> bool {
        self.caller.is_within_callback || self.has_turn.get()
    }

    /// Returns `true` if the operation must not wait for the end of a sleep: its thread is inside a
    /// call of a host budget.
    pub(super) const fn is_within_budget(&self) -> bool {
        self.caller.is_within_budget
    }

    /// Returns `true` if the thread does background work.
    pub(super) const fn is_background(&self) -> bool {
        self.caller.is_background
    }

    /// Reads or changes the state.
    ///
    /// # Panics
    /// If this is called within itself, or by code that runs outside the lock.
    #[inline]
    pub(crate) fn with<R>(&self, act: impl FnOnce(&mut ArenaState) -> R) -> R {
        act(self.state.borrow_mut().as_deref_mut().expect("the state is lent during a step"))
    }

    /// Makes a driver call with the lock released. The ranges of the call are already marked. The
    /// caller awaits the answer at once: the call is requested before the first poll.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn perform(&self, call: Call) -> impl Future<Output = Result<u64, DriverError>> {
        self.request.set(Some(ContextRequest::Call(call)));
        poll_fn(|_| self.answer.take().map_or(Poll::Pending, Poll::Ready))
    }

    /// Makes a driver call that returns nothing.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn does(&self, call: Call) -> impl Future<Output = Result<(), DriverError>> {
        let answer = self.perform(call);
        async { answer.await.map(drop) }
    }

    /// Makes a driver call that returns a boolean.
    ///
    /// # Errors
    /// The driver's.
    pub(super) async fn asks(&self, call: Call) -> Result<bool, DriverError> {
        Ok(self.perform(call).await? != 0)
    }

    /// Releases the lock until other operations have changed the state such that the condition is
    /// false. The condition only reads. So a repeated wait notifies no other operation: two that
    /// wait would wake each other in turns.
    pub(crate) async fn wait_while(&self, condition: impl Fn(&ArenaState) -> bool) {
        let mut is_repeated = false;
        while self.with(|state| condition(state)) {
            self.ask(ContextRequest::Wait { is_repeated }).await;
            is_repeated = true;
        }
    }

    /// Waits for the next result of a driver call on granules, while such a call is in progress and
    /// the condition holds.
    pub(super) async fn wait_for_result(&self, condition: impl Fn(&ArenaState) -> bool) {
        let results = self.with(|state| state.results);
        self.wait_while(|state| {
            let is_in_progress = state.leaving() + state.committing() > 0;
            state.results == results && is_in_progress && condition(state)
        })
        .await;
    }

    /// Releases the lock until the bell rings or the deadline passes.
    pub(crate) async fn wait_until(&self, bell: Arc<Bell>, deadline: Moment) {
        self.ask(ContextRequest::WaitUntil(bell, deadline)).await;
    }

    /// Runs code that is not part of the engine, with the lock released.
    pub(crate) async fn outside<R>(&self, act: impl FnOnce() -> R) -> R {
        self.ask(ContextRequest::Outside).await;
        let result = act();
        self.ask(ContextRequest::Inside).await;
        result
    }

    /// Writes a log line, which gets the arena's name, with the lock released.
    pub(super) async fn log(&self, write: impl FnOnce(&str)) {
        let arena = self.with(|state| state.name.clone());
        self.outside(|| write(&arena)).await;
    }

    /// Records the answer to the call that the operation waits for.
    pub(crate) fn complete(&self, answer: Result<u64, DriverError>) {
        self.answer.set(Some(answer));
    }

    fn ask(&self, request: ContextRequest) -> impl Future<Output = ()> {
        self.request.set(Some(request));
        let mut is_asked = false;
        poll_fn(move |_| {
            if std::mem::replace(&mut is_asked, true) { Poll::Ready(()) } else { Poll::Pending }
        })
    }
}

impl fmt::Debug for OpContext<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OpContext").field("caller", &self.caller).finish_non_exhaustive()
    }
}

// Driver calls as values.
//
// An operation asks for a [`Call`], the executor performs the call with the lock released, and the
// operation gets the answer. The engine builds a call only after it has marked the ranges of the
// call in the state: the marks are the precondition of the driver's unsafe calls. A call cannot be
// copied, and is consumed when it is performed.
//
// Invariant: until the answer of a call is recorded, its marks keep other operations from its
// ranges; if no answer is recorded, the ranges stay marked.

/// The kind of a call, with the reason that the call is sound.
#[derive(Debug)]
pub(crate) enum Call {
    /// Bare granules of a reservation, marked as committing, or as leaving by the same operation.
    Commit {
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// Committed granules of a reservation, whole handles of this size, marked as leaving, or as
    /// committing by the same operation: every use of them is complete.
    Decommit {
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// Granules that are marked as leaving, whole handles of this size, and bare ones that are
    /// marked as arriving.
    Remap {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// A segment for offsets that are marked as committing.
    CreateSegment {
        size: ByteSize,
    },
    /// A whole segment, marked as leaving: every use of it is complete.
    DestroySegment {
        at: DeviceAddress,
        size: ByteSize,
    },
    Trim,
    /// Two committed ranges that do not overlap. The operation holds both blocks, and no work uses
    /// them.
    Copy {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    },
    /// Two committed ranges that do not overlap. The operation holds both blocks until it has seen
    /// the end of the copy; no work uses them, except copies queued earlier on the same stream. The
    /// stream is the arena's.
    QueueCopy {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    },
    /// A stream that exists until the answer is recorded.
    IsCapturing {
        stream: StreamHandle,
    },
    CreateStream,
    SynchronizeStream {
        stream: StreamHandle,
    },
    CreateEvent,
    /// An event of the state that no other operation uses, and a stream that exists until the
    /// answer is recorded.
    RecordEvent {
        event: EventHandle,
        stream: StreamHandle,
    },
    /// An event of the state that is in use until the answer is recorded.
    QueryEvent {
        event: EventHandle,
    },
    WaitForEvent {
        event: EventHandle,
    },
    StreamWaits {
        stream: StreamHandle,
        event: EventHandle,
    },
    SynchronizeContext,
    CreateStore {
        size: ByteSize,
    },
    /// A store that is no longer in the state, with no copy in progress.
    DestroyStore {
        store: HostStore,
    },
    /// Committed granules that are marked as leaving, and a store that the operation holds; the
    /// stream is the arena's.
    Offload {
        at: DeviceAddress,
        to: StoreSpan,
        stream: StreamHandle,
    },
    /// Committed granules of an arena that is not awake, and a filled store that is in the state
    /// or held by the operation; the stream is the arena's.
    Restore {
        from: StoreSpan,
        at: DeviceAddress,
        stream: StreamHandle,
    },
}

impl Call {
    /// Makes the call, with no lock held. Returns the address or the handle that it created, or a
    /// condition as 0 or 1.
    pub(crate) fn perform(self, driver: &dyn Driver) -> Result<u64, DriverError> {
        let done = |()| 0;
        match self {
            Self::CreateSegment { size } => driver.segment_create(size).map(DeviceAddress::get),
            Self::Trim => driver.trim().map(done),
            Self::CreateStream => driver.stream_create().map(StreamHandle::get),
            Self::CreateEvent => driver.event_create().map(EventHandle::get),
            Self::SynchronizeContext => driver.synchronize().map(done),
            Self::CreateStore { size } => driver.host_store_create(size).map(HostStore::get),
            Self::Commit { at, size, handle } => {
                // SAFETY: the ranges are marked by the operation, and bare; see `Call`.
                unsafe { driver.commit(at, size, handle) }.map(done)
            }
            Self::Decommit { at, size, handle } => {
                // SAFETY: the ranges are marked by the operation, and every use of them is complete.
                unsafe { driver.decommit(at, size, handle) }.map(done)
            }
            Self::Remap { from, to, size, handle } => {
                // SAFETY: the source is marked as leaving and unused, the target as arriving.
                unsafe { driver.remap(from, to, size, handle) }.map(done)
            }
            Self::DestroySegment { at, size } => {
                // SAFETY: a whole segment that is marked as leaving and unused.
                unsafe { driver.segment_destroy(at, size) }.map(done)
            }
            // SAFETY: two committed ranges that the operation holds, and that no work uses.
            Self::Copy { from, to, size } => unsafe { driver.copy(from, to, size) }.map(done),
            Self::QueueCopy { from, to, size, stream } => {
                // SAFETY: two committed ranges that the operation holds until the copy is complete.
                // Only earlier copies on the same stream, the arena's own, use them.
                unsafe { driver.copy_async(from, to, size, stream) }.map(done)
            }
            Self::IsCapturing { stream } => {
                // SAFETY: the stream exists until the answer is recorded.
                unsafe { driver.is_capturing(stream) }.map(u64::from)
            }
            Self::SynchronizeStream { stream } => {
                // SAFETY: as above.
                unsafe { driver.stream_synchronize(stream) }.map(done)
            }
            Self::RecordEvent { event, stream } => {
                // SAFETY: the event is the state's, and the stream exists until the answer is recorded.
                unsafe { driver.event_record(event, stream) }.map(done)
            }
            // SAFETY: the event is the state's, which destroys events at its end only.
            Self::QueryEvent { event } => unsafe { driver.event_query(event) }.map(u64::from),
            // SAFETY: as above.
            Self::WaitForEvent { event } => unsafe { driver.event_synchronize(event) }.map(done),
            Self::StreamWaits { stream, event } => {
                // SAFETY: the event is the state's, and the stream exists until the answer is recorded.
                unsafe { driver.stream_wait_event(stream, event) }.map(done)
            }
            // SAFETY: the store is no longer in the state, and no copy of it is in progress.
            Self::DestroyStore { store } => unsafe { driver.host_store_destroy(store) }.map(done),
            Self::Offload { at, to, stream } => {
                // SAFETY: committed granules that stay marked until the copies are complete, a store
                // that the operation holds, and the arena's own stream.
                unsafe { driver.offload(at, to, stream) }.map(done)
            }
            Self::Restore { from, at, stream } => {
                // SAFETY: as above; no lease is granted before the copies are complete.
                unsafe { driver.restore(from, at, stream) }.map(done)
            }
        }
    }
}
