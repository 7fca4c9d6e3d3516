//! Streams and events of a driver, as values whose handles are good.
//!
//! A driver does not check handles. The owner of a [`DriverEvent`] owns an event that exists; a
//! [`LiveStream`] proves that its stream exists while the value lives. Only the constructor of
//! [`LiveStream`] needs a proof. The calls then are safe, because their one precondition is that
//! the handles are valid. The pinned pool and lanes use these types. This module makes no
//! decisions.
//!
//! Invariant: each call gets handles of objects that exist and belong to the called driver.
#![expect(unsafe_code, reason = "drivers do not check handles")]

use std::fmt;
use std::ptr;
use std::sync::Arc;

use crate::driver::{Driver, DriverError, EventHandle, StreamHandle};
use lowtide_core::fork::Birth;

/// An event of a driver. Destroyed when this value is dropped.
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

    /// Marks the work that the stream has now, with this event.
    ///
    /// # Errors
    /// The driver's; the marked work is unspecified then.
    pub(crate) fn record(&self, stream: LiveStream<'_>) -> Result<(), DriverError> {
        self.assert_of(stream);
        // SAFETY: this owns the event, and the stream exists while `stream` lives; both are of this
        // driver: asserted above.
        unsafe { self.driver.event_record(self.handle, stream.handle) }
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

    fn assert_of(&self, stream: LiveStream<'_>) {
        let is_ours = ptr::addr_eq(Arc::as_ptr(&self.driver), stream.driver);
        assert!(is_ours, "an event and a stream of two drivers");
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

impl fmt::Debug for DriverEvent {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Event").field("handle", &self.handle).finish_non_exhaustive()
    }
}

/// A stream that exists as long as this value.
#[derive(Clone, Copy)]
pub(crate) struct LiveStream<'a> {
    driver: &'a dyn Driver,
    handle: StreamHandle,
}

impl<'a> LiveStream<'a> {
    /// # Safety
    /// The stream belongs to the driver or to its context, and is not destroyed during `'a`.
    pub(crate) const unsafe fn new(driver: &'a dyn Driver, handle: StreamHandle) -> Self {
        Self { driver, handle }
    }

    /// Returns `true` if the stream captures a graph.
    ///
    /// # Errors
    /// The driver's.
    pub(crate) fn is_capturing(self) -> Result<bool, DriverError> {
        // SAFETY: the stream exists while this lives.
        unsafe { self.driver.is_capturing(self.handle) }
    }

    /// Waits until all work of the stream is complete.
    ///
    /// # Errors
    /// The driver's: the work may still be in progress.
    pub(crate) fn synchronize(self) -> Result<(), DriverError> {
        // SAFETY: the stream exists while this lives.
        unsafe { self.driver.stream_synchronize(self.handle) }
    }
}
