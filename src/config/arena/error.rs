//! Errors for arena options: all faults of a set of options together.
//!
//! Options that ONNX Runtime would ignore silently are faults here.
//!
//! Invariant: an error has at least one fault, and each fault names the key as spelled.

use std::fmt;

use thiserror::Error;

use super::keys::{ArenaKey, Dialect};
use super::selector::SHRINK_OPTION;

/// Arena options that are invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub struct ArenaOptionsError {
    /// The faults, in the order of the options. Never empty.
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

/// One invalid option.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum OptionFault {
    /// A value that the option does not accept.
    #[error("{key}={value:?}: expected {expected}")]
    BadValue {
        /// The key as spelled.
        key: String,
        /// The value that was set.
        value: String,
        /// The accepted values.
        expected: String,
    },
    /// An unknown option.
    #[error("unknown arena option {key}: expected one of {known}")]
    UnknownKey {
        /// The key as spelled.
        key: String,
        /// The known names.
        known: String,
    },
    /// The same option set twice, with different values.
    #[error("{key} is set to different values by {first} and {second}: expected one of the two")]
    Twice {
        /// The option.
        key: ArenaKey,
        /// Its first spelling.
        first: String,
        /// Its second spelling.
        second: String,
    },
    /// A prefix that differs from the expected one only in case. ONNX Runtime ignores such a key.
    #[error("the prefix of {key} differs in case: expected {expected}")]
    WrongCase {
        /// The key as spelled.
        key: String,
        /// The expected prefix.
        expected: String,
    },
    /// An option that is not read in this place. ONNX Runtime ignores such a key.
    #[error("{key} has no effect in these options: expected {expected}")]
    WrongScope {
        /// The key as spelled.
        key: String,
        /// The spelling that is read here.
        expected: String,
    },
    /// The shrink at the end of a run, set among a session's options. ONNX Runtime ignores it
    /// there.
    #[error("{SHRINK_OPTION} is not a session option: expected it in RunOptions")]
    RunOption,
    /// A valid option that this version does not support.
    #[error("{key}={value}: {what} is not supported; expected {expected}")]
    Unsupported {
        /// The key as spelled.
        key: String,
        /// The value that was set.
        value: String,
        /// The unsupported feature.
        what: &'static str,
        /// The value to use instead.
        expected: &'static str,
    },
}

impl OptionFault {
    pub(super) fn unknown(key: &str, dialect: Dialect) -> Self {
        let known = ArenaKey::ALL.into_iter().filter_map(|key| key.name_in(dialect));
        Self::UnknownKey { key: key.to_owned(), known: known.collect::<Vec<_>>().join(", ") }
    }
}
