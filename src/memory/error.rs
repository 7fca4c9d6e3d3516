//! Errors of `Memory`, and diagnostics.

use std::fmt;
use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::config::{ConfigError, Source};
#[cfg(feature = "device")]
use crate::device::{DeviceError, driver::DriverError};
use lowtide_admission::{Budget, Rejected, ResourceError, SettingsError};
use lowtide_heap::{HostError, ReleaseFailure, Unsupported};

#[cfg(feature = "device")]
use super::devices::Slot;

/// The reason that a [`Memory`](super::Memory) did not start. Nothing is left running.
///
/// Its `Debug` output is its message, so a `main` that returns this error prints a readable text.
#[derive(Error)]
#[non_exhaustive]
pub enum StartError {
    /// A `Memory` is already running in this process.
    #[error("a Memory is already running in this process: share its handle or shut it down first")]
    AlreadyStarted,
    /// Invalid settings.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Settings that conflict.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The configured memory limit leaves no room for any request.
    #[error(
        "{} is too small: {held} in use before the first request; expected at least {least}{}",
        named(*.from, *.limit), meant(*.limit, *.least)
    )]
    LimitTooSmall {
        /// The configured limit.
        limit: ByteSize,
        /// The source of the limit.
        from: Source,
        /// The memory in use by this process after a purge, before its first request.
        held: ByteSize,
        /// The smallest limit that admits anything: `held` divided by the ceiling, in whole MiB and
        /// at least 1 MiB. A service also needs memory for its requests.
        least: ByteSize,
    },
    /// A CUDA device was requested and cannot be opened.
    #[cfg(feature = "device")]
    #[error("cannot open the device {device}: {cause}")]
    NoCuda {
        /// The requested device.
        device: crate::config::DeviceChoice,
        /// The cause.
        cause: String,
    },
    /// A device was given or configured twice.
    #[error("device {device} is given twice: expected each device once")]
    SameDevice {
        /// The device's UUID, or its place in the list if the driver knows none.
        device: String,
    },
    /// There are more devices than a `Memory` may have.
    #[error("{count} devices: expected at most {max}; name some, or set CUDA_VISIBLE_DEVICES")]
    TooManyDevices {
        /// The number of devices.
        count: usize,
        /// The maximum.
        max: usize,
    },
    /// [`Builder::spill_dir`](super::Builder::spill_dir) is set, but its folder cannot be used.
    #[error("spill_dir: {0}")]
    Spill(HostError),
    /// The Prometheus recorder could not be installed.
    #[error(
        "cannot install the Prometheus recorder: {error}; expected no other recorder, or \
         Endpoints::with_metrics and Builder::after_publish for one of your own"
    )]
    Recorder {
        /// The exporter's error.
        error: String,
    },
    /// A thread could not be started.
    #[error("cannot start thread {name}: {error}")]
    Thread {
        /// The name of the thread.
        name: &'static str,
        /// The error of the operating system.
        error: std::io::Error,
    },
}

crate::config::debug_is_message!(StartError, MemoryError, Shutdown);

/// Formats a limit in the form of its source.
fn named(from: Source, limit: ByteSize) -> String {
    match from {
        Source::Environment => format!("LOWTIDE_MEMORY_LIMIT={}", limit.exact()),
        _ => format!("memory_limit({})", limit.exact()),
    }
}

/// The largest number that may have been meant as MiB: 64 GiB.
const MEANT_MAX: u64 = 1 << 16;

/// Returns a suggestion if the number, as it is shown, is a plausible one of MiB.
fn meant(limit: ByteSize, least: ByteSize) -> String {
    let count = limit.exact().trim_end_matches(char::is_alphabetic).parse().unwrap_or(u64::MAX);
    let is_likely = count < MEANT_MAX && ByteSize::mib(count) >= least;
    if is_likely { format!("; did you mean {count}m?") } else { String::new() }
}

