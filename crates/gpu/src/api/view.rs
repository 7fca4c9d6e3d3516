//! Buffers and imported memory as seen by cudarc: a borrowed `CudaSlice` or `CudaViewMut`, under a
//! lease.
//!
//! cudarc orders the streams that use a slice by two events that the slice keeps. So a buffer keeps
//! one slice while it stays at its address, and hands out references to it: the next view waits for
//! the events of the previous one. A buffer that is never viewed makes no call. The slice is never
//! handed out by value, because dropping it would free the arena's memory. When the slice is
//! discarded, its stream waits for the events of other streams, so that the lane's order includes
//! them. If that fails, the buffer is freed like one without a lane, after all work of the device.
//!
//! Without cudarc's event tracking nothing is recorded, and uses of other streams must be passed to
//! [`Buffer::record_use`].
//!
//! Invariant: a slice has the address and the length of its buffer while any reference to it is
//! alive.
#![expect(unsafe_code, reason = "a slice of cudarc's is made of the arena's memory")]

use lowtide_core::log;
use std::mem::ManuallyDrop;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result::ctx::{get_current, set_current};
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DriverError};

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::api::interop::Imported;
use crate::api::lane::Lane;
use crate::api::lease::Lease;
use crate::driver::StreamHandle;
use crate::exec::inner::ArenaInner;
use crate::exec::lane::{Keeps, LaneInner};
use crate::types::error::DeviceError;
use lowtide_core::sync::atomic::Ordering;
use lowtide_core::sync::{Mutex, caught, lock};

/// The slice that a buffer keeps after its first view. It is on the heap, so that it does not move
/// while references to it exist.
#[derive(Debug)]
pub(crate) struct View<T> {
    slot: Mutex<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    kept: Option<Box<KeptSlice<T>>>,
    /// `true` if the stream could not wait for the events that others recorded on a dropped slice.
    loose: bool,
}

#[derive(Debug)]
struct KeptSlice<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    at: u64,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        Self { slot: Mutex::new(Slot { kept: None, loose: false }) }
    }
}

impl<T> KeptSlice<T> {
    /// Discards the slice without freeing its memory: its stream waits for the events recorded on
    /// it. Returns an error if cudarc parked one meanwhile.
    fn let_go(mut self) -> Result<(), DriverError> {
        let context = Arc::clone(self.slice.context());
        // An error that other code parked stays parked.
        let before = context.check_err();
        // SAFETY: taken once: `self` is gone after this.
        let slice = unsafe { ManuallyDrop::take(&mut self.slice) };
        let _ = slice.leak();
        let ours = context.check_err();
        context.record_err(before);
        ours
    }
}

impl DeviceArena {
    /// Returns the arena's device ordinal, for `CudaContext::new`; `None` on other drivers.
    #[must_use]
    pub fn cuda_ordinal(&self) -> Option<usize> {
        self.inner().driver.ordinal().and_then(|ordinal| usize::try_from(ordinal).ok())
    }

