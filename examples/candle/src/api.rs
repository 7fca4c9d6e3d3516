//! What clients send and receive, and the limits of a request.
//!
//! Every refusal is `application/problem+json` with a `reason`, as those of lowtide are.

use axum::Json;
use axum::body::Body;
use axum::extract::rejection::JsonRejection;
use axum::http::header::CONTENT_TYPE;
use axum::http::{Response, StatusCode};
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

/// Returns the texts of a request that keeps the limits.
///
/// # Errors
/// The answer to one that does not.
pub fn texts(request: Result<Json<Request>, JsonRejection>) -> Result<Vec<String>, Response<Body>> {
    let Json(Request { texts }) = request.map_err(|error| {
        let reason = match error {
            JsonRejection::MissingJsonContentType(_) => "not_json",
            JsonRejection::JsonDataError(_) => "wrong_fields",
            JsonRejection::JsonSyntaxError(_) => "invalid_json",
            _ => "unreadable_body",
        };
        problem(error.status(), reason, &error.body_text())
    })?;
    if texts.is_empty() || texts.len() > TEXTS_MAX {
        let detail = format!("{} texts: expected 1 to {TEXTS_MAX}", texts.len());
        return Err(problem(StatusCode::UNPROCESSABLE_ENTITY, "number_of_texts", &detail));
    }
    Ok(texts)
}

/// Returns the answer that has the vectors, or says why there are none.
///
/// # Errors
/// The answer that says why.
pub fn answer(
    vectors: Result<Result<Vec<Vec<f32>>, EmbedError>, JoinError>,
) -> Result<Json<Answer>, Response<Body>> {
    let failed = |detail: &str| problem(StatusCode::INTERNAL_SERVER_ERROR, "not_computed", detail);
    match vectors {
        Ok(Ok(vectors)) => Ok(Json(Answer { vectors })),
        Ok(Err(error @ EmbedError::TooLong { .. })) => {
            Err(problem(StatusCode::UNPROCESSABLE_ENTITY, "text_too_long", &error.to_string()))
        }
        Ok(Err(error)) => Err(failed(&error.to_string())),
        Err(error) => Err(failed(&error.to_string())),
    }
}

/// Creates a refusal (RFC 9457).
#[must_use]
pub fn problem(status: StatusCode, reason: &str, detail: &str) -> Response<Body> {
    let title = status.canonical_reason().unwrap_or("refused");
    let text = json!({
        "title": title, "status": status.as_u16(), "reason": reason, "detail": detail,
    });
    let mut response = Response::new(Body::from(format!("{text}\n")));
    *response.status_mut() = status;
    let kind = axum::http::HeaderValue::from_static("application/problem+json");
    response.headers_mut().insert(CONTENT_TYPE, kind);
    response
}
