//! Device arenas in a `Memory`: all that it does with them.
//!
//! The rest of `memory` reaches them only through the items of this file, where it has the feature
//! `device`. [`Devices`] is a field of `Shared`. The parts: `device` is one of the devices, `select`
//! chooses one, `arenas` and `slots` open and list arenas, `release` and `shrink` release memory,
//! `report` has the figures, `cuda` lists the processes on a device.
//!
//! Invariants: no driver call under a lock of this module but that of openings (`slots`); no device is opened twice, and at most
//! [`DEVICES_MAX`] are; a fallback to the host is a diagnostic, and a warning unless there is no
//! GPU; if a requested device cannot be opened, that is an error.

mod arenas;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod release;
mod report;
mod select;
mod shrink;
mod slots;

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::config::arena::ShrinkTarget;
use crate::config::{Config, DeviceBackend, DeviceChoice};
use crate::device::driver::Driver;
use crate::device::driver::host::HostDriver;
use crate::sync::Mutex;
use lowtide_admission::{Admission, Maintenance};

use super::error::{Diagnostic, Severity, StartError};
use super::manager::Memory;
use super::shared::Shared;

use arenas::Arenas;
use device::{CountedIn, Device};
use report::Gone;
use select::DEVICES_MAX;
use slots::ArenaSlot;

#[cfg(feature = "cuda")]
pub use cuda::DeviceProcesses;
pub use report::{DeviceSnapshot, DeviceStatus, DevicesSnapshot};
pub use select::{DeviceSelector, Slot};
pub use shrink::{Run, Shrunk};
pub use slots::{ArenaReport, ArenaUse, SlotSnapshot};

pub(super) use report::{ArenasSensor, Series};
pub(super) use select::known_targets;

impl Memory {
    /// Returns a handle to the devices, their arenas and pools of host memory for copies. It acts
    /// on the default device unless [`MemoryDevices::on`] names another.
    #[must_use]
    pub const fn devices(&self) -> MemoryDevices<'_> {
        MemoryDevices { memory: self, selector: DeviceSelector::Default }
    }
}

/// The devices and arenas of a [`Memory`], from [`Memory::devices`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryDevices<'a> {
    memory: &'a Memory,
    /// The device on which arenas and pools are opened, and bytes reserved.
    selector: DeviceSelector,
}

impl<'a> MemoryDevices<'a> {
    /// Returns a handle that acts on the device that the selector names.
    #[must_use]
    pub const fn on(self, selector: DeviceSelector) -> Self {
        Self { selector, ..self }
    }

    fn shared(&self) -> &'a Arc<Shared> {
        &self.memory.0.shared
    }
}

/// The drivers that the application has opened; without one, the configured devices are.
pub(super) type GivenDrivers = Vec<Arc<dyn Driver>>;

/// The devices and the arenas of a `Memory`.
#[derive(Default)]
pub(super) struct Devices {
    /// By number, the default one first; empty if the configured device is `none`.
    list: Vec<Arc<Device>>,
    /// `true` if the application opened their drivers.
    are_given: bool,
    arenas: Arenas,
    /// The slots that have, or have had, an arena.
    slots: Mutex<BTreeMap<Slot, Arc<ArenaSlot>>>,
    gone: Gone,
    /// The targets that dropped runs leave to the worker.
    shrinks: Mutex<BTreeSet<ShrinkTarget>>,
    #[cfg(feature = "cuda")]
    governors: Mutex<Vec<std::sync::Weak<crate::device::driver::cuda::PoolGovernor>>>,
    #[cfg(feature = "cuda")]
    processes: cuda::ProcessLists,
}

