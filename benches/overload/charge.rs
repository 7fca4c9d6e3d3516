//! What a memory cgroup is charged with, and whom the kernel killed in it.
//!
//! Reads version 1 and version 2 by what files there are. Page cache that the kernel can drop at
//! once is no part of it. Invariant: `working set = max(usage - inactive_file, anon + shmem)`.

use std::fs;
use std::path::Path;

use lowtide::ByteSize;

/// The working set of the cgroup in this folder.
pub(crate) fn working_set(folder: &Path) -> Option<ByteSize> {
    let stat = fs::read_to_string(folder.join("memory.stat")).ok()?;
    let usage = ["memory.current", "memory.usage_in_bytes"]
        .iter()
        .find_map(|name| fs::read_to_string(folder.join(name)).ok())?;
    let usage: u64 = usage.trim().parse().ok()?;
    // Version 1 has the sums over the folders below under names of their own.
    let first = |names: [&str; 2]| names.iter().find_map(|name| value(&stat, name)).unwrap_or(0);
    let kept = first(["total_rss", "anon"]) + first(["total_shmem", "shmem"]);
    let droppable = first(["total_inactive_file", "inactive_file"]);
    Some(ByteSize::new(usage.saturating_sub(droppable).max(kept)))
}

/// How many processes of the cgroup the kernel has killed for memory.
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
