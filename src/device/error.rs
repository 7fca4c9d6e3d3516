//! What can go wrong in a device arena or a pool, with the numbers that explain it.
//!
//! Raised only when certain: an `OutOfMemory` comes after the arena's own idle memory was given
//! back. It retries nothing and logs nothing.
//!
//! Invariant: an operation that returns an error left the arena as it was, but for idle memory
//! that it gave back or committed.

use std::time::Duration;

use thiserror::Error;

use super::driver::{Backend, DeviceAddress, DriverError};
use super::interop::ImportError;
use super::region::Region;
use super::sleep::ArenaState;
use crate::bytes::ByteSize;

/// What was in the way of more memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Bound {
    /// The limit of the arena or the pool.
    Limit,
    /// The driver, for the device or the host behind it, had no more to give.
    Driver,
}

/// Why an operation on a device arena or on a pinned pool failed.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// The limit of the arena, or the memory of the device, does not allow it; neither the arena's
    /// own idle memory nor what callbacks gave back did help.
    ///
    /// Where the limit was in the way, `active` and the granules that the block needs are more than
    /// it, wherever the block would be placed. Where addresses are so scarce that no free span has
    /// the block at a granule's start, a neighbour that waits for its memory may cost one granule
    /// more: that is tried again 16 times.
    #[error(
        "no room for {requested}: {committed} committed{}, {live} live; {holes} are free between \
         live blocks, the longest free span with memory has {largest_free}, and a compaction would \
         make {recoverable} idle or more",
        beside(*bound, *limit)
    )]
    OutOfMemory {
        /// The size of the block asked for.
        requested: ByteSize,
        /// Bytes of live blocks.
        live: ByteSize,
        /// Bytes of granules that a block touches; all others could have been given back.
        active: ByteSize,
        /// Bytes obtained from the driver.
        committed: ByteSize,
        /// The most that may be committed, whether or not that was in the way.
        limit: ByteSize,
        /// What was in the way.
        bound: Bound,
        /// Free bytes between live blocks, on granules that those keep. No compaction makes more
        /// than these idle.
        holes: ByteSize,
        /// The longest free span with memory behind it.
        largest_free: ByteSize,
        /// Bytes of granules that [`DeviceArena::compact`](super::DeviceArena::compact) would make
        /// idle with [`Goal::Granules`](super::Goal::Granules), in both regions together, as far as
        /// a plan for the first hundred or so blocks of each kind in each region finds: there may
        /// be more. Planned for errors that a caller gets and for no others, with no lock held but
        /// to copy those blocks; about 4 ms, and no more than a 32nd of a core: where refusals come
        /// faster it is what the last plan found. Zero for a pool.
        recoverable: ByteSize,
    },
    /// The region's address space has no free span of that size left.
    #[error(
        "no addresses for {requested} in a region of {reserved}: {live} live, the largest free \
         span has {largest_span}, and {compacted_span} or more after a compaction; reserve more \
         per region"
    )]
    OutOfAddresses {
        /// The size of the block asked for.
        requested: ByteSize,
        /// The address space of the region.
        reserved: ByteSize,
        /// Bytes of live blocks in the region.
        live: ByteSize,
        /// The longest free span of addresses, backed or not.
        largest_span: ByteSize,
        /// The longest that [`DeviceArena::compact`](super::DeviceArena::compact) would make for
        /// the block with [`Goal::Contiguous`](super::Goal::Contiguous), as far as a plan for the
        /// first hundred or so large blocks of the region finds; it costs what that of
        /// `OutOfMemory` does, and is `largest_span` where refusals come too fast for a plan.
        compacted_span: ByteSize,
    },
    /// A granule that no arena over this driver can have.
    #[error(
        "a granule of {requested}: expected a power of two, and a multiple of the driver's \
         {granularity}"
    )]
    Granule {
        /// What [`ArenaConfig::granule`](super::ArenaConfig::granule) asks for.
        requested: ByteSize,
        /// The smallest unit that the driver commits.
        granularity: ByteSize,
    },
    /// A length that no region of this arena, or no memory at all, could ever hold.
    #[error("{len} elements of {element} can never fit: the most is {largest}")]
    TooLarge {
        /// The number of elements asked for.
        len: usize,
        /// The size of one.
        element: ByteSize,
        /// The address space of a region, or of a process.
        largest: ByteSize,
    },
    /// An alignment that is no power of two, or beyond what addresses are known to be aligned to.
    #[error("an alignment of {requested}: expected a power of two of at most {largest}")]
    Alignment {
        /// The alignment that was asked for, or that of the element type.
        requested: ByteSize,
        /// The granule; in a pinned pool, the smallest page.
        largest: ByteSize,
    },
    /// The driver in use cannot do it.
    #[error("the {backend} driver does not offer {what}")]
    Unsupported {
        /// The capability that is missing.
        what: &'static str,
        /// The driver in use.
        backend: Backend,
    },
    /// A lease of one arena was shown for a buffer of another.
    #[error("the buffer is of arena {buffer_of:?}, the lease of arena {lease_of:?}")]
    ForeignLease {
        /// The arena that the buffer is in.
        buffer_of: String,
        /// The arena that the lease keeps awake.
        lease_of: String,
    },
    /// A lane of one arena was named for a buffer or a lease of another.
    #[error("the lane is of arena {lane_of:?}, what it was named for of arena {buffer_of:?}")]
    ForeignLane {
        /// The arena that the buffer or the lease is of.
        buffer_of: String,
        /// The arena that the lane is of.
        lane_of: String,
    },
    /// A stream of another context than the arena's, or the null stream, which orders itself with
    /// those of others.
    #[error("the stream is not one that arena {arena:?} can use: {what}")]
    ForeignStream {
        /// The arena.
        arena: String,
        /// What is wrong with it.
        what: &'static str,
    },
    /// The buffer was not taken on a lane of a cudarc stream, which a view needs.
    #[error("a buffer of arena {arena:?} has no stream of cudarc: take it on a `cuda_lane`")]
    NoStream {
        /// The arena.
        arena: String,
    },
    /// cudarc panicked when it was to make a view, for want of an event.
    #[error("cudarc made no view: {message}")]
    View {
        /// What it said.
        message: String,
    },
    /// More leases at once than are counted.
    #[error("more than {limit} leases at once: some are leaked")]
    TooManyLeases {
        /// The most that are counted.
        limit: u32,
    },
    /// The arena is not in the state that the call needs: awake to fall asleep, asleep to wake.
    #[error(
        "arena {arena:?} is {}: only one that is awake falls asleep, and one that is asleep wakes",
        state.name()
    )]
    State {
        /// The arena.
        arena: String,
        /// Its state.
        state: ArenaState,
    },
    /// Leases were held for longer than was to be waited for them; one of them may be forgotten.
    #[error(
        "arena {arena:?} stays awake: leases held: {leases}, one or more of them at any time in \
         the last {held_for:?}"
    )]
    Leased {
        /// The arena.
        arena: String,
        /// How many leases are held.
        leases: u32,
        /// For how long there was no moment without a lease.
        held_for: Duration,
    },
    /// Buffers are lent to foreign code, which asks for no lease before it uses them.
    #[error("arena {arena:?} stays awake: lent buffers: {count} of {bytes} together")]
    Exported {
        /// The arena.
        arena: String,
        /// How many are lent.
        count: u64,
        /// The bytes of their blocks.
        bytes: ByteSize,
    },
    /// Somebody entered while the arena was about to fall asleep, or memory was freed all the time.
    #[error("arena {arena:?} stays awake: it is used")]
    SleepCancelled {
        /// The arena.
        arena: String,
    },
    /// A stream captures a graph: to wait for the device would spoil it.
    #[error("arena {arena:?} stays as it is: a stream captures a graph")]
    Capturing {
        /// The arena.
        arena: String,
    },
    /// The host's budget has no room for the contents that were to be kept.
    #[error("arena {arena:?} stays awake: no room on the host for {bytes}: {reason}")]
    HostBudget {
        /// The arena.
        arena: String,
        /// The host memory that was to be booked.
        bytes: ByteSize,
        /// Why it was not.
        reason: String,
    },
    /// No thread could be started.
    #[error("a thread could not be started: {message}")]
    Thread {
        /// What the system said.
        message: String,
    },
    /// A pool's low watermark is above its high one.
    #[error("a low watermark of {low} above a high one of {high}")]
    Watermarks {
        /// What is to stay idle at most, once memory is given back.
        low: ByteSize,
        /// What may be idle before any is given back.
        high: ByteSize,
    },
    /// More segments in one pool than are kept.
    #[error("no room for {requested}: the pool has {limit} segments; make them larger")]
    TooManySegments {
        /// The size of the block asked for.
        requested: ByteSize,
        /// The most that are kept.
        limit: usize,
    },
    /// The arena or the pool was closed.
    #[error("{arena:?} was closed")]
    Closed {
        /// The arena, or the pool.
        arena: String,
    },
    /// Blocks are live that the call would have taken away.
    #[error("{arena:?} has live blocks: {count} of {bytes} together")]
    LiveBlocks {
        /// The arena, or the pool.
        arena: String,
        /// How many blocks.
        count: u64,
        /// Their bytes.
        bytes: ByteSize,
    },
    /// Adopted values are held that the call would have left behind.
    #[error("arena {arena:?} has adopted values: {count} of {bytes} together are held")]
    AdoptedHeld {
        /// The arena.
        arena: String,
        /// How many are held.
        count: u64,
        /// Bytes of all that was adopted and not released.
        bytes: ByteSize,
    },
    /// Memory that cannot be adopted. It is its owner's still, and its release function was not
    /// called.
    #[error("{size} at {at} cannot be adopted by arena {arena:?}: {why}")]
    ImportError {
        /// Where it begins.
        at: DeviceAddress,
        /// Its size; [`ByteSize::MAX`] where it is beyond all sizes.
        size: ByteSize,
        /// The arena.
        arena: String,
        /// What is wrong with it.
        why: ImportError,
    },
    /// No bytes were asked for, where a block must have some: one had by address. A buffer may be
    /// empty.
    #[error("a block of 0 B was asked for: at least 1 B is needed")]
    ZeroSize,
    /// An address that is of no arena, or of another one.
    #[error("address {at} is none of arena {arena:?}")]
    ForeignAddress {
        /// The address.
        at: DeviceAddress,
        /// The arena that was asked.
        arena: String,
    },
    /// An address in a block, where that of its beginning is needed.
    #[error("address {at} lies in the block of {size} at {block}, not at its beginning")]
    InteriorAddress {
        /// The address.
        at: DeviceAddress,
        /// Where the block begins.
        block: DeviceAddress,
        /// How large it is.
        size: ByteSize,
    },
    /// No block that was had by address begins there: it was freed before, or is a buffer's.
    #[error("no block that was had by address is live at {at}: it was freed before, or never was")]
    NotLive {
        /// The address.
        at: DeviceAddress,
    },
    /// It cannot be shown that no copy uses the pinned buffer: a wait or the record of an event
    /// failed, or a view for cudarc was forgotten. Its memory is neither reused nor freed.
    #[error("a buffer of pool {pool:?} is quarantined: a copy of it may not be complete")]
    Quarantined {
        /// The pool.
        pool: String,
    },
    /// The contents of a block were lost in a move: the copy failed, and so did its undoing.
    #[error("the contents of a block of {size} were lost in a move; region: {}", region.name())]
    ContentsLost {
        /// The region that it is in.
        region: Region,
        /// The size of the block.
        size: ByteSize,
    },
    /// The recorder was given to another arena before.
    #[error("the recorder writes for arena {by:?}: one arena for each recorder")]
    RecorderTaken {
        /// That arena.
        by: String,
    },
    /// A callback panicked.
    #[error("a callback panicked: {message}")]
    Callback {
        /// What it said.
        message: String,
    },
    /// The process is a fork of the one that opened the arena.
    #[error("it was opened before a fork; device memory and pools do not outlive one")]
    Forked,
    /// The driver failed.
    #[error(transparent)]
    Driver(#[from] DriverError),
}

/// Under what, or beside what, so much is committed.
fn beside(bound: Bound, limit: ByteSize) -> String {
    match bound {
        Bound::Limit => format!(" under a limit of {limit}"),
        Bound::Driver => ", and the driver has no more".to_owned(),
    }
}

impl DeviceError {
    /// Whether there was no room: waiting, or giving something back, may help.
    #[must_use]
    pub const fn is_out_of_memory(&self) -> bool {
        matches!(
            self,
            Self::OutOfMemory { .. }
                | Self::OutOfAddresses { .. }
                | Self::TooManySegments { .. }
                | Self::Driver(DriverError::OutOfMemory { .. } | DriverError::LockLimit { .. })
        )
    }
}
