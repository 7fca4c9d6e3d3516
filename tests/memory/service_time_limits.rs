//! Requests whose time limits pass: slow clients, and permits that are held for too long.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::convert::Infallible;
use std::future::{Future, pending, poll_fn};
use std::pin::Pin;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Wake, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body::{Body, Frame, SizeHint};
use http_body_util::{BodyExt, Empty, Full};
use lowtide::clock::{Clock, ManualClock};
use lowtide::service::{
    Connection, Connections, MemoryLayer, RequestBody, RequestPermit, ResponseBody, rejection,
};
use lowtide::{BoxError, ByteSize};
use lowtide_admission::{Cost, RejectReason, Rejected};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{poll, wait_once};
use crate::service_slow::{Broken, FRAME, Fed};
use crate::service_waiting::Bed;
use crate::support::{advance_until, until};

const GRACE: Duration = Duration::from_secs(10);
const STEP: Duration = Duration::from_millis(100);
const RATE: ByteSize = ByteSize::kib(16);

type Answer<R> = Response<ResponseBody<R>>;
type Call<R> = Pin<Box<dyn Future<Output = Answer<R>>>>;

/// Notes that it was woken.
#[derive(Default)]
struct Woken(AtomicBool);

impl Wake for Woken {
    fn wake(self: Arc<Self>) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl Woken {
    fn is_woken(&self) -> bool {
        self.0.load(Ordering::Relaxed)
    }
}

/// Polls a future once, in a task of this waker.
fn poll_in<F: Future + ?Sized>(task: &Arc<Woken>, future: Pin<&mut F>) -> Poll<F::Output> {
    let waker = Waker::from(Arc::clone(task));
    future.poll(&mut Context::from_waker(&waker))
}

impl Bed {
    /// Lets this time pass, as the control loop sees it.
    pub(crate) fn pass(&self, time: Duration) {
        self.pass_with(time, || ());
    }

    /// Lets this time pass, and acts at each step.
    fn pass_with(&self, time: Duration, mut act: impl FnMut()) {
        let admission = self.memory.admission();
        let begun = admission.state().last_tick();
        until("the time", || {
            act();
            let now = admission.state().last_tick();
            // No further ahead than the next tick of an idle service, so that none is missed.
            if self.clock.now() - now < 3 * STEP {
                self.clock.advance(STEP);
            }
            now - begun >= time
        });
    }

    /// Lets time pass until a call is over. Its task reads once it is woken.
    fn pass_until_over<F: Future + ?Sized>(
        &self,
        task: &Arc<Woken>,
        call: &mut Pin<Box<F>>,
    ) -> F::Output {
        let mut output = None;
        advance_until(&self.clock, STEP, "an end", || {
            if task.0.swap(false, Ordering::Relaxed)
                && let Poll::Ready(ended) = poll_in(task, call.as_mut())
            {
                output = Some(ended);
            }
            output.is_some()
        });
        output.expect("it is over")
    }

    /// Waits until so many slow clients were found, and their responses are cut.
    fn pass_until_slow(&self, count: u64) {
        let is_found = || self.count(RejectReason::SlowClient) == count;
        advance_until(&self.clock, STEP, "a slow client", is_found);
        // The tick has ended when the next one has begun.
        self.pass(STEP);
    }

    fn count(&self, reason: RejectReason) -> u64 {
        self.stats().rejected_total(reason)
    }

