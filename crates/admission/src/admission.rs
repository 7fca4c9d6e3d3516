//! Admission by bytes: a request reserves what it will hold, in every budget, before it starts.
//!
//! Admission decides with one compare-and-exchange and a few loads. It reads no file, takes no lock
//! and never waits. It does not measure: the control loop corrects the ledgers and sets the level.
//! A [`Permit`] releases its bytes when it is dropped. The shared state is in `state`.
//!
//! Invariant: `reserved = sum of the costs of live permits` (permits of resources by their units),
//! in each budget. A rejected request reserves nothing.

use std::any::Any;
use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Bell, Clock as _, SystemClock};
use lowtide_core::fork::Birth;

use super::correction::{K_MIN, K_START};
use super::cost::{AdmissionMode, Budget, Cost, Priority, Rejected};
use super::eviction::RetryHint;
use super::ledger::Ledger;
use super::permit::Permit;
use super::pressure::Level;
use super::state::{AdmissionState, CLOSED};
use super::tally::{AdmissionStats, ClassStats};

/// A handle to admission. Cheap to clone; all clones share one account. Admits everything until a
/// limit is known.
///
/// A handle from a [`Memory`](https://docs.rs/lowtide/latest/lowtide/memory/struct.Memory.html)
/// keeps that `Memory` running, and so does every clone of it.
#[derive(Clone)]
pub struct Admission {
    state: &'static AdmissionState,
    /// Shared by the clones. Permits do not hold it.
    open: Arc<Open>,
}

/// Releases the admission state when the last handle is dropped.
struct Open {
    state: &'static AdmissionState,
    /// The service that corrects the account, for handles that keep it running, and the handle
    /// that releases the state.
    kept: Option<(Arc<dyn Any + Send + Sync>, Admission)>,
}

impl Drop for Open {
    fn drop(&mut self) {
        if self.kept.is_none() {
            self.state.leave();
        }
    }
}

debug_as!(Admission, |it| state: it.state, keeps_running: it.is_managed());

impl Default for Admission {
    fn default() -> Self {
        Self::at(ByteSize::MAX, K_START)
    }
}

impl Admission {
    /// Creates an admission without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Creates an admission with a fixed ceiling on host memory and none on device memory.
    ///
    /// Nothing is measured: estimates are trusted, and the total cost of all permits never exceeds
    /// the ceiling. If a control loop measures, use [`Admission::new`] and let the loop correct the
    /// ledgers.
    #[must_use]
    pub fn with_limit(ceiling: ByteSize) -> Self {
        Self::at(ceiling, K_MIN)
    }

    /// Creates an admission with this ceiling and correction factor of host memory.
    fn at(ceiling: ByteSize, correction_factor: f64) -> Self {
        let state = AdmissionState::take(ceiling, correction_factor);
        Self { state, open: Arc::new(Open { state, kept: None }) }
    }

    /// Returns a handle to the same account that also keeps `service` alive, as do its clones.
    #[must_use]
    pub fn keeping(&self, service: Arc<dyn Any + Send + Sync>) -> Self {
        let kept = Some((service, self.unkept()));
        Self { state: self.state, open: Arc::new(Open { state: self.state, kept }) }
    }

    /// Returns a handle to the same account that keeps no service alive: for what the service
    /// itself holds, which would otherwise keep it forever.
    pub(crate) fn unkept(&self) -> Self {
        self.open.kept.as_ref().map_or_else(|| self.clone(), |(_, unkept)| unkept.clone())
    }

    /// Returns `true` if a running service corrects the account while this handle lives.
    #[must_use]
    pub fn is_managed(&self) -> bool {
        self.open.kept.is_some()
    }

    /// Returns the service that this handle keeps alive.
    #[must_use]
    pub fn kept(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.open.kept.as_ref().map(|(service, _)| &**service)
    }

    /// Admits a request of normal priority.
    ///
    /// # Errors
    /// As for [`Admission::try_admit_with`].
    #[inline]
    pub fn try_admit(&self, cost: Cost) -> Result<Permit, Rejected> {
        self.try_admit_with(cost, Priority::Normal)
    }

