//! Amounts of memory as one type, with parsing, printing and saturating arithmetic.
//!
//! Binary units only. `512m` means 512 MiB, as in `docker run -m 512m`. `512MB` is an error,
//! because it is also read as 512,000,000.
//!
//! Invariant: `parse(print_exact(size)) = size` for every size, where `print_exact` is
//! [`ByteSize::exact`].

use std::fmt;
use std::iter::Sum;
use std::str::FromStr;

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;
const TIB: u64 = 1 << 40;

/// An amount of memory in bytes.
///
/// ```
/// use lowtide_core::ByteSize;
/// assert_eq!("512m".parse::<ByteSize>().unwrap(), ByteSize::mib(512)); // as Docker reads it
/// assert_eq!("1.5GiB".parse::<ByteSize>().unwrap(), ByteSize::mib(1536));
/// assert_eq!(ByteSize::mib(1536).to_string(), "1.5 GiB");
/// assert!("512MB".parse::<ByteSize>().is_err());
/// ```
#[derive(Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(transparent))]
pub struct ByteSize(u64);

impl ByteSize {
    /// Zero bytes.
    pub const ZERO: Self = Self(0);
    /// The largest amount. It stands for "no limit".
    pub const MAX: Self = Self(u64::MAX);

    /// Creates an amount of `bytes` bytes.
    #[must_use]
    pub const fn new(bytes: u64) -> Self {
        Self(bytes)
    }

    /// Creates an amount of `count` KiB. Saturates at [`ByteSize::MAX`].
    #[must_use]
    pub const fn kib(count: u64) -> Self {
        Self(count.saturating_mul(KIB))
    }

    /// Creates an amount of `count` MiB. Saturates at [`ByteSize::MAX`].
    #[must_use]
    pub const fn mib(count: u64) -> Self {
        Self(count.saturating_mul(MIB))
    }

    /// Creates an amount of `count` GiB. Saturates at [`ByteSize::MAX`].
    #[must_use]
    pub const fn gib(count: u64) -> Self {
        Self(count.saturating_mul(GIB))
    }

    /// Creates an amount from a length in memory. Lossless: no supported platform has more than 64
    /// bits.
    #[must_use]
    pub const fn of(bytes: usize) -> Self {
        Self(bytes as u64)
    }

    /// Returns the number of bytes.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }

    /// Returns the number of bytes as a length in memory, or `None` if it does not fit a `usize`.
    #[must_use]
    pub fn as_usize(self) -> Option<usize> {
        usize::try_from(self.0).ok()
    }

    /// Returns the number of bytes as a floating-point number, for metrics and ratios. Exact below
    /// 2^53.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a figure for people and plots")]
    pub const fn as_f64(self) -> f64 {
        self.0 as f64
    }

    /// Returns `true` if the amount is zero.
    #[must_use]
    pub const fn is_zero(self) -> bool {
        self.0 == 0
    }

    /// Returns the sum, or `None` if it does not fit 64 bits.
    #[must_use]
    #[inline]
    pub fn checked_add(self, other: Self) -> Option<Self> {
        self.0.checked_add(other.0).map(Self)
    }

    /// Returns the difference, or `None` if `other` is larger.
    #[must_use]
    #[inline]
    pub fn checked_sub(self, other: Self) -> Option<Self> {
        self.0.checked_sub(other.0).map(Self)
    }

    /// Returns the product, or `None` if it does not fit 64 bits.
    #[must_use]
    #[inline]
    pub fn checked_mul(self, factor: u64) -> Option<Self> {
        self.0.checked_mul(factor).map(Self)
    }

    /// Returns the sum. Saturates at [`ByteSize::MAX`].
    #[must_use]
    pub const fn saturating_add(self, other: Self) -> Self {
        Self(self.0.saturating_add(other.0))
    }

    /// Returns the difference. Saturates at zero.
    #[must_use]
    pub const fn saturating_sub(self, other: Self) -> Self {
        Self(self.0.saturating_sub(other.0))
    }

