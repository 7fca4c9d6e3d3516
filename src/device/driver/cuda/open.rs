//! Opens a CUDA device: finds it, asks what it offers, and tries that once for real.
//!
//! What an attribute says is not believed: some shares of a device claim virtual memory and then
//! refuse a call. One handle is reserved, mapped, written, copied back, unmapped and given up
//! before an arena is built on it.
//!
//! Invariant: `open = Ok => a round trip through the rung's memory gave back what was written`.

use super::abi::{ATTRIBUTE_VIRTUAL_MEMORY, NO_DEVICE};
use super::calls::{Answer, Calls};
use super::context::Context;
use super::device::{CudaDevice, DeviceUuid};
use super::driver::CudaDriver;
use super::error::{CudaError, RungFailure};
use super::library::{LIBRARIES, Library};
use super::mapping::Mapping;
use super::probe::Probe;
use super::stores::Stores;
use super::table::{Find, Missing, Table};
use super::vmm::VirtualMemory;
use crate::bytes::ByteSize;
use crate::device::driver::{DriverError, Rung};

/// Which device to open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum DeviceChoice {
    /// That with this number, among those that this process sees.
    Ordinal(u32),
    /// That with this UUID.
    Uuid(DeviceUuid),
}

/// How to open a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CudaOptions {
    /// Which one. Default: the first that this process sees.
    pub device: DeviceChoice,
    /// In which way memory is had. Default: `None`, the best that the device offers.
    pub rung: Option<Rung>,
    /// How large the pieces are in which memory is taken and given back: a power of two, at least
    /// the device's granularity. Large ones need fewer calls, small ones leave less unused.
    /// Default: `None`, the device's granularity, 2 MiB on those for data centres.
    pub handle: Option<ByteSize>,
}

impl Default for CudaOptions {
    fn default() -> Self {
        Self { device: DeviceChoice::Ordinal(0), rung: None, handle: None }
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
        let memory = virtual_memory(&calls, options, &device, number)?;
        let context = Context::retain(calls, number)?;
        let own = context.call(Calls::stream_create)?;
        let stores = Stores::default();
        let driver = Self { context, device: device.clone(), memory, stores, own, driver_version };
        match driver.round_trip() {
            Ok(()) => Ok(driver),
            Err(cause) => Err(no_rung(&device, Rung::CudaVirtualMemory, cause)),
        }
    }

    /// Takes memory of one handle, writes it, reads it, and gives it back.
    fn round_trip(&self) -> Result<(), RungFailure> {
        self.context
            .call(|calls| {
                let size = self.memory.unit();
                let at = self.memory.reserve(calls, size)?;
                let held = match self.memory.commit(calls, at, size) {
                    Ok(()) => {
                        let held = self.write_and_read(calls, at.get());
                        // What stays mapped keeps its addresses.
                        self.memory.decommit(calls, at, size)?;
                        held
                    }
                    Err(error) => Err(error),
                };
                let gone = self.memory.unreserve(calls, at, size);
                held.and_then(|held| gone.map(|()| held))
            })?
            .then_some(())
            .ok_or(RungFailure::Contents)
    }

    /// Whether what was written at an address is what is read there.
    fn write_and_read(&self, calls: &Calls, at: u64) -> Answer<bool> {
        let size = ByteSize::kib(64).min(self.memory.unit());
        let all = 0..size.as_usize().unwrap_or(0);
        let mut locked = calls.host_alloc(size)?;
        locked.fill(0x5A);
        let written = calls
            .copy_to_device((&locked, all.clone()), at, self.own)
            .and_then(|()| calls.stream_synchronize(self.own));
        // After an error of the wait the copy may be under way still.
        let read = written.and_then(|()| {
            locked.fill(0);
            calls.copy_to_host(at, (&locked, all), self.own)?;
            calls.stream_synchronize(self.own)
        });
        let held = read.map(|()| locked.holds(0x5A));
        if held.is_err() && calls.stream_synchronize(self.own).is_err() {
            return held; // the host memory is left to the copies
        }
        let freed = calls.host_free(&locked);
        held.and_then(|held| freed.map(|()| held))
    }
}

/// Finds the driver's functions and starts it.
fn start(has: &dyn Fn(&str) -> bool) -> Result<Calls, CudaError> {
    let library = Library::open(LIBRARIES)
        .map_err(|error| CudaError::Unavailable(Probe::NoLibrary { tried: LIBRARIES, error }))?;
    let find: Find<'_> = &|name| library.symbol(name).filter(|_| name.to_str().is_ok_and(has));
    let table = Table::find(find)
        .map_err(|Missing(symbol)| CudaError::Unavailable(Probe::NoSymbol { symbol }))?;
    let calls = Calls::new(table);
    calls.init().map_err(of_init)?;
    Ok(calls)
}

/// What `cuInit` answered, as the probe says it.
fn of_init(error: DriverError) -> CudaError {
    match error {
        DriverError::Refused { code, .. } if code == i64::from(NO_DEVICE) => {
            CudaError::Unavailable(Probe::NoDevice)
        }
        DriverError::Refused { code, message, .. } => {
            let code = u32::try_from(code).unwrap_or(u32::MAX);
            CudaError::Unavailable(Probe::InitFailed { code, name: message })
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

fn choose(calls: &Calls, choice: DeviceChoice) -> Result<CudaDevice, CudaError> {
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

/// The first rung, where it is offered and no other is wanted.
fn virtual_memory(
    calls: &Calls,
    options: CudaOptions,
    device: &CudaDevice,
    number: i32,
) -> Result<VirtualMemory, CudaError> {
    if let Some(rung) = options.rung.filter(|&rung| rung != Rung::CudaVirtualMemory) {
        return Err(no_rung(device, rung, RungFailure::NoArena));
    }
    let refused = |cause| no_rung(device, Rung::CudaVirtualMemory, cause);
    let of_virtual = calls.table.virtual_memory;
    let of_virtual = of_virtual.map_err(|Missing(name)| refused(RungFailure::NoFunction(name)))?;
    let offered = calls.device_attribute(ATTRIBUTE_VIRTUAL_MEMORY, number)?;
    if offered == 0 {
        return Err(refused(RungFailure::NotOffered));
    }
    let mapping = Mapping::new(of_virtual, calls.table.retain.ok(), number);
    let granularity = mapping.granularity(calls).map_err(|error| refused(error.into()))?;
    let requested = options.handle.unwrap_or(granularity);
    if requested < granularity || !requested.get().is_power_of_two() {
        return Err(CudaError::HandleSize { requested, granularity });
    }
    Ok(VirtualMemory::new(mapping, requested))
}

fn no_rung(device: &CudaDevice, rung: Rung, cause: RungFailure) -> CudaError {
    CudaError::NoSuchRung { rung, device: device.ordinal, cause }
}
