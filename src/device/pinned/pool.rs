//! The pinned pool as its callers see it: open, allocate, limit, figures, close.
//!
//! `obtain` finds a block and gets segments, `reclaim` gives them back, `books` counts. It owns no
//! thread and reads no time.
//!
//! Invariants: those of [`PinnedSnapshot`]; one lock, no driver call under it; the pool lives as
//! long as a handle or a buffer of it.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::books::{Books, Placed};
use super::config::{PinnedConfig, PinnedKind};
use super::snapshot::{Label, PinnedGlance, PinnedSnapshot};
use super::{PinnedBuffer, Range};
use crate::bytes::ByteSize;
use crate::device::driver::sealed::Key;
use crate::device::driver::{Backend, Driver, HOST_ALIGNMENT};
use crate::device::error::DeviceError;
use crate::device::index::{End, Request};
use crate::fork::Birth;
use crate::sync::{Condvar, Mutex, lock};

/// The most bytes of a block: below `isize::MAX`, so that every block can be a slice.
const BYTES_MAX: ByteSize = ByteSize::new(1 << 62);

/// A pool of host memory: a cheap handle, the same pool for every clone.
///
/// Memory stays with the pool until somebody asks: a service calls [`PinnedPool::maintain`] now and
/// then, from a thread that may wait for the driver; [`PinnedBuffer::free`] does so at once.
///
/// ```
/// use std::sync::Arc;
/// use lowtide::ByteSize;
/// use lowtide::device::{HostDriver, PinnedConfig, PinnedKind, PinnedPool};
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
/// # Ok::<(), lowtide::device::DeviceError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PinnedPool(Arc<Shared>);

/// What the handles and buffers of one pool share.
pub(super) struct Shared {
    pub(super) driver: Arc<dyn Driver>,
    pub(super) books: Mutex<Books>,
    /// Notified whenever a driver call's result has been booked.
    pub(super) settled: Condvar,
    pub(super) label: Label,
    birth: Birth,
}

impl PinnedPool {
    /// Opens a pool; obtains nothing yet.
    ///
    /// # Errors
    /// [`DeviceError::Watermarks`]; [`DeviceError::Unsupported`] where page-locked memory is asked
    /// for, nothing else will do, and the driver has none.
    pub fn open(driver: Arc<dyn Driver>, config: PinnedConfig) -> Result<Self, DeviceError> {
        config.check()?;
        let backend = driver.backend();
        if config.kind == PinnedKind::PageLocked && !driver.capabilities().page_locked {
            return Err(DeviceError::Unsupported { what: "page-locked memory", backend });
        }
        let first = config.kind.first();
        let books = Books::new(config.limit.get(), config.segment_size(), first);
        let label = Label {
            name: config.name,
            backend,
            kind: config.kind,
            high_watermark: config.high_watermark,
            low_watermark: config.low_watermark,
        };
        let PinnedConfig { limit, .. } = config;
        let (pool, kind) = (&label.name, label.kind.name());
        log!(info, pool, %backend, kind, %limit, "a pool was opened");
        Ok(Self(Arc::new(Shared {
            driver,
            books: Mutex::new(books),
            settled: Condvar::new(),
            label,
            birth: Birth::now(),
        })))
    }

    /// Room for `len` elements, whose contents are unspecified: zero, or what an earlier buffer of
    /// this pool left there.
    ///
    /// Rounded up to 256 bytes. Without any bytes, no block is taken. At worst it looks at every
    /// segment; where none has room it calls the driver, or waits for another thread's call that
    /// brings enough.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] after the pool's own idle segments were given back and that was
    /// not enough; [`DeviceError::TooLarge`], [`DeviceError::Alignment`],
    /// [`DeviceError::TooManySegments`], [`DeviceError::Closed`], [`DeviceError::Forked`];
    /// [`DeviceError::Driver`], with [`DriverError::LockLimit`] where the process may not lock so
    /// much. The pool works on after each.
    ///
    /// [`DriverError::LockLimit`]: crate::device::driver::DriverError::LockLimit
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, DeviceError> {
        self.0.buffer(len)
    }

