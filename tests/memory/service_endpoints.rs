//! The endpoints: what they answer with a `Memory`, while it ends, and without one.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::future::ready;
use std::pin::pin;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use axum::{Router, body::Body, serve::ListenerExt as _};
use bytes::Bytes;
use futures_util::stream::pending;
use http::{Request, Response, StatusCode};
use http_body_util::Empty;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::{DeviceChoice, ExhaustionPolicy};
use lowtide::device::{Contents, Region, SleepOptions};
use lowtide::service::{Endpoints, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Cost, UnloadReason};
use serde_json::{Value, json};

use crate::polled::poll;
use crate::support::{Tree, advance_until, until_both_threads, until_no_threads};
use test_fork::test;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tower::{Layer, Service, service_fn};

const SOON: Duration = Duration::from_secs(5);
const TICK: Duration = Duration::from_millis(250);

fn start(clock: &Arc<ManualClock>, tree: &Tree) -> Memory {
    start_with(clock, tree, ExhaustionPolicy::Report)
}

fn start_with(clock: &Arc<ManualClock>, tree: &Tree, policy: ExhaustionPolicy) -> Memory {
    let clock: Arc<dyn Clock> = clock.clone();
    let builder = Memory::builder().clock(clock).signals(tree.open()).device(DeviceChoice::Host);
    let builder = builder.device_limit(ByteSize::mib(16)).exhaustion_policy(policy);
    builder.start().expect("starts")
}

fn get(endpoints: &Endpoints, path: &str) -> Response<String> {
    let response = endpoints.answer(path).unwrap_or_else(|| panic!("{path} is not answered"));
    assert_eq!(response.headers()["cache-control"], "no-store", "{path}");
    assert!(response.body().ends_with('\n'), "{path}");
    response
}

fn get_json(endpoints: &Endpoints, path: &str) -> (StatusCode, Value) {
    let response = get(endpoints, path);
    assert_eq!(response.headers()["content-type"], "application/json");
    (response.status(), serde_json::from_str(response.body()).expect("JSON"))
}

/// The status that a service answers at once.
fn status<S, R>(service: &mut S) -> StatusCode
where
    S: Service<Request<Empty<Bytes>>, Response = Response<R>, Error = Infallible>,
{
    let answer = pin!(service.call(Request::new(Empty::new())));
    match answer.poll(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Ok(response)) => response.status(),
        Poll::Pending => panic!("pending"),
    }
}

#[test]
fn a_snapshot_is_serialised_with_sizes_in_bytes_and_the_names_of_metrics() {
    let clock = Arc::new(ManualClock::new());
    let tree = Tree::new(ByteSize::gib(1));
    let memory = start(&clock, &tree);
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(3))).expect("fits");
    let snapshot = serde_json::to_value(memory.snapshot()).expect("no path is odd");
    assert_eq!(snapshot["profile"], "balanced");
    assert_eq!(snapshot["host"]["reserved"], 3 << 20);
    assert_eq!(snapshot["host"]["level"], "none");
    assert_eq!(snapshot["host"]["classes"][8]["class"], "4MiB");
    assert_eq!(snapshot["admission"]["admitted_total"], 1);
    assert_eq!(snapshot["signal"]["limit"], json!({ "bytes": 1 << 30, "source": "cgroup" }));
    let arena = &snapshot["devices"]["arenas"][0];
    assert_eq!((&arena["name"], &arena["live"]), (&json!("weights"), &json!(1 << 20)));
    assert_eq!((&arena["backend"], &arena["state"]), (&json!("host"), &json!("awake")));
    drop((buffer, permit));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// The bug: a function that returned a router dropped the only handle of the `Memory`, and the
/// layer in that router shed nothing whatever the service held.
#[test]
fn a_layer_keeps_its_memory_running_and_ends_it_when_it_is_dropped() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let build = || {
        let memory = start(&clock, &tree);
        let estimate = |_: &http::request::Parts| Cost::host(ByteSize::mib(1));
        let layer = MemoryLayer::new(memory.admission().clone(), estimate);
        layer.with_max_wait(Duration::ZERO).layer(service_fn(|_| {
            let empty: Empty<Bytes> = Empty::new();
            ready(Ok::<_, Infallible>(Response::new(empty)))
        }))
    };
    let mut service = build();
    until_both_threads();
    assert_eq!(status(&mut service), StatusCode::OK);
    tree.hold(99);
    advance_until(&clock, TICK, "shed", || status(&mut service) == StatusCode::SERVICE_UNAVAILABLE);
    let clone = service.clone();
    drop(service);
    until_both_threads();
    drop(clone);
    until_no_threads();
}

