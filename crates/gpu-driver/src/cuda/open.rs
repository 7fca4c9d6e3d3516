//! Opens a CUDA device: initializes the driver, finds the device, and selects its memory backend.
//!
//! Invariant: a failed open holds nothing.
#![expect(unsafe_code, reason = "copying from and to page-locked memory")]

use std::collections::VecDeque;
use std::fmt;

use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

use super::calls::Calls;
use super::context::DeviceContext;
use super::driver::{CudaDriver, Stores};
use super::library::{LIBRARIES, Look, search};
use super::memory::{BackendMemory, BackendSource, Mapping, MemoryPool, UNIT, UNIT_MIN};
use super::table::{
    ATTRIBUTE_INTEGRATED, ATTRIBUTE_MANAGED, ATTRIBUTE_POOLS, ATTRIBUTE_RDMA,
    ATTRIBUTE_VIRTUAL_MEMORY, Find, Table,
};
use crate::error::{DriverResult, STUB_LIBRARY};
use crate::{Backend, DeviceUuid, DriverError};

/// A choice of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The device with this ordinal, among those visible to this process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
}

/// Options for opening a device.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CudaOptions {
    /// The device. Default: the first visible one.
    pub device: DeviceChoice,
    /// The memory backend. Default: `None`, the first that works of virtual memory, pool and plain
    /// memory. Virtual memory is skipped if there are fewer addresses than the memory needs.
    pub backend: Option<Backend>,
    /// `true` for managed memory: the driver moves its pages between device and host, so there may
    /// be more of it than the device has, at the price of page faults. This crate never accesses it
    /// from the host. No other backend than plain memory is tried. Default: `false`.
    pub managed: bool,
    /// The unit in which memory is allocated and released: a power of two, at least the device's
    /// granularity, and at least 64 KiB for the pool and plain backends. A large unit needs fewer
    /// calls, a small one leaves less memory unused. Default: `None`, the device's granularity (2
    /// MiB on data-centre devices), or 2 MiB for the pool and plain backends.
    pub handle: Option<ByteSize>,
    /// The maximum memory that the private pool may hold, in use and cached, with
    /// [`Backend::CudaPool`]. It has no effect with a driver older than CUDA 12.2, or if the device
    /// refuses a private pool and its default pool is used; an arena's limit applies in any case.
    /// Default: `None`, no limit.
    pub pool_limit: Option<ByteSize>,
    /// The ordinals, among the visible devices, of others that read and write the memory
    /// (`cuMemSetAccess`), for as long as it is committed. `cudaDeviceEnablePeerAccess` has no
    /// effect on virtual memory, and no other backend is tried. Each commit takes longer, by the
    /// number of devices. Default: none.
    pub peers: &'static [u32],
    /// `true` if network cards may access the memory directly (`gpuDirectRDMACapable`). No other
    /// backend than virtual memory is tried. Default: `false`, because some systems refuse such
    /// memory (WSL 2).
    pub rdma: bool,
}

impl Default for DeviceChoice {
    /// The first visible device.
    fn default() -> Self {
        Self::Ordinal(0)
    }
}

impl CudaDriver {
    /// Returns the devices visible to this process, in the order of their ordinals.
    ///
    /// Looks for the driver with the loader alone: it never panics and calls nothing of cudarc. The
    /// library stays open for the rest of the process, because `cuInit` may start threads in it.
    ///
    /// Cost: without a driver, one search of the loader's path for each name (well under a
    /// millisecond). With a driver, the first call initializes it: that opens device files and can
    /// take from tens of milliseconds to seconds (longest if no other process holds the device and
    /// the kernel driver is not persistent; not measured). Call it at start, never per request. It
    /// blocks; don't call it between `fork` and `exec`.
    ///
    /// # Errors
    /// [`DriverError::NoLibrary`], [`DriverError::NoFunction`] or [`DriverError::NoDevice`] without
    /// a driver or device; or that of a call.
    pub fn devices() -> Result<Vec<CudaDevice>, DriverError> {
        let calls = start(&|_| true)?;
        list(&calls)
    }

    /// Opens a device: retains its primary context, which is shared within the process, and tests
    /// its memory once.
    ///
    /// Cost: the first open in a process creates the context, which takes from 0.1 s to several
    /// seconds, and uses several hundred MiB of the device for the life of the process.
    ///
    /// # Errors
    /// [`DriverError`] if there is no such device or no usable memory. Nothing is held then.
    pub fn open(options: CudaOptions) -> Result<Self, DriverError> {
        Self::open_with(options, &|_| true)
    }

