//! Requests that wait for room in the tower layer, before their bodies are read.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, RwLock};
use std::task::{Context, Poll};
use std::thread;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::Full;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::service::{ContentLength, MemoryLayer, RequestBody};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{AdmissionStats, Budget, Cost, Permit, RejectReason};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{poll, wait_once};
use crate::support::{Tree, advance_until, rest, until};

const SMALL: ByteSize = ByteSize::mib(1);
const TICK: Duration = Duration::from_millis(10);

type Call = Pin<Box<dyn Future<Output = StatusCode>>>;

/// A body that counts how often it was polled.
#[derive(Clone, Default)]
struct Counted(Arc<AtomicUsize>);

impl Body for Counted {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.fetch_add(1, Ordering::Relaxed);
        Poll::Ready(None)
    }
}

/// A limit of 256 MiB, and a clock that stands still.
pub(crate) struct Bed {
    pub(crate) memory: Memory,
    pub(crate) clock: Arc<ManualClock>,
    _tree: Tree,
}

impl Bed {
    pub(crate) fn new() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        Self { memory, clock, _tree: tree }
    }

    /// A call of a handler that waits once and holds `mib` meanwhile. The estimate is [`SMALL`],
    /// and trusted.
    fn call(&self, body: Counted, mib: usize) -> Call {
        let flat = |_: &http::request::Parts| Cost::host(SMALL);
        let layer = MemoryLayer::new(self.memory.admission().clone(), flat);
        call(&layer.without_slow_start(), "/", body, mib)
    }

    /// Reserves what is left for requests.
    pub(crate) fn fill(&self) -> Permit {
        let ledger = self.memory.admission().ledger(Budget::Host);
        let left = || Cost::host(ledger.allowance().saturating_sub(ledger.reserved()));
        // A tick may change the allowance meanwhile.
        let mut permit = None;
        until("it fits", || {
            permit = self.memory.admission().try_admit(left()).ok();
            permit.is_some()
        });
        permit.expect("it fits")
    }

    pub(crate) fn stats(&self) -> AdmissionStats {
        rest(&self.clock);
        self.memory.admission().stats()
    }
}

fn call(layer: &MemoryLayer, path: &str, body: Counted, mib: usize) -> Call {
    let handler = move |_: Request<RequestBody<Counted>>| async move {
        let held: Vec<u8> = black_box(Vec::with_capacity(mib << 20));
        wait_once().await;
        drop(held);
        Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
    };
    let request = Request::post(path).body(body).expect("a valid head");
    let call = layer.layer(service_fn(handler)).call(request);
    Box::pin(async { call.await.expect("infallible").status() })
}

/// The bug: a burst was rejected while the service could have served it within a second.
#[test]
fn a_request_that_does_not_fit_waits_unread_until_others_end() {
    let bed = Bed::new();
    let full = bed.fill();
    let body = Counted::default();
    let mut call = bed.call(body.clone(), 0);
    assert!(poll(&mut call).is_pending());
    assert_eq!((bed.stats().waiting, body.0.load(Ordering::Relaxed)), (1, 0));
    drop(full);
    assert!(poll(&mut call).is_pending(), "the handler waits once");
    assert_eq!((bed.stats().waiting, bed.stats().held()), (0, 1));
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    let stats = bed.stats();
    assert_eq!((stats.waited_total, stats.rejected), (1, [0; 10]));
}

