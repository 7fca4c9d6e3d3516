//! The thread cache: freed blocks of frequent sizes, reused without the arena's lock.
//!
//! Each thread has a home (threads share homes if there are more threads than homes), and each home
//! has a cache behind its own lock, contended only by reclaim and by other threads of that home. A
//! block returns to the home that it was taken from. A size is hot if it was requested `HOT` times
//! recently. In the arena's accounting a cached block is live; the cache knows its bytes. It makes
//! no driver calls. Reclaim empties the caches first, so that a cache never keeps memory that the
//! arena needs. [`kept`](crate::exec::kept) selects the blocks.
//!
//! On drivers with asynchronous work threads cache nothing, because the next block might go to
//! another stream. There each lane has a home, whose cache holds blocks that only this lane used;
//! it can reuse them immediately, because its work runs in order. When such a block returns to the
//! arena, it is freed with the lane's use at that time, which is no earlier than the block's.
//!
//! A cached block keeps the reference to its home that its buffer held, and the next buffer takes
//! it over: so an alloc/free pair touches no reference count, which would cost as much as its two
//! locks. A home with a non-empty cache therefore keeps itself alive; the arena's last handle
//! empties all caches for good, and the end of a lane that lane's. A cached block holds no lane.
//!
//! Invariants: `cached = sum of the blocks in the cache <= room`; a cached block is handed out at
//! most once; no cache lock is taken under the arena's lock; without a handle of the arena every
//! cache is empty.
#![expect(unsafe_code, reason = "a block that holds its home is put into that home")]

use std::cell::Cell;
use std::fmt;
use std::sync::Arc;
use std::sync::atomic::AtomicUsize as Number;
use std::thread;

use crate::exec::brief::{Brief, BriefGuard, brief, try_brief};
use crate::exec::inner::ArenaInner;
use crate::exec::kept::{HOT, Heat, Key, ThreadCache};
use crate::exec::lane::LaneInner;
use crate::state::arena::ArenaState;
use crate::state::cached::{CacheCounts, Swept};
use crate::state::region::{Placement, Region};
use crate::state::streams::StreamKey;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};

/// Homes of an arena at most.
const HOMES_MAX: usize = 64;

/// A block with its home, owned by a buffer or by a cache. On the heap, so that it is passed on as
/// a pointer.
#[derive(Debug)]
pub(crate) struct BlockHandle {
    pub(crate) home: Arc<CacheShard>,
    pub(crate) region: Region,
    /// `None` if a buffer's elements have no bytes; never `None` in a cache.
    pub(crate) block: Option<Placement>,
    /// The last known place of the block.
    pub(crate) place: BlockPlace,
    /// The lanes that use the block, first the one that allocated it. Empty in a cache.
    pub(crate) lanes: Vec<Arc<LaneInner>>,
    /// Its address was out with code that uses streams of its own.
    pub(crate) foreign: bool,
}

/// The place of a block at a count of moves of its region.
#[derive(Debug)]
pub(crate) struct BlockPlace {
    pub(crate) at: AtomicU64,
    pub(crate) moves: AtomicU64,
}

impl BlockPlace {
    pub(crate) fn of(block: Option<Placement>) -> Self {
        let (at, moves) = block.map_or((0, 0), |block| (block.at.get(), block.moves));
        Self { at: AtomicU64::new(at), moves: AtomicU64::new(moves) }
    }
}

impl BlockHandle {
    pub(crate) fn new(
        home: Arc<CacheShard>,
        region: Region,
        block: Option<Placement>,
    ) -> Box<Self> {
        Box::new(Self {
            home,
            region,
            block,
            place: BlockPlace::of(block),
            lanes: Vec::new(),
            foreign: false,
        })
    }

    /// Frees the block: into its home's cache if its size is hot, else in the arena. Does nothing
    /// in a forked child.
    #[inline]
    pub(crate) fn release(mut self: Box<Self>) {
        let Some(placed) = &self.block else { return };
        let (home, inner) = (&self.home, &self.home.inner);
        if inner.check_here().is_err() {
            return;
        }
        let fits = inner.is_fresh(self.region, placed)
            && placed.span.size <= home.room()
            && home.is_of(&self.lanes)
            && !self.foreign;
        if !fits {
            return self.free();
        }
        // Released last: if it is the last of its lane, the lane's end empties the cache.
        let lane = self.lanes.pop();
        if let Some(mut left) = self.give() {
            left.lanes.extend(lane);
            left.free();
        }
    }

