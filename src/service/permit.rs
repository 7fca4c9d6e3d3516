//! A request's permit, which the response body and handlers share, and its measured memory.
//!
//! If the admission belongs to a running `Memory`, each request has an account (`heap::account`):
//! the layer charges it for what the handler's future and the response body allocate, and for the
//! frames of the request body (`body`). Handlers charge it for work that they move elsewhere. When
//! the request holds more than its reservation, the permit grows. That never fails, since the
//! memory is already in use; it counts against the allowance, so other requests may be rejected.
//!
//! A request that outgrows its claim while memory is short is cancelled: its handler is notified,
//! and the layer drops it if it goes on (`layer`). Nothing can interrupt a single poll, work on
//! other threads, or a response whose head was returned.
//!
//! A request whose time limit has passed is cancelled as well, and a response whose head was
//! returned is cut (`time_limits`).
//!
//! While others wait for room, a request that waits for its client has its reservation suspended:
//! it keeps what it holds, and reserves its claim again before its body is complete (`body`). Until
//! then it has neither a turn nor a slot of the slow start. One
//! whose handler works between two frames may allocate at any time, and is not suspended.
//!
//! Over HTTP/2 a request for which there is no room starts suspended, so that its body does not fill
//! the window of the connection, and enters the slow start when it resumes.
//!
//! An answer of unknown length that has gone on for a second is a stream, which may last for hours.
//! It keeps what it holds and a window, and its route learns from it. Later answers of the route are
//! streams at once, unless one grew much after it had lasted.
//!
//! A connection that was upgraded, such as a WebSocket, is such a stream for as long as its work has
//! the permit.
//!
//! Not measured: tasks and threads without a scope, and C code that does not allocate through
//! jemalloc.
//!
//! Invariants: the reservation is released when the last handle is dropped; the reservation covers
//! the live bytes after each piece of work, also of a cancelled request; `peak` never falls; the
//! handler gets the end of a body only while the claim is reserved.

use std::future::poll_fn;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use http::header::CONTENT_TYPE;
use http::request::Parts;
use http::{Method, Request, StatusCode};

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use lowtide_admission::layer::{
    AdmissionState, LARGE_MIN, LargeRequest, REGISTERED_MIN, SLOW_AFTER, Turn, Waiting,
};
use lowtide_admission::learning::{Compared, GROWS_LATE, READS, STREAMS, SlowStartPermit};
use lowtide_admission::{
    Admission, Budget, Permit, Priority, RejectReason, Rejected, RequestMemory, RequestPhase,
};
use lowtide_heap::{Account, AccountMemory, unmeasured};

use super::body::poll_room;
use super::exempt::ExemptShare;
use super::time_limits::TimeLimits;
use super::usage::{self, LiveIn, RequestOrigin};

/// The permit of a request, found in the request's extensions (in a handler of axum:
/// `Extension<RequestPermit>`), or with [`RequestPermit::current`].
/// Shows the memory that the request holds, attributes work on other threads to it, and reserves
/// memory in advance.
///
/// ```
/// use http::{Request, Response};
/// use lowtide::ByteSize;
/// use lowtide::service::{RequestPermit, rejection};
///
/// /// Called by a handler for each piece of the body.
/// fn take<B>(request: &Request<B>, piece: &[u8]) -> Result<(), Response<String>> {
///     let permit = request.extensions().get::<RequestPermit>(); // none without the layer
///     let reserved = permit.map(|permit| permit.grow(ByteSize::of(piece.len())));
///     reserved.transpose().map(drop).map_err(|rejected| rejection(&rejected))
/// }
/// # assert!(take(&Request::new(()), b"ebb").is_ok());
/// ```
#[derive(Clone)]
pub struct RequestPermit(Arc<Account<Admitted>>);

/// Smaller changes of the live bytes are not reported to the ledger. An estimate: less than the
/// memory of a connection.
const REPORTED_MIN: ByteSize = ByteSize::kib(64);

/// A request that holds at most this much is not cancelled because of its cap. An estimate:
/// cancelling it would release little.
const CAP_MIN: ByteSize = ByteSize::mib(1);

/// A stream that holds so much more than twice what it held when it became one has grown. An
/// estimate: more than the buffers between a stream and its client.
const LATE_MIN: ByteSize = ByteSize::mib(1);

/// What a suspended request reserves beyond what it holds, for the part of its body that arrives
/// next. An estimate: what an HTTP/2 client may send on a stream without permission, by default.
pub(super) const WINDOW: ByteSize = ByteSize::kib(64);

/// What a stream reserves beyond what it holds, for the part of its answer that comes next. An
/// estimate: a frame of HTTP/2 by default.
const STREAM_WINDOW: ByteSize = ByteSize::kib(16);

/// The time after which an answer without a known end has lasted, in nanoseconds: that after which
/// the slow start lets further requests in. Until then it may be a short one.
const STREAM_AFTER: u64 = 1_000_000_000;
/// The same for a route in which an answer grew late, in nanoseconds. An estimate: longer than most
/// queries.
const LATE_AFTER: u64 = 60 * STREAM_AFTER;
/// The status of an answer after which the connection has another protocol.
pub(super) const UPGRADED: StatusCode = StatusCode::SWITCHING_PROTOCOLS;
/// The value of `goes_on_since` once nothing depends on it any more.
const TENDED: u64 = u64::MAX;

/// A permit that does not keep the reservation.
#[derive(Clone, Debug)]
pub(super) struct WeakPermit(Weak<Account<Admitted>>);

/// An admitted request.
#[derive(Debug)]
struct Admitted {
    /// `true` if its memory is measured.
    is_measured: bool,
    /// `true` if it has a slot of its route's slow start.
    is_trial: AtomicBool,
    is_exempt: bool,
    /// Its turn, if it is large.
    turn: Option<Turn>,
    origin: RequestOrigin,
    /// The multiple of what it was expected to hold above which it may be cancelled; `None` if
    /// nothing cancels it.
    cap: Option<f64>,
    /// The bytes that it reserved when it was admitted, or later by growing.
    claim: AtomicU64,
    admitted_at: Moment,
    /// The last time at which its claim was reserved, in nanoseconds.
    reserved_at: AtomicU64,
    /// Set once it is registered as large.
    is_registered: AtomicBool,
    is_cancelled: AtomicBool,
    /// `true` once its handler has answered, and the layer cannot end it any more.
    is_answered: AtomicBool,
    /// `true` if its handler has dropped its body, and works only once its claim is reserved.
    is_to_start: AtomicBool,
    /// `true` while a body of known length has not arrived in whole.
    is_arriving: AtomicBool,
    /// The time since which its answer has gone on without a known end, in nanoseconds; 0 before,
    /// and [`TENDED`] afterwards.
    goes_on_since: AtomicU64,
    /// How it resumes once it was suspended; `None` if it is never suspended.
    resumes: Option<ResumeOptions>,
    limits: Option<Box<TimeLimits>>,
    /// What it waits for: [`WORKS`], [`RECEIVES`] or [`SENDS`].
    progress: AtomicU8,
    is_suspended: AtomicBool,
    /// The reserved bytes, and the live bytes as reported last, so that most polls need no lock.
    covered: AtomicU64,
    reported: AtomicU64,
    /// The bytes of frames in buffers of the connection.
    lent: AtomicU64,
    /// The bytes of frames that were ever copied plainly.
    copied: AtomicU64,
    held: Mutex<PermitState>,
}

