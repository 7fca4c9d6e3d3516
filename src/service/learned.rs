//! Records the memory that requests of each route held, and estimates later requests from it.
//!
//! The records learn from [`SharedPermit`](super::SharedPermit): from handlers that report the
//! memory they hold (`hold`), from permits that had to grow, and from the layer's measurements.
//! [`Learned`] keeps a histogram for each route, with sixteen buckets for each power of two. Old
//! requests fade: all counts are halved after each `WINDOW` requests. The estimate is the 95th
//! percentile, which nineteen of twenty requests do not exceed; the ledger's correction factor
//! covers the others. With any other estimator the layer keeps a `need` for each route instead.
//!
//! Invariants: 95 % of the histogram's requests held at most `estimate`, which is at most a
//! sixteenth more than the largest of those held; at most [`ROUTES_MAX`] + 1 routes are kept, of
//! about 2 KiB each.

use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};
pub use lowtide_admission::learning::ROUTES_MAX;
use lowtide_admission::learning::{
    Compared, Room, Routes, SlowStart, SlowStartPermit, TooManyRunning,
};
use lowtide_admission::{Cost, Priority, layer::KeptUsage};
use lowtide_core::buckets::{BUCKETS, bucket_of, largest_of};

use super::estimate::{Estimate, Estimated};

/// The number of requests after which earlier ones count half. An estimate: few enough to follow a
/// change, and enough for a percentile.
const WINDOW: u32 = 128;
/// The number of requests until which the initial guess is also a lower bound of the estimate.
const LESSONS_MIN: u32 = lowtide_admission::learning::LESSONS_MIN;
/// The percentage of requests for which the estimate suffices.
const PERCENTILE: u32 = 95;

/// Estimates requests by what earlier requests of their route held. An estimate costs a look-up
/// under a lock, and an atomic load.
///
/// ```
/// use http::request::Parts;
/// use lowtide::ByteSize;
/// use lowtide::admission::Admission;
/// use lowtide::service::{Learned, MemoryLayer};
///
/// // By method and first path segment: a bounded set, since clients choose paths.
/// let route = |head: &Parts| {
///     let first = head.uri.path().split('/').nth(1).unwrap_or_default();
///     (head.method.to_string(), first.to_owned())
/// };
/// let estimate = Learned::new(ByteSize::mib(4), route); // 4 MiB until it is known
/// let _layer = MemoryLayer::new(Admission::with_limit(ByteSize::gib(1)), estimate);
/// ```
///
/// Behind a [`MemoryLayer`](super::MemoryLayer) with the admission of a `Memory`, allocations of
/// requests on the threads that poll them are measured. A handler reports other memory, such as
/// that of a C library, itself:
///
/// ```
/// # use lowtide::ByteSize;
/// # use lowtide::admission::Rejected;
/// # use lowtide::service::SharedPermit;
/// fn decoded(permit: &SharedPermit, image: &[u8]) -> Result<(), Rejected> {
///     permit.hold(ByteSize::of(image.len())) // reserves more if this exceeds the reservation
/// }
/// ```
pub struct Learned<K, F> {
    key: F,
    device: ByteSize,
    priority: Priority,
    guess: ByteSize,
    routes: Mutex<Routes<K, Route>>,
}

/// The recipient of a request's measured memory: the record of its route.
#[derive(Clone)]
pub struct Lesson(Of);

#[derive(Clone)]
enum Of {
    /// A route of [`Learned`], which learns bytes.
    Bytes(Arc<Route>),
    Estimate(Compared),
}

impl From<Compared> for Lesson {
    fn from(compared: Compared) -> Self {
        Self(Of::Estimate(compared))
    }
}

impl Lesson {
    /// Records the memory that a request held at its peak. Takes the route's own lock for about a
    /// microsecond.
    pub fn learn(&self, held: ByteSize) {
        match &self.0 {
            Of::Bytes(route) => route.learn(held),
            Of::Estimate(compared) => compared.learn(held),
        }
    }

    /// Records the memory that a running request holds. It can raise the estimate, and not lower
    /// it.
    pub(super) fn observe_running(&self, held: ByteSize) {
        match &self.0 {
            Of::Bytes(route) => route.observe_running(held),
            Of::Estimate(compared) => compared.observe_running(held),
        }
    }

    /// Records a request that did not complete, which is no evidence of a small need.
    pub(super) fn learn_at_least(&self, held: ByteSize) {
        match &self.0 {
            // Equal: the estimate may be the memory that this request held while it ran.
            Of::Bytes(route) if held >= route.estimate() && !held.is_zero() => route.learn(held),
            Of::Bytes(_) => {}
            Of::Estimate(compared) => compared.learn_at_least(held),
        }
    }

    /// Returns the reservation for a request with this estimate in this room: a measured need up
    /// to the [limit](Room::limit).
    pub(super) fn claim(&self, estimate: ByteSize, room: Room) -> ByteSize {
        match &self.0 {
            Of::Bytes(route) => estimate.min(room.limit(estimate).max(route.guess)),
            Of::Estimate(compared) => compared.claim(room),
        }
    }

