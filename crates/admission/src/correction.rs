//! Learns from samples how much memory reservations really need. Pure, owned by the control loop.
//!
//! It reserves nothing and reads no signal. Its input is what is reserved and what is held; its
//! output is how much may be reserved.
//!
//! `K`, the correction factor, is measured on admitted requests, so a `K` that rejects all of them
//! would stay forever. Therefore a request that is nearly alone counts once if nothing has been
//! measured for a while: it is the measurement. Its estimate is trusted, once.
//!
//! Requests are measured or not. What measured ones hold is known, and `K` is what the process
//! holds for each byte of it: fragmentation, connections, and memory without an owner. The others
//! are taken to hold what they have reserved, and `K` corrects their estimates too.
//!
//! Invariants, with `held = reserved - units - unheld`, `required = physical - purgeable`, and
//! `extra` the memory beyond the base, the resources and the requests before a resource began to
//! load:
//!
//! - `other = max(base + extra + resource_reservations, required - K x held)`
//! - `allowance = (ceiling - other) / K + units`
//! - `alone = ceiling - other - K x ceiling / 32`, or 0 while `K` is being measured
//! - `K = max(1.05 x peak, (1 - .005 x min(8 x measured, 1)) x K)`, clamped to 1 to 5. `peak` is
//!   the largest measurement of the last three generations of requests. `K` falls by at most .5 %
//!   each 10 ms if requests are not measured, because reserved bytes that are not used yet may
//!   still be used.
//! - Without measurements `K` slowly returns to its starting value.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;

/// The correction factor before anything is measured, by default: 2. Safe for estimates that are
/// half of the real need.
pub const K_START: f64 = 2.0;
/// The smallest correction factor: 1. An estimate is never assumed to be too high.
pub const K_MIN: f64 = 1.0;
/// The largest correction factor: 5.
pub const K_MAX: f64 = 5.0;

/// The margin on top of a measured `K`.
const K_MARGIN: f64 = 1.05;
/// The largest part by which `K` falls in 10 ms if less was measured: half of it in 1.4 s.
const K_DECAY: f64 = 0.005;
/// That time, and the largest number of such times for which one late sample counts.
const K_DECAY_TIME: Duration = Duration::from_millis(10);
const K_DECAY_TIMES: f64 = 25.0;
/// The number of request generations for which `K` stays at the largest measurement. A body that is
/// still arriving holds less than it will, so the bytes held now say little about a whole request.
/// With decay by time alone `K` fell between two cohorts, and each was larger than the one before.
/// Found with `benches/controller`: two are too few for bodies that take half of a request's life
/// to arrive.
const GENERATIONS: usize = 3;
/// `K` moves only if requests have reserved the ceiling divided by this. With fewer bytes, memory
/// of threads or of other processes would be counted as theirs. It still counts once, as `other`.
pub(super) const EVIDENT_PART: u64 = 8;
/// The weight of the newest measurement in the average that shows if the first bodies are still
/// arriving. A guess: 20 samples make two thirds of it.
const TREND_WEIGHT: f64 = 0.05;
/// `K` falls at the full rate if requests hold one in so many of their reserved bytes, and more
/// slowly if they hold less. A guess: honest estimates are peaks and hold a tenth on average.
const K_EVIDENCE: f64 = 8.0;
/// The part of the way back to its starting value that `K` moves in a second without a measurement:
/// half of it in three minutes. A guess.
pub(super) const K_FORGETTING: f64 = 0.004;
/// `K` is measured only if requests have reserved at least the ceiling divided by this. Below it
/// the noise of the sample is larger than the measurement.
pub(super) const MEASURED_PART: u64 = 32;
/// After this time without a measurement a nearly lone request counts once. A guess.
pub(super) const UNMEASURED: Duration = Duration::from_secs(2);

/// Returns the bytes that requests may have reserved for one more to count as nearly alone.
pub(super) fn few(ceiling: ByteSize) -> ByteSize {
    ByteSize::new(ceiling.get() / MEASURED_PART)
}

