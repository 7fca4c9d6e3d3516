//! `Heap`, jemalloc as Rust's global allocator, and the checks of which code uses it.
//!
//! It counts nothing: jemalloc already counts what each thread allocates. Before an allocation it
//! reads one number of its thread, by which a scope redirects allocations into an arena
//! (`redirect`); before a large one it passes a checkpoint (`checkpoint`). It neither purges nor
//! configures.
//!
//! Invariant: a block that `Heap` returns is jemalloc's own, with jemalloc's own layout rules.
#![expect(
    unsafe_code,
    reason = "GlobalAlloc is an unsafe trait; C's malloc is asked who serves it"
)]

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::{c_int, c_void};
use std::hint::black_box;
use std::sync::OnceLock;

use tikv_jemalloc_sys::{
    MALLOCX_ALIGN, MALLOCX_ZERO, calloc, free_sized, malloc, mallocx, nallocx, rallocx, realloc,
    sdallocx,
};

use super::checkpoint::{self, LARGE};
use super::mallctl::THREAD_ALLOCATED;
use super::redirect::{ALIGN, flags, number, plain_size, spills};
use super::{account, spill};

/// jemalloc, for `#[global_allocator]`.
///
/// Allocates from the arena within [`HostArena::scope_uncached`](super::HostArena::scope_uncached).
/// Elsewhere it calls jemalloc as `tikv-jemallocator` does, in fewer instructions.
///
/// ```
/// #[global_allocator]
/// static HEAP: lowtide_heap::Heap = lowtide_heap::Heap;
///
/// assert!(lowtide_heap::is_global());
/// ```
#[derive(Clone, Copy, Debug, Default)]
pub struct Heap;

// SAFETY: jemalloc is called with the alignment, or with a size whose class has that alignment, so
// the block is as large and aligned as required. The size class follows from the layout in the same
// way when a block is freed, also for one of an arena. Nothing here can unwind.
unsafe impl GlobalAlloc for Heap {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        match plain_size(number(), layout.size(), layout.align()) {
            // SAFETY: `malloc` takes any size.
            Some(size) if size < LARGE => unsafe { malloc(size) }.cast(),
            // SAFETY: the size is not zero, as the caller promises.
            _ => unsafe { allocate(layout, 0) },
        }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        match plain_size(number(), layout.size(), layout.align()) {
            // SAFETY: `calloc` takes any size.
            Some(size) if size < LARGE => unsafe { calloc(1, size) }.cast(),
            // SAFETY: the size is not zero, as the caller promises.
            _ => unsafe { allocate(layout, MALLOCX_ZERO) },
        }
    }

    #[inline]
    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        match plain_size(number(), size, layout.align()) {
            // SAFETY: the caller promises that `block` came from this allocator, so it is one of
            // jemalloc's, and that the new size is valid and not zero.
            Some(size) if size < LARGE => unsafe { realloc(block.cast(), size) }.cast(),
            // SAFETY: as above.
            _ => unsafe { reallocate(block.cast(), layout, size) },
        }
    }

    #[inline]
    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // A block that the profiler sampled begins at a page. In a build with the profiler, `free`
        // with a size therefore takes a slow path for each block that does, sampled or not: 4 KiB
        // cost 196 instructions instead of 141.
        #[cfg(feature = "profiling")]
        if layout.size() >= BEGINS_AT_PAGE {
            // SAFETY: the caller promises that `block` came from this allocator, which means from
            // jemalloc, and is freed once.
            unsafe { tikv_jemalloc_sys::free(block.cast()) };
            return;
        }
        match plain_size(ALIGN, layout.size(), layout.align()) {
            // SAFETY: the caller promises that `block` came from this allocator, which means from
            // jemalloc, with this layout, and is freed once.
            Some(size) => unsafe { free_sized(block.cast(), size) },
            // SAFETY: as above.
            None => unsafe { sdallocx(block.cast(), layout.size(), MALLOCX_ALIGN(layout.align())) },
        }
    }
}

