//! The pinned pool's interface: open, allocate, limit, figures, close.
//!
//! `obtain` finds blocks and allocates segments, `reclaim` releases them, `books` has the
//! accounting. It owns no thread and reads no clock.
//!
//! Invariants: those of [`PinnedSnapshot`]; one lock, no driver call under it; the pool lives as
//! long as a handle or a buffer of it.

use lowtide_core::log;
use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::books::{PinnedBlock, PinnedBooks};
use super::config::{PinnedConfig, PinnedKind};
use super::snapshot::{Label, PinnedGlance, PinnedSnapshot};
use super::{PinnedBuffer, Range};
use crate::driver::{Backend, Driver, HOST_ALIGNMENT};
use crate::index::{End, Request};
use crate::types::error::DeviceError;
use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;
use lowtide_core::sync::{Condvar, Mutex, lock};

/// The most bytes of a block: below `isize::MAX`, so that every block can be a slice.
const BYTES_MAX: ByteSize = ByteSize::new(1 << 62);

/// A pool of host memory. A cheap handle: clones refer to the same pool.
///
/// Idle memory stays in the pool until a call releases it: a service calls [`PinnedPool::maintain`]
/// periodically, on a thread that may wait for the driver; [`PinnedBuffer::free`] releases
/// immediately.
///
/// ```
/// use std::sync::Arc;
/// use lowtide_gpu::ByteSize;
/// use lowtide_gpu::{HostDriver, PinnedConfig, PinnedKind, PinnedPool};
///
/// let config = PinnedConfig {
///     kind: PinnedKind::Pageable,
///     high_watermark: ByteSize::mib(32),
///     low_watermark: ByteSize::mib(16),
///     ..PinnedConfig::new("staging")
/// };
/// let pool = PinnedPool::open(Arc::new(HostDriver::new()), config)?;
/// let buffers = [pool.alloc::<u8>(24 << 20)?, pool.alloc::<u8>(16 << 20)?];
/// drop(buffers); // 40 MiB idle: more than the high watermark
/// assert_eq!(pool.maintain()?, ByteSize::mib(24)); // down to the low one
/// assert_eq!(pool.snapshot().idle, ByteSize::mib(16));
/// assert_eq!(pool.purge()?, ByteSize::mib(16));
/// # Ok::<(), lowtide_gpu::DeviceError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PinnedPool(Arc<PoolShared>);

/// The state shared by the handles and buffers of one pool.
pub(super) struct PoolShared {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) books: Mutex<PinnedBooks>,
    /// Notified whenever a driver call's result has been recorded.
    pub(super) settled: Condvar,
    pub(super) label: Label,
    birth: Birth,
}

impl PinnedPool {
    /// Opens a pool; allocates nothing yet.
    ///
    /// # Errors
    /// [`DeviceError::Watermarks`]; [`DeviceError::Unsupported`] if page-locked memory is required
    /// and the driver has none.
    pub fn open(driver: Arc<dyn Driver>, config: PinnedConfig) -> Result<Self, DeviceError> {
        config.check()?;
        let backend = driver.backend();
        if config.kind == PinnedKind::PageLocked && !driver.capabilities().page_locked {
            return Err(DeviceError::Unsupported { what: "page-locked memory", backend });
        }
        let first = config.kind.first();
        let books = PinnedBooks::new(config.limit.get(), config.segment_size(), first);
        let label = Label {
            name: config.name,
            backend,
            kind: config.kind,
            high_watermark: config.high_watermark,
            low_watermark: config.low_watermark,
        };
        let PinnedConfig { limit, .. } = config;
        let (pool, kind) = (&label.name, label.kind.name());
        log!(info, pool, %backend, kind, %limit, "pinned pool opened");
        Ok(Self(Arc::new(PoolShared {
            driver,
            books: Mutex::new(books),
            settled: Condvar::new(),
            label,
            birth: Birth::now(),
        })))
    }

    /// Allocates `len` elements. Their contents are unspecified: zero, or data of an earlier buffer
    /// of this pool.
    ///
    /// The size is rounded up to 256 bytes; a buffer of 0 bytes takes no block. In the worst case
    /// it searches every segment; if none has room, it calls the driver, or waits for another
    /// thread's call that brings enough.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if releasing the pool's idle segments is not enough;
    /// [`DeviceError::TooLarge`], [`DeviceError::Alignment`], [`DeviceError::TooManySegments`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`]; [`DeviceError::Driver`], with
    /// [`DriverError::LockLimit`] if the process may not lock that much. The pool stays usable
    /// after each.
    ///
    /// [`DriverError::LockLimit`]: crate::driver::DriverError::LockLimit
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, DeviceError> {
        self.0.buffer(len)
    }

