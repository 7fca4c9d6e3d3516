//! Tests of operations during a compaction: enter, allocate, free, resize, from other threads and
//! from the callback.
//!
//! Invariant: no thread waits longer than for one batch, or sees half of a move.

use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

use super::{
    ALL, DYNAMIC, STRIDE, address, alternating, assert_all_marked, assert_marked,
    beside_a_pinned_one, fixed, marked, virtual_memory,
};
use crate::tests::Chance;
use crate::{ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceCosts, Region};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, SystemClock};
use lowtide_cuda_sim::{Call, SimDriver, SimOptions};

/// Waits for an action of another thread.
fn wait_until(condition: impl Fn() -> bool) {
    let clock = SystemClock::new();
    let deadline = clock.now() + Duration::from_secs(20);
    while !condition() {
        assert!(clock.now() < deadline, "it did not come to pass");
        thread::yield_now();
    }
}

#[test]
fn who_wants_a_lease_waits_for_one_move_and_no_other_follows() {
    // Without the count of waiting threads the compaction sometimes wins, so this is repeated.
    for _ in 0..4 {
        let (arena, driver) = fixed(ByteSize::mib(64));
        let blocks = alternating(&arena, 8, ByteSize::mib(8));
        driver.hold();
        let compacting = {
            let arena = arena.clone();
            thread::spawn(move || arena.compact(ALL, |_| {}))
        };
        driver.wait_until_held(1);
        let entering = {
            let arena = arena.clone();
            thread::spawn(move || arena.enter())
        };
        wait_until(|| arena.inner().lock_state().moves.entering == 1);
        assert!(!entering.is_finished(), "a lease was given while a block moves");
        arena.validate();
        driver.let_go();
        let lease = entering.join().expect("no panic").expect("awake");
        let done = compacting.join().expect("no panic").expect("no error");
        assert_eq!((done.moves, done.is_busy), (1, true));
        drop(lease);
        assert!(arena.compact(ALL, |_| {}).expect("no error").moves > 0, "there was more to do");
        assert_all_marked(&arena, &blocks);
        arena.validate();
        driver.assert_no_faults();
    }
}

#[test]
fn a_lease_that_is_had_while_the_new_place_gets_its_memory_stops_the_move() {
    let (arena, driver) = fixed(ByteSize::mib(16));
    let (moving, _after, _pin) = beside_a_pinned_one(&arena);
    driver.hold();
    let compacting = {
        let arena = arena.clone();
        thread::spawn(move || arena.compact(ALL, |_| {}))
    };
    driver.wait_until_held(1);
    let lease = arena.enter().expect("at once: nothing is copied yet");
    arena.validate();
    driver.let_go();
    let done = compacting.join().expect("no panic").expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, true));
    drop(lease);
    assert_marked(&arena, &moving, 1);
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn a_block_that_a_resize_copies_does_not_move_meanwhile() {
    let (arena, driver) = fixed(ByteSize::mib(16));
    let (mut moving, _after, pin) = beside_a_pinned_one(&arena);
    // All blocks have memory, so the held call is the copy.
    drop([6, 6].map(|mib| arena.alloc::<u8>(mib << 20, Region::Dynamic).expect("room")));
    drop(pin);
    driver.hold();
    let resizing = thread::spawn(move || moving.resize(3 << 17).map(|()| moving));
    driver.wait_until_held(1);
    let done = arena.compact(ALL, |_| panic!("moved")).expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, true));
    driver.let_go();
    let resized = resizing.join().expect("no panic").expect("room");
    let lease = arena.enter().expect("awake");
    let seen = resized.slice(&lease).expect("own lease");
    assert_eq!((seen.len(), seen[STRIDE]), (3 << 17, 1 ^ (1 << 32)));
    driver.assert_no_faults();
}

/// Regression test: an old pointer freed during a compaction was unknown, and a new block could be
/// placed at the source of a copy in progress.
#[test]
fn beside_a_move_others_allocate_and_free_the_moving_block_among_them() {
    for cache in [ByteSize::ZERO, ByteSize::mib(8)] {
        let (arena, driver) = fixed(ByteSize::mib(64));
        arena.set_thread_cache(cache);
        let mut blocks = alternating(&arena, 8, ByteSize::mib(8));
        driver.hold();
        let compacting = {
            let arena = arena.clone();
            thread::spawn(move || {
                let mut told = 0;
                arena.compact(ALL, |_| told += 1).map(|done| (done.moves, told))
            })
        };
        driver.wait_until_held(1);
        let is_moving = |block: &Buffer<u64>| {
            let id = block.block_id().expect("not empty");
            arena.inner().lock_state().moves.is_moving(id)
        };
        let moving = blocks.iter().position(|(_, block)| is_moving(block)).expect("it is ours");
        // Neither call waits for the copy that is held.
        drop(arena.alloc::<u64>(1 << 19, Region::Dynamic).expect("room"));
        arena.validate();
        drop(blocks.swap_remove(moving));
        arena.validate();
        driver.let_go();
        let (moves, told) = compacting.join().expect("no panic").expect("no error");
        if cache.is_zero() {
            assert_eq!(moves, told + 1, "nobody is told of a block that is gone");
        } // otherwise it waits in the cache for its next owner
        assert_eq!(arena.snapshot().live, ByteSize::mib(24));
        let next = marked(&arena, ByteSize::mib(8), 77).expect("room");
        assert_marked(&arena, &next, 77);
        assert_all_marked(&arena, &blocks);
        arena.validate();
        driver.assert_no_faults();
    }
}

