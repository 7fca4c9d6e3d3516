//! Tests of waits: each one ends, and foreign code runs without the lock.
#![expect(unsafe_code, reason = "a fork, and a waker with code in its drop")]

use std::ops::ControlFlow;
use std::panic::AssertUnwindSafe;
use std::sync::Mutex;
use std::sync::atomic::{AtomicI32, Ordering};
use std::sync::mpsc::{Sender, channel};
use std::task::{Context, Poll, RawWaker, RawWakerVTable, Waker};

use super::steps::StepSurroundings;
use super::*;
use crate::engine::callbacks::Callbacks;
use crate::engine::context::{OpContext, OpRequest, step};
use crate::state::RequestOrigin;
use crate::state::region::{AllocRequest, CacheCounts, Search};
use crate::state::sleep::SleepPhase;
use crate::types::sleep::{Contents, SleepConfig, SleepOptions, SleepState};

const DYNAMIC: Region = Region::Dynamic;

fn discard() -> SleepOptions {
    let contents = Contents::Discard;
    SleepOptions { stable: contents, dynamic: contents, ..SleepOptions::default() }
}

/// Regression test: a wait that came after another one notified nobody, although the operation had
/// changed the state in between. A sleep and an allocation then waited for each other.
#[test]
fn only_a_wait_that_repeats_its_condition_notifies_nobody() {
    let clock = ManualClock::new();
    let sim = steps::device(1, &mut Chance(1), &clock);
    let mut slot = Some(Box::new(steps::state(&sim, &clock, &config(ByteSize::mib(4)))));
    let surroundings = StepSurroundings::default();
    let callbacks = Callbacks::new();
    let cx = OpContext::new(&sim, &clock, &surroundings, &callbacks);
    let mut operation = std::pin::pin!(async {
        cx.wait_while(|state| state.leases < 2).await;
        cx.wait_while(|state| state.leases < 3).await;
    });
    let mut seen = Vec::new();
    for leases in [0, 1, 2, 2, 3] {
        slot.as_deref_mut().expect("no step is made").leases = leases;
        match step(&cx, &mut slot, operation.as_mut()) {
            ControlFlow::Continue(OpRequest::Wait { is_repeated }) => seen.push(is_repeated),
            step => assert!(matches!(step, ControlFlow::Break(())), "{step:?}"),
        }
    }
    assert_eq!(seen, [false, true, false, true]);
}

/// Bug: a block that waited for its memory while the arena fell asleep counted as asleep, so that
/// more was asleep than live.
#[test]
fn a_block_that_waits_for_its_memory_while_the_arena_falls_asleep_is_not_asleep() {
    let clock = ManualClock::new();
    let sim = steps::device(1, &mut Chance(1), &clock);
    let mut state = steps::state(&sim, &clock, &config(ByteSize::mib(4)));
    let target = AllocRequest::new(DYNAMIC, 64 << 10, 256, RequestOrigin::BUFFER);
    let (placed, claim) = state.place(&target, Search::Usual).expect("room");
    for phase in [SleepPhase::Awake, SleepPhase::Draining(1), SleepPhase::Suspending] {
        state.sleep.phase = phase;
        let snapshot = state.snapshot(&CacheCounts::default());
        snapshot.validate();
        assert_eq!((snapshot.live, snapshot.asleep), (ByteSize::ZERO, ByteSize::ZERO));
    }
    state.cancel_placement(placed, claim);
    state.validate();
}

