//! Bounds of the whole machine: its physical memory, and under strict overcommit what the kernel
//! still promises; the limits of the process on its addresses and its data; and the number of CPUs
//! that it can keep busy.
//!
//! [`Machine::look`] reads them again, some 10 us; the signals call it about once a second. Huge
//! pages that are reserved are no memory for this process, and are subtracted. `sysinfo(2)` answers
//! where `/proc/meminfo` is hidden.
//!
//! The CPUs are read once, at the open: the layout of threads and heap arenas depends on them at
//! the start. Nothing here binds a thread or changes a quota.
//!
//! Invariants: `usable = MemTotal - Hugetlb`, and in mode 2 of `vm.overcommit_memory`
//! `commit = CommitLimit`, compared with `Committed_AS + growth of this process since the look`;
//! `whole = max(1, min(allowed, quota rounded up))`, over the values that could be read, and the
//! quota is the smallest of the cgroup and its ancestors.

use std::path::Path;

use lowtide_core::bytes::ByteSize;
use lowtide_core::kernel::{Statm, kib_of, number, physical_memory};
use lowtide_core::sync::{Mutex, lock};

use super::cgroup::places;
use super::file::{SignalError, SignalFile, read_whole};

/// The strict mode of `vm.overcommit_memory`.
const STRICT: u64 = 2;

/// The machine's memory. Nothing of it is known by default.
#[derive(Debug, Default)]
pub(super) struct Machine {
    meminfo: Option<SignalFile>,
    overcommit: Option<SignalFile>,
    /// All physical memory, read once.
    pub(super) total: Option<ByteSize>,
    looked: Mutex<MachineBounds>,
}

/// The bounds as of the last look.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct MachineBounds {
    /// The physical memory less reserved huge pages.
    pub(super) usable: Option<ByteSize>,
    /// `CommitLimit`, and `Committed_AS` without this process's anonymous memory, unless the kernel
    /// overcommits.
    commit: Option<[ByteSize; 2]>,
}

impl MachineBounds {
    /// Returns how much memory the kernel promises at most, and how much it has promised if this
    /// process has so much anonymous memory now; `None` if it overcommits.
    pub(super) fn commit(self, anonymous: ByteSize) -> Option<[ByteSize; 2]> {
        self.commit.map(|[limit, others]| [limit, others.saturating_add(anonymous)])
    }
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
        let meminfo = SignalFile::open_noted(&path, missing);
        let found = meminfo.as_ref().map(|file| file.read(meminfo_of).unwrap_or_default());
        if found.is_some_and(|found| found.total.is_none()) {
            let expected = "a line `MemTotal: <n> kB`";
            missing.push(SignalError::Malformed { path, expected });
        }
        let of_system = || (root == Path::new("/")).then(physical_memory).flatten();
        let total = found.and_then(|found| found.total).or_else(of_system);
        let overcommit = root.join("proc/sys/vm/overcommit_memory");
        let overcommit = SignalFile::open_if_any(&overcommit, missing);
        Self { meminfo, overcommit, total, looked: Mutex::default() }
    }

    /// Reads the files again. A file that cannot be read now leaves its value. Allocates nothing.
    pub(super) fn look(&self, anonymous: ByteSize) {
        let found = self.meminfo.as_ref().and_then(|file| file.read(meminfo_of));
        let Meminfo { total, huge, commit } = found.unwrap_or_default();
        let mode = self.overcommit.as_ref().and_then(|file| file.read_line(number).flatten());
        let strict = commit.filter(|_| mode == Some(STRICT));
        let mut looked = lock(&self.looked);
        looked.commit = strict.map(|[limit, used]| [limit, used.saturating_sub(anonymous)]);
        if let Some(total) = total.or(self.total) {
            looked.usable = Some(total.saturating_sub(huge));
        }
    }

    /// Returns the bounds as of the last look.
    pub(super) fn bounds(&self) -> MachineBounds {
        *lock(&self.looked)
    }
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

/// The limits on mappings of the process; `None` for no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct SpaceLimits {
    /// Addresses of any kind (`RLIMIT_AS`).
    address: Option<ByteSize>,
    /// Private memory that can be written: heaps and stacks (`RLIMIT_DATA`).
    data: Option<ByteSize>,
}

