//! The processes on each device, as NVML lists them.
//!
//! Only [`Memory::device_processes`] queries NVML, on a thread that ends with the query: NVML may
//! be slow, and hang if a device fails. The caller waits for [`ANSWER_WAIT`] at most; the control
//! loop and the worker never query it.
//!
//! Invariants: at most one query is in progress, and at most one begins in [`KEPT`]; if no figure
//! of a device is `None`, `used = arenas + context_overhead + own_unmanaged +
//! other_processes + unattributed`, but for memory that changes during the query.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Bell, Moment};
use crate::device::driver::cuda::{DeviceUsage, Nvml, NvmlError, ProcessUsage};
use crate::device::driver::{DeviceUuid, Driver as _};
use crate::memory::error::Diagnostic;
use crate::memory::manager::Memory;
use crate::memory::shared::Shared;
use crate::sync::{Mutex, caught, lock};

use super::device::Device;

/// The time for which a list is kept. Requests in between get the same list.
const KEPT: Duration = Duration::from_secs(5);

/// The longest wait for NVML in one call.
const ANSWER_WAIT: Duration = Duration::from_millis(50);

/// The stack size of the thread that queries NVML.
const STACK: usize = 256 << 10;

/// The memory of a device by its users, as NVML lists them.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceProcesses {
    /// The number of the device among those of the [`Memory`].
    pub number: u32,
    /// Its name in metrics and errors: the UUID.
    pub device: String,
    /// The time since NVML was queried.
    pub age: Duration,
    /// The reason that NVML does not list the processes of this device; `None` if it does. The
    /// figures of NVML are then `None`, and its list is empty.
    pub error: Option<String>,
    /// The memory in use, by all; `None` if NVML does not know it.
    pub used: Option<ByteSize>,
    /// The memory committed by arenas of this `Memory` when NVML was queried.
    pub arenas: ByteSize,
    /// The memory of this process's CUDA context: an upper bound, the lowest figure that this
    /// process had outside its arenas at any query, or the context overhead of
    /// [`DeviceSnapshot`](super::DeviceSnapshot) if that is lower. `None` if NVML does not list
    /// this process with its memory, or it is not known which of the processes it is.
    pub context_overhead: Option<ByteSize>,
    /// All other memory of this process, allocated outside the arenas: by cudarc, ONNX Runtime or
    /// candle. `None` if the context overhead is.
    pub own_unmanaged: Option<ByteSize>,
    /// The memory of the other listed processes, as far as NVML knows it. `None` if it is not known
    /// which of the processes is this one.
    pub other_processes: Option<ByteSize>,
    /// The memory in use that NVML does not attribute to a listed process: processes of other
    /// containers that it hides, processes whose memory it does not know, and memory that the
    /// driver uses itself. `None` if the memory in use is unknown.
    pub unattributed: Option<ByteSize>,
    /// The processes, those with most memory first: at most 64.
    pub processes: Vec<ProcessUsage>,
    /// The number of further processes.
    pub omitted: usize,
}

/// The last list, and the query in progress.
#[derive(Debug, Default)]
pub(super) struct ProcessLists(Arc<Mutex<Query>>);

#[derive(Debug, Default)]
struct Query {
    /// NVML, between two queries, once it was opened.
    nvml: Option<Nvml>,
    /// The begin of the query in progress.
    begun: Option<Moment>,
    last: Option<Answers>,
    /// The least memory of this process outside its arenas that was seen, by device.
    least: BTreeMap<u32, ByteSize>,
}

/// The answers of NVML by device.
#[derive(Clone, Debug)]
struct Answers {
    at: Moment,
    by_device: BTreeMap<u32, Result<DeviceUsage, NvmlError>>,
    /// The memory committed by arenas at the begin of the query.
    arenas: BTreeMap<u32, ByteSize>,
}

impl Memory {
    /// Returns the processes that use each CUDA device of this `Memory`, as NVML lists them: who
    /// holds the device? Empty without CUDA devices, and in a forked child.
    ///
    /// NVML (`libnvidia-ml.so.1`) is loaded by the first call, and stays loaded. If it cannot be
    /// loaded, a diagnostic reports it once, and the lists contain the error. A list is kept for 5
    /// s, so calls in between cost little. Other calls start a thread for the query and wait for it
    /// for at most 50 ms; if NVML takes longer, they return the last list, or an error, and a later
    /// call returns the answer. It has not run on a real GPU.
    #[must_use]
    pub fn device_processes(&self) -> Vec<DeviceProcesses> {
        let shared = &self.0.shared;
        if shared.check_here().is_err() { Vec::new() } else { shared.device_processes() }
    }
}

