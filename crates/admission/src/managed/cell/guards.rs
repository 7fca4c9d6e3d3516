//! The guards of a resource: taking them, their ends, and taking the value out when none is left.
//!
//! A guard of a loaded resource is taken and ends without the lock. The time at which a use ends is
//! read once per tick of the control loop. Further uses in that tick are only counted, and recorded
//! when the cell is looked at next: the loop does at each tick. Without a loop, each end reads the
//! clock.
//!
//! Invariants: a value is taken out only with `guards = 0`, and then the caller cleans it up;
//! recorded times are at most one tick late, and never early while the loop ticks.
#![expect(unsafe_code, reason = "the slot of a cell is its own")]

use std::time::Duration;

use lowtide_core::sync::atomic::Ordering;
use lowtide_core::sync::{MutexGuard, lock};

use super::super::load::is_unloading;
use super::super::slot::{Guard, Handle, Shared, Slot};
use super::{Cell, EndedLoads, Loaded, Loading, Phase, State};

/// The longest time after the start of a tick at which a use of that tick is recorded, if no tick
/// looked at the cell: it is not registered. The tick of an idle service.
const TICK: Duration = Duration::from_millis(250);
/// No use was recorded in any tick.
pub(super) const NO_TICK: u64 = u64::MAX;

impl State {
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
}

impl<T: Send + Sync + 'static> Cell<T> {
    /// Takes a guard if the resource is loaded and this thread may wait for it.
    #[inline]
    pub(in super::super) fn guard_at_once(cell: &Handle<Self>) -> Option<Guard<Self>> {
        if !cell.birth.is_here() || is_unloading() {
            return None;
        }
        cell.guard(true)
    }

    /// Takes a guard if the resource is loaded. It is a use if `counts` is set.
    pub(in super::super) fn try_acquire(cell: &Handle<Self>, counts: bool) -> Option<Guard<Self>> {
        if cell.birth.is_here() { cell.guard(counts) } else { None }
    }

    /// Panics, because the program keeps all guards that can be counted: 16,777,215.
    #[cold]
    pub(super) fn has_too_many_guards(&self) -> ! {
        panic!("cannot acquire {}: {} guards are held", self.name(), self.slot.guards());
    }

    /// Makes a value available, unless the resource is closed.
    pub(super) fn put(&self, state: &mut State, Loaded { value, permit }: Loaded<T>) {
        state.phase = Phase::Ready { permit };
        self.slot.put(value, !state.closed);
    }

    /// Takes the value out if it has no guards, and if `is_idle` is set, if it was not used since
    /// [`Cell::look`]. The caller cleans it up.
    pub(super) fn take(&self, state: &mut State, is_idle: bool) -> Option<Loaded<T>> {
        let Phase::Ready { permit } = &mut state.phase else { return None };
        let value = self.slot.take(is_idle)?;
        let permit = permit.take();
        state.phase = Phase::Unloading;
        Some(Loaded { value, permit })
    }

    /// Locks the state after recording the uses that have ended.
    pub(super) fn look(&self) -> MutexGuard<'_, State> {
        let mut state = lock(&self.state);
        self.record_counted(&mut state);
        state
    }

    /// Records the uses that were only counted. They ended after the last one that was recorded.
    fn record_counted(&self, state: &mut State) {
        let count = self.slot.take_uses();
        if count == 0 {
            return;
        }
        let now = self.clock.now();
        let start = state.last_used.unwrap_or(now);
        let ticks = self
            .tick()
            .map_or(u64::MAX, |tick| tick.wrapping_sub(self.recorded_in.load(Ordering::Relaxed)));
        let end = if ticks <= 1 { now } else { now.min(start + TICK) };
        state.uses.record_between(start, end, count);
        state.last_used = state.last_used.max(Some(end));
    }

    /// Returns the number of the control loop's last tick; `None` if none runs.
    #[inline]
    fn tick(&self) -> Option<u64> {
        self.admission.as_ref().and_then(|admission| admission.desk().tick())
    }
}

