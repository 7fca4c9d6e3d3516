//! The tests of ONNX Runtime's BFC arena (`test/framework/bfc_arena_test.cc`), and those of
//! `test_inference.cc` that are about an arena, as claims about ours.
//!
//! Elsewhere: `TestBackoffDoesntHang` needs a driver that always fails and stands in
//! `src/device/tests/peers.rs`; the selector "cpu:0;gpu:0" and the option of a run belong to the
//! configuration with its keys. The tests of streams (`TwoStreamAllocation`, those of who owns a
//! block and of securing one) need a driver whose work goes on after its calls, and stand in
//! `crates/gpu/tests/gpu/streams/onnxruntime.rs`.
//!
//! Invariant: where a figure of theirs means the same here, it is the same number.

use lowtide_gpu::ByteSize;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, Growth, RawBlock, Region};

use super::{Chance, GRANULE, assert_apart, assert_usable, config, open_with, raw};

/// A stand-in for what theirs calls without a limit.
fn vast() -> ArenaConfig {
    ArenaConfig { limit: ByteSize::gib(1), reserve: ByteSize::gib(4), ..config() }
}

const DOUBLING: Growth = Growth::NextPowerOfTwo {
    initial: ByteSize::mib(1),
    after_shrink: ByteSize::mib(2),
    cap: ByteSize::mib(32),
};

fn dynamic(arena: &DeviceArena, size: ByteSize) -> RawBlock {
    raw(arena, size, Region::Dynamic).expect("room")
}

/// `NoDups`: blocks of 1 to 1023 bytes, with the figures of theirs.
#[test]
fn a_thousand_small_blocks_share_no_byte_and_the_figures_are_exact() {
    let (arena, _) = open_with(vast());
    let blocks: Vec<_> = (1..1024).map(|size| dynamic(&arena, ByteSize::new(size))).collect();
    assert_apart(blocks.iter().copied());
    let snapshot = arena.snapshot();
    assert_eq!(snapshot.allocs_total, 1023);
    assert_eq!((snapshot.live, snapshot.live_peak), (ByteSize::new(654_336), snapshot.live));
    assert_eq!(snapshot.alloc_size_max, ByteSize::new(1024));
    assert_eq!(snapshot.requested, ByteSize::new(1023 * 1024 / 2));
    for block in blocks {
        arena.free(block.at).expect("live");
    }
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, snapshot.frees_total), (ByteSize::ZERO, 1023));
    assert_usable(&arena);
}

/// Blocks of random sizes, every other one freed, and as many again; one that can never fit in
/// between.
fn allocations_and_deallocations(config: ArenaConfig) {
    let (arena, _) = open_with(config);
    let mut chance = Chance::new(0x2545_F491_4F6C_DD1D);
    let mut some = |count: usize| -> Vec<RawBlock> {
        let sizes = (0..count).map(|_| 1 + chance.below(1 << 20) as u64);
        sizes.map(|size| dynamic(&arena, ByteSize::new(size))).collect()
    };
    let mut blocks = some(256);
    let mut nth = 0;
    blocks.retain(|block| {
        nth += 1;
        let freed = nth % 2 == 0;
        if freed {
            arena.free(block.at).expect("live");
        }
        !freed
    });
    let refused = raw(&arena, ByteSize::new((1 << 30) + 1), Region::Dynamic).expect_err("1 GiB");
    assert!(matches!(refused, DeviceError::OutOfMemory { .. }), "{refused}");
    assert_eq!(arena.snapshot().alloc_failures_limit_total, 1);
    blocks.extend(some(128));
    assert_apart(blocks.iter().copied());
    arena.validate();
    let live = blocks.iter().map(|block| block.size).sum();
    assert_eq!(arena.snapshot().live, live);
    for block in blocks {
        assert_eq!(arena.free(block.at), Ok(block));
    }
    assert_eq!(arena.snapshot().live, ByteSize::ZERO);
    assert_usable(&arena);
}

/// `AllocationsAndDeallocations`.
#[test]
fn random_blocks_do_not_overlap_and_one_that_cannot_fit_harms_none() {
    allocations_and_deallocations(vast());
}

/// `AllocationsAndDeallocationsWithGrowth`.
#[test]
fn random_blocks_do_not_overlap_where_growth_doubles() {
    allocations_and_deallocations(ArenaConfig { growth: DOUBLING, ..vast() });
}

