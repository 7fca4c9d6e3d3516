//! The reasons for a rejection, and the time after which to retry.
//!
//! Invariant: only a request that may fit later has a retry time.

use std::time::Duration;

use thiserror::Error;

use lowtide_core::bytes::ByteSize;

use super::cost::Budget;
use super::pressure::Level;

/// The reason why a request was not admitted.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum Rejected {
    /// The cost can never fit. Answer a request with 413; for a resource it is a configuration
    /// error.
    #[error("cannot reserve {asked} of {budget} memory: exceeds the ceiling of {ceiling}")]
    TooLarge {
        /// The budget that the cost exceeds.
        budget: Budget,
        /// The bytes requested.
        asked: ByteSize,
        /// The most bytes that may be held in total; for a resource, less what the process holds
        /// without requests and resources.
        ceiling: ByteSize,
    },
    /// The cost does not fit now. Answer with 503.
    #[error(
        "cannot reserve {asked} of {budget} memory now: {reserved} reserved, allowance \
         {allowance}; retry in {} s", retry_after.as_secs()
    )]
    Full {
        /// The budget that has no room.
        budget: Budget,
        /// The bytes requested.
        asked: ByteSize,
        /// The bytes reserved, with resources by their full size.
        reserved: ByteSize,
        /// The bytes that may be reserved in total by a request of this size. Less than for larger
        /// ones while headroom is reserved for those
        /// ([`Ledger::reserved_headroom`](super::Ledger::reserved_headroom)), and no more than is
        /// reserved while the rest is kept for requests that wait, or is not purged yet.
        allowance: ByteSize,
        /// The time after which to retry: whole seconds, spread so that clients do not return
        /// together. It estimates when the missing bytes become free, because requests end, idle
        /// resources are unloaded, or their minimum residency ends.
        retry_after: Duration,
    },
    /// The pressure level rejects this priority. Answer with 503.
    #[error("memory pressure is {level}; retry in {} s", retry_after.as_secs())]
    Pressure {
        /// The level.
        level: Level,
        /// The time after which to retry, as for [`Rejected::Full`].
        retry_after: Duration,
    },
    /// Memory that no request owns leaves no room for requests, and a purge did not help. Answer
    /// with 503. Other instances may have room; on this one an operator has to act.
    #[error(
        "host memory is exhausted: {unowned} owned by no request, ceiling {ceiling}; retry in {} s",
        retry_after.as_secs()
    )]
    Exhausted {
        /// The bytes that no request owns: loaded resources and unreserved memory.
        unowned: ByteSize,
        /// The most bytes that may be held in total.
        ceiling: ByteSize,
        /// The time after which to retry, as for [`Rejected::Full`]: 30 s to 60 s.
        retry_after: Duration,
    },
    /// The memory need of the route is not measured yet, and as many of its requests run as are
    /// allowed until then. Answer with 503. Only requests that are large compared to the allowance
    /// are rejected for this reason, and none after one second.
    #[error(
        "memory need of this route is not measured yet: {running} running; retry in {} s",
        retry_after.as_secs()
    )]
    SlowStart {
        /// The number of running requests of the route.
        running: u32,
        /// The time after which to retry.
        retry_after: Duration,
    },
    /// The device is lost, and its memory with it, until the process restarts. Answer with 503:
    /// another instance may have a device that works.
    #[error("cannot reserve {asked} of device memory: the device is lost")]
    DeviceLost {
        /// The bytes requested.
        asked: ByteSize,
    },
    /// A running request was cancelled: it holds more memory than it may while memory is short.
    /// Answer with 503, or with 413 if it alone holds more than half the ceiling, since a retry
    /// cannot succeed then.
    #[error("request cancelled: it holds {held}, expected at most {most} while memory is short")]
    Outgrown {
        /// The bytes that it held when it was cancelled.
        held: ByteSize,
        /// The bytes that it reserved when it was admitted.
        claim: ByteSize,
        /// The bytes that it might hold: its cap, or its claim if the level is critical.
        most: ByteSize,
        /// The time after which to retry, as for [`Rejected::Full`].
        retry_after: Option<Duration>,
    },
    /// Admission has been closed. Answer with 503.
    #[error("the service is shutting down")]
    ShuttingDown,
    /// The client of a running request sent the body more slowly than it must: answer with 408. Or
    /// it took the response more slowly, which then ends with this error.
    #[error("client too slow: expected {bytes_per_second}/s on average, after {grace:?}")]
    SlowClient {
        /// The bytes per second that were expected.
        bytes_per_second: ByteSize,
        /// The time that the client may be slower, or pause.
        grace: Duration,
    },
    /// A running request held its permit for longer than it may. Answer with 503; a response that
    /// has begun ends with this error.
    #[error("request cancelled: it has held its memory for longer than {most:?}")]
    HeldTooLong {
        /// The longest time for which a permit may be held.
        most: Duration,
    },
}

