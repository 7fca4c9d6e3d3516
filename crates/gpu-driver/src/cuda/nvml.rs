//! The processes that use a device, as NVML lists them.
//!
//! NVML is NVIDIA's management library (`libnvidia-ml.so.1`), a part of the driver next to libcuda.
//! It is loaded with the loader alone when [`Nvml::open`] is called, and stays loaded. It knows the
//! memory of each process, which CUDA does not. It has not run on a real GPU.
//!
//! Drivers disagree about the size of an entry of the list: 16 bytes before 450, 24 since, and 32
//! under the same name in some releases of 535. So each entry gets room for the largest, and the
//! size is measured by the bytes that the driver has written.
//!
//! Invariants: no call writes beyond the room that it is given; a figure that NVML does not know
//! is `None`, never 0.
#![expect(unsafe_code, reason = "calling C functions by pointer")]

use std::collections::BTreeMap;
use std::ffi::{CStr, CString, c_char, c_void};
use std::mem::{self, ManuallyDrop};
use std::ptr::NonNull;

use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;

use super::library::{Library, Look, search};
use super::table::{Find, functions};
use crate::error::DriverResult;
use crate::{DeviceUuid, DriverError};

/// The name under which the driver installs NVML.
const LIBRARY: &str = "libnvidia-ml.so.1";

/// The maximum number of processes that are returned; those with most memory come first.
const PROCESSES_MAX: usize = 64;

/// The entries for which room is made at first, and at most. The kernel module lists 950 processes
/// at most.
const ENTRIES: [usize; 2] = [128, 1024];

/// The attempts at a list that grows between two calls.
const ATTEMPTS: usize = 3;

/// The maximum length of a process's name in bytes.
const NAME_MAX: usize = 64;

const NO_PERMISSION: u32 = 4;
const NOT_SUPPORTED: u32 = 3;
const INVALID_ARGUMENT: i64 = 2;
const NOT_FOUND: i64 = 6;
const INSUFFICIENT_SIZE: i64 = 7;

/// `nvmlErrorString`, which returns a text for any result.
type ErrorString = unsafe extern "C" fn(u32) -> *const c_char;

/// Returns advice for the operator, after a colon.
const fn advice(code: u32) -> &'static str {
    match code {
        NOT_SUPPORTED => ": this device or driver does not report it, such as a vGPU, or WSL",
        NO_PERMISSION => ": expected a user with access to the device's processes",
        9 => ": the kernel module is not loaded",
        12 => ": the library was found, but not the driver behind it",
        18 => {
            ": the driver library and the kernel module have different versions: reboot or reload \
             the module; in a container, mount the driver library of the host"
        }
        _ => "",
    }
}

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

functions! {
    /// The functions of NVML.
    NvmlTable of Nvml;

    /// Checks the functions without which there is no NVML.
    base {
        safe init = "nvmlInit_v2"();
        safe shutdown = "nvmlShutdown"();
        unsafe by_uuid = "nvmlDeviceGetHandleByUUID"(name: *const c_char, device: &mut usize);
        unsafe compute =
            "nvmlDeviceGetComputeRunningProcesses_v3"(device: usize, count: &mut u32, to: *mut u64);
    }

    /// Checks functions that are used if they are there: the memory in use without what the driver
    /// reserves, since driver 510, and with it; processes that draw; clients of the multi-process
    /// service; the name of a process.
    #[expect(dead_code, reason = "each is used if it is there")]
    optional {
        safe memory_2 = "nvmlDeviceGetMemoryInfo_v2"(device: usize, info: &mut MemoryInfo2);
        safe memory_1 = "nvmlDeviceGetMemoryInfo"(device: usize, info: &mut MemoryInfo1);
        unsafe graphics =
            "nvmlDeviceGetGraphicsRunningProcesses_v3"(device: usize, count: &mut u32, to: *mut u64);
        unsafe mps =
            "nvmlDeviceGetMPSComputeRunningProcesses_v3"(device: usize, count: &mut u32, to: *mut u64);
        unsafe process_name = "nvmlSystemGetProcessName"(pid: u32, name: *mut c_char, room: u32);
    }
}

