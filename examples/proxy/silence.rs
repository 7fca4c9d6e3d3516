//! The timeout of a silent upstream.
//!
//! The clock runs while only the upstream can make progress: from the last part of the request that
//! it accepted until the head of its response, and between two parts of its response. It stops
//! while the proxy waits for the client to send or to read; the client's own timeout applies then.
//! So an upload of an hour passes, and an upstream that hangs does not.
//!
//! The body of the request is wrapped as well, so that a client's error is recognized when the
//! client library returns it as an error of the request.

use std::error::Error;
use std::pin::Pin;
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use axum::body::{Bytes, HttpBody};
use axum::http::HeaderMap;
use http_body::{Frame, SizeHint};
use tokio::time::{Instant, sleep, sleep_until};

/// The upstream took too long.
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("the upstream was silent for {0:?}")]
pub(crate) struct Silent(Duration);

/// The client did not send the body that it announced.
#[derive(Debug, thiserror::Error)]
#[error("the request body ended early")]
pub(crate) struct ClientFault(#[source] Box<dyn Error + Send + Sync>);

impl ClientFault {
    /// The client's part in an error of a request.
    pub(crate) fn of<'a>(error: &'a (dyn Error + 'static)) -> Option<&'a Self> {
        let mut causes = std::iter::successors(Some(error), |error| (*error).source());
        causes.find_map(|error| error.downcast_ref())
    }
}

/// The clock of one request; its clones are one.
#[derive(Clone, Debug)]
pub(crate) struct Silence {
    /// `None` for no limit.
    timeout: Option<Duration>,
    /// The start of the wait for the upstream; `None` while waiting for the client.
    since: Arc<Mutex<Option<Instant>>>,
}

impl Silence {
    /// Begins to wait for the upstream.
    pub(crate) fn new(timeout: Option<Duration>) -> Self {
        Self { timeout, since: Arc::new(Mutex::new(Some(Instant::now()))) }
    }

    /// Waits until the upstream has been silent for too long.
    pub(crate) async fn passed(&self) -> Silent {
        let Some(timeout) = self.timeout else { return std::future::pending().await };
        loop {
            let since = *self.since.lock().unwrap_or_else(PoisonError::into_inner);
            match since.map(|since| since + timeout) {
                Some(due) if due <= Instant::now() => return Silent(timeout),
                Some(due) => sleep_until(due).await,
                None => sleep(timeout).await,
            }
        }
    }

    fn wait(&self, is_for_upstream: bool) {
        let since = is_for_upstream.then(Instant::now);
        *self.since.lock().unwrap_or_else(PoisonError::into_inner) = since;
    }
}

/// The body of a request, on its way to the upstream.
#[derive(Debug)]
pub(crate) struct Asked<B> {
    body: B,
    silence: Silence,
}

impl<B> Asked<B> {
    pub(crate) const fn new(body: B, silence: Silence) -> Self {
        Self { body, silence }
    }
}

impl<B> Drop for Asked<B> {
    /// Nothing more is taken of it: from here on only the upstream is waited for.
    fn drop(&mut self) {
        self.silence.wait(true);
    }
}

impl<B> HttpBody for Asked<B>
where
    B: HttpBody<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    type Data = Bytes;
    type Error = ClientFault;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, ClientFault>>> {
        let Poll::Ready(frame) = Pin::new(&mut self.body).poll_frame(cx) else {
            self.silence.wait(false);
            return Poll::Pending;
        };
        self.silence.wait(true);
        Poll::Ready(frame.map(|frame| frame.map_err(|error| ClientFault(error.into()))))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}

/// The body of an answer, on its way to the client.
pub(crate) struct Answered<B> {
    body: B,
    silence: Silence,
    /// The timer, while waiting for the upstream.
    passed: Option<Pin<Box<dyn Future<Output = Silent> + Send>>>,
    /// Changes the trailers.
    clean: fn(&mut HeaderMap),
}

impl<B> Answered<B> {
    /// Wraps the body of a response. Its trailers are changed by `clean`.
    pub(crate) const fn new(body: B, silence: Silence, clean: fn(&mut HeaderMap)) -> Self {
        Self { body, silence, passed: None, clean }
    }
}

impl<B> HttpBody for Answered<B>
where
    B: HttpBody<Data = Bytes, Error: Into<Box<dyn Error + Send + Sync>>> + Unpin,
{
    type Data = Bytes;
    type Error = Box<dyn Error + Send + Sync>;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Self::Error>>> {
        if let Poll::Ready(mut frame) = Pin::new(&mut self.body).poll_frame(cx) {
            self.passed = None;
            if let Some(Ok(frame)) = &mut frame
                && let Some(trailers) = frame.trailers_mut()
            {
                (self.clean)(trailers);
            }
            return Poll::Ready(frame.map(|frame| frame.map_err(Into::into)));
        }
        let Self { silence, passed, .. } = &mut *self;
        let passed = passed.get_or_insert_with(|| {
            // Until now the client was waited for, which read what there was.
            silence.wait(true);
            let silence = silence.clone();
            Box::pin(async move { silence.passed().await })
        });
        let silent = ready!(passed.as_mut().poll(cx));
        tracing::warn!(cause = %silent, "the upstream stalled within a response");
        Poll::Ready(Some(Err(silent.into())))
    }

    fn is_end_stream(&self) -> bool {
        self.body.is_end_stream()
    }

    fn size_hint(&self) -> SizeHint {
        self.body.size_hint()
    }
}