    /// Like [`CudaDriver::open`], with some functions of the library hidden; for tests.
    ///
    /// # Errors
    /// The errors of [`CudaDriver::open`].
    #[doc(hidden)]
    pub fn open_with(
        options: CudaOptions,
        has: &dyn Fn(&str) -> bool,
    ) -> Result<Self, DriverError> {
        let calls = start(has)?;
        let device = choose(&calls, options.device)?;
        let found = climb(calls, device, options)?;
        for (backend, cause) in &found.skipped {
            log!(info, %backend, %cause, "CUDA backend skipped");
        }
        Ok(found)
    }
}

/// Finds the driver's functions and starts it.
pub(super) fn start(has: &dyn Fn(&str) -> bool) -> DriverResult<Calls> {
    start_one_of(LIBRARIES, has)
}

fn start_one_of(names: &'static [&'static str], has: &dyn Fn(&str) -> bool) -> DriverResult<Calls> {
    let started = search(names, |name, library| {
        let find: Find<'_> = &|name| library.symbol(name).filter(|_| name.to_str().is_ok_and(has));
        match start_with(find) {
            Err(cause) if is_no_driver(&cause) => {
                log!(warn, library = name, %cause, "library skipped: not a CUDA driver");
                Look::Passed(Err(cause))
            }
            started => Look::Found(started),
        }
    });
    started.map_err(|error| DriverError::NoLibrary { tried: names, error })?
}

fn start_with(find: Find<'_>) -> DriverResult<Calls> {
    let table = Table::find(find);
    table.base()?;
    let calls = Calls::new(table);
    calls.init(0)?;
    Ok(calls)
}

/// Returns `true` if a library is not a driver's (a stub, or one without the driver's functions),
/// so that another may be.
fn is_no_driver(error: &DriverError) -> bool {
    matches!(error, DriverError::NoFunction { .. }) || error.code() == Some(i64::from(STUB_LIBRARY))
}

/// Returns the number of visible devices, at least 1.
fn count(calls: &Calls) -> DriverResult<u32> {
    let count = u32::try_from(calls.device_count()?).unwrap_or(0);
    if count == 0 { Err(DriverError::NoDevice) } else { Ok(count) }
}

fn list(calls: &Calls) -> DriverResult<Vec<CudaDevice>> {
    (0..count(calls)?).map(|ordinal| CudaDevice::read(calls, ordinal)).collect()
}

pub(super) fn choose(calls: &Calls, choice: DeviceChoice) -> DriverResult<CudaDevice> {
    match choice {
        DeviceChoice::Ordinal(ordinal) => {
            let count = count(calls)?;
            if ordinal >= count {
                return Err(DriverError::NoSuchDevice { ordinal, count });
            }
            CudaDevice::read(calls, ordinal)
        }
        DeviceChoice::Uuid(uuid) => {
            let devices = list(calls)?;
            let known = devices.iter().map(|device| device.uuid).collect();
            let found = devices.into_iter().find(|device| device.uuid == uuid);
            found.ok_or(DriverError::NoSuchUuid { uuid, known })
        }
    }
}

// The devices visible to this process, by ordinal and by UUID.
//
// The driver itself reads `CUDA_VISIBLE_DEVICES`, so ordinals count visible devices only, and a
// MIG instance is a device with its own UUID. An ordinal may refer to a different device after a
// restart; a UUID does not.
//
// Invariant: a [`CudaDevice`] holds the driver's answers for one ordinal at one time.

/// A device that is visible to this process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct CudaDevice {
    /// The device's ordinal, from 0.
    pub ordinal: u32,
    /// The device's UUID, which stays the same across restarts.
    pub uuid: DeviceUuid,
    /// The product name, such as `NVIDIA H200`.
    pub name: String,
    /// The total memory of the device.
    pub memory: ByteSize,
    /// `true` if the device has no memory of its own and uses the host's, as in a Jetson or a GB10.
    /// `false` for a device with its own memory that shares the host's page tables, such as a GH200
    /// or GB200.
    pub integrated: bool,
}

impl CudaDevice {
    /// Queries the device with this ordinal.
    pub(super) fn read(calls: &Calls, ordinal: u32) -> DriverResult<Self> {
        let device = calls.device(ordinal)?;
        // The UUID of the part of a device that this process sees, if there is one.
        let uuid = match calls.table.part_uuid {
            Some(_) => calls.part_uuid(device)?,
            None => calls.device_uuid(device)?,
        };
        let (uuid, name) = (DeviceUuid::new(uuid), calls.device_name(device)?);
        let memory = ByteSize::of(calls.device_memory(device)?);
        let integrated = calls.device_attribute(ATTRIBUTE_INTEGRATED, device)? == 1;
        Ok(Self { ordinal, uuid, name, memory, integrated })
    }
}

