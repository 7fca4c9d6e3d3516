//! Requests that are measured: what they hold is booked between polls, the next of their kind books
//! as much at once, and few large ones run until that is known.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::convert::Infallible;
use std::future::Future;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, OnceLock};
use std::task::Poll;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::Full;
use lowtide::clock::{Clock, ManualClock, SystemClock};
use lowtide::config::DeviceChoice;
use lowtide::memory::PartKind;
use lowtide::service::{MemoryLayer, RequestBody, RequestPermit};
use lowtide::{ByteSize, Memory};
use lowtide_admission::{Admission, Budget, Cost, RejectReason};
use test_fork::test;
use tower::util::BoxCloneSyncService;
use tower::{Layer, Service, service_fn};

use crate::polled::{poll, wait_once};
use crate::support::{Tree, advance_until, rest, until};

const MIB: usize = 1 << 20;
const SMALL: ByteSize = ByteSize::kib(16);
/// One of these runs while its route is not known, and nine fit.
const LARGE: ByteSize = ByteSize::kib(10_752);

type Asked = Request<RequestBody<Full<Bytes>>>;
type Answer = Response<Full<Bytes>>;
type Handler = BoxCloneSyncService<Asked, Answer, Infallible>;
type Ask = Box<dyn FnMut(&str, ByteSize) -> Call>;
type Call = Pin<Box<dyn Future<Output = StatusCode>>>;

/// A service with a limit of 256 MiB, whose clock stands still.
struct Bed {
    memory: Memory,
    clock: Arc<ManualClock>,
    service: Ask,
    tree: Tree,
}

impl Bed {
    /// The estimate of a request is in its header.
    fn new(handler: Handler) -> Self {
        Self::starting(true, handler)
    }

    fn starting(slowly: bool, handler: Handler) -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let of_all: Arc<dyn Clock> = clock.clone();
        let builder = Memory::builder().clock(of_all.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        let service = service(memory.admission(), of_all, handler, slowly);
        Self { memory, clock, service, tree }
    }

    /// A request that was polled once.
    fn call(&mut self, path: &str, estimate: ByteSize) -> Result<Call, StatusCode> {
        rest(&self.clock);
        let mut call = (self.service)(path, estimate);
        match poll(&mut call) {
            Poll::Pending => Ok(call),
            Poll::Ready(status) => Err(status),
        }
    }

    fn reserved(&self) -> ByteSize {
        rest(&self.clock);
        self.memory.admission().ledger(Budget::Host).reserved()
    }

    /// Calls until it is refused, at most 50 times: those that run.
    fn fill(&mut self, path: &str, estimate: ByteSize) -> Vec<Call> {
        (0..50).map_while(|_| self.call(path, estimate).ok()).collect()
    }
}

fn service(
    admission: &Admission,
    clock: Arc<dyn Clock>,
    handler: Handler,
    starts_slowly: bool,
) -> Ask {
    let estimate = |head: &http::request::Parts| {
        let bytes = head.headers["x-estimate"].to_str().expect("text").parse().expect("bytes");
        Cost::host(ByteSize::new(bytes))
    };
    let layer = MemoryLayer::new(admission.clone(), estimate).clock(clock);
    let layer = layer.with_max_wait(Duration::ZERO);
    let layer = if starts_slowly { layer } else { layer.without_slow_start() };
    let mut service = layer.layer(handler);
    Box::new(move |path, estimate| {
        let request = Request::post(path).header("x-estimate", estimate.get());
        let call = service.call(request.body(Full::default()).expect("a valid head"));
        Box::pin(async { call.await.expect("no error").status() })
    })
}

