//! A CUDA device as a [`Driver`]: its memory backend, streams, events, host stores and copies.
//!
//! Each call makes the device's primary context current, makes the calls of CUDA, and restores the
//! previous context. Copies that are waited for use a private stream of the driver. Nothing uses
//! the null stream, which would synchronize with the work of other streams, unless the caller names
//! it: [`StreamHandle::LEGACY`] takes part in the order of events, and in copies.
//!
//! Invariant: no call is made before `cuInit` has succeeded, nor in a forked child.
#![expect(unsafe_code, reason = "the calls of the trait that take memory away are unsafe")]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::OnceLock;

use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::atomic::{AtomicBool, Ordering};
use lowtide_core::sync::{Mutex, lock};

use super::calls::Calls;
use super::context::DeviceContext;
use super::memory::{BackendMemory, BackendSource};
use super::open::CudaDevice;
use super::table::{ATTRIBUTE_HOST_NODE, INVALID_VALUE, STREAM_LEGACY, STREAM_NON_BLOCKING};
use crate::error::DriverResult;
use crate::host::{HostDriver, host_length};
use crate::staging::Staging;
use crate::{
    Backend, Capabilities, DeviceAddress, DeviceMemory, DeviceUuid, Driver, DriverError,
    EventHandle, HostMemory, HostStore, StreamHandle, TouchedMemory,
};

/// An open CUDA device.
///
/// ```no_run
/// use lowtide_gpu_driver::Driver as _;
/// use lowtide_gpu_driver::cuda::{CudaDriver, CudaOptions};
///
/// let driver = CudaDriver::open(CudaOptions::default())?; // before any call of cudarc
/// println!("{:?} by {}", driver.device(), driver.backend());
/// # Ok::<(), lowtide_gpu_driver::DriverError>(())
/// ```
pub struct CudaDriver {
    pub(super) context: DeviceContext,
    pub(super) device: CudaDevice,
    pub(super) memory: BackendMemory,
    pub(super) skipped: Vec<(Backend, DriverError)>,
    pub(super) stores: Stores,
    pub(super) driver_version: u32,
}

impl CudaDriver {
    /// Returns the device.
    #[must_use]
    pub const fn device(&self) -> &CudaDevice {
        &self.device
    }

    /// Returns the newest CUDA version that the driver supports: 1000 x major + 10 x minor.
    #[must_use]
    pub const fn driver_version(&self) -> u32 {
        self.driver_version
    }

    /// Returns the backends that were tried and did not work, with their causes, in the order of
    /// preference. Empty if a backend was requested explicitly.
    #[must_use]
    pub fn skipped(&self) -> &[(Backend, DriverError)] {
        &self.skipped
    }

    /// Returns `true` if the memory is managed
    /// ([`CudaOptions::managed`](super::CudaOptions::managed)).
    #[must_use]
    pub fn is_managed(&self) -> bool {
        matches!(self.memory.source, BackendSource::Plain { is_managed: true })
    }

    /// Returns `true` if the memory comes from the device's default pool, because the device
    /// refused a private pool.
    ///
    /// No limit applies to the default pool, and [`Driver::trim`] also releases memory that other
    /// users of the pool freed. While the driver is open, that pool keeps all memory that is freed.
    #[must_use]
    pub fn shares_pool(&self) -> bool {
        matches!(&self.memory.source, BackendSource::Pool(pool) if pool.is_shared())
    }

    /// Returns the number of CUDA calls made through this driver.
    #[must_use]
    pub fn calls_made(&self) -> u64 {
        self.context.calls().made()
    }

    pub(super) fn call<T>(&self, act: impl FnOnce(&Calls) -> DriverResult<T>) -> DriverResult<T> {
        self.context.call(act)
    }
}

impl Drop for CudaDriver {
    /// Closes the device. Does nothing in a forked child.
    fn drop(&mut self) {
        let _ = self.memory.close(&self.context);
    }
}

// SAFETY: the promises are those of the CUDA driver (cuda.h), for addresses and handles that it
// returned: `calls` names them at each call. `number` refuses the null stream, which
// `ordered` lets the caller name, and `apart` parts that overlap.
unsafe impl Driver for CudaDriver {
    fn backend(&self) -> Backend {
        self.memory.backend()
    }

