//! The device of a `Memory`, and the state of its arenas.
//!
//! Part of the state that the handle and the threads share. It acts on no arena.

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::config::Config;
use crate::device::driver::Driver;
use crate::memory::error::{Diagnostic, StartError};
use lowtide_admission::Admission;

use super::arenas::Arenas;
use super::driver;
use super::published::Gone;
use super::scopes::Scopes;
use super::sensor::{ArenasSensor, Counted};
use super::shrinks_asked::ShrinksAsked;
use super::watch::DeviceWatch;

/// The names of all admin commands.
pub(in crate::memory) const COMMANDS: &[&str] =
    &["purge", "trim", "sleep", "wake", "unload", "snapshot"];

/// A driver that the application has opened.
pub(in crate::memory) type GivenDriver = Option<Arc<dyn Driver>>;

/// The registered governors, of which some may have been dropped.
#[cfg(feature = "cuda")]
pub(super) type Governors =
    crate::sync::Mutex<Vec<std::sync::Weak<crate::device::driver::cuda::PoolGovernor>>>;

/// The device and the arenas of a `Memory`.
pub(in crate::memory) struct Devices {
    pub(super) driver: Option<Arc<dyn Driver>>,
    pub(super) counted: Counted,
    pub(super) arenas: Arenas,
    pub(super) scopes: Scopes,
    pub(super) gone: Gone,
    pub(super) shrinks: ShrinksAsked,
    pub(super) watch: DeviceWatch,
    #[cfg(feature = "cuda")]
    pub(super) governors: Governors,
}

impl Devices {
    /// Opens the configured device, unless one is given.
    pub(in crate::memory) fn open(
        config: &Config,
        given: GivenDriver,
        diagnostics: &mut Vec<Diagnostic>,
    ) -> Result<Self, StartError> {
        let driver = driver::open_driver(config, given, diagnostics)?;
        Ok(Self {
            counted: Counted::of(driver.as_deref()),
            driver,
            arenas: Arenas::default(),
            scopes: Scopes::default(),
            gone: Gone::default(),
            shrinks: ShrinksAsked::default(),
            watch: DeviceWatch::new(config.device.watermark.value),
            #[cfg(feature = "cuda")]
            governors: Governors::default(),
        })
    }

    /// Makes admission use one budget if the memory of arenas is in the host's.
    pub(in crate::memory) fn settle_budgets(
        &self,
        admission: &Admission,
        diagnostics: &mut Vec<Diagnostic>,
    ) {
        if !self.has_own_memory() {
            admission.unify();
        }
        if self.counted == Counted::BesideKernel {
            let text = "the device has no memory of its own: memory committed by arenas counts \
                        against the host's memory limit, and there is no device budget";
            diagnostics.push(Diagnostic::info("device", text.to_owned()));
        }
    }

    /// Returns `true` if arenas have another budget than the host.
    pub(in crate::memory) fn has_own_memory(&self) -> bool {
        self.counted == Counted::OnDevice
    }

    /// Returns `true` if the device's memory is the host's.
    pub(in crate::memory) fn is_unified(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.capabilities().counts_as_host())
    }

    /// Returns what the control thread reads of the arenas.
    pub(in crate::memory) fn sensor(&self, config: &Config) -> ArenasSensor {
        ArenasSensor::new(self.arenas.clone(), self.counted, config.device.limit.value)
    }
}

/// Returns the chosen device, for the log.
pub(in crate::memory) fn choice(config: &Config) -> Option<String> {
    Some(config.device.choice.value.to_string())
}

/// Returns the limit of device memory, which cannot rise while a `Memory` runs.
pub(in crate::memory) const fn limit(config: &Config) -> ByteSize {
    config.device.limit.value
}
