//! jemalloc as the global allocator, and what it gives back: the heap alone, without a `Memory`.
//!
//! `cargo run --example global_allocator` takes 64 MiB in small blocks, frees them, and asks the
//! heap three times what it holds: with the blocks, after them, and after a purge. It fails where
//! the purge does not bring the heap down.
//!
//! Nothing here is timed or decided: a service that wants that starts a `Memory` (`low_memory`).
#![expect(clippy::print_stdout, reason = "the figures are the product")]

use lowtide::host::{self, HeapProbe, HeapSnapshot};
use lowtide::{BoxError, ByteSize};

#[global_allocator]
static HEAP: host::Heap = host::Heap;
// What jemalloc reads before `main`: decay times, arenas, page classes. One setting on top.
lowtide::heap_profile!(balanced, narenas: 2);

/// What is taken: many small blocks, as a parsed document would be.
const TAKEN: ByteSize = ByteSize::mib(64);
const BLOCK: usize = 1 << 10;

fn main() -> Result<(), BoxError> {
    if !host::is_global() {
        return Err("another allocator serves this program".into());
    }
    // What could not be taken over as asked, with its cause: a variable that says otherwise, say.
    for difference in host::apply(&host::HeapProfile::Balanced.settings())?.differences {
        println!("not as asked: {difference}");
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

    let report = host::purge_now()?;
    let after = probe.snapshot()?;
    show("purged", &after);
    println!("\nthe purge gave back {}", report.released());

    if full.live < before.live.saturating_add(TAKEN) {
        return Err(format!("live is {}, and {TAKEN} were taken", full.live).into());
    }
    let left = after.resident.saturating_sub(before.resident);
    if left > ByteSize::mib(8) {
        return Err(format!("{left} stay behind the purge: expected 8 MiB at most").into());
    }
    Ok(())
}

fn show(when: &str, heap: &HeapSnapshot) {
    println!(
        "{when:32} live {:>10}  resident {:>10}  retained {:>10}",
        heap.live.to_string(),
        heap.resident.to_string(),
        heap.retained().to_string(),
    );
}
