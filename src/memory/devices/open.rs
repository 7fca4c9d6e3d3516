//! Opens arenas, pinned pools and the arenas of slots, lists them, and releases their idle memory.
//!
//! The handles of pools' arenas stay in this folder, which frees no blocks.
#![expect(unsafe_code, reason = "the arena of a pool could free the pool's blocks")]

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::{ArenaOptions, ShrinkTarget};
use crate::device::driver::Backend;
use crate::device::{
    ArenaConfig, DeviceArena, DeviceError, HostBudget, PinnedConfig, PinnedKind, PinnedPool,
    RegionOccupancy,
};
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::shared::Shared;
use crate::sync::lock;
use lowtide_admission::{Admission, Cost, Permit, Rejected};

use super::MemoryDevices;
use super::arenas::{ManagedArena, cannot_open, is_loss};
use super::device::Device;
use super::slots::{
    ArenaGeneration, ArenaReport, ArenaSlot, ArenaUse, SlotAction, SlotSnapshot, begin_draining,
};
use super::values::{DeviceSelector, Slot};

impl MemoryDevices<'_> {
    /// Opens an arena on the selected device, with the configured driver, limit, decay time and
    /// sleep settings. The manager samples, decays and publishes the arena, and puts it to sleep if
    /// configured, until the `Memory` ends or the arena is closed with [`DeviceArena::close`],
    /// which makes its name available again. Dropping all handles does not close the arena. Names
    /// of arenas are unique across devices.
    ///
    /// All other settings are those of [`ArenaConfig::new`]. [`MemoryDevices::open_arena_with`]
    /// changes any of them; [`DeviceArena::set_limit`], [`DeviceArena::set_decay`],
    /// [`DeviceArena::set_thread_cache`] and [`DeviceArena::set_stores_max`] change those of one
    /// open arena. The last is the host memory that the arena keeps for its next sleep: at first a
    /// quarter of the limit of host memory, and at most half of the host's physical memory. It has
    /// no variable and no setting of the [`Builder`](crate::memory::Builder). For growth in steps,
    /// use [`MemoryDevices::share_arena`]. An arena that is opened after
    /// [`Memory::shutdown_blocking`](crate::Memory::shutdown_blocking) is not managed.
    ///
    /// The memory of a resource is on the device of its arena
    /// ([`Memory::managed_in`](crate::Memory::managed_in)), but its cost is reserved in the first
    /// device's budget.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::DeviceSelector;
    ///
    /// let memory = Memory::builder().start()?;
    /// let arena = memory.devices().open_arena("embedder")?;
    /// let other = memory.devices().on(DeviceSelector::MostHeadroom).open_arena("ranker")?;
    /// # drop((arena, other));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError::OpenArena`] if there is no such device, it is lost, or the driver fails;
    /// [`MemoryError::DuplicateArena`], [`MemoryError::TooMany`], [`MemoryError::Forked`].
    pub fn open_arena(&self, name: &str) -> Result<DeviceArena, MemoryError> {
        self.open_arena_with(name, |_| {})
    }

    /// Like [`MemoryDevices::open_arena`], with settings of the arena that have no variable, such
    /// as the size of its handles, its granule, or a recorder. `change` gets those that
    /// [`MemoryDevices::open_arena`] uses. It may set a limit above
    /// [`device_limit`](crate::memory::Builder::device_limit), which does not change the budget of
    /// the device. It cannot change the name.
    ///
    /// ```
    /// use lowtide::config::DeviceChoice;
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().device(DeviceChoice::Host).start()?;
    /// let arena = memory.devices().open_arena_with("embedder", |config| {
    ///     config.handle_max = ByteSize::mib(16);
    /// })?;
    /// # drop(arena);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`MemoryDevices::open_arena`]. [`MemoryError::OpenArena`] also if the driver
    /// cannot have a setting ([`DeviceArena::open`]).
    pub fn open_arena_with(
        &self,
        name: &str,
        change: impl FnOnce(&mut ArenaConfig),
    ) -> Result<DeviceArena, MemoryError> {
        let shared = self.shared();
        let device = self.device_for(name)?;
        let limit = shared.config.device_limit.value;
        let mut config = ArenaConfig { limit, ..shared.arena_config(name) };
        change(&mut config);
        name.clone_into(&mut config.name);
        let opened = shared.open_apart(&device, config)?;
        // Checked again: another thread may have opened one in the meantime.
        shared.devices.arenas.add(&opened, None)?;
        Ok(opened.arena.clone())
    }

    /// Opens a pool of host memory for copies to and from the selected device, with the configured
    /// driver and decay time. Its arena has the name of the pool, and is managed like one of
    /// [`MemoryDevices::open_arena`], until the pool is closed with [`PinnedPool::close`]. Its
    /// memory counts in the host's budget.
    ///
    /// ```
    /// use lowtide::device::driver::Backend;
    /// use lowtide::device::{PinnedConfig, PinnedKind};
    /// use lowtide::{ByteSize, Memory};
    ///
    /// let memory = Memory::builder().start()?;
    /// // Page-locked if this process may lock memory.
    /// let kind = PinnedKind::PageLockedOrPageable;
    /// let limit = ByteSize::mib(256);
    /// let config = PinnedConfig { kind, limit, ..PinnedConfig::new("staging") };
    /// let pool = memory.devices().open_pinned_pool(config)?;
    /// let staging = pool.alloc_from(&[1.0_f32; 1024])?;
    /// let [arena] = &memory.snapshot().devices.arenas[..] else { panic!("one arena") };
    /// assert_eq!((arena.backend, arena.live), (Backend::PinnedHost, ByteSize::kib(4)));
    /// # drop(staging);
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`MemoryDevices::open_arena`] and, as [`MemoryError::OpenArena`], those of
    /// [`PinnedPool::open`].
    pub fn open_pinned_pool(&self, config: PinnedConfig) -> Result<PinnedPool, MemoryError> {
        let shared = self.shared();
        let device = self.device_for(&config.name)?;
        let (pool, opened) = shared.open_pool_apart(&device, config)?;
        // Checked again: another thread may have opened one in the meantime.
        shared.devices.arenas.add(&opened, None)?;
        Ok(pool)
    }

    /// Returns the selected device for an arena of this name, which is not in use.
    fn device_for(&self, arena: &str) -> Result<Arc<Device>, MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        shared.sweep(); // so that what was closed, or has drained, takes no place
        shared.devices.arenas.admit(arena, None)?;
        shared.select(self.selector).map_err(|error| cannot_open(arena, error))
    }

    /// Returns the layout of each arena by name: serving arenas first, then draining ones. The
    /// layouts have at most `cells_max` cells in total, but at least 4 for each arena. Costs
    /// [`DeviceArena::occupancy`] for each.
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> Vec<(String, Vec<RegionOccupancy>)> {
        let arenas = self.shared().arenas();
        let each = cells_max / (2 * arenas.len()).max(1);
        let of = |it: &Arc<ManagedArena>| (it.arena.name().to_owned(), it.arena.occupancy(each));
        arenas.iter().map(of).collect()
    }
}

