//! Chance from a seed: the numbers, sizes and choices that the measured runs of the peers had.
//!
//! The generator is `SplitMix64`; a size is 2^(8 + 18u) bytes, 256 B to 64 MiB evenly by
//! logarithm. With these the crate `offset-allocator`, and the models of the other peers, fail
//! exactly as often as the real ones were measured to.

#![allow(
    unreachable_pub,
    missing_docs,
    clippy::missing_panics_doc,
    clippy::should_implement_trait,
    reason = "tests and benches include it"
)]

use std::time::Duration;

/// The generator.
#[derive(Clone, Debug)]
pub struct Chance(u64);

impl Chance {
    pub const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Evenly below `bound`.
    #[expect(clippy::cast_possible_truncation, reason = "the product's high half is below bound")]
    pub const fn below(&mut self, bound: usize) -> usize {
        ((self.next() as u128 * bound as u128) >> 64) as usize
    }

    /// A number in `[0, 1)`.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a float")]
    pub fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1_u64 << 53) as f64
    }

    /// A block's size in bytes.
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "2^8 to 2^26")]
    pub fn size(&mut self) -> u64 {
        18.0_f64.mul_add(self.unit(), 8.0).exp2() as u64
    }

    /// A number between two.
    pub fn between(&mut self, low: f64, high: f64) -> f64 {
        (high - low).mul_add(self.unit(), low)
    }

    /// Evenly by logarithm between two.
    pub fn around(&mut self, low: f64, high: f64) -> f64 {
        self.between(low.ln(), high.ln()).exp()
    }

    /// Returns `true` with this probability.
    pub fn happens(&mut self, part: f64) -> bool {
        self.unit() < part
    }

    /// The gap to the next arrival of a Poisson process of this rate a second.
    pub fn gap(&mut self, rate: f64) -> f64 {
        -(1.0 - self.unit()).ln() / rate
    }

    /// One of them.
    pub fn pick<T: Copy>(&mut self, of: &[T]) -> T {
        let at = usize::try_from(self.next() >> 33).unwrap_or(0) % of.len();
        of[at]
    }

    /// A time between two.
    pub fn time(&mut self, low: Duration, high: Duration) -> Duration {
        low + high.saturating_sub(low).mul_f64(self.unit())
    }
}
