//! A buffer whose address is known to foreign code: a C library, ONNX Runtime, a captured graph.
//!
//! The export owns the buffer, so safe code cannot free, resize or move it meanwhile; forgetting
//! the export leaks both. While an export exists the arena does not sleep. When the export ends,
//! the uses by foreign streams are unknown, so all work of the device is waited for.
//!
//! Invariant: `exports of the arena = Exported values that are not dropped`.
#![expect(unsafe_code, reason = "memory of others is seen as slices")]

use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::api::compact::BlockPin;
use crate::api::lane::{Lane, Lease};
use crate::driver::DeviceAddress;
use crate::engine::{completion, import};
use crate::exec::{ArenaInner, LaneInner};
use crate::state::Release;
use crate::types::{DeviceError, DeviceErrorWith, Result};
use bytemuck::Pod;
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::Ordering;

/// A buffer exported to code that keeps its address; from [`Buffer::export`].
///
/// Dropping it ends the export and frees the buffer; [`Exported::end`] returns the buffer. Neither
/// waits or calls the driver.
#[must_use = "dropping it ends the export and frees the buffer"]
pub struct Exported<T: Pod> {
    // Dropped in this order: the block is freed last.
    _pin: BlockPin,
    buffer: Buffer<T>,
    at: DeviceAddress,
}

impl<T: Pod> Buffer<T> {
    /// Exports the buffer to code that keeps its address for longer than a lease: a C library, a
    /// session of ONNX Runtime, a graph that captured it. No lease is needed during the export.
    ///
    /// Until the export ends the block stays live and at its address, also during compactions, and
    /// the arena does not sleep ([`DeviceError::Exported`]). A sleeping arena is woken first.
    /// Afterwards the memory counts as used by any stream of the context, including those unknown
    /// to the arena: it is reused, moved, copied or released only after the host saw all of that
    /// work complete. So a buffer that was ever exported is freed like one without a lane, and its
    /// next user may wait for the whole device.
    ///
    /// The program orders the foreign work after earlier work of the buffer's stream, and the
    /// stream's next work after it, as without an arena.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, DeviceError, HostDriver};
    /// use lowtide_gpu::{Region, SleepOptions};
    /// # let clock = Arc::new(SystemClock::new());
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock, ArenaConfig::new("a"))?;
    ///
    /// let weights = arena.alloc_from(&[1.0_f32; 64], Region::Stable)?;
    /// let exported = weights.export()?;
    /// let (at, bytes) = (exported.address(), exported.buffer().bytes()); // for foreign code
    /// assert_eq!((at.get() % 256, bytes.get()), (0, 256));
    /// assert!(matches!(arena.sleep(SleepOptions::default()), Err(DeviceError::Exported { .. })));
    /// let weights = exported.end(); // the foreign code no longer uses the address
    /// arena.sleep(SleepOptions::default())?;
    /// # drop(weights);
    /// # Ok::<(), DeviceError>(())
    /// ```
    ///
    /// An exported buffer cannot be freed or resized:
    /// ```compile_fail,E0382
    /// # use lowtide_gpu::{Buffer, DeviceError};
    /// fn free_during_export(buffer: Buffer<f32>) -> Result<(), DeviceError> {
    ///     let exported = buffer.export()?;
    ///     drop(buffer);
    ///     Ok(())
    /// }
    /// ```
    ///
    /// # Errors
    /// With the buffer: [`DeviceError::ZeroSize`] if it has no bytes,
    /// [`DeviceError::ContentsLost`], [`DeviceError::Forked`]; otherwise the errors of
    /// [`DeviceArena::enter`](crate::DeviceArena::enter).
    pub fn export(mut self) -> Result<Exported<T>, DeviceErrorWith<Self>> {
        match self.begin_export() {
            Ok((pin, at)) => Ok(Exported { _pin: pin, buffer: self, at }),
            Err(error) => Err(DeviceErrorWith { error, value: Box::new(self) }),
        }
    }

    fn begin_export(&mut self) -> Result<(BlockPin, DeviceAddress)> {
        // While the lease is held the arena is awake and no block moves. When it is dropped, the
        // export is recorded.
        let lease = self.enter()?;
        let at = self.address(&lease)?.ok_or(DeviceError::ZeroSize)?;
        let mut pin = self.pin()?;
        // When the buffer is freed, all work of the device is waited for.
        self.owned.foreign = true;
        pin.count_export(self.owned.block.map_or(0, |block| block.span.size));
        Ok((pin, at))
    }
}

