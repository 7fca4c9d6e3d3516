//! Address space of the simulated device, and the physical handles mapped in it.
//!
//! Reservations are placed at the lowest addresses that fit, so that an address given up is soon
//! given again. A handle lives as long as its one mapping. This file knows no stream and raises no
//! error of a driver: it says what is in the way, and its caller says what that means.
//!
//! Invariant: mappings do not overlap and lie in reservations; `committed` is the sum of their
//! sizes, `reserved` that of the reservations, `committed <= reserved`.

use std::collections::BTreeMap;

use super::sparse::{PAGE, Sparse, index};
use crate::bytes::ByteSize;

/// A part of the address space.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Range {
    pub(super) at: u64,
    pub(super) size: u64,
}

impl Range {
    /// Its end; held at the last address.
    pub(super) const fn end(self) -> u64 {
        self.at.saturating_add(self.size)
    }

    pub(super) const fn overlaps(self, other: Self) -> bool {
        self.at < other.end() && other.at < self.end()
    }

    const fn holds(self, other: Self) -> bool {
        self.at <= other.at && other.end() <= self.end()
    }
}

/// What is in the way of an unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// There is nothing mapped at this address.
    Bare(u64),
    /// This mapping lies in the range in part only.
    Part(Range),
}

#[derive(Debug)]
struct Mapping {
    size: u64,
    /// A new mapping has none.
    access: bool,
    bytes: Sparse,
}

/// The device's memory as its user sees it.
#[derive(Debug)]
pub(super) struct Memory {
    space: Range,
    reservations: BTreeMap<u64, u64>,
    mappings: BTreeMap<u64, Mapping>,
    reserved: u64,
    committed: u64,
}

impl Memory {
    pub(super) const fn new(space: Range) -> Self {
        Self {
            space,
            reservations: BTreeMap::new(),
            mappings: BTreeMap::new(),
            reserved: 0,
            committed: 0,
        }
    }

    pub(super) const fn reserved(&self) -> ByteSize {
        ByteSize::new(self.reserved)
    }

    pub(super) const fn committed(&self) -> ByteSize {
        ByteSize::new(self.committed)
    }

    pub(super) fn reservations(&self) -> usize {
        self.reservations.len()
    }

    pub(super) fn handles(&self) -> usize {
        self.mappings.len()
    }

    /// Takes the lowest gap that fits. Cost: O(reservations).
    pub(super) fn reserve(&mut self, size: u64) -> Option<u64> {
        let mut at = self.space.at;
        for (start, length) in &self.reservations {
            if start - at >= size {
                break;
            }
            at = start + length;
        }
        if self.space.end() - at < size {
            return None;
        }
        self.reservations.insert(at, size);
        self.reserved += size;
        Some(at)
    }

    /// Whether the range lies in one reservation.
    pub(super) fn is_reserved(&self, range: Range) -> bool {
        let before = self.reservations.range(..=range.at).next_back();
        before.is_some_and(|(&at, &size)| Range { at, size }.holds(range))
    }

    /// Whether the range is a reservation, whole.
    pub(super) fn is_whole_reservation(&self, range: Range) -> bool {
        self.reservations.get(&range.at) == Some(&range.size)
    }

    /// Gives a whole, bare reservation back.
    pub(super) fn unreserve(&mut self, range: Range) {
        debug_assert!(self.is_whole_reservation(range) && !self.is_mapped_anywhere(range));
        if let Some(size) = self.reservations.remove(&range.at) {
            self.reserved -= size;
        }
    }

    /// Whether anything in the range is mapped.
    pub(super) fn is_mapped_anywhere(&self, range: Range) -> bool {
        self.mappings_in(range).next().is_some()
    }

    /// Puts a new physical handle behind a bare range; nothing may touch it yet.
    pub(super) fn map(&mut self, range: Range) {
        debug_assert!(self.is_reserved(range) && !self.is_mapped_anywhere(range));
        let bytes = Sparse::new(ByteSize::new(range.size));
        self.mappings.insert(range.at, Mapping { size: range.size, access: false, bytes });
        self.committed += range.size;
    }

    /// Lets work touch a range of whole mappings.
    pub(super) fn set_access(&mut self, range: Range) {
        for (_, mapping) in self.mappings.range_mut(range.at..range.end()) {
            mapping.access = true;
        }
    }

