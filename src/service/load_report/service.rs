//! The gRPC service `xds.service.orca.v3.OpenRcaService` as a tower service: a stream of load
//! reports for balancers that want them apart from responses.
//!
//! It needs no gRPC library. Its method has one request, of which an interval is read, and answers
//! with a report at once and then after each interval, until the client or the service ends it. A
//! stream whose client does not read is not polled, so it holds its place and no reports.
//!
//! Streams need no timer of a runtime: the control loop looks at them with the requests that have
//! time limits, every 100 ms or at its next tick, and wakes those that are due. It wakes all when
//! the service is about to end.
//!
//! Invariants: at most [`STREAMS_MAX`] streams exist; each holds at most its unread request, of
//! [`REQUEST_MAX`] bytes, and one report. No waker is called with the lock held.

use std::convert::Infallible;
use std::future::{Ready, ready};
use std::pin::Pin;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Weak};
use std::task::{Context, Poll, Waker, ready as ready_or_return};
use std::time::Duration;

use bytes::Bytes;
use http::header::{ALLOW, CONTENT_TYPE};
use http::{HeaderMap, HeaderValue, Method, Request, Response, StatusCode};
use http_body::{Body, Frame};
use pin_project_lite::pin_project;
use tower_service::Service;

use crate::BoxError;
use crate::bytes::ByteSize;
use crate::clock::Moment;
use crate::sync::{Mutex, lock};
use lowtide_admission::layer::{LargeRequest, RequestFigures};

use super::super::rejection::{
    DEADLINE_EXCEEDED, RESOURCE_EXHAUSTED, UNAVAILABLE, put_grpc_status,
};
use super::LoadReports;
use super::message::{PartialRequest, REQUEST_MAX};

/// The path of the gRPC method that streams load reports.
pub const LOAD_REPORT_STREAM_PATH: &str = "/xds.service.orca.v3.OpenRcaService/StreamCoreMetrics";

/// The time that a request may take to arrive.
const REQUEST_TIMEOUT: Duration = Duration::from_secs(10);

/// Statuses of gRPC.
const INVALID_ARGUMENT: u16 = 3;
const UNIMPLEMENTED: u16 = 12;

/// Streams the load reports of a layer, for gRPC clients and balancers that read them apart from
/// responses (`enable_oob_load_report`). Created by
/// [`MemoryLayer::load_report_service`](super::super::MemoryLayer::load_report_service).
///
/// It serves one path, [`LOAD_REPORT_STREAM_PATH`], over HTTP/2, and knows no other: route only
/// that path to it.
#[derive(Clone, Debug)]
pub struct LoadReportService(Arc<LoadReports>);

/// The body of a response.
type ReportBody = Pin<Box<dyn Body<Data = Bytes, Error = BoxError> + Send>>;

impl LoadReportService {
    pub(in crate::service) fn new(reports: &Arc<LoadReports>) -> Self {
        // Adds the streams of a layer to the registry, once.
        if !reports.has_streams.swap(true, Ordering::Relaxed) {
            reports.admission.state().register(Arc::new(StreamTimer(Arc::downgrade(reports))));
        }
        Self(Arc::clone(reports))
    }
}

impl<Q: Body + Send + 'static> Service<Request<Q>> for LoadReportService {
    type Response = Response<ReportBody>;
    type Error = Infallible;
    type Future = Ready<Result<Self::Response, Infallible>>;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), Infallible>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        ready(Ok(self.answer(request)))
    }
}

