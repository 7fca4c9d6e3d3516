//! The driver of a `Memory`'s arenas, as the configuration asks for it.
//!
//! Invariant: a fallback to the host is a note, and a warning unless there is no GPU; a device that
//! was asked for and cannot be opened is an error.

use std::sync::Arc;

use crate::config::{Config, DeviceChoice, DeviceRung};
use crate::device::driver::Driver;
use crate::device::driver::host::HostDriver;

use super::error::{Note, Severity, StartError};

/// The driver that the configuration asks for, where none is given.
pub(super) fn open_driver(
    config: &Config,
    given: Option<Arc<dyn Driver>>,
    notes: &mut Vec<Note>,
) -> Result<Option<Arc<dyn Driver>>, StartError> {
    if given.is_some() {
        return Ok(given);
    }
    let (choice, rung) = (config.device.value, config.device_rung.value);
    if matches!(choice, DeviceChoice::Host | DeviceChoice::None) && rung != DeviceRung::Auto {
        let text = format!(
            "LOWTIDE_DEVICE_RUNG={rung} ({}) is of no use with LOWTIDE_DEVICE={choice} ({}): \
             expected a CUDA device",
            config.device_rung.source, config.device.source
        );
        notes.push(Note::warning("device", text));
    }
    let host = || Some(Arc::new(HostDriver::new()) as Arc<dyn Driver>);
    match choice {
        DeviceChoice::None => Ok(None),
        DeviceChoice::Host => Ok(host()),
        DeviceChoice::Cuda | DeviceChoice::CudaOrdinal(_) | DeviceChoice::CudaUuid(_) => {
            let opened = open_cuda(choice, rung).map(Some);
            opened.map_err(|NoCuda { cause, .. }| StartError::NoCuda { device: choice, cause })
        }
        DeviceChoice::Auto => Ok(open_cuda(choice, rung).map(Some).unwrap_or_else(|no_cuda| {
            let NoCuda { severity, cause } = no_cuda;
            let text = format!("device arenas lie in host memory: {cause}");
            notes.push(Note { severity, about: "device", text });
            host()
        })),
    }
}

/// Why there is no CUDA device, and whether that is worth a warning: a machine without a GPU is
/// not.
struct NoCuda {
    severity: Severity,
    cause: String,
}

/// The CUDA device that is chosen, or why it cannot be had.
#[cfg(feature = "cuda")]
fn open_cuda(choice: DeviceChoice, rung: DeviceRung) -> Result<Arc<dyn Driver>, NoCuda> {
    use crate::device::driver::Rung;
    use crate::device::driver::cuda::{
        self, CudaDriver, CudaError, CudaOptions, MemoryKind, Probe,
    };
    let device = match choice {
        DeviceChoice::CudaOrdinal(ordinal) => cuda::DeviceChoice::Ordinal(ordinal),
        DeviceChoice::CudaUuid(uuid) => cuda::DeviceChoice::Uuid(uuid),
        _ => cuda::DeviceChoice::Ordinal(0),
    };
    let (rung, memory) = match rung {
        DeviceRung::Auto => (None, MemoryKind::Device),
        DeviceRung::VirtualMemory => (Some(Rung::CudaVirtualMemory), MemoryKind::Device),
        DeviceRung::Pool => (Some(Rung::CudaPool), MemoryKind::Device),
        DeviceRung::Plain => (Some(Rung::CudaPlain), MemoryKind::Device),
        DeviceRung::Managed => (Some(Rung::CudaPlain), MemoryKind::Managed),
    };
    let options = CudaOptions { device, rung, memory, ..CudaOptions::default() };
    let driver = CudaDriver::open(options).map_err(|error| NoCuda {
        severity: match error {
            CudaError::Unavailable(Probe::NoLibrary { .. } | Probe::NoDevice) => Severity::Info,
            _ => Severity::Warning,
        },
        cause: error.to_string(),
    })?;
    let (device, rung) = (driver.device(), driver.rung());
    log!(info, %device, %rung, "device arenas lie in CUDA memory");
    Ok(Arc::new(driver))
}

#[cfg(not(feature = "cuda"))]
fn open_cuda(_: DeviceChoice, _: DeviceRung) -> Result<Arc<dyn Driver>, NoCuda> {
    let cause = "this build has no CUDA (feature `cuda` is off)".to_owned();
    Err(NoCuda { severity: Severity::Info, cause })
}
