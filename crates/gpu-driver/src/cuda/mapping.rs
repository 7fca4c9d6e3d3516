//! The calls of CUDA's virtual memory, one function each: address space, memory and mappings.
//!
//! The rules of [`Calls`](super::calls::Calls) apply. Addresses and handles are numbers that the
//! driver looks up: a wrong one is an error. The calls that unmap are `unsafe` in the driver: their
//! caller proves that nothing on the device uses the memory. Otherwise the device would report an
//! illegal address, and no memory of this process would be touched.
//!
//! Invariant: none of its own; each call is the driver's.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use super::abi::{Access, AllocationProperties, GRANULARITY_MINIMUM};
use super::calls::{Answer, Calls};
use super::table::{Retain, Virtual};
use lowtide_core::bytes::ByteSize;

/// The calls of virtual memory, on one device.
pub(super) struct Mapping {
    calls: Virtual,
    retain: Option<Retain>,
    properties: AllocationProperties,
    /// The device, then its peers.
    access: Vec<Access>,
}

impl Mapping {
    /// Creates the calls for memory of the first of these devices, which all of them access.
    pub(super) fn new(
        calls: Virtual,
        retain: Option<Retain>,
        (devices, rdma): (&[i32], bool),
    ) -> Self {
        let access = devices.iter().map(|&device| Access::by(device)).collect();
        let device = devices.first().copied().unwrap_or_default();
        Self { calls, retain, properties: AllocationProperties::on(device, rdma), access }
    }

    /// Returns `true` if the handle of an address can be queried.
    pub(super) const fn can_retain(&self) -> bool {
        self.retain.is_some()
    }

    /// Returns the smallest unit of memory that can be mapped.
    pub(super) fn granularity(&self, count: &Calls) -> Answer<ByteSize> {
        let (mut unit, of) = (0, &raw const self.properties);
        // SAFETY: it reads one structure of that shape and writes one size.
        let code = unsafe { (self.calls.granularity)(&raw mut unit, of, GRANULARITY_MINIMUM) };
        count.done("cuMemGetAllocationGranularity", code, ByteSize::ZERO)?;
        Ok(ByteSize::of(unit))
    }

    /// Reserves address space that begins at a multiple of `align`.
    pub(super) fn reserve(&self, count: &Calls, bytes: usize, align: usize) -> Answer<u64> {
        let mut at = 0;
        // SAFETY: it writes one address; no wish for one, no flags.
        let code = unsafe { (self.calls.reserve)(&raw mut at, bytes, align, 0, 0) };
        count.done("cuMemAddressReserve", code, ByteSize::of(bytes))?;
        Ok(at)
    }

    pub(super) fn unreserve(&self, count: &Calls, at: u64, bytes: usize) -> Answer {
        // SAFETY: numbers only, as the head says.
        let code = unsafe { (self.calls.unreserve)(at, bytes) };
        count.done("cuMemAddressFree", code, ByteSize::ZERO)
    }

    /// Allocates memory of the device without an address. Returns its handle.
    pub(super) fn create(&self, count: &Calls, bytes: usize) -> Answer<u64> {
        let (mut handle, of) = (0, &raw const self.properties);
        // SAFETY: it reads one structure of that shape and writes one handle.
        let code = unsafe { (self.calls.create)(&raw mut handle, bytes, of, 0) };
        count.done("cuMemCreate", code, ByteSize::of(bytes))?;
        Ok(handle)
    }

    /// Releases a handle. The memory is freed with its last mapping.
    pub(super) fn release(&self, count: &Calls, handle: u64) -> Answer {
        // SAFETY: numbers only, as the head says.
        let code = unsafe { (self.calls.release)(handle) };
        count.done("cuMemRelease", code, ByteSize::ZERO)
    }

    /// Maps a whole handle to a bare range of its size; access is not enabled yet.
    pub(super) fn map(&self, count: &Calls, at: u64, bytes: usize, handle: u64) -> Answer {
        // SAFETY: numbers only, as the head says; the offset "must be zero".
        let code = unsafe { (self.calls.map)(at, bytes, 0, handle, 0) };
        count.done("cuMemMap", code, ByteSize::of(bytes))
    }

    /// Unmaps a range of whole mappings.
    pub(super) fn unmap(&self, count: &Calls, at: u64, bytes: usize) -> Answer {
        // SAFETY: numbers only, as the head says.
        let code = unsafe { (self.calls.unmap)(at, bytes) };
        count.done("cuMemUnmap", code, ByteSize::of(bytes))
    }

    /// Lets the device and its peers read and write a range of whole mappings.
    pub(super) fn set_access(&self, count: &Calls, at: u64, bytes: usize) -> Answer {
        let access = &self.access;
        // SAFETY: it reads as many structures of that shape as the last argument says.
        let code = unsafe { (self.calls.set_access)(at, bytes, access.as_ptr(), access.len()) };
        count.done("cuMemSetAccess", code, ByteSize::of(bytes))
    }

    /// Returns the handle of the mapping at an address, which must be released once more.
    pub(super) fn handle_of(&self, count: &Calls, at: u64) -> Answer<u64> {
        let (mut handle, call) = (0, "cuMemRetainAllocationHandle");
        let Some(retain) = self.retain else {
            return Err(crate::DriverError::Unsupported { what: call });
        };
        // SAFETY: it writes one handle; the address is looked up and not followed.
        let code = unsafe { (retain.handle_of)(&raw mut handle, at) };
        count.done(call, code, ByteSize::ZERO)?;
        Ok(handle)
    }
}
