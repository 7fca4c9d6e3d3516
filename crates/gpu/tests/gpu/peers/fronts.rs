//! The threads' fronts, from outside: whose blocks they keep, when they let go, and that every
//! figure is exact whenever nobody is in the middle of an act.
//!
//! Invariant: `live` is what callers hold, whoever freed what on whichever thread.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, Region};

use super::{Chance, SECOND, assert_marked, assert_usable, config, mark, open_with, raw};
use crate::wait_until;

/// Makes a size hot on this thread, so that its front keeps a block of it.
fn heat(arena: &DeviceArena, size: ByteSize) {
    let len = size.as_usize().expect("small");
    for _ in 0..16 {
        drop(arena.alloc::<u8>(len, Region::Dynamic).expect("room"));
    }
    assert!(arena.snapshot().cached >= size, "{size} is not kept");
}

/// As `std::thread::spawn` and `join`.
fn elsewhere<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    thread::spawn(act).join().expect("no panic")
}

#[test]
fn a_block_that_another_thread_freed_goes_back_to_where_it_was_taken() {
    let (arena, _) = open_with(config());
    heat(&arena, ByteSize::mib(3));
    let held: Vec<Buffer<u8>> =
        (0..3).map(|_| arena.alloc(3 << 20, Region::Dynamic).expect("room")).collect();
    let before = arena.snapshot();
    assert_eq!((before.live, before.cached), (ByteSize::mib(9), ByteSize::ZERO));
    elsewhere(move || drop(held));
    let after = arena.snapshot();
    assert_eq!((after.live, after.cached), (ByteSize::ZERO, ByteSize::mib(9)));
    assert_eq!(after.requested, ByteSize::ZERO);
    assert_eq!(after.allocs_total, after.frees_total);
    let again = arena.alloc::<u8>(3 << 20, Region::Dynamic).expect("room");
    assert_eq!(arena.snapshot().thread_cache_allocs_total, before.thread_cache_allocs_total + 1);
    drop(again);
    assert_usable(&arena);
}

#[test]
fn what_a_thread_kept_when_it_ended_is_there_for_others() {
    let (arena, clock) = open_with(config());
    for _ in 0..8 {
        let arena = arena.clone();
        elsewhere(move || heat(&arena, ByteSize::mib(8)));
    }
    let kept = arena.snapshot();
    assert!(kept.cached >= ByteSize::mib(8) && kept.live.is_zero(), "{kept:?}");
    drop(arena.alloc::<u8>(64 << 20, Region::Stable).expect("all of the memory"));
    assert_eq!(arena.snapshot().alloc_failures().map(|of| of.1), [0; 4]);
    // And where nobody needs it, it decays.
    let other = arena.clone();
    elsewhere(move || heat(&other, ByteSize::mib(8)));
    let mut looks = 0;
    while !arena.snapshot().committed.is_zero() {
        assert!(looks < 1000, "nothing is left to wait for: {:?}", arena.snapshot());
        let due = arena.next_decay().max(clock.now());
        clock.advance(due - clock.now());
        arena.decay(clock.now()).expect("the driver takes it");
        looks += 1;
    }
    assert!(clock.now().since_origin() <= 11 * SECOND, "10 s, and a few looks at the front");
    assert_usable(&arena);
}

#[test]
fn a_block_that_was_kept_counts_with_what_its_next_holder_asked_for() {
    let (arena, _) = open_with(config());
    heat(&arena, ByteSize::mib(1));
    for len in [1, 255, 256, 257].map(|less| (1 << 20) - less + 1) {
        let buffer: Buffer<u8> = arena.alloc(len, Region::Dynamic).expect("room");
        let snapshot = arena.snapshot();
        assert_eq!(snapshot.requested, ByteSize::of(len));
        assert_eq!(snapshot.live, ByteSize::of(len.next_multiple_of(256)));
        drop(buffer);
        assert_eq!(arena.snapshot().requested, ByteSize::ZERO);
    }
    assert_usable(&arena);
}

#[test]
fn nothing_is_kept_without_room_or_where_idle_memory_goes_at_once() {
    let (arena, _) = open_with(ArenaConfig { thread_cache: ByteSize::ZERO, ..config() });
    let churn = |arena: &DeviceArena| {
        for _ in 0..20 {
            drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"));
        }
        arena.snapshot().cached
    };
    assert_eq!(churn(&arena), ByteSize::ZERO);
    arena.set_thread_cache(ByteSize::mib(4));
    assert_eq!(churn(&arena), ByteSize::mib(1));
    arena.set_decay(DecayTime::AtOnce);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    assert_eq!(churn(&arena), ByteSize::ZERO);
    // The room is remembered, and may be changed meanwhile.
    arena.set_thread_cache(ByteSize::mib(8));
    assert_eq!(churn(&arena), ByteSize::ZERO);
    arena.set_decay(DecayTime::Never);
    assert_eq!(churn(&arena), ByteSize::mib(1));
    arena.set_thread_cache(ByteSize::ZERO);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    assert_eq!(churn(&arena), ByteSize::ZERO);
    assert_usable(&arena);
}

