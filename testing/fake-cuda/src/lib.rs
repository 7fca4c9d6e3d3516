//! A simulation of the CUDA driver as a library with CUDA's own names, for tests only.
//!
//! Tables of function pointers and unmodified cudarc run against it without a GPU. It has two
//! parts: a shared library (`cu*` as in cuda.h, and `fake_control` to configure it), and [`Fake`],
//! which loads that library by its path and offers its commands as safe calls. A process has one
//! library with one state; [`Fake::start`] gives it to one test at a time.
//!
//! It proves logic, never speed, and nothing about what the manual leaves open. Kernels are those
//! of [`KERNELS`], by name; PTX is recognized and not run. Not modelled: peers, IPC, textures,
//! contexts other than primary ones, graphs other than captured ones, time.
//!
//! Files: `ffi` and `host` (everything unsafe at the boundary), `handle` (numbers that cross it),
//! `call` (the common path of calls), `state` (devices, contexts, threads), then the calls by
//! subject: `devices`, `memory`, `virtual_memory`, `pool`, `copy`, `stream`, `event`, `module`,
//! `graph`, `nvml` (another library, of the same state), `control`. `library` is the Rust part.
//!
//! It depends on no package that links jemalloc: `dlopen` cannot load jemalloc, whose thread-local
//! memory must exist when the program starts.
//!
//! Invariant: no panic crosses the boundary; a call that panicked returns 999 and is recorded.

mod call;
mod control;
mod copy;
mod devices;
mod event;
mod ffi;
mod graph;
mod handle;
mod host;
mod library;
mod memory;
mod module;
mod names;
mod nvml;
mod pool;
mod state;
mod stream;
mod virtual_memory;

pub use control::{Numbers, Options};
pub use library::{Fake, Guard};
pub use lowtide_cuda_sim::raw::KERNELS;

/// The code of the first page for users, compiled: here, because one block needs `cuda`, which the
/// tests of `lowtide` do without.
#[cfg(doctest)]
#[doc = include_str!("../../../docs/GETTING_STARTED.md")]
struct GettingStartedPage;
