//! The load: an open loop in this process, which is outside the service's cgroup.
//!
//! A request is sent when its time has come, however many are under way, and its latency counts
//! from that time. It judges nothing. It ends early when the service is dead.
//!
//! Invariant: each request of the offer has at most one outcome.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::routing::post;
use bytes::Bytes;
use common::http::{Http, send};
use futures_util::{StreamExt as _, stream};
use http::header::CONTENT_LENGTH;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::Client;
use hyper_util::rt::TokioExecutor;
use lowtide::BoxError;
use tokio::sync::oneshot;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep_until, timeout_at};

use crate::offer::{Arrival, GIANT, HOLD, Offer, Sending};

/// After the longest hold, answers are waited for this long.
const DRAIN: Duration = Duration::from_millis(1500);
/// Requests under way at once at most: sockets are not without end. What comes beyond fails.
const UNDER_WAY_MAX: usize = 4096;
/// Bytes that are sent in one piece at most: views of one copy, so that a request under way
/// weighs next to nothing on this side.
const PIECE: usize = 64 << 10;

/// The outcome of a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Answered 2xx.
    Served,
    /// Answered 503.
    Shed,
    /// Anything else, and nothing.
    Failed,
}

/// One request.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Seen {
    pub(crate) arrival: Arrival,
    pub(crate) fate: Fate,
    /// From the time at which it was to be sent to the end of the answer.
    pub(crate) took: Duration,
}

/// Offers a load, and looks until it is over. A look that returns `false` ends the load. Returns
/// the outcomes of the requests.
pub(crate) fn offer(
    to: SocketAddr,
    offer: Offer,
    mut look: impl FnMut() -> Result<bool, BoxError>,
) -> Result<Vec<Seen>, BoxError> {
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build()?;
    let (stop, stopped) = oneshot::channel::<()>();
    let mut stop = Some(stop);
    let sending = runtime.spawn(async move {
        let mut seen = Vec::new();
        tokio::select! {
            () = send_all(to, offer, &mut seen) => {}
            _ = stopped => {}
        }
        seen
    });
    while !sending.is_finished() {
        if !look()? {
            drop(stop.take());
        }
    }
    Ok(runtime.block_on(sending)?)
}

async fn send_all(to: SocketAddr, offer: Offer, all: &mut Vec<Seen>) {
    let sender = Arc::new(Sender {
        to,
        client: Client::builder(TokioExecutor::new()).build_http(),
        piece: Bytes::from(vec![b'x'; PIECE]),
        sending: offer.sending,
    });
    let (start, mut under_way) = (Instant::now(), JoinSet::new());
    for arrival in offer.arrivals() {
        let time = start + arrival.at;
        sleep_until(time).await;
        while let Some(Ok(seen)) = under_way.try_join_next() {
            all.push(seen);
        }
        if under_way.len() >= UNDER_WAY_MAX {
            all.push(Seen { arrival, fate: Fate::Failed, took: Duration::ZERO });
            continue;
        }
        let sender = Arc::clone(&sender);
        under_way.spawn(async move {
            let fate = sender.send(arrival).await.unwrap_or(Fate::Failed);
            Seen { arrival, fate, took: time.elapsed() }
        });
    }
    let end = start + offer.lasts + offer.sending.body + HOLD[1] + DRAIN;
    while let Ok(Some(Ok(seen))) = timeout_at(end, under_way.join_next()).await {
        all.push(seen);
    }
}

struct Sender {
    to: SocketAddr,
    client: Http,
    piece: Bytes,
    sending: Sending,
}

impl Sender {
    /// Sends one request, and reads its answer to the end.
    async fn send(&self, arrival: Arrival) -> Result<Fate, BoxError> {
        let length = arrival.size.as_usize().unwrap_or(0);
        let (piece, count) = (self.piece.clone(), length.div_ceil(PIECE));
        let gap = self.sending.body / u32::try_from(count).unwrap_or(u32::MAX).max(1);
        let paced = stream::iter(0..count).then(move |at| {
            let piece = piece.slice(..PIECE.min(length - at * PIECE));
            async move {
                if !gap.is_zero() {
                    tokio::time::sleep(gap).await;
                }
                Ok::<_, Infallible>(piece)
            }
        });
        let mut request = Request::post(format!("http://{}/hold", self.to))
            .header(HOLD_HEADER, arrival.hold.as_millis().to_string());
        if !self.sending.is_chunked {
            request = request.header(CONTENT_LENGTH, length);
        }
        let copies = if arrival.is_giant { GIANT } else { self.sending.copies };
        let request = request.header(COPIES_HEADER, copies);
        let (status, _) = send(&self.client, request, Body::from_stream(paced)).await?;
        Ok(match status {
            status if status.is_success() => Fate::Served,
            StatusCode::SERVICE_UNAVAILABLE => Fate::Shed,
            _ => Fate::Failed,
        })
    }
}

// `POST /hold`: collects the body whole, keeps a second copy as large as it, and holds both for as
// long as the request asks. It is what makes memory, and not the processor, the shortage. It admits
// nothing: that is for the layer in front of it. Invariant: the memory of a request is freed before it
// is answered.

/// The header that says for how many milliseconds.
pub(crate) const HOLD_HEADER: &str = "x-hold-millis";
/// The header that says how many further copies of the body it holds.
const COPIES_HEADER: &str = "x-copies";

/// The route.
pub(crate) fn routes() -> Router {
    Router::new().route("/hold", post(hold))
}

async fn hold(request: Request<Body>) -> (StatusCode, &'static str) {
    let asked = Duration::from_millis(header(&request, HOLD_HEADER).unwrap_or(0));
    let length = header(&request, "content-length").and_then(|length| usize::try_from(length).ok());
    let copies = header(&request, COPIES_HEADER).unwrap_or(0);
    let Some(text) = collected(request.into_body(), length).await else {
        return (StatusCode::BAD_REQUEST, "the body ended early\n");
    };
    let mut more = Vec::new();
    for _ in 0..copies {
        more.push(text.clone());
        // As a parser that grows its result over many polls.
        tokio::task::yield_now().await;
    }
    let copy = text.clone();
    tokio::time::sleep(asked).await;
    // Read after the wait, so that both are held until here.
    let whole = copy == text;
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

fn header(request: &Request<Body>, name: &str) -> Option<u64> {
    request.headers().get(name)?.to_str().ok()?.parse().ok()
}
