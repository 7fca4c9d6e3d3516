//! Settings as given in code or in the environment: each may be unset, each value is valid.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use lowtide_admission::ExhaustionPolicy;

/// Settings from code or from the environment. `None` leaves a setting to the profile or default.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// The profile, which gives the defaults of other settings.
    pub profile: Option<Profile>,
    /// The limit of host memory. Unset: the cgroup's limit, or the machine's memory.
    pub memory_limit: Option<ByteSize>,
    /// The share of the limit up to which requests are admitted, in (0, 1]. Unset: .80, which rises
    /// to at most .93 while the measured growth allows it.
    pub ceiling: Option<f64>,
    /// Bytes that a request is assumed to need per estimated byte, until that is measured; from 1
    /// to 5.
    pub correction_factor: Option<f64>,
    /// The settings of device arenas.
    #[cfg(feature = "device")]
    pub device: super::DeviceSettings,
    /// The time for which jemalloc keeps dirty pages.
    pub heap_decay: Option<DecayTime>,
    /// The maximum number of jemalloc's background threads; 0 for none.
    pub background_threads: Option<u32>,
    /// The time between heap purges of a busy service; `Some(None)` purges only under pressure.
    /// Must not be zero.
    pub purge_interval: Option<Option<Duration>>,
    /// The idle time after which resources without their own setting are unloaded;
    /// [`Duration::MAX`] for never. Must not be zero.
    pub idle_unload: Option<Duration>,
    /// The longest time that a request waits for room behind a layer of
    /// [`Memory::layer`](crate::Memory::layer) without its own setting; zero to reject immediately.
    pub max_wait: Option<Duration>,
    /// The time between publications of metrics. Must not be zero.
    pub metrics_interval: Option<Duration>,
    /// The policy for memory that no request owns and that leaves no room for requests.
    pub exhaustion_policy: Option<ExhaustionPolicy>,
}

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

impl fmt::Debug for ConfigError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

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
    /// An unknown `LOWTIDE_*` variable.
    #[error("unknown variable {name}: {}", meant(name))]
    UnknownVariable {
        /// The variable.
        name: String,
    },
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
