//! The number of CPUs that this process can keep busy: its allowed CPUs and its cgroup's quota of
//! CPU time.
//!
//! Read once, at the open: the layout of threads and heap arenas depends on it at the start. It
//! binds nothing and changes no quota.
//!
//! Invariant: `whole = max(1, min(allowed, quota rounded up))`, over the values that could be read;
//! the quota is the smallest of the cgroup and its ancestors.

use std::path::Path;

use lowtide_core::kernel::number;

use super::cgroup::{path_v1, path_v2, places};
use super::file::read_whole;

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
        let least = match (self.allowed, by_quota) {
            (Some(allowed), Some(quota)) => Some(allowed.min(quota)),
            (allowed, quota) => allowed.or(quota),
        };
        least.map(|count| count.max(1))
    }
}

/// Returns the smallest quota of the cgroup and its ancestors, in thousandths of a CPU.
fn quota(root: &Path) -> Option<u64> {
    let proc = root.join("proc/self");
    let lines = read_whole(&proc.join("cgroup")).ok()?;
    let mounts = read_whole(&proc.join("mountinfo")).ok()?;
    // Version 1 first: on a hybrid host the `0::` line exists without a controller.
    for (path, controller) in [(path_v1(&lines, CPU), Some(CPU)), (path_v2(&lines), None)] {
        let Some(path) = path else { continue };
        let of_level = if controller.is_some() { quota_v1 } else { quota_v2 };
        for place in places(root, &mounts, path, controller) {
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
