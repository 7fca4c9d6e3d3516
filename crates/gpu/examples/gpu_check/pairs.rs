//! An allocation and its free: alone, with a view, by cudarc, by the driver's own calls, from many
//! threads.
//!
//! Pairs are timed many at once, since the clock costs as much as one. No work is queued.
//!
//! Invariant: every pair of a batch is of one size, which was warm before the first batch.

use std::hint::black_box;
use std::sync::Barrier;
use std::thread;

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::Clock;
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{Lane, Region};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Rig, float, median, nanos, plain, raw_pair, stream};

/// Pairs before the first that is timed.
const WARM: usize = 100;

/// Pairs of one lane, against cudarc's.
pub(crate) fn pair(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let arena = rig.arena("pairs", ByteSize::MAX, DecayTime::Never)?;
    let lane = rig.lane(&arena)?;
    let len = rig.pair_len()?;
    warm(|| bare(&lane, len))?;
    let before = rig.driver.calls_made();
    let ours = batches(rig, || bare(&lane, len))?;
    let calls = rig.driver.calls_made() - before;
    report.figure("gpu.pair.median_ns", ours, "ns");
    report.figure("gpu.pair.driver_calls", float(calls), "calls in all pairs");
    let with_view = batches(rig, || {
        let buffer = lane.alloc::<u8>(len, Region::Dynamic)?;
        let lease = lane.enter()?;
        black_box(buffer.cuda(&lease)?.len());
        Ok(())
    })?;
    report.figure("gpu.pair_with_view.median_ns", with_view, "ns");
    let other = rig.context.new_stream()?;
    let slice = || {
        drop(black_box(plain::<u8>(&other, len)?));
        Ok(())
    };
    let raw = || raw_pair(&other, len);
    rig.context.bind_to_thread()?;
    for (name, pair) in [("async", &slice as &dyn Fn() -> Outcome), ("raw_async", &raw)] {
        warm(pair)?;
        let theirs = batches(rig, pair)?;
        other.synchronize()?;
        report.figure(&format!("gpu.pair.{name}_median_ns"), theirs, "ns");
        report.figure(&format!("gpu.pair.speedup_over_{name}"), theirs / ours, "times");
    }
    stream(&lane)?.synchronize()?;
    drop(lane);
    Ok(arena.close()?)
}

/// Makes the pairs before the first that is timed.
fn warm(one: impl Fn() -> Outcome) -> Outcome {
    (0..WARM).try_for_each(|_| one())
}

fn bare(lane: &Lane, len: usize) -> Outcome {
    drop(black_box(lane.alloc::<u8>(len, Region::Dynamic)?));
    Ok(())
}

/// Nanoseconds of one, by the median of the batches.
fn batches(rig: &Rig<'_>, mut one: impl FnMut() -> Outcome) -> Result<f64, Fault> {
    let mut costs = Vec::with_capacity(rig.args.batches);
    for _ in 0..rig.args.batches {
        let (took, ()) = rig.timed(|| (0..rig.args.pairs).try_for_each(|_| one()))?;
        costs.push(nanos(took) / float(rig.args.pairs));
    }
    Ok(median(&costs))
}

/// Pairs of many threads at once, against those of one.
pub(crate) fn lanes(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let arena = rig.arena("lanes", ByteSize::MAX, DecayTime::Never)?;
    let lanes: Vec<Lane> =
        (0..rig.args.threads).map(|_| rig.lane(&arena)).collect::<Result<_, _>>()?;
    let (mut alone, mut together) = (Vec::new(), Vec::new());
    for _ in 0..rig.args.repetitions {
        alone.push(throughput(rig, &lanes[..1])?);
        together.push(throughput(rig, &lanes)?);
    }
    let (alone, together) = (median(&alone), median(&together));
    report.figure("gpu.lanes.one_thread_pairs_per_s", alone, "1/s");
    report.figure("gpu.lanes.all_threads_pairs_per_s", together, "1/s");
    report.figure("gpu.lanes.threads", float(rig.args.threads), "threads");
    let cores = thread::available_parallelism().map_or(1, usize::from);
    report.figure("gpu.lanes.cores", float(cores), "cores");
    // The name says sixteen: with another number it is no figure of that goal.
    let name = format!("gpu.lanes{}.throughput_ratio", rig.args.threads);
    report.figure(&name, together / alone, "times");
    drop(lanes);
    Ok(arena.close()?)
}

/// Pairs a second of threads that begin together, each on its own lane.
fn throughput(rig: &Rig<'_>, lanes: &[Lane]) -> Result<f64, Fault> {
    let begin = Barrier::new(lanes.len());
    let len = rig.pair_len()?;
    let pairs = rig.args.pairs.saturating_mul(rig.args.batches);
    let (begin, clock) = (&begin, &rig.clock);
    let work = move |lane: &Lane| -> Result<_, Fault> {
        let warm = warm(|| bare(lane, len));
        // Every thread comes here, whatever befell it.
        begin.wait();
        warm?;
        let start = clock.now();
        (0..pairs).try_for_each(|_| bare(lane, len))?;
        Ok((start, clock.now()))
    };
    let spans = thread::scope(|scope| {
        let all: Vec<_> = lanes.iter().map(|lane| scope.spawn(move || work(lane))).collect();
        let ended = all.into_iter().map(|one| one.join().map_err(|_| "a thread panicked")?);
        ended.collect::<Result<Vec<_>, Fault>>()
    })?;
    let start = spans.iter().map(|span| span.0).min().ok_or("no thread")?;
    let end = spans.iter().map(|span| span.1).max().ok_or("no thread")?;
    let done = pairs.saturating_mul(lanes.len());
    Ok(float(done) / (end - start).as_secs_f64())
}
