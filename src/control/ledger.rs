//! The account of booked bytes of one budget, and how measurement corrects it.
//!
//! [`Ledger`] is shared and atomic: an admission is one compare-and-exchange. [`Correction`] is
//! owned by the control loop and says what may be booked. Neither sheds by level nor reads a
//! signal.
//!
//! Two kinds of bookings. A request's is an estimate: it counts `K` times, with `K` learned from
//! measurement. A resource's (a loaded model) is *standing*: it stays for hours, its size is known,
//! and it counts once. So that both share one atomic admission, a standing booking of `F` bytes
//! takes `units = F / K` of the allowance when it is booked, and the allowance is raised by those
//! units from the next correction on, when `F` has become part of `other`.
//!
//! `K` is measured on requests that were admitted, so a `K` that refuses all of them would stay
//! for ever. Therefore, where nothing has been measured for a while, a request that is nearly
//! alone counts once: it is the measurement. Its estimate is taken at its word, once.
//!
//! Invariants: at every booking `booked + asked <= allowance`, or `requests <= ceiling / 32` and
//! `asked <= alone`; with `requests = booked - units`, `required = physical - purgeable` and
//! `pending` the standing bytes not yet loaded,
//! `other = max(base + standing, required - K x requests + pending)`,
//! `allowance = (ceiling - other) / K + units` and
//! `alone = ceiling - other - K x ceiling / 32`, or 0 while `K` is being measured;
//! `K = max(1.05 x peak, (1 - .005 x min(8 x measured, 1)) x K)` held within 1 to 5, with `peak`
//! the
//! largest measure of the last three generations of requests, and .005 for each 10 ms: bytes that
//! are booked and not used yet are no evidence that they will not be. What is not measured goes
//! back
//! to where it started, slowly.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::sync::atomic::{AtomicU64, Ordering};

/// `K` before anything is measured: safe for estimates that are half of the truth.
pub const K_START: f64 = 2.0;
/// `K` is never less: an estimate is never taken for too high.
pub const K_MIN: f64 = 1.0;
/// `K` is never more.
pub const K_MAX: f64 = 5.0;

/// What is added to a measured `K`.
const K_MARGIN: f64 = 1.05;
/// The part of `K` that goes in 10 ms in which less was measured, at most: half of it in 1.4 s.
const K_DECAY: f64 = 0.005;
/// That time, and how many of them a late sample stands for at most.
const K_DECAY_TIME: Duration = Duration::from_millis(10);
const K_DECAY_TIMES: f64 = 25.0;
/// For how many generations of requests `K` is kept where the largest measure was: a body that is
/// still arriving holds less than it will, so that what is held now says little about a life. By
/// time alone `K` fell between two cohorts, and each was larger than the one before. Found with
/// `benches/controller`: two are too few for bodies that take half of a life to arrive.
const GENERATIONS: usize = 3;
/// `K` rises only where requests have booked the ceiling divided by this: beside fewer bytes, what
/// threads or neighbours hold would be taken for theirs. It counts once all the same, as `other`.
const EVIDENT_PART: u64 = 8;
/// Weight of the newest measure in their average, by which it is seen whether the first bodies are
/// still arriving; a guess: 20 samples make two thirds of it.
const TREND_WEIGHT: f64 = 0.05;
/// It goes in full where requests hold one in so many of the bytes that they booked, and in part
/// where they hold less. A guess: well-meant estimates are peaks and hold a tenth on average.
const K_EVIDENCE: f64 = 8.0;
/// The part of the way back to [`K_START`] that `K` goes with a tick without a measurement: half of
/// it in three minutes of an idle service. A guess.
const K_FORGETTING: f64 = 0.001;
/// `K` is measured only where requests have booked at least the ceiling divided by this: below it
/// the noise of the sample is larger than what it measures.
const MEASURED_PART: u64 = 32;
/// After so many corrections without a measurement a request that is nearly alone counts once: two
/// seconds of an idle service. A guess.
const UNMEASURED: u32 = 8;

/// Whose bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Budget {
    /// The host's memory.
    Host,
    /// The device's memory.
    Device,
}

impl Budget {
    /// Its name, lower-case.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::Device => "device",
        }
    }
}

impl fmt::Display for Budget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// Why a booking failed.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
#[error("{asked} more do not fit: {booked} of an allowance of {allowance} are booked")]
pub struct Shortfall {
    /// What was asked for.
    pub asked: ByteSize,
    /// What was booked at that moment.
    pub booked: ByteSize,
    /// What may be booked.
    pub allowance: ByteSize,
}

