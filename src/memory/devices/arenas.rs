//! The list of arenas of one `Memory`, which are sampled, decayed and published while listed.
//!
//! The list opens and closes no arenas. A draining arena has lost its name, so another arena can
//! use it, but is still sampled and decayed.
//!
//! Invariant: names of arenas that are not draining are unique; no driver call under the lock.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use crate::bytes::ByteSize;
use crate::device::driver::Backend;
use crate::device::{DeviceArena, DeviceError, PinnedPool};
use crate::memory::error::MemoryError;
use crate::sync::{Mutex, lock};

use super::device::{CountedIn, Device};

/// The maximum number of arenas, including draining ones; the sampler visits each.
const ARENAS_MAX: usize = 64;

/// An arena of this `Memory`.
#[derive(Debug)]
pub(super) struct ManagedArena {
    /// The arena; that of the pool, if there is one, whose memory only the pool hands out.
    pub(super) arena: DeviceArena,
    pub(super) pool: Option<PinnedPool>,
    pub(super) device: Arc<Device>,
    /// `true` once it has lost its name.
    pub(super) drains: AtomicBool,
}

impl ManagedArena {
    pub(super) fn new(
        device: &Arc<Device>,
        arena: DeviceArena,
        pool: Option<PinnedPool>,
    ) -> Arc<Self> {
        Arc::new(Self { arena, pool, device: Arc::clone(device), drains: AtomicBool::new(false) })
    }

    fn is_draining(&self) -> bool {
        self.drains.load(Ordering::Relaxed)
    }

    /// Returns `true` if its memory is the host's.
    pub(super) fn is_on_host(&self) -> bool {
        self.device.counted != CountedIn::OnDevice || self.arena.backend() == Backend::PinnedHost
    }

    /// Returns `true` if a block is held, or freed while the device may still use it. The last
    /// handle must not be dropped before: memory without a lane would be leaked, and a pool would
    /// wait for its copies.
    pub(super) fn has_blocks(&self) -> bool {
        let snapshot = self.arena.snapshot();
        let held = snapshot.live.saturating_add(snapshot.pending).saturating_add(snapshot.imported);
        // Quarantined memory stays live for ever.
        let lost = self.pool.as_ref().map_or(ByteSize::ZERO, |pool| pool.snapshot().quarantined);
        held > lost
    }
}

/// The list, shared with the sensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Arenas(pub(super) Arc<Mutex<Vec<Arc<ManagedArena>>>>);

impl Arenas {
    /// Returns all arenas.
    pub(super) fn all(&self) -> Vec<Arc<ManagedArena>> {
        lock(&self.0).clone()
    }

    /// Returns the serving arenas and the draining ones.
    pub(super) fn parted(&self) -> (Vec<Arc<ManagedArena>>, Vec<Arc<ManagedArena>>) {
        self.all().into_iter().partition(|arena| !arena.is_draining())
    }

    /// Checks that an arena of this name can be added in the place of `replaced`.
    ///
    /// # Errors
    /// [`MemoryError::TooMany`], [`MemoryError::DuplicateArena`].
    pub(super) fn admit(
        &self,
        name: &str,
        replaced: Option<&Arc<ManagedArena>>,
    ) -> Result<(), MemoryError> {
        admit(&lock(&self.0), name, replaced)
    }

    /// Adds an arena. The arena that it replaces starts to drain.
    ///
    /// # Errors
    /// The same as for [`Arenas::admit`].
    pub(super) fn add(
        &self,
        arena: &Arc<ManagedArena>,
        replaced: Option<&Arc<ManagedArena>>,
    ) -> Result<(), MemoryError> {
        let mut list = lock(&self.0);
        admit(&list, arena.arena.name(), replaced)?;
        replaced.into_iter().for_each(|it| it.drains.store(true, Ordering::Relaxed));
        list.push(Arc::clone(arena));
        Ok(())
    }

    /// Removes an arena, of which the caller has a handle.
    pub(super) fn remove(&self, arena: &Arc<ManagedArena>) {
        lock(&self.0).retain(|other| !Arc::ptr_eq(other, arena));
    }

    /// Removes the closed arenas that have no memory left, or whose device is lost and releases
    /// none, which frees their names and places. The caller drops them, with no lock held; their
    /// pools have no buffer left.
    pub(super) fn take_closed(&self) -> Vec<Arc<ManagedArena>> {
        // A close that finds live blocks is undone, and a close that fails in the driver leaves
        // memory.
        let is_over = |it: &mut Arc<ManagedArena>| {
            let glance = it.arena.glance();
            let has_none = glance.committed.is_zero() || it.device.is_lost();
            it.arena.is_closed() && glance.live.is_zero() && has_none
        };
        lock(&self.0).extract_if(.., is_over).collect()
    }
}

fn admit(
    list: &[Arc<ManagedArena>],
    name: &str,
    replaced: Option<&Arc<ManagedArena>>,
) -> Result<(), MemoryError> {
    if list.len() >= ARENAS_MAX {
        return Err(MemoryError::TooMany { what: "arenas", max: ARENAS_MAX });
    }
    let is_replaced = |it: &Arc<_>| replaced.is_some_and(|replaced| Arc::ptr_eq(it, replaced));
    let mut others = list.iter().filter(|it| !it.is_draining() && !is_replaced(it));
    if others.any(|it| it.arena.name() == name) {
        return Err(MemoryError::DuplicateArena { arena: name.to_owned() });
    }
    Ok(())
}

/// Returns the error of an arena, or a pool, that was not opened.
pub(super) fn cannot_open(arena: &str, cause: MemoryError) -> MemoryError {
    MemoryError::OpenArena { arena: arena.to_owned(), cause: Box::new(cause) }
}

/// Returns `true` if the error is that of a lost device.
pub(super) const fn is_loss(error: &DeviceError) -> bool {
    matches!(error, DeviceError::Driver(error) if error.is_context_lost())
}
