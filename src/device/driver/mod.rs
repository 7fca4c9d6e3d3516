//! What gives device memory: address space first, physical memory behind parts of it later.
//!
//! A driver moves memory and keeps no policy. It knows nothing of arenas, blocks, limits or time,
//! and it is called with no lock of ours held. Every call is all or nothing: on an error the range
//! is as it was before.
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
#[cfg(feature = "simulation")]
pub mod sim;
#[cfg(all(test, not(lowtide_loom)))]
pub(crate) mod trial;
mod uuid;

use std::fmt;
use std::ptr::NonNull;

pub use address::DeviceAddress;
pub use capabilities::{Backend, Capabilities, HostMemory};
pub use error::DriverError;
pub use handle::{DeviceMemory, EventHandle, HostStore, Owner, StoreSpan, StreamHandle};
pub use uuid::{DeviceUuid, UuidError};

use crate::bytes::ByteSize;

/// What every size of [`Driver::host_alloc`] is a multiple of. 64 KiB: the largest page in use, and
/// so a multiple of every page.
pub const HOST_GRANULARITY: ByteSize = ByteSize::kib(64);

/// What every address from [`Driver::host_alloc`] is a multiple of: the smallest page in use.
pub const HOST_ALIGNMENT: ByteSize = ByteSize::kib(4);

/// Keeps [`Driver`] to this crate: to implement, and to take memory away with.
pub(crate) mod sealed {
    /// Implemented by the drivers of this crate and by nothing else.
    #[expect(unnameable_types, reason = "that is what seals the other")]
    pub trait Sealed {}

    /// Shows that an arena calls: it knows which granules nobody uses.
    #[expect(unnameable_types, reason = "nobody else is to have one")]
    #[derive(Clone, Copy, Debug)]
    pub struct Key(());

    impl Key {
        /// For the arena that made the reservation, and for the drivers' own tests.
        pub(crate) const fn new() -> Self {
            Self(())
        }
    }
}

use sealed::Key;

/// The backend that gives device memory.
///
/// Sealed: buffers hand out references into what [`Driver::host_pointer`] names, so a driver that
/// broke the contract from safe code of another crate would break memory safety. For the same
/// reason what changes the memory behind an address takes a key that only this crate can make:
///
/// ```compile_fail,E0061
/// use lowtide::device::{HostDriver, driver::{DeviceAddress, Driver as _}};
/// let mine = [7_u8; 64];
/// let at = DeviceAddress::new(mine.as_ptr() as u64);
/// let _ = HostDriver::new().decommit(at, lowtide::ByteSize::mib(2)); // would unmap it
/// ```
///
/// Calls may come from several threads at once, for ranges that do not overlap.
///
/// Every `at` and `size` is a multiple of [`Capabilities::granularity`], `size` is not zero, and
/// the range lies in one reservation. Host memory has its own measure, [`HOST_GRANULARITY`].
///
/// # Streams and events
/// With [`Capabilities::asynchronous`] there are streams: queues of work, each done in order, with
/// no order between them but what events make. A call that starts work returns before the work is
/// done. [`Driver::decommit`] and [`Driver::host_store_destroy`] wait for nothing: their caller has
/// observed, on the host, that every use is complete. Drivers without streams answer
/// [`DriverError::Unsupported`] and need no code for it.
///
/// Any call may answer [`DriverError::IllegalAddress`] or [`DriverError::ContextLost`], for work
/// that was started long before; see [`DriverError::is_context_lost`].
pub trait Driver: sealed::Sealed + fmt::Debug + Send + Sync {
    /// Which driver this is.
    fn backend(&self) -> Backend;

    /// What it can do; the same for as long as it lives.
    fn capabilities(&self) -> Capabilities;

    /// The context in which its addresses and streams mean something (`CUcontext`); `None` where
    /// there is none. A number to compare.
    fn context(&self) -> Option<u64> {
        None
    }

    /// The device's number among those that this process sees; `None` where it is no device.
    fn ordinal(&self) -> Option<u32> {
        None
    }

