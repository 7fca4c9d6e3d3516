//! Time: what an arena gives back as time passes, and what that costs in driver calls.
//!
//! Recorded allocations with pauses between the requests, over the host driver and a clock that the
//! bench moves; what scattered live blocks keep committed, before and after their neighbours are
//! moved together. What is counted is bytes, calls and virtual time, which do not depend on the
//! machine.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use common::chance::Chance;
use common::figures::{Figures, count};
use common::player::Player;
use common::trace::Trace;
use lowtide::{BoxError, ByteSize};
use lowtide_gpu::clock::{Clock, ManualClock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{
    ArenaConfig, Buffer, CompactOptions, DeviceArena, DeviceError, HostDriver, Region,
};

/// Of chance.
const SEEDS: [u64; 3] = [42, 7, 1234];

// Random blocks: what scattered ones keep committed, before and after their neighbours are moved
// together.
//
// No block is viewed, so that nothing is touched but what compaction copies. Each figure is the
// worst of the seeds.

/// Blocks of which nine in ten are freed.
const BLOCKS: usize = 10_000;
/// The size of small blocks.
const SMALL: u64 = 64 << 10;

/// Measures what scattered blocks keep.
pub(crate) fn scattered(figures: &mut Figures) -> Result<(), BoxError> {
    let mut add = |name, goal, is_compacted, size: &dyn Fn(&mut Chance) -> u64| {
        let mut worst = 0.0_f64;
        for seed in SEEDS {
            let (arena, _live) = one_in_ten(seed, size)?;
            if is_compacted {
                compact(&arena)?;
            }
            let glance = arena.glance();
            worst = worst.max(glance.committed.as_f64() / glance.live.as_f64());
        }
        figures.at_most(name, worst, "ratio", goal);
        Ok::<_, BoxError>(())
    };
    add("purge.random90.committed_per_live", 1.25, false, &Chance::size)?;
    add("compact.random90_64k.committed_per_live", 1.3, true, &|_| SMALL)
}

/// Returns an arena in which all but one block in ten were freed, by chance, and those left.
fn one_in_ten(
    seed: u64,
    size: &dyn Fn(&mut Chance) -> u64,
) -> Result<(DeviceArena, Vec<Buffer<u8>>), BoxError> {
    let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(ManualClock::new()));
    let arena = DeviceArena::open(driver, clock, ArenaConfig::new("scattered"))?;
    let (mut chance, mut blocks) = (Chance::new(seed), Vec::with_capacity(BLOCKS));
    for _ in 0..BLOCKS {
        blocks.push(arena.alloc(usize::try_from(size(&mut chance))?, Region::Dynamic)?);
    }
    while blocks.len() > BLOCKS / 10 {
        drop(blocks.swap_remove(chance.below(blocks.len())));
    }
    arena.purge()?;
    Ok((arena, blocks))
}

/// Compacts by 64 MiB at a time until nothing is to be gained, 1,000 times at most; then purges.
fn compact(arena: &DeviceArena) -> Result<(), BoxError> {
    let budget = ByteSize::mib(64);
    let options = CompactOptions { budget, ..CompactOptions::new(Region::Dynamic) };
    for _ in 0..1_000 {
        if arena.compact(options, |_| {})?.moves == 0 {
            arena.purge()?;
            return Ok(());
        }
    }
    Err("compaction finds no end".into())
}

// Recorded allocations with pauses between the requests: what is retained over time, and the
// driver calls that the pauses cause, over the host driver and a clock that the bench moves.
//
// A burst is what a trace has between two of its marks: the load, a request or a training step,
// the unload. Its events are 10 us apart. After each burst stands a gap. What is live at the end
// of a burst, the weights of the loaded model among it, stays live through the gap. A trace is
// played as often as it takes to have 60 gaps, from load to unload each time. Gaps are evenly
// distributed by logarithm, from the seed alone: the same for each trace.
//
// Retained is committed less live, summed over virtual time.
//
// Invariant: the clock never passes a moment at which a look is due.

