//! Address space of the simulated device, and the physical handles mapped in it.
//!
//! Reservations are placed at the lowest addresses that fit, so a released address is soon reused.
//! A handle lives until its references and its mappings are gone; its bytes are visible at every
//! address where it is mapped. Memory that the driver itself reserves and maps (plain and pooled
//! memory) is in the same tables with separate sums, out of reach of the virtual memory calls. This
//! file knows no stream and raises no driver error: it reports the obstacle, and its caller decides
//! what that means.
//!
//! Invariant: mappings do not overlap and lie in reservations of the same owner; `committed` is the
//! sum of the caller's handles, `reserved` that of the caller's reservations, `taken` that of the
//! driver's own blocks.

use std::collections::BTreeMap;
use std::fmt;

use super::slots::Slots;
use super::sparse::{PAGE, Sparse, blocks, index};
use lowtide_core::bytes::ByteSize;

/// A part of the address space.
#[derive(Clone, Copy, Default, PartialEq, Eq)]
pub struct Range {
    /// Its first address.
    pub at: u64,
    /// Its size in bytes.
    pub size: u64,
}

impl fmt::Debug for Range {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:#x}..{:#x}", self.at, self.end())
    }
}

impl Range {
    /// Its end; held at the last address.
    pub(super) const fn end(self) -> u64 {
        self.at.saturating_add(self.size)
    }

    pub(super) const fn overlaps(self, other: Self) -> bool {
        self.at < other.end() && other.at < self.end()
    }

    pub(super) const fn holds(self, other: Self) -> bool {
        self.at <= other.at && other.end() <= self.end()
    }

    /// Its parts of `size` bytes, which is not 0; the last one has what is left.
    pub(super) fn pieces(self, size: u64) -> impl Iterator<Item = Self> {
        let starts = (self.at..self.end()).step_by(index(size));
        starts.map(move |at| Self { at, size: size.min(self.end() - at) })
    }
}

/// The obstacle to an unmap.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Obstacle {
    /// Nothing is mapped at this address.
    Bare(u64),
    /// This mapping lies only partly in the range.
    Part(Range),
}

#[derive(Debug)]
struct Mapping {
    size: u64,
    /// A new mapping has no access.
    access: bool,
    handle: u64,
}

/// Memory of the device, wherever it is mapped.
#[derive(Debug)]
struct Physical {
    /// The bytes charged to the device.
    charged: u64,
    bytes: Sparse,
    /// The caller's creations and retains, less the releases.
    references: u64,
    mappings: u64,
    /// `true` for the driver's own memory.
    own: bool,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Reservation {
    size: u64,
    own: bool,
}

/// The first address of stores: devices end at 2^61 at most.
const STORES: u64 = 1 << 61;

/// The device's memory as its user sees it, and the stores of its contents in host memory.
#[derive(Debug, Default)]
pub(super) struct Memory {
    space: Range,
    reservations: BTreeMap<u64, Reservation>,
    mappings: BTreeMap<u64, Mapping>,
    physical: Slots<Physical>,
    reserved: u64,
    committed: u64,
    taken: u64,
    stores_end: u64,
}

impl Memory {
    pub(super) fn new(space: Range) -> Self {
        Self { space, ..Self::default() }
    }

    pub(super) const fn reserved(&self) -> ByteSize {
        ByteSize::new(self.reserved)
    }

    pub(super) const fn committed(&self) -> ByteSize {
        ByteSize::new(self.committed)
    }

    /// Returns the bytes charged for the driver's own blocks.
    pub(super) const fn taken(&self) -> ByteSize {
        ByteSize::new(self.taken)
    }

    /// Of the caller. Cost: O(reservations).
    pub(super) fn reservations(&self) -> usize {
        self.reservations.values().filter(|it| !it.own).count()
    }

    /// Of the caller. Cost: O(handles).
    pub(super) fn handles(&self) -> usize {
        self.physical.values().filter(|it| !it.own).count()
    }

    /// Of the caller's handles. Cost: O(handles).
    pub(super) fn mappings(&self) -> u64 {
        self.physical.values().filter(|it| !it.own).map(|it| it.mappings).sum()
    }

