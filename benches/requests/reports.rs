//! Load reports: what they cost, and that a gRPC client reads them.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::future::{Ready, ready};
use std::hint::black_box;
use std::path::Path;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use bytes::Bytes;
use common::figures::{Figures, median};
use futures_util::FutureExt as _;
use http::header::CONTENT_TYPE;
use http::{HeaderMap, HeaderName, HeaderValue, Request, Response, Version};
use http_body::{Body, Frame};
use http_body_util::{BodyExt as _, Empty, Full, StreamBody};
use lowtide::admission::{Budget, Cost, Permit, Priority};
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::service::{LOAD_REPORT_STREAM_PATH, MemoryLayer, RequestBody};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_heap::thread_totals;
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;
use tower::{Layer as _, Service};

// The time and the allocations of a load report for each response.
//
// The same call through the layer, with and without the report, in turns: the median of many
// rounds, less the other. The control loop ticks in real time, so reports are encoded as they are
// in a service; allocations are counted with a clock that stands still.

/// The calls of one round, and the rounds of each way.
const CALLS: u32 = 2_000;
const ROUNDS: usize = 201;

/// The report may take this long.
const GOAL: f64 = 200.0;

type Received = Request<RequestBody<Empty<Bytes>>>;

fn plain(_: Received) -> Ready<Result<Response<Full<Bytes>>, Infallible>> {
    let mut response = Response::new(Full::new(Bytes::from_static(b"hello")));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("text/plain"));
    ready(Ok(response))
}

fn trailers() -> HeaderMap {
    HeaderMap::from_iter([(HeaderName::from_static("grpc-status"), HeaderValue::from_static("0"))])
}

/// A response of gRPC: its trailers.
fn grpc(
    _: Received,
) -> Ready<Result<Response<impl Body<Data = Bytes, Error = Infallible>>, Infallible>> {
    let trailers = futures_util::stream::iter([Ok(Frame::trailers(trailers()))]);
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
    let Some(Ok(response)) = service.call(request).now_or_never() else { return };
    let mut body = pin!(response.into_body());
    while let Some(Some(frame)) = body.as_mut().frame().now_or_never() {
        black_box(frame.is_ok());
    }
}

/// Returns the nanoseconds of one call.
fn time(calls: &mut dyn FnMut()) -> f64 {
    let start = Instant::now();
    (0..CALLS).for_each(|_| calls());
    start.elapsed().as_nanos() as f64 / f64::from(CALLS)
}

/// Returns a layer with reports, and the same without.
fn layers(memory: &Memory) -> [MemoryLayer; 2] {
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::host(ByteSize::kib(64)));
    [layer.clone().with_load_reports(), layer]
}

/// Measures, only what is counted if it says so, and returns whether the goals held.
pub(crate) fn measure(is_counted: bool) -> Result<bool, BoxError> {
    let mut figures = Figures::default();
    let builder = || Memory::builder().device(DeviceChoice::None).memory_limit(ByteSize::gib(4));
    if !is_counted {
        let memory = builder().start()?;
        figures.at_most("fleet.report_ns", costs(&memory), "ns", GOAL);
        let _ = memory.shutdown_blocking(Duration::from_secs(5));
    }
    let memory = builder().clock(Arc::new(ManualClock::new())).start()?;
    figures.at_most("fleet.report.allocations", allocated(&memory)?, "bytes", 0.0);
    let _ = memory.shutdown_blocking(Duration::from_secs(5));
    Ok(figures.print())
}

/// Returns the nanoseconds that a report costs a response, the most of both protocols.
fn costs(memory: &Memory) -> f64 {
    let [mut with, mut without] = layers(memory).map(|of| of.layer(tower::service_fn(plain)));
    let most = compare(&mut || call(&mut with), &mut || call(&mut without));
    let [mut with, mut without] = layers(memory).map(|of| of.layer(tower::service_fn(grpc)));
    most.max(compare(&mut || call(&mut with), &mut || call(&mut without)))
}

