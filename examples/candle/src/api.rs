//! What clients send and receive, and the limits of a request.
//!
//! Every refusal is `application/problem+json` with a `reason`, as those of lowtide are.

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::http::header::CONTENT_TYPE;
use axum::http::{HeaderValue, Response, StatusCode};
use serde::{Deserialize, Serialize};
use serde_json::json;
use tokio::task::JoinError;

use crate::embedder::EmbedError;

/// The most texts of a request.
pub const TEXTS_MAX: usize = 64;
/// The longest body, in bytes.
pub const BODY_MAX: usize = 256 << 10;

/// The body of `POST /embed`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The texts.
    pub texts: Vec<String>,
}

/// The answer to it.
#[derive(Debug, Deserialize, Serialize)]
pub struct Answer {
    /// A vector of length 1 for each text.
    pub vectors: Vec<Vec<f32>>,
}

/// Why a request gets no vectors.
#[derive(Debug)]
pub struct Refusal {
    /// The status of the answer.
    pub status: StatusCode,
    /// A word for programs.
    pub reason: &'static str,
    /// A sentence for people.
    pub detail: String,
}

impl From<Refusal> for Response<Body> {
    fn from(Refusal { status, reason, detail }: Refusal) -> Self {
        let title = status.canonical_reason().unwrap_or("refused");
        let text = json!({
            "title": title, "status": status.as_u16(), "reason": reason, "detail": detail,
        });
        let mut response = Self::new(Body::from(format!("{text}\n")));
        *response.status_mut() = status;
        let kind = HeaderValue::from_static("application/problem+json");
        response.headers_mut().insert(CONTENT_TYPE, kind);
        response
    }
}

/// Returns the texts of a request that keeps the limits.
///
/// # Errors
/// The limit that it does not keep, or what is wrong with its body.
pub fn texts(request: Result<Json<Request>, JsonRejection>) -> Result<Vec<String>, Refusal> {
    let Json(Request { texts }) = request.map_err(|error| {
        let reason = match error {
            JsonRejection::MissingJsonContentType(_) => "not_json",
            JsonRejection::JsonDataError(_) => "wrong_fields",
            JsonRejection::JsonSyntaxError(_) => "invalid_json",
            _ => "unreadable_body",
        };
        Refusal { status: error.status(), reason, detail: error.body_text() }
    })?;
    if texts.is_empty() || texts.len() > TEXTS_MAX {
        let detail = format!("{} texts: expected 1 to {TEXTS_MAX}", texts.len());
        let status = StatusCode::UNPROCESSABLE_ENTITY;
        return Err(Refusal { status, reason: "number_of_texts", detail });
    }
    Ok(texts)
}

/// Returns the answer that has the vectors.
///
/// # Errors
/// Why there are none.
pub fn answer(
    vectors: Result<Result<Vec<Vec<f32>>, EmbedError>, JoinError>,
) -> Result<Json<Answer>, Refusal> {
    let (status, reason, detail) = match vectors {
        Ok(Ok(vectors)) => return Ok(Json(Answer { vectors })),
        Ok(Err(error @ EmbedError::TooLong { .. })) => {
            (StatusCode::UNPROCESSABLE_ENTITY, "text_too_long", error.to_string())
        }
        Ok(Err(error)) => (StatusCode::INTERNAL_SERVER_ERROR, "not_computed", error.to_string()),
        Err(panic) => (StatusCode::INTERNAL_SERVER_ERROR, "not_computed", panic.to_string()),
    };
    Err(Refusal { status, reason, detail })
}
