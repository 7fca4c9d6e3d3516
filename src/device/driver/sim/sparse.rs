//! Bytes of which only those are kept that were written.
//!
//! It knows no address and no driver. What was never written reads as [`UNWRITTEN`]: fresh device
//! memory has contents, and they are nobody's zeros.
//!
//! Invariant: `kept pages <= pages written to`; `pages.len()` is 0 until the first write.

use crate::bytes::ByteSize;

/// What a byte that was never written reads as.
pub(super) const UNWRITTEN: u8 = 0xA5;

/// Bytes in a page, which is kept or not as a whole.
pub(super) const PAGE: usize = 4 << 10;

/// So many bytes, most of them perhaps never written.
#[derive(Debug)]
pub(super) struct Sparse {
    size: usize,
    pages: Vec<Option<Box<[u8; PAGE]>>>,
}

impl Sparse {
    /// Nothing written yet. Costs no allocation.
    pub(super) fn new(size: ByteSize) -> Self {
        Self { size: index(size.get()), pages: Vec::new() }
    }

    pub(super) const fn size(&self) -> usize {
        self.size
    }

    /// Forgets what was written.
    pub(super) fn wipe(&mut self) {
        self.pages.clear();
    }

    /// How far it is from `offset` to the end of its page.
    pub(super) const fn left_in_page(offset: usize) -> usize {
        PAGE - offset % PAGE
    }

    /// Whether the page of `offset` holds anything written.
    pub(super) fn is_written(&self, offset: usize) -> bool {
        self.pages.get(offset / PAGE).is_some_and(Option::is_some)
    }

    /// Reads bytes of one page.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        debug_assert!(into.len() <= Self::left_in_page(offset) && offset + into.len() <= self.size);
        match self.pages.get(offset / PAGE).and_then(Option::as_deref) {
            Some(page) => into.copy_from_slice(&page[offset % PAGE..][..into.len()]),
            None => into.fill(UNWRITTEN),
        }
    }

    /// The bytes of one page, to be written.
    pub(super) fn write(&mut self, offset: usize, length: usize) -> &mut [u8] {
        debug_assert!(length <= Self::left_in_page(offset) && offset + length <= self.size);
        if self.pages.is_empty() {
            self.pages.resize_with(self.size.div_ceil(PAGE), || None);
        }
        let page = self.pages[offset / PAGE].get_or_insert_with(|| Box::new([UNWRITTEN; PAGE]));
        &mut page[offset % PAGE..][..length]
    }
}

/// A size or an offset inside what is kept in this process's memory.
pub(super) fn index(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_was_not_written_reads_as_such_and_takes_no_memory() {
        let mut bytes = Sparse::new(ByteSize::gib(64));
        let mut out = [0; 8];
        bytes.read(12345, &mut out);
        assert_eq!((out, bytes.pages.len()), ([UNWRITTEN; 8], 0));
        bytes = Sparse::new(ByteSize::kib(12));
        bytes.write(PAGE + 4, 2).copy_from_slice(&[1, 2]);
        bytes.read(PAGE + 2, &mut out);
        let around = UNWRITTEN;
        assert_eq!(out, [around, around, 1, 2, around, around, around, around]);
        assert_eq!(bytes.pages.iter().flatten().count(), 1);
        assert!(bytes.is_written(PAGE) && !bytes.is_written(PAGE - 1));
        bytes.wipe();
        assert!(!bytes.is_written(PAGE));
    }
}