    fn capabilities(&self) -> Capabilities {
        let is_virtual = self.memory.is_virtual();
        Capabilities {
            virtual_memory: is_virtual,
            unified: self.device.integrated,
            remap: self.memory.can_remap(),
            asynchronous: true,
            page_locked: true,
            handles: is_virtual,
            granularity: self.memory.unit,
            ..Capabilities::default()
        }
    }

    fn context(&self) -> Option<u64> {
        Some(self.context.number())
    }

    fn ordinal(&self) -> Option<u32> {
        Some(self.device.ordinal)
    }

    fn uuid(&self) -> Option<DeviceUuid> {
        Some(self.device.uuid)
    }

    fn reserve(&self, size: ByteSize) -> DriverResult<DeviceAddress> {
        self.call(|calls| self.memory.reserve(calls, size))
    }

    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> DriverResult {
        self.call(|calls| self.memory.unreserve(calls, at, size))
    }

    unsafe fn commit(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> DriverResult {
        self.call(|calls| self.memory.commit(calls, at, size, handle))
    }

    unsafe fn decommit(&self, at: DeviceAddress, size: ByteSize, handle: ByteSize) -> DriverResult {
        self.call(|calls| self.memory.decommit(calls, at, size, handle))
    }

    unsafe fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> DriverResult {
        self.call(|calls| self.memory.remap(calls, (from, to), size, handle))
    }

    fn segment_create(&self, size: ByteSize) -> DriverResult<DeviceAddress> {
        self.call(|calls| self.memory.create(calls, size, self.context.stream))
    }

    unsafe fn segment_destroy(&self, at: DeviceAddress, size: ByteSize) -> DriverResult {
        self.call(|calls| self.memory.destroy(calls, (at, size), self.context.stream))
    }

    fn trim(&self) -> DriverResult {
        let BackendSource::Pool(pool) = &self.memory.source else { return Ok(()) };
        self.call(|calls| pool.trim(calls, self.context.stream))
    }

    unsafe fn copy(&self, from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> DriverResult {
        let bytes = apart(from, to, size)?;
        self.call(|calls| {
            let copied = calls.copy_on_device(to.get(), from.get(), bytes, self.context.stream);
            copied.map_err(|error| error.sized(size))?;
            calls.stream_synchronize(self.context.stream)
        })
    }

    fn device_memory(&self) -> DriverResult<Option<DeviceMemory>> {
        self.call(Calls::memory_info).map(|(free, total)| Some(DeviceMemory { total, free }))
    }

    fn context_overhead(&self) -> Option<ByteSize> {
        self.context.overhead
    }

    fn rollback_failures_total(&self) -> u64 {
        self.memory.stuck()
    }

    fn foreign_memory(
        &self,
        at: DeviceAddress,
        size: ByteSize,
    ) -> DriverResult<Option<&'static str>> {
        let last = at.get().saturating_add(size.get().saturating_sub(1));
        let found = self.call(|calls| Ok((calls.owner_of(at.get())?, calls.owner_of(last)?)));
        let (first, last) = match found {
            Ok(found) => found,
            Err(DriverError::Unsupported { .. }) => return Ok(None),
            Err(error) if error.code() == Some(INVALID_VALUE) => {
                return Ok(Some("memory that CUDA does not know, or that ends early"));
            }
            Err(error) => return Err(error),
        };
        let ordinal = i32::try_from(self.device.ordinal).unwrap_or(-1);
        // Mapped and pooled memory belongs to a device, but to no single context.
        let is_ours = |context: usize| context == 0 || context as u64 == self.context.number();
        let ends = [first, last];
        // Page-locked memory has a device as well: that of the context which locked it.
        if ends.iter().any(|of| of.is_host) {
            return Ok(Some("host memory"));
        }
        if ends.iter().any(|of| of.ordinal != ordinal) {
            return Ok(Some("memory of another device"));
        }
        Ok(ends.iter().any(|of| !is_ours(of.context)).then_some("memory of another context"))
    }

    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> DriverResult<NonNull<u8>> {
        if memory == HostMemory::Pageable {
            return HostDriver::new().host_alloc(size, memory);
        }
        host_length(DeviceAddress::new(0), size)?;
        self.call(|calls| calls.host_memory(size))
    }

    unsafe fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
    ) -> DriverResult {
        if memory == HostMemory::Pageable {
            // SAFETY: `host_alloc` had it of the host driver; otherwise the contract of this call.
            return unsafe { HostDriver::new().host_free(at, size, memory) };
        }
        // SAFETY: memory of `host_alloc` that nothing uses any more (contract of this call).
        self.call(|calls| unsafe { calls.host_free(at.as_ptr()) })
    }

