//! The right to hold bytes, from admission until drop.
//!
//! A permit can move between threads and be dropped on any of them. It decides nothing: growth is
//! reserved as at admission ([`Admission`](super::Admission)).
//!
//! The reservation of a request whose body is slow to arrive can be suspended: it then covers what
//! the request holds and a window, and the rest is reserved again before the body is complete.
//!
//! Invariants: the cost that a permit reports is reserved until the permit is dropped; the ledger's
//! `unheld` is the sum of `reserved - held` of the requests that are measured, and its `suspended`
//! the sum of what suspended ones have reserved.

use std::future::{Future, poll_fn};
use std::sync::atomic::Ordering;
use std::task::{Context, Poll};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;

use super::admission::Admission;
use super::cost::{Budget, Cost, Priority, RejectReason, Rejected};
use super::learning::SlowStartPermit;
use super::ledger::ResourceHold;
use super::state::AdmissionState;
use super::waiting::{WaitId, WaitReason, WaitTerms};

#[derive(Debug)]
enum PermitHold {
    /// A request that holds host memory and of which nothing else is known, as most start.
    Host(ByteSize),
    Request(RequestReservation),
    /// No larger than a request, and without a destructor. `None` once it was taken out.
    Resource(Option<(ResourceHold, ResourceHold)>),
}

/// A request.
#[derive(Debug)]
struct RequestReservation {
    cost: Cost,
    /// The permit grows beyond the allowance, as it was reserved.
    is_exempt: bool,
    /// The host memory that the request holds, or [`ByteSize::MAX`] if it is not measured.
    measured: ByteSize,
    /// The host memory that it had reserved when its need was declared unknown.
    unlearned: ByteSize,
    /// What it reserves again when it resumes, while it is suspended.
    claim: Option<ByteSize>,
    /// Why it would not run, if only observe mode admits it.
    observed: Option<RejectReason>,
    /// Its whole claim was reserved once.
    is_started: bool,
}

/// The right to hold bytes. Dropping it releases them.
#[must_use = "dropping a permit releases its bytes at once"]
pub struct Permit {
    state: &'static AdmissionState,
    held: PermitHold,
}

debug_as!(Permit, |permit| cost: permit.cost());

impl Permit {
    /// Creates the permit of a request that is not exempt.
    #[inline]
    pub(super) const fn host(state: &'static AdmissionState, bytes: ByteSize) -> Self {
        Self { state, held: PermitHold::Host(bytes) }
    }

    pub(super) const fn of_request(
        state: &'static AdmissionState,
        cost: Cost,
        is_exempt: bool,
    ) -> Self {
        Self { state, held: PermitHold::Request(RequestReservation::new(cost, is_exempt)) }
    }

    /// Creates the permit of a suspended request, whose claim was never reserved.
    pub(super) fn of_suspended(
        state: &'static AdmissionState,
        bytes: ByteSize,
        claim: ByteSize,
    ) -> Self {
        let mut permit = Self::of_request(state, Cost::host(bytes), false);
        permit.change(|request| (request.claim, request.is_started) = (Some(claim), false));
        permit
    }

    pub(super) fn resource(
        state: &'static AdmissionState,
        host: ResourceHold,
        device: ResourceHold,
    ) -> Self {
        Self { state, held: PermitHold::Resource(Some((host, device))) }
    }

    /// Returns the state of a request; `None` on a resource's permit.
    fn request_mut(&mut self) -> Option<&mut RequestReservation> {
        if let PermitHold::Host(bytes) = self.held {
            self.held = PermitHold::Request(RequestReservation::new(Cost::host(bytes), false));
        }
        let PermitHold::Request(request) = &mut self.held else { return None };
        Some(request)
    }

