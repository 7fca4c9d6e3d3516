//! The selector of arenas to shrink, as in ONNX Runtime (`cpu:0;gpu:0`), and the run option that
//! contains it.
//!
//! The selector is not checked against existing arenas; the shrink does that. It is stricter than
//! ONNX Runtime's: an empty entry (`cpu:0;`) and a repeated target are errors.
//!
//! Invariant: `parse(targets.to_string()) = targets`, and each target is in it once.

use std::collections::BTreeSet;
use std::fmt;
use std::str::FromStr;

use super::keys::whole;
use crate::config::error::{ConfigError, Fault};

/// ONNX Runtime's key for the shrink at the end of a run.
pub const SHRINK_OPTION: &str = "memory.enable_memory_arena_shrinkage";

/// A memory to shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum Target {
    /// `cpu:0`: host memory, which is the process heap and pinned pools.
    Cpu(u32),
    /// `gpu:0`: the arenas of the device of this number, including those of the host driver.
    Gpu(u32),
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(id) => write!(f, "cpu:{id}"),
            Self::Gpu(id) => write!(f, "gpu:{id}"),
        }
    }
}

/// Targets of a shrink, in the given order. Never empty, each target once.
///
/// ```
/// use lowtide::config::ConfigError;
/// use lowtide::config::arena::Targets;
///
/// let targets: Targets = "cpu:0;gpu:0".parse()?;
/// assert_eq!(targets.iter().count(), 2);
/// assert!("tpu:0".parse::<Targets>().is_err());
/// # Ok::<(), ConfigError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets(Vec<Target>);

impl Targets {
    /// Returns the targets in order.
    pub fn iter(&self) -> impl Iterator<Item = Target> {
        self.0.iter().copied()
    }

    /// Parses a selector under this name.
    fn read(name: &str, text: &str) -> Result<Self, ConfigError> {
        let (mut targets, mut named) = (Vec::new(), BTreeSet::new());
        for entry in text.split(';') {
            let id = |id| whole(id).and_then(|id| u32::try_from(id).ok());
            let target = match entry.split_once(':').map(|(kind, number)| (kind, id(number))) {
                Some(("cpu", Some(id))) => Ok(Target::Cpu(id)),
                Some(("gpu", Some(id))) => Ok(Target::Gpu(id)),
                Some(("cpu" | "gpu", None)) | None => Err("with the number of a device"),
                Some(_) => Err("cpu or gpu"),
            };
            // The loop is bounded by the number of entries; a repetition ends it.
            match target {
                Ok(target) if named.insert(target) => targets.push(target),
                wrong => {
                    let why = wrong.err().unwrap_or("each once");
                    let expected = format!("targets such as cpu:0;gpu:0: {entry:?} is not {why}");
                    return Err(ConfigError { faults: vec![Fault::bad(name, text, expected)] });
                }
            }
        }
        Ok(Self(targets))
    }
}

impl fmt::Display for Targets {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (at, target) in self.0.iter().enumerate() {
            let separator = if at == 0 { "" } else { ";" };
            write!(f, "{separator}{target}")?;
        }
        Ok(())
    }
}

impl FromStr for Targets {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        Self::read("selector", text)
    }
}

/// The memory options of one run.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct RunOptions {
    /// The targets to shrink when the run ends.
    pub shrink: Option<Targets>,
}

impl RunOptions {
    /// Creates options without a shrink.
    #[must_use]
    pub const fn new() -> Self {
        Self { shrink: None }
    }

    /// Creates options that shrink these targets when the run ends.
    #[must_use]
    pub fn shrinking(targets: Targets) -> Self {
        Self { shrink: Some(targets) }
    }

    /// Reads `memory.enable_memory_arena_shrinkage` from the options of a run and ignores all
    /// others. An empty value means no shrink, as in ONNX Runtime.
    ///
    /// # Errors
    /// [`ConfigError`] if the selector is invalid.
    pub fn from_entries<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        let mut options = Self::new();
        for (key, value) in entries {
            if key.as_ref() == SHRINK_OPTION && !value.as_ref().is_empty() {
                options.shrink = Some(Targets::read(SHRINK_OPTION, value.as_ref())?);
            }
        }
        Ok(options)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bug: each target was compared with all before it: minutes for a text of a megabyte.
    #[test]
    fn a_long_selector_was_read_in_square_time() {
        let entry = |number: u32| format!("gpu:{number}");
        let mut text = (0..100_000).map(entry).collect::<Vec<_>>().join(";");
        let targets: Targets = text.parse().expect("each once");
        assert_eq!((targets.iter().count(), targets.to_string() == text), (100_000, true));
        text.push_str(";gpu:7");
        let error = text.parse::<Targets>().expect_err("gpu:7 twice").to_string();
        assert!(error.ends_with("\"gpu:7\" is not each once"));
    }
}
