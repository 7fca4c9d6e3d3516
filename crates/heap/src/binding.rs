//! Binds threads to fewer arenas than jemalloc reserved.
//!
//! jemalloc fixes its number of arenas before `main`: four for each CPU that the process may run
//! on. It does not see a CPU quota, so 64 CPUs with a quota of 2 get 256 arenas, each with its own
//! memory. Threads can be bound afterwards. This module reads no quota itself.
//!
//! Invariant: `arenas = min(4 x cpus, automatic arenas)`, at least 1; a bound thread allocates in
//! an arena below that index.

use std::sync::atomic::{AtomicU32, Ordering};

use super::error::HostError;
use super::mallctl as ctl;
use super::recall::flush_thread_cache;

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
