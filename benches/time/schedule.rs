//! When the requests of a trace come: bursts with pauses between them.
//!
//! A burst is what a trace has between two of its marks: the load, a request or a training step,
//! the unload. Its events are 10 us apart. After each burst stands a gap. What is live at the end
//! of a burst, the weights of the loaded model among it, stays live through the gap. A trace is
//! played as often as it takes to have 60 gaps, from load to unload each time.
//!
//! Gaps are 0.1 to 600 s, evenly by logarithm, from the seed alone: the same for each trace.

use std::ops::Range;
use std::time::Duration;

use crate::chance::Chance;
use crate::trace::Trace;

/// From one event of a burst to the next.
pub(crate) const EVENT_APART: Duration = Duration::from_micros(10);
/// Gaps of a schedule at least.
const GAPS: usize = 60;
/// The shortest and the longest gap, in seconds.
const GAP: (f64, f64) = (0.1, 600.0);
/// The number of times that a whole trace is repeated, and its gaps.
const REPEATS: usize = 4;
const REPEATS_GAP: (f64, f64) = (0.1, 8.0);

/// A burst, and the gap after it.
#[derive(Clone, Debug)]
pub(crate) struct Burst {
    /// Its events in the trace.
    pub(crate) events: Range<usize>,
    pub(crate) gap: Duration,
}

/// The bursts of a trace in their order; after the last one nothing is live.
pub(crate) fn bursts(trace: &Trace, seed: u64) -> Vec<Burst> {
    let mut chance = Chance::new(seed);
    let starts = trace.marks.iter().copied();
    let ends = trace.marks.iter().copied().skip(1).chain([trace.events.len()]);
    // Events before the first mark, where there are such, belong to the first burst.
    let mut parts: Vec<_> = starts.zip(ends).map(|(start, end)| start..end).collect();
    match parts.first_mut() {
        Some(first) => first.start = 0,
        None => parts.push(0..trace.events.len()),
    }
    let passes = GAPS.div_ceil(parts.len());
    let all = (0..passes).flat_map(|_| parts.iter().cloned());
    all.map(|events| Burst { events, gap: gap(&mut chance, GAP) }).collect()
}

/// The whole trace again and again, as one burst each time, in gaps of 0.1 to 8 s: from one use of
/// a granule to the next it is never 10 s.
pub(crate) fn repeats(trace: &Trace, seed: u64) -> Vec<Burst> {
    let mut chance = Chance::new(seed);
    let bursts = (0..REPEATS)
        .map(|_| Burst { events: 0..trace.events.len(), gap: gap(&mut chance, REPEATS_GAP) });
    bursts.collect()
}

fn gap(chance: &mut Chance, (shortest, longest): (f64, f64)) -> Duration {
    const STEPS: usize = 1 << 20;
    let unit = u32::try_from(chance.below(STEPS)).map_or(0.0, f64::from) / f64::from(1 << 20);
    Duration::from_secs_f64(shortest * (longest / shortest).powf(unit))
}
