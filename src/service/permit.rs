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

use http::Request;
use http::header::CONTENT_TYPE;
use http::request::Parts;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use crate::sync::{Mutex, MutexGuard, lock};
use lowtide_admission::layer::{
    AdmissionState, LARGE_MIN, LargeRequest, REGISTERED_MIN, RequestFigures, SLOW_AFTER, Turn,
    Waiting,
};
use lowtide_admission::learning::{Compared, GROWS_LATE, READS, STREAMS, SlowStartPermit};
use lowtide_admission::{
    Admission, Budget, Permit, Priority, RejectReason, Rejected, RequestMemory, RequestPhase,
};
use lowtide_heap::{Account, AccountMemory, unmeasured};

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

/// The time after which an answer without a known end has lasted: that after which the slow start
/// lets further requests in. Until then it may be a short one.
const STREAM_AFTER: Duration = Duration::from_secs(1);
/// The same for a route in which an answer grew late. An estimate: longer than most queries.
const LATE_AFTER: Duration = Duration::from_secs(60);

/// A permit that does not keep the reservation.
#[derive(Clone, Debug)]
pub(super) struct WeakPermit(Weak<Account<Admitted>>);

/// An admitted request. The layer, its bodies and the control loop read and change it here, and
/// nowhere else.
#[derive(Debug)]
struct Admitted {
    terms: RequestTerms,
    state: &'static AdmissionState,
    admitted_at: Moment,
    progress: Progress,
    /// The bytes that it reserved when it was admitted, or later by growing.
    claim: AtomicU64,
    /// The reserved bytes, and the live bytes as reported last, so that most polls need no lock.
    covered: AtomicU64,
    reported: AtomicU64,
    /// The bytes of frames in buffers of the connection.
    lent: AtomicU64,
    /// The bytes of frames that were ever copied plainly.
    copied: AtomicU64,
    held: Mutex<PermitState>,
}

/// What a request does or waits for: flags in one word, so that whoever changes one sees the others.
#[derive(Debug)]
struct Progress(AtomicU16);

/// A body of known length has not arrived in whole.
const ARRIVES: u16 = 1;
/// Its handler waits for more of the body.
const RECEIVES: u16 = 1 << 1;
/// Its reservation is suspended.
const SUSPENDED: u16 = 1 << 2;
/// Its handler has dropped its body, and works only once its claim is reserved.
const STARTS: u16 = 1 << 3;
/// Its handler has answered, and the layer cannot end it any more.
const ANSWERED: u16 = 1 << 4;
/// Its handler has returned all of its response, which is not sent yet.
const SENDS: u16 = 1 << 5;
const CANCELLED: u16 = 1 << 6;
/// It has a slot of its route's slow start.
const TRIAL: u16 = 1 << 7;
/// It is in the registry of large requests.
const REGISTERED: u16 = 1 << 8;

impl Progress {
    fn has(&self, flags: u16) -> bool {
        self.0.load(Ordering::Acquire) & flags != 0
    }

    /// Sets flags. Returns `true` if it had one of them.
    fn set(&self, flags: u16) -> bool {
        self.0.fetch_or(flags, Ordering::AcqRel) & flags != 0
    }

    fn clear(&self, flags: u16) {
        self.0.fetch_and(!flags, Ordering::AcqRel);
    }

    /// Replaces its flags, unless the change is `None`. Returns what it had, as an error if nothing
    /// was changed.
    fn change(&self, change: impl Fn(u16) -> Option<u16>) -> Result<u16, u16> {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change)
    }
}

/// The place in the queue of a suspended request, or of its body.
#[derive(Debug)]
pub(super) struct QueuePlace {
    waiting: Option<Waiting>,
    /// There was no room for its claim in time.
    is_refused: bool,
}

impl QueuePlace {
    /// It does not wait.
    pub(super) const NONE: Self = Self { waiting: None, is_refused: false };
}

/// The terms on which a suspended request waits for room.
#[derive(Clone, Copy, Debug)]
pub(super) struct ResumeOptions {
    pub(super) priority: Priority,
    pub(super) tenant: u64,
    /// The longest time to wait.
    pub(super) within: Duration,
}