    /// Returns the lane of a cudarc stream. The lane and its buffers keep the stream alive.
    ///
    /// ```no_run
    /// use std::sync::Arc;
    /// use cudarc::driver::CudaContext;
    /// use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::driver::cuda::{CudaDriver, CudaOptions};
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, Region};
    ///
    /// let driver = Arc::new(CudaDriver::open(CudaOptions::default())?); // before cudarc's calls
    /// let clock = Arc::new(SystemClock::new());
    /// let arena = DeviceArena::open(driver, clock, ArenaConfig::new("embedder"))?;
    /// let stream = CudaContext::new(0)?.new_stream()?; // the same context
    /// let lane = arena.cuda_lane(&stream)?;
    ///
    /// let mut weights = lane.alloc::<f32>(1024, Region::Stable)?;
    /// let lease = lane.enter()?; // while it is held, the arena is awake and nothing moves
    /// stream.memcpy_htod(&[1.0; 1024], &mut weights.cuda_mut(&lease)?)?;
    /// let sums = stream.clone_dtoh(weights.cuda(&lease)?)?; // wherever a `&CudaSlice` goes
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::ForeignStream`] for a stream of another context, for the null stream, and on
    /// other drivers than CUDA; [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn cuda_lane(&self, stream: &Arc<CudaStream>) -> Result<Lane, DeviceError> {
        let inner = self.inner();
        inner.check_open()?;
        let foreign = |what| DeviceError::ForeignStream { arena: self.name().to_owned(), what };
        let number = |at: usize| at as u64;
        match inner.driver.context() {
            None => return Err(foreign("the arena is not in CUDA memory")),
            Some(context) if context != number(stream.context().cu_ctx().addr()) => {
                return Err(foreign("it belongs to another context"));
            }
            Some(_) => {}
        }
        let handle = number(stream.cu_stream().expose_provenance());
        if handle <= 2 {
            return Err(foreign("the null stream synchronizes with other streams"));
        }
        // SAFETY: a stream of the driver's context, checked above, which the lane keeps.
        unsafe { self.lane_with(StreamHandle::new(handle), Keeps::Cuda(Arc::clone(stream))) }
    }

    /// Returns the number of CUDA errors that freed buffers left with cudarc. Each is removed from
    /// cudarc's context, so that no later call returns it. The buffers were freed.
    #[must_use]
    pub fn parked_errors(&self) -> u64 {
        self.inner().parked.load(Ordering::Relaxed)
    }
}

impl Lane {
    /// Returns the cudarc stream of a lane from [`DeviceArena::cuda_lane`].
    #[must_use]
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.known().cuda()
    }
}

impl<T: Pod> Buffer<T> {
    /// Returns the buffer as a `CudaSlice` for reading: for copies, and as a kernel argument. Any
    /// stream of the device may use it while the lease is held; cudarc orders them if it tracks
    /// events. Therefore a sleep waits for all work of the device, whatever the lane of the lease.
    ///
    /// The first view creates the two events that cudarc uses for that; later views make no call.
    /// The slice is only borrowed: its owner would free the arena's memory on drop.
    ///
    /// ```compile_fail,E0507
    /// use cudarc::driver::CudaSlice;
    /// use lowtide_gpu::{Buffer, Lease};
    ///
    /// fn steal(buffer: &Buffer<f32>, lease: &Lease) -> CudaSlice<f32> {
    ///     *buffer.cuda(lease).unwrap()
    /// }
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] if the buffer was not allocated on a [`DeviceArena::cuda_lane`];
    /// [`DeviceError::View`]; [`DeviceError::Driver`] if the buffer was moved or resized and
    /// earlier uses by other streams cannot be waited for; otherwise the errors of
    /// [`Buffer::address`].
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>, DeviceError> {
        let at = self.address(lease)?.map_or(0, |at| at.get());
        lease.note_view();
        let slice = self.view.keep(self.inner(), self.lane(), (at, self.len()))?;
        // SAFETY: the slice is on the heap and stays there until the buffer is dropped or resized,
        // which takes `&mut` or the value, or until it is replaced (`View::keep`), if the buffer
        // had moved, which it does not while `lease` is borrowed. Only shared references to it
        // exist meanwhile: `cuda_mut` takes `&mut self`.
        Ok(unsafe { &*slice })
    }

    /// Returns the buffer as a `CudaViewMut` for writing. Like [`Buffer::cuda`].
    ///
    /// # Errors
    /// The errors of [`Buffer::cuda`].
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>, DeviceError> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(self.inner());
        self.view.kept_mut().map(|slice| slice.as_view_mut()).ok_or(no_stream)
    }

    /// Discards the slice at the end of the buffer: if its stream could not wait for others, all
    /// work of the device comes before the memory's next use. Does nothing in a forked child.
    pub(crate) fn let_view_go(&mut self) {
        let inner = Arc::clone(self.inner());
        if !self.view.let_go(&inner) {
            self.forget_lanes();
        }
    }
}

impl<T: Pod> Imported<T> {
    /// Returns the imported memory as a `CudaSlice` for reading. Like [`Buffer::cuda`].
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] if it was not imported on a [`DeviceArena::cuda_lane`]; otherwise
    /// the errors of [`Buffer::cuda`].
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>, DeviceError> {
        let at = self.address(lease)?.get();
        lease.note_view();
        let slice = self.view.keep(&self.inner, self.lane.as_deref(), (at, self.len()))?;
        // SAFETY: the slice is on the heap and stays there until the value is dropped: its address
        // and its length never change. Only shared references to it exist meanwhile: `cuda_mut`
        // takes `&mut self`.
        Ok(unsafe { &*slice })
    }

    /// Returns the imported memory as a `CudaViewMut` for writing. Like [`Buffer::cuda_mut`].
    ///
    /// # Errors
    /// The errors of [`Imported::cuda`].
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>, DeviceError> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(&self.inner);
        self.view.kept_mut().map(|slice| slice.as_view_mut()).ok_or(no_stream)
    }

    /// Discards the slice at the end of the value, after which all work of the device is waited
    /// for. Does nothing in a forked child.
    pub(crate) fn let_view_go(&mut self) {
        let _ = self.view.let_go(&self.inner);
    }
}

