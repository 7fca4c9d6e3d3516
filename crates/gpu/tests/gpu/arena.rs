//! The device arena over the host driver, as a user sees it.

use std::sync::Arc;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::Backend;
use lowtide_gpu::driver::host::HostDriver;
use lowtide_gpu::{ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, Region};

const GRANULE: ByteSize = ByteSize::mib(2);
const DECAY: Duration = Duration::from_secs(10);

fn open_with(config: ArenaConfig) -> (DeviceArena, ManualClock) {
    let clock = ManualClock::new();
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), Arc::new(clock.clone()), config);
    (arena.expect("the host driver works everywhere"), clock)
}

fn open(limit: ByteSize) -> (DeviceArena, ManualClock) {
    let decay = DecayTime::Within(DECAY);
    open_with(ArenaConfig { limit, decay, ..ArenaConfig::new("test") })
}

fn mebibytes(arena: &DeviceArena, count: usize, region: Region) -> Buffer<u8> {
    arena.alloc(count << 20, region).expect("room")
}

/// Calls `decay` as a control thread would, as often as it asks for, until `end`.
fn run_decay(arena: &DeviceArena, clock: &ManualClock, end: Moment) {
    loop {
        let due = arena.next_decay().max(clock.now());
        if due > end {
            clock.advance(end - clock.now());
            break;
        }
        clock.advance(due - clock.now());
        arena.decay(clock.now()).expect("decay");
    }
    arena.decay(clock.now()).expect("decay");
    arena.validate();
}

#[test]
fn a_new_arena_holds_addresses_and_no_memory() {
    let (arena, _) = open(ByteSize::MAX);
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.live, snapshot.idle), Default::default());
    assert!(snapshot.reserved >= ByteSize::gib(1), "{}", snapshot.reserved);
    assert_eq!((arena.name(), arena.backend()), ("test", Backend::Host));
    assert!(arena.capabilities().host_backed);
    assert_eq!(arena.next_decay(), Moment::NEVER);
}

#[test]
fn committed_falls_back_to_live_within_a_granule_a_region_after_the_decay_time() {
    let (arena, clock) = open(ByteSize::MAX);
    arena.set_thread_cache(ByteSize::ZERO);
    let mut kept = Vec::new();
    for nth in 0..64 {
        let region = Region::ALL[nth % 2];
        let passing = mebibytes(&arena, 1 + nth % 5, region);
        if nth < 4 {
            kept.push(passing);
        } else {
            drop(passing);
        }
    }
    drop([4, 5, 6].map(|count| mebibytes(&arena, 9 * count, Region::Dynamic)));
    let before = arena.snapshot();
    assert!(before.idle > ByteSize::mib(100), "{before:?}");
    let freed = clock.now();
    run_decay(&arena, &clock, freed + DECAY * 99 / 100);
    let early = arena.snapshot();
    assert_eq!((early.idle, early.decommits_total), (before.idle, 0), "nothing leaves before");
    // Ages are told to 1/256 of the decay time.
    run_decay(&arena, &clock, freed + DECAY + DECAY / 200);
    let after = arena.snapshot();
    assert_eq!(after.idle, ByteSize::ZERO);
    assert!(after.retained() <= ByteSize::mib(4), "{after:?}");
    assert_eq!(arena.next_decay(), Moment::NEVER);
    let lease = arena.enter().expect("awake");
    assert!(kept.iter().all(|buffer| buffer.slice(&lease).is_ok()));
}

#[test]
fn memory_that_is_used_by_turns_is_not_given_back() {
    let (arena, clock) = open(ByteSize::MAX);
    let mut commits = 0;
    for turn in 0..400 {
        drop(mebibytes(&arena, 16, Region::Dynamic));
        clock.advance(DECAY / 100);
        if arena.next_decay() <= clock.now() {
            arena.decay(clock.now()).expect("decay");
        }
        if turn == 0 {
            commits = arena.snapshot().committed_bytes_total;
        }
    }
    assert_eq!(arena.snapshot().committed_bytes_total, commits);
}

/// Each burst in another size: what the largest left idle is older than what the small ones use.
#[test]
fn what_was_used_within_the_decay_time_stays_and_what_was_not_goes() {
    let (arena, clock) = open(ByteSize::MAX);
    arena.set_thread_cache(ByteSize::ZERO);
    drop(mebibytes(&arena, 64, Region::Dynamic));
    let (mut used, mut looks) = (clock.now(), 0);
    for _ in 0..20 {
        run_decay(&arena, &clock, used + DECAY * 9 / 10);
        drop(mebibytes(&arena, 16, Region::Dynamic));
        used = clock.now();
        looks += u64::from(arena.glance().committed < ByteSize::mib(64));
    }
    let steady = arena.snapshot();
    assert_eq!((steady.committed, looks), (ByteSize::mib(16), 19), "{steady:?}");
    assert_eq!((steady.commits_total, steady.decommits_total), (1, 1), "one call for 48 MiB");
    run_decay(&arena, &clock, used + DECAY + DECAY / 200);
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
}

