//! Tests of compaction over a watched driver: contents, addresses, failures, threads.
//!
//! Invariant: a block that moves keeps its contents and its owner, whatever happens concurrently.

mod concurrent;

use std::sync::Arc;

use crate::state::RequestOrigin;
use crate::state::region::AllocRequest;
use crate::tests::Chance;
use crate::{
    ArenaConfig, BlockPin, Buffer, CompactOptions, DeviceArena, DeviceError, Moved, Region,
};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::ManualClock;
use lowtide_cuda_sim::trial::{Failure, FaultInjectingDriver};

pub(super) const DYNAMIC: CompactOptions = CompactOptions::new(Region::Dynamic);
pub(super) const ALL: CompactOptions =
    CompactOptions { contiguous: Some(ByteSize::MAX), ..CompactOptions::new(Region::Dynamic) };

/// Opens an arena whose addresses are as scarce as its memory.
pub(super) fn fixed(size: ByteSize) -> (DeviceArena, Arc<FaultInjectingDriver>) {
    open(ArenaConfig { limit: size, reserve: size, ..ArenaConfig::new("fixed") })
}

/// Opens an arena with more addresses than memory.
pub(super) fn virtual_memory(limit: ByteSize) -> (DeviceArena, Arc<FaultInjectingDriver>) {
    open(ArenaConfig { limit, reserve: ByteSize::gib(1), ..ArenaConfig::new("virtual") })
}

pub(super) fn open(config: ArenaConfig) -> (DeviceArena, Arc<FaultInjectingDriver>) {
    let driver = Arc::new(FaultInjectingDriver::new());
    let arena = DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), config);
    (arena.expect("open"), driver)
}

/// The number of elements between marks: every 256 bytes have one.
pub(super) const STRIDE: usize = 32;

/// Allocates a block filled with marks.
pub(super) fn marked(
    arena: &DeviceArena,
    size: ByteSize,
    mark: u64,
) -> Result<Buffer<u64>, DeviceError> {
    let mut buffer = arena.alloc(size.as_usize().expect("fits") / 8, Region::Dynamic)?;
    let lease = arena.enter()?;
    let marks = buffer.slice_mut(&lease)?;
    for (nth, place) in marks.iter_mut().step_by(STRIDE).enumerate() {
        *place = mark ^ ((nth as u64) << 32);
    }
    Ok(buffer)
}

pub(super) fn assert_marked(arena: &DeviceArena, buffer: &Buffer<u64>, mark: u64) {
    let lease = arena.enter().expect("awake");
    let marks = buffer.slice(&lease).expect("own lease");
    let is_right = |(nth, &place): (usize, &u64)| place == mark ^ ((nth as u64) << 32);
    assert!(
        marks.iter().step_by(STRIDE).enumerate().all(is_right),
        "the contents of {mark} changed"
    );
}

pub(super) fn address(arena: &DeviceArena, buffer: &Buffer<u64>) -> u64 {
    let lease = arena.enter().expect("awake");
    buffer.slice(&lease).expect("own lease").as_ptr().addr() as u64
}

/// Allocates blocks with marks, and frees every other one.
pub(super) fn alternating(
    arena: &DeviceArena,
    count: u64,
    size: ByteSize,
) -> Vec<(u64, Buffer<u64>)> {
    let block = |mark| (mark, marked(arena, size, mark).expect("room"));
    let mut blocks: Vec<_> = (0..count).map(block).collect();
    blocks.retain(|(mark, _)| mark % 2 == 1);
    blocks
}

pub(super) fn assert_all_marked(arena: &DeviceArena, blocks: &[(u64, Buffer<u64>)]) {
    for (mark, buffer) in blocks {
        assert_marked(arena, buffer, *mark);
    }
}

/// Lays out 16 MiB: 6 free, 2 live, 2 live and pinned, 6 free. The movable block will go to the
/// end.
pub(super) fn beside_a_pinned_one(arena: &DeviceArena) -> (Buffer<u64>, Buffer<u64>, BlockPin) {
    let gone = marked(arena, ByteSize::mib(6), 0).expect("room");
    let moving = marked(arena, ByteSize::mib(2), 1).expect("room");
    let after = marked(arena, ByteSize::mib(2), 2).expect("room");
    let pin = after.pin().expect("here");
    drop(gone);
    (moving, after, pin)
}

