//! The blocks that move now, the threads that wait for the end of their moves, and the proof that
//! no work uses live blocks.
//!
//! Invariants: a block that moves is live in the index until its move has ended; `proved` is a
//! count of leases that were all dropped, and whose work the host has seen complete.

use std::collections::BTreeMap;

use crate::index::{ALIGN, BlockId, End};
use crate::state::compact::plan::Hold;
use crate::state::region::Placement;
use crate::state::streams::StreamKey;
use crate::types::Contents;

/// The blocks that a compaction moves now: one batch. Each that its owner has freed meanwhile has its
/// place, and the streams that used it, none if they are unknown.
pub(crate) type MovingBatch = BTreeMap<BlockId, Option<(Placement, Vec<StreamKey>)>>;

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
    pub(super) proved: Option<u64>,
    /// The number of leases granted when it was last queried.
    asked: Option<u64>,
}

impl MoveState {
    /// Returns `true` if this block moves now.
    pub(crate) fn is_moving(&self, id: BlockId) -> bool {
        self.moving.as_ref().is_some_and(|batch| batch.contains_key(&id))
    }

    /// Leaves the freeing of a moving block to the move. Returns `true` if the block is moving.
    pub(crate) fn defer_release(&mut self, placed: Placement, streams: &[StreamKey]) -> bool {
        let batch = self.moving.as_mut();
        let Some(freed) = batch.and_then(|batch| batch.get_mut(&placed.id)) else { return false };
        debug_assert!(freed.is_none(), "only its owner frees a block, once");
        *freed = Some((placed, streams.to_vec()));
        true
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

// Per-block settings: pins, alignments and copies in progress, which restrict moves, and the
// treatment of contents.
//
// Most blocks have no entry: they may move to any multiple of 256 bytes. This module knows no
// region and moves nothing.
//
// Invariant: an entry is not empty, and its block is live.

/// The settings of a block that differs from the default.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PinEntry {
    /// The number of pins.
    pins: u32,
    /// The alignment of its offset.
    align: u64,
    /// `true` if the contents were lost in a move.
    is_lost: bool,
    /// The treatment of the contents during sleep; `None` for the region's.
    contents: Option<Contents>,
    /// `true` if the contents were discarded, and the owner has not asked yet.
    is_discarded: bool,
}

impl PinEntry {
    const NONE: Self =
        Self { pins: 0, align: ALIGN, is_lost: false, contents: None, is_discarded: false };
}

/// The blocks of a region that differ from the default.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    entries: BTreeMap<BlockId, PinEntry>,
    /// The number of entries with a treatment of contents.
    with_contents: usize,
    /// Blocks that an operation has placed but not yet completed: about one per thread.
    busy: Vec<BlockId>,
    /// Blocks that a copy whose end was not observed may still use: none, unless the driver failed.
    pub(crate) copied: Vec<BlockId>,
}

impl Pins {
    /// Pins a block. It does not move until it is unpinned as often as it was pinned.
    pub(crate) fn pin(&mut self, id: BlockId) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_add(1));
    }

    /// Unpins a block. Does nothing if the block was freed.
    pub(crate) fn unpin(&mut self, id: BlockId) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_sub(1));
    }

    /// Keeps a block from moving while an operation continues with it. At most one operation does.
    pub(crate) fn begin_operation(&mut self, id: BlockId) {
        self.busy.push(id);
    }

    /// Ends the operation of a block.
    pub(crate) fn end_operation(&mut self, id: BlockId) {
        if let Some(at) = self.busy.iter().position(|busy| *busy == id) {
            self.busy.swap_remove(at);
        }
    }

    /// Restricts a block to multiples of `align`.
    pub(crate) fn align(&mut self, id: BlockId, align: u64) {
        self.change(id, |entry| entry.align = align.max(ALIGN));
    }

    /// Records that the contents of a block were lost.
    pub(crate) fn lose(&mut self, id: BlockId) {
        self.change(id, |entry| entry.is_lost = true);
    }

    /// Returns the blocks whose contents were lost.
    pub(crate) fn lost(&self) -> impl Iterator<Item = BlockId> {
        self.entries.iter().filter(|(_, entry)| entry.is_lost).map(|(&id, _)| id)
    }

    pub(crate) fn is_lost(&self, id: BlockId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_lost)
    }

    /// Sets the treatment of a block's contents; `None` for the region's.
    pub(crate) fn set_contents(&mut self, id: BlockId, contents: Option<Contents>) {
        self.with_contents -= usize::from(self.contents(id).is_some());
        self.with_contents += usize::from(contents.is_some());
        self.change(id, |entry| entry.contents = contents);
    }

    /// Returns the treatment of a block's contents. One comparison if no block has its own.
    pub(crate) fn contents(&self, id: BlockId) -> Option<Contents> {
        if self.with_contents == 0 {
            return None;
        }
        self.entries.get(&id)?.contents
    }

    /// Records that the contents of a block were discarded.
    pub(crate) fn discard(&mut self, id: BlockId) {
        self.change(id, |entry| entry.is_discarded = true);
    }

    /// Returns `true` if the contents were discarded since the last call.
    pub(crate) fn take_discarded(&mut self, id: BlockId) -> bool {
        let mut is_discarded = false;
        self.change(id, |entry| is_discarded = std::mem::take(&mut entry.is_discarded));
        is_discarded
    }

    /// Removes the settings of a freed block. Two comparisons if no block has any.
    pub(crate) fn forget(&mut self, id: BlockId) {
        if !self.entries.is_empty() {
            let gone = self.entries.remove(&id);
            self.with_contents -= usize::from(gone.is_some_and(|entry| entry.contents.is_some()));
        }
        if !self.copied.is_empty() {
            self.copied.retain(|&copied| copied != id);
        }
    }

    /// Returns if and how a block of this end may move.
    pub(crate) fn hold(&self, id: BlockId, end: End) -> Hold {
        let entry = self.entries.get(&id).copied().unwrap_or(PinEntry::NONE);
        let is_in_use = self.busy.contains(&id) || self.copied.contains(&id);
        if entry.pins > 0 || entry.is_lost || is_in_use {
            return Hold::Stays;
        }
        Hold::Moves { end, align: entry.align }
    }

    /// Checks the invariant.
    ///
    /// # Panics
    /// If the invariant is violated.
    pub(crate) fn validate(&self, is_live: impl Fn(BlockId) -> bool) {
        assert!(self.entries.iter().all(|(&id, &entry)| is_live(id) && entry != PinEntry::NONE));
        let with_contents = self.entries.values().filter(|entry| entry.contents.is_some());
        assert_eq!(self.with_contents, with_contents.count());
        assert!(self.busy.iter().chain(&self.copied).all(|&id| is_live(id)));
    }

    fn change(&mut self, id: BlockId, act: impl FnOnce(&mut PinEntry)) {
        let entry = self.entries.entry(id).or_insert(PinEntry::NONE);
        act(entry);
        if *entry == PinEntry::NONE {
            self.entries.remove(&id);
        }
    }
}
