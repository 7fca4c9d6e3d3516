//! Lets few large requests run at once while they compute, so that small ones find a free thread.
//!
//! A large request often works for tens of milliseconds in one poll, and an executor runs what is
//! ready in the order in which it became so. If more large requests are ready than there are
//! processors, each small one waits for all of them, and the memory of those that wait is reserved
//! for nothing. So a large request begins when it is its turn. The others wait in the queue, with
//! nothing reserved.
//!
//! How many have a turn at once is learned, from unlimited. Each tick of the control loop compares
//! the number of threads that poll large requests at this moment with the number of processors.
//! If all are taken, the limit falls to the turns there are, and then by one and an eighth in each
//! tick. If some are free while requests wait for a turn, it rises by the free part of that. So large
//! requests that compute keep at least half of the processors busy, and those that wait for their
//! clients, a disk or another service run in as many as fit into memory.
//!
//! A turn begins with the admission and ends when the handler has answered, or while the request is
//! suspended. None is rejected for it: one that has waited for long enough begins without a turn.
//!
//! Invariants: `taken` is the number of turns that were entered and not left; `limit` is at least
//! half of the number of processors, and at least 1.

use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};

use super::large::LARGE_MIN;

/// The part of the limit by which a tick changes it. An estimate: it doubles in six ticks.
const STEP_PART: u64 = 8;
/// The unit of the limit, as a part of a turn.
const PARTS: u64 = 1 << 8;

/// The turns of an admission's large requests.
#[derive(Debug, Default)]
pub(super) struct Turns {
    processors: AtomicU64,
    /// In [`PARTS`] of a turn.
    limit: AtomicU64,
    taken: AtomicU64,
    /// The number of threads that poll large requests.
    working: AtomicU64,
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

    /// Adapts the limit at a tick, at which a request `waits` for its turn or none does.
    pub(super) fn adapt(&self, waits: bool) {
        let (processors, limit) = (self.processors.load(Relaxed), self.limit.load(Relaxed));
        let (step, working) = (PARTS + limit / STEP_PART, self.working.load(Relaxed));
        if working >= processors {
            let least = limit.min(self.taken.load(Relaxed) * PARTS);
            let lower = least.saturating_sub(PARTS + least / STEP_PART);
            self.limit.store(lower.max(processors.div_ceil(2) * PARTS), Relaxed);
        } else if waits {
            self.limit.store(limit + step * (processors - working) / processors, Relaxed);
        }
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
        self.turns.working.fetch_add(1, Relaxed);
    }

    /// Records that this thread polls the request no more.
    pub fn ends_work(&self) {
        self.turns.working.fetch_sub(1, Relaxed);
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

    #[test]
    fn large_requests_that_compute_keep_half_of_the_processors_busy() {
        let (turns, mut running) = working(20);
        turns.adapt(false);
        assert_eq!(turns.limit.load(Relaxed) * 2, 33 * PARTS);
        (0..20).for_each(|_| turns.adapt(true));
        running.drain(1..).for_each(|turn| turn.ends_work());
        turns.adapt(true);
        assert!(begin(turns, 1).is_empty(), "one computes");
        turns.adapt(true);
        running.extend(begin(turns, 9));
        assert_eq!(running.len(), 2, "the other half of a step");
        assert!(turns.of(ByteSize::kib(255)).is_none(), "a small one needs no turn");
        let late = turns.of(LARGE).expect("it is large");
        assert!(!late.enter(false) && late.enter(true), "it has waited for long enough");
        drop((late, running));
        assert_eq!(begin(turns, 9).len(), 2);
    }

    #[test]
    fn large_requests_that_wait_for_others_run_in_as_many_as_memory_carries() {
        let (turns, mut running) = working(2);
        turns.adapt(false);
        running.iter().for_each(Turn::ends_work);
        (0..100).for_each(|_| turns.adapt(false));
        assert!(begin(turns, 1).is_empty(), "none waits, so nothing is learned");
        let mut ticks = 0;
        while running.len() < 200 {
            turns.adapt(true);
            running.extend(begin(turns, usize::MAX));
            ticks += 1;
        }
        assert!(ticks <= 40, "{ticks} ticks");
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
