//! Errors of opening arenas. Nothing is changed if one occurs.

use thiserror::Error;

use crate::device::DeviceError;

use super::selector::DeviceSelectError;

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
