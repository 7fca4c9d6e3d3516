//! Registers the running requests that have reserved much memory, cancels some at level critical,
//! suspends the reservations of those that wait for their clients, and lets those with time limits
//! look at the time.
//!
//! The tower layer adds a request when it is measured to hold [`LARGE_MIN`] or more, and when it
//! has reserved [`REGISTERED_MIN`] or has a time limit and its handler waits, so that small and
//! quick requests cost nothing. Operators read the [largest](super::state::AdmissionState::largest)
//! and the [oldest](super::state::AdmissionState::oldest). The registry has weak handles, which keep
//! no request alive.
//! Requests that have ended are removed when the registry is read, and from time to time when
//! another is added.
//!
//! The layer cancels a request that outgrew its cap. At level critical the control loop cancels the
//! one that is furthest above its claim, whatever its cap, and the next one only when that has
//! released its bytes or [`GRACE`] has passed. It also wakes cancelled requests at each tick, so
//! that the layer needs no timer to end those that do not end by themselves.
//!
//! While others wait for room, each request that has waited for its client for [`SLOW_AFTER`] is
//! suspended: what it has reserved and does not hold is released until its body is there.
//!
//! A request with a time limit compares it with the time every [`TIME_CHECKED_EVERY`], and ends
//! itself.
//!
//! Invariants: at most [`LARGE_MAX`] requests are registered, those with the largest reservations.
//! A tick allocates nothing, and cancels at most one request. No lock of the registry is held while
//! a request is cancelled, suspended or woken.

use std::cmp::Reverse;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Moment;

use super::pressure::Level;
use super::usage::NAME_MAX;

/// A request that holds at least this much is registered. An estimate: well above what a small
/// request needs.
pub const LARGE_MIN: ByteSize = ByteSize::kib(256);
/// The time that a cancelled request has to end by itself. An estimate: longer than the steps of
/// most handlers, and short compared to the growth that the kernel kills for.
pub const GRACE: Duration = Duration::from_millis(100);
/// A request that has reserved at least this much is registered when its handler waits. An
/// estimate: well above the buffers of its connection.
pub const REGISTERED_MIN: ByteSize = ByteSize::kib(64);
/// The time after which the reservation of a request that waits for its client may be suspended. An
/// estimate: longer than a body takes to arrive that its client sends without a pause.
pub const SLOW_AFTER: Duration = Duration::from_millis(100);
/// The maximum number of registered requests. If each has reserved [`REGISTERED_MIN`], they have
/// reserved 256 MiB.
const LARGE_MAX: usize = 4096;
/// The time between two checks of the time limits of requests. An estimate: short compared to any
/// sensible limit, and a check of a full registry takes less than 1 ms.
const TIME_CHECKED_EVERY: Duration = Duration::from_millis(100);
/// The minimum number of registered requests at which those that have ended are looked for.
const SWEPT_MIN: usize = 64;

/// The maximum number of requests that are described without allocations.
pub(super) const TOP_MAX: usize = 16;

/// A full registry is searched for one of so many requests that are no larger than its smallest. An
/// estimate: a search takes as long as some requests.
const SEARCHED_PART: usize = 64;

/// A registered request, or something else that the control loop looks after: it has the defaults.
pub trait LargeRequest: Send + Sync {
    /// Returns its figures; `None` if it has ended.
    fn figures(&self) -> Option<RequestFigures>;

    /// Cancels it. Called for a request that holds more than its claim at level critical.
    fn cancel(&self) {}

    /// Releases what it has reserved and does not hold, if it has waited for its client for
    /// [`SLOW_AFTER`].
    fn suspend(&self, _now: Moment) {}

    /// Wakes its handler.
    fn wake(&self) {}

    /// Ends it if a time limit has passed, by the control loop's clock. Called every 100 to
    /// 250 ms, or every second in a quiet time.
    fn check_time(&self, _now: Moment) {}

    /// Describes it at this time, by the control loop's clock. Returns `false`, with the description
    /// unchanged, if it has ended, or is no request. Allocates nothing if its texts have
    /// room.
    fn describe(&self, _now: Moment, _into: &mut RequestMemory) -> bool {
        false
    }
}

/// What the control loop looks at in a running request.
#[derive(Clone, Copy, Debug, Default)]
pub struct RequestFigures {
    /// The bytes that it has reserved.
    pub reserved: ByteSize,
    /// The time at which it was admitted; `None` if it is no request.
    pub admitted_at: Option<Moment>,
    /// The bytes that it holds beyond its claim; zero if it cannot be ended.
    pub excess: ByteSize,
    /// `true` if it is cancelled.
    pub is_cancelled: bool,
}