    /// How many mappings make up the range, all of them whole and without a hole.
    pub(super) fn whole_mappings(&self, range: Range) -> Result<u64, Obstacle> {
        let (mut at, mut count) = (range.at, 0);
        for mapping in self.mappings_in(range) {
            if !range.holds(mapping) {
                return Err(Obstacle::Part(mapping));
            }
            if mapping.at != at {
                return Err(Obstacle::Bare(at));
            }
            at = mapping.end();
            count += 1;
        }
        if at == range.end() { Ok(count) } else { Err(Obstacle::Bare(at)) }
    }

    /// Takes the handles behind a range of whole mappings away.
    pub(super) fn unmap(&mut self, range: Range) {
        let whole: Vec<_> = self.mappings_in(range).collect();
        for mapping in whole {
            self.mappings.remove(&mapping.at);
            self.committed -= mapping.size;
        }
    }

    /// How large the handles behind a range of whole mappings are, in order.
    pub(super) fn handles_in(&self, range: Range) -> Vec<u64> {
        self.mappings_in(range).map(|mapping| mapping.size).collect()
    }

    /// Moves the handles behind a range of whole mappings, with what they hold, to a bare range of
    /// its size.
    pub(super) fn remap(&mut self, from: Range, to: Range) {
        debug_assert!(self.is_reserved(to) && !self.is_mapped_anywhere(to));
        let whole: Vec<_> = self.mappings_in(from).collect();
        for Range { at, .. } in whole {
            if let Some(mapping) = self.mappings.remove(&at) {
                self.mappings.insert(to.at + (at - from.at), mapping);
            }
        }
    }

    /// Loses the contents of a range of whole mappings.
    pub(super) fn wipe(&mut self, range: Range) {
        for (_, mapping) in self.mappings.range_mut(range.at..range.end()) {
            mapping.bytes.wipe();
        }
    }

    /// The first address of the range that work may not touch.
    pub(super) fn first_bare(&self, range: Range) -> Option<u64> {
        let mut at = range.at;
        while at < range.end() {
            match self.mappings.range(..=at).next_back() {
                Some((start, mapping)) if at - start < mapping.size && mapping.access => {
                    at = start + mapping.size;
                }
                _ => return Some(at),
            }
        }
        None
    }

    /// The mappings that touch the range, in order.
    fn mappings_in(&self, range: Range) -> impl Iterator<Item = Range> {
        let first = self.mappings.range(..=range.at).next_back().map_or(range.at, |(at, _)| *at);
        let all = self.mappings.range(first..range.end());
        all.map(|(at, mapping)| Range { at: *at, size: mapping.size })
            .filter(move |mapping| mapping.overlaps(range))
    }

    /// The mapping of a committed address, and the offset in it.
    fn find(&self, at: u64) -> Option<(usize, &Sparse)> {
        let (start, mapping) = self.mappings.range(..=at).next_back()?;
        (at - start < mapping.size).then(|| (index(at - start), &mapping.bytes))
    }

    fn find_mut(&mut self, at: u64) -> Option<(usize, &mut Sparse)> {
        let (start, mapping) = self.mappings.range_mut(..=at).next_back()?;
        (at - start < mapping.size).then(|| (index(at - start), &mut mapping.bytes))
    }

    /// How much of a committed range lies in one page from `at` on.
    pub(super) fn block(&self, at: u64, left: u64) -> usize {
        let offset = self.find(at).map_or(0, |(offset, _)| offset);
        Sparse::left_in_page(offset).min(index(left))
    }

    /// Reads a block; false, and nothing read, where none of its page was ever written.
    pub(super) fn read(&self, at: u64, into: &mut [u8]) -> bool {
        let Some((offset, bytes)) = self.find(at) else { return false };
        bytes.read(offset, into);
        bytes.is_written(offset)
    }

    /// Hands a block out to be written.
    pub(super) fn write(&mut self, at: u64, length: usize, with: impl FnOnce(&mut [u8])) {
        if let Some((offset, bytes)) = self.find_mut(at) {
            with(bytes.write(offset, length));
        }
    }

    /// Whether the page of the address holds anything written.
    pub(super) fn is_written(&self, at: u64) -> bool {
        self.find(at).is_some_and(|(offset, bytes)| bytes.is_written(offset))
    }

    /// Copies between committed ranges that do not overlap. What was never written on either side
    /// is passed over, so that untouched memory costs nothing but the walk.
    pub(super) fn copy(&mut self, from: Range, to: u64) {
        let mut buffer = [0; PAGE];
        let mut done = 0;
        while done < from.size {
            let (source, target) = (from.at + done, to + done);
            let block = self.block(source, from.size - done).min(self.block(target, u64::MAX));
            let written = self.read(source, &mut buffer[..block]);
            if written || self.is_written(target) {
                self.write(target, block, |bytes| bytes.copy_from_slice(&buffer[..block]));
            }
            done += block as u64;
        }
    }