    /// Returns the amount times `ratio`, rounded down and saturated. NaN and negative ratios count
    /// as zero.
    #[must_use]
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "a float cast saturates, and takes NaN to zero, which is what is promised"
    )]
    pub const fn scaled(self, ratio: f64) -> Self {
        Self((self.as_f64() * ratio) as u64)
    }

    /// Returns the next multiple of `step` at or above the amount, or `None` if it does not fit 64
    /// bits.
    ///
    /// # Panics
    /// If `step` is zero.
    #[must_use]
    #[inline]
    pub fn next_multiple_of(self, step: Self) -> Option<Self> {
        self.0.checked_next_multiple_of(step.0).map(Self)
    }

    /// Returns the amount as text in the largest unit that divides it. Parsing the text returns the
    /// same amount.
    #[must_use]
    pub fn exact(self) -> String {
        for (unit, name) in [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")] {
            if self.0 != 0 && self.0.is_multiple_of(unit) {
                return format!("{}{name}", self.0 / unit);
            }
        }
        format!("{}B", self.0)
    }
}

impl fmt::Display for ByteSize {
    /// Prints one decimal in the largest unit that leaves at least 1, and `MAX` for
    /// [`ByteSize::MAX`]. For people, not for parsing.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::MAX {
            return f.pad("MAX");
        }
        let text = [(TIB, "TiB"), (GIB, "GiB"), (MIB, "MiB"), (KIB, "KiB")]
            .into_iter()
            .find(|(unit, _)| self.0 >= *unit)
            .map_or_else(
                || format!("{} B", self.0),
                |(unit, name)| format!("{:.1} {name}", self.as_f64() / Self(unit).as_f64()),
            );
        f.pad(&text)
    }
}

impl fmt::Debug for ByteSize {
    /// Prints the same text as `Display`, followed by the bytes if that text is rounded. Unequal
    /// sizes never print the same.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = self.to_string();
        if *self == Self::MAX || text.parse() == Ok(*self) {
            f.write_str(&text)
        } else {
            write!(f, "{text} ({} B)", self.0)
        }
    }
}

impl Sum for ByteSize {
    fn sum<I: Iterator<Item = Self>>(sizes: I) -> Self {
        sizes.fold(Self::ZERO, Self::saturating_add)
    }
}

/// There are no digits at the start.
const NO_NUMBER: &str = "digits, then B, k, m, g, t, Ki, Mi, Gi, Ti, KiB, MiB, GiB or TiB";
/// The unit is unknown, or decimal and therefore ambiguous.
const NO_UNIT: &str = "digits, then B, k, m, g, t, Ki, Mi, Gi, Ti, KiB, MiB, GiB or TiB \
    (MB and other decimal units are ambiguous and not accepted)";

impl FromStr for ByteSize {
    type Err = &'static str;

    /// Parses digits, an optional decimal fraction and an optional unit: `b k m g t` (as Docker
    /// reads them), `Ki Mi Gi Ti` or `KiB MiB GiB TiB`, in any case. A space before the unit is
    /// allowed. The error describes what is accepted.
    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let trimmed = text.trim();
        let split =
            trimmed.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(trimmed.len());
        let (number, unit) = trimmed.split_at(split);
        let unit = unit.trim_start();
        let scale = match unit.to_ascii_lowercase().as_str() {
            "" | "b" => 1,
            "k" | "ki" | "kib" => KIB,
            "m" | "mi" | "mib" => MIB,
            "g" | "gi" | "gib" => GIB,
            "t" | "ti" | "tib" => TIB,
            _ if number.is_empty() => return Err(NO_NUMBER),
            _ => return Err(NO_UNIT),
        };
        let (whole, fraction) = number.split_once('.').unwrap_or((number, "0"));
        if whole.is_empty() || fraction.is_empty() {
            return Err(NO_NUMBER);
        }
        let bytes = bytes_of(whole, fraction, scale);
        bytes.map(Self).ok_or("a whole number of bytes below 2^64")
    }
}

/// Computes `whole.fraction x scale` in integers. Returns `None` if it is not a whole number of
/// bytes below 2^64.
fn bytes_of(whole: &str, fraction: &str, scale: u64) -> Option<u64> {
    const FRACTION_DIGITS_MAX: usize = 12;
    if fraction.len() > FRACTION_DIGITS_MAX {
        return None;
    }
    let whole: u64 = whole.parse().ok()?;
    let ten_power = 10_u128.pow(u32::try_from(fraction.len()).ok()?);
    let parts = u128::from(fraction.parse::<u64>().ok()?) * u128::from(scale);
    if !parts.is_multiple_of(ten_power) {
        return None;
    }
    let total = u128::from(whole) * u128::from(scale) + parts / ten_power;
    u64::try_from(total).ok()
}

