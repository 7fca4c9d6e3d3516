//! Thread caches under loom: one thread uses a cache while others empty it.
//!
//! Invariant: a block is in a cache, in the arena or owned by a buffer, and never in two of them.

use super::*;

#[test]
fn a_cache_that_is_emptied_hands_nothing_out_twice() {
    loom::model(|| emptied_beside(1));
}

/// With one preemption less than the other models, because it has ten times as many steps.
#[test]
fn a_cache_that_is_emptied_hands_two_blocks_out_once_each() {
    let mut few = loom::model::Builder::new();
    few.preemption_bound = Some(2);
    few.check(|| emptied_beside(2));
}

/// Returns the number of allocations from a cache while it is emptied.
fn emptied_beside(count: usize) {
    let (arena, driver) = open(4);
    for _ in 0..6 {
        assert!(pass(&arena, 256));
    }
    assert!(!arena.snapshot().cached.is_zero(), "the size is hot");
    let trim = |arena: &DeviceArena| {
        arena.trim(ByteSize::ZERO).expect("gives back");
    };
    both(arena, &driver, trim, move |arena| {
        let alloc = |_| arena.alloc::<u8>(256, Region::Dynamic).expect("room");
        let held: Vec<_> = (0..count).map(alloc).collect();
        // A block between the cache and the arena counts as live meanwhile. A block that was handed
        // out twice would be freed twice, which the arena detects.
        assert!(arena.glance().live >= ByteSize::of(256 * count));
        drop(held);
    });
}

#[test]
fn what_is_freed_while_an_arena_is_closed_is_kept_by_no_cache() {
    loom::model(|| {
        let (arena, driver) = open(4);
        for _ in 0..6 {
            assert!(pass(&arena, 256));
        }
        let hot = arena.alloc::<u8>(256, Region::Dynamic).expect("room");
        let close = |arena: &DeviceArena| match arena.close() {
            Ok(()) => assert!(arena.snapshot().committed.is_zero()),
            Err(DeviceError::LiveBlocks { count, .. }) => assert_eq!(count, 1),
            Err(error) => panic!("{error}"),
        };
        both(arena, &driver, close, |_| drop(hot));
    });
}
