//! Verbs over HTTP: what they do, who is heard, and who is not.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use axum::body::Body;
use axum::extract::ConnectInfo;
use http::{Method, Request, Response, StatusCode};
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::device::{Region, SleepState};
use lowtide::memory::{AdminTask, AdminTaskState};
use lowtide::service::{Endpoints, Peer};
use lowtide::{ByteSize, Memory};
use serde_json::Value;
use test_fork::test;
use tower::ServiceExt as _;

use crate::support::{Tree, until};

const SOON: Duration = Duration::from_secs(5);
const TOKEN: &str = "a-token-of-this-test-and-no-other";
const HERE: &str = "127.0.0.1:50000";

/// A service whose verbs are heard.
struct Service {
    memory: Memory,
    clock: Arc<ManualClock>,
    endpoints: Endpoints,
    _tree: Tree,
}

impl Service {
    fn start(token: Option<&str>) -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(100)));
        let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::Host).start().expect("starts");
        let endpoints = Endpoints::new(Some(memory.clone()));
        let endpoints = match token {
            None => endpoints.with_local_admin(),
            Some(token) => endpoints.with_admin_token(token).expect("a token"),
        };
        Self { memory, clock, endpoints, _tree: tree }
    }

    fn ask(&self, asked: &Asked) -> (StatusCode, Value) {
        let response = asked.of(&self.endpoints).expect("an answer");
        let status = response.status();
        assert_eq!(response.headers()["cache-control"], "no-store");
        assert!(!response.headers().contains_key("access-control-allow-origin"));
        (status, serde_json::from_str(response.body()).unwrap_or(Value::Null))
    }

    /// Returns the last admin task, once it has ended.
    fn outcome(&self) -> AdminTask {
        let last = || self.memory.admin().tasks().pop().expect("an admin task");
        let is_over = |state: &AdminTaskState| !state.outcome().is_empty();
        until("the admin task ends", || is_over(&last().state));
        last()
    }

    #[track_caller]
    fn refused(&self, asked: &Asked, status: StatusCode, reason: &str) {
        let (found, told) = self.ask(asked);
        assert_eq!((found, told["reason"].as_str()), (status, Some(reason)), "{asked:?}: {told}");
        assert_eq!(told["status"], status.as_u16());
        assert!(self.memory.admin().tasks().is_empty(), "{asked:?} was done");
    }
}

/// A request as `curl` on this machine sends it, unless something is changed.
#[derive(Clone, Debug)]
struct Asked {
    method: Method,
    address: String,
    peer: Option<SocketAddr>,
    headers: Vec<(&'static str, String)>,
}

fn post(path: &str) -> Asked {
    Asked {
        method: Method::POST,
        address: format!("/memory/{path}"),
        peer: Some(HERE.parse().expect("an address")),
        headers: vec![("host", "localhost:8080".to_owned()), ("lowtide-admin", "1".to_owned())],
    }
}

impl Asked {
    fn with(mut self, name: &'static str, value: &str) -> Self {
        self.headers.push((name, value.to_owned()));
        self
    }

    fn without(mut self, name: &str) -> Self {
        self.headers.retain(|(other, _)| *other != name);
        self
    }

    fn host(self, value: &str) -> Self {
        self.without("host").with("host", value)
    }

    fn from(mut self, peer: Option<&str>) -> Self {
        self.peer = peer.map(|peer| peer.parse().expect("an address"));
        self
    }

