//! The work that every peer does, and its timing.
//!
//! The mix picks a slot by chance, frees the block in it or puts one of chance size there. What
//! chance costs is never timed; what the clock itself costs is measured and taken off.
//!
//! Invariant: a slot holds a live block or none; a failed allocation leaves it empty.
#![expect(unsafe_code, reason = "`rlsf` takes blocks back by their address")]

use std::alloc::Layout;
use std::hint::black_box;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Barrier, Mutex, PoisonError};
use std::time::Instant;

use common::figures::{Figures, median};
use common::peers::Peer;
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::index::{BlockId, BlockIndex, End, Request};
use lowtide_gpu::{ArenaConfig, Buffer, ByteSize, DeviceArena, HostDriver, Region};

use common::chance::Chance;

pub(crate) const MIB: u64 = 1 << 20;
pub(crate) const GIB: u64 = 1 << 30;

/// The pool of every run.
pub(crate) const POOL: u64 = 64 * GIB;
pub(crate) const SEEDS: [u64; 3] = [42, 7, 1234];
/// Blocks that are live at first in the mix, about 78 % of the pool, of twice as many slots.
pub(crate) const MIX_LIVE: usize = 10_000;
/// The same at about 90 % of the pool.
pub(crate) const LOAD90_LIVE: usize = 11_600;
/// Operations at 90 %: about half of them allocate.
pub(crate) const LOAD90_STEPS: usize = 300_000;

/// The slots of a mix.
pub(crate) struct Mix<H> {
    pub(crate) slots: Vec<Option<H>>,
    chance: Chance,
    pub(crate) failures: u64,
}

impl<H> Mix<H> {
    /// Twice as many slots as live blocks; the first half is filled.
    pub(crate) fn filled<P: Peer<Handle = H>>(peer: &mut P, seed: u64, live: usize) -> Self {
        let mut mix = Self { slots: Vec::new(), chance: Chance::new(seed), failures: 0 };
        for _ in 0..live {
            let size = mix.chance.size();
            mix.slots.push(peer.alloc(size));
        }
        mix.slots.resize_with(live * 2, || None);
        mix
    }

    /// Plays steps.
    pub(crate) fn play<P: Peer<Handle = H>>(&mut self, peer: &mut P, steps: usize) {
        for _ in 0..steps {
            let slot = self.chance.below(self.slots.len());
            match self.slots[slot].take() {
                Some(block) => peer.free(block),
                None => {
                    let block = peer.alloc(self.chance.size());
                    self.failures += u64::from(block.is_none());
                    self.slots[slot] = block;
                }
            }
        }
    }

    /// Plays steps; nanoseconds of each, the clock's own taken off.
    pub(crate) fn timed<P: Peer<Handle = H>>(&mut self, peer: &mut P, steps: usize) -> Vec<f64> {
        let nanos = Vec::with_capacity(steps);
        let mut timed = Timed { peer, clock: clock_nanos(), nanos };
        self.play(&mut timed, steps);
        timed.nanos
    }
}

/// Notes the time of each operation of a peer.
struct Timed<'a, P> {
    peer: &'a mut P,
    clock: f64,
    nanos: Vec<f64>,
}

impl<P: Peer> Peer for Timed<'_, P> {
    type Handle = P::Handle;

    fn alloc(&mut self, bytes: u64) -> Option<P::Handle> {
        let start = Instant::now();
        let block = self.peer.alloc(bytes);
        self.nanos.push((start.elapsed().as_nanos() as f64 - self.clock).max(0.0));
        block
    }

    fn free(&mut self, block: P::Handle) {
        let start = Instant::now();
        self.peer.free(block);
        self.nanos.push((start.elapsed().as_nanos() as f64 - self.clock).max(0.0));
    }
}

/// Returns the lower quartile of the times that two reads of the clock take.
fn clock_nanos() -> f64 {
    let each: Vec<_> = (0..2001).map(|_| Instant::now().elapsed().as_nanos() as f64).collect();
    common::figures::quantile(&each, 0.25)
}

/// Median nanoseconds of a pair of 8 MiB in which nothing else is live.
pub(crate) fn pair<P: Peer>(peer: &mut P) -> f64 {
    const EACH: u32 = 1_000;
    let mut batch = || {
        let start = Instant::now();
        for _ in 0..EACH {
            let block = peer.alloc(8 * MIB).map(black_box);
            block.into_iter().for_each(|block| peer.free(block));
        }
        start.elapsed().as_nanos() as f64 / f64::from(EACH)
    };
    median(&(0..200).map(|_| batch()).collect::<Vec<_>>())
}

