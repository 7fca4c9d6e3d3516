//! Puts memory behind blocks: finds a place, commits what is bare, within the limit.
//!
//! Driver calls run with the arena's lock given up; the granules they are for are marked, and
//! whoever needs such a granule waits for that granule's result and for nothing else. On shortage
//! the threads' fronts and the arena's own idle memory go first; then the error is raised.
//!
//! Invariants: `backed + being committed <= limit` at every commit; after an error the block is
//! free again, and what was committed for it is idle.

use super::books::{Books, Cause, Refusal};
use super::compact::step::check_whole;
use super::driver::DriverError;
use super::driver::sealed::Key;
use super::error::DeviceError;
use super::index::Span;
use super::pending::Claim;
use super::picture::Act;
use super::planted::Planted;
use super::proof::CAPTURES;
use super::region::{Placed, Region, Taking, Wanted};
use super::segment::Run;
use super::shared::Shared;
use super::streams::StreamKey;
use crate::bytes::ByteSize;
use crate::sync::{MutexGuard, lock, wait};

/// Attempts that an allocation makes beside one for every idle granule: each attempt gives at
/// least one granule back, so more are needed only against other threads.
const ATTEMPTS_BESIDE: u64 = 16;

/// What stands against a commit.
#[derive(Clone, Copy)]
enum Shortage {
    /// The arena's limit: so many bytes are wanted.
    Limit(u64),
    /// The device has no more: so many granules are wanted.
    Device(u64),
}

/// What was done about a shortage.
enum Room {
    /// Idle granules were given back.
    Made,
    /// Idle granules are being given back, or committed ahead, by another thread.
    Coming,
    /// All idle granules together would not do.
    None,
}

