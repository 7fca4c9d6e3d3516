//! Arena options of one place, each value valid and with its spelling, and the selector of arenas
//! to shrink at the end of a run.
//!
//! There are four vocabularies: the `arena.*` keys, bare or with a scope, the names of
//! `OrtArenaCfg`, the options of ONNX Runtime's own CUDA provider, and cuArena's single limit. A
//! limit of 0 means no limit in ONNX Runtime's vocabularies, and all free device memory less a
//! margin in cuArena's. This module adds no defaults.
//!
//! Scopes are `ep_factory.<name>.arena.*` of the process and `ep.<name>.arena.*` of a session. A
//! factory's name is verbatim, a provider's in lower case, as in ONNX Runtime. Keys of other
//! providers and other software are ignored. A key that is meant for this arena but that ONNX
//! Runtime would ignore (the prefix in another case, the other place's scope, no scope, the shrink
//! of a run) is a fault.
//!
//! The selector (`cpu:0;gpu:0`) is not checked against existing arenas; the shrink does that. It is
//! stricter than ONNX Runtime's: an empty entry (`cpu:0;`) and a repeated target are errors.
//!
//! Invariants: at most one value for each key; two spellings of one key agree or are an error;
//! every key that ends in an option of this arena is read or is a fault; a selector has each target
//! once.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt;

use super::keys::{ArenaKey, Dialect, whole};
use crate::bytes::ByteSize;
use crate::config::error::{ConfigError, Fault};
use crate::device::driver::{Backend, Driver, DriverError};

/// The memory that cuArena leaves free on the device when it takes the rest.
pub const CUARENA_MARGIN: ByteSize = ByteSize::mib(256);

/// The name of cuArena's limit in errors and conflicts.
const CUARENA_LIMIT: &str = "cuArena limit";

const BARE: &str = "arena.";

/// A value and its spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Written {
    /// The value: bytes, [`u64::MAX`] for no limit, or the number of a strategy or a switch.
    pub(crate) value: u64,
    /// The key as spelled, with its scope.
    pub(super) spelled: String,
    /// The requested amount, if the device did not have that much memory left.
    pub(super) capped_from: Option<ByteSize>,
}

/// The options of one place, without those that were not set.
///
/// ```
/// use lowtide::config::arena::{ArenaKey, ArenaOptions};
///
/// let options = ArenaOptions::from_keys([("arena.max_mem", "0")])?;
/// assert_eq!(options.get(ArenaKey::Limit), Some(u64::MAX)); // 0: no limit
///
/// let error = ArenaOptions::from_keys([("arena.max_memory", "1"), ("arena.max_mem", "1g")]);
/// assert_eq!(error.unwrap_err().faults.len(), 2); // all faults together
/// # Ok::<(), lowtide::config::ConfigError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaOptions(BTreeMap<ArenaKey, Written>);

