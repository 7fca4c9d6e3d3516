//! A device arena: allocates blocks from reserved address space, and commits memory only while it
//! is needed.
//!
//! This file has the callers' interface: open, allocate, enter, limit, snapshot. The mechanisms are
//! elsewhere: `engine::alloc` commits memory for blocks, `engine::commit` also releases idle memory,
//! and `state` keeps the accounts. The arena owns no thread, and reads the clock only when memory
//! becomes idle; callers release memory with [`DeviceArena::decay`].
//!
//! Invariants: those of [`ArenaSnapshot`](crate::ArenaSnapshot); no driver call under the lock; the
//! arena lives as long as one of its handles, buffers or leases.
#![expect(unsafe_code, reason = "addresses are given back if the arena does not open")]

use std::sync::Arc;

use crate::api::buffer::Buffer;
use crate::api::lane::Lease;
use crate::driver::{Backend, Capabilities, Driver};
use crate::engine::callbacks::Callbacks;
use crate::engine::suspend::next_sleep;
use crate::engine::{completion, import, raw_block, resume, stores};
use crate::exec::reserve;
use crate::exec::{ArenaInner, BlockHandle, CacheKey, CacheShard, CacheShards, LaneInner};
use crate::index::ALIGN;
use crate::record::Recording;
use crate::state::{AllocRequest, ArenaState, RequestOrigin};
use crate::types::{
    ArenaConfig, ArenaGlance, ArenaSnapshot, DeviceCosts, DeviceError, Region, RegionSnapshot,
    Result, Shortage,
};
use bytemuck::Pod;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::sync::atomic::Ordering;
use lowtide_core::{ByteSize, log};

/// A device arena. A cheap handle: clones refer to the same arena.
///
/// ```
/// use std::sync::Arc;
/// use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::driver::host::HostDriver;
/// use lowtide_gpu::{ArenaConfig, DeviceArena, Region};
///
/// let clock = Arc::new(SystemClock::new());
/// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("model"))?;
/// let weights = arena.alloc_from(&[1.0_f32, 2.0, 3.0], Region::Stable)?;
/// let lease = arena.enter()?;
/// assert_eq!(weights.slice(&lease)?.iter().sum::<f32>(), 6.0);
/// # Ok::<(), lowtide_gpu::DeviceError>(())
/// ```
#[derive(Clone)]
pub struct DeviceArena {
    inner: Arc<ArenaInner>,
    /// The cache shards of the threads.
    shards: Arc<CacheShards>,
}

/// Returns a limit for the log.
pub(crate) fn limit_text(limit: ByteSize) -> String {
    if limit == ByteSize::MAX { "none".to_owned() } else { limit.to_string() }
}

impl DeviceArena {
    /// Opens an arena and reserves its address space, if the driver reserves addresses separately
    /// from memory. Commits nothing.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] if the driver has host access and asynchronous work, or claims
    /// to remap without virtual memory; [`DeviceError::Driver`] if not even one granule can
    /// be reserved; [`DeviceError::RecorderTaken`]; [`DeviceError::Granule`] if the configured
    /// granule is not a multiple of the driver's.
    pub fn open(
        driver: Arc<dyn Driver>,
        clock: Arc<dyn Clock>,
        mut config: ArenaConfig,
    ) -> Result<Self> {
        let capabilities = driver.capabilities();
        let granule = config.granule.unwrap_or(capabilities.granularity);
        check_driver(&*driver, granule)?;
        // Without an answer it is unknown; the calls that reserve report the cause.
        let device = driver.device_memory().ok().flatten().map(|memory| memory.total);
        config.reserve = reserve::wanted(config.reserve, config.limit, device);
        let segments = reserve::segments(&*driver, granule, (config.reserve, device))?;
        let recording = match Recording::begin(&config, driver.backend(), &*clock, granule) {
            Ok(recording) => recording,
            Err(taken) => {
                for segment in &segments {
                    // SAFETY: reserved above from this driver, and nothing of it is handed out.
                    unsafe { reserve::give_up(&*driver, segment) };
                }
                return Err(taken);
            }
        };
        let device = (capabilities, driver.backend());
        let state = ArenaState::new(segments, granule, &config, device, Arc::clone(&clock));
        let limit = config.limit;
        let cache = (config.thread_cache, config.decay);
        let inner = Arc::new(ArenaInner::new((driver, clock), cache, state, recording));
        let shards = Arc::new(CacheShards::new(&inner));
        let (arena, backend) = (&inner.name, inner.driver.backend());
        log!(info, arena, %backend, limit = limit_text(limit), "arena opened");
        Ok(Self { inner, shards })
    }