fn handler<F>(answer: impl Fn(Asked) -> F + Clone + Send + Sync + 'static) -> Handler
where
    F: Future<Output = ()> + Send + 'static,
{
    BoxCloneSyncService::new(service_fn(move |request| {
        let answer = answer(request);
        async move {
            answer.await;
            Ok(Answer::default())
        }
    }))
}

fn block(mib: usize) -> Vec<u8> {
    black_box(Vec::with_capacity(mib * MIB))
}

fn about(reserved: ByteSize, mib: u64) -> bool {
    reserved.get().abs_diff(ByteSize::mib(mib).get()) < ByteSize::kib(512).get()
}

/// The bug: requests that needed several times their estimate were admitted together before any of
/// them was known, and the kernel killed the service.
#[test]
fn large_requests_of_an_unknown_route_ran_all_at_once() {
    let mut bed = Bed::new(handler(|request| async move {
        let bytes = request.headers()["x-estimate"].to_str().expect("text").parse();
        let held: Vec<u8> = black_box(Vec::with_capacity(bytes.expect("bytes")));
        wait_once().await;
        drop(held);
    }));
    let first = bed.call("/a/1", LARGE).expect("the first");
    drop(bed.call("/b", LARGE).expect("another route"));
    drop(first);
    // Each that succeeds lets one more run.
    for running in [1, 2, 4] {
        let calls = bed.fill("/a/1", LARGE);
        assert_eq!(calls.len(), running);
        let shed = bed.memory.admission().stats().rejected_total(RejectReason::SlowStart);
        assert_eq!(shed, u64::from(running.ilog2()) + 1);
        assert_eq!(bed.fill("/a/1", SMALL).len(), 50, "small requests are not held up");
        for mut call in calls {
            assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
        }
    }
    // Nine with the factor 2; the loop may have measured a lower one.
    assert!(bed.fill("/a/1", LARGE).len() >= 4, "as many as fit");
    assert!(bed.memory.shutdown_blocking(Duration::ZERO).is_clean());
}

/// The bug: each admitted request grew to what it had reserved, and the time of all others began
/// anew with that, so a route that was called often waited for its first answers.
#[test]
fn growth_within_a_claim_holds_up_nobody() {
    let mut bed = Bed::new(handler(|request| async move {
        let bytes = request.headers()["x-estimate"].to_str().expect("text").parse();
        let _held: Vec<u8> = black_box(Vec::with_capacity(bytes.expect("bytes")));
        std::future::pending().await
    }));
    let mut running = bed.fill("/", LARGE);
    assert_eq!(running.len(), 1);
    for expected in [2, 4] {
        bed.clock.advance(Duration::from_millis(125));
        running.extend(bed.fill("/", LARGE));
        assert_eq!(running.len(), expected);
    }
}

/// The bug: an estimate that was too high rejected requests that would have fit, for ever.
#[test]
fn an_estimate_is_a_hint_until_eight_requests_are_measured() {
    let mut bed = Bed::new(handler(|_| wait_once()));
    for nth in 0..8 {
        let mut call = bed.call("/", LARGE).expect("admitted");
        assert_eq!(bed.reserved().get(), 2 * LARGE.get(), "{nth}");
        assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    }
    assert_eq!(bed.fill("/", LARGE).len(), 50, "they hold next to nothing");
    let larger = bed.fill("/", ByteSize::new(4 * LARGE.get()));
    assert_eq!(larger.len(), 1, "another size is not known by that");
}

#[test]
fn requests_that_last_long_are_not_held_up_for_more_than_a_second() {
    let mut bed = Bed::new(handler(|_| std::future::pending()));
    let mut running = bed.fill("/", LARGE);
    assert_eq!(running.len(), 1);
    bed.clock.advance(Duration::from_secs(1));
    running.extend(bed.fill("/", LARGE));
    assert_eq!(running.len(), 4);
    let stats = bed.memory.admission().stats();
    assert_eq!(
        (stats.rejected_total(RejectReason::SlowStart), stats.rejected_total(RejectReason::Full)),
        (1, 1)
    );
}

/// The bug: estimates were a quarter of the need and bodies took a second to arrive. The limit on
/// the route ended before its first request did, the next requests reserved half of their need, and
/// the kernel killed the service.
#[test]
fn before_a_route_is_known_the_next_requests_reserve_what_a_running_one_holds() {
    let mut bed = Bed::new(handler(|request| async move {
        let path = request.uri().path().to_owned();
        let _held = path.ends_with("/grows").then(|| block(30));
        std::future::pending().await
    }));
    let _running = bed.call("/a/grows", LARGE).expect("the first");
    bed.clock.advance(Duration::from_secs(1));
    let _next = bed.call("/a/arrives", LARGE).expect("the limit has ended");
    assert!(about(bed.reserved(), 60), "{}", bed.reserved());
    let _other = bed.call("/b/arrives", LARGE).expect("another route");
    assert!(about(bed.reserved(), 60 + 21), "{}", bed.reserved());
}

/// The bug: what a request held beyond its estimate was booked by nobody, and others were admitted
/// in its place.
#[test]
fn what_a_request_holds_is_booked_between_its_polls_and_keeps_others_out() {
    let mut bed = Bed::new(handler(|_| async {
        let held = block(60);
        wait_once().await;
        drop(held);
        let less = block(20);
        wait_once().await;
        drop(black_box(less));
    }));
    let mut call = bed.call("/", LARGE).expect("admitted");
    assert!(about(bed.reserved(), 60), "{}", bed.reserved());
    assert_eq!(bed.call("/other", ByteSize::mib(48)).err(), Some(StatusCode::SERVICE_UNAVAILABLE));
    assert!(poll(&mut call).is_pending());
    assert!(about(bed.reserved(), 60), "it does not shrink by itself: {}", bed.reserved());
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    drop(call);
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

/// The bug: a value that was parsed and dropped within one poll was not seen.
#[test]
fn the_next_request_of_a_route_books_what_the_last_one_held_within_one_poll() {
    let mut bed = Bed::new(handler(|request| async move {
        if request.uri().path().starts_with("/parse") {
            let held = block(30);
            drop(black_box(held));
        } else {
            wait_once().await;
        }
    }));
    assert_eq!(bed.call("/parse", LARGE).err(), Some(StatusCode::OK));
    drop(bed.call("/wait", LARGE).expect("admitted"));
    let admitted = |bed: &Bed| {
        let classes = bed.memory.admission().classes(Budget::Host);
        ByteSize::new(classes.iter().map(|class| class.admitted_bytes_total).sum())
    };
    let before = admitted(&bed);
    assert_eq!(before.get(), 4 * LARGE.get(), "both at twice their estimates");
    assert_eq!(bed.call("/parse", LARGE).err(), Some(StatusCode::OK));
    let third = admitted(&bed).saturating_sub(before);
    assert!(about(third, 30), "{third}");
}

/// The bug, had it been: a route whose first request was a giant books more than fits, is never
/// admitted again, and so never learns better.
#[test]
fn a_route_that_has_shown_a_giant_is_still_admitted() {
    let giant = Arc::new(AtomicBool::new(true));
    let is_giant = Arc::clone(&giant);
    let mut bed = Bed::new(handler(move |_| {
        let mib = if is_giant.swap(false, Ordering::SeqCst) { 240 } else { 1 };
        async move { drop(black_box(block(mib))) }
    }));
    for nth in 0..100 {
        assert_eq!(bed.call("/", LARGE).err(), Some(StatusCode::OK), "{nth}");
    }
}

/// The bug: a handler that reserves what a client declares was refused, and the next thousands of
/// requests of its route reserved two thirds of the room each.
#[test]
fn a_declared_length_that_can_never_fit_taught_its_route_a_need() {
    let mut bed = Bed::new(handler(|request| async move {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        if request.uri().path() == "/a/declared" {
            assert!(permit.grow(ByteSize::MAX).is_err(), "too large");
        } else {
            wait_once().await;
        }
    }));
    for _ in 0..8 {
        assert_eq!(poll(&mut bed.call("/a/1", LARGE).expect("admitted")), StatusCode::OK.into());
    }
    assert_eq!(bed.call("/a/declared", LARGE).err(), Some(StatusCode::OK));
    assert_eq!(bed.fill("/a/1", LARGE).len(), 50, "they hold next to nothing");
}

#[test]
fn frees_of_what_others_allocated_lend_no_room() {
    let foreign = Arc::new(Mutex::new(Vec::new()));
    let own = Arc::clone(&foreign);
    let mut bed = Bed::new(handler(move |_| {
        let own = Arc::clone(&own);
        async move {
            own.lock().expect("no panic").clear();
            wait_once().await;
            let held = block(30);
            wait_once().await;
            drop(black_box(held));
        }
    }));
    *foreign.lock().expect("no panic") = vec![block(30), block(30)];
    let mut call = bed.call("/", LARGE).expect("admitted");
    assert_eq!(bed.reserved().get(), 2 * LARGE.get());
    assert!(poll(&mut call).is_pending());
    assert!(about(bed.reserved(), 30), "{}", bed.reserved());
}

/// The bug: memory that other work freed before a request counted as the peak of the request.
#[test]
fn what_was_freed_before_a_request_is_not_its_peak() {
    let mut bed = Bed::new(handler(|_| async {
        for _ in 0..1000 {
            drop(black_box(Vec::<u8>::with_capacity(64 << 10)));
        }
        wait_once().await;
    }));
    let foreign = [block(30), block(30)];
    drop(bed.call("/reset", LARGE).expect("admitted"));
    drop(black_box(foreign));
    let mut call = bed.call("/churn", LARGE).expect("admitted");
    assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    drop(call);
    let _held = bed.call("/churn", LARGE).expect("admitted");
    assert_eq!(bed.reserved().get(), 2 * LARGE.get());
}

#[test]
fn estimates_that_are_bounds_start_no_route_slowly() {
    let mut bed = Bed::starting(false, handler(|_| wait_once()));
    for path in ["/a/1", "/b/1"] {
        assert_eq!(bed.fill(path, LARGE).len(), 9, "as many as fit");
    }
    assert_eq!(bed.memory.admission().stats().rejected_total(RejectReason::SlowStart), 0);
}

/// The bug: requests that were refused without a look at their body ended the slow start.
#[test]
fn failed_answers_end_no_slow_start() {
    let mut bed = Bed::new(BoxCloneSyncService::new(service_fn(|request: Asked| async move {
        let mut answer = Answer::default();
        if request.uri().path() == "/a/refused" {
            *answer.status_mut() = StatusCode::UNAUTHORIZED;
        } else {
            wait_once().await;
        }
        Ok(answer)
    })));
    for _ in 0..20 {
        assert_eq!(bed.call("/a/refused", LARGE).err(), Some(StatusCode::UNAUTHORIZED));
    }
    assert_eq!(bed.fill("/a/1", LARGE).len(), 1);
}

#[test]
fn work_on_other_threads_nested_work_and_panics_are_attributed_once() {
    let kept: Arc<Mutex<Vec<Vec<u8>>>> = Arc::default();
    let keeps = Arc::clone(&kept);
    let step = Arc::new(AtomicUsize::new(0));
    let mut bed = Bed::new(handler(move |request| {
        let permit = request.extensions().get::<RequestPermit>().expect("put there").clone();
        let (keeps, step) = (Arc::clone(&keeps), step.fetch_add(1, Ordering::SeqCst));
        async move {
            let keep = move || keeps.lock().expect("no panic").push(block(30));
            match step {
                0 => std::thread::spawn(move || permit.measure(keep)).join().expect("no panic"),
                1 => permit.measure(|| permit.measure(keep)),
                2 => {
                    // Without the hook, whose backtrace would allocate.
                    let panics = || permit.measure(|| std::panic::resume_unwind(Box::new("bug")));
                    let work = std::panic::AssertUnwindSafe(panics);
                    let _: Result<(), _> = std::panic::catch_unwind(work).map_err(|_| keep());
                }
                _ => std::thread::spawn(keep).join().expect("no panic"),
            }
            wait_once().await;
        }
    }));
    for (step, mib) in [("thread", 30), ("nested", 30), ("panic", 30)] {
        let call = bed.call(&format!("/{step}"), LARGE).expect("admitted");
        assert!(about(bed.reserved(), mib), "{step}: {}", bed.reserved());
        drop(call);
    }
    let call = bed.call("/unseen", LARGE).expect("admitted");
    assert_eq!(bed.reserved().get(), 2 * LARGE.get(), "a thread of its own is not followed");
    drop(call);
    assert_eq!(kept.lock().expect("no panic").len(), 4);
}

#[test]
fn without_a_memory_estimates_are_taken_at_their_word() {
    let admission = Admission::with_limit(ByteSize::mib(100));
    let clock: Arc<dyn Clock> = Arc::new(ManualClock::new());
    let mut service = service(
        &admission,
        clock,
        handler(|_| async {
            let held = block(60);
            wait_once().await;
            drop(black_box(held));
        }),
        true,
    );
    let mut calls: Vec<_> = (0..9).map(|_| service("/", LARGE)).collect();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()), "all that fit run at once");
    assert_eq!(admission.ledger(Budget::Host).reserved().get(), 9 * LARGE.get());
}