    /// Admits a request: reserves its cost in every budget, or in none. Takes some nanoseconds,
    /// without a system call or allocation.
    ///
    /// If the bytes do not fit and idle resources hold reservations, it checks whether unloading
    /// them makes room and starts the unloads on separate threads
    /// ([`Resources::evict_for`](super::Resources::evict_for)). This costs some microseconds and
    /// allocations more. The request is still rejected.
    ///
    /// # Errors
    /// [`Rejected`], with the numbers; it is counted.
    #[inline]
    pub fn try_admit_with(&self, cost: Cost, priority: Priority) -> Result<Permit, Rejected> {
        self.state.admit(cost, priority)
    }

    /// Returns the state, for a layer that measures requests.
    #[inline]
    #[must_use]
    pub const fn state(&self) -> &'static AdmissionState {
        self.state
    }

    /// Reserves the bytes of a resource while it is loaded. They are counted once, without the
    /// correction factor, and not among the requests. Call [`Permit::settle_at`] when it is loaded.
    ///
    /// # Errors
    /// [`Rejected`]; it is not counted among the rejected requests.
    pub fn try_reserve_resource(&self, cost: Cost) -> Result<Permit, Rejected> {
        self.state.reserve_resource(cost, || RetryHint::Unknown)
    }

    /// Closes admission. Later requests get [`Rejected::ShuttingDown`], except exempt ones.
    pub fn close(&self) {
        self.state.level.fetch_or(CLOSED, Ordering::Release);
        self.state.queue.close();
    }

    /// Returns `true` if admission has been closed.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.state.is_closed()
    }

    /// Returns the mode; [`AdmissionMode::Enforce`] unless another was set.
    #[must_use]
    pub fn mode(&self) -> AdmissionMode {
        if self.state.observes() { AdmissionMode::Observe } else { AdmissionMode::Enforce }
    }

    /// Sets the mode, at any time. Requests that wait are admitted when it becomes
    /// [`AdmissionMode::Observe`].
    pub fn set_mode(&self, mode: AdmissionMode) {
        let observes = mode == AdmissionMode::Observe;
        let ledgers = Budget::ALL.into_iter().map(|budget| self.ledger(budget));
        ledgers.for_each(|ledger| ledger.observes.store(observes, Ordering::Relaxed));
        if observes {
            self.state.queue.close();
        }
    }

    /// Returns the level that currently rejects requests by priority.
    #[must_use]
    pub fn level(&self) -> Level {
        self.state.level()
    }

    /// Sets the level that rejects requests by priority. Called by the control loop.
    pub fn set_level(&self, level: Level) {
        let set = |before: u8| Some(before & CLOSED | level.as_u8());
        let (Ok(before) | Err(before)) =
            self.state.level.fetch_update(Ordering::Relaxed, Ordering::Relaxed, set);
        if before & !CLOSED != level.as_u8() {
            let wakers = std::mem::take(&mut *self.state.level_watches());
            wakers.into_values().for_each(Waker::wake);
        }
    }

    /// Returns the account of a budget.
    #[must_use]
    pub fn ledger(&self, budget: Budget) -> &Ledger {
        self.state.ledger(budget)
    }

    /// Returns the counts of admitted and rejected requests. Reads some thirty counters for
    /// each thread, of up to 24, that has counted; a concurrent request may be in one count and not
    /// yet in another.
    #[must_use]
    pub fn stats(&self) -> AdmissionStats {
        let (waited_total, waited_time_total) = self.state.queue.waited();
        AdmissionStats {
            waiting: self.state.queue.len() as u64,
            waited_total,
            waited_time_total,
            suspended_total: self.state.suspensions.load(Ordering::Relaxed),
            oldest_permit: self.state.large.oldest_age(),
            observe_mode: self.state.observes(),
            observed: self.state.observed.each_ref().map(|count| count.load(Ordering::Relaxed)),
            ..self.state.counts()
        }
    }

    /// Returns the requests admitted and rejected for lack of room in a budget, by size class from
    /// the smallest. Device counts include only requests with device bytes.
    #[must_use]
    pub fn classes(&self, budget: Budget) -> [ClassStats; ClassStats::COUNT] {
        self.state.budget_counts(budget).classes
    }

    /// Returns a watch of the level, for background work that pauses while memory is short.
    #[must_use]
    pub fn watch_level(&self) -> LevelWatch {
        let (admission, birth) = (self.unkept(), Birth::now());
        let (number, seen) = (NEXT.fetch_add(1, Ordering::Relaxed), admission.level());
        LevelWatch { admission, number, seen, birth }
    }
}