impl Shared {
    fn device_processes(&self) -> Vec<DeviceProcesses> {
        let with_uuid = |device: &Arc<Device>| Some((Arc::clone(device), device.driver.uuid()?));
        let devices: Vec<_> = self.devices.list.iter().filter_map(with_uuid).collect();
        if devices.is_empty() {
            return Vec::new();
        }
        let now = self.clock.now();
        if self.devices.processes.begin(now)
            && let Err(error) = self.query(now, &devices)
        {
            lock(&self.devices.processes.0).begun = None;
            let text = format!("cannot start the thread that queries NVML: {error}");
            return devices.iter().map(|(device, _)| failed(device, text.clone())).collect();
        }
        let (last, begun, least) = {
            let query = lock(&self.devices.processes.0);
            (query.last.clone(), query.begun, query.least.clone())
        };
        let now = self.clock.now();
        let waited = begun.map_or(Duration::ZERO, |begun| now - begun);
        let of = |(device, _): &(Arc<Device>, DeviceUuid)| match &last {
            Some(last) if waited < KEPT => last.of(device, now, least.get(&device.number).copied()),
            _ => failed(device, format!("NVML has not answered for {waited:.1?}")),
        };
        let lists: Vec<_> = devices.iter().map(of).collect();
        if let Some(error) = last.as_ref().and_then(Answers::failure) {
            let start = "the processes on the device are unknown: ";
            let text = format!("{start}{error}");
            self.add_diagnostic_once(start, Diagnostic::info("device", text));
        }
        lists
    }

    /// Queries NVML on a thread, and waits for it.
    fn query(&self, now: Moment, devices: &[(Arc<Device>, DeviceUuid)]) -> std::io::Result<()> {
        let committed = || -> BTreeMap<u32, ByteSize> {
            devices.iter().map(|(device, _)| (device.number, self.committed_on(device))).collect()
        };
        let arenas = committed();
        let uuids: Vec<_> = devices.iter().map(|(device, uuid)| (device.number, *uuid)).collect();
        let (query, bell) = (Arc::clone(&self.devices.processes.0), Bell::new());
        let (rings, before) = (Arc::clone(&bell), arenas.clone());
        let thread = thread::Builder::new().name("lowtide-nvml".to_owned()).stack_size(STACK);
        thread.spawn(move || {
            let nvml = lock(&query).nvml.take();
            let ran = caught(|| ask(nvml, &uuids));
            let mut state = lock(&query);
            if let Ok((nvml, by_device)) = ran {
                state.nvml = nvml;
                state.last = Some(Answers { at: now, by_device, arenas: before });
            }
            state.begun = None;
            drop(state);
            // Before the ring, so that the thread is not the last owner of NVML.
            drop(query);
            rings.ring();
        })?;
        let deadline = now + ANSWER_WAIT;
        // Ends at the deadline at the latest: each iteration waits until then, or for the answer.
        while lock(&self.devices.processes.0).begun.is_some() && self.clock.now() < deadline {
            self.clock.wait_until(&bell, deadline);
        }
        let is_steady = arenas == committed();
        let mut query = lock(&self.devices.processes.0);
        if query.begun.is_none() && is_steady {
            query.see_least();
        }
        Ok(())
    }
}

impl ProcessLists {
    /// Returns `true` if a query is due, and marks it as begun.
    fn begin(&self, now: Moment) -> bool {
        let mut query = lock(&self.0);
        let is_kept = query.last.as_ref().is_some_and(|last| now - last.at < KEPT);
        let is_due = query.begun.is_none() && !is_kept;
        if is_due {
            query.begun = Some(now);
        }
        is_due
    }
}

