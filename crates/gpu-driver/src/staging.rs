//! Copies between device memory and pageable host memory, through rings of page-locked buffers.
//!
//! A driver uses this for stores that it cannot page-lock: the device would copy such memory
//! slowly, through a buffer of the driver library. A ring has a few small buffers, each
//! with an event. Before a buffer is used again, the host waits for the event of its last copy; in
//! the meantime it moves the bytes of the other buffers. If not even a buffer can be page-locked,
//! a ring has one pageable buffer, with which every copy is synchronous.
//!
//! The driver's functions read and write the host memory, one call for each part. The first store
//! creates a ring, and so does each concurrent copy. Freeing the last store frees all rings,
//! because every copy is then complete.
//!
//! Invariants: a buffer is read or written by the host only after its last copy is complete; a ring
//! is used by one copy at a time, and a ring whose copies may still be in progress by none.
#![expect(unsafe_code, reason = "buffers are accessed by their address, and copies are queued")]

use std::collections::VecDeque;
use std::ptr::NonNull;

use super::error::DriverResult;
use super::{DeviceAddress, Driver, DriverError, EventHandle, HostMemory, StreamHandle};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::{Mutex, lock};

/// The size of a buffer. A copy of it takes ten times as long as its calls; four of them are within
/// the usual limit of locked memory, 8 MiB.
pub const BUFFER_SIZE: ByteSize = ByteSize::mib(2);

/// The number of buffers of a ring.
pub const BUFFERS: usize = 4;

/// The maximum number of rings that are kept only because the end of their copies is not known.
const STUCK_MAX: usize = 4;

/// The rings of a driver.
#[derive(Debug, Default)]
pub struct Staging {
    state: Mutex<StagingState>,
}

#[derive(Debug, Default)]
struct StagingState {
    /// The number of stores that need rings.
    stores: u64,
    idle: Vec<Ring>,
    /// Rings that a copy may still use.
    stuck: Vec<Ring>,
}

/// A few buffers for one copy at a time.
#[derive(Debug, Default)]
struct Ring {
    buffers: Vec<StagingBuffer>,
}

#[derive(Debug)]
struct StagingBuffer {
    start: NonNull<u8>,
    memory: HostMemory,
    event: EventHandle,
    /// `true` if a copy was queued since the event was last waited for.
    is_queued: bool,
}

// SAFETY: a buffer is an address and plain values; the ring that owns it accesses the memory, and
// one copy at a time has the ring.
unsafe impl Send for StagingBuffer {}

impl Staging {
    /// Counts a store that needs rings, and makes a ring for the first one. If the driver has no
    /// memory for it, the first copy tries again.
    pub fn add_store(&self, driver: &dyn Driver) {
        let is_first = {
            let mut state = lock(&self.state);
            state.stores += 1;
            state.stores == 1
        };
        if is_first && let Ok(ring) = Ring::open(driver) {
            lock(&self.state).idle.push(ring);
        }
    }

    /// Counts a store as gone, and frees the rings with the last one.
    ///
    /// # Safety
    /// Every copy of the store is complete.
    ///
    /// # Errors
    /// The driver's, if it does not free a buffer. The store still counts then.
    pub unsafe fn remove_store(&self, driver: &dyn Driver) -> Result<(), DriverError> {
        // Each turn but the last frees the rings of a store that came and went during the one
        // before.
        loop {
            let rings = {
                let mut state = lock(&self.state);
                if state.stores > 1 || (state.idle.is_empty() && state.stuck.is_empty()) {
                    state.stores = state.stores.saturating_sub(1);
                    return Ok(());
                }
                let mut rings = std::mem::take(&mut state.idle);
                rings.append(&mut state.stuck);
                rings
            };
            let mut outcome = Ok(());
            let mut left = Vec::new();
            for mut ring in rings {
                // SAFETY: this is the last store, and every copy of every store is complete.
                if let Err(error) = unsafe { ring.close(driver) } {
                    outcome = Err(error);
                    left.push(ring);
                }
            }
            lock(&self.state).idle.append(&mut left);
            outcome?;
        }
    }