impl Shared {
    /// Returns the serving arena of this name, or else the names of all.
    pub(in crate::memory) fn arena_named(&self, name: &str) -> Result<DeviceArena, MemoryError> {
        let (serving, _) = self.devices.arenas.parted();
        let found = serving.iter().find(|it| it.arena.name() == name);
        found.map(|found| found.arena.clone()).ok_or_else(|| {
            let known = serving.iter().map(|it| it.arena.name().to_owned()).collect();
            MemoryError::UnknownArena { name: name.to_owned(), known }
        })
    }

    /// Returns the arenas; none in a forked child, as for [`Shared::diagnostics`].
    pub(super) fn arenas(&self) -> Vec<Arc<ManagedArena>> {
        if self.birth.is_here() { self.devices.arenas.all() } else { Vec::new() }
    }

    /// Returns the arenas whose device is not lost.
    pub(super) fn working(&self) -> impl Iterator<Item = Arc<ManagedArena>> + use<> {
        self.arenas().into_iter().filter(|it| !it.device.is_lost())
    }

    /// Returns the arenas whose device is not lost.
    pub(super) fn working_arenas(&self) -> impl Iterator<Item = DeviceArena> + use<> {
        self.working().map(|it| it.arena.clone())
    }

    /// Returns the arenas of one device's memory: all but those of pinned pools.
    pub(super) fn arenas_on(&self, device: &Device) -> impl Iterator<Item = DeviceArena> + use<> {
        let number = device.number;
        let there = self.arenas().into_iter().filter(move |it| it.device.number == number);
        there.map(|it| it.arena.clone()).filter(|arena| arena.backend() != Backend::PinnedHost)
    }