#[test]
fn without_blocks_nothing_moves_and_all_stays_free() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let before = arena.snapshot();
    for options in [ALL, DYNAMIC] {
        let done = arena.compact(options, |_| panic!("nothing is there")).expect("no error");
        assert_eq!((done.moves, done.largest_span), (0, ByteSize::mib(64)));
    }
    assert_eq!(arena.snapshot(), before);
    driver.assert_no_faults();
}

#[test]
fn what_no_gap_holds_is_held_after_a_compaction() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let mut blocks = alternating(&arena, 8, ByteSize::mib(8));
    let refused = marked(&arena, ByteSize::mib(16), 99).expect_err("gaps of 8 MiB");
    assert!(matches!(refused, DeviceError::OutOfAddresses { .. }), "{refused}");
    let mut moves = Vec::new();
    let options = CompactOptions { contiguous: Some(ByteSize::mib(16)), ..DYNAMIC };
    let done = arena.compact(options, |moved| moves.push(moved)).expect("no error");
    assert_eq!((done.moves, moves.len()), (1, 1));
    assert!(done.largest_span >= ByteSize::mib(16));
    blocks.push((99, marked(&arena, ByteSize::mib(16), 99).expect("room now")));
    assert_all_marked(&arena, &blocks);
    blocks.clear();
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn all_free_space_becomes_one_span_and_each_move_is_told() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    let before: Vec<_> = blocks.iter().map(|(_, block)| address(&arena, block)).collect();
    let mut moves: Vec<Moved> = Vec::new();
    let done = arena.compact(ALL, |moved| moves.push(moved)).expect("no error");
    assert_eq!(done.largest_span, ByteSize::mib(32));
    assert_eq!(done.moved, moves.iter().map(|moved| moved.size).sum());
    let mut unmoved = 0;
    for ((_, block), before) in blocks.iter().zip(before) {
        let now = address(&arena, block);
        let told = moves.iter().rfind(|moved| moved.to.get() == now);
        unmoved += usize::from(now == before);
        assert_eq!(told.map_or(before, |moved| moved.to.get()), now);
    }
    assert!(unmoved > 0, "a block that need not move keeps its address");
    assert_all_marked(&arena, &blocks);
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.moves_total, done.moves);
    assert_eq!(snapshot.moved_bytes_total, done.moved.get());
    driver.assert_no_faults();
}

#[test]
fn the_other_region_stays() {
    let (arena, _) = fixed(ByteSize::mib(64));
    let stable = arena.alloc_from(&[333_u64; 1 << 18], Region::Stable).expect("room");
    let gone = arena.alloc::<u64>(1 << 19, Region::Stable).expect("room");
    let after = arena.alloc_from(&[111_u64; 1 << 18], Region::Stable).expect("room");
    drop(gone);
    let places = [address(&arena, &stable), address(&arena, &after)];
    let blocks = alternating(&arena, 6, ByteSize::mib(8));
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.live, ByteSize::mib(28));
    let told = |moved: Moved| assert_eq!(moved.region, Region::Dynamic);
    assert!(arena.compact(ALL, told).expect("no error").moves > 0);
    assert_eq!([address(&arena, &stable), address(&arena, &after)], places);
    assert_eq!(arena.snapshot().live, snapshot.live);
    assert_all_marked(&arena, &blocks);
}

/// Regression test: a block that moves by less than its size was copied in one piece onto itself.
#[test]
fn a_block_that_slides_by_less_than_its_size_is_not_copied_onto_itself() {
    let (arena, driver) = fixed(ByteSize::mib(12));
    let gone = marked(&arena, ByteSize::mib(1), 0).expect("room");
    let slides = marked(&arena, ByteSize::mib(8), 1).expect("room");
    drop(gone);
    let calls = driver.calls();
    let done = arena.compact(ALL, |_| {}).expect("no overlap is refused");
    assert_eq!((done.moves, driver.calls() - calls), (1, 8));
    assert_eq!(done.largest_span, ByteSize::mib(4));
    assert_marked(&arena, &slides, 1);
    driver.assert_no_faults();
}

