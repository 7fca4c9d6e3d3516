//! A device arena: blocks out of reserved address space, memory behind them only while needed.
//!
//! What a caller sees: open, allocate, enter, limit, snapshot. The mechanisms stand beside it:
//! `commit` puts memory behind blocks, `reclaim` gives idle memory back, `books` counts. It owns
//! no thread and reads no time but for when memory went idle; who wants memory back calls
//! [`DeviceArena::decay`].
//!
//! Invariants: those of [`ArenaSnapshot`](super::ArenaSnapshot); no driver call under the lock;
//! the arena lives as long as a handle, a buffer or a lease of it.

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::books::Books;
use super::buffer::Buffer;
use super::config::ArenaConfig;
use super::driver::{Backend, Capabilities, Driver};
use super::error::DeviceError;
use super::front::{Home, Homes, Owned};
use super::index::ALIGN;
use super::kept;
use super::lane::Known;
use super::lease::Lease;
use super::planted::Plants;
use super::record::hooks::Origin;
use super::record::{Header, Operation};
use super::region::{Region, RegionBooks, Wanted};
use super::reserve;
use super::shared::{Fronts, Shared};
use super::shortage::Callbacks;
use super::snapshot::{ArenaGlance, ArenaSnapshot};
use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::fork::Birth;
use crate::sync::atomic::{AtomicBool, AtomicU64};
use crate::sync::{Condvar, Mutex, lock};

/// A device arena: a cheap handle, the same arena for every clone.
///
/// ```
/// use std::sync::Arc;
/// use lowtide::clock::SystemClock;
/// use lowtide::device::driver::host::HostDriver;
/// use lowtide::device::{ArenaConfig, DeviceArena, Region};
///
/// let clock = Arc::new(SystemClock::new());
/// let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("model"))?;
/// let weights = arena.alloc_from(&[1.0_f32, 2.0, 3.0], Region::Stable)?;
/// let lease = arena.enter()?;
/// assert_eq!(weights.slice(&lease)?.iter().sum::<f32>(), 6.0);
/// # Ok::<(), lowtide::device::DeviceError>(())
/// ```
#[derive(Clone)]
pub struct DeviceArena {
    shared: Arc<Shared>,
    /// Where each thread's blocks come from and go back to.
    homes: Arc<Homes>,
}

