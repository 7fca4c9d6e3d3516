//! Answers to rejected requests, and to requests whose resource is not available: status, retry
//! time and figures.
//!
//! The body of a rejected request is read and discarded on HTTP/1, before the answer is sent. If a
//! server answers and closes while the client still sends, the client sees a broken connection
//! instead of the answer (RFC 9112, 9.6). If it sends the head and continues to read, clients that
//! stop sending at the first byte of an answer, such as curl and nginx, have to wait. Therefore the
//! answer follows the body, or [`DRAIN_MAX`] bytes of it. A slow client occupies its connection as
//! long as an admitted one, and one frame of memory. With a minimum data rate, a slower client is
//! answered before.
//!
//! Nothing is read if the client waits for permission to send (`Expect: 100-continue`, RFC 9110,
//! 10.1.1); nor on HTTP/2 and later, where ending a stream disturbs no other one and a client may
//! keep its side open until it is answered; nor if the declared length exceeds the bound.
//!
//! Invariant: a rejected request holds at most one frame of its body at a time.

use std::borrow::Cow;
use std::future::Future;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Buf;
use http::header::{CONTENT_TYPE, EXPECT, RETRY_AFTER, WWW_AUTHENTICATE};
use http::request::Parts;
use http::{HeaderMap, HeaderValue, Response, StatusCode, Version};
use http_body::Body;
use percent_encoding::{AsciiSet, CONTROLS, utf8_percent_encode};
use pin_project_lite::pin_project;

use crate::bytes::ByteSize;
use lowtide_admission::{Rejected, ResourceError};

use super::time_limits::RegisteredPace;

/// `DEADLINE_EXCEEDED`, `RESOURCE_EXHAUSTED` and `UNAVAILABLE` of gRPC.
pub(super) const DEADLINE_EXCEEDED: u16 = 4;
pub(super) const RESOURCE_EXHAUSTED: u16 = 8;
pub(super) const UNAVAILABLE: u16 = 14;
/// The minimum Retry-After, also used during shutdown, when another instance answers.
const MIN_WAIT: Duration = Duration::from_secs(1);
/// The longest wait that is announced: a day.
const RETRY_MAX: Duration = Duration::from_secs(24 * 3600);

/// The titles of answers.
const NO_MEMORY: &str = "not enough memory";
const TIMEOUT: &str = "request timeout";
const DEVICE_LOST: &str = "device lost";

/// Returns the answer to a rejected request with this head, in the client's protocol. It is the
/// default of a layer.
///
/// A gRPC client reads a gRPC status instead of an HTTP status: `RESOURCE_EXHAUSTED` in a
/// trailers-only response with `grpc-retry-pushback-ms`, which is the time until a retry, or -1 if
/// a retry cannot succeed. A service that is shutting down, or has lost the device, answers
/// `UNAVAILABLE` without it, so that the client tries another instance. `DEADLINE_EXCEEDED` says
/// that a time limit has passed.
///
/// Other clients get [`rejection`].
pub(super) fn negotiated(rejected: &Rejected, head: &Parts) -> Response<String> {
    let kind = head.headers.get(CONTENT_TYPE);
    match kind.filter(|kind| kind.as_bytes().starts_with(b"application/grpc")) {
        Some(kind) => trailers_only(rejected, kind.clone()),
        None => rejection(rejected),
    }
}

/// "Trailers-Only -> HTTP-Status Content-Type Trailers" (PROTOCOL-HTTP2.md of gRPC).
fn trailers_only(rejected: &Rejected, kind: HeaderValue) -> Response<String> {
    let (status, pushback) = match rejected {
        Rejected::ShuttingDown | Rejected::DeviceLost { .. } => (UNAVAILABLE, None),
        Rejected::SlowClient { .. } | Rejected::HeldTooLong { .. } => (DEADLINE_EXCEEDED, None),
        _ => (RESOURCE_EXHAUSTED, Some(rejected.retry_after())),
    };
    let mut response = Response::new(String::new());
    let headers = response.headers_mut();
    headers.insert(CONTENT_TYPE, kind);
    put_grpc_status(headers, status, &detail(rejected));
    // "If the value for pushback is negative or unparseable, then it will be seen as the server
    // asking the client not to retry at all" (gRFC A6).
    if let Some(after) = pushback {
        let ms = after.map_or(-1, |after| i64::try_from(after.as_millis()).unwrap_or(i64::MAX));
        headers.insert("grpc-retry-pushback-ms", HeaderValue::from(ms));
    }
    response
}

