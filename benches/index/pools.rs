//! The pools that are compared: the block index, alone and over virtual memory, and `rlsf`.
//!
//! Invariant: a pool outlives its blocks.
#![expect(unsafe_code, reason = "`rlsf` takes blocks back by their address")]

use std::alloc::Layout;
use std::hint::black_box;
use std::ptr::NonNull;

use lowtide_gpu::index::{BlockId, BlockIndex, End, Request, Span};

use crate::peers::Peer;
use crate::work::{GIB, LOAD90_LIVE, LOAD90_STEPS, MIB, Mix, POOL};

/// The block index over a fixed pool, every block towards its low end.
#[derive(Debug)]
pub(crate) struct Ours(pub(crate) BlockIndex);

impl Ours {
    pub(crate) fn new(capacity: u64) -> Self {
        Self(BlockIndex::new(capacity))
    }
}

const fn request(size: u64) -> Request {
    Request { size, align: 256, end: End::Low }
}

impl Peer for Ours {
    type Handle = BlockId;

    fn alloc(&mut self, bytes: u64) -> Option<BlockId> {
        self.0.take(request(bytes), |_| 0).map(|(id, _)| id)
    }

    fn free(&mut self, block: BlockId) {
        assert!(self.0.release(block).is_some(), "a block is freed once");
    }
}

/// The crate `rlsf`: two-level segregated fit with headers in the blocks.
///
/// Headers in the blocks mean that it cannot manage memory that the processor cannot write to, so
/// it gets host memory and sizes of 1/256. Its times compare; its failures do not.
pub(crate) struct Tlsf(rlsf::Tlsf<'static, u32, u32, 28, 32>);

impl Tlsf {
    const SCALE: u64 = 256;

    /// An empty pool that stands for so many bytes.
    pub(crate) fn new(capacity: u64) -> Self {
        let size = usize::try_from(capacity / Self::SCALE).unwrap_or(usize::MAX);
        let mut inner = rlsf::Tlsf::new();
        let _ = inner.insert_free_block(Box::leak(Box::new_uninit_slice(size)));
        Self(inner)
    }
}

impl Peer for Tlsf {
    type Handle = NonNull<u8>;

    fn alloc(&mut self, bytes: u64) -> Option<NonNull<u8>> {
        let size = usize::try_from((bytes / Self::SCALE).max(1)).ok()?;
        self.0.allocate(Layout::from_size_align(size, 1).ok()?)
    }

    fn free(&mut self, block: NonNull<u8>) {
        // SAFETY: the block was allocated with this alignment by `alloc`, from this allocator, and
        // a bench frees each block once.
        unsafe { self.0.deallocate(block, 1) };
    }
}

/// Takes a number for a block and keeps nothing: what the bench itself costs.
pub(crate) struct Nobody;

impl Peer for Nobody {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        Some(black_box(bytes))
    }

    fn free(&mut self, block: u64) {
        black_box(block);
    }
}

const GRANULE: u64 = 2 * MIB;
const ADDRESSES: u64 = 512 * GIB;
/// Below this a block is small. Half a granule.
const SMALL_BELOW: u64 = MIB;

/// Addresses in plenty, and the blocks that touch each granule of them.
struct Range {
    index: BlockIndex,
    blocks: Vec<u32>,
}

impl Range {
    fn new() -> Self {
        let granules = usize::try_from(ADDRESSES / GRANULE).unwrap_or(0);
        Self { index: BlockIndex::new(ADDRESSES), blocks: vec![0; granules] }
    }

    fn granules(span: Span) -> std::ops::Range<usize> {
        let number = |at: u64| usize::try_from(at).unwrap_or(usize::MAX);
        number(span.offset / GRANULE)..number(span.end().div_ceil(GRANULE))
    }

    /// Granules of a free place that no block touches. Only the first and the last can be touched.
    fn opened(blocks: &[u32], place: Span) -> u64 {
        let granules = Self::granules(place);
        let last = granules.end - 1;
        let shared = u64::from(blocks[granules.start] > 0)
            + u64::from(last > granules.start && blocks[last] > 0);
        granules.len() as u64 - shared
    }
}

/// A model of what an arena does with the index, without driver and lock: one or two ranges under a
/// limit on the granules that live blocks touch. A place costs the granules that it would be the
/// first to touch.
///
/// Invariant: `live <= active <= limit`.
pub(crate) struct Virtual {
    /// All blocks; or large ones, and small ones.
    ranges: Vec<Range>,
    live: u64,
    active: u64,
    worst: f64,
}

impl Virtual {
    fn active_per_live(&self) -> f64 {
        (self.active * GRANULE) as f64 / self.live.max(1) as f64
    }
}

impl Peer for Virtual {
    /// The block, and its range.
    type Handle = (BlockId, usize);

    fn alloc(&mut self, bytes: u64) -> Option<Self::Handle> {
        let at = if bytes < SMALL_BELOW { self.ranges.len() - 1 } else { 0 };
        let Range { index, blocks } = &mut self.ranges[at];
        let (id, span) = index.take(request(bytes), |place| Range::opened(blocks, place))?;
        self.active += Range::opened(blocks, span);
        Range::granules(span).for_each(|granule| blocks[granule] += 1);
        self.live += span.size;
        if self.active * GRANULE > POOL {
            self.free((id, at));
            return None;
        }
        if self.live > POOL / 2 {
            self.worst = self.worst.max(self.active_per_live());
        }
        Some((id, at))
    }

    fn free(&mut self, (id, at): Self::Handle) {
        let Range { index, blocks } = &mut self.ranges[at];
        let span = index.release(id).unwrap_or(Span { offset: 0, size: 0 });
        self.live -= span.size;
        for granule in Range::granules(span) {
            blocks[granule] -= 1;
            self.active -= u64::from(blocks[granule] == 0);
        }
    }
}

/// The mix at 90 % of the limit, over so many ranges. Returns the failures; active for live, the
/// most while more than half of the limit was live, and at the end; and, once everything but the
/// small blocks is freed, their MiB and those that they keep active.
pub(crate) fn virtual_load90(ranges: usize, seed: u64) -> [f64; 5] {
    let ranges = (0..ranges).map(|_| Range::new()).collect();
    let mut pool = Virtual { ranges, live: 0, active: 0, worst: 1.0 };
    let mut mix = Mix::filled(&mut pool, seed, LOAD90_LIVE);
    mix.failures = 0;
    mix.play(&mut pool, LOAD90_STEPS);
    let (failures, worst, end) = (mix.failures, pool.worst, pool.active_per_live());
    for (id, range) in mix.slots.into_iter().flatten() {
        let size = pool.ranges[range].index.span_of(id).map_or(0, |span| span.size);
        if size >= SMALL_BELOW {
            pool.free((id, range));
        }
    }
    [failures as f64, worst, end, (pool.live / MIB) as f64, (pool.active * GRANULE / MIB) as f64]
}
