//! Requests that wait for their clients: their reservations are suspended while others need room.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::collections::VecDeque;
use std::fmt;
use std::future::{Future, pending};
use std::pin::Pin;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Full};
use lowtide::ByteSize;
use lowtide::clock::Clock;
use lowtide::service::{MemoryLayer, RequestBody, RequestPermit, ResponseBody};
use lowtide_admission::{Budget, Cost, Permit, RejectReason, RequestPhase};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{poll, wait_once};
use crate::service_waiting::Bed;
use crate::support::{advance_until, rest};

const CLAIM: ByteSize = ByteSize::mib(24);
pub(crate) const FRAME: usize = 32 << 10;
const TICK: Duration = Duration::from_millis(10);

pub(crate) type Answer = Response<ResponseBody<Full<Bytes>>>;
pub(crate) type Call = Pin<Box<dyn Future<Output = Answer>>>;

#[derive(Debug)]
pub(crate) struct Broken;

impl std::error::Error for Broken {}

impl fmt::Display for Broken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("broken")
    }
}

/// A body whose frames arrive when a test says.
#[derive(Clone, Default)]
pub(crate) struct Fed(Arc<Mutex<Feed>>);

#[derive(Default)]
struct Feed {
    frames: VecDeque<Result<Bytes, Broken>>,
    has_ended: bool,
    read: usize,
}

impl Fed {
    pub(crate) fn arrives(&self, frames: usize) {
        let mut feed = self.0.lock().expect("not poisoned");
        feed.frames.extend((0..frames).map(|_| Ok(Bytes::from(vec![1_u8; FRAME]))));
    }

    fn breaks(&self) {
        self.0.lock().expect("not poisoned").frames.push_back(Err(Broken));
    }

    pub(crate) fn ends(&self) {
        self.0.lock().expect("not poisoned").has_ended = true;
    }

    /// Returns the number of frames that were read.
    fn read(&self) -> usize {
        self.0.lock().expect("not poisoned").read
    }
}

impl Body for Fed {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        let mut feed = self.0.lock().expect("not poisoned");
        match feed.frames.pop_front() {
            Some(frame) => {
                feed.read += 1;
                Poll::Ready(Some(frame.map(Frame::data)))
            }
            None if feed.has_ended => Poll::Ready(None),
            None => Poll::Pending,
        }
    }

    fn is_end_stream(&self) -> bool {
        let feed = self.0.lock().expect("not poisoned");
        feed.has_ended && feed.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::default()
    }
}

impl Bed {
    pub(crate) fn layer(&self) -> MemoryLayer {
        let claim = |_: &Parts| Cost::host(CLAIM);
        MemoryLayer::new(self.memory.admission().clone(), claim).without_slow_start()
    }

    /// A call of a handler that collects its body, and answers with its length.
    fn upload(&self, body: &Fed) -> Call {
        self.upload_to(self.layer(), body)
    }

    pub(crate) fn upload_to(&self, layer: MemoryLayer, body: &Fed) -> Call {
        self.upload_over(Version::HTTP_11, layer, body)
    }

    fn upload_over_http2(&self, layer: MemoryLayer, body: &Fed) -> Call {
        self.upload_over(Version::HTTP_2, layer, body)
    }

    fn upload_over(&self, version: Version, layer: MemoryLayer, body: &Fed) -> Call {
        let handler = |request: Request<RequestBody<Fed>>| async {
            let (status, text) = match request.into_body().collect().await {
                Ok(body) => (StatusCode::OK, body.to_bytes().len().to_string()),
                Err(Broken) => (StatusCode::BAD_REQUEST, String::new()),
            };
            let response = Response::builder().status(status);
            response.body(Full::new(Bytes::from(text)))
        };
        let request = Request::post("/").version(version).body(body.clone());
        let call = layer.layer(service_fn(handler)).call(request.expect("a valid head"));
        Box::pin(async { call.await.expect("a valid answer") })
    }

    pub(crate) fn reserved(&self) -> ByteSize {
        rest(&self.clock);
        self.memory.admission().ledger(Budget::Host).requests()
    }

    /// An upload of which a frame has arrived, and which was suspended because another waits.
    fn suspended(&self, body: &Fed) -> (Call, Permit) {
        body.arrives(1);
        let mut slow = self.upload(body);
        assert!(poll(&mut slow).is_pending());
        let full = self.suspend_one();
        (slow, full)
    }

    /// Fills the ledger, and waits until a request is suspended.
    fn suspend_one(&self) -> Permit {
        let full = self.fill();
        let mut other = self.upload(&Fed::default());
        assert!(poll(&mut other).is_pending());
        let suspended = || self.stats().suspended_total == 1;
        advance_until(&self.clock, TICK, "a suspension", suspended);
        full
    }
}