    /// Returns the state of the admission in which its bytes are reserved.
    #[inline]
    #[must_use]
    pub const fn state(&self) -> &'static AdmissionState {
        self.state
    }

    /// Returns the reservations of a resource's permit, still reserved; `None` for a request's
    /// permit, which ends.
    pub(super) fn into_resource(mut self) -> Option<(ResourceHold, ResourceHold)> {
        let PermitHold::Resource(held) = &mut self.held else { return None };
        held.take()
    }

    /// Returns the bytes that the permit holds.
    #[must_use]
    pub fn cost(&self) -> Cost {
        match &self.held {
            PermitHold::Host(bytes) => Cost::host(*bytes),
            PermitHold::Request(request) => request.cost,
            PermitHold::Resource(Some(both)) => Cost { host: both.0.bytes, device: both.1.bytes },
            PermitHold::Resource(None) => Cost::ZERO,
        }
    }

    /// Returns the host memory that it has reserved, or reserves again when it resumes.
    #[inline]
    #[must_use]
    pub fn claim(&self) -> ByteSize {
        let suspended = self.request().and_then(|request| request.claim);
        suspended.unwrap_or_default().max(self.cost().host)
    }

    /// Reserves more host memory, for example if a body is larger than declared. An admitted
    /// request is not rejected by level, since its end frees memory. The permit of an exempt
    /// request always grows.
    ///
    /// # Errors
    /// [`Rejected`], which is counted; the permit keeps what it holds. A resource's permit does not
    /// grow: the error is [`Rejected::TooLarge`] with its own cost as the ceiling.
    pub fn grow(&mut self, bytes: ByteSize) -> Result<(), Rejected> {
        let is_exempt = self.request().is_some_and(|request| request.is_exempt);
        let priority = if is_exempt { Priority::Exempt } else { Priority::High };
        let state = self.state;
        self.grow_with(bytes, priority)
            .inspect_err(|rejected| state.count_rejection(rejected.reason(), None))
    }

    /// Reserves more host memory with a priority, for memory that its holder can do without, such
    /// as that of a query engine that spills to disk. At low and normal priority, growth is
    /// rejected from the same level as a new request, and while requests wait for host memory; it
    /// leaves the reserved headroom free, and no resource is unloaded and no reclaimer asked for
    /// it. At high priority it has the terms of [`Permit::grow`]. [`Priority::Exempt`] always
    /// grows, even beyond the allowance: for memory that is in use already.
    ///
    /// ```
    /// use lowtide_admission::{Admission, ByteSize, Cost, Level, Priority, Rejected};
    ///
    /// let admission = Admission::with_limit(ByteSize::mib(100));
    /// let mut permit = admission.try_admit(Cost::ZERO)?;
    /// permit.grow_with(ByteSize::mib(60), Priority::Low)?;
    /// admission.set_level(Level::High); // the control loop does this
    /// assert!(permit.grow_with(ByteSize::mib(1), Priority::Low).is_err()); // spill instead
    /// # Ok::<(), Rejected>(())
    /// ```
    ///
    /// # Errors
    /// As for [`Permit::grow`], but the rejection is not counted.
    pub fn grow_with(&mut self, bytes: ByteSize, priority: Priority) -> Result<(), Rejected> {
        let held = self.cost().host;
        if let PermitHold::Resource(_) = self.held {
            let asked = held.saturating_add(bytes);
            return Err(Rejected::TooLarge { budget: Budget::Host, asked, ceiling: held });
        }
        let reserved = self.state.grow_with(held, bytes, priority);
        let reserved = self.or_observe(reserved, bytes)?;
        self.change(|request| {
            request.cost.host = request.cost.host.saturating_add(reserved);
            request.claim = request.claim.map(|claim| claim.saturating_add(reserved));
        });
        Ok(())
    }

    /// Reserves the bytes in observe mode, if there is no room for them. Returns the bytes reserved.
    fn or_observe(
        &mut self,
        reserved: Result<ByteSize, Rejected>,
        bytes: ByteSize,
    ) -> Result<ByteSize, Rejected> {
        reserved.or_else(|rejected| {
            self.observe(self.state.ignored(rejected)?);
            Ok(self.state.raise(bytes))
        })
    }

    /// Returns `true` in observe mode, and records the reason for which the request would wait or
    /// end now. The request is counted if this is its first reason.
    pub fn observe(&mut self, reason: RejectReason) -> bool {
        let observes = self.state.observes();
        if observes && self.observed().is_none() {
            self.state.count_observed(reason);
            self.change(|request| request.observed = Some(reason));
        }
        observes
    }

    /// Returns the reason for which the request would have waited or ended if observe mode had not
    /// admitted it.
    #[must_use]
    pub fn observed(&self) -> Option<RejectReason> {
        self.request()?.observed
    }

    /// Changes a request, and the sums that depend on it. Does nothing on a resource's permit.
    fn change(&mut self, change: impl FnOnce(&mut RequestReservation)) {
        let state = self.state;
        let Some(request) = self.request_mut() else { return };
        let before = request.parts();
        change(request);
        state.replace_parts(before, request.parts());
    }

    /// Adds to the host memory that a request has reserved.
    fn add(&mut self, more: ByteSize) {
        self.change(|request| request.cost.host = request.cost.host.saturating_add(more));
    }

    /// Reserves host memory up to `held` bytes in total, even beyond the allowance, because the
    /// bytes are in use. Returns the bytes added. Does nothing on a resource's permit.
    pub fn raise(&mut self, held: ByteSize) -> ByteSize {
        if let PermitHold::Resource(_) = self.held {
            return ByteSize::ZERO;
        }
        let more = held.saturating_sub(self.cost().host);
        let more = if more.is_zero() { more } else { self.state.raise(more) };
        self.add(more);
        more
    }

    /// Reports the host memory that the request holds now, as measured. From the first report on,
    /// the correction factor is learned from what the request holds, and not from what it has
    /// reserved. Does nothing on a resource's permit.
    pub fn report(&mut self, held: ByteSize) {
        let unheld = &self.state.host.unheld;
        let Some(request) = self.request_mut() else { return };
        let before = request.cost.host.saturating_sub(request.measured);
        request.measured = held;
        // A difference, which may be negative: additions wrap.
        let more = request.cost.host.saturating_sub(held).get().wrapping_sub(before.get());
        unheld.fetch_add(more, Ordering::Relaxed);
    }

    /// Declares that the need of the request is not known, since it has this slot of a slow start:
    /// its reservation says little. The ceiling leaves as much room again until the permit is
    /// dropped. Called once at most.
    pub fn mark_unlearned(&mut self, slot: &SlowStartPermit) {
        if !slot.is_over_limit || !self.observe(RejectReason::SlowStart) {
            self.change(|request| request.unlearned = request.cost.host);
        }
    }

    /// Ends what [`Permit::mark_unlearned`] declared: what the request needs is measured.
    pub fn mark_learned(&mut self) {
        self.change(|request| request.unlearned = ByteSize::ZERO);
    }

    /// Releases part of the host memory early, at most what the permit holds. Does nothing on a
    /// resource's permit.
    pub fn shrink(&mut self, bytes: ByteSize) {
        self.shrink_quietly(bytes);
        self.state.wake_waiting();
    }

    /// Like [`Permit::shrink`], but wakes none of those that wait for the bytes, for a caller that
    /// holds a lock. Call [`AdmissionState::wake_waiting`] without it.
    pub fn shrink_quietly(&mut self, bytes: ByteSize) {
        let left = self.claim().saturating_sub(bytes);
        self.change(|request| request.claim = request.claim.map(|_| left));
        self.keep(left);
    }

    /// Releases the host memory that a request has reserved beyond `most`. Wakes none that waits.
    pub fn keep(&mut self, most: ByteSize) {
        let part = self.cost().host.saturating_sub(most);
        if !matches!(self.held, PermitHold::Resource(_)) && !part.is_zero() {
            self.change(|request| request.cost.host = most);
            self.state.host.release(part);
        }
    }

    /// Suspends the reservation of a request that still receives its body: it reserves no more than
    /// `keep` from now on. Wakes no request that waits for the rest: the control loop does.
    pub fn suspend(&mut self, keep: ByteSize) {
        self.change(|request| request.claim = Some(request.cost.host));
        self.keep(keep);
        self.state.suspensions.fetch_add(1, Ordering::Relaxed);
    }

    /// Reserves host memory up to `bytes` in total for what arrives of the body of a suspended
    /// request. Returns `false` if there is no room for it, or if all suspended requests together
    /// have reserved a quarter of the allowance.
    pub fn reserve_arriving(&mut self, bytes: ByteSize) -> bool {
        let more = bytes.saturating_sub(self.cost().host);
        let has_room = self.state.book_arriving(more);
        if has_room {
            self.add(more);
        }
        has_room
    }

    /// Ends the suspension: reserves the claim again, in the order of the queue.
    ///
    /// # Errors
    /// [`Rejected`], which is not counted; the reservation stays suspended.
    pub fn resume(
        &mut self,
        waiting: Option<&Waiting>,
        priority: Priority,
    ) -> Result<(), Rejected> {
        let more = self.claim().saturating_sub(self.cost().host);
        let (waits, is_started) = (waiting.map(|waiting| &waiting.id), self.is_started());
        let booked = self.state.book_again(waits, more, priority, is_started);
        let booked = self.or_observe(booked, more)?;
        self.add(booked);
        self.set_resumed();
        Ok(())
    }

    /// Enters the queue to resume, before the requests that were not admitted yet. Returns `None`
    /// as [`AdmissionState::wait`] does.
    #[must_use]
    pub fn wait_to_resume(
        &self,
        priority: Priority,
        tenant: u64,
        within: Duration,
    ) -> Option<Waiting> {
        let cost = Cost::host(self.claim().saturating_sub(self.cost().host));
        let within = Some(within);
        let terms = WaitTerms { cost, priority, tenant, within, is_admitted: true };
        Waiting::enter(self.state, terms)
    }

    /// Ends the suspension without reserving more.
    pub fn set_resumed(&mut self) {
        self.change(|request| (request.claim, request.is_started) = (None, true));
    }

    /// Returns `true` if its reservation is suspended.
    #[inline]
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        matches!(self.request(), Some(RequestReservation { claim: Some(_), .. }))
    }

    /// Returns `false` if it was admitted to receive its body, and its claim was never reserved.
    #[must_use]
    pub fn is_started(&self) -> bool {
        self.request().is_none_or(|request| request.is_started)
    }

    const fn request(&self) -> Option<&RequestReservation> {
        let PermitHold::Request(request) = &self.held else { return None };
        Some(request)
    }

    /// Marks the resource as loaded, so that its memory is part of what is measured, and raises the
    /// reservation to what it was measured to hold, even beyond the allowance. Otherwise the excess
    /// would count as wrong estimates of requests.
    pub fn settle_at(&mut self, held: Cost) {
        let held = self.state.by_budget(held);
        if let PermitHold::Resource(Some((host, device))) = &mut self.held {
            self.state.host.raise(host, held.host);
            self.state.device.raise(device, held.device);
            self.state.host.settle(host);
            self.state.device.settle(device);
        }
    }
}

