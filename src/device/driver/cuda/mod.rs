//! CUDA at run time: whether a driver is there, and what it offers.
//!
//! [`probe`] looks with the loader alone and answers in every case, because cudarc panics when
//! the library or one of its symbols is absent. Nothing here allocates device memory, and no
//! cudarc call may be made before a probe has found a device.
//!
//! Invariant: `probe() = Probe::Devices { count, .. } => count >= 1`.

mod probe;

pub use probe::{Probe, probe};
