//! Answers without end: they reserve what they hold, and teach their route while they run.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::any::Any;
use std::cell::RefCell;
use std::convert::Infallible;
use std::future::pending;
use std::hint::black_box;
use std::pin::Pin;
use std::rc::Rc;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response, StatusCode, Version};
use http_body::Body;
use http_body_util::Full;
use lowtide::ByteSize;
use lowtide::clock::Clock;
use lowtide::service::{Connections, MemoryLayer, RequestBody, RequestPermit, ResponseBody};
use lowtide_admission::{Cost, RequestPhase};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::poll;
use crate::service_slow::{Broken, FRAME, Fed};
use crate::service_waiting::Bed;

const CLAIM: ByteSize = ByteSize::mib(24);
/// What a stream of these tests reserves at most while it waits.
const KEPT: ByteSize = ByteSize::kib(64);

fn layer(bed: &Bed) -> MemoryLayer {
    let clock: Arc<dyn Clock> = bed.clock.clone();
    MemoryLayer::new(bed.memory.admission().clone(), |_: &Parts| Cost::host(CLAIM)).clock(clock)
}

/// An answer that does not end, and the part of the request's body that its handler did not read.
struct Stream {
    permit: RequestPermit,
    answer: Pin<Box<ResponseBody<Fed>>>,
    sent: Option<Box<dyn Any>>,
    feed: Fed,
}

impl Stream {
    /// Waits for more of the answer, and returns the number of frames that there were.
    fn read(&mut self) -> usize {
        let mut cx = Context::from_waker(Waker::noop());
        let next = || matches!(self.answer.as_mut().poll_frame(&mut cx), Poll::Ready(Some(Ok(_))));
        std::iter::repeat_with(next).take_while(|is_there| *is_there).count()
    }
}

/// A call of a handler that answers at once with a stream, and keeps the body that it is sent;
/// `None` if it is not admitted.
fn open<Q>(layer: &MemoryLayer, body: Q) -> Option<Stream>
where
    Q: Body<Data = Bytes> + Unpin + 'static,
{
    let (feed, sent) = (Fed::default(), Arc::new(Mutex::new(None)));
    let (answer, kept) = (feed.clone(), Arc::clone(&sent));
    let handler = move |request: Request<RequestBody<Q>>| {
        let permit = request.extensions().get::<RequestPermit>().expect("admitted").clone();
        *kept.lock().expect("not poisoned") = Some((permit, request.into_body()));
        std::future::ready(Ok::<_, Broken>(Response::new(answer.clone())))
    };
    let request = Request::post("/").body(body).expect("a valid head");
    let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
    let Poll::Ready(Ok(answer)) = poll(&mut call) else { return None };
    let (permit, body) = sent.lock().expect("not poisoned").take()?;
    let (answer, sent) = (Box::pin(answer.into_body()), Some(Box::new(body) as Box<dyn Any>));
    Some(Stream { permit, answer, sent, feed })
}

/// The time after which an answer has lasted, and that between two checks.
const LASTED: Duration = Duration::from_millis(1_500);
const STEP: Duration = Duration::from_millis(100);

impl Bed {
    /// Opens a stream, and waits until it has lasted.
    fn open_for_long(&self, layer: &MemoryLayer) -> Stream {
        let mut stream = open(layer, Fed::default()).expect("it fits");
        assert_eq!(stream.read(), 0);
        self.pass(LASTED);
        stream
    }
}

/// grpc-dotnet#15, envoy#15904: 24 of 300 streams were open, and all others were rejected.
#[test]
fn streams_without_end_reserve_what_they_hold_and_teach_their_route() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let mut streams: Vec<Stream> = Vec::new();
    let begun = bed.clock.now();
    while streams.len() < 300 {
        match open(&layer, Fed::default()) {
            Some(stream) => streams.push(stream),
            None => bed.pass(STEP),
        }
        streams.last_mut().into_iter().for_each(|stream| assert_eq!(stream.read(), 0));
        let took = bed.clock.now() - begun;
        assert!(took < Duration::from_secs(10), "{} are open after {took:?}", streams.len());
    }
    bed.pass(LASTED);
    let most = KEPT.scaled(300.0);
    assert!(bed.reserved() <= most, "{} of {most}", bed.reserved());
    let (stats, before) = (bed.stats(), bed.reserved());
    assert_eq!((stats.held(), stats.waiting, stats.rejected), (300, 0, [0; 10]));
    let oldest = bed.memory.report().oldest_requests();
    assert_eq!(oldest[0].phase, RequestPhase::Answered, "of {}", oldest.len());
    let other = open(&layer, Fed::default()).expect("the route is known");
    let claim = bed.reserved().saturating_sub(before);
    assert!(claim <= ByteSize::mib(1), "{claim}");
    drop((other, streams));
    assert_eq!((bed.stats().held(), bed.reserved()), (0, ByteSize::ZERO));
}