    /// Copies device memory to pageable memory, in order with the work of the stream, and waits for
    /// the copy. `put` gets the parts with their offsets, in order.
    ///
    /// # Safety
    /// As for [`Driver::offload`], until this returns; after an error, until the stream has been
    /// waited for.
    ///
    /// # Errors
    /// Any [`DriverError`]; some parts may be copied then.
    pub unsafe fn offload(
        &self,
        driver: &dyn Driver,
        (from, size): (DeviceAddress, ByteSize),
        stream: StreamHandle,
        put: &mut dyn FnMut(u64, &[u8]),
    ) -> Result<(), DriverError> {
        self.with_ring(driver, stream, |ring| {
            let count = ring.buffers.len();
            let mut queued = VecDeque::with_capacity(count);
            let mut take = |ring: &mut Ring, (nth, offset, size): (usize, ByteSize, ByteSize)| {
                let buffer = &mut ring.buffers[nth % count];
                buffer.wait(driver)?;
                put(offset.get(), buffer.bytes(size));
                Ok(())
            };
            for (nth, (offset, size)) in parts(size).enumerate() {
                if queued.len() == count
                    && let Some(first) = queued.pop_front()
                {
                    take(ring, first)?;
                }
                let buffer = &mut ring.buffers[nth % count];
                buffer.wait(driver)?; // for an earlier copy to a device
                // SAFETY: the buffer has room and no copy in progress; the rest is the contract of
                // this function.
                unsafe { driver.copy_to_host(at(from, offset), buffer.start, size, stream) }?;
                // SAFETY: the buffer's own event, and the stream of the copy.
                unsafe { buffer.mark(driver, stream) }?;
                queued.push_back((nth, offset, size));
            }
            queued.into_iter().try_for_each(|part| take(ring, part))
        })
    }

    /// Copies pageable memory to device memory, in order with the work of the stream. `get` fills
    /// the parts, with their offsets, in order. When this returns, the memory was read; the copy is
    /// complete when the stream has been waited for.
    ///
    /// # Safety
    /// As for [`Driver::restore`].
    ///
    /// # Errors
    /// Any [`DriverError`]; some parts may be copied then.
    pub unsafe fn restore(
        &self,
        driver: &dyn Driver,
        (to, size): (DeviceAddress, ByteSize),
        stream: StreamHandle,
        get: &mut dyn FnMut(u64, &mut [u8]),
    ) -> Result<(), DriverError> {
        self.with_ring(driver, stream, |ring| {
            let count = ring.buffers.len();
            for (nth, (offset, size)) in parts(size).enumerate() {
                let buffer = &mut ring.buffers[nth % count];
                buffer.wait(driver)?;
                get(offset.get(), buffer.bytes(size));
                // SAFETY: the part of the buffer is filled and not written to before the event was
                // waited for; the rest is the contract of this function.
                unsafe { driver.copy_from_host(buffer.start, at(to, offset), size, stream) }?;
                // SAFETY: the buffer's own event, and the stream of the copy.
                unsafe { buffer.mark(driver, stream) }?;
            }
            Ok(())
        })
    }

    /// Calls a function with a ring that no other copy uses. No lock is held meanwhile.
    fn with_ring(
        &self,
        driver: &dyn Driver,
        stream: StreamHandle,
        act: impl FnOnce(&mut Ring) -> DriverResult,
    ) -> DriverResult {
        let idle = {
            let mut state = lock(&self.state);
            if state.stuck.len() >= STUCK_MAX {
                let call = "cuMemHostAlloc";
                return Err(DriverError::OutOfMemory { call, requested: BUFFER_SIZE });
            }
            state.idle.pop()
        };
        let mut ring = idle.map_or_else(|| Ring::open(driver), Ok)?;
        let outcome = act(&mut ring);
        // SAFETY: the stream is the one of the copy, whose caller vouches for it.
        let is_stuck = outcome.is_err() && unsafe { driver.stream_synchronize(stream) }.is_err();
        let mut state = lock(&self.state);
        if is_stuck {
            state.stuck.push(ring);
        } else {
            state.idle.push(ring);
        }
        outcome
    }
}