/// The memory of a running request.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct RequestMemory {
    /// The HTTP method.
    pub method: String,
    /// The route, shortened to 64 bytes: the pattern that axum matched, the gRPC method, or else
    /// the first segment of the path.
    pub route: String,
    /// The tenant, shortened to 64 bytes; `None` if the service names none.
    pub tenant: Option<String>,
    /// What it does or waits for.
    pub phase: RequestPhase,
    /// The bytes that it has reserved.
    pub reserved: ByteSize,
    /// The bytes that it holds.
    pub live: ByteSize,
    /// The largest number of bytes that it held.
    pub peak: ByteSize,
    /// The bytes that it reserved when it was admitted, or later by growing.
    pub claim: ByteSize,
    /// The largest number of bytes that it had on disk; zero unless it spilled.
    pub spilled: ByteSize,
    /// The time since it was admitted, to about a second.
    pub age: Duration,
    /// `true` if it was cancelled.
    pub is_cancelled: bool,
}

impl RequestMemory {
    /// Creates a place for a description, with room for its method, route and tenant.
    #[must_use]
    pub fn with_room() -> Self {
        let text = || String::with_capacity(NAME_MAX);
        Self { method: text(), route: text(), tenant: Some(text()), ..Self::default() }
    }
}

lowtide_core::named_enum! {
    /// The phase of a running request.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum RequestPhase {
        /// Its handler waits for more of its body.
        Receiving = "receiving",
        /// Its reservation is suspended: it waits for the rest of its body, and then for room.
        Suspended = "suspended",
        /// Its handler works: its body has arrived, or it does not read it now.
        #[default]
        Working = "working",
        /// Its handler has answered.
        Answered = "answered",
    }
}

/// The registry of one admission.
#[derive(Default)]
pub(super) struct LargeRequests {
    registry: Mutex<Registry>,
    /// The time of the last tick of the control loop, in nanoseconds.
    now: AtomicU64,
    /// `true` if a registered request may have been cancelled and may still run.
    has_cancelled: AtomicBool,
}

#[derive(Default)]
struct Registry {
    requests: Vec<Arc<dyn LargeRequest>>,
    /// The number of requests at which those that have ended are looked for next.
    sweep_at: usize,
    /// The reservation of the smallest request when the full registry was searched last.
    smallest: ByteSize,
    /// The number of requests that were not added since then.
    omitted: usize,
    /// How often requests that have ended were removed.
    removals: u64,
    /// The time of the last check of time limits.
    time_checked: Moment,
    /// The time since which a cancelled request delays the next cancellation.
    held_up_since: Option<Moment>,
}

impl Registry {
    fn remove_ended(&mut self) {
        self.requests.retain(|request| request.figures().is_some());
        self.removals += 1;
    }
}

impl LargeRequests {
    /// Starts over.
    pub(super) fn begin(&self) {
        *self.registry() = Registry::default();
        self.now.store(0, Ordering::Relaxed);
        self.has_cancelled.store(false, Ordering::Relaxed);
    }

    /// Adds a request that has reserved so many bytes. If the registry is full, the request
    /// replaces the smallest one, or is not added if it is the smallest itself. Its place may be
    /// that of a request that has ended since the last search.
    #[cold]
    pub(super) fn add(&self, request: Arc<dyn LargeRequest>, reserved: ByteSize) {
        let mut registry = self.registry();
        let count = registry.requests.len();
        if count >= LARGE_MAX && reserved <= registry.smallest {
            registry.omitted += 1;
            if registry.omitted < SEARCHED_PART {
                return;
            }
        }
        if count >= registry.sweep_at.clamp(SWEPT_MIN, LARGE_MAX) {
            registry.remove_ended();
            registry.sweep_at = 2 * registry.requests.len();
        }
        if registry.requests.len() < LARGE_MAX {
            return registry.requests.push(request);
        }
        let of = |other: &Arc<dyn LargeRequest>| {
            other.figures().map_or(ByteSize::ZERO, |of| of.reserved)
        };
        let Registry { requests, smallest, omitted, .. } = &mut *registry;
        let Some(least) = requests.iter_mut().min_by_key(|other| of(other)) else { return };
        (*smallest, *omitted) = (of(least), 0);
        if *smallest < reserved {
            *least = request;
        }
    }