fn keys(value: &Value) -> BTreeSet<&str> {
    value.as_object().expect("an object").keys().map(String::as_str).collect()
}

#[test]
fn without_a_memory_everything_answers_and_says_so() {
    let endpoints = Endpoints::new(None);
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK);
    let ready = json!({ "ready": true, "managed": false, "ending": false });
    assert_eq!(get_json(&endpoints, "/readyz"), (StatusCode::OK, ready));
    assert_eq!(
        get_json(&endpoints, "/memory"),
        (StatusCode::OK, json!({ "managed": false, "schema": 1 }))
    );
}

#[test]
fn paths_that_are_none_of_these_are_left_to_the_application() {
    let endpoints = Endpoints::new(None).with_metrics(|| "lowtide_x 1\n".to_owned());
    for path in ["/", "", "/healthz/", "/Healthz", "/metric", "/memory/heap", "//memory", "healthz"]
    {
        assert!(endpoints.answer(path).is_none(), "{path:?}");
    }
    assert!(Endpoints::new(None).answer("/metrics").is_none(), "without anything to render");
}

#[test]
fn metrics_are_what_the_application_renders_at_each_request() {
    let count = std::sync::atomic::AtomicU64::new(0);
    let render = move || format!("x_total {}\n", count.fetch_add(1, Ordering::SeqCst));
    let endpoints = Endpoints::new(None).with_metrics(render);
    assert_eq!(get(&endpoints, "/metrics").body(), "x_total 0\n");
    let response = get(&endpoints, "/metrics");
    assert_eq!(response.body(), "x_total 1\n");
    assert_eq!(response.headers()["content-type"], "text/plain; version=0.0.4; charset=utf-8");
}

/// The bug: `POST /memory` was answered like GET, so a command sent to the wrong path seemed to work.
#[test]
fn figures_were_answered_to_any_method() {
    let endpoints = Endpoints::new(None).with_metrics(String::new);
    let status = |method: &str, path: &str| {
        let request = Request::builder().method(method).uri(path).body(()).expect("valid");
        let answer = endpoints.answer_request(&request).expect("one of its paths");
        (answer.status().as_u16(), answer.headers().get("allow").cloned())
    };
    let allow = http::HeaderValue::from_static("GET, HEAD");
    for path in ["/memory", "/metrics"] {
        assert_eq!(status("HEAD", path), (200, None), "{path}");
        assert_eq!(status("POST", path), (405, Some(allow.clone())), "{path}");
    }
    // Load balancers choose the method of their checks.
    assert_eq!(status("OPTIONS", "/healthz"), (200, None));
}

