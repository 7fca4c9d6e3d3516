//! Parses the query and the `Accept` header of a request.
//!
//! Plain functions of text. Invariant: the answer is JSON unless HTML is preferred by name.

use http::HeaderMap;
use http::header::ACCEPT;
use thiserror::Error;

/// The maximum length of a query, in bytes.
const QUERY_MAX: usize = 4096;

/// The reason that a query is invalid.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub(super) enum QueryError {
    /// The query is too long.
    #[error("query of {length} bytes: expected at most {max}")]
    TooLong { length: usize, max: usize },
    /// An unknown parameter.
    #[error("unknown query parameter {name:?}: expected {expected}")]
    Unknown { name: String, expected: &'static str },
    /// A parameter that is given twice.
    #[error("{name:?} is given twice in the query: expected it once")]
    Twice { name: &'static str },
    /// A missing parameter.
    #[error("query parameter {name:?} is missing: expected ?{name}=...")]
    Missing { name: &'static str },
    /// An invalid value.
    #[error("{name}={value:?}: expected {expected}")]
    Value { name: &'static str, value: String, expected: String },
    /// Invalid percent-encoding, or not UTF-8.
    #[error("the query is not percent-encoded UTF-8")]
    Encoding,
}

impl QueryError {
    /// Creates the error of an invalid value.
    pub(super) fn value(name: &'static str, value: &str, expected: impl Into<String>) -> Self {
        Self::Value { name, value: value.to_owned(), expected: expected.into() }
    }
}

/// The values of the query parameters, each of which is known and given at most once.
#[derive(Debug, Default)]
pub(super) struct Query(Vec<(&'static str, String)>);

impl Query {
    /// Parses a query with these parameters.
    pub(super) fn read(
        text: Option<&str>,
        names: &'static [&'static str],
        expected: &'static str,
    ) -> Result<Self, QueryError> {
        let text = text.unwrap_or_default();
        if text.len() > QUERY_MAX {
            return Err(QueryError::TooLong { length: text.len(), max: QUERY_MAX });
        }
        let mut found: Vec<(&'static str, String)> = Vec::new();
        for pair in text.split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decoded(name)?, decoded(value)?);
            let Some(&name) = names.iter().find(|known| **known == name) else {
                return Err(QueryError::Unknown { name, expected });
            };
            if found.iter().any(|(other, _)| *other == name) {
                return Err(QueryError::Twice { name });
            }
            found.push((name, value));
        }
        Ok(Self(found))
    }

    pub(super) fn get(&self, name: &str) -> Option<&str> {
        self.0.iter().find(|(other, _)| *other == name).map(|(_, value)| value.as_str())
    }

    pub(super) fn need(&self, name: &'static str) -> Result<&str, QueryError> {
        self.get(name).ok_or(QueryError::Missing { name })
    }
}

/// Decodes percent-encoded text, with `+` for a space as in forms and `URLSearchParams`.
fn decoded(text: &str) -> Result<String, QueryError> {
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || rest.next().and_then(|byte| char::from(byte).to_digit(16));
                let value = digit().zip(digit()).map(|(high, low)| high * 16 + low);
                let value = value.and_then(|value| u8::try_from(value).ok());
                value.ok_or(QueryError::Encoding)?
            }
            plain => plain,
        });
    }
    String::from_utf8(bytes).map_err(|_| QueryError::Encoding)
}

/// The format of the figures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Format {
    Json,
    Html,
}

impl Format {
    /// Returns the format that the headers prefer: HTML if it is named and weighs more than JSON,
    /// otherwise JSON. Invalid ranges are ignored.
    pub(super) fn preferred(headers: &HeaderMap) -> Self {
        let (mut html, mut json) = (Weight::default(), Weight::default());
        for accept in headers.get_all(ACCEPT) {
            for range in accept.to_str().unwrap_or_default().split(',') {
                let Some((kind, weight)) = weighed(range) else { continue };
                match kind.to_ascii_lowercase().as_str() {
                    "text/html" => html.set(3, weight),
                    "text/*" => html.set(2, weight),
                    "application/json" => json.set(3, weight),
                    "application/*" => json.set(2, weight),
                    // A wildcard is not enough for HTML.
                    "*/*" => json.set(1, weight),
                    _ => {}
                }
            }
        }
        if html.value > json.value { Self::Html } else { Self::Json }
    }
}

