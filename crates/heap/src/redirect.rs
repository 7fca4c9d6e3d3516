//! Redirects the allocations of a thread into an arena, past the thread's cache.
//!
//! [`Heap`](super::Heap) compares the alignment of each allocation with a number of its thread. If
//! it is at most that, jemalloc's `malloc` serves it. `HostArena::scope_uncached` sets the number
//! to a negative one, which stands for its arena, while a closure runs: so one comparison finds
//! both large alignments and arenas, and `Heap` takes fewer instructions than `tikv-jemallocator`.
//! Blocks come from the arena itself, so no cache has to be flushed: allocations in the scope take
//! no block from the cache, and put none there. Frees are not redirected; jemalloc finds the arena
//! of a block by its address.
//!
//! Two more numbers stand for work that spills (`spill`) and for a checkpoint that is due
//! (`checkpoint`): the thread is bound to its arena, and jemalloc takes no other flags.
//!
//! Relies on thread-local storage that is reserved when a thread starts, because it is read within
//! an allocation. On systems other than Linux nothing is redirected.
//!
//! Invariant: the number is [`ALIGN`], a mark, or -1 less the index of an arena that a scope on this
//! thread's stack borrows.

use std::cell::Cell;
use std::ffi::c_int;
use std::hint::black_box;
use std::sync::atomic::{AtomicU8, Ordering};

use tikv_jemalloc_sys::{MALLOCX_ALIGN, MALLOCX_ARENA, MALLOCX_TCACHE_NONE};

use super::growth::SPILLING;
use super::{account, checkpoint};

/// The number of a thread that allocates in no arena: an alignment that blocks of every size class
/// have. Those of at least twice as many bytes have twice the alignment.
pub(super) const ALIGN: isize = size_of::<usize>().cast_signed();
/// The mark of a trial: the next allocation is served as usual and sets the number to [`ALIGN`].
const TRIAL: isize = 0;
/// The mark of work that spills.
const SPILL: isize = isize::MIN / 4;
/// The mark of a checkpoint that is due at the next allocation.
const DUE: isize = SPILL + 1;
/// The size of the block that tests if allocations reach this module.
const TRIAL_BYTES: usize = 1024;

thread_local! {
    static NUMBER: Cell<isize> = const { Cell::new(ALIGN) };
}

/// Returns the number of this thread.
#[inline]
pub(super) fn number() -> isize {
    if cfg!(target_os = "linux") { NUMBER.get() } else { ALIGN }
}

/// Returns the size from which alone the size class of such a block follows, so that `malloc`
/// serves it. `None` if its alignment counts, or if the number is that of an arena.
#[inline]
pub(super) fn plain_size(number: isize, size: usize, align: usize) -> Option<usize> {
    let signed = align.cast_signed();
    if signed <= number { Some(size) } else { (signed <= 2 * number).then(|| size.max(align)) }
}

/// Returns the flags for `mallocx` of a block that has no [`plain_size`]. Ends a trial, and passes a
/// checkpoint that is due.
#[inline]
pub(super) fn flags(align: usize) -> c_int {
    let number = number();
    if number == TRIAL {
        NUMBER.set(ALIGN);
    } else if number == DUE {
        set_spills(account::work_is(SPILLING));
        checkpoint::pass(0);
    }
    let of_arena = || MALLOCX_ARENA((-1 - number).cast_unsigned()) | MALLOCX_TCACHE_NONE;
    MALLOCX_ALIGN(align) | if DUE < number && number < TRIAL { of_arena() } else { 0 }
}

/// Returns `true` if the thread's work spills, and no scope in it redirects.
#[inline]
pub(super) fn spills() -> bool {
    number() == SPILL
}

/// Returns `true` if no scope redirects.
pub(super) fn is_plain() -> bool {
    matches!(number(), ALIGN | DUE)
}

/// Begins or ends the spill of the thread's work.
pub(super) fn set_spills(spills: bool) {
    NUMBER.set(if spills { SPILL } else { ALIGN });
}

/// Has the thread's next allocation pass a checkpoint, unless a scope redirects it.
pub(super) fn ask_for_checkpoint() {
    if matches!(number(), ALIGN | SPILL) {
        NUMBER.set(DUE);
    }
}

/// Redirects this thread's allocations until it is dropped; scopes nest.
pub(super) struct Redirected {
    before: isize,
}

impl Redirected {
    /// Redirects into this arena, which outlives this value.
    pub(super) fn into_arena(index: u32) -> Self {
        Self::with(-1 - (index as usize).cast_signed())
    }

    /// Redirects nothing. For use within a scope that redirects.
    pub(super) fn not() -> Self {
        Self::with(ALIGN)
    }

    fn with(number: isize) -> Self {
        Self { before: NUMBER.replace(number) }
    }
}

impl Drop for Redirected {
    fn drop(&mut self) {
        NUMBER.set(self.before);
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
    let is_served = NUMBER.get() != TRIAL;
    drop(trial);
    ANSWER.store(1 + u8::from(is_served), Ordering::Relaxed);
    is_served
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_heap_as_allocator_nothing_is_redirected_and_the_number_is_restored() {
        assert!(!is_served() && !is_served(), "this program has the default allocator");
        assert_eq!(NUMBER.get(), ALIGN);
    }

    #[test]
    fn redirections_nest_and_end_in_order() {
        let outer = Redirected::into_arena(7);
        let of_outer = flags(1);
        let inner = Redirected::not();
        assert_eq!((of_outer != 0, flags(1)), (true, 0));
        drop(inner);
        assert_eq!(flags(1), of_outer);
        drop(outer);
        assert_eq!(flags(1), 0);
    }

    #[test]
    fn malloc_serves_small_alignments_outside_an_arena_alone() {
        let sizes = || [8, 16, 32].map(|align| plain_size(number(), 1, align));
        assert_eq!(sizes(), [Some(1), Some(16), None]);
        for index in [0, 1, super::super::mallctl::ARENA_LIMIT - 1] {
            let arena = Redirected::into_arena(index);
            assert_eq!(sizes(), [None; 3], "{index}");
            let expected = MALLOCX_ARENA(index as usize) | MALLOCX_TCACHE_NONE;
            assert_eq!(flags(1), expected, "{index}");
            drop(arena);
        }
    }
}
