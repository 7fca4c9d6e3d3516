//! The bugs of cuArena and of ONNX Runtime's BFC arena, one test for each that ours does not have.
//!
//! Elsewhere: what needs a watched driver (`crates/gpu/src/tests/peers.rs`: a pool that could not
//! be opened, a destructor that fails, the lock across driver calls), cuArena's bugs 2 and 5
//! (`crates/gpu/src/tests/compact.rs` and `compact/concurrent.rs`), and blocks without a stream
//! that are handed to any (`crates/gpu/tests/gpu/streams/bugs.rs`).
//!
//! Invariant: a test is named after what must not happen any more, as a claim that it does not.

use std::thread;

use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::DeviceAddress;
use lowtide_gpu::{ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, Growth, Region};

use super::{GRANULE, assert_apart, assert_usable, config, open_with, pool, raw};

fn open(limit: ByteSize) -> DeviceArena {
    open_with(ArenaConfig { limit, reserve: ByteSize::gib(16), ..config() }).0
}

/// cuArena 1: 64 MiB, 40 allocated and freed, 50 wanted: "out of memory" with nothing used.
#[test]
fn an_empty_pool_is_whole_again() {
    for region in Region::ALL {
        let arena = pool(ByteSize::mib(64));
        for size in [40, 50, 64, 30, 64].map(ByteSize::mib) {
            let block = raw(&arena, size, region).expect("the pool is empty");
            arena.free(block.at).expect("live");
        }
        assert_usable(&arena);
    }
}

/// cuArena 3: a count times a size that wraps gave 128 bytes, and a size near the largest number
/// a block of none, whose address the next one had as well.
#[test]
fn a_count_times_a_size_that_overflows_is_refused() {
    let arena = pool(ByteSize::mib(64));
    let largest = ByteSize::mib(64);
    for len in [(1 << 62) + 1, 1 << 62, usize::MAX / 4 + 1, usize::MAX] {
        let refused = arena.alloc::<f32>(len, Region::Dynamic).expect_err("wraps");
        assert_eq!(refused, DeviceError::TooLarge { len, element: ByteSize::new(4), largest });
    }
    for len in [usize::MAX, usize::MAX - 127, usize::MAX - 255, usize::MAX - 256] {
        let refused = arena.alloc::<u8>(len, Region::Dynamic).expect_err("more than all");
        assert_eq!(refused, DeviceError::TooLarge { len, element: ByteSize::new(1), largest });
        let refused = raw(&arena, ByteSize::of(len), Region::Dynamic);
        assert!(matches!(refused, Err(DeviceError::TooLarge { .. })), "{refused:?}");
    }
    let two = [(); 2].map(|()| raw(&arena, ByteSize::new(1), Region::Dynamic).expect("room"));
    assert_apart(two);
    assert_eq!(arena.snapshot().alloc_failures_addresses_total, 12);
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// cuArena 4: resize dropped the contents when it grew, and lost the block when it could not.
#[test]
fn a_resize_keeps_the_contents_and_on_failure_the_block() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(8), ..config() });
    let lease = arena.enter().expect("awake");
    let data: Vec<u32> = (0..1 << 20).collect();
    let mut buffer = arena.alloc_from(&data[..1 << 19], Region::Dynamic).expect("2 MiB");
    buffer.resize(1 << 20).expect("4 MiB of 8");
    buffer.slice_mut(&lease).expect("own lease").copy_from_slice(&data);
    for (len, wanted) in [(3 << 20, 12), (2 << 20 | 1, 9)] {
        let refused = buffer.resize(len).expect_err("more than 8 MiB");
        assert!(refused.is_out_of_memory(), "{wanted} MiB: {refused}");
        assert_eq!(buffer.len(), 1 << 20);
        assert_eq!(buffer.slice(&lease), Ok(&data[..]));
        arena.validate();
    }
    drop(buffer);
    assert_usable(&arena);
}

