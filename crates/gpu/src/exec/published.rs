//! Figures of the state that are read without its lock.
//!
//! An operation that changes one of them sets `ArenaState::is_unpublished`; the executor stores the
//! new figures before it releases the lock. A thread that takes the lock later sees them. A release
//! without a change costs one comparison.

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

    /// Stores the figures, if they have changed. Called with the lock held.
    #[inline]
    pub(super) fn update(&self, state: &mut ArenaState) {
        if state.is_unpublished {
            self.store(state);
        }
    }

    #[cold]
    fn store(&self, state: &mut ArenaState) {
        state.is_unpublished = false;
        for region in Region::ALL {
            self.moves[region.number()].store(state.region(region).moves(), Ordering::Relaxed);
        }
    }
}
