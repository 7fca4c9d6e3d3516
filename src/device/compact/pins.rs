//! What is known of single blocks that keeps them where they are, or to what they must stay.
//!
//! Most blocks have no entry: they may move to any multiple of 256 bytes. It knows no region and
//! moves nothing.
//!
//! Invariant: an entry says something, and its block is live.

use std::collections::BTreeMap;

use super::plan::Hold;
use crate::device::index::{ALIGN, End};
use crate::device::ranges::BlockName;
use crate::device::sleep::contents::Contents;

/// A block that is not like the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// How many want it to stay.
    pins: u32,
    /// What its offset must be a multiple of.
    align: u64,
    /// Its contents were lost in a move.
    is_lost: bool,
    /// What becomes of its contents when the arena sleeps, where that is not as usual.
    contents: Option<Contents>,
    /// They were discarded, and its owner has not asked yet.
    is_discarded: bool,
}

impl Entry {
    const NONE: Self =
        Self { pins: 0, align: ALIGN, is_lost: false, contents: None, is_discarded: false };
}

/// The blocks of a region that are not like the others.
#[derive(Debug, Default)]
pub(in crate::device) struct Pins {
    entries: BTreeMap<BlockName, Entry>,
}

impl Pins {
    /// A block stays until it is unpinned as often.
    pub(in crate::device) fn pin(&mut self, id: BlockName) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_add(1));
    }

    /// Nothing where the block is gone.
    pub(in crate::device) fn unpin(&mut self, id: BlockName) {
        if self.entries.contains_key(&id) {
            self.change(id, |entry| entry.pins = entry.pins.saturating_sub(1));
        }
    }

    /// A block may move to multiples of `align` only.
    pub(in crate::device) fn align(&mut self, id: BlockName, align: u64) {
        self.change(id, |entry| entry.align = align.max(ALIGN));
    }

    /// The contents of a block were lost.
    pub(in crate::device) fn lose(&mut self, id: BlockName) {
        self.change(id, |entry| entry.is_lost = true);
    }

    pub(in crate::device) fn is_lost(&self, id: BlockName) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_lost)
    }

    /// Says what becomes of the contents of a block; `None` for as usual.
    pub(in crate::device) fn set_contents(&mut self, id: BlockName, contents: Option<Contents>) {
        self.change(id, |entry| entry.contents = contents);
    }

    pub(in crate::device) fn contents(&self, id: BlockName) -> Option<Contents> {
        self.entries.get(&id)?.contents
    }

    /// The contents of a block were discarded.
    pub(in crate::device) fn discard(&mut self, id: BlockName) {
        self.change(id, |entry| entry.is_discarded = true);
    }

    /// Whether they were since this was last asked.
    pub(in crate::device) fn take_discarded(&mut self, id: BlockName) -> bool {
        let is_discarded = self.entries.get(&id).is_some_and(|entry| entry.is_discarded);
        if is_discarded {
            self.change(id, |entry| entry.is_discarded = false);
        }
        is_discarded
    }

    /// The block is gone. A comparison where no block has an entry.
    pub(in crate::device) fn forget(&mut self, id: BlockName) {
        if !self.entries.is_empty() {
            self.entries.remove(&id);
        }
    }

    /// What holds a block that belongs to this end.
    pub(in crate::device) fn hold(&self, id: BlockName, end: End) -> Hold {
        let entry = self.entries.get(&id).copied().unwrap_or(Entry::NONE);
        if entry.pins > 0 || entry.is_lost {
            return Hold::Stays;
        }
        Hold::Moves { end, align: entry.align }
    }

    /// Checks the invariant.
    ///
    /// # Panics
    /// Where it is broken.
    pub(in crate::device) fn validate(&self, is_live: impl Fn(BlockName) -> bool) {
        assert!(self.entries.iter().all(|(&id, &entry)| is_live(id) && entry != Entry::NONE));
    }

    fn change(&mut self, id: BlockName, act: impl FnOnce(&mut Entry)) {
        let entry = self.entries.entry(id).or_insert(Entry::NONE);
        act(entry);
        if *entry == Entry::NONE {
            self.entries.remove(&id);
        }
    }
}
