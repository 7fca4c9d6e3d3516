//! Chooses the place of a request: examines some free blocks, and picks the best place.
//!
//! This module changes nothing.
//!
//! Invariants: at most `(BINS_LOOKED + 1) x LOOKS_PER_BIN` blocks are examined, except for
//! `take_cheapest`; the place found is in a free block and at a multiple of the request's
//! alignment.

use super::bins::Bin;
use super::records::NONE;
use super::{ALIGN, BlockIndex, End, Request, Span};

/// The number of blocks of one bin that are examined. 8: with 4, sizes that lie close together
/// activate more granules, with 16 nothing is gained (`docs/BENCHMARKS_APPENDIX.md`, measured by
/// `benches/index`).
const LOOKS_PER_BIN: u32 = 8;

/// The number of bins searched for a block that costs nothing. 4: between 1 and 16 it hardly
/// matters (`docs/BENCHMARKS_APPENDIX.md`, measured by `benches/index`).
const BINS_LOOKED: u32 = 4;

/// A place for a request, in one free block.
#[derive(Clone, Copy, Debug)]
pub(super) struct FreePlace {
    pub(super) slot: u32,
    pub(super) bin: Bin,
    pub(super) start: u64,
    pub(super) cost: u64,
}

impl BlockIndex {
    /// Returns the best place for a request whose size is a multiple of [`ALIGN`], and whose
    /// alignment is at least that.
    pub(super) fn find(&self, wanted: Request, cost: &impl Fn(Span) -> u64) -> Option<FreePlace> {
        let mut bin = self.bins.at_or_above(Bin::of(wanted.size))?;
        let mut best = FreePlace { slot: NONE, bin, start: 0, cost: u64::MAX };
        for looked in 1..=BINS_LOOKED + 1 {
            self.look(bin, wanted, cost, &mut best);
            if best.cost == 0 || (looked >= BINS_LOOKED && best.slot != NONE) {
                break;
            }
            bin = match self.bins.above(bin) {
                // Every block of this bin holds the request, at any offset.
                Some(above) if looked == BINS_LOOKED => {
                    let sure = Bin::holding(wanted.size.checked_add(wanted.align - ALIGN)?)?;
                    self.bins.at_or_above(sure.max(above))?
                }
                Some(above) => above,
                None => break,
            };
        }
        (best.slot != NONE).then_some(best)
    }

    /// Returns the cheapest place of all, at either end of any free block; of equal places the
    /// first. Stops at a place that costs nothing.
    pub(super) fn find_cheapest(
        &self,
        wanted: Request,
        cost: &impl Fn(Span) -> u64,
    ) -> Option<FreePlace> {
        let mut best: Option<FreePlace> = None;
        let mut next = self.bins.at_or_above(Bin::of(wanted.size));
        while let Some(bin) = next {
            for slot in self.filed(bin) {
                let free = self.records[slot].span();
                let starts = [End::Low, End::High].map(|end| fit(free, Request { end, ..wanted }));
                for start in starts.into_iter().flatten() {
                    let cost = cost(Span { offset: start, size: wanted.size });
                    if best.is_none_or(|best| cost < best.cost) {
                        best = Some(FreePlace { slot, bin, start, cost });
                    }
                    if cost == 0 {
                        return best;
                    }
                }
            }
            next = self.bins.above(bin);
        }
        best
    }

    /// Examines the first blocks of a bin for a better place than the best so far. At the same
    /// cost, a place in an earlier bin fits better.
    fn look(&self, bin: Bin, wanted: Request, cost: &impl Fn(Span) -> u64, best: &mut FreePlace) {
        let mut slot = self.bins.head(bin);
        for _ in 0..LOOKS_PER_BIN {
            if slot == NONE {
                break;
            }
            let record = &self.records[slot];
            if let Some(start) = fit(record.span(), wanted) {
                let cost = cost(Span { offset: start, size: wanted.size });
                if cost < best.cost || best.slot == NONE {
                    *best = FreePlace { slot, bin, start, cost };
                    if cost == 0 && wanted.end == End::Low {
                        return; // a bin begins with its lowest block, as far as filing compared
                    }
                } else if cost == best.cost && bin == best.bin {
                    let nearer = match wanted.end {
                        End::Low => start < best.start,
                        End::High => start > best.start,
                    };
                    if nearer {
                        (best.slot, best.start) = (slot, start);
                    }
                }
            }
            slot = record.bin_next;
        }
    }
}

/// Returns the offset of the request in a free block, if it fits.
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
