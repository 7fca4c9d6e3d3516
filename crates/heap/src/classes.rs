//! The heap's slack by size class: how well the pages of each are filled.
//!
//! jemalloc keeps blocks of up to 14 KiB in groups of pages, one size class per group; a group is
//! released only with its last block. The space of its free blocks is slack, which no purge
//! releases. Larger blocks have their own pages and no slack. This module only reads.
//!
//! Invariant: `slack = groups x bytes of a group - blocks x size`; the sum over all classes is
//! `active - live - thread caches` of the same epoch, except for pages that are neither.

use lowtide_core::bytes::ByteSize;

use super::error::HostError;
use super::mallctl as ctl;
use super::stats::{HeapProbe, refresh};

/// The blocks of one size, in all arenas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapSizeClass {
    /// Bytes of a block: requests are rounded up to it.
    pub size: ByteSize,
    /// The number of blocks that the application or a thread cache holds.
    pub blocks: u64,
    /// The number of page groups with such blocks.
    pub groups: u64,
    /// Bytes of a group.
    pub group_bytes: ByteSize,
    /// The number of blocks that fit in a group.
    pub group_blocks: u64,
}

impl HeapSizeClass {
    /// Returns the bytes of free blocks in its groups, including remainders at their ends.
    #[must_use]
    pub fn slack(&self) -> ByteSize {
        let times = |size: ByteSize, count| size.checked_mul(count).unwrap_or(ByteSize::MAX);
        times(self.group_bytes, self.groups).saturating_sub(times(self.size, self.blocks))
    }

    /// Returns the used fraction of the blocks that fit in its groups; 1 without a group.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio of counts below 2^53")]
    pub fn utilisation(&self) -> f64 {
        let room = self.groups.saturating_mul(self.group_blocks);
        if room == 0 { 1.0 } else { self.blocks as f64 / room as f64 }
    }
}

/// Returns the bytes of blocks that the calling thread has allocated since it started, after
/// rounding, and those that it has freed, including those that other threads allocated. The
/// difference between two calls is the work in between. Two reads of about 30 ns, without a refresh
/// of statistics.
///
/// # Errors
/// [`HostError::Mallctl`] if jemalloc refuses.
pub fn thread_totals() -> Result<(u64, u64), HostError> {
    Ok((ctl::THREAD_ALLOCATED.read()?, ctl::THREAD_DEALLOCATED.read()?))
}

impl HeapProbe {
    /// Calls `each` for every size class, smallest first. Does not allocate.
    ///
    /// Refreshes the statistics once, and reads five values for each of about 36 classes, which
    /// adds 6 us: call it on demand or once a minute, not for every scrape.
    ///
    /// # Errors
    /// The errors of [`HeapProbe::snapshot`].
    pub fn each_class(&self, mut each: impl FnMut(HeapSizeClass)) -> Result<(), HostError> {
        self.check_birth()?;
        refresh()?;
        for class in 0..ctl::ARENAS_CLASSES.read()? {
            each(HeapSizeClass {
                size: ByteSize::of(ctl::CLASS_SIZE.read_class(class)?),
                blocks: ctl::STATS_CLASS_BLOCKS.read_class(class)? as u64,
                groups: ctl::STATS_CLASS_GROUPS.read_class(class)? as u64,
                group_bytes: ByteSize::of(ctl::CLASS_GROUP_BYTES.read_class(class)?),
                group_blocks: u64::from(ctl::CLASS_GROUP_BLOCKS.read_class(class)?),
            });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slack_and_utilisation_are_what_they_say() {
        let class = HeapSizeClass {
            size: ByteSize::new(48),
            blocks: 100,
            groups: 2,
            group_bytes: ByteSize::kib(12),
            group_blocks: 256,
        };
        assert_eq!(class.slack(), ByteSize::new(2 * 12 * 1024 - 4800));
        assert!((class.utilisation() - 100.0 / 512.0).abs() < 1e-12);
        let none = HeapSizeClass { blocks: 0, groups: 0, ..class };
        assert_eq!((none.slack(), none.utilisation()), (ByteSize::ZERO, 1.0));
    }
}
