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

use thiserror::Error;

use super::error::{ArenaOptionsError, OptionFault};
use super::keys::whole;

/// ONNX Runtime's key for the shrink at the end of a run.
pub const SHRINK_OPTION: &str = "memory.enable_memory_arena_shrinkage";

/// A kind of memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum TargetKind {
    /// `cpu`: host memory, which is the process heap and pinned pools.
    Cpu,
    /// `gpu`: device arenas, including those of the host driver.
    Gpu,
}

impl TargetKind {
    const fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::Gpu => "gpu",
        }
    }
}

/// A memory to shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Target {
    /// The kind of memory.
    pub kind: TargetKind,
    /// The number of the device of that kind.
    pub id: u32,
}

impl fmt::Display for Target {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}", self.kind.name(), self.id)
    }
}

/// Targets of a shrink, in the given order. Never empty, each target once.
///
/// ```
/// use lowtide::config::arena::{SelectorError, Targets};
/// let targets: Targets = "cpu:0;gpu:0".parse()?;
/// assert_eq!(targets.iter().count(), 2);
/// assert!(matches!("tpu:0".parse::<Targets>(), Err(SelectorError::Kind { .. })));
/// # Ok::<(), SelectorError>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Targets(Vec<Target>);

impl Targets {
    /// Returns the targets in order.
    pub fn iter(&self) -> impl Iterator<Item = Target> {
        self.0.iter().copied()
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
    type Err = SelectorError;

    fn from_str(text: &str) -> Result<Self, SelectorError> {
        let (mut targets, mut named) = (Vec::new(), BTreeSet::new());
        for entry in text.split(';') {
            let owned = || entry.to_owned();
            if entry.is_empty() {
                return Err(SelectorError::Empty { selector: text.to_owned() });
            }
            let Some((kind, id)) = entry.split_once(':') else {
                return Err(SelectorError::NoId { entry: owned() });
            };
            let known = [TargetKind::Cpu, TargetKind::Gpu];
            let Some(kind) = known.into_iter().find(|known| known.name() == kind) else {
                return Err(SelectorError::Kind { entry: owned() });
            };
            let id = whole(id).and_then(|id| u32::try_from(id).ok());
            let id = id.ok_or_else(|| SelectorError::Id { entry: owned() })?;
            let target = Target { kind, id };
            // The loop is bounded by the number of entries; a repetition ends it.
            if !named.insert(target) {
                return Err(SelectorError::Twice { target });
            }
            targets.push(target);
        }
        Ok(Self(targets))
    }
}

/// An invalid selector.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum SelectorError {
    /// An empty selector, or an empty entry between two semicolons.
    #[error("selector {selector:?} has an empty entry: expected a list such as cpu:0;gpu:0")]
    Empty {
        /// The whole selector.
        selector: String,
    },
    /// An entry without a colon.
    #[error("{entry:?} has no device number: expected a target such as cpu:0 or gpu:0")]
    NoId {
        /// The entry.
        entry: String,
    },
    /// An unknown kind of device. The kinds are `cpu` and `gpu`, in lower case.
    #[error("{entry:?} has an unknown kind of device: expected cpu or gpu")]
    Kind {
        /// The entry.
        entry: String,
    },
    /// An entry without a device number after the colon.
    #[error("{entry:?} has an invalid device number: expected a target such as cpu:0 or gpu:0")]
    Id {
        /// The entry.
        entry: String,
    },
    /// The same target twice.
    #[error("target {target} is repeated: expected each target once")]
    Twice {
        /// The target.
        target: Target,
    },
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
    /// [`OptionFault::BadValue`] if the selector is invalid.
    pub fn from_entries<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut options = Self::new();
        for (key, value) in entries {
            let (key, value) = (key.as_ref(), value.as_ref());
            if key != SHRINK_OPTION || value.is_empty() {
                continue;
            }
            let targets = value.parse().map_err(|error: SelectorError| {
                let (key, value) = (key.to_owned(), value.to_owned());
                let expected = format!("targets such as cpu:0;gpu:0 ({error})");
                let faults = vec![OptionFault::BadValue { key, value, expected }];
                ArenaOptionsError { faults }
            })?;
            options.shrink = Some(targets);
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
        let target = Target { kind: TargetKind::Gpu, id: 7 };
        assert_eq!(text.parse::<Targets>(), Err(SelectorError::Twice { target }));
    }
}
