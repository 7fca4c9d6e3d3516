//! Device memory: drivers, and arenas that allocate from them. Independent of services and
//! policies.
//!
//! A [`DeviceArena`] reserves address space, commits memory for blocks by the granule, and
//! releases granules that no block has used for some time. When to release, and under which
//! pressure, is decided elsewhere.
//!
//! Without a `Memory` nothing is released in the background: the owner calls
//! [`DeviceArena::decay`], again at [`DeviceArena::next_decay`].
//!
//! ```
//! use std::sync::Arc;
//! use lowtide_gpu::ByteSize;
//! use lowtide_gpu::clock::{Clock, ManualClock};
//! use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
//!
//! let clock = Arc::new(ManualClock::new()); // a service takes a `SystemClock`
//! let config = ArenaConfig { limit: ByteSize::mib(64), ..ArenaConfig::new("embedder") };
//! let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
//!
//! let mut buffer = arena.alloc::<f32>(1 << 20, Region::Dynamic)?;
//! let lease = arena.enter()?; // slices need a lease
//! buffer.slice_mut(&lease)?.fill(1.0);
//! drop((buffer, lease));
//! assert!(arena.glance().idle >= ByteSize::mib(4)); // free, and still committed
//!
//! // The owner's loop; here it ends when no memory is idle.
//! while !arena.glance().idle.is_zero() {
//!     arena.decay(clock.now())?;
//!     clock.advance(arena.next_decay() - clock.now());
//! }
//! assert!(arena.glance().committed.is_zero());
//! # Ok::<(), lowtide_gpu::DeviceError>(())
//! ```
//!
//! A service runs the loop in a thread. It also checks periodically while no memory is idle
//! ([`Moment::NEVER`](lowtide_core::clock::Moment::NEVER)), because it gets no notification when
//! memory becomes idle:
//!
//! ```
//! use std::sync::Arc;
//! use std::thread;
//! use std::time::Duration;
//! use lowtide_gpu::clock::{Bell, Clock, SystemClock};
//! use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver};
//!
//! let (clock, stop) = (Arc::new(SystemClock::new()), Bell::new());
//! let driver = Arc::new(HostDriver::new());
//! let arena = DeviceArena::open(driver, clock.clone(), ArenaConfig::new("embedder"))?;
//! let decay = {
//!     let (arena, stop) = (arena.clone(), stop.clone());
//!     thread::spawn(move || -> Result<(), DeviceError> {
//!         loop {
//!             let now = clock.now();
//!             arena.decay(now)?;
//!             let due = arena.next_decay().min(now + Duration::from_millis(250));
//!             if clock.wait_until(&stop, due) {
//!                 return Ok(());
//!             }
//!         }
//!     })
//! };
//! // ... the service ...
//! stop.ring();
//! decay.join().expect("no panic")?;
//! # Ok::<(), DeviceError>(())
//! ```
//!
//! Further functions:
//!
//! - streams: [`DeviceArena::lane`]
//! - sleep, and wake at the same addresses: [`DeviceArena::sleep`]
//! - blocks by address: [`DeviceArena::alloc_raw`], on a stream [`Lane::alloc_raw`]
//! - buffers whose address foreign code keeps: [`Buffer::export`]; memory that it allocated:
//!   [`DeviceArena::import`]
//! - compaction: [`DeviceArena::compact`]
//! - callbacks when memory is short: [`DeviceArena::on_shortage`]
//! - a recording of the events, a line of JSON each: [`record`]
//! - a coarse map of the blocks: [`DeviceArena::occupancy`]
//! - host memory for copies: [`PinnedPool`]
//! - offsets for buffers of known lifetimes: [`plan`]
//! - the [block index](index), usable by itself
//!
//! With the feature `cuda`, `driver::cuda` has the driver for CUDA memory, and `Buffer::cuda`
//! borrows a buffer as a cudarc slice.
//! Events are logged through `tracing`; `docs/OPERATING.md` explains them.
//!
//! Invariant: `active + idle = committed <= reserved`, for every arena at every instant. (These are
//! [`ByteSize`]s, which have no operators: use [`ByteSize::saturating_add`] or [`ByteSize::get`].)
#![cfg_attr(docsrs, feature(doc_cfg))]

mod api;
mod engine;
mod exec;
pub mod index;
mod map;
mod pinned;
pub mod record;
mod state;
mod types;

pub use lowtide_core::{BoxError, ByteSize, clock, decay};
pub use lowtide_gpu_driver as driver;
pub use lowtide_planner as plan;

pub use api::arena::{DeviceArena, ShortageCallback};
pub use api::buffer::Buffer;
pub use api::compact::BlockPin;
pub use api::interop::{Exported, Imported};
pub use api::lane::{Lane, Lease};
pub use api::planned::PlannedMemory;
pub use api::raw::RawBlock;
pub use driver::host::HostDriver;
pub use map::RegionOccupancy;
pub use pinned::{PinnedBuffer, PinnedConfig, PinnedCopy, PinnedKind, PinnedPool, PinnedSnapshot};
pub use types::{
    ArenaConfig, ArenaGlance, ArenaSnapshot, Bound, CompactOptions, CompactReport, Contents,
    DeviceCosts, DeviceError, DeviceErrorWith, Growth, HostBudget, Moved, Region, RegionSnapshot,
    Shortage, SleepConfig, SleepOptions, SleepReport, SleepState,
};

#[cfg(all(test, lowtide_loom))]
mod models;
#[cfg(all(test, not(lowtide_loom)))]
mod tests;

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
