//! The allocation calls of pools, plain memory and managed memory, one function each.
//!
//! The rules of [`Calls`](super::calls::Calls) apply. Addresses and pools are numbers that the
//! driver looks up: a wrong one is an error. The calls that free are `unsafe` in the driver: their
//! caller proves that nothing on the device uses the memory.
//!
//! Invariant: none of its own; each call is the driver's.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use std::ffi::c_void;

use super::abi::{ATTACH_GLOBAL, PoolProperties};
use super::calls::{Answer, Calls};
use super::table::{CurrentPool, Graphs, Managed, Plain, Pools};
use lowtide_core::bytes::ByteSize;

/// The calls of pools, on one device.
#[derive(Clone, Copy)]
pub(super) struct Pooling {
    calls: Pools,
    device: i32,
}

impl Pooling {
    pub(super) const fn new(calls: Pools, device: i32) -> Self {
        Self { calls, device }
    }

    /// Creates a pool. A limit of 0 bytes means none.
    pub(super) fn create(&self, count: &Calls, limit: usize) -> Answer<usize> {
        let (mut pool, of) = (0, PoolProperties::on(self.device, limit));
        // SAFETY: it reads one structure of that shape, and writes one pointer, into an integer of
        // its size.
        let code = unsafe { (self.calls.create)(&raw mut pool, &raw const of) };
        count.done("cuMemPoolCreate", code, ByteSize::ZERO)?;
        Ok(pool)
    }

    /// Destroys a pool. Its remaining allocations stay valid, and its memory is released with the
    /// last.
    pub(super) fn destroy(&self, count: &Calls, pool: usize) -> Answer {
        // SAFETY: a pool that `create` made and that is not destroyed yet; there are no further
        // allocations from it.
        let code = unsafe { (self.calls.destroy)(pool) };
        count.done("cuMemPoolDestroy", code, ByteSize::ZERO)
    }

    /// Returns the device's default pool.
    pub(super) fn of_device(&self, count: &Calls) -> Answer<usize> {
        let mut pool = 0;
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.calls.of_device)(&raw mut pool, self.device) };
        count.done("cuDeviceGetDefaultMemPool", code, ByteSize::ZERO)?;
        Ok(pool)
    }

    /// Releases free memory of a pool to the device, until at most `keep` bytes are left.
    pub(super) fn trim_to(&self, count: &Calls, pool: usize, keep: usize) -> Answer {
        // SAFETY: a live pool; the call releases only free memory.
        let code = unsafe { (self.calls.trim_to)(pool, keep) };
        count.done("cuMemPoolTrimTo", code, ByteSize::ZERO)
    }

    /// Returns a number of bytes of a pool: an attribute of type `cuuint64_t`.
    pub(super) fn bytes(&self, count: &Calls, pool: usize, attribute: i32) -> Answer<u64> {
        let mut value = 0_u64;
        let to = (&raw mut value).cast::<c_void>();
        // SAFETY: a pool that lives; it writes one number of 64 bits for those attributes.
        let code = unsafe { (self.calls.attribute)(pool, attribute, to) };
        count.done("cuMemPoolGetAttribute", code, ByteSize::ZERO)?;
        Ok(value)
    }

    /// Sets an attribute of type `cuuint64_t`.
    pub(super) fn set_bytes(
        &self,
        count: &Calls,
        pool: usize,
        (attribute, value): (i32, u64),
    ) -> Answer {
        let mut value = value;
        let from = (&raw mut value).cast::<c_void>();
        // SAFETY: as `bytes`; it reads one number.
        let code = unsafe { (self.calls.set_attribute)(pool, attribute, from) };
        count.done("cuMemPoolSetAttribute", code, ByteSize::ZERO)
    }

    /// Allocates memory of a pool, in stream order.
    pub(super) fn alloc(
        &self,
        count: &Calls,
        pool: usize,
        bytes: usize,
        stream: usize,
    ) -> Answer<u64> {
        let mut at = 0;
        // SAFETY: it writes one address; a pool and a stream that live.
        let code = unsafe { (self.calls.alloc)(&raw mut at, bytes, pool, stream) };
        count.done("cuMemAllocFromPoolAsync", code, ByteSize::of(bytes))?;
        Ok(at)
    }

    /// Frees memory into its pool, in stream order.
    pub(super) fn free(&self, count: &Calls, at: u64, stream: usize) -> Answer {
        // SAFETY: numbers only, as the head says; a stream that lives.
        let code = unsafe { (self.calls.free)(at, stream) };
        count.done("cuMemFreeAsync", code, ByteSize::ZERO)
    }
}

