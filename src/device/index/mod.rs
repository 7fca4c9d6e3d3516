//! The block index: which bytes of a range of offsets are free, found in a bounded number of steps.
//!
//! Pure arithmetic over 64-bit offsets: no pointer, no driver, no lock, no clock. Block records
//! stand apart from the memory they describe, so that the memory need not be there. Two-level
//! segregated fit (Masmano, Ripoll, Crespo, Real, "TLSF", ECRTS 2004): free blocks are filed in
//! bins by size, two bitmaps find the next bin that is not empty. Where plain TLSF rounds the
//! request up and so skips its own bin, this looks at a few blocks of it first.
//!
//! The arena stands on it; it serves as well for any fixed range that is not to be written to
//! while it is managed: a buffer on another device, a file, a range of numbers.
//!
//! ```
//! use lowtide::device::index::{BlockIndex, End, Request, StaleBlock};
//!
//! let mut pool = BlockIndex::new(64 << 20); // offsets from 0 to 64 MiB, all free
//! let request = Request { size: 1000, align: 256, end: End::Low };
//! let (id, span) = pool.take(request, |_| 0).ok_or("full")?;
//! assert_eq!((span.offset, span.size), (0, 1024)); // rounded up to 256 bytes
//! assert_eq!(pool.resize(id, 4096), Ok(Some(pool.span_of(id).map_err(|_| "stale")?)));
//! assert_eq!(pool.release(id).map(|span| span.size), Ok(4096));
//! assert_eq!(pool.release(id), Err(StaleBlock)); // a name is good once
//! # Ok::<(), &str>(())
//! ```
//!
//! Invariants: the blocks in address order tile `[0, span)`; no two free blocks touch;
//! `live + free = span`; every free block is in the bin of its size and in no other; no two live
//! blocks ever had the same name.

mod bins;
mod change;
mod find;
mod records;

use std::hint::select_unpredictable;
use std::num::NonZeroU64;

use bins::{Bin, Bins};
use records::{FREE, LIVE, NONE, Record, Records};

/// What every offset and every size is a multiple of, in bytes. 256: what `cuMemAlloc` aligns to.
pub const ALIGN: u64 = 256;

/// How many blocks of its bin a block is compared with to be filed by address. 3: each step reads
/// one more record, and without any there are three times the failures at 90 % load; from 4 on a
/// tenth fewer at most (docs/BENCHMARKING.md, measured by `benches/index`).
const STEPS_TO_FILE: u32 = 3;

/// A contiguous span of offsets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// Where it begins.
    pub offset: u64,
    /// How long it is.
    pub size: u64,
}

impl Span {
    /// The first offset after it.
    #[must_use]
    pub const fn end(self) -> u64 {
        self.offset + self.size
    }
}

/// An end of the range of offsets.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum End {
    /// Offset 0.
    Low,
    /// The highest offset.
    High,
}

/// What is asked for.
#[derive(Clone, Copy, Debug)]
pub struct Request {
    /// How many bytes; rounded up to a multiple of [`ALIGN`], 0 counts as 1.
    pub size: u64,
    /// What the block's offset is to be a multiple of: a power of two.
    pub align: u64,
    /// Where to: the block is cut from this end of its free block, and among places that are as
    /// good the one nearest to this end of the range is taken. Small blocks at one end and large
    /// ones at the other stand apart without a fixed share.
    pub end: End,
}

/// The name of one live block; never given twice by one index. Another index does not know it, and
/// may have a block of its own by that name.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct BlockId {
    /// Of the record; below 2^31.
    slot: u32,
    /// Of a live block, so that an `Option` of a name is no larger than a name.
    generation: NonZeroU64,
}

impl BlockId {
    /// The same name with a bit of the caller's own in it; not one for the index.
    pub(in crate::device) const fn marked(self, mark: bool) -> Self {
        Self { slot: self.slot & !MARK | if mark { MARK } else { 0 }, ..self }
    }

    /// The bit of the caller's own.
    pub(in crate::device) const fn mark(self) -> bool {
        self.slot & MARK != 0
    }
}

/// The bit that no number of a record has.
const MARK: u32 = 1 << 31;

/// Before the generation of the first block.
const ANCESTOR: NonZeroU64 = NonZeroU64::MIN.saturating_add(LIVE);

/// The name is of no live block: it was released before.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the block is not live: it was released before")]
pub struct StaleBlock;

