//! Load: real HTTP requests with real text, from a fixed number of concurrent connections.
//!
//! Closed loop: each connection sends its next request after it has read the last response. Texts
//! are cut from this project's own at seeded places and shared, not copied, so the client itself
//! uses almost no memory. Every response is read to its end and counted by its status.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::{Duration, Instant};

use bytes::Bytes;
use futures_util::stream;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt as _, Full, StreamBody};
use hyper::body::Frame;
use hyper::header::{CONTENT_LENGTH, CONTENT_TYPE, RETRY_AFTER};
use hyper::{Method, Request, StatusCode};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lowtide::BoxError;

use crate::chance::Chance;

/// The wait of a client after a rejection or a failure.
const RETRY: Duration = Duration::from_millis(100);
/// An answer that takes longer counts as failed.
const PATIENCE: Duration = Duration::from_secs(60);

pub(crate) type Body = BoxBody<Bytes, Infallible>;

/// Text to send: this project's own.
const TEXT: &str = concat!(
    include_str!("../../README.md"),
    include_str!("../../docs/GETTING_STARTED.md"),
    include_str!("../../docs/OPERATING.md"),
    include_str!("../../docs/TUNING.md"),
    include_str!("../../src/lib.rs"),
);

/// About `size` bytes of text from random places, as shared pieces; each begins and ends at a
/// space, so that it is whole words and whole letters.
fn cut(size: usize, chance: &mut Chance) -> Vec<Bytes> {
    let mut pieces = Vec::new();
    let mut left = size;
    while left > 0 {
        let span = left.min(PIECE);
        let last = (TEXT.len() - PIECE) as u64;
        let from = space_from(usize::try_from(chance.bits() % last).unwrap_or(0));
        let to = space_from(from + span);
        pieces.push(Bytes::from_static(&TEXT.as_bytes()[from..to]));
        left -= span;
    }
    pieces
}

/// The first space at or after this place, or the end.
fn space_from(at: usize) -> usize {
    let rest = TEXT.bytes().skip(at).position(|byte| byte.is_ascii_whitespace());
    rest.map_or(TEXT.len(), |more| at + more)
}

/// The longest piece of text.
const PIECE: usize = 16 << 10;
const _: () = assert!(TEXT.len() > 2 * PIECE, "too little text");

/// The responses.
#[derive(Clone, Debug, Default)]
pub(crate) struct Tally {
    /// Answers with a 2xx status.
    pub(crate) ok: u64,
    /// Answers 503 with a Retry-After.
    pub(crate) shed: u64,
    /// All other results, by kind.
    pub(crate) other: BTreeMap<String, u64>,
    /// The time to read each response to its end, in milliseconds; sorted.
    pub(crate) millis: Vec<f64>,
}

impl Tally {
    /// The latency below which this part of the answers lies, in milliseconds; 0 without any.
    pub(crate) fn quantile(&self, part: f64) -> f64 {
        let last = self.millis.len().saturating_sub(1);
        #[expect(
            clippy::cast_possible_truncation,
            clippy::cast_precision_loss,
            clippy::cast_sign_loss,
            reason = "an index below the length"
        )]
        let at = (last as f64 * part.clamp(0.0, 1.0)) as usize;
        self.millis.get(at).copied().unwrap_or(0.0)
    }

    fn add(&mut self, other: Self) {
        self.ok += other.ok;
        self.shed += other.shed;
        for (what, count) in other.other {
            *self.other.entry(what).or_default() += count;
        }
        self.millis.extend(other.millis);
        self.millis.sort_unstable_by(f64::total_cmp);
    }
}

/// Prints the bounds: whether each holds, and its text with the measured value. Fails if one does
/// not.
pub(crate) fn must_hold(bounds: &[(bool, String)]) -> Result<(), BoxError> {
    println!("\nmust hold");
    for (holds, text) in bounds {
        println!("  {}  {text}", if *holds { "ok    " } else { "FAILED" });
    }
    let all = bounds.iter().all(|(holds, _)| *holds);
    if all { Ok(()) } else { Err("a bound does not hold".into()) }
}

