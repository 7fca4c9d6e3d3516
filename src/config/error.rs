//! Errors of settings: the faults, with the accepted values or a similar name.

use std::fmt;

use thiserror::Error;

/// All settings that are invalid.
///
/// Its `Debug` output is its message, so a `main` that returns this error prints a readable text.
#[derive(Clone, Error, PartialEq, Eq)]
#[non_exhaustive]
pub struct ConfigError {
    /// The faults, in order of the settings' names. Never empty.
    pub faults: Vec<Fault>,
}

impl fmt::Display for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.faults.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

/// Implements `Debug` as the message: `main` prints the `Debug` output of the error that it returns.
macro_rules! debug_is_message {
    ($($error:ty),*) => {
        $(impl std::fmt::Debug for $error {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                std::fmt::Display::fmt(self, f)
            }
        })*
    };
}
pub(crate) use debug_is_message;

debug_is_message!(ConfigError);

/// One invalid setting.
#[derive(Clone, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// A value that the setting does not accept.
    #[error("{name}={value:?}: expected {expected}")]
    BadValue {
        /// The variable or setting.
        name: String,
        /// The value that was set.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// A key that is not read in its place.
    #[error("{name} has no effect in these options: expected {expected}")]
    UnknownKey {
        /// The key as spelled.
        name: String,
        /// The keys that are read there.
        expected: String,
    },
    /// An unknown `LOWTIDE_*` variable.
    #[error("unknown variable {name}: {}", meant(name))]
    UnknownVariable {
        /// The variable.
        name: String,
    },
}

impl Fault {
    pub(super) fn bad(name: &str, value: &str, expected: impl Into<String>) -> Self {
        Self::BadValue { name: name.to_owned(), value: value.to_owned(), expected: expected.into() }
    }
}

/// The most similar known variable, or all of them.
fn meant(name: &str) -> String {
    let names = || super::env::VARIABLES.iter().map(|variable| variable.name);
    let tail = name.len().saturating_sub(super::env::PREFIX.len());
    let most = EDITS_MAX.min(tail / 2);
    names()
        .filter(|known| known.len().abs_diff(name.len()) <= most)
        .map(|known| (edits(name, known), known))
        .min()
        .filter(|(edits, _)| *edits <= most)
        .map_or_else(
            || format!("expected one of {}", names().collect::<Vec<_>>().join(", ")),
            |(_, known)| format!("did you mean {known}?"),
        )
}

/// The maximum edit distance of a suggestion, which is also limited to half the name's letters.
const EDITS_MAX: usize = 4;

/// The edit distance (Levenshtein).
fn edits(one: &str, other: &str) -> usize {
    let mut row: Vec<usize> = (0..=other.len()).collect();
    for (at, letter) in one.bytes().enumerate() {
        let mut before = std::mem::replace(&mut row[0], at + 1);
        for (to, wanted) in other.bytes().enumerate() {
            let changed = before + usize::from(letter != wanted);
            before = row[to + 1];
            row[to + 1] = changed.min(before + 1).min(row[to] + 1);
        }
    }
    row[other.len()]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn edits_are_counted() {
        for (one, other, count) in
            [("", "", 0), ("ebb", "ebb", 0), ("", "ebb", 3), ("ebb", "eb", 1), ("tide", "dive", 2)]
        {
            assert_eq!((edits(one, other), edits(other, one)), (count, count), "{one} {other}");
        }
    }

    #[test]
    fn a_misspelt_variable_is_told_from_one_that_is_like_none() {
        let text = |name: &str| Fault::UnknownVariable { name: name.to_owned() }.to_string();
        for name in ["LOWTIDE_MEM_LIMIT", "LOWTIDE_MEMORY_LIMTI", "LOWTIDE_MEMORYLIMIT"] {
            let text = text(name);
            assert!(text.ends_with("did you mean LOWTIDE_MEMORY_LIMIT?"), "{text}");
        }
        for name in ["LOWTIDE_", "LOWTIDE_X", "LOWTIDE_COLOUR_OF_THE_SEA", "LOWTIDE_\u{e4}"] {
            let text = text(name);
            assert!(text.contains("expected one of LOWTIDE_PROFILE, "), "{text}");
        }
    }
}
