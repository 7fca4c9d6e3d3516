//! The stand-in for `devices` in a build without the feature `device`: there are no arenas, and no
//! device budget.

use std::collections::BTreeMap;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::config::Config;
use crate::metrics::record::MetricsWriter;
use crate::sync::Mutex;
use lowtide_admission::{Admission, Budget, DeviceFigures, Maintenance, Reclaim, Sample};

use super::admin_tasks::{AdminCommand, AdminError};
use super::error::{Diagnostic, StartError};
use super::history::HistorySample;
use super::shared::Shared;
use super::shutdown::Shutdown;
use super::snapshot::MemorySnapshot;

/// The names of all admin commands.
pub(super) const COMMANDS: &[&str] = &["purge", "unload", "fit"];

/// No driver can be given.
pub(super) type GivenDrivers = ();

/// No device.
pub(super) struct Devices;

impl Devices {
    pub(super) const fn open(
        _: &Config,
        (): GivenDrivers,
        _: &mut Vec<Diagnostic>,
    ) -> Result<Self, StartError> {
        Ok(Self)
    }

    pub(super) fn settle_budgets(&self, admission: &Admission, _: &mut Vec<Diagnostic>) {
        admission.unify();
    }

    pub(super) const fn has_own_memory(&self) -> bool {
        false
    }

    pub(super) const fn any_own_memory(&self) -> bool {
        false
    }

    pub(super) const fn add_budgets(&self, _: &mut Maintenance) {}

    pub(super) const fn close(&self) {}

    pub(super) const fn held(&self) -> u64 {
        0
    }

    pub(super) const fn is_unified(&self) -> bool {
        true
    }

    pub(super) const fn sensor(&self, _: &Config) -> ArenasSensor {
        ArenasSensor
    }
}

pub(super) struct ArenasSensor;

impl ArenasSensor {
    pub(super) const fn add_to(&mut self, _: &mut Sample) {}

    pub(super) const fn further_device(&self, _: usize) -> DeviceFigures {
        DeviceFigures { committed: ByteSize::ZERO, idle: ByteSize::ZERO, limit: None }
    }
}

pub(super) const fn choice(_: &Devices, _: &Config) -> Option<String> {
    None
}

pub(super) const fn limit(_: &Config) -> ByteSize {
    ByteSize::MAX
}

pub(super) fn reclaim_steps(
    _: &Arc<Mutex<Option<Arc<Shared>>>>,
    _: Budget,
) -> Vec<Arc<dyn Reclaim>> {
    Vec::new()
}

impl Shared {
    pub(super) const fn decay_devices(&self, _: Moment) {}

    pub(super) const fn sleep_next(&self, _: Moment) -> bool {
        false
    }

    pub(super) const fn sample_devices(&self, _: Moment) {}

    pub(super) const fn maintain_devices(&self, _: Moment) {}

    pub(super) const fn purge_devices(&self) -> ByteSize {
        ByteSize::ZERO
    }

    pub(super) const fn end_devices(&self, _: &mut Shutdown) {}

    pub(super) const fn devices_snapshot(&self) -> DevicesSnapshot {
        DevicesSnapshot
    }

    pub(super) const fn committed_beside_kernel(&self) -> ByteSize {
        ByteSize::ZERO
    }

    pub(super) const fn committed_in_process(&self) -> ByteSize {
        ByteSize::ZERO
    }

    pub(super) fn check_arena(&self, name: &str) -> Result<(), AdminError> {
        Err(AdminError::UnknownArena { name: name.to_owned(), known: Vec::new() })
    }

    pub(super) fn run_on_arena(&self, command: &AdminCommand) -> Result<String, String> {
        self.check_arena(&command.subject())
            .map(|()| String::new())
            .map_err(|error| error.to_string())
    }
}

impl Shutdown {
    pub(super) const fn devices(&self) -> &'static str {
        ""
    }
}

#[derive(Clone, Debug)]
pub(super) struct DevicesSnapshot;

impl DevicesSnapshot {
    pub(super) const fn on_host(&self) -> Vec<(String, ByteSize)> {
        Vec::new()
    }

    pub(super) const fn first_lost(&self) -> Option<(&str, &str)> {
        None
    }

    pub(super) const fn offloaded(&self) -> ByteSize {
        ByteSize::ZERO
    }

    pub(super) const fn sleeps(&self) -> BTreeMap<String, [u64; 3]> {
        BTreeMap::new()
    }

    pub(super) const fn add_to(&self, _: &mut HistorySample) {}
}

#[derive(Default)]
pub(super) struct Series {}

impl Series {
    pub(super) const fn publish(&mut self, _: MetricsWriter, _: &Shared, _: &MemorySnapshot) {}
}

/// No resource has a device arena.
#[derive(Default)]
pub(super) struct ResourceArena {}

impl ResourceArena {
    pub(super) const fn committed(&self) -> Option<ByteSize> {
        None
    }

    pub(super) const fn active(&self) -> Option<ByteSize> {
        None
    }

    pub(super) const fn purge_from(&self, _: ByteSize) -> ByteSize {
        ByteSize::ZERO
    }

    pub(super) const fn counts_as_host(&self) -> bool {
        true
    }
}
