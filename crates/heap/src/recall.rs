//! Flush requests for thread caches, which cooperating threads follow before they park.
//!
//! A thread cannot empty another thread's cache. So a purge advances a counter, and threads that
//! cooperate compare it with the value that they saw last when they are about to park. A thread
//! that is already parked does nothing until its runtime wakes it.
//!
//! Flushing at each park would cost more than it releases: a full cache takes 0.1 to 0.2 ms to
//! empty and as long to fill again, as much as allocating and freeing some 2 MiB.
//!
//! Invariant: if a cooperating thread has parked after a purge began, its cache has been flushed
//! since.

use std::cell::Cell;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::error::HostError;
use super::mallctl as ctl;

/// The number of flush requests.
static ASKED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// The value of `ASKED` when this thread last flushed.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Requests that every cooperating thread empties its cache when it next parks or calls
/// [`flush_tcache_if_requested`]. [`purge`](fn@super::purge) calls this itself.
///
/// Does not wait; costs one atomic addition.
pub fn request_tcache_flush() {
    ASKED.fetch_add(1, Ordering::Relaxed);
}

/// Empties the calling thread's cache if that was requested since the thread last did so. Returns
/// `true` if there was a cache to empty.
///
/// Call it from any runtime, at a point that every thread passes when it is idle. Costs one relaxed
/// load without a request, otherwise as much as [`flush_thread_cache`].
///
/// ```
/// use lowtide_heap as heap;
///
/// // In a worker's loop:
/// let next_piece_of_work: Option<u32> = None;
/// if next_piece_of_work.is_none() {
///     heap::flush_tcache_if_requested()?; // ... and wait
/// }
/// # Ok::<(), heap::HostError>(())
/// ```
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn flush_tcache_if_requested() -> Result<bool, HostError> {
    // Relaxed: nothing is read that the asking thread wrote; a load that misses it is the next
    // one's.
    let asked = ASKED.load(Ordering::Relaxed);
    if SEEN.get() == asked {
        return Ok(false);
    }
    SEEN.set(asked);
    flush_thread_cache()
}

/// Empties the calling thread's cache of freed blocks, so that their pages can be released. Returns
/// `true` if there was a cache.
///
/// For threads that are about to park. Costs about 1 us if the cache is already empty.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn flush_thread_cache() -> Result<bool, HostError> {
    match ctl::THREAD_CACHE_FLUSH.perform() {
        Ok(()) => Ok(true),
        // A thread without a cache, by configuration or because it is ending.
        Err(HostError::Mallctl { code: libc::EFAULT, .. }) => Ok(false),
        Err(error) => Err(error),
    }
}

/// Like [`flush_tcache_if_requested`], without a result, for tokio's `on_thread_park` and similar
/// hooks.
///
/// Costs one relaxed load without a request. An error of jemalloc is ignored.
///
/// A thread that was parked when a purge began keeps its cache until it has run again. If that
/// takes long, have the runtime wake its threads: use [`Builder::after_tcache_flush_request`].
///
/// ```
/// let runtime = tokio::runtime::Builder::new_multi_thread()
///     .on_thread_park(lowtide_heap::on_thread_park)
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// [`Builder::after_tcache_flush_request`]:
/// https://docs.rs/lowtide/latest/lowtide/memory/struct.Builder.html#method.after_tcache_flush_request
pub fn on_thread_park() {
    let _ = flush_tcache_if_requested();
}

// Binds threads to fewer arenas than jemalloc reserved.
//
// jemalloc fixes its number of arenas before `main`: four for each CPU that the process may run
// on. It does not see a CPU quota, so 64 CPUs with a quota of 2 get 256 arenas, each with its own
// memory. Threads can be bound afterwards. This module reads no quota itself.

/// Arenas for each CPU, as jemalloc counts them itself.
const ARENAS_PER_CPU: u32 = 4;

/// Returns the number of arenas that threads use after [`bind_thread`] with as many CPUs as the
/// process can keep busy: four for each, if jemalloc has more than that; otherwise all that it has.
/// Also all if jemalloc has one per CPU (`percpu_arena`).
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc does not report its number of arenas.
pub fn bound_arenas(cpus: u32) -> Result<u32, HostError> {
    let automatic = ctl::OPT_ARENAS.read()?.max(1);
    // Refused by jemalloc for arenas that go with CPUs.
    let by_cpu = ctl::OPT_PERCPU_ARENA.read()?.is_some_and(|mode| mode != "disabled");
    let bound = cpus.max(1).saturating_mul(ARENAS_PER_CPU).min(automatic);
    Ok(if by_cpu { automatic } else { bound })
}

/// Binds the calling thread to the next of the first [`bound_arenas`] arenas in turn, if jemalloc
/// has more. Returns the index of the arena from which the thread allocates from now on, as
/// jemalloc reports it.
///
/// Call it on a thread that has just started: its existing blocks stay where they are, and its
/// cache, which has blocks of the previous arena, is emptied. Costs about 3 us. Don't call it
/// inside a scope of a [`HostArena`](super::HostArena).
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn bind_thread(cpus: u32) -> Result<u32, HostError> {
    static NEXT: AtomicU32 = AtomicU32::new(0);
    let arenas = bound_arenas(cpus)?;
    if arenas < ctl::OPT_ARENAS.read()? {
        flush_thread_cache()?;
        ctl::THREAD_ARENA.write(NEXT.fetch_add(1, Ordering::Relaxed) % arenas)?;
    }
    ctl::THREAD_ARENA.read()
}
