//! The reasons why a resource cannot be loaded, acquired or unloaded.
//!
//! Values only; nothing is retried here.
//!
//! Invariant: every waiter of a failed load gets a clone of its error.

use std::error::Error;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::BoxError;
use lowtide_core::clock::short;
use thiserror::Error;

use crate::cost::Rejected;

/// A failed load.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum LoadError {
    /// The loader returned an error.
    #[error("{source}")]
    Failed {
        /// The error.
        source: Arc<dyn Error + Send + Sync>,
    },
    /// The loader panicked.
    #[error("the loader panicked: {message}")]
    Panicked {
        /// The message of the panic.
        message: String,
    },
    /// The loader did not return in time. Its reservation is released. Its thread runs until the
    /// loader returns; the value is then cleaned up.
    #[error("the loader timed out after {}; hung loader threads: {hung}", short(*timeout))]
    TimedOut {
        /// The timeout ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)).
        timeout: Duration,
        /// The number of threads of this resource that hung in its loader, this one included.
        hung: usize,
    },
    /// No thread could be started for the load.
    #[error("cannot start a loader thread: {kind}")]
    NoThread {
        /// The operating system's error.
        kind: io::ErrorKind,
    },
}

impl LoadError {
    /// Creates [`LoadError::Failed`] from an error or a text.
    pub(crate) fn new(source: impl Into<BoxError>) -> Self {
        Self::Failed { source: Arc::from(source.into()) }
    }
}

/// A failure to acquire a resource.
#[derive(Clone, Debug, Error)]
#[non_exhaustive]
pub enum AcquireError {
    /// The load failed. The first call after the pause tries again.
    #[error("cannot load {name}: {error}; next attempt in {} at the earliest", short(*retry_in))]
    Load {
        /// The name of the resource.
        name: Arc<str>,
        /// The cause.
        error: LoadError,
        /// The remaining pause.
        retry_in: Duration,
    },
    /// The cost does not fit.
    #[error("cannot load {name}: {rejected}")]
    Rejected {
        /// The name of the resource.
        name: Arc<str>,
        /// The cause.
        rejected: Rejected,
    },
    /// The resource has been closed.
    #[error("{name} is closed")]
    Closed {
        /// The name of the resource.
        name: Arc<str>,
    },
    /// The resource is being loaded by this thread: its loader acquires the resource itself.
    #[error("the loader of {name} acquires {name}: expected no acquire of itself")]
    Recursive {
        /// The name of the resource.
        name: Arc<str>,
    },
    /// Called inside an unload function, which could wait for its own end.
    #[error("cannot acquire {name} inside an unload function")]
    Unloading {
        /// The name of the resource.
        name: Arc<str>,
    },
    /// Called in a forked child: the resource belongs to the parent process.
    #[error("{name} belongs to the parent process: forked children cannot use it")]
    Forked {
        /// The name of the resource.
        name: Arc<str>,
    },
}

impl AcquireError {
    /// Returns the time after which to retry, if known. `None` if a retry cannot succeed by itself,
    /// such as for a cost that can never fit or a closed resource.
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

    /// Returns the kind of failure as one word, such as `load_failed`.
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

/// A failure to add a resource or a reclaimer to a registry.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum AddError {
    /// The registry is full.
    #[error("cannot register another resource: limit {max}")]
    Full {
        /// The largest number of resources.
        max: usize,
    },
    /// The name is taken. In metrics the two could not be distinguished.
    #[error("a resource named {name:?} is already registered")]
    Duplicate {
        /// The name.
        name: String,
    },
    /// There are as many names of reclaimers as a registry keeps, since each is a label in metrics.
    #[error("cannot register another reclaimer: limit {max} names, removed ones included")]
    TooManyReclaimers {
        /// The largest number of names.
        max: usize,
    },
    /// A reclaimer of this name is registered.
    #[error("a reclaimer named {name:?} is already registered")]
    DuplicateReclaimer {
        /// The name.
        name: String,
    },
    /// Called in a forked child, which has no worker to unload the resource.
    #[error("cannot register a resource or reclaimer in a forked child: start a new Memory")]
    Forked,
}

/// A failure to unload a resource.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum UnloadError {
    /// The resource was still in use or loading when the wait ended. It stays loaded.
    #[error(
        "{name} is still in use after {}: {guards} guard{}, {waiting} waiting",
        short(*waited), if *guards == 1 { "" } else { "s" }
    )]
    Busy {
        /// The name of the resource.
        name: Arc<str>,
        /// The number of guards held.
        guards: usize,
        /// The number of callers that wait for it.
        waiting: usize,
        /// The time waited.
        waited: Duration,
    },
    /// The clean-up of its value was still running when the wait ended. It continues.
    #[error("the clean-up of {name} is still running")]
    CleaningUp {
        /// The name of the resource.
        name: Arc<str>,
    },
    /// Called in a forked child: the resource belongs to the parent process.
    #[error("{name} belongs to the parent process: forked children cannot use it")]
    Forked {
        /// The name of the resource.
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
        let text = "model is still in use after 249.9 ms: 1 guard, 0 waiting";
        assert_eq!(busy(1).to_string(), text);
        assert!(busy(2).to_string().contains(": 2 guards,"));
        let failed = AcquireError::Load {
            name: "model".into(),
            error: LoadError::new("planted"),
            retry_in: Duration::from_nanos(249_915_449),
        };
        assert!(failed.to_string().contains("attempt in 249.9 ms at"), "{failed}");
        assert_eq!(failed.retry_after(), Some(Duration::from_nanos(249_915_449)));
    }
}
