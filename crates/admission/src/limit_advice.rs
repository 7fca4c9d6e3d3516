//! Advice on a smaller limit: what it would have done to the recorded traffic.
//!
//! The control loop adds a sample at most every 50 ms ([`LimitRecord::add`]). Operators read the
//! sums of the last 24 hours and the current one ([`LimitAdvice`]). Each hour has two histograms:
//! the time by required memory, and the requests that each ceiling up to the limit would have
//! rejected. For the latter a ledger is kept for each ceiling ([`Shadow`]), to which the rule of
//! `correction` is applied: `other + K x (reserved + requested) <= ceiling`, where `reserved` is
//! only what that ledger admitted. At each sample it releases the same fraction of its bytes as the
//! real ledger.
//!
//! Counters and the real ledger are read only at samples, which costs the requests nothing. Between
//! them, requests are taken to arrive evenly, and arrivals and releases to alternate within each 50
//! ms. If nothing was reserved at either end, all requests are taken to have run together.
//!
//! It ignores that requests would have waited, that idle resources would have been evicted, and
//! that ceilings rise with evidence, so it overestimates rejections. It also ignores retries of
//! clients, growth of admitted requests, and that estimates have a larger margin in a small limit.
//!
//! Pure: no clock, no signal. Allocates only when it is created and when it is read.
//!
//! Invariants: each moment and each request is recorded in one hour; a shadow's reserved bytes are
//! at most the real ones; time that goes back adds nothing and loses nothing; at most [`HOURS`]
//! hours of 2.7 KiB are kept.

use std::fmt;
use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Moment, short};

use super::correction::{EVIDENT_PART, LedgerTotals, Overhead, few};
use super::tally::ClassStats;

/// The number of hours: a day, and the current one.
const HOURS: usize = 25;
const HOUR: Duration = Duration::from_secs(3600);
/// The time between two samples at least, in which arrivals and releases are taken to alternate.
pub(super) const STEP: Duration = Duration::from_millis(50);
/// The longest time for which one sample counts: nothing is known of the time in which the control
/// loop is blocked.
const STEP_MAX: Duration = Duration::from_secs(1);
/// Memory that no request owns counts after it has stayed this long: the memory of a request that
/// has ended is released a little later than its reservation.
const LASTS: Duration = Duration::from_secs(1);
/// The size of the smallest buckets, as a power of two: 64 KiB. From 1 MiB on there are sixteen for
/// each power of two.
const UNIT_POWER: u32 = 16;
/// The number of buckets for each power of two.
const PARTS: u64 = 16;
/// The number of buckets. The last one has everything from 1 TiB.
const BUCKETS: usize = 16 * (40 - 3 - UNIT_POWER as usize) + 1;
/// The smallest limit rejects less than one request in this number: 0.1 %.
const REJECTED_PART: u64 = 1000;
/// A percentile may be exceeded for one part in this number of the time: 0.1 %.
const EXCEEDED_PART: u64 = 1000;

/// Microseconds or requests by amount of memory. An hour of microseconds fits 32 bits.
type Histogram = [u32; BUCKETS];

/// Returns the bucket of an amount.
fn bucket(bytes: ByteSize) -> usize {
    let units = bytes.get() >> UNIT_POWER;
    let shift = (units | PARTS).ilog2() - PARTS.ilog2();
    let place = u64::from(shift) * PARTS + (units >> shift);
    usize::try_from(place).unwrap_or(BUCKETS).min(BUCKETS - 1)
}

/// Returns the smallest amount of a bucket.
const fn least_of(bucket: usize) -> ByteSize {
    let bucket = bucket as u64;
    let shift = (bucket / PARTS).saturating_sub(1);
    ByteSize::new((bucket - shift * PARTS) << shift << UNIT_POWER)
}

/// Returns the largest amount of a bucket.
const fn most_of(bucket: usize) -> ByteSize {
    if bucket >= BUCKETS - 1 {
        return ByteSize::MAX;
    }
    least_of(bucket + 1).saturating_sub(ByteSize::new(1))
}

/// The state of the host's budget at one instant.
#[derive(Clone, Copy, Debug)]
pub(super) struct LimitSample {
    pub(super) now: Moment,
    /// The limit in force; [`ByteSize::MAX`] if none is known.
    pub(super) limit: ByteSize,
    /// Physical less purgeable bytes.
    pub(super) required: ByteSize,
    /// What requests and resources have reserved, and what of it they hold.
    pub(super) totals: LedgerTotals,
    /// The memory that no request owns.
    pub(super) other: ByteSize,
    pub(super) correction_factor: f64,
    /// `true` if a request that is nearly alone counts once.
    pub(super) trusts_lone: bool,
    /// `true` if what requests hold is measured.
    pub(super) is_measured: bool,
    /// The requests by class since the start.
    pub(super) classes: [ClassStats; ClassStats::COUNT],
    /// The requests since the start that were rejected by level or because memory was exhausted.
    pub(super) rejected_by_level: u64,
}

