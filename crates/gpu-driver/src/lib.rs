//! Drivers: the source of address space and of the physical memory mapped to it.
//!
//! A driver allocates and releases memory and implements no policy. It knows nothing of arenas,
//! blocks, limits or time, and is called without holding any lock of this crate. Every call is all
//! or nothing: after an error the range is unchanged.
//!
//! Invariant: `committed ranges <= reserved ranges`; a byte is accessible iff its granule is
//! committed.

mod address;
mod capabilities;
#[cfg(feature = "cuda")]
pub mod cuda;
mod error;
mod handle;
pub mod host;
mod uuid;

use std::fmt;
use std::ptr::NonNull;

pub use lowtide_core::{ByteSize, clock};

pub use address::DeviceAddress;
pub use capabilities::{Backend, Capabilities, HostMemory};
pub use error::DriverError;
pub use handle::{DeviceMemory, EventHandle, HostStore, Owner, StoreSpan, StreamHandle};
pub use uuid::{DeviceUuid, UuidError};

/// The unit of sizes for [`Driver::host_alloc`]. 64 KiB is the largest page size in use, so it is a
/// multiple of every page size.
pub const HOST_GRANULARITY: ByteSize = ByteSize::kib(64);

/// The alignment of addresses from [`Driver::host_alloc`]: the smallest page size in use.
pub const HOST_ALIGNMENT: ByteSize = ByteSize::kib(4);

/// Keeps [`Driver`] to this crate: to implement, and to take memory away with.
#[doc(hidden)]
pub mod sealed {
    /// Implemented only by the drivers of this crate.
    pub trait Sealed {}

    /// Proves that the caller is an arena, which knows which granules are unused.
    #[derive(Clone, Copy, Debug)]
    pub struct Key(());

    #[expect(clippy::new_without_default, reason = "a proof is made on purpose")]
    impl Key {
        /// For the arena that made the reservation, and for the drivers' own tests.
        pub const fn new() -> Self {
            Self(())
        }
    }
}

use sealed::Key;

/// A backend that allocates device memory.
///
/// This trait is sealed: buffers return references into memory from [`Driver::host_pointer`], so an
/// implementation in safe code that broke the contract would break memory safety. For the same
/// reason, calls that change the memory behind an address take a key that only this crate can
/// create:
///
/// ```compile_fail,E0061
/// use lowtide::device::{HostDriver, driver::{DeviceAddress, Driver as _}};
/// let mine = [7_u8; 64];
/// let at = DeviceAddress::new(mine.as_ptr() as u64);
/// let _ = HostDriver::new().decommit(at, lowtide_gpu_driver::ByteSize::mib(2)); // would unmap it
/// ```
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
pub trait Driver: sealed::Sealed + fmt::Debug + Send + Sync {
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

    /// Reserves address space, with no memory behind it, at a multiple of the granularity.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] if no such range is free; a smaller one may be.
    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError>;