    /// Returns `true` if the address is in this device's address range.
    pub(super) const fn is_inside(&self, at: u64) -> bool {
        self.space.at <= at && at < self.space.end()
    }

    /// Takes the lowest gap that fits, at a multiple of `alignment`, which is not 0. Cost:
    /// O(reservations).
    pub(super) fn reserve(&mut self, size: u64, alignment: u64) -> Option<u64> {
        let at = self.take_addresses(size, alignment, false)?;
        self.reserved += size;
        Some(at)
    }

    /// Notes a reservation that was made elsewhere.
    pub(super) fn add_reservation(&mut self, Range { at, size }: Range) {
        self.reservations.insert(at, Reservation { size, own: false });
        self.reserved += size;
    }

    fn take_addresses(&mut self, size: u64, alignment: u64, own: bool) -> Option<u64> {
        let mut at = self.space.at.checked_next_multiple_of(alignment)?;
        for (start, taken) in &self.reservations {
            if start.saturating_sub(at) >= size {
                break;
            }
            at = at.max((start + taken.size).checked_next_multiple_of(alignment)?);
        }
        if self.space.end().saturating_sub(at) < size {
            return None;
        }
        self.reservations.insert(at, Reservation { size, own });
        Some(at)
    }

    fn lies_in_one(&self, range: Range, own: bool) -> bool {
        let before = self.reservations.range(..=range.at).next_back();
        before.is_some_and(|(&at, it)| it.own == own && Range { at, size: it.size }.holds(range))
    }

    /// Returns `true` if the range lies in one reservation.
    pub(super) fn is_reserved(&self, range: Range) -> bool {
        self.lies_in_one(range, false)
    }

    /// Returns `true` if the range is a whole reservation.
    pub(super) fn is_whole_reservation(&self, range: Range) -> bool {
        let whole = Reservation { size: range.size, own: false };
        self.reservations.get(&range.at) == Some(&whole)
    }

    /// Gives a whole, bare reservation back.
    pub(super) fn unreserve(&mut self, range: Range) {
        debug_assert!(self.is_whole_reservation(range) && !self.is_mapped_anywhere(range));
        if let Some(gone) = self.reservations.remove(&range.at) {
            self.reserved -= gone.size;
        }
    }

    /// Returns `true` if anything in the range is mapped.
    pub(super) fn is_mapped_anywhere(&self, range: Range) -> bool {
        self.mappings_in(range).next().is_some()
    }

    /// Puts a new physical handle behind a bare range; nothing may touch it yet.
    pub(super) fn map(&mut self, range: Range) {
        let handle = self.create(range.size);
        self.map_handle(range, handle);
        self.release(handle);
    }

    /// Makes a physical handle, mapped nowhere, with one reference.
    pub(super) fn create(&mut self, size: u64) -> u64 {
        self.committed += size;
        self.insert(size, size, false)
    }

    fn insert(&mut self, size: u64, charged: u64, own: bool) -> u64 {
        let bytes = Sparse::new(ByteSize::new(size));
        self.physical.insert(Physical { charged, bytes, references: 1, mappings: 0, own })
    }

    /// The size of a handle to which its caller holds a reference.
    pub(super) fn size_of(&self, handle: u64) -> Option<u64> {
        let held = self.physical.get(handle).filter(|it| it.references > 0 && !it.own);
        held.map(|it| it.bytes.size() as u64)
    }

    /// Puts a handle of the range's size behind a bare range; nothing may touch it yet.
    pub(super) fn map_handle(&mut self, range: Range, handle: u64) {
        debug_assert!(!self.is_mapped_anywhere(range));
        if let Some(physical) = self.physical.get_mut(handle) {
            debug_assert_eq!(physical.bytes.size() as u64, range.size);
            debug_assert!(physical.own || physical.references > 0);
            physical.mappings += 1;
            self.mappings.insert(range.at, Mapping { size: range.size, access: false, handle });
        }
    }

    /// Releases one reference; `false` if there is none. The memory stays while it is mapped.
    pub(super) fn release(&mut self, handle: u64) -> bool {
        let held = self.physical.get_mut(handle).filter(|it| it.references > 0);
        let Some(physical) = held else { return false };
        physical.references -= 1;
        self.collect(handle);
        true
    }

