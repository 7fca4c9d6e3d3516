//! Streams of load reports: when reports come, what ends a stream, and how many there may be.
#![cfg(all(feature = "service", target_os = "linux"))]

use std::convert::Infallible;
use std::future::pending;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Request, Response, StatusCode};
use http_body::{Body, Frame};
use http_body_util::{Empty, Full, StreamBody};
use lowtide::clock::{Bell, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::service::{LOAD_REPORT_STREAM_PATH, LoadReportService, MemoryLayer, RequestBody};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Cost};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::memory_process::forked;
use crate::polled::{now, poll};
use crate::support::{Tree, advance_until, until};

const TICK: Duration = Duration::from_millis(10);
const SECOND: Duration = Duration::from_secs(1);
/// The streams of one layer at once.
const STREAMS_MAX: usize = 256;

struct Bed {
    memory: Memory,
    clock: Arc<ManualClock>,
    layer: MemoryLayer,
    service: LoadReportService,
    _tree: Tree,
}

impl Bed {
    fn new() -> Self {
        let (clock, tree) = (Arc::new(ManualClock::new()), Tree::new(ByteSize::mib(256)));
        let builder = Memory::builder().clock(clock.clone()).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        let layer = MemoryLayer::new(memory.admission().clone(), Cost::ZERO)
            .clock(clock.clone())
            .with_load_reports();
        let service = layer.load_report_service();
        Self { memory, clock, layer, service, _tree: tree }
    }

    /// Opens a stream with this message as its request, and its prefix.
    fn open(&self, message: &[u8]) -> Stream {
        Stream::open(&self.service, Full::new(Bytes::from(framed(message))))
    }

    /// Lets time pass until the stream is woken.
    fn until_woken(&self, what: &str, stream: &mut Stream) -> Duration {
        let start = self.clock_now();
        advance_until(&self.clock, TICK, what, || stream.is_woken());
        self.clock_now() - start
    }

    fn clock_now(&self) -> lowtide::clock::Moment {
        use lowtide::clock::Clock as _;
        self.clock.now()
    }
}

fn framed(message: &[u8]) -> Vec<u8> {
    let length = u32::try_from(message.len()).expect("short");
    [&[0], length.to_be_bytes().as_slice(), message].concat()
}

/// A message with `report_interval` of so many seconds, below 128.
fn every(seconds: u8) -> [u8; 4] {
    [0x0a, 2, 8, seconds]
}

fn request<Q>(body: Q) -> Request<Q> {
    let request = Request::post(LOAD_REPORT_STREAM_PATH).header("content-type", "application/grpc");
    request.body(body).expect("valid")
}

/// A stream that is polled by hand.
struct Stream {
    head: HeaderMap,
    body: Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>,
    /// Rung when the stream is woken.
    woken: Arc<Bell>,
}

#[derive(Debug, PartialEq)]
enum Polled {
    Pending,
    Report,
    /// With this status, and a message that contains this.
    Ended(String, String),
}

impl Stream {
    fn open(service: &LoadReportService, body: impl Body + Send + 'static) -> Self {
        let response: Response<_> = now(service.clone().call(request(body))).expect("infallible");
        assert_eq!(
            (response.status().as_u16(), &response.headers()["content-type"]),
            (200, &"application/grpc".parse().expect("valid"))
        );
        let (head, body) = response.into_parts();
        Self { head: head.headers, body, woken: Bell::new() }
    }

    fn poll(&mut self) -> Polled {
        let waker = Waker::from(Arc::clone(&self.woken));
        match self.body.as_mut().poll_frame(&mut Context::from_waker(&waker)) {
            Poll::Pending => Polled::Pending,
            Poll::Ready(None) => ended(&self.head),
            Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                Ok(data) => {
                    let length = u32::from_be_bytes(data[1..5].try_into().expect("a prefix"));
                    assert_eq!((data[0], length as usize), (0, data.len() - 5), "framed");
                    Polled::Report
                }
                Err(frame) => ended(&frame.into_trailers().expect("data or trailers")),
            },
            Poll::Ready(Some(Err(error))) => panic!("{error}"),
        }
    }

    /// Returns `true` if it was woken since the last call.
    fn is_woken(&self) -> bool {
        use lowtide::clock::{Clock as _, Moment, SystemClock};
        SystemClock::new().wait_until(&self.woken, Moment::ORIGIN)
    }
}

fn ended(headers: &HeaderMap) -> Polled {
    let text = |name: &str| {
        let value = headers.get(name).map(|value| value.to_str().expect("text").to_owned());
        value.unwrap_or_default()
    };
    Polled::Ended(text("grpc-status"), text("grpc-message"))
}

