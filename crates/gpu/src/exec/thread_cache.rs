//! The thread cache: freed blocks of frequent sizes, reused without the arena's lock.
//!
//! Each thread has a shard (threads share shards if there are more threads than shards), and each
//! shard has a cache with its own lock. Only a release of idle memory and other threads of that
//! shard contend for the lock. A block returns to the shard that it was taken from. A size is hot
//! if it was requested `HOT` times recently. In the arena's state a cached block is live; the cache
//! knows the bytes that it holds. The cache makes no driver calls. The caches are emptied before
//! idle memory is released, so that a cache never keeps memory that the arena needs.
//! [`ThreadCache`] selects the blocks to keep.
//!
//! On drivers with asynchronous work threads cache nothing, because the next buffer might use
//! another stream. Instead each lane has a shard, whose cache holds blocks that only this lane
//! used. The lane can reuse them immediately, because its work runs in order. When such a block
//! returns to the arena, it is freed with the lane's latest use at that time, which is no earlier
//! than the block's.
//!
//! A cached block keeps the reference to its shard that its buffer held, and the next buffer takes
//! the reference over. So an alloc/free pair touches no reference count, which would cost as much
//! as the two locks of the pair. A shard with a non-empty cache therefore keeps itself alive;
//! dropping the arena's last handle empties all caches for good, and the end of a lane empties that
//! lane's cache. A cached block holds no lane.
//!
//! Invariants: `cached = sum of the blocks in the cache <= room`; a cached block is handed out at
//! most once; no cache lock is taken while the state's lock is held; when the arena has no handle,
//! every cache is empty.
#![expect(unsafe_code, reason = "a block that holds its shard is put into that shard")]

use std::cell::Cell;
use std::mem::ManuallyDrop;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Number;
use std::thread;

use smallvec::SmallVec;

use crate::engine::context::Surroundings as _;
use crate::exec::inner::ArenaInner;
use crate::exec::lane::LaneInner;
#[cfg(feature = "cuda")]
use crate::exec::view::{self, CachedView, EndedViews, Order, ViewSlot};
use crate::state::{ArenaState, CacheCounts, Placement, StreamKey};
use crate::types::Region;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};
#[cfg(feature = "cuda")]
use lowtide_core::sync::{Mutex, lock};

/// The maximum number of shards of an arena.
const HOMES_MAX: usize = 64;

/// A block and its shard, owned by a buffer or by a cache. Allocated on the heap, so that it is
/// passed on as a pointer.
pub(crate) struct BlockHandle {
    pub(crate) shard: Arc<CacheShard>,
    pub(crate) region: Region,
    /// The place of the block; `None` if the buffer's elements have no bytes; never `None` in a
    /// cache.
    pub(crate) block: Option<Placement>,
    /// The last known place of the block.
    pub(crate) place: BlockPlace,
    /// The lanes that use the block, starting with the lane that allocated it. Empty in a cache.
    pub(crate) lanes: Lanes,
    /// `true` if code with its own streams has had the block's address.
    pub(crate) foreign: bool,
    /// The next block of the same size in a cache; `None` outside.
    pub(crate) next: Option<Box<Self>>,
    #[cfg(feature = "cuda")]
    pub(crate) view: ViewSlot,
}

/// The place of a block at a given count of moves of its region.
#[derive(Debug)]
pub(crate) struct BlockPlace {
    pub(crate) at: AtomicU64,
    pub(crate) moves: AtomicU64,
}

impl BlockPlace {
    pub(crate) fn of(block: Option<Placement>) -> Self {
        let (at, moves) = if let Some(of) = block { (of.at.get(), of.moves) } else { (0, 0) };
        Self { at: AtomicU64::new(at), moves: AtomicU64::new(moves) }
    }
}

impl BlockHandle {
    pub(crate) fn new(
        shard: Arc<CacheShard>,
        region: Region,
        block: Option<Placement>,
    ) -> Box<Self> {
        Box::new(Self {
            shard,
            region,
            block,
            place: BlockPlace::of(block),
            lanes: Lanes::NONE,
            foreign: false,
            next: None,
            #[cfg(feature = "cuda")]
            view: ViewSlot::default(),
        })
    }

