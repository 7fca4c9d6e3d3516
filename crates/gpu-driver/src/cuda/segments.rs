//! The second and third backends: memory in segments, from a pool or from plain allocations.
//!
//! A segment begins at a multiple of the unit. If the driver returns an unaligned address, every
//! later allocation is one unit larger, and the segment begins at the first aligned address in it.
//! Only the start of such allocations is recorded.
//!
//! A private pool counts its own memory, is isolated from other users, and may have a limit. The
//! device's default pool is shared: a trim also releases memory that other code freed, and its
//! threshold is restored on close unless other code has changed it meanwhile.
//!
//! Invariant: after `close` the threshold of the default pool is that from before `of_device`, or
//! the one that other code has set.

use super::abi::{ATTACH_GLOBAL, POOL_THRESHOLD, PoolProperties};
use super::calls::{Answer, Calls};
use super::memory::{Memory, Source};
use crate::{DeviceAddress, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::Ordering;
use lowtide_core::sync::lock;

/// The default unit of segment sizes: the size that drivers of data-centre devices map at once. A
/// smaller segment would hold no less memory, and a larger one would leave more unused.
pub(super) const UNIT: ByteSize = ByteSize::mib(2);

/// The smallest unit of segment sizes: the unit of the host memory that contents are offloaded to.
pub(super) const UNIT_MIN: ByteSize = crate::HOST_GRANULARITY;

/// The threshold at which the pool releases no freed memory before a trim.
pub(super) const KEEP_ALL: u64 = u64::MAX;

/// A pool that caches all freed memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct Pool {
    pub(super) number: usize,
    /// The previous threshold of the device's default pool; `None` for a private pool.
    threshold: Option<u64>,
}

impl Pool {
    /// Creates a private pool with this limit. Without a limit, or if the driver does not support
    /// one (before CUDA 12.2), the pool may take all memory of the device.
    pub(super) fn create(calls: &Calls, device: i32, limit: Option<ByteSize>) -> Answer<Self> {
        let limit = limit.and_then(ByteSize::as_usize).unwrap_or(0);
        let number = calls.pool_create(&PoolProperties::on(device, limit))?;
        if let Err(error) = calls.set_pool_bytes(number, POOL_THRESHOLD, KEEP_ALL) {
            let _ = calls.pool_destroy(number);
            return Err(error);
        }
        Ok(Self { number, threshold: None })
    }

    /// Returns the device's default pool.
    pub(super) fn of_device(calls: &Calls, device: i32) -> Answer<Self> {
        let number = calls.default_pool(device)?;
        let threshold = calls.pool_bytes(number, POOL_THRESHOLD)?;
        calls.set_pool_bytes(number, POOL_THRESHOLD, KEEP_ALL)?;
        Ok(Self { number, threshold: Some(threshold) })
    }

    /// Returns `true` for the device's default pool, which other code uses as well.
    pub(super) fn is_shared(&self) -> bool {
        self.threshold.is_some()
    }

    /// Releases free memory to the device. The pool releases only what the host has seen to be
    /// free, so this waits for the stream of the frees first.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> Answer {
        calls.stream_synchronize(stream)?;
        calls.pool_trim_to(self.number, 0)
    }

    /// Destroys a private pool, or restores the threshold of the device's default pool.
    pub(super) fn close(&self, calls: &Calls, stream: usize) -> Answer {
        let Some(threshold) = self.threshold else { return calls.pool_destroy(self.number) };
        if calls.pool_bytes(self.number, POOL_THRESHOLD)? != KEEP_ALL {
            return Ok(()); // other code has changed it
        }
        calls.set_pool_bytes(self.number, POOL_THRESHOLD, threshold)?;
        let Some(keep) = usize::try_from(threshold).ok().filter(|_| threshold != KEEP_ALL) else {
            return Ok(());
        };
        calls.stream_synchronize(stream)?;
        calls.pool_trim_to(self.number, keep)
    }
}

impl Memory {
    /// Allocates a segment on a private stream, and waits for the allocation.
    pub(super) fn create(
        &self,
        calls: &Calls,
        size: ByteSize,
        stream: usize,
    ) -> Answer<DeviceAddress> {
        self.has_segments()?;
        let at = self.place(calls, size, stream);
        at.map_err(|error| error.sized(size)).map(DeviceAddress::new)
    }

    fn place(&self, calls: &Calls, size: ByteSize, stream: usize) -> Answer<u64> {
        let bytes = self.whole(DeviceAddress::new(0), size)?;
        let unit = self.unit.get();
        if !self.is_odd.load(Ordering::Relaxed) {
            let at = self.take(calls, bytes, stream)?;
            if at.is_multiple_of(unit) {
                return Ok(at);
            }
            self.is_odd.store(true, Ordering::Relaxed);
            self.back(calls, self.release(calls, at, stream));
        }
        let more = size.checked_add(self.unit).and_then(ByteSize::as_usize);
        let none = DriverError::OutOfMemory { call: "a segment", requested: size };
        let start = self.take(calls, more.ok_or_else(|| none.clone())?, stream)?;
        let Some(at) = start.checked_next_multiple_of(unit) else {
            self.back(calls, self.release(calls, start, stream));
            return Err(none);
        };
        if at != start {
            lock(&self.began).insert(at, start);
        }
        Ok(at)
    }

    /// Releases a segment: to the pool, which caches it, or to the device. In the latter case the
    /// call waits until all work of the device is complete.
    pub(super) fn destroy(
        &self,
        calls: &Calls,
        (at, size): (DeviceAddress, ByteSize),
        stream: usize,
    ) -> Answer {
        self.has_segments()?;
        self.whole(at, size)?;
        // Removed from the table first: the address may be reused before the call returns.
        let began = lock(&self.began).remove(&at.get());
        let released = self.release(calls, began.unwrap_or_else(|| at.get()), stream);
        if let (Err(_), Some(began)) = (&released, began) {
            lock(&self.began).insert(at.get(), began);
        }
        released
    }

    fn has_segments(&self) -> Answer {
        match self.source {
            Source::Virtual(_) => Err(DriverError::Unsupported { what: crate::SEGMENTS }),
            _ => Ok(()),
        }
    }

    /// Releases the memory that a pool caches to the device.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> Answer {
        let Source::Pool(pool) = &self.source else { return Ok(()) };
        pool.trim(calls, stream)
    }

    fn take(&self, calls: &Calls, bytes: usize, stream: usize) -> Answer<u64> {
        let pool = match &self.source {
            Source::Pool(pool) => pool,
            Source::Plain { is_managed: true } => return calls.managed_alloc(bytes, ATTACH_GLOBAL),
            _ => return calls.plain_alloc(bytes),
        };
        let at = calls.pool_alloc(bytes, pool.number, stream)?;
        // The memory exists when the stream has come to the allocation.
        calls.stream_synchronize(stream).map(|()| at).inspect_err(|_| {
            self.back(calls, calls.pool_free(at, stream));
        })
    }

    /// Releases an allocation: into its pool, in stream order, or at once, with a wait for all work
    /// of the device.
    fn release(&self, calls: &Calls, at: u64, stream: usize) -> Answer {
        match &self.source {
            Source::Pool(_) => calls.pool_free(at, stream),
            _ => calls.plain_free(at),
        }
    }
}