    /// The handle behind an address, with one reference more.
    pub(super) fn retain_at(&mut self, at: u64) -> Option<u64> {
        let (start, mapping) = self.mappings.range(..=at).next_back()?;
        let handle = (at - start < mapping.size).then_some(mapping.handle)?;
        let physical = self.physical.get_mut(handle).filter(|it| !it.own)?;
        physical.references += 1;
        Some(handle)
    }

    /// Frees a handle without references and mappings.
    fn collect(&mut self, handle: u64) {
        let unused = |it: &&Physical| it.references == 0 && it.mappings == 0;
        if self.physical.get(handle).filter(unused).is_some()
            && let Some(gone) = self.physical.remove(handle)
        {
            let sum = if gone.own { &mut self.taken } else { &mut self.committed };
            *sum -= gone.charged;
        }
    }

    fn remove_mapping(&mut self, at: u64) {
        let Some(mapping) = self.mappings.remove(&at) else { return };
        if let Some(physical) = self.physical.get_mut(mapping.handle) {
            physical.mappings -= 1;
        }
        self.collect(mapping.handle);
    }

    /// Places a block of the driver's own, which nothing may touch yet, with bare addresses after
    /// it, in steps of `unit`.
    pub(super) fn place(&mut self, size: u64, charged: u64, unit: u64) -> Option<u64> {
        let span = size.checked_add(1)?.checked_next_multiple_of(unit)?;
        let at = self.take_addresses(span, unit, true)?;
        self.place_at(Range { at, size }, charged);
        Some(at)
    }

    fn place_at(&mut self, range: Range, charged: u64) {
        self.taken += charged;
        let handle = self.insert(range.size, charged, true);
        self.map_handle(range, handle);
        self.release(handle);
    }

    /// Places a store of host memory, beyond the device's addresses, which are never used again,
    /// with bare addresses after it.
    pub(super) fn place_store(&mut self, size: u64) -> Option<u64> {
        let at = self.stores_end.max(STORES);
        self.stores_end = at.checked_add(size)?.checked_add(PAGE as u64)?;
        self.reservations.insert(at, Reservation { size, own: true });
        self.place_at(Range { at, size }, 0);
        self.open(at, size);
        Some(at)
    }

    /// Gives a block of the driver's own back, or a store.
    pub(super) fn displace(&mut self, at: u64) {
        debug_assert!(self.reservations.get(&at).is_some_and(|it| it.own));
        self.remove_mapping(at);
        self.reservations.remove(&at);
    }

    /// Opens a block of the driver's own for `size` bytes, or closes it to all work with 0.
    pub(super) fn open(&mut self, at: u64, size: u64) {
        if let Some(mapping) = self.mappings.get_mut(&at) {
            mapping.access = size > 0;
            if size > 0 {
                mapping.size = size;
            }
        }
    }

    /// Lets work touch a range of whole mappings, or keeps it out.
    pub(super) fn change_access(&mut self, range: Range, access: bool) {
        for (_, mapping) in self.mappings.range_mut(range.at..range.end()) {
            mapping.access = access;
        }
    }

