//! A burst: threads that answer requests, ten times as many at once for a while, then rest.
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
//! Invariant: operations = threads x 2 waves x 2 phases x those of a phase.
#![expect(unsafe_code, reason = "a block is copied with the bytes that were not written")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]

use std::hint::black_box;
use std::mem::MaybeUninit;
use std::sync::{Barrier, mpsc};
use std::time::Instant;

use crate::chance::Chance;
use crate::histogram::Histogram;
use crate::{Allocator, BoxError};

/// The size of a burst.
#[derive(Clone, Copy, Debug)]
pub struct Size {
    /// Threads.
    pub threads: usize,
    /// Operations of a thread in each phase.
    pub operations: usize,
    /// Requests that a thread holds in quiet times; ten times as many in the burst.
    pub held: usize,
    /// The kind of its requests.
    pub kind: Kind,
}

/// The kinds of requests, which also determine if some are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Kind {
    /// Short and long blocks. As many as in quiet times are left.
    #[value(name = "burst")]
    Mixed,
    /// Short strings alone. None is left.
    #[value(name = "documents")]
    Document,
}

/// The result of a burst.
#[derive(Clone, Debug)]
pub struct Outcome {
    /// Operations that were timed.
    pub operations: usize,
    /// Bytes asked for that are still held.
    pub live: u64,
    /// The latencies of operations.
    pub latency: Histogram,
}

/// Strings of a document.
const STRINGS: usize = 2_048;
const PAGE: usize = 4096;
const WAVES: usize = 2;

/// The blocks that a request holds.
struct Request<const SHORT: usize, const LONG: usize> {
    short: [Vec<u8>; SHORT],
    long: [Vec<u8>; LONG],
}

impl<const SHORT: usize, const LONG: usize> Request<SHORT, LONG> {
    fn new(chance: &mut Chance) -> Box<Self> {
        Box::new(Self {
            short: std::array::from_fn(|_| block(chance.size(4, 9))),
            long: std::array::from_fn(|_| block(chance.size(4, 18))),
        })
    }

    fn copy(&self) -> Box<Self> {
        Box::new(Self {
            short: self.short.each_ref().map(copy),
            long: self.long.each_ref().map(copy),
        })
    }

    fn bytes(&self) -> u64 {
        let blocks = self.short.iter().chain(&self.long).map(Vec::capacity);
        blocks.chain([size_of::<Self>()]).map(|bytes| bytes as u64).sum()
    }
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
    for (to, from) in copy.spare_capacity_mut().iter_mut().zip(bytes) {
        *to = *from;
    }
    black_box(copy)
}

/// Plays it and calls `rested` with the outcome while what is left is held still, and every thread
/// waits.
///
/// # Errors
/// Those of `rested`.
pub fn play(
    size: Size,
    allocator: &dyn Allocator,
    rested: impl FnOnce(Outcome) -> Result<(), BoxError>,
) -> Result<(), BoxError> {
    let traffic = allocator.begin();
    let (tell, told) = mpsc::channel();
    let end = Barrier::new(size.threads + 1);
    std::thread::scope(|scope| {
        for thread in 0..size.threads {
            let (tell, end) = (tell.clone(), &end);
            scope.spawn(move || {
                let mut chance = Chance::new(42 + thread as u64);
                let mut latency = Histogram::default();
                let rest = |live: u64, latency| {
                    allocator.rest();
                    let _ = tell.send((live, latency));
                    end.wait();
                };
                match size.kind {
                    Kind::Mixed => {
                        let held = work::<24, 3>(size, allocator, &mut chance, &mut latency);
                        rest(held.iter().map(|request| request.bytes()).sum(), latency);
                    }
                    Kind::Document => {
                        drop(work::<STRINGS, 0>(size, allocator, &mut chance, &mut latency));
                        rest(0, latency);
                    }
                }
            });
        }
        let mut outcome = Outcome { operations: 0, live: 0, latency: Histogram::default() };
        for (live, latency) in told.iter().take(size.threads) {
            outcome.operations += size.operations * 2 * WAVES;
            outcome.live += live;
            outcome.latency.merge(&latency);
        }
        drop(traffic);
        allocator.settle();
        let done = rested(outcome);
        end.wait();
        done
    })
}

/// The work of one thread; what it holds at its end.
fn work<const SHORT: usize, const LONG: usize>(
    size: Size,
    allocator: &dyn Allocator,
    chance: &mut Chance,
    latency: &mut Histogram,
) -> Vec<Box<Request<SHORT, LONG>>> {
    let many = size.held * 10;
    let mut held = Vec::with_capacity(many);
    held.resize_with(size.held, || Request::new(chance));
    for _ in 0..WAVES {
        operate(&mut held, size.operations, chance, latency);
        held.resize_with(many, || Request::new(chance));
        operate(&mut held, size.operations, chance, latency);
        while held.len() > size.held {
            held.swap_remove(chance.below(held.len()));
        }
        for request in &mut held {
            allocator.keep(&mut || *request = request.copy());
        }
    }
    held
}

fn operate<const SHORT: usize, const LONG: usize>(
    held: &mut [Box<Request<SHORT, LONG>>],
    times: usize,
    chance: &mut Chance,
    latency: &mut Histogram,
) {
    for _ in 0..times {
        let at = chance.below(held.len());
        let start = Instant::now();
        if let Some(request) = held.get_mut(at) {
            *request = Request::new(chance);
        }
        let took = start.elapsed();
        latency.add(u64::try_from(took.as_nanos()).unwrap_or(u64::MAX));
    }
}
