//! The memory of a region in pieces: segments that a driver without virtual memory allocates as a
//! whole, at addresses of its choice. Pure accounting, no driver and no lock.
//!
//! The region's offsets are only numbers, and have an address only while a piece covers them. Walls
//! hold the ranges without a piece: entries of the index without an owner, so that the index offers
//! only memory. A granule of wall stays between two pieces, so that no free span and no block
//! crosses their border. A piece is active as a whole while any byte in it is live or pending, and
//! is allocated and released as a whole.
//!
//! Invariants: walls and pieces tile the ranges of the index; no two pieces adjoin, nor two walls.

use std::collections::BTreeMap;

use crate::driver::DeviceAddress;
use crate::index::{BlockId, End, Span};
use crate::state::aging::{Ages, Stamp};
use crate::state::region::RegionIndex;
use crate::state::segment::{Leave, MemoryCounts, Run, Runs};
use lowtide_core::bytes::ByteSize;

/// A wall or a piece. It begins at its key in the table.
#[derive(Debug)]
struct PieceEntry {
    size: u64,
    /// The block that holds the offsets in the index; `None` if blocks may use them.
    hold: Option<BlockId>,
    piece: Option<PieceMemory>,
}

#[derive(Debug)]
pub(crate) struct PieceMemory {
    pub(crate) at: DeviceAddress,
    state: PieceState,
    /// The number of live, pending or arriving spans in the piece.
    touched: u64,
    /// The last use, if no block touches the piece.
    stamp: Stamp,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum PieceState {
    /// Requested from the driver.
    Committing,
    Committed,
    /// Being released to the driver.
    Leaving,
}

impl PieceMemory {
    fn is_idle(&self) -> bool {
        self.state == PieceState::Committed && self.touched == 0
    }

    /// Returns `true` if the piece is being released: its addresses may already belong to another
    /// allocation.
    pub(crate) fn is_leaving(&self) -> bool {
        self.state == PieceState::Leaving
    }

    pub(crate) const fn is_active(&self) -> bool {
        matches!(self.state, PieceState::Committing) || self.touched > 0
    }
}

/// The pieces of a region, and the walls between them.
#[derive(Debug, Default)]
pub(crate) struct SegmentList {
    granularity: u64,
    /// The size of the largest block that the region can ever have.
    pub(crate) largest: u64,
    entries: BTreeMap<u64, PieceEntry>,
}

impl SegmentList {
    /// Creates a list without pieces. `granularity` is a power of two.
    pub(crate) fn new(largest: u64, granularity: u64) -> Self {
        Self { granularity, largest, ..Self::default() }
    }

    /// Takes all offsets of an index in which no block is live.
    pub(crate) fn wall_off(&mut self, index: &mut RegionIndex) {
        for end in [End::Low, End::High] {
            self.put_wall(index, index.bounds(end));
        }
    }

    /// Returns the bytes of memory by its state. Takes one step per piece.
    pub(crate) fn memory(&self) -> MemoryCounts {
        let count = |(span, piece): (Span, &PieceMemory)| MemoryCounts {
            backed: span.size,
            active: span.size * u64::from(piece.is_active()),
            committing: span.size * u64::from(piece.state == PieceState::Committing),
            leaving: span.size * u64::from(piece.state == PieceState::Leaving),
            stuck: 0,
        };
        let none = MemoryCounts::default();
        self.pieces().map(count).fold(none, |sum, piece| MemoryCounts::sum(sum, piece, 1))
    }

    /// Returns the approximate bytes of this metadata. The nodes of a tree are mostly two thirds
    /// full.
    pub(crate) fn metadata(&self) -> usize {
        self.entries.len() * size_of::<(u64, PieceEntry)>() * 3 / 2
    }

