//! `POST /embed`: texts in, embeddings out, from a model that is loaded on first use.
//!
//! The model is a managed resource: it is loaded once for all waiting requests, and unloaded when
//! idle. Bad input is answered with 4xx and the reason; a lack of memory with 503 and Retry-After.

use std::sync::Arc;

use axum::Json;
use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::Request;
use axum::http::header::{CONTENT_LENGTH, CONTENT_TYPE, EXPECT, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, StatusCode};
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt as _;
use lowtide::ByteSize;
use lowtide::admission::ResourceError;
use lowtide::service::{DRAIN_MAX, RequestPermit, scope_blocking};
use serde::{Deserialize, Serialize};
use serde_json::error::Category;
use tokio::sync::Semaphore;

use crate::model::{self, ManagedModel, ModelError};

/// Texts in one request.
pub(crate) const TEXTS_MAX: usize = 64;
/// Bytes of one text as it stands in the body, quotes aside.
pub(crate) const TEXT_MAX: ByteSize = ByteSize::kib(64);
/// Bytes of a request body: as many of the longest texts, with their commas and quotes.
pub(crate) const BODY_MAX: ByteSize = ByteSize::new(TEXTS_MAX as u64 * TEXT_MAX.get() + (1 << 10));
/// Host bytes for each byte of body: the body in a buffer that grows, or with its texts parsed.
const BODY_FACTOR: u64 = 3;
/// Letters of the reason of a refusal.
const REASON_MAX: usize = 400;
/// Host bytes of any request: one text's n-grams, all embeddings, and these as JSON.
const REST: u64 = 1 << 20;

