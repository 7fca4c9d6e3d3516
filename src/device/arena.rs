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
use super::curve::Curve;
use super::driver::sealed::Key;
use super::driver::{Capabilities, DeviceAddress, Driver, DriverError, Rung};
use super::error::DeviceError;
use super::index::{ALIGN, End, Request};
use super::lease::Lease;
use super::region::{Placed, Region, RegionBooks};
use super::segment::Segment;
use super::snapshot::{ArenaGlance, ArenaSnapshot};
use crate::bytes::ByteSize;
use crate::clock::Clock;
use crate::fork::Birth;
use crate::sync::atomic::AtomicU64;
use crate::sync::{Condvar, Mutex, lock};

/// The most address space that is asked for: below `isize::MAX`, so that every block can be a
/// slice, and a multiple of every granule.
const RESERVE_MAX: ByteSize = ByteSize::new(1 << 62);

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
#[derive(Clone, Debug)]
pub struct DeviceArena(Arc<Shared>);

/// What the handles, buffers and leases of one arena share.
pub(super) struct Shared {
    pub(super) name: String,
    pub(super) driver: Arc<dyn Driver>,
    pub(super) clock: Arc<dyn Clock>,
    pub(super) books: Mutex<Books>,
    /// Notified whenever a driver call's result has been booked.
    pub(super) settled: Condvar,
    capabilities: Capabilities,
    /// Address space of each region.
    reserved: [ByteSize; 2],
    /// How often blocks of each region have moved: a copy of the books' figures.
    pub(super) moves: [AtomicU64; 2],
    birth: Birth,
}

impl DeviceArena {
    /// Opens an arena: reserves its address space, commits nothing.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] for a driver without virtual memory, or one whose work goes on
    /// after its calls return; [`DeviceError::Driver`] where not even a granule can be reserved.
    pub fn open(
        driver: Arc<dyn Driver>,
        clock: Arc<dyn Clock>,
        config: ArenaConfig,
    ) -> Result<Self, DeviceError> {
        let capabilities = driver.capabilities();
        let granularity = capabilities.granularity;
        for (offered, what) in [
            (capabilities.virtual_memory, "address space apart from memory"),
            (!capabilities.asynchronous, "work that is complete when its call returns"),
            (granularity.get() >= ALIGN, "granules of at least 256 bytes"),
            (granularity.get().is_power_of_two(), "granules of a power of two"),
        ] {
            if !offered {
                return Err(DeviceError::Unsupported { what, rung: driver.rung() });
            }
        }
        let stable = reserve_region(&*driver, granularity, config.reserve)?;
        let dynamic = match reserve_region(&*driver, granularity, config.reserve) {
            Ok(dynamic) => dynamic,
            Err(error) => {
                // Where this fails too, address space is lost and nothing else.
                let _ =
                    driver.unreserve(stable.base(), ByteSize::new(stable.reserved()), Key::new());
                return Err(error.into());
            }
        };
        let reserved = [&stable, &dynamic].map(|segment| ByteSize::new(segment.reserved()));
        let regions = [stable, dynamic].map(RegionBooks::new);
        let curve = Curve::new(config.decay, clock.now());
        let books = Books::new(regions, granularity, config.limit, curve);
        Ok(Self(Arc::new(Shared {
            name: config.name,
            driver,
            clock,
            books: Mutex::new(books),
            settled: Condvar::new(),
            capabilities,
            reserved,
            moves: [AtomicU64::new(0), AtomicU64::new(0)],
            birth: Birth::now(),
        })))
    }

