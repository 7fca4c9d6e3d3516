//! Chance from a seed: the numbers, sizes and choices that the measured runs of the peers had.
//!
//! The generator is `SplitMix64`; a size is 2^(8 + 18u) bytes, 256 B to 64 MiB evenly by
//! logarithm. With these the crate `offset-allocator`, and the models of the other peers, fail
//! exactly as often as the real ones were measured to.

/// The generator.
#[derive(Clone, Debug)]
pub(crate) struct Chance(u64);

impl Chance {
    pub(crate) const fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) const fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }

    /// Evenly below `bound`.
    #[expect(clippy::cast_possible_truncation, reason = "the product's high half is below bound")]
    pub(crate) const fn below(&mut self, bound: usize) -> usize {
        ((self.next() as u128 * bound as u128) >> 64) as usize
    }

    /// A block's size in bytes.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit a float")]
    #[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "2^8 to 2^26")]
    pub(crate) fn size(&mut self) -> u64 {
        let unit = (self.next() >> 11) as f64 / (1_u64 << 53) as f64;
        18.0_f64.mul_add(unit, 8.0).exp2() as u64
    }
}