#[test]
fn a_block_whose_memory_is_on_its_way_stays() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let gone = marked(&arena, ByteSize::mib(8), 0).expect("room");
    driver.hold();
    let arriving = {
        let arena = arena.clone();
        thread::spawn(move || marked(&arena, ByteSize::mib(8), 1).expect("room"))
    };
    driver.wait_until_held(1);
    drop(gone);
    let done = arena.compact(ALL, |_| panic!("moved")).expect("no error");
    assert_eq!(done.moves, 0);
    driver.let_go();
    let arrived = arriving.join().expect("no panic");
    assert_eq!(arena.compact(ALL, |_| {}).map(|done| done.moves), Ok(1));
    assert_marked(&arena, &arrived, 1);
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn a_callback_may_allocate_free_and_enter_and_no_other_compaction_begins() {
    let (arena, _) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    let done = arena.compact(ALL, |_| {
        let lease = arena.enter().expect("awake");
        assert!(blocks.iter().all(|(_, block)| block.slice(&lease).is_ok()));
        drop(lease);
        drop(arena.alloc::<u64>(1 << 10, Region::Dynamic).expect("room"));
        let inner = arena.compact(ALL, |_| panic!("moved")).expect("no error");
        assert_eq!((inner.moves, inner.is_busy), (0, true));
    });
    assert_eq!(done.expect("no error").largest_span, ByteSize::mib(32));
    assert_all_marked(&arena, &blocks);
}

#[test]
fn threads_keep_their_contents_while_everything_moves() {
    const THREADS: u64 = 3;
    const MIB: u64 = 1 << 20;
    let (arena, driver) = virtual_memory(ByteSize::mib(48));
    let mut moves = 0;
    let worker = |number: u64| {
        let arena = arena.clone();
        move || {
            let seed = 0x9E37_79B9_7F4A_7C15 ^ (number << 32);
            println!("thread {number} seed {seed:#x}");
            let mut chance = Chance(seed);
            let mut kept: Vec<(u64, Buffer<u64>)> = Vec::new();
            for step in 0..250 {
                let mark = (number << 20) | step;
                match chance.below(8) {
                    0..4 => {
                        let size = ByteSize::new(256 * (1 + chance.below(MIB / 256)));
                        match marked(&arena, size, mark) {
                            Ok(buffer) => kept.push((mark, buffer)),
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                    }
                    4..6 if !kept.is_empty() => {
                        let nth = usize::try_from(chance.below(kept.len() as u64)).expect("small");
                        let (mark, buffer) = kept.swap_remove(nth);
                        assert_marked(&arena, &buffer, mark);
                    }
                    6 if !kept.is_empty() => {
                        let nth = usize::try_from(chance.below(kept.len() as u64)).expect("small");
                        let pin = kept[nth].1.pin().expect("here");
                        let place = address(&arena, &kept[nth].1);
                        thread::yield_now();
                        assert_eq!(address(&arena, &kept[nth].1), place, "a pinned block moved");
                        drop(pin);
                    }
                    7 => drop(arena.purge().expect("purge")),
                    _ => {}
                }
                if kept.len() > 16 {
                    kept.drain(..12);
                }
            }
            assert_all_marked(&arena, &kept);
        }
    };
    let threads: Vec<_> = (1..=THREADS).map(|number| thread::spawn(worker(number))).collect();
    let mut chance = Chance(99);
    while !threads.iter().all(thread::JoinHandle::is_finished) {
        let budget = ByteSize::mib(1 + chance.below(16));
        let all = Some(ByteSize::MAX);
        let contiguous = if chance.below(2) == 0 { None } else { all };
        let options = CompactOptions { contiguous, budget, ..DYNAMIC };
        moves += arena.compact(options, |_| {}).expect("no error").moves;
    }
    for thread in threads {
        thread.join().expect("no panic");
    }
    arena.validate();
    driver.assert_no_faults();
    let snapshot = arena.snapshot();
    println!("{moves} moves, {snapshot:?}");
    assert!(moves > 0, "nothing moved: the test is too tame");
    assert_eq!((snapshot.live, snapshot.leases), (ByteSize::ZERO, 0));
    assert_eq!(snapshot.allocs_total, snapshot.frees_total);
    assert!(driver.committed().1 <= ByteSize::mib(48), "the limit was passed");
}

#[test]
fn a_resize_waits_for_the_blocks_move_and_goes_on_from_there() {
    // The block shrinks, grows in place, or is copied to its old place.
    for mib in [1, 4, 7] {
        let (arena, driver) = fixed(ByteSize::mib(16));
        let (mut moving, after, pin) = beside_a_pinned_one(&arena);
        // All blocks have memory, so the held call is the copy.
        drop([6, 6].map(|mib| arena.alloc::<u8>(mib << 20, Region::Dynamic).expect("room")));
        driver.hold();
        let compacting = {
            let arena = arena.clone();
            thread::spawn(move || arena.compact(ALL, |_| {}))
        };
        wait_until(|| arena.inner().lock_state().moves.moving.is_some());
        let resizing = thread::spawn(move || moving.resize(mib << 17).map(|()| moving));
        // This never happens; without the wait it soon would.
        for _ in 0..2000 {
            assert!(!resizing.is_finished(), "a block was resized while it moves");
            thread::yield_now();
        }
        arena.validate();
        driver.let_go();
        assert_eq!(compacting.join().expect("no panic").map(|done| done.moves), Ok(1));
        let resized = resizing.join().expect("no panic").expect("room");
        assert_marked(&arena, &after, 2);
        let lease = arena.enter().expect("awake");
        let seen = resized.slice(&lease).expect("own lease");
        assert_eq!((seen.len(), seen[0], seen[STRIDE]), (mib << 17, 1, 1 ^ (1 << 32)));
        drop((lease, pin));
        arena.validate();
        driver.assert_no_faults();
    }
}

#[test]
fn a_block_in_a_cache_is_not_handed_out_by_an_address_that_it_left() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    // In the middle of a compaction a block is freed into the cache and moved there.
    let mut given = Some(blocks);
    let done = arena.compact(ALL, |_| drop(given.take())).expect("no error");
    assert!(done.moves >= 1, "{done:?}");
    let again: Vec<_> =
        (0..8).map(|mark| (mark, marked(&arena, ByteSize::mib(8), mark).expect("room"))).collect();
    assert_all_marked(&arena, &again);
    arena.validate();
    driver.assert_no_faults();
}

