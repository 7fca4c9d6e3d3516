//! One reserved range and the state of each of its granules: pure books, no driver and no lock.
//!
//! A granule is bare, committing, committed or leaving. The in-between states mark a driver call
//! that is under way outside the arena's lock: whoever needs such a granule waits until the call's
//! result is booked here. A granule also counts the blocks that touch it; a committed one that no
//! block touches is idle, and only idle ones may leave.
//!
//! Eight bytes a granule, for granules up to the highest one ever touched: 1/262,144 of 2 MiB.
//!
//! Invariants: `backed = committing + committed + leaving`; `active = backed and touched`;
//! `idle = backed - active`; every granule that may leave lies below `idle_end`.

use std::ops::Range;

use super::driver::DeviceAddress;
use super::index::Span;
use crate::bytes::ByteSize;

/// What is behind a granule.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Backing {
    /// Nothing.
    Bare,
    /// Nothing yet: a commit is under way.
    Committing,
    /// Memory.
    Committed,
    /// Memory still: a decommit is under way.
    Leaving,
}

#[derive(Clone, Copy, Debug)]
struct Granule {
    /// Blocks that touch it.
    blocks: u32,
    backing: Backing,
}

impl Granule {
    const UNTOUCHED: Self = Self { blocks: 0, backing: Backing::Bare };

    const fn is_backed(self) -> bool {
        !matches!(self.backing, Backing::Bare)
    }

    const fn may_leave(self) -> bool {
        matches!(self.backing, Backing::Committed) && self.blocks == 0
    }
}

/// Adjoining granules, for one driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Run {
    first: usize,
    count: usize,
}

impl Run {
    /// How many granules.
    pub(super) const fn granules(self) -> u64 {
        self.count as u64
    }

    const fn range(self) -> Range<usize> {
        self.first..self.first + self.count
    }
}

/// A reserved range and its granules.
#[derive(Debug)]
pub(super) struct Segment {
    base: DeviceAddress,
    reserved: u64,
    granularity: u64,
    /// Beyond the end: bare and untouched.
    granules: Vec<Granule>,
    backed: u64,
    active: u64,
    leaving: u64,
    idle_end: usize,
}

impl Segment {
    pub(super) const fn new(
        base: DeviceAddress,
        reserved: ByteSize,
        granularity: ByteSize,
    ) -> Self {
        Self {
            base,
            reserved: reserved.get(),
            granularity: granularity.get(),
            granules: Vec::new(),
            backed: 0,
            active: 0,
            leaving: 0,
            idle_end: 0,
        }
    }

    pub(super) const fn base(&self) -> DeviceAddress {
        self.base
    }

    pub(super) const fn reserved(&self) -> u64 {
        self.reserved
    }

    /// Bytes with memory behind them, or on the way there or away.
    pub(super) const fn backed(&self) -> u64 {
        self.backed * self.granularity
    }

    /// Bytes of backed granules that a block touches.
    pub(super) const fn active(&self) -> u64 {
        self.active * self.granularity
    }

    /// Bytes of backed granules that no block touches.
    pub(super) const fn idle(&self) -> u64 {
        (self.backed - self.active) * self.granularity
    }

    /// Bytes of granules that are leaving.
    pub(super) const fn leaving(&self) -> u64 {
        self.leaving * self.granularity
    }

    /// The address and the size of a run.
    pub(super) fn place_of(&self, run: Run) -> (DeviceAddress, ByteSize) {
        let offset = ByteSize::new(run.first as u64 * self.granularity);
        let size = ByteSize::new(run.granules() * self.granularity);
        (self.address_of(offset), size)
    }

    /// The address of an offset in the segment.
    pub(super) fn address_of(&self, offset: ByteSize) -> DeviceAddress {
        debug_assert!(offset.get() <= self.reserved);
        // The driver reserved `base + reserved` without wrapping; held at the base otherwise.
        self.base.checked_add(offset).unwrap_or(self.base)
    }

    /// Books that a block is there.
    pub(super) fn touch(&mut self, span: Span) {
        let touched = self.granules_of(span);
        if self.granules.len() < touched.end {
            self.granules.resize(touched.end, Granule::UNTOUCHED);
        }
        for at in touched {
            self.change(at, |granule| granule.blocks += 1);
        }
    }

    /// Books that a block is gone; says whether a granule went idle by it.
    pub(super) fn untouch(&mut self, span: Span) -> bool {
        let idle_before = self.idle();
        for at in self.granules_of(span) {
            self.change(at, |granule| granule.blocks -= 1);
        }
        self.idle() > idle_before
    }

