//! The smallest gRPC server with lowtide: admission, endpoints, metrics and an orderly shutdown.
//!
//! `cargo run --example health_in_tonic` serves gRPC's health checks on port 8080, and the
//! endpoints for operators on port 8081, until SIGTERM or Ctrl-C. Health checks are exempt from
//! admission; services that are added next to them are not.
#![forbid(unsafe_code)]

use lowtide::{BoxError, Memory};
use tonic::transport::Server;

lowtide::global_allocator!(balanced);

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let memory = Memory::builder().prometheus()?.start()?;
    let operators = tokio::net::TcpListener::bind("127.0.0.1:8081").await?;
    tokio::spawn(axum::serve(operators, memory.routes::<()>()).into_future());
    let (_reporter, health) = tonic_health::server::health_reporter();
    let server = Server::builder()
        .layer(memory.layer()) // before the services, so that it is around all of them
        .add_service(health)
        .serve_with_shutdown("127.0.0.1:8080".parse()?, memory.terminated()?);
    memory.serve(server, std::time::Duration::from_secs(10)).await
}
