//! How many bytes may stay, how long after they went idle: jemalloc's smooth curve, as arithmetic.
//!
//! It reads no clock and gives nothing back: the caller says what time it is and how much is idle,
//! and is told how much may stay. Host and device mean the same by a decay time because both use
//! this curve (jemalloc's own for the heap, ours for the arena).
//!
//! The curve is `1 - s(x)` with `s(x) = 6x^5 - 15x^4 + 10x^3` (jemalloc `smoothstep.h`,
//! "smootherstep"), sampled at [`STEPS`] points as there. With `b[i]` the bytes that went idle `i`
//! steps ago, the amount that may stay is `sum b[i] x (1 - s((i + 1) / STEPS))`.
//!
//! Invariants: `0 <= allowed <= idle`; with nothing newly idle, `allowed` never rises and is 0 one
//! decay time after the last byte went idle.

use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::Moment;

/// Points at which the curve is sampled; jemalloc's `SMOOTHSTEP_NSTEPS`.
pub const STEPS: usize = 200;

/// How long idle memory may stay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DecayTime {
    /// Given back as soon as it is idle (jemalloc's 0).
    AtOnce,
    /// Given back along the curve; the last of it after this long. Never zero.
    Within(Duration),
    /// Kept until it is asked for (jemalloc's -1).
    Never,
}

impl DecayTime {
    /// A time in milliseconds: 0 is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_millis(millis: u64) -> Self {
        Self::from_duration(Duration::from_millis(millis))
    }

    /// A duration: zero is [`DecayTime::AtOnce`].
    #[must_use]
    pub const fn from_duration(time: Duration) -> Self {
        if time.is_zero() { Self::AtOnce } else { Self::Within(time) }
    }
}

/// The part that may stay after `elapsed` of `time`, from 1 down to 0.
#[must_use]
pub fn remaining(elapsed: Duration, time: DecayTime) -> f64 {
    match time {
        DecayTime::AtOnce => 0.0,
        DecayTime::Never => 1.0,
        DecayTime::Within(time) => {
            let x = (elapsed.as_secs_f64() / time.as_secs_f64()).clamp(0.0, 1.0);
            1.0 - x * x * x * (x * (6.0 * x - 15.0) + 10.0)
        }
    }
}

/// What went idle when, and so how much of it may stay.
///
/// Written by one owner under its own lock. It may let bytes stay up to one step
/// (`time / STEPS`) too long, never too short.
#[derive(Clone, Debug)]
pub struct Decay {
    time: DecayTime,
    /// Start of the current step.
    step_start: Moment,
    /// `idle[i]`: bytes that went idle `i` whole steps before the current one.
    idle: [u64; STEPS],
    /// The idle bytes at the last advance, from which new ones are told.
    seen: u64,
}

impl Decay {
    /// A curve with nothing idle yet.
    #[must_use]
    pub const fn new(time: DecayTime, now: Moment) -> Self {
        Self { time, step_start: now, idle: [0; STEPS], seen: 0 }
    }

    /// The decay time.
    #[must_use]
    pub const fn time(&self) -> DecayTime {
        self.time
    }

    /// Changes the decay time; what is idle now counts as having gone idle at `now`.
    pub fn set_time(&mut self, time: DecayTime, now: Moment) {
        *self = Self::new(time, now);
    }

    /// Books that `idle` bytes are idle at `now` and says how many of them may stay.
    ///
    /// Bytes that stopped being idle (reused or given back) are taken from the oldest. Costs at
    /// most [`STEPS`] additions.
    pub fn allowed(&mut self, idle: ByteSize, now: Moment) -> ByteSize {
        let DecayTime::Within(time) = self.time else {
            self.seen = idle.get();
            return if self.time == DecayTime::Never { idle } else { ByteSize::ZERO };
        };
        self.roll(time, now);
        let idle = idle.get();
        if idle >= self.seen {
            self.idle[0] += idle - self.seen;
        } else {
            self.forget_oldest(self.seen - idle);
        }
        self.seen = idle;
        debug_assert_eq!(self.idle.iter().sum::<u64>() + self.expired(), self.seen);
        self.sum(time)
    }

    /// When to look again: the end of the current step while anything is idle.
    #[must_use]
    pub fn next(&self) -> Moment {
        match self.time {
            DecayTime::Within(time) if self.seen > 0 => self.step_start + step_of(time),
            _ => Moment::NEVER,
        }
    }

    /// Moves the books on to the step that holds `now`.
    fn roll(&mut self, time: Duration, now: Moment) {
        let step = step_of(time);
        let passed = (now - self.step_start).as_nanos() / step.as_nanos();
        let passed_max = usize::try_from(passed).unwrap_or(STEPS).min(STEPS);
        if passed_max == STEPS {
            self.idle = [0; STEPS];
            self.step_start = now;
        } else if passed_max > 0 {
            self.idle.copy_within(0..STEPS - passed_max, passed_max);
            self.idle[..passed_max].fill(0);
            self.step_start = self.step_start + step * u32::try_from(passed_max).unwrap_or(0);
        }
    }

