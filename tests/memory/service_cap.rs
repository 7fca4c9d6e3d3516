//! Requests that outgrow their claim: they are cancelled while memory is short, and ended if they
//! go on.

use std::convert::Infallible;
use std::future::{Future, pending};
use std::hint::black_box;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use lowtide::admission::{
    Admission, Budget, Cost, Level, Permit, Priority, RejectReason, Rejected,
};
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, RequestBody, RequestPermit, ResponseBody, rejection, scope};
use lowtide::{ByteSize, Memory};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{cloneable, wait_once};
use crate::support::{Tree, advance_until, rest, until};

const MIB: usize = 1 << 20;
/// Each request claims twice as much.
const ESTIMATE: ByteSize = ByteSize::mib(1);
const GRACE: Duration = Duration::from_millis(100);

type Answer = Response<Full<Bytes>>;
type Asked = Request<RequestBody<Full<Bytes>>>;
type Call = Pin<Box<dyn Future<Output = Response<ResponseBody<Full<Bytes>>>>>>;

/// A service with a limit of 256 MiB, whose clock stands still.
struct Bed {
    memory: Memory,
    clock: Arc<ManualClock>,
    tree: Tree,
}

impl Bed {
    fn new() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        Self { memory, clock, tree }
    }

    fn admission(&self) -> &Admission {
        self.memory.admission()
    }

    fn layer(&self) -> MemoryLayer {
        let clock: Arc<dyn Clock> = self.clock.clone();
        let flat = |_: &http::request::Parts| Cost::host(ESTIMATE);
        MemoryLayer::new(self.admission().clone(), flat).clock(clock)
    }

    fn call<F>(&self, path: &str, handler: impl FnMut(Asked) -> F + 'static) -> Call
    where
        F: Future<Output = Answer> + 'static,
    {
        call(self.layer(), path, handler)
    }

    /// Takes all room, so that each growth takes room from others.
    fn fill(&self) -> Permit {
        let all = Cost::host(ByteSize::mib(256));
        self.admission().try_admit_with(all, Priority::Exempt).expect("exempt")
    }

    fn reserved(&self) -> ByteSize {
        rest(&self.clock);
        self.admission().ledger(Budget::Host).reserved()
    }

    fn cancelled(&self) -> u64 {
        self.admission().stats().rejected_total(RejectReason::Outgrown)
    }

    /// The routes of the requests that are cancelled and run.
    fn ending(&self) -> Vec<String> {
        let largest = self.memory.report().largest_requests().into_iter();
        largest.filter(|of| of.is_cancelled).map(|of| of.route).collect()
    }
}

fn call<F>(layer: MemoryLayer, path: &str, mut handler: impl FnMut(Asked) -> F + 'static) -> Call
where
    F: Future<Output = Answer> + 'static,
{
    let handler = move |request| {
        let answer = handler(request);
        async move { Ok::<_, Infallible>(answer.await) }
    };
    let request = Request::post(path).body(Full::default()).expect("a valid head");
    let call = layer.layer(service_fn(cloneable(handler))).call(request);
    Box::pin(async { call.await.expect("infallible") })
}

fn poll_with<F: Future + ?Sized>(call: &mut Pin<Box<F>>, waker: &Waker) -> Poll<F::Output> {
    call.as_mut().poll(&mut Context::from_waker(waker))
}

fn poll(call: &mut Call) -> Poll<StatusCode> {
    poll_with(call, Waker::noop()).map(|answer| answer.status())
}

fn block(mib: usize) -> Vec<u8> {
    black_box(Vec::with_capacity(mib * MIB))
}

/// A handler that waits once, then holds so much and never ends.
fn outgrows(mib: usize) -> impl FnMut(Asked) -> Pin<Box<dyn Future<Output = Answer>>> {
    move |_| {
        Box::pin(async move {
            wait_once().await;
            let _held = block(mib);
            pending().await
        })
    }
}

fn ok() -> Answer {
    Answer::default()
}

/// Counts how often it was woken.
#[derive(Default)]
struct Woken(AtomicUsize);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::SeqCst);
    }
}

