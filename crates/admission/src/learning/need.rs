//! The need of a route: the bytes that its requests held for each estimated byte, and how much
//! that varies.
//!
//! Lengths vary within a route, but the memory for each byte varies little. So the need is a ratio,
//! recorded by route and size. Requests of a size that is not known yet start from the last ratio
//! of another size of their route. A body of undeclared length does not show its size; such
//! requests are a kind of their own, of which more are measured before the ratio is used.
//!
//! Until the first request of a kind has ended, the highest ratio of a running one is used as the
//! mean.
//!
//! A request reserves the mean and a margin. The margin is [`DEVIATIONS`] standard deviations of
//! the sum of all requests that fit together, divided by their number. So, in a route in which a
//! few requests need a hundred times more, each reserves little while many fit, and much if few
//! fit.
//!
//! Invariants: a claim from measurements is at most `most`; a mean is that of about the last
//! [`WINDOW`] requests.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};

use crate::size_class::SizeClass;
use crate::usage::KeptUsage;

use super::routes::{ROUTES_MAX, Record, Routes};
use super::slow_start::TooManyRunning;
use super::trial::{Trial, Trials};

/// The number of requests in an average. An estimate: few enough to follow a change, and enough to
/// measure a deviation.
const WINDOW: u32 = 128;
/// The number of requests after which the caller's estimate is no longer used.
pub const LESSONS_MIN: u32 = 8;
/// The same for bodies of undeclared length. If one in twenty is large, so many probably include
/// one.
const LESSONS_UNDECLARED: u32 = 64;
/// The margin of a sum, in standard deviations. A normal distribution exceeds it once in 700 times.
const DEVIATIONS: f64 = 3.0;
/// The assumed need of an estimated byte in an unknown route. An estimate.
const UNKNOWN: f64 = 2.0;
/// The minimum estimate for comparisons with the memory held: the constant part of a request's
/// memory does not grow with its length.
const COMPARED_MIN: ByteSize = ByteSize::kib(16);

/// The requests that share a need, apart from their size.
#[derive(Clone, Copy, Debug)]
pub struct Kind {
    /// The hash of the route's name, a part of which clients may choose.
    pub route: u64,
    /// `true` if the length of the body is known.
    pub is_declared: bool,
    /// `true` if requests of several routes may be of this kind.
    pub has_many_routes: bool,
}

/// The needs of the routes behind a layer.
#[derive(Default)]
pub struct Needs(Mutex<Known>);

struct Known {
    routes: Routes<u64, Need>,
    /// The last known ratio of each route, for requests of any size.
    families: BTreeMap<u64, Arc<AtomicU64>>,
}

impl Default for Known {
    fn default() -> Self {
        let rest = Need::new(Arc::default(), LESSONS_UNDECLARED, false);
        Self { routes: Routes::new(rest), families: BTreeMap::new() }
    }
}

impl Known {
    fn family(families: &mut BTreeMap<u64, Arc<AtomicU64>>, key: u64) -> Arc<AtomicU64> {
        if families.len() >= ROUTES_MAX {
            families.retain(|_, family| Arc::strong_count(family) > 1);
        }
        Arc::clone(families.entry(key).or_default())
    }
}

impl fmt::Debug for Needs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Needs").field("routes", &lock(&self.0).routes).finish()
    }
}

impl Needs {
    /// Returns the need of requests of this kind with this estimate.
    pub fn of(&self, kind: Kind, estimate: ByteSize, is_minimum: bool) -> Compared {
        let Kind { route, is_declared, has_many_routes } = kind;
        let family = if is_declared { route } else { !route };
        let key = family.wrapping_add(SizeClass::of(estimate).bound().get());
        let Known { routes, families } = &mut *lock(&self.0);
        let need = routes.of(key, || {
            let lessons = if is_declared { LESSONS_MIN } else { LESSONS_UNDECLARED };
            Need::new(Known::family(families, family), lessons, !has_many_routes)
        });
        Compared { need, estimate, compared: estimate.max(COMPARED_MIN), is_minimum }
    }
}

/// The room for the reservations of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The bytes that all requests together may reserve.
    pub all: ByteSize,
    /// The most bytes that may be held in total while other requests run, zero otherwise.
    pub shared: ByteSize,
}

impl Room {
    /// The room without a limit.
    pub const UNLIMITED: Self = Self { all: ByteSize::MAX, shared: ByteSize::ZERO };

    /// Returns the most that a request of a route with this mean need reserves because of what
    /// others held: two thirds of the room, so that two such requests do not fit together and small
    /// requests fit next to one. Otherwise, after one huge request, no request of the route would
    /// be admitted, so the need would never be measured again.
    ///
    /// If memory is almost exhausted, the room may be much less than the mean. Then a request needs
    /// its mean while others run, and one that runs alone reserves two thirds of what there is.
    pub fn limit(self, mean: ByteSize) -> ByteSize {
        let most = |room: ByteSize| ByteSize::new(room.get() / 3 * 2);
        // Not zero, since a request that reserves nothing is always admitted.
        most(self.all).max(mean.min(most(self.shared))).max(COMPARED_MIN)
    }
}