impl DeviceArena {
    /// Opens an arena: reserves its address space, where the driver has such apart from memory;
    /// commits nothing.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a driver whose work goes on after its calls return while
    /// the host has access, or which claims to remap or to wake without virtual memory;
    /// [`DeviceError::Driver`] where not even a granule can be reserved;
    /// [`DeviceError::RecorderTaken`]; [`DeviceError::Granule`] where the configuration asks for
    /// one that is no multiple of the driver's.
    pub fn open(
        driver: Arc<dyn Driver>,
        clock: Arc<dyn Clock>,
        config: ArenaConfig,
    ) -> Result<Self, DeviceError> {
        let capabilities = driver.capabilities();
        let granularity = capabilities.granularity;
        let granule = config.granule.unwrap_or(granularity);
        for (offered, what) in [
            (
                !(capabilities.asynchronous && capabilities.host_access),
                "work that is complete when its call returns, where the host has access",
            ),
            (
                capabilities.virtual_memory
                    || !(capabilities.same_address_wake || capabilities.remap),
                "addresses that are kept apart from memory",
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
        let grounds = reserve::grounds(&*driver, granule, config.reserve)?;
        if let Some(recorder) = &config.recorder {
            let reserved = grounds.each_ref().map(|ground| ByteSize::new(ground.extent()));
            let header = Header::of(&config, &*driver, &*clock, reserved);
            if let Err(taken) = recorder.open(&header) {
                grounds.iter().for_each(|ground| reserve::give_up(&*driver, ground));
                return Err(taken);
            }
        }
        let regions = grounds.map(|ground| RegionBooks::new(ground, granule));
        let largest = regions.each_ref().map(RegionBooks::largest_ever);
        let asynchronous = capabilities.asynchronous;
        let books = Books::new(regions, granule, &config, asynchronous, clock.now());
        let front = books.front_kept(config.front);
        let shared = Arc::new(Shared {
            driver,
            clock,
            books: Mutex::new(books),
            settled: Condvar::new(),
            capabilities,
            granule,
            largest,
            moves: [AtomicU64::new(0), AtomicU64::new(0)],
            fronts: Fronts::new(front, config.decay, asynchronous),
            callbacks: Arc::new(Callbacks::new()),
            closed: AtomicBool::new(false),
            sleep: config.sleep,
            birth: Birth::now(),
            recorder: config.recorder,
            plants: Plants::default(),
            #[cfg(feature = "cuda")]
            parked: AtomicU64::new(0),
            name: config.name,
        });
        let homes = Arc::new(Homes::new(&shared));
        let (arena, backend) = (&shared.name, shared.driver.backend());
        log!(info, arena, %backend, limit = %config.limit, "an arena was opened");
        Ok(Self { shared, homes })
    }

    /// Room for `len` elements, whose contents are unspecified: zero, or what an earlier buffer of
    /// this arena left there.
    ///
    /// Rounded up to 256 bytes. O(1), beside the granules to commit; without any bytes, no block
    /// is taken. Waits for driver calls of other threads only where it needs their granules. A
    /// sleeping arena is woken first.
    ///
    /// On a driver with streams such a buffer may be used on any stream, so that only a wait for
    /// the whole device proves that its memory is free. Background work never makes that wait:
    /// after the drop the memory stays pending until an allocation takes it, or the program calls
    /// [`DeviceArena::purge`], [`DeviceArena::trim`], [`DeviceArena::shrink`],
    /// [`DeviceArena::sleep`], [`DeviceArena::compact`] or [`DeviceArena::close`]. Buffers of a
    /// [`Lane`](super::Lane) need none of that.
    ///
    /// `T` is plain data by bytemuck's `Pod`: numbers, arrays of them, and structs of yours that
    /// derive it (`bytemuck` 1 with its feature `derive`).
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] where the arena's own idle memory, which goes first, and what
    /// callbacks give back ([`DeviceArena::on_shortage`]) are not enough; before that every free
    /// span is looked at. Of an arena that sleeps, as [`DeviceArena::wake`], with the figures of
    /// the wake. [`DeviceError::OutOfAddresses`], [`DeviceError::TooLarge`],
    /// [`DeviceError::Alignment`], [`DeviceError::Driver`], [`DeviceError::Closed`],
    /// [`DeviceError::Forked`]. The arena works on after each.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        let (bytes, align) = self.shared.layout::<T>(len, region)?;
        let home = self.homes.here();
        let Some(wanted) = Wanted::new(bytes, align) else {
            return Ok(Buffer::new(Owned::new(Arc::clone(home), region, None), len));
        };
        let owned = match self.kept(home, region, wanted) {
            Some(owned) => owned,
            None => {
                let placed = self.shared.obtain(region, wanted)?;
                Owned::new(Arc::clone(home), region, Some(placed))
            }
        };
        Ok(Buffer::new(owned, len))
    }

    /// As [`DeviceArena::alloc`], for the stream of a lane.
    pub(super) fn alloc_on<T: Pod>(
        &self,
        lane: &Arc<Known>,
        len: usize,
        region: Region,
    ) -> Result<Buffer<T>, DeviceError> {
        let origin = Origin { lane: lane.number(), ..Origin::BUFFER };
        let (bytes, align) = self.shared.layout_by::<T>(len, region, origin)?;
        let wanted = Wanted::new(bytes, align).map(|of| of.by(origin));
        if let (Some(wanted), Some(home)) = (wanted, lane.home())
            && let Some(mut owned) = self.kept(home, region, wanted)
        {
            owned.lanes.push(Arc::clone(lane));
            return Ok(Buffer::new(owned, len));
        }
        self.alloc_as(wanted, Some(lane), len, region)
    }

    /// A buffer of `len` elements on a block that is asked for as it is; for the stream of a lane,
    /// where one is named.
    pub(super) fn alloc_as<T: Pod>(
        &self,
        wanted: Option<Wanted>,
        lane: Option<&Arc<Known>>,
        len: usize,
        region: Region,
    ) -> Result<Buffer<T>, DeviceError> {
        let home = lane.and_then(|lane| lane.home()).unwrap_or_else(|| self.homes.here());
        let home = Arc::clone(home);
        let taker = lane.and_then(|lane| lane.key());
        let placed = wanted.map(|wanted| self.shared.obtain_for(region, wanted, taker));
        let mut owned = Owned::new(home, region, placed.transpose()?);
        owned.lanes.extend(lane.cloned());
        Ok(Buffer::new(owned, len))
    }

