//! The layer under tonic, over real connections: what a gRPC client sees of a request that is
//! turned away. The service is written by hand, its messages are bytes.

mod load_reports;

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::net::SocketAddr;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::{Buf, BufMut, Bytes};
use http::uri::PathAndQuery;
use http_body_util::BodyExt;
use lowtide::admission::{Admission, Budget, Cost, Level, Rejected};
use lowtide::service::{MemoryLayer, RequestPermit};
use lowtide::{BoxError, ByteSize};
use tokio::net::TcpListener;
use tonic::body::Body;
use tonic::codec::{Codec, DecodeBuf, Decoder, EncodeBuf, Encoder};
use tonic::codegen::BoxFuture;
use tonic::server::{NamedService, UnaryService};
use tonic::service::LayerExt as _;
use tonic::transport::server::TcpIncoming;
use tonic::transport::{Channel, Endpoint, Server};
use tonic::{Code, Request, Response, Status};
use tower::Service;

const PATIENCE: Duration = Duration::from_secs(20);
const COST: ByteSize = ByteSize::mib(10);
const CEILING: ByteSize = ByteSize::mib(100);
const PUSHBACK: &str = "grpc-retry-pushback-ms";

/// Messages that are bytes.
#[derive(Clone, Copy, Default)]
struct Raw;

impl Codec for Raw {
    type Encode = Bytes;
    type Decode = Bytes;
    type Encoder = Self;
    type Decoder = Self;

    fn encoder(&mut self) -> Self {
        Self
    }

    fn decoder(&mut self) -> Self {
        Self
    }
}

impl Encoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn encode(&mut self, item: Bytes, to: &mut EncodeBuf<'_>) -> Result<(), Status> {
        to.put(item);
        Ok(())
    }
}

impl Decoder for Raw {
    type Item = Bytes;
    type Error = Status;

    fn decode(&mut self, from: &mut DecodeBuf<'_>) -> Result<Option<Bytes>, Status> {
        Ok(Some(from.copy_to_bytes(from.remaining())))
    }
}

/// Answers with what it is sent; where the permit cannot grow by the message's digits of MiB, with
/// a status of its own.
#[derive(Clone)]
struct Echo;

impl NamedService for Echo {
    const NAME: &'static str = "test.Echo";
}

impl UnaryService<Bytes> for Echo {
    type Response = Bytes;
    type Future = Ready<Result<Response<Bytes>, Status>>;

    fn call(&mut self, request: Request<Bytes>) -> Self::Future {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        let message = request.into_inner();
        let more = std::str::from_utf8(&message).ok().and_then(|text| text.parse().ok());
        let grown = permit.grow(ByteSize::mib(more.unwrap_or(0)));
        let full = |error: Rejected| Status::resource_exhausted(error.to_string());
        ready(grown.map(|()| Response::new(message)).map_err(full))
    }
}

impl<B> Service<http::Request<B>> for Echo
where
    B: http_body::Body<Data = Bytes> + Send + 'static,
    B::Error: Into<BoxError> + Send,
{
    type Response = http::Response<Body>;
    type Error = Infallible;
    type Future = BoxFuture<Self::Response, Infallible>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: http::Request<B>) -> Self::Future {
        Box::pin(async move { Ok(tonic::server::Grpc::new(Raw).unary(Self, request).await) })
    }
}

fn admission() -> Admission {
    let admission = Admission::new();
    admission.ledger(Budget::Host).set_measured(ByteSize::ZERO, CEILING);
    admission
}

fn layer(admission: &Admission) -> MemoryLayer {
    MemoryLayer::new(admission.clone(), Cost::host(COST))
}

/// A server with the layer around all of it, or around one service by its name.
async fn serve(admission: &Admission, whole: bool) -> SocketAddr {
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let (incoming, layer) = (TcpIncoming::from(listener), layer(admission));
    tokio::spawn(async move {
        if whole {
            let server = Server::builder().layer(layer).add_service(Echo);
            server.serve_with_incoming(incoming).await
        } else {
            let server = Server::builder().add_service(layer.named_layer(Echo));
            server.serve_with_incoming(incoming).await
        }
    });
    address
}

async fn connect(address: SocketAddr) -> tonic::client::Grpc<Channel> {
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
    let channel = tokio::time::timeout(PATIENCE, endpoint.connect()).await;
    tonic::client::Grpc::new(channel.expect("it hangs").expect("connects"))
}

async fn echo(
    client: &mut tonic::client::Grpc<Channel>,
    message: &'static str,
) -> Result<Bytes, Status> {
    client.ready().await.expect("the connection stands");
    let path = PathAndQuery::from_static("/test.Echo/Echo");
    let call = client.unary(Request::new(Bytes::from_static(message.as_bytes())), path, Raw);
    let answer = tokio::time::timeout(PATIENCE, call).await.expect("it hangs");
    answer.map(Response::into_inner)
}

