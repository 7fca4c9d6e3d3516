//! Tracks how long an arena's memory has been idle, and when to check again.
//!
//! Each granule has the time of its last use as a [`Stamp`]: 32 bits that count fractions of the
//! decay time. Memory that has been idle for the whole decay time expires and is released; no
//! memory is released earlier. While memory is in use, a check is made every sixteenth of the
//! decay time, so that memory that became idle at about the same time leaves in few calls. The
//! clock is read only when memory becomes idle. This module releases nothing.
//!
//! Invariants: expired memory has been idle for at least the decay time; while memory is idle and
//! the time is finite, `due` is at most a decay time and two fractions after the last check or
//! free.

use std::time::Duration;

use crate::types::config::decay_nanos;
use lowtide_core::clock::Moment;
use lowtide_core::decay::DecayTime;

/// A decay time has from this many parts to twice as many, so no age is wrong by more than two
/// parts, 1/256 of the decay time.
const PARTS: u64 = 512;

/// The maximum number of checks per decay time while memory is used. Idle memory stays up to a
/// sixteenth of the decay time longer than necessary. A guess.
const LOOKS: u32 = 16;

/// The number of checks of the thread caches per decay time. Cached blocks are cold after two
/// checks. A guess.
const FRONT_LOOKS: u32 = 200;

/// The delay after a failed check, so that a failing driver is not called continuously.
const RETRY_AFTER: Duration = Duration::from_millis(100);

/// The last use of a granule, in parts of the decay time. Wraps after 4 million decay times; memory
/// that is not checked for that long may stay one decay time longer.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Stamp(pub(crate) u32);

/// A moment in parts of the decay time, to compare stamps with.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Ages {
    now: u32,
    wait: u32,
}

impl Ages {
    /// Returns the number of parts for which memory with this stamp has been idle.
    pub(crate) const fn of(self, stamp: Stamp) -> u32 {
        let age = self.now.wrapping_sub(stamp.0);
        // Stamps are rounded up, so that no memory leaves early: a stamp of this moment is a part
        // ahead.
        if age == u32::MAX { 0 } else { age }
    }

    /// Returns `true` if memory with this stamp has expired.
    pub(crate) const fn is_over(self, stamp: Stamp) -> bool {
        self.of(stamp) >= self.wait
    }
}

/// The decay time of an arena, and the time of the next check.
#[derive(Debug)]
pub(crate) struct Aging {
    pub(crate) time: DecayTime,
    /// The length of a part is this power of two, in nanoseconds.
    shift: u32,
    /// The number of parts after which idle memory expires; for [`DecayTime::Never`] more than any
    /// age.
    wait: u32,
    /// The latest time of a stamp, so that ages are never negative. Not the time of a check: a
    /// check may be called with a time ahead of the clock, and memory that became idle afterwards
    /// would never expire.
    latest: Moment,
    /// The time of the last check.
    pub(crate) looked_at: Moment,
    /// The time of the next check; never if no memory is idle.
    pub(crate) due: Moment,
}

impl Aging {
    pub(crate) fn new(time: DecayTime) -> Self {
        let nanos = decay_nanos(time);
        let shift = (nanos.unwrap_or(0) / PARTS).max(1).ilog2();
        let parts = |nanos: u64| u32::try_from(nanos.div_ceil(1 << shift)).unwrap_or(u32::MAX - 1);
        let wait = nanos.map_or(u32::MAX, parts);
        Self {
            time,
            shift,
            wait,
            latest: Moment::ORIGIN,
            looked_at: Moment::ORIGIN,
            due: Moment::NEVER,
        }
    }

    /// Returns the stamp of memory that becomes idle now, and schedules a check if it ever decays.
    pub(crate) fn note_idle(&mut self, now: Moment) -> Stamp {
        self.latest = self.latest.max(now);
        if !matches!(self.time, DecayTime::Never) {
            self.due = self.due.min(self.over_at(self.latest, 0));
        }
        Stamp(low_half(self.part_of(self.latest).wrapping_add(1)))
    }

