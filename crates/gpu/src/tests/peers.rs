//! Bugs of other projects' arenas with failing or slow drivers, tested over the watched driver.
//!
//! The other tests of such bugs are in `tests/gpu/peers`.
//!
//! Invariant: the driver's contract is kept, and no range stays reserved, whichever call fails.

use super::*;

fn opened(driver: &Arc<FaultInjectingDriver>, config: ArenaConfig) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let arena = DeviceArena::open(driver.clone(), Arc::new(clock.clone()), config);
    (arena.expect("open"), clock)
}

fn doubling() -> Growth {
    Growth::NextPowerOfTwo {
        initial: ByteSize::mib(16),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::gib(1),
    }
}

/// cuArena 6: a pool that could not be created left its stable part behind, and handed out blocks
/// from the null address.
#[test]
fn an_arena_that_cannot_be_opened_leaves_nothing_behind() {
    for nth in 0..2 {
        let driver = Arc::new(FaultInjectingDriver::new());
        driver.fail(Failure { nth, out_of_memory: true });
        let config = ArenaConfig { reserve: GRANULE, ..config(ByteSize::MAX) };
        let clock = Arc::new(ManualClock::new());
        let refused = DeviceArena::open(driver.clone(), clock, config);
        assert!(matches!(refused, Err(DeviceError::Driver(DriverError::OutOfMemory { .. }))));
        assert_eq!(driver.reservations(), 0, "region {nth}");
        driver.assert_no_faults();
    }
}

/// cuArena 7: its destructor throws if the driver fails, which ends the program.
#[test]
fn a_driver_that_fails_at_the_end_stops_nobody() {
    for out_of_memory in [false, true] {
        let (arena, driver, _) = open(ByteSize::MAX);
        let held = bytes(&arena, ByteSize::mib(5), Region::Stable).expect("room");
        driver.fail(Failure { nth: driver.calls(), out_of_memory });
        drop(arena);
        drop(held);
        // Memory that the driver did not release stays reserved, without an owner.
        assert_eq!(driver.reservations(), 1);
        driver.assert_no_faults();
    }
}

/// ORT's `TestBackoffDoesntHang`: a device without any memory.
#[test]
fn a_device_that_never_has_memory_is_asked_a_few_times_and_refused() {
    for growth in [Growth::SameAsRequested, doubling()] {
        let driver = Arc::new(FaultInjectingDriver::new());
        driver.set_device_granules(0);
        let (arena, _) = opened(&driver, ArenaConfig { growth, ..config(ByteSize::MAX) });
        let before = driver.calls();
        for size in [1, 256 << 20, 1 << 30].map(ByteSize::new) {
            let refused = bytes(&arena, size, Region::Dynamic).expect_err("nothing there");
            assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
        }
        let calls = driver.calls() - before;
        // Each request is tried at likely places, then at those that need the least memory. An
        // attempt with growth calls the driver once more without growth.
        assert!(calls <= 12, "{calls} calls for three requests");
        assert_eq!(arena.snapshot().alloc_failures_device_total, 3);
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
        arena.validate();
    }
}

/// ORT 2.4: a GiB of growth held its lock for 26 to 30 ms, during the driver's call as well.
#[test]
fn other_threads_allocate_and_free_while_a_commit_is_held() {
    let (arena, driver, clock) = open(ByteSize::MAX);
    drop(bytes(&arena, ByteSize::mib(8), Region::Stable).expect("room"));
    let calls = driver.calls();
    driver.hold();
    let growing = {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, ByteSize::gib(1), Region::Dynamic).map(drop))
    };
    driver.wait_until_held(1);
    for _ in 0..100 {
        drop(bytes(&arena, ByteSize::mib(3), Region::Stable).expect("idle memory"));
        let block = arena.alloc_raw(ByteSize::mib(1), GRANULE, Region::Stable).expect("idle");
        arena.free(block.at).expect("live");
    }
    assert!(!growing.is_finished());
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, arena.glance().committed), (ByteSize::ZERO, snapshot.committed));
    assert!(arena.next_decay() > clock.now());
    arena.validate();
    assert_eq!(driver.calls(), calls, "none of that called the driver");
    driver.let_go();
    assert_eq!(growing.join().expect("no panic"), Ok(()));
    driver.assert_no_faults();
}

