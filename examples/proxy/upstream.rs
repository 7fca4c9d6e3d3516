//! The small upstream that the proxy starts when none is named: a text service.
//!
//! `POST /words` takes a text apart into a concordance (each word with every place it stands at)
//! and answers the most frequent words, a line each; it is what makes the heap rise. `POST /echo`
//! streams the body back, `GET /bytes/N` streams N bytes. It keeps nothing between requests.

use std::collections::BTreeMap;
use std::convert::Infallible;
use std::fmt::Write as _;
use std::time::Duration;

use axum::Router;
use axum::body::{Body, Bytes};
use axum::extract::{Path, Request};
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};
use futures_util::stream;
use http_body_util::BodyExt as _;
use lowtide::ByteSize;
use lowtide::service::{DRAIN_MAX, SharedPermit};

/// Words in an answer of `/words`.
const TOP: usize = 100;
/// Bytes of text that are worked on before other requests get their turn.
const STRIDE: usize = 64 << 10;
/// Bytes in one piece of `/bytes`.
const PIECE: usize = 16 << 10;

/// The routes of the text service.
pub(crate) fn routes() -> Router {
    Router::new()
        .route("/", get(async || "a small text service: POST /words, POST /echo, GET /bytes/N\n"))
        .route("/words", post(words))
        .route("/echo", post(async |request: Request| Body::new(request.into_body())))
        .route("/bytes/{count}", get(bytes))
}

/// What `/words` needs for a body of this length: the text, and a string and a place for each word.
pub(crate) fn words_cost(body_bytes: u64) -> u64 {
    body_bytes.saturating_mul(WORDS_FACTOR).saturating_add(128 << 10)
}

/// Bytes of text and concordance for each byte of text, measured on this project's documents.
const WORDS_FACTOR: u64 = 10;

async fn words(request: Request) -> Response {
    let permit = request.extensions().get::<SharedPermit>().cloned();
    let announced = content_length(&request);
    let mut body = request.into_body();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return (StatusCode::BAD_REQUEST, "the body ended early\n").into_response();
        };
        let Ok(data) = frame.into_data() else { continue };
        text.extend_from_slice(&data);
        // A body of unknown length is booked as it arrives.
        let unknown = announced.is_none().then(|| ByteSize::new(words_cost(data.len() as u64)));
        if let (Some(permit), Some(more)) = (&permit, unknown)
            && let Err(rejected) = permit.grow(more)
        {
            drop(text);
            read_away(&mut body).await;
            return lowtide::service::rejection(&rejected).map(Body::from);
        }
    }
    let Ok(text) = String::from_utf8(text) else {
        return (StatusCode::UNPROCESSABLE_ENTITY, "the body is not text in UTF-8\n")
            .into_response();
    };
    let found = concordance(&text).await;
    let answer = top_words(&found);
    // The concordance is there for as long as the answer is read, as a cursor's result would be.
    let rest = stream::once(async move {
        tokio::time::sleep(READING).await;
        drop((found, text));
        Ok::<_, Infallible>(Bytes::from(answer))
    });
    Body::from_stream(rest).into_response()
}

/// Reads the rest of a body that is not wanted, and keeps none of it: the answer to a client that
/// still sends would not reach it (RFC 9112, 9.6). Bounded, as a longer one is to break off.
pub(crate) async fn read_away(body: &mut Body) {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        // An empty frame counts too, so that they cannot go on for ever.
        read += frame.data_ref().map_or(0, Bytes::len).max(1) as u64;
        if read > DRAIN_MAX.get() {
            return;
        }
    }
}

/// How long a concordance is held for its reader.
const READING: Duration = Duration::from_millis(150);

/// A text taken apart: its words in order, and for each the places at which it stands.
#[derive(Debug, Default)]
struct Concordance {
    words: Vec<String>,
    places: BTreeMap<String, Vec<u32>>,
}

async fn concordance(text: &str) -> Concordance {
    let mut found = Concordance::default();
    let mut since_turn = 0;
    for (at, word) in text.split_whitespace().enumerate() {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric()).to_lowercase();
        since_turn += word.len() + 1;
        let at = u32::try_from(at).unwrap_or(u32::MAX);
        match found.places.get_mut(&word) {
            Some(places) => places.push(at),
            None => drop(found.places.insert(word.clone(), vec![at])),
        }
        found.words.push(word);
        if since_turn >= STRIDE {
            since_turn = 0;
            tokio::task::yield_now().await;
        }
    }
    found
}

fn top_words(found: &Concordance) -> String {
    let mut counts: Vec<(usize, &str)> =
        found.places.iter().map(|(word, places)| (places.len(), word.as_str())).collect();
    counts.sort_unstable_by(|one, other| other.cmp(one));
    let mut text = format!("{} words\n", found.words.len());
    for (count, word) in counts.iter().take(TOP) {
        let _ = writeln!(text, "{count} {word}");
    }
    text
}

async fn bytes(Path(count): Path<u64>) -> Body {
    let pieces = stream::unfold(count, |left| async move {
        let size = usize::try_from(left).unwrap_or(PIECE).min(PIECE);
        let piece = Bytes::from(vec![b'.'; size]);
        (left > 0).then(|| (Ok::<_, Infallible>(piece), left - size as u64))
    });
    Body::from_stream(pieces)
}

fn content_length(request: &Request) -> Option<u64> {
    request.headers().get("content-length")?.to_str().ok()?.parse().ok()
}