/// Its handler works: it has got what it read of the body, or does not read it.
const WORKS: u8 = 0;
/// Its handler waits for more of the body.
const RECEIVES: u8 = 1;
/// Its handler has returned all of its response, which is not sent yet.
const SENDS: u8 = 2;

/// The place in the queue of a request whose handler goes on once its claim is reserved.
#[derive(Debug, Default)]
pub(super) struct QueuePlace {
    waiting: Option<Waiting>,
    is_refused: bool,
}

/// The terms on which a suspended request waits for room.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResumeOptions {
    pub(super) priority: Priority,
    pub(super) tenant: u64,
    /// The longest time to wait.
    pub(super) within: Duration,
}

/// The layer's data of an admitted request.
#[derive(Debug)]
pub(super) struct RequestOptions {
    /// The multiple of what it was expected to hold above which it may be cancelled; `None` if
    /// nothing cancels it.
    pub(super) cap: Option<f64>,
    /// The recipient of the measured memory.
    pub(super) need: Option<Compared>,
    /// The share of a request that is exempt by its path.
    pub(super) share: Option<ExemptShare>,
    /// The slot of a large request whose route is not known yet.
    pub(super) slot: Option<Arc<SlowStartPermit>>,
    /// Its turn, if it is large.
    pub(super) turn: Option<Turn>,
    /// `true` if its memory is measured.
    pub(super) is_measured: bool,
    pub(super) is_exempt: bool,
    /// How it resumes once it was suspended; `None` if it is never suspended.
    pub(super) resumes: Option<ResumeOptions>,
    /// `true` if the measured bytes are reported as all that it holds. `false` if its estimate may
    /// cover memory that is not measured.
    pub(super) reports: bool,
    /// Its claim if it starts suspended, to receive its body.
    pub(super) claimed: Option<ByteSize>,
    /// The admission and the clock with which it enters the slow start of its route when it
    /// resumes; `None` if it does not.
    pub(super) enters: Option<(Admission, Arc<dyn Clock>)>,
}

#[derive(Debug)]
struct PermitState {
    permit: Permit,
    /// The largest amount that the handler reported or requested, without the initial reservation.
    reported: Option<ByteSize>,
    /// Set if its handler answered: `true` for success.
    answer: Option<bool>,
    /// `true` once its route has learned from it.
    has_taught: bool,
    /// What it held when its answer became a stream.
    streams: Option<ByteSize>,
    /// What it had reserved when it was suspended, with what it has grown by since; `None` while it
    /// is not suspended.
    claimed: Option<ByteSize>,
    /// What its handler reported to hold. It may not be measured.
    declared: ByteSize,
    /// Set once it is cancelled.
    cancelled: Option<Rejected>,
    /// The waker of the layer's future, while its handler waits.
    waker: Option<Waker>,
    /// The wakers of the futures that wait for a cancellation, each with its number.
    waiting: Vec<(u64, Waker)>,
    /// The number of the next such future.
    next: u64,
    /// The figures to which its live bytes were added, once they were reported.
    live_in: Option<LiveIn>,
    terms: RequestOptions,
}

impl RequestPermit {
    pub(super) fn new(
        mut permit: Permit,
        origin: RequestOrigin,
        mut terms: RequestOptions,
        limits: Option<Box<TimeLimits>>,
    ) -> Self {
        let is_measured = terms.is_measured;
        if terms.reports {
            permit.report(ByteSize::ZERO);
        }
        if let Some(slot) = &terms.slot {
            slot.begin();
            permit.mark_unlearned(slot);
        }
        let claim = terms.claimed.unwrap_or_else(|| permit.cost().host);
        let is_suspended = terms.claimed.is_some();
        let progress = if is_suspended { RECEIVES } else { WORKS };
        let admitted_at = permit.state().last_tick();
        let admitted = Admitted {
            is_measured,
            is_trial: AtomicBool::new(terms.slot.is_some()),
            is_exempt: terms.is_exempt,
            turn: terms.turn.take(),
            origin,
            cap: terms.cap,
            claim: AtomicU64::new(claim.get()),
            admitted_at,
            reserved_at: AtomicU64::new(nanos(admitted_at)),
            is_registered: AtomicBool::new(false),
            is_cancelled: AtomicBool::new(false),
            is_answered: AtomicBool::new(false),
            is_to_start: AtomicBool::new(false),
            is_arriving: AtomicBool::new(false),
            goes_on_since: AtomicU64::new(0),
            resumes: terms.resumes,
            limits,
            progress: AtomicU8::new(progress),
            is_suspended: AtomicBool::new(is_suspended),
            covered: AtomicU64::new(permit.cost().host.get()),
            reported: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            held: Mutex::new(PermitState {
                permit,
                reported: None,
                answer: None,
                has_taught: false,
                streams: None,
                claimed: terms.claimed,
                declared: ByteSize::ZERO,
                cancelled: None,
                waker: None,
                waiting: Vec::new(),
                next: 0,
                live_in: None,
                terms,
            }),
        };
        Self(Arc::new(Account::new(admitted, Admitted::ended)))
    }

    /// Returns the permit of the request for which this thread runs: in its handler, in its
    /// response body, and in [`RequestPermit::scope`] and [`RequestPermit::measure`]. `None`
    /// elsewhere, and if requests are not measured.
    #[must_use]
    pub fn current() -> Option<Self> {
        Account::current().map(Self)
    }

    /// Returns the memory that is measured for this request; `None` if requests are not measured,
    /// because the admission belongs to no `Memory`, jemalloc is not the global allocator, or the
    /// system is not Linux. Work that runs now, such as the current poll, counts when it ends; call
    /// [`RequestPermit::check`] first to include it. Reads three atomics.
    #[must_use]
    pub fn memory(&self) -> Option<AccountMemory> {
        self.is_measured().then(|| self.0.memory())
    }

