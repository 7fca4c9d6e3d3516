//! Delivers the events of an arena to its observers: a recorder, a history.
//!
//! The executor takes the events out of the state's queue when it releases the state's lock, and
//! delivers them on the same thread, without holding the state's lock. It takes the lock of the
//! delivery before it releases the state's lock, so that batches arrive in the order of the state.
//! This module makes no decisions, and an arena without observers has no [`Observers`].
//!
//! Invariant: every observer sees every event once, in the order of the sequence numbers.

use std::any::Any;

use crate::state::event::{EventQueue, SequencedEvent};
use lowtide_core::sync::{Mutex, MutexGuard, lock};

/// Observes the events of an arena. Dropped when the arena is dropped.
pub(crate) trait Observer: Any + Send + Sync {
    /// Takes note of events, on the thread that caused them. Must not block or use the arena.
    fn observe(&self, events: &[SequencedEvent]);

    /// Writes buffered events. May block, and may use the arena. Called at the end of an operation,
    /// with no lock held.
    fn flush(&self) {}

    /// Returns the bytes of this observer's memory that count as metadata of the arena.
    fn metadata(&self) -> usize {
        0
    }
}

/// The observers of an arena.
pub(crate) struct Observers {
    all: Vec<Box<dyn Observer>>,
    delivery: Mutex<Delivery>,
}

/// The progress of the delivery.
struct Delivery {
    /// The events that are being delivered; empty otherwise.
    events: Vec<SequencedEvent>,
    /// The number of events delivered.
    delivered: u64,
}

/// Events that were taken out of the state's queue.
pub(crate) struct Batch<'a> {
    observers: &'a Observers,
    delivery: MutexGuard<'a, Delivery>,
}

impl Observers {
    /// Creates the observers of an arena; returns `None` if there are none.
    pub(crate) fn new(all: Vec<Box<dyn Observer>>) -> Option<Self> {
        if all.is_empty() {
            return None;
        }
        let delivery = Delivery { events: EventQueue::buffer(), delivered: 0 };
        Some(Self { all, delivery: Mutex::new(delivery) })
    }

    /// Takes the events of the queue. The caller holds the state's lock, and releases it before
    /// delivering the batch.
    pub(crate) fn take(&self, queue: &mut EventQueue) -> Option<Batch<'_>> {
        if queue.is_empty() {
            return None;
        }
        let mut delivery = lock(&self.delivery);
        queue.take(&mut delivery.events);
        Some(Batch { observers: self, delivery })
    }

    /// Lets the observers write their buffered events.
    pub(crate) fn flush(&self) {
        self.all.iter().for_each(|observer| observer.flush());
    }

    /// Returns the first observer of a type, after the delivery in progress has ended.
    pub(crate) fn find<T: Observer>(&self) -> Option<&T> {
        drop(lock(&self.delivery));
        self.all.iter().find_map(|observer| (&**observer as &dyn Any).downcast_ref())
    }

    pub(crate) fn metadata(&self) -> usize {
        self.all.iter().map(|observer| observer.metadata()).sum()
    }
}

