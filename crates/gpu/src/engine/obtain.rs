//! Allocates a segment for a block, on drivers that allocate whole segments instead of granules.
//!
//! The counterpart of `commit` for reserved segments. There a block has a place before it has
//! memory; here the index offers only memory that exists, so the segment comes first. It is
//! allocated with the arena's lock released, and the block is placed in it while the lock that
//! records it is held. Other threads allocate their own segments meanwhile, or wait if the limit
//! leaves no other way. The steps on shortage are those of `commit`, and this is their first.
//!
//! Invariants: those of `commit`, with the whole new segment as the block's need: the limit fails
//! an allocation only if `active` plus that segment exceed it.
#![expect(unsafe_code, reason = "memory is taken away")]

use crate::driver::{DeviceAddress, DriverError};
use crate::engine::commit::{ATTEMPTS_BESIDE, ExceededBound, Room};
use crate::engine::refusal::{AllocFailure, Cause};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::index::{End, Span};
use crate::state::aging::Ages;
use crate::state::arena::ArenaState;
use crate::state::event::ArenaEvent;
use crate::state::ground::Backing;
use crate::state::pending::Claim;
use crate::state::ranges::APART_FROM;
use crate::state::region::{AllocRequest, Placement, Region, RegionState, Search, end_of};
use crate::state::segment::{Cursor, Run};
use crate::state::streams::StreamKey;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::Clock;

/// A requested block, and the manner of the search.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PlacementQuery {
    pub(crate) region: Region,
    pub(crate) wanted: AllocRequest,
    pub(crate) search: Search,
    pub(crate) taker: Option<StreamKey>,
}

/// The lock of the accounting, and a block that has a place.
pub(crate) type LockedPlacement<'a> = (Locked<'a>, (Placement, Claim));

impl ArenaInner {
    /// Finds a place for a block; allocates a segment for it if there is none and the driver
    /// allocates segments.
    ///
    /// # Errors
    /// `OutOfAddresses`; for a segment also the errors of [`ArenaInner::obtain`].
    pub(crate) fn find_place<'a>(
        &'a self,
        mut books: Locked<'a>,
        sought: PlacementQuery,
    ) -> Result<LockedPlacement<'a>, AllocFailure> {
        let PlacementQuery { region, wanted, search, taker } = sought;
        match books.place(region, wanted, search, taker) {
            Ok(found) => Ok((books, found)),
            Err(refusal) if self.is_whole() => self.obtain_segment(books, refusal, sought),
            Err(refusal) => Err(refusal),
        }
    }

    /// Obtains a segment for a block that found no place, or makes room for one, or finds that
    /// another thread has.
    ///
    /// Each turn of its loop obtains one, makes some room or waits for a driver call.
    fn obtain_segment<'a>(
        &'a self,
        mut books: Locked<'a>,
        mut no_place: AllocFailure,
        sought: PlacementQuery,
    ) -> Result<LockedPlacement<'a>, AllocFailure> {
        let PlacementQuery { region, wanted, search, taker } = sought;
        let mut attempts = ATTEMPTS_BESIDE + books.granules_for(books.idle());
        let mut grow = books.steps.grow();
        let granules = books.granules_for(wanted.size);
        let needed = books.bytes_of(granules);
        loop {
            let mut shortage = ExceededBound::Limit(needed);
            if books.over_limit(needed) == 0 {
                let Some(span) = books.begin_segment(sought, needed, grow) else {
                    return Err(no_place);
                };
                let outcome;
                (books, outcome) = self.create(books, sought, span);
                shortage = match outcome {
                    Ok(Some(placed)) => return Ok((books, (placed, Claim::default()))),
                    Ok(None) => return Err(no_place),
                    // It may succeed without the growth.
                    Err(DriverError::OutOfMemory { .. }) if grow => {
                        grow = false;
                        continue;
                    }
                    Err(DriverError::OutOfMemory { .. }) if attempts > 0 => {
                        ExceededBound::Device(granules)
                    }
                    Err(DriverError::OutOfMemory { .. }) => {
                        return Err(AllocFailure::of(Cause::Device, wanted.size).told(&books));
                    }
                    Err(error) => {
                        return Err(AllocFailure { cause: Cause::Driver, error: error.into() });
                    }
                };
                attempts -= 1;
            }
            let room;
            (books, room) = self.room_of_idle(books, shortage);
            match room {
                Ok(Room::Made | Room::Tried) => {}
                Ok(Room::Coming) => books = books.wait(),
                // A segment that arrives for another thread may have room for this one as well.
                Ok(Room::None(Cause::Limit { .. }))
                    if books.region(region).segment.committing() > 0 =>
                {
                    books = books.wait();
                }
                Ok(Room::None(cause)) => {
                    return Err(AllocFailure::of(cause, wanted.size).told(&books));
                }
                Err(error) => {
                    return Err(AllocFailure { cause: Cause::Driver, error: error.into() });
                }
            }
            // It may have fallen asleep: nothing of this block was recorded.
            books = self.awake(books).map_err(AllocFailure::uncounted)?;
            match books.place(region, wanted, search, taker) {
                Ok(found) => return Ok((books, found)),
                Err(refusal) => no_place = refusal,
            }
        }
    }

    /// Allocates a marked segment from the driver, and places the block in it.
    fn create<'a>(
        &'a self,
        books: Locked<'a>,
        sought: PlacementQuery,
        span: Span,
    ) -> (Locked<'a>, Result<Option<Placement>, DriverError>) {
        drop(books);
        let outcome = self.driver.segment_create(ByteSize::new(span.size));
        let mut books = self.lock();
        let region = sought.region;
        books.end_segment(region, span, outcome.as_ref().ok().copied(), &*self.clock);
        let placed = outcome.map(|_| books.region_mut(region).place_in(sought.wanted, span));
        (books, placed)
    }

    /// Returns `true` if the driver allocates and frees whole segments.
    #[inline]
    pub(crate) const fn is_whole(&self) -> bool {
        !self.capabilities.virtual_memory
    }

    /// Takes the memory behind a marked run away: of a segment that came whole, all of it.
    ///
    /// # Safety
    /// This thread has marked the run as leaving, and has not recorded the end of that: no other
    /// call is in progress for it, and no block is placed there. It has memory, and every use of
    /// that is complete.
    pub(crate) unsafe fn take_away(
        &self,
        at: DeviceAddress,
        size: ByteSize,
    ) -> Result<(), DriverError> {
        if self.is_whole() {
            // SAFETY: the contract of this function; a marked run of pieces is a whole segment.
            unsafe { self.driver.segment_destroy(at, size) }
        } else {
            // SAFETY: the contract of this function; a run lies in the region's one reservation.
            unsafe { self.driver.decommit(at, size) }
        }
    }
}

