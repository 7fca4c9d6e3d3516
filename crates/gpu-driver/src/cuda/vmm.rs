//! The first backend: address space reserved once, with memory mapped to parts of it.
//!
//! Memory is allocated in handles. A handle cannot be unmapped in part, so the caller says how a
//! range is divided into handles, and names whole handles when the range leaves. The granularity
//! that an arena sees is the smallest handle. A handle is released as soon as it is mapped, so that
//! an unmap frees its memory; a remap retains it again by its address. The arena, not this module,
//! tracks the mappings. Addresses and handles are numbers that the driver looks up: a wrong one is
//! an error, and touches no memory of this process. Each handle is unmapped by a call of its own: the manual does not say that
//! one call may unmap several.
//!
//! Invariant: a failed call leaves the ranges unchanged, except for failed rollbacks, which are
//! counted.
#![expect(unsafe_code, reason = "calling a C function with an array")]

use super::abi::{Access, AllocationProperties, GRANULARITY_MINIMUM};
use super::calls::{Answer, Calls};
use super::memory::{Memory, Source};
use crate::{DeviceAddress, DriverError};
use lowtide_core::bytes::ByteSize;

/// The shape of mapped memory.
pub(super) struct Mapping {
    properties: AllocationProperties,
    /// The device, then its peers.
    access: Vec<Access>,
    /// `true` if the handle of an address can be queried.
    pub(super) can_remap: bool,
}

impl Mapping {
    /// Describes memory of the first of these devices, which all of them access, and with `rdma`
    /// network cards too.
    pub(super) fn new(calls: &Calls, devices: &[i32], rdma: bool) -> Self {
        let device = devices.first().copied().unwrap_or_default();
        Self {
            properties: AllocationProperties::on(device, rdma),
            access: devices.iter().map(|&device| Access::by(device)).collect(),
            can_remap: calls.table.retain().is_ok(),
        }
    }

    /// Returns the smallest unit of memory that can be mapped.
    pub(super) fn granularity(&self, calls: &Calls) -> Answer<ByteSize> {
        calls.granularity(&self.properties, GRANULARITY_MINIMUM).map(ByteSize::of)
    }

    /// Lets the device and its peers read and write a range of whole mappings.
    fn set_access(&self, calls: &Calls, range: HandleRange) -> Answer {
        let access = &self.access;
        // SAFETY: it reads as many structures of that shape as the last argument says.
        unsafe { calls.set_access(range.at, range.bytes, access.as_ptr(), access.len()) }
    }

    /// Creates memory for one bare handle's range.
    fn create_at(&self, memory: &Memory, calls: &Calls, (at, bytes): (u64, usize)) -> Answer {
        let handle = calls.create(bytes, &self.properties, 0)?;
        let mapped = calls.map(at, bytes, 0, handle, 0);
        let released = calls.release(handle);
        match (mapped, released) {
            (Ok(()), Ok(())) => Ok(()),
            (Ok(()), Err(error)) => {
                memory.back(calls, calls.unmap(at, bytes));
                memory.back(calls, Err(error.clone())); // no owner could free the memory
                Err(error)
            }
            (Err(error), released) => {
                memory.back(calls, released);
                Err(error)
            }
        }
    }
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

    /// Unmaps each handle, and adds up the bytes that are unmapped.
    fn unmap(self, calls: &Calls, unmapped: &mut usize) -> Answer {
        self.handles().try_for_each(|(at, bytes)| {
            calls.unmap(at, bytes)?;
            *unmapped += bytes;
            Ok(())
        })
    }
}

impl Memory {
    pub(super) fn reserve(&self, calls: &Calls, size: ByteSize) -> Answer<DeviceAddress> {
        self.mapping()?;
        let bytes = self.whole(DeviceAddress::new(0), size)?;
        let at = calls.reserve(bytes, self.unit.as_usize().unwrap_or(0), 0, 0);
        at.map(DeviceAddress::new).map_err(|error| error.sized(size))
    }

    pub(super) fn unreserve(&self, calls: &Calls, at: DeviceAddress, size: ByteSize) -> Answer {
        self.mapping()?;
        calls.unreserve(at.get(), self.whole(at, size)?)
    }

    pub(super) fn commit(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        let mapping = self.mapping()?;
        let range = self.handles(at, size, handle)?;
        let mut mapped = 0;
        let mut outcome = range.handles().try_for_each(|(at, bytes)| {
            mapping.create_at(self, calls, (at, bytes))?;
            mapped += bytes;
            Ok(())
        });
        outcome = outcome.and_then(|()| mapping.set_access(calls, range));
        if outcome.is_err() {
            self.unmap_back(calls, range, mapped);
        }
        outcome.map_err(|error| error.sized(size))
    }

    /// Unmaps each handle. If one stays, memory is committed again for those before it.
    pub(super) fn decommit(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        self.mapping()?;
        let range = self.handles(at, size, handle)?;
        let mut left = 0;
        let outcome = range.unmap(calls, &mut left);
        if outcome.is_err() {
            self.commit_back(calls, at, left, handle);
        }
        outcome
    }

    pub(super) fn remap(
        &self,
        calls: &Calls,
        (from, to): (DeviceAddress, DeviceAddress),
        size: ByteSize,
        handle: ByteSize,
    ) -> Answer {
        let mapping = self.mapping()?;
        let (old, new) = (self.handles(from, size, handle)?, self.handles(to, size, handle)?);
        let (mut mapped, mut left) = (0, 0);
        let mut pairs = old.handles().zip(new.handles());
        let mut outcome = pairs.try_for_each(|((old, bytes), (new, _))| {
            let handle = calls.handle_of(old)?;
            let moved = calls.map(new, bytes, 0, handle, 0);
            self.back(calls, calls.release(handle));
            moved?;
            mapped += bytes;
            Ok(())
        });
        // The memory is at both places now, so the old ones can be mapped again.
        outcome = outcome.and_then(|()| mapping.set_access(calls, new));
        outcome = outcome.and_then(|()| old.unmap(calls, &mut left));
        if outcome.is_err() {
            self.unmap_back(calls, new, mapped);
            self.commit_back(calls, from, left, handle);
        }
        outcome.map_err(|error| error.sized(size))
    }

    /// Unmaps the handles in the first bytes of a range again.
    fn unmap_back(&self, calls: &Calls, range: HandleRange, bytes: usize) {
        for (at, bytes) in (HandleRange { bytes, ..range }).handles() {
            self.back(calls, calls.unmap(at, bytes));
        }
    }

    /// Commits the first bytes of a range again.
    fn commit_back(&self, calls: &Calls, at: DeviceAddress, bytes: usize, handle: ByteSize) {
        if bytes > 0 {
            self.back(calls, self.commit(calls, at, ByteSize::of(bytes), handle));
        }
    }

    fn mapping(&self) -> Answer<&Mapping> {
        match &self.source {
            Source::Virtual(mapping) => Ok(mapping),
            _ => Err(DriverError::Unsupported { what: "virtual memory" }),
        }
    }

    /// Returns a range of whole handles.
    fn handles(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> Answer<HandleRange> {
        let bytes = self.whole(at, size)?;
        let is_whole = !handle.is_zero() && handle.get().is_multiple_of(self.unit.get());
        let handle = handle.as_usize().filter(|_| is_whole);
        let handle = handle.ok_or(DriverError::Misaligned { at, size, granularity: self.unit })?;
        Ok(HandleRange { at: at.get(), bytes, handle })
    }
}
