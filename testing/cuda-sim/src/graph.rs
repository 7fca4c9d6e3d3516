//! Captures of streams into graphs, and their launch.
//!
//! A capture holds one stream. A wait between a captured stream and another is an error here, while
//! CUDA would add the other stream to the capture. Addresses stay in the graph as they were
//! captured.
//!
//! Calls that are unsafe during a capture are refused according to the mode of the calling thread
//! and the modes of the captures (`CUstreamCaptureMode`); a refused call invalidates the captures
//! that forbid it. Calls that conflict with a capture in every mode are refused at their own place.
//!
//! Invariant: a stream is in `captures` from the begin of its capture to its end, invalidated or
//! not.

use std::cell::Cell;
use std::marker::PhantomData;
use std::thread::{self, ThreadId};

use super::call::Call;
use super::fault::HandleKind;
use super::model::{Answer, ILLEGAL_STATE, INVALIDATED, Model};
use super::work::Work;
use lowtide_core::bytes::ByteSize;

/// A capture mode (`CUstreamCaptureMode`): which unsafe calls a capture forbids, and which captures
/// a thread respects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// A capture forbids unsafe calls of all threads; a thread respects its own captures and the
    /// global ones of other threads. The default.
    #[default]
    Global,
    /// A capture forbids unsafe calls of its own thread; a thread respects its own captures.
    ThreadLocal,
    /// A capture forbids nothing, and a thread respects no capture.
    Relaxed,
}

thread_local! {
    /// The mode of this thread.
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

impl CaptureMode {
    /// Sets the mode of this thread and returns the previous one
    /// (`cuThreadExchangeStreamCaptureMode`).
    #[must_use]
    pub fn exchange(self) -> Self {
        MODE.replace(self)
    }
}

/// Relaxes the mode of this thread until it is dropped: what a driver does around its calls.
pub(super) struct Relaxed {
    before: CaptureMode,
    /// Not `Send`: the mode belongs to the thread.
    _here: PhantomData<*const ()>,
}

impl Relaxed {
    pub(super) fn enter() -> Self {
        Self { before: CaptureMode::Relaxed.exchange(), _here: PhantomData }
    }
}

impl Drop for Relaxed {
    fn drop(&mut self) {
        MODE.set(self.before);
    }
}

/// The work captured from a stream so far.
#[derive(Debug)]
pub(super) struct Capture {
    /// `true` if the capture is invalidated.
    pub(super) spoiled: bool,
    pub(super) work: Vec<Work>,
    mode: CaptureMode,
    /// The thread that began the capture.
    by: ThreadId,
}

impl Capture {
    /// Returns `true` if the capture forbids unsafe calls of this thread.
    fn forbids(&self) -> bool {
        match (MODE.get(), self.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            _ if self.by == thread::current().id() => true,
            (mode, of) => mode == CaptureMode::Global && of == CaptureMode::Global,
        }
    }
}

/// A handle to a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphHandle(pub(super) u64);

impl Model {
    pub(super) fn begin_capture(&mut self, stream: u64, mode: CaptureMode) -> Answer {
        self.enter(Call::BeginCapture, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        if self.captures.contains_key(&stream) {
            return Err(self.fail(ILLEGAL_STATE));
        }
        let by = thread::current().id();
        self.captures.insert(stream, Capture { spoiled: false, work: Vec::new(), mode, by });
        Ok(())
    }

    /// Fails a call that is unsafe during a capture, if a capture forbids it to this thread.
    pub(super) fn forbid_unsafe(&mut self, code: u32) -> Answer {
        if self.captures.values().any(Capture::forbids) {
            return Err(self.spoil(code, |_, capture| capture.forbids()));
        }
        Ok(())
    }

    pub(super) fn end_capture(&mut self, stream: u64) -> Answer<GraphHandle> {
        self.enter(Call::EndCapture, ByteSize::ZERO)?;
        self.live_stream(stream)?;
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
        Err(self.fail(code))
    }

    pub(super) fn graph_launch(&mut self, graph: u64, stream: u64) -> Answer {
        self.enter(Call::GraphLaunch, ByteSize::ZERO)?;
        self.live_stream(stream)?;
        let Some(work) = self.graphs.get(graph).cloned() else {
            return Err(self.stale(HandleKind::Graph, graph));
        };
        work.iter().try_for_each(|work| {
            self.use_task(work);
            self.queue(stream, *work)
        })
    }

    pub(super) fn graph_destroy(&mut self, graph: u64) -> Answer {
        self.enter(Call::GraphDestroy, ByteSize::ZERO)?;
        let Some(work) = self.graphs.remove(graph) else {
            return Err(self.stale(HandleKind::Graph, graph));
        };
        self.drop_tasks(&work);
        Ok(())
    }
}
