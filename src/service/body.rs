//! The bodies of requests and responses that pass the layer.
//!
//! The connection allocates the frames of a request body, and hyper reads several of them into one
//! buffer. So the request is charged for the length of a frame from when it is handed over until it
//! is dropped, wherever that is, and not for the buffer. A handler that keeps frames gets copies,
//! so that it keeps few buffers. The first small frames that it reads itself are plain copies, on
//! which `Bytes::try_into_mut` succeeds; they count until they are dropped in a scope.
//!
//! The response body holds the request's permit, and so do its frames until they are sent, except
//! for the first small ones. The connection drops frames outside any scope, but a followed frame is
//! dropped in that of its request, so a response without end does not grow.
//!
//! While the reservation of a request is suspended (`permit`), its body is read only as far as
//! there is room for what arrives. Its last frame, or its end, is kept here until the request has
//! reserved its claim again, for which it waits in the queue.
//!
//! A request with time limits (`time_limits`) records each wait for its client. If the pace of its
//! response counts, large frames are handed over in pieces, so that the connection asks for more
//! as the client takes them. A response that was cut ends with the rejection as its error.
//!
//! Invariants: the permit lives as long as the response body and its followed frames; a frame of a
//! request keeps neither the permit of its request nor the memory of its account.

use std::fmt;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use lowtide_admission::Rejected;
use lowtide_heap::unmeasured;
use pin_project_lite::pin_project;

use crate::BoxError;
use crate::bytes::ByteSize;

use super::load_report::LoadReports;
use super::permit::{QueuePlace, RequestPermit, WeakPermit};
use super::scoped::Scoped;
use super::time_limits::{TimeLimits, UnsentParts};

/// A request's frame of at most so many bytes is a plain copy. It would keep the whole buffer of
/// which it is a part, and following it costs an allocation too. The default of HTTP/2, and more
/// than most bodies of HTTP/1.
const COPIED_MAX: ByteSize = ByteSize::kib(16);
/// The most bytes of plain copies for one request. More than that, a handler that passes frames on
/// to other tasks would be charged for too many that are gone.
const PLAIN_MAX: ByteSize = ByteSize::mib(1);
/// All frames are copied while a request holds so many bytes in buffers of the connection: it keeps
/// them, and the buffers would be up to half as large again. More than hyper reads at a time.
const LENT_MAX: ByteSize = ByteSize::kib(512);
/// A response's frame of fewer bytes counts for the connection from when it is handed over, if it
/// is one of the first. An estimate: to follow it until it is sent costs an allocation.
const FOLLOWED_MIN: ByteSize = ByteSize::kib(16);
/// The number of such frames of one response. Each may keep a buffer that is larger than itself,
/// which counts until the request ends. An estimate: more than most responses have.
const PLAIN_FRAMES: u8 = 16;

/// The most of a response that is handed over at once, if its pace counts. An estimate: as much as
/// the connection keeps in its buffer.
const PIECE_MAX: usize = 256 << 10;

pin_project! {
    /// The body of a request that passed the layer. A handler behind
    /// [`Connection::service`](super::Connection::service) and the layer receives a
    /// `Request<RequestBody<ConnectionBody<hyper::body::Incoming>>>`.
    #[derive(Debug)]
    pub struct RequestBody<Q> {
        // `None` only while it is dropped.
        #[pin]
        body: Option<Q>,
        // `None` if the body is empty, or nothing is measured and no time limited.
        permit: Option<RequestPermit>,
        is_arriving: bool,
        // Its handler has not begun to read it.
        is_unread: bool,
        // The end of the body of a suspended request.
        last: Option<Last>,
        place: QueuePlace,
    }

    impl<Q> PinnedDrop for RequestBody<Q> {
        fn drop(this: Pin<&mut Self>) {
            let mut this = this.project();
            if let Some(permit) = this.permit {
                unmeasured(|| {
                    this.body.set(None);
                    *this.last = None;
                });
                // A handler that does not read it does not wait for it either.
                if *this.is_arriving {
                    permit.unread();
                }
            }
        }
    }
}

impl<Q: Body> RequestBody<Q> {
    /// Creates the body of a request with this permit. Without one it only passes: another layer
    /// has admitted the request.
    #[inline]
    pub(super) fn new(body: Q, permit: Option<&RequestPermit>) -> Self {
        let is_arriving = permit.is_some() && !body.is_end_stream();
        let permit = permit.filter(|it| is_arriving && (it.is_measured() || it.limits().is_some()));
        let (body, permit, place) = (Some(body), permit.cloned(), QueuePlace::NONE);
        Self { body, permit, is_arriving, is_unread: true, last: None, place }
    }
}

