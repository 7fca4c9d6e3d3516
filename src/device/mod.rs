//! Device memory: drivers and the arena over them. Knows no service and no policy.
//!
//! A [`DeviceArena`] reserves address space, commits memory behind blocks by the granule, and
//! gives granules that no block touches back along a curve of time. When to ask for that, and
//! under what pressure, is decided elsewhere.
//!
//! Invariant: `active + idle = committed <= reserved`, for every arena at every instant.

mod arena;
mod books;
mod buffer;
mod commit;
mod config;
pub mod driver;
mod error;
mod index;
mod lease;
mod reclaim;
mod region;
mod segment;
mod snapshot;

pub use arena::DeviceArena;
pub use buffer::Buffer;
pub use config::ArenaConfig;
pub use driver::host::HostDriver;
pub use error::DeviceError;
pub use lease::Lease;
pub use reclaim::Decayed;
pub use region::Region;
pub use snapshot::{AllocFailures, ArenaGlance, ArenaSnapshot, RegionSnapshot};

#[cfg(test)]
mod tests;
