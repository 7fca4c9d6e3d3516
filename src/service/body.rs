//! The response body, which holds the request's permit, or the text of a rejection.
//!
//! Invariant: the permit lives as long as the body.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::permit::SharedPermit;

pin_project! {
    /// The body of a response that passed the layer.
    #[derive(Debug)]
    pub struct ResponseBody<R> {
        #[pin]
        kind: Kind<R>,
    }
}

pin_project! {
    #[project = KindProject]
    #[derive(Debug)]
    enum Kind<R> {
        Held { #[pin] body: R, permit: SharedPermit },
        Refused { text: Option<Bytes> },
    }
}

impl<R> ResponseBody<R> {
    pub(super) const fn held(body: R, permit: SharedPermit) -> Self {
        Self { kind: Kind::Held { body, permit } }
    }

    /// An empty text ends the body immediately, so that HTTP/2 sends only the head.
    pub(super) fn refused(text: String) -> Self {
        let text = Some(text.into()).filter(|text: &Bytes| !text.is_empty());
        Self { kind: Kind::Refused { text } }
    }
}

impl<R: Body<Data = Bytes>> Body for ResponseBody<R> {
    type Data = Bytes;
    type Error = R::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, R::Error>>> {
        match self.project().kind.project() {
            KindProject::Held { body, permit } => permit.measure_until_handed(
                || body.poll_frame(cx),
                |polled| match polled {
                    Poll::Ready(Some(Ok(frame))) => frame.data_ref().map_or(0, Bytes::len),
                    _ => 0,
                },
            ),
            KindProject::Refused { text } => {
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Held { body, .. } => body.is_end_stream(),
            Kind::Refused { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Held { body, .. } => body.size_hint(),
            Kind::Refused { text } => {
                SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64)
            }
        }
    }
}
