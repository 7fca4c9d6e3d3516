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
mod library;
mod mapping;
mod open;
mod probe;
mod stores;
mod table;
mod vmm;

pub use device::{CudaDevice, DeviceUuid};
pub use driver::CudaDriver;
pub use error::{CudaError, RungFailure, UuidError};
pub use open::{CudaOptions, DeviceChoice};
pub use probe::{Probe, probe};
