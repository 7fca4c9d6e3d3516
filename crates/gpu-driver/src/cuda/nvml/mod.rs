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

mod error;
mod functions;
mod pids;

use std::collections::BTreeMap;
use std::ffi::{CStr, CString};
use std::fmt;

use super::library::{Look, search};
use super::table::Missing;
use crate::DeviceUuid;
use lowtide_core::bytes::ByteSize;
use lowtide_core::fork::Birth;

pub use error::NvmlError;
use error::{INSUFFICIENT_SIZE, INVALID_ARGUMENT, NOT_FOUND};
use functions::{Functions, List, MEMORY_VERSION, MemoryInfo1, MemoryInfo2};
use pids::{OwnPids, Owned};

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

/// `NVML_VALUE_NOT_AVAILABLE`.
const NOT_AVAILABLE: u64 = u64::MAX;

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
    functions: Functions,
    birth: Birth,
}

impl fmt::Debug for Nvml {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Nvml").field("birth", &self.birth).finish_non_exhaustive()
    }
}

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
    /// [`NvmlError`] if there is no such library, it is too old, or the driver does not answer.
    pub fn open() -> Result<Self, NvmlError> {
        Self::open_with(&|_| true)
    }

    /// Like [`Nvml::open`], with some functions of the library hidden; for tests.
    ///
    /// # Errors
    /// The errors of [`Nvml::open`].
    #[doc(hidden)]
    pub fn open_with(has: &dyn Fn(&str) -> bool) -> Result<Self, NvmlError> {
        Self::open_named(LIBRARY, has)
    }

    fn open_named(library: &'static str, has: &dyn Fn(&str) -> bool) -> Result<Self, NvmlError> {
        let found = search(&[library], |_, library| match Functions::find(library, has) {
            Ok(functions) => Look::Found(Ok(functions)),
            Err(Missing(function)) => Look::Passed(Err(NvmlError::NoFunction { function })),
        });
        let functions = found.map_err(|error| NvmlError::NoLibrary { library, error })??;
        // SAFETY: nvml.h: no precondition, may be called more than once, from any thread.
        answer("nvmlInit_v2", unsafe { (functions.base.init)() })?;
        Ok(Self { functions, birth: Birth::now() })
    }

    /// Returns the memory of the device with this UUID, a GPU or a MIG instance, by process.
    ///
    /// Cost: two to six calls of NVML, one more for each process whose name `/proc` does not show,
    /// and one file read for each other process. Allocates up to 40 KiB. It blocks. Its time was
    /// not measured on a GPU.
    ///
    /// # Errors
    /// [`NvmlError`] if there is no such device, or NVML does not list its processes.
    pub fn usage(&self, uuid: DeviceUuid) -> Result<DeviceUsage, NvmlError> {
        if !self.birth.is_here() {
            return Err(NvmlError::Forked);
        }
        let device = self.device(uuid)?;
        let mut by_pid = BTreeMap::new();
        let base = &self.functions.base;
        for (pid, used) in list("nvmlDeviceGetComputeRunningProcesses_v3", base.compute, device)? {
            add(&mut by_pid, pid, used);
        }
        // A process that computes and draws is in two lists, with the same figure. Devices without
        // graphics, and drivers without the multi-process service, refuse the further lists.
        let graphics = self.functions.graphics.map(|it| it.list);
        let further = graphics.into_iter().chain(self.functions.mps.map(|it| it.list));
        for function in further {
            let more = list("the list of further processes", function, device);
            more.unwrap_or_default()
                .into_iter()
                .for_each(|(pid, used)| add(&mut by_pid, pid, used));
        }
        let used = self.used(device);
        Ok(self.sorted(used, by_pid))
    }

    /// Returns the device's handle. A MIG instance has a UUID of its own, with another prefix.
    fn device(&self, uuid: DeviceUuid) -> Result<usize, NvmlError> {
        const FUNCTION: &str = "nvmlDeviceGetHandleByUUID";
        let gpu = uuid.to_string();
        let mig = gpu.replacen("GPU", "MIG", 1);
        for name in [gpu, mig] {
            let name = CString::new(name).unwrap_or_default();
            let mut device = 0;
            // SAFETY: nvml.h: a C string and a place for a handle, both valid during the call.
            let code = unsafe { (self.functions.base.by_uuid)(name.as_ptr(), &raw mut device) };
            match code {
                0 => return Ok(device),
                NOT_FOUND | INVALID_ARGUMENT => {}
                code => return Err(NvmlError::Failed { function: FUNCTION, code }),
            }
        }
        Err(NvmlError::UnknownDevice { uuid })
    }

    fn used(&self, device: usize) -> Option<ByteSize> {
        let mut info = MemoryInfo2 { version: MEMORY_VERSION, ..MemoryInfo2::default() };
        let code = self.functions.memory_2.map(|it| {
            // SAFETY: nvml.h: a device's handle, and a struct of the version that it names.
            unsafe { (it.memory)(device, &raw mut info) }
        });
        if code == Some(0) {
            return known(info.used);
        }
        let mut info = MemoryInfo1::default();
        let code = self.functions.memory_1.map(|it| {
            // SAFETY: nvml.h: a device's handle, and a struct that is valid during the call.
            unsafe { (it.memory)(device, &raw mut info) }
        });
        known(info.used).filter(|_| code == Some(0))
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
            let function = self.functions.name?.name;
            // SAFETY: nvml.h: a buffer of this length, in which the name is cut off and ends with
            // a zero.
            let code = unsafe { function(pid, name.as_mut_ptr().cast(), room) };
            let text = CStr::from_bytes_until_nul(&name).ok()?.to_string_lossy();
            Some(printable(&text)).filter(|name| code == 0 && !name.is_empty())
        })
    }
}

impl Drop for Nvml {
    /// Ends NVML's session with one call. Does nothing in a forked child.
    fn drop(&mut self) {
        if self.birth.is_here() {
            // SAFETY: nvml.h: once for each `nvmlInit_v2`; handles of this session are not kept.
            let _ = unsafe { (self.functions.base.shutdown)() };
        }
    }
}

const fn answer(function: &'static str, code: u32) -> Result<(), NvmlError> {
    if code == 0 { Ok(()) } else { Err(NvmlError::Failed { function, code }) }
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

/// Asks for a list of processes.
fn list(
    name: &'static str,
    function: List,
    device: usize,
) -> Result<Vec<(u32, Option<ByteSize>)>, NvmlError> {
    let [mut entries, most] = ENTRIES;
    let mut attempt = 1;
    loop {
        let mut room = vec![UNTOUCHED; entries * ENTRY_MAX];
        let mut count = u32::try_from(entries).unwrap_or(u32::MAX);
        // SAFETY: nvml.h: a device's handle, and a list with room for `count` entries, each of
        // which has 8 bytes more than the largest that a driver writes.
        let code = unsafe { function(device, &raw mut count, room.as_mut_ptr()) };
        let count = usize::try_from(count).unwrap_or(usize::MAX);
        match code {
            INSUFFICIENT_SIZE if attempt < ATTEMPTS && entries < most => {
                attempt += 1;
                // Some more, as processes may start in between.
                entries = count.saturating_add(16).clamp(2 * entries, most);
            }
            code => {
                answer(name, code)?;
                return Ok(parsed(&room, count.min(entries)));
            }
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
