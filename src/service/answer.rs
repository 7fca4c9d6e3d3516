//! Answers of the endpoints, the JSON that several of them contain, and the live page at `/memory`:
//! one document that requests JSON from the same path each second and draws it.
//!
//! Style and script are files of this module and are embedded in the document, so it fetches only
//! the figures. Its policy names a nonce that both have: nothing else can run in it.
//!
//! Invariant: the document is the same for every request, but for the nonce; figures and names are
//! only in the JSON.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::time::Duration;

use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, HeaderValue, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{Response, StatusCode};
use serde_json::{Map, Value, json};

use crate::bytes::ByteSize;
use crate::memory::BudgetSnapshot;
use crate::metrics::names::Metric;
use crate::metrics::record::Figure;

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
                "size_class": class.class,
                "admitted": class.admitted_total,
                "admitted_bytes": class.admitted_bytes_total,
                "rejected": class.rejected_total,
                "rejected_bytes": class.rejected_bytes_total,
            }))
            .collect::<Vec<_>>(),
    })
}

/// Returns the figures of a section of the table of metrics, under the names of the metrics without
/// the prefix and without `_total`, and then others.
pub(super) fn figures(
    prefix: &str,
    read: impl FnOnce(&mut dyn FnMut(Metric, Figure)),
    others: Value,
) -> Value {
    let mut all = Map::new();
    read(&mut |metric, figure| {
        let name = metric.name.strip_prefix(prefix).unwrap_or(metric.name);
        all.insert(name.strip_suffix("_total").unwrap_or(name).to_owned(), value(figure));
    });
    if let Value::Object(others) = others {
        all.extend(others);
    }
    Value::Object(all)
}

fn value(figure: Figure) -> Value {
    match figure {
        Figure::Absent => Value::Null,
        Figure::Count(count) => count.into(),
        Figure::Real(real) => real.into(),
        Figure::Flag(flag) => flag.into(),
        Figure::Each(all) => {
            all.into_iter().map(|(label, figure)| (label.to_owned(), value(figure))).collect()
        }
    }
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

/// Creates an answer of this type.
pub(super) fn answer(status: StatusCode, kind: &'static str, body: String) -> Response<String> {
    let mut response = Response::new(body);
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    guard(response)
}

/// Adds the headers of every answer: it is not kept, and its type is not guessed.
pub(super) fn guard<T>(mut answer: Response<T>) -> Response<T> {
    answer.headers_mut().insert(CACHE_CONTROL, HeaderValue::from_static("no-store"));
    let nosniff = HeaderValue::from_static("nosniff");
    answer.headers_mut().insert(X_CONTENT_TYPE_OPTIONS, nosniff);
    answer
}

const DOCUMENT: &str = include_str!("page/page.html");
const STYLE: &str = include_str!("page/page.css");
const SCRIPT: &str = include_str!("page/page.js");

/// The maximum size of the document, in bytes.
const _: () = assert!(DOCUMENT.len() + STYLE.len() + SCRIPT.len() <= 150 << 10);

/// Returns the page.
pub(super) fn page() -> Response<String> {
    // 128 bits that no client can guess: the standard library seeds its hashers randomly.
    let half = || RandomState::new().build_hasher().finish();
    let nonce = format!("{:016x}{:016x}", half(), half());
    let policy = format!(
        "default-src 'none'; style-src 'nonce-{nonce}'; script-src 'nonce-{nonce}'; \
         connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; \
         frame-ancestors 'none'; require-trusted-types-for 'script'"
    );
    let document = DOCUMENT.replace("{{nonce}}", &nonce);
    let document = document.replacen("{{style}}", STYLE, 1).replacen("{{script}}", SCRIPT, 1);
    let mut page = answer(StatusCode::OK, "text/html; charset=utf-8", document);
    // The policy is ASCII; otherwise nothing at all would run.
    let none = HeaderValue::from_static("default-src 'none'");
    let policy = HeaderValue::try_from(policy).unwrap_or(none);
    for (name, value) in [
        (CONTENT_SECURITY_POLICY, policy),
        (VARY, HeaderValue::from_static("Accept")),
        (REFERRER_POLICY, HeaderValue::from_static("no-referrer")),
    ] {
        page.headers_mut().insert(name, value);
    }
    page
}
