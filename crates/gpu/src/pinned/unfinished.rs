//! Blocks of buffers that were dropped before the host observed the end of their copies.
//!
//! The drop of a buffer calls this, and the pool's calls that need or release memory. Such a block
//! stays live in the arena, so that the arena neither reuses it nor frees or closes its segment.
//! The block is pending while its event is not known to be complete, and is then freed in the
//! arena. If the event cannot be queried, or there is none, the block is quarantined: it is never
//! freed, and its segment stays until the process ends.
//!
//! The list has at most one entry per live block. Events are queried with no lock held.
//!
//! Invariant: `pending + quarantined <= live bytes of the arena`.

use super::pool::PoolShared;
use crate::driver::{DeviceAddress, DriverError};
use crate::exec::handles::DriverEvent;
use crate::types::error::is_captures;
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::lock;

/// The blocks of a pool that a device may still use although their buffers are dropped.
#[derive(Debug, Default)]
pub(super) struct UnfinishedBlocks {
    /// Pending blocks, except those whose events are being queried.
    waiting: Vec<WaitingBlock>,
    pub(super) pending: ByteSize,
    pub(super) quarantined: ByteSize,
}

/// A block that a copy uses until an event is complete.
#[derive(Debug)]
struct WaitingBlock {
    at: DeviceAddress,
    size: ByteSize,
    event: DriverEvent,
}

impl PoolShared {
    /// Frees a block that no copy uses. Does nothing in a forked child.
    pub(super) fn free(&self, at: DeviceAddress) {
        let freed = self.arena.free(at);
        debug_assert!(freed.is_ok() || self.check_here().is_err(), "{at} is live: {freed:?}");
    }

    /// Frees a block once its copy is complete. Does nothing in a forked child.
    pub(super) fn free_after(&self, at: DeviceAddress, event: DriverEvent) {
        let Some(size) = self.size_of(at) else { return };
        let mut blocks = lock(&self.unfinished);
        blocks.pending = blocks.pending.saturating_add(size);
        blocks.waiting.push(WaitingBlock { at, size, event });
    }

    /// Quarantines a block. Does nothing in a forked child.
    pub(super) fn quarantine(&self, at: DeviceAddress) {
        let Some(bytes) = self.size_of(at) else { return };
        let mut blocks = lock(&self.unfinished);
        blocks.quarantined = blocks.quarantined.saturating_add(bytes);
        drop(blocks);
        log!(warn, pool = self.name(), %bytes, "pinned block quarantined");
    }

    /// Frees the pending blocks whose copies are complete, without waiting for any. Returns `true`
    /// if there was one.
    pub(super) fn free_completed(&self) -> bool {
        self.free_completed_by(DriverEvent::is_complete)
    }

    /// Waits for the copies of all pending blocks, and frees the blocks.
    pub(super) fn wait_for_copies(&self) {
        self.free_completed_by(|event| event.wait().map(|()| true));
    }

    fn free_completed_by(
        &self,
        is_complete: impl Fn(&DriverEvent) -> Result<bool, DriverError>,
    ) -> bool {
        let mut waiting = std::mem::take(&mut lock(&self.unfinished).waiting);
        let (mut completed, mut freed, mut lost) = (Vec::new(), ByteSize::ZERO, ByteSize::ZERO);
        waiting.retain(|block| match is_complete(&block.event) {
            Ok(true) => {
                completed.push(block.at);
                freed = freed.saturating_add(block.size);
                false
            }
            Ok(false) => true,
            // The event was not queried, because a stream captures a graph.
            Err(error) if is_captures(&error) => true,
            Err(error) => {
                let (pool, bytes) = (self.name(), block.size);
                log!(warn, pool, %bytes, %error, "pinned block quarantined");
                lost = lost.saturating_add(block.size);
                false
            }
        });
        let mut blocks = lock(&self.unfinished);
        blocks.waiting.append(&mut waiting);
        blocks.pending = blocks.pending.saturating_sub(freed.saturating_add(lost));
        blocks.quarantined = blocks.quarantined.saturating_add(lost);
        drop(blocks);
        completed.iter().for_each(|&at| self.free(at));
        !completed.is_empty()
    }

    /// Returns the size of a live block; `None` in a forked child.
    fn size_of(&self, at: DeviceAddress) -> Option<ByteSize> {
        let block = self.arena.raw_block(at);
        debug_assert!(block.is_ok() || self.check_here().is_err(), "{at} is live: {block:?}");
        block.ok().map(|block| block.size)
    }
}
