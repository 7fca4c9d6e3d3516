//! A memory limit and its source.

use lowtide_core::bytes::ByteSize;

/// The source of a limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum LimitSource {
    /// The hard limit of a cgroup (`memory.max`, `memory.limit_in_bytes`).
    Cgroup,
    /// The soft limit of a cgroup (`memory.high`), if it is lower than the hard limit.
    High,
    /// The machine's physical memory: no cgroup limits this process.
    Machine,
    /// The configuration.
    Override,
    /// A limit of the process on its addresses or its data (`RLIMIT_AS`, `RLIMIT_DATA`).
    AddressSpace,
    /// An operator, who prepares a lower limit of the kernel ([`Signals::set_fit`]).
    ///
    /// [`Signals::set_fit`]: super::Signals::set_fit
    Fit,
    /// No limit is known, because nothing could be read.
    #[default]
    Unknown,
}

impl LimitSource {
    /// All sources.
    pub const ALL: [Self; 7] = [
        Self::Cgroup,
        Self::High,
        Self::Machine,
        Self::Override,
        Self::AddressSpace,
        Self::Fit,
        Self::Unknown,
    ];

    /// Returns a phrase for messages, such as `the cgroup (memory.max)`.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Cgroup => "the cgroup (memory.max)",
            Self::High => "the cgroup (memory.high)",
            Self::Machine => "the machine",
            Self::Override => "the configuration",
            Self::AddressSpace => "the address space (ulimit)",
            Self::Fit => "the admin command fit",
            Self::Unknown => "an unknown source",
        }
    }

    /// Returns the label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cgroup => "cgroup",
            Self::High => "high",
            Self::Machine => "machine",
            Self::Override => "override",
            Self::AddressSpace => "address_space",
            Self::Fit => "fit",
            Self::Unknown => "unknown",
        }
    }
}

/// The memory limit and its source.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Limit {
    /// The largest allowed [`Signal::physical`](super::Signal::physical); [`ByteSize::MAX`] if
    /// unknown.
    pub bytes: ByteSize,
    /// The source of the limit.
    pub source: LimitSource,
}

impl Limit {
    /// No known limit.
    pub const UNKNOWN: Self = Self { bytes: ByteSize::MAX, source: LimitSource::Unknown };

    /// Creates a limit given by configuration.
    #[must_use]
    pub const fn given(bytes: ByteSize) -> Self {
        Self { bytes, source: LimitSource::Override }
    }

    /// Returns the limit that is in force while an operator wants the process to fit in `fit`
    /// bytes. A limit at or below that stays as it is; without a known limit, `fit` is one.
    #[must_use]
    pub fn fitted(self, fit: Option<ByteSize>) -> Self {
        match fit {
            Some(bytes) if bytes < self.bytes => Self { bytes, source: LimitSource::Fit },
            _ => self,
        }
    }

    /// Returns `true` if there is a limit.
    #[must_use]
    pub fn is_known(self) -> bool {
        self.source != LimitSource::Unknown && self.bytes != ByteSize::MAX
    }
}

impl Default for Limit {
    fn default() -> Self {
        Self::UNKNOWN
    }
}
