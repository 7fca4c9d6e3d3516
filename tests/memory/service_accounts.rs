//! The memory of requests: frames of bodies that change hands, spawned work, and what outlives a
//! request.

use std::convert::Infallible;
use std::future::poll_fn;
use std::hint::black_box;
use std::pin::Pin;
use std::sync::{Arc, Mutex};
use std::task::{Context, Poll};

use bytes::{Bytes, BytesMut};
use http::{HeaderMap, HeaderValue, Request, Response};
use http_body::{Body, Frame, SizeHint};
use lowtide::clock::ManualClock;
use lowtide::config::DeviceChoice;
use lowtide::heap::unmeasured;
use lowtide::service::{MemoryLayer, RequestBody, RequestPermit, scope, scope_blocking};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Budget, Cost};
use test_fork::test;
use tower::{Layer, Service, service_fn};

use crate::polled::{cloneable, now, poll, wait_once};
use crate::support::Tree;

const KIB: usize = 1 << 10;
const MIB: usize = 1 << 20;

/// A body of these frames, which says of itself what its maker wants.
#[derive(Default)]
struct Frames {
    frames: Vec<Frame<Bytes>>,
    hint: Option<u64>,
}

impl Body for Frames {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        Poll::Ready((!self.frames.is_empty()).then(|| Ok(self.frames.remove(0))))
    }

    fn is_end_stream(&self) -> bool {
        self.frames.is_empty()
    }

    fn size_hint(&self) -> SizeHint {
        self.hint.map_or_else(SizeHint::default, SizeHint::with_exact)
    }
}

/// As hyper reads: frames that share a buffer with what the connection reads next.
fn shared(length: usize, buffer: &mut BytesMut) -> Bytes {
    buffer.resize(length + 1, 7);
    buffer.split_to(length).freeze()
}

/// 16 MiB of small frames.
fn small_frames() -> Vec<Frame<Bytes>> {
    let mut buffer = BytesMut::new();
    (0..2000).map(|_| Frame::data(shared(8 * KIB, &mut buffer))).collect()
}

type Received = Request<RequestBody<Frames>>;

/// A layer behind a limit of 256 MiB.
struct Bed {
    memory: Memory,
    _tree: Tree,
}

impl Bed {
    fn new() -> Self {
        let tree = Tree::new(ByteSize::mib(256));
        let builder = Memory::builder().clock(Arc::new(ManualClock::new())).signals(tree.open());
        let memory = builder.device(DeviceChoice::None).start().expect("starts");
        Self { memory, _tree: tree }
    }

    fn reserved(&self) -> ByteSize {
        self.memory.admission().ledger(Budget::Host).reserved()
    }

    /// Calls the handler with a body of these frames.
    fn call<F, R>(
        &self,
        frames: Vec<Frame<Bytes>>,
        handler: impl FnMut(Received) -> F,
    ) -> Pin<Box<impl Future<Output = Response<impl Body<Data = Bytes, Error: Into<BoxError>>>>>>
    where
        F: Future<Output = Result<Response<R>, Infallible>>,
        R: Body<Data = Bytes, Error: Into<BoxError>>,
    {
        let flat = |_: &http::request::Parts| Cost::host(ByteSize::kib(16));
        let layer = MemoryLayer::new(self.memory.admission().clone(), flat);
        let mut service = layer.layer(service_fn(cloneable(handler)));
        let body = Frames { frames, ..Frames::default() };
        let request = Request::get("/upload/1").body(body).expect("a valid head");
        let call = service.call(request);
        Box::pin(async { call.await.expect("infallible") })
    }
}

async fn next<B: Body<Data = Bytes> + Unpin>(body: &mut B) -> Option<Frame<Bytes>> {
    poll_fn(|cx| Pin::new(&mut *body).poll_frame(cx)).await?.ok()
}

async fn data<B: Body<Data = Bytes> + Unpin>(body: &mut B) -> Bytes {
    next(body).await.expect("a frame").into_data().expect("with data")
}

/// Fails unless so many bytes are live, rounded to a size class, beside a few small blocks.
fn assert_live(bytes: usize) {
    let permit = RequestPermit::current().expect("within a request");
    // Work that runs counts at its end: end it.
    permit.release(ByteSize::ZERO);
    let live = permit.memory().expect("measured").live.get();
    let live = usize::try_from(live).expect("small");
    let most = bytes + bytes / 8 + 8 * KIB;
    assert!((bytes..most).contains(&live), "{live}, not {bytes}");
}

async fn empty() -> Result<Response<Frames>, Infallible> {
    Ok(Response::new(Frames::default()))
}

