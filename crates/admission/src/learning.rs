//! Learns the need of requests from the memory that earlier requests of their route held.
//!
//! The caller identifies a route by a number and measures the requests. [`Needs`] turns measured
//! bytes into reservations and bounds the number of records, and [`Compared::enter`] limits the
//! requests of a route until its need is known. The tower layer of `lowtide` and the simulated
//! controller use it.
//!
//! Lengths vary within a route, but the memory for each byte varies little. So the need is a ratio,
//! recorded by route and size. Requests of a size that is not known yet start from the last ratio
//! of another size of their route. A body of undeclared length does not show its size; such
//! requests are a kind of their own, of which more are measured before the ratio is used.
//!
//! Until the first request of a kind has ended, the highest ratio of a running one is used as the
//! mean. Until [`LESSONS_MIN`] have ended (`LESSONS_UNDECLARED` of undeclared length), and if no
//! other size of the route is known, a request reserves at least `UNKNOWN` times its estimate
//! (its estimate if that is a minimum), up to [`Room::limit`]. An estimate above [`Room::first`] is
//! reserved in whole: such a request is rejected as too large.
//!
//! A request reserves the mean and a margin. The margin is `DEVIATIONS` standard deviations of
//! the sum of all requests that fit together, divided by their number. So, in a route in which a
//! few requests need a hundred times more, each reserves little while many fit, and much if few
//! fit.
//!
//! Slow start limits the concurrent requests of a route while their need is unknown. At first as
//! many run as fit if each needs `EXPANSION` times its estimate, but at least one. Each success
//! raises the limit by as many again, so the limit at least doubles in each generation.
//!
//! Time raises the limit too, so that a route with long requests does not wait for their end: it
//! doubles with each `STEP` in which requests ran without a break. Time counts from when a body has
//! arrived, since a request holds less than it will while its body arrives. It starts again when a
//! request grows beyond its claim. It does not count while a request is polled, since the memory of
//! a poll is measured when the poll ends. If no body arrives, a step takes `ARRIVING` times as
//! long; so a client that sends nothing cannot block a route forever. A request that is suspended
//! because its client is slow leaves, and enters again when its body has arrived.
//!
//! A request of a recorded kind takes no lock that all requests share: it reads the bucket of its
//! key. Any other takes the lock of all records, and does bounded work: for one to replace, it looks
//! at `LOOKS` of those with and of those without a measurement.
//!
//! Invariants: a claim from measurements is at most [`Room::limit`]; a mean is that of about the
//! last `WINDOW` requests; at most `ROUTES_MAX` records, and one for all other routes; each record
//! is in the bucket of its key and in the list of all, and leaves both while no request uses it; a
//! ratio of a route lasts as long as a record of the route; while slow start is active,
//! `running <= limit` after each entry; it ends after a given number of successes, and does not
//! limit requests from `STEPS` steps on until none runs.

use std::collections::{BTreeMap, VecDeque};
use std::sync::{Arc, OnceLock, PoisonError};
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};

use crate::shared::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use crate::shared::{Mutex, RwLock, lock};
use crate::tally::{class_bound, class_of};
use crate::usage::Usage;

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
pub struct Needs {
    /// The records by the hashes of their keys, so that requests of different routes share no lock.
    buckets: Box<[Bucket]>,
    /// The number of requests so far, without up to [`BATCH`] of each record.
    requests: AtomicU64,
    /// The record of all further routes.
    rest: Arc<RouteNeed>,
    known: Mutex<Known>,
}

/// Records with their keys. Changed with [`Needs::known`] locked.
type Bucket = RwLock<Vec<(u64, Arc<RouteNeed>)>>;

#[derive(Default)]
struct Known {
    /// All records, in the order in which they are looked at: those that had no measurement when
    /// they were last, and those that had.
    records: [VecDeque<Arc<RouteNeed>>; 2],
    /// The last known ratio of each route, for requests of any size.
    families: BTreeMap<u64, Arc<AtomicU64>>,
}

impl Known {
    fn len(&self) -> usize {
        self.records.iter().map(VecDeque::len).sum()
    }
}

impl Default for Needs {
    fn default() -> Self {
        let rest = Arc::new(RouteNeed::new(Arc::default(), LESSONS_UNDECLARED));
        let buckets = (0..ROUTES_MAX).map(|_| Bucket::default()).collect();
        Self { buckets, requests: AtomicU64::new(0), rest, known: Mutex::default() }
    }
}

debug_as!(Needs, |needs| known: lock(&needs.known).len());

impl Needs {
    /// Returns the need of requests of this kind with this estimate.
    pub fn of(&self, kind: Kind, estimate: ByteSize, is_minimum: bool) -> Compared {
        let family = if kind.is_declared { kind.route } else { !kind.route };
        let key = family.wrapping_add(class_bound(class_of(estimate)).get());
        let need = self.find(key).unwrap_or_else(|| self.add(key, family, kind));
        Compared { need, estimate, compared: estimate.max(COMPARED_MIN), is_minimum }
    }

    fn bucket(&self, key: u64) -> &Bucket {
        // By the upper bits of a product: the keys of a route differ in one bit each.
        let hash = u128::from(key.wrapping_mul(0x9E37_79B9_7F4A_7C15));
        &self.buckets[usize::try_from((hash * ROUTES_MAX as u128) >> 64).unwrap_or_default()]
    }

