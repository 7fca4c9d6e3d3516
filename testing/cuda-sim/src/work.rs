//! The kinds of work on a stream, and their effects.
//!
//! Work uses the memory as it is mapped when the work runs, not when it was queued. All ranges are
//! validated before the first byte is touched: work that faults changes nothing.
//!
//! Invariant: work is `Copy` and of fixed size, so that queueing allocates nothing by itself.

use super::fault::WorkKind;
use super::memory::{Memory, Range};
use super::sparse::{PAGE, blocks, index};

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

#[derive(Clone, Copy, Debug)]
pub(super) enum Work {
    Fill(Range, Pattern),
    Add(Range, u8),
    Check(Range, Pattern, Ticket),
    Sum(Range, Ticket),
    /// A copy on the device, or from or to a store.
    Copy(Range, u64, WorkKind),
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

/// An illegal access: the range, and its first bare address.
pub(super) type Illegal = (Range, u64);

impl Work {
    pub(super) const fn kind(&self) -> WorkKind {
        match self {
            Self::Fill(..) => WorkKind::Fill,
            Self::Add(..) => WorkKind::Add,
            Self::Check(..) => WorkKind::Check,
            Self::Sum(..) => WorkKind::Sum,
            Self::Record => WorkKind::Record,
            Self::Wait(_) => WorkKind::Wait,
            Self::HostFunction(_) => WorkKind::HostFunction,
            Self::Copy(.., kind) | Self::Task(_, kind) => *kind,
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
            | Self::Sum(range, _) => (Some(range), None),
            Self::Copy(from, to, _) => (Some(from), Some(Range { at: to, size: from.size })),
            _ => (None, None),
        };
        first.into_iter().chain(second)
    }

    /// Does it; the outcome is that of a check or a sum.
    pub(super) fn run(&self, memory: &mut Memory) -> Result<Option<(Ticket, Outcome)>, Illegal> {
        for range in self.ranges() {
            if let Some(bare) = memory.first_bare(range) {
                return Err((range, bare));
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
            Self::Copy(from, to, _) => memory.copy(from, to),
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

#[cfg(test)]
mod tests {
    use super::*;

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
        let mut memory = memory();
        let store = memory.place_store(1 << 16).expect("addresses");
        let (from, to) = (range(4091, 20_000), range(30_001, 20_000));
        let part = Range { at: store + 777, size: 20_000 };
        let pattern = Pattern::new(1);
        for work in [
            Work::Fill(from, pattern),
            Work::Copy(from, part.at, WorkKind::Offload),
            Work::Add(from, 1),
            Work::Copy(part, to.at, WorkKind::Restore),
        ] {
            assert_eq!(work.run(&mut memory), Ok(None), "{work:?}");
        }
        let check = |range| Work::Check(range, pattern, Ticket(0));
        let held = check(to).run(&mut memory);
        assert_eq!(held, Ok(Some((Ticket(0), Outcome::Held))));
        let wanted = pattern.byte(0);
        let differs = Outcome::Differs { offset: 0, found: wanted.wrapping_add(1), wanted };
        assert_eq!(check(from).run(&mut memory), Ok(Some((Ticket(0), differs))));
        let sum: u64 = (0..20_000).map(|at| u64::from(pattern.byte(at))).sum();
        let found = Work::Sum(to, Ticket(1)).run(&mut memory);
        assert_eq!(found, Ok(Some((Ticket(1), Outcome::Sum(sum)))));
    }

    #[test]
    fn work_that_leaves_the_mapped_part_changes_nothing_and_says_where() {
        let mut memory = memory();
        let over = range((1 << 16) - 4, 8);
        let illegal = Err((over, BASE + (1 << 16)));
        let fill = Work::Fill(over, Pattern::new(1));
        assert_eq!(fill.run(&mut memory), illegal);
        assert!(!memory.is_written(over.at));
        let copy = Work::Copy(range(0, 8), over.at, WorkKind::Copy);
        assert_eq!(copy.run(&mut memory), illegal);
        let store = memory.place_store(1 << 16).expect("addresses");
        memory.displace(store);
        let gone = Range { at: store, size: 8 };
        let restore = Work::Copy(gone, BASE, WorkKind::Restore);
        assert_eq!(restore.run(&mut memory), Err((gone, store)));
    }
}
