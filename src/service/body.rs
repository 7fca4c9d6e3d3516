//! A response body that holds the request's permit, or one that tells of a rejection.
//!
//! The head of a rejection goes out at once. Its text follows when the rest of the request's body
//! has been read and thrown away, frame by frame: a server that closes a connection on which the
//! client still sends makes the client see a broken connection in place of the answer (RFC 9112,
//! 9.6). What is read that way is bounded by [`DRAIN_MAX`]. A client that asked first whether to
//! send (`Expect`) has been told no and sends nothing: nothing is waited for.
//!
//! Invariant: a rejected request holds at most one frame of its body at a time.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::{Buf, Bytes};
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use crate::bytes::ByteSize;

use super::layer::SharedPermit;

/// What is read of a rejected request's body at most; a longer one breaks the connection. A guess:
/// above what clients send in one piece, below what an attacker would like to have read.
pub const DRAIN_MAX: ByteSize = ByteSize::mib(64);

pin_project! {
    /// The body of a response that went through the layer; `Q` is the request's body.
    #[derive(Debug)]
    pub struct ResponseBody<R, Q> {
        #[pin]
        kind: Kind<R, Q>,
    }
}

pin_project! {
    #[project = KindProject]
    #[derive(Debug)]
    enum Kind<R, Q> {
        Held { #[pin] body: R, permit: SharedPermit },
        Refused { text: Option<Bytes>, #[pin] rest: Q, drained: u64 },
    }
}

impl<R, Q> ResponseBody<R, Q> {
    pub(super) const fn held(body: R, permit: SharedPermit) -> Self {
        Self { kind: Kind::Held { body, permit } }
    }

    /// A refusal; `rest` is what the client still sends, if it does.
    pub(super) fn refused(text: String, rest: Q, sends: bool) -> Self {
        let drained = if sends { 0 } else { DRAIN_MAX.get() };
        Self { kind: Kind::Refused { text: Some(text.into()), rest, drained } }
    }
}

impl<R: Body<Data = Bytes>, Q: Body> Body for ResponseBody<R, Q> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            KindProject::Held { body, .. } => body.poll_frame(cx),
            KindProject::Refused { text, mut rest, drained } => {
                // Bounded: each turn reads a frame, and no more is read than the bound.
                while text.is_some() && *drained < DRAIN_MAX.get() && !rest.is_end_stream() {
                    match rest.as_mut().poll_frame(cx) {
                        Poll::Ready(Some(Ok(frame))) => {
                            let size = frame.data_ref().map_or(0, Buf::remaining);
                            // An empty frame counts too, so that they cannot go on for ever.
                            *drained = drained.saturating_add((size as u64).max(1));
                        }
                        Poll::Ready(_) => break,
                        Poll::Pending => return Poll::Pending,
                    }
                }
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Held { body, .. } => body.is_end_stream(),
            Kind::Refused { text, .. } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Held { body, .. } => body.size_hint(),
            Kind::Refused { text, .. } => {
                SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64)
            }
        }
    }
}
