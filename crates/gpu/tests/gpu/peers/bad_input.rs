//! Invalid input: sizes, lengths, alignments and addresses that make no sense, and limits that
//! allow nothing.
//!
//! Invariant: each is a typed error with the numbers that explain it; nothing is lost, and the
//! arena works on.

use std::thread;

use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::DeviceAddress;
use lowtide_gpu::{ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, RawBlock, Region};

use super::{Chance, GRANULE, assert_usable, config, open_with, pool, raw};

const ELEMENT: ByteSize = ByteSize::new(8);

/// The text is one line that a person reads: the numbers with their units, and no debug output.
fn assert_readable(error: &DeviceError, parts: &[&str]) {
    let text = error.to_string();
    for part in parts {
        assert!(text.contains(part), "{part:?} is not in {text:?}");
    }
    let raw = ["ByteSize(", "DeviceAddress(", "Some(", "{", "\n"];
    assert!(raw.iter().all(|part| !text.contains(part)), "{text}");
}

#[test]
fn a_length_that_overflows_or_never_fits_is_refused_by_alloc_reserve_and_resize() {
    let arena = pool(ByteSize::mib(64));
    let mut held: Buffer<u64> = arena.alloc(1000, Region::Stable).expect("room");
    for len in [(8 << 20) + 1, usize::MAX / 8, usize::MAX / 8 + 1, 1 << 61, usize::MAX] {
        let expected = DeviceError::TooLarge { len, element: ELEMENT, largest: ByteSize::mib(64) };
        let alloc = arena.alloc::<u64>(len, Region::Dynamic).map(drop);
        let reserve = arena.reserve::<u64>(len, Region::Stable).map(drop);
        let resize = held.resize(len);
        for refused in [alloc, reserve, resize] {
            assert_eq!(refused, Err(expected.clone()));
        }
        assert_readable(&expected, &[&len.to_string(), "8 B", "64.0 MiB"]);
        assert_eq!((held.len(), arena.snapshot().live), (1000, ByteSize::new(8192)));
        arena.validate();
    }
    drop(held);
    assert_usable(&arena);
}

#[test]
fn no_bytes_are_no_block_for_a_buffer_and_an_error_for_an_address() {
    let arena = pool(ByteSize::mib(4));
    for region in Region::ALL {
        let mut buffer: Buffer<u64> = arena.alloc(0, region).expect("nothing is needed");
        buffer.resize(0).expect("nothing is needed");
        drop(arena.reserve::<u64>(0, region).expect("nothing is needed"));
        drop(arena.alloc_from::<u64>(&[], region).expect("nothing is needed"));
        assert_eq!(raw(&arena, ByteSize::ZERO, region), Err(DeviceError::ZeroSize));
    }
    assert_readable(&DeviceError::ZeroSize, &["0 B", "1 B"]);
    assert_eq!(arena.snapshot().allocs_total, 0);
    assert_usable(&arena);
}

#[test]
fn an_alignment_that_is_no_power_of_two_or_above_the_granule_is_refused() {
    let arena = pool(ByteSize::mib(64));
    for align in [0, 3, 257, 768, (2 << 20) + 1, 4 << 20, 1 << 63, u64::MAX] {
        let requested = ByteSize::new(align);
        let refused = arena.alloc_raw(ByteSize::kib(1), requested, Region::Dynamic);
        let expected = DeviceError::Alignment { requested, largest: GRANULE };
        assert_eq!(refused, Err(expected.clone()), "{align}");
        assert_readable(&expected, &["2.0 MiB"]);
    }
    for power in 0..=21 {
        let align = ByteSize::new(1 << power);
        let block = arena.alloc_raw(ByteSize::kib(1), align, Region::Dynamic).expect("possible");
        assert!(block.at.is_multiple_of(align), "{block} for {align}");
    }
    arena.reset().expect("here");
    assert_usable(&arena);
}

#[test]
fn a_limit_below_a_granule_allows_nothing_and_can_be_raised() {
    for limit in [0, 1, 255, (2 << 20) - 1].map(ByteSize::new) {
        let (arena, _) = open_with(ArenaConfig { limit, ..config() });
        let expected = DeviceError::OutOfMemory {
            arena: arena.name().into(),
            requested: ByteSize::new(256),
            live: ByteSize::ZERO,
            active: ByteSize::ZERO,
            committed: ByteSize::ZERO,
            limit,
            bound: Bound::Limit,
            holes: ByteSize::ZERO,
            largest_free: ByteSize::ZERO,
            recoverable: ByteSize::ZERO,
        };
        assert_eq!(raw(&arena, ByteSize::new(1), Region::Dynamic), Err(expected.clone()));
        assert_eq!(arena.alloc::<u8>(1, Region::Stable).map(drop), Err(expected.clone()));
        assert_eq!(
            arena.reserve::<u8>(1, Region::Stable).map(drop).map_err(|e| {
                matches!(e, DeviceError::OutOfMemory { requested, .. } if requested == GRANULE)
            }),
            Err(true)
        );
        assert_readable(&expected, &["256 B", &limit.to_string()]);
        assert_eq!(arena.snapshot().alloc_failures_limit_total, 3);
        arena.set_limit(GRANULE);
        assert_usable(&arena);
    }
}

