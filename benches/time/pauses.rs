//! Traces with pauses: what is retained over time, and the driver calls that the pauses cause.

use lowtide_gpu::ArenaConfig;
use lowtide_gpu::BoxError;
use lowtide_gpu::ByteSize;
use lowtide_gpu::decay::DecayTime;

use crate::common::figures::Figures;
use crate::player::{Long, Outcome, Short, play};
use crate::schedule::{bursts, repeats};
use crate::trace::Trace;

/// Calls of CUDA's virtual-memory interface for a handle that leaves: unmap, release.
const CALLS_OUT: u64 = 2;
/// And for one that comes: create, map, set access.
const CALLS_IN: u64 = 3;

/// Sums over traces and seeds.
#[derive(Clone, Copy, Debug, Default)]
struct Sums {
    worst: f64,
    short: Short,
    /// Calls beyond those of the first pass, where the whole trace is repeated.
    repeats: u64,
    long: Long,
    recommits: u64,
    recommit_nanos: f64,
    looks: u64,
    gaps: u64,
}

/// All figures of pauses.
pub(crate) fn measure(
    traces: &[Trace],
    seeds: &[u64],
    figures: &mut Figures,
) -> Result<(), BoxError> {
    let mut sums = Sums::default();
    for trace in traces {
        of_trace(trace, seeds, &mut sums, figures)?;
    }
    let Sums { short, long, .. } = sums;
    figures.add("decay.retained_byte_seconds.ratio", sums.worst, "ratio");
    figures.add("decay.looks_per_gap", count(sums.looks) / count(sums.gaps), "looks");
    figures.add("decay.short_gap.gaps", count(short.gaps), "gaps");
    let extra = count(short.extra_calls + sums.repeats);
    figures.add("decay.short_gap.extra_driver_calls", extra, "calls");
    figures.add("decay.short_gap.decommits", count(short.decommits), "calls");
    figures.add("decay.long_gap.gaps", count(long.gaps), "gaps");
    let per_gap = |calls| count(calls) / count(long.gaps.max(1));
    figures.add("decay.long_gap.decommits_per_gap", per_gap(long.decommits), "calls");
    figures.add("decay.long_gap.commits_per_gap", per_gap(long.commits), "calls");
    let handles = long.granules_left * CALLS_OUT + long.granules_back * CALLS_IN;
    let each = count(handles) / count(long.granules_left.max(1));
    figures.add("decay.long_gap.driver_calls_per_handle", each, "calls");
    let delay = sums.recommit_nanos / count(sums.recommits.max(1));
    figures.add("decay.recommit.mean_delay_ns", delay, "ns");
    Ok(())
}

fn of_trace(
    trace: &Trace,
    seeds: &[u64],
    sums: &mut Sums,
    figures: &mut Figures,
) -> Result<(), BoxError> {
    let default = ArenaConfig::new("").decay;
    let DecayTime::Within(time) = default else {
        return Err("the default decay time is no time".into());
    };
    let (mut ours_worst, mut at_once_worst): (f64, f64) = (0.0, 0.0);
    let mut calls = [0; 3];
    for &seed in seeds {
        let bursts = bursts(trace, seed);
        let of = |decay| play(trace, &bursts, decay, time);
        let (ours, never, at_once) = (of(default)?, of(DecayTime::Never)?, of(DecayTime::AtOnce)?);
        ours_worst = ours_worst.max(ratio(ours, never));
        at_once_worst = at_once_worst.max(ratio(at_once, never));
        for (sum, one) in calls.iter_mut().zip([ours, never, at_once]) {
            *sum += one.driver_calls;
        }
        sums.note(ours, bursts.len());
        let repeats = repeats(trace, seed);
        let ours = play(trace, &repeats, default, time)?;
        let once = play(trace, &repeats[..1], DecayTime::Never, time)?;
        sums.repeats += ours.driver_calls.abs_diff(once.driver_calls);
    }
    sums.worst = sums.worst.max(ours_worst);
    let name = format!("decay.{}", trace.name);
    figures.add(format!("{name}.retained_byte_seconds.ratio"), ours_worst, "ratio");
    figures.add(format!("{name}.at_once.retained_byte_seconds.ratio"), at_once_worst, "ratio");
    for (kind, calls) in ["", "keep_all.", "at_once."].iter().zip(calls) {
        figures.add(format!("{name}.{kind}driver_calls"), count(calls), "calls");
    }
    Ok(())
}

impl Sums {
    fn note(&mut self, one: Outcome, gaps: usize) {
        self.short = short_sum(self.short, one.short);
        self.long = long_sum(self.long, one.long);
        self.recommits += one.recommits;
        self.recommit_nanos += one.recommit_nanos;
        self.looks += one.looks;
        self.gaps += ByteSize::of(gaps).get();
    }
}

fn ratio(one: Outcome, keep_all: Outcome) -> f64 {
    one.retained_byte_seconds / keep_all.retained_byte_seconds
}

fn short_sum(one: Short, other: Short) -> Short {
    Short {
        gaps: one.gaps + other.gaps,
        decommits: one.decommits + other.decommits,
        extra_calls: one.extra_calls + other.extra_calls,
    }
}

fn long_sum(one: Long, other: Long) -> Long {
    Long {
        gaps: one.gaps + other.gaps,
        decommits: one.decommits + other.decommits,
        commits: one.commits + other.commits,
        granules_left: one.granules_left + other.granules_left,
        granules_back: one.granules_back + other.granules_back,
    }
}

fn count(number: u64) -> f64 {
    ByteSize::new(number).as_f64()
}