impl ArenaState {
    /// Returns `true` if every granule counts against the limit, and all blocks share them.
    pub(crate) fn shares_granules(&self) -> bool {
        self.limit.get() / self.bytes_of(1) < APART_FROM
    }

    /// Marks a segment for the block as committing, including the growth; `None` if there are no
    /// offsets for it.
    fn begin_segment(&mut self, sought: PlacementQuery, needed: u64, grow: bool) -> Option<Span> {
        let PlacementQuery { region, wanted, search, .. } = sought;
        let room = self.limit.get().saturating_sub(self.backed());
        let whole = if grow { self.steps.commit(needed, room) } else { needed };
        let size = needed + self.bytes_of((whole - needed) / self.bytes_of(1));
        let is_shared = self.shares_granules() || search == Search::AmongLarge;
        let books = self.region_mut(region);
        let is_small = end_of(wanted.size) == End::High && books.index.bounds(End::High).size > 0;
        let end = if is_small && !is_shared { End::High } else { End::Low };
        // If offsets are short, without the growth, and a small block among the large.
        let ways = [(end, size), (end, needed), (End::Low, needed)];
        ways.into_iter().find_map(|(end, size)| books.begin_segment(end, size))
    }

    /// Records the result of allocating a segment.
    fn end_segment(
        &mut self,
        region: Region,
        span: Span,
        at: Option<DeviceAddress>,
        clock: &dyn Clock,
    ) {
        self.region_mut(region).end_segment(span, at);
        if let Some(at) = at {
            let size = ByteSize::new(span.size);
            self.events.push(clock, || ArenaEvent::Committed { at, size });
            self.totals.commits += 1;
            self.totals.committed_bytes += span.size;
        }
        self.note_committed();
    }
}

impl RegionState {
    fn begin_segment(&mut self, end: End, size: u64) -> Option<Span> {
        match &mut self.segment {
            Backing::SegmentList(pieces) => pieces.begin(&mut self.index, end, size),
            Backing::Reserved(_) => None,
        }
    }

    fn end_segment(&mut self, span: Span, at: Option<DeviceAddress>) {
        if let Backing::SegmentList(pieces) = &mut self.segment {
            pieces.end(&mut self.index, span.offset, at);
        }
    }

    /// Places a block in a free span that holds it, at that end of the span at which such blocks
    /// begin; arriving.
    fn place_in(&mut self, wanted: AllocRequest, within: Span) -> Option<Placement> {
        let offset = match self.index.end_at(within.offset) {
            End::Low => within.offset,
            End::High => (within.end() - wanted.size) / wanted.align * wanted.align,
        };
        let span = Span { offset, size: wanted.size };
        let id = self.index.take_at(span);
        debug_assert!(id.is_some(), "{span:?} of {within:?} is free");
        Some(self.put(wanted, id?, span))
    }

    /// Marks the next run of idle memory as leaving, of about this many granules; with ages, only
    /// expired memory. A segment leaves whole.
    pub(crate) fn begin_leave(
        &mut self,
        cursor: &mut Cursor,
        granules_max: u64,
        ages: Option<Ages>,
    ) -> Option<Run> {
        match &mut self.segment {
            Backing::Reserved(segment) => segment.begin_leave(cursor, granules_max, ages),
            Backing::SegmentList(pieces) => {
                let bytes = granules_max.saturating_mul(pieces.granularity());
                let span = pieces.begin_leave(&mut self.index, bytes, ages)?;
                Some(pieces.run_of(span))
            }
        }
    }

    /// Marks committed granules as leaving, for a sleep.
    pub(crate) fn begin_part(&mut self, run: Run) {
        match &mut self.segment {
            Backing::Reserved(segment) => segment.begin_part(run),
            Backing::SegmentList(pieces) => {
                let is_idle = pieces.mark_leaving(&mut self.index, pieces.span_of(run));
                debug_assert!(is_idle, "no other leaves for a sleep");
            }
        }
    }

    /// Records the result of a decommit.
    pub(crate) fn end_leave(&mut self, run: Run, done: bool) {
        match &mut self.segment {
            Backing::Reserved(segment) => segment.end_leave(run, done),
            Backing::SegmentList(pieces) => {
                pieces.end_leave(&mut self.index, pieces.span_of(run).offset, done);
            }
        }
    }
}