/// Frees that are spread over a time leave in a few calls, not in one for each.
#[test]
fn what_went_idle_shortly_after_each_other_leaves_together() {
    let (arena, clock) = open(ByteSize::MAX);
    arena.set_thread_cache(ByteSize::ZERO);
    let mut blocks: Vec<_> = (0..200).map(|_| mebibytes(&arena, 2, Region::Dynamic)).collect();
    while blocks.pop().is_some() {
        clock.advance(DECAY / 1000);
    }
    run_decay(&arena, &clock, clock.now() + DECAY + DECAY / 8);
    let after = arena.snapshot();
    assert_eq!(after.committed, ByteSize::ZERO);
    assert!(after.decommits_total <= 6, "{} calls", after.decommits_total);
}

#[test]
fn at_once_is_due_at_once_and_never_is_never_due() {
    let (arena, clock) = open(ByteSize::MAX);
    arena.set_decay(DecayTime::Never);
    drop(mebibytes(&arena, 8, Region::Dynamic));
    assert_eq!(arena.next_decay(), Moment::NEVER);
    clock.advance(1000 * DECAY);
    assert_eq!(arena.decay(clock.now()), Ok(ByteSize::ZERO));
    arena.set_decay(DecayTime::AtOnce);
    assert!(arena.next_decay() <= clock.now());
    let decayed = arena.decay(clock.now()).expect("decay");
    assert_eq!((decayed, arena.next_decay()), (ByteSize::mib(8), Moment::NEVER));
    drop(mebibytes(&arena, 8, Region::Dynamic));
    assert!(arena.next_decay() <= clock.now());
}

#[test]
fn one_call_does_bounded_work_and_says_that_there_is_more() {
    let (arena, clock) = open(ByteSize::MAX);
    arena.set_decay(DecayTime::AtOnce);
    let buffers: Vec<_> = (0..80).map(|_| mebibytes(&arena, 2, Region::Dynamic)).collect();
    let (kept, freed): (Vec<_>, Vec<_>) =
        buffers.into_iter().enumerate().partition(|(nth, _)| nth % 2 == 0);
    drop(freed);
    let first = arena.decay(clock.now()).expect("decay");
    assert_eq!((first, arena.next_decay()), (ByteSize::mib(64), clock.now()));
    let second = arena.decay(clock.now()).expect("decay");
    assert_eq!((second, arena.next_decay()), (ByteSize::mib(16), Moment::NEVER));
    arena.validate();
    drop(kept);
}

#[test]
fn the_figures_of_a_refusal_leave_out_the_place_that_the_refused_block_had() {
    let (arena, _) = open(ByteSize::mib(16));
    let kept = mebibytes(&arena, 3, Region::Dynamic);
    let mut grows = mebibytes(&arena, 1, Region::Stable);
    drop(mebibytes(&arena, 4, Region::Dynamic)); // idle: too little, so it stays
    let before = arena.snapshot();
    for refused in [
        arena.alloc::<u8>(400 << 20, Region::Dynamic).expect_err("a new block"),
        grows.resize(400 << 20).expect_err("one that would grow where it stands"),
    ] {
        let DeviceError::OutOfMemory { requested, live, committed, holes, largest_free, .. } =
            refused
        else {
            panic!("{refused}");
        };
        assert_eq!((requested, live), (ByteSize::mib(400), before.live), "{refused}");
        assert_eq!((committed, holes), (before.committed, before.holes), "{refused}");
        assert_eq!(largest_free, before.largest_free, "{refused}");
    }
    assert!(before.holes >= ByteSize::mib(1) && before.largest_free >= ByteSize::mib(1));
    drop((kept, grows));
}

#[test]
fn a_wrong_alignment_is_named_with_what_was_expected() {
    let (arena, _) = open(ByteSize::MAX);
    for align in [0, 3, 4 << 20] {
        let align = ByteSize::new(align);
        let refused = arena.alloc_raw(ByteSize::kib(1), align, Region::Dynamic).expect_err("none");
        let expected =
            format!("unsupported alignment {align}: expected a power of two of at most {GRANULE}");
        assert_eq!(refused.to_string(), expected);
    }
}

