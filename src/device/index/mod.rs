//! The block index: which bytes of a range of offsets are free, found in a bounded number of steps.
//!
//! Pure arithmetic over 64-bit offsets: no pointer, no driver, no lock, no clock. Block records
//! stand apart from the memory they describe, so that the memory need not be there. Two-level
//! segregated fit (Masmano, Ripoll, Crespo, Real, "TLSF", ECRTS 2004): free blocks are filed in
//! bins by size, two bitmaps find the next bin that is not empty. Where plain TLSF rounds the
//! request up and so skips its own bin, this looks at a few blocks of it first.
//!
//! A block is given back by its [`BlockId`], which no other block ever has: a second or stale
//! release is an error.
//!
//! Invariants: the blocks in address order tile `[0, span)`; no two free blocks touch;
//! `live + free = span`; every free block is in the bin of its size and in no other.

mod bins;

use bins::{Bin, Bins};

/// What every offset and every size is a multiple of, in bytes. 256: what `cuMemAlloc` aligns to.
pub(super) const ALIGN: u64 = 256;

/// How many blocks of one bin are looked at. A guess, to be measured against traces.
const LOOKS_PER_BIN: usize = 8;

/// How many bins are looked through for a block that costs nothing. A guess, to be measured.
const BINS_LOOKED: usize = 4;

/// "No record" in a link.
const NONE: u32 = u32::MAX;

/// A contiguous span of offsets, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) size: u64,
}

impl Span {
    pub(super) const fn end(self) -> u64 {
        self.offset + self.size
    }
}

/// What is asked for: so many bytes, at a multiple of `align` (a power of two).
#[derive(Clone, Copy, Debug)]
pub(super) struct Request {
    pub(super) size: u64,
    pub(super) align: u64,
}

/// The name of one live block; never given twice by one index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlockId {
    slot: u32,
    generation: u64,
}

/// A release of what is no live block: it was released before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StaleBlock;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// The record describes nothing; `next` links the vacant records.
    Vacant,
    Free,
    Live,
}

#[derive(Clone, Copy, Debug)]
struct Record {
    offset: u64,
    size: u64,
    /// Of the last time this record became live.
    generation: u64,
    /// Neighbours in address order.
    prev: u32,
    next: u32,
    /// Neighbours in the bin, of a free block.
    bin_prev: u32,
    bin_next: u32,
    state: State,
}

const _: () = assert!(size_of::<Record>() == 48, "what BlockIndex says of its metadata");

/// A place for a request, in one free block.
#[derive(Clone, Copy)]
struct Place {
    slot: u32,
    start: u64,
    cost: u64,
}

/// The blocks of one range of offsets. Metadata: 48 bytes a block, whatever its size.
#[derive(Debug)]
pub(super) struct BlockIndex {
    span: u64,
    live: u64,
    records: Vec<Record>,
    vacant: u32,
    first: u32,
    bins: Bins,
    generation: u64,
}

impl BlockIndex {
    /// One free block over `[0, span)`.
    ///
    /// # Panics
    /// If `span` is not a multiple of [`ALIGN`].
    pub(super) fn new(span: u64) -> Self {
        assert!(span.is_multiple_of(ALIGN), "{span} is not a multiple of {ALIGN}");
        let mut index = Self {
            span,
            live: 0,
            records: Vec::new(),
            vacant: NONE,
            first: NONE,
            bins: Bins::new(),
            generation: 0,
        };
        if span > 0 {
            let all = Span { offset: 0, size: span };
            index.first = index.record(all, NONE, NONE);
            index.file(index.first);
        }
        index
    }

