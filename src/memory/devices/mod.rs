//! Device arenas in a `Memory`: all that it does with them.
//!
//! The rest of `memory` reaches them only through the items of this file; without the feature
//! `device` the same items in `no_devices.rs` do nothing. [`Devices`] is owned by [`Shared`].
//! The parts: `driver` opens the device, `arenas` lists the arenas, `open` and `scopes` open them,
//! `watch` keeps device memory free for others, `sleep`, `shrink` and `reclaim` release memory,
//! `sensor`, `published`, `series` and `snapshot` report it, `commands` and `resource` serve
//! operators and resources.
//!
//! Invariant: no driver call under a lock of this module.

mod arenas;
mod commands;
mod driver;
mod error;
#[cfg(feature = "cuda")]
mod governors;
mod open;
mod published;
mod reclaim;
mod resource;
mod scopes;
mod sensor;
mod series;
mod settings;
mod shrink;
mod sleep;
mod snapshot;
mod watch;

use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::config::Config;
use crate::device::driver::Driver;
use lowtide_admission::Admission;

use super::error::{Diagnostic, StartError};
use super::shared::Shared;
use super::{Memory, Shutdown};

pub use error::ArenaError;
pub use scopes::{ArenaReport, ArenaUse, Replaced, ScopeError, Slot, SlotKind, SlotSnapshot};
pub use shrink::{Run, ShrinkError, ShrinkFailure, ShrinkOutcome, Shrunk, ShrunkTarget};
pub use snapshot::{DeviceSnapshot, DevicesSnapshot};

pub(super) use commands::COMMANDS;
pub(super) use reclaim::idle_memory;
pub(super) use resource::ResourceArena;
pub(super) use sensor::ArenasSensor;
pub(super) use series::Series;

use arenas::Arenas;
use published::Gone;
use scopes::Scopes;
use sensor::Counted;
use shrink::ShrinksAsked;
use watch::DeviceWatch;

/// A driver that the application has opened.
pub(super) type GivenDriver = Option<Arc<dyn Driver>>;

/// The device and the arenas of a `Memory`.
pub(super) struct Devices {
    driver: Option<Arc<dyn Driver>>,
    counted: Counted,
    arenas: Arenas,
    scopes: Scopes,
    gone: Gone,
    shrinks: ShrinksAsked,
    watch: DeviceWatch,
    #[cfg(feature = "cuda")]
    governors: governors::Governors,
}

impl Devices {
    /// Opens the configured device, unless one is given.
    pub(super) fn open(
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
            governors: governors::Governors::default(),
        })
    }

    /// Makes admission use one budget if the memory of arenas is in the host's.
    pub(super) fn settle_budgets(&self, admission: &Admission, diagnostics: &mut Vec<Diagnostic>) {
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
    pub(super) fn has_own_memory(&self) -> bool {
        self.counted == Counted::OnDevice
    }

    /// Returns `true` if the device's memory is the host's.
    pub(super) fn is_unified(&self) -> bool {
        self.driver.as_ref().is_some_and(|driver| driver.capabilities().counts_as_host())
    }

    /// Returns what the control thread reads of the arenas.
    pub(super) fn sensor(&self, config: &Config) -> ArenasSensor {
        ArenasSensor::new(self.arenas.clone(), self.counted, config.device.limit.value)
    }
}

/// Returns the chosen device, for the log.
pub(super) fn choice(config: &Config) -> Option<String> {
    Some(config.device.choice.value.to_string())
}

/// Returns the limit of device memory, which cannot rise while a `Memory` runs.
pub(super) const fn limit(config: &Config) -> ByteSize {
    config.device.limit.value
}

impl Shared {
    /// Decays the arenas that are due, and completes what sessions have left.
    pub(super) fn decay_devices(&self, now: Moment) {
        for arena in self.arenas() {
            if arena.next_decay() > now {
                continue;
            }
            if let Err(error) = arena.decay(now) {
                let text = format!("arena {}: {error}", arena.name());
                self.add_diagnostic(Diagnostic::warning("device", text));
            }
        }
        self.shrink_asked();
        self.sweep();
    }

    /// Does what is due with each publication.
    pub(super) fn maintain_devices(&self, now: Moment) {
        self.maintain_pools();
        #[cfg(feature = "cuda")]
        self.decay_governors(now);
        #[cfg(not(feature = "cuda"))]
        let _ = now;
        self.sweep();
    }

    /// Ends the management of arenas after the threads have ended, and reports what is live.
    pub(super) fn end_devices(&self, report: &mut Shutdown) {
        self.end_empty_sleeps();
        report.device_live = self.device_arenas().map(|arena| arena.glance().live).sum();
    }

    /// Returns the memory committed by arenas that the kernel does not count, although it is the
    /// host's.
    pub(super) fn committed_beside_kernel(&self) -> ByteSize {
        let is_beside = self.devices.counted == Counted::BesideKernel && self.birth.is_here();
        if is_beside { self.device_committed() } else { ByteSize::ZERO }
    }

    /// Returns the memory committed by arenas in memory of this process.
    pub(super) fn committed_in_process(&self) -> ByteSize {
        let driver = self.devices.driver.as_ref();
        let is_host = driver.is_some_and(|driver| driver.capabilities().host_backed);
        if !is_host {
            return ByteSize::ZERO;
        }
        self.arenas().iter().map(|arena| arena.glance().committed).sum()
    }
}

impl Shutdown {
    /// Describes the device memory that is still held.
    pub(super) fn devices(&self) -> String {
        format!(", {} of device memory live", self.device_live)
    }
}

impl Memory {
    /// Returns the names of the arenas, in the order of [`Memory::occupancy`].
    #[cfg(feature = "service")]
    pub(crate) fn arena_names(&self) -> Vec<String> {
        self.0.shared.arenas().iter().map(|arena| arena.name().to_owned()).collect()
    }

    /// Returns the time on the manager's clock.
    #[cfg(feature = "service")]
    pub(crate) fn now(&self) -> Moment {
        self.0.shared.clock.now()
    }
}