    /// Returns the time since the oldest one was admitted, at the last tick.
    pub(super) fn oldest_age(&self) -> Duration {
        let registry = self.registry();
        let admitted =
            registry.requests.iter().filter_map(|request| request.figures()?.admitted_at).min();
        admitted.map_or(Duration::ZERO, |at| self.now() - at)
    }

    /// Returns the `most` running requests for which `key` returns most, in this order.
    pub(super) fn top<K: Ord>(
        &self,
        most: usize,
        now: Moment,
        key: impl Fn(&RequestMemory) -> Option<K>,
    ) -> Vec<RequestMemory> {
        let requests = {
            let mut registry = self.registry();
            registry.remove_ended();
            registry.requests.clone()
        };
        let describe = |request: &Arc<dyn LargeRequest>| {
            let mut described = RequestMemory::default();
            request.describe(now, &mut described).then_some(described)
        };
        let mut top: Vec<_> = requests.iter().filter_map(describe).collect();
        top.retain(|request| key(request).is_some());
        top.sort_by_key(|request| Reverse(key(request)));
        top.truncate(most);
        top
    }

    /// Suspends requests that wait for their clients, one after the other, while `is_short`.
    pub(super) fn suspend_while(&self, now: Moment, is_short: impl Fn() -> bool) {
        self.each().take_while(|_| is_short()).for_each(|request| request.suspend(now));
    }