    /// Runs work of this request on the calling thread, and reserves the memory that the work
    /// leaves allocated. Use it for work that a handler moves to other threads; the layer does the
    /// same for the handler's future and for the response body. If requests are not measured, it
    /// only runs the work.
    ///
    /// ```
    /// # async fn parse(permit: lowtide::service::RequestPermit, text: String) {
    /// tokio::task::spawn_blocking(move || permit.measure(|| text.to_uppercase()));
    /// # }
    /// ```
    #[inline]
    pub fn measure<R>(&self, work: impl FnOnce() -> R) -> R {
        self.run(None, work)
    }

    /// Like [`RequestPermit::measure`], for a poll by an executor, which other tasks wait for.
    #[inline]
    pub(super) fn poll<R>(&self, work: impl FnOnce() -> R) -> R {
        self.run(self.0.owner().turn.as_ref(), work)
    }

    #[inline]
    fn run<R>(&self, turn: Option<&Turn>, work: impl FnOnce() -> R) -> R {
        if !self.is_measured() {
            return work();
        }
        let admitted = self.0.owner();
        let _trial = admitted.is_trial.load(Ordering::Relaxed).then(|| TrialWork::new(self));
        turn.into_iter().for_each(Turn::begins_work);
        let _cover = ReserveGuard(self, turn);
        self.0.run(work)
    }

    /// Adds memory to this request that others allocated, for example the result of another task.
    /// Otherwise the request would be charged too little, since freeing the memory subtracts it.
    pub fn adopt(&self, bytes: ByteSize) {
        if self.is_measured() {
            self.0.adopt(bytes);
            self.cover();
        }
    }

    /// Subtracts memory from this request that others hold from now on, for example a cache. The
    /// reservation does not change; use [`RequestPermit::shrink`] for that.
    pub fn release(&self, bytes: ByteSize) {
        if self.is_measured() {
            self.0.release(bytes);
            self.cover();
        }
    }

    /// Returns `true` if the memory of this request is measured.
    pub(super) fn is_measured(&self) -> bool {
        self.0.owner().is_measured
    }

    /// Returns `true` if this admission has reserved its bytes, unless it is exempt.
    pub(super) fn is_admitted_by(&self, admission: &Admission) -> bool {
        !self.0.owner().is_exempt && std::ptr::eq(self.held().permit.state(), admission.state())
    }

    /// Returns `true` if this thread runs for this request.
    pub(super) fn is_current(&self) -> bool {
        Account::current().is_some_and(|account| Arc::ptr_eq(&account, &self.0))
    }

    /// Adds to the frames in buffers of the connection, unless the sum would exceed `most`.
    pub(super) fn lend(&self, bytes: ByteSize, most: ByteSize) -> bool {
        add_up_to(&self.0.owner().lent, bytes, most)
    }

    /// Adds to the frames that were plainly copied, unless the sum would exceed `most`.
    pub(super) fn copy_plainly(&self, bytes: ByteSize, most: ByteSize) -> bool {
        add_up_to(&self.0.owner().copied, bytes, most)
    }

    /// Returns a handle that does not keep the reservation.
    pub(super) fn downgrade(&self) -> WeakPermit {
        WeakPermit(Arc::downgrade(&self.0))
    }

    /// Reserves what the request holds beyond its reservation, and reports what it holds if that
    /// has changed much.
    #[inline]
    fn cover(&self) {
        let (live, admitted) = (self.0.memory().live, self.0.owner());
        let covered = admitted.covered.load(Ordering::Relaxed);
        let reported = admitted.reported.load(Ordering::Relaxed);
        if live.get() > covered || live.get().abs_diff(reported) >= REPORTED_MIN.get() {
            self.report();
        }
    }

    #[cold]
    fn report(&self) {
        let admitted = self.0.owner();
        let (live, is_short) = self.change(|held| {
            // Read under the lock, so that no thread overwrites a newer report with an older one.
            let live = self.0.memory().live;
            held.hold(live);
            if let Some(need) = &held.terms.need {
                need.observe_running(live);
                let is_late = |before: ByteSize| live > before.scaled(2.0).saturating_add(LATE_MIN);
                if held.streams.is_some_and(is_late) {
                    need.note(GROWS_LATE);
                }
            }
            if held.streams.is_some() {
                held.keep_stream(live);
            }
            let before = admitted.reported.swap(live.get(), Ordering::Relaxed);
            held.change_live(&admitted.origin, ByteSize::new(before), live);
            (live, held.permit.state().is_short())
        });
        if live >= LARGE_MIN {
            self.register();
        }
        if let Some(cap) = admitted.cap.filter(|_| is_short) {
            let most = self.expected().scaled(cap).max(CAP_MIN);
            if live > most {
                self.cancel(most);
            }
        }
    }

    /// Adds it to the running requests that have reserved much, once.
    fn register(&self) {
        if !self.0.owner().is_registered.swap(true, Ordering::Relaxed) {
            let state = self.held().permit.state();
            unmeasured(|| state.register(Arc::new(self.downgrade())));
        }
    }

    /// Returns `true` if it has reserved so much that it is registered when it waits.
    fn is_large(&self) -> bool {
        let admitted = self.0.owner();
        admitted.is_measured && admitted.covered.load(Ordering::Relaxed) >= REGISTERED_MIN.get()
    }

    /// Returns the most that the request was expected to hold.
    fn expected(&self) -> ByteSize {
        let (held, claim) = (self.held(), self.0.owner().claim());
        held.terms.need.as_ref().map_or(claim, |need| need.expected().max(claim))
    }

    /// Records that the handler waits for more of the body, or has got some. In the meantime it
    /// may allocate, so the request is not suspended.
    pub(super) fn set_receiving(&self, is_receiving: bool) {
        let progress = if is_receiving { RECEIVES } else { WORKS };
        self.0.owner().progress.store(progress, Ordering::Relaxed);
    }

    /// Records that the body of the request has arrived, or is not read. Returns `false` if its
    /// reservation is suspended: then its end must wait.
    pub(super) fn arrived(&self) -> bool {
        let admitted = self.0.owner();
        // One of this and `suspend`, which stores and loads the other way round, sees the other.
        admitted.progress.store(WORKS, Ordering::SeqCst);
        if admitted.is_suspended.load(Ordering::SeqCst) {
            let _held = self.held();
            if admitted.is_suspended.load(Ordering::Relaxed) {
                admitted.progress.store(RECEIVES, Ordering::Relaxed);
                return false;
            }
        }
        admitted.is_arriving.store(false, Ordering::Relaxed);
        if admitted.is_trial.load(Ordering::Relaxed)
            && let Some(slot) = &self.held().terms.slot
        {
            slot.arrived();
        }
        true
    }