/// The bug: small requests waited for all large ones that fitted into memory, 80 ms in the mean.
#[test]
fn while_large_requests_compute_on_all_processors_further_ones_wait_and_small_ones_pass() {
    let bed = Bed::new();
    let layer = |claim| {
        let flat = move |_: &http::request::Parts| Cost::host(claim);
        MemoryLayer::new(bed.memory.admission().clone(), flat).without_slow_start()
    };
    let large = layer(SMALL);
    let processors = thread::available_parallelism().map_or(1, usize::from);
    let (computed, ends) = (RwLock::new(()), Counted::default());
    let computing = computed.write().expect("not poisoned");
    thread::scope(|scope| {
        for _ in 0..processors {
            let work = |_: Request<RequestBody<Counted>>| async {
                drop(computed.read());
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            };
            let mut service = large.layer(service_fn(work));
            scope.spawn(move || {
                let request = Request::post("/").body(Counted::default()).expect("a valid head");
                let mut call = Box::pin(service.call(request));
                assert!(poll(&mut call).is_ready());
            });
        }
        let mut late = None;
        advance_until(&bed.clock, TICK, "a limit", || {
            late = None;
            let late = late.insert(call(&large, "/", ends.clone(), 0));
            assert!(poll(late).is_pending());
            bed.stats().waiting == 1
        });
        let mut small = call(&layer(ByteSize::kib(16)), "/", Counted::default(), 0);
        assert!(poll(&mut small).is_pending(), "its handler waits once");
        assert_eq!(poll(&mut small), Poll::Ready(StatusCode::OK));
        drop(computing);
        let late = late.as_mut().expect("it waits");
        advance_until(&bed.clock, TICK, "its turn", || poll(late) == Poll::Ready(StatusCode::OK));
    });
    assert_eq!(bed.stats().rejected, [0; 10]);
}

/// axum#2818: the first upload of a route was rejected as too large, though its bytes fitted.
#[test]
fn large_uploads_may_be_the_first_of_their_route_one_after_the_other() {
    let bed = Bed::new();
    let clock: Arc<dyn Clock> = bed.clock.clone();
    let layer = bed.memory.layer().clock(clock);
    let upload = |mib: usize| -> Call {
        let handler = |_: Request<RequestBody<Counted>>| async {
            wait_once().await;
            Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
        };
        let request = Request::post("/").header("content-length", mib << 20);
        let request = request.body(Counted::default()).expect("a valid head");
        let call = layer.layer(service_fn(handler)).call(request);
        Box::pin(async { call.await.expect("infallible").status() })
    };
    let ceiling = bed.memory.admission().ledger(Budget::Host).ceiling();
    assert!(ceiling < ByteSize::mib(2 * 120), "{ceiling}: an estimate is twice the length");
    let (mut first, mut second) = (upload(120), upload(120));
    assert!(poll(&mut first).is_pending() && poll(&mut second).is_pending());
    assert_eq!((bed.stats().held(), bed.stats().waiting), (1, 1), "they run alone");
    for call in [&mut first, &mut second] {
        advance_until(&bed.clock, TICK, "its end", || poll(call) == Poll::Ready(StatusCode::OK));
    }
    assert_eq!(bed.stats().rejected, [0; 10]);
    assert_eq!(poll(&mut upload(160)), Poll::Ready(StatusCode::PAYLOAD_TOO_LARGE));
}

/// A factor of 8, as was advised for JSON, made a service of JSON serve a third as much.
#[test]
fn a_high_factor_reserves_what_the_default_does_once_eight_requests_were_measured() {
    let claims = [None, Some(8.0)].map(|factor| {
        let bed = Bed::new();
        let layer = bed.memory.layer();
        let estimate = factor
            .map_or_else(ContentLength::default, |factor| ContentLength::default().factor(factor));
        let layer = layer.with_estimate(estimate);
        let parse = || {
            let handler = |_: Request<RequestBody<Counted>>| async {
                let held: Vec<u8> = black_box(Vec::with_capacity(4 << 20));
                wait_once().await;
                drop(held);
                Ok::<_, Infallible>(Response::new(Full::<Bytes>::default()))
            };
            let request = Request::post("/").header("content-length", 1 << 20);
            let request = request.body(Counted::default()).expect("a valid head");
            let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
            assert!(poll(&mut call).is_pending(), "its handler waits once");
            let claim = bed.memory.admission().ledger(Budget::Host).requests();
            assert!(poll(&mut call).is_ready());
            claim.get() >> 16
        };
        (0..8).for_each(|_| _ = parse());
        parse()
    });
    assert_eq!(claims[0], claims[1], "in units of 64 KiB");
}

#[test]
fn a_request_that_waits_for_too_long_is_rejected_once() {
    let bed = Bed::new();
    let full = bed.fill();
    let mut call = bed.call(Counted::default(), 0);
    assert!(poll(&mut call).is_pending());
    let begun = bed.clock.now();
    advance_until(&bed.clock, TICK, "its deadline", || bed.stats().waiting == 0);
    assert!(bed.clock.now() - begun >= Duration::from_secs(2), "{:?}", bed.clock.now() - begun);
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(bed.stats().rejected_total(RejectReason::Full), 1);
    drop(full);
}

