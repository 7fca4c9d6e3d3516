//! The layer in stacks with other layers, and with itself.
#![cfg(all(feature = "axum", feature = "tokio", target_os = "linux"))]

use std::convert::Infallible;
use std::io::Write as _;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::Extension;
use axum::routing::{any, post};
use axum::{BoxError, Router};
use bytes::Bytes;
use flate2::Compression;
use flate2::write::GzEncoder;
use http::header::{CONTENT_ENCODING, CONTENT_LENGTH, CONTENT_TYPE, TRANSFER_ENCODING};
use http::{HeaderName, Request, Response, StatusCode};
use http_body_util::{BodyExt as _, Full};
use lowtide::ByteSize;
use lowtide::service::{MemoryLayer, RequestPermit};
use test_fork::test;
use tower::{Service, ServiceBuilder, ServiceExt as _};
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

/// The header of an answer with the bytes that its request had reserved.
const RESERVED: HeaderName = HeaderName::from_static("x-reserved");
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
        let handler = async |Extension(permit): Extension<RequestPermit>, body: Bytes| {
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

/// Where the outer layer exempts a route, the inner one passed its requests too, and no layer
/// reserved anything.
#[test]
fn a_request_that_the_outer_layer_exempts_is_admitted_by_the_inner_one() {
    let bed = Bed::new();
    let handler =
        async |Extension(permit): Extension<RequestPermit>| permit.reserved().get().to_string();
    let outer = bed.memory.layer().exempt(|head| head.uri.path() == "/");
    let app = Router::new().route("/", post(handler)).layer(bed.memory.layer()).layer(outer);
    let request = Request::post("/").header(CONTENT_LENGTH, 1 << 20);
    let request = request.body(Body::from(vec![1; 1 << 20])).expect("a valid head");
    let answer = run(async {
        let answer = app.oneshot(request).await.expect("infallible");
        answer.into_body().collect().await.expect("whole").to_bytes()
    });
    let reserved: u64 = std::str::from_utf8(&answer).expect("text").parse().expect("a number");
    assert!(reserved >= 1 << 20, "{reserved}");
}

/// The stacks with each layer of tower-http that touches requests, outside the memory layer. They
/// answer with the bytes that a request has reserved when its handler begins.
fn stacks(layer: &MemoryLayer) -> Vec<(&'static str, Router)> {
    let app = || {
        let handler = async |Extension(permit): Extension<RequestPermit>| {
            [(RESERVED, permit.reserved().get().to_string())]
        };
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

/// Returns the bytes that such a request reserves behind a stack, or 0 if that answers it.
fn reserved(stack: &Router, request: http::request::Builder, body: Body) -> ByteSize {
    let request = request.body(body).expect("a valid head");
    let answer = run(stack.clone().oneshot(request)).expect("infallible");
    assert_eq!(answer.status(), StatusCode::OK);
    answer.headers().get(RESERVED).map_or(ByteSize::ZERO, |bytes| {
        ByteSize::new(bytes.to_str().expect("text").parse().expect("a number"))
    })
}

/// A request without a body reserved 4 MiB behind a layer whose body tells no length.
#[test]
fn a_request_without_a_body_reserves_little_behind_each_layer_of_tower_http() {
    let bed = Bed::new();
    let mut stacks = stacks(&bed.memory.layer());
    stacks.pop();
    let reserved = stacks.iter().map(|(name, stack)| {
        let of = |request| reserved(stack, request, Body::empty());
        let delete = Request::delete("/").header(CONTENT_LENGTH, 0);
        let requests = [Request::get("/"), delete, Request::head("/"), Request::options("/")];
        (requests.map(of).into_iter().max(), name)
    });
    let (largest, name) = reserved.max().expect("stacks");
    let largest = largest.expect("requests");
    assert!(largest > ByteSize::ZERO);
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

/// Sends as many requests as there are, at once, and returns the answers.
async fn ask<S>(stack: S, requests: Vec<Request<Body>>) -> Vec<StatusCode>
where
    S: Service<Request<Body>, Response = Response<Body>, Future: Send> + Clone + Send + 'static,
    S::Error: std::fmt::Debug,
{
    let calls = requests.into_iter().map(|request| stack.clone().oneshot(request));
    let answers = futures_util::future::join_all(calls).await;
    answers.into_iter().map(|answer| answer.expect("answered").status()).collect()
}

fn small(count: usize) -> Vec<Request<Body>> {
    let request = |_| Request::post("/").body(Body::from("small")).expect("a valid head");
    (0..count).map(request).collect()
}

fn reader(layer: &MemoryLayer) -> Router {
    let handler = async |body: Bytes| body.len().to_string();
    Router::new().route("/", post(handler)).layer(layer.clone())
}

#[test]
fn each_request_is_admitted_once_behind_queues_and_limits() {
    let bed = Bed::new();
    let app = || reader(&bed.memory.layer());
    let answers = run(async {
        let mut answers = ask(app(), small(16)).await;
        answers.extend(ask(ServiceBuilder::new().buffer(4).service(app()), small(16)).await);
        let limited = ServiceBuilder::new().load_shed().concurrency_limit(16).service(app());
        answers.extend(ask(limited, small(16)).await);
        answers
    });
    assert_eq!(answers, [StatusCode::OK; 48]);
    let stats = bed.stats();
    assert_eq!((stats.held(), stats.admitted_total), (0, 48));
}

#[test]
fn one_layer_serves_in_runtimes_of_each_kind() {
    let bed = Bed::new();
    let app = reader(&bed.memory.layer());
    let threads = || {
        let runtime = tokio::runtime::Builder::new_multi_thread().worker_threads(1).build();
        runtime.expect("a runtime")
    };
    let runtimes = [threads(), threads()];
    let tasks = runtimes.each_ref().map(|runtime| runtime.spawn(ask(app.clone(), small(16))));
    let local = tokio::task::LocalSet::new();
    let mut answers = run(local.run_until(async {
        tokio::task::spawn_local(ask(app.clone(), small(16))).await.expect("no panic")
    }));
    for (runtime, task) in runtimes.iter().zip(tasks) {
        answers.extend(runtime.block_on(task).expect("no panic"));
    }
    assert_eq!(answers, [StatusCode::OK; 48]);
    assert_eq!((bed.stats().held(), bed.stats().admitted_total), (0, 48));
}

#[test]
fn bombs_that_are_unpacked_inside_the_layer_are_refused_and_harm_nobody() {
    let bed = Bed::new();
    let json = async |axum::Json(value): axum::Json<serde_json::Value>| value.to_string();
    let app = reader(&bed.memory.layer()).route("/json", post(json));
    let app = app.layer(RequestDecompressionLayer::new()).layer(bed.memory.layer());
    let mut gzip = GzEncoder::new(Vec::new(), Compression::best());
    for _ in 0..64 {
        gzip.write_all(&vec![0; 1 << 20]).expect("into memory");
    }
    let gzip = gzip.finish().expect("into memory");
    assert!(gzip.len() < 1 << 17);
    let bomb = Request::post("/").header(CONTENT_ENCODING, "gzip");
    let bomb = bomb.header(CONTENT_LENGTH, gzip.len()).body(Body::from(gzip));
    let nested = Request::post("/json").header(CONTENT_TYPE, "application/json");
    let nested = nested.body(Body::from("[".repeat(1 << 20)));
    let bombs = vec![bomb.expect("a valid head"), nested.expect("a valid head")];
    let answers = run(ask(app.clone(), bombs));
    assert_eq!(answers, [StatusCode::PAYLOAD_TOO_LARGE, StatusCode::BAD_REQUEST]);
    assert_eq!(run(ask(app, small(1))), [StatusCode::OK]);
    assert_eq!(bed.stats().held(), 0);
}

#[test]
fn a_nested_route_has_its_whole_pattern_as_its_name() {
    let bed = Bed::new();
    let users = Router::new().route("/users/{id}", any(async || "ebb"));
    let app = Router::new().nest("/api", users).layer(bed.memory.layer());
    let request = |path: &str| Request::get(path).body(Body::empty()).expect("a valid head");
    let answers = run(ask(app, vec![request("/api/users/7"), request("/api/users/8")]));
    assert_eq!(answers, [StatusCode::OK; 2]);
    let routes = bed.memory.report().usage_by_route();
    let names: Vec<_> = routes.iter().map(|usage| (usage.method, &*usage.name)).collect();
    assert_eq!(names, [("GET", "/api/users/{id}")]);
}

/// kugelpos#201: whether rejections had the headers of CORS depended on the order of the layers.
#[test]
fn a_layer_outside_adds_its_headers_to_rejections_and_one_inside_does_not() {
    let bed = Bed::new();
    let full = bed.fill();
    let app = Router::new().route("/", post(async || "served"));
    let layer = bed.memory.layer().with_max_wait(Duration::ZERO);
    let inside = app.clone().layer(CorsLayer::permissive()).layer(layer.clone());
    let outside = app.layer(layer).layer(CorsLayer::permissive());
    for (stack, has_header) in [(inside, false), (outside, true)] {
        let request = Request::post("/").body(Body::from("tides")).expect("a valid head");
        let answer = run(stack.oneshot(request)).expect("infallible");
        assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
        let origin = answer.headers().contains_key("access-control-allow-origin");
        assert_eq!(origin, has_header);
    }
    drop(full);
}
