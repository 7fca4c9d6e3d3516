//! Blocks in a lane's front: reused at once by the lane itself, and by others only in order.

use std::sync::Barrier;
use std::thread;

use super::*;

/// So often, that the size is hot.
const TURNS: u64 = 8;

/// Lets a lane use blocks of 8 MiB one after another; the last of them waits in its front.
fn warm(sim: &SimDriver, lane: &Lane) -> (DeviceAddress, Vec<Ticket>) {
    let mut place = DeviceAddress::new(0);
    let mut checks = Vec::new();
    for turn in 0..TURNS {
        let buffer = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
        place = at(&buffer);
        checks.push(fill(sim, lane.stream(), &buffer, turn));
    }
    assert_eq!(lane.arena().snapshot().cached, ByteSize::mib(8));
    (place, checks)
}

#[test]
fn another_lane_gets_what_a_front_kept_only_after_its_work() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(8));
    // So that something may wait in a front though all of the limit is used.
    arena.set_limit(ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let (place, mut checks) = warm(&sim, &one);
    arena.set_limit(ByteSize::mib(8));
    let buffer = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("the front is emptied for it");
    assert_eq!(at(&buffer), place);
    checks.push(fill(&sim, two.stream(), &buffer, 99));
    assert_eq!(sim.calls(Call::StreamWaitEvent), 1, "by the device, and by no thread");
    arena.validate();
    assert_sound(&sim, &checks);
}

#[test]
fn a_lane_that_ends_leaves_nothing_in_its_front_and_no_count_behind() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let (_, checks) = warm(&sim, &lane);
    let before = arena.snapshot();
    drop(lane);
    let after = arena.snapshot();
    assert_eq!((after.cached, after.pending), (ByteSize::ZERO, ByteSize::mib(8)));
    assert_eq!((after.live, after.requested), (ByteSize::ZERO, ByteSize::ZERO));
    assert_eq!((after.allocs_total, after.frees_total), (TURNS, TURNS));
    assert_eq!(after.thread_cache_allocs_total, before.thread_cache_allocs_total);
    assert!(after.thread_cache_allocs_total > 0);
    arena.validate();
    assert_sound(&sim, &checks);
}

#[test]
fn the_last_buffer_of_a_lane_is_freed_after_the_lane() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let lane = lane(&arena, &sim);
    let (_, mut checks) = warm(&sim, &lane);
    let last = lane.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    checks.push(fill(&sim, lane.stream(), &last, 98));
    drop(lane);
    drop(last);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    arena.validate();
    assert_sound(&sim, &checks);
}

#[test]
fn the_end_of_a_run_is_after_what_the_front_keeps() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let (place, mut checks) = warm(&sim, &one);
    one.end_run().expect("marked");
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    let recorded = sim.calls(Call::EventRecord);
    // Work of the next run, which the other lane need not come after.
    let other = one.alloc::<u8>(4 * MIB, Region::Stable).expect("room");
    checks.push(fill(&sim, one.stream(), &other, 97));
    let buffer = two.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    assert_eq!(at(&buffer), place);
    assert_eq!(sim.calls(Call::EventRecord), recorded, "the mark does");
    checks.push(fill(&sim, two.stream(), &buffer, 96));
    assert_sound(&sim, &checks);
}

#[test]
fn a_block_that_two_lanes_used_waits_in_no_front() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(64));
    let (one, two) = (lane(&arena, &sim), lane(&arena, &sim));
    let (_, _) = warm(&sim, &one);
    let mut buffer = one.alloc::<u8>(8 * MIB, DYNAMIC).expect("room");
    buffer.record_use(&two).expect("ours");
    drop(buffer);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    assert_eq!(arena.snapshot().pending, ByteSize::mib(8));
}

#[test]
fn many_lanes_keep_together_about_what_eight_threads_do() {
    let (arena, sim) = open(Order::Lazy, ByteSize::gib(8));
    arena.set_thread_cache(ByteSize::mib(16));
    let lanes: Vec<_> = (0..64).map(|_| lane(&arena, &sim)).collect();
    for lane in &lanes {
        for _ in 0..TURNS {
            let both = [4 * MIB, MIB / 8].map(|len| lane.alloc::<u8>(len, DYNAMIC).expect("room"));
            drop(both);
        }
    }
    // Of 16 MiB for each front an eighth: what is larger goes to the books.
    assert_eq!(arena.snapshot().cached, ByteSize::mib(8));
    drop(lanes);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    arena.validate();
}

