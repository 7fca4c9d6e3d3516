//! Seeded random numbers, for weights and loads that are the same in every run.

/// Seeded random numbers: splitmix64 (Steele, Lea, Flood 2014).
#[derive(Debug)]
pub(crate) struct Chance(pub(crate) u64);

impl Chance {
    /// The next 64 random bits.
    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        mixed ^ (mixed >> 31)
    }
}
