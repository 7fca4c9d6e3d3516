//! What can go wrong when `Memory` starts or is used, and what is merely worth knowing.

use std::fmt;

use thiserror::Error;

use crate::bytes::ByteSize;
use crate::config::{ConfigError, DeviceChoice, Source};
use crate::control::{AddError, Budget, LoadError, SettingsError};
use crate::device::DeviceError;

/// Why a [`Memory`](super::Memory) did not start. Nothing is left running.
///
/// Its `Debug` is its text, so that a `main` that returns it says what is wrong.
#[derive(Error)]
#[non_exhaustive]
pub enum StartError {
    /// One runs in this process already.
    #[error("a Memory runs in this process already: share its handle, or shut it down first")]
    AlreadyStarted,
    /// Settings that cannot be used.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// Settings that do not go together.
    #[error(transparent)]
    Settings(#[from] SettingsError),
    /// The configured memory limit leaves no room for any request.
    #[error(
        "{} is too small: {held} are held before the first request; expected at least {least}{}",
        named(*.from, *.limit), meant(*.limit, *.least)
    )]
    LimitTooSmall {
        /// The configured limit.
        limit: ByteSize,
        /// Where it was configured.
        from: Source,
        /// What this process holds after a purge, before its first request.
        held: ByteSize,
        /// The smallest limit that admits anything: `held` divided by the ceiling, in whole MiB and
        /// at least 1 MiB. A service needs more: what its requests hold as well.
        least: ByteSize,
    },
    /// A CUDA device was asked for and is not to be had.
    #[error("LOWTIDE_DEVICE={device}: {cause}")]
    NoCuda {
        /// Which.
        device: DeviceChoice,
        /// Why not.
        cause: String,
    },
    /// A thread could not be started.
    #[error("the thread {name} cannot be started: {error}")]
    Thread {
        /// Which.
        name: &'static str,
        /// What the operating system said.
        error: std::io::Error,
    },
}

impl fmt::Debug for StartError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// A limit as its author wrote it.
fn named(from: Source, limit: ByteSize) -> String {
    match from {
        Source::Environment => format!("LOWTIDE_MEMORY_LIMIT={}", limit.exact()),
        _ => format!("memory_limit({})", limit.exact()),
    }
}

/// The largest number without a unit that may have been meant as MiB: 64 GiB.
const MEANT_MAX: u64 = 1 << 16;

/// What was probably meant: a number of bytes that is a sensible number of MiB.
fn meant(limit: ByteSize, least: ByteSize) -> String {
    let count = limit.get();
    if count < MEANT_MAX && ByteSize::mib(count) >= least {
        format!("; did you mean {count}m?")
    } else {
        String::new()
    }
}

/// Why something could not be done with a running [`Memory`](super::Memory).
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum MemoryError {
    /// The configuration says that there is no device.
    #[error("arena {arena:?} cannot be opened: LOWTIDE_DEVICE is none")]
    NoDevice {
        /// The arena's name.
        arena: String,
    },
    /// The driver refused.
    #[error("arena {arena:?} cannot be opened: {error}")]
    Arena {
        /// The arena's name.
        arena: String,
        /// What the driver said.
        error: DeviceError,
    },
    /// The name is taken: the two would be one in metrics.
    #[error("an arena called {arena:?} is open already: expected another name")]
    DuplicateArena {
        /// The name.
        arena: String,
    },
    /// Every place is taken.
    #[error("{max} arenas are open: expected fewer")]
    TooManyArenas {
        /// How many there may be.
        max: usize,
    },
    /// Every place is taken.
    #[error("{max} resources are registered: expected fewer")]
    TooManyResources {
        /// How many there may be.
        max: usize,
    },
    /// The name is taken: the two would be one in metrics.
    #[error("a resource called {name:?} is registered already: expected another name")]
    DuplicateResource {
        /// The name.
        name: String,
    },
    /// The resource can never be loaded: its cost is above the ceiling of a limit that cannot grow.
    #[error(
        "resource {name:?} needs {cost} of {budget} memory, above the ceiling of {ceiling}: \
         expected a smaller cost or a larger limit"
    )]
    ResourceTooLarge {
        /// The resource.
        name: String,
        /// The budget that it does not fit.
        budget: Budget,
        /// Its declared cost.
        cost: ByteSize,
        /// The most that may ever be held: the configured limit, or the machine's memory, times
        /// the configured ceiling.
        ceiling: ByteSize,
    },
    /// This is a forked child: the threads and the device context are the parent's.
    #[error("this process is a fork of the one that started Memory: start one here")]
    Forked,
}

impl From<AddError> for MemoryError {
    fn from(error: AddError) -> Self {
        match error {
            AddError::Full { max } => Self::TooManyResources { max },
            AddError::Duplicate { name } => Self::DuplicateResource { name },
            AddError::Forked => Self::Forked,
        }
    }
}

/// For `?` in the loaders of resources that live in an arena. It stands here because policy and
/// devices do not know each other.
impl From<DeviceError> for LoadError {
    fn from(error: DeviceError) -> Self {
        Self::new(error)
    }
}

/// How much a [`Diagnostic`] matters.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Severity {
    /// A fact about this system that needs no action, such as that there is no GPU. Logged at info.
    Info,
    /// Something did not go as asked, or protection is reduced. Logged at warn and counted in
    /// `lowtide_diagnostics`.
    Warning,
}

/// Something that did not go as asked, or that this system does not have; logged once.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct Diagnostic {
    /// How much it matters.
    pub severity: Severity,
    /// What it is about: `heap`, `limit`, `signals`, `device`, `resources`.
    pub about: &'static str,
    /// What is so, and what to do about it.
    pub text: String,
}

impl Diagnostic {
    pub(super) fn warning(about: &'static str, text: String) -> Self {
        Self { severity: Severity::Warning, about, text }
    }

    pub(super) fn info(about: &'static str, text: String) -> Self {
        Self { severity: Severity::Info, about, text }
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
    fn a_limit_that_is_too_small_names_its_source_and_what_was_probably_meant() {
        let text = |limit: u64, from| {
            let (held, least) = (ByteSize::kib(6656), ByteSize::mib(9));
            let limit = ByteSize::new(limit);
            StartError::LimitTooSmall { limit, from, held, least }.to_string()
        };
        assert_eq!(
            text(512, Source::Environment),
            "LOWTIDE_MEMORY_LIMIT=512B is too small: 6.5 MiB are held before the first request; \
             expected at least 9.0 MiB; did you mean 512m?"
        );
        for (limit, from) in [(5, Source::Environment), (8 << 20, Source::Code)] {
            let text = text(limit, from);
            assert!(text.ends_with("expected at least 9.0 MiB"), "{text}");
        }
        assert!(text(8 << 20, Source::Code).starts_with("memory_limit(8MiB) is too small"));
    }

    #[test]
    fn a_device_error_in_a_loader_keeps_its_numbers() {
        let load = || -> Result<(), LoadError> { Err(DeviceError::Forked)? };
        let Err(LoadError::Failed { source }) = load() else { panic!("it fails") };
        assert_eq!(source.downcast_ref::<DeviceError>(), Some(&DeviceError::Forked));
    }
}