    /// Allocates a buffer and copies `data` to it.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, data: &[T]) -> Result<PinnedBuffer<T>, DeviceError> {
        let mut buffer = self.0.buffer(data.len())?;
        buffer.write_at(0, data)?;
        Ok(buffer)
    }

    /// Sets the limit of committed memory. Memory above a lowered limit stays until it is free and
    /// released; nothing more is allocated from the driver until then.
    pub fn set_limit(&self, limit: ByteSize) {
        if self.0.check_here().is_ok() {
            lock(&self.0.books).limit = limit.get();
            log!(info, pool = self.name(), %limit, "pinned pool limit set");
        }
    }

    /// Returns the limit of committed memory; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        if self.0.check_here().is_err() {
            return ByteSize::ZERO;
        }
        ByteSize::new(lock(&self.0.books).limit)
    }

    /// Returns all figures at one instant, without a driver call; all zero in a forked child.
    ///
    /// Holds the lock while it searches the largest free span: usually a few free blocks per
    /// segment, in the worst case all.
    #[must_use]
    pub fn snapshot(&self) -> PinnedSnapshot {
        let shared = &self.0;
        if shared.check_here().is_err() {
            return PinnedSnapshot::of(&shared.label, None);
        }
        PinnedSnapshot::of(&shared.label, Some(&lock(&shared.books)))
    }

    /// Returns committed and idle memory at one instant, for sampling: no allocation, no driver
    /// call, and the lock is held for one check of each segment. Zero in a forked child.
    #[must_use]
    pub fn glance(&self) -> PinnedGlance {
        if self.0.check_here().is_err() {
            return PinnedGlance::default();
        }
        let books = lock(&self.0.books);
        PinnedGlance {
            live: ByteSize::new(books.live()),
            committed: ByteSize::new(books.committed()),
            idle: ByteSize::new(books.idle() + books.leaving()),
        }
    }

    /// Returns the kind of memory that the pool was opened for.
    #[must_use]
    pub fn kind(&self) -> PinnedKind {
        self.0.label.kind
    }

    /// Returns the pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the backend of the driver.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.0.label.backend
    }

    /// Frees everything and closes the pool: its other handles cannot allocate any more. Waits for
    /// copies of freed buffers. Quarantined memory stays with the process. Optional: dropping the
    /// last holder does the same, and logs nothing.
    ///
    /// # Errors
    /// Returns the pool, still usable, and the reason: [`DeviceError::LiveBlocks`],
    /// [`DeviceError::Driver`] with earlier releases accounted for, [`DeviceError::Forked`].
    pub fn close(self) -> Result<(), (Self, DeviceError)> {
        match self.0.close() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    /// Checks every invariant by walking all metadata; for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.0.validate();
    }

    pub(super) fn shared(&self) -> &PoolShared {
        &self.0
    }
}

impl PoolShared {
    /// Fails in a forked child, in which the lock may be held by a thread that does not exist
    /// there.
    pub(super) fn check_here(&self) -> Result<(), DeviceError> {
        if self.birth.is_here() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    pub(super) fn name(&self) -> &str {
        &self.label.name
    }

    /// Returns the bytes of `len` elements, if such a buffer is possible at all.
    pub(super) fn bytes_of<T: Pod>(&self, len: usize) -> Result<u64, DeviceError> {
        let (element, requested) = (ByteSize::of(size_of::<T>()), ByteSize::of(align_of::<T>()));
        let refused = if requested > HOST_ALIGNMENT {
            DeviceError::Alignment { requested, largest: HOST_ALIGNMENT }
        } else {
            match element.checked_mul(ByteSize::of(len).get()) {
                Some(bytes) if bytes <= BYTES_MAX => return Ok(bytes.get()),
                _ => DeviceError::TooLarge { len, element, largest: BYTES_MAX },
            }
        };
        lock(&self.books).totals.failures.size += 1;
        Err(refused)
    }

    pub(super) fn buffer<T: Pod>(
        self: &Arc<Self>,
        len: usize,
    ) -> Result<PinnedBuffer<T>, DeviceError> {
        self.check_here()?;
        let size = self.bytes_of::<T>(len)?;
        let align = ByteSize::of(align_of::<T>()).get();
        let placed = match size {
            0 => None,
            _ => Some(self.obtain(Request { size, align, end: End::Low })?),
        };
        Ok(PinnedBuffer::new(Arc::clone(self), placed, len))
    }

    /// Resizes a block in place; returns `true` if it fits.
    pub(super) fn resize_in_place(&self, placed: &mut PinnedBlock, bytes: u64) -> bool {
        lock(&self.books).resize(placed, bytes)
    }

    /// Frees a block: bookkeeping only. In a forked child does nothing.
    pub(super) fn release(&self, placed: PinnedBlock) {
        if self.check_here().is_ok() {
            lock(&self.books).release(&placed);
        }
    }

    fn validate(&self) {
        let books = lock(&self.books);
        books.validate();
        PinnedSnapshot::of(&self.label, Some(&books)).validate();
    }

    /// Gives a piece back.
    ///
    /// # Safety
    /// The range is a whole piece that this pool obtained and has not given back. No block of it is
    /// live, pending or quarantined, and none is placed in it any more.
    pub(super) unsafe fn give(&self, range: Range) -> Result<(), DeviceError> {
        let Range { start, size, memory } = range;
        // SAFETY: a whole allocation of this driver, of which every use is complete: a block is
        // free only if the host has observed the end of each copy of it (contract of this
        // function).
        Ok(unsafe { self.driver.host_free(start, size, memory) }?)
    }
}

impl Drop for PoolShared {
    /// Frees everything: no block is held, and no thread waits for the lock. Waits for copies of
    /// freed buffers, as the driver may do to free page-locked memory. Memory that the driver
    /// refuses to free, and quarantined memory, stays with the process. Does nothing in a forked
    /// child.
    fn drop(&mut self) {
        if self.check_here().is_ok() {
            let books = self.settle_all(lock(&self.books));
            for range in books.ranges() {
                // SAFETY: nobody has the pool, so that no block is live and none is placed. Pieces
                // with pending or quarantined blocks are not among these ranges.
                let _ = unsafe { self.give(range) };
            }
        }
    }
}

impl fmt::Debug for PoolShared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("label", &self.label)
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}
