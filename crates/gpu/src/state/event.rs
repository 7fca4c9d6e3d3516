//! The events of an arena, in the order in which they took effect.
//!
//! The state adds an event to its queue, under its lock, after the change that the event describes
//! and after every clock reading of that change. The executor takes the events out when it releases
//! the lock. The state does not know its observers.
//!
//! Invariants: sequence numbers ascend without a gap; an arena without observers builds no event,
//! does not read the clock for one and has no memory for the queue.

use std::mem;
use std::num::NonZeroU64;

use crate::driver::{DeviceAddress, StreamHandle};
use crate::state::failure::Cause;
use crate::state::region::{AllocRequest, Placement};
use crate::state::region_index::BlockName;
use crate::types::compact::{CompactOptions, CompactReport};
use crate::types::error::DeviceError;
use crate::types::region::Region;
use crate::types::sleep::{Contents, SleepOptions, SleepReport, SleepState, WakeReport};
use lowtide_core::bytes::ByteSize;
use lowtide_core::clock::{Clock, Moment};
use lowtide_core::decay::DecayTime;

/// The number of events that the queue of an observed arena holds without allocating. Only a reset
/// of raw blocks or a transition of sleep adds more in one hold of the lock.
const EVENTS: usize = 64;

/// The number of a lane of an arena, from 1.
pub(crate) type LaneNumber = NonZeroU64;

/// The kind of a request for a block.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlockKind {
    /// A buffer, by [`DeviceArena::alloc`](crate::DeviceArena::alloc) or on a lane.
    #[default]
    Buffer,
    /// A raw block, by [`DeviceArena::alloc_raw`](crate::DeviceArena::alloc_raw).
    Raw,
    /// A reservation, by [`DeviceArena::reserve`](crate::DeviceArena::reserve).
    Reserve,
}

/// The work that must complete before the memory of a freed block is reused.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum After {
    /// The work of the lanes that used it.
    Lanes,
    /// All work of the device, because the lanes that used it are unknown.
    All,
}

/// The source of a request for a block.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Origin {
    /// `None` for the new block of a resize.
    pub(crate) kind: Option<BlockKind>,
    /// The lane that the request is for.
    pub(crate) lane: Option<LaneNumber>,
}

impl Origin {
    pub(crate) const BUFFER: Self = Self { kind: Some(BlockKind::Buffer), lane: None };
    pub(crate) const RAW: Self = Self { kind: Some(BlockKind::Raw), lane: None };
    pub(crate) const RESERVE: Self = Self { kind: Some(BlockKind::Reserve), lane: None };
    pub(crate) const RESIZE: Self = Self { kind: None, lane: None };
}

/// A request that failed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FailedRequest {
    /// A block.
    Alloc(Region, AllocRequest),
    /// A resize of a block to this many bytes.
    Resize(Region, BlockName, u64),
}

/// The figures of a request for which there was no memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct MemoryShortage {
    /// Bytes of the block.
    pub(crate) requested: ByteSize,
    /// The bytes left below the limit; zero without a limit.
    pub(crate) headroom: ByteSize,
}

/// The reason that a block was freed.
#[derive(Clone, Copy, Debug)]
pub(crate) enum FreeCause {
    /// The owner freed the block.
    Owner(After),
    /// All raw blocks were freed: an [`ArenaEvent::RawReset`] follows.
    Reset,
    /// A resize copied the contents to this block.
    MovedTo(Placement),
}

/// The reason that idle memory was released.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ReleaseCause {
    /// A decay pass for this moment.
    Decay { now: Moment },
    /// A trim to this many committed bytes.
    Trim { keep: ByteSize },
    /// A shrink.
    Shrink,
    /// The arena was closed.
    Close,
}

/// A place in a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Location {
    /// The offset from the region's start.
    pub(crate) offset: ByteSize,
    pub(crate) address: DeviceAddress,
}

