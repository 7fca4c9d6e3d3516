//! ONNX Runtime in a service: sessions that load on first use, unload when idle, and return the
//! memory of their runs.
//!
//! ```no_run
//! use lowtide::{BoxError, Memory};
//! use lowtide_ort::ort::value::Tensor;
//! use lowtide_ort::{Runtime, ort};
//!
//! lowtide::global_allocator!(balanced);
//!
//! fn main() -> Result<(), BoxError> {
//!     let memory = Memory::start()?;
//!     let runtime = Runtime::open(&memory, "libonnxruntime.so")?;
//!     let embedder = runtime.session("embedder", "model.onnx").register()?;
//!     let session = embedder.acquire_blocking()?; // loads; stays loaded while it is used
//!     let input = Tensor::from_array(([1, 3], vec![101_i64, 7592, 102]))?;
//!     println!("{:?}", session.lock().run(ort::inputs![input])?[0].shape());
//!     Ok(())
//! }
//! ```
//!
//! [`Runtime::open`] opens the library, sets it up for the profile of the `Memory`, and observes
//! that the settings have an effect. The memory of runs comes from an arena that returns it about
//! two seconds after the last run ([`OrtAllocator`]). Weights come from the heap; with the feature
//! `interpose` each session has a heap arena of its own, which is measured exactly. With `cuda` an
//! arena in CUDA memory serves the CUDA provider (`Runtime::register_cuda`).
//!
//! The crate is built and tested without ONNX Runtime, which is opened at run time. The `ort` that
//! it uses is re-exported, so that versions agree.
//!
//! In the repository, `docs/ENGINES.md` has what returns, what does not, and the figures.

#[macro_use(log)]
extern crate lowtide_core;

mod allocator;
mod blocks;
#[cfg(feature = "cuda")]
mod cuda;
mod error;
mod runtime;
mod session;
mod verify;

#[cfg(test)]
mod real;

pub use allocator::{OrtAllocator, OrtAllocatorStats};
pub use blocks::RunArena;
pub use error::OrtError;
pub use ort;
pub use runtime::Runtime;
pub use session::LoadedSession;

#[cfg(test)]
lowtide::global_allocator!(balanced);

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

/// The page's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../docs/ENGINES.md")]
struct Engines;
