//! Acts of others at the worst moment of a sleep or a wake, and the bugs that these once caused.

use std::any::Any;
use std::future::Future as _;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Wake, Waker};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Call, Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{
    Contents, DeviceArena, DeviceError, HostBudget, Region, SleepOptions, SleepState,
};

use super::support::{Bed, MIB};
use crate::wait_until;

const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

/// The bug: what is copied back was decided before the memory was back. A block whose memory had
/// stayed, since the driver did not take it, and that was freed and given back in between, was
/// copied to where nothing was.
#[test]
fn contents_of_a_block_that_was_freed_during_the_wake_were_copied_to_no_memory() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    let freed = bed.marked(MIB, Region::Dynamic, 2);
    let sim = bed.sim.clone();
    bed.sim.before(Call::Unmap, 1, move || {
        sim.fail_always(Call::Unmap, Some(SimError::Unknown));
        sim.fail_always(Call::Create, Some(SimError::Unknown));
    });
    assert!(bed.arena.sleep(NOW).is_err());
    bed.sim.forget_failures();
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    assert_eq!(bed.arena.snapshot().committed, ByteSize::mib(1), "it was not taken");
    let arena = bed.arena.clone();
    bed.sim.before(Call::Create, 0, move || {
        drop(freed);
        assert_eq!(arena.purge().expect("no error"), ByteSize::mib(1));
    });
    bed.arena.wake().expect("awake");
    bed.sim.run_all();
    bed.sim.assert_no_faults();
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// The bug: memory on its way back counted against the limit after its block was freed, so that a
/// callback that made room in the arena itself did not help.
#[test]
fn a_wake_under_a_lowered_limit_did_not_see_what_a_callback_freed() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Stable, 1);
    let cache = Arc::new(Mutex::new(vec![bed.marked(MIB, Region::Dynamic, 2)]));
    bed.arena.sleep(NOW).expect("asleep");
    bed.arena.set_limit(ByteSize::mib(1));
    let evict = bed.arena.on_shortage({
        let cache = Arc::clone(&cache);
        move |_| cache.lock().expect("whole").pop().is_some()
    });
    let woken = bed.arena.wake().expect("awake");
    assert_eq!((woken.memory, woken.copied), (ByteSize::mib(1), ByteSize::mib(1)));
    bed.assert_marked(&kept, 1);
    drop((evict, kept, cache));
    bed.end();
}

/// The bug: a wake left idle memory of its own where it was, and was refused for want of memory.
#[test]
fn a_wake_did_not_use_the_memory_of_a_block_that_stayed_and_was_freed() {
    for by_limit in [false, true] {
        let bed = Bed::new(Order::Lazy);
        let kept = bed.marked(MIB, Region::Stable, 1);
        let mut stays = bed.marked(MIB, Region::Dynamic, 2);
        stays.set_contents(Some(Contents::Stay)).expect("here");
        bed.arena.sleep(NOW).expect("asleep");
        drop(stays);
        assert_eq!(bed.arena.snapshot().idle, ByteSize::mib(1));
        if by_limit {
            bed.arena.set_limit(ByteSize::mib(1));
        } else {
            let free = bed.sim.headroom().expect("it says").expect("known");
            bed.sim.set_neighbours(free);
        }
        assert_eq!(bed.arena.wake().expect("awake").memory, ByteSize::mib(1));
        bed.assert_marked(&kept, 1);
        drop(kept);
        bed.end();
    }
}

/// Counts what is booked.
#[derive(Default)]
struct Counted(Arc<AtomicUsize>);

struct Booked(Arc<AtomicUsize>);

impl Drop for Booked {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::SeqCst);
    }
}

impl HostBudget for Counted {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        self.0.fetch_add(1, Ordering::SeqCst);
        Ok(Box::new(Booked(Arc::clone(&self.0))))
    }
}