    /// Checks the books against the lists. Cost: O(mappings).
    pub(super) fn validate(&self) {
        let mut end = self.space.at;
        for (at, size) in &self.reservations {
            assert!(*at >= end, "reservations overlap at {at:#x}");
            end = at + size;
        }
        assert_eq!(self.reservations.values().sum::<u64>(), self.reserved);
        end = self.space.at;
        for (at, mapping) in &self.mappings {
            let range = Range { at: *at, size: mapping.size };
            assert!(*at >= end && self.is_reserved(range), "a mapping at {at:#x}");
            end = range.end();
        }
        assert_eq!(self.mappings.values().map(|it| it.size).sum::<u64>(), self.committed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPACE: Range = Range { at: 0x10_0000, size: 0x10_0000 };

    const fn range(at: u64, size: u64) -> Range {
        Range { at: SPACE.at + at, size }
    }

    #[test]
    fn the_lowest_gap_that_fits_is_given_and_the_end_is_the_end() {
        let mut memory = Memory::new(SPACE);
        let (first, second) = (memory.reserve(0x4_0000), memory.reserve(0x4_0000));
        assert_eq!((first, second), (Some(SPACE.at), Some(SPACE.at + 0x4_0000)));
        memory.unreserve(range(0, 0x4_0000));
        assert_eq!(memory.reserve(0x5_0000), Some(SPACE.at + 0x8_0000));
        assert_eq!(memory.reserve(0x4_0000), first);
        assert_eq!(memory.reserve(0x3_0001), None);
        assert_eq!(memory.reserve(0x3_0000), Some(SPACE.at + 0xd_0000));
        assert_eq!(memory.reserve(1), None);
        memory.validate();
    }

    #[test]
    fn only_whole_mappings_without_a_hole_are_unmapped() {
        let mut memory = Memory::new(SPACE);
        memory.reserve(0x4_0000).expect("room");
        memory.map(range(0, 0x1_0000));
        memory.map(range(0x1_0000, 0x2_0000));
        assert_eq!(memory.whole_mappings(range(0, 0x3_0000)), Ok(2));
        let part = Obstacle::Part(range(0x1_0000, 0x2_0000));
        assert_eq!(memory.whole_mappings(range(0, 0x2_0000)), Err(part));
        assert_eq!(memory.whole_mappings(range(0x2_0000, 0x1_0000)), Err(part));
        let hole = Obstacle::Bare(SPACE.at + 0x3_0000);
        assert_eq!(memory.whole_mappings(range(0, 0x4_0000)), Err(hole));
        assert_eq!(memory.first_bare(range(0x1000, 0x2_0000)), Some(SPACE.at + 0x1000));
        memory.set_access(range(0, 0x3_0000));
        assert_eq!(memory.first_bare(range(0x1000, 0x2_0000)), None);
        assert_eq!(memory.first_bare(range(0x1000, 0x4_0000)), Some(SPACE.at + 0x3_0000));
        memory.validate();
        memory.unmap(range(0, 0x3_0000));
        assert_eq!((memory.handles(), memory.committed()), (0, ByteSize::ZERO));
        assert_eq!(memory.first_bare(range(0, 1)), Some(SPACE.at));
    }

    #[test]
    fn a_copy_crosses_handles_and_pages_and_leaves_the_unwritten_so() {
        let mut memory = Memory::new(SPACE);
        memory.reserve(0x4_0000).expect("room");
        memory.map(range(0, 0x1_0000));
        memory.map(range(0x1_0000, 0x1_0000));
        let around = SPACE.at + 0x1_0000;
        memory.write(around - 4, 4, |bytes| bytes.copy_from_slice(&[1, 2, 3, 4]));
        memory.write(around, 4, |bytes| bytes.copy_from_slice(&[5, 6, 7, 8]));
        memory.copy(Range { at: around - 6, size: 0x2000 }, SPACE.at + 5);
        let mut out = [0; 12];
        assert!(memory.read(SPACE.at + 5, &mut out));
        assert_eq!(out, [0xA5, 0xA5, 1, 2, 3, 4, 5, 6, 7, 8, 0xA5, 0xA5]);
        assert!(!memory.is_written(SPACE.at + 0x3000));
        memory.wipe(range(0, 0x2_0000));
        assert!(!memory.read(SPACE.at + 5, &mut out));
    }
}
