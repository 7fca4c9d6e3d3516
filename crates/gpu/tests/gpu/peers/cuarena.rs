//! The 53 tests of cuArena (tests/test.cu at commit 37fe0e1), as claims about our arena.
//!
//! | theirs | tests | ours |
//! |---|--:|---|
//! | GPU Device | 10 | here, `device_*` |
//! | GPU Managed | 7 | here, `managed_*`: on the host driver, whose memory the host can read |
//! | CPU Pinned | 8 | `src/device/pinned/tests/cu_arena.rs`, for page-locked memory |
//! | CPU Pageable | 7 | the same tests, for pageable memory |
//! | Constructor combinations | 4 | here, `combination_*` |
//! | Stable | 6 | `cuarena/regions.rs`, `stable_*` |
//! | Bins | 4 | `cuarena/regions.rs`, `bins_*` |
//! | Compact | 4 | `cuarena/compact.rs`, `compact_*` |
//! | Mixed | 3 | `mixed_*`: 2 in `cuarena/regions.rs`, 1 in `cuarena/compact.rs` |
//!
//! Here are 21 of them, 12 in `regions`, 5 in `compact`. A pool of theirs is an arena with a limit
//! and as many addresses a region; "null" is no block at all. Where ours is meant to do otherwise,
//! the test says so.
//!
//! Invariant: a figure that theirs compare is compared exactly, or more strictly.

use std::sync::Arc;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::SystemClock;
use lowtide_gpu::driver::{Backend, DeviceAddress};
use lowtide_gpu::{
    ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, HostDriver, PinnedConfig, PinnedKind,
    PinnedPool, Region,
};

mod compact;
mod regions;

use super::{GRANULE, assert_apart, assert_usable, config, headroom, open_with, pool, raw};

const MIB_64: ByteSize = ByteSize::mib(64);

fn bytes(arena: &DeviceArena, size: ByteSize) -> Buffer<u8> {
    arena.alloc(size.as_usize().expect("small"), Region::Dynamic).expect("room")
}

/// GPU Device 1: create and destroy.
#[test]
fn device_a_pool_has_its_capacity_and_after_closing_nothing() {
    let arena = pool(ByteSize::mib(256));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.limit, snapshot.live), (ByteSize::mib(256), ByteSize::ZERO));
    drop(bytes(&arena, ByteSize::mib(256)));
    arena.close().expect("nothing is live");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.live), Default::default());
    let refused = arena.alloc::<u8>(1, Region::Dynamic).expect_err("closed");
    assert_eq!(refused, DeviceError::Closed { arena: "peers".to_owned() });
    assert_eq!(arena.close(), Ok(()), "as often as one likes");
}

/// GPU Device 2: allocate and deallocate.
#[test]
fn device_live_is_above_zero_while_a_block_is_held_and_zero_after() {
    let arena = pool(MIB_64);
    let buffer: Buffer<f32> = arena.alloc(1024, Region::Dynamic).expect("room");
    assert_eq!(arena.snapshot().live, ByteSize::kib(4));
    drop(buffer);
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    assert_usable(&arena);
}

/// GPU Device 3: available tracks capacity.
#[test]
fn device_headroom_falls_by_a_block_and_comes_back_with_it() {
    let arena = pool(MIB_64);
    let before = headroom(&arena.snapshot());
    assert_eq!(before, MIB_64);
    let buffer = bytes(&arena, ByteSize::mib(3));
    assert_eq!(headroom(&arena.snapshot()), ByteSize::mib(61));
    drop(buffer);
    assert_eq!(headroom(&arena.snapshot()), before);
    assert_usable(&arena);
}

/// GPU Device 4: resize a buffer from 1024 to 4096.
#[test]
fn device_a_buffer_grows_from_1024_to_4096_elements() {
    let arena = pool(MIB_64);
    let mut buffer: Buffer<f32> = arena.alloc(1024, Region::Dynamic).expect("room");
    buffer.resize(4096).expect("room");
    assert_eq!((buffer.len(), arena.snapshot().live), (4096, ByteSize::kib(16)));
    drop(buffer);
    assert_usable(&arena);
}

/// GPU Device 5: resize to zero.
#[test]
fn device_a_buffer_of_no_elements_holds_no_block() {
    let arena = pool(MIB_64);
    let mut buffer: Buffer<f32> = arena.alloc(1024, Region::Dynamic).expect("room");
    buffer.resize(0).expect("less");
    assert!(buffer.is_empty());
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    buffer.resize(1024).expect("room");
    assert_eq!(arena.snapshot().live, ByteSize::kib(4));
    drop(buffer);
    assert_usable(&arena);
}

/// GPU Device 6: resize bails out when the buffer is large enough. Ours does not move either, and
/// gives back what is cut off.
#[test]
fn device_a_buffer_that_shrinks_stays_where_it_is_and_frees_the_rest() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let mut buffer: Buffer<f32> = arena.alloc(4096, Region::Dynamic).expect("room");
    let at = buffer.slice(&lease).expect("own lease").as_ptr();
    buffer.resize(1024).expect("less");
    assert_eq!(buffer.slice(&lease).expect("own lease").as_ptr(), at);
    assert_eq!(arena.snapshot().live, ByteSize::kib(4));
    drop(buffer);
    assert_usable(&arena);
}

