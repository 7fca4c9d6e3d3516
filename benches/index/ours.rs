//! The block index as one of the peers: a fixed pool, every block towards its low end.
//!
//! Invariant: `taken = span`.

use lowtide_gpu::index::{BlockId, BlockIndex, End, Request};

use crate::peers::Peer;

/// A fixed pool over the index.
#[derive(Debug)]
pub(crate) struct Ours {
    pub(crate) index: BlockIndex,
}

impl Ours {
    pub(crate) fn new(capacity: u64) -> Self {
        Self { index: BlockIndex::new(capacity) }
    }

    /// Bytes of the index for each block, live and free, all that it takes counted.
    #[expect(clippy::cast_precision_loss, reason = "a bench has few blocks")]
    pub(crate) fn metadata_per_block(&self) -> f64 {
        self.index.metadata() as f64 / self.index.blocks().count() as f64
    }
}

impl Peer for Ours {
    type Handle = BlockId;

    fn alloc(&mut self, bytes: u64) -> Option<BlockId> {
        let request = Request { size: bytes, align: 256, end: End::Low };
        self.index.take(request, |_| 0).map(|(id, _)| id)
    }

    fn free(&mut self, block: BlockId) {
        assert!(self.index.release(block).is_ok(), "a block is freed once");
    }

    fn taken(&self) -> u64 {
        self.index.span()
    }

    fn largest_free(&self) -> u64 {
        self.index.largest(|span| span.size)
    }

    fn live(&self) -> u64 {
        self.index.live()
    }
}
