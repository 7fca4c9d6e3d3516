//! Admission under tonic: rejected calls receive `RESOURCE_EXHAUSTED` and a retry delay.
//!
//! `cargo run --example embedded_in_tonic` starts a service whose one method allocates as many MiB
//! as requested, and calls it four times: with 1 MiB, with more than ever fits, while other memory
//! fills the limit, and afterwards. Messages are bytes, so no code is generated.
#![forbid(unsafe_code)]
#![expect(clippy::print_stdout, reason = "what a client sees is the product")]

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::time::Duration;

use axum::body::Body;
use http::uri::PathAndQuery;
use lowtide::admission::{Cost, Priority, Rejected};
use lowtide::service::RequestPermit;
use lowtide::{BoxError, ByteSize, Memory};
use tonic::server::{Grpc as Server, UnaryService};
use tonic::service::Routes;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{self, Channel, Endpoint};
use tonic::{Code, Request, Response, Status, client};
use tonic_prost::ProstCodec;

const TAKE: &str = "/example.Allocate/Take";

/// Messages with one string, as `google.protobuf.StringValue`.
type Strings = ProstCodec<String, String>;

/// Allocates as many MiB as the message requests. The layer has reserved an estimate by the head;
/// the size in the message is reserved here, and a call that does not fit ends with a status.
struct Allocate;

impl UnaryService<String> for Allocate {
    type Response = String;
    type Future = Ready<Result<Response<String>, Status>>;
    fn call(&mut self, request: Request<String>) -> Self::Future {
        let permit = request.extensions().get::<RequestPermit>().cloned();
        let asked = request.get_ref().parse().ok();
        let (Some(permit), Some(mib)) = (permit, asked) else {
            return ready(Err(Status::invalid_argument("expected a number of MiB")));
        };
        let grown = permit.grow(ByteSize::mib(mib));
        let full = |rejected: Rejected| Status::resource_exhausted(rejected.to_string());
        ready(grown.map(|()| Response::new(format!("{mib} MiB served"))).map_err(full))
    }
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(ByteSize::gib(1)).prometheus()?.start()?;
    let layer = memory.layer().with_estimate(Cost::host(ByteSize::kib(64)));
    let listener = tokio::net::TcpListener::bind(("127.0.0.1", 0)).await?;
    let endpoint = Endpoint::from_shared(format!("http://{}", listener.local_addr()?))?;
    // With a generated service it is `.layer(layer).add_service(AllocateServer::new(Allocate))`.
    let take = tower::service_fn(async |request: http::Request<Body>| {
        Ok::<_, Infallible>(Server::new(Strings::default()).unary(Allocate, request).await)
    });
    let routes = Routes::from(axum::Router::new().route_service(TAKE, take));
    let server = transport::Server::builder().layer(layer).add_routes(routes);
    let end = memory.terminated()?;
    tokio::spawn(server.serve_with_incoming_shutdown(TcpIncoming::from(listener), end));
    let mut client = client::Grpc::new(endpoint.connect().await?);

    call(&mut client, "1", Code::Ok).await?;
    call(&mut client, "4096", Code::ResourceExhausted).await?;
    // As other requests would. A call that does not fit waits for 2 s, by default.
    let all = Cost::host(ByteSize::gib(1));
    let held = memory.admission().try_admit_with(all, Priority::Exempt)?;
    println!("{} are held elsewhere", held.cost().host);
    call(&mut client, "1", Code::ResourceExhausted).await?;
    drop(held); // it ends
    call(&mut client, "1", Code::Ok).await?;
    Ok(memory.shutdown(Duration::from_secs(5)).await.into_result()?)
}

type Client = client::Grpc<Channel>;

async fn call(client: &mut Client, message: &'static str, expected: Code) -> Result<(), BoxError> {
    client.ready().await?;
    let path = PathAndQuery::from_static(TAKE);
    let answer: Result<Response<String>, _> =
        client.unary(Request::new(message.to_owned()), path, Strings::default()).await;
    let (code, text) = match &answer {
        Ok(text) => (Code::Ok, &**text.get_ref()),
        Err(status) => (status.code(), status.message()),
    };
    println!("take {message} MiB: {code:?}: {text}");
    if code == expected { Ok(()) } else { Err(format!("expected {expected:?}").into()) }
}