    /// Returns the place for the record of the route's memory.
    pub(super) fn usage(&self) -> &KeptUsage {
        match &self.0 {
            Of::Bytes(route) => &route.usage,
            Of::Estimate(compared) => compared.usage(),
        }
    }

    /// Returns the most that one request with this reservation is expected to hold.
    pub(super) fn expected(&self, claim: ByteSize) -> ByteSize {
        match &self.0 {
            Of::Bytes(_) => claim,
            Of::Estimate(compared) => compared.expected().max(claim),
        }
    }

    /// Admits a request of the route if its need is known or few requests run.
    #[inline]
    pub(super) fn enter(
        &self,
        claim: ByteSize,
        room: ByteSize,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Box<SlowStartPermit>>, TooManyRunning> {
        match &self.0 {
            Of::Bytes(route) => route.trials.enter(claim, room, clock),
            Of::Estimate(compared) => compared.enter(room, clock),
        }
    }
}

impl fmt::Debug for Lesson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lesson").finish_non_exhaustive()
    }
}

impl<K: Ord, F: Fn(&Parts) -> K> Learned<K, F> {
    /// Creates an estimator with an initial guess. `key` returns the route of a request.
    pub fn new(guess: ByteSize, key: F) -> Self {
        let (device, priority) = (ByteSize::ZERO, Priority::Normal);
        let routes = Mutex::new(Routes::new(Route::new(guess), Route::has_learned));
        Self { key, device, priority, guess, routes }
    }

    /// Adds a fixed amount of device memory, which is not learned.
    #[must_use]
    pub fn and_device(mut self, bytes: ByteSize) -> Self {
        self.device = bytes;
        self
    }

    /// Sets the priority.
    #[must_use]
    pub fn priority(mut self, priority: Priority) -> Self {
        self.priority = priority;
        self
    }

    fn route(&self, head: &Parts) -> Arc<Route> {
        // Outside the lock: the key function is the caller's, and may be slow or panic.
        let key = (self.key)(head);
        lock(&self.routes).of(key, || Route::new(self.guess))
    }
}

impl<K, F> Estimate for Learned<K, F>
where
    K: Ord + Send + 'static,
    F: Fn(&Parts) -> K + Send + Sync + 'static,
{
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        let Estimated { cost, priority, .. } = self.estimate_to_learn(head);
        (cost, priority)
    }

    fn estimate_to_learn(&self, head: &Parts) -> Estimated {
        let route = self.route(head);
        let cost = Cost::host(route.estimate()).and_device(self.device);
        let lesson = Some(Lesson(Of::Bytes(route)));
        Estimated { cost, priority: self.priority, lesson }
    }
}

impl<K, F> fmt::Debug for Learned<K, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Learned").field("routes", &lock(&self.routes)).finish_non_exhaustive()
    }
}

/// The record of one route.
struct Route {
    /// The bytes that suffice for [`PERCENTILE`] % of the requests so far. Before the first has
    /// ended, the most that a running one held.
    learned: AtomicU64,
    guess: ByteSize,
    /// Set once the guess is no longer used.
    is_known: AtomicBool,
    seen: Mutex<FadingHistogram>,
    trials: SlowStart,
    usage: KeptUsage,
}

impl Route {
    fn new(guess: ByteSize) -> Self {
        Self {
            learned: AtomicU64::new(0),
            guess,
            is_known: AtomicBool::new(false),
            seen: Mutex::new(FadingHistogram::new()),
            trials: SlowStart::new(LESSONS_MIN),
            usage: KeptUsage::of_any_route(),
        }
    }

    /// Returns the need of a request.
    fn estimate(&self) -> ByteSize {
        let learned = ByteSize::new(self.learned.load(Ordering::Relaxed));
        if self.is_known.load(Ordering::Relaxed) { learned } else { learned.max(self.guess) }
    }

    fn observe_running(&self, held: ByteSize) {
        if self.is_known.load(Ordering::Relaxed) {
            return;
        }
        let seen = lock(&self.seen);
        if seen.lessons == 0 {
            self.learned.fetch_max(held.get(), Ordering::Relaxed);
        }
    }

    fn learn(&self, held: ByteSize) {
        let mut seen = lock(&self.seen);
        seen.add(held);
        let learned = seen.high().get();
        self.learned.store(learned, Ordering::Relaxed);
        if seen.lessons >= LESSONS_MIN {
            self.is_known.store(true, Ordering::Relaxed);
        }
    }

    fn has_learned(&self) -> bool {
        lock(&self.seen).lessons > 0
    }
}

/// A histogram in which old requests fade.
struct FadingHistogram {
    counts: Box<[u16; BUCKETS]>,
    /// The sum of the counts.
    count: u32,
    /// The largest value so far, so that the estimate of identical requests is exact.
    largest: ByteSize,
    /// The number of all requests, capped at the number from which it makes no difference.
    lessons: u32,
}

