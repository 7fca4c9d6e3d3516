//! Random programs against the law of refusals: while the active granules and those that a request
//! needs are within the limit, it is never refused for memory, whatever the addresses look like.
//!
//! One thread at a time is judged exactly: a refusal is right only if at no end of any free span
//! the block would have fitted, by the addresses of all blocks right after it. Several threads are
//! judged by the figures of the error, which are those of the moment of the refusal.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::thread;

use lowtide_cuda_sim::{Order, SimDriver, sample};
use lowtide_gpu::ByteSize;
use lowtide_gpu::driver::Driver as _;
use lowtide_gpu::{
    ArenaConfig, Bound, Buffer, CompactOptions, DeviceArena, DeviceError, Growth, HostDriver, Lane,
    RawBlock, Region,
};

use super::{Chance, config, device};

const ALIGN: u64 = 256;

/// The state of a random program.
struct Program {
    arena: DeviceArena,
    /// None over the host driver.
    sim: Option<Arc<SimDriver>>,
    lanes: Vec<Lane>,
    held: Vec<Buffer<u8>>,
    raw: Vec<RawBlock>,
    chance: Chance,
    limit: ByteSize,
    granule: ByteSize,
    reserve: ByteSize,
    refused: u64,
    exact: bool,
}

impl Program {
    fn size(&mut self) -> usize {
        let top = self.limit.get().ilog2();
        let bits = 9 + self.chance.below(u64::from(top) - 9);
        usize::try_from(1 + self.chance.below(2 << bits)).expect("small")
    }

    fn step(&mut self) {
        let region = Region::ALL[usize::from(self.chance.below(3) > 0)];
        match self.chance.below(20) {
            0..=8 => self.alloc(region),
            9..=13 if !self.held.is_empty() => {
                let nth = self.chance.index(self.held.len());
                drop(self.held.swap_remove(nth));
            }
            14 if !self.held.is_empty() => {
                let nth = self.chance.index(self.held.len());
                let len = self.size();
                let mut buffer = self.held.swap_remove(nth);
                if let Err(error) = buffer.resize(len) {
                    self.judge(&error, None);
                }
                self.held.push(buffer);
            }
            15 => {
                let limit = self.limit.get() / (1 + self.chance.below(2));
                self.arena.set_limit(ByteSize::new(limit));
            }
            16 => match self.chance.below(4) {
                0 => drop(self.arena.purge().expect("no error")),
                1 => drop(self.arena.shrink().expect("no error")),
                _ => drop(self.arena.trim(ByteSize::new(self.limit.get() / 2)).expect("no error")),
            },
            17 if !self.raw.is_empty() => {
                let nth = self.chance.index(self.raw.len());
                let block = self.raw.swap_remove(nth);
                self.arena.free(block.at).expect("live");
            }
            18 if self.chance.below(8) == 0 => {
                self.arena.compact(CompactOptions::new(region), |_| {}).expect("no error");
            }
            _ => {
                if let Some(sim) = &self.sim {
                    sim.advance(self.chance.index(8));
                }
            }
        }
    }

    fn alloc(&mut self, region: Region) {
        let len = self.size();
        let size = ByteSize::new(len as u64);
        let mut align = ALIGN;
        let outcome = match self.chance.below(8) {
            0 => {
                align = self.granule.get();
                self.arena.reserve(len, region)
            }
            1 => {
                align = 1 << self.chance.below(1 + u64::from(self.granule.get().ilog2()));
                match self.arena.alloc_raw(size, ByteSize::new(align), region) {
                    Ok(block) => return self.raw.push(block),
                    Err(error) => Err(error),
                }
            }
            2..=5 if !self.lanes.is_empty() => {
                let nth = self.chance.index(self.lanes.len());
                self.lanes[nth].alloc(len, region)
            }
            _ => self.arena.alloc(len, region),
        };
        match outcome {
            Ok(buffer) => self.held.push(buffer),
            Err(error) => self.judge(&error, Some((region, align.max(ALIGN)))),
        }
    }