fn pushback(status: &Status) -> Option<i64> {
    status.metadata().get(PUSHBACK)?.to_str().ok()?.parse().ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_grpc_client_reads_that_memory_is_short_and_when_to_come_again() {
    for whole in [true, false] {
        let admission = admission();
        let address = serve(&admission, whole).await;
        let mut client = connect(address).await;
        assert_eq!(echo(&mut client, "ebb").await.expect("served"), "ebb", "{whole}");

        let held = admission.try_admit(Cost::host(ByteSize::mib(45))).expect("fits");
        let status = echo(&mut client, "ebb").await.expect_err("full");
        assert_eq!(status.code(), Code::ResourceExhausted, "{status:?}");
        assert!(
            status.message().contains("the request needs more memory than is free now"),
            "{status:?}"
        );
        assert!(pushback(&status).is_some_and(|ms| (1_000..60_000).contains(&ms)), "{status:?}");

        admission.set_level(Level::Critical);
        let status = echo(&mut client, "ebb").await.expect_err("pressure");
        assert_eq!(status.code(), Code::ResourceExhausted);
        assert!(status.message().contains("memory is short now"), "{status:?}");
        admission.set_level(Level::None);
        drop(held);
        assert_eq!(echo(&mut client, "flow").await.expect("served"), "flow", "on one connection");

        let status = echo(&mut client, "200").await.expect_err("the handler says so");
        assert_eq!((status.code(), pushback(&status)), (Code::ResourceExhausted, None));

        admission.close();
        let status = echo(&mut client, "ebb").await.expect_err("it ends");
        assert_eq!((status.code(), pushback(&status)), (Code::Unavailable, None), "{status:?}");
        assert_eq!(admission.ledger(Budget::Host).reserved(), ByteSize::ZERO);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_can_never_fit_is_not_to_be_tried_again() {
    let admission = admission();
    let most = Cost::host(ByteSize::MAX);
    let layer = MemoryLayer::new(admission, most);
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = Server::builder().layer(layer).add_service(Echo);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let status = echo(&mut connect(address).await, "ebb").await.expect_err("too large");
    assert_eq!((status.code(), pushback(&status)), (Code::ResourceExhausted, Some(-1)));
}

/// The bug: health checks were shed, since the exemption passed GET and HEAD only, so that an
/// orchestrator restarted a service that was merely busy.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn health_checks_of_grpc_were_shed_under_overload() {
    use tonic_health::ServingStatus;
    use tonic_health::pb::HealthCheckRequest;
    use tonic_health::pb::health_client::HealthClient;

    let admission = admission();
    let (reporter, health) = tonic_health::server::health_reporter();
    reporter.set_service_status("test.Echo", ServingStatus::Serving).await;
    let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
    let address = listener.local_addr().expect("bound");
    let server = Server::builder().layer(layer(&admission)).add_service(health).add_service(Echo);
    tokio::spawn(server.serve_with_incoming(TcpIncoming::from(listener)));
    let endpoint = Endpoint::from_shared(format!("http://{address}")).expect("a URI");
    let channel = endpoint.connect().await.expect("connects");
    let mut probe = HealthClient::new(channel);
    let mut client = connect(address).await;

    let _full = admission.try_admit(Cost::host(ByteSize::mib(45))).expect("fits");
    for state in ["full", "critical", "closed"] {
        match state {
            "critical" => admission.set_level(Level::Critical),
            "closed" => admission.close(),
            _ => {}
        }
        echo(&mut client, "ebb").await.expect_err("all else is shed");
        let asked = HealthCheckRequest { service: "test.Echo".to_owned() };
        let check = tokio::time::timeout(PATIENCE, probe.check(asked.clone())).await;
        let answer = check.expect("it hangs").unwrap_or_else(|status| panic!("{state}: {status}"));
        assert_eq!(answer.into_inner().status, 1, "{state}: serving");
        let watch = tokio::time::timeout(PATIENCE, probe.watch(asked)).await;
        let stream = watch.expect("it hangs").unwrap_or_else(|status| panic!("{state}: {status}"));
        let first = tokio::time::timeout(PATIENCE, stream.into_inner().message()).await;
        let first = first.expect("it hangs").expect("no error").expect("the present state");
        assert_eq!(first.status, 1, "{state}: serving");
    }
}

#[tokio::test]
async fn a_refusal_in_trailers_only_ends_with_its_head() {
    use http_body::Body as _;
    let admission = admission();
    admission.close();
    let mut service = tower::Layer::layer(&layer(&admission), Echo);
    let request = http::Request::post("/test.Echo/Echo")
        .header("content-type", "application/grpc")
        .version(http::Version::HTTP_2)
        .body(Body::empty())
        .expect("valid");
    let answer = service.call(request).await.expect("infallible");
    assert!(answer.body().is_end_stream(), "HTTP/2 sends the head as the end");
    assert_eq!(answer.headers()["grpc-status"], "14");
    assert!(answer.into_body().collect().await.expect("no error").to_bytes().is_empty());
}
