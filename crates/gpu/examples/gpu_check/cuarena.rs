//! The six loops of cuArena's own benchmark, on a lane: their costs in device memory and in managed
//! memory.
//!
//! Each round is timed by itself, as there; the clock is part of it. B5 times the allocation after
//! a compaction, B6 the slowest of its three sizes.
//!
//! Invariant: a round frees everything that it allocates before the next.

use std::hint::black_box;
use std::sync::Arc;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions, MemoryKind};
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, Goal, Lane, Region,
};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Rig, float, median, nanos, options, per_mille};

/// Rounds before those that are timed, as there.
const WARM: usize = 50;

/// The subject of the measurement: a lane, the sizes, the clock.
struct Loops<'a> {
    rig: &'a Rig<'a>,
    arena: DeviceArena,
    lane: Lane,
    driver: Arc<CudaDriver>,
    prefix: &'static str,
}

type Block = Buffer<u8>;

/// Both kinds of memory, one after the other.
pub(crate) fn cuarena(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    all(rig, rig.driver.clone(), "gpu.cuarena", report)?;
    let managed = CudaOptions { memory: MemoryKind::Managed, backend: None, ..options(rig.args) };
    match CudaDriver::open(managed) {
        Ok(driver) => all(rig, Arc::new(driver), "gpu.cuarena_managed", report),
        Err(error) => {
            report.line(&format!("managed memory not measured: {error}"));
            Ok(())
        }
    }
}

fn all(
    rig: &Rig<'_>,
    driver: Arc<CudaDriver>,
    prefix: &'static str,
    report: &mut Report<'_>,
) -> Outcome {
    let config = ArenaConfig { decay: DecayTime::Never, ..ArenaConfig::new("cuarena") };
    let clock: Arc<dyn Clock> = rig.clock.clone();
    let arena = DeviceArena::open(driver.clone(), clock, config)?;
    let lane = rig.lane(&arena)?;
    let loops = Loops { rig, arena: arena.clone(), lane, driver, prefix };
    loops.measure(report)?;
    drop(loops);
    Ok(arena.close()?)
}

impl Loops<'_> {
    fn measure(&self, report: &mut Report<'_>) -> Outcome {
        let (kib, mib) = (1 << 10, 1 << 20);
        self.figures(report, "b1", &self.rounds(|| self.timed(&[8 * mib]))?);
        self.figures(report, "b2", &self.rounds(|| self.timed(&[kib; 512]))?);
        let live = self.blocks(&[mib; 4])?;
        self.figures(report, "b3", &self.rounds(|| self.timed(&[mib]))?);
        drop(live);
        let doubled: [usize; 8] = std::array::from_fn(|nth| mib << nth);
        self.figures(report, "b4", &self.rounds(|| self.one_by_one(&doubled))?);
        self.figures(report, "b5", &self.rounds(|| self.after_compaction(32 * mib))?);
        let sizes = [256, 256 * kib, 2 * mib].map(|size| self.rounds(|| self.timed(&[size])));
        let sizes: Vec<Rounds> = sizes.into_iter().collect::<Result<_, _>>()?;
        let slowest = sizes.iter().max_by(|one, two| one.median().total_cmp(&two.median()));
        self.figures(report, "b6", slowest.ok_or("no sizes")?);
        Ok(())
    }

    /// As many rounds as are wanted, after some that are not timed.
    fn rounds(&self, mut round: impl FnMut() -> Result<f64, Fault>) -> Result<Rounds, Fault> {
        for _ in 0..WARM.min(self.rig.args.cuarena_rounds) {
            round()?;
        }
        let before = self.driver.calls_made();
        let rounds = (0..self.rig.args.cuarena_rounds).map(|_| round());
        let micros = rounds.collect::<Result<Vec<_>, _>>()?;
        Ok(Rounds { micros, calls: self.driver.calls_made() - before })
    }

    /// Microseconds to take blocks of these sizes and to free them all.
    fn timed(&self, sizes: &[usize]) -> Result<f64, Fault> {
        let (took, ()) = self.rig.timed(|| {
            drop(black_box(self.blocks(sizes)?));
            Ok::<_, DeviceError>(())
        })?;
        Ok(nanos(took) / 1e3)
    }

    /// Microseconds to take and free blocks of these sizes, one after the other.
    fn one_by_one(&self, sizes: &[usize]) -> Result<f64, Fault> {
        let pairs =
            || sizes.iter().try_for_each(|&size| self.block(size).map(|of| drop(black_box(of))));
        Ok(nanos(self.rig.timed(pairs)?.0) / 1e3)
    }

    /// Microseconds to allocate a block of the size of two that were freed separately, after a
    /// compaction made room.
    fn after_compaction(&self, size: usize) -> Result<f64, Fault> {
        let all = self.blocks(&[size; 8])?.into_iter().enumerate();
        let blocks: Vec<_> = all.filter(|(nth, _)| nth % 2 == 1).collect();
        let goal = Goal::Contiguous(ByteSize::of(2 * size / self.rig.args.cuarena_part));
        let options = CompactOptions { goal, ..CompactOptions::new(Region::Dynamic) };
        self.arena.compact(options, |_| {})?;
        let (took, block) = self.rig.timed(|| self.block(2 * size))?;
        drop((block, blocks));
        Ok(nanos(took) / 1e3)
    }

    fn blocks(&self, sizes: &[usize]) -> Result<Vec<Block>, DeviceError> {
        sizes.iter().map(|&size| self.block(size)).collect()
    }

    fn block(&self, size: usize) -> Result<Block, DeviceError> {
        self.lane.alloc((size / self.rig.args.cuarena_part).max(1), Region::Dynamic)
    }

    fn figures(&self, report: &mut Report<'_>, name: &str, rounds: &Rounds) {
        let name = format!("{}.{name}", self.prefix);
        let (middle, late) = (rounds.median(), per_mille(&rounds.micros, 999));
        report.figure(&format!("{name}.median_us"), middle, "us");
        report.figure(&format!("{name}.p999_us"), late, "us");
        report.figure(&format!("{name}.max_us"), per_mille(&rounds.micros, 1_000), "us");
        report.figure(&format!("{name}.driver_calls"), float(rounds.calls), "calls in all rounds");
        report.figure(&format!("{name}.p999_over_median"), late / middle, "times");
    }
}

/// The times of the rounds of one loop.
struct Rounds {
    micros: Vec<f64>,
    calls: u64,
}

impl Rounds {
    fn median(&self) -> f64 {
        median(&self.micros)
    }
}