/// What an admitted request is, from its admission to its end.
#[derive(Debug)]
pub(super) struct RequestTerms {
    pub(super) origin: RequestOrigin,
    /// The multiple of what it was expected to hold above which it may be cancelled; `None` if
    /// nothing cancels it.
    pub(super) cap: Option<f64>,
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
    pub(super) limits: Option<Box<TimeLimits>>,
}

/// What an admitted request uses, in part until it ends.
#[derive(Debug)]
pub(super) struct RequestHolds {
    pub(super) permit: Permit,
    /// The recipient of the measured memory.
    pub(super) need: Option<Compared>,
    /// The share of a request that is exempt by its path.
    pub(super) share: Option<ExemptShare>,
    /// The slot of a large request whose route is not known yet.
    pub(super) slot: Option<Arc<SlowStartPermit>>,
    /// The admission and the clock with which it enters the slow start of its route when it
    /// resumes; `None` if it does not.
    pub(super) enters: Option<(Admission, Arc<dyn Clock>)>,
}

#[derive(Debug)]
struct PermitState {
    holds: RequestHolds,
    /// The largest amount that the handler reported or requested, without the initial reservation.
    reported: Option<ByteSize>,
    /// What its handler reported to hold. It may not be measured.
    declared: ByteSize,
    /// The last time at which its claim was reserved.
    reserved_at: Moment,
    /// Set if its handler answered: `true` for success.
    answer: Option<bool>,
    /// How its answer goes on without a known end.
    lasts: Lasts,
    /// What it held when its answer became a stream.
    streams: Option<ByteSize>,
    /// `true` once its route has learned from it.
    has_taught: bool,
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
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Lasts {
    /// It has not gone on, or its end is known.
    No,
    Since(Moment),
    /// Nothing depends on it any more.
    Done,
}

impl RequestPermit {
    pub(super) fn new(terms: RequestTerms, mut holds: RequestHolds) -> Self {
        let RequestHolds { permit, slot, .. } = &mut holds;
        if terms.reports {
            permit.report(ByteSize::ZERO);
        }
        let mut flags = if permit.is_suspended() { SUSPENDED | RECEIVES } else { 0 };
        if let Some(slot) = slot {
            slot.begin();
            permit.mark_unlearned(slot);
            flags |= TRIAL;
        }
        let state = permit.state();
        let admitted_at = state.last_tick();
        let admitted = Admitted {
            terms,
            state,
            admitted_at,
            progress: Progress(AtomicU16::new(flags)),
            claim: AtomicU64::new(permit.claim().get()),
            covered: AtomicU64::new(permit.cost().host.get()),
            reported: AtomicU64::new(0),
            lent: AtomicU64::new(0),
            copied: AtomicU64::new(0),
            held: Mutex::new(PermitState {
                holds,
                reported: None,
                declared: ByteSize::ZERO,
                reserved_at: admitted_at,
                answer: None,
                lasts: Lasts::No,
                streams: None,
                has_taught: false,
                cancelled: None,
                waker: None,
                waiting: Vec::new(),
                next: 0,
                live_in: None,
            }),
        };
        Self(Arc::new(Account::new(admitted, Admitted::ended)))
    }

    fn terms(&self) -> &RequestTerms {
        &self.0.owner().terms
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
        self.run(self.terms().turn.as_ref(), work)
    }

    #[inline]
    fn run<R>(&self, turn: Option<&Turn>, work: impl FnOnce() -> R) -> R {
        if !self.is_measured() {
            return work();
        }
        let admitted = self.0.owner();
        let _trial = admitted.progress.has(TRIAL).then(|| TrialWork::new(self));
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
        self.terms().is_measured
    }