/// The bug: any site could have a name of its own lead here, and read the figures in a browser.
#[test]
fn figures_were_told_whatever_host_was_asked() {
    let known = ["localhost", "LOCALHOST:8081", "127.0.0.1:8081", "10.0.0.7", "[::1]:8081"];
    let unknown = ["evil.example", "evil.example:8081", "localhost.evil.example", "proxy", "[::1"];
    let asked = |endpoints: &Endpoints, path: &str, hosts: &[&str]| {
        let mut request = Request::get(path);
        for host in hosts {
            request = request.header("host", *host);
        }
        let answer = endpoints.answer_request(&request.body(()).expect("a request"));
        let answer = answer.expect("one of its paths");
        (answer.status(), String::from_utf8(answer.into_body()).expect("UTF-8"))
    };
    let open = || Endpoints::new(None).with_metrics(|| "metrics 1\n".to_owned());
    let endpoints = open();
    for path in ["/memory", "/memory?format=html", "/metrics"] {
        for host in known {
            assert_eq!(asked(&endpoints, path, &[host]).0, StatusCode::OK, "{path} {host}");
        }
        for host in unknown {
            let (status, body) = asked(&endpoints, path, &[host]);
            assert_eq!(status, StatusCode::FORBIDDEN, "{path} {host}");
            let told: Value = serde_json::from_str(&body).expect("JSON");
            let reason = if host == "[::1" { "host" } else { "unknown_host" };
            assert_eq!(told["reason"], reason, "{path} {host}");
        }
        assert_eq!(asked(&endpoints, path, &known[..2]).0, StatusCode::FORBIDDEN, "two hosts");
        assert_eq!(asked(&endpoints, path, &[]).0, StatusCode::OK, "no browser's request");
    }
    for path in ["/healthz", "/readyz"] {
        assert_eq!(asked(&endpoints, path, &["evil.example"]).0, StatusCode::OK, "{path}");
    }
    let named = open().with_hosts(["proxy", "Memory.example"]);
    for host in ["proxy:8081", "PROXY", "memory.example", "localhost"] {
        assert_eq!(asked(&named, "/metrics", &[host]).0, StatusCode::OK, "{host}");
    }
    for host in ["evil.example", "proxy.evil.example", "example"] {
        assert_eq!(asked(&named, "/metrics", &[host]).0, StatusCode::FORBIDDEN, "{host}");
    }
    // Without a recorder the path is the application's, whatever the host.
    let request = Request::get("/metrics").header("host", "evil.example").body(());
    assert!(Endpoints::new(None).answer_request(&request.expect("a request")).is_none());
}

#[test]
fn a_service_that_is_about_to_end_is_not_ready_and_still_well() {
    let endpoints = Endpoints::new(None);
    endpoints.set_ending();
    let (status, told) = get_json(&endpoints, "/readyz");
    assert_eq!((status, &told["ending"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(true)));
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK);
}

#[test]
fn a_signal_completes_terminated_and_ends_readiness_but_not_the_process() {
    let clock = Arc::new(ManualClock::new());
    let tree = Tree::new(ByteSize::gib(1));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    runtime.expect("a runtime").block_on(async {
        let (first, second) = (memory.terminated(), memory.terminated());
        let (first, second) = (first.expect("handlers"), second.expect("the same again"));
        terminate();
        first.await;
        second.await;
        let ending = get_json(&endpoints, "/readyz");
        assert_eq!(
            (ending.0, &ending.1["ending"]),
            (StatusCode::SERVICE_UNAVAILABLE, &json!(true))
        );
        assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK);
        assert!(memory.shutdown(SOON).await.is_clean());
    });
}

#[test]
fn a_health_check_tells_a_service_that_is_well_from_one_that_is_not() {
    use std::io::{Read as _, Write as _};
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let at = listener.local_addr().expect("bound");
    let answer = |answer: Response<String>| {
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let mut client = listener.accept().expect("a connection").0;
                let mut request = [0; 256];
                let length = client.read(&mut request).expect("a request");
                assert!(request[..length].starts_with(b"GET /healthz HTTP/1.1\r\n"));
                let head = format!("HTTP/1.1 {}\r\n\r\n", answer.status());
                client.write_all(head.as_bytes()).expect("sent");
            });
            lowtide::service::healthcheck(at)
        })
    };
    answer(get(&Endpoints::new(None), "/healthz")).expect("it is well");
    let ending = Endpoints::new(None);
    ending.set_ending();
    let error = answer(get(&ending, "/readyz")).expect_err("503");
    assert_eq!(error.to_string(), format!("{at} answered 503"));
    drop(listener);
    let error = lowtide::service::healthcheck(at).expect_err("nothing listens").to_string();
    assert!(error.contains(&at.to_string()) && error.contains("refused"), "{error}");
}

fn terminate() {
    let own = std::process::id().to_string();
    let sent = std::process::Command::new("kill").args(["-TERM", &own]).status();
    assert!(sent.expect("a kill").success());
}

