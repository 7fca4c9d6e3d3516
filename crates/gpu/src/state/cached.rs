//! Blocks in the caches of threads and lanes, as the state sees them: live, and counted by the
//! caches.
//!
//! The caches count their allocations and frees without the state's lock. A snapshot adds the
//! counts, and the state takes them over when a cache is dropped.

use crate::state::region::Placement;
use crate::state::streams::StreamKey;
use crate::types::region::Region;

/// A block of a region.
pub(crate) type Kept = (Region, Placement);

/// A block that was taken out of a cache, and the stream of the cache's lane, if it has one.
pub(crate) type Swept = (Kept, Option<StreamKey>);

/// The counts of a cache since the arena was opened.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct CacheCounts {
    /// The numbers of blocks handed out and put in. Blocks that later went from the cache to the
    /// arena do not count.
    pub(crate) allocs: u64,
    pub(crate) frees: u64,
    /// The bytes in the cache now, by region.
    pub(crate) cached: [u64; 2],
    /// The requested bytes of blocks handed out minus those of blocks put in, by region. Wraps.
    pub(crate) requested: [u64; 2],
}

impl CacheCounts {
    pub(crate) fn add(&mut self, other: Self) {
        self.allocs += other.allocs;
        self.frees += other.frees;
        for region in Region::ALL.map(Region::number) {
            self.cached[region] += other.cached[region];
            let requested = &mut self.requested[region];
            *requested = requested.wrapping_add(other.requested[region]);
        }
    }

    /// Returns the bytes in the cache.
    #[inline]
    pub(crate) fn cached(&self) -> u64 {
        self.cached.iter().sum()
    }

    /// Counts a block that was handed out.
    #[inline]
    pub(crate) fn went(&mut self, region: Region, size: u64, requested: u64) {
        self.cached[region.number()] -= size;
        let sum = &mut self.requested[region.number()];
        *sum = sum.wrapping_add(requested);
    }

    /// Counts a block that was put in.
    #[inline]
    pub(crate) fn came(&mut self, region: Region, placed: &Placement) {
        self.cached[region.number()] += placed.span.size;
        let sum = &mut self.requested[region.number()];
        *sum = sum.wrapping_sub(placed.requested);
    }
}