    /// Opens an arena that is not in the list.
    pub(super) fn open_apart(
        &self,
        device: &Arc<Device>,
        config: ArenaConfig,
    ) -> Result<Arc<ManagedArena>, MemoryError> {
        let name = config.name.clone();
        let arena = DeviceArena::open(device.driver.clone(), Arc::clone(&self.clock), config)
            .map_err(|error| cannot_open(&name, error.into()))?;
        // Its contents reserve host memory while it sleeps.
        arena.set_host_budget(Arc::new(HostRoom { admission: self.admission.clone() }));
        Ok(ManagedArena::new(device, arena, None))
    }

    /// Opens a pool whose arena is not in the list.
    pub(super) fn open_pool_apart(
        &self,
        device: &Arc<Device>,
        config: PinnedConfig,
    ) -> Result<(PinnedPool, Arc<ManagedArena>), MemoryError> {
        let name = config.name.clone();
        let config = PinnedConfig { decay: self.config.device_decay.value, ..config };
        let pool = PinnedPool::open(device.driver.clone(), Arc::clone(&self.clock), config)
            .map_err(|error| cannot_open(&name, error.into()))?;
        // SAFETY: no block is freed by its address: the handle stays in the list and with the slot,
        // which use it for figures and the release of idle memory. A slot gives out only an arena
        // without a pool (`ArenaUse::with`).
        let arena = unsafe { pool.arena() }.clone();
        Ok((pool.clone(), ManagedArena::new(device, arena, Some(pool))))
    }

    /// Returns the pinned pools whose device is not lost, including draining ones; none in a forked
    /// child.
    pub(super) fn pools(&self) -> impl Iterator<Item = PinnedPool> + use<> {
        self.working().filter_map(|it| it.pool.clone())
    }

    /// Releases the idle memory of all arenas, and host memory kept for their next sleep. Returns
    /// the released bytes.
    pub(in crate::memory) fn purge_devices(&self) -> ByteSize {
        let purged: ByteSize = self.working_arenas().map(|arena| self.purged(&arena)).sum();
        purged.saturating_add(self.release_stores())
    }

    /// Releases the host memory that arenas keep for their next sleep. Returns its bytes.
    pub(super) fn release_stores(&self) -> ByteSize {
        self.working_arenas().map(|arena| arena.release_stores()).sum()
    }

    /// Purges an arena and returns the released bytes. An error becomes a diagnostic.
    pub(super) fn purged(&self, arena: &DeviceArena) -> ByteSize {
        arena.purge().unwrap_or_else(|error| {
            self.warn_unless_lost(format_args!("arena {}: purge failed", arena.name()), &error);
            ByteSize::ZERO
        })
    }

    /// Adds a diagnostic of a failure, unless the device is lost, which is reported once for all
    /// its arenas.
    pub(super) fn warn_unless_lost(&self, failure: fmt::Arguments<'_>, error: &DeviceError) {
        if !is_loss(error) {
            self.add_diagnostic(Diagnostic::warning("device", format!("{failure}: {error}")));
        }
    }

    /// Releases the idle memory of all arenas that count in the first device's budget, as a reclaim
    /// step: of the first device if it has memory of its own, otherwise of all in host memory.
    pub(super) fn purge_arenas(&self) -> ByteSize {
        let is_own = self.devices.has_own_memory();
        let is_counted = |it: &Arc<ManagedArena>| match is_own {
            true => it.device.number == 0 && !it.is_on_host(),
            false => it.is_on_host(),
        };
        self.working().filter(is_counted).map(|it| self.purged(&it.arena)).sum()
    }
}

