//! What the heap holds: jemalloc's statistics in this crate's words.
//!
//! It measures and does nothing about it. A snapshot refreshes jemalloc's statistics (one *epoch*)
//! and reads them; a glance reads what is cheap. Neither allocates.
//!
//! Invariants: `live <= active <= mapped`; `dirty + muzzy <= resident` where the pages were
//! touched and muzzy pages are few; `retained = resident - live`.

use crate::bytes::ByteSize;
use crate::fork::Birth;

use super::error::HostError;
use super::mallctl as ctl;

/// The heap at one instant.
///
/// All amounts are of jemalloc's heap alone: stacks, file maps and the C library's own heap are not
/// in them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapSnapshot {
    /// Bytes of blocks now held by the application, after rounding: jemalloc's `stats.allocated`
    /// less what lies in thread caches.
    pub live: ByteSize,
    /// Pages with at least one live or cached block.
    pub active: ByteSize,
    /// Unused pages that are still backed by memory.
    pub dirty: ByteSize,
    /// Unused pages given back lazily: the kernel takes them when it is short.
    pub muzzy: ByteSize,
    /// jemalloc's own books.
    pub metadata: ByteSize,
    /// Physical pages of the heap: active, dirty and metadata. It may count pages that were never
    /// touched, and does not count muzzy pages.
    pub resident: ByteSize,
    /// Address space in use by blocks and books, backed or not.
    pub mapped: ByteSize,
    /// Address space kept with nothing behind it (jemalloc calls this "retained").
    pub unbacked: ByteSize,
    /// Blocks that threads have freed and keep for themselves; the application does not hold them.
    pub thread_caches: ByteSize,
    /// Arena indices that exist, whether or not an arena has been initialised there.
    pub arenas: u32,
    /// jemalloc's background threads that run now.
    pub background_threads: u32,
}

impl HeapSnapshot {
    /// Memory kept that nothing needs: `resident - live`. The part that can be had back is
    /// [`purgeable`](Self::purgeable) and the thread caches; the rest is partly filled pages and
    /// metadata.
    #[must_use]
    pub const fn retained(&self) -> ByteSize {
        self.resident.saturating_sub(self.live)
    }

    /// What a purge gives back at once: `dirty + muzzy`.
    #[must_use]
    pub const fn purgeable(&self) -> ByteSize {
        self.dirty.saturating_add(self.muzzy)
    }
}

/// What can be known of the heap without refreshing its statistics.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct HeapGlance {
    /// Active pages now, summed without stopping anything: arenas change while they are added up.
    pub active: ByteSize,
    /// Dirty pages at the last epoch.
    pub dirty: ByteSize,
    /// Muzzy pages at the last epoch.
    pub muzzy: ByteSize,
}

/// Reads the heap's statistics.
#[derive(Clone, Copy, Debug)]
pub struct HeapProbe {
    birth: Birth,
    page: ByteSize,
}

/// A reading is begun again when another reader refreshed the statistics half-way, at most so
/// often.
const READINGS_MAX: usize = 4;

impl HeapProbe {
    /// A probe of this process's heap. Also finds every control once, so that later calls only
    /// read.
    ///
    /// # Errors
    /// [`HostError::NoStatistics`] where jemalloc was built without them; [`HostError::Mallctl`]
    /// where it refuses a control.
    pub fn new() -> Result<Self, HostError> {
        if !ctl::CONFIG_STATS.read()? {
            return Err(HostError::NoStatistics);
        }
        let page = ByteSize::of(ctl::ARENAS_PAGE.read()?);
        let probe = Self { birth: Birth::now(), page };
        probe.glance()?;
        probe.snapshot()?;
        Ok(probe)
    }