/// Returns the beginning of a text of at most so many bytes, without an incomplete character.
#[doc(hidden)]
#[inline]
#[must_use]
pub fn prefix(text: &str, most: usize) -> &str {
    let mut length = text.len().min(most);
    while !text.is_char_boundary(length) {
        length -= 1;
    }
    text.get(..length).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_bare_letter_is_read_as_docker_reads_it() {
        for (text, size) in [
            ("512m", ByteSize::mib(512)),
            ("512M", ByteSize::mib(512)),
            ("512Mi", ByteSize::mib(512)),
            ("512MiB", ByteSize::mib(512)),
            ("1g", ByteSize::gib(1)),
            ("0.5g", ByteSize::mib(512)),
            ("64 KiB", ByteSize::kib(64)),
            ("1t", ByteSize::gib(1024)),
            ("0", ByteSize::ZERO),
            ("17", ByteSize::new(17)),
            ("18446744073709551615", ByteSize::MAX),
        ] {
            assert_eq!(text.parse::<ByteSize>(), Ok(size), "{text}");
        }
    }

    #[test]
    fn what_is_no_amount_is_refused_with_the_text() {
        for text in [
            "",
            "m",
            "-1",
            "1e3",
            "0.1",
            "1.",
            ".5",
            "1.2.3",
            "512MB",
            "12 parrots",
            "18446744073709551616",
            "99999999999t",
            "1.0000000000001g",
        ] {
            let expected = text.parse::<ByteSize>().expect_err(text);
            assert!(
                expected.contains("digits") || expected.contains("number"),
                "{text}: {expected}"
            );
        }
    }

    #[test]
    fn every_unit_that_an_error_names_is_one_and_both_errors_name_the_same() {
        let (none, unit) = ("m".parse::<ByteSize>(), "5x".parse::<ByteSize>());
        let none = none.expect_err("no number");
        assert!(unit.expect_err("no unit").starts_with(none));
        let units = none.strip_prefix("digits, then ").expect("units after the digits");
        for unit in units.split(", ").flat_map(|part| part.split(" or ")) {
            assert!(format!("1{unit}").parse::<ByteSize>().is_ok(), "{unit}");
        }
    }

    #[test]
    fn exact_text_parses_back() {
        for bytes in [0, 1, 1023, 1024, 1025, 3 << 20, 5 << 30, 7 << 40, u64::MAX] {
            let size = ByteSize::new(bytes);
            assert_eq!(size.exact().parse(), Ok(size));
        }
    }

    #[test]
    fn printed_for_people_and_told_apart_in_debug() {
        for (size, display, debug) in [
            (ByteSize::ZERO, "0 B", "0 B"),
            (ByteSize::mib(1536), "1.5 GiB", "1.5 GiB"),
            (ByteSize::new((1 << 20) + 1), "1.0 MiB", "1.0 MiB (1048577 B)"),
            (ByteSize::MAX, "MAX", "MAX"),
        ] {
            assert_eq!((size.to_string(), format!("{size:?}")), (display.into(), debug.into()));
        }
        assert_eq!(format!("{:>8}|", ByteSize::MAX), "     MAX|");
    }

    #[test]
    fn arithmetic_holds_at_the_ends() {
        assert_eq!(ByteSize::MAX.checked_add(ByteSize::new(1)), None);
        assert_eq!(ByteSize::ZERO.checked_sub(ByteSize::new(1)), None);
        assert_eq!(ByteSize::MAX.saturating_add(ByteSize::MAX), ByteSize::MAX);
        assert_eq!(ByteSize::mib(100).scaled(0.5), ByteSize::mib(50));
        assert_eq!(ByteSize::mib(1).scaled(f64::NAN), ByteSize::ZERO);
        assert_eq!(ByteSize::mib(1).scaled(-1.0), ByteSize::ZERO);
        assert_eq!(ByteSize::MAX.next_multiple_of(ByteSize::mib(2)), None);
    }
}
