//! Opens a CUDA device: starts the driver, finds the device, and has the ladder find its memory.
//!
//! Invariant: an open that failed holds nothing.

use super::abi::NO_DEVICE;
use super::calls::{Answer, Calls};
use super::device::CudaDevice;
use super::driver::CudaDriver;
use super::error::CudaError;
use super::ladder::{Ground, climb};
use super::library::{LIBRARIES, Library, Look, search};
use super::probe::Probe;
use super::stores::Stores;
use super::table::{Find, Missing, Table};
use crate::bytes::ByteSize;
use crate::device::driver::{Backend, DeviceUuid, DriverError};

/// Which device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// That with this number, among those that this process sees.
    Ordinal(u32),
    /// That with this UUID.
    Uuid(DeviceUuid),
}

/// What plain memory is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum MemoryKind {
    /// Memory of the device.
    #[default]
    Device,
    /// Managed memory: the driver moves its pages between device and host by itself, so that there
    /// may be more of it than the device has, at the price of faults. Had on the rung
    /// [`Backend::CudaPlain`] only; nothing of ours reaches it from the host.
    Managed,
}

/// How to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which one. Default: the first that this process sees.
    pub device: DeviceChoice,
    /// In which way memory is had. Default: `None`, the first that works: virtual memory, a pool,
    /// plain memory.
    pub backend: Option<Backend>,
    /// What plain memory is. Default: memory of the device. With managed memory no other rung is
    /// looked at.
    pub memory: MemoryKind,
    /// How large the pieces are in which memory is taken and given back: a power of two, at least
    /// the device's granularity; at least 64 KiB out of a pool or plain. Large ones need fewer
    /// calls, small ones leave less unused.
    /// Default: `None`, the device's granularity, 2 MiB on those for data centres; 2 MiB out of a
    /// pool or plain.
    pub handle: Option<ByteSize>,
    /// How much memory our pool takes at most, in use and kept, on the rung [`Backend::CudaPool`].
    /// A driver before CUDA 12.2 does not know such a limit, and the device's own pool, where ours
    /// is refused, has none: an arena's limit holds in each case. Default: `None`, as much as the
    /// device has.
    pub pool_limit: Option<ByteSize>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Ordinal(0),
            backend: None,
            memory: MemoryKind::Device,
            handle: None,
            pool_limit: None,
        }
    }
}

impl CudaDriver {
    /// The devices that this process sees, in the order of their numbers.
    ///
    /// Cost: as [`probe`](super::probe).
    ///
    /// # Errors
    /// [`CudaError::Unavailable`]; [`CudaError::Driver`].
    pub fn devices() -> Result<Vec<CudaDevice>, CudaError> {
        let calls = start(&|_| true)?;
        list(&calls)
    }

    /// Opens a device: retains its primary context, which others in this process share, and tries
    /// its memory once.
    ///
    /// Cost: the first in a process makes the context, which takes from a tenth of a second to
    /// seconds and several hundred MiB of the device for as long as the process lives.
    ///
    /// # Errors
    /// [`CudaError`]: each way in which there is no such device or no such memory. Nothing is held
    /// then.
    pub fn open(options: CudaOptions) -> Result<Self, CudaError> {
        Self::open_with(options, &|_| true)
    }

    /// As [`CudaDriver::open`] where the library lacks some functions; for tests.
    #[doc(hidden)]
    pub fn open_with(options: CudaOptions, has: &dyn Fn(&str) -> bool) -> Result<Self, CudaError> {
        let calls = start(has)?;
        let device = choose(&calls, options.device)?;
        let driver_version = calls.driver_version()?;
        let number = calls.device(device.ordinal)?;
        let ground = Ground { device, number, driver_version };
        let found = climb(calls, &ground, options)?;
        for skipped in &found.skipped {
            log!(
                info,
                backend = %skipped.backend,
                cause = %skipped.cause,
                "a better way to CUDA memory cannot be had"
            );
        }
        Ok(Self {
            seat: found.seat,
            device: ground.device,
            memory: found.memory,
            skipped: found.skipped,
            stores: Stores::default(),
            driver_version,
        })
    }
}

/// Finds the driver's functions and starts it.
pub(super) fn start(has: &dyn Fn(&str) -> bool) -> Result<Calls, CudaError> {
    let started = search(LIBRARIES, |name, library| match start_in(library, has) {
        Err(CudaError::Unavailable(probe)) if probe.is_no_driver() => {
            log!(warn, library = name, cause = %probe, "library passed over: not a CUDA driver");
            Look::Passed(Err(CudaError::Unavailable(probe)))
        }
        started => Look::Found(started),
    });
    let none = |error| CudaError::Unavailable(Probe::NoLibrary { tried: LIBRARIES, error });
    started.map_err(none)?
}

fn start_in(library: Library, has: &dyn Fn(&str) -> bool) -> Result<Calls, CudaError> {
    let find: Find<'_> = &|name| library.symbol(name).filter(|_| name.to_str().is_ok_and(has));
    let table = Table::find(find)
        .map_err(|Missing(symbol)| CudaError::Unavailable(Probe::NoSymbol { symbol }))?;
    let calls = Calls::new(table);
    calls.init().map_err(|error| of_init(&calls, error))?;
    Ok(calls)
}

/// What `cuInit` answered, as the probe says it.
fn of_init(calls: &Calls, error: DriverError) -> CudaError {
    match error {
        DriverError::Refused { code, .. } if code == i64::from(NO_DEVICE) => {
            CudaError::Unavailable(Probe::NoDevice)
        }
        DriverError::Refused { code, .. } => {
            let code = u32::try_from(code).unwrap_or(u32::MAX);
            let name = calls.error_name(code).unwrap_or_else(|| "unnamed".to_owned());
            CudaError::Unavailable(Probe::InitFailed { code, name })
        }
        other => CudaError::Driver(other),
    }
}

fn list(calls: &Calls) -> Result<Vec<CudaDevice>, CudaError> {
    let count = calls.device_count()?;
    if count == 0 {
        return Err(CudaError::Unavailable(Probe::NoDevice));
    }
    Ok((0..count).map(|ordinal| CudaDevice::read(calls, ordinal)).collect::<Answer<_>>()?)
}

pub(super) fn choose(calls: &Calls, choice: DeviceChoice) -> Result<CudaDevice, CudaError> {
    match choice {
        DeviceChoice::Ordinal(ordinal) => {
            let count = calls.device_count()?;
            if count == 0 {
                return Err(CudaError::Unavailable(Probe::NoDevice));
            }
            if ordinal >= count {
                return Err(CudaError::NoSuchDevice { ordinal, count });
            }
            Ok(CudaDevice::read(calls, ordinal)?)
        }
        DeviceChoice::Uuid(uuid) => {
            let devices = list(calls)?;
            let known = devices.iter().map(|device| device.uuid).collect();
            let found = devices.into_iter().find(|device| device.uuid == uuid);
            found.ok_or(CudaError::NoSuchUuid { uuid, known })
        }
    }
}