    /// Frees the block: into its shard's cache if its size is hot, otherwise in the arena. Does
    /// nothing in a forked child.
    #[inline]
    pub(crate) fn release(mut self: Box<Self>) {
        if self.shard.inner.check_here().is_err() {
            return;
        }
        let fits = self.fits();
        #[cfg(feature = "cuda")]
        let Some(fits) = self.end_view(fits) else { return self.hold() };
        if !fits {
            return self.free();
        }
        // Dropped last: if this is the last reference to the lane, its end empties the cache.
        let lane = self.lanes.take_only();
        if let Err(mut left) = self.give() {
            lane.into_iter().for_each(|lane| left.lanes.add(lane));
            #[cfg(feature = "cuda")]
            if left.end_view(false).is_none() {
                return left.hold();
            }
            left.free();
        }
    }

    /// Returns `true` if the block's shard may cache the block.
    #[inline]
    fn fits(&self) -> bool {
        let (shard, inner) = (&self.shard, &self.shard.inner);
        let Some(placed) = &self.block else { return false };
        placed.span.size <= inner.caches.room(shard.stream)
            && inner.is_fresh(placed)
            && shard.is_of(&self.lanes)
            && !self.foreign
    }

    /// Ends the use of the block's view, which stays with the block if that is cached. If its
    /// stream could not wait for others, all work of the device comes before the memory's next use.
    /// Returns `true` if the block may be cached; `None` if a graph may have captured it: then the
    /// view is left to the lane, whose stream may capture now.
    #[cfg(feature = "cuda")]
    #[inline]
    fn end_view(&mut self, stays: bool) -> Option<bool> {
        if self.view.is_captured(|| self.lanes.is_any_capturing()) {
            return None;
        }
        // A cold block is not cached, and its view would be discarded after all.
        let stays = stays && (!self.view.is_used() || self.is_hot());
        let inner = &self.shard.inner;
        let order = if stays { self.view.settle(inner) } else { self.view.discard(inner) };
        match order {
            Order::After => Some(stays),
            Order::Unknown => {
                self.lanes = Lanes::NONE;
                Some(false)
            }
            Order::Captured => None,
        }
    }

    /// Holds the memory of a block that a graph may have captured.
    #[cfg(feature = "cuda")]
    #[cold]
    fn hold(&self) {
        if let Some(placed) = self.block {
            self.shard.inner.run_now(|state| state.hold_block(placed));
        }
    }

    #[cfg(feature = "cuda")]
    fn is_hot(&self) -> bool {
        let cache = spin_lock(&self.shard.cache);
        let key = self.block.map(|placed| CacheKey::new(self.region, placed.span.size));
        key.is_some_and(|key| cache.hot(key).is_some())
    }

    /// Frees a cached block in the arena. The handle is to be dropped without a lock.
    pub(crate) fn release_into(&self, state: &mut ArenaState) {
        if let Some(placed) = self.block {
            state.release_after(placed, self.shard.stream.as_slice());
        }
    }

    /// Frees the block in the arena, after the work of its lanes or, without one, of any stream:
    /// only updates bookkeeping.
    fn free(&self) {
        let Some(placed) = self.block else { return };
        let lanes = if self.foreign { &Lanes::NONE } else { &self.lanes };
        let streams: SmallVec<[_; 1]> = lanes.iter().filter_map(|lane| lane.key).collect();
        self.shard.inner.run_now(|state| state.release_after(placed, &streams));
    }

    /// Puts the block into its shard's cache. Returns the block if the arena must free it: its size
    /// is not hot, there is no room, or the cache is busy.
    #[inline]
    fn give(self: Box<Self>) -> Result<(), Box<Self>> {
        // SAFETY: this block holds the shard until the block is put into the cache below. Once the
        // cache's lock is released after that, another thread may take the block out and release
        // the shard: so `shard` is not used after that, and the guard's last act is a store to the
        // lock, an atomic, whose reference need not outlive the store.
        let shard = unsafe { &*Arc::as_ptr(&self.shard) };
        let Some(mut cache) = try_spin_lock(&shard.cache) else {
            shard.inner.note_contended();
            return Err(self);
        };
        // The room is read under the cache's lock: a thread that empties the cache after shutting
        // the caches either finds this block in the cache, or this block finds no room.
        cache.admit(self, shard.inner.caches.room(shard.stream))?;
        shard.inner.note_cached();
        shard.cached.store(cache.tally.cached(), Ordering::Relaxed);
        Ok(())
    }
}

#[cfg(feature = "cuda")]
impl Drop for BlockHandle {
    /// Leaves the view of a block that left the cache to the lane.
    fn drop(&mut self) {
        let Some(kept) = self.view.take() else { return };
        if self.shard.inner.check_here().is_err() {
            let _ = ManuallyDrop::new(kept); // its context belongs to the parent
            return;
        }
        self.shard.leave_view(kept);
    }
}

