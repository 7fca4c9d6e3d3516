//! A model of ONNX Runtime's BFC arena: how it finds, splits and joins blocks, extends, shrinks.
//!
//! With the settings that it has when nothing is set. Sizes are rounded up to 256 bytes. From the
//! request's bin upwards each bin is gone through by size, then address; the first block that
//! holds the request is taken. It is split only where it is twice the request, or 128 MiB would
//! be left over. Blocks of different segments never join. Streams, reserved blocks and a device
//! that fails are left out: there is one stream, and the device gives all that is asked for.
//!
//! Invariants: the blocks of a segment tile it; no two free blocks of a segment touch;
//! `taken = sum of segments <= limit`.

use std::collections::{BTreeMap, BTreeSet};

use super::Peer;

const ALIGN: u64 = 256;
const BINS: usize = 21;
const MIB: u64 = 1 << 20;

/// Size of the first segment.
const INITIAL: u64 = MIB;
/// Size of the first segment after a shrink.
const INITIAL_GROWTH: u64 = 2 * MIB;
/// A block that leaves at least this much over is split.
const LEFT_OVER_MAX: u64 = 128 * MIB;
/// Segments double up to this size by themselves.
const POWER_OF_TWO_MAX: u64 = 1024 * MIB;

/// The growth of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extend {
    /// By doubling (`kNextPowerOfTwo`, its default).
    NextPowerOfTwo,
    /// By what is asked for (`kSameAsRequested`).
    SameAsRequested,
}

#[derive(Clone, Copy, Debug)]
struct Block {
    size: u64,
    live: bool,
}

/// The model.
#[derive(Clone, Debug)]
pub(crate) struct Bfc {
    extend: Extend,
    limit: u64,
    taken: u64,
    live: u64,
    /// Size of the next segment, where the arena doubles.
    next: u64,
    /// Size of each segment, by its first address. The first one ever taken begins at 0.
    segments: BTreeMap<u64, u64>,
    /// The next segment begins here: not where another ends, so that no blocks adjoin.
    next_at: u64,
    blocks: BTreeMap<u64, Block>,
    /// Size and address of free blocks, by the power of two of their size.
    bins: [BTreeSet<(u64, u64)>; BINS],
}

impl Bfc {
    /// An arena that has taken nothing and may take `limit` bytes.
    pub(crate) fn new(extend: Extend, limit: u64) -> Self {
        Self {
            extend,
            limit,
            taken: 0,
            live: 0,
            next: INITIAL.min(limit).next_multiple_of(ALIGN),
            segments: BTreeMap::new(),
            next_at: 0,
            blocks: BTreeMap::new(),
            bins: std::array::from_fn(|_| BTreeSet::new()),
        }
    }

    /// Gives back every segment without a live block, but for the first where the arena doubles.
    pub(crate) fn shrink(&mut self) {
        let doubles = self.extend == Extend::NextPowerOfTwo;
        let wholly_free = |(&at, &size): (&u64, &u64)| {
            let block = self.blocks[&at];
            let kept = doubles && at == 0;
            (!block.live && block.size == size && !kept).then_some((at, size))
        };
        let gone: Vec<_> = self.segments.iter().filter_map(wholly_free).collect();
        for (at, size) in gone {
            self.segments.remove(&at);
            self.blocks.remove(&at);
            self.bins[bin_of(size)].remove(&(size, at));
            self.taken -= size;
        }
        self.next = INITIAL_GROWTH;
    }

    fn find(&self, size: u64) -> Option<(u64, u64)> {
        let bins = &self.bins[bin_of(size)..];
        bins.iter().find_map(|bin| bin.range((size, 0)..).next()).copied()
    }

    /// Takes a segment for `size` bytes; says whether there was room for it.
    fn grow(&mut self, size: u64) -> bool {
        let available = self.limit.saturating_sub(self.taken) / ALIGN * ALIGN;
        if size > available {
            return false;
        }
        let segment = match self.extend {
            Extend::SameAsRequested => size,
            Extend::NextPowerOfTwo => {
                let raised = size > self.next;
                while size > self.next {
                    self.next *= 2;
                }
                let segment = self.next.min(available);
                if !raised {
                    let doubled = self.next.saturating_mul(2);
                    self.next = doubled.min(POWER_OF_TWO_MAX);
                }
                segment
            }
        };
        let at = self.next_at;
        self.next_at += segment + ALIGN;
        self.taken += segment;
        self.segments.insert(at, segment);
        self.file(at, segment);
        true
    }

    fn file(&mut self, at: u64, size: u64) {
        self.blocks.insert(at, Block { size, live: false });
        self.bins[bin_of(size)].insert((size, at));
    }

    /// Takes the free block at this address out of the books, if there is one.
    fn unfile(&mut self, at: u64) -> Option<u64> {
        let size = self.blocks.get(&at).filter(|block| !block.live)?.size;
        self.blocks.remove(&at);
        self.bins[bin_of(size)].remove(&(size, at));
        Some(size)
    }
}

/// Bin `k` holds sizes from `256 << k` up to the next power of two, the last one all above.
fn bin_of(size: u64) -> usize {
    let power = (size / ALIGN).max(1).ilog2() as usize;
    power.min(BINS - 1)
}

impl Peer for Bfc {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let wanted = bytes.checked_next_multiple_of(ALIGN)?;
        if self.find(wanted).is_none() && !self.grow(wanted) {
            return None;
        }
        let (whole, at) = self.find(wanted)?;
        self.unfile(at);
        let split = whole >= wanted.saturating_mul(2) || whole - wanted >= LEFT_OVER_MAX;
        let size = if split { wanted } else { whole };
        if size < whole {
            self.file(at + size, whole - size);
        }
        self.blocks.insert(at, Block { size, live: true });
        self.live += size;
        Some(at)
    }

    fn free(&mut self, block: u64) {
        let Some(freed) = self.blocks.get(&block).filter(|block| block.live).copied() else {
            panic!("{block} is not live");
        };
        self.blocks.remove(&block);
        self.live -= freed.size;
        let (mut at, mut end) = (block, block + freed.size);
        end += self.unfile(end).unwrap_or(0);
        let before = self.blocks.range(..at).next_back();
        let start = before.filter(|(start, before)| *start + before.size == at);
        if let Some((&start, _)) = start {
            at = self.unfile(start).map_or(at, |_| start);
        }
        self.file(at, end - at);
    }

    fn taken(&self) -> u64 {
        self.taken
    }

    fn largest_free(&self) -> u64 {
        let last = self.bins.iter().rev().find_map(BTreeSet::last);
        last.map_or(0, |&(size, _)| size)
    }

    fn live(&self) -> u64 {
        self.live
    }
}
