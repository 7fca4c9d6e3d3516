//! Drivers: the source of address space and of the physical memory mapped to it.
//!
//! A driver allocates and releases memory and implements no policy. It knows nothing of arenas,
//! blocks, limits or time, and its callers hold no lock of an arena. Every call is all or nothing:
//! after an error the range is unchanged.
//!
//! Invariant: `committed ranges <= reserved ranges`; a byte is accessible iff its granule is
//! committed.
#![cfg_attr(docsrs, feature(doc_cfg))]

#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod guarded;
pub mod host;
pub mod staging;
mod values;

use std::fmt;
use std::ptr::NonNull;

pub use lowtide_core::{ByteSize, clock, decay};

pub use error::DriverError;
pub use guarded::Guarded;
#[doc(hidden)]
pub use host::TouchedMemory;
pub use values::{
    Backend, Capabilities, DeviceAddress, DeviceMemory, DeviceUuid, EventHandle, HostMemory,
    HostStore, StreamHandle,
};

/// The unit of sizes for [`Driver::host_alloc`]. 64 KiB is the largest page size in use, so it is a
/// multiple of every page size.
pub const HOST_GRANULARITY: ByteSize = ByteSize::kib(64);

/// The alignment of addresses from [`Driver::host_alloc`]: the smallest page size in use.
pub const HOST_ALIGNMENT: ByteSize = ByteSize::kib(4);

/// A backend that allocates device memory.
///
/// Several threads may call a driver at once for ranges that do not overlap.
///
/// Every `at` and `size` is a multiple of [`Capabilities::granularity`], `size` is not zero, and
/// the range lies in one reservation. Host memory has its own unit, [`HOST_GRANULARITY`].
///
/// # Streams and events
/// Drivers with [`Capabilities::asynchronous`] have streams. A stream is a queue of work that runs
/// in order; only events order the work of different streams. A call that starts work returns
/// before the work is done. [`Driver::decommit`] and [`Driver::host_store_destroy`] do not wait:
/// the caller has observed, on the host, that every use is complete. Drivers without streams return
/// [`DriverError::Unsupported`] from the calls for streams and events.
///
/// Any call may return [`DriverError::IllegalAddress`] or [`DriverError::ContextLost`] for work
/// that was started much earlier; see [`DriverError::is_context_lost`].
///
/// # Safety
/// Buffers of an arena return slices of the memory that its driver provides, and the arena decides
/// from the driver's answers that work is complete. An implementation therefore guarantees, as
/// long as its callers keep the preconditions of the unsafe functions:
///
/// - [`Driver::capabilities`], [`Driver::backend`] and [`Driver::context`] never change for a
///   driver, and the granularity is a power of two.
/// - [`Driver::reserve`], [`Driver::segment_create`] and [`Driver::host_alloc`] return ranges of
///   the requested size and alignment that overlap nothing else, neither other ranges of the driver
///   nor memory of the program, and that do not wrap around the address space.
/// - A committed granule, a segment, a store and host memory stay where they are, with their
///   contents, until one of the calls below takes them away. Only they, and copies that were asked
///   for, change them.
/// - Each call is all or nothing as documented: after an error the range is in the state that the
///   function names.
/// - [`Driver::host_pointer`] returns a pointer that is valid for reads and writes of the whole
///   committed range around the address, all of it initialised, for any thread; so does
///   [`Driver::host_alloc`] for its size.
/// - [`Driver::event_query`] returns `true`, and [`Driver::event_synchronize`],
///   [`Driver::stream_synchronize`] and [`Driver::synchronize`] return `Ok`, only if all work that
///   they speak of is complete and its writes are visible to the host. Without
///   [`Capabilities::asynchronous`] all work is complete when the call that started it returns.
/// - [`Driver::stream_wait_event`] orders the work of streams as documented.
/// - No handle is given twice while the object with it exists.
/// - The calls may be made from any thread, and none of them unwinds.
///
/// The safe functions may be called at any time with any arguments: an address or a size that the
/// driver does not know is an error, never undefined behaviour.
///
/// A driver may be written in any crate, from the items of this one.
///
/// Memory cannot be taken away in safe code:
///
/// ```compile_fail,E0133
/// use lowtide_gpu_driver::host::HostDriver;
/// use lowtide_gpu_driver::{ByteSize, DeviceAddress, Driver as _};
///
/// let mine = [7_u8; 64];
/// let at = DeviceAddress::new(mine.as_ptr() as u64);
/// let _ = HostDriver::new().decommit(at, ByteSize::mib(2), ByteSize::mib(2)); // would unmap it
/// ```
#[expect(unsafe_code, reason = "its answers decide when memory may be used")]
#[expect(unused_variables, reason = "a call without the feature looks at no argument")]
pub unsafe trait Driver: fmt::Debug + Send + Sync {
    /// Returns the kind of this driver.
    fn backend(&self) -> Backend;

