//! The tower layer: what a request books, for how long, and what one that is turned away is told.
//!
//! Over a real connection where the connection is what matters; else the service is called by
//! hand, and its futures and bodies are polled by hand.
#![cfg(feature = "service")]

use std::convert::Infallible;
use std::future::{Future, pending, ready};
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::TokioIo;
use lowtide::service::{
    ConnectionBody, Connections, DRAIN_MAX, Estimate, MemoryLayer, RequestBody, RequestPermit,
    ResponseBody, rejection,
};
use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Admission, Budget, Cost, Level, Priority, RejectReason, Rejected};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tower::layer::layer_fn;
use tower::{Layer, Service, ServiceBuilder, ServiceExt, service_fn};

use crate::polled::now;

const COST: ByteSize = ByteSize::mib(10);
const CEILING: ByteSize = ByteSize::mib(100);

/// The body of a test handler's answer.
type Body200 = Full<Bytes>;
type Asked = Request<Empty<Bytes>>;
type Received = Request<RequestBody<Empty<Bytes>>>;

/// A door with a ceiling of 100 MiB, 50 MiB of which may be booked.
fn admission() -> Admission {
    let admission = Admission::new();
    admission.ledger(Budget::Host).set_measured(ByteSize::ZERO, CEILING);
    admission
}

fn reserved(admission: &Admission) -> ByteSize {
    admission.ledger(Budget::Host).reserved()
}

fn layer(admission: &Admission) -> MemoryLayer {
    MemoryLayer::new(admission.clone(), |_: &http::request::Parts| Cost::host(COST))
}

fn asked() -> Asked {
    Request::new(Empty::new())
}

/// Polls once.
fn poll<F: Future>(future: Pin<&mut F>) -> Poll<F::Output> {
    future.poll(&mut Context::from_waker(Waker::noop()))
}

/// Returns `true` if a frame came at once.
fn next_frame<B: Body + Unpin>(body: &mut B) -> bool {
    let frame = Pin::new(body).poll_frame(&mut Context::from_waker(Waker::noop()));
    matches!(frame, Poll::Ready(Some(Ok(_))))
}

#[test]
fn an_admitted_request_holds_its_bytes_until_its_response_body_is_gone() {
    let admission = admission();
    let mut service = layer(&admission).layer(service_fn(|_: Received| {
        ready(Ok::<_, Infallible>(Response::new(Body200::from("hello"))))
    }));
    let future = service.call(asked());
    assert_eq!(reserved(&admission), COST, "booked in the call");
    let response = now(future).expect("no error");
    assert_eq!(reserved(&admission), COST, "the head does not end it");
    let mut body = response.into_body();
    assert!(next_frame(&mut body));
    assert!(body.is_end_stream());
    assert_eq!(reserved(&admission), COST, "nor does the last frame: it may not have gone out");
    drop(body);
    assert_eq!(reserved(&admission), ByteSize::ZERO);
    assert_eq!((admission.stats().admitted_total, admission.stats().held()), (1, 0));
}

#[test]
fn a_closure_gives_a_cost_alone_or_with_its_priority() {
    let head = |path| Request::builder().uri(path).body(()).expect("valid").into_parts().0;
    let cost = Cost::host(COST);
    let alone = move |_: &http::request::Parts| cost;
    let both = move |head: &http::request::Parts| match head.uri.path() {
        "/report" => (cost, Priority::Low),
        _ => (Cost::ZERO, Priority::Exempt),
    };
    assert_eq!(alone.estimate(&head("/report")), (cost, Priority::Normal));
    assert_eq!(both.estimate(&head("/report")), (cost, Priority::Low));
    assert_eq!(both.estimate(&head("/")), (Cost::ZERO, Priority::Exempt));
}

