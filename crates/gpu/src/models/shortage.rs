//! Shortage callbacks under loom: several threads are short of memory at once.
//!
//! Invariant: runs do not overlap, and a thread that waits for a run continues.

use super::*;

#[test]
fn threads_that_are_short_at_once_ask_one_after_the_other_and_both_come_to_an_end() {
    loom::model(|| {
        let (arena, driver) = open(1);
        arena.set_thread_cache(ByteSize::ZERO);
        let held = Mutex::new(Some(arena.alloc::<u8>(512, Region::Dynamic).expect("room")));
        let guard = arena.on_shortage(move |_| lock(&held).take().is_some());
        let act = |arena: &DeviceArena| {
            let _ = pass(arena, 512); // there may be room or not
        };
        both(arena, &driver, act, act);
        drop(guard);
    });
}
