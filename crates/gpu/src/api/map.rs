//! Maps of an arena: all blocks and granules, or a summary in cells.
//!
//! [`observe::map`](crate::observe::map) and [`observe::occupancy`](crate::observe::occupancy)
//! compute the maps from the state.

use crate::api::arena::DeviceArena;
use crate::observe::map::{ArenaMap, segments};
use crate::observe::occupancy::{ArenaOccupancy, region_cells};
use crate::types::region::Region;
use lowtide_core::bytes::ByteSize;

impl DeviceArena {
    /// Returns a map of all blocks and granules; empty in a forked child.
    ///
    /// Copies the metadata under the lock: time and memory grow with the number of blocks and
    /// granules. Thread caches are flushed first; blocks that other threads cache meanwhile show as
    /// live.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// let config = ArenaConfig::new("embedder");
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let activations = arena.alloc::<f32>(1 << 20, Region::Dynamic)?;
    /// let map = arena.map();
    /// assert_eq!(map.segments[1].blocks.len(), 1);
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn map(&self) -> ArenaMap {
        let inner = self.inner();
        if inner.check_here().is_err() {
            return ArenaMap::default();
        }
        inner.empty_caches();
        inner.run_now(|state| ArenaMap {
            granularity: ByteSize::new(state.bytes_of(1)),
            segments: Region::ALL.iter().flat_map(|&region| segments(state, region)).collect(),
        })
    }

    /// Returns the current usage, each region in at most `cells_max` cells (at least 2).
    ///
    /// Walks all blocks under the lock, a few ns each if the arena is awake, and allocates the
    /// cells and an entry for each run of committed granules. Empty in a forked child.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let config = ArenaConfig::new("embedder");
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let activations = arena.alloc::<u8>(1 << 20, Region::Dynamic)?;
    /// let occupancy = arena.occupancy(64);
    /// let live: u64 = occupancy.regions[1].occupancy.iter().map(|cell| cell.live.get()).sum();
    /// assert_eq!((occupancy.regions[1].blocks, live), (1, 1 << 20));
    /// # drop(activations);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    #[must_use]
    pub fn occupancy(&self, cells_max: usize) -> ArenaOccupancy {
        let occupancy = self.inner().run_here(|state| {
            let of = |&region: &Region| region_cells(state, region, cells_max);
            let regions = Region::ALL.iter().map(of).collect();
            ArenaOccupancy { granularity: ByteSize::new(state.bytes_of(1)), regions }
        });
        occupancy.unwrap_or_default()
    }
}