/// Returns the parts of a copy, with their offsets.
fn parts(size: ByteSize) -> impl Iterator<Item = (ByteSize, ByteSize)> {
    let parts = size.get().div_ceil(BUFFER_SIZE.get());
    (0..parts).map(move |nth| {
        let offset = ByteSize::new(nth * BUFFER_SIZE.get());
        (offset, size.saturating_sub(offset).min(BUFFER_SIZE))
    })
}

/// Returns an address in the device memory of a copy.
fn at(start: DeviceAddress, offset: ByteSize) -> DeviceAddress {
    DeviceAddress::new(start.get().saturating_add(offset.get()))
}

impl Ring {
    /// Allocates page-locked buffers, as many as possible, or else one pageable buffer.
    fn open(driver: &dyn Driver) -> DriverResult<Self> {
        let mut ring = Self::default();
        while ring.buffers.len() < BUFFERS {
            match StagingBuffer::open(driver, HostMemory::PageLocked) {
                Ok(buffer) => ring.buffers.push(buffer),
                Err(_) if !ring.buffers.is_empty() => break,
                Err(error) if error.is_context_lost() => return Err(error),
                Err(_) => {
                    // More of these would not copy faster.
                    ring.buffers.push(StagingBuffer::open(driver, HostMemory::Pageable)?);
                    break;
                }
            }
        }
        Ok(ring)
    }

    /// Frees the buffers. Those that the driver does not free stay.
    ///
    /// # Safety
    /// Every copy of the ring is complete.
    unsafe fn close(&mut self, driver: &dyn Driver) -> DriverResult {
        while let Some(buffer) = self.buffers.last() {
            // SAFETY: a buffer of the driver; its copies are complete, and no slice of it exists.
            unsafe { driver.host_free(buffer.start, BUFFER_SIZE, buffer.memory) }?;
            // SAFETY: an event of the driver that nothing else uses. An error destroys it as well.
            let _ = unsafe { driver.event_destroy(buffer.event) };
            self.buffers.pop();
        }
        Ok(())
    }
}

impl StagingBuffer {
    fn open(driver: &dyn Driver, memory: HostMemory) -> DriverResult<Self> {
        let event = driver.event_create()?;
        match driver.host_alloc(BUFFER_SIZE, memory) {
            Ok(start) => Ok(Self { start, memory, event, is_queued: false }),
            Err(error) => {
                // SAFETY: an event of the driver that was never used.
                let _ = unsafe { driver.event_destroy(event) };
                Err(error)
            }
        }
    }

    /// Waits for the last copy, if there is one.
    fn wait(&mut self, driver: &dyn Driver) -> DriverResult {
        if self.is_queued {
            // SAFETY: the buffer's own event.
            unsafe { driver.event_synchronize(self.event) }?;
            self.is_queued = false;
        }
        Ok(())
    }

    /// Records that a copy was queued.
    ///
    /// # Safety
    /// As for [`Driver::event_record`].
    unsafe fn mark(&mut self, driver: &dyn Driver, stream: StreamHandle) -> DriverResult {
        self.is_queued = true;
        // SAFETY: the contract of this function.
        unsafe { driver.event_record(self.event, stream) }
    }

    /// Returns the first bytes. No copy is in progress: [`StagingBuffer::wait`] came before.
    fn bytes(&mut self, size: ByteSize) -> &mut [u8] {
        debug_assert!(!self.is_queued && size <= BUFFER_SIZE);
        let length = size.min(BUFFER_SIZE).as_usize().unwrap_or(0);
        // SAFETY: the driver allocated `BUFFER_SIZE` initialised bytes there for this buffer alone,
        // and no copy uses them.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), length) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_copy_is_made_in_parts_of_a_buffer_at_most() {
        let of = |size: u64| -> Vec<_> {
            parts(ByteSize::new(size)).map(|(offset, size)| (offset.get(), size.get())).collect()
        };
        let buffer = BUFFER_SIZE.get();
        assert_eq!(of(0), []);
        assert_eq!(of(1), [(0, 1)]);
        assert_eq!(of(buffer), [(0, buffer)]);
        assert_eq!(of(2 * buffer + 7), [(0, buffer), (buffer, buffer), (2 * buffer, 7)]);
    }
}