/// From one event of a burst to the next.
const EVENT_APART: Duration = Duration::from_micros(10);
/// Gaps of a schedule at least.
const GAPS: usize = 60;
/// The shortest and the longest gap, in seconds.
const GAP: (f64, f64) = (0.1, 600.0);
/// The number of times that a whole trace is repeated, and its gaps: from one use of a granule to
/// the next it is never 10 s.
const REPEATS: usize = 4;
const REPEATS_GAP: (f64, f64) = (0.1, 8.0);

/// Calls of CUDA's virtual-memory interface for a handle that leaves: unmap, release.
const CALLS_OUT: u64 = 2;
/// And for one that comes: create, map, set access.
const CALLS_IN: u64 = 3;

/// All figures of pauses.
pub(crate) fn pauses(traces: &[Trace], figures: &mut Figures) -> Result<(), BoxError> {
    let default = ArenaConfig::new("").decay;
    let DecayTime::Within(time) = default else {
        return Err("the default decay time is no time".into());
    };
    let (mut worst, mut extra, mut left, mut back) = (0.0_f64, 0, 0, 0);
    for (trace, seed) in traces.iter().flat_map(|it| SEEDS.map(|seed| (it, seed))) {
        let bursts = bursts(trace, seed);
        let ours = play(trace, &bursts, default, time)?;
        let never = play(trace, &bursts, DecayTime::Never, time)?;
        worst = worst.max(ours.retained_byte_seconds / never.retained_byte_seconds);
        left += ours.granules_left;
        back += ours.granules_back;
        // Calls beyond those of the first pass, where the whole trace is repeated.
        let mut chance = Chance::new(seed);
        let whole = || Burst { events: 0..trace.events.len(), gap: gap(&mut chance, REPEATS_GAP) };
        let repeats: Vec<_> = std::iter::repeat_with(whole).take(REPEATS).collect();
        let all = play(trace, &repeats, default, time)?;
        let once = play(trace, &repeats[..1], DecayTime::Never, time)?;
        extra += ours.extra_calls + all.driver_calls.abs_diff(once.driver_calls);
    }
    figures.at_most("decay.retained_byte_seconds.ratio", worst, "ratio", 0.5);
    figures.at_most("decay.short_gap.extra_driver_calls", count(extra), "calls", 0.0);
    let each = count(left * CALLS_OUT + back * CALLS_IN) / count(left.max(1));
    figures.at_most("decay.long_gap.driver_calls_per_handle", each, "calls", 6.0);
    Ok(())
}

/// A burst, and the gap after it.
#[derive(Clone, Debug)]
struct Burst {
    /// Its events in the trace.
    events: Range<usize>,
    gap: Duration,
}

/// The bursts of a trace in their order; after the last one nothing is live.
fn bursts(trace: &Trace, seed: u64) -> Vec<Burst> {
    let mut chance = Chance::new(seed);
    // Events before the first mark, where there are such, belong to the first burst.
    let later = trace.marks.iter().copied().skip(1);
    let bounds: Vec<_> = [0].into_iter().chain(later).chain([trace.events.len()]).collect();
    let parts: Vec<_> = bounds.windows(2).map(|part| part[0]..part[1]).collect();
    let all = parts.iter().cycle().take(GAPS.next_multiple_of(parts.len())).cloned();
    all.map(|events| Burst { events, gap: gap(&mut chance, GAP) }).collect()
}

fn gap(chance: &mut Chance, (shortest, longest): (f64, f64)) -> Duration {
    Duration::from_secs_f64(chance.around(shortest, longest))
}

/// The result of a whole schedule.
#[derive(Clone, Copy, Debug, Default)]
struct Outcome {
    retained_byte_seconds: f64,
    /// Commits and decommits.
    driver_calls: u64,
    /// In gaps shorter than the decay time: decommits of memory that had been needed within it,
    /// and commits of the bursts after such gaps.
    extra_calls: u64,
    /// In longer ones, and in the bursts after them.
    granules_left: u64,
    granules_back: u64,
}

