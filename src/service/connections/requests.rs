//! The requests of a connection: whether the server works on them or waits for the client.
//!
//! The client is waited for while a handler waits for a part of the request's body, and from the
//! head of a response, and each frame, until the connection asks for the next frame. Otherwise the
//! server works.
//!
//! Invariants: `working` counts the requests on which neither is the case, and `sending` those of
//! which the connection has a part of the response. A request is open until its service future and
//! its bodies are dropped.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::task::{Context, Poll, ready};

use http::header::CONNECTION;
use http::{HeaderValue, Request, Response, StatusCode, Version};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;
use tower_service::Service;

use lowtide_admission::{Admission, Level};

use super::{Connection, ConnectionState, Upgraded};
use crate::sync::lock;

/// The handler waits for the request's body.
const RECEIVES: u8 = 1;
/// The connection has a part of the response that it has not sent.
const SENDS: u8 = 2;

/// A request of a connection that has not ended.
#[derive(Debug)]
struct OpenRequest {
    state: Arc<ConnectionState>,
    /// The reasons to wait for the client; 0 while the server works.
    waits: AtomicU8,
}

impl OpenRequest {
    fn new(state: &Arc<ConnectionState>) -> Arc<Self> {
        state.working.fetch_add(1, Ordering::Relaxed);
        Arc::new(Self { state: Arc::clone(state), waits: AtomicU8::new(0) })
    }

    /// Sets or clears a reason to wait for the client.
    fn set(&self, reason: u8, is_set: bool) {
        let before = match is_set {
            true => self.waits.fetch_or(reason, Ordering::Relaxed),
            false => self.waits.fetch_and(!reason, Ordering::Relaxed),
        };
        self.count(before, if is_set { before | reason } else { before & !reason });
    }

    /// Counts the request by its new reasons to wait.
    fn count(&self, before: u8, after: u8) {
        let ConnectionState { working, sending, .. } = &*self.state;
        for (counter, was, is) in
            [(working, before == 0, after == 0), (sending, before & SENDS != 0, after & SENDS != 0)]
        {
            match (was, is) {
                (false, true) => _ = counter.fetch_add(1, Ordering::Relaxed),
                (true, false) => _ = counter.fetch_sub(1, Ordering::Relaxed),
                _ => {}
            }
        }
    }
}

impl Drop for OpenRequest {
    fn drop(&mut self) {
        // A request that waits for its body is in neither count.
        self.count(self.waits.load(Ordering::Relaxed), RECEIVES);
    }
}

impl Connection {
    /// Returns the service of this connection: it records what the server waits for, and ends the
    /// connection with its next response at level high and above. Takes some allocations
    /// for each request, and no lock.
    pub fn service<S>(&self, inner: S) -> ConnectionService<S> {
        let (state, admission) = (Arc::clone(&self.state), self.connections.admission.clone());
        ConnectionService { inner, state, admission }
    }
}

/// A service on one connection, of [`Connection::service`].
#[derive(Clone, Debug)]
pub struct ConnectionService<S> {
    pub(super) inner: S,
    pub(super) state: Arc<ConnectionState>,
    pub(super) admission: Admission,
}

impl<S, Q, R> Service<Request<Q>> for ConnectionService<S>
where
    S: Service<Request<ConnectionBody<Q>>, Response = Response<R>>,
    Q: Body,
{
    type Response = Response<ConnectionBody<R>>;
    type Error = S::Error;
    type Future = ConnectionFuture<S::Future>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, mut request: Request<Q>) -> Self::Future {
        request.extensions_mut().insert(Arc::clone(&self.state));
        let (version, open) = (request.version(), OpenRequest::new(&self.state));
        let is_arriving = !request.body().is_end_stream();
        self.state.has_unread.store(is_arriving, Ordering::Relaxed);
        self.state.is_shared.store(version >= Version::HTTP_2, Ordering::Relaxed);
        let body = |body| ConnectionBody { body, open: Arc::clone(&open), waits: RECEIVES };
        let future = self.inner.call(request.map(body));
        ConnectionFuture { future, open, version, admission: self.admission.clone() }
    }
}

pin_project! {
    /// The future of a response.
    #[derive(Debug)]
    pub struct ConnectionFuture<F> {
        #[pin]
        future: F,
        open: Arc<OpenRequest>,
        version: Version,
        admission: Admission,
    }
}

impl<F, R, E> Future for ConnectionFuture<F>
where
    F: Future<Output = Result<Response<R>, E>>,
{
    type Output = Result<Response<ConnectionBody<R>>, E>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        let this = self.project();
        let mut response = ready!(this.future.poll(cx))?;
        let upgraded = response.extensions_mut().remove::<Upgraded>();
        let is_http2 = *this.version >= Version::HTTP_2;
        if upgraded.is_some() && !is_http2 {
            *lock(&this.open.state.upgraded) = upgraded;
        }
        let is_last = this.admission.level() >= Level::High && !this.admission.state().observes();
        if is_last && is_http2 {
            this.open.state.set(&this.open.state.is_ending);
        } else if is_last && response.status() != StatusCode::SWITCHING_PROTOCOLS {
            response.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
        }
        this.open.set(SENDS, true);
        let open = Arc::clone(this.open);
        Poll::Ready(Ok(response.map(|body| ConnectionBody { body, open, waits: SENDS })))
    }
}

pin_project! {
    /// The body of a request or of a response on a connection.
    #[derive(Debug)]
    pub struct ConnectionBody<B> {
        #[pin]
        body: B,
        open: Arc<OpenRequest>,
        // `RECEIVES` or `SENDS`.
        waits: u8,
    }

    impl<B> PinnedDrop for ConnectionBody<B> {
        fn drop(this: Pin<&mut Self>) {
            // A handler that does not read its body does not wait for it either. The end of a
            // response is that of its request.
            if this.waits == RECEIVES {
                this.open.set(RECEIVES, false);
            }
        }
    }
}

impl<B: Body> Body for ConnectionBody<B> {
    type Data = B::Data;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<B::Data>, B::Error>>> {
        let mut this = self.project();
        let polled = this.body.as_mut().poll_frame(cx);
        let is_over = || matches!(polled, Poll::Ready(None)) || this.body.is_end_stream();
        if *this.waits == RECEIVES && polled.is_ready() && is_over() {
            this.open.state.has_unread.store(false, Ordering::Relaxed);
        }
        this.open.set(*this.waits, polled.is_pending() == (*this.waits == RECEIVES));
        polled
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
