//! Threads bound to fewer arenas than jemalloc made room for.
//!
//! jemalloc fixes its number of arenas before `main`: four for each CPU that the process may run
//! on. A quota of CPU time is invisible to it, so that 64 CPUs with a quota of 2 get 256 arenas,
//! each with memory of its own. Threads can be bound after that. It reads no quota itself.
//!
//! Invariant: `arenas = min(4 x cpus, automatic arenas)`, at least 1; a bound thread allocates in
//! an arena below that.

use std::sync::atomic::{AtomicU32, Ordering};

use super::error::HostError;
use super::mallctl as ctl;
use super::purge::flush_thread_cache;

/// Arenas for each CPU, as jemalloc counts them itself.
const ARENAS_PER_CPU: u32 = 4;

/// Spreads threads over the first arenas of the heap, one after the other.
#[derive(Debug)]
pub struct ArenaBinding {
    arenas: u32,
    /// Whether there are more arenas than these.
    binds: bool,
    next: AtomicU32,
}

impl ArenaBinding {
    /// For as many CPUs as the process can keep busy.
    ///
    /// Where jemalloc has no more arenas than that, or gives each CPU its own (`percpu_arena`), no
    /// thread is bound, and `bind_thread` only says where it allocates.
    ///
    /// # Errors
    /// [`HostError::Mallctl`] where jemalloc does not say how many arenas it has.
    pub fn new(cpus: u32) -> Result<Self, HostError> {
        let automatic = ctl::OPT_ARENAS.read()?.max(1);
        let arenas = cpus.max(1).saturating_mul(ARENAS_PER_CPU).min(automatic);
        // Refused by jemalloc for arenas that go with CPUs.
        let by_cpu = ctl::OPT_PERCPU_ARENA.read()?.is_some_and(|mode| mode != "disabled");
        let binds = arenas < automatic && !by_cpu;
        let arenas = if by_cpu { automatic } else { arenas };
        Ok(Self { arenas, binds, next: AtomicU32::new(0) })
    }

    /// How many arenas its threads use.
    #[must_use]
    pub const fn arenas(&self) -> u32 {
        self.arenas
    }

    /// Binds the calling thread to the next arena, and returns the index of the one in which it
    /// allocates from now on, as jemalloc says.
    ///
    /// For a thread that has just started: what it holds stays where it is, and its cache, which
    /// has blocks of the arena before, is emptied. About 3 us. A thread that holds a scope of a
    /// [`HostArena`](super::HostArena) must not be bound in it.
    ///
    /// # Errors
    /// [`HostError::Mallctl`] where jemalloc refuses.
    pub fn bind_thread(&self) -> Result<u32, HostError> {
        if self.binds {
            flush_thread_cache()?;
            let next = self.next.fetch_add(1, Ordering::Relaxed) % self.arenas;
            ctl::THREAD_ARENA.write(next)?;
        }
        ctl::THREAD_ARENA.read()
    }
}
