//! Observe mode behind a layer: what it counts is what enforcing mode does, and nothing else
//! happens.

use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::hint::black_box;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{Empty, Full};
use lowtide::admission::{AdmissionMode, AdmissionStats, Budget, Cost, Permit, Priority};
use lowtide::admission::{RejectReason, RequestPhase};
use lowtide::clock::{Clock, ManualClock, Moment};
use lowtide::config::DeviceChoice;
use lowtide::service::{Endpoints, MemoryLayer, Peer, RequestBody};
use lowtide::{ByteSize, Memory};
use serde_json::{Value, json};
use tower::{Layer, Service, service_fn};

use crate::polled::{cloneable, poll, wait_once};
use crate::service_slow::Fed;
use crate::service_waiting::Bed;
use crate::support::{Tree, advance_until};

const STEP: Duration = Duration::from_millis(10);
const SEED: u64 = 42;
const ROUTES: [&str; 4] = ["/words", "/embed", "/report", "/index"];

type Call = Pin<Box<dyn Future<Output = StatusCode>>>;
type Empties = Request<RequestBody<Empty<Bytes>>>;

/// A detached `Memory` of 256 MiB whose clock and loop a test advances.
struct Steps {
    memory: Memory,
    clock: Arc<ManualClock>,
    step: Box<dyn FnMut() -> bool>,
}

impl Steps {
    fn new(mode: AdmissionMode) -> Self {
        let clock = Arc::new(ManualClock::new());
        let builder = Memory::builder().memory_limit(ByteSize::mib(256)).clock(clock.clone());
        let started = builder.admission_mode(mode).device(DeviceChoice::None).start_stepped();
        let (memory, step) = started.expect("it needs nothing of the process");
        Self { memory, clock, step: Box::new(step) }
    }

    fn step(&mut self) {
        self.clock.advance(STEP);
        assert!((self.step)(), "a job is left");
    }

    fn stats(&self) -> AdmissionStats {
        self.memory.admission().stats()
    }

    /// Sends so many requests for each 10 ms, and returns for each if it ran at once and would have
    /// in enforcing mode, and how many were answered with 200.
    fn run(&mut self, requests: usize, each: f64, max_wait: Duration) -> (Vec<[bool; 2]>, usize) {
        let clock: Arc<dyn Clock> = self.clock.clone();
        let flat = |_: &http::request::Parts| Cost::host(ByteSize::mib(1));
        let layer = MemoryLayer::new(self.memory.admission().clone(), flat);
        let layer = layer.clock(clock).with_max_wait(max_wait);
        let started = Arc::new(AtomicUsize::new(0));
        let (mut calls, mut decisions, mut served): (Vec<Call>, _, _) = (Vec::new(), vec![], 0);
        let (mut chance, mut due) = (SEED, 0.0);
        let mut draw = |below: u64| {
            chance ^= chance << 13;
            chance ^= chance >> 7;
            chance ^= chance << 17;
            chance % below
        };
        while decisions.len() < requests || !calls.is_empty() {
            self.step();
            due += if decisions.len() < requests { each } else { 0.0 };
            while due >= 1.0 && decisions.len() < requests {
                due -= 1.0;
                let route = ROUTES[usize::try_from(draw(4)).expect("small")];
                let held = usize::try_from(2 + draw(4)).expect("small") << 20;
                let ends = self.clock.now() + STEP * u32::try_from(2 + draw(10)).expect("small");
                let before = (started.load(Ordering::Relaxed), self.observed());
                let mut call = self.call(layer.clone(), route, held, ends, &started);
                let answer = poll(&mut call);
                let ran = started.load(Ordering::Relaxed) > before.0;
                decisions.push([ran, ran && self.observed() == before.1]);
                match answer {
                    Poll::Ready(status) => served += usize::from(status == StatusCode::OK),
                    Poll::Pending => calls.push(call),
                }
            }
            calls.retain_mut(|call| match poll(call) {
                Poll::Ready(status) => {
                    served += usize::from(status == StatusCode::OK);
                    false
                }
                Poll::Pending => true,
            });
        }
        (decisions, served)
    }

    fn observed(&self) -> u64 {
        self.stats().observed.iter().sum()
    }

