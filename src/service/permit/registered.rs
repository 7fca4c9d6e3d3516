//! What the control loop does with a registered request: it describes, suspends, cancels and wakes
//! it, and looks at its time limits.

use std::sync::Weak;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::atomic::Ordering;
use crate::sync::lock;
use lowtide_admission::RequestMemory;
use lowtide_admission::layer::{LargeRequest, REGISTERED_MIN, RequestFigures, SLOW_AFTER, Turn};
use lowtide_heap::Account;

use super::record::{
    ANSWERED, Admitted, CANCELLED, Lasts, RECEIVES, RequestHolds, SENDS, SUSPENDED, TRIAL,
};
use super::{RequestPermit, course::ARRIVAL_WINDOW};
use crate::service::usage::RequestOrigin;

/// A permit that does not keep the reservation.
#[derive(Clone, Debug)]
pub(in crate::service) struct WeakPermit(pub(super) Weak<Account<Admitted>>);

impl WeakPermit {
    fn permit(&self) -> Option<RequestPermit> {
        self.0.upgrade().map(RequestPermit)
    }

    /// Subtracts a frame from the request, unless the request has ended. If this thread runs for
    /// the request, freeing the frame's block is measured; otherwise the block is subtracted here.
    pub(in crate::service) fn give_back(&self, bytes: ByteSize, is_lent: bool, block: ByteSize) {
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
        let can_end = terms.cap.is_finite() && !progress.has(ANSWERED);
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
        let live = || permit.0.memory().live.saturating_add(ARRIVAL_WINDOW);
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
            let keep = live().max(held.declared.saturating_add(ARRIVAL_WINDOW));
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
        waker.into_iter().for_each(std::task::Waker::wake);
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
        let (memory, admitted) = (account.memory(), account.owner());
        let RequestOrigin { method, route, tenant, .. } = &admitted.terms.origin;
        method.as_str().clone_into(&mut into.method);
        route.as_str().clone_into(&mut into.route);
        match tenant {
            None => into.tenant = None,
            Some(tenant) => tenant.name().clone_into(into.tenant.get_or_insert_default()),
        }
        into.phase = admitted.phase();
        into.reserved = ByteSize::new(admitted.covered.load(Ordering::Relaxed));
        (into.live, into.peak, into.spilled) = (memory.live, memory.peak, memory.spilled);
        into.claim = admitted.claim();
        into.age = now - admitted.admitted_at;
        into.is_cancelled = admitted.progress.has(CANCELLED);
        true
    }
}
