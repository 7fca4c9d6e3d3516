//! The processes on each device, as NVML lists them.
//!
//! Only `MemoryDevices::processes` queries NVML, which may be slow, and hang if a device fails
//! ([`SlowValue`]).
//!
//! Invariant: if no figure of a device is `None`, `used = arenas + context_overhead +
//! own_unmanaged + other_processes + unattributed`, but for memory that changes during the query.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::clock::{Clock, short};
use crate::device::driver::cuda::{DeviceUsage, Nvml, ProcessUsage};
use crate::device::driver::{DeviceUuid, Driver as _, DriverError};
use crate::memory::slow_value::SlowValue;
use crate::sync::{Mutex, lock};

use super::device::Device;

/// The time for which a list is kept. Requests in between get the same list.
const KEPT: Duration = Duration::from_secs(5);

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

/// The answer of NVML about a device.
#[derive(Clone, Debug)]
struct NvmlAnswer {
    usage: Result<DeviceUsage, DriverError>,
    /// The memory committed by arenas at the begin of the query.
    arenas: ByteSize,
}

/// The answers of NVML by the numbers of the devices.
type NvmlAnswers = BTreeMap<u32, NvmlAnswer>;

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
        // Opens NVML if it is not open yet, and closes it if a call failed.
        let ask = move || -> NvmlAnswers {
            let opened = lock(&nvml).take().map_or_else(Nvml::open, Ok);
            let ask = |(number, uuid): &(u32, DeviceUuid)| {
                let usage = opened.as_ref().map_err(DriverError::clone);
                let usage = usage.and_then(|nvml| nvml.usage(*uuid));
                let arenas = before.get(number).copied().unwrap_or_default();
                (*number, NvmlAnswer { usage, arenas })
            };
            let answers: NvmlAnswers = uuids.iter().map(ask).collect();
            let is_well = answers.values().all(|answer| answer.usage.is_ok());
            *lock(&nvml) = opened.ok().filter(|_| is_well);
            answers
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
                see_least(answers, &mut least);
            }
            least.clone()
        };
        let now = clock.now();
        let waited = reading.begun.map_or(Duration::ZERO, |begun| now - begun);
        let of = |(device, _): &(Arc<Device>, DeviceUuid)| match &reading.last {
            Some((at, last)) if waited < KEPT => {
                let least = least.get(&device.number).copied();
                list_of(device, last.get(&device.number), now - *at, least)
            }
            _ if reading.begun.is_none() => failed(device, "the query of NVML failed".to_owned()),
            _ => failed(device, format!("NVML has not answered for {}", short(waited))),
        };
        let failure = reading.last.as_ref().and_then(|(_, last)| failure(last));
        (devices.iter().map(of).collect(), failure.cloned())
    }
}

/// Returns the memory of this process, if it is known.
fn own(usage: &DeviceUsage) -> Option<ByteSize> {
    usage.processes.iter().find(|process| process.is_this_process == Some(true))?.used
}

fn failed(device: &Device, error: String) -> DeviceProcesses {
    let (number, device, error) = (device.number, device.name.to_string(), Some(error));
    DeviceProcesses { number, device, error, ..DeviceProcesses::default() }
}

/// Keeps the least memory of this process outside its arenas. Called only if these did not change
/// during the query.
fn see_least(answers: &NvmlAnswers, least: &mut BTreeMap<u32, ByteSize>) {
    for (number, NvmlAnswer { usage, arenas }) in answers {
        let own = usage.as_ref().ok().and_then(own);
        let outside = own.map(|own| own.saturating_sub(*arenas));
        // A context is never empty: arenas of managed memory may have more than is used.
        if let Some(outside) = outside.filter(|outside| !outside.is_zero()) {
            let least = least.entry(*number).or_insert(outside);
            *least = outside.min(*least);
        }
    }
}

/// Returns the first error if there is no list of any device.
fn failure(answers: &NvmlAnswers) -> Option<&DriverError> {
    let mut errors = answers.values().map(|answer| answer.usage.as_ref().err());
    let first = errors.next()??;
    errors.all(|error| error.is_some()).then_some(first)
}

/// Returns the list of a device.
fn list_of(
    device: &Device,
    answer: Option<&NvmlAnswer>,
    age: Duration,
    least: Option<ByteSize>,
) -> DeviceProcesses {
    let (number, name) = (device.number, device.name.to_string());
    let mut list = DeviceProcesses { number, device: name, age, ..DeviceProcesses::default() };
    list.arenas = answer.map_or(ByteSize::ZERO, |answer| answer.arenas);
    match answer.map(|answer| &answer.usage) {
        Some(Ok(usage)) => {
            let overhead = device.driver.context_overhead().into_iter().chain(least).min();
            list.divide(usage, overhead);
        }
        Some(Err(error)) => list.error = Some(error.to_string()),
        None => list.error = Some("NVML was not queried".to_owned()),
    }
    list
}

impl DeviceProcesses {
    /// Divides the memory of the device among its users. `overhead` is an upper bound of this
    /// process's context.
    fn divide(&mut self, usage: &DeviceUsage, overhead: Option<ByteSize>) {
        let (processes, arenas) = (&usage.processes, self.arenas);
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
