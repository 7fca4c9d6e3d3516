//! The parts of one arena that its handles, buffers and leases share: the driver, the state, and
//! the thread caches.
//!
//! Operations on the state go through the executor, which takes the lock and counts contended
//! acquisitions. This module makes no decisions.
//!
//! Invariants: no driver call under a lock; locks are taken in the order sweep, thread cache,
//! state; the arena's memory lives as long as a handle, a buffer or a lease of the arena.
#![expect(unsafe_code, reason = "the end of the arena gives its memory up")]

use std::ops::ControlFlow;
use std::pin::pin;
use std::ptr;
use std::sync::{Arc, OnceLock, Weak};

use crate::driver::{Capabilities, Driver};
use crate::engine::alloc::{self, Begun};
use crate::engine::callbacks::Callbacks;
use crate::engine::completion::query_events;
use crate::engine::context::{OpContext, ShutCaches, Surroundings};
use crate::engine::import::{end_imports, forget_imports};
use crate::engine::shortage::record_failure;
use crate::engine::{raw_block, stores};
use crate::exec::executor::Executor;
#[cfg(test)]
use crate::exec::executor::StateSlot;
use crate::exec::reserve;
use crate::exec::thread_cache::{BlockList, CacheShard};
use crate::record::{Line, Recording};
use crate::state::{
    AllocFailure, AllocRequest, ArenaState, CacheCounts, Placement, RawUser, RequestOrigin,
    StreamKey,
};
use crate::types::{ArenaSnapshot, DeviceError, Region, Result};
use lowtide_core::clock::Clock;
use lowtide_core::decay::DecayTime;
#[cfg(test)]
use lowtide_core::sync::MutexGuard;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};
use lowtide_core::{ByteSize, log};

/// The shared parts of an arena.
pub(crate) struct ArenaInner {
    pub(crate) name: String,
    pub(crate) driver: Arc<dyn Driver>,
    pub(crate) executor: Executor,
    pub(crate) capabilities: Capabilities,
    /// The smallest unit that the arena commits.
    pub(crate) granule: ByteSize,
    /// The largest block that each region could ever have.
    pub(crate) largest: [ByteSize; 2],
    pub(crate) caches: ArenaCaches,
    /// The callbacks for shortage of memory.
    pub(crate) callbacks: Arc<Callbacks>,
    /// `true` if the arena hands out nothing more; certain only if the state is locked.
    pub(crate) closed: AtomicBool,
    /// The recording of the events, if there is one.
    recording: Option<Recording>,
    /// CUDA errors that the view of a freed buffer left with cudarc.
    #[cfg(feature = "cuda")]
    pub(crate) parked: AtomicU64,
}

/// The number of lanes that may each cache as much as a thread. With more lanes each caches less,
/// so that all lanes together keep about this many times as much. A guess.
const LANES: u64 = 8;

/// The part of the live memory that a cache may hold if it lacks the requested block: a 128th to a
/// 64th. More raised the committed peaks of recorded models by up to 6 % (`benches/replay`).
const SPARE_PART: u64 = 128;

/// The part of a cache's maximum size up to which live memory is little. A guess.
const LITTLE_PART: u64 = 4;

/// The arena's view of the caches of its threads and lanes.
#[derive(Debug, Default)]
pub(crate) struct ArenaCaches {
    /// The shards of threads; set once, when the arena is opened.
    pub(crate) shards: OnceLock<Box<[Weak<CacheShard>]>>,
    /// The shards of lanes.
    lanes: Mutex<Vec<Weak<CacheShard>>>,
    /// The maximum bytes that the cache of each thread, or of each lane, may keep now, computed
    /// from the rules. Read under a cache's lock, so that a cache which was emptied after this
    /// became zero stays empty.
    room: AtomicU64,
    lane_room: AtomicU64,
    rules: Mutex<Rules>,
    /// `true` if little is left under the limit: cached memory would be missing elsewhere.
    tight: AtomicBool,
    /// The live memory, rounded up to a power of two, so that it seldom changes.
    live: AtomicU64,
    /// `true` if some cache may hold a block. Set under that cache's lock.
    hold: AtomicBool,
    /// Held while blocks are taken out of the caches, until the state has them: in between, neither
    /// counts them as free.
    sweep: Mutex<()>,
    /// The number of times that a thread found a cache busy.
    contended: AtomicU64,
}

