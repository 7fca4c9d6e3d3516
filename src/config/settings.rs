//! What was written: settings with gaps, each value valid in itself.

use std::fmt;
use std::str::FromStr;
use std::time::Duration;

use thiserror::Error;

use super::profile::Profile;
use crate::bytes::ByteSize;
use crate::decay::DecayTime;
use crate::device::Contents;

/// What somebody wrote, in code or in the environment; `None` means that nobody said.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Settings {
    /// What the other settings start from.
    pub profile: Option<Profile>,
    /// Host memory that must not be passed; unset: the cgroup's limit, or the machine's memory.
    pub memory_limit: Option<ByteSize>,
    /// Part of the limit up to which requests are admitted, in (0, 1].
    pub ceiling: Option<f64>,
    /// Where device arenas live.
    pub device: Option<DeviceChoice>,
    /// Device memory that an arena must not pass; unset: no limit of its own.
    pub device_limit: Option<ByteSize>,
    /// How long idle device memory may stay.
    pub device_decay: Option<DecayTime>,
    /// After how long without a lease a device arena falls asleep; `Some(None)`: never. Never zero.
    pub device_sleep_after: Option<Option<Duration>>,
    /// How long a device arena stays awake at least, once it was opened or woken.
    pub device_sleep_residency: Option<Duration>,
    /// What becomes of the stable region's contents while an arena sleeps by itself.
    pub device_sleep_stable: Option<Contents>,
    /// The same of the dynamic region's.
    pub device_sleep_dynamic: Option<Contents>,
    /// How long jemalloc keeps dirty pages.
    pub heap_decay: Option<DecayTime>,
    /// jemalloc's background threads at most; 0 for none.
    pub background_threads: Option<u32>,
    /// How often a busy service purges its heap; `Some(None)`: only under pressure.
    pub purge_interval: Option<Option<Duration>>,
    /// Idle time after which resources without their own are unloaded. Never zero;
    /// [`Duration::MAX`] for never.
    pub idle_unload: Option<Duration>,
    /// How often metrics are published. Never zero.
    pub metrics_interval: Option<Duration>,
}

/// Where device arenas live.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The best rung that works; the host driver, with a warning, where there is no GPU.
    #[default]
    Auto,
    /// A CUDA device, or a start-up error with the cause.
    Cuda,
    /// The host driver: host memory behind the same arena.
    Host,
    /// No device arenas; opening one is an error.
    None,
}

impl DeviceChoice {
    const ALL: [(Self, &'static str); 4] =
        [(Self::Auto, "auto"), (Self::Cuda, "cuda"), (Self::Host, "host"), (Self::None, "none")];
}

impl fmt::Display for DeviceChoice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::ALL.iter().find(|(choice, _)| choice == self);
        f.write_str(name.map_or("", |(_, name)| name))
    }
}

impl FromStr for DeviceChoice {
    type Err = &'static str;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let named = Self::ALL.into_iter().find(|(_, name)| *name == text);
        named.map(|(choice, _)| choice).ok_or("auto, cuda, host or none")
    }
}

/// Settings that cannot be used, all of them at once.
///
/// Its `Debug` is its text, so that a `main` that returns it says what is wrong.
#[derive(Clone, Error, PartialEq, Eq)]
pub struct ConfigError {
    /// Each fault, in order of the names. Never empty.
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

/// One setting that cannot be used.
#[derive(Clone, Debug, Error, PartialEq, Eq, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Fault {
    /// The value is none that the setting can have.
    #[error("{name}={value:?}: expected {expected}")]
    BadValue {
        /// The variable or setting.
        name: String,
        /// What it was set to.
        value: String,
        /// What was expected.
        expected: String,
    },
    /// A `LOWTIDE_*` variable that nothing reads.
    #[error("{name} is not a variable of lowtide: {}", meant(name))]
    UnknownVariable {
        /// The variable.
        name: String,
    },
}

/// The variable that was meant, or all there are.
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

/// A name is near another up to so many edits, and up to one for every two letters of its own.
const EDITS_MAX: usize = 4;

/// The least number of letters to put in, leave out or change that makes one of the other.
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
