//! A session's use of a slot's arena: allocates from the one that serves at that moment.
//!
//! It is no arena and holds none, so that it never keeps an old one. An allocation costs a short
//! lock of the slot beside what it costs in the arena; the lock is not held meanwhile.
//!
//! Invariant: a slot's `users` = the uses of it that are held.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use crate::config::arena::{ArenaResolution, Conflict};
use crate::device::{Buffer, DeviceArena, DeviceError, PinnedBuffer, Region};

use super::place::{Generation, Place};
use super::{ArenaReport, Slot};

/// A counted use of a slot's arena, from [`Memory::use_arena`](crate::Memory::use_arena).
///
/// Buffers may outlive it; a lease for one is had from [`Buffer::enter`].
#[must_use = "the arena is left when this is dropped"]
pub struct ArenaUse {
    place: Arc<Place>,
    report: ArenaReport,
}

impl ArenaUse {
    pub(super) const fn new(place: Arc<Place>, report: ArenaReport) -> Self {
        Self { place, report }
    }

    /// As [`DeviceArena::alloc`], in the arena that serves now.
    ///
    /// # Errors
    /// As there; [`DeviceError::Unsupported`] for pinned memory.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc(len, region))
    }

    /// As [`DeviceArena::alloc_from`], in the arena that serves now.
    ///
    /// # Errors
    /// As there; [`DeviceError::Unsupported`] for pinned memory.
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>, DeviceError> {
        self.with(|arena| arena.alloc_from(data, region))
    }

    /// As [`PinnedPool::alloc`](crate::device::PinnedPool::alloc), in the pool that serves now: for
    /// slots of pinned memory.
    ///
    /// # Errors
    /// As there; [`DeviceError::Unsupported`] for device memory.
    pub fn alloc_pinned<T: Pod>(&self, len: usize) -> Result<PinnedBuffer<T>, DeviceError> {
        let serving = self.serving()?;
        let pool = serving.as_ref().and_then(|serving| serving.pool());
        let what = "pinned memory in a slot of device memory";
        pool.map_or_else(|| self.refused(what), |pool| pool.alloc(len))
    }

    fn with<R>(
        &self,
        act: impl FnOnce(&DeviceArena) -> Result<R, DeviceError>,
    ) -> Result<R, DeviceError> {
        let serving = self.serving()?;
        let arena = serving.as_ref().and_then(|serving| serving.arena());
        arena.map_or_else(|| self.refused("device memory in a slot of pinned memory"), act)
    }

    fn serving(&self) -> Result<Option<Arc<Generation>>, DeviceError> {
        if self.place.is_here() { Ok(self.place.serving()) } else { Err(DeviceError::Forked) }
    }

    fn refused<R>(&self, what: &'static str) -> Result<R, DeviceError> {
        Err(DeviceError::Unsupported { what, backend: self.place.backend })
    }

    /// The slot.
    #[must_use]
    pub fn slot(&self) -> &Slot {
        self.place.slot()
    }

    /// What is in force now: a replacement may have changed it. What was in force when the use
    /// began, in a forked child.
    #[must_use]
    pub fn resolution(&self) -> Arc<ArenaResolution> {
        let now = if self.place.is_here() { self.place.resolution() } else { None };
        now.unwrap_or_else(|| Arc::clone(&self.report.resolution))
    }

    /// The session's options that were not in force when the use began, each with what was.
    #[must_use]
    pub fn conflicts(&self) -> &[Conflict] {
        &self.report.conflicts
    }

    /// Whether this use opened the arena, so that its options are in force.
    #[must_use]
    pub const fn opened(&self) -> bool {
        self.report.opened
    }
}

impl Drop for ArenaUse {
    /// Takes the slot's lock; no driver call. In a forked child does nothing.
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