/// GPU Device 7: coalescing reclaims a block.
#[test]
fn device_two_freed_neighbours_are_one_block_of_both_sizes() {
    let arena = pool(MIB_64);
    let two = [(); 2].map(|()| raw(&arena, ByteSize::kib(4), Region::Dynamic).expect("room"));
    let live = arena.snapshot().live;
    for block in two {
        arena.free(block.at).expect("live");
    }
    let one = raw(&arena, ByteSize::kib(8), Region::Dynamic).expect("room");
    assert_eq!(one.at, two[0].at.min(two[1].at), "in the room of both");
    assert_eq!(arena.snapshot().live, live);
    arena.free(one.at).expect("live");
    assert_usable(&arena);
}

/// GPU Device 8: pool exhaustion throws (4 MiB pool, 32 MiB).
#[test]
fn device_more_than_the_pool_is_a_typed_error_with_its_numbers() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(4), ..config() });
    let refused = arena.alloc::<u8>(32 << 20, Region::Dynamic).expect_err("4 MiB");
    let expected = DeviceError::OutOfMemory {
        arena: arena.name().into(),
        requested: ByteSize::mib(32),
        live: ByteSize::ZERO,
        active: ByteSize::ZERO,
        committed: ByteSize::ZERO,
        limit: ByteSize::mib(4),
        bound: Bound::Limit,
        holes: ByteSize::ZERO,
        largest_free: ByteSize::ZERO,
        recoverable: ByteSize::ZERO,
    };
    assert_eq!(refused, expected);
    assert_usable(&arena);
}

/// GPU Device 9: reset invalidates everything.
#[test]
fn device_reset_frees_every_block_and_the_whole_pool_is_to_be_had() {
    let arena = pool(MIB_64);
    let blocks =
        [1, 2, 5].map(|count| raw(&arena, ByteSize::mib(count), Region::Dynamic).expect("room"));
    assert_eq!(arena.reset(), Ok(ByteSize::mib(8)));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, headroom(&snapshot)), (ByteSize::ZERO, MIB_64));
    for block in blocks {
        assert_eq!(arena.free(block.at), Err(DeviceError::NotLive { at: block.at }));
    }
    let whole = raw(&arena, MIB_64, Region::Dynamic).expect("all of it");
    arena.free(whole.at).expect("live");
    assert_usable(&arena);
}

/// GPU Device 10: the guard for null and zero.
#[test]
fn device_nothing_takes_no_block_and_freeing_nothing_is_no_act() {
    let arena = pool(MIB_64);
    drop(arena.alloc::<f32>(0, Region::Dynamic).expect("nothing is needed"));
    assert_eq!(raw(&arena, ByteSize::ZERO, Region::Dynamic), Err(DeviceError::ZeroSize));
    // An address is never optional here: the null one is just none of ours.
    let null = DeviceAddress::new(0);
    let foreign = DeviceError::ForeignAddress { at: null, arena: "peers".to_owned() };
    assert_eq!(arena.free(null), Err(foreign));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.committed), (0, ByteSize::ZERO));
    assert_usable(&arena);
}

/// GPU Managed 1: create and destroy, and the type.
#[test]
fn managed_the_arena_says_that_the_host_reads_and_writes_its_memory() {
    let arena = pool(MIB_64);
    let can = arena.capabilities();
    assert_eq!((arena.backend(), can.host_access, can.host_backed), (Backend::Host, true, true));
    arena.close().expect("nothing is live");
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
}

/// GPU Managed 2: allocate and deallocate.
#[test]
fn managed_a_block_that_was_written_is_freed_as_any_other() {
    let arena = pool(MIB_64);
    let buffer = arena.alloc_from(&[1_u32; 1024], Region::Dynamic).expect("room");
    assert_eq!(arena.snapshot().live, ByteSize::kib(4));
    drop(buffer);
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    assert_usable(&arena);
}

/// GPU Managed 3: the host reads and writes 4 integers.
#[test]
fn managed_the_host_reads_what_it_wrote() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let mut buffer: Buffer<i32> = arena.alloc(4, Region::Dynamic).expect("room");
    buffer.slice_mut(&lease).expect("own lease").copy_from_slice(&[10, 20, 30, 40]);
    assert_eq!(buffer.slice(&lease), Ok(&[10, 20, 30, 40][..]));
    drop(buffer);
    assert_usable(&arena);
}

/// GPU Managed 4: resize from 1024 to 8192. Theirs loses the contents; ours keeps them.
#[test]
fn managed_a_buffer_that_grows_from_1024_to_8192_keeps_what_it_held() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let data: Vec<u32> = (0..1024).collect();
    let mut buffer = arena.alloc_from(&data, Region::Dynamic).expect("room");
    let wall = arena.alloc_from(&[0_u32; 64], Region::Dynamic).expect("room");
    buffer.resize(8192).expect("room");
    assert_eq!(buffer.len(), 8192);
    assert_eq!(buffer.slice(&lease).expect("own lease")[..1024], data);
    drop((buffer, wall));
    assert_usable(&arena);
}

