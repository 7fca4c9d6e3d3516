//! Calls of the CUDA driver, one function each, with typed errors.
//!
//! This layer makes no decisions and keeps only counts. Each call works in the thread's current
//! context, which the caller sets ([`DeviceContext`](super::context::DeviceContext)). Most of them
//! are made from the declarations of [`Table`].
//!
//! Safety, for all calls here: the functions are those of cuda.h, and any thread may call them. A
//! device address is a number: a wrong one is a device error and touches no memory of this process.
//! Every stream or event was created by a call here and not yet destroyed, or the caller of
//! `DeviceArena::lane` vouched for it: the driver's calls for both are `unsafe`.
//!
//! Invariant: `made` counts every call once.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use std::ffi::CStr;
use std::ptr::NonNull;

use lowtide_core::bytes::ByteSize;
use lowtide_core::log;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};

use super::table::{
    ATTRIBUTE_CONTEXT, ATTRIBUTE_IS_MANAGED, ATTRIBUTE_MEMORY_TYPE, ATTRIBUTE_ORDINAL,
    CAPTURE_IMPLICIT, CAPTURE_NONE, EVENT_BLOCKING, EVENT_DISABLE_TIMING, HOST_PORTABLE,
    MEMORY_HOST, NOT_READY, SUCCESS, Table,
};
use crate::error::DriverResult;
use crate::{DriverError, TouchedMemory};

/// The maximum number of errors of rollback calls that are kept for the log.
const NOT_UNDONE_MAX: usize = 16;

/// The maximum length of a device's name.
pub(super) const NAME_LENGTH: usize = 255;

/// The functions of the driver.
pub(super) struct Calls {
    pub(super) table: Table,
    made: AtomicU64,
    /// Errors of rollback calls, kept for the log; see [`Calls::note_not_undone`].
    not_undone: Mutex<Vec<DriverError>>,
    /// Idle events used to wait for streams; at most one per concurrent wait.
    spare_events: Mutex<Vec<usize>>,
}

impl Calls {
    pub(super) fn new(table: Table) -> Self {
        let (not_undone, spare_events) = (Mutex::default(), Mutex::default());
        Self { table, made: AtomicU64::new(0), not_undone, spare_events }
    }

    /// Returns the number of calls made.
    pub(super) fn made(&self) -> u64 {
        self.made.load(Ordering::Relaxed)
    }

    /// Keeps the error of a rollback call. The error is logged once the thread's context and
    /// capture mode are restored, because a log subscriber is foreign code.
    pub(super) fn note_not_undone(&self, error: DriverError) {
        let mut errors = lock(&self.not_undone);
        if errors.len() < NOT_UNDONE_MAX {
            errors.push(error);
        }
    }

    /// Logs failed rollbacks. Call it while no context of this crate is current on the thread.
    pub(super) fn log_not_undone(&self) {
        let errors = std::mem::take(&mut *lock(&self.not_undone));
        for error in errors {
            log!(warn, %error, "rollback of a driver call failed, memory may leak");
        }
    }

    /// Counts a call, and converts its result.
    pub(super) fn done(&self, call: &'static str, code: u32) -> DriverResult {
        self.made.fetch_add(1, Ordering::Relaxed);
        match code {
            SUCCESS => Ok(()),
            code => {
                let name = || self.error_name(code);
                Err(DriverError::of_cuda_named(call, code, ByteSize::ZERO, name))
            }
        }
    }