/// axum#2673, hyper#2787: after SIGTERM an open stream, or half of a head, kept the service running.
#[test]
fn what_is_open_at_the_end_of_the_drain_is_cut_and_no_error() {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        for (request, is_answered) in
            [("GET / HTTP/1.1\r\nhost: a\r\n\r\n", true), ("GET /", false)]
        {
            let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::gib(1)));
            let memory = start(&clock, &tree);
            let stream = || async { Body::from_stream(pending::<Result<Bytes, BoxError>>()) };
            let app = Router::new().route("/", axum::routing::get(stream)).layer(memory.layer());
            let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
            let mut client = TcpStream::connect(listener.local_addr().expect("bound")).await;
            let client = client.as_mut().expect("a connection");
            client.write_all(request.as_bytes()).await.expect("sent");
            let (tells, mut accepted) = tokio::sync::mpsc::channel(1);
            let listener = listener.tap_io(move |_| tells.try_send(()).expect("one connection"));
            let ending = memory.terminated().expect("handlers");
            let server = axum::serve(listener, app).with_graceful_shutdown(ending);
            let mut served = Box::pin(memory.serve(server, Duration::ZERO));
            let begun = async {
                accepted.recv().await.expect("it serves");
                if is_answered {
                    assert_eq!(client.read_u8().await.expect("an answer"), b'H');
                }
            };
            tokio::select! {
                _ = &mut served => unreachable!("it was not asked to end"),
                () = begun => assert_eq!(memory.admission().stats().held(), u64::from(is_answered)),
            }
            assert!(poll(&mut served).is_pending(), "it was not asked to end");
            terminate();
            served.await.expect("no error");
        }
    });
}

#[test]
fn a_request_that_ends_within_the_drain_is_answered() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::gib(1)));
    let memory = start(&clock, &tree);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    runtime.expect("a runtime").block_on(async {
        let ending = memory.terminated().expect("handlers");
        let server = async {
            ending.await;
            Ok::<_, BoxError>(())
        };
        let mut served = Box::pin(memory.serve(server, Duration::MAX));
        assert!(poll(&mut served).is_pending(), "it was not asked to end");
        terminate();
        served.await.expect("no error");
        let fails = async { Err::<(), _>("no port") };
        let error = memory.serve(fails, Duration::ZERO).await.expect_err("that of the server");
        assert_eq!(error.to_string(), "no port");
    });
}

/// The bug: memory that no request owned left no room for any, every one was told to come again in
/// 1 s, and the probes stayed green.
#[test]
fn a_leak_made_a_zombie_with_green_probes() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let request = || memory.admission().try_admit(Cost::host(ByteSize::kib(64)));
    drop(request().expect("fits"));
    // Above the ceiling of 80 MiB, and far from critical.
    tree.hold(84);
    let ready = || get_json(&endpoints, "/readyz");
    let step = Duration::from_millis(250);
    advance_until(&clock, step, "requests are rejected", || request().is_err());
    assert_eq!(ready().0, StatusCode::OK, "it may be a moment's");
    advance_until(&clock, step, "it is not ready", || {
        request().is_err() && ready().1["ready"] == false
    });
    let (status, body) = ready();
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((&body["exhausted"], &body["level"]), (&json!(true), &json!("elevated")));
    let rejected = request().expect_err("no room");
    let answer = lowtide::service::rejection(&rejected);
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.body().contains("\"exhausted\""), "{}", answer.body());
    let wait: u64 = answer.headers()["retry-after"].to_str().expect("text").parse().expect("s");
    assert!(wait >= 30, "{wait} s");
    // The bug: both events were about the host, so that a change of its level, which comes at the
    // same moment, replaced them.
    let told = |text| {
        let events = memory.report().events();
        let told = events.iter().filter(|event| event.text.starts_with(text));
        told.inspect(|event| assert_eq!(event.about, "requests")).count()
    };
    advance_until(&clock, step, "it is told", || told("no room for requests: ") == 1);
    let verdict = memory.report().verdict();
    assert!(
        verdict.summary.starts_with("Memory that no request owns leaves no room"),
        "{verdict:?}"
    );
    assert!(verdict.summary.contains("untracked memory"), "{verdict:?}");
    tree.hold(10);
    advance_until(&clock, step, "it is ready again", || ready().0 == StatusCode::OK);
    drop(request().expect("fits"));
    advance_until(&clock, step, "it is told", || told("room for requests again") == 1);
    assert!(memory.shutdown_blocking(Duration::from_secs(5)).is_clean());
}