/// The requests of one class that were admitted between two samples: their number, and the bytes of
/// each.
type Arrivals = (u64, f64);

/// The ledgers of all ceilings that are at most the limit: those of the smallest amount of each
/// bucket.
#[derive(Clone, Debug)]
struct Shadow {
    /// The bytes that requests have reserved.
    reserved: [f64; BUCKETS],
    /// The number of ceilings whose ledgers are kept.
    kept: usize,
    /// The memory held without requests and resources.
    base: ByteSize,
    /// What measured requests hold, and what is held for them.
    overhead: Overhead,
}

impl Shadow {
    /// Returns the terms of a ledger that has measured the correction factor: the memory that no
    /// request owns, and the factor. Smaller ceilings measure it with fewer requests than the real
    /// one, so it is measured here as `correction` does in the smallest ceiling in which the
    /// requests fit.
    fn measure(&mut self, sample: &LimitSample, time: Duration) -> Option<(f64, f64)> {
        let LimitSample { required, totals, .. } = *sample;
        let held = totals.held();
        let others = required.saturating_sub(totals.settled);
        self.base = match held <= few(required) {
            true => others.saturating_sub(held),
            false => self.base.min(others),
        };
        let covered = self.base.saturating_add(totals.resource_reservations);
        let needed = totals.requests.scaled(sample.correction_factor).saturating_add(sample.other);
        if !sample.is_measured {
            self.overhead = Overhead::NONE;
        } else if !held.is_zero() && held.get() >= needed.get() / EVIDENT_PART {
            let of_requests = required.saturating_sub(covered);
            self.overhead.add(of_requests.as_f64(), held.as_f64(), time);
        }
        let correction_factor = self.overhead.correction_factor()?;
        let other = required.saturating_sub(held.scaled(correction_factor)).max(covered);
        Some((other.as_f64(), correction_factor))
    }

    /// Admits the requests between two samples, and counts those that are rejected.
    fn admit(
        &mut self,
        from: &LimitSample,
        to: &LimitSample,
        arrivals: &[Arrivals],
        rejected: &mut Histogram,
    ) {
        let terms = (from.other.as_f64(), from.correction_factor);
        let measured = self.measure(from, to.now - from.now).unwrap_or(terms);
        if from.limit == ByteSize::MAX {
            self.kept = 0;
            return;
        }
        let kept = bucket(from.limit) + 1;
        let [before, after] = [from, to].map(|sample| sample.totals.requests.as_f64());
        for reserved in self.reserved.iter_mut().take(kept).skip(self.kept) {
            *reserved = before;
        }
        self.kept = kept;
        let is_seen = before.max(after) > 0.0;
        // Without arrivals and releases each ledger stays as it is.
        if arrivals.is_empty() && from.totals.requests == to.totals.requests {
            return;
        }
        let steps = (to.now - from.now).min(STEP_MAX).as_millis() / STEP.as_millis();
        // In each step one of the most frequent arrives: without arrivals, an empty ledger would
        // stay empty while the real one is taken to fill.
        let most = arrivals.iter().map(|(count, _)| *count).max().filter(|_| is_seen);
        let steps = u64::try_from(steps).unwrap_or(1).min(most.unwrap_or(1)).max(1);
        for nth in 0..steps {
            let of = |count: u64| (nth + 1) * count / steps - nth * count / steps;
            let each = |(count, bytes): &Arrivals| float(of(*count)) * bytes;
            let at = |nth: u64| (after - before).mul_add(float(nth) / float(steps), before);
            let all = at(nth) + arrivals.iter().map(each).sum::<f64>();
            let left = if all > 0.0 { at(nth + 1) / all } else { 0.0 };
            // The part of a request that is still reserved when the next one arrives.
            let stays = if is_seen { left } else { 1.0 };
            let ledgers = self.reserved.iter_mut().zip(&mut *rejected).take(kept).enumerate();
            for (at, (reserved, rejected)) in ledgers {
                let ceiling = least_of(at).as_f64();
                let is_evident = *reserved * float(EVIDENT_PART) >= ceiling;
                let (other, factor) = if is_evident { measured } else { terms };
                let (room, few) = ((ceiling - other) / factor, few(least_of(at)).as_f64());
                // The most that a nearly lone request may reserve if it counts once.
                let alone = factor.mul_add(-few, ceiling - other);
                *reserved *= left;
                for &(count, bytes) in arrivals {
                    let count = of(count);
                    let fit = fitting(room - *reserved, bytes, stays);
                    let is_lone = from.trusts_lone && *reserved <= few && bytes <= alone;
                    let fit = fit.max(u64::from(is_lone)).min(count);
                    let lost = u32::try_from(count - fit).unwrap_or(u32::MAX);
                    *rejected = rejected.saturating_add(lost);
                    *reserved += float(fit) * bytes * stays;
                }
                if !is_seen {
                    *reserved = 0.0;
                }
            }
        }
    }
}