impl RequestReservation {
    const fn new(cost: Cost, is_exempt: bool) -> Self {
        let unlearned = ByteSize::ZERO;
        let (measured, claim, observed, is_started) = (ByteSize::MAX, None, None, true);
        Self { cost, is_exempt, measured, unlearned, claim, observed, is_started }
    }

    /// Returns its parts of the sums over all requests ([`AdmissionState::replace_parts`]).
    fn parts(&self) -> [ByteSize; 5] {
        let suspended = if self.claim.is_some() { self.cost.host } else { ByteSize::ZERO };
        let observed = if self.observed.is_some() { self.cost } else { Cost::ZERO };
        let unheld = self.cost.host.saturating_sub(self.measured);
        [unheld, suspended, self.unlearned, observed.host, observed.device]
    }

    /// Releases what it has reserved.
    #[inline(never)]
    fn end(&self, state: &'static AdmissionState) {
        let is_apart = self.is_exempt || self.claim.is_some() || self.observed.is_some();
        if is_apart || !self.unlearned.is_zero() || !self.cost.device.is_zero() {
            state.replace_parts(self.parts(), Default::default());
            return state.finish(self.cost, self.is_exempt);
        }
        // As most requests end: of the sums, it is in one.
        let unheld = self.cost.host.saturating_sub(self.measured);
        state.host.unheld.fetch_sub(unheld.get(), Ordering::Relaxed);
        state.finish_host(self.cost.host);
    }
}

