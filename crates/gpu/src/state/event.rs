//! The events of an arena, in the order in which they took effect.
//!
//! The state passes an event to its recorder, under its lock, after the change that the event
//! describes: the event's name, and its fields as keys of a JSON object. `docs/RECORDING.md` lists
//! them.
//!
//! Invariant: an arena without a recorder builds no event and does not read the clock for one.

use std::num::NonZeroU64;
use std::sync::Arc;

use crate::record::{Line, Recorder};
use crate::state::region::AllocRequest;
use lowtide_core::clock::Clock;

/// The number of a lane of an arena, from 1.
pub(crate) type LaneNumber = NonZeroU64;

lowtide_core::named_enum! {
    /// The kind of a request for a block.
    #[derive(Clone, Copy, Debug)]
    pub(crate) enum RequestKind {
        Buffer = "buffer",
        Raw = "raw",
        Reserve = "reserve",
        /// The new block of a resize.
        Resize = "resize",
    }
}

/// The source of a request for a block. Small, because each request carries it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RequestOrigin {
    pub(crate) kind: RequestKind,
    /// The lane that the request is for.
    pub(crate) lane: Option<LaneNumber>,
}

impl RequestOrigin {
    pub(crate) const BUFFER: Self = Self { kind: RequestKind::Buffer, lane: None };
    pub(crate) const RAW: Self = Self { kind: RequestKind::Raw, lane: None };
    pub(crate) const RESERVE: Self = Self { kind: RequestKind::Reserve, lane: None };
    pub(crate) const RESIZE: Self = Self { kind: RequestKind::Resize, lane: None };
}

/// The clock of an arena, and the recorder of its events, if it has one.
#[derive(Debug)]
pub(crate) struct EventLog {
    pub(crate) clock: Arc<dyn Clock>,
    pub(crate) recorder: Option<Recorder>,
}

impl EventLog {
    /// Records an event that took effect now.
    #[inline]
    pub(crate) fn push(
        &self,
        name: &'static str,
        fields: impl for<'a, 'b> FnOnce(&'a mut Line<'b>) -> &'a mut Line<'b>,
    ) {
        if let Some(recorder) = &self.recorder {
            recorder.write(&*self.clock, name, fields);
        }
    }
}

/// Adds a request for a block to its line.
pub(crate) fn requested<'a, 'b>(line: &'a mut Line<'b>, wanted: &AllocRequest) -> &'a mut Line<'b> {
    let RequestOrigin { kind, lane } = wanted.origin;
    line.text("kind", kind.name())
        .text("region", wanted.region.name())
        .number("bytes", wanted.requested)
        .number("align", wanted.align)
        .number("lane", lane.map(NonZeroU64::get))
}