    /// Waits until no request holds anything: the control loop may look at one that has ended.
    fn is_empty(&self) {
        let nothing = (0, ByteSize::ZERO);
        until("nothing is held", || (self.stats().held(), self.reserved()) == nothing);
    }
}

/// Calls a handler of `POST /` through this layer.
fn call<F, R>(
    layer: &MemoryLayer,
    request: Request<Fed>,
    handler: impl FnMut(Request<RequestBody<Fed>>) -> F + Clone + 'static,
) -> Call<R>
where
    F: Future<Output = Result<Response<R>, Infallible>> + 'static,
    R: Body<Data = Bytes> + 'static,
{
    let mut service = layer.layer(service_fn(handler));
    Box::pin(async move { service.call(request).await.expect("infallible") })
}

fn post(body: &Fed) -> Request<Fed> {
    Request::post("/").body(body.clone()).expect("a valid head")
}

async fn collected(request: Request<RequestBody<Fed>>) -> Bytes {
    let whole = request.into_body().collect().await;
    whole.map_err(|Broken| ()).expect("whole").to_bytes()
}

fn text<B: Body<Error: std::fmt::Debug>>(answer: Response<B>) -> String {
    let body = crate::polled::now(answer.into_body().collect()).expect("whole").to_bytes();
    String::from_utf8(body.to_vec()).expect("text")
}

/// Returns the error with which a body ends now.
fn error<B: Body<Error: Into<BoxError>> + Unpin>(body: &mut B) -> Rejected {
    match crate::polled::now(body.frame()) {
        Some(Err(error)) => error.into().downcast_ref::<Rejected>().expect("a rejection").clone(),
        other => panic!("no error: {:?}", other.map(|frame| frame.is_ok())),
    }
}

/// The answer of a handler that answers at once with this body.
fn answered<R>(bed: &Bed, layer: &MemoryLayer, body: R) -> Answer<R>
where
    R: Body<Data = Bytes> + Clone + 'static,
{
    let handler = move |_| std::future::ready(Ok(Response::new(body.clone())));
    let mut call = call(layer, post(&Fed::default()), handler);
    let Poll::Ready(answer) = poll(&mut call) else { panic!("it answers at once") };
    assert_eq!(bed.stats().held(), 1);
    answer
}

/// grpc-dotnet#15: an idle stream in both directions was reset after the grace period.
#[test]
fn a_stream_in_both_directions_may_be_silent() {
    let bed = Bed::new();
    let kept: Arc<Mutex<Option<RequestBody<Fed>>>> = Arc::default();
    let slot = Arc::clone(&kept);
    let handler = move |request: Request<RequestBody<Fed>>| {
        let mut body = request.into_body();
        assert!(poll(&mut Box::pin(body.frame())).is_pending(), "it waits before its answer too");
        *slot.lock().expect("not poisoned") = Some(body);
        std::future::ready(Ok(Response::new(Fed::default())))
    };
    let layer = bed.memory.layer().with_min_data_rate(RATE, GRACE);
    let mut call = call(&layer, post(&Fed::default()), handler);
    let Poll::Ready(answer) = poll(&mut call) else { panic!("it answers at once") };
    let (mut answer, mut sent) = (answer.into_body(), kept.lock().expect("not poisoned").take());
    let sent = sent.as_mut().expect("it was kept");
    bed.pass_with(10 * GRACE, || {
        assert!(poll(&mut Box::pin(answer.frame())).is_pending());
        assert!(poll(&mut Box::pin(sent.frame())).is_pending());
    });
    assert_eq!((bed.count(RejectReason::SlowClient), bed.stats().held()), (0, 1));
}

/// A body of a megabyte.
struct Declared(Fed);

impl Body for Declared {
    type Data = Bytes;
    type Error = Broken;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Broken>>> {
        Pin::new(&mut self.0).poll_frame(cx)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(1 << 20)
    }
}

/// The bug: once its handler had answered, a body that never came kept its claim forever.
#[test]
fn a_declared_body_keeps_its_pace_after_the_answer() {
    let bed = Bed::new();
    let kept = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&kept);
    let handler = move |request: Request<RequestBody<Declared>>| {
        let mut body = request.into_body();
        assert!(poll(&mut Box::pin(body.frame())).is_pending());
        *slot.lock().expect("not poisoned") = Some(body);
        std::future::ready(Ok::<_, Infallible>(Response::new(Fed::default())))
    };
    let layer = bed.memory.layer().with_min_data_rate(RATE, GRACE);
    let request = Request::post("/").body(Declared(Fed::default())).expect("a valid head");
    let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { panic!("it answers at once") };
    let (mut answer, mut sent) = (answer.into_body(), kept.lock().expect("not poisoned").take());
    let sent = sent.as_mut().expect("it was kept");
    assert!(poll(&mut Box::pin(answer.frame())).is_pending());
    let is_found = || {
        assert!(poll(&mut Box::pin(sent.frame())).is_pending());
        bed.count(RejectReason::SlowClient) == 1
    };
    advance_until(&bed.clock, STEP, "a slow client", is_found);
}