impl fmt::Display for CudaDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "CUDA device {}, {}, {}, {}", self.ordinal, self.name, self.memory, self.uuid)
    }
}

// The backend order: virtual memory, a pool, plain memory. The first that passes a trial is used.
//
// Device attributes are not trusted: some MIG instances report virtual memory and then refuse a
// call, and some refuse pools other than their own. One unit of memory is allocated, written, read
// back and released before an arena is built on it. Each trial is released before the next one
// begins.
//
// Invariant: `climb = Ok => a round trip through that memory returned the data written`.

/// The backends, the best first.
const LADDER: [Backend; 3] = [Backend::CudaVirtualMemory, Backend::CudaPool, Backend::CudaPlain];

/// The expected backends, in messages.
const CUDA_BACKEND: &str = "a CUDA backend: cuda_virtual_memory, cuda_pool or cuda_plain";

/// The first driver that limits a pool: CUDA 12.2.
pub(super) const POOL_LIMITS: u32 = 12_020;

/// A device for which a backend is being selected.
struct Ground {
    device: CudaDevice,
    /// The device's handle.
    number: i32,
    driver_version: u32,
    options: CudaOptions,
}

/// Selects the first backend that works, or the requested one. Creates no context before a backend
/// is found that may work.
pub(super) fn climb(
    calls: Calls,
    device: CudaDevice,
    options: CudaOptions,
) -> DriverResult<CudaDriver> {
    let (ordinal, driver_version) = (device.ordinal, calls.driver_version()?);
    let ground = Ground { number: calls.device(ordinal)?, device, driver_version, options };
    let wanted = wanted(options).map_err(|cause| {
        let skipped = vec![(options.backend.unwrap_or(Backend::CudaPlain), cause)];
        DriverError::NoBackend { device: ordinal, skipped }
    })?;
    // With a choice of backends virtual memory needs as many addresses as the device has memory.
    let addresses = Some(ground.device.memory).filter(|_| wanted.len() > 1);
    let mut queue: VecDeque<_> = wanted.into_iter().map(|it| (it, addresses)).collect();
    let (mut context, mut skipped) = (DeviceContext::new(calls, ground.number), Vec::new());
    while let Some((backend, addresses)) = queue.pop_front() {
        let cause = match offered(context.calls(), backend, &ground) {
            Ok(way) => {
                context.retain()?;
                match take(&context, way, &ground, addresses) {
                    Ok(memory) => {
                        let (device, stores) = (ground.device, Stores::default());
                        return Ok(CudaDriver {
                            context,
                            device,
                            memory,
                            skipped,
                            stores,
                            driver_version,
                        });
                    }
                    Err(cause) => cause,
                }
            }
            Err(error) if is_invalid(&error) => return Err(error),
            Err(cause) => cause,
        };
        if matches!(cause, DriverError::Addresses { .. }) {
            queue.push_back((backend, None)); // better than none
        }
        let is_lost = cause.is_context_lost();
        skipped.push((backend, cause));
        if is_lost {
            break;
        }
    }
    Err(DriverError::NoBackend { device: ordinal, skipped })
}

/// Returns `true` if the request is invalid for every backend.
const fn is_invalid(error: &DriverError) -> bool {
    matches!(
        error,
        DriverError::HandleSize { .. }
            | DriverError::PoolLimit { .. }
            | DriverError::NoPeerAccess { .. }
            | DriverError::NoRdma { .. }
            | DriverError::NoSuchDevice { .. }
    )
}

/// Returns the backends to try, in order.
fn wanted(options: CudaOptions) -> DriverResult<Vec<Backend>> {
    let wrong = |expected| Err(DriverError::WrongBackend { expected });
    let is_shared = options.rdma || !options.peers.is_empty();
    match (options.backend, options.managed) {
        (Some(Backend::Host), _) => wrong(CUDA_BACKEND),
        (None | Some(Backend::CudaVirtualMemory), false) if is_shared => {
            Ok(vec![Backend::CudaVirtualMemory])
        }
        _ if is_shared => wrong("the backend cuda_virtual_memory for peer access and RDMA"),
        (None | Some(Backend::CudaPlain), true) => Ok(vec![Backend::CudaPlain]),
        (Some(_), true) => wrong("the backend cuda_plain for managed memory"),
        (Some(backend), false) => Ok(vec![backend]),
        (None, false) => Ok(LADDER.to_vec()),
    }
}

