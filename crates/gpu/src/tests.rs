//! Tests of the arena over a watched driver: failures at every call, held calls, concurrent
//! threads.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use super::*;
use crate::driver::DriverError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, ManualClock, SystemClock};
use lowtide_core::decay::DecayTime;
use lowtide_core::sync::lock;
use lowtide_cuda_sim::trial::{Failure, FaultInjectingDriver};

pub(crate) mod compact;
mod neighbours;
mod peers;
mod steps;
mod storm;
mod waits;

const GRANULE: ByteSize = ByteSize::mib(2);
const SECOND: Duration = Duration::from_secs(1);

fn config(limit: ByteSize) -> ArenaConfig {
    ArenaConfig {
        limit,
        reserve: ByteSize::gib(1),
        decay: DecayTime::Within(10 * SECOND),
        ..ArenaConfig::new("trial")
    }
}

fn open(limit: ByteSize) -> (DeviceArena, Arc<FaultInjectingDriver>, ManualClock) {
    let (driver, clock) = (Arc::new(FaultInjectingDriver::new()), ManualClock::new());
    let arena = DeviceArena::open(driver.clone(), Arc::new(clock.clone()), config(limit));
    (arena.expect("open"), driver, clock)
}

fn bytes(arena: &DeviceArena, size: ByteSize, region: Region) -> Result<Buffer<u8>, DeviceError> {
    arena.alloc(size.as_usize().expect("fits"), region)
}

/// Waits for an action of another thread.
fn wait_until(condition: impl Fn() -> bool) {
    let clock = SystemClock::new();
    let deadline = clock.now() + 20 * SECOND;
    while !condition() {
        assert!(clock.now() < deadline, "it did not come to pass");
        thread::yield_now();
    }
}

/// Returns the bytes of blocks in the dynamic region that wait for their memory.
fn arriving(arena: &DeviceArena) -> ByteSize {
    ByteSize::new(arena.inner().lock_state().region(Region::Dynamic).arriving)
}

/// Random numbers from a seed.
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    pub(crate) fn below(&mut self, bound: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % bound
    }
}

/// Performs every kind of act once, and continues after each failure. Validates after each act.
fn scenario(driver: &Arc<FaultInjectingDriver>) {
    let clock = ManualClock::new();
    let opened =
        DeviceArena::open(driver.clone(), Arc::new(clock.clone()), config(ByteSize::mib(20)));
    let Ok(arena) = opened else { return };
    let check = |arena: &DeviceArena| {
        arena.validate();
        driver.assert_no_faults();
        assert_eq!(driver.committed().0, arena.snapshot().committed);
    };
    let mut kept = Vec::new();
    for (mib, region) in [(3, Region::Dynamic), (1, Region::Stable), (5, Region::Dynamic)] {
        kept.extend(bytes(&arena, ByteSize::mib(mib), region));
        check(&arena);
    }
    kept.truncate(1);
    check(&arena);
    // Needs the idle memory of both regions: the limit is reached on the way.
    kept.extend(bytes(&arena, ByteSize::mib(12), Region::Stable));
    check(&arena);
    kept.extend(bytes(&arena, ByteSize::mib(4), Region::Dynamic));
    check(&arena);
    kept.clear();
    clock.advance(6 * SECOND);
    let _ = arena.decay(clock.now());
    check(&arena);
    let _ = arena.trim(ByteSize::mib(4));
    check(&arena);
    let _ = arena.purge();
    check(&arena);
    kept.extend(bytes(&arena, ByteSize::mib(2), Region::Dynamic));
    check(&arena);
}