#[test]
fn granules_that_little_pins_go_idle_and_can_be_given_back() {
    let (arena, driver) = virtual_memory(ByteSize::mib(64));
    let block = |mark| (mark, marked(&arena, ByteSize::kib(256), mark).expect("room"));
    let mut blocks: Vec<_> = (0..128).map(block).collect();
    blocks.retain(|(mark, _)| mark % 8 == 3);
    arena.purge().expect("purge");
    let before = arena.snapshot();
    assert_eq!(before.committed, ByteSize::mib(32));
    let done = arena.compact(DYNAMIC, |_| {}).expect("no error");
    let after = arena.snapshot();
    assert_eq!(done.recovered, after.idle);
    assert_eq!(after.active, ByteSize::mib(4), "{done:?}");
    assert_eq!(after.commits_total, before.commits_total, "into holes that have memory");
    arena.purge().expect("purge");
    assert_all_marked(&arena, &blocks);
    assert_eq!(driver.committed().0, ByteSize::mib(4));
    driver.assert_no_faults();
}

#[test]
fn many_small_calls_come_to_the_same_as_one_large_call() {
    for options in [ALL, DYNAMIC] {
        let run = |budget| {
            let (arena, _) = fixed(ByteSize::mib(64));
            let mut chance = Chance(7);
            let mut blocks: Vec<_> = (0..60)
                .map(|mark| {
                    let size = ByteSize::kib(256 + 64 * chance.below(8));
                    (mark, marked(&arena, size, mark).expect("room"))
                })
                .collect();
            blocks.retain(|_| chance.below(2) == 0);
            let mut calls = 0;
            loop {
                let options = CompactOptions { budget, ..options };
                let done = arena.compact(options, |_| {}).expect("no error");
                assert!(done.moved <= budget, "over budget");
                if done.moves == 0 {
                    assert_all_marked(&arena, &blocks);
                    return (calls, done.largest_span, arena.snapshot().active);
                }
                calls += 1;
                assert!(calls < 200, "it goes on for ever");
            }
        };
        let (large, small) = (run(ByteSize::MAX), run(ByteSize::mib(5)));
        println!("{options:?}: {large:?} {small:?}");
        assert!(small.0 > large.0);
        match options.contiguous {
            None => assert!(small.2.get() <= large.2.get() + (2 << 20)),
            Some(_) => assert_eq!(small.1, large.1),
        }
    }
}

#[test]
fn pinned_blocks_stay_until_the_last_pin_is_gone() {
    let (arena, _) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    let pins: Vec<_> = blocks.iter().map(|(_, block)| block.pin().expect("here")).collect();
    let twice = blocks[0].1.pin().expect("here");
    assert_eq!(arena.compact(ALL, |_| {}).map(|done| done.moves), Ok(0));
    drop(pins);
    let place = address(&arena, &blocks[0].1);
    assert!(arena.compact(ALL, |_| {}).expect("no error").moves > 0);
    assert_eq!(address(&arena, &blocks[0].1), place);
    assert_all_marked(&arena, &blocks);
    drop(blocks);
    drop(twice);
    arena.validate();
    let none: Buffer<u64> = arena.alloc(0, Region::Dynamic).expect("nothing");
    drop(none.pin().expect("nothing to keep"));
}

#[test]
fn nothing_moves_while_a_lease_is_held() {
    let (arena, _) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    let lease = arena.enter().expect("awake");
    let seen = blocks[1].1.slice(&lease).expect("own lease");
    let done = arena.compact(ALL, |_| panic!("moved")).expect("no error");
    assert_eq!((done.moves, done.is_busy), (0, true));
    assert_eq!(seen[0], 3);
    drop(lease);
    let done = arena.compact(ALL, |_| {}).expect("no error");
    assert!(!done.is_busy);
    assert!(done.moves > 0);
}

/// Regression test: a panic during a move left the accounting moved and the contents not.
#[test]
fn a_callback_that_panics_ends_the_compaction_after_a_whole_move() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let blocks = alternating(&arena, 8, ByteSize::mib(8));
    let failed = arena.compact(ALL, |_| panic!("enough")).expect_err("it panics");
    assert_eq!(failed.error, DeviceError::Callback { message: "enough".to_owned() });
    // Regression test: the compaction reported that it had finished.
    assert_eq!((failed.value.moves, failed.value.is_busy), (1, false));
    assert_all_marked(&arena, &blocks);
    arena.validate();
    let done = arena.compact(ALL, |_| {}).expect("no error");
    assert_eq!(done.largest_span, ByteSize::mib(32));
    assert_all_marked(&arena, &blocks);
    driver.assert_no_faults();
}

