//! FENCE: memory that somebody else allocated, used under the arena's leases, and given back by a
//! function of theirs.
//!
//! The arena commits none of it, moves none of it and lets none of it sleep; it lends its leases,
//! its views, and its knowledge of when the device is done. A value that is dropped is booked and
//! no more: a release may take long, as `cuMemFree` does. The program's next call that looks for
//! idle memory (a purge, a trim, a close) waits until the whole context is done, and calls the
//! release function. A decay and the worker of a `Memory` wait for nothing: they call release
//! functions only of values whose work is known to be done.
//!
//! Invariant: a release function is called at most once, after the host saw complete whatever the
//! context was given before its value went; it is dropped uncalled only in an arena whose last
//! holder goes while the device may work on.
#![expect(unsafe_code, reason = "memory of others is seen as slices")]

use std::fmt;
use std::marker::PhantomData;
use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::slice;
use std::sync::Arc;

use bytemuck::Pod;

use super::outstanding::{Due, Release};
use crate::bytes::ByteSize;
use crate::device::arena::DeviceArena;
use crate::device::books::Books;
use crate::device::driver::{DeviceAddress, Owner};
use crate::device::error::DeviceError;
use crate::device::lane::{Known, Lane};
use crate::device::lease::Lease;
use crate::device::pending::Uses;
use crate::device::planted::Planted;
use crate::device::region::Region;
use crate::device::shared::Shared;
use crate::sync::caught;

/// Why memory cannot be adopted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum ImportError {
    /// It begins at 0.
    Null,
    /// It has no bytes.
    Empty,
    /// It does not begin at a multiple of this.
    Misaligned(ByteSize),
    /// It ends beyond the last address, or is larger than any object may be.
    Endless,
    /// Some of it lies in the arena's own address space.
    OfArena,
    /// Some of it was adopted before, and is not released yet.
    Imported,
    /// It is none that the arena's driver can use: what it is instead.
    Elsewhere(&'static str),
}

impl fmt::Display for ImportError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Null => f.write_str("it begins at address 0"),
            Self::Empty => f.write_str("it has no bytes; expected at least 1 B"),
            Self::Misaligned(align) => write!(f, "expected an address at a multiple of {align}"),
            Self::Endless => f.write_str("it ends beyond the last address"),
            Self::OfArena => f.write_str("some of it is the arena's own"),
            Self::Imported => f.write_str("some of it was adopted before and is not released"),
            Self::Elsewhere(what) => write!(f, "it is {what}"),
        }
    }
}

/// Elements in memory that somebody else allocated; from [`DeviceArena::import`].
///
/// Dropping it only books that it is to be released: see there. It keeps its arena.
pub struct Imported<T: Pod> {
    pub(in crate::device) shared: Arc<Shared>,
    at: DeviceAddress,
    len: usize,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "views are for cudarc"))]
    pub(in crate::device) lane: Option<Arc<Known>>,
    elements: PhantomData<T>,
    #[cfg(feature = "cuda")]
    pub(in crate::device) view: crate::device::view::View<T>,
}