/// A measurement of one budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Measured {
    /// Bytes that count against the limit.
    pub(crate) physical: ByteSize,
    /// The part of `physical` that a purge can release.
    pub(crate) purgeable: ByteSize,
    /// What running work has taken beyond its reservations, which is no evidence about other
    /// requests.
    pub(crate) outgrown: ByteSize,
    /// The most bytes that may be held in total; [`ByteSize::MAX`] if no limit is known.
    pub(crate) ceiling: ByteSize,
    /// The progress of requests since the last sample.
    pub(crate) turnover: RequestRate,
}

/// The progress of requests between two samples. The default, which knows nothing of requests,
/// stands for 10 ms in which all requests were replaced.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct RequestRate {
    /// The time between the samples.
    pub(crate) time: Duration,
    /// The number of requests that ended.
    pub(crate) ended: u64,
    /// The number of requests held now.
    pub(crate) held: u64,
}

/// The largest measurements of the last generations. A generation ends when as many requests have
/// ended as it held at most.
#[derive(Clone, Copy, Debug)]
struct Peaks {
    /// The current generation first.
    measures: [f64; GENERATIONS],
    ended: u64,
    held: u64,
    /// The average of the last measurements, until the first generation ends.
    trend: Option<f64>,
}

impl Peaks {
    const fn new() -> Self {
        Self { measures: [0.0; GENERATIONS], ended: 0, held: 0, trend: Some(0.0) }
    }

    /// Adds a measurement.
    fn add(&mut self, measure: f64, turnover: RequestRate) {
        self.ended = self.ended.saturating_add(turnover.ended);
        self.held = self.held.max(turnover.held);
        if self.held == 0 {
            *self = Self { trend: None, ..Self::new() };
        } else if self.ended >= self.held {
            self.measures.rotate_right(1);
            self.measures[0] = 0.0;
            (self.ended, self.held, self.trend) = (0, turnover.held, None);
        }
        self.measures[0] = self.measures[0].max(measure);
        if let Some(trend) = &mut self.trend {
            *trend += TREND_WEIGHT * (measure - *trend);
        }
    }
}

/// Averages over the last second of what is held, and of what measured requests hold of it. Memory
/// that is freed is held a little longer, so the ratio of two samples would be too high whenever
/// many requests end.
#[derive(Clone, Copy, Debug)]
pub(super) struct Overhead {
    held: f64,
    requests: f64,
}

impl Overhead {
    pub(super) const NONE: Self = Self { held: 0.0, requests: 0.0 };

    /// Adds a measurement of this time.
    pub(super) fn add(&mut self, held: f64, requests: f64, time: Duration) {
        let weight = time.max(K_DECAY_TIME).as_secs_f64().min(1.0);
        let weight = if self.requests > 0.0 { weight } else { 1.0 };
        self.held += weight * (held - self.held);
        self.requests += weight * (requests - self.requests);
    }

    /// Returns the correction factor; `None` if nothing was measured.
    pub(super) fn correction_factor(self) -> Option<f64> {
        let measured = K_MARGIN * self.held / self.requests;
        (self.requests > 0.0).then(|| measured.clamp(K_MIN, K_MAX))
    }
}

/// The time after which memory that is held without a reservation is expected to stay: until then a
/// purge may release it, such as what an unloaded resource has freed to the C library.
const STAYS_AFTER: Duration = Duration::from_secs(60);

/// The least value of the last [`STAYS_AFTER`], or of up to twice as long.
#[derive(Clone, Copy, Debug)]
struct Least {
    now: ByteSize,
    before: ByteSize,
    time: Duration,
}

impl Least {
    const UNKNOWN: Self = Self { now: ByteSize::MAX, before: ByteSize::MAX, time: Duration::ZERO };

    /// Adds a value, this time after the last one.
    fn add(&mut self, value: ByteSize, time: Duration) {
        self.time = self.time.saturating_add(time);
        if self.time >= STAYS_AFTER {
            *self = Self { before: self.now, ..Self::UNKNOWN };
        }
        self.now = self.now.min(value);
    }