/// `ExerciseCoalescing`: 1024 rounds of four sizes, and the first address is had again.
#[test]
fn an_arena_that_was_filled_and_emptied_a_thousand_times_is_as_new() {
    let (arena, _) = open_with(vast());
    let first = dynamic(&arena, ByteSize::kib(4));
    arena.free(first.at).expect("live");
    let sizes = [ByteSize::kib(4), ByteSize::mib(8), ByteSize::kib(16), ByteSize::mib(32)];
    for _ in 0..1024 {
        let blocks = sizes.map(|size| dynamic(&arena, size));
        for block in blocks {
            arena.free(block.at).expect("live");
        }
    }
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.live), (4097, ByteSize::ZERO));
    assert_eq!(dynamic(&arena, ByteSize::kib(4)).at, first.at);
    assert!(snapshot.committed <= ByteSize::mib(42), "{}", snapshot.committed);
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// `AllocateZeroBufSize`.
#[test]
fn a_buffer_of_no_bytes_needs_no_memory_at_all() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::ZERO, ..config() });
    let buffer: Buffer<f32> = arena.alloc(0, Region::Dynamic).expect("nothing is needed");
    assert!(buffer.is_empty());
    drop(buffer);
    assert_eq!(raw(&arena, ByteSize::ZERO, Region::Dynamic), Err(DeviceError::ZeroSize));
    arena.validate();
}

/// `AllocatedVsRequested`: 4 bytes are 256.
#[test]
fn a_block_says_what_was_asked_for_and_what_was_given() {
    let (arena, _) = open_with(config());
    let block = dynamic(&arena, ByteSize::new(4));
    assert_eq!((block.requested, block.size), (ByteSize::new(4), ByteSize::new(256)));
    assert_eq!(arena.raw_block(block.at), Ok(block));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.requested, snapshot.live), (block.requested, block.size));
    assert_eq!(arena.free(block.at), Ok(block));
    assert_usable(&arena);
}

/// `TestCustomMemoryLimit`: a limit that is reached, and one that is nearly all there is.
#[test]
fn a_limit_holds_and_a_size_near_the_largest_number_is_refused() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(60), ..config() });
    let first = dynamic(&arena, ByteSize::mib(40));
    let refused = raw(&arena, ByteSize::mib(30), Region::Dynamic).expect_err("20 MiB are left");
    assert!(refused.to_string().contains("cannot allocate 30.0 MiB"), "{refused}");
    assert!(refused.to_string().contains("limit 60.0 MiB"), "{refused}");
    let second = dynamic(&arena, ByteSize::mib(20));
    assert_eq!(arena.snapshot().committed, ByteSize::mib(60));
    assert_apart([first, second]);
    arena.reset().expect("here");
    assert_usable(&arena);

    let limit = ByteSize::MAX.saturating_sub(ByteSize::mib(5));
    let (arena, _) = open_with(ArenaConfig { limit, ..config() });
    let size = ByteSize::MAX.saturating_sub(ByteSize::mib(6));
    let refused = raw(&arena, size, Region::Dynamic).expect_err("more than there is");
    let len = size.as_usize().expect("64 bits");
    let (element, largest) = (ByteSize::new(1), ByteSize::gib(1));
    assert_eq!(refused, DeviceError::TooLarge { len, element, largest });
    assert_usable(&arena);
}

/// `TestReserve`. In theirs a reserved block passes the limit by; here it is counted as any other.
#[test]
fn reserved_memory_counts_and_is_given_back_whole() {
    let (arena, _) = open_with(config());
    let before: Buffer<u8> = arena.alloc(1 << 20, Region::Dynamic).expect("room");
    let reserved: Buffer<u8> = arena.reserve(3 << 20, Region::Dynamic).expect("room");
    let small: Buffer<u8> = arena.alloc(100, Region::Dynamic).expect("room");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.reserves_total, snapshot.allocs_total), (1, 3));
    assert_eq!(snapshot.requested, ByteSize::new((4 << 20) + 100));
    // Whole granules, and all of them live: no other block ever keeps them.
    assert_eq!(snapshot.live, ByteSize::new((5 << 20) + 256));
    drop(reserved);
    assert_eq!(arena.purge(), Ok(ByteSize::mib(4)));
    drop((before, small));
    assert_usable(&arena);
}

/// `TestShrink`: one of two blocks is freed, and only its memory goes.
#[test]
fn a_shrink_gives_back_what_is_free_and_keeps_what_is_live() {
    let (arena, _) = open_with(config());
    let (kept, freed) = (dynamic(&arena, ByteSize::mib(10)), dynamic(&arena, ByteSize::mib(12)));
    assert_eq!(arena.shrink(), Ok(ByteSize::ZERO), "all is live");
    arena.free(freed.at).expect("live");
    assert_eq!(arena.shrink(), Ok(ByteSize::mib(12)));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.live), (ByteSize::mib(10), ByteSize::mib(10)));
    assert_eq!((snapshot.shrinks_total, snapshot.shrunk_bytes_total), (2, 12 << 20));
    assert_eq!(arena.raw_block(kept.at), Ok(kept));
    arena.reset().expect("here");
    assert_usable(&arena);
}