/// The lanes that use a block, in the order in which they were added. One lane takes no memory of
/// its own.
#[derive(Debug)]
pub(crate) struct Lanes {
    first: Option<Arc<LaneInner>>,
    /// Boxed, so that a block's handle has one of malloc's small sizes.
    others: Option<Box<OtherLanes>>,
}

#[derive(Debug, Default)]
struct OtherLanes(Vec<Arc<LaneInner>>);

impl Lanes {
    pub(crate) const NONE: Self = Self { first: None, others: None };

    #[inline]
    pub(crate) fn add(&mut self, lane: Arc<LaneInner>) {
        if self.first.is_none() {
            self.first = Some(lane);
        } else {
            self.others.get_or_insert_default().0.push(lane);
        }
    }

    /// Returns the lane if there is only one.
    #[inline]
    pub(crate) fn only(&self) -> Option<&Arc<LaneInner>> {
        if self.others.is_none() { self.first.as_ref() } else { None }
    }

    /// Takes out the lane that was added first; there is no other.
    #[inline]
    pub(crate) fn take_only(&mut self) -> Option<Arc<LaneInner>> {
        debug_assert!(self.others.is_none(), "others would be lost");
        self.first.take()
    }

    /// Returns the lanes, the one that was added first at first.
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Arc<LaneInner>> {
        self.first.iter().chain(self.others.iter().flat_map(|others| &others.0))
    }

    /// Returns `true` if the stream of a lane captures a graph.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_any_capturing(&self) -> bool {
        self.iter().any(|lane| lane.is_capturing())
    }

    #[inline]
    pub(crate) const fn is_empty(&self) -> bool {
        self.first.is_none()
    }
}

/// The cache shard of some threads, or of one lane. Buffers hold a reference, so that neither
/// allocating nor freeing touches a count that other threads use.
#[repr(align(128))]
pub(crate) struct CacheShard {
    pub(crate) inner: Arc<ArenaInner>,
    /// The stream, for a lane's shard.
    pub(crate) stream: Option<StreamKey>,
    cache: SpinLock<ThreadCache>,
    /// Cached byte count, readable without the lock.
    cached: AtomicU64,
    /// The views of blocks that left the cache of a lane.
    #[cfg(feature = "cuda")]
    views: Mutex<EndedViews>,
}

impl CacheShard {
    /// Creates a shard, of a lane if it has a stream.
    pub(crate) fn new(inner: Arc<ArenaInner>, stream: Option<StreamKey>) -> Self {
        let cache = SpinLock::new(ThreadCache::default());
        Self {
            inner,
            stream,
            cache,
            cached: AtomicU64::new(0),
            #[cfg(feature = "cuda")]
            views: Mutex::default(),
        }
    }

    /// Leaves a view to the lane; discards it if the lane has ended.
    #[cfg(feature = "cuda")]
    pub(crate) fn leave_view(&self, kept: Box<dyn CachedView>) {
        let kept = lock(&self.views).add(kept);
        view::discard(&self.inner, kept);
    }

    /// Discards the views of blocks that left the cache; if the lane is `over`, also later ones.
    #[cfg(feature = "cuda")]
    pub(crate) fn discard_views(&self, over: bool) {
        let views = lock(&self.views).take(over);
        for kept in views {
            // The stream waited for the view's uses before the block was cached.
            let _ = view::discard(&self.inner, Some(kept));
        }
    }

    /// Returns `true` if the shard's cache may keep a block used by these lanes.
    #[inline]
    fn is_of(&self, lanes: &Lanes) -> bool {
        match self.stream {
            None => lanes.is_empty(),
            Some(stream) => lanes.only().is_some_and(|lane| lane.key == Some(stream)),
        }
    }

    /// Frees the cached blocks in the arena and adds the cache's counts to the arena's, after the
    /// shard's lane has ended.
    pub(crate) fn retire(&self) {
        let mut blocks = BlockList::default();
        let mut cache = spin_lock(&self.cache);
        self.inner.executor.run_now(|state| {
            self.empty_into(&mut cache, state, &mut blocks);
            state.add_cache(&std::mem::take(&mut cache.tally));
        });
        drop(cache);
        self.inner.caches.remove(self);
    }

