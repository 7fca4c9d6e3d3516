//! grpcio, the gRPC library of Python, reads the reports of tonic servers: a client and a decoder
//! that are not ours.
//!
//! Its core takes the trailer for itself and shows it to no program. So it balances calls between
//! two servers by their weights, of which one has little memory left; and it reads a stream with
//! the messages of the package `xds-protos`.

use std::convert::Infallible;
use std::ffi::OsStr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, HeaderValue};
use http_body::Frame;
use http_body_util::StreamBody;
use lowtide::admission::{Budget, Cost, Permit, Priority};
use lowtide::config::DeviceChoice;
use lowtide::service::{LOAD_REPORT_STREAM_PATH, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use tokio::task::JoinHandle;
use tonic::service::Routes;
use tonic::transport::Server;
use tonic::transport::server::TcpIncoming;

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
        let answer = tower::service_fn(async move |_: http::Request<axum::body::Body>| {
            let mut trailers = HeaderMap::new();
            trailers.insert("grpc-status", HeaderValue::from_static("0"));
            let message = [&[0, 0, 0, 0, 4], name.as_bytes()].concat();
            let frames = [Frame::data(Bytes::from(message)), Frame::trailers(trailers)];
            let frames = futures_util::stream::iter(frames.map(Ok::<_, Infallible>));
            let response = http::Response::builder().header("content-type", "application/grpc");
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
    command.arg(Path::new(env!("CARGO_MANIFEST_DIR")).join("reports/read.py"));
    command.args(instances.iter().map(|instance| &instance.address));
    let status = tokio::task::spawn_blocking(move || command.status()).await??;
    for instance in instances {
        instance.serving.abort();
        let _ = instance.memory.shutdown(Duration::from_secs(5)).await;
    }
    println!("figure fleet.grpc.read {}", u8::from(status.success()));
    Ok(status.success())
}
