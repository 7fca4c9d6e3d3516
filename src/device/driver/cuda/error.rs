//! Why no CUDA device could be opened.
//!
//! Invariant: each error names what was asked for and what there is.

use thiserror::Error;

use super::probe::Probe;
use crate::bytes::ByteSize;
use crate::device::driver::{Backend, DeviceUuid, DriverError};

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
    #[error("{backend} cannot be had on CUDA device {device}: {cause}")]
    NoSuchRung {
        /// What was asked for.
        backend: Backend,
        /// The device's number.
        device: u32,
        /// Why.
        cause: BackendFailure,
    },
    /// No way of getting memory works on this device.
    #[error("no memory can be had of CUDA device {device}: {}", causes(.skipped))]
    NoRung {
        /// The device's number.
        device: u32,
        /// What was tried, in its order.
        skipped: Vec<Skipped>,
    },
    /// A handle of this size cannot be had.
    #[error("handles of {requested}: expected a power of two of at least {granularity}")]
    HandleSize {
        /// What was asked for.
        requested: ByteSize,
        /// The smallest that the device offers.
        granularity: ByteSize,
    },
    /// A pool of so little memory holds nothing.
    #[error("a pool of {requested}: expected at least {unit}, what is taken at once")]
    PoolLimit {
        /// What was asked for.
        requested: ByteSize,
        /// The smallest piece that is taken of it.
        unit: ByteSize,
    },
    /// The driver did not do what it was asked.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// A way of getting memory that was not taken, and why.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{backend}: {cause}")]
#[non_exhaustive]
pub struct Skipped {
    /// Which.
    pub backend: Backend,
    /// Why.
    #[source]
    pub cause: BackendFailure,
}

/// Why memory cannot be had in one way.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendFailure {
    /// The driver's library has no such function.
    #[error("the CUDA driver has no {0}")]
    NoFunction(&'static str),
    /// The device says that it does not offer it.
    #[error("the device does not offer it")]
    NotOffered,
    /// Memory had in that way did not hold what was written to it.
    #[error("memory did not hold what was written to it")]
    Contents,
    /// It is no memory of a CUDA device.
    #[error("expected cuda_virtual_memory, cuda_pool or cuda_plain")]
    NotCuda,
    /// Managed memory is had in one way only.
    #[error("managed memory is plain memory: expected cuda_plain")]
    NotManaged,
    /// A call of the trial failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

fn names(known: &[DeviceUuid]) -> String {
    let names: Vec<_> = known.iter().map(ToString::to_string).collect();
    names.join(", ")
}

fn causes(skipped: &[Skipped]) -> String {
    let causes: Vec<_> = skipped.iter().map(ToString::to_string).collect();
    causes.join("; ")
}
