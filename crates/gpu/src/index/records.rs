//! Block records: their table, and the list that joins them in address order.
//!
//! The table is one allocation, so that following a link is one load: with several, each operation
//! took a third longer. The table grows by half, with one copy. This module knows no bins and ids.
//!
//! Invariants: record 0 is the sentinel, before the first block and after the last, and never free;
//! following `next` from the sentinel visits every block once in address order, and `prev` is the
//! reverse; a record is free, live or vacant, and the vacant ones are linked.

use std::ops::{Index, IndexMut};

use super::Span;

/// The number of the sentinel; in a link: "no record".
pub(super) const NONE: u32 = 0;

/// The number of records that the first table has room for.
const ROOM_MIN: usize = 128;

/// The generation of a free block that is not in a bin yet, and of a vacant record.
pub(super) const FREE: u64 = 0;

/// Below every generation of a live block, and above any value that the links of a free block read
/// as.
pub(super) const LIVE: u64 = 1 << 63;

/// The maximum number of records: their numbers use neither the bit of [`LIVE`] nor those of marks.
const RECORDS_MAX: usize = 1 << 30;

/// One block. Two records fit in one cache line, and none crosses two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct BlockRecord {
    pub(super) offset: u64,
    pub(super) size: u64,
    /// For a free block, its neighbours in the bin. For a live block, both fields together are the
    /// generation of its id, with `bin_next` as the upper half. No block needs both, so a record
    /// stays small.
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    /// The neighbours in address order; for a vacant record, `next` is the next vacant one.
    pub(super) prev: u32,
    pub(super) next: u32,
}

const _: () = assert!(size_of::<BlockRecord>() == 32, "what BlockIndex says of its metadata");

impl BlockRecord {
    const VACANT: Self =
        Self { offset: 0, size: 0, bin_prev: NONE, bin_next: NONE, prev: NONE, next: NONE };

    pub(super) const fn span(&self) -> Span {
        Span { offset: self.offset, size: self.size }
    }

    pub(super) const fn is_free(&self) -> bool {
        (self.bin_next as u64) << u32::BITS < LIVE
    }

    /// Returns the generation of a live block's id; for any other record, a value below [`LIVE`].
    pub(super) const fn generation(&self) -> u64 {
        (self.bin_next as u64) << u32::BITS | self.bin_prev as u64
    }

    /// Marks the record as that of a live block, or with [`FREE`] as free.
    #[expect(clippy::cast_possible_truncation, reason = "each half is what it says")]
    pub(super) const fn set_generation(&mut self, generation: u64) {
        self.bin_prev = generation as u32;
        self.bin_next = (generation >> u32::BITS) as u32;
    }
}

/// All records of one index.
#[derive(Debug)]
pub(super) struct BlockRecords {
    records: Vec<BlockRecord>,
    vacant: u32,
}

impl BlockRecords {
    /// Creates a table with room for this many blocks, and for the sentinel.
    pub(super) fn new(blocks: usize) -> Self {
        // The sentinel reads as live for any value of `bin_prev`, and its offset is above all
        // others.
        let sentinel = BlockRecord { offset: u64::MAX, bin_next: u32::MAX, ..BlockRecord::VACANT };
        let mut records = Self {
            records: Vec::with_capacity(blocks.saturating_add(1).max(ROOM_MIN)),
            vacant: NONE,
        };
        records.records.push(sentinel);
        records
    }

    /// Returns `true` if two more records can be made, the maximum of one operation.
    pub(super) fn have_room(&self) -> bool {
        self.records.len() < RECORDS_MAX - 2
    }

    /// Returns the bytes of the table.
    pub(super) const fn metadata(&self) -> usize {
        self.records.capacity() * size_of::<BlockRecord>()
    }

    /// Returns the record of this number, if there is one.
    pub(super) fn find(&self, slot: u32) -> Option<&BlockRecord> {
        self.records.get(slot as usize)
    }

    /// Returns every live block, in the order of the table.
    pub(super) fn live(&self) -> impl Iterator<Item = Span> {
        let records = self.records.iter().skip(1); // the sentinel reads as live
        records.filter(|record| !record.is_free()).map(BlockRecord::span)
    }

    /// Creates a record for a block between two neighbours, and links them to it.
    pub(super) fn insert(&mut self, span: Span, generation: u64, prev: u32, next: u32) -> u32 {
        debug_assert!(span.size > 0 && self[prev].next == next && self[next].prev == prev);
        if self.vacant == NONE {
            self.vacant = self.add();
        }
        let slot = self.vacant;
        self[prev].next = slot;
        self[next].prev = slot;
        let Span { offset, size } = span;
        let record = &mut self[slot];
        let vacant = record.next;
        *record = BlockRecord { offset, size, prev, next, ..BlockRecord::VACANT };
        record.set_generation(generation);
        self.vacant = vacant;
        slot
    }

    /// Takes a record out of the list of neighbours. It is vacant then.
    pub(super) fn remove(&mut self, slot: u32) {
        debug_assert_ne!(slot, NONE);
        let vacant = std::mem::replace(&mut self.vacant, slot);
        let record = &mut self[slot];
        let (prev, next) = (record.prev, std::mem::replace(&mut record.next, vacant));
        record.set_generation(FREE);
        self[prev].next = next;
        self[next].prev = prev;
    }

    /// Exchanges two neighbours, of which the first is before the second.
    pub(super) fn swap_neighbours(&mut self, first: u32, second: u32) {
        debug_assert_eq!(self[first].next, second);
        let (before, after) = (self[first].prev, self[second].next);
        self[second].offset = self[first].offset;
        self[first].offset = self[second].offset + self[second].size;
        (self[second].prev, self[second].next) = (before, first);
        (self[first].prev, self[first].next) = (second, after);
        self[before].next = second;
        self[after].prev = first;
    }

    /// Exchanges two blocks of equal size that are not neighbours.
    pub(super) fn swap_equals(&mut self, one: u32, other: u32) {
        let (mut left, mut right) = (self[one], self[other]);
        debug_assert!(left.size == right.size && left.next != other && right.next != one);
        std::mem::swap(&mut left.offset, &mut right.offset);
        std::mem::swap(&mut left.prev, &mut right.prev);
        std::mem::swap(&mut left.next, &mut right.next);
        for (slot, record) in [(one, left), (other, right)] {
            self[slot] = record;
            self[record.prev].next = slot;
            self[record.next].prev = slot;
        }
    }

    /// Adds a vacant record.
    #[cold]
    #[expect(clippy::cast_possible_truncation, reason = "there are RECORDS_MAX at most")]
    fn add(&mut self) -> u32 {
        let count = self.records.len();
        if count == self.records.capacity() {
            self.records.reserve_exact(count / 2);
        }
        self.records.push(BlockRecord::VACANT);
        count as u32
    }
}

impl Index<u32> for BlockRecords {
    type Output = BlockRecord;

    fn index(&self, slot: u32) -> &BlockRecord {
        &self.records[slot as usize]
    }
}

impl IndexMut<u32> for BlockRecords {
    fn index_mut(&mut self, slot: u32) -> &mut BlockRecord {
        &mut self.records[slot as usize]
    }
}