/// An event of an arena.
#[derive(Clone, Debug)]
pub(crate) enum ArenaEvent {
    /// A block was allocated.
    Allocated { region: Region, request: AllocRequest, placed: Placement },
    /// A request failed.
    AllocFailed { request: FailedRequest, cause: Cause, shortage: Option<MemoryShortage> },
    /// A block was requested that is larger than its region.
    TooLarge { region: Region, request: AllocRequest },
    /// A block was freed.
    Freed { region: Region, placed: Placement, cause: FreeCause },
    /// A block was resized in place.
    Resized { region: Region, before: Placement, after: Placement },
    /// A compaction moved a block.
    Moved { region: Region, id: BlockName, from: Location, to: Location, size: ByteSize },
    /// A lane started to use a block.
    Used { region: Region, id: BlockName, lane: LaneNumber },
    /// A block was pinned to its place.
    Pinned { region: Region, id: BlockName },
    /// A pin was dropped.
    Unpinned { region: Region, id: BlockName },
    /// The treatment of a block's contents in a sleep was set.
    ContentsSet { region: Region, id: BlockName, contents: Option<Contents> },
    /// All raw blocks were freed.
    RawReset { blocks: u64, bytes: ByteSize },
    /// Memory was committed.
    Committed { at: DeviceAddress, size: ByteSize },
    /// Memory was decommitted.
    Decommitted { at: DeviceAddress, size: ByteSize },
    /// Memory was moved from idle granules to others.
    Remapped { from: DeviceAddress, to: DeviceAddress, size: ByteSize },
    /// Memory became idle. It ages from the moment of this event.
    Idle,
    /// Idle memory was released, or an attempt to do so ended.
    Released { cause: ReleaseCause, released: ByteSize, done: bool },
    /// A lane was created.
    LaneOpened { lane: LaneNumber, stream: StreamHandle },
    /// A lane and everything that used it were dropped.
    LaneEnded { lane: LaneNumber, stream: StreamHandle },
    /// A run on a lane ended.
    RunEnded { lane: LaneNumber, done: bool },
    /// The limit was set.
    LimitSet { limit: ByteSize },
    /// The decay time was set.
    DecayTimeSet { time: DecayTime },
    /// A compaction ended.
    Compacted { options: CompactOptions, report: CompactReport },
    /// The arena fell asleep.
    Asleep { options: SleepOptions, report: SleepReport },
    /// The arena did not fall asleep, or only in part, and is in this state now.
    SleepFailed { options: SleepOptions, error: DeviceError, state: SleepState },
    /// The arena woke up.
    Woke { report: WakeReport },
    /// The arena is still asleep after an attempt to wake it.
    WakeFailed,
    /// A close ended. If it has no error, the arena is closed and its memory released.
    CloseEnded { error: Option<DeviceError> },
}

/// An event with its position.
#[derive(Clone, Debug)]
pub(crate) struct SequencedEvent {
    /// The number of earlier events of the arena.
    pub(crate) sequence: u64,
    /// The moment at which it took effect.
    pub(crate) at: Moment,
    pub(crate) event: ArenaEvent,
}

/// Events that the executor has not taken yet.
#[derive(Debug, Default)]
pub(crate) struct EventQueue {
    is_observed: bool,
    next: u64,
    events: Vec<SequencedEvent>,
}

impl EventQueue {
    /// Creates a buffer for a queue, or for the one that the queue is exchanged with.
    pub(crate) fn buffer() -> Vec<SequencedEvent> {
        Vec::with_capacity(EVENTS)
    }

    /// Creates the queue of an observed arena. The default queue is that of an arena without
    /// observers, which accepts no events.
    pub(crate) fn observed() -> Self {
        Self { is_observed: true, next: 0, events: Self::buffer() }
    }

    /// Returns `true` if the queue accepts events.
    #[inline]
    pub(crate) const fn is_observed(&self) -> bool {
        self.is_observed
    }

    /// Adds an event that took effect now.
    #[inline]
    pub(crate) fn push(&mut self, clock: &dyn Clock, event: impl FnOnce() -> ArenaEvent) {
        if self.is_observed {
            self.add(clock.now(), event());
        }
    }

    /// Adds an event that took effect at a moment that was read during this hold of the lock.
    #[inline]
    pub(crate) fn push_at(&mut self, at: Moment, event: impl FnOnce() -> ArenaEvent) {
        if self.is_observed {
            self.add(at, event());
        }
    }

    #[cold]
    fn add(&mut self, at: Moment, event: ArenaEvent) {
        self.events.push(SequencedEvent { sequence: self.next, at, event });
        self.next += 1;
    }

    /// Returns `true` if there are no events to take.
    pub(crate) const fn is_empty(&self) -> bool {
        self.events.is_empty()
    }

    /// Moves the events to a buffer, in exchange for its memory.
    pub(crate) fn take(&mut self, buffer: &mut Vec<SequencedEvent>) {
        buffer.clear();
        mem::swap(&mut self.events, buffer);
    }

    /// Returns the bytes of both buffers.
    pub(crate) const fn metadata(&self) -> usize {
        2 * self.events.capacity() * size_of::<SequencedEvent>()
    }
}
