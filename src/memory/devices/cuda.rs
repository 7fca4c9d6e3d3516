//! The processes on each device, as NVML lists them.
//!
//! Only `MemoryDevices::processes` queries NVML, which may be slow, and hang if a device fails
//! ([`SlowValue`]). A governor belongs to its creator, and is removed from the list when dropped.
//!
//! Invariants: if no figure of a device is `None`, `used = arenas + context_overhead +
//! own_unmanaged + other_processes + unattributed`, but for memory that changes during the query;
//! no driver call under the lock of the governors.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, short};
use crate::device::driver::cuda::{DeviceUsage, Nvml, ProcessUsage};
use crate::device::driver::{DeviceUuid, Driver as _, DriverError};
use crate::memory::error::Diagnostic;
use crate::memory::slow_value::SlowValue;
use crate::sync::{Mutex, lock};

use super::MemoryDevices;
use super::device::Device;

/// The time for which a list is kept. Requests in between get the same list.
const KEPT: Duration = Duration::from_secs(5);

impl MemoryDevices<'_> {
    /// Returns the processes that use each CUDA device of this `Memory`, as NVML lists them.
    /// Returns an empty list without CUDA devices, and in a forked child.
    ///
    /// NVML (`libnvidia-ml.so.1`) is loaded by the first call, and stays loaded. If it cannot be
    /// loaded, a diagnostic reports it once, and the lists contain the error. A list is kept for 5
    /// s, so calls in between cost little. Other calls start a thread for the query and wait for it
    /// for at most 50 ms; if NVML takes longer, they return the last list, or an error, and a later
    /// call returns the answer. It has not run on a real GPU.
    #[must_use]
    pub fn processes(&self) -> Vec<DeviceProcesses> {
        let shared = self.shared();
        if shared.check_here().is_err() {
            return Vec::new();
        }
        let devices = &shared.devices;
        let committed = |device: &Device| shared.committed_on(device);
        let (lists, failure) = devices.processes.read(&*shared.clock, &devices.list, committed);
        if let Some(error) = failure {
            let start = "the processes on the device are unknown: ";
            let text = format!("{start}{error}");
            shared.add_diagnostic_once(start, Diagnostic::info("device", text));
        }
        lists
    }
}

/// The memory of a device by its users, as NVML lists them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct DeviceProcesses {
    /// The number of the device among those of the [`Memory`](crate::Memory).
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

/// The last list, and what a query needs.
#[derive(Debug, Default)]
pub(super) struct ProcessLists {
    last: SlowValue<NvmlAnswers>,
    /// NVML, between two queries, once it was opened.
    nvml: Arc<Mutex<Option<Nvml>>>,
    /// The least memory of this process outside its arenas that was seen, by device.
    least: Mutex<BTreeMap<u32, ByteSize>>,
}

/// The answers of NVML by device.
#[derive(Clone, Debug)]
struct NvmlAnswers {
    by_device: BTreeMap<u32, Result<DeviceUsage, DriverError>>,
    /// The memory committed by arenas at the begin of the query.
    arenas: BTreeMap<u32, ByteSize>,
}

