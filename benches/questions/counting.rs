//! The crate's allocator, which also counts the allocations of the recorder's thread.

use std::alloc::{GlobalAlloc, Layout};
use std::ffi::CStr;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide::heap::Heap;

/// The name of the thread that is counted.
const THREAD: &CStr = c"lowtide-flight";

static COUNT: AtomicU64 = AtomicU64::new(0);

/// The number of allocations of that thread.
pub(crate) fn count() -> u64 {
    COUNT.load(Ordering::Relaxed)
}

/// The allocator.
pub(crate) struct Counting;

/// Counts an allocation if the calling thread is the one.
fn note() {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, with a zero at their end.
    let done = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    if done == 0 && CStr::from_bytes_until_nul(&name) == Ok(THREAD) {
        COUNT.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: all is passed on to an allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: as promised to this function.
        unsafe { Heap.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        note();
        // SAFETY: as promised to this function.
        unsafe { Heap.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, block: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: as promised to this function.
        unsafe { Heap.realloc(block, layout, size) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        // SAFETY: as promised to this function.
        unsafe { Heap.dealloc(block, layout) }
    }
}
