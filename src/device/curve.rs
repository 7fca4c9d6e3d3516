//! The decay curve of an arena: what is told to it, and when the next look is due.
//!
//! The curve itself is [`Decay`]; this keeps what an arena must know to tell it the truth between
//! looks. It reads no clock and gives nothing back.
//!
//! Invariants: whenever something is idle and the curve is finite, `due` is at most one step of the
//! curve away or in the past; `idle_low <= idle`.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, Moment};
use crate::decay::{Decay, DecayTime, STEPS};

/// How long a failed look waits before the next: a driver that is out of order is not hammered.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// How a look at idle memory ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Look {
    /// All that was to be given back was, or is on its way.
    Finished,
    /// There was more than one look does.
    Unfinished,
    /// The driver failed.
    Failed,
}

/// An arena's curve.
#[derive(Debug)]
pub(super) struct Curve {
    decay: Decay,
    /// What was idle when the curve was last told, less what was given back since.
    told: u64,
    /// The least of it since then: what was used in between is fresh when it is idle again.
    idle_low: u64,
    /// Given back already, of what the curve still counts: the curve says how much may stay of all
    /// that went idle, so it must not be told that what it took away is gone.
    owed: u64,
    /// The curve is told of new idle memory by frees from here on; before, a look is due.
    note_at: Moment,
    due: Moment,
}

impl Curve {
    pub(super) const fn new(time: DecayTime, now: Moment) -> Self {
        Self {
            decay: Decay::new(time, now),
            told: 0,
            idle_low: 0,
            owed: 0,
            note_at: Moment::ORIGIN,
            due: Moment::NEVER,
        }
    }

    /// Tells the curve what is idle at `now`; returns how much of it may stay.
    pub(super) fn tell(&mut self, idle: u64, now: Moment) -> u64 {
        let low = self.idle_low.min(self.told);
        // What was used since the last time is taken out as the oldest, with its share of what was
        // given back, and comes back as new.
        let owed = u128::from(self.owed) * u128::from(low) / u128::from(self.told.max(1));
        self.owed = u64::try_from(owed).unwrap_or(self.owed);
        let counted = |idle: u64| ByteSize::new(idle.saturating_add(self.owed));
        let _ = self.decay.allowed(counted(low), now);
        let allowed = self.decay.allowed(counted(idle), now);
        (self.told, self.idle_low) = (idle, idle);
        self.note_at = now + self.step();
        allowed.get().min(idle)
    }

    /// Notes that so much is idle, perhaps less than before.
    pub(super) fn note_used(&mut self, idle: u64) {
        self.idle_low = self.idle_low.min(idle);
    }

    /// Notes that idle memory was given back.
    pub(super) fn note_given_back(&mut self, bytes: u64) {
        self.owed += bytes.min(self.told);
        self.told = self.told.saturating_sub(bytes);
        self.idle_low = self.idle_low.saturating_sub(bytes);
    }

    /// Sees to it that memory which just went idle is looked at. Costs a comparison while a look is
    /// due anyway, else a look at the clock, and the curve's sum once a step.
    pub(super) fn note_idle(&mut self, idle: u64, clock: &dyn Clock) {
        if self.due <= self.note_at || self.decay.time() == DecayTime::Never {
            return; // that look will see it, or nobody ever looks
        }
        let now = clock.now();
        let look = match self.decay.time() {
            DecayTime::Never | DecayTime::AtOnce => now,
            DecayTime::Within(_) if now < self.note_at => self.note_at,
            DecayTime::Within(_) => {
                let _ = self.tell(idle, now);
                self.decay.next()
            }
        };
        self.due = self.due.min(look);
    }

    /// When the next look is due, while something is idle.
    pub(super) const fn due(&self) -> Moment {
        self.due
    }

    /// When a look at what the fronts keep is due: a step after the last one.
    pub(super) const fn front_due(&self) -> Moment {
        match self.decay.time() {
            DecayTime::Never => Moment::NEVER,
            DecayTime::Within(_) | DecayTime::AtOnce => self.note_at,
        }
    }

    /// Sets when the next look is due, after one at `now`.
    pub(super) fn set_due(&mut self, now: Moment, outcome: Look) {
        self.due = match (outcome, self.decay.time()) {
            (_, DecayTime::Never) => Moment::NEVER,
            (Look::Unfinished, _) => now,
            (Look::Failed, _) => now + self.step().max(RETRY_AFTER),
            (Look::Finished, DecayTime::AtOnce) => now,
            (Look::Finished, DecayTime::Within(_)) => self.decay.next(),
        };
    }

    pub(super) fn set_time(&mut self, time: DecayTime, idle: u64, now: Moment) {
        self.decay.set_time(time, now);
        (self.told, self.idle_low, self.owed) = (0, 0, 0);
        let _ = self.tell(idle, now);
        self.set_due(now, Look::Unfinished);
    }

    /// One step of the curve.
    pub(super) fn step(&self) -> Duration {
        match self.decay.time() {
            DecayTime::Within(time) => time / u32::try_from(STEPS).unwrap_or(u32::MAX),
            DecayTime::AtOnce | DecayTime::Never => Duration::ZERO,
        }
    }

    /// # Panics
    /// Where more counts as having stayed idle than is idle.
    pub(super) fn validate(&self, idle: u64) {
        assert!(self.idle_low <= idle, "the least idle is at most what is idle");
    }
}