/// What a standing booking holds; given back to [`Ledger::release_standing`].
#[derive(Debug, PartialEq, Eq)]
#[must_use = "what is not released stays booked"]
pub(crate) struct Standing {
    bytes: ByteSize,
    units: u64,
    settled: bool,
}

impl Standing {
    /// Its bytes.
    #[must_use]
    pub(crate) const fn bytes(&self) -> ByteSize {
        self.bytes
    }
}

/// The account: shared by all who book. Starts without a limit, until the first correction. It is
/// booked on through [`Admission`](super::admission::Admission) only, whose permits give back
/// exactly what they took.
#[derive(Debug)]
pub struct Ledger {
    booked: AtomicU64,
    /// Written by the control loop only.
    allowance: AtomicU64,
    /// Written by the control loop only.
    ceiling: AtomicU64,
    /// What a request may book that is nearly alone. Written by the control loop only.
    alone: AtomicU64,
    /// Bits of an `f64`. Written by the control loop only.
    k: AtomicU64,
    /// What standing bookings hold of `booked`.
    units: AtomicU64,
    standing: AtomicU64,
    /// The part of `standing` that is loaded, and so part of what is measured.
    settled: AtomicU64,
}

impl Ledger {
    /// An empty account without a limit.
    #[must_use]
    pub fn new() -> Self {
        Self {
            booked: AtomicU64::new(0),
            allowance: AtomicU64::new(u64::MAX),
            ceiling: AtomicU64::new(u64::MAX),
            alone: AtomicU64::new(0),
            k: AtomicU64::new(K_START.to_bits()),
            units: AtomicU64::new(0),
            standing: AtomicU64::new(0),
            settled: AtomicU64::new(0),
        }
    }

    /// An empty account with a ceiling that stays, for use without measurement: each byte counts
    /// once (`K = 1`), and what is booked never passes the ceiling. A [`Ledger::correct`] by a
    /// control loop ends that.
    #[must_use]
    pub fn with_ceiling(ceiling: ByteSize) -> Self {
        Self {
            allowance: AtomicU64::new(ceiling.get()),
            ceiling: AtomicU64::new(ceiling.get()),
            k: AtomicU64::new(K_MIN.to_bits()),
            ..Self::new()
        }
    }

    /// Books bytes of a request if they fit; no bytes always fit. One compare-and-exchange, tried
    /// again only when another thread's booking came in between.
    ///
    /// # Errors
    /// Where the bytes fit neither beside what is booked nor alone (see the module), or the sum
    /// does not fit 64 bits; nothing is booked then.
    pub(crate) fn try_book(&self, bytes: ByteSize) -> Result<(), Shortfall> {
        let alone = self.alone.load(Ordering::Relaxed);
        let few = few(self.ceiling()).get();
        self.book_where(bytes, |booked| {
            bytes.get() <= alone && booked.saturating_sub(self.units.load(Ordering::Relaxed)) <= few
        })
    }

    /// Books bytes where the allowance has room, or what is booked before them does no harm.
    fn book_where(&self, bytes: ByteSize, harmless: impl Fn(u64) -> bool) -> Result<(), Shortfall> {
        if bytes.is_zero() {
            return Ok(());
        }
        let allowance = self.allowance.load(Ordering::Relaxed);
        let mut booked = self.booked.load(Ordering::Relaxed);
        // Ends: a failed exchange means that another one succeeded (or, rarely, a spurious one).
        loop {
            let fits = |sum: &u64| *sum <= allowance || harmless(booked);
            let Some(sum) = booked.checked_add(bytes.get()).filter(fits) else {
                return Err(Shortfall {
                    asked: bytes,
                    booked: ByteSize::new(booked),
                    allowance: ByteSize::new(allowance),
                });
            };
            let exchanged = self.booked.compare_exchange_weak(
                booked,
                sum,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return Ok(()),
                Err(now) => booked = now,
            }
        }
    }

    /// Books as much of the bytes as 64 bits hold, whatever the allowance says: for what is exempt.
    /// Says what was booked, which is what has to be released.
    pub(crate) fn book_exempt(&self, bytes: ByteSize) -> ByteSize {
        let mut booked = self.booked.load(Ordering::Relaxed);
        loop {
            let sum = booked.saturating_add(bytes.get());
            let exchanged = self.booked.compare_exchange_weak(
                booked,
                sum,
                Ordering::Relaxed,
                Ordering::Relaxed,
            );
            match exchanged {
                Ok(_) => return ByteSize::new(sum - booked),
                Err(now) => booked = now,
            }
        }
    }

    /// Gives back bytes that were booked, no more than were.
    pub(crate) fn release(&self, bytes: ByteSize) {
        let before = self.booked.fetch_sub(bytes.get(), Ordering::Relaxed);
        debug_assert!(before >= bytes.get(), "released {bytes}, booked were {before} bytes");
    }