impl Batch<'_> {
    /// Delivers the events.
    pub(crate) fn deliver(mut self) {
        let Delivery { events, delivered } = &mut *self.delivery;
        let mut in_order = events.iter().zip(*delivered..);
        debug_assert!(in_order.all(|(event, nth)| event.sequence == nth), "in order, each once");
        *delivered += events.len() as u64;
        for observer in &self.observers.all {
            observer.observe(events);
        }
        events.clear();
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use std::sync::Arc;
    use std::thread::{self, ThreadId};

    use super::*;
    use crate::state::event::ArenaEvent;
    use crate::{ArenaConfig, DeviceArena, HostDriver, Region};
    use lowtide_core::bytes::ByteSize;
    use lowtide_core::clock::{Bell, Clock, ManualClock, Moment, SystemClock, Wake};
    use lowtide_core::decay::DecayTime;
    use lowtide_core::sync::atomic::{AtomicU64, Ordering};

    /// The sequence number and the kind of each event, and the thread that delivered it.
    type Seen = Arc<Mutex<Vec<(u64, ArenaEvent, ThreadId)>>>;

    struct Probe(Seen);

    impl Observer for Probe {
        fn observe(&self, events: &[SequencedEvent]) {
            let thread = thread::current().id();
            let seen = events.iter().map(|of| (of.sequence, of.event.clone(), thread));
            lock(&self.0).extend(seen);
        }
    }

    fn observed(clock: Arc<dyn Clock>) -> (DeviceArena, [Seen; 2]) {
        let seen = [Seen::default(), Seen::default()];
        let probe = |seen: &Seen| Box::new(Probe(Arc::clone(seen))) as Box<dyn Observer>;
        let observers = seen.iter().map(probe).collect();
        let config = ArenaConfig { decay: DecayTime::AtOnce, ..ArenaConfig::new("observed") };
        let arena =
            DeviceArena::open_observed((Arc::new(HostDriver::new()), clock), config, observers);
        (arena.expect("an arena"), seen)
    }

    #[test]
    fn events_of_several_threads_arrive_in_order_without_a_gap() {
        const THREADS: u64 = 4;
        const ROUNDS: u64 = 200;
        let (arena, seen) = observed(Arc::new(SystemClock::new()));
        thread::scope(|scope| {
            for number in 1..=THREADS {
                let arena = arena.clone();
                scope.spawn(move || {
                    for round in 0..ROUNDS {
                        let len = usize::try_from(number * 100_000 + round * 64).expect("small");
                        let mut buffer = arena.alloc::<u8>(len, Region::Dynamic).expect("memory");
                        buffer.resize(len / 2).expect("smaller");
                        drop(buffer);
                        let _ = arena.purge();
                    }
                });
            }
        });
        for seen in seen {
            let seen = lock(&seen);
            assert!(seen.iter().map(|event| event.0).eq(0..seen.len() as u64));
            let [mut allocated, mut resized, mut freed] = [0; 3];
            // Each event is delivered by the thread that caused it.
            let mut threads = Vec::new();
            for (_, event, thread) in seen.iter() {
                match event {
                    ArenaEvent::Allocated { .. } => allocated += 1,
                    ArenaEvent::Resized { .. } => resized += 1,
                    ArenaEvent::Freed { .. } => freed += 1,
                    _ => continue,
                }
                if !threads.contains(thread) {
                    threads.push(*thread);
                }
            }
            assert_eq!([allocated, resized, freed], [THREADS * ROUNDS; 3]);
            assert_eq!(threads.len() as u64, THREADS);
        }
    }

    #[test]
    fn the_buffers_of_events_stay_as_they_are_and_are_empty_after_each_call() {
        let (arena, seen) = observed(Arc::new(ManualClock::new()));
        let buffers = arena.inner().lock_state().events.metadata();
        assert!(buffers > 0 && arena.snapshot().metadata >= ByteSize::of(buffers));
        for _ in 0..1000 {
            drop(arena.alloc::<u8>(1000, Region::Dynamic).expect("memory"));
            assert!(arena.inner().lock_state().events.is_empty());
        }
        assert_eq!(arena.inner().lock_state().events.metadata(), buffers);
        assert!(lock(&seen[0]).len() > 2000);
    }

    /// Counts the events that were not flushed.
    struct Unflushed(Arc<AtomicU64>);

    impl Observer for Unflushed {
        fn observe(&self, events: &[SequencedEvent]) {
            self.0.fetch_add(events.len() as u64, Ordering::Relaxed);
        }

        fn flush(&self) {
            self.0.store(0, Ordering::Relaxed);
        }
    }

    /// Bug: the event of a failed allocation or resize came after the flush of its operation.
    #[test]
    fn an_operation_that_fails_flushes_its_events() {
        let unflushed = Arc::new(AtomicU64::new(0));
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        let config = ArenaConfig { limit: ByteSize::mib(4), ..ArenaConfig::new("observed") };
        let observers = vec![Box::new(Unflushed(Arc::clone(&unflushed))) as Box<dyn Observer>];
        let arena = DeviceArena::open_observed((driver, clock), config, observers).expect("open");
        let mut buffer = arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room");
        assert_eq!(unflushed.load(Ordering::Relaxed), 0);
        arena.alloc::<u8>(8 << 20, Region::Dynamic).expect_err("no room");
        assert_eq!(unflushed.load(Ordering::Relaxed), 0);
        buffer.resize(8 << 20).expect_err("no room");
        assert_eq!(unflushed.load(Ordering::Relaxed), 0);
    }

    /// A clock that counts how often it is read.
    #[derive(Debug, Default)]
    struct CountingClock {
        reads: AtomicU64,
        clock: ManualClock,
    }

    impl Clock for CountingClock {
        fn now(&self) -> Moment {
            self.reads.fetch_add(1, Ordering::Relaxed);
            self.clock.now()
        }

        fn since_epoch(&self) -> std::time::Duration {
            self.clock.since_epoch()
        }

        fn wait_until(&self, bell: &Arc<Bell>, deadline: Moment) -> Wake {
            self.clock.wait_until(bell, deadline)
        }
    }

    #[test]
    fn an_arena_without_observers_has_no_events_and_reads_no_clock_for_them() {
        let clock = Arc::new(CountingClock::default());
        let config = ArenaConfig { decay: DecayTime::Never, ..ArenaConfig::new("alone") };
        let config = ArenaConfig { thread_cache: ByteSize::ZERO, ..config };
        let driver = Arc::new(HostDriver::new());
        let arena = DeviceArena::open(driver, Arc::clone(&clock) as _, config).expect("an arena");
        let before = clock.reads.load(Ordering::Relaxed);
        let mut buffer = arena.alloc::<u8>(1000, Region::Dynamic).expect("memory");
        buffer.resize(10).expect("smaller");
        drop(buffer);
        arena.purge().expect("nothing fails");
        arena.set_limit(ByteSize::gib(1));
        assert_eq!(clock.reads.load(Ordering::Relaxed), before);
        assert_eq!(arena.inner().lock_state().events.metadata(), 0);
    }
}