/// Two blocks cannot change places.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ExchangeError {
    /// One of them is not live.
    #[error(transparent)]
    Stale(#[from] StaleBlock),
    /// They are of different sizes and do not adjoin.
    #[error("{left:?} and {right:?} are neither of one size nor neighbours")]
    Unlike {
        /// What the first spans.
        left: Span,
        /// What the second spans.
        right: Span,
    },
}

/// The blocks of one range of offsets.
///
/// Metadata: 32 bytes a block, live or free, whatever its size, 48 right after the table of them
/// grew, and 8 KiB for each index. The table grows by half when there are more blocks than it has
/// room for, and is then copied: 32 bytes a block, once. Where no call may take that long, give it
/// the room at first ([`BlockIndex::with_room`]).
#[derive(Debug)]
pub struct BlockIndex {
    span: u64,
    live: u64,
    records: Records,
    bins: Bins,
    generation: NonZeroU64,
}

impl BlockIndex {
    /// One free block over `[0, span)`.
    ///
    /// # Panics
    /// If `span` is not a multiple of [`ALIGN`].
    #[must_use]
    pub fn new(span: u64) -> Self {
        Self::with_room(span, 0)
    }

    /// The same, with room for this many blocks, live and free, before the table of them grows.
    ///
    /// # Panics
    /// If `span` is not a multiple of [`ALIGN`], and as `Vec::with_capacity`.
    #[must_use]
    pub fn with_room(span: u64, blocks: usize) -> Self {
        assert!(span.is_multiple_of(ALIGN), "{span} is not a multiple of {ALIGN}");
        let (records, bins) = (Records::new(blocks), Bins::new());
        let mut index = Self { span, live: 0, records, bins, generation: ANCESTOR };
        if span > 0 {
            let all = Span { offset: 0, size: span };
            let slot = index.records.insert(all, FREE, NONE, NONE);
            index.file(slot, all);
        }
        index
    }

    /// Makes a block live, or `None` where no free block that is looked at can hold it: never
    /// where one of at least `17/16 x (size + align)` is free.
    ///
    /// `cost` says what a place would cost beyond the bookkeeping, 0 for nothing. The cheapest
    /// place looked at is taken; among equals the one of the smallest bin; among those the one
    /// nearest to the request's end, as far as the bin's order tells. `cost` is asked 40 times at
    /// most, and no further once a place costs nothing; the rest is O(1).
    ///
    /// Where memory is given by the granule, a good cost is the number of granules that the place
    /// would be the first to touch: only its first and its last can be touched already.
    ///
    /// # Panics
    /// If the alignment is no power of two.
    pub fn take(
        &mut self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockId, Span)> {
        let wanted = self.rounded(request)?;
        let place = self.find(wanted, &cost)?;
        Some(self.settle_at(place, wanted))
    }

    /// As [`BlockIndex::take`], but looks at every free block that is large enough, from both of
    /// its ends: `None` only where none holds it, and no place that these blocks begin or end with
    /// is cheaper. O(free blocks), each asked for its cost twice: for when memory is short.
    ///
    /// # Panics
    /// If the alignment is no power of two.
    pub fn take_cheapest(
        &mut self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockId, Span)> {
        let wanted = self.rounded(request)?;
        let place = self.find_cheapest(wanted, &cost)?;
        Some(self.settle_at(place, wanted))
    }