    /// Returns the record of a key, which is used now.
    #[inline]
    fn find(&self, key: u64) -> Option<Arc<RouteNeed>> {
        let bucket = self.bucket(key).read().unwrap_or_else(PoisonError::into_inner);
        let (_, need) = bucket.iter().find(|(of, _)| *of == key)?;
        let count = need.used.load(Ordering::Relaxed).wrapping_add(1) % BATCH;
        if count == 0 {
            self.requests.fetch_add(BATCH, Ordering::Relaxed);
        }
        let now = self.requests.load(Ordering::Relaxed);
        // If two requests come at once, one of them may not be counted.
        need.used.store(now * BATCH + count, Ordering::Relaxed);
        Some(Arc::clone(need))
    }

    /// Adds a record if there is room for it.
    #[cold]
    fn add(&self, key: u64, route: u64, kind: Kind) -> Arc<RouteNeed> {
        let known = &mut *lock(&self.known);
        if let Some(added) = self.find(key) {
            return added;
        }
        let now = self.requests.fetch_add(1, Ordering::Relaxed) + 1;
        let is_full = known.len() >= ROUTES_MAX;
        if !self.makes_room(known, now, is_full) && is_full {
            return Arc::clone(&self.rest);
        }
        let lessons = if kind.is_declared { LESSONS_MIN } else { LESSONS_UNDECLARED };
        let family = Arc::clone(known.families.entry(route).or_default());
        let (used, is_of_one_route) = (AtomicU64::new(now * BATCH), !kind.has_many_routes);
        let new = RouteNeed::new(family, lessons);
        let need = Arc::new(RouteNeed { used, key, route, is_of_one_route, ..new });
        known.records[0].push_back(Arc::clone(&need));
        let bucket = self.bucket(key).write();
        bucket.unwrap_or_else(PoisonError::into_inner).push((key, Arc::clone(&need)));
        need
    }

    /// Looks at the next records and, if all places are taken, removes one that no running request
    /// uses. Clients choose paths: a record is removed if it has no measurement or is not used any
    /// more. Returns `true` if one was removed.
    fn makes_room(&self, known: &mut Known, now: u64, is_full: bool) -> bool {
        for nth in 0..2 * LOOKS {
            let Some(need) = known.records[nth / LOOKS].pop_front() else { continue };
            let has_learned = need.seen.load(Ordering::Relaxed) != 0;
            let age = now.saturating_sub(need.used.load(Ordering::Relaxed) / BATCH);
            if is_full && (!has_learned || age >= UNUSED) {
                // No other request can find it meanwhile.
                let bucket = self.bucket(need.key).write();
                let mut bucket = bucket.unwrap_or_else(PoisonError::into_inner);
                // This reference and that of the bucket.
                if Arc::strong_count(&need) == 2 {
                    bucket.retain(|(key, _)| *key != need.key);
                    if Arc::strong_count(&need.family) == 2 {
                        known.families.remove(&need.route);
                    }
                    return true;
                }
            }
            known.records[usize::from(has_learned)].push_back(need);
        }
        false
    }
}

/// The room for the reservations of requests.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// The bytes that all requests together may reserve.
    pub all: ByteSize,
    /// The most bytes that may become free: while other requests run, all that may be held in total,
    /// otherwise `all` and what idle resources have.
    pub most: ByteSize,
    /// The highest estimate of a request that may be the first of its route: it runs alone.
    pub first: ByteSize,
}

/// The part of the ceiling up to which an estimate may be wrong. By default an estimate is twice the
/// length of the body, so bodies of up to two thirds of the ceiling may be the first of a route.
pub(crate) const FIRST_PART: f64 = 4.0 / 3.0;

impl Room {
    /// The room without a limit.
    pub const UNLIMITED: Self =
        Self { all: ByteSize::MAX, most: ByteSize::MAX, first: ByteSize::MAX };

    /// Returns the most that a request of a route with this mean need reserves because of what
    /// others held: two thirds of the room, so that two such requests do not fit together and small
    /// requests fit next to one. Otherwise, after one huge request, no request of the route would
    /// be admitted, so the need would never be measured again.
    ///
    /// If memory is almost exhausted, or resources fill it, the room may be much less than the mean.
    /// Then a request needs its mean while others run, or if an idle resource can be evicted, and
    /// one that runs alone reserves two thirds of what there is.
    pub fn limit(self, mean: ByteSize) -> ByteSize {
        let (all, most) = (self.all.get() / 3 * 2, self.most.get() / 3 * 2);
        // Not zero, since a request that reserves nothing is always admitted.
        ByteSize::new(all.max(mean.get().min(most))).max(COMPARED_MIN)
    }
}