    /// Returns the supported features, which never change for a driver.
    fn capabilities(&self) -> Capabilities;

    /// Returns the context in which the driver's addresses and streams are valid (`CUcontext`), as
    /// a number to compare; `None` if there is none.
    fn context(&self) -> Option<u64> {
        None
    }

    /// Returns the device's ordinal among those visible to this process; `None` if the driver is
    /// not for a device.
    fn ordinal(&self) -> Option<u32> {
        None
    }

    /// Returns the device's UUID, which stays the same across restarts; `None` if the driver is not
    /// for a device, or does not know it. Makes no driver call.
    fn uuid(&self) -> Option<DeviceUuid> {
        None
    }

    /// Reserves address space, without memory, at a multiple of the granularity.
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without [`Capabilities::virtual_memory`], as for the calls up
    /// to [`Driver::remap`]; [`DriverError::OutOfMemory`] if no such range is free; a smaller one
    /// may be.
    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        Err(DriverError::Unsupported { what: VIRTUAL_MEMORY })
    }

    /// Releases a whole reservation, in which nothing is committed.
    ///
    /// # Safety
    /// The range is exactly one reservation of this driver that is not released yet. Nothing in it
    /// is committed, and no other call for it is in progress. Nothing uses its addresses
    /// afterwards.
    ///
    /// # Errors
    /// Any [`DriverError`]; the range then stays reserved.
    unsafe fn unreserve(&self, at: DeviceAddress, size: ByteSize) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: VIRTUAL_MEMORY })
    }

    /// Commits memory to a bare part of a reservation. Its contents are unspecified (host: zero).
    ///
    /// The range is divided into handles of `handle` bytes, of which the last may be smaller. Each
    /// is memory that is released as a whole ([`Capabilities::handles`]). `handle` is a nonzero
    /// multiple of the granularity; drivers without handles ignore it. The cost grows with the
    /// number of handles, not with the bytes (`cuMemCreate`, `cuMemMap` and `cuMemRelease` for each
    /// handle, then one `cuMemSetAccess`).
    ///
    /// # Safety
    /// The range lies in one reservation of this driver and is bare: none of it is committed. No
    /// other call for any of it is in progress.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] if the device has no memory left; the range then stays bare.
    /// Smaller handles may succeed.
    unsafe fn commit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: VIRTUAL_MEMORY })
    }

    /// Releases the memory of a committed part: whole handles of `handle` bytes each, of which the
    /// last may be smaller. On drivers without handles ([`Capabilities::handles`]) the part may
    /// span several commits, or a portion of one, and `handle` is ignored (`cuMemUnmap` for each
    /// handle).
    ///
    /// # Safety
    /// The range lies in one reservation of this driver and is committed. No other call for any of
    /// it is in progress. Every use of it is complete: no work of the device accesses it, and no
    /// pointer or reference into it is used again before it is committed again.
    ///
    /// # Errors
    /// Any [`DriverError`]; the range then stays committed and its contents are lost. If a handle
    /// is still mapped after others were released, the driver commits these again.
    unsafe fn decommit(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: VIRTUAL_MEMORY })
    }

    /// Moves the memory of a committed part, whole handles as for [`Driver::decommit`], to a bare
    /// part of the same or another reservation of this driver. `from` is bare afterwards.
    ///
    /// The memory is never released in between, so no other process can take it, and its contents
    /// move with it (`cuMemMap` of the same handles, `cuMemSetAccess`, then `cuMemUnmap` of the old
    /// place).
    ///
    /// # Safety
    /// For `from` as for [`Driver::decommit`], for `to` as for [`Driver::commit`].
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without [`Capabilities::remap`], or any other [`DriverError`].
    /// `from` then stays committed with its contents lost, and `to` stays bare.
    unsafe fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: "moving memory between addresses" })
    }

    /// Allocates memory in one piece, at an address of the driver's choice that is a multiple of
    /// the granularity. The address stays valid until the whole segment is released.
    ///
    /// Drivers without [`Capabilities::virtual_memory`] use segments instead of reservations: a
    /// segment counts as committed, and its contents are unspecified (`cuMemAlloc`,
    /// `cuMemAllocFromPoolAsync` and a wait for it).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] with virtual memory; [`DriverError::OutOfMemory`] if the device
    /// has no free piece of this size; a smaller one may be free.
    fn segment_create(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        Err(DriverError::Unsupported { what: SEGMENTS })
    }

    /// Releases a whole segment. The driver
    /// may cache the memory for later segments until [`Driver::trim`] (`cuMemFree`, which waits for
    /// the whole device; `cuMemFreeAsync` into a private pool).
    ///
    /// # Safety
    /// The range is exactly one segment of this driver that is not released yet. Every use of it is
    /// complete, as for [`Driver::decommit`], and no other call for it is in progress.
    ///
    /// # Errors
    /// Any [`DriverError`]; the segment then stays and its contents are lost.
    unsafe fn segment_destroy(&self, at: DeviceAddress, size: ByteSize) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: SEGMENTS })
    }

    /// Releases the cached memory of released segments to the device. Waits for work on it if
    /// necessary; does nothing if no memory is cached (`cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// Any [`DriverError`]; the memory then stays cached until the next trim.
    fn trim(&self) -> Result<(), DriverError> {
        Ok(())
    }

    /// Copies bytes between two committed parts that do not overlap, and waits until they are
    /// copied. Any address and any size is allowed; neither part is used meanwhile.
    ///
    /// # Safety
    /// Both parts are committed or segments of this driver, and stay so during the call. Until it
    /// returns, no work and no thread writes to `from`, or accesses `to`; no reference into `to`
    /// exists.
    ///
    /// # Errors
    /// Any [`DriverError`]; the contents of `to` are unspecified then.
    unsafe fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: "copies on the device" })
    }

    /// Returns the total and free memory of the device; `None` if the driver does not know it
    /// (`cuMemGetInfo`). On an integrated GPU the free memory does not include page cache, which
    /// the kernel would release.
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn device_memory(&self) -> Result<Option<DeviceMemory>, DriverError> {
        Ok(None)
    }

    /// Returns the free memory of the device; `None`, without a driver call, if it counts in the
    /// host's budget ([`Capabilities::counts_as_host`]).
    ///
    /// # Errors
    /// As for [`Driver::device_memory`].
    fn headroom(&self) -> Result<Option<ByteSize>, DriverError> {
        if self.capabilities().counts_as_host() {
            return Ok(None);
        }
        Ok(self.device_memory()?.map(|memory| memory.free))
    }

    /// Returns the memory in use on the device when the driver's context was created, before
    /// anything was committed; `None` if it is not known or there is no device.
    ///
    /// It is an upper bound of the context's own memory, because it includes the memory that other
    /// processes, and other code in this process, held at that moment. Makes no driver call.
    fn context_overhead(&self) -> Option<ByteSize> {
        None
    }

    /// Returns the number of rollback calls that failed. Each may have leaked memory or addresses
    /// until the process ends. Makes no driver call.
    fn rollback_failures_total(&self) -> u64 {
        0
    }

    /// Returns what memory is that does not belong to this driver's device and context, such as
    /// "host memory", checked at its first and last byte; `None` if it belongs to them, or if the
    /// driver cannot tell (`cuPointerGetAttribute`).
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn foreign_memory(
        &self,
        at: DeviceAddress,
        size: ByteSize,
    ) -> Result<Option<&'static str>, DriverError> {
        Ok(None)
    }

    /// Allocates host memory that the device can copy from and to. The memory is page-locked if
    /// requested: there is no silent fallback.
    ///
    /// It begins at a multiple of [`HOST_ALIGNMENT`]; `size` is a nonzero multiple of
    /// [`HOST_GRANULARITY`]. Every byte is initialised, and may be read and written until
    /// [`Driver::host_free`]. A forked child may read it too: as its own copy if the memory is
    /// private, and as the same memory if CUDA page-locked it, which shares it with children.
    ///
    /// # Errors
    /// [`DriverError::LockLimit`] if the process may not lock that much,
    /// [`DriverError::OutOfMemory`], or [`DriverError::Unsupported`] if the driver has no such
    /// memory.
    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> Result<NonNull<u8>, DriverError> {
        Err(DriverError::Unsupported { what: "allocating host memory" })
    }

    /// Releases a whole allocation of [`Driver::host_alloc`].
    ///
    /// # Safety
    /// The range is exactly one allocation of [`Driver::host_alloc`] of this driver, with the same
    /// size and kind, that is not released yet. Every use of it is complete, as for
    /// [`Driver::decommit`].
    ///
    /// # Errors
    /// Any [`DriverError`]; the memory then stays as it was.
    unsafe fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: "allocating host memory" })
    }

    /// Returns the pointer for an address in a reservation of this driver, with the provenance of
    /// that reservation; `None` without [`Capabilities::host_access`]. While the range is committed
    /// it may be read and written, and every byte of it is initialised.
    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        None
    }

    /// Creates a stream that is not ordered with any other, including the legacy default stream
    /// (`cuStreamCreate` with `CU_STREAM_NON_BLOCKING`).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without streams, or any other [`DriverError`].
    fn stream_create(&self) -> Result<StreamHandle, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Destroys a stream and returns at once. Queued work still runs, and events recorded on the
    /// stream still complete (`cuStreamDestroy`).
    ///
    /// # Safety
    /// The stream is one of this driver's that is not destroyed yet. No other call with it is in
    /// progress, and none is made afterwards.
    ///
    /// # Errors
    /// Any [`DriverError`]; the stream is destroyed nevertheless.
    unsafe fn stream_destroy(&self, stream: StreamHandle) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Makes later work of `stream` wait for the work that `event` marks now. Recording or
    /// destroying the event later does not change the wait; an event that was never recorded marks
    /// nothing. Does not block the host (`cuStreamWaitEvent`).
    ///
    /// # Safety
    /// Stream and event belong to this driver or to its context. Neither is destroyed before the
    /// call returns. The stream does not capture a graph, unless the event is of the same capture.
    ///
    /// # Errors
    /// Any [`DriverError`]; the stream does not wait then.
    unsafe fn stream_wait_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until all work queued on the stream is done (`cuStreamSynchronize`).
    ///
    /// # Safety
    /// The stream belongs to this driver or to its context, and is not destroyed before the call
    /// returns.
    ///
    /// # Errors
    /// Any [`DriverError`], often of the work itself; no work is known to be done then.
    unsafe fn stream_synchronize(&self, stream: StreamHandle) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Returns `true` if the stream is capturing its work into a graph, even if the capture is
    /// invalidated. The query does not affect a capture, unlike [`Driver::event_query`]
    /// (`cuStreamIsCapturing`).
    ///
    /// # Safety
    /// As for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// Any [`DriverError`].
    unsafe fn is_capturing(&self, stream: StreamHandle) -> Result<bool, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Creates an event without timing (`cuEventCreate` with `CU_EVENT_DISABLE_TIMING`). The call
    /// is slow if several threads contend for it: keep and reuse events.
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without streams, or any other [`DriverError`].
    fn event_create(&self) -> Result<EventHandle, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Destroys an event and returns at once. Streams that wait for it still do (`cuEventDestroy`).
    ///
    /// # Safety
    /// The event is one of this driver's that is not destroyed yet. No other call with it is in
    /// progress, and none is made afterwards.
    ///
    /// # Errors
    /// Any [`DriverError`]; the event is destroyed nevertheless.
    unsafe fn event_destroy(&self, event: EventHandle) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Marks the work queued on the stream now, replacing the event's previous mark
    /// (`cuEventRecord`).
    ///
    /// # Safety
    /// Event and stream belong to this driver or to its context, and neither is destroyed before
    /// the call returns.
    ///
    /// # Errors
    /// Any [`DriverError`]; the mark is unspecified then.
    unsafe fn event_record(
        &self,
        event: EventHandle,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Returns `true` if the work that the event marks is done, or the event was never recorded.
    /// Does not block. While a stream captures a graph, the call fails and invalidates the capture
    /// (`cuEventQuery`).
    ///
    /// # Safety
    /// The event is one of this driver's, and is not destroyed before the call returns.
    ///
    /// # Errors
    /// Any [`DriverError`].
    unsafe fn event_query(&self, event: EventHandle) -> Result<bool, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until the work that the event marks is done (`cuEventSynchronize`).
    ///
    /// # Safety
    /// As for [`Driver::event_query`].
    ///
    /// # Errors
    /// As for [`Driver::stream_synchronize`].
    unsafe fn event_synchronize(&self, event: EventHandle) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until all work of the context is done, including work on other users' streams and on
    /// destroyed streams (`cuCtxSynchronize`).
    ///
    /// # Errors
    /// As for [`Driver::stream_synchronize`].
    fn synchronize(&self) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Queues a copy between two committed parts that do not overlap. Any address and any size is
    /// allowed. Both parts stay committed until the copy is done (`cuMemcpyDtoDAsync`).
    ///
    /// # Safety
    /// Until the copy is complete, both parts stay committed or segments of this driver, nothing
    /// writes to `from`, and nothing accesses `to`, except work that is ordered after the copy. The
    /// stream is as for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// [`DriverError::Overlap`], or any other [`DriverError`]; nothing is queued then.
    unsafe fn copy_async(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Allocates host memory for offloading; its contents are unspecified. `size` is a nonzero
    /// multiple of [`HOST_GRANULARITY`]. The memory is page-locked if possible
    /// (`cuMemHostRegister`); copies from and to other memory are slower and partly synchronous.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`], [`DriverError::Misaligned`] or any other [`DriverError`].
    fn host_store_create(&self, size: ByteSize) -> Result<HostStore, DriverError> {
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Frees a store. May block as long as other work of the device takes (`cuMemHostUnregister`).
    ///
    /// # Safety
    /// The store is one of this driver's that is not destroyed yet. Every copy from and to it is
    /// complete. No other call with it is in progress, and none is made afterwards.
    ///
    /// # Errors
    /// Any [`DriverError`]; the store then stays.
    unsafe fn host_store_destroy(&self, store: HostStore) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `into.size` bytes of committed device memory into a store. Returns without
    /// waiting if the store is page-locked. Device memory and store stay until it is done
    /// (`cuMemcpyDtoHAsync`).
    ///
    /// An arena copies on a stream of its own. So it can only keep contents during a sleep if the
    /// driver has the calls for streams too, with or without [`Capabilities::asynchronous`]. A
    /// driver whose memory counts as the host's ([`Capabilities::counts_as_host`]) needs neither.
    ///
    /// # Safety
    /// Until the copy is complete, `from` stays committed and unchanged, and the part of the store
    /// exists and nothing else accesses it, except copies that are ordered after this one. The
    /// stream is as for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// Any [`DriverError`]. Nothing is queued then, except by a copy with a store that is not
    /// page-locked.
    unsafe fn offload(
        &self,
        from: DeviceAddress,
        into: HostStore,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `from.size` bytes of a store back into committed device memory
    /// (`cuMemcpyHtoDAsync`). Otherwise like [`Driver::offload`].
    ///
    /// # Safety
    /// Until the copy is complete, the part of the store exists and stays unchanged, and `to` stays
    /// committed and nothing else accesses it, except work that is ordered after the copy; no
    /// reference into it exists. The stream is as for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// As for [`Driver::offload`].
    unsafe fn restore(
        &self,
        from: HostStore,
        to: DeviceAddress,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `size` bytes of host memory into committed device memory
    /// (`cuMemcpyHtoDAsync`). A driver without asynchronous work copies at once, on any stream.
    ///
    /// # Safety
    /// Until the copy is complete, `size` bytes at `from` are valid for reads and nothing writes to
    /// them; as many at `to` stay committed or a segment of this driver, and nothing else accesses
    /// them, except work that is ordered after the copy. On a driver with streams, the stream is as
    /// for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// Any [`DriverError`]. The copy may be queued nevertheless.
    unsafe fn copy_from_host(
        &self,
        from: NonNull<u8>,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: HOST_COPIES })
    }

    /// Queues a copy of `size` bytes of committed device memory into host memory
    /// (`cuMemcpyDtoHAsync`). Otherwise like [`Driver::copy_from_host`].
    ///
    /// # Safety
    /// Until the copy is complete, `size` bytes at `to` are valid for writes and nothing else
    /// accesses them; as many at `from` stay committed or a segment of this driver, and nothing
    /// writes to them, except work that is ordered after the copy. On a driver with streams, the
    /// stream is as for [`Driver::stream_synchronize`].
    ///
    /// # Errors
    /// As for [`Driver::copy_from_host`].
    unsafe fn copy_to_host(
        &self,
        from: DeviceAddress,
        to: NonNull<u8>,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: HOST_COPIES })
    }
}

