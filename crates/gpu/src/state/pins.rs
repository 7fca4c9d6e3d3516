//! Per-block restrictions of moves: pins, and alignments.
//!
//! Most blocks have no entry: they may move to any multiple of 256 bytes. It knows no region and
//! moves nothing.
//!
//! Invariant: an entry is not empty, and its block is live.

use std::collections::BTreeMap;

use crate::index::{ALIGN, End};
use crate::state::compact::plan::Hold;
use crate::state::ranges::BlockName;
use crate::types::sleep::Contents;

/// A block that is not like the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct PinEntry {
    /// The number of pins.
    pins: u32,
    /// The alignment of its offset.
    align: u64,
    /// Its contents were lost in a move.
    is_lost: bool,
    /// The treatment of its contents during sleep, if not the region's.
    contents: Option<Contents>,
    /// `true` if they were discarded, and the owner has not asked yet.
    is_discarded: bool,
}

impl PinEntry {
    const NONE: Self =
        Self { pins: 0, align: ALIGN, is_lost: false, contents: None, is_discarded: false };
}

/// The blocks of a region that are not like the others.
#[derive(Debug, Default)]
pub(crate) struct Pins {
    entries: BTreeMap<BlockName, PinEntry>,
    /// Blocks that an operation has placed and not completed: about one for each thread.
    busy: Vec<BlockName>,
}

impl Pins {
    /// A block stays until it is unpinned as often.
    pub(crate) fn pin(&mut self, id: BlockName) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_add(1));
    }

    /// Does nothing if the block is freed.
    pub(crate) fn unpin(&mut self, id: BlockName) {
        if self.entries.contains_key(&id) {
            self.change(id, |entry| entry.pins = entry.pins.saturating_sub(1));
        }
    }

    /// A block stays while an operation goes on with it; at most one does.
    pub(crate) fn begin_operation(&mut self, id: BlockName) {
        self.busy.push(id);
    }

    /// The operation has ended.
    pub(crate) fn end_operation(&mut self, id: BlockName) {
        if let Some(at) = self.busy.iter().position(|busy| *busy == id) {
            self.busy.swap_remove(at);
        }
    }

    /// A block may move to multiples of `align` only.
    pub(crate) fn align(&mut self, id: BlockName, align: u64) {
        self.change(id, |entry| entry.align = align.max(ALIGN));
    }

    /// The contents of a block were lost.
    pub(crate) fn lose(&mut self, id: BlockName) {
        self.change(id, |entry| entry.is_lost = true);
    }

    pub(crate) fn is_lost(&self, id: BlockName) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_lost)
    }

    /// Sets the treatment of a block's contents; `None` for the region's.
    pub(crate) fn set_contents(&mut self, id: BlockName, contents: Option<Contents>) {
        self.change(id, |entry| entry.contents = contents);
    }

    pub(crate) fn contents(&self, id: BlockName) -> Option<Contents> {
        self.entries.get(&id)?.contents
    }

    /// The contents of a block were discarded.
    pub(crate) fn discard(&mut self, id: BlockName) {
        self.change(id, |entry| entry.is_discarded = true);
    }

    /// Returns `true` if they were discarded since the last call.
    pub(crate) fn take_discarded(&mut self, id: BlockName) -> bool {
        let is_discarded = self.entries.get(&id).is_some_and(|entry| entry.is_discarded);
        if is_discarded {
            self.change(id, |entry| entry.is_discarded = false);
        }
        is_discarded
    }

    /// Removes the entry of a freed block. One comparison if no block has an entry.
    pub(crate) fn forget(&mut self, id: BlockName) {
        if !self.entries.is_empty() {
            self.entries.remove(&id);
        }
    }

    /// Returns the hold of a block that belongs to this end.
    pub(crate) fn hold(&self, id: BlockName, end: End) -> Hold {
        let entry = self.entries.get(&id).copied().unwrap_or(PinEntry::NONE);
        if entry.pins > 0 || entry.is_lost || self.busy.contains(&id) {
            return Hold::Stays;
        }
        Hold::Moves { end, align: entry.align }
    }

    /// Checks the invariant.
    ///
    /// # Panics
    /// If it is violated.
    pub(crate) fn validate(&self, is_live: impl Fn(BlockName) -> bool) {
        assert!(self.entries.iter().all(|(&id, &entry)| is_live(id) && entry != PinEntry::NONE));
        assert!(self.busy.iter().all(|&id| is_live(id)));
    }

    fn change(&mut self, id: BlockName, act: impl FnOnce(&mut PinEntry)) {
        let entry = self.entries.entry(id).or_insert(PinEntry::NONE);
        act(entry);
        if *entry == PinEntry::NONE {
            self.entries.remove(&id);
        }
    }
}
