//! Where the heap's slack sits: how well the pages of each size class are filled.
//!
//! jemalloc has small blocks, to 14 KiB, in groups of pages, each for one size class; a group goes
//! back only when its last block does. What its free blocks take is slack, and no purge has it.
//! Larger blocks have pages of their own and no slack. It reads and changes nothing.
//!
//! Invariant: `slack = groups x bytes of a group - blocks x size`, and the sum over all classes is
//! `active - live - thread caches` of the same epoch, but for pages that are neither.

use crate::bytes::ByteSize;

use super::error::HostError;
use super::mallctl as ctl;
use super::stats::{HeapProbe, refresh};

/// The blocks of one size, in all arenas.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct SizeClass {
    /// Bytes of a block: requests are rounded up to it.
    pub size: ByteSize,
    /// Blocks that the application or a thread's cache has.
    pub blocks: u64,
    /// Groups of pages with such blocks.
    pub groups: u64,
    /// Bytes of a group.
    pub group_bytes: ByteSize,
    /// Blocks for which a group has room.
    pub group_blocks: u64,
}

impl SizeClass {
    /// What free blocks in its groups take, and what is left over at their ends.
    #[must_use]
    pub fn slack(&self) -> ByteSize {
        let times = |size: ByteSize, count| size.checked_mul(count).unwrap_or(ByteSize::MAX);
        times(self.group_bytes, self.groups).saturating_sub(times(self.size, self.blocks))
    }

    /// How many of the blocks for which there is room are there; 1 where there is no group.
    #[must_use]
    #[expect(clippy::cast_precision_loss, reason = "a ratio of counts below 2^53")]
    pub fn utilisation(&self) -> f64 {
        let room = self.groups.saturating_mul(self.group_blocks);
        if room == 0 { 1.0 } else { self.blocks as f64 / room as f64 }
    }
}

/// What the calling thread has allocated and freed since it started.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ThreadTotals {
    /// Bytes of blocks that it had, after rounding.
    pub allocated: u64,
    /// Bytes of blocks that it freed, whoever had had them.
    pub deallocated: u64,
}

/// The calling thread's totals: two reads of some 30 ns, and no refresh. What a piece of work
/// allocates on its own thread is the difference of two.
///
/// # Errors
/// [`HostError::Mallctl`].
pub fn thread_totals() -> Result<ThreadTotals, HostError> {
    Ok(ThreadTotals {
        allocated: ctl::THREAD_ALLOCATED.read()?,
        deallocated: ctl::THREAD_DEALLOCATED.read()?,
    })
}

impl HeapProbe {
    /// Calls `each` for every size class, the smallest first. One refresh of the statistics and
    /// five reads for each of some 36 classes, 6 us besides the refresh: for a look, or once a
    /// minute, not for every scrape. Does not allocate.
    ///
    /// # Errors
    /// As [`HeapProbe::snapshot`].
    pub fn each_class(&self, mut each: impl FnMut(SizeClass)) -> Result<(), HostError> {
        self.check_birth()?;
        refresh()?;
        for class in 0..ctl::ARENAS_CLASSES.read()? {
            each(SizeClass {
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
        let class = SizeClass {
            size: ByteSize::new(48),
            blocks: 100,
            groups: 2,
            group_bytes: ByteSize::kib(12),
            group_blocks: 256,
        };
        assert_eq!(class.slack(), ByteSize::new(2 * 12 * 1024 - 4800));
        assert!((class.utilisation() - 100.0 / 512.0).abs() < 1e-12);
        let none = SizeClass { blocks: 0, groups: 0, ..class };
        assert_eq!((none.slack(), none.utilisation()), (ByteSize::ZERO, 1.0));
    }
}
