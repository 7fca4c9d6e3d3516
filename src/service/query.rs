//! Parses the query and the `Accept` header of a request.
//!
//! Plain functions of text. Invariant: the answer is JSON unless HTML is preferred by name.

use std::borrow::Cow;
use std::fmt;

use http::header::ACCEPT;
use http::{HeaderMap, StatusCode};
use percent_encoding::percent_decode_str;

use super::rejection::Denial;

/// The maximum length of a query, in bytes.
const QUERY_MAX: usize = 4096;

/// Returns the problem of an invalid query, with a sentence that says what is wrong.
pub(super) fn invalid(sentence: String) -> Denial {
    Denial::new(StatusCode::BAD_REQUEST, "invalid query", "query", sentence)
}

pub(super) fn invalid_value(name: &str, value: &str, expected: impl fmt::Display) -> Denial {
    invalid(format!("{name}={value:?}: expected {expected}"))
}

pub(super) fn given_twice(name: &str) -> Denial {
    invalid(format!("{name:?} is given twice in the query: expected it once"))
}

/// The values of the query parameters, each of which is known and given at most once.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(&'static str, String)>);

impl Query {
    /// Parses a query with these parameters.
    pub(super) fn read(text: Option<&str>, names: &'static [&'static str]) -> Result<Self, Denial> {
        let text = text.unwrap_or_default();
        if text.len() > QUERY_MAX {
            let length = text.len();
            return Err(invalid(format!("query of {length} bytes: expected at most {QUERY_MAX}")));
        }
        let mut found: Vec<(&'static str, String)> = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decoded(name)?, decoded(value)?);
            let Some(&name) = names.iter().find(|known| **known == name) else {
                let expected = match names {
                    [] => "no query".to_owned(),
                    [name] => (*name).to_owned(),
                    [first @ .., last] => format!("{} or {last}", first.join(", ")),
                };
                return Err(invalid(format!(
                    "unknown query parameter {name:?}: expected {expected}"
                )));
            };
            if found.iter().any(|(other, _)| *other == name) {
                return Err(given_twice(name));
            }
            found.push((name, value));
        }
        Ok(Self(found))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn need(&self, name: &str) -> Result<&str, Denial> {
        let missing = || format!("query parameter {name:?} is missing: expected ?{name}=...");
        self.get(name).ok_or_else(|| invalid(missing()))
    }
}

/// Decodes percent-encoded text, with `+` for a space as in forms and `URLSearchParams`. As there,
/// a `%` without two digits stands for itself.
fn decoded(text: &str) -> Result<String, Denial> {
    let text = text.replace('+', " ");
    let decoded = percent_decode_str(&text).decode_utf8().map(Cow::into_owned);
    decoded.map_err(|_| invalid("the query is not percent-encoded UTF-8".to_owned()))
}

/// Returns `true` if the headers prefer HTML to JSON: if it is named, as by browsers, and weighs
/// more. The weight of a type counts before that of its group. An invalid weight is 0.
pub(super) fn prefers_html(headers: &HeaderMap) -> bool {
    let valid = |text: &str| text.parse().ok().filter(|weight| (0.0..=1.0).contains(weight));
    let accepts = || headers.get_all(ACCEPT).iter().filter_map(|accept| accept.to_str().ok());
    let weight_of = |name: &str| {
        let weights = accepts().flat_map(|accept| accept.split(',')).filter_map(|range| {
            let mut parts = range.split(';').map(str::trim);
            let is_named = parts.next()?.eq_ignore_ascii_case(name);
            let weight = parts.find_map(|part| part.strip_prefix(['q', 'Q'])?.strip_prefix('='));
            is_named.then(|| weight.map_or(1.0, |weight| valid(weight).unwrap_or(0.0)))
        });
        weights.reduce(f64::max)
    };
    let weight = |known: [&str; 2]| known.into_iter().find_map(weight_of).unwrap_or(0.0);
    weight(["text/html", "text/*"]) > weight(["application/json", "application/*"])
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn preferred(accept: &str) -> bool {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_str(accept).expect("a header"));
        prefers_html(&headers)
    }

    #[test]
    fn html_is_for_clients_that_prefer_it_by_name() {
        assert!(!prefers_html(&HeaderMap::new()));
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        for accept in [
            browser,
            "text/html",
            "TEXT/HTML",
            "text/*",
            "text/html, application/json;q=0.9",
            "application/json;q=0, application/*, text/html;q=0.5",
        ] {
            assert!(preferred(accept), "{accept}");
        }
        for accept in [
            "*/*",
            "",
            "application/json",
            "text/html, application/json",
            "text/html;q=0.5, application/json",
            "text/html;q=0",
            "text/html; Q=0.0, */*",
            "text/html;q=half",
            "text/html;q=2, application/json",
            "text/html;q=inf",
            "text/html;q=-1",
            "text/html;q=0, text/*",
            "image/png",
            ";;,,q=1",
            "application/*;q=0.9, text/html;q=0.8",
        ] {
            assert!(!preferred(accept), "{accept}");
        }
        let mut two = HeaderMap::new();
        two.append(ACCEPT, HeaderValue::from_static("image/png"));
        two.append(ACCEPT, HeaderValue::from_static("text/html"));
        assert!(prefers_html(&two), "headers add up");
    }

    #[test]
    fn a_query_is_decoded_and_what_is_wrong_with_it_is_named() {
        const NAMES: &[&str] = &["arena", "keep"];
        let read = |text: &str| Query::read(Some(text), NAMES);
        let query = read("arena=a%20b%2Fc+d%C3%A4&keep=").expect("right");
        assert_eq!((query.get("arena"), query.get("keep")), (Some("a b/c dä"), Some("")));
        assert!(Query::read(None, NAMES).expect("none").get("arena").is_none());
        assert_eq!(query.need("arena"), Ok("a b/c dä"));
        for text in ["%", "%2", "%xf"] {
            assert_eq!(read(&format!("keep={text}")).expect("as it is").get("keep"), Some(text));
        }
        let missing = read("").and_then(|query| query.need("keep").map(drop)).expect_err("missing");
        assert_eq!(missing.detail, "query parameter \"keep\" is missing: expected ?keep=...");
        let encoding = "the query is not percent-encoded UTF-8";
        for (text, error) in [
            ("arena=%FF", encoding),
            ("arena=1&arena=2", "\"arena\" is given twice in the query: expected it once"),
            ("x=1", "unknown query parameter \"x\": expected arena or keep"),
        ] {
            assert_eq!(read(text).expect_err(text).detail, error);
        }
        let long = "a".repeat(QUERY_MAX + 1);
        assert!(read(&long).expect_err("long").detail.contains("expected at most 4096"));
    }
}