    /// Returns each request in turn, without the lock. If another thread removes one meanwhile,
    /// another one may be missed.
    pub(super) fn each(&self) -> impl Iterator<Item = Arc<dyn LargeRequest>> + '_ {
        (0..LARGE_MAX).map_while(|at| self.registry().requests.get(at).map(Arc::clone))
    }

    fn registry(&self) -> MutexGuard<'_, Registry> {
        self.registry.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the time of the last tick of the control loop.
    #[inline]
    pub(super) fn now(&self) -> Moment {
        Moment::after_origin(Duration::from_nanos(self.now.load(Ordering::Relaxed)))
    }

    /// Sets the time that is taken for that of the last tick.
    pub(super) fn set_now(&self, now: Moment) {
        let nanos = u64::try_from(now.since_origin().as_nanos()).unwrap_or(u64::MAX);
        self.now.store(nanos, Ordering::Relaxed);
    }

    /// Wakes all requests, when the control loop ends.
    pub(super) fn wake_all(&self) {
        self.each().for_each(|request| request.wake());
    }

    /// Records that a request was cancelled.
    pub(super) fn note_cancelled(&self) {
        self.has_cancelled.store(true, Ordering::Release);
    }

    /// Wakes cancelled requests, and cancels one if the level is critical. Called by the control
    /// loop at each tick.
    pub(super) fn tend(&self, level: Level, now: Moment) {
        self.set_now(now);
        self.check_time(now);
        let had_cancelled = self.has_cancelled.swap(false, Ordering::Acquire);
        if !had_cancelled && level < Level::Critical {
            return;
        }
        let removals = self.registry().removals;
        let (mut has_cancelled, mut is_held_up) = (false, false);
        let mut worst: Option<(ByteSize, Arc<dyn LargeRequest>)> = None;
        for request in self.each() {
            let Some(RequestFigures { excess, is_cancelled, .. }) = request.figures() else {
                continue;
            };
            if is_cancelled {
                request.wake();
                has_cancelled = true;
                is_held_up |= !excess.is_zero();
            } else if excess >= LARGE_MIN && worst.as_ref().is_none_or(|(most, _)| excess > *most) {
                worst = Some((excess, request));
            }
        }
        let mut registry = self.registry();
        // One may have been missed.
        if has_cancelled || had_cancelled && registry.removals != removals {
            self.note_cancelled();
        }
        let since = registry.held_up_since.unwrap_or(now);
        registry.held_up_since = is_held_up.then_some(since);
        let is_free = !is_held_up || now - since >= GRACE;
        if let Some((_, request)) = worst.filter(|_| level == Level::Critical && is_free) {
            registry.held_up_since = Some(now);
            drop(registry);
            request.cancel();
        }
    }

    fn check_time(&self, now: Moment) {
        let mut registry = self.registry();
        if !registry.requests.is_empty() && now - registry.time_checked >= TIME_CHECKED_EVERY {
            registry.time_checked = now;
            drop(registry);
            self.each().for_each(|request| request.check_time(now));
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::atomic::AtomicUsize;

    use super::*;
    use crate::state::AdmissionState;

    /// A request that holds so much, claimed nothing, and ends only if a test lets it.
    struct Request(AtomicU64, AtomicBool, AtomicUsize);

    fn request(live: u64) -> Arc<Request> {
        Arc::new(Request(live.into(), false.into(), 0.into()))
    }

    impl LargeRequest for Request {
        fn figures(&self) -> Option<RequestFigures> {
            self.2.fetch_add(1, Ordering::Relaxed);
            let reserved = ByteSize::new(self.0.load(Ordering::Relaxed));
            let is_cancelled = self.1.load(Ordering::Relaxed);
            let admitted_at = Some(Moment::ORIGIN);
            let figures = RequestFigures { reserved, admitted_at, excess: reserved, is_cancelled };
            (!reserved.is_zero()).then_some(figures)
        }

        fn cancel(&self) {
            assert!(!self.1.swap(true, Ordering::Relaxed), "once");
        }

        fn suspend(&self, _: Moment) {
            self.0.store(1, Ordering::Relaxed);
        }

        fn wake(&self) {}

        fn describe(&self, now: Moment, into: &mut RequestMemory) -> bool {
            let Some(RequestFigures { reserved: live, .. }) = self.figures() else { return false };
            let age = now - Moment::ORIGIN;
            *into = RequestMemory { reserved: live, live, age, ..RequestMemory::default() };
            true
        }
    }

    /// Has ended, and is removed by another thread while the control loop looks at it.
    struct Removed(Arc<AdmissionState>);

    impl LargeRequest for Removed {
        fn figures(&self) -> Option<RequestFigures> {
            // Read by the registry, too.
            if self.0.large.registry.try_lock().is_ok() {
                assert!(self.0.largest(0, Moment::ORIGIN).is_empty());
            }
            None
        }
    }

    /// No request, and never removed.
    struct Timer;

    impl LargeRequest for Timer {
        fn figures(&self) -> Option<RequestFigures> {
            Some(RequestFigures { reserved: ByteSize::MAX, ..RequestFigures::default() })
        }
    }

    /// Bug: entries that are no requests took the places of the largest requests in the flight
    /// recorder.
    #[test]
    fn an_entry_that_is_no_request_takes_no_place_among_the_largest() {
        let state = AdmissionState::default();
        let large = &state.large;
        (0..2 * TOP_MAX).for_each(|_| large.add(Arc::new(Timer), ByteSize::MAX));
        let only = request(LARGE_MIN.get());
        large.add(Arc::clone(&only) as Arc<dyn LargeRequest>, LARGE_MIN);
        let mut described = vec![RequestMemory::default(); TOP_MAX];
        assert_eq!(state.largest_reserved(&mut described, Moment::ORIGIN), 1);
        assert_eq!(described[0].reserved, LARGE_MIN);
    }

    /// Bug: a request that was missed since another one was removed was never woken again.
    #[test]
    fn a_cancelled_request_that_was_missed_is_looked_for_again() {
        let state = Arc::new(AdmissionState::default());
        let large = &state.large;
        large.add(Arc::new(Removed(Arc::clone(&state))), ByteSize::ZERO);
        let cancelled = request(LARGE_MIN.get());
        large.add(Arc::clone(&cancelled) as Arc<dyn LargeRequest>, LARGE_MIN);
        cancelled.cancel();
        large.note_cancelled();
        large.tend(Level::None, Moment::ORIGIN);
        assert!(large.has_cancelled.load(Ordering::Relaxed));
    }

    #[test]
    fn of_more_requests_than_places_the_largest_are_registered() {
        let state = AdmissionState::default();
        let large = &state.large;
        let more = LARGE_MAX as u64 + 500;
        let least = LARGE_MIN.get();
        let requests: Vec<_> = (least..least + more).map(request).collect();
        // From both ends, so that small ones arrive late as well.
        for (one, other) in requests.iter().zip(requests.iter().rev()).take(requests.len() / 2) {
            for request in [one, other] {
                let reserved = ByteSize::new(request.0.load(Ordering::Relaxed));
                large.add(Arc::clone(request) as Arc<dyn LargeRequest>, reserved);
            }
        }
        let live = |most| -> Vec<u64> {
            state.largest(most, Moment::ORIGIN).iter().map(|of| of.live.get()).collect()
        };
        let most = least + more;
        assert_eq!(live(usize::MAX), (least + 500..most).rev().collect::<Vec<_>>());
        assert_eq!(live(2), [most - 1, most - 2]);
        let mut described = vec![RequestMemory::default(); 20];
        let top = |into: &mut [RequestMemory]| -> Vec<u64> {
            let count = state.largest_reserved(into, Moment::ORIGIN);
            into.iter().take(count).map(|of| of.reserved.get()).collect()
        };
        let largest = |count: u64| (most - count..most).rev().collect::<Vec<_>>();
        assert_eq!(top(&mut described), largest(TOP_MAX as u64));
        assert_eq!(top(&mut described[..3]), largest(3));
        requests.iter().skip(600).for_each(|request| request.0.store(0, Ordering::Relaxed));
        assert_eq!(live(usize::MAX).len(), 100, "ended requests leave");
        assert_eq!(large.registry().requests.len(), 100, "and are no longer kept");
    }

    /// The bug: ended requests stayed in the registry, and each kept its account allocated.
    #[test]
    fn ended_requests_leave_the_registry_without_readers() {
        let state = AdmissionState::default();
        let large = &state.large;
        for _ in 0..10 * LARGE_MAX {
            let ended = request(1 << 20);
            large.add(Arc::clone(&ended) as Arc<dyn LargeRequest>, ByteSize::mib(1));
            ended.0.store(0, Ordering::Relaxed);
        }
        let kept = large.registry().requests.len();
        assert!(kept <= SWEPT_MIN, "{kept}");
    }

    /// The bug: each further request searched all 4,096 twice with the lock held, and took 33 times
    /// as long.
    #[test]
    fn a_full_registry_is_not_searched_for_each_further_request() {
        let state = AdmissionState::default();
        let large = &state.large;
        let add = |request: &Arc<Request>| {
            large.add(Arc::clone(request) as Arc<dyn LargeRequest>, ByteSize::mib(1));
        };
        let requests: Vec<_> = (0..LARGE_MAX).map(|_| request(1 << 20)).collect();
        requests.iter().for_each(add);
        let looks = || requests.iter().map(|it| it.2.load(Ordering::Relaxed)).sum::<usize>();
        let before = looks();
        let more: Vec<_> = (0..10 * SEARCHED_PART).map(|_| request(1 << 20)).collect();
        more.iter().for_each(add);
        let searched = (looks() - before) / LARGE_MAX;
        assert!(searched < 30, "{searched} times for {} requests", more.len());
        requests.iter().for_each(|request| request.0.store(0, Ordering::Relaxed));
        more.iter().take(SEARCHED_PART).for_each(add);
        assert!(large.registry().requests.len() <= SEARCHED_PART, "ended ones still leave");
    }

    #[test]
    fn requests_are_suspended_in_turn_until_there_is_room() {
        let state = AdmissionState::default();
        let large = &state.large;
        let requests = [5, 6, 7, 8].map(request);
        for request in &requests {
            large.add(Arc::clone(request) as Arc<dyn LargeRequest>, ByteSize::new(5));
        }
        let reserved = || requests.each_ref().map(|request| request.0.load(Ordering::Relaxed));
        large.suspend_while(Moment::ORIGIN, || reserved().iter().sum::<u64>() > 20);
        assert_eq!(reserved(), [1, 1, 7, 8]);
    }

    #[test]
    fn at_critical_the_furthest_above_its_claim_goes_first_and_one_at_a_time() {
        let state = AdmissionState::default();
        let large = &state.large;
        large.begin();
        let mib = ByteSize::mib(1).get();
        let requests = [2 * mib, 7 * mib, 5 * mib, 1000].map(request);
        for request in &requests {
            large.add(Arc::clone(request) as Arc<dyn LargeRequest>, ByteSize::ZERO);
        }
        let cancelled = || requests.each_ref().map(|request| request.1.load(Ordering::Relaxed));
        let at = |ms| Moment::ORIGIN + Duration::from_millis(ms);
        large.tend(Level::High, at(0));
        assert_eq!(cancelled(), [false; 4], "below critical, nothing is cancelled");
        large.tend(Level::Critical, at(10));
        assert_eq!(cancelled(), [false, true, false, false]);
        large.tend(Level::Critical, at(109));
        assert_eq!(cancelled(), [false, true, false, false], "it has 100 ms");
        large.tend(Level::Critical, at(110));
        assert_eq!(cancelled(), [false, true, true, false], "it did not end in time");
        requests[2].0.store(0, Ordering::Relaxed);
        large.tend(Level::Critical, at(120));
        assert_eq!(cancelled(), [false, true, true, false], "the first still holds its bytes");
        requests[1].0.store(0, Ordering::Relaxed);
        large.tend(Level::Critical, at(121));
        assert_eq!(cancelled(), [true, true, true, false], "all before have released theirs");
        large.tend(Level::Critical, at(1000));
        assert_eq!(cancelled(), [true, true, true, false], "a small excess relieves nothing");
    }
}
