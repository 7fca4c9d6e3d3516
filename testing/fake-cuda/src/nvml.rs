//! NVML: the functions of `libnvidia-ml.so.1` that list the processes on a device.
//!
//! Their memory is that of the simulations, so it agrees with `cuMemGetInfo`: this process has what
//! it has taken with its context, and further processes, which a test sets, are a part of the
//! neighbours' memory. With [`Options::MIG`] the devices are MIG instances, with UUIDs of their
//! own. Failures are planned as for other calls.
//!
//! Invariant: the memory of all processes is at most the used memory, unless a test gives further
//! processes more than the neighbours have.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_char, c_uint};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use crate::call::Answer;
use crate::control::Options;
use crate::ffi::{Out, Text, export, put_text};
use crate::state::{State, state};

const UNINITIALIZED: u32 = 1;
const INVALID_ARGUMENT: u32 = 2;
const NOT_FOUND: u32 = 6;
const INSUFFICIENT_SIZE: u32 = 7;
const ARGUMENT_VERSION_MISMATCH: u32 = 25;

/// `nvmlMemory_v2`.
const MEMORY_VERSION: u32 = 40 | 2 << 24;

/// What NVML knows beside the devices.
#[derive(Debug)]
pub(crate) struct Nvml {
    /// The sessions: calls of init without a shutdown.
    pub(crate) sessions: u64,
    /// The number under which this process is listed; 0 if it is not.
    pub(crate) own_pid: u32,
    /// The size of an entry of a list, in units of 8 bytes: 2, 3 or 4.
    pub(crate) words: usize,
    /// The processes that a test has set.
    pub(crate) processes: Vec<Process>,
}

/// A further process.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Process {
    pub(crate) device: usize,
    /// 0 for computing, 1 for drawing, 2 for a client of the multi-process service.
    pub(crate) kind: u32,
    pub(crate) pid: u32,
    pub(crate) used: u64,
}

impl Default for Nvml {
    fn default() -> Self {
        Self { sessions: 0, own_pid: std::process::id(), words: 3, processes: Vec::new() }
    }
}

/// Returns NVML's text for a result.
#[unsafe(no_mangle)]
extern "C" fn nvmlErrorString(code: u32) -> *const c_char {
    let text = if code == 18 { c"Driver/library version mismatch" } else { c"Unknown Error" };
    text.as_ptr()
}

/// `true` while the lists of computing processes do not return, as with some faults of a device.
static HELD: Mutex<bool> = Mutex::new(false);
static RELEASED: Condvar = Condvar::new();

fn held() -> MutexGuard<'static, bool> {
    HELD.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(crate) fn hold(is_held: bool) {
    *held() = is_held;
    RELEASED.notify_all();
}

fn wait_until_released() {
    let waited = RELEASED.wait_while(held(), |is_held| *is_held);
    drop(waited.unwrap_or_else(PoisonError::into_inner));
}

fn started() -> Answer {
    if state().nvml.sessions == 0 { Err(UNINITIALIZED) } else { Ok(()) }
}

/// The device behind a handle, which is its number from 1.
fn device(handle: usize) -> Answer<usize> {
    started()?;
    let at = handle.checked_sub(1).filter(|at| *at < state().devices.len());
    at.ok_or(INVALID_ARGUMENT)
}

/// The total, free and used memory of a device.
fn memory(handle: usize) -> Answer<[u64; 3]> {
    let at = device(handle)?;
    let sim = state().devices[at].sim.clone();
    let (total, (free, _)) = (sim.raw().capacity(), sim.raw().free_and_neighbours());
    Ok([total, free, total.saturating_sub(free)])
}

