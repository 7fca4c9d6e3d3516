//! `POST /embed`: texts in, embeddings out, from a model that is loaded when it is first used.
//!
//! The model is a managed resource: one load however many ask at once, unloaded when it has been
//! idle. Bad input is answered 4xx with the reason; what memory forbids, 503 with Retry-After.

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::Request;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use http_body_util::BodyExt as _;
use lowtide::ByteSize;
use lowtide::control::{AcquireError, Managed};
use lowtide::service::SharedPermit;
use serde::{Deserialize, Serialize};
use tokio::sync::Semaphore;

use crate::model::{Model, WIDTH};

/// Texts in one request.
pub(crate) const TEXTS_MAX: usize = 64;
/// Bytes of a request body.
pub(crate) const BODY_MAX: ByteSize = ByteSize::mib(4);
/// Host bytes for each byte of body: the body, and its texts parsed, with room for growth.
const BODY_FACTOR: u64 = 3;

/// Host bytes that a request with a body of this length needs.
pub(crate) fn host_cost(body_bytes: u64) -> ByteSize {
    ByteSize::new(body_bytes.min(BODY_MAX.get()) * BODY_FACTOR + (64 << 10))
}

/// Device bytes that the activations of one request take at most: one text at a time.
pub(crate) const DEVICE_COST: ByteSize =
    ByteSize::new((crate::model::NGRAMS_MAX * WIDTH * 4) as u64);

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
    model: Managed<Model>,
    /// As many computations at once as there are cores.
    turns: Arc<Semaphore>,
}

impl Embedder {
    /// A service over this model.
    pub(crate) fn new(model: Managed<Model>) -> Self {
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

    async fn embed(&self, request: Request) -> Result<Answer, Box<Response>> {
        let texts = texts(&read(request).await?)?;
        let model = self.model.acquire().await.map_err(|error| Box::new(unavailable(&error)))?;
        let turn = self.turns.clone().acquire_owned().await;
        let computed = tokio::task::spawn_blocking(move || {
            let _turn = turn;
            model.embed(&texts)
        });
        let failed = |error: String| {
            tracing::error!(error, "an embedding failed");
            refusal(StatusCode::INTERNAL_SERVER_ERROR, format!("{error}\n"))
        };
        match computed.await {
            Ok(Ok(embeddings)) => Ok(Answer { width: WIDTH, embeddings }),
            Ok(Err(error)) if error.is_out_of_memory() => {
                Err(Box::new(later(format!("{error}\n"))))
            }
            Ok(Err(error)) => Err(failed(error.to_string())),
            Err(error) => Err(failed(error.to_string())),
        }
    }
}

/// The whole body, booked as it arrives and cut off at [`BODY_MAX`].
async fn read(request: Request) -> Result<Vec<u8>, Box<Response>> {
    let permit = request.extensions().get::<SharedPermit>().cloned();
    let known = request.headers().contains_key("content-length");
    let mut body = request.into_body();
    let mut whole = Vec::new();
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| {
            refusal(StatusCode::BAD_REQUEST, format!("the body broke off: {error}\n"))
        })?;
        let Ok(data) = frame.into_data() else { continue };
        if ByteSize::of(whole.len() + data.len()) > BODY_MAX {
            let text = format!("the body is longer than {BODY_MAX}\n");
            return Err(refusal(StatusCode::PAYLOAD_TOO_LARGE, text));
        }
        if let (Some(permit), false) = (&permit, known) {
            let more = ByteSize::new(data.len() as u64 * BODY_FACTOR);
            let refuse = |no| Box::new(lowtide::service::rejection(&no).map(Body::from));
            permit.grow(more).map_err(refuse)?;
        }
        whole.extend_from_slice(&data);
    }
    Ok(whole)
}

fn texts(body: &[u8]) -> Result<Vec<String>, Box<Response>> {
    let asked: Asked = serde_json::from_slice(body).map_err(|error| {
        let text = format!("expected JSON such as {{\"texts\": [\"a text\"]}}: {error}\n");
        refusal(StatusCode::BAD_REQUEST, text)
    })?;
    if asked.texts.is_empty() || asked.texts.len() > TEXTS_MAX {
        let text = format!("{} texts: expected 1 to {TEXTS_MAX}\n", asked.texts.len());
        return Err(refusal(StatusCode::UNPROCESSABLE_ENTITY, text));
    }
    Ok(asked.texts)
}

fn unavailable(error: &AcquireError) -> Response {
    tracing::warn!(%error, "the model is not to be had");
    match error {
        AcquireError::Rejected { rejected, .. } => {
            lowtide::service::rejection(rejected).map(Body::from)
        }
        _ => later(format!("the model is not to be had: {error}\n")),
    }
}

fn later(text: String) -> Response {
    (StatusCode::SERVICE_UNAVAILABLE, [("retry-after", "1")], text).into_response()
}

fn refusal(status: StatusCode, text: String) -> Box<Response> {
    Box::new((status, text).into_response())
}
