//! A typed block of device memory, freed on drop.
//!
//! A buffer keeps its arena alive. On backends with host access it is a slice of host memory,
//! available with a lease. Without a lease it has no address, and it stores no pointer.
//!
//! Contents: a new buffer has unspecified contents: zero, or data of an earlier buffer of the same
//! arena. Every byte is initialised.
//!
//! Invariant: `buffer not empty <=> it owns one live block of at least len x size_of::<T>() bytes`.
#![expect(unsafe_code, reason = "device memory is seen as a slice through the driver's pointer")]

use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use crate::api::compact::BlockPin;
use crate::api::lane::{Lane, Lease};
use crate::driver::DeviceAddress;
use crate::engine::alloc::copy_to;
use crate::engine::move_block::resolve;
use crate::exec::{ArenaInner, BlockHandle, BlockPlace};
use crate::state::{AllocRequest, ArenaState, Placement, RequestOrigin};
#[cfg(doc)]
use crate::types::error::DeviceError;
use crate::types::{Contents, Region, Result};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::Ordering;

/// Elements in device memory, freed on drop. A drop makes no driver call.
///
/// It keeps its arena alive, can be sent to another thread, and may outlive every [`DeviceArena`]
/// handle.
///
/// ```
/// # use std::sync::Arc;
/// # use lowtide_gpu::clock::SystemClock;
/// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
/// # let clock = Arc::new(SystemClock::new());
/// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
///
/// let mut tokens = arena.alloc_from(&[1_u32, 2, 3], Region::Dynamic)?;
/// drop(arena); // the buffer keeps it
/// tokens.resize(1024)?; // keeps the first elements
/// let lease = tokens.enter()?;
/// assert_eq!((tokens.len(), tokens.slice(&lease)?[2]), (1024, 3));
/// # Ok::<(), lowtide_gpu::DeviceError>(())
/// ```
///
/// [`DeviceArena`]: crate::DeviceArena
pub struct Buffer<T: Pod> {
    /// The block; taken out when the buffer is dropped.
    pub(crate) owned: ManuallyDrop<Box<BlockHandle>>,
    len: usize,
    elements: PhantomData<T>,
}

impl<T: Pod> Buffer<T> {
    /// Creates a buffer of `len` elements on a live block that has room for them at their
    /// alignment. There is no block if the elements have no bytes.
    #[inline]
    pub(crate) fn new(owned: Box<BlockHandle>, len: usize) -> Self {
        if let Some(block) = &owned.block {
            assert!(block.span.size >= (len * size_of::<T>()) as u64, "block too small");
            assert!(block.at.get().is_multiple_of(align_of::<T>() as u64), "block not aligned");
        }
        Self { owned: ManuallyDrop::new(owned), len, elements: PhantomData }
    }