/// The bug: who gave back its own store gave up the bookings of stores that another thread was
/// still about to give back, and that the driver then did not take.
#[test]
fn a_store_that_another_thread_gave_back_lost_its_booking() {
    let bed = Bed::new(Order::Lazy);
    let booked = Arc::new(AtomicUsize::new(0));
    bed.arena.set_host_budget(Arc::new(Counted(Arc::clone(&booked))));
    let kept = bed.marked(MIB, Region::Stable, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let (arena, sim) = (bed.arena.clone(), bed.sim.clone());
    bed.sim.before(Call::HostFree, 0, move || {
        sim.fail_nth(Some(Call::HostAlloc), 0, SimError::OutOfMemory);
        assert!(arena.sleep(NOW).is_err());
        sim.fail_nth(Some(Call::HostFree), 0, SimError::Unknown);
    });
    bed.arena.wake().expect("awake");
    bed.arena.purge().expect("no error");
    assert_eq!(bed.arena.snapshot().offloaded, ByteSize::mib(1), "it was not taken");
    assert_eq!(booked.load(Ordering::SeqCst), 1, "and stays booked");
    bed.arena.purge().expect("no error");
    assert_eq!(booked.load(Ordering::SeqCst), 0);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// Tells nobody.
struct Deaf;

impl Wake for Deaf {
    fn wake(self: Arc<Self>) {}
}

/// The bug: a future that was dropped while the arena was on its way down was waited for all the
/// same, and cancelled the sleep.
#[test]
fn a_future_that_was_dropped_cancelled_a_sleep() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let arena = bed.arena.clone();
    let deaf = Arc::new(Deaf);
    let waker = Waker::from(Arc::clone(&deaf));
    bed.sim.before(Call::Offload, 0, move || {
        let mut entering = Box::pin(arena.enter_async());
        for _ in 0..10 {
            let polled = entering.as_mut().poll(&mut Context::from_waker(&waker));
            assert!(polled.is_pending() && arena.is_wanted());
        }
        assert_eq!(Arc::strong_count(&deaf), 3, "one waker is kept, however often it is polled");
        drop(entering);
        assert_eq!(Arc::strong_count(&deaf), 2, "and none for who is gone");
        assert!(!arena.is_wanted());
    });
    bed.arena.sleep(NOW).expect("nobody wants it");
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// Panics when it is told.
struct Bomb;

impl Wake for Bomb {
    fn wake(self: Arc<Self>) {
        panic!("planted");
    }
}

struct Heard(AtomicUsize);

impl Wake for Heard {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

/// The bug: a waker that panics kept those after it from being told, and the copies from being
/// given back.
#[test]
fn a_waker_that_panics_kept_others_from_being_told() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let heard = Arc::new(Heard(AtomicUsize::new(0)));
    let mut futures = [bed.arena.enter_async(), bed.arena.enter_async()].map(Box::pin);
    let wakers = [Waker::from(Arc::new(Bomb)), Waker::from(Arc::clone(&heard))];
    let (arena, sim) = (bed.arena.clone(), bed.sim.clone());
    let (send, polled) = std::sync::mpsc::channel();
    bed.sim.before(Call::Create, 0, move || {
        for (future, waker) in futures.iter_mut().zip(&wakers) {
            assert!(future.as_mut().poll(&mut Context::from_waker(waker)).is_pending());
        }
        send.send((futures, wakers)).expect("heard");
    });
    let woken = catch_unwind(AssertUnwindSafe(|| arena.wake()));
    let futures = polled.recv().expect("polled");
    assert!(woken.expect("nothing unwinds").is_ok());
    assert_eq!(heard.0.load(Ordering::SeqCst), 1);
    assert_eq!((arena.state(), sim.leaks().host_stores), (SleepState::Awake, 1));
    bed.assert_marked(&kept, 1);
    drop((kept, futures, arena, sim));
    bed.end();
}

/// A budget whose drop panics, and that another takes the place of while it books.
struct Replaced(Mutex<Option<DeviceArena>>);

impl HostBudget for Replaced {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        if let Some(arena) = self.0.lock().expect("whole").take() {
            arena.set_host_budget(Arc::new(Counted::default()));
        }
        Ok(Box::new(()))
    }
}

impl Drop for Replaced {
    fn drop(&mut self) {
        assert!(thread::panicking(), "planted");
    }
}

/// The bug: where a budget that was replaced while it booked panicked when it was dropped, the
/// arena was on its way down for ever.
#[test]
fn a_budget_that_panics_when_it_is_dropped_left_the_arena_on_its_way_down() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.set_host_budget(Arc::new(Replaced(Mutex::new(Some(bed.arena.clone())))));
    let slept = catch_unwind(AssertUnwindSafe(|| bed.arena.sleep(NOW)));
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    assert!(slept.expect("nothing unwinds").is_ok());
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// A budget that uses the arena which books.
struct Within(Mutex<Option<DeviceArena>>, Arc<Mutex<Option<DeviceError>>>);

impl HostBudget for Within {
    fn reserve(&self, _: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        let arena = self.0.lock().expect("whole").take().ok_or("once")?;
        let refused = arena.enter().map(drop).expect_err("it is on its way down");
        *self.1.lock().expect("whole") = Some(refused);
        Ok(Box::new(()))
    }
}

/// The bug: a budget that entered the arena which booked with it waited for itself.
#[test]
fn a_budget_that_entered_its_arena_waited_for_itself() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let refused = Arc::default();
    let within = Within(Mutex::new(Some(bed.arena.clone())), Arc::clone(&refused));
    bed.arena.set_host_budget(Arc::new(within));
    let arena = bed.arena.clone();
    let sleeper = thread::spawn(move || arena.sleep(NOW).map(drop));
    wait_until(|| sleeper.is_finished());
    sleeper.join().expect("no panic").expect("asleep");
    let refused = refused.lock().expect("whole").take();
    assert!(matches!(refused, Some(DeviceError::State { .. })), "{refused:?}");
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

/// The bug: the memory of blocks that were had by address and never freed left with the arena,
/// whatever the device still did with it.
#[test]
fn memory_of_blocks_by_address_left_with_the_arena_under_a_kernel() {
    let bed = Bed::new(Order::Lazy);
    let raw = bed.arena.alloc_raw(ByteSize::mib(1), ByteSize::new(1), Region::Dynamic);
    let raw = raw.expect("room");
    let pattern = lowtide_cuda_sim::Pattern::new(7);
    bed.sim.fill(bed.stream, raw.at, raw.size, pattern).expect("queued");
    let Bed { sim, arena, .. } = bed;
    drop(arena);
    assert_eq!(sim.unsafe_unmaps(), 0);
    sim.run_all();
    sim.assert_no_faults();
}
