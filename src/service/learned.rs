//! Records the memory that requests of each route held, for the learning estimator and for the
//! layer.
//!
//! Both learn from [`SharedPermit`](super::SharedPermit): from handlers that report the memory they
//! hold (`hold`), from permits that had to grow, and from the layer's measurements. For each route
//! there is a histogram over sixteenths of powers of two, in which old requests fade: all counts
//! are halved after each `WINDOW` requests. The estimate is its 95th percentile, which nineteen of
//! twenty requests do not exceed; the ledger's correction factor covers the others.
//!
//! [`Learned`] learns bytes. The layer learns, behind every other estimator, the bytes held for
//! each estimated byte, by method, route and size: lengths vary within a route, and the memory for
//! a byte of them varies little. Requests of a size that is not known yet reserve by what was
//! learned last of their route.
//!
//! Invariant: `estimate >= 95 % of the histogram's requests`, and at most a sixteenth more than the
//! largest of those; memory is at most [`ROUTES_MAX`] + 1 routes of about two KiB.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use http::request::Parts;

use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use crate::sync::{Mutex, lock};
use lowtide_admission::{Cost, Priority};

use super::estimate::{Estimate, Estimated};
use super::slow_start::{EXPANSION, EXPANSION_UNKNOWN, SlowStart, TooManyRunning};

/// The maximum number of routes that are recorded separately; later ones share one estimate.
pub const ROUTES_MAX: usize = 256;
/// The number of requests after which earlier ones count half. An estimate: few enough to follow a
/// change, and enough for a percentile.
const WINDOW: u32 = 128;
/// The number of requests until which the initial guess is also a lower bound of the estimate, and
/// the caller's estimate one of a reservation.
const LESSONS_MIN: u32 = 8;
/// The percentage of requests for which the estimate suffices.
const PERCENTILE: u32 = 95;
/// One byte held for each estimated byte, as an amount.
const ONE: ByteSize = ByteSize::kib(1);
/// The assumed need of an estimated byte in an unknown route. An estimate.
const UNKNOWN: ByteSize = ByteSize::kib(2);
/// The minimum estimate for comparisons with the memory held: the constant part of a request's
/// memory does not grow with its length.
const COMPARED_MIN: ByteSize = ByteSize::kib(16);
/// The number of buckets for each power of two.
const PARTS: usize = 16;
const PARTS_POWER: usize = PARTS.ilog2() as usize;
/// The smallest amounts have a bucket each, followed by as many for each power of two.
const BUCKETS: usize = (64 - PARTS_POWER + 1) * PARTS;

/// Estimates requests by what earlier requests of their route held. Costs a look-up under a lock,
/// and a load.
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
    routes: Mutex<Routes<K>>,
}

/// At most [`ROUTES_MAX`] routes, and one for all others.
pub(super) struct Routes<K> {
    guess: ByteSize,
    known: BTreeMap<K, Arc<Route>>,
    rest: Arc<Route>,
    /// The last estimate of routes that differ in the size of requests alone; 0 without one.
    families: BTreeMap<u64, Arc<AtomicU64>>,
}

impl<K: Ord> Routes<K> {
    /// Creates an empty set; each route starts with a guess.
    fn new(guess: ByteSize) -> Self {
        let (known, families) = (BTreeMap::new(), BTreeMap::new());
        Self { guess, known, rest: Arc::new(Route::new(guess)), families }
    }

    /// Creates an empty set, in which each route learns the bytes held for an estimated byte.
    pub(super) fn compared() -> Self {
        Self::new(UNKNOWN)
    }

    /// The same, if estimates are upper bounds.
    pub(super) fn bounded() -> Self {
        Self::new(ONE)
    }

    /// Returns the record of a key. A new one starts with what its family has learned.
    pub(super) fn of(&mut self, key: K, family: Option<u64>) -> Arc<Route> {
        if let Some(route) = self.known.get(&key) {
            return Arc::clone(route);
        }
        if self.known.len() >= ROUTES_MAX {
            // Clients choose paths: routes without a measurement and without a running request are
            // removed.
            self.known.retain(|_, route| Arc::strong_count(route) > 1 || route.has_learned());
        }
        if self.known.len() >= ROUTES_MAX {
            return Arc::clone(&self.rest);
        }
        let family = family.map(|key| self.family(key)).unwrap_or_default();
        let route = Arc::new(Route { family, ..Route::new(self.guess) });
        self.known.insert(key, Arc::clone(&route));
        route
    }

