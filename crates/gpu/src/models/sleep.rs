//! Sleep under loom: concurrent leases, allocations, frees and moves, two threads that wake the
//! arena, and the work of streams that a sleep waits for (`streams`).
//!
//! Contents are discarded, so no copies are made. No lease is waited for, so no bell is either.
//!
//! Invariant: under a lease every block has memory, and one wake serves all threads that enter.

mod streams;

use std::time::Duration;

use super::*;

/// Options that wait for no lease and keep no contents.
const NOW: SleepOptions =
    SleepOptions { drain: Duration::ZERO, stable: Contents::Discard, dynamic: Contents::Discard };

fn open_sleeper(limit_granules: u64) -> (DeviceArena, Arc<Model>) {
    open_on(limit_granules, Model::default())
}

/// Puts the arena to sleep, unless other threads use it.
fn sleep(arena: &DeviceArena) {
    match arena.sleep(NOW) {
        Ok(_) | Err(DeviceError::Leased { .. } | DeviceError::SleepCancelled { .. }) => {}
        Err(error) => panic!("{error}"),
    }
}

fn granule(arena: &DeviceArena) -> Buffer<u8> {
    arena.alloc(512, Region::Dynamic).expect("room")
}

/// Asserts that a buffer of one granule has memory.
fn assert_backed(driver: &Model, buffer: &Buffer<u8>, lease: &Lease) {
    let at = buffer.address(lease).expect("ours").expect("not empty");
    let nth = usize::try_from((at.get() - BASE) / GRANULE).expect("small");
    assert!(lock(&driver.committed)[nth], "no memory under a lease");
}

#[test]
fn who_enters_beside_a_sleep_has_memory_for_as_long_as_the_lease() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(2);
        let buffer = granule(&arena);
        let other = arena.clone();
        let thread = loom::thread::spawn(move || sleep(&other));
        let lease = arena.enter().expect("before it sleeps, or woken");
        assert_backed(&driver, &buffer, &lease);
        thread.join().expect("no panic");
        assert_backed(&driver, &buffer, &lease);
        assert_eq!(arena.state(), SleepState::Awake);
        drop((lease, buffer));
        end(&arena, &driver);
    });
}

#[test]
fn two_who_enter_a_sleeping_arena_share_one_wake() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(2);
        let buffer = granule(&arena);
        arena.sleep(NOW).expect("nobody is in");
        let other = arena.clone();
        let thread = loom::thread::spawn(move || other.enter().expect("woken"));
        let mine = arena.enter().expect("woken");
        assert_backed(&driver, &buffer, &mine);
        let theirs = thread.join().expect("no panic");
        assert_backed(&driver, &buffer, &theirs);
        assert_eq!(arena.snapshot().wakes_total, 1);
        drop((mine, theirs, buffer));
        end(&arena, &driver);
    });
}

#[test]
fn what_is_allocated_beside_a_sleep_has_memory_when_it_is_used() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(2);
        let beside = granule(&arena);
        let device = Arc::clone(&driver);
        both(arena, &driver, sleep, move |arena| {
            let buffer = granule(arena);
            let lease = buffer.enter().expect("awake, or woken");
            assert_backed(&device, &buffer, &lease);
            assert_backed(&device, &beside, &lease);
            drop((lease, buffer, beside));
        });
    });
}

#[test]
fn a_block_of_a_cache_is_handed_out_beside_a_sleep_with_memory_behind_it() {
    beside_a_cache(false);
}

/// Regression test: the sleep skipped caches that were marked empty while one was about to accept a
/// block.
#[test]
fn a_cache_that_held_nothing_takes_nothing_in_beside_a_sleep() {
    beside_a_cache(true);
}

fn beside_a_cache(is_empty: bool) {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(move || {
        let (arena, driver) = open_sleeper(4);
        for _ in 0..6 {
            assert!(pass(&arena, 512));
        }
        assert!(!arena.snapshot().cached.is_zero(), "the size is hot");
        if is_empty {
            arena.inner().empty_caches();
        }
        let device = Arc::clone(&driver);
        both(arena, &driver, sleep, move |arena| {
            let buffer = granule(arena);
            let lease = buffer.enter().expect("awake, or woken");
            assert_backed(&device, &buffer, &lease);
            drop((lease, buffer));
        });
    });
}

#[test]
fn what_is_freed_beside_a_sleep_leaves_nothing_and_the_rest_comes_back() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(2);
        let (gone, stays) = (granule(&arena), granule(&arena));
        let other = arena.clone();
        let thread = loom::thread::spawn(move || sleep(&other));
        drop(gone);
        thread.join().expect("no panic");
        let lease = stays.enter().expect("woken");
        assert_backed(&driver, &stays, &lease);
        // A freed block is not restored. If it was freed after the wake, its memory is idle.
        arena.purge().expect("gives back");
        assert_eq!(arena.snapshot().committed, ByteSize::new(GRANULE));
        drop((lease, stays));
        end(&arena, &driver);
    });
}

#[test]
fn a_block_moves_before_or_after_a_sleep_and_never_meanwhile() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(4);
        let blocks = moves::fragmented(&arena);
        let other = arena.clone();
        let thread = loom::thread::spawn(move || sleep(&other));
        moves::compact(&arena);
        thread.join().expect("no panic");
        let lease = arena.enter().expect("woken");
        blocks.iter().for_each(|block| assert_backed(&driver, block, &lease));
        drop((lease, blocks));
        end(&arena, &driver);
    });
}

/// Waiting for a move releases the lock: the arena may sleep when the lock is taken again.
#[test]
fn who_waits_for_a_move_beside_a_sleep_enters_an_arena_that_is_awake() {
    let mut model = loom::model::Builder::new();
    model.preemption_bound = Some(2);
    model.check(|| {
        let (arena, driver) = open_sleeper(4);
        let blocks = moves::fragmented(&arena);
        let acts: [fn(&DeviceArena); 2] = [sleep, moves::compact];
        let others = acts.map(|act| {
            let arena = arena.clone();
            loom::thread::spawn(move || act(&arena))
        });
        let lease = arena.enter().expect("awake, or woken");
        blocks.iter().for_each(|block| assert_backed(&driver, block, &lease));
        drop(lease);
        others.into_iter().for_each(|other| other.join().expect("no panic"));
        drop(blocks);
        end(&arena, &driver);
    });
}

#[test]
fn what_is_given_back_beside_a_sleep_leaves_once() {
    loom::model(|| {
        let (arena, driver) = open_sleeper(4);
        let stays = granule(&arena);
        assert!(pass(&arena, 700));
        let purge = |arena: &DeviceArena| {
            arena.purge().expect("gives back");
        };
        let device = Arc::clone(&driver);
        both(arena, &driver, purge, move |arena| {
            arena.sleep(NOW).expect("nobody is in, nor wants to be");
            assert!(lock(&device.committed).iter().all(|committed| !committed));
            drop(stays);
        });
    });
}
