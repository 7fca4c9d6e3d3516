//! Instructions of an operation of the mix, counted by callgrind in a process of its own.
//!
//! A run of three times as many steps, less a run of them once, less the same of a loop without an
//! allocator: what chance and bookkeeping of the bench cost is not counted.
//!
//! Invariant: equal steps and seeds for every peer.

use crate::common::callgrind;
use crate::ours::Ours;
use crate::peers::{Offset, Peer};
use crate::tlsf::Tlsf;
use crate::work::{MIX_LIVE, Mix, POOL, SEEDS};

/// Steps of the shorter run.
const STEPS: u32 = 50_000;

/// The allocators that are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Counted {
    Ours,
    OffsetAllocator,
    Rlsf,
    Nobody,
}

/// Takes a number for a block and keeps nothing.
struct Nobody(u64);

impl Peer for Nobody {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        self.0 = std::hint::black_box(bytes);
        Some(self.0)
    }

    fn free(&mut self, block: u64) {
        self.0 = std::hint::black_box(block);
    }

    fn taken(&self) -> u64 {
        0
    }

    fn largest_free(&self) -> u64 {
        0
    }

    fn live(&self) -> u64 {
        self.0
    }
}

/// The process that is counted: plays so many steps of the mix.
pub(crate) fn be(who: Counted, steps: usize) {
    fn run<P: Peer>(mut peer: P, steps: usize) {
        Mix::filled(&mut peer, SEEDS[0], MIX_LIVE).play(&mut peer, steps);
    }
    match who {
        Counted::Ours => run(Ours::new(POOL), steps),
        Counted::OffsetAllocator => run(Offset::new(POOL, 1 << 17), steps),
        Counted::Rlsf => run(Tlsf::new(POOL), steps),
        Counted::Nobody => run(Nobody(0), steps),
    }
}

/// Instructions for each operation, or why they could not be counted.
pub(crate) fn count(who: Counted) -> Result<f64, String> {
    use clap::ValueEnum as _;
    let of = |who: Counted| {
        let name = who.to_possible_value().map(|value| value.get_name().to_owned());
        callgrind::per_step(&["--be", &name.unwrap_or_default(), "--steps"], STEPS)
    };
    Ok(of(who)? - of(Counted::Nobody)?)
}