    /// Returns [`ByteSize::MAX`] if nothing was added.
    fn get(self) -> ByteSize {
        self.now.min(self.before)
    }
}

/// The reservations of a ledger at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct LedgerTotals {
    /// Bytes reserved by requests.
    pub requests: ByteSize,
    /// The part of the allowance that resources take.
    pub units: ByteSize,
    /// Bytes reserved by resources.
    pub resource_reservations: ByteSize,
    /// The part of `resource_reservations` that is loaded.
    pub settled: ByteSize,
    /// The part of `requests` that they do not hold, as far as they are measured.
    pub unheld: ByteSize,
}

impl LedgerTotals {
    /// Returns `true` if a resource is loading.
    fn is_loading(self) -> bool {
        self.settled < self.resource_reservations
    }

    /// Returns the bytes of requests that are part of what is held: measured ones count what they
    /// hold, and others all that they reserved.
    pub(super) fn held(self) -> ByteSize {
        self.requests.saturating_sub(self.unheld)
    }
}

/// The learned state of one budget. Pure, owned by the control loop.
#[derive(Clone, Debug)]
pub(crate) struct Correction {
    pub(super) correction_factor: f64,
    /// The memory held while nothing is reserved.
    pub(super) base: ByteSize,
    base_min: Least,
    /// The memory beyond the base, the loaded resources and the requests. It does not grow while a
    /// resource is loading: growth is attributed to that resource.
    extra: ByteSize,
    /// `true` if next to nothing was reserved at the last sample either.
    quiet: bool,
    /// `K` before anything is measured.
    start: f64,
    /// The time since `K` was last measured.
    unmeasured: Duration,
    pub(super) alone: ByteSize,
    /// The bytes that must become free before `alone` is above 0; [`ByteSize::MAX`] while `K` is
    /// measured.
    pub(super) alone_debt: ByteSize,
    /// The memory that no request owns.
    pub(super) other: ByteSize,
    /// The memory that no request owns, even if each needs [`K_MAX`] times its reservation.
    pub(super) unowned: ByteSize,
    /// The memory beyond the base and all reservations.
    pub(super) uncovered: ByteSize,
    /// The most that one request could reserve if all others had ended.
    pub(super) most: ByteSize,
    peaks: Peaks,
    overhead: Overhead,
}

impl Correction {
    /// Creates a state without measurements, with this starting correction factor: the expected
    /// ratio of real need to estimate. Clamped to [`K_MIN`] to [`K_MAX`]; NaN becomes [`K_MIN`].
    pub(crate) const fn starting_at(start: f64) -> Self {
        let start = start.max(K_MIN).min(K_MAX); // in this order: no number is `K_MIN`
        Self {
            correction_factor: start,
            start,
            base: ByteSize::ZERO,
            base_min: Least::UNKNOWN,
            extra: ByteSize::ZERO,
            quiet: true,
            unmeasured: UNMEASURED,
            alone: ByteSize::ZERO,
            alone_debt: ByteSize::MAX,
            other: ByteSize::ZERO,
            unowned: ByteSize::ZERO,
            uncovered: ByteSize::ZERO,
            most: ByteSize::MAX,
            peaks: Peaks::new(),
            overhead: Overhead::NONE,
        }
    }

    /// Returns `true` if it was learned last from what measured requests hold.
    pub(super) const fn is_measured(&self) -> bool {
        self.overhead.requests > 0.0
    }

    /// Returns `true` if nothing was measured for a while, so that a nearly lone request counts
    /// once.
    pub(super) fn trusts_lone(&self) -> bool {
        self.unmeasured >= UNMEASURED
    }

    /// Returns the least memory held while nothing was reserved, of the last one to two minutes.
    /// What is held beyond it may be released: memory that a resource has freed to the C library.
    pub(super) fn base_min(&self) -> ByteSize {
        self.base.min(self.base_min.get())
    }