impl DeviceArena {
    /// Adopts `len` elements at an address of the device that somebody else allocated: a library in
    /// C, ONNX Runtime, `cudarc` by its raw calls. They are used as a buffer is, under a lease of
    /// this arena, and are in no figure of it but
    /// [`imported`](super::super::ArenaSnapshot::adopted).
    ///
    /// `release` is called with the address and the bytes, once, when the value was dropped and the
    /// host has seen the whole context complete, foreign streams included: by the next
    /// [`purge`](DeviceArena::purge), trim, shrink or close of the program, on the thread that
    /// calls that, with no lock held. A [`decay`](DeviceArena::decay) and the worker of a `Memory`
    /// do not wait for the context: they call it after another call of the program has.
    /// [`Imported::release`] does it now. It may use the arena as anybody may. A panic in it is
    /// caught, logged and counted. It is never called where the context is lost, in a forked child,
    /// or where the arena's last holder goes while the device may work on ([`DeviceArena::close`]
    /// waits, and refuses while adopted values are held).
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide::clock::{Clock, SystemClock};
    /// use lowtide::device::driver::DeviceAddress;
    /// use lowtide::device::{ArenaConfig, DeviceArena, HostDriver};
    /// # let clock: Arc<dyn Clock> = Arc::new(SystemClock::new());
    /// # let config = ArenaConfig::new("a");
    /// # let arena = DeviceArena::open(Arc::new(HostDriver::new()), clock.clone(), config)?;
    ///
    /// let theirs = Box::into_raw(Box::new([1_u32, 2, 3])); // stands for what a library gave
    /// let at = DeviceAddress::new(theirs.expose_provenance() as u64);
    /// let free = |at: DeviceAddress, _| {
    ///     let theirs = std::ptr::with_exposed_provenance_mut::<[u32; 3]>(at.get() as usize);
    ///     // SAFETY: it came of a box, and is given back once.
    ///     drop(unsafe { Box::from_raw(theirs) });
    /// };
    /// // SAFETY: three numbers, initialised, which nobody else uses until they are released.
    /// let numbers = unsafe { arena.import::<u32>(at, 3, free) }?;
    /// let lease = arena.enter()?;
    /// assert_eq!(numbers.slice(&lease)?, [1, 2, 3]);
    /// drop((lease, numbers));
    /// assert_eq!(arena.snapshot().imported_count, 1); // until somebody looks
    /// arena.decay(clock.now())?;
    /// assert_eq!(arena.snapshot().imported_count, 0);
    /// # Ok::<(), lowtide::device::DeviceError>(())
    /// ```
    ///
    /// Cost: a question to the driver, O(log n) in what is adopted.
    ///
    /// # Safety
    /// From here until `release` is called:
    /// * the elements lie in memory that the arena's device reads and writes in the arena's
    ///   context; on a driver with host access, in memory of this process, whose pointer was
    ///   exposed (`expose_provenance`), with every byte initialised;
    /// * nobody frees, unmaps or moves them, and none of them is part of a block of another arena
    ///   or adopted by another;
    /// * nobody else writes them while a slice or a view of them is borrowed, nor reads them while
    ///   one to write is: on a device, in the order of its streams.
    ///
    /// # Errors
    /// [`DeviceError::ImportError`] with what is wrong, where that can be seen: a driver with host
    /// access knows nothing of memory that it did not give. [`DeviceError::Driver`],
    /// [`DeviceError::Closed`], [`DeviceError::Forked`]. The memory is the caller's still then:
    /// `release` is dropped and not called.
    pub unsafe fn import<T: Pod>(
        &self,
        at: DeviceAddress,
        len: usize,
        release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
    ) -> Result<Imported<T>, DeviceError> {
        self.shared().import(at, len, Box::new(release), None)
    }
}

impl Lane {
    /// As [`DeviceArena::import`]; on a lane of a stream of cudarc's the value has views
    /// (`Imported::cuda`, feature `cuda`).
    ///
    /// ```no_run
    /// # #[cfg(feature = "cuda")] {
    /// use std::sync::Arc;
    /// use lowtide::cudarc::driver::{CudaStream, DevicePtr as _};
    /// use lowtide::device::driver::DeviceAddress;
    /// use lowtide::device::{Imported, DeviceArena};
    ///
    /// fn import(arena: &DeviceArena, stream: &Arc<CudaStream>)
    /// -> Result<Imported<f32>, lowtide::BoxError> {
    ///     let slice = stream.clone_htod(&[1.0_f32; 1000])?; // cudarc's own memory
    ///     let (at, len) = (DeviceAddress::new(slice.device_ptr(stream).0), slice.len());
    ///     // SAFETY: the slice is there, and nobody else's, until it is dropped by the release.
    ///     Ok(unsafe { arena.cuda_lane(stream)?.import(at, len, move |_, _| drop(slice)) }?)
    /// }
    /// # }
    /// ```
    ///
    /// # Safety
    /// As there.
    ///
    /// # Errors
    /// As there.
    pub unsafe fn import<T: Pod>(
        &self,
        at: DeviceAddress,
        len: usize,
        release: impl FnOnce(DeviceAddress, ByteSize) + Send + 'static,
    ) -> Result<Imported<T>, DeviceError> {
        let lane = Some(Arc::clone(self.known()));
        self.arena().shared().import(at, len, Box::new(release), lane)
    }
}

