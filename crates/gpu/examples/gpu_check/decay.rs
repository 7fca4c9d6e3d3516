//! A burst that ends and the release of its memory, while one thread continues to allocate.
//!
//! One thread calls `DeviceArena::decay` every 10 ms; another times a small allocation
//! and its free every few microseconds. The released memory is measured by the driver, not by the
//! arena.
//!
//! Invariant: a sample is steady, or overlaps the time of a release, or neither.

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{DeviceArena, Lane, Region};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Rig, blocks, float, nanos, quantile};

/// The time between two samples.
const PACE: Duration = Duration::from_micros(5);

/// The time between two calls of the decay.
const LOOK: Duration = Duration::from_millis(10);

/// A period from its start to its end.
type Span = (Moment, Moment);

pub(crate) fn decay(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (args, block) = (rig.args, rig.args.block);
    let size = rig.fitting(args.decay_size, block)?;
    let time = DecayTime::from_duration(args.decay_time);
    let arena = rig.arena("decay", ByteSize::MAX, time)?;
    let lane = rig.lane(&arena)?;
    let before = rig.headroom()?;
    let burst = blocks(&lane, size, block)?;
    let high = rig.headroom()?;
    let taken = before.saturating_sub(high);
    report.figure("gpu.decay.burst_bytes", taken.as_f64(), "bytes");
    drop(burst);
    let ended = AtomicBool::new(false);
    let (returned, samples) = thread::scope(|scope| -> Result<_, Fault> {
        let looker = scope.spawn(|| {
            let returned = give_back(rig, &arena, (high, taken));
            ended.store(true, Ordering::Relaxed);
            returned
        });
        let samples = sample(rig, &lane, &ended);
        Ok((looker.join().map_err(|_| "the releasing thread panicked")??, samples?))
    })?;
    let (headroom, busy, took) = returned;
    let back = headroom.saturating_sub(high);
    report.figure("gpu.decay.returned_ratio", back.as_f64() / taken.as_f64(), "of the burst");
    report.figure("gpu.decay.seconds", took.as_secs_f64(), "s");
    latencies(&samples, busy, report);
    drop(lane);
    rig.settle(&arena)?;
    Ok(arena.close()?)
}

/// Calls the decay until nearly all is back or the time is over. Returns the headroom at the end,
/// the period from the first call that released memory to the end of the last, and the time taken.
fn give_back(
    rig: &Rig<'_>,
    arena: &DeviceArena,
    (high, taken): (ByteSize, ByteSize),
) -> Result<(ByteSize, Option<Span>, Duration), Fault> {
    let (clock, mut busy) = (&rig.clock, None);
    let start = clock.now();
    let headroom = rig.poll(rig.args.decay_within, LOOK, || {
        let from = clock.now();
        if !arena.decay(from)?.released.is_zero() {
            busy = Some((busy.map_or(from, |(first, _)| first), clock.now()));
        }
        let headroom = rig.headroom()?;
        Ok((headroom.saturating_sub(high) >= taken.scaled(0.99), headroom))
    })?;
    Ok((headroom, busy, clock.now() - start))
}

/// Times pairs until `ended` is set.
fn sample(rig: &Rig<'_>, lane: &Lane, ended: &AtomicBool) -> Result<Vec<Span>, Fault> {
    let clock = &rig.clock;
    let len = rig.pair_len()?;
    let mut samples = Vec::new();
    let mut next = clock.now();
    while !ended.load(Ordering::Relaxed) {
        let start = clock.now();
        if start < next {
            hint::spin_loop();
            continue;
        }
        drop(lane.alloc::<u8>(len, Region::Dynamic)?);
        samples.push((start, clock.now()));
        next = start + PACE;
    }
    Ok(samples)
}

fn latencies(samples: &[Span], busy: Option<Span>, report: &mut Report<'_>) {
    let (mut steady, mut during) = (Vec::new(), Vec::new());
    let Some((first, last)) = busy else {
        return report.line("gpu.decay.p99_ratio: not measured, no memory was released");
    };
    for &(start, end) in samples {
        if end <= first {
            steady.push(nanos(end - start));
        } else if start <= last {
            during.push(nanos(end - start));
        }
    }
    let (calm, at_work) = (quantile(&steady, 99), quantile(&during, 99));
    report.figure("gpu.decay.steady_p99_ns", calm, "ns");
    report.figure("gpu.decay.during_p99_ns", at_work, "ns");
    report.figure("gpu.decay.samples_during", float(during.len()), "samples");
    report.figure("gpu.decay.p99_ratio", at_work / calm, "times");
}
