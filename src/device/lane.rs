//! A lane: one stream of the device on one arena.
//!
//! What a lane frees it may take again at once, because its work is done in order. Another lane
//! gets it after an event that its stream waits for, or when the work is complete. A lane knows the
//! stream by its handle, and neither makes nor destroys it.
//!
//! Invariant: while a lane or a buffer of it is there, the arena knows its stream.
#![expect(unsafe_code, reason = "only the caller knows that a stream is there")]

use std::fmt;
use std::sync::Arc;

use bytemuck::Pod;

use super::arena::DeviceArena;
use super::buffer::Buffer;
use super::driver::StreamHandle;
use super::error::DeviceError;
use super::lease::Lease;
use super::region::Region;
use super::shared::Shared;
use super::streams::StreamKey;

/// One stream on one arena: a cheap handle, the same lane for every clone.
///
/// On a driver whose work is complete when its call returns there is nothing to order, and a lane
/// is the arena by another name.
#[derive(Clone)]
pub struct Lane {
    arena: DeviceArena,
    known: Arc<Known>,
}

/// The arena's knowledge of a stream, for as long as somebody may use it.
pub(super) struct Known {
    shared: Arc<Shared>,
    stream: StreamHandle,
    /// None where nothing is to be ordered.
    key: Option<StreamKey>,
}

impl Known {
    pub(super) const fn key(&self) -> Option<StreamKey> {
        self.key
    }
}

impl DeviceArena {
    /// The lane of a stream.
    ///
    /// # Safety
    /// The stream is one of the arena's driver, and goes on existing until the lane, its clones and
    /// its buffers are dropped: a CUDA driver does not look whether a stream that it is given is
    /// there. The host driver has no streams and the simulation looks, so that there any number
    /// will do.
    ///
    /// # Errors
    /// [`DeviceError::Closed`], [`DeviceError::Forked`].
    pub unsafe fn lane(&self, stream: StreamHandle) -> Result<Lane, DeviceError> {
        self.lane_of(stream)
    }

    /// The same, where somebody else vouches for the stream.
    pub(super) fn lane_of(&self, stream: StreamHandle) -> Result<Lane, DeviceError> {
        let shared = self.shared();
        shared.check_open()?;
        let key = shared.capabilities.asynchronous.then(|| shared.books().streams.enter(stream));
        let known = Known { shared: Arc::clone(shared), stream, key };
        Ok(Lane { arena: self.clone(), known: Arc::new(known) })
    }
}

impl Lane {
    /// The arena that it is of.
    #[must_use]
    pub const fn arena(&self) -> &DeviceArena {
        &self.arena
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> StreamHandle {
        self.known.stream
    }

    /// Room for `len` elements that this lane's stream may use from its next work on, with
    /// unspecified contents. Freed by the drop of the buffer, when its last use is in the stream.
    ///
    /// Where only memory is left that other streams may still work on, the stream is made to wait
    /// for them: no thread waits. Memory that nobody gave up is committed last.
    ///
    /// While a stream captures a graph, nothing is waited for that could spoil it: memory for which
    /// that would be needed is passed over for memory that is committed, within the limit.
    ///
    /// # Errors
    /// As [`DeviceArena::alloc`].
    pub fn alloc<T: Pod>(&self, len: usize, region: Region) -> Result<Buffer<T>, DeviceError> {
        match self.known.key {
            Some(_) => self.arena.alloc_on(&self.known, len, region),
            None => self.arena.alloc(len, region),
        }
    }

    /// The right to use the arena's memory; as [`DeviceArena::enter`].
    ///
    /// # Errors
    /// As [`DeviceArena::enter`].
    pub fn enter(&self) -> Result<Lease, DeviceError> {
        self.arena.enter()
    }

    /// Lets other lanes have what this one has freed until now, as soon as the stream is done with
    /// it: at the end of a run. Records one event, where any is wanted, and waits for nothing.
    ///
    /// # Errors
    /// [`DeviceError::Driver`], with code 900 while the stream captures a graph;
    /// [`DeviceError::Forked`].
    pub fn end_run(&self) -> Result<(), DeviceError> {
        self.known.shared.check_here()?;
        let Some(key) = self.known.key else { return Ok(()) };
        Ok(self.known.shared.mark_end(key)?)
    }

    pub(super) const fn known(&self) -> &Arc<Known> {
        &self.known
    }
}

impl Drop for Known {
    /// The arena forgets the stream, after an event for what it still has to do: one call of the
    /// driver that waits for nothing. Where that fails, all work of the device is waited for by who
    /// needs that memory. A call that another thread makes with the handle ends first, which waits
    /// for nothing either: whoever dropped this may destroy the stream. In a forked child does
    /// nothing.
    fn drop(&mut self) {
        let Some(key) = self.key else { return };
        if self.shared.check_here().is_err() {
            return;
        }
        let last = self.shared.books().streams.leave(key);
        if last {
            let _ = self.shared.mark_end(key);
            self.shared.end_stream(key);
        }
    }
}

impl fmt::Debug for Lane {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Lane")
            .field("arena", &self.arena.name())
            .field("stream", &self.known.stream)
            .finish_non_exhaustive()
    }
}

impl fmt::Debug for Known {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Known").field("stream", &self.stream).finish_non_exhaustive()
    }
}
