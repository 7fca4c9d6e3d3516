//! Opens arenas and pinned pools, and lists those of one `Memory`, which are sampled, decayed and
//! published while listed.
//!
//! A draining arena has lost its name, so another arena can use it, but is still sampled and
//! decayed. The handles of pools' arenas stay in this folder, which frees no blocks.
//!
//! Invariant: names of arenas that are not draining are unique; no driver call under the lock.
#![expect(unsafe_code, reason = "the arena of a pool could free the pool's blocks")]

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::device::driver::Backend;
use crate::device::{
    ArenaConfig, ArenaOccupancy, DeviceArena, DeviceError, PinnedConfig, PinnedPool,
};
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::shared::Shared;
use crate::sync::{Mutex, lock};

use super::MemoryDevices;
use super::device::{CountedIn, Device};
use super::select::DeviceSelector;

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
    /// [`MemoryError::DuplicateArena`], [`MemoryError::TooManyArenas`], [`MemoryError::Forked`].
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
        let arena = shared.open_apart(&device, config)?;
        // Checked again: another thread may have opened one in the meantime.
        shared.devices.arenas.add(&arena, None, &device, None)?;
        Ok(arena)
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
        let (pool, arena) = shared.open_pool_apart(&device, config)?;
        // Checked again: another thread may have opened one in the meantime.
        shared.devices.arenas.add(&arena, Some(&pool), &device, None)?;
        Ok(pool)
    }

    /// Returns the selected device for an arena of this name, which is not in use.
    fn device_for(&self, arena: &str) -> Result<Arc<Device>, MemoryError> {
        let shared = self.shared();
        shared.check_here()?;
        shared.sweep(); // so that what was closed, or has drained, takes no place
        shared.devices.arenas.admit(arena, None)?;
        shared.device_for(self.selector, arena)
    }

    /// Returns the layout of each arena by name: serving arenas first, then draining ones. The
    /// layouts have at most `cells_max` cells in total, but at least 4 for each arena. Costs
    /// [`DeviceArena::occupancy`] for each.
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> Vec<(String, ArenaOccupancy)> {
        let arenas = self.shared().arenas();
        let each = cells_max / (2 * arenas.len()).max(1);
        let one = |Listed { arena, .. }: &Listed| (arena.name().to_owned(), arena.occupancy(each));
        arenas.iter().map(one).collect()
    }
}

impl Shared {
    /// Returns the serving arena of this name, or else the names of all.
    pub(in crate::memory) fn arena_named(&self, name: &str) -> Result<DeviceArena, Vec<String>> {
        let (serving, _) = self.devices.arenas.parted();
        let found = serving.iter().find(|listed| listed.arena.name() == name);
        found
            .map(|listed| listed.arena.clone())
            .ok_or_else(|| serving.iter().map(|listed| listed.arena.name().to_owned()).collect())
    }

    /// Returns the arenas; none in a forked child, as for [`Shared::diagnostics`].
    pub(super) fn arenas(&self) -> Vec<Listed> {
        if self.birth.is_here() { self.devices.arenas.all() } else { Vec::new() }
    }

    /// Returns the arenas whose device is not lost.
    pub(super) fn working_arenas(&self) -> impl Iterator<Item = DeviceArena> + use<> {
        let working = self.arenas().into_iter().filter(|listed| !listed.device.is_lost());
        working.map(|listed| listed.arena)
    }

    /// Returns the arenas of one device's memory: all but those of pinned pools.
    pub(super) fn arenas_on(&self, device: &Device) -> impl Iterator<Item = DeviceArena> + use<> {
        let number = device.number;
        let there = self.arenas().into_iter().filter(move |it| it.device.number == number);
        there.map(|it| it.arena).filter(|arena| arena.backend() != Backend::PinnedHost)
    }

    /// Returns the device for an arena of this name.
    pub(super) fn device_for(
        &self,
        selector: DeviceSelector,
        arena: &str,
    ) -> Result<Arc<Device>, MemoryError> {
        self.select(selector).map_err(|error| cannot_open(arena, error))
    }

    /// Opens an arena that is not in the list.
    pub(super) fn open_apart(
        &self,
        device: &Device,
        config: ArenaConfig,
    ) -> Result<DeviceArena, MemoryError> {
        let name = config.name.clone();
        let arena = DeviceArena::open(device.driver(), Arc::clone(&self.clock), config)
            .map_err(|error| cannot_open(&name, error.into()))?;
        self.book_contents_of(&arena);
        Ok(arena)
    }

    /// Opens a pool that is not in the list, and returns its arena as well.
    pub(super) fn open_pool_apart(
        &self,
        device: &Device,
        config: PinnedConfig,
    ) -> Result<(PinnedPool, DeviceArena), MemoryError> {
        let name = config.name.clone();
        let config = PinnedConfig { decay: self.config.device_decay.value, ..config };
        let pool = PinnedPool::open(device.driver(), Arc::clone(&self.clock), config)
            .map_err(|error| cannot_open(&name, error.into()))?;
        // SAFETY: no block is freed by its address: the handle stays in the list and with the slot,
        // which use it for figures and the release of idle memory. A slot gives out the arena of
        // device memory only (`ArenaGeneration::device_arena`).
        let arena = unsafe { pool.arena() }.clone();
        Ok((pool, arena))
    }

    /// Returns the pinned pools whose device is not lost, including draining ones; none in a forked
    /// child.
    pub(super) fn pools(&self) -> Vec<PinnedPool> {
        if self.birth.is_here() { self.devices.arenas.pools() } else { Vec::new() }
    }

    /// Frees the blocks of completed copies, and releases the memory of pools above their
    /// watermarks.
    pub(super) fn maintain_pools(&self) {
        for pool in self.pools() {
            if let Err(error) = pool.maintain()
                && !is_loss(&error)
            {
                let text = format!("pinned pool {}: {error}", pool.name());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
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

    /// Purges an arena and returns the released bytes. An error becomes a diagnostic, unless the
    /// device is lost, which is reported once for all its arenas.
    pub(super) fn purged(&self, arena: &DeviceArena) -> ByteSize {
        arena.purge().unwrap_or_else(|error| {
            if is_loss(&error) {
                return ByteSize::ZERO;
            }
            self.add_diagnostic(Diagnostic::warning(
                "device",
                format!("arena {}: purge failed: {error}", arena.name()),
            ));
            ByteSize::ZERO
        })
    }

    /// Releases the idle memory of all arenas that count in the first device's budget, as a reclaim
    /// step: of the first device if it has memory of its own, otherwise of all in host memory.
    pub(super) fn purge_arenas(&self) -> ByteSize {
        let is_own = self.devices.has_own_memory();
        let is_counted = |listed: &Listed| {
            let on_host = listed.device.counted != CountedIn::OnDevice
                || listed.arena.backend() == Backend::PinnedHost;
            if is_own { listed.device.number == 0 && !on_host } else { on_host }
        };
        let arenas = self.arenas().into_iter().filter(|listed| !listed.device.is_lost());
        let counted = arenas.filter(is_counted);
        counted.map(|listed| self.purged(&listed.arena)).sum()
    }
}