    /// Records that a body of known length is to arrive.
    pub(super) fn arrives(&self) {
        self.0.owner().is_arriving.store(true, Ordering::Relaxed);
    }

    /// Returns `true` if it needs no claim once its handler has answered. A trusted estimate may
    /// cover memory that is not measured, and a handler may collect a body of known length.
    fn may_release_claim(&self, held: &PermitState) -> bool {
        let admitted = self.0.owner();
        let is_arriving = admitted.is_arriving.load(Ordering::Relaxed);
        held.terms.reports && admitted.resumes.is_some() && !is_arriving
    }

    /// Records that its answer goes on without a known end. Returns `true` once nothing depends on
    /// that.
    #[cold]
    pub(super) fn goes_on(&self) -> bool {
        let admitted = self.0.owner();
        let (now, reports) = {
            let held = self.held();
            (held.permit.state().last_tick(), held.terms.reports)
        };
        let (unknown, since) = (0, nanos(now).max(1));
        let relaxed = Ordering::Relaxed;
        if admitted.goes_on_since.compare_exchange(unknown, since, relaxed, relaxed).is_ok() {
            // Operators look for what lasts long.
            self.register();
        }
        !reports || admitted.resumes.is_none() || self.tend_stream(now)
    }

    /// Releases the claim of a request whose answer is a stream: from now on it has reserved what
    /// it holds and a window, and more as it grows. If its body waits in the queue, it goes on at its
    /// turn without its claim. An answer is a stream once it has lasted, or at
    /// once if others of its route have. Once it has lasted its route learns from it, since it may
    /// go on for hours. Returns `true` if nothing is left to do.
    fn tend_stream(&self, now: Moment) -> bool {
        let admitted = self.0.owner();
        let since = admitted.goes_on_since.load(Ordering::Relaxed);
        if since == 0 || since == TENDED {
            return since == TENDED;
        }
        let lasted = nanos(now).saturating_sub(since);
        let (state, is_done) = self.change(|held| {
            let state = held.permit.state();
            let Some(need) = &held.terms.need else { return (state, false) };
            let is_late = need.has(GROWS_LATE);
            let has_lasted = lasted >= if is_late { LATE_AFTER } else { STREAM_AFTER };
            if !self.may_release_claim(held) {
                return (state, false);
            }
            let succeeded = held.answer == Some(true);
            let is_lasting = has_lasted && succeeded && !held.has_taught;
            if is_lasting {
                need.note(STREAMS);
            }
            if !has_lasted && (is_late || !need.has(STREAMS)) {
                return (state, false);
            }
            let AccountMemory { live, peak, .. } = self.0.memory();
            let _ = held.streams.get_or_insert(live);
            if is_lasting {
                need.learn(held.reported.unwrap_or_default().max(peak));
                held.has_taught = true;
            }
            held.keep_stream(live);
            if held.claimed.is_some() {
                held.permit.set_resumed();
                admitted.resumed(held);
                held.terms.enters = None;
            }
            if has_lasted {
                held.permit.mark_learned();
                held.terms.slot = None;
            }
            (state, has_lasted)
        });
        if is_done {
            admitted.goes_on_since.store(TENDED, Ordering::Relaxed);
        }
        state.wake_waiting();
        is_done
    }

    /// Returns `true` if its reservation is suspended.
    pub(super) fn is_suspended(&self) -> bool {
        self.0.owner().is_suspended.load(Ordering::Relaxed)
    }

    /// Reserves a window for what arrives next of a suspended request's body. Returns `false` if
    /// the request must resume first.
    pub(super) fn may_receive(&self) -> bool {
        let wanted = self.0.memory().live.saturating_add(WINDOW);
        self.change(|held| held.permit.reserve_arriving(wanted))
    }

    /// Enters the queue to resume. Returns `None` if it is full, and if the request is never
    /// suspended.
    pub(super) fn wait_to_resume(&self) -> Option<Waiting> {
        let ResumeOptions { priority, tenant, within } = self.0.owner().resumes?;
        let held = self.held();
        held.permit.wait_to_resume(held.claimed(), priority, tenant, within)
    }

    /// Reserves the claim of a suspended request again. Returns `true` if it has entered the slow
    /// start of its route, which counts its work from its next poll on.
    pub(super) fn resume(&self, waiting: Option<&Waiting>) -> Result<bool, Rejected> {
        let admitted = self.0.owner();
        let Some(ResumeOptions { priority, .. }) = admitted.resumes else { return Ok(false) };
        self.change(|held| {
            let slot = held.enter(waiting)?;
            enter_turn(admitted.turn.as_ref(), held.permit.state(), waiting, waiting.is_none())?;
            let resumed = held.permit.resume(waiting, held.claimed(), priority);
            resumed.inspect_err(|_| admitted.leave_turn())?;
            let has_entered = slot.is_some();
            if let Some(slot) = &slot {
                slot.begin();
                slot.answered(held.answer == Some(true));
                held.permit.mark_unlearned(slot);
                admitted.is_trial.store(true, Ordering::Relaxed);
            }
            held.terms.slot = slot.or_else(|| held.terms.slot.take());
            admitted.resumed(held);
            Ok(has_entered)
        })
    }

    /// Ends a suspended request for which there was no room in time. If its handler has answered
    /// already, it goes on without its claim.
    #[cold]
    pub(super) fn refuse(&self, rejected: Rejected) {
        if self.0.owner().is_answered.load(Ordering::Relaxed) {
            self.go_on();
        } else {
            self.end(|held| held.permit.state().reject(rejected));
        }
    }

    /// Records that the handler reads no more of the body. If its claim was never reserved, the
    /// handler goes on once it is ([`RequestPermit::poll_start`]), or answers at once.
    pub(super) fn unread(&self) {
        if self.arrived() {
            return;
        }
        let is_to_start = {
            let held = self.held();
            !held.permit.is_started() && held.answer.is_none() && held.cancelled.is_none()
        };
        if is_to_start {
            self.0.owner().is_to_start.store(true, Ordering::Relaxed);
        } else {
            self.go_on();
        }
    }

    /// Waits until the claim is reserved of a request whose handler dropped its body before that.
    #[inline]
    pub(super) fn poll_start(&self, place: &mut QueuePlace, cx: &Context<'_>) -> Poll<()> {
        let admitted = self.0.owner();
        if admitted.is_to_start.load(Ordering::Relaxed) {
            if self.is_suspended() {
                ready!(poll_room(self, &mut place.waiting, &mut place.is_refused, true, cx));
            }
            admitted.is_to_start.store(false, Ordering::Relaxed);
            self.arrived();
        }
        Poll::Ready(())
    }