/// The feature that a driver without streams lacks.
const STREAMS: &str = "streams and events";
/// The feature that a driver with segments lacks.
const VIRTUAL_MEMORY: &str = "virtual memory";
/// The feature that a driver with virtual memory lacks.
const SEGMENTS: &str = "memory in segments";
/// The feature that a driver without stores lacks.
const STORES: &str = "host stores for offloading";
/// The feature that a driver without host copies lacks.
const HOST_COPIES: &str = "copies from and to host memory";

/// The README's code, compiled.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;

#[cfg(test)]
#[expect(unsafe_code, reason = "each call that takes memory away is made")]
mod tests {
    use super::*;

    #[test]
    fn a_driver_says_so_in_every_call_that_needs_what_it_lacks() {
        let driver: &dyn Driver = &host::HostDriver::new();
        let (at, size) = (DeviceAddress::new(0), ByteSize::mib(2));
        let (stream, event) = (StreamHandle::new(1), EventHandle::new(1));
        let store = HostStore { at: 1, size };
        macro_rules! answer {
            ($call:expr) => {{
                // SAFETY: the host driver lacks the feature: it looks at no argument.
                unsafe { $call }.map(drop)
            }};
        }
        let answers = [
            driver.stream_create().map(drop),
            answer!(driver.stream_destroy(stream)),
            answer!(driver.stream_wait_event(stream, event)),
            answer!(driver.stream_synchronize(stream)),
            answer!(driver.is_capturing(stream)),
            driver.event_create().map(drop),
            answer!(driver.event_destroy(event)),
            answer!(driver.event_record(event, stream)),
            answer!(driver.event_query(event)),
            answer!(driver.event_synchronize(event)),
            driver.synchronize(),
            driver.segment_create(size).map(drop),
            answer!(driver.segment_destroy(at, size)),
            answer!(driver.remap(at, at, size, size)),
            answer!(driver.copy_async(at, at, size, stream)),
            driver.host_store_create(size).map(drop),
            answer!(driver.host_store_destroy(store)),
            answer!(driver.offload(at, store, stream)),
            answer!(driver.restore(store, at, stream)),
        ];
        for answer in answers {
            assert!(matches!(answer, Err(DriverError::Unsupported { .. })), "{answer:?}");
        }
    }
}