    /// A call of a handler that holds memory until then.
    fn call(
        &self,
        layer: MemoryLayer,
        route: &str,
        held: usize,
        ends: Moment,
        started: &Arc<AtomicUsize>,
    ) -> Call {
        let (clock, started) = (Arc::clone(&self.clock), Arc::clone(started));
        let handler = move |_: Empties| {
            let (clock, started) = (Arc::clone(&clock), Arc::clone(&started));
            async move {
                started.fetch_add(1, Ordering::Relaxed);
                let held: Vec<u8> = black_box(Vec::with_capacity(held));
                poll_fn(|_| if clock.now() < ends { Poll::Pending } else { Poll::Ready(()) }).await;
                drop(held);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            }
        };
        let request = Request::post(route).body(Empty::new()).expect("a valid head");
        let call = layer.layer(service_fn(handler)).call(request);
        Box::pin(async { call.await.expect("infallible").status() })
    }

    /// Sends an admin command, and returns its answer.
    fn command(&self, path: &str) -> (StatusCode, Value) {
        let endpoints = Endpoints::new(Some(self.memory.clone())).with_local_admin();
        let request = Request::post(path).header("host", "localhost").header("lowtide-admin", "1");
        let peer = Peer(([127, 0, 0, 1], 50_000).into());
        let request = request.extension(peer).body(()).expect("valid");
        let answer = endpoints.answer_request(&request).expect("one of its paths");
        (answer.status(), serde_json::from_slice(answer.body()).expect("JSON"))
    }

    fn shown(&self, query: &str) -> Value {
        let endpoints = Endpoints::new(Some(self.memory.clone()));
        let request = Request::get(format!("/memory{query}")).body(()).expect("valid");
        let answer = endpoints.answer_request(&request).expect("one of its paths");
        serde_json::from_slice(answer.body()).expect("JSON")
    }
}

#[test]
fn below_the_limit_observe_mode_decides_as_enforcing_mode_and_nothing_waits() {
    let wait = Duration::from_secs(2);
    let (enforced, served) = Steps::new(AdmissionMode::Enforce).run(4_000, 4.0, wait);
    let mut observing = Steps::new(AdmissionMode::Observe);
    let (observed, also_served) = observing.run(4_000, 4.0, wait);
    assert_eq!((served, also_served), (4_000, 4_000));
    let stats = observing.stats();
    assert_eq!((stats.waited_total, stats.waited_time_total), (0, Duration::ZERO));
    assert!(observed.iter().all(|[ran, _]| *ran), "one waited");
    let differ = enforced.iter().zip(&observed).filter(|(one, other)| one[0] != other[1]).count();
    let at_once = enforced.iter().filter(|[ran, _]| *ran).count();
    println!("seed {SEED}: {differ} of 4000 differ, {at_once} ran at once, {:?}", stats.observed);
    assert!(differ <= 80, "{differ} of 4000 differ");
}

#[test]
fn above_the_limit_observe_mode_admits_all_and_counts_what_enforcing_mode_rejects() {
    let mut enforcing = Steps::new(AdmissionMode::Enforce);
    let (_, served) = enforcing.run(4_000, 12.0, Duration::ZERO);
    let mut observing = Steps::new(AdmissionMode::Observe);
    let (_, all) = observing.run(4_000, 12.0, Duration::ZERO);
    assert_eq!((all, observing.stats().rejected), (4_000, [0; 10]));
    let (rejected, observed) = (4_000 - served as u64, observing.observed());
    println!("seed {SEED}: {rejected} rejected, {observed} observed");
    assert!(rejected > 1_000, "{rejected}: it is not above the limit");
    assert!(observed.abs_diff(rejected) < rejected / 5, "{observed} of {rejected}");
    let routes = observing.memory.report().usage_by_route();
    let by_route: u64 = routes.iter().flat_map(|route| route.observed).sum();
    assert_eq!(by_route, observed, "each has a route, or is one of the others");
    let shown = observing.shown("?with=routes");
    let first: u64 = routes[0].observed[RejectReason::Full as usize];
    assert_eq!(shown["routes"][0]["observed"]["full"], json!(first));
}

