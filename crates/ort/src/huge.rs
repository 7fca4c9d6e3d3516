//! Huge pages for the memory of runs.
//!
//! A run touches blocks of many MiB, and each fresh page of 4 KiB is a fault of a microsecond or
//! more. A device arena commits granules of 2 MiB, each the size of a huge page, so that huge pages
//! use no more memory than is committed. The request outlives the release of a granule, so each is
//! requested once.
//!
//! Invariant: only whole granules inside of blocks are named.
#![expect(unsafe_code, reason = "calls the system")]

use std::collections::BTreeSet;
use std::sync::{Mutex, PoisonError};

/// The size of a huge page, and of a granule of the host driver.
const PAGE: usize = 2 << 20;

/// The granules for which huge pages were requested, by address.
#[derive(Debug, Default)]
pub(crate) struct HugePages(Mutex<BTreeSet<usize>>);

impl HugePages {
    /// Requests huge pages for the granules within a block. If the system has none, nothing
    /// changes.
    pub(crate) fn request(&self, start: usize, size: usize) {
        let Some(first) = start.checked_next_multiple_of(PAGE) else { return };
        let end = start.saturating_add(size) / PAGE * PAGE;
        if first >= end {
            return;
        }
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let fresh: Vec<_> =
            (first..end).step_by(PAGE).filter(|granule| known.insert(*granule)).collect();
        drop(known);
        fresh.into_iter().for_each(advise);
    }
}

#[cfg(target_os = "linux")]
fn advise(granule: usize) {
    let start = std::ptr::with_exposed_provenance_mut(granule);
    // SAFETY: the advice changes no contents, and the range is a part of a live block.
    let _ = unsafe { libc::madvise(start, PAGE, libc::MADV_HUGEPAGE) };
}

#[cfg(not(target_os = "linux"))]
fn advise(_: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    fn requested(start: usize, size: usize) -> Vec<usize> {
        let pages = HugePages::default();
        pages.request(start, size);
        pages.0.into_inner().unwrap().into_iter().collect()
    }

    #[test]
    fn only_whole_granules_within_a_block_are_requested() {
        let base = 1 << 40; // not mapped: the system refuses, which changes nothing
        let none: [usize; 0] = [];
        assert_eq!(requested(base, PAGE - 1), none);
        assert_eq!(requested(base, 2 * PAGE + 5), [base, base + PAGE]);
        assert_eq!(requested(base + 64, 2 * PAGE), [base + PAGE]);
        assert_eq!(requested(base + 64, PAGE), none);
        assert_eq!(requested(usize::MAX - 1, PAGE), none);
    }
}
