//! Reads and discards the body of a rejected request on HTTP/1, before the answer is sent.
//!
//! If a server answers and closes while the client still sends, the client sees a broken connection
//! instead of the answer (RFC 9112, 9.6). If it sends the head and continues to read, clients that
//! stop sending at the first byte of an answer, such as curl and nginx, have to wait. Therefore the
//! answer follows the body, or [`DRAIN_MAX`] bytes of it. A slow client occupies its connection as
//! long as an admitted one, and one frame of memory. With a minimum data rate, a slower client is
//! answered before.
//!
//! Nothing is read if the client waits for permission to send (`Expect: 100-continue`, RFC 9110,
//! 10.1.1); nor on HTTP/2 and later, where ending a stream disturbs no other one and a client may
//! keep its side open until it is answered; nor if the declared length exceeds the bound.
//!
//! Invariant: a rejected request holds at most one frame of its body at a time.

use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Buf;
use http::header::EXPECT;
use http::request::Parts;
use http::{Response, Version};
use http_body::Body;
use pin_project_lite::pin_project;

use crate::bytes::ByteSize;

use super::pace::RegisteredPace;

/// The maximum length of a rejected request's body that is read; a longer body breaks the
/// connection. An estimate: above what clients send in one piece, below what an attacker would like
/// the server to read.
pub const DRAIN_MAX: ByteSize = ByteSize::mib(64);

pin_project! {
    /// Reads a body to its end, or up to the bound, and returns the answer.
    #[derive(Debug)]
    pub(super) struct Drain<Q> {
        #[pin]
        body: Q,
        // `None` once it was returned.
        answer: Option<Response<String>>,
        left: u64,
        pace: Option<Arc<RegisteredPace>>,
    }
}

impl<Q: Body> Drain<Q> {
    /// Creates a drain for the body of a request with this head, at the pace that is created if the
    /// client may have to be waited for.
    pub(super) fn new(
        head: &Parts,
        body: Q,
        answer: Response<String>,
        pace: impl FnOnce() -> Option<Arc<RegisteredPace>>,
    ) -> Self {
        let waits = head
            .headers
            .get(EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let ends = body.size_hint().lower() <= DRAIN_MAX.get();
        let reads = head.version <= Version::HTTP_11 && !waits && ends;
        let pace = if reads && !body.is_end_stream() { pace() } else { None };
        let left = if reads { DRAIN_MAX.get() } else { 0 };
        Self { body, answer: Some(answer), left, pace }
    }
}

impl<Q: Body> Future for Drain<Q> {
    type Output = Response<String>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Response<String>> {
        let mut this = self.project();
        // Bounded: each iteration reads a frame, and no more than the bound is read.
        while *this.left > 0 && !this.body.is_end_stream() {
            let Poll::Ready(polled) = this.body.as_mut().poll_frame(cx) else {
                if this.pace.as_ref().is_some_and(|pace| !pace.wait(cx.waker())) {
                    break;
                }
                return Poll::Pending;
            };
            let Some(Ok(frame)) = polled else { break };
            let size = frame.data_ref().map_or(0, Buf::remaining);
            if let Some(pace) = this.pace {
                pace.received(size);
            }
            // Empty frames count too, so that they cannot continue forever.
            *this.left = this.left.saturating_sub((size as u64).max(1));
        }
        match this.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => unreachable!("polled after completion"),
        }
    }
}
