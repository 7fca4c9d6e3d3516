//! Why no CUDA device could be opened.
//!
//! Invariant: each error names what was asked for and what there is.

use thiserror::Error;

use super::device::DeviceUuid;
use super::probe::Probe;
use crate::bytes::ByteSize;
use crate::device::driver::{DriverError, Rung};

/// Why no CUDA device could be opened.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// No driver, or no device that this process sees.
    #[error("{0}")]
    Unavailable(Probe),
    /// There is no device with this number.
    #[error("there is no CUDA device {ordinal}: this process sees {count}, from 0 on")]
    NoSuchDevice {
        /// What was asked for.
        ordinal: u32,
        /// How many there are.
        count: u32,
    },
    /// There is no device with this UUID.
    #[error("there is no CUDA device {uuid}: this process sees {}", names(.known))]
    NoSuchUuid {
        /// What was asked for.
        uuid: DeviceUuid,
        /// Those that there are.
        known: Vec<DeviceUuid>,
    },
    /// That way of getting memory cannot be had on this device.
    #[error("{rung} cannot be had on CUDA device {device}: {cause}")]
    NoSuchRung {
        /// What was asked for.
        rung: Rung,
        /// The device's number.
        device: u32,
        /// Why.
        cause: RungFailure,
    },
    /// A handle of this size cannot be had.
    #[error("handles of {requested}: expected a power of two of at least {granularity}")]
    HandleSize {
        /// What was asked for.
        requested: ByteSize,
        /// The smallest that the device offers.
        granularity: ByteSize,
    },
    /// The driver did not do what it was asked.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Why memory cannot be had in one way.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum RungFailure {
    /// The driver's library has no such function.
    #[error("the CUDA driver has no {0}")]
    NoFunction(&'static str),
    /// The device says that it does not offer it.
    #[error("the device does not offer it")]
    NotOffered,
    /// Memory had in that way did not hold what was written to it.
    #[error("memory did not hold what was written to it")]
    Contents,
    /// Arenas cannot be made of it in this version.
    #[error("no arena can be made of it in this version")]
    NoArena,
    /// A call of the trial failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn names(known: &[DeviceUuid]) -> String {
    let names: Vec<_> = known.iter().map(ToString::to_string).collect();
    names.join(", ")
}

/// Why a text names no device.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{text:?} is no UUID of a device: expected GPU- or MIG- and 32 hexadecimal digits")]
pub struct UuidError {
    /// What was given.
    pub text: String,
}