/// `nvmlMemory_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemoryInfo1 {
    total: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2_t`.
#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct MemoryInfo2 {
    version: u32,
    total: u64,
    reserved: u64,
    free: u64,
    used: u64,
}

/// `nvmlMemory_v2`: the size of the struct, and the version above it.
#[expect(clippy::cast_possible_truncation, reason = "the size is 40")]
const MEMORY_VERSION: u32 = size_of::<MemoryInfo2>() as u32 | 2 << 24;

/// NVML, loaded and initialized. Dropping it ends NVML's own session and keeps the library loaded.
///
/// ```no_run
/// use lowtide_gpu_driver::cuda::{CudaDriver, CudaOptions, Nvml};
/// use lowtide_gpu_driver::Driver as _;
///
/// let driver = CudaDriver::open(CudaOptions::default())?;
/// let uuid = driver.uuid().expect("CUDA devices have one");
/// for process in Nvml::open()?.usage(uuid)?.processes {
///     println!("{} {:?} {:?}", process.pid, process.name, process.used);
/// }
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct Nvml {
    table: NvmlTable,
    error_string: Option<ErrorString>,
    birth: Birth,
}

lowtide_core::debug_as!(Nvml, |it| birth: it.birth);

/// The memory of a device, by process.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceUsage {
    /// The memory in use, by all processes; `None` if NVML does not know it. Drivers before 510
    /// include the memory that they reserve for themselves.
    pub used: Option<ByteSize>,
    /// The processes, those with most memory first, at most 64, with the calling one.
    /// Processes in other PID namespaces may be missing.
    pub processes: Vec<ProcessUsage>,
    /// The number of further processes.
    pub omitted: usize,
    /// The memory of the further processes, as far as NVML knows it.
    pub omitted_bytes: ByteSize,
}

/// A process that uses a device.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct ProcessUsage {
    /// The number under which NVML lists it: in a container, of the host or of the container,
    /// depending on the driver.
    pub pid: u32,
    /// Its name, at most 64 bytes; `None` if it is not known whose number `pid` is.
    pub name: Option<String>,
    /// Its device memory, with that of its contexts; `None` if NVML does not know it.
    pub used: Option<ByteSize>,
    /// `true` for the calling process; `None` if it is not known whose number `pid` is.
    pub is_this_process: Option<bool>,
}

impl Nvml {
    /// Loads NVML and initializes it.
    ///
    /// Cost: opens a library of a few MiB and the driver's device files, once in a process. It
    /// blocks. Its time was not measured on a GPU.
    ///
    /// # Errors
    /// [`DriverError`] if there is no such library, it is too old, or the driver does not answer.
    pub fn open() -> Result<Self, DriverError> {
        Self::open_with(&|_| true)
    }

    /// Like [`Nvml::open`], with some functions of the library hidden; for tests.
    ///
    /// # Errors
    /// The errors of [`Nvml::open`].
    #[doc(hidden)]
    pub fn open_with(has: &dyn Fn(&str) -> bool) -> Result<Self, DriverError> {
        Self::open_named(LIBRARY, has)
    }

    fn open_named(library: &'static str, has: &dyn Fn(&str) -> bool) -> Result<Self, DriverError> {
        let found = search(&[library], |_, library| {
            let table = find(library, has);
            match table.base() {
                Ok(()) => Look::Found(Ok((table, library.symbol(c"nvmlErrorString")))),
                Err(missing) => Look::Passed(Err(missing)),
            }
        });
        let (table, error_string) =
            found.map_err(|error| DriverError::NoNvml { library, error })??;
        // SAFETY: both are as large as a pointer, and `None` is null in both. The symbol of this
        // name is a function of that type in nvml.h.
        let error_string =
            unsafe { mem::transmute::<Option<NonNull<c_void>>, Option<ErrorString>>(error_string) };
        // Its drop ends a session, which there is not before this call.
        let nvml = ManuallyDrop::new(Self { table, error_string, birth: Birth::now() });
        nvml.init()?;
        Ok(ManuallyDrop::into_inner(nvml))
    }

    /// Converts the result of a call.
    fn done(&self, call: &'static str, code: u32) -> DriverResult {
        if code == 0 {
            return Ok(());
        }
        // SAFETY: takes any number.
        let text = self.error_string.map(|function| unsafe { function(code) });
        // SAFETY: not null, and then a null-terminated string of the library, which stays open for
        // the rest of the process.
        let text = text.filter(|text| !text.is_null()).map(|text| unsafe { CStr::from_ptr(text) });
        let text = text.unwrap_or(c"unnamed").to_string_lossy();
        let message = format!("{text}{}", advice(code));
        Err(DriverError::Refused { call, code: i64::from(code), message })
    }

