//! Granules larger than the driver's: fewer calls, books that add up, and no granule that is cut.

use std::sync::Arc;

use lowtide_cuda_sim::{Call, sample};
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver};

use super::{Chance, DYNAMIC, GRANULE, config, device, mib, on_device};

fn of(granule: Option<ByteSize>, limit: ByteSize) -> ArenaConfig {
    ArenaConfig { granule, ..config(limit) }
}

#[test]
fn calls_for_a_gibibyte_fall_as_the_granule_grows() {
    let mut falls = Vec::new();
    for granule in [2, 8, 32, 128].map(ByteSize::mib) {
        let sim = device(|options| options.handle_min = GRANULE);
        let arena = on_device(&sim, of(Some(granule), ByteSize::MAX));
        let blocks: Vec<_> = (0..512).map(|_| mib(&arena, 2).expect("room")).collect();
        let committing = sim.calls(Call::SetAccess);
        assert_eq!(sim.leaks().committed, ByteSize::gib(1));
        // Every other granule goes, so that no run of them is one call.
        let each = usize::try_from(granule.get() / GRANULE.get()).expect("small");
        let mut nth = 0;
        let rest: Vec<_> = blocks
            .into_iter()
            .filter(|_| {
                nth += 1;
                (nth - 1) / each % 2 == 1
            })
            .collect();
        arena.purge().expect("no error");
        let giving = sim.calls(Call::Unmap);
        println!("{granule}: {committing} calls to commit 1 GiB, {giving} to give half of it back");
        assert_eq!(arena.snapshot().committed, ByteSize::mib(512));
        assert_eq!((committing, giving), (1024 / granule_mib(granule), 512 / granule_mib(granule)));
        falls.push(committing + giving);
        drop(rest);
        arena.validate();
        arena.close().expect("nothing is live");
        sim.assert_no_faults();
    }
    assert!(falls.windows(2).all(|pair| pair[1] * 4 == pair[0]), "{falls:?}");
}

fn granule_mib(granule: ByteSize) -> u64 {
    granule.get() >> 20
}

#[test]
fn a_granule_is_committed_and_given_back_whole_or_not_at_all() {
    let granule = ByteSize::mib(8);
    for seed in 0..sample(60) {
        println!("seed {seed}");
        let sim = device(|options| options.remap = seed % 2 == 0);
        let arena = on_device(&sim, of(Some(granule), ByteSize::mib(100)));
        let (mut chance, mut held) = (Chance(seed), Vec::new());
        for _ in 0..400 {
            match chance.below(8) {
                0..=4 => held.extend(arena.alloc::<u8>(chance.index(12 << 20) + 1, DYNAMIC)),
                5..=6 if !held.is_empty() => {
                    let nth = chance.index(held.len());
                    drop(held.swap_remove(nth));
                }
                _ => drop(arena.purge().expect("no error")),
            }
            let snapshot = arena.snapshot();
            let figures =
                [snapshot.committed, snapshot.active, snapshot.idle, sim.leaks().committed];
            for figure in figures {
                assert!(figure.get().is_multiple_of(granule.get()), "{figure}: {snapshot:?}");
            }
            assert!(snapshot.committed <= ByteSize::mib(100));
        }
        assert!(arena.occupancy(2).iter().all(|region| region.granularity == granule));
        arena.validate();
        drop(held);
        arena.close().expect("nothing is live");
        drop(arena);
        assert_eq!(sim.leaks().handles, 0);
        sim.assert_no_faults();
    }
}

#[test]
fn a_granule_that_no_driver_call_could_keep_to_is_a_typed_error() {
    for requested in [0, 1, 4096, 3 << 20, 6 << 20, (2 << 20) + 1].map(ByteSize::new) {
        let driver = Arc::new(HostDriver::new());
        let clock = Arc::new(ManualClock::new());
        let opened = DeviceArena::open(driver, clock, of(Some(requested), ByteSize::MAX));
        let refused = opened.map(drop).expect_err("no granule");
        assert_eq!(refused, DeviceError::Granule { requested, granularity: GRANULE });
        assert!(refused.to_string().contains(&requested.to_string()), "{refused}");
    }
}

#[test]
fn alignment_reserved_blocks_and_compaction_keep_to_larger_granules() {
    let driver = Arc::new(HostDriver::new());
    let clock = Arc::new(ManualClock::new());
    let granule = ByteSize::mib(8);
    let config = of(Some(granule), ByteSize::mib(64));
    let arena = DeviceArena::open(driver, clock, config).expect("open");
    assert_eq!(arena.capabilities().granularity, GRANULE, "the driver's");
    // Addresses are known to be aligned to the driver's granules, and to no more.
    let align = arena.alloc_raw(GRANULE, granule, DYNAMIC).expect_err("8 MiB");
    assert!(matches!(align, DeviceError::Alignment { largest: GRANULE, .. }), "{align}");
    let raw = arena.alloc_raw(GRANULE, GRANULE, DYNAMIC).expect("2 MiB");
    assert!(raw.at.is_multiple_of(GRANULE));
    arena.free(raw.at).expect("live");
    let reserved = arena.reserve::<u8>(1, DYNAMIC).expect("room");
    assert_eq!(arena.snapshot().live, granule, "one of its own");
    let mut blocks: Vec<_> = (0..24).map(|_| mib(&arena, 2).expect("room")).collect();
    let mut nth = 0;
    blocks.retain(|_| {
        nth += 1;
        nth % 4 == 0
    });
    arena.purge().expect("no error");
    let before = arena.glance().committed;
    let options = lowtide_gpu::CompactOptions::new(DYNAMIC);
    while arena.compact(options, |_| {}).expect("no error").moves > 0 {}
    arena.purge().expect("no error");
    assert!(arena.glance().committed.get() * 2 < before.get(), "{before}");
    drop((reserved, blocks));
    arena.validate();
}
