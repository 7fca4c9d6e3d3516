//! Figures of the kernel: texts of `/proc`, and what `sysconf` and `getrlimit` answer.
//!
//! Parsers get the bytes; this module opens nothing and does not allocate.
//!
//! Invariant: `anon <= rss`, with `anon = rss - shared` (`shared` counts file and shmem pages).
#![expect(unsafe_code, reason = "sysconf and getrlimit are C calls")]

use crate::bytes::ByteSize;

/// The process's memory according to `/proc/self/statm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Statm {
    /// All resident memory.
    pub rss: ByteSize,
    /// Anonymous pages only.
    pub anon: ByteSize,
    /// All mapped addresses.
    pub mapped: ByteSize,
    /// Mapped addresses that are data.
    pub data: ByteSize,
}

impl Statm {
    /// Parses `size resident shared text lib data dt`, in pages.
    #[must_use]
    pub fn parse(text: &[u8], page: ByteSize) -> Option<Self> {
        let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
        let size = number(fields.next()?)?;
        let resident = number(fields.next()?)?;
        let shared = number(fields.next()?)?;
        let data = fields.nth(2).and_then(number).unwrap_or(size);
        let pages = |count| page.checked_mul(count);
        Some(Self {
            rss: pages(resident)?,
            anon: pages(resident.saturating_sub(shared))?,
            mapped: pages(size)?,
            data: pages(data)?,
        })
    }
}

/// Parses a decimal number that fills `text`, except for surrounding spaces.
#[must_use]
pub fn number(text: &[u8]) -> Option<u64> {
    str::from_utf8(text.trim_ascii()).ok()?.parse().ok()
}

/// Returns the amount in the line `key <n> kB` of `status`, `meminfo` or `smaps`.
#[must_use]
pub fn kib_of(text: &[u8], key: &[u8]) -> Option<ByteSize> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))?;
    let count = number(line.trim_ascii().strip_suffix(b"kB")?)?;
    ByteSize::kib(1).checked_mul(count)
}

/// Returns by how much the kernel's counts of resident pages may be wrong on this many CPUs: since
/// Linux 6.2, each CPU adds its changes when they exceed `max(32, 2 x CPUs)` pages
/// (`percpu_counter` in `mm/memory.c`).
#[must_use]
pub fn resident_error(cpus: u64, page: ByteSize) -> ByteSize {
    page.checked_mul(cpus.saturating_mul((2 * cpus).max(32))).unwrap_or(ByteSize::MAX)
}

/// Returns the bytes of a page.
#[must_use]
pub fn page_size() -> Option<ByteSize> {
    system(libc::_SC_PAGESIZE).map(ByteSize::new)
}

/// Returns the number of CPUs that are online.
#[must_use]
pub fn online_cpus() -> Option<u64> {
    system(libc::_SC_NPROCESSORS_ONLN)
}

/// Returns the physical memory of the machine, or `None` if the system does not say.
#[must_use]
pub fn physical_memory() -> Option<ByteSize> {
    page_size()?.checked_mul(system(libc::_SC_PHYS_PAGES)?)
}

/// Returns the largest size of a file that this process may write; the kernel sends SIGXFSZ above
/// it, also for files in memory.
#[must_use]
pub fn file_size_limit() -> ByteSize {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid place for the result.
    let done = unsafe { libc::getrlimit(libc::RLIMIT_FSIZE, &raw mut limit) };
    #[allow(clippy::useless_conversion, reason = "32 bits on some targets")]
    if done == 0 { ByteSize::new(u64::from(limit.rlim_cur)) } else { ByteSize::MAX }
}

/// Returns a figure above zero.
fn system(name: libc::c_int) -> Option<u64> {
    // SAFETY: takes a number and returns one, or -1 for a name that the system does not know.
    let value = unsafe { libc::sysconf(name) };
    u64::try_from(value).ok().filter(|value| *value > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: ByteSize = ByteSize::kib(4);

    #[test]
    fn statm_is_read_in_pages() {
        let found = Statm::parse(b"765 418 390 5 0 123 0\n", PAGE).expect("read");
        let (rss, anon) = (ByteSize::kib(1672), ByteSize::kib(112));
        let (mapped, data) = (ByteSize::kib(4 * 765), ByteSize::kib(4 * 123));
        assert_eq!(found, Statm { rss, anon, mapped, data });
        for text in ["", "765", "765 418", "a b c", "1 18446744073709551615 0", "1 -2 3"] {
            assert_eq!(Statm::parse(text.as_bytes(), PAGE), None, "{text}");
        }
        let odd = Statm::parse(b"1 2 3 0", PAGE).expect("read");
        assert_eq!((odd.anon, odd.data), (ByteSize::ZERO, ByteSize::kib(4)));
    }

    #[test]
    fn lines_in_kib_are_found_by_their_key() {
        let text = b"VmRSS:\t    1756 kB\nRssAnon:\t     116 kB\nRssFile:\t    1640 kB\n\
            RssShmem:\t       0 kB\nMemTotal:       32780132 kB\nVmBad: 5\n";
        assert_eq!(kib_of(text, b"RssAnon:"), Some(ByteSize::kib(116)));
        assert_eq!(kib_of(text, b"RssShmem:"), Some(ByteSize::ZERO));
        assert_eq!(kib_of(text, b"MemTotal:"), Some(ByteSize::kib(32_780_132)));
        assert_eq!(kib_of(text, b"VmBad:"), None);
        assert_eq!(kib_of(text, b"VmSwap:"), None);
    }

    #[test]
    fn numbers_are_whole_or_nothing() {
        for (text, value) in [("0", 0), ("42\n", 42), ("18446744073709551615", u64::MAX)] {
            assert_eq!(number(text.as_bytes()), Some(value), "{text}");
        }
        for text in ["", "\n", "max", "4x", "-1", "18446744073709551616", "1 2"] {
            assert_eq!(number(text.as_bytes()), None, "{text}");
        }
    }

    #[test]
    fn the_system_knows_its_pages_cpus_and_memory() {
        assert!(page_size().is_some_and(|page| page.get().is_power_of_two()));
        assert!(online_cpus().is_some() && physical_memory() > page_size());
    }
}
