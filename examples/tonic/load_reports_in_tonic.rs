//! A gRPC server that tells load balancers how full it is.
//!
//! `cargo run --example load_reports_in_tonic` serves gRPC's health checks on port 8080 until
//! SIGTERM or Ctrl-C. Each answer has an ORCA load report in its trailers, which gRPC's policy
//! `weighted_round_robin` reads; with `enableOobLoadReport` it reads the stream instead.
#![forbid(unsafe_code)]

use lowtide::service::LOAD_REPORT_STREAM_PATH;
use lowtide::{BoxError, Memory};
use tonic::service::Routes;
use tonic::transport::Server;

lowtide::global_allocator!(balanced);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let memory = Memory::builder().prometheus()?.start()?;
    let layer = memory.layer().with_load_reports();
    let streams = layer.load_report_service();
    let routes = axum::Router::new().route_service(LOAD_REPORT_STREAM_PATH, streams);
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .layer(layer) // before the services, so that it is around all of them
        .add_routes(Routes::from(routes))
        .add_service(health)
        .serve_with_shutdown("127.0.0.1:8080".parse()?, memory.terminated()?);
    memory.serve(server, std::time::Duration::from_secs(10)).await
}
