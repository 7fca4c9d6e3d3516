//! The process heap: jemalloc as global allocator, and glibc's heap. Independent of devices.
//!
//! This module provides mechanisms: it measures ([`HeapProbe`]), releases memory
//! ([`purge`](fn@purge)) and changes settings ([`apply`]) when called. It owns no thread and reads
//! no environment; policy is elsewhere.
//!
//! ```
//! use lowtide_heap::{self as host, HeapProbe};
//!
//! #[global_allocator]
//! static HEAP: host::Heap = host::Heap;
//!
//! for difference in host::apply(&host::HeapProfile::Balanced.settings())? {
//!     println!("{difference}");
//! }
//! let probe = HeapProbe::new()?;
//! drop(vec![1_u8; 8 << 20]);
//! println!("retained: {}", probe.snapshot()?.retained());
//! println!("released: {}", host::purge_now()?.released());
//! # Ok::<(), host::HostError>(())
//! ```
//!
//! Invariant: `live <= active <= mapped`, `retained = resident - live` (see [`HeapSnapshot`]).
#![cfg_attr(docsrs, feature(doc_cfg))]

mod account;
#[cfg(feature = "profiling")]
mod allocations;
mod allocator;
#[cfg(feature = "allocator-api2")]
mod api2;
mod arenas;
mod checkpoint;
mod conf;
mod effective;
mod error;
mod growth;
#[cfg(test)]
mod growth_models;
mod libc_heap;
#[cfg(any(test, feature = "profiling"))]
mod loaded;
mod mallctl;
mod process;
mod profile;
mod profiler;
mod purge;
mod recall;
mod redirect;
mod spill;
mod stats;
#[cfg(all(feature = "profiling", target_os = "linux", target_arch = "x86_64"))]
mod unwind;

pub use lowtide_core::{ByteSize, clock, decay};
use std::sync::atomic;

pub use account::{Account, AccountMemory, in_progress, is_measured, unmeasured};
#[cfg(feature = "profiling")]
pub use allocations::{AllocationProfile, AllocationStack, take_profile, write_profile};
pub use allocator::{Heap, is_global, serves_c};
pub use arenas::{HostArena, HostArenaStats};
pub use checkpoint::{counted_growth, publish_sample, unwatch_growth, watch_growth};
pub use conf::{apply, background_threads_supported, limit_mappings, mappings_max, overcommits};
pub use effective::{Difference, EffectiveConf, effective};
pub use error::{HostError, Unsupported};
pub use libc_heap::{LibcHeap, libc_heap};
#[cfg(any(test, feature = "profiling"))]
pub use loaded::ProfileMapping;
pub use mallctl::ARENA_NAME_MAX;
pub use profile::{HeapProfile, HeapSettings};
#[cfg(feature = "profiling")]
pub use profiler::cache_unwind_rules;
pub use profiler::{Profiler, profiler};
pub use purge::{
    PurgeReport, ReleaseFailure, check_release, decay_tick, purge, purge_now, release_failure,
    unreleased_max,
};
pub use recall::{
    bind_thread, bound_arenas, flush_tcache_if_requested, flush_thread_cache, on_thread_park,
    request_tcache_flush,
};
pub use spill::{pager_bell, run_pager, spill_into, spilled};
pub use stats::{HeapProbe, HeapSizeClass, HeapSnapshot, thread_totals};

/// Used by the expansion of [`global_allocator!`](crate::global_allocator); don't use them
/// directly.
#[doc(hidden)]
pub use profile::{CONF_TEXT_MAX, conf_text};

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
