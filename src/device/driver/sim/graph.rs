//! Captures of streams into graphs, and their launch.
//!
//! A capture holds one stream: another stream that waits for an event of it, or it for one of
//! another, is an error here, while CUDA would let the other join. Addresses stay in the graph as
//! they were captured.
//!
//! Invariant: a stream is in `captures` from the begin of its capture to its end, spoiled or not.

use super::call::Call;
use super::fault::{HandleKind, SimError};
use super::model::{ILLEGAL_STATE, INVALIDATED, Model};
use super::work::Work;
use crate::bytes::ByteSize;
use crate::device::driver::DriverError;

/// What a stream has captured so far.
#[derive(Debug, Default)]
pub(super) struct Capture {
    /// Whether something forbidden was done meanwhile.
    pub(super) spoiled: bool,
    pub(super) work: Vec<Work>,
}

/// The name of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphHandle(pub(super) u64);

impl Model {
    pub(super) fn begin_capture(&mut self, stream: u64) -> Result<(), DriverError> {
        let call = Call::BeginCapture;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        if self.captures.contains_key(&stream) {
            return Err(self.fail(call, SimError::Code(ILLEGAL_STATE), ByteSize::ZERO));
        }
        self.captures.insert(stream, Capture::default());
        Ok(())
    }

    pub(super) fn end_capture(&mut self, stream: u64) -> Result<GraphHandle, DriverError> {
        let call = Call::EndCapture;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        let code = match self.captures.remove(&stream) {
            Some(capture) if !capture.spoiled => {
                return Ok(GraphHandle(self.graphs.insert(capture.work)));
            }
            Some(capture) => {
                self.drop_tasks(&capture.work);
                INVALIDATED
            }
            None => ILLEGAL_STATE,
        };
        Err(self.fail(call, SimError::Code(code), ByteSize::ZERO))
    }

    pub(super) fn graph_launch(&mut self, graph: u64, stream: u64) -> Result<(), DriverError> {
        let call = Call::GraphLaunch;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        let Some(work) = self.graphs.get_mut(graph) else {
            return Err(self.stale(call, HandleKind::Graph, graph));
        };
        let work = std::mem::take(work);
        let queued = work.iter().try_for_each(|work| self.queue_again(call, stream, *work));
        if let Some(place) = self.graphs.get_mut(graph) {
            *place = work;
        }
        queued
    }

    pub(super) fn graph_destroy(&mut self, graph: u64) -> Result<(), DriverError> {
        let call = Call::GraphDestroy;
        self.enter(call, ByteSize::ZERO)?;
        let Some(work) = self.graphs.remove(graph) else {
            return Err(self.stale(call, HandleKind::Graph, graph));
        };
        self.drop_tasks(&work);
        Ok(())
    }
}