impl<T: Pod> Imported<T> {
    /// The number of elements; never 0.
    #[must_use]
    #[expect(clippy::len_without_is_empty, reason = "what is adopted is never empty")]
    pub const fn len(&self) -> usize {
        self.len
    }

    /// Their bytes.
    #[must_use]
    pub const fn bytes(&self) -> ByteSize {
        ByteSize::of(self.len * size_of::<T>())
    }

    /// Where they are, for work on the device while the lease is held, in any stream of the
    /// context.
    ///
    /// # Errors
    /// [`DeviceError::ForeignLease`], [`DeviceError::Forked`].
    pub fn address(&self, lease: &Lease) -> Result<DeviceAddress, DeviceError> {
        lease.check_of(&self.shared)?;
        Ok(self.at)
    }

    /// The elements, for as long as the lease is held.
    ///
    /// # Errors
    /// [`DeviceError::Unsupported`] on a driver without host access,
    /// [`DeviceError::ForeignLease`], [`DeviceError::Forked`].
    pub fn slice<'a>(&'a self, lease: &'a Lease) -> Result<&'a [T], DeviceError> {
        let start = self.start(lease)?;
        // SAFETY: `DeviceArena::import`'s caller answers for `len` elements at an address that was
        // looked at (not null, aligned, its end below `isize::MAX`), in memory of this process with
        // exposed provenance, initialised, and there until the release, which comes after the drop
        // of `self`. T is Pod: any bytes are a value. Nobody writes: others do not while a slice is
        // borrowed (the same contract), writing here takes `&mut self`, and no two values are of
        // one range (`Shared::import`).
        Ok(unsafe { slice::from_raw_parts(start.as_ptr(), self.len) })
    }

    /// The elements, to write, for as long as the lease is held.
    ///
    /// # Errors
    /// As [`Imported::slice`].
    pub fn slice_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<&'a mut [T], DeviceError> {
        let start = self.start(lease)?;
        // SAFETY: as in `slice`; `&mut self` is borrowed for as long as the slice lives, so that
        // no other slice of it exists, and the contract of `import` keeps others from reading.
        Ok(unsafe { slice::from_raw_parts_mut(start.as_ptr(), self.len) })
    }

    /// Waits until the device has done all that the context was given, then has the release
    /// function called: that of this value, and those of others that wait for it. Another thread
    /// that looks for such memory at this moment may be the one that calls it, and be at it still
    /// when this returns.
    ///
    /// # Errors
    /// [`DeviceError::Capturing`] while a stream of a lane captures a graph,
    /// [`DeviceError::Driver`]: the value is gone, and what a drop would have left to do is. In a
    /// forked child [`DeviceError::Forked`].
    pub fn release(self) -> Result<(), DeviceError> {
        let shared = Arc::clone(&self.shared);
        drop(self);
        shared.check_here()?;
        if shared.capabilities.asynchronous && shared.is_any_capturing()? {
            return Err(DeviceError::Capturing { arena: shared.name.clone() });
        }
        shared.complete_all()?;
        shared.release_adopted();
        Ok(())
    }

    fn start(&self, lease: &Lease) -> Result<NonNull<T>, DeviceError> {
        lease.check_of(&self.shared)?;
        self.shared.check_host_access()?;
        let at = usize::try_from(self.at.get()).unwrap_or(0);
        let start = NonNull::new(std::ptr::with_exposed_provenance_mut(at));
        start.ok_or_else(|| self.shared.no_host_access())
    }
}

impl<T: Pod> Drop for Imported<T> {
    /// Bookkeeping under the arena's lock; a value with a view makes its stream wait for those that
    /// used it, as a buffer does. In a forked child does nothing.
    fn drop(&mut self) {
        #[cfg(feature = "cuda")]
        self.let_view_go();
        if self.shared.check_here().is_err() {
            return;
        }
        let forgets = self.shared.planted(Planted::ReleaseBeforeDone);
        let mut books = self.shared.books();
        let after = if forgets { Uses::NONE } else { books.uses(&[]) };
        books.outstanding.imported.let_go(self.at.get(), after);
    }
}

