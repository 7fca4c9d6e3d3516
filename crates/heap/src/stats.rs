//! The heap's statistics, in this crate's terms.
//!
//! It only measures. A snapshot refreshes jemalloc's statistics (one *epoch*) and reads them; the
//! active bytes alone need no refresh. Neither allocates. The arena on disk (`spill`) is left out.
//!
//! Invariants: `live <= active <= mapped`; `dirty + muzzy <= resident` if the pages were touched
//! and muzzy pages are few; `retained = resident - live`.

use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;

use super::arenas::stats_of;
use super::error::{HostError, check_birth};
use super::{mallctl as ctl, spill};

/// The heap at one instant.
///
/// All amounts are of jemalloc's heap alone, without stacks, file mappings and the C library's
/// heap.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct HeapSnapshot {
    /// Bytes of blocks that the application holds, after rounding: jemalloc's `stats.allocated`
    /// less thread caches.
    pub live: ByteSize,
    /// Bytes of pages with at least one live or cached block.
    pub active: ByteSize,
    /// Bytes of unused pages that are still backed by memory.
    pub dirty: ByteSize,
    /// Bytes of unused pages released lazily: the kernel reclaims them under pressure.
    pub muzzy: ByteSize,
    /// Bytes of jemalloc's metadata.
    pub metadata: ByteSize,
    /// Bytes of physical pages: active, dirty and metadata. May include pages that were never
    /// touched; does not include muzzy pages.
    pub resident: ByteSize,
    /// Bytes of address space in use by blocks and metadata, backed or not.
    pub mapped: ByteSize,
    /// Bytes of address space kept without memory behind it (jemalloc calls this "retained").
    pub unbacked: ByteSize,
    /// Bytes of blocks that threads have freed and cached; the application does not hold them.
    pub thread_caches: ByteSize,
    /// Bytes on disk for work that spilled ([`spill_into`](super::spill_into)), which are in no other
    /// figure.
    pub spilled: ByteSize,
    /// The number of arena indices that exist, initialised or not.
    pub arenas: u32,
    /// The number of jemalloc's background threads that run now.
    pub background_threads: u32,
}

impl HeapSnapshot {
    /// Returns the unneeded memory: `resident - live`. [`purgeable`](Self::purgeable) and the
    /// thread caches can be released; the rest is partly filled pages and metadata.
    #[must_use]
    pub const fn retained(&self) -> ByteSize {
        self.resident.saturating_sub(self.live)
    }

    /// Returns the most bytes of unused pages that can be resident in a process that cannot release
    /// them ([`release_failure`](super::release_failure)) and has this much anonymous memory:
    /// `min(dirty + muzzy + unbacked, anonymous - active - metadata)`. jemalloc counts pages as
    /// unbacked that the kernel did not take back.
    #[must_use]
    pub const fn unused_of(&self, anonymous: ByteSize) -> ByteSize {
        let unused = self.purgeable().saturating_add(self.unbacked);
        let other = anonymous.saturating_sub(self.active).saturating_sub(self.metadata);
        if unused.get() < other.get() { unused } else { other }
    }

    /// Returns the bytes that a purge releases immediately: `dirty + muzzy`.
    #[must_use]
    pub const fn purgeable(&self) -> ByteSize {
        self.dirty.saturating_add(self.muzzy)
    }
}

/// A reader of the heap's statistics.
#[derive(Clone, Copy, Debug)]
pub struct HeapProbe {
    birth: Birth,
    page: ByteSize,
}

/// A reading is begun again when another reader refreshed the statistics half-way, at most so
/// often.
const READINGS_MAX: usize = 4;

impl HeapProbe {
    /// Creates a probe of this process's heap. Looks up every control once, so that later calls
    /// only read.
    ///
    /// # Errors
    /// [`HostError::NoStatistics`] if jemalloc was built without them; [`HostError::Mallctl`] if it
    /// refuses a control.
    pub fn new() -> Result<Self, HostError> {
        if !ctl::CONFIG_STATS.read()? {
            return Err(HostError::NoStatistics);
        }
        let probe = Self::here()?;
        probe.active()?;
        probe.snapshot()?;
        Ok(probe)
    }

    /// Like [`new`](Self::new), without looking up the controls.
    pub(super) fn here() -> Result<Self, HostError> {
        Ok(Self { birth: Birth::now(), page: ByteSize::of(ctl::ARENAS_PAGE.read()?) })
    }

