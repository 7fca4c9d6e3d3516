//! Dedicated jemalloc arenas, for example for the host memory of a model. All memory of the arena
//! is released when the model is dropped, independent of other allocations.
//!
//! A scope allocates in the arena. `scope` binds the calling thread to the arena while a closure
//! runs, and empties the thread's cache before and after it. Otherwise the cache would serve blocks
//! of the arena after the scope, and other blocks within it. `scope_uncached`, for small amounts,
//! does not bind the thread: each allocation is made in the arena past the cache (`redirect`).
//!
//! An arena is destroyed only if nothing can point into it: no thread is in a scope, and it has no
//! active page (cached blocks count as active). Otherwise, and when it is only dropped, it is
//! purged and kept for reuse. This module allocates only the list of all arenas, since an
//! allocation of its own in a scope would keep the arena from being destroyed.
//!
//! Invariants: `destroyed => active pages = 0 and no scope`; each index is in one `HostArena`, is
//! kept for reuse, or is one of jemalloc's own.
#![expect(unsafe_code, reason = "destroying an arena takes its memory from whoever points there")]

use std::cell::RefCell;
use std::ffi::CStr;
use std::future::poll_fn;
use std::mem::ManuallyDrop;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::Poll;

use lowtide_core::bytes::ByteSize;
use lowtide_core::decay::DecayTime;
use lowtide_core::fork::{self, Birth};

use super::conf::decay_to_ms;
use super::error::{HostError, check_birth};
use super::mallctl::{self as ctl, ARENA_LIMIT, ARENA_NAME_MAX};
use super::recall::flush_thread_cache;
use super::redirect::{self, Redirected};

/// A jemalloc arena for one purpose, such as a model.
///
/// Dropping it purges it and keeps it for reuse. If a program creates many short-lived arenas, drop
/// them instead of retiring them: jemalloc's metadata grows by about 10 KiB with every arena that
/// is created and destroyed.
///
/// ```
/// use lowtide_heap::HostArena;
///
/// #[global_allocator]
/// static HEAP: lowtide_heap::Heap = lowtide_heap::Heap;
///
/// let arena = HostArena::new("reranker")?;
/// let model = arena.scope(|| vec![1_u8; 64 << 20])?; // all its allocations are in the arena
/// assert!(arena.stats()?.active.get() >= 64 << 20);
/// let (arena, cause) = arena.retire().expect_err("the model is still there");
/// drop(model);
/// arena.retire().map_err(|(_, cause)| cause)?; // releases all its memory
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct HostArena {
    index: u32,
    name: ArenaName,
    birth: Birth,
}

lowtide_core::debug_as!(HostArena, |it| index: it.index, name: it.name(), birth: it.birth);

/// Memory of an arena at the last refresh of jemalloc's statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HostArenaStats {
    /// Bytes of blocks that the application holds, after rounding, without thread caches.
    pub live: ByteSize,
    /// Bytes of pages with at least one live or cached block.
    pub active: ByteSize,
    /// Bytes of unused pages that are still backed by memory.
    pub dirty: ByteSize,
    /// Bytes of unused pages that the kernel reclaims under pressure.
    pub muzzy: ByteSize,
}

impl HostArenaStats {
    /// Returns the backed bytes beyond live ones: `active + dirty + muzzy - live`.
    #[must_use]
    pub const fn retained(&self) -> ByteSize {
        let backed = self.active.saturating_add(self.dirty).saturating_add(self.muzzy);
        backed.saturating_sub(self.live)
    }
}

/// A name, stored inline so that it needs no allocation.
#[derive(Clone, Copy, PartialEq, Eq)]
struct ArenaName([u8; ARENA_NAME_MAX + 1]);

impl ArenaName {
    const NONE: Self = Self([0; ARENA_NAME_MAX + 1]);

    fn new(name: &str) -> Option<Self> {
        let mut bytes = [0; ARENA_NAME_MAX + 1];
        let text = bytes.get_mut(..name.len()).filter(|text| text.len() <= ARENA_NAME_MAX)?;
        text.copy_from_slice(name.as_bytes());
        (!name.is_empty() && !name.contains('\0')).then_some(Self(bytes))
    }

