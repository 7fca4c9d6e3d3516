//! Size classes of requests, used for counting and for fairness.
//!
//! Bounds are powers of two, so that no request of a class is more than twice another. Two
//! exceptions: one class holds everything up to the smallest bound, and one everything above the
//! largest.
//!
//! Invariant: `of(bytes)` is the first class whose bound is at least `bytes`.

use std::fmt;

use lowtide_core::bytes::ByteSize;

/// The power of two of the least bound, 16 KiB.
const FIRST: u32 = 14;

/// Names by index, used as labels in metrics.
const NAMES: [&str; SizeClass::COUNT] = [
    "16KiB", "32KiB", "64KiB", "128KiB", "256KiB", "512KiB", "1MiB", "2MiB", "4MiB", "8MiB",
    "16MiB", "32MiB", "64MiB", "128MiB", "256MiB", "512MiB", "1GiB", "2GiB", "4GiB", "8GiB",
    "16GiB", "32GiB", "64GiB", "larger",
];

/// A class of requests of similar size: more than half of the bound and at most the bound.
///
/// ```
/// use lowtide_admission::ByteSize;
/// use lowtide_admission::SizeClass;
/// assert_eq!(SizeClass::of(ByteSize::mib(8)).name(), "8MiB");
/// assert_eq!(SizeClass::of(ByteSize::mib(9)).name(), "16MiB");
/// assert_eq!(SizeClass::of(ByteSize::ZERO).bound(), ByteSize::kib(16));
/// ```
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct SizeClass(u8);

#[cfg(feature = "serde")]
impl serde::Serialize for SizeClass {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(self.name())
    }
}

impl SizeClass {
    /// The number of classes.
    pub const COUNT: usize = Self::LAST as usize + 1;

    const LAST: u32 = 23;

    /// Returns the class of a request of `bytes` bytes.
    #[must_use]
    #[inline]
    #[expect(clippy::cast_possible_truncation, reason = "it is at most LAST")]
    pub const fn of(bytes: ByteSize) -> Self {
        // The exponent of the power of two at or above it, less FIRST. Up to FIRST the lowest bit,
        // set here, makes it zero.
        let at = (bytes.get().saturating_sub(1) >> (FIRST - 1) | 1).ilog2();
        Self(if at < Self::LAST { at as u8 } else { Self::LAST as u8 })
    }

    /// Returns all classes, from the smallest.
    #[must_use]
    pub fn all() -> [Self; Self::COUNT] {
        #[expect(clippy::cast_possible_truncation, reason = "there are few")]
        std::array::from_fn(|at| Self(at as u8))
    }

    /// Returns the smallest non-empty request of the class.
    pub(super) const fn least(self) -> ByteSize {
        match self.0.checked_sub(1) {
            Some(before) => Self(before).bound().saturating_add(ByteSize::new(1)),
            None => ByteSize::new(1),
        }
    }

    /// Returns the largest request of the class, or [`ByteSize::MAX`] for the last class.
    #[must_use]
    pub const fn bound(self) -> ByteSize {
        if self.0 as u32 >= Self::LAST {
            return ByteSize::MAX;
        }
        ByteSize::new(1 << (FIRST + self.0 as u32))
    }

    /// Returns the label in metrics: the bound, or `larger`.
    #[must_use]
    pub fn name(self) -> &'static str {
        NAMES.get(self.place()).copied().unwrap_or("larger")
    }

    /// Returns the index in a list of all classes.
    pub(crate) const fn place(self) -> usize {
        self.0 as usize
    }
}

impl fmt::Display for SizeClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_class_holds_what_is_over_half_of_its_bound_and_no_more_than_it() {
        for (at, class) in SizeClass::all().into_iter().enumerate() {
            assert_eq!(class.place(), at);
            let bound = class.bound();
            assert_eq!(SizeClass::of(bound), class);
            if bound == ByteSize::MAX {
                assert_eq!((at, class.name()), (SizeClass::COUNT - 1, "larger"));
                continue;
            }
            assert_eq!(class.name(), bound.exact(), "the name says the bound");
            let above = SizeClass::of(bound.saturating_add(ByteSize::new(1)));
            assert_eq!(above.place(), at + 1);
            if at > 0 {
                let half = ByteSize::new(bound.get() / 2);
                assert_eq!(SizeClass::of(half).place(), at - 1);
            }
        }
        assert_eq!(SizeClass::of(ByteSize::ZERO).place(), 0);
        assert_eq!(SizeClass::of(ByteSize::new(1)).place(), 0);
    }
}
