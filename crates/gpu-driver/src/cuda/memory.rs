//! The memory of a device, with the selected backend, and what the backends have in common.
//!
//! A call that the backend does not support is a typed error.
//!
//! Invariant: a failed call changes nothing, except for failed rollbacks, which are counted.
#![expect(unsafe_code, reason = "calling a C function with an array")]

use std::collections::BTreeMap;

use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};

use super::calls::Calls;
use super::context::DeviceContext;
use super::table::{
    ATTACH_GLOBAL, Access, AllocationProperties, GRANULARITY_MINIMUM, POOL_THRESHOLD,
    PoolProperties,
};
use crate::error::DriverResult;
use crate::{Backend, DeviceAddress, DriverError};

/// Memory of one device, in whole units.
pub(super) struct BackendMemory {
    pub(super) source: BackendSource,
    /// The unit of addresses and sizes, and the size of the smallest handle; a power of two.
    pub(super) unit: ByteSize,
    /// The number of failed rollback calls: memory or addresses are lost until the process ends.
    stuck: AtomicU64,
    /// `true` if the driver has returned a segment at an unaligned address.
    pub(super) is_odd: AtomicBool,
    /// For each segment that begins inside its allocation: the start of the allocation.
    pub(super) began: Mutex<BTreeMap<u64, u64>>,
}

/// The source of memory.
pub(super) enum BackendSource {
    /// Address space with mapped memory.
    Virtual(Mapping),
    /// Segments of a pool.
    Pool(MemoryPool),
    /// Segments that are plain or managed allocations.
    Plain { is_managed: bool },
}

impl BackendMemory {
    pub(super) fn new(source: BackendSource, unit: ByteSize) -> Self {
        let (is_odd, began) = (AtomicBool::new(false), Mutex::default());
        Self { source, unit, stuck: AtomicU64::new(0), is_odd, began }
    }

    pub(super) const fn backend(&self) -> Backend {
        match self.source {
            BackendSource::Virtual(_) => Backend::CudaVirtualMemory,
            BackendSource::Pool(_) => Backend::CudaPool,
            BackendSource::Plain { .. } => Backend::CudaPlain,
        }
    }

    pub(super) const fn is_virtual(&self) -> bool {
        matches!(self.source, BackendSource::Virtual(_))
    }

    pub(super) const fn can_remap(&self) -> bool {
        matches!(&self.source, BackendSource::Virtual(mapping) if mapping.can_remap)
    }

    pub(super) fn stuck(&self) -> u64 {
        self.stuck.load(Ordering::Relaxed)
    }

    /// Closes the backend, of which no memory is left.
    pub(super) fn close(&self, context: &DeviceContext) -> DriverResult {
        let BackendSource::Pool(pool) = &self.source else { return Ok(()) };
        context.call(|calls| pool.close(calls, context.stream))
    }

    /// Counts a failed rollback call.
    pub(super) fn back(&self, calls: &Calls, outcome: DriverResult) {
        if let Err(error) = outcome {
            self.stuck.fetch_add(1, Ordering::Relaxed);
            calls.note_not_undone(error);
        }
    }

    /// Returns the bytes of a range of whole units that does not exceed the last address.
    pub(super) fn whole(&self, at: DeviceAddress, size: ByteSize) -> DriverResult<usize> {
        let is_whole = !size.is_zero()
            && at.is_multiple_of(self.unit)
            && size.get().is_multiple_of(self.unit.get())
            && at.checked_add(size).is_some();
        let bytes = size.as_usize().filter(|_| is_whole);
        bytes.ok_or(DriverError::Misaligned { at, size, granularity: self.unit })
    }
}

// The second and third backends: memory in segments, from a pool or from plain allocations.
//
// A segment begins at a multiple of the unit. If the driver returns an unaligned address, every
// later allocation is one unit larger, and the segment begins at the first aligned address in it.
// Only the start of such allocations is recorded.
//
// A private pool counts its own memory, is isolated from other users, and may have a limit. The
// device's default pool is shared: a trim also releases memory that other code freed, and its
// threshold is restored on close unless other code has changed it meanwhile.
//
// Invariant: after `close` the threshold of the default pool is that from before `of_device`, or
// the one that other code has set.

/// The default unit of segment sizes: the size that drivers of data-centre devices map at once. A
/// smaller segment would hold no less memory, and a larger one would leave more unused.
pub(super) const UNIT: ByteSize = ByteSize::mib(2);

/// The smallest unit of segment sizes: the unit of the host memory that contents are offloaded to.
pub(super) const UNIT_MIN: ByteSize = crate::HOST_GRANULARITY;

/// The threshold at which the pool releases no freed memory before a trim.
pub(super) const KEEP_ALL: u64 = u64::MAX;

/// A pool that caches all freed memory.
#[derive(Clone, Copy, Debug)]
pub(super) struct MemoryPool {
    pub(super) number: usize,
    /// The previous threshold of the device's default pool; `None` for a private pool.
    threshold: Option<u64>,
}

impl MemoryPool {
    /// Creates a private pool with this limit. Without a limit, or if the driver does not support
    /// one (before CUDA 12.2), the pool may take all memory of the device.
    pub(super) fn create(
        calls: &Calls,
        device: i32,
        limit: Option<ByteSize>,
    ) -> DriverResult<Self> {
        let limit = limit.and_then(ByteSize::as_usize).unwrap_or(0);
        let number = calls.pool_create(&PoolProperties::on(device, limit))?;
        if let Err(error) = calls.set_pool_bytes(number, POOL_THRESHOLD, KEEP_ALL) {
            let _ = calls.pool_destroy(number);
            return Err(error);
        }
        Ok(Self { number, threshold: None })
    }