/// The record of the requests of one kind.
struct Need {
    /// The mean and the deviation, as bits of two `f32`; 0 before the first request.
    seen: AtomicU64,
    /// The highest ratio of a running request before the first has ended, as the bits of an `f64`.
    /// The bits of values that are not negative compare like the values.
    running: AtomicU64,
    /// The last known mean and deviation of the route, for requests of any size; 0 if none is
    /// known.
    family: Arc<AtomicU64>,
    /// Set once the caller's estimate is no longer used.
    is_known: AtomicBool,
    average: Mutex<Average>,
    trials: Trials,
    lessons_min: u32,
    usage: KeptUsage,
}

/// The average of the last requests.
#[derive(Clone, Copy, Default)]
struct Average {
    lessons: u32,
    mean: f64,
    variance: f64,
}

impl Average {
    fn add(&mut self, value: f64) {
        self.lessons = (self.lessons + 1).min(WINDOW);
        let weight = 1.0 / f64::from(self.lessons);
        let above = value - self.mean;
        self.mean += weight * above;
        self.variance = (1.0 - weight) * (self.variance + weight * above * above);
    }
}

/// Bytes held for each estimated byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Ratio {
    mean: f64,
    deviation: f64,
}

impl Ratio {
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough")]
    fn pack(self) -> u64 {
        let bits = |value: f64| u64::from((value as f32).to_bits());
        // Not 0, which stands for no value.
        bits(self.mean.max(f64::from(f32::MIN_POSITIVE))) << 32 | bits(self.deviation)
    }

    #[expect(clippy::cast_possible_truncation, reason = "either half")]
    fn unpack(packed: u64) -> Option<Self> {
        let value = |bits: u64| f64::from(f32::from_bits(bits as u32));
        (packed != 0).then(|| Self { mean: value(packed >> 32), deviation: value(packed) })
    }

    /// Returns the reservation of a request with this estimate: the mean, and its share of the
    /// margin for all such requests that fit together in this room.
    fn claim(self, estimate: ByteSize, room: ByteSize) -> ByteSize {
        let mean = estimate.as_f64() * self.mean;
        let fit = (room.as_f64() / mean.max(1.0)).max(1.0);
        estimate.scaled(self.mean + DEVIATIONS * self.deviation / fit.sqrt())
    }

    /// The same, at most the limit of the room for such requests.
    fn limited(self, estimate: ByteSize, room: Room) -> ByteSize {
        let claim = self.claim(estimate, room.all);
        // The limit of any mean is no lower.
        if claim <= room.limit(ByteSize::ZERO) {
            return claim;
        }
        claim.min(room.limit(estimate.scaled(self.mean)))
    }
}

impl Need {
    fn new(family: Arc<AtomicU64>, lessons_min: u32, is_of_one_route: bool) -> Self {
        Self {
            seen: AtomicU64::new(0),
            running: AtomicU64::new(0),
            family,
            is_known: AtomicBool::new(false),
            average: Mutex::default(),
            trials: Trials::new(lessons_min),
            lessons_min,
            usage: KeptUsage::new(is_of_one_route),
        }
    }

    fn learn(&self, ratio: f64) {
        let mut average = lock(&self.average);
        average.add(ratio);
        let Average { lessons, mean, variance } = *average;
        let seen = Ratio { mean, deviation: variance.max(0.0).sqrt() }.pack();
        self.seen.store(seen, Ordering::Relaxed);
        if lessons >= self.lessons_min {
            self.family.store(seen, Ordering::Relaxed);
            self.is_known.store(true, Ordering::Release);
        }
    }
}

impl Record for Need {
    fn has_learned(&self) -> bool {
        lock(&self.average).lessons > 0
    }
}

/// The need of a request with an estimate, and the recipient of its measured memory.
#[derive(Clone)]
pub struct Compared {
    need: Arc<Need>,
    /// The caller's estimate, and the value by which the held memory is divided.
    estimate: ByteSize,
    compared: ByteSize,
    /// `true` if no reservation may be below the estimate.
    is_minimum: bool,
}

impl fmt::Debug for Compared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Compared").field("estimate", &self.estimate).finish_non_exhaustive()
    }
}

impl Compared {
    /// Records the memory that a request held at its peak.
    pub fn learn(&self, held: ByteSize) {
        self.need.learn(held.as_f64() / self.compared.as_f64());
    }

