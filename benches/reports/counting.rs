//! The crate's allocator, which also counts the allocations of this thread.

use std::alloc::{GlobalAlloc, Layout};
use std::cell::Cell;

use lowtide::heap::Heap;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
}

/// Returns the number of allocations that this thread has made.
pub(crate) fn count() -> u64 {
    COUNT.with(Cell::get)
}

fn note() {
    // A thread that ends may allocate after its values are gone.
    let _ = COUNT.try_with(|count| count.set(count.get() + 1));
}

/// The allocator.
pub(crate) struct Counting;

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

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as promised to this function.
        unsafe { Heap.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        note();
        // SAFETY: as promised to this function.
        unsafe { Heap.realloc(at, layout, size) }
    }
}
