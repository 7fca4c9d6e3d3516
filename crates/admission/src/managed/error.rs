//! The reasons why a resource cannot be loaded, acquired or unloaded.
//!
//! Values only; nothing is retried here.
//!
//! Invariant: every waiter of a failed load gets a clone of its error.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::Arc;
use std::time::Duration;

use lowtide_core::BoxError;
use lowtide_core::clock::short;
use thiserror::Error;

use crate::cost::Rejected;

/// The reason why a load has failed.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum LoadFailure {
    /// The loader returned this error.
    Failed(Arc<dyn Error + Send + Sync>),
    /// The loader panicked with this message.
    Panicked(String),
    /// The loader did not return in time. Its reservation is released. Its thread runs until the
    /// loader returns; the value is then cleaned up.
    TimedOut {
        /// The timeout ([`ManagedBuilder::load_timeout`](super::ManagedBuilder::load_timeout)).
        timeout: Duration,
        /// The number of threads of this resource that hung in its loader, this one included.
        hung: usize,
    },
    /// No thread could be started for the load: the operating system's error.
    NoThread(io::ErrorKind),
}

impl LoadFailure {
    /// Creates [`LoadFailure::Failed`] from an error or a text.
    pub(crate) fn new(source: impl Into<BoxError>) -> Self {
        Self::Failed(Arc::from(source.into()))
    }
}

/// Two failures are equal if their texts are.
impl PartialEq for LoadFailure {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl fmt::Display for LoadFailure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Failed(source) => source.fmt(f),
            Self::Panicked(message) => write!(f, "the loader panicked: {message}"),
            Self::TimedOut { timeout, hung } => {
                let timeout = short(*timeout);
                write!(f, "the loader timed out after {timeout}; hung loader threads: {hung}")
            }
            Self::NoThread(kind) => write!(f, "cannot start a loader thread: {kind}"),
        }
    }
}

/// A failure to register, acquire or unload a resource.
#[derive(Clone, Debug, Error, PartialEq)]
#[non_exhaustive]
pub enum ResourceError {
    /// The load failed. The first call after the pause tries again.
    #[error("cannot load {name}: {failure}; next attempt in {} at the earliest", short(*retry_in))]
    Load {
        /// The name of the resource.
        name: Arc<str>,
        /// The cause.
        failure: LoadFailure,
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
    /// Acquired inside an unload function, which could wait for its own end.
    #[error("cannot acquire {name} inside an unload function")]
    Unloading {
        /// The name of the resource.
        name: Arc<str>,
    },
    /// Called in a forked child: the resource belongs to the parent process, and the child has no
    /// worker to unload one.
    #[error("{name} belongs to the parent process: start a new Memory in this forked child")]
    Forked {
        /// The name of the resource or the reclaimer.
        name: Arc<str>,
    },
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
    /// The registry is full. Names of reclaimers count after their removal too, since each is a
    /// label in metrics.
    #[error("cannot register {name:?}: limit {max} names")]
    TooMany {
        /// The name of the resource or the reclaimer.
        name: Arc<str>,
        /// The largest number of names.
        max: usize,
    },
    /// A resource, or a reclaimer, of this name is registered.
    #[error("a resource or reclaimer {name:?} is already registered: expected another name")]
    Duplicate {
        /// The name.
        name: Arc<str>,
    },
}

impl ResourceError {
    /// Returns the time after which to retry, if known. `None` if a retry cannot succeed by itself,
    /// such as for a cost that can never fit or a closed resource.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Load { retry_in, .. } => Some(*retry_in),
            Self::Rejected { rejected, .. } => rejected.retry_after(),
            _ => None,
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
            Self::Busy { .. } => "busy",
            Self::CleaningUp { .. } => "cleaning_up",
            Self::TooMany { .. } => "too_many",
            Self::Duplicate { .. } => "duplicate",
        }
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn texts_round_times_and_count_in_words() {
        let busy = |guards| ResourceError::Busy {
            name: "model".into(),
            guards,
            waiting: 0,
            waited: Duration::from_nanos(249_915_449),
        };
        let text = "model is still in use after 249.9 ms: 1 guard, 0 waiting";
        assert_eq!(busy(1).to_string(), text);
        assert!(busy(2).to_string().contains(": 2 guards,"));
        let failed = ResourceError::Load {
            name: "model".into(),
            failure: LoadFailure::new("planted"),
            retry_in: Duration::from_nanos(249_915_449),
        };
        assert!(failed.to_string().contains("attempt in 249.9 ms at"), "{failed}");
        let forked = ResourceError::Forked { name: "model".into() }.to_string();
        assert!(forked.ends_with("start a new Memory in this forked child"), "{forked}");
        assert_eq!(failed.retry_after(), Some(Duration::from_nanos(249_915_449)));
    }
}
