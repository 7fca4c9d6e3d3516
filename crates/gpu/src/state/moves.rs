//! The blocks that move now, the threads that wait for the end of their moves, and the proof that
//! no work uses live blocks.
//!
//! Invariants: a block that moves is live in the index until its move has ended; `proved` is a
//! count of leases that were all dropped, and whose work the host has seen complete.

use std::collections::BTreeMap;

use crate::state::region::Placement;
use crate::state::region_index::BlockName;
use crate::state::streams::StreamKey;
use crate::types::region::Region;

/// The blocks that a compaction moves now: one batch.
#[derive(Debug)]
pub(crate) struct MovingBatch {
    region: Region,
    /// The blocks, and what the owner has freed meanwhile.
    blocks: BTreeMap<BlockName, Option<DeferredRelease>>,
}

/// The release of a block that its owner has freed while it moved.
#[derive(Clone, Debug)]
pub(crate) struct DeferredRelease {
    pub(crate) placed: Placement,
    /// The streams that used the block; none if they are unknown.
    pub(crate) streams: Vec<StreamKey>,
}

impl MovingBatch {
    pub(crate) fn new(region: Region, blocks: impl Iterator<Item = BlockName>) -> Self {
        Self { region, blocks: blocks.map(|id| (id, None)).collect() }
    }

    /// Returns `true` if a block of the region is in the batch.
    pub(crate) fn contains(&self, region: Region, id: BlockName) -> bool {
        self.region == region && self.blocks.contains_key(&id)
    }

    /// Returns the blocks, and the release of each that its owner has freed meanwhile.
    pub(crate) fn into_blocks(self) -> impl Iterator<Item = (BlockName, Option<DeferredRelease>)> {
        self.blocks.into_iter()
    }

    /// Returns the release of a block that its owner has freed meanwhile.
    pub(crate) fn freed(&self, id: BlockName) -> Option<DeferredRelease> {
        self.blocks.get(&id).cloned().flatten()
    }
}

/// The state of compactions.
#[derive(Debug, Default)]
pub(crate) struct MoveState {
    /// The batch that a compaction moves now.
    pub(crate) moving: Option<MovingBatch>,
    /// The number of threads that wait for a lease until the batch has ended.
    pub(crate) entering: u32,
    /// `true` while a compaction is in progress.
    pub(crate) is_compacting: bool,
    /// The number of leases ever granted.
    pub(crate) leases_total: u64,
    /// The number of leases granted when all work under leases was last known to be complete.
    proved: Option<u64>,
    /// The number of leases granted when it was last queried.
    asked: Option<u64>,
}

impl MoveState {
    /// Returns `true` if this block moves now.
    pub(crate) fn is_moving(&self, region: Region, id: BlockName) -> bool {
        self.moving.as_ref().is_some_and(|batch| batch.contains(region, id))
    }

    /// Leaves the freeing of a moving block to the move. Returns `true` if the block is moving.
    pub(crate) fn defer_release(
        &mut self,
        region: Region,
        placed: Placement,
        streams: &[StreamKey],
    ) -> bool {
        let batch = self.moving.as_mut().filter(|batch| batch.region == region);
        let Some(freed) = batch.and_then(|batch| batch.blocks.get_mut(&placed.id)) else {
            return false;
        };
        debug_assert!(freed.is_none(), "only its owner frees a block, once");
        *freed = Some(DeferredRelease { placed, streams: streams.to_vec() });
        true
    }

    /// Records that the work under all leases until now is complete. No lease is held.
    pub(crate) const fn prove_all(&mut self) {
        self.proved = Some(self.leases_total);
    }

    /// Records a query after this many leases. Returns `true` if it was made before.
    pub(crate) fn is_asked(&mut self, leases: Option<u64>) -> bool {
        let asked = std::mem::replace(&mut self.asked, leases);
        leases.is_some() && asked == leases
    }

    /// Returns `true` if the work under all leases until now is known to be complete.
    pub(crate) fn is_proved(&self) -> bool {
        self.proved == Some(self.leases_total)
    }
}