#[test]
fn purge_gives_all_idle_memory_back_and_trim_down_to_what_is_kept() {
    let (arena, _) = open(ByteSize::MAX);
    let kept = mebibytes(&arena, 2, Region::Stable);
    drop(mebibytes(&arena, 20, Region::Dynamic));
    assert_eq!(arena.trim(ByteSize::mib(30)), Ok(ByteSize::ZERO));
    assert_eq!(arena.trim(ByteSize::mib(13)), Ok(ByteSize::mib(10)));
    assert_eq!(arena.snapshot().committed, ByteSize::mib(12));
    assert_eq!(arena.purge(), Ok(ByteSize::mib(10)));
    assert_eq!(arena.purge(), Ok(ByteSize::ZERO));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.committed, snapshot.retained()), (GRANULE, ByteSize::ZERO));
    assert_eq!(snapshot.decommitted_bytes_total, 20 << 20);
    arena.validate();
    drop(kept);
}

#[test]
fn idle_memory_is_used_again_before_more_is_committed() {
    let (arena, _) = open(ByteSize::MAX);
    let bare = mebibytes(&arena, 4, Region::Dynamic);
    let wall = mebibytes(&arena, 2, Region::Dynamic);
    drop(bare);
    arena.purge().expect("purge");
    // The lowest span is bare now; a larger one, behind the wall, is idle.
    drop(mebibytes(&arena, 40, Region::Dynamic));
    let commits = arena.snapshot().commits_total;
    let buffer = mebibytes(&arena, 4, Region::Dynamic);
    assert_eq!(arena.snapshot().commits_total, commits);
    drop((wall, buffer));
}

#[test]
fn beyond_the_limit_is_a_typed_error_with_the_numbers_and_the_arena_works_on() {
    let (arena, _) = open(ByteSize::mib(8));
    let kept = mebibytes(&arena, 3, Region::Stable);
    let refused = arena.alloc::<u8>(5 << 20, Region::Dynamic).expect_err("3 + 5 in granules");
    assert_eq!(
        refused,
        DeviceError::OutOfMemory {
            arena: arena.name().into(),
            requested: ByteSize::mib(5),
            live: ByteSize::mib(3),
            active: ByteSize::mib(4),
            committed: ByteSize::mib(4),
            limit: ByteSize::mib(8),
            bound: Bound::Limit,
            holes: ByteSize::mib(1),
            largest_free: ByteSize::mib(1),
            recoverable: ByteSize::ZERO,
        }
    );
    assert_eq!(arena.snapshot().alloc_failures()[0], ("limit", 1));
    // Idle memory of the other region makes room; its addresses do not matter.
    drop(mebibytes(&arena, 4, Region::Dynamic));
    let stable = mebibytes(&arena, 4, Region::Stable);
    assert_eq!(arena.snapshot().committed, ByteSize::mib(8));
    arena.set_limit(ByteSize::mib(2));
    assert_eq!(arena.limit(), ByteSize::mib(2));
    drop(stable);
    assert!(arena.alloc::<u8>(4 << 20, Region::Dynamic).is_err());
    arena.set_limit(ByteSize::MAX);
    drop(mebibytes(&arena, 32, Region::Dynamic));
    arena.validate();
    drop(kept);
}

#[test]
fn lengths_that_can_never_fit_are_typed_errors() {
    let (arena, _) = open(ByteSize::MAX);
    for len in [usize::MAX, usize::MAX / 8, usize::MAX / 8 + 1, 1 << 60] {
        let refused = arena.alloc::<u64>(len, Region::Dynamic).expect_err("too large");
        assert!(matches!(refused, DeviceError::TooLarge { .. }), "{len}: {refused}");
    }
    assert_eq!(arena.snapshot().alloc_failures_addresses_total, 4);
    let small = ArenaConfig { reserve: ByteSize::mib(16), ..ArenaConfig::new("small") };
    let (arena, _) = open_with(small);
    let all = mebibytes(&arena, 16, Region::Stable);
    let refused = arena.alloc::<u8>(1, Region::Stable).expect_err("no addresses");
    assert!(matches!(refused, DeviceError::OutOfAddresses { .. }), "{refused}");
    assert_eq!(arena.snapshot().committed, ByteSize::mib(16));
    drop(all);
    drop(mebibytes(&arena, 16, Region::Stable));
    arena.validate();
}

#[test]
fn no_elements_and_elements_without_bytes_take_no_block() {
    let (arena, _) = open(ByteSize::ZERO);
    let lease = arena.enter().expect("awake");
    let mut none: Buffer<u64> = arena.alloc(0, Region::Dynamic).expect("nothing is needed");
    assert!(none.is_empty() && none.slice(&lease).expect("own lease").is_empty());
    assert!(none.slice_mut(&lease).expect("own lease").is_empty());
    let units: Buffer<()> = arena.alloc(usize::MAX, Region::Stable).expect("nothing is needed");
    assert_eq!(units.slice(&lease).expect("own lease").len(), usize::MAX);
    assert_eq!((units.bytes(), arena.snapshot().allocs_total), (ByteSize::ZERO, 0));
}