    /// Returns the number of mappings in the range if they are whole and without a hole.
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
            self.remove_mapping(mapping.at);
        }
    }

    /// Returns the sizes of the handles behind a range of whole mappings, in order.
    pub(super) fn handles_in(&self, range: Range) -> Vec<u64> {
        self.mappings_in(range).map(|mapping| mapping.size).collect()
    }

    /// Moves the handles behind a range of whole mappings, with their contents, to a bare range of
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
        for (_, mapping) in self.mappings.range(range.at..range.end()) {
            if let Some(physical) = self.physical.get_mut(mapping.handle) {
                physical.bytes.wipe();
            }
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
        let offset = (at - start < mapping.size).then(|| index(at - start))?;
        Some((offset, &self.physical.get(mapping.handle)?.bytes))
    }

    fn find_mut(&mut self, at: u64) -> Option<(usize, &mut Sparse)> {
        let (start, mapping) = self.mappings.range(..=at).next_back()?;
        let offset = (at - start < mapping.size).then(|| index(at - start))?;
        Some((offset, &mut self.physical.get_mut(mapping.handle)?.bytes))
    }

    /// Reads a block; `false` without reading if none of its page was ever written.
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

    /// Returns `true` if the page of the address was ever written.
    pub(super) fn is_written(&self, at: u64) -> bool {
        self.find(at).is_some_and(|(offset, bytes)| bytes.is_written(offset))
    }

    /// Copies between committed ranges that do not overlap. Pages never written on either side are
    /// skipped, so untouched memory costs nothing but the walk.
    pub(super) fn copy(&mut self, from: Range, to: u64) {
        let mut buffer = [0; PAGE];
        for (done, length) in blocks(from.size, from.at, to) {
            let written = self.read(from.at + done, &mut buffer[..length]);
            if written || self.is_written(to + done) {
                self.write(to + done, length, |bytes| bytes.copy_from_slice(&buffer[..length]));
            }
        }
    }

    /// Checks the sums against the lists. Cost: O(mappings).
    pub(super) fn validate(&self) {
        let mut end = self.space.at;
        for (at, it) in &self.reservations {
            assert!(*at >= end, "reservations overlap at {at:#x}");
            end = at + it.size;
        }
        let callers = self.reservations.values().filter(|it| !it.own);
        assert_eq!(callers.map(|it| it.size).sum::<u64>(), self.reserved);
        end = self.space.at;
        for (at, mapping) in &self.mappings {
            let range = Range { at: *at, size: mapping.size };
            let own = self.physical.get(mapping.handle).map(|it| it.own);
            let lies = own.is_some_and(|own| self.lies_in_one(range, own));
            assert!(*at >= end && lies, "a mapping at {at:#x}");
            end = range.end();
        }
        for (own, sum) in [(false, self.committed), (true, self.taken)] {
            let all = self.physical.values().filter(|it| it.own == own);
            assert_eq!(all.map(|it| it.charged).sum::<u64>(), sum);
        }
        let mapped = self.physical.values().map(|it| it.mappings).sum::<u64>();
        assert_eq!(mapped, self.mappings.len() as u64);
        assert!(self.physical.values().all(|it| it.references + it.mappings > 0));
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
        let (first, second) = (memory.reserve(0x4_0000, 1), memory.reserve(0x4_0000, 1));
        assert_eq!((first, second), (Some(SPACE.at), Some(SPACE.at + 0x4_0000)));
        memory.unreserve(range(0, 0x4_0000));
        assert_eq!(memory.reserve(0x5_0000, 1), Some(SPACE.at + 0x8_0000));
        assert_eq!(memory.reserve(0x4_0000, 1), first);
        assert_eq!(memory.reserve(0x3_0001, 1), None);
        assert_eq!(memory.reserve(0x3_0000, 1), Some(SPACE.at + 0xd_0000));
        assert_eq!(memory.reserve(1, 1), None);
        memory.validate();
    }

    #[test]
    fn only_whole_mappings_without_a_hole_are_unmapped() {
        let mut memory = Memory::new(SPACE);
        memory.reserve(0x4_0000, 1).expect("room");
        memory.map(range(0, 0x1_0000));
        memory.map(range(0x1_0000, 0x2_0000));
        assert_eq!(memory.whole_mappings(range(0, 0x3_0000)), Ok(2));
        let part = Obstacle::Part(range(0x1_0000, 0x2_0000));
        assert_eq!(memory.whole_mappings(range(0, 0x2_0000)), Err(part));
        assert_eq!(memory.whole_mappings(range(0x2_0000, 0x1_0000)), Err(part));
        let hole = Obstacle::Bare(SPACE.at + 0x3_0000);
        assert_eq!(memory.whole_mappings(range(0, 0x4_0000)), Err(hole));
        assert_eq!(memory.first_bare(range(0x1000, 0x2_0000)), Some(SPACE.at + 0x1000));
        memory.change_access(range(0, 0x3_0000), true);
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
        memory.reserve(0x4_0000, 1).expect("room");
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