    /// Updates the state with a sample and returns the bytes that may be reserved.
    pub(crate) fn update(&mut self, totals: LedgerTotals, measured: Measured) -> ByteSize {
        let required = measured.physical.saturating_sub(measured.purgeable);
        let expected = required.saturating_sub(measured.outgrown);
        self.learn_base(totals, expected, measured);
        self.learn_k(totals, expected, measured);
        let factor = self.correction_factor;
        debug_assert!((K_MIN..=K_MAX).contains(&factor), "K is {factor}");
        let covered = self.base.saturating_add(totals.resource_reservations);
        let reserved = covered.saturating_add(totals.requests.scaled(self.correction_factor));
        self.uncovered = required.saturating_sub(reserved);
        if measured.ceiling == ByteSize::MAX {
            self.most = ByteSize::MAX;
            return ByteSize::MAX;
        }
        let beyond = |held: ByteSize, requests| held.saturating_sub(requests).max(covered);
        let requests = totals.held().scaled(self.correction_factor);
        let loaded = requests.saturating_add(self.base).saturating_add(totals.settled);
        let extra = required.saturating_sub(loaded);
        self.extra = if totals.is_loading() { self.extra.min(extra) } else { extra };
        self.other = beyond(required, requests).max(covered.saturating_add(self.extra));
        self.unowned = beyond(expected, totals.held().scaled(K_MAX));
        let room = measured.ceiling.saturating_sub(self.other);
        let beside = few(measured.ceiling).scaled(self.correction_factor);
        let lone = measured.ceiling.saturating_sub(self.unowned);
        self.most = lone.scaled(1.0 / self.correction_factor).max(lone.saturating_sub(beside));
        (self.alone, self.alone_debt) = match self.trusts_lone() {
            true => (room.saturating_sub(beside), beside.saturating_sub(room)),
            false => (ByteSize::ZERO, ByteSize::MAX),
        };
        room.scaled(1.0 / self.correction_factor).saturating_add(totals.units)
    }

    /// Learns the base: the memory held while next to nothing is reserved. Taken after two quiet
    /// samples, because memory is released a little later than its reservation. Never more than the
    /// memory now held in addition to requests. The base does not grow while a resource is loading:
    /// growth is attributed to that resource.
    fn learn_base(&mut self, totals: LedgerTotals, required: ByteSize, measured: Measured) {
        let quiet = totals.requests <= few(measured.ceiling);
        let requests =
            if quiet { totals.held().scaled(self.correction_factor) } else { ByteSize::ZERO };
        let held = required.saturating_sub(totals.settled).saturating_sub(requests);
        let may_grow = quiet && self.quiet && !totals.is_loading();
        self.base = if may_grow { held } else { self.base.min(held) };
        if may_grow || self.base_min.get() != ByteSize::MAX {
            self.base_min.add(self.base, measured.turnover.time);
        }
        self.quiet = quiet;
    }

    fn learn_k(&mut self, totals: LedgerTotals, required: ByteSize, sample: Measured) {
        let time = sample.turnover.time;
        if totals.requests.is_zero() || totals.requests < few(sample.ceiling) {
            self.unmeasured = self.unmeasured.saturating_add(time);
            let part = (K_FORGETTING * time.as_secs_f64()).min(1.0);
            self.correction_factor += part * (self.start - self.correction_factor);
            return;
        }
        let requests = totals.held();
        if requests < few(sample.ceiling) {
            // Measured requests that hold little yet: no evidence.
            return;
        }
        if self.trusts_lone() {
            // The last measurement is too old.
            (self.peaks, self.overhead) = (Peaks::new(), Overhead::NONE);
        }
        self.unmeasured = Duration::ZERO;
        // The bytes of all resources are subtracted, loaded or not, so that a load does not look
        // like a wrong estimate.
        let held = required.saturating_sub(self.base).saturating_sub(totals.resource_reservations);
        let measured = held.as_f64() / requests.as_f64();
        let evident = requests.get() >= sample.ceiling.get() / EVIDENT_PART;
        if evident {
            self.peaks.add(measured, sample.turnover);
        }
        // While the first bodies are arriving, the bytes they hold prove nothing yet.
        let rising = evident && self.peaks.trend.is_some_and(|trend| measured > trend);
        let peak = K_MARGIN * self.peaks.measures.into_iter().fold(measured, f64::max);
        if !totals.unheld.is_zero() || self.is_measured() {
            // What measured requests hold is known, however much of their bodies has arrived, also
            // if that is all that they reserved.
            if evident {
                self.overhead.add(held.as_f64(), requests.as_f64(), time);
                let measured = self.overhead.correction_factor();
                self.correction_factor = measured.unwrap_or(self.correction_factor);
            }
            return;
        }
        // The part of `K` that may decay.
        let times = time.div_duration_f64(K_DECAY_TIME).clamp(1.0, K_DECAY_TIMES);
        let decay = if rising || !evident { 0.0 } else { K_DECAY * times };
        let decayed = self.correction_factor * (1.0 - decay * (K_EVIDENCE * measured).min(1.0));
        // With few reserved bytes, memory held in addition counts once, as part of `other`.
        let most = if evident { K_MAX } else { self.correction_factor };
        self.correction_factor = peak.min(most).max(decayed).clamp(K_MIN, K_MAX);
    }
}