impl Drop for Permit {
    #[inline]
    fn drop(&mut self) {
        match &mut self.held {
            PermitHold::Host(bytes) => self.state.finish_host(*bytes),
            PermitHold::Request(request) => request.end(self.state),
            PermitHold::Resource(held) => {
                if let Some((host, device)) = held.take() {
                    self.state.unload(host, device);
                }
            }
        }
    }
}

/// A request in the queue. Dropping it leaves the queue.
///
/// The tower layer uses it, since it estimates the need of a request again at each attempt.
/// Programs use [`Admission::reserve`]. Loads wait in the same queue, and so do suspended requests
/// that resume ([`Permit::resume`]).
#[derive(Debug)]
pub struct Waiting {
    state: &'static AdmissionState,
    pub(super) id: WaitId,
}

impl Waiting {
    pub(super) fn enter(state: &'static AdmissionState, terms: WaitTerms) -> Option<Self> {
        let terms = WaitTerms { cost: state.by_budget(terms.cost), ..terms };
        let id = state.queue.enter(terms, state.host.ceiling())?;
        state.hurry();
        Some(Self { state, id })
    }

    /// Waits until the request may try again. Returns `false` if this is the last attempt, because
    /// the deadline has passed or waiting has ended.
    pub fn poll_turn(&self, cx: &Context<'_>) -> Poll<bool> {
        self.state.queue.poll(&self.id, cx)
    }

