//! The crate `rlsf` as one of the peers: two-level segregated fit with headers in the blocks.
//!
//! Headers in the blocks mean that it cannot manage memory that the processor cannot write to, so
//! it gets host memory and sizes of 1/256. Its times compare; its failures do not.
//!
//! Invariant: the pool outlives the allocator: it is leaked.
#![expect(unsafe_code, reason = "the crate takes blocks back by their address")]

use std::alloc::Layout;
use std::ptr::NonNull;

use crate::peers::Peer;

/// The divisor of sizes.
const SCALE: u64 = 256;

/// The crate's allocator over a pool of host memory.
pub(crate) struct Tlsf {
    inner: rlsf::Tlsf<'static, u32, u32, 28, 32>,
    taken: u64,
    live: u64,
}

/// A live block and its size.
#[derive(Clone, Copy)]
pub(crate) struct Block {
    at: NonNull<u8>,
    size: u64,
}

impl Tlsf {
    /// An empty pool that stands for so many bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        let size = usize::try_from(capacity / SCALE).unwrap_or(usize::MAX);
        let mut inner = rlsf::Tlsf::new();
        let _ = inner.insert_free_block(Box::leak(Box::new_uninit_slice(size)));
        Self { inner, taken: capacity, live: 0 }
    }
}

impl Peer for Tlsf {
    type Handle = Block;

    fn alloc(&mut self, bytes: u64) -> Option<Block> {
        let size = usize::try_from((bytes / SCALE).max(1)).ok()?;
        let at = self.inner.allocate(Layout::from_size_align(size, 1).ok()?)?;
        self.live += bytes;
        Some(Block { at, size: bytes })
    }

    fn free(&mut self, block: Block) {
        // SAFETY: the block was allocated with this alignment by `alloc`, from this allocator, and
        // a bench frees each block once.
        unsafe { self.inner.deallocate(block.at, 1) };
        self.live -= block.size;
    }

    fn taken(&self) -> u64 {
        self.taken
    }

    fn largest_free(&self) -> u64 {
        0 // it does not say
    }

    fn live(&self) -> u64 {
        self.live
    }
}
