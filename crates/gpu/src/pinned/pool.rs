//! The pinned pool's interface: open, allocate, limit, figures, release, close.
//!
//! A pool is an arena over [`PinnedDriver`], whose blocks are raw, so that no block moves. The
//! arena keeps the accounts, finds blocks, and allocates, releases and decays segments. This file
//! adds the watermarks, and frees the blocks of completed copies (`unfinished`) when memory is
//! needed or released. A pool owns no thread.
//!
//! Live buffers make only [`PinnedPool::close`] fail. A lower limit applies to later allocations.
//!
//! Invariants: those of the arena; the arena's raw blocks are the buffers of the pool and its
//! unfinished blocks; the pool lives as long as one of its handles or buffers.
#![expect(unsafe_code, reason = "a handle of the arena can free the memory of buffers")]

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use super::PinnedBuffer;
use super::config::{PinnedConfig, PinnedKind};
use super::driver::PinnedDriver;
use crate::api::arena::{DeviceArena, limit_text};
use crate::driver::{DeviceAddress, Driver, DriverError, HostMemory};
use crate::exec::DriverEvent;
use crate::state::RequestOrigin;
use crate::types::error::{Bound, DeviceError, is_captures};
use crate::types::{ArenaGlance, ArenaSnapshot, Region, Result};
use bytemuck::Pod;
use lowtide_core::clock::Clock;
use lowtide_core::sync::{Mutex, lock};
use lowtide_core::{ByteSize, log};

/// A pool of host memory. A cheap handle: clones refer to the same pool.
///
/// Idle memory stays in the pool until a call releases it. A service calls [`PinnedPool::maintain`]
/// periodically, on a thread that may wait for the driver: it releases what was idle for the decay
/// time, and idle memory above the high watermark. [`PinnedBuffer::free`] does that too.
///
/// ```
/// use std::sync::Arc;
/// use lowtide_gpu::{ByteSize, clock::SystemClock};
/// use lowtide_gpu::{HostDriver, PinnedConfig, PinnedKind, PinnedPool};
///
/// let config = PinnedConfig {
///     kind: PinnedKind::Pageable,
///     high_watermark: ByteSize::mib(32),
///     low_watermark: ByteSize::mib(16),
///     ..PinnedConfig::new("staging")
/// };
/// let clock = Arc::new(SystemClock::new());
/// let pool = PinnedPool::open(Arc::new(HostDriver::new()), clock, config)?;
/// let buffers = [pool.alloc::<u8>(24 << 20)?, pool.alloc::<u8>(16 << 20)?];
/// drop(buffers); // 40 MiB idle: more than the high watermark
/// assert_eq!(pool.maintain()?, ByteSize::mib(24)); // down to the low one
/// assert_eq!(pool.glance().idle, ByteSize::mib(16));
/// assert_eq!(pool.purge()?, ByteSize::mib(16));
/// # Ok::<(), lowtide_gpu::DeviceError>(())
/// ```
#[derive(Clone, Debug)]
pub struct PinnedPool(Arc<PoolShared>);

/// The state shared by the handles and buffers of one pool.
pub(super) struct PoolShared {
    pub(super) arena: DeviceArena,
    driver: Arc<PinnedDriver>,
    config: PinnedConfig,
    /// Held while a shared segment is allocated, so that threads which need a segment share it.
    growth: Mutex<()>,
    pub(super) unfinished: Mutex<UnfinishedBlocks>,
}

/// A live block of a pool.
#[derive(Clone, Copy, Debug)]
pub(super) struct PinnedBlock {
    pub(super) at: DeviceAddress,
    /// The pointer to the block, with the provenance of its segment.
    pub(super) start: NonNull<u8>,
    /// The size after rounding.
    pub(super) size: ByteSize,
    pub(super) memory: HostMemory,
}