    /// Records why an attempt of a load was rejected, so that the queue keeps room for it.
    pub(super) fn lacks(&self, rejected: &Rejected) {
        let lack = match rejected {
            Rejected::Full { budget, .. } => WaitReason::Load(*budget),
            _ => WaitReason::Other,
        };
        self.state.queue.lacks(&self.id, lack);
    }

    /// Records that it is not the turn of the request.
    pub fn lacks_turn(&self) {
        self.state.queue.lacks(&self.id, WaitReason::Turn);
    }

    /// Records that the attempt failed before admission, for another reason than bytes: the request
    /// delays no others.
    pub fn lacks_other(&self) {
        self.state.queue.lacks(&self.id, WaitReason::Other);
    }
}

impl Drop for Waiting {
    fn drop(&mut self) {
        if self.state.queue.leave(&self.id) {
            // It may have held up others.
            self.state.wake_waiting();
        }
    }
}

impl Admission {
    /// Waits until the cost fits, and reserves it: for pipelines, and for background work that can
    /// wait. Requests and reservations wait in one queue, in the order of their arrival within each
    /// priority. Smaller ones that fit may pass a larger one, up to as many bytes as that needs.
    ///
    /// There is no deadline: use a timeout of your runtime. The future can be dropped at any time,
    /// and reserves nothing until it completes.
    ///
    /// ```
    /// use lowtide_admission::{Admission, ByteSize, Cost, Rejected};
    ///
    /// # async fn run() -> Result<(), Rejected> {
    /// let admission = Admission::with_limit(ByteSize::mib(100));
    /// let permit = admission.reserve(Cost::host(ByteSize::mib(60))).await?;
    /// // The next one waits until this permit is dropped.
    /// drop(permit);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Rejected::TooLarge`] if it can never fit, [`Rejected::Exhausted`],
    /// [`Rejected::ShuttingDown`], and [`Rejected::Full`] if the queue is full: 4,096 requests, or
    /// one for each 256 KiB of the ceiling.
    pub fn reserve(
        &self,
        cost: Cost,
    ) -> impl Future<Output = Result<Permit, Rejected>> + Send + use<> {
        self.reserve_with(cost, Priority::Normal)
    }