/// Regression test: under a limit on addresses each arena took at least half of the remaining ones,
/// and left none for the heap of the process.
#[test]
fn an_arena_that_did_not_get_its_addresses_took_nearly_all_that_were_left() {
    let (driver, clock) = (Arc::new(FaultInjectingDriver::new()), ManualClock::new());
    driver.fail(Failure { nth: 0, out_of_memory: true });
    let arena = DeviceArena::open(driver.clone(), Arc::new(clock), config(ByteSize::MAX));
    let arena = arena.expect("opens");
    // 1 GiB plus the share of small blocks was rejected. Half of it was accepted for both regions,
    // because six times as much was left: it was reserved, and released.
    let regions = arena.snapshot().regions.map(|region| region.reserved);
    assert_eq!(regions, [576, 576].map(ByteSize::mib));
    assert_eq!((driver.calls(), driver.reservations()), (5, 2));
    drop(arena);
    driver.assert_no_faults();
    assert_eq!(driver.reservations(), 0);
}

#[test]
fn a_failure_at_any_driver_call_leaves_the_books_right() {
    let whole = Arc::new(FaultInjectingDriver::new());
    scenario(&whole);
    let calls = whole.calls();
    assert!(calls > 12, "only {calls} calls: the scenario is too tame");
    assert_eq!((whole.committed().0, whole.reservations()), (ByteSize::ZERO, 0));
    for (out_of_memory, remap) in [(false, false), (true, false), (false, true), (true, true)] {
        for nth in 0..calls {
            println!("call {nth} fails, out of memory: {out_of_memory}, remap: {remap}");
            let mut driver = FaultInjectingDriver::new();
            driver.capabilities.remap = remap;
            let driver = Arc::new(driver);
            driver.fail(Failure { nth, out_of_memory });
            scenario(&driver);
            driver.assert_no_faults();
            // A decommit or unreserve that fails at the very end leaves its range reserved.
            let left = driver.reservations();
            assert!(left == 0 || (left == 1 && nth + 4 >= driver.calls()), "{left} left");
        }
    }
}

#[test]
fn a_refused_call_is_reported_and_the_next_one_is_made_again() {
    let (arena, driver, _) = open(ByteSize::MAX);
    driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
    let refused = bytes(&arena, GRANULE, Region::Dynamic).expect_err("a trial");
    assert!(matches!(refused, DeviceError::Driver(DriverError::Refused { .. })), "{refused}");
    assert_eq!(arena.snapshot().alloc_failures_driver_total, 1);
    let buffer = bytes(&arena, GRANULE, Region::Dynamic).expect("room");
    drop(buffer);
    driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
    assert!(matches!(arena.purge(), Err(DeviceError::Driver(_))));
    assert_eq!(arena.snapshot().idle, GRANULE);
    assert_eq!(arena.purge(), Ok(GRANULE));
    arena.validate();
}

#[test]
fn a_full_device_is_asked_again_after_the_arenas_own_idle_memory_is_given_back() {
    let (arena, driver, _) = open(ByteSize::MAX);
    driver.set_device_granules(8);
    drop(bytes(&arena, ByteSize::mib(12), Region::Stable).expect("room"));
    let buffer = bytes(&arena, ByteSize::mib(14), Region::Dynamic).expect("room after reclaim");
    let refused = bytes(&arena, ByteSize::mib(6), Region::Stable).expect_err("full");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    assert_eq!(arena.snapshot().alloc_failures().map(|of| of.1), [0, 1, 0, 0]);
    drop(buffer);
    arena.validate();
    driver.assert_no_faults();
}

