//! What is asked of an admission: a cost in each budget, and a priority.
//!
//! Values only: ledgers, the queue and permits use them.

use lowtide_core::bytes::ByteSize;

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