    /// What [`BlockIndex::take_cheapest`] would cost.
    pub(in crate::device) fn cheapest(
        &self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<u64> {
        Some(self.find_cheapest(self.rounded(request)?, &cost)?.cost)
    }

    /// The request in whole units, where there is room for one more block.
    #[inline]
    fn rounded(&self, request: Request) -> Option<Request> {
        assert!(request.align.is_power_of_two(), "{} is no power of two", request.align);
        let size = request.size.max(1).checked_next_multiple_of(ALIGN)?;
        let wanted = Request { size, align: request.align.max(ALIGN), ..request };
        self.records.have_room().then_some(wanted)
    }

    #[inline]
    fn settle_at(&mut self, place: find::Place, wanted: Request) -> (BlockId, Span) {
        let span = Span { offset: place.start, size: wanted.size };
        debug_assert!(span.offset.is_multiple_of(wanted.align));
        (self.carve(place.slot, place.bin, span), span)
    }

    /// Makes a live block free and joins it with its free neighbours; says what it spanned. O(1).
    ///
    /// # Errors
    /// [`StaleBlock`].
    pub fn release(&mut self, id: BlockId) -> Result<Span, StaleBlock> {
        let Record { offset, size, prev, next, .. } = *self.live_record(id)?;
        let span = Span { offset, size };
        self.live -= size;
        let (before, after) = (self.records[prev], self.records[next]);
        match (before.is_free(), after.is_free()) {
            (false, false) => self.file(id.slot, span),
            (true, false) => {
                self.records.remove(id.slot);
                let size = before.size + span.size;
                self.reshape(prev, Bin::of(before.size), Span { size, ..before.span() });
            }
            (false, true) => {
                self.records.remove(id.slot);
                let size = span.size + after.size;
                self.reshape(next, Bin::of(after.size), Span { offset: span.offset, size });
            }
            (true, true) => {
                self.unfile(next);
                self.records.remove(next);
                self.records.remove(id.slot);
                let size = before.size + span.size + after.size;
                self.reshape(prev, Bin::of(before.size), Span { size, ..before.span() });
            }
        }
        Ok(span)
    }

    /// What a live block spans. O(1).
    ///
    /// # Errors
    /// [`StaleBlock`].
    pub fn span_of(&self, id: BlockId) -> Result<Span, StaleBlock> {
        self.live_record(id).map(Record::span)
    }

    /// Bytes of all live blocks.
    #[must_use]
    pub const fn live(&self) -> u64 {
        self.live
    }

    /// How many bytes the index manages.
    #[must_use]
    pub const fn span(&self) -> u64 {
        self.span
    }

    /// Bytes that the index itself takes, beside its own fields. It grows with the largest number
    /// of blocks, free and live, that there were.
    #[must_use]
    pub const fn metadata(&self) -> usize {
        self.records.metadata() + self.bins.metadata()
    }

    /// The largest figure that `measure` finds for a free block, where it never says more than
    /// the block's size: bins that cannot beat what is found are not looked at. At worst every
    /// free block is measured.
    pub fn largest(&self, measure: impl Fn(Span) -> u64) -> u64 {
        let mut best = 0;
        let mut bin = self.bins.last();
        while let Some(at) = bin {
            if at.size_max() <= best {
                break;
            }
            for slot in self.filed(at) {
                best = best.max(measure(self.records[slot].span()));
            }
            bin = self.bins.below(at);
        }
        best
    }

    /// Every block in address order, and the name of each that is live.
    pub fn blocks(&self) -> impl Iterator<Item = (Span, Option<BlockId>)> {
        let mut at = NONE;
        std::iter::from_fn(move || {
            let slot = self.records[at].next;
            at = slot;
            let record = self.records[slot];
            let generation = NonZeroU64::new(record.generation()).filter(|_| !record.is_free());
            let name = generation.map(|generation| BlockId { slot, generation });
            (slot != NONE).then(|| (record.span(), name))
        })
    }

    /// Every live block, in no order: a walk through memory as it lies, which takes a part of the
    /// time of [`BlockIndex::blocks`].
    pub fn live_blocks_unordered(&self) -> impl Iterator<Item = Span> {
        self.records.live()
    }

    /// Walks everything and checks the invariants; for tests.
    ///
    /// # Panics
    /// Where one is broken.
    #[doc(hidden)]
    pub fn validate(&self) {
        let (mut end, mut live, mut free_blocks, mut after_free) = (0, 0, 0, false);
        let mut at = NONE;
        for (span, name) in self.blocks() {
            assert_eq!(span.offset, end, "blocks tile the range");
            assert!(span.size > 0 && span.size.is_multiple_of(ALIGN));
            assert!(name.is_some() || !after_free, "two free blocks touch at {end}");
            let slot = self.records[at].next;
            assert_eq!(self.records[slot].prev, at, "the list reads the same backwards");
            at = slot;
            end = span.end();
            live += if name.is_some() { span.size } else { 0 };
            free_blocks += usize::from(name.is_none());
            after_free = name.is_none();
        }
        assert_eq!(self.records[NONE].prev, at);
        assert_eq!((end, live), (self.span, self.live));
        let mut filed = 0;
        let mut bin = self.bins.last();
        while let Some(at) = bin {
            for slot in self.filed(at) {
                let record = &self.records[slot];
                assert!(slot != NONE && record.is_free());
                assert_eq!(Bin::of(record.size), at, "{} is in a wrong bin", record.size);
                filed += 1;
            }
            bin = self.bins.below(at);
        }
        assert_eq!(filed, free_blocks, "every free block is filed once");
    }

    fn live_record(&self, id: BlockId) -> Result<&Record, StaleBlock> {
        match self.records.find(id.slot) {
            Some(record) if record.generation() == id.generation.get() => Ok(record),
            _ => Err(StaleBlock),
        }
    }

    /// Makes a span of a free block of that bin live, under a new name; what is left on each side
    /// stays free.
    #[inline(always)]
    fn carve(&mut self, slot: u32, bin: Bin, span: Span) -> BlockId {
        self.generation = self.generation.saturating_add(1);
        self.live += span.size;
        let generation = self.generation;
        let Record { offset, size, prev, next, .. } = self.records[slot];
        let (front, back) = (span.offset - offset, offset + size - span.end());
        if front == 0 && back == 0 {
            self.unfile_from(bin, slot);
            self.records[slot].set_generation(generation.get());
            return BlockId { slot, generation };
        }
        // What is left keeps the record, so that it need not leave a bin that still is its own.
        let rest = Span { offset: span.end(), size: back };
        if front == 0 {
            self.reshape(slot, bin, rest);
            let slot = self.records.insert(span, generation.get(), prev, slot);
            return BlockId { slot, generation };
        }
        self.reshape(slot, bin, Span { offset, size: front });
        let cut = self.records.insert(span, generation.get(), slot, next);
        if back > 0 {
            let after = self.records.insert(rest, FREE, cut, next);
            self.file(after, rest);
        }
        BlockId { slot: cut, generation }
    }

    /// Gives a free block that is in bin `was` other ends, within what it and its neighbours
    /// spanned, and files it anew where its bin is another.
    fn reshape(&mut self, slot: u32, was: Bin, span: Span) {
        let is = Bin::of(span.size);
        if was == is {
            // Free blocks lie to each other as they did: its place in the bin is right.
            let record = &mut self.records[slot];
            (record.offset, record.size) = (span.offset, span.size);
        } else {
            self.unfile_from(was, slot);
            self.file_in(is, slot, span);
        }
    }

    /// Puts a block into the bin of its size, as a free one of this span.
    fn file(&mut self, slot: u32, span: Span) {
        self.file_in(Bin::of(span.size), slot, span);
    }

    /// The same where the bin is known. It goes before blocks of higher addresses, as far as it
    /// looks.
    #[inline]
    fn file_in(&mut self, bin: Bin, slot: u32, span: Span) {
        let mut table = self.records.table();
        let (mut before, mut after) = (NONE, self.bins.head(bin));
        for _ in 0..STEPS_TO_FILE {
            let other = &table[after];
            // The sentinel's offset is above all. Chosen and not branched upon, here a branch is
            // taken as often as not; once it is not, the later steps choose the same again.
            let passes = other.offset < span.offset;
            before = select_unpredictable(passes, after, before);
            after = select_unpredictable(passes, other.bin_next, after);
        }
        table[after].bin_prev = slot; // of nobody where it is the last
        let record = &mut table[slot];
        (record.offset, record.size) = (span.offset, span.size);
        (record.bin_prev, record.bin_next) = (before, after);
        self.lead(bin, before, slot);
    }

    /// Takes a free block out of its bin.
    fn unfile(&mut self, slot: u32) {
        self.unfile_from(Bin::of(self.records[slot].size), slot);
    }

    /// Takes a free block out of the bin in which it is.
    #[inline(always)]
    fn unfile_from(&mut self, bin: Bin, slot: u32) {
        let mut table = self.records.table();
        let Record { bin_prev, bin_next, .. } = table[slot];
        table[bin_next].bin_prev = bin_prev; // of nobody where it was the last
        self.lead(bin, bin_prev, bin_next);
    }

    /// Lets a block of the bin, or where there is none its head, lead to the next one. Chosen and
    /// not branched upon, as in [`BlockIndex::file_in`].
    #[inline(always)]
    fn lead(&mut self, bin: Bin, from: u32, to: u32) {
        let first = from == NONE;
        self.bins.set_head(bin, select_unpredictable(first, to, self.bins.head(bin)));
        let link = &mut self.records[from].bin_next;
        // The sentinel's stays: it says that it is not free.
        *link = select_unpredictable(first, *link, to);
    }

    /// The blocks of a bin, from its head.
    fn filed(&self, bin: Bin) -> impl Iterator<Item = u32> {
        let mut at = self.bins.head(bin);
        std::iter::from_fn(move || {
            let slot = at;
            at = self.records[slot].bin_next;
            (slot != NONE).then_some(slot)
        })
    }
}
