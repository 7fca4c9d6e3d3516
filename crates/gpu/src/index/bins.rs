//! The bins: maps sizes to bins and back, and tracks which bins are not empty.
//!
//! Sizes are counted in units of [`ALIGN`] bytes. Below [`COLUMNS`] units each size has its own
//! bin. Above, each power of two is divided into [`COLUMNS`] bins, so that sizes within a bin
//! differ by less than 1/16. This module holds the heads of the lists and knows no blocks.
//!
//! Invariants: `bin.size_min() <= size <= bin.size_max()` for `bin = Bin::of(size)`; bins in order
//! hold sizes in order; `bit set <=> list not empty`.

use super::ALIGN;
use super::records::NONE;

/// log2 of the number of bins per power of two. 16 bins: of 4, 8, 16, 32 and 64 this gives the
/// fewest failures at 90 % load, and 8 comes close (`docs/BENCHMARKS_APPENDIX.md`, measured by
/// `benches/index`).
const COLUMN_BITS: u32 = 4;
/// The number of bins per power of two.
const COLUMNS: usize = 1 << COLUMN_BITS;
/// One row for the small sizes, and one for each power of two up to 2^64 bytes.
const ROWS: usize = (u64::BITS - ALIGN.trailing_zeros() - COLUMN_BITS + 1) as usize;
/// The number of bins.
pub(super) const BINS: usize = ROWS * COLUMNS;

const _: () = assert!(ALIGN.is_power_of_two());
const _: () = assert!(WORDS < u32::BITS as usize, "a bit of the summary for each word");

/// One size class.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Bin(usize);

impl Bin {
    /// Returns the bin of a block of this size, a positive multiple of [`ALIGN`].
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "the number of a bin is below BINS")]
    pub(super) const fn of(size: u64) -> Self {
        let units = size / ALIGN;
        // 0 for the first row, without a branch that would be mispredicted.
        let shift = (units | COLUMNS as u64).ilog2() - COLUMN_BITS;
        // Above it `units >> shift` has COLUMN_BITS + 1 bits, the highest of which is the row's.
        let bin = (units >> shift) + (shift as u64) * COLUMNS as u64;
        debug_assert!(bin < BINS as u64, "a bin number out of range");
        Self(bin as usize)
    }

    /// Returns the lowest bin in which every block holds `size` bytes, if there is one.
    pub(super) fn holding(size: u64) -> Option<Self> {
        let own = Self::of(size.checked_next_multiple_of(ALIGN)?);
        let bin = if own.size_min() >= size { own.0 } else { own.0 + 1 };
        (bin < BINS).then_some(Self(bin))
    }

    /// Returns the smallest size of the bin, in bytes.
    pub(super) const fn size_min(self) -> u64 {
        let (row, column) = (self.0 / COLUMNS, self.0 % COLUMNS);
        let units = if row == 0 { column } else { (COLUMNS + column) << (row - 1) };
        units as u64 * ALIGN
    }

    /// Returns the largest size of the bin, in bytes.
    pub(super) const fn size_max(self) -> u64 {
        if self.0 + 1 == BINS {
            u64::MAX - (ALIGN - 1)
        } else {
            Self(self.0 + 1).size_min() - ALIGN
        }
    }
}

/// The number of bins in one word of the bitmap.
const WORD: usize = u64::BITS as usize;
const WORDS: usize = BINS.div_ceil(WORD);

/// The heads of the lists, and two levels of bitmaps over them. 3.4 KiB.
#[derive(Debug)]
pub(super) struct Bins {
    heads: Box<[u32; BINS]>,
    /// A bit for each bin: 1 if the bin is not empty.
    words: [u64; WORDS],
    /// A bit for each word: 1 if the word is not 0.
    summary: u32,
}

impl Bins {
    pub(super) fn new() -> Self {
        Self { heads: Box::new([NONE; BINS]), words: [0; WORDS], summary: 0 }
    }

    /// Returns the first record of the bin's list.
    pub(super) fn head(&self, bin: Bin) -> u32 {
        self.heads[bin.0]
    }