/// Regression test: the peak of committed memory counted failed requests.
#[test]
fn a_commit_that_was_refused_made_the_peak() {
    let (arena, driver, _) = open(ByteSize::MAX);
    driver.set_device_granules(8);
    bytes(&arena, ByteSize::mib(512), Region::Dynamic).expect_err("no room");
    assert_eq!(arena.snapshot().committed_peak, ByteSize::ZERO);
    drop(bytes(&arena, ByteSize::mib(3), Region::Dynamic).expect("room"));
    assert_eq!(arena.snapshot().committed_peak, ByteSize::mib(4));
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn the_last_holder_gives_everything_back_to_the_driver() {
    let (arena, driver, _) = open(ByteSize::MAX);
    let stays = bytes(&arena, ByteSize::mib(3), Region::Stable).expect("room");
    let lease = arena.enter().expect("awake");
    drop(bytes(&arena, ByteSize::mib(3), Region::Dynamic).expect("room"));
    drop(arena);
    assert_eq!(stays.slice(&lease).expect("own lease").len(), 3 << 20);
    drop(lease);
    assert_eq!(driver.reservations(), 2);
    drop(stays);
    assert_eq!((driver.committed().0, driver.reservations()), (ByteSize::ZERO, 0));
    driver.assert_no_faults();
}

#[test]
fn address_space_is_halved_until_the_driver_accepts_it() {
    let driver = Arc::new(FaultInjectingDriver::new());
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig { reserve: ByteSize::new(1 << 62), ..ArenaConfig::new("vast") };
    let arena = DeviceArena::open(driver.clone(), clock, config).expect("a smaller range");
    let reserved = arena.snapshot().reserved;
    assert!(reserved >= ByteSize::gib(64), "{reserved}");
    assert!(driver.calls() > 4, "nothing was halved");
}

#[test]
fn a_driver_that_is_not_understood_is_refused_at_open() {
    for what in 0..3 {
        let mut driver = FaultInjectingDriver::new();
        match what {
            0 => (driver.capabilities.virtual_memory, driver.capabilities.remap) = (false, true),
            1 => driver.capabilities.asynchronous = true,
            _ => driver.capabilities.granularity = ByteSize::new(3 << 20),
        }
        let clock = Arc::new(ManualClock::new());
        let refused = DeviceArena::open(Arc::new(driver), clock, config(ByteSize::MAX));
        assert!(matches!(refused, Err(DeviceError::Unsupported { .. })), "{refused:?}");
    }
}

#[test]
fn without_host_access_there_are_blocks_and_no_slices() {
    let mut driver = FaultInjectingDriver::new();
    driver.capabilities.host_access = false;
    let clock = Arc::new(ManualClock::new());
    let arena = DeviceArena::open(Arc::new(driver), clock, config(ByteSize::MAX)).expect("open");
    let buffer: Buffer<u32> = arena.alloc(8, Region::Dynamic).expect("room");
    let lease = arena.enter().expect("awake");
    assert!(matches!(buffer.slice(&lease), Err(DeviceError::Unsupported { .. })));
    let refused = arena.alloc_from(&[1_u8], Region::Dynamic);
    assert!(matches!(refused, Err(DeviceError::Unsupported { .. })));
    assert_eq!(arena.snapshot().allocs_total, 1);
}

#[test]
fn an_allocation_waits_for_a_leaving_granule_only_where_it_needs_it() {
    let (arena, driver, _) = open(ByteSize::mib(8));
    drop(bytes(&arena, ByteSize::mib(6), Region::Dynamic).expect("room"));
    let beside = bytes(&arena, GRANULE, Region::Stable).expect("room");
    driver.hold();
    let purging = {
        let arena = arena.clone();
        thread::spawn(move || arena.purge())
    };
    driver.wait_until_held(1);
    // Operations that need no leaving granule continue during the held call.
    drop(beside);
    let beside = bytes(&arena, GRANULE, Region::Stable).expect("room");
    arena.validate();
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.idle), (ByteSize::mib(8), ByteSize::mib(6)));
    // The next operations need the room, or the granules, that are leaving.
    let needing = {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, ByteSize::mib(4), Region::Dynamic).map(drop))
    };
    wait_until(|| arriving(&arena) == ByteSize::mib(4));
    assert!(!needing.is_finished(), "it took a granule that is leaving");
    arena.validate();
    driver.let_go();
    assert_eq!(needing.join().expect("no panic"), Ok(()));
    assert_eq!(purging.join().expect("no panic"), Ok(ByteSize::mib(6)));
    drop(beside);
    arena.validate();
    driver.assert_no_faults();
    assert!(driver.committed().1 <= ByteSize::mib(8), "the limit was passed");
}