    /// Records that the handler reads its body: those of later requests of the route may be read
    /// before there is room for their claims.
    pub(super) fn reads(&self) {
        if let Some(need) = &self.held().terms.need {
            need.note(READS);
        }
    }

    /// Ends the suspension without its claim: what it holds from now on is reserved as it grows.
    #[cold]
    pub(super) fn go_on(&self) {
        let admitted = self.0.owner();
        self.change(|held| {
            admitted.progress.store(WORKS, Ordering::Relaxed);
            admitted.is_arriving.store(false, Ordering::Relaxed);
            held.permit.set_resumed();
            admitted.resumed(held);
            held.terms.enters = None;
        });
    }

    /// Cancels the request, since it holds more than `most`. Observe mode only counts it.
    #[cold]
    fn cancel(&self, most: ByteSize) {
        if self.held().permit.observe(RejectReason::Outgrown) {
            return;
        }
        let (live, claim) = (self.0.memory().live, self.0.owner().claim());
        self.end(|held| held.permit.state().outgrown(live, claim, most));
    }

    /// Returns its time limits.
    pub(super) fn limits(&self) -> Option<&TimeLimits> {
        self.0.owner().limits.as_deref()
    }

    /// Records a poll of the request's body: so many bytes, or a wait for the client.
    pub(super) fn receives(&self, polled: Poll<usize>, waker: &Waker) {
        let Some(pace) = self.limits().and_then(TimeLimits::request) else { return };
        let (now, is_free) = {
            let held = self.held();
            (
                held.permit.state().last_tick(),
                held.answer.is_some() && self.may_release_claim(&held),
            )
        };
        match polled {
            // It keeps no claim, so it waits for as long as both sides like.
            Poll::Pending if is_free => {}
            Poll::Ready(bytes) => pace.received(bytes, now),
            Poll::Pending if pace.wait(waker, now) => {}
            Poll::Pending => self.end_in_time(pace.rate().too_slow()),
        }
    }

    /// Records a poll of the response: so many bytes that the connection has now, or a wait for the
    /// handler.
    pub(super) fn sends(&self, polled: Poll<usize>, waker: &Waker) {
        let Some(limits) = self.limits() else { return };
        let now = self.held().permit.state().last_tick();
        match (polled, limits.response()) {
            (Poll::Ready(bytes), Some(pace)) => pace.send(bytes, now),
            (Poll::Ready(_), None) => {}
            (Poll::Pending, pace) => {
                limits.wait_for_handler(waker);
                pace.into_iter().for_each(|pace| pace.received(0, now));
            }
        }
    }

    /// Returns why the response was cut.
    pub(super) fn cut(&self) -> Option<Rejected> {
        self.limits()?.is_cut().then(|| self.cancellation())?
    }

    /// Ends a request whose time limit has passed: its handler, or the response if the handler has
    /// answered. A request that was cancelled before is left to its end.
    #[cold]
    fn end_in_time(&self, rejected: Rejected) {
        let Some(limits) = self.limits() else { return };
        let is_answered = self.0.owner().is_answered.load(Ordering::Relaxed);
        // Its body is not read any more, but a task of the handler keeps the permit.
        if is_answered && !limits.is_sending() {
            return;
        }
        if self.end(|held| held.permit.state().reject(rejected.clone())) {
            let route = &self.0.owner().origin.route;
            log!(debug, target: "lowtide", %rejected, %route, "response ended at a time limit");
            limits.cut();
        }
    }

    /// Cancels the request for this reason, unless it is cancelled already. Returns `true` if it is
    /// cancelled now and its handler has answered.
    fn end(&self, reason: impl FnOnce(&PermitState) -> Rejected) -> bool {
        let mut held = self.held();
        if held.cancelled.is_some() {
            return false;
        }
        // First: `reason` has the control loop look for cancelled requests, once, and again only if
        // it finds one. Bug: in the other order it could miss this one, and never woke it again.
        self.0.owner().is_cancelled.store(true, Ordering::Release);
        held.cancelled = Some(reason(&held));
        let is_answered = held.answer.is_some();
        let (waker, waiting) = (held.waker.take(), std::mem::take(&mut held.waiting));
        drop(held);
        waker.into_iter().chain(waiting.into_iter().map(|(_, waker)| waker)).for_each(Waker::wake);
        is_answered
    }

    /// Returns the rejection of a cancelled request.
    pub(super) fn cancellation(&self) -> Option<Rejected> {
        let is_cancelled = self.0.owner().is_cancelled.load(Ordering::Acquire);
        is_cancelled.then(|| self.held().cancelled.clone()).flatten()
    }