/// The record of the requests of one kind. What each request writes comes first: with the count of
/// references it fills a cache line of a block of 128 bytes.
#[derive(Debug, Default)]
#[repr(C)]
struct RouteNeed {
    /// The mean and the deviation, as bits of two `f32`; 0 before the first request.
    seen: AtomicU64,
    /// The number of requests of all routes at the last one of this, times [`BATCH`], and how many
    /// of this are not among them.
    used: AtomicU64,
    average: Mutex<Average>,
    key: u64,
    /// The key of `family`.
    route: u64,
    /// The highest ratio of a running request before the first has ended, as the bits of an `f64`.
    /// The bits of values that are not negative compare like the values.
    running: AtomicU64,
    /// The last known mean and deviation of the route, for requests of any size; 0 if none is
    /// known.
    family: Arc<AtomicU64>,
    slow_start: Arc<Mutex<SlowStart>>,
    /// The record of the route's memory, or that of the first of several routes. It is kept here so
    /// that most requests need no look-up.
    usage: OnceLock<Arc<Usage>>,
    lessons_min: u32,
    /// Set once the caller's estimate is no longer used.
    is_known: AtomicBool,
    /// What is known of its requests: [`STREAMS`], [`GROWS_LATE`] and [`READS`].
    habits: AtomicU8,
    is_of_one_route: bool,
}

#[cfg(all(target_os = "linux", not(lowtide_loom)))]
const _: () = assert!(size_of::<RouteNeed>() <= 112, "with two counts it fills 128 bytes");

/// An answer without a known end has lasted.
pub const STREAMS: u8 = 1;
/// One has grown after it had lasted, as that of a query whose result is computed while it is sent.
pub const GROWS_LATE: u8 = 2;
/// A handler has read a body.
pub const READS: u8 = 4;

/// The average of the last requests.
#[derive(Clone, Copy, Debug, Default)]
struct Average {
    lessons: u32,
    mean: f64,
    variance: f64,
}

/// Bytes held for each estimated byte.
#[derive(Clone, Copy, Debug, PartialEq)]
struct NeedRatio {
    mean: f64,
    deviation: f64,
}

impl NeedRatio {
    #[expect(clippy::cast_possible_truncation, reason = "seven digits are enough")]
    fn pack(self) -> u64 {
        // Not 0, which stands for no value.
        let mean = (self.mean as f32).max(f32::MIN_POSITIVE);
        u64::from(mean.to_bits()) << 32 | u64::from((self.deviation as f32).to_bits())
    }

