//! A typed block of device memory, freed when it is dropped.
//!
//! It holds its arena, so that the arena outlives it. On `host_access` rungs it is a slice of host
//! memory, for whoever shows a lease. It has no address without a lease, and no pointer at all.
//!
//! Contents: a new buffer has unspecified contents: zero, or what an earlier buffer of the same
//! arena left there. Every byte is initialised.
//!
//! Invariant: `buffer not empty <=> it owns one live block of at least len x size_of::<T>() bytes`.
#![expect(unsafe_code, reason = "device memory is seen as a slice through the driver's pointer")]

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use super::compact::BlockPin;
use super::driver::DeviceAddress;
use super::error::DeviceError;
use super::front::{Owned, Place};
#[cfg(feature = "cuda")]
use super::lane::Known;
use super::lane::Lane;
use super::lease::Lease;
use super::planted::Planted;
use super::record::Operation;
use super::region::{Placed, Region, Wanted};
use super::shared::Shared;
use super::sleep::Contents;
use crate::bytes::ByteSize;
use crate::sync::atomic::Ordering;

/// Elements in device memory, freed when this is dropped: bookkeeping, no driver call.
///
/// It keeps its arena, may go to another thread, and may outlive every [`DeviceArena`] handle.
///
/// ```
/// # use std::sync::Arc;
/// # use lowtide::clock::SystemClock;
/// use lowtide::device::{ArenaConfig, DeviceArena, HostDriver, Region};
/// # let clock = Arc::new(SystemClock::new());
/// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
///
/// let mut tokens = arena.alloc_from(&[1_u32, 2, 3], Region::Dynamic)?;
/// drop(arena); // the buffer keeps it
/// tokens.resize(1024)?; // keeps what was there
/// let lease = tokens.enter()?;
/// assert_eq!((tokens.len(), tokens.slice(&lease)?[2]), (1024, 3));
/// # Ok::<(), lowtide::device::DeviceError>(())
/// ```
///
/// [`DeviceArena`]: super::DeviceArena
pub struct Buffer<T: Pod> {
    /// The block; taken out when the buffer is dropped.
    owned: ManuallyDrop<Box<Owned>>,
    len: usize,
    elements: PhantomData<T>,
    #[cfg(feature = "cuda")]
    pub(super) view: super::view::View<T>,
}

impl<T: Pod> Buffer<T> {
    /// The owner of a live block, which holds `len` elements at their alignment; of none, where
    /// they have no bytes.
    #[inline]
    pub(super) fn new(owned: Box<Owned>, len: usize) -> Self {
        if let Some(block) = &owned.block {
            assert!(block.span.size >= ByteSize::of(len * size_of::<T>()).get(), "block too small");
            assert!(block.at.is_multiple_of(ByteSize::of(align_of::<T>())), "block not aligned");
        }
        Self {
            owned: ManuallyDrop::new(owned),
            len,
            elements: PhantomData,
            #[cfg(feature = "cuda")]
            view: super::view::View::default(),
        }
    }

