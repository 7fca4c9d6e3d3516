//! Errands: what an operator asks for by name, and the worker does.
//!
//! Six verbs: purge, trim, sleep, wake, unload, snapshot. Whoever asks is not kept waiting; what
//! came of an errand stands in a short list. Who may ask is not decided here.
//!
//! Invariants: at most [`WAITING_MAX`] errands wait, and `KEPT_MAX` of all are kept; an errand
//! that was begun has an end, be it a panic; of pictures the last one is kept.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::control::{Job, Resource, ResourceStats, Trigger, UnloadReason};
use crate::device::{DeviceArena, SleepOptions};
use crate::sync::{Mutex, caught, lock};

use super::shared::Shared;
use super::{Memory, MemoryError};

/// Errands that wait at most: the worker does one after the other.
const WAITING_MAX: usize = 8;
/// Errands that are kept, those that have ended included.
const KEPT_MAX: usize = 16;

/// What can be asked for.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminCommand {
    /// Give back all idle memory of the heap and of every arena.
    Purge,
    /// Give back idle memory of an arena until at most so much is committed.
    Trim {
        /// The arena.
        arena: String,
        /// What may stay committed.
        keep: ByteSize,
    },
    /// Have an arena fall asleep, if nobody holds a lease; contents as it is configured.
    Sleep {
        /// The arena.
        arena: String,
    },
    /// Wake an arena.
    Wake {
        /// The arena.
        arena: String,
    },
    /// Unload a resource, if nobody holds it.
    Unload {
        /// The resource.
        resource: String,
    },
    /// Take a picture of an arena ([`ArenaMap::to_svg`](crate::device::ArenaMap::to_svg)).
    Snapshot {
        /// The arena.
        arena: String,
    },
}

impl AdminCommand {
    /// The names of all verbs.
    pub const NAMES: [&str; 6] = ["purge", "trim", "sleep", "wake", "unload", "snapshot"];

    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Purge => "purge",
            Self::Trim { .. } => "trim",
            Self::Sleep { .. } => "sleep",
            Self::Wake { .. } => "wake",
            Self::Unload { .. } => "unload",
            Self::Snapshot { .. } => "snapshot",
        }
    }

    /// What it is about; nothing for a purge, which is about everything.
    #[must_use]
    pub fn subject(&self) -> &str {
        match self {
            Self::Purge => "",
            Self::Trim { arena, .. }
            | Self::Sleep { arena }
            | Self::Wake { arena }
            | Self::Snapshot { arena } => arena,
            Self::Unload { resource } => resource,
        }
    }
}

/// Why an errand was not taken on.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum AdminError {
    /// No arena has this name.
    #[error("no arena is called {name:?}: expected {}", listed(known))]
    UnknownArena {
        /// What was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// No resource has this name.
    #[error("no resource is called {name:?}: expected {}", listed(known))]
    UnknownResource {
        /// What was asked for.
        name: String,
        /// The names that there are.
        known: Vec<String>,
    },
    /// Too many wait.
    #[error("{waiting} admin tasks are waiting: at most {max} may wait")]
    Full {
        /// How many.
        waiting: usize,
        /// At most.
        max: usize,
    },
    /// This `Memory` ends, or has ended.
    #[error("the service ends")]
    Ended,
    /// This is a forked child.
    #[error(transparent)]
    Memory(#[from] MemoryError),
}

/// Some names, of which there may be a thousand.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match names.len() {
        0 => "none, there are none".to_owned(),
        1..=SHOWN => shown.join(", "),
        all => format!("{} or one of {} others", shown.join(", "), all - SHOWN),
    }
}

/// One errand.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdminTask {
    /// Its number: from 1, in the order of asking.
    pub id: u64,
    /// What was asked for.
    pub command: AdminCommand,
    /// When, since the Unix epoch.
    pub asked_at: Duration,
    /// What has become of it.
    pub state: AdminTaskState,
}