/// Adds a status of gRPC and its message.
pub(super) fn put_grpc_status(headers: &mut HeaderMap, status: u16, message: &str) {
    headers.insert("grpc-status", HeaderValue::from(status));
    if let Ok(message) = HeaderValue::try_from(utf8_percent_encode(message, ENCODED).to_string()) {
        headers.insert("grpc-message", message);
    }
}

/// Returns the reason without the figures of memory, which clients need not know. Log events, the
/// events of a `Memory` and its metrics have them. Time limits are named: clients must keep them.
fn detail(rejected: &Rejected) -> Cow<'static, str> {
    let text = match rejected {
        Rejected::TooLarge { .. } => "the request needs more memory than can ever be free",
        Rejected::Full { .. } => "the request needs more memory than is free now",
        Rejected::Pressure { .. } => "memory is short now",
        Rejected::Exhausted { .. } => "no memory is left for requests on this instance",
        Rejected::SlowStart { .. } => "too many requests of this kind run at once",
        Rejected::Outgrown { .. } => "the request used far more memory than was expected",
        Rejected::ShuttingDown => "the service is shutting down",
        Rejected::SlowClient { .. } | Rejected::HeldTooLong { .. } => {
            return rejected.to_string().into();
        }
        Rejected::DeviceLost { .. } => "the device of this instance has failed",
        _ => "the request was rejected for lack of memory",
    };
    text.into()
}

/// What `grpc-message` encodes: bytes that are not printable ASCII, and `%`.
const ENCODED: &AsciiSet = &CONTROLS.add(b'%');

/// Returns the answer to a rejected request, as problem+json (RFC 9457): 413 if it is so large that
/// a retry cannot succeed, 408 if the client sends its body too slowly, otherwise 503. That has
/// Retry-After (in whole seconds, at least 1), unless the request has run for too long or the
/// device is lost. For a resource that is not available, see [`unavailable`].
#[must_use]
pub fn rejection(rejected: &Rejected) -> Response<String> {
    let unavailable = StatusCode::SERVICE_UNAVAILABLE;
    let (status, title, retry_after) = match rejected {
        // No retry succeeds here, but another instance may have a working device.
        Rejected::DeviceLost { .. } => (unavailable, DEVICE_LOST, None),
        Rejected::TooLarge { .. } | Rejected::Outgrown { retry_after: None, .. } => {
            (StatusCode::PAYLOAD_TOO_LARGE, NO_MEMORY, None)
        }
        Rejected::SlowClient { .. } => (StatusCode::REQUEST_TIMEOUT, TIMEOUT, None),
        Rejected::HeldTooLong { .. } => (unavailable, TIMEOUT, None),
        _ => (unavailable, NO_MEMORY, Some(rejected.retry_after().unwrap_or(MIN_WAIT))),
    };
    let (reason, detail) = (rejected.reason().name(), detail(rejected));
    Denial { status, title, reason, detail, retry_after }.answer()
}

/// Returns the answer to a request whose resource cannot be acquired, as problem+json: always 503,
/// because the request is not too large. Retry-After is set if a retry may succeed
/// ([`ResourceError::retry_after`]). It is absent if an operator has to act first, for example if
/// the resource's cost is above the ceiling. The loader's error is for the log, not for clients.
///
/// ```
/// use std::sync::Arc;
/// use lowtide::ByteSize;
/// use lowtide::clock::SystemClock;
/// use lowtide::admission::{Admission, Cost, Managed};
/// use lowtide::service::unavailable;
///
/// let door = Admission::with_limit(ByteSize::mib(100));
/// let model = Managed::builder("model", || Ok(()))
///     .cost(Cost::host(ByteSize::gib(1)))
///     .build(Arc::new(SystemClock::new()), Some(door));
/// let answer = unavailable(&model.acquire_blocking().map(drop).unwrap_err());
/// assert_eq!(answer.status(), 503);
/// assert!(!answer.headers().contains_key("retry-after"), "1 GiB never fits into 100 MiB");
/// ```
#[must_use]
pub fn unavailable(error: &ResourceError) -> Response<String> {
    let detail = match error {
        ResourceError::Rejected { rejected, .. } => detail(rejected),
        ResourceError::Load { .. } => "a model or another resource cannot be loaded now".into(),
        other => other.to_string().into(),
    };
    let (status, title) = (StatusCode::SERVICE_UNAVAILABLE, "resource not available");
    let retry_after = error.retry_after().map(|time| time.max(MIN_WAIT));
    Denial { status, title, reason: error.reason(), detail, retry_after }.answer()
}

