//! Buffers that are resized at random, against a plain model: what they hold, where the limit
//! stands, and every figure after every step.
//!
//! Invariant: a resize keeps what fits, and a refused one keeps everything.

use lowtide_gpu::ByteSize;
use lowtide_gpu::{ArenaConfig, Bound, Buffer, DeviceArena, DeviceError, Lease, Region};

use super::{Chance, assert_marked, assert_usable, config, mark, open_with};

struct Held {
    mark: u64,
    buffer: Buffer<u64>,
}

fn sum(held: &[Held], region: Region, bytes: impl Fn(u64) -> u64) -> ByteSize {
    let own = held.iter().filter(|held| held.buffer.region() == region);
    own.map(|held| ByteSize::new(bytes(held.buffer.bytes().get()))).sum()
}

fn assert_exact(arena: &DeviceArena, held: &[Held]) {
    arena.validate();
    for figures in arena.snapshot().regions {
        assert_eq!(figures.requested, sum(held, figures.region, |bytes| bytes));
        let whole = |bytes: u64| bytes.next_multiple_of(256);
        assert_eq!(figures.live, sum(held, figures.region, whole));
    }
}

/// One step: a buffer to another length, its contents looked at after; its error, if any.
fn step(held: &mut Held, lease: &Lease, len: usize, mark_new: u64) -> Option<DeviceError> {
    let before = held.buffer.len();
    let outcome = held.buffer.resize(len);
    let stays = if outcome.is_ok() { before.min(len) } else { before };
    assert_eq!(held.buffer.len(), if outcome.is_ok() { len } else { before });
    assert_marked(&held.buffer, lease, held.mark, stays);
    mark(&mut held.buffer, lease, mark_new);
    held.mark = mark_new;
    outcome.err()
}

fn resize_at_random(seed: u64, config: ArenaConfig, steps: u64) {
    let limit = config.limit;
    let (arena, _) = open_with(config);
    let mut chance = Chance::new(seed);
    let lease = arena.enter().expect("awake");
    let mut held: Vec<Held> = Region::ALL
        .into_iter()
        .cycle()
        .take(10)
        .map(|region| Held { mark: 0, buffer: arena.alloc(0, region).expect("nothing needed") })
        .collect();
    let (mut refused, mut crossed) = (0, 0);
    for number in 1..=steps {
        let nth = chance.below(held.len());
        // 1 MiB, where small blocks end, is 2^17 elements; 4 MiB are three granules at times.
        let len = match chance.below(8) {
            0 => 0,
            1 => (1 << 17) - 1 + chance.below(3),
            2 => held[nth].buffer.len() + chance.below(64),
            3 => held[nth].buffer.len() / 2,
            _ => chance.bits(18),
        };
        let was = held[nth].buffer.len();
        match step(&mut held[nth], &lease, len, number << 32) {
            None => crossed += u32::from((was < 1 << 17) != (len < 1 << 17)),
            Some(DeviceError::OutOfMemory { limit: at, .. }) => {
                assert_eq!(at, arena.limit());
                refused += 1;
            }
            Some(DeviceError::OutOfAddresses { .. }) => refused += 1,
            Some(error) => panic!("{error}"),
        }
        if chance.below(16) == 0 {
            arena.set_limit(ByteSize::new(limit.get() / (1 + chance.below(3) as u64)));
        }
        if chance.below(32) == 0 {
            arena.purge().expect("the driver takes it");
        }
        assert_exact(&arena, &held);
    }
    println!("{refused} refused, {crossed} over the boundary");
    assert!(refused > 4 && crossed > 50, "too tame: {refused} refused, {crossed} crossed");
    let others = held.iter().map(|held| (held.mark, &held.buffer));
    others.for_each(|(mark, buffer)| assert_marked(buffer, &lease, mark, buffer.len()));
    drop(held);
    arena.set_limit(limit);
    assert_usable(&arena);
}

#[test]
fn contents_survive_random_resizes_under_a_limit_that_moves() {
    for seed in [0x853C_49E6_748F_EA9B, 7, 0xDA3E_39CB_94B9_5BDB] {
        resize_at_random(seed, ArenaConfig { limit: ByteSize::mib(24), ..config() }, 800);
    }
}

#[test]
fn contents_survive_random_resizes_where_addresses_are_short() {
    let reserve = ByteSize::mib(6);
    for seed in [3, 0x5851_F42D_4C95_7F2D] {
        resize_at_random(seed, ArenaConfig { reserve, ..config() }, 800);
    }
}

#[test]
fn a_buffer_grows_where_it_stands_as_far_as_its_neighbour_and_then_moves() {
    let (arena, _) = open_with(config());
    let lease = arena.enter().expect("awake");
    let start = |buffer: &Buffer<u64>| buffer.slice(&lease).expect("own lease").as_ptr();
    let mut buffer: Buffer<u64> = arena.alloc(1 << 18, Region::Dynamic).expect("2 MiB");
    let between: Buffer<u64> = arena.alloc(1 << 18, Region::Dynamic).expect("2 MiB");
    let wall: Buffer<u64> = arena.alloc(1 << 18, Region::Dynamic).expect("2 MiB");
    mark(&mut buffer, &lease, 1);
    let at = start(&buffer);
    drop(between);
    buffer.resize(1 << 19).expect("room");
    assert_eq!(start(&buffer), at);
    assert_marked(&buffer, &lease, 1, 1 << 18);
    mark(&mut buffer, &lease, 2);
    buffer.resize((1 << 19) + 1).expect("room elsewhere");
    assert_ne!(start(&buffer), at);
    assert_marked(&buffer, &lease, 2, 1 << 19);
    let snapshot = arena.snapshot();
    // A move is a block handed out and one freed; staying is neither.
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (4, 2));
    assert_eq!(snapshot.resizes_total, 1);
    drop((buffer, wall));
    assert_usable(&arena);
}

#[test]
fn a_buffer_that_cannot_have_both_places_at_once_keeps_its_own() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(12), ..config() });
    let lease = arena.enter().expect("awake");
    let mut buffer: Buffer<u64> = arena.alloc(1 << 19, Region::Stable).expect("4 MiB");
    let wall: Buffer<u64> = arena.alloc(1 << 18, Region::Stable).expect("2 MiB");
    mark(&mut buffer, &lease, 9);
    let before = arena.snapshot();
    let refused = buffer.resize(1 << 20).expect_err("4 and 8 at once, and 2");
    let expected = DeviceError::OutOfMemory {
        arena: arena.name().into(),
        requested: ByteSize::mib(8),
        live: ByteSize::mib(6),
        active: ByteSize::mib(6),
        committed: ByteSize::mib(6),
        limit: ByteSize::mib(12),
        bound: Bound::Limit,
        holes: ByteSize::ZERO,
        largest_free: ByteSize::ZERO,
        recoverable: ByteSize::ZERO,
    };
    assert_eq!(refused, expected);
    assert_marked(&buffer, &lease, 9, 1 << 19);
    let after = arena.snapshot();
    assert_eq!((after.live, after.requested), (before.live, before.requested));
    drop(wall);
    buffer.resize(1 << 20).expect("where it stands");
    assert_marked(&buffer, &lease, 9, 1 << 19);
    drop(buffer);
    assert_usable(&arena);
}