    /// Holds address space, with nothing behind it, at a multiple of the granularity.
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] where there is no such range: a smaller one may be there.
    fn reserve(&self, size: ByteSize) -> Result<DeviceAddress, DriverError>;

    /// Gives a whole reservation back. Nothing in it is committed.
    ///
    /// # Errors
    /// As the driver says; the range then stays reserved.
    fn unreserve(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Puts memory behind a bare part of a reservation. Its contents are unspecified (host: zero).
    ///
    /// # Errors
    /// [`DriverError::OutOfMemory`] where the device has no more; the range then stays bare.
    fn commit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Takes the memory behind a committed part away. The caller has proved that every use of it
    /// is complete. The range need not be one that was committed by one call.
    ///
    /// # Errors
    /// As the driver says; the range then stays committed, its contents lost.
    fn decommit(&self, at: DeviceAddress, size: ByteSize, _: Key) -> Result<(), DriverError>;

    /// Puts the memory behind a committed part behind a bare part of the same or another
    /// reservation of this driver, where it is accessible; `from` is bare then. Nothing is given
    /// back meanwhile, so that nobody else can take it. The caller has proved that every use of
    /// `from` is complete. What `to` holds is unspecified (`cuMemMap` of the same handles,
    /// `cuMemSetAccess`, then `cuMemUnmap` of the old place).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without [`Capabilities::remap`]; else as the driver says.
    /// `from` then stays committed, its contents lost, and `to` bare.
    fn remap(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (from, to, size);
        Err(DriverError::Unsupported { what: "memory that goes from one address to another" })
    }

    /// Memory in one piece, at an address of the driver's choice that is a multiple of the
    /// granularity; it keeps that address until it is given back, whole. What a driver has in place
    /// of reservations without [`Capabilities::virtual_memory`]: it counts as committed, and its
    /// contents are unspecified (`cuMemAlloc`, `cuMemAllocFromPoolAsync` and a wait for it).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] with virtual memory; [`DriverError::OutOfMemory`] where the
    /// device has no such piece: a smaller one may be there.
    fn segment_create(&self, size: ByteSize) -> Result<DeviceAddress, DriverError> {
        let _ = size;
        Err(DriverError::Unsupported { what: SEGMENTS })
    }

    /// Gives a whole segment back. The caller has proved that every use of it is complete. The
    /// driver may keep the memory until [`Driver::trim`], for segments to come
    /// (`cuMemFree`, which waits for the whole device; `cuMemFreeAsync` into a pool of our own).
    ///
    /// # Errors
    /// As the driver says; the segment then stays, its contents lost.
    fn segment_destroy(
        &self,
        at: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (at, size);
        Err(DriverError::Unsupported { what: SEGMENTS })
    }

    /// Gives to the device what the driver keeps of segments that were given back. Waits for work
    /// on them where it must; does nothing where nothing is kept (`cuMemPoolTrimTo`).
    ///
    /// # Errors
    /// As the driver says; what is kept then stays for the next trim.
    fn trim(&self) -> Result<(), DriverError> {
        Ok(())
    }

    /// Copies bytes between two committed parts that do not overlap, and waits until they are
    /// copied. Any address and any size is allowed; nobody uses either part meanwhile.
    ///
    /// # Errors
    /// As the driver says; the contents of `to` are unspecified then.
    fn copy(
        &self,
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        _: Key,
    ) -> Result<(), DriverError>;

    /// The memory of the device, and what of it is free for anybody now; `None` if it counts in the
    /// host's budget ([`Capabilities::counts_as_host`]). What `cuMemGetInfo` calls free on an
    /// integrated GPU leaves out page cache, which the kernel would release.
    ///
    /// # Errors
    /// As the driver says.
    fn device_memory(&self) -> Result<Option<DeviceMemory>, DriverError>;

    /// How much more the device could give to anybody now; `None` where the host's budget rules.
    ///
    /// # Errors
    /// As [`Driver::device_memory`].
    fn headroom(&self) -> Result<Option<ByteSize>, DriverError> {
        Ok(self.device_memory()?.map(|memory| memory.free))
    }

    /// What the device held when the driver's context had been made and nothing was committed yet;
    /// `None` where that is not known, or there is no device. An upper bound of what the context
    /// takes for as long as it lives: what neighbours held at that moment, and what others in this
    /// process had allocated, is in it. No call of the driver.
    fn context_overhead(&self) -> Option<ByteSize> {
        None
    }

    /// How many calls failed that were to undo what an earlier call had done: each may have cost
    /// memory or addresses until the process ends. No call of the driver.
    fn rollback_failures_total(&self) -> u64 {
        0
    }

    /// What it knows of memory that need not be its own: of its first byte and its last. Says
    /// nothing where it cannot know (`cuPointerGetAttribute`).
    ///
    /// # Errors
    /// As the driver says.
    fn owner_of(&self, at: DeviceAddress, size: ByteSize) -> Result<Owner, DriverError> {
        let _ = (at, size);
        Ok(Owner::Unknown)
    }

    /// Host memory that the device can copy from and to; page-locked or an error, never something
    /// else in its place. It begins at a multiple of [`HOST_ALIGNMENT`]; `size` is a multiple of
    /// [`HOST_GRANULARITY`] and not zero. Every byte of it is initialised, and may be read and
    /// written until [`Driver::host_free`]. A forked child may read it, too: as its own copy if the
    /// memory is private, and as the same memory if it is page-locked by CUDA, which shares it with
    /// children.
    ///
    /// # Errors
    /// [`DriverError::LockLimit`] where the process may not lock so much,
    /// [`DriverError::OutOfMemory`], [`DriverError::Unsupported`] where there is no such memory.
    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> Result<NonNull<u8>, DriverError> {
        let _ = (size, memory);
        Err(DriverError::Unsupported { what: "memory of the host" })
    }

    /// Gives back, whole, what [`Driver::host_alloc`] gave. The caller has proved that every use of
    /// it is complete, copies of a device among them.
    ///
    /// # Errors
    /// As the driver says; the memory then stays, as it was.
    fn host_free(
        &self,
        at: NonNull<u8>,
        size: ByteSize,
        memory: HostMemory,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (at, size, memory);
        Err(DriverError::Unsupported { what: "memory of the host" })
    }

    /// The pointer for an address in a reservation of this driver, with the provenance of that
    /// reservation; `None` without [`Capabilities::host_access`]. While the range is committed it
    /// may be read and written, and every byte of it is initialised.
    fn host_pointer(&self, at: DeviceAddress) -> Option<NonNull<u8>> {
        let _ = at;
        None
    }

    /// A new stream that orders itself with no other, the legacy default stream included
    /// (`cuStreamCreate` with `CU_STREAM_NON_BLOCKING`).
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without streams; as the device says.
    fn stream_create(&self) -> Result<StreamHandle, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Gives a stream up. Returns at once: what is queued on it is done all the same, and events
    /// recorded on it complete as they would have (`cuStreamDestroy`).
    ///
    /// # Errors
    /// As the device says; the stream is gone then as well.
    fn stream_destroy(&self, stream: StreamHandle, _: Key) -> Result<(), DriverError> {
        let _ = stream;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Lets later work of `stream` wait for what `event` marks now. A later record of the event
    /// changes nothing for it, nor does its destruction; an event that was never recorded marks
    /// nothing. Does not block the host (`cuStreamWaitEvent`).
    ///
    /// # Errors
    /// As the device says; the stream does not wait then.
    fn stream_wait_event(
        &self,
        stream: StreamHandle,
        event: EventHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (stream, event);
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until all work now queued on the stream is done (`cuStreamSynchronize`).
    ///
    /// # Errors
    /// As the device says: what fails is often the work, and nothing is known to be done then.
    fn stream_synchronize(&self, stream: StreamHandle, _: Key) -> Result<(), DriverError> {
        let _ = stream;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Whether the stream records its work into a graph instead of doing it, be that capture sound
    /// or invalidated. Asking harms no capture, while [`Driver::event_query`] may
    /// (`cuStreamIsCapturing`).
    ///
    /// # Errors
    /// As the device says.
    fn is_capturing(&self, stream: StreamHandle, _: Key) -> Result<bool, DriverError> {
        let _ = stream;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// A new event, that measures no time (`cuEventCreate` with `CU_EVENT_DISABLE_TIMING`). Dear
    /// where threads contend for it: keep and reuse events.
    ///
    /// # Errors
    /// [`DriverError::Unsupported`] without streams; as the device says.
    fn event_create(&self) -> Result<EventHandle, DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Gives an event up. Returns at once; streams that were told to wait for it still do
    /// (`cuEventDestroy`).
    ///
    /// # Errors
    /// As the device says; the event is gone then as well.
    fn event_destroy(&self, event: EventHandle, _: Key) -> Result<(), DriverError> {
        let _ = event;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Marks what is queued on the stream now, in place of what the event marked before
    /// (`cuEventRecord`).
    ///
    /// # Errors
    /// As the device says; what the event marks is unspecified then.
    fn event_record(
        &self,
        event: EventHandle,
        stream: StreamHandle,
        _: Key,
    ) -> Result<(), DriverError> {
        let _ = (event, stream);
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Whether what the event marks is done; an event that was never recorded is. Does not block.
    /// While a stream captures it fails, and spoils the capture (`cuEventQuery`).
    ///
    /// # Errors
    /// As the device says.
    fn event_query(&self, event: EventHandle, _: Key) -> Result<bool, DriverError> {
        let _ = event;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until what the event marks is done (`cuEventSynchronize`).
    ///
    /// # Errors
    /// As for [`Driver::stream_synchronize`].
    fn event_synchronize(&self, event: EventHandle, _: Key) -> Result<(), DriverError> {
        let _ = event;
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Blocks until all work of the context is done, that of streams of others and of streams
    /// already given up included (`cuCtxSynchronize`).
    ///
    /// # Errors
    /// As for [`Driver::stream_synchronize`].
    fn synchronize(&self) -> Result<(), DriverError> {
        Err(DriverError::Unsupported { what: STREAMS })
    }

    /// Queues a copy of bytes between two committed parts that do not overlap. Any address and any
    /// size is allowed. Both parts stay committed until the copy is done (`cuMemcpyDtoDAsync`).
    ///
    /// # Errors
    /// [`DriverError::Overlap`]; else as the device says, and nothing is queued.
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

    /// Host memory to offload into, page-locked where [`Capabilities::page_locked`] says so. Its
    /// `size` is a multiple of [`HOST_GRANULARITY`] and not zero (`cuMemHostAlloc`).
    ///
    /// # Errors
    /// As for [`Driver::host_alloc`].
    fn host_store_create(&self, size: ByteSize) -> Result<HostStore, DriverError> {
        let _ = size;
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Gives a store back. The caller has observed that every copy from and to it is complete
    /// (`cuMemFreeHost`). May block for as long as other work of the device takes.
    ///
    /// # Errors
    /// As the device says; the store then stays.
    fn host_store_destroy(&self, store: HostStore, _: Key) -> Result<(), DriverError> {
        let _ = store;
        Err(DriverError::Unsupported { what: STORES })
    }

    /// Queues a copy of `into.size` bytes of committed device memory into a store, truly
    /// asynchronous. Device memory and store stay until it is done (`cuMemcpyDtoHAsync`).
    ///
    /// # Errors
    /// As the device says; nothing is queued then.
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
    /// (`cuMemcpyHtoDAsync`). As [`Driver::offload`] else.
    ///
    /// # Errors
    /// As the device says; nothing is queued then.
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
    /// (`cuMemcpyHtoDAsync`). A driver whose work is complete when its call returns copies at once,
    /// whatever the stream. The caller keeps both parts until the copy is complete, and writes to
    /// neither.
    ///
    /// # Errors
    /// As the device says. The copy may be queued even so.
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
    /// reads nor writes the host memory. Otherwise as [`Driver::copy_from_host`].
    ///
    /// # Errors
    /// As [`Driver::copy_from_host`].
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

/// What a driver without streams lacks.
const STREAMS: &str = "streams and events";
/// What a driver with virtual memory lacks.
const SEGMENTS: &str = "memory in segments, at addresses of the driver's choice";
/// What a driver without stores lacks.
const STORES: &str = "stores to offload into";
/// What a driver that copies no host memory lacks.
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

    /// The crate asks by the trait, tests by the type: both must be the same call.
    #[cfg(all(feature = "simulation", not(lowtide_loom)))]
    #[test]
    fn the_calls_with_a_key_are_those_without() {
        use sim::{Call, SimDriver, SimOptions};
        let sim = SimDriver::new(SimOptions::default());
        let (driver, key): (&dyn Driver, _) = (&sim, Key::new);
        let size = ByteSize::mib(4);
        let round = || -> Result<(), DriverError> {
            let at = driver.reserve(size)?;
            driver.commit(at, size, key())?;
            let (stream, event) = (driver.stream_create()?, driver.event_create()?);
            let store = driver.host_store_create(size)?;
            let part = ByteSize::mib(2);
            let span = StoreSpan { store, offset: part, size: part };
            let second = DeviceAddress::new(at.get() + part.get());
            driver.copy(at, second, part, key())?;
            driver.copy_async(at, second, part, stream, key())?;
            driver.offload(at, span, stream, key())?;
            driver.restore(span, second, stream, key())?;
            driver.event_record(event, stream, key())?;
            driver.stream_wait_event(stream, event, key())?;
            assert!(!driver.event_query(event, key())? && !driver.is_capturing(stream, key())?);
            driver.event_synchronize(event, key())?;
            driver.stream_synchronize(stream, key())?;
            driver.synchronize()?;
            driver.host_store_destroy(store, key())?;
            driver.event_destroy(event, key())?;
            driver.stream_destroy(stream, key())?;
            driver.decommit(second, part, key())?;
            driver.remap(at, second, part, key())?;
            driver.decommit(second, part, key())?;
            driver.unreserve(at, size, key())?;
            let host = driver.host_alloc(size, HostMemory::PageLocked)?;
            driver.host_free(host, size, HostMemory::PageLocked, key())
        };
        assert_eq!(round(), Ok(()));
        assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
        assert_eq!(Call::ALL.iter().filter(|call| sim.calls(**call) > 0).count(), 24);
        sim.assert_no_faults();
    }
}