    /// A buffer with a copy of `data`.
    ///
    /// # Errors
    /// As [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, data: &[T]) -> Result<PinnedBuffer<T>, DeviceError> {
        let mut buffer = self.0.buffer(data.len())?;
        buffer.write_at(0, data)?;
        Ok(buffer)
    }

    /// Sets the most that may be committed. What is above it stays until it is free and given back;
    /// nothing more is obtained until then.
    pub fn set_limit(&self, limit: ByteSize) {
        if self.0.check_here().is_ok() {
            lock(&self.0.books).limit = limit.get();
            log!(info, pool = self.name(), %limit, "the pool's limit was set");
        }
    }

    /// The most that may be committed; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        if self.0.check_here().is_err() {
            return ByteSize::ZERO;
        }
        ByteSize::new(lock(&self.0.books).limit)
    }

    /// All figures at one instant, without a driver call; all zero in a forked child.
    ///
    /// Holds the lock while it looks for the largest free span: at worst at every free block,
    /// mostly at a few in each segment.
    #[must_use]
    pub fn snapshot(&self) -> PinnedSnapshot {
        let shared = &self.0;
        if shared.check_here().is_err() {
            return PinnedSnapshot::of(&shared.label, None);
        }
        PinnedSnapshot::of(&shared.label, Some(&lock(&shared.books)))
    }

    /// Committed and idle memory at one instant, for a sampler: no allocation, no driver call, and
    /// the lock is held for one look at each segment. Zero in a forked child.
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

    /// What kind of memory the pool was opened for.
    #[must_use]
    pub fn kind(&self) -> PinnedKind {
        self.0.label.kind
    }

    /// The pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// The driver in use.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.0.label.backend
    }

    /// Frees everything and ends the pool: its other handles can allocate no more. Waits for copies
    /// of freed buffers. Quarantined memory stays with the process. Not needed: the last holder
    /// does the same, and logs nothing.
    ///
    /// # Errors
    /// The pool, usable as before, and why: [`DeviceError::LiveBlocks`], [`DeviceError::Driver`]
    /// after what was given back before is booked, [`DeviceError::Forked`].
    pub fn close(self) -> Result<(), (Self, DeviceError)> {
        match self.0.close() {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    /// Walks all books and checks every invariant; for tests, at the cost of the whole pool.
    ///
    /// # Panics
    /// Where one is broken.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.0.validate();
    }

    pub(super) fn shared(&self) -> &Shared {
        &self.0
    }
}

impl Shared {
    /// Refuses in a forked child, where the lock may be held by a thread that is not there.
    pub(super) fn check_here(&self) -> Result<(), DeviceError> {
        if self.birth.is_here() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    pub(super) fn name(&self) -> &str {
        &self.label.name
    }

    /// The bytes of `len` elements, where such a buffer is possible at all.
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

    /// Makes a block hold this many bytes where it stands; says whether it does.
    pub(super) fn resize_in_place(&self, placed: &mut Placed, bytes: u64) -> bool {
        lock(&self.books).resize(placed, bytes)
    }

    /// Frees a block: bookkeeping only. In a forked child does nothing.
    pub(super) fn release(&self, placed: Placed) {
        if self.check_here().is_ok() {
            lock(&self.books).release(&placed);
        }
    }

    fn validate(&self) {
        let books = lock(&self.books);
        books.validate();
        PinnedSnapshot::of(&self.label, Some(&books)).validate();
    }

    /// Gives a piece back. Nothing refers into it any more.
    pub(super) fn give(&self, range: Range) -> Result<(), DeviceError> {
        let Range { start, size, memory } = range;
        Ok(self.driver.host_free(start, size, memory, Key::new())?)
    }
}

impl Drop for Shared {
    /// Frees everything: nobody holds a block, and nobody waits for the lock. Waits for copies of
    /// freed buffers, as the driver may do to free page-locked memory. What the driver refuses to
    /// take, and what is quarantined, stays with the process. In a forked child does nothing.
    fn drop(&mut self) {
        if self.check_here().is_ok() {
            let books = self.settle_all(lock(&self.books));
            for range in books.ranges() {
                let _ = self.give(range);
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("label", &self.label)
            .field("driver", &self.driver)
            .finish_non_exhaustive()
    }
}
