//! The memory of requests by route and by tenant: names that the program and that clients choose,
//! in metrics, JSON and the list of the largest requests.

use std::convert::Infallible;
use std::future::pending;
use std::hint::black_box;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::{any, get};
use http::{Method, Request, Response, StatusCode, Version};
use http_body_util::Empty;
use lowtide::admission::MemoryUsage;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::metrics::MetricsTier;
use lowtide::service::{Endpoints, MemoryLayer, Tenant};
use lowtide::{ByteSize, Memory};
use serde_json::Value;
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{now, poll, wait_once};
use crate::recorder;
use crate::support::{Tree, advance_until};

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;
const SECOND: Duration = Duration::from_secs(1);
/// More than any list of routes or tenants has.
const LISTED_MAX: usize = 65;

/// A memory with a limit of 1 GiB.
struct Bed {
    memory: Memory,
    layer: MemoryLayer,
    clock: Arc<ManualClock>,
    _tree: Tree,
}

impl Bed {
    fn new() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::gib(1)));
        let of_all: Arc<dyn Clock> = clock.clone();
        let builder = Memory::builder().clock(of_all).signals(tree.open());
        let builder = builder.device(DeviceChoice::None).metrics(MetricsTier::Detail);
        let memory = builder.start().expect("starts");
        Self { layer: memory.layer(), memory, clock, _tree: tree }
    }

    fn route(&self, method: &str, route: &str) -> MemoryUsage {
        let routes = self.memory.report().usage_by_route();
        let of = routes.iter().find(|of| of.method == method && of.name == route);
        of.unwrap_or_else(|| panic!("{method} {route} is not among {routes:?}")).clone()
    }

    fn tenant(&self, name: &str) -> MemoryUsage {
        let tenants = self.memory.report().usage_by_tenant();
        let of = tenants.iter().find(|of| of.name == name);
        of.unwrap_or_else(|| panic!("{name} is not among {tenants:?}")).clone()
    }

    fn json(&self, part: &str) -> Value {
        let endpoints = Endpoints::new(Some(self.memory.clone()));
        let request = Request::get(format!("/memory?with={part}")).body(()).expect("a request");
        let answer = endpoints.answer_request(&request).expect("one of its paths");
        serde_json::from_slice::<Value>(answer.body()).expect("JSON")[part].clone()
    }

    /// Calls a handler without a router, to its end. It answers with the status of the path.
    fn call(&self, method: &str, path: &str, tenant: Option<&str>) -> StatusCode {
        let handler = async |request: Request<_>| {
            drop(black_box(vec![7_u8; 128 * KIB]));
            let is_bad = request.uri().path().starts_with("/bad");
            let status = if is_bad { StatusCode::NOT_FOUND } else { StatusCode::OK };
            let mut answer = Response::new(Empty::new());
            *answer.status_mut() = status;
            Ok::<_, Infallible>(answer)
        };
        let mut service = self.layer.layer(service_fn(handler));
        let mut request = Request::builder().method(method).uri(path).body(Empty::new());
        if let (Some(tenant), Ok(request)) = (tenant, &mut request) {
            request.extensions_mut().insert(Tenant::new(tenant));
        }
        let call = service.call(request.expect("a valid head"));
        now(Box::pin(call)).expect("infallible").status()
    }
}

fn request(method: Method, path: &str, tenant: Option<&Tenant>) -> Request<Body> {
    let mut request = Request::new(Body::empty());
    *request.method_mut() = method;
    *request.uri_mut() = path.parse().expect("a path");
    if let Some(tenant) = tenant {
        request.extensions_mut().insert(tenant.clone());
    }
    request
}

/// Rounds: a request frees a few bytes of others, such as its head.
fn mib(bytes: ByteSize) -> u64 {
    (bytes.get() + ByteSize::kib(512).get()) / ByteSize::mib(1).get()
}