    /// Finds offsets for a piece at an end of the region, the outermost that fit, and marks the
    /// piece as committing. Returns `None` if there are none. Takes one step per wall.
    pub(crate) fn begin(&mut self, index: &mut RegionIndex, end: End, size: u64) -> Option<Span> {
        let bounds = index.bounds(end);
        let walls = self.entries.range(bounds.offset..bounds.end());
        let walls = walls.filter(|(_, entry)| entry.piece.is_none());
        let mut walls = walls.map(|(&offset, entry)| Span { offset, size: entry.size });
        // A wall stays on each side on which another piece may be.
        let room = |wall: Span| {
            let from = wall.offset + self.gap(wall.offset > bounds.offset);
            let to = wall.end() - self.gap(wall.end() < bounds.end());
            let offset = match end {
                End::Low => from,
                End::High => to.checked_sub(size)?,
            };
            (offset >= from && offset.checked_add(size)? <= to)
                .then_some((wall, Span { offset, size }))
        };
        let (wall, span) = match end {
            End::Low => walls.find_map(room)?,
            End::High => walls.rev().find_map(room)?,
        };
        self.remove(index, wall.offset);
        self.put_wall(index, Span { offset: wall.offset, size: span.offset - wall.offset });
        self.put_wall(index, Span { offset: span.end(), size: wall.end() - span.end() });
        let piece = PieceMemory {
            at: DeviceAddress::new(0),
            state: PieceState::Committing,
            touched: 0,
            stamp: Stamp::default(),
        };
        self.put(index, span, Some(piece));
        Some(span)
    }

    /// Marks an idle piece as leaving; with ages, only an expired one. Chooses the smallest piece
    /// that has the granules, or else the largest. Takes one step per piece.
    pub(crate) fn begin_leave(&mut self, index: &mut RegionIndex, leave: &Leave) -> Option<Run> {
        let bytes = (leave.granules_max as u64).saturating_mul(self.granularity);
        let may_leave = |piece: &PieceMemory| {
            bytes > 0 && piece.is_idle() && leave.ages.is_none_or(|ages| ages.is_over(piece.stamp))
        };
        let idle = self.pieces().filter(|(_, piece)| may_leave(piece)).map(|(span, _)| span);
        let span = idle.min_by_key(|span| {
            let is_short = span.size < bytes;
            (is_short, if is_short { u64::MAX - span.size } else { span.size })
        })?;
        self.mark_leaving(index, span).then(|| self.run_of(span))
    }

    /// Marks a piece as leaving if it is idle. Returns `true` if it is.
    pub(crate) fn mark_leaving(&mut self, index: &mut RegionIndex, span: Span) -> bool {
        let Some(entry) = self.entries.get_mut(&span.offset) else { return false };
        let Some(piece) = entry.piece.as_mut().filter(|piece| piece.is_idle()) else {
            return false;
        };
        let hold = index.take_at(span);
        debug_assert!(hold.is_some(), "nothing touches it, so all of it is free");
        piece.state = PieceState::Leaving;
        entry.hold = hold;
        true
    }

    /// Records the result of an allocation, with the address of the piece, or of a release. The span
    /// of a piece that is there is then free, and no other thread has been notified.
    pub(crate) fn end(
        &mut self,
        index: &mut RegionIndex,
        offset: u64,
        (at, is_there): (Option<DeviceAddress>, bool),
    ) {
        let Some(piece) = self.piece_mut(offset) else { return };
        debug_assert_ne!(piece.state, PieceState::Committed, "a call was in progress");
        piece.state = PieceState::Committed;
        piece.at = at.unwrap_or(piece.at);
        if is_there {
            self.release(index, offset);
        } else {
            self.drop_piece(index, offset);
        }
    }

    /// Records that a live or pending block is in a span, or that it is gone. Returns `true` if the
    /// piece became idle.
    pub(crate) fn set_touched(&mut self, span: Span, is_touched: bool) -> bool {
        let Some(piece) = self.piece_mut(span.offset) else { return false };
        piece.touched = if is_touched { piece.touched + 1 } else { piece.touched - 1 };
        piece.touched == 0
    }

