//! What can go wrong when `Memory` starts or is used, and what is merely worth knowing.

use std::fmt;

use thiserror::Error;

use crate::config::{ConfigError, DeviceChoice};
use crate::control::{AddError, LoadError, SettingsError};
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

/// Something that did not go as asked, or that this system does not have; said once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Note {
    /// What it is about: `heap`, `limit`, `signals`, `device`, `resources`.
    pub about: &'static str,
    /// What is so, and what to do about it.
    pub text: String,
}

impl fmt::Display for Note {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.about, self.text)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_error_in_a_loader_keeps_its_numbers() {
        let load = || -> Result<(), LoadError> { Err(DeviceError::Forked)? };
        let Err(LoadError::Failed { source }) = load() else { panic!("it fails") };
        assert_eq!(source.downcast_ref::<DeviceError>(), Some(&DeviceError::Forked));
    }
}
