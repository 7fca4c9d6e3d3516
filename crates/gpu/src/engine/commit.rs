//! Puts memory behind blocks: finds a place and commits its missing granules, within the limit.
//!
//! Driver calls run with the arena's lock released. Their granules are marked, and only a thread
//! that needs such a granule waits for its result.
//!
//! On shortage, in this order: idle memory of the arena, remapped or released; thread caches;
//! pending work of streams; every free span instead of the likely ones; callbacks (`shortage`);
//! then the error (`refusal`).
//!
//! Invariants: `backed + being committed <= limit` at every commit; the limit fails an allocation
//! only if `active` plus the block's granules exceed it; after an error the block is free again,
//! and memory committed for it is idle.
#![expect(unsafe_code, reason = "memory is committed, and contents are copied")]

use std::mem::ManuallyDrop;

use crate::driver::DriverError;
use crate::engine::compact::step::check_whole;
use crate::engine::obtain::PlacementQuery;
use crate::engine::refusal::{AllocFailure, Cause};
use crate::exec::executor::Locked;
use crate::exec::inner::ArenaInner;
use crate::index::Span;
use crate::state::arena::ArenaState;
use crate::state::event::{ArenaEvent, FailedRequest, Origin};
use crate::state::region::{AllocRequest, Placement, Region, Search};
use crate::state::segment::Run;
use crate::state::streams::StreamKey;
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;

/// One attempt of an allocation, with the extent of the search.
pub(crate) type Attempt<'a, T> = dyn Fn(Search) -> Result<T, AllocFailure> + 'a;

/// Attempts of an allocation on a full device in addition to one per idle granule: each attempt
/// releases at least one granule, so more are needed only against other processes.
pub(crate) const ATTEMPTS_BESIDE: u64 = 16;

/// Calls the next step after a shortage; returns any other result.
fn on_shortage<T>(
    outcome: Result<T, AllocFailure>,
    next: impl FnOnce(AllocFailure) -> Result<T, AllocFailure>,
) -> Result<T, AllocFailure> {
    match outcome {
        Err(refusal) if refusal.is_shortage() => next(refusal),
        outcome => outcome,
    }
}

/// The bound that a commit would exceed.
#[derive(Clone, Copy)]
pub(crate) enum ExceededBound {
    /// The arena's limit: so many bytes are wanted.
    Limit(u64),
    /// The device has no more: so many granules are wanted.
    Device(u64),
}

/// The result of acting on a shortage.
pub(crate) enum Room {
    /// Idle granules were released, or moved to where they are needed.
    Made,
    /// The lock was released without a gain: check again.
    Tried,
    /// Another thread is releasing idle granules, or committing ahead.
    Coming,
    /// All idle granules together would not do.
    None(Cause),
}

