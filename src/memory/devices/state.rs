//! The devices of a `Memory`, and the state of its arenas.
//!
//! Part of the state that the handle and the threads share. It acts on no arena.

use std::collections::BTreeSet;
use std::sync::Arc;

use crate::config::Config;
use crate::config::arena::ShrinkTarget;
use crate::device::driver::Driver;
use crate::memory::error::{Diagnostic, StartError};
use crate::sync::Mutex;
use lowtide_admission::{Admission, Maintenance};

use super::arenas::Arenas;
use super::device::{CountedIn, Device};
use super::report::{ArenasSensor, Gone};
use super::slots::Scopes;

/// The drivers that the application has opened; without one, the configured devices are.
pub(in crate::memory) type GivenDrivers = Vec<Arc<dyn Driver>>;

/// The registered governors, of which some may have been dropped.
#[cfg(feature = "cuda")]
pub(super) type Governors = Mutex<Vec<std::sync::Weak<crate::device::driver::cuda::PoolGovernor>>>;

/// The devices and the arenas of a `Memory`.
#[derive(Default)]
pub(in crate::memory) struct Devices {
    /// By number, the default one first; empty if the configured device is `none`.
    pub(super) list: Vec<Arc<Device>>,
    /// `true` if the application opened their drivers.
    are_given: bool,
    pub(super) arenas: Arenas,
    pub(super) scopes: Scopes,
    pub(super) gone: Gone,
    /// The targets that dropped runs leave to the worker.
    pub(super) shrinks: Mutex<BTreeSet<ShrinkTarget>>,
    #[cfg(feature = "cuda")]
    pub(super) governors: Governors,
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
        let drivers = super::driver::open_drivers(config, given, diagnostics)?;
        super::driver::check(&drivers)?;
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

    /// Returns the counts of dropped arenas, for metrics.
    pub(in crate::memory) const fn gone(&self) -> &Gone {
        &self.gone
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
