//! The values of a sample: what counts against the limit, and the figures that it is made of.

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::Statm;

use super::limit::Limit;

/// One sample.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Signal {
    /// The process's resident set.
    pub rss: Option<ByteSize>,
    /// The part of `rss` that belongs to no file and no shared memory.
    pub anonymous: Option<ByteSize>,
    /// Bytes that count against the limit: what the cgroup holds if its limit is at most the
    /// machine's memory, otherwise anonymous and shared memory of this process. Zero if nothing
    /// could be read.
    pub physical: ByteSize,
    /// The limit.
    pub limit: Limit,
    /// The limit as it would be without a [fit](super::Signals::set_fit).
    pub limit_without_fit: Limit,
    /// The usage of the cgroup, including page cache: the figure that Kubernetes compares with a
    /// new limit. `None` if no cgroup limits this process.
    pub usage: Option<ByteSize>,
    /// Anonymous and shared memory of the cgroup, which the kernel cannot reclaim without swap.
    pub charged: Option<ByteSize>,
    /// `true` if a file on which the limit depends cannot be read or parsed now, so that `limit` is
    /// the last known value.
    pub limit_is_stale: bool,
}

/// Two files that change whenever this process or its cgroup may hold another amount of memory. A
/// limit, or the memory of other members of an ancestor, may change without them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Glance {
    pub(super) resident: Option<Statm>,
    pub(super) usage: Option<ByteSize>,
}

/// The resident set by kind.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Resident {
    /// Anonymous pages.
    pub anon: ByteSize,
    /// Pages of files.
    pub file: ByteSize,
    /// Shared memory and tmpfs.
    pub shmem: ByteSize,
}

/// How [`Signal::physical`] follows a glance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Counted {
    /// Anonymous and shared memory of the process.
    Process,
    /// The cgroup, with this limit.
    Cgroup(ByteSize),
    /// It or the limit may change with files outside a glance in a way that a glance does not show.
    Unknown,
}
