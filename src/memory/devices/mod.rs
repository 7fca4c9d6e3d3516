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

pub(super) use sensor::ArenasSensor;
pub(super) use series::Series;
pub(super) use state::{Devices, GivenDrivers, choice};