    fn c_str(&self) -> &CStr {
        CStr::from_bytes_until_nul(&self.0).unwrap_or_default()
    }

    fn text(&self) -> &str {
        self.c_str().to_str().unwrap_or_default()
    }
}

/// The state of an index.
#[derive(Clone, Copy)]
struct ArenaSlot {
    name: ArenaName,
    /// Purged, and kept for reuse.
    is_kept: bool,
    /// A thread may stay bound to it forever.
    is_bound: bool,
}

impl ArenaSlot {
    const NONE: Self = Self { name: ArenaName::NONE, is_kept: false, is_bound: false };
}

/// All indices. Those from `known` on were never used here.
pub(super) struct Slots {
    slots: [ArenaSlot; ARENA_LIMIT as usize],
    known: usize,
}

/// All zeros until an arena is created, so it takes no physical memory until then.
static SLOTS: Mutex<Slots> =
    Mutex::new(Slots { slots: [ArenaSlot::NONE; ARENA_LIMIT as usize], known: 0 });

impl Slots {
    fn known(&mut self) -> &mut [ArenaSlot] {
        self.slots.get_mut(..self.known).unwrap_or_default()
    }

    /// Records a new index, or one that was kept.
    fn put(&mut self, index: u32, slot: ArenaSlot) {
        if let Some(at) = self.slots.get_mut(index as usize) {
            *at = slot;
            self.known = self.known.max(index as usize + 1);
        }
    }

    /// Returns a kept index for reuse: the one with the fewest active pages, because statistics
    /// attribute these to the next owner.
    fn take_kept(&mut self) -> Option<u32> {
        let kept = (0..).zip(self.known().iter());
        let mut kept = kept.filter(|(_, slot)| slot.is_kept && !slot.is_bound).peekable();
        // Its remaining pages may be free by now.
        let _ = kept.peek().map(|_| ctl::EPOCH.exchange(1));
        let pages = |index| ctl::STATS_ARENA_ACTIVE_PAGES.read_of(index).unwrap_or(usize::MAX);
        kept.map(|(index, _)| index).min_by_key(|&index| pages(index))
    }
}

/// Returns a guard that keeps arenas from being destroyed. Iterating over all arenas needs it,
/// because jemalloc 5.3.1 looks them up under its own lock, but works on them without it.
///
/// A fork waits for the holder, as it does for jemalloc's own locks. Otherwise, in the child, the
/// lock would stay held by a thread that does not exist there.
pub(super) fn keep() -> MutexGuard<'static, Slots> {
    static HEEDS_FORKS: AtomicBool = AtomicBool::new(false);
    if !HEEDS_FORKS.swap(true, Ordering::Relaxed) {
        // Handlers run before a fork in reverse order of registration. This call of jemalloc
        // registers its handlers first, so that this lock is taken before jemalloc's, as
        // everywhere.
        let _ = ctl::ARENAS_PAGE.read();
        fork::around(Some(before_fork), after_fork);
    }
    SLOTS.lock().unwrap_or_else(PoisonError::into_inner)
}

thread_local! {
    /// The guard of `keep`, held by a thread that forks.
    static OVER_FORK: RefCell<Option<ManuallyDrop<MutexGuard<'static, Slots>>>> =
        const { RefCell::new(None) };
}

extern "C" fn before_fork() {
    let kept = ManuallyDrop::new(SLOTS.lock().unwrap_or_else(PoisonError::into_inner));
    OVER_FORK.with(|held| held.replace(Some(kept)));
}

/// In the parent, and in the child, whose one thread is the one that forked.
extern "C" fn after_fork() {
    OVER_FORK.with(RefCell::take).map(ManuallyDrop::into_inner);
}