impl<T: Pod> Exported<T> {
    /// Returns the buffer's address, valid until this is dropped or ended.
    #[must_use]
    pub const fn address(&self) -> DeviceAddress {
        self.at
    }

    /// Returns the buffer for reading under a lease. The caller ensures that foreign code does not
    /// write meanwhile.
    #[must_use]
    pub const fn buffer(&self) -> &Buffer<T> {
        &self.buffer
    }

    /// Ends the export and returns the buffer. Foreign code must not start further work with the
    /// address; work already started may continue.
    pub fn end(self) -> Buffer<T> {
        self.buffer
    }
}

lowtide_core::debug_as!([T: Pod] Exported<T>, |it| at: it.at, buffer: it.buffer);

impl Lease {
    /// Checks that a lease belongs to this arena.
    ///
    /// # Errors
    /// `ForeignLease`, `Forked`.
    pub(crate) fn check_of(&self, inner: &Arc<ArenaInner>) -> Result<()> {
        inner.check_here()?;
        if Arc::ptr_eq(inner, &self.arena) {
            return Ok(());
        }
        Err(DeviceError::ForeignLease {
            buffer_of: inner.name.clone(),
            lease_of: self.arena.name.clone(),
        })
    }
}

// Memory allocated by foreign code, used under the arena's leases and released by a
// function of that code.
//
// The arena does not commit, move or offload such memory. It provides leases, views, and the
// knowledge of when the device has completed its work. Dropping a value only updates bookkeeping,
// because a release may take long, as `cuMemFree` does. The program's next call that looks for
// idle memory (a purge, a trim, a close) waits until the whole context has completed its work, and
// calls the release function. A decay and the worker of a `Memory` do not wait: they call release
// functions only for values whose work is known to be complete.
//
// Invariant: a release function is called at most once, after the host has seen the completion of
// all work that the context had when the value was dropped. The function is dropped uncalled only
// if the arena's last holder is dropped while the device may still work.

/// Elements in memory that foreign code allocated; from [`DeviceArena::import`].
///
/// Dropping it schedules the release, as [`DeviceArena::import`] describes. It keeps its arena
/// alive.
pub struct Imported<T: Pod> {
    pub(crate) inner: Arc<ArenaInner>,
    at: DeviceAddress,
    len: usize,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "views are for cudarc"))]
    pub(crate) lane: Option<Arc<LaneInner>>,
    elements: PhantomData<T>,
    #[cfg(feature = "cuda")]
    pub(crate) view: crate::exec::view::ViewSlot,
}