    /// Frees the cached blocks in the arena. Returns `true` if there were any.
    pub(crate) fn give_up(&self) -> bool {
        let mut blocks = BlockList::default();
        if self.cached() > 0 {
            let mut cache = spin_lock(&self.cache);
            let inner = &self.inner;
            inner.executor.run_now(|state| self.empty_into(&mut cache, state, &mut blocks));
            drop(cache);
        }
        !blocks.is_empty()
    }

    /// Frees the cached blocks in the arena. The handles are left to be dropped without a lock.
    fn empty_into(&self, cache: &mut ThreadCache, state: &mut ArenaState, blocks: &mut BlockList) {
        cache.empty(blocks);
        blocks.iter().for_each(|owned| owned.release_into(state));
        self.cached.store(0, Ordering::Relaxed);
    }

    /// Takes a block of this size from the cache; returns `None` if the cache has none or is busy.
    ///
    /// If the cache has none but holds much memory, that returns to the arena, so that the block is
    /// placed in all free space: around cached blocks it would be placed as around live ones.
    #[inline]
    pub(crate) fn take(&self, key: CacheKey, requested: u64) -> Option<Box<BlockHandle>> {
        let Some(mut cache) = try_spin_lock(&self.cache) else {
            self.inner.note_contended();
            // Loom runs an execution many times, so no cached block may outlive one.
            if !cfg!(lowtide_loom) {
                move_thread();
            }
            return None;
        };
        let Some(taken) = cache.take(key, requested) else {
            drop(cache);
            if self.inner.caches.is_too_much(self.cached()) {
                self.give_up();
            }
            return None;
        };
        self.cached.store(cache.tally.cached(), Ordering::Relaxed);
        Some(taken)
    }

    /// Takes all blocks out of the cache.
    pub(crate) fn empty(&self, out: &mut BlockList) {
        let mut cache = spin_lock(&self.cache);
        cache.empty(out);
        self.cached.store(0, Ordering::Relaxed);
    }

    /// Halves the heat of every size, and takes out the blocks of sizes that are no longer hot and
    /// those that were not needed since the last call. Returns `true` if any blocks stay.
    pub(crate) fn cool(&self, out: &mut BlockList) -> bool {
        let mut cache = spin_lock(&self.cache);
        cache.cool(out);
        self.cached.store(cache.tally.cached(), Ordering::Relaxed);
        cache.tally.cached() > 0
    }

    /// Returns the cached bytes; read without the lock.
    #[inline]
    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed)
    }

    /// Locks the cache. Its figures are valid until the guard is dropped.
    pub(crate) fn still(&self) -> SpinLockGuard<'_, ThreadCache> {
        spin_lock(&self.cache)
    }
}

/// All shards of an arena. The arena's handles hold them.
pub(crate) struct CacheShards(Box<[Arc<CacheShard>]>);

impl CacheShards {
    /// Creates the shards of an arena, and registers them with it.
    pub(crate) fn new(inner: &Arc<ArenaInner>) -> Self {
        let shards: Box<[_]> =
            (0..shards()).map(|_| Arc::new(CacheShard::new(Arc::clone(inner), None))).collect();
        let known = inner.caches.shards.set(shards.iter().map(Arc::downgrade).collect());
        debug_assert!(known.is_ok(), "the shards are made once");
        Self(shards)
    }

    /// Returns the shard of this thread.
    #[inline]
    pub(crate) fn here(&self) -> &Arc<CacheShard> {
        // The number of shards is a power of two and at least two.
        let number = NUMBER.try_with(Cell::get).unwrap_or(0); // any, for a thread that is ending
        let number = if number == usize::MAX { move_thread() } else { number };
        &self.0[number & (self.0.len() - 1)]
    }
}

impl Drop for CacheShards {
    /// Empties the caches for good, because the last handle of the arena was dropped. Does nothing
    /// in a forked child.
    fn drop(&mut self) {
        if let Some(shard) = self.0.first().filter(|shard| shard.inner.check_here().is_ok()) {
            shard.inner.shut_caches();
        }
    }
}

/// Returns the number of shards of an arena: four for each thread that can run at once, so that
/// threads which move away from a busy shard find a free one.
fn shards() -> usize {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    threads.saturating_mul(4).next_power_of_two().clamp(8, HOMES_MAX)
}

/// The next thread number.
static NEXT: Number = Number::new(0);

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Moves this thread to a new number, and so to a new shard: another thread uses the old one.
fn move_thread() -> usize {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let _ = NUMBER.try_with(|current| current.set(number));
    number
}

// Locks for critical sections of a few instructions. In a build for model checking, loom's locks.

