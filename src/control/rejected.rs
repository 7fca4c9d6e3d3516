//! Why a request was turned away, and when to come again.
//!
//! Invariant: only what may fit later has a time to come again.

use std::time::Duration;

use thiserror::Error;

use crate::bytes::ByteSize;

use super::ledger::Budget;
use super::pressure::Level;

/// Why a request was not admitted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejected {
    /// It can never fit: 413 for a request; a resource of that cost is its operator's error.
    #[error("{asked} of {budget} memory can never fit under the ceiling of {ceiling}")]
    TooLarge {
        /// The budget that it does not fit.
        budget: Budget,
        /// What was asked for.
        asked: ByteSize,
        /// What may be held altogether.
        ceiling: ByteSize,
    },
    /// It does not fit now: 503.
    #[error(
        "{asked} of {budget} memory do not fit now: {reserved} of an allowance of {allowance} are \
         booked; try again in {} s", retry_after.as_secs()
    )]
    Full {
        /// The budget that it does not fit.
        budget: Budget,
        /// What was asked for.
        asked: ByteSize,
        /// What is booked, a resource by its whole bytes.
        reserved: ByteSize,
        /// What may be booked by a request of this size, counted alike: where larger ones are
        /// behind, less than by them ([`Ledger::reserved_headroom`](super::Ledger::berth)).
        allowance: ByteSize,
        /// When to try again: whole seconds, spread so that clients do not come back together. The
        /// time in which what is missing comes free, as far as it is known: by requests that end,
        /// by the unload of idle resources, or by their minimum residency.
        retry_after: Duration,
    },
    /// The level sheds this priority: 503.
    #[error("memory pressure is {level}: try again in {} s", retry_after.as_secs())]
    Pressure {
        /// The level.
        level: Level,
        /// When to try again, as for [`Rejected::Full`].
        retry_after: Duration,
    },
    /// Memory that no request owns leaves no room for requests, and a purge did not help: 503.
    /// Instances that are like this one may have room; here an operator has to act.
    #[error(
        "{unowned} of host memory belong to no request and leave no room under the ceiling of \
         {ceiling}: try again in {} s", retry_after.as_secs()
    )]
    Exhausted {
        /// What no request owns: loaded resources, and memory that is booked nowhere.
        unowned: ByteSize,
        /// What may be held altogether.
        ceiling: ByteSize,
        /// When to try again, as for [`Rejected::Full`]: 30 s to 60 s.
        retry_after: Duration,
    },
    /// The need of its route is not known yet, and as many of its requests run as may until it is:
    /// 503. Only requests that are large for the allowance are rejected for this reason, and
    /// none a second later.
    #[error(
        "the need of this route is not measured yet and {running} of its requests run: try again \
         in {} s", retry_after.as_secs()
    )]
    SlowStart {
        /// How many run.
        running: u32,
        /// When to try again.
        retry_after: Duration,
    },
    /// Admission has been closed: 503.
    #[error("the service is shutting down")]
    ShuttingDown,
}

impl Rejected {
    /// Which counter it is under.
    #[must_use]
    pub const fn reason(&self) -> RejectReason {
        match self {
            Self::TooLarge { .. } => RejectReason::TooLarge,
            Self::Full { .. } => RejectReason::Full,
            Self::Pressure { .. } => RejectReason::Pressure,
            Self::Exhausted { .. } => RejectReason::Exhausted,
            Self::ShuttingDown => RejectReason::ShuttingDown,
            Self::SlowStart { .. } => RejectReason::SlowStart,
        }
    }

    /// What did not fit, where it may fit later.
    pub(crate) const fn shortage(&self) -> Option<(Budget, ByteSize)> {
        match self {
            Self::Full { budget, asked, .. } => Some((*budget, *asked)),
            Self::TooLarge { .. }
            | Self::Pressure { .. }
            | Self::Exhausted { .. }
            | Self::SlowStart { .. }
            | Self::ShuttingDown => None,
        }
    }

    /// When to try again; `None` where it would not help.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Full { retry_after, .. }
            | Self::Pressure { retry_after, .. }
            | Self::Exhausted { retry_after, .. }
            | Self::SlowStart { retry_after, .. } => Some(*retry_after),
            Self::TooLarge { .. } | Self::ShuttingDown => None,
        }
    }
}

/// Why requests were shed, for counting.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum RejectReason {
    /// It can never fit.
    TooLarge,
    /// It did not fit then.
    Full,
    /// By level.
    Pressure,
    /// Admission was closed.
    ShuttingDown,
    /// Memory that no request owns left no room for requests.
    Exhausted,
    /// The need of its route was not known yet.
    SlowStart,
}

impl RejectReason {
    /// All reasons.
    pub const ALL: [Self; 6] = [
        Self::TooLarge,
        Self::Full,
        Self::Pressure,
        Self::ShuttingDown,
        Self::Exhausted,
        Self::SlowStart,
    ];

    /// Its label in metrics.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::TooLarge => "too_large",
            Self::Full => "full",
            Self::Pressure => "pressure",
            Self::ShuttingDown => "shutting_down",
            Self::Exhausted => "exhausted",
            Self::SlowStart => "slow_start",
        }
    }
}
