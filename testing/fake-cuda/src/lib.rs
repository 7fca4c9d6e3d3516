//! The simulation of the CUDA driver as a library with CUDA's own names, for tests only.
//!
//! Tables of function pointers and unmodified cudarc run against it without a GPU. It is two
//! things: a shared library (`cu*` as in cuda.h, `fake_*` to steer it), and [`Fake`], which loads
//! that library by its path and offers the steering as safe calls. A process has one library with
//! one state; [`Fake::start`] hands it out to one test at a time.
//!
//! It proves logic, never speed, and never what a real driver does where the manual is silent.
//! Kernels are those of [`KERNELS`], by name; PTX is looked at no further than to see that it is
//! some. What is not there: peers, IPC, textures, contexts other than the primary ones, graphs
//! other than captured ones, time.
//!
//! Files: `ffi` and `host` (all that is unsafe about the boundary), `handle` (numbers that cross
//! it), `call` (what every call passes), `state` (devices, contexts, threads), then the calls by
//! part: `devices`, `memory`, `virtual_memory`, `pool`, `copy`, `stream`, `event`, `module`,
//! `graph`, `control`; `library` is the Rust half.
//!
//! It depends on no package that links jemalloc: `dlopen` cannot load jemalloc, whose thread-local
//! memory is of the kind that only a program's start provides.
//!
//! Invariant: no panic crosses the boundary; a call that panicked answers 999 and is on record.

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
mod missing;
mod module;
mod names;
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