    /// Makes a block live, or `None` where no free block that is looked at can hold it: never
    /// where one of at least `33/32 x (size + align)` is free.
    ///
    /// `cost` says what a place would cost beyond the bookkeeping; the cheapest place looked at is
    /// taken, and among equals the one of the smallest bin, then the lowest. It is asked at most
    /// `(BINS_LOOKED + 1) x LOOKS_PER_BIN` times; the rest is O(1).
    pub(super) fn take(
        &mut self,
        request: Request,
        cost: impl Fn(Span) -> u64,
    ) -> Option<(BlockId, Span)> {
        assert!(request.align.is_power_of_two(), "{} is no power of two", request.align);
        let size = request.size.max(1).checked_next_multiple_of(ALIGN)?;
        let wanted = Request { size, align: request.align.max(ALIGN) };
        // Two splits make two records at most; releases make none.
        if self.records.len() >= NONE as usize - 2 {
            return None;
        }
        let place = self.find(wanted, &cost)?;
        let slot = self.carve(place, size);
        self.live += size;
        self.generation += 1;
        let record = &mut self.records[slot as usize];
        record.state = State::Live;
        record.generation = self.generation;
        let span = Span { offset: record.offset, size: record.size };
        debug_assert_eq!((span.size, span.offset % wanted.align), (size, 0));
        Some((BlockId { slot, generation: self.generation }, span))
    }

    /// Makes a live block free and joins it with its free neighbours; says what it spanned. O(1).
    pub(super) fn release(&mut self, id: BlockId) -> Result<Span, StaleBlock> {
        let span = self.span_of(id)?;
        self.live -= span.size;
        let mut slot = id.slot;
        self.records[slot as usize].state = State::Free;
        let next = self.records[slot as usize].next;
        if self.is_free(next) {
            self.unfile(next);
            self.absorb_next(slot);
        }
        let prev = self.records[slot as usize].prev;
        if self.is_free(prev) {
            self.unfile(prev);
            self.absorb_next(prev);
            slot = prev;
        }
        self.file(slot);
        Ok(span)
    }

    /// What a live block spans. O(1).
    pub(super) fn span_of(&self, id: BlockId) -> Result<Span, StaleBlock> {
        match self.records.get(id.slot as usize) {
            Some(record) if record.state == State::Live && record.generation == id.generation => {
                Ok(Span { offset: record.offset, size: record.size })
            }
            _ => Err(StaleBlock),
        }
    }

    /// Bytes of all live blocks.
    pub(super) const fn live(&self) -> u64 {
        self.live
    }

    /// The largest figure that `measure` finds for a free block, where it never says more than
    /// the block's size: bins that cannot beat what is found are not looked at. At worst every
    /// free block is measured.
    pub(super) fn largest(&self, measure: impl Fn(Span) -> u64) -> u64 {
        let mut best = 0;
        let mut bin = self.bins.last();
        while let Some(at) = bin {
            if at.size_max() <= best {
                break;
            }
            for slot in self.filed(at) {
                let record = &self.records[slot as usize];
                best = best.max(measure(Span { offset: record.offset, size: record.size }));
            }
            bin = self.bins.below(at);
        }
        best
    }