impl SpaceLimits {
    /// Parses `/proc/self/limits`, whose first column of numbers holds the limits in force.
    pub(super) fn of(text: &[u8]) -> Self {
        let soft = |name: &[u8]| {
            let line =
                text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(name))?;
            let mut fields = line.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
            number(fields.next()?).map(ByteSize::new) // `unlimited` is no number
        };
        Self { address: soft(b"Max address space"), data: soft(b"Max data size") }
    }

    /// Returns each limit in force with its name and what counts against it. An allocator may reuse
    /// addresses that it kept, but not for every size, so they count as used.
    pub(super) fn each(self, held: Statm) -> impl Iterator<Item = (&'static str, [ByteSize; 2])> {
        let address = self.address.map(|limit| ("RLIMIT_AS", [limit, held.mapped]));
        let data = held.data.max(held.anon);
        address.into_iter().chain(self.data.map(move |limit| ("RLIMIT_DATA", [limit, data])))
    }
}

/// The controller's name on version 1.
const CPU: &[u8] = b"cpu";

/// The CPUs of this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Cpus {
    /// The number of CPUs that it may run on; `None` if it cannot be read.
    pub allowed: Option<u32>,
    /// Thousandths of a CPU that its cgroup may keep busy on average: the quota divided by its
    /// period, rounded up. `None` without a quota.
    pub quota_milli: Option<u64>,
}

impl Cpus {
    /// Returns the allowed CPUs from the standard library, without a quota.
    pub(super) fn of_thread() -> Self {
        let count = std::thread::available_parallelism().ok();
        let allowed = count.and_then(|count| u32::try_from(count.get()).ok());
        Self { allowed, quota_milli: None }
    }

    /// Reads the files of a file tree.
    pub(super) fn read(root: &Path) -> Self {
        let status = read_whole(&root.join("proc/self/status")).ok();
        let allowed = status.and_then(|text| allowed_of(&text));
        Self { allowed, quota_milli: quota(root) }
    }

    /// Returns the number of threads that the process can keep busy; part of a CPU counts as one.
    /// `None` if nothing is known.
    #[must_use]
    pub fn whole(&self) -> Option<u32> {
        let by_quota = self.quota_milli.map(|milli| milli.div_ceil(1_000));
        let by_quota = by_quota.and_then(|count| u32::try_from(count).ok());
        let least = self.allowed.into_iter().chain(by_quota).min();
        least.map(|count| count.max(1))
    }
}

/// Returns the smallest quota of the cgroup and its ancestors, in thousandths of a CPU.
fn quota(root: &Path) -> Option<u64> {
    let proc = root.join("proc/self");
    let lines = read_whole(&proc.join("cgroup")).ok()?;
    let mounts = read_whole(&proc.join("mountinfo")).ok()?;
    // Version 1 first: on a hybrid host the `0::` line exists without a controller.
    for controller in [Some(CPU), None] {
        let of_level = if controller.is_some() { quota_v1 } else { quota_v2 };
        for place in places(root, &lines, &mounts, controller) {
            let levels = place.folders(root);
            let quotas = levels.iter().filter_map(|folder| of_level(folder));
            if let Some(least) = quotas.min() {
                return Some(least);
            }
        }
    }
    None
}

/// `cpu.max`: `<quota> <period>`, both in us, or `max <period>`.
fn quota_v2(folder: &Path) -> Option<u64> {
    let text = read_whole(&folder.join("cpu.max")).ok()?;
    let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    milli(number(fields.next()?)?, number(fields.next()?)?)
}

/// `cpu.cfs_quota_us`, which is -1 for none, and `cpu.cfs_period_us`.
fn quota_v1(folder: &Path) -> Option<u64> {
    let value = |name: &str| number(&read_whole(&folder.join(name)).ok()?);
    milli(value("cpu.cfs_quota_us")?, value("cpu.cfs_period_us")?)
}

fn milli(quota_us: u64, period_us: u64) -> Option<u64> {
    let is_one = quota_us > 0 && period_us > 0;
    is_one.then(|| quota_us.saturating_mul(1_000).div_ceil(period_us))
}

