//! The course of a request after its admission: its body arrives, it is suspended and resumes, its
//! answer goes on, and it ends.
//!
//! A request whose time limit has passed is cancelled as well, and a response whose head was
//! returned is cut (`time_limits`).
//!
//! While others wait for room, a request that waits for its client has its reservation suspended:
//! it keeps what it holds, and reserves its claim again before its body is complete (`body`). Until
//! then it has neither a turn nor a slot of the slow start. One whose handler works between two
//! frames may allocate at any time, and is not suspended.
//!
//! Over HTTP/2 a request for which there is no room starts suspended, so that its body does not fill
//! the window of the connection, and enters the slow start when it resumes.
//!
//! An answer of unknown length that has gone on for a second is a stream, which may last for hours.
//! It keeps what it holds and a window (`record`), and its route learns from it. Later answers of
//! the route are streams at once, unless one grew much after it had lasted.
//!
//! A connection that was upgraded, such as a WebSocket, is such a stream for as long as its work has
//! the permit.
//!
//! Invariant: the handler gets the end of a body only while the claim is reserved.

use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use http::{Method, Response, StatusCode};
use http_body::Body;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::atomic::Ordering;
use lowtide_admission::layer::{REGISTERED_MIN, Turn, Waiting};
use lowtide_admission::learning::{GROWS_LATE, READS, STREAMS};
use lowtide_admission::{Budget, RejectReason, Rejected};
use lowtide_heap::{AccountMemory, unmeasured};

use super::RequestPermit;
use super::record::{
    ANSWERED, ARRIVES, Admitted, CANCELLED, Lasts, RECEIVES, REGISTERED, RequestHolds,
    RequestTerms, ResumeOptions, SENDS, STARTS, SUSPENDED, TRIAL, enter_slow_start, enter_turn,
};
use crate::service::time_limits::TimeLimits;

/// The time after which an answer without a known end has lasted: that after which the slow start
/// lets further requests in. Until then it may be a short one.
const STREAM_AFTER: Duration = Duration::from_secs(1);

/// The same for a route in which an answer grew late. An estimate: longer than most queries.
const LATE_AFTER: Duration = Duration::from_secs(60);

/// What a suspended request reserves beyond what it holds, for the part of its body that arrives
/// next. An estimate: what an HTTP/2 client may send on a stream without permission, by default.
pub(in crate::service) const ARRIVAL_WINDOW: ByteSize = ByteSize::kib(64);

/// The place in the queue of a suspended request, or of its body.
#[derive(Debug)]
pub(in crate::service) struct QueuePlace {
    waiting: Option<Waiting>,
    /// There was no room for its claim in time.
    is_refused: bool,
}

impl QueuePlace {
    /// It does not wait.
    pub(in crate::service) const NONE: Self = Self { waiting: None, is_refused: false };
}

impl RequestPermit {
    /// Records that the handler waits for more of the body, or has got some. In the meantime it
    /// may allocate, so the request is not suspended.
    pub(in crate::service) fn set_receiving(&self, is_receiving: bool) {
        let receives = if is_receiving { RECEIVES } else { 0 };
        let _ =
            self.0.owner().progress.change(|flags| Some(flags & !(RECEIVES | SENDS) | receives));
    }