    /// Like [`Admission::reserve`], with a priority. Requests of higher priority come first, until
    /// as many bytes as the ceiling have passed one of lower priority.
    ///
    /// # Errors
    /// As for [`Admission::reserve`].
    pub fn reserve_with(
        &self,
        cost: Cost,
        priority: Priority,
    ) -> impl Future<Output = Result<Permit, Rejected>> + Send + use<> {
        let admission = self.clone();
        async move {
            let state = admission.state();
            let (mut waiting, mut is_last) = (None::<Waiting>, false);
            // Ends: each iteration after the first needs a wake of the queue.
            loop {
                if let Some(waiting) = &waiting {
                    is_last = !poll_fn(|cx| waiting.poll_turn(cx)).await;
                }
                let waits = waiting.as_ref().filter(|_| !is_last);
                let tried = state.try_admit_uncounted(waits, cost, priority, None);
                let Err(rejected) = tried else { return tried };
                if waiting.is_none() && rejected.may_wait() {
                    waiting = state.wait(cost, priority, 0, None);
                }
                if is_last || waiting.is_none() || !rejected.may_wait() {
                    drop(waiting);
                    return Err(state.reject(rejected));
                }
            }
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::future::Future;
    use std::pin::pin;
    use std::sync::atomic::Ordering;
    use std::task::{Context, Waker};

    use crate::admission::Admission;
    use crate::cost::RejectReason;
    use crate::cost::{Budget, Cost, Priority};
    use crate::ledger::RoomSharing;
    use crate::permit::Permit;
    use crate::pressure::Level;
    use lowtide_core::bytes::ByteSize;

    /// The ledger adds differences: any order of acts must leave nothing behind.
    #[test]
    fn what_measured_requests_do_not_hold_is_the_sum_over_them_and_ends_with_them() {
        let admission = Admission::with_limit(ByteSize::gib(1));
        let ledger = admission.ledger(Budget::Host);
        let mut permits = Vec::new();
        let mut draw = crate::chance::draws(7);
        for _ in 0..10_000 {
            let size = ByteSize::kib(draw(4096));
            match draw(6) {
                0 | 1 => {
                    let priority = if draw(2) == 0 { Priority::Exempt } else { Priority::Normal };
                    permits.extend(admission.try_admit_with(Cost::host(size), priority));
                }
                2 if !permits.is_empty() => {
                    let at = usize::try_from(draw(permits.len() as u64)).expect("small");
                    drop(permits.swap_remove(at));
                }
                act => {
                    let Some(permit) = permits.last_mut() else { continue };
                    match act {
                        3 if draw(2) == 0 => permit.report(size),
                        3 => drop(permit.raise(size)),
                        4 => drop(permit.grow(size)),
                        _ => permit.shrink(size),
                    }
                }
            }
            let sum: u64 =
                permits.iter().filter_map(Permit::request).map(|it| it.parts()[0].get()).sum();
            assert_eq!(ledger.unheld(), ByteSize::new(sum));
        }
        drop(permits);
        assert_eq!((ledger.unheld(), ledger.reserved()), (ByteSize::ZERO, ByteSize::ZERO));
    }

    #[test]
    fn a_request_that_ends_is_in_no_sum_whatever_it_was_in() {
        let admission = Admission::with_limit(ByteSize::gib(1));
        let (host, device) = (&admission.state().host, &admission.state().device);
        let acts: [fn(&mut Permit); 5] = [
            |_| (),
            |permit| permit.report(ByteSize::kib(1)),
            |permit| permit.suspend(ByteSize::kib(1)),
            |permit| permit.change(|request| request.unlearned = request.cost.host),
            |permit| permit.change(|request| request.observed = Some(RejectReason::Full)),
        ];
        let cost = Cost::host(ByteSize::mib(1));
        for (nth, act) in acts.into_iter().enumerate() {
            for cost in [cost, cost.and_device(ByteSize::mib(1))] {
                for priority in [Priority::Normal, Priority::Exempt] {
                    let mut permit = admission.try_admit_with(cost, priority).expect("fits");
                    act(&mut permit);
                    drop(permit);
                    let sums = [&host.unheld, &host.suspended, &host.unlearned, &host.observed];
                    let sums = sums.into_iter().chain([&device.observed]);
                    let left: u64 = sums.map(|sum| sum.load(Ordering::Relaxed)).sum();
                    let reserved = host.reserved().saturating_add(device.reserved());
                    assert_eq!((left, reserved), (0, ByteSize::ZERO), "{nth}: {cost:?}");
                }
            }
        }
    }

    #[test]
    fn growth_of_low_priority_yields_to_level_headroom_and_waiting_requests() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let mut permit = admission.try_admit(Cost::host(ByteSize::mib(60))).expect("fits");
        let mib = ByteSize::mib(1);
        let mut grows = |priority| permit.grow_with(mib, priority).map_err(|it| it.reason());
        let others = [Priority::High, Priority::Exempt];

        admission.set_level(Level::High);
        assert_eq!(grows(Priority::Low), Err(RejectReason::Pressure));
        assert_eq!(grows(Priority::Normal), Ok(()));
        admission.set_level(Level::Critical);
        assert_eq!(grows(Priority::Normal), Err(RejectReason::Pressure));
        assert_eq!(others.map(&mut grows), [Ok(()); 2]);
        admission.set_level(Level::None);

        let reserved_headroom = ByteSize::mib(40);
        let balance = RoomSharing { reserved_headroom, ..RoomSharing::default() };
        admission.ledger(Budget::Host).balance(balance);
        assert_eq!(grows(Priority::Normal), Err(RejectReason::Full));
        assert_eq!(others.map(&mut grows), [Ok(()); 2]);
        admission.ledger(Budget::Host).balance(RoomSharing::default());

        let mut waits = pin!(admission.reserve(Cost::host(ByteSize::mib(40))));
        let mut cx = Context::from_waker(Waker::noop());
        assert!(waits.as_mut().poll(&mut cx).is_pending(), "40 of 35 MiB");
        assert_eq!(grows(Priority::Normal), Err(RejectReason::Full));
        assert_eq!(others.map(&mut grows), [Ok(()); 2]);
        waits.set(admission.reserve(Cost::ZERO));
        assert_eq!(grows(Priority::Low), Ok(()), "none waits");

        permit.grow_with(ByteSize::mib(100), Priority::Exempt).expect("beyond the ceiling");
        let mut grows = |priority| permit.grow_with(mib, priority).map_err(|it| it.reason());
        assert_eq!(grows(Priority::High), Err(RejectReason::TooLarge));
        assert_eq!(grows(Priority::Low), Err(RejectReason::Full));
        assert_eq!(admission.stats().rejected, [0; 10], "none is counted");
        let reserved = permit.cost().host;
        assert_eq!(admission.ledger(Budget::Host).reserved(), reserved);
        drop(permit);
        assert_eq!(admission.ledger(Budget::Host).reserved(), ByteSize::ZERO);
    }

    /// The bug: it showed the whole account of the admission.
    #[test]
    fn the_debug_form_of_a_permit_is_its_cost() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let permit = admission.try_admit(Cost::host(ByteSize::mib(60))).expect("fits");
        let expected = "Permit { cost: Cost { host: 60.0 MiB, device: 0 B }, .. }";
        assert_eq!(format!("{permit:?}"), expected);
    }

