//! Answers of the endpoints, and the JSON that several of them contain.

use std::time::Duration;

use http::header::{CACHE_CONTROL, CONTENT_TYPE, HeaderValue};
use http::{Response, StatusCode};
use serde_json::{Value, json};

use crate::bytes::ByteSize;
use crate::memory::BudgetSnapshot;

pub(super) const JSON: &str = "application/json";

pub(super) fn budget(budget: &BudgetSnapshot) -> Value {
    json!({
        "level": budget.level.name(),
        "reserved_bytes": budget.reserved.get(),
        "allowance_bytes": limit(budget.allowance),
        "ceiling_bytes": limit(budget.ceiling),
        "ceiling_parts": budget.ceiling_parts.map(|parts| {
            let bytes = |(name, bytes): (_, ByteSize)| (format!("{name}_bytes"), bytes.get());
            parts.by_name().map(bytes).into_iter().collect::<Value>()
        }),
        "correction_factor": budget.correction_factor,
        "reserved_headroom_bytes": budget.reserved_headroom.get(),
        "size_classes": budget
            .classes
            .iter()
            .filter(|class| class.admitted_total + class.rejected_total > 0)
            .map(|class| json!({
                "size_class": class.class.name(),
                "admitted": class.admitted_total,
                "admitted_bytes": class.admitted_bytes_total,
                "rejected": class.rejected_total,
                "rejected_bytes": class.rejected_bytes_total,
            }))
            .collect::<Vec<_>>(),
    })
}

/// Rounds to milliseconds.
pub(super) fn seconds(at: Duration) -> f64 {
    (at.as_secs_f64() * 1e3).round() / 1e3
}

/// [`ByteSize::MAX`] means no limit.
pub(super) fn limit(size: ByteSize) -> Option<u64> {
    (size != ByteSize::MAX).then_some(size.get())
}

pub(super) fn pretty(value: &Value) -> String {
    format!("{value:#}\n")
}

pub(super) fn answer(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    response.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    response
}
