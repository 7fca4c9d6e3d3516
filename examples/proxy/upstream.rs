//! The small upstream that the proxy starts by default: a text service.
//!
//! `POST /words` builds a concordance of a text (every place of each word, with ASCII letters in
//! lower case) and returns the most frequent words, one per line; this is the load that makes the
//! heap grow. A text of more words than were reserved for is refused. `POST /echo` streams the body
//! back, `GET /bytes/N` streams N bytes. It keeps nothing between requests.

use std::collections::{BTreeMap, BTreeSet};
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
use lowtide::service::{DRAIN_MAX, RequestPermit};

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

/// Returns the memory that `/words` needs for a body of this length: the text and its concordance.
pub(crate) fn words_cost(body_bytes: u64) -> u64 {
    body_bytes.saturating_mul(WORDS_FACTOR).saturating_add(256 << 10)
}

/// Bytes of text and concordance for each byte of text: the text itself, 24 / 4 for the words, at
/// worst 64 / 24 for the different ones (a map fills at least half of each node), and some room.
const WORDS_FACTOR: u64 = 10;

/// Returns the limits of `/words` for a text: the number of words and of different words, since its
/// memory is reserved by length. Prose has a word per 6 bytes, and a new one per 50.
const fn words_max(text_bytes: usize) -> (usize, usize) {
    (1024 + text_bytes / 4, 1024 + text_bytes / 24)
}

async fn words(request: Request) -> Response {
    let permit = request.extensions().get::<RequestPermit>().cloned();
    let announced = content_length(&request);
    let mut body = request.into_body();
    let mut text = Vec::new();
    while let Some(frame) = body.frame().await {
        let Ok(frame) = frame else {
            return (StatusCode::BAD_REQUEST, "the body ended early\n").into_response();
        };
        let Ok(data) = frame.into_data() else { continue };
        // Memory for a body of unknown length is reserved as it arrives.
        let cost = || ByteSize::new(words_cost((text.len() + data.len()) as u64));
        if let (Some(permit), None) = (&permit, announced)
            && let Err(rejected) = permit.hold(cost())
        {
            drop(text);
            read_away(&mut body).await;
            return lowtide::service::rejection(&rejected).map(Body::from);
        }
        text.extend_from_slice(&data);
    }
    let unfit = |reason| (StatusCode::UNPROCESSABLE_ENTITY, reason).into_response();
    let Ok(mut text) = String::from_utf8(text) else {
        return unfit("the body is not text in UTF-8\n".to_owned());
    };
    text.shrink_to_fit();
    text.make_ascii_lowercase();
    let (words, answer) = match concordance(&text).await {
        Ok(found) => found,
        Err(reason) => return unfit(reason),
    };
    // The concordance is there for as long as the answer is read, as a cursor's result would be.
    let rest = stream::once(async move {
        tokio::time::sleep(READING).await;
        drop((words, text));
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

/// The time that a concordance is held for its reader.
const READING: Duration = Duration::from_millis(150);

/// A place at which a word stands.
#[derive(Clone, Copy, Debug)]
#[allow(dead_code, reason = "a concordance is made of these, whether they are asked for or not")]
struct Place {
    start: usize,
    length: u32,
    /// The occurrences of the word so far.
    count: u32,
    /// The index of its previous place; its own index for the first.
    before: u32,
}

/// Builds the concordance of a text: every place of every word, and a response with the most
/// frequent ones; an error if it has more words than were reserved for. All memory is allocated at
/// once, because a growing list holds its contents twice.
async fn concordance(text: &str) -> Result<(Vec<Place>, String), String> {
    let (places_max, different_max) = words_max(text.len());
    let mut places: Vec<Place> = Vec::with_capacity(places_max);
    // Of each word the number of its last place.
    let mut last_places = BTreeMap::new();
    let mut since_turn = 0;
    for word in text.split_whitespace() {
        let word = word.trim_matches(|c: char| !c.is_alphanumeric());
        let own = small(places.len());
        let last = last_places.insert(word, own);
        if places.len() == places_max || last_places.len() > different_max {
            let bounds = format!("{places_max} words, {different_max} of them different");
            return Err(format!("too many words for the text's length: expected {bounds}\n"));
        }
        let count = last.map_or(1, |last| places[last as usize].count + 1);
        let start = word.as_ptr().addr() - text.as_ptr().addr();
        let before = last.unwrap_or(own);
        places.push(Place { start, length: small(word.len()), count, before });
        since_turn += word.len() + 1;
        if since_turn >= STRIDE {
            since_turn = 0;
            tokio::task::yield_now().await;
        }
    }
    let answer = top_words(&places, &last_places);
    Ok((places, answer))
}

/// As a number of four bytes: texts of more than 4 GiB are none that this service is for.
fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

fn top_words(places: &[Place], last_places: &BTreeMap<&str, u32>) -> String {
    let mut top = BTreeSet::new();
    for (word, last) in last_places {
        top.insert((places[*last as usize].count, *word));
        if top.len() > TOP {
            top.pop_first();
        }
    }
    let mut text = format!(
        "{} words
",
        places.len()
    );
    for (count, word) in top.iter().rev() {
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
