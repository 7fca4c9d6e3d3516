//! An arena on a schedule: plays bursts, lets time pass as a control thread would, and counts.
//!
//! Blocks go to the dynamic region. The clock goes from one moment at which the arena wants to be
//! looked at to the next, and `decay` is called at each. Retained is committed less live, summed
//! over virtual time.
//!
//! Invariant: the clock never passes a moment at which a look is due.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use lowtide_gpu::ByteSize;
use lowtide_gpu::clock::{Clock, ManualClock, Moment};
use lowtide_gpu::decay::DecayTime;
use lowtide_gpu::{ArenaConfig, Buffer, DeviceArena, DeviceError, HostDriver, Region};

use crate::schedule::{Burst, EVENT_APART};
use crate::trace::{Event, Trace};

/// The result of a whole schedule.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Outcome {
    pub(crate) retained_byte_seconds: f64,
    /// Commits and decommits.
    pub(crate) driver_calls: u64,
    pub(crate) short: Short,
    pub(crate) long: Long,
    /// Allocations that had to commit after a longer gap, and their wall time.
    pub(crate) recommits: u64,
    pub(crate) recommit_nanos: f64,
    /// Looks at idle memory.
    pub(crate) looks: u64,
}

/// Gaps shorter than the decay time.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Short {
    pub(crate) gaps: u64,
    /// Decommits in them, of memory of any age.
    pub(crate) decommits: u64,
    /// Decommits of memory that had been needed within the decay time, and commits of the bursts
    /// after such gaps.
    pub(crate) extra_calls: u64,
}

/// Gaps longer than that.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Long {
    pub(crate) gaps: u64,
    pub(crate) decommits: u64,
    /// Commits of the bursts after them.
    pub(crate) commits: u64,
    pub(crate) granules_left: u64,
    pub(crate) granules_back: u64,
}

/// Calls and bytes until now.
#[derive(Clone, Copy, Debug, Default)]
struct Totals {
    commits: u64,
    decommits: u64,
    committed: u64,
    decommitted: u64,
}

/// The most bytes that were active at any time in the last `within`.
struct Needed {
    within: Duration,
    /// Until when so many were; later ones are fewer.
    peaks: VecDeque<(Moment, ByteSize)>,
}

impl Needed {
    fn note(&mut self, until: Moment, active: ByteSize) {
        while self.peaks.back().is_some_and(|&(_, peak)| peak <= active) {
            self.peaks.pop_back();
        }
        self.peaks.push_back((until, active));
    }

    fn peak(&mut self, now: Moment) -> ByteSize {
        while self.peaks.front().is_some_and(|&(until, _)| now - until >= self.within) {
            self.peaks.pop_front();
        }
        self.peaks.front().map_or(ByteSize::ZERO, |&(_, peak)| peak)
    }
}

struct Player {
    arena: DeviceArena,
    clock: Arc<ManualClock>,
    buffers: Vec<Option<Buffer<u8>>>,
    needed: Needed,
    outcome: Outcome,
    /// Committed when time last passed.
    committed: ByteSize,
    /// Decommits, and those of them that took what had been needed.
    decommits: u64,
    early: u64,
}

/// Plays a schedule. `short_below` tells the gaps apart.
pub(crate) fn play(
    trace: &Trace,
    bursts: &[Burst],
    decay: DecayTime,
    short_below: Duration,
) -> Result<Outcome, DeviceError> {
    let clock = Arc::new(ManualClock::new());
    let config = ArenaConfig { decay, ..ArenaConfig::new(&trace.name) };
    let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
    let buffers = (0..trace.blocks).map(|_| None).collect();
    let needed = Needed { within: short_below, peaks: VecDeque::new() };
    let mut player = Player {
        arena,
        clock,
        buffers,
        needed,
        outcome: Outcome::default(),
        committed: ByteSize::ZERO,
        decommits: 0,
        early: 0,
    };
    let granule = player.arena.capabilities().granularity.get();
    let mut after_long = false;
    let mut after_early = false;
    let mut gap_end = Totals::default();
    for burst in bursts {
        for &event in &trace.events[burst.events.clone()] {
            player.event(event, after_long)?;
            player.pass(EVENT_APART)?;
        }
        let start = player.totals();
        if after_long {
            player.outcome.long.commits += start.commits - gap_end.commits;
            player.outcome.long.granules_back += (start.committed - gap_end.committed) / granule;
        }
        if after_early {
            player.outcome.short.extra_calls += start.commits - gap_end.commits;
        }
        let early = player.early;
        player.pass(burst.gap)?;
        gap_end = player.totals();
        let decommits = gap_end.decommits - start.decommits;
        let (short, long) = (&mut player.outcome.short, &mut player.outcome.long);
        let is_short = burst.gap < short_below;
        after_early = is_short && player.early > early;
        after_long = !is_short;
        if is_short {
            short.gaps += 1;
            short.decommits += decommits;
            short.extra_calls += player.early - early;
        } else {
            long.gaps += 1;
            long.decommits += decommits;
            long.granules_left += (gap_end.decommitted - start.decommitted) / granule;
        }
    }
    player.outcome.driver_calls = gap_end.commits + gap_end.decommits;
    Ok(player.outcome)
}

impl Player {
    fn event(&mut self, event: Event, timed: bool) -> Result<(), DeviceError> {
        match event {
            Event::Alloc { block, bytes } => {
                // 64 bits are all that a length has on the platforms of the host driver.
                let len = usize::try_from(bytes).unwrap_or(usize::MAX);
                let start = Instant::now();
                self.buffers[block] = Some(self.arena.alloc(len, Region::Dynamic)?);
                let nanos = start.elapsed().as_secs_f64() * 1e9;
                if timed && self.arena.glance().committed > self.committed {
                    self.outcome.recommits += 1;
                    self.outcome.recommit_nanos += nanos;
                }
            }
            Event::Free { block } => self.buffers[block] = None,
        }
        Ok(())
    }

    /// Lets time pass; looks at idle memory whenever that is due.
    fn pass(&mut self, time: Duration) -> Result<(), DeviceError> {
        let end = self.clock.now() + time;
        loop {
            let now = self.clock.now();
            let due = self.arena.next_decay().max(now);
            if due > end {
                self.advance(end - now);
                return Ok(());
            }
            self.advance(due - now);
            let released = self.arena.decay(due)?.released;
            self.outcome.looks += 1;
            if !released.is_zero() {
                let before = self.decommits;
                self.decommits = self.totals().decommits;
                if self.arena.glance().committed < self.needed.peak(due) {
                    self.early += self.decommits - before;
                }
            } else if due == now && self.arena.next_decay() <= now {
                // It wants to be looked at again and again, and there is nothing to be had.
                self.advance(end - now);
                return Ok(());
            }
        }
    }

    fn advance(&mut self, step: Duration) {
        let glance = self.arena.glance();
        self.committed = glance.committed;
        let retained = glance.committed.saturating_sub(glance.live);
        self.outcome.retained_byte_seconds += retained.as_f64() * step.as_secs_f64();
        self.clock.advance(step);
        self.needed.note(self.clock.now(), glance.committed.saturating_sub(glance.idle));
    }

    fn totals(&self) -> Totals {
        let snapshot = self.arena.snapshot();
        Totals {
            commits: snapshot.commits_total,
            decommits: snapshot.decommits_total,
            committed: snapshot.committed_bytes_total,
            decommitted: snapshot.decommitted_bytes_total,
        }
    }
}