/// The maximum size of a cache, and the reasons for which it is zero.
#[derive(Debug, Default)]
pub(crate) struct Rules {
    pub(crate) room_max: ByteSize,
    /// `true` if the device may still use freed blocks: threads then cache none.
    asynchronous: bool,
    /// The number of lanes with a cache.
    lanes: u64,
    /// `true` if idle memory is released immediately.
    pub(crate) at_once: bool,
    /// `true` if the arena sleeps: cached blocks would have no memory.
    asleep: bool,
    /// The number of threads that need the caches to be empty now.
    shut: u32,
}

impl ArenaCaches {
    /// Creates caches of this maximum size each; zero for threads if work is `asynchronous`.
    pub(crate) fn new(room_max: ByteSize, decay: DecayTime, asynchronous: bool) -> Self {
        let caches = Self::default();
        caches.set(|rules| {
            rules.asynchronous = asynchronous;
            rules.room_max = room_max;
            rules.at_once = decay == DecayTime::AtOnce;
        });
        caches
    }

    /// Registers the shard of a lane.
    pub(crate) fn add(&self, shard: &Arc<CacheShard>) {
        lock(&self.lanes).push(Arc::downgrade(shard));
        self.set(|rules| rules.lanes += 1);
    }

    /// Removes the shard of a lane.
    pub(crate) fn remove(&self, shard: &CacheShard) {
        lock(&self.lanes).retain(|known| !ptr::eq(known.as_ptr(), shard));
        self.set(|rules| rules.lanes -= 1);
    }

    /// Updates the live share of the limit: from seven eighths on, caches keep nothing.
    pub(crate) fn note_live(&self, live: u64, limit: u64) {
        let tight = live > limit - limit / 8;
        // Read first, as in `ArenaInner::note_cached`.
        if self.tight.load(Ordering::Relaxed) != tight {
            self.tight.store(tight, Ordering::Relaxed);
        }
        let live = live.next_power_of_two();
        if self.live.load(Ordering::Relaxed) != live {
            self.live.store(live, Ordering::Relaxed);
        }
    }

    /// Returns `true` if a cache that lacks the requested block must return its blocks.
    pub(crate) fn is_too_much(&self, cached: u64) -> bool {
        let live = self.live.load(Ordering::Relaxed);
        cached > live / SPARE_PART && self.is_in_way(cached, live)
    }

    /// Returns `true` if so many cached bytes are to be used before other memory. `live` includes
    /// them. If little is live, or half of it is cached, the program requests in turn what its
    /// caches hold: they keep it, up to their maximum size.
    fn is_in_way(&self, cached: u64, live: u64) -> bool {
        let room_max = lock(&self.rules).room_max.get();
        cached > room_max || (live > room_max / LITTLE_PART && cached < live / 2)
    }

    /// Returns the maximum bytes that the cache of a thread, or of a lane if it has a stream, may
    /// keep now.
    #[inline]
    pub(crate) fn room(&self, stream: Option<StreamKey>) -> u64 {
        if self.tight.load(Ordering::Relaxed) {
            return 0;
        }
        let room = if stream.is_some() { &self.lane_room } else { &self.room };
        room.load(Ordering::Relaxed)
    }

    /// Changes the rules.
    pub(crate) fn set(&self, change: impl FnOnce(&mut Rules)) {
        let mut rules = lock(&self.rules);
        change(&mut rules);
        let none = rules.at_once || rules.asleep || rules.shut > 0;
        let room = if none { 0 } else { rules.room_max.get() };
        self.room.store(if rules.asynchronous { 0 } else { room }, Ordering::Relaxed);
        self.lane_room.store(room / rules.lanes.div_ceil(LANES).max(1), Ordering::Relaxed);
    }
}

impl ArenaInner {
    /// Creates the shared parts of an arena.
    pub(crate) fn new(
        (driver, clock): (Arc<dyn Driver>, Arc<dyn Clock>),
        (thread_cache, decay): (ByteSize, DecayTime),
        state: ArenaState,
        recording: Option<Recording>,
    ) -> Self {
        let capabilities = driver.capabilities();
        // Thread caches would hide events.
        let cache = if recording.is_some() { ByteSize::ZERO } else { thread_cache };
        Self {
            name: state.name.clone(),
            driver,
            capabilities,
            granule: ByteSize::new(state.bytes_of(1)),
            largest: Region::ALL.map(|region| state.region(region).largest_ever()),
            executor: Executor::new(state, clock),
            recording,
            caches: ArenaCaches::new(cache, decay, capabilities.asynchronous),
            callbacks: Arc::new(Callbacks::new()),
            closed: AtomicBool::new(false),
            #[cfg(feature = "cuda")]
            parked: AtomicU64::new(0),
        }
    }

