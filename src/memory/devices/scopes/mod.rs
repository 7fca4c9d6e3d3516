//! Arenas shared by sessions, configured like ONNX Runtime's.
//!
//! A slot is a provider's name, a device and a kind of memory: device memory or pinned host memory,
//! each with its own options. [`MemoryDevices::share_arena`] opens a slot's arena for all sessions.
//! [`MemoryDevices::use_arena`] is a session's counted use of it, and opens the arena if there is none.
//! [`MemoryDevices::replace_arena`] changes its options at run time: it opens a new arena, which serves
//! all further allocations, and the old one drains. The worker drops the old arena after its last
//! block is freed; memory that its blocks do not use is released within a tick.
//!
//! Options that are not in force are reported to the caller, with the value in force and its
//! source. In ONNX Runtime an arena that is used by a session keeps its old options forever; here
//! it does not.
//!
//! This module contains no policy; `config::arena` defines the meaning of options.
//!
//! Invariants: `users > 0 or shared <=> the slot has an arena`; when a replacement has returned, no
//! later allocation is in the old arena; an old arena is in the snapshot while it has a live block
//! or an allocation in progress.

mod error;
mod handle;
mod place;
mod slot;

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaOptions, ArenaResolution};
use crate::device::{DeviceArena, PinnedConfig, PinnedKind, PinnedPool};
use crate::sync::lock;

use crate::memory::devices::MemoryDevices;
use crate::memory::shared::Shared;

use super::device::Device;
use super::selector::{ArenaError, DeviceSelector};

pub use error::ScopeError;
pub use handle::ArenaUse;
pub use slot::{ArenaReport, Replaced, Slot, SlotKind, SlotSnapshot};

pub(super) use place::Scopes;

use place::{Act, Opened, Place, begin_draining};

/// The maximum number of slots of one `Memory`.
const SLOTS_MAX: usize = 64;

impl MemoryDevices<'_> {
    /// Opens a slot's arena for all sessions, with ONNX Runtime's defaults for unset options. The
    /// arena stays open without users, until [`MemoryDevices::unshare_arena`]. If the slot already has an
    /// arena, that one is shared unchanged, and options that differ are conflicts; use a
    /// replacement to apply them.
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
    /// memory.devices().share_arena(&slot, &ArenaOptions::of_process("CudaEp", process)?)?;
    ///
    /// let session = [("ep.cudaep.arena.max_mem", "33554432")];
    /// let arena = memory.devices().use_arena(&slot, &ArenaOptions::of_session("CudaEp", session)?)?;
    /// assert_eq!(arena.conflicts().len(), 1); // the shared arena's limit is in force
    /// assert_eq!(arena.resolution().get(ArenaKey::Limit).source, ArenaSource::Shared);
    ///
    /// let mut buffer = arena.alloc::<f32>(1024, Region::Dynamic)?;
    /// memory.devices().replace_arena(&slot, &ArenaOptions::from_keys([("arena.max_mem", "0")])?)?;
    /// let lease = buffer.enter()?; // the old arena lives as long as its blocks
    /// buffer.slice_mut(&lease)?.fill(1.0);
    /// assert_eq!(arena.resolution().get(ArenaKey::Limit).source, ArenaSource::Replacement);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`ScopeError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn share_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<ArenaReport, ScopeError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        Ok(place.act(shared, Act::Share, options)?.report)
    }

    /// Ends the sharing. The arena drains when its last user has left, which may be immediately.
    ///
    /// # Errors
    /// [`ScopeError::NotShared`] if the slot has no shared arena;
    /// [`MemoryError::Forked`](crate::memory::MemoryError::Forked).
    pub fn unshare_arena(&self, slot: &Slot) -> Result<(), ScopeError> {
        let shared = self.shared();
        shared.check_here()?;
        let place = lock(&shared.devices.scopes.0).get(slot).cloned();
        match place {
            Some(place) if place.unshare() => Ok(()),
            _ => Err(ScopeError::NotShared { slot: slot.clone() }),
        }
    }

    /// Returns a counted use of a slot's arena. Opens an arena with the session's options if there
    /// is none; otherwise the options that differ are [`ArenaUse::conflicts`].
    ///
    /// # Errors
    /// [`ScopeError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn use_arena(&self, slot: &Slot, session: &ArenaOptions) -> Result<ArenaUse, ScopeError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        let done = place.act(shared, Act::Use, session)?;
        Ok(ArenaUse::new(place, done.report))
    }

    /// Replaces a slot's arena, whether or not sessions use it. The new arena has the given
    /// options; all other keys keep the values in force. Allocations that start after the return
    /// are in the new arena; blocks of the old arena stay there until they are freed. If the slot
    /// has no arena, this shares one.
    ///
    /// Blocks while the old arena's idle memory is released: about 0.1 ms for each MiB.
    ///
    /// # Errors
    /// [`ScopeError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn replace_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<Replaced, ScopeError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        let done = place.act(shared, Act::Replace, options)?;
        let arena = done.old.as_ref().map(|old| old.any_arena());
        let draining = arena.map(|arena| arena.glance().live);
        let released = arena.map_or(ByteSize::ZERO, |arena| shared.purged(arena));
        begin_draining(done.old.as_deref());
        drop(done.old);
        shared.sweep();
        log!(
            info,
            target: "lowtide",
            slot = %slot,
            draining = draining.map(tracing::field::display),
            conflicts = done.report.conflicts.len(),
            "arena replaced"
        );
        Ok(Replaced { report: done.report, draining, released })
    }

    /// Returns the options in force for a slot's arena; `None` without one, and in a forked child.
    #[must_use]
    pub fn arena_options(&self, slot: &Slot) -> Option<Arc<ArenaResolution>> {
        let shared = self.shared();
        shared.check_here().ok()?;
        let place = lock(&shared.devices.scopes.0).get(slot).cloned();
        place?.resolution()
    }

    /// Returns the slots that have a serving or a draining arena. Empty in a forked child.
    #[must_use]
    pub fn arena_slots(&self) -> Vec<SlotSnapshot> {
        let places = self.shared().here(Shared::places);
        places.iter().filter(|place| !place.is_empty()).map(|place| place.snapshot()).collect()
    }
}