impl Rejected {
    /// Returns the reason under which the rejection is counted.
    #[must_use]
    pub const fn reason(&self) -> RejectReason {
        match self {
            Self::TooLarge { .. } => RejectReason::TooLarge,
            Self::Full { .. } => RejectReason::Full,
            Self::Pressure { .. } => RejectReason::Pressure,
            Self::Exhausted { .. } => RejectReason::Exhausted,
            Self::ShuttingDown => RejectReason::ShuttingDown,
            Self::SlowStart { .. } => RejectReason::SlowStart,
            Self::DeviceLost { .. } => RejectReason::DeviceLost,
            Self::Outgrown { .. } => RejectReason::Outgrown,
            Self::SlowClient { .. } => RejectReason::SlowClient,
            Self::HeldTooLong { .. } => RejectReason::HeldTooLong,
        }
    }

    /// Returns the budget and bytes that did not fit, if they may fit later.
    pub(crate) const fn shortage(&self) -> Option<(Budget, ByteSize)> {
        match self {
            Self::Full { budget, asked, .. } => Some((*budget, *asked)),
            Self::TooLarge { .. }
            | Self::Pressure { .. }
            | Self::Exhausted { .. }
            | Self::SlowStart { .. }
            | Self::DeviceLost { .. }
            | Self::Outgrown { .. }
            | Self::SlowClient { .. }
            | Self::HeldTooLong { .. }
            | Self::ShuttingDown => None,
        }
    }

    /// Returns `true` if the request may wait for room.
    #[doc(hidden)]
    #[must_use]
    pub const fn may_wait(&self) -> bool {
        matches!(self, Self::Full { .. } | Self::Pressure { .. } | Self::SlowStart { .. })
    }

    /// Returns the time after which to retry, or `None` if a retry cannot succeed, or may take as
    /// long.
    #[must_use]
    pub const fn retry_after(&self) -> Option<Duration> {
        match self {
            Self::Full { retry_after, .. }
            | Self::Pressure { retry_after, .. }
            | Self::Exhausted { retry_after, .. }
            | Self::SlowStart { retry_after, .. } => Some(*retry_after),
            Self::Outgrown { retry_after, .. } => *retry_after,
            Self::TooLarge { .. }
            | Self::DeviceLost { .. }
            | Self::ShuttingDown
            | Self::SlowClient { .. }
            | Self::HeldTooLong { .. } => None,
        }
    }
}

lowtide_core::named_enum! {
    /// The reason of a rejection, for counting.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    #[non_exhaustive]
    pub enum RejectReason {
        /// The cost can never fit.
        TooLarge = "too_large",
        /// The cost did not fit at that time.
        Full = "full",
        /// The pressure level rejected the priority.
        Pressure = "pressure",
        /// Admission was closed.
        ShuttingDown = "shutting_down",
        /// Memory that no request owned left no room for requests.
        Exhausted = "exhausted",
        /// The memory need of the route was not measured yet.
        SlowStart = "slow_start",
        /// The device was lost.
        DeviceLost = "device_lost",
        /// The request was cancelled while it ran because it held more than its claim.
        Outgrown = "outgrown",
        /// The request was ended because its client sent or took data too slowly.
        SlowClient = "slow_client",
        /// The request was ended because it held its permit for too long.
        HeldTooLong = "held_too_long",
    }
}

impl RejectReason {
    /// Returns `true` if the service sheds load with it: another instance may serve the request
    /// now. It does not if the request or its client is the reason.
    pub(crate) const fn is_shed(self) -> bool {
        match self {
            Self::Full
            | Self::Pressure
            | Self::ShuttingDown
            | Self::Exhausted
            | Self::SlowStart
            | Self::DeviceLost
            | Self::Outgrown => true,
            Self::TooLarge | Self::SlowClient | Self::HeldTooLong => false,
        }
    }
}
