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
#[cfg(feature = "metrics")]
pub mod metrics;

pub use bytes::ByteSize;

#[cfg(windows)]
compile_error!("lowtide supports Linux (full) and macOS (heap and host driver); not Windows");