    fn stream_create(&self) -> DriverResult<StreamHandle> {
        self.call(|calls| calls.create_stream(STREAM_NON_BLOCKING))
            .map(|stream| StreamHandle::new(stream as u64))
    }

    unsafe fn stream_destroy(&self, stream: StreamHandle) -> DriverResult {
        let stream = number(stream.get())?;
        self.call(|calls| calls.stream_destroy(stream))
    }

    unsafe fn stream_wait_event(&self, stream: StreamHandle, event: EventHandle) -> DriverResult {
        let (stream, event) = (ordered(stream)?, number(event.get())?);
        self.call(|calls| calls.wait_event(stream, event, 0))
    }

    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> DriverResult {
        let stream = ordered(stream)?;
        self.call(|calls| calls.stream_synchronize(stream))
    }

    unsafe fn is_capturing(&self, stream: StreamHandle) -> DriverResult<bool> {
        let stream = ordered(stream)?;
        self.call(|calls| calls.stream_is_capturing(stream))
    }

    fn event_create(&self) -> DriverResult<EventHandle> {
        self.call(Calls::event_create).map(|event| EventHandle::new(event as u64))
    }

    unsafe fn event_destroy(&self, event: EventHandle) -> DriverResult {
        let event = number(event.get())?;
        self.call(|calls| calls.event_destroy(event))
    }

    unsafe fn event_record(&self, event: EventHandle, stream: StreamHandle) -> DriverResult {
        let (event, stream) = (number(event.get())?, ordered(stream)?);
        self.call(|calls| calls.event_record(event, stream))
    }

    unsafe fn event_query(&self, event: EventHandle) -> DriverResult<bool> {
        let event = number(event.get())?;
        self.call(|calls| calls.event_query(event))
    }

    unsafe fn event_synchronize(&self, event: EventHandle) -> DriverResult {
        let event = number(event.get())?;
        self.call(|calls| calls.event_synchronize(event))
    }

    fn synchronize(&self) -> DriverResult {
        self.call(Calls::context_synchronize)
    }

