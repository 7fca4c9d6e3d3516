//! Calls of the CUDA driver, one function each, with typed errors.
//!
//! This layer makes no decisions and keeps only counts. Each call works in the thread's current
//! context, which the caller sets ([`Context`](super::context::Context)). The calls for virtual
//! memory are in [`mapping`](super::mapping); calls for one backend are available only with that
//! backend.
//!
//! Safety, for all calls here: the functions are those of cuda.h ([`Table`]), and any thread may
//! call them. Out pointers point to locals, or to buffers whose length is passed with them. A
//! device address is a number: a wrong one is a device error and touches no memory of this process.
//! Every stream or event was created by a call here and not yet destroyed, or the caller of
//! `DeviceArena::lane` vouched for it: the driver's calls for both are `unsafe`.
//!
//! Invariant: `made` counts every call once.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use lowtide_core::log;
use std::ffi::{CStr, c_char, c_void};
use std::fmt;
use std::ops::Range;
use std::ptr::NonNull;

use super::abi::{
    ATTRIBUTE_CONTEXT, ATTRIBUTE_IS_MANAGED, ATTRIBUTE_MEMORY_TYPE, ATTRIBUTE_ORDINAL,
    CAPTURE_IMPLICIT, CAPTURE_NONE, EVENT_BLOCKING, EVENT_DISABLE_TIMING, HOST_PORTABLE,
    MEMORY_HOST, NOT_READY, STREAM_NON_BLOCKING, SUCCESS,
};
use super::table::{Pointer, Table};
use crate::{DriverError, TouchedMemory};
use lowtide_core::bytes::ByteSize;
use lowtide_core::sync::atomic::{AtomicU64, Ordering};
use lowtide_core::sync::{Mutex, lock};

pub(super) type Answer<T = ()> = Result<T, DriverError>;

/// The maximum number of errors of rollback calls that are kept for the log.
const NOT_UNDONE_MAX: usize = 16;

