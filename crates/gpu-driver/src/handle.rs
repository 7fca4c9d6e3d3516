//! Handles of driver objects (streams, events, host stores), and the values of driver queries.
//!
//! A handle is a number and owns nothing. An invented handle does no harm by itself: every call
//! that takes one is unsafe, and so is passing a stream to an arena (`DeviceArena::lane`).
//!
//! Invariant: a driver never reuses a number while the object with that number exists.

use lowtide_core::bytes::ByteSize;

/// A stream: a queue of device work that runs in order (`CUstream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamHandle(u64);

impl StreamHandle {
    /// CUDA's legacy default stream (`CU_STREAM_LEGACY`), for code that queues its work there, such
    /// as PyTorch. Its work waits for that of every stream that was not created as non-blocking,
    /// and the other way round. A handle of 0 and the default stream of a thread (2) are rejected:
    /// the first is usually a mistake, and the second is a different stream in each thread.
    pub const LEGACY: Self = Self(1);

    /// Creates a handle from its number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the stream that a handle from other code stands for: the legacy default stream for 0
    /// and 1. Returns `None` for 2, which is another stream in each thread.
    #[inline]
    #[must_use]
    pub const fn of_cuda(handle: u64) -> Option<Self> {
        match handle {
            0 | 1 => Some(Self::LEGACY),
            2 => None,
            handle => Some(Self(handle)),
        }
    }

    /// Returns the number of the stream.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The total and free memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts")]
pub struct DeviceMemory {
    /// The total memory.
    pub total: ByteSize,
    /// Memory that no process has allocated.
    pub free: ByteSize,
}

impl DeviceMemory {
    /// Returns the memory in use by all processes.
    #[must_use]
    pub const fn taken(self) -> ByteSize {
        self.total.saturating_sub(self.free)
    }
}

/// The owner of the memory at an address, as far as the driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer")]
pub enum Owner {
    /// The driver does not know.
    Unknown,
    /// The driver's own device and context.
    Here,
    /// Another owner, described by the text.
    Elsewhere(&'static str),
}

/// An event: a mark in a stream that completes when all work before it is done (`CUevent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventHandle(u64);

impl EventHandle {
    /// Creates a handle from its number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the event.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Host memory held by a driver, into which device memory is offloaded.
///
/// It is a number rather than a pointer, and only the driver accesses the memory. No slice of it
/// can therefore exist while the device writes to it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostStore(u64);

impl HostStore {
    /// Creates a handle from its number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// Returns the number of the store.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// A part of a [`HostStore`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StoreSpan {
    /// The store.
    pub store: HostStore,
    /// The start of the part, as an offset into the store.
    pub offset: ByteSize,
    /// The size of the part.
    pub size: ByteSize,
}
