//! Device arenas in a `Memory`: all that it does with them.
//!
//! The rest of `memory` reaches them only through the items of this file, where it has the feature
//! `device`. [`Devices`] (`state`) is a field of `Shared`, and opens the devices. The parts:
//! `device` is one of them, `select` chooses one, `arenas` and `slots` list arenas, `open` opens
//! them, `release` and `shrink` release memory, `report` has the figures, `cuda` lists the
//! processes on a device, `values` has what users see. What `state` is made of does not use
//! `Shared`.
//!
//! Invariant: no driver call under a lock of this module but that of openings (`slots`).

mod arenas;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod open;
mod release;
mod report;
mod select;
mod shrink;
mod slots;
mod state;
mod values;
mod watermark;

use std::sync::Arc;

use super::manager::Memory;
use super::shared::Shared;

pub use crate::metrics::record::DeviceSnapshot;
#[cfg(feature = "cuda")]
pub use cuda::DeviceProcesses;
pub use shrink::{Run, Shrunk};
pub use slots::{ArenaReport, ArenaUse, SlotSnapshot};
pub use values::{DeviceSelector, DeviceStatus, DevicesSnapshot, Slot};

pub(super) use report::{ArenasSensor, Series};
pub(super) use state::{Devices, GivenDrivers, choice};

impl Memory {
    /// Returns a handle to the devices, their arenas and pools of host memory for copies. It acts
    /// on the default device unless [`MemoryDevices::on`] names another.
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
