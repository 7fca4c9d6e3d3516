//! Acts that meet: what one thread does must not make another be refused, miscounted or handed
//! what is somebody else's.
//!
//! Invariant: an outcome on one thread is one that some order of the acts, one by one, explains.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::thread::{self, JoinHandle};

use lowtide_cuda_sim::sample;
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, Region};

use super::{Chance, SECOND, assert_marked, assert_usable, config, mark, open_with, raw};

/// Threads that do something until they are told to stop.
struct Meanwhile {
    stop: Arc<AtomicBool>,
    threads: Vec<JoinHandle<()>>,
}

impl Meanwhile {
    fn new() -> Self {
        Self { stop: Arc::new(AtomicBool::new(false)), threads: Vec::new() }
    }

    fn and(mut self, mut act: impl FnMut() + Send + 'static) -> Self {
        let stop = Arc::clone(&self.stop);
        self.threads.push(thread::spawn(move || {
            while !stop.load(Ordering::Relaxed) {
                act();
            }
        }));
        self
    }

    fn end(self) {
        self.stop.store(true, Ordering::Relaxed);
        self.threads.into_iter().for_each(|thread| thread.join().expect("no panic"));
    }
}

fn decaying(arena: &DeviceArena, clock: &ManualClock) -> impl FnMut() + Send + 'static {
    let (arena, clock) = (arena.clone(), clock.clone());
    move || {
        clock.advance(SECOND / 100);
        arena.decay(clock.now()).expect("the driver takes it");
    }
}

/// Empties the fronts, over and over, with no driver call.
fn emptying(arena: &DeviceArena) -> impl FnMut() + Send + 'static {
    let arena = arena.clone();
    move || arena.set_thread_cache(ByteSize::mib(16))
}

/// The bug: blocks on their way from a front to the books counted as nobody's, and a front took
/// more in while another thread was short; who asked then was refused.
#[test]
fn memory_on_its_way_out_of_a_front_was_missing_to_who_was_short() {
    const THREADS: u64 = 3;
    let limit = ByteSize::mib(16 * THREADS);
    let (arena, clock) = open_with(ArenaConfig { limit, ..config() });
    let meanwhile = Meanwhile::new().and(decaying(&arena, &clock)).and(emptying(&arena));
    let worker = |number: u64| {
        let arena = arena.clone();
        move || {
            let mut chance = Chance::new(0xD1B5_4A32_D192_ED03 ^ (number << 36));
            for _ in 0..20_000 {
                // All of them together stay within the limit, whole granules as they are.
                let len = (5 + chance.below(4)) * (2 << 20);
                let buffer = arena.alloc::<u8>(len, Region::Dynamic);
                drop(buffer.unwrap_or_else(|error| panic!("{error}")));
            }
        }
    };
    let workers: Vec<_> = (1..=THREADS).map(|number| thread::spawn(worker(number))).collect();
    let outcomes: Vec<_> = workers.into_iter().map(JoinHandle::join).collect();
    meanwhile.end();
    assert!(outcomes.iter().all(Result::is_ok), "{:?}", arena.snapshot());
    let snapshot = arena.snapshot();
    assert!(snapshot.committed_peak <= limit, "{}", snapshot.committed_peak);
    assert_usable(&arena);
}

/// The bug: blocks that a decay took out of a front counted as live again until they were in the
/// books, so that the counters of frees fell.
#[test]
fn counters_never_fell_but_for_a_decay() {
    let (arena, clock) = open_with(config());
    let churn = |arena: &DeviceArena| {
        let arena = arena.clone();
        move || drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"))
    };
    let meanwhile =
        Meanwhile::new().and(decaying(&arena, &clock)).and(churn(&arena)).and(churn(&arena));
    let mut before = arena.snapshot();
    for _ in 0..sample(100_000) {
        let now = arena.snapshot();
        now.validate();
        assert!(now.allocs_total >= before.allocs_total, "{now:?}");
        assert!(now.frees_total >= before.frees_total, "{now:?}");
        assert!(now.thread_cache_allocs_total >= before.thread_cache_allocs_total, "{now:?}");
        assert!(now.live <= ByteSize::mib(2), "each of two threads holds one: {now:?}");
        before = now;
    }
    meanwhile.end();
    assert_usable(&arena);
}

