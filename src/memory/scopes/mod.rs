//! Arenas that sessions share, configured as ONNX Runtime's are.
//!
//! A slot is a provider's name, a device and a kind: device memory, or pinned host memory, each
//! with options of its own. [`Memory::share_arena`] opens its arena for all sessions,
//! [`Memory::use_arena`] is a session's counted use of it, which opens it where nobody has, and
//! [`Memory::replace_arena`] changes its options at run time: a new arena is opened, allocations
//! go there from that moment on, and the old one drains. It goes when its last block is freed and
//! the worker has seen that; what its blocks no longer touch goes back within a tick.
//!
//! Whoever's options are not in force is told so, with what is in force instead and who said that.
//! In ONNX Runtime an arena that a session holds keeps its old options for ever; here it does not.
//!
//! It decides no sizes and keeps no policy; `config::arena` says what options mean.
//!
//! Invariants: `users > 0 or shared <=> the slot has an arena`; when a replacement has returned, no
//! allocation that starts later is in the old arena; an old arena is in the snapshot while it has
//! a live block or an allocation under way.

mod error;
mod handle;
mod place;

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaOptions, ArenaResolution, Conflict};
use crate::device::{ArenaSnapshot, PinnedConfig, PinnedKind, PinnedPool, PinnedSnapshot};
use crate::sync::{Mutex, lock};

use super::error::Diagnostic;
use super::shared::Shared;
use super::{Memory, MemoryError};

pub use error::ScopeError;
pub use handle::ArenaUse;

use place::{Act, Opened, Place, begin_draining};

/// Slots of one `Memory`.
const SLOTS_MAX: usize = 64;

/// Which memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum SlotKind {
    /// The device's own.
    Device,
    /// Host memory for copies to and from it, page-locked as far as the system allows: a pool, of
    /// which `arena.max_mem` is the limit.
    Pinned,
}

/// Where an arena belongs: a provider, a device, a kind of memory.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Slot {
    /// The provider's name, by which metrics and errors call its arenas.
    pub name: String,
    /// The device's number.
    pub device: u32,
    /// Which memory.
    pub kind: SlotKind,
}

impl Slot {
    /// The slot of the device's own memory.
    #[must_use]
    pub fn device(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, kind: SlotKind::Device }
    }

    /// The slot of page-locked memory for that device.
    #[must_use]
    pub fn pinned(name: impl Into<String>, device: u32) -> Self {
        Self { name: name.into(), device, kind: SlotKind::Pinned }
    }
}

impl fmt::Display for Slot {
    /// `name` is an arena's on device 0, for metrics; `name:1`, `name:pinned`, `name:1:pinned`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.name)?;
        if self.device > 0 {
            write!(f, ":{}", self.device)?;
        }
        if self.kind == SlotKind::Pinned { f.write_str(":pinned") } else { Ok(()) }
    }
}

/// What is in force after an arena was shared, used or replaced, and what of the caller's options,
/// or of older ones, is not.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct ArenaReport {
    /// Every value in force, with its source.
    pub resolution: Arc<ArenaResolution>,
    /// Every option that is not, with what is.
    pub conflicts: Vec<Conflict>,
    /// Whether this call opened the arena.
    pub opened: bool,
}

/// What a replacement did.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Replaced {
    /// What is in force now.
    pub report: ArenaReport,
    /// Live bytes that drain with the old arena; `None` where there was none.
    pub draining: Option<ByteSize>,
    /// Idle bytes of the old arena that were given back at once.
    pub released: ByteSize,
}

/// A slot's figures.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct SlotSnapshot {
    /// The slot.
    pub slot: Slot,
    /// Whether its arena is shared.
    pub shared: bool,
    /// Uses that are held.
    pub users: u32,
    /// What is in force; `None` without an arena.
    pub resolution: Option<Arc<ArenaResolution>>,
    /// The arena that serves; `None` without one, and for pinned memory.
    pub arena: Option<ArenaSnapshot>,
    /// Arenas that were replaced, or left by their last user, the oldest first.
    pub draining: Vec<ArenaSnapshot>,
    /// The pool that serves, for pinned memory.
    pub pool: Option<PinnedSnapshot>,
    /// Pools that were replaced, or left by their last user, the oldest first.
    pub draining_pools: Vec<PinnedSnapshot>,
}

/// The slots of a `Memory`.
#[derive(Debug, Default)]
pub(super) struct Scopes(Mutex<BTreeMap<Slot, Arc<Place>>>);

