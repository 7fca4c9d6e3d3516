//! The charge of a memory cgroup, the processes that the kernel killed in it, and the machine's
//! load.
//!
//! Reads version 1 and version 2 by what files there are. Page cache is no part of the working set,
//! as lowtide itself counts. Invariant:
//! `working set = max(usage - inactive_file - active_file, anon + shmem)`.

use std::fs;
use std::path::Path;

use lowtide::ByteSize;

/// The working set of the cgroup in this folder.
pub(crate) fn working_set(folder: &Path) -> Option<ByteSize> {
    let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
    let usage = usage(folder)?.get();
    // Version 1 has the sums over the folders below under names of their own.
    let first = |names: [&str; 2]| names.iter().find_map(|name| value(&stat, name)).unwrap_or(0);
    let kept = first(["total_rss", "anon"]) + first(["total_shmem", "shmem"]);
    let cache = first(["total_inactive_file", "inactive_file"])
        + first(["total_active_file", "active_file"]);
    Some(ByteSize::new(usage.saturating_sub(cache).max(kept)))
}

/// All that it is charged with, page cache too.
pub(crate) fn usage(folder: &Path) -> Option<ByteSize> {
    let text = ["memory.current", "memory.usage_in_bytes"]
        .iter()
        .find_map(|name| fs::read_to_string(folder.join(name)).ok())?;
    Some(ByteSize::new(text.trim().parse().ok()?))
}

/// The parts of its memory that are large enough to explain something, in words.
pub(crate) fn parts(folder: &Path) -> String {
    let stat = fs::read_to_string(folder.join("memory.stat")).unwrap_or_default();
    let kernel = fs::read_to_string(folder.join("memory.kmem.usage_in_bytes")).ok();
    let named = ["rss", "anon", "cache", "file", "shmem", "kernel", "sock", "inactive_file"];
    let mut parts: Vec<String> = named
        .into_iter()
        .filter_map(|name| Some((name, value(&stat, name)?)))
        .filter(|(_, bytes)| *bytes > 1 << 20)
        .map(|(name, bytes)| format!("{name} {}", ByteSize::new(bytes)))
        .collect();
    if let Some(bytes) = kernel.and_then(|text| text.trim().parse().ok()) {
        parts.push(format!("kmem {}", ByteSize::new(bytes)));
    }
    parts.join(", ")
}

/// Returns the number of processes of the cgroup that the kernel has killed for memory.
pub(crate) fn oom_kills(folder: &Path) -> Option<u64> {
    let text = ["memory.events", "memory.oom_control"]
        .iter()
        .find_map(|name| fs::read_to_string(folder.join(name)).ok())?;
    value(&text, "oom_kill")
}

/// The value in the line `key value`.
fn value(text: &str, key: &str) -> Option<u64> {
    let rest = |line: &str| line.strip_prefix(key)?.strip_prefix(' ')?.trim().parse().ok();
    text.lines().find_map(rest)
}

/// The time of all processors since the machine's start, in ticks.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Ticks {
    all: u64,
    idle: u64,
}

impl Ticks {
    /// As of now.
    pub(crate) fn now() -> Self {
        let text = fs::read_to_string("/proc/stat").unwrap_or_default();
        let line = text.lines().next().unwrap_or_default();
        let figures: Vec<u64> =
            line.split_whitespace().skip(1).filter_map(|figure| figure.parse().ok()).collect();
        // The guests' time, the ninth and tenth, is part of the users'.
        let all = figures.iter().take(8).sum();
        // Idle, and idle while something waits for a disk.
        let idle = figures.iter().skip(3).take(2).sum();
        Self { all, idle }
    }

    /// The part of the processors' time that was used since then, by whomever.
    pub(crate) fn busy_since(self, then: Self) -> f64 {
        let all = self.all.saturating_sub(then.all);
        let idle = self.idle.saturating_sub(then.idle);
        if all == 0 { 0.0 } else { 1.0 - crate::figures::count(idle) / crate::figures::count(all) }
    }
}