    /// Returns the memory of the device with this UUID, a GPU or a MIG instance, by process.
    ///
    /// Cost: two to six calls of NVML, one more for each process whose name `/proc` does not show,
    /// and one file read for each other process. Allocates up to 40 KiB. It blocks. Its time was
    /// not measured on a GPU.
    ///
    /// # Errors
    /// [`DriverError`] if there is no such device, or NVML does not list its processes.
    pub fn usage(&self, uuid: DeviceUuid) -> Result<DeviceUsage, DriverError> {
        if !self.birth.is_here() {
            return Err(DriverError::Forked);
        }
        let device = self.device(uuid)?;
        let mut by_pid = BTreeMap::new();
        // SAFETY: `list` passes a list with room for `count` entries.
        let computing = list(|count, to| unsafe { self.compute(device, count, to) })?;
        // A process that computes and draws is in two lists, with the same figure. Devices without
        // graphics, and drivers without the multi-process service, refuse the further lists.
        // SAFETY: as above.
        let drawing = list(|count, to| unsafe { self.graphics(device, count, to) });
        // SAFETY: as above.
        let clients = list(|count, to| unsafe { self.mps(device, count, to) });
        let further = [drawing, clients].into_iter().flatten().flatten();
        for (pid, used) in computing.into_iter().chain(further) {
            add(&mut by_pid, pid, used);
        }
        let used = self.used(device);
        Ok(self.sorted(used, by_pid))
    }

    /// Returns the device's handle. A MIG instance has a UUID of its own, with another prefix.
    fn device(&self, uuid: DeviceUuid) -> DriverResult<usize> {
        let gpu = uuid.to_string();
        let mig = gpu.replacen("GPU", "MIG", 1);
        for name in [gpu, mig] {
            let name = CString::new(name).unwrap_or_default();
            let mut device = 0;
            // SAFETY: a C string that is valid during the call.
            match unsafe { self.by_uuid(name.as_ptr(), &mut device) } {
                Ok(()) => return Ok(device),
                Err(error) if matches!(error.code(), Some(NOT_FOUND | INVALID_ARGUMENT)) => {}
                Err(error) => return Err(error),
            }
        }
        Err(DriverError::UnknownToNvml { uuid })
    }

    fn used(&self, device: usize) -> Option<ByteSize> {
        let mut info = MemoryInfo2 { version: MEMORY_VERSION, ..MemoryInfo2::default() };
        if self.memory_2(device, &mut info).is_ok() {
            return known(info.used);
        }
        let mut info = MemoryInfo1::default();
        self.memory_1(device, &mut info).ok().and_then(|()| known(info.used))
    }

    /// Returns the processes with their names, those with most memory first.
    fn sorted(
        &self,
        used: Option<ByteSize>,
        by_pid: BTreeMap<u32, Option<ByteSize>>,
    ) -> DeviceUsage {
        let pids: Vec<u32> = by_pid.keys().copied().collect();
        let owned = OwnPids::read().find(&pids, |pid| comm(pid).is_some());
        let mut all: Vec<_> = by_pid.into_iter().collect();
        all.sort_by_key(|(pid, used)| (std::cmp::Reverse(*used), *pid));
        // This process is listed in any case.
        let is_own = |(pid, _): &(u32, _)| owned == Owned::Known(Some(*pid));
        if let Some(at) = all.iter().position(is_own).filter(|at| *at >= PROCESSES_MAX) {
            all.swap(at, PROCESSES_MAX - 1);
        }
        let further = all.split_off(all.len().min(PROCESSES_MAX));
        let process = |(pid, used)| ProcessUsage {
            pid,
            name: if owned == Owned::Unknown { None } else { self.name(pid) },
            used,
            is_this_process: match owned {
                Owned::Known(own) => Some(own == Some(pid)),
                Owned::Unknown => None,
            },
        };
        DeviceUsage {
            used,
            processes: all.into_iter().map(process).collect(),
            omitted: further.len(),
            omitted_bytes: further.iter().filter_map(|(_, used)| *used).sum(),
        }
    }

    /// Returns the name of a process from `/proc`, or else from NVML.
    fn name(&self, pid: u32) -> Option<String> {
        comm(pid).or_else(|| {
            let mut name = [0_u8; NAME_MAX + 1];
            let room = u32::try_from(name.len()).unwrap_or_default();
            // SAFETY: nvml.h: a buffer of this length, in which the name is cut off and ends with
            // a zero.
            unsafe { self.process_name(pid, name.as_mut_ptr().cast(), room) }.ok()?;
            let text = CStr::from_bytes_until_nul(&name).ok()?.to_string_lossy();
            Some(printable(&text)).filter(|name| !name.is_empty())
        })
    }
}

impl Drop for Nvml {
    /// Ends NVML's session with one call. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.birth.is_here() {
            let _ = self.shutdown(); // once for each `nvmlInit_v2`
        }
    }
}

