//! The work of a process under measurement, and its reports to the driver: threads that answer
//! requests, ten times as many at once for a while, then rest.
//!
//! One library under one small program for each allocator, so that no call pays for a choice
//! between them, and none carries another's heap along. It knows no allocator: what one does to
//! give memory back is behind [`Allocator`].
//!
//! A request holds 24 short strings (16 to 512 bytes) and three blocks of which each power of
//! two from 16 bytes to 256 KiB is as likely as another: 84 KiB on average. An operation drops one
//! request out of those that are held and makes a new one, with a byte written in each page. Two
//! waves: few are held, then many, then all but few at random are dropped. What is left after the
//! second wave stays, and every thread waits.
//!
//! A burst of documents differs in two ways: a request is 2,048 short strings, as a parsed JSON
//! document is, and after the second wave none is left.
//!
//! An allocator that knows of lifetimes has a request that outlives a wave copied, as a cache
//! copies what it keeps. The copy has the same bytes in blocks of the same sizes.
//!
//! A process prints a line when the traffic begins, and one with figures when it ends; then it waits
//! until its standard input ends, so that none outlives the driver.
//!
//! Invariants: with the same arguments every allocator is asked for the same blocks, in the same
//! order on each thread; operations = threads x 2 waves x 2 phases x those of a phase.
#![expect(unsafe_code, reason = "a block is copied with the bytes that were not written")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

#[path = "../../../crates/admission/tests/admission/sim/chance.rs"]
#[allow(dead_code, reason = "another bench draws other sizes")]
mod chance;

use std::any::Any;
use std::hint::black_box;
use std::io::Read as _;
use std::mem::MaybeUninit;
use std::sync::{Barrier, mpsc};
use std::time::Instant;

use clap::Parser;
use hdrhistogram::Histogram;
use lowtide::BoxError;

use crate::chance::Chance;

/// The calls that an allocator's user makes besides allocating.
pub trait Allocator: Sync {
    /// Called before the traffic; what it returns is dropped when the traffic ends.
    fn begin(&self) -> Box<dyn Any> {
        Box::new(())
    }

    /// Called on each thread that runs out of work.
    fn rest(&self) {}

    /// Called for each request that outlives a wave. It may run `copy`, which makes a copy of the
    /// request and drops the original; does nothing by default.
    fn keep(&self, copy: &mut dyn FnMut()) {
        let _ = copy;
    }

    /// Called once, when all threads have.
    fn settle(&self) {}
}

/// An allocator that is only asked for memory.
impl Allocator for () {}

/// The kinds of requests, which also determine if some are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
enum Kind {
    /// Short and long blocks. As many as in quiet times are left.
    Burst,
    /// Short strings alone. None is left.
    Documents,
}

/// The command line of such a process.
#[derive(Clone, Debug, Parser)]
pub struct Cli {
    /// The kind of requests.
    kind: Kind,
    /// Threads.
    threads: usize,
    /// Operations of a thread in each phase.
    operations: usize,
    /// Requests that a thread holds in quiet times; ten times as many in the burst.
    held: usize,
    /// The variant of the allocator, if it has several.
    #[arg(default_value = "")]
    pub way: String,
}

/// Blocks of a mixed request, of which the first ones are short, and strings of a document.
const BLOCKS: usize = 27;
const SHORT: usize = 24;
const STRINGS: usize = 2_048;
const PAGE: usize = 4096;
const WAVES: usize = 2;

/// The blocks that a request holds.
struct Request<const N: usize>([Vec<u8>; N]);

impl<const N: usize> Request<N> {
    fn new(chance: &mut Chance) -> Box<Self> {
        let high = |at: usize| if at < SHORT || N == STRINGS { 9 } else { 18 };
        Box::new(Self(std::array::from_fn(|at| block(size(chance, high(at))))))
    }

    fn copy(&self) -> Box<Self> {
        Box::new(Self(self.0.each_ref().map(copy)))
    }

    fn bytes(&self) -> usize {
        self.0.iter().map(Vec::capacity).sum::<usize>() + size_of::<Self>()
    }
}