/// A lock for critical sections of a few instructions that is almost never contended. Acquiring the
/// lock costs one atomic operation, and releasing it none. A waiting thread yields.
#[cfg(not(lowtide_loom))]
type SpinLock<T> = spin::mutex::SpinMutex<T, spin::Yield>;
#[cfg(not(lowtide_loom))]
pub(crate) use spin::mutex::SpinMutexGuard as SpinLockGuard;

#[cfg(lowtide_loom)]
pub(crate) use loom::sync::{Mutex as SpinLock, MutexGuard as SpinLockGuard};

/// Takes a spin lock.
fn spin_lock<T>(lock: &SpinLock<T>) -> SpinLockGuard<'_, T> {
    #[cfg(not(lowtide_loom))]
    return lock.lock();
    #[cfg(lowtide_loom)]
    return lowtide_core::sync::lock(lock);
}

/// Takes a spin lock if it is free.
#[inline]
pub(crate) fn try_spin_lock<T>(lock: &SpinLock<T>) -> Option<SpinLockGuard<'_, T>> {
    #[cfg(not(lowtide_loom))]
    return lock.try_lock();
    #[cfg(lowtide_loom)]
    return lowtide_core::sync::try_lock(lock);
}

// The blocks of one thread cache, by size, for hot sizes. Plain values, protected by the cache's
// lock.
//
// A size is hot if it was requested [`HOT`] times recently. Each check cools all sizes, and each
// request for an unknown size cools one.
//
// The blocks of a size are a list through their handles, so they need no limit of their own: a
// cache is bounded by bytes and by [`BLOCKS_MAX`], and each check takes out the blocks that were
// not needed since the last one.
//
// Invariants: `cached = sum of its blocks`; a block that was handed out is not in the cache.

/// The number of requests for a size, reduced when the size cools.
type UseCount = u8;

/// The number of requests for a size since it last cooled, from which on the size is hot. A guess:
/// two may be a coincidence, so twice as many.
const HOT: UseCount = 4;

/// The maximum uses of a size: the size is cold at the second check after its last use.
const USES_MAX: UseCount = 4 * HOT - 1;

/// The maximum number of blocks in a cache: twice the 512 that cuArena's benchmark has live, and
/// 256 KiB of handles and index records. A cache holds no more blocks of a size than were live at a
/// time, because each returns to the cache that it was taken from.
const BLOCKS_MAX: usize = 1024;

/// The number of sizes in a cache, in sets of [`WAYS`]. A guess: twice the sizes of a forward pass.
const SETS: usize = 16;
const WAYS: usize = 4;

/// The key of a block size in a cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CacheKey(u64);

impl CacheKey {
    /// The key of no block.
    const NONE: Self = Self(0);

