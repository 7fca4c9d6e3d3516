//! The memory for the blocks of a region: one reserved range and the state of each of its granules,
//! or pieces that a driver allocates and frees as a whole. Pure accounting, no driver and no lock.
//!
//! A granule is bare, committing, committed, leaving or arriving. The transitional states mark a
//! driver call in progress outside the arena's lock: a thread that needs such a granule waits until
//! the call's result is recorded here. A granule is active while a block covers any byte of it. A
//! backed granule that is not active is idle, and only idle granules may leave.
//!
//! Blocks are placed from both ends (large ones from the low end, small ones from the high end), so
//! the granules are stored in two halves, each counted from its end: metadata grows with use.
//!
//! Over pieces no granule has a state: each is bare. What concerns single granules, such as commits
//! and handles, is then never called, or finds nothing.
//!
//! Invariants: `backed = committing + committed + leaving`; `active = backed and touched`;
//! `idle = backed - active`.

use std::ops::Range;

use smallvec::SmallVec;

use crate::driver::DeviceAddress;
use crate::index::Span;
use crate::state::aging::{Ages, Stamp};
use crate::state::segment_list::SegmentList;
use lowtide_core::bytes::ByteSize;

/// Adjoining granules of one half, for one driver call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Run {
    first: usize,
    count: usize,
    /// The granules of each of its handles. The last handle may have fewer.
    handle: usize,
}

impl Run {
    /// Returns the number of granules.
    pub(crate) const fn granules(self) -> u64 {
        self.count as u64
    }

    /// Returns the first granules, at most this many, and the rest. Each granule is a handle.
    pub(crate) fn split(self, granules: u64) -> (Self, Option<Self>) {
        debug_assert_eq!(self.handle, 1, "a handle cannot be split");
        let count = usize::try_from(granules).unwrap_or(usize::MAX).min(self.count);
        let left = Self { first: self.first + count, count: self.count - count, ..self };
        (Self { count, ..self }, (left.count > 0).then_some(left))
    }

    /// Returns its offsets, in granules of this many bytes.
    pub(crate) const fn span(self, granularity: u64) -> Span {
        Span { offset: self.first as u64 * granularity, size: self.granules() * granularity }
    }

    /// Returns the run as a range of granules of the segment.
    pub(crate) const fn range(self) -> Range<usize> {
        self.first..self.first + self.count
    }

    /// Creates the run of these granules, which lie in one half and are at least one. Each granule
    /// is a handle.
    pub(crate) const fn of(range: &Range<usize>) -> Self {
        Self::in_handles(range, 1)
    }

    /// Creates the run of these granules in handles of this many.
    const fn in_handles(range: &Range<usize>, handle: usize) -> Self {
        Self { first: range.start, count: range.end - range.start, handle }
    }

    /// Returns `true` if it has handles of more than one granule.
    pub(crate) const fn has_large_handles(self) -> bool {
        self.handle > 1
    }

    /// Returns the ranges of its handles.
    fn handles(self) -> impl Iterator<Item = Range<usize>> {
        let Range { start, end } = self.range();
        (start..end).step_by(self.handle).map(move |at| at..end.min(at + self.handle))
    }
}

/// Runs for driver calls. One takes no memory of its own.
pub(crate) type Runs = SmallVec<[Run; 1]>;

/// The progress of a search for leaving granules: the end of the rest in each half.
pub(crate) type Cursor = [usize; 2];

/// The beginning of a search.
pub(crate) const START: Cursor = [usize::MAX; 2];

/// The granules that a block covers.
struct GranuleCover {
    /// Granules that the block covers in part, and may share.
    partly: [Option<usize>; 2],
    /// Granules that the block covers wholly.
    wholly: Range<usize>,
}

/// The memory for the offsets of a region.
#[derive(Debug)]
pub(crate) struct Segment {
    /// The address of the first offset; none of pieces, each of which has its own.
    pub(crate) base: DeviceAddress,
    /// The end of the offsets.
    pub(crate) extent: u64,
    pub(crate) granularity: u64,
    /// The number of granules.
    count: usize,
    /// The first granule of the high half.
    middle: usize,
    low: Granules,
    /// Granules counted from the high end downward.
    high: Granules,
    /// The pieces, on drivers that allocate whole segments.
    pub(crate) pieces: Option<SegmentList>,
}

impl Segment {
    /// Creates a segment of bare granules. `granularity` is a power of two. Each handle is one
    /// granule.
    pub(crate) fn new(base: DeviceAddress, extent: ByteSize, granularity: ByteSize) -> Self {
        assert!(granularity.get().is_power_of_two(), "{granularity} is no power of two");
        let (extent, granularity) = (extent.get(), granularity.get());
        let count = usize::try_from(extent / granularity).unwrap_or(usize::MAX);
        let (low, high) = (Granules::default(), Granules::default());
        let middle = count.div_ceil(2);
        Self { base, extent, granularity, count, middle, low, high, pieces: None }
    }

    /// Creates the memory of a driver that allocates whole segments, with no piece yet, for blocks of
    /// at most `largest` bytes.
    pub(crate) fn of_pieces(extent: ByteSize, largest: u64, granularity: ByteSize) -> Self {
        let pieces = Some(SegmentList::new(largest, granularity.get()));
        Self { pieces, ..Self::new(DeviceAddress::new(0), extent, granularity) }
    }

    /// Returns the bytes of addresses. For pieces: of those with memory, because there are no
    /// others.
    pub(crate) fn reserved(&self) -> u64 {
        if self.pieces.is_some() { self.memory().backed } else { self.extent }
    }

    /// Returns the bytes of memory by its state.
    #[inline]
    pub(crate) fn memory(&self) -> MemoryCounts {
        match &self.pieces {
            Some(pieces) => pieces.memory(),
            None => MemoryCounts::sum(self.low.counts, self.high.counts, self.granularity),
        }
    }

    /// Returns the size of the handles of a run.
    pub(crate) const fn handle_size(&self, run: Run) -> ByteSize {
        ByteSize::new(run.handle as u64 * self.granularity)
    }

    /// Returns the bytes of this metadata.
    pub(crate) fn metadata(&self) -> usize {
        let pieces = self.pieces.as_ref().map_or(0, SegmentList::metadata);
        self.low.metadata() + self.high.metadata() + pieces
    }

    /// Returns the address and the size of a run, which lies in one piece.
    pub(crate) fn place_of(&self, run: Run) -> (DeviceAddress, ByteSize) {
        let span = self.span_of(run);
        (self.address_of(span.offset), ByteSize::new(span.size))
    }

    /// Returns the offsets of a run.
    pub(crate) const fn span_of(&self, run: Run) -> Span {
        run.span(self.granularity)
    }

    /// Returns the offset of an address, if the address is in this region.
    pub(crate) fn offset_of(&self, at: DeviceAddress) -> Option<u64> {
        if let Some(pieces) = &self.pieces {
            return pieces.offset_of(at);
        }
        let offset = at.offset_from(self.base)?.get();
        (offset < self.extent).then_some(offset)
    }

    /// Returns `true` if any of these addresses belongs to the region permanently. For pieces: one
    /// step for each.
    pub(crate) fn overlaps(&self, at: DeviceAddress, size: ByteSize) -> bool {
        let meets = |from: DeviceAddress, bytes: u64| {
            let (from, at) = (from.get(), at.get());
            at < from.saturating_add(bytes) && from < at.saturating_add(size.get())
        };
        let Some(pieces) = &self.pieces else { return meets(self.base, self.extent) };
        pieces.there().any(|(span, piece)| !piece.is_leaving() && meets(piece.at, span.size))
    }

