//! Arena options of one place, each value valid and with its spelling.
//!
//! There are four vocabularies: the bare `arena.*` keys, the names of `OrtArenaCfg`, the options of
//! ONNX Runtime's own CUDA provider, and cuArena's single limit. A limit of 0 means no limit in
//! ONNX Runtime's vocabularies, and all free device memory less a margin in cuArena's. This module
//! adds no defaults.
//!
//! Invariant: at most one value for each key; two spellings of one key agree or are an error.

use std::collections::BTreeMap;

use thiserror::Error;

use super::error::{ArenaOptionsError, OptionFault};
use super::keys::{ArenaKey, ArenaValue, Dialect};
use crate::bytes::ByteSize;
use crate::device::driver::{Backend, Driver, DriverError};

/// The memory that cuArena leaves free on the device when it takes the rest.
pub const CUARENA_MARGIN: ByteSize = ByteSize::mib(256);

/// The name of cuArena's limit in errors and conflicts.
const CUARENA_LIMIT: &str = "cuArena limit";

/// A value and its spelling.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Written {
    /// The value.
    pub value: ArenaValue,
    /// The key as spelled, with its scope.
    pub spelled: String,
    /// The requested amount, if the device did not have that much memory left.
    pub capped_from: Option<ByteSize>,
}

/// The options of one place, without those that were not set.
///
/// ```
/// use lowtide::ByteSize;
/// use lowtide::config::arena::{ArenaKey, ArenaOptions, ArenaValue};
///
/// let options = ArenaOptions::from_keys([("arena.max_mem", "0")])?;
/// let written = options.get(ArenaKey::Limit).map(|written| written.value);
/// assert_eq!(written, Some(ArenaValue::Bytes(ByteSize::MAX))); // 0: no limit
///
/// let error = ArenaOptions::from_keys([("arena.max_memory", "1"), ("arena.max_mem", "1g")]);
/// assert_eq!(error.unwrap_err().faults.len(), 2); // all faults together
/// # Ok::<(), lowtide::config::arena::ArenaOptionsError>(())
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
    /// [`ArenaOptionsError`] with every invalid value, unknown key and contradiction.
    pub fn from_keys<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut reader = Reader::default();
        for (key, value) in entries {
            reader.put(key.as_ref(), key.as_ref(), value.as_ref(), Dialect::Keys);
        }
        reader.finish()
    }

    /// Reads the names of `OrtArenaCfg` (`CreateArenaCfgV2`). A value of -1 leaves an option unset,
    /// except for `max_mem`, which is unsigned there and has the default 0.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`].
    pub fn from_arena_cfg<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut reader = Reader::default();
        for (key, value) in entries {
            reader.put(key.as_ref(), key.as_ref(), value.as_ref(), Dialect::ArenaCfg);
        }
        reader.finish()
    }

    /// Reads `gpu_mem_limit` and `arena_extend_strategy` from the options of ONNX Runtime's own
    /// CUDA provider and ignores the provider's other options.
    ///
    /// # Errors
    /// The same as for [`ArenaOptions::from_keys`].
    pub fn from_provider_options<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut reader = Reader::default();
        for (key, value) in entries {
            let key = key.as_ref();
            if ArenaKey::named(key, Dialect::Provider).is_some() {
                reader.put(key, key, value.as_ref(), Dialect::Provider);
            }
        }
        reader.finish()
    }

    /// Reads cuArena's limit of a pool. 0 means all free device memory less [`CUARENA_MARGIN`]. A
    /// larger amount is lowered to that, as in cuArena, and the resolution reports it. If the
    /// driver cannot report the free memory, an amount is accepted unchanged.
    ///
    /// # Errors
    /// [`CuArenaLimitError::Unknown`] for 0 if the driver cannot report the free memory,
    /// [`CuArenaLimitError::NothingLeft`] if no more than the margin is free.
    pub fn from_cuarena_limit(
        limit: ByteSize,
        driver: &dyn Driver,
    ) -> Result<Self, CuArenaLimitError> {
        Self::within(limit, driver.headroom(), driver.backend())
    }

    /// The same, with the driver's report of free memory.
    pub(super) fn within(
        limit: ByteSize,
        headroom: Result<Option<ByteSize>, DriverError>,
        backend: Backend,
    ) -> Result<Self, CuArenaLimitError> {
        let left = match headroom {
            Ok(Some(headroom)) => match headroom.saturating_sub(CUARENA_MARGIN) {
                ByteSize::ZERO => return Err(CuArenaLimitError::NothingLeft { headroom }),
                left => left,
            },
            Ok(None) if limit.is_zero() => {
                return Err(CuArenaLimitError::Unknown { backend, cause: None });
            }
            Err(cause) if limit.is_zero() => {
                return Err(CuArenaLimitError::Unknown { backend, cause: Some(cause) });
            }
            Ok(None) | Err(_) => ByteSize::MAX,
        };
        let lowered = limit > left;
        let written = Written {
            value: ArenaValue::Bytes(if limit.is_zero() || lowered { left } else { limit }),
            spelled: CUARENA_LIMIT.to_owned(),
            capped_from: lowered.then_some(limit),
        };
        Ok(Self(BTreeMap::from([(ArenaKey::Limit, written)])))
    }

    /// Returns the option that was set for a key.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> Option<&Written> {
        self.0.get(&key)
    }

    /// Returns the options that were set, in the order of [`ArenaKey::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (ArenaKey, &Written)> {
        self.0.iter().map(|(key, written)| (*key, written))
    }

    /// Returns `true` if no option is set.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Returns these options, and those of `under` that are not set here.
    #[must_use]
    pub fn over(&self, under: &Self) -> Self {
        let mut all = under.0.clone();
        all.extend(self.0.clone());
        Self(all)
    }

    /// Checks that every option is supported here, even if another place overrides it: ONNX Runtime
    /// gives a session that requests CUDA's pool its own one.
    ///
    /// # Errors
    /// [`OptionFault::Unsupported`] if an option is valid but not supported.
    pub fn check_supported(&self) -> Result<(), ArenaOptionsError> {
        match self.get(ArenaKey::UsePool) {
            Some(Written { value: ArenaValue::Flag(true), spelled, .. }) => {
                let fault = OptionFault::Unsupported {
                    key: spelled.clone(),
                    value: "1".to_owned(),
                    what: "CUDA's memory pool",
                    expected: "0 (the arena commits and releases memory itself)",
                };
                Err(ArenaOptionsError { faults: vec![fault] })
            }
            _ => Ok(()),
        }
    }
}