async fn text(answer: Answer) -> String {
    let body = answer.into_body().collect().await.expect("infallible").to_bytes();
    String::from_utf8(body.to_vec()).expect("text")
}

/// The bug: 25 clients that sent just above 16 KiB/s kept 181 MiB reserved and held 8 MiB.
#[test]
fn clients_that_send_slowly_leave_their_room_to_others() {
    let bed = Bed::new();
    let bodies: Vec<_> = (0..25).map(|_| Fed::default()).collect();
    let mut slow: Vec<_> = bodies.iter().map(|body| bed.upload(body)).collect();
    let mut honest = Vec::new();
    for call in &mut slow {
        assert!(poll(call).is_pending());
    }
    assert!(bed.stats().waiting > 0, "they fill the ledger");
    let all = || bed.stats().waiting == 0;
    // Each that is suspended makes room for one that waits.
    advance_until(&bed.clock, TICK, "room", || {
        slow.iter_mut().for_each(|call| assert!(poll(call).is_pending()));
        all()
    });
    assert_eq!(bed.stats().held(), 25);
    for _ in 0..4 {
        let body = Fed::default();
        body.arrives(3);
        body.ends();
        honest.push(bed.upload(&body));
    }
    let mut served = 0;
    advance_until(&bed.clock, TICK, "the honest ones", || {
        honest.retain_mut(|call| match poll(call) {
            Poll::Ready(answer) => {
                assert_eq!(answer.status(), StatusCode::OK);
                served += 1;
                false
            }
            Poll::Pending => true,
        });
        honest.is_empty()
    });
    assert_eq!((served, bed.stats().rejected), (4, [0; 10]));
    for (body, call) in bodies.iter().zip(&mut slow) {
        body.arrives(2);
        body.ends();
        let Poll::Ready(answer) = poll(call) else { panic!("there is room for all in turn") };
        assert_eq!(crate::polled::now(text(answer)), (2 * FRAME).to_string());
    }
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

/// The bug: uploads that arrived in seconds held the slots of their route's slow start, and all
/// other uploads to it were rejected, among them slow ones that had arrived by then.
#[test]
fn a_slow_client_leaves_its_slot_of_the_slow_start_to_others() {
    let bed = Bed::new();
    let claim = |_: &Parts| Cost::host(CLAIM);
    let layer = MemoryLayer::new(bed.memory.admission().clone(), claim);
    let (slow_body, body) = (Fed::default(), Fed::default());
    slow_body.arrives(1);
    let mut slow = bed.upload_to(layer.clone(), &slow_body);
    assert!(poll(&mut slow).is_pending());
    body.arrives(1);
    body.ends();
    let mut other = bed.upload_to(layer, &body);
    assert!(poll(&mut other).is_pending(), "one request of an unknown route runs");
    slow_body.arrives(1);
    for (name, call) in [("the other", &mut other), ("the slow one", &mut slow)] {
        advance_until(&bed.clock, TICK, name, || match poll(call) {
            Poll::Ready(answer) => answer.status() == StatusCode::OK,
            Poll::Pending => false,
        });
        slow_body.ends();
    }
    assert_eq!(bed.stats().rejected, [0; 10]);
}

#[test]
fn a_slow_body_keeps_its_reservation_while_no_other_waits() {
    let bed = Bed::new();
    let body = Fed::default();
    let mut slow = bed.upload(&body);
    assert!(poll(&mut slow).is_pending());
    let begun = bed.clock.now();
    let long = || bed.clock.now() - begun > 20 * TICK;
    advance_until(&bed.clock, TICK, "ticks", long);
    assert_eq!((bed.reserved(), bed.stats().suspended_total), (CLAIM, 0));
}

#[test]
fn the_end_of_a_suspended_body_waits_until_its_claim_is_reserved_again() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, full) = bed.suspended(&body);
    let kept = bed.reserved().saturating_sub(full.cost().host);
    assert!(kept <= ByteSize::kib(128), "a frame and a window, not {kept}");
    body.arrives(1);
    body.ends();
    let rest = bed.fill();
    assert!(poll(&mut slow).is_pending(), "the last frame is not handed over");
    assert_eq!((body.read(), bed.stats().waiting), (2, 1));
    drop(full);
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("there is room") };
    assert_eq!(crate::polled::now(text(answer)), (2 * FRAME).to_string());
    drop(rest);
    assert_eq!((bed.reserved(), bed.stats().rejected), (ByteSize::ZERO, [0; 10]));
}

#[test]
fn a_suspended_request_comes_before_those_that_were_not_admitted() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, mut full) = bed.suspended(&body);
    let rest = bed.fill();
    let mut other = bed.upload(&Fed::default());
    assert!(poll(&mut other).is_pending());
    body.ends();
    assert!(poll(&mut slow).is_pending());
    assert_eq!(bed.stats().waiting, 2);
    full.shrink(CLAIM);
    assert!(poll(&mut other).is_pending());
    assert_eq!(bed.stats().waiting, 2, "there is room for one");
    assert!(poll(&mut slow).is_ready(), "it was admitted first");
    assert!(poll(&mut other).is_pending());
    assert_eq!(bed.stats().waiting, 0);
    drop((full, rest));
}

