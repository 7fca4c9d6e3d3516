//! The simulation as a [`Driver`], and its unsafe calls as safe methods, for tests.
//!
//! This layer decides nothing: each call takes the lock and calls the model. A call of the trait
//! relaxes the capture mode of its thread, as a real driver does; a direct call does not.
//!
//! The methods are safe because the model looks up every address and handle: a wrong one is an
//! error, or a fault on record. Only host memory is real: its calls have no safe method.
//!
//! Invariant: otherwise a call of the trait and the method of the same name are identical.
#![expect(unsafe_code, reason = "the calls of the trait that take memory away are unsafe")]

use std::ptr::NonNull;

use super::SimDriver;
use super::call::Call;
use super::fault::WorkKind;
use super::graph::Relaxed;
use super::memory::Range;
use super::model::Answer;
use super::raw::Found;
use super::work::Work;
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{
    Backend, Capabilities, DeviceAddress, DeviceMemory, DeviceUuid, Driver, DriverError,
    EventHandle, HostMemory, HostStore, StreamHandle,
};

/// Passes the calls that are unsafe in the trait to a macro: what tests name them by, the name, the
/// arguments and what the call does.
macro_rules! unsafe_calls {
    ($define:ident) => {
        $define! {
            AddressFree unreserve(at: DeviceAddress, size: ByteSize) -> () = |sim| {
                let mut model = sim.model();
                let range = model.whole(at, size)?;
                model.unreserve(range)
            };
            Create commit(at: DeviceAddress, size: ByteSize, handle: ByteSize) -> () = |sim| {
                let mut model = sim.model();
                let range = model.in_handles(at, size, handle)?;
                model.commit(range)
            };
            Unmap decommit(at: DeviceAddress, size: ByteSize, handle: ByteSize) -> () = |sim| {
                let mut model = sim.model();
                let range = model.in_handles(at, size, handle)?;
                model.decommit(range)
            };
            Map remap(from: DeviceAddress, to: DeviceAddress, size: ByteSize, handle: ByteSize)
                -> () = |sim| {
                let mut model = sim.model();
                let (from, to) = (model.in_handles(from, size, handle)?, model.whole(to, size)?);
                model.remap(from, to)
            };
            Copy copy(from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> () =
                |sim| sim.model().copy(apart(from, to, size)?, to);
            StreamDestroy stream_destroy(stream: StreamHandle) -> () =
                |sim| sim.model().stream_destroy(stream.get());
            StreamWaitEvent stream_wait_event(stream: StreamHandle, event: EventHandle) -> () =
                |sim| sim.model().stream_wait_event(stream.get(), event.get());
            StreamSynchronize stream_synchronize(stream: StreamHandle) -> () =
                |sim| sim.model().stream_synchronize(stream.get());
            StreamIsCapturing is_capturing(stream: StreamHandle) -> bool =
                |sim| sim.model().is_capturing(stream.get());
            EventDestroy event_destroy(event: EventHandle) -> () =
                |sim| sim.model().event_destroy(event.get());
            EventRecord event_record(event: EventHandle, stream: StreamHandle) -> () =
                |sim| sim.model().event_record(event.get(), stream.get());
            EventQuery event_query(event: EventHandle) -> bool =
                |sim| sim.model().event_query(event.get());
            EventSynchronize event_synchronize(event: EventHandle) -> () =
                |sim| sim.model().event_synchronize(event.get());
            CopyAsync copy_async(
                from: DeviceAddress, to: DeviceAddress, size: ByteSize, stream: StreamHandle
            ) -> () = |sim| {
                let work = Work::Copy(apart(from, to, size)?, to.get(), WorkKind::Copy);
                sim.model().start(Call::CopyAsync, stream.get(), work)
            };
            HostFree host_store_destroy(store: HostStore) -> () = |sim| sim.store_destroy(store);
            Offload offload(from: DeviceAddress, into: HostStore, stream: StreamHandle) -> () =
                |sim| sim.transfer(Call::Offload, (from, into), stream);
            Restore restore(from: HostStore, to: DeviceAddress, stream: StreamHandle) -> () =
                |sim| sim.transfer(Call::Restore, (to, from), stream);
        }
    };
}

/// Defines safe methods.
macro_rules! safe {
    ($($call:ident $name:ident($($argument:ident: $type:ty),*) -> $answer:ty
        = |$sim:ident| $act:expr;)*) => { $(
        #[doc = concat!("Like [`Driver::", stringify!($name), "`].")]
        ///
        /// # Errors
        #[doc = concat!("As for [`Driver::", stringify!($name), "`].")]
        pub fn $name(&self, $($argument: $type),*) -> Answer<$answer> {
            let $sim = self;
            $act
        }
    )* };
}

/// Defines the calls of the trait: the safe methods, with the acts that wait for them, and with this
/// thread's capture mode relaxed.
macro_rules! relaxed {
    ($($call:ident $name:ident($($argument:ident: $type:ty),*) -> $answer:ty
        = |$sim:ident| $act:expr;)*) => { $(
        unsafe fn $name(&self, $($argument: $type),*) -> Answer<$answer> {
            let _relaxed = self.enter(Call::$call);
            Self::$name(self, $($argument),*)
        }
    )* };
}

impl SimDriver {
    unsafe_calls!(safe);

    /// Like [`Driver::segment_destroy`].
    ///
    /// # Errors
    /// As for [`Driver::segment_destroy`].
    pub fn segment_destroy(&self, at: DeviceAddress, size: ByteSize) -> Answer {
        let mut model = self.model();
        let range = model.whole(at, size)?;
        model.segment_destroy(range)
    }

    /// Runs the acts that wait for a call, and relaxes this thread's capture mode for the call.
    fn enter(&self, call: Call) -> Relaxed {
        self.hooks.before(call);
        Relaxed::enter()
    }

    fn is_pool(&self) -> bool {
        self.model().options.pool
    }
}

/// The source of a copy between parts that do not overlap.
fn apart(from: DeviceAddress, to: DeviceAddress, size: ByteSize) -> Answer<Range> {
    if from.get().abs_diff(to.get()) < size.get() {
        return Err(DriverError::Overlap { from, to, size });
    }
    Ok(Range { at: from.get(), size: size.get() })
}

// SAFETY: device memory is numbers of the model, with no host pointer to it, and its work is done
// when the model says so. Host memory is the host driver's.
unsafe impl Driver for SimDriver {
    /// The backend that the options select.
    fn backend(&self) -> Backend {
        let model = self.model();
        match (model.options.virtual_memory, model.options.pool) {
            (true, _) => Backend::CudaVirtualMemory,
            (false, true) => Backend::CudaPool,
            (false, false) => Backend::CudaPlain,
        }
    }

    fn capabilities(&self) -> Capabilities {
        self.capabilities
    }

    fn ordinal(&self) -> Option<u32> {
        self.model().options.ordinal
    }

    fn uuid(&self) -> Option<DeviceUuid> {
        self.model().options.uuid
    }

    unsafe_calls!(relaxed);

    fn reserve(&self, size: ByteSize) -> Answer<DeviceAddress> {
        let _relaxed = self.enter(Call::AddressReserve);
        self.model().reserve(size)
    }

    fn segment_create(&self, size: ByteSize) -> Answer<DeviceAddress> {
        let _relaxed = self.enter(if self.is_pool() { Call::AllocAsync } else { Call::Alloc });
        self.model().segment_create(size)
    }

    unsafe fn segment_destroy(&self, at: DeviceAddress, size: ByteSize) -> Answer {
        let _relaxed = self.enter(if self.is_pool() { Call::FreeAsync } else { Call::Free });
        Self::segment_destroy(self, at, size)
    }

    fn trim(&self) -> Answer {
        let _relaxed = self.enter(Call::PoolTrim);
        self.model().trim_segments()
    }

    fn device_memory(&self) -> Answer<Option<DeviceMemory>> {
        let _relaxed = self.enter(Call::GetInfo);
        let mut model = self.model();
        model.enter(Call::GetInfo, ByteSize::ZERO)?;
        Ok(Some(DeviceMemory { total: model.options.capacity, free: model.headroom() }))
    }

    /// The value of the options: no other process uses the device when its context is created.
    fn context_overhead(&self) -> Option<ByteSize> {
        let options = &self.model().options;
        Some(options.context_overhead.min(options.capacity))
    }

    fn foreign_memory(&self, at: DeviceAddress, size: ByteSize) -> Answer<Option<&'static str>> {
        let last = at.get().saturating_add(size.get().saturating_sub(1));
        let found = [at.get(), last].map(|at| self.raw().find(at));
        Ok(match found {
            [Some(Found::Allocation(one, _)), Some(Found::Allocation(two, _))] if one != two => {
                Some("memory beyond the end of its allocation")
            }
            [None, _] | [_, None] => Some("memory that is not on the device"),
            [Some(Found::Host(..)), _] | [_, Some(Found::Host(..))] => Some("host memory"),
            _ => None,
        })
    }

    fn host_alloc(&self, size: ByteSize, memory: HostMemory) -> Answer<NonNull<u8>> {
        let _relaxed = self.enter(Call::HostAlloc);
        self.model().host_alloc(size, memory)
    }

    unsafe fn host_free(&self, at: NonNull<u8>, size: ByteSize, memory: HostMemory) -> Answer {
        let _relaxed = self.enter(Call::HostFree);
        // SAFETY: an allocation of this driver of which every use is complete (contract of this
        // call).
        unsafe { self.model().host_free(at, size, memory) }
    }

    fn stream_create(&self) -> Answer<StreamHandle> {
        let _relaxed = self.enter(Call::StreamCreate);
        self.model().stream_create()
    }

    fn event_create(&self) -> Answer<EventHandle> {
        let _relaxed = self.enter(Call::EventCreate);
        self.model().event_create().map(EventHandle::new)
    }

    fn synchronize(&self) -> Answer {
        let _relaxed = self.enter(Call::Synchronize);
        self.model().synchronize()
    }

    fn host_store_create(&self, size: ByteSize) -> Answer<HostStore> {
        let _relaxed = self.enter(Call::HostAlloc);
        self.store_create(size)
    }

    unsafe fn copy_from_host(
        &self,
        from: NonNull<u8>,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Answer {
        self.hooks.before(Call::Restore);
        // SAFETY: the host memory is there and not written to until the copy is complete (contract
        // of this call).
        unsafe { self.copy_with_host(Call::Restore, (to, from), size, stream) }
    }

    unsafe fn copy_to_host(
        &self,
        from: DeviceAddress,
        to: NonNull<u8>,
        size: ByteSize,
        stream: StreamHandle,
    ) -> Answer {
        self.hooks.before(Call::Offload);
        // SAFETY: the host memory is there and not used until the copy is complete (contract of
        // this call).
        unsafe { self.copy_with_host(Call::Offload, (from, to), size, stream) }
    }
}
