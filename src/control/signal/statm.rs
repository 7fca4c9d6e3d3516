//! The texts of `/proc/self`: `statm`, `status`, `auxv`, and `meminfo` beside them, as arithmetic.
//!
//! It opens nothing. `statm` counts pages, and their size is read from `auxv`, since asking the C
//! library for it would be the only foreign call in this part.
//!
//! Invariant: `anon <= rss`, with `anon = rss - shared` (`shared` counts file and shmem pages).

use crate::bytes::ByteSize;

use super::file::number;

/// The page of x86-64 and of most aarch64 kernels, where `auxv` cannot be read.
pub(super) const PAGE_USUAL: ByteSize = ByteSize::kib(4);

/// `AT_PAGESZ` in `<linux/auxvec.h>`.
const AUXV_PAGE_SIZE: usize = 6;

/// The resident set as `statm` counts it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Statm {
    /// Everything resident.
    pub(super) rss: ByteSize,
    /// Anonymous pages only.
    pub(super) anon: ByteSize,
}

/// Reads `size resident shared text lib data dt`, in pages.
pub(super) fn resident_of(text: &[u8], page: ByteSize) -> Option<Statm> {
    let mut fields = text.split(u8::is_ascii_whitespace).filter(|field| !field.is_empty());
    let resident = number(fields.nth(1)?)?;
    let shared = number(fields.next()?)?;
    let pages = |count| page.checked_mul(count);
    Some(Statm { rss: pages(resident)?, anon: pages(resident.saturating_sub(shared))? })
}

/// The amount in the line `key <n> kB` of `status` or `meminfo`.
pub(super) fn kib_of(text: &[u8], key: &[u8]) -> Option<ByteSize> {
    let line = text.split(|&byte| byte == b'\n').find_map(|line| line.strip_prefix(key))?;
    let count = number(line.trim_ascii().strip_suffix(b"kB")?)?;
    ByteSize::kib(1).checked_mul(count)
}

/// The page size in an auxiliary vector: pairs of words, a kind and its value.
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
        assert_eq!(found, Statm { rss: ByteSize::kib(1672), anon: ByteSize::kib(112) });
        for text in ["", "765", "765 418", "a b c", "1 18446744073709551615 0", "1 -2 3"] {
            assert_eq!(resident_of(text.as_bytes(), PAGE_USUAL), None, "{text}");
        }
        let odd = resident_of(b"1 2 3 0", PAGE_USUAL).expect("read");
        assert_eq!(odd.anon, ByteSize::ZERO);
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
