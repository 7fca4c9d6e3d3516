//! A resource's host memory in a heap arena of its own, so that all of it goes when the resource
//! is unloaded, whatever was allocated beside it meanwhile.
//!
//! What the loader's own thread allocates lies there, and not what threads do that it starts. Where
//! jemalloc does not serve this process, or no arena can be had, the resource is loaded into the
//! heap that all share: a worse place, and no reason to refuse a request.
//!
//! Invariant: `arena is there => its resource is loaded, or its last load failed`.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::bytes::ByteSize;
use crate::control::{Enclosure, LoadError};
use crate::host::{self, ARENA_NAME_MAX, HostArena, HostArenaStats};

use super::error::Note;
use super::shared::Shared;

pub(super) struct OwnArena {
    name: String,
    arena: Mutex<Option<HostArena>>,
    /// Weak: the registry holds the resource.
    shared: Weak<Shared>,
}

impl OwnArena {
    /// For the resource of this name, which the arena has too, as much of it as fits.
    pub(super) fn of(name: &str, shared: &Arc<Shared>) -> Arc<dyn Enclosure> {
        let end = (0..=ARENA_NAME_MAX.min(name.len())).rev().find(|at| name.is_char_boundary(*at));
        let name = name.get(..end.unwrap_or_default()).unwrap_or_default().to_owned();
        Arc::new(Self { name, arena: Mutex::new(None), shared: Arc::downgrade(shared) })
    }

    fn take(&self) -> Option<HostArena> {
        self.arena.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Its arena, or a new one.
    fn arena(&self) -> Option<HostArena> {
        if !host::is_global() {
            return None;
        }
        let new = || HostArena::new(&self.name).map_err(|error| self.note(&error)).ok();
        self.take().or_else(new)
    }

    fn note(&self, error: &dyn std::error::Error) {
        if let Some(shared) = self.shared.upgrade() {
            let start = format!("{:?} is loaded into the shared heap: ", self.name);
            let text = format!("{start}{error}");
            shared.note_once(&start, Note { about: "resources", text });
        }
    }
}

impl Enclosure for OwnArena {
    fn load(&self, load: &mut dyn FnMut()) -> Result<(), LoadError> {
        let Some(arena) = self.arena() else {
            load();
            return Ok(());
        };
        // A panic of the loader drops it: it is kept for another.
        if let Err(error) = arena.scope(&mut *load) {
            self.note(&error);
            load();
        }
        *self.arena.lock().unwrap_or_else(PoisonError::into_inner) = Some(arena);
        Ok(())
    }

    fn unload(&self, unload: &mut dyn FnMut()) -> Option<ByteSize> {
        let arena = self.take()?;
        let before = arena.stats().map(|stats| stats.active).unwrap_or_default();
        // In a scope, so that what is freed does not stay in this thread's cache.
        if arena.scope(&mut *unload).is_err() {
            unload();
        }
        let HostArenaStats { active, .. } = arena.stats().ok()?;
        if !active.is_zero() {
            let name = &self.name;
            tracing::debug!(
                target: "lowtide",
                name,
                %active,
                "a resource's heap arena is not empty"
            );
        }
        // Dropped, and so purged and kept for the next load of whatever.
        Some(before.saturating_sub(active))
    }

    fn held(&self) -> Option<ByteSize> {
        let arena = self.arena.lock().unwrap_or_else(PoisonError::into_inner);
        Some(arena.as_ref()?.stats().ok()?.active)
    }
}
