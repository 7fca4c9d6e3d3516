//! The live page at `/memory`: one document that requests JSON from the same path each second and
//! draws it.
//!
//! Style and script are files of this module and are embedded in the document, so it fetches only
//! the figures. Its policy names both by their digests: nothing else can run in it.
//!
//! Invariant: the document is the same for every request; figures and names are only in the JSON.

mod digest;

use std::sync::OnceLock;

use http::header::{
    CACHE_CONTROL, CONTENT_SECURITY_POLICY, CONTENT_TYPE, REFERRER_POLICY, VARY,
    X_CONTENT_TYPE_OPTIONS,
};
use http::{HeaderValue, Response};

const DOCUMENT: &str = include_str!("page.html");
const STYLE: &str = include_str!("page.css");
const SCRIPT: &str = include_str!("page.js");

/// The maximum size of the document, in bytes.
const _: () = assert!(DOCUMENT.len() + STYLE.len() + SCRIPT.len() <= 150 << 10);

struct Page {
    document: String,
    policy: HeaderValue,
}

/// Built at the first request: some 0.2 ms.
fn page() -> &'static Page {
    static PAGE: OnceLock<Page> = OnceLock::new();
    PAGE.get_or_init(|| {
        let document = DOCUMENT.replacen("{{style}}", STYLE, 1).replacen("{{script}}", SCRIPT, 1);
        let policy = format!(
            "default-src 'none'; style-src {}; script-src {}; connect-src 'self'; \
             img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; \
             require-trusted-types-for 'script'",
            digest::source(STYLE),
            digest::source(SCRIPT),
        );
        // The policy is ASCII; otherwise nothing at all would run.
        let none = HeaderValue::from_static("default-src 'none'");
        Page { document, policy: HeaderValue::from_str(&policy).unwrap_or(none) }
    })
}

/// Returns the page.
pub(super) fn answer() -> Response<String> {
    let page = page();
    let mut response = Response::new(page.document.clone());
    let headers = response.headers_mut();
    headers.insert(CONTENT_SECURITY_POLICY, page.policy.clone());
    for (name, value) in [
        (CONTENT_TYPE, "text/html; charset=utf-8"),
        (CACHE_CONTROL, "no-store"),
        (VARY, "Accept"),
        (X_CONTENT_TYPE_OPTIONS, "nosniff"),
        (REFERRER_POLICY, "no-referrer"),
    ] {
        headers.insert(name, HeaderValue::from_static(value));
    }
    response
}
