//! What is asked of an admission, a cost in each budget and a priority, and why it is rejected.
//!
//! Values only: ledgers, the queue and permits use them.
//!
//! Invariant: only a request that may fit later has a retry time.

use std::time::Duration;

use lowtide_core::bytes::ByteSize;
use thiserror::Error;

use super::pressure::Level;

lowtide_core::named_enum! {
    /// The memory that an account covers.
    #[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
    pub enum Budget {
        /// Host memory.
        Host = "host",
        /// Device memory.
        Device = "device",
    }
}

/// The peak bytes that a request or resource will hold, by budget.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Cost {
    /// Bytes of host memory.
    pub host: ByteSize,
    /// Bytes of device memory.
    pub device: ByteSize,
}

impl Cost {
    /// No bytes.
    pub const ZERO: Self = Self { host: ByteSize::ZERO, device: ByteSize::ZERO };

    /// Creates a cost of `bytes` of host memory.
    #[must_use]
    pub const fn host(bytes: ByteSize) -> Self {
        Self { host: bytes, device: ByteSize::ZERO }
    }

    /// Creates a cost of `bytes` of device memory.
    #[must_use]
    pub const fn device(bytes: ByteSize) -> Self {
        Self { host: ByteSize::ZERO, device: bytes }
    }

    /// Adds `bytes` of host memory.
    #[must_use]
    pub const fn and_host(self, bytes: ByteSize) -> Self {
        Self { host: self.host.saturating_add(bytes), ..self }
    }

    /// Adds `bytes` of device memory.
    #[must_use]
    pub const fn and_device(self, bytes: ByteSize) -> Self {
        Self { device: self.device.saturating_add(bytes), ..self }
    }

    /// Returns the bytes in this budget.
    pub(super) const fn of(self, budget: Budget) -> ByteSize {
        match budget {
            Budget::Host => self.host,
            Budget::Device => self.device,
        }
    }

    /// Returns the sum of both.
    pub(super) const fn and(self, other: Self) -> Self {
        self.and_host(other.host).and_device(other.device)
    }
}

/// The priority of a request: the pressure level from which it is rejected. At every priority but
/// `Exempt`, a request is also rejected if its cost does not fit
/// ([`Rejected::Full`](super::Rejected::Full)).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Priority {
    /// Rejected from level high.
    Low,
    /// Rejected at level critical.
    #[default]
    Normal,
    /// Admitted at every level if its cost fits. It may also use the headroom that requests of
    /// normal priority leave free for larger ones
    /// ([`Ledger::reserved_headroom`](super::Ledger::reserved_headroom)).
    High,
    /// Never rejected, even beyond the allowance. For health checks, metrics and requests of the
    /// service to itself.
    Exempt,
}

/// A cost of normal priority.
impl From<Cost> for (Cost, Priority) {
    fn from(cost: Cost) -> Self {
        (cost, Priority::Normal)
    }
}

/// The reason why a request was rejected or cancelled, and the time after which to retry.
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
        let Self::Full { budget, asked, .. } = self else { return None };
        Some((*budget, *asked))
    }

    /// Returns `true` if the request may wait for room.
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
            _ => None,
        }
    }
}

lowtide_core::named_enum! {
    /// Whether the decisions of admission are carried out.
    #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
    pub enum AdmissionMode {
        /// Requests that do not fit wait or are rejected, and running ones may be suspended or
        /// cancelled.
        #[default]
        Enforce = "enforce",
        /// Every request is admitted at once, grows and runs to its end, and every resource is
        /// loaded. What would have happened is counted ([`AdmissionStats::observed`]). Requests are
        /// still measured, and memory that nothing needs is still released. Nothing is admitted
        /// during shutdown, and time limits hold.
        ///
        /// [`AdmissionStats::observed`]: super::AdmissionStats::observed
        Observe = "observe",
    }
}

lowtide_core::by_name!(AdmissionMode, "enforce or observe");

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