#[test]
fn lanes_that_come_and_go_on_two_threads_beside_a_purge_lose_no_count() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(256));
    let (barrier, rounds) = (Barrier::new(3), 200_u64);
    thread::scope(|scope| {
        for _ in 0..2 {
            scope.spawn(|| {
                barrier.wait();
                for round in 0..rounds {
                    let lane = lane(&arena, &sim);
                    for turn in 0..TURNS {
                        let buffer = lane.alloc::<u8>(2 * MIB, DYNAMIC).expect("room");
                        if turn == 0 && round % 8 == 0 {
                            fill(&sim, lane.stream(), &buffer, round);
                        }
                    }
                }
            });
        }
        scope.spawn(|| {
            barrier.wait();
            for _ in 0..rounds {
                arena.purge().expect("no error");
                arena.snapshot().validate();
            }
        });
    });
    sim.run_all();
    arena.close().expect("nothing is live");
    let snapshot = arena.snapshot();
    let all = 2 * rounds * TURNS;
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (all, all));
    assert_eq!((snapshot.requested, snapshot.cached), (ByteSize::ZERO, ByteSize::ZERO));
    sim.assert_no_faults();
}

/// Regression test: a front kept four blocks of a size, so each further one took the lock.
#[test]
fn a_front_keeps_as_many_blocks_as_were_live_up_to_its_bounds() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(256));
    let lane = lane(&arena, &sim);
    let turn = |count: usize, len: usize| {
        let blocks = (0..count).map(|_| lane.alloc::<u8>(len, DYNAMIC).expect("room"));
        drop(blocks.collect::<Vec<_>>());
    };
    turn(512, 4 << 10);
    assert_eq!(arena.snapshot().cached, ByteSize::kib(4 * 512));
    let before = arena.snapshot().thread_cache_allocs_total;
    turn(512, 4 << 10);
    assert_eq!(arena.snapshot().thread_cache_allocs_total, before + 512);
    turn(1_500, 4 << 10);
    assert_eq!(arena.snapshot().cached, ByteSize::kib(4 * 1_024), "bounded by their number");
    arena.set_thread_cache(ByteSize::mib(1));
    turn(512, 4 << 10);
    assert_eq!(arena.snapshot().cached, ByteSize::mib(1), "bounded by their bytes");
    arena.validate();
}

#[test]
fn blocks_that_a_front_did_not_need_between_two_decays_leave_it() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(256));
    let lane = lane(&arena, &sim);
    let turn = |count: usize| {
        let blocks = (0..count).map(|_| lane.alloc::<u8>(64 << 10, DYNAMIC).expect("room"));
        drop(blocks.collect::<Vec<_>>());
    };
    turn(64);
    let decay = || {
        arena.decay(arena.next_decay()).expect("no driver error");
        arena.snapshot().cached
    };
    assert_eq!(decay(), ByteSize::kib(64 * 64), "all were needed");
    (0..3).for_each(|_| turn(10));
    assert_eq!(decay(), ByteSize::kib(64 * 10), "ten were");
    decay();
    assert_eq!(decay(), ByteSize::ZERO);
    arena.validate();
}

/// Many sizes that are requested in turn do not displace one another.
#[test]
fn the_sizes_of_a_forward_pass_are_all_kept() {
    let (arena, sim) = open(Order::Lazy, ByteSize::mib(256));
    let lane = lane(&arena, &sim);
    let pass = || {
        for size in 1..=24 {
            drop(lane.alloc::<u8>(size * (96 << 10), DYNAMIC).expect("room"));
        }
    };
    (0..4).for_each(|_| pass());
    let before = arena.snapshot().thread_cache_allocs_total;
    pass();
    assert_eq!(arena.snapshot().thread_cache_allocs_total, before + 24);
}

/// The sizes of a loop of cuArena's benchmark: the largest needs as much as all others together.
#[test]
fn sizes_that_double_are_all_kept_while_nothing_else_is_live() {
    let (arena, sim) = open(Order::Lazy, ByteSize::gib(1));
    let lane = lane(&arena, &sim);
    let turn = || (0..8).for_each(|nth| drop(lane.alloc::<u8>(MIB << nth, DYNAMIC).expect("room")));
    (0..8).for_each(|_| turn());
    let before = arena.snapshot().thread_cache_allocs_total;
    turn();
    assert_eq!(arena.snapshot().thread_cache_allocs_total, before + 8);
}

#[test]
fn no_more_is_committed_because_of_fronts_than_one_may_keep() {
    let (arena, sim) = open(Order::Lazy, ByteSize::gib(1));
    arena.set_thread_cache(ByteSize::mib(16));
    let lanes: Vec<_> = (0..4).map(|_| lane(&arena, &sim)).collect();
    for lane in &lanes {
        (0..TURNS).for_each(|_| drop(lane.alloc::<u8>(12 * MIB, DYNAMIC).expect("room")));
    }
    let after = arena.snapshot();
    assert_eq!(after.committed, ByteSize::mib(24), "two fronts were emptied for the others");
    arena.validate();
}
