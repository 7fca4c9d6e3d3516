//! What is known of single blocks that keeps them where they are, or to what they must stay.
//!
//! Most blocks have no entry: they may move to any multiple of 256 bytes. It knows no region and
//! moves nothing.
//!
//! Invariant: an entry says something, and its block is live.

use std::collections::BTreeMap;

use super::plan::Hold;
use crate::device::index::{ALIGN, BlockId, End};

/// A block that is not like the others.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    /// How many want it to stay.
    pins: u32,
    /// What its offset must be a multiple of.
    align: u64,
    /// Its contents were lost in a move.
    is_lost: bool,
}

impl Entry {
    const NONE: Self = Self { pins: 0, align: ALIGN, is_lost: false };
}

/// The blocks of a region that are not like the others.
#[derive(Debug, Default)]
pub(in crate::device) struct Pins {
    entries: BTreeMap<BlockId, Entry>,
}

impl Pins {
    /// A block stays until it is unpinned as often.
    pub(in crate::device) fn pin(&mut self, id: BlockId) {
        self.change(id, |entry| entry.pins = entry.pins.saturating_add(1));
    }

    /// Nothing where the block is gone.
    pub(in crate::device) fn unpin(&mut self, id: BlockId) {
        if self.entries.contains_key(&id) {
            self.change(id, |entry| entry.pins = entry.pins.saturating_sub(1));
        }
    }

    /// A block may move to multiples of `align` only.
    pub(in crate::device) fn align(&mut self, id: BlockId, align: u64) {
        self.change(id, |entry| entry.align = align.max(ALIGN));
    }

    /// The contents of a block were lost.
    pub(in crate::device) fn lose(&mut self, id: BlockId) {
        self.change(id, |entry| entry.is_lost = true);
    }

    pub(in crate::device) fn is_lost(&self, id: BlockId) -> bool {
        self.entries.get(&id).is_some_and(|entry| entry.is_lost)
    }

    /// The block is gone. A comparison where no block has an entry.
    pub(in crate::device) fn forget(&mut self, id: BlockId) {
        if !self.entries.is_empty() {
            self.entries.remove(&id);
        }
    }

    /// What holds a block that belongs to this end.
    pub(in crate::device) fn hold(&self, id: BlockId, end: End) -> Hold {
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
    pub(in crate::device) fn validate(&self, is_live: impl Fn(BlockId) -> bool) {
        assert!(self.entries.iter().all(|(&id, &entry)| is_live(id) && entry != Entry::NONE));
    }

    fn change(&mut self, id: BlockId, act: impl FnOnce(&mut Entry)) {
        let entry = self.entries.entry(id).or_insert(Entry::NONE);
        act(entry);
        if *entry == Entry::NONE {
            self.entries.remove(&id);
        }
    }
}