    /// Returns the address of an offset.
    #[inline]
    pub(crate) fn address_of(&self, offset: u64) -> DeviceAddress {
        if let Some(pieces) = &self.pieces {
            return pieces.address_of(offset);
        }
        debug_assert!(offset <= self.extent);
        // The driver reserved `base + extent` without wrapping.
        DeviceAddress::new(self.base.get().wrapping_add(offset))
    }

    /// Records that a block is in a span, or that it was freed. Returns `true` if memory became idle.
    pub(crate) fn set_touched<const TOUCHED: bool>(&mut self, span: Span) -> bool {
        if let Some(pieces) = &mut self.pieces {
            return pieces.set_touched(span, TOUCHED);
        }
        if let Some(granule) = self.shared(span) {
            let (half, at) = self.half_mut(granule);
            return half.set_touched_part::<TOUCHED>(at); // as most blocks
        }
        let (cover, mut went_idle) = (self.cover_of(span), false);
        self.each_part(cover.wholly, |half, range| went_idle |= half.set_touched::<TOUCHED>(range));
        for granule in cover.partly.into_iter().flatten() {
            let (half, at) = self.half_mut(granule);
            went_idle |= half.set_touched_part::<TOUCHED>(at);
        }
        went_idle
    }

    /// Returns what the span lacks to be committed.
    pub(crate) fn missing(&self, span: Span) -> MissingGranules {
        if self.pieces.is_some() {
            return MissingGranules::default(); // the index offers only pieces that stay
        }
        let range = self.granules_of(span);
        if range.len() == 1 {
            let (half, at) = self.half(range.start);
            return half.missing_one(at); // as most
        }
        let [low, high] = self.parts(range);
        let (low, high) = (self.low.missing(low), self.high.missing(high));
        MissingGranules {
            granules: low.granules + high.granules,
            is_moving: low.is_moving || high.is_moving,
        }
    }

    /// Returns the cost of placing a block in a span, beyond its size: the granules to commit, and
    /// those at its edges that no other block touches and that the block would keep from becoming
    /// idle. Both count alike, so that idle memory is used before more is committed. O(1), plus one
    /// step for each 64 granules. For pieces: 1 if the block would be the first in its piece.
    pub(crate) fn cost(&self, span: Span) -> u64 {
        if let Some(pieces) = &self.pieces {
            return u64::from(pieces.opened(span) > 0);
        }
        if let Some(granule) = self.shared(span) {
            let (half, at) = self.half(granule);
            return u64::from(!half.is_touched(at)) + half.missing_one(at).granules;
        }
        let cover = self.cover_of(span);
        let opened = cover.partly.into_iter().flatten().filter(|&granule| {
            let (half, at) = self.half(granule);
            !half.is_touched(at)
        });
        opened.count() as u64 + self.missing(span).granules
    }

    /// Returns the number of inactive granules of the span, which a block there would make active.
    /// A neighbour that waits for its memory has none yet, and may never get any.
    pub(crate) fn inactive(&self, span: Span) -> u64 {
        let pieces = self.pieces.as_ref();
        pieces.map_or_else(|| self.count(span, Word::inactive), |pieces| pieces.opened(span))
    }

    /// Returns the number of granules of the span that have no memory and are not arriving.
    pub(crate) fn bare(&self, span: Span) -> u64 {
        self.count(span, Word::bare)
    }

    fn count(&self, span: Span, of: impl Fn(Word) -> u64) -> u64 {
        let [low, high] = self.parts(self.granules_of(span));
        self.low.count(low, &of) + self.high.count(high, &of)
    }

    /// Marks the bare granules of a touched span as committing, and up to `ahead` granules that
    /// follow the span away from its end. Returns them in runs. Granules that the span covers
    /// wholly get handles of at most `handle_max` granules: they are in use and leave together.
    pub(crate) fn begin_commit(&mut self, span: Span, ahead: u64, handle_max: usize) -> Runs {
        let Range { start, end } = self.granules_of(span);
        let ahead = usize::try_from(ahead).unwrap_or(usize::MAX);
        let range = if start < self.middle {
            start..end.saturating_add(ahead).min(self.middle.max(end))
        } else {
            start.saturating_sub(ahead).max(self.middle)..end
        };
        let mut runs = Runs::new();
        let count = self.count;
        let [low, high] = self.parts(range);
        let (call, all) = ((GranuleCall::Commit, u64::MAX), |_| u64::MAX);
        self.low.begin(low, call, all, |range| runs.push(Run::of(&range)));
        self.high.begin(high, call, all, |range| runs.push(Run::of(&mirrored(count, range))));
        let wholly = self.cover_of(span).wholly;
        if handle_max == 1 || wholly.len() < 2 {
            return runs;
        }
        let runs = runs.into_iter().flat_map(|run| cut_at(run.range(), &wholly));
        let runs: Runs = runs.collect();
        let is_inside = |run: &Run| wholly.contains(&run.first);
        let join = |run| if is_inside(&run) { self.join(run, handle_max) } else { run };
        runs.into_iter().map(join).collect()
    }

    /// Returns `true` if a span does not cross the border of the halves.
    pub(crate) fn is_in_one_half(&self, span: Span) -> bool {
        let Range { start, end } = self.granules_of(span);
        end <= self.middle || start >= self.middle
    }

    /// Returns the handles that have stuck granules, and the number of these; with ages, only those
    /// whose idle granules have all expired.
    pub(crate) fn stuck_handles(&self, ages: Option<Ages>) -> Vec<(Run, u64)> {
        let mut handles = Vec::new();
        let mut push = |range: Range<usize>, stuck| {
            handles.push((Run::in_handles(&range, range.len()), stuck));
        };
        self.low.stuck_handles(ages, &mut push);
        self.high.stuck_handles(ages, |range, stuck| push(mirrored(self.count, range), stuck));
        handles
    }

    /// Divides granules that are being committed into handles of at most this many.
    fn join(&mut self, run: Run, handle_max: usize) -> Run {
        let handle = handle_max.min(run.count);
        let run = Run { handle, ..run };
        if handle > 1 {
            for handle in run.handles() {
                self.each_part(handle, Granules::join);
            }
        }
        run
    }

    /// Records the result of a driver call.
    #[inline(always)]
    pub(crate) fn end(&mut self, run: Run, call: GranuleCall, done: bool) {
        self.each_part(run.range(), |half, range| half.end(range, call, done));
    }

    /// Marks the first bare granules of a touched span, at most this many, as arriving: memory of
    /// other granules, which still counts there, is being moved here. Returns them in runs.
    pub(crate) fn begin_arrive(&mut self, span: Span, granules_max: u64) -> Vec<Run> {
        let mut runs = Vec::new();
        let count = self.count;
        let [low, high] = self.parts(self.granules_of(span));
        let (call, all) = (GranuleCall::Arrive, |_| u64::MAX);
        let push = |range| runs.push(Run::of(&range));
        let of_low = self.low.begin(low, (call, granules_max), all, push);
        let push = |range| runs.push(Run::of(&mirrored(count, range)));
        self.high.begin(high, (call, granules_max - of_low), all, push);
        runs
    }

    /// Records the last use of a span's granules that no block touches.
    pub(crate) fn stamp(&mut self, span: Span, stamp: Stamp) {
        if let Some(pieces) = &mut self.pieces {
            return pieces.stamp(span, stamp);
        }
        let range = self.granules_of(span);
        self.each_part(range, |half, range| half.stamp(range, stamp));
    }

    /// Returns the age of the longest idle memory that may leave.
    pub(crate) fn oldest(&self, ages: Ages) -> Option<u32> {
        let idle = || self.low.idle_ages(ages).chain(self.high.idle_ages(ages)).max();
        self.pieces.as_ref().map_or_else(idle, |pieces| pieces.oldest(ages))
    }

