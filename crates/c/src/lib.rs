//! Device arenas of lowtide for C: a shared library, `liblowtide_c.so`, and its header,
//! `lowtide.h`.
//!
//! An allocator has an arena on each device that is used. Blocks are allocated and freed with their
//! device and stream, reused in the order of streams, and released after a decay time. PyTorch and
//! ONNX Runtime take functions of the library by name or address; see the README and
//! `docs/ENGINES.md`.
//!
//! The library has no global allocator of its own, exports no `malloc`, installs no handler, prints
//! nothing but the message of a panic, and reads no environment. No function unwinds. It depends on
//! no package that links jemalloc, so that `dlopen` loads it in any program.
//!
//! Files: `api` (functions for any program), `torch`, `onnxruntime`; `options` (structs and their
//! versions), `blocks` (the acts), `registry` (handles, devices, streams), `decay` (the thread),
//! `failure` (codes and texts). `cargo xtask text --write` writes the header from them.
//!
//! Invariant: a value that C passes is checked before it is used; only that a pointer and a stream
//! are what they are said to be is left to the caller.

mod api;
mod blocks;
mod decay;
mod failure;
mod onnxruntime;
mod options;
mod registry;
mod torch;

pub use api::{
    LOWTIDE_ABI_MAJOR, LOWTIDE_ABI_MINOR, LOWTIDE_ALL_DEVICES, lowtide_abi_version, lowtide_alloc,
    lowtide_any_stream, lowtide_close, lowtide_end_stream, lowtide_find_block, lowtide_free,
    lowtide_get_default, lowtide_get_statistics, lowtide_last_error, lowtide_open,
    lowtide_record_use, lowtide_release_captured, lowtide_set_capturing, lowtide_set_default,
    lowtide_set_limit, lowtide_shrink, lowtide_status_name,
};
pub use failure::Status;
pub use onnxruntime::{
    lowtide_ort_alloc, lowtide_ort_bind, lowtide_ort_empty_cache, lowtide_ort_free,
};
pub use options::{
    Block, LOWTIDE_BACKEND_CUDA, LOWTIDE_BACKEND_HOST, LOWTIDE_DECAY_IMMEDIATE,
    LOWTIDE_DECAY_NEVER, Options, Statistics,
};
pub use torch::{
    lowtide_torch_alloc, lowtide_torch_base_alloc, lowtide_torch_empty_cache, lowtide_torch_free,
    lowtide_torch_memory_fraction, lowtide_torch_record_stream,
};