    /// Locks the state, for reading.
    #[cfg(test)]
    pub(crate) fn lock_state(&self) -> MutexGuard<'_, StateSlot> {
        self.executor.lock()
    }

    /// Locks the state if no other thread holds the lock.
    #[cfg(all(test, not(lowtide_loom)))]
    pub(crate) fn try_lock_state(&self) -> Option<MutexGuard<'_, StateSlot>> {
        self.executor.try_lock()
    }

    /// Reads or changes the state, without a wait or a driver call. Called without holding a lock:
    /// the sink of a recorder may block, and may use the arena.
    #[inline]
    pub(crate) fn run_now<T>(&self, act: impl FnOnce(&mut ArenaState) -> T) -> T {
        let outcome = self.executor.run_now(act);
        self.flush_events();
        outcome
    }

    /// Returns `true` if this is the block's current place.
    #[inline]
    pub(crate) fn is_fresh(&self, placed: &Placement) -> bool {
        placed.moves == self.executor.moves(placed.id.region())
    }

    /// Returns `true` if the arena has a recorder. Thread caches are off then.
    #[inline]
    pub(crate) const fn is_recorded(&self) -> bool {
        self.recording.is_some()
    }

    /// Records an event of something that did not change the state.
    pub(crate) fn push_event(
        &self,
        name: &'static str,
        fields: impl for<'a, 'b> FnOnce(&'a mut Line<'b>) -> &'a mut Line<'b>,
    ) {
        if self.is_recorded() {
            self.run_now(|state| state.events.push(name, fields));
        }
    }

    /// Lets the recorder write waiting lines.
    #[inline]
    fn flush_events(&self) {
        if let Some(Recording(recorder)) = &self.recording {
            recorder.pass_on();
        }
    }

    /// Runs an operation to its end on this thread.
    pub(crate) fn run<T>(&self, operation: impl AsyncFnOnce(&OpContext<'_>) -> T) -> T {
        let cx = self.context();
        let locked = self.executor.lock();
        let outcome = self.executor.drive(locked, &cx, pin!(operation(&cx)));
        self.flush_events();
        outcome
    }

    /// Makes a first step, and if that is not enough, runs the operation that continues it to its
    /// end. The lock is not released in between.
    #[inline]
    pub(crate) fn run_after<B, T>(
        &self,
        first: impl FnOnce(&mut ArenaState) -> ControlFlow<T, B>,
        operation: impl AsyncFnOnce(&OpContext<'_>, B) -> T,
    ) -> T {
        let mut locked = self.executor.lock();
        let outcome = match first(locked.state()) {
            ControlFlow::Break(outcome) => {
                self.executor.publish(&locked);
                drop(locked);
                outcome
            }
            ControlFlow::Continue(begun) => {
                let cx = self.context();
                self.executor.drive(locked, &cx, pin!(operation(&cx, begun)))
            }
        };
        self.flush_events();
        outcome
    }

    fn context(&self) -> OpContext<'_> {
        OpContext::new(&*self.driver, &*self.executor.clock, self, &self.callbacks)
    }

    /// Fails in a forked child, in which a thread that does not exist there may hold the lock.
    #[inline]
    pub(crate) fn check_here(&self) -> Result<()> {
        if self.executor.birth.is_here() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    /// Changes or reads the state in one step, except in a forked child, which never takes the
    /// lock: another thread may have held it.
    ///
    /// # Errors
    /// `Forked`.
    pub(crate) fn run_here<T>(&self, act: impl FnOnce(&mut ArenaState) -> T) -> Result<T> {
        self.check_here().map(|()| self.run_now(act))
    }

    /// Fails in a forked child, and once the arena is closed.
    #[inline]
    pub(crate) fn check_open(&self) -> Result<()> {
        self.check_here()?;
        if self.closed.load(Ordering::Relaxed) { Err(self.was_closed()) } else { Ok(()) }
    }

    pub(crate) fn was_closed(&self) -> DeviceError {
        DeviceError::Closed { arena: self.name.clone() }
    }

    pub(crate) fn check_host_access(&self) -> Result<()> {
        if self.capabilities.host_access { Ok(()) } else { Err(self.no_host_access()) }
    }

    pub(crate) fn no_host_access(&self) -> DeviceError {
        DeviceError::Unsupported { what: "host access", backend: self.driver.backend() }
    }

    /// Records that a cache holds a block.
    #[inline]
    pub(crate) fn note_cached(&self) {
        // Read first: a cache line that all threads write would defeat the caches.
        if !self.caches.hold.load(Ordering::Relaxed) {
            self.caches.hold.store(true, Ordering::Relaxed);
        }
    }

    /// Counts a busy cache.
    pub(crate) fn note_contended(&self) {
        self.caches.contended.fetch_add(1, Ordering::Relaxed);
    }

    /// Returns the bytes in all caches, without locking them.
    pub(crate) fn cached(&self) -> u64 {
        self.shards().map(|shard| shard.cached()).sum()
    }

    /// Frees all cached blocks in the arena. Returns `true` if there were any.
    pub(crate) fn empty_caches(&self) -> bool {
        let mut blocks = BlockList::default();
        let _sweep = lock(&self.caches.sweep);
        // Blocks that are cached from here on set the flag again.
        self.caches.hold.swap(false, Ordering::Relaxed) && self.empty_all(&mut blocks)
    }

    /// Frees all cached blocks in the arena, regardless of the flag, during a sweep. Their handles
    /// are put into `blocks`, to be dropped without a lock. Returns `true` if there were any.
    fn empty_all(&self, blocks: &mut BlockList) -> bool {
        self.shards().for_each(|shard| shard.empty(blocks));
        self.release_all(blocks)
    }

    /// Frees cached blocks whose sizes are no longer hot.
    pub(crate) fn cool_caches(&self) {
        let mut blocks = BlockList::default();
        let _sweep = lock(&self.caches.sweep);
        if !self.caches.hold.swap(false, Ordering::Relaxed) {
            return;
        }
        for shard in self.shards() {
            if shard.cool(&mut blocks) {
                self.note_cached();
            }
        }
        self.release_all(&blocks);
    }

    /// Frees blocks that were taken out of the caches. Returns `true` if there were any. Their
    /// handles are to be dropped without a lock.
    pub(crate) fn release_all(&self, blocks: &BlockList) -> bool {
        if blocks.is_empty() {
            return false;
        }
        self.executor.run_now(|state| blocks.iter().for_each(|owned| owned.release_into(state)));
        true
    }

    /// Returns the shards of threads, then those of lanes.
    fn shards(&self) -> impl Iterator<Item = Arc<CacheShard>> {
        let of_lanes = lock(&self.caches.lanes).clone();
        let shards = self.caches.shards.get().into_iter().flatten().cloned();
        shards.chain(of_lanes).filter_map(|shard| shard.upgrade())
    }

    /// Returns all figures at one instant: locks the caches, and then the state.
    pub(crate) fn snapshot(&self) -> ArenaSnapshot {
        let _sweep = lock(&self.caches.sweep);
        self.snapshot_swept()
    }

    /// Returns all figures during a sweep.
    fn snapshot_swept(&self) -> ArenaSnapshot {
        // Dropped last: dropping the last reference to a shard locks the state.
        let shards: Vec<_> = self.shards().collect();
        let still: Vec<_> = shards.iter().map(|shard| shard.still()).collect();
        let mut caches = CacheCounts::default();
        still.iter().for_each(|cache| caches.add(cache.tally));
        let mut snapshot = self.executor.run_now(|state| state.snapshot(&caches));
        snapshot.lock_contended_total += self.caches.contended.load(Ordering::Relaxed);
        #[cfg(feature = "cuda")]
        {
            snapshot.parked_errors_total = self.parked.load(Ordering::Relaxed);
        }
        snapshot
    }

    /// Closes the arena if no block is live and no imported value is held. Returns `true` if the
    /// arena was open. Another thread that closes the arena waits for the result.
    pub(crate) fn close(&self) -> Result<bool> {
        let _shut = ShutCaches::shut(self);
        let mut blocks = BlockList::default();
        let _sweep = lock(&self.caches.sweep);
        if self.closed.swap(true, Ordering::Relaxed) {
            return Ok(false);
        }
        self.executor.run_now(|state| state.is_closed = true);
        // From here on the caches are empty and hand out no block, and the arena checks `closed`
        // under its lock before handing one out.
        self.empty_all(&mut blocks);
        let snapshot = self.snapshot_swept();
        let count = snapshot.allocs_total - snapshot.frees_total;
        let held = self.executor.run_now(|state| {
            let imported = &state.outstanding.imported;
            imported.count() - imported.waiting()
        });
        if count == 0 && held == 0 {
            return Ok(true);
        }
        self.closed.store(false, Ordering::Relaxed);
        self.executor.run_now(|state| state.is_closed = false);
        if count == 0 {
            let (arena, bytes) = (self.name.clone(), snapshot.imported);
            return Err(DeviceError::ImportedHeld { arena, count: held, bytes });
        }
        Err(DeviceError::LiveBlocks { arena: self.name.clone(), count, bytes: snapshot.live })
    }

    pub(crate) fn validate(&self) {
        self.run_now(|state| state.validate());
        self.snapshot().validate();
    }

    /// Validates the state in debug builds.
    pub(crate) fn debug_validate(&self) {
        if cfg!(debug_assertions) {
            self.validate();
        }
    }
}

impl Surroundings for ArenaInner {
    fn caches_hold(&self) -> bool {
        self.caches.hold.load(Ordering::Relaxed)
    }

    fn empty_caches_for(&self, taker: Option<StreamKey>) -> bool {
        let (cached, live) = (self.cached(), self.run_now(|state| state.live()));
        if !self.caches.is_in_way(cached, live) {
            return false;
        }
        if !self.capabilities.asynchronous || cached > lock(&self.caches.rules).room_max.get() {
            return self.empty_caches();
        }
        taker.is_some() && self.shards().any(|shard| shard.stream == taker && shard.give_up())
    }

    fn note_live(&self, live: u64, limit: u64) {
        self.caches.note_live(live, limit);
    }

    fn shut_caches(&self) -> bool {
        // A block that was put into a cache earlier is found, and a later block finds no room.
        self.caches.set(|rules| rules.shut += 1);
        let mut blocks = BlockList::default();
        let _sweep = lock(&self.caches.sweep);
        self.empty_all(&mut blocks)
    }

    fn reopen_caches(&self) {
        if self.check_here().is_err() {
            return; // a thread of the parent may hold its lock
        }
        self.caches.set(|rules| rules.shut -= 1);
    }

    fn set_asleep(&self, is_asleep: bool) {
        self.caches.set(|rules| rules.asleep = is_asleep);
    }
}

impl Drop for ArenaInner {
    /// Releases everything to the driver. No block is live, and no thread waits for the lock. If
    /// the driver refuses, or the device may still use a range, the range stays reserved. Does
    /// nothing in a forked child.
    fn drop(&mut self) {
        if self.check_here().is_err() {
            if let Some(state) = self.executor.get_mut() {
                forget_imports(state);
            }
            return;
        }
        log!(info, arena = self.name, "arena dropped");
        let _ = self.run(query_events); // queries without waiting
        // A graph may still be launched, and use these.
        let is_captured = self.executor.get_mut().is_some_and(|state| {
            let captured = std::mem::take(&mut state.outstanding.captured);
            captured.imports.iter().for_each(|&at| state.outstanding.imported.forget(at.get()));
            !captured.blocks.is_empty()
        });
        let (count, bytes) = self.run(end_imports);
        if count > 0 {
            log!(warn, arena = self.name, count, %bytes, "imported memory not released");
        }
        self.run(stores::end);
        let Some(state) = self.executor.get_mut() else { return };
        // The uses of raw blocks are unknown.
        let is_raw_used =
            state.capabilities.asynchronous && !state.raw.is_empty() && !state.sleep.is_quiet;
        let is_used =
            state.pending() > 0 || state.sleep.may_be_copied() || is_raw_used || is_captured;
        if is_used {
            let bytes = ByteSize::new(state.memory().backed);
            log!(warn, arena = self.name, %bytes, "arena dropped in use, memory leaked");
        }
        if let Some(stream) = state.sleep.stream.take() {
            // SAFETY: the stream of the copies, which no operation uses: this is its end. Queued
            // copies still run.
            let _ = unsafe { self.driver.stream_destroy(stream) };
        }
        for event in state.streams.take_events() {
            // SAFETY: the arena's own event, which no operation holds: this is its end.
            let _ = unsafe { self.driver.event_destroy(event) };
        }
        if is_used {
            return; // the device may still use it
        }
        for region in Region::ALL {
            // SAFETY: the arena's own memory. This is the end of the last handle, buffer and lease,
            // so that no block is live and no other thread is here; nothing pending, no copy of a
            // sleep and no raw block is in use: that returned above.
            unsafe { reserve::give_up(&*self.driver, &state.region(region).segment) };
        }
    }
}

lowtide_core::debug_as!(ArenaInner, |it| name: it.name, driver: it.driver, largest: it.largest);

// Runs operations of the engine for the handles of an arena. An allocation and a resize run
// several, one after the other, from the first step to the error.

impl ArenaInner {
    /// Allocates a block with committed memory. The stream may use the block immediately, in stream
    /// order; any stream may if `None`. O(1), plus the granules if some must be committed.
    ///
    /// # Errors
    /// `OutOfAddresses`, `OutOfMemory`, or `Driver`.
    pub(crate) fn alloc_block(&self, wanted: AllocRequest) -> Result<Placement> {
        let first = |state: &mut ArenaState| {
            let begun = alloc::begin(state, &wanted);
            self.caches.note_live(state.live(), state.limit.get());
            match begun {
                Begun::Done(placed) => ControlFlow::Break(Ok(placed)),
                begun => ControlFlow::Continue((wanted, begun)),
            }
        };
        let outcome = self.run_after(first, alloc::alloc);
        outcome.map_err(|failure| self.record_failure(failure, wanted))
    }

    /// Allocates a raw block, like [`ArenaInner::alloc_block`], for the next work of a user, or of
    /// any stream.
    ///
    /// # Errors
    /// Those of [`ArenaInner::alloc_block`].
    pub(crate) fn alloc_raw_block(
        &self,
        wanted: AllocRequest,
        user: Option<RawUser>,
    ) -> Result<Placement> {
        let is_guest = user.is_some_and(RawUser::is_guest);
        let mut taker = None;
        let first = |state: &mut ArenaState| {
            taker = user.and_then(|user| user.stream(&mut state.streams));
            // Until it is freed, or its allocation fails, the block counts as a guest.
            let guest = taker.filter(|_| is_guest);
            guest.into_iter().for_each(|stream| state.streams.add_guest(stream));
            let target = AllocRequest { taker, ..wanted };
            let begun = alloc::begin(state, &target);
            self.caches.note_live(state.live(), state.limit.get());
            if let Begun::Done(placed) = begun {
                raw_block::insert(state, placed, (taker, is_guest));
                return ControlFlow::Break(Ok(placed));
            }
            ControlFlow::Continue((target, begun))
        };
        let rest = async |cx: &OpContext<'_>, begun| raw_block::alloc(cx, begun, is_guest).await;
        self.run_after(first, rest).map_err(|failure| {
            let error = self.record_failure(failure, wanted);
            let guest = taker.filter(|_| is_guest);
            let left =
                self.run_here(|state| guest.filter(|&stream| state.streams.leave_guest(stream)));
            self.end_streams(left.ok().flatten().as_slice());
            error
        })
    }

    /// Counts a failure, and returns the error for the caller.
    fn record_failure(&self, failure: AllocFailure, what: AllocRequest) -> DeviceError {
        if self.check_here().is_err() {
            return DeviceError::Forked; // a callback forked, and this process is the child
        }
        self.run(async |cx| record_failure(cx, failure, what).await)
    }

    /// Resizes a live block in place; returns `None` if the block cannot grow there.
    ///
    /// # Errors
    /// The errors of an allocation, or `ContentsLost`; the block is unchanged.
    pub(crate) fn resize_in_place(
        &self,
        placed: Placement,
        requested: u64,
    ) -> Result<Option<Placement>> {
        let outcome = self.run(async |cx| alloc::resize(cx, placed, requested).await);
        let (region, size, origin) = (placed.id.region(), requested, RequestOrigin::RESIZE);
        let what = AllocRequest { region, size, align: 1, requested, origin, taker: None };
        outcome.map_err(|failure| self.record_failure(failure, what))
    }
}
