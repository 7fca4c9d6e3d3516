//! The operation hash: FNV-1a over the outcome of each operation, in order.
//!
//! The input is the same text as in a recording, so that a few lines of code can compute the hash
//! from a recording. This module knows no arena.
//!
//! Invariant: equal outcomes in equal order have equal hashes, on every machine.

use std::fmt::{self, Write as _};

use super::operation::{Header, Operation};

const OFFSET_BASIS: u64 = 0xCBF2_9CE4_8422_2325;
const PRIME: u64 = 0x0000_0100_0000_01B3;

/// A hash of the outcomes of a sequence of operations: 64-bit FNV-1a.
///
/// Each operation adds its name, a space, its outcome as a recording writes it, and a newline.
/// Numbers, times and requests are not included.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
pub struct OperationHash(u64);

impl OperationHash {
    /// The hash of no operations.
    pub const EMPTY: Self = Self(OFFSET_BASIS);

    /// Returns the numeric value.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    pub(super) const fn from_number(number: u64) -> Self {
        Self(number)
    }

    /// Adds the header of a recording.
    pub(crate) fn open(&mut self, header: &Header) {
        // Writing to a hash cannot fail, here and below.
        let _ = writeln!(self, "open{}", header.outcome());
    }

    /// Adds an operation.
    pub(crate) fn add(&mut self, operation: &Operation) {
        let _ = writeln!(self, "{}{}", operation.word(), operation.outcome());
    }
}

impl Default for OperationHash {
    fn default() -> Self {
        Self::EMPTY
    }
}

impl fmt::Write for OperationHash {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        for byte in text.bytes() {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(PRIME);
        }
        Ok(())
    }
}

impl fmt::Display for OperationHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

impl fmt::Debug for OperationHash {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "OperationHash({self})")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The test vectors published by the authors of FNV.
    #[test]
    fn it_is_fnv_1a() {
        let known = [("", OFFSET_BASIS), ("a", 0xAF63_DC4C_8601_EC8C)];
        let known = known.into_iter().chain([("foobar", 0x8594_4171_F739_67E8)]);
        for (text, hash) in known {
            let mut of = OperationHash::EMPTY;
            of.write_str(text).expect("never fails");
            assert_eq!(of.get(), hash, "{text:?}");
        }
        assert_eq!(OperationHash::from_number(0xAB).to_string(), "00000000000000ab");
    }
}
