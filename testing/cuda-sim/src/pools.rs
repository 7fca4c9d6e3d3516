//! Plain and stream-ordered memory: blocks, the pools that cache them, and the rules of a trim.
//!
//! A block of a pool is allocated and freed in stream order; between its free and the next
//! allocation it is closed to all work. The stream that freed a block can reuse it at once, other
//! streams when the free is done. A pool releases only memory whose free the host has observed to
//! complete, on the stream of the free itself, at a synchronising call (memory above the threshold)
//! or at a trim: the strictest reading of the manual.
//!
//! Invariant: for each pool `used <= reserved <= max`; `reserved` is the sum of its blocks, `used`
//! that of the blocks in use. Plain blocks have no pool and are in use until they are freed.

use std::collections::BTreeMap;

use super::call::Call;
use super::fault::{Fault, HandleKind};
use super::memory::{Memory, Range};
use super::model::{Answer, INVALID_VALUE, Model, OUT_OF_MEMORY, UNSUPPORTED};
use super::slots::Slots;
use super::work::{Position, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, DriverError};

/// The unit that sizes in use are rounded up to.
const USED_STEP: u64 = 512;

/// The unit of block allocation. A guess: a real driver allocates more at once and divides it.
const BLOCK_STEP: u64 = 64 << 10;

/// The pool of plain blocks: none.
const PLAIN: u64 = 0;

/// The state of a block.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Live,
    /// Its free, by number, is queued on a stream.
    Freeing(u64, u64),
    Free {
        freed: Position,
        observed: bool,
    },
}

#[derive(Debug)]
struct Block {
    pool: u64,
    /// The requested size, rounded up.
    used: u64,
    /// The bytes charged to the device.
    charged: u64,
    state: State,
}

/// A pool of stream-ordered memory, in bytes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Pool {
    max: u64,
    /// What it keeps at a synchronising call.
    pub threshold: u64,
    /// In use.
    pub used: u64,
    /// The highest value of `used` since the last reset.
    pub used_high: u64,
    /// Allocated from the device.
    pub reserved: u64,
    /// The highest value of `reserved` since the last reset.
    pub reserved_high: u64,
    /// Destroyed, but alive until its blocks are freed.
    gone: bool,
}

/// All blocks and pools.
#[derive(Debug, Default)]
pub(super) struct Pools {
    table: Slots<Pool>,
    blocks: BTreeMap<u64, Block>,
    /// The device's initial pool; 0 before it is first needed.
    default: u64,
    current: u64,
    /// The number of frees.
    frees: u64,
}

impl Pools {
    pub(super) fn get(&self, pool: u64) -> Option<&Pool> {
        self.table.get(pool).filter(|pool| !pool.gone)
    }

    pub(super) fn get_mut(&mut self, pool: u64) -> Option<&mut Pool> {
        self.table.get_mut(pool).filter(|pool| !pool.gone)
    }

    /// Returns the number of blocks in use: plain ones and those of pools.
    pub(super) fn live(&self) -> [u64; 2] {
        let live = self.blocks.values().filter(|it| it.state == State::Live);
        live.fold([0, 0], |[plain, pooled], block| {
            let is_plain = block.pool == PLAIN;
            [plain + u64::from(is_plain), pooled + u64::from(!is_plain)]
        })
    }

    /// Returns the start and the used size of the block in use that contains the address.
    pub(super) fn live_at(&self, at: u64) -> Option<(u64, u64)> {
        let (start, block) = self.blocks.range(..=at).next_back()?;
        let holds = block.state == State::Live && at - start < block.used.max(1);
        holds.then_some((*start, block.used))
    }

    /// Checks the counters. Cost: O(blocks x pools).
    pub(super) fn validate(&self, memory: &Memory) {
        let charged = self.blocks.values().map(|it| it.charged).sum::<u64>();
        assert_eq!(ByteSize::new(charged), memory.taken());
        let (mut used, mut reserved) = (0, 0);
        for pool in self.table.values() {
            assert!(pool.used <= pool.reserved && pool.reserved <= pool.max, "{pool:?}");
            used += pool.used;
            reserved += pool.reserved;
        }
        let pooled = || self.blocks.values().filter(|it| it.pool != PLAIN);
        assert_eq!(pooled().map(|it| it.charged).sum::<u64>(), reserved);
        let live = pooled().filter(|it| it.state == State::Live);
        assert_eq!(live.map(|it| it.used).sum::<u64>(), used);
    }
}

impl Model {
    /// The pool that the device has at first, and the one it uses now.
    pub(super) fn device_pools(&mut self) -> (u64, u64) {
        if self.pools.default == 0 {
            let pool = Pool { max: u64::MAX, ..Pool::default() };
            self.pools.default = self.pools.table.insert(pool);
            self.pools.current = self.pools.default;
        }
        (self.pools.default, self.pools.current)
    }

    pub(super) fn pool_create(&mut self, max: u64) -> u64 {
        self.device_pools();
        let max = if max == 0 { u64::MAX } else { max };
        self.pools.table.insert(Pool { max, ..Pool::default() })
    }

