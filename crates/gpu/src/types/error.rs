//! Errors of device arenas and pinned pools, with the figures that explain them.
//!
//! Errors are final: `OutOfMemory` comes after the arena's idle memory was released. This module
//! does not retry or log.
//!
//! Invariant: an operation that returns an error leaves the arena unchanged, except that idle
//! memory may have been released or committed.

use std::time::Duration;

use crate::driver::{Backend, DeviceAddress, DriverError};
use crate::types::Region;
use crate::types::sleep::SleepState;
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::short;
use thiserror::Error;

/// The bound that prevented an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The limit of the arena or the pool.
    Limit,
    /// The memory of the driver, for the device or the host.
    Driver,
    /// The addresses of the region: no free span is long enough.
    Addresses,
}

/// A failed operation on a device arena or a pinned pool.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// The arena's limit or the device's memory is exhausted, and releasing idle memory and calling
    /// shortage callbacks did not help.
    ///
    /// If the limit was the bound, `active` plus the granules that the block needs exceed it,
    /// wherever the block is placed. If addresses are so scarce that no free span can hold the
    /// block at a granule's start, a neighbour whose memory is being committed may cost one granule
    /// more: that is retried 16 times.
    #[error(
        "cannot allocate {requested} in arena {arena:?}: {}, {committed} committed, {live} live, \
         {holes} free between live blocks, largest free span at least \
         {largest_free}{}",
        bound_text(*bound, *limit),
        recoverable_text(*recoverable)
    )]
    OutOfMemory {
        /// The name of the arena, or of the pool. A boxed string, so that results are small.
        arena: Box<str>,
        /// The size of the requested block.
        requested: ByteSize,
        /// Bytes of live blocks.
        live: ByteSize,
        /// Bytes of granules that a block touches; all others could have been released.
        active: ByteSize,
        /// Bytes obtained from the driver.
        committed: ByteSize,
        /// The limit of committed memory, even if it was not the bound.
        limit: ByteSize,
        /// The bound that was reached.
        bound: Bound,
        /// Free bytes between live blocks, on granules that these keep. Upper bound of the memory
        /// that compaction can make idle.
        holes: ByteSize,
        /// The longest free span of committed memory: a lower bound that the largest 32 free spans
        /// of small and of large blocks of each region give, exact if there are no more.
        largest_free: ByteSize,
        /// Bytes of granules that [`DeviceArena::compact`](crate::DeviceArena::compact) would make
        /// idle with the default options, over both regions. A lower bound:
        /// the plan covers about the first hundred blocks of each kind per region. It is made only
        /// for errors that a caller gets; it takes about 4 ms, at most a 32nd of one core (more
        /// frequent errors repeat the last result), and holds a lock only to copy those blocks.
        /// Zero for a pool.
        recoverable: ByteSize,
    },
    /// The region's address space has no free span of the requested size.
    #[error(
        "no address range for {requested} in a region of {reserved}: {live} live, largest free \
         span {largest_span}, {compacted_span} or more after compaction; increase \
         `ArenaConfig::reserve` if it is not more than that, else addresses are scarce: reserve \
         less for other arenas, or use a backend that needs none, such as cuda_pool"
    )]
    OutOfAddresses {
        /// The size of the requested block.
        requested: ByteSize,
        /// The address space of the region.
        reserved: ByteSize,
        /// Bytes of live blocks in the region.
        live: ByteSize,
        /// The longest free span of addresses, with or without memory; up to a 16th less if more
        /// than 32 are about that long.
        largest_span: ByteSize,
        /// The longest free span that [`DeviceArena::compact`](crate::DeviceArena::compact) would
        /// make with [`CompactOptions::contiguous`](crate::CompactOptions::contiguous): a lower
        /// bound from a plan for about the first hundred large blocks of the region. Costs as much
        /// as `recoverable` of
        /// `OutOfMemory`; equals `largest_span` if errors come too fast for a plan.
        compacted_span: ByteSize,
    },
    /// The configured granule does not fit the driver.
    #[error(
        "invalid granule size {requested}: expected a power of two and a multiple of the driver's \
         {granularity}"
    )]
    Granule {
        /// The value of [`ArenaConfig::granule`](crate::ArenaConfig::granule).
        requested: ByteSize,
        /// The smallest unit that the driver commits.
        granularity: ByteSize,
    },
    /// A length that no region of this arena, or no process, could ever hold.
    #[error("cannot allocate {len} elements of {element}: expected at most {largest}")]
    TooLarge {
        /// The number of requested elements.
        len: usize,
        /// The size of one element.
        element: ByteSize,
        /// The address space of a region, or of a process.
        largest: ByteSize,
    },
    /// An alignment that is not a power of two, or larger than addresses are aligned to.
    #[error("unsupported alignment {requested}: expected a power of two of at most {largest}")]
    Alignment {
        /// The requested alignment, or that of the element type.
        requested: ByteSize,
        /// The granule; in a pinned pool, the smallest page.
        largest: ByteSize,
    },
    /// The driver does not support the operation.
    #[error("the {backend} driver does not support {what}")]
    Unsupported {
        /// The missing capability.
        what: &'static str,
        /// The driver's backend.
        backend: Backend,
    },
    /// A lease of one arena was used with a buffer of another.
    #[error("buffer of arena {buffer_of:?} used with a lease of arena {lease_of:?}")]
    ForeignLease {
        /// The buffer's arena.
        buffer_of: String,
        /// The lease's arena.
        lease_of: String,
    },
    /// A lane of one arena was used with a buffer or a lease of another.
    #[error("lane of arena {lane_of:?} used with a buffer or lease of arena {buffer_of:?}")]
    ForeignLane {
        /// The arena of the buffer or the lease.
        buffer_of: String,
        /// The lane's arena.
        lane_of: String,
    },
    /// A stream of another context than the arena's, or the null stream, which synchronizes with
    /// other streams.
    #[error("arena {arena:?} cannot use the stream: {what}")]
    ForeignStream {
        /// The arena.
        arena: String,
        /// The reason.
        what: &'static str,
    },
    /// The buffer was not allocated on a lane of a cudarc stream, which a view needs.
    #[error("buffer of arena {arena:?} has no cudarc stream: expected a buffer of a `cuda_lane`")]
    NoStream {
        /// The arena.
        arena: String,
    },
    /// cudarc panicked while creating a view, because it could not create an event.
    #[error("cudarc could not create a view: {message}")]
    View {
        /// The panic message.
        message: String,
    },
    /// Too many leases are held at once.
    #[error("more than {limit} leases held: some may have leaked")]
    TooManyLeases {
        /// The maximum number of leases.
        limit: u32,
    },
    /// The arena is in the wrong state: sleep needs an awake arena, wake a sleeping one.
    #[error(
        "arena {arena:?} is {}: a sleep expects it awake, a wake expects it asleep",
        state.name()
    )]
    State {
        /// The arena.
        arena: String,
        /// Its state.
        state: SleepState,
    },
    /// Leases were held until the drain timeout; one of them may have been forgotten.
    #[error(
        "arena {arena:?} cannot sleep: {leases} leases are held, without a pause for \
         {}; end them, or look for a leaked lease", short(*held_for)
    )]
    Leased {
        /// The arena.
        arena: String,
        /// The number of leases held.
        leases: u32,
        /// The time without a moment free of leases.
        held_for: Duration,
    },
    /// Buffers are exported to foreign code, which uses them without a lease.
    #[error("arena {arena:?} cannot sleep: {count} exported buffers, {bytes} in total")]
    Exported {
        /// The arena.
        arena: String,
        /// The number of exported buffers.
        count: u64,
        /// The bytes of their blocks.
        bytes: ByteSize,
    },
    /// A thread entered the arena while it was falling asleep, or memory was freed continuously.
    #[error("arena {arena:?} cannot sleep: a thread used it meanwhile; try again")]
    SleepCancelled {
        /// The arena.
        arena: String,
    },
    /// A stream is capturing a graph, and a wait for the device would invalidate the capture.
    #[error("arena {arena:?} cannot wait for the device: a stream is capturing a graph")]
    Capturing {
        /// The arena.
        arena: String,
    },
    /// The host budget has no room for the contents to keep.
    #[error("arena {arena:?} cannot sleep: cannot reserve {bytes} of host memory: {reason}")]
    HostBudget {
        /// The arena.
        arena: String,
        /// The host memory to reserve.
        bytes: ByteSize,
        /// The reason from the host budget.
        reason: String,
    },
    /// A thread could not be started.
    #[error("cannot start a thread: {message}")]
    Thread {
        /// The system's message.
        message: String,
    },
    /// A pool's low watermark is above its high watermark.
    #[error("low watermark {low} is above high watermark {high}")]
    Watermarks {
        /// Idle memory that stays after a release.
        low: ByteSize,
        /// Idle memory above which some is released.
        high: ByteSize,
    },
    /// The arena or the pool is closed.
    #[error("{arena:?} is closed")]
    Closed {
        /// The arena or the pool.
        arena: String,
    },
    /// The call needs an arena or a pool without live blocks.
    #[error("{arena:?} has {count} live blocks, {bytes} in total: expected none")]
    LiveBlocks {
        /// The arena or the pool.
        arena: String,
        /// The number of live blocks.
        count: u64,
        /// Their bytes.
        bytes: ByteSize,
    },
    /// The call needs an arena whose imported values are all dropped.
    #[error("arena {arena:?} still holds {count} imported values, {bytes} in total: expected none")]
    ImportedHeld {
        /// The arena.
        arena: String,
        /// The number of imported values held.
        count: u64,
        /// Bytes of all imported memory that is not released.
        bytes: ByteSize,
    },
    /// The memory cannot be imported. It still belongs to the caller, and the release function was
    /// not called.
    #[error("arena {arena:?} cannot import {size} at {at}: {reason}")]
    Import {
        /// Its first address.
        at: DeviceAddress,
        /// Its size; [`ByteSize::MAX`] if it overflows.
        size: ByteSize,
        /// The arena.
        arena: String,
        /// The reason, and what was expected.
        reason: String,
    },
    /// A raw block or an export of 0 bytes was requested. A buffer may be empty.
    #[error("block size is 0 B: expected at least 1 B")]
    ZeroSize,
    /// The address does not belong to the arena.
    #[error("address {at} does not belong to arena {arena:?}")]
    ForeignAddress {
        /// The address.
        at: DeviceAddress,
        /// The arena.
        arena: String,
    },
    /// The address is inside a block, not at its start.
    #[error("address {at} is inside the block of {size} at {block}: expected its start")]
    InteriorAddress {
        /// The address.
        at: DeviceAddress,
        /// The block's address.
        block: DeviceAddress,
        /// The block's size.
        size: ByteSize,
    },
    /// No raw block starts at the address: it was freed before, or belongs to a buffer.
    #[error("no live raw block at {at} (already freed, or never allocated)")]
    NotLive {
        /// The address.
        at: DeviceAddress,
    },
    /// A copy of the pinned buffer may not be complete: a wait or the recording of an event failed,
    /// or a cudarc view was forgotten. Its memory is neither reused nor freed.
    #[error("buffer of pool {pool:?} is quarantined: a copy may still use it")]
    Quarantined {
        /// The pool.
        pool: String,
    },
    /// A move lost the contents of a block: the copy failed, and undoing it failed too.
    #[error("contents of a block of {size} in region {} were lost in a move", region.name())]
    ContentsLost {
        /// The block's region.
        region: Region,
        /// The block's size.
        size: ByteSize,
    },
    /// The recording stopped; the arena goes on without it.
    #[error("recording stopped: {reason}")]
    Recording {
        /// The reason: the sink failed, panicked or is too slow, or the size limit is reached.
        reason: String,
    },
    /// The recorder already serves another arena.
    #[error("recorder is in use by arena {by:?}: expected one recorder per arena")]
    RecorderTaken {
        /// The recorder's arena.
        by: String,
    },
    /// A callback panicked.
    #[error("callback panicked: {message}")]
    Callback {
        /// The panic message.
        message: String,
    },
    /// The arena was opened before a fork and is used in the child.
    #[error(
        "the arena was opened before a fork and is used in the child: expected one opened there"
    )]
    Forked,
    /// A driver call failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// The result of an operation on an arena or a pool.
