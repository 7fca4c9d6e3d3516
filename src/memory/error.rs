//! Errors of `Memory`, and diagnostics.

use std::fmt;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::config::{ConfigError, Source};
use lowtide_admission::{Budget, ResourceError, SettingsError};
use lowtide_heap::ReleaseFailure;

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
    #[cfg(feature = "device")]
    #[error("device {device} is given twice: expected each device once")]
    SameDevice {
        /// The device's UUID, or its place in the list if the driver knows none.
        device: String,
    },
    /// There are more devices than a `Memory` may have.
    #[cfg(feature = "device")]
    #[error("{count} devices: expected at most {max}; name some, or set CUDA_VISIBLE_DEVICES")]
    TooManyDevices {
        /// The number of devices.
        count: usize,
        /// The maximum.
        max: usize,
    },
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

crate::config::debug_is_message!(StartError, MemoryError, super::Shutdown);

/// Formats a limit in the form of its source.
fn named(from: Source, limit: ByteSize) -> String {
    match from {
        Source::Environment => format!("LOWTIDE_MEMORY_LIMIT={}", limit.exact()),
        _ => format!("memory_limit({})", limit.exact()),
    }
}

/// The largest number without a unit that may have been meant as MiB: 64 GiB.
const MEANT_MAX: u64 = 1 << 16;

/// Returns a suggestion if the number of bytes is a plausible number of MiB.
fn meant(limit: ByteSize, least: ByteSize) -> String {
    let count = limit.get();
    if count < MEANT_MAX && ByteSize::mib(count) >= least {
        format!("; did you mean {count}m?")
    } else {
        String::new()
    }
}

/// An error of a running [`Memory`](super::Memory). Its `Debug` output is its message.
#[derive(Clone, Error, PartialEq)]
#[non_exhaustive]
pub enum MemoryError {
    /// An arena could not be opened.
    #[cfg(feature = "device")]
    #[error(transparent)]
    Arena(#[from] super::devices::ArenaError),
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
    /// This is a forked child: the threads and the device context belong to the parent.
    #[error(
        "the Memory was started in the parent of this forked process: start one in this process"
    )]
    Forked,
}

/// The severity of a [`Diagnostic`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize), serde(rename_all = "snake_case"))]
#[non_exhaustive]
pub enum Severity {
    /// A fact about this system that needs no action, such as that there is no GPU. Logged at info.
    Info,
    /// A problem, or reduced protection. Logged at warn and counted in `lowtide_diagnostics`.
    Warning,
}

/// A setting that could not be applied, or a feature that this system lacks. Logged once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct Diagnostic {
    /// The severity.
    pub severity: Severity,
    /// The subject: `configuration`, `heap`, `limit`, `signals`, `device`, `resources`.
    pub about: &'static str,
    /// The fact, and the action to take.
    pub text: String,
}

impl Diagnostic {
    pub(super) fn warning(about: &'static str, text: String) -> Self {
        Self { severity: Severity::Warning, about, text }
    }

    pub(super) fn info(about: &'static str, text: String) -> Self {
        Self { severity: Severity::Info, about, text }
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_main_returns_is_printed_as_its_message() {
        let error = MemoryError::Forked;
        assert_eq!(format!("{error:?}"), error.to_string());
        let report = super::super::Shutdown { requests: 2, ..Default::default() };
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
        for (limit, from) in [(5, Source::Environment), (8 << 20, Source::Code)] {
            let text = text(limit, from);
            assert!(text.ends_with("expected at least 9.0 MiB"), "{text}");
        }
        assert!(text(8 << 20, Source::Code).starts_with("memory_limit(8MiB) is too small"));
    }
}