    /// Books what will stay: counted once, not `K` times.
    ///
    /// # Errors
    /// As for [`Ledger::try_book`].
    pub(crate) fn try_book_standing(&self, bytes: ByteSize) -> Result<Standing, Shortfall> {
        let units = units_of(bytes, self.k());
        self.book_where(ByteSize::new(units), |_| false)
            .map_err(|short| Shortfall { asked: bytes, ..short })?;
        // After the booking: a correction in between takes the units for a request's, which is
        // the same room.
        self.standing.fetch_add(bytes.get(), Ordering::Relaxed);
        self.units.fetch_add(units, Ordering::Relaxed);
        Ok(Standing { bytes, units, settled: false })
    }

    /// Says that what was booked is loaded now, and so part of what is measured.
    pub(crate) fn settle(&self, standing: &mut Standing) {
        if !std::mem::replace(&mut standing.settled, true) {
            self.settled.fetch_add(standing.bytes.get(), Ordering::Relaxed);
        }
    }

    /// Gives a standing booking back, after its memory has been given back.
    pub(crate) fn release_standing(&self, standing: Standing) {
        if standing.settled {
            self.settled.fetch_sub(standing.bytes.get(), Ordering::Relaxed);
        }
        // In the reverse order of booking, so that `units <= booked` for who reads in between.
        self.units.fetch_sub(standing.units, Ordering::Relaxed);
        self.standing.fetch_sub(standing.bytes.get(), Ordering::Relaxed);
        self.release(ByteSize::new(standing.units));
    }

    /// All that is booked, standing bookings by their units.
    #[must_use]
    pub fn booked(&self) -> ByteSize {
        ByteSize::new(self.booked.load(Ordering::Relaxed))
    }

    /// What requests have booked, not multiplied.
    #[must_use]
    pub fn requests(&self) -> ByteSize {
        let units = self.units.load(Ordering::Relaxed);
        self.booked().saturating_sub(ByteSize::new(units))
    }

    /// What resources have booked.
    #[must_use]
    pub fn standing(&self) -> ByteSize {
        ByteSize::new(self.standing.load(Ordering::Relaxed))
    }

    /// What requests and resources have booked, in the bytes that they gave: `requests + standing`.
    #[must_use]
    pub fn booked_bytes(&self) -> ByteSize {
        self.in_bytes(self.booked())
    }

    /// Up to which [`Ledger::booked_bytes`] a request fits; [`ByteSize::MAX`] where no limit is
    /// known.
    #[must_use]
    pub fn allowance_bytes(&self) -> ByteSize {
        self.in_bytes(self.allowance())
    }

    /// An amount of the allowance with standing bookings by their bytes in place of their units.
    #[must_use]
    pub fn in_bytes(&self, amount: ByteSize) -> ByteSize {
        if amount == ByteSize::MAX {
            return amount;
        }
        let units = ByteSize::new(self.units.load(Ordering::Relaxed));
        amount.saturating_sub(units).saturating_add(self.standing())
    }

    /// What may be booked, standing bookings by their units; [`ByteSize::MAX`] where no limit is
    /// known.
    #[must_use]
    pub fn allowance(&self) -> ByteSize {
        ByteSize::new(self.allowance.load(Ordering::Relaxed))
    }

    /// What may be held altogether; [`ByteSize::MAX`] where no limit is known.
    #[must_use]
    pub fn ceiling(&self) -> ByteSize {
        ByteSize::new(self.ceiling.load(Ordering::Relaxed))
    }

    /// By how much estimates are multiplied.
    #[must_use]
    pub fn k(&self) -> f64 {
        f64::from_bits(self.k.load(Ordering::Relaxed))
    }

    /// Publishes what the control loop found. Called by one owner.
    pub fn correct(&self, correction: &mut Correction, measured: Measured) {
        let books = Books {
            requests: self.requests(),
            units: ByteSize::new(self.units.load(Ordering::Relaxed)),
            standing: self.standing(),
            settled: ByteSize::new(self.settled.load(Ordering::Relaxed)),
        };
        let allowance = correction.update(books, measured);
        self.k.store(correction.k.to_bits(), Ordering::Relaxed);
        self.ceiling.store(measured.ceiling.get(), Ordering::Relaxed);
        self.allowance.store(allowance.get(), Ordering::Relaxed);
        self.alone.store(correction.alone.get(), Ordering::Relaxed);
    }
}

impl Default for Ledger {
    fn default() -> Self {
        Self::new()
    }
}