/// The weight of a kind, in thousandths, by the most specific range that names it.
#[derive(Default)]
struct Weight {
    rank: u8,
    value: u16,
}

impl Weight {
    fn set(&mut self, rank: u8, value: u16) {
        if rank > self.rank {
            *self = Self { rank, value };
        }
    }
}

/// Parses a media range and its weight ("qvalue", RFC 9110, 12.4.2) in thousandths; `None` if it is
/// invalid.
fn weighed(range: &str) -> Option<(&str, u16)> {
    let mut parts = range.split(';').map(str::trim);
    let kind = parts.next().filter(|kind| !kind.is_empty())?;
    let weight = parts.find_map(|part| {
        let (name, value) = part.split_once('=')?;
        name.trim().eq_ignore_ascii_case("q").then(|| value.trim())
    });
    Some((kind, weight.map_or(Some(1000), thousandths)?))
}

fn thousandths(text: &str) -> Option<u16> {
    let (whole, part) = text.split_once('.').unwrap_or((text, ""));
    if part.len() > 3 || !part.bytes().all(|byte| byte.is_ascii_digit()) {
        return None;
    }
    match (whole, format!("{part:0<3}").parse().ok()?) {
        ("0", part) => Some(part),
        ("1", 0) => Some(1000),
        _ => None,
    }
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use http::HeaderValue;

    use super::*;

    fn preferred(accept: &str) -> Format {
        let mut headers = HeaderMap::new();
        headers.insert(ACCEPT, HeaderValue::from_str(accept).expect("a header"));
        Format::preferred(&headers)
    }

    #[test]
    fn html_is_for_who_prefers_it_by_name_and_json_for_all_others() {
        assert_eq!(Format::preferred(&HeaderMap::new()), Format::Json);
        let browser = "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8";
        for accept in [browser, "text/html", "TEXT/HTML", "text/*", "text/html;q=0.2"] {
            assert_eq!(preferred(accept), Format::Html, "{accept}");
        }
        for accept in [
            "*/*",
            "",
            "application/json",
            "text/html, application/json",
            "text/html;q=0.5, application/json",
            "text/html;q=0",
            "text/html;q=0.5, */*",
            "text/html;q=2, */*;q=0.1",
            "text/html;q=0.1234",
            "text/*, text/html;q=0, */*;q=0.1",
            "image/png",
            ";;,,q=1",
            "application/*;q=0.9, text/html;q=0.8",
        ] {
            assert_eq!(preferred(accept), Format::Json, "{accept}");
        }
        let mut two = HeaderMap::new();
        two.append(ACCEPT, HeaderValue::from_static("application/json;q=0.1"));
        two.append(ACCEPT, HeaderValue::from_static("text/html"));
        assert_eq!(Format::preferred(&two), Format::Html, "headers add up");
    }

    #[test]
    fn a_query_is_decoded_and_what_is_wrong_with_it_is_named() {
        const NAMES: &[&str] = &["arena", "keep"];
        let read = |text: &str| Query::read(Some(text), NAMES, "arena or keep");
        let query = read("arena=a%20b%2Fc+d%C3%A4&keep=").expect("right");
        assert_eq!((query.get("arena"), query.get("keep")), (Some("a b/c dä"), Some("")));
        assert!(Query::read(None, NAMES, "").expect("none").get("arena").is_none());
        assert_eq!(query.need("arena"), Ok("a b/c dä"));
        assert_eq!(read("").and_then(|query| query.need("keep").map(drop)), {
            Err(QueryError::Missing { name: "keep" })
        });
        for (text, error) in [
            ("arena=%", QueryError::Encoding),
            ("arena=%2", QueryError::Encoding),
            ("arena=%+f", QueryError::Encoding),
            ("arena=%FF", QueryError::Encoding),
            ("arena=1&arena=2", QueryError::Twice { name: "arena" }),
            ("x=1", QueryError::Unknown { name: "x".to_owned(), expected: "arena or keep" }),
        ] {
            assert_eq!(read(text).map(drop), Err(error), "{text}");
        }
        let long = "a".repeat(QUERY_MAX + 1);
        assert!(matches!(read(&long), Err(QueryError::TooLong { .. })));
    }
}
