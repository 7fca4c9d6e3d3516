//! `POST /hold`: collects the body whole, keeps a second copy as large as it, and holds both for as
//! long as the request asks. It is what makes memory, and not the processor, the shortage.
//!
//! With `--one-copy` there is no second copy. It admits nothing: that is for the layer in front of
//! it. Invariant: the memory of a request is freed before it is answered.

use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::routing::post;
use http_body_util::BodyExt as _;

/// The header that says for how many milliseconds.
pub(crate) const HOLD_HEADER: &str = "x-hold-millis";
/// The header that says how many further copies of the body it holds.
pub(crate) const COPIES_HEADER: &str = "x-copies";

/// The route.
pub(crate) fn routes(is_copied: bool) -> Router {
    Router::new().route("/hold", post(move |request: Request| hold(request, is_copied)))
}

async fn hold(request: Request, is_copied: bool) -> (StatusCode, &'static str) {
    let asked = header(&request, HOLD_HEADER).map(Duration::from_millis);
    let length = header(&request, "content-length").and_then(|length| usize::try_from(length).ok());
    let copies = header(&request, COPIES_HEADER).unwrap_or(0);
    let Some(asked) = asked else {
        return (StatusCode::BAD_REQUEST, "a hold is needed\n");
    };
    let Some(text) = collected(request.into_body(), length).await else {
        return (StatusCode::BAD_REQUEST, "the body ended early\n");
    };
    let mut more = Vec::new();
    for _ in 0..copies {
        more.push(text.clone());
        // As a parser that grows its result over many polls.
        tokio::task::yield_now().await;
    }
    let copy = if is_copied { text.clone() } else { Vec::new() };
    tokio::time::sleep(asked).await;
    // Read after the wait, so that both are held until here.
    let whole = !is_copied || copy == text;
    drop((text, copy, more));
    if whole { (StatusCode::OK, "held\n") } else { (StatusCode::BAD_REQUEST, "not the same\n") }
}

async fn collected(mut body: Body, length: Option<usize>) -> Option<Vec<u8>> {
    let mut text = Vec::with_capacity(length.unwrap_or(0));
    while let Some(frame) = body.frame().await {
        if let Ok(data) = frame.ok()?.into_data() {
            text.extend_from_slice(&data);
        }
    }
    length.is_none_or(|length| text.len() == length).then_some(text)
}

fn header(request: &Request, name: &str) -> Option<u64> {
    request.headers().get(name)?.to_str().ok()?.parse().ok()
}