#[cfg(all(test, not(lowtide_loom)))]
pub(super) mod tests {
    use super::*;

    const CEILING: ByteSize = ByteSize::mib(800);

    pub(crate) fn sample(physical: u64, purgeable: u64) -> Measured {
        Measured {
            physical: ByteSize::mib(physical),
            purgeable: ByteSize::mib(purgeable),
            ceiling: CEILING,
            ..Measured::default()
        }
    }

    fn requests(mib: u64) -> LedgerTotals {
        LedgerTotals { requests: ByteSize::mib(mib), ..LedgerTotals::default() }
    }

    fn after(millis: u64, ended: u64, held: u64, physical: u64) -> Measured {
        let turnover = RequestRate { time: Duration::from_millis(millis), ended, held };
        Measured { turnover, ..sample(physical, 0) }
    }

    /// The bug: memory that no request owned seemed to be the part of a resource that was still to
    /// be loaded, and was given out a second time.
    #[test]
    fn memory_without_an_owner_hid_behind_a_resource_that_was_loading() {
        let mut correction = Correction::starting_at(K_MIN);
        let _ = correction.update(requests(0), sample(100, 0));
        let cache = || sample(300, 0); // 200 MiB more than the base
        let small = |loading| LedgerTotals {
            resource_reservations: ByteSize::mib(loading),
            ..requests(50)
        };
        let _ = correction.update(small(0), cache());
        assert_eq!(correction.base, ByteSize::mib(100));
        let room = CEILING.saturating_sub(correction.other);
        let _ = correction.update(small(300), cache());
        let left = CEILING.saturating_sub(correction.other);
        assert_eq!(left, room.saturating_sub(ByteSize::mib(300)));
        let _ = correction.update(small(300), sample(200, 0));
        let left = CEILING.saturating_sub(correction.other);
        assert_eq!(left, room.saturating_sub(ByteSize::mib(200)), "100 MiB of it were freed");
    }

    /// The bug: small requests waited while the poll of another one outgrew its claim, because each
    /// was expected to need as many times its reservation.
    #[test]
    fn a_poll_that_outgrows_its_claim_says_nothing_of_other_requests() {
        let totals = LedgerTotals { unheld: ByteSize::mib(20), ..requests(150) };
        let room = |outgrown| {
            let mut correction = Correction::starting_at(1.0);
            let _ = correction.update(requests(0), sample(100, 0));
            let outgrown = ByteSize::mib(outgrown);
            let mut room = ByteSize::ZERO;
            for _ in 0..100 {
                room = correction.update(totals, Measured { outgrown, ..sample(530, 0) });
            }
            (room.saturating_sub(totals.requests), correction)
        };
        let (told, correction) = room(300);
        assert!(correction.correction_factor < 1.1, "{}", correction.correction_factor);
        assert!(told > ByteSize::mib(220), "{told}");
        assert!(correction.unowned < ByteSize::mib(110), "{}", correction.unowned);
        let (untold, correction) = room(0);
        assert!(correction.correction_factor > 3.0 && untold < ByteSize::mib(100), "{untold}");
    }

