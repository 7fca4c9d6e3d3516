//! The move of a block in progress, and the threads that wait for its end.
//!
//! Invariant: a block that moves is live in the index until the move has ended.

use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::types::region::Region;

/// The block that moves now.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Moving {
    pub(crate) region: Region,
    pub(crate) id: BlockName,
    /// Set if the owner has freed the block.
    pub(crate) freed: Option<Placement>,
}

/// The state of compactions.
#[derive(Debug, Default)]
pub(crate) struct MoveState {
    /// The block that a compaction moves now.
    pub(crate) moving: Option<Moving>,
    /// The number of threads that wait for a lease until the move has ended.
    pub(crate) entering: u32,
    /// `true` while a compaction is in progress.
    pub(crate) is_compacting: bool,
}

impl MoveState {
    /// Returns `true` if this block moves now.
    pub(crate) fn is_moving(&self, region: Region, id: BlockName) -> bool {
        self.moving.is_some_and(|moving| (moving.region, moving.id) == (region, id))
    }

    /// Leaves the freeing of a moving block to the move. Returns `true` if the block is moving.
    pub(crate) fn defer_release(&mut self, region: Region, placed: Placement) -> bool {
        match &mut self.moving {
            Some(Moving { region: its, id, freed }) if (*its, *id) == (region, placed.id) => {
                debug_assert!(freed.is_none(), "only its owner frees a block, once");
                *freed = Some(placed);
                true
            }
            _ => false,
        }
    }
}