impl LoadReportService {
    fn answer<Q: Body + Send + 'static>(&self, request: Request<Q>) -> Response<ReportBody> {
        let of_http = |status| {
            let mut response: Response<ReportBody> =
                Response::new(Box::pin(LoadReportStream::<Q>::empty()));
            *response.status_mut() = status;
            response
        };
        if request.method() != Method::POST {
            let mut response = of_http(StatusCode::METHOD_NOT_ALLOWED);
            response.headers_mut().insert(ALLOW, HeaderValue::from_static("POST"));
            return response;
        }
        // "the server SHOULD respond with HTTP status of 415" (PROTOCOL-HTTP2.md of gRPC).
        let kind = request.headers().get(CONTENT_TYPE).map(HeaderValue::as_bytes);
        if !kind.is_some_and(|kind| kind.starts_with(b"application/grpc")) {
            return of_http(StatusCode::UNSUPPORTED_MEDIA_TYPE);
        }
        let refused = |status, message: &str| {
            let mut response = of_http(StatusCode::OK);
            put_grpc_status(response.headers_mut(), status, message);
            response
        };
        let mut response: Response<ReportBody> = if self.0.state.is_none() {
            refused(UNIMPLEMENTED, "load reports are not streamed without a running Memory")
        } else if self.0.is_ending() {
            refused(UNAVAILABLE, ENDING)
        } else if let Some(place) = Streams::acquire(&self.0) {
            Response::new(Box::pin(LoadReportStream::new(request.into_body(), place)))
        } else {
            let text = format!("{STREAMS_MAX} streams of load reports exist: expected no more");
            refused(RESOURCE_EXHAUSTED, &text)
        };
        let kind = HeaderValue::from_static("application/grpc");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

const ENDING: &str = "the service is shutting down";

pin_project! {
    struct LoadReportStream<Q> {
        // `None` once the request was read.
        #[pin]
        request: Option<Q>,
        read: PartialRequest,
        // `None` once the stream has ended.
        place: Option<StreamSlot>,
        interval: Duration,
        // The time of the next report, or while the request arrives that of its timeout.
        due: Moment,
    }
}

impl<Q> LoadReportStream<Q> {
    fn new(request: Q, place: StreamSlot) -> Self {
        let due = place.reports.admission.state().last_tick() + REQUEST_TIMEOUT;
        let request = Some(request);
        Self { request, place: Some(place), due, ..Self::empty() }
    }

    fn empty() -> Self {
        let (read, interval) = (PartialRequest::default(), Duration::ZERO);
        Self { request: None, read, place: None, interval, due: Moment::NEVER }
    }
}

/// The end of a stream: a status of gRPC, and its message.
type StreamEnd = (u16, String);

impl<Q: Body> LoadReportStream<Q> {
    /// Reads the request.
    fn poll_request(
        mut request: Pin<&mut Option<Q>>,
        read: &mut PartialRequest,
        cx: &mut Context<'_>,
    ) -> Poll<Result<Duration, StreamEnd>> {
        // Ends: each frame is a part of the request, and empty ones are counted below.
        for _ in 0..REQUEST_MAX {
            let Some(body) = request.as_mut().as_pin_mut() else { break };
            let frame = ready_or_return!(body.poll_frame(cx)).and_then(Result::ok);
            let Some(data) = frame.and_then(|frame| frame.into_data().ok()) else { break };
            match read.add(data) {
                Ok(None) => {}
                Ok(Some(interval)) => {
                    request.set(None);
                    return Poll::Ready(Ok(interval));
                }
                Err(error) => return Poll::Ready(Err((INVALID_ARGUMENT, error))),
            }
        }
        Poll::Ready(Err((INVALID_ARGUMENT, read.ended())))
    }

    /// Waits for the next report.
    fn poll_report(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Result<Bytes, StreamEnd>> {
        let this = self.project();
        let Some(place) = this.place else { unreachable!("it has ended") };
        let reports = &place.reports;
        if !reports.birth.is_here() || reports.is_ending() {
            return Poll::Ready(Err((UNAVAILABLE, ENDING.to_owned())));
        }
        let now = || reports.admission.state().last_tick();
        let mut request = this.request;
        if request.is_some()
            && let Poll::Ready(read) = Self::poll_request(request.as_mut(), this.read, cx)
        {
            *this.interval = read?;
            *this.read = PartialRequest::default();
            // The first report is due now.
            *this.due = now();
        }
        if now() < *this.due {
            place.wait(Some((*this.due, cx.waker())));
            // The control loop may have looked before that.
            if now() >= *this.due || reports.is_ending() {
                cx.waker().wake_by_ref();
            }
            return Poll::Pending;
        }
        if request.is_some() {
            let text = format!("no request within {REQUEST_TIMEOUT:?}");
            return Poll::Ready(Err((DEADLINE_EXCEEDED, text)));
        }
        *this.due = now() + *this.interval;
        let message = reports.current(|encoded| encoded.message.clone());
        Poll::Ready(message.ok_or_else(|| (UNAVAILABLE, ENDING.to_owned())))
    }
}

impl<Q: Body> Body for LoadReportStream<Q> {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.place.is_none() {
            return Poll::Ready(None);
        }
        let frame = match ready_or_return!(self.as_mut().poll_report(cx)) {
            Ok(report) => Frame::data(report),
            Err((status, message)) => {
                let mut this = self.project();
                *this.place = None;
                this.request.set(None);
                let mut trailers = HeaderMap::new();
                put_grpc_status(&mut trailers, status, &message);
                Frame::trailers(trailers)
            }
        };
        Poll::Ready(Some(Ok(frame)))
    }

