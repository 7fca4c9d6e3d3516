//! The gain of a compaction as a refusal reports it, and the text of that report.

use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{ArenaConfig, Bound, CompactOptions, DeviceArena, DeviceError, Region};

use super::remap::lane_of;
use super::{Chance, DYNAMIC, config, device, mib, on_device, on_host};

fn recoverable(error: &DeviceError) -> ByteSize {
    match *error {
        DeviceError::OutOfMemory { recoverable, holes, .. } => {
            assert!(recoverable <= holes, "{error}");
            recoverable
        }
        _ => panic!("{error}"),
    }
}

/// Compacts until nothing is to be gained.
fn compact(arena: &DeviceArena, contiguous: Option<ByteSize>) {
    for region in Region::ALL {
        let options = CompactOptions { contiguous, ..CompactOptions::new(region) };
        while arena.compact(options, |_| {}).expect("no error").moves > 0 {}
    }
}

#[test]
fn an_error_says_what_a_compaction_recovers_and_it_recovers_that() {
    for seed in 0..20 {
        println!("seed {seed}");
        let (arena, mut chance) = (on_host(ByteSize::mib(64)), Chance(seed));
        let mut held = Vec::new();
        while let Ok(buffer) = arena.alloc::<u8>(chance.index(3 << 20) + 1, DYNAMIC) {
            held.push(buffer);
            if chance.below(3) == 0 {
                let small = chance.index(500 << 10) + 1;
                held.extend(arena.alloc::<u8>(small, Region::Stable));
            }
        }
        held.retain(|_| chance.below(3) == 0);
        arena.purge().expect("no error");
        let refused = mib(&arena, 64).expect_err("some of it is taken");
        let (before, gain) = (arena.snapshot(), recoverable(&refused));
        compact(&arena, None);
        let gained = before.active.saturating_sub(arena.snapshot().active);
        println!("{} active, {gain} said to be recoverable, {gained} recovered", before.active);
        assert!(gained >= gain, "{refused}: {gained}");
        assert!(gained.get() <= 2 * gain.get() + (8 << 20), "{refused}: {gained}");
        arena.validate();
    }
}

#[test]
fn a_block_that_a_compaction_would_make_room_for_is_refused_with_that_and_fits_after_it() {
    let arena = on_host(ByteSize::mib(32));
    let mut held: Vec<_> =
        (0..31).map(|_| arena.alloc::<u8>(1 << 20, DYNAMIC).expect("room")).collect();
    let mut nth = 0;
    held.retain(|_| {
        nth += 1;
        nth % 2 == 0
    });
    let refused = mib(&arena, 12).expect_err("each granule has a block");
    assert!(recoverable(&refused) >= ByteSize::mib(12), "{refused}");
    compact(&arena, None);
    mib(&arena, 12).expect("as it said");
}

#[test]
fn addresses_that_a_compaction_would_join_are_said_as_well() {
    let short = ArenaConfig { reserve: ByteSize::mib(32), ..config(ByteSize::MAX) };
    let arena = on_device(&device(|_| {}), short);
    let mut held: Vec<_> = (0..8).map(|_| mib(&arena, 4).expect("room")).collect();
    let mut nth = 0;
    held.retain(|_| {
        nth += 1;
        nth % 2 == 0
    });
    let refused = mib(&arena, 10).expect_err("gaps of 4 MiB");
    let DeviceError::OutOfAddresses { largest_span, compacted_span, .. } = refused else {
        panic!("{refused}")
    };
    assert_eq!(largest_span, ByteSize::mib(4));
    assert!(compacted_span >= ByteSize::mib(10), "{refused}");
    assert!(refused.to_string().contains(&format!("{compacted_span} or more")), "{refused}");
    compact(&arena, Some(ByteSize::mib(10)));
    mib(&arena, 10).expect("as it said");
}

#[test]
fn pinned_blocks_and_those_had_by_address_are_not_counted_on() {
    let arena = on_host(ByteSize::mib(16));
    let blocks: Vec<_> = (0..8)
        .map(|_| {
            let at = arena.alloc_raw(ByteSize::mib(1), ByteSize::mib(2), DYNAMIC).expect("room");
            (at, arena.alloc::<u8>(1 << 20, DYNAMIC).expect("room"))
        })
        .collect();
    let (raw, buffers): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
    drop(buffers);
    let refused = mib(&arena, 2).expect_err("eight raw blocks");
    assert_eq!(recoverable(&refused), ByteSize::ZERO);
    arena.reset().expect("here");
    drop(raw);
}