    unsafe fn copy_async(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> DriverResult {
        let (bytes, stream) = (apart(from, to, size)?, ordered(stream)?);
        self.call(|calls| calls.copy_on_device(to.get(), from.get(), bytes, stream))
            .map_err(|error| error.sized(size))
    }

    fn host_store_create(&self, size: ByteSize) -> DriverResult<HostStore> {
        self.stores.create(self, size)
    }

    unsafe fn host_store_destroy(&self, store: HostStore) -> DriverResult {
        // SAFETY: the contract of this call.
        unsafe { self.stores.destroy(self, store) }
    }

    unsafe fn offload(
        &self,
        from: DeviceAddress,
        into: HostStore,
        stream: StreamHandle,
    ) -> DriverResult {
        let part = self.stores.find(into)?;
        if part.is_locked {
            // SAFETY: the contract of this call.
            return unsafe { self.copy_to_host(from, part.start, into.size, stream) };
        }
        // SAFETY: the part lies in a store (checked by `find`), and every byte is initialised, by
        // the kernel at least. The store stays, and nothing else accesses the part, until the copy
        // is complete (contract of this call).
        let store = unsafe { std::slice::from_raw_parts_mut(part.start.as_ptr(), part.length) };
        let put = &mut |offset, bytes: &[u8]| {
            store[index(offset)..][..bytes.len()].copy_from_slice(bytes);
        };
        // SAFETY: the contract of this call.
        unsafe { self.stores.staging.offload(self, (from, into.size), stream, put) }
    }

    unsafe fn restore(
        &self,
        from: HostStore,
        to: DeviceAddress,
        stream: StreamHandle,
    ) -> DriverResult {
        let part = self.stores.find(from)?;
        if part.is_locked {
            // SAFETY: the contract of this call.
            return unsafe { self.copy_from_host(part.start, to, from.size, stream) };
        }
        // SAFETY: as for `offload`; the store stays, and nothing writes to the part, until the copy
        // is complete (contract of this call); another copy may read it.
        let store = unsafe { std::slice::from_raw_parts(part.start.as_ptr(), part.length) };
        let get = &mut |offset, bytes: &mut [u8]| {
            bytes.copy_from_slice(&store[index(offset)..][..bytes.len()]);
        };
        // SAFETY: the contract of this call.
        unsafe { self.stores.staging.restore(self, (to, from.size), stream, get) }
    }

    unsafe fn copy_from_host(
        &self,
        from: NonNull<u8>,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> DriverResult {
        let stream = ordered(stream)?;
        // SAFETY: the contract of this call.
        self.call(|calls| unsafe { calls.write_device(from, to.get(), size, stream) })
    }

    unsafe fn copy_to_host(
        &self,
        from: DeviceAddress,
        to: NonNull<u8>,
        size: ByteSize,
        stream: StreamHandle,
    ) -> DriverResult {
        let stream = ordered(stream)?;
        // SAFETY: the contract of this call.
        self.call(|calls| unsafe { calls.read_device(from.get(), to, size, stream) })
    }
}

lowtide_core::debug_as!(CudaDriver, |it|
    device: it.device, backend: it.backend(), managed: it.is_managed(),
    shares_pool: it.shares_pool(), skipped: it.skipped, granularity: it.memory.unit,
    calls_made: it.calls_made());

/// Returns the number of a stream or an event. The null stream and its aliases are rejected.
fn number(handle: u64) -> DriverResult<usize> {
    let number = usize::try_from(handle).ok().filter(|&handle| handle > 2);
    number.ok_or(DriverError::Unsupported { what: "the null stream, or an invalid handle" })
}

/// Returns the number of a stream for events and copies. The legacy default stream is accepted.
fn ordered(stream: StreamHandle) -> DriverResult<usize> {
    if stream == StreamHandle::LEGACY { Ok(STREAM_LEGACY) } else { number(stream.get()) }
}

/// Returns the number of bytes to copy if the two parts do not overlap.
fn apart(from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> DriverResult<usize> {
    let overlap = from.get().abs_diff(to.get()) < size.get();
    let bytes = size.as_usize().filter(|_| !overlap);
    bytes.ok_or(DriverError::Overlap { from, to, size })
}

// Host memory for offloading, named by number so that a slice of it exists only while a copy is
// made.
//
// A store is mapped, touched by several threads on the device's NUMA node, and then registered:
// that takes a third of the time of `cuMemHostAlloc`, and nothing fills it with zeros again. A
// store that the driver refuses to page-lock stays pageable, and copies go through a small ring
// ([`Staging`]).
//
// Invariant: an address names one store from its creation until it is freed; a store is unmapped
// after it was unregistered.

/// The stores of a driver.
#[derive(Debug, Default)]
pub(super) struct Stores {
    /// The node of the host that is closest to the device, if known; queried for the first store.
    node: OnceLock<Option<u32>>,
    /// By their addresses.
    table: Mutex<BTreeMap<u64, HostStoreMemory>>,
    pub(super) staging: Staging,
    has_logged_pageable: AtomicBool,
}

#[derive(Debug)]
struct HostStoreMemory {
    memory: TouchedMemory,
    is_locked: bool,
}

/// The memory of a part of a store, which stays until the copy with it is complete.
pub(super) struct StorePart {
    start: NonNull<u8>,
    length: usize,
    is_locked: bool,
}

impl Stores {
    pub(super) fn create(&self, driver: &CudaDriver, size: ByteSize) -> DriverResult<HostStore> {
        host_length(DeviceAddress::new(0), size)?; // before any call
        let node = *self.node.get_or_init(|| driver.call(|calls| node_of(calls, driver)).ok());
        let memory = TouchedMemory::map(size, node, TouchedMemory::threads(size))?;
        let is_locked = match self.lock_pages(driver, &memory) {
            Ok(is_locked) => is_locked,
            Err(error) => {
                // SAFETY: it was not registered, and is not handed out.
                let _ = unsafe { memory.unmap() };
                return Err(error);
            }
        };
        let at = memory.start().addr() as u64;
        lock(&self.table).insert(at, HostStoreMemory { memory, is_locked });
        Ok(HostStore { at, size })
    }

    /// Page-locks memory, or counts it as a store that needs a ring. Returns `true` if it is
    /// page-locked.
    fn lock_pages(&self, driver: &CudaDriver, memory: &TouchedMemory) -> DriverResult<bool> {
        let error = match driver.call(|calls| calls.register(memory)) {
            Ok(()) => return Ok(true),
            Err(error) if error.is_context_lost() => return Err(error),
            Err(error) => error,
        };
        self.staging.add_store(driver);
        if !self.has_logged_pageable.swap(true, Ordering::Relaxed) {
            log!(warn, %error, "cannot page-lock host memory, copies are slower");
        }
        Ok(false)
    }

    /// Frees a store; the store stays if the driver refuses.
    ///
    /// # Safety
    /// Every copy from and to the store is complete, and no other call with it is in progress.
    pub(super) unsafe fn destroy(&self, driver: &CudaDriver, store: HostStore) -> DriverResult {
        // Removed from the table first: the call may block as long as other work of the device
        // takes.
        let HostStore { at, .. } = store;
        let mut store = lock(&self.table).remove(&at).ok_or_else(unknown)?;
        // SAFETY: the contract of this function.
        let outcome = unsafe { self.free(driver, &mut store) };
        if outcome.is_err() {
            lock(&self.table).insert(at, store);
        }
        outcome
    }

    /// # Safety
    /// As for [`Stores::destroy`].
    unsafe fn free(&self, driver: &CudaDriver, store: &mut HostStoreMemory) -> DriverResult {
        if store.is_locked {
            // SAFETY: registered by `lock_pages`; no copy uses it (contract of this function).
            driver.call(|calls| unsafe { calls.host_unregister(store.memory.start()) })?;
        } else {
            // SAFETY: the contract of this function.
            unsafe { self.staging.remove_store(driver) }?;
        }
        // The system refuses that only if it has too many mappings; then the memory leaks.
        // SAFETY: no copy uses it, and it is not registered.
        let _ = unsafe { store.memory.unmap() };
        Ok(())
    }

    /// Returns the memory of a store, or of a part of one.
    pub(super) fn find(&self, part: HostStore) -> DriverResult<StorePart> {
        let table = lock(&self.table);
        let (first, store) = table.range(..=part.at).next_back().ok_or_else(unknown)?;
        let (offset, length) = (index(part.at - first), index(part.size.get()));
        let fits = offset.checked_add(length).is_some_and(|end| end <= store.memory.bytes());
        let start = NonNull::new(store.memory.start().wrapping_add(offset)).filter(|_| fits);
        let start = start.ok_or_else(unknown)?;
        Ok(StorePart { start, length, is_locked: store.is_locked })
    }
}

/// Returns an offset in a store as an index.
fn index(offset: u64) -> usize {
    usize::try_from(offset).unwrap_or(usize::MAX)
}

/// Returns the number of the node that is closest to the device.
fn node_of(calls: &Calls, driver: &CudaDriver) -> DriverResult<u32> {
    let device = calls.device(driver.device.ordinal)?;
    let node = calls.device_attribute(ATTRIBUTE_HOST_NODE, device)?;
    u32::try_from(node).map_err(|_| DriverError::Unsupported { what: "NUMA nodes" })
}

fn unknown() -> DriverError {
    DriverError::Unsupported { what: "host stores of another driver, or parts outside a store" }
}