/// The source of memory, `None` for a pool, which needs a context, and the unit of its sizes.
type OfferedBackend = (Option<BackendSource>, ByteSize);

/// Checks the functions and attributes that a backend needs. Allocates nothing and needs no
/// context.
fn offered(calls: &Calls, backend: Backend, ground: &Ground) -> DriverResult<OfferedBackend> {
    let options = ground.options;
    let has = |attribute| calls.device_attribute(attribute, ground.number).map(|it| it != 0);
    let needs = |attribute, what| match has(attribute)? {
        true => Ok(()),
        false => Err(DriverError::Unsupported { what }),
    };
    match backend {
        Backend::CudaVirtualMemory => {
            calls.table.virtual_memory()?;
            needs(ATTRIBUTE_VIRTUAL_MEMORY, crate::VIRTUAL_MEMORY)?;
            if options.rdma && !has(ATTRIBUTE_RDMA)? {
                return Err(DriverError::NoRdma { device: ground.device.ordinal });
            }
            let mapping = Mapping::new(calls, &accessing(calls, ground)?, options.rdma);
            let granularity = mapping.granularity(calls)?;
            let unit = unit_of(options.handle, granularity, granularity)?;
            Ok((Some(BackendSource::Virtual(mapping)), unit))
        }
        Backend::CudaPool => {
            calls.table.pools()?;
            needs(ATTRIBUTE_POOLS, "memory pools")?;
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            if let Some(requested) = options.pool_limit.filter(|&limit| limit < unit) {
                return Err(DriverError::PoolLimit { requested, unit });
            }
            Ok((None, unit))
        }
        Backend::CudaPlain => {
            calls.table.plain()?;
            let is_managed = options.managed;
            if is_managed {
                calls.table.managed()?;
                needs(ATTRIBUTE_MANAGED, "managed memory")?;
            }
            let unit = unit_of(options.handle, UNIT_MIN, UNIT)?;
            Ok((Some(BackendSource::Plain { is_managed }), unit))
        }
        Backend::Host | Backend::PinnedHost | Backend::Custom => {
            Err(DriverError::WrongBackend { expected: CUDA_BACKEND })
        }
    }
}

/// Returns the handles of the device and of the peers that are to access its memory.
fn accessing(calls: &Calls, ground: &Ground) -> DriverResult<Vec<i32>> {
    let device = ground.device.ordinal;
    let mut accessing = vec![ground.number];
    let mut peers = ground.options.peers.to_vec();
    peers.sort_unstable();
    peers.dedup();
    for peer in peers.into_iter().filter(|&peer| peer != device) {
        let choice = DeviceChoice::Ordinal(peer);
        let number = calls.device(choose(calls, choice)?.ordinal)?;
        if calls.can_access(number, ground.number)? == 0 {
            return Err(DriverError::NoPeerAccess { device, peer });
        }
        accessing.push(number);
    }
    Ok(accessing)
}

/// Returns the unit in which memory is allocated.
fn unit_of(
    asked: Option<ByteSize>,
    granularity: ByteSize,
    usual: ByteSize,
) -> DriverResult<ByteSize> {
    let requested = asked.unwrap_or(usual);
    if requested < granularity || !requested.get().is_power_of_two() {
        return Err(DriverError::HandleSize { requested, granularity });
    }
    Ok(requested)
}

/// Opens a backend and tries it once; virtual memory only if each region of an arena can have this
/// many addresses.
fn take(
    context: &DeviceContext,
    (source, unit): OfferedBackend,
    ground: &Ground,
    addresses: Option<ByteSize>,
) -> DriverResult<BackendMemory> {
    if let Some(source) = source {
        let memory = BackendMemory::new(source, unit);
        if let Some(of_region) = addresses.filter(|_| memory.is_virtual()) {
            check_addresses(context, &memory, of_region)?;
        }
        return tried(context, memory);
    }
    let limit = ground.options.pool_limit.filter(|_| ground.driver_version >= POOL_LIMITS);
    let tried = |pool: DriverResult<MemoryPool>| {
        tried(context, BackendMemory::new(BackendSource::Pool(pool?), unit))
    };
    let own = tried(context.call(|calls| MemoryPool::create(calls, ground.number, limit)));
    own.or_else(|cause| {
        if cause.is_context_lost() || cause.is_out_of_memory() {
            return Err(cause); // another pool has no more memory either
        }
        let shared = tried(context.call(|calls| MemoryPool::of_device(calls, ground.number)));
        let Ok(memory) = shared else { return Err(cause) };
        log!(info, %cause, "own CUDA pool not usable, using the pool of the device");
        Ok(memory)
    })
}