/// An error of a running [`Memory`](super::Memory). Its `Debug` output is its message.
#[derive(Clone, Error, PartialEq)]
#[non_exhaustive]
pub enum MemoryError {
    /// This is a forked child: the threads and the device context belong to the parent.
    #[error(
        "the Memory was started in the parent of this forked process: start one in this process"
    )]
    Forked,
    /// The resource or the reclaimer could not be registered: too many, or a name that is in use.
    #[error(transparent)]
    Resource(#[from] ResourceError),
    /// The resource can never be loaded: its cost is above the ceiling of a limit that cannot grow.
    #[error(
        "resource {name:?} needs {cost} of {budget} memory, above the ceiling of {ceiling}: \
         expected a smaller cost or a larger limit"
    )]
    ResourceTooLarge {
        /// The resource.
        name: String,
        /// The budget that is too small.
        budget: Budget,
        /// The declared cost.
        cost: ByteSize,
        /// The ceiling: the configured limit, or the machine's memory, times the configured share.
        ceiling: ByteSize,
    },
    /// The configured device is `none`.
    #[error("the configured device is none")]
    NoDevice,
    /// There is no such device: for a handle, a slot or the target of a shrink.
    #[error("unknown device {name}: expected {}", known.join(" or "))]
    UnknownDevice {
        /// The name of the device, the slot or the target.
        name: String,
        /// The devices by the same kind of name, or by their numbers if none has such a name.
        known: Vec<String>,
    },
    /// The device is lost, or all are and this is the first. Its memory is gone until the process
    /// restarts.
    #[cfg(feature = "device")]
    #[error("device {device} is lost: {error}")]
    DeviceLost {
        /// The device's name in metrics.
        device: String,
        /// The error by which the loss became known.
        error: DriverError,
    },
    /// The device could not be queried.
    #[cfg(feature = "device")]
    #[error("cannot query device {device}: {error}")]
    DeviceSilent {
        /// The device's name in metrics.
        device: String,
        /// The cause.
        error: DriverError,
    },
    /// The bytes do not fit in the device's budget.
    #[error(transparent)]
    Rejected(#[from] Rejected),
    /// An arena, or a pool of pinned memory, was not opened.
    #[error("cannot open arena {arena:?}: {cause}")]
    OpenArena {
        /// The arena's name.
        arena: String,
        /// The cause: the device, or the driver.
        cause: Box<Self>,
    },
    /// An operation on device memory failed.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Device(Box<DeviceError>),
    /// The name is in use; the arenas could not be distinguished in metrics.
    #[error("arena {arena:?} is already open: expected another name")]
    DuplicateArena {
        /// The name.
        arena: String,
    },
    /// The maximum number of arenas is open, or of slots has one. It bounds the control loop, which
    /// reads each arena at every tick (0.5 us, up to 100 times a second), and the series of metrics.
    /// Close arenas that are not needed, let models or sessions share one
    /// (`MemoryDevices::share_arena`), or open one that no `Memory` manages (`DeviceArena::open`).
    #[error("too many {what}: at most {max}; expected some to be closed, or to be shared")]
    TooMany {
        /// `arenas` or `slots`.
        what: &'static str,
        /// The maximum.
        max: usize,
    },
    /// The options of an arena, a selector of targets to shrink, or the name of a resource are
    /// invalid.
    #[error(transparent)]
    Options(#[from] ConfigError),
    /// A slot without a name.
    #[error("the slot's name is empty: expected the name of a provider")]
    NoSlotName,
    /// The slot has no shared arena.
    #[cfg(feature = "device")]
    #[error("{slot} has no shared arena (never shared, or sharing has ended)")]
    NotShared {
        /// The slot.
        slot: Slot,
    },
    /// No arena has the name in an admin command.
    #[error("no arena named {name:?}: expected {}", listed(known))]
    UnknownArena {
        /// The name in the command.
        name: String,
        /// The existing names.
        known: Vec<String>,
    },
    /// No resource has the name in an admin command.
    #[error("no resource named {name:?}: expected {}", listed(known))]
    UnknownResource {
        /// The name in the command.
        name: String,
        /// The existing names.
        known: Vec<String>,
    },
    /// This process does not fit in this limit: it held more at its start.
    #[error("cannot fit in {limit}: expected at least {least}")]
    FitLimit {
        /// The limit in the command.
        limit: ByteSize,
        /// The smallest limit.
        least: ByteSize,
    },
    /// The time for a fit is too short or too long.
    #[error("cannot fit within {within:?}: expected 1 s to 1 h")]
    FitTime {
        /// The time in the command.
        within: Duration,
    },
    /// Too many admin tasks are waiting.
    #[error("too many admin tasks: {waiting} waiting, at most {max}")]
    TooManyTasks {
        /// The number of waiting tasks.
        waiting: usize,
        /// The maximum number of waiting tasks.
        max: usize,
    },
    /// This `Memory` is shutting down or has shut down, so it runs no admin task.
    #[error("the service is shutting down")]
    Ended,
    /// The process heap could not be purged.
    #[error("cannot purge the heap: {0}")]
    Heap(HostError),
    /// Neither heap of the process can be purged.
    #[error("{jemalloc}; {libc}")]
    CannotPurge {
        /// Why jemalloc's heap cannot be purged.
        jemalloc: Unsupported,
        /// Why the C library's heap cannot be purged.
        libc: Unsupported,
    },
    /// The kernel did not take unused memory of the heap back.
    #[error("{bytes} of unused heap memory stay resident: {cause}")]
    Unreleased {
        /// The memory that stays; later allocations use it first.
        bytes: ByteSize,
        /// The cause.
        cause: ReleaseFailure,
    },
    /// An arena could not be shrunk.
    #[error("cannot shrink arena {arena:?}: {cause}")]
    ShrinkArena {
        /// The arena's name.
        arena: String,
        /// The cause.
        cause: Box<Self>,
    },
}

#[cfg(feature = "device")]
impl From<DeviceError> for MemoryError {
    fn from(error: DeviceError) -> Self {
        Self::Device(Box::new(error))
    }
}

#[cfg(feature = "device")]
impl MemoryError {
    pub(super) fn unknown_device(name: &impl ToString, known: &[impl ToString]) -> Self {
        let known = known.iter().map(ToString::to_string).collect();
        Self::UnknownDevice { name: name.to_string(), known }
    }
}

/// Lists some names, of which there may be a thousand.
fn listed(names: &[String]) -> String {
    const SHOWN: usize = 8;
    let shown: Vec<_> = names.iter().take(SHOWN).map(|name| format!("{name:?}")).collect();
    match names.len() {
        0 => "none (there are none)".to_owned(),
        1..=SHOWN => shown.join(", "),
        all => format!("{} or one of {} others", shown.join(", "), all - SHOWN),
    }
}

/// A fact about the settings and the system, such as a setting that could not be applied, which is
/// logged once; or about the state of memory, in a [`Verdict`](super::Verdict).
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnostic {
    /// The subject: `configuration`, `heap`, `limit`, `signals`, `device`, `resources`; in a
    /// verdict
    /// `exhausted`, `rejections`, `level`, `resource`, `leak`, `retained`, `untracked`, `device` or
    /// `eviction`.
    pub about: &'static str,
    /// `true` for a problem, or reduced protection. Logged at warn and counted in
    /// `lowtide_diagnostics`. Otherwise it needs no action, such as that there is no GPU.
    pub is_problem: bool,
    /// The fact with its figures, and the action to take.
    pub text: String,
}

impl Diagnostic {
    pub(super) fn warning(about: &'static str, text: String) -> Self {
        Self { about, is_problem: true, text }
    }

    pub(super) fn info(about: &'static str, text: String) -> Self {
        Self { about, is_problem: false, text }
    }

    /// Unused memory of the heap that the kernel does not take back.
    pub(super) fn unreleased(cause: ReleaseFailure) -> Self {
        let text = format!(
            "unused memory stays resident: {cause}; requests use it before new memory, and it does \
             not count for the pressure level"
        );
        Self::warning("heap", text)
    }
}

impl fmt::Display for Diagnostic {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.about, self.text)
    }
}