    #[expect(clippy::cast_possible_truncation, reason = "either half")]
    fn unpack(packed: u64) -> Option<Self> {
        if packed == 0 {
            return None;
        }
        let (mean, deviation) = ((packed >> 32) as u32, packed as u32);
        let (mean, deviation) = (f32::from_bits(mean).into(), f32::from_bits(deviation).into());
        Some(Self { mean, deviation })
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

impl RouteNeed {
    fn new(family: Arc<AtomicU64>, lessons_min: u32) -> Self {
        let slow_start = Arc::new(Mutex::new(SlowStart::new(lessons_min)));
        Self { family, slow_start, lessons_min, ..Self::default() }
    }
}

/// The need of a request with an estimate, and the recipient of its measured memory.
#[derive(Clone, Debug)]
pub struct Compared {
    need: Arc<RouteNeed>,
    /// The caller's estimate, and the value by which the held memory is divided.
    estimate: ByteSize,
    compared: ByteSize,
    /// `true` if no reservation may be below the estimate.
    is_minimum: bool,
}

impl Compared {
    /// Records the memory that a request held at its peak.
    pub fn learn(&self, held: ByteSize) {
        let RouteNeed { seen, family, is_known, .. } = &*self.need;
        let mut average = lock(&self.need.average);
        let lessons = (average.lessons + 1).min(WINDOW);
        let weight = 1.0 / f64::from(lessons);
        let above = held.as_f64() / self.compared.as_f64() - average.mean;
        let mean = average.mean + weight * above;
        let variance = (1.0 - weight) * (average.variance + weight * above * above);
        *average = Average { lessons, mean, variance };
        let ratio = NeedRatio { mean, deviation: variance.max(0.0).sqrt() }.pack();
        seen.store(ratio, Ordering::Relaxed);
        if lessons < self.need.lessons_min {
            return;
        }
        // Read first, since all sizes of the route share it.
        if family.load(Ordering::Relaxed) != ratio {
            family.store(ratio, Ordering::Relaxed);
        }
        if !is_known.load(Ordering::Relaxed) {
            is_known.store(true, Ordering::Release);
        }
    }

    /// Records the memory that a running request holds. It can raise the claim of later requests,
    /// and not lower it.
    pub fn observe_running(&self, held: ByteSize) {
        if self.need.seen.load(Ordering::Relaxed) == 0 {
            let ratio = held.as_f64() / self.compared.as_f64();
            self.need.running.fetch_max(ratio.to_bits(), Ordering::Relaxed);
        }
    }

    /// Returns `true` if this habit of the route's requests is known: [`STREAMS`], [`GROWS_LATE`] or
    /// [`READS`].
    pub fn has(&self, habit: u8) -> bool {
        self.need.habits.load(Ordering::Relaxed) & habit != 0
    }

    /// Records a habit.
    pub fn note(&self, habit: u8) {
        self.need.habits.fetch_or(habit, Ordering::Relaxed);
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
        claim.max(NeedRatio { mean, deviation: 0.0 }.limited(self.compared, room))
    }

    /// Returns the reservation by the measured need, without the running requests.
    #[inline]
    fn measured(&self, room: Room) -> ByteSize {
        // Read first: what is known has been seen.
        let is_known = self.need.is_known.load(Ordering::Acquire);
        let seen = NeedRatio::unpack(self.need.seen.load(Ordering::Relaxed));
        let claim = seen.map_or(ByteSize::ZERO, |seen| seen.limited(self.compared, room));
        // The first requests may raise the claim, but do not prove a small need.
        let claim = if is_known { claim } else { claim.max(self.unknown(room)) };
        if self.is_minimum { claim.max(self.estimate) } else { claim }
    }

    /// Returns the least reservation while the need is not known.
    #[cold]
    fn unknown(&self, room: Room) -> ByteSize {
        let family = NeedRatio::unpack(self.need.family.load(Ordering::Relaxed));
        let mean = if self.is_minimum { 0.0 } else { UNKNOWN };
        let ratio = family.unwrap_or(NeedRatio { mean, deviation: 0.0 });
        let claim = ratio.limited(self.compared, room);
        let may_be_first = self.estimate <= room.first || family.is_some();
        if may_be_first { claim } else { claim.max(self.estimate) }
    }

    /// Returns the record of the memory of the route of this method and name, if it is kept here.
    #[inline]
    pub fn usage<'a>(&self, name: impl FnOnce() -> (&'a str, &'a [u8])) -> Option<&Arc<Usage>> {
        let usage = self.need.usage.get()?;
        let is_kept = self.need.is_of_one_route || {
            let (method, name) = name();
            usage.is(method, name)
        };
        is_kept.then_some(usage)
    }

    /// Keeps the record here if none is kept and it is of this route, or if all requests of this
    /// need are of one route, which `never` gets a record of its own.
    pub fn keep_usage(&self, usage: &Arc<Usage>, method: &str, name: &[u8], never: bool) {
        if never && self.need.is_of_one_route || usage.is(method, name) {
            let _ = self.need.usage.set(Arc::clone(usage));
        }
    }

    /// Returns the most that one request is expected to hold: the mean, and the margin of a request
    /// that runs alone.
    pub fn expected(&self) -> ByteSize {
        let seen = NeedRatio::unpack(self.need.seen.load(Ordering::Relaxed));
        seen.map_or(ByteSize::ZERO, |seen| seen.claim(self.compared, ByteSize::ZERO))
    }

    /// Admits the request if the need of its route is known or few requests run. In observe mode
    /// every request is admitted. Reads the time only if needed.
    ///
    /// # Errors
    /// The number of requests of the route that run, otherwise.
    #[inline]
    pub fn enter(
        &self,
        room: ByteSize,
        clock: &Arc<dyn Clock>,
        observes: bool,
    ) -> Result<Option<Arc<SlowStartPermit>>, u32> {
        let first = SlowStart::first(self.estimate, room);
        first.map_or(Ok(None), |first| self.enter_limited(first, clock, observes))
    }

    fn enter_limited(
        &self,
        first: u32,
        clock: &Arc<dyn Clock>,
        observes: bool,
    ) -> Result<Option<Arc<SlowStartPermit>>, u32> {
        let mut slow_start = lock(&self.need.slow_start);
        if slow_start.is_over() {
            return Ok(None);
        }
        let entered = clock.now();
        let is_over_limit = match slow_start.enter(first, entered) {
            Err(running) if !observes => return Err(running),
            entered => entered.is_err(),
        };
        let (slow_start, clock) = (Arc::clone(&self.need.slow_start), Arc::clone(clock));
        let state = AtomicU8::new(0);
        let permit = SlowStartPermit { slow_start, clock, entered, is_over_limit, state };
        Ok(Some(Arc::new(permit)))
    }
}

/// The maximum number of routes that are recorded separately; later ones share one estimate.
pub const ROUTES_MAX: usize = if cfg!(lowtide_loom) { 1 } else { 256 };

/// A route can be replaced if none of about this many last requests used it. An estimate: 64 for
/// each route.
const UNUSED: u64 = 64 * ROUTES_MAX as u64;
/// The number of requests of a record that are added at once to those of all, which all threads
/// share.
const BATCH: u64 = 16;
/// The number of records of either kind that a request without one looks at. An estimate: 128 such
/// requests look at all.
const LOOKS: usize = 2;

/// The multiple of its estimate that a request of an unknown route may need, in addition to the
/// ledger's correction factor: JSON of small values needs up to 89 times its length, and the
/// default estimate is twice the length.
const EXPANSION: u64 = 64;
/// If at least this many requests may run at first, they are not limited.
const MANY: u32 = 64;
/// The time in which the limit doubles.
const STEP: Duration = Duration::from_millis(125);
/// The number of steps after which the limit is lifted.
const STEPS: u32 = 8;
/// The time after which the limit is lifted, counted from when a body has arrived.
pub(crate) const LASTS: Duration = Duration::from_secs(1);
/// How many times longer a step takes while no body has arrived: 64 s until the limit is lifted.
const ARRIVING: u32 = 64;

const _: () = assert!(STEP.as_millis() * STEPS as u128 == LASTS.as_millis(), "both say when");

/// The requests of one route.
#[derive(Debug, Default)]
struct SlowStart {
    running: u32,
    /// The number of polls, and of other pieces of work, that run now.
    working: u32,
    succeeded: u32,
    /// The number of successes after which the need is known.
    successes: u32,
    /// The time since which requests have run without a break.
    since: Option<Moment>,
    /// The time from which steps count: a body arrived, or after that a request grew.
    arrived: Option<Moment>,
    /// The time at which the last request left, if it had run for [`LASTS`] and failed.
    failed: Option<Moment>,
}

impl SlowStart {
    /// Creates one that ends after so many successes.
    fn new(successes: u32) -> Self {
        Self { successes, ..Self::default() }
    }

