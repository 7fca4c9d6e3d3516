//! What a request that is turned away is told: status, when to come again, and the numbers.

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use crate::control::Rejected;

/// The answer to a request that was turned away, as problem+json (RFC 9457): 413 where it can
/// never fit, 503 with Retry-After (in whole seconds, at least 1) else.
#[must_use]
pub fn rejection(rejected: &Rejected) -> Response<String> {
    let status = match rejected {
        Rejected::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let body = serde_json::json!({
        "title": "not enough memory",
        "status": status.as_u16(),
        "reason": rejected.reason().name(),
        "detail": rejected.to_string(),
    });
    let mut response = Response::new(format!("{body}\n"));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let wait = rejected.retry_after().unwrap_or_default();
        let seconds = wait.as_secs() + u64::from(wait.subsec_nanos() > 0);
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    }
    response
}