#[test]
fn later_streams_of_a_route_release_their_claims_at_once() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let first = bed.open_for_long(&layer);
    assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
    let mut second = open(&layer, Fed::default()).expect("it fits");
    assert!(bed.reserved() >= CLAIM, "it may be a short answer");
    assert_eq!(second.read(), 0);
    assert!(bed.reserved() <= KEPT.scaled(2.0), "{}", bed.reserved());
    drop((first, second));
}

/// The bug: an answer of unknown length that waited once taught what it had held until then.
#[test]
fn a_short_answer_of_unknown_length_keeps_its_claim_and_teaches_when_it_ends() {
    let bed = Bed::new();
    let layer = layer(&bed);
    for _ in 0..8 {
        let mut short = open(&layer, Fed::default()).expect("it fits");
        assert_eq!(short.read(), 0);
        assert!(bed.reserved() >= CLAIM, "{}", bed.reserved());
        drop(short.permit.measure(|| black_box(vec![1_u8; 8 << 20])));
        short.feed.arrives(1);
        short.feed.ends();
        assert_eq!(short.read(), 1);
    }
    let next = open(&layer, Fed::default()).expect("it fits");
    assert!(bed.reserved() >= ByteSize::mib(8), "{}", bed.reserved());
    drop(next);
}

/// A query whose result is computed while it is sent.
#[test]
fn answers_of_a_route_in_which_one_grew_late_keep_their_claims() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let late = bed.open_for_long(&layer);
    assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
    let held = late.permit.measure(|| vec![1_u8; 3 << 20]);
    drop((held, late));
    let next = bed.open_for_long(&layer);
    assert!(bed.reserved() >= CLAIM, "{}", bed.reserved());
    bed.clock.advance(Duration::from_secs(60));
    bed.pass(STEP);
    assert!(bed.reserved() <= KEPT, "one that lasts for a minute is a stream all the same");
    drop(next);
}

/// The bug: what the handler of a stream had reserved in advance was released at the next report.
#[test]
fn what_a_stream_reserves_in_advance_stays_reserved() {
    let bed = Bed::new();
    let stream = bed.open_for_long(&layer(&bed));
    stream.permit.grow(ByteSize::mib(8)).expect("there is room");
    let held = stream.permit.measure(|| vec![1_u8; 1 << 20]);
    assert!(bed.reserved() >= ByteSize::mib(8), "{}", bed.reserved());
    stream.permit.shrink(ByteSize::mib(8));
    drop(stream.permit.measure(|| vec![1_u8; 1 << 20]));
    assert!(bed.reserved() <= ByteSize::mib(3), "{}", bed.reserved());
    drop((held, stream));
}

#[test]
fn a_stream_that_grows_reserves_what_it_holds() {
    let bed = Bed::new();
    let stream = bed.open_for_long(&layer(&bed));
    let before = bed.reserved();
    let more = ByteSize::mib(3);
    let held = stream.permit.measure(|| vec![1_u8; 3 << 20]);
    assert!(bed.reserved() >= before.saturating_add(more).saturating_sub(KEPT));
    assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Answered);
    drop((held, stream));
    assert_eq!((bed.stats().held(), bed.reserved()), (0, ByteSize::ZERO));
}

#[test]
fn a_stream_that_never_waits_keeps_its_claim_for_its_first_frames_only() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let first = bed.open_for_long(&layer);
    let mut stream = open(&layer, Fed::default()).expect("it fits");
    let claim = bed.reserved();
    let mut cx = Context::from_waker(Waker::noop());
    for frame in 1..=40 {
        stream.feed.arrives(1);
        assert!(stream.answer.as_mut().poll_frame(&mut cx).is_ready());
        if frame == 1 {
            assert_eq!(bed.reserved(), claim, "it may be a short answer");
        }
    }
    assert!(bed.reserved() <= KEPT.scaled(2.0), "{}", bed.reserved());
    drop((first, stream));
}

