//! Driver calls as values.
//!
//! An operation asks for a [`Call`], the executor performs the call with the lock released, and the
//! operation gets the answer. The engine builds a call only after it has marked the ranges of the
//! call in the state: the marks are the precondition of the driver's unsafe calls. A call cannot be
//! copied, and is consumed when it is performed.
//!
//! Invariant: until the answer of a call is recorded, its marks keep other operations from its
//! ranges; if no answer is recorded, the ranges stay marked.
#![expect(unsafe_code, reason = "the calls of drivers that take memory away are unsafe")]

use crate::driver::{
    DeviceAddress, Driver, DriverError, EventHandle, HostStore, StoreSpan, StreamHandle,
};
use crate::state::arena::ArenaState;
use lowtide_core::bytes::ByteSize;

/// The number of a call of an arena. No number is used twice.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct CallId(u64);

/// A driver call to make.
#[derive(Debug)]
pub(crate) struct Call {
    id: CallId,
    kind: CallKind,
}

/// The kind of a call, with the reason that the call is sound.
#[derive(Debug)]
pub(super) enum CallKind {
    /// Bare granules of a reservation, marked as committing, or as leaving by the same operation.
    Commit {
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// Committed granules of a reservation, whole handles of this size, marked as leaving, or as
    /// committing by the same operation: every use of them is complete.
    Decommit {
        at: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// Granules that are marked as leaving, whole handles of this size, and bare ones that are
    /// marked as arriving.
    Remap {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        handle: ByteSize,
    },
    /// A segment for offsets that are marked as committing.
    CreateSegment {
        size: ByteSize,
    },
    /// A whole segment, marked as leaving: every use of it is complete.
    DestroySegment {
        at: DeviceAddress,
        size: ByteSize,
    },
    Trim,
    /// Two committed ranges that do not overlap. The operation holds both blocks, and no work uses
    /// them.
    Copy {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
    },
    /// Two committed ranges that do not overlap. The operation holds both blocks until it has seen
    /// the end of the copy; no work uses them, except copies queued earlier on the same stream. The
    /// stream is the arena's.
    QueueCopy {
        from: DeviceAddress,
        to: DeviceAddress,
        size: ByteSize,
        stream: StreamHandle,
    },
    /// A stream that exists until the answer is recorded.
    IsCapturing {
        stream: StreamHandle,
    },
    CreateStream,
    SynchronizeStream {
        stream: StreamHandle,
    },
    CreateEvent,
    /// An event of the state that no other operation uses, and a stream that exists until the
    /// answer is recorded.
    RecordEvent {
        event: EventHandle,
        stream: StreamHandle,
    },
    /// An event of the state that is in use until the answer is recorded.
    QueryEvent {
        event: EventHandle,
    },
    WaitForEvent {
        event: EventHandle,
    },
    StreamWaits {
        stream: StreamHandle,
        event: EventHandle,
    },
    SynchronizeContext,
    CreateStore {
        size: ByteSize,
    },
    /// A store that is no longer in the state, with no copy in progress.
    DestroyStore {
        store: HostStore,
    },
    /// Committed granules that are marked as leaving, and a store that the operation holds; the
    /// stream is the arena's.
    Offload {
        at: DeviceAddress,
        to: StoreSpan,
        stream: StreamHandle,
    },
    /// Committed granules of an arena that is not awake, and a filled store that is in the state
    /// or held by the operation; the stream is the arena's.
    Restore {
        from: StoreSpan,
        at: DeviceAddress,
        stream: StreamHandle,
    },
}

/// The result of a call that succeeded.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Answer {
    Done,
    Bool(bool),
    Address(DeviceAddress),
    Stream(StreamHandle),
    Event(EventHandle),
    Store(HostStore),
}

/// A call that was performed.
#[derive(Debug)]
#[must_use = "an answer that is not recorded leaves the ranges of its call unusable"]
pub(crate) struct Completion {
    pub(super) id: CallId,
    pub(super) answer: Result<Answer, DriverError>,
}

impl ArenaState {
    /// Builds a call. The ranges of the call are already marked.
    pub(super) fn new_call(&mut self, kind: CallKind) -> Call {
        self.calls += 1;
        Call { id: CallId(self.calls), kind }
    }
}

impl Call {
    pub(super) const fn id(&self) -> CallId {
        self.id
    }

