//! The memory for the blocks of a region: one reserved segment with granules, or pieces that a
//! driver allocates and frees as a whole.
//!
//! Both kinds have the same interface, so placing and counting are independent of the kind. An
//! operation that only one kind supports, such as committing single granules, does nothing on the
//! other.
//!
//! Invariants: those of [`Segment`] and of [`SegmentList`].

use std::ops::Range;

use crate::driver::DeviceAddress;
use crate::index::Span;
use crate::state::aging::{Ages, Stamp};
use crate::state::granules::{MemoryCounts, MissingGranules};
use crate::state::region_index::RegionIndex;
use crate::state::segment::{Run, Runs, Segment};
use crate::state::segment_list::SegmentList;
use lowtide_core::bytes::ByteSize;

/// The memory for the offsets of a region.
#[derive(Debug)]
pub(crate) enum Backing {
    /// Addresses that were reserved once.
    Reserved(Segment),
    /// Segments, each with its own address.
    SegmentList(SegmentList),
}

/// Calls the method of either kind.
macro_rules! either {
    ($self:expr, $it:ident => $said:expr) => {
        match $self {
            Self::Reserved($it) => $said,
            Self::SegmentList($it) => $said,
        }
    };
}

impl Backing {
    /// Returns `true` if memory is allocated and freed in whole pieces.
    #[inline]
    pub(crate) const fn is_whole(&self) -> bool {
        matches!(self, Self::SegmentList(_))
    }

    pub(crate) const fn granularity(&self) -> u64 {
        either!(self, it => it.granularity)
    }

    /// Returns the end of its offsets.
    pub(crate) const fn extent(&self) -> u64 {
        match self {
            Self::Reserved(segment) => segment.reserved,
            Self::SegmentList(pieces) => pieces.extent,
        }
    }

    /// Returns the bytes of addresses. For pieces: of those with memory, because there are no
    /// others.
    pub(crate) fn reserved(&self) -> u64 {
        match self {
            Self::Reserved(segment) => segment.reserved,
            Self::SegmentList(pieces) => pieces.memory().backed,
        }
    }

    /// For pieces: holds the offsets without memory in an index in which nothing is live.
    pub(crate) fn wall_off(&mut self, index: &mut RegionIndex) {
        if let Self::SegmentList(pieces) = self {
            pieces.wall_off(index);
        }
    }

    /// Returns the bytes that the index counts as live, but that no block has.
    pub(crate) fn held(&self) -> u64 {
        match self {
            Self::Reserved(_) => 0,
            Self::SegmentList(pieces) => pieces.held(),
        }
    }

    /// Returns `true` if the index entry at an offset is not a block.
    pub(crate) fn is_held(&self, offset: u64) -> bool {
        match self {
            Self::Reserved(_) => false,
            Self::SegmentList(pieces) => pieces.is_held(offset),
        }
    }

    /// Returns the bytes of memory by its state.
    #[inline]
    pub(crate) fn memory(&self) -> MemoryCounts {
        either!(self, it => it.memory())
    }

    /// Like [`Segment::handle_size`]. For pieces: the granularity.
    pub(crate) fn handle_size(&self, run: Run) -> ByteSize {
        match self {
            Self::Reserved(segment) => segment.handle_size(run),
            Self::SegmentList(pieces) => ByteSize::new(pieces.granularity),
        }
    }

    /// Like [`Segment::runs_of`]. A piece is one run.
    pub(crate) fn runs_of(
        &self,
        range: Range<usize>,
        granules_max: usize,
        handles_max: usize,
    ) -> Vec<Run> {
        match self {
            Self::Reserved(segment) => segment.runs_of(range, granules_max, handles_max),
            Self::SegmentList(_) => vec![Run::of(&range)],
        }
    }

    /// Like [`Segment::handle_of`].
    pub(crate) fn handle_of(&self, granule: usize) -> Range<usize> {
        self.reserved_segment().map_or(granule..granule + 1, |segment| segment.handle_of(granule))
    }

    /// Returns the bytes of this metadata.
    pub(crate) fn metadata(&self) -> usize {
        either!(self, it => it.metadata())
    }

    /// Returns the address and the size of a run, which lies in one piece.
    pub(crate) fn place_of(&self, run: Run) -> (DeviceAddress, ByteSize) {
        let span = self.span_of(run);
        (self.address_of(span.offset), ByteSize::new(span.size))
    }

    /// Returns the offsets of a run.
    pub(crate) fn span_of(&self, run: Run) -> Span {
        run.span(self.granularity())
    }

    /// Returns the address of an offset.
    #[inline]
    pub(crate) fn address_of(&self, offset: u64) -> DeviceAddress {
        either!(self, it => it.address_of(offset))
    }

    /// Returns the offset of an address, if the address is in this region.
    pub(crate) fn offset_of(&self, at: DeviceAddress) -> Option<u64> {
        match self {
            Self::Reserved(segment) => {
                let offset = at.offset_from(segment.base)?.get();
                (offset < segment.reserved).then_some(offset)
            }
            Self::SegmentList(pieces) => pieces.offset_of(at),
        }
    }

    /// Returns `true` if any of these addresses belongs to the backing permanently. For pieces: one
    /// step for each.
    pub(crate) fn overlaps(&self, at: DeviceAddress, size: ByteSize) -> bool {
        let meets = |from: DeviceAddress, bytes: u64| {
            let (from, at) = (from.get(), at.get());
            at < from.saturating_add(bytes) && from < at.saturating_add(size.get())
        };
        match self {
            Self::Reserved(segment) => meets(segment.base, segment.reserved),
            Self::SegmentList(pieces) => {
                let mut stay = pieces.there().filter(|piece| !piece.is_leaving);
                stay.any(|piece| meets(piece.at, piece.span.size))
            }
        }
    }