/// The allowance that `bytes` of standing memory take at this `K`, rounded up; none for no bytes,
/// which always fit, and all of it for [`ByteSize::MAX`].
fn units_of(bytes: ByteSize, k: f64) -> u64 {
    match bytes {
        ByteSize::ZERO => 0,
        ByteSize::MAX => u64::MAX,
        _ => bytes.scaled(1.0 / k).get().saturating_add(1),
    }
}

/// What requests may have booked for one more to be nearly alone.
fn few(ceiling: ByteSize) -> ByteSize {
    ByteSize::new(ceiling.get() / MEASURED_PART)
}

/// What a sample says about one budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Measured {
    /// What counts against the limit.
    pub physical: ByteSize,
    /// The part of it that a purge of ours gives back.
    pub purgeable: ByteSize,
    /// What may be held altogether; [`ByteSize::MAX`] where no limit is known.
    pub ceiling: ByteSize,
    /// How far requests have come since the sample before.
    pub turnover: Turnover,
}

/// What has become of requests between two samples; the default, which knows nothing of requests,
/// stands for 10 ms in which all lives were lived.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Turnover {
    /// The time between them.
    pub time: Duration,
    /// How many requests have ended.
    pub ended: u64,
    /// How many are held now.
    pub held: u64,
}

impl Turnover {
    /// The part of `K` that may go.
    fn decay(self) -> f64 {
        let times = self.time.as_secs_f64() / K_DECAY_TIME.as_secs_f64();
        K_DECAY * times.clamp(1.0, K_DECAY_TIMES)
    }
}

/// The largest measures of the last generations. One is over when as many requests have ended as
/// were held in it at most.
#[derive(Clone, Copy, Debug)]
struct Peaks {
    /// The present one first.
    measures: [f64; GENERATIONS],
    ended: u64,
    held: u64,
    /// The average of the last measures, while no generation is over.
    trend: Option<f64>,
}

impl Peaks {
    const fn new() -> Self {
        Self { measures: [0.0; GENERATIONS], ended: 0, held: 0, trend: Some(0.0) }
    }

    /// Takes a measure in.
    fn add(&mut self, measure: f64, turnover: Turnover) {
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

    /// Whether the first bodies are arriving: what is held by them is no evidence yet. Asked once
    /// the measure is in.
    fn is_rising(&self, measure: f64) -> bool {
        self.trend.is_some_and(|trend| measure > trend)
    }

    fn largest(&self) -> f64 {
        self.measures.into_iter().fold(0.0, f64::max)
    }
}

/// What a ledger holds at one instant.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Books {
    /// Booked by requests.
    pub requests: ByteSize,
    /// What standing bookings take of the allowance.
    pub units: ByteSize,
    /// Booked by resources.
    pub standing: ByteSize,
    /// The part of `standing` that is loaded.
    pub settled: ByteSize,
}

/// What is learned from samples: pure, owned by the control loop.
#[derive(Clone, Debug)]
pub struct Correction {
    k: f64,
    /// What is held when nothing is booked.
    base: ByteSize,
    /// Whether next to nothing was booked at the last sample either.
    quiet: bool,
    /// Updates since `K` was last measured.
    unmeasured: u32,
    alone: ByteSize,
    peaks: Peaks,
}

impl Correction {
    /// Nothing learned yet.
    #[must_use]
    pub const fn new() -> Self {
        Self {
            k: K_START,
            base: ByteSize::ZERO,
            quiet: true,
            unmeasured: UNMEASURED,
            alone: ByteSize::ZERO,
            peaks: Peaks::new(),
        }
    }

    /// By how much estimates are multiplied.
    #[must_use]
    pub const fn k(&self) -> f64 {
        self.k
    }

    /// What is held when nothing is booked.
    #[must_use]
    pub const fn base(&self) -> ByteSize {
        self.base
    }

    /// Learns from a sample and says what may be booked.
    pub fn update(&mut self, books: Books, measured: Measured) -> ByteSize {
        let required = measured.physical.saturating_sub(measured.purgeable);
        self.learn_base(books, required, measured.ceiling);
        self.learn_k(books, required, measured);
        debug_assert!((K_MIN..=K_MAX).contains(&self.k), "K is {}", self.k);
        if measured.ceiling == ByteSize::MAX {
            return ByteSize::MAX;
        }
        let pending = books.standing.saturating_sub(books.settled);
        let unbooked = required.saturating_sub(books.requests.scaled(self.k));
        let other = unbooked.saturating_add(pending).max(self.base.saturating_add(books.standing));
        let room = measured.ceiling.saturating_sub(other);
        self.alone = match self.unmeasured {
            UNMEASURED.. => room.saturating_sub(few(measured.ceiling).scaled(self.k)),
            _ => ByteSize::ZERO,
        };
        room.scaled(1.0 / self.k).saturating_add(books.units)
    }

