//! The arenas of one `Memory`: sampled, decayed and published while they are in this list.
//!
//! It opens none and closes none. An arena that drains is out of its name, so that another may
//! have it, and still sampled and decayed.
//!
//! Invariant: of the arenas that do not drain, no two have one name; no driver call under the lock.

use std::sync::Arc;

use crate::device::DeviceArena;
use crate::sync::{Mutex, lock};

use super::error::MemoryError;

/// Arenas of one `Memory`, draining ones included: the sampler looks at each.
const ARENAS_MAX: usize = 64;

/// An arena's number in the list; never given twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct ArenaId(u64);

/// The list, shared with the sensor.
#[derive(Clone, Debug, Default)]
pub(super) struct Arenas(Arc<Mutex<List>>);

#[derive(Debug, Default)]
struct List {
    /// Numbers given so far.
    given: u64,
    entries: Vec<Entry>,
}

#[derive(Debug)]
struct Entry {
    id: ArenaId,
    arena: DeviceArena,
    drains: bool,
}

impl Arenas {
    /// Runs over all arenas, without copying the list, under its lock: for calls that are short.
    pub(super) fn each(&self, mut see: impl FnMut(&DeviceArena)) {
        lock(&self.0).entries.iter().for_each(|entry| see(&entry.arena));
    }

    /// All of them.
    pub(super) fn all(&self) -> Vec<DeviceArena> {
        lock(&self.0).entries.iter().map(|entry| entry.arena.clone()).collect()
    }

    /// Those that serve, and those that drain.
    pub(super) fn parted(&self) -> (Vec<DeviceArena>, Vec<DeviceArena>) {
        let list = lock(&self.0);
        let of = |drains| {
            let those = list.entries.iter().filter(move |entry| entry.drains == drains);
            those.map(|entry| entry.arena.clone()).collect()
        };
        (of(false), of(true))
    }

    /// Whether an arena of this name could be added in the place of another.
    ///
    /// # Errors
    /// [`MemoryError::TooManyArenas`], [`MemoryError::DuplicateArena`].
    pub(super) fn admit(&self, name: &str, replaced: Option<ArenaId>) -> Result<(), MemoryError> {
        lock(&self.0).admit(name, replaced)
    }

    /// Adds an arena; the one that it replaces drains from now on.
    ///
    /// # Errors
    /// As [`Arenas::admit`].
    pub(super) fn add(
        &self,
        arena: &DeviceArena,
        replaced: Option<ArenaId>,
    ) -> Result<ArenaId, MemoryError> {
        let mut list = lock(&self.0);
        list.admit(arena.name(), replaced)?;
        list.given += 1;
        let id = ArenaId(list.given);
        list.drain(replaced);
        list.entries.push(Entry { id, arena: arena.clone(), drains: false });
        Ok(id)
    }

    /// Lets an arena drain: its name is free.
    pub(super) fn drain(&self, id: ArenaId) {
        lock(&self.0).drain(Some(id));
    }

    /// Takes an arena out; the caller drops it, with no lock held.
    pub(super) fn remove(&self, id: ArenaId) -> Option<DeviceArena> {
        let mut list = lock(&self.0);
        let at = list.entries.iter().position(|entry| entry.id == id)?;
        Some(list.entries.remove(at).arena)
    }

    /// Takes out those that were closed and have nothing left: their names and places are free. The
    /// caller drops them, with no lock held.
    pub(super) fn take_closed(&self) -> Vec<DeviceArena> {
        // A close that finds live blocks is undone, and one that the driver fails leaves memory.
        let is_over = |entry: &Entry| {
            let glance = entry.arena.glance();
            entry.arena.is_closed() && glance.live.is_zero() && glance.committed.is_zero()
        };
        let mut list = lock(&self.0);
        let (over, kept) = list.entries.drain(..).partition(is_over);
        list.entries = kept;
        over.into_iter().map(|entry: Entry| entry.arena).collect()
    }
}

impl List {
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