    /// Asserts that a refusal was right. For a resize it checks only the rules of every refusal.
    fn judge(&mut self, error: &DeviceError, block: Option<(Region, u64)>) {
        self.refused += 1;
        let granule = self.granule;
        match *error {
            DeviceError::OutOfMemory { requested, active, limit, bound, .. } => {
                assert_eq!(bound, Bound::Limit, "{error}");
                let needed = requested.next_multiple_of(granule).expect("small");
                assert!(active.saturating_add(needed) > limit, "{error}");
                if self.exact
                    && let Some((region, align)) = block
                {
                    self.judge_exactly(error, region, requested.get(), align);
                }
            }
            DeviceError::OutOfAddresses { requested, largest_span, compacted_span, .. } => {
                assert!(compacted_span >= largest_span, "{error}");
                let align = block.map_or(0, |(_, align)| align);
                assert!(largest_span.get() < requested.get() + align, "{error}");
            }
            DeviceError::TooLarge { largest, .. } => assert!(largest < self.limit, "{error}"),
            _ => panic!("{error}"),
        }
    }

    /// Returns the first and the last offset of every block of a region, in address order.
    fn live_spans(&self, region: Region) -> Vec<(u64, u64)> {
        let map = self.arena.occupancy(usize::MAX).remove(region.number());
        let held = self.held.iter().filter(|buffer| buffer.region() == region);
        let held = held.filter_map(|buffer| {
            let lease = buffer.enter().expect("awake");
            let inside = buffer.address(&lease).expect("ours")?.checked_add(ByteSize::new(1))?;
            match self.arena.raw_block(inside) {
                Err(DeviceError::InteriorAddress { block, size, .. }) => {
                    Some((block.get(), block.get() + size.get()))
                }
                found => panic!("{found:?}"),
            }
        });
        let raw = self.raw.iter().filter(|block| block.region == region);
        let raw = raw.map(|block| (block.at.get(), block.at.get() + block.size.get()));
        let mut spans: Vec<_> = held.chain(raw).collect();
        spans.sort_unstable();
        assert_eq!(spans.len() as u64, map.blocks, "every block is known");
        // A cell is within a granule, to which the first address of the region is aligned.
        let cell = map.cell.get();
        let first = map.cells.iter().find(|(_, [live, ..])| !live.is_zero());
        let base = spans.first().map_or(0, |(start, _)| start / cell * cell)
            - first.map_or(0, |(nth, _)| nth * cell);
        spans.into_iter().map(|(start, end)| (start - base, end - base)).collect()
    }

    /// Looks at both ends of every free span.
    fn judge_exactly(&self, error: &DeviceError, region: Region, size: u64, align: u64) {
        let snapshot = self.arena.snapshot();
        assert!(snapshot.pending.is_zero() && snapshot.cached.is_zero(), "{snapshot:?}");
        let granule = self.granule.get();
        let spans = self.live_spans(region);
        let touched = |granule_at: u64| {
            let nth = spans.partition_point(|&(_, end)| end <= granule_at);
            spans.get(nth).is_some_and(|&(start, _)| start < granule_at + granule)
        };
        let end = snapshot.regions[region.number()].reserved.get();
        let walled = end > self.reserve.get();
        let wall =
            if walled { (self.reserve.get(), self.reserve.get() + granule) } else { (end, end) };
        let mut free = Vec::new();
        let mut from = 0;
        for &(start, stop) in spans.iter().chain([&(end, end)]) {
            for (low, high) in [(from, start.min(wall.0)), (from.max(wall.1), start)] {
                if low < high {
                    free.push((low, high));
                }
            }
            from = stop;
        }
        let limit = self.arena.limit().get();
        for (low, high) in free {
            if low >= wall.1 && size >= 1 << 20 {
                continue; // where small blocks are
            }
            let starts = [low.next_multiple_of(align), high.saturating_sub(size) / align * align];
            for start in starts.into_iter().filter(|start| *start >= low && start + size <= high) {
                let granules = start / granule..(start + size).div_ceil(granule);
                let more = granules.filter(|at| !touched(at * granule)).count() as u64;
                let needs = snapshot.active.get() + more * granule;
                assert!(needs > limit, "{error}: it fits at {start:#x}, {needs} of {limit}");
            }
        }
    }
}

fn growth(seed: u64) -> Growth {
    match seed % 3 {
        0 => Growth::NextPowerOfTwo {
            initial: ByteSize::kib(64),
            after_shrink: ByteSize::kib(128),
            cap: ByteSize::mib(1),
        },
        _ => Growth::SameAsRequested,
    }
}