    /// Marks the next idle handles of one size as leaving, the innermost first.
    pub(crate) fn begin_leave(&mut self, cursor: &mut Cursor, leave: &Leave) -> Option<Run> {
        let [low_end, high_end] = cursor;
        if let Some(range) = self.low.begin_leave(*low_end, leave) {
            *low_end = range.start;
            let handle = self.low.handle_of(range.start).len();
            return Some(Run::in_handles(&range, handle));
        }
        *low_end = 0;
        let range = self.high.begin_leave(*high_end, leave)?;
        *high_end = range.start;
        let handle = self.high.handle_of(range.start).len();
        Some(Run::in_handles(&mirrored(self.count, range), handle))
    }

    /// Divides committed granules, whole handles, into runs of at most this many granules and
    /// handles. A run may be larger if it is one handle. A piece is one run.
    pub(crate) fn runs_of(
        &self,
        range: Range<usize>,
        granules_max: usize,
        handles_max: usize,
    ) -> Vec<Run> {
        if self.pieces.is_some() {
            return vec![Run::of(&range)];
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut at = range.start;
        while at < range.end {
            let next = self.handle_of(at);
            at = next.end;
            let fits = |run: &Run| {
                let is_open = run.count.is_multiple_of(run.handle) && next.len() <= run.handle;
                let handles = run.count / run.handle;
                is_open && handles < handles_max && run.count + next.len() <= granules_max
            };
            match runs.last_mut().filter(|run| fits(run)) {
                Some(run) => run.count += next.len(),
                None => runs.push(Run::in_handles(&next, next.len())),
            }
        }
        runs
    }

    /// Returns the granules of the handle of a granule; the granule alone if it is bare.
    pub(crate) fn handle_of(&self, granule: usize) -> Range<usize> {
        let (half, at) = self.half(granule);
        let handle = half.handle_of(at);
        if granule < self.middle { handle } else { mirrored(self.count, handle) }
    }

    /// Returns the bytes of the longest part of a span that is committed throughout. Takes a step
    /// for each run of committed granules, and for each 64 granules.
    pub(crate) fn committed_run_max(&self, span: Span) -> u64 {
        if self.pieces.is_some() {
            return span.size; // all free space has memory
        }
        let (mut best, mut across) = (0, 0);
        let mut look = |run: Range<usize>| {
            let bytes = self.bytes_in(Run::of(&run), span);
            // A run that ends at the border of the halves continues in the other half.
            let meets = run.start == self.middle || run.end == self.middle;
            across += if meets { bytes } else { 0 };
            best = bytes.max(across).max(best);
        };
        let [low, high] = self.parts(self.granules_of(span));
        self.low.runs(low, Word::committed, &mut look);
        self.high.runs(high, Word::committed, |range| look(mirrored(self.count, range)));
        best
    }

    /// Returns the granules that can leave for a sleep, in runs from the low end: all committed
    /// granules. For pieces: only the idle ones, because the others cannot be restored.
    pub(crate) fn committed_runs(&self) -> Runs {
        let pieces = self.pieces.as_ref();
        pieces.map_or_else(|| self.runs(0..self.count, Word::committed), SegmentList::idle_runs)
    }

    /// Returns the spans of the segments in order, on drivers that allocate segments.
    pub(crate) fn segments(&self) -> Option<Vec<Span>> {
        Some(self.pieces.as_ref()?.there().map(|(span, _)| span).collect())
    }

    /// Returns the parts of a run that blocks touch, in runs.
    pub(crate) fn touched_runs(&self, run: Run) -> Runs {
        self.runs(run.range(), Word::touched)
    }

    /// Returns every run of granules whose bits `of` returns, from the low end.
    fn runs(&self, range: Range<usize>, of: impl Fn(Word) -> u64) -> Runs {
        let [low, high] = self.parts(range);
        let mut runs = Runs::new();
        self.low.runs(low, &of, |range| runs.push(Run::of(&range)));
        let middle = runs.len();
        self.high.runs(high, &of, |range| runs.push(Run::of(&mirrored(self.count, range))));
        runs[middle..].reverse();
        runs
    }

    /// Marks committed granules as leaving, touched or not, because their blocks sleep.
    pub(crate) fn begin_part(&mut self, run: Run) {
        self.each_part(run.range(), Granules::begin_part);
    }

    /// Marks touched granules without memory as committing. Returns them in runs of at most this
    /// many granules, in handles of at most `handle_max`.
    pub(crate) fn begin_return(&mut self, granules_max: usize, handle_max: usize) -> Runs {
        let step = granules_max.max(handle_max) / handle_max * handle_max;
        let mut runs = Runs::new();
        let mut push = |Range { start, end }: Range<usize>| {
            let parts = (start..end).step_by(step);
            runs.extend(parts.map(|at| Run::of(&(at..end.min(at + step)))));
        };
        let (count, call) = (self.count, (GranuleCall::Commit, u64::MAX));
        let (low, high) = (0..self.low.known(), 0..self.high.known());
        self.low.begin(low, call, Word::touched, &mut push);
        self.high.begin(high, call, Word::touched, |range| push(mirrored(count, range)));
        runs.iter_mut().for_each(|run| *run = self.join(*run, handle_max));
        runs
    }

    /// Returns the bytes of a block that have no memory.
    pub(crate) fn bare_bytes(&self, span: Span) -> u64 {
        let bare = self.runs(self.granules_of(span), |word| !word.backed());
        bare.into_iter().map(|run| self.bytes_in(run, span)).sum()
    }

    /// Returns the bytes of a run that lie in a span.
    fn bytes_in(&self, run: Run, span: Span) -> u64 {
        let of = run.span(self.granularity);
        of.end().min(span.end()) - of.offset.max(span.offset)
    }

    /// Returns every run of backed granules, for the end of the segment and for its map.
    pub(crate) fn backed_runs(&self) -> Runs {
        self.runs(0..self.count, Word::backed)
    }

    /// Returns the spans with memory in address order, each with whether live, arriving or pending
    /// blocks touch all of its granules, or none.
    pub(crate) fn backed_spans(&self) -> Vec<(Span, bool)> {
        if let Some(pieces) = &self.pieces {
            return pieces.there().map(|(span, piece)| (span, piece.is_active())).collect();
        }
        let mut spans = Vec::new();
        for run in self.backed_runs() {
            let whole = self.span_of(run);
            let mut at = whole.offset;
            for active in self.touched_runs(run).into_iter().map(|run| self.span_of(run)) {
                spans.push((Span { offset: at, size: active.offset - at }, false));
                spans.push((active, true));
                at = active.end();
            }
            spans.push((Span { offset: at, size: whole.end() - at }, false));
        }
        spans.retain(|(span, _)| span.size > 0);
        spans
    }

    /// Counts everything again. `blocks` are the live blocks in address order.
    ///
    /// # Panics
    /// If a figure is wrong.
    pub(crate) fn validate(&self, blocks: impl Iterator<Item = Span>) {
        let mut partly = std::collections::BTreeMap::<usize, u32>::new();
        let mut wholly = Vec::new();
        for span in blocks {
            let cover = self.cover_of(span);
            for granule in cover.partly.into_iter().flatten() {
                *partly.entry(granule).or_default() += 1;
            }
            if !cover.wholly.is_empty() {
                wholly.push(cover.wholly);
            }
        }
        let expected = |granule: usize| {
            let parts = partly.get(&granule).copied().unwrap_or(0);
            let nth = wholly.partition_point(|range| range.end <= granule);
            let whole = wholly.get(nth).is_some_and(|range| range.contains(&granule));
            (parts, whole || parts > 0)
        };
        let touched = partly.len() + wholly.iter().map(Range::len).sum::<usize>();
        let all = Span { offset: 0, size: self.extent };
        assert_eq!(self.count(all, Word::touched), touched as u64, "touched granules");
        self.low.validate(|at| if at < self.middle { expected(at) } else { (0, false) });
        self.high.validate(|at| {
            let granule = self.count.checked_sub(at + 1).filter(|&granule| granule >= self.middle);
            granule.map_or((0, false), expected)
        });
        assert!(self.memory().backed <= self.extent, "committed <= reserved");
    }

    /// Returns the granules that a span touches.
    pub(crate) fn granules_of(&self, span: Span) -> Range<usize> {
        let shift = self.granularity.trailing_zeros();
        let (start, end) = (span.offset >> shift, (span.end() + self.granularity - 1) >> shift);
        usize::try_from(start).unwrap_or(usize::MAX)..usize::try_from(end).unwrap_or(usize::MAX)
    }

    /// Returns the granule that a span lies in, but does not cover.
    fn shared(&self, span: Span) -> Option<usize> {
        let Range { start, end } = self.granules_of(span);
        (end - start == 1 && span.size < self.granularity).then_some(start)
    }

    fn cover_of(&self, span: Span) -> GranuleCover {
        if let Some(granule) = self.shared(span) {
            return GranuleCover { partly: [Some(granule), None], wholly: 0..0 };
        }
        let Range { mut start, mut end } = self.granules_of(span);
        let mask = self.granularity - 1;
        let (cut_low, cut_high) = (span.offset & mask != 0, span.end() & mask != 0);
        let mut partly = [None; 2];
        if cut_low {
            partly[0] = Some(start);
            start += 1;
        }
        if cut_high {
            end -= 1;
            partly[1] = Some(end);
        }
        GranuleCover { partly, wholly: start..end }
    }

    /// Returns the parts of a range in the two halves, counted as each half counts.
    fn parts(&self, range: Range<usize>) -> [Range<usize>; 2] {
        let low = range.start.min(self.middle)..range.end.min(self.middle);
        let high = range.start.max(self.middle)..range.end.max(self.middle);
        [low, mirrored(self.count, high)]
    }

    fn each_part(&mut self, range: Range<usize>, mut act: impl FnMut(&mut Granules, Range<usize>)) {
        if range.end <= self.middle {
            if !range.is_empty() {
                act(&mut self.low, range);
            }
            return;
        }
        let [low, high] = self.parts(range);
        for (half, part) in [(&mut self.low, low), (&mut self.high, high)] {
            if !part.is_empty() {
                act(half, part);
            }
        }
    }

    fn half(&self, granule: usize) -> (&Granules, usize) {
        if granule < self.middle {
            (&self.low, granule)
        } else {
            (&self.high, self.count - 1 - granule)
        }
    }

    fn half_mut(&mut self, granule: usize) -> (&mut Granules, usize) {
        if granule < self.middle {
            (&mut self.low, granule)
        } else {
            (&mut self.high, self.count - 1 - granule)
        }
    }
}

/// Returns the parts of a range before, in and after another range, each as a run.
fn cut_at(range: Range<usize>, at: &Range<usize>) -> impl Iterator<Item = Run> {
    let Range { start, end } = range;
    let (first, last) = (at.start.clamp(start, end), at.end.clamp(start, end));
    let parts = [start..first, first..last, last..end];
    parts.into_iter().filter(|part| !part.is_empty()).map(|part| Run::of(&part))
}

/// Returns a range as counted from the other end.
const fn mirrored(count: usize, range: Range<usize>) -> Range<usize> {
    count - range.end..count - range.start
}

// The granules of one end of a segment, as bitmaps counted from that end.
//
// Granules that a block covers wholly are bits. Only the two granules at the block's edges, which
// may be shared with other blocks, have counts. The count of an untouched granule is replaced by the
// time of its last use.
//
// Memory is committed in handles of one or more granules, which leave as a whole: an idle granule
// in a handle that a block touches is stuck. A granule that is joined is in the handle of the
// granule before it. Arriving memory of another granule still counts there.
//
// Memory: 37 bytes for 8 granules, up to the farthest granule ever touched: 1/453,000 of 2 MiB.
//
// Invariants: `backed = committing + committed + leaving`, arriving is not backed;
// `active = backed and touched`; `idle = backed - active >= stuck`; the granules of a handle have
// the same backing; every granule that may leave is before `idle_end`.

/// 64 granules: bit `i` is granule `64 x word + i`.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Word {
    /// A live block covers a part of the granule.
    touched: u64,
    /// The granule has memory, or is committing or leaving.
    backed: u64,
    /// A commit is in progress: the granule is backed, but has no memory yet. If not backed:
    /// arriving.
    committing: u64,
    /// A decommit is in progress: the granule is still backed.
    leaving: u64,
    /// The granule is backed by the handle of the granule before it.
    joined: u64,
}