/// The bug: memory that a long poll had allocated counted twice until it ended, once as reserved and
/// once as memory that no request owns. Small requests waited for the end of each such poll.
#[test]
fn what_a_poll_has_allocated_is_held_before_the_poll_ends() {
    let bed: Arc<OnceLock<(Memory, Arc<ManualClock>)>> = Arc::default();
    let of_handler = Arc::clone(&bed);
    let parses = handler(move |_| {
        let bed = Arc::clone(&of_handler);
        async move {
            let (memory, clock) = bed.get().expect("it runs");
            let ledger = memory.admission().ledger(Budget::Host);
            let reserved = ledger.unheld();
            assert!(reserved > ByteSize::mib(10), "{reserved}");
            let kept = block(8);
            advance_until(clock, Duration::from_millis(10), "a tick sees it", || {
                ledger.unheld() <= reserved.saturating_sub(ByteSize::mib(8))
            });
            drop(kept);
        }
    });
    let mut service = Bed::new(parses);
    let running = (service.memory.clone(), Arc::clone(&service.clock));
    assert!(bed.set(running).is_ok(), "set once");
    assert_eq!(service.call("/", LARGE).err(), Some(StatusCode::OK));
    assert_eq!(service.reserved(), ByteSize::ZERO);
}

/// The bug: what a poll had allocated was told as live heap outside requests until the poll ended.
#[test]
fn what_a_poll_has_allocated_is_told_as_memory_of_requests() {
    let memory: Arc<OnceLock<Memory>> = Arc::default();
    let of_handler = Arc::clone(&memory);
    let mut bed = Bed::new(handler(move |_| {
        let memory = Arc::clone(&of_handler);
        async move {
            let kept = block(32);
            let breakdown = memory.get().expect("it runs").report().breakdown();
            let held = breakdown.total(PartKind::Requests);
            assert!((ByteSize::mib(32)..ByteSize::mib(33)).contains(&held), "{breakdown:?}");
            drop(kept);
        }
    }));
    bed.tree.hold(100);
    bed.clock.advance(Duration::from_secs(1));
    assert!(memory.set(bed.memory.clone()).is_ok(), "set once");
    assert_eq!(bed.call("/", LARGE).err(), Some(StatusCode::OK));
}