/// The bug: announced bodies that never came held the allowance for ever.
#[test]
fn a_body_that_does_not_arrive_is_answered_with_408() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(RATE, GRACE);
    for frames in [0, 1] {
        let (body, task) = (Fed::default(), Arc::default());
        body.arrives(frames);
        let mut slow = bed.upload_to(layer.clone(), &body);
        assert!(poll_in(&task, slow.as_mut()).is_pending());
        let begun = bed.memory.admission().state().last_tick();
        // The body finds that its time is over, and then the layer ends the handler.
        let answer = bed.pass_until_over(&task, &mut slow);
        let took = bed.memory.admission().state().last_tick() - begun;
        assert!((GRACE..=GRACE + GRACE / 2).contains(&took), "{took:?}");
        assert_eq!(answer.status(), StatusCode::REQUEST_TIMEOUT);
        assert!(!answer.headers().contains_key("retry-after"));
        let text = text(answer);
        assert!(text.contains("slow_client") && text.contains("expected 16.0 KiB/s"), "{text}");
        assert_eq!(bed.count(RejectReason::SlowClient), 1 + frames as u64);
        drop(slow);
        bed.is_empty();
    }
}

/// jetty#4641, KestrelHttpServer#2855: a service that stood still ended what its clients sent.
#[test]
fn uploads_go_on_after_a_standstill_of_the_service() {
    let bed = Bed::new();
    let mut cut = 0;
    for is_stopped in [false, true] {
        let small = |_: &http::request::Parts| Cost::host(ByteSize::mib(1));
        let layer = MemoryLayer::new(bed.memory.admission().clone(), small).without_slow_start();
        let layer = layer.with_min_data_rate(RATE, GRACE);
        let mut uploads: Vec<_> = (0..16)
            .map(|_| {
                let body = Fed::default();
                (bed.upload_to(layer.clone(), &body), body, Arc::default())
            })
            .collect();
        for (upload, _, task) in &mut uploads {
            assert!(poll_in(task, upload.as_mut()).is_pending());
        }
        assert_eq!(bed.stats().held(), 16);
        if is_stopped {
            bed.clock.advance(2 * GRACE);
            bed.pass(STEP);
        } else {
            bed.pass(2 * GRACE);
        }
        for (mut upload, body, task) in uploads {
            // The tasks run before what has arrived is read from the connections.
            let mut polled = poll_in(&task, upload.as_mut());
            if polled.is_pending() {
                body.arrives(4);
                body.ends();
                polled = poll_in(&task, upload.as_mut());
            }
            let Poll::Ready(answer) = polled else { panic!("all of it is there") };
            cut += u32::from(answer.status() != StatusCode::OK);
        }
    }
    println!("figure field.stall.cut {cut} uploads");
    assert_eq!(cut, 0);
}

#[test]
fn a_body_at_the_minimum_rate_arrives_for_as_long_as_it_takes() {
    let bed = Bed::new();
    let body = Fed::default();
    let mut slow = bed.upload_to(bed.layer().with_min_data_rate(RATE, GRACE), &body);
    for _ in 0..12 {
        assert!(poll(&mut slow).is_pending());
        bed.pass(Duration::from_secs(7));
        body.arrives(4);
    }
    body.ends();
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("all of it is there") };
    assert_eq!(text(answer), (48 * FRAME).to_string());
    assert_eq!(bed.count(RejectReason::SlowClient), 0);
}

#[test]
fn a_body_that_arrives_byte_by_byte_runs_out_of_credit() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(ByteSize::mib(1), GRACE);
    let body = Fed::default();
    let mut slow = bed.upload_to(layer, &body);
    let mut answer = None;
    // Never is there a pause, but the rate is too low.
    bed.pass_with(2 * GRACE, || {
        if answer.is_none() {
            match poll(&mut slow) {
                Poll::Ready(ended) => answer = Some(ended.status()),
                Poll::Pending => {
                    body.arrives(1);
                    assert!(poll(&mut slow).is_pending());
                }
            }
        }
    });
    assert_eq!(answer, Some(StatusCode::REQUEST_TIMEOUT));
}

