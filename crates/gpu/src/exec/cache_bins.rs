//! The blocks of one thread cache, by size, for hot sizes. Plain values, protected by the cache's
//! lock.
//!
//! A size is hot if it was requested [`HOT`] times recently. Each check cools all sizes, and each
//! request for an unknown size cools one.
//!
//! The blocks of a size are a list through their handles, so they need no limit of their own: a
//! cache is bounded by bytes and by [`BLOCKS_MAX`], and each check takes out the blocks that were
//! not needed since the last one.
//!
//! Invariants: `cached = sum of its blocks`; a block that was handed out is not in the cache.

use std::mem::ManuallyDrop;

use crate::exec::thread_cache::BlockHandle;
use crate::state::region::CacheCounts;
use crate::types::Region;

/// The number of requests for a size, reduced when the size cools.
type UseCount = u8;

/// The number of requests for a size since it last cooled, from which on the size is hot. A guess:
/// two may be a coincidence, so twice as many.
const HOT: UseCount = 4;

/// The maximum uses of a size: the size is cold at the second check after its last use.
const USES_MAX: UseCount = 4 * HOT - 1;

/// The maximum number of blocks in a cache: twice the 512 that cuArena's benchmark has live, and
/// 256 KiB of handles and index records. A cache holds no more blocks of a size than were live at a
/// time, because each returns to the cache that it was taken from.
const BLOCKS_MAX: usize = 1024;

/// The number of sizes in a cache, in sets of [`WAYS`]. A guess: twice the sizes of a forward pass.
const SETS: usize = 16;
const WAYS: usize = 4;

/// The key of a block size in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheKey(u64);

impl CacheKey {
    /// The key of no block.
    const NONE: Self = Self(0);

    /// Creates the key for blocks of this size, a positive multiple of 256 bytes, in this region.
    #[inline]
    pub(crate) const fn new(region: Region, size: u64) -> Self {
        Self(size | region.number() as u64)
    }

    /// Returns the index of the first way of the key's set.
    #[inline]
    fn ways(self) -> usize {
        // Fibonacci hashing: the top bits of the product select the set.
        let hash =
            self.0.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - SETS.trailing_zeros());
        usize::try_from(hash).unwrap_or(0) * WAYS
    }
}

/// Blocks in a list through their handles, the last added first.
#[derive(Default)]
pub(crate) struct BlockList {
    last: Option<Box<BlockHandle>>,
    len: u32,
}

impl BlockList {
    const EMPTY: Self = Self { last: None, len: 0 };