    /// Whether a driver call is under way for a granule of the span.
    pub(super) fn is_moving(&self, span: Span) -> bool {
        let moving =
            |granule: &Granule| matches!(granule.backing, Backing::Committing | Backing::Leaving);
        self.known(span).iter().any(moving)
    }

    /// Granules of the span that have no memory behind them to stay.
    pub(super) fn wanting(&self, span: Span) -> u64 {
        let unknown = self.granules_of(span).len() - self.known(span).len();
        let wants =
            |granule: &&Granule| matches!(granule.backing, Backing::Bare | Backing::Leaving);
        (unknown + self.known(span).iter().filter(wants).count()) as u64
    }

    /// Marks the bare granules of a touched span as committing; returns them in runs.
    pub(super) fn begin_commit(&mut self, span: Span) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for at in self.granules_of(span) {
            if self.granules[at].backing != Backing::Bare {
                continue;
            }
            self.change(at, |granule| granule.backing = Backing::Committing);
            match runs.last_mut() {
                Some(run) if run.range().end == at => run.count += 1,
                _ => runs.push(Run { first: at, count: 1 }),
            }
        }
        runs
    }

    /// Books what came of a commit.
    pub(super) fn end_commit(&mut self, run: Run, done: bool) {
        let backing = if done { Backing::Committed } else { Backing::Bare };
        self.settle(run, Backing::Committing, backing);
    }

    /// Marks the highest run of idle granules, at most `granules_max` of them, as leaving.
    ///
    /// The highest, because blocks are placed low: what is high is missed least. Amortised, each
    /// granule is passed over once for each time that it went idle.
    pub(super) fn begin_leave(&mut self, granules_max: u64) -> Option<Run> {
        let granules_max = usize::try_from(granules_max).unwrap_or(usize::MAX);
        if granules_max == 0 {
            return None;
        }
        let idle = self.granules[..self.idle_end].iter().rposition(|granule| granule.may_leave());
        let Some(last) = idle else {
            self.idle_end = 0;
            return None;
        };
        let below = self.granules[..=last].iter().rev();
        let count = below.take(granules_max).take_while(|granule| granule.may_leave()).count();
        let run = Run { first: last + 1 - count, count };
        for at in run.range() {
            self.change(at, |granule| granule.backing = Backing::Leaving);
        }
        self.idle_end = run.first;
        Some(run)
    }

    /// Books what came of a decommit.
    pub(super) fn end_leave(&mut self, run: Run, done: bool) {
        let backing = if done { Backing::Bare } else { Backing::Committed };
        self.settle(run, Backing::Leaving, backing);
    }

    /// The longest part of a span that is committed throughout, in bytes.
    pub(super) fn committed_run_max(&self, span: Span) -> u64 {
        let first = self.granules_of(span).start;
        let (mut best, mut run) = (0, 0);
        for (nth, granule) in self.known(span).iter().enumerate() {
            let start = (first + nth) as u64 * self.granularity;
            let part = span.end().min(start + self.granularity) - span.offset.max(start);
            run = if granule.backing == Backing::Committed { run + part } else { 0 };
            best = best.max(run);
        }
        best
    }

    /// Every run of backed granules, for the end of the segment.
    pub(super) fn backed_runs(&self) -> Vec<Run> {
        let mut runs: Vec<Run> = Vec::new();
        for (at, _) in self.granules.iter().enumerate().filter(|(_, granule)| granule.is_backed()) {
            match runs.last_mut() {
                Some(run) if run.range().end == at => run.count += 1,
                _ => runs.push(Run { first: at, count: 1 }),
            }
        }
        runs
    }

    /// Counts everything again; `blocks` are the live blocks in address order.
    ///
    /// # Panics
    /// Where a figure is wrong.
    pub(super) fn validate(&self, blocks: impl Iterator<Item = Span>) {
        let mut touching = vec![0; self.granules.len()];
        for span in blocks {
            for at in self.granules_of(span) {
                touching[at] += 1;
            }
        }
        assert!(touching.iter().eq(self.granules.iter().map(|granule| &granule.blocks)));
        let count = |wanted: &dyn Fn(&Granule) -> bool| {
            self.granules.iter().filter(|granule| wanted(granule)).count() as u64
        };
        assert_eq!(self.backed, count(&|granule| granule.is_backed()));
        assert_eq!(self.active, count(&|granule| granule.is_backed() && granule.blocks > 0));
        assert_eq!(self.leaving, count(&|granule| granule.backing == Backing::Leaving));
        assert!(self.granules[self.idle_end..].iter().all(|granule| !granule.may_leave()));
        assert!(self.backed() <= self.reserved, "committed <= reserved");
    }

    /// The granules that a span touches.
    fn granules_of(&self, span: Span) -> Range<usize> {
        let granule = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX);
        granule(span.offset / self.granularity)..granule(span.end().div_ceil(self.granularity))
    }

    /// The granules of the span that have an entry.
    fn known(&self, span: Span) -> &[Granule] {
        let Range { start, end } = self.granules_of(span);
        let length = self.granules.len();
        &self.granules[start.min(length)..end.min(length)]
    }

    fn settle(&mut self, run: Run, from: Backing, to: Backing) {
        for at in run.range() {
            assert_eq!(self.granules[at].backing, from, "granule {at} was not on its way");
            self.change(at, |granule| granule.backing = to);
        }
    }

    /// Changes one granule and keeps the counts.
    fn change(&mut self, at: usize, act: impl FnOnce(&mut Granule)) {
        let granule = &mut self.granules[at];
        let before = *granule;
        act(granule);
        let after = *granule;
        let counts = |granule: Granule| {
            let backed = u64::from(granule.is_backed());
            let active = u64::from(granule.is_backed() && granule.blocks > 0);
            (backed, active, u64::from(granule.backing == Backing::Leaving))
        };
        let (was, is) = (counts(before), counts(after));
        self.backed = self.backed + is.0 - was.0;
        self.active = self.active + is.1 - was.1;
        self.leaving = self.leaving + is.2 - was.2;
        if after.may_leave() {
            self.idle_end = self.idle_end.max(at + 1);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 1 << 20;

    fn segment() -> Segment {
        let base = DeviceAddress::new(1 << 40);
        Segment::new(base, ByteSize::mib(64), ByteSize::new(GRANULE))
    }

    fn span(first: u64, end: u64) -> Span {
        Span { offset: first, size: end - first }
    }

    fn committed(segment: &mut Segment, of: Span) {
        segment.touch(of);
        for run in segment.begin_commit(of) {
            segment.end_commit(run, true);
        }
    }

    #[test]
    fn only_bare_granules_are_committed_and_adjoining_ones_in_one_run() {
        let mut segment = segment();
        let middle = span(2 * GRANULE, 3 * GRANULE);
        committed(&mut segment, middle);
        let all = span(GRANULE / 2, 6 * GRANULE);
        segment.touch(all);
        assert_eq!(segment.wanting(all), 5);
        let runs = segment.begin_commit(all);
        assert_eq!(runs, [Run { first: 0, count: 2 }, Run { first: 3, count: 3 }]);
        assert!(segment.is_moving(all) && !segment.is_moving(middle));
        segment.end_commit(runs[0], true);
        segment.end_commit(runs[1], false);
        assert_eq!((segment.backed(), segment.active()), (3 * GRANULE, 3 * GRANULE));
        segment.validate([middle, all].into_iter());
    }

    #[test]
    fn idle_granules_leave_from_the_top_and_touched_ones_never() {
        let mut segment = segment();
        let (low, top) = (span(0, 4 * GRANULE), span(5 * GRANULE, 8 * GRANULE));
        let kept = span(4 * GRANULE, 5 * GRANULE);
        for part in [low, kept, top] {
            committed(&mut segment, part);
        }
        assert_eq!(segment.begin_leave(u64::MAX), None);
        assert!(segment.untouch(low) && segment.untouch(top));
        assert_eq!(segment.idle(), 7 * GRANULE);
        let first = segment.begin_leave(2).expect("idle");
        assert_eq!(first, Run { first: 6, count: 2 });
        assert_eq!(segment.begin_leave(u64::MAX), Some(Run { first: 5, count: 1 }));
        assert_eq!(segment.begin_leave(u64::MAX), Some(Run { first: 0, count: 4 }));
        assert_eq!(segment.begin_leave(u64::MAX), None);
        segment.end_leave(first, false);
        assert_eq!(segment.begin_leave(u64::MAX), Some(first), "a failed one may try again");
        segment.validate([kept].into_iter());
    }

    #[test]
    fn a_free_span_counts_as_far_as_it_is_committed_without_a_gap() {
        let mut segment = segment();
        let part = span(GRANULE, 3 * GRANULE);
        committed(&mut segment, part);
        segment.untouch(part);
        assert_eq!(segment.committed_run_max(span(0, 64 * GRANULE)), 2 * GRANULE);
        assert_eq!(segment.committed_run_max(span(GRANULE + 512, 9 * GRANULE)), 2 * GRANULE - 512);
        assert_eq!(segment.committed_run_max(span(40 * GRANULE, 64 * GRANULE)), 0);
    }
}
