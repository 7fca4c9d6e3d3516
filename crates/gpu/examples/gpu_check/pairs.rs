//! An allocation and its free: alone, with a view, by cudarc, by the driver's own calls, from many
//! threads, while a burst's memory is released, and by cudarc from a governed pool.
//!
//! Pairs are timed many at once, since the clock costs as much as one. No work is queued.
//!
//! Invariants: every pair of a batch is of one size, which was warm before the first batch. The
//! device's current pool is restored afterwards.
#![expect(unsafe_code, reason = "the driver's own calls")]

use std::hint::{self, black_box};
use std::sync::Barrier;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use cudarc::driver::result;
use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::driver::cuda::{DeviceChoice, PoolGovernor};
use lowtide_gpu::{DeviceArena, Lane, Region};

use super::cases::{Fault, Outcome};
use super::report::Report;
use super::rig::{Rig, blocks, float, median, nanos, plain, quantile, stream};

/// Pairs before the first that is timed.
const WARM: usize = 100;

/// The time between two samples during a release.
const PACE: Duration = Duration::from_micros(5);

/// The time between two calls of the decay.
const LOOK: Duration = Duration::from_millis(10);

/// A period from its start to its end.
type Span = (Moment, Moment);

/// Pairs of one lane, against cudarc's.
pub(crate) fn pair(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (arena, lane) = rig.arena("pairs", ByteSize::MAX, DecayTime::Never)?;
    let len = rig.pair_len()?;
    let batches = |one: &dyn Fn() -> Outcome| -> Result<f64, Fault> {
        let batch = || rig.timed(|| (0..rig.args.pairs).try_for_each(|_| one()));
        let all = (0..rig.args.batches).map(|_| Ok(nanos(batch()?.0) / float(rig.args.pairs)));
        Ok(median(&all.collect::<Result<Vec<_>, Fault>>()?))
    };
    warm(&|| bare(&lane, len))?;
    let before = rig.driver.calls_made();
    let ours = batches(&|| bare(&lane, len))?;
    let calls = rig.driver.calls_made() - before;
    report.figure("gpu.pair.median_ns", ours, "ns");
    report.figure("gpu.pair.driver_calls", float(calls), "calls in all pairs");
    let with_view = batches(&|| {
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
    // `cuMemAllocAsync` and `cuMemFreeAsync`, and nothing else.
    let raw = || {
        // SAFETY: the stream is alive; the contents are never read.
        let at = unsafe { result::malloc_async(other.cu_stream(), len) }?;
        // SAFETY: allocated above, freed once, in the order of the same stream.
        Ok(unsafe { result::free_async(at, other.cu_stream()) }?)
    };
    rig.context.bind_to_thread()?;
    for (name, pair) in [("async", &slice as &dyn Fn() -> Outcome), ("raw_async", &raw)] {
        warm(pair)?;
        let theirs = batches(pair)?;
        other.synchronize()?;
        report.figure(&format!("gpu.pair.{name}_median_ns"), theirs, "ns");
        report.figure(&format!("gpu.pair.speedup_over_{name}"), theirs / ours, "times");
    }
    stream(&lane)?.synchronize()?;
    drop(lane);
    Ok(arena.close()?)
}

/// Makes the pairs before the first that is timed.
fn warm(one: &dyn Fn() -> Outcome) -> Outcome {
    (0..WARM).try_for_each(|_| one())
}

fn bare(lane: &Lane, len: usize) -> Outcome {
    drop(black_box(lane.alloc::<u8>(len, Region::Dynamic)?));
    Ok(())
}

/// Pairs of many threads at once, against those of one.
pub(crate) fn lanes(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (arena, first) = rig.arena("lanes", ByteSize::MAX, DecayTime::Never)?;
    let mut lanes = vec![first];
    for _ in 1..rig.args.threads {
        lanes.push(rig.lane(&arena)?);
    }
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
    let work = move |lane: &Lane| -> Result<Span, Fault> {
        let warm = warm(&|| bare(lane, len));
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
    Ok(float(pairs.saturating_mul(lanes.len())) / (end - start).as_secs_f64())
}

/// A burst that ends and the release of its memory, while one thread continues to allocate. Another
/// calls `DeviceArena::decay`. The released memory is measured by the driver, not by the arena.
pub(crate) fn decay(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (args, block) = (rig.args, rig.args.block);
    let size = rig.fitting(args.decay_size, block)?;
    let time = DecayTime::from_duration(args.decay_time);
    let (arena, lane) = rig.arena("decay", ByteSize::MAX, time)?;
    let before = rig.headroom()?;
    let burst = blocks(&lane, size, block)?;
    let high = rig.headroom()?;
    let taken = before.saturating_sub(high);
    report.figure("gpu.decay.burst_bytes", taken.as_f64(), "bytes");
    drop(burst);
    let (ended, start) = (AtomicBool::new(false), rig.clock.now());
    let ((back, busy), samples) = thread::scope(|scope| -> Result<_, Fault> {
        let looker = scope.spawn(|| {
            let returned = give_back(rig, &arena, (high, taken));
            ended.store(true, Ordering::Relaxed);
            returned
        });
        let samples = sample(rig, &lane, &ended);
        Ok((looker.join().map_err(|_| "the releasing thread panicked")??, samples?))
    })?;
    let took = rig.clock.now() - start;
    report.figure("gpu.decay.returned_ratio", back.as_f64() / taken.as_f64(), "of the burst");
    report.figure("gpu.decay.seconds", took.as_secs_f64(), "s");
    if let Some((first, last)) = busy {
        let of = |is_wanted: &dyn Fn(&Span) -> bool| -> Vec<_> {
            let wanted = samples.iter().filter(|span| is_wanted(span));
            wanted.map(|(start, end)| nanos(*end - *start)).collect()
        };
        let steady = of(&|(_, end)| *end <= first);
        let during = of(&|(start, end)| *end > first && *start <= last);
        let (calm, at_work) = (quantile(&steady, 990), quantile(&during, 990));
        report.figure("gpu.decay.steady_p99_ns", calm, "ns");
        report.figure("gpu.decay.during_p99_ns", at_work, "ns");
        report.figure("gpu.decay.samples_during", float(during.len()), "samples");
        report.figure("gpu.decay.p99_ratio", at_work / calm, "times");
    } else {
        report.line("gpu.decay.p99_ratio: not measured, no memory was released");
    }
    drop(lane);
    rig.settle(&arena)?;
    Ok(arena.close()?)
}

/// Calls the decay until nearly all is back or the time is over. Returns the bytes that came back,
/// and the period from the first call that released memory to the end of the last.
fn give_back(
    rig: &Rig<'_>,
    arena: &DeviceArena,
    (high, taken): (ByteSize, ByteSize),
) -> Result<(ByteSize, Option<Span>), Fault> {
    let (clock, mut busy) = (&rig.clock, None);
    let back = rig.poll(rig.args.decay_within, LOOK, || {
        let from = clock.now();
        if !arena.decay(from)?.is_zero() {
            busy = Some((busy.map_or(from, |(first, _)| first), clock.now()));
        }
        let back = rig.headroom()?.saturating_sub(high);
        Ok((back >= taken.scaled(0.99), back))
    })?;
    Ok((back, busy))
}

/// Times pairs until `ended` is set.
fn sample(rig: &Rig<'_>, lane: &Lane, ended: &AtomicBool) -> Result<Vec<Span>, Fault> {
    let clock = &rig.clock;
    let (len, mut next, mut samples) = (rig.pair_len()?, clock.now(), Vec::new());
    while !ended.load(Ordering::Relaxed) {
        let start = clock.now();
        if start < next {
            hint::spin_loop();
            continue;
        }
        bare(lane, len)?;
        samples.push((start, clock.now()));
        next = start + PACE;
    }
    Ok(samples)
}

/// The pool governor: its effect for users of cudarc that know nothing of it.
///
/// Pairs of cudarc with a wait after each: from the device's pool as found, which releases
/// everything at each wait unless its threshold was changed, and from a governed pool. The memory
/// that the governed pool holds after it was unused for the decay time is its own figure.
pub(crate) fn governor(rig: &Rig<'_>, report: &mut Report<'_>) -> Outcome {
    let (stream, len) = (rig.context.new_stream()?, rig.pair_len()?);
    let rounds = || -> Result<f64, Fault> {
        let round = || -> Outcome {
            drop(plain::<u8>(&stream, len)?);
            Ok(stream.synchronize()?)
        };
        warm(&round)?;
        let costs = (0..rig.args.pairs).map(|_| Ok(nanos(rig.timed(round)?.0)));
        Ok(median(&costs.collect::<Result<Vec<_>, Fault>>()?))
    };
    let found = rounds()?;
    let decay = DecayTime::from_duration(rig.args.decay_time);
    let governor = PoolGovernor::open(DeviceChoice::Ordinal(rig.args.device), None, decay)?;
    let governed = rounds()?;
    report.figure("gpu.governor.default_p50_ns", found, "ns");
    report.figure("gpu.governor.p50_ns", governed, "ns");
    report.figure("gpu.governor.p50_speedup", found / governed, "times");
    let at_work = governor.report(ByteSize::ZERO)?;
    report.figure("gpu.governor.busy_held_bytes", at_work.held().as_f64(), "bytes");
    report.figure("gpu.governor.unmanaged_bytes", at_work.unmanaged.as_f64(), "bytes");
    let (time, within) = (rig.args.decay_time, rig.args.decay_within);
    let held = rig.poll(time + within, time / 8, || {
        governor.decay(rig.clock.now())?;
        let held = governor.report(ByteSize::ZERO)?.held();
        Ok((held.is_zero(), held))
    })?;
    report.figure("gpu.governor.idle_held_bytes", held.as_f64(), "bytes");
    let left = PoolGovernor::left_total();
    drop((stream, governor));
    if PoolGovernor::left_total() > left {
        return Err("the governor's pool could not be destroyed".into());
    }
    Ok(())
}