/// The maximum length of a device's name.
const NAME_LENGTH: u8 = 255;

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
    pub(super) fn done(&self, call: &'static str, code: u32, requested: ByteSize) -> Answer {
        self.made.fetch_add(1, Ordering::Relaxed);
        match code {
            SUCCESS => Ok(()),
            code => {
                let name = || self.error_name(code);
                Err(DriverError::of_cuda_named(call, code, requested, name))
            }
        }
    }

    /// Returns the driver's name of a result; `None` if the driver has none.
    pub(super) fn error_name(&self, code: u32) -> Option<String> {
        let mut text = std::ptr::null();
        // SAFETY: any code may be asked for; it writes one pointer, null for a code without a name.
        let _ = unsafe { (self.table.base.error_name)(code, &raw mut text) };
        if text.is_null() {
            return None;
        }
        // SAFETY: not null, and then a null-terminated string of the library (cuda.h), which stays
        // open for the rest of the process.
        let text = unsafe { CStr::from_ptr(text) };
        Some(text.to_string_lossy().into_owned())
    }

    fn plain(&self, call: &'static str, code: u32) -> Answer {
        self.done(call, code, ByteSize::ZERO)
    }

    pub(super) fn init(&self) -> Answer {
        // SAFETY: cuda.h: the flags "must be 0"; it may be called again.
        let code = unsafe { (self.table.base.init)(0) };
        self.plain("cuInit", code)
    }

    pub(super) fn driver_version(&self) -> Answer<u32> {
        let mut version = 0;
        // SAFETY: it writes one int.
        let code = unsafe { (self.table.base.driver_version)(&raw mut version) };
        self.plain("cuDriverGetVersion", code)?;
        Ok(u32::try_from(version).unwrap_or(0))
    }

    pub(super) fn device_count(&self) -> Answer<u32> {
        let mut count = 0;
        // SAFETY: it writes one int.
        let code = unsafe { (self.table.base.device_count)(&raw mut count) };
        self.plain("cuDeviceGetCount", code)?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Returns the device with this number, among those visible to this process.
    pub(super) fn device(&self, ordinal: u32) -> Answer<i32> {
        let mut device = 0;
        let ordinal = i32::try_from(ordinal).unwrap_or(i32::MAX);
        // SAFETY: it writes one int; a number without a device is an error.
        let code = unsafe { (self.table.base.device)(&raw mut device, ordinal) };
        self.plain("cuDeviceGet", code)?;
        Ok(device)
    }

    pub(super) fn device_name(&self, device: i32) -> Answer<String> {
        let mut name = [0_u8; NAME_LENGTH as usize];
        let at = name.as_mut_ptr().cast::<c_char>();
        // SAFETY: it writes at most so many characters, a zero among them, as the third says.
        let code = unsafe { (self.table.base.device_name)(at, i32::from(NAME_LENGTH), device) };
        self.plain("cuDeviceGetName", code)?;
        let end = name.iter().position(|&byte| byte == 0).unwrap_or(name.len());
        Ok(String::from_utf8_lossy(&name[..end]).into_owned())
    }

    /// Returns the UUID of the device, or of the part of it that this process sees.
    pub(super) fn device_uuid(&self, device: i32) -> Answer<[u8; 16]> {
        let mut uuid = [0; 16];
        let function = self.table.share.map_or(self.table.base.device_uuid, |it| it.device_uuid);
        // SAFETY: it writes 16 bytes.
        let code = unsafe { function(&raw mut uuid, device) };
        self.plain("cuDeviceGetUuid", code)?;
        Ok(uuid)
    }

    pub(super) fn device_attribute(&self, attribute: i32, device: i32) -> Answer<i32> {
        let mut value = 0;
        // SAFETY: it writes one int; an attribute that it does not know is an error.
        let code = unsafe { (self.table.base.device_attribute)(&raw mut value, attribute, device) };
        self.plain("cuDeviceGetAttribute", code)?;
        Ok(value)
    }

    /// Returns `true` if a device can access memory of another one.
    ///
    /// # Errors
    /// The driver's; `Unsupported` if it lacks the function.
    pub(super) fn can_access_peer(&self, device: i32, of: i32) -> Answer<bool> {
        let (mut can, call) = (0, "cuDeviceCanAccessPeer");
        let peers = self.table.peers.map_err(|_| DriverError::Unsupported { what: call })?;
        // SAFETY: it writes one int.
        let code = unsafe { (peers.can_access)(&raw mut can, device, of) };
        self.plain(call, code)?;
        Ok(can != 0)
    }

    pub(super) fn device_memory(&self, device: i32) -> Answer<ByteSize> {
        let mut bytes = 0;
        // SAFETY: it writes one size.
        let code = unsafe { (self.table.base.device_memory)(&raw mut bytes, device) };
        self.plain("cuDeviceTotalMem", code)?;
        Ok(ByteSize::of(bytes))
    }

    pub(super) fn context_retain(&self, device: i32) -> Answer<usize> {
        let mut context = 0;
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.table.base.context_retain)(&raw mut context, device) };
        self.plain("cuDevicePrimaryCtxRetain", code)?;
        Ok(context)
    }

    pub(super) fn context_release(&self, device: i32) -> Answer {
        // SAFETY: balances a retain: contexts are counted, and nothing of this crate uses it
        // afterwards.
        let code = unsafe { (self.table.base.context_release)(device) };
        self.plain("cuDevicePrimaryCtxRelease", code)
    }

    /// Returns the context that is current in this thread; 0 for none.
    pub(super) fn context_current(&self) -> Answer<usize> {
        let mut context = 0;
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.table.base.context_current)(&raw mut context) };
        self.plain("cuCtxGetCurrent", code)?;
        Ok(context)
    }

    pub(super) fn context_set(&self, context: usize) -> Answer {
        // SAFETY: a context that is retained, or that was current before.
        let code = unsafe { (self.table.base.context_set)(context) };
        self.plain("cuCtxSetCurrent", code)
    }

    /// Sets this thread's mode towards captures of graphs (`CUstreamCaptureMode`). Returns the old
    /// mode.
    pub(super) fn exchange_capture_mode(&self, mode: u32) -> Answer<u32> {
        let mut mode = mode;
        // SAFETY: it reads one enum of 32 bits and writes one in its place.
        let code = unsafe { (self.table.base.capture_mode)(&raw mut mode) };
        self.plain("cuThreadExchangeStreamCaptureMode", code)?;
        Ok(mode)
    }

    /// Waits for all work of the context as the context's flags specify. The primary context is
    /// shared with other code, so its flags stay unchanged.
    pub(super) fn context_synchronize(&self) -> Answer {
        // SAFETY: no precondition.
        let code = unsafe { (self.table.base.context_synchronize)() };
        self.plain("cuCtxSynchronize", code)
    }

    /// Returns the free and the total memory of the device.
    pub(super) fn memory_info(&self) -> Answer<(ByteSize, ByteSize)> {
        let (mut free, mut total) = (0, 0);
        // SAFETY: it writes two sizes.
        let code = unsafe { (self.table.base.memory_info)(&raw mut free, &raw mut total) };
        self.plain("cuMemGetInfo", code)?;
        Ok((ByteSize::of(free), ByteSize::of(total)))
    }

    /// Returns the owner of the memory at an address. Fails if the driver knows no memory there.
    pub(super) fn owner_of(&self, at: u64) -> Answer<PointerOwner> {
        let (call, Ok(Pointer { attribute })) = ("cuPointerGetAttribute", self.table.pointer)
        else {
            return Err(DriverError::Unsupported { what: "cuPointerGetAttribute" });
        };
        let (mut context, mut ordinal) = (0_usize, 0_i32);
        let (mut kind, mut managed) = (0_u32, 0_u32);
        // SAFETY: for this attribute it writes one int; an address that it does not know is an
        // error.
        let code = unsafe { attribute((&raw mut ordinal).cast(), ATTRIBUTE_ORDINAL, at) };
        self.plain(call, code)?;
        // SAFETY: as above: one enum of 32 bits.
        let code = unsafe { attribute((&raw mut kind).cast(), ATTRIBUTE_MEMORY_TYPE, at) };
        self.plain(call, code)?;
        // SAFETY: as above: one 32-bit boolean; it stays zero if the driver writes nothing.
        let code = unsafe { attribute((&raw mut managed).cast(), ATTRIBUTE_IS_MANAGED, at) };
        let is_managed = self.plain(call, code).is_ok() && managed != 0;
        // SAFETY: for this attribute the driver writes one pointer, into an integer of the same
        // size; it stays zero if the driver writes nothing.
        let code = unsafe { attribute((&raw mut context).cast(), ATTRIBUTE_CONTEXT, at) };
        let context = self.plain(call, code).map_or(0, |()| context);
        Ok(PointerOwner { context, ordinal, is_host: kind == MEMORY_HOST && !is_managed })
    }

    /// Allocates page-locked memory of the host, all bytes zero.
    pub(super) fn host_alloc(&self, size: ByteSize) -> Answer<Locked> {
        let (mut at, call) = (std::ptr::null_mut::<c_void>(), "cuMemHostAlloc");
        let none = || DriverError::OutOfMemory { call, requested: size };
        let bytes = size.as_usize().ok_or_else(none)?;
        // SAFETY: it writes one pointer.
        let code = unsafe { (self.table.base.host_alloc)(&raw mut at, bytes, HOST_PORTABLE) };
        self.done(call, code, size)?;
        let at = NonNull::new(at.cast::<u8>()).ok_or_else(none)?;
        // SAFETY: the driver has just allocated `bytes` bytes of host memory there, exclusively for
        // this call.
        unsafe { at.write_bytes(0, bytes) };
        Ok(Locked { at: at.as_ptr().expose_provenance(), bytes })
    }

    pub(super) fn host_free(&self, locked: &Locked) -> Answer {
        // SAFETY: `host_alloc` returned it and it is not freed yet; the arena or the pool, which
        // hold the key, have proved that it is no longer used.
        let code = unsafe { (self.table.base.host_free)(locked.start().cast()) };
        self.plain("cuMemFreeHost", code)
    }

    /// Page-locks memory of this process for every context.
    pub(super) fn host_register(&self, memory: &TouchedMemory) -> Answer {
        let (at, bytes) = (memory.start().cast(), memory.bytes());
        // SAFETY: the memory is mapped, and stays so until it is unregistered: its owner unmaps it
        // only afterwards. The flag has the value of `CU_MEMHOSTREGISTER_PORTABLE`.
        let code = unsafe { (self.table.base.host_register)(at, bytes, HOST_PORTABLE) };
        self.done("cuMemHostRegister", code, ByteSize::of(bytes))
    }

    pub(super) fn host_unregister(&self, memory: &TouchedMemory) -> Answer {
        // SAFETY: registered by `host_register` and not unregistered yet; the arena, which holds
        // the key, has proved that no copy uses it.
        let code = unsafe { (self.table.base.host_unregister)(memory.start().cast()) };
        self.plain("cuMemHostUnregister", code)
    }

    pub(super) fn copy_on_device(&self, from: u64, to: u64, bytes: usize, stream: usize) -> Answer {
        // SAFETY: as the head of this file says: two device addresses and a stream.
        let code = unsafe { (self.table.base.copy_on_device)(to, from, bytes, stream) };
        self.done("cuMemcpyDtoDAsync", code, ByteSize::of(bytes))
    }

    /// Queues a copy into a part of host memory, which exists and is not read meanwhile.
    pub(super) fn copy_to_host(
        &self,
        from: u64,
        (to, part): (&Locked, Range<usize>),
        stream: usize,
    ) -> Answer {
        let (to, bytes) = to.part(part)?;
        // SAFETY: `to` points to `bytes` bytes of host memory, to which no slice exists. It is
        // freed only after the host has seen the end of all copies, as the caller guarantees by its
        // key.
        let code = unsafe { (self.table.base.copy_to_host)(to, from, bytes, stream) };
        self.done("cuMemcpyDtoHAsync", code, ByteSize::of(bytes))
    }

    /// Queues a copy of a part of host memory, which exists and is not written meanwhile.
    pub(super) fn copy_to_device(
        &self,
        (from, part): (&Locked, Range<usize>),
        to: u64,
        stream: usize,
    ) -> Answer {
        let (from, bytes) = from.part(part)?;
        // SAFETY: as `copy_to_host`.
        let code = unsafe { (self.table.base.copy_to_device)(to, from, bytes, stream) };
        self.done("cuMemcpyHtoDAsync", code, ByteSize::of(bytes))
    }

    pub(super) fn stream_create(&self) -> Answer<usize> {
        let mut stream = 0;
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.table.base.stream_create)(&raw mut stream, STREAM_NON_BLOCKING) };
        self.plain("cuStreamCreate", code)?;
        Ok(stream)
    }

    pub(super) fn stream_destroy(&self, stream: usize) -> Answer {
        // SAFETY: a stream, as the head says; its maker uses it no more.
        let code = unsafe { (self.table.base.stream_destroy)(stream) };
        self.plain("cuStreamDestroy", code)
    }

    /// Waits until all work queued on a stream now is complete. The host sleeps meanwhile:
    /// `cuStreamSynchronize` waits as the flags of the primary context specify, which by default
    /// spins a core, and other code shares the context, so the flags stay unchanged. So a blocking
    /// event is recorded and waited for. `cuStreamSynchronize` is called only if there is no event.
    pub(super) fn stream_synchronize(&self, stream: usize) -> Answer {
        let spare = lock(&self.spare_events).pop();
        let Some(event) = spare.or_else(|| self.event_create().ok()) else {
            // SAFETY: a stream, as the head says.
            let code = unsafe { (self.table.base.stream_synchronize)(stream) };
            return self.plain("cuStreamSynchronize", code);
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

    pub(super) fn stream_wait_event(&self, stream: usize, event: usize) -> Answer {
        // SAFETY: a stream and an event, as the head says; no flags.
        let code = unsafe { (self.table.base.stream_wait_event)(stream, event, 0) };
        self.plain("cuStreamWaitEvent", code)
    }

    pub(super) fn stream_is_capturing(&self, stream: usize) -> Answer<bool> {
        let mut status = CAPTURE_NONE;
        // SAFETY: a stream, as the head says; it writes one enum of 32 bits.
        let code = unsafe { (self.table.base.stream_is_capturing)(stream, &raw mut status) };
        // The legacy default stream waits for a stream that captures.
        if code == CAPTURE_IMPLICIT {
            return Ok(true);
        }
        self.plain("cuStreamIsCapturing", code)?;
        Ok(status != CAPTURE_NONE)
    }

    /// Creates an event for which the host sleeps while it waits.
    pub(super) fn event_create(&self) -> Answer<usize> {
        let (mut event, flags) = (0, EVENT_BLOCKING | EVENT_DISABLE_TIMING);
        // SAFETY: it writes one pointer, into an integer of its size.
        let code = unsafe { (self.table.base.event_create)(&raw mut event, flags) };
        self.plain("cuEventCreate", code)?;
        Ok(event)
    }

    pub(super) fn event_destroy(&self, event: usize) -> Answer {
        // SAFETY: an event, as the head says; its maker uses it no more.
        let code = unsafe { (self.table.base.event_destroy)(event) };
        self.plain("cuEventDestroy", code)
    }

    pub(super) fn event_record(&self, event: usize, stream: usize) -> Answer {
        // SAFETY: an event and a stream, as the head says.
        let code = unsafe { (self.table.base.event_record)(event, stream) };
        self.plain("cuEventRecord", code)
    }

    pub(super) fn event_query(&self, event: usize) -> Answer<bool> {
        // SAFETY: an event, as the head says.
        let code = unsafe { (self.table.base.event_query)(event) };
        if code == NOT_READY {
            return self.plain("cuEventQuery", SUCCESS).map(|()| false);
        }
        self.plain("cuEventQuery", code).map(|()| true)
    }

    pub(super) fn event_synchronize(&self, event: usize) -> Answer {
        // SAFETY: an event, as the head says.
        let code = unsafe { (self.table.base.event_synchronize)(event) };
        self.plain("cuEventSynchronize", code)
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

/// Memory of the host by its address, page-locked if it is from [`Calls::host_alloc`]. Dropping it
/// frees nothing.
#[derive(Debug)]
pub(super) struct Locked {
    /// The address, with exposed provenance for all of the memory.
    at: usize,
    bytes: usize,
}

impl Locked {
    /// Wraps memory that [`Calls::host_alloc`] returned, or a part of a host buffer.
    pub(super) fn of(at: NonNull<u8>, size: ByteSize) -> Self {
        let bytes = size.as_usize().unwrap_or(usize::MAX);
        Self { at: at.as_ptr().expose_provenance(), bytes }
    }

    /// Returns the start of the memory.
    pub(super) fn start(&self) -> *mut u8 {
        std::ptr::with_exposed_provenance_mut(self.at)
    }

    /// Returns the range of all bytes.
    pub(super) const fn whole(&self) -> Range<usize> {
        0..self.bytes
    }

    /// Returns the start and the length of a part.
    fn part(&self, part: Range<usize>) -> Answer<(*mut c_void, usize)> {
        if part.start > part.end || part.end > self.bytes {
            let what = "the copy does not fit the host memory";
            return Err(DriverError::Unsupported { what });
        }
        Ok((self.start().wrapping_add(part.start).cast(), part.end - part.start))
    }

    /// Sets every byte to `value`. No other slice of the memory exists, and no copy is in progress.
    pub(super) fn fill(&mut self, value: u8) {
        // SAFETY: it is `bytes` bytes of host memory that this owns.
        unsafe { self.start().write_bytes(value, self.bytes) };
    }

    /// Returns `true` if every byte equals `value`. No writer exists, and no copy is in progress.
    pub(super) fn holds(&self, value: u8) -> bool {
        // SAFETY: it is `bytes` bytes of host memory that this owns, all initialised by
        // `host_alloc`.
        let bytes = unsafe { std::slice::from_raw_parts(self.start().cast_const(), self.bytes) };
        bytes.iter().all(|&byte| byte == value)
    }
}

impl fmt::Debug for Calls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Calls").field("made", &self.made()).finish_non_exhaustive()
    }
}