#[test]
fn a_response_that_is_dropped_half_way_gives_its_bytes_back() {
    let admission = admission();
    let mut stuck = layer(&admission)
        .layer(service_fn(|_: Received| pending::<Result<Response<Body200>, Infallible>>()));
    let mut future = Box::pin(stuck.call(asked()));
    assert!(poll(future.as_mut()).is_pending());
    assert_eq!(reserved(&admission), COST);
    drop(future);
    assert_eq!(reserved(&admission), ByteSize::ZERO, "the future");

    let future = stuck.call(asked());
    drop(future);
    assert_eq!(reserved(&admission), ByteSize::ZERO, "a future that was never polled");

    let endless = |_: Received| {
        let frames = futures_util::stream::repeat_with(|| {
            Ok::<_, Infallible>(Frame::data(Bytes::from("x")))
        });
        ready(Ok::<_, Infallible>(Response::new(StreamBody::new(frames))))
    };
    let mut endless = layer(&admission).layer(service_fn(endless));
    let mut body = now(endless.call(asked())).expect("no error").into_body();
    assert!(next_frame(&mut body));
    assert_eq!(reserved(&admission), COST);
    drop(body);
    assert_eq!(reserved(&admission), ByteSize::ZERO, "a body that never ends");
}

#[test]
fn an_error_and_a_panic_of_the_inner_service_give_the_bytes_back() {
    let admission = admission();
    let mut failing = layer(&admission)
        .layer(service_fn(|_: Received| ready(Err::<Response<Body200>, _>("the inner error"))));
    let failed = now(failing.call(asked())).map(drop);
    assert_eq!(failed, Err("the inner error"), "its type is kept");
    assert_eq!(reserved(&admission), ByteSize::ZERO);

    let mut panics = layer(&admission).layer(service_fn(|_: Received| async {
        if true {
            panic!("planted");
        }
        Ok::<_, Infallible>(Response::new(Body200::default()))
    }));
    let future = panics.call(asked());
    assert_eq!(reserved(&admission), COST);
    let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| now(future).map(drop)));
    assert!(caught.is_err());
    assert_eq!(reserved(&admission), ByteSize::ZERO, "a panic in the future");

    let mut panics = layer(&admission).layer(service_fn(|_: Received| {
        if true {
            panic!("planted");
        }
        ready(Ok::<_, Infallible>(Response::new(Body200::default())))
    }));
    let call = std::panic::AssertUnwindSafe(|| drop(panics.call(asked())));
    assert!(std::panic::catch_unwind(call).is_err());
    assert_eq!(reserved(&admission), ByteSize::ZERO, "a panic in the call");
}

/// Counts what it is asked.
#[derive(Clone, Default)]
struct Counting {
    readied: Arc<AtomicU64>,
    called: Arc<AtomicU64>,
}

impl Service<Received> for Counting {
    type Response = Response<Body200>;
    type Error = Infallible;
    type Future = std::future::Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        self.readied.fetch_add(1, Ordering::SeqCst);
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, _: Received) -> Self::Future {
        self.called.fetch_add(1, Ordering::SeqCst);
        ready(Ok(Response::new(Body200::default())))
    }
}

#[test]
fn readiness_is_the_inner_services_and_books_nothing() {
    let (admission, inner) = (admission(), Counting::default());
    let mut service = layer(&admission).layer(inner.clone());
    let mut connections: Vec<_> = (0..100).map(|_| service.clone()).collect();
    for connection in &mut connections {
        assert!(now(connection.ready()).is_ok());
    }
    assert_eq!(inner.readied.load(Ordering::SeqCst), 100);
    assert_eq!(reserved(&admission), ByteSize::ZERO, "idle connections hold nothing");

    admission.close();
    assert!(now(service.ready()).is_ok(), "ready, to refuse");
    let response = now(service.call(asked())).expect("no error");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(inner.called.load(Ordering::SeqCst), 0, "it is not reached");
}

fn refused(
    admission: &Admission,
    cost: Cost,
    priority: Priority,
) -> (Response<()>, serde_json::Value) {
    struct Fixed(Cost, Priority);
    impl Estimate for Fixed {
        fn estimate(&self, _: &http::request::Parts) -> (Cost, Priority) {
            (self.0, self.1)
        }
    }
    let inner = Counting::default();
    let mut service =
        MemoryLayer::new(admission.clone(), Fixed(cost, priority)).layer(inner.clone());
    let response = now(service.call(asked())).expect("no error");
    assert_eq!(inner.called.load(Ordering::SeqCst), 0, "it is not reached");
    let (head, body) = response.into_parts();
    let length = body.size_hint().exact();
    let bytes = now(body.collect()).expect("no error").to_bytes();
    assert_eq!(length, Some(bytes.len() as u64));
    assert_eq!(head.headers["content-type"], "application/problem+json");
    let problem = serde_json::from_slice(&bytes).expect("JSON");
    (Response::from_parts(head, ()), problem)
}

