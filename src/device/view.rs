//! FENCE: buffers, and what was adopted, as cudarc sees them: a borrowed `CudaSlice`, or a
//! `CudaViewMut`, under a lease.
//!
//! cudarc orders the streams that use a slice by two events that the slice keeps. So a buffer keeps
//! one slice for as long as it stands where it is, and hands out references to it: what one view
//! recorded, the next one waits for. A buffer that is never viewed costs no call. The slice is
//! never handed out to be moved or replaced, since its own drop would free what is the arena's: it
//! is let go of here, and its stream then waits for what other streams recorded on it, so that the
//! lane's order holds for them too. Where it cannot be made to, the buffer is freed as one of no
//! lane, after all work of the device.
//!
//! Without cudarc's tracking of events nothing is recorded, and what another stream does to a
//! buffer is for [`Buffer::record_use`] to say.
//!
//! Invariant: a slice that is kept has the address and the length of the buffer while any reference
//! to it is alive.
#![expect(unsafe_code, reason = "a slice of cudarc's is made of the arena's memory")]

use std::mem::ManuallyDrop;
use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::result::ctx::{get_current, set_current};
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut, DriverError};

use super::arena::DeviceArena;
use super::buffer::Buffer;
use super::driver::StreamHandle;
use super::error::DeviceError;
use super::interop::Imported;
use super::lane::{Keeps, Known, Lane};
use super::lease::Lease;
use super::shared::Shared;
use crate::sync::atomic::Ordering;
use crate::sync::{Mutex, caught, lock};

/// The slice that a buffer keeps, once it was viewed. On the heap, so that it stays where it is
/// while references to it are handed out.
#[derive(Debug)]
pub(super) struct View<T> {
    slot: Mutex<Slot<T>>,
}

#[derive(Debug)]
struct Slot<T> {
    kept: Option<Box<Kept<T>>>,
    /// The stream could not be made to wait for what others recorded on a slice that is gone.
    loose: bool,
}

#[derive(Debug)]
struct Kept<T> {
    slice: ManuallyDrop<CudaSlice<T>>,
    at: u64,
}

impl<T> Default for View<T> {
    fn default() -> Self {
        Self { slot: Mutex::new(Slot { kept: None, loose: false }) }
    }
}

impl<T> Kept<T> {
    /// Lets the slice go, and its memory be: its stream waits for what was recorded on it. Says
    /// whether cudarc parked an error meanwhile.
    fn let_go(mut self) -> Result<(), DriverError> {
        let context = Arc::clone(self.slice.context());
        // An error that somebody else parked stays parked.
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
    /// The number of the arena's device, for `CudaContext::new`; `None` on a driver that is not
    /// CUDA's.
    #[must_use]
    pub fn cuda_ordinal(&self) -> Option<usize> {
        self.shared().driver.ordinal().and_then(|ordinal| usize::try_from(ordinal).ok())
    }

    /// The lane of a stream of cudarc's, which it keeps for as long as the lane or a buffer of it
    /// is there.
    ///
    /// # Errors
    /// [`DeviceError::ForeignStream`] for a stream of another context, for the null stream, and on
    /// a driver that is not CUDA's; [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub fn cuda_lane(&self, stream: &Arc<CudaStream>) -> Result<Lane, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let foreign = |what| DeviceError::ForeignStream { arena: self.name().to_owned(), what };
        let number = |at: usize| at as u64;
        match shared.driver.context() {
            None => return Err(foreign("the arena is not in CUDA memory")),
            Some(context) if context != number(stream.context().cu_ctx().addr()) => {
                return Err(foreign("it is of another context"));
            }
            Some(_) => {}
        }
        let handle = number(stream.cu_stream().expose_provenance());
        if handle <= 2 {
            return Err(foreign("the null stream orders itself with other streams"));
        }
        self.lane_with(StreamHandle::new(handle), Keeps::Cuda(Arc::clone(stream)))
    }

    /// How many errors of CUDA freed buffers left with cudarc, each of which would else have come
    /// out of the next call of somebody else. The buffers were freed all the same.
    #[must_use]
    pub fn parked_errors(&self) -> u64 {
        self.shared().parked.load(Ordering::Relaxed)
    }
}

impl Lane {
    /// The stream, where the lane is one of cudarc's.
    #[must_use]
    pub fn cuda_stream(&self) -> Option<&Arc<CudaStream>> {
        self.known().cuda()
    }
}

impl<T: Pod> Buffer<T> {
    /// The buffer as cudarc sees it, to read: for copies, as an argument of a kernel, and wherever
    /// else a `&CudaSlice` goes. Any stream of the device may use it while the lease is held:
    /// cudarc orders them, where it tracks events. So all work of the device is waited for before
    /// the memory sleeps, whatever lane the lease is of.
    ///
    /// The first view creates the two events by which cudarc does that; later ones make no call.
    /// The slice is only ever lent: who could take it would free the arena's memory with it.
    ///
    /// ```compile_fail,E0507
    /// use lowtide::cudarc::driver::CudaSlice;
    /// use lowtide::device::{Buffer, Lease};
    ///
    /// fn steal(buffer: &Buffer<f32>, lease: &Lease) -> CudaSlice<f32> {
    ///     *buffer.cuda(lease).unwrap()
    /// }
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] where it was not taken on a [`DeviceArena::cuda_lane`];
    /// [`DeviceError::View`]; [`DeviceError::Driver`] where the buffer was moved or resized and
    /// what other streams did to it before cannot be waited for; else as [`Buffer::address`].
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>, DeviceError> {
        let at = self.address(lease)?.map_or(0, |at| at.get());
        lease.note_view();
        let slice = self.view.keep(self.shared(), self.lane(), (at, self.len()))?;
        // SAFETY: the slice is on the heap and stays there until the buffer is dropped or resized,
        // which takes `&mut` or the value, or until it is replaced (`View::keep`), where the buffer
        // had moved, which it does not while `lease` is borrowed. Only shared references to it
        // exist meanwhile: `cuda_mut` takes `&mut self`.
        Ok(unsafe { &*slice })
    }

    /// The buffer as cudarc sees it, to write: wherever a `&mut CudaViewMut` goes. As
    /// [`Buffer::cuda`].
    ///
    /// # Errors
    /// As [`Buffer::cuda`].
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>, DeviceError> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(self.shared());
        self.view.kept_mut().map(|slice| slice.as_view_mut()).ok_or(no_stream)
    }

    /// Lets the slice go, at the end of the buffer: where its stream could not be made to wait for
    /// others, all work of the device comes before the memory's next use. In a forked child does
    /// nothing.
    pub(super) fn let_view_go(&mut self) {
        let shared = Arc::clone(self.shared());
        if !self.view.let_go(&shared) {
            self.forget_lanes();
        }
    }
}