/// An arena on a schedule: lets time pass as a control thread would, and counts.
struct Run {
    player: Player,
    /// Tells the gaps apart.
    short_below: Duration,
    /// The most bytes that were active at any time in the last `short_below`: until when so many
    /// were; later ones are fewer.
    needed: VecDeque<(Moment, ByteSize)>,
    outcome: Outcome,
    /// Decommits, and those of them that took what had been needed.
    decommits: u64,
    early: u64,
}

/// Plays a schedule.
fn play(
    trace: &Trace,
    bursts: &[Burst],
    decay: DecayTime,
    short_below: Duration,
) -> Result<Outcome, DeviceError> {
    let config = ArenaConfig { decay, ..ArenaConfig::new(&trace.name) };
    let player = Player::new(trace, Arc::new(HostDriver::new()), config)?;
    let granule = player.arena.capabilities().granularity.get();
    let (needed, outcome) = (VecDeque::new(), Outcome::default());
    let mut run = Run { player, short_below, needed, outcome, decommits: 0, early: 0 };
    let (mut after_long, mut after_early) = (false, false);
    let mut before = run.player.arena.snapshot();
    for burst in bursts {
        for &event in &trace.events[burst.events.clone()] {
            run.player.play(event)?;
            run.pass(EVENT_APART)?;
        }
        let start = run.player.arena.snapshot();
        if after_long {
            let committed = start.committed_bytes_total - before.committed_bytes_total;
            run.outcome.granules_back += committed / granule;
        }
        if after_early {
            run.outcome.extra_calls += start.commits_total - before.commits_total;
        }
        let early = run.early;
        run.pass(burst.gap)?;
        before = run.player.arena.snapshot();
        after_long = burst.gap >= short_below;
        after_early = !after_long && run.early > early;
        if after_long {
            let left = before.decommitted_bytes_total - start.decommitted_bytes_total;
            run.outcome.granules_left += left / granule;
        } else {
            run.outcome.extra_calls += run.early - early;
        }
    }
    run.outcome.driver_calls = before.commits_total + before.decommits_total;
    Ok(run.outcome)
}

impl Run {
    /// Lets time pass; looks at idle memory whenever that is due.
    fn pass(&mut self, time: Duration) -> Result<(), DeviceError> {
        let end = self.player.clock.now() + time;
        loop {
            let now = self.player.clock.now();
            let due = self.player.arena.next_decay().max(now);
            if due > end {
                self.advance(end - now);
                return Ok(());
            }
            self.advance(due - now);
            let released = self.player.arena.decay(due)?;
            if !released.is_zero() {
                let before = self.decommits;
                self.decommits = self.player.arena.snapshot().decommits_total;
                if self.player.arena.glance().committed < self.peak(due) {
                    self.early += self.decommits - before;
                }
            } else if due == now && self.player.arena.next_decay() <= now {
                // It wants to be looked at again and again, and there is nothing to be had.
                self.advance(end - now);
                return Ok(());
            }
        }
    }

    fn advance(&mut self, step: Duration) {
        let glance = self.player.arena.glance();
        let retained = glance.committed.saturating_sub(glance.live);
        self.outcome.retained_byte_seconds += retained.as_f64() * step.as_secs_f64();
        self.player.clock.advance(step);
        let active = glance.committed.saturating_sub(glance.idle);
        while self.needed.back().is_some_and(|&(_, peak)| peak <= active) {
            self.needed.pop_back();
        }
        self.needed.push_back((self.player.clock.now(), active));
    }

    fn peak(&mut self, now: Moment) -> ByteSize {
        while self.needed.front().is_some_and(|&(until, _)| now - until >= self.short_below) {
            self.needed.pop_front();
        }
        self.needed.front().map_or(ByteSize::ZERO, |&(_, peak)| peak)
    }
}
