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
        f.write_str(&self.faults.iter().map(Fault::to_string).collect::<Vec<_>>().join("; "))
    }
}

/// Implements `Debug` as the message: `main` prints the `Debug` output of the error that it
/// returns.
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

impl ConfigError {
    /// Creates the error of a value that a setting does not accept.
    pub(crate) fn bad(name: &str, value: &str, expected: impl fmt::Display) -> Self {
        Self { faults: vec![Fault::bad(name, value, expected)] }
    }

    /// Returns `Err` with these faults, if there are any.
    pub(super) fn check(mut faults: Vec<Fault>) -> Result<(), Self> {
        faults.sort();
        if faults.is_empty() { Ok(()) } else { Err(Self { faults }) }
    }
}

/// One invalid setting.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub struct Fault {
    /// The variable, setting or key, as spelled.
    pub name: String,
    /// The value that was set; `None` if the name is unknown or has no effect in its place, or the
    /// value is a secret.
    pub value: Option<String>,
    /// The problem, with what was expected.
    pub problem: String,
}

impl Fault {
    pub(super) fn bad(name: &str, value: &str, expected: impl fmt::Display) -> Self {
        let problem = format!("expected {expected}");
        Self { name: name.to_owned(), value: Some(value.to_owned()), problem }
    }

    /// Creates a fault without a value.
    pub(crate) fn of_name(name: &str, problem: String) -> Self {
        Self { name: name.to_owned(), value: None, problem }
    }
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Some(value) => write!(f, "{}={value:?}: {}", self.name, self.problem),
            None => f.write_str(&self.problem),
        }
    }
}
