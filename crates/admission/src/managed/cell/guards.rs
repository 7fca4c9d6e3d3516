//! The guards of a resource, and taking the value out when none is left.
//!
//! Invariant: a value is taken out only with `guards = 0`, and then the caller cleans it up.

use std::mem;
use std::ops::Deref;
use std::sync::Arc;

use lowtide_core::sync::lock;

use super::super::load::is_unloading;
use super::{Cell, EndedLoads, Loaded, Loading, Phase, State};

impl<T> State<T> {
    /// Returns the load of this number, unless it has been given up.
    pub(super) fn loading(&mut self, number: u64) -> Option<&mut Loading> {
        match &mut self.phase {
            Phase::Loading(loading) if loading.number == number => Some(loading),
            _ => None,
        }
    }

    /// Returns the loads that have ended without a value so far.
    pub(in super::super) const fn ended(&self) -> EndedLoads {
        EndedLoads { failed: self.loads_failed, no_room: self.no_room }
    }

    pub(super) fn ring_drainers(&self) {
        for bell in &self.drainers {
            bell.ring();
        }
    }

    /// Takes the value out if it has no guards. The caller cleans it up.
    pub(super) fn take(&mut self) -> Option<Loaded<T>> {
        if self.guards > 0 {
            return None;
        }
        match mem::replace(&mut self.phase, Phase::Unloading) {
            Phase::Ready { value, permit } => {
                let value = Arc::into_inner(value)?;
                Some(Loaded { value, permit })
            }
            other => {
                self.phase = other;
                None
            }
        }
    }
}

/// Keeps the resource loaded. The fields are dropped in this order: the value is no longer shared
/// when the count falls.
pub(in super::super) struct Guard<T: Send + Sync + 'static> {
    value: Arc<T>,
    _counted: Counted<T>,
}

/// One of `State::guards`.
struct Counted<T: Send + Sync + 'static> {
    cell: Arc<Cell<T>>,
    /// `true` if it is a use.
    counts: bool,
}

impl<T: Send + Sync + 'static> Deref for Guard<T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.value
    }
}