    /// Returns the number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns `true` if there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Returns the bytes of the elements, before rounding.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        ByteSize::of(self.len * size_of::<T>())
    }

    /// Returns the buffer's region.
    #[must_use]
    pub fn region(&self) -> Region {
        self.owned.region
    }

    /// Returns a lease of the buffer's arena, for callers without an arena handle.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::enter`](crate::DeviceArena::enter).
    pub fn enter(&self) -> Result<Lease> {
        Lease::of(self.inner(), Vec::new())
    }

    /// Returns the elements, while the lease is held.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on a driver without host access, [`DeviceError::ForeignLease`]
    /// for a lease of another arena, [`DeviceError::Forked`]; [`DeviceError::ContentsLost`], until
    /// it is resized to zero elements.
    pub fn slice<'a>(&'a self, lease: &'a Lease) -> Result<&'a [T]> {
        let start = self.start(lease)?;
        // SAFETY: `start` is aligned for T (asserted in `pointer`, or dangling and aligned if there
        // are no bytes) and has the provenance of the driver's whole reservation
        // (`Driver::host_pointer`; drivers are sealed to this crate). `len` elements lie in the
        // block (asserted in `new`), within a reservation and so below `isize::MAX` bytes
        // (`exec::reserve` limits it to that). The block is live while `self` is borrowed, and it
        // stays where `BlockPlace::get` found it while the lease exists (`engine::move_block` moves
        // nothing while one is held, `Lease::of` waits for a move in progress). A live block's
        // granules are committed while a lease is held: granules that a block touches leave only
        // when the arena sleeps, which it does not under a lease. So the bytes are readable, and
        // they are initialised (`Driver::host_pointer`). T is Pod: any bytes are a value. There is
        // no concurrent writer: blocks do not overlap (invariant of the index), the buffer owns its
        // block alone, writing takes `&mut self`, and no device uses it after a call returned
        // (drivers with host access and asynchronous work are rejected at open).
        Ok(unsafe { slice::from_raw_parts(start.as_ptr(), self.len) })
    }

    /// Returns the elements for writing, while the lease is held.
    ///
    /// # Errors
    /// The errors of [`Buffer::slice`].
    pub fn slice_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<&'a mut [T]> {
        let start = self.start(lease)?;
        // SAFETY: as in `slice`; `&mut self` is borrowed for as long as the slice lives, so that
        // no other slice of this block exists. The granules are committed for writing too. Any
        // T leaves initialised bytes behind, because a Pod has no padding.
        Ok(unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.len) })
    }

    /// Resizes the buffer to `len` elements. The first elements, up to the smaller length, are
    /// kept; the contents of new ones are unspecified.
    ///
    /// If it shrinks, or the space after it is free, it is resized in place: O(1), and the rest is
    /// free. Otherwise it is copied to a new block, and both are live during the copy.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc`](crate::DeviceArena::alloc); [`DeviceError::Driver`] if
    /// the copy fails; [`DeviceError::ContentsLost`]; [`DeviceError::Unsupported`] if a view of the
    /// buffer was given to a stream that captured a graph. The buffer is unchanged.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        #[cfg(feature = "cuda")]
        self.check_uncaptured()?;
        let inner = self.inner();
        let region = self.region();
        let origin = RequestOrigin::BUFFER;
        let wanted = inner.request::<T>(len, None, region, origin)?;
        let block = match self.owned.block {
            _ if wanted.size == 0 => None,
            None => {
                let placed = inner.alloc_block(wanted)?;
                for lane in self.owned.lanes.iter() {
                    inner.note_use(placed.id, lane);
                }
                Some(placed)
            }
            Some(old) => match inner.resize_in_place(old, wanted.requested)? {
                Some(resized) => Some(resized),
                None => {
                    let _lease = Lease::of(inner, self.owned.lanes.iter().cloned().collect())?;
                    let old = inner.run(async |cx| resolve(cx, old).await)?;
                    let wanted = AllocRequest { origin: RequestOrigin::RESIZE, ..wanted };
                    let new = inner.alloc_block(wanted)?;
                    Some(inner.run(async |cx| copy_to(cx, old, new).await)?)
                }
            },
        };
        if let (None, Some(old)) = (block, self.owned.block) {
            inner.run_now(|state| state.release_after(old, &[]));
        }
        (self.owned.block, self.owned.place, self.len) = (block, BlockPlace::of(block), len);
        Ok(())
    }

    /// Prevents compaction from moving the block until the pin is dropped. A resize may still move
    /// the buffer to another block.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn pin(&self) -> Result<BlockPin> {
        self.inner().check_here()?;
        Ok(BlockPin::new(self.inner(), self.owned.block.map(|block| block.id)))
    }

    /// Returns the address for work on the device while the lease is held; `None` if the elements
    /// have no bytes.
    ///
    /// The work must be on the stream of the lane that allocated the buffer, or on one passed to
    /// [`Buffer::record_use`]. A buffer without a lane may be used on any stream: its memory is
    /// reused only after all work of the device.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLease`], [`DeviceError::ContentsLost`], [`DeviceError::Forked`].
    pub fn address(&self, lease: &Lease) -> Result<Option<DeviceAddress>> {
        lease.check_of(self.inner())?;
        let Some(block) = self.owned.block else { return Ok(None) };
        self.owned.place.get(self.inner(), block).map(Some)
    }

    /// Records that another lane's stream also uses the buffer: after the drop, its work until then
    /// is waited for as well.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLane`] for a lane of another arena, [`DeviceError::Forked`].
    pub fn record_use(&mut self, lane: &Lane) -> Result<()> {
        lane.check_of(self.inner())?;
        let known = lane.known();
        // Buffers without a lane already wait for all device work.
        let lanes = &self.owned.lanes;
        if !lanes.is_empty() && !lanes.iter().any(|lane| lane.stream == known.stream) {
            self.add_lane(lane);
        }
        Ok(())
    }

    /// Sets how the arena's sleep treats the contents; `None` for the region's setting in the sleep
    /// options. A resize to another block resets it.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn set_contents(&mut self, contents: Option<Contents>) -> Result<()> {
        self.inner().check_here()?;
        let region = self.region();
        let BlockHandle { shard, block, .. } = &mut **self.owned;
        if let Some(block) = block {
            // The block is not cached when freed: a cache would keep this setting.
            block.moves = Placement::STALE;
            let (inner, id) = (&shard.inner, block.id);
            inner.run_now(|state| {
                state.region_mut(region).pins.set_contents(id, contents);
                state.events.push("contents", |line| {
                    line.number("address", state.region(region).address_of(id))
                        .text("contents", contents.map_or("usual", Contents::name))
                });
            });
        }
        Ok(())
    }

    /// Returns `true` if a sleep discarded the contents since the last call; they are unspecified
    /// then. Takes the arena's lock for a lookup; `false` in a forked child.
    #[must_use]
    pub fn take_discarded(&self) -> bool {
        let inner = self.inner();
        let Some(block) = self.owned.block else { return false };
        let take =
            |state: &mut ArenaState| state.region_mut(self.region()).pins.take_discarded(block.id);
        inner.run_here(take).unwrap_or_default()
    }

    /// Adds a lane to the lanes that use the buffer.
    pub(crate) fn add_lane(&mut self, lane: &Lane) {
        self.owned.lanes.add(Arc::clone(lane.known()));
        if let Some(block) = self.owned.block {
            self.inner().note_use(block.id, lane.known());
        }
    }

    #[cfg(all(test, not(lowtide_loom)))]
    pub(crate) fn block_id(&self) -> Option<crate::index::BlockId> {
        self.owned.block.map(|block| block.id)
    }

    pub(crate) fn inner(&self) -> &Arc<ArenaInner> {
        &self.owned.shard.inner
    }

    /// Fails if a graph may have captured the buffer: its memory must stay as it is.
    #[cfg(feature = "cuda")]
    fn check_uncaptured(&mut self) -> Result<()> {
        let BlockHandle { lanes, view, .. } = &mut **self.owned;
        if !view.is_captured(|| lanes.is_any_capturing()) {
            return Ok(());
        }
        let (what, backend) = ("resizing a captured buffer", self.inner().driver.backend());
        Err(crate::types::DeviceError::Unsupported { what, backend })
    }

    /// Returns the pointer to the elements, for a holder of this arena's lease.
    fn start(&self, lease: &Lease) -> Result<NonNull<T>> {
        lease.check_of(self.inner())?;
        self.inner().check_host_access()?;
        let Some(block) = self.owned.block else { return Ok(NonNull::dangling()) };
        let at = self.owned.place.get(self.inner(), block)?;
        self.pointer(at).ok_or_else(|| self.inner().no_host_access())
    }

    /// Returns the pointer to the block's address; `None` without host access.
    fn pointer(&self, at: DeviceAddress) -> Option<NonNull<T>> {
        assert!(at.is_multiple_of(ByteSize::of(align_of::<T>())), "block not aligned");
        self.inner().driver.host_pointer(at).map(NonNull::cast)
    }
}