impl Shared {
    /// Returns the state of a slot, which is created if there is none.
    fn place(&self, slot: &Slot) -> Result<Arc<Place>, ScopeError> {
        self.check_here()?;
        if slot.name.is_empty() {
            return Err(ScopeError::NoName);
        }
        let list = &self.devices.list;
        if list.is_empty() && slot.device == 0 {
            return Err(ArenaError::NoDevice { arena: slot.to_string() }.into());
        }
        let Some(device) = list.iter().find(|device| device.number == slot.device) else {
            let (slot, devices) = (slot.clone(), list.len().max(1));
            return Err(ScopeError::UnknownDevice { slot, devices });
        };
        let mut places = lock(&self.devices.scopes.0);
        if let Some(place) = places.get(slot) {
            return Ok(Arc::clone(place));
        }
        if places.len() >= SLOTS_MAX {
            // This is the only handle, so no other thread can be about to use the slot.
            places.retain(|_, place| Arc::get_mut(place).is_none() || !place.is_empty());
        }
        if places.len() >= SLOTS_MAX {
            return Err(ScopeError::TooManySlots { max: SLOTS_MAX });
        }
        let device_limit = match slot.kind {
            SlotKind::Device => self.config.device_limit.value,
            SlotKind::Pinned => ByteSize::MAX,
        };
        let (device, arenas) = (Arc::clone(device), self.devices.arenas.clone());
        let place = Place::new(slot.clone(), self.birth, device_limit, device, arenas);
        let place = Arc::new(place);
        places.insert(slot.clone(), Arc::clone(&place));
        Ok(place)
    }

    fn places(&self) -> Vec<Arc<Place>> {
        lock(&self.devices.scopes.0).values().cloned().collect()
    }

    /// Drops the arenas that have drained, with their address space and at most the last granules.
    /// For the worker, and for replacements.
    pub(in crate::memory) fn sweep(&self) {
        if self.check_here().is_err() {
            return;
        }
        let drained = self.places().into_iter().flat_map(|place| {
            let device = Arc::clone(&place.device);
            place.take_drained().into_iter().map(move |drained| (Arc::clone(&device), drained))
        });
        for (device, Opened { arena, pool }) in drained {
            // An error stays with the arena: memory that it could not release goes with the driver.
            let _ = self.purged(&arena);
            self.devices.gone.add(&device.name, arena.snapshot());
            log!(debug, target: "lowtide", arena = arena.name(), "replaced arena drained");
            drop((pool, arena));
        }
        for closed in self.devices.arenas.take_closed() {
            self.devices.gone.add(&closed.device.name, closed.arena.snapshot());
        }
    }

    /// Opens an arena of device memory, which no list contains yet.
    fn open_slot_arena(
        &self,
        device: &Device,
        name: String,
        resolution: &ArenaResolution,
    ) -> Result<DeviceArena, ArenaError> {
        self.device_for(DeviceSelector::Number(device.number), &name)?; // unless it is lost
        self.open_apart(device, resolution.config(self.arena_config(name)))
    }

    /// Opens a pool for copies to and from the device, which no list contains yet; returns its
    /// arena as well.
    fn open_slot_pool(
        &self,
        device: &Device,
        name: String,
        limit: ByteSize,
    ) -> Result<(PinnedPool, DeviceArena), ArenaError> {
        self.device_for(DeviceSelector::Number(device.number), &name)?; // unless it is lost
        let kind = PinnedKind::PageLockedOrPageable;
        self.open_pool_apart(device, PinnedConfig { limit, kind, ..PinnedConfig::new(name) })
    }
}