impl<T: Pod> View<T> {
    /// Returns the slice kept for this place; creates a slice if there is none. The slice is
    /// replaced when `place` changes, and only `let_go` discards it.
    fn keep(
        &self,
        inner: &ArenaInner,
        lane: Option<&LaneInner>,
        place: (u64, usize),
    ) -> Result<*const CudaSlice<T>, DeviceError> {
        let mut slot = lock(&self.slot);
        let is_there = |kept: &KeptSlice<T>| (kept.at, kept.slice.len()) == place;
        if !slot.kept.as_deref().is_some_and(is_there) {
            // No reference to a replaced slice exists: it would be under a lease, and no buffer
            // moves or is resized while a lease is held.
            let kept = slot.kept.take();
            slot.loose |= !forget(inner, kept);
            if slot.loose {
                inner.complete_all()?;
                slot.loose = false;
            }
            slot.kept = Some(Box::new(make(inner, lane, place)?));
        }
        let Some(kept) = slot.kept.as_deref() else { return Err(no_stream(inner)) };
        Ok(&raw const *kept.slice)
    }

    fn kept_mut(&mut self) -> Option<&mut CudaSlice<T>> {
        let slot = self.slot.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.kept.as_deref_mut().map(|kept| &mut *kept.slice)
    }

    /// Discards the slice. Returns `true` if its stream comes after all work that cudarc ordered.
    fn let_go(&mut self, inner: &ArenaInner) -> bool {
        let slot = self.slot.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (kept, loose) = (slot.kept.take(), slot.loose);
        forget(inner, kept) && !loose
    }
}

/// Creates a cudarc slice over the elements of a block, or of imported memory.
fn make<T: Pod>(
    inner: &ArenaInner,
    lane: Option<&LaneInner>,
    (at, len): (u64, usize),
) -> Result<KeptSlice<T>, DeviceError> {
    let stream = lane.and_then(LaneInner::cuda).ok_or_else(|| no_stream(inner))?;
    let made = keeping_current(stream, || {
        // SAFETY: the block is live, or the memory imported and not released; it has room for the
        // elements, and stays so until the slice is discarded, which frees nothing. The elements
        // are bytes of a Pod: any are a value.
        unsafe { stream.upgrade_device_ptr::<T>(at, len) }
    });
    let slice = made.map_err(|message| DeviceError::View { message })?;
    Ok(KeptSlice { slice: ManuallyDrop::new(slice), at })
}

/// Discards a slice. Returns `true` if its stream comes after all work that cudarc ordered.
fn forget<T>(inner: &ArenaInner, kept: Option<Box<KeptSlice<T>>>) -> bool {
    let Some(kept) = kept else { return true };
    if inner.check_here().is_err() {
        let _ = ManuallyDrop::new(kept); // its context belongs to the parent
        return true;
    }
    // cudarc unwraps nothing here. If it did, nothing would unwind out of a drop.
    let stream = Arc::clone(kept.slice.stream());
    let outcome = keeping_current(&stream, || kept.let_go());
    if let Ok(Ok(())) = outcome {
        return true;
    }
    inner.parked.fetch_add(1, Ordering::Relaxed);
    log!(warn, arena = inner.name, ?outcome, "buffer view free failed");
    false
}

fn no_stream(inner: &ArenaInner) -> DeviceError {
    DeviceError::NoStream { arena: inner.name.clone() }
}

/// Calls cudarc, which makes the context of its stream current. Afterwards the thread's earlier
/// context, or none, is restored, as after all calls of the arena. Returns cudarc's message if it
/// panicked.
fn keeping_current<T>(stream: &CudaStream, act: impl FnOnce() -> T) -> Result<T, String> {
    let before = get_current();
    let outcome = caught(act);
    let before = before.map(|context| context.unwrap_or(std::ptr::null_mut()));
    if let Ok(context) = before
        && context != stream.context().cu_ctx()
    {
        // SAFETY: it was current in this thread, or null, for none. If it is gone by now, that is
        // an error.
        let _ = unsafe { set_current(context) };
    }
    outcome
}