/// Regression test: an allocation that had the turn to call the callbacks waited for a wake, which
/// waited for that turn.
#[test]
fn an_allocation_with_the_turn_to_call_callbacks_does_not_wait_for_a_wake() {
    let (driver, clock) = (Arc::new(FaultInjectingDriver::new()), Arc::new(ManualClock::new()));
    let sleep = SleepConfig { wake_timeout: Duration::ZERO, ..SleepConfig::default() };
    let config = ArenaConfig { sleep, ..config(ByteSize::mib(6)) };
    let arena = DeviceArena::open(driver, clock, config).expect("open");
    let held = bytes(&arena, ByteSize::mib(4), DYNAMIC).expect("room");
    let (asleep, is_asleep) = channel();
    let asleep = Mutex::new(Some(asleep));
    let own = arena.clone();
    let guard = arena.on_shortage(move |_| {
        let Some(asleep) = lock(&asleep).take() else { return false };
        own.sleep(discard()).expect("awake");
        own.set_limit(ByteSize::mib(2));
        asleep.send(()).expect("the test waits");
        wait_until(|| own.state() == SleepState::Waking);
        true
    });
    thread::scope(|scope| {
        let arena = &arena;
        scope.spawn(move || {
            is_asleep.recv().expect("the callback is called");
            arena.enter().expect_err("the limit is too low");
        });
        bytes(arena, ByteSize::mib(4), DYNAMIC).expect_err("no room");
    });
    drop((guard, held));
}

/// A log subscriber that reads the arena.
struct Reads(DeviceArena, Mutex<u32>);

impl tracing::Subscriber for Reads {
    fn enabled(&self, _: &tracing::Metadata<'_>) -> bool {
        true
    }

    fn new_span(&self, _: &tracing::span::Attributes<'_>) -> tracing::span::Id {
        tracing::span::Id::from_u64(1)
    }