/// `TestExtendStrategy`: growth doubles up to its cap; a larger request succeeds, and takes what
/// it needs.
#[test]
fn growth_doubles_up_to_its_cap_and_a_larger_request_takes_what_it_needs() {
    let (arena, _) = open_with(ArenaConfig { growth: DOUBLING, ..vast() });
    let mut steps = Vec::new();
    let mut committed = ByteSize::ZERO;
    let mut grow = |size| {
        dynamic(&arena, size);
        let now = arena.snapshot().committed;
        let step = now.saturating_sub(committed);
        committed = now;
        (!step.is_zero()).then(|| step.get() >> 20)
    };
    for _ in 0..128 {
        steps.extend(grow(ByteSize::mib(1)));
    }
    // 1 MiB is raised to a granule, and what a request raised is not doubled.
    assert_eq!(steps, [2, 2, 4, 8, 16, 32, 32, 32]);
    assert_eq!(grow(ByteSize::mib(64)), Some(64));
    arena.reset().expect("here");
    assert_eq!(arena.shrink(), Ok(ByteSize::mib(192)));
    assert_usable(&arena);
}

/// A session: weights that stay, and runs whose activations come and go.
struct Session {
    arena: DeviceArena,
    weights: Vec<Buffer<f32>>,
}

impl Session {
    fn load(arena: &DeviceArena, reserved: bool) -> Self {
        let weight = |count: usize| {
            let len = count * 300_000;
            let taken = if reserved {
                arena.reserve(len, Region::Stable)
            } else {
                arena.alloc(len, Region::Stable)
            };
            taken.expect("room")
        };
        Self { arena: arena.clone(), weights: (1..4).map(weight).collect() }
    }

    fn run(&self, batch: usize) {
        let layers: Vec<Buffer<f32>> = (1..6)
            .map(|layer| self.arena.alloc(batch * layer * 20_000, Region::Dynamic).expect("room"))
            .collect();
        drop(layers);
    }

    fn weight_bytes(&self) -> ByteSize {
        self.weights.iter().map(Buffer::bytes).sum()
    }
}

/// `ConfigureCudaArenaAndDemonstrateMemoryArenaShrinkage`.
#[test]
fn after_a_run_with_a_large_batch_a_shrink_leaves_the_weights_alone() {
    let (arena, _) = open_with(ArenaConfig { growth: DOUBLING, ..vast() });
    let session = Session::load(&arena, false);
    session.run(1);
    session.run(64);
    let peak = arena.snapshot();
    arena.shrink().expect("the driver takes it");
    let after = arena.snapshot();
    assert!(peak.committed > ByteSize::mib(64), "{peak:?}");
    let slack = GRANULE.checked_mul(2).expect("small");
    assert!(after.committed <= session.weight_bytes().saturating_add(slack), "{after:?}");
    session.run(64);
    drop(session);
    assert_usable(&arena);
}

/// `AllocateInitializersFromNonArenaMemory`: theirs go around the arena, ours have granules of
/// their own.
#[test]
fn weights_that_are_reserved_share_no_granule_with_activations() {
    let (arena, _) = open_with(vast());
    let session = Session::load(&arena, true);
    session.run(8);
    arena.purge().expect("the driver takes it");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.holes), (snapshot.live, ByteSize::ZERO));
    assert_eq!(snapshot.requested, session.weight_bytes());
    drop(session);
    assert_eq!(arena.purge(), Ok(snapshot.committed));
    assert_usable(&arena);
}

/// `TestSharedAllocatorUsingCreateAndRegisterAllocator`.
#[test]
fn two_sessions_on_one_arena_use_the_same_memory_by_turns() {
    let (arena, _) = open_with(vast());
    let sessions = [Session::load(&arena, false), Session::load(&arena, false)];
    sessions[0].run(16);
    let committed = arena.snapshot().committed_bytes_total;
    for turn in 0..20 {
        sessions[turn % 2].run(16);
    }
    assert_eq!(arena.snapshot().committed_bytes_total, committed, "the second found the first's");
    let [first, second] = sessions;
    drop(first);
    second.run(16);
    assert_eq!(arena.snapshot().requested, second.weight_bytes());
    drop(second);
    assert_usable(&arena);
}
