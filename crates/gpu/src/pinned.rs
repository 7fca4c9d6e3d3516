//! The pinned pool: host memory for data on its way to a device or back, page-locked by choice.
//!
//! Page-locking is slow, so a pool keeps its memory: it is a device arena over host memory of the
//! driver (`driver`), with watermarks (`pool`). This file has the typed buffer, and the only kind
//! of pointer to the pool's memory.
//!
//! A copy from or to page-locked memory is asynchronous: the device reads or writes the memory
//! after the call returned. cudarc does not wait for such a copy if it is given a plain slice. So
//! safe code never gets a slice of a buffer: it copies elements in and out. Asynchronous copies go
//! through a [`Lane`](crate::Lane), which owns the buffer until the copy is complete (`copy`), or
//! through a view for cudarc that waits for the stream (`cuda`).
//!
//! Contents: a new buffer has unspecified contents: zero, or data of an earlier buffer of the
//! same pool. Every byte is initialised.
//!
//! Invariants: `buffer has bytes <=> it owns one live block of at least len x size_of::<T>()
//! bytes`; a block is free, and its elements are read or written, only if the host has observed
//! that every copy of it is complete. A block of which that cannot be observed is quarantined:
//! never reused and never freed (`unfinished`).
#![expect(unsafe_code, reason = "host memory of the driver is seen as a slice")]

mod config;
mod copy;
#[cfg(feature = "cuda")]
mod cuda;
mod driver;
mod pool;

use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use self::pool::{PinnedBlock, PoolShared};
use crate::api::raw::RawBlock;
use crate::driver::HostMemory;
use crate::exec::DriverEvent;
use crate::state::RequestOrigin;
use crate::types::{DeviceError, Region, Result};
use lowtide_core::bytes::ByteSize;

pub use self::config::{PinnedConfig, PinnedKind};
pub use self::copy::PinnedCopy;
pub use self::pool::{PinnedPool, PinnedSnapshot};

/// Elements in memory of a pinned pool. Freed when dropped.
///
/// Elements are copied in and out: [`PinnedBuffer::write_at`], [`PinnedBuffer::read_at`],
/// [`PinnedBuffer::fill`], [`PinnedBuffer::to_vec`]. It does not deref to a slice: a copy from or
/// to page-locked memory goes on after the call that queued it returned, and a slice could be used
/// meanwhile. [`Lane::copy_to_device`](crate::Lane::copy_to_device) and
/// [`Lane::copy_to_host`](crate::Lane::copy_to_host) copy asynchronously, and own the buffer until
/// the copy is complete.
///
/// A buffer holds its pool. In a forked child every access is [`DeviceError::Forked`] and the drop
/// does nothing: page-locked memory of CUDA is shared with the parent, not copied.
///
/// ```
/// use std::sync::Arc;
/// use lowtide_gpu::{ByteSize, clock::SystemClock};
/// use lowtide_gpu::{HostDriver, PinnedConfig, PinnedKind, PinnedPool};
///
/// // Page-locked if this process may lock memory; the buffer says whether it is.
/// let kind = PinnedKind::PageLockedOrPageable;
/// let config = PinnedConfig { kind, limit: ByteSize::mib(4), ..PinnedConfig::new("staging") };
/// let clock = Arc::new(SystemClock::new());
/// let pool = PinnedPool::open(Arc::new(HostDriver::new()), clock, config)?;
///
/// let mut inputs = pool.alloc_from(&[1.0_f32, 2.0, 3.0])?;
/// inputs.write_at(0, &[10.0])?;
/// inputs.resize(1024)?; // keeps the first elements
/// let mut first = [0.0; 3];
/// inputs.read_at(0, &mut first)?;
/// assert_eq!((first, inputs.len()), ([10.0, 2.0, 3.0], 1024));
/// assert!(inputs.memory().is_some());
///
/// drop(inputs); // free for the next, and still committed
/// assert!(!pool.glance().idle.is_zero());
/// assert!(pool.maintain()?.is_zero()); // below the high watermark: nothing is freed
/// pool.close()?;
/// # Ok::<(), lowtide_gpu::DeviceError>(())
/// ```
///
/// There is no slice of a buffer for cudarc, which would not wait for the copy. Neither of these
/// examples compiles:
/// ```compile_fail,E0608
/// use std::sync::Arc;
/// use cudarc::driver::{CudaSlice, CudaStream};
/// use lowtide_gpu::PinnedBuffer;
///
/// fn overwrite(stream: &Arc<CudaStream>, from: &mut PinnedBuffer<u8>, to: &mut CudaSlice<u8>) {
///     stream.memcpy_htod(&from[..], to).unwrap();
///     let _ = from.fill(2); // would be copied
/// }
/// ```
/// ```compile_fail,E0608
/// use std::sync::Arc;
/// use cudarc::driver::{CudaSlice, CudaStream};
/// use lowtide_gpu::PinnedBuffer;
///
/// fn read(stream: &Arc<CudaStream>, from: &CudaSlice<u8>, to: &mut PinnedBuffer<u8>) {
///     stream.memcpy_dtoh(from, &mut to[..]).unwrap();
///     let _ = to.to_vec(); // would be the old contents
/// }
/// ```
pub struct PinnedBuffer<T: Pod> {
    pool: Arc<PoolShared>,
    /// The block; `None` if the elements have no bytes.
    block: Option<PinnedBlock>,
    start: NonNull<T>,
    len: usize,
    device_use: DeviceUse,
}