    fn record(&self, _: &tracing::span::Id, _: &tracing::span::Record<'_>) {}

    fn record_follows_from(&self, _: &tracing::span::Id, _: &tracing::span::Id) {}

    fn event(&self, _: &tracing::Event<'_>) {
        drop(self.0.inner().try_lock_state().expect("a log line is written without the lock"));
        *lock(&self.1) += 1;
    }

    fn enter(&self, _: &tracing::span::Id) {}

    fn exit(&self, _: &tracing::span::Id) {}
}

/// Regression test: subscribers were called with the lock of the state held.
#[test]
fn a_log_subscriber_may_use_the_arena() {
    let mut driver = FaultInjectingDriver::new();
    driver.capabilities.remap = true;
    let (driver, clock) = (Arc::new(driver), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver.clone(), clock, config(ByteSize::mib(6))).expect("open");
    let guard = arena.on_shortage(|_| false);
    let reads = Arc::new(Reads(arena.clone(), Mutex::new(0)));
    tracing::subscriber::with_default(Arc::clone(&reads), || {
        bytes(&arena, ByteSize::mib(8), DYNAMIC).expect_err("no room");
        // A remap fails, and the memory is released instead.
        let blocks = [(); 3].map(|()| bytes(&arena, GRANULE, DYNAMIC).expect("room"));
        drop(blocks);
        driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
        bytes(&arena, GRANULE, Region::Stable).expect("room");
    });
    assert_eq!(*lock(&reads.1), 3);
    drop(guard);
}

/// Regression test: an allocation whose callback forked waited in the child for a lock that a
/// thread of the parent held.
#[test_fork::test]
fn an_allocation_whose_callback_forks_fails_in_the_child() {
    let (arena, _driver, _) = open(ByteSize::mib(2));
    let child = Arc::new(AtomicI32::new(-1));
    let (forked, own) = (Arc::clone(&child), arena.clone());
    let guard = arena.on_shortage(move |_| {
        let (held, is_held) = channel();
        let (end, ended): (Sender<()>, _) = channel();
        let other = own.clone();
        let holder = thread::spawn(move || {
            let state = other.inner().lock_state();
            held.send(()).expect("the callback waits");
            ended.recv().expect_err("the callback sends nothing");
            drop(state);
        });
        is_held.recv().expect("the thread has the lock");
        // SAFETY: the child only continues the allocation, whose error it reports, and ends.
        let pid = unsafe { libc::fork() };
        forked.store(pid, Ordering::SeqCst);
        if pid == 0 {
            // SAFETY: ends the child if it waits.
            unsafe { libc::alarm(20) };
            let _ = std::mem::ManuallyDrop::new((end, holder));
            return false;
        }
        drop(end);
        holder.join().expect("no panic");
        false
    });
    let outcome = bytes(&arena, ByteSize::mib(4), DYNAMIC);
    let pid = child.load(Ordering::SeqCst);
    if pid == 0 {
        let is_forked = matches!(outcome, Err(DeviceError::Forked));
        // SAFETY: ends the child at once, without running the parent's exit handlers.
        unsafe { libc::_exit(i32::from(!is_forked)) }
    }
    outcome.expect_err("no room");
    let mut status = 0;
    // SAFETY: `status` is a valid place for an int, and `pid` is our own child.
    assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
    assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    drop(guard);
}

type Act = fn(&DeviceArena) -> Result<(), DeviceError>;

/// Bug: a wake whose callback forked panicked in the child: undoing the wake needs the state.
#[test_fork::test]
fn a_wake_whose_callback_forks_fails_in_the_child() {
    let (driver, clock) = (Arc::new(FaultInjectingDriver::new()), Arc::new(ManualClock::new()));
    let sleep = SleepConfig { wake_timeout: Duration::ZERO, ..SleepConfig::default() };
    let config = ArenaConfig { sleep, ..config(ByteSize::mib(4)) };
    let arena = DeviceArena::open(driver, clock, config).expect("open");
    let held = bytes(&arena, ByteSize::mib(4), DYNAMIC).expect("room");
    arena.sleep(discard()).expect("awake");
    arena.set_limit(ByteSize::mib(2));
    let child = Arc::new(AtomicI32::new(-1));
    let forked = Arc::clone(&child);
    let guard = arena.on_shortage(move |_| {
        // SAFETY: the child only continues the wake, whose error it reports, and ends.
        forked.store(unsafe { libc::fork() }, Ordering::SeqCst);
        false
    });
    let acts: [Act; 3] = [
        |arena| arena.enter().map(drop),
        |arena| arena.wake().map(drop),
        |arena| bytes(arena, GRANULE, DYNAMIC).map(drop),
    ];
    for act in acts {
        let outcome = std::panic::catch_unwind(AssertUnwindSafe(|| act(&arena)));
        let pid = child.load(Ordering::SeqCst);
        if pid == 0 {
            let is_forked = matches!(outcome, Ok(Err(DeviceError::Forked)));
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(!is_forked)) }
        }
        outcome.expect("no panic").expect_err("no room");
        assert_eq!(arena.state(), SleepState::Asleep);
        let mut status = 0;
        // SAFETY: `status` is a valid place for an int, and `pid` is our own child.
        assert_eq!(unsafe { libc::waitpid(pid, &raw mut status, 0) }, pid);
        assert!(libc::WIFEXITED(status) && libc::WEXITSTATUS(status) == 0, "status {status:#x}");
    }
    drop((guard, held));
}

/// A waker whose drop looks whether the arena is locked.
static LOCKING: RawWakerVTable = RawWakerVTable::new(
    |data| RawWaker::new(data, &LOCKING),
    |_| {},
    |_| {},
    |data| {
        // SAFETY: the test keeps the arena until the last waker is dropped.
        let arena = unsafe { &*data.cast::<DeviceArena>() };
        drop(arena.inner().try_lock_state().expect("a waker is dropped without the lock"));
    },
);

/// Regression test: a waker was dropped with the lock of the state held.
#[test]
fn a_waker_may_use_the_arena_when_it_is_dropped() {
    let (arena, _driver, _) = open(ByteSize::mib(2));
    // SAFETY: the functions of the table do what their contract asks for.
    let waker = unsafe { Waker::from_raw(RawWaker::new((&raw const arena).cast(), &LOCKING)) };
    let mut entering = std::pin::pin!(arena.enter_async());
    let polled = entering.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(matches!(polled, Poll::Ready(Ok(_))), "{polled:?}");
}
