//! The record of an admitted request. The layer, the bodies and the control loop read and change it
//! here, and nowhere else.
//!
//! What never changes is [`RequestTerms`], what it uses is [`RequestHolds`], and what it does or
//! waits for is one word, [`Progress`]. A few byte counts are read without the lock.

use std::sync::{Arc, PoisonError};
use std::task::Waker;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::sync::Mutex;
use crate::sync::atomic::{AtomicU16, AtomicU64, Ordering};
use lowtide_admission::layer::{AdmissionState, Turn, Waiting};
use lowtide_admission::learning::{Compared, Room, SlowStartPermit};
use lowtide_admission::{Admission, Permit, Priority, Rejected, RequestPhase};
use lowtide_heap::{Account, AccountMemory};

use super::RequestPermit;
use crate::service::exempt::ExemptShare;
use crate::service::time_limits::TimeLimits;
use crate::service::usage::{self, LiveIn, RequestOrigin};

/// What a stream reserves beyond what it holds, for the part of its answer that comes next. An
/// estimate: a frame of HTTP/2 by default.
const STREAM_WINDOW: ByteSize = ByteSize::kib(16);

/// An admitted request.
#[derive(Debug)]
pub(super) struct Admitted {
    pub(super) terms: RequestTerms,
    pub(super) state: &'static AdmissionState,
    pub(super) admitted_at: Moment,
    pub(super) progress: Progress,
    /// The bytes that it reserved when it was admitted, or later by growing.
    pub(super) claim: AtomicU64,
    /// The reserved bytes, and the live bytes as reported last, so that most polls need no lock.
    pub(super) covered: AtomicU64,
    pub(super) reported: AtomicU64,
    /// The bytes of frames in buffers of the connection.
    pub(super) lent: AtomicU64,
    /// The bytes of frames that were ever copied plainly.
    pub(super) copied: AtomicU64,
    pub(super) held: Mutex<PermitState>,
}

/// What a request does or waits for: flags in one word, so that whoever changes one sees the others.
#[derive(Debug)]
pub(super) struct Progress(AtomicU16);

/// A body of known length has not arrived in whole.
pub(super) const ARRIVES: u16 = 1;
/// Its handler waits for more of the body.
pub(super) const RECEIVES: u16 = 1 << 1;
/// Its reservation is suspended.
pub(super) const SUSPENDED: u16 = 1 << 2;
/// Its handler has dropped its body, and works only once its claim is reserved.
pub(super) const STARTS: u16 = 1 << 3;
/// Its handler has answered, and the layer cannot end it any more.
pub(super) const ANSWERED: u16 = 1 << 4;
/// Its handler has returned all of its response, which is not sent yet.
pub(super) const SENDS: u16 = 1 << 5;
pub(super) const CANCELLED: u16 = 1 << 6;
/// It has a slot of its route's slow start.
pub(super) const TRIAL: u16 = 1 << 7;
/// It is in the registry of large requests.
pub(super) const REGISTERED: u16 = 1 << 8;

impl Progress {
    #[inline]
    pub(super) fn has(&self, flags: u16) -> bool {
        self.0.load(Ordering::Acquire) & flags != 0
    }

    /// Sets flags. Returns `true` if it had one of them.
    pub(super) fn set(&self, flags: u16) -> bool {
        self.0.fetch_or(flags, Ordering::AcqRel) & flags != 0
    }

    pub(super) fn clear(&self, flags: u16) {
        self.0.fetch_and(!flags, Ordering::AcqRel);
    }

    /// Replaces its flags, unless the change is `None`. Returns what it had, as an error if nothing
    /// was changed.
    pub(super) fn change(&self, change: impl Fn(u16) -> Option<u16>) -> Result<u16, u16> {
        self.0.fetch_update(Ordering::AcqRel, Ordering::Acquire, change)
    }
}

/// The terms on which a suspended request waits for room.
#[derive(Clone, Copy, Debug)]
pub(in crate::service) struct ResumeOptions {
    pub(in crate::service) priority: Priority,
    pub(in crate::service) tenant: u64,
    /// The longest time to wait.
    pub(in crate::service) within: Duration,
}

/// What an admitted request is, from its admission to its end.
#[derive(Debug)]
pub(in crate::service) struct RequestTerms {
    pub(in crate::service) origin: RequestOrigin,
    /// The multiple of what it was expected to hold above which it may be cancelled; infinite if
    /// nothing cancels it.
    pub(in crate::service) cap: f64,
    /// Its turn, if it is large.
    pub(in crate::service) turn: Option<Turn>,
    /// `true` if its memory is measured.
    pub(in crate::service) is_measured: bool,
    pub(in crate::service) is_exempt: bool,
    /// How it resumes once it was suspended; `None` if it is never suspended.
    pub(in crate::service) resumes: Option<ResumeOptions>,
    /// `true` if the measured bytes are reported as all that it holds. `false` if its estimate may
    /// cover memory that is not measured.
    pub(in crate::service) reports: bool,
    pub(in crate::service) limits: Option<Box<TimeLimits>>,
}

/// What an admitted request uses, in part until it ends.
#[derive(Debug)]
pub(in crate::service) struct RequestHolds {
    pub(in crate::service) permit: Permit,
    /// The recipient of the measured memory.
    pub(in crate::service) need: Option<Compared>,
    /// The share of a request that is exempt by its path.
    pub(in crate::service) share: Option<ExemptShare>,
    /// The slot of a large request whose route is not known yet.
    pub(in crate::service) slot: Option<Arc<SlowStartPermit>>,
    /// The admission and the clock with which it enters the slow start of its route when it
    /// resumes; `None` if it does not.
    pub(in crate::service) enters: Option<(Admission, Arc<dyn Clock>)>,
}