/// A program of one thread, or one of several that share an arena.
fn over_device(seed: u64, threads: u64) -> (DeviceArena, Arc<SimDriver>, ByteSize) {
    let granule = ByteSize::kib(64);
    let order = if seed.is_multiple_of(2) { Order::Lazy } else { Order::Random { seed } };
    let sim = device(|options| {
        options.order = order;
        options.granularity = granule;
        options.handle_min = granule;
        options.remap = !seed.is_multiple_of(5);
    });
    let limit = ByteSize::new(ByteSize::mib(2).get() * threads + seed * 4096 % 65536);
    let reserve = if seed.is_multiple_of(7) { ByteSize::mib(3) } else { ByteSize::gib(1) };
    // Idle memory in a large handle that a block touches is not available, so refusals are exact
    // only with small handles.
    let handle_max = ByteSize::ZERO;
    let config = ArenaConfig { reserve, handle_max, growth: growth(seed), ..config(limit) };
    let arena = super::on_device(&sim, config);
    (arena, sim, reserve)
}

fn program(arena: &DeviceArena, sim: &Arc<SimDriver>, reserve: ByteSize, seed: u64) -> Program {
    Program {
        arena: arena.clone(),
        sim: Some(Arc::clone(sim)),
        lanes: Vec::new(),
        held: Vec::new(),
        raw: Vec::new(),
        chance: Chance(seed),
        limit: arena.limit(),
        granule: ByteSize::kib(64),
        reserve,
        refused: 0,
        exact: false,
    }
}

#[test]
fn one_thread_is_refused_only_where_the_block_would_fit_nowhere() {
    let mut refused = 0;
    let seeds = sample(60);
    for seed in 0..seeds {
        println!("seed {seed}");
        let (arena, sim, reserve) = over_device(seed, 1);
        let mut program = program(&arena, &sim, reserve, seed);
        program.exact = true;
        let stream = || sim.stream_create().expect("a stream");
        program.lanes = (0..3).map(|_| super::remap::lane_of(&arena, stream())).collect();
        for _ in 0..600 {
            program.step();
            assert!(arena.glance().committed <= program.limit);
        }
        arena.validate();
        refused += program.refused;
        drop(program);
        arena.reset().expect("here");
        arena.close().expect("nothing is live");
        drop(arena);
        let leaks = sim.leaks();
        assert_eq!((leaks.handles, leaks.reservations), (0, 0), "seed {seed}: {leaks:?}");
        sim.assert_no_faults();
    }
    println!("{refused} refused");
    assert!(refused > 15 * seeds, "too tame: {refused}");
}

#[test]
fn one_thread_with_a_front_is_refused_only_where_the_block_would_fit_nowhere() {
    let mut refused = 0;
    for seed in 0..sample(60) {
        println!("seed {seed}");
        let limit = ByteSize::mib(64);
        let config = ArenaConfig { growth: growth(seed), ..config(limit) };
        let reserve = config.reserve;
        let clock = Arc::new(lowtide_gpu::clock::ManualClock::new());
        let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config).expect("open");
        let mut program = Program {
            arena: arena.clone(),
            sim: None,
            lanes: Vec::new(),
            held: Vec::new(),
            raw: Vec::new(),
            chance: Chance(seed),
            limit,
            granule: ByteSize::mib(2),
            reserve,
            refused: 0,
            exact: true,
        };
        (0..600).for_each(|_| program.step());
        arena.validate();
        refused += program.refused;
    }
    println!("{refused} refused");
    assert!(refused > 100, "too tame: {refused}");
}

#[test]
fn threads_are_refused_only_beyond_the_limit_by_the_errors_own_figures() {
    let refused = AtomicU64::new(0);
    let seeds = sample(60);
    for seed in 0..seeds {
        println!("seed {seed}");
        let (arena, sim, reserve) = over_device(seed, 4);
        thread::scope(|scope| {
            for thread in 0..4 {
                let mut program = program(&arena, &sim, reserve, seed << 8 | thread);
                program
                    .lanes
                    .push(super::remap::lane_of(&arena, sim.stream_create().expect("one")));
                let refused = &refused;
                scope.spawn(move || {
                    (0..300).for_each(|_| program.step());
                    refused.fetch_add(program.refused, Relaxed);
                    for block in std::mem::take(&mut program.raw) {
                        program.arena.free(block.at).expect("live");
                    }
                });
            }
        });
        arena.validate();
        arena.trim(ByteSize::MAX).expect("no error");
        arena.close().expect("nothing is live");
        drop(arena);
        assert_eq!(sim.leaks().handles, 0, "seed {seed}");
        sim.assert_no_faults();
    }
    let refused = refused.into_inner();
    println!("{refused} refused");
    assert!(refused > 20 * seeds, "too tame: {refused}");
}