impl Word {
    /// Returns the granules that blocks touch, backed or not.
    pub(crate) const fn touched(self) -> u64 {
        self.touched
    }

    /// Returns the granules that have memory, or are committing or leaving.
    pub(crate) const fn backed(self) -> u64 {
        self.backed
    }

    pub(crate) const fn committed(self) -> u64 {
        self.backed & !(self.committing | self.leaving)
    }

    const fn may_leave(self) -> u64 {
        self.committed() & !self.touched
    }

    /// Returns the granules that are not active. An arriving block may touch them.
    pub(crate) const fn inactive(self) -> u64 {
        !(self.touched & self.backed)
    }

    /// Returns the granules that have no memory and are not arriving.
    pub(crate) const fn bare(self) -> u64 {
        !(self.backed | self.committing)
    }
}

/// A driver call on granules.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum GranuleCall {
    Commit,
    /// Memory of other granules, which still counts there, is being moved here.
    Arrive,
    Leave,
}

/// What granules lack to be committed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MissingGranules {
    /// The number of granules without lasting memory: bare or leaving.
    pub(crate) granules: u64,
    /// `true` if a driver call is in progress for one of the granules.
    pub(crate) is_moving: bool,
}

impl MissingGranules {
    /// Returns `true` if all granules are committed, and none is leaving.
    pub(crate) const fn is_nothing(self) -> bool {
        self.granules == 0 && !self.is_moving
    }
}

/// Memory by its state, in bytes or in granules.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct MemoryCounts {
    /// Committed memory, including memory that is committing or leaving.
    pub(crate) backed: u64,
    /// Backed memory that a block touches, or that is being committed for a block.
    pub(crate) active: u64,
    /// Memory that is being committed, which the driver may refuse.
    pub(crate) committing: u64,
    pub(crate) leaving: u64,
    /// Idle memory that cannot leave, because a block touches its handle.
    pub(crate) stuck: u64,
}

impl MemoryCounts {
    /// Returns the sum of two counts, each so many times.
    pub(crate) const fn sum(one: Self, other: Self, times: u64) -> Self {
        Self {
            backed: (one.backed + other.backed) * times,
            active: (one.active + other.active) * times,
            committing: (one.committing + other.committing) * times,
            leaving: (one.leaving + other.leaving) * times,
            stuck: (one.stuck + other.stuck) * times,
        }
    }

    /// Returns the committed memory, without commits in progress.
    pub(crate) const fn there(&self) -> u64 {
        self.backed - self.committing
    }

    /// Returns the memory that no block touches.
    pub(crate) const fn idle(&self) -> u64 {
        self.backed - self.active
    }

    /// Returns the idle memory that may leave.
    pub(crate) const fn releasable(&self) -> u64 {
        self.idle() - self.stuck
    }
}