impl HostArena {
    /// Creates an arena with this name, which statistics show, or reuses a kept one. Creating one
    /// costs about 70 us.
    ///
    /// # Errors
    /// [`HostError`] if the name is invalid or taken, no index is free, or jemalloc refuses.
    pub fn new(name: &str) -> Result<Self, HostError> {
        let text =
            ArenaName::new(name).ok_or_else(|| HostError::ArenaName { name: name.into() })?;
        let mut slots = keep();
        if slots.known().iter().any(|slot| slot.name == text) {
            return Err(HostError::ArenaNameTaken { name: name.into() });
        }
        let index = match slots.take_kept() {
            Some(index) => index,
            None => ctl::ARENAS_CREATE.read().map_err(|error| match error {
                // If all are in use jemalloc answers EAGAIN, and nothing else makes it fail.
                HostError::Mallctl { act: "read", .. } => HostError::NoArenaIndex,
                error => error,
            })?,
        };
        let arena = Self { index, name: text, birth: Birth::now() };
        slots.put(index, ArenaSlot { name: text, ..ArenaSlot::NONE });
        // Refresh, so that iterations over all arenas find figures of each.
        let refreshed = ctl::EPOCH.exchange(1);
        drop(slots);
        // From here on, dropping `arena` returns the index.
        refreshed?;
        ctl::ARENA_NAME.write_in(index, text.c_str())?;
        // The last owner of a kept one may have set another time, and failed to reset it.
        ctl::ARENA_DIRTY_DECAY.write_in(index, ctl::ARENAS_DIRTY_DECAY.read()?)?;
        Ok(arena)
    }

    /// Returns its name.
    #[must_use]
    pub fn name(&self) -> &str {
        self.name.text()
    }

    /// Runs a closure whose allocations on this thread are made in the arena. Threads that it
    /// starts allocate elsewhere. Scopes nest, and a panic ends one as a return does.
    ///
    /// Use it for long-lived memory, such as that of a model while it is loaded. For a few
    /// allocations, [`scope_uncached`](Self::scope_uncached) costs less. A scope costs about 4 us,
    /// or 14 us if the thread's cache was in use and fills again. Without background threads,
    /// jemalloc also purges the arena when its last thread leaves.
    ///
    /// An allocation that outlives the arena's purpose, such as a static initialised in the scope,
    /// keeps the arena from being retired. So does a block of the arena that a thread freed into
    /// its cache and allocated again. To avoid that, free blocks in a scope as well, since it
    /// leaves the cache empty. On an async runtime, use the scope in blocking tasks; it cannot be
    /// held over an `.await`.
    ///
    /// # Errors
    /// [`HostError`] if the thread cannot be bound; the closure has not run.
    /// [`HostError::ArenasByCpu`] if jemalloc runs with `percpu_arena`.
    pub fn scope<T>(&self, act: impl FnOnce() -> T) -> Result<T, HostError> {
        check_birth(self.birth)?;
        if let Some(found) = ctl::OPT_PERCPU_ARENA.read()?.filter(|mode| *mode != "disabled") {
            return Err(HostError::ArenasByCpu { found });
        }
        flush_thread_cache()?;
        let before = ctl::THREAD_ARENA.exchange(self.index)?;
        let _bound = BoundThread { before, index: self.index };
        let _inner = Redirected::not();
        Ok(act())
    }

    /// Runs a closure whose Rust allocations on this thread are made in the arena, past the
    /// thread's cache. Scopes of both kinds nest; the innermost one applies. A panic ends a scope
    /// as a return does.
    ///
    /// Use it for small long-lived values, such as a cache entry or a session. They then share
    /// pages with each other and not with the memory of requests, so the pages of requests can be
    /// released. Entering and leaving flushes no cache and costs less than 10 ns. An allocation
    /// costs 35 to 100 ns instead of 10, and threads that allocate blocks of the same size class
    /// wait for each other. Freeing costs the same as elsewhere. For a model, which makes many
    /// allocations, use [`scope`](Self::scope).
    ///
    /// Allocate only long-lived memory in it. If you learn only later that a value lasts, copy it
    /// then:
    ///
    /// ```
    /// use std::collections::HashMap;
    /// use lowtide_heap::HostArena;
    ///
    /// #[global_allocator]
    /// static HEAP: lowtide_heap::Heap = lowtide_heap::Heap;
    ///
    /// let lasting = HostArena::new("cache")?;
    /// let mut cache: HashMap<String, Vec<u8>> = HashMap::new();
    /// let (key, answer) = (String::from("key"), vec![1_u8; 100]); // like the rest of a request
    /// lasting.scope_uncached(|| cache.insert(key.clone(), answer.clone()))?;
    /// # assert!(!cfg!(target_os = "linux") || lasting.stats()?.live.get() >= 100);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// Any thread may free the blocks, inside or outside a scope. They then stay in that thread's
    /// cache, which reuses them for any allocation. The arena cannot be retired until they are
    /// flushed. A block that grows outside a scope leaves the arena if it has to move. Allocations
    /// of C and C++ code, and those of threads that the closure starts, are made elsewhere.
    ///
    /// # Errors
    /// [`HostError::NotRedirected`] if [`Heap`](super::Heap) is not the global allocator or the
    /// system is not Linux, [`HostError::Forked`] in a forked child; the closure has not run.
    pub fn scope_uncached<T>(&self, act: impl FnOnce() -> T) -> Result<T, HostError> {
        check_birth(self.birth)?;
        if !redirect::is_served() {
            return Err(HostError::NotRedirected);
        }
        let _redirected = Redirected::into_arena(self.index);
        Ok(act())
    }

