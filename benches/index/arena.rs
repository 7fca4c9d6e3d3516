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

use common::figures::{Figures, median};
use common::peers::Peer;
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, HostDriver, Region};

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
}

/// All figures of the arena.
pub(crate) fn measure(figures: &mut Figures) {
    pairs(figures);
    two_threads(figures);
    load90(figures);
}

fn pairs(figures: &mut Figures) {
    let mut arena = Arena::open(ByteSize::MAX);
    work::pair(&mut arena); // commits, and the size becomes one that the caches keep
    let before = arena.driver_calls();
    figures.add("arena.pair.median_ns", work::pair(&mut arena), "ns");
    figures.add("arena.pair.driver_calls", (arena.driver_calls() - before) as f64, "calls");
    let mut arena = Arena::open(ByteSize::MAX);
    let mut mix = Mix::filled(&mut arena, SEEDS[0], MIX_LIVE);
    figures.add("arena.random_mix.median_ns", median(&mix.timed(&mut arena, ROUND)), "ns");
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

/// Wall nanoseconds of each round, on the arena and of the loop, of one thread and of two; and how
/// many locks were found taken once the threads had begun.
fn walls(arena: &DeviceArena) -> ([[Vec<f64>; 2]; 2], u64) {
    let (barrier, warm) = (Barrier::new(2), AtomicU64::new(0));
    let rounds = || {
        let kinds = (0..=ROUNDS).flat_map(|round| [(round, 0), (round, 1)]);
        kinds.flat_map(|(round, kind)| [(round, kind, 1), (round, kind, 2)])
    };
    // The same two threads for all rounds; the second sits out those of one.
    let run = |first: bool| {
        let time = |(round, kind, threads)| {
            barrier.wait();
            if first && round <= 1 {
                // The sizes get hot, and the threads find homes: what was taken then is no matter.
                warm.store(arena.snapshot().lock_contended_total, Ordering::Relaxed);
            }
            barrier.wait();
            let start = Instant::now();
            if first || threads == 2 {
                if kind == 0 { turns(arena) } else { own_loop() }
            }
            start.elapsed().as_nanos() as f64
        };
        rounds().map(time).collect::<Vec<_>>()
    };
    let mut found = <[[Vec<f64>; 2]; 2]>::default();
    let (mine, others) = std::thread::scope(|scope| {
        let other = scope.spawn(|| run(false));
        (run(true), other.join().unwrap_or_default())
    });
    for (((round, kind, threads), mine), other) in rounds().zip(mine).zip(others) {
        if round > 0 {
            found[kind][threads - 1].push(mine.max(other));
        }
    }
    (found, arena.snapshot().lock_contended_total - warm.into_inner())
}

fn two_threads(figures: &mut Figures) {
    let (walls, contended) = walls(&Arena::open(ByteSize::MAX).0);
    let [ours, own] = walls.each_ref().map(|[one, two]| {
        median(&one.iter().zip(two).map(|(one, two)| two / one).collect::<Vec<_>>())
    });
    figures.add("arena.two_threads.wall_ratio_over_loop", ours / own, "ratio");
    figures.add("arena.two_threads.contended_locks", contended as f64, "locks");
}

fn load90(figures: &mut Figures) {
    let (mut failures, mut worst, mut end) = (0, 0.0_f64, 0.0_f64);
    for seed in SEEDS {
        let mut arena = Arena::open(ByteSize::gib(64));
        arena.0.set_decay(DecayTime::Never);
        let mut mix = Mix::filled(&mut arena, seed, LOAD90_LIVE);
        for _ in 0..LOAD90_STEPS / 1_000 {
            mix.play(&mut arena, 1_000);
            let snapshot = arena.0.snapshot();
            end = snapshot.active.as_f64() / snapshot.live.as_f64();
            worst = worst.max(end);
        }
        failures += mix.failures;
    }
    figures.add("arena.virtual.load90.failures", failures as f64, "failures");
    figures.add("arena.virtual.load90.active_per_live.worst", worst, "ratio");
    figures.add("arena.virtual.load90.active_per_live.end", end, "ratio");
}
