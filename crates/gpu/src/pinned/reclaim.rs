//! Releases idle segments: by the watermarks, down to a size, all of them, or at the end.
//!
//! Never from a drop, and from an allocation only if memory is short: freeing page-locked memory
//! may wait for the device. So a free above the high watermark leaves the release to
//! [`PinnedPool::maintain`], which the pool's owner calls, or to [`PinnedBuffer::free`].
//!
//! A segment leaves only when no block in it is live, pending or quarantined. A copy that is not
//! known to be complete keeps its block (`copy`, `settle`), and so its segment.
//!
//! Invariant: `idle after maintain <= high watermark`, and `<= low watermark` if it released
//! anything, except for concurrent frees of other threads.
//!
//! [`PinnedBuffer::free`]: super::PinnedBuffer::free
#![expect(unsafe_code, reason = "memory is given back to the driver")]

use super::books::PinnedBooks;
use super::pool::{PinnedPool, PoolShared};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::{MutexGuard, lock, wait};

/// The result of a release.
#[derive(Debug)]
pub(super) struct PinnedRelease {
    /// Bytes released.
    pub(super) bytes: ByteSize,
    /// The driver's error, if a call failed; that segment and the later ones stay.
    pub(super) error: Option<DeviceError>,
}

impl PinnedRelease {
    fn outcome(self) -> Result<ByteSize, DeviceError> {
        self.error.map_or(Ok(self.bytes), Err)
    }
}

impl PinnedPool {
    /// Releases idle segments if more than the high watermark is idle, until at most the low
    /// watermark is, and returns the bytes released. Otherwise only checks each segment.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn maintain(&self) -> Result<ByteSize, DeviceError> {
        self.shared().maintain()
    }

    /// Releases idle segments until at most `keep` bytes are committed, or nothing is idle, and
    /// returns the bytes released. One driver call per segment, none with the lock held.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`].
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

    /// Releases all idle segments, regardless of the watermarks, and returns the bytes released.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`].
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.trim(ByteSize::ZERO)
    }

    /// Releases all idle segments, like [`PinnedPool::purge`]: a pool has no smaller unit than the
    /// segment, and no growth to reset.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`].
    pub fn shrink(&self) -> Result<ByteSize, DeviceError> {
        self.purge()
    }
}

impl PoolShared {
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
        mut books: MutexGuard<'a, PinnedBooks>,
        keep: u64,
    ) -> (MutexGuard<'a, PinnedBooks>, PinnedRelease) {
        let leaving = books.begin_leave(keep);
        let mut given = PinnedRelease { bytes: ByteSize::ZERO, error: None };
        if leaving.is_empty() {
            return (books, given);
        }
        drop(books);
        let mut done = 0;
        for (_, range) in &leaving {
            // SAFETY: `begin_leave` marked the piece under the lock: it has no block, and none is
            // placed in it until `end_leave` below.
            match unsafe { self.give(*range) } {
                Ok(()) => done += 1,
                Err(error) => {
                    given.error = Some(error);
                    break;
                }
            }
        }
        given.bytes = leaving[..done].iter().map(|(_, range)| range.size()).sum();
        let (pool, bytes) = (self.name(), given.bytes);
        log!(debug, pool, %bytes, "pinned segments released");
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
            log!(info, pool = self.name(), %quarantined, "pinned pool closed");
        }
        given.error.map_or(Ok(()), Err)
    }
}