    /// Creates the key for blocks of this size, a positive multiple of 256 bytes, in this region.
    #[inline]
    pub(crate) const fn new(region: Region, size: u64) -> Self {
        Self(size | region as u64)
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

/// Blocks in a list through their handles, the last added first.
#[derive(Default)]
pub(crate) struct BlockList {
    last: Option<Box<BlockHandle>>,
    len: u32,
}

impl BlockList {
    const EMPTY: Self = Self { last: None, len: 0 };

    pub(crate) const fn is_empty(&self) -> bool {
        self.last.is_none()
    }

    #[inline]
    pub(crate) fn push(&mut self, mut owned: Box<BlockHandle>) {
        debug_assert!(owned.next.is_none(), "a block is in one list");
        // Not assigned, which would check if there is a block to drop.
        std::mem::swap(&mut owned.next, &mut self.last);
        let _none = ManuallyDrop::new(self.last.replace(owned));
        self.len += 1;
    }

    #[inline]
    fn pop(&mut self) -> Option<Box<BlockHandle>> {
        let mut owned = self.last.take()?;
        self.last = owned.next.take();
        self.len -= 1;
        Some(owned)
    }

    /// Takes out the blocks that were added first, all but this many. A step for each that stays.
    fn split_off(&mut self, keep: u32) -> Self {
        let mut end = &mut self.last;
        for _ in 0..keep {
            let Some(owned) = end else { return Self::EMPTY };
            end = &mut owned.next;
        }
        let (last, len) = (end.take(), self.len - keep);
        self.len = keep;
        Self { last, len }
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = &BlockHandle> {
        std::iter::successors(self.last.as_deref(), |owned| owned.next.as_deref())
    }
}

impl Drop for BlockList {
    /// Drops one handle after the other: a handle that dropped the next would overflow the stack.
    fn drop(&mut self) {
        while self.pop().is_some() {}
    }
}

/// The blocks of one size.
struct CacheClass {
    key: CacheKey,
    uses: UseCount,
    /// The smallest number of blocks since the last check: that many were not needed.
    least: u32,
    blocks: BlockList,
}

impl CacheClass {
    const VACANT: Self = Self { key: CacheKey::NONE, uses: 0, least: 0, blocks: BlockList::EMPTY };
}

/// The blocks in the cache of one shard.
#[derive(Default)]
pub(crate) struct ThreadCache {
    /// Empty until the first request, then `SETS x WAYS`.
    classes: Vec<CacheClass>,
    /// The number of blocks.
    kept: usize,
    pub(crate) tally: CacheCounts,
}

impl ThreadCache {
    /// Returns the entry of a size. If the size has no entry, cools the coldest of the set without
    /// blocks, and replaces it if it is cold.
    #[inline]
    fn claim(&mut self, key: CacheKey) -> Option<&mut CacheClass> {
        if self.classes.is_empty() {
            self.classes.extend((0..SETS * WAYS).map(|_| CacheClass::VACANT));
        }
        let set = key.ways();
        let ways = &mut self.classes[set..set + WAYS];
        if let Some(way) = ways.iter().position(|class| class.key == key) {
            return Some(&mut ways[way]);
        }
        // Each miss cools the coldest, so that a size which was requested once does not stay.
        let coldest = ways
            .iter_mut()
            .filter(|class| class.blocks.is_empty())
            .min_by_key(|class| class.uses)?;
        coldest.uses = coldest.uses.saturating_sub(1);
        if coldest.uses > 0 {
            return None;
        }
        *coldest = CacheClass { key, ..CacheClass::VACANT };
        Some(coldest)
    }

    #[inline]
    pub(crate) fn take(&mut self, key: CacheKey, requested: u64) -> Option<Box<BlockHandle>> {
        let class = self.claim(key)?;
        class.uses = USES_MAX.min(class.uses + 1);
        let mut owned = class.blocks.pop()?;
        class.least = class.least.min(class.blocks.len);
        self.kept -= 1;
        self.tally.allocs += 1;
        if let Some(placed) = &mut owned.block {
            placed.requested = requested;
            self.tally.went(placed);
        }
        Some(owned)
    }

    /// Keeps a freed block; returns the block if the arena must free it.
    #[inline]
    pub(crate) fn admit(
        &mut self,
        owned: Box<BlockHandle>,
        room: u64,
    ) -> Result<(), Box<BlockHandle>> {
        let Some(placed) = &owned.block else { return Err(owned) };
        if self.kept >= BLOCKS_MAX || self.tally.cached() + placed.span.size > room {
            return Err(owned);
        }
        let Some(hot) = self.hot(CacheKey::new(owned.region, placed.span.size)) else {
            return Err(owned);
        };
        self.kept += 1;
        self.tally.frees += 1;
        self.tally.came(placed);
        self.classes[hot].blocks.push(owned);
        Ok(())
    }

    /// Returns the entry of a size if the size is hot.
    #[inline]
    fn hot(&self, key: CacheKey) -> Option<usize> {
        let set = key.ways();
        let mut ways = self.classes.get(set..set + WAYS)?.iter();
        ways.position(|class| class.key == key && class.uses >= HOT).map(|way| set + way)
    }

    /// Takes out all blocks.
    pub(crate) fn empty(&mut self, out: &mut BlockList) {
        self.cut(|_| 0, out);
    }

    /// Halves the uses of every size. Takes out the blocks of sizes that are no longer hot, and
    /// those that were not needed since the last check.
    pub(crate) fn cool(&mut self, out: &mut BlockList) {
        for class in &mut self.classes {
            class.uses /= 2;
        }
        self.cut(|class| if class.uses < HOT { 0 } else { class.blocks.len - class.least }, out);
    }

    /// Takes out the blocks that were freed first, all but this many of each size.
    fn cut(&mut self, keep: impl Fn(&CacheClass) -> u32, out: &mut BlockList) {
        for class in &mut self.classes {
            let mut gone = class.blocks.split_off(keep(class));
            class.least = class.blocks.len;
            while let Some(owned) = gone.pop() {
                self.kept -= 1;
                if let Some(placed) = &owned.block {
                    // The arena counts the release, so the cache does not.
                    self.tally.frees -= 1;
                    self.tally.went(placed);
                }
                out.push(owned);
            }
        }
    }
}