    /// As [`DeviceArena::alloc`], on granules that no other block shares: what is freed can be
    /// given back whole. For a few large blocks that stay; each is rounded up to whole granules,
    /// and all of it is live. ONNX Runtime's `Reserve`, except that the limit counts it. Once it is
    /// resized it is a buffer as any other. The memory is committed at once: it is not the address
    /// space that [`ArenaConfig::reserve`] is about.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`].
    pub fn reserve<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        let (bytes, _) = self.shared.layout_by::<T>(len, region, Origin::RESERVE)?;
        let home = self.homes.here();
        let granule = self.shared.granule;
        let whole = bytes.next_multiple_of(granule).unwrap_or(bytes);
        let Some(wanted) = Wanted::new(whole, granule) else {
            return Ok(Buffer::new(Owned::new(Arc::clone(home), region, None), len));
        };
        let wanted = Wanted { requested: bytes.get(), ..wanted.by(Origin::RESERVE) };
        let placed = self.shared.obtain(region, wanted)?;
        lock(&self.shared.books).totals.reserves += 1;
        Ok(Buffer::new(Owned::new(Arc::clone(home), region, Some(placed)), len))
    }

    /// A buffer with a copy of `data`.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`]; [`DeviceError::Unsupported`] on a driver without host access,
    /// [`DeviceError::TooManyLeases`].
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>, DeviceError> {
        self.shared.check_host_access()?;
        let lease = self.enter()?;
        let mut buffer = self.alloc(data.len(), region)?;
        buffer.slice_mut(&lease)?.copy_from_slice(data);
        Ok(buffer)
    }

    /// The right to use the arena's memory; keeps it awake. May be nested and held by many.
    ///
    /// Hold it for as long as slices are used and no longer: nothing is compacted meanwhile. A
    /// sleeping arena is woken, which blocks for the driver's calls and the copies
    /// ([`DeviceArena::enter_async`] does not); one that is about to fall asleep stays awake.
    ///
    /// On a driver with streams this lease says nothing of which are used: before the memory sleeps
    /// all work of the device is waited for. [`Lane::enter`](super::Lane::enter) names one.
    ///
    /// # Errors
    /// As [`DeviceArena::wake`] where it sleeps; [`DeviceError::TooManyLeases`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn enter(&self) -> Result<Lease, DeviceError> {
        Lease::of(&self.shared)
    }

    /// Sets the most that may be committed. What is above it stays until it is freed or given
    /// back, idle memory too ([`DeviceArena::trim`] gives that back now). Nothing more is committed
    /// until then; what fits in granules that have memory is still handed out.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide::{ByteSize, clock::SystemClock};
    /// # use lowtide::device::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// let tables = arena.alloc::<u8>(4 << 20, Region::Stable)?;
    /// drop(arena.alloc::<u8>(4 << 20, Region::Dynamic)?);
    /// let limit = ByteSize::mib(2);
    /// arena.set_limit(limit);
    /// assert_eq!(arena.trim(limit)?, ByteSize::mib(4)); // what was idle; the tables stay
    /// let refused = arena.alloc::<u8>(1 << 20, Region::Dynamic).unwrap_err();
    /// assert!(refused.is_out_of_memory());
    /// # drop(tables);
    /// # Ok::<(), DeviceError>(())
    /// ```
    pub fn set_limit(&self, limit: ByteSize) {
        if self.shared.check_here().is_ok() {
            let mut books = lock(&self.shared.books);
            books.limit = limit;
            books.tell(&*self.shared.clock, |_| Some(Operation::Limit { limit }));
            drop(books);
            self.shared.pass_on();
            log!(info, arena = self.name(), %limit, "the arena's limit was set");
        }
    }

    /// The most that may be committed; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        if self.shared.check_here().is_err() {
            return ByteSize::ZERO;
        }
        lock(&self.shared.books).limit
    }

    /// Sets how many bytes the front of each thread, or of each lane, may keep
    /// ([`ArenaConfig::front`]); zero for none. Where events are kept, no front is.
    pub fn set_thread_cache(&self, front: ByteSize) {
        if self.shared.check_here().is_ok() {
            let front = lock(&self.shared.books).front_kept(front);
            self.shared.fronts.set_room(front);
            self.shared.empty_fronts();
        }
    }

    /// Closes the arena: gives all its memory back, and hands out nothing more. Where work is done
    /// when its call returns it is not needed: the last handle, buffer or lease of it does the same
    /// when it is dropped. A drop waits for no work of a device, and leaves behind memory that may
    /// be worked on still; this waits. Closing again does nothing.
    ///
    /// Every handle of it is closed with this one. Its address space is given back when the last
    /// handle is dropped. While this looks, other threads may be refused as if it were closed.
    ///
    /// # Errors
    /// [`DeviceError::LiveBlocks`] and [`DeviceError::AdoptedHeld`], and the arena works on;
    /// [`DeviceError::Driver`] where the driver did not take everything back, and the arena is
    /// closed; [`DeviceError::Forked`].
    pub fn close(&self) -> Result<(), DeviceError> {
        let shared = &self.shared;
        shared.check_here()?;
        let was_open = shared.close();
        if was_open == Ok(false) {
            return Ok(());
        }
        let is_closing = was_open.is_ok();
        let closed = was_open.and_then(|_| {
            shared.complete_all()?;
            shared.release_adopted();
            shared.wake_of_nothing();
            shared.release_kept();
            self.empty()
        });
        shared.tell_closed(&closed);
        if is_closing {
            log!(info, arena = self.name(), "the arena was closed");
        }
        closed
    }

    /// Whether it was closed, by this handle or another. While a close looks for live blocks, it
    /// says so as well.
    #[must_use]
    pub fn is_closed(&self) -> bool {
        self.shared.is_closed()
    }

    /// Frees every block that was had by address; buffers keep theirs. Returns the bytes of those
    /// blocks. No driver call: what went idle decays.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn reset(&self) -> Result<ByteSize, DeviceError> {
        self.shared.check_here()?;
        let bytes = self.shared.books().reset(&*self.shared.clock);
        self.shared.pass_on();
        Ok(bytes)
    }

    /// All figures at one instant, without a driver call; all zero in a forked child.
    ///
    /// Holds the locks while it looks for the largest free span: at worst at every free block and
    /// granule, mostly at a few.
    #[must_use]
    pub fn snapshot(&self) -> ArenaSnapshot {
        if self.shared.check_here().is_err() {
            return ArenaSnapshot::unknown(self.name(), self.backend());
        }
        self.shared.snapshot()
    }

    /// Committed and idle memory at one instant, for a sampler: no allocation, no driver call, and
    /// the lock is held for a few additions. Zero in a forked child.
    #[must_use]
    pub fn glance(&self) -> ArenaGlance {
        if self.shared.check_here().is_err() {
            return ArenaGlance::default();
        }
        self.shared.glance()
    }

    /// What the driver can do. Its granularity may be less than the arena's granule
    /// ([`ArenaConfig::granule`]).
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.shared.capabilities
    }

    /// The driver in use.
    #[must_use]
    pub fn backend(&self) -> Backend {
        self.shared.driver.backend()
    }

    /// The arena's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// Walks all books and checks every invariant; for tests, at the cost of the whole arena.
    ///
    /// # Panics
    /// Where one is broken.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.shared.validate();
    }

    pub(super) const fn shared(&self) -> &Arc<Shared> {
        &self.shared
    }

    #[cfg(all(test, lowtide_loom))]
    pub(super) fn shared_arc(&self) -> &Arc<Shared> {
        &self.shared
    }

    /// A block out of a front, where that has one.
    #[inline]
    fn kept(&self, home: &Home, region: Region, wanted: Wanted) -> Option<Box<Owned>> {
        // What is aligned further has a note of it in the books.
        if wanted.size > home.room() || wanted.align > ALIGN {
            return None;
        }
        let owned = home.take(kept::Key::new(region, wanted.size), wanted.requested)?;
        let placed = owned.block.as_ref()?;
        if self.shared.is_fresh(region, placed) {
            return Some(owned);
        }
        // It was moved while it was in the front: the books know where it is.
        self.shared.release_all(vec![home.swept(region, *placed)]);
        None
    }
}

