//! A pinned buffer for cudarc's own copies: `CudaStream::memcpy_htod` and `memcpy_dtoh`.
//!
//! Users call this. cudarc asks a [`HostSlice`] for a slice, and how to synchronize after the copy
//! was queued. A view answers [`SyncOnDrop::Sync`]: the call waits for the stream. It never answers
//! `Record`, which does nothing while cudarc's event tracking is off, and drops errors. cudarc does
//! not wait either if any call parked an error with its context meanwhile, as a failed record of an
//! event does. So the view waits for the stream again when it is dropped, and if that wait fails
//! the buffer is quarantined.
//!
//! Invariant: the buffer is [`DeviceUse::Unproven`] from the moment at which cudarc has the slice
//! until the host has observed the end of the stream's work. If a view is forgotten, the buffer
//! stays so.
#![expect(unsafe_code, reason = "cudarc asks for slices by unsafe functions")]

use lowtide_core::log;
use std::fmt;

use bytemuck::Pod;
use cudarc::driver::{CudaStream, HostSlice, SyncOnDrop};

use super::{DeviceUse, PinnedBuffer};
use crate::api::lane::Lane;
use crate::types::{DeviceError, Result};
use lowtide_core::sync::atomic::{AtomicBool, Ordering};

/// A pinned buffer as cudarc sees it, for copies on the stream of one lane; from
/// [`PinnedBuffer::cuda`].
struct PinnedView<'a, T: Pod> {
    buffer: &'a mut PinnedBuffer<T>,
    lane: Lane,
    /// `true` if cudarc has the slice.
    exported: AtomicBool,
}

impl<T: Pod> PinnedBuffer<T> {
    /// Returns a view of the buffer for cudarc's copies on the stream of a lane. Each copy waits
    /// for the stream, and so does the drop of the view; [`Lane::copy_to_device`] does not.
    ///
    /// While the stream captures a graph nothing is copied, and the capture is invalidated: a
    /// captured copy would read or write the memory at each launch, even after its reuse.
    ///
    /// ```no_run
    /// # use lowtide_gpu::{Buffer, Lane, Lease, PinnedBuffer};
    /// # fn copy(
    /// #     lane: &Lane,
    /// #     lease: &Lease,
    /// #     staging: &mut PinnedBuffer<f32>,
    /// #     weights: &mut Buffer<f32>,
    /// # ) -> Result<(), Box<dyn std::error::Error>> {
    /// let stream = lane.cuda_stream().ok_or("a lane of cudarc's")?;
    /// stream.memcpy_htod(&staging.cuda(lane)?, &mut weights.cuda_mut(lease)?)?;
    /// staging.fill(0.0)?; // the copy is complete
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`DeviceError::NoStream`] if the lane is not from
    /// [`DeviceArena::cuda_lane`](crate::DeviceArena::cuda_lane); otherwise the errors of
    /// [`PinnedBuffer::write_at`].
    pub fn cuda<'a>(
        &'a mut self,
        lane: &Lane,
    ) -> Result<impl HostSlice<T> + fmt::Debug + use<'a, T>> {
        self.check()?;
        if lane.cuda_stream().is_none() {
            return Err(DeviceError::NoStream { arena: lane.arena().name().to_owned() });
        }
        self.device_use = DeviceUse::Unproven;
        Ok(PinnedView { buffer: self, lane: lane.clone(), exported: AtomicBool::new(false) })
    }
}

impl<T: Pod> PinnedView<'_, T> {
    /// Returns the number of elements that cudarc may copy on this stream now: 0 while it captures,
    /// or if that is unknown.
    ///
    /// # Panics
    /// If the stream is not that of the lane, whose end the view waits for.
    fn export(&self, stream: &CudaStream) -> usize {
        let is_ours = stream.cu_stream().addr() as u64 == self.lane.stream().get();
        assert!(is_ours, "copy on another stream than the view's lane");
        if !matches!(self.lane.known().ask_capturing(), Ok(false)) {
            return 0;
        }
        self.exported.store(true, Ordering::Relaxed);
        self.buffer.len
    }
}

impl<T: Pod> HostSlice<T> for PinnedView<'_, T> {
    fn len(&self) -> usize {
        self.buffer.len
    }

    unsafe fn stream_synced_slice<'a>(
        &'a self,
        stream: &'a CudaStream,
    ) -> (&'a [T], SyncOnDrop<'a>) {
        let len = self.export(stream);
        (&self.buffer.elements()[..len], SyncOnDrop::Sync(Some(stream)))
    }

    unsafe fn stream_synced_mut_slice<'a>(
        &'a mut self,
        stream: &'a CudaStream,
    ) -> (&'a mut [T], SyncOnDrop<'a>) {
        let len = self.export(stream);
        (&mut self.buffer.elements_mut()[..len], SyncOnDrop::Sync(Some(stream)))
    }
}

impl<T: Pod> Drop for PinnedView<'_, T> {
    /// Waits for the stream, which cudarc has done already unless a call failed. If the wait fails,
    /// the buffer is quarantined. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.buffer.pool.check_here().is_err() {
            return;
        }
        if self.exported.load(Ordering::Relaxed) {
            let (shared, lane) = (self.lane.arena().inner(), self.lane.known());
            // A stream that captures cannot be waited for, and an attempt would invalidate the
            // capture.
            let waited = match lane.ask_capturing() {
                Ok(false) => lane.synchronize().map_err(Into::into),
                Ok(true) => Err(DeviceError::Capturing { arena: shared.name.clone() }),
                Err(error) => Err(error.into()),
            };
            if let Err(error) = waited {
                let pool = self.buffer.pool.name();
                log!(warn, pool, %error, "completion of a pinned copy not observed");
                return;
            }
        }
        self.buffer.device_use = DeviceUse::None;
    }
}

lowtide_core::debug_as!([T: Pod] PinnedView<'_, T>, |it| buffer: it.buffer, lane: it.lane);