impl Woken {
    fn count(&self) -> usize {
        self.0.load(Ordering::SeqCst)
    }
}

#[test]
fn a_runaway_is_ended_after_its_grace_and_others_are_unharmed() {
    let bed = Bed::new();
    let mut other = bed.call("/other", |_| async {
        let held = block(2);
        wait_once().await;
        drop(black_box(held));
        ok()
    });
    assert!(poll(&mut other).is_pending());
    let before = bed.reserved();
    let layer = bed.layer();
    let mut runaway = call(layer.clone(), "/runaway/1", outgrows(40));
    assert!(poll(&mut runaway).is_pending());
    let full = bed.fill();
    assert!(poll(&mut runaway).is_pending(), "it is cancelled, and may end by itself");
    assert_eq!((bed.cancelled(), bed.ending()), (1, vec!["runaway".to_owned()]));
    bed.clock.advance(GRACE - Duration::from_millis(1));
    assert!(poll(&mut runaway).is_pending());
    bed.clock.advance(Duration::from_millis(1));
    let Poll::Ready(answer) = poll_with(&mut runaway, Waker::noop()) else {
        panic!("its grace is over");
    };
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key("retry-after"));
    drop((answer, runaway, full));
    assert_eq!((bed.reserved(), bed.cancelled()), (before, 1));
    let event = bed.memory.report().events().into_iter().find(|event| event.kind == "cancel");
    let event = event.expect("an event");
    assert_eq!(event.about, "runaway");
    assert!(event.text.contains("expected at most 16.0 MiB"), "{}", event.text);
    assert_eq!(poll(&mut other), Poll::Ready(StatusCode::OK));
    // The next one of its route reserves at least what it held.
    drop(other);
    let _next = call(layer, "/runaway/2", |_| pending());
    assert!(bed.reserved() >= ByteSize::mib(40), "{}", bed.reserved());
}

#[test]
fn a_rare_large_request_is_served_while_there_is_room() {
    let bed = Bed::new();
    let mut call = bed.call("/rare", |_| async {
        let held = block(90);
        wait_once().await;
        drop(black_box(held));
        ok()
    });
    assert!(poll(&mut call).is_pending());
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    assert_eq!(bed.cancelled(), 0);
}

/// The bug: unused pages that the next purge would release raised the level, and a request was
/// cancelled though it fitted.
#[test]
fn a_level_alone_cancels_nothing() {
    let bed = Bed::new();
    let mut call = bed.call("/large", outgrows(20));
    assert!(poll(&mut call).is_pending());
    bed.admission().set_level(Level::High);
    assert!(poll(&mut call).is_pending());
    assert_eq!(bed.cancelled(), 0);
}

/// A route in which one request in ten needs 40 times more reserves little for each, so a large one
/// is many times its claim.
#[test]
fn a_large_request_of_a_route_in_which_needs_vary_is_no_runaway() {
    let bed = Bed::new();
    let layer = bed.layer();
    let of = |mib| {
        call(layer.clone(), "/mixed", move |_| async move {
            wait_once().await;
            let held = block(mib);
            wait_once().await;
            drop(black_box(held));
            ok()
        })
    };
    for nth in 0..100 {
        let mut one = of(if nth % 10 == 0 { 40 } else { 1 });
        assert!(poll(&mut one).is_pending());
        assert!(poll(&mut one).is_pending());
        assert_eq!(poll(&mut one), Poll::Ready(StatusCode::OK));
    }
    let before = bed.reserved();
    let mut large = of(100);
    assert!(poll(&mut large).is_pending());
    let claim = bed.reserved().saturating_sub(before);
    assert!(claim < ByteSize::mib(16), "{claim}");
    let _full = bed.fill();
    assert!(poll(&mut large).is_pending());
    assert_eq!(bed.cancelled(), 0);
}

