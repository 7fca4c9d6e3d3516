//! Asynchronous copies between a pinned buffer and a buffer of an arena, on a lane.
//!
//! Users call this. A copy takes the pinned buffer by value and records its own event after it, so
//! it does not depend on cudarc's event tracking. [`PinnedCopy::wait`] returns the buffer after the
//! host has observed the event. If the copy is dropped instead, the block waits in the pool for the
//! event (`unfinished`).
//!
//! Invariant: from the moment at which a copy may be queued, the buffer is [`DeviceUse::Until`] an
//! event that was recorded after it, or [`DeviceUse::Unproven`]; it is [`DeviceUse::None`] again
//! only after the host has observed the end of the copy.
//!
//! A capture that another thread begins and ends on the stream while the copy is being queued is
//! not detected: no other thread may use a stream in capture.
#![expect(unsafe_code, reason = "drivers copy by address")]

use bytemuck::Pod;

use super::{DeviceUse, PinnedBuffer};
use crate::api::buffer::Buffer;
use crate::api::lane::Lane;
use crate::exec::DriverEvent;
use crate::types::error::{DeviceError, DeviceErrorWith, is_captures};

/// A copy on a lane, which owns its pinned buffer until the copy is complete.
///
/// [`PinnedCopy::wait`] returns the buffer. A drop does not wait: the memory is free for other
/// buffers of the pool once the copy is complete. If that cannot be observed, the memory is
/// quarantined: it is neither reused nor freed, and counts as
/// [`PinnedSnapshot::quarantined`](super::PinnedSnapshot::quarantined).
#[must_use = "`wait` returns the buffer after the copy is complete"]
pub struct PinnedCopy<T: Pod> {
    buffer: PinnedBuffer<T>,
}

impl Lane {
    /// Queues a copy of a pinned buffer to the first elements of `to` on this lane's stream, and
    /// returns immediately. The copy owns the pinned buffer until it is complete.
    ///
    /// It runs after earlier work of this stream. It ignores events that cudarc recorded for views
    /// of `to` on other streams. If the pinned memory is pageable, or the driver's calls are
    /// synchronous, the call waits for the copy.
    ///
    /// ```
    /// # use std::sync::Arc;
    /// # use lowtide_gpu::clock::SystemClock;
    /// use lowtide_gpu::{ArenaConfig, DeviceArena, HostDriver, Region};
    /// use lowtide_gpu::{PinnedConfig, PinnedKind, PinnedPool};
    /// use lowtide_gpu::driver::StreamHandle;
    ///
    /// # let (driver, clock) = (Arc::new(HostDriver::new()), Arc::new(SystemClock::new()));
    /// # let config = ArenaConfig::new("embedder");
    /// # let arena = DeviceArena::open(driver.clone(), clock.clone(), config)?;
    /// let config = PinnedConfig { kind: PinnedKind::Pageable, ..PinnedConfig::new("staging") };
    /// let pool = PinnedPool::open(driver, clock, config)?;
    /// // SAFETY: the host driver has no streams, so any number will do.
    /// let lane = unsafe { arena.lane(StreamHandle::new(1))? };
    /// let mut tokens = lane.alloc::<u32>(3, Region::Dynamic)?;
    ///
    /// let copy = lane.copy_to_device(pool.alloc_from(&[1, 2, 3])?, &mut tokens)?;
    /// let staging = copy.wait()?;
    /// let back = lane.copy_to_host(&mut tokens, staging)?;
    /// assert_eq!(back.wait()?.to_vec()?, [1, 2, 3]);
    /// # Ok::<(), lowtide_gpu::DeviceError>(())
    /// ```
    ///
    /// While the copy is queued, the buffer cannot be written, dropped or reused:
    /// ```compile_fail,E0382
    /// use lowtide_gpu::{Buffer, Lane, PinnedBuffer};
    ///
    /// fn overwrite(lane: &Lane, mut from: PinnedBuffer<u8>, to: &mut Buffer<u8>) {
    ///     let copy = lane.copy_to_device(from, to);
    ///     from.fill(2);
    /// }
    /// ```
    /// ```compile_fail,E0382
    /// use lowtide_gpu::{Buffer, Lane, PinnedBuffer};
    ///
    /// fn free(lane: &Lane, from: PinnedBuffer<u8>, to: &mut Buffer<u8>) {
    ///     let copy = lane.copy_to_device(from, to);
    ///     drop(from);
    /// }
    /// ```
    ///
    /// # Errors
    /// With the buffer: [`DeviceError::Capturing`] while the stream captures a graph, since the
    /// copy would be repeated at each launch; [`DeviceError::ForeignLane`],
    /// [`DeviceError::Quarantined`], [`DeviceError::Forked`], [`DeviceError::Driver`]; otherwise
    /// the errors of [`Lane::enter`]. After [`DeviceError::Driver`] the buffer is quarantined if a
    /// copy may be queued.
    ///
    /// # Panics
    /// If `to` has fewer elements than the pinned buffer.
    pub fn copy_to_device<T: Pod>(
        &self,
        from: PinnedBuffer<T>,
        to: &mut Buffer<T>,
    ) -> Result<PinnedCopy<T>, DeviceErrorWith<PinnedBuffer<T>>> {
        self.copy_pinned(from, to, true)
    }

