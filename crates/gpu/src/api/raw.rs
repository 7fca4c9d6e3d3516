//! Raw blocks: allocated and freed by address, for code that keeps addresses and not buffers.
//!
//! ONNX Runtime's allocator callbacks and C code need an address from an allocation, and free by
//! address. The owner is responsible for every use of the block; this module neither reads nor
//! writes the memory. A raw block is freed by [`DeviceArena::free`], [`Lane::free`] or
//! [`DeviceArena::reset`], or with the arena. If the device may still use the block then, the
//! arena's memory is leaked.
//!
//! Invariant: an address is known from the call that returned it until the block is freed.
#![expect(unsafe_code, reason = "only the caller knows that a stream is there")]

use std::fmt;

use crate::api::arena::DeviceArena;
use crate::api::lane::Lane;
use crate::driver::{DeviceAddress, StreamHandle};
use crate::engine::{completion, raw_block};
use crate::state::{Placement, RawUser, RequestOrigin};
use crate::types::{DeviceError, Region, Result};
use lowtide_core::bytes::ByteSize;

/// A raw block from [`DeviceArena::alloc_raw`].
///
/// It describes the block and does not own it: dropping the value frees nothing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct RawBlock {
    /// The first address.
    pub at: DeviceAddress,
    /// The requested size.
    pub requested: ByteSize,
    /// The size after rounding up to 256 bytes.
    pub size: ByteSize,
    /// The region.
    pub region: Region,
}

impl RawBlock {
    const fn of(placed: Placement) -> Self {
        Self {
            at: placed.at,
            requested: ByteSize::new(placed.requested),
            size: ByteSize::new(placed.span.size),
            region: placed.id.region(),
        }
    }
}

impl fmt::Display for RawBlock {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} at {}", self.size, self.at)
    }
}