    fn of(&self, endpoints: &Endpoints) -> Option<Response<String>> {
        let mut request = Request::builder().method(self.method.clone()).uri(&self.address);
        for (name, value) in &self.headers {
            request = request.header(*name, value);
        }
        if let Some(peer) = self.peer {
            request = request.extension(Peer(peer));
        }
        let answer = endpoints.answer_request(&request.body(()).expect("a request"))?;
        Some(answer.map(|body| String::from_utf8(body).expect("UTF-8")))
    }
}

/// As routes of axum: the address of the client is what axum puts into the request.
#[test]
fn routes_hear_who_comes_from_this_machine_by_the_address_that_axum_adds() {
    let Service { memory, endpoints, _tree, .. } = Service::start(None);
    let routes = endpoints.into_routes::<()>();
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let status = |from: Option<&str>| {
        let asked = Request::post("/memory/purge").header("host", "localhost:8080");
        let mut asked = asked.header("lowtide-admin", "1").body(Body::empty()).expect("a request");
        if let Some(from) = from {
            let from: SocketAddr = from.parse().expect("an address");
            asked.extensions_mut().insert(ConnectInfo(from));
        }
        let answer = runtime.block_on(routes.clone().oneshot(asked));
        answer.expect("a router never fails").status()
    };
    assert_eq!(status(None), StatusCode::FORBIDDEN, "an unknown client");
    assert_eq!(status(Some("192.0.2.7:50000")), StatusCode::FORBIDDEN, "another machine");
    assert!(memory.admin().tasks().is_empty());
    assert_eq!(status(Some(HERE)), StatusCode::ACCEPTED);
    assert_eq!(memory.admin().tasks().len(), 1);
}

/// The bug: the 404 had an empty body.
#[test]
fn the_route_of_metrics_without_a_source_says_what_it_needs() {
    let runtime = tokio::runtime::Builder::new_current_thread().build().expect("a runtime");
    let request = Request::get("/metrics").body(Body::empty()).expect("a request");
    let answer = runtime.block_on(Endpoints::new(None).into_routes::<()>().oneshot(request));
    let answer = answer.expect("a router never fails");
    assert_eq!(answer.status(), StatusCode::NOT_FOUND);
    let body = runtime.block_on(axum::body::to_bytes(answer.into_body(), 4096)).expect("whole");
    let told: Value = serde_json::from_slice(&body).expect("JSON");
    assert!(told["detail"].as_str().expect("a text").contains("`Builder::prometheus`"), "{told}");
}

#[test]
fn figures_that_are_refused_for_the_host_are_logged_once() {
    let text = Log::of(|| {
        let endpoints = Endpoints::new(None);
        for host in ["proxy:8081", "proxy:8081", "other"] {
            let request = Request::get("/memory").header("host", host).body(()).expect("a request");
            let answer = endpoints.answer_request(&request).expect("an answer");
            assert_eq!(answer.status(), StatusCode::FORBIDDEN);
        }
    });
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(text.contains(r#"unknown host \"proxy\""#) && text.contains("with_hosts"), "{text}");
}

#[test]
fn no_verb_is_heard_unless_it_is_enabled() {
    let endpoints = Endpoints::new(None);
    for path in ["purge", "trim", "sleep", "wake", "unload"] {
        assert!(post(path).of(&endpoints).is_none(), "{path} is the application's");
    }
    let unmanaged = Endpoints::new(None).with_local_admin();
    let response = post("purge").of(&unmanaged).expect("an answer");
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(post("reset").of(&unmanaged).is_none(), "no verb");
    assert!(post("purge/").of(&unmanaged).is_none(), "no verb");
}

#[test]
fn the_verbs_do_what_they_say_on_the_worker() {
    let service = Service::start(None);
    let memory = &service.memory;
    let arena = memory.devices().open_arena("weights").expect("opens");
    let model = memory.managed("a model", || Ok(())).register().expect("registered");
    drop(model.acquire_blocking().expect("loads"));
    let kept = arena.alloc_from(&[7_u8; 3 << 20], Region::Stable).expect("room");
    drop(arena.alloc::<u8>(9 << 20, Region::Stable).expect("room"));
    let does = |path: &str, outcome: &str| {
        let (status, told) = service.ask(&post(path));
        assert_eq!(status, StatusCode::ACCEPTED, "{told}");
        let admin_task = service.outcome();
        assert_eq!(Some(admin_task.id), told["admin_task"].as_u64());
        assert!(
            matches!(&admin_task.state, AdminTaskState::Done(text) if text.contains(outcome)),
            "{admin_task:?}"
        );
        service.clock.advance(Duration::from_secs(1));
        admin_task
    };
    let idle = arena.snapshot().idle;
    assert!(idle >= ByteSize::mib(8), "{idle}");
    does("trim?arena=weights&keep=10m", "2.0 MiB released");
    assert_eq!(arena.snapshot().committed, ByteSize::mib(10));
    does("trim?arena=weights", "6.0 MiB released");
    does("sleep?arena=weights", "0 B offloaded"); // it is host memory, and stays
    assert_eq!(arena.state(), SleepState::Asleep);
    does("wake?arena=weights", "committed");
    assert_eq!(arena.state(), SleepState::Awake);
    let lease = arena.enter().expect("awake");
    assert_eq!(kept.slice(&lease).expect("mine")[0], 7, "contents are kept");
    drop(lease);
    does("unload?resource=a+model", "unloaded");
    assert!(!model.stats().loaded);
    drop(arena.alloc::<u8>(9 << 20, Region::Stable).expect("room"));
    does("purge", "released");
    assert!(arena.snapshot().idle.is_zero());
    let told = memory.report().events();
    let told = told.iter().filter(|event| event.kind == "admin").count();
    assert_eq!(told, 6, "each is an event");
    drop(kept);
    assert!(memory.shutdown_blocking(SOON).is_clean());
    let (status, told) = service.ask(&post("purge"));
    assert_eq!((status, &told["reason"]), (StatusCode::SERVICE_UNAVAILABLE, &"ended".into()));
}

#[test]
fn what_cannot_be_done_says_why_and_nothing_else_happens() {
    let service = Service::start(None);
    let arena = service.memory.devices().open_arena("weights").expect("opens");
    let model = service.memory.managed("model", || Ok(())).register().expect("new");
    let fails = |path: &str, cause: &str| {
        assert_eq!(service.ask(&post(path)).0, StatusCode::ACCEPTED);
        let admin_task = service.outcome();
        assert!(
            matches!(&admin_task.state, AdminTaskState::Failed(why) if why.contains(cause)),
            "{admin_task:?}"
        );
        service.clock.advance(Duration::from_secs(1));
    };
    fails("wake?arena=weights", "awake");
    fails("unload?resource=model", "the resource is not loaded");
    let guard = model.acquire_blocking().expect("loads");
    fails("unload?resource=model", "the resource is in use (guards: 1)");
    let buffer = arena.alloc::<u8>(1 << 20, Region::Stable).expect("room");
    let lease = arena.enter().expect("awake");
    fails("sleep?arena=weights", "lease");
    assert_eq!(arena.state(), SleepState::Awake);
    drop((guard, buffer, lease));
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn names_that_do_not_exist_and_queries_that_mean_nothing_are_told() {
    let service = Service::start(None);
    service.memory.devices().open_arena("weights").expect("opens");
    let says = |asked: &Asked, status: StatusCode, detail: &str| {
        let (found, told) = service.ask(asked);
        let text = told["detail"].as_str().unwrap_or_default();
        assert!(found == status && text.contains(detail), "{asked:?}: {found} {told}");
        service.clock.advance(Duration::from_secs(1));
    };
    let (unknown, wrong) = (StatusCode::NOT_FOUND, StatusCode::BAD_REQUEST);
    says(&post("sleep?arena=wieghts"), unknown, r#"no arena named "wieghts": expected "weights""#);
    says(&post("unload?resource=m"), unknown, r#"no resource named "m": expected none"#);
    says(&post("sleep"), wrong, r#""arena" is missing"#);
    says(&post("purge?arena=weights"), wrong, r#"unknown query parameter "arena""#);
    says(&post("trim?arena=weights&keep=lots"), wrong, r#"keep="lots""#);
    says(&post("trim?arena=weights&arena=weights"), wrong, "twice");
    for method in [Method::GET, Method::HEAD, Method::PUT, Method::OPTIONS] {
        let asked = Asked { method, ..post("purge") };
        let response = asked.of(&service.endpoints).expect("an answer");
        assert_eq!(response.status(), StatusCode::METHOD_NOT_ALLOWED);
        assert_eq!(response.headers()["allow"], "POST");
    }
    assert!(service.memory.admin().tasks().is_empty());
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_page_of_another_site_is_not_heard() {
    let service = Service::start(None);
    let cross = |asked: Asked| service.refused(&asked, StatusCode::FORBIDDEN, "cross_site");
    for site in ["cross-site", "same-site", "none", "Same-Origin", ""] {
        cross(post("purge").with("sec-fetch-site", site));
    }
    let own = || post("purge").with("sec-fetch-site", "same-origin");
    cross(own().with("sec-fetch-site", "cross-site"));
    for origin in [
        "http://evil.example",
        "null",
        "http://localhost:8081",
        "http://localhost",
        "https://localhost",
        "http://localhost:8080.evil.example",
        "http://localhost:8080@evil.example",
        "file://localhost:8080",
        "localhost:8080",
        "",
    ] {
        cross(own().with("origin", origin));
    }
    cross(own().with("origin", "http://localhost:8080").with("origin", "http://evil.example"));
    // What a form, or a request without asking first, can send: no header of ours.
    let simple = own().with("origin", "http://localhost:8080").without("lowtide-admin");
    service.refused(&simple, StatusCode::FORBIDDEN, "header");
    let page = own().with("origin", "http://LOCALHOST:8080");
    assert_eq!(service.ask(&page).0, StatusCode::ACCEPTED, "a page of its own is");
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn a_name_that_leads_to_this_machine_is_not_this_machine() {
    let service = Service::start(None);
    // As after rebinding: the browser believes that it speaks with evil.example.
    let rebound = |host: &str| post("purge").host(host).with("origin", &format!("http://{host}"));
    for host in ["evil.example", "evil.example:8080", "localhost.evil.example", "127.0.0.1.nip.io"]
    {
        service.refused(&rebound(host), StatusCode::FORBIDDEN, "host_name");
    }
    for host in ["192.168.0.1:8080", "0.0.0.0:8080", "[::2]:8080", "localhost.", "128.0.0.1"] {
        service.refused(&post("purge").host(host), StatusCode::FORBIDDEN, "host_name");
    }
    let two = post("purge").with("host", "localhost:8080");
    for asked in [post("purge").without("host"), two, post("purge").host("a@localhost:8080")] {
        service.refused(&asked, StatusCode::FORBIDDEN, "host");
    }
    let mut both = post("purge");
    both.address = "http://evil.example/memory/purge".to_owned();
    service.refused(&both, StatusCode::FORBIDDEN, "host");
    for host in ["localhost", "127.0.0.1:8080", "127.8.9.1", "[::1]:8080", "LocalHost:1"] {
        assert_eq!(service.ask(&post("purge").host(host)).0, StatusCode::ACCEPTED, "{host}");
    }
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn without_a_token_only_this_machine_is_heard() {
    let service = Service::start(None);
    for peer in [None, Some("192.168.0.7:50000"), Some("[fe80::1]:50000"), Some("0.0.0.0:1")] {
        service.refused(&post("purge").from(peer), StatusCode::FORBIDDEN, "not_loopback");
    }
    for header in ["x-forwarded-for", "forwarded", "via", "x-real-ip"] {
        let through = post("purge").with(header, "127.0.0.1");
        service.refused(&through, StatusCode::FORBIDDEN, "forwarded");
    }
    let given = format!("Bearer {TOKEN}");
    let afar = post("purge").from(Some("192.168.0.7:50000")).with("authorization", &given);
    service.refused(&afar, StatusCode::FORBIDDEN, "not_loopback");
    for peer in ["[::1]:50000", "127.0.0.2:1", "[::ffff:127.0.0.1]:1"] {
        assert_eq!(service.ask(&post("purge").from(Some(peer))).0, StatusCode::ACCEPTED, "{peer}");
    }
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn with_a_token_nobody_is_heard_without_it() {
    let service = Service::start(Some(TOKEN));
    service.refused(&post("purge"), StatusCode::UNAUTHORIZED, "token");
    let with = |given: &str| post("purge").with("authorization", given);
    for given in [
        TOKEN,
        "Bearer",
        "Bearer ",
        "Bearer x",
        &format!("Basic {TOKEN}"),
        &format!("Bearer  {TOKEN}"),
        &format!("Bearer {TOKEN}x"),
        &format!("Bearer {}", &TOKEN[1..]),
        &format!("Bearer {}", TOKEN.to_uppercase()),
    ] {
        service.refused(&with(given), StatusCode::UNAUTHORIZED, "token");
    }
    let right = format!("Bearer {TOKEN}");
    let twice = with(&right).with("authorization", &right);
    service.refused(&twice, StatusCode::UNAUTHORIZED, "token");
    let cross = with(&right).with("origin", "https://evil.example");
    service.refused(&cross, StatusCode::FORBIDDEN, "cross_site");
    let response = post("purge").of(&service.endpoints).expect("an answer");
    assert_eq!(response.headers()["www-authenticate"], "Bearer realm=\"lowtide\"");
    // From wherever, through whatever, by any name, over HTTP/2: who has it is heard.
    let afar = with(&format!("bearer {TOKEN}")).from(None).host("memory.example");
    let afar =
        afar.with("x-forwarded-for", "10.0.0.1").with("origin", "https://memory.example:443");
    assert_eq!(service.ask(&afar).0, StatusCode::ACCEPTED);
    let mut two = with(&right).without("host");
    two.address = "https://memory.example/memory/purge".to_owned();
    assert_eq!(service.ask(&two).0, StatusCode::ACCEPTED);
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

#[test]
fn verbs_are_heard_ten_at_once_and_then_one_a_second() {
    let service = Service::start(None);
    let heard = || {
        let asked = (0..50).map(|_| service.ask(&post("purge")).0);
        asked.filter(|status| *status != StatusCode::TOO_MANY_REQUESTS).count()
    };
    // Refused requests take nothing from those that are heard.
    for _ in 0..100 {
        service.ask(&post("purge").without("lowtide-admin"));
    }
    assert_eq!(heard(), 10);
    let response = post("purge").of(&service.endpoints).expect("an answer");
    assert_eq!(response.status(), StatusCode::TOO_MANY_REQUESTS);
    assert_eq!(response.headers()["retry-after"], "1");
    service.clock.advance(Duration::from_secs(3));
    assert_eq!(heard(), 3);
    service.outcome();
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}

/// Keeps what is logged, as text.
#[derive(Clone, Default)]
struct Log(Arc<Mutex<Vec<u8>>>);

impl Log {
    /// Returns what `work` logs on this thread.
    fn of(work: impl FnOnce()) -> String {
        let log = Self::default();
        let writer = log.clone();
        let subscriber = tracing_subscriber::fmt().with_ansi(false);
        let subscriber = subscriber.with_writer(move || writer.clone()).finish();
        tracing::subscriber::with_default(subscriber, work);
        let text = log.0.lock().expect("no panic").clone();
        String::from_utf8(text).expect("text")
    }
}

impl std::io::Write for Log {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        self.0.lock().expect("no panic").extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

#[test]
fn every_verb_is_logged_with_who_asked_and_no_token_ever_is() {
    let service = Service::start(Some(TOKEN));
    let wrong = TOKEN.replace('a', "b");
    let text = Log::of(|| {
        let with = |token: &str| post("purge").with("authorization", &format!("Bearer {token}"));
        service.ask(&with(TOKEN));
        for _ in 0..30 {
            service.ask(&with(&wrong));
        }
        service.clock.advance(Duration::from_secs(1));
        service.ask(&with(&wrong));
    });
    let lines = |what: &str| text.lines().filter(|line| line.contains(what)).count();
    assert_eq!(lines("admin task requested"), 1, "{text}");
    assert!(text.contains(r#"command="purge""#) && text.contains(HERE), "{text}");
    assert_eq!(lines("admin request rejected"), 11, "ten at once, then one a second: {text}");
    assert!(text.contains(r#"reason="token""#) && text.contains("unlogged=20"), "{text}");
    assert!(!text.contains(TOKEN) && !text.contains(&wrong), "{text}");
    let told = format!("{:?}", service.endpoints);
    assert!(!told.contains(TOKEN), "{told}");
    service.outcome();
    assert!(service.memory.shutdown_blocking(SOON).is_clean());
}