/// Only the time for which the client is waited for counts.
#[test]
fn a_handler_that_does_not_read_its_body_does_not_spend_its_time() {
    let bed = Bed::new();
    for polls_before in [false, true] {
        let (body, may_read) = (Fed::default(), Arc::new(AtomicBool::new(false)));
        let reads = Arc::clone(&may_read);
        let handler = move |request: Request<RequestBody<Fed>>| {
            let (mut body, reads) = (request.into_body(), Arc::clone(&reads));
            async move {
                if polls_before {
                    assert!(poll(&mut Box::pin(body.frame())).is_pending(), "it waits");
                }
                poll_fn(|_| match reads.load(Ordering::Relaxed) {
                    true => Poll::Ready(()),
                    false => Poll::Pending,
                })
                .await;
                let whole = body.collect().await.expect("whole").to_bytes();
                Ok(Response::new(Full::new(whole)))
            }
        };
        let mut slow = call(&bed.layer().with_min_data_rate(RATE, GRACE), post(&body), handler);
        assert!(poll(&mut slow).is_pending());
        body.arrives(1);
        bed.pass_with(3 * GRACE, || assert!(poll(&mut slow).is_pending()));
        may_read.store(true, Ordering::Relaxed);
        body.arrives(3);
        body.ends();
        let Poll::Ready(answer) = poll(&mut slow) else { panic!("all of it is there") };
        assert_eq!(answer.status(), StatusCode::OK, "{polls_before}");
    }
    assert_eq!(bed.count(RejectReason::SlowClient), 0);
}

#[test]
fn a_suspended_request_does_not_spend_its_time_while_it_waits_for_room() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(RATE, GRACE).with_max_wait(10 * GRACE);
    let body = Fed::default();
    body.arrives(1);
    let kept: Arc<Mutex<Option<RequestPermit>>> = Arc::default();
    let slot = Arc::clone(&kept);
    let handler = move |request: Request<RequestBody<Fed>>| {
        *slot.lock().expect("not poisoned") = request.extensions().get().cloned();
        async { Ok(Response::new(Full::new(collected(request).await))) }
    };
    let mut slow = call(&layer, post(&body), handler);
    assert!(poll(&mut slow).is_pending());
    let full = bed.fill();
    let mut other = bed.upload_to(bed.layer(), &Fed::default());
    assert!(poll(&mut other).is_pending());
    let suspended = || bed.stats().suspended_total == 1;
    advance_until(&bed.clock, STEP / 10, "a suspension", suspended);
    drop(other);
    // Another task of its handler takes what was left for the next part of its body.
    let permit = kept.lock().expect("not poisoned").take().expect("the layer's");
    permit.adopt(ByteSize::mib(1));
    let mut rest = Vec::new();
    bed.pass_with(3 * GRACE, || {
        // The allowance may have grown.
        rest.push(bed.fill());
        assert!(poll(&mut slow).is_pending());
    });
    assert_eq!(bed.stats().waiting, 1, "it waits for room");
    drop(full);
    assert!(poll(&mut slow).is_pending(), "it waits for its client");
    body.ends();
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("there is room") };
    assert_eq!(answer.status(), StatusCode::OK);
    permit.release(ByteSize::mib(1));
    drop(rest);
}

/// As in a proxy: the task of another connection reads the body.
#[test]
fn a_body_that_another_task_reads_ends_too() {
    let bed = Bed::new();
    let kept: Arc<Mutex<Option<RequestBody<Fed>>>> = Arc::default();
    let slot = Arc::clone(&kept);
    let handler = move |request: Request<RequestBody<Fed>>| {
        *slot.lock().expect("not poisoned") = Some(request.into_body());
        pending::<Result<Response<Empty<Bytes>>, Infallible>>()
    };
    let mut slow =
        call(&bed.layer().with_min_data_rate(RATE, GRACE), post(&Fed::default()), handler);
    let (reader, layer) = (Arc::default(), Arc::default());
    assert!(poll_in(&layer, slow.as_mut()).is_pending());
    let mut body = kept.lock().expect("not poisoned").take().expect("it was kept");
    assert!(poll_in(&reader, Pin::new(&mut body.frame())).is_pending());
    advance_until(&bed.clock, STEP, "a cancellation", || {
        if reader.0.swap(false, Ordering::Relaxed) {
            assert!(!layer.is_woken());
            assert!(poll_in(&reader, Pin::new(&mut body.frame())).is_pending());
        }
        layer.is_woken()
    });
    let Poll::Ready(answer) = poll(&mut slow) else { panic!("it is over") };
    assert_eq!(answer.status(), StatusCode::REQUEST_TIMEOUT);
}