    /// Allocates `len` elements. Their contents are unspecified: zero, or data of an earlier buffer
    /// of this arena.
    ///
    /// The size is rounded up to 256 bytes; a buffer of 0 bytes takes no block. O(1), plus
    /// committing granules. Waits for another thread's driver call only if it needs the same
    /// granules. Wakes a sleeping arena first.
    ///
    /// On a driver with streams the buffer may be used on any stream, so only a wait for the whole
    /// device proves that its memory is unused. Background work never waits for that: after the
    /// drop the memory stays pending until an allocation takes it, or the program calls
    /// [`DeviceArena::purge`], [`DeviceArena::trim`], [`DeviceArena::shrink`],
    /// [`DeviceArena::sleep`], [`DeviceArena::wait_for_pending`] or [`DeviceArena::close`]. Buffers
    /// of a [`Lane`](crate::Lane) avoid this.
    ///
    /// `T` is plain data (bytemuck's `Pod`): numbers, arrays of them, and structs that derive it
    /// (`bytemuck` 1 with its feature `derive`).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] if all idle memory of the arena, every free span and what
    /// shortage callbacks ([`DeviceArena::on_shortage`]) release are not enough; idle memory then
    /// stays committed. The errors of
    /// [`DeviceArena::wake`] if the arena sleeps, with the figures of the wake.
    /// [`DeviceError::OutOfAddresses`], [`DeviceError::TooLarge`], [`DeviceError::Alignment`],
    /// [`DeviceError::Driver`], [`DeviceError::Closed`], [`DeviceError::Forked`]. The arena stays
    /// usable after each.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>> {
        self.alloc_for(None, len, region)
    }

    /// Like [`DeviceArena::alloc`], for the stream of a lane if given.
    #[inline]
    pub(crate) fn alloc_for<T: Pod>(
        &self,
        lane: Option<&Arc<LaneInner>>,
        len: usize,
        region: Region,
    ) -> Result<Buffer<T>> {
        let origin =
            RequestOrigin { lane: lane.and_then(|lane| lane.number), ..RequestOrigin::BUFFER };
        let wanted = self.inner.request::<T>(len, None, region, origin)?;
        let shard = self.shard_of(lane);
        // Blocks with larger alignments have an entry in the arena's metadata.
        if wanted.size > 0
            && wanted.size <= self.inner.caches.room(shard.stream)
            && wanted.align <= ALIGN
            && let Some(mut owned) =
                shard.take(CacheKey::new(wanted.region, wanted.size), wanted.requested)
        {
            if matches!(&owned.block, Some(placed) if self.inner.is_fresh(placed)) {
                lane.into_iter().for_each(|lane| owned.lanes.add(Arc::clone(lane)));
                return Ok(Buffer::new(owned, len));
            }
            // The block was moved while it was cached: only the arena knows its address.
            self.inner.executor.run_now(|state| owned.release_into(state));
        }
        let taker = lane.and_then(|lane| lane.key);
        self.alloc_as(AllocRequest { taker, ..wanted }, lane, len)
    }

    /// Allocates a block as requested, for the stream of a lane if given. Returns a buffer of `len`
    /// elements on the block.
    fn alloc_as<T: Pod>(
        &self,
        wanted: AllocRequest,
        lane: Option<&Arc<LaneInner>>,
        len: usize,
    ) -> Result<Buffer<T>> {
        let block = if wanted.size > 0 { Some(self.inner.alloc_block(wanted)?) } else { None };
        let mut owned = BlockHandle::new(Arc::clone(self.shard_of(lane)), wanted.region, block);
        lane.into_iter().for_each(|lane| owned.lanes.add(Arc::clone(lane)));
        Ok(Buffer::new(owned, len))
    }

    /// Returns the shard of a lane, or else of this thread. A lane without one has an arena whose
    /// caches are off.
    #[inline]
    fn shard_of<'a>(&'a self, lane: Option<&'a Arc<LaneInner>>) -> &'a Arc<CacheShard> {
        match lane.and_then(|lane| lane.shard.as_ref()) {
            Some(shard) => shard,
            None => self.shards.here(),
        }
    }

    /// Like [`DeviceArena::alloc`], on granules that no other block shares, so that a free releases
    /// all of them. For a few large blocks that stay: each is rounded up to whole granules, and all
    /// of it is live. Equals ONNX Runtime's `Reserve`, except that the limit counts it. After a
    /// resize it is an ordinary buffer.
    ///
    /// The memory is committed immediately; [`ArenaConfig::reserve`] is about address space
    /// instead.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc`].
    pub fn reserve<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>> {
        let origin = RequestOrigin::RESERVE;
        let mut wanted = self.inner.request::<T>(len, None, region, origin)?;
        wanted.align = self.inner.granule.get();
        wanted.size = wanted.size.checked_next_multiple_of(wanted.align).unwrap_or(wanted.size);
        let buffer = self.alloc_as(wanted, None, len)?;
        if wanted.size > 0 {
            self.inner.run_now(|state| state.totals.reserves_total += 1);
        }
        Ok(buffer)
    }

    /// Allocates a buffer and copies `data` to it.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc`]; [`DeviceError::Unsupported`] on a driver without host
    /// access, [`DeviceError::TooManyLeases`].
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>> {
        self.inner.check_host_access()?;
        let lease = self.enter()?;
        let mut buffer = self.alloc(data.len(), region)?;
        buffer.slice_mut(&lease)?.copy_from_slice(data);
        Ok(buffer)
    }

    /// Returns a lease, which permits use of the arena's memory and keeps it awake. Leases nest,
    /// and any number can be held.
    ///
    /// Hold it only while slices or addresses are in use: it blocks compaction. Entering wakes a
    /// sleeping arena, which blocks for the driver's calls and the copies
    /// ([`DeviceArena::enter_async`] does not); an arena that is about to sleep stays awake.
    ///
    /// On a driver with streams this lease covers all of them: before the memory sleeps, all work
    /// of the device is waited for. [`Lane::enter`](crate::Lane::enter) covers one stream.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::wake`] if it sleeps; [`DeviceError::TooManyLeases`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn enter(&self) -> Result<Lease> {
        Lease::of(&self.inner, Vec::new())
    }

    /// Sets the limit of committed memory. Memory above a lowered limit stays until it is freed or
    /// released, idle memory too ([`DeviceArena::trim`] releases that now). Until then nothing more
    /// is committed; allocations that fit in committed granules still succeed.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::{ByteSize, clock::SystemClock};
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let tables = arena.alloc::<u8>(4 << 20, Region::Stable)?;
    /// drop(arena.alloc::<u8>(4 << 20, Region::Dynamic)?);
    /// let limit = ByteSize::mib(2);
    /// arena.set_limit(limit);
    /// assert_eq!(arena.trim(limit)?, ByteSize::mib(4)); // releases idle memory; the tables stay
    /// let refused = arena.alloc::<u8>(1 << 20, Region::Dynamic).unwrap_err();
    /// assert!(refused.is_out_of_memory());
    /// # drop(tables);
    /// # Ok::<(), DeviceError>(())
    /// ```
    pub fn set_limit(&self, limit: ByteSize) {
        if self.inner.run_here(|state| state.set_limit(limit)).is_ok() {
            log!(info, arena = self.name(), limit = limit_text(limit), "arena limit set");
        }
    }

    /// Returns the limit of committed memory; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        self.inner.run_here(|state| state.limit).unwrap_or_default()
    }

    /// Sets how many bytes of free blocks each thread or lane may cache
    /// ([`ArenaConfig::thread_cache`]); zero for none. Has no effect if the arena has a
    /// recorder.
    pub fn set_thread_cache(&self, cache: ByteSize) {
        if self.inner.check_here().is_ok() {
            // Thread caches would hide events.
            let cache = if self.inner.is_recorded() { ByteSize::ZERO } else { cache };
            self.inner.caches.set(|rules| rules.room_max = cache);
            self.inner.empty_caches();
        }
    }

    /// Closes the arena: releases all its memory and rejects further allocations. Closing again
    /// does nothing.
    ///
    /// Closing is optional if the driver's work is complete when its calls return: dropping the
    /// last handle, buffer or lease does the same. A drop does not wait for the device and leaks
    /// memory that it may still use; `close` waits.
    ///
    /// All handles are closed with this one. The address space is released with the last handle.
    /// While `close` runs, other threads may get [`DeviceError::Closed`] even if it then fails.
    ///
    /// # Errors
    /// [`DeviceError::LiveBlocks`] and [`DeviceError::ImportedHeld`]: the arena stays open.
    /// [`DeviceError::Driver`] if the driver did not release everything: the arena is closed.
    /// [`DeviceError::Forked`].
    pub fn close(&self) -> Result<()> {
        let inner = &self.inner;
        inner.check_here()?;
        let was_open = inner.close();
        if was_open == Ok(false) {
            return Ok(());
        }
        let is_closing = was_open.is_ok();
        let closed = was_open.and_then(|_| {
            inner.run(completion::complete_all)?;
            inner.run(import::release_imports);
            inner.run(resume::wake_if_empty);
            inner.run(stores::release_idle);
            self.purge().map(drop)
        });
        match &closed {
            Ok(()) => inner.push_event("close", |line| line),
            Err(error) => inner.push_event("close_failed", |line| line.text("error", error)),
        }
        if is_closing {
            log!(info, arena = self.name(), "arena closed");
        }
        closed
    }

    /// Returns `true` if any handle closed the arena, or while a close checks for live blocks.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.inner.closed.load(Ordering::Relaxed)
    }

    /// Frees all raw blocks ([`DeviceArena::alloc_raw`]) and returns their bytes. The blocks of
    /// buffers stay. Makes no driver call; memory that becomes idle decays.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn reset(&self) -> Result<ByteSize> {
        let (bytes, left) = self.inner.run_here(raw_block::reset)?;
        self.inner.end_streams(&left);
        Ok(bytes)
    }

    /// Returns all figures at one instant, without a driver call; all zero in a forked child.
    ///
    /// Holds the locks while it examines a few free spans, and the memory of these.
    #[must_use]
    pub fn snapshot(&self) -> ArenaSnapshot {
        if self.inner.check_here().is_err() {
            let regions = Region::ALL.map(|region| RegionSnapshot { region, ..Default::default() });
            let (name, backend) = (self.name().to_owned(), self.backend());
            return ArenaSnapshot { name, backend, regions, ..Default::default() };
        }
        self.inner.snapshot()
    }

    /// Returns committed and idle memory at one instant, for sampling: no driver call, at most one
    /// allocation (a list of the lanes), and the lock is held for a few additions; over a driver with
    /// segments, for one step per segment. Zero in a forked child.
    #[must_use]
    pub fn glance(&self) -> ArenaGlance {
        if self.inner.check_here().is_err() {
            return ArenaGlance::default();
        }
        let cached = self.inner.cached();
        self.inner.run_now(|state| ArenaGlance {
            live: ByteSize::new(state.live().saturating_sub(cached)),
            committed: ByteSize::new(state.memory().backed),
            idle: ByteSize::new(state.memory().idle()),
        })
    }

    /// Returns what a control loop needs in each tick: committed memory, and idle memory without
    /// that in handles that a block touches, which cannot be released now; then the times that
    /// [`DeviceArena::next_decay`] and [`DeviceArena::next_sleep`] return. Makes neither an
    /// allocation nor a driver call. The lock is taken once, for a few additions; over a driver
    /// with segments, for one step per segment. Zero and never in a forked child.
    #[doc(hidden)]
    #[must_use]
    pub fn control_figures(&self) -> ([ByteSize; 2], [Moment; 2]) {
        let figures = self.inner.run_here(|state| {
            let sizes = [state.memory().backed, state.memory().releasable()].map(ByteSize::new);
            (sizes, [self.inner.next_look(state), next_sleep(state)])
        });
        figures.unwrap_or(([ByteSize::ZERO; 2], [Moment::NEVER; 2]))
    }

    /// Returns the driver's capabilities. Its granularity may be smaller than the arena's granule
    /// ([`ArenaConfig::granule`]).
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.inner.capabilities
    }

    /// Returns the backend of the driver.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.inner.driver.backend()
    }

    /// Returns the arena's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Checks every invariant by walking all metadata; for tests.
    ///
    /// # Panics
    /// If an invariant is violated.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.inner.validate();
    }

    pub(crate) const fn inner(&self) -> &Arc<ArenaInner> {
        &self.inner
    }
}