// Watches of the pressure level, from any thread or async runtime.
//
// The control loop sets the level; a change wakes the watches. A watch compares the current level
// with the last one that it returned: the latest level is always seen, and a level that came and
// went in between is not.
//
// Invariant: a watch whose last level is not the current one is woken, or finds that when it is
// polled. No waker is called, cloned or dropped with the lock held.

/// The number of the next watch.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A watch of the pressure on host memory. It needs no async runtime, and does not keep a `Memory`
/// running.
///
/// ```
/// use std::time::Duration;
/// use lowtide_admission::{Admission, Level};
///
/// let admission = Admission::new();
/// let mut watch = admission.watch_level();
/// assert_eq!(watch.level(), Level::None);
/// admission.set_level(Level::High); // the control loop does this
/// assert_eq!(watch.wait_for_change(Duration::from_secs(1)), Some(Level::High));
/// assert_eq!(watch.wait_for_change(Duration::ZERO), None);
/// ```
#[derive(Debug)]
pub struct LevelWatch {
    /// Keeps the account, and not the `Memory`.
    admission: Admission,
    number: u64,
    seen: Level,
    birth: Birth,
}

impl LevelWatch {
    /// Returns the current level.
    #[must_use]
    pub fn level(&self) -> Level {
        self.admission.level()
    }

    /// Waits until the level differs from the one that this watch returned last (at first, the one
    /// when it was created), and returns it. Cancel safe: dropping the future loses no change. In a
    /// forked child the level never changes.
    pub fn changed(&mut self) -> impl Future<Output = Level> + Send {
        poll_fn(|cx| self.poll_change(cx))
    }

    /// Like [`LevelWatch::changed`], but blocks this thread, at most for `timeout` in real time.
    /// Returns `None` if the level has not changed by then.
    pub fn wait_for_change(&mut self, timeout: Duration) -> Option<Level> {
        let (clock, bell) = (SystemClock::new(), Bell::new());
        let deadline = clock.now() + timeout;
        let waker = Waker::from(Arc::clone(&bell));
        // Ends at the deadline at the latest: each iteration waits until then, or for a change.
        loop {
            if let Poll::Ready(level) = self.poll_change(&Context::from_waker(&waker)) {
                return Some(level);
            }
            if clock.now() >= deadline {
                return None;
            }
            clock.wait_until(&bell, deadline);
        }
    }

    fn poll_change(&mut self, cx: &Context<'_>) -> Poll<Level> {
        if let Some(level) = self.take_change() {
            return Poll::Ready(level);
        }
        if !self.birth.is_here() {
            return Poll::Pending;
        }
        let waker = cx.waker().clone();
        let _replaced = self.admission.state().level_watches().insert(self.number, waker);
        // A change before this is seen here, and a later one finds the waker.
        self.take_change().map_or(Poll::Pending, Poll::Ready)
    }

    fn take_change(&mut self) -> Option<Level> {
        let level = self.level();
        (std::mem::replace(&mut self.seen, level) != level).then_some(level)
    }
}

