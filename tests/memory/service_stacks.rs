//! The layer in stacks with other layers, and with itself.
#![cfg(all(feature = "axum", feature = "tokio", target_os = "linux"))]

use std::convert::Infallible;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Extension;
use axum::routing::{any, post};
use axum::{BoxError, Router};
use bytes::Bytes;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderName, Request, Response, StatusCode};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full};
use hyper_util::rt::TokioIo;
use hyper_util::service::TowerToHyperService;
use lowtide::ByteSize;
use lowtide::service::{ContentLength, MemoryLayer, SharedPermit};
use test_fork::test;
use tower::{Layer as _, ServiceBuilder, ServiceExt as _, service_fn};
use tower_http::catch_panic::CatchPanicLayer;
use tower_http::cors::CorsLayer;
use tower_http::decompression::RequestDecompressionLayer;
use tower_http::limit::RequestBodyLimitLayer;
use tower_http::map_request_body::MapRequestBodyLayer;
use tower_http::metrics::InFlightRequestsLayer;
use tower_http::normalize_path::NormalizePathLayer;
use tower_http::request_id::{MakeRequestUuid, SetRequestIdLayer};
use tower_http::sensitive_headers::SetSensitiveHeadersLayer;
use tower_http::timeout::{
    RequestBodyDeadlineLayer, RequestBodyTimeoutLayer, ResponseBodyTimeoutLayer, TimeoutLayer,
};
use tower_http::trace::TraceLayer;

use crate::polled::poll;
use crate::service_waiting::Bed;

const LONG: Duration = Duration::from_secs(3600);

/// What a subscriber has written.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("not poisoned").write(bytes)
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

impl Log {
    fn count(&self, text: &str) -> usize {
        let bytes = self.0.lock().expect("not poisoned").clone();
        String::from_utf8(bytes).expect("text").matches(text).count()
    }
}

/// A body whose length no layer knows.
fn chunked(bytes: usize) -> Body {
    let piece = Ok::<_, Infallible>(Bytes::from(vec![1; bytes]));
    Body::from_stream(futures_util::stream::iter([piece]))
}

/// Runs a call in the runtime that layers with timeouts need.
fn run<F: Future>(call: F) -> F::Output {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_time().build();
    runtime.expect("a runtime").block_on(call)
}

/// meridian#809: each large or chunked body was rejected for ever, because the outer layer held the
/// slot for which the inner one waited.
#[test]
fn a_request_that_passes_two_layers_is_admitted_once() {
    const MB: usize = 1_000_000;
    let bed = Bed::new();
    let upload = || {
        let handler = async |Extension(permit): Extension<SharedPermit>, body: Bytes| {
            format!("{} {}", body.len(), permit.reserved().get())
        };
        Router::new().route("/upload", post(handler))
    };
    // Clones share the slow start of a route, in which the request waited for itself.
    let own = bed.memory.layer();
    let layer = || own.clone();
    let nested = Router::new().nest("/api", upload().layer(layer())).layer(layer());
    let buffered =
        ServiceBuilder::new().layer(layer()).layer(NormalizePathLayer::trim_trailing_slash());
    let stacks = [
        ("/upload", upload().layer(layer()).layer(layer())),
        ("/upload", upload().route_layer(layer()).layer(layer())),
        ("/api/upload", nested),
        ("/upload", upload().layer(layer()).layer(layer()).layer(layer())),
        ("/upload", upload().layer(layer()).layer(buffered)),
        ("/upload", upload().layer(layer()).layer(bed.memory.layer())),
    ];
    let log = Log::default();
    let writer = {
        let log = log.clone();
        move || log.clone()
    };
    let subscriber = tracing_subscriber::fmt().with_writer(writer).finish();
    let (mut served, mut sent) = (0, 0);
    tracing::subscriber::with_default(subscriber, || {
        for (path, stack) in stacks {
            for number in 0..32 {
                let request = Request::post(path);
                let request = if number % 2 == 0 {
                    request.header(CONTENT_LENGTH, MB).body(Body::from(vec![1; MB]))
                } else {
                    request.header(TRANSFER_ENCODING, "chunked").body(chunked(MB))
                };
                let mut call = Box::pin(stack.clone().oneshot(request.expect("a valid head")));
                let polled = (0..4).find_map(|_| match poll(&mut call) {
                    std::task::Poll::Ready(Ok(answer)) => Some(answer.status()),
                    std::task::Poll::Pending => None,
                });
                sent += 1;
                served += u32::from(polled == Some(StatusCode::OK));
            }
        }
    });
    println!("figure field.double.served {served} requests");
    assert_eq!(served, sent);
    assert_eq!(log.count("memory layer inside another one is ignored"), 1);
    let stats = bed.memory.admission().stats();
    assert_eq!((stats.held(), stats.admitted_total), (0, u64::from(sent)), "one for each");
}