/// Returns what the report costs.
fn compare(with: &mut dyn FnMut(), without: &mut dyn FnMut()) -> f64 {
    let times = (0..ROUNDS).map(|_| (time(with), time(without)));
    let (with, without): (Vec<_>, Vec<_>) = times.unzip();
    median(&with) - median(&without)
}

/// Returns the further bytes that are allocated for a response with a report.
fn allocated(memory: &Memory) -> Result<f64, BoxError> {
    let [mut with, mut without] = layers(memory).map(|of| of.layer(tower::service_fn(plain)));
    let bytes = |calls: &mut dyn FnMut()| {
        // The first calls of a route are measured.
        (0..CALLS).for_each(|_| calls());
        let before = thread_totals()?.0;
        (0..CALLS).for_each(|_| calls());
        Ok::<_, BoxError>((thread_totals()?.0 - before) as f64 / f64::from(CALLS))
    };
    Ok(bytes(&mut || call(&mut with))? - bytes(&mut || call(&mut without))?)
}

// grpcio, the gRPC library of Python, reads the reports of tonic servers: a client and a decoder
// that are not ours.
//
// Its core takes the trailer for itself and shows it to no program. So it balances calls between
// two servers by their weights, of which one has little memory left; and it reads a stream with
// the messages of the package `xds-protos`.

/// The method that the script calls. It answers with the name of the server.
const NAME: &str = "/test.Server/Name";

/// The parts of the allowances of both servers that are reserved for other work.
const RESERVED: [(&str, f64); 2] = [("free", 0.1), ("full", 0.9)];

/// One server.
struct Instance {
    memory: Memory,
    address: String,
    serving: JoinHandle<Result<(), tonic::transport::Error>>,
    _reserved: Permit,
}

impl Instance {
    async fn start(name: &'static str, reserved: f64, is_detached: bool) -> Result<Self, BoxError> {
        let builder = Memory::builder().device(DeviceChoice::None);
        // A process has one that is not detached.
        let builder = if is_detached { builder.detached() } else { builder };
        let memory = builder.memory_limit(ByteSize::gib(4)).start()?;
        let allowance = memory.admission().ledger(Budget::Host).allowance();
        let cost = Cost::host(allowance.scaled(reserved));
        let reserved = memory.admission().try_admit_with(cost, Priority::Exempt)?;
        let cost = Cost::host(ByteSize::kib(64));
        let layer = MemoryLayer::new(memory.admission().clone(), cost).with_load_reports();
        let streams = layer.load_report_service();
        let answer = tower::service_fn(async move |_: Request<axum::body::Body>| {
            let message = [&[0, 0, 0, 0, 4], name.as_bytes()].concat();
            let frames = [Frame::data(Bytes::from(message)), Frame::trailers(trailers())];
            let frames = futures_util::stream::iter(frames.map(Ok::<_, Infallible>));
            let response = Response::builder().header("content-type", "application/grpc");
            let body = axum::body::Body::new(StreamBody::new(frames));
            Ok::<_, Infallible>(response.body(body).expect("a valid head"))
        });
        let routes = axum::Router::new()
            .route_service(NAME, answer)
            .route_service(LOAD_REPORT_STREAM_PATH, streams);
        let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
        let address = listener.local_addr()?.to_string();
        let server = Server::builder().layer(layer).add_routes(Routes::from(routes));
        let serving = tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
        Ok(Self { memory, address, serving, _reserved: reserved })
    }
}

/// Serves, and runs the script. Returns whether it read all.
#[tokio::main]
pub(crate) async fn read(python: &OsStr) -> Result<bool, BoxError> {
    let mut instances = Vec::new();
    for (name, reserved) in RESERVED {
        instances.push(Instance::start(name, reserved, !instances.is_empty()).await?);
    }
    let mut command = Command::new(python);
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("requests/read.py"));
    command.args(instances.iter().map(|instance| &instance.address));
    let status = tokio::task::spawn_blocking(move || command.status()).await??;
    for instance in instances {
        instance.serving.abort();
        let _ = instance.memory.shutdown(Duration::from_secs(5)).await;
    }
    println!("figure fleet.grpc.read {}", u8::from(status.success()));
    Ok(status.success())
}