    /// Returns the ages at `now`.
    pub(crate) fn ages(&self, now: Moment) -> Ages {
        Ages { now: low_half(self.part_of(self.latest.max(now))), wait: self.wait }
    }

    /// Schedules the check after one at `now`, by the age of the longest idle memory that stayed.
    /// `failed` is `true` if the driver failed.
    pub(crate) fn set_looked(&mut self, now: Moment, oldest: Option<u32>, failed: bool) {
        self.looked_at = now;
        let again = now + self.portion(LOOKS);
        self.due = match (self.time, oldest) {
            (DecayTime::Never, _) => Moment::NEVER,
            _ if failed => again.max(now + RETRY_AFTER),
            (_, Some(age)) if age >= self.wait => now,
            (DecayTime::AtOnce, _) => now,
            (DecayTime::Within(_), Some(age)) => self.over_at(self.latest.max(now), age).max(again),
            // Idle memory is leaving. If it stays, it must be checked.
            (DecayTime::Within(_), None) => again,
        };
    }

    /// Sets the decay time. Returns the stamp for all memory that is idle now.
    pub(crate) fn set_time(&mut self, time: DecayTime, now: Moment) -> Stamp {
        *self = Self { latest: self.latest.max(now), looked_at: now, ..Self::new(time) };
        self.note_idle(now)
    }

    /// Returns the time of the next check of the thread caches.
    pub(crate) fn cache_due(&self) -> Moment {
        match self.time {
            DecayTime::Never => Moment::NEVER,
            DecayTime::Within(_) | DecayTime::AtOnce => self.looked_at + self.portion(FRONT_LOOKS),
        }
    }

    /// Returns the time at which memory expires that is `age` parts old at `at`.
    fn over_at(&self, at: Moment, age: u32) -> Moment {
        if matches!(self.time, DecayTime::AtOnce) {
            return at;
        }
        // Memory whose age is 0 may have been stamped a part ahead.
        let left = u64::from(self.wait.saturating_sub(age)) + u64::from(age == 0);
        let part = self.part_of(at).saturating_add(left);
        let nanos = part.saturating_mul(1 << self.shift);
        Moment::after_origin(Duration::from_nanos(nanos))
    }

    /// Returns the part of a moment, of at most 584 years after the origin.
    fn part_of(&self, at: Moment) -> u64 {
        u64::try_from(at.since_origin().as_nanos()).unwrap_or(u64::MAX) >> self.shift
    }

    /// Returns this fraction of the decay time.
    fn portion(&self, of: u32) -> Duration {
        match self.time {
            DecayTime::Within(time) => time / of,
            DecayTime::AtOnce | DecayTime::Never => Duration::ZERO,
        }
    }
}