fn float(number: u64) -> f64 {
    ByteSize::new(number).as_f64()
}

/// Returns how many requests of these bytes fit into this room one after the other, if this part of
/// each stays.
#[expect(
    clippy::cast_possible_truncation,
    clippy::cast_sign_loss,
    reason = "a float cast saturates, and the number is not negative"
)]
fn fitting(room: f64, bytes: f64, stays: f64) -> u64 {
    if room < bytes {
        return 0;
    }
    (((room - bytes) / (bytes * stays).max(1.0)) as u64).saturating_add(1)
}

/// One hour of the record.
#[derive(Clone, Debug)]
struct RecordedHour {
    /// Without what follows from the histogram.
    figures: LimitHour,
    /// Microseconds by required memory.
    required: Histogram,
    /// The requests that were not rejected and that each ceiling would have rejected: the smallest
    /// amount of a bucket.
    shadowed: Histogram,
}

impl RecordedHour {
    fn starting_at(start: Moment) -> Self {
        let figures = LimitHour { start, ..LimitHour::default() };
        Self { figures, required: [0; BUCKETS], shadowed: [0; BUCKETS] }
    }
}

/// The record of the last hours. Written by the control loop.
pub(super) struct LimitRecord {
    /// The part of a limit that its ceiling is at the start.
    ceiling_part: f64,
    /// By number modulo [`HOURS`].
    hours: Box<[RecordedHour]>,
    last: Option<LimitSample>,
    /// The time of the first sample, and the number of the current hour since then.
    begun: Moment,
    hour: u64,
    /// The start of the current window of [`LASTS`], and the least memory that no request owned in
    /// it.
    unowned: (Moment, ByteSize),
    shadow: Box<Shadow>,
}

impl Default for LimitRecord {
    fn default() -> Self {
        let (begun, hour, unowned) = (Moment::ORIGIN, 0, (Moment::ORIGIN, ByteSize::ZERO));
        let hours = vec![RecordedHour::starting_at(begun); HOURS].into_boxed_slice();
        let (base, overhead) = (ByteSize::MAX, Overhead::NONE);
        let shadow = Box::new(Shadow { reserved: [0.0; BUCKETS], kept: 0, base, overhead });
        let (ceiling_part, last) = (1.0, None);
        Self { ceiling_part, hours, last, begun, hour, unowned, shadow }
    }
}

debug_as!(LimitRecord, |record| last: record.last);

impl LimitRecord {
    /// Adds a sample. `ceiling_part` is the part of a limit that its ceiling is at the start. The
    /// requests since the last sample count by the values in force meanwhile: those of the last.
    /// Allocates nothing.
    pub(super) fn add(&mut self, sample: LimitSample, ceiling_part: f64) {
        self.ceiling_part = ceiling_part;
        let Some(before) = self.last else {
            (self.begun, self.unowned) = (sample.now, (sample.now, sample.other));
            self.last = Some(sample);
            return self.begin(0);
        };
        // If the clock goes back, no time passes until it is as late as before.
        let now = sample.now.max(before.now);
        let hour = (now - self.begun).as_secs() / HOUR.as_secs();
        for nth in (self.hour + 1).max(first_of(hour))..=hour {
            self.begin(nth);
        }
        let sample = LimitSample { now, ..sample };
        (self.last, self.hour) = (Some(sample), hour);
        let RecordedHour { figures, required, shadowed } = &mut self.hours[place(hour)];
        let micros = (now - before.now).min(STEP_MAX).as_micros();
        let sum = &mut required[bucket(sample.required)];
        *sum = sum.saturating_add(u32::try_from(micros).unwrap_or(u32::MAX));
        figures.required_max = figures.required_max.max(sample.required);
        let (since, least) = (self.unowned.0, self.unowned.1.min(sample.other));
        self.unowned = (since, least);
        if now - since >= LASTS {
            figures.unowned = figures.unowned.max(least);
            self.unowned = (now, sample.other);
        }
        let mut arrivals = [(0, 0.0); ClassStats::COUNT];
        let mut used = 0;
        for (from, to) in before.classes.iter().zip(&sample.classes) {
            let count = to.admitted_total.saturating_sub(from.admitted_total);
            let bytes = to.admitted_bytes_total.saturating_sub(from.admitted_bytes_total);
            let rejected = to.rejected_total.saturating_sub(from.rejected_total);
            figures.rejected += rejected;
            figures.requests += count + rejected;
            if count > 0 {
                arrivals[used] = (count, float(bytes) / float(count));
                used += 1;
            }
        }
        let by_level = sample.rejected_by_level.saturating_sub(before.rejected_by_level);
        figures.rejected += by_level;
        figures.requests += by_level;
        self.shadow.admit(&before, &sample, &arrivals[..used], shadowed);
    }