    /// Returns the number of requests with this estimate that may run at first in this room; `None`
    /// if that is [`MANY`] or more.
    #[inline]
    fn first(estimate: ByteSize, room: ByteSize) -> Option<u32> {
        let (each, room) = (estimate.get().saturating_mul(EXPANSION), room.get());
        // Most requests need no division by what is not constant.
        (each > room / u64::from(MANY)).then(|| u32::try_from(room / each).unwrap_or(MANY).max(1))
    }

    /// Returns `true` if the need is known.
    const fn is_over(&self) -> bool {
        self.succeeded >= self.successes
    }

    /// Returns the time since which requests have run without a break, if one begins now beside so
    /// many others.
    fn since(&self, others: u32, now: Moment) -> Moment {
        // A client that reconnects at once after each failure makes no break.
        let is_break = others == 0 && self.failed.is_some_and(|failed| now - failed >= STEP);
        self.since.filter(|_| !is_break).unwrap_or(now)
    }

    /// Lets one more request run if the limit allows it, or returns how many run. `first` is the
    /// limit at the start. [`SlowStart::begin`] begins the request, and [`SlowStart::leave`] or
    /// [`SlowStart::cancel`] ends it.
    fn enter(&mut self, first: u32, now: Moment) -> Result<(), u32> {
        let since = self.since(self.running, now);
        let steps = self.arrived.map_or(0, |at| steps(now, at, STEP));
        let steps = steps.max(self::steps(now, since, STEP * ARRIVING));
        let steps = if self.working > 0 { 0 } else { steps };
        let limit = first.saturating_mul((1 + self.succeeded).max(1 << steps));
        if !self.is_over() && steps < STEPS && self.running >= limit {
            return Err(self.running);
        }
        self.running += 1;
        Ok(())
    }

    /// Ends work of a request. `grew` is `true` if the request grew beyond its claim by it.
    fn end_work(&mut self, grew: bool, now: Moment) {
        self.working = self.working.saturating_sub(1);
        if grew && let Some(arrived) = &mut self.arrived {
            *arrived = now;
        }
    }

    /// Ends a request that entered at that time.
    fn leave(&mut self, succeeded: bool, entered: Moment, now: Moment) {
        self.running = self.running.saturating_sub(1);
        self.succeeded = self.succeeded.saturating_add(u32::from(succeeded));
        if self.running == 0 {
            self.end((!succeeded && now - entered >= LASTS).then_some(now));
        }
    }

    /// Begins a request that entered then.
    fn begin(&mut self, entered: Moment) {
        self.since = Some(self.since(self.running.saturating_sub(1), entered));
        self.failed = None;
    }

    /// Ends a request that did not begin: it is no break, and no failure.
    fn cancel(&mut self) {
        self.running = self.running.saturating_sub(1);
        if self.running == 0 {
            self.end(self.failed);
        }
    }

    /// Records that none runs any more, and since when if the last one failed.
    fn end(&mut self, failed: Option<Moment>) {
        (self.arrived, self.failed) = (None, failed);
        self.since = self.since.filter(|_| failed.is_some());
    }
}

/// Returns the number of steps from `since` to `now`, at most [`STEPS`].
fn steps(now: Moment, since: Moment, step: Duration) -> u32 {
    let steps = (now - since).as_millis() / step.as_millis();
    u32::try_from(steps).unwrap_or(STEPS).min(STEPS)
}

/// A large request of a route with unknown need; dropping it ends it.
#[derive(Debug)]
pub struct SlowStartPermit {
    slow_start: Arc<Mutex<SlowStart>>,
    clock: Arc<dyn Clock>,
    entered: Moment,
    /// `true` if only observe mode admitted it.
    pub(crate) is_over_limit: bool,
    /// [`BEGUN`] and [`SUCCEEDED`].
    state: AtomicU8,
}

/// The request runs, or has run.
const BEGUN: u8 = 1;
/// Its handler succeeded.
const SUCCEEDED: u8 = 2;

impl SlowStartPermit {
    /// Records that its request runs. Dropped before that, it leaves no trace.
    pub fn begin(&self) {
        self.state.fetch_or(BEGUN, Ordering::Relaxed);
        lock(&self.slow_start).begin(self.entered);
    }

    /// Records that its body has arrived.
    pub fn arrived(&self) {
        lock(&self.slow_start).arrived.get_or_insert_with(|| self.clock.now());
    }

    /// Records that it begins a piece of work.
    pub fn begins_work(&self) {
        lock(&self.slow_start).working += 1;
    }

    /// Records that it ends a piece of work, and if it grew beyond its claim by it.
    pub fn ends_work(&self, grew: bool) {
        lock(&self.slow_start).end_work(grew, self.clock.now());
    }