    /// The heap now. Does not allocate.
    ///
    /// Costs one refresh of jemalloc's statistics, which locks every arena in turn (about 10 us
    /// with one thread, 0.1 ms with 64 threads on 8 arenas, 1.6 ms on 128), and 13 readings of
    /// about 30 ns. All amounts are of one epoch unless another reader keeps refreshing in
    /// between.
    ///
    /// # Errors
    /// [`HostError::Forked`] in a child of the process that made the probe;
    /// [`HostError::Mallctl`] where jemalloc refuses a control.
    pub fn snapshot(&self) -> Result<HeapSnapshot, HostError> {
        self.check_birth()?;
        let mut snapshot = HeapSnapshot::default();
        for _ in 0..READINGS_MAX {
            let epoch = refresh()?;
            snapshot = self.read()?;
            if ctl::EPOCH.read()? == epoch {
                break;
            }
        }
        Ok(snapshot)
    }

    /// What is known without a refresh. Does not allocate; about 0.1 us with few threads.
    ///
    /// # Errors
    /// As [`snapshot`](Self::snapshot).
    pub fn glance(&self) -> Result<HeapGlance, HostError> {
        self.check_birth()?;
        Ok(HeapGlance {
            active: ByteSize::of(ctl::APPROXIMATE_ACTIVE.read()?),
            dirty: self.pages(ctl::STATS_DIRTY_PAGES.read()?),
            muzzy: self.pages(ctl::STATS_MUZZY_PAGES.read()?),
        })
    }

    /// The statistics of the last epoch.
    fn read(&self) -> Result<HeapSnapshot, HostError> {
        let thread_caches = ByteSize::of(ctl::STATS_THREAD_CACHES.read()?);
        Ok(HeapSnapshot {
            live: ByteSize::of(ctl::STATS_ALLOCATED.read()?).saturating_sub(thread_caches),
            active: ByteSize::of(ctl::STATS_ACTIVE.read()?),
            dirty: self.pages(ctl::STATS_DIRTY_PAGES.read()?),
            muzzy: self.pages(ctl::STATS_MUZZY_PAGES.read()?),
            metadata: ByteSize::of(ctl::STATS_METADATA.read()?),
            resident: ByteSize::of(ctl::STATS_RESIDENT.read()?),
            mapped: ByteSize::of(ctl::STATS_MAPPED.read()?),
            unbacked: ByteSize::of(ctl::STATS_UNBACKED.read()?),
            thread_caches,
            arenas: ctl::ARENAS_COUNT.read()?,
            background_threads: u32::try_from(ctl::STATS_THREADS.read()?).unwrap_or(u32::MAX),
        })
    }

    fn pages(&self, count: usize) -> ByteSize {
        self.page.checked_mul(count as u64).unwrap_or(ByteSize::MAX)
    }

    pub(super) fn check_birth(&self) -> Result<(), HostError> {
        if self.birth.is_here() { Ok(()) } else { Err(HostError::Forked) }
    }
}

/// Refreshes the statistics and returns the number of the epoch that began.
pub(super) fn refresh() -> Result<u64, HostError> {
    ctl::EPOCH.exchange(1)
}

/// Pages of the heap that have memory behind them, after a refresh.
#[derive(Clone, Copy, Debug)]
pub(super) struct Backed {
    /// As jemalloc counts them.
    pub(super) resident: ByteSize,
    /// Those which it leaves out of that figure though the kernel has not taken them yet.
    pub(super) muzzy: ByteSize,
}

impl Backed {
    pub(super) fn read() -> Result<Self, HostError> {
        refresh()?;
        let page = ByteSize::of(ctl::ARENAS_PAGE.read()?);
        let muzzy = page.checked_mul(ctl::STATS_MUZZY_PAGES.read()? as u64);
        let resident = ByteSize::of(ctl::STATS_RESIDENT.read()?);
        Ok(Self { resident, muzzy: muzzy.unwrap_or(ByteSize::MAX) })
    }

    /// Both together.
    pub(super) const fn bytes(self) -> ByteSize {
        self.resident.saturating_add(self.muzzy)
    }
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
