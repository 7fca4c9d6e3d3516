//! Load reports: what a load balancer reads of each response, and when it may believe it.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::future::ready;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode, Version};
use http_body::Frame;
use http_body_util::{BodyExt, Empty, Full, StreamBody};
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, RequestBody, RequestPermit};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Admission, Budget, Cost};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::memory_process::forked;
use crate::polled::{cloneable, now};
use crate::support::{Tree, advance_until};

const COST: ByteSize = ByteSize::mib(10);
const HEADER: &str = "endpoint-load-metrics";
const METADATA: &str = "endpoint-load-metrics-bin";
const SECOND: Duration = Duration::from_secs(1);

type Answer = Response<Full<Bytes>>;
type Received = Request<RequestBody<Empty<Bytes>>>;

/// An admission that admits 50 MiB.
fn admission() -> Admission {
    let admission = Admission::new();
    correct(&admission, ByteSize::mib(100));
    admission
}

/// Admits half of the ceiling.
fn correct(admission: &Admission, ceiling: ByteSize) {
    admission.ledger(Budget::Host).set_measured(ByteSize::ZERO, ceiling);
}

fn layer(admission: &Admission) -> (MemoryLayer, Arc<ManualClock>) {
    let clock = Arc::new(ManualClock::new());
    let layer = MemoryLayer::new(admission.clone(), Cost::host(COST))
        .with_max_wait(Duration::ZERO)
        .clock(clock.clone());
    (layer.with_load_reports(), clock)
}

/// Calls a handler, and returns the head of the response.
fn call(
    layer: &MemoryLayer,
    request: Request<Empty<Bytes>>,
    mut handler: impl FnMut(Received) -> Answer,
) -> Response<()> {
    let handler = cloneable(move |request| ready(Ok::<_, Infallible>(handler(request))));
    let response = now(layer.layer(service_fn(handler)).call(request)).expect("infallible");
    response.map(drop)
}

fn get(layer: &MemoryLayer) -> Response<()> {
    call(layer, Request::new(Empty::new()), |_| Response::default())
}

/// Reads a report as Envoy reads text.
fn parsed(headers: &HeaderMap) -> BTreeMap<String, f64> {
    let mut values = headers.get_all(HEADER).iter();
    let value = values.next().expect("a report").to_str().expect("text");
    assert!(values.next().is_none(), "one report");
    let fields = value.strip_prefix("TEXT ").expect("a format").split(',').map(|field| {
        let (name, value) = field.trim().split_once(':').expect("a name and a value");
        let value: f64 = value.parse().expect("a number");
        assert!(value.is_finite(), "{name}");
        (name.to_owned(), value)
    });
    fields.collect()
}

fn report(layer: &MemoryLayer) -> BTreeMap<String, f64> {
    parsed(get(layer).headers())
}

/// Returns the weight that Envoy and gRPC give to an endpoint, with an error penalty of 1.
fn weight(report: &BTreeMap<String, f64>) -> f64 {
    let (rps, eps) = (report["rps_fractional"], report["eps"]);
    rps / (report["application_utilization"] + eps / rps)
}

#[test]
fn without_the_option_no_response_has_a_report() {
    let admission = admission();
    let layer = MemoryLayer::new(admission.clone(), Cost::host(COST));
    let response = get(&layer);
    assert!(response.headers().is_empty(), "{response:?}");
    let own = |_| Response::builder().header(HEADER, "own").body(Full::default()).expect("valid");
    let response = call(&layer, Request::new(Empty::new()), own);
    assert_eq!(response.headers()[HEADER], "own", "it is the handler's own concern");
}

