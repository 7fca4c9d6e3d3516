//! A resource's memory in arenas of its own, so that all of it goes when the resource is unloaded,
//! whatever was allocated beside it meanwhile, and so that it is known how much it is.
//!
//! In the heap arena lies what the loader's own thread allocates, and not what threads do that it
//! starts. Where jemalloc does not serve this process, or no arena can be had, the resource is
//! loaded into the heap that all share: a worse place, and no reason to refuse a request. The
//! device arena is whoever's who registered the resource; here it is measured, and purged.
//!
//! Invariant: `arena is there => its resource is loaded`, and its value lies there. A load that
//! timed out and still runs has an arena of its own, or none.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::bytes::ByteSize;
use crate::control::{Cost, Enclosure, LoadError};
use crate::device::DeviceArena;
use crate::host::{self, ARENA_NAME_MAX, HostArena, HostArenaStats};

use super::error::Note;
use super::shared::Shared;

pub(super) struct OwnArena {
    name: String,
    arena: Mutex<Option<HostArena>>,
    /// In which nothing lies but what the resource holds.
    device: Option<DeviceArena>,
    /// Weak: the registry holds the resource.
    shared: Weak<Shared>,
}

impl OwnArena {
    /// For the resource of this name, which the arena has too, as much of it as fits.
    pub(super) fn of(
        name: &str,
        shared: &Arc<Shared>,
        device: Option<DeviceArena>,
    ) -> Arc<dyn Enclosure> {
        let end = (0..=ARENA_NAME_MAX.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
        let name = name.get(..end.unwrap_or_default()).unwrap_or_default().to_owned();
        Arc::new(Self { name, arena: Mutex::new(None), device, shared: Arc::downgrade(shared) })
    }

    fn take(&self) -> Option<HostArena> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// A new arena of its name.
    fn arena(&self) -> Option<HostArena> {
        if !host::is_global() {
            return None;
        }
        HostArena::new(&self.name).map_err(|error| self.note(&error)).ok()
    }

    fn note(&self, error: &dyn std::error::Error) {
        if let Some(shared) = self.shared.upgrade() {
            let start = format!("{:?} is loaded into the shared heap: ", self.name);
            let text = format!("{start}{error}");
            shared.note_once(&start, Note::warning("resources", text));
        }
    }
}

impl Enclosure for OwnArena {
    fn load(&self, load: &mut dyn FnMut() -> bool) -> Result<(), LoadError> {
        let Some(arena) = self.arena() else {
            load();
            return Ok(());
        };
        let is_kept = arena.scope(&mut *load).unwrap_or_else(|error| {
            self.note(&error);
            load()
        });
        // Otherwise it is dropped, as by a panic of the loader: it is kept for another. The value
        // of a later load may lie in the arena that is there by now.
        if is_kept {
            *self.arena.lock().unwrap_or_else(PoisonError::into_inner) = Some(arena);
        }
        Ok(())
    }

    fn unload(&self, unload: &mut dyn FnMut()) -> Option<Cost> {
        let committed = |arena: &DeviceArena| arena.snapshot().committed;
        let before = self.device.as_ref().map(committed);
        let host = self.unload_from_heap(unload);
        unload(); // where it has not run
        let device = self.device.as_ref().zip(before).map(|(arena, before)| {
            // Where the driver refuses, what is idle decays.
            let _ = arena.purge();
            before.saturating_sub(committed(arena))
        });
        self.cost(host, device)
    }

    fn held(&self) -> Option<Cost> {
        let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        let host = arena.as_ref().and_then(|arena| arena.stats().ok()).map(|stats| stats.active);
        self.cost(host, self.device.as_ref().map(|arena| arena.snapshot().active))
    }
}

impl OwnArena {
    /// Runs the clean-up and says what the heap arena gave back, where there is one.
    fn unload_from_heap(&self, unload: &mut dyn FnMut()) -> Option<ByteSize> {
        let arena = self.take()?;
        let before = arena.stats().map(|stats| stats.active).unwrap_or_default();
        // In a scope, so that what is freed does not stay in this thread's cache.
        if arena.scope(&mut *unload).is_err() {
            unload();
        }
        let HostArenaStats { active, .. } = arena.stats().ok()?;
        if !active.is_zero() {
            let name = &self.name;
            log!(
                debug,
                target: "lowtide",
                name,
                %active,
                "a resource's heap arena is not empty"
            );
        }
        // Dropped, and so purged and kept for the next load of whatever.
        Some(before.saturating_sub(active))
    }

    /// What was found in both; the device arena's in the host's budget if it counts there.
    fn cost(&self, host: Option<ByteSize>, device: Option<ByteSize>) -> Option<Cost> {
        host.or(device)?;
        let (host, device) = (host.unwrap_or_default(), device.unwrap_or_default());
        let arena = self.device.as_ref();
        Some(if arena.is_some_and(|arena| arena.capabilities().counts_as_host()) {
            Cost::host(host).and_host(device)
        } else {
            Cost::host(host).and_device(device)
        })
    }
}
