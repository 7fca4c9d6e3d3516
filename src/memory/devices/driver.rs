//! Opens the driver of a `Memory`'s arenas according to the configuration.
//!
//! Invariant: a fallback to the host is a diagnostic, and a warning unless there is no GPU; if a
//! requested device cannot be opened, that is an error.

use std::sync::Arc;

use crate::config::{Config, DeviceBackend, DeviceChoice};
use crate::device::driver::Driver;
use crate::device::driver::host::HostDriver;

use crate::memory::error::{Diagnostic, Severity, StartError};

/// Opens the configured driver, unless one is given.
pub(super) fn open_driver(
    config: &Config,
    given: Option<Arc<dyn Driver>>,
    diagnostics: &mut Vec<Diagnostic>,
) -> Result<Option<Arc<dyn Driver>>, StartError> {
    if given.is_some() {
        return Ok(given);
    }
    let (choice, backend) = (config.device.choice.value, config.device.backend.value);
    if matches!(choice, DeviceChoice::Host | DeviceChoice::None) && backend != DeviceBackend::Auto {
        let text = format!(
            "LOWTIDE_DEVICE_BACKEND={backend} ({}) has no effect with LOWTIDE_DEVICE={choice} \
             ({}): expected a CUDA device",
            config.device.backend.source, config.device.choice.source
        );
        diagnostics.push(Diagnostic::warning("device", text));
    }
    let host = || Some(Arc::new(HostDriver::new()) as Arc<dyn Driver>);
    match choice {
        DeviceChoice::None => Ok(None),
        DeviceChoice::Host => Ok(host()),
        DeviceChoice::Cuda | DeviceChoice::CudaOrdinal(_) | DeviceChoice::CudaUuid(_) => {
            let opened = open_cuda(choice, backend).map(Some);
            opened.map_err(|NoCuda { cause, .. }| StartError::NoCuda { device: choice, cause })
        }
        DeviceChoice::Auto => Ok(open_cuda(choice, backend).map(Some).unwrap_or_else(|no_cuda| {
            let NoCuda { severity, cause } = no_cuda;
            let text = format!("device arenas use host memory: {cause}");
            diagnostics.push(Diagnostic { severity, about: "device", text });
            host()
        })),
    }
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
    use crate::device::driver::cuda::{
        self, CudaDriver, CudaError, CudaOptions, MemoryKind, Probe,
    };
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
    let driver = CudaDriver::open(options).map_err(|error| NoCuda {
        severity: match error {
            CudaError::Unavailable(Probe::NoLibrary { .. } | Probe::NoDevice) => Severity::Info,
            _ => Severity::Warning,
        },
        cause: error.to_string(),
    })?;
    let (device, backend) = (driver.device(), driver.backend());
    log!(info, %device, %backend, "device arenas use CUDA memory");
    Ok(Arc::new(driver))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: DeviceChoice, _: DeviceBackend) -> Result<Arc<dyn Driver>, NoCuda> {
    let cause = "feature `cuda` is not enabled in this build".to_owned();
    Err(NoCuda { severity: Severity::Info, cause })
}
