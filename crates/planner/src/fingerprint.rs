//! A hash that tells whether two problems differ in more than names and sizes.
//!
//! `Plan::serves` (`reuse`) compares it. Problems with the same fingerprint and other sizes can be
//! served by one plan.

use super::demand::Demand;
use super::problem::Problem;

/// A hash of everything in a problem except names and sizes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Fingerprint(u128);

impl Fingerprint {
    /// The offset basis and prime of 128-bit FNV-1a; here 64 bits are mixed in at a time, and the
    /// high bits of the product are folded back.
    const EMPTY: Self = Self(0x6C62_272E_07BB_0142_62B8_2175_6295_C58D);
    const PRIME: u128 = 0x0000_0000_0100_0000_0000_0000_0000_013B;

    fn add(&mut self, value: u64) {
        let product = (self.0 ^ u128::from(value)).wrapping_mul(Self::PRIME);
        self.0 = (product ^ (product >> 61)).wrapping_mul(Self::PRIME);
    }

    fn add_demand(&mut self, demand: &Demand) {
        let Demand { name: _, size: _, align, live, gaps, offset, role } = demand;
        self.add(*align);
        self.add(live.start.cast_unsigned());
        self.add(live.end.cast_unsigned());
        self.add(*role as u64);
        self.add(u64::from(offset.is_some()));
        self.add(offset.unwrap_or(0));
        self.add(gaps.len() as u64);
        for gap in gaps {
            self.add(gap.span.start.cast_unsigned());
            self.add(gap.span.end.cast_unsigned());
            self.add(u64::from(gap.window.is_some()));
            self.add(gap.window.map_or(0, |window| window.low));
            self.add(gap.window.map_or(0, |window| window.high));
        }
    }
}

impl Problem {
    /// Returns the fingerprint, which must be equal for a plan to serve two problems. O(n).
    #[must_use]
    pub fn fingerprint(&self) -> Fingerprint {
        let mut hash = Fingerprint::EMPTY;
        hash.add(self.demands().len() as u64);
        for (id, demand) in self.ids().zip(self.demands()) {
            hash.add_demand(demand);
            let over = self.unions.over(id.0);
            hash.add(u64::from(over.is_some()));
            if let Some(over) = over {
                hash.add(u64::from(over));
                hash.add(u64::from(self.unions.replaces(id.0)));
                hash.add(self.unions.root(id.0).1);
            }
        }
        hash
    }
}