    /// Releases a whole reservation, in which nothing is committed.
    ///
    /// # Errors
    /// Any [`DriverError`]; the range then stays reserved.
    fn unreserve(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Commits memory to a bare part of a reservation. Its contents are unspecified (host: zero).
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] if the device has no memory left; the range then stays bare.
    fn commit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Releases the memory of a committed part. The caller has proved that every use of it is
    /// complete. The part may span several commits, or a portion of one.
    ///
    /// # Errors
    /// Any [`DriverError`]; the range then stays committed and its contents are lost.
    fn decommit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Moves the memory of a committed part to a bare part of the same or another reservation of
    /// this driver. `from` is bare afterwards.
    ///
    /// The memory is never released in between, so no other process can take it. The caller has
    /// proved that every use of `from` is complete. The contents of `to` are unspecified
    /// (`cuMemMap` of the same handles, `cuMemSetAccess`, then `cuMemUnmap` of the old place).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without [`Capabilities::remap`], or any other [`DriverError`].
    /// `from` then stays committed with its contents lost, and `to` stays bare.
    fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, size);
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
        let _ = size;
        Err(DriverError::Unsupported { what: SEGMENTS })
    }

    /// Releases a whole segment. The caller has proved that every use of it is complete. The driver
    /// may cache the memory for later segments until [`Driver::trim`] (`cuMemFree`, which waits for
    /// the whole device; `cuMemFreeAsync` into a private pool).
    ///
    /// # Errors
    /// Any [`DriverError`]; the segment then stays and its contents are lost.
    fn segment_destroy(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (at, size);
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
    /// # Errors
    /// Any [`DriverError`]; the contents of `to` are unspecified then.
    fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError>;

    /// Returns the total and free memory of the device; `None` if it counts in the host's budget
    /// ([`Capabilities::counts_as_host`]). On an integrated GPU the free memory of `cuMemGetInfo`
    /// does not include page cache, which the kernel would release.
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn device_memory(&self) -> Result<Option<DeviceMemory>, DriverError>;

    /// Returns the free memory of the device; `None` if the host's budget applies.
    ///
    /// # Errors
    /// As for [`Driver::device_memory`].
    fn headroom(&self) -> Result<Option<ByteSize>, DriverError> {
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

    /// Returns the owner of memory that may not be this driver's, checked at its first and last
    /// byte; [`Owner::Unknown`] if the driver cannot tell (`cuPointerGetAttribute`).
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn owner_of(&self, at: DeviceAddress, size: ByteSize) -> Result<Owner, DriverError> {
        let _ = (at, size);
        Ok(Owner::Unknown)
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
        let _ = (size, memory);
        Err(DriverError::Unsupported { what: "allocating host memory" })
    }

    /// Releases a whole allocation of [`Driver::host_alloc`]. The caller has proved that every use
    /// of it is complete, including copies by a device.
    ///
    /// # Errors
    /// Any [`DriverError`]; the memory then stays as it was.
    fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (at, size, memory);
        Err(DriverError::Unsupported { what: "allocating host memory" })
    }

    /// Returns the pointer for an address in a reservation of this driver, with the provenance of
    /// that reservation; `None` without [`Capabilities::host_access`]. While the range is committed
    /// it may be read and written, and every byte of it is initialised.
    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        let _ = at;
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
    /// # Errors
    /// Any [`DriverError`]; the stream is destroyed nevertheless.
    fn stream_destroy(&self, stream: StreamHandle, _: Key) -> Result<(), DriverError> {
        let _ = stream;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Makes later work of `stream` wait for the work that `event` marks now. Recording or
    /// destroying the event later does not change the wait; an event that was never recorded marks
    /// nothing. Does not block the host (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// Any [`DriverError`]; the stream does not wait then.
    fn stream_wait_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (stream, event);
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until all work queued on the stream is done (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// Any [`DriverError`], often of the work itself; no work is known to be done then.
    fn stream_synchronize(&self, stream: StreamHandle, _: Key) -> Result<(), DriverError> {
        let _ = stream;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Returns `true` if the stream is capturing its work into a graph, even if the capture is
    /// invalidated. The query does not affect a capture, unlike [`Driver::event_query`]
    /// (`cuStreamIsCapturing`).
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn is_capturing(&self, stream: StreamHandle, _: Key) -> Result<bool, DriverError> {
        let _ = stream;
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
    /// # Errors
    /// Any [`DriverError`]; the event is destroyed nevertheless.
    fn event_destroy(&self, event: EventHandle, _: Key) -> Result<(), DriverError> {
        let _ = event;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Marks the work queued on the stream now, replacing the event's previous mark
    /// (`cuEventRecord`).
    ///
    /// # Errors
    /// Any [`DriverError`]; the mark is unspecified then.
    fn event_record(
        &self,
        event: EventHandle,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (event, stream);
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Returns `true` if the work that the event marks is done, or the event was never recorded.
    /// Does not block. While a stream captures a graph, the call fails and invalidates the capture
    /// (`cuEventQuery`).
    ///
    /// # Errors
    /// Any [`DriverError`].
    fn event_query(&self, event: EventHandle, _: Key) -> Result<bool, DriverError> {
        let _ = event;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until the work that the event marks is done (`cuEventSynchronize`).
    ///
    /// # Errors
    /// As for [`Driver::stream_synchronize`].
    fn event_synchronize(&self, event: EventHandle, _: Key) -> Result<(), DriverError> {
        let _ = event;
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
    /// # Errors
    /// [`DriverError::Overlap`], or any other [`DriverError`]; nothing is queued then.
    fn copy_async(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, size, stream);
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Allocates host memory for offloading, page-locked with [`Capabilities::page_locked`]. `size`
    /// is a nonzero multiple of [`HOST_GRANULARITY`] (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// As for [`Driver::host_alloc`].
    fn host_store_create(&self, size: ByteSize) -> Result<HostStore, DriverError> {
        let _ = size;
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Frees a store. The caller has observed that every copy from and to it is complete. May block
    /// as long as other work of the device takes (`cuMemFreeHost`).
    ///
    /// # Errors
    /// Any [`DriverError`]; the store then stays.
    fn host_store_destroy(&self, store: HostStore, _: Key) -> Result<(), DriverError> {
        let _ = store;
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `into.size` bytes of committed device memory into a store, and returns
    /// without waiting. Device memory and store stay until it is done (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// Any [`DriverError`]; nothing is queued then.
    fn offload(
        &self,
        from: DeviceAddress,
        into: StoreSpan,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, into, stream);
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `from.size` bytes of a store back into committed device memory
    /// (`cuMemcpyHtoDAsync`). Otherwise like [`Driver::offload`].
    ///
    /// # Errors
    /// Any [`DriverError`]; nothing is queued then.
    fn restore(
        &self,
        from: StoreSpan,
        to: DeviceAddress,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, stream);
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `size` bytes of host memory into committed device memory
    /// (`cuMemcpyHtoDAsync`). A driver without asynchronous work copies at once, on any stream. The
    /// caller keeps both parts until the copy is complete, and writes to neither.
    ///
    /// # Errors
    /// Any [`DriverError`]. The copy may be queued nevertheless.
    fn copy_from_host(
        &self,
        from: NonNull<u8>,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, size, stream);
        Err(DriverError::Unsupported { what: HOST_COPIES })
    }

    /// Queues a copy of `size` bytes of committed device memory into host memory
    /// (`cuMemcpyDtoHAsync`). The caller keeps both parts until the copy is complete, and neither
    /// reads nor writes the host memory. Otherwise like [`Driver::copy_from_host`].
    ///
    /// # Errors
    /// As for [`Driver::copy_from_host`].
    fn copy_to_host(
        &self,
        from: DeviceAddress,
        to: NonNull<u8>,
        size: ByteSize,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, size, stream);
        Err(DriverError::Unsupported { what: HOST_COPIES })
    }
}

/// The feature that a driver without streams lacks.
const STREAMS: &str = "streams and events";
/// The feature that a driver with virtual memory lacks.
const SEGMENTS: &str = "memory in segments";
/// The feature that a driver without stores lacks.
const STORES: &str = "host stores for offloading";
/// The feature that a driver without host copies lacks.
const HOST_COPIES: &str = "copies from and to host memory";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_driver_says_so_in_every_call_that_needs_what_it_lacks() {
        let driver: &dyn Driver = &host::HostDriver::new();
        let (at, size) = (DeviceAddress::new(0), ByteSize::mib(2));
        let (stream, event) = (StreamHandle::new(1), EventHandle::new(1));
        let (store, key) = (HostStore::new(1), Key::new);
        let span = StoreSpan { store, offset: ByteSize::ZERO, size };
        let answers = [
            driver.stream_create().map(drop),
            driver.stream_destroy(stream, key()),
            driver.stream_wait_event(stream, event, key()),
            driver.stream_synchronize(stream, key()),
            driver.is_capturing(stream, key()).map(drop),
            driver.event_create().map(drop),
            driver.event_destroy(event, key()),
            driver.event_record(event, stream, key()),
            driver.event_query(event, key()).map(drop),
            driver.event_synchronize(event, key()),
            driver.synchronize(),
            driver.segment_create(size).map(drop),
            driver.segment_destroy(at, size, key()),
            driver.remap(at, at, size, key()),
            driver.copy_async(at, at, size, stream, key()),
            driver.host_store_create(size).map(drop),
            driver.host_store_destroy(store, key()),
            driver.offload(at, span, stream, key()),
            driver.restore(span, at, stream, key()),
        ];
        for answer in answers {
            assert!(matches!(answer, Err(DriverError::Unsupported { .. })), "{answer:?}");
        }
    }
}