    /// Runs each poll of a future in a [`scope_uncached`](Self::scope_uncached). What the future
    /// allocates when it is created or dropped is not affected, nor is the block in which it is
    /// pinned.
    ///
    /// Use it for a future that allocates only long-lived memory, such as one that opens a session.
    /// Do not use it for one that serves the requests of a connection, since that also allocates
    /// their memory.
    ///
    /// # Errors
    /// Those of `scope_uncached`, at the first poll that fails; the future is not polled again.
    pub fn scope_future<F: Future>(
        self: Arc<Self>,
        future: F,
    ) -> impl Future<Output = Result<F::Output, HostError>> {
        let mut future = Box::pin(future);
        poll_fn(move |context| match self.scope_uncached(|| future.as_mut().poll(context)) {
            Ok(poll) => poll.map(Ok),
            Err(error) => Poll::Ready(Err(error)),
        })
    }

    /// Returns its current memory. Refreshes jemalloc's statistics once, like
    /// [`HeapProbe::snapshot`](super::HeapProbe::snapshot).
    ///
    /// # Errors
    /// [`HostError`] if jemalloc refuses a control.
    pub fn stats(&self) -> Result<HostArenaStats, HostError> {
        check_birth(self.birth)?;
        ctl::EPOCH.exchange(1)?;
        stats_of(self.index)
    }

    /// Returns all dedicated arenas of this process with their names; arenas kept for reuse have an
    /// empty name. Refreshes jemalloc's statistics once; allocates the list.
    ///
    /// # Errors
    /// [`HostError`] if jemalloc refuses a control.
    pub fn all() -> Result<Vec<(String, HostArenaStats)>, HostError> {
        ctl::EPOCH.exchange(1)?;
        Self::all_as_refreshed()
    }

    /// The same as of the last refresh.
    #[doc(hidden)]
    pub fn all_as_refreshed() -> Result<Vec<(String, HostArenaStats)>, HostError> {
        let mut slots = keep();
        let ours = |slot: &ArenaSlot| slot.is_kept || slot.name != ArenaName::NONE;
        let indices = (0..).zip(slots.known().iter()).filter(|(_, slot)| ours(slot));
        indices.map(|(index, slot)| Ok((slot.name.text().to_owned(), stats_of(index)?))).collect()
    }

    /// Releases its unused pages now. Costs about 0.1 ms per MiB.
    ///
    /// # Errors
    /// [`HostError`] if jemalloc refuses.
    pub fn purge(&self) -> Result<(), HostError> {
        check_birth(self.birth)?;
        flush_thread_cache()?;
        // SAFETY: a purge releases pages without blocks, and no other.
        unsafe { ctl::ARENA_PURGE.perform_in(self.index) }
    }

    /// Sets how long its unused pages stay backed. Default: the decay time of the rest of the heap.
    /// Dropping the arena, starting a `Memory` or [`apply`](super::apply) to all arenas resets it.
    ///
    /// # Errors
    /// [`HostError`] if jemalloc refuses.
    pub fn set_decay(&self, time: DecayTime) -> Result<(), HostError> {
        check_birth(self.birth)?;
        ctl::ARENA_DIRTY_DECAY.write_in(self.index, decay_to_ms(time))
    }