    /// The base is what is held while next to nothing is booked: taken after two quiet samples,
    /// because memory goes a little later than its booking. It is never more than what is held
    /// beside requests now.
    fn learn_base(&mut self, books: Books, required: ByteSize, ceiling: ByteSize) {
        let quiet = books.requests <= few(ceiling);
        let held = required.saturating_sub(books.settled);
        let held = if quiet { held.saturating_sub(books.requests.scaled(self.k)) } else { held };
        self.base = if quiet && self.quiet { held } else { self.base.min(held) };
        self.quiet = quiet;
    }

    fn learn_k(&mut self, books: Books, required: ByteSize, sample: Measured) {
        if books.requests.is_zero() || books.requests < few(sample.ceiling) {
            self.unmeasured = self.unmeasured.saturating_add(1);
            self.k += K_FORGETTING * (K_START - self.k);
            return;
        }
        if self.unmeasured >= UNMEASURED {
            // What was measured is long ago.
            self.peaks = Peaks::new();
        }
        self.unmeasured = 0;
        // All standing bytes are taken off, loaded or not: a load must not look like a wrong
        // estimate.
        let held = required.saturating_sub(self.base).saturating_sub(books.standing);
        let measured = held.as_f64() / books.requests.as_f64();
        let evident = books.requests.get() >= sample.ceiling.get() / EVIDENT_PART;
        if evident {
            self.peaks.add(measured, sample.turnover);
        }
        let rising = evident && self.peaks.is_rising(measured);
        let peak = K_MARGIN * self.peaks.largest().max(measured);
        let decay = if rising { 0.0 } else { sample.turnover.decay() };
        let decayed = self.k * (1.0 - decay * (K_EVIDENCE * measured).min(1.0));
        // What is held beside few booked bytes counts once, among `other`.
        let most = if evident { K_MAX } else { self.k };
        self.k = peak.min(most).max(decayed).clamp(K_MIN, K_MAX);
    }
}