fn retry_after(response: &Response<()>) -> Option<u64> {
    response.headers().get("retry-after").and_then(|value| value.to_str().ok()?.parse().ok())
}

#[test]
fn what_does_not_fit_now_is_a_503_that_says_when_to_come_again_and_why() {
    let admission = admission();
    let _held = admission.try_admit(Cost::host(ByteSize::mib(45))).expect("fits");
    let (response, problem) = refused(&admission, Cost::host(COST), Priority::Normal);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(retry_after(&response).is_some_and(|seconds| (1..=60).contains(&seconds)));
    assert_eq!((&problem["status"], &problem["reason"]), (&503.into(), &"full".into()));
    assert_eq!(problem["detail"], "the request needs more memory than is free now");
    assert_eq!(reserved(&admission), ByteSize::mib(45), "nothing was booked for it");
    assert_eq!(admission.stats().rejected_total(RejectReason::Full), 1);
}

#[test]
fn what_can_never_fit_is_a_413_without_a_time_to_come_again() {
    let admission = admission();
    let larger = CEILING.saturating_add(ByteSize::new(1));
    let (response, problem) = refused(&admission, Cost::host(larger), Priority::Normal);
    assert_eq!(response.status(), StatusCode::PAYLOAD_TOO_LARGE);
    assert_eq!(retry_after(&response), None);
    assert_eq!((&problem["status"], &problem["reason"]), (&413.into(), &"too_large".into()));
    assert_eq!(problem["detail"], "the request needs more memory than can ever be free");
}

#[test]
fn pressure_and_the_end_of_the_service_are_503s_of_their_own_reasons() {
    let admission = admission();
    admission.set_level(Level::High);
    let (response, problem) = refused(&admission, Cost::host(COST), Priority::Low);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(retry_after(&response).is_some_and(|seconds| seconds >= 1));
    assert_eq!(problem["reason"], "pressure");
    assert_eq!(problem["detail"], "memory is short now");

    admission.close();
    let (response, problem) = refused(&admission, Cost::host(COST), Priority::Normal);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((retry_after(&response), &problem["reason"]), (Some(1), &"shutting_down".into()));
    let parts = Duration::from_millis(1_001);
    let (budget, asked, reserved, allowance) = (Budget::Host, COST, COST, COST);
    let full = Rejected::Full { budget, asked, reserved, allowance, retry_after: parts };
    assert_eq!(rejection(&full).headers()["retry-after"], "2", "rounded up");
}

#[test]
fn a_handler_books_more_and_gives_back_through_the_shared_permit() {
    let admission = admission();
    let door = admission.clone();
    let handler = move |request: Received| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        assert_eq!(permit.grow(ByteSize::mib(20)), Ok(()));
        assert_eq!(reserved(&door), ByteSize::mib(30));
        let full = permit.grow(ByteSize::mib(40));
        assert!(matches!(full, Err(Rejected::Full { .. })), "{full:?}");
        let never = permit.grow(ByteSize::mib(80));
        assert!(matches!(never, Err(Rejected::TooLarge { .. })), "{never:?}");
        assert_eq!(reserved(&door), ByteSize::mib(30), "what was booked stays booked");
        permit.shrink(ByteSize::mib(25));
        assert_eq!(reserved(&door), ByteSize::mib(5));
        permit.shrink(ByteSize::gib(1));
        assert_eq!(reserved(&door), ByteSize::ZERO, "no more than was booked");
        permit.grow(ByteSize::mib(7)).expect("fits");
        ready(Ok::<_, Infallible>(Response::new(Body200::default())))
    };
    let response = now(layer(&admission).layer(service_fn(handler)).call(asked()));
    assert_eq!(reserved(&admission), ByteSize::mib(7));
    drop(response);
    assert_eq!(reserved(&admission), ByteSize::ZERO, "what was grown goes as well");
}

