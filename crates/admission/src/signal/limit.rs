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
    /// Returns a phrase for messages, such as `the cgroup (memory.max)`.
    #[must_use]
    pub const fn phrase(self) -> &'static str {
        match self {
            Self::Cgroup => "the cgroup (memory.max)",
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
    /// Whose memory is compared with it.
    pub scope: BoundScope,
    /// The age of its value.
    pub freshness: Freshness,
}

impl fmt::Display for LimitBound {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { name, limit, scope, freshness, .. } = self;
        let show = |bytes: Option<ByteSize>| bytes.map_or_else(|| "?".into(), |it| it.to_string());
        let (used, limit) = (show(self.used), show(*limit));
        write!(f, "{name}: {used} of {limit} ({}, {})", scope.name(), freshness.name())
    }
}

lowtide_core::named_enum! {
    /// Whose memory a bound is compared with.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum BoundScope {
        /// That of all processes of a cgroup.
        Group = "group",
        /// That of this process.
        Process = "process",
        /// That of all processes of the machine.
        Machine = "machine",
    }
}

lowtide_core::named_enum! {
    /// The age of a bound's value.
    #[derive(Clone, Copy, Debug, PartialEq, Eq)]
    #[non_exhaustive]
    pub enum Freshness {
        /// Read with this sample.
        Now = "now",
        /// Read about once a second ([`Signals::look`](super::Signals::look)).
        Second = "second",
        /// The last value: it cannot be read or parsed any more.
        Stale = "stale",
        /// It exists and has never been read. It limits nothing here, and may do so in the kernel.
        Unreadable = "unreadable",
    }
}
