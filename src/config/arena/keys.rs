//! The nine arena keys: spellings, defaults and accepted values.
//!
//! The spellings, defaults and bounds are those of ONNX Runtime. If its arenas differ, they are
//! those of its CUDA plugin, which rejects values that the older arenas ignore. Values are parsed
//! strictly: only digits, while ONNX Runtime's `stoi` accepts `12abc` as 12.
//!
//! Invariant: every key has one name in each dialect that knows it, and an accepted default.

use std::fmt;

use crate::bytes::ByteSize;

/// ONNX Runtime stores these options in an `int`.
const INT_MAX: u64 = i32::MAX as u64;
/// ONNX Runtime stores this option in an `int64_t`.
const INT64_MAX: u64 = i64::MAX as u64;

/// An arena option.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
#[non_exhaustive]
pub enum ArenaKey {
    /// `arena.extend_strategy`: the growth strategy.
    ExtendStrategy,
    /// `arena.initial_chunk_size_bytes`: the size of the first step of growth.
    InitialBytes,
    /// `arena.max_dead_bytes_per_chunk`: the remainder from which a block is split.
    DeadBytes,
    /// `arena.initial_growth_chunk_size_bytes`: the size of the first step after a shrink.
    RegrowthBytes,
    /// `arena.max_power_of_two_extend_bytes`: the size of the largest step.
    StepMaxBytes,
    /// `arena.max_mem`: the limit of committed memory; 0 for no limit.
    Limit,
    /// `arena.use_cuda_mempool`: use CUDA's memory pool instead of an arena.
    UsePool,
    /// `arena.cuda_mempool_release_threshold`: the bytes that CUDA's pool keeps.
    PoolThreshold,
    /// `arena.cuda_mempool_bytes_to_keep_on_shrink`: the bytes that CUDA's pool keeps in a shrink.
    PoolKeep,
}

/// The growth strategy of an arena.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum ExtendStrategy {
    /// `0`, `kNextPowerOfTwo`: steps that double in size.
    #[default]
    NextPowerOfTwo,
    /// `1`, `kSameAsRequested`: by the size of the request.
    SameAsRequested,
}

