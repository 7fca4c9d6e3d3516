//! Answers without end: they reserve what they hold, and teach their route while they run.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::any::Any;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use http_body_util::Full;
use lowtide::ByteSize;
use lowtide::service::{Estimate, MemoryLayer, RequestBody, RequestPermit, ResponseBody};
use lowtide_admission::{Cost, RequestPhase};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::poll;
use crate::service_slow::{Broken, FRAME, Fed};
use crate::service_waiting::Bed;

const CLAIM: ByteSize = ByteSize::mib(24);
/// What a stream of these tests reserves at most while it waits.
const KEPT: ByteSize = ByteSize::kib(64);

fn layer(bed: &Bed) -> MemoryLayer<impl Fn(&Parts) -> Cost + use<>> {
    MemoryLayer::new(bed.memory.admission().clone(), |_: &Parts| Cost::host(CLAIM))
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
fn open<E: Estimate, Q>(layer: &MemoryLayer<E>, body: Q) -> Option<Stream>
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

/// grpc-dotnet#15, envoy#15904: 24 of 300 streams were open, and all others were rejected.
#[test]
fn streams_without_end_reserve_what_they_hold_and_teach_their_route() {
    let bed = Bed::new();
    let layer = layer(&bed);
    let mut streams = Vec::new();
    for open_before in 0..300 {
        let mut stream = open(&layer, Fed::default()).expect("there is room for it");
        assert!(open_before > 0 || bed.reserved() >= CLAIM, "its claim");
        assert_eq!(stream.read(), 0);
        streams.push(stream);
        let most = KEPT.scaled(f64::from(open_before + 1));
        assert!(bed.reserved() <= most, "{} of {most}", bed.reserved());
    }
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
fn a_stream_that_grows_reserves_what_it_holds() {
    let bed = Bed::new();
    let mut stream = open(&layer(&bed), Fed::default()).expect("it fits");
    assert_eq!(stream.read(), 0);
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
    let mut stream = open(&layer(&bed), Fed::default()).expect("it fits");
    let claim = bed.reserved();
    let mut cx = Context::from_waker(Waker::noop());
    for frame in 1..=40 {
        stream.feed.arrives(1);
        assert!(stream.answer.as_mut().poll_frame(&mut cx).is_ready());
        if frame == 1 {
            assert_eq!(bed.reserved(), claim, "it may be a short answer");
        }
    }
    assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
}

#[test]
fn the_claim_lasts_until_a_body_of_known_length_has_arrived() {
    let bed = Bed::new();
    let body = Full::new(Bytes::from_static(&[1; FRAME]));
    let mut stream = open(&layer(&bed), body).expect("it fits");
    let claim = bed.reserved();
    assert_eq!((stream.read(), bed.reserved()), (0, claim), "its handler may collect it");
    stream.sent = None;
    assert_eq!(stream.read(), 0);
    assert!(bed.reserved() <= KEPT, "{}", bed.reserved());
}

#[test]
fn an_answer_of_known_length_and_a_trusted_estimate_keep_the_claim() {
    let bed = Bed::new();
    let mut trusted = open(&layer(&bed).without_slow_start(), Fed::default()).expect("it fits");
    assert_eq!((trusted.read(), bed.reserved()), (0, CLAIM));
    drop(trusted);
    let mut stream = open(&layer(&bed), Fed::default()).expect("it fits");
    stream.feed.arrives(1);
    stream.feed.ends();
    let claim = bed.reserved();
    assert_eq!((stream.read(), bed.reserved()), (1, claim), "it did not wait");
}