    /// Records the memory that a running request holds. It can raise the claim of later requests,
    /// and not lower it.
    pub fn observe_running(&self, held: ByteSize) {
        if self.need.seen.load(Ordering::Relaxed) == 0 {
            let ratio = held.as_f64() / self.compared.as_f64();
            self.need.running.fetch_max(ratio.to_bits(), Ordering::Relaxed);
        }
    }

    /// Records a request that did not complete, which is no evidence of a small need.
    pub fn learn_at_least(&self, held: ByteSize) {
        if held > self.measured(Room::UNLIMITED) {
            self.learn(held);
        }
    }

    /// Returns the reservation for the request in this room: the measured need of its route or,
    /// until its first request has ended, at least the ratio of the running ones; up to the
    /// [limit](Room::limit).
    pub fn claim(&self, room: Room) -> ByteSize {
        let claim = self.measured(room);
        if self.need.seen.load(Ordering::Relaxed) != 0 {
            return claim;
        }
        let mean = f64::from_bits(self.need.running.load(Ordering::Relaxed));
        claim.max(Ratio { mean, deviation: 0.0 }.limited(self.compared, room))
    }

    /// Returns the reservation by the measured need, without the running requests.
    #[inline]
    fn measured(&self, room: Room) -> ByteSize {
        let of = |ratio: Ratio| ratio.limited(self.compared, room);
        let Need { seen, family, is_known, .. } = &*self.need;
        let ratio = |of: &AtomicU64| Ratio::unpack(of.load(Ordering::Relaxed));
        let mut claim = ratio(seen).map_or(ByteSize::ZERO, of);
        if !is_known.load(Ordering::Acquire) {
            // The first requests may raise the claim, but do not prove a small need.
            let unknown = if self.is_minimum { 0.0 } else { UNKNOWN };
            let unknown = || of(Ratio { mean: unknown, deviation: 0.0 }).max(self.estimate);
            claim = claim.max(ratio(family).map_or_else(unknown, of));
        }
        if self.is_minimum { claim.max(self.estimate) } else { claim }
    }

    /// Returns the place for the record of the route's memory.
    pub fn usage(&self) -> &KeptUsage {
        &self.need.usage
    }

    /// Returns the most that one request is expected to hold: the mean, and the margin of a request
    /// that runs alone.
    pub fn expected(&self) -> ByteSize {
        let seen = Ratio::unpack(self.need.seen.load(Ordering::Relaxed));
        seen.map_or(ByteSize::ZERO, |seen| seen.claim(self.compared, ByteSize::ZERO))
    }

    /// Admits the request if the need of its route is known or few requests run.
    #[inline]
    pub fn enter(
        &self,
        room: ByteSize,
        clock: &Arc<dyn Clock>,
    ) -> Result<Option<Box<Trial>>, TooManyRunning> {
        self.need.trials.enter(self.estimate, room, clock)
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const MIB: ByteSize = ByteSize::mib(1);
    const ROOM: Room = alone(ByteSize::mib(200));

    const fn alone(all: ByteSize) -> Room {
        Room { all, shared: ByteSize::ZERO }
    }

    fn of(needs: &Needs, estimate: ByteSize, is_declared: bool) -> Compared {
        needs.of(Kind { route: 1, is_declared, has_many_routes: false }, estimate, false)
    }

    /// One of each hundred requests needs a hundred times more.
    fn rare(nth: u64) -> u64 {
        if nth % 100 == 99 { 100 } else { 1 }
    }

    #[test]
    fn requests_that_are_alike_reserve_what_they_held_once_eight_have_ended() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        for nth in 0..LESSONS_MIN {
            assert_eq!(request.claim(ROOM), ByteSize::mib(2), "{nth}: little is known");
            request.learn(ByteSize::kib(512));
        }
        assert_eq!(request.claim(ROOM), ByteSize::kib(512));
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        for nth in 0..LESSONS_MIN {
            request.learn(ByteSize::mib(5));
            assert_eq!(request.claim(ROOM), ByteSize::mib(5), "{nth}: a large need");
        }
        assert_eq!(request.claim(Room::UNLIMITED), ByteSize::mib(5));
        assert_eq!(
            request.claim(alone(ByteSize::mib(6))),
            ByteSize::mib(4),
            "two thirds of the room"
        );
        let other = of(&needs, ByteSize::mib(100), true);
        assert_eq!(
            other.claim(alone(ByteSize::gib(8))),
            ByteSize::mib(500),
            "another size of the route"
        );
    }