    /// Destroys it and releases all its memory, if nothing points into it any more. Blocks that
    /// other threads freed may be in their caches: flush those first
    /// ([`flush_thread_cache`](super::flush_thread_cache)), or let the threads end.
    ///
    /// # Errors
    /// The arena, purged, with [`HostError::ArenaInUse`], [`HostError::ThreadBound`] or what
    /// jemalloc refused.
    pub fn retire(mut self) -> Result<(), (Self, HostError)> {
        if let Err(cause) = self.destroy() {
            return Err((self, cause));
        }
        let _gone = ManuallyDrop::new(self); // a plain value: its index is jemalloc's again
        Ok(())
    }

    fn destroy(&mut self) -> Result<(), HostError> {
        check_birth(self.birth)?;
        self.purge()?;
        let mut slots = keep();
        if slots.slots.get(self.index as usize).is_none_or(|slot| slot.is_bound) {
            return Err(HostError::ThreadBound);
        }
        ctl::EPOCH.exchange(1)?;
        let page = ctl::ARENAS_PAGE.read()?;
        let active = ctl::STATS_ARENA_ACTIVE_PAGES.read_of(self.index)?;
        if active > 0 {
            return Err(HostError::ArenaInUse { bytes: ByteSize::of(active.saturating_mul(page)) });
        }
        // SAFETY: it has no active page, so there is no block in it, not even in a thread's cache.
        // None comes: blocks are allocated in it by bound threads, which are scopes, by threads in
        // `scope_uncached`, or through the arena as allocator; each borrows it, and it is borrowed
        // mutably here; a scope that could not be left is recorded as `is_bound`.
        unsafe { ctl::ARENA_DESTROY.perform_in(self.index) }?;
        slots.put(self.index, ArenaSlot::NONE);
        Ok(())
    }

    /// Returns jemalloc's index of the arena.
    #[cfg(feature = "allocator-api2")]
    pub(super) const fn index(&self) -> u32 {
        self.index
    }
}

/// Returns an arena's figures at the last refresh.
pub(super) fn stats_of(index: u32) -> Result<HostArenaStats, HostError> {
    let page = ctl::ARENAS_PAGE.read()?;
    let pages = |count: usize| ByteSize::of(count.saturating_mul(page));
    let (small, large) =
        (ctl::STATS_ARENA_SMALL.read_of(index)?, ctl::STATS_ARENA_LARGE.read_of(index)?);
    let cached = ctl::STATS_ARENA_CACHED.read_of(index)?;
    Ok(HostArenaStats {
        live: ByteSize::of(small.saturating_add(large).saturating_sub(cached)),
        active: pages(ctl::STATS_ARENA_ACTIVE_PAGES.read_of(index)?),
        dirty: pages(ctl::STATS_ARENA_DIRTY_PAGES.read_of(index)?),
        muzzy: pages(ctl::STATS_ARENA_MUZZY_PAGES.read_of(index)?),
    })
}

impl Drop for HostArena {
    /// Purges the arena and keeps it for reuse. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.birth.is_here() {
            // If the purge is refused, unused pages decay. Other pages decay once they are free.
            let _ = ctl::ARENAS_DIRTY_DECAY
                .read()
                .and_then(|time| ctl::ARENA_DIRTY_DECAY.write_in(self.index, time));
            let _ = self.purge();
            let mut slots = keep();
            let is_bound = slots.slots.get(self.index as usize).is_none_or(|slot| slot.is_bound);
            slots.put(self.index, ArenaSlot { name: ArenaName::NONE, is_kept: true, is_bound });
        }
    }
}

/// A thread that is bound to an arena. Stays on the thread that created it.
struct BoundThread {
    before: u32,
    index: u32,
}

impl Drop for BoundThread {
    fn drop(&mut self) {
        // An empty cache cannot serve blocks of the arena afterwards.
        let is_back = flush_thread_cache().is_ok() && ctl::THREAD_ARENA.write(self.before).is_ok();
        if !is_back && let Some(slot) = keep().slots.get_mut(self.index as usize) {
            slot.is_bound = true;
        }
    }
}
