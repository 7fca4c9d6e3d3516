//! The work that every peer does, and its timing.
//!
//! The mix picks a slot by chance, frees the block in it or puts one of chance size there. What
//! chance costs is never timed; what the clock itself costs is measured and taken off.
//!
//! Invariant: a slot holds a live block or none; a failed allocation leaves it empty.
use std::hint::black_box;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Barrier};
use std::time::Instant;

use common::figures::{Figures, median, quantile};
use common::process::kernel_value;
use lowtide_gpu::clock::{ManualClock, SystemClock};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::index::{BlockId, BlockIndex, End, Request};
use lowtide_gpu::{ArenaConfig, Buffer, ByteSize, DeviceArena, HostDriver, Region};
use offset_allocator::{Allocation, Allocator};

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

/// A block allocator over offsets.
pub(crate) trait Peer {
    /// A handle by which a live block is freed.
    type Handle;

    /// A block of at least so many bytes, or `None` where it finds no room. `bytes > 0`.
    fn alloc(&mut self, bytes: u64) -> Option<Self::Handle>;

    /// Frees a live block.
    fn free(&mut self, block: Self::Handle);
}

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
    quantile(&each, 0.25)
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

// The pools that are compared: the block index, and the crate `offset-allocator`.
//
// Invariant: a pool outlives its blocks.

/// Every block lies towards the low end.
impl Peer for BlockIndex {
    type Handle = BlockId;

    fn alloc(&mut self, size: u64) -> Option<BlockId> {
        self.take(Request { size, align: 256, end: End::Low }, |_| 0).map(|(id, _)| id)
    }

    fn free(&mut self, block: BlockId) {
        assert!(self.release(block).is_some(), "a block is freed once");
    }
}

/// The units of `offset-allocator`, whose offsets have 32 bits. It rounds requests up to a bin and
/// never looks into the bin below.
const UNIT: u64 = 256;

/// The crate `offset-allocator` over the pool, told to be ready for its default of blocks, free ones
/// counted.
pub(crate) fn offset() -> Allocator {
    Allocator::with_max_allocs(u32::try_from(POOL / UNIT).unwrap_or(u32::MAX), 1 << 17)
}