    #[test]
    fn k_begins_where_it_is_told_to_within_its_bounds_and_goes_back_there() {
        for (start, correction_factor) in
            [(1.0, 1.0), (3.0, 3.0), (0.2, K_MIN), (9.0, K_MAX), (f64::NAN, K_MIN)]
        {
            let correction = Correction::starting_at(start);
            assert!(
                (correction.correction_factor - correction_factor).abs() < 1e-9,
                "{start}: {}",
                correction.correction_factor
            );
        }
        let mut correction = Correction::starting_at(1.0);
        let _ = correction.update(requests(200), sample(500, 0));
        assert!(correction.correction_factor > 2.0, "{}", correction.correction_factor);
        for _ in 0..30 * 60 {
            let _ = correction.update(requests(0), after(1000, 0, 0, 0));
        }
        assert!(
            (correction.correction_factor - 1.0).abs() < 0.01,
            "{}",
            correction.correction_factor
        );
    }

    #[test]
    fn k_rises_at_once_falls_slowly_and_stays_within_its_bounds() {
        let mut correction = Correction::starting_at(K_START);
        let _ = correction.update(requests(100), sample(300, 0));
        assert!(
            (correction.correction_factor - 1.05 * 3.0).abs() < 1e-9,
            "{}",
            correction.correction_factor
        );
        let _ = correction.update(requests(100), sample(100, 0));
        assert!((correction.correction_factor - 0.995 * 1.05 * 3.0).abs() < 1e-9);
        let _ = correction.update(requests(100), sample(100_000, 0));
        assert!((correction.correction_factor - K_MAX).abs() < 1e-9);
        for _ in 0..400 {
            let _ = correction.update(requests(100), sample(90, 0));
        }
        assert!((correction.correction_factor - K_MIN).abs() < 1e-9);
        // Too little is reserved to measure against.
        let _ = correction.update(requests(1), after(1000, 0, 0, 500));
        assert!((correction.correction_factor - K_MIN - K_FORGETTING).abs() < 1e-9);
    }

    /// The bug: bytes that a client had declared and did not send counted as an estimate that was
    /// too high. `K` fell to 1 within seconds, and the next burst did not fit.
    #[test]
    fn announced_bytes_that_did_not_come_taught_that_estimates_are_too_high() {
        let mut correction = Correction::starting_at(K_START);
        for _ in 0..500 {
            let _ = correction.update(requests(600), sample(1, 0));
        }
        assert!(correction.correction_factor > 0.95 * K_START, "{}", correction.correction_factor);
    }

    /// What measured requests hold is known, so that a body which is still arriving is no evidence,
    /// and the factor need not fall slowly.
    #[test]
    fn measured_requests_teach_by_what_they_hold_and_at_once() {
        let totals = |unheld| LedgerTotals { unheld: ByteSize::mib(unheld), ..requests(600) };
        let mut correction = Correction::starting_at(K_START);
        for _ in 0..500 {
            let allowance = correction.update(totals(599), sample(1, 0));
            assert!((correction.correction_factor - K_START).abs() < 1e-9);
            assert_eq!(allowance.get() >> 20, 400, "as if all of them came");
        }
        let allowance = correction.update(totals(400), sample(220, 0));
        let expected = K_MARGIN * 1.1;
        assert!((correction.correction_factor - expected).abs() < 1e-9);
        assert_eq!(allowance.get() >> 20, 692, "800 MiB / 1.155, and nothing else is held");
        // More is held than they hold: it counts at once, and as their overhead if it stays.
        let allowance = correction.update(totals(400), sample(300, 0));
        assert!((correction.correction_factor - K_MARGIN * 1.104).abs() < 1e-9);
        assert_eq!(allowance.get() >> 20, 631, "(800 - 300 + 200 x 1.1592) MiB / 1.1592");
        for _ in 0..1000 {
            let _ = correction.update(totals(400), sample(300, 0));
        }
        assert!((correction.correction_factor - K_MARGIN * 1.5).abs() < 1e-3);
    }

