//! What becomes of the body of a rejected request: on HTTP/1 it is read and thrown away before the
//! answer goes out.
//!
//! A server that answers and closes while the client still sends makes the client see a broken
//! connection in place of the answer (RFC 9112, 9.6). One that sends the head and then reads on
//! keeps clients waiting that stop sending at the first sign of an answer, as curl and nginx do.
//! So the answer comes after the body, or after [`DRAIN_MAX`] of it; a client that sends slowly
//! is kept as long as one that is admitted, and holds one frame.
//!
//! Nothing is read where the client waits for leave to send (`Expect: 100-continue`, RFC 9110,
//! 10.1.1), nor on HTTP/2 and later, where ending a stream disturbs no other and a client may keep
//! its side open until it is answered; nor of a body that announces more than would be read.
//!
//! Invariant: a rejected request holds at most one frame of its body at a time.

use std::future::Future;
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Buf;
use http::Version;
use http::header::EXPECT;
use http::request::Parts;
use http_body::Body;
use pin_project_lite::pin_project;

use crate::bytes::ByteSize;

/// What is read of a rejected request's body at most; a longer one breaks the connection. A guess:
/// above what clients send in one piece, below what an attacker would like to have read.
pub const DRAIN_MAX: ByteSize = ByteSize::mib(64);

pin_project! {
    /// Reads a body to its end, or to the bound.
    #[derive(Debug)]
    pub(super) struct Drain<Q> {
        #[pin]
        body: Q,
        left: u64,
    }
}

impl<Q: Body> Drain<Q> {
    /// For the body of a request with this head.
    pub(super) fn new(head: &Parts, body: Q) -> Self {
        let waits = head
            .headers
            .get(EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let ends = body.size_hint().lower() <= DRAIN_MAX.get();
        let reads = head.version <= Version::HTTP_11 && !waits && ends;
        Self { body, left: if reads { DRAIN_MAX.get() } else { 0 } }
    }
}

impl<Q: Body> Future for Drain<Q> {
    type Output = ();

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<()> {
        let mut this = self.project();
        // Bounded: each turn reads a frame, and no more is read than the bound.
        while *this.left > 0 && !this.body.is_end_stream() {
            let Some(Ok(frame)) = ready!(this.body.as_mut().poll_frame(cx)) else { break };
            let size = frame.data_ref().map_or(0, Buf::remaining);
            // An empty frame counts too, so that they cannot go on for ever.
            *this.left = this.left.saturating_sub((size as u64).max(1));
        }
        Poll::Ready(())
    }
}