#[test]
fn a_permit_that_a_handler_keeps_for_work_behind_the_answer_keeps_its_bytes() {
    let admission = admission();
    let kept = Arc::new(std::sync::Mutex::new(None));
    let place = Arc::clone(&kept);
    let handler = move |request: Received| {
        *place.lock().unwrap() = request.extensions().get::<RequestPermit>().cloned();
        ready(Ok::<_, Infallible>(Response::new(Body200::default())))
    };
    drop(now(layer(&admission).layer(service_fn(handler)).call(asked())));
    assert_eq!(reserved(&admission), COST, "the work goes on");
    drop(kept.lock().unwrap().take());
    assert_eq!(reserved(&admission), ByteSize::ZERO);
}

/// A body that gives frames of this size for ever, or waits; counts what was read of it.
struct Upload {
    frame: Bytes,
    left: u64,
    /// `true` if its length is known from the head.
    announced: bool,
    read: Arc<AtomicU64>,
}

impl Body for Upload {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        self.left -= 1;
        self.read.fetch_add(self.frame.len() as u64, Ordering::SeqCst);
        Poll::Ready(Some(Ok(Frame::data(self.frame.clone()))))
    }

    fn size_hint(&self) -> SizeHint {
        let whole = self.left * self.frame.len() as u64;
        if self.announced { SizeHint::with_exact(whole) } else { SizeHint::default() }
    }
}

/// An upload of so many MiB that is turned away: how many bytes of it are read.
fn read_of_refused(head: http::request::Builder, mib: u64, announced: bool) -> u64 {
    let admission = admission();
    admission.close();
    let read = Arc::new(AtomicU64::new(0));
    let frame = vec![0; 1 << 20].into();
    let upload = Upload { frame, left: mib, announced, read: Arc::clone(&read) };
    let request = head.body(upload).expect("a valid head");
    let never = service_fn(|_: Request<RequestBody<Upload>>| {
        pending::<Result<Response<Body200>, Infallible>>()
    });
    let mut service = layer(&admission).layer(never);
    let response = now(service.call(request)).expect("no error");
    let read = read.load(Ordering::SeqCst);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let text = now(response.into_body().collect()).expect("no error").to_bytes();
    assert!(text.starts_with(b"{"), "the answer is whole");
    read
}

#[test]
fn a_refused_upload_is_read_away_before_the_answer_up_to_a_bound() {
    assert_eq!(DRAIN_MAX, ByteSize::mib(64));
    for (mib, announced) in [(0, true), (3, false), (64, false), (64, true)] {
        assert_eq!(read_of_refused(Request::post("/"), mib, announced), mib << 20, "all of it");
    }
    let read = read_of_refused(Request::post("/"), 1000, false);
    assert_eq!(read, DRAIN_MAX.get(), "no more than that");
    assert_eq!(read_of_refused(Request::post("/"), 65, true), 0, "it would not be enough");
}

#[test]
fn nothing_is_read_of_a_client_that_waits_for_leave_nor_of_a_stream_of_its_own() {
    let waits = Request::post("/").header("expect", "100-Continue");
    assert_eq!(read_of_refused(waits, 3, true), 0);
    for version in [http::Version::HTTP_2, http::Version::HTTP_3] {
        assert_eq!(read_of_refused(Request::post("/").version(version), 3, true), 0, "{version:?}");
    }
}

/// A body of which nothing comes until it fails.
struct Broken {
    polls: u32,
}

impl Body for Broken {
    type Data = Bytes;
    type Error = &'static str;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, &'static str>>> {
        self.polls += 1;
        if self.polls < 3 { Poll::Pending } else { Poll::Ready(Some(Err("broken"))) }
    }
}

#[test]
fn a_refused_upload_that_breaks_off_is_answered_and_one_that_pauses_is_waited_for() {
    let admission = admission();
    admission.close();
    let never = service_fn(|_: Request<RequestBody<Broken>>| {
        pending::<Result<Response<Body200>, Infallible>>()
    });
    let mut service = layer(&admission).layer(never);
    let mut answer = pin!(service.call(Request::new(Broken { polls: 0 })));
    assert!(poll(answer.as_mut()).is_pending());
    assert!(poll(answer.as_mut()).is_pending());
    assert!(poll(answer.as_mut()).is_ready());
}

