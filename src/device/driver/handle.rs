//! Names of what a driver keeps (streams, events, stores of host memory), and what it answers.
//!
//! A handle is a number and owns nothing. Making one up does no harm: every call that takes one
//! takes a key as well, which only this crate can make; who gives an arena one of a stream vouches
//! for it (`DeviceArena::lane`).
//!
//! Invariant: a driver gives out no number twice while what it names exists.

use crate::bytes::ByteSize;

/// A queue of the device's work, done one after the other (`CUstream`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamHandle(u64);

impl StreamHandle {
    /// The stream with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number of the stream.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// The memory of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_structs, reason = "two facts")]
pub struct DeviceMemory {
    /// All of it.
    pub total: ByteSize,
    /// What nobody holds, in this process or in another.
    pub free: ByteSize,
}

impl DeviceMemory {
    /// What somebody holds.
    #[must_use]
    pub const fn taken(self) -> ByteSize {
        self.total.saturating_sub(self.free)
    }
}

/// Whose memory lies at an address, as far as a driver knows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[expect(clippy::exhaustive_enums, reason = "there is no fourth answer")]
pub enum Owner {
    /// It cannot say.
    Unknown,
    /// Its own device's, in its own context.
    Here,
    /// Not that: what it is instead.
    Elsewhere(&'static str),
}

/// A mark in a stream, complete when all work before it is (`CUevent`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct EventHandle(u64);

impl EventHandle {
    /// The event with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number of the event.
    #[must_use]
    pub const fn get(self) -> u64 {
        self.0
    }
}

/// Host memory that a driver holds, to offload device memory into.
///
/// It is named and not pointed at: nobody reads it but the driver, so that no slice of it can be
/// alive while the device writes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct HostStore(u64);

impl HostStore {
    /// The store with this number.
    #[must_use]
    pub const fn new(number: u64) -> Self {
        Self(number)
    }

    /// The number of the store.
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
    /// Where in it the part begins.
    pub offset: ByteSize,
    /// How long it is.
    pub size: ByteSize,
}