/// Returns the number of CPUs in the line `Cpus_allowed_list: 0-3,8` of `status`.
fn allowed_of(status: &[u8]) -> Option<u32> {
    let lines = status.split(|&byte| byte == b'\n');
    count_of(lines.filter_map(|line| line.strip_prefix(b"Cpus_allowed_list:")).next()?)
}

/// Returns the number of the machine's CPUs that are online.
pub(super) fn online(root: &Path) -> Option<u32> {
    count_of(&read_whole(&root.join("sys/devices/system/cpu/online")).ok()?)
}

/// Returns the number of CPUs in a list such as `0-3,8`.
fn count_of(list: &[u8]) -> Option<u32> {
    let mut count = 0_u64;
    for range in list.trim_ascii().split(|&byte| byte == b',') {
        let mut ends = range.splitn(2, |&byte| byte == b'-');
        let first = number(ends.next()?)?;
        let last = ends.next().map_or(Some(first), number)?;
        count = count.checked_add(last.checked_sub(first)?)?.checked_add(1)?;
    }
    u32::try_from(count).ok()
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

#[cfg(test)]
mod space_limits_tests {
    use super::*;

    #[test]
    fn limits_on_addresses_and_data_are_compared_with_what_is_mapped() {
        let limits = |address: &str, data: &str| {
            let text = format!(
                "Limit                     Soft Limit           Hard Limit           Units     \n\
                 Max cpu time              unlimited            unlimited            seconds   \n\
                 Max data size             {data}            unlimited            bytes     \n\
                 Max address space         {address}            9            bytes     \n"
            );
            SpaceLimits::of(text.as_bytes())
        };
        // 4 MiB are mapped, 3 of them data.
        let held = Statm::parse(b"1024 512 256 5 0 768 0\n", ByteSize::kib(4)).expect("read");
        let each = |address, data| limits(address, data).each(held).collect::<Vec<_>>();
        assert_eq!(each("unlimited", "unlimited"), []);
        let address = ("RLIMIT_AS", [ByteSize::mib(8), ByteSize::mib(4)]);
        let data = ("RLIMIT_DATA", [ByteSize::mib(4), ByteSize::mib(3)]);
        assert_eq!(each("8388608", "unlimited"), [address]);
        assert_eq!(each("8388608", "4194304"), [address, data]);
        assert_eq!(SpaceLimits::of(b""), SpaceLimits::default());
    }
}

#[cfg(test)]
mod cpu_tests {
    use super::*;

    #[test]
    fn cpus_that_may_be_run_on_are_counted() {
        let count = |list: &str| allowed_of(format!("A:\t1\n{list}\nB:\t2\n").as_bytes());
        assert_eq!(count("Cpus_allowed_list:\t0-63"), Some(64));
        assert_eq!(count("Cpus_allowed_list:\t0-1,4,6-7"), Some(5));
        assert_eq!(count("Cpus_allowed_list:\t3"), Some(1));
        for broken in ["", "x", "3-1", "0-", "-3", "0,,1", "0-18446744073709551615"] {
            assert_eq!(count(&format!("Cpus_allowed_list:\t{broken}")), None, "{broken:?}");
        }
        assert_eq!(count("Cpus_allowed:\tff"), None);
    }

    #[test]
    fn part_of_a_cpu_is_one_and_the_less_counts() {
        for (allowed, quota_milli, whole) in [
            (Some(64), Some(2_000), Some(2)),
            (Some(64), Some(1_500), Some(2)),
            (Some(64), Some(100), Some(1)),
            (Some(4), Some(100_000), Some(4)),
            (Some(4), Some(u64::MAX), Some(4)),
            (Some(4), None, Some(4)),
            (None, Some(2_500), Some(3)),
            (Some(0), None, Some(1)),
            (None, None, None),
        ] {
            let cpus = Cpus { allowed, quota_milli };
            assert_eq!(cpus.whole(), whole, "{cpus:?}");
        }
        assert_eq!(milli(50_000, 100_000), Some(500));
        assert_eq!((milli(1, 1_000_000), milli(u64::MAX, 1)), (Some(1), Some(u64::MAX)));
        assert_eq!((milli(0, 100_000), milli(100_000, 0)), (None, None));
    }
}
