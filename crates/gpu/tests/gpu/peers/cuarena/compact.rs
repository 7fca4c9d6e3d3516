//! cuArena's tests of compaction, and of its regions beside one, as claims about ours.
//!
//! The table of all of them stands in `cuarena.rs`. Theirs call back for each live block; ours for
//! each that moved.
//!
//! Invariant: as in `cuarena.rs`.

use lowtide_gpu::ByteSize;
use lowtide_gpu::{Buffer, CompactOptions, DeviceArena, Moved, RawBlock, Region};

use super::super::{assert_apart, assert_marked, assert_usable, headroom, mark, pool, raw};
use super::MIB_64;

/// Compacts the dynamic region until one span has all that is free; what moved, in order.
fn compact(arena: &DeviceArena) -> Vec<Moved> {
    let all = CompactOptions::new(Region::Dynamic);
    let contiguous = Some(ByteSize::MAX);
    let mut moves = Vec::new();
    let options = CompactOptions { contiguous, moves_raw: true, ..all };
    let done = arena.compact(options, |moved| moves.push(moved)).expect("nothing fails");
    assert_eq!((done.moves, done.skipped), (moves.len() as u64, 0));
    arena.validate();
    moves
}

fn eighths(arena: &DeviceArena) -> [RawBlock; 8] {
    [(); 8].map(|()| raw(arena, ByteSize::mib(8), Region::Dynamic).expect("room"))
}

/// Compact 1: nothing is allocated, nothing is called back, all is available.
#[test]
fn compact_of_an_empty_pool_moves_nothing() {
    let arena = pool(MIB_64);
    assert_eq!(compact(&arena), []);
    eighths(&arena);
    arena.reset().expect("here");
    assert_eq!(compact(&arena), []);
    assert_eq!(headroom(&arena.snapshot()), MIB_64);
    assert_usable(&arena);
}

/// Compact 2: of eight blocks every other one is freed; 16 MiB fit only after a compaction, and
/// the blocks are freed by where they are then.
#[test]
fn compact_makes_room_between_every_other_block() {
    let arena = pool(MIB_64);
    let mut blocks = eighths(&arena).to_vec();
    for nth in [6, 4, 2, 0] {
        arena.free(blocks.remove(nth).at).expect("live");
    }
    assert!(raw(&arena, ByteSize::mib(16), Region::Dynamic).is_err(), "no two holes touch");
    for moved in compact(&arena) {
        let block = blocks.iter_mut().find(|block| block.at == moved.from).expect("a live one");
        *block = arena.raw_block(moved.to).expect("it is there");
        assert_eq!((moved.size, moved.region), (block.size, Region::Dynamic));
    }
    let large = raw(&arena, ByteSize::mib(16), Region::Dynamic).expect("32 MiB in one");
    assert_apart(blocks.iter().copied().chain([large]));
    for block in blocks {
        assert_eq!(arena.free(block.at), Ok(block));
    }
    arena.free(large.at).expect("live");
    assert_usable(&arena);
}

/// Compact 3: a block that need not move keeps its address.
#[test]
fn compact_leaves_a_block_where_nothing_is_gained() {
    let arena = pool(MIB_64);
    let block = raw(&arena, ByteSize::mib(8), Region::Dynamic).expect("room");
    assert_eq!(compact(&arena), []);
    assert_eq!(arena.free(block.at), Ok(block));
    assert_usable(&arena);
}

/// Compact 4: what was written is there after the move (111 and 333).
#[test]
fn compact_keeps_what_the_blocks_hold() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let make = |value: u64| {
        let mut buffer: Buffer<u64> = arena.alloc(1 << 20, Region::Dynamic).expect("8 MiB");
        mark(&mut buffer, &lease, value);
        buffer
    };
    let [first, second, third] = [111, 222, 333].map(make);
    drop((second, lease));
    compact(&arena);
    let lease = arena.enter().expect("awake");
    assert_marked(&first, &lease, 111, first.len());
    assert_marked(&third, &lease, 333, third.len());
    drop((first, third));
    assert_usable(&arena);
}

/// Mixed 1: stable blocks survive a compaction and are not among what moved.
#[test]
fn mixed_stable_blocks_stay_while_dynamic_ones_are_compacted() {
    let arena = pool(ByteSize::mib(80));
    let kept = [1, 2, 3].map(|count| {
        let size = ByteSize::mib(count);
        raw(&arena, size, Region::Stable).expect("room")
    });
    arena.free(kept[1].at).expect("live");
    let blocks = eighths(&arena);
    for nth in [0, 2, 5] {
        arena.free(blocks[nth].at).expect("live");
    }
    let moves = compact(&arena);
    assert!(!moves.is_empty() && moves.iter().all(|moved| moved.region == Region::Dynamic));
    for block in [kept[0], kept[2]] {
        assert_eq!(arena.raw_block(block.at), Ok(block));
    }
    arena.reset().expect("here");
    assert_usable(&arena);
}