#[test]
fn the_answer_to_a_rejected_request_waits_for_its_body_no_longer_than_the_credit_lasts() {
    let bed = Bed::new();
    let full = bed.fill();
    let layer = bed.layer().with_min_data_rate(RATE, GRACE).with_max_wait(Duration::ZERO);
    let (body, task) = (Fed::default(), Arc::default());
    body.arrives(1);
    let mut refused = bed.upload_to(layer, &body);
    assert!(poll_in(&task, refused.as_mut()).is_pending());
    let answer = bed.pass_until_over(&task, &mut refused);
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(answer.headers().contains_key("retry-after"));
    assert_eq!(bed.count(RejectReason::SlowClient), 0, "it is counted once");
    drop(full);
}

#[test]
fn a_response_that_is_not_taken_ends_with_an_error() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(RATE, GRACE);
    let mut answer = answered(&bed, &layer, Full::new(Bytes::from(vec![1_u8; 1 << 20])));
    bed.pass(GRACE - 5 * STEP);
    assert_eq!(bed.count(RejectReason::SlowClient), 0);
    bed.pass_until_slow(1);
    let rejected = error(answer.body_mut());
    assert_eq!(rejected.reason(), RejectReason::SlowClient);
    assert!(crate::polled::now(answer.body_mut().frame()).is_none());
    drop(answer);
    bed.is_empty();
}

#[test]
fn a_response_that_is_taken_at_the_minimum_rate_or_waits_for_its_handler_does_not_end() {
    let bed = Bed::new();
    let layer = bed.layer().with_min_data_rate(RATE, GRACE);
    let sent = Fed::default();
    let mut answer = answered(&bed, &layer, sent.clone());
    for _ in 0..60 {
        sent.arrives(1);
        assert!(matches!(crate::polled::now(answer.body_mut().frame()), Some(Ok(_))));
        bed.pass(Duration::from_secs(2));
    }
    assert!(poll(&mut Box::pin(answer.body_mut().frame())).is_pending(), "the handler works");
    bed.pass(20 * GRACE);
    assert_eq!(bed.count(RejectReason::SlowClient), 0);
    // It takes no more: the buffers account for a minute of it.
    sent.arrives(1);
    assert!(matches!(crate::polled::now(answer.body_mut().frame()), Some(Ok(_))));
    bed.pass(8 * GRACE);
    assert_eq!(error(answer.body_mut()).reason(), RejectReason::SlowClient);
}

#[test]
fn a_large_response_is_handed_over_in_pieces() {
    const PIECE: usize = 256 << 10;
    let bed = Bed::new();
    let whole: Vec<u8> = (0..=u8::MAX).cycle().take(3 * PIECE + 5).collect();
    for (layer, pieces) in [(bed.layer().with_min_data_rate(RATE, GRACE), 4), (bed.layer(), 1)] {
        let mut answer = answered(&bed, &layer, Full::new(Bytes::from(whole.clone())));
        let (mut read, mut frames) = (Vec::new(), 0);
        while !answer.body().is_end_stream() {
            let left = (whole.len() - read.len()) as u64;
            assert_eq!(answer.body().size_hint().exact(), Some(left));
            let frame = crate::polled::now(answer.body_mut().frame());
            read.extend(frame.expect("a frame").expect("valid").into_data().expect("data"));
            frames += 1;
        }
        assert_eq!(frames, pieces);
        assert!(read == whole);
        drop(answer);
        bed.is_empty();
    }
}