impl Drop for LevelWatch {
    fn drop(&mut self) {
        // In a forked child another thread may have held the lock.
        if self.birth.is_here() {
            let _removed = self.admission.state().level_watches().remove(&self.number);
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cost::RejectReason;
    use crate::ledger::RoomSharing;
    use crate::tally::{class_bound, class_of};

    /// An admission with these ceilings. The allowances are half of them at K = 2, except for a
    /// request that is nearly alone.
    fn door(host: u64, device: u64) -> Admission {
        let admission = Admission::new();
        for (budget, mib) in [(Budget::Host, host), (Budget::Device, device)] {
            admission.ledger(budget).set_measured(ByteSize::ZERO, ByteSize::mib(mib));
        }
        admission
    }

    fn reserved(admission: &Admission) -> (ByteSize, ByteSize) {
        (admission.ledger(Budget::Host).reserved(), admission.ledger(Budget::Device).reserved())
    }

    const NOTHING: (ByteSize, ByteSize) = (ByteSize::ZERO, ByteSize::ZERO);

    #[test]
    fn a_permit_books_and_its_drop_gives_back() {
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(40)).and_device(ByteSize::mib(10));
        let permit = admission.try_admit(cost).expect("fits");
        assert_eq!(permit.cost(), cost);
        assert_eq!(reserved(&admission), (ByteSize::mib(40), ByteSize::mib(10)));
        assert_eq!(admission.stats().held(), 1);
        drop(permit);
        assert_eq!(reserved(&admission), NOTHING);
        assert_eq!(admission.stats().held(), 0);
    }

    #[test]
    fn a_cost_that_fails_in_one_budget_is_booked_in_none() {
        let admission = door(100, 10);
        let cost = Cost::host(ByteSize::mib(1)).and_device(ByteSize::mib(4));
        let held = admission.try_admit(cost).expect("fits");
        let error = admission.try_admit(cost).expect_err("the device is full");
        assert!(matches!(error, Rejected::Full { budget: Budget::Device, .. }), "{error:?}");
        drop(held);
        assert_eq!(reserved(&admission), NOTHING);
        let error = admission.try_reserve_resource(Cost { device: ByteSize::mib(11), ..cost });
        assert!(matches!(error, Err(Rejected::TooLarge { budget: Budget::Device, .. })));
        assert_eq!(reserved(&admission), NOTHING);
        assert_eq!(
            admission.stats().rejected,
            [0, 1, 0, 0, 0, 0, 0, 0, 0, 0],
            "a resource is no request"
        );
    }

    #[test]
    fn what_can_never_fit_is_told_from_what_does_not_fit_now() {
        let admission = door(100, 100);
        let _held = admission.try_admit(Cost::host(ByteSize::mib(10))).expect("fits");
        let full = admission.try_admit(Cost::host(ByteSize::mib(41))).expect_err("full");
        assert!(matches!(full, Rejected::Full { .. }));
        assert!(full.retry_after().expect("later") >= Duration::from_secs(1));
        let large = admission.try_admit(Cost::host(ByteSize::mib(101))).expect_err("too large");
        assert_eq!(
            large,
            Rejected::TooLarge {
                budget: Budget::Host,
                asked: ByteSize::mib(101),
                ceiling: ByteSize::mib(100),
            }
        );
        assert_eq!(large.retry_after(), None);
        let extreme = admission.try_admit(Cost::host(ByteSize::MAX)).expect_err("too large");
        assert_eq!(extreme.reason(), RejectReason::TooLarge);
    }

    #[test]
    fn priorities_are_shed_in_their_order_and_the_exempt_never() {
        // The bug: high priority was rejected at the same level as normal.
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(1));
        let admitted = |level| {
            admission.set_level(level);
            [Priority::Low, Priority::Normal, Priority::High, Priority::Exempt]
                .map(|priority| admission.try_admit_with(cost, priority).is_ok())
        };
        assert_eq!(admitted(Level::None), [true; 4]);
        assert_eq!(admitted(Level::Elevated), [true; 4]);
        assert_eq!(admitted(Level::High), [false, true, true, true]);
        assert_eq!(admitted(Level::Critical), [false, false, true, true]);
        assert_eq!(admission.stats().rejected_total(RejectReason::Pressure), 3);
        let high = |mib| admission.try_admit_with(Cost::host(ByteSize::mib(mib)), Priority::High);
        let held = high(40).expect("fits");
        let refused = high(20).map(drop).expect_err("60 of 50 MiB");
        assert_eq!(refused.reason(), RejectReason::Full);
        drop(held);
        let model = admission.try_reserve_resource(cost).expect_err("a load can wait");
        assert_eq!(model.reason(), RejectReason::Pressure);
        // Beyond the allowance as well, and its reservation is released.
        let huge = admission.try_admit_with(Cost::host(ByteSize::MAX), Priority::Exempt);
        let more = admission.try_admit_with(cost, Priority::Exempt).expect("exempt");
        assert_eq!(more.cost(), Cost::ZERO, "64 bits are full");
        drop((huge, more));
        assert_eq!(reserved(&admission), NOTHING);
    }

