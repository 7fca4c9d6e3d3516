//! Lets few large requests run at once while they compute, so that small ones find a free thread.
//!
//! A large request often works for tens of milliseconds in one poll, and an executor runs what is
//! ready in the order in which it became so. If more large requests are ready than there are
//! processors, each small one waits for all of them, and the memory of those that wait is reserved
//! for nothing. So a large request begins when it is its turn. The others wait in the queue, with
//! nothing reserved.
//!
//! How many have a turn at once is learned, from unlimited. Each tick of the control loop looks at
//! the threads that poll large requests. If some processors have none and requests wait for a turn,
//! the limit rises. If all have one, it falls, at once to the turns that there are: slowly if threads
//! become free between two ticks, so that a small request soon finds one, and the faster the longer
//! none did. So large requests that compute in short polls have all processors, and those that
//! compute in long ones have them for less than half of the time, while small requests come. Those
//! that wait for their clients, a disk or another service run in as many as fit into memory.
//!
//! A turn begins with the admission and ends when the handler has answered, or while the request is
//! suspended. None is rejected for it: one that has waited for long enough begins without a turn.
//!
//! Invariants: `taken` is the number of turns that were entered and not left; `limit` is at least
//! half of the number of processors, and at least 1.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::large::LARGE_MIN;

/// The unit of the limit, as a part of a turn.
const PARTS: u64 = 1 << 8;
/// The limit rises by a quarter of a turn and by a 32nd of itself in so many microseconds, and falls
/// by a tenth of that where no thread is stuck. Estimates: it doubles in a third of a second, and a
/// request of milliseconds moves it little.
const PACE: u64 = 10_000;
/// While all threads have been stuck for so many microseconds, it falls as fast as it rises; for
/// twice as long, twice as fast. Measured on mixed loads, for throughput and for the latency of small
/// requests.
const STUCK: u64 = 2_000;
/// A later tick changes it no further than one after this time: it knows only its own moment.
const PASSED_MAX: Duration = Duration::from_millis(50);
/// The unit of the number of polls.
const BEGUN: u64 = 1 << 32;

/// The turns of an admission's large requests.
#[derive(Debug, Default)]
pub(super) struct Turns {
    processors: AtomicU64,
    /// In [`PARTS`] of a turn.
    limit: AtomicU64,
    taken: AtomicU64,
    /// The number of threads that poll large requests, and that of polls so far, in [`BEGUN`].
    polls: AtomicU64,
    /// The same at the last tick.
    before: AtomicU64,
    /// The microseconds since a thread became free, while all processors are taken.
    stuck: AtomicU64,
    /// The small requests admitted until the last tick at which some processor was free, and
    /// whether there was one since the tick before.
    small: AtomicU64,
    delays: AtomicBool,
}

/// The turn of a large request. Dropping it leaves it.
#[derive(Debug)]
pub struct Turn {
    turns: &'static Turns,
    is_taken: AtomicBool,
}

impl Turns {
    /// Starts over, on so many processors.
    pub(super) fn begin(&self, processors: usize) {
        self.processors.store((processors as u64).max(1), Relaxed);
        self.limit.store(u32::MAX.into(), Relaxed);
    }

    /// Returns a turn that is not entered; `None` if a request that claims so much needs none.
    pub(super) fn of(&'static self, claim: ByteSize) -> Option<Turn> {
        (claim >= LARGE_MIN).then(|| Turn { turns: self, is_taken: AtomicBool::new(false) })
    }

    /// Adapts the limit at a tick, so much later than the last one, until which so many `small`
    /// requests were admitted since the start, and at which a request `waits` for its turn or none.
    pub(super) fn adapt(&self, passed: Duration, small: u64, waits: bool) {
        let (limit, polls) = (self.limit.load(Relaxed), self.polls.load(Relaxed));
        let processors = self.processors.load(Relaxed);
        let passed = u64::from(passed.min(PASSED_MAX).subsec_micros());
        let step = |of: u64| (PARTS / 4 + of / 32) * passed / PACE;
        let goes_on = self.before.swap(polls, Relaxed) == polls;
        let next = if polls % BEGUN >= processors {
            let is_stuck = goes_on && self.delays.load(Relaxed);
            let stuck = if is_stuck { self.stuck.load(Relaxed) + passed } else { 0 };
            self.stuck.store(stuck, Relaxed);
            let most = limit.min((self.taken.load(Relaxed) + 1) * PARTS);
            most.saturating_sub(step(most) * (STUCK / 10 + stuck) / STUCK)
        } else {
            self.delays.store(self.small.swap(small, Relaxed) != small, Relaxed);
            limit + if waits { step(limit) } else { 0 }
        };
        self.limit.store(next.clamp(processors.div_ceil(2) * PARTS, u32::MAX.into()), Relaxed);
    }
}

