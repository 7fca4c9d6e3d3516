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

use crate::control::rejected::Rejected;

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
    /// The loader did not return in time. Its reservation is released; its thread runs until the
    /// loader returns, and what it returns is taken apart.
    #[error("the loader did not return within {timeout:.1?}; loader threads that hang: {hung}")]
    TimedOut {
        /// The timeout ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)).
        timeout: Duration,
        /// Threads of this resource that hung in its loader then, this one included.
        hung: usize,
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
    #[error("{name} could not be loaded ({error}); tried again in {retry_in:.1?} at the earliest")]
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
    /// An unload on this thread asks for it: it could wait for its own end.
    #[error("cannot acquire {name} inside an unload: expected a call outside it")]
    Unloading {
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

impl AcquireError {
    /// When it may be had, where that is known. A cost that can never fit and a resource that has
    /// been closed have none: somebody has to act first.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Load { retry_in, .. } => Some(*retry_in),
            Self::Rejected { rejected, .. } => rejected.retry_after(),
            Self::Closed { .. }
            | Self::Recursive { .. }
            | Self::Unloading { .. }
            | Self::Forked { .. } => None,
        }
    }

    /// Which of them it is, in a word.
    #[must_use]
    pub const fn reason(&self) -> &'static str {
        match self {
            Self::Load { .. } => "load_failed",
            Self::Rejected { .. } => "does_not_fit",
            Self::Closed { .. } => "closed",
            Self::Recursive { .. } => "recursive",
            Self::Unloading { .. } => "unloading",
            Self::Forked { .. } => "forked",
        }
    }
}

/// A resource that could not be added to a registry.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddError {
    /// Every place is taken.
    #[error("{max} resources are registered: expected fewer")]
    Full {
        /// How many there may be.
        max: usize,
    },
    /// The name is taken: the two would be one in metrics.
    #[error("a resource called {name:?} is registered already: expected another name")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// Called in a forked child, where nobody would unload it.
    #[error("a forked child cannot register resources: start a Memory of its own")]
    Forked,
}

/// A resource that could not be unloaded.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnloadError {
    /// It was still used, or still loading, when the time was up; it stays loaded.
    #[error(
        "{name} was not idle within {waited:.1?}: {guards} guard{}, {waiting} waiting",
        if *guards == 1 { "" } else { "s" }
    )]
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

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn texts_round_times_and_count_in_words() {
        let busy = |guards| UnloadError::Busy {
            name: "model".into(),
            guards,
            waiting: 0,
            waited: Duration::from_nanos(249_915_449),
        };
        let text = "model was not idle within 249.9ms: 1 guard, 0 waiting";
        assert_eq!(busy(1).to_string(), text);
        assert!(busy(2).to_string().contains(": 2 guards,"));
        let failed = AcquireError::Load {
            name: "model".into(),
            error: LoadError::new("planted"),
            retry_in: Duration::from_nanos(249_915_449),
        };
        assert!(failed.to_string().contains("again in 249.9ms at"), "{failed}");
        assert_eq!(failed.retry_after(), Some(Duration::from_nanos(249_915_449)));
    }
}
