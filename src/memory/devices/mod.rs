//! Device arenas in a `Memory`: all that it does with them.
//!
//! The rest of `memory` reaches them only through the items of this file, where it has the feature
//! `device`. [`Devices`] is a field of `Shared`. The parts: `driver` opens the devices, `device` is
//! one of them, `select` chooses one, `arenas` and `slots` open arenas and list them, `release` and
//! `shrink` release memory, `report` has the figures, `cuda` lists the processes on a device.
//!
//! Invariant: no driver call under a lock of this module.

mod arenas;
#[cfg(feature = "cuda")]
mod cuda;
mod device;
mod driver;
mod release;
mod report;
mod select;
mod selector;
mod shrink;
mod slots;

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::Config;
use crate::config::arena::Target;
use crate::device::driver::Driver;
use crate::sync::Mutex;
use lowtide_admission::{Admission, Maintenance};

use super::error::{Diagnostic, StartError};
use super::manager::Memory;
use super::shared::Shared;

use arenas::Arenas;
use device::{CountedIn, Device};
use report::Gone;
use slots::Scopes;

#[cfg(feature = "cuda")]
pub use cuda::DeviceProcesses;
pub use report::{DeviceSnapshot, DeviceStatus, DevicesSnapshot};
pub use select::DeviceReservation;
pub use selector::{DeviceSelector, Slot, SlotKind};
pub use shrink::{Run, ShrinkOutcome, Shrunk, ShrunkTarget};
pub use slots::{ArenaReport, ArenaUse, Replaced, SlotSnapshot};

pub(super) use selector::known_targets;

pub(super) use report::{ArenasSensor, Series};

impl Memory {
    /// Returns a handle to the devices, their arenas and pools of host memory for copies. It acts on
    /// the default device unless [`MemoryDevices::on`] names another.
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
pub(in crate::memory) type GivenDrivers = Vec<Arc<dyn Driver>>;

/// The registered governors, of which some may have been dropped.
#[cfg(feature = "cuda")]
pub(super) type Governors = Mutex<Vec<std::sync::Weak<crate::device::driver::cuda::PoolGovernor>>>;

/// The devices and the arenas of a `Memory`.
#[derive(Default)]
pub(in crate::memory) struct Devices {
    /// By number, the default one first; empty if the configured device is `none`.
    list: Vec<Arc<Device>>,
    /// `true` if the application opened their drivers.
    are_given: bool,
    arenas: Arenas,
    scopes: Scopes,
    gone: Gone,
    /// The targets that dropped runs leave to the worker.
    shrinks: Mutex<BTreeSet<Target>>,
    #[cfg(feature = "cuda")]
    governors: Governors,
    #[cfg(feature = "cuda")]
    processes: cuda::ProcessLists,
}

impl Devices {
    /// Opens the configured devices, unless drivers are given.
    pub(in crate::memory) fn open(
        config: &Config,
        given: GivenDrivers,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Result<Self, StartError> {
        let are_given = !given.is_empty();
        let drivers = driver::open_drivers(config, given, diagnostics)?;
        driver::check(&drivers)?;
        let watermark = config.device_watermark.value;
        let device = |(number, driver)| Arc::new(Device::new(number, driver, watermark));
        Ok(Self { list: (0..).zip(drivers).map(device).collect(), are_given, ..Self::default() })
    }

    /// Returns `true` if the arenas of the default device have another budget than the host.
    pub(super) fn has_own_memory(&self) -> bool {
        self.list.first().is_some_and(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if some device has memory of its own.
    pub(super) fn any_own_memory(&self) -> bool {
        self.list.iter().any(|device| device.counted == CountedIn::OnDevice)
    }

    /// Returns `true` if the default device's memory is the host's.
    pub(in crate::memory) fn is_unified(&self) -> bool {
        self.list.first().is_some_and(|device| device.driver.capabilities().counts_as_host())
    }

    /// Returns what the control thread reads of the arenas.
    pub(in crate::memory) fn sensor(&self, config: &Config) -> ArenasSensor {
        ArenasSensor::new(self.arenas.clone(), &self.list, config.device_limit.value)
    }

    /// Adds the budgets of further devices to the control loop.
    pub(in crate::memory) fn add_budgets(&self, maintenance: &mut Maintenance) {
        self.budgets().for_each(|budget| maintenance.add_device(budget.clone()));
    }

    /// Closes the budgets of further devices.
    pub(in crate::memory) fn close(&self) {
        self.budgets().for_each(Admission::close);
    }

    /// Returns the number of reservations held in the budgets of further devices.
    pub(in crate::memory) fn held(&self) -> u64 {
        self.budgets().map(|budget| budget.stats().held()).sum()
    }

    fn budgets(&self) -> impl Iterator<Item = &Admission> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{DeviceChoice, Settings};
    use crate::device::HostDriver;

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