#[test]
fn an_admin_command_switches_the_mode_and_admits_what_waits() {
    let mut steps = Steps::new(AdmissionMode::Enforce);
    let all = steps.memory.admission().ledger(Budget::Host).allowance();
    let full = steps.memory.admission().try_admit(Cost::host(all)).expect("it fits");
    let flat = |_: &http::request::Parts| Cost::host(ByteSize::mib(8));
    let layer = MemoryLayer::new(steps.memory.admission().clone(), flat).without_slow_start();
    let started = Arc::new(AtomicUsize::new(0));
    let mut call = steps.call(layer, "/", 0, Moment::ORIGIN, &started);
    assert!(poll(&mut call).is_pending());
    assert_eq!(steps.stats().waiting, 1);
    assert_eq!(steps.shown("")["requests"]["observe_mode"], json!(false));

    let (status, told) = steps.command("/memory/admission?mode=observe");
    assert_eq!((status, &told["subject"]), (StatusCode::ACCEPTED, &json!("observe")));
    steps.step();
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    let shown = steps.shown("?with=routes,settings,admin_tasks");
    let requests = &shown["requests"];
    assert_eq!(
        (&requests["observe_mode"], &requests["observed"]["full"]),
        (&json!(true), &json!(1))
    );
    let said =
        "Observe mode: every request is admitted; would have waited or been rejected: 1 full.";
    assert_eq!(shown["findings"][0]["text"], json!(said));
    assert_eq!(shown["settings"]["LOWTIDE_ADMISSION"]["value"], json!("enforce"), "as set");

    assert_eq!(steps.command("/memory/admission?mode=enforce").0, StatusCode::ACCEPTED);
    steps.step();
    assert_eq!(steps.memory.admission().mode(), AdmissionMode::Enforce);
    drop(full);
    for (query, said) in [("?mode=off", "enforce or observe"), ("", "mode"), ("?mode=", "observe")]
    {
        let (status, told) = steps.command(&format!("/memory/admission{query}"));
        assert_eq!(status, StatusCode::BAD_REQUEST, "{query}");
        assert!(told["detail"].as_str().is_some_and(|text| text.contains(said)), "{told}");
    }
}

#[test_fork::test]
fn a_request_that_would_be_cancelled_goes_on_and_is_counted_once() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
    let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
    let builder = builder.admission_mode(AdmissionMode::Observe).device(DeviceChoice::None);
    let memory = builder.start().expect("starts");
    let all = Cost::host(ByteSize::mib(256));
    let _full = memory.admission().try_admit_with(all, Priority::Exempt).expect("exempt");
    let flat = |_: &http::request::Parts| Cost::host(ByteSize::kib(64));
    let layer = MemoryLayer::new(memory.admission().clone(), flat);
    let handler = |_: Empties| async {
        let mut held: Vec<Vec<u8>> = Vec::new();
        for _ in 0..4 {
            held.push(black_box(Vec::with_capacity(8 << 20)));
            wait_once().await;
        }
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    };
    let mut service = layer.layer(service_fn(cloneable(handler)));
    let mut call = Box::pin(service.call(Request::new(Empty::new())));
    for _ in 0..4 {
        assert!(poll(&mut call).is_pending());
    }
    // It would have waited first, for the room that is taken.
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { panic!("it was ended") };
    assert_eq!(answer.status(), StatusCode::OK);
    drop(answer);
    let stats = memory.admission().stats();
    assert_eq!((stats.rejected, stats.observed.iter().sum::<u64>()), ([0; 10], 1));
}

#[test_fork::test]
fn at_level_critical_a_service_that_observes_is_ready_and_cancels_nothing() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
    let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
    let memory = builder.device(DeviceChoice::None).start().expect("starts");
    tree.hold(250);
    let ready = || {
        let answer = Endpoints::new(Some(memory.clone())).answer("/readyz").expect("a path");
        answer.status()
    };
    let critical = || ready() == StatusCode::SERVICE_UNAVAILABLE;
    advance_until(&clock, STEP, "level critical", critical);
    memory.admission().set_mode(AdmissionMode::Observe);
    assert_eq!(ready(), StatusCode::OK);
    let admitted = memory.admission().try_admit(Cost::host(ByteSize::mib(1)));
    assert!(admitted.is_ok_and(|permit: Permit| permit.observed().is_some()));
}

#[test_fork::test]
fn a_suspended_request_gets_the_end_of_its_body_when_the_mode_is_switched() {
    let bed = Bed::new();
    let (body, full) = (Fed::default(), bed.fill());
    drop(full);
    body.arrives(1);
    let mut slow = bed.upload_to(bed.layer(), &body);
    assert!(poll(&mut slow).is_pending());
    let _full = bed.fill();
    let mut other = bed.upload_to(bed.layer(), &Fed::default());
    assert!(poll(&mut other).is_pending());
    advance_until(&bed.clock, STEP, "a suspension", || bed.stats().suspended_total == 1);
    let _taken =
        bed.memory.admission().try_admit_with(Cost::host(ByteSize::mib(256)), Priority::Exempt);
    body.ends();
    assert!(poll(&mut slow).is_pending(), "there is no room for its claim");
    bed.memory.admission().set_mode(AdmissionMode::Observe);
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("it waits") };
    assert_eq!(answer.status(), StatusCode::OK);
    drop(answer);
    let phases = bed.memory.report().oldest_requests();
    assert!(phases.iter().all(|request| request.phase != RequestPhase::Suspended));
}