impl ArenaInner {
    /// Allocates a block with memory behind it. O(1), plus its granules if some must be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(crate) fn obtain(
        &self,
        region: Region,
        wanted: AllocRequest,
    ) -> Result<Placement, DeviceError> {
        self.obtain_for(region, wanted, None)
    }

    /// Allocates a block that a stream may use immediately, in its order; any stream, if none is
    /// given.
    ///
    /// # Errors
    /// The errors of [`ArenaInner::obtain`].
    pub(crate) fn obtain_for(
        &self,
        region: Region,
        wanted: AllocRequest,
        taker: Option<StreamKey>,
    ) -> Result<Placement, DeviceError> {
        self.seek(region, wanted, taker).map_err(|refusal| {
            self.note_refusal(region, refusal, FailedRequest::Alloc(region, wanted))
        })
    }

    fn seek(
        &self,
        region: Region,
        wanted: AllocRequest,
        taker: Option<StreamKey>,
    ) -> Result<Placement, AllocFailure> {
        self.insist(region, &|search| {
            match self.try_obtain(region, wanted, search, taker) {
                // There may be memory that needs no wait, or that can be committed.
                Err(refusal) if refusal.is_by_capture() => {
                    self.try_obtain(region, wanted, Search::Clear, taker)
                }
                outcome => outcome,
            }
        })
    }

    /// Tries, and after a shortage again after each step.
    fn insist<T>(&self, region: Region, attempt: &Attempt<'_, T>) -> Result<T, AllocFailure> {
        let outcome = on_shortage(attempt(Search::Usual), |_| self.climb(region, attempt));
        self.flush_events();
        outcome
    }

    /// The steps after the first: caches, which are kept empty meanwhile, streams, callbacks.
    fn climb<T>(&self, region: Region, attempt: &Attempt<'_, T>) -> Result<T, AllocFailure> {
        let (shut, held) = self.shut_fronts();
        let outcome = if held {
            // Their blocks may be usable in stream order, before any thread waits for them.
            on_shortage(attempt(Search::Usual), |_| self.after_pending(attempt))
        } else {
            self.after_pending(attempt)
        };
        let ask = |refusal| self.ask_for_room(region, refusal, attempt);
        let mut outcome = on_shortage(outcome, ask);
        // A neighbour that was freed meanwhile, or has no memory yet, left its granule to this one.
        let has_room = |refusal: &AllocFailure| refusal.is_contradicted(self.granule);
        for nth in 0..ATTEMPTS_BESIDE {
            if !outcome.as_ref().is_err_and(has_room) {
                break;
            }
            if nth > 0 {
                self.await_neighbour();
            }
            outcome = match attempt(Search::Apart) {
                Err(refusal) if refusal.cause == Cause::Addresses => attempt(Search::Cheapest),
                outcome => outcome,
            };
        }
        if self.check_here().is_err() {
            let _its_lock_may_be_taken = ManuallyDrop::new(shut); // in a child of a callback's fork
        }
        outcome
    }

    /// Waits for the next result of a driver call, if one is in progress: a thread that has a place
    /// without memory makes one or waits for one.
    fn await_neighbour(&self) {
        let books = self.lock();
        // While a wake is in progress the next try waits for its end, or fails: the waking thread
        // may wait for this thread's callback.
        if books.sleep.is_open() && books.leaving() + books.committing() > 0 {
            drop(books.wait());
        }
    }

    /// Tries after pending memory has become idle, at every free span.
    pub(crate) fn after_pending<T>(&self, attempt: &Attempt<'_, T>) -> Result<T, AllocFailure> {
        if self.lock().pending() > 0 {
            let _ = self.complete_all(); // if it fails, memory stays pending
        }
        attempt(Search::Cheapest)
    }

    fn try_obtain(
        &self,
        region: Region,
        wanted: AllocRequest,
        search: Search,
        taker: Option<StreamKey>,
    ) -> Result<Placement, AllocFailure> {
        let books = self.awake(self.lock()).map_err(AllocFailure::uncounted)?;
        let sought = PlacementQuery { region, wanted, search, taker };
        let (books, (placed, claim)) = self.find_place(books, sought)?;
        let (mut books, mut outcome) = self.back_still(books, region, placed);
        if outcome.is_ok() && !claim.uses.is_empty() {
            books.region_mut(region).pins.pin(placed.id);
            drop(books);
            outcome = self
                .come_after(taker, &claim.uses)
                .map_err(|error| AllocFailure { cause: Cause::Driver, error: error.into() });
            books = self.lock();
            books.region_mut(region).pins.unpin(placed.id);
        }
        let outcome = outcome.and_then(|()| self.check_arrival());
        match outcome {
            Ok(()) => {
                books.arrive(region, wanted, placed, &*self.clock);
                self.fronts.note_live(books.live(), books.limit.get());
            }
            Err(_) => books.withdraw(region, placed, claim, &*self.clock),
        }
        self.note_quieter(&books);
        outcome.map(|()| placed).map_err(|refusal| refusal.told(&books))
    }

    /// Resizes a live block in place; `None` if it cannot grow there.
    ///
    /// # Errors
    /// The errors of [`ArenaInner::obtain`], or `ContentsLost`; the block is unchanged.
    pub(crate) fn resize_in_place(
        &self,
        region: Region,
        placed: Placement,
        requested: u64,
    ) -> Result<Option<Placement>, DeviceError> {
        let what = FailedRequest::Resize(region, placed.id, requested);
        self.insist(region, &|_| self.try_resize_in_place(region, placed, requested))
            .map_err(|refusal| self.note_refusal(region, refusal, what))
    }

    fn try_resize_in_place(
        &self,
        region: Region,
        placed: Placement,
        requested: u64,
    ) -> Result<Option<Placement>, AllocFailure> {
        let mut books = self.lock();
        loop {
            books = self.awake(books).map_err(AllocFailure::uncounted)?;
            books = self.wait_until_still(books, region, placed.id);
            // It may have fallen asleep meanwhile.
            if books.sleep.is_open() {
                break;
            }
        }
        // The block's place is current here: a later check would not happen.
        check_whole(&books, region, placed).map_err(AllocFailure::uncounted)?;
        let Some(resized) = books.begin_resize(region, placed, requested, &*self.clock) else {
            return Ok(None);
        };
        let (mut books, outcome) = self.back_still(books, region, resized);
        books.end_resize(region, [placed, resized], outcome.is_ok(), &*self.clock);
        self.note_quieter(&books);
        outcome.map(|()| Some(resized)).map_err(|refusal| refusal.told(&books))
    }

    /// Refuses a block whose memory came when the arena was closed already: under the lock.
    fn check_arrival(&self) -> Result<(), AllocFailure> {
        if self.is_closed() {
            return Err(AllocFailure::uncounted(self.was_closed()));
        }
        Ok(())
    }

    /// Allocates a larger block, copies the contents of a live one and frees that. The caller holds
    /// a lease, so that neither moves.
    ///
    /// # Errors
    /// The errors of [`ArenaInner::obtain`], or the driver's if the copy fails; the old block is
    /// unchanged.
    pub(crate) fn moved(
        &self,
        region: Region,
        old: Placement,
        wanted: AllocRequest,
    ) -> Result<Placement, DeviceError> {
        let what = FailedRequest::Resize(region, old.id, wanted.requested);
        let mut new = self
            .seek(region, wanted.by(Origin::RESIZE), None)
            .map_err(|refusal| self.note_refusal(region, refusal, what))?;
        let size = ByteSize::new(old.requested.min(wanted.requested));
        // Uses of the old block by streams come before the copy.
        let complete = self.complete_all();
        // SAFETY: two live blocks, at least this large, which are committed and do not overlap. The
        // caller owns the old one and holds a lease, so that neither moves or loses its memory;
        // only this thread knows the new one, and earlier work on both is complete.
        let copy = || unsafe { self.driver.copy(old.at, new.at, size) };
        let copied = complete.and_then(|()| copy());
        let mut books = self.lock();
        if copied.is_ok() {
            let pins = &mut books.region_mut(region).pins;
            if pins.take_discarded(old.id) {
                // The copied contents were discarded before. The block is not cached when freed: a
                // cache would keep this setting.
                pins.discard(new.id);
                new.moves = Placement::STALE;
            }
            books.replace(region, old, new, &*self.clock);
        } else {
            books.release(region, new, &*self.clock);
            books.events.push(&*self.clock, || ArenaEvent::AllocFailed {
                request: what,
                cause: Cause::Driver,
                shortage: None,
            });
        }
        drop(books);
        self.flush_events();
        copied.map(|()| new).map_err(Into::into)
    }

    /// Commits every granule of a block; if the lock is released for that, the block does not move.
    fn back_still<'a>(
        &'a self,
        mut books: Locked<'a>,
        region: Region,
        placed: Placement,
    ) -> (Locked<'a>, Result<(), AllocFailure>) {
        if books.region(region).segment.is_committed(placed.span) {
            return (books, Ok(()));
        }
        books.region_mut(region).pins.pin(placed.id);
        let (mut books, outcome) = self.back(books, region, placed.span);
        books.region_mut(region).pins.unpin(placed.id);
        (books, outcome)
    }

    /// Sees to it that every granule of a placed span is committed.
    ///
    /// Each turn of its loop commits something, makes some room or waits for a driver call. Under
    /// the limit it ends when there is no room to be made, and not before: a turn in vain is one in
    /// which other threads committed.
    pub(crate) fn back<'a>(
        &'a self,
        mut books: Locked<'a>,
        region: Region,
        span: Span,
    ) -> (Locked<'a>, Result<(), AllocFailure>) {
        if books.region(region).segment.is_committed(span) {
            return (books, Ok(()));
        }
        let mut attempts = ATTEMPTS_BESIDE + books.granules_for(books.idle());
        let mut grow = books.steps.grow();
        let mut remaps = self.capabilities.remap;
        loop {
            // Ends with the calls under way: no granule of a placed span starts to leave, and a
            // commit under way by a neighbour ends as committed or as bare.
            while books.region(region).segment.is_moving(span) {
                books = books.wait();
            }
            let wanting = books.region(region).segment.wanting(span);
            if wanting == 0 {
                return (books, Ok(()));
            }
            let mut shortage = ExceededBound::Limit(books.bytes_of(wanting));
            if books.over_limit(books.bytes_of(wanting)) == 0 {
                let runs = books.begin_commit(region, span, grow);
                let outcome;
                (books, outcome) = self.commit(books, region, &runs);
                shortage = match outcome {
                    Ok(()) => continue,
                    // It may succeed without the growth.
                    Err(DriverError::OutOfMemory { .. }) if grow => {
                        grow = false;
                        continue;
                    }
                    Err(DriverError::OutOfMemory { .. }) if attempts > 0 => {
                        ExceededBound::Device(books.region(region).segment.wanting(span))
                    }
                    Err(DriverError::OutOfMemory { .. }) => {
                        return (books, Err(AllocFailure::of(Cause::Device, span.size)));
                    }
                    Err(error) => return failed(books, error),
                };
                attempts -= 1;
            }
            let room;
            (books, room) = self.make_room(books, (region, span), shortage, &mut remaps);
            match room {
                Ok(Room::Made | Room::Tried) => {}
                Ok(Room::Coming) => books = books.wait(),
                Ok(Room::None(cause)) => {
                    return (books, Err(AllocFailure::of(cause, span.size)));
                }
                Err(error) => return failed(books, error),
            }
        }
    }

    /// Moves idle granules to where a span needs them, or releases them, if that can help.
    fn make_room<'a>(
        &'a self,
        mut books: Locked<'a>,
        (region, span): (Region, Span),
        shortage: ExceededBound,
        remaps: &mut bool,
    ) -> (Locked<'a>, Result<Room, DriverError>) {
        let granules = match books.assess(shortage) {
            Ok(granules) => granules,
            Err(cause) => return (books, Ok(Room::None(cause))),
        };
        // An excess beyond the need exists only if the limit was lowered: it leaves.
        let wanting = books.region(region).segment.wanting(span);
        if *remaps && granules <= wanting {
            let moved;
            (books, moved) = self.remap_idle(books, region, span, granules);
            *remaps = !moved.failed;
            if moved.granules > 0 {
                return (books, Ok(Room::Made));
            }
            if moved.failed {
                return (books, Ok(Room::Tried));
            }
        }
        let leave = if *remaps && granules > wanting { granules - wanting } else { granules };
        self.give_room(books, leave)
    }

    /// Releases idle memory, if that can help.
    pub(crate) fn room_of_idle<'a>(
        &'a self,
        books: Locked<'a>,
        shortage: ExceededBound,
    ) -> (Locked<'a>, Result<Room, DriverError>) {
        match books.assess(shortage) {
            Ok(granules) => self.give_room(books, granules),
            Err(cause) => (books, Ok(Room::None(cause))),
        }
    }

    /// Gives about so many idle granules back.
    fn give_room<'a>(
        &'a self,
        books: Locked<'a>,
        granules: u64,
    ) -> (Locked<'a>, Result<Room, DriverError>) {
        let (books, given) = self.give_back(books, granules, None);
        let room = match given.error {
            // There is room without a trim as well, or the driver reports an error.
            Some(error) if !given.is_of_trim => Err(error),
            _ if given.granules > 0 => Ok(Room::Made),
            _ if given.unlocked => Ok(Room::Tried),
            // Nothing could be marked while the lock was held, so the idle granules counted above
            // are on their way: out, or here ahead of another thread's block.
            _ => Ok(Room::Coming),
        };
        (books, room)
    }

    /// Commits marked runs in order until one fails, and records each result.
    fn commit<'a>(
        &'a self,
        books: Locked<'a>,
        region: Region,
        runs: &[Run],
    ) -> (Locked<'a>, Result<(), DriverError>) {
        let segment = &books.region(region).segment;
        let places: Vec<_> = runs.iter().map(|&run| segment.place_of(run)).collect();
        drop(books);
        let mut outcome = Ok(());
        let mut done = 0;
        for &(at, size) in &places {
            // SAFETY: bare granules of the region's reservation, which the caller marked as
            // committing under the lock: no other call is in progress for them until `end_commit`.
            outcome = unsafe { self.driver.commit(at, size) };
            if outcome.is_err() {
                break;
            }
            done += 1;
        }
        let mut books = self.lock();
        for (nth, &run) in runs.iter().enumerate() {
            books.end_commit(region, run, nth < done, &*self.clock);
        }
        books.note_committed();
        (books, outcome)
    }
}

impl ArenaState {
    /// Returns how many idle granules must leave because of a shortage, or the cause of the error
    /// if all of them are too few.
    fn assess(&self, shortage: ExceededBound) -> Result<u64, Cause> {
        let idle = self.granules_for(self.idle());
        match shortage {
            ExceededBound::Limit(bytes) => {
                let granules = self.granules_for(self.over_limit(bytes));
                if idle >= granules {
                    return Ok(granules);
                }
                let active = self.active().saturating_add(bytes);
                Err(Cause::Limit { over: active.saturating_sub(self.limit.get()) })
            }
            ExceededBound::Device(_) if idle == 0 && !self.untrimmed => Err(Cause::Device),
            ExceededBound::Device(granules) => Ok(granules),
        }
    }
}

/// The end of an allocation on which the driver failed.
fn failed<T>(books: Locked<'_>, error: DriverError) -> (Locked<'_>, Result<T, AllocFailure>) {
    (books, Err(AllocFailure { cause: Cause::Driver, error: error.into() }))
}