    /// Returns the device's default pool.
    pub(super) fn of_device(calls: &Calls, device: i32) -> DriverResult<Self> {
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
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> DriverResult {
        calls.stream_synchronize(stream)?;
        calls.pool_trim_to(self.number, 0)
    }

    /// Destroys a private pool, or restores the threshold of the device's default pool.
    pub(super) fn close(&self, calls: &Calls, stream: usize) -> DriverResult {
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

impl BackendMemory {
    /// Allocates a segment on a private stream, and waits for the allocation.
    pub(super) fn create(
        &self,
        calls: &Calls,
        size: ByteSize,
        stream: usize,
    ) -> DriverResult<DeviceAddress> {
        self.has_segments()?;
        let at = self.place(calls, size, stream);
        at.map_err(|error| error.sized(size)).map(DeviceAddress::new)
    }

    fn place(&self, calls: &Calls, size: ByteSize, stream: usize) -> DriverResult<u64> {
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
    ) -> DriverResult {
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

    fn has_segments(&self) -> DriverResult {
        match self.source {
            BackendSource::Virtual(_) => Err(DriverError::Unsupported { what: crate::SEGMENTS }),
            _ => Ok(()),
        }
    }

    /// Releases the memory that a pool caches to the device.
    pub(super) fn trim(&self, calls: &Calls, stream: usize) -> DriverResult {
        let BackendSource::Pool(pool) = &self.source else { return Ok(()) };
        pool.trim(calls, stream)
    }

    fn take(&self, calls: &Calls, bytes: usize, stream: usize) -> DriverResult<u64> {
        let pool = match &self.source {
            BackendSource::Pool(pool) => pool,
            BackendSource::Plain { is_managed: true } => {
                return calls.managed_alloc(bytes, ATTACH_GLOBAL);
            }
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
    fn release(&self, calls: &Calls, at: u64, stream: usize) -> DriverResult {
        match &self.source {
            BackendSource::Pool(_) => calls.pool_free(at, stream),
            _ => calls.plain_free(at),
        }
    }
}

// The first backend: address space reserved once, with memory mapped to parts of it.
//
// Memory is allocated in handles. A handle cannot be unmapped in part, so the caller says how a
// range is divided into handles, and names whole handles when the range leaves. The granularity
// that an arena sees is the smallest handle. A handle is released as soon as it is mapped, so that
// an unmap frees its memory; a remap retains it again by its address. The arena, not this module,
// tracks the mappings. Addresses and handles are numbers that the driver looks up: a wrong one is
// an error, and touches no memory of this process. Each handle is unmapped by a call of its own:
// the manual does not say that one call may unmap several.
//
// Invariant: a failed call leaves the ranges unchanged, except for failed rollbacks, which are
// counted.

/// The shape of mapped memory.
pub(super) struct Mapping {
    properties: AllocationProperties,
    /// The device, then its peers.
    access: Vec<Access>,
    /// `true` if the handle of an address can be queried.
    can_remap: bool,
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
    pub(super) fn granularity(&self, calls: &Calls) -> DriverResult<ByteSize> {
        calls.granularity(&self.properties, GRANULARITY_MINIMUM).map(ByteSize::of)
    }

    /// Lets the device and its peers read and write a range of whole mappings.
    fn set_access(&self, calls: &Calls, range: HandleRange) -> DriverResult {
        let access = &self.access;
        // SAFETY: it reads as many structures of that shape as the last argument says.
        unsafe { calls.set_access(range.at, range.bytes, access.as_ptr(), access.len()) }
    }

    /// Creates memory for one bare handle's range.
    fn create_at(
        &self,
        memory: &BackendMemory,
        calls: &Calls,
        (at, bytes): (u64, usize),
    ) -> DriverResult {
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
    fn unmap(self, calls: &Calls, unmapped: &mut usize) -> DriverResult {
        self.handles().try_for_each(|(at, bytes)| {
            calls.unmap(at, bytes)?;
            *unmapped += bytes;
            Ok(())
        })
    }
}

impl BackendMemory {
    pub(super) fn reserve(&self, calls: &Calls, size: ByteSize) -> DriverResult<DeviceAddress> {
        self.mapping()?;
        let bytes = self.whole(DeviceAddress::new(0), size)?;
        let at = calls.reserve(bytes, self.unit.as_usize().unwrap_or(0), 0, 0);
        at.map(DeviceAddress::new).map_err(|error| error.sized(size))
    }

    pub(super) fn unreserve(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
    ) -> DriverResult {
        self.mapping()?;
        calls.unreserve(at.get(), self.whole(at, size)?)
    }

    pub(super) fn commit(
        &self,
        calls: &Calls,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> DriverResult {
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
    ) -> DriverResult {
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
    ) -> DriverResult {
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

    fn mapping(&self) -> DriverResult<&Mapping> {
        match &self.source {
            BackendSource::Virtual(mapping) => Ok(mapping),
            _ => Err(DriverError::Unsupported { what: crate::VIRTUAL_MEMORY }),
        }
    }

    /// Returns a range of whole handles.
    fn handles(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> DriverResult<HandleRange> {
        let bytes = self.whole(at, size)?;
        let is_whole = !handle.is_zero() && handle.get().is_multiple_of(self.unit.get());
        let handle = handle.as_usize().filter(|_| is_whole);
        let handle = handle.ok_or(DriverError::Misaligned { at, size, granularity: self.unit })?;
        Ok(HandleRange { at: at.get(), bytes, handle })
    }
}