    fn is_end_stream(&self) -> bool {
        self.place.is_none()
    }
}

/// The streams of one layer at once. An estimate: balancers open one for each of their threads.
pub(super) const STREAMS_MAX: usize = 256;

/// The streams of one layer.
#[derive(Debug, Default)]
pub(super) struct Streams {
    count: AtomicUsize,
    waiting: Mutex<Vec<(u64, Moment, Waker)>>,
    next: AtomicU64,
}

impl Streams {
    /// Returns a slot for a further stream; `None` if there are too many.
    pub(super) fn acquire(reports: &Arc<LoadReports>) -> Option<StreamSlot> {
        let streams = &reports.streams;
        let add = |count: usize| (count < STREAMS_MAX).then_some(count + 1);
        streams.count.fetch_update(Ordering::Relaxed, Ordering::Relaxed, add).ok()?;
        let number = streams.next.fetch_add(1, Ordering::Relaxed);
        Some(StreamSlot { reports: Arc::clone(reports), number })
    }

    /// Wakes the streams that are due.
    fn wake(&self, is_due: impl Fn(Moment) -> bool) {
        // Bounded: none is added twice before it is polled, and then it is due later.
        for _ in 0..STREAMS_MAX {
            let mut waiting = lock(&self.waiting);
            let Some(at) = waiting.iter().position(|(_, due, _)| is_due(*due)) else { return };
            let (_, _, waker) = waiting.swap_remove(at);
            drop(waiting);
            waker.wake();
        }
    }
}

/// The slot of one stream.
#[derive(Debug)]
pub(super) struct StreamSlot {
    pub(super) reports: Arc<LoadReports>,
    number: u64,
}

impl StreamSlot {
    /// Wakes the task when it is due, by the control loop's clock. It has to look at the time again
    /// after this. The former waker is dropped without the lock.
    fn wait(&self, until: Option<(Moment, &Waker)>) {
        let new = until.map(|(due, waker)| (self.number, due, waker.clone()));
        let mut waiting = lock(&self.reports.streams.waiting);
        let at = waiting.iter().position(|(number, ..)| *number == self.number);
        let before = at.map(|at| waiting.swap_remove(at));
        waiting.extend(new);
        drop(waiting);
        drop(before);
    }
}

impl Drop for StreamSlot {
    fn drop(&mut self) {
        self.reports.streams.count.fetch_sub(1, Ordering::Relaxed);
        // In a forked child another thread may have held the lock.
        if self.reports.birth.is_here() {
            self.wait(None);
        }
    }
}

/// The streams of a layer in the control loop's registry, which keeps what has reserved most. They
/// say that they have reserved more than any request, so that they are kept.
struct StreamTimer(Weak<LoadReports>);

impl LargeRequest for StreamTimer {
    fn figures(&self) -> Option<RequestFigures> {
        let figures = RequestFigures { reserved: ByteSize::MAX, ..RequestFigures::default() };
        self.0.upgrade().map(|_| figures)
    }

    fn wake(&self) {
        let Some(reports) = self.0.upgrade() else { return };
        reports.streams.wake(|_| true);
    }

    fn check_time(&self, now: Moment) {
        if let Some(reports) = self.0.upgrade() {
            let ends = reports.is_ending();
            reports.streams.wake(|due| ends || due <= now);
        }
    }
}
