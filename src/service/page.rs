//! The live page at `/memory`: one document that requests JSON from the same path each second and
//! draws it.
//!
//! Style and script are files of this module and are embedded in the document, so it fetches only
//! the figures. Its policy names a nonce that both have: nothing else can run in it.
//!
//! Invariant: the document is the same for every request, but for the nonce; figures and names are
//! only in the JSON.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};

use http::header::{CONTENT_SECURITY_POLICY, HeaderValue, REFERRER_POLICY, VARY};
use http::{Response, StatusCode};

use super::answer::answer;

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
