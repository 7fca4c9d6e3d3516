//! Puts idle arenas to sleep, one at a time, and reserves host memory for their contents.
//!
//! The control thread finds the arena that is due ([`DeviceArena::next_sleep`]), and the worker
//! prepares its host memory and puts it to sleep. This does not relieve the host: copied contents
//! need host memory, which is reserved as resource memory in the host's ledger before it is
//! allocated. Using an arena wakes it. Its host memory stays for the next sleep; the worker
//! releases it when the host is under pressure, and at a decay what the arena does not need.
//!
//! Invariant: `resource reservations of the host >= offloaded bytes of all arenas that were opened
//! here`, if a limit is known.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::device::{ArenaConfig, DeviceArena, HostBudget, SleepState};
use lowtide_admission::{Admission, Cost, Permit, Rejected};

use crate::memory::error::Diagnostic;
use crate::memory::shared::Shared;

use super::open::is_loss;

/// The host's ledger, for contents of sleeping arenas. It holds only the accounts, so that an arena
/// may outlive its `Memory`.
pub(in crate::memory) struct HostRoom {
    admission: Admission,
}

impl HostBudget for HostRoom {
    fn reserve(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        match self.admission.try_reserve_resource(Cost::host(bytes)) {
            Ok(permit) => Ok(Box::new(permit)),
            Err(Rejected::Full { reserved, allowance, .. }) => {
                Err(format!("{reserved} reserved, allowance {allowance}"))
            }
            Err(rejected) => Err(rejected.to_string()),
        }
    }

    fn settle(&self, reserved: &mut (dyn Any + Send)) {
        if let Some(permit) = reserved.downcast_mut::<Permit>() {
            permit.settle();
        }
    }
}

impl fmt::Debug for HostRoom {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("HostRoom").finish_non_exhaustive()
    }
}

impl Shared {
    /// The default configuration of an arena.
    pub(in crate::memory) fn arena_config(&self, name: impl Into<String>) -> ArenaConfig {
        let mut sleep = self.config.device_sleep();
        sleep.stores_max = sleep.stores_max.min(self.stores_max());
        let decay = self.config.device_decay.value;
        ArenaConfig { decay, sleep, ..ArenaConfig::new(name) }
    }

    /// Returns the host memory that an arena may keep for its next sleep: a quarter of the limit,
    /// because requests cannot use it.
    fn stores_max(&self) -> ByteSize {
        let limit = self.state.limit();
        if limit == ByteSize::MAX { limit } else { ByteSize::new(limit.get() / 4) }
    }

    /// Makes an arena reserve host memory for its contents while it sleeps.
    pub(in crate::memory) fn book_contents_of(&self, arena: &DeviceArena) {
        arena.set_host_budget(Arc::new(HostRoom { admission: self.admission.clone() }));
    }

    /// Puts the arena to sleep that has been due longest. Returns `true` if more are due.
    pub(in crate::memory) fn sleep_next(&self, now: Moment) -> bool {
        // During a shutdown, arenas are not put to sleep.
        if self.admission.is_closed() || self.queue.is_closed() {
            return false;
        }
        let arenas = self.working_arenas().map(|arena| (arena.next_sleep(), arena));
        let mut due: Vec<_> = arenas.filter(|(due, _)| *due <= now).collect();
        due.sort_by_key(|(due, _)| *due);
        let more = due.len() > 1;
        if let Some((_, arena)) = due.into_iter().next()
            && let Err(error) = arena.sleep_if_idle(now)
            && !is_loss(&error)
        {
            self.note_awake(&arena, &error.to_string());
        }
        self.report_losses();
        more
    }

    /// Adds a diagnostic, once for each arena that did not go to sleep: it is tried again, each
    /// time with other figures.
    fn note_awake(&self, arena: &DeviceArena, error: &str) {
        let start = format!("idle sleep of {} failed: ", arena.name());
        let text = format!("{start}{error}");
        self.add_diagnostic_once(&start, Diagnostic::warning("device", text));
    }

    /// Releases the host memory of sleeping arenas that have no block left: nothing wakes them, and
    /// the worker has ended.
    pub(in crate::memory) fn end_empty_sleeps(&self) {
        for arena in self.working_arenas() {
            if arena.state() == SleepState::Asleep && arena.glance().live.is_zero() {
                self.purged(&arena);
            }
        }
    }
}
