//! Arenas that fall asleep by themselves: which is next, and where their contents are booked.
//!
//! The control thread asks when ([`DeviceArena::next_sleep`]), the worker does it, one arena at a
//! time. Nothing here relieves the host: contents that are copied take host memory, which is booked
//! in the host's ledger as standing bytes before the first copy. What wakes an arena is its use.
//!
//! Invariant: `standing bytes of the host >= offloaded bytes of all arenas that were opened here`,
//! where a limit is known.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::control::{Admission, Cost, Permit, Rejected};
use crate::device::{ArenaConfig, ArenaState, DeviceArena, HostBudget};

use super::error::Diagnostic;
use super::shared::Shared;

/// The host's ledger, for contents of sleeping arenas. It holds the books alone, so that an arena
/// may outlive its `Memory`.
pub(super) struct HostRoom {
    admission: Admission,
}

impl HostBudget for HostRoom {
    fn book(&self, bytes: ByteSize) -> Result<Box<dyn Any + Send>, String> {
        match self.admission.try_reserve_resource(Cost::host(bytes)) {
            Ok(permit) => Ok(Box::new(permit)),
            Err(Rejected::Full { reserved, allowance, .. }) => {
                Err(format!("{reserved} of an allowance of {allowance} are booked"))
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
    /// What an arena is opened with where nobody says otherwise.
    pub(super) fn arena_config(&self, name: impl Into<String>) -> ArenaConfig {
        ArenaConfig {
            decay: self.config.device_decay.value,
            sleep: self.config.device_sleep(),
            ..ArenaConfig::new(name)
        }
    }

    /// Has an arena book its contents with the host's ledger while it sleeps.
    pub(super) fn book_contents_of(&self, arena: &DeviceArena) {
        arena.set_host_budget(Arc::new(HostRoom { admission: self.admission.clone() }));
    }

    /// Lets the arena fall asleep that has been due for longest; says whether more are due.
    pub(super) fn sleep_next(&self, now: Moment) -> bool {
        // What ends is not put to sleep first.
        if self.admission.is_closed() || self.queue.is_closed() {
            return false;
        }
        let arenas = self.arenas().into_iter().map(|arena| (arena.next_sleep(), arena));
        let mut due: Vec<_> = arenas.filter(|(due, _)| *due <= now).collect();
        due.sort_by_key(|(due, _)| *due);
        let more = due.len() > 1;
        if let Some((_, arena)) = due.into_iter().next()
            && let Err(error) = arena.sleep_if_idle(now)
        {
            self.note_awake(&arena, &error.to_string());
        }
        more
    }

    /// Says once of an arena that it did not fall asleep: it is tried again, and each time the
    /// figures are others.
    fn note_awake(&self, arena: &DeviceArena, error: &str) {
        let start = format!("{} did not fall asleep by itself: ", arena.name());
        let text = format!("{start}{error}");
        self.add_diagnostic_once(&start, Diagnostic::warning("device", text));
    }

    /// Gives back the host memory of arenas that sleep with no block left: nobody wakes them, and
    /// the worker is gone.
    pub(super) fn end_empty_sleeps(&self) {
        for arena in self.arenas() {
            if arena.state() == ArenaState::Asleep && arena.glance().live.is_zero() {
                self.purged(&arena);
            }
        }
    }
}
