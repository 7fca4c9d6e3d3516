//! Memory that goes out with the traffic.
//!
//! lowtide manages memory for services that live for months and mix CPU work with GPU inference.
//! It puts one vocabulary, one set of curves and one control loop over the process heap (jemalloc)
//! and over device memory, and hands back what nothing needs.
//!
//! ```no_run
//! use lowtide::control::Cost;
//! use lowtide::{BoxError, ByteSize, Memory};
//!
//! #[global_allocator]
//! static HEAP: lowtide::host::Heap = lowtide::host::Heap;
//! lowtide::heap_profile!(balanced); // what jemalloc reads before `main`
//!
//! fn main() -> Result<(), BoxError> {
//!     let memory = Memory::start()?; // the cgroup's limit; `LOWTIDE_*` variables
//!
//!     // A request: book what it will need, or turn it away.
//!     let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3)))?;
//!     // ... its work ...
//!     drop(permit);
//!
//!     // Device memory: typed buffers, used through leases; idle granules are given back.
//!     let arena = memory.open_arena("embedder")?;
//!     let mut buffer = arena.alloc::<f32>(1 << 20, lowtide::device::Region::Dynamic)?;
//!     let lease = arena.enter()?;
//!     buffer.slice_mut(&lease)?.fill(1.0);
//!     Ok(())
//! }
//! ```
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
//! | - | `interpose` | C and C++ libraries in the process use jemalloc as well |
//! | - | `profiling` | jemalloc's heap profiler |
//! | `device::driver::cuda` | `cuda` | arenas in CUDA memory, seen as slices of cudarc |
//!
//! Features only add. Linux with glibc is supported in full; Windows is a compile error.
//!
//! Without a [`Memory`] heap and arenas work all the same; nothing is timed, admitted or published
//! then.

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
