//! Bounds of the whole machine: its physical memory, and under strict overcommit what the kernel
//! still promises.
//!
//! [`Machine::look`] reads them again, some 10 us; the signals call it about once a second. Huge
//! pages that are reserved are no memory for this process, and are subtracted. `sysinfo(2)` answers
//! where `/proc/meminfo` is hidden.
//!
//! Invariant: `usable = MemTotal - Hugetlb`, and in mode 2 of `vm.overcommit_memory`
//! `commit = CommitLimit`, compared with `Committed_AS + growth of this process since the look`.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::{kib_of, number, physical_memory};

use super::error::SignalError;
use super::file::KeptFile;

/// The strict mode of `vm.overcommit_memory`.
const STRICT: u64 = 2;

/// The machine's memory. Written by each thread that looks.
#[derive(Debug)]
pub(super) struct Machine {
    meminfo: Option<KeptFile>,
    overcommit: Option<KeptFile>,
    /// All physical memory, read once.
    total: Option<ByteSize>,
    /// As of the last look; [`u64::MAX`] for none.
    usable: AtomicU64,
    /// `CommitLimit`, and `Committed_AS` without this process's anonymous memory.
    commit: [AtomicU64; 2],
}

/// The figures of `meminfo`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Meminfo {
    total: Option<ByteSize>,
    huge: ByteSize,
    commit: Option<[ByteSize; 2]>,
}

impl Machine {
    /// Opens the files of a file tree, and reads them.
    pub(super) fn open(root: &Path, missing: &mut Vec<SignalError>) -> Self {
        let path = root.join("proc/meminfo");
        let meminfo = KeptFile::open_noted(&path, missing);
        let found = meminfo.as_ref().map(|file| file.read(meminfo_of).unwrap_or_default());
        if found.is_some_and(|found| found.total.is_none()) {
            let expected = "a line `MemTotal: <n> kB`";
            missing.push(SignalError::Malformed { path, expected });
        }
        let of_system = || (root == Path::new("/")).then(physical_memory).flatten();
        let total = found.and_then(|found| found.total).or_else(of_system);
        let overcommit = root.join("proc/sys/vm/overcommit_memory");
        let overcommit = KeptFile::open_if_any(&overcommit, missing);
        Self { meminfo, overcommit, total, ..Self::none() }
    }

    /// Returns a machine of which nothing is known.
    pub(super) const fn none() -> Self {
        const fn no() -> AtomicU64 {
            AtomicU64::new(u64::MAX)
        }
        Self { meminfo: None, overcommit: None, total: None, usable: no(), commit: [no(), no()] }
    }

    /// Reads the files again. A file that cannot be read now leaves its value. Allocates nothing.
    pub(super) fn look(&self, anonymous: ByteSize) {
        let found = self.meminfo.as_ref().and_then(|file| file.read(meminfo_of));
        let Meminfo { total, huge, commit } = found.unwrap_or_default();
        if let Some(total) = total.or(self.total) {
            self.usable.store(total.saturating_sub(huge).get(), Ordering::Relaxed);
        }
        let mode = self.overcommit.as_ref().and_then(|file| file.read_line(number).flatten());
        let strict = commit.filter(|_| mode == Some(STRICT));
        let strict = strict.map(|[limit, used]| [limit, used.saturating_sub(anonymous)]);
        for (place, value) in self.commit.iter().zip(strict.unwrap_or([ByteSize::MAX; 2])) {
            place.store(value.get(), Ordering::Relaxed);
        }
    }

    /// Returns all physical memory.
    pub(super) const fn total(&self) -> Option<ByteSize> {
        self.total
    }

    /// Returns the physical memory less reserved huge pages.
    pub(super) fn usable(&self) -> Option<ByteSize> {
        known(&self.usable)
    }

    /// Returns how much memory the kernel promises at most, and how much it has promised if this
    /// process has so much anonymous memory now; `None` if it overcommits.
    pub(super) fn commit(&self, anonymous: ByteSize) -> Option<[ByteSize; 2]> {
        let [limit, others] = &self.commit;
        let others = known(others)?.saturating_add(anonymous);
        known(limit).map(|limit| [limit, others])
    }
}

fn known(of: &AtomicU64) -> Option<ByteSize> {
    Some(of.load(Ordering::Relaxed)).filter(|bytes| *bytes != u64::MAX).map(ByteSize::new)
}

fn meminfo_of(text: &[u8]) -> Meminfo {
    let pages = || {
        let count = |line: &[u8]| line.strip_prefix(b"HugePages_Total:").and_then(number);
        let count = text.split(|&byte| byte == b'\n').find_map(count)?;
        kib_of(text, b"Hugepagesize:")?.checked_mul(count)
    };
    Meminfo {
        total: kib_of(text, b"MemTotal:").filter(|total| !total.is_zero()),
        // Of all sizes; kernels before 4.20 show one size only.
        huge: kib_of(text, b"Hugetlb:").or_else(pages).unwrap_or(ByteSize::ZERO),
        commit: kib_of(text, b"CommitLimit:").zip(kib_of(text, b"Committed_AS:")).map(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn huge_pages_of_all_sizes_are_no_memory_for_this_process() {
        let text = b"MemTotal:  1000 kB\nHugePages_Total: 3\nHugepagesize: 100 kB\n";
        assert_eq!(meminfo_of(text).huge, ByteSize::kib(300), "an old kernel");
        let text = b"MemTotal: 0 kB\nHugePages_Total: 3\nHugepagesize: 100 kB\nHugetlb: 500 kB\n";
        let found = Meminfo { total: None, huge: ByteSize::kib(500), commit: None };
        assert_eq!(meminfo_of(text), found);
        assert_eq!(meminfo_of(b""), Meminfo::default());
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn the_system_call_knows_what_meminfo_shows() {
        let shown = std::fs::read("/proc/meminfo").ok().and_then(|text| meminfo_of(&text).total);
        let found = physical_memory().expect("answers");
        assert!(shown.is_none_or(|shown| shown == found), "{shown:?}: {found}");
    }
}
