//! Spreads threads over a number of heap arenas that fits the CPUs of this process.
//!
//! Used for the threads of a `Memory` and, through [`on_thread_start`], for those of any runtime.
//! It starts no threads.
//!
//! Invariant: all threads that use this are spread over the same few arenas.

use std::sync::OnceLock;

use lowtide_admission::Signals;
use lowtide_heap::ArenaBinding;

/// Binds the calling thread to a heap arena. For tokio's `on_thread_start` and similar hooks.
///
/// The thread is bound to one of the first `4 x CPUs` arenas, in turn. jemalloc creates four arenas
/// for each CPU that the process may run on, and ignores quotas: with 64 CPUs and a quota of 2
/// these are 256 arenas instead of 8. If jemalloc has no more than `4 x CPUs` arenas, nothing is
/// done. Takes about 3 us; the first call reads the cgroup's files, once per process. If jemalloc
/// rejects the binding, the thread keeps its arena.
///
/// ```
/// let runtime = tokio::runtime::Builder::new_multi_thread()
///     .on_thread_start(lowtide::memory::on_thread_start)
///     .on_thread_park(lowtide::heap::on_thread_park)
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn on_thread_start() {
    if let Some(binding) = arena_binding() {
        // The thread keeps its arena, which is no reason not to run.
        let _ = binding.bind_thread();
    }
}

/// Returns the spread of this process's threads; `None` if its CPUs or jemalloc's arenas are
/// unknown.
pub(super) fn arena_binding() -> Option<&'static ArenaBinding> {
    static BINDING: OnceLock<Option<ArenaBinding>> = OnceLock::new();
    let find = || ArenaBinding::new(Signals::open().cpus().whole()?).ok();
    BINDING.get_or_init(find).as_ref()
}