/// The reason that cuArena's limit is no amount.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CuArenaLimitError {
    /// The limit is all free memory, and the driver cannot report it.
    #[error(
        "a limit of 0 takes all free device memory, which the {backend} driver cannot report{}; \
         expected an amount",
        cause.as_ref().map_or_else(String::new, |cause| format!(" ({cause})"))
    )]
    Unknown {
        /// The driver.
        backend: Backend,
        /// The driver's error, if it failed.
        cause: Option<DriverError>,
    },
    /// The device has no more free memory than the margin.
    #[error(
        "the device has {headroom} free: expected more than the {CUARENA_MARGIN} that stay free"
    )]
    NothingLeft {
        /// The free memory.
        headroom: ByteSize,
    },
}

/// Collects options and faults.
#[derive(Debug, Default)]
pub(super) struct Reader {
    options: ArenaOptions,
    pub(super) faults: Vec<OptionFault>,
}

impl Reader {
    /// Reads one option: its name in the dialect, its spelling, its text.
    pub(super) fn put(&mut self, name: &str, spelled: &str, text: &str, dialect: Dialect) {
        let Some(key) = ArenaKey::named(name, dialect) else {
            self.faults.push(OptionFault::unknown(spelled, dialect));
            return;
        };
        let value = match key.read(text, dialect) {
            Ok(Some(value)) => value,
            Ok(None) => return,
            Err(expected) => {
                let (key, value) = (spelled.to_owned(), text.to_owned());
                self.faults.push(OptionFault::BadValue { key, value, expected });
                return;
            }
        };
        match self.options.get(key) {
            Some(first) if first.value != value => {
                let (first, second) = (first.spelled.clone(), spelled.to_owned());
                self.faults.push(OptionFault::Twice { key, first, second });
            }
            Some(_) => {}
            None => {
                let spelled = spelled.to_owned();
                self.options.0.insert(key, Written { value, spelled, capped_from: None });
            }
        }
    }

    pub(super) fn finish(self) -> Result<ArenaOptions, ArenaOptionsError> {
        if self.faults.is_empty() {
            Ok(self.options)
        } else {
            Err(ArenaOptionsError { faults: self.faults })
        }
    }
}