    /// Queues a copy of the first elements of `from` on this lane's stream, filling the pinned
    /// buffer, and returns immediately. Like [`Lane::copy_to_device`].
    ///
    /// The elements cannot be read before the copy is complete:
    /// ```compile_fail,E0382
    /// use lowtide_gpu::{Buffer, Lane, PinnedBuffer};
    ///
    /// fn read(lane: &Lane, from: &mut Buffer<u8>, to: PinnedBuffer<u8>) {
    ///     let copy = lane.copy_to_host(from, to);
    ///     to.to_vec();
    /// }
    /// ```
    ///
    /// # Errors
    /// The errors of [`Lane::copy_to_device`].
    ///
    /// # Panics
    /// If `from` has fewer elements than the pinned buffer.
    pub fn copy_to_host<T: Pod>(
        &self,
        from: &mut Buffer<T>,
        to: PinnedBuffer<T>,
    ) -> Result<PinnedCopy<T>, DeviceErrorWith<PinnedBuffer<T>>> {
        self.copy_pinned(to, from, false)
    }

    #[expect(clippy::panic_in_result_fn, reason = "an error of the caller")]
    fn copy_pinned<T: Pod>(
        &self,
        mut host: PinnedBuffer<T>,
        device: &mut Buffer<T>,
        is_to_device: bool,
    ) -> Result<PinnedCopy<T>, DeviceErrorWith<PinnedBuffer<T>>> {
        let (wanted, there) = (host.len(), device.len());
        assert!(wanted <= there, "cannot copy {wanted} elements: the device buffer has {there}");
        match self.queue_copy(&mut host, device, is_to_device) {
            Ok(()) => Ok(PinnedCopy { buffer: host }),
            Err(error) => Err(DeviceErrorWith { error, value: Box::new(host) }),
        }
    }

    /// Queues the copy and an event after it, and records the event in the buffer.
    fn queue_copy<T: Pod>(
        &self,
        host: &mut PinnedBuffer<T>,
        device: &mut Buffer<T>,
        is_to_device: bool,
    ) -> Result<(), DeviceError> {
        host.check()?;
        device.record_use(self)?;
        let lease = self.enter()?;
        let (Some(_), Some(at)) = (host.block, device.address(&lease)?) else { return Ok(()) };
        let (start, size) = (host.start.cast::<u8>(), host.bytes());
        let shared = self.arena().inner();
        let (driver, lane) = (&shared.driver, self.known());
        // SAFETY: `host` owns its block, and `device` is borrowed and committed: a lease is held.
        // On an asynchronous driver both stay until the copy is complete: `device_use` keeps the
        // block of `host` until the host has seen that, and gives no access to it; the use of
        // `device` by this lane's stream is recorded with the buffer and the lease, so that its
        // memory leaves and moves only after that work. Sizes: the caller asserted that the copy
        // has room. The two never overlap: memory of a pool is no memory of an arena.
        let write = || unsafe { driver.copy_from_host(start, at, size, self.stream()) };
        // SAFETY: as above.
        let read = || unsafe { driver.copy_to_host(at, start, size, self.stream()) };
        let start_copy = || if is_to_device { write() } else { read() };
        if !shared.capabilities.asynchronous {
            return Ok(start_copy()?);
        }
        if lane.ask_capturing()? {
            return Err(DeviceError::Capturing { arena: shared.name.clone() });
        }
        let event = DriverEvent::new(driver)?;
        host.device_use = DeviceUse::Unproven;
        let queued = start_copy();
        let recorded = queued.is_ok() && event.record(lane).is_ok();
        // A capture that began meanwhile contains the copy and the event: a query of the event
        // would invalidate the capture, and the copy may be replayed at any time.
        if lane.ask_capturing()? {
            return Err(DeviceError::Capturing { arena: shared.name.clone() });
        }
        if recorded {
            host.device_use = DeviceUse::Until(event);
            return Ok(());
        }
        // The copy may be queued, with no event after it.
        lane.synchronize()?;
        host.device_use = DeviceUse::None;
        Ok(queued?)
    }
}

impl<T: Pod> PinnedCopy<T> {
    /// Returns `true` if the copy is complete. Does not block.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], [`DeviceError::Forked`].
    pub fn is_complete(&self) -> Result<bool, DeviceError> {
        self.buffer.pool.check_here()?;
        match &self.buffer.device_use {
            DeviceUse::Until(event) => Ok(event.is_complete()?),
            DeviceUse::None | DeviceUse::Unproven => Ok(true),
        }
    }

    /// Waits until the copy is complete, and returns the buffer.
    ///
    /// # Errors
    /// [`DeviceError::Driver`]: the buffer is quarantined; but if the wait was refused because a
    /// stream captures a graph, it is freed once the copy is complete. [`DeviceError::Forked`].
    pub fn wait(self) -> Result<PinnedBuffer<T>, DeviceError> {
        let mut buffer = self.buffer;
        buffer.pool.check_here()?;
        if let DeviceUse::Until(event) = &buffer.device_use {
            if let Err(error) = event.wait() {
                if !is_captures(&error) {
                    buffer.device_use = DeviceUse::Unproven;
                }
                return Err(error.into());
            }
            buffer.device_use = DeviceUse::None;
        }
        Ok(buffer)
    }
}

lowtide_core::debug_as!([T: Pod] PinnedCopy<T>, |it| buffer: it.buffer);
