//! A small deterministic random generator, for randomized placement orders.
//!
//! Not for secrets, and not for statistics. (xorshift64*, S. Vigna 2016.)
//!
//! Invariant: the same seed produces the same numbers.

/// A generator.
#[derive(Clone, Debug)]
pub(super) struct Chance(u64);

impl Chance {
    /// Any seed will do.
    pub(super) const fn new(seed: u64) -> Self {
        Self(seed | 1)
    }

    /// A number below `end`, which is not zero and below 2^32.
    pub(super) const fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let draw = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 32;
        (draw * end) >> 32
    }
}
