//! Parsers for the texts of `/proc/self` (`statm`, `status`, `limits`, `auxv`) and for `meminfo`.
//!
//! It opens nothing. `statm` counts pages, and their size is read from `auxv`, since asking the C
//! library for it would be the only foreign call in this part.
//!
//! Invariant: `anon <= rss`, with `anon = rss - shared` (`shared` counts file and shmem pages).

use lowtide_core::bytes::ByteSize;

use super::file::number;

/// The page size of x86-64 and of most aarch64 kernels, used if `auxv` cannot be read.
pub(super) const PAGE_USUAL: ByteSize = ByteSize::kib(4);

/// `AT_PAGESZ` in `<linux/auxvec.h>`.
const AUXV_PAGE_SIZE: usize = 6;

/// The process's memory according to `statm`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Statm {
    /// All resident memory.
    pub(super) rss: ByteSize,
    /// Anonymous pages only.
    pub(super) anon: ByteSize,
    /// All mapped addresses, and those of them that are data.
    pub(super) mapped: ByteSize,
    pub(super) data: ByteSize,
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

/// Parses `size resident shared text lib data dt`, in pages.
pub(super) fn resident_of(text: &[u8], page: ByteSize) -> Option<Statm> {
    let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let size = number(fields.next()?)?;
    let resident = number(fields.next()?)?;
    let shared = number(fields.next()?)?;
    let data = fields.nth(2).and_then(number).unwrap_or(size);
    let pages = |count| page.checked_mul(count);
    Some(Statm {
        rss: pages(resident)?,
        anon: pages(resident.saturating_sub(shared))?,
        mapped: pages(size)?,
        data: pages(data)?,
    })
}

/// Returns by how much the kernel's counts of resident pages may be wrong on this many CPUs: since
/// Linux 6.2, each CPU adds its changes when they exceed `max(32, 2 x CPUs)` pages.
pub(super) fn error_of(cpus: u32, page: ByteSize) -> ByteSize {
    let cpus = u64::from(cpus);
    page.checked_mul(cpus * (2 * cpus).max(32)).unwrap_or(ByteSize::MAX)
}

/// Returns the amount in the line `key <n> kB` of `status` or `meminfo`.
pub(super) fn kib_of(text: &[u8], key: &[u8]) -> Option<ByteSize> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))?;
    let count = number(line.trim_ascii().strip_suffix(b"kB")?)?;
    ByteSize::kib(1).checked_mul(count)
}

/// Returns the page size in an auxiliary vector: pairs of words, a kind and its value.
pub(super) fn page_of(auxv: &[u8]) -> Option<ByteSize> {
    const WORD: usize = size_of::<usize>();
    let word = |bytes: &[u8]| bytes.try_into().ok().map(usize::from_ne_bytes);
    auxv.chunks_exact(2 * WORD).find_map(|pair| {
        let (kind, value) = pair.split_at(WORD);
        let size = word(value)?;
        (word(kind)? == AUXV_PAGE_SIZE && size.is_power_of_two()).then(|| ByteSize::of(size))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn statm_is_read_in_pages() {
        let found = resident_of(b"765 418 390 5 0 123 0\n", PAGE_USUAL).expect("read");
        let (rss, anon) = (ByteSize::kib(1672), ByteSize::kib(112));
        let (mapped, data) = (ByteSize::kib(4 * 765), ByteSize::kib(4 * 123));
        assert_eq!(found, Statm { rss, anon, mapped, data });
        for text in ["", "765", "765 418", "a b c", "1 18446744073709551615 0", "1 -2 3"] {
            assert_eq!(resident_of(text.as_bytes(), PAGE_USUAL), None, "{text}");
        }
        let odd = resident_of(b"1 2 3 0", PAGE_USUAL).expect("read");
        assert_eq!((odd.anon, odd.data), (ByteSize::ZERO, ByteSize::kib(4)));
    }

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
        let held = resident_of(b"1024 512 256 5 0 768 0\n", PAGE_USUAL).expect("read");
        let each = |address, data| limits(address, data).each(held).collect::<Vec<_>>();
        assert_eq!(each("unlimited", "unlimited"), []);
        let address = ("RLIMIT_AS", [ByteSize::mib(8), ByteSize::mib(4)]);
        let data = ("RLIMIT_DATA", [ByteSize::mib(4), ByteSize::mib(3)]);
        assert_eq!(each("8388608", "unlimited"), [address]);
        assert_eq!(each("8388608", "4194304"), [address, data]);
        assert_eq!(SpaceLimits::of(b""), SpaceLimits::default());
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
    fn the_page_size_is_found_in_the_auxiliary_vector() {
        let words = |words: &[usize]| -> Vec<u8> {
            words.iter().flat_map(|word| word.to_ne_bytes()).collect()
        };
        let auxv = words(&[33, 77, AUXV_PAGE_SIZE, 65_536, 0, 0]);
        assert_eq!(page_of(&auxv), Some(ByteSize::kib(64)));
        assert_eq!(page_of(&words(&[AUXV_PAGE_SIZE, 65_537])), None);
        assert_eq!(page_of(&words(&[AUXV_PAGE_SIZE])), None);
        assert_eq!(page_of(b""), None);
    }
}