impl ProcessLists {
    /// Returns the processes on each device that has a UUID, and NVML's error if it lists those of
    /// no device. `committed` returns the memory of this process's arenas on a device.
    pub(super) fn read(
        &self,
        clock: &dyn Clock,
        devices: &[Arc<Device>],
        committed: impl Fn(&Device) -> ByteSize,
    ) -> (Vec<DeviceProcesses>, Option<DriverError>) {
        let with_uuid = |device: &Arc<Device>| Some((Arc::clone(device), device.driver.uuid()?));
        let devices: Vec<_> = devices.iter().filter_map(with_uuid).collect();
        if devices.is_empty() {
            return (Vec::new(), None);
        }
        let committed = || -> BTreeMap<u32, ByteSize> {
            devices.iter().map(|(device, _)| (device.number, committed(device))).collect()
        };
        let arenas = committed();
        let uuids: Vec<_> = devices.iter().map(|(device, uuid)| (device.number, *uuid)).collect();
        let (nvml, before) = (Arc::clone(&self.nvml), arenas.clone());
        let ask = move || {
            let opened = lock(&nvml).take();
            let (opened, by_device) = ask(opened, &uuids);
            *lock(&nvml) = opened;
            NvmlAnswers { by_device, arenas: before }
        };
        let reading = match self.last.read(clock, "lowtide-nvml", KEPT, ask) {
            Ok(reading) => reading,
            Err(error) => {
                let text = format!("cannot start the thread that queries NVML: {error}");
                let all = devices.iter().map(|(device, _)| failed(device, text.clone()));
                return (all.collect(), None);
            }
        };
        let is_steady = reading.is_new && arenas == committed();
        let least = {
            let mut least = lock(&self.least);
            if let Some((_, answers)) = reading.last.as_ref().filter(|_| is_steady) {
                answers.see_least(&mut least);
            }
            least.clone()
        };
        let now = clock.now();
        let waited = reading.begun.map_or(Duration::ZERO, |begun| now - begun);
        let of = |(device, _): &(Arc<Device>, DeviceUuid)| match &reading.last {
            Some((at, last)) if waited < KEPT => {
                last.of(device, now - *at, least.get(&device.number).copied())
            }
            _ if reading.begun.is_none() => failed(device, "the query of NVML failed".to_owned()),
            _ => failed(device, format!("NVML has not answered for {}", short(waited))),
        };
        let failure = reading.last.as_ref().and_then(|(_, last)| last.failure());
        (devices.iter().map(of).collect(), failure.cloned())
    }
}

/// Queries NVML, which is opened if it is not yet. Returns it for the next query, unless a call
/// failed.
fn ask(
    nvml: Option<Nvml>,
    devices: &[(u32, DeviceUuid)],
) -> (Option<Nvml>, BTreeMap<u32, Result<DeviceUsage, DriverError>>) {
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
    DeviceProcesses { error: Some(error), ..empty(device) }
}

fn empty(device: &Device) -> DeviceProcesses {
    let (number, device) = (device.number, device.name.to_string());
    DeviceProcesses { number, device, ..DeviceProcesses::default() }
}

impl NvmlAnswers {
    /// Keeps the least memory of this process outside its arenas. Called only if these did not
    /// change during the query.
    fn see_least(&self, least: &mut BTreeMap<u32, ByteSize>) {
        for (number, usage) in &self.by_device {
            let own = usage.as_ref().ok().and_then(own);
            let outside =
                own.zip(self.arenas.get(number)).map(|(own, arenas)| own.saturating_sub(*arenas));
            // A context is never empty: arenas of managed memory may have more than is used.
            if let Some(outside) = outside.filter(|outside| !outside.is_zero()) {
                let least = least.entry(*number).or_insert(outside);
                *least = outside.min(*least);
            }
        }
    }

    /// Returns the first error if there is no list of any device.
    fn failure(&self) -> Option<&DriverError> {
        let mut errors = self.by_device.values().map(|usage| usage.as_ref().err());
        let first = errors.next()??;
        errors.all(|error| error.is_some()).then_some(first)
    }

    /// Returns the list of a device.
    fn of(&self, device: &Device, age: Duration, least: Option<ByteSize>) -> DeviceProcesses {
        let arenas = self.arenas.get(&device.number).copied().unwrap_or_default();
        let mut list = match self.by_device.get(&device.number) {
            Some(Ok(usage)) => {
                let overhead = device.driver.context_overhead().into_iter().chain(least).min();
                let mut list = empty(device);
                list.divide(usage, arenas, overhead);
                list
            }
            Some(Err(error)) => failed(device, error.to_string()),
            None => failed(device, "NVML was not queried".to_owned()),
        };
        (list.age, list.arenas) = (age, arenas);
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
        // This process has a context, so an empty list is incomplete, and a process that is not
        // identified may be this one.
        let is_known = !processes.is_empty()
            && processes.iter().all(|process| process.is_this_process.is_some());
        let attributed = match is_known {
            true => others.saturating_add(own.unwrap_or_default().max(arenas)),
            false => others.max(arenas),
        };
        self.used = usage.used;
        self.context_overhead = context;
        self.own_unmanaged = outside.zip(context).map(|(all, part)| all.saturating_sub(part));
        self.other_processes = is_known.then_some(others);
        self.unattributed = usage.used.map(|used| used.saturating_sub(attributed));
        self.processes.clone_from(processes);
        self.omitted = usage.omitted;
    }
}
