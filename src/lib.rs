//! Memory that goes out with the traffic.
//!
//! lowtide manages memory for services that live for months and mix CPU work with GPU inference.
//! It puts one vocabulary, one set of curves and one control loop over the process heap (jemalloc)
//! and over device memory, and hands back what nothing needs.
//!
//! # A tour
//!
//! **The heap.** jemalloc under the crate's name, and the profile that it reads before `main`.
//! With these two lines alone memory goes back a second after the traffic.
//!
//! ```
//! #[global_allocator]
//! static HEAP: lowtide::host::Heap = lowtide::host::Heap;
//! lowtide::heap_profile!(balanced);
//!
//! fn main() -> Result<(), lowtide::host::HostError> {
//!     let live = lowtide::host::HeapProbe::new()?.snapshot()?.live;
//!     println!("{live} live; {}", lowtide::host::effective()?); // what took effect
//!     Ok(())
//! }
//! ```
//!
//! **The service's memory.** [`Memory::start`] goes by the cgroup's limit and the `LOWTIDE_*`
//! variables. One thread samples and decides, another one purges, unloads and publishes.
//!
//! ```
//! # use std::time::Duration;
//! use lowtide::{ByteSize, Memory};
//!
//! let memory = Memory::builder().memory_limit(ByteSize::gib(1)).with_environment()?.start()?;
//! println!("level {}; {:?}", memory.level(), memory.diagnostics()); // problems found
//! println!("{}", memory.shutdown(Duration::from_secs(5))); // at the end: what is outstanding
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! **Admission.** A request books the bytes that it will need, or is turned away: 503 and when to
//! come again. It waits for no room; on HTTP/1 up to 64 MiB of its body are read before that answer
//! (`service::DRAIN_MAX`). By hand, or for a whole router (feature `service`; axum here, tonic
//! alike).
//!
//! ```
//! use lowtide::control::Cost;
//! use lowtide::service::{ContentLength, MemoryLayer};
//! use lowtide::{ByteSize, Memory};
//!
//! # let memory = Memory::builder().memory_limit(ByteSize::gib(1)).start()?;
//! let mut permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
//! permit.shrink(ByteSize::mib(1)); // less than it looked
//! drop(permit); // gives back what it reserved
//!
//! let estimate = ContentLength::new(ByteSize::mib(2)).factor(2.0);
//! let layer = MemoryLayer::new(memory.admission().clone(), estimate);
//! let app: axum::Router = axum::Router::new()
//!     .route("/length", axum::routing::post(|body: String| async move { body.len().to_string() }))
//!     .layer(layer);
//! # drop(app);
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! **Device memory.** An arena gives typed buffers; a slice is had through a lease. What is idle
//! for the decay time goes; asleep, what is live goes too, and is back at the next lease, at the
//! same addresses. Without a GPU arenas lie in host memory, as here. On one (feature `cuda`)
//! `LOWTIDE_DEVICE=auto` takes it, and buffers are cudarc's slices.
//!
//! ```
//! use lowtide::Memory;
//! use lowtide::config::DeviceChoice;
//! use lowtide::device::{Region, SleepOptions};
//!
//! let memory = Memory::builder().device(DeviceChoice::Host).start()?;
//! let arena = memory.open_arena("embedder")?;
//! let mut buffer = arena.alloc::<f32>(1 << 20, Region::Dynamic)?;
//! let lease = arena.enter()?;
//! buffer.slice_mut(&lease)?.fill(1.0);
//! drop(lease);
//! arena.sleep(SleepOptions::default())?; // by itself, with `LOWTIDE_DEVICE_SLEEP_AFTER`
//! let lease = arena.enter()?; // wakes it
//! assert_eq!(buffer.slice(&lease)?[7], 1.0);
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! **Resources.** A model is loaded on first use, once however many wait, booked before that, and
//! unloaded when nobody has asked for it for a while, or when memory is short.
//!
//! ```
//! use lowtide::{ByteSize, Memory};
//!
//! let memory = Memory::builder().start()?;
//! let model = memory.managed("words", || Ok(vec!["tide"; 1 << 10]));
//! let model = memory.register(model.cost(memory.cost(ByteSize::kib(16), ByteSize::ZERO)))?;
//! assert_eq!(model.acquire_blocking()?.len(), 1 << 10); // `acquire().await` in a handler
//! assert_eq!(memory.snapshot().resources[0].loads_ok_total, 1);
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! **Metrics.** The application installs the recorder, the worker publishes to it, and the answers
//! to `/metrics`, `/healthz`, `/readyz` and `/memory` are ready to be routed.
//!
//! ```
//! use lowtide::Memory;
//! use lowtide::metrics::prometheus::{self, PrometheusBuilder};
//! use lowtide::service::Endpoints;
//!
//! let recorder = prometheus::configure(PrometheusBuilder::new())?.install_recorder()?;
//! let upkeep = recorder.clone();
//! let memory = Memory::builder().after_publish(move || upkeep.run_upkeep()).start()?;
//! let endpoints = Endpoints::new(Some(memory)).with_metrics(move || recorder.render());
//! assert_eq!(endpoints.answer("/healthz").map(|answer| answer.status().as_u16()), Some(200));
//! # Ok::<(), lowtide::BoxError>(())
//! ```
//!
//! `README.md` has all of it in one program, and `docs/LIFE_OF_AN_ALLOCATION.md` follows a block, a
//! buffer and a permit through the parts.
//!
//! # Parts
//!
//! | module | feature | what it is |
//! |---|---|---|
//! | [`memory`] | `memory` (default) | [`Memory`]: the parts below joined; owns two threads |
//! | [`host`] | `heap` (default) | jemalloc as global allocator; settings, statistics, purge |
//! | [`device`] | `device` (default) | arenas over a driver, the pinned pool; the host driver |
//! | [`control`] | `control` (default) | signals, pressure, ledger, admission, resources |
//! | [`metrics`] | `metrics` (default) | the table of metric names; publication |
//! | [`config`] | `memory` | settings, profiles, `LOWTIDE_*` variables |
//! | `service` | `service` | a tower layer and HTTP endpoints |
//! | `metrics::prometheus` | `prometheus` | set-up of metrics-exporter-prometheus |
//! | - | `memory-viz` | [`device::ArenaMap`] as a snapshot for PyTorch's `memory_viz` |
//! | `device::driver::sim` | `simulation` | a model of the CUDA driver, for tests only |
//! | - | `api2` | `host::HostArena` as `allocator-api2`'s allocator, for large buffers |
//! | - | `interpose` | C and C++ libraries use jemalloc as well; for engines in C++ |
//! | - | `profiling` | jemalloc's heap profiler |
//! | `device::driver::cuda` | `cuda` | arenas in CUDA memory, seen as slices of cudarc |
//!
//! Features only add. Linux with glibc is supported in full; Windows is a compile error.
//!
//! Without a [`Memory`] heap and arenas work all the same; nothing is timed, admitted or published
//! then.

// First, so that its macro is known to all below.
#[cfg(any(feature = "device", feature = "control"))]
#[macro_use]
mod log;

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

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The code of the page on arena options, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/ARENA_OPTIONS.md")]
struct ArenaOptionsPage;

/// The code of the page on tuning, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/TUNING.md")]
struct TuningPage;

/// The code of the page for operators, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/OPERATING.md")]
struct OperatingPage;

/// The code of the page on recordings, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/RECORDING.md")]
struct RecordingPage;

/// The code of the page that follows an allocation, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/LIFE_OF_AN_ALLOCATION.md")]
struct LifePage;
