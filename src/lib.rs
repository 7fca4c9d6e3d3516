//! Memory that goes out with the traffic.
//!
//! lowtide manages memory for services that live for months and mix CPU work with GPU inference.
//! It puts one vocabulary, one set of curves and one control loop over the process heap (jemalloc)
//! and over device memory, and hands back what nothing needs.

pub mod bytes;
pub mod clock;
pub mod decay;
#[cfg(any(feature = "heap", feature = "device", feature = "control"))]
pub mod fork;
#[doc(hidden)]
pub mod sync;

#[cfg(feature = "control")]
pub mod control;
#[cfg(feature = "device")]
pub mod device;
#[cfg(feature = "heap")]
pub mod host;

#[cfg(feature = "memory")]
pub mod config;
#[cfg(feature = "memory")]
pub mod memory;
#[cfg(feature = "metrics")]
pub mod metrics;
#[cfg(feature = "service")]
pub mod service;

pub use bytes::ByteSize;
#[cfg(feature = "cuda")]
pub use cudarc;
#[cfg(feature = "memory")]
pub use memory::Memory;

/// An error of any kind, as `Box<dyn Error>` that can cross threads.
pub type BoxError = Box<dyn std::error::Error + Send + Sync>;

#[cfg(windows)]
compile_error!("lowtide supports Linux (full) and macOS (heap and host driver); not Windows");