/// A connection on which a request was answered, and the permit that its handler left behind.
fn on_a_connection<R>(
    bed: &Bed,
    body: R,
) -> (Connections, ManualClock, Connection, Answer<R>, RequestPermit)
where
    R: Body<Data = Bytes> + Clone + 'static,
{
    let clock = ManualClock::new();
    let connections = Connections::new(bed.memory.admission(), 4).clock(Arc::new(clock.clone()));
    let connection = connections.open().expect("a place");
    let left = Arc::new(Mutex::new(None));
    let leaves = Arc::clone(&left);
    let handler = move |request: Request<_>| {
        let permit: Option<&RequestPermit> = request.extensions().get();
        *leaves.lock().expect("not poisoned") = permit.cloned();
        std::future::ready(Ok::<_, Infallible>(Response::new(body.clone())))
    };
    let layer = bed.layer().with_min_data_rate(RATE, GRACE);
    let mut service = layer.layer(service_fn(handler));
    // The layer is inside, and its body is wrapped by that of the connection.
    let inner = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&inner);
    let mut outer = connection.service(service_fn(move |request| {
        let answer = service.call(request);
        let slot = Arc::clone(&slot);
        async move {
            *slot.lock().expect("not poisoned") = Some(answer.await.expect("infallible"));
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        }
    }));
    let answered = outer.call(Request::new(Empty::<Bytes>::new()));
    assert!(poll(&mut Box::pin(answered)).is_ready());
    let answer = inner.lock().expect("not poisoned").take().expect("it answers at once");
    let permit = left.lock().expect("not poisoned").take().expect("the layer's");
    (connections, clock, connection, answer, permit)
}

fn is_closed(connection: &Connection) -> bool {
    poll(&mut Box::pin(connection.closed())).is_ready()
}

/// hyper polls the body only when its buffer has room.
#[test]
fn a_connection_whose_client_takes_nothing_is_closed() {
    let bed = Bed::new();
    let large = Full::new(Bytes::from(vec![1_u8; 64 << 10]));
    let (connections, clock, connection, mut answer, _) = on_a_connection(&bed, large);
    // The connection has the last frame, and has dropped the body: the frame holds the permit.
    let frame = crate::polled::now(answer.body_mut().frame()).expect("a frame").expect("valid");
    drop(answer);
    assert_eq!(bed.stats().held(), 1);
    connections.tend();
    assert!(!is_closed(&connection));
    bed.pass_until_slow(1);
    clock.advance(STEP);
    connections.tend();
    assert!(is_closed(&connection));
    drop(frame);
    bed.is_empty();
}

/// It may serve the next request by then.
#[test]
fn a_connection_whose_client_has_taken_all_is_kept_whatever_the_handler_left_behind() {
    let bed = Bed::new();
    let large = Full::new(Bytes::from(vec![1_u8; 64 << 10]));
    for (is_cut, is_late) in [(false, false), (true, false), (true, true)] {
        let (connections, clock, connection, mut answer, left) =
            on_a_connection(&bed, large.clone());
        let frame = crate::polled::now(answer.body_mut().frame()).expect("a frame").expect("valid");
        drop(answer);
        let before = bed.count(RejectReason::SlowClient);
        if is_cut {
            bed.pass_until_slow(before + 1);
        }
        if !is_late {
            drop(frame);
        }
        bed.pass(10 * GRACE);
        clock.advance(STEP);
        connections.tend();
        assert_eq!(is_closed(&connection), is_late, "{is_cut} {is_late}");
        let ended = bed.count(RejectReason::SlowClient) - before;
        assert_eq!(ended, u64::from(is_cut), "{is_cut} {is_late}");
        drop(left);
    }
}

#[test]
fn a_request_that_holds_its_permit_for_too_long_is_answered_with_503() {
    let bed = Bed::new();
    let small = |_: &http::request::Parts| Cost::host(ByteSize::kib(1));
    let small = MemoryLayer::new(bed.memory.admission().clone(), small).without_slow_start();
    // Neither may be suspended, nor cancelled for its memory.
    let large = |_: &http::request::Parts| Cost::host(ByteSize::mib(24));
    let large = MemoryLayer::new(bed.memory.admission().clone(), large);
    let large = large.with_request_cap(f64::INFINITY);
    is_answered_with_503(&bed, &bed.layer());
    is_answered_with_503(&bed, &small);
    is_answered_with_503(&bed, &large);
    assert_eq!(bed.count(RejectReason::HeldTooLong), 3);
}