/// The calls of a device's current pool.
#[derive(Clone, Copy)]
pub(super) struct Current {
    calls: CurrentPool,
    device: i32,
}

impl Current {
    pub(super) const fn new(calls: CurrentPool, device: i32) -> Self {
        Self { calls, device }
    }

    /// Returns the pool for allocations that name no pool.
    pub(super) fn get(&self, count: &Calls) -> Answer<usize> {
        let mut pool = 0;
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.calls.get)(&raw mut pool, self.device) };
        count.done("cuDeviceGetMemPool", code, ByteSize::ZERO)?;
        Ok(pool)
    }

    /// Sets the pool for allocations that name no pool.
    pub(super) fn set(&self, count: &Calls, pool: usize) -> Answer {
        // SAFETY: a pool of the device; one that its maker destroyed meanwhile is an error.
        let code = unsafe { (self.calls.set)(self.device, pool) };
        count.done("cuDeviceSetMemPool", code, ByteSize::ZERO)
    }
}

/// The calls of the memory that a device caches for graphs.
#[derive(Clone, Copy)]
pub(super) struct Graphing {
    calls: Graphs,
    device: i32,
}

impl Graphing {
    pub(super) const fn new(calls: Graphs, device: i32) -> Self {
        Self { calls, device }
    }

    /// Returns a number of bytes: an attribute of type `cuuint64_t`.
    pub(super) fn bytes(&self, count: &Calls, attribute: i32) -> Answer<u64> {
        let mut value = 0_u64;
        let to = (&raw mut value).cast::<c_void>();
        // SAFETY: it writes one number of 64 bits for those attributes.
        let code = unsafe { (self.calls.attribute)(self.device, attribute, to) };
        count.done("cuDeviceGetGraphMemAttribute", code, ByteSize::ZERO)?;
        Ok(value)
    }

    /// Restarts the measurement of a peak.
    pub(super) fn restart(&self, count: &Calls, attribute: i32) -> Answer {
        let mut value = 0_u64;
        let from = (&raw mut value).cast::<c_void>();
        // SAFETY: it reads one number of 64 bits for those attributes.
        let code = unsafe { (self.calls.set_attribute)(self.device, attribute, from) };
        count.done("cuDeviceSetGraphMemAttribute", code, ByteSize::ZERO)
    }

    /// Releases the memory that no graph uses.
    pub(super) fn trim(&self, count: &Calls) -> Answer {
        // SAFETY: numbers only; the call releases only unused memory.
        let code = unsafe { (self.calls.trim)(self.device) };
        count.done("cuDeviceGraphMemTrim", code, ByteSize::ZERO)
    }
}

/// The calls of plain and, optionally, managed memory.
#[derive(Clone, Copy)]
pub(super) struct Pieces {
    calls: Plain,
    managed: Option<Managed>,
}

impl Pieces {
    pub(super) const fn new(calls: Plain, managed: Option<Managed>) -> Self {
        Self { calls, managed }
    }

    /// Returns `true` if the memory is managed.
    pub(super) const fn is_managed(&self) -> bool {
        self.managed.is_some()
    }

    /// Allocates memory, which exists when this returns.
    pub(super) fn alloc(&self, count: &Calls, bytes: usize) -> Answer<u64> {
        let mut at = 0;
        let (code, call) = match self.managed {
            // SAFETY: it writes one address.
            None => (unsafe { (self.calls.alloc)(&raw mut at, bytes) }, "cuMemAlloc"),
            Some(managed) => {
                // SAFETY: it writes one address; a flag that it knows.
                let code = unsafe { (managed.alloc)(&raw mut at, bytes, ATTACH_GLOBAL) };
                (code, "cuMemAllocManaged")
            }
        };
        count.done(call, code, ByteSize::of(bytes))?;
        Ok(at)
    }

    /// Frees memory; waits for all work of the device.
    pub(super) fn free(&self, count: &Calls, at: u64) -> Answer {
        // SAFETY: numbers only, as the head says.
        let code = unsafe { (self.calls.free)(at) };
        count.done("cuMemFree", code, ByteSize::ZERO)
    }
}
