//! Device arenas in a `Memory`: all that it does with them.
//!
//! The rest of `memory` reaches them only through the items of this file, where it has the feature
//! `device`. [`Devices`] (`state`) is a field of `Shared`. The parts: `driver` opens the devices,
//! `device` is one of them, `select` chooses one, `arenas` lists the arenas, `open` and `scopes`
//! open them, `watch` and `watermark` keep device memory free for others, `maintenance`, `sleep`,
//! `shrink` and `reclaim` release memory, `sensor`, `published`, `series` and `snapshot` report it,
//! `processes` and `process_lists` list the processes on a device, `commands` and `resource` serve
//! operators and resources.
//!
//! Invariant: no driver call under a lock of this module.

mod arenas;
mod commands;
mod device;
mod driver;
#[cfg(feature = "cuda")]
mod governors;
mod maintenance;
mod open;
#[cfg(feature = "cuda")]
mod process_lists;
#[cfg(feature = "cuda")]
mod processes;
mod published;
mod reclaim;
mod resource;
mod scopes;
mod select;
mod selector;
mod sensor;
mod series;
mod settings;
mod shrink;
mod shrinks_asked;
mod sleep;
mod snapshot;
mod state;
mod watch;
mod watermark;

#[cfg(feature = "cuda")]
pub use process_lists::DeviceProcesses;
pub use scopes::{ArenaReport, ArenaUse, Replaced, ScopeError, Slot, SlotKind, SlotSnapshot};
pub use select::DeviceReservation;
pub use selector::{ArenaError, DeviceReserveError, DeviceSelectError, DeviceSelector};
pub use shrink::{Run, ShrinkError, ShrinkFailure, ShrinkOutcome, Shrunk, ShrunkTarget};
pub use snapshot::{DeviceSnapshot, DeviceStatus, DevicesSnapshot};

use std::sync::Arc;

use super::manager::Memory;
use super::shared::Shared;

pub(super) use sensor::ArenasSensor;
pub(super) use series::Series;
pub(super) use state::{Devices, GivenDrivers, choice};

impl Memory {
    /// Returns a handle to the devices, their arenas and pools of host memory for copies. It acts on
    /// the default device unless [`MemoryDevices::on`] names another.
    #[must_use]
    pub const fn devices(&self) -> MemoryDevices<'_> {
        MemoryDevices { memory: self, selector: DeviceSelector::Default }
    }
}

/// The devices and arenas of a [`Memory`], from [`Memory::devices`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryDevices<'a> {
    memory: &'a Memory,
    /// The device on which arenas and pools are opened, and bytes reserved.
    selector: DeviceSelector,
}

impl<'a> MemoryDevices<'a> {
    /// Returns a handle that acts on the device that the selector names.
    #[must_use]
    pub const fn on(self, selector: DeviceSelector) -> Self {
        Self { selector, ..self }
    }

    fn shared(&self) -> &'a Arc<Shared> {
        &self.memory.0.shared
    }
}
