//! Opens a CUDA device: initializes the driver, finds the device, and selects its memory backend.
//!
//! Invariant: a failed open holds nothing.

use super::calls::Calls;
use super::device::CudaDevice;
use super::driver::CudaDriver;
use super::ladder::climb;
use super::library::{LIBRARIES, Look, search};
use super::table::{Find, Table};
use crate::error::STUB_LIBRARY;
use crate::{Backend, DeviceUuid, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// A choice of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The device with this ordinal, among those visible to this process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
}

/// The kind of memory that the plain backend allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of the device.
    #[default]
    Device,
    /// Managed memory: the driver moves its pages between device and host, so there may be more of
    /// it than the device has, at the price of page faults. Available with [`Backend::CudaPlain`]
    /// only; this crate never accesses it from the host.
    Managed,
}

/// A set of devices by their ordinals, among those visible to this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSet(u128);

impl DeviceSet {
    /// Creates the set of these ordinals.
    ///
    /// # Panics
    /// If an ordinal is above 127.
    #[must_use]
    pub const fn of(ordinals: &[u32]) -> Self {
        let (mut set, mut at) = (0, 0);
        while at < ordinals.len() {
            assert!(ordinals[at] < u128::BITS, "an ordinal above 127");
            set |= 1 << ordinals[at];
            at += 1;
        }
        Self(set)
    }

    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the ordinals in ascending order.
    pub(super) fn ordinals(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |ordinal| self.0 & (1 << ordinal) != 0)
    }
}

/// Options for opening a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// The device. Default: the first visible one.
    pub device: DeviceChoice,
    /// The memory backend. Default: `None`, the first that works of virtual memory, pool and plain
    /// memory. Virtual memory is skipped if there are fewer addresses than the memory needs.
    pub backend: Option<Backend>,
    /// The kind of plain memory. Default: device memory. With managed memory no other backend is
    /// tried.
    pub memory: MemoryKind,
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
    /// Other devices that read and write the memory (`cuMemSetAccess`), for as long as it is
    /// committed. `cudaDeviceEnablePeerAccess` has no effect on virtual memory, and no other
    /// backend is tried. Each commit takes longer, by the number of devices. Default: none.
    pub peers: DeviceSet,
    /// `true` if network cards may access the memory directly (`gpuDirectRDMACapable`). No other
    /// backend than virtual memory is tried. Default: `false`, because some systems refuse such
    /// memory (WSL 2).
    pub rdma: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Ordinal(0),
            backend: None,
            memory: MemoryKind::Device,
            handle: None,
            pool_limit: None,
            peers: DeviceSet::default(),
            rdma: false,
        }
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
pub(super) fn start(has: &dyn Fn(&str) -> bool) -> Result<Calls, DriverError> {
    start_one_of(LIBRARIES, has)
}

fn start_one_of(
    names: &'static [&'static str],
    has: &dyn Fn(&str) -> bool,
) -> Result<Calls, DriverError> {
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

fn start_with(find: Find<'_>) -> Result<Calls, DriverError> {
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
fn count(calls: &Calls) -> Result<u32, DriverError> {
    let count = u32::try_from(calls.device_count()?).unwrap_or(0);
    if count == 0 { Err(DriverError::NoDevice) } else { Ok(count) }
}

fn list(calls: &Calls) -> Result<Vec<CudaDevice>, DriverError> {
    (0..count(calls)?).map(|ordinal| CudaDevice::read(calls, ordinal)).collect()
}

pub(super) fn choose(calls: &Calls, choice: DeviceChoice) -> Result<CudaDevice, DriverError> {
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