/// Checks that the driver's capabilities are consistent, and that the granule fits the driver.
fn check_driver(driver: &dyn Driver, granule: ByteSize) -> Result<()> {
    let capabilities = driver.capabilities();
    let granularity = capabilities.granularity;
    for (offered, what) in [
        (
            !(capabilities.asynchronous && capabilities.host_access),
            "synchronous calls, which host access requires",
        ),
        (
            capabilities.virtual_memory || !capabilities.remap,
            "virtual memory, which remap requires",
        ),
        (granularity.get() >= ALIGN, "granules of at least 256 bytes"),
        (granularity.get().is_power_of_two(), "granules of a power of two"),
    ] {
        if !offered {
            return Err(DeviceError::Unsupported { what, backend: driver.backend() });
        }
    }
    if !granule.get().is_power_of_two() || granule < granularity {
        return Err(DeviceError::Granule { requested: granule, granularity });
    }
    Ok(())
}

lowtide_core::debug_as!(DeviceArena, |it| inner: it.inner);

impl ArenaInner {
    /// Returns a request for `len` elements, with the alignment of the type by default.
    #[inline]
    pub(crate) fn request<T: Pod>(
        &self,
        len: usize,
        align: Option<ByteSize>,
        region: Region,
        origin: RequestOrigin,
    ) -> Result<AllocRequest> {
        self.check_open()?;
        let align = align.map_or(align_of::<T>() as u64, ByteSize::get);
        let largest = self.capabilities.granularity;
        if !align.is_power_of_two() || align > largest.get() {
            let requested = ByteSize::new(align);
            return Err(DeviceError::Alignment { requested, largest });
        }
        let largest = self.largest[region as usize];
        let bytes = (len as u64).saturating_mul(size_of::<T>() as u64);
        if bytes > largest.get() {
            self.refuse_too_large(&AllocRequest::new(region, bytes, align, origin));
            let element = ByteSize::of(size_of::<T>());
            return Err(DeviceError::TooLarge { len, element, largest });
        }
        Ok(AllocRequest::new(region, bytes, align, origin))
    }

