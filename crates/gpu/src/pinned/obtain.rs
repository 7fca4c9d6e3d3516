//! Finds a block, and allocates a segment from the driver if none has room.
//!
//! As in the arena's `commit`, driver calls run with the lock released; their segments are marked,
//! and only threads that need those wait. On shortage the pool releases its own idle segments, then
//! requests smaller segments, then returns the error.
//!
//! Invariants: `committed <= limit` whenever a segment is requested; after an error the pool is
//! unchanged, except for released idle segments.

use super::Range;
use super::books::{PinnedBlock, PinnedBooks, PinnedRoom, SEGMENTS_MAX, Ticket};
use super::config::{PinnedKind, rounded};
use super::pool::PoolShared;
use crate::driver::{DriverError, HostMemory};
use crate::index::Request;
use crate::types::error::{Bound, DeviceError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::{MutexGuard, lock, wait};

/// Attempts that an allocation makes: each gives a segment back or loses one to another thread.
const ATTEMPTS: usize = SEGMENTS_MAX + 16;

impl PoolShared {
    /// A block, in memory that is there.
    ///
    /// # Errors
    /// `OutOfMemory`, `TooManySegments`, `TooLarge`, `Closed` or `Driver`.
    pub(super) fn obtain(&self, request: Request) -> Result<PinnedBlock, DeviceError> {
        let mut books = lock(&self.books);
        let Some(need) = rounded(request.size) else {
            books.totals.failures.limit += 1;
            return Err(books.out_of_memory(request.size, Bound::Limit));
        };
        for _ in 0..ATTEMPTS {
            if books.closed {
                return Err(DeviceError::Closed { arena: self.label.name.clone() });
            }
            if let Some(placed) = books.place(request) {
                return Ok(placed);
            }
            let settled;
            (books, settled) = self.settle(books);
            if settled {
                continue;
            }
            if let Some(ticket) = books.expect(request) {
                books = self.wait_for(books, ticket);
                continue;
            }
            match books.room(need) {
                PinnedRoom::For(size) => {
                    let outcome;
                    (books, outcome) = self.add_segment(books, size, need, request);
                    match outcome {
                        Ok(Some(placed)) => return Ok(placed),
                        Ok(None) => {}
                        Err(error) if is_shortage(&error) && books.idle() > 0 => {
                            let keep = books.idle().saturating_sub(need);
                            let given;
                            (books, given) = self.give_back(books, keep);
                            if let Some(error) = given.error {
                                return failed(&mut books, request, error);
                            }
                        }
                        Err(error) if is_shortage(&error) && books.leaving() > 0 => {
                            books = wait(&self.settled, books);
                        }
                        Err(error) => return failed(&mut books, request, error),
                    }
                }
                PinnedRoom::After(bytes) => {
                    let keep = books.idle().saturating_sub(bytes);
                    let given;
                    (books, given) = self.give_back(books, keep);
                    if let Some(error) = given.error {
                        return failed(&mut books, request, error);
                    }
                }
                PinnedRoom::Coming => books = wait(&self.settled, books),
                PinnedRoom::None => break,
            }
        }
        books.totals.failures.limit += 1;
        Err(books.out_of_memory(request.size, Bound::Limit))
    }

    /// Waits until an arrival has come to its end. Ends with the driver call under way.
    fn wait_for<'a>(
        &'a self,
        mut books: MutexGuard<'a, PinnedBooks>,
        ticket: Ticket,
    ) -> MutexGuard<'a, PinnedBooks> {
        while books.is_arriving(ticket) {
            books = wait(&self.settled, books);
        }
        books
    }

    /// Obtains a segment of `size` bytes, or a smaller one that holds `need`, with the block in it.
    fn add_segment<'a>(
        &'a self,
        mut books: MutexGuard<'a, PinnedBooks>,
        size: u64,
        need: u64,
        request: Request,
    ) -> (MutexGuard<'a, PinnedBooks>, Result<Option<PinnedBlock>, DeviceError>) {
        let slot = match books.begin_arrive(size, request) {
            Ok(slot) => slot,
            Err(error) => return (books, Err(error)),
        };
        drop(books);
        let outcome = self.fetch(size, need);
        if let Ok(range) = &outcome {
            let (size, memory) = (range.size(), range.memory());
            let pool = self.name();
            log!(debug, pool, %size, %memory, "pinned segment allocated");
        }
        let mut books = lock(&self.books);
        let placed = books.end_arrive(slot, outcome.as_ref().ok().copied(), request);
        let wanted = self.label.kind.first();
        if outcome.as_ref().is_ok_and(|range| range.memory() != wanted) {
            books.totals.fallbacks += 1;
        }
        self.settled.notify_all();
        (books, outcome.map(|_| placed).map_err(DeviceError::Driver))
    }

    /// Memory of the pool's kind from the driver.
    fn fetch(&self, size: u64, need: u64) -> Result<Range, DriverError> {
        let kind = self.label.kind;
        match self.fetch_as(kind.first(), size, need) {
            Err(DriverError::LockLimit { .. } | DriverError::Unsupported { .. })
                if kind == PinnedKind::PageLockedOrPageable =>
            {
                self.fetch_as(HostMemory::Pageable, size, need)
            }
            outcome => outcome,
        }
    }

    /// Allocates from the driver: `size` bytes or, if it is out of memory, half, a quarter, ...,
    /// down to `need`. A shared segment is halved at most 14 times (1 GiB to 64 KiB).
    fn fetch_as(&self, memory: HostMemory, mut size: u64, need: u64) -> Result<Range, DriverError> {
        loop {
            let bytes = ByteSize::new(size);
            match self.driver.host_alloc(bytes, memory) {
                Ok(start) => return Ok(Range::new(start, bytes, memory)),
                Err(DriverError::OutOfMemory { .. } | DriverError::LockLimit { .. })
                    if size > need =>
                {
                    size = rounded(size / 2).map_or(need, |half| half.max(need));
                }
                Err(error) => return Err(error),
            }
        }
    }
}

/// Returns `true` if releasing idle memory may help.
const fn is_shortage(error: &DeviceError) -> bool {
    matches!(
        error,
        DeviceError::TooManySegments { .. }
            | DeviceError::Driver(DriverError::OutOfMemory { .. } | DriverError::LockLimit { .. })
    )
}

/// The end of an allocation on which the driver failed, or for which it has no memory.
fn failed(
    books: &mut PinnedBooks,
    request: Request,
    error: DeviceError,
) -> Result<PinnedBlock, DeviceError> {
    let failures = &mut books.totals.failures;
    match error {
        DeviceError::TooManySegments { .. } => failures.segments += 1,
        DeviceError::Driver(DriverError::LockLimit { .. }) => failures.lock_limit += 1,
        DeviceError::Driver(DriverError::OutOfMemory { .. }) => {
            failures.memory += 1;
            return Err(books.out_of_memory(request.size, Bound::Driver));
        }
        _ => failures.driver += 1,
    }
    Err(error)
}