impl<T: Pod> fmt::Debug for Imported<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Adopted")
            .field("arena", &self.shared.name)
            .field("at", &self.at)
            .field("len", &self.len)
            .field("bytes", &self.bytes())
            .finish_non_exhaustive()
    }
}

impl Shared {
    /// Books memory of others; only where the caller of `DeviceArena::import` answers for it.
    fn import<T: Pod>(
        self: &Arc<Self>,
        at: DeviceAddress,
        len: usize,
        release: Release,
        lane: Option<Arc<Known>>,
    ) -> Result<Imported<T>, DeviceError> {
        self.check_open()?;
        let bytes = len.checked_mul(size_of::<T>()).filter(|&bytes| isize::try_from(bytes).is_ok());
        let size = bytes.map_or(ByteSize::MAX, ByteSize::of);
        let refused = |why| DeviceError::ImportError { at, size, arena: self.name.clone(), why };
        look::<T>(at, bytes).map_err(refused)?;
        if let Owner::Elsewhere(what) = self.driver.owner_of(at, size)? {
            return Err(refused(ImportError::Elsewhere(what)));
        }
        let mut books = self.books();
        if self.is_closed() {
            drop(books);
            return Err(self.was_closed());
        }
        if let Some(why) = books.owns(at, size) {
            drop(books);
            return Err(refused(why));
        }
        books.outstanding.imported.import(at.get(), size.get(), release);
        drop(books);
        Ok(Imported {
            shared: Arc::clone(self),
            at,
            len,
            lane,
            elements: PhantomData,
            #[cfg(feature = "cuda")]
            view: crate::device::view::View::default(),
        })
    }

    /// Calls the release functions of what nobody holds and no work uses any more; of as many as
    /// wait now, so that one which adopts and drops more keeps nobody here for ever. How many.
    pub(in crate::device) fn release_adopted(&self) -> u64 {
        let mut called = 0;
        let waiting = self.books().waiting_releases();
        while called < waiting {
            let Some(due) = self.books().take_due() else { break };
            called += 1;
            self.call_release(due);
        }
        called
    }

    fn call_release(&self, Due { at, size, release }: Due) {
        let outcome = caught(|| release(at, size));
        if let Err(message) = outcome {
            self.books().outstanding.imported.panics += 1;
            log!(warn, arena = self.name, %at, %size, message, "a release panicked");
        }
    }

    /// At the end of the arena: releases what the device is done with, and drops the other release
    /// functions uncalled.
    pub(in crate::device) fn end_adopted(&self) {
        self.release_adopted();
        let mut left = (0_u64, ByteSize::ZERO);
        loop {
            let due = self.books().outstanding.imported.take_any();
            let Some(Due { size, release, .. }) = due else { break };
            left = (left.0 + 1, left.1.saturating_add(size));
            let _ = caught(|| drop(release)); // not ours, and nothing unwinds out of a drop
        }
        if left.0 > 0 {
            let (count, left) = left;
            log!(warn, arena = self.name, count, %left, "adopted memory was not released");
        }
    }
}

impl Books {
    fn waiting_releases(&self) -> u64 {
        self.outstanding.imported.count() - self.outstanding.imported.held()
    }

    fn take_due(&mut self) -> Option<Due> {
        let (imported, streams) = (&mut self.outstanding.imported, &self.streams);
        let due = imported.take(|of| streams.is_done(of))?;
        imported.released += 1;
        Some(due)
    }

    /// Leaves release functions to be neither called nor dropped: they are of another process.
    pub(in crate::device) fn forget_adopted(&mut self) {
        let _ = ManuallyDrop::new(std::mem::take(&mut self.outstanding.imported));
    }

    /// Why a range cannot be adopted, which does not wrap: some of it is known already.
    fn owns(&self, at: DeviceAddress, size: ByteSize) -> Option<ImportError> {
        let is_own = |&region: &Region| self.region(region).segment.overlaps(at, size);
        if Region::ALL.iter().any(is_own) {
            return Some(ImportError::OfArena);
        }
        self.outstanding.imported.overlaps(at.get(), size.get()).then_some(ImportError::Imported)
    }
}

/// What is wrong with a range by itself.
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
