//! A look at another process: CPU time and names of its threads, and what it has resident.
//!
//! It reads `/proc` and changes nothing. Time is `schedstat`'s, in nanoseconds on a CPU; the ticks
//! of `stat` are 10 ms, which is more than an idle second costs.

use std::collections::BTreeMap;
use std::fs;
use std::path::Path;

use lowtide::{BoxError, ByteSize};

/// The figures of a process at one time.
#[derive(Clone, Debug)]
pub(crate) struct Look {
    /// By thread id: its name, its nanoseconds on a CPU, and how often it was put there.
    pub(crate) threads: BTreeMap<u32, Thread>,
    /// Resident, all kinds of pages.
    pub(crate) resident: ByteSize,
    /// Resident and of this process alone.
    pub(crate) private: ByteSize,
}

/// A thread.
#[derive(Clone, Debug)]
pub(crate) struct Thread {
    /// Its name.
    pub(crate) name: String,
    /// Nanoseconds on a CPU.
    pub(crate) nanos: u64,
    /// The number of times that it was put on one.
    pub(crate) turns: u64,
}

impl Look {
    /// Looks at the process with this id.
    pub(crate) fn at(id: u32) -> Result<Self, BoxError> {
        let home = format!("/proc/{id}");
        let mut threads = BTreeMap::new();
        for entry in fs::read_dir(format!("{home}/task"))? {
            let folder = entry?.path();
            let number = folder.file_name().and_then(|name| name.to_str()?.parse().ok());
            // One that ended since it was listed has no files.
            let Ok(thread) = thread(&folder) else { continue };
            threads.insert(number.ok_or("a thread without a number")?, thread);
        }
        // Read last: it walks the process's pages.
        let pages = fs::read_to_string(format!("{home}/smaps_rollup"))?;
        let of = |key: &str| {
            let line = pages.lines().find_map(|line| line.strip_prefix(key))?;
            let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
            Some(ByteSize::kib(kib))
        };
        let private = of("Private_Dirty:")
            .and_then(|dirty| of("Private_Clean:").map(|clean| dirty.saturating_add(clean)));
        Ok(Self {
            threads,
            resident: of("Rss:").ok_or("smaps_rollup has no Rss")?,
            private: private.ok_or("smaps_rollup has no Private_Dirty")?,
        })
    }
}

fn thread(folder: &Path) -> Result<Thread, BoxError> {
    let name = fs::read_to_string(folder.join("comm"))?.trim().to_owned();
    let text = fs::read_to_string(folder.join("schedstat"))?;
    // Nanoseconds on a CPU, nanoseconds waiting for one, turns.
    let mut fields = text.split_whitespace();
    let nanos = fields.next().ok_or("schedstat is empty")?.parse()?;
    let turns = fields.nth(1).ok_or("schedstat has no turns")?.parse()?;
    Ok(Thread { name, nanos, turns })
}
