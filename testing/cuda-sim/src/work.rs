//! The kinds of work on a stream, and their effects.
//!
//! Work uses the memory as it is mapped when the work runs, not when it was queued. All ranges are
//! validated before the first byte is touched: work that faults changes nothing.
//!
//! Invariant: work is `Copy` and of fixed size, so that queueing allocates nothing by itself.

use super::fault::WorkKind;
use super::memory::{Memory, Range};
use super::slots::Slots;
use super::sparse::{PAGE, Sparse, blocks, index};
use lowtide_gpu_driver::HostMemory;

/// A byte pattern that a kernel writes and another kernel checks.
///
/// Each byte depends only on the seed and its offset in the range, so contents may be moved as a
/// whole, and displaced contents are detected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Pattern(u64);

impl Pattern {
    /// Creates the pattern of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// Returns the byte at an offset.
    #[must_use]
    pub const fn byte(self, offset: u64) -> u8 {
        self.word(offset / 8).to_le_bytes()[(offset % 8) as usize]
    }

    const fn word(self, at: u64) -> u64 {
        mixed(mixed(self.0) ^ at)
    }

    /// Writes the bytes from `offset` on.
    fn write(self, offset: u64, into: &mut [u8]) {
        let mut at = 0;
        while at < into.len() {
            let offset = offset + at as u64;
            let word = self.word(offset / 8).to_le_bytes();
            let part = &word[index(offset % 8)..];
            let length = part.len().min(into.len() - at);
            into[at..at + length].copy_from_slice(&part[..length]);
            at += length;
        }
    }
}

/// The next number of a sequence of good chance (Steele, Lea, Flood: "Fast splittable pseudorandom
/// number generators", 2014).
pub(super) const fn mixed(number: u64) -> u64 {
    let z = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    let z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// A key to the result of a check or a sum, once it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub(super) usize);

/// The result of a check or a sum.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Outcome {
    /// It is not done yet.
    Pending,
    /// The range holds the pattern.
    Held,
    /// The range does not hold the pattern.
    Differs {
        /// The offset of the first byte that differs.
        offset: u64,
        /// The byte found.
        found: u8,
        /// The expected byte.
        wanted: u8,
    },
    /// The sum of the bytes, wrapping.
    Sum(u64),
    /// The context was lost before it was done.
    Lost,
}

/// A place in a stream: so many pieces of work from its beginning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Position {
    pub(super) stream: u64,
    pub(super) count: u64,
}

/// A store of host memory: its bytes and their kind.
pub(super) type Store = (Sparse, HostMemory);

/// A range of a store.
#[derive(Clone, Copy, Debug)]
pub(super) struct InStore {
    pub(super) store: u64,
    pub(super) offset: u64,
}

#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Fill(Range, Pattern),
    Add(Range, u8),
    Check(Range, Pattern, Ticket),
    Sum(Range, Ticket),
    Copy(Range, u64),
    Offload(Range, InStore),
    Restore(InStore, Range),
    Record,
    Wait(Position),
    HostFunction(u64),
    /// A task by its number; its effect is not defined in this file.
    Task(u64, WorkKind),
    /// Starts a stream-ordered allocation of this many bytes.
    Open(u64, u64),
    /// Ends a stream-ordered allocation, by the free of this number.
    Close(u64, u64),
}

/// The cause of an illegal access.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Illegal {
    /// The range, and its first bare address.
    Bare(Range, u64),
    Store(u64),
}

impl Work {
    pub(super) const fn kind(&self) -> WorkKind {
        match self {
            Self::Fill(..) => WorkKind::Fill,
            Self::Add(..) => WorkKind::Add,
            Self::Check(..) => WorkKind::Check,
            Self::Sum(..) => WorkKind::Sum,
            Self::Copy(..) => WorkKind::Copy,
            Self::Offload(..) => WorkKind::Offload,
            Self::Restore(..) => WorkKind::Restore,
            Self::Record => WorkKind::Record,
            Self::Wait(_) => WorkKind::Wait,
            Self::HostFunction(_) => WorkKind::HostFunction,
            Self::Task(_, kind) => *kind,
            Self::Open(..) => WorkKind::PoolAlloc,
            Self::Close(..) => WorkKind::PoolFree,
        }
    }

