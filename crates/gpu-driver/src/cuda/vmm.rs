//! The first backend: address space reserved once, with memory mapped to parts of it.
//!
//! Memory is allocated in handles. A handle cannot be unmapped in part, so the caller says how a
//! range is divided into handles, and names whole handles when the range leaves. The granularity
//! that an arena sees is the smallest handle. A handle is released as soon as it is mapped, so that
//! an unmap frees its memory; a remap retains it again by its address. The arena, not this module,
//! tracks the mappings. Each handle is unmapped by a call of its own: the manual does not say that
//! one call may unmap several.
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
    /// The size of the smallest handle; a power of two.
    unit: ByteSize,
    /// The number of failed rollback calls: memory or addresses are lost until the process ends.
    stuck: AtomicU64,
}

/// A range of whole handles.
#[derive(Clone, Copy, Debug)]
struct HandleRange {
    at: u64,
    bytes: usize,
    /// The size of a handle. The last one may be smaller.
    handle: usize,
}

impl HandleRange {
    /// Returns the address and the size of each handle.
    fn handles(self) -> impl Iterator<Item = (u64, usize)> {
        let Self { at, bytes, handle } = self;
        (0..bytes)
            .step_by(handle)
            .map(move |offset| (at.saturating_add(offset as u64), handle.min(bytes - offset)))
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
        let range = self.whole(DeviceAddress::new(0), size, self.unit)?;
        self.mapping.reserve(calls, range.bytes, range.handle).map(DeviceAddress::new)
    }

    pub(super) fn unreserve(&self, calls: &Calls, at: DeviceAddress, size: ByteSize) -> Answer {
        let range = self.whole(at, size, self.unit)?;
        self.mapping.unreserve(calls, range.at, range.bytes)
    }

    pub(super) fn commit(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        let range = self.whole(at, size, handle)?;
        let mut mapped = 0;
        let mut outcome = Ok(());
        for (at, bytes) in range.handles() {
            outcome = self.create_at(calls, at, bytes);
            if outcome.is_err() {
                break;
            }
            mapped += bytes;
        }
        outcome = outcome.and_then(|()| self.mapping.set_access(calls, range.at, range.bytes));
        if outcome.is_err() {
            self.unmap_back(calls, range, mapped);
        }
        outcome.map_err(|error| of_whole(error, size))
    }

    /// Creates memory for one bare handle's range.
    fn create_at(&self, calls: &Calls, at: u64, bytes: usize) -> Answer {
        let handle = self.mapping.create(calls, bytes)?;
        let mapped = self.mapping.map(calls, at, bytes, handle);
        let released = self.mapping.release(calls, handle);
        match (mapped, released) {
            (Ok(()), Ok(())) => Ok(()),
            (Ok(()), Err(error)) => {
                self.back(calls, self.mapping.unmap(calls, at, bytes));
                self.back(calls, Err(error.clone())); // no owner could free the memory
                Err(error)
            }
            (Err(error), released) => {
                self.back(calls, released);
                Err(error)
            }
        }
    }

    /// Unmaps each handle. If one stays, memory is committed again for those before it.
    pub(super) fn decommit(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        let range = self.whole(at, size, handle)?;
        let mut left = 0;
        for (at, bytes) in range.handles() {
            if let Err(error) = self.mapping.unmap(calls, at, bytes) {
                if left > 0 {
                    let left = ByteSize::of(left);
                    self.back(
                        calls,
                        self.commit(calls, DeviceAddress::new(range.at), left, handle),
                    );
                }
                return Err(error);
            }
            left += bytes;
        }
        Ok(())
    }

    pub(super) fn remap(
        &self,
        calls: &Calls,
        (from, to): (DeviceAddress, DeviceAddress),
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        let (from, to) = (self.whole(from, size, handle)?, self.whole(to, size, handle)?);
        let mut mapped = 0;
        let mut outcome = Ok(());
        for ((old, bytes), (new, _)) in from.handles().zip(to.handles()) {
            let moved = self.mapping.handle_of(calls, old).and_then(|handle| {
                let mapped = self.mapping.map(calls, new, bytes, handle);
                self.back(calls, self.mapping.release(calls, handle));
                mapped
            });
            outcome = moved;
            if outcome.is_err() {
                break;
            }
            mapped += bytes;
        }
        // The memory is at both places now, so the old ones can be mapped again.
        let mut left = 0;
        outcome = outcome.and_then(|()| self.mapping.set_access(calls, to.at, to.bytes));
        outcome = outcome.and_then(|()| {
            from.handles().try_for_each(|(at, bytes)| {
                self.mapping.unmap(calls, at, bytes)?;
                left += bytes;
                Ok(())
            })
        });
        if outcome.is_err() {
            self.unmap_back(calls, to, mapped);
            if left > 0 {
                let (at, left) = (DeviceAddress::new(from.at), ByteSize::of(left));
                self.back(calls, self.commit(calls, at, left, handle));
            }
        }
        outcome
    }

    /// Unmaps the handles in the first bytes of a range again.
    fn unmap_back(&self, calls: &Calls, range: HandleRange, bytes: usize) {
        for (at, bytes) in (HandleRange { bytes, ..range }).handles() {
            self.back(calls, self.mapping.unmap(calls, at, bytes));
        }
    }

    /// Counts a failed rollback call.
    fn back(&self, calls: &Calls, outcome: Answer) {
        if let Err(error) = outcome {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            calls.note_not_undone(error);
        }
    }

    /// Returns a range of whole handles that does not exceed the last address.
    fn whole(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> Answer<HandleRange> {
        let is_whole =
            |bytes: ByteSize| !bytes.is_zero() && bytes.get().is_multiple_of(self.unit.get());
        let bytes = size.as_usize().filter(|_| {
            let ends = at.get().checked_add(size.get()).is_some();
            ends && at.is_multiple_of(self.unit) && is_whole(size)
        });
        let handle = handle.as_usize().filter(|_| is_whole(handle));
        let misaligned = DriverError::Misaligned { at, size, granularity: self.unit };
        let (bytes, handle) = bytes.zip(handle).ok_or(misaligned)?;
        Ok(HandleRange { at: at.get(), bytes, handle })
    }
}

/// Returns the error of one handle for the whole requested range.
fn of_whole(error: DriverError, size: ByteSize) -> DriverError {
    match error {
        DriverError::OutOfMemory { call, .. } => DriverError::OutOfMemory { call, requested: size },
        other => other,
    }
}
