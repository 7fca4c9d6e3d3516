//! The items of an exact search, the keys that stand for them, and groups of keys.
//!
//! A key is the offset at which an item is tried, with its rank in the order in the low bits, so
//! keys compare by offset first. `search` places the items; `floors` rules branches out.

/// Bits of a key that are an item's rank.
const RANK_BITS: u32 = 16;

/// The most items that a search has numbers for, and the height below which its keys have room.
pub(super) const ITEMS_MAX: usize = 1 << RANK_BITS;
pub(super) const HEIGHT_MAX: u64 = 1 << (62 - RANK_BITS);

/// An item as the search wants it, by its rank in the order.
#[derive(Clone, Debug)]
pub(super) struct Body {
    pub(super) from: u32,
    pub(super) to: u32,
    pub(super) size: u64,
    pub(super) height: u64,
    pub(super) align: u64,
    pub(super) fixed: Option<u64>,
    /// Its number in the part.
    pub(super) item: u32,
    /// `true` if it has one piece, which begins at its offset.
    pub(super) is_plain: bool,
}

impl Body {
    /// Returns the least distance by which it raises any item above it.
    pub(super) const fn least_lift(&self) -> u64 {
        if self.is_plain { self.height } else { 1 }
    }
}

/// A list of keys on the stack that meet in time, and the sections that they are in.
#[derive(Clone, Copy, Debug)]
pub(super) struct ItemGroup {
    pub(super) start: usize,
    pub(super) end: usize,
    pub(super) from: u32,
    pub(super) to: u32,
}

/// An item's lowest offset, and its rank: keys are in the order in which items may be placed.
pub(super) const fn key(offset: u64, rank: usize) -> u64 {
    offset << RANK_BITS | rank as u64
}

pub(super) const fn offset_of(key: u64) -> u64 {
    key >> RANK_BITS
}

pub(super) const fn rank_of(key: u64) -> usize {
    (key & ((1 << RANK_BITS) - 1)) as usize
}
