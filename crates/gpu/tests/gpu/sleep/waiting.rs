//! Entering without blocking a thread.

use std::future::Future;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::{Context, Poll, Wake, Waker};
use std::thread;
use std::time::Duration;

use lowtide_cuda_sim::{Order, SimError};
use lowtide_gpu::ByteSize;
use lowtide_gpu::{Contents, Region, SleepOptions, SleepState};

use super::support::{Bed, MIB};
use crate::wait_until;

const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Keep, dynamic: Contents::Keep };

/// Counts how often it was told, and unparks its thread.
struct Told(AtomicUsize, thread::Thread);

impl Wake for Told {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
        self.1.unpark();
    }
}

fn told() -> Arc<Told> {
    Arc::new(Told(AtomicUsize::new(0), thread::current()))
}

/// Polls until it is ready; a future that never tells its waker hangs here.
fn block_on<F: Future>(future: F) -> (F::Output, usize) {
    let (mut future, told) = (pin!(future), told());
    let waker = Waker::from(Arc::clone(&told));
    let mut polls = 0;
    loop {
        polls += 1;
        let before = told.0.load(Ordering::SeqCst);
        if let Poll::Ready(output) = future.as_mut().poll(&mut Context::from_waker(&waker)) {
            return (output, polls);
        }
        wait_until(|| told.0.load(Ordering::SeqCst) > before);
    }
}

#[test]
fn an_awake_arena_is_entered_at_once_and_a_sleeping_one_when_it_has_woken() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let (lease, polls) = block_on(bed.arena.enter_async());
    drop(lease.expect("awake"));
    assert_eq!(polls, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let (lease, polls) = block_on(bed.arena.enter_async());
    assert_eq!((bed.arena.state(), polls), (SleepState::Awake, 2));
    drop(lease.expect("awake"));
    assert_eq!(bed.arena.snapshot().wakes_total, 1);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn many_futures_share_one_wake_and_one_that_is_dropped_harms_nobody() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    let mut given_up = Box::pin(bed.arena.enter_async());
    let waker = Waker::from(told());
    let polled = given_up.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(polled.is_pending(), "it has begun the wake");
    drop(given_up);
    let entering: Vec<_> = (0..4)
        .map(|_| {
            let arena = bed.arena.clone();
            thread::spawn(move || drop(block_on(arena.enter_async()).0.expect("awake")))
        })
        .collect();
    entering.into_iter().for_each(|thread| thread.join().expect("no panic"));
    assert_eq!(bed.arena.snapshot().wakes_total, 1);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn a_wake_that_fails_is_told_to_all_who_wait_for_it() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    bed.arena.sleep(NOW).expect("asleep");
    bed.sim.fail_always(lowtide_cuda_sim::Call::Create, Some(SimError::OutOfMemory));
    let entering: Vec<_> = (0..4)
        .map(|nth| {
            let arena = bed.arena.clone();
            thread::spawn(move || match nth % 2 {
                0 => block_on(arena.enter_async()).0.map(drop),
                _ => arena.enter().map(drop),
            })
        })
        .collect();
    for thread in entering {
        let refused = thread.join().expect("no panic").expect_err("too little memory");
        assert!(refused.is_out_of_memory(), "{refused}");
    }
    assert_eq!(bed.arena.state(), SleepState::Asleep);
    bed.sim.forget_failures();
    drop(block_on(bed.arena.enter_async()).0.expect("awake"));
    assert_eq!(bed.arena.snapshot().asleep, ByteSize::ZERO);
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}

#[test]
fn a_future_that_waits_while_it_falls_asleep_keeps_it_awake() {
    let bed = Bed::new(Order::Lazy);
    let kept = bed.marked(MIB, Region::Dynamic, 1);
    let arena = bed.arena.clone();
    let (entering, entered) = std::sync::mpsc::channel();
    bed.sim.before(lowtide_cuda_sim::Call::Offload, 0, move || {
        let other = arena.clone();
        let wait = move || block_on(other.enter_async()).0.map(drop);
        entering.send(thread::spawn(wait)).expect("heard");
        wait_until(|| arena.is_wanted());
    });
    assert!(bed.arena.sleep(NOW).is_err());
    entered.recv().expect("sent").join().expect("no panic").expect("a lease");
    bed.assert_marked(&kept, 1);
    drop(kept);
    bed.end();
}