/// Lets memory outside requests, 84 of 100 MiB, exhaust the service.
fn exhaust(clock: &ManualClock, tree: &Tree, memory: &Memory) {
    let request = || memory.admission().try_admit(Cost::host(ByteSize::kib(64)));
    drop(request().expect("fits"));
    tree.hold(84);
    advance_until(clock, TICK, "it is exhausted", || {
        drop(request());
        memory.snapshot().exhausted
    });
}

#[test]
fn an_exhausted_service_that_serves_single_requests_is_ready_and_is_restarted_after_the_grace() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let grace = Duration::from_secs(60);
    let memory = start_with(&clock, &tree, ExhaustionPolicy::ServeOne { grace });
    let endpoints = Endpoints::new(Some(memory.clone()));
    exhaust(&clock, &tree, &memory);
    let begin = clock.now();
    let status = |path| get(&endpoints, path).status();
    let (ready, failed) = (StatusCode::OK, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((status("/readyz"), status("/healthz")), (ready, ready));
    assert_eq!(get_json(&endpoints, "/readyz").1["exhausted"], json!(true));
    let request = || memory.admission().try_admit(Cost::host(ByteSize::kib(64)));
    let large = Cost::host(ByteSize::mib(3));
    let one = memory.admission().try_admit(large).expect("served");
    request().expect_err("one at a time");
    drop(one);
    drop((request().expect("served"), request().expect("small ones next to each other")));
    // Above the critical mark nothing is served, and readiness fails after 5 s of that.
    tree.hold(94);
    advance_until(&clock, TICK, "it is not ready", || {
        drop(request());
        status("/readyz") == failed
    });
    request().expect_err("no room");
    tree.hold(90);
    advance_until(&clock, TICK, "it is ready again", || {
        drop(request());
        status("/readyz") == ready
    });
    assert_eq!(memory.level(), lowtide::admission::Level::Critical, "it leaves at 85 %");
    drop(request().expect("served"));
    assert_eq!(status("/healthz"), ready);
    advance_until(&clock, TICK, "it needs a restart", || {
        drop(request());
        memory.needs_restart()
    });
    // The grace began at the declaration, which was at most one look earlier.
    assert!(clock.now() - begin >= grace - TICK, "after {:?}", clock.now() - begin);
    assert_eq!((status("/readyz"), status("/healthz")), (ready, failed));
    drop(request().expect("served until it is restarted"));
    tree.hold(10);
    advance_until(&clock, TICK, "it needs none", || status("/healthz") == ready);
    assert!(memory.shutdown_blocking(SOON).is_clean(), "the orchestrator has ended it");
}

#[test]
fn an_exhausted_service_asks_to_end_once_it_is_old_enough_and_its_report_is_an_error() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let begin = clock.now();
    let min_uptime = Duration::from_secs(300);
    let memory = start_with(&clock, &tree, ExhaustionPolicy::Exit { min_uptime });
    let endpoints = Endpoints::new(Some(memory.clone()));
    exhaust(&clock, &tree, &memory);
    assert_eq!(get(&endpoints, "/readyz").status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK, "too young");
    let has_ended = std::sync::atomic::AtomicBool::new(false);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_io().build();
    let runtime = runtime.expect("a runtime");
    std::thread::scope(|scope| {
        scope.spawn(|| {
            advance_until(&clock, TICK, "it is to end", || has_ended.load(Ordering::Relaxed));
        });
        runtime.block_on(async {
            let (first, second) = (memory.terminated(), memory.terminated());
            first.expect("handlers").await;
            second.expect("handlers").await;
            memory.terminated().expect("one that comes late").await;
        });
        has_ended.store(true, Ordering::Relaxed);
    });
    assert!(clock.now() - begin >= min_uptime, "after {:?}", clock.now() - begin);
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::SERVICE_UNAVAILABLE);
    let (status, ready) = get_json(&endpoints, "/readyz");
    assert_eq!((status, &ready["ending"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(true)));
    let told = |event: &lowtide::memory::Event| event.text.contains("restart needed (exit)");
    assert_eq!(memory.report().events().iter().filter(|event| told(event)).count(), 1);
    // Memory that is freed on the way does not change the report.
    tree.hold(10);
    advance_until(&clock, TICK, "there is room", || !memory.snapshot().exhausted);
    let report = memory.shutdown_blocking(SOON).into_result().expect_err("a status above 0");
    assert!(report.exhausted);
    assert_eq!(report.to_string(), "memory exhausted; nothing outstanding");
}

