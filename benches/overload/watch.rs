//! The cost of a refusal, measured in the service: from the head of a request, parsed, to its
//! response, handed over to the server.
//!
//! It stands outside whatever admits, so that all policies are measured alike, and it reads away
//! the body of a refused request where the policy has not (a server that answers and closes while
//! the client still sends looks broken to it). Most of a refusal's time is the client's, who sends
//! its body: the time in which the body was waited for is taken off in `own`.
//!
//! Invariant: `own <= whole`.

use std::pin::Pin;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes, HttpBody};
use axum::extract::Request;
use axum::http::StatusCode;
use axum::middleware::Next;
use axum::response::Response;
use http_body_util::BodyExt as _;
use hyper::body::{Frame, SizeHint};

/// Refusals that are kept, so that the list never grows while the service is measured.
const KEPT: usize = 32 << 10;

/// The refusals so far.
#[derive(Clone, Debug)]
pub(crate) struct Watch(Arc<Mutex<Vec<[f32; 2]>>>);

impl Watch {
    /// None yet; the room for them is taken now.
    pub(crate) fn new() -> Self {
        Self(Arc::new(Mutex::new(Vec::with_capacity(KEPT))))
    }

    /// Milliseconds of each refusal: the whole of it, and without the waits for its body.
    pub(crate) fn refusals(&self) -> Vec<[f32; 2]> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Passes a request on and measures it where it is refused.
    pub(crate) async fn run(self, request: Request, next: Next) -> Response {
        let start = Instant::now();
        let (head, body) = request.into_parts();
        let kept = Kept { body: Arc::new(Mutex::new(body)), waits: Arc::default(), since: None };
        let handle = kept.again();
        let response = next.run(Request::from_parts(head, Body::new(kept))).await;
        if response.status() != StatusCode::SERVICE_UNAVAILABLE {
            return response;
        }
        let waits = Arc::clone(&handle.waits);
        let mut rest = Body::new(handle);
        // Ends with the body; this bench's own are at most 16 MiB.
        while let Some(Ok(frame)) = rest.frame().await {
            drop(frame);
        }
        let whole = start.elapsed();
        let own = whole.saturating_sub(Duration::from_nanos(waits.load(Ordering::Relaxed)));
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if all.len() < KEPT {
            all.push([millis(whole), millis(own)]);
        }
        response
    }
}

/// A body of which this module keeps a handle.
#[derive(Debug)]
struct Kept {
    body: Arc<Mutex<Body>>,
    /// Nanoseconds in which the next frame was waited for.
    waits: Arc<AtomicU64>,
    /// Since when it is being waited for.
    since: Option<Instant>,
}

impl Kept {
    fn again(&self) -> Self {
        Self { body: Arc::clone(&self.body), waits: Arc::clone(&self.waits), since: None }
    }

    fn with<T>(&self, act: impl FnOnce(&mut Body) -> T) -> T {
        act(&mut self.body.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl HttpBody for Kept {
    type Data = Bytes;
    type Error = axum::Error;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, axum::Error>>> {
        let since = *self.since.get_or_insert_with(Instant::now);
        let frame = ready!(self.with(|body| Pin::new(body).poll_frame(cx)));
        let waited = u64::try_from(since.elapsed().as_nanos()).unwrap_or(u64::MAX);
        self.waits.fetch_add(waited, Ordering::Relaxed);
        self.since = None;
        Poll::Ready(frame)
    }

    fn is_end_stream(&self) -> bool {
        self.with(|body| body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        self.with(|body| body.size_hint())
    }
}

#[expect(clippy::cast_possible_truncation, reason = "a time in milliseconds")]
fn millis(time: Duration) -> f32 {
    (time.as_secs_f64() * 1e3) as f32
}
