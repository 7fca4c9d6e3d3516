//! The access of an operation to the state and to the world outside of the state.
//!
//! An operation is an `async` function over a [`Port`]. No runtime polls it: each poll is one step,
//! made by [`step`] with the state lent to the port. Between two awaits an operation reads and
//! changes the state freely, and all of that is atomic. To have the lock released, an operation
//! awaits a request: a driver call, a wait, or other code. So an operation knows no driver, lock or
//! thread, and a test can interleave its steps with other operations in any order.
//!
//! Invariants: the state is lent only during a step; a step ends with its outcome or with exactly
//! one request; an operation that is dropped between a call and its answer leaves the marks of the
//! call in the state, so that the ranges of the call are never used again.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use super::call::{Answer, Call, CallId, CallKind, Completion};
use crate::driver::DriverError;
use crate::state::arena::ArenaState;
use crate::state::streams::StreamKey;
use crate::types::shortage::Shortage;
use lowtide_core::clock::{Bell, Clock, Moment};

/// The result of one step of an operation.
#[derive(Debug)]
pub(crate) enum Step<T> {
    /// The operation has ended.
    Done(T),
    /// Make this driver call, and step again with its completion.
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
enum Request {
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
/// ([`Port::outside`]).
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
pub(crate) struct Port<'a> {
    state: RefCell<Option<Box<ArenaState>>>,
    request: Cell<Option<Request>>,
    awaited: Cell<Option<CallId>>,
    answer: Cell<Option<Result<Answer, DriverError>>>,
    /// The clock, for operations that need the time.
    pub(crate) clock: &'a dyn Clock,
    caller: Caller,
    /// `true` while the operation has the turn to call the callbacks.
    has_turn: Cell<bool>,
    pub(crate) surroundings: &'a dyn Surroundings,
}

/// Returns the state to its owner at the end of a step, also if the step panics.
struct Lent<'a, 'b> {
    port: &'a Port<'b>,
    slot: &'a mut Option<Box<ArenaState>>,
}

impl Drop for Lent<'_, '_> {
    fn drop(&mut self) {
        *self.slot = self.port.state.take();
    }
}

/// Runs the next step of an operation on a state.
pub(crate) fn step<F: Future + ?Sized>(
    port: &Port<'_>,
    slot: &mut Option<Box<ArenaState>>,
    operation: Pin<&mut F>,
) -> Step<F::Output> {
    port.state.replace(slot.take());
    let lent = Lent { port, slot };
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    drop(lent);
    answer_of(polled, port)
}

/// Runs the code that an operation asked to run with the lock released.
pub(crate) fn run_outside<F: Future + ?Sized>(port: &Port<'_>, operation: Pin<&mut F>) {
    let polled = operation.poll(&mut Context::from_waker(Waker::noop()));
    let is_back = matches!((polled, port.request.take()), (Poll::Pending, Some(Request::Inside)));
    assert!(is_back, "an operation that left the lock takes it again");
}

fn answer_of<T>(polled: Poll<T>, port: &Port<'_>) -> Step<T> {
    if let Poll::Ready(outcome) = polled {
        return Step::Done(outcome);
    }
    match port.request.take() {
        Some(Request::Call(call)) => Step::Call(call),
        Some(Request::Wait { is_repeated }) => Step::Wait { is_repeated },
        Some(Request::WaitUntil(bell, deadline)) => Step::WaitUntil(bell, deadline),
        Some(Request::Outside) => Step::Outside,
        None | Some(Request::Inside) => {
            unreachable!("an operation that waits has asked for something")
        }
    }
}

/// The turn to call the callbacks. Ends when dropped.
pub(super) struct CallbackTurn<'a, 'b>(&'a Port<'b>);

impl<'a, 'b> CallbackTurn<'a, 'b> {
    /// Takes the turn if there are callbacks; also returns `true` if another run was waited for.
    /// Returns `None` if this thread must not wait for that.
    pub(super) async fn take(port: &'a Port<'b>) -> Option<(Self, bool)> {
        let take = || {
            let has_waited = port.surroundings.take_callback_turn()?;
            port.has_turn.set(true);
            Some((Self(port), has_waited))
        };
        port.outside(take).await
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
    pub(super) async fn shut(port: &Port<'a>) -> (Self, bool) {
        let surroundings = port.surroundings;
        let shut = || {
            let held = surroundings.shut_caches();
            (Self(surroundings), held)
        };
        port.outside(shut).await
    }
}

impl Drop for ShutCaches<'_> {
    fn drop(&mut self) {
        self.0.reopen_caches();
    }
}

impl<'a> Port<'a> {
    pub(crate) fn new(
        clock: &'a dyn Clock,
        caller: Caller,
        surroundings: &'a dyn Surroundings,
    ) -> Self {
        let (state, request) = (RefCell::new(None), Cell::new(None));
        let (awaited, answer) = (Cell::new(None), Cell::new(None));
        let has_turn = Cell::new(false);
        Self { state, request, awaited, answer, clock, caller, has_turn, surroundings }
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
    pub(super) fn perform(
        &self,
        kind: CallKind,
    ) -> impl Future<Output = Result<Answer, DriverError>> {
        let call = self.with(|state| state.new_call(kind));
        self.awaited.set(Some(call.id()));
        self.request.set(Some(Request::Call(call)));
        poll_fn(|_| self.answer.take().map_or(Poll::Pending, Poll::Ready))
    }

    /// Makes a driver call that returns nothing.
    ///
    /// # Errors
    /// The driver's.
    pub(super) fn does(&self, kind: CallKind) -> impl Future<Output = Result<(), DriverError>> {
        let answer = self.perform(kind);
        async { answer.await.map(drop) }
    }

    /// Makes a driver call that returns a boolean.
    ///
    /// # Errors
    /// The driver's.
    pub(super) async fn asks(&self, kind: CallKind) -> Result<bool, DriverError> {
        Ok(matches!(self.perform(kind).await?, Answer::Bool(true)))
    }

    /// Releases the lock until other operations have changed the state such that the condition is
    /// false. The condition only reads. So a repeated wait notifies no other operation: two that
    /// wait would wake each other in turns.
    pub(crate) async fn wait_while(&self, condition: impl Fn(&ArenaState) -> bool) {
        let mut is_repeated = false;
        while self.with(|state| condition(state)) {
            self.ask(Request::Wait { is_repeated }).await;
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
        self.ask(Request::WaitUntil(bell, deadline)).await;
    }

    /// Runs code that is not part of the engine, with the lock released.
    pub(crate) async fn outside<R>(&self, act: impl FnOnce() -> R) -> R {
        self.ask(Request::Outside).await;
        let result = act();
        self.ask(Request::Inside).await;
        result
    }

    /// Writes a log line, which gets the arena's name, with the lock released.
    pub(super) async fn log(&self, write: impl FnOnce(&str)) {
        let arena = self.with(|state| state.name.clone());
        self.outside(|| write(&arena)).await;
    }

    /// Records the completion of the call that the operation waits for.
    ///
    /// # Panics
    /// If it is the completion of another call.
    pub(crate) fn complete(&self, completion: Completion) {
        let Completion { id, answer } = completion;
        assert_eq!(self.awaited.take(), Some(id), "the completion of another call");
        self.answer.set(Some(answer));
    }

    fn ask(&self, request: Request) -> impl Future<Output = ()> {
        self.request.set(Some(request));
        let mut is_asked = false;
        poll_fn(move |_| {
            if std::mem::replace(&mut is_asked, true) { Poll::Ready(()) } else { Poll::Pending }
        })
    }
}

impl fmt::Debug for Port<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Port").field("caller", &self.caller).finish_non_exhaustive()
    }
}
