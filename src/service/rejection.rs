//! What a request is told that is turned away, or whose resource is not to be had: status, when to
//! come again, and the numbers.

use std::time::Duration;

use http::header::{CONTENT_TYPE, RETRY_AFTER};
use http::{HeaderValue, Response, StatusCode};

use crate::control::{AcquireError, Rejected};

/// When to try again where somebody has to act first. A guess.
const ACT_FIRST: Duration = Duration::from_secs(30);

/// The answer to a request that was turned away, as problem+json (RFC 9457): 413 where it can
/// never fit, 503 with Retry-After (in whole seconds, at least 1) else. For a resource that cannot
/// be had see [`unavailable`].
#[must_use]
pub fn rejection(rejected: &Rejected) -> Response<String> {
    let status = match rejected {
        Rejected::TooLarge { .. } => StatusCode::PAYLOAD_TOO_LARGE,
        _ => StatusCode::SERVICE_UNAVAILABLE,
    };
    let retry_after = rejected.retry_after().unwrap_or_default();
    problem(
        status,
        "not enough memory",
        rejected.reason().name(),
        &rejected.to_string(),
        retry_after,
    )
}

/// The answer to a request whose resource cannot be had, as problem+json: always 503 with
/// Retry-After, since it is not the request that is too large. Where the resource can never fit,
/// its operator has to act first; the answer says 30 s then.
///
/// ```
/// use std::sync::Arc;
/// use lowtide::ByteSize;
/// use lowtide::clock::SystemClock;
/// use lowtide::control::{Admission, Cost, Managed};
/// use lowtide::service::unavailable;
///
/// let door = Admission::with_limit(ByteSize::mib(100));
/// let model = Managed::builder("model", || Ok(()))
///     .cost(Cost::host(ByteSize::gib(1)))
///     .build(Arc::new(SystemClock::new()), Some(door));
/// let answer = model.acquire_blocking().map(drop).map_err(|error| unavailable(&error));
/// assert_eq!(answer.map_err(|answer| answer.status().as_u16()), Err(503));
/// ```
#[must_use]
pub fn unavailable(error: &AcquireError) -> Response<String> {
    let (status, title) = (StatusCode::SERVICE_UNAVAILABLE, "a resource is not to be had");
    let retry_after = error.retry_after().unwrap_or(ACT_FIRST);
    problem(status, title, error.reason(), &error.to_string(), retry_after)
}

fn problem(
    status: StatusCode,
    title: &str,
    reason: &str,
    detail: &str,
    retry_after: Duration,
) -> Response<String> {
    let body = serde_json::json!({
        "title": title,
        "status": status.as_u16(),
        "reason": reason,
        "detail": detail,
    });
    let mut response = Response::new(format!("{body}\n"));
    *response.status_mut() = status;
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
    if status == StatusCode::SERVICE_UNAVAILABLE {
        let seconds = retry_after.as_secs() + u64::from(retry_after.subsec_nanos() > 0);
        headers.insert(RETRY_AFTER, HeaderValue::from(seconds.max(1)));
    }
    response
}
