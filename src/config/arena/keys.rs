//! The nine arena keys: spellings, defaults and accepted values, in one table.
//!
//! The spellings, defaults and bounds are those of ONNX Runtime. If its arenas differ, they are
//! those of its CUDA plugin, which rejects values that the older arenas ignore. Values are parsed
//! strictly: only digits, while ONNX Runtime's `stoi` accepts `12abc` as 12.
//!
//! Invariant: every key has one name in each dialect that knows it, and an accepted default.

use crate::bytes::ByteSize;

/// ONNX Runtime stores these options in an `int`.
const INT: (u64, u64) = (1, i32::MAX as u64);
/// ONNX Runtime stores this option in an `int64_t`.
const INT64: (u64, u64) = (1, i64::MAX as u64);
const ANY: (u64, u64) = (0, u64::MAX);

lowtide_core::named_enum! {
    /// An arena option, under ONNX Runtime's name and in its order.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum ArenaKey {
        /// `arena.extend_strategy`: the growth strategy.
        ExtendStrategy = "arena.extend_strategy",
        /// `arena.initial_chunk_size_bytes`: the size of the first step of growth.
        InitialBytes = "arena.initial_chunk_size_bytes",
        /// `arena.max_dead_bytes_per_chunk`: the remainder from which a block is split.
        DeadBytes = "arena.max_dead_bytes_per_chunk",
        /// `arena.initial_growth_chunk_size_bytes`: the size of the first step after a shrink.
        RegrowthBytes = "arena.initial_growth_chunk_size_bytes",
        /// `arena.max_power_of_two_extend_bytes`: the size of the largest step.
        StepMaxBytes = "arena.max_power_of_two_extend_bytes",
        /// `arena.max_mem`: the limit of committed memory; 0 for no limit.
        Limit = "arena.max_mem",
        /// `arena.use_cuda_mempool`: use CUDA's memory pool instead of an arena.
        UsePool = "arena.use_cuda_mempool",
        /// `arena.cuda_mempool_release_threshold`: the bytes that CUDA's pool keeps.
        PoolThreshold = "arena.cuda_mempool_release_threshold",
        /// `arena.cuda_mempool_bytes_to_keep_on_shrink`: the bytes that CUDA's pool keeps in a
        /// shrink.
        PoolKeep = "arena.cuda_mempool_bytes_to_keep_on_shrink",
    }
}

/// ONNX Runtime's names of the values of [`ArenaKey::ExtendStrategy`]: steps that double in size,
/// or by the size of the request.
const STRATEGIES: [&str; 2] = ["kNextPowerOfTwo", "kSameAsRequested"];

/// The value of `kSameAsRequested`.
pub(super) const SAME_AS_REQUESTED: u64 = 1;

/// The value of [`ArenaKey::Limit`] without a limit.
pub(super) const NO_LIMIT: u64 = u64::MAX;

/// The vocabulary of a text. The rules for values differ between them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Dialect {
    /// `arena.*`, with or without a scope.
    Keys,
    /// `OrtArenaCfg`, under the names of its V2 function; -1 for the default.
    ArenaCfg,
    /// Options of ONNX Runtime's own CUDA provider, in which strategies have names.
    Provider,
}

impl ArenaKey {
    /// Returns the default, and the bounds in bytes.
    const fn row(self) -> (u64, (u64, u64)) {
        match self {
            Self::InitialBytes => (ByteSize::mib(1).get(), INT),
            Self::DeadBytes => (ByteSize::mib(128).get(), INT),
            Self::RegrowthBytes => (ByteSize::mib(2).get(), INT),
            Self::StepMaxBytes => (ByteSize::gib(1).get(), INT64),
            Self::Limit => (NO_LIMIT, ANY),
            Self::ExtendStrategy | Self::UsePool | Self::PoolThreshold | Self::PoolKeep => (0, ANY),
        }
    }

    /// Returns ONNX Runtime's default; [`u64::MAX`] for no limit.
    #[must_use]
    pub const fn default_value(self) -> u64 {
        self.row().0
    }

    /// Returns the key with this name, or `None` if the dialect does not have it.
    pub(super) fn named(name: &str, dialect: Dialect) -> Option<Self> {
        Self::ALL.into_iter().find(|key| key.name_in(dialect) == Some(name))
    }

    pub(super) fn name_in(self, dialect: Dialect) -> Option<&'static str> {
        match (dialect, self) {
            (Dialect::Keys, _) => Some(self.name()),
            (_, Self::ExtendStrategy) => Some("arena_extend_strategy"),
            (Dialect::Provider, Self::Limit) => Some("gpu_mem_limit"),
            (Dialect::ArenaCfg, key) if key <= Self::Limit => key.name().strip_prefix("arena."),
            _ => None,
        }
    }

    /// Returns a value for display: `no limit`, `128MiB`, `kSameAsRequested`.
    #[must_use]
    pub fn show(self, value: u64) -> String {
        match self {
            Self::ExtendStrategy => STRATEGIES[usize::from(value == SAME_AS_REQUESTED)].to_owned(),
            Self::UsePool => value.to_string(),
            _ if value == NO_LIMIT => "no limit".to_owned(),
            _ => ByteSize::new(value).exact(),
        }
    }

    /// Parses a value; `None` if the text stands for the default.
    ///
    /// # Errors
    /// The accepted values.
    pub(super) fn read(self, text: &str, dialect: Dialect) -> Result<Option<u64>, String> {
        let is_cfg = dialect == Dialect::ArenaCfg && self != Self::Limit;
        if is_cfg && text == "-1" {
            return Ok(None);
        }
        let or_default = if is_cfg { ", or -1 for the default" } else { "" };
        let (_, (least, most)) = self.row();
        let (value, expected) = match self {
            Self::ExtendStrategy | Self::UsePool => {
                let has_names = self == Self::ExtendStrategy;
                let is_named = has_names && dialect == Dialect::Provider;
                let named = STRATEGIES.iter().position(|name| is_named && *name == text);
                let value = ["0", "1"].iter().position(|number| *number == text).or(named);
                let strategies = "0 (kNextPowerOfTwo) or 1 (kSameAsRequested)";
                let expected = if has_names { strategies } else { "0 or 1" };
                (value.map(|at| at as u64), expected.to_owned())
            }
            _ => {
                let bytes = whole(text).filter(|bytes| (least..=most).contains(bytes));
                let is_none = |bytes| self == Self::Limit && bytes == 0;
                let value = bytes.map(|bytes| if is_none(bytes) { NO_LIMIT } else { bytes });
                let none = if self == Self::Limit { ", 0 for no limit" } else { "" };
                (value, format!("a whole number of bytes from {least} to {most}{none}"))
            }
        };
        value.map(Some).ok_or_else(|| format!("{expected}{or_default}"))
    }
}

/// Parses a number that consists only of digits.
pub(super) fn whole(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
