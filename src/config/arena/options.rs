//! Options as somebody wrote them in one place: each value valid in itself, with its spelling.
//!
//! Four vocabularies lead here: the bare `arena.*` keys, the names of `OrtArenaCfg`, the options of
//! ONNX Runtime's own CUDA provider, and cuArena's one limit. What an amount of 0 means is fixed
//! by the vocabulary: no limit in each of ONNX Runtime's, all that the device has left less a
//! margin in cuArena's. It gives no defaults.
//!
//! Invariant: at most one value for each key; two spellings of one key agree or are an error.

use std::collections::BTreeMap;

use thiserror::Error;

use super::error::{ArenaOptionsError, OptionFault};
use super::keys::{ArenaKey, ArenaValue, Dialect};
use crate::bytes::ByteSize;
use crate::device::driver::{Backend, Driver, DriverError};

/// What cuArena leaves on the device when it takes all of it.
pub const CUARENA_MARGIN: ByteSize = ByteSize::mib(256);

/// What cuArena's limit is called in errors and conflicts.
const CUARENA_LIMIT: &str = "cuArena limit";

/// A value and how it was written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Written {
    /// What it means.
    pub value: ArenaValue,
    /// The key as it was spelled, with its scope.
    pub spelled: String,
    /// Where the device could not give what was asked for: that amount.
    pub capped_from: Option<ByteSize>,
}

/// The options of one place; keys that nobody wrote are not in it.
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
/// assert_eq!(error.unwrap_err().faults.len(), 2); // all of them at once
/// # Ok::<(), lowtide::config::arena::ArenaOptionsError>(())
/// ```
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct ArenaOptions(BTreeMap<ArenaKey, Written>);

impl ArenaOptions {
    /// None: every key has ONNX Runtime's default.
    #[must_use]
    pub const fn new() -> Self {
        Self(BTreeMap::new())
    }

    /// Reads bare `arena.*` keys: what a factory is handed.
    ///
    /// # Errors
    /// Every bad value, unknown key and contradiction.
    pub fn from_keys<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut reader = Reader::default();
        for (key, value) in entries {
            reader.put(key.as_ref(), key.as_ref(), value.as_ref(), Dialect::Keys);
        }
        reader.finish()
    }

    /// Reads the names of `OrtArenaCfg` (`CreateArenaCfgV2`); a value of -1 means that nobody said,
    /// but for `max_mem`, which is unsigned there: 0 is its default.
    ///
    /// # Errors
    /// As [`ArenaOptions::from_keys`].
    pub fn from_arena_cfg<K: AsRef<str>, V: AsRef<str>>(
        entries: impl IntoIterator<Item = (K, V)>,
    ) -> Result<Self, ArenaOptionsError> {
        let mut reader = Reader::default();
        for (key, value) in entries {
            reader.put(key.as_ref(), key.as_ref(), value.as_ref(), Dialect::ArenaCfg);
        }
        reader.finish()
    }

    /// Reads `gpu_mem_limit` and `arena_extend_strategy` among the options of ONNX Runtime's own
    /// CUDA provider; the provider's other options are not an arena's and are passed over.
    ///
    /// # Errors
    /// As [`ArenaOptions::from_keys`].
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

    /// cuArena's limit of a pool: 0 for all that the device has left less [`CUARENA_MARGIN`]. An
    /// amount above that is lowered to it, as cuArena does, and the resolution reports it. Where
    /// the driver cannot say what is left, an amount is taken as it is.
    ///
    /// # Errors
    /// [`CuArenaLimitError::Unknown`] for 0 where the driver cannot say what the device has left,
    /// [`CuArenaLimitError::NothingLeft`] where that is no more than the margin.
    pub fn from_cuarena_limit(
        limit: ByteSize,
        driver: &dyn Driver,
    ) -> Result<Self, CuArenaLimitError> {
        Self::within(limit, driver.headroom(), driver.backend())
    }

    /// The same, with what the driver says.
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

    /// What was written for a key.
    #[must_use]
    pub fn get(&self, key: ArenaKey) -> Option<&Written> {
        self.0.get(&key)
    }

    /// All that was written, in the order of [`ArenaKey::ALL`].
    pub fn iter(&self) -> impl Iterator<Item = (ArenaKey, &Written)> {
        self.0.iter().map(|(key, written)| (*key, written))
    }

    /// Whether nothing was written.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// These, and under them what only `under` names.
    #[must_use]
    pub fn over(&self, under: &Self) -> Self {
        let mut all = under.0.clone();
        all.extend(self.0.clone());
        Self(all)
    }

    /// Refuses what is valid and cannot be had here, whether or not another place overrules it:
    /// ONNX Runtime gives a session that asks for CUDA's pool one of its own.
    ///
    /// # Errors
    /// [`OptionFault::Unsupported`].
    pub fn check_supported(&self) -> Result<(), ArenaOptionsError> {
        match self.get(ArenaKey::UsePool) {
            Some(Written { value: ArenaValue::Flag(true), spelled, .. }) => {
                let fault = OptionFault::Unsupported {
                    key: spelled.clone(),
                    value: "1".to_owned(),
                    what: "pool of CUDA's",
                    expected: "0: the arena commits and gives back by itself",
                };
                Err(ArenaOptionsError { faults: vec![fault] })
            }
            _ => Ok(()),
        }
    }
}

/// Why cuArena's limit means no amount here.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum CuArenaLimitError {
    /// All that is left was asked for, and nobody knows how much that is.
    #[error(
        "a limit of 0 takes what the device has left, which the {backend} driver cannot say{}; \
         expected an amount",
        cause.as_ref().map_or_else(String::new, |cause| format!(" ({cause})"))
    )]
    Unknown {
        /// The driver.
        backend: Backend,
        /// What it said, where it failed.
        cause: Option<DriverError>,
    },
    /// The device has no more left than what stays on it.
    #[error("the device has {headroom} left, of which {CUARENA_MARGIN} stay: expected more")]
    NothingLeft {
        /// What it has left.
        headroom: ByteSize,
    },
}

/// Takes options in and collects faults.
#[derive(Debug, Default)]
pub(super) struct Reader {
    options: ArenaOptions,
    pub(super) faults: Vec<OptionFault>,
}

impl Reader {
    /// One option: its name in the dialect, how it was spelled, its text.
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