#[test]
fn exempt_requests_and_those_without_a_cap_go_on() {
    let bed = Bed::new();
    let calls = [
        call(bed.layer().exempt(|_| true), "/exempt", outgrows(40)),
        call(bed.layer().with_request_cap(f64::INFINITY), "/uncapped", outgrows(40)),
        call(bed.layer().with_request_cap(64.0), "/within", outgrows(40)),
    ];
    for mut call in calls {
        assert!(poll(&mut call).is_pending());
        let full = bed.fill();
        for _ in 0..3 {
            assert!(poll(&mut call).is_pending());
            bed.clock.advance(GRACE);
        }
        drop(full);
    }
    assert_eq!((bed.cancelled(), bed.ending()), (0, Vec::new()));
}

#[test]
#[should_panic(expected = "request cap of 0.5: expected 1 or more")]
fn a_cap_below_the_claim_is_a_mistake() {
    let _ = MemoryLayer::new(Admission::new(), |_: &http::request::Parts| Cost::ZERO)
        .with_request_cap(0.5);
}

#[test]
fn a_handler_that_waits_for_its_cancellation_answers_itself() {
    let bed = Bed::new();
    let mut call = bed.call("/polite", |request| async move {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        let cancelled = pin!(permit.cancelled());
        wait_once().await;
        let held = block(40);
        assert!(permit.check().is_err(), "it counts what this poll has allocated");
        let rejected = cancelled.await;
        drop(black_box(held));
        let refused =
            [permit.grow(ByteSize::mib(1)), permit.hold(ByteSize::gib(1)), permit.check()];
        assert!(refused.into_iter().all(|result| result == Err(rejected.clone())));
        let Rejected::Outgrown { held, claim, most, .. } = &rejected else { panic!("{rejected}") };
        assert!(*held >= ByteSize::mib(40), "{held}");
        assert_eq!((claim.get(), most.get()), (2 * ESTIMATE.get(), 16 * ESTIMATE.get()));
        rejection(&rejected).map(Into::into)
    });
    assert!(poll(&mut call).is_pending());
    let full = bed.fill();
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    drop((call, full));
    assert_eq!((bed.cancelled(), bed.reserved()), (1, ByteSize::ZERO));
    assert!(bed.memory.report().events().iter().any(|event| event.kind == "cancel"));
}

/// What a handler reserves itself was admitted, and is no growth at the expense of others.
#[test]
fn memory_that_a_handler_reserved_belongs_to_its_claim() {
    let bed = Bed::new();
    let mut call = bed.call("/grows", |request| async move {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        permit.grow(ByteSize::mib(20)).expect("fits");
        wait_once().await;
        let _held = block(40);
        pending().await
    });
    assert!(poll(&mut call).is_pending());
    let _full = bed.fill();
    assert!(poll(&mut call).is_pending());
    assert_eq!(bed.cancelled(), 0);
}

#[test]
fn a_request_that_grows_on_is_ended_before_its_grace() {
    let bed = Bed::new();
    let mut call = bed.call("/grows", |_| async {
        wait_once().await;
        let mut held = vec![block(20)];
        loop {
            wait_once().await;
            held.push(block(4));
        }
    });
    assert!(poll(&mut call).is_pending());
    let _full = bed.fill();
    let polls = (1..10).find(|_| poll(&mut call).is_ready());
    assert_eq!(polls, Some(3), "20 MiB, 24 MiB, and 28 MiB are a quarter more");
}

#[test]
fn a_request_that_holds_more_than_half_the_ceiling_is_told_not_to_retry() {
    let bed = Bed::new();
    let mut call = bed.call("/giant", outgrows(110));
    assert!(poll(&mut call).is_pending());
    let _full = bed.fill();
    assert!(poll(&mut call).is_pending());
    bed.clock.advance(GRACE);
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::PAYLOAD_TOO_LARGE));
}

