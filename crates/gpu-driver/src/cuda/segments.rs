//! The second and third backends: memory in segments, from a pool or from plain allocations.
//!
//! A segment begins at a multiple of the unit. If the driver returns an unaligned address, every
//! later allocation is one unit larger, and the segment begins at the first aligned address in it.
//! Only the start of such allocations is recorded.
//!
//! Invariant: a failed call changes nothing, except for failed rollbacks, which are counted.

use std::collections::BTreeMap;

use super::calls::{Answer, Calls};
use super::pool::Pool;
use super::pooling::Pieces;
use crate::{DeviceAddress, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};

/// The default unit of segment sizes: the size that drivers of data-centre devices map at once. A
/// smaller segment would hold no less memory, and a larger one would leave more unused.
pub(super) const UNIT: ByteSize = ByteSize::mib(2);

/// The smallest unit of segment sizes: the unit of the host memory that contents are offloaded to.
pub(super) const UNIT_MIN: ByteSize = crate::HOST_GRANULARITY;

/// The source of segments.
#[derive(Clone, Copy)]
pub(super) enum Source {
    Pool(Pool),
    Plain(Pieces),
}

/// Segments of one device.
pub(super) struct Segments {
    source: Source,
    /// The unit of addresses and sizes; a power of two.
    unit: ByteSize,
    /// `true` if the driver has returned an unaligned address.
    is_odd: AtomicBool,
    /// For each segment that begins inside its allocation: the start of the allocation.
    began: Mutex<BTreeMap<u64, u64>>,
    stuck: AtomicU64,
}

impl Segments {
    pub(super) fn new(source: Source, unit: ByteSize) -> Self {
        let (is_odd, began) = (AtomicBool::new(false), Mutex::default());
        Self { source, unit, is_odd, began, stuck: AtomicU64::new(0) }
    }

    pub(super) const fn unit(&self) -> ByteSize {
        self.unit
    }

    pub(super) const fn source(&self) -> &Source {
        &self.source
    }

    pub(super) fn stuck(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Allocates a segment on a private stream, and waits for the allocation.
    pub(super) fn create(
        &self,
        calls: &Calls,
        size: ByteSize,
        stream: usize,
    ) -> Answer<DeviceAddress> {
        let at = self.place(calls, size, stream);
        at.map_err(|error| of_segment(error, size)).map(DeviceAddress::new)
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
            self.back(calls, self.give(calls, at, stream));
        }
        let more = size.checked_add(self.unit).and_then(ByteSize::as_usize);
        let none = DriverError::OutOfMemory { call: "a segment", requested: size };
        let start = self.take(calls, more.ok_or_else(|| none.clone())?, stream)?;
        let Some(at) = start.checked_next_multiple_of(unit) else {
            self.back(calls, self.give(calls, start, stream));
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
        self.whole(at, size)?;
        // Removed from the table first: the address may be reused before the call returns.
        let began = lock(&self.began).remove(&at.get());
        let given = self.give(calls, began.unwrap_or_else(|| at.get()), stream);
        if let (Err(_), Some(began)) = (&given, began) {
            lock(&self.began).insert(at.get(), began);
        }
        given
    }

    /// Releases the memory that the pool caches to the device.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> Answer {
        match &self.source {
            Source::Pool(pool) => pool.trim(calls, stream),
            Source::Plain(_) => Ok(()),
        }
    }

    /// Closes the source, of which no segment is left.
    pub(super) fn close(&self, calls: &Calls, stream: usize) -> Answer {
        match &self.source {
            Source::Pool(pool) => pool.close(calls, stream),
            Source::Plain(_) => Ok(()),
        }
    }

    fn take(&self, calls: &Calls, bytes: usize, stream: usize) -> Answer<u64> {
        let pool = match &self.source {
            Source::Pool(pool) => pool,
            Source::Plain(pieces) => return pieces.alloc(calls, bytes),
        };
        let taken = pool.take(calls, bytes, stream)?;
        taken.waited.map(|()| taken.at).inspect_err(|_| {
            self.back(calls, pool.give(calls, taken.at, stream));
        })
    }

    fn give(&self, calls: &Calls, at: u64, stream: usize) -> Answer {
        match &self.source {
            Source::Pool(pool) => pool.give(calls, at, stream),
            Source::Plain(pieces) => pieces.free(calls, at),
        }
    }

    /// Counts a failed rollback call.
    fn back(&self, calls: &Calls, outcome: Answer) {
        if let Err(error) = outcome {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            calls.note_not_undone(error);
        }
    }

    /// Returns the bytes of a range of whole units.
    fn whole(&self, at: DeviceAddress, size: ByteSize) -> Answer<usize> {
        let is_whole = !size.is_zero()
            && at.is_multiple_of(self.unit)
            && size.get().is_multiple_of(self.unit.get());
        let bytes = size.as_usize().filter(|_| is_whole);
        bytes.ok_or(DriverError::Misaligned { at, size, granularity: self.unit })
    }
}

/// Returns the error of a call with the requested size of the segment.
fn of_segment(error: DriverError, size: ByteSize) -> DriverError {
    match error {
        DriverError::OutOfMemory { call, .. } => DriverError::OutOfMemory { call, requested: size },
        other => other,
    }
}
