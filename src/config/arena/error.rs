//! What is wrong with options that cannot be used, all of it at once.
//!
//! It repairs nothing: an option that ONNX Runtime would pass over in silence is a fault here.
//!
//! Invariant: an error has at least one fault, and each fault names the key as it was spelled.

use std::fmt;

use thiserror::Error;

use super::keys::{ArenaKey, Dialect};
use super::selector::SHRINK_OPTION;

/// Options that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub struct ArenaOptionsError {
    /// Each fault, in the order of the options. Never empty.
    pub faults: Vec<OptionFault>,
}

impl fmt::Display for ArenaOptionsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, fault) in self.faults.iter().enumerate() {
            let separator = if at == 0 { "" } else { "; " };
            write!(f, "{separator}{fault}")?;
        }
        Ok(())
    }
}

/// One option that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptionFault {
    /// The value is none that the option can have.
    #[error("{key}={value:?}: expected {expected}")]
    BadValue {
        /// The key as it was spelled.
        key: String,
        /// What it was set to.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// No option has this name.
    #[error("{key} is no option of an arena: expected one of {known}")]
    UnknownKey {
        /// The key as it was spelled.
        key: String,
        /// Every name that is known there.
        known: String,
    },
    /// The same option twice, with different values.
    #[error("{key} is set by {first} and otherwise by {second}: expected one of the two")]
    Twice {
        /// The option.
        key: ArenaKey,
        /// How it was spelled first.
        first: String,
        /// How it was spelled then.
        second: String,
    },
    /// The prefix differs from the right one in case alone. ONNX Runtime ignores such a key.
    #[error("{key} is spelled in another case than {expected}")]
    WrongCase {
        /// The key as it was spelled.
        key: String,
        /// The prefix that is read here.
        expected: String,
    },
    /// The option is not read in this place. ONNX Runtime ignores such a key.
    #[error("{key} is not read here: expected {expected}")]
    WrongScope {
        /// The key as it was spelled.
        key: String,
        /// How it is spelled here.
        expected: String,
    },
    /// The shrink at the end of a run among a session's options, where ONNX Runtime ignores it.
    #[error("{SHRINK_OPTION} is an option of a run: expected it in RunOptions, not in a session")]
    RunOption,
    /// Valid, and not to be had here.
    #[error("{key}={value}: this version has no {what}; expected {expected}")]
    Unsupported {
        /// The key as it was spelled.
        key: String,
        /// What it was set to.
        value: String,
        /// What is missing.
        what: &'static str,
        /// What to do instead.
        expected: &'static str,
    },
}

impl OptionFault {
    pub(super) fn unknown(key: &str, dialect: Dialect) -> Self {
        let known = ArenaKey::ALL.into_iter().filter_map(|key| key.name_in(dialect));
        Self::UnknownKey { key: key.to_owned(), known: known.collect::<Vec<_>>().join(", ") }
    }
}