/// The bug: a poll that needed more than the limit ended the process. Others saw its growth as
/// theirs, and waited.
#[test]
fn a_poll_that_outgrows_its_claim_goes_on_on_disk() {
    let (clock, tree) = (Arc::new(SystemClock::new()), Tree::new(ByteSize::mib(256)));
    tree.hold(170); // less than three eighths of it are left
    let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
    let builder = builder.spill_dir(env!("CARGO_TARGET_TMPDIR")).spill_max(ByteSize::mib(512));
    let memory = builder.device(DeviceChoice::None).start().expect("starts");
    let admission = memory.admission().clone();
    let seen = Arc::new(Mutex::new(None));
    let answer = {
        let (memory, admission, seen) = (memory.clone(), admission.clone(), Arc::clone(&seen));
        move |_: Asked| {
            let (memory, admission, seen) = (memory.clone(), admission.clone(), Arc::clone(&seen));
            async move {
                let permit = RequestPermit::current().expect("it is measured");
                let blocks: Vec<_> = (0..100).map(|_| black_box(vec![1_u8; MIB])).collect();
                permit.check().expect("it goes on");
                assert!(blocks.iter().all(|block| block.iter().all(|byte| *byte == 1)));
                let room = admission.try_admit(Cost::host(ByteSize::mib(1))).is_ok();
                let held = permit.memory().expect("measured");
                let listed = memory.report().oldest_requests();
                let on_disk = memory.snapshot().heap.expect("statistics").spilled;
                assert!(on_disk >= held.spilled, "{on_disk}");
                let now = (held, permit.reserved(), room, listed);
                *seen.lock().expect("no panic") = Some(now);
            }
        }
    };
    let mut service = service(&admission, clock, handler(answer), true);
    until("the pager runs", || {
        let mut call = service("/warm", ByteSize::mib(2));
        assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
        lowtide_heap::spilled().1 > 0
    });
    let (held, reserved, has_room, listed) = seen.lock().expect("no panic").take().expect("it ran");
    assert!(held.spilled >= ByteSize::mib(80) && held.peak < ByteSize::mib(16), "{held:?}");
    assert!(reserved < ByteSize::mib(16) && has_room, "{reserved}");
    assert_eq!(listed.iter().map(|it| it.spilled).collect::<Vec<_>>(), [held.spilled]);
    assert!(memory.shutdown_blocking(Duration::from_secs(10)).is_clean());
}