impl Devices {
    /// Opens the configured devices, unless drivers are given.
    pub(super) fn open(
        config: &Config,
        given: GivenDrivers,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Result<Self, StartError> {
        let are_given = !given.is_empty();
        let drivers = open_drivers(config, given, diagnostics)?;
        check(&drivers)?;
        let watermark = config.device_watermark.value;
        let device = |(number, driver)| Arc::new(Device::new(number, driver, watermark));
        Ok(Self { list: (0..).zip(drivers).map(device).collect(), are_given, ..Self::default() })
    }

    /// Returns `true` if the arenas of the default device have another budget than the host.
    fn has_own_memory(&self) -> bool {
        self.list.first().is_some_and(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if some device has memory of its own.
    fn any_own_memory(&self) -> bool {
        self.list.iter().any(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if the default device's memory is the host's.
    pub(super) fn is_unified(&self) -> bool {
        self.list.first().is_some_and(|device| device.driver.capabilities().counts_as_host())
    }

    /// Returns the counts of dropped arenas, for metrics.
    pub(super) const fn gone(&self) -> &Gone {
        &self.gone
    }

    /// Returns what the control thread reads of the arenas.
    pub(super) fn sensor(&self, config: &Config) -> ArenasSensor {
        ArenasSensor::new(self.arenas.clone(), &self.list, config.device_limit.value)
    }

    /// Adds the budgets of further devices to the control loop.
    pub(super) fn add_budgets(&self, maintenance: &mut Maintenance) {
        self.budgets().for_each(|budget| maintenance.add_device(budget.clone()));
    }

    /// Closes the budgets of further devices.
    pub(super) fn close(&self) {
        self.budgets().for_each(Admission::close);
    }

    /// Returns the number of reservations held in the budgets of further devices.
    pub(super) fn held(&self) -> u64 {
        self.budgets().map(|budget| budget.stats().held()).sum()
    }

    fn budgets(&self) -> impl Iterator<Item = &Admission> {
        self.list.iter().filter_map(|device| device.admission.as_ref())
    }
}

/// Returns the chosen devices, or the backends of the drivers that were given instead, for the log.
pub(super) fn choice(devices: &Devices, config: &Config) -> String {
    let all: Vec<_> = if devices.are_given {
        let backend = |device: &Arc<Device>| format!("driver:{}", device.driver.backend());
        devices.list.iter().map(backend).collect()
    } else {
        config.devices.value.iter().map(ToString::to_string).collect()
    };
    all.join(",")
}

/// Opens the configured drivers, unless some are given.
fn open_drivers(
    config: &Config,
    given: GivenDrivers,
    diagnostics: &mut Vec<Diagnostic>,
) -> Result<GivenDrivers, StartError> {
    if !given.is_empty() {
        return Ok(given);
    }
    let (devices, backend) = (&config.devices.value, config.device_backend.value);
    let choice = devices.first().copied().unwrap_or_default();
    if matches!(choice, DeviceChoice::Host | DeviceChoice::None) && backend != DeviceBackend::Auto {
        let text = format!(
            "LOWTIDE_DEVICE_BACKEND={backend} ({}) has no effect with LOWTIDE_DEVICE={choice} \
             ({}): expected a CUDA device",
            config.device_backend.source, config.devices.source
        );
        diagnostics.push(Diagnostic::warning("device", text));
    }
    let host = || vec![Arc::new(HostDriver::new()) as Arc<dyn Driver>];
    let failed = |device, NoCuda { cause, .. }| StartError::NoCuda { device, cause };
    match choice {
        DeviceChoice::None => Ok(Vec::new()),
        DeviceChoice::Host => Ok(host()),
        DeviceChoice::CudaAll => {
            let count = count_cuda().map_err(|error| failed(choice, error))?;
            check_count(count)?;
            let all = (0..).take(count).map(DeviceChoice::CudaOrdinal);
            all.map(|one| open_cuda(one, backend).map_err(|error| failed(one, error))).collect()
        }
        DeviceChoice::Cuda | DeviceChoice::CudaOrdinal(_) | DeviceChoice::CudaUuid(_) => {
            check_count(devices.len())?;
            let all = devices.iter().copied();
            all.map(|one| open_cuda(one, backend).map_err(|error| failed(one, error))).collect()
        }
        DeviceChoice::Auto => {
            let opened = open_cuda(choice, backend).map(|driver| vec![driver]);
            Ok(opened.unwrap_or_else(|NoCuda { severity, cause }| {
                let text = format!("device arenas use host memory: {cause}");
                diagnostics.push(Diagnostic { severity, about: "device", text });
                host()
            }))
        }
    }
}

/// Checks that the drivers are of different devices, and not too many.
fn check(drivers: &[Arc<dyn Driver>]) -> Result<(), StartError> {
    check_count(drivers.len())?;
    let mut uuids = BTreeSet::new();
    for (nth, driver) in drivers.iter().enumerate() {
        let is_again = drivers.iter().take(nth).any(|other| Arc::ptr_eq(other, driver));
        let uuid = driver.uuid();
        if is_again || uuid.is_some_and(|uuid| !uuids.insert(uuid)) {
            let device = uuid.map_or_else(|| nth.to_string(), |uuid| uuid.to_string());
            return Err(StartError::SameDevice { device });
        }
    }
    Ok(())
}

const fn check_count(count: usize) -> Result<(), StartError> {
    if count > DEVICES_MAX {
        return Err(StartError::TooManyDevices { count, max: DEVICES_MAX });
    }
    Ok(())
}

/// The reason that there is no CUDA device, and its severity: only informational on a machine
/// without a GPU.
struct NoCuda {
    severity: Severity,
    cause: String,
}

/// Opens the chosen CUDA device, or returns the reason that it cannot be opened.
#[cfg(feature = "cuda")]
fn open_cuda(choice: DeviceChoice, backend: DeviceBackend) -> Result<Arc<dyn Driver>, NoCuda> {
    use crate::device::driver::Backend;
    use crate::device::driver::cuda::{self, CudaDriver, CudaOptions, MemoryKind};
    let device = match choice {
        DeviceChoice::CudaOrdinal(ordinal) => cuda::DeviceChoice::Ordinal(ordinal),
        DeviceChoice::CudaUuid(uuid) => cuda::DeviceChoice::Uuid(uuid),
        _ => cuda::DeviceChoice::Ordinal(0),
    };
    let (backend, memory) = match backend {
        DeviceBackend::Auto => (None, MemoryKind::Device),
        DeviceBackend::VirtualMemory => (Some(Backend::CudaVirtualMemory), MemoryKind::Device),
        DeviceBackend::Pool => (Some(Backend::CudaPool), MemoryKind::Device),
        DeviceBackend::Plain => (Some(Backend::CudaPlain), MemoryKind::Device),
        DeviceBackend::Managed => (Some(Backend::CudaPlain), MemoryKind::Managed),
    };
    let options = CudaOptions { device, backend, memory, ..CudaOptions::default() };
    let driver = CudaDriver::open(options).map_err(|error| no_cuda(&error))?;
    let (device, backend) = (driver.device(), driver.backend());
    log!(info, %device, %backend, "device arenas use CUDA memory");
    Ok(Arc::new(driver))
}

/// Returns the number of CUDA devices visible to this process, at least 1.
#[cfg(feature = "cuda")]
fn count_cuda() -> Result<usize, NoCuda> {
    use crate::device::driver::cuda::CudaDriver;
    CudaDriver::devices().map(|devices| devices.len()).map_err(|error| no_cuda(&error))
}

#[cfg(feature = "cuda")]
fn no_cuda(error: &crate::device::driver::DriverError) -> NoCuda {
    use crate::device::driver::DriverError::{NoDevice, NoLibrary};
    let severity = match error {
        NoLibrary { .. } | NoDevice => Severity::Info,
        _ => Severity::Warning,
    };
    NoCuda { severity, cause: error.to_string() }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: DeviceChoice, _: DeviceBackend) -> Result<Arc<dyn Driver>, NoCuda> {
    Err(not_built())
}

#[cfg(not(feature = "cuda"))]
fn count_cuda() -> Result<usize, NoCuda> {
    Err(not_built())
}

#[cfg(not(feature = "cuda"))]
fn not_built() -> NoCuda {
    let cause = "feature `cuda` is not enabled in this build".to_owned();
    NoCuda { severity: Severity::Info, cause }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::Settings;

    /// The bug: the log named the configured device, which drivers that are given replace.
    #[test]
    fn the_log_names_the_drivers_that_were_given_instead_of_the_configured_device() {
        let devices = Some(vec![DeviceChoice::Host]);
        let code = Settings { devices, ..Settings::default() };
        let config = Config::resolve(&code, &Settings::default()).expect("valid");
        let open = |given| Devices::open(&config, given, &mut Vec::new()).expect("opens");
        let host = || Arc::new(HostDriver::new()) as Arc<dyn Driver>;
        let chosen = |given| choice(&open(given), &config);
        assert_eq!(chosen(vec![host(), host()]), "driver:host,driver:host");
        assert_eq!(chosen(Vec::new()), "host");
    }
}