#[test]
fn an_ended_request_is_answered_in_the_protocol_of_its_client() {
    let bed = Bed::new();
    let request = Request::post("/a.B/C")
        .version(http::Version::HTTP_2)
        .header("content-type", "application/grpc+proto")
        .body(Full::default())
        .expect("a valid head");
    let heads = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&heads);
    let mut handler = outgrows(40);
    let handler = move |request| {
        let answer = handler(request);
        async move { Ok::<_, Infallible>(answer.await) }
    };
    let mut grpc = Box::pin(bed.layer().layer(service_fn(cloneable(handler))).call(request));
    assert!(poll_with(&mut grpc, Waker::noop()).is_pending());
    let full = bed.fill();
    assert!(poll_with(&mut grpc, Waker::noop()).is_pending());
    bed.clock.advance(GRACE);
    let Poll::Ready(Ok(answer)) = poll_with(&mut grpc, Waker::noop()) else { panic!("ended") };
    assert_eq!(answer.headers()["content-type"], "application/grpc+proto");
    assert_eq!(answer.headers()["grpc-status"], "8");
    let live: Vec<_> = bed.memory.report().largest_requests().iter().map(|of| of.live).collect();
    assert!(live.is_empty(), "its handler is gone as it is answered: {live:?}");
    drop((grpc, full));
    let layer = bed.layer().with_rejection(move |_: &Rejected, head: &http::request::Parts| {
        seen.lock().expect("no panic").push((head.method.clone(), head.uri.to_string()));
        Response::default()
    });
    let mut call = call(layer, "/one/two", outgrows(40));
    assert!(poll(&mut call).is_pending());
    let _full = bed.fill();
    assert!(poll(&mut call).is_pending());
    bed.clock.advance(GRACE);
    assert!(poll(&mut call).is_ready());
    assert_eq!(*heads.lock().expect("no panic"), [(http::Method::POST, "/one".to_owned())]);
}

#[test]
fn the_bytes_of_an_ended_request_stay_reserved_until_they_are_freed() {
    let bed = Bed::new();
    let spawned = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&spawned);
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let mut call = bed.call("/spawns", move |_| {
        let slot = Arc::clone(&slot);
        async move {
            let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(scope(async {
                wait_once().await;
                let _held = block(40);
                pending().await
            }));
            *slot.lock().expect("no panic") = Some(task);
            pending().await
        }
    });
    assert!(poll_with(&mut call, &waker).is_pending());
    let mut task = spawned.lock().expect("no panic").take().expect("spawned");
    assert!(poll_with(&mut task, Waker::noop()).is_pending());
    let full = bed.fill();
    assert!(poll_with(&mut task, Waker::noop()).is_pending());
    assert_eq!((bed.cancelled(), woken.count()), (1, 1), "its handler, which waits, is woken");
    assert!(poll_with(&mut call, &waker).is_pending());
    // The loop may still wait as long as it does in an idle service.
    let again = || woken.count() > 1;
    advance_until(&bed.clock, GRACE, "it is woken again", again);
    bed.clock.advance(GRACE);
    assert!(poll_with(&mut call, &waker).is_ready());
    drop((call, full));
    assert!(bed.reserved() >= ByteSize::mib(40), "{}", bed.reserved());
    drop(task);
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