    pub(super) fn pool_use(&mut self, pool: u64) -> Answer {
        self.call = Call::PoolCreate;
        self.device_pools();
        if self.pools.get(pool).is_none() {
            return Err(self.no_pool(pool));
        }
        self.pools.current = pool;
        Ok(())
    }

    /// The error of a call with a pool that is gone, or never was.
    pub(super) fn no_pool(&mut self, number: u64) -> DriverError {
        let (call, kind) = (self.call, HandleKind::Pool);
        self.refuse(Fault::StaleHandle { call, kind, number }, INVALID_VALUE)
    }

    /// Ends a pool; its memory goes back as its blocks do.
    pub(super) fn pool_destroy(&mut self, pool: u64) -> Answer {
        let default = self.device_pools().0;
        if pool == default {
            return Err(self.fail(INVALID_VALUE));
        }
        let Some(ended) = self.pools.get_mut(pool) else {
            return Err(self.no_pool(pool));
        };
        ended.gone = true;
        if self.pools.current == pool {
            self.pools.current = default;
        }
        let free = self.pools.blocks.iter().filter(|(_, it)| it.pool == pool);
        let free = free.filter(|(_, it)| matches!(it.state, State::Free { .. }));
        let free: Vec<u64> = free.map(|(at, _)| *at).collect();
        free.into_iter().for_each(|at| self.drop_block(at));
        self.bury(pool);
        Ok(())
    }

    fn bury(&mut self, pool: u64) {
        if self.pools.table.get(pool).is_some_and(|it| it.gone && it.reserved == 0) {
            self.pools.table.remove(pool);
        }
    }

    /// Returns the number of pools created and not destroyed. Cost: O(pools).
    pub(super) fn pools_made(&self) -> u64 {
        let all = self.pools.table.values().filter(|it| !it.gone).count() as u64;
        all - u64::from(self.pools.default != 0)
    }

    /// Releases memory that the host knows to be free, until at most `keep` bytes are left.
    pub(super) fn trim(&mut self, pool: u64, keep: u64) {
        let known = self.pools.blocks.iter().filter(|(_, it)| {
            it.pool == pool && matches!(it.state, State::Free { observed: true, .. })
        });
        let known: Vec<u64> = known.map(|(at, _)| *at).collect();
        for at in known {
            if self.pools.table.get(pool).is_none_or(|it| it.reserved <= keep) {
                break;
            }
            self.drop_block(at);
        }
    }

    /// Releases memory above the threshold of each pool, at a synchronising call.
    pub(super) fn pools_settle(&mut self) {
        let pooled = self.pools.blocks.values().filter(|it| it.pool != PLAIN);
        let pools: std::collections::BTreeSet<u64> = pooled.map(|it| it.pool).collect();
        for pool in pools {
            let keep = self.pools.table.get(pool).map_or(0, |it| it.threshold);
            self.trim(pool, keep);
        }
    }

    fn drop_block(&mut self, at: u64) {
        let Some(block) = self.pools.blocks.remove(&at) else { return };
        self.memory.displace(at);
        if let Some(pool) = self.pools.table.get_mut(block.pool) {
            pool.reserved -= block.charged;
        }
    }

    /// Finds memory for a block; it is not counted yet.
    fn place(&mut self, size: u64, charged: u64) -> Option<u64> {
        let room = self.headroom().get() >= charged;
        let unit = self.options.handle_min.get();
        if room { self.memory.place(size, charged, unit) } else { None }
    }

    /// Plain memory, ready at once.
    pub(super) fn alloc_plain(&mut self, size: u64) -> Answer<u64> {
        if size == 0 {
            return Err(self.fail(INVALID_VALUE));
        }
        let charged = size.checked_next_multiple_of(BLOCK_STEP);
        let place = charged.and_then(|charged| Some((self.place(size, charged)?, charged)));
        let Some((at, charged)) = place else {
            return Err(self.fail(OUT_OF_MEMORY));
        };
        self.memory.open(at, size);
        let block = Block { pool: PLAIN, used: size, charged, state: State::Live };
        self.pools.blocks.insert(at, block);
        Ok(at)
    }

    /// Memory of a pool, in the order of a live stream.
    pub(super) fn alloc_ordered(&mut self, pool: u64, size: u64, stream: u64) -> Answer<u64> {
        self.live_stream(stream)?;
        self.forbid_in_capture(stream, UNSUPPORTED)?;
        if self.pools.get(pool).is_none() {
            return Err(self.no_pool(pool));
        }
        let used = size.checked_next_multiple_of(USED_STEP).filter(|used| *used > 0);
        let charged = size.checked_next_multiple_of(BLOCK_STEP);
        let (Some(used), Some(charged)) = (used, charged) else {
            return Err(self.fail(INVALID_VALUE));
        };
        let reused = self.reusable(pool, charged, stream);
        let at = reused.or_else(|| self.grow(pool, charged));
        let at = at.ok_or_else(|| self.fail(OUT_OF_MEMORY))?;
        if let Some(block) = self.pools.blocks.get_mut(&at) {
            block.state = State::Live;
            block.used = used;
        }
        if let Some(pool) = self.pools.table.get_mut(pool) {
            pool.used += used;
            pool.used_high = pool.used_high.max(pool.used);
        }
        self.queue(stream, Work::Open(at, size)).map(|()| at)
    }