impl PinnedPool {
    /// Opens a pool; allocates nothing yet.
    ///
    /// # Errors
    /// [`DeviceError::Watermarks`]; [`DeviceError::Unsupported`] if page-locked memory is required
    /// and the driver has none.
    pub fn open(
        driver: Arc<dyn Driver>,
        clock: Arc<dyn Clock>,
        config: PinnedConfig,
    ) -> Result<Self> {
        let (low, high) = (config.low_watermark, config.high_watermark);
        if low > high {
            return Err(DeviceError::Watermarks { low, high });
        }
        let (kind, backend) = (config.kind, driver.backend());
        if kind == PinnedKind::PageLocked && !driver.capabilities().page_locked {
            return Err(DeviceError::Unsupported { what: "page-locked memory", backend });
        }
        let driver = Arc::new(PinnedDriver::new(driver, kind));
        let arena = DeviceArena::open(Arc::clone(&driver) as _, clock, config.arena())?;
        let (pool, kind_name) = (arena.name(), kind.name());
        let limit = limit_text(config.limit);
        log!(info, pool, %backend, kind = kind_name, limit, "pinned pool opened");
        let (growth, unfinished) = (Mutex::default(), Mutex::default());
        Ok(Self(Arc::new(PoolShared { arena, driver, config, growth, unfinished })))
    }

    /// Allocates `len` elements. Their contents are unspecified: zero, or data of an earlier buffer
    /// of this pool.
    ///
    /// The size is rounded up to 256 bytes; a buffer of 0 bytes takes no block. If no segment has
    /// room, it frees the blocks of completed copies, and then calls the driver.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if releasing the pool's idle segments is not enough;
    /// [`DeviceError::TooLarge`], [`DeviceError::Alignment`], [`DeviceError::Closed`],
    /// [`DeviceError::Forked`]; [`DeviceError::Driver`], with [`DriverError::LockLimit`] if the
    /// process may not lock that much. The pool stays usable after each.
    ///
    /// [`DriverError::LockLimit`]: crate::driver::DriverError::LockLimit
    pub fn alloc<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>> {
        PinnedBuffer::alloc(&self.0, len)
    }

    /// Allocates a buffer and copies `data` to it.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::alloc`].
    pub fn alloc_from<T: Pod>(&self, data: &[T]) -> Result<PinnedBuffer<T>> {
        let mut buffer = self.alloc(data.len())?;
        buffer.write_at(0, data)?;
        Ok(buffer)
    }

    /// Releases the memory that has been idle for the decay time. Then, if more than the high
    /// watermark is idle, releases idle memory until at most the low watermark is. Returns the
    /// bytes released.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with earlier releases accounted for; [`DeviceError::Forked`].
    pub fn maintain(&self) -> Result<ByteSize> {
        self.0.maintain()
    }

    /// Releases idle memory until at most `keep` bytes are committed, or nothing is idle, and
    /// returns the bytes released. One driver call per segment.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`].
    pub fn trim(&self, keep: ByteSize) -> Result<ByteSize> {
        self.0.check_here()?;
        self.0.free_completed();
        self.0.arena.trim(keep)
    }

    /// Releases all idle memory, regardless of the watermarks, and returns the bytes released.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`].
    pub fn purge(&self) -> Result<ByteSize> {
        self.trim(ByteSize::ZERO)
    }

    /// Sets the limit of committed memory, like [`DeviceArena::set_limit`].
    pub fn set_limit(&self, limit: ByteSize) {
        self.0.arena.set_limit(limit);
    }

