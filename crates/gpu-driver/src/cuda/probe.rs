//! Detects a CUDA driver with the loader alone, and describes the result in one sentence.
//!
//! Detection creates no context and allocates nothing on a device; the driver itself reads the
//! environment (`CUDA_VISIBLE_DEVICES`). Result codes stay integers, so that a code newer than this
//! file is a number and not undefined behaviour.
//!
//! Invariant: every exit is a value of [`Probe`]; `Devices { count, .. } => count >= 1`.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::fmt;
use std::ptr::NonNull;

use super::abi::{NO_DEVICE, STUB_LIBRARY, SUCCESS};
use super::library::{LIBRARIES, Library, Look, search};
use crate::error::advice;

/// The result of looking for CUDA. `Display` writes one sentence with the cause.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Probe {
    /// The loader found no driver library, or could not load it.
    NoLibrary {
        /// The names that were tried, in order.
        tried: &'static [&'static str],
        /// The loader's message for the last name.
        error: String,
    },
    /// The library lacks a function that every driver has: it is not a CUDA driver.
    NoSymbol {
        /// The function's name.
        symbol: &'static str,
    },
    /// `cuInit` failed: the driver does not match the kernel module, permission is missing, or the
    /// library is a stub.
    InitFailed {
        /// The driver's result code.
        code: u32,
        /// The code's name in cuda.h, or `unnamed` if the driver does not know it.
        name: String,
    },
    /// A call after `cuInit` failed.
    CallFailed {
        /// The function's name.
        call: &'static str,
        /// The driver's result code.
        code: u32,
        /// The code's name in cuda.h, or `unnamed` if the driver does not know it.
        name: String,
    },
    /// There is a driver, but no device, or none visible to this process.
    NoDevice,
    /// There is at least one device.
    Devices {
        /// The number of devices; at least 1.
        count: u32,
        /// The newest CUDA version that the driver supports: 1000 x major + 10 x minor.
        driver_version: u32,
    },
}

impl Probe {
    /// Returns `true` if there is a device to open.
    #[must_use]
    pub const fn is_usable(&self) -> bool {
        matches!(self, Self::Devices { .. })
    }

    /// Returns `true` if the library is not a driver's (a stub, or one without the driver's
    /// functions), so that another may be.
    pub(super) const fn is_no_driver(&self) -> bool {
        matches!(self, Self::NoSymbol { .. } | Self::InitFailed { code: STUB_LIBRARY, .. })
    }
}

impl fmt::Display for Probe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NoLibrary { tried, error } => {
                let tried = tried.len();
                write!(f, "no CUDA driver library found (tried {tried} names): {error}")
            }
            Self::NoSymbol { symbol } => {
                write!(f, "not a CUDA driver library: it lacks the function {symbol}")
            }
            Self::InitFailed { code, name } => {
                write!(f, "cannot initialize the CUDA driver: cuInit returned {code} ({name})")?;
                advice(*code).map_or(Ok(()), |advice| write!(f, ": {advice}"))
            }
            Self::CallFailed { call, code, name } => {
                write!(f, "CUDA driver call {call} failed with {code} ({name})")?;
                advice(*code).map_or(Ok(()), |advice| write!(f, ": {advice}"))
            }
            Self::NoDevice => {
                f.write_str("the CUDA driver is loaded, but no device is visible to this process")
            }
            Self::Devices { count, driver_version } => {
                let (major, minor) = (driver_version / 1000, driver_version % 1000 / 10);
                let devices = if *count == 1 { "device" } else { "devices" };
                write!(f, "{count} CUDA {devices}, driver for CUDA {major}.{minor}")
            }
        }
    }
}

/// Looks for a CUDA driver and a device. Never panics, and calls nothing of cudarc.
///
/// The library stays open for the rest of the process, because `cuInit` may start threads in it.
///
/// Cost: without a driver, one search of the loader's path for each name (well under a
/// millisecond). With a driver, the first call initializes it: that opens device files and can take
/// from tens of milliseconds to seconds (longest if no other process holds the device and the
/// kernel driver is not persistent; not measured). Call it at start, never per request. It blocks;
/// don't call it between `fork` and `exec`.
#[must_use]
pub fn probe() -> Probe {
    look(LIBRARIES)
}