/// The possible use of a buffer by a device.
#[derive(Debug)]
enum DeviceUse {
    /// None: the host has observed that every copy is complete.
    None,
    /// Possible until this event is complete.
    Until(DriverEvent),
    /// Unknown: a copy was queued, and its end cannot be observed.
    Unproven,
}

// SAFETY: a buffer owns its block alone (blocks do not overlap: invariant of the index), so that it
// gives the access to its elements that a `Box<[T]>` gives, under the same bounds. The pool and the
// event that it holds are Send and Sync, asserted below.
unsafe impl<T: Pod + Send> Send for PinnedBuffer<T> {}
// SAFETY: as above: `&PinnedBuffer<T>` gives `&[T]`, and nothing that writes.
unsafe impl<T: Pod + Sync> Sync for PinnedBuffer<T> {}

const _: fn() = || {
    fn crosses_threads<T: Send + Sync>() {}
    crosses_threads::<PoolShared>();
    crosses_threads::<DeviceUse>();
};

impl<T: Pod> PinnedBuffer<T> {
    fn alloc(pool: &Arc<PoolShared>, len: usize) -> Result<Self> {
        Ok(Self::new(Arc::clone(pool), pool.alloc_block::<T>(len)?, len))
    }

    /// Creates the owner of a live block; of no block if the elements have no bytes.
    ///
    /// # Panics
    /// If the block is too small, or not aligned.
    fn new(pool: Arc<PoolShared>, block: Option<PinnedBlock>, len: usize) -> Self {
        let start = block.map_or(NonNull::dangling(), |block| block.start.cast::<T>());
        assert!(start.is_aligned(), "the block is not aligned");
        assert_holds::<T>(block.as_ref(), len);
        Self { pool, block, start, len, device_use: DeviceUse::None }
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

    /// Returns the kind of memory of the elements; `None` if they have no bytes.
    #[must_use]
    pub fn memory(&self) -> Option<HostMemory> {
        self.block.map(|block| block.memory)
    }

    /// Copies `elements` to the elements from `start` on.
    ///
    /// # Errors
    /// [`DeviceError::Forked`]; [`DeviceError::Quarantined`] if a copy of the buffer may not be
    /// complete.
    ///
    /// # Panics
    /// If the elements do not fit in the buffer from `start` on.
    pub fn write_at(&mut self, start: usize, elements: &[T]) -> Result<()> {
        self.check()?;
        self.elements_mut()[start..][..elements.len()].copy_from_slice(elements);
        Ok(())
    }

    /// Copies the elements from `start` on to `into`, filling it.
    ///
    /// # Errors
    /// The errors of [`PinnedBuffer::write_at`].
    ///
    /// # Panics
    /// If the buffer has too few elements from `start` on.
    pub fn read_at(&self, start: usize, into: &mut [T]) -> Result<()> {
        self.check()?;
        into.copy_from_slice(&self.elements()[start..][..into.len()]);
        Ok(())
    }

    /// Sets every element to `value`.
    ///
    /// # Errors
    /// The errors of [`PinnedBuffer::write_at`].
    pub fn fill(&mut self, value: T) -> Result<()> {
        self.check()?;
        self.elements_mut().fill(value);
        Ok(())
    }

    /// Returns a copy of all elements.
    ///
    /// # Errors
    /// The errors of [`PinnedBuffer::write_at`].
    pub fn to_vec(&self) -> Result<Vec<T>> {
        self.check()?;
        Ok(self.elements().to_vec())
    }

    /// Returns the elements as a slice.
    ///
    /// # Safety
    /// The slice is not passed to code that copies asynchronously, such as
    /// `CudaStream::memcpy_htod` of cudarc, unless the caller waits for that copy before the
    /// elements are written and before the buffer is dropped or borrowed again.
    ///
    /// # Errors
    /// The errors of [`PinnedBuffer::write_at`].
    pub unsafe fn as_slice(&self) -> Result<&[T]> {
        self.check()?;
        Ok(self.elements())
    }

    /// Returns the elements as a mutable slice.
    ///
    /// # Safety
    /// As for [`PinnedBuffer::as_slice`]; in addition, the caller does not read the elements while
    /// a copy into them is queued.
    ///
    /// # Errors
    /// The errors of [`PinnedBuffer::write_at`].
    pub unsafe fn as_mut_slice(&mut self) -> Result<&mut [T]> {
        self.check()?;
        Ok(self.elements_mut())
    }

    /// Resizes the buffer to `len` elements. The first elements, up to the smaller length, are
    /// kept; the contents of new ones are unspecified. If the block cannot grow in place, the
    /// elements are copied to another block, and both are live during the copy. Shrinking never
    /// copies, and the rest is free.
    ///
    /// # Errors
    /// The errors of [`PinnedPool::alloc`] and [`PinnedBuffer::write_at`]; the buffer is then
    /// unchanged.
    pub fn resize(&mut self, len: usize) -> Result<()> {
        self.check()?;
        let arena = &self.pool.arena;
        let request =
            arena.inner().request::<T>(len, None, Region::Dynamic, RequestOrigin::BUFFER)?;
        let bytes = ByteSize::new(request.requested);
        if let Some(block) = self.block.filter(|_| !bytes.is_zero())
            && let Some(RawBlock { size, .. }) = arena.resize_raw(block.at, bytes)?
        {
            let resized = Some(PinnedBlock { size, ..block });
            assert_holds::<T>(resized.as_ref(), len);
            (self.block, self.len) = (resized, len);
            return Ok(());
        }
        let mut other = Self::alloc(&self.pool, len)?;
        let kept = len.min(self.len);
        other.elements_mut()[..kept].copy_from_slice(&self.elements()[..kept]);
        *self = other; // drops the old block
        Ok(())
    }

    /// Frees the buffer, releases idle memory if the high watermark is exceeded, and returns the
    /// bytes released. A drop leaves that to [`PinnedPool::maintain`].
    ///
    /// # Errors
    /// The errors of [`PinnedPool::maintain`]; the buffer is freed nevertheless, except in a forked
    /// child.
    pub fn free(self) -> Result<ByteSize> {
        let pool = Arc::clone(&self.pool);
        drop(self);
        pool.maintain()
    }

    /// Fails in a forked child, and while a device may be using the elements.
    fn check(&self) -> Result<()> {
        self.pool.check_here()?;
        match self.device_use {
            DeviceUse::None => Ok(()),
            DeviceUse::Until(_) | DeviceUse::Unproven => {
                Err(DeviceError::Quarantined { pool: self.pool.name().to_owned() })
            }
        }
    }

    /// Returns the elements. They never leave this module as a slice that safe code could keep.
    fn elements(&self) -> &[T] {
        // SAFETY: `start` is aligned for T (asserted in `new`; else dangling and aligned, if
        // there are no bytes). If there are, it has the provenance of the block's segment
        // (`PinnedDriver::find`), and `len` elements lie in the block (asserted in `new` and
        // `resize`) and the block in that segment (invariant of the arena), which is below
        // `isize::MAX` bytes (`reserve::offsets` limits a block to 2^62). The block is live while
        // `self` is: only the owner of a raw block frees it (contract of `PinnedPool::arena`), raw
        // blocks do not move, and a segment with a live block is not freed. So the bytes are
        // readable and initialised (contract of `Driver::host_alloc`). T is Pod: any bytes are a
        // value. There is no concurrent writer: blocks do not overlap (invariant of the index),
        // writing takes `&mut self`, and a copy into it is complete (`check`, or a buffer that was
        // not given to a copy yet).
        unsafe { slice::from_raw_parts(self.start.as_ptr(), self.len) }
    }

    /// Returns the elements for writing.
    fn elements_mut(&mut self) -> &mut [T] {
        // SAFETY: as in `elements`; `&mut self` is borrowed for as long as the slice lives, so that
        // no other slice of this block exists, and no copy reads it. The memory may be written
        // (`Driver::host_alloc`). Any T leaves initialised bytes behind, because a Pod has no
        // padding.
        unsafe { slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// # Panics
/// If a block, or none, is too small for `len` elements.
fn assert_holds<T>(block: Option<&PinnedBlock>, len: usize) {
    let (bytes, size) = (size_of::<T>().checked_mul(len), block.map(|block| block.size));
    let holds = bytes.is_some_and(|bytes| ByteSize::of(bytes) <= size.unwrap_or_default());
    assert!(holds, "the block is too small");
}

impl<T: Pod> Drop for PinnedBuffer<T> {
    /// Frees the block: only updates bookkeeping under the arena's lock. Makes no driver call,
    /// unless this was the last holder of the pool. A block that a device may still use is freed
    /// when its copy is complete, or quarantined. Does nothing in a forked child.
    fn drop(&mut self) {
        let Some(block) = self.block.take() else { return };
        match std::mem::replace(&mut self.device_use, DeviceUse::None) {
            DeviceUse::None => self.pool.free(block.at),
            DeviceUse::Until(event) => self.pool.free_after(block, event),
            DeviceUse::Unproven => self.pool.quarantine(block.size),
        }
    }
}

lowtide_core::debug_as!([T: Pod] PinnedBuffer<T>, |it|
    pool: it.pool.name(), memory: it.memory(), len: it.len, bytes: it.bytes());

#[cfg(all(test, not(lowtide_loom)))]
mod tests;

#[cfg(all(test, not(lowtide_loom)))]
mod fenced_tests {
    use std::mem::ManuallyDrop;

    use super::*;
    use crate::driver::HOST_ALIGNMENT;
    use crate::driver::host::HostDriver;
    use lowtide_core::clock::SystemClock;
    use lowtide_core::sync::lock;

    fn open(name: &str) -> PinnedPool {
        let config = PinnedConfig { kind: PinnedKind::Pageable, ..PinnedConfig::new(name) };
        let clock = Arc::new(SystemClock::new());
        PinnedPool::open(Arc::new(HostDriver::new()), clock, config).expect("open")
    }

    /// A type aligned to more than a page of most systems.
    #[derive(Clone, Copy)]
    #[repr(C, align(8192))]
    struct Wide([u8; 8192]);
    // SAFETY: all bytes zero are a value of a byte array, and there is no padding.
    unsafe impl bytemuck::Zeroable for Wide {}
    // SAFETY: as above; any bytes are a value, size and alignment are equal, no pointer is inside.
    unsafe impl Pod for Wide {}

    /// A type aligned to a page.
    #[derive(Clone, Copy)]
    #[repr(C, align(4096))]
    struct Page([u8; 4096]);
    // SAFETY: as for `Wide`.
    unsafe impl bytemuck::Zeroable for Page {}
    // SAFETY: as for `Wide`.
    unsafe impl Pod for Page {}

    #[test]
    fn an_alignment_up_to_a_page_is_kept_and_one_beyond_is_a_typed_error() {
        let pool = open("wide");
        let byte = pool.alloc::<u8>(1).expect("room");
        let pages = pool.alloc_from(&[Page([7; 4096]); 2]).expect("room");
        let at = pages.start.addr().get();
        assert!(at.is_multiple_of(4096) && pages.elements()[1].0[4095] == 7);
        let refused = pool.alloc::<Wide>(1).expect_err("beyond a page");
        let (requested, largest) = (ByteSize::kib(8), HOST_ALIGNMENT);
        assert_eq!(refused, DeviceError::Alignment { requested, largest });
        assert_eq!(Wide([0; 8192]).0.len(), 8192);
        drop((byte, pages));
        pool.validate();
    }

    #[test]
    fn in_a_forked_child_a_drop_touches_neither_lock_nor_memory() {
        let pool = open("forked");
        let buffer = pool.alloc_from(&[7_u8; 100]).expect("room");
        let start = buffer.start.as_ptr();
        let held = Arc::clone(&buffer.pool);
        // As if another thread, which the child does not have, held the locks at the fork.
        let locks = (held.arena.inner().lock_state(), lock(&held.unfinished));
        let locks = ManuallyDrop::new(locks);
        // SAFETY: the child drops a buffer and handles, reads a byte, and ends with `_exit`.
        let child = unsafe { libc::fork() };
        if child == 0 {
            // SAFETY: sets a timer of this process, which ends it if it waits for the lock.
            unsafe { libc::alarm(20) };
            drop((buffer, pool));
            drop(held); // the last holder
            // SAFETY: the memory exists in the child too: it was not freed.
            let byte = unsafe { start.read() };
            // SAFETY: ends the child at once, without running the parent's exit handlers.
            unsafe { libc::_exit(i32::from(byte)) };
        }
        drop(ManuallyDrop::into_inner(locks));
        assert!(child > 0, "fork failed");
        let mut status = 0;
        // SAFETY: `status` is a valid place for an int, and `child` is our own child.
        let waited = unsafe { libc::waitpid(child, &raw mut status, 0) };
        assert_eq!((waited, libc::WIFEXITED(status)), (child, true), "status {status:#x}");
        assert_eq!(libc::WEXITSTATUS(status), 7);
        drop(buffer);
        pool.validate();
    }
}