/// The value of an option.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ArenaValue {
    /// The value of [`ArenaKey::ExtendStrategy`].
    Strategy(ExtendStrategy),
    /// The value of [`ArenaKey::UsePool`].
    Flag(bool),
    /// The value of every other key; [`ByteSize::MAX`] for no limit.
    Bytes(ByteSize),
}

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
    /// All keys, in ONNX Runtime's order.
    pub const ALL: [Self; 9] = [
        Self::ExtendStrategy,
        Self::InitialBytes,
        Self::DeadBytes,
        Self::RegrowthBytes,
        Self::StepMaxBytes,
        Self::Limit,
        Self::UsePool,
        Self::PoolThreshold,
        Self::PoolKeep,
    ];

    /// Returns ONNX Runtime's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::ExtendStrategy => "arena.extend_strategy",
            Self::InitialBytes => "arena.initial_chunk_size_bytes",
            Self::DeadBytes => "arena.max_dead_bytes_per_chunk",
            Self::RegrowthBytes => "arena.initial_growth_chunk_size_bytes",
            Self::StepMaxBytes => "arena.max_power_of_two_extend_bytes",
            Self::Limit => "arena.max_mem",
            Self::UsePool => "arena.use_cuda_mempool",
            Self::PoolThreshold => "arena.cuda_mempool_release_threshold",
            Self::PoolKeep => "arena.cuda_mempool_bytes_to_keep_on_shrink",
        }
    }

    /// Returns the name in `OrtArenaCfg` (`CreateArenaCfgV2`), which has six of the keys.
    #[must_use]
    pub const fn arena_cfg_name(self) -> Option<&'static str> {
        match self {
            Self::ExtendStrategy => Some("arena_extend_strategy"),
            Self::InitialBytes => Some("initial_chunk_size_bytes"),
            Self::DeadBytes => Some("max_dead_bytes_per_chunk"),
            Self::RegrowthBytes => Some("initial_growth_chunk_size_bytes"),
            Self::StepMaxBytes => Some("max_power_of_two_extend_bytes"),
            Self::Limit => Some("max_mem"),
            Self::UsePool | Self::PoolThreshold | Self::PoolKeep => None,
        }
    }

    /// Returns the name among the options of ONNX Runtime's own CUDA provider, which has two of the
    /// keys.
    #[must_use]
    pub const fn provider_name(self) -> Option<&'static str> {
        match self {
            Self::ExtendStrategy => Some("arena_extend_strategy"),
            Self::Limit => Some("gpu_mem_limit"),
            _ => None,
        }
    }

    /// Returns ONNX Runtime's default.
    #[must_use]
    pub const fn default_value(self) -> ArenaValue {
        ArenaValue::Bytes(match self {
            Self::ExtendStrategy => return ArenaValue::Strategy(ExtendStrategy::NextPowerOfTwo),
            Self::UsePool => return ArenaValue::Flag(false),
            Self::InitialBytes => ByteSize::mib(1),
            Self::DeadBytes => ByteSize::mib(128),
            Self::RegrowthBytes => ByteSize::mib(2),
            Self::StepMaxBytes => ByteSize::gib(1),
            Self::Limit => ByteSize::MAX,
            Self::PoolThreshold | Self::PoolKeep => ByteSize::ZERO,
        })
    }

    /// Returns the key with this name, or `None` if the dialect does not have it.
    pub(super) fn named(name: &str, dialect: Dialect) -> Option<Self> {
        Self::ALL.into_iter().find(|key| key.name_in(dialect) == Some(name))
    }

    pub(super) const fn name_in(self, dialect: Dialect) -> Option<&'static str> {
        match dialect {
            Dialect::Keys => Some(self.name()),
            Dialect::ArenaCfg => self.arena_cfg_name(),
            Dialect::Provider => self.provider_name(),
        }
    }

    /// Parses a value; `None` if the text stands for the default.
    ///
    /// # Errors
    /// The accepted values.
    pub(super) fn read(self, text: &str, dialect: Dialect) -> Result<Option<ArenaValue>, String> {
        let may_be_unsaid = !matches!(self, Self::Limit) && dialect == Dialect::ArenaCfg;
        if may_be_unsaid && text == "-1" {
            return Ok(None);
        }
        let value = match self {
            Self::ExtendStrategy => match text {
                "0" => Some(ArenaValue::Strategy(ExtendStrategy::NextPowerOfTwo)),
                "1" => Some(ArenaValue::Strategy(ExtendStrategy::SameAsRequested)),
                _ if dialect == Dialect::Provider => {
                    let named = |strategy: &ExtendStrategy| strategy.name() == text;
                    ExtendStrategy::ALL.into_iter().find(named).map(ArenaValue::Strategy)
                }
                _ => None,
            },
            Self::UsePool => match text {
                "0" => Some(ArenaValue::Flag(false)),
                "1" => Some(ArenaValue::Flag(true)),
                _ => None,
            },
            _ => {
                let (least, most) = self.bounds();
                let bytes = whole(text).filter(|bytes| (least..=most).contains(bytes));
                bytes.map(|bytes| match (self, bytes) {
                    (Self::Limit, 0) => ArenaValue::Bytes(ByteSize::MAX),
                    _ => ArenaValue::Bytes(ByteSize::new(bytes)),
                })
            }
        };
        value.map(Some).ok_or_else(|| self.expected(dialect))
    }

    /// Returns the minimum and maximum number of bytes.
    const fn bounds(self) -> (u64, u64) {
        match self {
            Self::InitialBytes | Self::DeadBytes | Self::RegrowthBytes => (1, INT_MAX),
            Self::StepMaxBytes => (1, INT64_MAX),
            _ => (0, u64::MAX),
        }
    }

    /// Describes the accepted values, for a message with "expected".
    fn expected(self, dialect: Dialect) -> String {
        let unsaid = if dialect == Dialect::ArenaCfg { ", or -1 for the default" } else { "" };
        match self {
            Self::ExtendStrategy if dialect == Dialect::Provider => {
                "0 or kNextPowerOfTwo, 1 or kSameAsRequested".to_owned()
            }
            Self::ExtendStrategy => {
                format!("0 (next power of two) or 1 (same as requested){unsaid}")
            }
            Self::UsePool => "0 or 1".to_owned(),
            Self::Limit => "a whole number of bytes below 2^64, 0 for no limit".to_owned(),
            _ => {
                let (least, most) = self.bounds();
                format!("a whole number of bytes from {least} to {most}{unsaid}")
            }
        }
    }
}

impl fmt::Display for ArenaKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl ExtendStrategy {
    const ALL: [Self; 2] = [Self::NextPowerOfTwo, Self::SameAsRequested];

    /// Returns ONNX Runtime's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::NextPowerOfTwo => "kNextPowerOfTwo",
            Self::SameAsRequested => "kSameAsRequested",
        }
    }
}

impl fmt::Display for ArenaValue {
    /// Formats for display: `no limit`, `128MiB`, `kSameAsRequested`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Strategy(strategy) => f.pad(strategy.name()),
            Self::Flag(flag) => f.pad(if *flag { "1" } else { "0" }),
            Self::Bytes(ByteSize::MAX) => f.pad("no limit"),
            Self::Bytes(bytes) => f.pad(&bytes.exact()),
        }
    }
}

/// Parses a number that consists only of digits.
pub(super) fn whole(text: &str) -> Option<u64> {
    text.bytes().all(|byte| byte.is_ascii_digit()).then(|| text.parse().ok()).flatten()
}