    /// Returns the heap's current statistics. Does not allocate.
    ///
    /// Costs one refresh of jemalloc's statistics, which locks every arena in turn (about 10 us
    /// with one thread, 0.1 ms with 64 threads on 8 arenas, 1.6 ms on 128), and 13 reads of about
    /// 30 ns. All amounts are of one epoch unless another reader keeps refreshing in between.
    ///
    /// # Errors
    /// [`HostError::Forked`] in a child of the process that created the probe;
    /// [`HostError::Mallctl`] if jemalloc refuses a control.
    pub fn snapshot(&self) -> Result<HeapSnapshot, HostError> {
        check_birth(self.birth)?;
        let mut snapshot = HeapSnapshot::default();
        for _ in 0..READINGS_MAX {
            let epoch = ctl::EPOCH.exchange(1)?;
            snapshot = self.read()?;
            if ctl::EPOCH.read()? == epoch {
                break;
            }
        }
        Ok(snapshot)
    }

    /// Returns the bytes of active pages now, summed without a refresh and without stopping other
    /// threads: arenas change meanwhile. Does not allocate; about 0.1 us with few threads.
    ///
    /// # Errors
    /// The errors of [`snapshot`](Self::snapshot).
    pub fn active(&self) -> Result<ByteSize, HostError> {
        check_birth(self.birth)?;
        let active = ByteSize::of(ctl::APPROXIMATE_ACTIVE.read()?);
        Ok(active.saturating_sub(self.pages(spill::active_pages())))
    }

    /// Calls `each` for every size class, smallest first. Does not allocate.
    ///
    /// Refreshes the statistics once, and reads five values for each of about 36 classes, which
    /// adds 6 us: call it on demand or once a minute, not for every scrape.
    ///
    /// # Errors
    /// The errors of [`HeapProbe::snapshot`].
    pub fn each_class(&self, mut each: impl FnMut(HeapSizeClass)) -> Result<(), HostError> {
        check_birth(self.birth)?;
        ctl::EPOCH.exchange(1)?;
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

    /// The statistics of the last epoch.
    fn read(&self) -> Result<HeapSnapshot, HostError> {
        let (on_disk, unbacked) = spill::arena().map_or_else(Default::default, |arena| {
            let unbacked = ctl::STATS_ARENA_UNBACKED.read_of(arena).map(ByteSize::of);
            (stats_of(arena).unwrap_or_default(), unbacked.unwrap_or_default())
        });
        let pages = on_disk.active.saturating_add(on_disk.dirty);
        let read = |key: &ctl::Key<usize, 2>, less| {
            key.read().map(|found| ByteSize::of(found).saturating_sub(less))
        };
        let thread_caches = ByteSize::of(ctl::STATS_THREAD_CACHES.read()?);
        Ok(HeapSnapshot {
            live: read(&ctl::STATS_ALLOCATED, thread_caches.saturating_add(on_disk.live))?,
            active: read(&ctl::STATS_ACTIVE, on_disk.active)?,
            dirty: self.pages(ctl::STATS_DIRTY_PAGES.read()?).saturating_sub(on_disk.dirty),
            muzzy: self.pages(ctl::STATS_MUZZY_PAGES.read()?),
            metadata: read(&ctl::STATS_METADATA, ByteSize::ZERO)?,
            resident: read(&ctl::STATS_RESIDENT, pages)?,
            mapped: read(&ctl::STATS_MAPPED, pages)?,
            unbacked: read(&ctl::STATS_UNBACKED, unbacked)?,
            thread_caches,
            spilled: spill::spilled().0,
            arenas: ctl::ARENAS_COUNT.read()?,
            background_threads: u32::try_from(ctl::STATS_THREADS.read()?).unwrap_or(u32::MAX),
        })
    }

    fn pages(&self, count: usize) -> ByteSize {
        self.page.checked_mul(count as u64).unwrap_or(ByteSize::MAX)
    }
}

// The heap's slack by size class: how well the pages of each are filled.
//
// jemalloc keeps blocks of up to 14 KiB in groups of pages, one size class per group; a group is
// released only with its last block. The space of its free blocks is slack, which no purge
// releases. Larger blocks have their own pages and no slack. This module only reads.
//
// Invariant: `slack = groups x bytes of a group - blocks x size`; the sum over all classes is
// `active - live - thread caches` of the same epoch, except for pages that are neither.

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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn retained_and_purgeable_are_what_the_glossary_says() {
        let snapshot = HeapSnapshot {
            live: ByteSize::mib(66),
            resident: ByteSize::mib(126),
            dirty: ByteSize::mib(20),
            muzzy: ByteSize::mib(3),
            ..HeapSnapshot::default()
        };
        assert_eq!(snapshot.retained(), ByteSize::mib(60));
        assert_eq!(snapshot.purgeable(), ByteSize::mib(23));
        let more_live = HeapSnapshot { live: ByteSize::mib(127), ..snapshot };
        assert_eq!(more_live.retained(), ByteSize::ZERO);
    }

    #[test]
    fn a_probe_can_be_shared_between_threads() {
        fn shared<T: Send + Sync>(_: &T) {}
        shared(&HeapProbe::new().unwrap());
    }
}

#[cfg(test)]
mod classes_tests {
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