    /// The smallest free block of at least this size and less than twice of it.
    fn reusable(&self, pool: u64, charged: u64, stream: u64) -> Option<u64> {
        let fits = |block: &Block| {
            let free = match block.state {
                State::Live => false,
                State::Freeing(_, of) => of == stream,
                State::Free { .. } => true,
            };
            let size = charged..charged.saturating_mul(2);
            free && block.pool == pool && size.contains(&block.charged)
        };
        let fitting = self.pools.blocks.iter().filter(|(_, block)| fits(block));
        fitting.min_by_key(|(at, block)| (block.charged, **at)).map(|(at, _)| *at)
    }

    /// A new block for a pool, within its limit and the device's.
    fn grow(&mut self, pool: u64, charged: u64) -> Option<u64> {
        let max = self.pools.table.get(pool)?.max;
        let keep = max.checked_sub(charged)?;
        if self.pools.table.get(pool)?.reserved > keep {
            self.trim(pool, keep);
        }
        if self.headroom().get() < charged {
            self.trim(pool, 0);
        }
        let kept = self.pools.table.get(pool)?.reserved;
        let at = if kept <= keep { self.place(charged, charged)? } else { return None };
        // Freed as nothing was before it: in no stream.
        let freed = Position { stream: 0, count: 0 };
        let state = State::Free { freed, observed: true };
        self.pools.blocks.insert(at, Block { pool, used: 0, charged, state });
        let pool = self.pools.table.get_mut(pool)?;
        pool.reserved += charged;
        pool.reserved_high = pool.reserved_high.max(pool.reserved);
        Some(at)
    }

    /// Frees in the order of a live stream.
    pub(super) fn free_ordered(&mut self, at: u64, stream: u64) -> Answer {
        self.live_stream(stream)?;
        self.forbid_in_capture(stream, UNSUPPORTED)?;
        let free = self.unused(at, stream)?;
        self.queue(stream, Work::Close(at, free))
    }

    /// Frees once all work of the device is done.
    pub(super) fn free_plain(&mut self, at: u64) -> Answer {
        if !self.pools.blocks.get(&at).is_some_and(|it| it.state == State::Live) {
            return self.unused(at, 0).map(drop);
        }
        self.run_all();
        self.lost_in()?;
        let free = self.unused(at, 0)?;
        self.close_block(at, free, Position { stream: 0, count: 0 });
        self.observe_all();
        self.pools_settle();
        Ok(())
    }

    /// Begins and numbers the free of a block in use; an error if it is not in use.
    fn unused(&mut self, at: u64, stream: u64) -> Answer<u64> {
        let Some(block) = self.pools.blocks.get_mut(&at).filter(|it| it.state == State::Live)
        else {
            let fault = Fault::NotAllocated { call: self.call, at: DeviceAddress::new(at) };
            return Err(self.refuse(fault, INVALID_VALUE));
        };
        self.pools.frees += 1;
        block.state = State::Freeing(self.pools.frees, stream);
        if let Some(pool) = self.pools.table.get_mut(block.pool) {
            pool.used -= block.used;
        }
        Ok(self.pools.frees)
    }

    /// Opens a block for use on its stream, with scrambled contents.
    pub(super) fn open_block(&mut self, at: u64, size: u64) {
        self.memory.open(at, size);
        self.memory.wipe(Range { at, size });
    }

    /// A block goes out of use on its stream, at this place of it.
    pub(super) fn close_block(&mut self, at: u64, free: u64, done: Position) {
        self.memory.open(at, 0);
        let Some(block) = self.pools.blocks.get_mut(&at) else { return };
        // If the same stream has reused the block meanwhile, that use continues.
        if !matches!(block.state, State::Freeing(of, _) if of == free) {
            return;
        }
        let pool = block.pool;
        block.state = State::Free { freed: done, observed: false };
        if self.pools.get(pool).is_none() {
            self.drop_block(at);
            self.bury(pool);
        }
    }

    /// The host has seen that all before this place of a stream is done.
    pub(super) fn observe(&mut self, seen: Position) {
        for block in self.pools.blocks.values_mut() {
            if let State::Free { freed, observed } = &mut block.state {
                *observed |=
                    freed.stream == 0 || (freed.stream == seen.stream && freed.count <= seen.count);
            }
        }
    }

    /// The host has seen that all is done.
    pub(super) fn observe_all(&mut self) {
        for block in self.pools.blocks.values_mut() {
            if let State::Free { observed, .. } = &mut block.state {
                *observed = true;
            }
        }
    }
}
