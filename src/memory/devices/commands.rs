//! Admin commands on arenas, which the worker executes.

use std::time::Duration;

use crate::device::{DeviceArena, DeviceError, SleepOptions};
use crate::memory::admin::{AdminCommand, AdminError};
use crate::memory::shared::Shared;

impl Shared {
    /// Checks that an arena of this name serves.
    pub(in crate::memory) fn check_arena(&self, name: &str) -> Result<(), AdminError> {
        self.arena_named(name).map(drop)
    }

    fn arena_named(&self, name: &str) -> Result<DeviceArena, AdminError> {
        let (serving, _) = self.devices.arenas.parted();
        let found = serving.iter().find(|listed| listed.arena.name() == name);
        found.map(|listed| listed.arena.clone()).ok_or_else(|| {
            let known = serving.iter().map(|listed| listed.arena.name().to_owned()).collect();
            AdminError::UnknownArena { name: name.to_owned(), known }
        })
    }

    /// Executes a command on an arena. Returns the outcome, or the cause of its failure.
    pub(in crate::memory) fn run_on_arena(&self, command: &AdminCommand) -> Result<String, String> {
        let arena = self.arena_named(&command.subject()).map_err(|error| error.to_string())?;
        let said = |error: DeviceError| error.to_string();
        match command {
            AdminCommand::Trim { keep, .. } => {
                let released = arena.trim(*keep).map_err(said)?;
                Ok(format!("{released} released"))
            }
            AdminCommand::Sleep { .. } => {
                // No waiting for leases: the worker has other work.
                let drain = Duration::ZERO;
                let options = SleepOptions { drain, ..self.config.device_sleep().options };
                let slept = arena.sleep(options).map_err(said)?;
                Ok(format!("{} released, {} offloaded", slept.released, slept.offloaded))
            }
            // The only other one: a wake.
            _ => {
                // No waiting for memory: only this worker would release it.
                let woken = arena.wake_at_once().map_err(said)?;
                Ok(format!("{} committed, {} restored", woken.committed, woken.restored))
            }
        }
    }
}