#[test]
fn a_report_has_what_is_reserved_and_the_rates() {
    let admission = admission();
    let (layer, clock) = layer(&admission);
    let held = admission.try_admit(Cost::host(ByteSize::mib(30))).expect("fits");
    // 10 requests a second, of which two fail.
    for nth in 0..200 {
        clock.advance(SECOND / 10);
        let status = if nth % 5 == 0 { 500 } else { 200 };
        call(&layer, Request::new(Empty::new()), |_| {
            Response::builder().status(status).body(Full::default()).expect("valid")
        });
    }
    clock.advance(SECOND / 10);
    let report = report(&layer);
    assert!((report["rps_fractional"] - 10.0).abs() < 0.5, "{report:?}");
    assert!((report["eps"] - 2.0).abs() < 0.3, "{report:?}");
    // With the request itself: its permit is held until its response is sent.
    assert!((report["application_utilization"] - 0.8).abs() < 1e-6, "{report:?}");
    assert_eq!(report["named_metrics.host_utilization"], report["application_utilization"]);
    assert!(!report.contains_key("mem_utilization"), "nothing measures it: {report:?}");
    assert!(!report.contains_key("named_metrics.device0_utilization"), "no limit: {report:?}");
    drop(held);
}

/// Bug: an idle service reported 0, for which Envoy logs an error with each response.
#[test]
fn an_idle_service_reports_a_utilization_that_balancers_accept() {
    let admission = admission();
    let clock = Arc::new(ManualClock::new());
    let layer = MemoryLayer::new(admission, Cost::ZERO).clock(clock.clone());
    let layer = layer.with_load_reports();
    for _ in 0..20 {
        clock.advance(SECOND / 10);
        get(&layer);
    }
    let report = report(&layer);
    assert_eq!(report["named_metrics.host_utilization"], 0.0, "{report:?}");
    assert_eq!(report["application_utilization"], 0.01, "{report:?}");
}

#[test]
fn without_a_limit_there_is_no_utilization() {
    let (layer, _clock) = layer(&Admission::new());
    let report = report(&layer);
    assert_eq!(report.keys().collect::<Vec<_>>(), ["eps", "rps_fractional"]);
}

/// Rejections are fast and hold nothing. A balancer that took them for good service would send more
/// to the instance that has no room.
#[test]
fn a_service_that_sheds_says_so_in_the_rejection_itself_and_for_a_second_after_it() {
    let admission = admission();
    let (layer, clock) = layer(&admission);
    let held = admission.try_admit(Cost::host(ByteSize::mib(35))).expect("fits");
    let before = report(&layer);
    assert!(before["application_utilization"] < 1.0, "{before:?}");
    // At the same moment, so that the report is not too old.
    let more = admission.try_admit(Cost::host(ByteSize::mib(10))).expect("fits");
    let response = get(&layer);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    let shed = parsed(response.headers());
    assert!(shed["application_utilization"] >= 1.0, "{shed:?}");
    assert!(shed["named_metrics.host_utilization"] < 1.0, "only what is reserved: {shed:?}");
    drop(more);
    clock.advance(SECOND - Duration::from_millis(1));
    assert!(report(&layer)["application_utilization"] >= 1.0, "within the second");
    clock.advance(SECOND);
    let after = report(&layer);
    assert!((after["application_utilization"] - 0.9).abs() < 1e-6, "{after:?}");
    drop(held);
    admission.close();
    clock.advance(SECOND);
    let response = get(&layer);
    assert!(parsed(response.headers())["application_utilization"] >= 1.0, "it shuts down");
}

/// A balancer must not derive from fast rejections that the service can serve more.
#[test]
fn the_weight_of_a_service_that_sheds_is_at_most_what_it_serves() {
    for rejected in [1, 5, 9, 10] {
        let admission = admission();
        let (layer, clock) = layer(&admission);
        let fill = ByteSize::mib(45);
        let mut weights = Vec::new();
        // 10 requests in each tenth of a second, some of which are rejected.
        for _ in 0..100 {
            clock.advance(SECOND / 10);
            let held = admission.try_admit(Cost::host(fill)).expect("fits");
            let rejections: Vec<_> = (0..rejected).map(|_| get(&layer)).collect();
            let last = rejections.last().expect("some");
            assert_eq!(last.status(), StatusCode::SERVICE_UNAVAILABLE);
            weights.push(weight(&parsed(last.headers())));
            drop(held);
            (rejected..10).for_each(|_| assert_eq!(get(&layer).status(), StatusCode::OK));
        }
        let served = f64::from(100 - 10 * rejected);
        let (weight, most) = (weights.last().expect("some"), served.max(1.0) * 1.05);
        assert!(*weight <= most, "{rejected} of 10: {weight}");
    }
}

