//! The whole arena through its public API, over the host driver: pairs, threads, virtual memory.
//!
//! No block is ever viewed, so that no page of it is touched. What is asked: what a pair costs and
//! whether it calls the driver; whether two threads that use the same few sizes hold each other up;
//! and whether an arena under a limit fails where only its granules, not its addresses, are short.
//!
//! Two threads are compared with one by what each of them does in a given wall time, beside a loop
//! that allocates nothing: two threads of a machine are slower than one whatever they do.

use std::hint::black_box;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Instant;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, HostDriver, Region};

use crate::common::figures::{Figures, median};
use crate::peers::Peer;
use crate::work::{self, LOAD90_LIVE, LOAD90_STEPS, MIX_LIVE, Mix, SEEDS};

/// Operations of a thread in one round.
const ROUND: usize = 200_000;
/// Rounds of each kind, in turn.
const ROUNDS: usize = 15;
/// The sizes that the threads use: two layers' activations and two small ones.
const HOT: [usize; 4] = [6 << 10, 256 << 10, 1 << 20, 4 << 20];

/// An arena as a peer.
struct Arena(DeviceArena);

impl Arena {
    /// Time stands still: what went idle stays until the limit or the bench asks for it.
    fn open(limit: ByteSize) -> Self {
        let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
        let config = ArenaConfig { limit, ..ArenaConfig::new("bench") };
        Self(DeviceArena::open(driver, clock, config).expect("address space"))
    }

    fn driver_calls(&self) -> u64 {
        let snapshot = self.0.snapshot();
        snapshot.commits_total + snapshot.decommits_total
    }
}

impl Peer for Arena {
    type Handle = Buffer<u8>;

    fn alloc(&mut self, size: u64) -> Option<Buffer<u8>> {
        self.0.alloc(usize::try_from(size).ok()?, Region::Dynamic).ok()
    }

    fn free(&mut self, block: Buffer<u8>) {
        drop(block);
    }

    fn taken(&self) -> u64 {
        self.0.glance().committed.get()
    }

    fn largest_free(&self) -> u64 {
        self.0.snapshot().largest_free.get()
    }

    fn live(&self) -> u64 {
        self.0.glance().live.get()
    }
}

/// All figures of the arena.
pub(crate) fn measure(figures: &mut Figures) {
    pairs(figures);
    two_threads(figures);
    load90(figures);
}

fn pairs(figures: &mut Figures) {
    for (name, front) in [("arena", None), ("arena.without_front", Some(ByteSize::ZERO))] {
        let mut arena = Arena::open(ByteSize::MAX);
        if let Some(front) = front {
            arena.0.set_thread_cache(front);
        }
        // Commits what the loops need; the second time, what the caches keep of all of them.
        for _ in 0..2 {
            let _ = work::loops(&mut arena);
        }
        let before = arena.driver_calls();
        let [pair, batch, ping_pong, chain] = work::loops(&mut arena);
        figures.add(format!("{name}.pair.median_ns"), pair, "ns");
        figures.add(format!("{name}.batch_1kib.median_ns"), batch, "ns");
        figures.add(format!("{name}.ping_pong_1mib.median_ns"), ping_pong, "ns");
        figures.add(format!("{name}.chain.median_ns"), chain, "ns");
        let calls = arena.driver_calls() - before;
        figures.add(format!("{name}.pair.driver_calls"), calls as f64, "calls");
    }
    let mut arena = Arena::open(ByteSize::MAX);
    let mut mix = Mix::filled(&mut arena, SEEDS[0], MIX_LIVE);
    let nanos = mix.timed(ROUND, |todo| work::act(&mut arena, todo));
    figures.add("arena.random_mix.median_ns".to_owned(), work::permille(&nanos, 500) as f64, "ns");
    figures.add("arena.random_mix.p999_ns".to_owned(), work::permille(&nanos, 999) as f64, "ns");
}

/// Runs a thread's round: each buffer in turn is given up for a new one of its size.
fn turns(arena: &DeviceArena) {
    let alloc = |size: usize| arena.alloc::<u8>(size, Region::Dynamic).ok();
    let mut held: Vec<_> = HOT.iter().map(|&size| alloc(size)).collect();
    for turn in 0..ROUND {
        let nth = turn % HOT.len();
        held[nth] = None;
        held[nth] = black_box(alloc(HOT[nth]));
    }
}