impl DeviceArena {
    /// Imports `len` elements at a device address that foreign code allocated: a C library, ONNX
    /// Runtime, `cudarc` by its raw calls. They are used like a buffer, under a lease of this
    /// arena, and count only in [`imported`](crate::ArenaSnapshot::imported).
    ///
    /// `release` is called once with the address and the bytes, after the value was dropped and the
    /// host has seen the whole context complete, including foreign streams: by the program's next
    /// [`purge`](DeviceArena::purge), trim, shrink or close, on its thread and without a lock. A
    /// [`decay`](DeviceArena::decay) and the worker of a `Memory` do not wait for the context: they
    /// call it only if another call of the program has waited. [`Imported::release`] calls it
    /// immediately. `release` may use the arena. Its panic is caught, logged and counted. It is
    /// never called if the context is lost, in a forked child, or if the arena's last holder is
    /// dropped while the device may still work ([`DeviceArena::close`] waits, and fails while
    /// imported values are held).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::{Clock, SystemClock};
    /// use lowtide_gpu::driver::DeviceAddress;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver};
    /// # let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    /// # let config = ArenaConfig::new("a");
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
    ///
    /// let theirs = Box::into_raw(Box::new([1_u32, 2, 3])); // stands for a library's memory
    /// let at = DeviceAddress::new(theirs.expose_provenance() as u64);
    /// let free = |at: DeviceAddress, _| {
    ///     let theirs = std::ptr::with_exposed_provenance_mut::<[u32; 3]>(at.get() as usize);
    /// // SAFETY: it is from a box, and is freed once.
    ///     drop(unsafe { Box::from_raw(theirs) });
    /// };
    /// // SAFETY: three initialised numbers, used by no other code until they are released.
    /// let numbers = unsafe { arena.import::<u32>(at, 3, free) }?;
    /// let lease = arena.enter()?;
    /// assert_eq!(numbers.slice(&lease)?, [1, 2, 3]);
    /// drop((lease, numbers));
    /// assert_eq!(arena.snapshot().imported_count, 1); // until the next check
    /// arena.decay(clock.now())?;
    /// assert_eq!(arena.snapshot().imported_count, 0);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    ///
    /// Cost: a query to the driver, O(log n) in the imported ranges.
    ///
    /// # Safety
    /// From here until `release` is called:
    /// * the elements are in memory that the arena's device reads and writes in the arena's
    ///   context; on a driver with host access, in memory of this process, whose pointer was
    ///   exposed (`expose_provenance`), with every byte initialised;
    /// * no code frees, unmaps or moves them, and none of them is part of a block of another arena
    ///   or imported by another;
    /// * no other code writes them while a slice or a view of them is borrowed, nor reads them
    ///   while a mutable one is: on a device, in the order of its streams.
    ///
    /// # Errors
    /// [`DeviceError::Import`] with the reason, as far as it can be detected: a driver with
    /// host access cannot check memory of other code. [`DeviceError::Driver`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`]. The memory then still belongs to the
    /// caller: `release` is dropped and not called.
    pub unsafe fn import<T: Pod>(
        &self,
        at: DeviceAddress,
        len: usize,
        release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
    ) -> Result<Imported<T>> {
        self.inner().import(at, len, Box::new(release), None)
    }
}

impl Lane {
    /// Like [`DeviceArena::import`]. On a lane of a cudarc stream the value has views
    /// (`Imported::cuda`, feature `cuda`).
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")] {
    /// use std::sync::Arc;
    /// use cudarc::driver::{CudaStream, DevicePtr as _};
    /// use lowtide_gpu::driver::DeviceAddress;
    /// use lowtide_gpu::{Imported, DeviceArena};
    ///
    /// fn import(arena: &DeviceArena, stream: &Arc<CudaStream>)
    /// -> Result<Imported<f32>, Box<dyn std::error::Error>> {
    ///     let slice = stream.clone_htod(&[1.0_f32; 1000])?; // cudarc's own memory
    ///     let (at, len) = (DeviceAddress::new(slice.device_ptr(stream).0), slice.len());
    /// // SAFETY: the slice exists, used by no other code, until the release drops it.
    ///     Ok(unsafe { arena.cuda_lane(stream)?.import(at, len, move |_, _| drop(slice)) }?)
    /// }
    /// # }
    /// ```
    ///
    /// # Safety
    /// As for [`DeviceArena::import`].
    ///
    /// # Errors
    /// The errors of [`DeviceArena::import`].
    pub unsafe fn import<T: Pod>(
        &self,
        at: DeviceAddress,
        len: usize,
        release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
    ) -> Result<Imported<T>> {
        let lane = Some(Arc::clone(self.known()));
        self.arena().inner().import(at, len, Box::new(release), lane)
    }
}

