//! Time as an injected value, so that tests control it.
//!
//! Everything that measures or waits takes a [`Clock`]. [`SystemClock`] is the machine's clock.
//! [`ManualClock`] stands still until a test advances it. A waiting thread waits on a [`Bell`],
//! which other threads ring to wake it early.
//!
//! Invariant: `now` never decreases. A wait ends when `now >= deadline` or when the bell has been
//! rung since the last wait on it. A ring is never lost.

use std::fmt;
use std::ops::{Add, Sub};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use crate::fork::Birth;

/// A point in time, stored as the time since its clock's origin.
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(transparent))]
pub struct Moment(Duration);

impl fmt::Debug for Moment {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::NEVER {
            return f.write_str("Moment(never)");
        }
        f.debug_tuple("Moment").field(&self.0).finish()
    }
}

impl Moment {
    /// The clock's origin.
    pub const ORIGIN: Self = Self(Duration::ZERO);
    /// A deadline that never comes; later than every other moment.
    pub const NEVER: Self = Self(Duration::MAX);

    /// Creates the moment `elapsed` after the clock's origin.
    #[must_use]
    pub const fn after_origin(elapsed: Duration) -> Self {
        Self(elapsed)
    }

    /// Returns the time from the clock's origin to this moment.
    #[must_use]
    pub const fn since_origin(self) -> Duration {
        self.0
    }
}

impl Add<Duration> for Moment {
    type Output = Self;

    /// Returns the later moment. Saturates at [`Moment::NEVER`].
    fn add(self, wait: Duration) -> Self {
        Self(self.0.saturating_add(wait))
    }
}

impl Sub for Moment {
    type Output = Duration;

    /// Returns the time between the two moments, or zero if `earlier` is later.
    fn sub(self, earlier: Self) -> Duration {
        self.0.saturating_sub(earlier.0)
    }
}

/// Formats a duration for people, in one unit: `250 µs`, `12.3 ms`, `3.2 s`, `14.0 min`, `3.1 h`.
#[doc(hidden)]
#[must_use]
pub fn short(duration: Duration) -> impl fmt::Display {
    struct Short(f64);
    impl fmt::Display for Short {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            match self.0 {
                seconds if seconds < 1e-3 => write!(f, "{:.0} µs", seconds * 1e6),
                seconds if seconds < 1.0 => write!(f, "{:.1} ms", seconds * 1e3),
                seconds if seconds < 120.0 => write!(f, "{seconds:.1} s"),
                seconds if seconds < 7200.0 => write!(f, "{:.1} min", seconds / 60.0),
                seconds => write!(f, "{:.1} h", seconds / 3600.0),
            }
        }
    }
    Short(duration.as_secs_f64())
}

/// A source of time.
pub trait Clock: fmt::Debug + Send + Sync {
    /// Returns the current time. Never decreases.
    fn now(&self) -> Moment;

    /// Returns the wall clock's time since the Unix epoch, for timestamps.
    fn since_epoch(&self) -> Duration;

    /// Blocks until `deadline` or until the bell is rung. Returns `true` if it was rung. A ring
    /// before the call ends the wait at once. Each wait consumes the ring.
    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool;
}

/// Wakes a waiting thread early. A ring without a waiting thread ends the next wait.
#[derive(Debug, Default)]
pub struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
    birth: Birth,
}

/// A bell is the waker of a thread that polls a future and waits in between.
impl std::task::Wake for Bell {
    fn wake(self: Arc<Self>) {
        self.ring();
    }
}

impl Bell {
    /// Creates a bell that has not been rung.
    #[must_use]
    pub fn new() -> Arc<Self> {
        Arc::default()
    }

    /// Wakes the waiting thread. If no thread waits, the next wait returns at once. Sets a flag
    /// under a short lock; does not allocate. Does nothing in a forked child, which has no thread
    /// that waits.
    pub fn ring(&self) {
        if self.birth.is_here() {
            *held(&self.rung) = true;
            self.changed.notify_all();
        }
    }

    /// Wakes waiting threads so that they check the time again.
    fn nudge(&self) {
        drop(held(&self.rung));
        self.changed.notify_all();
    }

    /// Waits until the bell is rung or `left()` returns zero; returns `true` if it was rung. `left`
    /// is called again after each wake-up.
    fn wait(&self, left: impl Fn() -> Option<Duration>) -> bool {
        let mut rung = held(&self.rung);
        while !std::mem::take(&mut *rung) {
            let left = left().unwrap_or(Duration::MAX);
            if left.is_zero() {
                return false;
            }
            let waited = self.changed.wait_timeout(rung, left);
            rung = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
        true
    }
}

fn held<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The machine's monotonic clock, with its origin at its creation.
#[derive(Clone, Debug)]
pub struct SystemClock {
    origin: Instant,
}

impl SystemClock {
    /// Creates a clock whose origin is now.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads it")]
    pub fn new() -> Self {
        Self { origin: Instant::now() }
    }
}

impl Default for SystemClock {
    fn default() -> Self {
        Self::new()
    }
}

impl Clock for SystemClock {
    fn now(&self) -> Moment {
        Moment(self.origin.elapsed())
    }