/// The handles at both ends of a range that lie only in part in it.
type CutHandles = [Option<Range<usize>>; 2];

/// The granules, from the end of the segment inward.
#[derive(Debug, Default)]
pub(crate) struct Granules {
    words: Vec<Word>,
    /// The number of blocks that cover a part of the granule, but not all of it. If no block
    /// touches the granule: the [`Stamp`] of its last use.
    partly: Vec<u32>,
    /// The numbers of granules.
    pub(crate) counts: MemoryCounts,
    /// The number of joined granules.
    joined: u64,
    idle_end: usize,
}

impl Granules {
    /// Returns the bytes of this metadata.
    pub(crate) const fn metadata(&self) -> usize {
        self.words.capacity() * size_of::<Word>() + self.partly.capacity() * size_of::<u32>()
    }

    /// Returns the number of granules with entries; later ones are bare and untouched.
    pub(crate) const fn known(&self) -> usize {
        self.partly.len()
    }

    /// Records that a block covers all of these granules, or that it was freed. Returns `true` if one
    /// became idle.
    fn set_touched<const TOUCHED: bool>(&mut self, range: Range<usize>) -> bool {
        if TOUCHED {
            self.reach(range.end);
            self.partly[range.clone()].fill(0);
        }
        let cut = (self.joined > 0).then(|| self.cut_handles(&range));
        if let Some(cut) = &cut {
            cut.iter().flatten().for_each(|handle| self.counts.stuck -= self.stuck_in(handle));
        }
        let (mut backed, before) = (0, if TOUCHED { 0 } else { u64::MAX });
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            debug_assert_eq!(word.touched & mask, before & mask, "wholly covered, by one block");
            word.touched ^= mask;
            backed += count(word.backed & mask);
        }
        if TOUCHED {
            self.counts.active += backed;
        } else {
            self.counts.active -= backed;
            self.idle_end = self.idle_end.max(range.end);
        }
        for handle in cut.into_iter().flatten().flatten() {
            self.counts.stuck += self.stuck_in(&handle);
            if !TOUCHED {
                self.idle_end = self.idle_end.max(handle.end); // its other granules may leave too
            }
        }
        !TOUCHED && backed > 0
    }

    /// Records that a block covers a part of this granule, or that it was freed. Returns `true` if
    /// the granule became idle.
    fn set_touched_part<const TOUCHED: bool>(&mut self, granule: usize) -> bool {
        let range = granule..granule + 1;
        if !TOUCHED {
            self.partly[granule] -= 1;
            return self.partly[granule] == 0 && self.set_touched::<false>(range);
        }
        if !self.is_touched(granule) {
            self.set_touched::<true>(range);
        }
        self.partly[granule] += 1;
        false
    }

    /// Records the last use of those granules that no block touches now.
    pub(crate) fn stamp(&mut self, range: Range<usize>, stamp: Stamp) {
        let known = self.partly.len();
        for (at, mask) in masks(range.start.min(known)..range.end.min(known)) {
            let mut idle = mask & !self.words[at].touched;
            while idle != 0 {
                self.partly[at * 64 + idle.trailing_zeros() as usize] = stamp.0;
                idle &= idle - 1;
            }
        }
    }

    /// Returns the age of each granule that may leave: that of its handle, which is as old as its
    /// youngest granule. Takes a step for each of them, and for each 64 granules.
    pub(crate) fn idle_ages(&self, ages: Ages) -> impl Iterator<Item = u32> {
        let words = self.words.iter().enumerate().take(self.idle_end.div_ceil(64));
        let idle =
            words.flat_map(|(at, word)| bits(word.may_leave()).map(move |bit| at * 64 + bit));
        let age = move |granule: usize| ages.of(Stamp(self.partly[granule]));
        // The handle and the age of the granule before.
        let mut last = (0..0, None);
        idle.filter_map(move |granule| {
            if self.joined == 0 {
                return Some(age(granule));
            }
            if !last.0.contains(&granule) {
                let handle = self.handle_of(granule);
                let leaves = handle.clone().all(|granule| self.leaves(granule, None));
                last = (handle.clone(), handle.map(age).min().filter(|_| leaves));
            }
            last.1
        })
    }

    /// Returns `true` if a block covers any byte of the granule.
    pub(crate) fn is_touched(&self, granule: usize) -> bool {
        self.is(granule, Word::touched)
    }

    /// Returns the number of granules whose bits `of` returns.
    pub(crate) fn count(&self, range: Range<usize>, of: impl Fn(Word) -> u64) -> u64 {
        let bits = |at: usize| of(self.words.get(at).copied().unwrap_or_default());
        masks(range).map(|(at, mask)| count(bits(at) & mask)).sum()
    }

    /// Like [`Granules::missing`], for one granule.
    pub(crate) fn missing_one(&self, granule: usize) -> MissingGranules {
        let word = self.words.get(granule / 64).copied().unwrap_or_default();
        let bit = granule % 64;
        MissingGranules {
            granules: !(word.backed & !word.leaving) >> bit & 1,
            is_moving: (word.committing | word.leaving) >> bit & 1 == 1,
        }
    }

    /// Returns what these granules lack to be committed.
    pub(crate) fn missing(&self, range: Range<usize>) -> MissingGranules {
        let mut missing = MissingGranules::default();
        for (at, mask) in masks(range) {
            let word = self.words.get(at).copied().unwrap_or_default();
            missing.granules += count(mask & !(word.backed & !word.leaving));
            missing.is_moving |= (word.committing | word.leaving) & mask != 0;
        }
        missing
    }

    /// Marks the first bare granules whose bits `of` returns, at most `granules_max`, as committing
    /// or as arriving, and calls `each` with every run of them. Returns their number.
    pub(crate) fn begin(
        &mut self,
        range: Range<usize>,
        (call, granules_max): (GranuleCall, u64),
        of: impl Fn(Word) -> u64,
        mut each: impl FnMut(Range<usize>),
    ) -> u64 {
        if range.is_empty() {
            return 0; // no entries for granules beyond the other half
        }
        self.reach(range.end);
        let (mut run, mut left) = (None, granules_max);
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            let mut bare = mask & word.bare() & of(*word);
            while count(bare) > left {
                bare &= !(1 << (u64::BITS - 1 - bare.leading_zeros())); // the last bare granule
            }
            left -= count(bare);
            word.committing |= bare;
            if call == GranuleCall::Commit {
                word.backed |= bare;
                self.counts.backed += count(bare);
                self.counts.committing += count(bare);
                self.counts.active += count(bare & word.touched);
            }
            extend(&mut run, at, bare, &mut each);
        }
        run.into_iter().for_each(each);
        granules_max - left
    }

    /// Calls `each` with every run of granules whose bits `of` returns.
    pub(crate) fn runs(
        &self,
        range: Range<usize>,
        of: impl Fn(Word) -> u64,
        mut each: impl FnMut(Range<usize>),
    ) {
        let mut run = None;
        for (at, mask) in masks(range.start..range.end.min(self.known())) {
            extend(&mut run, at, of(self.words[at]) & mask, &mut each);
        }
        run.into_iter().for_each(each);
    }

    /// Marks the innermost idle handles of one size before `end` as leaving: one, or as many
    /// adjoining ones as `leave` allows.
    ///
    /// The innermost handles are chosen because blocks are placed towards the end: granules far
    /// from it are needed least. Amortised, each word is visited once for each time that one of its
    /// granules became idle, or once per check with ages.
    pub(crate) fn begin_leave(&mut self, end: usize, leave: &Leave) -> Option<Range<usize>> {
        if leave.granules_max == 0 {
            return None;
        }
        let is_all = leave.is_all() && end >= self.idle_end;
        let Some(last) = self.idle_handle_before(end.min(self.idle_end), leave) else {
            if is_all {
                self.idle_end = 0;
            }
            return None;
        };
        let (mut first, handle) = (last.start, last.len());
        let granules_max = leave.granules_max.min(handle.saturating_mul(leave.handles_max));
        while last.end - first + handle <= granules_max && first >= handle {
            let next = self.handle_of(first - 1);
            if next.len() != handle || !self.handle_leaves(&next, leave) {
                break;
            }
            first = next.start;
        }
        let range = first..last.end;
        self.begin_part(range.clone());
        if is_all {
            self.idle_end = first;
        }
        Some(range)
    }

    /// Marks committed granules of whole handles as leaving, touched or not.
    pub(crate) fn begin_part(&mut self, range: Range<usize>) {
        debug_assert!(!self.is_joined(range.start) && !self.is_joined(range.end));
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            assert_eq!(word.committed() & mask, mask, "not all of {range:?} was committed");
            word.leaving |= mask;
        }
        self.counts.leaving += range.len() as u64;
    }

    /// Records the result of a driver call. If it was not done, the granules are as before it.
    #[inline(always)]
    pub(crate) fn end(&mut self, range: Range<usize>, call: GranuleCall, done: bool) {
        let (comes, is_bare) = match call {
            GranuleCall::Arrive => (done, false),
            GranuleCall::Commit => (false, !done),
            GranuleCall::Leave => (false, done),
        };
        if is_bare {
            self.part(range.clone());
        }
        for (at, mask) in masks(range.clone()) {
            let word = &mut self.words[at];
            let (marks, marked) = match call {
                GranuleCall::Commit => (&mut word.committing, word.backed),
                GranuleCall::Arrive => (&mut word.committing, !word.backed),
                GranuleCall::Leave => (&mut word.leaving, word.backed),
            };
            assert_eq!(*marks & marked & mask, mask, "{call:?}: not all of {range:?} was marked");
            *marks &= !mask;
            let (all, touched) = (count(mask), count(mask & word.touched));
            if comes {
                word.backed |= mask;
                self.counts.backed += all;
                self.counts.active += touched;
            } else if is_bare {
                word.backed &= !mask;
                self.counts.backed -= all;
                self.counts.active -= touched;
            }
            match call {
                GranuleCall::Commit => self.counts.committing -= all,
                GranuleCall::Leave => self.counts.leaving -= all,
                GranuleCall::Arrive => {}
            }
        }
        if !(call == GranuleCall::Leave && done) {
            self.idle_end = self.idle_end.max(range.end);
        }
    }

    /// Counts everything again. `expected` returns the effect of the live blocks on a granule.
    ///
    /// # Panics
    /// If a figure is wrong.
    pub(crate) fn validate(&self, expected: impl Fn(usize) -> (u32, bool)) {
        let total =
            |part: fn(&Word) -> u64| self.words.iter().map(|word| count(part(word))).sum::<u64>();
        assert_eq!(self.counts.backed, total(|word| word.backed));
        assert_eq!(self.counts.active, total(|word| word.backed & word.touched));
        assert_eq!(self.counts.committing, total(|word| word.committing & word.backed));
        assert_eq!(self.counts.leaving, total(|word| word.leaving));
        self.validate_handles();
        assert_eq!(total(|word| word.leaving & (word.committing | !word.backed)), 0, "leaving");
        let each = |granule| {
            let touched = self.is_touched(granule);
            let partly = self.partly.get(granule).filter(|_| touched).copied().unwrap_or(0);
            assert_eq!((partly, touched), expected(granule), "granule {granule}");
            let leaves = self.leaves(granule, None);
            let is_looked_at = granule < self.idle_end || self.is_stuck(granule);
            assert!(!leaves || is_looked_at, "idle and never looked at: {granule}");
        };
        // Most granules are neither.
        self.runs(0..self.known(), |word| word.touched | word.backed, |run| run.for_each(each));
    }

    fn validate_handles(&self) {
        let (mut stuck, mut joined) = (0, 0);
        let of = |word: Word| word.joined;
        self.runs(0..self.known(), of, |run| {
            let handle = run.start - 1..run.end;
            let same = |of: fn(Word) -> u64| {
                let bits = self.count(handle.clone(), of);
                bits == 0 || bits == handle.len() as u64
            };
            let is_one = same(|it| it.backed) && same(|it| it.committing) && same(|it| it.leaving);
            assert!(is_one, "the granules of the handle {handle:?} differ");
            stuck += self.stuck_in(&handle);
            joined += run.len() as u64;
        });
        assert_eq!(self.counts.stuck, stuck, "stuck granules");
        assert_eq!(self.joined, joined);
    }

    /// Returns `true` if the granule may leave and, with ages, has expired.
    fn leaves(&self, granule: usize, ages: Option<Ages>) -> bool {
        self.is(granule, Word::may_leave)
            && ages.is_none_or(|ages| ages.is_over(Stamp(self.partly[granule])))
    }

    /// Records that one handle backs these granules, which are being committed.
    pub(crate) fn join(&mut self, handle: Range<usize>) {
        for (at, mask) in masks(handle.start + 1..handle.end) {
            self.words[at].joined |= mask;
        }
        self.joined += handle.len() as u64 - 1;
        self.counts.stuck += self.stuck_in(&handle);
    }

    /// Records that these whole handles back nothing any more.
    fn part(&mut self, range: Range<usize>) {
        if self.joined == 0 {
            return;
        }
        let mut at = range.start;
        while at < range.end {
            let handle = self.handle_of(at);
            at = handle.end;
            self.counts.stuck -= self.stuck_in(&handle);
        }
        for (at, mask) in masks(range) {
            let word = &mut self.words[at];
            self.joined -= count(word.joined & mask);
            word.joined &= !mask;
        }
    }

    fn is_joined(&self, granule: usize) -> bool {
        self.is(granule, |word| word.joined)
    }

    /// Returns `true` if the bit of a granule is set in what `of` returns.
    fn is(&self, granule: usize, of: impl Fn(Word) -> u64) -> bool {
        self.words.get(granule / 64).is_some_and(|word| of(*word) >> (granule % 64) & 1 == 1)
    }

    /// Returns the granules of the handle of a granule; the granule alone if it is bare.
    pub(crate) fn handle_of(&self, granule: usize) -> Range<usize> {
        let mut range = granule..granule + 1;
        if self.joined == 0 {
            return range;
        }
        while self.is_joined(range.start) {
            range.start -= 1;
        }
        while self.is_joined(range.end) {
            range.end += 1;
        }
        range
    }

    /// Returns the handles that lie only in part in a range: at most one at each end.
    fn cut_handles(&self, range: &Range<usize>) -> CutHandles {
        let first = self.is_joined(range.start).then(|| self.handle_of(range.start));
        let is_new = first.as_ref().is_none_or(|first| first.end <= range.end);
        let last = (is_new && self.is_joined(range.end)).then(|| self.handle_of(range.end));
        [first, last]
    }

    /// Returns the number of granules of a handle that are stuck.
    fn stuck_in(&self, handle: &Range<usize>) -> u64 {
        let (mut touched, mut idle) = (false, 0);
        for (at, mask) in masks(handle.clone()) {
            let word = self.words[at];
            touched |= word.touched & mask != 0;
            idle += count(word.backed & !word.touched & mask);
        }
        idle * u64::from(touched)
    }

    /// Calls `each` with every committed handle that has stuck granules, and the number of these;
    /// with ages, only if all its idle granules have expired.
    pub(crate) fn stuck_handles(&self, ages: Option<Ages>, mut act: impl FnMut(Range<usize>, u64)) {
        let mut at = 0;
        while self.counts.stuck > 0 && at < self.known() {
            let handle = self.handle_of(at);
            at = handle.end;
            let stuck = self.stuck_in(&handle);
            let leaves = |granule| self.is_touched(granule) || self.leaves(granule, ages);
            if stuck > 0 && handle.clone().all(leaves) {
                act(handle, stuck);
            }
        }
    }

    fn is_stuck(&self, granule: usize) -> bool {
        let handle = self.handle_of(granule);
        handle.len() > 1 && masks(handle).any(|(at, mask)| self.words[at].touched & mask != 0)
    }

    /// Returns `true` if all granules of a handle may leave and, with ages, have expired.
    fn handle_leaves(&self, handle: &Range<usize>, leave: &Leave) -> bool {
        handle.len() <= leave.handle_max
            && handle.clone().all(|granule| self.leaves(granule, leave.ages))
    }

    /// Returns the last handle before `end` that may leave.
    fn idle_handle_before(&self, mut end: usize, leave: &Leave) -> Option<Range<usize>> {
        loop {
            let mut idle = masks(0..end.min(self.known())).rev().flat_map(|(at, mask)| {
                bits(self.words[at].may_leave() & mask).rev().map(move |bit| at * 64 + bit)
            });
            let handle = self.handle_of(idle.find(|&granule| self.leaves(granule, leave.ages))?);
            if handle.end <= end && self.handle_leaves(&handle, leave) {
                return Some(handle);
            }
            end = handle.start;
        }
    }

    /// Creates entries for all granules before `end`.
    fn reach(&mut self, end: usize) {
        if self.partly.len() < end {
            self.partly.resize(end, 0);
            self.words.resize(end.div_ceil(64), Word::default());
        }
    }
}