/// GPU Managed 5: coalescing.
#[test]
fn managed_the_room_of_two_freed_neighbours_is_written_as_one() {
    let arena = pool(ByteSize::mib(4));
    let lease = arena.enter().expect("awake");
    let two = [1_u8, 2]
        .map(|value| arena.alloc_from(&vec![value; 2 << 20], Region::Dynamic).expect("room"));
    let start = two.iter().map(|one| one.slice(&lease).expect("own lease").as_ptr()).min();
    drop(two);
    let mut one = bytes(&arena, ByteSize::mib(4));
    one.slice_mut(&lease).expect("own lease").fill(3);
    let elements = one.slice(&lease).expect("own lease");
    assert_eq!(Some(elements.as_ptr()), start);
    assert!(elements.iter().all(|&element| element == 3));
    drop(one);
    assert_usable(&arena);
}

/// GPU Managed 6: exhaustion.
#[test]
fn managed_contents_are_untouched_by_a_request_that_is_refused() {
    let arena = pool(ByteSize::mib(4));
    let lease = arena.enter().expect("awake");
    let held = arena.alloc_from(&[9_u64; 1024], Region::Dynamic).expect("room");
    let refused = arena.alloc::<u8>(4 << 20, Region::Dynamic).expect_err("4 MiB less the held");
    assert!(refused.is_out_of_memory(), "{refused}");
    assert_eq!(held.slice(&lease), Ok(&[9_u64; 1024][..]));
    drop(held);
    assert_usable(&arena);
}

/// GPU Managed 7: reset. Ours leaves buffers alone: somebody still holds them.
#[test]
fn managed_reset_frees_what_was_had_by_address_and_no_buffer() {
    let arena = pool(MIB_64);
    let lease = arena.enter().expect("awake");
    let held = arena.alloc_from(&[5_u8; 300], Region::Dynamic).expect("room");
    raw(&arena, ByteSize::mib(4), Region::Dynamic).expect("room");
    assert_eq!(arena.reset(), Ok(ByteSize::mib(4)));
    assert_eq!(arena.snapshot().live, ByteSize::new(512));
    assert_eq!(held.slice(&lease), Ok(&[5_u8; 300][..]));
    drop(held);
    assert_usable(&arena);
}

/// An arena beside another, and a pool of host memory: each with its own limit and blocks.
fn combination(limits: [ByteSize; 2], kind: PinnedKind) -> [DeviceArena; 2] {
    let arenas = limits.map(pool);
    for (arena, limit) in arenas.iter().zip(limits) {
        assert_eq!(arena.snapshot().limit, limit);
        assert!(headroom(&arena.snapshot()) > ByteSize::ZERO);
    }
    let config = PinnedConfig { limit: GRANULE, kind, ..PinnedConfig::new("beside") };
    let host = PinnedPool::open(Arc::new(HostDriver::new()), Arc::new(SystemClock::new()), config);
    let host = host.expect("every machine");
    assert_eq!((host.kind(), host.limit()), (kind, GRANULE));
    let blocks = arenas.each_ref().map(|arena| raw(arena, GRANULE, Region::Dynamic).expect("room"));
    assert_apart(blocks);
    assert_eq!(host.glance().live, ByteSize::ZERO, "device blocks are none of the pool's");
    for (arena, block) in arenas.iter().zip(blocks.iter().rev()) {
        let foreign = DeviceError::ForeignAddress { at: block.at, arena: "peers".to_owned() };
        assert_eq!(arena.free(block.at), Err(foreign), "a block of the other arena");
        assert_eq!(arena.snapshot().live, GRANULE);
    }
    for (arena, block) in arenas.iter().zip(blocks) {
        arena.free(block.at).expect("its own");
        assert_usable(arena);
    }
    host.close().expect("nothing is live");
    arenas
}

/// Constructor 1: device and pinned.
#[test]
fn combination_of_two_equal_arenas_and_a_page_locked_pool_shares_nothing() {
    combination([MIB_64; 2], PinnedKind::PageLocked);
}

/// Constructor 2: device and pageable.
#[test]
fn combination_of_a_large_and_a_small_arena_and_a_pageable_pool_keeps_all_limits() {
    combination([ByteSize::mib(256), ByteSize::mib(4)], PinnedKind::Pageable);
}

/// Constructor 3: managed and pinned.
#[test]
fn combination_of_a_small_and_a_large_arena_and_a_page_locked_pool_keeps_all_limits() {
    combination([ByteSize::mib(4), ByteSize::mib(256)], PinnedKind::PageLocked);
}

/// Constructor 4: managed and pageable.
#[test]
fn combination_in_which_one_arena_is_full_leaves_the_other_its_memory() {
    let arenas = combination([ByteSize::mib(4), MIB_64], PinnedKind::Pageable);
    let full = bytes(&arenas[0], ByteSize::mib(4));
    assert!(arenas[0].alloc::<u8>(1, Region::Dynamic).is_err());
    drop(bytes(&arenas[1], MIB_64));
    drop(full);
    arenas.iter().for_each(assert_usable);
}