pub(crate) type Result<T, E = DeviceError> = std::result::Result<T, E>;

/// The error of an operation that took a value, or did a part of its work, with that value.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[error("{error}")]
#[expect(clippy::exhaustive_structs, reason = "an error and a value")]
pub struct DeviceErrorWith<T> {
    /// The error.
    pub error: DeviceError,
    /// The unchanged value, or the work that was done.
    pub value: Box<T>,
}

impl<T> From<DeviceErrorWith<T>> for DeviceError {
    fn from(failed: DeviceErrorWith<T>) -> Self {
        failed.error
    }
}

/// Returns the bound of an allocation as text.
fn bound_text(bound: Bound, limit: ByteSize) -> String {
    match bound {
        Bound::Limit => format!("limit {limit}"),
        Bound::Driver => "the driver is out of memory".to_owned(),
        Bound::Addresses => "no address range".to_owned(),
    }
}

/// Returns what compaction would recover at least; nothing if nothing is known.
fn recoverable_text(recoverable: ByteSize) -> String {
    if recoverable.is_zero() {
        return String::new();
    }
    format!(", at least {recoverable} recoverable by compaction")
}

impl DeviceError {
    /// Returns `true` if memory or addresses were exhausted: waiting or releasing memory may help.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            Self::OutOfMemory { .. }
                | Self::OutOfAddresses { .. }
                | Self::Driver(DriverError::OutOfMemory { .. } | DriverError::LockLimit { .. })
        )
    }
}

