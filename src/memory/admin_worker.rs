//! Queues admin tasks, and executes them on the worker.
//!
//! A command is queued without waiting for it. Authorization is the caller's responsibility.
//!
//! Invariant: a task that was started ends, also by a panic.

#[cfg(feature = "device")]
use std::time::Duration;

use crate::bytes::ByteSize;
#[cfg(feature = "device")]
use crate::device::{DeviceError, SleepOptions};
use crate::sync::caught;
use lowtide_admission::fit::Fit;
use lowtide_admission::{AdmissionMode, Job, ResourceStats, Trigger, UnloadReason};

use super::admin::{AdminCommand, AdminTask, AdminTaskState};
use super::error::MemoryError;
use super::manager::Memory;
use super::shared::Shared;

impl Memory {
    /// Returns a handle to the admin tasks, for endpoints of operators.
    #[must_use]
    pub fn admin(&self) -> MemoryAdmin<'_> {
        MemoryAdmin(&self.0.shared)
    }
}

/// The admin tasks of a `Memory`, from [`Memory::admin`].
#[derive(Clone, Copy, Debug)]
pub struct MemoryAdmin<'a>(&'a Shared);

impl MemoryAdmin<'_> {
    /// Queues a command for the worker and returns immediately, with the number of the task.
    /// [`MemoryAdmin::tasks`] lists the outcome under this number. Meant for HTTP endpoints; code
    /// calls the arena's functions directly.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::{AdminCommand, MemoryError};
    ///
    /// let memory = Memory::builder().start()?;
    /// let id = memory.admin().run(AdminCommand::Purge)?;
    /// assert_eq!(memory.admin().tasks()[0].id, id);
    /// let sleep = AdminCommand::Sleep { arena: "embedder".to_owned() };
    /// assert!(matches!(memory.admin().run(sleep), Err(MemoryError::UnknownArena { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`MemoryError`] if the command is not accepted; it is not queued then.
    pub fn run(&self, command: AdminCommand) -> Result<u64, MemoryError> {
        let shared = self.0;
        shared.check_here()?;
        if shared.admission.is_closed() || shared.state.is_closed() {
            return Err(MemoryError::Ended);
        }
        command.check(shared.fit_min())?;
        match &command {
            AdminCommand::Purge | AdminCommand::Fit { .. } | AdminCommand::Admission { .. } => {}
            AdminCommand::Unload { resource } => drop(shared.resource_named(resource)?),
            #[cfg(feature = "device")]
            on_arena => drop(shared.arena_named(&on_arena.subject())?),
            #[cfg(not(feature = "device"))]
            on_arena => return Err(no_arena(on_arena)),
        }
        let id = shared.admin_tasks.add(command, shared.clock.since_epoch())?;
        shared.state.post(Job::AdminTask);
        if shared.state.is_closed() {
            // The queue closed in between, and may have dropped the job.
            return shared.admin_tasks.keep_if_begun(id);
        }
        Ok(id)
    }

    /// Returns the last admin tasks, oldest first: at most 16. Empty in a forked child.
    #[must_use]
    pub fn tasks(&self) -> Vec<AdminTask> {
        self.0.here(|shared| shared.admin_tasks.all())
    }
}

/// The command is on an arena, of which this build has none.
#[cfg(not(feature = "device"))]
fn no_arena(command: &AdminCommand) -> MemoryError {
    MemoryError::UnknownArena { name: command.subject().into_owned(), known: Vec::new() }
}

impl Shared {
    /// Sets the mode of admission, also for the budgets of further devices.
    pub(super) fn set_admission_mode(&self, mode: AdmissionMode) {
        self.admission.set_mode(mode);
        #[cfg(feature = "device")]
        self.devices.budgets().for_each(|budget| budget.set_mode(mode));
    }

    fn resource_named(&self, name: &str) -> Result<ResourceStats, MemoryError> {
        let all = self.resources.stats();
        all.iter().find(|stats| &*stats.name == name).cloned().ok_or_else(|| {
            let known = all.iter().map(|stats| stats.name.to_string()).collect();
            MemoryError::UnknownResource { name: name.to_owned(), known }
        })
    }

    /// Runs the oldest waiting task on this thread; `purge` is the worker's purge. Returns `true`
    /// if others wait.
    pub(super) fn run_admin_task(&self, purge: impl FnOnce() -> ByteSize) -> bool {
        let Some((id, command)) = self.admin_tasks.begin() else { return false };
        let done = caught(|| self.carry_out(id, &command, purge));
        let state = match done {
            Ok(Ok(Some(text))) => AdminTaskState::Done(text),
            Ok(Ok(None)) => return self.admin_tasks.edit(id, |_| {}),
            Ok(Err(text)) => AdminTaskState::Failed(text),
            Err(said) => AdminTaskState::Failed(format!("panicked: {said}")),
        };
        self.finish_task(id, &command, state)
    }

    /// Ends a task that was started. Returns `true` if others wait.
    pub(super) fn finish_task(
        &self,
        id: u64,
        command: &AdminCommand,
        state: AdminTaskState,
    ) -> bool {
        let (subject, command) = (&*command.subject(), command.name());
        let (end, outcome) = (state.name(), state.outcome());
        let text = format!("{command} {end}: {outcome}");
        self.events.add(self.clock.since_epoch(), "admin", subject, text);
        log!(info, admin_task = id, command, subject, state = end, outcome, "admin task finished");
        self.admin_tasks.edit(id, |task| task.state = state)
    }

    /// Returns the outcome; `None` if the task goes on.
    fn carry_out(
        &self,
        id: u64,
        command: &AdminCommand,
        purge: impl FnOnce() -> ByteSize,
    ) -> Result<Option<String>, String> {
        match command {
            AdminCommand::Purge => Ok(Some(format!("{} released", purge()))),
            AdminCommand::Unload { resource } => self.unload_named(resource).map(Some),
            &AdminCommand::Admission { mode } => {
                self.set_admission_mode(mode);
                Ok(Some(format!("mode {mode}")))
            }
            &AdminCommand::Fit { limit, within, counts_page_cache } => {
                let now = self.clock.now();
                let fit = limit.map(|limit| Fit::new(limit, within, counts_page_cache, now));
                self.begin_fit(id, command, fit)
            }
            #[cfg(feature = "device")]
            on_arena => self.run_on_arena(on_arena).map(Some),
            #[cfg(not(feature = "device"))]
            on_arena => Err(no_arena(on_arena).to_string()),
        }
    }

    fn unload_named(&self, name: &str) -> Result<String, String> {
        if self.resources.unload(name, UnloadReason::Manual) {
            self.state.post(Job::Purge { trigger: Trigger::Unload });
            return Ok("unloaded".to_owned());
        }
        Err(match self.resource_named(name).map_err(|error| error.to_string())? {
            ResourceStats { loaded: false, .. } => "the resource is not loaded".to_owned(),
            ResourceStats { guards, .. } => format!("the resource is in use (guards: {guards})"),
        })
    }
}

#[cfg(feature = "device")]
impl Shared {
    /// Executes a command on an arena. Returns the outcome, or the cause of its failure.
    fn run_on_arena(&self, command: &AdminCommand) -> Result<String, String> {
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
                Ok(format!("{} released, {} offloaded", slept.memory, slept.copied))
            }
            // The only other one: a wake.
            _ => {
                // No waiting for memory: only this worker would release it.
                let woken = arena.wake_at_once().map_err(said)?;
                Ok(format!("{} committed, {} restored", woken.memory, woken.copied))
            }
        }
    }
}
