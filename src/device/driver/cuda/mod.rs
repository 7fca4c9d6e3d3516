//! CUDA at run time: whether a driver is there, what it offers, and device memory from it.
//!
//! [`probe`] looks with the loader alone and answers in every case, because cudarc panics when
//! the library or one of its symbols is absent. Nothing is needed at build time. No call goes to
//! the null stream.
//!
//! Invariant: `probe() = Probe::Devices { count, .. } => count >= 1`.

mod abi;
mod calls;
mod context;
mod device;
mod driver;
mod error;
mod governor;
mod ladder;
mod library;
mod mapping;
mod memory;
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
pub use open::{CudaOptions, DeviceChoice, MemoryKind};
pub use probe::{Probe, probe};

pub use super::{DeviceUuid, UuidError};