    #[expect(clippy::disallowed_methods, reason = "this is the one place that reads it")]
    fn since_epoch(&self) -> Duration {
        SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default()
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        bell.wait(|| (deadline != Moment::NEVER).then(|| deadline - self.now()))
    }
}

/// A clock for tests. It stands still until [`ManualClock::advance`] moves it.
#[derive(Clone, Debug, Default)]
pub struct ManualClock {
    shared: Arc<ManualState>,
}

#[derive(Debug, Default)]
struct ManualState {
    now: Mutex<Duration>,
    waiting: Mutex<Vec<Weak<Bell>>>,
    arrived: Condvar,
}

impl ManualClock {
    /// Creates a clock at its origin.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Moves the time forward and wakes the threads whose deadline has passed.
    pub fn advance(&self, step: Duration) {
        {
            let mut now = held(&self.shared.now);
            *now = now.saturating_add(step);
        }
        // Each waiting thread checks the time again and waits on if it is early.
        for bell in held(&self.shared.waiting).iter().filter_map(Weak::upgrade) {
            bell.nudge();
        }
    }

    /// Blocks until `count` threads wait on this clock, so that a test advances it only then.
    /// Returns `false` if that takes longer than `patience` in real time.
    #[must_use]
    pub fn wait_for_waiters(&self, count: usize, patience: Duration) -> bool {
        let waiting = held(&self.shared.waiting);
        let few = |waiting: &mut Vec<Weak<Bell>>| {
            waiting.iter().filter(|bell| bell.strong_count() > 0).count() < count
        };
        let waited = self.shared.arrived.wait_timeout_while(waiting, patience, few);
        !waited.unwrap_or_else(PoisonError::into_inner).1.timed_out()
    }
}

impl Clock for ManualClock {
    fn now(&self) -> Moment {
        Moment(*held(&self.shared.now))
    }

    fn since_epoch(&self) -> Duration {
        *held(&self.shared.now)
    }

    fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> bool {
        held(&self.shared.waiting).push(Arc::downgrade(bell));
        self.shared.arrived.notify_all();
        let is_rung = bell.wait(|| (self.now() >= deadline).then_some(Duration::ZERO));
        let mut waiting = held(&self.shared.waiting);
        let own = waiting.iter().position(|other| other.as_ptr() == Arc::as_ptr(bell));
        if let Some(at) = own {
            waiting.swap_remove(at);
        }
        is_rung
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn durations_are_shown_in_one_unit() {
        let shown = [0, 250, 12_345, 3_210_000, 840_000_000, 11_160_000_000]
            .map(|micros| short(Duration::from_micros(micros)).to_string());
        assert_eq!(shown, ["0 µs", "250 µs", "12.3 ms", "3.2 s", "14.0 min", "3.1 h"]);
    }

    #[test]
    fn a_waiting_thread_wakes_when_the_time_comes_and_not_before() {
        let clock = ManualClock::new();
        let deadline = clock.now() + Duration::from_secs(10);
        let waiter = {
            let clock = clock.clone();
            thread::spawn(move || {
                let is_rung = clock.wait_until(&Bell::new(), deadline);
                (is_rung, clock.now())
            })
        };
        assert!(clock.wait_for_waiters(1, PATIENCE));
        clock.advance(Duration::from_secs(9));
        assert!(!waiter.is_finished());
        clock.advance(Duration::from_secs(1));
        assert_eq!(waiter.join().expect("no panic"), (false, deadline));
    }

    #[test]
    fn a_ring_before_the_wait_is_not_lost_and_is_used_up() {
        for clock in [&ManualClock::new() as &dyn Clock, &SystemClock::new()] {
            let bell = Bell::new();
            bell.ring();
            assert!(clock.wait_until(&bell, Moment::NEVER));
            assert!(!clock.wait_until(&bell, clock.now()));
        }
    }

    /// The bug: a child waited for ever if another thread of its parent held the bell's lock.
    #[test]
    #[expect(unsafe_code, reason = "a fork is a C call")]
    fn a_child_does_not_ring_the_bell_of_its_parent() {
        let bell = Bell::new();
        let rung = held(&bell.rung);
        // SAFETY: the child loads an atomic and calls `alarm` and `_exit`, all async-signal-safe.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: as above. Without a handler the signal ends the child.
            unsafe { libc::alarm(20) };
            bell.ring();
            // SAFETY: as above.
            unsafe { libc::_exit(0) };
        }
        let mut status = -1;
        // SAFETY: waits for the child, and writes to a valid place.
        assert_eq!(unsafe { libc::waitpid(child, &raw mut status, 0) }, child);
        assert_eq!(status, 0, "it has waited for the lock");
        assert!(!*rung);
    }

    #[test]
    fn a_ring_wakes_a_waiting_thread_without_the_time_moving() {
        let clock = ManualClock::new();
        let bell = Bell::new();
        let waiter = {
            let (clock, bell) = (clock.clone(), Arc::clone(&bell));
            thread::spawn(move || clock.wait_until(&bell, Moment::NEVER))
        };
        assert!(clock.wait_for_waiters(1, PATIENCE));
        bell.ring();
        assert!(waiter.join().expect("no panic"));
        assert_eq!(clock.now(), Moment::ORIGIN);
    }

    #[test]
    fn moments_hold_at_the_ends() {
        assert_eq!(Moment::NEVER + Duration::from_secs(1), Moment::NEVER);
        assert_eq!(Moment::ORIGIN - Moment::NEVER, Duration::ZERO);
        assert_eq!(
            format!("{:?} {:?}", Moment::ORIGIN, Moment::NEVER),
            "Moment(0ns) Moment(never)"
        );
    }
}
