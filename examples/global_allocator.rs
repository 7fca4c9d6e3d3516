//! jemalloc as the global allocator, without a `Memory`: the heap alone.
//!
//! `cargo run --example global_allocator` allocates 64 MiB in small blocks, frees them, and prints
//! the heap's figures three times: with the blocks, after the free, and after a purge. It fails if
//! the purge does not shrink the heap.
//!
//! Nothing here is scheduled or decided automatically: a service that wants that starts a `Memory`
//! (`low_memory`).
#![expect(clippy::print_stdout, reason = "the figures are the product")]
#![expect(clippy::disallowed_methods, reason = "another thread of the process is waited for")]

use std::time::Duration;

use lowtide::heap::{self, HeapProbe, HeapSnapshot};
use lowtide::{BoxError, ByteSize};

// The settings that jemalloc reads before `main`: decay times, arenas, page classes. One setting is
// overridden.
lowtide::global_allocator!(balanced, narenas: 2);

/// The amount allocated: many small blocks, as in a parsed document.
const TAKEN: ByteSize = ByteSize::mib(64);
const BLOCK: usize = 1 << 10;
/// The most that may stay after a purge.
const LEFT_MAX: ByteSize = ByteSize::mib(8);
/// The most purges, and the pause between two.
const PURGES_MAX: u32 = 100;
const PAUSE: Duration = Duration::from_millis(20);

fn main() -> Result<(), BoxError> {
    if !heap::is_global() {
        return Err("another allocator serves this program".into());
    }
    // Settings that could not be applied, with their causes, such as a variable that overrides
    // them.
    for difference in heap::apply(&heap::HeapProfile::Balanced.settings())? {
        println!("setting not applied: {difference}");
    }
    let probe = HeapProbe::new()?;
    let before = probe.snapshot()?;
    show("at the start", &before);

    let count = TAKEN.as_usize().ok_or("a small platform")? / BLOCK;
    let blocks: Vec<Box<[u8]>> = (0..count).map(|_| vec![1; BLOCK].into()).collect();
    let full = probe.snapshot()?;
    show("64 MiB in blocks of 1 KiB", &full);

    drop(blocks);
    show("freed: jemalloc keeps the pages", &probe.snapshot()?);

    // More than once only if jemalloc's own thread purges at this moment: the arena is left to it.
    let mut released = ByteSize::ZERO;
    let mut after = probe.snapshot()?;
    for _ in 0..PURGES_MAX {
        released = released.saturating_add(heap::purge_now()?.released());
        after = probe.snapshot()?;
        if after.resident.saturating_sub(before.resident) <= LEFT_MAX {
            break;
        }
        std::thread::sleep(PAUSE);
    }
    show("purged", &after);
    println!("\nthe purge released {released}");

    check(&before, &full, &after);
    Ok(())
}

/// Panics unless the blocks were live, and the purge has released them.
fn check(before: &HeapSnapshot, full: &HeapSnapshot, after: &HeapSnapshot) {
    assert!(full.live >= before.live.saturating_add(TAKEN), "{} live: expected more", full.live);
    let left = after.resident.saturating_sub(before.resident);
    assert!(left <= LEFT_MAX, "{left} are left after the purge: expected at most {LEFT_MAX}");
}

fn show(when: &str, heap: &HeapSnapshot) {
    println!(
        "{when:32} live {:>10}  resident {:>10}  retained {:>10}",
        heap.live.to_string(),
        heap.resident.to_string(),
        heap.retained().to_string(),
    );
}