/// Regression test: a plan used a hole behind the wall between the ranges, though no block passes
/// the wall. The same move was planned and skipped each time, and no other move was.
#[test]
fn a_hole_in_the_other_range_kept_a_block_from_one_in_its_own() {
    let (arena, driver) = virtual_memory(ByteSize::gib(1));
    let block = |mark, size| (mark, marked(&arena, size, mark).expect("room"));
    // Fills the small range, with a hole next to the wall that just holds the last block.
    let mut small: Vec<_> = (0..256).map(|mark| block(mark, ByteSize::kib(512))).collect();
    small.sort_by_key(|(_, buffer)| address(&arena, buffer));
    small.drain(..2);
    let sizes = [1024, 1536, 1536, 1024].map(ByteSize::kib);
    let mut large: Vec<_> = (900..).zip(sizes).map(|(mark, size)| block(mark, size)).collect();
    large.remove(1);
    let done = arena.compact(DYNAMIC, |_| {}).expect("no error");
    assert_eq!((done.moves, done.skipped, done.recovered), (1, 0, ByteSize::mib(2)));
    assert_all_marked(&arena, &large);
    assert_all_marked(&arena, &small);
    arena.validate();
    driver.assert_no_faults();
}

/// A thread that enters while a batch is copied waits for that batch, and the compaction for the
/// thread.
#[test]
fn a_thread_that_enters_amid_the_copies_waits_for_their_batch_only() {
    let sim = Arc::new(SimDriver::new(SimOptions::default()));
    let config = ArenaConfig::new("batches");
    let arena = DeviceArena::open(sim.clone(), Arc::new(sim.clock()), config).expect("open");
    let block = |_| arena.alloc::<u8>(256 << 10, Region::Dynamic).expect("room");
    let mut blocks: Vec<_> = (0..256).map(block).collect();
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 8 == 3
    });
    arena.wait_for_pending().expect("idle");
    let costs = DeviceCosts { copy_per_second: ByteSize::mib(1_000), ..DeviceCosts::default() };
    arena.set_costs(costs); // four blocks in a batch
    let (tell, told) = mpsc::channel();
    let entering = arena.clone();
    sim.before(Call::CopyAsync, 5, move || {
        let other = entering.clone();
        let thread = thread::spawn(move || drop(other.enter().expect("after the batch")));
        wait_until(|| entering.inner().lock_state().moves.entering > 0);
        tell.send(thread).expect("listens");
    });
    let done = arena.compact(DYNAMIC, |_| {}).expect("no error");
    // The next batch finds the lease, or that it named no lane.
    assert!(done.moves == 8 && (done.is_busy || done.skipped > 0), "{done:?}");
    told.recv().expect("it ran").join().expect("no panic");
    arena.wait_for_pending().expect("the lease named no lane");
    let done = arena.compact(DYNAMIC, |_| {}).expect("no error");
    assert!(done.moves > 8 && !done.is_busy, "{done:?}");
    arena.validate();
    drop(blocks);
    arena.close().expect("nothing is live");
    sim.assert_no_faults();
}
