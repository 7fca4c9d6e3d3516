//! cuArena's tests of its regions and bins, as claims about ours: Stable, Bins, Mixed.
//!
//! The table of all of them stands in `cuarena.rs`.
//!
//! Invariant: a figure that theirs compare is compared exactly, or more strictly.

use lowtide_gpu::ByteSize;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceError, RawBlock, Region};

use super::super::{GRANULE, assert_apart, assert_usable, config, headroom, open_with, pool, raw};
use super::{MIB_64, bytes};

/// Stable 1: the pointer lies inside the stable part.
#[test]
fn stable_blocks_lie_within_the_addresses_of_their_region() {
    let (arena, _) =
        open_with(ArenaConfig { limit: ByteSize::mib(128), reserve: MIB_64, ..config() });
    let mut blocks = Vec::new();
    for size in [1, 2, 5, 8, 16, 32].map(ByteSize::mib) {
        blocks.push(raw(&arena, size, Region::Stable).expect("64 MiB in all"));
        raw(&arena, GRANULE, Region::Dynamic).expect("room");
    }
    assert_eq!(arena.snapshot().regions[0].live, MIB_64);
    let start = blocks.iter().map(|block| block.at).min().expect("some");
    let end = blocks.iter().filter_map(|block| block.at.checked_add(block.size)).max();
    assert_eq!(end.and_then(|end| end.offset_from(start)), Some(MIB_64), "all of the region");
    assert!(blocks.iter().all(|block| block.region == Region::Stable));
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// Stable 2: stable below 64 MiB, dynamic above.
#[test]
fn stable_and_dynamic_blocks_lie_in_ranges_that_do_not_meet() {
    let arena = pool(MIB_64);
    let sizes = [ByteSize::new(256), ByteSize::kib(300), ByteSize::mib(3)];
    let [stable, dynamic] =
        Region::ALL.map(|region| sizes.map(|size| raw(&arena, size, region).expect("room")));
    let end = |blocks: [_; 3]| blocks.map(|block: RawBlock| block.at);
    let (low, high) = (end(stable), end(dynamic));
    let apart = low.iter().max() < high.iter().min() || high.iter().max() < low.iter().min();
    assert!(apart, "{stable:?} among {dynamic:?}");
    assert_apart(stable.into_iter().chain(dynamic));
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// Stable 3: a free and a new allocation coalesce.
#[test]
fn stable_blocks_coalesce_and_the_region_is_empty_after() {
    let arena = pool(MIB_64);
    let two = [(); 2].map(|()| raw(&arena, ByteSize::mib(32), Region::Stable).expect("room"));
    for block in two {
        arena.free(block.at).expect("live");
    }
    assert_eq!(arena.snapshot().regions[0].live, ByteSize::ZERO);
    let whole = raw(&arena, MIB_64, Region::Stable).expect("one block again");
    assert_eq!(whole.at, two[0].at.min(two[1].at));
    arena.free(whole.at).expect("live");
    assert_usable(&arena);
}

/// Stable 4: out of memory in the stable region throws.
#[test]
fn stable_a_full_region_is_a_typed_error_with_its_numbers() {
    let (arena, _) = open_with(ArenaConfig { reserve: ByteSize::mib(8), ..config() });
    let held: Buffer<u8> = arena.alloc(6 << 20, Region::Stable).expect("room");
    let refused = arena.alloc::<u8>(3 << 20, Region::Stable).expect_err("2 MiB are left");
    let expected = DeviceError::OutOfAddresses {
        requested: ByteSize::mib(3),
        reserved: ByteSize::mib(8),
        live: ByteSize::mib(6),
        largest_span: ByteSize::mib(2),
        compacted_span: ByteSize::mib(2),
    };
    assert_eq!(refused, expected);
    drop(bytes(&arena, ByteSize::mib(8))); // the other region has its own
    drop(held);
    assert_usable(&arena);
}

/// Stable 5: resize on a stable block throws. Ours resizes it, in its region.
#[test]
fn stable_buffers_are_resized_and_stay_stable() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let mut buffer = arena.alloc_from(&[3_u32; 100], Region::Stable).expect("room");
    buffer.resize(1 << 20).expect("room");
    assert_eq!(buffer.slice(&lease).expect("own lease")[..100], [3; 100]);
    let [stable, dynamic] = arena.snapshot().regions.map(|region| region.live);
    assert_eq!((stable, dynamic), (ByteSize::mib(4), ByteSize::ZERO));
    drop(buffer);
    assert_usable(&arena);
}

/// Stable 6: falls back to dynamic where there is no stable region. Ours always has one, and no
/// share of the memory is fixed: there is nothing to fall back from.
#[test]
fn stable_blocks_may_take_all_of_the_memory_and_dynamic_ones_as_well() {
    let arena = pool(MIB_64);
    for region in [Region::Stable, Region::Dynamic, Region::Stable] {
        let all: Buffer<u8> = arena.alloc(64 << 20, region).expect("all of it");
        assert_eq!(arena.snapshot().regions[region.number()].live, MIB_64);
        drop(all);
    }
    assert_eq!(arena.snapshot().alloc_failures().map(|of| of.1), [0; 4]);
    assert_usable(&arena);
}

/// Bins 1: eight blocks of 8 MiB, freed evens first, then odds.
#[test]
fn bins_blocks_freed_in_any_order_become_one() {
    let arena = pool(MIB_64);
    let blocks = [(); 8].map(|()| raw(&arena, ByteSize::mib(8), Region::Dynamic).expect("room"));
    assert_apart(blocks);
    assert_eq!(headroom(&arena.snapshot()), ByteSize::ZERO);
    for nth in [0, 2, 4, 6, 1, 3, 5, 7] {
        arena.free(blocks[nth].at).expect("live");
        arena.validate();
    }
    let snapshot = arena.snapshot();
    assert_eq!((headroom(&snapshot), snapshot.largest_free), (MIB_64, MIB_64));
    drop(bytes(&arena, MIB_64));
    assert_eq!(arena.snapshot().commits_total, snapshot.commits_total, "nothing was bare");
    assert_usable(&arena);
}

/// Bins 2: two freed blocks of 8 MiB hold one of 16 MiB.
#[test]
fn bins_two_of_8_mib_hold_one_of_16() {
    let arena = pool(ByteSize::mib(32));
    let blocks = [(); 4].map(|()| raw(&arena, ByteSize::mib(8), Region::Dynamic).expect("room"));
    arena.free(blocks[1].at).expect("live");
    arena.free(blocks[2].at).expect("live");
    let one = raw(&arena, ByteSize::mib(16), Region::Dynamic).expect("in the room of both");
    assert_eq!(one.at, blocks[1].at.min(blocks[2].at));
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// Bins 3: holes 0 and 2 of a 32 MiB pool do not hold 16 MiB. Ours neither, where addresses are as
/// scarce; where they are not, the memory of both holes moves behind other addresses.
#[test]
fn bins_two_holes_apart_hold_no_block_of_both_sizes_unless_there_are_addresses() {
    for addresses in [ByteSize::mib(32), ByteSize::gib(1)] {
        let (arena, _) =
            open_with(ArenaConfig { limit: ByteSize::mib(32), reserve: addresses, ..config() });
        let blocks =
            [(); 4].map(|()| raw(&arena, ByteSize::mib(8), Region::Dynamic).expect("room"));
        arena.free(blocks[0].at).expect("live");
        arena.free(blocks[2].at).expect("live");
        let outcome = raw(&arena, ByteSize::mib(16), Region::Dynamic);
        if addresses == ByteSize::mib(32) {
            let expected = DeviceError::OutOfAddresses {
                requested: ByteSize::mib(16),
                reserved: ByteSize::mib(32),
                live: ByteSize::mib(16),
                largest_span: ByteSize::mib(8),
                compacted_span: ByteSize::mib(8),
            };
            assert_eq!(outcome, Err(expected));
        } else {
            outcome.expect("the limit allows it");
            assert_eq!(arena.snapshot().committed, ByteSize::mib(32));
        }
        arena.reset().expect("here");
        assert_usable(&arena);
    }
}

/// Bins 4: 128 B, 256 KiB and 4 MiB side by side.
#[test]
fn bins_blocks_of_very_different_sizes_live_side_by_side() {
    let arena = pool(MIB_64);
    let sizes = [ByteSize::new(128), ByteSize::kib(256), ByteSize::mib(4)];
    let blocks = sizes.map(|size| raw(&arena, size, Region::Dynamic).expect("room"));
    assert_apart(blocks);
    let given = [ByteSize::new(256), ByteSize::kib(256), ByteSize::mib(4)];
    assert_eq!(blocks.map(|block| block.size), given);
    assert_eq!(arena.snapshot().live, given.into_iter().sum());
    for block in blocks {
        assert_eq!(arena.free(block.at), Ok(block));
    }
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    assert_usable(&arena);
}

/// Mixed 2: used is the sum of both regions.
#[test]
fn mixed_the_figures_of_the_arena_are_the_sums_of_its_regions() {
    let arena = pool(MIB_64);
    let stable: Buffer<u8> = arena.alloc(3_000_000, Region::Stable).expect("room");
    let dynamic: Buffer<u8> = arena.alloc(5_000_001, Region::Dynamic).expect("room");
    let snapshot = arena.snapshot();
    let [first, second] = snapshot.regions;
    let whole = |bytes: u64| ByteSize::new(bytes.next_multiple_of(256));
    assert_eq!((first.live, second.live), (whole(3_000_000), whole(5_000_001)));
    assert_eq!(snapshot.live, first.live.saturating_add(second.live));
    assert_eq!(snapshot.requested, ByteSize::new(8_000_001));
    drop((stable, dynamic));
    assert_usable(&arena);
}

/// Mixed 3: reset clears both regions.
#[test]
fn mixed_reset_clears_both_regions() {
    let arena = pool(MIB_64);
    for region in Region::ALL {
        raw(&arena, ByteSize::mib(30), region).expect("room");
    }
    assert_eq!(arena.reset(), Ok(ByteSize::mib(60)));
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.regions.map(|region| region.live), [ByteSize::ZERO; 2]);
    assert_eq!(headroom(&snapshot), MIB_64);
    drop(bytes(&arena, MIB_64));
    assert_usable(&arena);
}