/// The loop beside it, which allocates nothing and shares nothing: the atomic operations of a turn
/// (two locks) on what is this thread's own, and arithmetic for the rest.
/// Were it arithmetic alone, it would not show what two threads of one core cost each other.
fn own_loop() {
    let own = Mutex::new([1_u64; 16]);
    for turn in 0..ROUND {
        for half in 0..2 {
            let mut held = own.lock().unwrap_or_else(PoisonError::into_inner);
            let nth = (turn + half) % 8;
            let (one, other) = (held[nth], held[nth + 8]);
            held[nth] = one.rotate_left(7) ^ other.wrapping_mul(0x9E37_79B9_7F4A_7C15);
            held[nth + 8] = other.wrapping_add(one >> 3);
        }
        black_box(&own);
    }
}

/// The cases that are compared.
#[derive(Clone, Copy)]
enum Kind {
    /// Both threads on one arena.
    Shared,
    /// The loop that allocates nothing.
    Loop,
    /// Each thread on an arena of its own.
    Apart,
}

impl Kind {
    const ALL: [Self; 3] = [Self::Shared, Self::Loop, Self::Apart];

    fn play(self, shared: &DeviceArena, own: &DeviceArena) {
        match self {
            Self::Shared => turns(shared),
            Self::Loop => own_loop(),
            Self::Apart => turns(own),
        }
    }
}

/// Wall nanoseconds for each turn, by kind and by the number of threads less one; and how many
/// locks were found taken once the threads had begun.
fn walls(arena: &DeviceArena) -> ([[Vec<f64>; 2]; 3], u64) {
    let (barrier, warm) = (Barrier::new(2), AtomicU64::new(0));
    let rounds: Vec<_> = (0..=ROUNDS)
        .flat_map(|round| Kind::ALL.map(|kind| (round, kind)))
        .flat_map(|(round, kind)| [1, 2].map(|threads| (round, kind, threads)))
        .collect();
    // The same two threads for all rounds; the second sits out those of one.
    let run = |first: bool| {
        let own = Arena::open(ByteSize::MAX).0;
        let time = |&(round, kind, threads): &(usize, Kind, usize)| {
            barrier.wait();
            if first && round <= 1 {
                // The sizes get hot, and the threads find homes: what was taken then is no matter.
                warm.store(arena.snapshot().lock_contended_total, Ordering::Relaxed);
            }
            barrier.wait();
            let start = Instant::now();
            if first || threads == 2 {
                kind.play(arena, &own);
            }
            start.elapsed().as_nanos() as f64 / ROUND as f64
        };
        rounds.iter().map(time).collect::<Vec<_>>()
    };
    let mut found = <[[Vec<f64>; 2]; 3]>::default();
    let (mine, others) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(false));
        (run(true), other.join().unwrap_or_default())
    });
    for ((&(round, kind, threads), mine), other) in rounds.iter().zip(mine).zip(others) {
        if round > 0 {
            found[kind as usize][threads - 1].push(mine.max(other));
        }
    }
    (found, arena.snapshot().lock_contended_total - warm.into_inner())
}

fn two_threads(figures: &mut Figures) {
    let arena = Arena::open(ByteSize::MAX).0;
    let (walls, contended) = walls(&arena);
    let ratio = |[one, two]: &[Vec<f64>; 2]| {
        median(&one.iter().zip(two).map(|(one, two)| two / one).collect::<Vec<_>>())
    };
    let [ours, own, apart] = walls.each_ref().map(ratio);
    let mut add = |name: &str, value: f64, unit| {
        figures.add(format!("arena.two_threads.{name}"), value, unit);
    };
    add("one_thread_ns", median(&walls[0][0]), "ns");
    add("wall_ns", median(&walls[0][1]), "ns");
    add("wall_ratio", ours, "ratio");
    add("loop_wall_ratio", own, "ratio");
    add("apart_wall_ratio", apart, "ratio");
    add("wall_ratio_over_loop", ours / own, "ratio");
    add("contended_locks", contended as f64, "locks");
}

fn load90(figures: &mut Figures) {
    let (mut failures, mut worst, mut end) = (0, 0.0_f64, 0.0_f64);
    for seed in SEEDS {
        let mut arena = Arena::open(ByteSize::gib(64));
        arena.0.set_decay(DecayTime::Never);
        let mut mix = Mix::filled(&mut arena, seed, LOAD90_LIVE);
        for _ in 0..LOAD90_STEPS / 1_000 {
            mix.play(&mut arena, 1_000);
            end = active_per_live(&arena);
            worst = worst.max(end);
        }
        failures += mix.failures;
    }
    figures.add("arena.virtual.load90.failures".to_owned(), failures as f64, "failures");
    figures.add("arena.virtual.load90.active_per_live.worst".to_owned(), worst, "ratio");
    figures.add("arena.virtual.load90.active_per_live.end".to_owned(), end, "ratio");
}

fn active_per_live(arena: &Arena) -> f64 {
    let snapshot = arena.0.snapshot();
    snapshot.active.as_f64() / snapshot.live.as_f64()
}
