//! The figures of the last tick, shared with the worker, metrics and endpoints.
//!
//! Written by the control loop, read by any thread; the loop never waits for a lock. It decides
//! nothing.
//!
//! Invariant: `required = physical - purgeable` as of one tick, or of two if a tick came in
//! between.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering};
use std::time::Duration;

use crate::ceiling::CeilingParts;
use crate::cost::Budget;
use crate::exhaustion::Exhaustion;
use crate::limit_advice::{LimitAdvice, LimitRecord, LimitSample};
use crate::pressure::{Level, PressureTracker};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Bell;
use lowtide_core::sync::{Mutex, lock, try_lock};

use super::saturation::Utilizations;
use super::{Sample, Trigger};

/// The jobs for the worker, and the figures of the last tick for the worker, metrics and endpoints.
/// The control loop writes the figures. Each is consistent; two may come from different ticks.
#[derive(Debug, Default)]
pub struct PressureState {
    physical: AtomicU64,
    physical_peak: AtomicU64,
    unreleased: AtomicU64,
    purgeable: AtomicU64,
    decaying: AtomicU64,
    limit: AtomicU64,
    wanted: [AtomicU64; 2],
    levels: [AtomicU8; 2],
    entered: [AtomicU64; 4],
    /// In the order of [`CeilingParts::by_name`].
    ceiling_parts: [AtomicU64; CeilingParts::COUNT],
    /// Bits of an `f64`.
    saturation: AtomicU64,
    ticks: AtomicU64,
    late: AtomicU64,
    exhausted: AtomicBool,
    serves_one: AtomicBool,
    needs_restart: AtomicBool,
    /// The bits of the pending jobs.
    pub(super) pending: AtomicU64,
    pub(super) closed: AtomicBool,
    pub(super) bell: Arc<Bell>,
    /// Not atomic: the control loop tries the lock, and adds what it missed at the next tick.
    limits: Mutex<LimitRecord>,
    pub(super) utilizations: Utilizations,
}

impl PressureState {
    /// Returns the bytes that count against the host's limit, without the
    /// [unreleased](Self::unreleased) ones.
    #[must_use]
    pub fn physical(&self) -> ByteSize {
        ByteSize::new(self.physical.load(Ordering::Relaxed))
    }

    /// Returns the largest physical bytes of a sample since the last call of this method; zero
    /// without a sample.
    #[must_use]
    pub fn take_physical_peak(&self) -> ByteSize {
        ByteSize::new(self.physical_peak.swap(0, Ordering::Relaxed))
    }

    /// Returns the unused bytes that stay resident because the kernel does not take them back.
    #[must_use]
    pub fn unreleased(&self) -> ByteSize {
        ByteSize::new(self.unreleased.load(Ordering::Relaxed))
    }

    /// Returns the part of the physical bytes that a purge releases.
    #[must_use]
    pub fn purgeable(&self) -> ByteSize {
        ByteSize::new(self.purgeable.load(Ordering::Relaxed))
    }

    /// Returns the part of the physical bytes that a purge with this trigger releases.
    pub(super) fn purgeable_by(&self, trigger: Trigger) -> ByteSize {
        let left =
            if trigger.leaves_decaying() { self.decaying.load(Ordering::Relaxed) } else { 0 };
        self.purgeable().saturating_sub(ByteSize::new(left))
    }

    /// Returns the physical bytes less the purgeable ones.
    #[must_use]
    pub fn required(&self) -> ByteSize {
        self.physical().saturating_sub(self.purgeable())
    }