    /// Begins the hour of this number.
    fn begin(&mut self, nth: u64) {
        let start = self.begun + HOUR * u32::try_from(nth).unwrap_or(u32::MAX);
        self.hours[place(nth)] = RecordedHour::starting_at(start);
    }

    /// Returns the sums of all hours.
    pub(super) fn advice(&self) -> LimitAdvice {
        let mut advice = LimitAdvice { ceiling_part: self.ceiling_part, ..LimitAdvice::default() };
        advice.limit = self.last.map_or(ByteSize::MAX, |last| last.limit);
        if self.last.is_none() {
            return advice;
        }
        for nth in first_of(self.hour)..=self.hour {
            let RecordedHour { figures, required, shadowed } = &self.hours[place(nth)];
            let micros = required.iter().copied().map(u64::from).sum();
            let observed = Duration::from_micros(micros);
            let sums = [(&mut advice.required, required), (&mut advice.shadowed, shadowed)];
            for (sums, histogram) in sums {
                sums.resize(BUCKETS, 0);
                sums.iter_mut().zip(histogram).for_each(|(sum, it)| *sum += u64::from(*it));
            }
            advice.observed += observed;
            advice.requests += figures.requests;
            advice.rejected += figures.rejected;
            advice.unowned = advice.unowned.max(figures.unowned);
            // The first bucket above which lies at most the allowed part.
            let mut above = 0;
            let p999 = required.iter().rposition(|micros_of_it| {
                above += u64::from(*micros_of_it);
                above > micros / EXCEEDED_PART
            });
            let required_p999 = p999.map_or(ByteSize::ZERO, most_of).min(figures.required_max);
            advice.hours.push(LimitHour { observed, required_p999, ..*figures });
        }
        advice
    }
}

/// Returns the number of the oldest hour that is kept during this one.
const fn first_of(hour: u64) -> u64 {
    (hour + 1).saturating_sub(HOURS as u64)
}

/// Returns the index of the hour of this number.
fn place(nth: u64) -> usize {
    usize::try_from(nth % HOURS as u64).unwrap_or(0)
}

/// The memory that the recorded traffic has needed, for the choice of a limit: the last 24 hours
/// and the current one, counted from the start of the process.
///
/// A prediction is an estimate, and usually too high: it ignores that requests would have waited
/// for room and that idle resources would have been evicted, and it uses the ceiling that a limit
/// has at the start, which rises with evidence. It also ignores retries of clients, growth of
/// admitted requests beyond their reservations, and bursts that begin and end between two samples:
/// within 50 ms, or 250 ms while little is reserved.
///
/// ```
/// use lowtide_admission::{ByteSize, LimitAdvice};
///
/// let advice = LimitAdvice::default(); // nothing is recorded, in a limit of zero bytes
/// assert_eq!(advice.smallest_limit(), None);
/// assert_eq!(advice.at(ByteSize::mib(256)).requests, 0);
/// ```
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct LimitAdvice {
    /// The hours, oldest first: at most 25. The last one is not over.
    pub hours: Vec<LimitHour>,
    /// The limit in force; [`ByteSize::MAX`] if none is known.
    pub limit: ByteSize,
    /// The recorded time, without times in which the control loop was blocked.
    pub observed: Duration,
    /// The requests of that time, admitted or rejected for lack of host memory. Exempt ones are not
    /// counted, nor those that a limit of this size can never admit.
    pub requests: u64,
    /// Those that were rejected.
    pub rejected: u64,
    /// The most memory that no request owned for at least a second, in fixed windows.
    pub unowned: ByteSize,
    ceiling_part: f64,
    /// By bucket: microseconds by required memory, and the requests that each ceiling would have
    /// rejected in addition.
    required: Vec<u64>,
    shadowed: Vec<u64>,
}

/// The memory that one hour of the recorded traffic has needed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LimitHour {
    /// The start of the hour.
    pub start: Moment,
    /// The recorded time.
    pub observed: Duration,
    /// The required memory (physical less purgeable) that was not exceeded for 99.9 % of the time,
    /// to a sixteenth.
    pub required_p999: ByteSize,
    /// The most memory that was required.
    pub required_max: ByteSize,
    /// The most memory that no request owned for at least a second, in fixed windows.
    pub unowned: ByteSize,
    /// The requests, as in [`LimitAdvice::requests`].
    pub requests: u64,
    /// Those that were rejected.
    pub rejected: u64,
}

impl LimitAdvice {
    /// The least number of requests for [`LimitAdvice::smallest_limit`]: if none of 3,000 is
    /// rejected, the probability of a rejection is below .1 %, with a confidence of 95 %.
    pub const REQUESTS_MIN: u64 = 3_000;