    /// Keeps the waker of the layer's future while its handler waits. Returns the rejection if the
    /// request is cancelled already.
    pub(super) fn waits(&self, waker: &Waker) -> Option<Rejected> {
        let admitted = self.0.owner();
        let is_limited = admitted.limits.is_some();
        if !admitted.is_registered.load(Ordering::Relaxed) && (is_limited || self.is_large()) {
            self.register();
        }
        if admitted.cap.is_none() && admitted.resumes.is_none() && !is_limited {
            return None;
        }
        let mut held = self.held();
        if !held.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            held.waker = Some(waker.clone());
        }
        held.cancelled.clone()
    }

    /// Returns `true` if the request holds a quarter more than when it was cancelled.
    pub(super) fn has_grown_since(&self, cancelled: &Rejected) -> bool {
        let Rejected::Outgrown { held, .. } = cancelled else { return false };
        self.0.memory().live > held.saturating_add(ByteSize::new(held.get() / 4))
    }

    /// Returns the head of the request for an answer: its method, version and content type, and its
    /// route as the path.
    pub(super) fn head(&self) -> Parts {
        let RequestOrigin { method, version, route, content_type, .. } = &self.0.owner().origin;
        let (mut head, ()) = Request::new(()).into_parts();
        (head.method, head.version) = (method.clone(), *version);
        let path = route.to_string();
        let path = if path.starts_with('/') { path } else { format!("/{path}") };
        head.uri = path.parse().unwrap_or_default();
        if let Some(content_type) = content_type {
            head.headers.insert(CONTENT_TYPE, content_type.clone());
        }
        head
    }

    /// Returns the name of the request's route.
    pub(super) fn route(&self) -> String {
        self.0.owner().origin.route.to_string()
    }

    /// Returns `true` if the request came over HTTP/2 and has a content type.
    pub(super) fn may_be_grpc(&self) -> bool {
        self.0.owner().origin.content_type.is_some()
    }

    /// Returns `true` if its connection, or its stream of one, is another protocol's after an answer
    /// with this status.
    pub(super) fn upgrades(&self, status: StatusCode) -> bool {
        let is_tunnel = self.0.owner().origin.method == Method::CONNECT;
        status == UPGRADED || is_tunnel && status.is_success()
    }

    /// Records that its handler answered: `is_whole` if the response needs no more memory.
    pub(super) fn answered(&self, success: bool, is_whole: bool) {
        let admitted = self.0.owner();
        admitted.is_answered.store(true, Ordering::Relaxed);
        admitted.leave_turn();
        let is_free = {
            let mut held = self.held();
            held.waker = None;
            held.answer = Some(success);
            // A failure does not show the need of the route.
            if let Some(slot) = &held.terms.slot {
                slot.answered(success);
            }
            self.may_release_claim(&held)
        };
        if is_free {
            self.receives(Poll::Ready(0), Waker::noop());
        }
        if admitted.is_to_start.load(Ordering::Relaxed) {
            self.go_on();
        }
        if is_whole && self.is_large() && admitted.progress.load(Ordering::Relaxed) == WORKS {
            admitted.progress.store(SENDS, Ordering::Relaxed);
            self.register();
        } else if admitted.limits.is_some() {
            self.register();
        }
    }

    fn held(&self) -> MutexGuard<'_, PermitState> {
        lock(&self.0.owner().held)
    }

    /// Changes the reservation.
    fn change<R>(&self, change: impl FnOnce(&mut PermitState) -> R) -> R {
        let mut held = self.held();
        let result = change(&mut held);
        self.0.owner().covered.store(held.permit.cost().host.get(), Ordering::Relaxed);
        result
    }

    /// Waits until the request is cancelled, and returns the rejection to answer with. Use it in
    /// `select!`, in a handler and in tasks that it spawned. Never completes if the request is
    /// exempt or not measured. A task that waits for nothing else would keep the reservation
    /// forever: end it with the work.
    ///
    /// A request is cancelled if it holds several times its claim while memory is short
    /// ([`MemoryLayer::with_request_cap`](super::MemoryLayer::with_request_cap)), if it is furthest
    /// above its claim at level critical, and if a time limit has passed
    /// ([`MemoryLayer::with_min_data_rate`](super::MemoryLayer::with_min_data_rate),
    /// [`MemoryLayer::with_max_hold`](super::MemoryLayer::with_max_hold)). Its claim is what it
    /// reserved when it was admitted, or later with [`RequestPermit::grow`] and
    /// [`RequestPermit::hold`].
    ///
    /// A handler that goes on is dropped at the end of a later poll: 100 ms after the cancellation,
    /// or earlier if the request grows by another quarter; after a time limit, at the end of its
    /// next poll. Its bytes stay reserved until they are freed. Three things cannot be interrupted:
    /// a single poll (see [`RequestPermit::check`]), work on other threads such as
    /// `spawn_blocking`, and, except by a time limit, a response whose head was returned.
    ///
    /// ```
    /// use http::Response;
    /// use lowtide::service::{RequestPermit, rejection};
    ///
    /// async fn handler(permit: RequestPermit) -> Response<String> {
    ///     tokio::select! {
    ///         answer = work() => Response::new(answer),
    ///         rejected = permit.cancelled() => rejection(&rejected),
    ///     }
    /// }
    /// # async fn work() -> String { String::new() }
    /// ```
    pub async fn cancelled(&self) -> Rejected {
        let mut waiting = WaitForCancel { permit: self, id: None };
        poll_fn(|cx| waiting.poll(cx)).await
    }

    /// Counts the memory that the calling thread has allocated for the request so far, and returns
    /// an error if the request is cancelled. Use it in long loops within one poll, and in blocking
    /// work. Costs about as much as measuring a poll; see [`RequestPermit::cancelled`].
    ///
    /// # Errors
    /// [`Rejected::Outgrown`] once the request is cancelled, or the time limit that has passed.
    pub fn check(&self) -> Result<(), Rejected> {
        self.release(ByteSize::ZERO);
        self.cancellation().map_or(Ok(()), Err)
    }

    /// Reserves more memory.
    ///
    /// # Errors
    /// [`Rejected`] if it does not fit, or if the request is cancelled. The earlier reservation is
    /// unchanged.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        self.grow_with(|held| {
            let wanted = held.claimed().saturating_add(bytes);
            let grown = held.grow(bytes);
            if grown.is_ok() {
                held.claimed = held.claimed.map(|claimed| claimed.saturating_add(bytes));
            }
            // Recorded even if it does not fit now, since the estimate did not suffice. A request
            // for more than can ever fit shows no need.
            if !matches!(grown, Err(Rejected::TooLarge { .. })) {
                held.reported = held.reported.max(Some(wanted));
            }
            grown
        })
    }

    /// Reports the total host memory that the request holds now. Reserves the difference if that
    /// exceeds the reservation, and records the largest amount reported, from which
    /// the layer learns. Releases nothing: see [`RequestPermit::shrink`].
    ///
    /// # Errors
    /// [`Rejected`] if it does not fit, or if the request is cancelled. The earlier reservation is
    /// unchanged.
    pub fn hold(&self, bytes: ByteSize) -> Result<(), Rejected> {
        self.grow_with(|held| {
            held.reported = held.reported.max(Some(bytes));
            let more = bytes.saturating_sub(held.permit.cost().host);
            if !more.is_zero() {
                held.grow(more)?;
            }
            held.declared = bytes;
            Ok(())
        })
    }

    /// Grows the reservation on request of the handler, and with it the claim.
    fn grow_with(
        &self,
        grow: impl FnOnce(&mut PermitState) -> Result<(), Rejected>,
    ) -> Result<(), Rejected> {
        self.change(|held| {
            if let Some(cancelled) = &held.cancelled {
                return Err(cancelled.clone());
            }
            let before = held.claimed();
            grow(held)?;
            let after = held.claimed();
            if held.streams.is_some() {
                held.declared = after;
            }
            if after > before {
                self.0.owner().claim.fetch_max(after.get(), Ordering::Relaxed);
            }
            Ok(())
        })
    }

    /// Releases a part of the reservation.
    pub fn shrink(&self, bytes: ByteSize) {
        let state = self.change(|held| {
            let left = held.claimed().saturating_sub(bytes);
            held.claimed = held.claimed.map(|_| left);
            held.declared = held.declared.min(left);
            // A suspended request has released a part of it before.
            held.permit.shrink_quietly(held.permit.cost().host.saturating_sub(left));
            held.permit.state()
        });
        state.wake_waiting();
    }

    /// Returns the reserved host memory.
    #[must_use]
    pub fn reserved(&self) -> ByteSize {
        self.held().permit.cost().host
    }

    /// Returns the largest amount that was reported, or reserved by growing; `None` without either.
    #[must_use]
    pub fn peak(&self) -> Option<ByteSize> {
        self.held().reported
    }
}

