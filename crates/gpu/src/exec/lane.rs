//! The streams that the arena knows, and their owners.
//!
//! A [`LaneInner`] is shared by the handles, buffers and leases of one lane. It uses the stream's
//! handle, but neither creates nor destroys the stream.
//!
//! Invariant: the arena knows the stream while its [`LaneInner`] exists.
#![expect(unsafe_code, reason = "only the caller knows that a stream is there")]

use std::sync::Arc;

use crate::driver::{Driver, DriverError, EventHandle, StreamHandle};
use crate::engine::completion::{end_stream, leave_stream};
use crate::exec::inner::ArenaInner;
use crate::exec::thread_cache::CacheShard;
#[cfg(feature = "cuda")]
use crate::exec::view::is_capturing;
use crate::index::BlockId;
use crate::state::{LaneNumber, RawUser, StreamKey};
use lowtide_core::fork::Birth;

/// A stream that the arena knows, for as long as the stream may be used.
pub(crate) struct LaneInner {
    inner: Arc<ArenaInner>,
    pub(crate) stream: StreamHandle,
    /// The stream's key; `None` if the driver's work needs no order.
    pub(crate) key: Option<StreamKey>,
    /// The shard for blocks that only this lane used; `None` if the driver's work needs no order.
    pub(crate) shard: Option<Arc<CacheShard>>,
    /// The lane's number; `None` if the driver's work needs no order and nothing observes the
    /// arena.
    pub(crate) number: Option<LaneNumber>,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code, reason = "it is there to be dropped"))]
    keeps: Keeps,
}

/// The owner of a lane's stream.
pub(crate) enum Keeps {
    /// The caller of the unsafe constructor.
    Others,
    /// cudarc's stream, of which the lane holds a reference.
    #[cfg(feature = "cuda")]
    Cuda(Arc<cudarc::driver::CudaStream>),
}

impl LaneInner {
    /// Makes a stream known to the arena.
    ///
    /// # Safety
    /// The stream belongs to the arena's driver and exists until this is dropped; `keeps` may be
    /// what keeps it until then.
    pub(crate) unsafe fn new(inner: &Arc<ArenaInner>, stream: StreamHandle, keeps: Keeps) -> Self {
        let (mut key, mut number) = (None, None);
        if inner.capabilities.asynchronous || inner.is_recorded() {
            inner.run_now(|state| {
                key = state.capabilities.asynchronous.then(|| state.streams.enter(stream));
                number = Some(state.open_lane(stream));
            });
        }
        // Known to the arena until `CacheShard::retire`.
        let shard = key.map(|_| Arc::new(CacheShard::new(Arc::clone(inner), key)));
        shard.iter().for_each(|shard| inner.caches.add(shard));
        Self { inner: Arc::clone(inner), stream, key, shard, number, keeps }
    }

    /// Returns this lane as a user of raw blocks.
    pub(crate) const fn user(&self) -> RawUser {
        RawUser::Lane(self.key, self.number)
    }

    /// Asks an asynchronous driver if the lane's stream captures a graph.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn ask_capturing(&self) -> Result<bool, DriverError> {
        // SAFETY: the stream is of the arena's driver and exists until the lane is dropped: contract
        // of `new`.
        unsafe { self.inner.driver.is_capturing(self.stream) }
    }

    /// Waits until all work of the lane's stream is complete, on an asynchronous driver.
    ///
    /// # Errors
    /// The driver's: the work may still be in progress.
    pub(crate) fn synchronize(&self) -> Result<(), DriverError> {
        // SAFETY: as above.
        unsafe { self.inner.driver.stream_synchronize(self.stream) }
    }

    /// Returns the cudarc stream of the lane, if it has one.
    #[cfg(feature = "cuda")]
    pub(crate) const fn cuda(&self) -> Option<&Arc<cudarc::driver::CudaStream>> {
        if let Keeps::Cuda(stream) = &self.keeps { Some(stream) } else { None }
    }

    /// Returns `true` if the lane's stream captures a graph.
    #[cfg(feature = "cuda")]
    pub(crate) fn is_capturing(&self) -> bool {
        let ask = || self.ask_capturing() == Ok(true);
        self.cuda().map_or_else(ask, |stream| is_capturing(stream))
    }
}

impl ArenaInner {
    /// Makes the arena forget streams that nothing uses any more, after recording events for their
    /// work.
    #[inline]
    pub(crate) fn end_streams(&self, streams: &[StreamKey]) {
        for &stream in streams {
            self.run(async |cx| end_stream(cx, stream, false).await);
        }
    }

    /// Records that a lane uses a block.
    pub(crate) fn note_use(&self, id: BlockId, lane: &LaneInner) {
        if let Some(lane) = lane.number.filter(|_| self.is_recorded()) {
            self.run_now(|state| state.note_use(id, lane));
        }
    }
}

impl Drop for LaneInner {
    /// Makes the arena forget the stream, after recording an event for its remaining work: one
    /// driver call that does not wait. If that call fails, the next user of the stream's memory
    /// waits for all work of the device. If another thread makes a call with the handle, that call
    /// ends first, so the stream may be destroyed after this drop; this is no wait for the device
    /// either. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.inner.check_here().is_err() {
            return;
        }
        if let Some(shard) = &self.shard {
            shard.retire();
            #[cfg(feature = "cuda")]
            shard.discard_views(true);
        }
        if let Some(key) = self.key {
            self.inner.run(async |cx| leave_stream(cx, key).await);
        }
        if let Some(lane) = self.number {
            let stream = self.stream;
            self.inner.push_event("lane_end", |line| {
                line.number("lane", lane.get()).number("stream", stream.get())
            });
        }
    }
}

lowtide_core::debug_as!(LaneInner, |it| stream: it.stream);

/// An event of a driver. Destroyed when this value is dropped.
#[derive(Debug)]
pub(crate) struct DriverEvent {
    driver: Arc<dyn Driver>,
    handle: EventHandle,
    birth: Birth,
}

impl DriverEvent {
    /// Creates an event that marks no work.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn new(driver: &Arc<dyn Driver>) -> Result<Self, DriverError> {
        let handle = driver.event_create()?;
        Ok(Self { driver: Arc::clone(driver), handle, birth: Birth::now() })
    }

    /// Marks the work that the lane's stream has now, with this event.
    ///
    /// # Errors
    /// The driver's; the marked work is unspecified then.
    #[expect(clippy::panic_in_result_fn, reason = "an error of the caller")]
    pub(crate) fn record(&self, lane: &LaneInner) -> Result<(), DriverError> {
        let is_ours = Arc::ptr_eq(&self.driver, &lane.inner.driver);
        assert!(is_ours, "an event and a lane of two drivers");
        // SAFETY: this owns the event, and the stream exists until the lane is dropped; both are of
        // this driver: asserted above.
        unsafe { self.driver.event_record(self.handle, lane.stream) }
    }

    /// Returns `true` if the marked work is complete. Does not block.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn is_complete(&self) -> Result<bool, DriverError> {
        // SAFETY: this owns the event.
        unsafe { self.driver.event_query(self.handle) }
    }

    /// Waits until the marked work is complete.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn wait(&self) -> Result<(), DriverError> {
        // SAFETY: this owns the event.
        unsafe { self.driver.event_synchronize(self.handle) }
    }
}

impl Drop for DriverEvent {
    /// Destroys the event without waiting. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.birth.is_here() {
            // SAFETY: this owns the event, and nothing can be called with it any more.
            let _ = unsafe { self.driver.event_destroy(self.handle) };
        }
    }
}