impl ArenaOptions {
    /// Creates empty options: every key has ONNX Runtime's default.
    #[must_use]
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Reads bare `arena.*` keys, as passed to a factory.
    ///
    /// # Errors
    /// [`ConfigError`] with every invalid value, unknown key and contradiction.
    pub fn from_keys<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        Self::read(entries, Dialect::Keys, |key| known(key, Dialect::Keys))
    }

    /// Reads the names of `OrtArenaCfg` (`CreateArenaCfgV2`). A value of -1 leaves an option unset,
    /// except for `max_mem`, which is unsigned there and has the default 0.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`].
    pub fn from_arena_cfg<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        Self::read(entries, Dialect::ArenaCfg, |key| known(key, Dialect::ArenaCfg))
    }

    /// Reads `gpu_mem_limit` and `arena_extend_strategy` from the options of ONNX Runtime's own
    /// CUDA provider and ignores the provider's other options.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`].
    pub fn from_provider_options<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        Self::read(entries, Dialect::Provider, |key| Ok(ArenaKey::named(key, Dialect::Provider)))
    }

    /// Reads the options of the shared arena from those of the process (`OrtEnvCreationOptions`):
    /// `ep_factory.<name>.arena.*`, with the name exactly as `GetName()` returns it.
    ///
    /// ```
    /// use lowtide::config::arena::ArenaOptions;
    ///
    /// let entries = [("ep_factory.CudaEp.arena.max_mem", "1073741824"), ("session.intra", "4")];
    /// assert!(!ArenaOptions::of_process("CudaEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("OtherEp", entries)?.is_empty());
    /// assert!(ArenaOptions::of_process("cudaep", entries).is_err()); // differs only in case
    /// # Ok::<(), lowtide::config::ConfigError>(())
    /// ```
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`], and keys that are meant for this arena but are
    /// not read in this place.
    pub fn of_process<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        let (prefix, other) = (process_prefix(name), session_prefix(name));
        Self::read(entries, Dialect::Keys, |key| in_scope(key, &prefix, &other))
    }

    /// Reads the options of a session: `ep.<name>.arena.*`, with the name in lower case.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::of_process`], also for
    /// `memory.enable_memory_arena_shrinkage`, which has no effect in a session.
    pub fn of_session<K: AsRef<str>, V: AsRef<str>>(
        name: &str,
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ConfigError> {
        let (prefix, other) = (session_prefix(name), process_prefix(name));
        Self::read(entries, Dialect::Keys, |key| match key {
            SHRINK_OPTION => Err("it in RunOptions".to_owned()),
            _ => in_scope(key, &prefix, &other),
        })
    }

    /// Reads the entries for which `find` returns a key; its error is what was expected.
    fn read<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
        dialect: Dialect,
        find: impl Fn(&str) -> Result<Option<ArenaKey>, String>,
    ) -> Result<Self, ConfigError> {
        let (mut options, mut faults) = (Self::new(), Vec::new());
        for (spelled, text) in entries {
            let (spelled, text) = (spelled.as_ref(), text.as_ref());
            match find(spelled) {
                Ok(None) => {}
                Ok(Some(key)) => {
                    let value = key.read(text, dialect);
                    let added = value.and_then(|value| options.add(key, spelled, value));
                    faults.extend(added.err().map(|expected| Fault::bad(spelled, text, expected)));
                }
                Err(expected) => {
                    let what = "has no effect in these options";
                    let problem = format!("{spelled} {what}: expected {expected}");
                    faults.push(Fault::of_name(spelled, problem));
                }
            }
        }
        ConfigError::check(faults)?;
        Ok(options)
    }

    fn add(&mut self, key: ArenaKey, spelled: &str, value: Option<u64>) -> Result<(), String> {
        let Some(value) = value else { return Ok(()) };
        let new = || Written { value, spelled: spelled.to_owned(), capped_from: None };
        let first = self.0.entry(key).or_insert_with(new);
        if first.value == value {
            return Ok(());
        }
        Err(format!("{}, as {} says", key.show(first.value), first.spelled))
    }

    /// Reads cuArena's limit of a pool. 0 means all free device memory less [`CUARENA_MARGIN`]. A
    /// larger amount is lowered to that, as in cuArena, and the resolution reports it. If the
    /// driver cannot report the free memory, an amount is accepted unchanged.
    ///
    /// # Errors
    /// [`ConfigError`] for 0 if the driver cannot report the free memory, and if no more than the
    /// margin is free.
    pub fn from_cuarena_limit(limit: ByteSize, driver: &dyn Driver) -> Result<Self, ConfigError> {
        Self::within(limit, driver.headroom(), driver.backend())
    }

    /// The same, with the driver's report of free memory.
    pub(super) fn within(
        limit: ByteSize,
        headroom: Result<Option<ByteSize>, DriverError>,
        backend: Backend,
    ) -> Result<Self, ConfigError> {
        let refused = |expected: String| ConfigError::bad(CUARENA_LIMIT, &limit.exact(), expected);
        let left = match headroom {
            Ok(Some(headroom)) => match headroom.saturating_sub(CUARENA_MARGIN) {
                ByteSize::ZERO => {
                    return Err(refused(format!(
                        "a device with more free memory than the {CUARENA_MARGIN} that stay free, \
                         not {headroom}"
                    )));
                }
                left => left,
            },
            headroom if limit.is_zero() => {
                let cause = headroom.err().map_or_else(String::new, |cause| format!(": {cause}"));
                return Err(refused(format!(
                    "an amount, because the {backend} driver cannot report free memory{cause}"
                )));
            }
            _ => ByteSize::MAX,
        };
        let lowered = limit > left;
        let written = Written {
            value: if limit.is_zero() || lowered { left.get() } else { limit.get() },
            spelled: CUARENA_LIMIT.to_owned(),
            capped_from: lowered.then_some(limit),
        };
        Ok(Self(BTreeMap::from([(ArenaKey::Limit, written)])))
    }

    /// Returns the value that was set for a key: bytes, [`u64::MAX`] for no limit, or the number of a
    /// strategy or a switch.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> Option<u64> {
        self.written(key).map(|written| written.value)
    }

    /// Returns `true` if no option is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn written(&self, key: ArenaKey) -> Option<&Written> {
        self.0.get(&key)
    }

    /// Returns the options that were set, in the order of [`ArenaKey::ALL`].
    pub(super) fn iter(&self) -> impl Iterator<Item = (ArenaKey, &Written)> {
        self.0.iter().map(|(key, written)| (*key, written))
    }

    /// Returns these options, and those of `under` that are not set here.
    pub(crate) fn over(&self, under: &Self) -> Self {
        let mut all = under.0.clone();
        all.extend(self.0.clone());
        Self(all)
    }

    /// Checks that every option is supported here, even if another place overrides it: ONNX Runtime
    /// gives a session that requests CUDA's pool its own one.
    ///
    /// # Errors
    /// [`ConfigError`] if an option is valid but not supported.
    pub(crate) fn check_supported(&self) -> Result<(), ConfigError> {
        match self.written(ArenaKey::UsePool) {
            Some(Written { value: 1, spelled, .. }) => {
                let expected = "0, because CUDA's memory pool is not supported: the arena commits \
                                and releases memory itself";
                Err(ConfigError::bad(spelled, "1", expected))
            }
            _ => Ok(()),
        }
    }
}