#[test]
fn a_suspended_request_without_room_by_its_deadline_is_rejected_and_leaves_nothing() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, full) = bed.suspended(&body);
    let rest = bed.fill();
    body.ends();
    assert!(poll(&mut slow).is_pending());
    advance_until(&bed.clock, TICK, "its deadline", || bed.stats().waiting == 0);
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("its time is over") };
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key("retry-after"));
    drop((full, rest, slow, answer));
    let stats = bed.stats();
    assert_eq!(stats.rejected_total(RejectReason::Full), 1);
    assert_eq!((stats.held(), stats.outlived_bytes_total), (0, 0));
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

#[test]
fn a_suspended_body_is_read_only_while_there_is_room_for_what_arrives() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, full) = bed.suspended(&body);
    let rest = bed.fill();
    body.arrives(1000);
    assert!(poll(&mut slow).is_pending());
    let read = body.read();
    assert!(read < 5, "{read} frames of {FRAME} bytes without room");
    drop(rest);
    drop(full);
    body.ends();
    assert!(poll(&mut slow).is_ready(), "there is room");
    assert_eq!(body.read(), 1001);
}

#[test]
fn a_broken_body_ends_a_suspended_request_at_once() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, full) = bed.suspended(&body);
    body.breaks();
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("it needs no room") };
    assert_eq!(answer.status(), StatusCode::BAD_REQUEST);
    drop((answer, slow, full));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: it stayed among the suspended ones, which may reserve little together.
