//! The figures of the last tick, shared with the worker, metrics and endpoints.
//!
//! The control loop publishes all of them at once at the end of its tick, and any thread reads
//! them. It decides nothing.
//!
//! Invariants: `required = physical - purgeable`; all figures are of one tick; a level that is read
//! here is in force.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::ceiling::CeilingParts;
use crate::cost::Budget;
use crate::limit_advice::{LimitAdvice, LimitRecord};
use crate::pressure::Level;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Bell;
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Mutex, lock, try_lock};

use super::purging::purgeable_now;
use super::saturation::LEDGERS;
use super::{Sample, Trigger};

/// The figures of one tick. By default nothing is held, as before the first one.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Figures {
    pub(super) sample: Sample,
    /// The limit of the sample, or [`ByteSize::MAX`].
    pub(super) limit: ByteSize,
    /// By budget: the level, and the bytes to release to fall below the lowest threshold.
    pub(super) levels: [Level; 2],
    pub(super) wanted: [ByteSize; 2],
    /// How often the host has entered each level.
    pub(super) entered: [u64; 4],
    pub(super) ceiling_parts: CeilingParts,
    pub(super) saturation: f64,
    /// The averages of the ledgers: the host's first, then those of the devices.
    pub(super) utilizations: [Option<f64>; LEDGERS],
    pub(super) is_exhausted: bool,
    pub(super) serves_one: bool,
    pub(super) needs_restart: bool,
}

/// The jobs for the worker, and the figures of the last tick for the worker, metrics and endpoints.
#[derive(Debug, Default)]
pub struct PressureState {
    pub(super) figures: Mutex<Figures>,
    physical_peak: AtomicU64,
    pub(super) ticks: AtomicU64,
    /// The largest delay of a tick, in nanoseconds.
    pub(super) late: AtomicU64,
    /// The bits of the pending jobs.
    pub(super) pending: AtomicU64,
    pub(super) closed: AtomicBool,
    pub(super) bell: Arc<Bell>,
    /// The control loop tries the lock; what it missed is part of its next sample.
    pub(super) limits: Mutex<LimitRecord>,
    birth: Birth,
}

impl PressureState {
    /// Returns the figures of the last tick.
    pub(super) fn figures(&self) -> Figures {
        // In a forked child the control loop may have held the lock.
        let figures = self.birth.is_here().then(|| lock(&self.figures));
        let figures = figures.or_else(|| try_lock(&self.figures));
        figures.map_or_else(Figures::default, |figures| *figures)
    }

    /// Replaces the figures.
    pub(super) fn publish(&self, figures: &Figures) {
        self.physical_peak.fetch_max(figures.sample.physical.get(), Ordering::Relaxed);
        *lock(&self.figures) = *figures;
    }

    /// Returns the bytes that count against the host's limit, without the
    /// [unreleased](Sample::unreleased) ones.
    #[must_use]
    pub fn physical(&self) -> ByteSize {
        self.sample().physical
    }

    /// Returns the largest physical bytes of a sample since the last call of this method; zero
    /// without a sample.
    #[must_use]
    pub fn take_physical_peak(&self) -> ByteSize {
        ByteSize::new(self.physical_peak.swap(0, Ordering::Relaxed))
    }

    /// Returns the last sample.
    #[must_use]
    pub fn sample(&self) -> Sample {
        self.figures().sample
    }

    /// Returns the part of the physical bytes that a purge with this trigger releases.
    pub(super) fn purgeable_by(&self, trigger: Trigger) -> ByteSize {
        let sample = self.sample();
        if trigger.leaves_decaying() { purgeable_now(&sample) } else { sample.purgeable }
    }

    /// Returns the host's limit, or [`ByteSize::MAX`] if none is known.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        self.figures().limit
    }

    /// Returns the averages of [`Ledger::utilization`](crate::Ledger::utilization) over the last
    /// seconds: the host's first, then those of the devices in their order.
    pub fn utilizations(&self) -> impl Iterator<Item = Option<f64>> {
        self.figures().utilizations.into_iter()
    }

    /// Returns the level of a budget.
    #[must_use]
    pub fn level(&self, budget: Budget) -> Level {
        self.figures().levels[budget as usize]
    }

    /// Returns how often the host has entered a level.
    #[must_use]
    pub fn entered_total(&self, level: Level) -> u64 {
        self.figures().entered[level as usize]
    }

    /// Returns the parts of the host's ceiling; zeros without a limit.
    #[must_use]
    pub fn ceiling_parts(&self) -> CeilingParts {
        self.figures().ceiling_parts
    }

    /// Returns how near the service is to rejecting requests for lack of memory, 0 to 1.
    ///
    /// It is the part of the room for requests that is taken by what they have reserved and by one
    /// more request of a thirty-second of the ceiling; the largest such part of all budgets, those
    /// of the host and of devices. Room that idle resources take counts as free, since they would
    /// be evicted. It is 1 while requests wait for memory, for a second after each that is rejected
    /// or cancelled for lack of it (but not if it can never fit), at level critical, while memory
    /// is exhausted and once a device is lost; and 0 without a limit.
    ///
    /// The value is a mean over time, of which the last 15 s make 63 % and the last 35 s 90 %.
    /// Updated at each tick.
    #[must_use]
    pub fn saturation(&self) -> f64 {
        self.figures().saturation
    }

    /// Returns `true` if memory that no request owns leaves no room for requests: even the smallest
    /// have been rejected for 5 s, with a completed purge. Ends with the first sample that has
    /// room.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.figures().is_exhausted
    }

    /// Returns `true` if memory is exhausted and single requests are still admitted
    /// ([`ExhaustionPolicy::ServeOne`](crate::ExhaustionPolicy::ServeOne)).
    #[must_use]
    pub fn serves_one(&self) -> bool {
        self.figures().serves_one
    }

    /// Returns `true` if the [`ExhaustionPolicy`](crate::ExhaustionPolicy) asks for a restart of
    /// the process.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.figures().needs_restart
    }

    /// Returns how often the loop has ticked.
    #[must_use]
    pub fn ticks_total(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// Returns the largest delay of a tick since the last call of this method: the time that the
    /// machine kept the loop from running, and so the possible age of a sample.
    #[must_use]
    pub fn take_lateness(&self) -> Duration {
        Duration::from_nanos(self.late.swap(0, Ordering::Relaxed))
    }

    /// Returns what the recorded traffic has needed, for the choice of a limit. Allocates, and
    /// takes a lock for some 50 us.
    #[must_use]
    pub fn limit_advice(&self) -> LimitAdvice {
        lock(&self.limits).advice()
    }
}