    /// Room for `len` elements, whose contents are unspecified: zero, or what an earlier buffer of
    /// this arena left there.
    ///
    /// Rounded up to 256 bytes. O(1), beside the granules to commit; without any bytes, no block
    /// is taken. Waits for driver calls of other threads only where it needs their granules.
    ///
    /// # Errors
    /// [`DeviceError::OutOfMemory`] after the arena's own idle memory was given back and that was
    /// not enough; [`DeviceError::OutOfAddresses`], [`DeviceError::TooLarge`],
    /// [`DeviceError::Alignment`], [`DeviceError::Driver`], [`DeviceError::Forked`]. The arena
    /// works on after each.
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        let shared = &self.0;
        shared.check_here()?;
        let (element, align) = (ByteSize::of(size_of::<T>()), ByteSize::of(align_of::<T>()));
        let largest_align = shared.capabilities.granularity;
        if align > largest_align {
            return Err(DeviceError::Alignment { requested: align, largest: largest_align });
        }
        let largest = shared.reserved[region.number()];
        let bytes = match element.checked_mul(ByteSize::of(len).get()) {
            Some(bytes) if bytes <= largest => bytes,
            _ => {
                lock(&shared.books).totals.failures.addresses += 1;
                return Err(DeviceError::TooLarge { len, element, largest });
            }
        };
        if bytes.is_zero() {
            return Ok(Buffer::empty(Arc::clone(shared), region, len));
        }
        let request = Request { size: bytes.get(), align: align.get(), end: End::Low };
        let placed = shared.obtain(region, request)?;
        Ok(Buffer::new(Arc::clone(shared), region, placed, len))
    }

    /// A buffer with a copy of `data`.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`]; [`DeviceError::Unsupported`] on a driver without host access,
    /// [`DeviceError::TooManyLeases`].
    pub fn alloc_from<T: Pod>(&self, data: &[T], region: Region) -> Result<Buffer<T>, DeviceError> {
        self.0.check_host_access()?;
        let lease = self.enter()?;
        let mut buffer = self.alloc(data.len(), region)?;
        buffer.slice_mut(&lease)?.copy_from_slice(data);
        Ok(buffer)
    }

    /// The right to use the arena's memory; keeps it awake. May be nested and held by many.
    ///
    /// # Errors
    /// [`DeviceError::TooManyLeases`], [`DeviceError::Forked`].
    pub fn enter(&self) -> Result<Lease, DeviceError> {
        self.0.check_here()?;
        let mut books = self.0.wait_for_move(lock(&self.0.books));
        let leases = books.leases.checked_add(1);
        books.leases = leases.ok_or(DeviceError::TooManyLeases { limit: u32::MAX })?;
        drop(books);
        Ok(Lease { arena: Arc::clone(&self.0) })
    }

    /// Sets the most that may be committed. What is above it stays until it is freed or given
    /// back; nothing more is committed until then.
    pub fn set_limit(&self, limit: ByteSize) {
        if self.0.check_here().is_ok() {
            lock(&self.0.books).limit = limit;
        }
    }

    /// The most that may be committed; zero in a forked child.
    #[must_use]
    pub fn limit(&self) -> ByteSize {
        if self.0.check_here().is_err() {
            return ByteSize::ZERO;
        }
        lock(&self.0.books).limit
    }

    /// All figures at one instant, without a driver call; all zero in a forked child.
    ///
    /// Holds the lock while it looks for the largest free span: at worst at every free block and
    /// granule, mostly at a few.
    #[must_use]
    pub fn snapshot(&self) -> ArenaSnapshot {
        let shared = &self.0;
        if shared.check_here().is_err() {
            return ArenaSnapshot::unknown(&shared.name, shared.driver.rung());
        }
        lock(&shared.books).snapshot(&shared.name, shared.driver.rung())
    }

    /// Committed and idle memory at one instant, for a sampler: no allocation, no driver call, and
    /// the lock is held for a few additions. Zero in a forked child.
    #[must_use]
    pub fn glance(&self) -> ArenaGlance {
        if self.0.check_here().is_err() {
            return ArenaGlance::default();
        }
        let books = lock(&self.0.books);
        ArenaGlance {
            live: ByteSize::new(books.live()),
            committed: ByteSize::new(books.backed()),
            idle: ByteSize::new(books.idle()),
        }
    }

    /// What the driver can do.
    #[must_use]
    pub fn capabilities(&self) -> Capabilities {
        self.0.capabilities
    }

    /// The driver in use.
    #[must_use]
    pub fn rung(&self) -> Rung {
        self.0.driver.rung()
    }

    /// The arena's name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.name
    }

    /// Walks all books and checks every invariant; for tests, at the cost of the whole arena.
    ///
    /// # Panics
    /// Where one is broken.
    #[doc(hidden)]
    pub fn validate(&self) {
        self.0.validate();
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.0
    }
}