impl<T: Pod> Imported<T> {
    /// What was adopted as cudarc sees it, to read: as [`Buffer::cuda`].
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] where it was not adopted on a [`DeviceArena::cuda_lane`]; else as
    /// there.
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>, DeviceError> {
        let at = self.address(lease)?.get();
        lease.note_view();
        let slice = self.view.keep(&self.shared, self.lane.as_deref(), (at, self.len()))?;
        // SAFETY: the slice is on the heap and stays there until the value is dropped: its address
        // and its length never change. Only shared references to it exist meanwhile: `cuda_mut`
        // takes `&mut self`.
        Ok(unsafe { &*slice })
    }

    /// What was adopted as cudarc sees it, to write: as [`Buffer::cuda_mut`].
    ///
    /// # Errors
    /// As [`Imported::cuda`].
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>, DeviceError> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(&self.shared);
        self.view.kept_mut().map(|slice| slice.as_view_mut()).ok_or(no_stream)
    }

    /// Lets the slice go, at the end of the value, after which all work of the device is waited
    /// for. In a forked child does nothing.
    pub(super) fn let_view_go(&mut self) {
        let _ = self.view.let_go(&self.shared);
    }
}

impl<T: Pod> View<T> {
    /// The slice that is kept of this place; makes one where there is none. It is replaced when
    /// `place` is another, and freed by `let_go`: by nothing else.
    fn keep(
        &self,
        shared: &Shared,
        lane: Option<&Known>,
        place: (u64, usize),
    ) -> Result<*const CudaSlice<T>, DeviceError> {
        let mut slot = lock(&self.slot);
        let is_there = |kept: &Kept<T>| (kept.at, kept.slice.len()) == place;
        if !slot.kept.as_deref().is_some_and(is_there) {
            // Nobody has a reference to one that is replaced: it would be under a lease, and
            // nothing moves, nor is resized, while one is held.
            let kept = slot.kept.take();
            slot.loose |= !forget(shared, kept);
            if slot.loose {
                shared.complete_all()?;
                slot.loose = false;
            }
            slot.kept = Some(Box::new(make(shared, lane, place)?));
        }
        let Some(kept) = slot.kept.as_deref() else { return Err(no_stream(shared)) };
        Ok(&raw const *kept.slice)
    }

    fn kept_mut(&mut self) -> Option<&mut CudaSlice<T>> {
        let slot = self.slot.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        slot.kept.as_deref_mut().map(|kept| &mut *kept.slice)
    }

    /// Lets the slice go; whether its stream comes after all that cudarc ordered.
    fn let_go(&mut self, shared: &Shared) -> bool {
        let slot = self.slot.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        let (kept, loose) = (slot.kept.take(), slot.loose);
        forget(shared, kept) && !loose
    }
}

/// A slice of cudarc's over the elements of a block, or of what was adopted.
fn make<T: Pod>(
    shared: &Shared,
    lane: Option<&Known>,
    (at, len): (u64, usize),
) -> Result<Kept<T>, DeviceError> {
    let stream = lane.and_then(Known::cuda).ok_or_else(|| no_stream(shared))?;
    let made = keeping_current(stream, || {
        // SAFETY: the block is live, or the memory adopted and not released; it has room for the
        // elements, and stays so until the slice is let go of, which frees nothing. What is there
        // are bytes of a Pod: any are a value.
        unsafe { stream.upgrade_device_ptr::<T>(at, len) }
    });
    let slice = made.map_err(|message| DeviceError::View { message })?;
    Ok(Kept { slice: ManuallyDrop::new(slice), at })
}

/// Lets a slice go; whether its stream comes after all that cudarc ordered.
fn forget<T>(shared: &Shared, kept: Option<Box<Kept<T>>>) -> bool {
    let Some(kept) = kept else { return true };
    if shared.check_here().is_err() {
        let _ = ManuallyDrop::new(kept); // its context is the parent's
        return true;
    }
    // cudarc unwraps nothing here; if it did, nothing would unwind out of a drop.
    let stream = Arc::clone(kept.slice.stream());
    let outcome = keeping_current(&stream, || kept.let_go());
    if let Ok(Ok(())) = outcome {
        return true;
    }
    shared.parked.fetch_add(1, Ordering::Relaxed);
    log!(warn, arena = shared.name, ?outcome, "a freed buffer's view left an error");
    false
}

fn no_stream(shared: &Shared) -> DeviceError {
    DeviceError::NoStream { arena: shared.name.clone() }
}

/// Has cudarc do something, which makes the context of its stream current: the context that the
/// thread had, or none, is restored afterwards, as after all calls of the arena. What cudarc said,
/// if it panicked.
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