    /// Records that the body of the request has arrived, or is not read. Returns `false` if its
    /// reservation is suspended: then its end must wait.
    pub(in crate::service) fn arrived(&self) -> bool {
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

    /// Returns `true` if it needs no claim once its handler has answered. A trusted estimate may
    /// cover memory that is not measured, and a handler may collect a body of known length.
    fn may_release_claim(&self) -> bool {
        let Admitted { terms, progress, .. } = self.0.owner();
        terms.reports && terms.resumes.is_some() && !progress.has(ARRIVES)
    }

    /// Records that its answer goes on without a known end. Returns `true` once nothing depends on
    /// that.
    #[cold]
    pub(in crate::service) fn goes_on(&self) -> bool {
        let now = self.0.owner().state.last_tick();
        let mut held = self.held();
        if held.lasts == Lasts::No {
            held.lasts = Lasts::Since(now);
        }
        drop(held);
        // Operators look for what lasts long.
        self.register();
        let RequestTerms { reports, resumes, .. } = &self.0.owner().terms;
        !reports || resumes.is_none() || self.tend_stream(now)
    }

    /// Releases the claim of a request whose answer is a stream: from now on it has reserved what
    /// it holds and a window, and more as it grows. If its body waits in the queue, it goes on at
    /// its turn without its claim. An answer is a stream once it has lasted, or at once if others
    /// of its route have. Once it has lasted its route learns from it, since it may go on for hours.
    /// Returns `true` if nothing is left to do.
    pub(super) fn tend_stream(&self, now: Moment) -> bool {
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
    pub(in crate::service) fn is_suspended(&self) -> bool {
        self.0.owner().progress.has(SUSPENDED)
    }

    /// Reserves the claim of a suspended request again. Returns `true` if it has entered the slow
    /// start of its route, which counts its work from its next poll on.
    fn resume(&self, waiting: Option<&Waiting>) -> Result<bool, Rejected> {
        let admitted = self.0.owner();
        let Some(ResumeOptions { priority, .. }) = admitted.terms.resumes else { return Ok(false) };
        self.change(|held| {
            let RequestHolds { enters, need, .. } = &held.holds;
            let slot = match (enters, need) {
                (Some((admission, clock)), Some(need)) => {
                    let room = admission.ledger(Budget::Host).learned_room();
                    enter_slow_start(need, room, (admitted.state, clock), waiting)?
                }
                _ => None,
            };
            let turn = admitted.terms.turn.as_ref();
            if let Some(turn) = turn {
                enter_turn(turn, admitted.state, waiting, waiting.is_none())?;
            }
            let resumed = held.holds.permit.resume(waiting, priority);
            resumed.inspect_err(|_| turn.into_iter().for_each(Turn::leave))?;
            let has_entered = slot.is_some();
            if let Some(slot) = &slot {
                slot.begin();
                slot.answered(held.answer == Some(true));
                held.holds.permit.mark_unlearned(slot);
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
    pub(in crate::service) fn poll_room(
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
        let (waiting, admitted) = (&mut place.waiting, self.0.owner());
        if waiting.is_none() {
            // A window for what arrives next.
            let wanted = self.0.memory().live.saturating_add(ARRIVAL_WINDOW);
            if !is_last && self.change(|held| held.holds.permit.reserve_arriving(wanted)) {
                return Poll::Ready(());
            }
            // `None` if the queue is full, and if the request is never suspended.
            *waiting =
                admitted.terms.resumes.and_then(|ResumeOptions { priority, tenant, within }| {
                    self.held().holds.permit.wait_to_resume(priority, tenant, within)
                });
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
                Err(_) if admitted.progress.has(ANSWERED) => {
                    self.go_on(); // without its claim
                    break;
                }
                Err(rejected) => {
                    self.end(|| admitted.state.reject(rejected));
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

    /// Records that the handler reads no more of the body. If its claim was never reserved, the
    /// handler goes on once it is ([`RequestPermit::poll_start`]), or answers at once.
    pub(in crate::service) fn unread(&self) {
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
    pub(in crate::service) fn poll_start(
        &self,
        place: &mut QueuePlace,
        cx: &Context<'_>,
    ) -> Poll<()> {
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
    pub(in crate::service) fn reads(&self) {
        if let Some(need) = &self.held().holds.need {
            need.note(READS);
        }
    }

    /// Ends the suspension without its claim: what it holds from now on is reserved as it grows.
    #[cold]
    pub(in crate::service) fn go_on(&self) {
        let admitted = self.0.owner();
        self.change(|held| {
            admitted.progress.clear(RECEIVES | SENDS | ARRIVES);
            admitted.resumed(held);
            held.holds.enters = None;
        });
    }

    /// Records that its handler answered. Returns `true` if its connection, or its stream of one, is
    /// another protocol's from now on.
    pub(in crate::service) fn answered<B: Body>(&self, response: &Response<B>) -> bool {
        let Admitted { terms, progress, .. } = self.0.owner();
        let (status, body) = (response.status(), response.body());
        // A gRPC error has status 200; if it has no body, the error is in a header. The request came
        // over HTTP/2 and has a content type.
        let is_error = terms.origin.content_type.is_some()
            && response.headers().get("grpc-status").is_some_and(|of| of != "0");
        let is_upgraded = status == StatusCode::SWITCHING_PROTOCOLS;
        let success = !is_error && (status.is_success() || status.is_redirection() || is_upgraded);
        // The response needs no more memory.
        let is_whole = !body.is_end_stream() && body.size_hint().exact().is_some();
        if let Some(turn) = &terms.turn {
            turn.leave();
        }
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
        if terms.limits.is_some() && self.may_release_claim() {
            self.receives(Poll::Ready(0), Waker::noop());
        }
        if progress.has(STARTS) {
            self.go_on();
        }
        let works = |flags| (flags & (RECEIVES | SENDS) == 0).then_some(flags | SENDS);
        if is_whole && self.is_large() && progress.change(works).is_ok() || terms.limits.is_some() {
            self.register();
        }
        is_upgraded || terms.origin.method == Method::CONNECT && status.is_success()
    }

    /// Cancels the request, since it holds more than `most`. Observe mode only counts it.
    #[cold]
    pub(super) fn cancel(&self, most: ByteSize) {
        if self.held().holds.permit.observe(RejectReason::Outgrown) {
            return;
        }
        let (live, admitted) = (self.0.memory().live, self.0.owner());
        self.end(|| admitted.state.outgrown(live, admitted.claim(), most));
    }

    /// Returns its time limits.
    pub(in crate::service) fn limits(&self) -> Option<&TimeLimits> {
        self.0.owner().terms.limits.as_deref()
    }

    /// Records a poll of the request's body: so many bytes, or a wait for the client.
    pub(in crate::service) fn receives(&self, polled: Poll<usize>, waker: &Waker) {
        let Some(pace) = self.limits().and_then(TimeLimits::request) else { return };
        let admitted = self.0.owner();
        let now = admitted.state.last_tick();
        let is_free = admitted.progress.has(ANSWERED) && self.may_release_claim();
        match polled {
            // It keeps no claim, so it waits for as long as both sides like.
            Poll::Pending if is_free => {}
            Poll::Ready(bytes) => pace.received(bytes, now),
            Poll::Pending if pace.wait(waker, now) => {}
            Poll::Pending => self.end_in_time(pace.rate.too_slow()),
        }
    }

    /// Records a poll of the response: so many bytes that the connection has now, or a wait for the
    /// handler.
    pub(in crate::service) fn sends(&self, polled: Poll<usize>, waker: &Waker) {
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
    pub(in crate::service) fn cut(&self) -> Option<Rejected> {
        self.limits()?.is_cut().then(|| self.cancellation())?
    }

    /// Ends a request whose time limit has passed: its handler, or the response if the handler has
    /// answered. A request that was cancelled before is left to its end.
    #[cold]
    pub(super) fn end_in_time(&self, rejected: Rejected) {
        let Some(limits) = self.limits() else { return };
        let Admitted { terms, state, progress, .. } = self.0.owner();
        // Its body is not read any more, but a task of the handler keeps the permit.
        if progress.has(ANSWERED) && !limits.is_sending() {
            return;
        }
        if self.end(|| state.reject(rejected.clone())) {
            let route = &terms.origin.route;
            log!(debug, %rejected, %route, "response ended at a time limit");
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
    pub(in crate::service) fn cancellation(&self) -> Option<Rejected> {
        let is_cancelled = self.0.owner().progress.has(CANCELLED);
        is_cancelled.then(|| self.held().cancelled.clone()).flatten()
    }

    /// Keeps the waker of the layer's future while its handler waits. Returns the rejection if the
    /// request is cancelled already.
    pub(in crate::service) fn waits(&self, waker: &Waker) -> Option<Rejected> {
        let Admitted { terms, progress, .. } = self.0.owner();
        let is_limited = terms.limits.is_some();
        if !progress.has(REGISTERED) && (is_limited || self.is_large()) {
            self.register();
        }
        if terms.cap.is_infinite() && terms.resumes.is_none() && !is_limited {
            return None;
        }
        let mut held = self.held();
        if !held.waker.as_ref().is_some_and(|kept| kept.will_wake(waker)) {
            held.waker = Some(waker.clone());
        }
        held.cancelled.clone()
    }

    /// Returns `true` if the request holds a quarter more than when it was cancelled.
    pub(in crate::service) fn has_grown_since(&self, cancelled: &Rejected) -> bool {
        let Rejected::Outgrown { held, .. } = cancelled else { return false };
        self.0.memory().live > held.saturating_add(ByteSize::new(held.get() / 4))
    }

    /// Adds it to the running requests that have reserved much, once.
    pub(super) fn register(&self) {
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
}