#[test]
fn a_frame_counts_from_when_it_is_handed_over_until_it_is_dropped() {
    let bed = Bed::new();
    let mut buffer = BytesMut::new();
    let frames = [300, 8, 16].map(|kib| Frame::data(shared(kib * KIB, &mut buffer)));
    let call = bed.call(frames.into(), async |request: Received| {
        let mut body = request.into_body();
        assert_live(0);
        let large = data(&mut body).await;
        assert_live(300 * KIB);
        let small = [data(&mut body).await, data(&mut body).await];
        assert_live(324 * KIB);
        let slice = large.slice(..10);
        drop(large);
        assert_live(324 * KIB); // a slice keeps the frame
        drop(slice);
        assert_live(24 * KIB);
        drop((small, body));
        assert_live(0);
        empty().await
    });
    drop(now(call));
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

/// The connection's buffers are larger than their frames, and a handler that kept frames held up to
/// half as much again as was counted.
#[test]
fn a_handler_that_keeps_frames_keeps_few_buffers_of_the_connection() {
    let bed = Bed::new();
    let buffers: Vec<_> = (0..10).map(|_| BytesMut::with_capacity(512 * KIB)).collect();
    let buffers = Arc::new(Mutex::new(buffers));
    let mut lock = buffers.lock().expect("no panic");
    let frames = lock.iter_mut().map(|buffer| Frame::data(shared(200 * KIB, buffer))).collect();
    drop(lock);
    let call = bed.call(frames, async |request: Received| {
        let mut body = request.into_body();
        let mut kept = Vec::new();
        while let Some(frame) = next(&mut body).await {
            kept.push(frame);
        }
        assert_live(2000 * KIB);
        // Whoever reads into a buffer next need not allocate one if nothing refers to it.
        let free = |buffer: &mut BytesMut| buffer.try_reclaim(400 * KIB);
        let free =
            buffers.lock().expect("no panic").iter_mut().map(free).filter(|free| *free).count();
        assert_eq!(free, 8, "two frames are at most 512 KiB");
        drop(kept);
        empty().await
    });
    drop(now(call));
}

/// The bug: the block of a frame's owner counted when it was freed and not when it was allocated. A
/// client that sent bytes one by one hid what the handler held.
#[test]
fn tiny_frames_hid_what_a_handler_holds() {
    let bed = Bed::new();
    let mut buffer = BytesMut::new();
    let tiny = (0..10_000).map(|_| Frame::data(shared(1, &mut buffer)));
    let frames = small_frames().into_iter().take(200).chain(tiny).collect();
    drop(now(bed.call(frames, async |request: Received| {
        // The small block stands for the head of the request, which others allocated.
        let held = [4 * MIB, 4 * KIB].map(|size| black_box(Vec::<u8>::with_capacity(size)));
        let mut body = request.into_body();
        while let Some(frame) = next(&mut body).await {
            drop(frame);
        }
        assert_live(4 * MIB);
        drop(held);
        empty().await
    })));
}

#[test]
fn a_small_frame_may_be_written_to() {
    let bed = Bed::new();
    let mut buffer = BytesMut::new();
    let frames = vec![Frame::data(shared(4 * KIB, &mut buffer))];
    drop(now(bed.call(frames, async |request: Received| {
        let frame = data(&mut request.into_body()).await;
        assert!(frame.try_into_mut().is_ok(), "it does not share its buffer");
        empty().await
    })));
}

#[test]
fn lengths_ends_and_trailers_of_bodies_pass() {
    let bed = Bed::new();
    let trailers = HeaderMap::from_iter([(http::header::ETAG, HeaderValue::from_static("x"))]);
    let frames =
        || vec![Frame::data(Bytes::from_static(b"ebb")), Frame::trailers(trailers.clone())];
    let (received, mut answered) = (frames(), Some(frames()));
    let call = bed.call(received, move |request: Received| {
        let frames = answered.take().expect("one request");
        async move {
            let mut body = request.into_body();
            assert!(!body.is_end_stream());
            assert_eq!(data(&mut body).await, "ebb");
            assert!(!body.is_end_stream());
            let trailers = next(&mut body).await.expect("a frame").into_trailers();
            assert_eq!(trailers.expect("trailers").len(), 1);
            assert!(body.is_end_stream() && next(&mut body).await.is_none());
            Ok(Response::new(Frames { frames, hint: Some(3) }))
        }
    });
    let mut body = now(call).into_body();
    assert_eq!(body.size_hint().exact(), Some(3));
    assert_eq!(now(Box::pin(data(&mut body))), "ebb");
    assert!(!body.is_end_stream());
    assert!(now(Box::pin(next(&mut body))).expect("a frame").is_trailers());
    assert!(body.is_end_stream());
    assert!(now(Box::pin(next(&mut body))).is_none(), "and again");
}

/// Frames that a proxy passes on are dropped by the connection to its upstream: copies without an
/// owner counted until the request had ended.
#[test]
fn frames_that_another_task_reads_and_drops_count_no_longer_than_they_live() {
    let bed = Bed::new();
    drop(now(bed.call(small_frames(), async |request: Received| {
        let mut body = request.into_body();
        let elsewhere = || while now(Box::pin(next(&mut body))).is_some() {};
        std::thread::scope(|scope| scope.spawn(elsewhere).join()).expect("no panic");
        let peak = RequestPermit::current().and_then(|permit| permit.memory()).map(|m| m.peak);
        assert!(peak.expect("measured") < ByteSize::kib(64), "{peak:?}");
        empty().await
    })));
}

/// Likewise if the handler reads them and sends them to another task, but for the first of them.
#[test]
fn small_frames_that_a_handler_sends_elsewhere_count_up_to_a_bound() {
    let bed = Bed::new();
    drop(now(bed.call(small_frames(), async |request: Received| {
        let mut body = request.into_body();
        while let Some(frame) = next(&mut body).await {
            unmeasured(|| drop(frame));
        }
        assert_live(MIB);
        empty().await
    })));
}

/// A slow client held 20 MiB that nothing counted: hyper takes the frame and drops the body.
#[test]
fn a_large_frame_of_a_response_is_reserved_until_it_is_sent() {
    let bed = Bed::new();
    let response = now(bed.call(Vec::new(), async |_| {
        let frames = vec![Frame::data(Bytes::from(black_box(vec![7; 20 * MIB])))];
        Ok(Response::new(Frames { frames, hint: None }))
    }));
    let mut body = response.into_body();
    let frame = now(Box::pin(data(&mut body)));
    drop(body);
    // The head of the request, which others allocated, was freed.
    assert!(bed.reserved() > ByteSize::kib(20 * 1024 - 4), "{}", bed.reserved());
    drop(frame);
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

/// A body of 2,000 frames that it makes one by one.
struct Stream {
    left: usize,
    buffer: BytesMut,
    frame: fn(&mut BytesMut) -> Bytes,
}

impl Body for Stream {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        _: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let Self { left, buffer, frame } = &mut *self;
        *left = left.saturating_sub(1);
        Poll::Ready((*left > 0).then(|| Ok(Frame::data(frame(buffer)))))
    }
}

/// The bug: the connection frees a frame outside the request's scope. A frame that shares a buffer,
/// or is shorter than its buffer, counted until the end, so that a long download reserved its whole
/// length, and a stream of events without end all memory.
#[test]
fn a_stream_that_is_sent_and_freed_grew_for_ever() {
    let event = |_: &mut BytesMut| {
        let mut event = Vec::with_capacity(8 * KIB);
        event.extend(b"data: ebb");
        Bytes::from(event)
    };
    let message = |buffer: &mut BytesMut| shared(4 * KIB, buffer);
    let file = |buffer: &mut BytesMut| {
        *buffer = BytesMut::new();
        shared(64 * KIB, buffer)
    };
    let frames: [fn(&mut BytesMut) -> Bytes; 3] = [event, message, file];
    for (nth, frame) in frames.into_iter().enumerate() {
        let bed = Bed::new();
        let response = now(bed.call(Vec::new(), async |_| {
            Ok(Response::new(Stream { left: 2_000, buffer: BytesMut::new(), frame }))
        }));
        let mut body = response.into_body();
        // As a connection: a few frames wait to be sent.
        let mut queue = std::collections::VecDeque::new();
        while let Some(frame) = now(Box::pin(next(&mut body))) {
            queue.push_back(frame);
            queue.truncate(4);
            if queue.len() == 4 {
                drop(queue.pop_front());
            }
        }
        assert!(bed.reserved() < ByteSize::mib(1), "{nth}: {}", bed.reserved());
    }
}

#[test]
fn a_frame_of_a_request_that_outlives_it_keeps_no_reservation() {
    let bed = Bed::new();
    let mut buffer = BytesMut::new();
    let cache = Arc::new(Mutex::new(Vec::new()));
    let frames = vec![Frame::data(shared(MIB / 2, &mut buffer))];
    let kept = Arc::clone(&cache);
    drop(now(bed.call(frames, async |request: Received| {
        let frame = data(&mut request.into_body()).await;
        kept.lock().expect("no panic").push(frame);
        empty().await
    })));
    assert_eq!(bed.reserved(), ByteSize::ZERO);
    cache.lock().expect("no panic").clear();
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

#[test]
fn spawned_work_counts_in_a_scope_and_the_reservation_lasts_as_long() {
    let bed = Bed::new();
    let spawned = Arc::new(Mutex::new(None));
    let slot = Arc::clone(&spawned);
    let mut call = bed.call(Vec::new(), async |_: Received| {
        let work = scope_blocking(|| black_box(vec![7_u8; 3 * MIB]));
        let block = std::thread::spawn(work).join().expect("no panic");
        assert_live(3 * MIB);
        let task: Pin<Box<dyn Future<Output = ()> + Send>> = Box::pin(scope(async {
            let held = black_box(vec![7_u8; 2 * MIB]);
            wait_once().await;
            wait_once().await;
            drop(held);
        }));
        *slot.lock().expect("no panic") = Some(task);
        wait_once().await;
        assert_live(5 * MIB);
        drop(block);
        empty().await
    });
    assert!(poll(&mut call).is_pending());
    assert!(RequestPermit::current().is_none());
    let mut task = spawned.lock().expect("no panic").take().expect("spawned");
    assert!(poll(&mut task).is_pending());
    drop(now(call));
    assert!(bed.reserved() >= ByteSize::mib(5), "it grew and does not shrink: {}", bed.reserved());
    assert!(poll(&mut task).is_pending());
    drop(task);
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}

#[test]
fn memory_that_changes_hands_is_adopted_and_released() {
    let bed = Bed::new();
    drop(now(bed.call(Vec::new(), async |_: Received| {
        let permit = RequestPermit::current().expect("within a request");
        let given = black_box(vec![7_u8; 8 * MIB]);
        permit.release(ByteSize::of(8 * MIB));
        assert_live(0);
        permit.adopt(ByteSize::of(8 * MIB));
        drop(given);
        assert_live(0);
        empty().await
    })));
}

#[test]
fn the_largest_requests_are_named_with_what_they_hold_until_they_end() {
    let bed = Bed::new();
    let mut calls: Vec<_> = [3, 0, 5]
        .map(|mib| {
            bed.call(Vec::new(), move |_: Received| async move {
                let less = black_box(vec![7_u8; 2 * mib * MIB]);
                drop(less);
                let held = black_box(vec![7_u8; mib * MIB]);
                wait_once().await;
                drop(held);
                empty().await
            })
        })
        .into();
    assert!(calls.iter_mut().all(|call| poll(call).is_pending()));
    let largest = bed.memory.report().largest_requests();
    let mib = |bytes: ByteSize| bytes.get() / ByteSize::mib(1).get();
    let figures: Vec<_> = largest.iter().map(|of| (mib(of.live), mib(of.peak))).collect();
    assert_eq!(figures, [(5, 10), (3, 6)], "a small request is not listed");
    for of in &largest {
        assert_eq!((&*of.method, &*of.route, of.claim), ("GET", "upload", ByteSize::kib(32)));
    }
    drop(now(calls.pop().expect("the largest")));
    let largest = bed.memory.report().largest_requests();
    assert_eq!(largest.iter().map(|of| mib(of.live)).collect::<Vec<_>>(), [3]);
    drop(calls);
    assert_eq!(bed.memory.report().largest_requests(), []);
}

#[test]
fn bytes_that_outlive_their_request_are_counted() {
    let bed = Bed::new();
    let outlived = || bed.memory.admission().stats().outlived_bytes_total;
    let cache = Mutex::new(Vec::new());
    drop(now(bed.call(Vec::new(), async |_: Received| {
        drop(black_box(vec![7_u8; MIB]));
        empty().await
    })));
    assert_eq!(outlived(), 0, "it freed all");
    drop(now(bed.call(Vec::new(), async |_: Received| {
        cache.lock().expect("no panic").push(black_box(vec![7_u8; 3 * MIB]));
        empty().await
    })));
    // The head of the request, which others allocated, was freed.
    assert!(outlived().abs_diff(3 * MIB as u64) < 4 * KIB as u64, "{}", outlived());
}

#[test]
fn a_request_that_is_cancelled_frees_what_it_held() {
    let bed = Bed::new();
    let permits = Arc::new(Mutex::new(Vec::new()));
    let noted = Arc::clone(&permits);
    let mut call = bed.call(Vec::new(), async |_: Received| {
        noted.lock().expect("no panic").push(RequestPermit::current().expect("within a request"));
        let held = black_box(vec![7_u8; 30 * MIB]);
        wait_once().await;
        drop(held);
        empty().await
    });
    assert!(poll(&mut call).is_pending());
    let permit = permits.lock().expect("no panic").pop().expect("noted");
    assert!(permit.memory().expect("measured").live >= ByteSize::mib(30));
    drop(call);
    assert!(permit.memory().expect("measured").live < ByteSize::kib(64));
    assert!(bed.reserved() >= ByteSize::mib(30), "the test holds the permit");
    drop(permit);
    assert_eq!(bed.reserved(), ByteSize::ZERO);
}