/// Answers a preflight itself. Has the bounds of `tower_http`'s `CorsLayer`, `TimeoutLayer` and
/// `ValidateRequestHeaderLayer`: nothing of the request's body, `Default` of the response's.
#[derive(Clone)]
struct Preflight<S>(S);

impl<S, Q, R> Service<Request<Q>> for Preflight<S>
where
    S: Service<Request<Q>, Response = Response<R>, Future: Send + 'static>,
    R: Default + Send + 'static,
    S::Error: Send + 'static,
{
    type Response = Response<R>;
    type Error = S::Error;
    type Future = Pin<Box<dyn Future<Output = Result<Response<R>, S::Error>> + Send>>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.0.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        if request.method() == http::Method::OPTIONS {
            return Box::pin(ready(Ok(Response::default())));
        }
        Box::pin(self.0.call(request))
    }
}

/// tower-http#554, #679: the body was no `Default`, so such a stack did not compile.
#[test]
fn layers_that_answer_with_an_empty_body_stand_on_both_sides_of_the_layer() {
    let admission = admission();
    let stack = ServiceBuilder::new()
        .layer(layer_fn(Preflight))
        .layer(layer(&admission))
        .layer(layer_fn(Preflight));
    let app = axum::Router::new().route("/", axum::routing::get(async || "hello")).layer(stack);
    let ask = |method: http::Method| {
        let request = Request::builder().method(method).uri("/").body(axum::body::Body::empty());
        let answer = now(app.clone().oneshot(request.expect("valid"))).expect("no error");
        now(answer.into_body().collect()).expect("no error").to_bytes()
    };
    assert_eq!(ask(http::Method::OPTIONS), "");
    assert_eq!(ask(http::Method::GET), "hello");
    assert_eq!(reserved(&admission), ByteSize::ZERO);
    let empty = ResponseBody::<Body200>::default();
    assert!(empty.is_end_stream() && empty.size_hint().exact() == Some(0));
}

/// A handler whose body has a boxed error did not compile in a spawned task ("implementation of
/// `From` is not general enough").
#[tokio::test]
async fn a_body_with_a_boxed_error_is_served_in_a_spawned_task() {
    type Boxed = BoxBody<Bytes, BoxError>;
    let admission = admission();
    let handler = service_fn(|request: Request<RequestBody<ConnectionBody<Incoming>>>| {
        let body = match request.uri().path() {
            "/" => Full::from("hello").map_err(|never| match never {}).boxed(),
            _ => {
                let broken = [Err::<Frame<Bytes>, _>(BoxError::from("planted"))];
                BodyExt::boxed(StreamBody::new(futures_util::stream::iter(broken)))
            }
        };
        ready(Ok::<_, Infallible>(Response::<Boxed>::new(body)))
    });
    let app = layer(&admission).layer(handler);
    let connections = Connections::new(&admission, 1);
    for (path, end, fails) in [("/", "hello", None), ("/broken", "", Some("planted"))] {
        let connection = connections.open().expect("a place");
        let (mut client, server) = tokio::io::duplex(1 << 10);
        let app = connection.service(app.clone());
        let service = hyper::service::service_fn(move |request| app.clone().oneshot(request));
        let served = http1::Builder::new().serve_connection(TokioIo::new(server), service);
        let served = tokio::spawn(async move {
            tokio::select! { ended = served => ended, () = connection.closed() => Ok(()) }
        });
        let head = format!("GET {path} HTTP/1.1\r\nhost: a\r\nconnection: close\r\n\r\n");
        client.write_all(head.as_bytes()).await.expect("sent");
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.expect("read");
        assert!(answer.ends_with(end), "{answer:?}");
        let error = served.await.expect("no panic").err();
        let error = error.as_ref().and_then(std::error::Error::source).map(ToString::to_string);
        assert_eq!(error.as_deref(), fails);
    }
}