    /// The number of elements.
    #[must_use]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no elements.
    #[must_use]
    pub const fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// The bytes of the elements, before rounding.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        ByteSize::of(self.len * size_of::<T>())
    }

    /// The region that the buffer is in.
    #[must_use]
    pub fn region(&self) -> Region {
        self.owned.region
    }

    /// The right to use the arena that the buffer is in: for who has the buffer and not the arena.
    ///
    /// # Errors
    /// As [`DeviceArena::enter`](super::DeviceArena::enter).
    pub fn enter(&self) -> Result<Lease, DeviceError> {
        Lease::of(self.shared())
    }

    /// The elements, for as long as the lease is held.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on a driver without host access,
    /// [`DeviceError::ForeignLease`] for a lease of another arena, [`DeviceError::Forked`];
    /// [`DeviceError::ContentsLost`], until it is resized to nothing.
    pub fn slice<'a>(&'a self, lease: &'a Lease) -> Result<&'a [T], DeviceError> {
        let start = self.start(lease)?;
        // SAFETY: `start` is aligned for T (asserted in `pointer`, or dangling and aligned where
        // there are no bytes) and has the provenance of the driver's whole reservation
        // (`Driver::host_pointer`; drivers are sealed to this crate). `len` elements lie in the
        // block (asserted in `new`), within a reservation and so below `isize::MAX` bytes
        // (`reserve_region` holds it at that). The block is live while `self` is borrowed, and it
        // stays where `Place::get` found it while the lease is (`Shared::move_block` moves nothing
        // while one is held, `Lease::of` waits for a move under way). A live block's granules are
        // committed while a lease is held: those that a block touches leave only when the arena
        // sleeps, which it does not under a lease (`Shared::drain`). So the bytes are readable, and
        // they are initialised (`Driver::host_pointer`). T is Pod: any bytes are a value. Nobody
        // writes: blocks do not overlap (invariant of the index), the buffer owns its block alone,
        // writing takes `&mut self`, and no device works on it after its call returned (drivers
        // with host access are refused at open where one might).
        Ok(unsafe { slice::from_raw_parts(start.as_ptr(), self.len) })
    }

    /// The elements, to write, for as long as the lease is held.
    ///
    /// # Errors
    /// As [`Buffer::slice`].
    pub fn slice_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<&'a mut [T], DeviceError> {
        let start = self.start(lease)?;
        // SAFETY: as in `slice`; `&mut self` is borrowed for as long as the slice lives, so that
        // no other slice of this block exists. The granules are committed for writing too. Any
        // T leaves initialised bytes behind, because a Pod has no padding.
        Ok(unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.len) })
    }

    /// Lets the buffer have `len` elements, of which the first, as many as it had and has, are
    /// kept; the contents of others are unspecified.
    ///
    /// Where it stands, if it shrinks or there is room after it: O(1), and what is cut off is free.
    /// Else it is copied to a new place, and both are held meanwhile. Nobody has a slice of it now.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`](super::DeviceArena::alloc), and [`DeviceError::Driver`] where the
    /// copy fails; [`DeviceError::ContentsLost`]; the buffer is as it was.
    pub fn resize(&mut self, len: usize) -> Result<(), DeviceError> {
        let shared = self.shared();
        let region = self.region();
        let (bytes, align) = shared.layout::<T>(len, region)?;
        let block = match (Wanted::new(bytes, align), self.owned.block) {
            (None, _) => None,
            (Some(wanted), None) => {
                let placed = shared.obtain(region, wanted)?;
                for lane in &self.owned.lanes {
                    shared.tell_use(region, placed.id, lane);
                }
                Some(placed)
            }
            (Some(wanted), Some(old)) => match shared.resize_in_place(region, old, bytes.get())? {
                Some(resized) => Some(resized),
                None => {
                    let _lease = Lease::of(shared)?;
                    let old = shared.resolve(region, old)?;
                    Some(shared.moved(region, old, wanted)?)
                }
            },
        };
        if let (None, Some(old)) = (block, self.owned.block) {
            shared.release(region, old);
        }
        (self.owned.block, self.owned.place, self.len) = (block, Place::of(block), len);
        Ok(())
    }

    /// Keeps the block where it is, through every compaction, until the pin is dropped. A resize
    /// may still take another block.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn pin(&self) -> Result<BlockPin, DeviceError> {
        self.shared().check_here()?;
        Ok(BlockPin::new(self.shared(), self.region(), self.owned.block.map(|block| block.id)))
    }

    /// Where the buffer is, for work on the device while the lease is held. `None` where its
    /// elements have no bytes.
    ///
    /// The work is to be in the stream of the lane that the buffer was taken on, or in one that
    /// [`Buffer::record_use`] named. A buffer of no lane may be used anywhere: then all work of the
    /// device is waited for before its memory is.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLease`], [`DeviceError::ContentsLost`], [`DeviceError::Forked`].
    pub fn address(&self, lease: &Lease) -> Result<Option<DeviceAddress>, DeviceError> {
        lease.check_of(self.shared())?;
        let Some(block) = self.owned.block else { return Ok(None) };
        self.owned.place.get(self.shared(), self.region(), block).map(Some)
    }

    /// Notes that another lane's stream uses the buffer too: its work until the buffer is dropped
    /// is waited for as well.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLane`] for a lane of another arena, [`DeviceError::Forked`].
    pub fn record_use(&mut self, lane: &Lane) -> Result<(), DeviceError> {
        self.shared().check_here()?;
        let known = lane.known();
        if !Arc::ptr_eq(self.shared(), lane.arena().shared()) {
            return Err(DeviceError::ForeignLane {
                buffer_of: self.shared().name.clone(),
                lane_of: lane.arena().name().to_owned(),
            });
        }
        if self.shared().planted(Planted::ForgottenUse) {
            return Ok(());
        }
        // Of a buffer of no lane all work is waited for already.
        let lanes = &self.owned.lanes;
        if !lanes.is_empty() && !lanes.iter().any(|lane| lane.is_beside(known)) {
            self.add_lane(lane);
        }
        Ok(())
    }

    /// Says what becomes of the contents when the arena falls asleep; `None` for what its options
    /// say of the region. A resize that takes another block forgets it.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn set_contents(&mut self, contents: Option<Contents>) -> Result<(), DeviceError> {
        self.shared().check_here()?;
        let region = self.region();
        let Owned { home, block, .. } = &mut **self.owned;
        if let Some(block) = block {
            // It goes back to the books, and to no front: there it would keep this note.
            block.moves = Placed::STALE;
            let (shared, id) = (&home.shared, block.id);
            let mut books = shared.books();
            books.region_mut(region).pins.set_contents(id, contents);
            books.tell(&*shared.clock, |numbers| {
                Some(Operation::Contents { id: numbers.of(region, id)?, contents })
            });
            drop(books);
            shared.pass_on();
        }
        Ok(())
    }

    /// Whether the contents were discarded by a sleep since this was last asked: what is there now
    /// is unspecified. Takes the arena's lock for a search; false in a forked child.
    #[must_use]
    pub fn take_discarded(&self) -> bool {
        let shared = self.shared();
        let Some(block) = self.owned.block else { return false };
        if shared.check_here().is_err() {
            return false;
        }
        shared.books().region_mut(self.region()).pins.take_discarded(block.id)
    }

    /// Notes one more lane, whoever has used the buffer before.
    pub(super) fn add_lane(&mut self, lane: &Lane) {
        self.owned.lanes.push(Arc::clone(lane.known()));
        if let Some(block) = self.owned.block {
            self.shared().tell_use(self.region(), block.id, lane.known());
        }
    }

    #[cfg(all(test, not(lowtide_loom)))]
    pub(super) fn block_id(&self) -> Option<super::ranges::BlockName> {
        self.owned.block.map(|block| block.id)
    }

    pub(super) fn shared(&self) -> &Arc<Shared> {
        &self.owned.home.shared
    }

    /// The lane that it was taken on.
    #[cfg(feature = "cuda")]
    pub(super) fn lane(&self) -> Option<&Known> {
        self.owned.lanes.first().map(AsRef::as_ref)
    }

    /// Notes that foreign code uses it: when it is freed, all work of the device is waited for.
    pub(super) fn note_foreign(&mut self) {
        self.owned.foreign = true;
    }

    /// The bytes of its block.
    pub(super) fn block_bytes(&self) -> u64 {
        self.owned.block.map_or(0, |block| block.span.size)
    }

    /// Lets it be one that any stream used, for the little that it still lives.
    #[cfg(feature = "cuda")]
    pub(super) fn forget_lanes(&mut self) {
        self.owned.lanes.clear();
    }

    /// Where the elements begin, for a holder of this arena's lease.
    fn start(&self, lease: &Lease) -> Result<NonNull<T>, DeviceError> {
        lease.check_of(self.shared())?;
        self.shared().check_host_access()?;
        let Some(block) = self.owned.block else { return Ok(NonNull::dangling()) };
        let at = self.owned.place.get(self.shared(), self.region(), block)?;
        self.pointer(at).ok_or_else(|| self.shared().no_host_access())
    }

    /// The pointer to where the block is; `None` without host access.
    fn pointer(&self, at: DeviceAddress) -> Option<NonNull<T>> {
        assert!(at.is_multiple_of(ByteSize::of(align_of::<T>())), "block not aligned");
        self.shared().driver.host_pointer(at).map(NonNull::cast)
    }
}