/// `CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED`: the driver's answer to a wait that would invalidate a
/// capture. Returned here without calling the driver.
pub(crate) const CAPTURES: u32 = 900;

/// Returns the error for a call that is not made because a stream captures a graph.
pub(crate) fn captures(call: &'static str) -> DriverError {
    DriverError::of_cuda(call, CAPTURES, ByteSize::ZERO)
}

/// Returns `true` for the error of [`captures`], or the driver's own error of that kind.
pub(crate) fn is_captures(error: &DriverError) -> bool {
    error.code() == Some(i64::from(CAPTURES))
}

/// Returns `true` for the driver's codes of errors that a capture causes: 900 to 908.
pub(crate) fn is_of_capture(code: i64) -> bool {
    (900..=908).contains(&code)
}

/// Returns `true` if a wait was not made because of a capture, or because there may be one.
pub(crate) fn is_unwaited(error: &DriverError) -> bool {
    is_captures(error) || matches!(error, DriverError::Background { .. })
}

// The arguments of callbacks when memory is short.

/// The argument of a shortage callback.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Shortage<'a> {
    /// The arena's name.
    pub arena: &'a str,
    /// The region of the allocation. Idle memory of either region helps; addresses only of this
    /// one.
    pub region: Region,
    /// The size of the block.
    pub requested: ByteSize,
    /// The resource that is short. If it is the device's memory, the arena has no idle memory.
    pub bound: Bound,
    /// Bytes above the limit after all idle memory is released: this many bytes of granules must
    /// become idle. Zero if the limit is not the bound.
    pub over: ByteSize,
}
