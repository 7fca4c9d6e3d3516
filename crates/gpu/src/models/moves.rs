//! Moves under loom: a compaction with concurrent leases, frees, and work started under a lease.
//!
//! Invariant: no block moves under a lease, nor while the device works on it.

use super::*;

/// Allocates two separate blocks of a region. A compaction moves one.
pub(super) fn fragmented(arena: &DeviceArena) -> [Buffer<u8>; 2] {
    let block = || arena.alloc::<u8>(512, Region::Dynamic).expect("room");
    let (first, gone, second) = (block(), block(), block());
    drop(gone);
    [first, second]
}

pub(super) fn compact(arena: &DeviceArena) {
    let contiguous = Some(ByteSize::MAX);
    let options = CompactOptions { contiguous, ..CompactOptions::new(Region::Dynamic) };
    arena.compact(options, |_| {}).expect("nothing fails");
}

#[test]
fn a_lease_and_a_move_exclude_each_other() {
    loom::model(|| {
        let (arena, driver) = open(4);
        let blocks = fragmented(&arena);
        both(arena.clone(), &driver, compact, |arena| {
            let lease = arena.enter().expect("after one move at most");
            assert!(arena.inner().lock_state().moves.moving.is_none());
            drop(lease);
            drop(blocks);
        });
    });
}

#[test]
fn a_block_is_freed_once_before_while_or_after_it_moves() {
    loom::model(|| {
        let (arena, driver) = open(4);
        let blocks = fragmented(&arena);
        both(arena, &driver, compact, |_| drop(blocks));
    });
}

#[test]
fn leases_nest_beside_a_move_and_none_is_lost() {
    loom::model(|| {
        let (arena, driver) = open(4);
        let blocks = fragmented(&arena);
        both(arena.clone(), &driver, compact, |arena| {
            let outer = arena.enter().expect("after one move at most");
            let inner = arena.enter().expect("nothing moves");
            drop(outer);
            assert!(arena.inner().lock_state().moves.moving.is_none());
            drop(inner);
            assert_eq!(arena.inner().lock_state().leases, 0);
            drop(blocks);
        });
    });
}

#[test]
fn a_move_comes_after_the_work_that_a_lease_let_in() {
    loom::model(|| {
        let (arena, driver) = open_beside_streams(4);
        let lane = lanes::lane(&arena, 1);
        let block = || lane.alloc::<u8>(512, Region::Dynamic).expect("room");
        let (first, gone, second) = (block(), block(), block());
        drop(gone);
        arena.purge().expect("marks the end of its work");
        lock(&driver.work).finish_all();
        arena.purge().expect("and sees it");
        let device = Arc::clone(&driver);
        both(arena.clone(), &driver, compact, move |_| {
            let lease = second.enter().expect("after one move at most");
            let at = second.address(&lease).expect("ours").expect("not empty");
            lock(&device.work).give(lane.stream(), at, second.bytes());
            drop(lease);
            drop((first, second, lane));
        });
    });
}
