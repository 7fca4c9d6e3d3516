//! Keeps a service within its memory limit: rejects requests that do not fit, and returns unused
//! memory within seconds, without a restart.
//!
//! In the crate's folder, `README.md` has the smallest service, and `docs/GETTING_STARTED.md` the
//! next steps.
//!
//! # Heap
//!
//! jemalloc as the global allocator. On its own, this line returns unused memory about a second
//! after traffic falls.
//!
//! ```rust,standalone_crate
//! lowtide::global_allocator!(balanced); // jemalloc reads these settings before `main`
//!
//! fn main() -> Result<(), lowtide::heap::HostError> {
//!     let live = lowtide::heap::HeapProbe::new()?.snapshot()?.live;
//!     println!("{live} live; {}", lowtide::heap::effective()?); // the settings in force
//!     Ok(())
//! }
//! ```
//!
//! # Admission
//!
//! A [`Memory`] has two threads, which measure memory, set how much may be admitted, return unused
//! memory (a purge) and publish metrics. A request reserves its estimated bytes. If they do not
//! fit in time, it is rejected: 503 with `Retry-After`, or at once 413 if they can never fit.
//!
//! ```
//! use lowtide::{ByteSize, Cost, Memory};
//!
//! // `LOWTIDE_MEMORY_LIMIT` replaces this limit, and a lower limit of the cgroup lowers it.
//! let memory = Memory::builder().memory_limit(ByteSize::gib(1)).start()?;
//! println!("level {}; {:?}", memory.level(), memory.report().diagnostics());
//! let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
//! drop(permit); // releases the 3 MiB
//!
//! let app: axum::Router = axum::Router::new()
//!     .route("/length", axum::routing::post(|body: String| async move { body.len().to_string() }))
//!     .layer(memory.layer()); // estimates by body length; works with tonic too
//! # drop(app);
//! let report = memory.shutdown_blocking(std::time::Duration::from_secs(5));
//! println!("{report}"); // what is still held
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! # Device memory
//!
//! With the feature `device`, an arena allocates buffers, which are read through a lease. Freed
//! memory that stays unused for the decay time (`Builder::device_decay`) is released. A sleeping
//! arena releases its memory; waking restores the contents at the same addresses. On a GPU (feature
//! `cuda`) buffers can be borrowed as cudarc slices; here they stay in host memory.
//!
//! ```
//! use lowtide::Memory;
//! use lowtide::config::DeviceChoice;
//! use lowtide::device::{Region, SleepOptions};
//!
//! let memory = Memory::builder().device(DeviceChoice::Host).start()?;
//! let arena = memory.devices().open_arena("embedder")?;
//! let mut buffer = arena.alloc::<f32>(1 << 20, Region::Dynamic)?;
//! buffer.slice_mut(&arena.enter()?)?.fill(1.0);
//! arena.sleep(SleepOptions::default())?; // automatic with `LOWTIDE_DEVICE_SLEEP_AFTER`
//! let lease = arena.enter()?; // wakes the arena
//! assert_eq!(buffer.slice(&lease)?[7], 1.0);
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! # Models
//!
//! A model is loaded on first use, and only once, however many callers wait for it. Its cost is
//! reserved first. It is unloaded when idle, or when memory is short.
//!
//! ```
//! use lowtide::{ByteSize, Cost, Memory};
//!
//! let memory = Memory::builder().start()?;
//! let model = memory.managed("words", || Ok(vec!["tide"; 1 << 10]));
//! let model = model.cost(Cost::host(ByteSize::kib(16))).register()?;
//! assert_eq!(model.acquire_blocking()?.len(), 1 << 10); // `acquire().await` in a handler
//! assert_eq!(memory.snapshot().resources[0].loads_ok_total, 1);
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! # Metrics
//!
//! With the feature `prometheus`, `Builder::prometheus` installs a
//! recorder. `Memory::routes` (feature `axum`) or `service::Endpoints` answer `/metrics`,
//! `/healthz`, `/readyz` and `/memory`.
//!
//! ```
//! use lowtide::Memory;
//! use lowtide::service::Endpoints;
//!
//! let memory = Memory::builder().prometheus()?.start()?;
//! let endpoints = Endpoints::new(Some(memory));
//! assert_eq!(endpoints.answer("/healthz").map(|answer| answer.status().as_u16()), Some(200));
//! assert!(endpoints.answer("/metrics").is_some());
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! # Features
//!
//! Features only add, and none is on by default: [`Memory`] with heap, admission and metrics needs
//! none. A part alone is a package of its own: `lowtide-heap`, `lowtide-admission`,
//! `lowtide-planner`.
//!
//! | feature | contents |
//! |---|---|
//! | `service` | `service`: a tower layer and HTTP endpoints |
//! | `axum` | `Memory::routes`: the endpoints as routes of axum; with `service` |
//! | `tokio` | `Memory::terminated`, `shutdown`, `managed_async`, `service::Connections::listen` |
//! | `prometheus` | `Builder::prometheus`: metrics in the Prometheus text format |
//! | `serde` | snapshots, history and events implement `serde::Serialize`; part of `service` |
//! | `device` | `device`: arenas, compaction, pinned memory, plans; the host driver |
//! | `cuda` | arenas in CUDA memory, without a toolkit; **not run on a GPU yet**; with `device` |
//! | `disable_initial_exec_tls` | jemalloc in a library that is loaded at run time |
//! | `interpose` | C and C++ libraries use jemalloc too; for engines in C++ |
//! | `allocator-api2` | `heap::HostArena` as an `allocator-api2` allocator |
//! | `profiling` | jemalloc's heap profiler; profiles by HTTP, and before a kill by the kernel |
//!
//! Linux with glibc is supported in full; Windows is a compile error.
#![cfg_attr(docsrs, feature(doc_cfg))]

/// Logs an event of this crate, which has one target.
macro_rules! log {
    ($level:ident, $($event:tt)+) => {
        lowtide_core::log!($level, target: "lowtide", $($event)+)
    };
}

pub use lowtide_core::{BoxError, bytes, clock, decay};
use lowtide_core::{fork, rate, sync};

#[cfg(feature = "device")]
pub use lowtide_gpu as device;
pub use lowtide_heap::{global_allocator, jemalloc_conf};

pub mod admission;
pub mod config;
pub mod heap;
pub mod memory;
pub mod metrics;
#[cfg(feature = "service")]
pub mod service;

pub use bytes::ByteSize;
#[cfg(feature = "cuda")]
pub use cudarc;
pub use lowtide_admission::{Admission, Cost, Managed, Permit, Rejected, ResourceError};
pub use memory::{Builder, Memory, MemoryError, ResourceBuilder, StartError};
#[cfg(feature = "service")]
pub use service::MemoryLayer;

#[cfg(windows)]
compile_error!("lowtide supports Linux (full) and macOS (heap and host driver); not Windows");

/// The code of the README and of the pages, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
#[doc = include_str!("../docs/ARENA_OPTIONS.md")]
#[doc = include_str!("../docs/TUNING.md")]
#[doc = include_str!("../docs/OPERATING.md")]
#[doc = include_str!("../docs/RECORDING.md")]
struct Pages;
