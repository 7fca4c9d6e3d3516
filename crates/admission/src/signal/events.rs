//! Events that the kernel counts for a memory cgroup: limits reached, and processes killed.
//!
//! `memory.events` (version 2) counts events of the cgroup and of those below it. So the `max` and
//! `oom` of an ancestor's limit appear only in that ancestor's file, together with those of its
//! other members. `memory.events.local` (kernel 5.2) leaves those out. Version 1 has
//! `memory.failcnt` and the `oom_kill` of `memory.oom_control`. The counts serve metrics and
//! warnings: no decision depends on them, and no sample reads them.
//!
//! Invariant: `count = current value of the file - value at the open`, never below zero.

use std::path::Path;

use lowtide_core::kernel::number;

use super::file::{KeptFile, keyed};

/// Counts of events since [`Signals`](super::Signals) was opened; `None` for a count that is not
/// available.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct EventCounts {
    /// Times that a process was throttled and made to reclaim because usage exceeded `memory.high`.
    pub high: Option<u64>,
    /// Times that usage was about to exceed the hard limit and the kernel reclaimed first. Page
    /// cache alone can cause this. Version 1: `memory.failcnt`.
    pub max: Option<u64>,
    /// Times that reclaim was not enough, so that an allocation failed or a kill followed.
    pub oom: Option<u64>,
    /// Processes that the kernel OOM-killed, whichever limit was the reason.
    pub oom_kill: Option<u64>,
}

impl EventCounts {
    /// Returns the counts with the kernel's names, for metrics.
    #[must_use]
    pub const fn by_name(self) -> [(&'static str, Option<u64>); 4] {
        [("high", self.high), ("max", self.max), ("oom", self.oom), ("oom_kill", self.oom_kill)]
    }

    fn map2(self, other: Self, with: impl Fn(Option<u64>, Option<u64>) -> Option<u64>) -> Self {
        Self {
            high: with(self.high, other.high),
            max: with(self.max, other.max),
            oom: with(self.oom, other.oom),
            oom_kill: with(self.oom_kill, other.oom_kill),
        }
    }

    /// Adds the counts of another ancestor. Limits reached are summed; kills are not, because each
    /// ancestor also counts those of the levels below.
    pub(super) fn with(self, other: Self) -> Self {
        let sum = |one: Option<u64>, two: Option<u64>| match (one, two) {
            (Some(one), Some(two)) => Some(one.saturating_add(two)),
            (one, two) => one.or(two),
        };
        Self { oom_kill: self.oom_kill.max(other.oom_kill), ..self.map2(other, sum) }
    }
}

/// Events of this process's memory cgroup since [`Signals`](super::Signals) was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct MemoryEvents {
    /// In the process's own cgroup and those below it.
    pub own: EventCounts,
    /// In the ancestors that have a limit, combined, including kills among all their members. These
    /// limits kill if the own cgroup has none. Empty if no visible ancestor has a limit.
    pub above: EventCounts,
}

/// The names of the files.
#[derive(Debug)]
pub(super) struct EventNames {
    pub(super) events: &'static str,
    pub(super) local: Option<&'static str>,
    pub(super) failcnt: Option<&'static str>,
}

/// The files of one level, and their values at the open.
#[derive(Debug)]
pub(super) struct EventFiles {
    events: Option<KeptFile>,
    local: Option<KeptFile>,
    failcnt: Option<KeptFile>,
    base: EventCounts,
}

impl EventFiles {
    /// Opens the files of this folder, either as the leaf or as an ancestor.
    pub(super) fn open(folder: &Path, names: &EventNames, is_leaf: bool) -> Self {
        let open = |name: &str| KeptFile::open(&folder.join(name)).ok();
        let local = names.local.filter(|_| !is_leaf).and_then(open);
        let failcnt = names.failcnt.and_then(open);
        let mut files =
            Self { events: open(names.events), local, failcnt, base: EventCounts::default() };
        files.base = files.read();
        files
    }

    /// Returns the counts since the open.
    pub(super) fn counts(&self) -> EventCounts {
        let since = |now: Option<u64>, base: Option<u64>| {
            now.zip(base).map(|(now, base)| now.saturating_sub(base))
        };
        self.read().map2(self.base, since)
    }

    /// Returns the kills in the cgroup since it was created.
    pub(super) fn oom_kills(&self) -> Option<u64> {
        self.events.as_ref()?.read(|text| keyed(text, b"oom_kill")).flatten()
    }

    fn read(&self) -> EventCounts {
        let counts = |file: &KeptFile| file.read(counts_of);
        let all = self.events.as_ref().and_then(counts).unwrap_or_default();
        // A file without the counts of other members is preferred, except for kills, which an inner
        // cgroup does not count itself.
        let counts = match self.local.as_ref().and_then(counts) {
            Some(local) => EventCounts { oom_kill: all.oom_kill, ..local },
            None => all,
        };
        let failed = self.failcnt.as_ref().and_then(|file| file.read(number)).flatten();
        EventCounts { max: counts.max.or(failed), ..counts }
    }
}

fn counts_of(text: &[u8]) -> EventCounts {
    EventCounts {
        high: keyed(text, b"high"),
        max: keyed(text, b"max"),
        oom: keyed(text, b"oom"),
        oom_kill: keyed(text, b"oom_kill"),
    }
}