    #[test]
    fn a_running_request_raises_the_claim_until_the_first_has_ended() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        request.observe_running(MIB);
        assert_eq!(request.claim(ROOM), ByteSize::mib(2), "no evidence of a small need");
        [8, 3].into_iter().for_each(|mib| request.observe_running(ByteSize::mib(mib)));
        assert_eq!(request.claim(ROOM), ByteSize::mib(8), "the most");
        assert_eq!(request.expected(), ByteSize::ZERO, "none has been measured");
        assert_eq!(
            of(&needs, ByteSize::mib(4), true).claim(ROOM),
            ByteSize::mib(8),
            "another size"
        );
        request.learn_at_least(ByteSize::mib(5)); // it was cancelled
        request.observe_running(ByteSize::mib(9));
        assert_eq!(request.claim(ROOM), ByteSize::mib(5));
    }

    /// The bug: requests of a known route reserved nothing if there was no room at all, and what
    /// reserves nothing is always admitted.
    #[test]
    fn without_room_a_known_need_was_admitted_for_nothing() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        (0..LESSONS_MIN).for_each(|_| request.learn(MIB));
        for room in [0, 1] {
            assert_eq!(request.claim(alone(ByteSize::new(room))), ByteSize::kib(16));
        }
    }

    /// The bug: near the ceiling, two thirds of little room were reserved for any need, so many
    /// large requests were admitted together.
    #[test]
    fn with_little_room_a_large_need_was_admitted_for_little_beside_others() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        (0..LESSONS_MIN).for_each(|_| request.learn(ByteSize::mib(20)));
        let all = ByteSize::mib(6);
        let beside = Room { all, shared: ByteSize::mib(240) };
        assert_eq!(request.claim(beside), ByteSize::mib(20));
        assert_eq!(request.claim(alone(all)), ByteSize::mib(4), "or it is never measured again");
        (0..1_000).for_each(|_| request.learn(ByteSize::gib(1)));
        assert_eq!(request.claim(beside), ByteSize::mib(160), "two thirds of the ceiling");
    }

    #[test]
    fn a_body_of_undeclared_length_is_known_after_64_requests() {
        let needs = Needs::default();
        for _ in 0..LESSONS_UNDECLARED {
            let request = of(&needs, MIB, false);
            assert_eq!(request.claim(ROOM), ByteSize::mib(2));
            request.learn(ByteSize::kib(64));
        }
        assert_eq!(of(&needs, MIB, false).claim(ROOM), ByteSize::kib(64));
        assert_eq!(of(&needs, MIB, true).claim(ROOM), ByteSize::mib(2), "a kind of its own");
    }

    #[test]
    fn as_many_as_fit_together_hold_no_more_than_they_reserve_if_few_need_much() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        (0..3_000).for_each(|nth| request.learn(ByteSize::mib(rare(nth))));
        let claim = request.claim(ROOM);
        let fit = ROOM.all.get() / claim.get();
        let sum = |from: u64| (from..from + fit).map(rare).sum::<u64>();
        let more = (0..100).filter(|&from| sum(from) > 200).count();
        assert_eq!(more, 0, "{claim}: {fit} fit");
        assert!(fit >= 20, "{claim}: {fit} fit");
        let many = request.claim(alone(ByteSize::gib(100)));
        assert!(many < claim, "{many} of {claim}: the more fit, the smaller is the margin");
    }

    #[test]
    fn a_change_is_followed_up_and_down() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        for held in [1, 40, 3] {
            (0..8 * WINDOW).for_each(|_| request.learn(ByteSize::mib(held)));
            let claim = request.claim(ROOM).as_f64() / ByteSize::mib(held).as_f64();
            assert!((0.95..1.1).contains(&claim), "{claim}");
        }
    }

    #[test]
    fn what_was_cancelled_teaches_only_that_more_is_needed() {
        let needs = Needs::default();
        let request = of(&needs, MIB, true);
        (0..100).for_each(|_| request.learn(ByteSize::mib(4)));
        (0..100).for_each(|_| request.learn_at_least(ByteSize::kib(1)));
        assert_eq!(request.claim(ROOM), ByteSize::mib(4));
        (0..100).for_each(|_| request.learn_at_least(ByteSize::mib(8)));
        assert!(request.claim(ROOM) > ByteSize::mib(5), "{}", request.claim(ROOM));
    }

    #[test]
    fn a_trusted_estimate_is_a_lower_bound_and_nothing_overflows() {
        let kind = Kind { route: 1, is_declared: true, has_many_routes: false };
        for estimate in [ByteSize::ZERO, MIB, ByteSize::MAX] {
            let needs = Needs::default();
            let trusted = needs.of(kind, estimate, true);
            assert_eq!(trusted.claim(ROOM), estimate);
            let hint = needs.of(kind, estimate, false);
            for held in [ByteSize::ZERO, ByteSize::MAX] {
                (0..LESSONS_MIN).for_each(|_| hint.learn(held));
                assert!(hint.claim(ROOM) <= ROOM.all, "{estimate}, {held}");
                assert!(trusted.claim(ROOM) >= estimate);
            }
        }
    }
}