    /// Counts a block that is larger than its region.
    #[cold]
    fn refuse_too_large(&self, request: &AllocRequest) {
        self.run_now(|state| {
            state.totals.alloc_failures_addresses_total += 1;
            state.events.push("alloc_failed", |line| request.note(line).text("why", "too_large"));
        });
    }
}

/// Keeps a callback registered; see [`DeviceArena::on_shortage`].
#[must_use = "the callback is registered for as long as this is kept"]
pub struct ShortageCallback {
    callbacks: Arc<Callbacks>,
    number: u64,
}

impl DeviceArena {
    /// Registers a callback that releases memory when this arena has too little left: thread caches
    /// are empty, pending work of streams is complete, and all idle memory together would not be
    /// enough (then it stays committed). Called before an allocation, a resize or a wake fails. All
    /// registered callbacks are called in order of registration, on the thread that is short. Each
    /// returns `true` if it released memory. If any did, the allocation is retried once.
    ///
    /// A callback runs without a lock and may use the arena. Its own allocations call no callbacks;
    /// they fail if the arena is being woken. It must not wait for a thread that allocates here,
    /// which may be waiting for this run; nor for a lock that another thread holds while allocating
    /// here: use `try_lock`. A panic is counted and logged; the other callbacks still run.
    ///
    /// It stays registered until the return value is dropped. No call starts after that; a call in
    /// progress on another thread finishes, and the callback is dropped then. A callback that holds
    /// a handle of the arena keeps it open until then. In a forked child no callback is registered.
    ///
    /// ```
    /// use std::sync::{Arc, Mutex};
    /// use lowtide_gpu::ByteSize;
    /// use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    ///
    /// let config = ArenaConfig { limit: ByteSize::mib(8), ..ArenaConfig::new("model") };
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, config)?;
    /// let cache = Arc::new(Mutex::new(vec![arena.alloc::<u8>(6 << 20, Region::Dynamic)?]));
    /// let evict = arena.on_shortage({
    ///     let cache = Arc::clone(&cache);
    ///     move |_| cache.try_lock().is_ok_and(|mut cache| cache.pop().is_some())
    /// });
    /// let needed = arena.alloc::<u8>(4 << 20, Region::Dynamic)?; // evicts the cache
    /// assert!(cache.lock().unwrap().is_empty());
    /// # drop((evict, needed));
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn on_shortage(
        &self,
        callback: impl Fn(&Shortage<'_>) -> bool + Send + Sync + 'static,
    ) -> ShortageCallback {
        let callbacks = Arc::clone(&self.inner().callbacks);
        let number = callbacks.register(Box::new(callback));
        ShortageCallback { callbacks, number }
    }

    /// Sets the costs of the device's calls, for later operations. Does nothing in a forked child.
    ///
    /// They determine whether an arena that is short of memory remaps idle memory, or releases it
    /// and commits other memory. They also limit the batches of a
    /// [compaction](DeviceArena::compact).
    pub fn set_costs(&self, costs: DeviceCosts) {
        let _ = self.inner().run_here(|state| state.costs = costs);
    }
}

impl Drop for ShortageCallback {
    /// Removes the callback without waiting for a call in progress. Does nothing in a forked child.
    fn drop(&mut self) {
        self.callbacks.forget(self.number);
    }
}

lowtide_core::debug_as!(ShortageCallback, |it| number: it.number);