/// Performs jumps, slides in pieces, and moves to places that have no memory yet.
fn scenario(driver: &Arc<FaultInjectingDriver>, nth: Option<u64>) -> u64 {
    let size = ByteSize::mib(32);
    let config = ArenaConfig { limit: size, reserve: size, ..ArenaConfig::new("trial") };
    let arena = DeviceArena::open(driver.clone(), Arc::new(ManualClock::new()), config);
    let arena = arena.expect("open");
    let sizes = [1, 5, 2, 4, 3, 4, 2, 2, 4].map(ByteSize::mib);
    let mut blocks: Vec<_> = (0..)
        .zip(sizes)
        .map(|(mark, size)| (mark, marked(&arena, size, mark).expect("room")))
        .collect();
    blocks.retain(|(mark, _)| ![0, 3, 6].contains(mark));
    arena.purge().expect("purge");
    let first = driver.calls();
    driver.fail_from(None);
    if let Some(nth) = nth {
        driver.fail(Failure { nth: first + nth, out_of_memory: nth % 2 == 0 });
    }
    let mut failures = 0;
    for options in [ALL, DYNAMIC, ALL] {
        match arena.compact(options, |_| {}) {
            Ok(_) => {}
            Err(failed) => {
                failures += 1;
                assert!(matches!(failed.error, DeviceError::Driver(_)), "{failed}");
            }
        }
        arena.validate();
        driver.assert_no_faults();
        assert_all_marked(&arena, &blocks);
        assert_eq!(arena.snapshot().live, ByteSize::mib(20));
        assert_eq!(driver.committed().0, arena.snapshot().committed);
    }
    assert!(failures <= 1);
    assert!(arena.compact(ALL, |_| {}).expect("no error").largest_span == ByteSize::mib(12));
    driver.calls() - first
}

#[test]
fn a_call_that_fails_at_any_turn_leaves_every_block_whole() {
    let calls = scenario(&Arc::new(FaultInjectingDriver::new()), None);
    assert!(calls > 8, "only {calls} calls: the scenario is too tame");
    for nth in 0..calls {
        println!("call {nth} fails");
        scenario(&Arc::new(FaultInjectingDriver::new()), Some(nth));
    }
}

#[test]
fn contents_that_a_slide_lost_are_never_shown_again() {
    let (arena, driver) = fixed(ByteSize::mib(12));
    let gone = marked(&arena, ByteSize::mib(1), 0).expect("room");
    let mut lost = marked(&arena, ByteSize::mib(8), 1).expect("room");
    // A hot size: otherwise the block would be cached when it is dropped.
    for _ in 0..8 {
        drop(lost);
        lost = marked(&arena, ByteSize::mib(8), 1).expect("room");
    }
    drop(gone);
    // Fails the fourth piece and all copies that would undo the others.
    driver.fail_from(Some(driver.calls() + 3));
    let failed = arena.compact(ALL, |_| {}).expect_err("a trial");
    let expected = DeviceError::ContentsLost { region: Region::Dynamic, size: ByteSize::mib(8) };
    assert_eq!((failed.error, failed.value.moves), (expected.clone(), 0));
    driver.fail_from(None);
    let lease = arena.enter().expect("awake");
    assert_eq!(lost.slice(&lease).map(<[u64]>::len), Err(expected.clone()));
    assert_eq!(lost.slice_mut(&lease).map(|_| ()), Err(expected));
    drop(lease);
    assert_eq!(arena.compact(ALL, |_| {}).map(|done| done.moves), Ok(0), "nothing to keep");
    drop(lost);
    drop(marked(&arena, ByteSize::mib(8), 2).expect("its place is as good as another"));
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    drop(marked(&arena, ByteSize::mib(12), 2).expect("room"));
    arena.validate();
    driver.assert_no_faults();
}