impl DeviceArena {
    /// Allocates a raw block at a multiple of `align` bytes (1 for any). Its contents are
    /// unspecified.
    ///
    /// For code that keeps addresses: a kernel, a C library. Use [`DeviceArena::alloc`] for slices.
    /// The block is live until [`DeviceArena::free`] or [`DeviceArena::reset`]. O(log n) in the
    /// number of raw blocks.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::{ByteSize, clock::SystemClock};
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    ///
    /// let size = ByteSize::kib(10);
    /// let block = arena.alloc_raw(size, ByteSize::new(512), Region::Dynamic)?;
    /// assert!(block.at.is_multiple_of(ByteSize::new(512)) && block.size >= size);
    /// arena.free(block.at)?;
    /// assert!(matches!(arena.free(block.at), Err(DeviceError::NotLive { .. })));
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::ZeroSize`]; [`DeviceError::Alignment`] if `align` is not a power of two, or
    /// exceeds the granule; otherwise the errors of [`DeviceArena::alloc`].
    pub fn alloc_raw(&self, size: ByteSize, align: ByteSize, region: Region) -> Result<RawBlock> {
        self.alloc_raw_for(None, size, align, region)
    }

    /// Allocates a raw block for the next work of a stream, without a lane. For callers that are
    /// given streams and do not own them, such as a C interface. The block counts as used by the
    /// stream; when the last such block is freed, an event is recorded behind the stream's work and
    /// the arena forgets the stream. A stream that the driver then creates with the same handle is
    /// another one. An error of one stream fails no call for another: its work is waited for with
    /// all other work of the device.
    ///
    /// # Safety
    /// The stream belongs to the arena's driver. It exists until this returns, and until each block
    /// that uses it by [`DeviceArena::alloc_raw_on`] or [`DeviceArena::record_use_on`] is freed, or
    /// [`DeviceArena::end_stream`] is called.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc_raw`].
    #[inline]
    pub unsafe fn alloc_raw_on(
        &self,
        stream: StreamHandle,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<RawBlock> {
        // SAFETY: the contract of this function; the block counts as a guest until it is freed.
        let guest = unsafe { self.guest(stream) };
        self.alloc_raw_for(guest, size, align, region)
    }

    /// Frees a raw block after its last use on a stream, as [`Lane::free`].
    ///
    /// # Safety
    /// As [`DeviceArena::alloc_raw_on`].
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    #[inline]
    pub unsafe fn free_on(&self, at: DeviceAddress, stream: StreamHandle) -> Result<RawBlock> {
        // SAFETY: the contract of this function.
        self.free_after(at, unsafe { self.guest(stream) })
    }

    /// Records that a stream also uses a raw block, as [`DeviceArena::record_use`].
    ///
    /// # Safety
    /// As [`DeviceArena::alloc_raw_on`].
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub unsafe fn record_use_on(&self, at: DeviceAddress, stream: StreamHandle) -> Result<()> {
        // SAFETY: the contract of this function.
        match unsafe { self.guest(stream) } {
            Some(guest) => self.record_use_by(at, guest),
            None => self.raw_block(at).map(drop),
        }
    }

    /// Ends a stream without a lane that is about to be destroyed. Records an event behind its work
    /// and does not wait. Raw blocks that it uses count as used by any stream from then on. Does
    /// nothing for a stream with lanes, and for one that no live block uses.
    ///
    /// # Safety
    /// As [`DeviceArena::alloc_raw_on`]; no other call with the stream is in progress.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub unsafe fn end_stream(&self, stream: StreamHandle) -> Result<()> {
        let inner = self.inner();
        let known = inner.run_here(|state| state.streams.find(stream))?;
        if let Some(key) = known {
            inner.run(async |cx| completion::end_stream(cx, key, true).await);
        }
        Ok(())
    }

    /// Records that a stream captures a graph from now on, or no more. The memory of raw blocks
    /// that are allocated or freed on the stream meanwhile is held when they are freed, until
    /// [`DeviceArena::release_captured`]: a launch of the graph uses it. Until the end is recorded,
    /// no call of the arena waits for the whole device, and memory that needs such a wait is not
    /// available.
    ///
    /// For programs that give raw blocks to captured work: an arena does not ask the driver at each
    /// free of a raw block, which would double the cost of a pair.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub fn set_capturing(&self, stream: StreamHandle, is_capturing: bool) -> Result<()> {
        self.inner().run_here(|state| {
            let all = &mut state.streams.capturing;
            all.retain(|&known| known != stream);
            all.extend(is_capturing.then_some(stream));
        })
    }

    /// Frees the memory that graphs may have captured
    /// ([`ArenaSnapshot::captured`](crate::ArenaSnapshot::captured)), and returns the bytes of its
    /// blocks. It is reused after all work of the device. Makes no driver call. Before this the
    /// arena cannot be closed, and dropping it leaks the memory.
    ///
    /// # Safety
    /// No graph that captured work on this memory is launched any more, nor is a capture of such
    /// work in progress: the graphs are destroyed, or never launched again. Launches in progress
    /// may go on.
    ///
    /// # Errors
    /// [`DeviceError::Forked`].
    pub unsafe fn release_captured(&self) -> Result<ByteSize> {
        self.inner().run_here(|state| state.release_captured())
    }

    /// Returns a stream without a lane as a user; `None` if the driver's work needs no order.
    ///
    /// # Safety
    /// As [`DeviceArena::alloc_raw_on`].
    #[inline]
    unsafe fn guest(&self, stream: StreamHandle) -> Option<RawUser> {
        self.inner().capabilities.asynchronous.then_some(RawUser::Guest(stream))
    }

    /// Allocates a raw block for the next work of a user, if one is given.
    fn alloc_raw_for(
        &self,
        user: Option<RawUser>,
        size: ByteSize,
        align: ByteSize,
        region: Region,
    ) -> Result<RawBlock> {
        let inner = self.inner();
        let origin = RequestOrigin { lane: user.and_then(RawUser::number), ..RequestOrigin::RAW };
        let len = size.as_usize().unwrap_or(usize::MAX);
        let wanted = inner.request::<u8>(len, Some(align), region, origin)?;
        if wanted.size == 0 {
            return Err(DeviceError::ZeroSize);
        }
        let placed = inner.alloc_raw_block(wanted, user)?;
        Ok(RawBlock::of(placed))
    }

    /// Frees a raw block and returns its description. Makes no driver call.
    ///
    /// Its memory is reused after the work of the streams that use it: that of the lane it was
    /// allocated on, and those of [`DeviceArena::record_use`]. A block without a lane may be used
    /// on any stream: its memory is reused only after all work of the device.
    ///
    /// # Errors
    /// [`DeviceError::NotLive`] if it was freed before, or belongs to a buffer;
    /// [`DeviceError::InteriorAddress`], [`DeviceError::ForeignAddress`], [`DeviceError::Forked`].
    /// The arena is unchanged after each.
    pub fn free(&self, at: DeviceAddress) -> Result<RawBlock> {
        self.free_after(at, None)
    }

    fn free_after(&self, at: DeviceAddress, user: Option<RawUser>) -> Result<RawBlock> {
        let inner = self.inner();
        let (freed, left) = inner.run_here(|state| raw_block::free(state, at, user))??;
        inner.end_streams(&left);
        Ok(RawBlock::of(freed))
    }

    /// Resizes a raw block in place; returns `None` if the block cannot grow there. When the block
    /// shrinks, the rest is free. Only the owner of the block calls this.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`], and those of [`DeviceArena::alloc_raw`]. The block is
    /// unchanged.
    pub(crate) fn resize_raw(&self, at: DeviceAddress, size: ByteSize) -> Result<Option<RawBlock>> {
        let inner = self.inner();
        let placed = inner.run_here(|state| raw_block::find(state, at))??;
        let Some(resized) = inner.resize_in_place(placed, size.get())? else { return Ok(None) };
        inner.run_now(|state| {
            // Only its owner resizes and frees it.
            state.raw.get_mut(&at).into_iter().for_each(|raw| raw.placed = resized);
        });
        Ok(Some(RawBlock::of(resized)))
    }

    /// Records that a lane's stream also uses a raw block: after the free, its work until then is
    /// waited for as well. If the lane is dropped before the block is freed, the memory is reused
    /// only after all work of the device.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::{ByteSize, clock::SystemClock, driver::StreamHandle};
    /// # use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver, Region};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    /// // SAFETY: the host driver has no streams.
    /// let (computes, copies) =
    ///     unsafe { (arena.lane(StreamHandle::new(1))?, arena.lane(StreamHandle::new(2))?) };
    /// let block = computes.alloc_raw(ByteSize::kib(4), ByteSize::new(256), Region::Dynamic)?;
    /// arena.record_use(block.at, &copies)?;
    /// computes.free(block.at)?; // reused after the work of both
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`]; [`DeviceError::ForeignLane`] for a lane of another
    /// arena.
    pub fn record_use(&self, at: DeviceAddress, lane: &Lane) -> Result<()> {
        let inner = self.inner();
        lane.check_of(inner)?;
        self.record_use_by(at, lane.known().user())
    }

    fn record_use_by(&self, at: DeviceAddress, user: RawUser) -> Result<()> {
        let inner = self.inner();
        let left = inner.run_here(|state| raw_block::record_use(state, at, user))??;
        inner.end_streams(&left);
        Ok(())
    }

    /// Records that streams which the arena does not know use a raw block: its memory is reused
    /// only after all work of the device.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn record_unknown_use(&self, at: DeviceAddress) -> Result<()> {
        let left = self.inner().run_here(|state| raw_block::record_unknown_use(state, at))??;
        self.inner().end_streams(&left);
        Ok(())
    }

    /// Returns the raw block at this address. O(log n) in the number of raw blocks.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn raw_block(&self, at: DeviceAddress) -> Result<RawBlock> {
        self.inner().run_here(|state| raw_block::find(state, at))?.map(RawBlock::of)
    }

    /// Returns the raw block that contains this address. O(log n) in the number of raw blocks.
    ///
    /// # Errors
    /// [`DeviceError::NotLive`] if the address is of this arena and in no raw block;
    /// [`DeviceError::InteriorAddress`] if it is in a buffer; [`DeviceError::ForeignAddress`],
    /// [`DeviceError::Forked`].
    pub fn raw_block_containing(&self, at: DeviceAddress) -> Result<RawBlock> {
        self.inner().run_here(|state| raw_block::find_containing(state, at))?.map(RawBlock::of)
    }
}

impl Lane {
    /// Allocates a raw block for this lane's next work. Like [`DeviceArena::alloc_raw`], and in the
    /// order of the stream like [`Lane::alloc`]: memory that this lane freed is reused first.
    ///
    /// The block does not keep the lane. Drop the lane after its blocks are freed; otherwise their
    /// memory is reused only after all work of the device.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::alloc_raw`].
    pub fn alloc_raw(&self, size: ByteSize, align: ByteSize, region: Region) -> Result<RawBlock> {
        self.arena().alloc_raw_for(Some(self.known().user()), size, align, region)
    }

    /// Frees a raw block of the lane's arena after its last use on this lane. Equals
    /// [`DeviceArena::record_use`] and [`DeviceArena::free`], in one step.
    ///
    /// # Errors
    /// The errors of [`DeviceArena::free`].
    pub fn free(&self, at: DeviceAddress) -> Result<RawBlock> {
        self.arena().free_after(at, Some(self.known().user()))
    }
}