    pub(crate) const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    #[inline]
    pub(crate) fn push(&mut self, mut owned: Box<BlockHandle>) {
        debug_assert!(owned.next.is_none(), "a block is in one list");
        // Not assigned, which would check if there is a block to drop.
        std::mem::swap(&mut owned.next, &mut self.last);
        let _none = ManuallyDrop::new(self.last.replace(owned));
        self.len += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Box<BlockHandle>> {
        let mut owned = self.last.take()?;
        self.last = owned.next.take();
        self.len -= 1;
        Some(owned)
    }

    /// Takes out the blocks that were added first, all but this many. A step for each that stays.
    fn split_off(&mut self, keep: u32) -> Self {
        let mut end = &mut self.last;
        for _ in 0..keep {
            let Some(owned) = end else { return Self::EMPTY };
            end = &mut owned.next;
        }
        let (last, len) = (end.take(), self.len - keep);
        self.len = keep;
        Self { last, len }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &BlockHandle> {
        std::iter::successors(self.last.as_deref(), |owned| owned.next.as_deref())
    }
}

impl Drop for BlockList {
    /// Drops one handle after the other: a handle that dropped the next would overflow the stack.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// The blocks of one size.
struct CacheClass {
    key: CacheKey,
    uses: UseCount,
    /// The smallest number of blocks since the last check: that many were not needed.
    least: u32,
    blocks: BlockList,
}

impl CacheClass {
    const VACANT: Self = Self { key: CacheKey::NONE, uses: 0, least: 0, blocks: BlockList::EMPTY };
}

/// The blocks in the cache of one shard.
#[derive(Default)]
pub(crate) struct ThreadCache {
    /// Empty until the first request, then `SETS x WAYS`.
    classes: Vec<CacheClass>,
    /// The number of blocks.
    kept: usize,
    pub(crate) tally: CacheCounts,
}

impl ThreadCache {
    /// Returns the entry of a size. If the size has no entry, cools the coldest of the set without
    /// blocks, and replaces it if it is cold.
    #[inline]
    fn claim(&mut self, key: CacheKey) -> Option<&mut CacheClass> {
        if self.classes.is_empty() {
            self.classes.extend((0..SETS * WAYS).map(|_| CacheClass::VACANT));
        }
        let set = key.ways();
        let ways = &mut self.classes[set..set + WAYS];
        if let Some(way) = ways.iter().position(|class| class.key == key) {
            return Some(&mut ways[way]);
        }
        // Each miss cools the coldest, so that a size which was requested once does not stay.
        let coldest = ways
            .iter_mut()
            .filter(|class| class.blocks.is_empty())
            .min_by_key(|class| class.uses)?;
        coldest.uses = coldest.uses.saturating_sub(1);
        if coldest.uses > 0 {
            return None;
        }
        *coldest = CacheClass { key, ..CacheClass::VACANT };
        Some(coldest)
    }

    #[inline]
    pub(crate) fn take(&mut self, key: CacheKey, requested: u64) -> Option<Box<BlockHandle>> {
        let class = self.claim(key)?;
        class.uses = USES_MAX.min(class.uses + 1);
        let mut owned = class.blocks.pop()?;
        class.least = class.least.min(class.blocks.len);
        self.kept -= 1;
        self.tally.allocs += 1;
        if let Some(placed) = &mut owned.block {
            placed.requested = requested;
            self.tally.went(owned.region, placed.span.size, requested);
        }
        Some(owned)
    }

    /// Keeps a freed block; returns the block if the arena must free it.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        owned: Box<BlockHandle>,
        room: u64,
    ) -> Result<(), Box<BlockHandle>> {
        let Some(placed) = &owned.block else { return Err(owned) };
        if self.kept >= BLOCKS_MAX || self.tally.cached() + placed.span.size > room {
            return Err(owned);
        }
        let Some(hot) = self.hot(CacheKey::new(owned.region, placed.span.size)) else {
            return Err(owned);
        };
        self.kept += 1;
        self.tally.frees += 1;
        self.tally.came(owned.region, placed);
        self.classes[hot].blocks.push(owned);
        Ok(())
    }

    /// Returns `true` if blocks of this size are kept.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_hot(&self, key: CacheKey) -> bool {
        self.hot(key).is_some()
    }

    /// Returns the entry of a size if the size is hot.
    #[inline]
    fn hot(&self, key: CacheKey) -> Option<usize> {
        let set = key.ways();
        let mut ways = self.classes.get(set..set + WAYS)?.iter();
        ways.position(|class| class.key == key && class.uses >= HOT).map(|way| set + way)
    }

    /// Takes out all blocks.
    pub(crate) fn empty(&mut self, out: &mut BlockList) {
        self.cut(|_| 0, out);
    }

    /// Halves the uses of every size. Takes out the blocks of sizes that are no longer hot, and
    /// those that were not needed since the last check.
    pub(crate) fn cool(&mut self, out: &mut BlockList) {
        for class in &mut self.classes {
            class.uses /= 2;
        }
        self.cut(|class| if class.uses < HOT { 0 } else { class.blocks.len - class.least }, out);
    }

    /// Takes out the blocks that were freed first, all but this many of each size.
    fn cut(&mut self, keep: impl Fn(&CacheClass) -> u32, out: &mut BlockList) {
        for class in &mut self.classes {
            let mut gone = class.blocks.split_off(keep(class));
            class.least = class.blocks.len;
            while let Some(owned) = gone.pop() {
                self.kept -= 1;
                if let Some(placed) = &owned.block {
                    // The arena counts the release, so the cache does not.
                    self.tally.frees -= 1;
                    self.tally.went(owned.region, placed.span.size, placed.requested);
                }
                out.push(owned);
            }
        }
    }
}
