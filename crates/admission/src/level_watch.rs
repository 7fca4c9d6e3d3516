//! Watches the pressure level from any thread or async runtime.
//!
//! The control loop sets the level; a change wakes the watches. A watch compares the current level
//! with the last one that it returned: the latest level is always seen, and a level that came and
//! went in between is not.
//!
//! Invariant: a watch whose last level is not the current one is woken, or finds that when it is
//! polled. No waker is called, cloned or dropped with the lock held.

use std::future::{Future, poll_fn};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use lowtide_core::clock::{Bell, Clock as _, SystemClock};
use lowtide_core::fork::Birth;

use super::admission::Admission;
use super::pressure::Level;

/// The number of the next watch.
static NEXT: AtomicU64 = AtomicU64::new(0);

/// A watch of the pressure on host memory. It needs no async runtime, and does not keep a `Memory`
/// running.
///
/// ```
/// use std::time::Duration;
/// use lowtide_admission::{Admission, Level};
///
/// let admission = Admission::new();
/// let mut watch = admission.watch_level();
/// assert_eq!(watch.level(), Level::None);
/// admission.set_level(Level::High); // the control loop does this
/// assert_eq!(watch.wait_for_change(Duration::from_secs(1)), Some(Level::High));
/// assert_eq!(watch.wait_for_change(Duration::ZERO), None);
/// ```
#[derive(Debug)]
pub struct LevelWatch {
    /// Keeps the account, and not the `Memory`.
    admission: Admission,
    number: u64,
    seen: Level,
    birth: Birth,
}

impl LevelWatch {
    /// Returns the current level.
    #[must_use]
    pub fn level(&self) -> Level {
        self.admission.level()
    }

    /// Waits until the level differs from the one that this watch returned last (at first, the one
    /// when it was created), and returns it. Cancel safe: dropping the future loses no change. In a
    /// forked child the level never changes.
    pub fn changed(&mut self) -> impl Future<Output = Level> + Send {
        poll_fn(|cx| self.poll_change(cx))
    }

    /// Like [`LevelWatch::changed`], but blocks this thread, at most for `timeout` in real time.
    /// Returns `None` if the level has not changed by then.
    pub fn wait_for_change(&mut self, timeout: Duration) -> Option<Level> {
        let (clock, bell) = (SystemClock::new(), Bell::new());
        let deadline = clock.now() + timeout;
        let waker = Waker::from(Arc::clone(&bell));
        // Ends at the deadline at the latest: each iteration waits until then, or for a change.
        loop {
            if let Poll::Ready(level) = self.poll_change(&Context::from_waker(&waker)) {
                return Some(level);
            }
            if clock.now() >= deadline {
                return None;
            }
            clock.wait_until(&bell, deadline);
        }
    }

    fn poll_change(&mut self, cx: &Context<'_>) -> Poll<Level> {
        if let Some(level) = self.take_change() {
            return Poll::Ready(level);
        }
        if !self.birth.is_here() {
            return Poll::Pending;
        }
        let waker = cx.waker().clone();
        let _replaced = self.admission.state().level_watches().insert(self.number, waker);
        // A change before this is seen here, and a later one finds the waker.
        self.take_change().map_or(Poll::Pending, Poll::Ready)
    }

    fn take_change(&mut self) -> Option<Level> {
        let level = self.level();
        (std::mem::replace(&mut self.seen, level) != level).then_some(level)
    }
}

impl Drop for LevelWatch {
    fn drop(&mut self) {
        // In a forked child another thread may have held the lock.
        if self.birth.is_here() {
            let _removed = self.admission.state().level_watches().remove(&self.number);
        }
    }
}

impl Admission {
    /// Returns a watch of the level, for background work that pauses while memory is short.
    #[must_use]
    pub fn watch_level(&self) -> LevelWatch {
        let (admission, birth) = (self.unkept(), Birth::now());
        let (number, seen) = (NEXT.fetch_add(1, Ordering::Relaxed), admission.level());
        LevelWatch { admission, number, seen, birth }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::task::Wake;
    use std::thread;

    use super::*;

    const PATIENCE: Duration = Duration::from_secs(20);

    #[derive(Default)]
    struct Wakes(AtomicU64);

    impl Wake for Wakes {
        fn wake(self: Arc<Self>) {
            self.0.fetch_add(1, Ordering::SeqCst);
        }
    }

    #[test]
    fn a_change_wakes_each_watch_once_and_the_latest_level_is_seen() {
        let admission = Admission::new();
        let mut watches = [admission.watch_level(), admission.watch_level()];
        let wakes = Arc::new(Wakes::default());
        let waker = Waker::from(Arc::clone(&wakes));
        let poll = |watch: &mut LevelWatch| watch.poll_change(&Context::from_waker(&waker));
        for watch in &mut watches {
            assert!(poll(watch).is_pending() && poll(watch).is_pending());
        }
        admission.set_level(Level::None);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 0, "nothing has changed");
        admission.set_level(Level::Elevated);
        admission.set_level(Level::Critical);
        assert_eq!(wakes.0.load(Ordering::SeqCst), 2);
        for watch in &mut watches {
            assert_eq!(poll(watch), Poll::Ready(Level::Critical), "not the one in between");
            assert!(poll(watch).is_pending());
        }
        let [dropped, kept] = watches;
        drop(dropped);
        admission.set_level(Level::None);
        assert_eq!((wakes.0.load(Ordering::SeqCst), kept.level()), (3, Level::None));
    }

    #[test]
    fn no_change_is_lost_between_a_thread_that_waits_and_one_that_sets() {
        let admission = Admission::new();
        let mut watch = admission.watch_level();
        let seen = AtomicU64::new(0);
        thread::scope(|scope| {
            scope.spawn(|| {
                for nth in 1..=2000_u64 {
                    admission.set_level(if nth % 2 == 0 { Level::None } else { Level::High });
                    while seen.load(Ordering::SeqCst) < nth {
                        thread::yield_now();
                    }
                }
            });
            for nth in 1..=2000 {
                let level = watch.wait_for_change(PATIENCE);
                let expected = if nth % 2 == 0 { Level::None } else { Level::High };
                assert_eq!(level, Some(expected), "change {nth}");
                seen.store(nth, Ordering::SeqCst);
            }
        });
        assert_eq!(watch.wait_for_change(Duration::ZERO), None);
    }
}