    /// Returns the granules of a span's piece if the span would be the first to touch the piece.
    pub(crate) fn opened(&self, span: Span) -> u64 {
        let found = self.find(span.offset).filter(|(_, piece)| !piece.is_active());
        found.map_or(0, |(whole, _)| whole.size / self.granularity)
    }

    /// Returns `true` if the index entry at an offset is not a block.
    pub(crate) fn is_held(&self, offset: u64) -> bool {
        self.entries.get(&offset).is_some_and(|entry| entry.hold.is_some())
    }

    /// Returns the address of an offset, which lies in a piece.
    pub(crate) fn address_of(&self, offset: u64) -> DeviceAddress {
        let found = self.find(offset);
        debug_assert!(found.is_some(), "{offset} is in no piece");
        let address = found
            .and_then(|(whole, piece)| piece.at.checked_add(ByteSize::new(offset - whole.offset)));
        address.unwrap_or(DeviceAddress::new(0))
    }

    /// Returns the offset of an address if it is in a piece that stays. The driver may already have
    /// reused the addresses of a leaving piece. Takes one step per piece.
    pub(crate) fn offset_of(&self, at: DeviceAddress) -> Option<u64> {
        self.pieces().find_map(|(span, piece)| {
            let into = at.offset_from(piece.at)?.get();
            (piece.state == PieceState::Committed && into < span.size).then(|| span.offset + into)
        })
    }

    /// Records the last use of the idle pieces in a span.
    pub(crate) fn stamp(&mut self, span: Span, stamp: Stamp) {
        let first = self.find(span.offset).map_or(span.offset, |(whole, _)| whole.offset);
        for (_, entry) in self.entries.range_mut(first..span.end().max(first)) {
            if let Some(piece) = entry.piece.as_mut().filter(|piece| piece.is_idle()) {
                piece.stamp = stamp;
            }
        }
    }

    /// Returns the age of the longest idle memory that may leave.
    pub(crate) fn oldest(&self, ages: Ages) -> Option<u32> {
        let idle = self.pieces().filter(|(_, piece)| piece.is_idle());
        idle.map(|(_, piece)| ages.of(piece.stamp)).max()
    }

    /// Returns every piece that has memory, in the order of offsets.
    pub(crate) fn there(&self) -> impl Iterator<Item = (Span, &PieceMemory)> {
        self.pieces().filter(|(_, piece)| piece.state != PieceState::Committing)
    }

    /// Returns the idle pieces, as runs.
    pub(crate) fn idle_runs(&self) -> Runs {
        let idle = self.pieces().filter(|(_, piece)| piece.is_idle());
        idle.map(|(span, _)| self.run_of(span)).collect()
    }

    /// Returns a piece as a run of granules of the region.
    fn run_of(&self, span: Span) -> Run {
        let granule = |at: u64| usize::try_from(at / self.granularity).unwrap_or(usize::MAX);
        Run::of(&(granule(span.offset)..granule(span.end())))
    }

    /// Returns the size of the wall that stays at an end of a piece, if a neighbour is possible
    /// there.
    const fn gap(&self, is_needed: bool) -> u64 {
        if is_needed { self.granularity } else { 0 }
    }

    fn pieces(&self) -> impl Iterator<Item = (Span, &PieceMemory)> {
        self.entries.iter().filter_map(|(&offset, entry)| {
            Some((Span { offset, size: entry.size }, entry.piece.as_ref()?))
        })
    }

    /// Returns the piece that an offset lies in.
    fn find(&self, offset: u64) -> Option<(Span, &PieceMemory)> {
        let (&start, entry) = self.entries.range(..=offset).next_back()?;
        let span = Span { offset: start, size: entry.size };
        entry.piece.as_ref().filter(|_| offset < span.end()).map(|piece| (span, piece))
    }

    /// Returns the piece that an offset lies in.
    fn piece_mut(&mut self, offset: u64) -> Option<&mut PieceMemory> {
        let found = self.entries.range_mut(..=offset).next_back();
        let found = found.filter(|(start, entry)| offset - **start < entry.size);
        let found = found.and_then(|(_, entry)| entry.piece.as_mut());
        debug_assert!(found.is_some(), "{offset} is in no piece");
        found
    }

