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
//! other threads, or a response whose head was returned. A poll that outgrows the claim may go on in
//! a file (`heap::spill`).
//!
//! Not measured: tasks and threads without a scope, and C code that does not allocate through
//! jemalloc.
//!
//! Invariants: the reservation is released when the last handle is dropped; the reservation covers
//! the live bytes after each piece of work, also of a cancelled request; `peak` never falls.

mod course;
mod record;
mod registered;

use std::future::poll_fn;
use std::sync::Arc;
use std::task::{Context, Poll};

use http::Request;
use http::header::CONTENT_TYPE;
use http::request::Parts;

use crate::bytes::ByteSize;
use crate::sync::atomic::{AtomicU64, Ordering};
use crate::sync::{MutexGuard, lock};
use lowtide_admission::layer::{LARGE_MIN, Turn};
use lowtide_admission::learning::{Compared, GROWS_LATE, SlowStartPermit};
use lowtide_admission::{Admission, Rejected};
use lowtide_heap::{Account, AccountMemory, unmeasured};

use super::usage::{LiveIn, RequestOrigin};
pub(super) use course::{ARRIVAL_WINDOW, QueuePlace};
use record::{Admitted, PermitState, TRIAL};
pub(super) use record::{RequestHolds, RequestTerms, ResumeOptions, enter_slow_start, enter_turn};
pub(super) use registered::WeakPermit;

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

impl RequestPermit {
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
        self.run(self.0.owner().terms.turn.as_ref(), work)
    }

    #[inline]
    fn run<R>(&self, turn: Option<&Turn>, work: impl FnOnce() -> R) -> R {
        if !self.is_measured() {
            return work();
        }
        let admitted = self.0.owner();
        let _trial = if admitted.progress.has(TRIAL) { self.begin_trial() } else { None };
        turn.into_iter().for_each(Turn::begins_work);
        let _guard = WorkGuard { permit: self, turn };
        let covered = ByteSize::new(admitted.covered.load(Ordering::Relaxed));
        if covered < LARGE_MIN || !admitted.terms.reports {
            return self.0.run(work);
        }
        // What the ledger does not know yet of what it holds.
        self.0.run_within(covered.saturating_sub(self.0.memory().live), work)
    }

    #[cold]
    fn begin_trial(&self) -> Option<TrialGuard<'_>> {
        let slot = self.held().holds.slot.clone()?;
        slot.begins_work();
        Some(TrialGuard { permit: self, slot, before: self.0.memory().live })
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
        self.0.owner().terms.is_measured
    }

    /// Returns `true` if this admission has reserved its bytes, unless it is exempt.
    pub(super) fn is_admitted_by(&self, admission: &Admission) -> bool {
        !self.0.owner().terms.is_exempt && std::ptr::eq(self.0.owner().state, admission.state())
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
            let before = admitted.reported.swap(live.get(), Ordering::Relaxed);
            let RequestTerms { origin, reports, .. } = &admitted.terms;
            let PermitState { holds, live_in, streams, .. } = held;
            let more = holds.permit.raise(live);
            if *reports {
                holds.permit.report(live);
            }
            if let Some(share) = &mut holds.share {
                share.grow(more);
            }
            if let Some(need) = &holds.need {
                need.observe_running(live);
                let is_late = |before: ByteSize| live > before.scaled(2.0).saturating_add(LATE_MIN);
                if streams.is_some_and(is_late) {
                    need.note(GROWS_LATE);
                }
                let new = || LiveIn::new(&holds.permit, origin, need);
                live_in.get_or_insert_with(new).change(ByteSize::new(before), live);
            }
            if streams.is_some() {
                held.keep_stream(live);
            }
            live
        });
        if live >= LARGE_MIN {
            self.register();
        }
        let cap = admitted.terms.cap;
        if cap.is_finite() && admitted.state.is_short() {
            let need = self.held().holds.need.as_ref().map_or(ByteSize::ZERO, Compared::expected);
            let most = need.max(admitted.claim()).scaled(cap).max(CAP_MIN);
            if live > most {
                self.cancel(most);
            }
        }
    }

    /// Returns the head of the request for an answer: its method, version and content type, and its
    /// route as the path.
    pub(super) fn head(&self) -> Parts {
        let RequestOrigin { method, version, route, content_type, .. } =
            &self.0.owner().terms.origin;
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
        self.0.owner().terms.origin.route.to_string()
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
                self.0.set_claim(self.0.owner().claim());
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

/// Work of a large request whose need is not known, also if it panicked: meanwhile, time lets no
/// further requests in.
struct TrialGuard<'a> {
    permit: &'a RequestPermit,
    /// The request may be suspended meanwhile.
    slot: Arc<SlowStartPermit>,
    before: ByteSize,
}

impl Drop for TrialGuard<'_> {
    #[cold]
    fn drop(&mut self) {
        let (live, admitted) = (self.permit.0.memory().live, self.permit.0.owner());
        // Growth within the claim takes no room from other requests.
        let more = live.saturating_sub(self.before.max(admitted.claim()));
        self.slot.ends_work(more >= REPORTED_MIN);
    }
}

/// Reserves what work left allocated, also if it panicked.
struct WorkGuard<'a> {
    permit: &'a RequestPermit,
    turn: Option<&'a Turn>,
}

impl Drop for WorkGuard<'_> {
    #[inline]
    fn drop(&mut self) {
        self.turn.into_iter().for_each(Turn::ends_work);
        self.permit.cover();
    }
}

lowtide_core::debug_as!(RequestPermit, |permit| reserved: permit.reserved(), memory: permit.memory());

/// Adds to a counter, unless it would exceed `most`.
fn add_up_to(counter: &AtomicU64, bytes: ByteSize, most: ByteSize) -> bool {
    let next = |sum: u64| sum.checked_add(bytes.get()).filter(|sum| *sum <= most.get());
    counter.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).is_ok()
}
