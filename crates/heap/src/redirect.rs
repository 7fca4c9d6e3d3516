//! Redirects the allocations of a thread into an arena, past the thread's cache.
//!
//! [`Heap`](super::Heap) reads a number of its thread before each allocation: 0, or the flags of
//! an arena for jemalloc's `mallocx`. `HostArena::scope_uncached` sets it while a closure runs.
//! Blocks come from the arena itself, so no cache has to be flushed: allocations in the scope take
//! no block from the cache, and put none there. Frees are not redirected; jemalloc finds the arena
//! of a block by its address.
//!
//! Relies on thread-local storage that is reserved when a thread starts, because it is read within
//! an allocation. On systems other than Linux nothing is redirected.
//!
//! Invariant: the number is 0, the mark of a trial, or the flags of an arena that a scope on this
//! thread's stack borrows.
#![expect(unsafe_code, reason = "blocks of the global allocator come from here")]

use std::alloc::Layout;
use std::cell::Cell;
use std::ffi::c_int;
use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering};

use tikv_jemalloc_sys::{
    MALLOCX_ALIGN, MALLOCX_ARENA, MALLOCX_TCACHE_NONE, MALLOCX_ZERO, mallocx, rallocx,
};

/// Allocations are served as usual.
pub(super) const NONE: c_int = 0;
/// The mark of a trial: the next allocation is served as usual and sets the number to [`NONE`].
/// jemalloc's flags are never negative.
const TRIAL: c_int = -1;
/// The size of the block that tests if allocations reach this module.
const TRIAL_BYTES: usize = 1024;

thread_local! {
    static FLAGS: Cell<c_int> = const { Cell::new(NONE) };
}

/// Returns the flags of the arena to which this thread's allocations go, or [`NONE`].
#[inline]
pub(super) fn flags() -> c_int {
    if cfg!(target_os = "linux") { FLAGS.get() } else { NONE }
}

/// Redirects this thread's allocations until it is dropped; scopes nest.
pub(super) struct Redirected {
    before: c_int,
}

impl Redirected {
    /// Redirects into this arena, which outlives this value.
    pub(super) fn into_arena(index: u32) -> Self {
        Self::with(MALLOCX_ARENA(index as usize) | MALLOCX_TCACHE_NONE)
    }

    /// Redirects nothing. For use within a scope that redirects.
    pub(super) fn not() -> Self {
        Self::with(NONE)
    }

    fn with(flags: c_int) -> Self {
        Self { before: FLAGS.replace(flags) }
    }
}

impl Drop for Redirected {
    fn drop(&mut self) {
        FLAGS.set(self.before);
    }
}

/// Returns `true` if Rust's allocations can be redirected: they reach [`Heap`](super::Heap), and
/// this is Linux. The first call allocates one small block; later calls cost one load.
pub(super) fn is_served() -> bool {
    /// 0 before the first call, then 1 for no and 2 for yes. An atomic and not a lock, because a
    /// fork could leave a lock held.
    static ANSWER: AtomicU8 = AtomicU8::new(0);
    let known = ANSWER.load(Ordering::Relaxed);
    if known != 0 {
        return known == 2;
    }
    let trial = Redirected::with(TRIAL);
    drop(black_box(Vec::<u8>::with_capacity(TRIAL_BYTES)));
    let is_served = FLAGS.get() != TRIAL;
    drop(trial);
    ANSWER.store(1 + u8::from(is_served), Ordering::Relaxed);
    is_served
}

/// Returns the flags of the arena. For the allocation of a trial, returns [`NONE`] and ends the
/// trial.
fn flags_or_end_of_trial() -> c_int {
    match FLAGS.get() {
        TRIAL => {
            FLAGS.set(NONE);
            NONE
        }
        flags => flags,
    }
}

/// Allocates a block in the arena.
///
/// # Safety
/// The layout has a size.
#[cold]
pub(super) unsafe fn alloc(layout: Layout) -> *mut u8 {
    let flags = flags_or_end_of_trial() | MALLOCX_ALIGN(layout.align());
    // SAFETY: the size is not zero and the alignment a power of two, as of any layout. The arena
    // exists: a scope that borrows it is below us on the stack.
    unsafe { mallocx(layout.size(), flags) }.cast()
}

/// Allocates a block of zeros in the arena.
///
/// # Safety
/// The layout has a size.
#[cold]
pub(super) unsafe fn alloc_zeroed(layout: Layout) -> *mut u8 {
    let flags = flags_or_end_of_trial() | MALLOCX_ALIGN(layout.align()) | MALLOCX_ZERO;
    // SAFETY: as in `alloc`.
    unsafe { mallocx(layout.size(), flags) }.cast()
}

/// Resizes a block; if it has to move, into the arena.
///
/// # Safety
/// The block is one of jemalloc's, live, and has this alignment. The new size is not zero.
#[cold]
pub(super) unsafe fn realloc(block: *mut u8, align: usize, size: usize) -> *mut u8 {
    let flags = flags_or_end_of_trial() | MALLOCX_ALIGN(align);
    // SAFETY: the caller guarantees the block, its alignment and the size. The arena exists as in
    // `alloc`. The old block is freed to the arena that it came from.
    unsafe { rallocx(block.cast(), size, flags) }.cast()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_heap_as_allocator_nothing_is_redirected_and_the_number_is_restored() {
        assert!(!is_served() && !is_served(), "this program has the default allocator");
        assert_eq!(FLAGS.get(), NONE);
    }

    #[test]
    fn redirections_nest_and_end_in_order() {
        let outer = Redirected::into_arena(7);
        let of_outer = flags();
        let inner = Redirected::not();
        assert_eq!((of_outer != NONE, flags()), (true, NONE));
        drop(inner);
        assert_eq!(flags(), of_outer);
        drop(outer);
        assert_eq!(flags(), NONE);
    }

    #[test]
    fn flags_of_arenas_are_neither_none_nor_a_trial() {
        for index in [0, 1, super::super::mallctl::ARENA_LIMIT - 1] {
            let arena = Redirected::into_arena(index);
            assert!(FLAGS.get() != NONE && FLAGS.get() != TRIAL, "{index}");
            drop(arena);
        }
    }
}