fn look(names: &'static [&'static str]) -> Probe {
    let found = search(names, |_, library| {
        let asked = ProbeFunctions::resolve(library).map(|calls| calls.ask());
        let probe = asked.unwrap_or_else(|symbol| Probe::NoSymbol { symbol });
        if probe.is_no_driver() { Look::Passed(probe) } else { Look::Found(probe) }
    });
    found.unwrap_or_else(|error| Probe::NoLibrary { tried: names, error })
}

type Symbol = Option<NonNull<c_void>>;
type Init = unsafe extern "C" fn(c_uint) -> u32;
type ReadInt = unsafe extern "C" fn(*mut c_int) -> u32;
type ErrorName = unsafe extern "C" fn(u32, *mut *const c_char) -> u32;

/// The four functions that a probe needs. Fields hold functions of a library that stays open.
struct ProbeFunctions {
    init: Init,
    driver_version: ReadInt,
    device_count: ReadInt,
    error_name: Option<ErrorName>,
}

impl ProbeFunctions {
    /// Returns the functions by name, or the name of the first that is missing.
    fn resolve(library: Library) -> Result<Self, &'static str> {
        let init = library.symbol(c"cuInit");
        let driver_version = library.symbol(c"cuDriverGetVersion");
        let device_count = library.symbol(c"cuDeviceGetCount");
        let error_name = library.symbol(c"cuGetErrorName");
        // SAFETY: both are as large as a pointer, and `None` is null in both.
        // cuda.h: CUresult cuInit(unsigned int), CUresult being a 32-bit enum.
        let init = unsafe { std::mem::transmute::<Symbol, Option<Init>>(init) };
        // SAFETY: as above. cuda.h: CUresult cuDriverGetVersion(int *).
        let driver_version =
            unsafe { std::mem::transmute::<Symbol, Option<ReadInt>>(driver_version) };
        // SAFETY: as above. cuda.h: CUresult cuDeviceGetCount(int *).
        let device_count = unsafe { std::mem::transmute::<Symbol, Option<ReadInt>>(device_count) };
        // SAFETY: as above. cuda.h: CUresult cuGetErrorName(CUresult, const char **).
        let error_name = unsafe { std::mem::transmute::<Symbol, Option<ErrorName>>(error_name) };
        Ok(Self {
            init: init.ok_or("cuInit")?,
            driver_version: driver_version.ok_or("cuDriverGetVersion")?,
            device_count: device_count.ok_or("cuDeviceGetCount")?,
            error_name,
        })
    }

    fn ask(&self) -> Probe {
        // SAFETY: cuda.h: the flags of cuInit "must be 0"; it may be called again and by any
        // thread.
        let code = unsafe { (self.init)(0) };
        match code {
            SUCCESS => {}
            NO_DEVICE => return Probe::NoDevice,
            code => return Probe::InitFailed { code, name: self.name(code) },
        }
        let driver_version = match self.read(self.driver_version, "cuDriverGetVersion") {
            Ok(version) => version,
            Err(failed) => return failed,
        };
        match self.read(self.device_count, "cuDeviceGetCount") {
            Ok(0) => Probe::NoDevice,
            Ok(count) => Probe::Devices { count, driver_version },
            Err(failed) => failed,
        }
    }

    /// Returns the number that a call writes. A negative number, which no driver writes, counts as
    /// 0.
    fn read(&self, function: ReadInt, call: &'static str) -> Result<u32, Probe> {
        let mut value: c_int = 0;
        // SAFETY: the function writes one int through a pointer to a local that outlives it.
        match unsafe { function(&raw mut value) } {
            SUCCESS => Ok(u32::try_from(value).unwrap_or(0)),
            NO_DEVICE => Err(Probe::NoDevice),
            code => Err(Probe::CallFailed { call, code, name: self.name(code) }),
        }
    }

    fn name(&self, code: u32) -> String {
        let mut text: *const c_char = std::ptr::null();
        if let Some(error_name) = self.error_name {
            // SAFETY: any code may be asked for; an unknown one sets the pointer, a local that
            // outlives the call, to null (cuda.h, cuGetErrorName).
            let _ = unsafe { error_name(code, &raw mut text) };
        }
        if text.is_null() {
            return "unnamed".to_owned();
        }
        // SAFETY: not null, and then a null-terminated string of the library (cuda.h), which is
        // open, and which is copied.
        unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    unsafe extern "C" fn starts(_flags: c_uint) -> u32 {
        SUCCESS
    }

    unsafe extern "C" fn is_a_stub(_flags: c_uint) -> u32 {
        34
    }

    unsafe extern "C" fn sees_no_device(_flags: c_uint) -> u32 {
        NO_DEVICE
    }

    unsafe extern "C" fn version_12_8(out: *mut c_int) -> u32 {
        // SAFETY: `Calls::read` passes a pointer to a local.
        unsafe { out.write(12080) };
        SUCCESS
    }

    unsafe extern "C" fn two(out: *mut c_int) -> u32 {
        // SAFETY: `Calls::read` passes a pointer to a local.
        unsafe { out.write(2) };
        SUCCESS
    }

    unsafe extern "C" fn none(_out: *mut c_int) -> u32 {
        SUCCESS
    }

    unsafe extern "C" fn minus_one(out: *mut c_int) -> u32 {
        // SAFETY: `Calls::read` passes a pointer to a local.
        unsafe { out.write(-1) };
        SUCCESS
    }

    unsafe extern "C" fn fails(_out: *mut c_int) -> u32 {
        999
    }

    unsafe extern "C" fn names_only_34(code: u32, out: *mut *const c_char) -> u32 {
        if code == 34 {
            // SAFETY: `Calls::name` passes a pointer to a local.
            unsafe { out.write(c"CUDA_ERROR_STUB_LIBRARY".as_ptr()) };
            return SUCCESS;
        }
        1
    }

    fn calls(init: Init, driver_version: ReadInt, device_count: ReadInt) -> ProbeFunctions {
        ProbeFunctions { init, driver_version, device_count, error_name: Some(names_only_34) }
    }

    #[test]
    fn a_machine_without_a_driver_is_an_answer_and_no_panic() {
        let found = probe();
        assert_eq!(found.is_usable(), matches!(found, Probe::Devices { count: 1.., .. }));
        assert_eq!(found, probe(), "a second look finds the same");
        if !found.is_usable() {
            println!("skipped: no device ({found})");
        }
    }

    #[test]
    fn a_library_that_is_not_there_is_named_with_the_loaders_words() {
        static NAMES: [&str; 2] = ["liblowtide-absent.so.1", "liblowtide-absent.so"];
        let found = look(&NAMES);
        let Probe::NoLibrary { tried, error } = &found else { panic!("{found}") };
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
        assert_eq!(look(&NAMES), Probe::NoSymbol { symbol: "cuInit" });
    }

    #[test]
    fn devices_are_counted_and_the_version_is_read() {
        let found = calls(starts, version_12_8, two).ask();
        assert_eq!(found, Probe::Devices { count: 2, driver_version: 12080 });
        assert_eq!(found.to_string(), "2 CUDA devices, driver for CUDA 12.8");
        assert!(found.is_usable());
    }

    #[test]
    fn a_count_of_zero_or_less_is_no_device() {
        for count in [none, minus_one] {
            assert_eq!(calls(starts, version_12_8, count).ask(), Probe::NoDevice);
        }
        assert_eq!(calls(sees_no_device, version_12_8, two).ask(), Probe::NoDevice);
    }

    #[test]
    fn a_failing_call_is_named_with_its_code() {
        let stub = calls(is_a_stub, version_12_8, two).ask();
        let begin =
            "cannot initialize the CUDA driver: cuInit returned 34 (CUDA_ERROR_STUB_LIBRARY): ";
        let text = stub.to_string();
        assert!(text.starts_with(begin) && text.contains("LD_LIBRARY_PATH"), "{text}");
        let count = calls(starts, version_12_8, fails).ask();
        let name = "unnamed".to_owned();
        assert_eq!(count, Probe::CallFailed { call: "cuDeviceGetCount", code: 999, name });
        let version = calls(starts, fails, two).ask();
        assert!(version.to_string().contains("cuDriverGetVersion failed with 999"), "{version}");
        for found in [stub, count, version] {
            assert!(!found.is_usable());
        }
    }
}