/// Returns the low half of a part number, which wraps.
#[expect(clippy::cast_possible_truncation, reason = "stamps wrap")]
const fn low_half(part: u64) -> u32 {
    part as u32
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;
    use lowtide_core::clock::{Clock as _, ManualClock};

    /// Calls `check` with decay times of all sizes, at a moment well after the origin.
    fn each(check: impl Fn(Duration, &ManualClock)) {
        for nanos in [1, 7, 511, 512, 1_000_000, 1_500_000_000, 10_000_000_000, u64::MAX / 8] {
            let clock = ManualClock::new();
            clock.advance(Duration::from_secs(86_400 * 400) + Duration::from_nanos(12_345));
            check(Duration::from_nanos(nanos), &clock);
        }
    }

    #[test]
    fn idle_memory_is_over_after_the_decay_time_and_no_more_than_two_parts_late() {
        each(|time, clock| {
            let mut aging = Aging::new(DecayTime::Within(time));
            let stamp = aging.note_idle(clock.now());
            let (idle, due) = (clock.now(), aging.due);
            assert!(due >= idle + time, "{time:?}: due after {:?}", due - idle);
            let late = (time / 128).max(Duration::from_nanos(2));
            assert!(due <= idle + time + late, "{time:?}: due after {:?}", due - idle);
            assert!(!aging.ages(idle + (time - Duration::from_nanos(1))).is_over(stamp));
            assert!(aging.ages(due).is_over(stamp), "{time:?}");
        });
    }

    #[test]
    fn a_look_that_comes_at_the_time_of_an_earlier_moment_sees_no_age() {
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(3600));
        let mut aging = Aging::new(DecayTime::from_millis(5));
        let stamp = aging.note_idle(clock.now());
        assert!(!aging.ages(Moment::ORIGIN).is_over(stamp));
    }

    /// Regression test: memory that became idle after a check at a time ahead of the clock never
    /// expired.
    #[test]
    fn a_look_ahead_of_the_clock_kept_all_that_went_idle_later() {
        for ahead in [Duration::from_secs(3600), Duration::MAX] {
            let clock = ManualClock::new();
            let mut aging = Aging::new(DecayTime::from_millis(1000));
            let early = aging.note_idle(clock.now());
            assert!(aging.ages(clock.now() + ahead).is_over(early));
            aging.set_looked(clock.now() + ahead, None, false);
            let late = aging.note_idle(clock.now());
            clock.advance(Duration::from_secs(2));
            assert!(aging.due <= clock.now(), "{ahead:?}: {:?}", aging.due);
            assert!(aging.ages(clock.now()).is_over(late), "{ahead:?}");
        }
    }

    #[test]
    fn memory_that_nobody_looked_at_for_ages_is_over() {
        let clock = ManualClock::new();
        let mut aging = Aging::new(DecayTime::from_millis(1000));
        let stamp = aging.note_idle(clock.now());
        assert!(aging.ages(Moment::ORIGIN + Duration::from_secs(1_000_000)).is_over(stamp));
    }

    #[test]
    fn at_once_is_over_at_once_and_never_never() {
        let clock = ManualClock::new();
        clock.advance(Duration::from_secs(5));
        let mut at_once = Aging::new(DecayTime::AtOnce);
        let stamp = at_once.note_idle(clock.now());
        assert_eq!(at_once.due, clock.now());
        assert!(at_once.ages(clock.now()).is_over(stamp));
        let mut never = Aging::new(DecayTime::Never);
        let stamp = never.note_idle(clock.now());
        assert_eq!(never.due, Moment::NEVER);
        assert!(!never.ages(clock.now()).is_over(stamp));
        assert!(!never.ages(clock.now()).is_over(Stamp::default()));
    }

    #[test]
    fn looks_are_apart_while_memory_is_used_and_exact_when_it_is_not() {
        let time = Duration::from_secs(16);
        let clock = ManualClock::new();
        let mut aging = Aging::new(DecayTime::Within(time));
        let (mut looks, end) = (0, Moment::ORIGIN + 10 * time);
        let mut stamps = vec![(clock.now(), aging.note_idle(clock.now()))];
        while clock.now() < end {
            clock.advance(Duration::from_millis(10));
            let now = clock.now();
            stamps.push((now, aging.note_idle(clock.now())));
            if aging.due <= now {
                looks += 1;
                let ages = aging.ages(now);
                stamps.retain(|&(_, stamp)| !ages.is_over(stamp));
                aging.set_looked(now, stamps.first().map(|&(_, stamp)| ages.of(stamp)), false);
                assert!(stamps.iter().all(|&(idle, _)| now - idle <= time + time / 64));
            }
            assert!(stamps.iter().all(|&(idle, _)| now - idle <= time + time / LOOKS * 2));
        }
        assert!(looks <= 9 * LOOKS + 1, "{looks} looks");
        let (last, _) = stamps.pop().expect("it just went idle");
        aging.set_looked(clock.now(), Some(0), false);
        assert!(aging.due >= last + time && aging.due <= last + time + time / 128);
    }
}