    /// Returns the limit of committed memory; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        self.0.arena.limit()
    }

    /// Returns all figures, without a driver call; all zero in a forked child.
    #[must_use]
    pub fn snapshot(&self) -> PinnedSnapshot {
        let shared = &self.0;
        let PinnedConfig { kind, high_watermark, low_watermark, .. } = shared.config;
        let arena = shared.arena.snapshot();
        let figures =
            PinnedSnapshot { arena, kind, high_watermark, low_watermark, ..Default::default() };
        if shared.check_here().is_err() {
            return figures;
        }
        let UnfinishedBlocks { pending, quarantined, .. } = *lock(&shared.unfinished);
        PinnedSnapshot {
            page_locked: shared.driver.bytes(HostMemory::PageLocked),
            pageable: shared.driver.bytes(HostMemory::Pageable),
            fallbacks_total: shared.driver.fallbacks_total(),
            pending,
            quarantined,
            ..figures
        }
    }

    /// Returns live, committed and idle memory, like [`DeviceArena::glance`].
    #[must_use]
    pub fn glance(&self) -> ArenaGlance {
        self.0.arena.glance()
    }

    /// Returns the kind of memory that the pool was opened for.
    #[must_use]
    pub fn kind(&self) -> PinnedKind {
        self.0.config.kind
    }

    /// Returns the pool's name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.0.name()
    }

    /// Returns the pool's arena, for its figures and the release of idle memory. Its backend is
    /// [`Backend::PinnedHost`](crate::driver::Backend::PinnedHost), which makes no copies.
    ///
    /// # Safety
    /// The raw blocks of the arena are the memory of the pool's buffers. No handle of the arena is
    /// used to free one by its address, or all of them ([`DeviceArena::free`],
    /// [`Lane::free`](crate::Lane::free), [`DeviceArena::reset`]), or to move them
    /// ([`CompactOptions::moves_raw`](crate::CompactOptions::moves_raw)).
    #[must_use]
    pub unsafe fn arena(&self) -> &DeviceArena {
        &self.0.arena
    }

    /// Releases all memory and closes the pool: no handle of it can allocate any more. Waits for
    /// copies of dropped buffers. Optional: dropping the last holder does the same.
    ///
    /// # Errors
    /// [`DeviceError::LiveBlocks`] if a buffer exists, or memory is quarantined: the pool stays
    /// open. [`DeviceError::Driver`] if the driver did not release everything: the pool is closed.
    /// [`DeviceError::Forked`].
    pub fn close(&self) -> Result<()> {
        self.0.check_here()?;
        self.0.wait_for_copies();
        self.0.arena.close()
    }

    /// Checks every invariant by walking all metadata; for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.0.arena.validate();
        self.snapshot().validate();
    }
}

impl PoolShared {
    /// Fails in a forked child, in which a thread that does not exist there may hold a lock.
    pub(super) fn check_here(&self) -> Result<()> {
        self.arena.inner().check_here()
    }

    pub(super) fn name(&self) -> &str {
        self.arena.name()
    }

    /// Allocates a block for `len` elements; returns `None` if they have no bytes.
    pub(super) fn alloc_block<T: Pod>(&self, len: usize) -> Result<Option<PinnedBlock>> {
        let request =
            self.arena.inner().request::<T>(len, None, Region::Dynamic, RequestOrigin::BUFFER)?;
        let (size, align) = (ByteSize::new(request.requested), ByteSize::new(request.align));
        if size.is_zero() {
            return Ok(None);
        }
        // The query of an event invalidates a capture, as an allocation from the driver does. So it
        // is made only if such an allocation would follow.
        let has_pending = !lock(&self.unfinished).pending.is_zero();
        if has_pending && !self.has_room(size) {
            self.free_completed();
        }
        let grows = size < self.config.segment_size() && !self.has_room(size);
        let _growth = grows.then(|| lock(&self.growth));
        let alloc = || self.arena.alloc_raw(size, align, Region::Dynamic);
        let mut allocated = alloc();
        if allocated.as_ref().is_err_and(DeviceError::is_out_of_memory) && self.free_completed() {
            allocated = alloc();
        }
        // A lock limit in place of the error that it caused.
        let block = allocated.map_err(|error| match (&error, self.driver.lock_limit()) {
            (DeviceError::OutOfMemory { bound: Bound::Driver, .. }, Some(limit)) => limit.into(),
            _ => error,
        })?;
        let (at, size) = (block.at, block.size);
        let (start, memory) = self.driver.find(at).ok_or(DeviceError::NotLive { at })?;
        Ok(Some(PinnedBlock { at, start, size, memory }))
    }

