//! Blocks that were freed while a copy of them was queued, and blocks whose copies have an unknown
//! state.
//!
//! A freed block with a queued copy is pending: its event is queried before the pool allocates
//! another segment, and by [`PinnedPool::maintain`](super::PinnedPool::maintain) and the other
//! calls that release memory. If the query fails, the block is quarantined: its space is not reused
//! and its segment is not freed until the process ends.
//!
//! Invariant: `taken = live + pending + quarantined` in every segment.

use super::books::{PinnedBlock, PinnedBooks, Waiting};
use super::pool::PoolShared;
use crate::driver::DriverError;
use crate::exec::handles::DriverEvent;
use crate::types::error::is_captures;
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::{MutexGuard, lock};

impl PoolShared {
    /// Frees a block once a copy is complete. In a forked child does nothing.
    pub(super) fn release_after(&self, placed: PinnedBlock, event: DriverEvent) {
        if self.check_here().is_ok() {
            lock(&self.books).release_after(Waiting { placed, event });
        }
    }

    /// Frees a block that a device may use for ever: it is not reused. In a forked child does
    /// nothing.
    pub(super) fn quarantine(&self, placed: PinnedBlock) {
        if self.check_here().is_ok() {
            lock(&self.books).quarantine(&placed);
            self.warn_of(&placed, None);
        }
    }

    /// Frees the pending blocks whose copies are complete, without waiting for any; returns whether
    /// there were some. The lock is given up meanwhile.
    pub(super) fn settle<'a>(
        &'a self,
        books: MutexGuard<'a, PinnedBooks>,
    ) -> (MutexGuard<'a, PinnedBooks>, bool) {
        self.settle_by(books, DriverEvent::is_complete)
    }

    /// The same, after a wait for each copy.
    pub(super) fn settle_all<'a>(
        &'a self,
        books: MutexGuard<'a, PinnedBooks>,
    ) -> MutexGuard<'a, PinnedBooks> {
        self.settle_by(books, |event| event.wait().map(|()| true)).0
    }

    fn settle_by<'a>(
        &'a self,
        mut books: MutexGuard<'a, PinnedBooks>,
        is_complete: impl Fn(&DriverEvent) -> Result<bool, DriverError>,
    ) -> (MutexGuard<'a, PinnedBooks>, bool) {
        let waiting = std::mem::take(&mut books.waiting);
        if waiting.is_empty() {
            return (books, false);
        }
        drop(books);
        let (mut done, mut lost, mut rest) = (Vec::new(), Vec::new(), Vec::new());
        for one in waiting {
            match is_complete(&one.event) {
                Ok(true) => done.push(one.placed),
                Ok(false) => rest.push(one),
                // Not queried: a stream captures a graph.
                Err(error) if is_captures(&error) => rest.push(one),
                Err(error) => lost.push((one.placed, error)),
            }
        }
        let any = !done.is_empty();
        let mut books = lock(&self.books);
        books.waiting.append(&mut rest);
        done.into_iter().for_each(|placed| books.settle(&placed));
        lost.iter().for_each(|(placed, _)| books.give_up(placed));
        if lost.is_empty() {
            return (books, any);
        }
        drop(books);
        lost.iter().for_each(|(placed, error)| self.warn_of(placed, Some(error)));
        (lock(&self.books), any)
    }

    fn warn_of(&self, placed: &PinnedBlock, error: Option<&DriverError>) {
        let (pool, bytes) = (self.name(), ByteSize::new(placed.span.size));
        let error = error.map(tracing::field::display);
        log!(warn, pool, %bytes, error, "pinned block quarantined");
    }
}
