//! Figures of the state that are read without its lock.
//!
//! The executor stores changed figures before it releases the lock, so that a thread that takes the
//! lock later sees them. A release without a change costs a comparison for each figure.

use crate::state::arena::ArenaState;
use crate::types::region::Region;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};

/// Copies of figures of the state.
#[derive(Debug)]
pub(crate) struct Published {
    /// The number of moved or lost blocks of each region.
    moves: [AtomicU64; 2],
}

impl Published {
    pub(super) fn new() -> Self {
        Self { moves: [AtomicU64::new(0), AtomicU64::new(0)] }
    }

    /// Returns the number of moved or lost blocks of a region.
    #[inline]
    pub(crate) fn moves(&self, region: Region) -> u64 {
        self.moves[region.number()].load(Ordering::Relaxed)
    }

    /// Stores the figures that have changed. Called with the lock held.
    #[inline]
    pub(super) fn update(&self, state: &ArenaState) {
        for region in Region::ALL {
            let (published, moves) = (&self.moves[region.number()], state.region(region).moves());
            // Read first: a cache line that all threads write would slow down its readers.
            if published.load(Ordering::Relaxed) != moves {
                published.store(moves, Ordering::Relaxed);
            }
        }
    }
}