#[test]
fn at_level_critical_the_furthest_above_its_claim_goes_first() {
    let bed = Bed::new();
    let woken = Arc::new(Woken::default());
    let waker = Waker::from(Arc::clone(&woken));
    let [mut worst, mut second, mut within] = [("/worst", 9), ("/second", 6), ("/within", 1)]
        .map(|(path, mib)| bed.call(path, outgrows(mib)));
    for call in [&mut worst, &mut second, &mut within] {
        assert!(poll_with(call, &waker).is_pending());
        assert!(poll_with(call, &waker).is_pending());
    }
    let mut spared = [
        call(bed.layer().exempt(|_| true), "/exempt", outgrows(12)),
        call(bed.layer().with_request_cap(f64::INFINITY), "/uncapped", outgrows(12)),
    ];
    for call in &mut spared {
        assert!(poll(call).is_pending());
        assert!(poll(call).is_pending());
    }
    let permits = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&permits);
    let mut answered = bed.call("/answered", move |request| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        noted.lock().expect("no panic").push(permit);
        async { ok() }
    });
    assert!(poll(&mut answered).is_ready());
    let permit = permits.lock().expect("no panic").pop().expect("noted");
    let _held = permit.measure(|| block(12));
    assert_eq!(bed.cancelled(), 0, "all are below the multiple");
    bed.tree.hold(250);
    let step = Duration::from_millis(1);
    advance_until(&bed.clock, step, "critical", || bed.memory.level() == Level::Critical);
    // It is counted before it is woken.
    until("one is woken", || woken.count() > 0);
    assert_eq!((bed.cancelled(), woken.count()), (1, 1));
    assert_eq!(bed.ending(), ["worst"]);
    assert!(poll(&mut worst).is_pending());
    drop(worst);
    advance_until(&bed.clock, step, "the next", || bed.cancelled() == 2);
    assert_eq!(bed.ending(), ["second"]);
    for _ in 0..2 {
        bed.clock.advance(GRACE);
        let _ = poll(&mut within);
    }
    assert_eq!(bed.cancelled(), 2);
    assert!(poll(&mut second).is_pending());
    bed.clock.advance(GRACE);
    assert_eq!(poll(&mut second), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
}

#[test]
fn a_request_whose_head_was_returned_is_not_interrupted() {
    let bed = Bed::new();
    let permits = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&permits);
    let mut call = bed.call("/upgrade", move |request| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        noted.lock().expect("no panic").push(permit);
        async {
            let mut answer = ok();
            *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
            answer
        }
    });
    let Poll::Ready(answer) = poll_with(&mut call, Waker::noop()) else { panic!("it answers") };
    drop(call);
    let permit = permits.lock().expect("no panic").pop().expect("noted");
    let _full = bed.fill();
    let held = permit.measure(|| block(40));
    assert!(permit.check().is_err(), "what follows the head is told");
    assert_eq!(answer.status(), StatusCode::SWITCHING_PROTOCOLS);
    permit.measure(|| drop(held));
}

#[test]
fn a_request_that_answers_as_it_is_cancelled_is_answered() {
    let bed = Bed::new();
    let kept = Arc::new(Mutex::new(Vec::new()));
    let keeps = Arc::clone(&kept);
    let mut call = bed.call("/last", move |_| {
        let keeps = Arc::clone(&keeps);
        async move {
            wait_once().await;
            keeps.lock().expect("no panic").push(block(40));
            ok()
        }
    });
    assert!(poll(&mut call).is_pending());
    let full = bed.fill();
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    drop((call, full));
    assert_eq!((bed.cancelled(), bed.reserved()), (1, ByteSize::ZERO));
}

#[test]
fn a_cancelled_handler_that_panics_leaves_nothing_behind() {
    let bed = Bed::new();
    let mut call = bed.call("/panics", |_| async {
        wait_once().await;
        let _held = block(40);
        wait_once().await;
        resume_unwind(Box::new("bug"))
    });
    assert!(poll(&mut call).is_pending());
    let full = bed.fill();
    assert!(poll(&mut call).is_pending());
    assert!(catch_unwind(AssertUnwindSafe(|| poll(&mut call))).is_err());
    drop((call, full));
    assert_eq!((bed.cancelled(), bed.reserved()), (1, ByteSize::ZERO));
    assert_eq!(bed.memory.report().largest_requests(), []);
}