impl fmt::Debug for DeviceArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("DeviceArena").field(&self.shared).finish()
    }
}

impl Shared {
    /// Bytes and alignment of `len` elements of a buffer.
    #[inline]
    pub(super) fn layout<T: Pod>(
        &self,
        len: usize,
        region: Region,
    ) -> Result<(ByteSize, ByteSize), DeviceError> {
        self.layout_by::<T>(len, region, Origin::BUFFER)
    }

    /// The same, asked for by another.
    #[inline]
    pub(super) fn layout_by<T: Pod>(
        &self,
        len: usize,
        region: Region,
        origin: Origin,
    ) -> Result<(ByteSize, ByteSize), DeviceError> {
        self.check_open()?;
        let (element, align) = (ByteSize::of(size_of::<T>()), ByteSize::of(align_of::<T>()));
        let largest_align = self.capabilities.granularity;
        if align > largest_align {
            return Err(DeviceError::Alignment { requested: align, largest: largest_align });
        }
        let largest = self.largest[region.number()];
        match element.checked_mul(ByteSize::of(len).get()) {
            Some(bytes) if bytes <= largest => Ok((bytes, align)),
            bytes => {
                let bytes = bytes.unwrap_or(ByteSize::MAX).get();
                self.refuse_too_large(region, bytes, align, origin);
                Err(DeviceError::TooLarge { len, element, largest })
            }
        }
    }

    /// Counts a block that could never be had.
    pub(super) fn refuse_too_large(
        &self,
        region: Region,
        bytes: u64,
        align: ByteSize,
        origin: Origin,
    ) {
        let mut books = self.books();
        books.totals.failures.addresses += 1;
        books.tell_too_large(&*self.clock, region, bytes, align, origin);
        drop(books);
        self.pass_on();
    }
}