impl Shared {
    /// The default configuration of an arena.
    pub(super) fn arena_config(&self, name: impl Into<String>) -> ArenaConfig {
        let mut sleep = self.config.device_sleep();
        sleep.stores_max = sleep.stores_max.min(self.stores_max());
        let decay = self.config.device_decay.value;
        ArenaConfig { decay, sleep, ..ArenaConfig::new(name) }
    }

    /// Returns the host memory that an arena may keep for its next sleep: a quarter of the limit,
    /// because requests cannot use it.
    fn stores_max(&self) -> ByteSize {
        let limit = self.state.limit();
        if limit == ByteSize::MAX { limit } else { ByteSize::new(limit.get() / 4) }
    }
}

/// The host's ledger, for contents of sleeping arenas. It holds only the accounts, so that an arena
/// may outlive its `Memory`.
#[derive(Debug)]
struct HostRoom {
    admission: Admission,
}

impl HostBudget for HostRoom {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        match self.admission.try_reserve_resource(Cost::host(bytes)) {
            Ok(permit) => Ok(Box::new(permit)),
            Err(Rejected::Full { reserved, allowance, .. }) => {
                Err(format!("{reserved} reserved, allowance {allowance}"))
            }
            Err(rejected) => Err(rejected.to_string()),
        }
    }

    fn settle(&self, reserved: &mut (dyn Any + Send)) {
        if let Some(permit) = reserved.downcast_mut::<Permit>() {
            permit.settle_at(Cost::ZERO);
        }
    }
}

/// The maximum number of slots of one `Memory`.
const SLOTS_MAX: usize = 64;