impl Default for Correction {
    fn default() -> Self {
        Self::new()
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const CEILING: ByteSize = ByteSize::mib(800);

    fn sample(physical: u64, purgeable: u64) -> Measured {
        Measured {
            physical: ByteSize::mib(physical),
            purgeable: ByteSize::mib(purgeable),
            ceiling: CEILING,
            ..Measured::default()
        }
    }

    fn requests(mib: u64) -> Books {
        Books { requests: ByteSize::mib(mib), ..Books::default() }
    }

    #[test]
    fn bookings_hold_at_the_ends() {
        let ledger = Ledger::new();
        assert_eq!(ledger.try_book(ByteSize::ZERO), Ok(()));
        assert_eq!(ledger.try_book(ByteSize::MAX), Ok(()));
        let short = ledger.try_book(ByteSize::new(1)).expect_err("no 64 bits hold it");
        assert_eq!(short.booked, ByteSize::MAX);
        assert_eq!(ledger.try_book(ByteSize::ZERO), Ok(()));
        assert_eq!(ledger.book_exempt(ByteSize::new(9)), ByteSize::ZERO);
        ledger.release(ByteSize::MAX);
        assert_eq!(ledger.booked(), ByteSize::ZERO);
        let standing = ledger.try_book_standing(ByteSize::MAX).expect("no limit");
        ledger.release_standing(standing);
        assert_eq!(ledger.booked(), ByteSize::ZERO);
    }

    #[test]
    fn a_booking_that_does_not_fit_leaves_no_trace_and_names_the_numbers() {
        let ledger = Ledger::new();
        ledger.correct(&mut Correction::new(), sample(0, 0));
        assert_eq!(ledger.allowance(), ByteSize::mib(400)); // 800 MiB at K = 2
        ledger.try_book(ByteSize::mib(399)).expect("fits");
        let asked = ByteSize::mib(2);
        let allowance = ByteSize::mib(400);
        let expected = Shortfall { asked, booked: ByteSize::mib(399), allowance };
        assert_eq!(ledger.try_book(asked), Err(expected));
        ledger.try_book(ByteSize::mib(1)).expect("fits to the byte");
        assert_eq!(ledger.booked(), allowance);
        assert!(ledger.try_book(ByteSize::MAX).is_err());
    }

    #[test]
    fn k_rises_at_once_falls_slowly_and_stays_within_its_bounds() {
        let mut correction = Correction::new();
        let _ = correction.update(requests(100), sample(300, 0));
        assert!((correction.k() - 1.05 * 3.0).abs() < 1e-9, "{}", correction.k());
        let _ = correction.update(requests(100), sample(100, 0));
        assert!((correction.k() - 0.995 * 1.05 * 3.0).abs() < 1e-9);
        let _ = correction.update(requests(100), sample(100_000, 0));
        assert!((correction.k() - K_MAX).abs() < 1e-9);
        for _ in 0..400 {
            let _ = correction.update(requests(100), sample(90, 0));
        }
        assert!((correction.k() - K_MIN).abs() < 1e-9);
        // Too little is booked to measure against.
        let _ = correction.update(requests(1), sample(500, 0));
        assert!((correction.k() - K_MIN - K_FORGETTING).abs() < 1e-9);
    }

    /// The bug: bytes that a client had announced and did not send were taken for an estimate that
    /// was too high, `K` fell to 1 within seconds, and the burst after that did not fit.
    #[test]
    fn announced_bytes_that_did_not_come_taught_that_estimates_are_too_high() {
        let mut correction = Correction::new();
        for _ in 0..500 {
            let _ = correction.update(requests(600), sample(1, 0));
        }
        assert!(correction.k() > 0.95 * K_START, "{}", correction.k());
    }

    /// The bug: what a burst had taught stayed for as long as nothing large came.
    #[test]
    fn what_was_learned_stayed_for_ever_in_an_idle_service() {
        for measured in [400, 50] {
            let mut correction = Correction::new();
            for _ in 0..2000 {
                let _ = correction.update(requests(100), sample(measured, 0));
            }
            assert!((correction.k() - K_START).abs() > 0.9, "{}", correction.k());
            for _ in 0..4 * 60 * 30 {
                let _ = correction.update(requests(0), sample(10, 0));
            }
            assert!((correction.k() - K_START).abs() < 0.01, "{}", correction.k());
        }
    }

    fn after(millis: u64, ended: u64, held: u64, physical: u64) -> Measured {
        let turnover = Turnover { time: Duration::from_millis(millis), ended, held };
        Measured { turnover, ..sample(physical, 0) }
    }

    /// The bug: bodies that arrive within half of a request's life hold little at first. `K` fell
    /// until they were there, and by then more had been admitted than the limit could hold.
    #[test]
    fn bodies_that_were_still_arriving_taught_that_estimates_are_too_high() {
        let mut correction = Correction::new();
        for held in 1..=200 {
            let _ = correction.update(requests(300), after(10, 0, 100, 3 * held));
        }
        assert!(correction.k() > 0.99 * K_START, "{}", correction.k());
        // They end one by one, others come and arrive: what the first ones held is known.
        for _ in 0..200 {
            let _ = correction.update(requests(300), after(10, 1, 100, 250));
        }
        assert!(correction.k() > 0.99 * K_START, "{}", correction.k());
        // Three generations later it is not true any more.
        for _ in 0..500 {
            let _ = correction.update(requests(300), after(10, 1, 100, 250));
        }
        assert!(correction.k() < 0.6 * K_START, "{}", correction.k());
    }

    /// The bug: what a neighbour held was taken for the last requests' as a load ended, `K` rose to
    /// 5, and the next burst was shed.
    #[test]
    fn a_neighbour_was_taken_for_a_wrong_estimate_when_a_load_ended() {
        let mut correction = Correction::new();
        for booked in (30..400).rev() {
            let _ = correction.update(requests(booked), after(10, 1, booked, booked + 90));
        }
        assert!(correction.k() < 2.1, "{}", correction.k());
        // It counts once all the same.
        let allowance = correction.update(requests(30), after(10, 1, 30, 120)).as_f64();
        let room = ByteSize::mib(800 - 120).as_f64();
        assert!(allowance * correction.k() <= room + 30.1 * correction.k() * 1_048_576.0);
    }

    /// The bug: `K` fell by ticks, so that a loop which ticks 100 ms late needed ten times as long
    /// to find out what is true.
    #[test]
    fn a_late_loop_learned_slowly() {
        let k = |millis, ticks: u64| {
            let mut correction = Correction::new();
            for _ in 0..ticks {
                let _ = correction.update(requests(300), after(millis, 100, 100, 300));
            }
            correction.k()
        };
        let (soon, late) = (k(10, 100), k(100, 10));
        assert!((soon / late - 1.0).abs() < 0.05, "{soon} and {late}");
    }

    /// The bug: one small request at any time was enough for the base never to be learned, so that
    /// the service's own growth was taken for a wrong estimate.
    #[test]
    fn one_small_request_kept_the_base_from_being_learned() {
        let mut correction = Correction::new();
        for held in (10..=310).step_by(10) {
            let _ = correction.update(requests(1), sample(held, 0));
        }
        assert_eq!(
            correction.base(),
            ByteSize::mib(310).saturating_sub(ByteSize::mib(1).scaled(correction.k()))
        );
        let _ = correction.update(requests(50), sample(350, 0));
        assert!(correction.k() < 1.1 * K_START, "{}", correction.k());
    }

    #[test]
    fn the_base_is_learned_when_quiet_and_purgeable_bytes_do_not_count() {
        let mut correction = Correction::new();
        let _ = correction.update(requests(0), sample(500, 400));
        assert_eq!(correction.base(), ByteSize::mib(100));
        // The first quiet sample after work may still see its memory.
        let _ = correction.update(requests(50), sample(200, 0));
        let _ = correction.update(requests(0), sample(400, 0));
        assert_eq!(correction.base(), ByteSize::mib(100));
        let _ = correction.update(requests(0), sample(120, 0));
        assert_eq!(correction.base(), ByteSize::mib(120));
        // Held is less than the base while busy: the base was too high.
        let _ = correction.update(requests(30), sample(90, 0));
        assert_eq!(correction.base(), ByteSize::mib(90));
    }

    #[test]
    fn the_allowance_is_what_the_formula_says() {
        let mut correction = Correction::new();
        let allowance = correction.update(requests(0), sample(100, 0));
        assert_eq!(allowance, ByteSize::mib((800 - 100) / 2));
        // Twice over the ceiling: nothing may be booked, and nothing wraps.
        let full = correction.update(requests(0), sample(1600, 0));
        assert_eq!(full, ByteSize::ZERO);
        let none = Measured { ceiling: ByteSize::MAX, ..sample(1600, 0) };
        assert_eq!(correction.update(requests(0), none), ByteSize::MAX);
        let huge = Books { requests: ByteSize::MAX, units: ByteSize::MAX, ..Books::default() };
        let extreme = Measured { physical: ByteSize::MAX, ..sample(0, 0) };
        assert_eq!(correction.update(huge, extreme), ByteSize::MAX);
        let zero = Measured { ceiling: ByteSize::ZERO, ..sample(10, 0) };
        assert_eq!(correction.update(requests(10), zero), ByteSize::ZERO);
    }

    /// The bug: `K` starts at 2 and is learned from admitted requests only, so that one which fits
    /// once but not twice was refused each time for ever, with nothing else to do.
    #[test]
    fn a_large_request_was_refused_for_ever_by_a_k_that_nothing_measured() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        let large = ByteSize::mib(600);
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.allowance() < large, "it does not fit at K = 2");
        ledger.try_book(ByteSize::mib(20)).expect("a small one leaves it nearly alone");
        ledger.try_book(large).expect("alone");
        assert!(ledger.try_book(ByteSize::mib(5)).is_err(), "and no second one");
        // It is measured now, and turns out to need what it said: so do those after it.
        ledger.correct(&mut correction, sample(720, 0));
        assert!(correction.k() < K_START);
        ledger.release(ByteSize::mib(620));
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.try_book(large).is_err(), "K was measured a moment ago, and it is high");
        let mut waits = 0;
        while ledger.try_book(large).is_err() {
            ledger.correct(&mut correction, sample(100, 0));
            waits += 1;
        }
        assert_eq!(waits, UNMEASURED - 1);
        ledger.release(large);
    }

    #[test]
    fn a_resource_and_what_passes_the_ceiling_do_not_count_as_alone() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        ledger.correct(&mut correction, sample(100, 0));
        assert!(ledger.try_book(ByteSize::mib(701)).is_err());
        assert!(ledger.try_book_standing(ByteSize::mib(701)).is_err());
        let model = ledger.try_book_standing(ByteSize::mib(300)).expect("fits");
        ledger.correct(&mut correction, sample(100, 0));
        ledger.try_book(ByteSize::mib(340)).expect("alone beside the resource");
        ledger.release(ByteSize::mib(340));
        assert!(ledger.try_book(ByteSize::mib(401)).is_err(), "the resource counts");
        ledger.release_standing(model);
        ledger.correct(&mut correction, sample(850, 0));
        assert!(ledger.try_book(ByteSize::mib(1)).is_err(), "over the ceiling nothing fits");
    }

    #[test]
    fn a_standing_booking_counts_once_from_booking_to_release() {
        let ledger = Ledger::new();
        let mut correction = Correction::new();
        ledger.correct(&mut correction, sample(100, 0));
        let room = |ledger: &Ledger| ledger.allowance().saturating_sub(ledger.booked()).get();
        let near = |found: u64, mib: u64| found.abs_diff(ByteSize::mib(mib).get()) <= 4;
        assert!(near(room(&ledger), 350));
        // 500 MiB fit though K x 500 MiB would not.
        let mut model = ledger.try_book_standing(ByteSize::mib(500)).expect("fits");
        assert!(near(room(&ledger), 100), "booked: {}", room(&ledger));
        for physical in [100, 350, 600] {
            ledger.correct(&mut correction, sample(physical, 0));
            assert!(room(&ledger) <= ByteSize::mib(100).get() + 4, "while loading");
        }
        ledger.settle(&mut model);
        ledger.correct(&mut correction, sample(600, 0));
        assert!(near(room(&ledger), 100), "loaded: {}", room(&ledger));
        assert!((correction.k() - K_START).abs() < 1e-9, "a load is no wrong estimate");
        assert!(ledger.try_book_standing(ByteSize::mib(201)).is_err());
        // It said 500 MiB and all that is held is 400 as yet: what it said stays its own.
        ledger.correct(&mut correction, sample(400, 0));
        assert!(near(room(&ledger), 150), "smaller: {}", room(&ledger));
        ledger.release_standing(model);
        ledger.correct(&mut correction, sample(100, 0));
        assert!(near(room(&ledger), 350));
        assert_eq!((ledger.booked(), ledger.standing()), (ByteSize::ZERO, ByteSize::ZERO));
    }

    #[test]
    fn a_load_beside_requests_is_no_wrong_estimate() {
        let standing = ByteSize::mib(500);
        for settled in [ByteSize::ZERO, standing] {
            let mut correction = Correction::new();
            let _ = correction.update(requests(0), sample(100, 0));
            let books = Books { standing, settled, ..requests(50) };
            let _ = correction.update(books, sample(650, 0));
            assert!((correction.k() - 0.995 * K_START).abs() < 1e-9, "{}", correction.k());
        }
    }

    #[test]
    fn threads_never_book_more_than_the_allowance_and_releases_balance() {
        let ledger = Ledger::new();
        ledger.correct(&mut Correction::new(), sample(0, 0));
        let allowance = ledger.allowance();
        std::thread::scope(|scope| {
            for seed in 1..=4_u64 {
                let ledger = &ledger;
                scope.spawn(move || {
                    let mut state = seed;
                    for _ in 0..20_000 {
                        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                        let bytes = ByteSize::new(state >> 36);
                        if ledger.try_book(bytes).is_ok() {
                            assert!(ledger.booked() <= allowance);
                            ledger.release(bytes);
                        }
                    }
                });
            }
        });
        assert_eq!(ledger.booked(), ByteSize::ZERO);
    }
}