/// Bug: one rejection among many requests hardly changed the weight, even if it was for most of the
/// memory. A small instance then got more large requests than fit.
#[test]
fn a_service_that_rejects_large_requests_reports_the_memory_that_they_ask_for() {
    let admission = admission();
    let (layer, clock) = layer(&admission);
    // Of 21 requests one is rejected, and 45 of 255 MiB.
    for _ in 0..100 {
        clock.advance(SECOND / 10);
        let held = admission.try_admit(Cost::host(COST)).expect("fits");
        (0..20).for_each(|_| assert_eq!(get(&layer).status(), StatusCode::OK));
        admission.try_admit(Cost::host(ByteSize::mib(45))).expect_err("no room");
        drop(held);
    }
    let report = report(&layer);
    let demand = 1.0 + 45.0 / (21.0 * COST.as_f64() / ByteSize::mib(1).as_f64());
    assert!((report["application_utilization"] - demand).abs() < 0.02, "{demand}: {report:?}");
}

/// A handler may do with less than it asks for. That is no request that another instance gets.
#[test]
fn a_growth_that_is_refused_and_done_without_counts_as_full_and_no_more() {
    let admission = admission();
    let (layer, clock) = layer(&admission);
    let mut report = BTreeMap::new();
    for _ in 0..100 {
        clock.advance(SECOND / 10);
        let response = call(&layer, Request::new(Empty::new()), |request| {
            let permit = request.extensions().get::<RequestPermit>().expect("put there");
            (0..50).for_each(|_| assert!(permit.grow(ByteSize::mib(90)).is_err(), "too much now"));
            Response::default()
        });
        report = parsed(response.headers());
    }
    assert_eq!(report["application_utilization"], 1.0, "{report:?}");
    assert_eq!(report["eps"], 0.0);
}

#[test]
fn an_allowance_of_zero_is_full() {
    let admission = admission();
    correct(&admission, ByteSize::ZERO);
    let (layer, _clock) = layer(&admission);
    let response = get(&layer);
    let report = parsed(response.headers());
    assert!(report["named_metrics.host_utilization"] >= 1.0, "{report:?}");
    assert!(report["application_utilization"] >= 1.0, "{report:?}");
}

#[test]
fn the_report_replaces_one_of_the_handler_and_ignores_one_of_the_client() {
    let admission = admission();
    for grpc in [false, true] {
        let (layer, _clock) = layer(&admission);
        let mut request = Request::new(Empty::new());
        for name in [HEADER, METADATA] {
            request.headers_mut().insert(name, "TEXT eps:0".parse().expect("valid"));
        }
        let response = call(&layer, request, |request| {
            // As a proxy would, or an echo.
            let mut response = Response::new(Full::default());
            for name in [HEADER, METADATA] {
                response.headers_mut().append(name, request.headers()[name].clone());
                response.headers_mut().append(name, request.headers()[name].clone());
            }
            if grpc {
                let kind = "application/grpc".parse().expect("valid");
                response.headers_mut().insert("content-type", kind);
            }
            response
        });
        let headers = response.headers();
        if grpc {
            assert!(!headers.contains_key(HEADER), "{headers:?}");
            assert_eq!(headers.get_all(METADATA).iter().count(), 1, "{headers:?}");
            assert_ne!(headers[METADATA], "TEXT eps:0");
        } else {
            assert!(parsed(headers).contains_key("rps_fractional"));
            assert!(!headers.contains_key(METADATA), "Envoy would prefer it: {headers:?}");
        }
    }
}

