//! A session's use of a slot's arena, which allocates from the arena that serves at that moment.
//!
//! It holds no arena, so it never keeps a replaced one alive. An allocation takes the slot's lock
//! briefly, in addition to the arena's cost; the lock is not held during the allocation.
//!
//! Invariant: a slot's `users` = the number of its uses that exist.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaResolution, Conflict};
use crate::device::{Buffer, DeviceArena, DeviceError, PinnedBuffer, RawBlock, Region};

use super::place::{Generation, Place};
use super::slot::{ArenaReport, Slot};

/// A counted use of a slot's arena, from [`MemoryDevices::use_arena`](crate::memory::MemoryDevices::use_arena).
///
/// Buffers may outlive it. Use [`Buffer::enter`] to obtain a lease for one.
#[must_use = "the arena is left when this is dropped"]
pub struct ArenaUse {
    place: Arc<Place>,
    report: ArenaReport,
}

impl ArenaUse {
    pub(super) const fn new(place: Arc<Place>, report: ArenaReport) -> Self {
        Self { place, report }
    }

    /// Allocates in the serving arena, like [`DeviceArena::alloc`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc(len, region))
    }

    /// Allocates in the serving arena, like [`DeviceArena::alloc_from`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc_from`]; [`DeviceError::Unsupported`] in a slot of
    /// pinned memory.
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc_from(data, region))
    }

    /// Allocates in the serving pool, like [`PinnedPool::alloc`](crate::device::PinnedPool::alloc),
    /// for slots of pinned memory.
    ///
    /// # Errors
    /// The same as for [`PinnedPool::alloc`](crate::device::PinnedPool::alloc);
    /// [`DeviceError::Unsupported`] in a slot of device memory.
    pub fn alloc_pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, DeviceError> {
        let serving = self.serving()?;
        let pool = serving.as_ref().and_then(|serving| serving.pool());
        let what = "pinned memory in a slot of device memory";
        pool.map_or_else(|| self.refused(what), |pool| pool.alloc(len))
    }

    /// Allocates in the serving arena, like [`DeviceArena::alloc_raw`]. Returns the arena as well:
    /// it frees the block ([`DeviceArena::free`]), even if it is replaced meanwhile. Do not
    /// allocate from it.
    ///
    /// # Errors
    /// The same as for [`DeviceArena::alloc_raw`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn alloc_raw(
        &self,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<(DeviceArena, RawBlock), DeviceError> {
        self.with(|arena| Ok((arena.clone(), arena.alloc_raw(size, align, region)?)))
    }

    /// Releases the idle memory of the serving arena now, like [`DeviceArena::purge`].
    ///
    /// # Errors
    /// The same as for [`DeviceArena::purge`]; [`DeviceError::Unsupported`] in a slot of pinned
    /// memory.
    pub fn purge(&self) -> Result<ByteSize, DeviceError> {
        self.with(DeviceArena::purge)
    }

    fn with<R>(
        &self,
        act: impl FnOnce(&DeviceArena) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let serving = self.serving()?;
        let arena = serving.as_ref().and_then(|serving| serving.device_arena());
        arena.map_or_else(|| self.refused("device memory in a slot of pinned memory"), act)
    }

    fn serving(&self) -> Result<Option<Arc<Generation>>, DeviceError> {
        if self.place.is_here() { Ok(self.place.serving()) } else { Err(DeviceError::Forked) }
    }

    fn refused<R>(&self, what: &'static str) -> Result<R, DeviceError> {
        Err(DeviceError::Unsupported { what, backend: self.place.backend() })
    }

    /// Returns the slot.
    #[must_use]
    pub fn slot(&self) -> &Slot {
        self.place.slot()
    }

    /// Returns the options in force, which a replacement may have changed. In a forked child, those
    /// in force at the start of the use.
    #[must_use]
    pub fn resolution(&self) -> Arc<ArenaResolution> {
        let now = if self.place.is_here() { self.place.resolution() } else { None };
        now.unwrap_or_else(|| Arc::clone(&self.report.resolution))
    }

    /// Returns the session's options that were not in force at the start of the use, each with the
    /// value in force.
    #[must_use]
    pub fn conflicts(&self) -> &[Conflict] {
        &self.report.conflicts
    }

    /// Returns `true` if this use opened the arena, so that its options are in force.
    #[must_use]
    pub const fn opened(&self) -> bool {
        self.report.opened
    }
}

impl Drop for ArenaUse {
    /// Takes the slot's lock; no driver call. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.place.is_here() {
            self.place.leave();
        }
    }
}

impl fmt::Debug for ArenaUse {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ArenaUse")
            .field("slot", self.slot())
            .field("conflicts", &self.conflicts().len())
            .finish_non_exhaustive()
    }
}