/// The handles that may leave.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Leave {
    /// The maximum number of granules, except that one handle may be larger.
    pub(crate) granules_max: usize,
    /// The maximum number of handles.
    pub(crate) handles_max: usize,
    /// The maximum number of granules of a handle.
    pub(crate) handle_max: usize,
    /// If set, only expired granules leave.
    pub(crate) ages: Option<Ages>,
}

impl Leave {
    /// Returns `true` if all idle handles may leave.
    const fn is_all(&self) -> bool {
        self.ages.is_none() && self.handle_max == usize::MAX
    }
}

/// Adds the next word of a walk: joins its granules to the current run, or ends the run.
fn extend(
    run: &mut Option<Range<usize>>,
    at: usize,
    mut bits: u64,
    mut each: impl FnMut(Range<usize>),
) {
    while bits != 0 {
        let first = bits.trailing_zeros();
        let length = (bits >> first).trailing_ones();
        bits &= !(low(length) << first);
        let (start, length) = (at * 64 + first as usize, length as usize);
        match run {
            Some(run) if run.end == start => run.end += length,
            _ => run.replace(start..start + length).into_iter().for_each(&mut each),
        }
    }
}

/// Returns the number of set bits. Most words have at most one, which is found in 4 instructions;
/// counting more takes 17 without `popcnt`, which not every x86-64 processor has.
fn count(bits: u64) -> u64 {
    if bits & bits.wrapping_sub(1) == 0 {
        u64::from(bits != 0)
    } else {
        u64::from(bits.count_ones())
    }
}

