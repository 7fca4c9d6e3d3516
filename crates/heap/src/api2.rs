//! Buffers in a dedicated arena, through `allocator-api2`'s trait.
//!
//! Each block is allocated from the arena and freed to it, bypassing thread caches, so nothing
//! remains in them on any thread, without a scope. A pair of calls costs 200 to 370 ns, thirty
//! times an ordinary pair: use it for buffers of 64 KiB and more, not for strings. Growing copies.
//!
//! Invariant: `a block exists => its arena exists`: the owner of the block borrows or owns the
//! arena. If the owner was forgotten, the block's pages are active and the arena is not destroyed.
#![expect(unsafe_code, reason = "an allocator hands out memory")]

use std::alloc::Layout;
use std::ffi::c_int;
use std::ptr::{self, NonNull};

use allocator_api2::alloc::{AllocError, Allocator};
use tikv_jemalloc_sys::{
    MALLOCX_ALIGN, MALLOCX_ARENA, MALLOCX_TCACHE_NONE, MALLOCX_ZERO, mallocx, sdallocx,
};

use super::HostArena;

/// For large buffers, on any thread.
///
/// ```
/// use allocator_api2::vec::Vec;
/// use lowtide_heap::HostArena;
///
/// let arena = HostArena::new("tensors")?;
/// let mut tensor = Vec::with_capacity_in(1 << 20, &arena);
/// tensor.resize(1 << 20, 0.5_f32);
/// assert!(arena.stats()?.live.get() >= 4 << 20);
/// drop(tensor); // on whichever thread
/// arena.retire().map_err(|(_, cause)| cause)?;
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
// SAFETY: a block is jemalloc's, with the requested size and alignment, and does not move until it
// is deallocated: an arena releases memory only if it has no block (`destroy`), even if the
// `HostArena` was moved. All equal allocators are one value or borrows of it.
unsafe impl Allocator for HostArena {
    fn allocate(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.block(layout, 0)
    }

    fn allocate_zeroed(&self, layout: Layout) -> Result<NonNull<[u8]>, AllocError> {
        self.block(layout, MALLOCX_ZERO)
    }

    unsafe fn deallocate(&self, block: NonNull<u8>, layout: Layout) {
        if layout.size() == 0 {
            return; // it has no memory
        }
        let flags = MALLOCX_ALIGN(layout.align()) | MALLOCX_TCACHE_NONE;
        // SAFETY: the caller guarantees that the block is one of `allocate`'s, of this layout, and
        // not used any more; size and alignment are those that jemalloc got.
        unsafe { sdallocx(block.as_ptr().cast(), layout.size(), flags) }
    }
}

impl HostArena {
    fn block(&self, layout: Layout, zero: c_int) -> Result<NonNull<[u8]>, AllocError> {
        let size = layout.size();
        let start = if size == 0 {
            NonNull::new(ptr::without_provenance_mut(layout.align()))
        } else {
            let place = MALLOCX_ARENA(self.index() as usize) | MALLOCX_TCACHE_NONE;
            let flags = MALLOCX_ALIGN(layout.align()) | place | zero;
            // SAFETY: the size is not zero; an alignment is a power of two, and the index is of an
            // arena that exists for as long as `self` does.
            NonNull::new(unsafe { mallocx(size, flags) }.cast())
        };
        let start = start.ok_or(AllocError)?;
        Ok(NonNull::slice_from_raw_parts(start, size))
    }
}