#[test]
fn a_handler_that_works_on_after_an_error_of_its_body_is_suspended_no_more() {
    let bed = Bed::new();
    let handler = |request: Request<RequestBody<Fed>>| async {
        let mut body = request.into_body();
        while let Some(Ok(_)) = body.frame().await {}
        pending::<()>().await; // it works, and keeps the body
        Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
    };
    let body = Fed::default();
    let request = Request::post("/").body(body.clone()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    let full = bed.suspend_one();
    body.breaks();
    assert!(poll(&mut call).is_pending());
    assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Working);
    drop((call, full));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: it stayed among the suspended ones, which may reserve little together.
#[test]
fn a_handler_that_does_not_read_on_is_suspended_no_more() {
    let bed = Bed::new();
    let kept: Arc<Mutex<Option<RequestBody<Fed>>>> = Arc::default();
    let slot = kept.clone();
    let handler = move |request: Request<RequestBody<Fed>>| {
        let mut body = request.into_body();
        let slot = slot.clone();
        async move {
            let mut frame = Box::pin(body.frame());
            assert!(poll(&mut frame).is_pending(), "it waits for the body");
            drop(frame);
            *slot.lock().expect("not poisoned") = Some(body);
            pending::<()>().await;
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let request = Request::post("/").body(Fed::default()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    let full = bed.fill();
    let mut other = bed.upload(&Fed::default());
    assert!(poll(&mut other).is_pending());
    advance_until(&bed.clock, TICK, "a suspension", || bed.stats().suspended_total == 1);
    let phase = || bed.memory.report().oldest_requests()[0].phase;
    assert_eq!(phase(), RequestPhase::Suspended);
    drop(kept.lock().expect("not poisoned").take());
    assert_eq!(phase(), RequestPhase::Working);
    drop((call, other, full));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

#[test]
fn a_client_that_leaves_while_it_is_suspended_leaves_nothing() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut slow, full) = bed.suspended(&body);
    body.ends();
    let rest = bed.fill();
    assert!(poll(&mut slow).is_pending());
    drop((slow, full, rest));
    assert_eq!((bed.stats().waiting, bed.stats().held()), (0, 0));
    assert_eq!(bed.reserved(), ByteSize::ZERO);
    let mut whole = bed.fill();
    assert!(!whole.reserve_arriving(ByteSize::MAX), "no room");
    whole.shrink(ByteSize::mib(1));
    assert!(whole.reserve_arriving(ByteSize::ZERO), "nothing is suspended any more");
}

/// The bug: 40 clients that read nothing kept 403 permits with all that they had reserved.
#[test]
fn an_answered_request_keeps_only_what_it_holds_while_others_wait() {
    let bed = Bed::new();
    let layer = bed.layer();
    let handler = |_: Request<RequestBody<Fed>>| async {
        Ok::<_, Broken>(Response::new(Full::new(Bytes::from(vec![1_u8; 1 << 20]))))
    };
    let request = Request::post("/").body(Fed::default()).expect("a valid head");
    let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { panic!("it answers at once") };
    assert_eq!(bed.reserved(), CLAIM);
    let full = bed.fill();
    let mut other = bed.upload(&Fed::default());
    assert!(poll(&mut other).is_pending());
    let most = ByteSize::kib(1024 + 128);
    let freed = || bed.reserved().saturating_sub(full.cost().host) <= most;
    advance_until(&bed.clock, TICK, "room", freed);
    drop((answer, call, other, full));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

#[test]
fn a_stream_in_both_directions_goes_on_without_its_claim() {
    let bed = Bed::new();
    let rest: Arc<Mutex<Option<RequestBody<Fed>>>> = Arc::default();
    let kept = rest.clone();
    let handler = move |request: Request<RequestBody<Fed>>| {
        let (mut body, kept) = (request.into_body(), kept.clone());
        async move {
            let mut frame = Box::pin(body.frame());
            assert!(poll(&mut frame).is_pending(), "it waits for the body");
            drop(frame);
            *kept.lock().expect("not poisoned") = Some(body);
            wait_once().await; // it is registered then
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let feed = Fed::default();
    let request = Request::post("/").body(feed.clone()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { panic!("it answers") };
    let full = bed.suspend_one();
    let rest_of_room = bed.fill();
    feed.arrives(1);
    feed.ends();
    let mut body = rest.lock().expect("not poisoned").take().expect("it was kept");
    let mut frame = Box::pin(async { body.frame().await });
    let got = |frame: &mut _| matches!(poll(frame), Poll::Ready(Some(Ok(_))));
    advance_until(&bed.clock, TICK, "the last frame", || got(&mut frame));
    drop((frame, answer, call, full, rest_of_room));
    drop(body);
    assert_eq!(bed.stats().held(), 0);
}

/// The bug: the built-in service of the proxy, whose requests do not wait, was filled by slow ones.
#[test]
fn slow_requests_are_suspended_for_those_that_are_rejected_at_once_too() {
    let bed = Bed::new();
    let body = Fed::default();
    let mut slow = bed.upload_to(bed.layer().with_max_wait(Duration::ZERO), &body);
    assert!(poll(&mut slow).is_pending());
    let mut full = bed.fill();
    let none = bed.layer().with_max_wait(Duration::ZERO);
    let mut admitted = Vec::new();
    // The allowance grows with the first measurements.
    advance_until(&bed.clock, TICK, "a suspension", || {
        let mut call = bed.upload_to(none.clone(), &Fed::default());
        match poll(&mut call) {
            Poll::Ready(answer) => assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE),
            Poll::Pending => admitted.push(call),
        }
        bed.stats().suspended_total > 0
    });
    drop(admitted);
    body.ends();
    let rest = bed.fill();
    assert!(poll(&mut slow).is_pending(), "it waits for its claim all the same");
    full.shrink(CLAIM);
    assert!(poll(&mut slow).is_ready());
    drop((full, rest));
}

/// The bug: a handler that waited for something else before it read its body, or between two
/// frames, lost its claim, and could allocate all of it at any time.
#[test]
fn a_handler_that_does_not_wait_for_its_body_keeps_its_claim() {
    let bed = Bed::new();
    for is_begun in [false, true] {
        let handler = move |request: Request<RequestBody<Fed>>| async move {
            let mut body = request.into_body();
            if is_begun {
                let _ = body.frame().await;
            }
            pending::<()>().await; // it works, and keeps the body
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        };
        let body = Fed::default();
        body.arrives(2);
        let request = Request::post("/").body(body).expect("a valid head");
        let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
        assert!(poll(&mut call).is_pending());
        let full = bed.fill();
        let mut other = bed.upload(&Fed::default());
        assert!(poll(&mut other).is_pending());
        let begun = bed.clock.now();
        let long = || bed.clock.now() - begun > 20 * TICK;
        advance_until(&bed.clock, TICK, "ticks", long);
        assert_eq!((bed.stats().waiting, bed.stats().suspended_total), (1, 0));
        assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Working);
        drop((call, full, other));
    }
}

/// Counts how often it was woken.
#[derive(Default)]
struct Count(AtomicUsize);

impl Wake for Count {
    fn wake(self: Arc<Self>) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

type Task<T> = Pin<Box<dyn Future<Output = T>>>;

/// The bug: nothing woke the task, which kept the permit forever.
#[test]
fn a_task_that_reads_the_body_of_a_rejected_request_ends_and_leaves_nothing() {
    let bed = Bed::new();
    let tasks: Arc<Mutex<Option<Task<usize>>>> = Arc::default();
    let spawned = tasks.clone();
    let handler = move |request: Request<RequestBody<Fed>>| {
        let body = request.into_body();
        let read = async { body.collect().await.expect("no error").to_bytes().len() };
        *spawned.lock().expect("not poisoned") = Some(Box::pin(read));
        async {
            pending::<()>().await;
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let body = Fed::default();
    body.arrives(1);
    let request = Request::post("/").body(body.clone()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    let mut task = tasks.lock().expect("not poisoned").take().expect("it was spawned");
    let woken = Arc::new(Count::default());
    let waker = Waker::from(woken.clone());
    let mut poll_task = || task.as_mut().poll(&mut Context::from_waker(&waker));
    assert!(poll_task().is_pending());
    let full = bed.suspend_one();
    body.ends();
    let rest = bed.fill();
    assert!(poll_task().is_pending());
    advance_until(&bed.clock, TICK, "its deadline", || bed.stats().waiting == 0);
    let mut ended = None;
    // Ends: each iteration needs a wake.
    for wakes in 1.. {
        assert_eq!(woken.0.load(Ordering::Relaxed), wakes, "nothing wakes the task");
        if let Poll::Ready(length) = poll_task() {
            ended = Some(length);
            break;
        }
    }
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { panic!("it is rejected") };
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(ended, Some(FRAME), "a task that goes on gets the whole body");
    drop((task, answer, call, full, rest));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: a handler that had the whole body lost its claim while it worked.
#[test]
fn a_body_that_ended_unseen_ends_only_when_it_was_read() {
    let bed = Bed::new();
    let handler = |request: Request<RequestBody<Fed>>| async {
        let mut body = request.into_body();
        while !body.is_end_stream() {
            let _ = body.frame().await;
            wait_once().await;
        }
        pending::<()>().await; // it works, and keeps the body
        Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
    };
    let body = Fed::default();
    body.arrives(1);
    let request = Request::post("/").body(body.clone()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    // As HTTP/2 does, in an empty frame.
    body.ends();
    assert!(poll(&mut call).is_pending());
    assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Working);
}

/// A body of one frame and trailers, whose end is another poll.
#[derive(Default)]
struct Trailed(u8);

impl Body for Trailed {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        self.0 += 1;
        Poll::Ready(match self.0 {
            1 => Some(Ok(Frame::data(Bytes::from(vec![1_u8; FRAME])))),
            2 => Some(Ok(Frame::trailers(http::HeaderMap::new()))),
            _ => None,
        })
    }
}

/// The bug: a handler that reads no further than the trailers lost its claim while it worked.
#[test]
fn trailers_are_the_end_of_a_body() {
    let bed = Bed::new();
    let handler = |request: Request<RequestBody<Trailed>>| async {
        let mut body = request.into_body();
        while let Some(Ok(frame)) = body.frame().await
            && !frame.is_trailers()
        {}
        pending::<()>().await; // it works, and keeps the body
        Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
    };
    let request = Request::post("/").body(Trailed::default()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Working);
}

/// A call whose handler hands out its permit, then collects its body and works.
fn with_permit(bed: &Bed, body: &Fed) -> (Task<()>, RequestPermit) {
    let slot: Arc<Mutex<Option<RequestPermit>>> = Arc::default();
    let permits = slot.clone();
    let handler = move |request: Request<RequestBody<Fed>>| {
        let permit: RequestPermit = request.extensions().get().cloned().expect("admitted");
        *permits.lock().expect("not poisoned") = Some(permit);
        async {
            drop(request.into_body().collect().await);
            pending::<()>().await;
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let request = Request::post("/").body(body.clone()).expect("a valid head");
    let call = bed.layer().layer(service_fn(handler)).call(request);
    let mut call: Task<()> = Box::pin(async { drop(call.await) });
    assert!(poll(&mut call).is_pending());
    let permit = slot.lock().expect("not poisoned").take().expect("it was called");
    (call, permit)
}

/// The bug: a request reserved again what its handler had released before.
#[test]
fn a_handler_that_released_memory_does_not_reserve_it_again_when_it_resumes() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut call, permit) = with_permit(&bed, &body);
    permit.shrink(ByteSize::mib(10));
    let full = bed.suspend_one();
    permit.shrink(ByteSize::kib(1));
    body.ends();
    drop(full);
    assert!(poll(&mut call).is_pending());
    let left = ByteSize::mib(14).saturating_sub(ByteSize::kib(1));
    assert_eq!((bed.stats().waiting, permit.reserved()), (0, left));
}

/// The bug: what it had added while it was suspended was part of its claim when it resumed.
#[test]
fn what_a_suspended_request_grows_by_adds_to_its_claim() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut call, permit) = with_permit(&bed, &body);
    let full = bed.suspend_one();
    permit.grow(ByteSize::mib(2)).expect("there is room");
    body.ends();
    drop(full);
    assert!(poll(&mut call).is_pending());
    assert_eq!((bed.stats().waiting, permit.reserved()), (0, ByteSize::mib(26)));
}

/// The bug: memory that only the handler knows of was not reserved while it was suspended.
#[test]
fn a_suspended_request_keeps_what_its_handler_reports_to_hold() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut call, permit) = with_permit(&bed, &body);
    permit.hold(ByteSize::mib(9)).expect("it is reserved");
    let full = bed.suspend_one();
    let kept = permit.reserved();
    assert!(kept >= ByteSize::mib(9) && kept < ByteSize::mib(10), "{kept}");
    permit.shrink(ByteSize::mib(4));
    body.ends();
    drop(full);
    assert!(poll(&mut call).is_pending());
    assert_eq!(permit.reserved(), ByteSize::mib(20));
}

/// The bug: the last frame, which its connection had allocated, was freed for its account.
#[test]
fn the_last_frame_of_a_suspended_body_that_is_dropped_is_not_its_memory() {
    let bed = Bed::new();
    let body = Fed::default();
    let (mut call, permit) = with_permit(&bed, &body);
    permit.adopt(ByteSize::mib(1));
    let full = bed.suspend_one();
    let rest = bed.fill();
    body.arrives(1);
    body.ends();
    assert!(poll(&mut call).is_pending());
    assert_eq!((body.read(), bed.stats().waiting), (1, 1));
    drop(call);
    let live = permit.memory().expect("measured").live;
    assert!(live >= ByteSize::mib(1), "{live}");
    permit.release(ByteSize::mib(1));
    drop((permit, full, rest));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: device memory, which is not measured, was released while the request may have held it.
#[test]
fn a_request_with_device_memory_of_one_budget_for_both_is_not_suspended() {
    let bed = Bed::new();
    bed.memory.admission().state().unify();
    let cost = |_: &Parts| Cost::host(ByteSize::mib(4)).and_device(ByteSize::mib(20));
    let layer = bed.layer().with_estimate(cost);
    let mut slow = bed.upload_to(layer.clone(), &Fed::default());
    assert!(poll(&mut slow).is_pending());
    let full = bed.fill();
    let mut other = bed.upload_to(layer, &Fed::default());
    assert!(poll(&mut other).is_pending());
    let begun = bed.clock.now();
    let long = || bed.clock.now() - begun > 20 * TICK;
    advance_until(&bed.clock, TICK, "ticks", long);
    assert_eq!((bed.stats().waiting, bed.stats().suspended_total), (1, 0));
    let kept = bed.reserved().saturating_sub(full.cost().host);
    assert_eq!(kept, ByteSize::mib(24));
}

/// Polls the task when it is woken, on the thread that wakes it.
struct Inline(Mutex<Option<InlineTask>>);

type InlineTask = Pin<Box<dyn Future<Output = ()> + Send>>;

impl Wake for Inline {
    fn wake(self: Arc<Self>) {
        let Some(mut task) = self.0.lock().expect("not poisoned").take() else { return };
        let waker = Waker::from(Arc::clone(&self));
        if task.as_mut().poll(&mut Context::from_waker(&waker)).is_pending() {
            *self.0.lock().expect("not poisoned") = Some(task);
        }
    }
}

/// The bug: the wakers were called with the lock of the permit held, and the task waited for it.
#[test]
fn memory_that_a_handler_releases_may_wake_the_reader_of_its_body_at_once() {
    let bed = Bed::new();
    let slot = Arc::new(Mutex::new(None));
    let kept = slot.clone();
    let handler = move |request: Request<RequestBody<Fed>>| {
        let permit: RequestPermit = request.extensions().get().cloned().expect("admitted");
        let read = async { drop(request.into_body().collect().await) };
        *kept.lock().expect("not poisoned") = Some((permit, Box::pin(read)));
        async {
            pending::<()>().await;
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let body = Fed::default();
    let request = Request::post("/").body(body.clone()).expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    let (permit, read) = slot.lock().expect("not poisoned").take().expect("it was called");
    let task = Arc::new(Inline(Mutex::new(Some(read))));
    Arc::clone(&task).wake();
    permit.hold(ByteSize::mib(30)).expect("there is room");
    permit.grow(ByteSize::mib(10)).expect("there is room");
    let full = bed.suspend_one();
    body.ends();
    let rest = bed.fill();
    Arc::clone(&task).wake();
    assert_eq!(bed.stats().waiting, 1);
    permit.shrink(ByteSize::mib(20));
    assert!(task.0.lock().expect("not poisoned").is_none(), "it has the whole body");
    assert_eq!((bed.stats().waiting, permit.reserved()), (0, ByteSize::mib(20)));
    drop((permit, call, full, rest));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: 23 of 24 uploads on one connection were rejected after 2 s with 29 of 256 MiB in use:
/// the bodies of those that waited filled its window, and that of the first could not arrive.
#[test]
fn uploads_over_http2_arrive_while_they_wait_for_the_slow_start() {
    let bed = Bed::new();
    let estimate = |_: &Parts| Cost::host(ByteSize::mib(2));
    let layer = MemoryLayer::new(bed.memory.admission().clone(), estimate);
    let bodies = [(); 24].map(|()| Fed::default());
    let mut calls = Vec::new();
    for body in &bodies {
        let handler = |request: Request<RequestBody<Fed>>| async {
            let mut body = request.into_body();
            while let Some(Ok(_)) = body.frame().await {}
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        };
        let request = Request::post("/").version(Version::HTTP_2).body(body.clone());
        let call = layer.layer(service_fn(handler)).call(request.expect("a valid head"));
        calls.push(Box::pin(async { call.await.expect("a valid answer").status() }));
    }
    assert_eq!(bed.stats().waiting, 23, "it is not known yet that their bodies are read");
    for _ in 0..20 {
        bodies.iter().for_each(|body| body.arrives(1));
        calls.iter_mut().for_each(|call| assert!(poll(call).is_pending()));
    }
    assert!(bodies.iter().all(|body| body.read() == 20), "each body arrives");
    assert_eq!((bed.stats().held(), bed.stats().suspended_total), (24, 0));
    let classes = bed.memory.admission().classes(Budget::Host);
    let of_a_window = classes.iter().filter(|class| class.bound < ByteSize::mib(1));
    assert_eq!(of_a_window.map(|class| class.admitted_total).sum::<u64>(), 0, "by their claims");
    bodies.iter().enumerate().filter(|(at, _)| *at != 1).for_each(|(_, body)| body.ends());
    // Each enters the slow start in its first poll, and works in the second.
    let twice = |call: &mut _| poll(call).is_ready() || poll(call).is_ready();
    let ended: Vec<_> = calls.iter_mut().map(twice).collect();
    assert_eq!(ended.iter().filter(|has_ended| **has_ended).count(), 23, "while one still arrives");
    calls = calls.into_iter().skip(1).take(1).collect();
    bodies[1].ends();
    advance_until(&bed.clock, TICK, "the answers", || {
        calls.retain_mut(|call| match poll(call) {
            Poll::Ready(status) => {
                assert_eq!(status, StatusCode::OK);
                false
            }
            Poll::Pending => true,
        });
        calls.is_empty()
    });
    assert_eq!((bed.stats().rejected, bed.stats().held()), ([0; 10], 0));
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

/// The bug: the poll in which it got the end of its body did not count as work, and a second one of
/// an unknown need ran beside it.
#[test]
fn an_upload_over_http2_works_from_the_poll_in_which_it_gets_its_end() {
    let bed = Bed::new();
    let clock: Arc<dyn Clock> = bed.clock.clone();
    let estimate = |_: &Parts| Cost::host(ByteSize::mib(2));
    let layer = MemoryLayer::new(bed.memory.admission().clone(), estimate).clock(clock.clone());
    let body = Fed::default();
    body.arrives(1);
    body.ends();
    let mut first = bed.upload_over_http2(layer.clone(), &body);
    assert!(poll(&mut first).is_ready(), "now it is known that bodies are read");
    body.arrives(1);
    let worked = Arc::new(AtomicUsize::new(0));
    let (other, manual, works) = (layer.clone(), bed.clock.clone(), worked.clone());
    let handler = move |request: Request<RequestBody<Fed>>| {
        let (within, manual, works) = (other.clone(), manual.clone(), works.clone());
        async move {
            let mut body = request.into_body();
            while let Some(Ok(_)) = body.frame().await {}
            manual.advance(Duration::from_secs(2));
            let others = [(); 2].map(|()| {
                let other = service_fn(|_| pending::<Result<Response<Full<Bytes>>, Broken>>());
                let request = Request::post("/").body(Full::<Bytes>::from("two"));
                let call = within.layer(other).call(request.expect("a valid head"));
                let mut call = Box::pin(call);
                assert!(poll(&mut call).is_pending());
                call
            });
            works.store(1, Ordering::Relaxed);
            wait_once().await;
            drop(others);
            Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
        }
    };
    let request = Request::post("/").version(Version::HTTP_2).body(body).expect("a valid head");
    let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending(), "it enters the slow start");
    assert_eq!(worked.load(Ordering::Relaxed), 0);
    assert!(poll(&mut call).is_pending(), "it works");
    let seen = (worked.load(Ordering::Relaxed), bed.stats().held(), bed.stats().waiting);
    assert_eq!(seen, (1, 2, 1), "two may run after one success");
    drop(call);
}

/// The bug: a handler that drops the body ran without its claim, beside any number of others.
#[test]
fn a_handler_that_does_not_read_its_body_over_http2_works_once_its_claim_is_reserved() {
    let bed = Bed::new();
    let (layer, worked) = (bed.layer(), Arc::new(AtomicUsize::new(0)));
    let open = |answers: bool| {
        let worked = worked.clone();
        let handler = move |request: Request<RequestBody<Fed>>| {
            let worked = worked.clone();
            async move {
                drop(request);
                if !answers {
                    wait_once().await;
                    worked.fetch_add(1, Ordering::Relaxed);
                    pending::<()>().await;
                }
                Ok::<_, Broken>(Response::new(Full::<Bytes>::default()))
            }
        };
        let request = Request::post("/").version(Version::HTTP_2).body(Fed::default());
        let call = layer.layer(service_fn(handler)).call(request.expect("a valid head"));
        Box::pin(async { call.await.expect("a valid answer").status() })
    };
    let mut full = bed.fill();
    full.shrink(ByteSize::mib(1));
    let mut unread = open(false);
    assert!(poll(&mut unread).is_pending());
    assert_eq!((bed.stats().waiting, bed.stats().held()), (1, 1), "no body is read yet");
    drop((unread, full));
    let body = Fed::default();
    body.arrives(1);
    body.ends();
    assert!(poll(&mut bed.upload_over_http2(layer.clone(), &body)).is_ready());
    let mut full = bed.fill();
    full.shrink(ByteSize::mib(1));
    assert_eq!(poll(&mut open(true)), Poll::Ready(StatusCode::OK), "it needs no claim");
    let [mut unread, mut late] = [open(false), open(false)];
    for call in [&mut unread, &mut late] {
        assert!(poll(call).is_pending());
        assert!(poll(call).is_pending());
    }
    let seen = (bed.stats().waiting, bed.stats().held(), worked.load(Ordering::Relaxed));
    assert_eq!(seen, (2, 3, 0));
    assert!(bed.reserved().saturating_sub(full.cost().host) < ByteSize::mib(1));
    full.shrink(CLAIM);
    assert!(poll(&mut unread).is_pending());
    assert_eq!((bed.stats().waiting, worked.load(Ordering::Relaxed)), (1, 1));
    advance_until(&bed.clock, TICK, "its deadline", || bed.stats().waiting == 0);
    assert_eq!(poll(&mut late), Poll::Ready(StatusCode::SERVICE_UNAVAILABLE));
    drop((unread, late, full));
    assert_eq!((bed.reserved(), bed.stats().held()), (ByteSize::ZERO, 0));
}

/// The bug: while it was suspended, a client that sent nothing kept its place forever.
#[test]
fn a_suspended_request_whose_client_sends_nothing_ends_by_its_rate() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(ByteSize::kib(16), Duration::from_secs(1));
    let body = Fed::default();
    body.arrives(1);
    let mut slow = bed.upload_to(layer, &body);
    assert!(poll(&mut slow).is_pending());
    let full = bed.suspend_one();
    let mut answer = None;
    advance_until(&bed.clock, TICK * 10, "its end", || {
        if answer.is_none()
            && let Poll::Ready(ended) = poll(&mut slow)
        {
            answer = Some(ended.status());
        }
        answer.is_some()
    });
    assert_eq!(answer, Some(StatusCode::REQUEST_TIMEOUT));
    drop((slow, full));
}

/// The bug: one that had not started was not rejected at a level at which new ones are.
#[test]
fn an_upload_over_http2_does_not_start_after_the_service_was_closed() {
    let bed = Bed::new();
    let (layer, body) = (bed.layer(), Fed::default());
    body.arrives(1);
    body.ends();
    assert!(poll(&mut bed.upload_over_http2(layer.clone(), &body)).is_ready());
    let mut full = bed.fill();
    full.shrink(ByteSize::mib(1));
    let body = Fed::default();
    let mut call = bed.upload_over_http2(layer, &body);
    assert!(poll(&mut call).is_pending());
    assert_eq!((bed.stats().waiting, bed.stats().held()), (0, 2), "it receives");
    drop(full);
    bed.memory.admission().close();
    body.ends();
    let Poll::Ready(answer) = poll(&mut call) else { panic!("it is rejected") };
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(bed.stats().rejected_total(RejectReason::ShuttingDown), 1);
}

#[test]
fn an_upload_over_http2_waits_unread_if_there_is_no_room_for_a_window() {
    let bed = Bed::new();
    let full = bed.fill();
    let body = Fed::default();
    body.arrives(1);
    let handler = |_| async { Ok::<_, Broken>(Response::new(Full::<Bytes>::default())) };
    let request = Request::post("/").version(Version::HTTP_2).body(body.clone());
    let request = request.expect("a valid head");
    let mut call = Box::pin(bed.layer().layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending());
    assert_eq!((bed.stats().waiting, body.read()), (1, 0));
    drop(full);
    assert!(poll(&mut call).is_ready());
}
