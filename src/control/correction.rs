//! What a ledger's bookings really need, learned from samples: pure, owned by the control loop.
//!
//! It books nothing and reads no signal: it is given what is booked and what is held, and says
//! what may be booked.
//!
//! `K` is measured on requests that were admitted, so a `K` that refuses all of them would stay
//! for ever. Therefore, where nothing has been measured for a while, a request that is nearly
//! alone counts once: it is the measurement. Its estimate is taken at its word, once.
//!
//! Invariants: with `requests = booked - units`, `required = physical - purgeable` and
//! `pending` the standing bytes not yet loaded,
//! `other = max(base + standing, required - K x requests + pending)`,
//! `allowance = (ceiling - other) / K + units` and
//! `alone = ceiling - other - K x ceiling / 32`, or 0 while `K` is being measured;
//! `K = max(1.05 x peak, (1 - .005 x min(8 x measured, 1)) x K)` held within 1 to 5, with `peak`
//! the largest measure of the last three generations of requests, and .005 for each 10 ms: bytes
//! that are booked and not used yet are no evidence that they will not be. What is not measured
//! goes back to where it started, slowly.

use std::time::Duration;

use crate::bytes::ByteSize;

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
/// `K` moves only where requests have booked the ceiling divided by this: beside fewer bytes, what
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
pub(super) const K_FORGETTING: f64 = 0.001;
/// `K` is measured only where requests have booked at least the ceiling divided by this: below it
/// the noise of the sample is larger than what it measures.
pub(super) const MEASURED_PART: u64 = 32;
/// After so many corrections without a measurement a request that is nearly alone counts once: two
/// seconds of an idle service. A guess.
pub(super) const UNMEASURED: u32 = 8;

/// What requests may have booked for one more to be nearly alone.
pub(super) fn few(ceiling: ByteSize) -> ByteSize {
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
    pub(super) k: f64,
    /// What is held when nothing is booked.
    base: ByteSize,
    /// Whether next to nothing was booked at the last sample either.
    quiet: bool,
    /// Updates since `K` was last measured.
    unmeasured: u32,
    pub(super) alone: ByteSize,
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
        let decay = if rising || !evident { 0.0 } else { sample.turnover.decay() };
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