impl Memory {
    /// Opens a slot's arena for all sessions, with ONNX Runtime's defaults where the options say
    /// nothing; from now on it stays without users too, until [`Memory::unshare_arena`]. Where the
    /// slot has an arena, it is shared as it is, and the options that differ are conflicts; a
    /// replacement puts them in force.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::config::arena::{ArenaKey, ArenaOptions, ArenaSource};
    /// use lowtide::device::Region;
    /// use lowtide::memory::Slot;
    ///
    /// let memory = Memory::builder().start()?;
    /// let slot = Slot::device("CudaEp", 0);
    /// let process = [("ep_factory.CudaEp.arena.max_mem", "67108864")];
    /// memory.share_arena(&slot, &ArenaOptions::of_process("CudaEp", process)?)?;
    ///
    /// let session = [("ep.cudaep.arena.max_mem", "33554432")];
    /// let arena = memory.use_arena(&slot, &ArenaOptions::of_session("CudaEp", session)?)?;
    /// assert_eq!(arena.conflicts().len(), 1); // the shared arena's limit is in force
    /// assert_eq!(arena.resolution().get(ArenaKey::Limit).source, ArenaSource::Shared);
    ///
    /// let mut buffer = arena.alloc::<f32>(1024, Region::Dynamic)?;
    /// memory.replace_arena(&slot, &ArenaOptions::from_keys([("arena.max_mem", "0")])?)?;
    /// let lease = buffer.enter()?; // the old arena lives as long as its blocks
    /// buffer.slice_mut(&lease)?.fill(1.0);
    /// assert_eq!(arena.resolution().get(ArenaKey::Limit).source, ArenaSource::Replacement);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`ScopeError`]; then nothing is changed.
    pub fn share_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<ArenaReport, ScopeError> {
        let shared = &self.0.shared;
        let place = shared.place(slot)?;
        Ok(place.act(shared, Act::Share, options)?.report)
    }

    /// Ends the sharing: the arena drains when its last user is gone, which may be now.
    ///
    /// # Errors
    /// [`ScopeError::NotShared`]; [`MemoryError::Forked`].
    pub fn unshare_arena(&self, slot: &Slot) -> Result<(), ScopeError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        let place = lock(&shared.scopes.0).get(slot).cloned();
        match place {
            Some(place) if place.unshare() => Ok(()),
            _ => Err(ScopeError::NotShared { slot: slot.clone() }),
        }
    }

    /// A counted use of a slot's arena. Opens it where there is none, with the session's options;
    /// where there is one, the options that differ are [`ArenaUse::conflicts`].
    ///
    /// # Errors
    /// [`ScopeError`]; then nothing is changed.
    pub fn use_arena(&self, slot: &Slot, session: &ArenaOptions) -> Result<ArenaUse, ScopeError> {
        let shared = &self.0.shared;
        let place = shared.place(slot)?;
        let done = place.act(shared, Act::Use, session)?;
        Ok(ArenaUse::new(place, done.report))
    }

    /// Puts a new arena in the place of a slot's, whether or not sessions use it. It has the
    /// options given, and for keys that these do not name, what was in force. Allocations that
    /// start when this has returned are in the new arena; blocks of the old one stay where they
    /// are until they are freed. Where the slot has no arena, this shares one.
    ///
    /// Blocks while the old arena's idle memory is given back: about 0.1 ms for each MiB.
    ///
    /// # Errors
    /// [`ScopeError`]; then nothing is changed.
    pub fn replace_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<Replaced, ScopeError> {
        let shared = &self.0.shared;
        let place = shared.place(slot)?;
        let done = place.act(shared, Act::Replace, options)?;
        let (arena, pool) = done.old.as_ref().map_or((None, None), |old| (old.arena(), old.pool()));
        let live = pool.map(|pool| pool.glance().live);
        let draining = arena.map(|arena| arena.glance().live).or(live);
        let released = match (arena, pool) {
            (Some(arena), _) => shared.purged(arena),
            (_, Some(pool)) => shared.purged_pool(pool),
            (None, None) => ByteSize::ZERO,
        };
        begin_draining(done.old.as_deref());
        drop(done.old);
        shared.sweep();
        log!(
            info,
            target: "lowtide",
            slot = %slot,
            draining = ?draining,
            conflicts = done.report.conflicts.len(),
            "arena replaced"
        );
        Ok(Replaced { report: done.report, draining, released })
    }

    /// What is in force for a slot's arena; `None` without one, and in a forked child.
    #[must_use]
    pub fn arena_options(&self, slot: &Slot) -> Option<Arc<ArenaResolution>> {
        let shared = &self.0.shared;
        shared.check_here().ok()?;
        let place = lock(&shared.scopes.0).get(slot).cloned();
        place?.resolution()
    }

    /// The slots that have an arena or one that drains; none in a forked child.
    #[must_use]
    pub fn arena_slots(&self) -> Vec<SlotSnapshot> {
        let shared = &self.0.shared;
        if shared.check_here().is_err() {
            return Vec::new();
        }
        let places = shared.places();
        places.iter().filter(|place| !place.is_empty()).map(|place| place.snapshot()).collect()
    }
}