impl Admitted {
    fn leave_turn(&self) {
        self.turn.iter().for_each(Turn::leave);
    }

    fn claim(&self) -> ByteSize {
        ByteSize::new(self.claim.load(Ordering::Relaxed))
    }

    /// Records that its reservation is not suspended any more.
    fn resumed(&self, held: &mut PermitState) {
        held.claimed = None;
        self.reserved_at.store(nanos(held.permit.state().last_tick()), Ordering::Relaxed);
        self.is_suspended.store(false, Ordering::Relaxed);
    }

    fn phase(&self) -> RequestPhase {
        if self.is_answered.load(Ordering::Relaxed) {
            RequestPhase::Answered
        } else if self.is_suspended.load(Ordering::Relaxed) {
            RequestPhase::Suspended
        } else if self.progress.load(Ordering::Relaxed) == RECEIVES {
            RequestPhase::Receiving
        } else {
            RequestPhase::Working
        }
    }
}

fn nanos(moment: Moment) -> u64 {
    u64::try_from(moment.since_origin().as_nanos()).unwrap_or(u64::MAX)
}

/// Waits until a request is cancelled.
struct WaitForCancel<'a> {
    permit: &'a RequestPermit,
    /// The number of its waker.
    id: Option<u64>,
}

impl WaitForCancel<'_> {
    fn poll(&mut self, cx: &Context<'_>) -> Poll<Rejected> {
        let mut held = self.permit.held();
        let held = &mut *held;
        if let Some(cancelled) = &held.cancelled {
            return Poll::Ready(cancelled.clone());
        }
        let id = *self.id.get_or_insert_with(|| {
            held.next += 1;
            held.next
        });
        match held.waiting.iter_mut().find(|(other, _)| *other == id) {
            Some((_, waker)) => waker.clone_from(cx.waker()),
            None => unmeasured(|| held.waiting.push((id, cx.waker().clone()))),
        }
        Poll::Pending
    }
}

impl Drop for WaitForCancel<'_> {
    fn drop(&mut self) {
        if let Some(id) = self.id {
            self.permit.held().waiting.retain(|(other, _)| *other != id);
        }
    }
}

/// Work of a large request whose need is not known. While it runs, time lets no further requests
/// in. It ends when dropped, also on a panic.
struct TrialWork<'a> {
    permit: &'a RequestPermit,
    /// The request may be suspended meanwhile.
    slot: Option<Arc<SlowStartPermit>>,
    before: ByteSize,
}

impl<'a> TrialWork<'a> {
    #[cold]
    fn new(permit: &'a RequestPermit) -> Self {
        let slot = permit.held().terms.slot.clone();
        slot.iter().for_each(|slot| slot.begins_work());
        Self { permit, slot, before: permit.0.memory().live }
    }
}

impl Drop for TrialWork<'_> {
    fn drop(&mut self) {
        let (live, admitted) = (self.permit.0.memory().live, self.permit.0.owner());
        // Growth within the claim takes no room from other requests.
        let more = live.saturating_sub(self.before.max(admitted.claim()));
        self.slot.iter().for_each(|slot| slot.ends_work(more >= REPORTED_MIN));
    }
}

/// Reserves what work left allocated, also if it panicked.
struct ReserveGuard<'a>(&'a RequestPermit, Option<&'a Turn>);

impl Drop for ReserveGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.1.into_iter().for_each(Turn::ends_work);
        self.0.cover();
    }
}

lowtide_admission::debug_as!(RequestPermit, |permit| reserved: permit.reserved(), memory: permit.memory());

impl WeakPermit {
    fn permit(&self) -> Option<RequestPermit> {
        self.0.upgrade().map(RequestPermit)
    }

    /// Subtracts a frame from the request, unless the request has ended. If this thread runs for
    /// the request, freeing the frame's block is measured; otherwise the block is subtracted here.
    pub(super) fn give_back(&self, bytes: ByteSize, is_lent: bool, block: ByteSize) {
        let Some(permit) = self.permit() else { return };
        if is_lent {
            permit.0.owner().lent.fetch_sub(bytes.get(), Ordering::Relaxed);
        }
        let block = if permit.is_current() { ByteSize::ZERO } else { block };
        permit.release(bytes.saturating_add(block));
    }
}

impl LargeRequest for WeakPermit {
    fn reserved(&self) -> Option<ByteSize> {
        let covered = self.0.upgrade()?.owner().covered.load(Ordering::Relaxed);
        Some(ByteSize::new(covered))
    }

    fn admitted_at(&self) -> Option<Moment> {
        Some(self.0.upgrade()?.owner().admitted_at)
    }

    fn excess(&self) -> ByteSize {
        let Some(account) = self.0.upgrade() else { return ByteSize::ZERO };
        let admitted = account.owner();
        if admitted.cap.is_none() || admitted.is_answered.load(Ordering::Relaxed) {
            return ByteSize::ZERO;
        }
        account.memory().live.saturating_sub(admitted.claim())
    }

    fn is_cancelled(&self) -> bool {
        self.0.upgrade().is_some_and(|account| account.owner().is_cancelled.load(Ordering::Relaxed))
    }

    fn cancel(&self) {
        if let Some(permit) = self.permit() {
            permit.cancel(permit.0.owner().claim());
        }
    }

    fn suspend(&self, now: Moment) {
        let Some(permit) = self.permit() else { return };
        let admitted = permit.0.owner();
        let progress = admitted.progress.load(Ordering::Relaxed);
        let reserved_at = admitted.reserved_at.load(Ordering::Relaxed);
        let since = Duration::from_nanos(nanos(now).saturating_sub(reserved_at));
        let live = || permit.0.memory().live.saturating_add(WINDOW);
        let is_worth = |reserved, keep: ByteSize| reserved >= keep.saturating_add(REGISTERED_MIN);
        let reserved = ByteSize::new(admitted.covered.load(Ordering::Relaxed));
        if admitted.resumes.is_none()
            || progress == WORKS
            || admitted.is_suspended.load(Ordering::Relaxed)
            || since < SLOW_AFTER
            || !is_worth(reserved, live())
        {
            return;
        }
        permit.change(|held| {
            let reserved = held.permit.cost().host;
            // Read under the lock, so that it is no less than what was reported last.
            let keep = live().max(held.declared.saturating_add(WINDOW));
            if !is_worth(reserved, keep) {
                return;
            }
            if progress == SENDS {
                held.permit.suspend(keep);
                held.permit.set_resumed();
                return;
            }
            admitted.is_suspended.store(true, Ordering::SeqCst);
            if admitted.progress.load(Ordering::SeqCst) == RECEIVES {
                held.claimed = Some(reserved);
                held.permit.suspend(keep);
                // It enters the slow start again when its body has arrived.
                held.permit.mark_learned();
                admitted.is_trial.store(false, Ordering::Relaxed);
                held.terms.slot = None;
                admitted.leave_turn();
            } else {
                admitted.is_suspended.store(false, Ordering::Relaxed);
            }
        });
    }