/// Returns the functions of a library.
fn find(library: Library, has: &dyn Fn(&str) -> bool) -> NvmlTable {
    let shown = |name: &CStr| library.symbol(name).filter(|_| name.to_str().is_ok_and(has));
    // Lists of processes had other versions before driver 510, of the same arguments.
    let find: Find<'_> = &|name| {
        let older = name.to_str().ok().and_then(|text| text.strip_suffix("_v3"));
        let older = older.map(|text| [format!("{text}_v2"), text.to_owned()]);
        let older = older.into_iter().flatten().filter_map(|text| CString::new(text).ok());
        shown(name).or_else(|| older.into_iter().find_map(|name| shown(&name)))
    };
    NvmlTable::find(find)
}

fn known(bytes: u64) -> Option<ByteSize> {
    (bytes != NOT_AVAILABLE).then_some(ByteSize::new(bytes))
}

/// Adds a process. One that is in two lists has the larger figure.
fn add(to: &mut BTreeMap<u32, Option<ByteSize>>, pid: u32, used: Option<ByteSize>) {
    let entry = to.entry(pid).or_default();
    *entry = (*entry).max(used);
}

/// Returns the name of a process by `/proc`; `None` if it is not visible there.
fn comm(pid: u32) -> Option<String> {
    let name = std::fs::read(format!("/proc/{pid}/comm")).ok()?;
    Some(printable(String::from_utf8_lossy(&name).trim_end()))
}

/// Cuts a name off, and replaces control characters: a process chooses its name.
fn printable(name: &str) -> String {
    let plain = |letter: char| if letter.is_control() { '?' } else { letter };
    let mut text = String::new();
    for letter in name.chars().map(plain) {
        if text.len() + letter.len_utf8() > NAME_MAX {
            break;
        }
        text.push(letter);
    }
    text
}

/// The largest entry of a list in units of 8 bytes, with one more as a reserve.
const ENTRY_MAX: usize = 5;

/// What the room for a list is filled with before the call.
const UNTOUCHED: u64 = 0xA5A5_A5A5_A5A5_A5A5;

/// Asks for a list of processes. `ask` gets the number of entries for which there is room, with 8
/// bytes more for each than the largest that a driver writes, and sets the number of entries.
fn list(
    ask: impl Fn(&mut u32, *mut u64) -> DriverResult,
) -> DriverResult<Vec<(u32, Option<ByteSize>)>> {
    let [mut entries, most] = ENTRIES;
    let mut attempt = 1;
    loop {
        let mut room = vec![UNTOUCHED; entries * ENTRY_MAX];
        let mut count = u32::try_from(entries).unwrap_or(u32::MAX);
        let answer = ask(&mut count, room.as_mut_ptr());
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        match answer {
            Err(error)
                if error.code() == Some(INSUFFICIENT_SIZE)
                    && attempt < ATTEMPTS
                    && entries < most =>
            {
                attempt += 1;
                // Some more, as processes may start in between.
                entries = count.saturating_add(16).clamp(2 * entries, most);
            }
            answer => return answer.map(|()| parsed(&room, count.min(entries))),
        }
    }
}

/// Reads the entries of a list: the process in the first word of 4 bytes, its memory in the second
/// word of 8 bytes.
fn parsed(room: &[u64], count: usize) -> Vec<(u32, Option<ByteSize>)> {
    let words = words_of_entry(room, count);
    let entries = room.chunks_exact(words).take(count);
    let process = |entry: &[u64]| {
        let [a, b, c, d, ..] = entry.first()?.to_ne_bytes();
        let pid = u32::from_ne_bytes([a, b, c, d]);
        let used = known(*entry.get(1)?);
        Some((pid, used)).filter(|_| pid != 0)
    };
    entries.filter_map(process).collect()
}

/// Returns the size of an entry in words of 8 bytes, by how much was written.
fn words_of_entry(room: &[u64], count: usize) -> usize {
    const USUAL: usize = 3;
    let written = room.iter().rposition(|word| *word != UNTOUCHED).map_or(0, |last| last + 1);
    let fits = [2, USUAL, 4].into_iter().find(|words| written <= words * count);
    // A driver that clears the whole room.
    fits.unwrap_or(USUAL)
}

#[cfg(test)]
mod tests;

// The process identifiers under which NVML may list this process.
//
// A driver whose kernel module knows PID namespaces lists processes by their number in the
// caller's namespace, and leaves out those that are not visible there. Older drivers list numbers
// of the host. In the host's own namespace both are the same. In a container a number of the host
// may by chance be that of another process in the container, so no process is matched, or named
// from `/proc`, unless it is certain whose number it is.
//
// Invariant: [`Owned::Unknown`] unless the listed numbers are those of this process's `/proc`.