impl Query {
    /// Keeps the least memory of this process outside its arenas. Called only if these did not
    /// change during the query.
    fn see_least(&mut self) {
        for (number, usage) in self.last.iter().flat_map(|last| &last.by_device) {
            let arenas = self.last.iter().find_map(|last| last.arenas.get(number)).copied();
            let own = usage.as_ref().ok().and_then(own);
            let outside = own.zip(arenas).map(|(own, arenas)| own.saturating_sub(arenas));
            // A context is never empty: arenas of managed memory may have more than is used.
            if let Some(outside) = outside.filter(|outside| !outside.is_zero()) {
                let least = self.least.entry(*number).or_insert(outside);
                *least = outside.min(*least);
            }
        }
    }
}

/// Queries NVML, which is opened if it is not yet. Returns it for the next query, unless a call
/// failed.
fn ask(
    nvml: Option<Nvml>,
    devices: &[(u32, DeviceUuid)],
) -> (Option<Nvml>, BTreeMap<u32, Result<DeviceUsage, NvmlError>>) {
    match nvml.map_or_else(Nvml::open, Ok) {
        Ok(nvml) => {
            let all: BTreeMap<_, _> =
                devices.iter().map(|(number, uuid)| (*number, nvml.usage(*uuid))).collect();
            let is_well = all.values().all(Result::is_ok);
            (Some(nvml).filter(|_| is_well), all)
        }
        Err(error) => {
            (None, devices.iter().map(|(number, _)| (*number, Err(error.clone()))).collect())
        }
    }
}

/// Returns the memory of this process, if it is known.
fn own(usage: &DeviceUsage) -> Option<ByteSize> {
    usage.processes.iter().find(|process| process.is_this_process == Some(true))?.used
}

fn failed(device: &Device, error: String) -> DeviceProcesses {
    DeviceProcesses {
        number: device.number,
        device: device.name.to_string(),
        age: Duration::ZERO,
        error: Some(error),
        used: None,
        arenas: ByteSize::ZERO,
        context_overhead: None,
        own_unmanaged: None,
        other_processes: None,
        unattributed: None,
        processes: Vec::new(),
        omitted: 0,
    }
}

impl Answers {
    /// Returns the first error if there is no list of any device.
    fn failure(&self) -> Option<&NvmlError> {
        let mut errors = self.by_device.values().map(|usage| usage.as_ref().err());
        let first = errors.next()??;
        errors.all(|error| error.is_some()).then_some(first)
    }

    /// Returns the list of a device.
    fn of(&self, device: &Device, now: Moment, least: Option<ByteSize>) -> DeviceProcesses {
        let arenas = self.arenas.get(&device.number).copied().unwrap_or_default();
        let mut list = match self.by_device.get(&device.number) {
            Some(Ok(usage)) => {
                let overhead = device.driver.context_overhead().into_iter().chain(least).min();
                let mut list = failed(device, String::new());
                list.divide(usage, arenas, overhead);
                list
            }
            Some(Err(error)) => failed(device, error.to_string()),
            None => failed(device, "NVML was not queried".to_owned()),
        };
        (list.age, list.arenas) = (now - self.at, arenas);
        list
    }
}

impl DeviceProcesses {
    /// Divides the memory of the device among its users. `overhead` is an upper bound of this
    /// process's context.
    fn divide(&mut self, usage: &DeviceUsage, arenas: ByteSize, overhead: Option<ByteSize>) {
        let processes = &usage.processes;
        let own = own(usage);
        let outside = own.map(|own| own.saturating_sub(arenas));
        let context = outside.map(|outside| overhead.map_or(outside, |it| it.min(outside)));
        let others = processes.iter().filter(|process| process.is_this_process != Some(true));
        let others: ByteSize = others.filter_map(|process| process.used).sum();
        let others = others.saturating_add(usage.omitted_bytes);
        // This process has a context, so one of a list that names none is this one.
        let is_known = !processes.is_empty()
            && processes.iter().all(|process| process.is_this_process.is_some());
        let attributed = match is_known {
            true => others.saturating_add(own.unwrap_or_default().max(arenas)),
            false => others.max(arenas),
        };
        self.error = None;
        self.used = usage.used;
        self.context_overhead = context;
        self.own_unmanaged = outside.zip(context).map(|(all, part)| all.saturating_sub(part));
        self.other_processes = is_known.then_some(others);
        self.unattributed = usage.used.map(|used| used.saturating_sub(attributed));
        self.processes.clone_from(processes);
        self.omitted = usage.omitted;
    }
}