/// Regression test: a buffer whose growth failed half-way left idle memory, and no check was due.
#[test]
fn growth_that_failed_half_way_left_idle_memory_that_never_decayed() {
    let driver = Arc::new(FaultInjectingDriver::new());
    // Four granules per region: growth across the middle takes two calls.
    let config = ArenaConfig { reserve: ByteSize::mib(8), ..config(ByteSize::MAX) };
    let (arena, clock) = opened(&driver, config);
    let mut buffer = bytes(&arena, GRANULE, Region::Dynamic).expect("room");
    driver.fail(Failure { nth: driver.calls() + 1, out_of_memory: false });
    buffer.resize(8 << 20).expect_err("a trial");
    assert_eq!(arena.snapshot().idle, GRANULE);
    arena.validate();
    for _ in 0..1000 {
        let due = arena.next_decay();
        assert!(due <= clock.now() + 11 * SECOND, "nobody is told of the idle granule");
        clock.advance(due - clock.now());
        arena.decay(clock.now()).expect("decay");
        if arena.snapshot().idle.is_zero() {
            break;
        }
    }
    assert_eq!(arena.snapshot().committed, GRANULE);
    drop(buffer);
    driver.assert_no_faults();
}

/// Regression test: memory that was being committed ahead counted as idle for the decay, and still
/// did after the commit failed.
#[test]
fn memory_that_was_to_come_ahead_and_did_not_stayed_idle_for_the_decay() {
    let driver = Arc::new(FaultInjectingDriver::new());
    let config = ArenaConfig { growth: doubling(), ..config(ByteSize::MAX) };
    let (arena, clock) = opened(&driver, config);
    driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
    driver.hold();
    let growing = {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, GRANULE, Region::Dynamic).map(drop))
    };
    driver.wait_until_held(1);
    assert_eq!(arena.snapshot().idle, ByteSize::mib(14));
    arena.decay(clock.now()).expect("nothing may leave yet");
    driver.let_go();
    growing.join().expect("no panic").expect_err("a trial");
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    arena.validate();
    drop(bytes(&arena, GRANULE, Region::Dynamic).expect("room"));
    arena.validate();
    driver.assert_no_faults();
}

/// Regression test: a block whose memory was committed after the arena was closed was handed out.
#[test]
fn a_block_arrived_after_the_arena_was_closed() {
    let (arena, driver, _) = open(ByteSize::MAX);
    driver.hold();
    let taking = {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, GRANULE, Region::Dynamic).map(drop))
    };
    driver.wait_until_held(1);
    assert_eq!(arena.close(), Ok(()));
    driver.let_go();
    let refused = taking.join().expect("no panic").expect_err("closed");
    assert_eq!(refused, DeviceError::Closed { arena: "trial".to_owned() });
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.alloc_failures().map(|of| of.1)), (0, [0; 4]));
    assert_eq!(arena.purge(), Ok(GRANULE));
    driver.assert_no_faults();
}

/// Regression test: an allocation failed while another thread was committing memory ahead that no
/// block needed.
#[test]
fn memory_committed_ahead_by_another_thread_was_missing_to_who_was_short() {
    let driver = Arc::new(FaultInjectingDriver::new());
    let config = ArenaConfig { growth: doubling(), ..config(ByteSize::mib(16)) };
    let (arena, _) = opened(&driver, config);
    driver.hold();
    let taking = |size: ByteSize, region: Region| {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, size, region))
    };
    let first = taking(GRANULE, Region::Dynamic);
    driver.wait_until_held(1);
    assert_eq!(arena.snapshot().idle, ByteSize::mib(14));
    let second = taking(ByteSize::mib(4), Region::Stable);
    let placed = || arena.inner().lock_state().region(Region::Stable).arriving > 0;
    wait_until(|| placed() || second.is_finished());
    driver.let_go();
    let blocks = [first, second].map(|thread| thread.join().expect("no panic").expect("room"));
    assert_eq!(arena.snapshot().committed, ByteSize::mib(16));
    assert!(driver.committed().1 <= ByteSize::mib(16), "the limit was passed");
    drop(blocks);
    arena.validate();
    driver.assert_no_faults();
}