fn data_length(frame: &Frame<Bytes>) -> usize {
    frame.data_ref().map_or(0, Bytes::len)
}

/// Returns the bytes that a poll of a body returned.
fn length<E>(polled: &Poll<Option<Result<Frame<Bytes>, E>>>) -> Poll<usize> {
    match polled {
        Poll::Ready(Some(Ok(frame))) => Poll::Ready(data_length(frame)),
        Poll::Ready(_) => Poll::Ready(0),
        Poll::Pending => Poll::Pending,
    }
}

pub(super) fn has_unknown_length(body: &impl Body) -> bool {
    body.size_hint().exact().is_none()
}

/// The end of a body that the handler has not got yet.
#[derive(Debug)]
enum Last {
    /// Boxed, since few bodies have one.
    Frame(Box<Frame<Bytes>>),
    /// It ends without a further frame.
    End,
}

impl<Q: Body<Data = Bytes>> Body for RequestBody<Q> {
    type Data = Bytes;
    type Error = Q::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Q::Error>>> {
        let this = self.project();
        let Some(mut body) = this.body.as_pin_mut() else { return Poll::Ready(None) };
        let Some(permit) = this.permit else { return body.poll_frame(cx) };
        if std::mem::take(this.is_unread) {
            permit.reads();
        }
        // Ends: it goes on only with the end of the body, which has room then.
        let polled = loop {
            if permit.is_suspended() {
                let (place, is_last) = (&mut *this.place, this.last.is_some());
                if unmeasured(|| permit.poll_room(place, is_last, cx)).is_pending() {
                    // Until there is room, the client is not waited for.
                    permit.receives(Poll::Ready(0), cx.waker());
                    return Poll::Pending;
                }
            }
            // The length of the frame stands for what the layers below allocate.
            let polled = match this.last.take() {
                Some(Last::Frame(frame)) => Poll::Ready(Some(Ok(unmeasured(|| *frame)))),
                Some(Last::End) => Poll::Ready(None),
                None => {
                    let polled = unmeasured(|| body.as_mut().poll_frame(cx));
                    permit.receives(length(&polled), cx.waker());
                    polled
                }
            };
            let is_over = match &polled {
                Poll::Ready(Some(Ok(frame))) => frame.is_trailers(),
                Poll::Ready(None | Some(Err(_))) => true,
                Poll::Pending => false,
            };
            if !*this.is_arriving {
                break polled;
            }
            if !(is_over || body.is_end_stream()) {
                permit.set_receiving(polled.is_pending());
                break polled;
            }
            if permit.arrived() {
                *this.is_arriving = false;
                break polled;
            }
            *this.last = match polled {
                Poll::Ready(Some(Ok(frame))) => Some(Last::Frame(unmeasured(|| Box::new(frame)))),
                Poll::Ready(None) => Some(Last::End),
                Poll::Ready(Some(Err(_))) => {
                    // Nothing more arrives.
                    permit.go_on();
                    *this.is_arriving = false;
                    break polled;
                }
                Poll::Pending => break polled,
            };
        };
        if !permit.is_measured() {
            return polled;
        }
        let receive = |data| RequestFrame::receive(data, permit);
        polled.map(|frame| frame.map(|frame| frame.map(|frame| frame.map_data(receive))))
    }

    fn is_end_stream(&self) -> bool {
        // A handler that stops reading here must have got the end of a body that arrives.
        let is_read = self.permit.is_none() || !self.is_arriving;
        is_read && self.body.as_ref().is_none_or(Body::is_end_stream)
    }

    fn size_hint(&self) -> SizeHint {
        let hint = self.body.as_ref().map_or_else(SizeHint::default, Body::size_hint);
        match &self.last {
            Some(Last::Frame(frame)) => {
                SizeHint::with_exact(hint.lower().saturating_add(data_length(frame) as u64))
            }
            Some(Last::End) | None => hint,
        }
    }
}

/// A frame of a request body, which counts until it is dropped.
struct RequestFrame {
    data: Bytes,
    permit: WeakPermit,
    /// `true` if it is in a buffer of the connection.
    is_lent: bool,
}

impl RequestFrame {
    /// The block of `Bytes` for a frame: this owner and a counter, rounded up to a size class.
    const BLOCK: ByteSize = ByteSize::of(size_of::<Self>() + 2 * size_of::<usize>());

