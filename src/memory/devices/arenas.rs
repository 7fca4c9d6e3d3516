//! The list of arenas of one `Memory`, which are sampled, decayed and published while listed.
//!
//! The list opens and closes no arenas. A draining arena has lost its name, so another arena can
//! use it, but is still sampled and decayed.
//!
//! Invariant: names of arenas that are not draining are unique; no driver call under the lock.

use std::sync::Arc;

use crate::device::{DeviceArena, DeviceError, PinnedPool};
use crate::memory::error::MemoryError;
use crate::sync::{Mutex, lock};

use super::device::Device;

/// The maximum number of arenas, including draining ones; the sampler visits each.
const ARENAS_MAX: usize = 64;

/// The number of an arena in the list; never reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArenaId(u64);

/// The list, shared with the sensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Arenas(Arc<Mutex<ArenaList>>);

#[derive(Debug, Default)]
struct ArenaList {
    /// The last number assigned.
    given: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: ArenaId,
    arena: DeviceArena,
    /// The pinned pool whose arena it is.
    pool: Option<PinnedPool>,
    device: Arc<Device>,
    drains: bool,
}

/// An arena and its device.
#[derive(Clone, Debug)]
pub(super) struct Listed {
    pub(super) arena: DeviceArena,
    pub(super) device: Arc<Device>,
}

impl Entry {
    fn listed(&self) -> Listed {
        Listed { arena: self.arena.clone(), device: Arc::clone(&self.device) }
    }
}

impl Arenas {
    /// Visits all arenas under the lock, without copying the list. For short calls.
    pub(super) fn each(&self, mut see: impl FnMut(&Device, &DeviceArena)) {
        lock(&self.0).entries.iter().for_each(|entry| see(&entry.device, &entry.arena));
    }

    /// Returns all arenas.
    pub(super) fn all(&self) -> Vec<Listed> {
        lock(&self.0).entries.iter().map(Entry::listed).collect()
    }

    /// Returns all pinned pools whose device is not lost.
    pub(super) fn pools(&self) -> Vec<PinnedPool> {
        let list = lock(&self.0);
        let working = list.entries.iter().filter(|entry| !entry.device.is_lost());
        working.filter_map(|entry| entry.pool.clone()).collect()
    }

    /// Returns the serving arenas and the draining ones.
    pub(super) fn parted(&self) -> (Vec<Listed>, Vec<Listed>) {
        let list = lock(&self.0);
        let of = |drains| {
            let those = list.entries.iter().filter(move |entry| entry.drains == drains);
            those.map(Entry::listed).collect()
        };
        (of(false), of(true))
    }

    /// Returns the number of arenas on a device.
    pub(super) fn count_on(&self, device: &Device) -> usize {
        let list = lock(&self.0);
        list.entries.iter().filter(|entry| entry.device.number == device.number).count()
    }

    /// Checks that an arena of this name can be added in the place of `replaced`.
    ///
    /// # Errors
    /// [`MemoryError::TooManyArenas`], [`MemoryError::DuplicateArena`].
    pub(super) fn admit(&self, name: &str, replaced: Option<ArenaId>) -> Result<(), MemoryError> {
        lock(&self.0).admit(name, replaced)
    }

    /// Adds an arena, with the pool that it belongs to, if any. The arena that it replaces starts
    /// to drain.
    ///
    /// # Errors
    /// The same as for [`Arenas::admit`].
    pub(super) fn add(
        &self,
        arena: &DeviceArena,
        pool: Option<&PinnedPool>,
        device: &Arc<Device>,
        replaced: Option<ArenaId>,
    ) -> Result<ArenaId, MemoryError> {
        let mut list = lock(&self.0);
        list.admit(arena.name(), replaced)?;
        list.given += 1;
        let id = ArenaId(list.given);
        list.drain(replaced);
        let pool = pool.cloned();
        let (arena, device) = (arena.clone(), Arc::clone(device));
        list.entries.push(Entry { id, arena, pool, device, drains: false });
        Ok(id)
    }

    /// Marks an arena as draining, which makes its name available.
    pub(super) fn drain(&self, id: ArenaId) {
        lock(&self.0).drain(Some(id));
    }

    /// Removes an arena. Drops it, and its pool, with no lock held.
    pub(super) fn remove(&self, id: ArenaId) {
        let mut list = lock(&self.0);
        let at = list.entries.iter().position(|entry| entry.id == id);
        let removed = at.map(|at| list.entries.remove(at));
        drop(list);
        drop(removed);
    }

    /// Removes the closed arenas that have no memory left, or whose device is lost and releases
    /// none, which frees their names and places. The caller drops them, with no lock held; their
    /// pools have no buffer left.
    pub(super) fn take_closed(&self) -> Vec<Listed> {
        // A close that finds live blocks is undone, and a close that fails in the driver leaves
        // memory.
        let is_over = |entry: &Entry| {
            let glance = entry.arena.glance();
            let has_none = glance.committed.is_zero() || entry.device.is_lost();
            entry.arena.is_closed() && glance.live.is_zero() && has_none
        };
        let mut list = lock(&self.0);
        let (over, kept) = list.entries.drain(..).partition(is_over);
        list.entries = kept;
        over.into_iter()
            .map(|entry: Entry| Listed { arena: entry.arena, device: entry.device })
            .collect()
    }
}

impl ArenaList {
    fn admit(&self, name: &str, replaced: Option<ArenaId>) -> Result<(), MemoryError> {
        if self.entries.len() >= ARENAS_MAX {
            return Err(MemoryError::TooManyArenas { max: ARENAS_MAX });
        }
        let mut others = self.entries.iter().filter(|entry| Some(entry.id) != replaced);
        if others.any(|entry| !entry.drains && entry.arena.name() == name) {
            return Err(MemoryError::DuplicateArena { arena: name.to_owned() });
        }
        Ok(())
    }

    fn drain(&mut self, id: Option<ArenaId>) {
        for entry in self.entries.iter_mut().filter(|entry| Some(entry.id) == id) {
            entry.drains = true;
        }
    }
}

/// Returns the error of an arena, or a pool, that was not opened.
pub(super) fn cannot_open(arena: &str, cause: MemoryError) -> MemoryError {
    MemoryError::OpenArena { arena: arena.to_owned(), cause: Box::new(cause) }
}

/// Returns `true` if the error is that of a lost device.
pub(super) const fn is_loss(error: &DeviceError) -> bool {
    matches!(error, DeviceError::Driver(error) if error.is_context_lost())
}