/// Reserves addresses for both regions of an arena, with what a region has beyond its blocks, and
/// releases them.
fn check_addresses(
    context: &DeviceContext,
    memory: &BackendMemory,
    of_region: ByteSize,
) -> DriverResult {
    let size = of_region.saturating_add(ByteSize::new(of_region.get() / 8));
    let size = size.next_multiple_of(memory.unit).unwrap_or(size);
    let reserved = context.call(|calls| {
        let reserved = [(); 2].map(|()| memory.reserve(calls, size));
        for &at in reserved.iter().flatten() {
            memory.unreserve(calls, at, size)?;
        }
        Ok(reserved)
    })?;
    reserved.into_iter().try_for_each(|at| match at {
        Err(error) if error.is_out_of_memory() => Err(DriverError::Addresses { needed: size }),
        at => at.map(drop),
    })
}

/// Returns a private pool that passed a trial.
pub(super) fn try_pool(
    context: &DeviceContext,
    device: i32,
    limit: Option<ByteSize>,
) -> DriverResult<MemoryPool> {
    let pool = context.call(|calls| MemoryPool::create(calls, device, limit))?;
    tried(context, BackendMemory::new(BackendSource::Pool(pool), UNIT_MIN)).map(|_| pool)
}

/// Returns the memory if it passes a round trip; releases it otherwise.
fn tried(context: &DeviceContext, memory: BackendMemory) -> DriverResult<BackendMemory> {
    match round_trip(context, &memory) {
        Ok(()) => Ok(memory),
        Err(cause) => {
            log_undone(memory.close(context));
            Err(cause)
        }
    }
}

/// Logs a failed rollback call, because no caller can receive the error.
pub(super) fn log_undone(outcome: DriverResult) {
    if let Err(error) = outcome {
        log!(warn, %error, "rollback of a driver call failed, memory may leak");
    }
}

/// Allocates one unit of memory, writes it, reads it, and releases it.
fn round_trip(context: &DeviceContext, memory: &BackendMemory) -> DriverResult {
    let (size, stream) = (memory.unit, context.stream);
    let held = context.call(|calls| {
        if memory.is_virtual() {
            let at = memory.reserve(calls, size)?;
            let held = match memory.commit(calls, at, size, size) {
                Ok(()) => {
                    let held = write_and_read(calls, stream, (at.get(), size));
                    // Memory that stays mapped keeps its addresses.
                    memory.decommit(calls, at, size, size)?;
                    held
                }
                Err(error) => Err(error),
            };
            let gone = memory.unreserve(calls, at, size);
            held.and_then(|held| gone.map(|()| held))
        } else {
            let at = memory.create(calls, size, stream)?;
            let held = write_and_read(calls, stream, (at.get(), size));
            let gone = memory.destroy(calls, (at, size), stream);
            let gone = gone.and_then(|()| memory.trim(calls, stream));
            held.and_then(|held| gone.map(|()| held))
        }
    })?;
    if held { Ok(()) } else { Err(DriverError::Contents) }
}

/// Returns `true` if the data read at an address is the data written there.
fn write_and_read(calls: &Calls, stream: usize, (at, unit): (u64, ByteSize)) -> DriverResult<bool> {
    let size = ByteSize::kib(64).min(unit);
    let (locked, length) = (calls.host_memory(size)?, size.as_usize().unwrap_or(0));
    // SAFETY: so many bytes of host memory that only this function has.
    unsafe { locked.write_bytes(0x5A, length) };
    // SAFETY: the memory exists and is not written to until the copy was waited for.
    let written = unsafe { calls.write_device(locked, at, size, stream) }
        .and_then(|()| calls.stream_synchronize(stream));
    // After an error of the wait the copy may still be in progress.
    let read = written.and_then(|()| {
        // SAFETY: as above; no copy is in progress.
        unsafe { locked.write_bytes(0, length) };
        // SAFETY: the memory exists and is not accessed until the copy was waited for.
        unsafe { calls.read_device(at, locked, size, stream) }?;
        calls.stream_synchronize(stream)
    });
    // SAFETY: as above; `host_memory` has initialised every byte.
    let bytes = || unsafe { std::slice::from_raw_parts(locked.as_ptr(), length) };
    let held = read.map(|()| bytes().iter().all(|&byte| byte == 0x5A));
    if held.is_err() && calls.stream_synchronize(stream).is_err() {
        return held; // the host memory stays allocated for the copies
    }
    // SAFETY: memory of `host_memory`, with which every copy is complete.
    let freed = unsafe { calls.host_free(locked.as_ptr()) };
    held.and_then(|held| freed.map(|()| held))
}

