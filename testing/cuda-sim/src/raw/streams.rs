//! Streams, events, waits and captures, call by call.
//!
//! The legacy default stream and blocking streams wait for each other's work; a stream created as
//! non-blocking is not ordered with any other.
//!
//! Invariant: as in [`super`]; after a successful wait all work before it is visible.

use super::super::call::Call;
use super::super::fault::HandleKind;
use super::super::graph::CaptureMode;
use super::super::model::{INVALID_VALUE, Marked, UNSUPPORTED};
use super::{Answer, Raw, code};

/// Defines calls that are the model's of the same name.
macro_rules! forward {
    ($($(#[$doc:meta])* $name:ident($($argument:ident: $type:ty),*) -> $answer:ty;)*) => {
        $($(#[$doc])* pub fn $name(&self, $($argument: $type),*) -> Answer<$answer> {
            self.model().$name($($argument),*).map_err(code)
        })*
    };
}

#[expect(clippy::missing_errors_doc, reason = "each answers with the codes of cuda.h")]
impl Raw<'_> {
    forward! {
        /// `cuStreamDestroy`: returns at once; its work still runs.
        stream_destroy(stream: u64) -> ();
        /// `cuStreamSynchronize`.
        stream_synchronize(stream: u64) -> ();
        /// `cuStreamWaitEvent`.
        stream_wait_event(stream: u64, event: u64) -> ();
        /// `cuEventDestroy`.
        event_destroy(event: u64) -> ();
        /// `cuEventRecord`.
        event_record(event: u64, stream: u64) -> ();
        /// `cuEventQuery`: `true` if the work that it marks is done.
        event_query(event: u64) -> bool;
        /// `cuEventSynchronize`.
        event_synchronize(event: u64) -> ();
        /// `cuStreamBeginCapture`.
        begin_capture(stream: u64, mode: CaptureMode) -> ();
        /// `cuGraphLaunch`.
        graph_launch(graph: u64, stream: u64) -> ();
        /// `cuGraphDestroy` and `cuGraphExecDestroy`.
        graph_destroy(graph: u64) -> ();
        /// `cuCtxSynchronize`.
        synchronize() -> ();
        /// `cuEventCreate`.
        event_create() -> u64;
    }

    /// Returns the legacy default stream; 906 while a stream that is ordered with it is capturing.
    pub fn legacy_stream(&self) -> Answer<u64> {
        self.model().legacy_stream().map_err(code)
    }

    /// Returns `true` while a stream that is ordered with the legacy default stream is capturing.
    #[must_use]
    pub fn legacy_is_implicit(&self) -> bool {
        let model = self.model();
        model.captures.keys().any(|stream| model.blocking.contains(stream))
    }

    /// Returns the default stream of the calling thread; ordered with the legacy one.
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

    /// `cuStreamQuery`: `true` if its work is done.
    pub fn stream_query(&self, stream: u64) -> Answer<bool> {
        self.call(Call::StreamQuery, 0, |model| {
            model.live_stream(stream)?;
            model.forbid_of_stream(stream, UNSUPPORTED)?;
            Ok(model.has_done(model.queues.end(stream)))
        })
    }

    /// `cuStreamIsCapturing`: 0, 1, or 2 if the capture is invalidated.
    pub fn stream_capture_status(&self, stream: u64) -> Answer<u32> {
        let mut model = self.model();
        model.is_capturing(stream).map_err(code)?;
        Ok(model.captures.get(&stream).map_or(0, |capture| 1 + u32::from(capture.spoiled)))
    }

    /// Returns `true` if the event was ever recorded, which a time query requires.
    pub fn event_is_recorded(&self, event: u64) -> Answer<bool> {
        let mut model = self.model();
        model.call = Call::EventQuery;
        model.marked(event).map(|marked| marked != Marked::Nothing).map_err(code)
    }

    /// `cuStreamEndCapture`: returns the graph.
    pub fn end_capture(&self, stream: u64) -> Answer<u64> {
        self.model().end_capture(stream).map(|graph| graph.0).map_err(code)
    }

    /// `cuGraphInstantiate`: a second graph with the same work.
    pub fn graph_instantiate(&self, graph: u64) -> Answer<u64> {
        self.call(Call::GraphInstantiate, 0, |model| {
            let Some(work) = model.graphs.get(graph).cloned() else {
                let _ = model.stale(HandleKind::Graph, graph);
                return Err(model.fail(INVALID_VALUE));
            };
            work.iter().for_each(|work| model.use_task(work));
            Ok(model.graphs.insert(work))
        })
    }
}
