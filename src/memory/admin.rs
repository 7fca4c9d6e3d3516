//! Admin tasks: commands of an operator, and the list of those that the worker executes.
//!
//! The commands are purge, unload, fit (`fit`) and admission, and for device arenas trim, sleep and
//! wake. They are queued without waiting for them, and executed on the worker; the outcome is kept
//! in a short list. Authorization is the caller's responsibility.
//!
//! Invariant: at most [`WAITING_MAX`] tasks wait, and at most `KEPT_MAX` are kept; a task that was
//! started ends, also by a panic.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::time::Duration;

use crate::bytes::ByteSize;
use crate::sync::{Mutex, lock};

use lowtide_admission::AdmissionMode;

use super::error::MemoryError;

/// The maximum number of waiting tasks; the worker runs them one at a time.
const WAITING_MAX: usize = 8;
/// The maximum number of tasks kept, including finished ones.
const KEPT_MAX: usize = 16;
/// The shortest and the longest time that a fit may be given.
const FIT_TIME_MIN: Duration = Duration::from_secs(1);
const FIT_TIME_MAX: Duration = Duration::from_secs(3600);

/// A command of an operator.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminCommand {
    /// Release all idle memory of the heap and of every arena.
    Purge,
    /// Release idle memory of an arena until at most `keep` is committed.
    Trim {
        /// The arena.
        arena: String,
        /// The memory that may stay committed.
        keep: ByteSize,
    },
    /// Put an arena to sleep if no lease is held. Contents are treated as configured.
    Sleep {
        /// The arena.
        arena: String,
    },
    /// Wake an arena.
    Wake {
        /// The arena.
        arena: String,
    },
    /// Unload a resource if it is not in use.
    Unload {
        /// The resource.
        resource: String,
    },
    /// Make the process fit in a smaller limit of host memory, before an operator lowers the
    /// kernel's limit: Kubernetes refuses a limit below the usage, and the kernel kills.
    ///
    /// The task runs until the process fits, and fails if it does not in time. The limit without a
    /// fit then applies again. If it fits, the smaller limit stays in force until the kernel's
    /// limit has come down to it, for at most 10 minutes. Another fit replaces it, and begins these
    /// times again. If the limit is not above this one, there is nothing to do. A limit that rises
    /// needs no command.
    Fit {
        /// The limit to fit in; `None` ends the fit in force. At least 1 MiB, and unless a reclaimer
        /// is registered, the least that the start would have accepted
        /// ([`StartError::LimitTooSmall`](super::StartError::LimitTooSmall)).
        limit: Option<ByteSize>,
        /// The longest time until the process fits, 1 s to 1 h: usually
        /// [`AdminCommand::FIT_WITHIN`].
        within: Duration,
        /// `true` if page cache must fit too, as Kubernetes requires. The kernel itself drops it
        /// when the limit falls.
        counts_page_cache: bool,
    },
    /// Set whether requests wait and are rejected, or whether that is only counted.
    Admission {
        /// The mode from now on.
        mode: AdmissionMode,
    },
}

impl AdminCommand {
    /// The names of all commands. Without the feature `device`, `trim`, `sleep` and `wake` find no
    /// arena.
    pub const NAMES: [&str; 7] = ["purge", "trim", "sleep", "wake", "unload", "fit", "admission"];

    /// The usual time for a fit: 30 s, an estimate of the longest time of most requests.
    pub const FIT_WITHIN: Duration = Duration::from_secs(30);

    /// Returns the name of the command.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Purge => "purge",
            Self::Trim { .. } => "trim",
            Self::Sleep { .. } => "sleep",
            Self::Wake { .. } => "wake",
            Self::Unload { .. } => "unload",
            Self::Fit { .. } => "fit",
            Self::Admission { .. } => "admission",
        }
    }

    /// Returns the arena, the resource, the limit or the mode of the command; empty for a purge,
    /// which affects everything.
    #[must_use]
    pub fn subject(&self) -> Cow<'_, str> {
        match self {
            Self::Purge => Cow::Borrowed(""),
            Self::Trim { arena, .. } | Self::Sleep { arena } | Self::Wake { arena } => {
                Cow::Borrowed(arena)
            }
            Self::Unload { resource } => Cow::Borrowed(resource),
            Self::Fit { limit: Some(limit), .. } => Cow::Owned(limit.to_string()),
            Self::Fit { limit: None, .. } => Cow::Borrowed("none"),
            Self::Admission { mode } => Cow::Borrowed(mode.name()),
        }
    }

    /// Checks the values of the command; a fit's limit is at least `least`.
    pub(super) fn check(&self, least: ByteSize) -> Result<(), MemoryError> {
        let Self::Fit { limit, within, .. } = self else { return Ok(()) };
        if let Some(limit) = limit.filter(|limit| *limit < least) {
            return Err(MemoryError::FitLimit { limit, least });
        }
        if !(FIT_TIME_MIN..=FIT_TIME_MAX).contains(within) {
            return Err(MemoryError::FitTime { within: *within });
        }
        Ok(())
    }
}