    /// The bug: while each measured request held all that it had reserved, the largest of the last
    /// samples counted, and not their average.
    #[test]
    fn requests_that_hold_all_they_reserved_were_taken_to_be_unmeasured() {
        let totals = |unheld| LedgerTotals { unheld: ByteSize::mib(unheld), ..requests(600) };
        let mut correction = Correction::starting_at(K_START);
        let _ = correction.update(totals(200), sample(400, 0));
        let _ = correction.update(totals(0), sample(1200, 0));
        let factor = correction.correction_factor;
        assert!(factor < K_MARGIN * 1.1, "{factor}: one sample of 2 counts little");
    }

    /// The bug: the factor learned in a burst stayed until the next large request.
    #[test]
    fn what_was_learned_stayed_for_ever_in_an_idle_service() {
        for measured in [400, 50] {
            let mut correction = Correction::starting_at(K_START);
            for _ in 0..2000 {
                let _ = correction.update(requests(100), sample(measured, 0));
            }
            assert!(
                (correction.correction_factor - K_START).abs() > 0.9,
                "{}",
                correction.correction_factor
            );
            for _ in 0..30 * 60 {
                let _ = correction.update(requests(0), after(1000, 0, 0, 10));
            }
            assert!(
                (correction.correction_factor - K_START).abs() < 0.01,
                "{}",
                correction.correction_factor
            );
        }
    }

    /// The bug: bodies that arrive within half of a request's life hold little at first. `K` fell
    /// until they had arrived, and by then more requests were admitted than the limit could hold.
    #[test]
    fn bodies_that_were_still_arriving_taught_that_estimates_are_too_high() {
        let mut correction = Correction::starting_at(K_START);
        for held in 1..=200 {
            let _ = correction.update(requests(300), after(10, 0, 100, 3 * held));
        }
        assert!(correction.correction_factor > 0.99 * K_START, "{}", correction.correction_factor);
        // They end one by one, others come and arrive: what the first ones held is known.
        for _ in 0..200 {
            let _ = correction.update(requests(300), after(10, 1, 100, 250));
        }
        assert!(correction.correction_factor > 0.99 * K_START, "{}", correction.correction_factor);
        // Three generations later the measurement has expired.
        for _ in 0..500 {
            let _ = correction.update(requests(300), after(10, 1, 100, 250));
        }
        assert!(correction.correction_factor < 0.6 * K_START, "{}", correction.correction_factor);
    }

    /// The bug: as a load ended, memory of another process was counted as the last requests'. `K`
    /// rose to 5, and the next burst was rejected.
    #[test]
    fn a_neighbour_was_taken_for_a_wrong_estimate_when_a_load_ended() {
        let mut correction = Correction::starting_at(K_START);
        for reserved in (30..400).rev() {
            let _ = correction.update(requests(reserved), after(10, 1, reserved, reserved + 90));
        }
        assert!(correction.correction_factor < 2.1, "{}", correction.correction_factor);
        // It still counts once.
        let allowance = correction.update(requests(30), after(10, 1, 30, 120)).as_f64();
        let room = ByteSize::mib(800 - 120).as_f64();
        assert!(
            allowance * correction.correction_factor
                <= room + 30.1 * correction.correction_factor * 1_048_576.0
        );
    }

    /// The bug: `K` fell by ticks, so that a loop which ticks 100 ms late needed ten times as long
    /// to learn.
    #[test]
    fn a_late_loop_learned_slowly() {
        let correction_factor = |millis, ticks: u64| {
            let mut correction = Correction::starting_at(K_START);
            for _ in 0..ticks {
                let _ = correction.update(requests(300), after(millis, 100, 100, 300));
            }
            correction.correction_factor
        };
        let (soon, late) = (correction_factor(10, 100), correction_factor(100, 10));
        assert!((soon / late - 1.0).abs() < 0.05, "{soon} and {late}");
    }

