//! The process heap: jemalloc's statistics, settings and purges, and dedicated arenas, from
//! `lowtide-heap`.
//!
//! [`global_allocator!`](crate::global_allocator) makes jemalloc the allocator of a binary. A
//! [`Memory`](crate::Memory) applies the settings, purges and publishes by itself.

pub use lowtide_heap::{
    Account, AccountMemory, Difference, EffectiveConf, Heap, HeapProbe, HeapProfile, HeapSettings,
    HeapSizeClass, HeapSnapshot, HostArena, HostArenaStats, HostError, LibcHeap, Profiler,
    PurgeReport, ReleaseFailure, Unsupported, apply, bind_thread, bound_arenas, check_release,
    effective, flush_tcache_if_requested, flush_thread_cache, is_global, is_measured, libc_heap,
    on_thread_park, profiler, purge, purge_now, release_failure, request_tcache_flush, serves_c,
    unmeasured,
};
#[cfg(feature = "profiling")]
pub use lowtide_heap::{
    AllocationProfile, AllocationStack, ProfileMapping, cache_unwind_rules, take_profile,
    write_profile,
};
