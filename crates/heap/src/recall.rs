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
//
// Invariant: `arenas = min(4 x cpus, automatic arenas)`, at least 1; a bound thread allocates in
// an arena below that index.

/// Arenas for each CPU, as jemalloc counts them itself.
const ARENAS_PER_CPU: u32 = 4;

/// Binds threads to the first arenas of the heap in turn.
#[derive(Debug)]
pub struct ArenaBinding {
    arenas: u32,
    /// `true` if jemalloc has more arenas than these.
    binds: bool,
    next: AtomicU32,
}

impl ArenaBinding {
    /// Creates a binding for as many CPUs as the process can keep busy.
    ///
    /// If jemalloc has no more arenas than that, or one per CPU (`percpu_arena`), no thread is
    /// bound and `bind_thread` only returns its current arena.
    ///
    /// # Errors
    /// [`HostError::Mallctl`] if jemalloc does not report its number of arenas.
    pub fn new(cpus: u32) -> Result<Self, HostError> {
        let automatic = ctl::OPT_ARENAS.read()?.max(1);
        let arenas = cpus.max(1).saturating_mul(ARENAS_PER_CPU).min(automatic);
        // Refused by jemalloc for arenas that go with CPUs.
        let by_cpu = ctl::OPT_PERCPU_ARENA.read()?.is_some_and(|mode| mode != "disabled");
        let binds = arenas < automatic && !by_cpu;
        let arenas = if by_cpu { automatic } else { arenas };
        Ok(Self { arenas, binds, next: AtomicU32::new(0) })
    }

    /// Returns the number of arenas that its threads use.
    #[must_use]
    pub const fn arenas(&self) -> u32 {
        self.arenas
    }

    /// Binds the calling thread to the next arena, and returns the index of the arena from which
    /// it allocates from now on, as jemalloc reports it.
    ///
    /// Call it on a thread that has just started: its existing blocks stay where they are, and its
    /// cache, which has blocks of the previous arena, is emptied. Costs about 3 us. Don't call it
    /// inside a scope of a [`HostArena`](super::HostArena).
    ///
    /// # Errors
    /// [`HostError::Mallctl`] if jemalloc refuses.
    pub fn bind_thread(&self) -> Result<u32, HostError> {
        if self.binds {
            flush_thread_cache()?;
            let next = self.next.fetch_add(1, Ordering::Relaxed) % self.arenas;
            ctl::THREAD_ARENA.write(next)?;
        }
        ctl::THREAD_ARENA.read()
    }
}
