//! The values that name a device, and the reasons that it or an arena on it is not used.
//!
//! This module finds no device: `select` does.

use std::fmt;

use thiserror::Error;

use crate::device::DeviceError;
use crate::device::driver::{DeviceUuid, DriverError};
use crate::memory::error::MemoryError;
use lowtide_admission::Rejected;

/// Names one of the devices of a [`Memory`](crate::Memory).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelector {
    /// The first device.
    #[default]
    Default,
    /// The device with this number: its place in [`MemoryDevices::all`](crate::memory::MemoryDevices::all), from
    /// 0. Slots and shrink targets (`gpu:1`) count the same way.
    Number(u32),
    /// The device with this ordinal in CUDA, among those visible to the process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
    /// The device on which most memory can still be committed: free on the device, and within its
    /// budget. Of equal ones, the one with the fewest arenas. Devices that are lost, or cannot be
    /// queried, are left out.
    MostHeadroom,
}

impl fmt::Display for DeviceSelector {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Default => f.write_str("default"),
            Self::Number(number) => write!(f, "number {number}"),
            Self::Ordinal(ordinal) => write!(f, "cuda:{ordinal}"),
            Self::Uuid(uuid) => write!(f, "cuda:{uuid}"),
            Self::MostHeadroom => f.write_str("most headroom"),
        }
    }
}

/// The reason that no device was chosen.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceSelectError {
    /// The configured device is `none`.
    #[error("the configured device is none")]
    NoDevice,
    /// No device of this `Memory` has this name.
    #[error("unknown device {selector}: expected {}", one_of(known))]
    Unknown {
        /// The name.
        selector: DeviceSelector,
        /// The devices by the same kind of name, or by their numbers if none has such a name.
        known: Vec<DeviceSelector>,
    },
    /// The device is lost, or all are and this is the first. Its memory is gone until the process
    /// restarts.
    #[error("device {device} is lost: {error}")]
    Lost {
        /// The device's name in metrics.
        device: String,
        /// The error by which the loss became known.
        error: DriverError,
    },
    /// The device could not be queried.
    #[error("cannot query device {device}: {error}")]
    Silent {
        /// The device's name in metrics.
        device: String,
        /// The cause.
        error: DriverError,
    },
}

fn one_of(known: &[DeviceSelector]) -> String {
    known.iter().map(ToString::to_string).collect::<Vec<_>>().join(" or ")
}

/// The reason that bytes of a device were not reserved.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum DeviceReserveError {
    /// No device was chosen.
    #[error(transparent)]
    Device(#[from] DeviceSelectError),
    /// The bytes do not fit.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// This `Memory` cannot do it now, for example in a forked child.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// The reason that an arena, or a pool of pinned memory, was not opened.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ArenaError {
    /// The configured device is `none`.
    #[error("cannot open arena {arena:?}: the configured device is none")]
    NoDevice {
        /// The arena's name.
        arena: String,
    },
    /// No device was chosen for the arena: it is unknown or lost.
    #[error("cannot open arena {arena:?}: {error}")]
    Device {
        /// The arena's name.
        arena: String,
        /// The cause, which names the device.
        error: DeviceSelectError,
    },
    /// The driver failed to open the arena.
    #[error("cannot open arena {arena:?}: {error}")]
    Driver {
        /// The arena's name.
        arena: String,
        /// The cause; boxed, so that results are small.
        error: Box<DeviceError>,
    },
    /// The name is in use; the arenas could not be distinguished in metrics.
    #[error("arena {arena:?} is already open: expected another name")]
    Duplicate {
        /// The name.
        arena: String,
    },
    /// The maximum number of arenas is open.
    #[error("too many arenas: at most {max} can be open")]
    TooMany {
        /// The maximum.
        max: usize,
    },
}
