//! Streams, events, waits and captures, call by call.
//!
//! The legacy default stream comes after all work of streams that block, and they after its; a
//! stream created as non-blocking is ordered with nothing.
//!
//! Invariant: as in [`super`]; who waits with success has seen all before it.

use super::super::call::Call;
use super::super::fault::{HandleKind, SimError};
use super::super::graph::CaptureMode;
use super::super::model::{Marked, UNSUPPORTED};
use super::{Answer, Raw, code};
use crate::bytes::ByteSize;

#[expect(clippy::missing_errors_doc, reason = "each answers with the codes of cuda.h")]
impl Raw<'_> {
    /// The legacy default stream; 906 while a stream that is ordered with it captures.
    pub fn legacy_stream(&self) -> Answer<u64> {
        self.model().legacy_stream(Call::Launch).map_err(code)
    }

    /// The default stream of one thread, made for it; ordered with the legacy one.
    #[must_use]
    pub fn thread_stream(&self) -> u64 {
        let mut model = self.model();
        let stream = model.implicit_stream();
        model.blocking.insert(stream);
        stream
    }

    /// `cuStreamCreate`; a blocking one is ordered with the legacy default stream.
    pub fn stream_create(&self, blocking: bool) -> Answer<u64> {
        let mut model = self.model();
        let stream = model.stream_create().map_err(code)?.get();
        if blocking {
            model.blocking.insert(stream);
        }
        Ok(stream)
    }

    /// `cuStreamDestroy`: returns at once, its work is done all the same.
    pub fn stream_destroy(&self, stream: u64) -> Answer {
        self.model().stream_destroy(stream).map_err(code)
    }

    /// `cuStreamSynchronize`.
    pub fn stream_synchronize(&self, stream: u64) -> Answer {
        let mut model = self.model();
        model.stream_synchronize(stream).map_err(code)?;
        model.pools_settle();
        Ok(())
    }

    /// `cuStreamQuery`: whether its work is done.
    pub fn stream_query(&self, stream: u64) -> Answer<bool> {
        let mut model = self.model();
        let call = Call::StreamQuery;
        model.enter(call, ByteSize::ZERO).map_err(code)?;
        model.live_stream(call, stream).map_err(code)?;
        model.forbid_of_stream(call, stream, UNSUPPORTED).map_err(code)?;
        let end = model.queues.end(stream);
        let done = model.queues.is_done(end);
        if done {
            model.observe(end);
        }
        Ok(done)
    }

    /// `cuStreamWaitEvent`.
    pub fn stream_wait_event(&self, stream: u64, event: u64) -> Answer {
        self.model().stream_wait_event(stream, event).map_err(code)
    }

    /// `cuStreamIsCapturing`: 0, 1, or 2 where the capture is spoiled.
    pub fn stream_capture_status(&self, stream: u64) -> Answer<u32> {
        let mut model = self.model();
        model.is_capturing(stream).map_err(code)?;
        Ok(model.captures.get(&stream).map_or(0, |capture| 1 + u32::from(capture.spoiled)))
    }

    /// `cuCtxSynchronize`.
    pub fn synchronize(&self) -> Answer {
        let mut model = self.model();
        model.synchronize().map_err(code)?;
        model.pools_settle();
        Ok(())
    }

    /// `cuEventCreate`.
    pub fn event_create(&self) -> Answer<u64> {
        self.model().event_create().map_err(code)
    }

    /// `cuEventDestroy`.
    pub fn event_destroy(&self, event: u64) -> Answer {
        self.model().event_destroy(event).map_err(code)
    }

    /// `cuEventRecord`.
    pub fn event_record(&self, event: u64, stream: u64) -> Answer {
        self.model().event_record(event, stream).map_err(code)
    }

    /// `cuEventQuery`: whether what it marks is done.
    pub fn event_query(&self, event: u64) -> Answer<bool> {
        self.model().event_query(event).map_err(code)
    }

    /// `cuEventSynchronize`.
    pub fn event_synchronize(&self, event: u64) -> Answer {
        let mut model = self.model();
        model.event_synchronize(event).map_err(code)?;
        model.pools_settle();
        Ok(())
    }

    /// Whether the event was ever recorded: what asks for its time needs that.
    pub fn event_is_recorded(&self, event: u64) -> Answer<bool> {
        let mut model = self.model();
        let marked = model.marked(Call::EventQuery, event).map_err(code)?;
        Ok(marked != Marked::Nothing)
    }

    /// `cuStreamBeginCapture`.
    pub fn begin_capture(&self, stream: u64, mode: CaptureMode) -> Answer {
        self.model().begin_capture(stream, mode).map_err(code)
    }

    /// `cuStreamEndCapture`: a graph.
    pub fn end_capture(&self, stream: u64) -> Answer<u64> {
        self.model().end_capture(stream).map(|graph| graph.0).map_err(code)
    }

    /// `cuGraphInstantiate`: a second one of the same work.
    pub fn graph_instantiate(&self, graph: u64) -> Answer<u64> {
        let mut model = self.model();
        let call = Call::GraphInstantiate;
        model.enter(call, ByteSize::ZERO).map_err(code)?;
        let Some(work) = model.graphs.get(graph).cloned() else {
            let _ = model.stale(call, HandleKind::Graph, graph);
            return Err(code(model.fail(call, SimError::InvalidValue, ByteSize::ZERO)));
        };
        work.iter().for_each(|work| model.use_task(work));
        Ok(model.graphs.insert(work))
    }

    /// `cuGraphLaunch`.
    pub fn graph_launch(&self, graph: u64, stream: u64) -> Answer {
        self.model().graph_launch(graph, stream).map_err(code)
    }

    /// `cuGraphDestroy` and `cuGraphExecDestroy`.
    pub fn graph_destroy(&self, graph: u64) -> Answer {
        self.model().graph_destroy(graph).map_err(code)
    }
}
