//! CUDA at run time: detection of the driver, its capabilities, and device memory.
//!
//! The library and its functions are found with the loader alone, because cudarc panics if one of
//! them is missing. Nothing of CUDA is needed at build time. No call uses the null stream,
//! unless the caller names it (`StreamHandle::LEGACY`).
//!
//! Invariant: a driver is open only if there is a device.

mod calls;
mod context;
mod driver;
mod governor;
mod library;
mod memory;
mod nvml;
mod open;
mod table;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

pub use driver::CudaDriver;
pub use governor::{GovernorReport, PoolGovernor};
pub use nvml::{DeviceUsage, Nvml, ProcessUsage};
pub use open::{CudaDevice, CudaOptions, DeviceChoice};

pub use super::DeviceUuid;
