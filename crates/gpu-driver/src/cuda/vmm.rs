//! The first backend: address space reserved once, with memory mapped to parts of it.
//!
//! Memory is allocated in handles of one size, which is the granularity that an arena sees, because
//! a handle cannot be unmapped in part. A handle is released as soon as it is mapped, so that an
//! unmap frees its memory; a remap retains it again by its address. The arena, not this module,
//! tracks the mappings.
//!
//! Invariant: a failed call leaves the ranges unchanged, except for failed rollbacks, which are
//! counted.

use super::calls::{Answer, Calls};
use super::mapping::Mapping;
use crate::{DeviceAddress, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};

/// Virtual memory of one device.
pub(super) struct VirtualMemory {
    mapping: Mapping,
    /// The size of a handle; a power of two.
    unit: ByteSize,
    /// The number of failed rollback calls: memory or addresses are lost until the process ends.
    stuck: AtomicU64,
}

/// A range of whole handles.
#[derive(Clone, Copy, Debug)]
struct HandleRange {
    at: u64,
    bytes: usize,
    unit: usize,
}

impl HandleRange {
    /// Returns the first part of the range, of this many bytes.
    const fn first(self, bytes: usize) -> Self {
        Self { bytes, ..self }
    }

    /// Returns the start addresses of its handles.
    fn handles(self) -> impl Iterator<Item = u64> {
        (0..self.bytes).step_by(self.unit).map(move |offset| self.at + offset as u64)
    }
}

impl VirtualMemory {
    pub(super) fn new(mapping: Mapping, unit: ByteSize) -> Self {
        Self { mapping, unit, stuck: AtomicU64::new(0) }
    }

    pub(super) const fn unit(&self) -> ByteSize {
        self.unit
    }

    pub(super) const fn can_remap(&self) -> bool {
        self.mapping.can_retain()
    }

    pub(super) fn stuck(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    pub(super) fn reserve(&self, calls: &Calls, size: ByteSize) -> Answer<DeviceAddress> {
        let range = self.whole(DeviceAddress::new(0), size)?;
        self.mapping.reserve(calls, range.bytes, range.unit).map(DeviceAddress::new)
    }

    pub(super) fn unreserve(&self, calls: &Calls, at: DeviceAddress, size: ByteSize) -> Answer {
        let range = self.whole(at, size)?;
        self.mapping.unreserve(calls, range.at, range.bytes)
    }

    pub(super) fn commit(&self, calls: &Calls, at: DeviceAddress, size: ByteSize) -> Answer {
        let range = self.whole(at, size)?;
        let mut mapped = 0;
        let mut outcome = Ok(());
        for at in range.handles() {
            outcome = self.create_at(calls, at, range.unit);
            if outcome.is_err() {
                break;
            }
            mapped += range.unit;
        }
        outcome = outcome.and_then(|()| self.mapping.set_access(calls, range.at, range.bytes));
        if outcome.is_err() && mapped > 0 {
            self.back(calls, self.mapping.unmap(calls, range.at, range.first(mapped).bytes));
        }
        outcome.map_err(|error| of_whole(error, size))
    }

    /// Creates memory for one bare handle's range.
    fn create_at(&self, calls: &Calls, at: u64, unit: usize) -> Answer {
        let handle = self.mapping.create(calls, unit)?;
        let mapped = self.mapping.map(calls, at, unit, handle);
        let released = self.mapping.release(calls, handle);
        match (mapped, released) {
            (Ok(()), Ok(())) => Ok(()),
            (Ok(()), Err(error)) => {
                self.back(calls, self.mapping.unmap(calls, at, unit));
                self.back(calls, Err(error.clone())); // no owner could free the memory
                Err(error)
            }
            (Err(error), released) => {
                self.back(calls, released);
                Err(error)
            }
        }
    }

    pub(super) fn decommit(&self, calls: &Calls, at: DeviceAddress, size: ByteSize) -> Answer {
        let range = self.whole(at, size)?;
        self.mapping.unmap(calls, range.at, range.bytes)
    }

    pub(super) fn remap(
        &self,
        calls: &Calls,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    ) -> Answer {
        let (from, to) = (self.whole(from, size)?, self.whole(to, size)?);
        let mut mapped = 0;
        let mut outcome = Ok(());
        for (old, new) in from.handles().zip(to.handles()) {
            let moved = self.mapping.handle_of(calls, old).and_then(|handle| {
                let mapped = self.mapping.map(calls, new, from.unit, handle);
                self.back(calls, self.mapping.release(calls, handle));
                mapped
            });
            outcome = moved;
            if outcome.is_err() {
                break;
            }
            mapped += from.unit;
        }
        outcome = outcome
            .and_then(|()| self.mapping.set_access(calls, to.at, to.bytes))
            .and_then(|()| self.mapping.unmap(calls, from.at, from.bytes));
        if outcome.is_err() && mapped > 0 {
            self.back(calls, self.mapping.unmap(calls, to.at, to.first(mapped).bytes));
        }
        outcome
    }

    /// Counts a failed rollback call.
    fn back(&self, calls: &Calls, outcome: Answer) {
        if let Err(error) = outcome {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            calls.note_not_undone(error);
        }
    }

    /// Returns a range of whole handles that does not exceed the last address.
    fn whole(&self, at: DeviceAddress, size: ByteSize) -> Answer<HandleRange> {
        let bytes = size.as_usize().filter(|_| {
            let ends = at.get().checked_add(size.get()).is_some();
            ends && !size.is_zero()
                && at.is_multiple_of(self.unit)
                && size.get().is_multiple_of(self.unit.get())
        });
        let misaligned = DriverError::Misaligned { at, size, granularity: self.unit };
        let unit = self.unit.as_usize();
        let (bytes, unit) = bytes.zip(unit).ok_or(misaligned)?;
        Ok(HandleRange { at: at.get(), bytes, unit })
    }
}

/// Returns the error of one handle for the whole requested range.
fn of_whole(error: DriverError, size: ByteSize) -> DriverError {
    match error {
        DriverError::OutOfMemory { call, .. } => DriverError::OutOfMemory { call, requested: size },
        other => other,
    }
}