    /// The bug: high priority had no advantage over normal.
    #[test]
    fn high_priority_uses_the_room_that_normal_priority_leaves_for_larger_requests() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        for budget in [Budget::Host, Budget::Device] {
            let reserved_headroom = ByteSize::mib(8);
            admission
                .ledger(budget)
                .balance(RoomSharing { reserved_headroom, ..RoomSharing::default() });
        }
        let held = admission.try_admit(Cost::host(ByteSize::mib(93))).expect("fits");
        let cost = Cost::host(ByteSize::mib(1));
        for (priority, fits) in
            [(Priority::Low, false), (Priority::Normal, false), (Priority::High, true)]
        {
            let admitted = admission.try_admit_with(cost, priority);
            assert_eq!(admitted.is_ok(), fits, "{priority:?}");
        }
        let high = |mib| admission.try_admit_with(Cost::host(ByteSize::mib(mib)), Priority::High);
        let full = high(8).map(drop).expect_err("8 of 7 MiB");
        assert_eq!(full.reason(), RejectReason::Full);
        assert!(high(7).is_ok(), "to the byte");
        drop(held);
    }

    /// The bug: with one memory for both, each ledger admitted all of it.
    #[test]
    fn with_one_budget_device_bytes_are_booked_with_the_host_once() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        admission.state().unify();
        let cost = Cost::host(ByteSize::mib(20)).and_device(ByteSize::mib(30));
        let request = admission.try_admit(cost).expect("fits");
        let mut model =
            admission.try_reserve_resource(Cost::device(ByteSize::mib(40))).expect("fits");
        assert_eq!(request.cost(), Cost::host(ByteSize::mib(50)));
        assert_eq!(model.cost(), Cost::host(ByteSize::mib(40)));
        let reserved =
            || [Budget::Host, Budget::Device].map(|it| admission.ledger(it).reserved_bytes());
        assert_eq!(reserved(), [ByteSize::mib(90), ByteSize::ZERO]);
        let full = admission.try_admit(Cost::device(ByteSize::mib(11))).map(drop);
        assert!(matches!(full, Err(Rejected::Full { budget: Budget::Host, .. })), "{full:?}");
        let exempt = admission.try_admit_with(Cost::device(ByteSize::mib(11)), Priority::Exempt);
        assert_eq!(reserved(), [ByteSize::mib(101), ByteSize::ZERO]);
        drop(exempt);
        model.settle_at(Cost::device(ByteSize::mib(45)));
        assert_eq!(reserved(), [ByteSize::mib(95), ByteSize::ZERO]);
        drop((request, model));
        assert_eq!(reserved(), [ByteSize::ZERO; 2]);
    }

    #[test]
    fn a_closed_door_admits_only_what_is_exempt() {
        let admission = Admission::new();
        let permit = admission.try_admit(Cost::host(ByteSize::gib(900))).expect("no limit known");
        admission.clone().close();
        assert_eq!(admission.try_admit(Cost::ZERO).expect_err("closed"), Rejected::ShuttingDown);
        assert!(admission.try_admit_with(Cost::ZERO, Priority::Exempt).is_ok());
        drop(permit);
        assert_eq!(admission.stats().rejected_total(RejectReason::ShuttingDown), 1);
    }

    #[test]
    fn permits_grow_and_shrink_within_the_allowance() {
        let admission = door(100, 100);
        let mut permit = admission.try_admit(Cost::host(ByteSize::mib(30))).expect("fits");
        permit.grow(ByteSize::mib(20)).expect("fits to the byte");
        let full = permit.grow(ByteSize::new(1)).expect_err("full");
        assert_eq!(full.reason(), RejectReason::Full);
        let never = permit.grow(ByteSize::mib(60)).expect_err("110 MiB never fit");
        assert_eq!(never.reason(), RejectReason::TooLarge);
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(50)));
        permit.shrink(ByteSize::mib(45));
        assert_eq!(reserved(&admission).0, ByteSize::mib(5));
        permit.shrink(ByteSize::MAX);
        assert_eq!(reserved(&admission), NOTHING);
        drop(permit);
        assert_eq!(reserved(&admission), NOTHING);
    }

    /// The bug: it was admitted beyond the allowance, and rejected when it grew by a byte.
    #[test]
    fn an_exempt_permit_did_not_grow() {
        let admission = door(100, 100);
        let cost = Cost::host(ByteSize::mib(90));
        let mut permit = admission.try_admit_with(cost, Priority::Exempt).expect("exempt");
        permit.grow(ByteSize::mib(20)).expect("beyond the ceiling as well");
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(110)));
        permit.grow(ByteSize::MAX).expect("as much as 64 bits hold");
        assert_eq!(reserved(&admission).0, ByteSize::MAX);
        permit.shrink(ByteSize::MAX);
        assert_eq!(reserved(&admission), NOTHING);
        drop(permit);
        assert_eq!((reserved(&admission), admission.stats().rejected), (NOTHING, [0; 10]));
    }

    /// The bug: without a limit, one estimate of 64 bits caused all others to be rejected.
    #[test]
    fn without_a_limit_one_boundless_request_shut_out_all_others() {
        let admission = Admission::new();
        let most = Cost::host(ByteSize::MAX).and_device(ByteSize::MAX);
        let some = Cost::host(ByteSize::mib(2)).and_device(ByteSize::mib(1));
        let before = admission.try_admit(some).expect("no limit");
        let boundless = admission.try_admit(most).expect("no limit");
        let mut after = admission.try_admit(some).expect("no limit");
        after.grow(ByteSize::mib(1)).expect("no limit");
        let model = admission.try_reserve_resource(some).expect("no limit");
        assert_eq!((after.cost(), model.cost()), (Cost::ZERO, Cost::ZERO), "64 bits are full");
        assert_eq!(reserved(&admission), (ByteSize::MAX, ByteSize::MAX));
        drop(boundless);
        assert_eq!(
            reserved(&admission),
            (some.host, some.device),
            "each gives back what it booked"
        );
        drop((before, after, model));
        assert_eq!(reserved(&admission), NOTHING);
        let model = admission.try_reserve_resource(most).expect("no limit");
        let request = admission.try_admit(some).expect("no limit");
        drop((model, request));
        assert_eq!(reserved(&admission), NOTHING);
    }

    #[test]
    fn a_fixed_limit_holds_to_the_byte_and_each_byte_counts_once() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let cost = |mib| Cost::host(ByteSize::mib(mib)).and_device(ByteSize::gib(9));
        let model = admission.try_reserve_resource(cost(30)).expect("fits");
        let first = admission.try_admit(cost(60)).expect("fits");
        let full = admission.try_admit(cost(11)).expect_err("full");
        assert_eq!(full.reason(), RejectReason::Full);
        let large = admission.try_admit(cost(101)).expect_err("never");
        assert_eq!(large.reason(), RejectReason::TooLarge);
        assert_eq!(admission.ledger(Budget::Host).reserved_bytes(), ByteSize::mib(90));
        drop((model, first));
        drop(admission.try_admit(cost(100)).expect("fits to the byte"));
        assert_eq!(reserved(&admission), NOTHING);
    }

    #[test]
    fn hints_follow_what_comes_free_and_differ_from_one_to_the_next() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let _held = admission.try_admit(Cost::host(ByteSize::mib(90))).expect("fits");
        let hints = |mib| -> Vec<u64> {
            let rejected =
                || admission.try_admit(Cost::host(ByteSize::mib(mib))).expect_err("full");
            let hints =
                std::iter::repeat_with(|| rejected().retry_after().expect("later").as_secs());
            hints.take(200).collect()
        };
        let ends = |hints: &[u64]| (hints.iter().min().copied(), hints.iter().max().copied());
        assert_eq!(ends(&hints(30)), (Some(1), Some(3)), "nothing is known to come free");
        let drain = ByteSize::mib(4);
        let balance =
            RoomSharing { drain, pause: Duration::from_millis(1500), ..RoomSharing::default() };
        admission.ledger(Budget::Host).balance(balance);
        assert_eq!(ends(&hints(30)), (Some(5), Some(10)), "20 MiB at 4 a second, and as much");
        assert_eq!(ends(&hints(11)), (Some(2), Some(4)), "no sooner than others who ask");
        admission.ledger(Budget::Host).balance(RoomSharing { drain: ByteSize::new(1), ..balance });
        assert_eq!(ends(&hints(100)), (Some(30), Some(60)), "and never later than in a minute");
    }

    /// codev#1126: 58 of 60 that were rejected together were told to retry after one second.
    #[test]
    fn those_who_are_rejected_together_come_back_at_different_times() {
        let admission = Admission::with_limit(ByteSize::mib(100));
        let state = admission.state();
        let seconds = |_| {
            let rejected = state.reject(state.slow_start(1));
            rejected.retry_after().expect("later").as_secs()
        };
        let all: Vec<_> = (0..60).map(seconds).collect();
        let at = |second| all.iter().filter(|&&of| of == second).count();
        assert_eq!([1, 2, 3].map(|second| at(second) >= 15), [true; 3], "{all:?}");
    }

    #[test]
    fn requests_are_counted_by_size_and_budget() {
        let admission = door(100, 100);
        let count = |budget, bytes| {
            let class = admission.classes(budget)[class_of(bytes)];
            assert_eq!(class.bound, class_bound(class_of(bytes)));
            (class.admitted_total, class.admitted_bytes_total, class.rejected_total)
        };
        let (large, small) = (ByteSize::mib(30), ByteSize::mib(1));
        let cost = Cost::host(large).and_device(small);
        let mut permit = admission.try_admit(cost).expect("fits");
        permit.grow(small).expect("fits");
        assert!(admission.try_admit(cost).is_err(), "the host is full");
        assert!(admission.try_admit(Cost::host(small).and_device(ByteSize::mib(96))).is_err());
        assert!(admission.try_admit(Cost::host(ByteSize::mib(101))).is_err(), "too large");
        let exempt = admission.try_admit_with(cost, Priority::Exempt).expect("exempt");
        assert_eq!(count(Budget::Host, large), (1, large.get(), 1));
        assert_eq!(count(Budget::Host, small), (0, 0, 0), "what lacks of the device");
        assert_eq!(count(Budget::Device, ByteSize::mib(96)), (0, 0, 1));
        assert_eq!(count(Budget::Device, small), (1, small.get(), 0));
        assert_eq!(admission.stats().rejected, [1, 2, 0, 0, 0, 0, 0, 0, 0, 0]);
        assert_eq!((admission.stats().admitted_total, admission.stats().held()), (2, 2));
        drop((permit, exempt));
        assert_eq!(admission.stats().held(), 0);
    }

    #[test]
    fn a_standing_permit_is_no_request() {
        let admission = door(100, 100);
        let mut permit =
            admission.try_reserve_resource(Cost::host(ByteSize::mib(80))).expect("counts once");
        assert_eq!(admission.stats(), AdmissionStats::default());
        permit.settle_at(Cost::ZERO);
        assert!(permit.grow(ByteSize::new(1)).is_err());
        permit.shrink(ByteSize::new(1));
        assert_eq!(permit.cost(), Cost::host(ByteSize::mib(80)));
        drop(permit);
        assert_eq!(reserved(&admission), NOTHING);
        assert_eq!(admission.ledger(Budget::Host).resource_reservations(), ByteSize::ZERO);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod watch_tests {
    use std::task::Wake;
    use std::thread;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[derive(Default)]
    struct Wakes(AtomicU64);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_change_wakes_each_watch_once_and_the_latest_level_is_seen() {
        let admission = Admission::new();
        let mut watches = [admission.watch_level(), admission.watch_level()];
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let poll = |watch: &mut LevelWatch| watch.poll_change(&Context::from_waker(&waker));
        for watch in &mut watches {
            assert!(poll(watch).is_pending() && poll(watch).is_pending());
        }
        admission.set_level(Level::None);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0, "nothing has changed");
        admission.set_level(Level::Elevated);
        admission.set_level(Level::Critical);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 2);
        for watch in &mut watches {
            assert_eq!(poll(watch), Poll::Ready(Level::Critical), "not the one in between");
            assert!(poll(watch).is_pending());
        }
        let [dropped, kept] = watches;
        drop(dropped);
        admission.set_level(Level::None);
        assert_eq!((wakes.0.load(Ordering::SeqCst), kept.level()), (3, Level::None));
    }

    #[test]
    fn no_change_is_lost_between_a_thread_that_waits_and_one_that_sets() {
        let admission = Admission::new();
        let mut watch = admission.watch_level();
        let seen = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for nth in 1..=2000_u64 {
                    admission.set_level(if nth % 2 == 0 { Level::None } else { Level::High });
                    while seen.load(Ordering::SeqCst) < nth {
                        thread::yield_now();
                    }
                }
            });
            for nth in 1..=2000 {
                let level = watch.wait_for_change(PATIENCE);
                let expected = if nth % 2 == 0 { Level::None } else { Level::High };
                assert_eq!(level, Some(expected), "change {nth}");
                seen.store(nth, Ordering::SeqCst);
            }
        });
        assert_eq!(watch.wait_for_change(Duration::ZERO), None);
    }
}
