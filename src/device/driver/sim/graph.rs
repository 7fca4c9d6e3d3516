//! Captures of streams into graphs, and their launch.
//!
//! A capture holds one stream: another stream that waits for an event of it, or it for one of
//! another, is an error here, while CUDA would let the other join. Addresses stay in the graph as
//! they were captured.
//!
//! Calls that are unsafe beside a capture are refused by the mode of the thread that makes them and
//! the modes of the captures (`CUstreamCaptureMode`); a refused call invalidates the captures that
//! forbid it. What conflicts with a capture in every mode is refused where the call stands.
//!
//! Invariant: a stream is in `captures` from the begin of its capture to its end, spoiled or not.

use std::cell::Cell;
use std::marker::PhantomData;
use std::thread::{self, ThreadId};

use super::call::Call;
use super::fault::{HandleKind, SimError};
use super::model::{ILLEGAL_STATE, INVALIDATED, Model};
use super::work::Work;
use crate::bytes::ByteSize;
use crate::device::driver::DriverError;

/// Which unsafe calls a capture forbids, and which captures a thread respects
/// (`CUstreamCaptureMode`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CaptureMode {
    /// A capture forbids unsafe calls of all threads; a thread respects its own captures and the
    /// global ones of others. Default.
    #[default]
    Global,
    /// A capture forbids unsafe calls of its own thread; a thread respects its own captures.
    ThreadLocal,
    /// A capture forbids nothing, and a thread respects none.
    Relaxed,
}

thread_local! {
    /// The mode of this thread.
    static MODE: Cell<CaptureMode> = const { Cell::new(CaptureMode::Global) };
}

impl CaptureMode {
    /// Sets the mode of this thread; returns the one before
    /// (`cuThreadExchangeStreamCaptureMode`).
    #[must_use]
    pub fn exchange(self) -> Self {
        MODE.replace(self)
    }
}

/// Relaxes the mode of this thread until it is dropped: what a driver does around its calls.
pub(super) struct Relaxed {
    before: CaptureMode,
    /// The mode is the thread's, so that this must end there.
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

/// What a stream has captured so far.
#[derive(Debug)]
pub(super) struct Capture {
    /// Whether something forbidden was done meanwhile.
    pub(super) spoiled: bool,
    pub(super) work: Vec<Work>,
    mode: CaptureMode,
    /// The thread that began it.
    by: ThreadId,
}

impl Capture {
    /// Whether it forbids unsafe calls of this thread.
    fn forbids(&self) -> bool {
        match (MODE.get(), self.mode) {
            (CaptureMode::Relaxed, _) | (_, CaptureMode::Relaxed) => false,
            _ if self.by == thread::current().id() => true,
            (mode, of) => mode == CaptureMode::Global && of == CaptureMode::Global,
        }
    }
}

/// The name of a captured graph.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GraphHandle(pub(super) u64);

impl Model {
    pub(super) fn begin_capture(
        &mut self,
        stream: u64,
        mode: CaptureMode,
    ) -> Result<(), DriverError> {
        let call = Call::BeginCapture;
        self.enter(call, ByteSize::ZERO)?;
        self.live_stream(call, stream)?;
        if self.captures.contains_key(&stream) {
            return Err(self.fail(call, SimError::Code(ILLEGAL_STATE), ByteSize::ZERO));
        }
        let by = thread::current().id();
        self.captures.insert(stream, Capture { spoiled: false, work: Vec::new(), mode, by });
        Ok(())
    }

    /// Fails a call that is unsafe beside a capture, where one forbids it to this thread.
    pub(super) fn forbid_unsafe(&mut self, call: Call, code: u32) -> Result<(), DriverError> {
        if self.captures.values().any(Capture::forbids) {
            return Err(self.spoil(call, code, |_, capture| capture.forbids()));
        }
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