#[test]
fn health_holds_under_pressure_and_readiness_follows_it_and_the_end() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    memory.devices().open_arena("weights").expect("opens");
    let (status, ready) = get_json(&endpoints, "/readyz");
    assert_eq!(status, StatusCode::OK);
    assert_eq!(
        ready,
        json!({
            "ready": true,
            "managed": true,
            "ending": false,
            "level": "none",
            "exhausted": false,
            "resources": { "model": "unloaded" },
            "device": { "weights": "host" },
            "arenas": { "weights": "awake" },
            "diagnostics": [],
        })
    );
    drop(model.acquire_blocking().expect("loads"));
    assert_eq!(get_json(&endpoints, "/readyz").1["resources"]["model"], "loaded");

    tree.hold(99);
    let level = || get_json(&endpoints, "/readyz").1["level"].clone();
    advance_until(&clock, TICK, "critical", || level() == "critical");
    let (status, ready) = get_json(&endpoints, "/readyz");
    assert_eq!((status, &ready["ready"]), (StatusCode::SERVICE_UNAVAILABLE, &json!(false)));
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK);
    tree.hold(80);
    advance_until(&clock, TICK, "high is ready enough", || level() == "high");
    assert_eq!(get_json(&endpoints, "/readyz").0, StatusCode::OK);

    assert!(memory.shutdown_blocking(SOON).is_clean());
    let (status, ready) = get_json(&endpoints, "/readyz");
    assert_eq!(status, StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!((&ready["ready"], &ready["ending"]), (&json!(false), &json!(true)));
    assert_eq!(get(&endpoints, "/healthz").status(), StatusCode::OK);
    assert_eq!(get_json(&endpoints, "/memory").0, StatusCode::OK, "still told after the end");
}