fn grpc_request() -> Request<Empty<Bytes>> {
    let request = Request::post("/test.Echo/Echo").version(Version::HTTP_2);
    let request = request.header("content-type", "application/grpc");
    request.body(Empty::new()).expect("valid")
}

/// Returns the head of a gRPC response with these trailers, and the trailers that are sent.
fn trailers(
    layer: &MemoryLayer,
    kind: &'static str,
    status: &'static str,
) -> (HeaderMap, HeaderMap) {
    let handler = cloneable(move |_: Received| {
        let mut trailers = HeaderMap::new();
        trailers.insert("grpc-status", status.parse().expect("valid"));
        trailers.append(METADATA, "b3RoZXI=".parse().expect("valid"));
        trailers.append(METADATA, "b3RoZXI=".parse().expect("valid"));
        let frames = [Frame::data(Bytes::from("\0\0\0\0\0")), Frame::trailers(trailers)];
        let frames = frames.map(Ok::<_, Infallible>);
        let body = StreamBody::new(futures_util::stream::iter(frames));
        let response = Response::builder().header("content-type", kind).body(body);
        ready(Ok::<_, Infallible>(response.expect("valid")))
    });
    let response = now(layer.layer(service_fn(handler)).call(grpc_request())).expect("infallible");
    let (head, body) = response.into_parts();
    let body = now(body.collect()).expect("no error");
    (head.headers, body.trailers().cloned().expect("trailers"))
}

#[test]
fn a_grpc_response_has_the_report_in_its_trailers() {
    let admission = admission();
    let (layer, _clock) = layer(&admission);
    for kind in ["application/grpc", "application/grpc+proto", "application/grpc;charset=x"] {
        let (head, trailers) = trailers(&layer, kind, "0");
        assert!(!head.contains_key(HEADER) && !head.contains_key(METADATA), "{kind}: {head:?}");
        assert!(!trailers.contains_key(HEADER), "{kind}");
        let values: Vec<_> = trailers.get_all(METADATA).iter().collect();
        // Field 6, a double: of proto3's fields, zeros are missing.
        assert_eq!(values.len(), 1, "in place of the handler's: {values:?}");
        let value = values[0].to_str().expect("text");
        assert_eq!((value.len() % 4, value == "b3RoZXI="), (0, false), "{kind}: padded {value}");
    }
    let (head, _) = trailers(&layer, "application/grpc-web", "0");
    assert!(head[HEADER].to_str().expect("text").starts_with("TEXT "), "no gRPC of HTTP/2");
}

#[test]
fn a_rejected_grpc_call_has_the_report_in_its_only_head() {
    let admission = admission();
    let (layer, _clock) = layer(&admission);
    let held = admission.try_admit(Cost::host(ByteSize::mib(45))).expect("fits");
    let response = call(&layer, grpc_request(), |_| unreachable!("it is rejected"));
    assert_eq!(response.headers()["grpc-status"], "8");
    assert!(response.headers().contains_key(METADATA) && !response.headers().contains_key(HEADER));
    drop(held);
}

#[test]
fn failures_of_the_service_count_as_errors_and_those_of_clients_do_not() {
    for (status, is_error) in
        [(200, false), (404, false), (413, false), (408, false), (500, true), (503, true)]
    {
        let (layer, clock) = layer(&admission());
        let failing =
            |_: Received| Response::builder().status(status).body(Full::default()).expect("valid");
        call(&layer, Request::new(Empty::new()), failing);
        clock.advance(SECOND);
        let report = report(&layer);
        assert_eq!(report["eps"] > 0.0, is_error, "{status}: {report:?}");
        assert!(report["rps_fractional"] > 0.0, "all count: {report:?}");
    }
    for (status, is_error) in [("0", false), ("3", false), ("5", false), ("13", true), ("14", true)]
    {
        let (layer, clock) = layer(&admission());
        trailers(&layer, "application/grpc", status);
        clock.advance(SECOND);
        let report = report(&layer);
        assert_eq!(report["eps"] > 0.0, is_error, "{status}: {report:?}");
    }
}

