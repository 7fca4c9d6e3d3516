//! The crate's allocator, which calls a function before each allocation, so that a bench can count.
#![expect(unsafe_code, reason = "an allocator passes on what it gets")]

use std::alloc::{GlobalAlloc, Layout};

use lowtide::heap::Heap;

/// The allocator, with the function that it calls. The function must not allocate.
pub struct Counting(pub fn());

// SAFETY: all is passed on to an allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        (self.0)();
        // SAFETY: as promised to this function.
        unsafe { Heap.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        (self.0)();
        // SAFETY: as promised to this function.
        unsafe { Heap.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        // SAFETY: as promised to this function.
        unsafe { Heap.dealloc(at, layout) }
    }

    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        (self.0)();
        // SAFETY: as promised to this function.
        unsafe { Heap.realloc(at, layout, size) }
    }
}