/// Sends requests from so many connections while it goes on; `request` makes one for a turn.
pub(crate) async fn send(
    connections: usize,
    seed: u64,
    goes_on: impl Fn() -> bool + Clone + Send + 'static,
    request: impl Fn(usize, &mut Chance) -> Request<Body> + Clone + Send + 'static,
) -> Tally {
    let client: Client<HttpConnector, Body> = Client::builder(TokioExecutor::new()).build_http();
    let connections: Vec<_> = (0..connections)
        .map(|number| {
            let (client, goes_on, request) = (client.clone(), goes_on.clone(), request.clone());
            tokio::spawn(async move {
                let mut tally = Tally::default();
                let mut chance = Chance(seed ^ ((number as u64) << 32));
                let mut turns = number..;
                while let (true, Some(turn)) = (goes_on(), turns.next()) {
                    one(&client, request(turn, &mut chance), &mut tally).await;
                }
                tally
            })
        })
        .collect();
    let mut all = Tally::default();
    for connection in connections {
        match connection.await {
            Ok(tally) => all.add(tally),
            Err(error) => *all.other.entry(format!("client: {error}")).or_default() += 1,
        }
    }
    all
}

async fn one(client: &Client<HttpConnector, Body>, request: Request<Body>, tally: &mut Tally) {
    let start = Instant::now();
    let answer = async {
        let answer = client.request(request).await?;
        let (status, retry_after) = (answer.status(), answer.headers().contains_key(RETRY_AFTER));
        let mut body = answer.into_body();
        while let Some(frame) = body.frame().await {
            frame?;
        }
        Ok::<_, BoxError>((status, retry_after))
    };
    let what = match tokio::time::timeout(PATIENCE, answer).await {
        Ok(Ok((status, _))) if status.is_success() => {
            tally.ok += 1;
            tally.millis.push(start.elapsed().as_secs_f64() * 1e3);
            return;
        }
        Ok(Ok((StatusCode::SERVICE_UNAVAILABLE, true))) => None,
        Ok(Ok((status, _))) => Some(status.to_string()),
        Ok(Err(error)) => Some(error.to_string()),
        Err(_) => Some(format!("no answer within {PATIENCE:?}")),
    };
    match what {
        Some(what) => *tally.other.entry(what).or_default() += 1,
        None => tally.shed += 1,
    }
    // As a polite client would, though sooner than asked to.
    tokio::time::sleep(RETRY).await;
}

pub(crate) fn words_request(to: SocketAddr, size: usize, chance: &mut Chance) -> Request<Body> {
    let pieces = cut(size, chance);
    let length: usize = pieces.iter().map(Bytes::len).sum();
    let frames = pieces.into_iter().map(|piece| Ok::<_, Infallible>(Frame::data(piece)));
    request(to, "/words", "text/plain", length, StreamBody::new(stream::iter(frames)).boxed())
}

pub(crate) fn embed_request(to: SocketAddr, chance: &mut Chance) -> Request<Body> {
    let texts: [String; 4] =
        std::array::from_fn(|_| String::from_utf8_lossy(&cut(2048, chance).concat()).into_owned());
    let body = serde_json::json!({ "texts": texts }).to_string();
    let length = body.len();
    request(to, "/embed", "application/json", length, Full::from(body).boxed())
}

pub(crate) fn request(
    to: SocketAddr,
    path: &str,
    kind: &'static str,
    length: usize,
    body: Body,
) -> Request<Body> {
    Request::builder()
        .method(Method::POST)
        .uri(format!("http://{to}{path}"))
        .header(CONTENT_TYPE, kind)
        .header(CONTENT_LENGTH, length)
        .body(body)
        .unwrap_or_else(|error| unreachable!("a request of fixed parts: {error}"))
}
