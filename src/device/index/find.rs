//! Where a request is placed: which free blocks are looked at, and which of them is best.
//!
//! It changes nothing.
//!
//! Invariants: at most `(BINS_LOOKED + 1) x LOOKS_PER_BIN` blocks are looked at; the place found
//! lies in a free block and at a multiple of the request's alignment.

use super::bins::Bin;
use super::records::NONE;
use super::{ALIGN, BlockIndex, End, Request, Span};

/// How many blocks of one bin are looked at. 8: with 4 more granules are activated, with 16 no
/// fewer (docs/BENCHMARKING.md, measured by `benches/index`).
const LOOKS_PER_BIN: u32 = 8;

/// How many bins are looked through for a block that costs nothing. 4: with 2 and with 8 the same
/// within the noise (docs/BENCHMARKING.md, measured by `benches/index`).
const BINS_LOOKED: u32 = 4;

/// A place for a request, in one free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct Place {
    pub(super) slot: u32,
    pub(super) start: u64,
    cost: u64,
}

impl BlockIndex {
    /// The best place for a request whose size is a multiple of [`ALIGN`], and whose alignment is
    /// no less.
    pub(super) fn find(&self, wanted: Request, cost: &impl Fn(Span) -> u64) -> Option<Place> {
        let mut best = None;
        let mut bin = self.bins.at_or_above(Bin::of(wanted.size));
        for _ in 0..BINS_LOOKED {
            let Some(at) = bin else { break };
            self.look(at, wanted, cost, &mut best);
            if best.is_some_and(|place: Place| place.cost == 0) {
                return best;
            }
            bin = self.bins.above(at);
        }
        if best.is_none() {
            // Every block of this bin holds the request, wherever it begins.
            let sure = Bin::holding(wanted.size.checked_add(wanted.align - ALIGN)?)?;
            self.look(self.bins.at_or_above(sure)?, wanted, cost, &mut best);
        }
        best
    }

    /// Looks at the first blocks of a bin for a place that is better than the best so far.
    fn look(
        &self,
        bin: Bin,
        wanted: Request,
        cost: &impl Fn(Span) -> u64,
        best: &mut Option<Place>,
    ) {
        let before = best.map_or(u64::MAX, |place| place.cost);
        let mut next = self.bins.head(bin);
        for _ in 0..LOOKS_PER_BIN {
            if next == NONE {
                break;
            }
            let slot = next;
            let record = &self.records[slot];
            next = record.bin_next;
            let Some(start) = fit(record.span(), wanted) else { continue };
            let cost = cost(Span { offset: start, size: wanted.size });
            let better = match *best {
                None => true,
                Some(place) if place.cost == cost => {
                    cost < before
                        && match wanted.end {
                            End::Low => start < place.start,
                            End::High => start > place.start,
                        }
                }
                Some(place) => cost < place.cost,
            };
            if better {
                *best = Some(Place { slot, start, cost });
            }
        }
    }
}

/// Where in a free block the request would begin, where it fits.
const fn fit(free: Span, wanted: Request) -> Option<u64> {
    if free.size < wanted.size {
        return None;
    }
    match wanted.end {
        End::Low => {
            let skipped = free.offset.wrapping_neg() & (wanted.align - 1);
            if skipped <= free.size - wanted.size { Some(free.offset + skipped) } else { None }
        }
        End::High => {
            let start = (free.end() - wanted.size) & !(wanted.align - 1);
            if start >= free.offset { Some(start) } else { None }
        }
    }
}