/// cuArena 7: a pool size that is no multiple of its alignment; the peak said nothing after reset.
#[test]
fn a_limit_of_no_whole_granules_is_kept_and_the_peak_outlives_a_reset() {
    let limit = ByteSize::new((5 << 20) + 1);
    let (arena, _) = open_with(ArenaConfig { limit, ..config() });
    let held = raw(&arena, ByteSize::mib(4), Region::Dynamic).expect("two granules");
    let refused = raw(&arena, ByteSize::new(1), Region::Dynamic).expect_err("the third passes it");
    assert!(matches!(refused, DeviceError::OutOfMemory { limit: at, .. } if at == limit));
    arena.free(held.at).expect("live");
    raw(&arena, ByteSize::mib(1), Region::Stable).expect("room");
    arena.reset().expect("here");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, snapshot.live_peak), (ByteSize::ZERO, ByteSize::mib(4)));
    assert!(snapshot.committed_peak <= limit, "{}", snapshot.committed_peak);
    assert_usable(&arena);
}

/// ORT 1: `Reserve` did not look at the limit, and past it what was left wrapped: 64 MiB out of 1.
#[test]
fn a_reserved_block_cannot_pass_the_limit_nor_make_it_wrap() {
    let arena = open(ByteSize::mib(8));
    let refused = arena.reserve::<u8>(16 << 20, Region::Stable).expect_err("8 MiB");
    let expected = DeviceError::OutOfMemory {
        arena: arena.name().into(),
        requested: ByteSize::mib(16),
        live: ByteSize::ZERO,
        active: ByteSize::ZERO,
        committed: ByteSize::ZERO,
        limit: ByteSize::mib(8),
        bound: Bound::Limit,
        holes: ByteSize::ZERO,
        largest_free: ByteSize::ZERO,
        recoverable: ByteSize::ZERO,
    };
    assert_eq!(refused, expected);
    let reserved: Buffer<u8> = arena.reserve(6 << 20, Region::Stable).expect("room");
    assert!(arena.alloc::<u8>(3 << 20, Region::Dynamic).is_err());
    // Below what is committed: nothing is left, and not nearly everything.
    arena.set_limit(ByteSize::mib(1));
    for size in [1, 64 << 20] {
        assert!(arena.alloc::<u8>(size, Region::Dynamic).is_err());
    }
    assert_eq!(arena.snapshot().committed, ByteSize::mib(6));
    arena.set_limit(ByteSize::mib(8));
    drop(reserved);
    assert_usable(&arena);
}

/// ORT 2: an address within a block was freed without a word.
#[test]
fn an_address_within_a_block_frees_nothing() {
    let arena = pool(ByteSize::mib(64));
    let block = raw(&arena, ByteSize::mib(1), Region::Dynamic).expect("room");
    for inside in [1, 128, 255, 256, 4096, (1 << 20) - 1] {
        let at = block.at.checked_add(ByteSize::new(inside)).expect("an address");
        let expected = DeviceError::InteriorAddress { at, block: block.at, size: block.size };
        assert_eq!(arena.free(at), Err(expected.clone()), "{inside}");
        assert_eq!(arena.raw_block(at), Err(expected));
    }
    let after = block.at.checked_add(block.size).expect("an address");
    assert_eq!(arena.free(after), Err(DeviceError::NotLive { at: after }));
    assert_eq!(arena.snapshot().live, block.size);
    assert_eq!(arena.free(block.at), Ok(block));
    assert_eq!(arena.free(block.at), Err(DeviceError::NotLive { at: block.at }));
    assert_usable(&arena);
}

/// ORT 4: five runs on five streams, or threads, took five times the memory.
#[test]
fn runs_from_fresh_threads_take_no_more_memory_than_from_one() {
    let arena = open(ByteSize::MAX);
    let run = |arena: &DeviceArena| {
        let parts = [60_u64, 30, 10, 1]
            .map(|count| raw(arena, ByteSize::mib(count), Region::Dynamic).expect("room"));
        for part in parts {
            arena.free(part.at).expect("live");
        }
        for _ in 0..8 {
            drop(arena.alloc::<u8>(5 << 20, Region::Dynamic).expect("room"));
        }
    };
    run(&arena);
    let committed = arena.snapshot().committed;
    for _ in 0..40 {
        let arena = arena.clone();
        thread::spawn(move || run(&arena)).join().expect("no panic");
    }
    // What the fronts of other threads keep is out of reach until memory is short: 16 MiB each.
    let snapshot = arena.snapshot();
    let fronts = snapshot.cached;
    assert!(snapshot.committed <= committed.saturating_add(fronts), "{snapshot:?}");
    assert_usable(&arena);
}

