//! A memory limit, its source, and the bounds of which it is the smallest.

use std::fmt;

use lowtide_core::bytes::ByteSize;

lowtide_core::named_enum! {
    /// The source of a limit.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum LimitSource {
        /// The hard limit of a cgroup (`memory.max`, `memory.limit_in_bytes`).
        Cgroup = "cgroup",
        /// The soft limit of a cgroup (`memory.high`), if it is lower than the hard limit.
        High = "high",
        /// The machine's physical memory, less reserved huge pages.
        Machine = "machine",
        /// What the kernel still promises under strict overcommit (`vm.overcommit_memory=2`).
        Commit = "commit",
        /// The configuration.
        Override = "override",
        /// A limit of the process on its addresses or its data (`RLIMIT_AS`, `RLIMIT_DATA`).
        AddressSpace = "address_space",
        /// An operator, who prepares a lower limit of the kernel ([`Signals::set_fit`]).
        ///
        /// [`Signals::set_fit`]: super::Signals::set_fit
        Fit = "fit",
        /// No limit is known, because nothing could be read.
        #[default]
        Unknown = "unknown",
    }
}

impl LimitSource {
    /// Returns a phrase for messages, such as `the cgroup's memory limit`.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Cgroup => "the cgroup's memory limit",
            Self::High => "the cgroup (memory.high)",
            Self::Machine => "the machine",
            Self::Commit => "the commit limit (vm.overcommit_memory=2)",
            Self::Override => "the configuration",
            Self::AddressSpace => "the address space (ulimit)",
            Self::Fit => "the admin command fit",
            Self::Unknown => "an unknown source",
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
        let fit = fit.filter(|bytes| *bytes < self.bytes);
        fit.map_or(self, |bytes| Self { bytes, source: LimitSource::Fit })
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

/// An upper bound of this process's memory. The [limit](super::Signal::limit) is the smallest of
/// all: `physical + limit - used`, over the bounds that could be read.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct LimitBound {
    /// The kind of the bound.
    pub source: LimitSource,
    /// The file or the setting that holds it, such as `/sys/fs/cgroup/app/memory.max`.
    pub name: String,
    /// Its value; `None` if it has never been read.
    pub limit: Option<ByteSize>,
    /// What is compared with it, without page cache; `None` if unknown.
    pub used: Option<ByteSize>,
    /// Whose memory is compared with it: that of all processes of a cgroup (`group`), of this
    /// process (`process`), or of all processes of the machine (`machine`).
    pub scope: &'static str,
    /// The age of its value: read with this sample (`now`); read about once a second
    /// ([`Signals::look`](super::Signals::look)) (`second`); the last value, because it cannot be
    /// read or parsed any more (`stale`); or never read (`unreadable`): then it limits nothing
    /// here, and may do so in the kernel.
    pub freshness: &'static str,
}

impl fmt::Display for LimitBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, limit, scope, freshness, .. } = self;
        let show = |bytes: Option<ByteSize>| bytes.map_or_else(|| "?".into(), |it| it.to_string());
        let (used, limit) = (show(self.used), show(*limit));
        write!(f, "{name}: {used} of {limit} ({scope}, {freshness})")
    }
}

// The values of `LimitBound::freshness` that a file has.
pub(super) const NOW: &str = "now";
pub(super) const STALE: &str = "stale";
pub(super) const UNREADABLE: &str = "unreadable";