fn process_prefix(name: &str) -> String {
    format!("ep_factory.{name}.{BARE}")
}

fn session_prefix(name: &str) -> String {
    format!("ep.{}.{BARE}", name.to_ascii_lowercase())
}

/// Returns the key of this name, or the names that the dialect knows.
fn known(name: &str, dialect: Dialect) -> Result<Option<ArenaKey>, String> {
    ArenaKey::named(name, dialect).map(Some).ok_or_else(|| {
        let known = ArenaKey::ALL.into_iter().filter_map(|key| key.name_in(dialect));
        format!("one of {}", known.collect::<Vec<_>>().join(", "))
    })
}

/// Returns the key behind this prefix; `None` for a key of other software. `other` is the prefix
/// of the other place.
fn in_scope(key: &str, prefix: &str, other: &str) -> Result<Option<ArenaKey>, String> {
    if let Some(tail) = key.strip_prefix(prefix) {
        return known(&format!("{BARE}{tail}"), Dialect::Keys);
    }
    let tail_in_any_case = |prefix: &str| {
        let (head, tail) = key.split_at_checked(prefix.len())?;
        head.eq_ignore_ascii_case(prefix).then_some(tail)
    };
    let tail = [prefix, other, BARE].into_iter().find_map(tail_in_any_case);
    tail.map_or(Ok(None), |tail| Err(format!("{prefix}{tail}")))
}

/// ONNX Runtime's key for the shrink at the end of a run.
pub const SHRINK_OPTION: &str = "memory.enable_memory_arena_shrinkage";

/// A memory to shrink.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum ShrinkTarget {
    /// `cpu:0`: host memory, which is the process heap and pinned pools.
    Cpu(u32),
    /// `gpu:0`: the arenas of the device of this number, including those of the host driver.
    Gpu(u32),
}

impl fmt::Display for ShrinkTarget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Cpu(id) => write!(f, "cpu:{id}"),
            Self::Gpu(id) => write!(f, "gpu:{id}"),
        }
    }
}

/// Parses a selector, which is named so in errors. Returns its targets in order, each once.
///
/// # Errors
/// [`ConfigError`] with the first entry that is not a target.
pub(crate) fn targets(name: &str, selector: &str) -> Result<Vec<ShrinkTarget>, ConfigError> {
    let (mut targets, mut named) = (Vec::new(), BTreeSet::new());
    for entry in selector.split(';') {
        let id = |id| whole(id).and_then(|id| u32::try_from(id).ok());
        let target = match entry.split_once(':').map(|(kind, number)| (kind, id(number))) {
            Some(("cpu", Some(id))) => Ok(ShrinkTarget::Cpu(id)),
            Some(("gpu", Some(id))) => Ok(ShrinkTarget::Gpu(id)),
            Some(("cpu" | "gpu", None)) | None => Err("with the number of a device"),
            Some(_) => Err("cpu or gpu"),
        };
        // The loop is bounded by the number of entries; a repetition ends it.
        match target {
            Ok(target) if named.insert(target) => targets.push(target),
            wrong => {
                let why = wrong.err().unwrap_or("each once");
                let expected = format!("targets such as cpu:0;gpu:0: {entry:?} is not {why}");
                return Err(ConfigError::bad(name, selector, expected));
            }
        }
    }
    Ok(targets)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bug: each target was compared with all before it: minutes for a text of a megabyte.
    #[test]
    fn a_long_selector_was_read_in_square_time() {
        let entry = |number: u32| format!("gpu:{number}");
        let mut text = (0..100_000).map(entry).collect::<Vec<_>>().join(";");
        assert_eq!(targets("selector", &text).expect("each once").len(), 100_000);
        text.push_str(";gpu:7");
        let error = targets("selector", &text).expect_err("gpu:7 twice").to_string();
        assert!(error.ends_with("\"gpu:7\" is not each once"));
    }
}
