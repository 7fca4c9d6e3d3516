//! Tests of maps of an arena.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use crate::{ArenaConfig, Buffer, DeviceArena, Region, SegmentMap};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, ManualClock};
use lowtide_cuda_sim::trial::FaultInjectingDriver;

const MIB: u64 = 1 << 20;

/// Checks the invariants of a map.
pub(super) fn validate(map: &[SegmentMap]) {
    for segment in map {
        for ranges in [&segment.active, &segment.idle, &segment.live, &segment.pending] {
            assert!(ranges.is_sorted_by(|one, next| one.end <= next.start), "{ranges:?}");
        }
        let mut stretches: Vec<Range<u64>> = Vec::new();
        for run in sorted(&segment.active, &segment.idle) {
            assert!(!run.is_empty() && run.end <= segment.size.get(), "in the segment: {run:?}");
            match stretches.last_mut() {
                Some(last) if last.end == run.start => last.end = run.end,
                last => {
                    assert!(last.is_none_or(|last| last.end < run.start), "overlaps: {run:?}");
                    stretches.push(run);
                }
            }
        }
        let mut end = 0;
        for block in sorted(&segment.live, &segment.pending) {
            assert!(end <= block.start && !block.is_empty(), "blocks in order: {block:?}");
            end = block.end;
            let backed = stretches.iter().any(|run| run.start <= block.start && end <= run.end);
            assert!(backed, "a block without memory: {block:?}");
        }
    }
}

/// Returns the ranges of both lists in address order.
fn sorted(one: &[Range<u64>], other: &[Range<u64>]) -> Vec<Range<u64>> {
    let mut all = [one, other].concat();
    all.sort_unstable_by_key(|range| range.start);
    all
}

fn open(driver: Arc<FaultInjectingDriver>) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let config = ArenaConfig { reserve: ByteSize::gib(1), ..ArenaConfig::new("trial") };
    (DeviceArena::open(driver, Arc::new(clock.clone()), config).expect("open"), clock)
}

fn bytes(arena: &DeviceArena, size: u64) -> Buffer<u8> {
    arena.alloc(usize::try_from(size).expect("a length"), Region::Dynamic).expect("room")
}

fn total(ranges: &[Range<u64>]) -> ByteSize {
    ByteSize::new(ranges.iter().map(|range| range.end - range.start).sum())
}

#[test]
fn a_map_and_a_snapshot_of_one_arena_agree() {
    let (arena, clock) = open(Arc::new(FaultInjectingDriver::new()));
    let mut buffers: Vec<_> = (1..200).map(|nth| bytes(&arena, nth * 7919 * 3)).collect();
    for nth in (0..buffers.len()).rev().filter(|nth| nth % 3 == 0) {
        buffers.swap_remove(nth);
    }
    let weights = arena.alloc::<u64>(100_000, Region::Stable).expect("room");
    clock.advance(Duration::from_secs(4));
    arena.decay(clock.now()).expect("decay");
    let (map, snapshot) = (arena.map(), arena.snapshot());
    validate(&map);
    for (segment, region) in map.iter().zip(&snapshot.regions) {
        assert_eq!(segment.region, region.region);
        assert_eq!(total(&segment.live), region.live);
        assert_eq!(total(&segment.active), region.active);
        assert_eq!(total(&segment.idle), region.idle);
        assert_eq!(segment.size, region.reserved);
    }
    assert_eq!(map[1].live.len(), buffers.len());
    assert_eq!(map[0].granularity, ByteSize::mib(2));
    drop(weights);
}

#[test]
fn a_block_whose_memory_is_on_its_way_is_free_and_its_granules_are_active() {
    let driver = Arc::new(FaultInjectingDriver::new());
    let (arena, _) = open(Arc::clone(&driver));
    let kept = bytes(&arena, 3 * MIB);
    driver.hold();
    std::thread::scope(|scope| {
        let other = scope.spawn(|| bytes(&arena, 6 * MIB));
        driver.wait_until_held(1);
        let (map, snapshot) = (arena.map(), arena.snapshot());
        driver.let_go();
        validate(&map);
        assert_eq!((map[1].live.len(), map[1].idle.len()), (1, 0));
        assert_eq!(total(&map[1].active), snapshot.active);
        other.join().expect("room");
    });
    drop(kept);
}