/// Why a request is not served, as problem+json (RFC 9457).
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Denial {
    pub(super) status: StatusCode,
    pub(super) title: &'static str,
    pub(super) reason: &'static str,
    pub(super) detail: Cow<'static, str>,
    pub(super) retry_after: Option<Duration>,
}

impl Denial {
    pub(super) fn new(
        status: StatusCode,
        title: &'static str,
        reason: &'static str,
        detail: impl Into<Cow<'static, str>>,
    ) -> Self {
        Self { status, title, reason, detail: detail.into(), retry_after: None }
    }

    /// Returns the answer, with Retry-After in whole seconds if a time above zero is set.
    pub(super) fn answer(&self) -> Response<String> {
        let body = serde_json::json!({
            "title": self.title,
            "status": self.status.as_u16(),
            "reason": self.reason,
            "detail": self.detail,
        });
        let mut response = Response::new(format!("{body}\n"));
        *response.status_mut() = self.status;
        let headers = response.headers_mut();
        headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/problem+json"));
        if let Some(time) = self.retry_after.filter(|time| !time.is_zero()) {
            let time = time.min(RETRY_MAX);
            let seconds = time.as_secs() + u64::from(time.subsec_nanos() > 0);
            headers.insert(RETRY_AFTER, HeaderValue::from(seconds));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            let challenge = HeaderValue::from_static("Bearer realm=\"lowtide\"");
            headers.insert(WWW_AUTHENTICATE, challenge);
        }
        response
    }
}

/// The maximum length of a rejected request's body that is read; a longer body breaks the
/// connection. An estimate: above what clients send in one piece, below what an attacker would like
/// the server to read.
pub const DRAIN_MAX: ByteSize = ByteSize::mib(64);

pin_project! {
    /// Reads a body to its end, or up to the bound, and returns the answer.
    #[derive(Debug)]
    pub(super) struct Drain<Q> {
        #[pin]
        body: Q,
        // `None` once it was returned.
        answer: Option<Response<String>>,
        left: u64,
        pace: Option<Arc<RegisteredPace>>,
    }
}

impl<Q: Body> Drain<Q> {
    /// Creates a drain for the body of a request with this head, at the pace that is created if the
    /// client may have to be waited for.
    pub(super) fn new(
        head: &Parts,
        body: Q,
        answer: Response<String>,
        pace: impl FnOnce() -> Option<Arc<RegisteredPace>>,
    ) -> Self {
        let waits = head
            .headers
            .get(EXPECT)
            .is_some_and(|value| value.as_bytes().eq_ignore_ascii_case(b"100-continue"));
        let ends = body.size_hint().lower() <= DRAIN_MAX.get();
        let reads = head.version <= Version::HTTP_11 && !waits && ends;
        let pace = if reads && !body.is_end_stream() { pace() } else { None };
        let left = if reads { DRAIN_MAX.get() } else { 0 };
        Self { body, answer: Some(answer), left, pace }
    }
}

impl<Q: Body> Future for Drain<Q> {
    type Output = Response<String>;