/// The outstanding work when a [`Memory`](super::Memory) ended. Its `Debug` output is its message.
#[derive(Clone, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Shutdown {
    /// The number of requests that hold permits.
    pub requests: u64,
    /// The resources that were in use until the deadline, each with the reason.
    pub resources: Vec<String>,
    /// The bytes of device memory in buffers that are still held.
    #[cfg(feature = "device")]
    pub device_live: ByteSize,
    /// The threads that panicked.
    pub panicked: Vec<String>,
    /// The threads that were still running a job at the deadline. They end after it.
    pub busy: Vec<String>,
    /// `true` if memory was exhausted and the policy is
    /// [`ExhaustionPolicy::Exit`](crate::config::ExhaustionPolicy). It makes the report an error,
    /// so that a `main` that returns it exits with a status above 0 and is restarted.
    pub exhausted: bool,
    /// `true` if called in a forked child, in which nothing runs.
    pub forked: bool,
}

impl Shutdown {
    /// Returns `true` if nothing is outstanding and memory was not exhausted.
    #[must_use]
    pub fn is_clean(&self) -> bool {
        *self == Self::default()
    }

    /// Returns the report as an error if something is outstanding or memory was exhausted.
    ///
    /// # Errors
    /// The report itself.
    pub fn into_result(self) -> Result<(), Self> {
        if self.is_clean() { Ok(()) } else { Err(self) }
    }
}

