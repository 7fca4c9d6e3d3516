//! The process heap, with `Heap` as global allocator but where a test starts otherwise.
//!
//! A process has one heap. Tests that measure or set it run in a process each, by `test_fork`;
//! tests of what a program exports to jemalloc start this program again, see `start`.

mod accounts;
mod arenas;
mod arenas_edges;
mod arenas_uncached;
mod binding;
mod classes;
mod holds;
mod interpose;
mod not_global;
mod plugin;
mod process;
mod profile;
mod profile_own;
mod profile_sources;
mod profile_symbol;
mod profile_throughput;
mod profile_wrong_name;
mod spill;
#[path = "../../../../tests/support/start.rs"]
mod start;
mod threads;
mod unwind;

#[global_allocator]
static HEAP: start::Allocator = start::Allocator;

/// None, but where a test starts otherwise.
const EXPORTED: start::Start = start::NONE;