#[test]
fn an_arena_that_sleeps_is_said_to_and_is_ready() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc_from(&[1_u8; 2 << 20], Region::Stable).expect("room");
    let (discard, drain) = (Contents::Discard, Duration::ZERO);
    arena.sleep(SleepOptions { drain, stable: discard, dynamic: discard }).expect("asleep");
    let (status, ready) = get_json(&endpoints, "/readyz");
    assert_eq!((status, &ready["arenas"]["weights"]), (StatusCode::OK, &json!("asleep")));
    let told = || get_json(&endpoints, "/memory").1["device"]["arenas"][0].clone();
    let sleeping = told();
    for (figure, value) in [
        ("state", json!("asleep")),
        ("live_bytes", json!(2 << 20)),
        ("asleep_bytes", json!(2 << 20)),
        ("offloaded_bytes", json!(0)),
        ("committed_bytes", json!(0)),
        ("retained_bytes", json!(0)),
        ("sleeps", json!(1)),
        ("wakes", json!(0)),
        ("wake_failures", json!(0)),
    ] {
        assert_eq!(sleeping[figure], value, "{figure}");
    }
    drop(arena.enter().expect("it wakes"));
    assert_eq!((&told()["state"], &told()["wakes"]), (&json!("awake"), &json!(1)));
    drop(buffer);
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_resource_that_is_warmed_was_told_unloaded_since_nobody_waited_for_it() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    let memory = start(&clock, &tree);
    let endpoints = Endpoints::new(Some(memory.clone()));
    let (open, gate) = std::sync::mpsc::channel::<()>();
    let gate = std::sync::Mutex::new(gate);
    let load = move || {
        let gate = gate.lock().map_err(|error| error.to_string())?;
        Ok(gate.recv_timeout(crate::support::PATIENCE)?)
    };
    let model = memory.managed("model", load).register().expect("registered");
    let state = || get_json(&endpoints, "/readyz").1["resources"]["model"].clone();
    assert_eq!(state(), "unloaded");
    model.warm().expect("starts to load");
    assert_eq!(state(), "loading");
    std::thread::scope(|scope| {
        let waiting = scope.spawn(|| model.acquire_blocking().map(drop));
        crate::support::until("somebody waits", || memory.snapshot().resources[0].waiting == 1);
        assert_eq!(state(), "loading");
        open.send(()).expect("the loader waits");
        assert!(waiting.join().expect("no panic").is_ok());
    });
    assert_eq!(state(), "loaded");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn the_memory_document_holds_every_figure_in_bytes_and_null_for_no_limit() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
    clock.advance(Duration::from_secs(1_000));
    let memory = start(&clock, &tree);
    let arena = memory.devices().open_arena("weights").expect("opens");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let lease = arena.enter().expect("awake");
    let model = memory.managed("model", || Ok(())).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    assert_eq!(model.unload_now(SOON).ok(), Some(true));
    let table = memory.managed("table", || Ok(())).cost(Cost::host(ByteSize::mib(6)));
    let table = table.register().expect("registered").acquire_blocking().expect("loads");
    clock.advance(Duration::from_secs(5));
    let permit = memory.admission().try_admit(Cost::host(ByteSize::mib(2))).expect("fits");
    assert!(memory.admission().try_admit(Cost::host(ByteSize::gib(1))).is_err());

    let endpoints = Endpoints::new(Some(memory.clone()));
    let (status, told) = get_json(&endpoints, "/memory");
    assert_eq!(status, StatusCode::OK);
    let whole = "at_seconds device diagnostics findings heap host managed process profile \
                 reclaimers requests resources saturation schema verdict";
    assert_eq!(keys(&told), whole.split_whitespace().collect());
    assert_eq!((&told["profile"], &told["diagnostics"]), (&json!("balanced"), &json!([])));
    check_host(&told["host"]);
    check_process(&told);
    let snapshot = memory.snapshot();
    let heap = snapshot.heap.expect("jemalloc tells");
    assert_eq!(keys(&told["heap"]).len(), 13);
    let table_of = json!([{ "name": "table", "live_bytes": 0, "retained_bytes": 0 }]);
    assert_eq!(told["heap"]["arenas"], table_of, "its loader allocates nothing");
    assert!(told["heap"]["mapped_bytes"].as_u64().is_some_and(|mapped| mapped > 0), "{heap:?}");
    let retained = told["heap"]["resident_bytes"].as_u64().zip(told["heap"]["live_bytes"].as_u64());
    let retained = retained.map(|(resident, live)| resident.saturating_sub(live));
    assert_eq!(told["heap"]["retained_bytes"].as_u64(), retained);

    let device = &told["device"]["arenas"][0];
    let now = &snapshot.devices.arenas[0];
    assert_eq!((&device["name"], &device["backend"]), (&json!("weights"), &json!("host")));
    for (key, size) in [
        ("live_bytes", ByteSize::mib(1)),
        ("committed_bytes", now.committed),
        ("retained_bytes", now.retained()),
        ("reserved_bytes", now.reserved),
        ("limit_bytes", ByteSize::mib(16)),
    ] {
        assert_eq!(device[key], json!(size.get()), "{key}");
    }
    check_arena(device);
    assert_eq!(told["device"]["budget"]["ceiling_bytes"], Value::Null, "no limit");
    assert_eq!((&told["requests"]["admitted"], &told["requests"]["held"]), (&json!(1), &json!(1)));
    let shed = json!({
        "too_large": 1, "full": 0, "pressure": 0,
        "shutting_down": 0, "exhausted": 0, "slow_start": 0, "device_lost": 0,
        "outgrown": 0, "slow_client": 0, "held_too_long": 0
    });
    assert_eq!(told["requests"]["rejected"], shed);
    let resource = &told["resources"][0];
    assert_eq!((&resource["name"], &resource["loaded"]), (&json!("model"), &json!(false)));
    assert_eq!((&resource["loads"], &resource["failed_loads"]), (&json!(1), &json!(0)));
    assert_eq!(resource["refused_loads"], 0);
    assert_eq!(resource["cost_bytes"], json!({ "host": 0, "device": 0 }));
    assert_eq!(resource["guards"], 0);
    assert_eq!(keys(&resource["measured_bytes"]), BTreeSet::from(["device", "host"]));
    assert_eq!(resource["unloads"][UnloadReason::Manual.name()], 1);
    assert_eq!(resource["last_used_seconds"].as_f64(), Some(1_000.0), "on the wall clock");
    drop((buffer, lease, permit, table));
    assert!(memory.shutdown_blocking(SOON).is_clean());
}

