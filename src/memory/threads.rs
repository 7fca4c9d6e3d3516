//! Threads of this process laid out by the CPUs that it can keep busy.
//!
//! For the threads of a `Memory` and, through [`on_thread_start`], for those of any runtime. It
//! starts none.
//!
//! Invariant: all threads that come through here are spread over the same few arenas.

use std::sync::OnceLock;

use crate::control::Signals;
use crate::host::ArenaBinding;

/// What a thread that cooperates does when it starts: for tokio's `on_thread_start`, and hooks like
/// it.
///
/// Binds the thread to one of the first `4 x CPUs` arenas of the heap, one thread after the other.
/// jemalloc made room for four arenas to each CPU that the process may run on, and knows of no
/// quota: with 64 CPUs and a quota of 2 that is 256 arenas, and these are 8. Where it has no more
/// than that anyway nothing is done. Some 3 us; the first call reads the cgroup's files, once for
/// the process. What jemalloc refuses leaves the thread where it was.
///
/// ```
/// let runtime = tokio::runtime::Builder::new_multi_thread()
///     .on_thread_start(lowtide::memory::on_thread_start)
///     .on_thread_park(lowtide::host::on_thread_park)
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
pub fn on_thread_start() {
    if let Some(binding) = arena_binding() {
        // Left where it was: no reason not to run.
        let _ = binding.bind_thread();
    }
}

/// How the threads of this process are spread; `None` where nothing is known of its CPUs, or of
/// jemalloc's arenas.
pub(super) fn arena_binding() -> Option<&'static ArenaBinding> {
    static BINDING: OnceLock<Option<ArenaBinding>> = OnceLock::new();
    let find = || ArenaBinding::new(Signals::open().cpus().whole()?).ok();
    BINDING.get_or_init(find).as_ref()
}