/// The bug: where only the device said no, the error told of a limit of 16 EiB.
#[test]
fn an_error_of_the_device_named_a_limit_that_is_none() {
    let sim = device(|options| options.capacity = ByteSize::mib(8));
    for limit in [ByteSize::MAX, ByteSize::gib(1)] {
        let arena = on_device(&sim, config(limit));
        let kept = mib(&arena, 4).expect("room");
        let refused = mib(&arena, 6).expect_err("the device has 8 MiB");
        let DeviceError::OutOfMemory { bound, limit: said, .. } = refused else {
            panic!("{refused}")
        };
        assert_eq!((bound, said), (Bound::Driver, limit));
        assert_eq!(
            refused.to_string(),
            format!(
                "cannot allocate 6.0 MiB in arena {:?}: the driver is out of memory, 4.0 MiB \
                 committed, 4.0 MiB live, 0 B free between live blocks, largest free span at \
                 least 0 B",
                arena.name()
            )
        );
        drop(kept);
    }
    let arena = on_host(ByteSize::mib(2));
    let refused = mib(&arena, 6).expect_err("the limit");
    assert!(refused.to_string().contains("limit 2.0 MiB, 0 B committed"), "{refused}");
}

/// The bug: a search looks into a few bins, and where it found places there that needed memory it
/// never came to a larger hole that has some.
#[test]
fn a_hole_with_memory_was_passed_over_for_spans_that_had_none_and_the_block_refused() {
    let arena = on_device(&device(|_| {}), config(ByteSize::mib(128)));
    let kib = |kib: usize| arena.alloc::<u8>(kib << 10, DYNAMIC).expect("room");
    let (mut bare, mut walls) = (Vec::new(), Vec::new());
    for (span, wall) in [(3072, 1024), (3328, 2816), (3456, 2688), (3584, 2560)] {
        bare.push(kib(span)); // from granule to granule, and into the next
        walls.push(kib(wall));
    }
    // It begins and ends within granules that its neighbours keep.
    let (below, hole, above) = (kib(2112), kib(3968), kib(1088));
    drop((bare, hole));
    arena.purge().expect("no error");
    arena.set_limit(arena.snapshot().committed);
    let found = mib(&arena, 3).expect("there is a hole with memory");
    assert_eq!(arena.snapshot().committed, arena.limit());
    drop((walls, below, above, found));
    arena.validate();
}

#[test]
fn the_longest_free_span_is_that_of_both_regions() {
    for (roomy, other) in [(Region::Stable, DYNAMIC), (DYNAMIC, Region::Stable)] {
        let arena = on_host(ByteSize::mib(16));
        let block = |size: usize, region| arena.alloc::<u8>(size << 20, region).expect("room");
        let (large, stays, small, stays_too) =
            (block(4, roomy), block(4, roomy), block(2, other), block(4, other));
        drop((large, small));
        let refused = mib(&arena, 12).expect_err("half of it is taken");
        let DeviceError::OutOfMemory { largest_free, holes, .. } = refused else {
            panic!("{refused}");
        };
        assert_eq!((largest_free, holes), (ByteSize::mib(4), ByteSize::ZERO));
        drop((stays, stays_too));
    }
}

/// Freed memory that may still be in use is no hole, and nothing moves there.
#[test]
fn what_is_pending_is_neither_a_hole_nor_recoverable() {
    let sim = device(|_| {});
    let arena = on_device(&sim, config(ByteSize::mib(8)));
    let stream = sim.stream_create().expect("a stream");
    let lane = lane_of(&arena, stream);
    let mut blocks: Vec<_> =
        (0..8).map(|_| lane.alloc::<u8>(1 << 20, DYNAMIC).expect("room")).collect();
    // One in four stays, so that a compaction would clear granules if it might.
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 4 == 0
    });
    sim.begin_capture(stream).expect("nothing captures");
    let refused = mib(&arena, 4).expect_err("nothing may be waited for");
    let DeviceError::OutOfMemory { holes, recoverable, live, active, .. } = refused else {
        panic!("{refused}");
    };
    assert_eq!((live, active), (ByteSize::mib(2), ByteSize::mib(8)));
    assert_eq!((holes, recoverable), (ByteSize::ZERO, ByteSize::ZERO));
    let graph = sim.end_capture(stream).expect("not spoiled");
    sim.graph_destroy(graph).expect("a graph");
    drop((blocks, lane));
    arena.validate();
}