    /// Makes the call, once. `driver` is the driver of the state that built the call.
    pub(crate) fn perform(self, driver: &dyn Driver) -> Completion {
        let Self { id, kind } = self;
        Completion { id, answer: perform(kind, driver) }
    }
}

fn perform(kind: CallKind, driver: &dyn Driver) -> Result<Answer, DriverError> {
    let done = |()| Answer::Done;
    match kind {
        CallKind::CreateSegment { size } => driver.segment_create(size).map(Answer::Address),
        CallKind::Trim => driver.trim().map(done),
        CallKind::CreateStream => driver.stream_create().map(Answer::Stream),
        CallKind::CreateEvent => driver.event_create().map(Answer::Event),
        CallKind::SynchronizeContext => driver.synchronize().map(done),
        CallKind::CreateStore { size } => driver.host_store_create(size).map(Answer::Store),
        CallKind::Commit { at, size, handle } => {
            // SAFETY: the ranges are marked by the operation, and bare; see `CallKind`.
            unsafe { driver.commit(at, size, handle) }.map(done)
        }
        CallKind::Decommit { at, size, handle } => {
            // SAFETY: the ranges are marked by the operation, and every use of them is complete.
            unsafe { driver.decommit(at, size, handle) }.map(done)
        }
        CallKind::Remap { from, to, size, handle } => {
            // SAFETY: the source is marked as leaving and unused, the target as arriving.
            unsafe { driver.remap(from, to, size, handle) }.map(done)
        }
        CallKind::DestroySegment { at, size } => {
            // SAFETY: a whole segment that is marked as leaving and unused.
            unsafe { driver.segment_destroy(at, size) }.map(done)
        }
        // SAFETY: two committed ranges that the operation holds, and that no work uses.
        CallKind::Copy { from, to, size } => unsafe { driver.copy(from, to, size) }.map(done),
        CallKind::QueueCopy { from, to, size, stream } => {
            // SAFETY: two committed ranges that the operation holds until the copy is complete.
            // Only earlier copies on the same stream, the arena's own, use them.
            unsafe { driver.copy_async(from, to, size, stream) }.map(done)
        }
        CallKind::IsCapturing { stream } => {
            // SAFETY: the stream exists until the answer is recorded.
            unsafe { driver.is_capturing(stream) }.map(Answer::Bool)
        }
        CallKind::SynchronizeStream { stream } => {
            // SAFETY: as above.
            unsafe { driver.stream_synchronize(stream) }.map(done)
        }
        CallKind::RecordEvent { event, stream } => {
            // SAFETY: the event is the state's, and the stream exists until the answer is recorded.
            unsafe { driver.event_record(event, stream) }.map(done)
        }
        // SAFETY: the event is the state's, which destroys events at its end only.
        CallKind::QueryEvent { event } => unsafe { driver.event_query(event) }.map(Answer::Bool),
        // SAFETY: as above.
        CallKind::WaitForEvent { event } => unsafe { driver.event_synchronize(event) }.map(done),
        CallKind::StreamWaits { stream, event } => {
            // SAFETY: the event is the state's, and the stream exists until the answer is recorded.
            unsafe { driver.stream_wait_event(stream, event) }.map(done)
        }
        // SAFETY: the store is no longer in the state, and no copy of it is in progress.
        CallKind::DestroyStore { store } => unsafe { driver.host_store_destroy(store) }.map(done),
        CallKind::Offload { at, to, stream } => {
            // SAFETY: committed granules that stay marked until the copies are complete, a store
            // that the operation holds, and the arena's own stream.
            unsafe { driver.offload(at, to, stream) }.map(done)
        }
        CallKind::Restore { from, at, stream } => {
            // SAFETY: as above; no lease is granted before the copies are complete.
            unsafe { driver.restore(from, at, stream) }.map(done)
        }
    }
}