/// The bug: the same blocks kept an arena from being closed in which nothing was live.
#[test]
fn a_decay_kept_an_empty_arena_from_being_closed() {
    for _ in 0..400 {
        let (arena, _) = open_with(config());
        for _ in 0..20 {
            drop(arena.alloc::<u8>(1 << 20, Region::Dynamic).expect("room"));
        }
        let begin = Arc::new(Barrier::new(2));
        let emptying = {
            let (begin, mut empty) = (Arc::clone(&begin), emptying(&arena));
            thread::spawn(move || {
                begin.wait();
                empty();
            })
        };
        begin.wait();
        assert_eq!(arena.close(), Ok(()));
        emptying.join().expect("no panic");
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
        arena.validate();
    }
}

/// The bug: a thread that had looked before got a block of an arena that was closed.
#[test]
fn a_closed_arena_handed_out_a_block() {
    for round in 0..60 {
        let (arena, _) = open_with(config());
        let workers: Vec<_> = (0..3)
            .map(|_| {
                let arena = arena.clone();
                thread::spawn(move || {
                    loop {
                        let taken = if round % 2 == 0 {
                            arena.alloc::<u8>(1 << 20, Region::Dynamic).map(drop)
                        } else {
                            let block = raw(&arena, ByteSize::mib(1), Region::Dynamic);
                            block.and_then(|block| arena.free(block.at)).map(drop)
                        };
                        match taken {
                            Ok(()) => {}
                            Err(DeviceError::Closed { .. }) => break,
                            Err(error) => panic!("{error}"),
                        }
                    }
                })
            })
            .collect();
        while let Err(error) = arena.close() {
            assert!(matches!(error, DeviceError::LiveBlocks { .. }), "{error}");
            // A thread that was refused meanwhile has left: it may have been the last.
            if workers.iter().all(JoinHandle::is_finished) {
                arena.close().expect("nobody holds anything");
            }
        }
        let allocs = arena.snapshot().allocs_total;
        workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
        let snapshot = arena.snapshot();
        assert_eq!((snapshot.allocs_total, snapshot.live), (allocs, ByteSize::ZERO));
        arena.purge().expect("the driver takes it");
        assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
    }
}

/// The bug: of two threads that closed an arena with a live block, the second was told that it
/// was closed.
#[test]
fn the_second_of_two_who_closed_was_told_what_was_not_so() {
    let (arena, _) = open_with(config());
    let held = raw(&arena, ByteSize::mib(1), Region::Dynamic).expect("room");
    let closers: Vec<_> = (0..4)
        .map(|_| {
            let arena = arena.clone();
            thread::spawn(move || (0..500).all(|_| arena.close().is_err()))
        })
        .collect();
    for closer in closers {
        assert!(closer.join().expect("no panic"), "closed with a live block");
    }
    arena.free(held.at).expect("live");
    assert_usable(&arena);
}

#[test]
fn a_reset_and_frees_of_the_same_blocks_free_each_of_them_once() {
    let (arena, _) = open_with(config());
    let (freed, reset) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
    let resetting = {
        let (arena, reset) = (arena.clone(), Arc::clone(&reset));
        move || {
            let bytes = arena.reset().expect("here");
            reset.fetch_add(bytes.get() / 1024, Ordering::Relaxed);
        }
    };
    let meanwhile = Meanwhile::new().and(resetting);
    let workers: Vec<_> = (0..3)
        .map(|_| {
            let (arena, freed) = (arena.clone(), Arc::clone(&freed));
            thread::spawn(move || {
                for _ in 0..1000 {
                    let blocks = [(); 3]
                        .map(|()| raw(&arena, ByteSize::kib(1), Region::Dynamic).expect("room"));
                    // Where the reset was first, the address may be another thread's block by now;
                    // with one size, one block less is one block less.
                    let count = blocks.iter().filter(|block| arena.free(block.at).is_ok()).count();
                    freed.fetch_add(count as u64, Ordering::Relaxed);
                }
            })
        })
        .collect();
    workers.into_iter().for_each(|worker| worker.join().expect("no panic"));
    meanwhile.end();
    reset.fetch_add(arena.reset().expect("here").get() / 1024, Ordering::Relaxed);
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.allocs_total, snapshot.frees_total), (9000, 9000));
    assert_eq!(freed.load(Ordering::Relaxed) + reset.load(Ordering::Relaxed), 9000);
    assert_eq!((snapshot.live, snapshot.requested), Default::default());
    assert_usable(&arena);
}