impl Place {
    /// Where the block is, for a holder of a lease: nothing moves while it is held, and it was
    /// entered under the lock under which the last move was counted. So all who are here at once
    /// read the same count and store the same address; whoever reads that count from `moves`
    /// reads the address that was stored before it.
    fn get(
        &self,
        shared: &Shared,
        region: Region,
        block: Placed,
    ) -> Result<DeviceAddress, DeviceError> {
        let moves = shared.moves[region.number()].load(Ordering::Relaxed);
        if self.moves.load(Ordering::Acquire) == moves {
            return Ok(DeviceAddress::new(self.at.load(Ordering::Relaxed)));
        }
        let block = shared.resolve(region, block)?;
        self.at.store(block.at.get(), Ordering::Relaxed);
        self.moves.store(block.moves, Ordering::Release);
        Ok(block.at)
    }
}

impl<T: Pod> Drop for Buffer<T> {
    /// Frees the block: bookkeeping under the arena's lock, no driver call, unless this was the
    /// last holder of the arena. In a forked child does nothing.
    #[inline]
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        self.let_view_go();
        // SAFETY: dropping is the last use of the buffer, and happens once.
        let owned = unsafe { ManuallyDrop::take(&mut self.owned) };
        owned.release();
    }
}

impl<T: Pod> fmt::Debug for Buffer<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Buffer")
            .field("arena", &self.shared().name)
            .field("region", &self.region())
            .field("len", &self.len)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}