/// What has become of an errand.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminTaskState {
    /// Not begun.
    Waiting,
    /// Begun.
    Running,
    /// Done: what came of it.
    Done(String),
    /// Not done: why.
    Failed(String),
}

impl AdminTaskState {
    /// Its name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done(_) => "done",
            Self::Failed(_) => "failed",
        }
    }

    /// What came of it; nothing before its end.
    #[must_use]
    pub fn outcome(&self) -> &str {
        match self {
            Self::Waiting | Self::Running => "",
            Self::Done(text) | Self::Failed(text) => text,
        }
    }
}

/// The list.
#[derive(Debug, Default)]
pub(super) struct AdminTasks(Mutex<List>);

#[derive(Debug, Default)]
struct List {
    given: u64,
    kept: VecDeque<AdminTask>,
    /// The last picture, and the errand that it is of.
    picture: Option<(u64, Arc<str>)>,
}

impl AdminTasks {
    fn add(&self, command: AdminCommand, asked_at: Duration) -> Result<u64, AdminError> {
        let mut list = lock(&self.0);
        let is_open = |admin_task: &&AdminTask| admin_task.state == AdminTaskState::Waiting;
        let waiting = list.kept.iter().filter(is_open).count();
        if waiting >= WAITING_MAX {
            return Err(AdminError::Full { waiting, max: WAITING_MAX });
        }
        if list.kept.len() == KEPT_MAX {
            // The oldest has ended: fewer than half of those that are kept wait, in order.
            list.kept.pop_front();
        }
        list.given += 1;
        let id = list.given;
        list.kept.push_back(AdminTask { id, command, asked_at, state: AdminTaskState::Waiting });
        Ok(id)
    }

    /// Begins the oldest that waits.
    fn begin(&self) -> Option<(u64, AdminCommand)> {
        let mut list = lock(&self.0);
        let mut open = list.kept.iter_mut();
        let admin_task = open.find(|admin_task| admin_task.state == AdminTaskState::Waiting)?;
        admin_task.state = AdminTaskState::Running;
        Some((admin_task.id, admin_task.command.clone()))
    }

    /// For one that nobody may come for any more: where it was begun it stays, else it has failed.
    fn keep_if_begun(&self, id: u64) -> Result<u64, AdminError> {
        let mut list = lock(&self.0);
        let waits = |admin_task: &&mut AdminTask| {
            admin_task.id == id && admin_task.state == AdminTaskState::Waiting
        };
        let Some(admin_task) = list.kept.iter_mut().find(waits) else { return Ok(id) };
        admin_task.state = AdminTaskState::Failed(AdminError::Ended.to_string());
        Err(AdminError::Ended)
    }

    /// Ends one; says whether others wait.
    fn end(&self, id: u64, state: AdminTaskState, picture: Option<Arc<str>>) -> bool {
        let mut list = lock(&self.0);
        if let Some(admin_task) = list.kept.iter_mut().find(|admin_task| admin_task.id == id) {
            admin_task.state = state;
        }
        if let Some(picture) = picture {
            list.picture = Some((id, picture));
        }
        list.kept.iter().any(|admin_task| admin_task.state == AdminTaskState::Waiting)
    }
}

impl Memory {
    /// Has the worker do something; returns at once with the number of the errand, under which
    /// [`Memory::admin_tasks`] says what came of it. For endpoints: code calls the arena itself.
    ///
    /// ```
    /// use lowtide::Memory;
    /// use lowtide::memory::{AdminError, AdminCommand};
    ///
    /// let memory = Memory::builder().start()?;
    /// let id = memory.run_admin(AdminCommand::Purge)?;
    /// assert_eq!(memory.admin_tasks()[0].id, id);
    /// let sleep = AdminCommand::Sleep { arena: "embedder".to_owned() };
    /// assert!(matches!(memory.run_admin(sleep), Err(AdminError::UnknownArena { .. })));
    /// # Ok::<(), lowtide::BoxError>(())
    /// ```
    ///
    /// # Errors
    /// [`AdminError`]; then nothing is done.
    pub fn run_admin(&self, command: AdminCommand) -> Result<u64, AdminError> {
        let shared = &self.0.shared;
        shared.check_here()?;
        if shared.admission.is_closed() || shared.queue.is_closed() {
            return Err(AdminError::Ended);
        }
        match &command {
            AdminCommand::Purge => {}
            AdminCommand::Unload { resource } => drop(shared.resource_named(resource)?),
            on_arena => drop(shared.arena_named(on_arena.subject())?),
        }
        let id = shared.admin_tasks.add(command, shared.clock.since_epoch())?;
        shared.queue.push_one(Job::AdminTask);
        if shared.queue.is_closed() {
            // It closed meanwhile, and may have dropped the job.
            return shared.admin_tasks.keep_if_begun(id);
        }
        Ok(id)
    }