    /// Returns `true` if the existing segments have at least `size` free bytes.
    fn has_room(&self, size: ByteSize) -> bool {
        let held: ByteSize = HostMemory::ALL.iter().map(|&memory| self.driver.bytes(memory)).sum();
        held.saturating_sub(self.arena.glance().live) >= size
    }

    pub(super) fn maintain(&self) -> Result<ByteSize> {
        self.check_here()?;
        self.free_completed();
        let decayed = self.arena.decay(self.arena.inner().executor.clock.now())?;
        let ArenaGlance { committed, idle, .. } = self.arena.glance();
        if idle <= self.config.high_watermark {
            return Ok(decayed);
        }
        let active = committed.saturating_sub(idle);
        let trimmed = self.arena.trim(active.saturating_add(self.config.low_watermark))?;
        Ok(decayed.saturating_add(trimmed))
    }
}

impl Drop for PoolShared {
    /// Waits for copies of dropped buffers: the arena then has no raw block, and its memory is
    /// freed with its last handle. If a block is quarantined, or its copy could not be waited for,
    /// its segment stays until the process ends. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.check_here().is_err() {
            return;
        }
        self.wait_for_copies();
        let blocks = lock(&self.unfinished);
        if !blocks.pending.is_zero() || !blocks.quarantined.is_zero() {
            let _ = self.arena.purge();
            let _for_good = ManuallyDrop::new(self.arena.clone());
        }
    }
}

lowtide_core::debug_as!(PoolShared, |it| arena: it.arena);

// Blocks of buffers that were dropped before the host observed the end of their copies.
//
// The drop of a buffer calls this, and the pool's calls that need or release memory. Such a block
// stays live in the arena, so that the arena neither reuses it nor frees or closes its segment.
// The block is pending while its event is not known to be complete, and is then freed in the
// arena. If the event cannot be queried, or there is none, the block is quarantined: it is never
// freed, and its segment stays until the process ends.
//
// The list has at most one entry per live block. Events are queried with no lock held.
//
// Invariant: `pending + quarantined <= live bytes of the arena`.

/// The blocks of a pool that a device may still use although their buffers are dropped.
#[derive(Debug, Default)]
pub(super) struct UnfinishedBlocks {
    /// Pending blocks, except those whose events are being queried.
    waiting: Vec<WaitingBlock>,
    pub(super) pending: ByteSize,
    pub(super) quarantined: ByteSize,
}

/// A block that a copy uses until an event is complete.
#[derive(Debug)]
struct WaitingBlock {
    at: DeviceAddress,
    size: ByteSize,
    event: DriverEvent,
}

impl PoolShared {
    /// Frees a block that no copy uses. Does nothing in a forked child.
    pub(super) fn free(&self, at: DeviceAddress) {
        let freed = self.arena.free(at);
        debug_assert!(freed.is_ok() || self.check_here().is_err(), "{at} is live: {freed:?}");
    }

    /// Frees a block once its copy is complete. Does nothing in a forked child.
    pub(super) fn free_after(&self, block: PinnedBlock, event: DriverEvent) {
        if self.check_here().is_err() {
            return;
        }
        let PinnedBlock { at, size, .. } = block;
        let mut blocks = lock(&self.unfinished);
        blocks.pending = blocks.pending.saturating_add(size);
        blocks.waiting.push(WaitingBlock { at, size, event });
    }

    /// Quarantines a block. Does nothing in a forked child.
    pub(super) fn quarantine(&self, bytes: ByteSize) {
        if self.check_here().is_err() {
            return;
        }
        let mut blocks = lock(&self.unfinished);
        blocks.quarantined = blocks.quarantined.saturating_add(bytes);
        drop(blocks);
        log!(warn, pool = self.name(), %bytes, "pinned block quarantined");
    }