/// Allocates a block that is large, aligned or redirected.
///
/// # Safety
/// The size is not zero.
#[inline(never)]
unsafe fn allocate(layout: Layout, zero: c_int) -> *mut u8 {
    if layout.size() >= LARGE {
        checkpoint::pass(layout.size());
    }
    // SAFETY: the size is not zero, as the caller promises.
    unsafe { mallocx(layout.size(), flags(layout.align()) | zero) }.cast()
}

/// Changes the size of such a block.
///
/// # Safety
/// As for `realloc`.
#[inline(never)]
unsafe fn reallocate(block: *mut c_void, layout: Layout, size: usize) -> *mut u8 {
    if size >= LARGE {
        checkpoint::pass(size);
    }
    let flags = flags(layout.align());
    if spills() && size > layout.size() && !spill::contains(block) {
        // SAFETY: as the caller promises.
        return unsafe { move_to_disk(block, layout, size) };
    }
    // SAFETY: as the caller promises. The old block is freed to the arena that it came from.
    unsafe { rallocx(block, size, flags) }.cast()
}

/// Grows a block by a new one in the arena to which the thread is bound: in place it would take
/// memory.
///
/// # Safety
/// As for `realloc`.
#[cold]
unsafe fn move_to_disk(block: *mut c_void, layout: Layout, size: usize) -> *mut u8 {
    let flags = MALLOCX_ALIGN(layout.align());
    // SAFETY: the size is not zero, as the caller promises.
    let moved = unsafe { mallocx(size, flags) };
    if !moved.is_null() {
        // SAFETY: the old block has as many bytes as its layout, and the new one more.
        unsafe { moved.copy_from_nonoverlapping(block, layout.size()) };
        // SAFETY: a live block of this size and alignment.
        account::moved_to_disk(unsafe { nallocx(layout.size(), flags) } as u64);
        // SAFETY: the caller promises that the block came from this allocator, with this layout.
        unsafe { sdallocx(block, layout.size(), flags) };
    }
    moved.cast()
}

/// The size from which most blocks begin at a page.
#[cfg(feature = "profiling")]
const BEGINS_AT_PAGE: usize = 4096;

/// Size of the block that tests which allocator serves an allocation.
const TRIAL_BYTES: usize = 1024;

/// Returns `true` if Rust's allocations reach jemalloc, through [`Heap`] or another wrapper.
///
/// The first call allocates one small block and checks that jemalloc counted it for this thread;
/// later calls cost one load.
#[must_use]
pub fn is_global() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER
        .get_or_init(|| reaches_jemalloc(|| drop(black_box(Vec::<u8>::with_capacity(TRIAL_BYTES)))))
}

/// Returns `true` if C's `malloc` reaches this jemalloc, as it does with feature `interpose`: C and
/// C++ libraries in the process are then measured and purged with the heap.
///
/// The first call allocates one small block; later calls cost one load.
#[must_use]
pub fn serves_c() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        reaches_jemalloc(|| {
            // SAFETY: `malloc` may be called with any size; the result may be null.
            let block = black_box(unsafe { libc::malloc(TRIAL_BYTES) });
            // SAFETY: `block` came from `malloc` just now, or is null, which `free` accepts.
            unsafe { libc::free(block) };
        })
    })
}

/// Returns `true` if an allocation by `allocate` shows in jemalloc's count for this thread.
fn reaches_jemalloc(allocate: impl FnOnce()) -> bool {
    let Ok(before) = THREAD_ALLOCATED.read() else { return false };
    allocate();
    THREAD_ALLOCATED.read().is_ok_and(|after| after.wrapping_sub(before) >= TRIAL_BYTES as u64)
}

/// Keeps a shared library loaded that contains this allocator. After `dlclose`, jemalloc's threads
/// and the destructors of thread-local data would run code that is no longer there. C libraries
/// other than glibc never unload.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
mod keep_loaded {
    use std::ffi::c_void;
    use std::mem::MaybeUninit;

    #[used]
    #[unsafe(link_section = ".init_array")]
    static KEEP: extern "C" fn() = keep;