    /// The last errands, oldest first: at most 16. None in a forked child.
    #[must_use]
    pub fn admin_tasks(&self) -> Vec<AdminTask> {
        let shared = &self.0.shared;
        if shared.check_here().is_err() {
            return Vec::new();
        }
        lock(&shared.admin_tasks.0).kept.iter().cloned().collect()
    }

    /// The picture that an errand took; `None` where it took none, or another was taken since.
    #[must_use]
    pub fn admin_task_picture(&self, id: u64) -> Option<Arc<str>> {
        let shared = &self.0.shared;
        shared.check_here().ok()?;
        let list = lock(&shared.admin_tasks.0);
        list.picture.as_ref().filter(|(of, _)| *of == id).map(|(_, picture)| Arc::clone(picture))
    }
}

impl Shared {
    fn arena_named(&self, name: &str) -> Result<DeviceArena, AdminError> {
        let (serving, _) = self.arenas.parted();
        serving.iter().find(|arena| arena.name() == name).cloned().ok_or_else(|| {
            let known = serving.iter().map(|arena| arena.name().to_owned()).collect();
            AdminError::UnknownArena { name: name.to_owned(), known }
        })
    }

    fn resource_named(&self, name: &str) -> Result<Arc<dyn Resource>, AdminError> {
        let all = self.resources.all();
        all.iter().find(|resource| resource.name() == name).cloned().ok_or_else(|| {
            let known = all.iter().map(|resource| resource.name().to_owned()).collect();
            AdminError::UnknownResource { name: name.to_owned(), known }
        })
    }

    /// Does the oldest errand that waits, on this thread; `purge` is how the worker purges. Says
    /// whether others wait.
    pub(super) fn admin_task(&self, purge: impl FnOnce() -> ByteSize) -> bool {
        let Some((id, command)) = self.admin_tasks.begin() else { return false };
        let mut picture = None;
        let done = caught(|| self.carry_out(&command, purge, &mut picture));
        let state = match done {
            Ok(Ok(text)) => AdminTaskState::Done(text),
            Ok(Err(text)) => AdminTaskState::Failed(text),
            Err(said) => AdminTaskState::Failed(format!("it panicked: {said}")),
        };
        let subject = command.subject();
        let text = format!("{} {}: {}", command.name(), state.name(), state.outcome());
        self.events.add(self.clock.since_epoch(), "admin", subject, text);
        let others_wait = self.admin_tasks.end(id, state.clone(), picture);
        log!(
            info,
            target: "lowtide",
            admin_task = id,
            command = command.name(),
            subject,
            state = state.name(),
            outcome = state.outcome(),
            "admin task finished"
        );
        others_wait
    }