    /// Returns the driver's name of a result; `None` if the driver has none.
    fn error_name(&self, code: u32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: any code may be asked for; it writes one pointer, null for a code without a name.
        let _ = unsafe { (self.table.error_name?)(code, &raw mut text) };
        if text.is_null() {
            return None;
        }
        // SAFETY: not null, and then a null-terminated string of the library (cuda.h), which stays
        // open for the rest of the process.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    pub(super) fn device_name(&self, device: i32) -> DriverResult<String> {
        let mut name = [0; NAME_LENGTH];
        self.read_name(&mut name, i32::try_from(NAME_LENGTH).unwrap_or(i32::MAX), device)?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Returns the free and the total memory of the device.
    pub(super) fn memory_info(&self) -> DriverResult<(ByteSize, ByteSize)> {
        let (mut free, mut total) = (0, 0);
        self.read_memory(&mut free, &mut total)?;
        Ok((ByteSize::of(free), ByteSize::of(total)))
    }

    /// Returns a number of bytes of a pool: an attribute of type `cuuint64_t`.
    pub(super) fn pool_bytes(&self, pool: usize, attribute: i32) -> DriverResult<u64> {
        let mut value = 0;
        self.read_pool(pool, attribute, &mut value)?;
        Ok(value)
    }

    /// Sets an attribute of type `cuuint64_t`.
    pub(super) fn set_pool_bytes(
        &self,
        pool: usize,
        attribute: i32,
        mut value: u64,
    ) -> DriverResult {
        self.write_pool(pool, attribute, &mut value)
    }

    /// Returns a number of bytes that a device caches for graphs.
    pub(super) fn graph_bytes(&self, device: i32, attribute: i32) -> DriverResult<u64> {
        let mut value = 0;
        self.read_graphs(device, attribute, &mut value)?;
        Ok(value)
    }

    /// Reads an attribute of the memory at an address. Fails if the driver knows no memory there.
    fn pointer<T: Default>(&self, attribute: i32, at: u64) -> DriverResult<T> {
        let call = "cuPointerGetAttribute";
        let function = self.table.pointer_attribute;
        let function = function.ok_or(DriverError::Unsupported { what: call })?;
        let mut value = T::default();
        // SAFETY: the caller names an attribute of type `T`, which is a number; an address that the
        // driver does not know is an error.
        let code = unsafe { function((&raw mut value).cast(), attribute, at) };
        self.done(call, code)?;
        Ok(value)
    }

    /// Returns the owner of the memory at an address. Fails if the driver knows no memory there.
    pub(super) fn owner_of(&self, at: u64) -> DriverResult<PointerOwner> {
        let ordinal: i32 = self.pointer(ATTRIBUTE_ORDINAL, at)?;
        let kind: u32 = self.pointer(ATTRIBUTE_MEMORY_TYPE, at)?;
        let is_managed = self.pointer::<u32>(ATTRIBUTE_IS_MANAGED, at).is_ok_and(|it| it != 0);
        let context = self.pointer(ATTRIBUTE_CONTEXT, at).unwrap_or(0);
        Ok(PointerOwner { context, ordinal, is_host: kind == MEMORY_HOST && !is_managed })
    }

    /// Allocates page-locked memory of the host, all bytes zero.
    pub(super) fn host_memory(&self, size: ByteSize) -> DriverResult<NonNull<u8>> {
        let none = || DriverError::OutOfMemory { call: "cuMemHostAlloc", requested: size };
        let bytes = size.as_usize().ok_or_else(none)?;
        let mut at = 0;
        self.host_alloc(&mut at, bytes, HOST_PORTABLE).map_err(|error| error.sized(size))?;
        let at = NonNull::new(std::ptr::with_exposed_provenance_mut::<u8>(at)).ok_or_else(none)?;
        // SAFETY: the driver has just allocated `bytes` bytes of host memory there, exclusively for
        // this call.
        unsafe { at.write_bytes(0, bytes) };
        Ok(at)
    }

    /// Queues a copy of device memory to host memory.
    ///
    /// # Safety
    /// Until the copy is complete, `size` bytes at `to` exist, and nothing else accesses them.
    pub(super) unsafe fn read_device(
        &self,
        from: u64,
        to: NonNull<u8>,
        size: ByteSize,
        stream: usize,
    ) -> DriverResult {
        let bytes = size.as_usize().unwrap_or(usize::MAX);
        // SAFETY: so many bytes of host memory, which the driver writes (contract of this
        // function).
        let done = unsafe { self.copy_to_host(to.as_ptr(), from, bytes, stream) };
        done.map_err(|error| error.sized(size))
    }

    /// Queues a copy of host memory to device memory.
    ///
    /// # Safety
    /// Until the copy is complete, `size` bytes at `from` exist and are not written to.
    pub(super) unsafe fn write_device(
        &self,
        from: NonNull<u8>,
        to: u64,
        size: ByteSize,
        stream: usize,
    ) -> DriverResult {
        let bytes = size.as_usize().unwrap_or(usize::MAX);
        // SAFETY: so many bytes of host memory, which the driver reads (contract of this function).
        let done = unsafe { self.copy_to_device(to, from.as_ptr(), bytes, stream) };
        done.map_err(|error| error.sized(size))
    }

    /// Page-locks memory of this process for every context.
    pub(super) fn register(&self, memory: &TouchedMemory) -> DriverResult {
        // SAFETY: the memory is mapped, and stays so until it is unregistered: its owner unmaps it
        // only afterwards. The flag has the value of `CU_MEMHOSTREGISTER_PORTABLE`.
        let done = unsafe { self.host_register(memory.start(), memory.bytes(), HOST_PORTABLE) };
        done.map_err(|error| error.sized(ByteSize::of(memory.bytes())))
    }

    /// Waits until all work queued on a stream now is complete. The host sleeps meanwhile:
    /// `cuStreamSynchronize` waits as the flags of the primary context specify, which by default
    /// spins a core, and other code shares the context, so the flags stay unchanged. So a blocking
    /// event is recorded and waited for. `cuStreamSynchronize` is called only if there is no event.
    pub(super) fn stream_synchronize(&self, stream: usize) -> DriverResult {
        let spare = lock(&self.spare_events).pop();
        let Some(event) = spare.or_else(|| self.event_create().ok()) else {
            return self.stream_spin(stream);
        };
        let recorded = self.event_record(event, stream);
        let waited = recorded.and_then(|()| self.event_synchronize(event));
        lock(&self.spare_events).push(event);
        waited
    }

    /// Destroys the events that were used to wait for streams.
    pub(super) fn destroy_spare_events(&self) {
        let events = std::mem::take(&mut *lock(&self.spare_events));
        for event in events {
            let _ = self.event_destroy(event);
        }
    }

    pub(super) fn stream_is_capturing(&self, stream: usize) -> DriverResult<bool> {
        let mut status = CAPTURE_NONE;
        match self.capture_status(stream, &mut status) {
            // The legacy default stream waits for a stream that captures.
            Err(error) if error.code() == Some(CAPTURE_IMPLICIT) => Ok(true),
            answer => answer.map(|()| status != CAPTURE_NONE),
        }
    }

    /// Creates an event for which the host sleeps while it waits.
    pub(super) fn event_create(&self) -> DriverResult<usize> {
        self.create_event(EVENT_BLOCKING | EVENT_DISABLE_TIMING)
    }

    pub(super) fn event_query(&self, event: usize) -> DriverResult<bool> {
        let call = "cuEventQuery";
        let function = self.table.query_event.ok_or(DriverError::Unsupported { what: call })?;
        // SAFETY: an event, as the head says.
        let code = unsafe { function(event) };
        let is_ready = code != NOT_READY;
        self.done(call, if is_ready { code } else { SUCCESS }).map(|()| is_ready)
    }
}

/// The owner of the memory at an address.
#[derive(Clone, Copy, Debug)]
pub(super) struct PointerOwner {
    /// The context; 0 for memory that belongs to no single context.
    pub(super) context: usize,
    /// The device; for page-locked host memory, the device of the context that locked it.
    pub(super) ordinal: i32,
    /// `true` for host memory that is not managed.
    pub(super) is_host: bool,
}

lowtide_core::debug_as!(Calls, |it| made: it.made());