/// Regression test: after a resize in place, a block whose contents were lost looked whole again.
#[test]
fn a_resize_in_place_showed_contents_that_were_lost() {
    for bytes in [4 << 20, 8 << 20] {
        let (arena, driver) = fixed(ByteSize::mib(12));
        let gone = marked(&arena, ByteSize::mib(1), 0).expect("room");
        let mut lost = marked(&arena, ByteSize::mib(8), 1).expect("room");
        drop(gone);
        driver.fail_from(Some(driver.calls() + 3));
        arena.compact(ALL, |_| {}).expect_err("a trial");
        driver.fail_from(None);
        let expected =
            DeviceError::ContentsLost { region: Region::Dynamic, size: ByteSize::mib(8) };
        assert_eq!(lost.resize(bytes / 8), Err(expected.clone()), "{bytes}");
        let lease = arena.enter().expect("awake");
        assert_eq!(lost.slice(&lease).map(<[u64]>::len), Err(expected), "{bytes}");
        drop(lease);
        assert_eq!(lost.resize(0), Ok(()), "nothing is left of it");
        drop(lost);
        arena.validate();
        driver.assert_no_faults();
    }
}

#[test]
fn what_the_limit_does_not_allow_is_left_out() {
    let (arena, driver) = fixed(ByteSize::mib(16));
    let (moving, _after, _pin) = beside_a_pinned_one(&arena);
    arena.purge().expect("purge");
    arena.set_limit(arena.snapshot().committed);
    let done = arena.compact(ALL, |_| panic!("moved")).expect("no error");
    assert_eq!((done.moves, done.skipped, done.is_busy), (0, 1, false));
    assert_eq!(arena.snapshot().alloc_failures().map(|of| of.1), [0; 4]);
    arena.set_limit(ByteSize::mib(16));
    assert_eq!(arena.compact(ALL, |_| {}).map(|done| done.moves), Ok(1));
    assert_marked(&arena, &moving, 1);
    arena.validate();
    driver.assert_no_faults();
}

#[test]
fn aligned_blocks_stay_aligned() {
    let (arena, _) = fixed(ByteSize::mib(8));
    let inner = arena.inner();
    let request = |size, align| {
        let wanted = AllocRequest::new(Region::Dynamic, size, align, RequestOrigin::BUFFER);
        inner.alloc_block(wanted).expect("room")
    };
    // The gap begins 512 bytes after a multiple of 4 KiB.
    let first = request((1 << 20) + 512, 256);
    let (gone, block) = (request((1 << 20) + 512, 256), request(1 << 20, 4096));
    inner.run_now(|state| state.region_mut(Region::Dynamic).pins.pin(first.id));
    inner.run_now(|state| state.release_after(gone, &[]));
    let mut moves = 0;
    for options in [ALL, DYNAMIC] {
        let told = |moved: Moved| {
            assert!(moved.to.is_multiple_of(ByteSize::kib(4)), "{moved:?}");
            moves += 1;
        };
        arena.compact(options, told).expect("no error");
    }
    assert_eq!(moves, 1);
    inner.run_now(|state| state.release_after(block, &[]));
    inner.run_now(|state| state.release_after(first, &[]));
    arena.validate();
}

#[test]
fn blocks_had_by_address_stay_or_have_a_new_address_that_is_told() {
    let (arena, driver) = fixed(ByteSize::mib(64));
    let raw = || arena.alloc_raw(ByteSize::mib(8), ByteSize::kib(4), Region::Dynamic);
    let mut blocks: Vec<_> = (0..8).map(|_| raw().expect("room").at).collect();
    for nth in [6, 4, 2, 0] {
        arena.free(blocks.swap_remove(nth)).expect("live");
    }
    blocks.sort();
    assert_eq!(arena.compact(ALL, |_| {}).map(|done| done.moves), Ok(0));
    for &at in &blocks {
        arena.raw_block(at).expect("where it was");
    }
    let options = CompactOptions { moves_raw: true, ..ALL };
    let done = arena.compact(options, |moved| {
        let at = blocks.iter_mut().find(|at| **at == moved.from).expect("one of ours");
        *at = moved.to;
        assert_eq!(arena.raw_block(moved.to).expect("there").size, moved.size);
        assert!(arena.raw_block(moved.from).is_err() && moved.to.is_multiple_of(ByteSize::kib(4)));
    });
    assert!(done.expect("no error").moves > 0);
    blocks.push(raw().expect("room").at);
    for at in blocks {
        arena.free(at).expect("by the new address");
    }
    arena.validate();
    driver.assert_no_faults();
}