    /// Puts a wall into a span, unless the span is empty.
    fn put_wall(&mut self, index: &mut RegionIndex, span: Span) {
        if span.size > 0 {
            self.put(index, span, None);
        }
    }

    /// Puts an entry into a span, and takes the span's offsets, which are free.
    fn put(&mut self, index: &mut RegionIndex, span: Span, piece: Option<PieceMemory>) {
        let hold = index.take_at(span);
        debug_assert!(hold.is_some(), "{span:?} is free");
        self.entries.insert(span.offset, PieceEntry { size: span.size, hold, piece });
    }

    /// Releases the offsets of an entry, so that blocks may use them.
    fn release(&mut self, index: &mut RegionIndex, offset: u64) {
        let Some(entry) = self.entries.get_mut(&offset) else { return };
        if let Some(hold) = entry.hold.take() {
            let gone = index.release(hold);
            debug_assert!(gone.is_some(), "it was taken");
        }
    }

    /// Removes an entry and frees its offsets. Returns its size.
    fn remove(&mut self, index: &mut RegionIndex, offset: u64) -> u64 {
        self.release(index, offset);
        self.entries.remove(&offset).map_or(0, |entry| entry.size)
    }

    /// Removes a piece that has no memory any more, or never had. Joins its offsets and the
    /// neighbouring walls into one wall.
    fn drop_piece(&mut self, index: &mut RegionIndex, offset: u64) {
        let size = self.remove(index, offset);
        let mut wall = Span { offset, size };
        let bounds = index.bounds(index.end_at(offset));
        let is_wall = |entry: &PieceEntry| entry.piece.is_none();
        let below = self.entries.range(bounds.offset..offset).next_back();
        if let Some(start) = below.filter(|(_, it)| is_wall(it)).map(|(&start, _)| start) {
            wall.size += self.remove(index, start);
            wall.offset = start;
        }
        let above = self.entries.range(wall.end()..bounds.end()).next();
        if let Some(start) = above.filter(|(_, it)| is_wall(it)).map(|(&start, _)| start) {
            wall.size += self.remove(index, start);
        }
        self.put_wall(index, wall);
    }

    /// Counts everything again. `spans` are the spans that touch pieces, in order. Returns the bytes
    /// of offsets that the index counts as live, but that no block has.
    ///
    /// # Panics
    /// If a figure is wrong.
    pub(crate) fn validate(&self, index: &RegionIndex, spans: impl Iterator<Item = Span>) -> u64 {
        let mut touched = BTreeMap::<u64, u64>::new();
        for span in spans {
            let Some((whole, piece)) = self.find(span.offset) else {
                panic!("{span:?} is in no piece");
            };
            assert!(span.end() <= whole.end(), "{span:?} crosses the border of {whole:?}");
            assert_eq!(piece.state, PieceState::Committed, "{span:?} has its memory");
            *touched.entry(whole.offset).or_default() += 1;
        }
        let (mut last, mut held) = (None::<(u64, bool)>, 0);
        for (&offset, entry) in &self.entries {
            let span = Span { offset, size: entry.size };
            let is_piece = entry.piece.is_some();
            assert!(entry.size.is_multiple_of(self.granularity) && entry.size > 0);
            if let Some((end, was_piece)) = last
                && offset != index.bounds(End::High).offset
            {
                assert!(end == offset && is_piece != was_piece, "{span:?} after {end}");
            }
            last = Some((span.end(), is_piece));
            if let Some(hold) = entry.hold {
                assert_eq!(index.span_of(hold), Some(span));
                held += span.size;
            }
            let Some(piece) = &entry.piece else {
                assert!(entry.hold.is_some(), "a wall is held");
                continue;
            };
            assert_eq!(piece.touched, touched.remove(&offset).unwrap_or(0), "{span:?}");
            assert_eq!(entry.hold.is_none(), piece.state == PieceState::Committed, "{span:?}");
        }
        held
    }
}