/// The processes of a kind on a device, this one first.
fn listed(at: usize, kind: u32) -> Vec<(u32, u64)> {
    let (own, sim, further) = {
        let state = state();
        let of = |state: &State| {
            let all = state.nvml.processes.iter();
            let all = all.filter(|it| it.device == at && it.kind == kind);
            all.map(|it| (it.pid, it.used)).collect::<Vec<_>>()
        };
        let device = &state.devices[at];
        let is_listed = kind == 0 && device.retains > 0 && state.nvml.own_pid != 0;
        (is_listed.then_some(state.nvml.own_pid), device.sim.clone(), of(&state))
    };
    let own = own.map(|pid| {
        let (free, neighbours) = sim.raw().free_and_neighbours();
        (pid, sim.raw().capacity().saturating_sub(free).saturating_sub(neighbours))
    });
    own.into_iter().chain(further).collect()
}

fn put_list(handle: usize, kind: u32, count: Out<c_uint>, list: Out<u64>) -> Answer {
    let processes = listed(device(handle)?, kind);
    let words = state().nvml.words;
    let found = u32::try_from(processes.len()).unwrap_or(u32::MAX);
    let room = count.get().map_err(|_| INVALID_ARGUMENT)?;
    count.put(found)?;
    if room < found {
        return Err(INSUFFICIENT_SIZE);
    }
    for (nth, (pid, used)) in processes.into_iter().enumerate() {
        let entry = [u64::from(pid), used, u64::MAX, 0];
        for (word, value) in entry.into_iter().enumerate().take(words) {
            list.element(nth * words + word).put(value)?;
        }
    }
    Ok(())
}

export! {
    fn nvmlInit_v2() {
        state().nvml.sessions += 1;
        Ok(())
    }

    fn nvmlShutdown() {
        started()?;
        state().nvml.sessions -= 1;
        Ok(())
    }

    fn nvmlDeviceGetHandleByUUID(uuid: Text, handle: Out<usize>) {
        started()?;
        let wanted = uuid.get().map_err(|_| INVALID_ARGUMENT)?;
        let state = state();
        let is_mig = state.options.flags & Options::MIG != 0;
        let has = |at: &usize| {
            let name = crate::devices::uuid_text(*at);
            wanted == if is_mig { name.replacen("GPU", "MIG", 1) } else { name }
        };
        let at = (0..state.devices.len()).find(has).ok_or(NOT_FOUND)?;
        handle.put(at + 1)
    }

    fn nvmlDeviceGetMemoryInfo(handle: usize, to: Out<[u64; 3]>) {
        to.put(memory(handle)?)
    }

    fn nvmlDeviceGetMemoryInfo_v2(handle: usize, to: Out<[u64; 5]>) {
        let [total, free, used] = memory(handle)?;
        // The version is in the first four bytes, which are the lower ones here.
        let version = to.get().map_err(|_| INVALID_ARGUMENT)?[0];
        if version & u64::from(u32::MAX) != u64::from(MEMORY_VERSION) {
            return Err(ARGUMENT_VERSION_MISMATCH);
        }
        to.put([version, total, 0, free, used])
    }

    fn nvmlDeviceGetComputeRunningProcesses_v3(
        handle: usize, count: Out<c_uint>, list: Out<u64>,
    ) {
        wait_until_released();
        put_list(handle, 0, count, list)
    }

    fn nvmlDeviceGetComputeRunningProcesses_v2(
        handle: usize, count: Out<c_uint>, list: Out<u64>,
    ) {
        put_list(handle, 0, count, list)
    }

    fn nvmlDeviceGetGraphicsRunningProcesses_v3(
        handle: usize, count: Out<c_uint>, list: Out<u64>,
    ) {
        put_list(handle, 1, count, list)
    }

    fn nvmlDeviceGetMPSComputeRunningProcesses_v3(
        handle: usize, count: Out<c_uint>, list: Out<u64>,
    ) {
        put_list(handle, 2, count, list)
    }

    fn nvmlSystemGetProcessName(pid: c_uint, name: Out<c_char>, room: c_uint) {
        started()?;
        let is_known = state().nvml.processes.iter().any(|it| it.pid == pid);
        if !is_known {
            return Err(NOT_FOUND);
        }
        put_text(name, usize::try_from(room).unwrap_or(0), &format!("/usr/bin/process-{pid}"))
    }
}