    /// Returns the host's limit, or [`ByteSize::MAX`] if none is known.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        ByteSize::new(self.limit.load(Ordering::Relaxed))
    }

    /// Returns the averages of [`Ledger::utilization`](crate::Ledger::utilization) over the last
    /// seconds: the host's first, then those of the devices in their order.
    pub fn utilizations(&self) -> impl Iterator<Item = Option<f64>> {
        self.utilizations.each()
    }

    /// Returns the level of a budget.
    #[must_use]
    pub fn level(&self, budget: Budget) -> Level {
        self.levels
            .get(budget as usize)
            .map_or(Level::None, |level| Level::from_u8(level.load(Ordering::Acquire)))
    }

    /// Returns the bytes that a budget must release to fall below the lowest threshold.
    #[must_use]
    pub fn wanted(&self, budget: Budget) -> ByteSize {
        let wanted = self.wanted.get(budget as usize);
        ByteSize::new(wanted.map_or(0, |wanted| wanted.load(Ordering::Relaxed)))
    }

    /// Returns how often the host has entered a level.
    #[must_use]
    pub fn entered_total(&self, level: Level) -> u64 {
        let entered = self.entered.get(usize::from(level.as_u8()));
        entered.map_or(0, |entered| entered.load(Ordering::Relaxed))
    }

    /// Returns the parts of the host's ceiling; zeros without a limit.
    #[must_use]
    pub fn ceiling_parts(&self) -> CeilingParts {
        let [start, earned, fixed, unlearned, growth] =
            self.ceiling_parts.each_ref().map(|part| ByteSize::new(part.load(Ordering::Relaxed)));
        CeilingParts { start, earned, fixed, unlearned, growth }
    }

    pub(super) fn set_ceiling_parts(&self, parts: CeilingParts) {
        for (place, (_, bytes)) in self.ceiling_parts.iter().zip(parts.by_name()) {
            place.store(bytes.get(), Ordering::Relaxed);
        }
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
        f64::from_bits(self.saturation.load(Ordering::Relaxed))
    }

    pub(super) fn set_saturation(&self, saturation: f64) {
        self.saturation.store(saturation.to_bits(), Ordering::Relaxed);
    }

    /// Returns `true` if memory that no request owns leaves no room for requests: even the smallest
    /// have been rejected for 5 s, with a completed purge. Ends with the first sample that has
    /// room.
    #[must_use]
    pub fn is_exhausted(&self) -> bool {
        self.exhausted.load(Ordering::Acquire)
    }

    /// Returns `true` if memory is exhausted and single requests are still admitted
    /// ([`ExhaustionPolicy::ServeOne`](crate::ExhaustionPolicy::ServeOne)).
    #[must_use]
    pub fn serves_one(&self) -> bool {
        self.serves_one.load(Ordering::Acquire)
    }

    /// Returns `true` if the [`ExhaustionPolicy`](crate::ExhaustionPolicy) asks for a restart of
    /// the process.
    #[must_use]
    pub fn needs_restart(&self) -> bool {
        self.needs_restart.load(Ordering::Acquire)
    }

    /// Sets the exhaustion state and returns `true` if it has changed, except for `serves_one`.
    pub(super) fn set_exhausted(&self, of: &Exhaustion) -> bool {
        let (exhausted, needs_restart) = (of.is_declared(), of.needs_restart);
        // First: a reader that sees exhaustion finds whether requests are served.
        self.serves_one.store(of.serves_one(), Ordering::Release);
        let was_restart = self.needs_restart.swap(needs_restart, Ordering::AcqRel);
        let was_exhausted = self.exhausted.swap(exhausted, Ordering::AcqRel);
        (was_exhausted, was_restart) != (exhausted, needs_restart)
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

    /// Records a sample, unless the record is being read: then the next sample covers its time too.
    pub(super) fn record_limits(&self, sample: LimitSample, ceiling_part: f64) {
        if let Some(mut limits) = try_lock(&self.limits) {
            limits.add(sample, ceiling_part);
        }
    }

    /// Counts a tick that began with this delay.
    pub(super) fn note_tick(&self, late: Duration) {
        self.ticks.fetch_add(1, Ordering::Relaxed);
        let nanos = u64::try_from(late.as_nanos()).unwrap_or(u64::MAX);
        self.late.fetch_max(nanos, Ordering::Relaxed);
    }

    pub(super) fn set_sample(&self, sample: &Sample, limit: ByteSize) {
        self.physical.store(sample.physical.get(), Ordering::Relaxed);
        self.physical_peak.fetch_max(sample.physical.get(), Ordering::Relaxed);
        self.unreleased.store(sample.unreleased.get(), Ordering::Relaxed);
        self.purgeable.store(sample.purgeable.get(), Ordering::Relaxed);
        self.decaying.store(sample.decaying.get(), Ordering::Relaxed);
        self.limit.store(limit.get(), Ordering::Relaxed);
    }

    pub(super) fn set_level(&self, budget: Budget, level: Level, wanted: ByteSize) {
        if let Some(place) = self.levels.get(budget as usize) {
            place.store(level.as_u8(), Ordering::Release);
        }
        if let Some(place) = self.wanted.get(budget as usize) {
            place.store(wanted.get(), Ordering::Relaxed);
        }
    }

    pub(super) fn set_entered(&self, pressure: &PressureTracker) {
        for (entered, count) in self.entered.iter().zip(pressure.entered) {
            entered.store(count, Ordering::Relaxed);
        }
    }
}