#[test]
fn requested_and_live_are_told_apart() {
    let (arena, _) = open(ByteSize::MAX);
    let buffer: Buffer<f32> = arena.alloc(65, Region::Dynamic).expect("room");
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.requested, snapshot.live), (ByteSize::new(260), ByteSize::new(512)));
    assert_eq!((snapshot.active, snapshot.holes), (GRANULE, ByteSize::new((2 << 20) - 512)));
    drop(buffer);
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.requested, snapshot.live_peak), (ByteSize::ZERO, ByteSize::new(512)));
    assert_eq!((snapshot.idle, snapshot.largest_free), (GRANULE, GRANULE));
}

#[test]
fn contents_are_kept_and_buffers_do_not_overlap() {
    let (arena, _) = open(ByteSize::MAX);
    let lease = arena.enter().expect("awake");
    let mut buffers: Vec<Buffer<u32>> = (0..200_u32)
        .map(|nth| {
            let data = vec![nth; 1 + 997 * nth as usize % 70_000];
            arena.alloc_from(&data, Region::ALL[nth as usize % 2]).expect("room")
        })
        .collect();
    buffers[7].slice_mut(&lease).expect("own lease").fill(7);
    arena.purge().expect("purge");
    for (nth, buffer) in (0..).zip(&buffers) {
        let elements = buffer.slice(&lease).expect("own lease");
        assert_eq!(elements.len(), buffer.len());
        assert!(elements.iter().all(|&element| element == nth), "buffer {nth}");
    }
    arena.validate();
}

#[test]
fn leases_are_counted_and_one_of_another_arena_is_refused() {
    let (arena, _) = open(ByteSize::MAX);
    let (other, _) = open_with(ArenaConfig::new("other"));
    let outer = arena.enter().expect("awake");
    let inner = arena.enter().expect("nested");
    assert_eq!((arena.snapshot().leases, other.snapshot().leases), (2, 0));
    drop(inner);
    assert_eq!(arena.snapshot().leases, 1);
    let mut buffer = arena.alloc_from(&[1_u8, 2], Region::Dynamic).expect("room");
    let foreign = other.enter().expect("awake");
    let refused = buffer.slice_mut(&foreign).expect_err("foreign");
    let (buffer_of, lease_of) = ("test".to_owned(), "other".to_owned());
    assert_eq!(refused, DeviceError::ForeignLease { buffer_of, lease_of });
    assert_eq!(buffer.slice(&outer), Ok(&[1_u8, 2][..]));
    drop(outer);
    assert_eq!(arena.snapshot().leases, 0);
}

#[test]
fn a_buffer_outlives_every_handle_of_its_arena() {
    let (arena, _) = open(ByteSize::MAX);
    let lease = arena.enter().expect("awake");
    let buffer = arena.alloc_from(&[9_u64; 1000], Region::Stable).expect("room");
    drop(arena.clone());
    drop(arena);
    assert_eq!(buffer.slice(&lease), Ok(&[9_u64; 1000][..]));
}

#[test]
fn blocks_of_hot_sizes_wait_in_the_front_and_decay_once_they_are_cold() {
    let (arena, clock) = open(ByteSize::MAX);
    for _ in 0..16 {
        drop(mebibytes(&arena, 3, Region::Dynamic));
    }
    let warm = arena.snapshot();
    assert_eq!((warm.live, warm.cached), (ByteSize::ZERO, ByteSize::mib(3)));
    assert!(warm.thread_cache_allocs_total > 8, "{warm:?}");
    assert_eq!((warm.allocs_total, warm.frees_total), (16, 16));
    // Two looks, 1/200 of the decay time apart, and it is cold; then it decays as all that is idle.
    let freed = clock.now();
    run_decay(&arena, &clock, freed + DECAY + 4 * DECAY / 200);
    let cold = arena.snapshot();
    assert_eq!((cold.cached, cold.committed), (ByteSize::ZERO, ByteSize::ZERO));
    assert_eq!((cold.allocs_total, cold.frees_total), (16, 16));
    arena.validate();
}

#[test]
fn a_front_gives_way_to_whoever_needs_the_memory() {
    let (arena, _) = open(ByteSize::mib(16));
    for _ in 0..16 {
        drop(mebibytes(&arena, 5, Region::Dynamic));
    }
    assert_eq!(arena.snapshot().cached, ByteSize::mib(5));
    drop(mebibytes(&arena, 16, Region::Stable)); // all of the limit
    assert!(arena.snapshot().alloc_failures().iter().all(|&(_, count)| count == 0));
    for give_back in [DeviceArena::purge, DeviceArena::shrink] {
        for _ in 0..16 {
            drop(mebibytes(&arena, 5, Region::Dynamic));
        }
        assert_eq!(arena.snapshot().cached, ByteSize::mib(5));
        give_back(&arena).expect("the driver takes it");
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    }
    arena.validate();
}
