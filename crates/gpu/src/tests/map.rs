//! Tests of maps of an arena.

use std::sync::Arc;
use std::time::Duration;

use crate::map::{ArenaMap, BlockState, GranuleState, SegmentMap};
use crate::{ArenaConfig, Buffer, DeviceArena, Region};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, ManualClock};
use lowtide_cuda_sim::trial::FaultInjectingDriver;

const MIB: u64 = 1 << 20;

/// Checks the invariants of a map.
pub(super) fn validate(map: &ArenaMap) {
    for segment in &map.segments {
        let mut stretches: Vec<(u64, u64)> = Vec::new();
        for run in &segment.granules {
            let (start, end) = bounds(run.offset, run.size);
            assert!(start < end && end <= segment.size.get(), "within the segment: {run:?}");
            match stretches.last_mut() {
                Some(last) if last.1 == start => last.1 = end,
                last => {
                    assert!(last.is_none_or(|last| last.1 < start), "granules in order: {run:?}");
                    stretches.push((start, end));
                }
            }
        }
        let mut end = 0;
        for block in &segment.blocks {
            let (start, block_end) = bounds(block.offset, block.size);
            assert!(end <= start && start < block_end, "blocks in order: {block:?}");
            end = block_end;
            let backed = stretches.iter().any(|&(from, to)| from <= start && end <= to);
            assert!(backed, "a block without memory: {block:?}");
        }
    }
}

/// Returns the start and the end of a span, in bytes.
fn bounds(offset: ByteSize, size: ByteSize) -> (u64, u64) {
    (offset.get(), offset.get() + size.get())
}

fn open(driver: Arc<FaultInjectingDriver>) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let config = ArenaConfig { reserve: ByteSize::gib(1), ..ArenaConfig::new("trial") };
    (DeviceArena::open(driver, Arc::new(clock.clone()), config).expect("open"), clock)
}

fn bytes(arena: &DeviceArena, size: u64) -> Buffer<u8> {
    arena.alloc(usize::try_from(size).expect("a length"), Region::Dynamic).expect("room")
}

/// Returns the bytes of granules in a state.
fn backed(segment: &SegmentMap, state: GranuleState) -> ByteSize {
    segment.granules.iter().filter(|run| run.state == state).map(|run| run.size).sum()
}

/// Returns the bytes of blocks in a state.
fn taken(segment: &SegmentMap, state: BlockState) -> ByteSize {
    segment.blocks.iter().filter(|block| block.state == state).map(|block| block.size).sum()
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
    for (segment, region) in map.segments.iter().zip(&snapshot.regions) {
        assert_eq!(segment.region, region.region);
        assert_eq!(taken(segment, BlockState::Live), region.live);
        assert_eq!(backed(segment, GranuleState::Active), region.active);
        assert_eq!(backed(segment, GranuleState::Idle), region.idle);
        assert_eq!(segment.size, region.reserved);
    }
    assert_eq!(map.segments[1].blocks.len(), buffers.len());
    assert_eq!(map.granularity, ByteSize::mib(2));
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
        let segment = &map.segments[1];
        assert_eq!(segment.blocks.len(), 1);
        assert_eq!(backed(segment, GranuleState::Active), snapshot.active);
        assert_eq!(backed(segment, GranuleState::Idle), ByteSize::ZERO);
        other.join().expect("room");
    });
    drop(kept);
}
