//! What the kernel counts of a memory cgroup: limits reached, and processes killed.
//!
//! `memory.events` (version 2) counts what happened in the cgroup and below it, so the `max` and
//! `oom` of a limit that an ancestor has show in that ancestor's file alone, beside those of its
//! other members; `memory.events.local`, where the kernel has it (5.2), leaves those out. Version 1
//! has `memory.failcnt` and the `oom_kill` of `memory.oom_control`. It is for metrics and warnings:
//! no decision rests on it, and no sample reads it.
//!
//! Invariant: `count = what the file says now - what it said at the open`, never below zero.

use std::path::Path;

use super::file::{KeptFile, keyed, number};

/// How often something happened since [`Signals`](super::Signals) was opened; `None` where it
/// cannot be told.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct EventCounts {
    /// Times that a process was throttled and made to reclaim because `memory.high` was passed.
    pub high: Option<u64>,
    /// Times that usage was about to pass the hard limit and the kernel reclaimed first; page cache
    /// alone brings this about. Version 1: `memory.failcnt`.
    pub max: Option<u64>,
    /// Times that reclaim was not enough, so that an allocation failed or a kill followed.
    pub oom: Option<u64>,
    /// Processes that the kernel killed for memory, whatever limit was the reason.
    pub oom_kill: Option<u64>,
}

impl EventCounts {
    /// The counts under the names that the kernel has for them, for metrics.
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

    /// With the counts of one more ancestor. Limits reached are added up; kills are not, because
    /// each ancestor counts those of the one below as well.
    pub(super) fn with(self, other: Self) -> Self {
        let sum = |one: Option<u64>, two: Option<u64>| match (one, two) {
            (Some(one), Some(two)) => Some(one.saturating_add(two)),
            (one, two) => one.or(two),
        };
        Self { oom_kill: self.oom_kill.max(other.oom_kill), ..self.map2(other, sum) }
    }
}

/// What happened to the memory cgroup of this process since [`Signals`](super::Signals) was opened.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct MemoryEvents {
    /// In the own cgroup, and in those below it.
    pub own: EventCounts,
    /// In the ancestors that have a limit, all together: theirs is what kills where the own cgroup
    /// has none. Kills among all their members. Nothing where no ancestor that is visible has one.
    pub above: EventCounts,
}

/// What the files are called.
#[derive(Debug)]
pub(super) struct EventNames {
    pub(super) events: &'static str,
    pub(super) local: Option<&'static str>,
    pub(super) failcnt: Option<&'static str>,
}

/// The files of one level, and what they said at the open.
#[derive(Debug)]
pub(super) struct EventFiles {
    events: Option<KeptFile>,
    local: Option<KeptFile>,
    failcnt: Option<KeptFile>,
    base: EventCounts,
}

impl EventFiles {
    /// Opens the files of this folder; those of an ancestor where it is not the leaf's.
    pub(super) fn open(folder: &Path, names: &EventNames, is_leaf: bool) -> Self {
        let open = |name: &str| KeptFile::open(&folder.join(name)).ok();
        let local = names.local.filter(|_| !is_leaf).and_then(open);
        let failcnt = names.failcnt.and_then(open);
        let mut files =
            Self { events: open(names.events), local, failcnt, base: EventCounts::default() };
        files.base = files.read();
        files
    }

    /// What has been counted since the open.
    pub(super) fn counts(&self) -> EventCounts {
        let since = |now: Option<u64>, base: Option<u64>| {
            now.zip(base).map(|(now, base)| now.saturating_sub(base))
        };
        self.read().map2(self.base, since)
    }

    /// Kills in the cgroup since it was made.
    pub(super) fn oom_kills(&self) -> Option<u64> {
        self.events.as_ref()?.read(|text| keyed(text, b"oom_kill")).flatten()
    }

    fn read(&self) -> EventCounts {
        let counts = |file: &KeptFile| file.read(counts_of);
        let all = self.events.as_ref().and_then(counts).unwrap_or_default();
        // Where there is a file without the neighbours' counts it is believed, but for kills, of
        // which an inner cgroup has none of its own.
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