    /// The bug: one small request at any time kept the base from being learned, so that the
    /// service's own growth counted as a wrong estimate.
    #[test]
    fn one_small_request_kept_the_base_from_being_learned() {
        let mut correction = Correction::starting_at(K_START);
        for held in (10..=310).step_by(10) {
            let _ = correction.update(requests(1), sample(held, 0));
        }
        assert_eq!(
            correction.base,
            ByteSize::mib(310)
                .saturating_sub(ByteSize::mib(1).scaled(correction.correction_factor))
        );
        let _ = correction.update(requests(50), sample(350, 0));
        assert!(correction.correction_factor < 1.1 * K_START, "{}", correction.correction_factor);
    }

    #[test]
    fn the_base_is_learned_when_quiet_and_purgeable_bytes_do_not_count() {
        let mut correction = Correction::starting_at(K_START);
        let _ = correction.update(requests(0), sample(500, 400));
        assert_eq!(correction.base, ByteSize::mib(100));
        // The first quiet sample after work may still see its memory.
        let _ = correction.update(requests(50), sample(200, 0));
        let _ = correction.update(requests(0), sample(400, 0));
        assert_eq!(correction.base, ByteSize::mib(100));
        let _ = correction.update(requests(0), sample(120, 0));
        assert_eq!(correction.base, ByteSize::mib(120));
        // Held is less than the base while busy: the base was too high.
        let _ = correction.update(requests(30), sample(90, 0));
        assert_eq!(correction.base, ByteSize::mib(90));
        for _ in 0..2 {
            let _ = correction.update(requests(0), sample(500, 0));
        }
        assert_eq!(
            (correction.base, correction.base_min()),
            (ByteSize::mib(500), ByteSize::mib(90))
        );
    }

    #[test]
    fn the_allowance_is_what_the_formula_says() {
        let mut correction = Correction::starting_at(K_START);
        let allowance = correction.update(requests(0), sample(100, 0));
        assert_eq!(allowance, ByteSize::mib((800 - 100) / 2));
        // Twice over the ceiling: nothing may be reserved, and nothing wraps.
        let full = correction.update(requests(0), sample(1600, 0));
        assert_eq!(full, ByteSize::ZERO);
        let none = Measured { ceiling: ByteSize::MAX, ..sample(1600, 0) };
        assert_eq!(correction.update(requests(0), none), ByteSize::MAX);
        let huge = LedgerTotals {
            requests: ByteSize::MAX,
            units: ByteSize::MAX,
            ..LedgerTotals::default()
        };
        let extreme = Measured { physical: ByteSize::MAX, ..sample(0, 0) };
        assert_eq!(correction.update(huge, extreme), ByteSize::MAX);
        let zero = Measured { ceiling: ByteSize::ZERO, ..sample(10, 0) };
        assert_eq!(correction.update(requests(10), zero), ByteSize::ZERO);
    }

    /// The bug: at a cold start, while little was reserved and less had arrived, `K` fell to 1.58
    /// within half a second, and the burst that it admitted was OOM-killed.
    #[test]
    fn k_fell_while_too_little_was_booked_to_tell() {
        let mut correction = Correction::starting_at(K_START);
        let _ = correction.update(requests(0), sample(100, 0));
        for _ in 0..50 {
            let _ = correction.update(requests(90), sample(110, 0));
        }
        assert!(
            (correction.correction_factor - K_START).abs() < 1e-9,
            "{}",
            correction.correction_factor
        );
    }

    #[test]
    fn a_load_beside_requests_is_no_wrong_estimate() {
        let resource_reservations = ByteSize::mib(500);
        for settled in [ByteSize::ZERO, resource_reservations] {
            let mut correction = Correction::starting_at(K_START);
            let _ = correction.update(requests(0), sample(100, 0));
            let totals = LedgerTotals { resource_reservations, settled, ..requests(100) };
            let _ = correction.update(totals, sample(700, 0));
            assert!(
                (correction.correction_factor - 0.995 * K_START).abs() < 1e-9,
                "{}",
                correction.correction_factor
            );
        }
    }
}