    /// Frees the block in the arena.
    fn free(&self) {
        if let Some(placed) = self.block {
            let lanes = if self.foreign { &[][..] } else { &self.lanes };
            self.home.inner.release_after(self.region, placed, lanes);
        }
    }

    /// Puts the block into its home's cache; returns it if the arena must free it: its size is not
    /// hot, there is no room, or the cache is busy.
    #[inline]
    fn give(self: Box<Self>) -> Option<Box<Self>> {
        // SAFETY: this block holds the home until it is put into the cache below. Once the cache's
        // lock is released after that, another thread may take it out and release the home: so
        // `home` is not used after that, and the guard's last act is a store to the lock, an
        // atomic, whose reference need not outlive the store.
        let home = unsafe { &*Arc::as_ptr(&self.home) };
        let Some(mut front) = try_brief(&home.front) else {
            home.inner.note_contended();
            return Some(self);
        };
        // Both under the cache's lock: a thread that empties it after shutting the caches finds
        // this block, or this finds no room.
        let Some(vacant) = front.admit(&self, home.room()) else { return Some(self) };
        *vacant = Some(self);
        home.inner.note_kept();
        home.cached.store(front.tally.cached(), Ordering::Relaxed);
        None
    }
}

/// The home of blocks of some threads, or of one lane. Buffers hold it, so that neither allocating
/// nor freeing touches a count that other threads use.
#[repr(align(128))]
pub(crate) struct CacheShard {
    pub(crate) inner: Arc<ArenaInner>,
    /// The stream, for a lane's home.
    stream: Option<StreamKey>,
    front: Brief<ThreadCache>,
    /// Cached byte count, readable without the lock.
    cached: AtomicU64,
}

impl CacheShard {
    fn new(inner: Arc<ArenaInner>, stream: Option<StreamKey>) -> Self {
        let front = Brief::new(ThreadCache::default());
        Self { inner, stream, front, cached: AtomicU64::new(0) }
    }

    /// The home of a lane, known to the arena until [`CacheShard::retire`].
    pub(crate) fn of_lane(inner: &Arc<ArenaInner>, stream: StreamKey) -> Arc<Self> {
        let home = Arc::new(Self::new(Arc::clone(inner), Some(stream)));
        inner.fronts.add(&home);
        home
    }

    /// Returns the maximum bytes that its cache may keep now.
    #[inline]
    pub(crate) fn room(&self) -> u64 {
        match self.stream {
            Some(_) => self.inner.lane_room(),
            None => self.inner.front_room(),
        }
    }

    /// Returns a block of its cache in the form for freeing it in the arena.
    pub(crate) const fn swept(&self, region: Region, placed: Placement) -> Swept {
        ((region, placed), self.stream)
    }

    /// Returns `true` if a block used by these lanes may be kept in its cache.
    #[inline]
    fn is_of(&self, lanes: &[Arc<LaneInner>]) -> bool {
        match (lanes, self.stream) {
            ([], None) => true,
            ([lane], Some(stream)) => lane.key() == Some(stream),
            _ => false,
        }
    }

    /// Frees the cached blocks in the arena and adds the cache's counts to the arena's: its lane
    /// has ended.
    pub(crate) fn retire(&self) {
        let mut front = brief(&self.front);
        let mut books = self.inner.lock_state();
        self.empty_into(&mut front, &mut books);
        books.add_front(&std::mem::take(&mut front.tally));
        drop((books, front));
        self.inner.fronts.remove(self);
    }

    /// Frees the cached blocks in the arena.
    pub(crate) fn give_up(&self) {
        if self.cached() > 0 {
            let mut front = brief(&self.front);
            self.empty_into(&mut front, &mut self.inner.lock_state());
        }
    }

    fn empty_into(&self, front: &mut ThreadCache, books: &mut ArenaState) {
        let clock = &*self.inner.clock;
        front.empty(|_| true, |kept| books.release_swept((kept, self.stream), clock));
        self.cached.store(0, Ordering::Relaxed);
    }