#[test]
fn a_report_comes_at_once_and_then_after_each_interval() {
    let bed = Bed::new();
    let mut stream = bed.open(&every(5));
    assert_eq!(stream.poll(), Polled::Report);
    for _ in 0..3 {
        assert_eq!(stream.poll(), Polled::Pending);
        let took = bed.until_woken("the next report", &mut stream);
        // By the time of the last tick: they are up to 250 ms apart, and the test moves the clock
        // ahead of them.
        assert!(took + Duration::from_millis(250) >= 5 * SECOND, "{took:?}");
        assert_eq!(stream.poll(), Polled::Report);
    }
}

#[test]
fn a_request_that_arrives_in_pieces_is_waited_for_and_not_for_ever() {
    let bed = Bed::new();
    let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
    let frames = futures_util::stream::unfold(receiver, |mut receiver| async move {
        let data = receiver.recv().await?;
        Some((Ok::<_, Infallible>(Frame::data(data)), receiver))
    });
    let mut stream = Stream::open(&bed.service, StreamBody::new(Box::pin(frames)));
    let whole = framed(&every(1));
    for piece in whole.chunks(2) {
        assert_eq!(stream.poll(), Polled::Pending);
        sender.send(Bytes::copy_from_slice(piece)).expect("it is read");
    }
    assert_eq!(stream.poll(), Polled::Report);

    let silent = futures_util::stream::pending::<Result<Frame<Bytes>, Infallible>>();
    let mut stream = Stream::open(&bed.service, StreamBody::new(silent));
    assert_eq!(stream.poll(), Polled::Pending);
    bed.until_woken("the timeout", &mut stream);
    assert_eq!(stream.poll(), Polled::Ended("4".into(), "no request within 10s".into()));
    assert_eq!(stream.poll(), Polled::Ended(String::new(), String::new()), "once");
}

#[test]
fn an_invalid_request_ends_with_the_value_that_is_wrong() {
    let bed = Bed::new();
    for (message, text) in [
        (
            vec![0x0a, 11, 8, 0xfb, 255, 255, 255, 255, 255, 255, 255, 255, 1],
            "report_interval of -5 s and 0 ns: expected 0 s or more, and 0 to 999999999 ns",
        ),
        (vec![255; 30], "invalid message of 30 bytes: expected OrcaLoadReportRequest"),
        (vec![0; 5000], "message of 5000 bytes: expected at most 4096"),
    ] {
        let mut stream = bed.open(&message);
        assert_eq!(stream.poll(), Polled::Ended("3".into(), text.into()));
    }
    let mut stream = Stream::open(&bed.service, Full::<Bytes>::default());
    let text = "request ended after 0 bytes: expected one message";
    assert_eq!(stream.poll(), Polled::Ended("3".into(), text.into()));
    let mut stream = Stream::open(&bed.service, Full::new(Bytes::from_static(&[1, 0, 0, 0, 0])));
    let text = "compression flag 1: expected 0, messages are not compressed";
    assert_eq!(stream.poll(), Polled::Ended("3".into(), text.into()));
    // None of them keeps a place.
    let streams: Vec<_> = (0..STREAMS_MAX).map(|_| bed.open(&[])).collect();
    assert!(streams.into_iter().all(|mut stream| stream.poll() == Polled::Report));
}

#[test]
fn what_is_no_grpc_call_gets_a_status_of_http() {
    let bed = Bed::new();
    let call =
        |request: Request<Full<Bytes>>| now(bed.service.clone().call(request)).expect("infallible");
    let mut get = request(Full::default());
    *get.method_mut() = http::Method::GET;
    let response = call(get);
    assert_eq!(
        (response.status().as_u16(), &response.headers()["allow"]),
        (405, &"POST".parse().expect("valid"))
    );
    let mut html = request(Full::default());
    html.headers_mut().insert("content-type", "text/html".parse().expect("valid"));
    assert_eq!(call(html).status(), 415);
}

/// Each stream holds some memory, and clients choose how many there are.
#[test]
fn more_streams_than_there_are_places_end_at_once() {
    let bed = Bed::new();
    let mut streams: Vec<_> = (0..STREAMS_MAX).map(|_| bed.open(&every(1))).collect();
    for stream in &mut streams {
        assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
    }
    let mut more = bed.open(&every(1));
    let text = "256 streams of load reports exist: expected no more";
    assert_eq!(more.poll(), Polled::Ended("8".into(), text.into()));
    assert!(more.body.is_end_stream(), "the head is all");
    for stream in &mut streams {
        bed.until_woken("each is woken", stream);
        assert_eq!(stream.poll(), Polled::Report);
    }
    streams.pop();
    assert_eq!(bed.open(&every(1)).poll(), Polled::Report, "a place is free");
}