    #[test]
    fn a_resource_does_not_grow_with_any_priority() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let mut model = admission.try_reserve_resource(Cost::host(ByteSize::mib(1))).expect("fits");
        let error = model.grow_with(ByteSize::mib(1), Priority::Exempt).expect_err("a resource");
        assert_eq!(error.reason(), RejectReason::TooLarge);
        assert_eq!(admission.stats().rejected, [0; 10]);
    }

    #[test]
    fn a_request_that_is_large_for_the_limit_leaves_its_pages_to_be_considered() {
        let admission = Admission::with_limit(ByteSize::gib(1));
        let unused = &admission.state().unused;
        let (none, most) = (ByteSize::ZERO, ByteSize::mib(160));
        unused.publish(none, [none; 2], [none, most]);
        let end = |mib| drop(admission.try_admit(Cost::host(ByteSize::mib(mib))).expect("fits"));
        end(9);
        assert_eq!(unused.freed(), none, "less than a sixteenth");
        end(10);
        end(9);
        assert_eq!(unused.freed(), ByteSize::mib(10));
        let exempt = admission.try_admit_with(Cost::host(most), Priority::Exempt);
        drop(exempt);
        assert_eq!(unused.freed(), ByteSize::mib(10), "memory does not bound it");
        // A limit that falls while a request runs makes it large.
        let small = admission.try_admit(Cost::host(ByteSize::mib(9)));
        unused.publish(ByteSize::mib(10), [none; 2], [none, ByteSize::mib(100)]);
        drop(small);
        assert_eq!(unused.freed(), ByteSize::mib(9));
    }
}
