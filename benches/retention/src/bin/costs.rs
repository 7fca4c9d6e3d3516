//! The costs of single acts of the heap, in a process of its own: a pair, a scrape, a purge, scopes
//! of an arena.
//!
//! Its global allocator is lowtide's, with a count of allocations around it. A pair is called on
//! the allocators themselves, past that count.
//!
//! Invariant: a loop of pairs differs from the empty one by the two calls and nothing else.
#![expect(unsafe_code, reason = "allocators are called by hand, and counted")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::alloc::{GlobalAlloc, Layout};
use std::hint::black_box;
use std::ptr;
use std::sync::Barrier;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Instant;

use clap::{Parser, ValueEnum};
use lowtide::BoxError;
use lowtide::heap::{self, HeapProbe, HostArena};
use tikv_jemallocator::Jemalloc;

#[path = "../../../common/counting.rs"]
mod counting;
#[path = "../../../common/figures.rs"]
#[allow(dead_code, reason = "other benches use more of it")]
mod figures;
use crate::counting::Counting;
use crate::figures::median;

#[global_allocator]
static HEAP: Counting = Counting(|| {
    ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
});

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Takes nothing and gives nothing: the loop without an allocator.
struct Nothing;

// SAFETY: it never gives memory out, so there is none to be used wrongly.
unsafe impl GlobalAlloc for Nothing {
    unsafe fn alloc(&self, _: Layout) -> *mut u8 {
        ptr::null_mut()
    }

    unsafe fn dealloc(&self, _: *mut u8, _: Layout) {}
}

#[derive(Clone, Debug, Parser)]
enum Act {
    /// So many allocations of 64 bytes and their frees.
    Pair {
        /// Of whom.
        of: Of,
        /// The number of pairs.
        times: u64,
    },
    /// A snapshot of the statistics with 64 threads.
    Scrape,
    /// A purge, by how much it gives back.
    Purge,
    /// Scopes of a dedicated arena, with a full cache of the thread before each.
    Scopes,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Of {
    Heap,
    Plain,
    Nothing,
}

const THREADS: usize = 64;
const SCRAPES: usize = 301;
const PURGES: usize = 11;
const ENTRIES: usize = 2_001;
/// The amount that each purge finds, in blocks of 1 MiB.
const PURGED_MIB: usize = 256;

fn main() -> Result<(), BoxError> {
    match Act::parse() {
        Act::Pair { of: Of::Heap, times } => pairs(&heap::Heap, times),
        Act::Pair { of: Of::Plain, times } => pairs(&Jemalloc, times),
        Act::Pair { of: Of::Nothing, times } => pairs(&Nothing, times),
        Act::Scrape => return scrape(),
        Act::Purge => return purge(),
        Act::Scopes => return scopes(),
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

fn scrape() -> Result<(), BoxError> {
    let barrier = Barrier::new(THREADS + 1);
    std::thread::scope(|scope| {
        for _ in 0..THREADS {
            scope.spawn(|| {
                let held: Vec<_> = (4..16).map(|power| vec![1_u8; 1 << power]).collect();
                barrier.wait();
                barrier.wait();
                drop(black_box(held));
            });
        }
        barrier.wait();
        let measured = scrapes();
        barrier.wait();
        measured
    })
}

fn scrapes() -> Result<(), BoxError> {
    let probe = HeapProbe::new()?;
    let mut micros = Vec::with_capacity(SCRAPES);
    let before = ALLOCATIONS.load(Ordering::Relaxed);
    for _ in 0..SCRAPES {
        let start = Instant::now();
        black_box(probe.snapshot()?);
        micros.push(start.elapsed().as_secs_f64() * 1e6);
    }
    let allocations = ALLOCATIONS.load(Ordering::Relaxed) - before;
    println!("scrape us={} allocations={allocations}", median(&micros));
    Ok(())
}

fn purge() -> Result<(), BoxError> {
    let mut each = Vec::new();
    for _ in 0..PURGES {
        let blocks: Vec<_> = (0..PURGED_MIB).map(|_| vec![1_u8; 1 << 20]).collect();
        drop(black_box(blocks));
        let report = heap::purge_now()?;
        let released = report.jemalloc.unwrap_or_default().as_f64() / 1_048_576.0;
        if released < 1.0 {
            return Err(format!("a purge gave back {released} MiB: expected 256").into());
        }
        each.push(report.jemalloc_took.as_secs_f64() * 1e3 / released);
    }
    println!("purge ms_per_mib={}", median(&each));
    Ok(())
}

/// An entry made in a scope, and the same past the cache, each after a request.
fn scopes() -> Result<(), BoxError> {
    let arena = HostArena::new("lasting")?;
    let scope = timed(|| arena.scope(black_box(entry)).map(drop))?;
    let uncached = timed(|| arena.scope_uncached(black_box(entry)).map(drop))?;
    let ordinary = timed(|| {
        drop(black_box(entry)());
        Ok(())
    })?;
    println!("scopes scope={scope} uncached={uncached} ordinary={ordinary}");
    Ok(())
}

/// What a cache keeps of a request: its table apart, a key and an answer.
fn entry() -> [Vec<u8>; 4] {
    [24, 48, 200, 700].map(Vec::with_capacity)
}

/// Returns the median time in ns of this act and of the blocks of a request after it, less that of
/// the blocks alone.
fn timed(mut act: impl FnMut() -> Result<(), heap::HostError>) -> Result<f64, BoxError> {
    let request = || {
        let blocks = (0..400_usize).map(|nth| Vec::<u8>::with_capacity(16 + nth % 50 * 20));
        drop(black_box(blocks.collect::<Vec<_>>()));
    };
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..ENTRIES {
        let start = Instant::now();
        act()?;
        request();
        with.push(start.elapsed().as_secs_f64() * 1e9);
        let start = Instant::now();
        request();
        without.push(start.elapsed().as_secs_f64() * 1e9);
    }
    Ok(median(&with) - median(&without))
}