#[test]
fn a_layer_without_its_own_setting_waits_as_configured() {
    let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
    let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
    let builder = builder.device(DeviceChoice::None).max_wait(Duration::ZERO);
    let bed = Bed { memory: builder.start().expect("starts"), clock, _tree: tree };
    let full = bed.fill();
    let mut configured = call(&bed.memory.layer(), "/", Counted::default(), 0);
    assert_eq!(poll(&mut configured), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    let own = bed.memory.layer().with_max_wait(Duration::from_secs(1));
    assert!(poll(&mut call(&own, "/", Counted::default(), 0)).is_pending());
    drop(full);
}

#[test]
fn without_a_wait_a_request_is_rejected_at_once() {
    let bed = Bed::new();
    let full = bed.fill();
    let flat = |_: &http::request::Parts| Cost::host(SMALL);
    let layer = MemoryLayer::new(bed.memory.admission().clone(), flat);
    let mut call = call(&layer.with_max_wait(Duration::ZERO), "/", Counted::default(), 0);
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    drop(full);
}

/// The bug: 400 small requests at once, 50 served and 350 rejected.
#[test]
fn all_of_a_burst_are_served_though_few_fit_at_once() {
    let bed = Bed::new();
    let mut calls: Vec<_> = (0..400).map(|_| bed.call(Counted::default(), 1)).collect();
    let mut served = 0;
    // Ends: each round serves at least one request.
    while !calls.is_empty() {
        let before = calls.len();
        calls.retain_mut(|call| match poll(call) {
            Poll::Pending => true,
            Poll::Ready(status) => {
                assert_eq!(status, StatusCode::OK);
                false
            }
        });
        served += before - calls.len();
        assert!(bed.stats().held() < 400, "they fit at once");
    }
    assert_eq!((served, bed.stats().rejected), (400, [0; 10]));
    assert!(bed.stats().waited_total > 100, "{}", bed.stats().waited_total);
}

#[test]
fn a_client_that_leaves_while_it_waits_leaves_nothing() {
    let bed = Bed::new();
    let full = bed.fill();
    let mut call = bed.call(Counted::default(), 0);
    assert!(poll(&mut call).is_pending());
    drop(call);
    assert_eq!((bed.stats().waiting, bed.stats().rejected), (0, [0; 10]));
    drop(full);
    assert!(bed.memory.shutdown_blocking(Duration::ZERO).is_clean());
}

#[test]
fn shutting_down_ends_the_wait() {
    let bed = Bed::new();
    let full = bed.fill();
    let mut call = bed.call(Counted::default(), 0);
    assert!(poll(&mut call).is_pending());
    bed.memory.admission().close();
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    assert_eq!(bed.stats().rejected_total(RejectReason::ShuttingDown), 1);
    drop(full);
}

/// A waiting request estimates again: what its route needs may be known by then.
#[test]
fn requests_of_an_unknown_route_wait_for_its_measurement_and_reserve_what_it_needs() {
    let bed = Bed::new();
    let estimate = ByteSize::mib(6);
    let clock: Arc<dyn Clock> = bed.clock.clone();
    let flat = move |_: &http::request::Parts| Cost::host(estimate);
    let layer = MemoryLayer::new(bed.memory.admission().clone(), flat).clock(clock);
    let mut calls: Vec<_> = (0..12).map(|_| call(&layer, "/new", Counted::default(), 50)).collect();
    for call in &mut calls {
        assert!(poll(call).is_pending());
    }
    assert_eq!((bed.stats().held(), bed.stats().waiting), (1, 11), "one is the measurement");
    let mut most = 0;
    // Ends: each round lets the time pass, and serves some.
    while !calls.is_empty() {
        calls.retain_mut(|call| poll(call).is_pending());
        most = most.max(bed.stats().held());
        bed.clock.advance(TICK);
    }
    assert!(most <= 4, "{most} at once, though five of 50 MiB exceed the highest ceiling");
    assert_eq!(bed.stats().rejected, [0; 10]);
}