#[cfg(all(test, lowtide_loom))]
mod models {
    use super::*;

    #[test]
    fn booked_never_exceeds_a_constant_allowance_and_releases_balance() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            ledger.allowance.store(10, Ordering::Relaxed);
            let threads: Vec<_> = [6, 5]
                .into_iter()
                .map(|bytes| {
                    let ledger = loom::sync::Arc::clone(&ledger);
                    loom::thread::spawn(move || {
                        if ledger.try_book(ByteSize::new(bytes)).is_ok() {
                            assert!(ledger.booked() <= ByteSize::new(10));
                            ledger.release(ByteSize::new(bytes));
                        }
                    })
                })
                .collect();
            assert!(ledger.booked() <= ByteSize::new(10));
            for thread in threads {
                thread.join().expect("no panic");
            }
            assert_eq!(ledger.booked(), ByteSize::ZERO);
        });
    }

    #[test]
    fn of_two_that_are_alone_one_is() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            ledger.allowance.store(0, Ordering::Relaxed);
            ledger.ceiling.store(MEASURED_PART, Ordering::Relaxed);
            ledger.alone.store(6, Ordering::Relaxed);
            let other = loom::sync::Arc::clone(&ledger);
            let thread = loom::thread::spawn(move || other.try_book(ByteSize::new(6)).is_ok());
            let mine = ledger.try_book(ByteSize::new(5)).is_ok();
            let theirs = thread.join().expect("no panic");
            assert!(mine != theirs);
        });
    }

    #[test]
    fn units_of_standing_bookings_are_never_more_than_what_is_booked() {
        loom::model(|| {
            let ledger = loom::sync::Arc::new(Ledger::new());
            let other = loom::sync::Arc::clone(&ledger);
            let thread = loom::thread::spawn(move || {
                let mut standing = other.try_book_standing(ByteSize::new(8)).expect("no limit");
                other.settle(&mut standing);
                other.release_standing(standing);
            });
            assert!(ledger.requests() <= ByteSize::new(5));
            thread.join().expect("no panic");
            assert_eq!(ledger.booked(), ByteSize::ZERO);
            assert_eq!(ledger.standing(), ByteSize::ZERO);
        });
    }
}