    fn wake(&self) {
        let waker = self.0.upgrade().and_then(|account| lock(&account.owner().held).waker.take());
        if let Some(waker) = waker {
            waker.wake();
        }
    }

    fn check_time(&self, now: Moment) {
        let Some(permit) = self.permit() else { return };
        permit.tend_stream(now);
        let Some(limits) = permit.limits() else { return };
        limits.request().into_iter().for_each(|pace| pace.probe(now));
        if let Some(rejected) = limits.passed(now - permit.0.owner().admitted_at, now) {
            permit.end_in_time(rejected);
        }
    }

    fn describe(&self, now: Moment, into: &mut RequestMemory) -> bool {
        let Some(account) = self.0.upgrade() else { return false };
        let (AccountMemory { live, peak, .. }, admitted) = (account.memory(), account.owner());
        let RequestOrigin { method, route, tenant, .. } = &admitted.origin;
        for (text, of) in [(&mut into.method, method.as_str()), (&mut into.route, route.as_str())] {
            text.clear();
            text.push_str(of);
        }
        match tenant {
            None => into.tenant = None,
            Some(tenant) => {
                let text = into.tenant.get_or_insert_default();
                text.clear();
                text.push_str(tenant.name());
            }
        }
        into.phase = admitted.phase();
        into.reserved = ByteSize::new(admitted.covered.load(Ordering::Relaxed));
        (into.live, into.peak, into.claim) = (live, peak, admitted.claim());
        into.age = now - admitted.admitted_at;
        into.is_cancelled = admitted.is_cancelled.load(Ordering::Relaxed);
        true
    }
}

/// Enters the slow start of a route. If others run, the request that waits here lacks no bytes.
pub(super) fn enter_slow_start(
    admission: &Admission,
    need: &Compared,
    clock: &Arc<dyn Clock>,
    waiting: Option<&Waiting>,
) -> Result<Option<Arc<SlowStartPermit>>, Rejected> {
    let room = admission.ledger(Budget::Host).learned_room();
    need.enter(room.all, clock, admission.state().observes()).map_err(|running| {
        waiting.into_iter().for_each(Waiting::lacks_other);
        admission.state().slow_start(running)
    })
}

/// Enters the turn of a large request. If too many others have theirs, the request that waits here
/// lacks no bytes, unless it `must` go on.
pub(super) fn enter_turn(
    turn: Option<&Turn>,
    state: &'static AdmissionState,
    waiting: Option<&Waiting>,
    must: bool,
) -> Result<(), Rejected> {
    if turn.is_none_or(|turn| turn.enter(must || state.observes())) {
        return Ok(());
    }
    waiting.into_iter().for_each(Waiting::lacks_turn);
    Err(state.slow_start(0))
}

/// Adds to a counter, unless it would exceed `most`.
fn add_up_to(counter: &AtomicU64, bytes: ByteSize, most: ByteSize) -> bool {
    let fits = counter.load(Ordering::Relaxed).saturating_add(bytes.get()) <= most.get();
    if fits {
        counter.fetch_add(bytes.get(), Ordering::Relaxed);
    }
    fits
}

impl PermitState {
    /// Returns what it has reserved, or reserves again when it resumes.
    fn claimed(&self) -> ByteSize {
        self.claimed.unwrap_or_default().max(self.permit.cost().host)
    }

    /// Enters the slow start of its route, if it starts suspended.
    fn enter(&self, waiting: Option<&Waiting>) -> Result<Option<Arc<SlowStartPermit>>, Rejected> {
        let (Some((admission, clock)), Some(need)) = (&self.terms.enters, &self.terms.need) else {
            return Ok(None);
        };
        enter_slow_start(admission, need, clock, waiting)
    }

    fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let before = self.permit.cost().host;
        self.permit.grow(bytes)?;
        if let Some(share) = &mut self.terms.share {
            // The growth of an exempt permit saturates at 64 bits.
            share.grow(self.permit.cost().host.saturating_sub(before));
        }
        Ok(())
    }

    /// Releases what a stream has reserved beyond what it holds and a window.
    fn keep_stream(&mut self, live: ByteSize) {
        let keep = live.max(self.declared).saturating_add(STREAM_WINDOW);
        self.permit.shrink_quietly(self.permit.cost().host.saturating_sub(keep));
    }

    /// Replaces its live bytes in the figures of its route and tenant.
    fn change_live(&mut self, origin: &RequestOrigin, before: ByteSize, after: ByteSize) {
        if let Some(need) = &self.terms.need {
            let live_in = || LiveIn::new(&self.permit, origin, need);
            self.live_in.get_or_insert_with(live_in).change(before, after);
        }
    }

    /// Reports bytes that are in use.
    fn hold(&mut self, live: ByteSize) {
        let more = self.permit.raise(live);
        if self.terms.reports {
            self.permit.report(live);
        }
        if let Some(share) = &mut self.terms.share {
            share.grow(more);
        }
    }
}

impl Admitted {
    /// Called when the last handle of the permit is dropped.
    fn ended(&mut self, memory: AccountMemory) {
        let mut held = lock(&self.held);
        if !memory.live.is_zero() {
            held.permit.state().outlive(memory.live);
        }
        if let Some(live_in) = &held.live_in {
            live_in.change(ByteSize::new(self.reported.load(Ordering::Relaxed)), ByteSize::ZERO);
        }
        let Some(need) = held.terms.need.take() else { return };
        if self.is_measured {
            let bytes = (memory.peak, self.claim());
            let succeeded = held.answer == Some(true);
            usage::add(&held.permit, &self.origin, &need, succeeded, bytes);
        }
        let measured = self.is_measured.then_some(memory.peak);
        if held.cancelled.is_some() || held.has_taught {
            // It might have needed more.
            return need.learn_at_least(held.reported.max(measured).unwrap_or_default());
        }
        if held.answer == Some(true)
            && let Some(peak) = held.reported.max(measured)
        {
            return need.learn(peak);
        }
        // The request failed, or its client left: what it held is no evidence of its full need.
        if let Some(peak) = held.reported {
            need.learn(peak);
        }
        if let Some(measured) = measured {
            need.learn_at_least(measured);
        }
    }
}
