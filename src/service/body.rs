//! A response body that holds the request's permit, or the text of a rejection.

use std::pin::Pin;
use std::task::{Context, Poll};

use bytes::Bytes;
use http_body::{Body, Frame, SizeHint};
use pin_project_lite::pin_project;

use super::layer::SharedPermit;

pin_project! {
    /// The body of a response that went through the layer.
    #[derive(Debug)]
    pub struct ResponseBody<B> {
        #[pin]
        kind: Kind<B>,
    }
}

pin_project! {
    #[project = KindProject]
    #[derive(Debug)]
    enum Kind<B> {
        Held { #[pin] body: B, permit: SharedPermit },
        Text { text: Option<Bytes> },
    }
}

impl<B> ResponseBody<B> {
    pub(super) const fn held(body: B, permit: SharedPermit) -> Self {
        Self { kind: Kind::Held { body, permit } }
    }

    pub(super) fn text(text: String) -> Self {
        Self { kind: Kind::Text { text: Some(text.into()) } }
    }
}

impl<B: Body<Data = Bytes>> Body for ResponseBody<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        match self.project().kind.project() {
            KindProject::Held { body, .. } => body.poll_frame(cx),
            KindProject::Text { text } => {
                Poll::Ready(text.take().map(|text| Ok(Frame::data(text))))
            }
        }
    }

    fn is_end_stream(&self) -> bool {
        match &self.kind {
            Kind::Held { body, .. } => body.is_end_stream(),
            Kind::Text { text } => text.is_none(),
        }
    }

    fn size_hint(&self) -> SizeHint {
        match &self.kind {
            Kind::Held { body, .. } => body.size_hint(),
            Kind::Text { text } => SizeHint::with_exact(text.as_ref().map_or(0, Bytes::len) as u64),
        }
    }
}
