//! The timeout of a request's body.
//!
//! A request holds a reservation from its head on, so a client that announces a body and never
//! sends it would hold memory that others need. Waiting spends a credit, and arriving bytes earn it
//! back at [`RATE_MIN`], with or without an announced length. Only time spent waiting for the
//! client counts, not for the reader of the body. Invariant: credit <= patience, and a body without
//! credit has ended in [`Late`].

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
#[error("request body timeout: expected its next part in time, and at least {RATE_MIN} B/s")]
pub(crate) struct Late;

/// Returns `true` if this error is, or was caused by, a late body.
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
    /// While waiting for the body: the start of the wait, and its timer.
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