/// The bug: the error named what was asked for and not the whole granules that found no place.
#[test]
fn a_reserved_block_without_addresses_was_said_to_be_smaller_than_the_largest_span() {
    let arena = pool(ByteSize::mib(4));
    // Each granule has something in it.
    let low = raw(&arena, ByteSize::mib(1), Region::Dynamic).expect("room");
    let high = arena.alloc_raw(ByteSize::kib(4), GRANULE, Region::Dynamic).expect("room");
    let blocks = [low, high];
    let refused = arena.reserve::<u8>(1, Region::Dynamic).expect_err("no whole granule is left");
    let expected = DeviceError::OutOfAddresses {
        requested: GRANULE,
        reserved: ByteSize::mib(4),
        live: ByteSize::kib(1028),
        largest_span: ByteSize::kib(2044),
        compacted_span: ByteSize::kib(2044),
    };
    assert_eq!(refused, expected);
    assert_readable(&refused, &["2.0 MiB", "4.0 MiB", "1.0 MiB", "2.0 MiB"]);
    blocks.map(|block| arena.free(block.at)).into_iter().for_each(|freed| assert!(freed.is_ok()));
    assert_usable(&arena);
}

#[test]
fn addresses_of_nobody_of_other_arenas_and_of_buffers_free_nothing() {
    let (arena, other) = (pool(ByteSize::mib(64)), pool(ByteSize::mib(64)));
    let foreign = raw(&other, ByteSize::kib(1), Region::Dynamic).expect("room");
    for at in [0, 1, u64::MAX, foreign.at.get()].map(DeviceAddress::new) {
        let expected = DeviceError::ForeignAddress { at, arena: "peers".to_owned() };
        assert_eq!(arena.free(at), Err(expected.clone()));
        assert_eq!(arena.raw_block(at), Err(expected.clone()));
        assert_readable(&expected, &[&at.to_string(), "peers"]);
    }
    let lease = arena.enter().expect("awake");
    let buffer = arena.alloc_from(&[1_u64; 100], Region::Dynamic).expect("room");
    let start = buffer.slice(&lease).expect("own lease").as_ptr().addr() as u64;
    let at = DeviceAddress::new(start);
    assert_eq!(arena.free(at), Err(DeviceError::NotLive { at }), "a buffer's");
    let inside = DeviceAddress::new(start + 8);
    let expected = DeviceError::InteriorAddress { at: inside, block: at, size: ByteSize::kib(1) };
    assert_eq!(arena.free(inside), Err(expected.clone()));
    assert_readable(&expected, &[&inside.to_string(), &at.to_string(), "1.0 KiB"]);
    assert_eq!(buffer.slice(&lease), Ok(&[1_u64; 100][..]));
    assert_eq!(other.free(foreign.at), Ok(foreign));
    drop(buffer);
    assert_usable(&arena);
    assert_usable(&other);
}

#[test]
fn a_block_is_freed_once_whatever_was_freed_around_it() {
    let arena = pool(ByteSize::mib(64));
    let blocks = [(); 5].map(|()| raw(&arena, ByteSize::kib(3), Region::Dynamic).expect("room"));
    for nth in [1, 3, 2, 0, 4] {
        assert_eq!(arena.free(blocks[nth].at), Ok(blocks[nth]));
        for block in blocks.iter().filter(|block| arena.raw_block(block.at).is_err()) {
            let at = block.at;
            let refused = arena.free(at).expect_err("freed before");
            assert_eq!(refused, DeviceError::NotLive { at });
            assert_readable(&refused, &[&at.to_string()]);
        }
        arena.validate();
    }
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (5, 5));
    assert_usable(&arena);
}

#[test]
fn an_address_from_before_a_reset_is_stale() {
    let arena = pool(ByteSize::mib(64));
    let block = raw(&arena, ByteSize::mib(3), Region::Stable).expect("room");
    arena.reset().expect("here");
    assert_eq!(arena.free(block.at), Err(DeviceError::NotLive { at: block.at }));
    // The same room as parts of another block: the old address names nothing in it.
    let whole = raw(&arena, ByteSize::mib(60), Region::Stable).expect("room");
    let inside = whole.at.checked_add(ByteSize::mib(1)).expect("an address");
    let error = DeviceError::InteriorAddress { at: inside, block: whole.at, size: whole.size };
    assert_eq!(arena.free(inside), Err(error));
    arena.free(whole.at).expect("live");
    assert_usable(&arena);
}