    fn family(&mut self, key: u64) -> Arc<AtomicU64> {
        if self.families.len() >= ROUTES_MAX {
            self.families.retain(|_, family| Arc::strong_count(family) > 1);
        }
        Arc::clone(self.families.entry(key).or_default())
    }
}

/// The recipient of a request's measured memory: the record of its route.
#[derive(Clone)]
pub struct Lesson {
    route: Arc<Route>,
    /// The estimate for comparison; `None` if bytes are learned.
    compared: Option<ByteSize>,
    /// `true` if no reservation may be below the estimate.
    is_minimum: bool,
}

impl Lesson {
    /// Creates one for a request with this estimate, in routes that compare.
    pub(super) fn compared(route: Arc<Route>, estimate: ByteSize, is_minimum: bool) -> Self {
        Self { route, compared: Some(estimate.max(COMPARED_MIN)), is_minimum }
    }

    /// Records the memory that a request held at its peak. Takes the route's own lock for about a
    /// microsecond.
    pub fn learn(&self, held: ByteSize) {
        self.route.learn(self.amount(held));
    }

    /// Records a request that did not complete, which is no evidence of a small need.
    pub(super) fn learn_at_least(&self, held: ByteSize) {
        let amount = self.amount(held);
        if amount > self.route.estimate() {
            self.route.learn(amount);
        }
    }

    fn amount(&self, held: ByteSize) -> ByteSize {
        self.compared.map_or(held, |estimate| times(held, ONE, estimate))
    }

    /// Returns the reservation for a request with this estimate: the measured need of its route,
    /// but at most `most` for that alone. Otherwise a route with one huge request would not be
    /// admitted any more, and its estimate would stay.
    pub(super) fn claim(&self, estimate: ByteSize, most: ByteSize) -> ByteSize {
        let route = &self.route;
        let Some(compared) = self.compared else { return estimate.min(most.max(route.guess)) };
        let learned = times(compared, route.estimate(), ONE).min(most);
        if route.is_known() && !self.is_minimum { learned } else { estimate.max(learned) }
    }

    /// Admits a request of the route if its need is known or few requests run. Reads the time only
    /// if needed.
    pub(super) fn enter(
        &self,
        estimate: ByteSize,
        claim: ByteSize,
        room: ByteSize,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Trial>, TooManyRunning> {
        let (cost, expansion) = match self.route.is_known() {
            true => (claim, EXPANSION),
            false => (estimate, EXPANSION_UNKNOWN),
        };
        let Some(first) = SlowStart::first(cost, expansion, room) else { return Ok(None) };
        let mut slow_start = lock(&self.route.slow_start);
        if slow_start.is_over() {
            return Ok(None);
        }
        slow_start.enter(first, clock.now())?;
        let (route, clock) = (Arc::clone(&self.route), Arc::clone(clock));
        Ok(Some(Trial { route, clock, succeeded: false }))
    }
}

/// A large request of a route with unknown need; dropping it ends it.
pub(super) struct Trial {
    route: Arc<Route>,
    clock: Arc<dyn Clock>,
    /// `true` if its handler succeeded.
    pub(super) succeeded: bool,
}

impl Trial {
    /// Records that its body has arrived.
    pub(super) fn arrived(&self) {
        lock(&self.route.slow_start).arrive(self.clock.now());
    }
}

impl Drop for Trial {
    fn drop(&mut self) {
        lock(&self.route.slow_start).leave(self.succeeded);
    }
}

impl fmt::Debug for Trial {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Trial").field("succeeded", &self.succeeded).finish_non_exhaustive()
    }
}

/// Returns `amount x factor / divisor`, rounded up; the divisor is not 0.
fn times(amount: ByteSize, factor: ByteSize, divisor: ByteSize) -> ByteSize {
    let product = u128::from(amount.get()) * u128::from(factor.get());
    let quotient = product.div_ceil(u128::from(divisor.get().max(1)));
    u64::try_from(quotient).map_or(ByteSize::MAX, ByteSize::new)
}

impl fmt::Debug for Lesson {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lesson")
            .field("estimate", &self.route.estimate())
            .field("compared", &self.compared)
            .finish()
    }
}

impl<K: Ord, F: Fn(&Parts) -> K> Learned<K, F> {
    /// Creates an estimator by the route that `key` returns, with an initial guess.
    pub fn new(guess: ByteSize, key: F) -> Self {
        let (device, priority) = (ByteSize::ZERO, Priority::Normal);
        Self { key, device, priority, routes: Mutex::new(Routes::new(guess)) }
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
        lock(&self.routes).of(key, None)
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
        let lesson = Some(Lesson { route, compared: None, is_minimum: false });
        Estimated { cost, priority: self.priority, lesson }
    }
}

