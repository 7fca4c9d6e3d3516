//! Other block allocators, to run beside ours: one library, and models of two that have none.
//!
//! A peer hands out spans of offsets and touches no memory. The models follow what the sources of
//! cuArena and of ONNX Runtime's arena do with sizes and addresses; how fast those run says
//! nothing, because they are other programs. Not modelled: threads, streams, failing devices.
//!
//! Invariant: live blocks of one peer never overlap.

use std::collections::{BTreeMap, BTreeSet};

use offset_allocator::{Allocation, Allocator};

/// A block allocator over offsets.
pub trait Peer {
    /// A handle by which a live block is freed.
    type Handle;

    /// A block of at least so many bytes, or `None` where it finds no room. `bytes > 0`.
    fn alloc(&mut self, bytes: u64) -> Option<Self::Handle>;

    /// Frees a live block.
    ///
    /// # Panics
    /// If the block is not live.
    fn free(&mut self, block: Self::Handle);
}

/// The blocks of a model: they tile ranges, and the free ones are in bins.
///
/// Bin `k` holds sizes from `align << k` up to the next power of two, the last one all above.
#[derive(Clone, Debug)]
struct Blocks {
    align: u64,
    /// The free blocks of a bin are searched by size, then address; else by address.
    by_size: bool,
    /// The size of each block, and whether it is live, by address.
    all: BTreeMap<u64, (u64, bool)>,
    bins: Vec<BTreeSet<(u64, u64)>>,
    /// Bytes of live blocks, after rounding.
    live: u64,
}

impl Blocks {
    fn new(align: u64, bins: usize, by_size: bool) -> Self {
        Self { align, by_size, all: BTreeMap::new(), bins: vec![BTreeSet::new(); bins], live: 0 }
    }

    fn bin(&self, size: u64) -> usize {
        let power = (size / self.align).max(1).ilog2() as usize;
        power.min(self.bins.len() - 1)
    }

    /// Orders address and size as the bins are searched, or reads them from that order.
    const fn ordered(&self, (one, other): (u64, u64)) -> (u64, u64) {
        if self.by_size { (other, one) } else { (one, other) }
    }

    /// Returns the address and the size of a free block that holds so many bytes.
    fn find(&self, size: u64) -> Option<(u64, u64)> {
        let free = self.bins[self.bin(size)..].iter().flatten();
        free.map(|&key| self.ordered(key)).find(|(_, whole)| *whole >= size)
    }

    fn add_free(&mut self, at: u64, size: u64) {
        self.all.insert(at, (size, false));
        let (bin, key) = (self.bin(size), self.ordered((at, size)));
        self.bins[bin].insert(key);
    }

    fn add_live(&mut self, at: u64, size: u64) {
        self.all.insert(at, (size, true));
        self.live += size;
    }

    /// Removes the free block at this address, if there is one, and returns its size.
    fn remove_free(&mut self, at: u64) -> Option<u64> {
        let (size, _) = *self.all.get(&at).filter(|(_, is_live)| !is_live)?;
        self.all.remove(&at);
        let (bin, key) = (self.bin(size), self.ordered((at, size)));
        self.bins[bin].remove(&key);
        Some(size)
    }

    /// Makes the first bytes of a free block live.
    fn take(&mut self, at: u64, size: u64) {
        let whole = self.remove_free(at).unwrap_or(size);
        if whole > size {
            self.add_free(at + size, whole - size);
        }
        self.add_live(at, size);
    }

    /// Frees a live block, which joins its free neighbours.
    fn free(&mut self, block: u64) {
        let Some((size, true)) = self.all.remove(&block) else { panic!("{block} is not live") };
        self.live -= size;
        let (mut at, mut end) = (block, block + size);
        end += self.remove_free(end).unwrap_or(0);
        let before = self.all.range(..at).next_back().map(|(&start, &(size, _))| (start, size));
        if let Some((start, _)) = before.filter(|(start, size)| start + size == at) {
            at = self.remove_free(start).map_or(at, |_| start);
        }
        self.add_free(at, end - at);
    }
}

/// A model of cuArena's dynamic region: a fixed pool, bins of powers of two, a tail.
///
/// Sizes are rounded up to 128 bytes. A block of the request's own bin is looked for first, by
/// address, among all of the bin; then the lowest block of the next bin that has any; then the
/// tail. A freed block joins its free neighbours and never the tail, as in cuArena: a pool in
/// which everything was freed stays cut up to where it once reached.
#[derive(Clone, Debug)]
pub struct CuArena {
    capacity: u64,
    /// The tail begins here.
    tail: u64,
    blocks: Blocks,
}

impl CuArena {
    const ALIGN: u64 = 128;

    /// An empty pool of so many bytes, rounded down to 128.
    pub fn new(capacity: u64) -> Self {
        let blocks = Blocks::new(Self::ALIGN, 32, false);
        Self { capacity: capacity / Self::ALIGN * Self::ALIGN, tail: 0, blocks }
    }

    /// Bytes of all live blocks, after rounding.
    pub const fn live(&self) -> u64 {
        self.blocks.live
    }
}

impl Peer for CuArena {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.checked_next_multiple_of(Self::ALIGN)?;
        match self.blocks.find(size) {
            Some((at, _)) => {
                self.blocks.take(at, size);
                Some(at)
            }
            None if size <= self.capacity - self.tail => {
                self.tail += size;
                self.blocks.add_live(self.tail - size, size);
                Some(self.tail - size)
            }
            None => None,
        }
    }

    fn free(&mut self, block: u64) {
        self.blocks.free(block);
    }
}

