//! Memory allocated by foreign code, used under the arena's leases and released by a
//! function of that code.
//!
//! The arena does not commit, move or offload such memory. It provides leases, views, and the
//! knowledge of when the device has completed its work. Dropping a value only updates bookkeeping,
//! because a release may take long, as `cuMemFree` does. The program's next call that looks for
//! idle memory (a purge, a trim, a close) waits until the whole context has completed its work, and
//! calls the release function. A decay and the worker of a `Memory` do not wait: they call release
//! functions only for values whose work is known to be complete.
//!
//! Invariant: a release function is called at most once, after the host has seen the completion of
//! all work that the context had when the value was dropped. The function is dropped uncalled only
//! if the arena's last holder is dropped while the device may still work.
#![expect(unsafe_code, reason = "memory of others is seen as slices")]

use std::fmt;
use std::marker::PhantomData;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use crate::api::arena::DeviceArena;
use crate::api::lane::Lane;
use crate::api::lease::Lease;
use crate::driver::{DeviceAddress, Owner};
use crate::engine::import;
use crate::exec::inner::ArenaInner;
use crate::exec::lane::LaneInner;
use crate::state::outstanding::Release;
use crate::types::error::{DeviceError, ImportError};
use lowtide_core::bytes::ByteSize;

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
    /// [`DeviceError::ImportError`] with the reason, as far as it can be detected: a driver with
    /// host access cannot check memory of other code. [`DeviceError::Driver`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`]. The memory then still belongs to the
    /// caller: `release` is dropped and not called.
    pub unsafe fn import<T: Pod>(
        &self,
        at: DeviceAddress,
        len: usize,
        release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
    ) -> Result<Imported<T>, DeviceError> {
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
    ) -> Result<Imported<T>, DeviceError> {
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
    pub fn address(&self, lease: &Lease) -> Result<DeviceAddress, DeviceError> {
        lease.check_of(&self.inner)?;
        Ok(self.at)
    }

    /// Returns the elements, while the lease is held.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on a driver without host access, [`DeviceError::ForeignLease`],
    /// [`DeviceError::Forked`].
    pub fn slice<'a>(&'a self, lease: &'a Lease) -> Result<&'a [T], DeviceError> {
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
    pub fn slice_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<&'a mut [T], DeviceError> {
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
    pub fn release(self) -> Result<(), DeviceError> {
        let inner = Arc::clone(&self.inner);
        drop(self);
        inner.check_here()?;
        if inner.capabilities.asynchronous && inner.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: inner.name.clone() });
        }
        inner.complete_all()?;
        inner.release_imports();
        Ok(())
    }

    fn start(&self, lease: &Lease) -> Result<NonNull<T>, DeviceError> {
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

impl<T: Pod> fmt::Debug for Imported<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Imported")
            .field("arena", &self.inner.name)
            .field("at", &self.at)
            .field("len", &self.len)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl ArenaInner {
    /// Records imported memory. The caller has the guarantees of `DeviceArena::import`.
    fn import<T: Pod>(
        self: &Arc<Self>,
        at: DeviceAddress,
        len: usize,
        release: Release,
        lane: Option<Arc<LaneInner>>,
    ) -> Result<Imported<T>, DeviceError> {
        self.check_open()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let size = bytes.map_or(ByteSize::MAX, ByteSize::of);
        let refused = |why| DeviceError::ImportError { at, size, arena: self.name.clone(), why };
        look::<T>(at, bytes).map_err(refused)?;
        if let Owner::Elsewhere(what) = self.driver.owner_of(at, size)? {
            return Err(refused(ImportError::Elsewhere(what)));
        }
        self.run_now(|state| match self.is_closed() {
            true => Err((self.was_closed(), release)),
            false => import::import(state, at, size, release)
                .map_err(|(why, release)| (refused(why), release)),
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
fn look<T>(at: DeviceAddress, bytes: Option<usize>) -> Result<(), ImportError> {
    let align = ByteSize::of(align_of::<T>());
    if at.get() == 0 {
        return Err(ImportError::Null);
    }
    if bytes == Some(0) {
        return Err(ImportError::Empty);
    }
    if !at.is_multiple_of(align) {
        return Err(ImportError::Misaligned(align));
    }
    let end = bytes.and_then(|bytes| at.get().checked_add(bytes as u64));
    if end.is_none() {
        return Err(ImportError::Endless);
    }
    Ok(())
}
