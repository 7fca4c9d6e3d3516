//! Opens the drivers of a `Memory`'s arenas according to the configuration: one for each device.
//!
//! Invariants: no device is opened twice, and at most [`DEVICES_MAX`] are; a fallback to the host
//! is a diagnostic, and a warning unless there is no GPU; if a requested device cannot be opened,
//! that is an error.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::{Config, DeviceBackend, DeviceChoice};
use crate::device::driver::Driver;
use crate::device::driver::host::HostDriver;
use crate::memory::error::{Diagnostic, StartError};

use super::selector::DEVICES_MAX;
use super::state::GivenDrivers;

/// Opens the configured drivers, unless some are given.
pub(super) fn open_drivers(
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
            Ok(opened.unwrap_or_else(|NoCuda { is_problem, cause }| {
                let text = format!("device arenas use host memory: {cause}");
                diagnostics.push(Diagnostic { about: "device", is_problem, text });
                host()
            }))
        }
    }
}

/// Checks that the drivers are of different devices, and not too many.
pub(super) fn check(drivers: &[Arc<dyn Driver>]) -> Result<(), StartError> {
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
fn count_cuda() -> Result<usize, NoCuda> {
    use crate::device::driver::cuda::CudaDriver;
    CudaDriver::devices().map(|devices| devices.len()).map_err(|error| no_cuda(&error))
}

#[cfg(feature = "cuda")]
fn no_cuda(error: &crate::device::driver::DriverError) -> NoCuda {
    use crate::device::driver::DriverError::{NoDevice, NoLibrary};
    let is_problem = !matches!(error, NoLibrary { .. } | NoDevice);
    NoCuda { is_problem, cause: error.to_string() }
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
    NoCuda { is_problem: false, cause }
}