/// The bug: a request that had spilled taught its route that it needed little memory. After eight of
/// them the route reserved next to nothing, also once there was room.
#[test]
fn what_spilled_is_no_evidence_of_a_need_below_the_claim() {
    let (clock, tree) = (Arc::new(SystemClock::new()), Tree::new(ByteSize::mib(256)));
    tree.hold(170);
    let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
    let builder = builder.spill_dir(env!("CARGO_TARGET_TMPDIR")).spill_max(ByteSize::mib(512));
    let memory = builder.device(DeviceChoice::None).start().expect("starts");
    let claims = Arc::new(Mutex::new(Vec::new()));
    let seen = Arc::clone(&claims);
    let answer = move |_: Asked| {
        let seen = Arc::clone(&seen);
        async move {
            let permit = RequestPermit::current().expect("it is measured");
            let claim = permit.reserved();
            drop(block(40)); // more than there is room for
            permit.check().expect("it goes on");
            let spilled = permit.memory().expect("measured").spilled;
            seen.lock().expect("no panic").push((claim, spilled));
        }
    };
    let mut service = service(memory.admission(), clock, handler(answer), true);
    let mut call = |path| {
        let mut call = service(path, ByteSize::mib(2));
        assert_eq!(poll(&mut call), Poll::Ready(StatusCode::OK));
    };
    until("the pager runs", || {
        call("/warm");
        lowtide_heap::spilled().1 > 0
    });
    claims.lock().expect("no panic").clear();
    (0..12).for_each(|_| call("/large"));
    let claims = claims.lock().expect("no panic");
    assert!(claims.iter().all(|(_, spilled)| *spilled >= ByteSize::mib(40)), "{claims:?}");
    let (last, _) = claims.last().expect("twelve ran");
    assert!(*last >= ByteSize::mib(4), "{claims:?}");
    assert!(memory.shutdown_blocking(Duration::from_secs(10)).is_clean());
}