impl BlockPlace {
    /// Returns the block's address, for a holder of a lease. No block moves while the lease is
    /// held, and the lease was granted under the lock that counted the last move. So all concurrent
    /// callers read the same count and store the same address, and a thread that reads that count
    /// from `moves` reads the address stored before it.
    fn get(&self, inner: &ArenaInner, block: Placement) -> Result<DeviceAddress> {
        let moves = inner.executor.moves(block.id.region());
        if self.moves.load(Ordering::Acquire) == moves {
            return Ok(DeviceAddress::new(self.at.load(Ordering::Relaxed)));
        }
        let block = inner.run(async |cx| resolve(cx, block).await)?;
        self.at.store(block.at.get(), Ordering::Relaxed);
        self.moves.store(block.moves, Ordering::Release);
        Ok(block.at)
    }
}

impl<T: Pod> Drop for Buffer<T> {
    /// Frees the block: only updates bookkeeping under the arena's lock. Makes no driver call,
    /// unless the buffer was viewed, or this was the last holder of the arena. Does nothing in a
    /// forked child.
    #[inline]
    fn drop(&mut self) {
        // SAFETY: dropping is the last use of the buffer, and happens once.
        let owned = unsafe { ManuallyDrop::take(&mut self.owned) };
        owned.release();
    }
}

lowtide_core::debug_as!([T: Pod] Buffer<T>, |it|
    arena: it.inner().name, region: it.region(), len: it.len);