#[derive(Debug)]
pub(super) struct PermitState {
    pub(super) holds: RequestHolds,
    /// The largest amount that the handler reported or requested, without the initial reservation.
    pub(super) reported: Option<ByteSize>,
    /// What its handler reported to hold. It may not be measured.
    pub(super) declared: ByteSize,
    /// The last time at which its claim was reserved.
    pub(super) reserved_at: Moment,
    /// Set if its handler answered: `true` for success.
    pub(super) answer: Option<bool>,
    /// How its answer goes on without a known end.
    pub(super) lasts: Lasts,
    /// What it held when its answer became a stream.
    pub(super) streams: Option<ByteSize>,
    /// `true` once its route has learned from it.
    pub(super) has_taught: bool,
    /// Set once it is cancelled.
    pub(super) cancelled: Option<Rejected>,
    /// The waker of the layer's future, while its handler waits.
    pub(super) waker: Option<Waker>,
    /// The wakers of the futures that wait for a cancellation, each with its number.
    pub(super) waiting: Vec<(u64, Waker)>,
    /// The number of the next such future.
    pub(super) next: u64,
    /// The figures to which its live bytes were added, once they were reported.
    pub(super) live_in: Option<LiveIn>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Lasts {
    /// It has not gone on, or its end is known.
    No,
    Since(Moment),
    /// Nothing depends on it any more.
    Done,
}

impl RequestPermit {
    #[inline]
    pub(in crate::service) fn new(
        terms: RequestTerms,
        mut holds: RequestHolds,
        (has_body, is_known): (bool, bool),
    ) -> Self {
        let RequestHolds { permit, slot, .. } = &mut holds;
        if terms.reports {
            permit.report(ByteSize::ZERO);
        }
        let mut flags = if has_body && is_known { ARRIVES } else { 0 };
        if permit.is_suspended() {
            flags |= SUSPENDED | RECEIVES;
        }
        if let Some(slot) = slot {
            slot.begin();
            if !has_body {
                slot.arrived();
            }
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
        let account = Arc::new(Account::new(admitted, Admitted::ended));
        account.set_claim(account.owner().claim());
        Self(account)
    }
}

impl Admitted {
    pub(super) fn claim(&self) -> ByteSize {
        ByteSize::new(self.claim.load(Ordering::Relaxed))
    }

    /// Ends its suspension: it has reserved its claim, or goes on without it.
    pub(super) fn resumed(&self, held: &mut PermitState) {
        held.holds.permit.set_resumed();
        held.reserved_at = self.state.last_tick();
        self.progress.clear(SUSPENDED);
    }

    pub(super) fn phase(&self) -> RequestPhase {
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

    /// Called when the last handle of the permit is dropped.
    fn ended(&mut self, memory: AccountMemory) {
        let claim = self.claim();
        let held = self.held.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !memory.live.is_zero() {
            self.state.outlive(memory.live);
        }
        if let Some(live_in) = &held.live_in {
            live_in.change(ByteSize::new(self.reported.load(Ordering::Relaxed)), ByteSize::ZERO);
        }
        let Some(need) = held.holds.need.take() else { return };
        let RequestTerms { origin, is_measured, .. } = &self.terms;
        if !memory.spilled.is_zero() {
            let RequestOrigin { method, route, .. } = origin;
            log!(
                warn,
                %method, %route, %claim, peak = %memory.peak, spilled = %memory.spilled,
                "request spilled to disk"
            );
        }
        if *is_measured {
            let succeeded = held.answer == Some(true);
            usage::add(&held.holds.permit, origin, &need, succeeded, (memory.peak, claim));
        }
        // What spilled is no evidence of a need below the claim.
        let measured = is_measured.then_some(memory.peak.max(claim.min(memory.spilled)));
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

impl RequestHolds {
    pub(super) fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
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
    pub(super) fn keep_stream(&mut self, live: ByteSize) {
        let keep = live.max(self.declared).saturating_add(STREAM_WINDOW);
        self.holds.permit.keep(keep);
    }
}

/// Enters the slow start of a route. If others run, the request that waits here lacks no bytes.
#[inline(always)]
pub(in crate::service) fn enter_slow_start(
    need: &Compared,
    room: Room,
    (state, clock): (&'static AdmissionState, &Arc<dyn Clock>),
    waiting: Option<&Waiting>,
) -> Result<Option<Arc<SlowStartPermit>>, Rejected> {
    need.enter(room.all, clock, state.observes()).map_err(|running| {
        waiting.into_iter().for_each(Waiting::lacks_other);
        state.slow_start(running)
    })
}

/// Enters the turn of a large request. If too many others have theirs, the request that waits here
/// lacks no bytes, unless it `must` go on.
pub(in crate::service) fn enter_turn(
    turn: &Turn,
    state: &'static AdmissionState,
    waiting: Option<&Waiting>,
    must: bool,
) -> Result<(), Rejected> {
    if turn.enter(must || state.observes()) {
        return Ok(());
    }
    waiting.into_iter().for_each(Waiting::lacks_turn);
    Err(state.slow_start(0))
}