    /// Takes a block of this size from the cache; `None` if it has none, or is busy.
    ///
    /// If it has none, all its blocks return to the arena unless that is busy: the request is then
    /// placed with all free space available, as closely as without caches.
    #[inline]
    pub(crate) fn take(&self, key: Key, requested: u64) -> Option<Box<BlockHandle>> {
        let Some(mut front) = try_brief(&self.front) else {
            self.inner.note_contended();
            // Loom runs an execution again and again: nothing may outlive one.
            if !cfg!(lowtide_loom) {
                move_thread();
            }
            return None;
        };
        let taken = front.take(key, requested);
        if taken.is_none() {
            if front.tally.cached() == 0 {
                return None;
            }
            self.empty_into(&mut front, &mut *self.inner.try_lock_state()?);
            return None;
        }
        self.cached.store(front.tally.cached(), Ordering::Relaxed);
        taken
    }

    /// Takes all blocks out.
    pub(crate) fn empty(&self, out: &mut Vec<Swept>) {
        self.sweep(out, |_| true);
    }

    /// Halves the heat of every size and takes out the blocks of those that are no longer hot;
    /// returns `true` if any stay.
    pub(crate) fn cool(&self, out: &mut Vec<Swept>) -> bool {
        let mut front = brief(&self.front);
        front.cool();
        drop(front);
        self.sweep(out, |heat| heat < HOT)
    }

    /// Returns the cached bytes, read without the lock.
    #[inline]
    pub(crate) fn cached(&self) -> u64 {
        self.cached.load(Ordering::Relaxed)
    }

    /// Locks the cache: its figures are valid until the guard is dropped.
    pub(crate) fn still(&self) -> Still<'_> {
        Still(brief(&self.front))
    }

    fn sweep(&self, out: &mut Vec<Swept>, gone: impl Fn(Heat) -> bool) -> bool {
        let mut front = brief(&self.front);
        front.empty(gone, |kept| out.push((kept, self.stream)));
        self.cached.store(front.tally.cached(), Ordering::Relaxed);
        front.tally.cached() > 0
    }
}

/// All homes of an arena, held by its handles.
#[derive(Debug)]
pub(crate) struct CacheShards(Box<[Arc<CacheShard>]>);

impl CacheShards {
    /// Makes the homes of an arena, and makes them known to it.
    pub(crate) fn new(inner: &Arc<ArenaInner>) -> Self {
        let homes: Box<[_]> =
            (0..homes()).map(|_| Arc::new(CacheShard::new(Arc::clone(inner), None))).collect();
        inner.fronts.know(homes.iter().map(Arc::downgrade).collect());
        Self(homes)
    }

    /// The home of this thread.
    #[inline]
    pub(crate) fn here(&self) -> &Arc<CacheShard> {
        // Indexed by `homes`: a power of two, at least two.
        &self.0[thread_number() & (self.0.len() - 1)]
    }
}

impl Drop for CacheShards {
    /// Empties the caches for good: the last handle of the arena was dropped.
    fn drop(&mut self) {
        if let Some(home) = self.0.first() {
            home.inner.retire_fronts();
        }
    }
}

/// A locked cache.
pub(crate) struct Still<'a>(BriefGuard<'a, ThreadCache>);

impl Still<'_> {
    pub(crate) fn tally(&self) -> CacheCounts {
        self.0.tally
    }
}

impl fmt::Debug for CacheShard {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CacheShard").field("cached", &self.cached()).finish_non_exhaustive()
    }
}

/// Returns the number of homes of an arena: four for each thread that can run at once, so that
/// threads which move from a busy home find their own.
fn homes() -> usize {
    let threads = thread::available_parallelism().map_or(1, usize::from);
    threads.saturating_mul(4).next_power_of_two().clamp(8, HOMES_MAX)
}

/// Numbers of threads, counted up.
static NEXT: Number = Number::new(0);

thread_local! {
    static NUMBER: Cell<usize> = const { Cell::new(usize::MAX) };
}

/// Returns the number of this thread, which selects its home.
#[inline]
fn thread_number() -> usize {
    // A thread that is ending has no number any more: any home will do.
    let number = NUMBER.try_with(Cell::get).unwrap_or(0);
    if number == usize::MAX { move_thread() } else { number }
}

/// Gives this thread a new number, and so a new home: another thread uses the one it had.
fn move_thread() -> usize {
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    let _ = NUMBER.try_with(|current| current.set(number));
    number
}