    /// Returns the requests that a ceiling would have rejected, or any larger one.
    fn rejected_at(&self, ceiling: ByteSize) -> u64 {
        let from = self.shadowed.iter().skip(bucket(ceiling));
        self.rejected + from.max().copied().unwrap_or(0)
    }

    /// Returns the smallest limit that would have rejected less than .1 % of the recorded requests,
    /// rounded up to a MiB: at most the limit in force. `None` if no limit is known, if fewer than
    /// [`LimitAdvice::REQUESTS_MIN`] requests are recorded, or if the limit in force has rejected
    /// .1 % of them; the text of the advice gives the reason.
    #[must_use]
    pub fn smallest_limit(&self) -> Option<ByteSize> {
        if self.limit == ByteSize::MAX || self.requests < Self::REQUESTS_MIN {
            return None;
        }
        // Less than a thousandth, not as much as one.
        let most = (self.requests - 1) / REJECTED_PART;
        let enough = (0..BUCKETS).map(least_of).find(|ceiling| self.rejected_at(*ceiling) <= most);
        let ceiling = enough.unwrap_or(ByteSize::MAX).max(self.unowned);
        let limit = ceiling.scaled(self.ceiling_part.recip()).next_multiple_of(ByteSize::mib(1));
        let smaller = limit.filter(|limit| *limit < self.limit);
        smaller.or_else(|| (self.rejected <= most).then_some(self.limit))
    }

    /// Returns what another limit would have done to the recorded requests. A larger limit than the
    /// one in force is taken to reject as many as that one did.
    #[must_use]
    pub fn at(&self, limit: ByteSize) -> LimitForecast {
        let ceiling = limit.scaled(self.ceiling_part);
        let is_smaller = limit < self.limit;
        let rejected = if is_smaller { self.rejected_at(ceiling) } else { self.rejected };
        let time_above = |bytes| {
            let larger = self.required.iter().enumerate().filter(|(at, _)| most_of(*at) > bytes);
            Duration::from_micros(larger.map(|(_, micros)| micros).sum())
        };
        LimitForecast {
            limit,
            ceiling,
            requests: self.requests,
            rejected,
            observed: self.observed,
            over_ceiling: time_above(ceiling),
            over_limit: time_above(limit),
            unowned: self.unowned,
        }
    }
}

/// The effect that a limit would have had on the recorded traffic; its text is a sentence for
/// people. See [`LimitAdvice`] for what it ignores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LimitForecast {
    /// The limit.
    pub limit: ByteSize,
    /// Its ceiling at the start.
    pub ceiling: ByteSize,
    /// The recorded requests.
    pub requests: u64,
    /// Those that would have been rejected, by estimate.
    pub rejected: u64,
    /// The recorded time.
    pub observed: Duration,
    /// The time for which more memory was required than the ceiling. Part of it was that of
    /// requests that the limit would have rejected.
    pub over_ceiling: Duration,
    /// The time for which more memory was required than the limit: if no request had been rejected,
    /// the kernel would have killed the process.
    pub over_limit: Duration,
    /// The most memory that no request owned for at least a second, in fixed windows.
    pub unowned: ByteSize,
}

impl LimitForecast {
    /// Returns the part of the requests that would have been rejected, from 0 to 1.
    #[must_use]
    pub fn rejected_share(&self) -> f64 {
        ByteSize::new(self.rejected).as_f64() / ByteSize::new(self.requests.max(1)).as_f64()
    }

    /// Returns `true` if memory that no request owns would have left no room for requests.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.unowned > self.ceiling
    }
}

impl fmt::Display for LimitForecast {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { limit, ceiling, unowned, .. } = self;
        if self.is_exhausted() {
            write!(f, "a limit of {limit} would be exhausted: memory that no request owns")?;
            write!(f, " ({unowned}) exceeds its ceiling of {ceiling}")?;
            let kills = ", and the limit itself: the kernel would kill the process";
            return f.write_str(if unowned > limit { kills } else { "" });
        }
        let recorded = recorded(self.requests, self.observed);
        write!(f, "with a limit of {limit} ")?;
        match (self.requests, self.rejected) {
            (0, _) => f.write_str("nothing would have been rejected: no request is recorded")?,
            (_, 0) => write!(f, "none of {recorded} would have been rejected")?,
            _ => {
                let share = percent(self.rejected_share());
                write!(f, "about {share} of {recorded} would have been rejected")?;
            }
        }
        write!(f, "; memory that no request owns ({unowned}) fits")
    }
}