/// Draws a size of which each power of two from 2^4 to `2^high` is as likely as another.
fn size(chance: &mut Chance, high: usize) -> usize {
    let base = 1_usize << (4 + chance.below(high - 4));
    base + chance.below(base)
}

/// A block with a byte written in each of its pages.
fn block(size: usize) -> Vec<u8> {
    let mut block = Vec::with_capacity(size);
    for byte in block.spare_capacity_mut().iter_mut().step_by(PAGE) {
        *byte = MaybeUninit::new(1);
    }
    black_box(block)
}

/// Copies all of a block, also bytes that were not written.
fn copy(block: &Vec<u8>) -> Vec<u8> {
    let mut copy = Vec::with_capacity(block.capacity());
    // SAFETY: the block has so many bytes, and they may be uninitialized.
    let bytes = unsafe {
        std::slice::from_raw_parts(block.as_ptr().cast::<MaybeUninit<u8>>(), block.capacity())
    };
    copy.spare_capacity_mut()[..bytes.len()].copy_from_slice(bytes);
    black_box(copy)
}

/// Does what it was told: a burst of requests, then rest.
///
/// # Errors
/// The standard input cannot be read.
pub fn run(cli: &Cli, allocator: &dyn Allocator) -> Result<(), BoxError> {
    println!("traffic");
    let traffic = allocator.begin();
    let (tell, told) = mpsc::channel();
    let end = Barrier::new(cli.threads + 1);
    std::thread::scope(|scope| {
        for thread in 0..cli.threads {
            let (tell, end) = (tell.clone(), &end);
            scope.spawn(move || {
                let mut chance = Chance::new(42 + thread as u64);
                let rest = |live: usize, latency: Histogram<u32>| {
                    allocator.rest();
                    let _ = tell.send((live, latency));
                    end.wait();
                };
                match cli.kind {
                    Kind::Burst => {
                        let (held, latency) = work::<BLOCKS>(cli, allocator, &mut chance);
                        rest(held.iter().map(|request| request.bytes()).sum(), latency);
                    }
                    Kind::Documents => {
                        let (held, latency) = work::<STRINGS>(cli, allocator, &mut chance);
                        drop(held);
                        rest(0, latency);
                    }
                }
            });
        }
        let (mut live, mut latency) = (0, histogram());
        for (of_thread, latencies) in told.iter().take(cli.threads) {
            live += of_thread;
            let _ = latency.add(latencies);
        }
        drop(traffic);
        allocator.settle();
        let operations = cli.threads * cli.operations * 2 * WAVES;
        let [p50, p95, p99] = [0.5, 0.95, 0.99].map(|part| latency.value_at_quantile(part));
        println!("idle {operations} {live} {p50} {p95} {p99}");
        let ended = std::io::stdin().read_to_end(&mut Vec::new());
        end.wait();
        Ok(ended.map(drop)?)
    })
}

/// Latencies in nanoseconds, up to a minute, to 1 %. It allocates when it is made and never again.
fn histogram() -> Histogram<u32> {
    Histogram::new_with_bounds(1, 60_000_000_000, 2).expect("bounds that are constants")
}

/// The work of one thread. Returns what it holds at its end, and the latencies.
fn work<const N: usize>(
    cli: &Cli,
    allocator: &dyn Allocator,
    chance: &mut Chance,
) -> (Vec<Box<Request<N>>>, Histogram<u32>) {
    let (many, mut latency) = (cli.held * 10, histogram());
    let mut held = Vec::with_capacity(many);
    let mut operate = |held: &mut [Box<Request<N>>], chance: &mut Chance| {
        for _ in 0..cli.operations {
            let at = chance.below(held.len());
            let start = Instant::now();
            held[at] = Request::new(chance);
            latency
                .saturating_record(u64::try_from(start.elapsed().as_nanos()).unwrap_or(u64::MAX));
        }
    };
    held.resize_with(cli.held, || Request::new(chance));
    for _ in 0..WAVES {
        operate(&mut held, chance);
        held.resize_with(many, || Request::new(chance));
        operate(&mut held, chance);
        while held.len() > cli.held {
            held.swap_remove(chance.below(held.len()));
        }
        for request in &mut held {
            allocator.keep(&mut || *request = request.copy());
        }
    }
    (held, latency)
}