#[test]
fn a_pattern_of_axum_has_one_record_for_all_its_paths() {
    let bed = Bed::new();
    let user = async || {
        let held = black_box(vec![7_u8; 3 * MIB]);
        wait_once().await;
        drop(held);
        "ebb"
    };
    let mut app = Router::new().route("/users/{id}", get(user)).layer(bed.memory.layer());
    let acme = Tenant::new("acme");
    let mut calls = Vec::new();
    for path in ["/users/7", "/users/8", "/users/%0A"] {
        let mut call = Box::pin(app.call(request(Method::GET, path, Some(&acme))));
        assert!(poll(&mut call).is_pending());
        calls.push(call);
    }
    let routes = bed.memory.report().usage_by_route();
    assert_eq!(routes.len(), 1, "{routes:?}");
    let memory = bed.route("GET", "/users/{id}");
    assert_eq!((mib(memory.live), memory.requests_total, memory.mean_peak()), (9, 0, None));
    assert_eq!(mib(bed.tenant("acme").live), 9);
    for of in bed.memory.report().largest_requests() {
        assert_eq!((&*of.route, of.tenant.as_deref()), ("/users/{id}", Some("acme")));
    }
    for call in calls.drain(..) {
        drop(now(call));
    }
    let memory = bed.route("GET", "/users/{id}");
    assert_eq!((memory.live, memory.requests_total), (ByteSize::ZERO, 3), "{memory:?}");
    assert_eq!(mib(memory.live_peak), 9);
    assert_eq!(memory.mean_peak().map(mib), Some(3));
    let of_tenant = MemoryUsage { method: "", name: "acme".to_owned(), ..memory };
    assert_eq!(bed.tenant("acme"), of_tenant, "the same requests");
    // Paths without a route of the program, and an unknown method of a route, get no name.
    for (method, path) in [(Method::GET, "/wp-login.php"), (Method::POST, "/users/7")] {
        drop(now(Box::pin(app.call(request(method, path, None)))));
    }
    let method = Method::from_bytes(b"BREW").expect("a method");
    drop(now(Box::pin(app.call(request(method, "/users/7", None)))));
    let mut names: Vec<_> =
        bed.memory.report().usage_by_route().into_iter().map(|of| (of.method, of.name)).collect();
    names.sort();
    let expected = [
        ("GET", "/users/{id}"),
        ("POST", "/users/{id}"),
        ("other", "/users/{id}"),
        ("other", "other"),
    ];
    assert_eq!(names, expected.map(|(method, route)| (method, route.to_owned())));
}

#[test]
fn the_mean_claim_shows_what_the_route_has_learned() {
    let bed = Bed::new();
    for _ in 0..50 {
        assert_eq!(bed.call("GET", "/report/1", None), StatusCode::OK);
    }
    let report = bed.route("GET", "report");
    assert_eq!(report.requests_total, 50);
    let peak = report.mean_peak().expect("requests have ended");
    assert!((128 * KIB as u64..140 * KIB as u64).contains(&peak.get()), "{peak}");
    let tenants = bed.memory.report().usage_by_tenant();
    assert!(tenants.is_empty(), "none is named: {tenants:?}");
    let claim = report.mean_claim().expect("requests have ended");
    assert!(claim > peak.scaled(0.9) && claim < peak.scaled(1.1), "{claim} for {peak}");
}

#[test]
fn a_key_that_groups_routes_does_not_mix_their_records() {
    let bed = Bed::new();
    let layer = bed.memory.layer().with_route_key(|_| ());
    let handler = async |_| Ok::<_, Infallible>(Response::new(Empty::new()));
    let mut service = layer.layer(service_fn(handler));
    for path in ["/a", "/b", "/a", "/c", "/a"] {
        let request = Request::get(path).body(Empty::new()).expect("a valid head");
        drop(now(Box::pin(service.call(request))));
    }
    let requests = |route| bed.route("GET", route).requests_total;
    assert_eq!(["a", "b", "c"].map(requests), [3, 1, 1]);
}

#[test]
fn a_request_that_fails_or_is_dropped_leaves_no_live_bytes_and_no_name() {
    let bed = Bed::new();
    assert_eq!(bed.call("GET", "/bad/1", None), StatusCode::NOT_FOUND);
    let handler = async |_| {
        let _held = black_box(vec![7_u8; MIB]);
        pending::<Result<Response<Empty<_>>, Infallible>>().await
    };
    let mut service = bed.memory.layer().layer(service_fn(handler));
    let request = Request::get("/slow").body(Empty::new()).expect("a valid head");
    let mut call = Box::pin(service.call(request));
    assert!(poll(&mut call).is_pending());
    assert_eq!(mib(bed.route("other", "other").live), 1);
    drop(call);
    let other = bed.route("other", "other");
    assert_eq!((other.live, other.requests_total), (ByteSize::ZERO, 2));
    assert_eq!(bed.memory.report().usage_by_route().len(), 1);
}