/// The inode of the first PID namespace: `PROC_PID_INIT_INO` of Linux.
const HOST_NAMESPACE: &str = "pid:[4026531836]";

/// The numbers of this process.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct OwnPids {
    /// The number in the process's own namespace.
    inner: u32,
    /// The number in the namespace of the mounted `/proc`, if that is another one.
    outer: Option<u32>,
    /// `true` if the process is in the host's namespace.
    is_on_host: bool,
}

/// The entry of this process in a list of numbers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Owned {
    /// The listed numbers are those of `/proc`, and this process has this one; `None` if it is not
    /// listed.
    Known(Option<u32>),
    /// The listed numbers may be of another namespace.
    Unknown,
}

impl OwnPids {
    /// Reads the numbers of this process.
    pub(super) fn read() -> Self {
        let namespace = std::fs::read_link("/proc/self/ns/pid").ok();
        let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
        let namespace = namespace.as_ref().and_then(|link| link.to_str());
        Self::of(std::process::id(), &status, namespace)
    }

    fn of(inner: u32, status: &str, namespace: Option<&str>) -> Self {
        let line = status.lines().find_map(|line| line.strip_prefix("NSpid:"));
        let mut numbers = line.into_iter().flat_map(str::split_ascii_whitespace);
        let first = numbers.next().and_then(|number| number.parse().ok());
        let outer = first.filter(|_| numbers.next().is_some());
        Self { inner, outer, is_on_host: namespace == Some(HOST_NAMESPACE) }
    }

    /// Finds this process in a list. `is_visible` tells whether `/proc` has a process with this
    /// number.
    pub(super) fn find(&self, listed: &[u32], is_visible: impl Fn(u32) -> bool) -> Owned {
        let has = |pid: u32| Some(pid).filter(|pid| listed.contains(pid));
        if self.is_on_host {
            return Owned::Known(has(self.inner));
        }
        // The host's `/proc` in a container: its numbers are those of the host.
        if let Some(outer) = self.outer {
            return has(outer).map_or(Owned::Unknown, |pid| Owned::Known(Some(pid)));
        }
        // A driver that lists numbers of this namespace lists only visible processes.
        match has(self.inner) {
            Some(pid) if listed.iter().all(|&pid| is_visible(pid)) => Owned::Known(Some(pid)),
            _ => Owned::Unknown,
        }
    }
}

#[cfg(test)]
mod pids_tests {
    use super::*;

    const INSIDE: Option<&str> = Some("pid:[4026532841]");

    fn all(_: u32) -> bool {
        true
    }

    #[test]
    fn on_the_host_a_process_is_listed_under_its_number_or_not_at_all() {
        let own = OwnPids::of(77, "Name:\tx\nNSpid:\t77\n", Some(HOST_NAMESPACE));
        assert_eq!(own.find(&[5, 77], |_| false), Owned::Known(Some(77)));
        assert_eq!(own.find(&[5, 78], all), Owned::Known(None));
        assert_eq!(own.find(&[], all), Owned::Known(None));
    }

    #[test]
    fn in_a_container_it_is_known_only_if_each_listed_process_is_visible() {
        let own = OwnPids::of(7, "NSpid:\t7\n", INSIDE);
        assert_eq!(own.find(&[7, 12], all), Owned::Known(Some(7)));
        assert_eq!(own.find(&[7, 1_012], |pid| pid < 100), Owned::Unknown, "host numbers");
        assert_eq!(own.find(&[1_012], all), Owned::Unknown, "another process of the host");
        assert_eq!(own.find(&[], all), Owned::Unknown);
    }

    #[test]
    fn with_the_hosts_proc_its_number_there_is_the_one_that_is_listed() {
        let own = OwnPids::of(7, "NSpid:\t4711\t30\t7\n", INSIDE);
        assert_eq!(own.find(&[7, 4711], all), Owned::Known(Some(4711)));
        assert_eq!(own.find(&[7], all), Owned::Unknown, "7 is another process there");
    }

    #[test]
    fn without_proc_nothing_is_claimed_that_could_be_wrong() {
        for (status, namespace) in [("", None), ("NSpid:\t\n", INSIDE), ("NSpid:\tx\n", INSIDE)] {
            let own = OwnPids::of(7, status, namespace);
            assert_eq!(own, OwnPids { inner: 7, outer: None, is_on_host: false });
            assert_eq!(own.find(&[7, 8], |_| false), Owned::Unknown);
        }
        let own = OwnPids::read();
        assert_eq!(own.inner, std::process::id());
    }
}
