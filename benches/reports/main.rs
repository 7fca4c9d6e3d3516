//! Load reports: what they cost, and that a gRPC client reads them.
//!
//! `cargo bench --bench reports` measures the cost. With `--python PATH`, an interpreter that has
//! the packages `grpcio` and `xds-protos`, it only lets that client read the reports of a server;
//! `.ci/grpc` installs them and does this.
//!
//! Exit codes: 0 every goal held; 1 one was missed, or something could not be measured.
#![expect(clippy::print_stdout, reason = "a program that shows something")]
#![expect(clippy::disallowed_methods, reason = "it measures real time")]
#![expect(clippy::cast_precision_loss, reason = "figures of a bench are far below 2^52")]

mod grpc;

use std::cell::Cell;
use std::convert::Infallible;
use std::ffi::OsString;
use std::future::{Future as _, Ready, ready};
use std::hint::black_box;
use std::pin::pin;
use std::process::ExitCode;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::{Duration, Instant};

use bytes::Bytes;
use clap::Parser;
use common::counting::Counting;
use common::figures::{Figures, median};
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderValue, Request, Response, Version};
use http_body::{Body, Frame};
use http_body_util::{Empty, Full, StreamBody};
use lowtide::admission::Cost;
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, RequestBody};
use lowtide::{BoxError, ByteSize, Memory};
use tower::{Layer as _, Service};

#[global_allocator]
static ALLOCATOR: Counting = Counting(note_allocation);

/// What load reports cost, and that a gRPC client reads them.
#[derive(Debug, Parser)]
struct Cli {
    /// Let the gRPC client of this Python interpreter read reports.
    #[arg(long)]
    python: Option<OsString>,
    /// Judges no time, and leaves out what measures nothing else.
    #[arg(long)]
    counted: bool,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| match &cli.python {
        Some(python) => grpc::read(python),
        None => measure(cli.counted),
    })
}

// The time and the allocations of a load report for each response.
//
// The same call through the layer, with and without the report, in turns: the median of many
// rounds, less the other. The control loop ticks in real time, so reports are encoded as they are
// in a service; allocations are counted with a clock that stands still.

/// The calls of one round, and the rounds of each way.
const CALLS: u32 = 2_000;
const ROUNDS: usize = 201;

thread_local! {
    /// The allocations of this thread.
    static ALLOCATIONS: Cell<u64> = const { Cell::new(0) };
}

/// Counts an allocation of the calling thread.
fn note_allocation() {
    // A thread that ends may allocate after its values are gone.
    let _ = ALLOCATIONS.try_with(|count| count.set(count.get() + 1));
}

/// The report may take this long.
const GOAL: f64 = 200.0;

type Received = Request<RequestBody<Empty<Bytes>>>;

fn plain(_: Received) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    let mut response = Response::new(Full::new(Bytes::from_static(b"hello")));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    ready(Ok(response))
}

/// A response of gRPC: its trailers.
fn grpc(
    _: Received,
) -> Ready<Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible>> {
    let mut trailers = HeaderMap::new();
    trailers.insert("grpc-status", HeaderValue::from_static("0"));
    let trailers = futures_util::stream::iter([Ok(Frame::trailers(trailers))]);
    let mut response = Response::new(StreamBody::new(trailers));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/grpc"));
    ready(Ok(response))
}

/// Calls a service once, and reads its response.
fn call<S, R>(service: &mut S)
where
    S: Service<Request<Empty<Bytes>>, Response = Response<R>, Error = Infallible>,
    R: Body,
{
    let mut request = Request::new(Empty::new());
    *request.version_mut() = Version::HTTP_2;
    let mut cx = Context::from_waker(Waker::noop());
    let Poll::Ready(Ok(response)) = pin!(service.call(request)).poll(&mut cx) else { return };
    let mut body = pin!(response.into_body());
    while let Poll::Ready(Some(frame)) = body.as_mut().poll_frame(&mut cx) {
        black_box(frame.is_ok());
    }
}

/// Returns the nanoseconds of one call.
fn time(calls: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    (0..CALLS).for_each(|_| calls());
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

fn layer(memory: &Memory, reports: bool) -> MemoryLayer<Cost> {
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::host(ByteSize::kib(64)));
    if reports { layer.with_load_reports() } else { layer }
}

/// Measures, only what is counted if it says so, and returns whether the goals held.
fn measure(is_counted: bool) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    let builder = || Memory::builder().device(DeviceChoice::None).memory_limit(ByteSize::gib(4));
    if !is_counted {
        let memory = builder().start()?;
        figures.at_most("fleet.report_ns", costs(&memory), "ns", GOAL);
        let _ = memory.shutdown_blocking(Duration::from_secs(5));
    }
    let memory = builder().clock(Arc::new(ManualClock::new())).start()?;
    figures.at_most("fleet.report.allocations", allocations(&memory), "allocations", 0.0);
    let _ = memory.shutdown_blocking(Duration::from_secs(5));
    Ok(figures.print())
}

/// Returns the nanoseconds that a report costs a response, the most of both protocols.
fn costs(memory: &Memory) -> f64 {
    let mut with = layer(memory, true).layer(tower::service_fn(plain));
    let mut without = layer(memory, false).layer(tower::service_fn(plain));
    let most = compare(&mut || call(&mut with), &mut || call(&mut without));
    let mut with = layer(memory, true).layer(tower::service_fn(grpc));
    let mut without = layer(memory, false).layer(tower::service_fn(grpc));
    most.max(compare(&mut || call(&mut with), &mut || call(&mut without)))
}

/// Returns what the report costs.
fn compare(with: &mut dyn FnMut(), without: &mut dyn FnMut()) -> f64 {
    let mut times = [Vec::new(), Vec::new()];
    for _ in 0..ROUNDS {
        times[0].push(time(with));
        times[1].push(time(without));
    }
    let [with, without] = times.map(|times| median(&times));
    with - without
}

/// Returns the further allocations of a response with a report.
fn allocations(memory: &Memory) -> f64 {
    let mut with = layer(memory, true).layer(tower::service_fn(plain));
    let mut without = layer(memory, false).layer(tower::service_fn(plain));
    let count = |calls: &mut dyn FnMut()| {
        // The first calls of a route are measured.
        (0..CALLS).for_each(|_| calls());
        let before = ALLOCATIONS.get();
        (0..CALLS).for_each(|_| calls());
        ALLOCATIONS.get() - before
    };
    let [with, without] = [count(&mut || call(&mut with)), count(&mut || call(&mut without))];
    (with as f64 - without as f64) / f64::from(CALLS)
}
