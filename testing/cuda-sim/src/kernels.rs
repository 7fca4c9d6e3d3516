//! Work for tests: kernels that write and check memory, host functions, captures.
//!
//! Each call queues work and returns the result of the launch. The result of the work itself is
//! read with its [`Ticket`] once the work is done. Ranges need not be granules, and are not
//! validated before the work runs: work on an address with no memory behind it loses the context
//! then.
//!
//! Invariant: a failed launch queued nothing, except with [`Order::Synchronous`], where the work
//! itself may have failed.
//!
//! [`Order::Synchronous`]: super::Order::Synchronous

use super::SimDriver;
use super::call::Call;
use super::graph::{CaptureMode, GraphHandle};
use super::memory::Range;
use super::model::Answer;
use super::work::{Outcome, Pattern, Ticket, Work};
use lowtide_core::bytes::ByteSize;
use lowtide_gpu_driver::{DeviceAddress, StreamHandle};

const fn range(at: DeviceAddress, size: ByteSize) -> Range {
    Range { at: at.get(), size: size.get() }
}

impl SimDriver {
    fn launch(&self, stream: StreamHandle, work: Work) -> Answer {
        self.model().start(Call::Launch, stream.get(), work)
    }

    /// Queues a kernel with a result.
    fn asked(&self, stream: StreamHandle, work: impl FnOnce(Ticket) -> Work) -> Answer<Ticket> {
        let mut model = self.model();
        let ticket = model.ticket();
        model.start(Call::Launch, stream.get(), work(ticket)).map(|()| ticket)
    }

    /// Queues a kernel that writes a pattern over a range.
    ///
    /// # Errors
    /// As for a launch: the context is lost, a failure was planned, or the stream does not exist.
    pub fn fill(
        &self,
        stream: StreamHandle,
        at: DeviceAddress,
        size: ByteSize,
        pattern: Pattern,
    ) -> Answer {
        self.launch(stream, Work::Fill(range(at, size), pattern))
    }

    /// Queues a kernel that adds to each byte of a range, wrapping.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn add(
        &self,
        stream: StreamHandle,
        at: DeviceAddress,
        size: ByteSize,
        value: u8,
    ) -> Answer {
        self.launch(stream, Work::Add(range(at, size), value))
    }

    /// Queues a kernel that compares a range with a pattern.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn check(
        &self,
        stream: StreamHandle,
        at: DeviceAddress,
        size: ByteSize,
        pattern: Pattern,
    ) -> Answer<Ticket> {
        self.asked(stream, |ticket| Work::Check(range(at, size), pattern, ticket))
    }

    /// Queues a kernel that sums the bytes of a range.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn sum(&self, stream: StreamHandle, at: DeviceAddress, size: ByteSize) -> Answer<Ticket> {
        self.asked(stream, |ticket| Work::Sum(range(at, size), ticket))
    }

    /// Returns the result of a check or a sum; in a graph, of its latest launch.
    ///
    /// # Panics
    /// If the ticket is of another device.
    #[must_use]
    pub fn outcome(&self, ticket: Ticket) -> Outcome {
        self.model().outcome(ticket)
    }

    /// Returns the number of checks that found bytes other than their pattern.
    #[must_use]
    pub fn differences(&self) -> u64 {
        self.model().differences
    }

    /// Queues a host function, which adds its tag to [`SimDriver::ran`] when it runs.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn host_function(&self, stream: StreamHandle, tag: u64) -> Answer {
        self.model().start(Call::LaunchHostFunction, stream.get(), Work::HostFunction(tag))
    }

    /// Starts to capture the stream's work into a graph, in global mode. Until the capture ends, no
    /// thread whose own mode is not relaxed may query or wait for an event, and no thread may wait
    /// for the context.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`]; a refusal (401) if the stream is already capturing.
    pub fn begin_capture(&self, stream: StreamHandle) -> Answer {
        self.model().begin_capture(stream.get(), CaptureMode::Global)
    }

    /// Ends the capture of a stream.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`]; a refusal (401) without a capture, and (901) if the capture was
    /// invalidated, which ends it as well.
    pub fn end_capture(&self, stream: StreamHandle) -> Answer<GraphHandle> {
        self.model().end_capture(stream.get())
    }

    /// Queues the work of a graph, at the addresses that it captured.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn graph_launch(&self, graph: GraphHandle, stream: StreamHandle) -> Answer {
        self.model().graph_launch(graph.0, stream.get())
    }

    /// Destroys a graph; launched work still runs.
    ///
    /// # Errors
    /// As for [`SimDriver::fill`].
    pub fn graph_destroy(&self, graph: GraphHandle) -> Answer {
        self.model().graph_destroy(graph.0)
    }
}