    /// Frees the pending blocks whose copies are complete, without waiting for any. Returns `true`
    /// if there was one.
    pub(super) fn free_completed(&self) -> bool {
        self.free_completed_by(DriverEvent::is_complete)
    }

    /// Waits for the copies of all pending blocks, and frees the blocks.
    pub(super) fn wait_for_copies(&self) {
        self.free_completed_by(|event| event.wait().map(|()| true));
    }

    fn free_completed_by(
        &self,
        is_complete: impl Fn(&DriverEvent) -> Result<bool, DriverError>,
    ) -> bool {
        let mut waiting = std::mem::take(&mut lock(&self.unfinished).waiting);
        let (mut completed, mut freed, mut lost) = (Vec::new(), ByteSize::ZERO, ByteSize::ZERO);
        waiting.retain(|block| match is_complete(&block.event) {
            Ok(true) => {
                completed.push(block.at);
                freed = freed.saturating_add(block.size);
                false
            }
            Ok(false) => true,
            // The event was not queried, because a stream captures a graph.
            Err(error) if is_captures(&error) => true,
            Err(error) => {
                let (pool, bytes) = (self.name(), block.size);
                log!(warn, pool, %bytes, %error, "pinned block quarantined");
                lost = lost.saturating_add(block.size);
                false
            }
        });
        let mut blocks = lock(&self.unfinished);
        blocks.waiting.append(&mut waiting);
        blocks.pending = blocks.pending.saturating_sub(freed.saturating_add(lost));
        blocks.quarantined = blocks.quarantined.saturating_add(lost);
        drop(blocks);
        completed.iter().for_each(|&at| self.free(at));
        !completed.is_empty()
    }
}

// The figures of a pinned pool: those of its arena, and those that the arena does not know.
//
// Plain values; this module calls no driver. The parts are read one after the other, so calls of
// other threads may be included in some and not in others.
//
// Invariants, without such calls: `page_locked + pageable = arena.committed`;
// `pending + quarantined <= arena.live`.

/// The figures of a pinned pool.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct PinnedSnapshot {
    /// The figures of the pool's arena. Its live blocks are those of buffers, and the pending and
    /// quarantined ones.
    pub arena: ArenaSnapshot,
    /// The kind of memory that the pool was opened for.
    pub kind: PinnedKind,
    /// Bytes of blocks whose buffers were dropped while a copy was queued that is not known to be
    /// complete. They become free in [`PinnedPool::maintain`](super::PinnedPool::maintain), or in
    /// an allocation that needs them.
    pub pending: ByteSize,
    /// Bytes of blocks whose buffers were dropped, and that a copy may still use, because a wait or
    /// the recording of an event failed. They are neither reused nor freed until the process ends.
    pub quarantined: ByteSize,
    /// Committed bytes that are page-locked.
    pub page_locked: ByteSize,
    /// Committed bytes that are pageable.
    pub pageable: ByteSize,
    /// The number of segments that are pageable because locking failed, as the pool's kind allows.
    pub fallbacks_total: u64,
    /// Idle memory above which some is released.
    pub high_watermark: ByteSize,
    /// Idle memory that stays after a release.
    pub low_watermark: ByteSize,
}

impl PinnedSnapshot {
    /// Returns the bytes of blocks held by callers, after rounding.
    #[must_use]
    pub const fn live(&self) -> ByteSize {
        self.arena.live.saturating_sub(self.pending).saturating_sub(self.quarantined)
    }

    /// Checks the identities, which hold if no other thread uses the pool.
    ///
    /// # Panics
    /// If an identity is violated.
    pub fn validate(&self) {
        self.arena.validate();
        let committed = self.page_locked.saturating_add(self.pageable);
        assert_eq!(committed, self.arena.committed, "page_locked + pageable = committed");
        let unfinished = self.pending.saturating_add(self.quarantined);
        assert!(unfinished <= self.arena.live, "pending + quarantined <= live: {self:?}");
    }
}
