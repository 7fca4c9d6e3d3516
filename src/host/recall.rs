//! Thread caches, called back: what cooperating threads give up before they park.
//!
//! No thread can empty another one's cache. So a purge advances a number, and threads that
//! cooperate compare it with the one they saw when they are about to park. A thread that is parked
//! already runs nothing until somebody wakes it, which its runtime can and this cannot.
//!
//! Emptying at each park would cost more than it gives: a full cache takes 0.1 to 0.2 ms to empty
//! and as long to fill again, as much as allocating and freeing some 2 MiB.
//!
//! Invariant: once a thread that cooperates has parked after a purge began, its cache has been
//! emptied since.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use super::error::HostError;
use super::purge::flush_thread_cache;

/// How often caches have been called back.
static ASKED: AtomicU64 = AtomicU64::new(0);

thread_local! {
    /// What `ASKED` was when this thread last answered.
    static SEEN: Cell<u64> = const { Cell::new(0) };
}

/// Asks every thread that cooperates to empty its cache when it parks next, or calls
/// [`flush_tcache_if_requested`]. [`purge`](fn@super::purge) does so itself.
///
/// Waits for nobody; one atomic addition.
pub fn request_tcache_flush() {
    ASKED.fetch_add(1, Ordering::Relaxed);
}

/// Empties the calling thread's cache if that was asked for since this thread last did so; true
/// where there was a cache to empty.
///
/// For runtimes of any kind, at a place that every thread passes when it has nothing to do. One
/// relaxed load where nothing was asked; else as
/// [`flush_thread_cache`].
///
/// ```
/// use lowtide::host;
///
/// // In a worker's loop:
/// let next_piece_of_work: Option<u32> = None;
/// if next_piece_of_work.is_none() {
///     host::flush_tcache_if_requested()?; // ... and wait
/// }
/// # Ok::<(), host::HostError>(())
/// ```
///
/// # Errors
/// [`HostError::Mallctl`] where jemalloc refuses.
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

/// [`flush_tcache_if_requested`] without an answer, for tokio's `on_thread_park` and hooks like it.
///
/// One relaxed load where nothing was asked. An error of jemalloc's is no concern of a thread that
/// parks, and is dropped.
///
/// A thread that was parked when a purge began keeps its cache until it has run again. Where that
/// is long, have the runtime wake its threads: [`Builder::after_tcache_flush_request`] is the
/// place.
///
/// ```
/// let runtime = tokio::runtime::Builder::new_multi_thread()
///     .on_thread_park(lowtide::host::on_thread_park)
///     .build()?;
/// # drop(runtime);
/// # Ok::<(), std::io::Error>(())
/// ```
///
/// [`Builder::after_tcache_flush_request`]:
/// https://docs.rs/lowtide/latest/lowtide/memory/struct.Builder.html#method.after_recall
pub fn on_thread_park() {
    let _ = flush_tcache_if_requested();
}
