//! CUDA at run time: detection of the driver, its capabilities, and device memory.
//!
//! [`probe`] uses the loader alone and never fails, because cudarc panics if the library or one of
//! its symbols is missing. Nothing of CUDA is needed at build time. No call uses the null stream,
//! unless the caller names it (`StreamHandle::LEGACY`).
//!
//! Invariant: `probe() = Probe::Devices { count, .. } => count >= 1`.

mod abi;
mod calls;
mod context;
mod device;
mod driver;
mod error;
mod exit;
mod governor;
mod ladder;
mod library;
mod mapping;
mod memory;
mod nvml;
mod open;
mod pool;
mod pooling;
mod probe;
mod segments;
mod stores;
mod table;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;
mod vmm;

pub use device::CudaDevice;
pub use driver::CudaDriver;
pub use error::{BackendFailure, CudaError, Skipped};
pub use governor::{GovernorError, GovernorOptions, GovernorReport, PoolGovernor};
pub use nvml::{DeviceUsage, Nvml, NvmlError, ProcessUsage};
pub use open::{CudaOptions, DeviceChoice, DeviceSet, MemoryKind};
pub use probe::{Probe, probe};

pub use super::{DeviceUuid, UuidError};
