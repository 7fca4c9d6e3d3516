//! The six loops of cuArena's own benchmark, on a lane: their costs in device memory and in managed
//! memory.
//!
//! Each round is timed by itself, as there; the clock is part of it. B5 times the allocation after
//! a compaction, B6 the slowest of its three sizes.
//!
//! Invariant: a round frees everything that it allocates before the next.
#![expect(clippy::disallowed_methods, reason = "a benchmark reads the clock")]

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
use lowtide_gpu::{ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, Lane, Region};

use super::cases::Outcome;
use super::report::Report;
use super::rig::{Rig, float, median, options, quantile};

/// Rounds before those that are timed, as there.
const WARM: usize = 50;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// The subject of the measurement, and a divisor of the sizes.
pub(crate) struct Loops<'a> {
    pub(crate) arena: &'a DeviceArena,
    pub(crate) lane: &'a Lane,
    pub(crate) part: usize,
}

/// A round of a loop, which returns its microseconds.
type Round = fn(&Loops<'_>) -> Result<f64, DeviceError>;

/// The loops, in the order in which they run.
pub(crate) const LOOPS: [(&str, Round); 8] = [
    ("b1", |it| it.together(&[8 * MIB])),
    ("b2", |it| it.together(&[KIB; 512])),
    ("b3", |it| it.together(&[MIB])),
    ("b4", |it| it.one_by_one(&std::array::from_fn::<_, 8, _>(|nth| MIB << nth))),
    ("b5", |it| it.after_compaction(32 * MIB)),
    ("b6", |it| it.together(&[256])),
    ("b6", |it| it.together(&[256 * KIB])),
    ("b6", |it| it.together(&[2 * MIB])),
];

impl Loops<'_> {
    /// Allocates blocks of these sizes and frees them all.
    fn together(&self, sizes: &[usize]) -> Result<f64, DeviceError> {
        micros(|| self.blocks(sizes).map(|all| drop(black_box(all))))
    }

    /// Allocates and frees blocks of these sizes, one after the other.
    fn one_by_one(&self, sizes: &[usize]) -> Result<f64, DeviceError> {
        micros(|| sizes.iter().try_for_each(|&size| self.block(size).map(|of| drop(black_box(of)))))
    }

    /// Allocates a block of the size of two that were freed separately, after a compaction made
    /// room.
    fn after_compaction(&self, size: usize) -> Result<f64, DeviceError> {
        let all = self.blocks(&[size; 8])?.into_iter().enumerate();
        let kept: Vec<_> = all.filter(|(nth, _)| nth % 2 == 1).collect();
        let contiguous = Some(ByteSize::of(2 * size / self.part));
        let options = CompactOptions { contiguous, ..CompactOptions::new(Region::Dynamic) };
        self.arena.compact(options, |_| {})?;
        let mut block = None;
        let took = micros(|| {
            block = Some(self.block(2 * size)?);
            Ok(())
        });
        drop((block, kept));
        took
    }

    fn blocks(&self, sizes: &[usize]) -> Result<Vec<Buffer<u8>>, DeviceError> {
        sizes.iter().map(|&size| self.block(size)).collect()
    }

    fn block(&self, size: usize) -> Result<Buffer<u8>, DeviceError> {
        self.lane.alloc((size / self.part).max(1), Region::Dynamic)
    }
}

fn micros(act: impl FnOnce() -> Result<(), DeviceError>) -> Result<f64, DeviceError> {
    let start = Instant::now();
    act()?;
    Ok(start.elapsed().as_secs_f64() * 1e6)
}

/// Both kinds of memory, one after the other.
pub(crate) fn cuarena(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    all(rig, rig.driver.clone(), "gpu.cuarena", report)?;
    let managed = CudaOptions { managed: true, backend: None, ..options(rig.args) };
    match CudaDriver::open(managed) {
        Ok(driver) => all(rig, Arc::new(driver), "gpu.cuarena_managed", report),
        Err(error) => {
            report.line(&format!("managed memory not measured: {error}"));
            Ok(())
        }
    }
}

fn all(rig: &Rig<'_>, driver: Arc<CudaDriver>, prefix: &str, report: &mut Report<'_>) -> Outcome {
    let config = ArenaConfig { decay: DecayTime::Never, ..ArenaConfig::new("cuarena") };
    let clock: Arc<dyn Clock> = rig.clock.clone();
    let arena = DeviceArena::open(driver.clone(), clock, config)?;
    let lane = rig.lane(&arena)?;
    let loops = Loops { arena: &arena, lane: &lane, part: rig.args.cuarena_part };
    let mut slowest = (0.0, Vec::new(), 0);
    for (name, round) in LOOPS {
        // B3 has four live blocks beside it.
        let live = if name == "b3" { loops.blocks(&[MIB; 4])? } else { Vec::new() };
        let rounds = |count| (0..count).map(|_| round(&loops)).collect::<Result<Vec<_>, _>>();
        rounds(WARM.min(rig.args.cuarena_rounds))?;
        let before = driver.calls_made();
        let took = rounds(rig.args.cuarena_rounds)?;
        let found = (median(&took), took, driver.calls_made() - before);
        drop(live);
        if name == "b6" {
            if found.0 >= slowest.0 {
                slowest = found;
            }
        } else {
            write(report, &format!("{prefix}.{name}"), &found);
        }
    }
    write(report, &format!("{prefix}.b6"), &slowest);
    drop(lane);
    Ok(arena.close()?)
}

fn write(report: &mut Report<'_>, name: &str, (middle, micros, calls): &(f64, Vec<f64>, u64)) {
    let late = quantile(micros, 999);
    report.figure(&format!("{name}.median_us"), *middle, "us");
    report.figure(&format!("{name}.p999_us"), late, "us");
    report.figure(&format!("{name}.max_us"), quantile(micros, 1_000), "us");
    report.figure(&format!("{name}.driver_calls"), float(*calls), "calls in all rounds");
    report.figure(&format!("{name}.p999_over_median"), late / middle, "times");
}