    /// Charges the request for the frame.
    fn receive(data: Bytes, permit: &RequestPermit) -> Bytes {
        let length = ByteSize::of(data.len());
        if length <= COPIED_MAX && permit.is_current() && permit.copy_plainly(length, PLAIN_MAX) {
            let copy = Bytes::copy_from_slice(&data);
            unmeasured(|| drop(data));
            return copy;
        }
        let is_lent = permit.lend(length, LENT_MAX);
        let data = unmeasured(|| if is_lent { data } else { Bytes::copy_from_slice(&data) });
        // Many tiny frames need more for their blocks than for their bytes.
        permit.adopt(length.saturating_add(Self::BLOCK));
        unmeasured(|| Bytes::from_owner(Self { data, permit: permit.downgrade(), is_lent }))
    }
}

impl AsRef<[u8]> for RequestFrame {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for RequestFrame {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        self.permit.give_back(ByteSize::of(data.len()), self.is_lent, Self::BLOCK);
        unmeasured(|| drop(data));
    }
}

/// A frame of a response, which holds the request's permit until it is sent.
struct ResponseFrame {
    data: Bytes,
    permit: RequestPermit,
    /// `None` if the request has no time limits.
    _part: Option<Arc<UnsentParts>>,
}

impl ResponseFrame {
    /// Replaces the data of a frame by one that holds the permit until it is sent, if it is large
    /// or not one of the first frames, which `frames` counts. Otherwise releases its bytes at once.
    fn send(data: &mut Bytes, permit: &RequestPermit, frames: &mut u8) {
        let length = ByteSize::of(data.len());
        let is_first = *frames < PLAIN_FRAMES;
        *frames = frames.saturating_add(1);
        if length >= FOLLOWED_MIN || !is_first {
            let (_part, permit) = (permit.limits().map(TimeLimits::begin_part), permit.clone());
            *data = Bytes::from_owner(Self { data: std::mem::take(data), permit, _part });
            return;
        }
        if data.is_unique() {
            permit.release(length);
        }
    }
}

impl AsRef<[u8]> for ResponseFrame {
    fn as_ref(&self) -> &[u8] {
        &self.data
    }
}

impl Drop for ResponseFrame {
    fn drop(&mut self) {
        let data = std::mem::take(&mut self.data);
        // Frees its buffer only if nothing else refers to it, such as a cache.
        self.permit.measure(|| drop(data));
    }
}

pin_project! {
    /// The body of a response that passed the layer. The default is empty.
    #[derive(Debug)]
    pub struct ResponseBody<R> {
        #[pin]
        kind: ResponseKind<R>,
    }
}

pin_project! {
    #[project = ResponseKindProject]
    #[derive(Debug)]
    enum ResponseKind<R> {
        // With the number of its frames so far.
        Admitted {
            #[pin]
            body: Scoped<R>,
            frames: u8,
            // Nothing depends on how long it goes on.
            is_stream: bool,
            limited: Option<Box<Limited>>,
            // Adds a load report to the trailers.
            reports: Option<Arc<LoadReports>>,
        },
        Rejected { text: Option<Bytes> },
    }
}

/// A response of a request with time limits, which has not ended.
#[derive(Debug)]
struct Limited {
    /// What was not handed over of the last frame.
    rest: Bytes,
    _part: Arc<UnsentParts>,
}

impl Limited {
    fn new(permit: &RequestPermit) -> Option<Box<Self>> {
        let _part = permit.limits()?.begin_part();
        // The connection may still send an earlier response.
        permit.sends(Poll::Ready(0), Waker::noop());
        Some(Box::new(Self { rest: Bytes::new(), _part }))
    }

    /// Returns the next piece of the last frame.
    fn next_piece(&mut self) -> Bytes {
        self.rest.split_to(self.rest.len().min(PIECE_MAX))
    }

    /// Leaves the first piece of a frame if its pace counts.
    fn split(&mut self, frame: &mut Frame<Bytes>, permit: &RequestPermit) {
        let is_paced = permit.limits().is_some_and(|limits| limits.response().is_some());
        if let Some(data) = frame.data_mut().filter(|_| is_paced) {
            self.rest = std::mem::take(data);
            *data = self.next_piece();
        }
    }
}

impl<R> ResponseBody<R> {
    /// An empty text ends the body immediately, so that HTTP/2 sends only the head.
    pub(super) fn rejected(text: String) -> Self {
        let text = Some(text.into()).filter(|text: &Bytes| !text.is_empty());
        Self { kind: ResponseKind::Rejected { text } }
    }
}

impl<R> Default for ResponseBody<R> {
    /// Returns an empty body, which layers such as a timeout or CORS answer with.
    fn default() -> Self {
        Self { kind: ResponseKind::Rejected { text: None } }
    }
}

