//! Puts memory behind blocks: finds a place, commits what is bare, within the limit.
//!
//! Driver calls run with the arena's lock given up; the granules they are for are marked, and
//! whoever needs such a granule waits for that granule's result and for nothing else. On shortage
//! the arena's own idle memory goes first; then the error is raised.
//!
//! Invariants: `backed + being committed <= limit` at every commit; after an error the block is
//! free again, and what was committed for it is idle.

use super::arena::Shared;
use super::books::Books;
use super::driver::DriverError;
use super::driver::sealed::Key;
use super::error::DeviceError;
use super::index::{Request, Span};
use super::region::{Placed, Region};
use super::segment::Run;
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
    /// Idle granules are being given back by another thread.
    Coming,
    /// All idle granules together would not do.
    None,
}

impl Shared {
    /// A block with memory behind it. O(1) beside its granules where nothing is to be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(super) fn obtain(&self, region: Region, request: Request) -> Result<Placed, DeviceError> {
        let mut books = lock(&self.books);
        let placed = books.place(region, request)?;
        // Stays while its memory is on the way: the lock is given up for that.
        let still = books.region(region).segment.is_settled(placed.span);
        if !still {
            books.region_mut(region).pins.pin(placed.id);
        }
        let (mut books, outcome) = self.back(books, region, placed.span);
        if !still {
            books.region_mut(region).pins.unpin(placed.id);
        }
        match outcome {
            Ok(()) => books.arrive(region, placed),
            Err(_) => books.withdraw(region, placed, &*self.clock),
        }
        outcome.map(|()| placed)
    }

    /// Sees to it that every granule of a placed span is committed.
    pub(super) fn back<'a>(
        &'a self,
        mut books: MutexGuard<'a, Books>,
        region: Region,
        span: Span,
    ) -> (MutexGuard<'a, Books>, Result<(), DeviceError>) {
        let mut attempts = ATTEMPTS_BESIDE + books.granules_for(books.idle());
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
                let runs = books.region_mut(region).segment.begin_commit(span, 0);
                let outcome;
                (books, outcome) = self.commit(books, region, &runs);
                shortage = match outcome {
                    Ok(()) => continue,
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
        let (books, given) = self.give_back(books, granules);
        let room = match given.error {
            Some(error) => Err(error),
            None if given.granules > 0 => Ok(Room::Made),
            // Nothing could be marked, so the lock was never given up, and the idle granules
            // counted above are on their way out.
            None if books.leaving() > 0 => Ok(Room::Coming),
            None => Ok(Room::None),
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
        for (nth, (&run, (_, size))) in runs.iter().zip(&places).enumerate() {
            books.region_mut(region).segment.end_commit(run, nth < done);
            if nth < done {
                books.totals.commits += 1;
                books.totals.committed_bytes += size.get();
            }
        }
        self.settled.notify_all();
        (books, outcome)
    }
}

/// The end of an allocation for which there is no memory.
fn refused<T>(
    mut books: MutexGuard<'_, Books>,
    shortage: Shortage,
    span: Span,
) -> (MutexGuard<'_, Books>, Result<T, DeviceError>) {
    match shortage {
        Shortage::Limit(_) => books.totals.failures.limit += 1,
        Shortage::Device(_) => books.totals.failures.device += 1,
    }
    let error = books.out_of_memory(span.size);
    (books, Err(error))
}

/// The end of an allocation on which the driver failed.
fn failed<T>(
    mut books: MutexGuard<'_, Books>,
    error: DriverError,
) -> (MutexGuard<'_, Books>, Result<T, DeviceError>) {
    books.totals.failures.driver += 1;
    (books, Err(error.into()))
}