#[test]
fn an_allocation_in_a_granule_that_is_being_committed_waits_for_it_and_commits_what_failed() {
    for fails in [false, true] {
        let (arena, driver, _) = open(ByteSize::MAX);
        if fails {
            driver.fail(Failure { nth: driver.calls(), out_of_memory: false });
        }
        driver.hold();
        let half = |arena: &DeviceArena| {
            let arena = arena.clone();
            thread::spawn(move || bytes(&arena, ByteSize::mib(1), Region::Dynamic))
        };
        let first = half(&arena);
        driver.wait_until_held(1);
        let second = half(&arena);
        // Placing and starting to wait are one step under the lock.
        wait_until(|| arriving(&arena) == GRANULE);
        arena.validate();
        driver.let_go();
        let first = first.join().expect("no panic");
        let second = second.join().expect("no panic").expect("room");
        assert_eq!(first.is_err(), fails);
        assert_eq!(arena.snapshot().commits_total, 1);
        assert_eq!(arena.snapshot().committed, GRANULE);
        drop((first, second));
        arena.validate();
        driver.assert_no_faults();
    }
}

/// Regression test: the place next to a neighbour without memory seemed the cheapest. It cost one
/// granule more than the block needs, and the request failed although there was room by the error's
/// own figures.
#[test]
fn a_block_does_not_count_on_the_granule_of_a_neighbour_that_waits_for_its_memory() {
    let (arena, driver, _) = open(ByteSize::mib(16));
    let stay = bytes(&arena, ByteSize::mib(8), Region::Dynamic).expect("half of the limit");
    drop(bytes(&arena, ByteSize::mib(4), Region::Stable).expect("a quarter"));
    assert_eq!(arena.snapshot().idle, ByteSize::mib(4), "in the other region");
    driver.hold();
    let asked = |size| {
        let arena = arena.clone();
        thread::spawn(move || bytes(&arena, size, Region::Dynamic))
    };
    let first = asked(ByteSize::mib(7)); // ends within a granule
    driver.wait_until_held(1);
    let second = asked(ByteSize::kib(7680));
    let both = ByteSize::kib(7 * 1024 + 7680);
    wait_until(|| second.is_finished() || arriving(&arena) == both);
    driver.let_go();
    let had = [first, second].map(|thread| thread.join().expect("no panic"));
    assert!(had.iter().any(Result::is_ok), "there is room for one: {had:?}");
    for refused in had.iter().filter_map(|outcome| outcome.as_ref().err()) {
        let DeviceError::OutOfMemory { requested, active, limit, .. } = *refused else {
            panic!("{refused}");
        };
        let needed = requested.next_multiple_of(GRANULE).expect("small");
        assert!(active.saturating_add(needed) > limit, "{refused:?}");
    }
    drop((stay, had));
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn many_threads_keep_contents_books_and_limit() {
    const THREADS: u64 = 4;
    let limit = ByteSize::mib(24);
    let (arena, driver, clock) = open(limit);
    // So little room is left that a single thread reaches the limit, even if none runs beside it.
    let held = bytes(&arena, ByteSize::mib(20), Region::Stable).expect("room");
    let worker = |number: u64| {
        let (arena, clock) = (arena.clone(), clock.clone());
        move || {
            let seed = 0x9E37_79B9_7F4A_7C15 ^ (number << 32);
            println!("thread {number} seed {seed:#x}");
            let mut chance = Chance(seed);
            let lease = arena.enter().expect("awake");
            let mut kept: Vec<(u64, Buffer<u64>)> = Vec::new();
            let mut refusals = 0;
            for step in 0..400 {
                match chance.below(10) {
                    0..5 => {
                        let len = usize::try_from(1 << chance.below(19)).expect("small");
                        let region = Region::ALL[usize::from(chance.below(4) > 0)];
                        match arena.alloc::<u64>(len, region) {
                            Ok(mut buffer) => {
                                let mark = (number << 32) | step;
                                buffer.slice_mut(&lease).expect("own lease").fill(mark);
                                kept.push((mark, buffer));
                            }
                            Err(DeviceError::OutOfMemory { .. }) => refusals += 1,
                            Err(error) => panic!("{error}"),
                        }
                    }
                    5..8 if !kept.is_empty() => {
                        let nth = chance.below(kept.len() as u64);
                        let (mark, buffer) = kept.swap_remove(usize::try_from(nth).expect("small"));
                        let elements = buffer.slice(&lease).expect("own lease");
                        assert!(elements.iter().all(|&element| element == mark));
                    }
                    8 => {
                        clock.advance(Duration::from_millis(700));
                        arena.decay(clock.now()).expect("decay");
                    }
                    9 if chance.below(2) == 0 => drop(arena.purge().expect("purge")),
                    9 => drop(arena.trim(ByteSize::mib(chance.below(24))).expect("trim")),
                    _ => {}
                }
                if kept.len() > 24 {
                    kept.clear();
                }
            }
            for (mark, buffer) in &kept {
                let elements = buffer.slice(&lease).expect("own lease");
                assert!(elements.iter().all(|element| element == mark));
            }
            refusals
        }
    };
    let threads: Vec<_> = (1..=THREADS).map(|number| thread::spawn(worker(number))).collect();
    let refusals: u64 = threads.into_iter().map(|thread| thread.join().expect("no panic")).sum();
    drop(held);
    arena.validate();
    driver.assert_no_faults();
    let snapshot = arena.snapshot();
    println!("{refusals} refusals, {snapshot:?}");
    assert_eq!(snapshot.alloc_failures_limit_total, refusals);
    assert!(refusals > 0, "the limit was never reached: the test is too tame");
    assert_eq!((snapshot.live, snapshot.leases), (ByteSize::ZERO, 0));
    assert_eq!(snapshot.allocs_total, snapshot.frees_total);
    assert!(driver.committed().1 <= limit, "the limit was passed");
    arena.purge().expect("purge");
    assert_eq!((arena.snapshot().committed, driver.committed().0), Default::default());
}

/// A cached block holds its shard, and the shard its cache.
#[test]
fn an_arena_whose_caches_hold_blocks_is_gone_with_its_last_handle() {
    let (arena, driver, _) = open(ByteSize::gib(1));
    let kept = heat(&arena);
    assert_eq!(arena.snapshot().cached, ByteSize::kib(12 * 64));
    let other = arena.clone();
    drop(arena);
    assert!(!other.snapshot().cached.is_zero(), "a handle is left, and so are the caches");
    drop(other);
    assert_eq!(driver.reservations(), 2, "a buffer keeps its arena");
    drop(kept);
    assert_eq!((driver.reservations(), driver.committed().0), (0, ByteSize::ZERO));
    driver.assert_no_faults();
}

#[test]
fn an_arena_is_gone_whenever_its_last_handle_goes_while_others_free() {
    for _ in 0..200 {
        let (arena, driver, _) = open(ByteSize::gib(1));
        let theirs: Vec<_> = (0..3).map(|_| heat(&arena)).collect();
        thread::scope(|scope| {
            for kept in theirs {
                scope.spawn(move || kept.into_iter().for_each(drop));
            }
            drop(arena);
        });
        assert_eq!((driver.reservations(), driver.committed().0), (0, ByteSize::ZERO));
        driver.assert_no_faults();
    }
}

/// Returns some live blocks of one size, and frees others of that size into this thread's cache.
fn heat(arena: &DeviceArena) -> Vec<Buffer<u8>> {
    let mut blocks = Vec::new();
    for _ in 0..4 {
        let more = (0..8).map(|_| bytes(arena, ByteSize::kib(64), Region::Dynamic));
        blocks = more.collect::<Result<_, _>>().expect("room");
    }
    blocks.split_off(4)
}
