//! The crate `offset-allocator`: two-level bins over 32-bit offsets, here in units of 256 bytes.
//!
//! It rounds requests up to a bin and never looks into the bin below. A pool of 64 GiB and the
//! blocks of 256 bytes and more in it fit its 32 bits.
//!
//! Invariant: `units x 256 = taken`.

use offset_allocator::{Allocation, Allocator};

use super::Peer;

const UNIT: u64 = 256;

/// The crate's allocator over a fixed pool.
pub(crate) struct Offset {
    allocator: Allocator,
    taken: u64,
    live: u64,
}

/// A live block and its size in bytes.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    allocation: Allocation,
    size: u64,
}

impl Offset {
    /// An empty pool of so many bytes, rounded down to 256, for at most so many blocks, free ones
    /// counted. It has 2^32 units at most.
    pub(crate) fn new(capacity: u64, blocks_max: u32) -> Self {
        let units = u32::try_from(capacity / UNIT).unwrap_or(u32::MAX);
        Self {
            allocator: Allocator::with_max_allocs(units, blocks_max),
            taken: u64::from(units) * UNIT,
            live: 0,
        }
    }
}

impl Peer for Offset {
    type Handle = Block;

    fn alloc(&mut self, bytes: u64) -> Option<Block> {
        let units = u32::try_from(bytes.div_ceil(UNIT)).ok()?;
        let allocation = self.allocator.allocate(units)?;
        let size = u64::from(units) * UNIT;
        self.live += size;
        Some(Block { allocation, size })
    }

    fn free(&mut self, block: Block) {
        self.allocator.free(block.allocation);
        self.live -= block.size;
    }

    fn taken(&self) -> u64 {
        self.taken
    }

    fn largest_free(&self) -> u64 {
        u64::from(self.allocator.storage_report().largest_free_region) * UNIT
    }

    fn live(&self) -> u64 {
        self.live
    }
}
