//! Sparse bytes: only pages that were written are stored.
//!
//! It knows no address and no driver. Bytes that were never written read as [`UNWRITTEN`]: fresh
//! device memory has unspecified contents, not zeros.
//!
//! Invariant: `kept pages <= pages written to`; `pages.len()` is 0 until the first write.

use std::iter;

use lowtide_core::bytes::ByteSize;

/// The value of a byte that was never written.
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

    /// Discards all written pages.
    pub(super) fn wipe(&mut self) {
        self.pages.clear();
    }

    /// Returns `true` if the page of `offset` was written.
    pub(super) fn is_written(&self, offset: usize) -> bool {
        self.pages.get(offset / PAGE).is_some_and(Option::is_some)
    }

    /// Reads bytes of one page.
    pub(super) fn read(&self, offset: usize, into: &mut [u8]) {
        debug_assert!(into.len() <= PAGE - offset % PAGE && offset + into.len() <= self.size);
        match self.pages.get(offset / PAGE).and_then(Option::as_deref) {
            Some(page) => into.copy_from_slice(&page[offset % PAGE..][..into.len()]),
            None => into.fill(UNWRITTEN),
        }
    }

    /// The bytes of one page, to be written.
    pub(super) fn write(&mut self, offset: usize, length: usize) -> &mut [u8] {
        debug_assert!(length <= PAGE - offset % PAGE && offset + length <= self.size);
        if self.pages.is_empty() {
            self.pages.resize_with(self.size.div_ceil(PAGE), || None);
        }
        let page = self.pages[offset / PAGE].get_or_insert_with(|| Box::new([UNWRITTEN; PAGE]));
        &mut page[offset % PAGE..][..length]
    }
}

/// The parts of `size` bytes that cross the end of no page, whether they begin at `one` or at
/// `two`: the bytes before a part, and its length.
pub(super) fn blocks(size: u64, one: u64, two: u64) -> impl Iterator<Item = (u64, usize)> {
    let left_in_page = |at: u64| PAGE as u64 - at % PAGE as u64;
    let mut next = 0;
    iter::from_fn(move || {
        let done = next;
        let length = left_in_page(one + done).min(left_in_page(two + done)).min(size - done);
        next += length;
        (length > 0).then(|| (done, index(length)))
    })
}

/// Converts a size or an offset within stored memory to an index.
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