fn is_answered_with_503(bed: &Bed, layer: &MemoryLayer) {
    let task = Arc::default();
    let handler = |_| pending::<Result<Response<Empty<Bytes>>, Infallible>>();
    let mut held = call(&layer.clone().with_max_hold(GRACE), post(&Fed::default()), handler);
    assert!(poll_in(&task, held.as_mut()).is_pending());
    bed.pass(GRACE - 5 * STEP);
    assert!(!task.is_woken());
    advance_until(&bed.clock, STEP, "a wake", || task.is_woken());
    let Poll::Ready(answer) = poll(&mut held) else { panic!("it is over") };
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(!answer.headers().contains_key("retry-after"), "it may take as long again");
    let text = text(answer);
    assert!(text.contains("held_too_long") && text.contains("longer than 10s"), "{text}");
    drop(held);
    bed.is_empty();
}

#[test]
fn a_response_that_holds_its_permit_for_too_long_ends_with_an_error() {
    let bed = Bed::new();
    let (sent, task) = (Fed::default(), Arc::default());
    let mut answer = answered(&bed, &bed.layer().with_max_hold(GRACE), sent.clone());
    // Its client takes all there is, and its handler has no more.
    bed.pass_with(GRACE - 5 * STEP, || {
        sent.arrives(1);
        assert!(matches!(crate::polled::now(answer.body_mut().frame()), Some(Ok(_))));
    });
    assert!(poll_in(&task, Pin::new(&mut answer.body_mut().frame())).is_pending());
    advance_until(&bed.clock, STEP, "a wake", || task.is_woken());
    assert_eq!(error(answer.body_mut()).reason(), RejectReason::HeldTooLong);
    drop(answer);
    bed.is_empty();
}

/// The bug that this rules out: its own answer was cut as well.
#[test]
fn a_handler_that_notices_its_end_answers_by_itself() {
    let bed = Bed::new();
    let handler = |request: Request<RequestBody<Fed>>| async move {
        let permit: RequestPermit = request.extensions().get().cloned().expect("the layer's");
        let rejected = permit.cancelled().await;
        wait_once().await;
        Ok(rejection(&rejected).map(|_| Full::new(Bytes::from_static(b"mine"))))
    };
    let mut held = call(&bed.layer().with_max_hold(GRACE), post(&Fed::default()), handler);
    let mut answer = None;
    bed.pass_with(3 * GRACE, || {
        if answer.is_none()
            && let Poll::Ready(ended) = poll(&mut held)
        {
            answer = Some(ended);
        }
    });
    let answer = answer.expect("it is over");
    assert_eq!(answer.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert!(text(answer).contains("held_too_long"), "a handler that waits on is dropped");
    let handler = |request: Request<RequestBody<Fed>>| async move {
        let permit: RequestPermit = request.extensions().get().cloned().expect("the layer's");
        permit.cancelled().await;
        Ok(Response::new(Full::new(Bytes::from_static(b"mine"))))
    };
    let mut held = call(&bed.layer().with_max_hold(GRACE), post(&Fed::default()), handler);
    let mut answer = None;
    bed.pass_with(3 * GRACE, || {
        if answer.is_none()
            && let Poll::Ready(ended) = poll(&mut held)
        {
            answer = Some(ended);
        }
    });
    assert_eq!(text(answer.expect("it is over")), "mine");
}

#[test]
fn exempt_requests_and_those_without_limits_are_not_ended() {
    let bed = Bed::new();
    let limited = bed.layer().with_min_data_rate(RATE, GRACE).with_max_hold(GRACE);
    let exempt = limited.exempt_paths(["/"]);
    for layer in [exempt, bed.layer().exempt_paths(["/other"])] {
        let mut slow = bed.upload_to(layer, &Fed::default());
        bed.pass_with(3 * GRACE, || assert!(poll(&mut slow).is_pending()));
    }
    assert_eq!(bed.stats().rejected, [0; 10]);
}

/// Without a control loop no time passes.
#[test]
fn without_a_memory_nothing_is_ended() {
    let admission = lowtide_admission::Admission::with_limit(ByteSize::mib(64));
    let layer = MemoryLayer::new(admission, |_: &http::request::Parts| Cost::ZERO);
    let layer = layer.with_min_data_rate(ByteSize::ZERO, Duration::ZERO);
    let handler = |request| async { Ok(Response::new(Full::new(collected(request).await))) };
    let body = Fed::default();
    let mut slow = call(&layer.with_max_hold(Duration::ZERO), post(&body), handler);
    assert!(poll(&mut slow).is_pending());
    body.ends();
    assert!(poll(&mut slow).is_ready());
}
