//! The devices of a `Memory`, which are opened according to the configuration, and the state of its
//! arenas.
//!
//! Part of the state that the handle and the threads share. It acts on no arena.
//!
//! Invariants: no device is opened twice, and at most [`DEVICES_MAX`] are; a fallback to the host
//! is a diagnostic, and a warning unless there is no GPU; if a requested device cannot be opened,
//! that is an error.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::arena::ShrinkTarget;
use crate::config::{Config, DeviceBackend, DeviceChoice};
use crate::device::driver::Driver;
use crate::device::driver::host::HostDriver;
use crate::memory::error::{Diagnostic, StartError};
use crate::sync::Mutex;
use lowtide_admission::{Admission, DeviceFigures};

use super::arenas::Arenas;
use super::device::{CountedIn, Device};
use super::report::{ArenasSensor, Gone};
use super::slots::ArenaSlot;
use super::values::{DEVICES_MAX, Slot};

/// The drivers that the application has opened; without one, the configured devices are.
pub(in crate::memory) type GivenDrivers = Vec<Arc<dyn Driver>>;

/// The devices and the arenas of a `Memory`.
#[derive(Default)]
pub(in crate::memory) struct Devices {
    /// By number, the default one first; empty if the configured device is `none`.
    pub(super) list: Vec<Arc<Device>>,
    /// `true` if the application opened their drivers.
    are_given: bool,
    pub(super) arenas: Arenas,
    /// The slots that have, or have had, an arena.
    pub(super) slots: Mutex<BTreeMap<Slot, Arc<ArenaSlot>>>,
    pub(in crate::memory) gone: Gone,
    /// The targets that dropped runs leave to the worker.
    pub(super) shrinks: Mutex<BTreeSet<ShrinkTarget>>,
    #[cfg(feature = "cuda")]
    pub(super) governors: Mutex<Vec<std::sync::Weak<crate::device::driver::cuda::PoolGovernor>>>,
    #[cfg(feature = "cuda")]
    pub(super) processes: super::cuda::ProcessLists,
}

impl Devices {
    /// Opens the configured devices, unless drivers are given.
    pub(in crate::memory) fn open(
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
    pub(super) fn has_own_memory(&self) -> bool {
        self.list.first().is_some_and(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if a device has memory of its own.
    pub(super) fn has_own(&self) -> bool {
        self.list.iter().any(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if the default device's memory is the host's.
    pub(in crate::memory) fn is_unified(&self) -> bool {
        self.list.first().is_some_and(|device| device.driver.capabilities().counts_as_host())
    }

    /// Returns what the control thread reads of the arenas.
    pub(in crate::memory) fn sensor(&self, config: &Config) -> ArenasSensor {
        let limit = Some(config.device_limit.value).filter(|limit| *limit != ByteSize::MAX);
        let figures = vec![DeviceFigures::default(); self.list.len()];
        let (has_own, is_first_own) = (self.has_own(), self.has_own_memory());
        let (arenas, list) = (self.arenas.clone(), self.list.clone());
        ArenasSensor { arenas, list, figures, limit, has_own, is_first_own }
    }

    /// Returns the budgets of further devices.
    pub(in crate::memory) fn budgets(&self) -> impl Iterator<Item = &Admission> {
        self.list.iter().filter_map(|device| device.admission.as_ref())
    }
}

/// Returns the chosen devices, or the backends of the drivers that were given instead, for the log.
pub(in crate::memory) fn choice(devices: &Devices, config: &Config) -> String {
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
    let chosen = match choice {
        DeviceChoice::None => return Ok(Vec::new()),
        DeviceChoice::Host => return Ok(host()),
        DeviceChoice::Auto => {
            let opened = open_cuda(choice, backend).map(|driver| vec![driver]);
            return Ok(opened.unwrap_or_else(|NoCuda { is_problem, cause }| {
                let text = format!("device arenas use host memory: {cause}");
                diagnostics.push(Diagnostic { about: "device", is_problem, text });
                host()
            }));
        }
        DeviceChoice::CudaAll => {
            let count = count_cuda().map_err(|error| failed(choice, error))?;
            (0..count).map(DeviceChoice::CudaOrdinal).collect()
        }
        _ => devices.clone(),
    };
    check_count(chosen.len())?;
    let open = |one| open_cuda(one, backend).map_err(|error| failed(one, error));
    chosen.into_iter().map(open).collect()
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

/// The reason that there is no CUDA device, which is no problem on a machine without a GPU.
struct NoCuda {
    is_problem: bool,
    cause: String,
}

/// Opens the chosen CUDA device, or returns the reason that it cannot be opened.
#[cfg(feature = "cuda")]
fn open_cuda(choice: DeviceChoice, backend: DeviceBackend) -> Result<Arc<dyn Driver>, NoCuda> {
    use crate::device::driver::Backend;
    use crate::device::driver::cuda::{self, CudaDriver, CudaOptions};
    let device = match choice {
        DeviceChoice::CudaOrdinal(ordinal) => cuda::DeviceChoice::Ordinal(ordinal),
        DeviceChoice::CudaUuid(uuid) => cuda::DeviceChoice::Uuid(uuid),
        _ => cuda::DeviceChoice::Ordinal(0),
    };
    let managed = backend == DeviceBackend::Managed;
    let backend = match backend {
        DeviceBackend::Auto => None,
        DeviceBackend::VirtualMemory => Some(Backend::CudaVirtualMemory),
        DeviceBackend::Pool => Some(Backend::CudaPool),
        DeviceBackend::Plain | DeviceBackend::Managed => Some(Backend::CudaPlain),
    };
    let options = CudaOptions { device, backend, managed, ..CudaOptions::default() };
    let driver = CudaDriver::open(options).map_err(|error| no_cuda(&error))?;
    let (device, backend) = (driver.device(), driver.backend());
    log!(info, %device, %backend, "device arenas use CUDA memory");
    Ok(Arc::new(driver))
}

/// Returns the number of CUDA devices visible to this process, at least 1.
#[cfg(feature = "cuda")]
fn count_cuda() -> Result<u32, NoCuda> {
    use crate::device::driver::cuda::CudaDriver;
    let devices = CudaDriver::devices().map_err(|error| no_cuda(&error))?;
    Ok(u32::try_from(devices.len()).unwrap_or(u32::MAX))
}

#[cfg(feature = "cuda")]
fn no_cuda(error: &crate::device::driver::DriverError) -> NoCuda {
    use crate::device::driver::DriverError::{NoDevice, NoLibrary};
    let is_problem = !matches!(error, NoLibrary { .. } | NoDevice);
    NoCuda { is_problem, cause: error.to_string() }
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: DeviceChoice, _: DeviceBackend) -> Result<Arc<dyn Driver>, NoCuda> {
    let cause = "feature `cuda` is not enabled in this build".to_owned();
    Err(NoCuda { is_problem: false, cause })
}

#[cfg(not(feature = "cuda"))]
fn count_cuda() -> Result<u32, NoCuda> {
    open_cuda(DeviceChoice::CudaAll, DeviceBackend::Auto).map(|_| 0)
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