#[test]
fn a_closed_arena_refuses_everything_that_takes_and_nothing_that_gives_back() {
    let arena = pool(ByteSize::mib(64));
    let block = raw(&arena, ByteSize::mib(3), Region::Dynamic).expect("room");
    let mut empty: Buffer<u8> = arena.alloc(0, Region::Dynamic).expect("nothing is needed");
    let (count, bytes) = (1, ByteSize::mib(3));
    let live = DeviceError::LiveBlocks { arena: "peers".to_owned(), count, bytes };
    assert_eq!(arena.close(), Err(live.clone()));
    assert_readable(&live, &["1 ", "3.0 MiB", "peers"]);
    assert_usable(&arena);
    arena.free(block.at).expect("live");
    arena.close().expect("nothing is live");
    let closed = DeviceError::Closed { arena: "peers".to_owned() };
    assert_eq!(arena.alloc::<u8>(1, Region::Stable).map(drop), Err(closed.clone()));
    assert_eq!(arena.reserve::<u8>(1, Region::Stable).map(drop), Err(closed.clone()));
    assert_eq!(raw(&arena, ByteSize::new(1), Region::Stable), Err(closed.clone()));
    assert_eq!(arena.enter().map(drop), Err(closed.clone()));
    assert_eq!(empty.resize(10), Err(closed));
    assert_eq!(arena.free(block.at), Err(DeviceError::NotLive { at: block.at }));
    for given in [arena.purge(), arena.shrink(), arena.reset()] {
        assert_eq!(given, Ok(ByteSize::ZERO));
    }
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    arena.validate();
}

/// Nonsense of every kind, at random.
fn nonsense(arena: &DeviceArena, chance: &mut Chance, own: &RawBlock) {
    let refused = match chance.below(6) {
        0 => raw(arena, ByteSize::ZERO, chance.region()).map(drop),
        1 => arena.alloc::<u64>(usize::MAX >> chance.below(6), chance.region()).map(drop),
        2 => arena.alloc_raw(GRANULE, ByteSize::new(3 << chance.below(40)), own.region).map(drop),
        3 => {
            let inside = ByteSize::of(1 + chance.below(1000));
            arena.free(own.at.checked_add(inside).expect("an address")).map(drop)
        }
        4 => arena.free(DeviceAddress::new(chance.below(4096) as u64)).map(drop),
        _ => arena.reserve::<u8>(65 << 20, chance.region()).map(drop),
    };
    assert!(refused.is_err(), "nonsense was accepted");
}

#[test]
fn nonsense_from_many_threads_harms_no_block_of_any() {
    let arena = pool(ByteSize::mib(64));
    let worker = |number: u64| {
        let arena = arena.clone();
        move || {
            let mut chance = Chance::new(0xA076_1D64_78BD_642F ^ (number << 40));
            for _ in 0..300 {
                let region = chance.region();
                let own = raw(&arena, ByteSize::kib(1), region).expect("room");
                nonsense(&arena, &mut chance, &own);
                assert_eq!(arena.raw_block(own.at), Ok(own));
                assert_eq!(arena.free(own.at), Ok(own));
            }
        }
    };
    let threads: Vec<_> = (1..=4).map(|number| thread::spawn(worker(number))).collect();
    threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (1200, 1200));
    assert_eq!((snapshot.live, snapshot.requested), Default::default());
    assert_usable(&arena);
}

/// A block that several threads free at once is freed once.
#[test]
fn of_many_threads_that_free_one_block_one_does() {
    let arena = pool(ByteSize::mib(64));
    for _ in 0..50 {
        let block = raw(&arena, ByteSize::kib(1), Region::Dynamic).expect("room");
        let frees: Vec<_> = (0..4)
            .map(|_| {
                let arena = arena.clone();
                thread::spawn(move || arena.free(block.at))
            })
            .collect();
        let outcomes: Vec<_> =
            frees.into_iter().map(|thread| thread.join().expect("no panic")).collect();
        let (freed, refused): (Vec<_>, Vec<_>) = outcomes.into_iter().partition(Result::is_ok);
        assert_eq!((freed.len(), refused.len()), (1, 3));
        let not_live = DeviceError::NotLive { at: block.at };
        assert!(refused.iter().all(|error| *error == Err(not_live.clone())), "{refused:?}");
    }
    assert_usable(&arena);
}
