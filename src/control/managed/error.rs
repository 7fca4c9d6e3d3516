//! Why a resource cannot be loaded, acquired or unloaded.
//!
//! Values only; nothing is retried here.
//!
//! Invariant: an error is cloned to everyone who waited for the same load.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use thiserror::Error;

use crate::control::admission::Rejected;

/// A load that failed.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The loader said so.
    #[error("{source}")]
    Failed {
        /// What it said.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The loader panicked.
    #[error("the loader panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// No thread could be started to load on.
    #[error("no thread to load on: {kind}")]
    NoThread {
        /// Why.
        kind: io::ErrorKind,
    },
}

impl LoadError {
    /// The loader failed because of this: an error, or a text.
    pub fn new(source: impl Into<Box<dyn Error + Send + Sync>>) -> Self {
        Self::Failed { source: Arc::from(source.into()) }
    }
}

impl From<io::Error> for LoadError {
    fn from(error: io::Error) -> Self {
        Self::new(error)
    }
}

/// A resource that could not be acquired.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// Its load failed; it is tried again by whoever asks after the pause.
    #[error("{name} could not be loaded ({error}); tried again in {retry_in:?} at the earliest")]
    Load {
        /// The resource.
        name: Arc<str>,
        /// Why.
        error: LoadError,
        /// How long the pause still lasts.
        retry_in: Duration,
    },
    /// Its cost does not fit.
    #[error("{name} does not fit: {rejected}")]
    Rejected {
        /// The resource.
        name: Arc<str>,
        /// Why.
        rejected: Rejected,
    },
    /// It has been closed.
    #[error("{name} has been closed")]
    Closed {
        /// The resource.
        name: Arc<str>,
    },
    /// It is being loaded by this very thread: its loader asks for itself.
    #[error("the loader of {name} asks for {name}")]
    Recursive {
        /// The resource.
        name: Arc<str>,
    },
    /// It belongs to the process that this one was forked from.
    #[error("{name} belongs to the process that this one was forked from")]
    Forked {
        /// The resource.
        name: Arc<str>,
    },
}

/// A resource that could not be unloaded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnloadError {
    /// It was still used, or still loading, when the time was up; it stays loaded.
    #[error("{name} was not idle within {waited:?}: {guards} guards, {waiting} waiting")]
    Busy {
        /// The resource.
        name: Arc<str>,
        /// Guards that are held.
        guards: usize,
        /// Callers that wait for it.
        waiting: usize,
        /// How long was waited.
        waited: Duration,
    },
    /// It belongs to the process that this one was forked from.
    #[error("{name} belongs to the process that this one was forked from")]
    Forked {
        /// The resource.
        name: Arc<str>,
    },
}