impl Shared {
    /// A block with memory behind it. O(1) beside its granules where nothing is to be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(super) fn obtain(&self, region: Region, wanted: Wanted) -> Result<Placed, DeviceError> {
        self.obtain_for(region, wanted, None)
    }

    /// A block that a stream may use at once, in its order; any may, where none is named.
    ///
    /// # Errors
    /// As [`Shared::obtain`].
    pub(super) fn obtain_for(
        &self,
        region: Region,
        wanted: Wanted,
        taker: Option<StreamKey>,
    ) -> Result<Placed, DeviceError> {
        let by = Taking { among_large: false, taker, waits: true };
        let attempt = |by| match self.try_obtain(region, wanted, by) {
            // There may be a hole for it among the large blocks.
            Err(refusal) if wanted.is_small() && refusal.error.is_out_of_memory() => {
                let by = Taking { among_large: true, ..by };
                self.try_obtain(region, wanted, by).map_err(|_| refusal)
            }
            outcome => outcome,
        };
        self.insist(|| match attempt(by) {
            // There may be memory for which nobody need wait, or that is to be committed.
            Err(refusal) if refusal.is_by_capture() => attempt(Taking { waits: false, ..by }),
            outcome => outcome,
        })
    }

    /// Tries; where there is no room, once more with the fronts empty and kept so. A refusal is
    /// counted.
    fn insist<T>(&self, attempt: impl Fn() -> Result<T, Refusal>) -> Result<T, DeviceError> {
        let swept = self.fronts.swept();
        let mut outcome = attempt();
        if outcome.as_ref().is_err_and(|refusal| refusal.error.is_out_of_memory()) {
            let _shut = self.fronts.shut();
            // Another thread may have emptied them since: that is room as well.
            if self.empty_fronts() || self.fronts.swept() != swept {
                outcome = attempt();
            }
        }
        let is_short = outcome.as_ref().is_err_and(|refusal| refusal.error.is_out_of_memory());
        // What is freed and worked on still is idle when that is done.
        if is_short && self.books().pending() > 0 && self.complete_all().is_ok() {
            outcome = attempt();
        }
        outcome.map_err(|refusal| self.note_refusal(refusal))
    }

    fn try_obtain(&self, region: Region, wanted: Wanted, by: Taking) -> Result<Placed, Refusal> {
        let mut books = self.books();
        let (placed, claim) = books.place(region, wanted, by)?;
        let (mut books, mut outcome) = self.back_still(books, region, placed);
        let is_done = claim.uses.is_empty() || self.planted(Planted::CrossStreamReuse);
        if outcome.is_ok() && !is_done {
            if !self.planted(Planted::MovesWhatArrives) {
                books.region_mut(region).pins.pin(placed.id);
            }
            drop(books);
            outcome = self
                .come_after(by.taker, &claim.uses)
                .map_err(|error| Refusal { cause: Cause::Driver, error: error.into() });
            books = self.books();
            books.region_mut(region).pins.unpin(placed.id);
        }
        let outcome = outcome.and_then(|()| self.check_arrival());
        match outcome {
            Ok(()) => {
                books.arrive(region, placed);
                books.record(&*self.clock, Act::Alloc, placed);
                self.fronts.note_live(books.live(), books.limit.get());
            }
            Err(_) if self.planted(Planted::LostClaim) => {
                books.withdraw(region, placed, Claim::default(), &*self.clock);
            }
            Err(_) => books.withdraw(region, placed, claim, &*self.clock),
        }
        outcome.map(|()| placed).map_err(|refusal| refusal.told(&books))
    }

    /// Lets a live block be of another size where it stands; `None` where it cannot grow there.
    ///
    /// # Errors
    /// As [`Shared::obtain`], or `ContentsLost`; the block is as it was.
    pub(super) fn resize_in_place(
        &self,
        region: Region,
        placed: Placed,
        requested: u64,
    ) -> Result<Option<Placed>, DeviceError> {
        self.insist(|| self.try_resize_in_place(region, placed, requested))
    }

    fn try_resize_in_place(
        &self,
        region: Region,
        placed: Placed,
        requested: u64,
    ) -> Result<Option<Placed>, Refusal> {
        let mut books = self.wait_until_still(self.books(), region, placed.id);
        // A block that is resized is known to be where it is: nobody would look for this again.
        check_whole(&books, region, placed)
            .map_err(|error| Refusal { cause: Cause::Uncounted, error })?;
        let Some(resized) = books.begin_resize(region, placed, requested, &*self.clock) else {
            return Ok(None);
        };
        let (mut books, outcome) = self.back_still(books, region, resized);
        books.end_resize(region, [placed, resized], outcome.is_ok(), &*self.clock);
        if outcome.is_ok() {
            books.record(&*self.clock, Act::Free, Placed { at: resized.at, ..placed });
            books.record(&*self.clock, Act::Alloc, resized);
        }
        outcome.map(|()| Some(resized)).map_err(|refusal| refusal.told(&books))
    }

    /// Refuses a block whose memory came when the arena was closed already: under the lock.
    fn check_arrival(&self) -> Result<(), Refusal> {
        if self.is_closed() {
            return Err(Refusal { cause: Cause::Uncounted, error: self.was_closed() });
        }
        Ok(())
    }

    /// A larger block with the contents of a live one, which is freed. The caller holds a lease, so
    /// that neither moves.
    ///
    /// # Errors
    /// As [`Shared::obtain`], or the driver's where it does not copy; the old block is as it was.
    pub(super) fn moved(
        &self,
        region: Region,
        old: Placed,
        wanted: Wanted,
    ) -> Result<Placed, DeviceError> {
        let new = self.obtain(region, wanted)?;
        let size = ByteSize::new(old.requested.min(wanted.requested));
        // What streams do to the old block comes before the copy.
        let complete = self.complete_all();
        let copy = || self.driver.copy(old.at, new.at, size, Key::new());
        let copied = complete.and_then(|()| copy());
        self.release(region, if copied.is_ok() { old } else { new });
        copied.map(|()| new).map_err(Into::into)
    }

    /// Sees to it that every granule of a block is committed; where the lock is given up for that,
    /// the block stays where it is.
    fn back_still<'a>(
        &'a self,
        mut books: MutexGuard<'a, Books>,
        region: Region,
        placed: Placed,
    ) -> (MutexGuard<'a, Books>, Result<(), Refusal>) {
        if books.region(region).segment.is_committed(placed.span) {
            return (books, Ok(()));
        }
        books.region_mut(region).pins.pin(placed.id);
        let (mut books, outcome) = self.back(books, region, placed.span);
        books.region_mut(region).pins.unpin(placed.id);
        (books, outcome)
    }

    /// Sees to it that every granule of a placed span is committed.
    pub(super) fn back<'a>(
        &'a self,
        mut books: MutexGuard<'a, Books>,
        region: Region,
        span: Span,
    ) -> (MutexGuard<'a, Books>, Result<(), Refusal>) {
        if books.region(region).segment.is_committed(span) {
            return (books, Ok(()));
        }
        let mut attempts = ATTEMPTS_BESIDE + books.granules_for(books.idle());
        let mut grow = books.steps.grow();
        loop {
            // Ends with the calls under way: no granule of a placed span starts to leave, and a
            // commit under way by a neighbour ends as committed or as bare.
            while books.region(region).segment.is_moving(span) {
                books = wait(&self.settled, books);
            }
            let wanting = books.region(region).segment.wanting(span);
            if wanting == 0 {
                return (books, Ok(()));
            }
            let mut shortage = Shortage::Limit(books.bytes_of(wanting));
            if books.over_limit(books.bytes_of(wanting)) == 0 {
                let runs = books.begin_commit(region, span, grow);
                let outcome;
                (books, outcome) = self.commit(books, region, &runs);
                shortage = match outcome {
                    Ok(()) => continue,
                    // Without what the growth adds, it may do.
                    Err(DriverError::OutOfMemory { .. }) if grow => {
                        grow = false;
                        continue;
                    }
                    Err(DriverError::OutOfMemory { .. }) => Shortage::Device(wanting),
                    Err(error) => return failed(books, error),
                };
            }
            if attempts == 0 {
                return refused(books, shortage, span);
            }
            let room;
            (books, room) = self.make_room(books, shortage);
            match room {
                Ok(Room::Made) => attempts -= 1,
                Ok(Room::Coming) => books = wait(&self.settled, books),
                Ok(Room::None) => return refused(books, shortage, span),
                Err(error) => return failed(books, error),
            }
        }
    }

    /// Gives idle granules back where that can help.
    fn make_room<'a>(
        &'a self,
        books: MutexGuard<'a, Books>,
        shortage: Shortage,
    ) -> (MutexGuard<'a, Books>, Result<Room, DriverError>) {
        let granules = match shortage {
            Shortage::Limit(bytes) => books.granules_for(books.over_limit(bytes)),
            Shortage::Device(granules) => granules,
        };
        let idle = books.granules_for(books.idle());
        let hopeless = match shortage {
            Shortage::Limit(_) => idle < granules,
            Shortage::Device(_) => idle == 0,
        };
        if hopeless {
            return (books, Ok(Room::None));
        }
        let (books, given) = self.give_back(books, granules, None);
        let room = match given.error {
            Some(error) => Err(error),
            None if given.granules > 0 => Ok(Room::Made),
            // Nothing could be marked, so the lock was never given up, and the idle granules
            // counted above are on their way: out, or here ahead of another thread's block.
            None => Ok(Room::Coming),
        };
        (books, room)
    }

    /// Commits marked runs, in order until one fails, and books what came of each.
    fn commit<'a>(
        &'a self,
        books: MutexGuard<'a, Books>,
        region: Region,
        runs: &[Run],
    ) -> (MutexGuard<'a, Books>, Result<(), DriverError>) {
        let segment = &books.region(region).segment;
        let places: Vec<_> = runs.iter().map(|&run| segment.place_of(run)).collect();
        drop(books);
        let mut outcome = Ok(());
        let mut done = 0;
        for &(at, size) in &places {
            outcome = self.driver.commit(at, size, Key::new());
            if outcome.is_err() {
                break;
            }
            done += 1;
        }
        let mut books = lock(&self.books);
        for (nth, &run) in runs.iter().enumerate() {
            books.end_commit(region, run, nth < done, &*self.clock);
        }
        books.note_committed();
        self.settled.notify_all();
        (books, outcome)
    }

    /// Counts a refusal.
    fn note_refusal(&self, refusal: Refusal) -> DeviceError {
        tracing::debug!(arena = self.name, error = %refusal.error, "an allocation was refused");
        let mut books = lock(&self.books);
        books.record_refusal(&refusal.error, &*self.clock);
        let failures = &mut books.totals.failures;
        *match refusal.cause {
            Cause::Limit => &mut failures.limit,
            Cause::Device => &mut failures.device,
            Cause::Addresses => &mut failures.addresses,
            Cause::Driver => &mut failures.driver,
            Cause::Uncounted => return refusal.error,
        } += 1;
        refusal.error
    }
}

