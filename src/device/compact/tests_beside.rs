//! What others do while an arena is compacted: enter, allocate, free, resize, from other threads
//! and from the callback.
//!
//! Invariant: nobody waits longer than for one move, and nobody sees half of one.

use std::thread;
use std::time::Duration;

use super::tests::{
    ALL, Chance, DYNAMIC, STRIDE, address, alternating, assert_all_marked, assert_marked, fixed,
    marked, virtual_memory,
};
use crate::bytes::ByteSize;
use crate::clock::{Clock, SystemClock};
use crate::device::{Buffer, CompactOptions, Goal, Region, Stopped};
use crate::sync::lock;

/// Waits for what another thread does soon.
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
        thread::spawn(move || arena.enter().map(drop))
    };
    wait_until(|| lock(&arena.shared().books).entering == 1);
    assert!(!entering.is_finished(), "a lease was given while a block moves");
    arena.validate();
    driver.let_go();
    let done = compacting.join().expect("no panic").expect("no error");
    assert_eq!(entering.join().expect("no panic"), Ok(()));
    // The one that it was at, or more where the lease was dropped before it looked again.
    assert!(done.stopped == Stopped::Busy || done.moves > 1, "{done:?}");
    assert_all_marked(&arena, &blocks);
    arena.validate();
    driver.assert_no_faults();
}

/// The bug: an old pointer freed during a compaction was not known, and a new block could lie
/// where contents were still copied from.
#[test]
fn beside_a_move_others_allocate_and_free_the_moving_block_among_them() {
    for front in [ByteSize::ZERO, ByteSize::mib(8)] {
        let (arena, driver) = fixed(ByteSize::mib(64));
        arena.set_front(front);
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
        let moving = lock(&arena.shared().books).moving.expect("one is moving");
        // Neither waits for the copy that is held.
        drop(arena.alloc::<u64>(1 << 19, Region::Dynamic).expect("room"));
        arena.validate();
        let is_it = |block: &Buffer<u64>| block.block_id() == Some(moving.id);
        let freed = blocks.iter().position(|(_, block)| is_it(block)).expect("it is ours");
        drop(blocks.swap_remove(freed));
        arena.validate();
        driver.let_go();
        let (moves, told) = compacting.join().expect("no panic").expect("no error");
        if front.is_zero() {
            assert_eq!(moves, told + 1, "nobody is told of a block that is gone");
        } // else it waits in the front for its next owner
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
        assert_eq!((inner.moves, inner.stopped), (0, Stopped::Busy));
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
        let all = Goal::Contiguous(ByteSize::MAX);
        let goal = if chance.below(2) == 0 { Goal::Granules } else { all };
        let options = CompactOptions { goal, budget, ..DYNAMIC };
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
    // It shrinks, grows where it is then, or is copied to where it was.
    for mib in [1, 4, 7] {
        let (arena, driver) = fixed(ByteSize::mib(16));
        let gone = marked(&arena, ByteSize::mib(6), 0).expect("room");
        let mut moving = marked(&arena, ByteSize::mib(2), 1).expect("room");
        let after = marked(&arena, ByteSize::mib(2), 2).expect("room");
        let pin = after.pin().expect("here");
        // The rest has its memory as well: what is held is a copy.
        drop(arena.alloc::<u8>(6 << 20, Region::Dynamic).expect("room"));
        drop(gone);
        driver.hold();
        let compacting = {
            let arena = arena.clone();
            thread::spawn(move || arena.compact(ALL, |_| {}))
        };
        wait_until(|| lock(&arena.shared().books).moving.is_some());
        let resizing = thread::spawn(move || moving.resize(mib << 17).map(|()| moving));
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
fn a_block_in_a_front_is_not_handed_out_by_an_address_that_it_left() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    // In the middle of a compaction one is freed into the front and moved there.
    let mut given = Some(blocks);
    let done = arena.compact(ALL, |_| drop(given.take())).expect("no error");
    assert!(done.moves >= 1, "{done:?}");
    let again: Vec<_> =
        (0..8).map(|mark| (mark, marked(&arena, ByteSize::mib(8), mark).expect("room"))).collect();
    assert_all_marked(&arena, &again);
    arena.validate();
    driver.assert_no_faults();
}
