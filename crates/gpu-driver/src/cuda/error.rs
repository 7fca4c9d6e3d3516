//! Errors of opening a CUDA device.
//!
//! Invariant: each error names the request and the available choices.

use thiserror::Error;

use super::probe::Probe;
use crate::{Backend, DeviceUuid, DriverError};
use lowtide_core::bytes::ByteSize;

/// An error of opening a CUDA device.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaError {
    /// There is no driver, or no device is visible to this process.
    #[error("{0}")]
    Unavailable(Probe),
    /// No device has this ordinal.
    #[error(
        "no CUDA device {ordinal}: expected a number below {count}, the number of visible \
        devices"
    )]
    NoSuchDevice {
        /// The requested ordinal.
        ordinal: u32,
        /// The number of devices.
        count: u32,
    },
    /// No device has this UUID.
    #[error("no CUDA device {uuid}: visible devices are {}", names(.known))]
    NoSuchUuid {
        /// The requested UUID.
        uuid: DeviceUuid,
        /// The UUIDs of the visible devices.
        known: Vec<DeviceUuid>,
    },
    /// The requested backend does not work on this device.
    #[error("backend {backend} does not work on CUDA device {device}: {cause}")]
    NoSuchBackend {
        /// The requested backend.
        backend: Backend,
        /// The device's ordinal.
        device: u32,
        /// The cause.
        cause: BackendFailure,
    },
    /// No backend works on this device.
    #[error("cannot allocate on CUDA device {device}: {}", causes(.skipped))]
    NoBackend {
        /// The device's ordinal.
        device: u32,
        /// The backends that were tried, in order.
        skipped: Vec<Skipped>,
    },
    /// The requested handle size is invalid.
    #[error("invalid handle size {requested}: expected a power of two of at least {granularity}")]
    HandleSize {
        /// The requested size.
        requested: ByteSize,
        /// The smallest size that the device supports.
        granularity: ByteSize,
    },
    /// The pool limit is smaller than one allocation unit.
    #[error("invalid pool limit {requested}: expected at least {unit}, the allocation unit")]
    PoolLimit {
        /// The requested limit.
        requested: ByteSize,
        /// The smallest unit that the pool allocates.
        unit: ByteSize,
    },
    /// A device of [`CudaOptions::peers`](super::CudaOptions::peers) cannot access the memory.
    #[error(
        "CUDA device {peer} cannot access memory of CUDA device {device}: expected a peer of it"
    )]
    NoPeerAccess {
        /// The ordinal of the device with the memory.
        device: u32,
        /// The ordinal of the other device.
        peer: u32,
    },
    /// Network cards cannot access virtual memory of the device
    /// ([`CudaOptions::rdma`](super::CudaOptions::rdma)).
    #[error("CUDA device {device} does not support GPUDirect RDMA with virtual memory")]
    NoRdma {
        /// The device's ordinal.
        device: u32,
    },
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// A backend that was not used, and the cause.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{backend}: {cause}")]
#[non_exhaustive]
pub struct Skipped {
    /// The backend.
    pub backend: Backend,
    /// The cause.
    #[source]
    pub cause: BackendFailure,
}

/// The reason that a backend does not work.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum BackendFailure {
    /// The driver library lacks this function.
    #[error("the CUDA driver lacks the function {0}")]
    NoFunction(&'static str),
    /// The device does not support the backend.
    #[error("the device does not support it")]
    NotOffered,
    /// The memory did not hold the data written to it.
    #[error("the memory did not hold the data written to it")]
    Contents,
    /// The backend is not a CUDA backend.
    #[error("not a CUDA backend: expected cuda_virtual_memory, cuda_pool or cuda_plain")]
    NotCuda,
    /// Managed memory is available with the plain backend only.
    #[error("managed memory needs the backend cuda_plain")]
    NotManaged,
    /// There are fewer addresses than the device's memory needs, and another backend may do
    /// without.
    #[error("cannot reserve {needed} of addresses for each of two regions")]
    Addresses {
        /// The addresses of a region: the device's memory and an eighth.
        needed: ByteSize,
    },
    /// Peer access and RDMA are available with virtual memory only.
    #[error("peer access and RDMA need the backend cuda_virtual_memory")]
    NotShared,
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
