//! The blocks of one thread cache, by size, for hot sizes. Plain values, protected by the cache's
//! lock.
//!
//! A size is hot if it was requested [`HOT`] times recently. Each check, and each request for an
//! unknown size, cools the sizes.
//!
//! Invariants: `cached = sum of its blocks`; a block that was handed out is not in the cache.

use crate::exec::thread_cache::BlockHandle;
use crate::state::cached::{CacheCounts, Kept};
use crate::types::region::Region;

/// The number of requests for a size, reduced when the size cools.
pub(crate) type UseCount = u8;

/// The number of requests for a size since it last cooled, from which on the size is hot. A guess:
/// two may be a coincidence, so twice as many.
pub(crate) const HOT: UseCount = 4;

/// The maximum uses of a size: the size is cold at the second check after its last use.
const USES_MAX: UseCount = 4 * HOT - 1;

/// The maximum number of blocks of one size in a cache: a request seldom frees more of one size
/// than it soon allocates again. A guess.
const BLOCKS_MAX: usize = 4;

/// The number of sizes in a cache, in sets of [`WAYS`]. A guess: the requests of one layer of a
/// model.
const SETS: usize = 8;
const WAYS: usize = 2;

/// The key of a block size in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Key(u64);

impl Key {
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

/// The blocks of one size.
#[derive(Debug)]
struct Class {
    key: Key,
    uses: UseCount,
    kept: usize,
    blocks: [Option<Box<BlockHandle>>; BLOCKS_MAX],
}

impl Class {
    const VACANT: Self =
        Self { key: Key::NONE, uses: 0, kept: 0, blocks: [const { None }; BLOCKS_MAX] };
}

/// The blocks in the cache of one shard.
#[derive(Debug, Default)]
pub(crate) struct ThreadCache {
    /// Empty until the first request, then `SETS x WAYS`.
    classes: Vec<Class>,
    pub(crate) tally: CacheCounts,
}

impl ThreadCache {
    /// Returns the entry of a size. If the size has no entry, replaces that of a cold size without
    /// blocks.
    #[inline]
    fn claim(&mut self, key: Key) -> Option<&mut Class> {
        if self.classes.is_empty() {
            self.classes.extend((0..SETS * WAYS).map(|_| Class::VACANT));
        }
        let set = key.ways();
        let ways = &mut self.classes[set..set + WAYS];
        if let Some(way) = ways.iter().position(|class| class.key == key) {
            return Some(&mut ways[way]);
        }
        // Each miss cools the set, so that a size which was requested once does not stay in it.
        for class in &mut *ways {
            class.uses = class.uses.saturating_sub(1);
        }
        let cold = ways.iter_mut().find(|class| class.uses == 0 && class.kept == 0)?;
        *cold = Class { key, ..Class::VACANT };
        Some(cold)
    }

    #[inline]
    pub(crate) fn take(&mut self, key: Key, requested: u64) -> Option<Box<BlockHandle>> {
        let class = self.claim(key)?;
        class.uses = USES_MAX.min(class.uses + 1);
        let last = class.kept.checked_sub(1)?;
        let mut owned = class.blocks[last].take()?;
        class.kept = last;
        self.tally.allocs += 1;
        if let Some(placed) = &mut owned.block {
            placed.requested = requested;
            self.tally.went(owned.region, placed.span.size, requested);
        }
        Some(owned)
    }

    /// Counts a freed block and returns its slot; returns `None` if the arena must free the block.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        owned: &BlockHandle,
        room: u64,
    ) -> Option<&mut Option<Box<BlockHandle>>> {
        let placed = owned.block.as_ref()?;
        if self.classes.is_empty() || self.tally.cached() + placed.span.size > room {
            return None;
        }
        let key = Key::new(owned.region, placed.span.size);
        let set = key.ways();
        let mut ways = self.classes[set..set + WAYS].iter_mut();
        let class = ways.find(|class| class.key == key && class.uses >= HOT)?;
        let vacant = class.blocks.get_mut(class.kept)?;
        class.kept += 1;
        self.tally.frees += 1;
        self.tally.came(owned.region, placed);
        Some(vacant)
    }

    /// Takes out the blocks of the sizes whose uses `gone` selects.
    pub(crate) fn empty(&mut self, gone: impl Fn(UseCount) -> bool, mut out: impl FnMut(Kept)) {
        for class in self.classes.iter_mut().filter(|class| gone(class.uses)) {
            class.kept = 0;
            for owned in class.blocks.iter_mut().filter_map(Option::take) {
                let Some(placed) = owned.block else { continue };
                // The arena counts the release, so the cache does not.
                self.tally.frees -= 1;
                self.tally.went(owned.region, placed.span.size, placed.requested);
                out((owned.region, placed));
            }
        }
    }

    /// Halves the uses of every size.
    pub(crate) fn cool(&mut self) {
        for class in &mut self.classes {
            class.uses /= 2;
        }
    }
}