impl fmt::Display for LimitAdvice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let recorded = recorded(self.requests, self.observed);
        match self.smallest_limit() {
            Some(limit) => {
                write!(f, "{limit} is the smallest limit that rejects less than ")?;
                write!(f, "0.1 % of {recorded}")
            }
            None if self.limit == ByteSize::MAX => f.write_str("no advice: no limit is known"),
            None if self.requests < Self::REQUESTS_MIN => {
                let least = grouped(Self::REQUESTS_MIN);
                write!(f, "no advice yet: {recorded} are recorded, expected at least {least}")
            }
            None => {
                let share = percent(self.at(self.limit).rejected_share());
                write!(f, "no smaller limit: the limit of {} has rejected ", self.limit)?;
                write!(f, "{share} of {recorded}")
            }
        }
    }
}

/// Describes a number of requests and their time.
fn recorded(requests: u64, time: Duration) -> String {
    format!("{} requests of the last {}", grouped(requests), short(time))
}

/// Describes a number, with commas between groups of three digits.
fn grouped(number: u64) -> String {
    match number / 1000 {
        0 => number.to_string(),
        thousands => format!("{},{:03}", grouped(thousands), number % 1000),
    }
}

/// Describes a share in percent, at least .01 %.
fn percent(share: f64) -> String {
    format!("{:.2} %", (share * 100.0).max(0.01))
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(10);
    const SEEDS: u64 = 20;
    /// Requests since the start, and those that did not fit.
    type Count = (u64, u64);

    /// Marsaglia's xorshift: numbers below a bound.
    struct Random(u64);

    impl Random {
        fn below(&mut self, bound: u64) -> u64 {
            self.0 ^= self.0 << 13;
            self.0 ^= self.0 >> 7;
            self.0 ^= self.0 << 17;
            (self.0 >> 11) % bound
        }
    }

    fn requests(reserved: ByteSize) -> LedgerTotals {
        LedgerTotals { requests: reserved, ..LedgerTotals::default() }
    }

    /// A sample of a service with a limit of 1,000 MiB, of which 50 are required.
    fn sample(now: Duration) -> LimitSample {
        LimitSample {
            now: Moment::after_origin(now),
            limit: ByteSize::mib(1000),
            required: ByteSize::mib(50),
            totals: LedgerTotals::default(),
            other: ByteSize::mib(50),
            correction_factor: 1.0,
            trusts_lone: false,
            is_measured: false,
            classes: [ClassStats::default(); ClassStats::COUNT],
            rejected_by_level: 0,
        }
    }

    /// The same after so many requests of 8 MiB.
    fn after(now: Duration, (admitted, rejected): Count) -> LimitSample {
        let mut sample = sample(now);
        let class = &mut sample.classes[crate::tally::class_of(ByteSize::mib(8))];
        (class.admitted_total, class.admitted_bytes_total) = (admitted, admitted << 23);
        (class.rejected_total, class.rejected_bytes_total) = (rejected, rejected << 23);
        sample
    }

    /// Records ticks at which `reserved` MiB are reserved, with one arrival of 8 MiB each.
    fn record(ticks: u64, reserved: impl Fn(u64) -> u64) -> LimitRecord {
        let mut record = LimitRecord::default();
        for nth in 0..=ticks {
            let now = TICK * u32::try_from(nth).expect("few");
            let reserved = ByteSize::mib(reserved(nth));
            record.add(LimitSample { totals: requests(reserved), ..after(now, (nth, 0)) }, 0.8);
        }
        record
    }

    #[test]
    fn an_amount_is_in_its_bucket_and_buckets_are_a_sixteenth_wide() {
        let units = |bytes: ByteSize| bytes.get() >> UNIT_POWER;
        for at in 0..BUCKETS - 1 {
            let (least, most) = (least_of(at), most_of(at));
            assert_eq!((bucket(least), bucket(most)), (at, at));
            assert_eq!(bucket(most.saturating_add(ByteSize::new(1))), at + 1);
            assert!(units(most) - units(least) <= units(least) / PARTS, "{least} to {most}");
        }
        assert_eq!(least_of(BUCKETS - 1), ByteSize::gib(1024));
        assert_eq!((bucket(ByteSize::MAX), most_of(BUCKETS - 1)), (BUCKETS - 1, ByteSize::MAX));
    }

    #[test]
    fn an_hours_percentile_is_within_a_bucket_of_the_exact_one() {
        for seed in 1..=SEEDS {
            let (mut random, mut record) = (Random(seed), LimitRecord::default());
            let (mut now, mut exact) = (Duration::ZERO, Vec::new());
            record.add(sample(now), 0.8);
            for _ in 0..20_000 {
                let step = Duration::from_micros(1 + random.below(20_000));
                let power = random.below(17);
                let bytes = ByteSize::new((1 << (20 + power)) + random.below(1 << (20 + power)));
                now += step;
                record.add(LimitSample { required: bytes, ..sample(now) }, 0.8);
                exact.push((bytes, step));
            }
            exact.sort_by_key(|(bytes, _)| *bytes);
            let mut left = now / 1000;
            let p999 = exact.iter().rev().find(|(_, step)| {
                let is_in = *step > left;
                left = left.saturating_sub(*step);
                is_in
            });
            let (p999, max) = (p999.expect("some").0, exact.last().expect("some").0);
            let [hour] = record.advice().hours[..] else { panic!("seed {seed}: one hour") };
            assert_eq!((hour.observed, hour.required_max), (now, max), "seed {seed}");
            let (found, wide) = (hour.required_p999, p999.scaled(17.0 / 16.0));
            assert!((p999..=wide).contains(&found), "seed {seed}: {found}, exact {p999}");
        }
    }

    #[test]
    fn a_day_and_the_current_hour_are_kept_and_each_request_is_in_one_hour() {
        let mut record = LimitRecord::default();
        record.add(after(Duration::ZERO, (0, 0)), 0.8);
        let minute = |nth: u64| Duration::from_secs(60 * nth);
        for nth in 1..=(40 * 60) {
            record.add(after(minute(nth), (nth, 0)), 0.8);
        }
        let advice = record.advice();
        let starts: Vec<_> = advice.hours.iter().map(|hour| hour.start).collect();
        let expected: Vec<_> = (16..=40_u64).map(|nth| Moment::ORIGIN + minute(60 * nth)).collect();
        assert_eq!(starts, expected);
        let requests: Vec<_> = advice.hours.iter().map(|hour| hour.requests).collect();
        assert_eq!(requests, [vec![60; 24], vec![1]].concat());
        assert_eq!(advice.requests, 24 * 60 + 1);
        assert_eq!(advice.observed, STEP_MAX * 1441, "of each minute only a second is known");
        record.add(after(minute(60 * 2000), (40 * 60, 0)), 0.8);
        let advice = record.advice();
        assert_eq!((advice.hours.len(), advice.requests), (25, 0), "long ago");
    }

    #[test]
    fn a_clock_that_steps_back_loses_and_invents_nothing() {
        for seed in 1..=SEEDS {
            let (mut random, mut record) = (Random(seed), LimitRecord::default());
            let (mut now, mut latest) = (3_600_000_u64, 3_600_000);
            for nth in 0..5_000 {
                record.add(after(Duration::from_millis(now), (nth, 0)), 0.8);
                latest = latest.max(now);
                now = (now + random.below(200)).saturating_sub(150 * random.below(2));
            }
            let advice = record.advice();
            assert_eq!(advice.requests, 4_999, "seed {seed}");
            let observed = Duration::from_millis(latest - 3_600_000);
            assert_eq!(advice.observed, observed, "seed {seed}");
        }
    }

    #[test]
    fn requests_that_run_together_need_a_ceiling_for_all_of_them() {
        // 80 MiB stay reserved: ten requests of 8 MiB, one of which ends at each tick.
        let advice = record(10_000, |nth| 8 * nth.min(10)).advice();
        assert_eq!((advice.requests, advice.rejected), (10_000, 0));
        let limit = advice.smallest_limit().expect("enough requests");
        let exact = ByteSize::mib(50 + 80).scaled(1.0 / 0.8);
        assert!((exact..=exact.scaled(1.1)).contains(&limit), "{limit}, exact {exact}");
        assert!(advice.at(limit).rejected_share() < 0.001);
        // Half of the requests' memory serves half of them.
        let half = advice.at(ByteSize::mib(50 + 40).scaled(1.0 / 0.8)).rejected_share();
        assert!((0.4..=0.7).contains(&half), "{half}");
        assert_eq!(advice.at(ByteSize::mib(50)).rejected, 10_000, "no room at all");
        assert_eq!(advice.at(ByteSize::mib(1000)).rejected, 0);
    }

    #[test]
    fn requests_that_no_tick_has_seen_are_taken_to_have_run_together() {
        let mut record = LimitRecord::default();
        for nth in 0..=1000_u32 {
            record.add(after(250 * nth * TICK / 10, (4 * u64::from(nth), 0)), 0.8);
        }
        let limit = record.advice().smallest_limit().expect("enough requests");
        let exact = ByteSize::mib(50 + 4 * 8).scaled(1.0 / 0.8);
        assert!((exact..=exact.scaled(1.1)).contains(&limit), "{limit}, exact {exact}");
    }

    /// The bug: the first steps of requests of different sizes that arrived in an empty service had
    /// no arrival, and what was reserved by their ends was taken to be released by later ones.
    #[test]
    fn ledgers_with_room_hold_what_the_real_one_holds() {
        for sizes in [vec![8, 16], vec![1, 3, 8, 20, 40], vec![2; 7]] {
            let mut record = LimitRecord::default();
            record.add(sample(Duration::ZERO), 0.8);
            let mut next = sample(Duration::from_secs(1));
            for size in &sizes {
                let class = &mut next.classes[crate::tally::class_of(ByteSize::mib(*size))];
                class.admitted_total += 1;
                class.admitted_bytes_total += size << 20;
            }
            let real = ByteSize::mib(sizes.iter().sum());
            record.add(LimitSample { totals: requests(real), ..next }, 0.8);
            let held = record.shadow.reserved[bucket(ByteSize::mib(1000))] / real.as_f64();
            assert!((held - 1.0).abs() < 1e-9, "{held} of {real} in {sizes:?}");
        }
    }

    #[test]
    fn a_lone_request_counts_once_while_nothing_is_measured() {
        let need = |trusts_lone| {
            let mut record = LimitRecord::default();
            for nth in 0..=4000_u32 {
                let sample = after(nth * TICK, (u64::from(nth), 0));
                record.add(LimitSample { correction_factor: 5.0, trusts_lone, ..sample }, 0.8);
            }
            record.advice().smallest_limit().expect("enough requests").scaled(0.8)
        };
        // 50 + 5 x 8 MiB, or (50 + 8) / (1 - 5 / 32).
        let needs = [need(false), need(true)].map(|need| need.get() >> 20);
        assert!((90..=96).contains(&needs[0]) && (68..=73).contains(&needs[1]), "{needs:?}");
    }

    #[test]
    fn smaller_limits_never_reject_less() {
        for seed in 1..=SEEDS {
            let mut random = Random(seed);
            let load: Vec<u64> = (0..5_000).map(|_| 8 + random.below(300)).collect();
            let advice = record(4_999, |nth| load[usize::try_from(nth).expect("few")]).advice();
            let rejected: Vec<u64> =
                (0..1000).map(|mib| advice.at(ByteSize::mib(mib)).rejected).collect();
            assert!(rejected.is_sorted_by(|less, more| less >= more), "seed {seed}");
            assert_eq!(rejected[0], advice.requests, "seed {seed}");
        }
    }

    #[test]
    fn the_ledgers_of_smaller_ceilings_never_hold_more_than_the_real_one() {
        for seed in 1..=SEEDS {
            let (mut random, mut record) = (Random(seed), LimitRecord::default());
            let mut reserved = 0;
            for nth in 0..5_000_u32 {
                let now = after(nth * TICK, (u64::from(nth), 0));
                let totals = requests(ByteSize::mib(reserved));
                record.add(LimitSample { totals, ..now }, 0.8);
                let real = ByteSize::mib(reserved).as_f64() + 1.0;
                let most = record.shadow.reserved.iter().copied().fold(0.0, f64::max);
                assert!(most <= real, "seed {seed}: {most} of {real}");
                reserved = (reserved + 8).saturating_sub(random.below(17));
            }
        }
    }

    #[test]
    fn the_text_gives_the_advice_or_the_reason_why_there_is_none() {
        let none = LimitRecord::default().advice();
        assert_eq!(none.to_string(), "no advice: no limit is known");
        assert_eq!(
            none.at(ByteSize::mib(256)).to_string(),
            "with a limit of 256.0 MiB nothing would have been rejected: no request is \
             recorded; memory that no request owns (0 B) fits"
        );
        assert_eq!(
            record(200, |_| 8).advice().to_string(),
            "no advice yet: 200 requests of the last 2.0 s are recorded, expected at least 3,000"
        );
        let advice = record(10_000, |nth| 8 * nth.min(10)).advice();
        assert_eq!(
            advice.to_string(),
            "170.0 MiB is the smallest limit that rejects less than 0.1 % of 10,000 requests of \
             the last 100.0 s"
        );
        let at = |mib| advice.at(ByteSize::mib(mib)).to_string();
        assert_eq!(
            at(170),
            "with a limit of 170.0 MiB none of 10,000 requests of the last 100.0 s would have been \
             rejected; memory that no request owns (50.0 MiB) fits"
        );
        assert_eq!(
            at(60),
            "a limit of 60.0 MiB would be exhausted: memory that no request owns (50.0 MiB) \
             exceeds its ceiling of 48.0 MiB"
        );
        assert!(
            at(49).ends_with("and the limit itself: the kernel would kill the process"),
            "{}",
            at(49)
        );
        let mut record = LimitRecord::default();
        for nth in 0..=4000_u32 {
            let count = (u64::from(nth), u64::from(nth / 100));
            record.add(after(nth * TICK, count), 0.8);
        }
        let advice = record.advice();
        assert_eq!((advice.requests, advice.rejected, advice.smallest_limit()), (4040, 40, None));
        assert_eq!(
            advice.to_string(),
            "no smaller limit: the limit of 1000.0 MiB has rejected 0.99 % of 4,040 requests of \
             the last 40.0 s"
        );
        let shares = [0.00002, 0.0031, 0.031, 1.0].map(percent);
        assert_eq!(shares, ["0.01 %", "0.31 %", "3.10 %", "100.00 %"]);
    }
}