#[test]
fn a_front_keeps_no_more_than_its_room() {
    let front = ByteSize::mib(4);
    let (arena, _) = open_with(ArenaConfig { thread_cache: front, ..config() });
    for size in [1_usize, 2, 3, 4, 5].map(|count| count << 20) {
        for _ in 0..8 {
            let held: Vec<Buffer<u8>> =
                (0..3).map(|_| arena.alloc(size, Region::Dynamic).expect("room")).collect();
            drop(held);
            let cached = arena.snapshot().cached;
            assert!(cached <= front, "{cached} kept of {size} B");
        }
    }
    assert_usable(&arena);
}

/// Regression test: models needed up to 1.7 of their live peak, since new blocks were placed around
/// cached ones.
#[test]
fn memory_that_fronts_hold_is_used_before_more_is_committed() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::gib(1), ..config() });
    let weights = arena.alloc::<u8>(128 << 20, Region::Dynamic).expect("room");
    let blocks = || -> Vec<Buffer<u8>> {
        (0..8).map(|_| arena.alloc(4 << 20, Region::Dynamic).expect("room")).collect()
    };
    (0..4).for_each(|_| drop(blocks()));
    assert_eq!(arena.snapshot().cached, ByteSize::mib(32));
    let before = arena.snapshot().committed;
    let other = arena.alloc::<u8>(24 << 20, Region::Dynamic).expect("room");
    assert_eq!(arena.snapshot().committed, before);
    drop((weights, other));
    assert_usable(&arena);
}

/// After the commit of the large block, more than seven eighths of the limit are live.
#[test]
fn a_front_keeps_nothing_once_a_commit_left_little_under_the_limit() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(64), ..config() });
    heat(&arena, ByteSize::mib(1));
    let block = arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("kept");
    let large = arena.alloc::<u8>(56 << 20, Region::Dynamic).expect("room");
    drop(block);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    drop(large);
    heat(&arena, ByteSize::mib(1));
    assert_usable(&arena);
}

/// Bug: after the limit was lowered, an allocation that failed did not update the live share of the
/// limit, so fronts kept blocks.
#[test]
fn a_front_keeps_nothing_once_an_allocation_failed_under_a_lower_limit() {
    let (arena, _) = open_with(ArenaConfig { limit: ByteSize::mib(64), ..config() });
    let large = arena.alloc::<u8>(16 << 20, Region::Dynamic).expect("room");
    heat(&arena, ByteSize::mib(1));
    let block = arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("kept");
    arena.set_limit(ByteSize::mib(16));
    arena.alloc::<u8>(8 << 20, Region::Dynamic).expect_err("no room");
    drop(block);
    assert_eq!(arena.snapshot().cached, ByteSize::ZERO);
    drop(large);
    assert_usable(&arena);
}

/// The bug: a buffer that was to grow where it stood was refused while a front held the room.
#[test]
fn a_buffer_could_not_grow_while_a_front_held_the_memory() {
    let (arena, _) = open_with(config());
    let mut buffer: Buffer<u8> = arena.alloc(8 << 20, Region::Stable).expect("room");
    heat(&arena, ByteSize::mib(8));
    buffer.resize(60 << 20).expect("nobody else holds anything");
    assert_eq!(arena.snapshot().alloc_failures().map(|of| of.1), [0; 4]);
    drop(buffer);
    assert_usable(&arena);
}

/// The work of one thread between two quiet points; `held` is its sum of live bytes.
struct Hammer {
    arena: DeviceArena,
    chance: Chance,
    number: u64,
    step: u64,
    kept: Vec<(u64, Buffer<u64>)>,
}

const SIZES: [usize; 6] = [10, 500, 4_000, 60_000, 131_072, 200_000];

impl Hammer {
    fn turn(&mut self, steps: usize) -> u64 {
        let lease = self.arena.enter().expect("awake");
        for _ in 0..steps {
            self.step += 1;
            if self.chance.below(2) == 0 && self.kept.len() < 12 {
                let len = SIZES[self.chance.below(SIZES.len())];
                let region = Region::ALL[usize::from(self.chance.below(4) > 0)];
                let mut buffer = self.arena.alloc(len, region).expect("no limit is near");
                let own = (self.number << 48) | self.step;
                mark(&mut buffer, &lease, own);
                self.kept.push((own, buffer));
            } else if !self.kept.is_empty() {
                let nth = self.chance.below(self.kept.len());
                let (own, buffer) = self.kept.swap_remove(nth);
                assert_marked(&buffer, &lease, own, buffer.len());
            }
        }
        let whole = |(_, buffer): &(u64, Buffer<u64>)| buffer.bytes().get().next_multiple_of(256);
        self.kept.iter().map(whole).sum()
    }
}