impl<T: Pod> Imported<T> {
    /// Returns the number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "imported memory is never empty")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Returns the bytes of the elements.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        ByteSize::of(self.len * size_of::<T>())
    }

    /// Returns the address of the elements for work on the device while the lease is held, in any
    /// stream of the context.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLease`], [`DeviceError::Forked`].
    pub fn address(&self, lease: &Lease) -> Result<DeviceAddress> {
        lease.check_of(&self.inner)?;
        Ok(self.at)
    }

    /// Returns the elements, while the lease is held.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on a driver without host access, [`DeviceError::ForeignLease`],
    /// [`DeviceError::Forked`].
    pub fn slice<'a>(&'a self, lease: &'a Lease) -> Result<&'a [T]> {
        let start = self.start(lease)?;
        // SAFETY: `DeviceArena::import`'s caller guarantees `len` elements at an address that was
        // checked (not null, aligned, its end below `isize::MAX`), in memory of this process with
        // exposed provenance, initialised, and valid until the release, which comes after the drop
        // of `self`. T is Pod: any bytes are a value. There is no concurrent writer: foreign code
        // does not write while a slice is borrowed (the same contract), writing here takes
        // `&mut self`, and no two values share a range (`engine::import`).
        Ok(unsafe { slice::from_raw_parts(start.as_ptr(), self.len) })
    }

    /// Returns the elements for writing, while the lease is held.
    ///
    /// # Errors
    /// The errors of [`Imported::slice`].
    pub fn slice_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<&'a mut [T]> {
        let start = self.start(lease)?;
        // SAFETY: as in `slice`; `&mut self` is borrowed for as long as the slice lives, so that
        // no other slice of it exists, and the contract of `import` keeps others from reading.
        Ok(unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.len) })
    }

    /// Waits until the device has completed all work of the context, then calls the release
    /// functions of this value and of others that are due. If another thread processes them at the
    /// same time, it may be the one that calls the function, possibly after this returns.
    ///
    /// # Errors
    /// [`DeviceError::Capturing`] while a stream of a lane captures a graph,
    /// [`DeviceError::Driver`]: the value is dropped, and its release is still scheduled.
    /// [`DeviceError::Forked`] in a forked child.
    pub fn release(self) -> Result<()> {
        let inner = Arc::clone(&self.inner);
        drop(self);
        inner.check_here()?;
        if inner.capabilities.asynchronous && inner.run(completion::is_any_capturing)? {
            return Err(DeviceError::Capturing { arena: inner.name.clone() });
        }
        inner.run(completion::complete_all)?;
        inner.run(import::release_imports);
        Ok(())
    }

    fn start(&self, lease: &Lease) -> Result<NonNull<T>> {
        lease.check_of(&self.inner)?;
        self.inner.check_host_access()?;
        let at = usize::try_from(self.at.get()).unwrap_or(0);
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(at));
        start.ok_or_else(|| self.inner.no_host_access())
    }
}

impl<T: Pod> Drop for Imported<T> {
    /// Updates bookkeeping under the arena's lock. A value with a view makes its stream wait for
    /// the streams that used the view, as a buffer does. Does nothing in a forked child.
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        let is_captured = self.let_view_go();
        #[cfg(not(feature = "cuda"))]
        let is_captured = false;
        let _ = self.inner.run_here(|state| import::let_go(state, self.at, is_captured));
    }
}

lowtide_core::debug_as!([T: Pod] Imported<T>, |it| arena: it.inner.name, at: it.at, len: it.len);

impl ArenaInner {
    /// Records imported memory. The caller has the guarantees of `DeviceArena::import`.
    fn import<T: Pod>(
        self: &Arc<Self>,
        at: DeviceAddress,
        len: usize,
        release: Release,
        lane: Option<Arc<LaneInner>>,
    ) -> Result<Imported<T>> {
        self.check_open()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let size = bytes.map_or(ByteSize::MAX, ByteSize::of);
        let refused = |reason| DeviceError::Import { at, size, arena: self.name.clone(), reason };
        look::<T>(at, bytes).map_err(refused)?;
        if let Some(what) = self.driver.foreign_memory(at, size)? {
            return Err(refused(format!("it is {what}")));
        }
        self.run_now(|state| match self.closed.load(Ordering::Relaxed) {
            true => Err((self.was_closed(), release)),
            false => import::import(state, at, size, release)
                .map_err(|(reason, release)| (refused(reason.to_owned()), release)),
        })
        // The release function is foreign code: it is dropped with the lock released.
        .map_err(|(error, _release)| error)?;
        Ok(Imported {
            inner: Arc::clone(self),
            at,
            len,
            lane,
            elements: PhantomData,
            #[cfg(feature = "cuda")]
            view: crate::exec::view::ViewSlot::default(),
        })
    }
}

/// Checks a range on its own.
fn look<T>(at: DeviceAddress, bytes: Option<usize>) -> Result<(), String> {
    let align = ByteSize::of(align_of::<T>());
    let end = bytes.and_then(|bytes| at.get().checked_add(bytes as u64));
    if at.get() == 0 {
        Err("it starts at address 0".to_owned())
    } else if bytes == Some(0) {
        Err("it has no bytes, expected at least 1 B".to_owned())
    } else if !at.is_multiple_of(align) {
        Err(format!("expected an address that is a multiple of {align}"))
    } else if end.is_none() {
        Err("it ends beyond the last address".to_owned())
    } else {
        Ok(())
    }
}