#[test]
fn many_routes_and_tenants_stay_bounded_and_each_request_counts() {
    let bed = Bed::new();
    for nth in 0..500 {
        let path = format!("/{nth}/x");
        assert_eq!(bed.call("GET", &path, Some(&format!("tenant {nth}"))), StatusCode::OK);
    }
    // The layer keeps what it learns of 256 routes at most: these two share what it learns.
    let app = Router::new().route("/one/{id}", any(async || ()));
    let mut app = app.route("/two/{id}", any(async || ())).layer(bed.layer.clone());
    for path in ["/one/1", "/two/1", "/two/2"] {
        drop(now(Box::pin(app.call(request(Method::GET, path, None)))));
    }
    let requests = |route| bed.route("GET", route).requests_total;
    assert_eq!(["/one/{id}", "/two/{id}"].map(requests), [1, 2], "clients leave them a place");
    let (routes, tenants) =
        (bed.memory.report().usage_by_route(), bed.memory.report().usage_by_tenant());
    assert!(routes.len() <= LISTED_MAX, "{}", routes.len());
    assert_eq!(tenants.len(), 33);
    let sum = |all: &[MemoryUsage]| -> u64 { all.iter().map(|of| of.requests_total).sum() };
    assert_eq!((sum(&routes), sum(&tenants)), (503, 500));
    assert_eq!(bed.json("routes").as_array().map(Vec::len), Some(routes.len()));
    assert_eq!(bed.json("tenants").as_array().map(Vec::len), Some(tenants.len()));
}

/// tonic answers a method that it does not know with status 200.
#[test]
fn a_grpc_method_gets_a_name_when_a_call_succeeds() {
    let bed = Bed::new();
    let handler = async |request: Request<_>| {
        let is_unknown = request.uri().path() != "/tide.Tide/Ebb";
        let answer = Response::builder().header("grpc-status", if is_unknown { "12" } else { "0" });
        Ok::<_, Infallible>(answer.body(Empty::new()).expect("a valid head"))
    };
    let mut service = bed.layer.layer(service_fn(handler));
    for path in ["/a.B/C", "/tide.Tide/Ebb", "/a.B/D"] {
        let request = Request::post(path).version(Version::HTTP_2);
        let request = request.header("content-type", "application/grpc").body(Empty::new());
        drop(now(Box::pin(service.call(request.expect("a valid head")))));
    }
    let routes = bed.memory.report().usage_by_route();
    assert_eq!(routes.len(), 2, "{routes:?}");
    assert_eq!(bed.route("POST", "/tide.Tide/Ebb").requests_total, 1);
    assert_eq!(bed.route("other", "other").requests_total, 2);
}

/// Names that break out of a quoted label, a line, or a document.
const HOSTILE: [&str; 4] =
    ["\"} 1\nlowtide_fake 7\n", "\\", "</script><script>alert(1)</script>", "\r\0\u{202e}'&"];

#[test]
fn hostile_names_stay_text_in_metrics_json_and_page() {
    let bed = Bed::new();
    let long = "é\"\n".repeat(MIB / 4);
    for tenant in HOSTILE.into_iter().chain([&*long]) {
        assert_eq!(bed.call("GET", "/\"quoted\"", Some(tenant)), StatusCode::OK);
    }
    let path = "/a\"'<script>/{id}";
    let app = Router::new().route(path, get(async || ())).layer(bed.memory.layer());
    let call = app.clone().call(request(Method::GET, "/a%22'%3Cscript%3E/1", None));
    drop(now(Box::pin(call)));
    let builder = recorder::builder();
    let recorder = builder.install_recorder().expect("the first of this process");
    let of_tenants = |text: &str| text.matches("tenant_live_bytes{").count();
    advance_until(&bed.clock, SECOND, "all are published", || {
        of_tenants(&recorder.render()) == HOSTILE.len() + 1
    });
    let text = recorder.render();
    assert!(!text.lines().any(|line| line.starts_with("lowtide_fake")), "{text}");
    assert!(text.lines().all(|line| line.len() < 600), "names are short");
    let tenants = bed.json("tenants");
    let names: Vec<_> =
        tenants.as_array().expect("a list").iter().map(|of| &of["tenant"]).collect();
    for tenant in HOSTILE {
        assert!(names.contains(&&Value::from(tenant)), "{tenant:?}: {names:?}");
    }
    assert!(names.iter().all(|name| name.as_str().is_some_and(|name| name.len() <= 64)));
    // The page is the same for every request: it fetches names as JSON, and shows them as text.
    let endpoints = Endpoints::new(Some(bed.memory.clone()));
    let page = Request::get("/memory?format=html").body(()).expect("a request");
    let page = endpoints.answer_request(&page).expect("one of its paths");
    let page = page.map(|body| String::from_utf8(body).expect("UTF-8"));
    assert!(!page.body().contains("alert(1)"));
    let script = page.body().split("<script").nth(1).expect("one script");
    for unsafe_word in ["innerHTML", "outerHTML", "insertAdjacentHTML", "document.write", "eval("] {
        assert!(!script.contains(unsafe_word), "{unsafe_word}");
    }
}