    extern "C" fn keep() {
        // SAFETY: `getauxval` only reads. The address is in the program's own file, or 0.
        let program = unsafe { libc::getauxval(libc::AT_PHDR) } as *const c_void;
        let (Some(program), Some(own)) = (file_of(program), file_of(keep as *const c_void)) else {
            return;
        };
        if own.dli_fbase != program.dli_fbase {
            let flags = libc::RTLD_LAZY | libc::RTLD_NOLOAD | libc::RTLD_NODELETE;
            // SAFETY: the name is a C string of the loader. `RTLD_NOLOAD` loads nothing, and the
            // handle stays open.
            unsafe { libc::dlopen(own.dli_fname, flags) };
        }
    }

    /// Returns the file that contains this address.
    fn file_of(address: *const c_void) -> Option<libc::Dl_info> {
        let mut found = MaybeUninit::uninit();
        // SAFETY: takes any address, and a place for the answer.
        let is_found = unsafe { libc::dladdr(address, found.as_mut_ptr()) } != 0;
        // SAFETY: written, as a result other than 0 means.
        is_found.then(|| unsafe { found.assume_init() })
    }
}

#[cfg(test)]
mod tests {
    use tikv_jemalloc_sys::{nallocx, sallocx};

    use super::*;
    use crate::redirect;

    #[test]
    fn blocks_keep_their_bytes_through_growth_and_come_zeroed_when_asked() {
        let layout = Layout::from_size_align(100, 64).unwrap();
        // SAFETY: the layout has a size.
        let block = unsafe { Heap.alloc_zeroed(layout) };
        assert!(!block.is_null() && block.addr().is_multiple_of(64));
        // SAFETY: 100 zeroed bytes.
        let bytes = unsafe { std::slice::from_raw_parts_mut(block, 100) };
        assert!(bytes.iter().all(|&byte| byte == 0));
        bytes.fill(7);
        // SAFETY: `block` is `Heap`'s, with this layout, and not used again.
        let block = unsafe { Heap.realloc(block, layout, 10_000) };
        assert!(!block.is_null());
        // SAFETY: the first 100 bytes have been copied.
        assert!(unsafe { std::slice::from_raw_parts(block, 100) }.iter().all(|&byte| byte == 7));
        let layout = Layout::from_size_align(10_000, 64).unwrap();
        // SAFETY: `block` is `Heap`'s, with this layout, and not used again.
        unsafe { Heap.dealloc(block, layout) };
    }

    /// The class by which a block is freed is that of the block, in an arena too.
    #[test]
    fn blocks_of_every_small_layout_are_aligned_and_have_the_class_of_their_layout() {
        let layouts = (0..8).flat_map(|bits| (1..=520).map(move |size| (size, 1 << bits)));
        for (size, align) in layouts.chain([(4097, 16), (14_337, 8), (40_000, 16)]) {
            let layout = Layout::from_size_align(size, align).unwrap();
            let class = match plain_size(ALIGN, size, align) {
                // SAFETY: the size is not zero.
                Some(size) => unsafe { nallocx(size, 0) },
                // SAFETY: as above.
                None => unsafe { nallocx(size, MALLOCX_ALIGN(align)) },
            };
            for is_in_arena in [false, true] {
                let arena = is_in_arena.then(|| redirect::Redirected::into_arena(0));
                // SAFETY: the layout has a size.
                let block = unsafe { Heap.alloc(layout) };
                // SAFETY: the block is `Heap`'s, with this layout, and not used again.
                let block = unsafe { Heap.realloc(block, layout, size) };
                // SAFETY: the layout has a size.
                let zeroed = unsafe { Heap.alloc_zeroed(layout) };
                drop(arena);
                for block in [block, zeroed] {
                    assert!(!block.is_null() && block.addr().is_multiple_of(align), "{layout:?}");
                    // SAFETY: the block is live.
                    assert_eq!(unsafe { sallocx(block.cast(), 0) }, class, "{layout:?}");
                    // SAFETY: the block is `Heap`'s, with this layout, and not used again.
                    unsafe { Heap.dealloc(block, layout) };
                }
            }
        }
    }

    #[test]
    fn what_does_not_allocate_does_not_reach_jemalloc() {
        assert!(!reaches_jemalloc(|| ()));
    }
}