/// Returns the set bits of a word, from the lowest.
fn bits(word: u64) -> impl DoubleEndedIterator<Item = usize> {
    let range =
        if word == 0 { 0..0 } else { word.trailing_zeros()..u64::BITS - word.leading_zeros() };
    range.filter(move |bit| word >> bit & 1 == 1).map(|bit| bit as usize)
}

/// Returns a word with this many lowest bits set, at most 64.
const fn low(bits: u32) -> u64 {
    if bits >= u64::BITS { u64::MAX } else { (1 << bits) - 1 }
}

/// Returns the words that hold these granules, and the bits of the granules in each.
fn masks(range: Range<usize>) -> impl DoubleEndedIterator<Item = (usize, u64)> {
    let Range { start, end } = range;
    let words = if start < end { start / 64..end.div_ceil(64) } else { 0..0 };
    let (first, last) = (start / 64, words.end.wrapping_sub(1));
    words.map(move |word| {
        let from = if word == first { u64::MAX << (start % 64) } else { u64::MAX };
        let to = if word == last { u64::MAX >> (end.wrapping_neg() % 64) } else { u64::MAX };
        (word, from & to)
    })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::state::aging::Aging;
    use lowtide_core::clock::{Clock, ManualClock};
    use lowtide_core::decay::DecayTime;

    const GRANULE: u64 = 1 << 20;

    fn segment() -> Segment {
        let base = DeviceAddress::new(1 << 40);
        Segment::new(base, ByteSize::mib(64), ByteSize::new(GRANULE))
    }

    fn span(first: u64, end: u64) -> Span {
        Span { offset: first, size: end - first }
    }

    /// Returns a function that returns random numbers below a bound.
    fn chance(seed: u64) -> impl FnMut(u64) -> u64 {
        println!("seed {seed:#x}");
        let mut state = seed;
        move |bound| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            state % bound
        }
    }

    fn leave_of(granules_max: usize, ages: Option<Ages>) -> Leave {
        Leave { granules_max, handles_max: usize::MAX, handle_max: usize::MAX, ages }
    }

    /// Checks that a span lacks what its granules lack together.
    fn check_missing(segment: &Segment, of: Span) {
        let mut sum = MissingGranules::default();
        for granule in segment.granules_of(of) {
            let one =
                segment.missing(span(granule as u64 * GRANULE, (granule as u64 + 1) * GRANULE));
            sum.granules += one.granules;
            sum.is_moving |= one.is_moving;
        }
        assert_eq!(segment.missing(of), sum, "{of:?}");
    }

    /// Random blocks come and go over handles of up to eight granules, and some memory leaves: the
    /// segment's counters are checked each time, and only whole handles leave. In the larger
    /// segment, blocks and handles lie over the borders of words and of the halves.
    #[test]
    fn handles_leave_as_a_whole_and_only_if_no_block_touches_them() {
        let mut chance = chance(0x9E37_79B9_7F4A_7C15);
        let mut stuck = 0;
        for (size, large) in [(64, 20); 60].into_iter().chain([(301, 150); 60]) {
            let (base, reserved) = (DeviceAddress::new(1 << 40), ByteSize::mib(size));
            let mut segment = Segment::new(base, reserved, ByteSize::new(GRANULE));
            let mut blocks: Vec<Span> = Vec::new();
            for _ in 0..200 {
                let offset = chance((size - 4) * GRANULE);
                let most = 1 + chance(large);
                let bytes = 1 + chance(most * GRANULE).min(size * GRANULE - offset);
                let of = span(offset, offset + bytes);
                let is_free = |block: &Span| block.end() <= of.offset || of.end() <= block.offset;
                let untouch = |segment: &mut Segment, of| {
                    let idle = segment.memory().idle();
                    let went_idle = segment.set_touched::<false>(of);
                    assert_eq!(went_idle, segment.memory().idle() > idle, "{of:?}");
                };
                if chance(3) > 0 && of.end() <= size * GRANULE && blocks.iter().all(is_free) {
                    segment.set_touched::<true>(of);
                    let handle_max = if chance(4) > 0 { 8 } else { 1 };
                    let runs = segment.begin_commit(of, chance(3), handle_max);
                    check_missing(&segment, of);
                    for run in runs {
                        segment.end(run, GranuleCall::Commit, chance(8) > 0);
                    }
                    check_missing(&segment, of);
                    if segment.missing(of).is_nothing() {
                        blocks.push(of);
                    } else {
                        untouch(&mut segment, of);
                    }
                } else if !blocks.is_empty() {
                    let nth = usize::try_from(chance(blocks.len() as u64)).expect("small");
                    untouch(&mut segment, blocks.swap_remove(nth));
                }
                if chance(4) == 0 {
                    let granules = usize::try_from(1 + chance(9)).expect("small");
                    let leaves = leave_of(granules, None);
                    if let Some(run) = segment.begin_leave(&mut START.clone(), &leaves) {
                        let whole = segment.runs_of(run.range(), usize::MAX, usize::MAX);
                        assert_eq!(whole, [run], "whole handles of one size");
                        check_missing(&segment, span(0, size * GRANULE));
                        segment.end(run, GranuleCall::Leave, chance(5) > 0);
                    }
                }
                blocks.sort_unstable_by_key(|block| block.offset);
                segment.validate(blocks.iter().copied());
                assert!(segment.memory().stuck <= segment.memory().idle());
                stuck += segment.memory().stuck;
            }
        }
        assert!(stuck > 0, "no handle was ever touched in part");
    }

    fn committed(segment: &mut Segment, of: Span) {
        segment.set_touched::<true>(of);
        for run in segment.begin_commit(of, 0, 1) {
            segment.end(run, GranuleCall::Commit, true);
        }
    }

    #[test]
    fn the_longest_committed_part_is_what_a_look_at_each_granule_finds() {
        let mut chance = chance(0x2545_F491_4F6C_DD1D);
        // Halves of 100 and 99 granules: runs cross words, and the border of the halves.
        let (base, size) = (DeviceAddress::new(1 << 40), ByteSize::mib(199));
        for _ in 0..40 {
            let mut segment = Segment::new(base, size, ByteSize::new(GRANULE));
            let mut backed = [false; 199];
            for _ in 0..chance(30) {
                let first = chance(199);
                let end = (first + 1 + chance(40)).min(199);
                for granule in first..end {
                    let at = usize::try_from(granule).expect("small");
                    if !std::mem::replace(&mut backed[at], true) {
                        committed(&mut segment, span(granule * GRANULE, (granule + 1) * GRANULE));
                    }
                }
            }
            for _ in 0..40 {
                let offset = chance(198 * GRANULE);
                let of = span(offset, offset + 1 + chance(199 * GRANULE - offset));
                let (mut best, mut run) = (0, 0);
                for (granule, is_backed) in (0..).zip(backed) {
                    let start = of.offset.max(granule * GRANULE);
                    let part = of.end().min((granule + 1) * GRANULE).saturating_sub(start);
                    run = if is_backed { run + part } else { 0 };
                    best = best.max(run);
                }
                assert_eq!(segment.committed_run_max(of), best, "{of:?} of {backed:?}");
            }
        }
    }

    #[test]
    fn only_bare_granules_are_committed_and_adjoining_ones_in_one_run() {
        let mut segment = segment();
        let middle = span(2 * GRANULE, 3 * GRANULE);
        committed(&mut segment, middle);
        let all = span(GRANULE / 2, 6 * GRANULE);
        let (head, tail) = (span(all.offset, middle.offset), span(middle.end(), all.end()));
        segment.set_touched::<true>(head);
        segment.set_touched::<true>(tail);
        assert_eq!(segment.missing(all), MissingGranules { granules: 5, is_moving: false });
        let runs = segment.begin_commit(all, 0, 1);
        assert_eq!(runs[..], [Run::of(&(0..2)), Run::of(&(3..6))]);
        assert_eq!(segment.missing(all), MissingGranules { granules: 0, is_moving: true });
        assert!(segment.missing(middle).is_nothing());
        segment.end(runs[0], GranuleCall::Commit, true);
        segment.end(runs[1], GranuleCall::Commit, false);
        assert_eq!((segment.memory().backed, segment.memory().active), (3 * GRANULE, 3 * GRANULE));
        segment.validate([head, middle, tail].into_iter());
    }

    #[test]
    fn idle_granules_leave_from_the_top_and_touched_ones_never() {
        let mut segment = segment();
        let (low, top) = (span(0, 4 * GRANULE), span(5 * GRANULE, 8 * GRANULE));
        let kept = span(4 * GRANULE, 5 * GRANULE);
        for part in [low, kept, top] {
            committed(&mut segment, part);
        }
        let leave = |segment: &mut Segment, granules_max| {
            segment.begin_leave(&mut START.clone(), &leave_of(granules_max, None))
        };
        assert_eq!(leave(&mut segment, usize::MAX), None);
        assert!(segment.set_touched::<false>(low) && segment.set_touched::<false>(top));
        assert_eq!(segment.memory().idle(), 7 * GRANULE);
        let first = leave(&mut segment, 2).expect("idle");
        assert_eq!(first, Run::of(&(6..8)));
        assert_eq!(leave(&mut segment, usize::MAX), Some(Run::of(&(5..6))));
        assert_eq!(leave(&mut segment, usize::MAX), Some(Run::of(&(0..4))));
        assert_eq!(leave(&mut segment, usize::MAX), None);
        segment.end(first, GranuleCall::Leave, false);
        assert_eq!(leave(&mut segment, usize::MAX), Some(first), "a failed one may try again");
        segment.validate([kept].into_iter());
    }

    #[test]
    fn of_idle_granules_only_those_leave_whose_time_is_over() {
        let clock = ManualClock::new();
        let mut aging = Aging::new(DecayTime::from_millis(1000));
        let mut segment = segment();
        let parts =
            [span(0, 3 * GRANULE), span(3 * GRANULE, 5 * GRANULE), span(62 << 20, 64 << 20)];
        for part in parts {
            committed(&mut segment, part);
        }
        for part in parts {
            assert!(segment.set_touched::<false>(part));
            segment.stamp(part, aging.note_idle(clock.now()));
            clock.advance(Duration::from_millis(500));
        }
        let ages = aging.ages(clock.now());
        let mut cursor = START;
        let mut leave = || segment.begin_leave(&mut cursor, &leave_of(2, Some(ages)));
        assert_eq!(leave(), Some(Run::of(&(1..3))), "the first was idle for 1.5 s");
        assert_eq!(leave(), Some(Run::of(&(0..1))));
        assert_eq!(leave(), None, "the second for 1 s and less than a part");
        let oldest = segment.oldest(ages).expect("idle");
        assert!(oldest < 1024 && oldest > 500, "{oldest} of 512 to 1024 parts");
        clock.advance(Duration::from_millis(10));
        let ages = aging.ages(clock.now());
        let run = segment.begin_leave(&mut START.clone(), &leave_of(9, Some(ages)));
        assert_eq!(run, Some(Run::of(&(3..5))));
        clock.advance(Duration::from_millis(500));
        let ages = aging.ages(clock.now());
        let run = segment.begin_leave(&mut START.clone(), &leave_of(9, Some(ages)));
        assert_eq!(run, Some(Run::of(&(62..64))), "the high end's");
        segment.validate(std::iter::empty());
    }

    #[test]
    fn a_free_span_counts_as_far_as_it_is_committed_without_a_gap() {
        let mut segment = segment();
        let part = span(GRANULE, 3 * GRANULE);
        committed(&mut segment, part);
        segment.set_touched::<false>(part);
        assert_eq!(segment.committed_run_max(span(0, 64 * GRANULE)), 2 * GRANULE);
        assert_eq!(segment.committed_run_max(span(GRANULE + 512, 9 * GRANULE)), 2 * GRANULE - 512);
        assert_eq!(segment.committed_run_max(span(40 * GRANULE, 64 * GRANULE)), 0);
    }
}