    fn carry_out(
        &self,
        command: &AdminCommand,
        purge: impl FnOnce() -> ByteSize,
        picture: &mut Option<Arc<str>>,
    ) -> Result<String, String> {
        let arena = || self.arena_named(command.subject()).map_err(|error| error.to_string());
        let said = |error: crate::device::DeviceError| error.to_string();
        match command {
            AdminCommand::Purge => Ok(format!("{} given back", purge())),
            AdminCommand::Trim { keep, .. } => {
                let released = arena()?.trim(*keep).map_err(said)?;
                Ok(format!("{released} given back"))
            }
            AdminCommand::Sleep { .. } => {
                // Nobody is waited for: the worker has other things to do.
                let drain = Duration::ZERO;
                let options = SleepOptions { drain, ..self.config.device_sleep().options };
                let slept = arena()?.sleep(options).map_err(said)?;
                Ok(format!("{} given back, {} offloaded", slept.released, slept.offloaded))
            }
            AdminCommand::Wake { .. } => {
                // Nor here: what is short would be given back by this very worker.
                let woken = arena()?.wake_at_once().map_err(said)?;
                Ok(format!("{} committed, {} restored", woken.committed, woken.restored))
            }
            AdminCommand::Unload { resource } => self.unload_named(resource),
            AdminCommand::Snapshot { .. } => {
                let svg = arena()?.map().to_svg();
                let size = ByteSize::of(svg.len());
                *picture = Some(svg.into());
                Ok(format!("a picture of {size}"))
            }
        }
    }

    fn unload_named(&self, name: &str) -> Result<String, String> {
        let resource = self.resource_named(name).map_err(|error| error.to_string())?;
        if resource.unload(UnloadReason::Asked) {
            self.queue.push_one(Job::Purge { trigger: Trigger::Unload });
            return Ok("unloaded".to_owned());
        }
        Err(match resource.stats() {
            ResourceStats { loaded: false, .. } => "it is not loaded".to_owned(),
            ResourceStats { guards, .. } => format!("{guards} guards hold it"),
        })
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    /// The bug: one that was begun, or done, was told to have failed because the memory ended.
    #[test]
    fn only_an_errand_that_was_not_begun_fails_for_the_end() {
        let admin_tasks = AdminTasks::default();
        for id in 1..=3 {
            assert_eq!(admin_tasks.add(AdminCommand::Purge, Duration::ZERO), Ok(id));
        }
        let (done, _) = admin_tasks.begin().expect("one waits");
        admin_tasks.end(done, AdminTaskState::Done("1 KiB given back".to_owned()), None);
        let (running, _) = admin_tasks.begin().expect("another one waits");
        assert_eq!(admin_tasks.keep_if_begun(done), Ok(done));
        assert_eq!(admin_tasks.keep_if_begun(running), Ok(running));
        assert_eq!(admin_tasks.keep_if_begun(3), Err(AdminError::Ended));
        let states: Vec<_> =
            lock(&admin_tasks.0).kept.iter().map(|admin_task| admin_task.state.name()).collect();
        assert_eq!(states, ["done", "running", "failed"]);
        assert!(admin_tasks.begin().is_none(), "nobody does what its asker was told is not done");
    }

    #[test]
    fn errands_are_bounded_and_done_in_the_order_of_asking() {
        let admin_tasks = AdminTasks::default();
        for id in 1..=8 {
            assert_eq!(admin_tasks.add(AdminCommand::Purge, Duration::ZERO), Ok(id));
        }
        let full = admin_tasks.add(AdminCommand::Purge, Duration::ZERO);
        assert_eq!(full, Err(AdminError::Full { waiting: 8, max: 8 }));
        for nth in 1..=100 {
            let (id, _) = admin_tasks.begin().expect("one waits");
            assert_eq!(id, nth);
            assert!(admin_tasks.end(id, AdminTaskState::Done(String::new()), None), "seven wait");
            admin_tasks.add(AdminCommand::Purge, Duration::ZERO).expect("room for one more");
            assert!(lock(&admin_tasks.0).kept.len() <= KEPT_MAX);
        }
    }

    #[test]
    fn of_many_names_some_are_listed() {
        let names = |count: usize| (0..count).map(|nth| nth.to_string()).collect::<Vec<_>>();
        assert_eq!(listed(&names(0)), "none, there are none");
        assert_eq!(listed(&names(2)), r#""0", "1""#);
        assert!(listed(&names(1024)).ends_with(r#""7" or one of 1016 others"#));
    }
}
