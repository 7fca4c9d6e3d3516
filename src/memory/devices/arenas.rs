//! Opens arenas and pinned pools, and lists those of one `Memory`, which are sampled, decayed and
//! published while listed.
//!
//! A draining arena has lost its name, so another arena can use it, but is still sampled and
//! decayed. The handles of pools' arenas stay in this folder, which frees no blocks.
//!
//! Invariant: names of arenas that are not draining are unique; no driver call under the lock.
#![expect(unsafe_code, reason = "the arena of a pool could free the pool's blocks")]

use std::fmt;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

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

/// An arena of this `Memory`.
#[derive(Debug)]
pub(super) struct ManagedArena {
    /// The arena; that of the pool, if there is one, whose memory only the pool hands out.
    pub(super) arena: DeviceArena,
    pub(super) pool: Option<PinnedPool>,
    pub(super) device: Arc<Device>,
    /// `true` once it has lost its name.
    drains: AtomicBool,
}

impl ManagedArena {
    fn new(device: &Arc<Device>, arena: DeviceArena, pool: Option<PinnedPool>) -> Arc<Self> {
        Arc::new(Self { arena, pool, device: Arc::clone(device), drains: AtomicBool::new(false) })
    }

    /// Makes its name available.
    pub(super) fn drain(&self) {
        self.drains.store(true, Ordering::Relaxed);
    }

    fn is_draining(&self) -> bool {
        self.drains.load(Ordering::Relaxed)
    }

    /// Returns `true` if its memory is the host's.
    fn is_on_host(&self) -> bool {
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
pub(super) struct Arenas(Arc<Mutex<Vec<Arc<ManagedArena>>>>);

impl Arenas {
    /// Visits all arenas under the lock, without copying the list. For short calls.
    pub(super) fn each(&self, mut see: impl FnMut(&ManagedArena)) {
        lock(&self.0).iter().for_each(|arena| see(arena));
    }

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
    /// [`MemoryError::TooManyArenas`], [`MemoryError::DuplicateArena`].
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
        replaced.into_iter().for_each(|replaced| replaced.drain());
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
        return Err(MemoryError::TooManyArenas { max: ARENAS_MAX });
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
        shared.device_for(self.selector, arena)
    }

    /// Returns the layout of each arena by name: serving arenas first, then draining ones. The
    /// layouts have at most `cells_max` cells in total, but at least 4 for each arena. Costs
    /// [`DeviceArena::occupancy`] for each.
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> Vec<(String, ArenaOccupancy)> {
        let arenas = self.shared().arenas();
        let each = cells_max / (2 * arenas.len()).max(1);
        let of = |it: &Arc<ManagedArena>| (it.arena.name().to_owned(), it.arena.occupancy(each));
        arenas.iter().map(of).collect()
    }
}

impl Shared {
    /// Returns the serving arena of this name, or else the names of all.
    pub(in crate::memory) fn arena_named(&self, name: &str) -> Result<DeviceArena, Vec<String>> {
        let (serving, _) = self.devices.arenas.parted();
        match serving.iter().find(|it| it.arena.name() == name) {
            Some(found) => Ok(found.arena.clone()),
            None => Err(serving.iter().map(|it| it.arena.name().to_owned()).collect()),
        }
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
        device: &Arc<Device>,
        config: ArenaConfig,
    ) -> Result<Arc<ManagedArena>, MemoryError> {
        let name = config.name.clone();
        let arena = DeviceArena::open(device.driver(), Arc::clone(&self.clock), config)
            .map_err(|error| cannot_open(&name, error.into()))?;
        self.book_contents_of(&arena);
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
        let pool = PinnedPool::open(device.driver(), Arc::clone(&self.clock), config)
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

    /// Frees the blocks of completed copies, and releases the memory of pools above their
    /// watermarks.
    pub(super) fn maintain_pools(&self) {
        for pool in self.pools() {
            if let Err(error) = pool.maintain() {
                self.warn_unless_lost(format_args!("pinned pool {}", pool.name()), &error);
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
