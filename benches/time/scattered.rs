//! Live blocks scattered over granules: what a purge alone gives back, and what compaction does.
//!
//! No block is viewed, so that nothing is touched but what compaction copies. Each figure is the
//! worst of the seeds.

use std::sync::Arc;

use lowtide::{BoxError, ByteSize};
use lowtide_gpu::clock::ManualClock;
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, HostDriver, Region,
};

use crate::chance::Chance;
use crate::common::figures::Figures;

/// Blocks that are allocated, of which nine in ten are freed.
const BLOCKS: usize = 10_000;
const KEPT: usize = BLOCKS / 10;
/// The size of small blocks.
const SMALL: usize = 64 << 10;
/// The bytes that one call to compact may move.
const BUDGET: ByteSize = ByteSize::mib(64);
/// Calls to compact at most.
const CALLS_MAX: usize = 1_000;
/// Owners that allocate by turns, of whom one stays: 1 of 4, as where an idle instance kept 8.9 GiB
/// for 2.2 GiB of live blocks.
const OWNERS: usize = 4;
const OWNED: usize = 4_500;

/// All figures of scattered blocks.
pub(crate) fn measure(seeds: &[u64], figures: &mut Figures) -> Result<(), BoxError> {
    let mut worst = Worst::default();
    for &seed in seeds {
        random90(seed, &mut worst)?;
        random90_64k(seed, &mut worst)?;
        owners(seed, &mut worst)?;
    }
    for (name, value) in worst.0 {
        let unit = if name.ends_with("_bytes") { "bytes" } else { "ratio" };
        figures.add(name, value, unit);
    }
    Ok(())
}

/// The largest value of each figure, in the order they came in.
#[derive(Default)]
struct Worst(Vec<(&'static str, f64)>);

impl Worst {
    fn note(&mut self, name: &'static str, value: f64) {
        match self.0.iter_mut().find(|(other, _)| *other == name) {
            Some((_, worst)) => *worst = worst.max(value),
            None => self.0.push((name, value)),
        }
    }
}

fn open() -> Result<DeviceArena, DeviceError> {
    let clock = Arc::new(ManualClock::new());
    DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("scattered"))
}

/// 256 B to 64 MiB, evenly by logarithm.
fn random90(seed: u64, worst: &mut Worst) -> Result<(), BoxError> {
    let (arena, mut chance) = (open()?, Chance::new(seed));
    let mut blocks = Vec::with_capacity(BLOCKS);
    for _ in 0..BLOCKS {
        let len = usize::try_from(chance.size())?;
        blocks.push(arena.alloc::<u8>(len, Region::Dynamic)?);
    }
    let before = arena.glance().committed.as_f64();
    thin(&mut blocks, &mut chance);
    arena.purge()?;
    worst.note("purge.random90.committed_per_live", committed_per_live(&arena));
    let kept_all = before / arena.glance().live.as_f64();
    worst.note("purge.random90.keep_all.committed_per_live", kept_all);
    Ok(())
}

/// All of one size that many share a granule of.
fn random90_64k(seed: u64, worst: &mut Worst) -> Result<(), BoxError> {
    let (arena, mut chance) = (open()?, Chance::new(seed));
    let blocks: Result<Vec<_>, _> =
        (0..BLOCKS).map(|_| arena.alloc::<u8>(SMALL, Region::Dynamic)).collect();
    let mut blocks = blocks?;
    thin(&mut blocks, &mut chance);
    arena.purge()?;
    worst.note("purge.random90_64k.committed_per_live", committed_per_live(&arena));
    let moved = compact(&arena)?;
    worst.note("compact.random90_64k.committed_per_live", committed_per_live(&arena));
    worst.note("compact.random90_64k.moved_bytes", moved.as_f64());
    Ok(())
}

/// Several owners fill granules by turns of chance; then all but one free what they have.
fn owners(seed: u64, worst: &mut Worst) -> Result<(), BoxError> {
    for (stays_in, name) in [
        (Region::Dynamic, "purge.scattered.committed_per_live"),
        (Region::Stable, "purge.scattered.stable_region.committed_per_live"),
    ] {
        let (arena, mut chance) = (open()?, Chance::new(seed));
        let (mut stays, mut goes) = (Vec::new(), Vec::new());
        while stays.len() < OWNED {
            let owner = chance.below(OWNERS);
            let region = if owner == 0 { stays_in } else { Region::Dynamic };
            let block = arena.alloc::<u8>(SMALL, region)?;
            if owner == 0 { &mut stays } else { &mut goes }.push(block);
        }
        drop(goes);
        arena.purge()?;
        worst.note(name, committed_per_live(&arena));
        if stays_in == Region::Dynamic {
            let moved = compact(&arena)?;
            worst.note("compact.scattered.committed_per_live", committed_per_live(&arena));
            worst.note("compact.scattered.moved_bytes", moved.as_f64());
        }
    }
    Ok(())
}

/// Frees all but one in ten, by chance.
fn thin(blocks: &mut Vec<Buffer<u8>>, chance: &mut Chance) {
    while blocks.len() > KEPT {
        let nth = chance.below(blocks.len());
        drop(blocks.swap_remove(nth));
    }
}

/// Compacts a bit at a time until nothing is to be gained, then purges; returns what was moved.
fn compact(arena: &DeviceArena) -> Result<ByteSize, BoxError> {
    let options = CompactOptions { budget: BUDGET, ..CompactOptions::new(Region::Dynamic) };
    let mut moved = ByteSize::ZERO;
    for _ in 0..CALLS_MAX {
        let done = arena.compact(options, |_| {})?;
        moved = moved.saturating_add(done.moved);
        if done.moves == 0 {
            arena.purge()?;
            return Ok(moved);
        }
    }
    Err("compaction finds no end".into())
}

fn committed_per_live(arena: &DeviceArena) -> f64 {
    let glance = arena.glance();
    glance.committed.as_f64() / glance.live.as_f64()
}