impl<K, F> fmt::Debug for Learned<K, F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let routes = lock(&self.routes).known.len();
        f.debug_struct("Learned").field("routes", &routes).finish_non_exhaustive()
    }
}

/// The record of one route.
pub(super) struct Route {
    /// What suffices for [`PERCENTILE`] of the requests so far; 0 without any.
    learned: AtomicU64,
    guess: ByteSize,
    /// Set once the guess is given up.
    is_known: AtomicBool,
    seen: Mutex<FadingHistogram>,
    slow_start: Mutex<SlowStart>,
    /// What was learned last of requests of any size; 0 if nothing.
    family: Arc<AtomicU64>,
}

impl Route {
    fn new(guess: ByteSize) -> Self {
        Self {
            learned: AtomicU64::new(0),
            guess,
            is_known: AtomicBool::new(false),
            seen: Mutex::new(FadingHistogram::new()),
            slow_start: Mutex::default(),
            family: Arc::default(),
        }
    }

    /// Returns the need of a request.
    fn estimate(&self) -> ByteSize {
        let learned = ByteSize::new(self.learned.load(Ordering::Relaxed));
        match self.is_known.load(Ordering::Relaxed) {
            true => learned,
            false => learned.max(self.of_family().unwrap_or(self.guess)),
        }
    }

    /// Returns what was learned of requests of other sizes.
    fn of_family(&self) -> Option<ByteSize> {
        let learned = self.family.load(Ordering::Relaxed);
        (learned > 0).then_some(ByteSize::new(learned))
    }

    /// Returns `true` if the estimate is not a guess.
    fn is_known(&self) -> bool {
        self.is_known.load(Ordering::Relaxed) || self.of_family().is_some()
    }

    fn has_learned(&self) -> bool {
        lock(&self.seen).lessons > 0
    }

    fn learn(&self, held: ByteSize) {
        let mut seen = lock(&self.seen);
        seen.add(held);
        let learned = seen.high().get();
        self.learned.store(learned, Ordering::Relaxed);
        if seen.lessons >= LESSONS_MIN {
            self.is_known.store(true, Ordering::Relaxed);
            self.family.store(learned, Ordering::Relaxed);
        }
    }
}

/// A histogram in which old requests fade.
struct FadingHistogram {
    counts: Box<[u16; BUCKETS]>,
    /// The sum of the counts.
    count: u32,
    /// The largest value so far, so that the estimate of identical requests is exact.
    largest: ByteSize,
    /// The number of all requests, capped at the number that matters.
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
        if let Some(count) = self.counts.get_mut(bucket(held.get())) {
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
                return ByteSize::new(most_of(at)).min(self.largest);
            }
        }
        self.largest
    }
}

/// Returns the bucket of an amount.
fn bucket(amount: u64) -> usize {
    let power = amount.checked_ilog2().unwrap_or(0) as usize;
    if power < PARTS_POWER {
        return usize::try_from(amount).unwrap_or(0);
    }
    let part = usize::try_from(amount >> (power - PARTS_POWER)).unwrap_or(0) % PARTS;
    (power - PARTS_POWER + 1) * PARTS + part
}

/// Returns the largest amount of a bucket.
fn most_of(bucket: usize) -> u64 {
    if bucket < PARTS {
        return bucket as u64;
    }
    let (shift, part) = (bucket / PARTS - 1, (bucket % PARTS) as u64);
    // The bucket after the last one would begin at 2^64, whose bits are shifted out.
    ((PARTS as u64 + part + 1) << shift).wrapping_sub(1)
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    fn learn(route: &Route, held: impl IntoIterator<Item = u64>) {
        held.into_iter().for_each(|held| route.learn(ByteSize::new(held)));
    }

    #[test]
    fn every_amount_lies_in_one_bucket_that_is_a_sixteenth_wide() {
        let mut above = None;
        for at in 0..BUCKETS {
            let most = most_of(at);
            assert_eq!(bucket(most), at, "{most}");
            if let Some(first) = above {
                assert_eq!(bucket(first), at, "{first}");
                assert!(most - first <= first / 16, "{first} to {most}");
            }
            above = most.checked_add(1);
        }
        assert_eq!(above, None, "the last one ends where 64 bits do");
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
            let most = most_of(bucket(size));
            assert!((size..=most).contains(&route.estimate().get()), "{}", route.estimate());
        }
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
