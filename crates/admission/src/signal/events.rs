//! Events that the kernel counts for a memory cgroup: limits reached, and processes killed.
//!
//! `memory.events` (version 2) counts events of the cgroup and of those below it. So the `max` and
//! `oom` of an ancestor's limit appear only in that ancestor's file, together with those of its
//! other members. `memory.events.local` (kernel 5.2) leaves those out. Version 1 has
//! `memory.failcnt` and the `oom_kill` of `memory.oom_control`. The counts serve metrics and
//! warnings: no decision depends on them, and no sample reads them.
//!
//! Pressure stall information (PSI) of the own cgroup, the time its processes lost waiting for
//! memory, is advisory: it is published and rejects nothing. The machine's own PSI is never read,
//! because it includes other processes; so the root of the hierarchy, whose file is the machine's,
//! does not count as an own cgroup. The kernel provides PSI on version 2, and on hybrid hosts in
//! the unified hierarchy. No trigger is set: without privileges its windows are 2 s and longer.
//!
//! Invariants: `count = current value of the file - value at the open`, never below zero;
//! `full_total <= some_total`, as the kernel counts them.

use std::path::Path;
use std::time::Duration;

use lowtide_core::kernel::number;

use super::cgroup::{Names, places};
use super::file::{SignalError, SignalFile, keyed, read_whole};

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
        let sum = |one: Option<u64>, two| one.into_iter().chain(two).reduce(u64::saturating_add);
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

/// The files of one level, and their values at the open.
#[derive(Debug)]
pub(super) struct EventFiles {
    events: Option<SignalFile>,
    local: Option<SignalFile>,
    failcnt: Option<SignalFile>,
    base: EventCounts,
}

impl EventFiles {
    /// Opens the files of this folder, either as the leaf or as an ancestor.
    pub(super) fn open(folder: &Path, names: &Names, is_leaf: bool) -> Self {
        let open = |name: &str| SignalFile::open(&folder.join(name)).ok();
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
        let counts = |file: &SignalFile| file.read(counts_of);
        let all = self.events.as_ref().and_then(counts).unwrap_or_default();
        // A file without the counts of other members is preferred, except for kills, which an inner
        // cgroup does not count itself.
        let of_local = |local| EventCounts { oom_kill: all.oom_kill, ..local };
        let counts = self.local.as_ref().and_then(counts).map_or(all, of_local);
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

/// Pressure stall information (PSI) of the own cgroup: the time lost waiting for memory, as a
/// fraction of the last ten seconds, 0 to 1 in steps of 0.0001, and in total since the cgroup was
/// created.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Psi {
    /// The fraction in which at least one task waited for memory.
    pub some_avg10: f64,
    /// The total of that time.
    pub some_total: Duration,
    /// The fraction in which all tasks that could have run waited for memory.
    pub full_avg10: f64,
    /// The total of that time.
    pub full_total: Duration,
}

impl Psi {
    /// Returns fraction and total of both kinds with the kernel's names, for metrics.
    #[must_use]
    pub const fn by_name(self) -> [(&'static str, f64, Duration); 2] {
        [("some", self.some_avg10, self.some_total), ("full", self.full_avg10, self.full_total)]
    }
}

/// Opens `memory.pressure` of the own cgroup. Returns `None`, with an entry in `missing`, if there
/// is none. Unreadable files that identify the cgroup are reported elsewhere.
pub(super) fn find_psi(
    root: &Path,
    lines: &[u8],
    missing: &mut Vec<SignalError>,
) -> Option<SignalFile> {
    let mounts = read_whole(&root.join("proc/self/mountinfo")).ok()?;
    let places = places(root, lines, &mounts, None);
    let own = places.iter().filter(|place| !place.outside);
    let mut folders = own.filter_map(|place| place.folders(root).into_iter().next());
    // "cgroup.type: ... exists on non-root cgroups" (cgroup-v2.rst): the root's file is the
    // machine's.
    let own = folders.find(|folder| folder.join("cgroup.type").exists());
    let path = own.map(|own| own.join("memory.pressure"));
    let kept = path.as_ref().and_then(|path| SignalFile::open(path).ok());
    if kept.is_none() {
        missing.push(SignalError::NoPsi { path });
    }
    kept
}

/// Parses `some avg10=1.23 avg60=... avg300=... total=<microseconds>`, and a line of `full`.
pub(super) fn psi_of(text: &[u8]) -> Option<Psi> {
    let (some_avg10, some_total) = stall_of(text, b"some ")?;
    let (full_avg10, full_total) = stall_of(text, b"full ")?;
    Some(Psi { some_avg10, some_total, full_avg10, full_total })
}

fn stall_of(text: &[u8], kind: &[u8]) -> Option<(f64, Duration)> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(kind))?;
    let value =
        |key: &[u8]| line.split(|&byte| byte == b' ').find_map(|field| field.strip_prefix(key));
    let total = Duration::from_micros(number(value(b"total=")?)?);
    Some((percent(value(b"avg10=")?)?, total))
}

/// Parses a percentage with two decimals, such as `12.34`, as a ratio.
fn percent(text: &[u8]) -> Option<f64> {
    let dot = text.iter().position(|&byte| byte == b'.')?;
    let whole = number(text.get(..dot)?)?;
    let part = text.get(dot + 1..).filter(|digits| digits.len() == 2)?;
    let hundredths = whole.checked_mul(100)?.checked_add(number(part)?)?;
    Some(f64::from(u32::try_from(hundredths).ok()?) / 10_000.0)
}

#[cfg(test)]
mod psi_tests {
    use super::*;

    const TEXT: &str = "some avg10=12.34 avg60=1.00 avg300=0.07 total=10507010\n\
        full avg10=0.50 avg60=0.00 avg300=0.00 total=3155316\n";

    #[test]
    fn both_lines_are_read_or_nothing_is() {
        let psi = psi_of(TEXT.as_bytes()).expect("read");
        assert!((psi.some_avg10 - 0.1234).abs() < 1e-12 && (psi.full_avg10 - 0.005).abs() < 1e-12);
        assert_eq!(psi.some_total, Duration::from_micros(10_507_010));
        assert_eq!(psi.full_total, Duration::from_micros(3_155_316));
        for cut in 0..TEXT.len() - 1 {
            // A cut total is a number still; it is never more than the whole one.
            let read = psi_of(&TEXT.as_bytes()[..cut]);
            assert!(read.is_none_or(|read| read.full_total < psi.full_total), "{cut}: {read:?}");
        }
        for broken in ["12", "12.3", "12.345", "-1.00", "a.bc", "99999999999999999999.00", "."] {
            assert_eq!(percent(broken.as_bytes()), None, "{broken}");
        }
        assert_eq!(percent(b"100.00"), Some(1.0));
    }
}