// SAFETY: the slot is a field.
unsafe impl<T: Send + Sync + 'static> Shared for Cell<T> {
    type Value = T;

    #[inline]
    fn slot(&self) -> &Slot<T> {
        &self.slot
    }

    #[inline]
    fn may_record_later(&self) -> bool {
        self.tick().is_some_and(|tick| tick == self.recorded_in.load(Ordering::Acquire))
    }

    fn end_guard(&self, counts: bool, end: impl FnOnce() -> usize) {
        if !self.birth.is_here() {
            end();
            return; // another thread may have held the lock when this process was forked
        }
        let tick = self.tick().unwrap_or(NO_TICK);
        let mut state = self.look();
        if counts {
            let now = self.clock.now();
            state.last_used = state.last_used.max(Some(now));
            state.uses.record(now);
            self.recorded_in.store(tick, Ordering::Release);
        }
        if end() == 0 {
            state.ring_drainers();
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::{Arc, OnceLock, mpsc};

    use lowtide_core::clock::{Clock, ManualClock, Moment};

    use super::*;
    use crate::admission::Admission;
    use crate::managed::{AcquireError, Managed, Resource};

    const IDLE: Duration = Duration::from_secs(10);

    struct Bed {
        clock: ManualClock,
        admission: Admission,
        managed: Managed<u8>,
    }

    impl Bed {
        fn new() -> Self {
            let (clock, admission) = (ManualClock::new(), Admission::new());
            let managed = Managed::builder("a", || Ok(1)).idle(IDLE);
            let managed = managed.build(Arc::new(clock.clone()), Some(admission.clone()));
            Self { clock, admission, managed }
        }

        fn tick(&self) {
            self.admission.tend_queue(self.clock.now());
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
    fn without_a_loop_each_use_ends_at_its_own_time() {
        let bed = Bed::new();
        for nth in 1..=3 {
            bed.use_after(100);
            bed.clock.advance(Duration::from_millis(20));
            assert_eq!(bed.last_used(), Some(at(nth * 120 - 20)));
        }
        assert_eq!(bed.managed.next_due(), at(340) + IDLE);
        bed.tick();
        bed.admission.desk().queue.end();
        bed.use_after(0);
        bed.use_after(40);
        bed.clock.advance(IDLE);
        assert_eq!(bed.last_used(), Some(at(400)), "the loop has ended");
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    #[test]
    fn further_uses_in_a_tick_are_recorded_at_the_next_one() {
        let bed = Bed::new();
        bed.tick();
        bed.use_after(100);
        assert_eq!(bed.last_used(), Some(at(100)), "the first use of a tick is exact");
        bed.use_after(10);
        bed.use_after(10);
        bed.clock.advance(Duration::from_millis(30));
        bed.tick();
        assert_eq!(bed.managed.next_due(), at(150) + IDLE);
        assert_eq!(bed.last_used(), Some(at(150)));
        bed.use_after(20);
        assert_eq!(bed.last_used(), Some(at(170)), "the next tick has begun");
        drop(bed.managed.peek());
        bed.clock.advance(IDLE);
        assert_eq!(bed.last_used(), Some(at(170)), "a look is no use");
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    #[test]
    fn a_use_that_no_tick_looked_at_ended_a_tick_later_at_most() {
        let bed = Bed::new();
        bed.tick();
        bed.use_after(100);
        bed.use_after(100);
        for _ in 0..3 {
            bed.clock.advance(IDLE);
            bed.tick();
        }
        assert_eq!(bed.last_used(), Some(at(100) + TICK));
        assert!(bed.managed.unload_if_due(bed.clock.now()));
    }

    #[test]
    fn a_guard_that_ends_between_two_looks_keeps_the_resource_for_its_idle_time() {
        let bed = Bed::new();
        bed.tick();
        let held = bed.managed.acquire_blocking().expect("loads");
        for _ in 0..3 {
            bed.clock.advance(IDLE);
            bed.tick();
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

    /// The end of a guard that is only counted wakes no thread.
    #[test]
    fn a_thread_that_waits_to_unload_is_woken_by_the_last_guard_of_a_tick() {
        let bed = Bed::new();
        bed.tick();
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
        bed.use_after(0);
        bed.use_after(0);
        assert_eq!(bed.managed.cell.slot.take_uses(), 2, "no thread waits any more");
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
    fn uses_in_a_tick_count_each_for_the_interval() {
        let bed = Bed::new();
        bed.tick();
        bed.use_after(0);
        (0..31).for_each(|_| bed.use_after(1));
        bed.clock.advance(Duration::from_millis(1));
        let interval = |bed: &Bed| bed.managed.stats().use_interval;
        assert_eq!(interval(&bed), Duration::from_millis(1), "32 uses in 32 ms");
        (0..64).for_each(|_| bed.use_after(1));
        assert_eq!(interval(&bed).as_micros(), 31 * 1000 / 32, "the last 32 in 31 ms");
    }
}