#[test]
fn the_claim_lasts_until_a_body_of_known_length_has_arrived() {
    let bed = Bed::new();
    let body = Full::new(Bytes::from_static(&[1; FRAME]));
    let mut stream = open(&layer(&bed), body).expect("it fits");
    let claim = bed.reserved();
    assert_eq!(stream.read(), 0);
    bed.pass(LASTED);
    assert_eq!(bed.reserved(), claim, "its handler may collect it");
    stream.sent = None;
    bed.pass(STEP);
    assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
}

#[test]
fn an_answer_of_known_length_and_a_trusted_estimate_keep_the_claim() {
    let bed = Bed::new();
    let trusted = bed.open_for_long(&layer(&bed).without_slow_start());
    assert_eq!(bed.reserved(), CLAIM);
    drop(trusted);
    let mut stream = open(&layer(&bed), Fed::default()).expect("it fits");
    stream.feed.arrives(1);
    stream.feed.ends();
    let claim = bed.reserved();
    assert_eq!((stream.read(), bed.reserved()), (1, claim), "it did not wait");
}

type Session = Pin<Box<dyn Future<Output = ()>>>;

/// A WebSocket whose session has a buffer of this size; `None` if it is not admitted.
fn open_socket(layer: &MemoryLayer, buffer: usize) -> Option<Session> {
    let session = Rc::new(RefCell::new(None));
    let kept = Rc::clone(&session);
    let handler = move |request: Request<RequestBody<Full<Bytes>>>| {
        let permit = request.extensions().get::<RequestPermit>().expect("admitted");
        let session: Session = Box::pin(permit.scope(async move {
            let buffer = black_box(vec![1_u8; buffer]);
            pending::<()>().await;
            drop(buffer);
        }));
        *kept.borrow_mut() = Some(session);
        std::future::ready(Ok::<_, Infallible>(switching()))
    };
    let request = Request::get("/socket").body(Full::default()).expect("a valid head");
    let mut call = Box::pin(layer.layer(service_fn(handler)).call(request));
    assert!(poll(&mut call).is_pending() || session.borrow().is_some());
    let mut session = session.take()?;
    assert!(poll(&mut session).is_pending());
    Some(session)
}

fn switching() -> Response<Full<Bytes>> {
    let mut answer = Response::default();
    *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
    answer
}

/// tungstenite#480, axum#3178: 1,500 sockets held 199 MiB that nothing had reserved.
#[test]
fn an_upgraded_connection_is_a_request_until_its_session_ends() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let (buffer, mut sockets) = (ByteSize::kib(128), Vec::new());
    let begun = bed.clock.now();
    while sockets.len() < 300 {
        match open_socket(&layer, 128 << 10) {
            Some(socket) => sockets.push(socket),
            None => bed.pass(STEP),
        }
        let took = bed.clock.now() - begun;
        assert!(took < Duration::from_secs(10), "{} are open after {took:?}", sockets.len());
    }
    bed.pass(LASTED);
    let most = buffer.saturating_add(KEPT).scaled(300.0);
    assert!(bed.reserved() >= buffer.scaled(300.0), "{}", bed.reserved());
    assert!(bed.reserved() <= most, "{} of {most}", bed.reserved());
    let stats = bed.stats();
    assert_eq!((stats.held(), stats.waiting, stats.rejected), (300, 0, [0; 10]));
    assert_eq!(bed.memory.report().oldest_requests()[0].phase, RequestPhase::Answered);
    drop(sockets);
    assert_eq!((bed.stats().held(), bed.reserved()), (0, ByteSize::ZERO));
}

#[test]
fn an_upgraded_connection_of_a_listener_keeps_the_permit_to_its_end() {
    let bed = Bed::new();
    let limited = layer(&bed).with_max_hold(Duration::from_secs(60));
    let connections = Connections::new(bed.memory.admission(), 8);
    for (version, is_kept) in [(Version::HTTP_11, true), (Version::HTTP_2, false)] {
        let connection = connections.open().expect("a place");
        let handler = |_| std::future::ready(Ok::<_, Infallible>(switching()));
        let mut service = connection.service(limited.layer(service_fn(handler)));
        let request = Request::get("/socket").version(version).body(Full::<Bytes>::default());
        let mut call = Box::pin(service.call(request.expect("a valid head")));
        assert!(matches!(poll(&mut call), Poll::Ready(Ok(_))));
        drop((call, service));
        bed.pass(LASTED);
        assert_eq!(bed.stats().held(), u64::from(is_kept), "{version:?}: other streams go on");
        assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
        drop(connection);
        assert_eq!((bed.stats().held(), bed.reserved()), (0, ByteSize::ZERO));
    }
}