    /// Every block in address order, and whether it is live.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Span, bool)> {
        let mut at = self.first;
        std::iter::from_fn(move || {
            let record = self.records.get(at as usize)?;
            at = record.next;
            let span = Span { offset: record.offset, size: record.size };
            Some((span, record.state == State::Live))
        })
    }

    /// Walks everything and checks the invariants.
    ///
    /// # Panics
    /// Where one is broken.
    pub(super) fn validate(&self) {
        let (mut end, mut live, mut free_blocks, mut after_free) = (0, 0, 0, false);
        for (span, is_live) in self.blocks() {
            assert_eq!(span.offset, end, "blocks tile the range");
            assert!(span.size > 0 && span.size.is_multiple_of(ALIGN));
            assert!(is_live || !after_free, "two free blocks touch at {end}");
            end = span.end();
            live += if is_live { span.size } else { 0 };
            free_blocks += usize::from(!is_live);
            after_free = !is_live;
        }
        assert_eq!((end, live), (self.span, self.live));
        let mut filed = 0;
        let mut bin = self.bins.last();
        while let Some(at) = bin {
            for slot in self.filed(at) {
                let record = &self.records[slot as usize];
                assert_eq!(record.state, State::Free);
                assert_eq!(Bin::of(record.size), at, "{} is in a wrong bin", record.size);
                filed += 1;
            }
            bin = self.bins.below(at);
        }
        assert_eq!(filed, free_blocks, "every free block is filed once");
    }

    fn find(&self, wanted: Request, cost: &impl Fn(Span) -> u64) -> Option<Place> {
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
        for slot in self.filed(bin).take(LOOKS_PER_BIN) {
            let record = &self.records[slot as usize];
            let end = record.offset + record.size;
            let Some(start) = record.offset.checked_next_multiple_of(wanted.align) else {
                continue;
            };
            if start > end || end - start < wanted.size {
                continue;
            }
            let cost = cost(Span { offset: start, size: wanted.size });
            let better = match *best {
                None => true,
                Some(place) if place.cost == cost => cost < before && start < place.start,
                Some(place) => cost < place.cost,
            };
            if better {
                *best = Some(Place { slot, start, cost });
            }
        }
    }

    /// Cuts `size` bytes at the place out of its free block; what is left on each side stays free.
    fn carve(&mut self, place: Place, size: u64) -> u32 {
        self.unfile(place.slot);
        let mut slot = place.slot;
        let front = place.start - self.records[slot as usize].offset;
        if front > 0 {
            let rest = self.split(slot, front);
            self.file(slot);
            slot = rest;
        }
        if self.records[slot as usize].size > size {
            let rest = self.split(slot, size);
            self.file(rest);
        }
        slot
    }

    /// Cuts a block in two; the first keeps the record and `size` bytes, the second is returned.
    fn split(&mut self, slot: u32, size: u64) -> u32 {
        let Record { offset, size: whole, next, .. } = self.records[slot as usize];
        debug_assert!(0 < size && size < whole);
        let rest = Span { offset: offset + size, size: whole - size };
        let second = self.record(rest, slot, next);
        self.records[slot as usize].size = size;
        self.records[slot as usize].next = second;
        if let Some(after) = self.records.get_mut(next as usize) {
            after.prev = second;
        }
        second
    }

    /// Joins a block with the one after it, whose record becomes vacant.
    fn absorb_next(&mut self, slot: u32) {
        let gone = self.records[slot as usize].next;
        let Record { size, next, .. } = self.records[gone as usize];
        self.records[slot as usize].size += size;
        self.records[slot as usize].next = next;
        if let Some(after) = self.records.get_mut(next as usize) {
            after.prev = slot;
        }
        self.records[gone as usize].state = State::Vacant;
        self.records[gone as usize].next = self.vacant;
        self.vacant = gone;
    }

    /// A record for a free block, not filed yet.
    fn record(&mut self, span: Span, prev: u32, next: u32) -> u32 {
        let record = Record {
            offset: span.offset,
            size: span.size,
            generation: 0,
            prev,
            next,
            bin_prev: NONE,
            bin_next: NONE,
            state: State::Free,
        };
        if let Some(vacant) = self.records.get_mut(self.vacant as usize) {
            let slot = std::mem::replace(&mut self.vacant, vacant.next);
            *vacant = record;
            return slot;
        }
        self.records.push(record);
        u32::try_from(self.records.len() - 1).unwrap_or(NONE)
    }

    fn is_free(&self, slot: u32) -> bool {
        self.records.get(slot as usize).is_some_and(|record| record.state == State::Free)
    }

    /// Puts a free block at the head of its bin.
    fn file(&mut self, slot: u32) {
        let bin = Bin::of(self.records[slot as usize].size);
        let head = self.bins.push(bin, slot);
        self.records[slot as usize].bin_prev = NONE;
        self.records[slot as usize].bin_next = head;
        if let Some(second) = self.records.get_mut(head as usize) {
            second.bin_prev = slot;
        }
    }

    /// Takes a free block out of its bin.
    fn unfile(&mut self, slot: u32) {
        let Record { size, bin_prev, bin_next, .. } = self.records[slot as usize];
        if let Some(after) = self.records.get_mut(bin_next as usize) {
            after.bin_prev = bin_prev;
        }
        match self.records.get_mut(bin_prev as usize) {
            Some(before) => before.bin_next = bin_next,
            None => self.bins.set_head(Bin::of(size), bin_next),
        }
    }

    /// The blocks of a bin, from its head.
    fn filed(&self, bin: Bin) -> impl Iterator<Item = u32> {
        let mut at = self.bins.head(bin);
        std::iter::from_fn(move || {
            let slot = at;
            at = self.records.get(slot as usize)?.bin_next;
            Some(slot)
        })
    }
}

#[cfg(test)]
mod tests;
