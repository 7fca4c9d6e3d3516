//! How long a request's body is waited for.
//!
//! A request is booked when its head is there, so a client that promises a body and sends none
//! would hold memory that others could have. Waiting spends a credit, and what arrives earns it
//! back by its bytes, at [`RATE_MIN`], whether the length was announced or not. Only waiting for
//! the client counts, not for whoever reads the body. Invariant: credit <= patience, and a body
//! without credit has ended in [`Late`].

use std::error::Error;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, Sleep, sleep};

/// Bytes a second that a body may come at for ever. A guess: a poor line's pace.
const RATE_MIN: u32 = 16 << 10;

/// The client took too long to send the body.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "the body did not come: expected its next part within the time, and at least {RATE_MIN} B/s"
)]
pub(crate) struct Late;

/// Whether this is, or was caused by, a body that came too late.
pub(crate) fn is_late(error: &(dyn Error + 'static)) -> bool {
    let mut causes = std::iter::successors(Some(error), |error| (*error).source());
    causes.any(|error| error.is::<Late>())
}

/// The answer to a body that came too late.
pub(crate) fn late() -> Response {
    (StatusCode::REQUEST_TIMEOUT, format!("{Late}\n")).into_response()
}

/// A body that is waited for with patience.
#[derive(Debug)]
pub(crate) struct Patient<B> {
    body: B,
    patience: Duration,
    credit: Duration,
    /// While the body is waited for: since when, and what ends it.
    waiting: Option<(Instant, Pin<Box<Sleep>>)>,
}

impl<B> Patient<B> {
    /// Waits for this body, `patience` at first.
    pub(crate) const fn new(body: B, patience: Duration) -> Self {
        Self { body, patience, credit: patience, waiting: None }
    }

    fn arrived(&mut self, bytes: usize) {
        let Some((since, _)) = self.waiting.take() else { return };
        let bytes = u32::try_from(bytes).unwrap_or(u32::MAX);
        let earned = Duration::from_secs(1) * bytes / RATE_MIN;
        self.credit = self.credit.saturating_sub(since.elapsed());
        self.credit = self.credit.saturating_add(earned).min(self.patience);
    }
}

impl<B> HttpBody for Patient<B>
where
    B: HttpBody<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) {
            let bytes = |frame: &Frame<Bytes>| frame.data_ref().map_or(0, Bytes::len);
            let bytes = frame.as_ref().and_then(|frame| frame.as_ref().ok()).map_or(0, bytes);
            self.arrived(bytes);
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let credit = self.credit;
        let waiting = self.waiting.get_or_insert_with(|| (Instant::now(), Box::pin(sleep(credit))));
        ready!(waiting.1.as_mut().poll(cx));
        Poll::Ready(Some(Err(Late.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