/// ORT 2.4: 8 bytes of books for every 256 of memory: 32 MiB written under the lock per GiB.
#[test]
fn the_books_grow_with_blocks_and_not_with_bytes() {
    let arena = open(ByteSize::MAX);
    let empty = arena.snapshot().metadata;
    let large = raw(&arena, ByteSize::gib(8), Region::Dynamic).expect("address space");
    let one = arena.snapshot().metadata.saturating_sub(empty);
    assert!(one <= ByteSize::kib(64), "{one} for 8 GiB, where 256 MiB would be an entry per 256 B");
    arena.free(large.at).expect("live");
    arena.purge().expect("the driver takes it");
    let before = arena.snapshot().metadata;
    let held: Vec<Buffer<u8>> =
        (0..10_000).map(|_| arena.alloc(1, Region::Dynamic).expect("room")).collect();
    let many = arena.snapshot().metadata.saturating_sub(before);
    assert!(many.get() <= 64 * 10_000, "{many} for 10,000 blocks");
    drop(held);
    assert_usable(&arena);
}

/// The bug: the first commit made entries for the whole other half of the addresses, 0.7 MiB a
/// region of 512 GiB, and each snapshot and each refusal looked at all of them under the lock.
#[test]
fn the_first_commit_took_books_for_half_of_all_addresses() {
    let (arena, _) = open_with(ArenaConfig::new("vast"));
    let before = arena.snapshot().metadata;
    for (size, region) in
        [(4 << 20, Region::Dynamic), (256, Region::Dynamic), (4 << 20, Region::Stable)]
    {
        drop(arena.alloc::<u8>(size, region).expect("room"));
        let grown = arena.snapshot().metadata.saturating_sub(before);
        assert!(grown < ByteSize::kib(64), "{grown} for {size} B");
    }
}

/// The bug: what an arena keeps of blocks that are had by address was not counted.
#[test]
fn the_table_of_addresses_was_no_metadata() {
    let arena = open(ByteSize::MAX);
    drop(arena.alloc::<u8>(2 << 20, Region::Dynamic).expect("room"));
    let before = arena.snapshot().metadata;
    for _ in 0..10_000 {
        raw(&arena, ByteSize::new(1), Region::Dynamic).expect("room");
    }
    let many = arena.snapshot().metadata.saturating_sub(before).get() / 10_000;
    // 40 of the index, and an address, a region, a name, a span, an address and a size in a tree.
    assert!((100..=192).contains(&many), "{many} B for each block");
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// ORT 2.3: the cap bounded automatic growth only: 1.1 GiB took 2 GiB, 300 MiB took 424.
#[test]
fn growth_that_a_request_forces_takes_what_is_needed() {
    for (count, cap) in [(1126, ByteSize::gib(1)), (300, ByteSize::mib(256))] {
        let growth = Growth::NextPowerOfTwo {
            initial: ByteSize::mib(1),
            after_shrink: ByteSize::mib(2),
            cap,
        };
        let reserve = ByteSize::gib(8);
        let (arena, _) =
            open_with(ArenaConfig { limit: ByteSize::MAX, reserve, growth, ..config() });
        let block = raw(&arena, ByteSize::mib(count), Region::Dynamic).expect("room");
        assert_eq!(arena.snapshot().committed, ByteSize::mib(count));
        arena.free(block.at).expect("live");
        assert_usable(&arena);
    }
}

/// ORT 2.3: one block of 256 bytes kept a region of 1 GiB; 4 of 200 blocks of 10 MiB kept 1.5 GiB.
#[test]
fn one_small_block_keeps_one_granule() {
    let arena = open(ByteSize::MAX);
    let blocks: Vec<_> =
        (0..200).map(|_| raw(&arena, ByteSize::mib(10), Region::Dynamic).expect("room")).collect();
    let small = raw(&arena, ByteSize::new(256), Region::Dynamic).expect("room");
    for (nth, block) in blocks.iter().enumerate() {
        if nth % 50 != 7 {
            arena.free(block.at).expect("live");
        }
    }
    arena.shrink().expect("the driver takes it");
    assert_eq!(arena.snapshot().committed, ByteSize::mib(42), "4 of 10 MiB, and a granule");
    for block in blocks.iter().skip(7).step_by(50) {
        arena.free(block.at).expect("live");
    }
    arena.shrink().expect("the driver takes it");
    assert_eq!(arena.snapshot().committed, GRANULE);
    arena.free(small.at).expect("live");
    assert_usable(&arena);
}

/// ORT 2.1: under `kNextPowerOfTwo` a shrink kept the first region for ever.
#[test]
fn a_shrink_of_an_empty_arena_leaves_nothing() {
    let growth = Growth::NextPowerOfTwo {
        initial: ByteSize::mib(32),
        after_shrink: ByteSize::mib(2),
        cap: ByteSize::gib(1),
    };
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::gib(1), growth, ..config() });
    for size in [1, 700, 90_000_000] {
        drop(arena.alloc::<u8>(size, Region::Dynamic).expect("room"));
    }
    assert!(arena.snapshot().committed > ByteSize::mib(90));
    arena.shrink().expect("the driver takes it");
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    assert_usable(&arena);
}

