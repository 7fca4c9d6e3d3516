//! `retention-pair heap|plain|nothing TIMES`: so many allocations of 64 bytes and their releases,
//! of lowtide's allocator, of jemalloc's, or of none.
//!
//! Invariant: a loop of pairs differs from the empty one by the two calls and nothing else.
#![expect(unsafe_code, reason = "allocators are called by hand")]

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::ptr;

use lowtide::BoxError;
use lowtide::heap::Heap;
use tikv_jemallocator::Jemalloc;

#[global_allocator]
static HEAP: Heap = Heap;

/// Takes nothing and gives nothing: the loop without an allocator.
struct Nothing;

// SAFETY: it never gives memory out, so there is none to be used wrongly.
unsafe impl GlobalAlloc for Nothing {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        ptr::null_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

fn main() -> Result<(), BoxError> {
    let arguments: Vec<_> = std::env::args().skip(1).collect();
    match arguments.iter().map(String::as_str).collect::<Vec<_>>()[..] {
        ["heap", times] => pairs(&HEAP, times.parse()?),
        ["plain", times] => pairs(&Jemalloc, times.parse()?),
        ["nothing", times] => pairs(&Nothing, times.parse()?),
        _ => return Err("expected heap, plain or nothing, and a number".into()),
    }
    Ok(())
}

fn pairs<A: GlobalAlloc>(heap: &A, times: u64) {
    let layout = Layout::new::<[u64; 8]>();
    for _ in 0..times {
        // SAFETY: the layout has a size.
        let block = black_box(unsafe { heap.alloc(black_box(layout)) });
        // SAFETY: the block is this allocator's, with this layout, and is given back once.
        unsafe { heap.dealloc(block, black_box(layout)) };
    }
}