impl Turn {
    /// Lets the request begin, or go on once its body has arrived. Returns `false` if it has to
    /// wait, unless it `must` not.
    pub fn enter(&self, must: bool) -> bool {
        let limit = if must { u64::MAX } else { self.turns.limit.load(Relaxed) / PARTS };
        let add = |taken| (taken < limit).then(|| taken + 1);
        let is_taken = self.is_taken.load(Relaxed)
            || self.turns.taken.fetch_update(Relaxed, Relaxed, add).is_ok();
        self.is_taken.store(is_taken, Relaxed);
        is_taken
    }

    /// Ends the turn, until it is entered again.
    pub fn leave(&self) {
        if self.is_taken.swap(false, Relaxed) {
            self.turns.taken.fetch_sub(1, Relaxed);
        }
    }

    /// Records that a thread begins to poll the request. [`Turn::ends_work`] follows.
    pub fn begins_work(&self) {
        self.turns.polls.fetch_add(BEGUN + 1, Relaxed);
    }

    /// Records that this thread polls the request no more.
    pub fn ends_work(&self) {
        self.turns.polls.fetch_sub(1, Relaxed);
    }
}

impl Drop for Turn {
    fn drop(&mut self) {
        self.leave();
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    const TICK: Duration = Duration::from_millis(10);

    const LARGE: ByteSize = ByteSize::mib(1);

    /// Turns for two processors, of which `count` work.
    fn working(count: usize) -> (&'static Turns, Vec<Turn>) {
        let turns: &'static Turns = Box::leak(Box::default());
        turns.begin(2);
        let running = begin(turns, count);
        running.iter().for_each(Turn::begins_work);
        (turns, running)
    }

    /// The turns that begin now, so many at most.
    fn begin(turns: &'static Turns, most: usize) -> Vec<Turn> {
        let next = || turns.of(LARGE).filter(|turn| turn.enter(false));
        std::iter::from_fn(next).take(most).collect()
    }

    /// Lets requests compute, each in one poll of so many ticks, while more wait than ever begin.
    /// Returns the part of the time in which they did on both processors, beside small requests or
    /// not.
    fn full_part(turns: &'static Turns, ticks: u64, small: bool) -> f64 {
        let (mut full, mut small_total) = (0, 0);
        for _ in 0..1000 {
            let running = begin(turns, 100);
            running.iter().for_each(Turn::begins_work);
            full += u32::from(running.len() > 1);
            for _ in 0..ticks {
                small_total += u64::from(small);
                turns.adapt(TICK / 2, small_total, true);
            }
            running.iter().for_each(Turn::ends_work);
        }
        f64::from(full) / 1000.0
    }

    #[test]
    fn large_requests_that_compute_leave_a_processor_if_their_polls_delay_small_ones() {
        let (turns, mut running) = working(20);
        turns.adapt(TICK, 1, false);
        assert!(begin(turns, 100).len() <= 1, "they are enough");
        running.drain(..).for_each(|turn| turn.ends_work());
        full_part(turns, 6, true);
        let short = full_part(turns, 1, true);
        assert!(short > 0.8, "{short} in short polls");
        let long = full_part(turns, 6, true);
        assert!((0.1..0.5).contains(&long), "{long} in long polls");
        let lone = full_part(turns, 6, false);
        assert!(lone > 0.8, "{lone} without small requests");
        assert!(turns.of(ByteSize::kib(255)).is_none(), "a small one needs no turn");
        let (mut early, late) = (begin(turns, 9), turns.of(LARGE).expect("it is large"));
        assert!(!late.enter(false) && late.enter(true), "it has waited for long enough");
        drop((early.pop(), late));
        assert_eq!(begin(turns, 9).len(), 1);
    }

    #[test]
    fn large_requests_that_wait_for_others_run_in_as_many_as_memory_carries() {
        let (turns, mut running) = working(2);
        turns.adapt(TICK, 1, false);
        running.iter().for_each(Turn::ends_work);
        (0..100).for_each(|small| turns.adapt(TICK, small, false));
        assert!(begin(turns, 100).len() <= 1, "none waits, so nothing is learned");
        let mut ticks = 0;
        while running.len() < 200 {
            turns.adapt(TICK, ticks, true);
            running.extend(begin(turns, usize::MAX));
            ticks += 1;
        }
        assert!(ticks <= 100, "{ticks} ticks");
    }

    #[test]
    fn a_late_tick_changes_the_limit_little() {
        let (turns, _running) = working(1);
        turns.limit.store(2 * PARTS, Relaxed);
        turns.adapt(Duration::from_secs(60), 1, true);
        assert!((3 * PARTS..6 * PARTS).contains(&turns.limit.load(Relaxed)));
    }

    #[test]
    fn a_turn_that_was_left_makes_room_until_it_is_entered_again() {
        let (turns, running) = working(2);
        turns.limit.store(2 * PARTS, Relaxed);
        let other = turns.of(LARGE).expect("it is large");
        assert!(running[0].enter(false) && !other.enter(false));
        (0..2).for_each(|_| running[0].leave());
        assert!(other.enter(false) && !running[0].enter(false));
        drop(other);
        assert!(running[0].enter(false));
    }
}