    /// Records that its handler succeeded, or that it failed.
    pub fn answered(&self, success: bool) {
        self.state.store(BEGUN | (SUCCEEDED * u8::from(success)), Ordering::Relaxed);
    }
}

impl Drop for SlowStartPermit {
    fn drop(&mut self) {
        let mut slow_start = lock(&self.slow_start);
        let state = self.state.load(Ordering::Relaxed);
        if state & BEGUN != 0 {
            slow_start.leave(state & SUCCEEDED != 0, self.entered, self.clock.now());
        } else {
            slow_start.cancel();
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use crate::shared::written;
    use crate::{Admission, Cost};

    const MIB: ByteSize = ByteSize::mib(1);
    const ROOM: Room = alone(ByteSize::mib(200));

    const fn alone(all: ByteSize) -> Room {
        Room { all, most: all, first: all }
    }

    fn of(needs: &Needs, estimate: ByteSize, is_declared: bool) -> Compared {
        needs.of(Kind { route: 1, is_declared, has_many_routes: false }, estimate, false)
    }

    /// In the order in which the layer does it. Blocks of these sizes begin a cache line in jemalloc.
    #[test]
    fn a_request_of_a_known_route_writes_four_cache_lines_that_threads_share_and_a_permit_one() {
        let (admission, needs) = (Admission::with_limit(ByteSize::gib(1)), Needs::default());
        let usage = admission.state().routes.of_route("GET", "/", true, true);
        let admit = |bytes| admission.try_admit(Cost::host(bytes)).expect("there is room");
        let name = || ("GET", b"/".as_slice());
        let request = || {
            let need = of(&needs, MIB, true);
            let mut permit = admit(need.claim(ROOM));
            permit.report(ByteSize::ZERO);
            need.usage(name).expect("it is kept").add(MIB, MIB, permit.observed());
            need.learn(MIB);
        };
        let need = of(&needs, MIB, true);
        need.keep_usage(&usage, "GET", b"/", true);
        (0..LESSONS_MIN).for_each(|_| need.learn(MIB));
        request();
        let counts = 2 * size_of::<usize>();
        let blocks = [
            (Arc::as_ptr(&need.need).addr() - counts, size_of::<RouteNeed>() + counts),
            (Arc::as_ptr(&usage).addr() - counts, size_of::<Usage>() + counts),
        ];
        let line = |at: usize| {
            let block = blocks.iter().find(|(from, size)| (*from..from + size).contains(&at));
            block.map_or((0, at / 64), |(from, _)| (*from, (at - from) / 64))
        };
        let lines = |work: &dyn Fn()| {
            written(work).into_iter().map(line).collect::<std::collections::BTreeSet<_>>().len()
        };
        assert_eq!(lines(&|| drop(admit(MIB))), 1);
        // One of as many adds them to the requests of all.
        let all: usize = (0..BATCH).map(|_| lines(&request)).sum();
        assert_eq!(all as u64, 4 * BATCH + 1);
    }

    /// One of each hundred requests needs a hundred times more.
    fn rare(nth: u64) -> u64 {
        if nth % 100 == 99 { 100 } else { 1 }
    }

    /// Records beyond the bound were looked for among all others, under a lock that all requests took.
    #[test]
    fn a_route_learns_among_others_and_invented_ones_what_it_learns_alone() {
        let mut draw = crate::chance::draws(7);
        let (together, alone) = (Needs::default(), [(); 40].map(|()| Needs::default()));
        for nth in 0..100_000 {
            let (route, size, is_declared) = (draw(40), draw(3), draw(2) == 0);
            let kind = Kind { route: route << 50, is_declared, has_many_routes: false };
            let estimate = ByteSize::mib(1 << size);
            let own = alone.get(usize::try_from(route).expect("small")).expect("one of 40");
            let held = ByteSize::kib(draw(1 << (10 + route % 5)));
            let claims = [&together, own].map(|needs| {
                let need = needs.of(kind, estimate, false);
                let claim = need.claim(ROOM);
                need.learn(held);
                claim
            });
            assert_eq!(claims[0], claims[1], "{nth}: route {route}, {estimate}");
            let invented = Kind { route: draw(u64::MAX), ..kind };
            let need = together.of(invented, estimate, false);
            // Each of the 240 has come by then.
            if nth > 5_000 && draw(2) == 0 {
                need.learn(held);
            }
        }
        let known = lock(&together.known);
        assert_eq!(known.len(), ROUTES_MAX);
        assert!(known.families.len() <= ROUTES_MAX, "{}", known.families.len());
    }

    #[test]
    fn records_leave_their_bucket_and_their_route_with_its_last_one() {
        let needs = Needs::default();
        let sizes = [1, 2].map(|mib| of(&needs, ByteSize::mib(mib), true));
        let invent = |from: u64| {
            for route in from..from + 1_000 {
                let kind = Kind { route: route << 40, is_declared: true, has_many_routes: false };
                needs.of(kind, MIB, false).learn(MIB);
            }
        };
        invent(10);
        sizes.iter().for_each(|need| (0..LESSONS_MIN).for_each(|_| need.learn(MIB)));
        let again = || [1, 2].map(|mib| of(&needs, ByteSize::mib(mib), true));
        assert!(again().iter().zip(&sizes).all(|(one, two)| Arc::ptr_eq(&one.need, &two.need)));
        drop(sizes);
        (0..20).for_each(|nth| invent(10_000 + 1_000 * nth));
        let in_buckets = needs.buckets.iter().map(|bucket| bucket.read().expect("no panic").len());
        assert_eq!(in_buckets.sum::<usize>(), ROUTES_MAX);
        {
            let known = lock(&needs.known);
            assert_eq!((known.len(), known.families.len()), (ROUTES_MAX, ROUTES_MAX));
            assert!(!known.families.contains_key(&1), "none of its records was used");
        }
    }

    /// The bug: each request of a route beyond those with a record of their memory looked for one,
    /// under a lock.
    #[test]
    fn a_route_that_never_gets_a_record_of_its_memory_keeps_that_of_all_others() {
        let needs = Needs::default();
        let named = || ("GET", b"/b".as_slice());
        for (has_many_routes, never, is_kept) in
            [(false, false, false), (false, true, true), (true, true, false)]
        {
            let kind = Kind { route: 1, is_declared: true, has_many_routes };
            let need = if has_many_routes {
                needs.of(Kind { route: 9, ..kind }, MIB, false)
            } else {
                needs.of(kind, MIB, false)
            };
            let other = Arc::new(Usage::default());
            need.keep_usage(&other, "GET", b"/b", never);
            assert_eq!(need.usage(named).is_some(), is_kept, "{never}, {has_many_routes}");
        }
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

    /// axum#2818: an upload of 60 MiB to a service of 128 MiB could not be the first of its route.
    #[test]
    fn a_first_request_runs_alone_if_its_estimate_is_little_above_the_ceiling() {
        let room = Room { first: ByteSize::mib(136), ..alone(ByteSize::mib(48)) };
        let claim = |mib| of(&Needs::default(), ByteSize::mib(mib), true).claim(room);
        assert_eq!(claim(40), ByteSize::mib(32), "two thirds of the room");
        assert_eq!(claim(120), ByteSize::mib(32));
        assert_eq!(claim(140), ByteSize::mib(140), "too large");
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
        let beside = Room { most: ByteSize::mib(240), ..alone(all) };
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

#[cfg(all(test, not(lowtide_loom)))]
mod slow_start_tests {
    use lowtide_core::clock::ManualClock;

    use super::*;

    /// Enters and begins.
    fn begin(route: &mut SlowStart, first: u32, now: Moment) -> Result<(), u32> {
        route.enter(first, now)?;
        route.begin(now);
        Ok(())
    }

    /// Enters until rejected, at most 1000 times. Returns the number of requests that entered.
    fn fill(route: &mut SlowStart, now: Moment) -> u32 {
        let entered = (0..1000).take_while(|_| begin(route, 1, now).is_ok()).count();
        u32::try_from(entered).expect("at most 1000")
    }

    #[test]
    fn twice_as_many_run_in_each_generation_until_the_need_is_known() {
        let mut route = SlowStart::new(8);
        let now = Moment::ORIGIN;
        for generation in [1, 2, 4] {
            assert_eq!(fill(&mut route, now), generation);
            assert_eq!(begin(&mut route, 1, now), Err(generation));
            assert_eq!(begin(&mut route, 2, now), Ok(()), "one that needs half as much");
            leave(&mut route, false);
            (0..generation).for_each(|_| leave(&mut route, true));
        }
        assert!(!route.is_over());
        assert_eq!(fill(&mut route, now), 8);
        leave(&mut route, true);
        assert!(route.is_over());
        assert_eq!(fill(&mut route, now), 1000);
    }

    /// Ends one that has just begun.
    fn leave(route: &mut SlowStart, succeeded: bool) {
        route.leave(succeeded, Moment::ORIGIN, Moment::ORIGIN);
    }

    /// The bug: a client that declared a body, sent none, left after some seconds and reconnected
    /// at once blocked all others forever.
    #[test]
    fn one_client_that_sends_nothing_again_and_again_holds_up_a_route_for_a_minute() {
        let mut route = SlowStart::new(8);
        let mut now = Moment::ORIGIN;
        let mut waited = 0;
        while begin(&mut route, 1, now) == Ok(()) && begin(&mut route, 1, now).is_err() {
            let entered = now;
            now = now + 7 * LASTS;
            waited += 7;
            route.leave(false, entered, now);
            now = now + STEP / 2;
            assert!(waited < 100, "{waited} s");
        }
        assert_eq!(waited, 14, "two may run after eight seconds");
        let mut route = SlowStart::new(8);
        for second in 0..20 {
            let now = Moment::ORIGIN + second * LASTS;
            assert_eq!(begin(&mut route, 1, now), Ok(()));
            assert_eq!(begin(&mut route, 1, now), Err(1), "a break, or a quick failure");
            route.leave(false, now, now + LASTS / 2);
        }
    }

    /// The bug: an upload over HTTP/2 entered and left at once, and earlier failures were forgotten.
    #[test]
    fn a_request_that_leaves_before_it_ran_is_no_break() {
        let (needs, manual) = (Needs::default(), Arc::new(ManualClock::new()));
        let kind = Kind { route: 1, is_declared: true, has_many_routes: false };
        let (need, clock) = (needs.of(kind, ByteSize::mib(1), false), manual.clone() as _);
        let enter = || need.enter(ByteSize::mib(64), &clock, false);
        let mut waited = 0;
        loop {
            let one = enter().expect("none runs").expect("its need is not known");
            one.begin();
            if enter().is_ok() {
                break;
            }
            manual.advance(7 * LASTS);
            waited += 7;
            drop(one);
            drop(enter());
            manual.advance(STEP / 2);
            assert!(waited < 100, "{waited} s");
        }
        assert_eq!(waited, 14, "two may run after eight seconds");
    }

    /// The bug: the last one that had not begun brought back the time of requests long gone.
    #[test]
    fn requests_that_leave_before_they_ran_lift_no_limit_beside_others() {
        let mut route = SlowStart::new(8);
        let now = Moment::ORIGIN;
        assert_eq!((begin(&mut route, 2, now), route.enter(2, now)), (Ok(()), Ok(())));
        route.arrived = Some(now);
        leave(&mut route, false);
        route.cancel();
        assert_eq!(fill(&mut route, now + 70 * LASTS), 1);
    }

    #[test]
    fn as_many_run_at_first_as_fit_if_each_needs_64_times_its_estimate() {
        let first =
            |mib: u64, room: u64| SlowStart::first(ByteSize::mib(mib), ByteSize::mib(64 * room));
        assert_eq!([first(10, 9), first(10, 19), first(10, 20)], [Some(1), Some(1), Some(2)]);
        assert_eq!([first(10, 0), first(1, 63), first(1, 64)], [Some(1), Some(63), None]);
        let first = SlowStart::first(ByteSize::ZERO, ByteSize::ZERO);
        assert_eq!(first, None, "no bytes always fit");
        assert_eq!(SlowStart::first(ByteSize::MAX, ByteSize::MAX), Some(1));
    }

    #[test]
    fn requests_that_last_long_hold_nothing_up_for_more_than_a_second() {
        let mut route = SlowStart::new(8);
        let mut running = 0;
        route.arrived = Some(Moment::ORIGIN);
        for step in 0..STEPS {
            running += fill(&mut route, Moment::ORIGIN + STEP * step);
            assert_eq!(running, 1 << step);
        }
        assert_eq!(fill(&mut route, Moment::ORIGIN + LASTS), 1000);
    }

    /// The bug: a parser that worked on one body for longer than a step let a second one in, and
    /// both together needed more than the limit.
    #[test]
    fn time_does_not_count_while_one_works_or_grows() {
        let mut route = SlowStart::new(8);
        assert_eq!(fill(&mut route, Moment::ORIGIN), 1);
        route.arrived = Some(Moment::ORIGIN);
        route.working += 1;
        let second = Moment::ORIGIN + LASTS;
        assert_eq!(fill(&mut route, second), 0, "it works");
        route.end_work(true, second);
        assert_eq!(fill(&mut route, second), 0, "it has grown");
        route.working += 1;
        route.end_work(false, second + STEP);
        assert_eq!(fill(&mut route, second + STEP), 1);
    }

    /// Requests whose bodies took seconds to arrive were all admitted after one second, when they
    /// held little, and the kernel killed the service.
    #[test]
    fn bodies_that_still_arrive_lift_no_limit_for_a_minute() {
        let mut route = SlowStart::new(8);
        for second in 0..8 {
            let now = Moment::ORIGIN + LASTS * second;
            assert_eq!(fill(&mut route, now), u32::from(second == 0), "{second}");
        }
        assert_eq!(fill(&mut route, Moment::ORIGIN + STEP * ARRIVING), 1);
        assert_eq!(fill(&mut route, Moment::ORIGIN + LASTS * ARRIVING), 1000);
    }

    #[test]
    fn requests_that_ended_without_an_answer_teach_nothing_and_latch_nothing() {
        let mut route = SlowStart::new(8);
        for round in 0..100 {
            let now = Moment::ORIGIN + LASTS * round;
            assert_eq!(fill(&mut route, now), 1, "{round}");
            leave(&mut route, false);
        }
        assert!(!route.is_over());
    }
}

#[cfg(all(test, lowtide_loom))]
mod models {
    use loom::thread;

    use super::*;

    /// The bug: a request that looked before the first measurement, and again when the need was
    /// known, reserved nothing.
    #[test]
    fn a_request_reserves_something_while_the_need_of_its_route_becomes_known() {
        loom::model(|| {
            let (estimate, is_minimum) = (ByteSize::kib(16), false);
            let need = Arc::new(RouteNeed::new(Arc::default(), 1));
            let one = Compared { need, estimate, compared: estimate, is_minimum };
            let other = one.clone();
            let other = thread::spawn(move || other.learn(estimate));
            assert_ne!(one.claim(Room::UNLIMITED), ByteSize::ZERO);
            other.join().expect("no panic");
        });
    }

    /// There is room for one record, which is replaced only while no request uses it.
    #[test]
    fn a_record_is_that_of_its_key_while_another_replaces_it() {
        loom::model(|| {
            let needs = Arc::new(Needs::default());
            let of = |needs: &Needs, route: u64| {
                let kind = Kind { route, is_declared: true, has_many_routes: false };
                needs.of(kind, ByteSize::kib(16), false)
            };
            drop(of(&needs, 1 << 40));
            let other = {
                let needs = Arc::clone(&needs);
                thread::spawn(move || of(&needs, 2 << 40))
            };
            let (one, other) = (of(&needs, 1 << 40), other.join().expect("no panic"));
            let routes = [&one, &other].map(|of| of.need.route >> 40);
            assert!([[1, 0], [0, 2]].contains(&routes), "{routes:?}");
            let known = lock(&needs.known);
            let bucket = needs.buckets[0].read().expect("no panic");
            assert_eq!((known.len(), bucket.len(), known.families.len()), (1, 1, 1));
            assert!(Arc::ptr_eq(&known.records[0][0], &bucket[0].1));
        });
    }
}