    /// Returns `true` if this admission has reserved its bytes, unless it is exempt.
    pub(super) fn is_admitted_by(&self, admission: &Admission) -> bool {
        !self.terms().is_exempt && std::ptr::eq(self.0.owner().state, admission.state())
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
        let live = self.change(|held| {
            // Read under the lock, so that no thread overwrites a newer report with an older one.
            let live = self.0.memory().live;
            held.hold(live, admitted.terms.reports);
            if let Some(need) = &held.holds.need {
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
            held.change_live(&admitted.terms.origin, ByteSize::new(before), live);
            live
        });
        if live >= LARGE_MIN {
            self.register();
        }
        if let Some(cap) = admitted.terms.cap.filter(|_| admitted.state.is_short()) {
            let most = self.expected().scaled(cap).max(CAP_MIN);
            if live > most {
                self.cancel(most);
            }
        }
    }

    /// Adds it to the running requests that have reserved much, once.
    fn register(&self) {
        let admitted = self.0.owner();
        if !admitted.progress.set(REGISTERED) {
            unmeasured(|| admitted.state.register(Arc::new(self.downgrade())));
        }
    }

    /// Returns `true` if it has reserved so much that it is registered when it waits.
    fn is_large(&self) -> bool {
        let admitted = self.0.owner();
        admitted.terms.is_measured
            && admitted.covered.load(Ordering::Relaxed) >= REGISTERED_MIN.get()
    }

    /// Returns the most that the request was expected to hold.
    fn expected(&self) -> ByteSize {
        let (held, claim) = (self.held(), self.0.owner().claim());
        held.holds.need.as_ref().map_or(claim, |need| need.expected().max(claim))
    }

    /// Records that the handler waits for more of the body, or has got some. In the meantime it
    /// may allocate, so the request is not suspended.
    pub(super) fn set_receiving(&self, is_receiving: bool) {
        let receives = if is_receiving { RECEIVES } else { 0 };
        let _ =
            self.0.owner().progress.change(|flags| Some(flags & !(RECEIVES | SENDS) | receives));
    }

    /// Records that the body of the request has arrived, or is not read. Returns `false` if its
    /// reservation is suspended: then its end must wait.
    pub(super) fn arrived(&self) -> bool {
        let progress = &self.0.owner().progress;
        let arrived = progress.change(|flags| {
            let is_suspended = flags & SUSPENDED != 0;
            (!is_suspended).then_some(flags & !(RECEIVES | SENDS | ARRIVES))
        });
        let Ok(before) = arrived else {
            progress.set(RECEIVES);
            return false;
        };
        if before & TRIAL != 0
            && let Some(slot) = &self.held().holds.slot
        {
            slot.arrived();
        }
        true
    }

    /// Records that a body of known length is to arrive.
    pub(super) fn arrives(&self) {
        self.0.owner().progress.set(ARRIVES);
    }

    /// Returns `true` if it needs no claim once its handler has answered. A trusted estimate may
    /// cover memory that is not measured, and a handler may collect a body of known length.
    fn may_release_claim(&self) -> bool {
        let Admitted { terms, progress, .. } = self.0.owner();
        terms.reports && terms.resumes.is_some() && !progress.has(ARRIVES)
    }

    /// Records that its answer goes on without a known end. Returns `true` once nothing depends on
    /// that.
    #[cold]
    pub(super) fn goes_on(&self) -> bool {
        let now = self.0.owner().state.last_tick();
        let before = {
            let mut held = self.held();
            let before = held.lasts;
            if before == Lasts::No {
                held.lasts = Lasts::Since(now);
            }
            before
        };
        if before == Lasts::No {
            // Operators look for what lasts long.
            self.register();
        }
        let RequestTerms { reports, resumes, .. } = self.terms();
        !reports || resumes.is_none() || self.tend_stream(now)
    }

    /// Releases the claim of a request whose answer is a stream: from now on it has reserved what
    /// it holds and a window, and more as it grows. If its body waits in the queue, it goes on at
    /// its turn without its claim. An answer is a stream once it has lasted, or at once if others
    /// of its route have. Once it has lasted its route learns from it, since it may go on for hours.
    /// Returns `true` if nothing is left to do.
    fn tend_stream(&self, now: Moment) -> bool {
        let admitted = self.0.owner();
        let is_done = self.change(|held| {
            let (Lasts::Since(since), Some(need)) = (held.lasts, &held.holds.need) else {
                return held.lasts == Lasts::Done;
            };
            let is_late = need.has(GROWS_LATE);
            let has_lasted = now - since >= if is_late { LATE_AFTER } else { STREAM_AFTER };
            if !self.may_release_claim() {
                return false;
            }
            let is_lasting = has_lasted && held.answer == Some(true) && !held.has_taught;
            if is_lasting {
                need.note(STREAMS);
            }
            if !has_lasted && (is_late || !need.has(STREAMS)) {
                return false;
            }
            let AccountMemory { live, peak, .. } = self.0.memory();
            let _ = held.streams.get_or_insert(live);
            if is_lasting {
                need.learn(held.reported.unwrap_or_default().max(peak));
                held.has_taught = true;
            }
            held.keep_stream(live);
            if held.holds.permit.is_suspended() {
                admitted.resumed(held);
                held.holds.enters = None;
            }
            if has_lasted {
                held.holds.permit.mark_learned();
                held.holds.slot = None;
                held.lasts = Lasts::Done;
            }
            has_lasted
        });
        admitted.state.wake_waiting();
        is_done
    }

    /// Returns `true` if its reservation is suspended.
    pub(super) fn is_suspended(&self) -> bool {
        self.0.owner().progress.has(SUSPENDED)
    }

    /// Reserves a window for what arrives next of a suspended request's body. Returns `false` if
    /// the request must resume first.
    fn may_receive(&self) -> bool {
        let wanted = self.0.memory().live.saturating_add(WINDOW);
        self.change(|held| held.holds.permit.reserve_arriving(wanted))
    }

    /// Enters the queue to resume. Returns `None` if it is full, and if the request is never
    /// suspended.
    fn wait_to_resume(&self) -> Option<Waiting> {
        let ResumeOptions { priority, tenant, within } = self.terms().resumes?;
        self.held().holds.permit.wait_to_resume(priority, tenant, within)
    }

    /// Reserves the claim of a suspended request again. Returns `true` if it has entered the slow
    /// start of its route, which counts its work from its next poll on.
    fn resume(&self, waiting: Option<&Waiting>) -> Result<bool, Rejected> {
        let admitted = self.0.owner();
        let Some(ResumeOptions { priority, .. }) = admitted.terms.resumes else { return Ok(false) };
        self.change(|held| {
            let slot = held.holds.enter(waiting)?;
            let turn = admitted.terms.turn.as_ref();
            enter_turn(turn, admitted.state, waiting, waiting.is_none())?;
            let permit = &mut held.holds.permit;
            permit.resume(waiting, priority).inspect_err(|_| admitted.leave_turn())?;
            let has_entered = slot.is_some();
            if let Some(slot) = &slot {
                slot.begin();
                slot.answered(held.answer == Some(true));
                permit.mark_unlearned(slot);
                admitted.progress.set(TRIAL);
            }
            held.holds.slot = slot.or_else(|| held.holds.slot.take());
            admitted.resumed(held);
            Ok(has_entered)
        })
    }

    /// Waits until a suspended request may receive more of its body. `is_last` if it needs its whole
    /// claim for that, or to work.
    #[cold]
    pub(super) fn poll_room(
        &self,
        place: &mut QueuePlace,
        is_last: bool,
        cx: &Context<'_>,
    ) -> Poll<()> {
        if std::mem::take(&mut place.is_refused) {
            // It is read by a task, which the layer cannot end.
            self.go_on();
            return Poll::Ready(());
        }
        let waiting = &mut place.waiting;
        if !is_last && waiting.is_none() && self.may_receive() {
            return Poll::Ready(());
        }
        if waiting.is_none() {
            *waiting = self.wait_to_resume();
        }
        // Ends: each iteration needs a wake of the queue.
        loop {
            let is_turn = match waiting {
                Some(waiting) => ready!(waiting.poll_turn(cx)),
                None => false,
            };
            match self.resume(waiting.as_ref().filter(|_| is_turn)) {
                Ok(false) => break,
                Ok(true) => {
                    *waiting = None;
                    cx.waker().wake_by_ref();
                    return Poll::Pending;
                }
                Err(rejected) if is_turn && rejected.may_wait() => {}
                Err(rejected) => {
                    self.refuse(rejected);
                    break;
                }
            }
        }
        *waiting = None;
        if self.is_suspended() {
            // The layer ends the handler at the end of this poll.
            place.is_refused = true;
            cx.waker().wake_by_ref();
            return Poll::Pending;
        }
        Poll::Ready(())
    }

    /// Ends a suspended request for which there was no room in time. If its handler has answered
    /// already, it goes on without its claim.
    #[cold]
    fn refuse(&self, rejected: Rejected) {
        let admitted = self.0.owner();
        if admitted.progress.has(ANSWERED) {
            self.go_on();
        } else {
            self.end(|| admitted.state.reject(rejected));
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
            !held.holds.permit.is_started() && held.answer.is_none() && held.cancelled.is_none()
        };
        if is_to_start {
            self.0.owner().progress.set(STARTS);
        } else {
            self.go_on();
        }
    }

    /// Waits until the claim is reserved of a request whose handler dropped its body before that.
    #[inline]
    pub(super) fn poll_start(&self, place: &mut QueuePlace, cx: &Context<'_>) -> Poll<()> {
        let progress = &self.0.owner().progress;
        if progress.has(STARTS) {
            if self.is_suspended() {
                ready!(self.poll_room(place, true, cx));
            }
            progress.clear(STARTS);
            self.arrived();
        }
        Poll::Ready(())
    }

    /// Records that the handler reads its body: those of later requests of the route may be read
    /// before there is room for their claims.
    pub(super) fn reads(&self) {
        if let Some(need) = &self.held().holds.need {
            need.note(READS);
        }
    }

    /// Ends the suspension without its claim: what it holds from now on is reserved as it grows.
    #[cold]
    pub(super) fn go_on(&self) {
        let admitted = self.0.owner();
        self.change(|held| {
            admitted.progress.clear(RECEIVES | SENDS | ARRIVES);
            admitted.resumed(held);
            held.holds.enters = None;
        });
    }

    /// Cancels the request, since it holds more than `most`. Observe mode only counts it.
    #[cold]
    fn cancel(&self, most: ByteSize) {
        if self.held().holds.permit.observe(RejectReason::Outgrown) {
            return;
        }
        let (live, admitted) = (self.0.memory().live, self.0.owner());
        self.end(|| admitted.state.outgrown(live, admitted.claim(), most));
    }

    /// Returns its time limits.
    pub(super) fn limits(&self) -> Option<&TimeLimits> {
        self.terms().limits.as_deref()
    }

    /// Records a poll of the request's body: so many bytes, or a wait for the client.
    pub(super) fn receives(&self, polled: Poll<usize>, waker: &Waker) {
        let Some(pace) = self.limits().and_then(TimeLimits::request) else { return };
        let admitted = self.0.owner();
        let now = admitted.state.last_tick();
        let is_free = admitted.progress.has(ANSWERED) && self.may_release_claim();
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
        let now = self.0.owner().state.last_tick();
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
        let Admitted { terms, state, progress, .. } = self.0.owner();
        // Its body is not read any more, but a task of the handler keeps the permit.
        if progress.has(ANSWERED) && !limits.is_sending() {
            return;
        }
        if self.end(|| state.reject(rejected.clone())) {
            let route = &terms.origin.route;
            log!(debug, target: "lowtide", %rejected, %route, "response ended at a time limit");
            limits.cut();
        }
    }

    /// Cancels the request for this reason, unless it is cancelled already. Returns `true` if it is
    /// cancelled now and its handler has answered.
    fn end(&self, reason: impl FnOnce() -> Rejected) -> bool {
        let mut held = self.held();
        if held.cancelled.is_some() {
            return false;
        }
        // First: `reason` has the control loop look for cancelled requests, once, and again only if
        // it finds one. Bug: in the other order it could miss this one, and never woke it again.
        self.0.owner().progress.set(CANCELLED);
        held.cancelled = Some(reason());
        let is_answered = held.answer.is_some();
        let (waker, waiting) = (held.waker.take(), std::mem::take(&mut held.waiting));
        drop(held);
        waker.into_iter().chain(waiting.into_iter().map(|(_, waker)| waker)).for_each(Waker::wake);
        is_answered
    }

    /// Returns the rejection of a cancelled request.
    pub(super) fn cancellation(&self) -> Option<Rejected> {
        let is_cancelled = self.0.owner().progress.has(CANCELLED);
        is_cancelled.then(|| self.held().cancelled.clone()).flatten()
    }

    /// Keeps the waker of the layer's future while its handler waits. Returns the rejection if the
    /// request is cancelled already.
    pub(super) fn waits(&self, waker: &Waker) -> Option<Rejected> {
        let Admitted { terms, progress, .. } = self.0.owner();
        let is_limited = terms.limits.is_some();
        if !progress.has(REGISTERED) && (is_limited || self.is_large()) {
            self.register();
        }
        if terms.cap.is_none() && terms.resumes.is_none() && !is_limited {
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
        let RequestOrigin { method, version, route, content_type, .. } = &self.terms().origin;
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
        self.terms().origin.route.to_string()
    }

    /// Returns `true` if the request came over HTTP/2 and has a content type.
    pub(super) fn may_be_grpc(&self) -> bool {
        self.terms().origin.content_type.is_some()
    }

    /// Records that its handler answered: `is_whole` if the response needs no more memory.
    pub(super) fn answered(&self, success: bool, is_whole: bool) {
        let admitted = self.0.owner();
        let progress = &admitted.progress;
        admitted.leave_turn();
        {
            let mut held = self.held();
            progress.set(ANSWERED);
            held.waker = None;
            held.answer = Some(success);
            // A failure does not show the need of the route.
            if let Some(slot) = &held.holds.slot {
                slot.answered(success);
            }
        }
        if self.may_release_claim() {
            self.receives(Poll::Ready(0), Waker::noop());
        }
        if progress.has(STARTS) {
            self.go_on();
        }
        let works = |flags| (flags & (RECEIVES | SENDS) == 0).then_some(flags | SENDS);
        if is_whole && self.is_large() && progress.change(works).is_ok()
            || admitted.terms.limits.is_some()
        {
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
        self.0.owner().covered.store(held.holds.permit.cost().host.get(), Ordering::Relaxed);
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
            let wanted = held.holds.permit.claim().saturating_add(bytes);
            let grown = held.holds.grow(bytes);
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
            let more = bytes.saturating_sub(held.holds.permit.cost().host);
            if !more.is_zero() {
                held.holds.grow(more)?;
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
            let before = held.holds.permit.claim();
            grow(held)?;
            let after = held.holds.permit.claim();
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
        self.change(|held| {
            held.holds.permit.shrink_quietly(bytes);
            held.declared = held.declared.min(held.holds.permit.claim());
        });
        self.0.owner().state.wake_waiting();
    }

    /// Returns the reserved host memory.
    #[must_use]
    pub fn reserved(&self) -> ByteSize {
        self.held().holds.permit.cost().host
    }

    /// Returns the largest amount that was reported, or reserved by growing; `None` without either.
    #[must_use]
    pub fn peak(&self) -> Option<ByteSize> {
        self.held().reported
    }
}

impl Admitted {
    fn leave_turn(&self) {
        self.terms.turn.iter().for_each(Turn::leave);
    }

    fn claim(&self) -> ByteSize {
        ByteSize::new(self.claim.load(Ordering::Relaxed))
    }

    /// Ends its suspension: it has reserved its claim, or goes on without it.
    fn resumed(&self, held: &mut PermitState) {
        held.holds.permit.set_resumed();
        held.reserved_at = self.state.last_tick();
        self.progress.clear(SUSPENDED);
    }

    fn phase(&self) -> RequestPhase {
        if self.progress.has(ANSWERED) {
            RequestPhase::Answered
        } else if self.progress.has(SUSPENDED) {
            RequestPhase::Suspended
        } else if self.progress.has(RECEIVES) {
            RequestPhase::Receiving
        } else {
            RequestPhase::Working
        }
    }
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
        let slot = permit.held().holds.slot.clone();
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
    fn figures(&self) -> Option<RequestFigures> {
        let account = self.0.upgrade()?;
        let Admitted { terms, admitted_at, progress, covered, .. } = account.owner();
        let can_end = terms.cap.is_some() && !progress.has(ANSWERED);
        let excess = account.memory().live.saturating_sub(account.owner().claim());
        Some(RequestFigures {
            reserved: ByteSize::new(covered.load(Ordering::Relaxed)),
            admitted_at: Some(*admitted_at),
            excess: if can_end { excess } else { ByteSize::ZERO },
            is_cancelled: progress.has(CANCELLED),
        })
    }

    fn cancel(&self) {
        if let Some(permit) = self.permit() {
            permit.cancel(permit.0.owner().claim());
        }
    }

    fn suspend(&self, now: Moment) {
        let Some(permit) = self.permit() else { return };
        let Admitted { terms, progress, covered, .. } = permit.0.owner();
        let live = || permit.0.memory().live.saturating_add(WINDOW);
        let is_worth = |reserved, keep: ByteSize| reserved >= keep.saturating_add(REGISTERED_MIN);
        if terms.resumes.is_none()
            || !progress.has(RECEIVES | SENDS)
            || progress.has(SUSPENDED)
            || !is_worth(ByteSize::new(covered.load(Ordering::Relaxed)), live())
        {
            return;
        }
        permit.change(|held| {
            // Read under the lock, so that it is no less than what was reported last.
            let keep = live().max(held.declared.saturating_add(WINDOW));
            let RequestHolds { permit, slot, .. } = &mut held.holds;
            if now - held.reserved_at < SLOW_AFTER || !is_worth(permit.cost().host, keep) {
                return;
            }
            if progress.has(SENDS) {
                permit.suspend(keep);
                permit.set_resumed();
                return;
            }
            // Either this sees that its body has arrived, or `arrived` that it is suspended.
            let receives = |flags| (flags & RECEIVES != 0).then_some(flags & !TRIAL | SUSPENDED);
            if progress.change(receives).is_ok() {
                permit.suspend(keep);
                // It enters the slow start again when its body has arrived.
                permit.mark_learned();
                *slot = None;
                terms.turn.iter().for_each(Turn::leave);
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
        if matches!(permit.held().lasts, Lasts::Since(_)) {
            permit.tend_stream(now);
        }
        let Some(limits) = permit.limits() else { return };
        limits.request().into_iter().for_each(|pace| pace.probe(now));
        if let Some(rejected) = limits.passed(now - permit.0.owner().admitted_at, now) {
            permit.end_in_time(rejected);
        }
    }

    fn describe(&self, now: Moment, into: &mut RequestMemory) -> bool {
        let Some(account) = self.0.upgrade() else { return false };
        let (AccountMemory { live, peak, .. }, admitted) = (account.memory(), account.owner());
        let RequestOrigin { method, route, tenant, .. } = &admitted.terms.origin;
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
        into.is_cancelled = admitted.progress.has(CANCELLED);
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

impl RequestHolds {
    /// Enters the slow start of its route, if it starts suspended.
    fn enter(&self, waiting: Option<&Waiting>) -> Result<Option<Arc<SlowStartPermit>>, Rejected> {
        let (Some((admission, clock)), Some(need)) = (&self.enters, &self.need) else {
            return Ok(None);
        };
        enter_slow_start(admission, need, clock, waiting)
    }

    fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let before = self.permit.cost().host;
        self.permit.grow(bytes)?;
        if let Some(share) = &mut self.share {
            // The growth of an exempt permit saturates at 64 bits.
            share.grow(self.permit.cost().host.saturating_sub(before));
        }
        Ok(())
    }
}

impl PermitState {
    /// Releases what a stream has reserved beyond what it holds and a window.
    fn keep_stream(&mut self, live: ByteSize) {
        let keep = live.max(self.declared).saturating_add(STREAM_WINDOW);
        self.holds.permit.keep(keep);
    }

    /// Replaces its live bytes in the figures of its route and tenant.
    fn change_live(&mut self, origin: &RequestOrigin, before: ByteSize, after: ByteSize) {
        if let Some(need) = &self.holds.need {
            let live_in = || LiveIn::new(&self.holds.permit, origin, need);
            self.live_in.get_or_insert_with(live_in).change(before, after);
        }
    }

    /// Reports bytes that are in use.
    fn hold(&mut self, live: ByteSize, reports: bool) {
        let RequestHolds { permit, share, .. } = &mut self.holds;
        let more = permit.raise(live);
        if reports {
            permit.report(live);
        }
        if let Some(share) = share {
            share.grow(more);
        }
    }
}

impl Admitted {
    /// Called when the last handle of the permit is dropped.
    fn ended(&mut self, memory: AccountMemory) {
        let mut held = lock(&self.held);
        if !memory.live.is_zero() {
            self.state.outlive(memory.live);
        }
        if let Some(live_in) = &held.live_in {
            live_in.change(ByteSize::new(self.reported.load(Ordering::Relaxed)), ByteSize::ZERO);
        }
        let Some(need) = held.holds.need.take() else { return };
        let RequestTerms { origin, is_measured, .. } = &self.terms;
        if *is_measured {
            let bytes = (memory.peak, self.claim());
            let succeeded = held.answer == Some(true);
            usage::add(&held.holds.permit, origin, &need, succeeded, bytes);
        }
        let measured = is_measured.then_some(memory.peak);
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
