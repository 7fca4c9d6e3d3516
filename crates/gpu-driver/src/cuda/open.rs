//! Opens a CUDA device: initializes the driver, finds the device, and selects its memory backend.
//!
//! Invariant: a failed open holds nothing.

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
use crate::{Backend, DeviceUuid, DriverError};
use lowtide_core::bytes::ByteSize;
use lowtide_core::log;

/// A choice of device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// The device with this ordinal, among those visible to this process.
    Ordinal(u32),
    /// The device with this UUID.
    Uuid(DeviceUuid),
}

/// The kind of memory that the plain backend allocates.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum MemoryKind {
    /// Memory of the device.
    #[default]
    Device,
    /// Managed memory: the driver moves its pages between device and host, so there may be more of
    /// it than the device has, at the price of page faults. Available with [`Backend::CudaPlain`]
    /// only; this crate never accesses it from the host.
    Managed,
}

/// A set of devices by their ordinals, among those visible to this process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DeviceSet(u128);

impl DeviceSet {
    /// Creates the set of these ordinals.
    ///
    /// # Panics
    /// If an ordinal is above 127.
    #[must_use]
    pub const fn of(ordinals: &[u32]) -> Self {
        let (mut set, mut at) = (0, 0);
        while at < ordinals.len() {
            assert!(ordinals[at] < u128::BITS, "an ordinal above 127");
            set |= 1 << ordinals[at];
            at += 1;
        }
        Self(set)
    }

    pub(super) const fn is_empty(self) -> bool {
        self.0 == 0
    }

    /// Returns the ordinals in ascending order.
    pub(super) fn ordinals(self) -> impl Iterator<Item = u32> {
        (0..u128::BITS).filter(move |ordinal| self.0 & (1 << ordinal) != 0)
    }
}

/// Options for opening a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// The device. Default: the first visible one.
    pub device: DeviceChoice,
    /// The memory backend. Default: `None`, the first that works of virtual memory, pool and plain
    /// memory. Virtual memory is skipped if there are fewer addresses than the memory needs.
    pub backend: Option<Backend>,
    /// The kind of plain memory. Default: device memory. With managed memory no other backend is
    /// tried.
    pub memory: MemoryKind,
    /// The unit in which memory is allocated and released: a power of two, at least the device's
    /// granularity, and at least 64 KiB for the pool and plain backends. A large unit needs fewer
    /// calls, a small one leaves less memory unused. Default: `None`, the device's granularity (2
    /// MiB on data-centre devices), or 2 MiB for the pool and plain backends.
    pub handle: Option<ByteSize>,
    /// The maximum memory that the private pool may hold, in use and cached, with
    /// [`Backend::CudaPool`]. It has no effect with a driver older than CUDA 12.2, or if the device
    /// refuses a private pool and its default pool is used; an arena's limit applies in any case.
    /// Default: `None`, no limit.
    pub pool_limit: Option<ByteSize>,
    /// Other devices that read and write the memory (`cuMemSetAccess`), for as long as it is
    /// committed. `cudaDeviceEnablePeerAccess` has no effect on virtual memory, and no other
    /// backend is tried. Each commit takes longer, by the number of devices. Default: none.
    pub peers: DeviceSet,
    /// `true` if network cards may access the memory directly (`gpuDirectRDMACapable`). No other
    /// backend than virtual memory is tried. Default: `false`, because some systems refuse such
    /// memory (WSL 2).
    pub rdma: bool,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self {
            device: DeviceChoice::Ordinal(0),
            backend: None,
            memory: MemoryKind::Device,
            handle: None,
            pool_limit: None,
            peers: DeviceSet::default(),
            rdma: false,
        }
    }
}

impl CudaDriver {
    /// Returns the devices visible to this process, in the order of their ordinals.
    ///
    /// Cost: that of [`probe`](super::probe).
    ///
    /// # Errors
    /// [`CudaError::Unavailable`] without a driver or device; [`CudaError::Driver`] if a call
    /// fails.
    pub fn devices() -> Result<Vec<CudaDevice>, CudaError> {
        let calls = start(&|_| true)?;
        list(&calls)
    }

    /// Opens a device: retains its primary context, which is shared within the process, and tests
    /// its memory once.
    ///
    /// Cost: the first open in a process creates the context, which takes from 0.1 s to several
    /// seconds, and uses several hundred MiB of the device for the life of the process.
    ///
    /// # Errors
    /// [`CudaError`] if there is no such device or no usable memory. Nothing is held then.
    pub fn open(options: CudaOptions) -> Result<Self, CudaError> {
        Self::open_with(options, &|_| true)
    }

    /// Like [`CudaDriver::open`], with some functions of the library hidden; for tests.
    ///
    /// # Errors
    /// The errors of [`CudaDriver::open`].
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
                "CUDA backend skipped"
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
            log!(warn, library = name, cause = %probe, "library skipped: not a CUDA driver");
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

/// Converts an error of `cuInit` to the form that the probe reports.
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