/// ORT issues 14474 and 14477: the second run needed more than the first.
#[test]
fn the_second_run_needs_no_more_than_the_first() {
    let arena = open(ByteSize::MAX);
    let sizes = [129_u64, 40, 200, 3, 77, 128, 1, 16].map(ByteSize::mib);
    let mut peaks = Vec::new();
    for _ in 0..6 {
        let mut held = Vec::new();
        for (nth, &size) in sizes.iter().enumerate() {
            held.push(raw(&arena, size, Region::Dynamic).expect("room").at);
            if nth % 3 == 2 {
                arena.free(held.remove(0)).expect("live");
            }
        }
        for at in held {
            arena.free(at).expect("live");
        }
        peaks.push(arena.snapshot().committed_peak);
    }
    // A granule more, where edges come to lie otherwise in what is committed already.
    assert!(peaks[5] <= peaks[0].saturating_add(GRANULE), "{peaks:?}");
    assert_eq!(peaks[1], peaks[5]);
    assert_usable(&arena);
}

/// ORT 2.3: no figures for failures by cause, for what is kept and not needed, for the largest
/// free block.
#[test]
fn the_figures_that_were_missing_are_there_and_right() {
    let (arena, _) = open_with(ArenaConfig { reserve: ByteSize::mib(256), ..config() });
    let block = raw(&arena, ByteSize::mib(20), Region::Dynamic).expect("room");
    let wall = raw(&arena, ByteSize::mib(2), Region::Dynamic).expect("room");
    arena.free(block.at).expect("live");
    assert!(raw(&arena, ByteSize::mib(65), Region::Dynamic).is_err());
    assert!(raw(&arena, ByteSize::mib(255), Region::Stable).is_err());
    assert!(raw(&arena, ByteSize::mib(257), Region::Dynamic).is_err());
    let snapshot = arena.snapshot();
    let by_reason = snapshot.alloc_failures();
    assert_eq!(by_reason, [("limit", 2), ("device", 0), ("addresses", 1), ("driver", 0)]);
    assert_eq!(snapshot.retained(), snapshot.committed.saturating_sub(ByteSize::mib(2)));
    assert_eq!(snapshot.largest_free, ByteSize::mib(20));
    assert_eq!(arena.free(wall.at), Ok(wall));
    let never = DeviceAddress::new(wall.at.get());
    assert_eq!(arena.free(never), Err(DeviceError::NotLive { at: never }));
    assert_usable(&arena);
}
