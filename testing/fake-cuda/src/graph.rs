//! Captures of one stream into a graph, and launches of graphs.
//!
//! A capture has the mode with which it began; a thread has the mode that it set last.
//!
//! Invariant: a graph and its instances have separate lifetimes.
#![expect(unsafe_code, reason = "exports functions under C names: the attribute alone")]

use std::ffi::{c_uint, c_ulonglong};

use crate::call::{Answer, INVALID_HANDLE, INVALID_VALUE};
use crate::ffi::{Out, Untyped, export};
use crate::handle::Kind;
use crate::state::{Seat, current, state, stream};
use lowtide_cuda_sim::CaptureMode;

/// `CUstreamCaptureMode`
const MODES: [CaptureMode; 3] =
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed];

fn mode(number: c_uint) -> Answer<CaptureMode> {
    let at = usize::try_from(number).map_err(|_| INVALID_VALUE)?;
    MODES.get(at).copied().ok_or(INVALID_VALUE)
}

/// Sets this thread's mode; the number of the one before.
fn exchange(number: c_uint) -> Answer<c_uint> {
    let before = mode(number)?.exchange();
    let at = MODES.iter().position(|known| *known == before);
    Ok(at.and_then(|at| c_uint::try_from(at).ok()).unwrap_or(0))
}

fn instantiate(to: Out<u64>, graph: u64) -> Answer {
    let (seat, number) = found(graph, Kind::Graph)?;
    let made = seat.sim.raw().graph_instantiate(number)?;
    to.put(seat.handle(Kind::GraphExec, made))
}

fn found(bits: u64, kind: Kind) -> Answer<(Seat, u64)> {
    state().find(bits, kind, INVALID_VALUE)
}

export! {
    fn cuStreamBeginCapture_v2(bits: u64, number: c_uint) {
        let mode = mode(number)?;
        if bits <= 1 {
            return Err(900); // CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED: the legacy stream
        }
        let (seat, stream) = stream(bits)?;
        seat.sim.raw().begin_capture(stream, mode)
    }

    fn cuStreamEndCapture(bits: u64, graph: Out<u64>) {
        let (seat, number) = stream(bits)?;
        graph.put_if_asked(0);
        let made = seat.sim.raw().end_capture(number)?;
        graph.put(seat.handle(Kind::Graph, made))
    }

    fn cuStreamIsCapturing(bits: u64, status: Out<c_uint>) {
        if bits <= 1 && current()?.sim.raw().legacy_is_implicit() {
            return Err(906); // CUDA_ERROR_STREAM_CAPTURE_IMPLICIT; it spoils nothing
        }
        let (seat, number) = stream(bits)?;
        status.put(seat.sim.raw().stream_capture_status(number)?)
    }

    fn cuThreadExchangeStreamCaptureMode(mode: Untyped) {
        state().started()?;
        let before = exchange(mode.input::<c_uint>().get()?)?;
        mode.out().put(before)
    }

    fn cuGraphInstantiateWithFlags(to: Out<u64>, graph: u64, _flags: c_ulonglong) {
        instantiate(to, graph)
    }

    fn cuGraphLaunch(bits: u64, queue: u64) {
        let (seat, number) = found(bits, Kind::GraphExec)?;
        let (other, stream) = stream(queue)?;
        if other.device != seat.device {
            return Err(INVALID_HANDLE);
        }
        seat.sim.raw().graph_launch(number, stream)
    }

    fn cuGraphExecDestroy(bits: u64) {
        let (seat, number) = found(bits, Kind::GraphExec)?;
        seat.sim.raw().graph_destroy(number)
    }

    fn cuGraphDestroy(bits: u64) {
        let (seat, number) = found(bits, Kind::Graph)?;
        seat.sim.raw().graph_destroy(number)
    }
}