/// A process of 10 MiB under a cgroup's limit of 100 MiB.
fn check_process(told: &Value) {
    assert_eq!((&told["schema"], &told["process"]["pid"]), (&json!(1), &json!(std::process::id())));
    assert!(told["process"]["started_at_seconds"].as_f64().is_some_and(|at| at >= 1_000.0));
}

fn check_arena(arena: &Value) {
    let counts = "sleeps wakes wake_failures allocs thread_cache_allocs failures trimmed_bytes \
                  shrunk_bytes lock_contended lock_wait_seconds asleep_bytes offloaded_bytes \
                  live_peak_bytes cached_bytes requested_bytes active_bytes idle_bytes \
                  committed_peak_bytes hole_bytes largest_free_bytes metadata_bytes \
                  exported_bytes imported_bytes state";
    for key in counts.split_whitespace() {
        assert!(!arena[key].is_null(), "{key}");
    }
    assert_eq!(arena["leases"], 1);
}

fn check_host(host: &Value) {
    let mib = |count| json!(ByteSize::mib(count).get());
    for (key, value) in [
        ("rss_bytes", mib(10)),
        ("physical_bytes", mib(10)),
        ("charged_bytes", mib(10)),
        ("limit_bytes", mib(100)),
        ("limit_source", json!("cgroup")),
    ] {
        assert_eq!(host[key], value, "{key}");
    }
    let bound = &host["bounds"][0];
    assert!(bound["name"].as_str().is_some_and(|name| name.ends_with("app/memory.max")), "{bound}");
    assert_eq!((&bound["limit_bytes"], &bound["used_bytes"]), (&mib(100), &mib(10)), "{bound}");
    assert_eq!((&bound["scope"], &bound["freshness"]), (&json!("group"), &json!("now")), "{bound}");
    let figure = |key: &str| host[key].as_u64().unwrap_or_else(|| panic!("{key}"));
    let required = figure("physical_bytes").saturating_sub(figure("purgeable_bytes"));
    assert_eq!(figure("required_bytes"), required);
    let parts = host["parts"].as_array().expect("a list");
    let sum: u64 = parts.iter().map(|part| part["bytes"].as_u64().expect("bytes")).sum();
    assert_eq!(sum, figure("physical_bytes"), "the parts sum to the whole: {parts:?}");
    assert_eq!(sum + figure("headroom_bytes"), figure("limit_bytes"));
    let budget = &host["budget"];
    assert_eq!((&budget["level"], &budget["reserved_bytes"]), (&json!("none"), &mib(8)));
    let class = json!({
        "size_class": "2MiB", "admitted": 1, "admitted_bytes": mib(2), "rejected": 0,
        "rejected_bytes": 0,
    });
    assert_eq!(
        (&budget["size_classes"], &budget["reserved_headroom_bytes"]),
        (&json!([class]), &mib(0))
    );
    assert_eq!((&budget["ceiling_bytes"], &budget["correction_factor"]), (&mib(80), &json!(2.0)));
}

#[test]
fn what_did_not_go_as_asked_is_told_in_readiness_and_document() {
    let memory =
        Memory::builder().signals(crate::support::nothing_to_read()).start().expect("starts");
    let endpoints = Endpoints::new(Some(memory.clone()));
    for path in ["/readyz", "/memory"] {
        let (status, told) = get_json(&endpoints, path);
        assert_eq!(status, StatusCode::OK, "{path}");
        let diagnostics: Vec<_> = told["diagnostics"].as_array().expect("a list").iter().collect();
        let says =
            |what: &str| diagnostics.iter().any(|note| note.as_str().unwrap().contains(what));
        assert!(says("device: device arenas use host memory"), "{path}: {diagnostics:?}");
        assert!(says("signals: ") && says("/proc/self/statm: "), "{path}: {diagnostics:?}");
    }
    let (_, told) = get_json(&endpoints, "/memory");
    assert_eq!(told["host"]["rss_bytes"], Value::Null);
    assert_eq!(told["host"]["limit_bytes"], Value::Null);
    assert_eq!(told["host"]["limit_source"], "unknown");
    assert!(memory.shutdown_blocking(SOON).is_clean());
}