impl MemoryDevices<'_> {
    /// Opens a slot's arena for all sessions, with ONNX Runtime's defaults for unset options. The
    /// arena stays open without users, until [`MemoryDevices::unshare_arena`]. If the slot already
    /// has an arena, that one is shared unchanged, and options that differ are conflicts; use a
    /// replacement to apply them. Waits while another thread opens the slot's arena.
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
    /// let session = ArenaOptions::of_session("CudaEp", session)?;
    /// let arena = memory.devices().use_arena(&slot, &session)?;
    /// assert_eq!(arena.report.conflicts.len(), 1); // the shared arena's limit is in force
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
    /// [`MemoryError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn share_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<ArenaReport, MemoryError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        Ok(shared.act_on(&place, SlotAction::Share, options)?.0)
    }

    /// Ends the sharing. The arena drains when its last user has left, which may be immediately.
    ///
    /// # Errors
    /// [`MemoryError::NotShared`] if the slot has no shared arena;
    /// [`MemoryError::Forked`].
    pub fn unshare_arena(&self, slot: &Slot) -> Result<(), MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        let place = lock(&shared.devices.slots).get(slot).cloned();
        match place {
            Some(place) if place.unshare() => Ok(()),
            _ => Err(MemoryError::NotShared { slot: slot.clone() }),
        }
    }

    /// Returns a counted use of a slot's arena. Opens an arena with the session's options if there
    /// is none; otherwise the options that differ are in its [report](ArenaUse::report). Waits while
    /// another thread opens or replaces the slot's arena.
    ///
    /// # Errors
    /// [`MemoryError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn use_arena(&self, slot: &Slot, session: &ArenaOptions) -> Result<ArenaUse, MemoryError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        let (report, _) = shared.act_on(&place, SlotAction::Use, session)?;
        Ok(ArenaUse { place, report })
    }

    /// Replaces a slot's arena, whether or not sessions use it. The new arena has the given
    /// options; all other keys keep the values in force. Allocations that start after the return
    /// are in the new arena; blocks of the old arena stay there until they are freed. If the slot
    /// has no arena, this shares one.
    ///
    /// Blocks while the old arena's idle memory is released: about 0.1 ms for each MiB.
    ///
    /// # Errors
    /// [`MemoryError`] if the options are invalid, the slot is invalid, or the arena cannot be
    /// opened. Nothing is changed then.
    pub fn replace_arena(
        &self,
        slot: &Slot,
        options: &ArenaOptions,
    ) -> Result<ArenaReport, MemoryError> {
        let shared = self.shared();
        let place = shared.place(slot)?;
        let (mut report, old) = shared.act_on(&place, SlotAction::Replace, options)?;
        if let Some(old) = old {
            let arena = &old.managed.arena;
            report.draining = Some(arena.glance().live);
            report.released = shared.purged(arena);
            begin_draining(&old);
        }
        shared.sweep();
        let draining = report.draining.map(tracing::field::display);
        log!(info, %slot, draining, conflicts = report.conflicts.len(), "arena replaced");
        Ok(report)
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
    fn place(&self, slot: &Slot) -> Result<Arc<ArenaSlot>, MemoryError> {
        self.check_here()?;
        if slot.name.is_empty() {
            return Err(MemoryError::NoSlotName);
        }
        let list = &self.devices.list;
        if list.is_empty() && slot.device == 0 {
            return Err(cannot_open(&slot.to_string(), MemoryError::NoDevice));
        }
        let Some(device) = list.iter().find(|device| device.number == slot.device) else {
            let known: Vec<_> = (0..).take(list.len().max(1)).map(ShrinkTarget::Gpu).collect();
            return Err(MemoryError::unknown_device(slot, &known));
        };
        let mut places = lock(&self.devices.slots);
        if let Some(place) = places.get(slot) {
            return Ok(Arc::clone(place));
        }
        if places.len() >= SLOTS_MAX {
            // This is the only handle, so no other thread can be about to use the slot.
            places.retain(|_, place| Arc::get_mut(place).is_none() || !place.is_empty());
        }
        if places.len() >= SLOTS_MAX {
            return Err(MemoryError::TooMany { what: "slots", max: SLOTS_MAX });
        }
        let (device, arenas) = (Arc::clone(device), self.devices.arenas.clone());
        let place = Arc::new(ArenaSlot::new(slot.clone(), self.birth, device, arenas));
        places.insert(slot.clone(), Arc::clone(&place));
        Ok(place)
    }

    fn places(&self) -> Vec<Arc<ArenaSlot>> {
        lock(&self.devices.slots).values().cloned().collect()
    }

    /// Drops the arenas that have drained, with their address space and at most the last granules.
    /// For the worker, and for replacements.
    pub(in crate::memory) fn sweep(&self) {
        if self.check_here().is_err() {
            return;
        }
        for drained in self.places().iter().flat_map(|place| place.take_drained()) {
            // An error stays with the arena: memory that it could not release goes with the driver.
            let _ = self.purged(&drained.arena);
            self.devices.gone.add(&drained.device.name, drained.arena.snapshot());
            log!(debug, arena = drained.arena.name(), "replaced arena drained");
        }
        for closed in self.devices.arenas.take_closed() {
            self.devices.gone.add(&closed.device.name, closed.arena.snapshot());
        }
    }

    /// Joins the arena of a slot, or opens one, which no list contains yet.
    fn act_on(
        &self,
        place: &ArenaSlot,
        act: SlotAction,
        options: &ArenaOptions,
    ) -> Result<(ArenaReport, Option<Arc<ArenaGeneration>>), MemoryError> {
        place.act(act, options, self.config.device_limit.value, |resolution, replaced| {
            self.sweep(); // so that what has drained takes no place
            let (device, name) = (&place.device, place.slot.to_string());
            self.devices.arenas.admit(&name, replaced)?;
            let working = self.select(DeviceSelector::Number(device.number));
            working.map_err(|error| cannot_open(&name, error))?; // unless it is lost
            if !place.slot.pinned {
                return self.open_apart(device, resolution.config(self.arena_config(name)));
            }
            let (limit, kind) = (resolution.limit(), PinnedKind::PageLockedOrPageable);
            let config = PinnedConfig { limit, kind, ..PinnedConfig::new(name) };
            self.open_pool_apart(device, config).map(|(_, opened)| opened)
        })
    }
}
