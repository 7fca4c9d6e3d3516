//! Opens arenas, lists them, and releases their idle memory.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::device::{ArenaConfig, ArenaOccupancy, DeviceArena};
use crate::memory::error::{Diagnostic, MemoryError};
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use lowtide_admission::Recovered;

use super::error::ArenaError;

impl Memory {
    /// Opens a device arena with the configured driver, limit, decay time and sleep settings. The
    /// manager samples, decays and publishes the arena, and puts it to sleep if configured, until
    /// this `Memory` ends or the arena is closed with [`DeviceArena::close`], which makes its name
    /// available again. Dropping all handles does not close the arena.
    ///
    /// All other settings are those of [`ArenaConfig::new`]; change them with
    /// [`DeviceArena::set_limit`], [`DeviceArena::set_decay`] and
    /// [`DeviceArena::set_thread_cache`]. For growth in steps, use [`Memory::share_arena`]. An
    /// arena that is opened after [`Memory::shutdown`] is not managed.
    ///
    /// # Errors
    /// [`MemoryError::Arena`] if the configured device is `none`, the driver fails, the name is in
    /// use, or too many arenas are open; [`MemoryError::Forked`].
    pub fn open_arena(&self, name: &str) -> Result<DeviceArena, MemoryError> {
        let shared = &self.0.shared;
        let config =
            ArenaConfig { limit: shared.config.device.limit.value, ..shared.arena_config(name) };
        shared.open_arena(config)
    }

    /// Returns the layout of each arena by name: serving arenas first, then draining ones. The
    /// layouts have at most `cells_max` cells in total, but at least 4 for each arena. Costs
    /// [`DeviceArena::occupancy`] for each.
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> Vec<(String, ArenaOccupancy)> {
        let arenas = self.0.shared.arenas();
        let each = cells_max / (2 * arenas.len()).max(1);
        arenas.iter().map(|arena| (arena.name().to_owned(), arena.occupancy(each))).collect()
    }
}

impl Shared {
    /// Returns the arenas; none in a forked child, as for [`Shared::diagnostics`].
    pub(super) fn arenas(&self) -> Vec<DeviceArena> {
        if self.birth.is_here() { self.devices.arenas.all() } else { Vec::new() }
    }

    fn open_arena(&self, config: ArenaConfig) -> Result<DeviceArena, MemoryError> {
        self.check_here()?;
        self.sweep(); // so that what was closed, or has drained, takes no place
        self.devices.arenas.admit(&config.name, None)?;
        let arena = self.open_apart(config)?;
        // Checked again: another thread may have opened one in the meantime.
        self.devices.arenas.add(&arena, None)?;
        Ok(arena)
    }

    /// Opens an arena that is not in the list.
    pub(super) fn open_apart(&self, config: ArenaConfig) -> Result<DeviceArena, ArenaError> {
        let name = config.name.clone();
        let Some(driver) = &self.devices.driver else {
            return Err(ArenaError::NoDevice { arena: name });
        };
        let arena = DeviceArena::open(Arc::clone(driver), Arc::clone(&self.clock), config)
            .map_err(|error| ArenaError::Driver { arena: name, error })?;
        self.book_contents_of(&arena);
        Ok(arena)
    }

    /// Releases the idle memory of all arenas, and host memory kept for their next sleep. Returns
    /// the released bytes.
    pub(in crate::memory) fn purge_devices(&self) -> ByteSize {
        let of = |arena: &DeviceArena| self.purged(arena).saturating_add(arena.release_stores());
        self.arenas().iter().map(of).sum()
    }

    /// Purges an arena and returns the released bytes. An error becomes a diagnostic.
    pub(super) fn purged(&self, arena: &DeviceArena) -> ByteSize {
        arena.purge().unwrap_or_else(|error| {
            self.add_diagnostic(Diagnostic::warning(
                "device",
                format!("arena {}: purge failed: {error}", arena.name()),
            ));
            ByteSize::ZERO
        })
    }

    /// Releases the idle memory of all arenas, as a reclaim step.
    pub(super) fn purge_arenas(&self) -> Recovered {
        Recovered::of(self.arenas().iter().map(|arena| self.purged(arena)).sum())
    }
}