#[cfg(test)]
#[expect(unsafe_code, reason = "functions that a driver would have write through their arguments")]
mod tests {
    use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
    use std::ptr::NonNull;

    use super::*;

    unsafe extern "C" fn starts(_flags: c_uint) -> u32 {
        0
    }

    unsafe extern "C" fn is_a_stub(_flags: c_uint) -> u32 {
        STUB_LIBRARY
    }

    unsafe extern "C" fn sees_no_device(_flags: c_uint) -> u32 {
        100
    }

    unsafe extern "C" fn none(_out: *mut c_int) -> u32 {
        0
    }

    unsafe extern "C" fn minus_one(out: *mut c_int) -> u32 {
        // SAFETY: `Calls::device_count` passes a pointer to a local.
        unsafe { out.write(-1) };
        0
    }

    unsafe extern "C" fn fails(_out: *mut c_int) -> u32 {
        999
    }

    unsafe extern "C" fn names_only_34(code: u32, out: *mut *const c_char) -> u32 {
        if code == STUB_LIBRARY {
            // SAFETY: `Calls::error_name` passes a pointer to a local.
            unsafe { out.write(c"CUDA_ERROR_STUB_LIBRARY".as_ptr()) };
            return 0;
        }
        1
    }

    /// Lists the devices of a driver with these functions; no other one is called.
    fn devices(
        init: unsafe extern "C" fn(c_uint) -> u32,
        device_count: unsafe extern "C" fn(*mut c_int) -> u32,
    ) -> DriverError {
        let find = |name: &CStr| match name.to_bytes() {
            b"cuInit" => NonNull::new(init as *mut c_void),
            b"cuDeviceGetCount" => NonNull::new(device_count as *mut c_void),
            b"cuGetErrorName" => NonNull::new(names_only_34 as *mut c_void),
            _ => Some(NonNull::dangling()),
        };
        start_with(&find).and_then(|calls| list(&calls)).expect_err("no device")
    }

    #[test]
    fn a_machine_without_a_driver_is_an_answer_and_no_panic() {
        let found = CudaDriver::devices();
        assert_eq!(found, CudaDriver::devices(), "a second look finds the same");
        match found {
            Ok(devices) => assert!(!devices.is_empty()),
            Err(error) => println!("skipped: no device ({error})"),
        }
    }

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_loaders_words() {
        static NAMES: [&str; 2] = ["liblowtide-absent.so.1", "liblowtide-absent.so"];
        let found = start_one_of(&NAMES, &|_| true).expect_err("no library");
        let DriverError::NoLibrary { tried, error } = &found else { panic!("{found}") };
        assert_eq!(*tried, NAMES);
        assert_eq!(error.matches("cannot open").count(), 1, "{error}");
        let begin =
            "no CUDA driver library found (tried 2 names): liblowtide-absent.so: cannot open";
        assert!(found.to_string().starts_with(begin), "{found}");
    }

    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    #[test]
    fn a_library_that_is_no_driver_is_named_by_the_missing_symbol() {
        static NAMES: [&str; 2] = ["liblowtide-absent.so", "libc.so.6"];
        let found = start_one_of(&NAMES, &|_| true).err();
        assert_eq!(found, Some(DriverError::NoFunction { function: "cuInit" }));
    }

    #[test]
    fn a_count_of_zero_or_less_is_no_device() {
        for count in [none, minus_one] {
            assert_eq!(devices(starts, count), DriverError::NoDevice);
        }
        assert_eq!(devices(sees_no_device, none), DriverError::NoDevice);
    }

    #[test]
    fn a_failing_call_is_named_with_its_code() {
        let stub = devices(is_a_stub, none).to_string();
        let begin = "cuInit failed: CUDA_ERROR_STUB_LIBRARY: ";
        assert!(stub.starts_with(begin) && stub.contains("LD_LIBRARY_PATH"), "{stub}");
        let count = devices(starts, fails).to_string();
        assert_eq!(count, "cuDeviceGetCount failed: unnamed (code 999)");
    }
}