/// Everything that can be set is set, while threads allocate, resize and free.
#[test]
fn settings_that_change_meanwhile_harm_no_contents_and_no_figure() {
    let (arena, clock) = open_with(ArenaConfig { limit: ByteSize::mib(96), ..config() });
    let setting = {
        let (arena, mut chance) = (arena.clone(), Chance::new(0xBF58_476D_1CE4_E5B9));
        move || match chance.below(7) {
            0 => arena.set_thread_cache(ByteSize::mib(4 * chance.below(5) as u64)),
            1 => arena.set_decay(DecayTime::AtOnce),
            2 => arena.set_decay(DecayTime::Never),
            3 => arena.set_decay(DecayTime::Within(SECOND)),
            4 => drop(arena.trim(ByteSize::mib(chance.below(96) as u64)).expect("taken")),
            5 => arena.set_limit(ByteSize::mib(1 + chance.below(96) as u64)),
            _ => drop(arena.shrink().expect("the driver takes it")),
        }
    };
    let looking = {
        let arena = arena.clone();
        move || arena.snapshot().validate()
    };
    let meanwhile = Meanwhile::new().and(setting).and(looking).and(decaying(&arena, &clock));
    let worker = |number: u64| {
        let arena = arena.clone();
        move || {
            let mut chance = Chance::new(0x94D0_49BB_1331_11EB ^ (number << 34));
            let lease = arena.enter().expect("awake");
            let mut kept: Vec<(u64, Buffer<u64>)> = Vec::new();
            for step in 0..600 {
                let own = (number << 32) | step;
                let len = chance.bits(17);
                let nth = chance.below(kept.len() + 1);
                if nth == kept.len() && nth < 10 {
                    let Ok(mut buffer) = arena.alloc(len, chance.region()) else { continue };
                    mark(&mut buffer, &lease, own);
                    kept.push((own, buffer));
                } else if nth < kept.len() && chance.below(2) == 0 {
                    let (was, buffer) = &mut kept[nth];
                    let before = buffer.len();
                    let stays = if buffer.resize(len).is_ok() { before.min(len) } else { before };
                    assert_marked(buffer, &lease, *was, stays);
                    mark(buffer, &lease, own);
                    *was = own;
                } else if nth < kept.len() {
                    let (was, buffer) = kept.swap_remove(nth);
                    assert_marked(&buffer, &lease, was, buffer.len());
                }
            }
            kept.iter().for_each(|(was, kept)| assert_marked(kept, &lease, *was, kept.len()));
        }
    };
    let workers: Vec<_> = (1..=3).map(|number| thread::spawn(worker(number))).collect();
    let outcomes: Vec<_> = workers.into_iter().map(JoinHandle::join).collect();
    meanwhile.end();
    outcomes.into_iter().for_each(|outcome| outcome.expect("no panic"));
    let snapshot = arena.snapshot();
    assert_eq!((snapshot.live, snapshot.requested, snapshot.leases), Default::default());
    assert_eq!(snapshot.allocs_total, snapshot.frees_total);
    arena.set_limit(ByteSize::mib(96));
    arena.purge().expect("the driver takes it");
    arena.set_decay(DecayTime::AtOnce);
    assert_usable(&arena);
    // `AtOnce` is a promise for what is looked at: one look, and nothing is left.
    arena.decay(clock.now()).expect("the driver takes it");
    assert_eq!(arena.snapshot().committed, ByteSize::ZERO);
}
