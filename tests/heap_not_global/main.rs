//! jemalloc without `Heap` as global allocator.
//!
//! It has no profile but by the macro, which needs no unsafe code where it stands.
#![forbid(unsafe_code)]

mod memory;
mod not_global;
mod profile_throughput;
#[path = "../support/mod.rs"]
mod support;

lowtide_heap::jemalloc_conf!(throughput);