/// The stacks with each layer of tower-http that touches requests, outside the memory layer. They
/// answer with the bytes that a request has reserved when its handler begins.
fn stacks(layer: &MemoryLayer<ContentLength>) -> Vec<(&'static str, Router)> {
    let app = || {
        let handler =
            async |Extension(permit): Extension<SharedPermit>| permit.reserved().get().to_string();
        Router::new().route("/", any(handler))
    };
    let memory = || layer.clone();
    macro_rules! around {
        ($($layer:expr),+ $(,)?) => {
            vec![$({
                let layer = ServiceBuilder::new().layer($layer).layer(memory());
                (stringify!($layer), app().layer(layer))
            }),+]
        };
    }
    let buffered = |_: Body| Full::new(Bytes::from_static(&[1; 1 << 20]));
    let mut stacks = around![
        tower::layer::util::Identity::new(),
        RequestBodyTimeoutLayer::new(LONG),
        RequestBodyDeadlineLayer::new(LONG),
        RequestDecompressionLayer::new(),
        RequestBodyLimitLayer::new(1 << 30),
        TimeoutLayer::with_status_code(StatusCode::GATEWAY_TIMEOUT, LONG),
        ResponseBodyTimeoutLayer::new(LONG),
        CorsLayer::permissive(),
        TraceLayer::new_for_http(),
        CatchPanicLayer::new(),
        InFlightRequestsLayer::pair().0,
        NormalizePathLayer::trim_trailing_slash(),
        SetRequestIdLayer::new(HeaderName::from_static("x-id"), MakeRequestUuid),
        SetSensitiveHeadersLayer::new([HeaderName::from_static("x-key")]),
        MapRequestBodyLayer::new(|body: Body| body.map_err(Into::<BoxError>::into).boxed_unsync()),
    ];
    stacks.extend(around![MapRequestBodyLayer::new(buffered)]);
    stacks
}

/// Returns the bytes that such a request reserves behind a stack.
fn reserved(stack: &Router, request: http::request::Builder, body: Body) -> ByteSize {
    let request = request.body(body).expect("a valid head");
    let answer = run(async {
        let answer = stack.clone().oneshot(request).await.expect("infallible");
        answer.into_body().collect().await.expect("whole").to_bytes()
    });
    let text = String::from_utf8(answer.to_vec()).expect("text");
    ByteSize::new(text.parse().unwrap_or_else(|_| panic!("no number: {text}")))
}

/// A request without a body reserved 4 MiB behind a layer whose body tells no length.
#[test]
fn a_request_without_a_body_reserves_little_behind_each_layer_of_tower_http() {
    let bed = Bed::new();
    let mut stacks = stacks(&bed.memory.layer());
    stacks.pop();
    let reserved = stacks.iter().map(|(name, stack)| {
        let of = |request| reserved(stack, request, Body::empty());
        (of(Request::get("/")).max(of(Request::delete("/").header(CONTENT_LENGTH, 0))), name)
    });
    let (largest, name) = reserved.max().expect("stacks");
    println!("figure field.bodiless.reserved {} KiB", largest.get() >> 10);
    assert!(largest <= ByteSize::kib(64), "{largest} behind {name}");
}

/// headroom#3284: what is decompressed outside the layer counted as no body.
#[test]
fn a_body_that_was_replaced_outside_is_not_taken_for_none() {
    let bed = Bed::new();
    for (name, stack) in &stacks(&bed.memory.layer().without_slow_start()) {
        let post = || Request::post("/").header(CONTENT_LENGTH, 1 << 20);
        let declared = reserved(stack, post(), Body::from(vec![1; 1 << 20]));
        assert!((ByteSize::mib(1)..=ByteSize::mib(4)).contains(&declared), "{declared}: {name}");
        let pieces = Request::post("/").header(TRANSFER_ENCODING, "chunked");
        let unknown = reserved(stack, pieces, chunked(1 << 20));
        assert!((ByteSize::mib(1)..=ByteSize::mib(4)).contains(&unknown), "{unknown}: {name}");
        if name.contains("Decompression") {
            // The header of an empty member; what follows is not read.
            let bomb = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 3, 0, 0, 0, 0, 0, 0, 0, 0, 0];
            let gzip = Request::post("/").header(CONTENT_ENCODING, "gzip");
            let gzip = gzip.header(CONTENT_LENGTH, bomb.len());
            let bomb = reserved(stack, gzip, Body::from(bomb.to_vec()));
            assert!(bomb >= ByteSize::mib(2), "{bomb}: {name}");
        }
    }
}

/// A body whose error is a boxed one did not compile in a task: see `ResponseError`. And
/// tower-http#554, #679: layers that need an empty body, which is the default, did not compile
/// outside the layer; see `stacks`.
#[test]
fn a_boxed_body_with_a_boxed_error_is_served_in_a_task() {
    type Answer = BoxBody<Bytes, BoxError>;
    let bed = Bed::new();
    let handler = |_| async {
        let body = Full::new(Bytes::from("boxed")).map_err(|never| match never {});
        Ok::<Response<Answer>, Infallible>(Response::new(body.boxed()))
    };
    let service = TowerToHyperService::new(bed.memory.layer().layer(service_fn(handler)));
    let text = run(async {
        let (client, server) = tokio::io::duplex(1 << 16);
        let server = tokio::spawn(async move {
            let http = hyper::server::conn::http1::Builder::new();
            http.serve_connection(TokioIo::new(server), service).await
        });
        let (mut client, connection) =
            hyper::client::conn::http1::handshake(TokioIo::new(client)).await.expect("connected");
        let connection = tokio::spawn(connection);
        let request = Request::get("/").body(Body::empty()).expect("a valid head");
        let answer = client.send_request(request).await.expect("answered");
        let text = answer.into_body().collect().await.expect("whole").to_bytes();
        drop(client);
        connection.await.expect("no panic").expect("closed");
        server.await.expect("no panic").expect("served");
        text
    });
    assert_eq!(text, "boxed");
}