    /// Idle bytes older than the whole curve: none of them may stay.
    fn expired(&self) -> u64 {
        self.seen - self.idle.iter().sum::<u64>().min(self.seen)
    }

    fn forget_oldest(&mut self, bytes: u64) {
        let mut left = bytes - bytes.min(self.expired());
        for slot in self.idle.iter_mut().rev() {
            let part = left.min(*slot);
            *slot -= part;
            left -= part;
        }
        debug_assert_eq!(left, 0, "more was forgotten than was booked");
    }

    fn sum(&self, time: Duration) -> ByteSize {
        let step = step_of(time);
        let stay = |(age, &bytes): (usize, &u64)| {
            let elapsed = step * u32::try_from(age).unwrap_or(u32::MAX);
            ByteSize::new(bytes).scaled(remaining(elapsed, self.time))
        };
        self.idle.iter().enumerate().map(stay).sum()
    }
}

/// One step of the curve; at least a nanosecond.
fn step_of(time: Duration) -> Duration {
    let steps = u32::try_from(STEPS).unwrap_or(1);
    (time / steps).max(Duration::from_nanos(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    fn at(seconds: f64) -> Moment {
        Moment::ORIGIN + Duration::from_secs_f64(seconds)
    }

    #[test]
    fn the_curve_is_smootherstep() {
        let time = DecayTime::Within(10 * SECOND);
        for (elapsed, part) in
            [(0.0, 1.0), (2.5, 0.896_484_375), (5.0, 0.5), (10.0, 0.0), (99.0, 0.0)]
        {
            let found = remaining(Duration::from_secs_f64(elapsed), time);
            assert!((found - part).abs() < 1e-12, "{elapsed}: {found}");
        }
    }

    #[test]
    fn a_burst_decays_along_the_curve_and_is_gone_after_the_decay_time() {
        let time = DecayTime::Within(10 * SECOND);
        let mut decay = Decay::new(time, at(0.0));
        let idle = ByteSize::mib(1000);
        let mut last = decay.allowed(idle, at(0.0));
        assert_eq!(last, idle);
        for tenth in 1..=100 {
            let now = at(f64::from(tenth) / 10.0);
            let allowed = decay.allowed(idle, now);
            assert!(allowed <= last, "rose at {now:?}");
            let curve = idle.scaled(remaining(now - at(0.0), time)).as_f64();
            assert!((allowed.as_f64() - curve).abs() <= idle.as_f64() / 80.0, "{now:?}");
            last = allowed;
        }
        assert_eq!(last, ByteSize::ZERO);
        assert_eq!(decay.allowed(idle, at(10_000.0)), ByteSize::ZERO);
    }

    #[test]
    fn reuse_takes_the_oldest_and_new_idle_bytes_start_afresh() {
        let mut decay = Decay::new(DecayTime::Within(10 * SECOND), at(0.0));
        let _ = decay.allowed(ByteSize::mib(100), at(0.0));
        let _ = decay.allowed(ByteSize::mib(200), at(9.0));
        assert!(decay.allowed(ByteSize::mib(100), at(9.0)) >= ByteSize::mib(99));
        assert_eq!(decay.allowed(ByteSize::ZERO, at(9.5)), ByteSize::ZERO);
        assert_eq!(decay.allowed(ByteSize::mib(7), at(9.5)), ByteSize::mib(7));
    }

    #[test]
    fn at_once_and_never_mean_what_jemalloc_means() {
        let idle = ByteSize::mib(64);
        let mut at_once = Decay::new(DecayTime::from_millis(0), at(0.0));
        assert_eq!(at_once.allowed(idle, at(0.0)), ByteSize::ZERO);
        let mut never = Decay::new(DecayTime::Never, at(0.0));
        assert_eq!(never.allowed(idle, at(1e6)), idle);
        assert_eq!(never.next(), Moment::NEVER);
    }

    #[test]
    fn nothing_idle_needs_no_look() {
        let mut decay = Decay::new(DecayTime::Within(SECOND), at(0.0));
        assert_eq!(decay.next(), Moment::NEVER);
        let _ = decay.allowed(ByteSize::new(1), at(0.5));
        assert!(decay.next() <= at(0.51));
    }

    #[test]
    fn random_histories_keep_the_invariants() {
        let mut state = 0x9E37_79B9_7F4A_7C15_u64;
        println!("seed {state:#x}");
        let mut chance = || {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state
        };
        let mut decay = Decay::new(DecayTime::Within(SECOND), at(0.0));
        let mut now = at(0.0);
        for _ in 0..20_000 {
            now = now + Duration::from_micros(chance() % 40_000);
            let idle = ByteSize::new(chance() % (1 << 30));
            let allowed = decay.allowed(idle, now);
            assert!(allowed <= idle);
        }
    }
}