    /// The parts of device memory that it touches; those of a task are known to the task.
    pub(super) fn ranges(&self) -> impl Iterator<Item = Range> + use<> {
        let (first, second) = match *self {
            Self::Fill(range, _)
            | Self::Add(range, _)
            | Self::Check(range, ..)
            | Self::Sum(range, _)
            | Self::Offload(range, _)
            | Self::Restore(_, range) => (Some(range), None),
            Self::Copy(from, to) => (Some(from), Some(Range { at: to, size: from.size })),
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// The store that it touches.
    pub(super) const fn store(&self) -> Option<u64> {
        match self {
            Self::Offload(_, part) | Self::Restore(part, _) => Some(part.store),
            _ => None,
        }
    }

    /// Does it; the outcome is that of a check or a sum.
    pub(super) fn run(
        &self,
        memory: &mut Memory,
        stores: &mut Slots<Store>,
    ) -> Result<Option<(Ticket, Outcome)>, Illegal> {
        for range in self.ranges() {
            if let Some(bare) = memory.first_bare(range) {
                return Err(Illegal::Bare(range, bare));
            }
        }
        match *self {
            Self::Fill(range, pattern) => {
                edit(memory, range, |offset, bytes| pattern.write(offset, bytes));
            }
            Self::Add(range, value) => edit(memory, range, |_, bytes| {
                bytes.iter_mut().for_each(|byte| *byte = byte.wrapping_add(value));
            }),
            Self::Check(range, pattern, ticket) => {
                return Ok(Some((ticket, compare(memory, range, pattern))));
            }
            Self::Sum(range, ticket) => {
                return Ok(Some((ticket, Outcome::Sum(sum(memory, range)))));
            }
            Self::Copy(from, to) => memory.copy(from, to),
            Self::Offload(range, part) => {
                let (store, _) = stores.get_mut(part.store).ok_or(Illegal::Store(part.store))?;
                offload(memory, range, store, part.offset);
            }
            Self::Restore(part, range) => {
                let (store, _) = stores.get(part.store).ok_or(Illegal::Store(part.store))?;
                restore(memory, range, store, part.offset);
            }
            // Tasks and blocks are the model's to do.
            _ => {}
        }
        Ok(None)
    }
}

/// Calls `with` for each block of a committed range, with the offset in the range.
fn edit(memory: &mut Memory, range: Range, with: impl Fn(u64, &mut [u8])) {
    for (done, length) in blocks(range.size, range.at, range.at) {
        memory.write(range.at + done, length, |bytes| with(done, bytes));
    }
}

/// Reads each block of a committed range until `with` says that it has seen enough.
fn scan(memory: &Memory, range: Range, mut with: impl FnMut(u64, &[u8]) -> bool) {
    let mut buffer = [0; PAGE];
    for (done, length) in blocks(range.size, range.at, range.at) {
        memory.read(range.at + done, &mut buffer[..length]);
        if with(done, &buffer[..length]) {
            return;
        }
    }
}

fn compare(memory: &Memory, range: Range, pattern: Pattern) -> Outcome {
    let mut outcome = Outcome::Held;
    let mut wanted = [0; PAGE];
    scan(memory, range, |offset, found| {
        let wanted = &mut wanted[..found.len()];
        pattern.write(offset, wanted);
        let differs = wanted.iter().zip(found).position(|(wanted, found)| wanted != found);
        if let Some(at) = differs {
            let (found, wanted) = (found[at], wanted[at]);
            outcome = Outcome::Differs { offset: offset + at as u64, found, wanted };
        }
        differs.is_some()
    });
    outcome
}

fn sum(memory: &Memory, range: Range) -> u64 {
    let mut sum = 0_u64;
    scan(memory, range, |_, bytes| {
        sum = bytes.iter().fold(sum, |sum, byte| sum.wrapping_add(u64::from(*byte)));
        false
    });
    sum
}

fn offload(memory: &Memory, range: Range, store: &mut Sparse, from: u64) {
    let mut buffer = [0; PAGE];
    for (done, length) in blocks(range.size, range.at, from) {
        let to = index(from + done);
        let written = memory.read(range.at + done, &mut buffer[..length]);
        if written || store.is_written(to) {
            store.write(to, length).copy_from_slice(&buffer[..length]);
        }
    }
}

fn restore(memory: &mut Memory, range: Range, store: &Sparse, from: u64) {
    for (done, length) in blocks(range.size, range.at, from) {
        let (source, target) = (index(from + done), range.at + done);
        if store.is_written(source) || memory.is_written(target) {
            memory.write(target, length, |bytes| store.read(source, bytes));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use lowtide_core::bytes::ByteSize;

    const BASE: u64 = 0x10_0000;

    const fn range(at: u64, size: u64) -> Range {
        Range { at: BASE + at, size }
    }

    fn memory() -> Memory {
        let mut memory = Memory::new(range(0, 1 << 20));
        memory.reserve(1 << 17, 1).expect("room");
        memory.map(range(0, 1 << 16));
        memory.change_access(range(0, 1 << 16), true);
        memory
    }

    #[test]
    fn a_pattern_goes_by_the_offset_and_differs_by_seed_in_the_first_bytes() {
        let pattern = Pattern::new(7);
        let mut bytes = [0; 21];
        pattern.write(3, &mut bytes);
        let wanted: Vec<_> = (3..24).map(|offset| pattern.byte(offset)).collect();
        assert_eq!(bytes.as_slice(), wanted);
        let first = |seed| [0, 1, 2, 3].map(|at| Pattern::new(seed).byte(at));
        let firsts: std::collections::BTreeSet<_> = (0..1000).map(first).collect();
        assert_eq!(firsts.len(), 1000);
    }

    #[test]
    fn a_pattern_survives_a_round_through_a_store_at_odd_offsets() {
        let (mut memory, mut stores) = (memory(), Slots::default());
        let store = stores.insert((Sparse::new(ByteSize::kib(64)), HostMemory::Pageable));
        let (from, to) = (range(4091, 20_000), range(30_001, 20_000));
        let part = InStore { store, offset: 777 };
        let pattern = Pattern::new(1);
        for work in [
            Work::Fill(from, pattern),
            Work::Offload(from, part),
            Work::Add(from, 1),
            Work::Restore(part, to),
        ] {
            assert_eq!(work.run(&mut memory, &mut stores), Ok(None), "{work:?}");
        }
        let check = |range| Work::Check(range, pattern, Ticket(0));
        let held = check(to).run(&mut memory, &mut stores);
        assert_eq!(held, Ok(Some((Ticket(0), Outcome::Held))));
        let wanted = pattern.byte(0);
        let differs = Outcome::Differs { offset: 0, found: wanted.wrapping_add(1), wanted };
        assert_eq!(check(from).run(&mut memory, &mut stores), Ok(Some((Ticket(0), differs))));
        let sum: u64 = (0..20_000).map(|at| u64::from(pattern.byte(at))).sum();
        let found = Work::Sum(to, Ticket(1)).run(&mut memory, &mut stores);
        assert_eq!(found, Ok(Some((Ticket(1), Outcome::Sum(sum)))));
    }

    #[test]
    fn work_that_leaves_the_mapped_part_changes_nothing_and_says_where() {
        let (mut memory, mut stores) = (memory(), Slots::default());
        let over = range((1 << 16) - 4, 8);
        let illegal = Err(Illegal::Bare(over, BASE + (1 << 16)));
        let fill = Work::Fill(over, Pattern::new(1));
        assert_eq!(fill.run(&mut memory, &mut stores), illegal);
        assert!(!memory.is_written(over.at));
        let copy = Work::Copy(range(0, 8), over.at);
        assert_eq!(copy.run(&mut memory, &mut stores), illegal);
        let gone = Work::Restore(InStore { store: 9, offset: 0 }, range(0, 8));
        assert_eq!(gone.run(&mut memory, &mut stores), Err(Illegal::Store(9)));
    }
}