/// Host bytes that a request with a body of this length needs.
pub(crate) fn host_cost(body_bytes: u64) -> ByteSize {
    let body_bytes = body_bytes.min(BODY_MAX.get());
    let service = ByteSize::new(body_bytes * BODY_FACTOR + REST);
    service.saturating_add(model::host_activations(body_bytes))
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct Asked {
    texts: Vec<String>,
}

#[derive(Debug, Serialize)]
struct Answer {
    width: usize,
    embeddings: Vec<Vec<f32>>,
}

/// The embedding service.
#[derive(Clone, Debug)]
pub(crate) struct Embedder {
    model: ManagedModel,
    /// Limits concurrent computations to the number of cores.
    turns: Arc<Semaphore>,
}

impl Embedder {
    /// A service over this model.
    pub(crate) fn new(model: ManagedModel) -> Self {
        let cores = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        Self { model, turns: Arc::new(Semaphore::new(cores)) }
    }

    /// Answers one request.
    pub(crate) async fn answer(&self, request: Request) -> Response {
        match self.embed(request).await {
            Ok(answer) => Json(answer).into_response(),
            Err(refusal) => *refusal,
        }
    }

    /// Answers a request of any method but POST.
    pub(crate) async fn wrong_method() -> Response {
        let reason = "expected POST with a JSON body".to_owned();
        *refusal(StatusCode::METHOD_NOT_ALLOWED, reason)
    }

    async fn embed(&self, request: Request) -> Result<Answer, Box<Response>> {
        check_kind(request.headers())?;
        // The arena may be in host memory, so what the device needs counts as well.
        let cost = |bytes| host_cost(bytes).saturating_add(model::DEVICE_COST);
        let texts = texts(&read(request, BODY_MAX, cost).await?)?;
        let model = self.model.acquire().await.map_err(|error| Box::new(unavailable(&error)))?;
        let turn = self.turns.clone().acquire_owned().await;
        // Keeps the reservation to the end of the work, also if the client leaves.
        let work = scope_blocking(move || {
            let _turn = turn;
            let mut embeddings = model.embed(&texts)?;
            embeddings.iter_mut().for_each(|embedding| normalise(embedding));
            Ok::<_, ModelError>(embeddings)
        });
        let computed = tokio::task::spawn_blocking(work);
        let failed = |error: String| {
            tracing::error!(error, "embedding failed");
            refusal(StatusCode::INTERNAL_SERVER_ERROR, error)
        };
        match computed.await {
            Ok(Ok(embeddings)) => {
                let width = embeddings.first().map_or(0, Vec::len);
                Ok(Answer { width, embeddings })
            }
            Ok(Err(error)) if error.is_out_of_memory() => Err(Box::new(later(error.to_string()))),
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(error) => Err(failed(error.to_string())),
        }
    }
}

/// Reads a whole body of `most` bytes or less. The memory for one of unknown length, which `cost`
/// returns, is reserved as it arrives.
pub(crate) async fn read(
    request: Request,
    most: ByteSize,
    cost: impl Fn(u64) -> ByteSize,
) -> Result<Vec<u8>, Box<Response>> {
    let permit = request.extensions().get::<RequestPermit>().cloned();
    let known = request.headers().contains_key(CONTENT_LENGTH);
    let asks_first = request.headers().contains_key(EXPECT);
    let too_long = || {
        let text = format!("the body is longer than {most}");
        Err(refusal(StatusCode::PAYLOAD_TOO_LARGE, text))
    };
    let announced = request.body().size_hint().lower();
    let mut body = request.into_body();
    if announced > most.get() && asks_first {
        return too_long();
    }
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let early = |error| format!("the body ended early: {error}");
        let frame = frame.map_err(|error| refusal(StatusCode::BAD_REQUEST, early(error)))?;
        let Ok(data) = frame.into_data() else { continue };
        let length = (whole.len() + data.len()) as u64;
        if announced.max(length) > most.get() {
            drop(whole);
            read_away(&mut body).await;
            return too_long();
        }
        if let (Some(permit), false) = (&permit, known)
            && let Err(rejected) = permit.hold(cost(length))
        {
            drop(whole);
            read_away(&mut body).await;
            return Err(Box::new(lowtide::service::rejection(&rejected).map(Body::from)));
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole)
}

/// Reads the rest of a body that is not wanted, and keeps none of it: the answer to a client that
/// still sends would not reach it (RFC 9112, 9.6). Bounded, as a longer one is to break off.
async fn read_away(body: &mut Body) {
    let mut read = 0;
    while let Some(Ok(frame)) = body.frame().await {
        // An empty frame counts too, so that they cannot go on for ever.
        read += frame.data_ref().map_or(0, Bytes::len).max(1) as u64;
        if read > DRAIN_MAX.get() {
            return;
        }
    }
}

/// Refuses what says that it is something other than JSON.
fn check_kind(headers: &HeaderMap) -> Result<(), Box<Response>> {
    let Some(kind) = headers.get(CONTENT_TYPE) else { return Ok(()) };
    let kind = kind.to_str().unwrap_or_default();
    let essence = kind.split(';').next().unwrap_or_default().trim();
    if essence.eq_ignore_ascii_case("application/json") {
        return Ok(());
    }
    let text = format!("content-type {kind:?}: expected application/json");
    Err(refusal(StatusCode::UNSUPPORTED_MEDIA_TYPE, text))
}

/// Counts the strings of a JSON document and their bytes, before anything is made of them: a parser
/// would hold 24 bytes for each 3 of `"",`, and name a long one in its error, letter by letter.
fn strings_fit(body: &[u8]) -> Result<(), String> {
    let (mut strings, mut start, mut is_escaped) = (0, None, false);
    for (at, byte) in body.iter().enumerate() {
        match (start, byte) {
            (Some(_), _) if is_escaped => is_escaped = false,
            (Some(_), b'\\') => is_escaped = true,
            (Some(_), b'"') => start = None,
            (None, b'"') => {
                start = Some(at + 1);
                strings += 1;
                // One is the name of the field.
                if strings > TEXTS_MAX + 1 {
                    return Err(format!("more than {TEXTS_MAX} texts"));
                }
            }
            _ => {}
        }
        if start.is_some_and(|start| ByteSize::of((at + 1).saturating_sub(start)) > TEXT_MAX) {
            return Err(format!("a text is longer than {TEXT_MAX}"));
        }
    }
    Ok(())
}

fn texts(body: &[u8]) -> Result<Vec<String>, Box<Response>> {
    let unfit = |text| Err(refusal(StatusCode::UNPROCESSABLE_ENTITY, text));
    if let Err(reason) = strings_fit(body) {
        return unfit(reason);
    }
    let asked: Asked = serde_json::from_slice(body).map_err(|error| {
        // JSON of another shape is understood and of no use; all else is not understood.
        let status = match error.classify() {
            Category::Data => StatusCode::UNPROCESSABLE_ENTITY,
            _ => StatusCode::BAD_REQUEST,
        };
        let text = format!("expected JSON such as {{\"texts\": [\"a text\"]}}: {error}");
        // The parser quotes invalid input.
        refusal(status, text.chars().take(REASON_MAX).collect())
    })?;
    if asked.texts.is_empty() {
        return unfit(format!("0 texts: expected 1 to {TEXTS_MAX}"));
    }
    for (at, text) in asked.texts.iter().enumerate() {
        if !text.contains(char::is_alphanumeric) {
            return unfit(format!("text {at} contains no words"));
        }
    }
    Ok(asked.texts)
}

/// Scales a vector to length 1; zeros stay.
fn normalise(vector: &mut [f32]) {
    let length = vector.iter().map(|value| value * value).sum::<f32>().sqrt();
    if length > 0.0 {
        for value in vector {
            *value /= length;
        }
    }
}

fn unavailable(error: &ResourceError) -> Response {
    tracing::warn!(%error, "the model is not available");
    lowtide::service::unavailable(error).map(Body::from)
}

fn later(reason: String) -> Response {
    let mut answer = *refusal(StatusCode::SERVICE_UNAVAILABLE, reason);
    answer.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    answer
}

/// A refusal with its reason, as problem+json (RFC 9457).
pub(crate) fn refusal(status: StatusCode, reason: String) -> Box<Response> {
    let problem = serde_json::json!({
        "title": status.canonical_reason(),
        "status": status.as_u16(),
        "detail": reason,
    });
    let kind = [(CONTENT_TYPE, "application/problem+json")];
    Box::new((status, kind, format!("{problem}\n")).into_response())
}