/// The error of a [`ResponseBody`]. Converts to [`BoxError`] if the inner one does.
// Not a `BoxError` itself: a bound `R::Error: Into<BoxError>` on `Body` cannot be proven inside a
// spawned future if that error is a `BoxError` (rust-lang/rust#64552). It does not implement
// `Error`, because a `BoxError` does not.
#[derive(Debug)]
#[non_exhaustive]
pub enum ResponseBodyError<E> {
    /// The error of the inner body.
    Inner(E),
    /// The time limit of the request has passed.
    Rejected(Rejected),
}

impl<E: fmt::Display> fmt::Display for ResponseBodyError<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Inner(error) => error.fmt(f),
            Self::Rejected(rejected) => rejected.fmt(f),
        }
    }
}

impl<E: Into<Self>> From<ResponseBodyError<E>> for BoxError {
    fn from(error: ResponseBodyError<E>) -> Self {
        match error {
            ResponseBodyError::Inner(error) => error.into(),
            ResponseBodyError::Rejected(rejected) => rejected.into(),
        }
    }
}

impl<R: Body> ResponseBody<R> {
    /// Creates the body of a response to a request with this permit. There is none if another layer
    /// has admitted the request.
    #[inline]
    pub(super) fn new(
        body: R,
        permit: Option<RequestPermit>,
        reports: Option<Arc<LoadReports>>,
    ) -> Self {
        let is_limited = |it: &&RequestPermit| it.limits().is_some() && !body.is_end_stream();
        let limited = permit.as_ref().filter(is_limited).and_then(Limited::new);
        let (body, frames, is_stream) = (Scoped { inner: Some(body), permit }, 0, false);
        Self { kind: ResponseKind::Admitted { body, frames, is_stream, limited, reports } }
    }
}

impl<R: Body<Data = Bytes>> Body for ResponseBody<R> {
    type Data = Bytes;
    type Error = ResponseBodyError<R::Error>;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        match self.project().kind.project() {
            ResponseKindProject::Admitted { mut body, frames, is_stream, limited, reports } => {
                if let (Some(limits), Some(permit)) = (&mut *limited, body.permit.as_ref()) {
                    if let Some(rejected) = permit.cut() {
                        body.end();
                        *limited = None;
                        return Poll::Ready(Some(Err(ResponseBodyError::Rejected(rejected))));
                    }
                    if !limits.rest.is_empty() {
                        let piece = limits.next_piece();
                        permit.sends(Poll::Ready(piece.len()), cx.waker());
                        return Poll::Ready(Some(Ok(Frame::data(piece))));
                    }
                }
                if body.inner.is_none() {
                    return Poll::Ready(None);
                }
                let mut polled = body.as_mut().poll_with(|mut body| {
                    let polled = body.as_mut().poll_frame(cx);
                    (polled, body.is_end_stream())
                });
                let Some(permit) = body.permit.as_ref() else {
                    return polled.map_err(ResponseBodyError::Inner);
                };
                let is_long = polled.is_pending() || *frames >= PLAIN_FRAMES;
                if is_long && !*is_stream && body.inner.as_ref().is_some_and(has_unknown_length) {
                    *is_stream = permit.goes_on();
                }
                match &mut polled {
                    Poll::Ready(Some(Ok(frame))) => {
                        if let (Some(reports), Some(trailers)) = (reports, frame.trailers_mut()) {
                            reports.attach_to_trailers(trailers);
                        }
                        if permit.is_measured()
                            && let Some(data) = frame.data_mut()
                        {
                            ResponseFrame::send(data, permit, frames);
                        }
                        if let Some(limits) = limited {
                            limits.split(frame, permit);
                            permit.sends(Poll::Ready(data_length(frame)), cx.waker());
                        }
                    }
                    Poll::Ready(Some(Err(_))) => {}
                    Poll::Ready(None) => permit.sends(Poll::Ready(0), cx.waker()),
                    Poll::Pending => permit.sends(Poll::Pending, cx.waker()),
                }
                polled.map_err(ResponseBodyError::Inner)
            }
            ResponseKindProject::Rejected { text } => {
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            ResponseKind::Admitted { body, limited, .. } => {
                limited.as_ref().is_none_or(|limits| limits.rest.is_empty())
                    && body.inner.as_ref().is_none_or(Body::is_end_stream)
            }
            ResponseKind::Rejected { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            ResponseKind::Admitted { body, limited, .. } => {
                let left = match &body.inner {
                    Some(body) => body.size_hint(),
                    None => SizeHint::with_exact(0),
                };
                let Some(limits) = limited else { return left };
                let (kept, mut hint) = (limits.rest.len() as u64, SizeHint::new());
                hint.set_lower(left.lower().saturating_add(kept));
                left.upper().into_iter().for_each(|most| hint.set_upper(most.saturating_add(kept)));
                hint
            }
            ResponseKind::Rejected { text } => {
                SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64)
            }
        }
    }
}