impl std::error::Error for Shutdown {}

impl fmt::Display for Shutdown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.forked {
            return f.write_str("forked child: nothing to shut down");
        }
        if self.exhausted {
            f.write_str("memory exhausted; ")?;
        }
        if (Self { exhausted: false, ..self.clone() }).is_clean() {
            return f.write_str("nothing outstanding");
        }
        let plural = if self.requests == 1 { "" } else { "s" };
        write!(f, "{} request{plural}", self.requests)?;
        #[cfg(feature = "device")]
        write!(f, ", {} of device memory live", self.device_live)?;
        for resource in &self.resources {
            write!(f, "; {resource}")?;
        }
        for thread in &self.panicked {
            write!(f, "; {thread} panicked")?;
        }
        for thread in &self.busy {
            write!(f, "; {thread} still running")?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_main_returns_is_printed_as_its_message() {
        let error = MemoryError::Forked;
        assert_eq!(format!("{error:?}"), error.to_string());
        let report = Shutdown { requests: 2, ..Default::default() };
        let error = report.into_result().expect_err("two requests");
        assert!(format!("{error:?}").starts_with("2 requests"), "{error:?}");
    }

    #[test]
    fn a_limit_that_is_too_small_names_its_source_and_what_was_probably_meant() {
        let text = |limit: u64, from| {
            let (held, least) = (ByteSize::kib(6656), ByteSize::mib(9));
            let limit = ByteSize::new(limit);
            StartError::LimitTooSmall { limit, from, held, least }.to_string()
        };
        assert_eq!(
            text(512, Source::Environment),
            "LOWTIDE_MEMORY_LIMIT=512B is too small: 6.5 MiB in use before the first request; \
             expected at least 9.0 MiB; did you mean 512m?"
        );
        assert!(text(64 << 10, Source::Environment).ends_with("; did you mean 64m?"));
        // The bug: "did you mean 1024m?" for `1k`.
        for (limit, from) in
            [(5, Source::Environment), (1 << 10, Source::Environment), (8 << 20, Source::Code)]
        {
            let text = text(limit, from);
            assert!(text.ends_with("expected at least 9.0 MiB"), "{text}");
        }
        assert!(text(8 << 20, Source::Code).starts_with("memory_limit(8MiB) is too small"));
    }

    #[test]
    fn of_many_names_some_are_listed() {
        let names = |count: usize| (0..count).map(|nth| nth.to_string()).collect::<Vec<_>>();
        assert_eq!(listed(&names(0)), "none (there are none)");
        assert_eq!(listed(&names(2)), r#""0", "1""#);
        assert!(listed(&names(1024)).ends_with(r#""7" or one of 1016 others"#));
    }
}
