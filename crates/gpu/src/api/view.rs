//! Buffers and imported memory as seen by cudarc: a borrowed `CudaSlice` or `CudaViewMut`, under a
//! lease.
//!
//! cudarc orders the streams that use a slice by two events that the slice keeps. So a buffer keeps
//! one slice while it stays at its address, and hands out references to it: the next view waits for
//! the events of the previous one. A buffer that is never viewed makes no call. The slice is never
//! handed out by value, because dropping it would free the arena's memory. At the end of the buffer
//! the slice's stream waits for the events of other streams, so that the lane's order includes
//! them. If that fails, the buffer is freed like one without a lane, after all work of the device.
//! `exec/view.rs` keeps the slices.
//!
//! Without cudarc's event tracking nothing is recorded, and uses of other streams must be passed to
//! [`Buffer::record_use`].
#![expect(unsafe_code, reason = "a slice of cudarc's is made of the arena's memory")]

use std::sync::Arc;

use bytemuck::Pod;
use cudarc::driver::{CudaSlice, CudaStream, CudaViewMut};

use crate::api::arena::DeviceArena;
use crate::api::buffer::Buffer;
use crate::api::interop::Imported;
use crate::api::lane::{Lane, Lease};
use crate::driver::StreamHandle;
use crate::exec::view::{Order, no_stream};
use crate::exec::{Keeps, LaneInner};
use crate::types::{DeviceError, Result};

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
    pub fn cuda_lane(&self, stream: &Arc<CudaStream>) -> Result<Lane> {
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
    /// The first view creates the two events that cudarc uses for that; later views make no call,
    /// or, without event tracking, ask if the lane's stream captures a graph. If the block is
    /// cached, its next buffer of this type and length needs no events either. Dropping a buffer
    /// that was viewed makes three calls more than one that was not: that question, and two waits.
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
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>> {
        let at = self.address(lease)?.map_or(0, |at| at.get());
        lease.note_view();
        // The lane that the buffer was allocated on.
        let lane = self.owned.lanes.iter().next().map(AsRef::as_ref);
        let slice = self.owned.view.keep(self.inner(), lane, (at, self.len()))?;
        // SAFETY: the slice is on the heap and stays there until the buffer is dropped or resized,
        // which takes `&mut` or the value, or until `ViewSlot::keep` replaces it. It does so only
        // if the buffer has moved, which it does not while `lease` is borrowed, or on the first
        // call, when no reference exists yet. Only shared references exist meanwhile: `cuda_mut`
        // takes `&mut self`.
        Ok(unsafe { &*slice })
    }

    /// Returns the buffer as a `CudaViewMut` for writing. Like [`Buffer::cuda`].
    ///
    /// # Errors
    /// The errors of [`Buffer::cuda`].
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(self.inner());
        self.owned.view.kept_mut().map(CudaSlice::as_view_mut).ok_or(no_stream)
    }
}

impl<T: Pod> Imported<T> {
    /// Returns the imported memory as a `CudaSlice` for reading. Like [`Buffer::cuda`].
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] if it was not imported on a [`DeviceArena::cuda_lane`]; otherwise
    /// the errors of [`Buffer::cuda`].
    pub fn cuda<'a>(&'a self, lease: &'a Lease) -> Result<&'a CudaSlice<T>> {
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
    pub fn cuda_mut<'a>(&'a mut self, lease: &'a Lease) -> Result<CudaViewMut<'a, T>> {
        let _ = self.cuda(lease)?;
        let no_stream = no_stream(&self.inner);
        self.view.kept_mut().map(CudaSlice::as_view_mut).ok_or(no_stream)
    }

    /// Discards the slice at the end of the value, after which all work of the device is waited
    /// for. Does nothing in a forked child. Returns `true` if a graph may have captured the memory.
    pub(crate) fn let_view_go(&mut self) -> bool {
        let lane = self.lane.as_deref();
        let ask = || lane.is_some_and(LaneInner::is_capturing);
        if self.inner.check_here().is_err() || !self.view.is_captured(ask) {
            return self.view.discard(&self.inner) == Order::Captured;
        }
        let shard = lane.and_then(|lane| lane.shard.as_ref());
        if let (Some(kept), Some(shard)) = (self.view.take(), shard) {
            shard.leave_view(kept);
        }
        true
    }
}