impl FadingHistogram {
    fn new() -> Self {
        Self { counts: Box::new([0; BUCKETS]), count: 0, largest: ByteSize::ZERO, lessons: 0 }
    }

    fn add(&mut self, held: ByteSize) {
        if self.count >= WINDOW {
            self.counts.iter_mut().for_each(|count| *count /= 2);
            self.count = self.counts.iter().copied().map(u32::from).sum();
        }
        if let Some(count) = self.counts.get_mut(bucket_of(held.get())) {
            *count += 1; // at most WINDOW
            self.count += 1;
        }
        self.largest = self.largest.max(held);
        self.lessons = self.lessons.saturating_add(1);
    }

    /// Returns the value that suffices for [`PERCENTILE`] of the requests.
    fn high(&self) -> ByteSize {
        let wanted = (self.count * PERCENTILE).div_ceil(100);
        let mut below = 0;
        for (at, &count) in self.counts.iter().enumerate() {
            below += u32::from(count);
            if below >= wanted {
                return ByteSize::new(largest_of(at)).min(self.largest);
            }
        }
        self.largest
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn learn(route: &Route, held: impl IntoIterator<Item = u64>) {
        held.into_iter().for_each(|held| route.learn(ByteSize::new(held)));
    }

    #[test]
    fn requests_that_are_alike_are_estimated_to_the_byte_once_the_guess_is_given_up() {
        let route = Route::new(ByteSize::mib(64));
        for nth in 1..=LESSONS_MIN {
            assert_eq!(route.estimate(), ByteSize::mib(64), "{nth}");
            learn(&route, [1_000_003]);
        }
        assert_eq!(route.estimate(), ByteSize::new(1_000_003));
        let low = Route::new(ByteSize::ZERO);
        learn(&low, [5 << 20]);
        assert_eq!(low.estimate(), ByteSize::mib(5), "a guess that is too low is no bound");
        low.observe_running(ByteSize::mib(9));
        assert_eq!(low.estimate(), ByteSize::mib(5), "one has ended");
        let running = Route::new(ByteSize::mib(1));
        [3, 2].into_iter().for_each(|mib| running.observe_running(ByteSize::mib(mib)));
        assert_eq!(running.estimate(), ByteSize::mib(3));
    }

    #[test]
    fn nineteen_of_twenty_fit_and_one_giant_in_fifty_moves_nothing() {
        let route = Route::new(ByteSize::mib(1));
        let giant = |nth: u64| if nth % 50 == 49 { 1 << 30 } else { (1 + nth % 20) << 20 };
        learn(&route, (0..5_000).map(giant));
        let estimate = route.estimate();
        assert!(estimate >= ByteSize::mib(19), "{estimate}");
        assert!(estimate <= ByteSize::new((20 << 20) * 17 / 16), "{estimate}");
    }

    #[test]
    fn what_changed_is_learned_within_a_few_windows_up_and_down() {
        let route = Route::new(ByteSize::mib(1));
        let window = usize::try_from(WINDOW).expect("small");
        for size in [8 << 20, 1 << 10, 100 << 20, 0] {
            learn(&route, std::iter::repeat_n(size, 4 * window));
            let most = largest_of(bucket_of(size));
            assert!((size..=most).contains(&route.estimate().get()), "{}", route.estimate());
        }
    }

    /// The bug: without room and without a guess, two thirds of nothing were reserved, and a
    /// request that reserves nothing is always admitted.
    #[test]
    fn without_room_a_learned_need_was_admitted_for_nothing() {
        let route = Arc::new(Route::new(ByteSize::ZERO));
        learn(&route, [5 << 20]);
        let (estimate, lesson) = (route.estimate(), Lesson(Of::Bytes(route)));
        let room = Room { all: ByteSize::ZERO, shared: ByteSize::ZERO };
        assert_eq!(lesson.claim(estimate, room), ByteSize::kib(16));
        assert_eq!(lesson.claim(ByteSize::ZERO, room), ByteSize::ZERO, "no need");
    }

    /// The bug: clients that left before their request held anything lowered the estimate to zero.
    #[test]
    fn cancelled_requests_that_held_nothing_are_no_evidence() {
        let route = Arc::new(Route::new(ByteSize::ZERO));
        let lesson = Lesson(Of::Bytes(Arc::clone(&route)));
        (0..100).for_each(|_| lesson.learn_at_least(ByteSize::ZERO));
        lesson.learn(ByteSize::mib(5));
        assert_eq!(route.estimate(), ByteSize::mib(5));
    }

    #[test]
    fn nothing_and_everything_are_amounts_like_others() {
        let route = Route::new(ByteSize::mib(1));
        learn(&route, std::iter::repeat_n(u64::MAX, 10));
        assert_eq!(route.estimate(), ByteSize::MAX);
        let route = Route::new(ByteSize::MAX);
        learn(&route, std::iter::repeat_n(0, 10));
        assert_eq!(route.estimate(), ByteSize::ZERO);
    }
}