/// More threads than homes, and figures that are exact whenever all of them stand still.
#[test]
fn figures_are_exact_at_every_quiet_point_and_no_block_has_two_holders() {
    let homes = 4 * thread::available_parallelism().map_or(1, usize::from);
    let threads = homes.next_power_of_two().clamp(8, 64) + 3;
    let limit = ByteSize::gib(1);
    let (arena, clock) = open_with(ArenaConfig { limit, ..config() });
    let (held, requested) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let quiet = Arc::new(Barrier::new(threads + 1));
    let worker = |number: u64| {
        let (arena, held) = (arena.clone(), Arc::clone(&held));
        let (requested, quiet) = (Arc::clone(&requested), Arc::clone(&quiet));
        move || {
            let chance = Chance::new(0x9E37_79B9_7F4A_7C15 ^ (number << 33));
            let mut hammer = Hammer { arena, chance, number, step: 0, kept: Vec::new() };
            for _ in 0..20 {
                held.fetch_add(hammer.turn(60), Ordering::SeqCst);
                let bytes = hammer.kept.iter().map(|(_, buffer)| buffer.bytes().get());
                requested.fetch_add(bytes.sum(), Ordering::SeqCst);
                quiet.wait();
                quiet.wait();
            }
        }
    };
    let workers: Vec<_> =
        (1..=threads).map(|number| thread::spawn(worker(number as u64))).collect();
    for turn in 0..20 {
        quiet.wait();
        arena.validate();
        let snapshot = arena.snapshot();
        assert_eq!(snapshot.live.get(), held.swap(0, Ordering::SeqCst));
        assert_eq!(snapshot.requested.get(), requested.swap(0, Ordering::SeqCst));
        assert_eq!(arena.glance().live, snapshot.live);
        match turn % 4 {
            0 => drop(arena.purge().expect("the driver takes it")),
            1 => {
                clock.advance(SECOND);
                arena.decay(clock.now()).expect("the driver takes it");
            }
            _ => {}
        }
        assert_eq!(arena.snapshot().live, snapshot.live, "giving back frees nothing");
        quiet.wait();
    }
    workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
    let snapshot = arena.snapshot();
    assert!(snapshot.thread_cache_allocs_total > 0, "no front was ever used: {snapshot:?}");
    assert_eq!((snapshot.live, snapshot.requested), Default::default());
    assert_eq!(snapshot.allocs_total, snapshot.frees_total);
    assert_usable(&arena);
}

/// Buffers that are made on one thread and freed on another, in a ring.
#[test]
fn blocks_that_travel_between_threads_are_neither_lost_nor_doubled() {
    const THREADS: usize = 4;
    let (arena, _) = open_with(config());
    let (senders, receivers): (Vec<_>, Vec<_>) =
        (0..THREADS).map(|_| std::sync::mpsc::sync_channel::<(u64, Buffer<u64>)>(8)).unzip();
    let workers: Vec<_> = receivers
        .into_iter()
        .enumerate()
        .map(|(number, incoming)| {
            let (arena, outgoing) = (arena.clone(), senders[(number + 1) % THREADS].clone());
            thread::spawn(move || {
                let lease = arena.enter().expect("awake");
                for step in 0..400 {
                    let own = ((number as u64) << 32) | step;
                    let mut buffer = arena.alloc(20_000, Region::Dynamic).expect("room");
                    mark(&mut buffer, &lease, own);
                    // Where the next thread lags behind, its own front is as good.
                    let _ = outgoing.try_send((own, buffer));
                    while let Ok((sent, buffer)) = incoming.try_recv() {
                        assert_marked(&buffer, &lease, sent, buffer.len());
                    }
                }
            })
        })
        .collect();
    drop(senders);
    workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, snapshot.requested), Default::default());
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (1600, 1600));
    assert_usable(&arena);
}

/// A thread that holds buffers outlives every handle: what its home keeps goes with it.
#[test]
fn buffers_that_outlive_every_handle_are_freed_on_any_thread() {
    let (arena, _) = open_with(config());
    heat(&arena, ByteSize::mib(1));
    let held: Vec<Buffer<u8>> =
        (0..3).map(|_| arena.alloc(1 << 20, Region::Dynamic).expect("room")).collect();
    let other = arena.clone();
    let theirs = elsewhere(move || {
        heat(&other, ByteSize::mib(1));
        other.alloc_from(&[4_u8; 1000], Region::Stable).expect("room")
    });
    drop(arena);
    let ended = Arc::new(AtomicU64::new(0));
    let end = Arc::clone(&ended);
    let dropping = thread::spawn(move || {
        drop(held);
        end.store(1, Ordering::SeqCst);
    });
    drop(theirs);
    wait_until(|| ended.load(Ordering::SeqCst) == 1);
    dropping.join().expect("no panic");
    let (fresh, _) = open_with(config());
    raw(&fresh, ByteSize::mib(1), Region::Dynamic).expect("room");
    fresh.reset().expect("here");
    assert_usable(&fresh);
}