impl Shared {
    /// Refuses in a forked child, where the lock may be held by a thread that is not there.
    pub(super) fn check_here(&self) -> Result<(), DeviceError> {
        if self.birth.is_here() { Ok(()) } else { Err(DeviceError::Forked) }
    }

    pub(super) fn check_host_access(&self) -> Result<(), DeviceError> {
        if self.capabilities.host_access { Ok(()) } else { Err(self.no_host_access()) }
    }

    pub(super) const fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    pub(super) fn no_host_access(&self) -> DeviceError {
        DeviceError::Unsupported { what: "access from the host", rung: self.driver.rung() }
    }

    /// Frees a block: bookkeeping only. In a forked child does nothing.
    pub(super) fn release(&self, region: Region, placed: Placed) {
        if self.check_here().is_ok() {
            lock(&self.books).release(region, placed, &*self.clock);
        }
    }

    fn validate(&self) {
        let books = lock(&self.books);
        books.validate();
        books.snapshot(&self.name, self.driver.rung()).validate();
    }

    /// Validates in debug builds.
    pub(super) fn debug_validate(&self) {
        if cfg!(debug_assertions) {
            self.validate();
        }
    }
}

impl Drop for Shared {
    /// Gives everything back to the driver: nobody holds a block, and nobody waits for the lock.
    /// Where the driver
    /// refuses, the range stays reserved. In a forked child does nothing.
    fn drop(&mut self) {
        if self.check_here().is_err() {
            return;
        }
        let books = lock(&self.books);
        for region in Region::ALL {
            let segment = &books.region(region).segment;
            let bare = segment.backed_runs().into_iter().all(|run| {
                let (at, size) = segment.place_of(run);
                self.driver.decommit(at, size, Key::new()).is_ok()
            });
            if bare {
                let _ = self.driver.unreserve(
                    segment.base(),
                    ByteSize::new(segment.reserved()),
                    Key::new(),
                );
            }
        }
    }
}

impl fmt::Debug for Shared {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Shared")
            .field("name", &self.name)
            .field("driver", &self.driver)
            .field("reserved", &self.reserved)
            .finish_non_exhaustive()
    }
}

/// Reserves address space for a region: what is wanted or, where the driver refuses that, an eighth
/// of what it accepts, a quarter for both regions. Addresses are short then (`ulimit -v`), and the
/// heap, stacks and other arenas need some too.
fn reserve_region(
    driver: &dyn Driver,
    granularity: ByteSize,
    wanted: ByteSize,
) -> Result<Segment, DriverError> {
    let whole = wanted.min(RESERVE_MAX).max(granularity).next_multiple_of(granularity);
    let whole = whole.unwrap_or(RESERVE_MAX);
    let (base, size) = reserve_or_halve(driver, granularity, whole)?;
    let part = ByteSize::new(size.get() / 8).next_multiple_of(granularity);
    let part = part.unwrap_or(granularity).max(granularity);
    // Where it cannot be given back it is kept.
    if size == whole || size <= part || driver.unreserve(base, size, Key::new()).is_err() {
        return Ok(Segment::new(base, size, granularity));
    }
    let (base, size) = reserve_or_halve(driver, granularity, part)?;
    Ok(Segment::new(base, size, granularity))
}

/// Reserves this much, halved until the driver accepts it; says how much.
fn reserve_or_halve(
    driver: &dyn Driver,
    granularity: ByteSize,
    mut size: ByteSize,
) -> Result<(DeviceAddress, ByteSize), DriverError> {
    // At most 62 halvings, from 2^62 bytes down to one granule.
    loop {
        match driver.reserve(size) {
            Ok(base) => return Ok((base, size)),
            Err(error) if size <= granularity => return Err(error),
            Err(_) => {
                let half = ByteSize::new(size.get() / 2).next_multiple_of(granularity);
                size = half.unwrap_or(granularity);
            }
        }
    }
}
