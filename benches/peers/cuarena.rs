//! A model of cuArena's dynamic region: a fixed pool, bins of powers of two, a tail.
//!
//! Sizes are rounded up to 128 bytes. A block of the request's own bin is looked for first, by
//! address, among all of the bin; then the lowest block of the next bin that has any; then the
//! tail. A freed block joins its free neighbours and never the tail, as in cuArena: a pool in
//! which everything was freed stays cut up to where it once reached.
//!
//! Invariant: live and free blocks tile `[0, tail)`; every free block is in the bin of its size.

use std::collections::{BTreeMap, BTreeSet};

use super::Peer;

const ALIGN: u64 = 128;
const BINS: usize = 32;

/// The model.
#[derive(Clone, Debug)]
pub(crate) struct CuArena {
    capacity: u64,
    /// The tail begins here.
    tail: u64,
    live_bytes: u64,
    /// Size of each live block, by address.
    live: BTreeMap<u64, u64>,
    /// Size of each free block, by address.
    free: BTreeMap<u64, u64>,
    /// Addresses of free blocks, by the power of two of their size.
    bins: [BTreeSet<u64>; BINS],
}

impl CuArena {
    /// An empty pool of so many bytes, rounded down to 128.
    pub(crate) fn new(capacity: u64) -> Self {
        Self {
            capacity: capacity / ALIGN * ALIGN,
            tail: 0,
            live_bytes: 0,
            live: BTreeMap::new(),
            free: BTreeMap::new(),
            bins: std::array::from_fn(|_| BTreeSet::new()),
        }
    }

    /// A free block that holds `size` bytes.
    fn find(&self, size: u64) -> Option<u64> {
        let own = bin_of(size);
        let fits = |at: &&u64| self.free[*at] >= size;
        let higher = || self.bins[own + 1..].iter().find_map(BTreeSet::first);
        self.bins[own].iter().find(fits).or_else(higher).copied()
    }

    fn file(&mut self, at: u64, size: u64) {
        self.free.insert(at, size);
        self.bins[bin_of(size)].insert(at);
    }

    fn unfile(&mut self, at: u64) -> Option<u64> {
        let size = self.free.remove(&at)?;
        self.bins[bin_of(size)].remove(&at);
        Some(size)
    }

    fn cut(&mut self, at: u64, size: u64) -> Option<u64> {
        let whole = self.unfile(at)?;
        if whole > size {
            self.file(at + size, whole - size);
        }
        Some(at)
    }
}

/// Bin `k` holds sizes from `2^(k + 7)` up to the next power of two, the last one all above.
fn bin_of(size: u64) -> usize {
    let power = (size / ALIGN).max(1).ilog2() as usize;
    power.min(BINS - 1)
}

impl Peer for CuArena {
    type Handle = u64;

    fn alloc(&mut self, bytes: u64) -> Option<u64> {
        let size = bytes.checked_next_multiple_of(ALIGN)?;
        let at = match self.find(size) {
            Some(at) => self.cut(at, size)?,
            None if size <= self.capacity - self.tail => {
                self.tail += size;
                self.tail - size
            }
            None => return None,
        };
        self.live.insert(at, size);
        self.live_bytes += size;
        Some(at)
    }

    fn free(&mut self, block: u64) {
        let Some(size) = self.live.remove(&block) else { panic!("{block} is not live") };
        self.live_bytes -= size;
        let (mut at, mut end) = (block, block + size);
        end += self.unfile(end).unwrap_or(0);
        let before = self.free.range(..at).next_back().map(|(&at, &size)| (at, at + size));
        if let Some((start, _)) = before.filter(|&(_, before_end)| before_end == at) {
            self.unfile(start);
            at = start;
        }
        self.file(at, end - at);
    }

    fn taken(&self) -> u64 {
        self.capacity
    }

    fn largest_free(&self) -> u64 {
        let tail = self.capacity - self.tail;
        self.free.values().copied().max().unwrap_or(0).max(tail)
    }

    fn live(&self) -> u64 {
        self.live_bytes
    }
}
