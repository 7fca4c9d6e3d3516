//! The index over virtual memory: addresses in plenty, a limit on the granules that blocks touch.
//!
//! A model of what an arena does with the index, without driver and lock: a granule counts while
//! any live block touches it. A place costs the granules that it would be the first to touch.
//!
//! Invariant: `live <= active <= limit`.

use lowtide_gpu::index::{BlockId, BlockIndex, End, Request, Span};

use crate::peers::Peer;
use crate::work::{GIB, LOAD90_LIVE, LOAD90_STEPS, MIB, Mix, POOL};

const GRANULE: u64 = 2 * MIB;
const ADDRESSES: u64 = 512 * GIB;
/// Below this a block is small. Half a granule.
const SMALL_BELOW: u64 = MIB;

/// The places of small blocks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Layout {
    /// Among the others.
    Together,
    /// To the high end of the same range.
    TwoEnds,
    /// To a range of their own.
    TwoRanges,
}

impl Layout {
    pub(crate) const ALL: [Self; 3] = [Self::Together, Self::TwoEnds, Self::TwoRanges];

    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Together => "together",
            Self::TwoEnds => "two_ends",
            Self::TwoRanges => "two_ranges",
        }
    }
}

/// Addresses and the blocks that touch each granule of them.
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

    fn alloc(&mut self, request: Request) -> Option<(BlockId, u64)> {
        let Self { index, blocks } = self;
        let (id, span) = index.take(request, |place| Self::opened(blocks, place))?;
        let opened = Self::opened(blocks, span);
        Self::granules(span).for_each(|at| blocks[at] += 1);
        Some((id, opened))
    }

    /// Size, and granules that nobody touches any more.
    fn free(&mut self, id: BlockId) -> (u64, u64) {
        let span = self.index.release(id).unwrap_or(Span { offset: 0, size: 0 });
        let mut closed = 0;
        for at in Self::granules(span) {
            self.blocks[at] -= 1;
            closed += u64::from(self.blocks[at] == 0);
        }
        (span.size, closed)
    }
}

/// One or two ranges under a limit.
pub(crate) struct Virtual {
    layout: Layout,
    ranges: [Range; 2],
    live: u64,
    active: u64,
    worst: f64,
}

impl Virtual {
    pub(crate) fn new(layout: Layout) -> Self {
        let ranges = [Range::new(), Range::new()];
        Self { layout, ranges, live: 0, active: 0, worst: 1.0 }
    }

    fn ratio(&self) -> f64 {
        (self.active * GRANULE) as f64 / self.live.max(1) as f64
    }
}

impl Peer for Virtual {
    /// The block, and its range.
    type Handle = (BlockId, usize);

    fn alloc(&mut self, bytes: u64) -> Option<Self::Handle> {
        let small = bytes < SMALL_BELOW;
        let end = if small && self.layout == Layout::TwoEnds { End::High } else { End::Low };
        let range = usize::from(small && self.layout == Layout::TwoRanges);
        let (id, opened) = self.ranges[range].alloc(Request { size: bytes, align: 256, end })?;
        self.active += opened;
        self.live += bytes.next_multiple_of(256);
        if self.taken() > POOL {
            self.free((id, range));
            return None;
        }
        if self.live > POOL / 2 {
            self.worst = self.worst.max(self.ratio());
        }
        Some((id, range))
    }

    fn free(&mut self, (id, range): Self::Handle) {
        let (size, closed) = self.ranges[range].free(id);
        self.live -= size;
        self.active -= closed;
    }

    fn taken(&self) -> u64 {
        self.active * GRANULE
    }

    fn largest_free(&self) -> u64 {
        self.ranges[0].index.largest(|span| span.size)
    }

    fn live(&self) -> u64 {
        self.live
    }
}

/// The result of the mix at 90 %.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Outcome {
    pub(crate) failures: u64,
    /// Active for live, the most while more than half of the limit was live, and at the end.
    pub(crate) worst: f64,
    pub(crate) end: f64,
    /// MiB that small blocks alone keep active at the end, and how much those are.
    pub(crate) pinned_mib: u64,
    pub(crate) small_mib: u64,
}

/// The mix at 90 % of the limit; at its end everything but the small blocks is freed.
pub(crate) fn load90(layout: Layout, seed: u64) -> Outcome {
    let mut pool = Virtual::new(layout);
    let mut mix = Mix::filled(&mut pool, seed, LOAD90_LIVE);
    mix.failures = 0;
    mix.play(&mut pool, LOAD90_STEPS);
    let (failures, worst, end) = (mix.failures, pool.worst, pool.ratio());
    for (id, range) in mix.into_live() {
        let size = pool.ranges[range].index.span_of(id).map_or(0, |span| span.size);
        if size >= SMALL_BELOW {
            pool.free((id, range));
        }
    }
    let (pinned_mib, small_mib) = (pool.taken() / MIB, pool.live / MIB);
    Outcome { failures, worst, end, pinned_mib, small_mib }
}