/// A limit of 256 MiB, and a clock that stands still.
struct Bed {
    memory: Memory,
    clock: Arc<ManualClock>,
    tree: Tree,
    layer: MemoryLayer,
}

impl Bed {
    fn new() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        let layer = MemoryLayer::new(memory.admission().clone(), Cost::host(COST))
            .without_slow_start()
            .clock(clock.clone())
            .with_load_reports();
        Self { memory, clock, tree, layer }
    }

    /// Ticks until a report is as it should be.
    fn until(&self, what: &str, is_so: impl Fn(&BTreeMap<String, f64>) -> bool) {
        let step = Duration::from_millis(10);
        advance_until(&self.clock, step, what, || is_so(&self.health()));
    }

    /// Returns the report of an exempt request, which is answered under pressure too.
    fn health(&self) -> BTreeMap<String, f64> {
        let request = Request::get("/healthz").body(Empty::new()).expect("valid");
        parsed(call(&self.layer, request, |_| Response::default()).headers())
    }
}

#[test]
fn with_a_memory_the_report_follows_what_the_kernel_charges() {
    let bed = Bed::new();
    bed.tree.hold(64);
    bed.until("a quarter of the limit", |report| {
        report.get("mem_utilization").is_some_and(|part| (part - 0.25).abs() < 0.05)
    });
    bed.tree.hold(400);
    bed.until("more than the limit is 1", |report| report["mem_utilization"] == 1.0);
}

#[test]
fn with_a_memory_the_utilization_is_an_average() {
    let bed = Bed::new();
    bed.until("an average", |report| report["application_utilization"] < 0.05);
    let ledger = bed.memory.admission().ledger(Budget::Host);
    let half = ByteSize::new(ledger.allowance().get() / 2);
    let held = bed.memory.admission().try_admit(Cost::host(half)).expect("it fits");
    let first = bed.health()["application_utilization"];
    assert!(first < 0.3, "what is held for a moment says little: {first}");
    bed.until("a half", |report| (0.4..0.7).contains(&report["application_utilization"]));
    drop(held);
    bed.until("none", |report| report["application_utilization"] < 0.05);
}

/// Requests that wait are not answered yet: what is sent now would wait longer.
#[test]
fn while_requests_wait_the_service_is_full() {
    let bed = Bed::new();
    bed.until("an average", |report| report["application_utilization"] < 1.0);
    let ledger = bed.memory.admission().ledger(Budget::Host);
    let left = ledger.allowance().saturating_sub(ledger.reserved());
    let held = bed.memory.admission().try_admit(Cost::host(left)).expect("it fits");
    let handler = |_: Received| ready(Ok::<_, Infallible>(Answer::default()));
    let waiting = Box::pin(bed.layer.layer(service_fn(handler)).call(Request::new(Empty::new())));
    assert_eq!(bed.memory.admission().stats().waiting, 1);
    bed.until("full", |report| report["application_utilization"] >= 1.0);
    drop((waiting, held));
}

/// The bug to avoid: a lock that another thread of the parent held is held forever in the child.
#[test]
fn a_forked_child_answers_without_a_report() {
    let bed = Bed::new();
    assert!(get(&bed.layer).headers().contains_key(HEADER));
    let layer = bed.layer.clone();
    let code = forked(|| i32::from(get(&layer).headers().contains_key(HEADER)));
    assert_eq!(code, 0, "1 if it has one");
}

#[test]
fn a_shutdown_reports_a_full_service() {
    let bed = Bed::new();
    assert!(bed.memory.shutdown_blocking(SECOND).is_clean());
    let response = get(&bed.layer);
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(parsed(response.headers())["application_utilization"] >= 1.0);
}
