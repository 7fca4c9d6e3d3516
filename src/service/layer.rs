//! The tower layer: decides in `call`, holds the permit in the response body.
//!
//! `poll_ready` is the inner service's alone: a permit taken there would be held by idle
//! connections. The inner error type stays. A rejected request never reaches the inner service; its
//! body is read away behind the answer (see [`ResponseBody`]).
//!
//! Invariant: every admitted request books its estimate exactly once and gives back what it booked
//! when its response body, and every handle a handler took, are gone.

use std::fmt;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http::header::EXPECT;
use http::request::Parts;
use http::{Request, Response};
use http_body::Body;
use pin_project_lite::pin_project;
use tower_layer::Layer;
use tower_service::Service;

use crate::bytes::ByteSize;
use crate::control::{Admission, Cost, Permit, Priority, Rejected};
use crate::sync::{Mutex, lock};

use super::body::ResponseBody;
use super::rejection::rejection;

/// What a request will need, told from its head.
pub trait Estimate: Send + Sync + 'static {
    /// The bytes it will need at its peak, and how it fares under pressure.
    fn estimate(&self, head: &Parts) -> (Cost, Priority);
}

impl<F: Fn(&Parts) -> Cost + Send + Sync + 'static> Estimate for F {
    fn estimate(&self, head: &Parts) -> (Cost, Priority) {
        (self(head), Priority::Normal)
    }
}

/// The permit of a request, in the request's extensions: a handler takes it from there to book
/// more while a body of unknown length arrives.
#[derive(Clone, Debug)]
pub struct SharedPermit(Arc<Mutex<Permit>>);

impl SharedPermit {
    /// Books more.
    ///
    /// # Errors
    /// Where it does not fit; what was booked before stays booked.
    pub fn grow(&self, bytes: ByteSize) -> Result<(), Rejected> {
        lock(&self.0).grow(bytes)
    }

    /// Gives back a part of what was booked.
    pub fn shrink(&self, bytes: ByteSize) {
        lock(&self.0).shrink(bytes);
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
    type Response = Response<ResponseBody<R, Q>>;
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
                let permit = SharedPermit(Arc::new(Mutex::new(permit)));
                head.extensions.insert(permit.clone());
                let future = self.inner.call(Request::from_parts(head, body));
                State::Admitted { future, permit: Some(permit) }
            }
            Err(rejected) => {
                let path = head.uri.path();
                tracing::debug!(target: "lowtide", %rejected, path, "turned away");
                let sends = !head.headers.contains_key(EXPECT);
                State::Rejected { response: Some((rejection(&rejected), body, sends)) }
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
        Rejected { response: Option<(Response<String>, Q, bool)> },
    }
}

impl<F, R, Q, X> Future for ResponseFuture<F, Q>
where
    F: Future<Output = Result<Response<R>, X>>,
{
    type Output = Result<Response<ResponseBody<R, Q>>, X>;

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
            StateProject::Rejected { response } => match response.take() {
                Some((response, body, sends)) => {
                    Poll::Ready(Ok(response.map(|text| ResponseBody::refused(text, body, sends))))
                }
                None => unreachable!("a future is not polled after its end"),
            },
        }
    }
}