    /// Makes `slot` the first record of the bin's list; `NONE` empties it.
    pub(super) fn set_head(&mut self, bin: Bin, slot: u32) {
        self.heads[bin.0] = slot;
        let (word, bit) = (bin.0 / WORD, bin.0 % WORD);
        let bits = self.words[word] & !(1 << bit) | u64::from(slot != NONE) << bit;
        self.words[word] = bits;
        self.summary = self.summary & !(1 << word) | u32::from(bits != 0) << word;
    }

    /// Returns the first bin from `bin` upward that is not empty.
    pub(super) fn at_or_above(&self, bin: Bin) -> Option<Bin> {
        let (word, bit) = (bin.0 / WORD, bin.0 % WORD);
        let here = self.words[word] & (u64::MAX << bit);
        if here != 0 {
            return Some(Bin(word * WORD + here.trailing_zeros() as usize));
        }
        let above = self.summary & (u32::MAX << (word + 1));
        if above == 0 {
            return None;
        }
        let word = above.trailing_zeros() as usize;
        Some(Bin(word * WORD + self.words[word].trailing_zeros() as usize))
    }

    /// Returns the first bin above `bin` that is not empty.
    pub(super) fn above(&self, bin: Bin) -> Option<Bin> {
        if bin.0 + 1 == BINS { None } else { self.at_or_above(Bin(bin.0 + 1)) }
    }

    /// Returns the first bin below `bin` that is not empty.
    pub(super) fn below(&self, bin: Bin) -> Option<Bin> {
        let (word, bit) = (bin.0 / WORD, bin.0 % WORD);
        let here = self.words[word] & ((1 << bit) - 1);
        if here != 0 {
            return Some(Bin(word * WORD + here.ilog2() as usize));
        }
        self.highest(self.summary & ((1 << word) - 1))
    }

    /// Returns the last bin that is not empty: the one with the largest blocks.
    pub(super) fn last(&self) -> Option<Bin> {
        self.highest(self.summary)
    }

    fn highest(&self, words: u32) -> Option<Bin> {
        let word = words.checked_ilog2()? as usize;
        Some(Bin(word * WORD + self.words[word].ilog2() as usize))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bins_tile_the_sizes_in_order() {
        assert_eq!(Bin(1).size_min(), ALIGN);
        for bin in 1..BINS {
            let bin = Bin(bin);
            assert_eq!(Bin::of(bin.size_min()), bin);
            assert_eq!(Bin::of(bin.size_max()), bin);
            assert_eq!(Bin::holding(bin.size_min()), Some(bin));
            if bin.0 + 1 < BINS {
                assert_eq!(Bin::of(bin.size_max() + ALIGN), Bin(bin.0 + 1));
                assert_eq!(Bin::holding(bin.size_min() + 1), Some(Bin(bin.0 + 1)));
            }
            let width = bin.size_max() - bin.size_min();
            assert!(width < bin.size_min().div_ceil(COLUMNS as u64).max(1), "{bin:?}: {width}");
        }
        assert_eq!(Bin::holding(u64::MAX), None);
    }

    #[test]
    fn the_bitmaps_find_what_a_walk_over_the_heads_finds() {
        let mut bins = Bins::new();
        let full = [0, 1, 15, 16, 17, 31, 32, 700, BINS - 1];
        for &bin in &full {
            assert_eq!(bins.head(Bin(bin)), NONE);
            bins.set_head(Bin(bin), 7);
        }
        for bin in 0..BINS {
            let above = full.iter().copied().find(|&at| at >= bin).map(Bin);
            let below = full.iter().copied().rev().find(|&at| at < bin).map(Bin);
            assert_eq!(bins.at_or_above(Bin(bin)), above, "{bin}");
            assert_eq!(bins.below(Bin(bin)), below, "{bin}");
        }
        for &bin in full.iter().rev() {
            assert_eq!(bins.last(), Some(Bin(bin)));
            bins.set_head(Bin(bin), NONE);
        }
        assert_eq!(bins.last(), None);
    }
}