/// A task for the worker.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct AdminTask {
    /// The number of the task: from 1, in order of the requests.
    pub id: u64,
    /// The command.
    pub command: AdminCommand,
    /// The time of the request, since the Unix epoch.
    pub asked_at: Duration,
    /// The state of the task.
    pub state: AdminTaskState,
    /// What holds memory, as of the last look at a fit that runs or has run; otherwise empty.
    pub progress: String,
}

impl AdminTask {
    fn waits(&self) -> bool {
        self.state == AdminTaskState::Waiting
    }
}

/// The state of an admin task.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum AdminTaskState {
    /// Not started.
    Waiting,
    /// Started.
    Running,
    /// Finished, with the outcome.
    Done(String),
    /// Failed, with the cause.
    Failed(String),
}

impl AdminTaskState {
    /// Returns the name of the state.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Self::Waiting => "waiting",
            Self::Running => "running",
            Self::Done(_) => "done",
            Self::Failed(_) => "failed",
        }
    }

    /// Returns the outcome; empty until the task has ended.
    #[must_use]
    pub fn outcome(&self) -> &str {
        match self {
            Self::Waiting | Self::Running => "",
            Self::Done(text) | Self::Failed(text) => text,
        }
    }
}

/// The tasks kept, oldest first.
#[derive(Debug, Default)]
pub(super) struct AdminTasks(Mutex<VecDeque<AdminTask>>);

impl AdminTasks {
    pub(super) fn add(
        &self,
        command: AdminCommand,
        asked_at: Duration,
    ) -> Result<u64, MemoryError> {
        let mut list = lock(&self.0);
        let waiting = list.iter().filter(|task| task.waits()).count();
        if waiting >= WAITING_MAX {
            return Err(MemoryError::TooManyTasks { waiting, max: WAITING_MAX });
        }
        if list.len() == KEPT_MAX {
            // The oldest that has ended. One has: fewer than half of the tasks kept wait, and two
            // run at most, one of them a fit.
            let ended = |of: &AdminTask| {
                !matches!(of.state, AdminTaskState::Waiting | AdminTaskState::Running)
            };
            let at = list.iter().position(ended).unwrap_or(0);
            list.remove(at);
        }
        let id = list.back().map_or(0, |last| last.id) + 1;
        let (state, progress) = (AdminTaskState::Waiting, String::new());
        list.push_back(AdminTask { id, command, asked_at, state, progress });
        Ok(id)
    }

    /// Starts the oldest waiting task.
    pub(super) fn begin(&self) -> Option<(u64, AdminCommand)> {
        let mut list = lock(&self.0);
        let admin_task = list.iter_mut().find(|task| task.waits())?;
        admin_task.state = AdminTaskState::Running;
        Some((admin_task.id, admin_task.command.clone()))
    }

    /// Handles a task that the worker may never take, because the queue closed: keeps it if it was
    /// started, otherwise fails it.
    pub(super) fn keep_if_begun(&self, id: u64) -> Result<u64, MemoryError> {
        let mut list = lock(&self.0);
        if let Some(task) = list.iter_mut().find(|task| task.id == id && task.waits()) {
            task.state = AdminTaskState::Failed(MemoryError::Ended.to_string());
            return Err(MemoryError::Ended);
        }
        Ok(id)
    }

    /// Changes a task that was started, if it is kept. Returns `true` if others wait.
    pub(super) fn edit(&self, id: u64, change: impl FnOnce(&mut AdminTask)) -> bool {
        let mut list = lock(&self.0);
        if let Some(task) = list.iter_mut().find(|task| task.id == id) {
            change(task);
        }
        list.iter().any(AdminTask::waits)
    }

    /// Returns the tasks kept, oldest first.
    pub(super) fn all(&self) -> Vec<AdminTask> {
        lock(&self.0).iter().cloned().collect()
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    /// Bug: a task that was started, or finished, was reported as failed because the memory ended.
    #[test]
    fn only_an_errand_that_was_not_begun_fails_for_the_end() {
        let admin_tasks = AdminTasks::default();
        for id in 1..=3 {
            assert_eq!(admin_tasks.add(AdminCommand::Purge, Duration::ZERO), Ok(id));
        }
        let (done, _) = admin_tasks.begin().expect("one waits");
        admin_tasks
            .edit(done, |task| task.state = AdminTaskState::Done("1 KiB released".to_owned()));
        let (running, _) = admin_tasks.begin().expect("another one waits");
        assert_eq!(admin_tasks.keep_if_begun(done), Ok(done));
        assert_eq!(admin_tasks.keep_if_begun(running), Ok(running));
        assert_eq!(admin_tasks.keep_if_begun(3), Err(MemoryError::Ended));
        let states: Vec<_> =
            lock(&admin_tasks.0).iter().map(|admin_task| admin_task.state.name()).collect();
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
        assert_eq!(full, Err(MemoryError::TooManyTasks { waiting: 8, max: 8 }));
        for nth in 1..=100 {
            let (id, _) = admin_tasks.begin().expect("one waits");
            assert_eq!(id, nth);
            let others_wait =
                admin_tasks.edit(id, |task| task.state = AdminTaskState::Done(String::new()));
            assert!(others_wait, "seven wait");
            admin_tasks.add(AdminCommand::Purge, Duration::ZERO).expect("room for one more");
            assert!(lock(&admin_tasks.0).len() <= KEPT_MAX);
        }
    }
}