impl Peer for Allocator {
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u64) -> Option<Allocation> {
        self.allocate(u32::try_from(bytes.div_ceil(UNIT)).ok()?)
    }

    fn free(&mut self, block: Allocation) {
        self.free(block);
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
/// Operations of a thread in one round.
const ROUND: usize = 200_000;
/// Rounds of both threads.
const ROUNDS: usize = 15;
/// The sizes that the threads use: two layers' activations and two small ones.
const HOT: [usize; 4] = [6 << 10, 256 << 10, 1 << 20, 4 << 20];

/// Opens an arena. Time stands still: what went idle stays until the limit or the bench asks for it.
fn open(limit: ByteSize) -> DeviceArena {
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let config = ArenaConfig { limit, ..ArenaConfig::new("bench") };
    DeviceArena::open(driver, clock, config).expect("address space")
}

impl Peer for DeviceArena {
    type Handle = Buffer<u8>;

    fn alloc(&mut self, size: u64) -> Option<Buffer<u8>> {
        Self::alloc(self, usize::try_from(size).ok()?, Region::Dynamic).ok()
    }

    fn free(&mut self, block: Buffer<u8>) {
        drop(block);
    }
}

/// All figures of the arena.
pub(crate) fn arena(figures: &mut Figures) {
    pairs(figures);
    two_threads(figures);
    arena_load90(figures);
}

fn pairs(figures: &mut Figures) {
    let mut arena = open(ByteSize::MAX);
    pair(&mut arena); // commits, and the size becomes one that the caches keep
    let before = arena.snapshot();
    figures.timed("arena.pair.median_ns", pair(&mut arena), "ns", 60.0);
    let after = arena.snapshot();
    let calls = [&after, &before].map(|of| of.commits_total + of.decommits_total);
    figures.at_most("arena.pair.driver_calls", (calls[0] - calls[1]) as f64, "calls", 0.0);
    let mut arena = open(ByteSize::MAX);
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

/// How many locks were found taken by two threads that use the same sizes, once those are hot and
/// the threads have homes.
fn two_threads(figures: &mut Figures) {
    let arena = open(ByteSize::MAX);
    let (barrier, warm) = (Barrier::new(2), AtomicU64::new(0));
    let run = || {
        for round in 0..=ROUNDS {
            if barrier.wait().is_leader() && round <= 1 {
                warm.store(arena.snapshot().lock_contended_total, Ordering::Relaxed);
            }
            barrier.wait();
            turns(&arena);
        }
    };
    std::thread::scope(|scope| {
        scope.spawn(run);
        run();
    });
    let contended = arena.snapshot().lock_contended_total - warm.into_inner();
    figures.at_most("arena.two_threads.contended_locks", contended as f64, "locks", 0.0);
}

fn arena_load90(figures: &mut Figures) {
    let (mut failures, mut worst, mut end) = (0, 0.0_f64, 0.0_f64);
    for seed in SEEDS {
        let mut arena = open(ByteSize::gib(64));
        arena.set_decay(DecayTime::Never);
        let mut mix = Mix::filled(&mut arena, seed, LOAD90_LIVE);
        for _ in 0..LOAD90_STEPS / 1_000 {
            mix.play(&mut arena, 1_000);
            let snapshot = arena.snapshot();
            end = snapshot.active.as_f64() / snapshot.live.as_f64();
            worst = worst.max(end);
        }
        failures += mix.failures;
    }
    figures.at_most("arena.virtual.load90.failures", failures as f64, "failures", 0.0);
    figures.at_most("arena.virtual.load90.active_per_live.worst", worst, "ratio", 1.03);
    figures.add("arena.virtual.load90.active_per_live.end", end, "ratio");
}

// An allocation that its arena's limit rejects, beside many free blocks that are too small.

/// Returns an arena at its limit that has so many free blocks of 8 KiB, a multiple of 128, and the
/// live ones between them, in both ranges of addresses. Its clock runs: a failure plans a
/// compaction only now and then.
fn full(free: usize) -> (DeviceArena, Vec<Option<Buffer<u8>>>) {
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(SystemClock::new()));
    let [limit, reserve] = [16, 32].map(|kib| ByteSize::kib(kib * free as u64));
    let thread_cache = ByteSize::ZERO;
    let config = ArenaConfig { limit, reserve, thread_cache, ..ArenaConfig::new("full") };
    let arena = DeviceArena::open(driver, clock, config).expect("address space");
    let mut blocks: Vec<_> =
        (0..2 * free).map(|_| arena.alloc(8 << 10, Region::Dynamic).ok()).collect();
    blocks.iter_mut().step_by(2).for_each(|block| *block = None);
    (arena, blocks)
}

/// Makes allocations that fail beside so many free blocks.
pub(crate) fn fail(free: usize, steps: usize) {
    let (mut arena, _live) = full(free);
    (0..steps).for_each(|_| assert!(Peer::alloc(&mut arena, 4 * MIB).is_none(), "there is room"));
}

/// What a failed allocation costs at a million free blocks, and what it costs another thread; and the
/// resident memory of a block, whose own is never touched.
pub(crate) fn failed(figures: &mut Figures) {
    let resident = || kernel_value("/proc/self/smaps_rollup", "Rss:").unwrap_or(0) as f64 * 1024.0;
    let before = resident();
    let (mut arena, live) = full(1 << 20);
    let each = (resident() - before) / live.len() as f64 - size_of_val(&live[0]) as f64;
    figures.add("light.metadata.bytes_per_block", each, "bytes");
    let (failing, is_over) = (arena.clone(), AtomicBool::new(false));
    let mut timed = Timed { peer: &mut arena, clock: clock_nanos(), nanos: Vec::new() };
    (0..1_000).for_each(|_| assert!(timed.alloc(4 * MIB).is_none(), "there is room"));
    figures.timed("light.fail.us", median(&timed.nanos) / 1e3, "us", 20.0);
    timed.nanos.clear();
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !is_over.load(Ordering::Relaxed) {
                let failed = failing.alloc::<u8>(4 << 20, Region::Dynamic);
                assert!(failed.is_err(), "there is room");
            }
        });
        (0..20).for_each(|_| drop((0..1_000).map(|_| timed.alloc(4 << 10)).collect::<Vec<_>>()));
        is_over.store(true, Ordering::Relaxed);
    });
    let bystander = quantile(&timed.nanos, 0.99) / 1e3;
    figures.timed("light.fail.bystander_p99_us", bystander, "us", 50.0);
}
