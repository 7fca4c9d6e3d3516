//! The tower layer: decides in `call`, holds the permit in the response body.
//!
//! `poll_ready` is the inner service's alone: a permit taken there would be held by idle
//! connections. The inner error type stays. A rejected request never reaches the inner service; its
//! body is read away before it is answered (see `drain`).
//!
//! Invariant: every admitted request books its estimate exactly once and gives back what it booked
//! when its response body, and every handle a handler took, are gone.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::control::{Admission, Cost, Priority};

use super::body::ResponseBody;
use super::drain::Drain;
use super::permit::SharedPermit;
use super::rejection::rejection;

/// What a request will need, told from its head: a closure that gives its [`Cost`], or its cost and
/// [`Priority`], is one.
///
/// ```
/// use http::request::Parts;
/// use lowtide::ByteSize;
/// use lowtide::control::{Admission, Cost, Priority};
/// use lowtide::service::MemoryLayer;
///
/// let flat = |_: &Parts| Cost::host(ByteSize::mib(1));
/// let by_path = |head: &Parts| match head.uri.path() {
///     "/report" => (Cost::host(ByteSize::mib(64)), Priority::Low), // shed first
///     _ => (Cost::host(ByteSize::mib(1)), Priority::Normal),
/// };
/// let admission = Admission::with_limit(ByteSize::gib(1));
/// let _layer = MemoryLayer::new(admission.clone(), flat);
/// let _layer = MemoryLayer::new(admission, by_path);
/// ```
pub trait Estimate: Send + Sync + 'static {
    /// The bytes it will need at its peak, and how it fares under pressure.
    fn estimate(&self, head: &Parts) -> (Cost, Priority);
}

impl<F, R> Estimate for F
where
    F: Fn(&Parts) -> R + Send + Sync + 'static,
    R: Into<(Cost, Priority)>,
{
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        self(head).into()
    }
}

/// Admits requests by the bytes that they will need.
pub struct MemoryLayer<E> {
    admission: Admission,
    estimate: Arc<E>,
}

impl<E: Estimate> MemoryLayer<E> {
    /// A layer over this admission. Put routes that must answer under pressure (readiness,
    /// metrics) outside it.
    pub fn new(admission: Admission, estimate: E) -> Self {
        Self { admission, estimate: Arc::new(estimate) }
    }
}

impl<E> Clone for MemoryLayer<E> {
    fn clone(&self) -> Self {
        Self { admission: self.admission.clone(), estimate: Arc::clone(&self.estimate) }
    }
}

impl<E> fmt::Debug for MemoryLayer<E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryLayer").finish_non_exhaustive()
    }
}

impl<S, E> Layer<S> for MemoryLayer<E> {
    type Service = MemoryService<S, E>;

    fn layer(&self, inner: S) -> Self::Service {
        MemoryService { inner, layer: self.clone() }
    }
}

/// A service behind a [`MemoryLayer`].
#[derive(Debug)]
pub struct MemoryService<S, E> {
    inner: S,
    layer: MemoryLayer<E>,
}

impl<S: Clone, E> Clone for MemoryService<S, E> {
    fn clone(&self) -> Self {
        Self { inner: self.inner.clone(), layer: self.layer.clone() }
    }
}

impl<S, E, Q, R> Service<Request<Q>> for MemoryService<S, E>
where
    S: Service<Request<Q>, Response = Response<R>>,
    E: Estimate,
    Q: Body,
    R: Body<Data = Bytes>,
{
    type Response = Response<ResponseBody<R>>;
    type Error = S::Error;
    type Future = ResponseFuture<S::Future, Q>;

    fn poll_ready(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), S::Error>> {
        self.inner.poll_ready(cx)
    }

    fn call(&mut self, request: Request<Q>) -> Self::Future {
        let (mut head, body) = request.into_parts();
        let (cost, priority) = self.layer.estimate.estimate(&head);
        let state = match self.layer.admission.try_admit_with(cost, priority) {
            Ok(permit) => {
                let permit = SharedPermit::new(permit);
                head.extensions.insert(permit.clone());
                let future = self.inner.call(Request::from_parts(head, body));
                State::Admitted { future, permit: Some(permit) }
            }
            Err(rejected) => {
                let path = head.uri.path();
                tracing::debug!(target: "lowtide", %rejected, path, "turned away");
                State::Rejected {
                    rest: Drain::new(&head, body),
                    response: Some(rejection(&rejected)),
                }
            }
        };
        ResponseFuture { state }
    }
}

pin_project! {
    /// The response to come.
    #[derive(Debug)]
    pub struct ResponseFuture<F, Q> {
        #[pin]
        state: State<F, Q>,
    }
}

pin_project! {
    #[project = StateProject]
    #[derive(Debug)]
    enum State<F, Q> {
        Admitted { #[pin] future: F, permit: Option<SharedPermit> },
        Rejected { #[pin] rest: Drain<Q>, response: Option<Response<String>> },
    }
}

impl<F, R, Q, X> Future for ResponseFuture<F, Q>
where
    F: Future<Output = Result<Response<R>, X>>,
    Q: Body,
{
    type Output = Result<Response<ResponseBody<R>>, X>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Self::Output> {
        match self.project().state.project() {
            StateProject::Admitted { future, permit } => {
                let answered = ready!(future.poll(cx));
                let permit = permit.take();
                Poll::Ready(answered.map(|response| match permit {
                    Some(permit) => response.map(|body| ResponseBody::held(body, permit)),
                    None => unreachable!("a future is not polled after its end"),
                }))
            }
            StateProject::Rejected { rest, response } => {
                ready!(rest.poll(cx));
                match response.take() {
                    Some(response) => Poll::Ready(Ok(response.map(ResponseBody::refused))),
                    None => unreachable!("a future is not polled after its end"),
                }
            }
        }
    }
}
