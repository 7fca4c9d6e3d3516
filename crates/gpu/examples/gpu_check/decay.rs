//! A burst that ends and the release of its memory, while one thread continues to allocate.
//!
//! One thread calls `DeviceArena::decay` at the times it returns; another times a small allocation
//! and its free every few microseconds. The released memory is measured by the driver, not by the
//! arena.
//!
//! Invariant: a sample is steady, or overlaps the time of a release, or neither.

use std::hint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Bell, Clock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{DeviceArena, Lane, Region};

use super::cases::{Fault, Outcome};
use super::pairs::nanos;
use super::report::Report;
use super::rig::{Rig, blocks, float, quantile};

/// The time between two samples.
const PACE: Duration = Duration::from_micros(5);

/// The longest time between two polls.
const LOOK: Duration = Duration::from_millis(50);

/// A period from its start to its end.
type Span = (Moment, Moment);

/// The observations of the releasing thread.
struct Returned {
    /// The headroom at the end.
    headroom: ByteSize,
    /// From the first call that released memory to the end of the last.
    busy: Option<Span>,
    took: Duration,
}

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
        let returned = looker.join().map_err(|_| "the releasing thread panicked")?;
        Ok((returned?, samples?))
    })?;
    let back = returned.headroom.saturating_sub(high);
    report.figure("gpu.decay.returned_ratio", back.as_f64() / taken.as_f64(), "of the burst");
    report.figure("gpu.decay.seconds", returned.took.as_secs_f64(), "s");
    latencies(&samples, returned.busy, report);
    drop(lane);
    rig.settle(&arena)?;
    Ok(arena.close()?)
}

/// Calls the decay until nearly all is back or the time is over.
fn give_back(
    rig: &Rig<'_>,
    arena: &DeviceArena,
    (high, taken): (ByteSize, ByteSize),
) -> Result<Returned, Fault> {
    let (clock, bell) = (&rig.clock, Bell::new());
    let start = clock.now();
    let end = start + rig.args.decay_within;
    let mut busy: Option<Span> = None;
    loop {
        let from = clock.now();
        let decayed = arena.decay(from)?;
        let now = clock.now();
        if !decayed.released.is_zero() {
            busy = Some((busy.map_or(from, |(first, _)| first), now));
        }
        let headroom = rig.headroom()?;
        let enough = headroom.saturating_sub(high) >= taken.scaled(0.99);
        if enough || now >= end {
            return Ok(Returned { headroom, busy, took: now - start });
        }
        // No other thread rings this bell: the wait ends by time alone.
        clock.wait_until(&bell, decayed.next.min(now + LOOK).min(end));
    }
}

/// Times pairs until `ended` is set.
fn sample(rig: &Rig<'_>, lane: &Lane, ended: &AtomicBool) -> Result<Vec<Span>, Fault> {
    let clock = &rig.clock;
    let len =
        rig.args.pair_size.as_usize().ok_or("the size of the pairs exceeds the address range")?;
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
    report.figure("gpu.decay.samples_during", float(during.len() as u64), "samples");
    report.figure("gpu.decay.p99_ratio", at_work / calm, "times");
}