impl Shared {
    /// The place of a slot, made where there is none.
    fn place(&self, slot: &Slot) -> Result<Arc<Place>, ScopeError> {
        self.check_here()?;
        if slot.name.is_empty() {
            return Err(ScopeError::NoName);
        }
        if slot.device > 0 {
            return Err(ScopeError::UnknownDevice { slot: slot.clone() });
        }
        if self.driver.is_none() {
            return Err(MemoryError::NoDevice { arena: slot.to_string() }.into());
        }
        let mut places = lock(&self.scopes.0);
        if let Some(place) = places.get(slot) {
            return Ok(Arc::clone(place));
        }
        if places.len() >= SLOTS_MAX {
            // Nobody else can be about to use one of which this is the only handle.
            places.retain(|_, place| Arc::get_mut(place).is_none() || !place.is_empty());
        }
        if places.len() >= SLOTS_MAX {
            return Err(ScopeError::TooManySlots { max: SLOTS_MAX });
        }
        let place = Arc::new(Place::new(slot.clone(), self));
        places.insert(slot.clone(), Arc::clone(&place));
        Ok(place)
    }

    fn places(&self) -> Vec<Arc<Place>> {
        lock(&self.scopes.0).values().cloned().collect()
    }

    /// Lets go of the arenas that have drained: the address space goes with them, and at most the
    /// last granules. For the worker, and for who replaces.
    pub(super) fn sweep(&self) {
        if self.check_here().is_err() {
            return;
        }
        for drained in self.places().iter().flat_map(|place| place.take_drained()) {
            // An error stays with the arena: what it could not give back goes with the driver.
            let name = match drained {
                Opened::Device(arena) => {
                    let _ = self.purged(&arena);
                    self.gone.add(arena.snapshot());
                    arena.name().to_owned()
                }
                Opened::Pinned(pool) => pool.name().to_owned(), // goes here, its segments with it
            };
            log!(debug, target: "lowtide", arena = name, "a replaced arena has drained");
        }
        for closed in self.arenas.take_closed() {
            self.gone.add(closed.snapshot());
        }
    }

    /// Opens a pool for copies to and from the device.
    fn open_pool(&self, name: String, limit: ByteSize) -> Result<PinnedPool, MemoryError> {
        let Some(driver) = &self.driver else {
            return Err(MemoryError::NoDevice { arena: name });
        };
        let kind = PinnedKind::PageLockedOrPageable;
        let config = PinnedConfig { limit, kind, ..PinnedConfig::new(name.clone()) };
        PinnedPool::open(Arc::clone(driver), config)
            .map_err(|error| MemoryError::Arena { arena: name, error })
    }

    /// The pools of all slots, and whether each drains; none in a forked child.
    pub(super) fn pools(&self) -> Vec<(PinnedPool, bool)> {
        if self.check_here().is_err() {
            return Vec::new();
        }
        self.places().iter().flat_map(|place| place.pools()).collect()
    }

    /// Has pools give back what is above their watermarks, and those that drain all that is idle.
    pub(super) fn maintain_pools(&self) {
        for (pool, drains) in self.pools() {
            let given = if drains { pool.purge() } else { pool.maintain() };
            if let Err(error) = given {
                let text = format!("{}: {error}", pool.name());
                self.diagnostic(Diagnostic::warning("device", text));
            }
        }
    }

    /// What a pool's purge gave back; an error is a note.
    fn purged_pool(&self, pool: &PinnedPool) -> ByteSize {
        pool.purge().unwrap_or_else(|error| {
            self.diagnostic(Diagnostic::warning("device", format!("{}: {error}", pool.name())));
            ByteSize::ZERO
        })
    }
}