    fn poll(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<Response<String>> {
        let mut this = self.project();
        // Bounded: each iteration reads a frame, and no more than the bound is read.
        while *this.left > 0 && !this.body.is_end_stream() {
            let Poll::Ready(polled) = this.body.as_mut().poll_frame(cx) else {
                if this.pace.as_ref().is_some_and(|pace| !pace.wait(cx.waker())) {
                    break;
                }
                return Poll::Pending;
            };
            let Some(Ok(frame)) = polled else { break };
            let size = frame.data_ref().map_or(0, Buf::remaining);
            if let Some(pace) = this.pace {
                pace.received(size);
            }
            // Empty frames count too, so that they cannot continue forever.
            *this.left = this.left.saturating_sub((size as u64).max(1));
        }
        match this.answer.take() {
            Some(answer) => Poll::Ready(answer),
            None => unreachable!("polled after completion"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::bytes::ByteSize;
    use lowtide_admission::LoadFailure;

    fn head(content_type: Option<&str>) -> Parts {
        let request = http::Request::post("/");
        let request = match content_type {
            Some(kind) => request.header("content-type", kind),
            None => request,
        };
        request.body(()).expect("a valid head").into_parts().0
    }

    /// The bug: a wait without end was an overflow, which is a panic with debug assertions.
    #[test]
    fn a_wait_without_end_is_announced_as_a_day() {
        let full = Denial::new(StatusCode::SERVICE_UNAVAILABLE, "full", "full", "");
        let answer = Denial { retry_after: Some(Duration::MAX), ..full }.answer();
        assert_eq!(answer.headers()[RETRY_AFTER], "86400");
    }

    /// The bug: a lost device was answered as a request that is too large.
    #[test]
    fn a_lost_device_is_answered_as_unavailable_without_a_time_to_retry() {
        let lost = Rejected::DeviceLost { asked: ByteSize::mib(1) };
        let answer = negotiated(&lost, &head(None));
        assert_eq!(answer.status(), 503);
        assert!(!answer.headers().contains_key(RETRY_AFTER));
        assert!(answer.body().contains("\"device_lost\""), "{}", answer.body());
        let answer = negotiated(&lost, &head(Some("application/grpc")));
        assert_eq!(answer.headers()["grpc-status"], "14");
        assert!(!answer.headers().contains_key("grpc-retry-pushback-ms"));
    }

    /// The bug: any client learned from an answer how much memory the service has and uses.
    #[test]
    fn strangers_learn_no_figures_from_a_rejection() {
        let (asked, reserved, allowance) = (ByteSize::mib(1), ByteSize::mib(45), ByteSize::mib(50));
        let budget = lowtide_admission::Budget::Host;
        let retry_after = Duration::from_secs(3);
        let full = Rejected::Full { budget, asked, reserved, allowance, retry_after };
        let large = Rejected::TooLarge { budget, asked, ceiling: allowance };
        let acquire = ResourceError::Rejected { name: "model".into(), rejected: full.clone() };
        let digits = |text: &str| text.bytes().any(|byte| byte.is_ascii_digit());
        for rejected in [&full, &large] {
            let body: serde_json::Value =
                serde_json::from_str(rejection(rejected).body()).expect("JSON");
            assert!(!digits(body["detail"].as_str().expect("a text")), "{body}");
            let answer = negotiated(rejected, &head(Some("application/grpc")));
            assert!(!digits(answer.headers()["grpc-message"].to_str().expect("text")));
        }
        let body: serde_json::Value =
            serde_json::from_str(unavailable(&acquire).body()).expect("JSON");
        assert!(!digits(body["detail"].as_str().expect("a text")), "{body}");
    }

    /// The bug: clients read the path of a model's file.
    #[test]
    fn strangers_learn_nothing_of_the_error_of_a_loader() {
        let failure = LoadFailure::Panicked("/models/secret.bin: no such file".into());
        let retry_in = Duration::from_secs(3);
        let failed = ResourceError::Load { name: "model".into(), failure, retry_in };
        let answer = unavailable(&failed);
        assert!(!answer.body().contains("secret"), "{}", answer.body());
        assert_eq!(answer.headers()["retry-after"], "3");
    }

    #[test]
    fn grpc_is_answered_as_it_asked_and_all_else_as_problem_json() {
        let full = Rejected::ShuttingDown;
        for (asked, answered, status) in [
            (Some("application/grpc"), "application/grpc", 200),
            (Some("application/grpc+proto"), "application/grpc+proto", 200),
            (Some("application/json"), "application/problem+json", 503),
            (None, "application/problem+json", 503),
        ] {
            let answer = negotiated(&full, &head(asked));
            assert_eq!(answer.headers()["content-type"], answered);
            assert_eq!(answer.status().as_u16(), status, "{asked:?}");
            assert_eq!(answer.headers().contains_key("grpc-status"), status == 200);
            assert_eq!(answer.body().is_empty(), status == 200, "trailers only");
        }
    }
}