/// Failures of a mix at 90 % of the pool.
pub(crate) fn load90<P: Peer>(mut peer: P, seed: u64) -> f64 {
    let mut mix = Mix::filled(&mut peer, seed, LOAD90_LIVE);
    mix.failures = 0;
    mix.play(&mut peer, LOAD90_STEPS);
    mix.failures as f64
}

// The pools that are compared: the block index and `rlsf`.
//
// Invariant: a pool outlives its blocks.

/// The block index over a fixed pool, every block towards its low end.
#[derive(Debug)]
pub(crate) struct Ours(pub(crate) BlockIndex);

impl Ours {
    pub(crate) fn new(capacity: u64) -> Self {
        Self(BlockIndex::new(capacity))
    }
}

const fn request(size: u64) -> Request {
    Request { size, align: 256, end: End::Low }
}

impl Peer for Ours {
    type Handle = BlockId;

    fn alloc(&mut self, bytes: u64) -> Option<BlockId> {
        self.0.take(request(bytes), |_| 0).map(|(id, _)| id)
    }

    fn free(&mut self, block: BlockId) {
        assert!(self.0.release(block).is_some(), "a block is freed once");
    }
}

/// The crate `rlsf`: two-level segregated fit with headers in the blocks.
///
/// Headers in the blocks mean that it cannot manage memory that the processor cannot write to, so
/// it gets host memory and sizes of 1/256. Its times compare; its failures do not.
pub(crate) struct Tlsf(rlsf::Tlsf<'static, u32, u32, 28, 32>);

impl Tlsf {
    const SCALE: u64 = 256;

    /// An empty pool that stands for so many bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        let size = usize::try_from(capacity / Self::SCALE).unwrap_or(usize::MAX);
        let mut inner = rlsf::Tlsf::new();
        let _ = inner.insert_free_block(Box::leak(Box::new_uninit_slice(size)));
        Self(inner)
    }
}

impl Peer for Tlsf {
    type Handle = NonNull<u8>;

    fn alloc(&mut self, bytes: u64) -> Option<NonNull<u8>> {
        let size = usize::try_from((bytes / Self::SCALE).max(1)).ok()?;
        self.0.allocate(Layout::from_size_align(size, 1).ok()?)
    }

    fn free(&mut self, block: NonNull<u8>) {
        // SAFETY: the block was allocated with this alignment by `alloc`, from this allocator, and
        // a bench frees each block once.
        unsafe { self.0.deallocate(block, 1) };
    }
}

/// Takes a number for a block and keeps nothing: what the bench itself costs.
pub(crate) struct Nobody;

impl Peer for Nobody {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        Some(black_box(bytes))
    }

    fn free(&mut self, block: u64) {
        black_box(block);
    }
}

// The whole arena through its public API, over the host driver: pairs, threads, virtual memory.
//
// No block is ever viewed, so that no page of it is touched. What is asked: what a pair costs and
// whether it calls the driver; whether two threads that use the same few sizes hold each other up;
// and whether an arena under a limit fails where only its granules, not its addresses, are short.
//
// Two threads are compared with one by what each of them does in a given wall time, beside a loop
// that allocates nothing: two threads of a machine are slower than one whatever they do.

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
pub(crate) fn arena(figures: &mut Figures, is_counted: bool) {
    pairs(figures);
    two_threads(figures, is_counted);
    arena_load90(figures);
}

fn pairs(figures: &mut Figures) {
    let mut arena = Arena::open(ByteSize::MAX);
    pair(&mut arena); // commits, and the size becomes one that the caches keep
    let before = arena.driver_calls();
    figures.timed("arena.pair.median_ns", pair(&mut arena), "ns", 60.0);
    let calls = arena.driver_calls() - before;
    figures.at_most("arena.pair.driver_calls", calls as f64, "calls", 0.0);
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

fn two_threads(figures: &mut Figures, is_counted: bool) {
    let (walls, contended) = walls(&Arena::open(ByteSize::MAX).0);
    let [ours, own] = walls.each_ref().map(|[one, two]| {
        median(&one.iter().zip(two).map(|(one, two)| two / one).collect::<Vec<_>>())
    });
    if !is_counted {
        // Documents state it, and it is a ratio of times.
        figures.at_most("arena.two_threads.wall_ratio_over_loop", ours / own, "ratio", 1.15);
    }
    figures.at_most("arena.two_threads.contended_locks", contended as f64, "locks", 0.0);
}

fn arena_load90(figures: &mut Figures) {
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
    figures.at_most("arena.virtual.load90.failures", failures as f64, "failures", 0.0);
    figures.at_most("arena.virtual.load90.active_per_live.worst", worst, "ratio", 1.03);
    figures.add("arena.virtual.load90.active_per_live.end", end, "ratio");
}
