//! An allocator that counts what each thread allocates, as the global one of a test program.
//!
//! Invariant: every allocation of the process is counted, for the thread that makes it.
#![expect(unsafe_code, reason = "an allocator that counts")]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static COUNT: Cell<u64> = const { Cell::new(0) };
    static LIVE: Cell<i64> = const { Cell::new(0) };
    static MOST: Cell<i64> = const { Cell::new(0) };
}

struct Counting;

fn count(change: i64) {
    LIVE.set(LIVE.get() + change);
    MOST.set(MOST.get().max(LIVE.get()));
    COUNT.set(COUNT.get() + u64::from(change > 0));
}

fn bytes(layout: Layout) -> i64 {
    i64::try_from(layout.size()).unwrap_or(i64::MAX)
}

// SAFETY: every call is handed on to the system's allocator unchanged; counting touches only
// thread-local integers without destructors, which does not allocate.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(bytes(layout));
        // SAFETY: the caller's promise about `layout` is handed on.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, block: *mut u8, layout: Layout) {
        count(-bytes(layout));
        // SAFETY: `block` came from `alloc` above, so from the system, with this layout.
        unsafe { System.dealloc(block, layout) }
    }
}

#[global_allocator]
static COUNTING: Counting = Counting;

/// Returns the number of allocations that `act` makes.
pub(crate) fn allocations(act: impl FnOnce()) -> u64 {
    let before = COUNT.get();
    act();
    COUNT.get() - before
}

/// The most that is live meanwhile, beyond what was live before.
pub(crate) fn most_bytes<T>(act: impl FnOnce() -> T) -> (T, u64) {
    let before = LIVE.get();
    MOST.set(before);
    let result = act();
    (result, (MOST.get() - before).unsigned_abs())
}
