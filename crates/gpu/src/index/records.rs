//! Block records: their table, and the list that joins them in address order.
//!
//! The table is one piece, so that following a link is one load: with segments each operation took
//! a third longer. It grows by half, with one copy. It knows nothing of bins and ids.
//!
//! Invariants: record 0 is the sentinel, before the first block and after the last, and never free;
//! following `next` from it visits every block once in address order, and `prev` is the reverse; a
//! record is free, live or vacant, and the vacant ones are linked.

use std::ops::{Index, IndexMut};

use super::Span;

/// The sentinel's place, and "no record" in a link.
pub(super) const NONE: u32 = 0;

/// Records that the first table has room for.
const ROOM_MIN: usize = 128;

/// The generation of a free block that is in no bin yet, and of a record that describes nothing.
pub(super) const FREE: u64 = 0;

/// Below every generation of a live block, and above whatever the links of a free one read as.
pub(super) const LIVE: u64 = 1 << 63;

/// Records at most: their numbers leave the bit of [`LIVE`] alone.
const RECORDS_MAX: usize = 1 << 31;

/// One block. Two stand in a line of the cache, none across two.
#[derive(Clone, Copy, Debug)]
#[repr(C, align(32))]
pub(super) struct Record {
    pub(super) offset: u64,
    pub(super) size: u64,
    /// Neighbours in the bin, of a free block; of a live one both together are the generation of
    /// its name, `bin_next` its upper half. No block is both, and a line that is not read is won.
    pub(super) bin_prev: u32,
    pub(super) bin_next: u32,
    /// Neighbours in address order; of a vacant record, `next` is the next vacant one.
    pub(super) prev: u32,
    pub(super) next: u32,
}

const _: () = assert!(size_of::<Record>() == 32, "what BlockIndex says of its metadata");

impl Record {
    const VACANT: Self =
        Self { offset: 0, size: 0, bin_prev: NONE, bin_next: NONE, prev: NONE, next: NONE };

    pub(super) const fn span(&self) -> Span {
        Span { offset: self.offset, size: self.size }
    }

    pub(super) const fn is_free(&self) -> bool {
        (self.bin_next as u64) << u32::BITS < LIVE
    }

    /// The generation of a live block's name; of no live block's for every other record.
    pub(super) const fn generation(&self) -> u64 {
        (self.bin_next as u64) << u32::BITS | self.bin_prev as u64
    }

    /// Marks it as a live block's, or with [`FREE`] as free.
    #[expect(clippy::cast_possible_truncation, reason = "each half is what it says")]
    pub(super) const fn set_generation(&mut self, generation: u64) {
        self.bin_prev = generation as u32;
        self.bin_next = (generation >> u32::BITS) as u32;
    }
}

/// All records of one index.
#[derive(Debug)]
pub(super) struct Records {
    records: Vec<Record>,
    vacant: u32,
}

impl Records {
    /// With room for this many blocks, and for the sentinel.
    pub(super) fn new(blocks: usize) -> Self {
        // It reads as live, whatever its `bin_prev` is, and its offset is above all.
        let sentinel = Record { offset: u64::MAX, bin_next: u32::MAX, ..Record::VACANT };
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

    /// Bytes that the table takes.
    pub(super) const fn metadata(&self) -> usize {
        self.records.capacity() * size_of::<Record>()
    }

    /// Returns the record of that number, if there is one.
    pub(super) fn find(&self, slot: u32) -> Option<&Record> {
        self.records.get(slot as usize)
    }

    /// Every live block, in the order of the table, which is none.
    pub(super) fn live(&self) -> impl Iterator<Item = Span> {
        let records = self.records.iter().skip(1); // the sentinel reads as live
        records.filter(|record| !record.is_free()).map(Record::span)
    }

    /// Returns the records for a run of changes, with one lookup of their base.
    pub(super) fn table(&mut self) -> Table<'_> {
        Table(&mut self.records)
    }

    /// A record for a block between two neighbours, which are linked to it.
    pub(super) fn insert(&mut self, span: Span, generation: u64, prev: u32, next: u32) -> u32 {
        debug_assert!(span.size > 0 && self[prev].next == next && self[next].prev == prev);
        if self.vacant == NONE {
            self.vacant = self.add();
        }
        let slot = self.vacant;
        let mut table = self.table();
        table[prev].next = slot;
        table[next].prev = slot;
        let Span { offset, size } = span;
        let record = &mut table[slot];
        let vacant = record.next;
        *record = Record { offset, size, prev, next, ..Record::VACANT };
        record.set_generation(generation);
        self.vacant = vacant;
        slot
    }

    /// Takes a record out of the list of neighbours; it is vacant then.
    pub(super) fn remove(&mut self, slot: u32) {
        debug_assert_ne!(slot, NONE);
        let vacant = std::mem::replace(&mut self.vacant, slot);
        let mut table = self.table();
        let record = &mut table[slot];
        let (prev, next) = (record.prev, std::mem::replace(&mut record.next, vacant));
        record.set_generation(FREE);
        table[prev].next = next;
        table[next].prev = prev;
    }

    /// Two neighbours, the first before the second, change places.
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

    /// Two blocks of one size that are no neighbours change places.
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

    /// One more record that describes nothing.
    #[cold]
    #[expect(clippy::cast_possible_truncation, reason = "there are RECORDS_MAX at most")]
    fn add(&mut self) -> u32 {
        let count = self.records.len();
        if count == self.records.capacity() {
            self.records.reserve_exact(count / 2);
        }
        self.records.push(Record::VACANT);
        count as u32
    }
}

impl Index<u32> for Records {
    type Output = Record;

    fn index(&self, slot: u32) -> &Record {
        &self.records[slot as usize]
    }
}

impl IndexMut<u32> for Records {
    fn index_mut(&mut self, slot: u32) -> &mut Record {
        &mut self.records[slot as usize]
    }
}

/// All records, to be changed.
pub(super) struct Table<'a>(&'a mut [Record]);

impl Index<u32> for Table<'_> {
    type Output = Record;

    fn index(&self, slot: u32) -> &Record {
        &self.0[slot as usize]
    }
}

impl IndexMut<u32> for Table<'_> {
    fn index_mut(&mut self, slot: u32) -> &mut Record {
        &mut self.0[slot as usize]
    }
}