    /// Records a block in a span.
    #[inline]
    pub(crate) fn touch(&mut self, span: Span) {
        either!(self, it => it.touch(span));
    }

    /// Records that a block is freed; returns `true` if memory became idle.
    #[inline]
    pub(crate) fn untouch(&mut self, span: Span) -> bool {
        either!(self, it => it.untouch(span))
    }

    /// Returns what a span lacks to be committed.
    #[inline]
    pub(crate) fn missing(&self, span: Span) -> MissingGranules {
        match self {
            Self::Reserved(segment) => segment.missing(span),
            // The index offers only pieces that stay.
            Self::SegmentList(_) => MissingGranules::default(),
        }
    }

    /// Returns the cost of placing a block in a span, beyond its size: see [`Segment::cost`]. For
    /// pieces: the bytes that the block keeps from becoming idle.
    #[inline]
    pub(crate) fn cost(&self, span: Span) -> u64 {
        match self {
            Self::Reserved(segment) => segment.cost(span),
            Self::SegmentList(pieces) => u64::from(pieces.opened(span) > 0),
        }
    }

    /// Returns the number of additional active granules if a block is placed in a span.
    pub(crate) fn inactive(&self, span: Span) -> u64 {
        match self {
            Self::Reserved(segment) => segment.inactive(span),
            Self::SegmentList(pieces) => pieces.opened(span),
        }
    }

    /// Like [`Segment::bare`].
    pub(crate) fn bare(&self, span: Span) -> u64 {
        self.reserved_segment().map_or(0, |segment| segment.bare(span))
    }

    /// Like [`Segment::begin_commit`].
    pub(crate) fn begin_commit(&mut self, span: Span, ahead: u64, handle_max: usize) -> Runs {
        let segment = self.reserved_mut();
        segment.map_or_else(Runs::new, |segment| segment.begin_commit(span, ahead, handle_max))
    }

    /// Like [`Segment::end_commit`].
    pub(crate) fn end_commit(&mut self, run: Run, done: bool) {
        if let Some(segment) = self.reserved_mut() {
            segment.end_commit(run, done);
        }
    }

    /// Records the last use of a span's memory that no block touches.
    pub(crate) fn stamp(&mut self, span: Span, stamp: Stamp) {
        either!(self, it => it.stamp(span, stamp));
    }

    /// Returns the age of the longest idle memory that may leave.
    pub(crate) fn oldest(&self, ages: Ages) -> Option<u32> {
        either!(self, it => it.oldest(ages))
    }

    /// Returns the bytes of the longest part of a free span that has memory.
    pub(crate) fn committed_run_max(&self, span: Span) -> u64 {
        match self {
            Self::Reserved(segment) => segment.committed_run_max(span),
            Self::SegmentList(_) => span.size, // all free space has memory
        }
    }

    /// Returns the granules that can leave for a sleep, in runs: all committed granules. For
    /// pieces: only the idle ones, because the others cannot be restored.
    pub(crate) fn committed_runs(&self) -> Runs {
        match self {
            Self::Reserved(segment) => segment.committed_runs(),
            Self::SegmentList(pieces) => pieces.idle_runs(),
        }
    }

    /// Returns the spans of the segments in order, on drivers that allocate segments.
    pub(crate) fn segments(&self) -> Option<Vec<Span>> {
        match self {
            Self::Reserved(_) => None,
            Self::SegmentList(pieces) => Some(pieces.there().map(|piece| piece.span).collect()),
        }
    }

    /// Returns the spans with memory in address order, each with whether a live, arriving or
    /// pending block touches it.
    pub(crate) fn backed_spans(&self) -> Vec<(Span, bool)> {
        match self {
            Self::Reserved(segment) => segment.backed_spans(),
            Self::SegmentList(pieces) => {
                pieces.there().map(|piece| (piece.span, piece.is_active)).collect()
            }
        }
    }

    /// Like [`Segment::touched_runs`].
    pub(crate) fn touched_runs(&self, run: Run) -> Runs {
        self.reserved_segment().map_or_else(Runs::new, |segment| segment.touched_runs(run))
    }

    /// Returns the bytes of a block that have no memory.
    pub(crate) fn bare_bytes(&self, span: Span) -> u64 {
        self.reserved_segment().map_or(0, |segment| segment.bare_bytes(span))
    }

    /// Returns the granules that a span touches.
    pub(crate) fn granules_of(&self, span: Span) -> Range<usize> {
        either!(self, it => it.granules_of(span))
    }

    /// # Panics
    /// If a figure is wrong.
    pub(crate) fn validate(&self, index: &RegionIndex, spans: impl Iterator<Item = Span>) {
        match self {
            Self::Reserved(segment) => segment.validate(spans),
            Self::SegmentList(pieces) => pieces.validate(index, spans),
        }
    }

    /// Returns the segment, unless the driver allocates segments.
    pub(crate) const fn reserved_segment(&self) -> Option<&Segment> {
        match self {
            Self::Reserved(segment) => Some(segment),
            Self::SegmentList(_) => None,
        }
    }

    /// Like [`Backing::reserved_segment`].
    pub(crate) const fn reserved_mut(&mut self) -> Option<&mut Segment> {
        match self {
            Self::Reserved(segment) => Some(segment),
            Self::SegmentList(_) => None,
        }
    }
}
