//! Chance: `SplitMix64`, seeded, the same on every machine.
//!
//! Invariant: a seed gives the same numbers in every process.

/// A generator of one thread.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    /// A generator of this seed.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number.
    pub fn draw(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Below `end`, which is above 0.
    pub fn below(&mut self, end: usize) -> usize {
        usize::try_from(self.draw() >> 33).unwrap_or(0) % end
    }

    /// A size of which each power of two from `2^low` to `2^high` is as likely as another.
    pub fn size(&mut self, low: u32, high: u32) -> usize {
        let power = low + u32::try_from(self.below((high - low) as usize)).unwrap_or(0);
        let base = 1_usize << power;
        base + self.below(base)
    }
}