impl Refusal {
    /// Whether there was something to wait for that a capture forbids.
    fn is_by_capture(&self) -> bool {
        let by = |error: &DriverError| error.code() == Some(i64::from(CAPTURES));
        matches!(&self.error, DeviceError::Driver(error) if by(error))
    }

    /// With the figures of now: the block that found no memory has no place any more, and so takes
    /// nothing of what is free.
    fn told(self, books: &Books) -> Self {
        match self.error {
            DeviceError::OutOfMemory { requested, .. } => {
                Self { error: books.out_of_memory(requested.get()), ..self }
            }
            _ => self,
        }
    }
}

/// The end of an allocation for which there is no memory. Its figures come with [`Refusal::told`].
fn refused<T>(
    books: MutexGuard<'_, Books>,
    shortage: Shortage,
    span: Span,
) -> (MutexGuard<'_, Books>, Result<T, Refusal>) {
    let cause = match shortage {
        Shortage::Limit(_) => Cause::Limit,
        Shortage::Device(_) => Cause::Device,
    };
    let error = DeviceError::OutOfMemory {
        requested: ByteSize::new(span.size),
        live: ByteSize::ZERO,
        committed: ByteSize::ZERO,
        limit: ByteSize::ZERO,
        holes: ByteSize::ZERO,
        largest_free: ByteSize::ZERO,
    };
    (books, Err(Refusal { cause, error }))
}

/// The end of an allocation on which the driver failed.
fn failed<T>(
    books: MutexGuard<'_, Books>,
    error: DriverError,
) -> (MutexGuard<'_, Books>, Result<T, Refusal>) {
    (books, Err(Refusal { cause: Cause::Driver, error: error.into() }))
}