/// The growth of ONNX Runtime's arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extend {
    /// By doubling (`kNextPowerOfTwo`, its default).
    NextPowerOfTwo,
    /// By what is asked for (`kSameAsRequested`).
    SameAsRequested,
}

/// A model of ONNX Runtime's BFC arena: how it finds, splits and joins blocks, extends, shrinks.
///
/// With the settings that it has when nothing is set. Sizes are rounded up to 256 bytes. From the
/// request's bin upwards each bin is gone through by size, then address; the first block that
/// holds the request is taken. It is split only where it is twice the request, or 128 MiB would
/// be left over. Blocks of different segments never join. Streams, reserved blocks and a device
/// that fails are left out: there is one stream, and the device gives all that is asked for.
///
/// Invariant: `taken = sum of segments <= limit`.
#[derive(Clone, Debug)]
pub struct Bfc {
    extend: Extend,
    limit: u64,
    taken: u64,
    /// Size of the next segment, where the arena doubles.
    next: u64,
    /// Size of each segment, by its first address. The first one ever taken begins at 0.
    segments: BTreeMap<u64, u64>,
    /// The next segment begins here: not where another ends, so that no blocks adjoin.
    next_at: u64,
    blocks: Blocks,
}

impl Bfc {
    const ALIGN: u64 = 256;
    /// Size of the first segment.
    const INITIAL: u64 = 1 << 20;
    /// Size of the first segment after a shrink.
    const INITIAL_GROWTH: u64 = 2 << 20;
    /// A block that leaves at least this much over is split.
    const LEFT_OVER_MAX: u64 = 128 << 20;
    /// Segments double up to this size by themselves.
    const POWER_OF_TWO_MAX: u64 = 1 << 30;

    /// An arena that has taken nothing and may take `limit` bytes.
    pub fn new(extend: Extend, limit: u64) -> Self {
        Self {
            extend,
            limit,
            taken: 0,
            next: Self::INITIAL.min(limit).next_multiple_of(Self::ALIGN),
            segments: BTreeMap::new(),
            next_at: 0,
            blocks: Blocks::new(Self::ALIGN, 21, true),
        }
    }

    /// Bytes of all live blocks, after rounding.
    pub const fn live(&self) -> u64 {
        self.blocks.live
    }

    /// Bytes taken from the device: the sum of the segments.
    pub const fn taken(&self) -> u64 {
        self.taken
    }

    /// Gives back every segment without a live block, but for the first where the arena doubles.
    pub fn shrink(&mut self) {
        let (doubles, blocks) = (self.extend == Extend::NextPowerOfTwo, &mut self.blocks);
        self.segments.retain(|&at, &mut size| {
            let is_kept = doubles && at == 0 || blocks.all[&at] != (size, false);
            if !is_kept {
                blocks.remove_free(at);
                self.taken -= size;
            }
            is_kept
        });
        self.next = Self::INITIAL_GROWTH;
    }

    /// Takes a segment for `size` bytes; says whether there was room for it.
    fn grow(&mut self, size: u64) -> bool {
        let available = self.limit.saturating_sub(self.taken) / Self::ALIGN * Self::ALIGN;
        if size > available {
            return false;
        }
        let mut segment = size;
        if self.extend == Extend::NextPowerOfTwo {
            let is_raised = size > self.next;
            while size > self.next {
                self.next *= 2;
            }
            segment = self.next.min(available);
            if !is_raised {
                self.next = self.next.saturating_mul(2).min(Self::POWER_OF_TWO_MAX);
            }
        }
        let at = self.next_at;
        self.next_at += segment + Self::ALIGN;
        self.taken += segment;
        self.segments.insert(at, segment);
        self.blocks.add_free(at, segment);
        true
    }
}

impl Peer for Bfc {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let wanted = bytes.checked_next_multiple_of(Self::ALIGN)?;
        if self.blocks.find(wanted).is_none() && !self.grow(wanted) {
            return None;
        }
        let (at, whole) = self.blocks.find(wanted)?;
        let is_split = whole >= wanted.saturating_mul(2) || whole - wanted >= Self::LEFT_OVER_MAX;
        self.blocks.take(at, if is_split { wanted } else { whole });
        Some(at)
    }

    fn free(&mut self, block: u64) {
        self.blocks.free(block);
    }
}

/// The crate `offset-allocator` over a fixed pool: two-level bins over 32-bit offsets, here in
/// units of 256 bytes.
///
/// It rounds requests up to a bin and never looks into the bin below. A pool of 64 GiB and the
/// blocks of 256 bytes and more in it fit its 32 bits.
pub struct Offset(Allocator);

impl Offset {
    const UNIT: u64 = 256;

    /// An empty pool of so many bytes, rounded down to 256, for at most so many blocks, free ones
    /// counted. It has 2^32 units at most.
    pub fn new(capacity: u64, blocks_max: u32) -> Self {
        let units = u32::try_from(capacity / Self::UNIT).unwrap_or(u32::MAX);
        Self(Allocator::with_max_allocs(units, blocks_max))
    }
}

impl Peer for Offset {
    type Handle = Allocation;

    fn alloc(&mut self, bytes: u64) -> Option<Allocation> {
        self.0.allocate(u32::try_from(bytes.div_ceil(Self::UNIT)).ok()?)
    }

    fn free(&mut self, block: Allocation) {
        self.0.free(block);
    }
}
