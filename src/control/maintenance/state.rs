//! The figures of the last tick, shared with the worker, metrics and endpoints.
//!
//! Written by the control loop, read by anybody, without a lock. It decides nothing.
//!
//! Invariant: `required = physical - purgeable` as of one tick, or of two where a tick came in
//! between.

use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::control::ledger::Budget;
use crate::control::pressure::{Level, Pressure};

use super::{Sample, Trigger};

/// What the last tick found, for the worker, metrics and endpoints. Written by the control loop;
/// each figure is whole, together they may be of two ticks.
#[derive(Debug, Default)]
pub struct PressureState {
    physical: AtomicU64,
    purgeable: AtomicU64,
    decaying: AtomicU64,
    limit: AtomicU64,
    wanted: [AtomicU64; 2],
    levels: [AtomicU8; 2],
    entered: [AtomicU64; 4],
    sampled_at: AtomicU64,
    ticks: AtomicU64,
    late: AtomicU64,
    exhausted: AtomicBool,
}

impl PressureState {
    /// What counts against the host's limit.
    #[must_use]
    pub fn physical(&self) -> ByteSize {
        ByteSize::new(self.physical.load(Ordering::Relaxed))
    }

    /// The part of it that a purge gives back.
    #[must_use]
    pub fn purgeable(&self) -> ByteSize {
        ByteSize::new(self.purgeable.load(Ordering::Relaxed))
    }

    /// The part of it that a purge with this trigger gives back.
    pub(super) fn purgeable_by(&self, trigger: Trigger) -> ByteSize {
        let left =
            if trigger.leaves_decaying() { self.decaying.load(Ordering::Relaxed) } else { 0 };
        self.purgeable().saturating_sub(ByteSize::new(left))
    }

    /// The difference.
    #[must_use]
    pub fn required(&self) -> ByteSize {
        self.physical().saturating_sub(self.purgeable())
    }

    /// The host's limit; [`ByteSize::MAX`] where none is known.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        ByteSize::new(self.limit.load(Ordering::Relaxed))
    }

    /// The level of a budget.
    #[must_use]
    pub fn level(&self, budget: Budget) -> Level {
        self.levels
            .get(budget as usize)
            .map_or(Level::None, |level| Level::from_u8(level.load(Ordering::Acquire)))
    }

    /// What a budget would have to give back to come under the lowest mark.
    #[must_use]
    pub fn wanted(&self, budget: Budget) -> ByteSize {
        let wanted = self.wanted.get(budget as usize);
        ByteSize::new(wanted.map_or(0, |wanted| wanted.load(Ordering::Relaxed)))
    }

    /// How often the host has entered a level.
    #[must_use]
    pub fn entered_total(&self, level: Level) -> u64 {
        let entered = self.entered.get(usize::from(level.as_u8()));
        entered.map_or(0, |entered| entered.load(Ordering::Relaxed))
    }

    /// When the last sample was taken.
    #[must_use]
    pub fn sampled_at(&self) -> Moment {
        let nanos = self.sampled_at.load(Ordering::Relaxed);
        Moment::after_origin(Duration::from_nanos(nanos))
    }

    /// Whether memory that no request owns leaves no room for requests: even the smallest have been
    /// rejected for 5 s, with a completed purge. Ends with the first sample that has room.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.exhausted.load(Ordering::Acquire)
    }

    /// Returns what it was before.
    pub(super) fn set_exhausted(&self, exhausted: bool) -> bool {
        self.exhausted.swap(exhausted, Ordering::AcqRel)
    }

    /// How often the loop has ticked.
    #[must_use]
    pub fn ticks_total(&self) -> u64 {
        self.ticks.load(Ordering::Relaxed)
    }

    /// How long after its time a tick began at most, since this was last asked: what the machine
    /// kept the loop from, and how old a sample could be.
    #[must_use]
    pub fn take_lateness(&self) -> Duration {
        Duration::from_nanos(self.late.swap(0, Ordering::Relaxed))
    }

    /// Counts a tick that began so long after its time.
    pub(super) fn note_tick(&self, late: Duration) {
        self.ticks.fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(late.as_nanos()).unwrap_or(u64::MAX);
        self.late.fetch_max(nanos, Ordering::Relaxed);
    }

    pub(super) fn set_sample(&self, sample: &Sample, limit: ByteSize, now: Moment) {
        self.physical.store(sample.physical.get(), Ordering::Relaxed);
        self.purgeable.store(sample.purgeable.get(), Ordering::Relaxed);
        self.decaying.store(sample.decaying.get(), Ordering::Relaxed);
        self.limit.store(limit.get(), Ordering::Relaxed);
        let nanos = u64::try_from(now.since_origin().as_nanos()).unwrap_or(u64::MAX);
        self.sampled_at.store(nanos, Ordering::Relaxed);
    }

    pub(super) fn set_level(&self, budget: Budget, level: Level, wanted: ByteSize) {
        if let Some(place) = self.levels.get(budget as usize) {
            place.store(level.as_u8(), Ordering::Release);
        }
        if let Some(place) = self.wanted.get(budget as usize) {
            place.store(wanted.get(), Ordering::Relaxed);
        }
    }

    pub(super) fn set_entered(&self, pressure: &Pressure) {
        for (level, entered) in Level::ALL.into_iter().zip(&self.entered) {
            entered.store(pressure.entered_total(level), Ordering::Relaxed);
        }
    }
}
