//! Gives idle segments back: by the watermarks, down to a size, all of them, at the end.
//!
//! Never from a drop, and from an allocation only where memory is short: freeing page-locked memory
//! may wait for the device. So a free that passes the high watermark leaves the rest to
//! [`PinnedPool::maintain`], which the pool's owner calls, or to [`PinnedBuffer::free`].
//!
//! A segment leaves only when no block in it is live, pending or quarantined. A copy that is not
//! known to be complete keeps its block (`copy`, `settle`), and so its segment.
//!
//! Invariant: `idle after maintain <= high watermark`, and `<= low watermark` if it gave anything
//! back, but for what other threads free meanwhile.
//!
//! [`PinnedBuffer::free`]: super::PinnedBuffer::free

use super::books::Books;
use super::pool::{PinnedPool, Shared};
use crate::bytes::ByteSize;
use crate::device::error::DeviceError;
use crate::sync::{MutexGuard, lock, wait};

/// What giving back came to.
#[derive(Debug)]
pub(super) struct GivenBack {
    /// Bytes given back.
    pub(super) bytes: ByteSize,
    /// The driver's error, where a call failed; that segment and the later ones stay.
    pub(super) error: Option<DeviceError>,
}

impl GivenBack {
    fn outcome(self) -> Result<ByteSize, DeviceError> {
        self.error.map_or(Ok(self.bytes), Err)
    }
}

impl PinnedPool {
    /// Gives idle segments back where more than the high watermark is idle, until at most the low
    /// one is; returns how many bytes that was. Else only looks at each segment.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], after what was given back before is booked;
    /// [`DeviceError::Forked`].
    pub fn maintain(&self) -> Result<ByteSize, DeviceError> {
        self.shared().maintain()
    }

    /// Gives idle segments back until at most `keep` bytes are committed, or nothing is idle;
    /// returns how many bytes that was. One driver call a segment, none with the lock held.
    ///
    /// # Errors
    /// As [`PinnedPool::maintain`].
    pub fn trim(&self, keep: ByteSize) -> Result<ByteSize, DeviceError> {
        let shared = self.shared();
        shared.check_here()?;
        let (books, _) = shared.settle(lock(&shared.books));
        let idle = books.idle();
        let active = books.committed() - idle - books.leaving();
        let (books, given) = shared.give_back(books, keep.get().saturating_sub(active));
        drop(books);
        given.outcome()
    }

    /// Gives all idle segments back, whatever the watermarks; returns how many bytes that was.
    ///
    /// # Errors
    /// As [`PinnedPool::maintain`].
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.trim(ByteSize::ZERO)
    }

    /// Gives all idle segments back. The same as [`PinnedPool::purge`]: a pool has no smaller unit
    /// than the segment, and no growth to begin anew.
    ///
    /// # Errors
    /// As [`PinnedPool::maintain`].
    pub fn shrink(&self) -> Result<ByteSize, DeviceError> {
        self.purge()
    }
}

impl Shared {
    pub(super) fn maintain(&self) -> Result<ByteSize, DeviceError> {
        self.check_here()?;
        let (books, _) = self.settle(lock(&self.books));
        if books.idle() <= self.label.high_watermark.get() {
            return Ok(ByteSize::ZERO);
        }
        let (books, given) = self.give_back(books, self.label.low_watermark.get());
        drop(books);
        given.outcome()
    }

    /// Gives idle segments back until at most `keep` bytes of them stay, with the lock given up
    /// around the calls: at most one for each segment.
    pub(super) fn give_back<'a>(
        &'a self,
        mut books: MutexGuard<'a, Books>,
        keep: u64,
    ) -> (MutexGuard<'a, Books>, GivenBack) {
        let leaving = books.begin_leave(keep);
        let mut given = GivenBack { bytes: ByteSize::ZERO, error: None };
        if leaving.is_empty() {
            return (books, given);
        }
        drop(books);
        let mut done = 0;
        for (_, range) in &leaving {
            match self.give(*range) {
                Ok(()) => done += 1,
                Err(error) => {
                    given.error = Some(error);
                    break;
                }
            }
        }
        given.bytes = leaving[..done].iter().map(|(_, range)| range.size()).sum();
        let (pool, bytes) = (self.name(), given.bytes);
        log!(debug, pool, %bytes, "idle segments were given back");
        let mut books = lock(&self.books);
        for (nth, (slot, _)) in leaving.iter().enumerate() {
            books.end_leave(*slot, nth < done);
        }
        self.settled.notify_all();
        (books, given)
    }

    /// Frees everything, and refuses to get more. Waits for copies of freed buffers, and for what
    /// other threads free.
    pub(super) fn close(&self) -> Result<(), DeviceError> {
        self.check_here()?;
        let mut books = self.settle_all(lock(&self.books));
        let count = books.blocks() + books.pending_blocks();
        if count > 0 {
            let bytes = ByteSize::new(books.live() + books.pending());
            let arena = self.label.name.clone();
            return Err(DeviceError::LiveBlocks { arena, count, bytes });
        }
        books.closed = true;
        while books.leaving() > 0 {
            books = wait(&self.settled, books);
        }
        let (mut books, given) = self.give_back(books, 0);
        books.closed = given.error.is_none();
        let quarantined = ByteSize::new(books.quarantined());
        drop(books);
        if given.error.is_none() {
            log!(info, pool = self.name(), %quarantined, "the pool was closed");
        }
        given.error.map_or(Ok(()), Err)
    }
}