impl<T: Send + Sync + 'static> Drop for Counted<T> {
    fn drop(&mut self) {
        let Self { cell, counts } = self;
        if !cell.birth.is_here() {
            return; // another thread may have held the lock when this process was forked
        }
        let mut state = lock(&cell.state);
        state.guards -= 1;
        if *counts {
            let now = cell.clock.now();
            state.last_used = state.last_used.max(Some(now));
            state.uses.record(now);
        }
        if state.guards == 0 {
            state.ring_drainers();
        }
    }
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// Takes a guard if the resource is loaded and this thread may wait for it.
    pub(in super::super) fn guard_at_once(cell: &Arc<Self>) -> Option<Guard<T>> {
        if is_unloading() { None } else { Self::try_acquire(cell, true) }
    }

    /// Takes a guard if the resource is loaded. It is a use if `counts` is set.
    pub(in super::super) fn try_acquire(cell: &Arc<Self>, counts: bool) -> Option<Guard<T>> {
        if !cell.birth.is_here() {
            return None;
        }
        Self::guard(cell, &mut lock(&cell.state), counts)
    }

    /// Takes a guard if the resource is loaded and not closed.
    pub(super) fn guard(cell: &Arc<Self>, state: &mut State<T>, counts: bool) -> Option<Guard<T>> {
        let Phase::Ready { value, .. } = &state.phase else { return None };
        if state.closed {
            return None;
        }
        let value = Arc::clone(value);
        state.guards += 1;
        Some(Guard { value, _counted: Counted { cell: Arc::clone(cell), counts } })
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::{Arc, OnceLock, mpsc};
    use std::time::Duration;

    use lowtide_core::clock::{Clock, ManualClock, Moment};

    use crate::managed::{AcquireError, Managed, Resource};

    const IDLE: Duration = Duration::from_secs(10);

    struct Bed {
        clock: ManualClock,
        managed: Managed<u8>,
    }

    impl Bed {
        fn new() -> Self {
            let clock = ManualClock::new();
            let managed = Managed::builder("a", || Ok(1)).idle(IDLE);
            let managed = managed.build(Arc::new(clock.clone()), None);
            Self { clock, managed }
        }

        /// Uses it, after so many milliseconds.
        fn use_after(&self, millis: u64) {
            self.clock.advance(Duration::from_millis(millis));
            assert_eq!(*self.managed.acquire_blocking().expect("loads"), 1);
        }

        fn last_used(&self) -> Option<Moment> {
            self.managed.stats().last_used
        }
    }

    fn at(millis: u64) -> Moment {
        Moment::ORIGIN + Duration::from_millis(millis)
    }

    #[test]
    fn each_use_ends_at_its_own_time() {
        let bed = Bed::new();
        for nth in 1..=3 {
            bed.use_after(100);
            bed.clock.advance(Duration::from_millis(20));
            assert_eq!(bed.last_used(), Some(at(nth * 120 - 20)));
        }
        assert_eq!(bed.managed.next_due(), at(340) + IDLE);
        drop(bed.managed.peek());
        bed.clock.advance(IDLE);
        assert_eq!(bed.last_used(), Some(at(340)), "a look is no use");
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    #[test]
    fn a_resource_stays_loaded_for_its_idle_time_after_the_last_of_its_guards() {
        let bed = Bed::new();
        let held = bed.managed.acquire_blocking().expect("loads");
        for _ in 0..3 {
            bed.clock.advance(IDLE);
            bed.use_after(0);
            assert_eq!(bed.managed.next_due(), Moment::NEVER);
        }
        drop(held);
        assert!(!bed.managed.unload_if_due(bed.clock.now()), "it was used just now");
        bed.clock.advance(IDLE - Duration::from_millis(1));
        assert!(!bed.managed.unload_if_due(bed.clock.now()));
        bed.clock.advance(Duration::from_millis(1));
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    const PATIENCE: Duration = Duration::from_secs(20);

    #[test]
    fn a_thread_that_waits_to_unload_is_woken_by_the_last_guard() {
        let bed = Bed::new();
        bed.use_after(0);
        let held = bed.managed.acquire_blocking().expect("loaded");
        let (sender, unloaded) = mpsc::channel();
        let managed = bed.managed.clone();
        let unload = std::thread::spawn(move || sender.send(managed.unload_now(IDLE)));
        assert!(bed.clock.wait_for_waiters(1, PATIENCE));
        drop(held);
        let unloaded = unloaded.recv_timeout(PATIENCE);
        bed.clock.advance(IDLE);
        assert!(unload.join().expect("no panic").is_ok());
        assert!(matches!(unloaded, Ok(Ok(true))), "{unloaded:?}");
    }

    #[test]
    fn a_value_that_is_loaded_after_the_resource_was_closed_has_no_guards() {
        let (clock, managed) = (ManualClock::new(), Arc::new(OnceLock::<Managed<u8>>::new()));
        let closed = Arc::clone(&managed);
        let load = move || {
            let managed = closed.get().ok_or("not set")?;
            assert!(managed.close(Duration::ZERO).is_err(), "it is loading");
            Ok(1)
        };
        let built = Managed::builder("a", load).build(Arc::new(clock), None);
        let managed = managed.get_or_init(|| built);
        for _ in 0..2 {
            let error = managed.acquire_blocking().expect_err("closed");
            assert!(matches!(error, AcquireError::Closed { .. }), "{error:?}");
        }
        assert!(managed.stats().loaded && managed.peek().is_none());
        assert!(managed.unload_if_due(Moment::ORIGIN));
    }

    /// Also if no load would have to be waited for: whether it is loaded is not known before.
    #[test]
    fn a_cleanup_acquires_no_resource_even_if_that_is_loaded() {
        let loaded = Bed::new();
        loaded.use_after(0);
        let other = loaded.managed.clone();
        let unload = move |_| {
            let error = other.acquire_blocking().expect_err("in a cleanup");
            assert!(matches!(error, AcquireError::Unloading { .. }), "{error:?}");
        };
        let managed = Managed::builder("b", || Ok(1)).unload(unload);
        let managed = managed.build(Arc::new(ManualClock::new()), None);
        drop(managed.acquire_blocking().expect("loads"));
        assert!(managed.unload_now(Duration::ZERO).expect("has no guards"));
        assert_eq!(managed.stats().unload_panics_total, 0);
    }

    #[test]
    fn each_use_counts_for_the_interval() {
        let bed = Bed::new();
        bed.use_after(0);
        (0..31).for_each(|_| bed.use_after(1));
        bed.clock.advance(Duration::from_millis(1));
        let interval = |bed: &Bed| bed.managed.stats().use_interval;
        assert_eq!(interval(&bed), Duration::from_millis(1), "32 uses in 32 ms");
        (0..64).for_each(|_| bed.use_after(1));
        assert_eq!(interval(&bed).as_micros(), 31 * 1000 / 32, "the last 32 in 31 ms");
    }
}