/// A client that does not read is not polled for: nothing is kept for it meanwhile.
#[test]
fn a_stream_whose_client_does_not_read_gets_one_report_when_it_does() {
    let bed = Bed::new();
    let mut stream = bed.open(&every(1));
    assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
    bed.until_woken("it is due", &mut stream);
    let later = bed.clock_now() + 100 * SECOND;
    advance_until(&bed.clock, SECOND, "a long time", || {
        bed.memory.admission().state().last_tick() >= later
    });
    assert!(!stream.is_woken(), "once");
    assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
}

#[test]
fn streams_end_when_the_service_does() {
    let bed = Bed::new();
    let mut stream = bed.open(&every(60));
    assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
    bed.memory.set_ending();
    bed.until_woken("the end", &mut stream);
    let end = || Polled::Ended("14".into(), "the service is shutting down".into());
    assert_eq!(stream.poll(), end());
    assert_eq!(bed.open(&every(60)).poll(), end(), "a new one");
}

/// The bug to avoid: without a further tick, a stream that waits for one waits forever.
#[test]
fn streams_end_with_a_shutdown_after_which_nothing_ticks() {
    let bed = Bed::new();
    let mut stream = bed.open(&every(60));
    assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
    assert!(bed.memory.shutdown_blocking(SECOND).is_clean());
    until("the end", || stream.is_woken());
    let end = Polled::Ended("14".into(), "the service is shutting down".into());
    assert_eq!(stream.poll(), end);
}

#[test]
fn without_a_running_memory_there_are_no_streams() {
    let layer = MemoryLayer::new(Admission::new(), Cost::ZERO).with_load_reports();
    let mut stream =
        Stream::open(&layer.load_report_service(), Full::new(Bytes::from(framed(&every(1)))));
    let text = "load reports are not streamed without a running Memory";
    assert_eq!(stream.poll(), Polled::Ended("12".into(), text.into()));
}

#[test]
fn under_the_layer_a_stream_is_exempt() {
    let bed = Bed::new();
    let held = bed
        .memory
        .admission()
        .try_admit_with(Cost::host(ByteSize::gib(1)), lowtide_admission::Priority::Exempt);
    let body = Full::new(Bytes::from(framed(&every(1))));
    let response =
        now(bed.layer.layer(bed.service.clone()).call(request(body))).expect("infallible");
    assert!(!response.headers().contains_key("grpc-status"), "{:?}", response.headers());
    let mut body = Box::pin(response.into_body());
    let frame = body.as_mut().poll_frame(&mut Context::from_waker(Waker::noop()));
    assert!(matches!(frame, Poll::Ready(Some(Ok(frame))) if frame.is_data()), "a report");
    drop(held);
}

/// Bug: each call added an entry to the control loop's registry, which keeps the largest. After
/// 4,096 calls it had no place for requests, so that no time limit of theirs passed.
#[test]
fn the_services_of_a_layer_have_one_place_in_the_registry() {
    let bed = Bed::new();
    for _ in 0..4096 {
        drop(bed.layer.load_report_service());
    }
    let handler = service_fn(async |_: Request<RequestBody<Empty<Bytes>>>| {
        pending::<Result<Response<Empty<Bytes>>, Infallible>>().await
    });
    let layer = bed.layer.clone().with_max_hold(SECOND);
    let mut held = Box::pin(layer.layer(handler).call(Request::new(Empty::new())));
    assert!(poll(&mut held).is_pending());
    assert_eq!(bed.memory.report().oldest_requests().len(), 1);
}

/// Bug: the path was exempt in every layer with load reports. Through a proxy that serves no
/// streams, clients could use memory by it that nothing reserved.
#[test]
fn the_path_is_exempt_only_if_streams_are_served() {
    let bed = Bed::new();
    let large = Cost::host(ByteSize::gib(1));
    let layer = MemoryLayer::new(bed.memory.admission().clone(), large).with_load_reports();
    let is_rejected = || {
        let handler = service_fn(async |_: Request<RequestBody<Empty<Bytes>>>| {
            Ok::<_, Infallible>(Response::new(Empty::<Bytes>::new()))
        });
        let request = Request::post(LOAD_REPORT_STREAM_PATH).body(Empty::new()).expect("valid");
        let response = now(layer.layer(handler).call(request)).expect("infallible");
        response.status() != StatusCode::OK
    };
    assert!(is_rejected());
    drop(layer.load_report_service());
    assert!(!is_rejected());
}

#[test]
fn a_stream_ends_in_a_forked_child() {
    let bed = Bed::new();
    let mut stream = bed.open(&every(1));
    assert_eq!((stream.poll(), stream.poll()), (Polled::Report, Polled::Pending));
    let code = forked(|| {
        let is_ended = matches!(stream.poll(), Polled::Ended(status, _) if status == "14");
        drop(stream);
        i32::from(!is_ended)
    });
    assert_eq!(code, 0, "1 if it goes on");
}
