//! Authorization of admin requests, and the secret token for those from other machines.
//!
//! A browser sends requests for any page, to any address that it reaches, with the credentials that
//! it has for this service. A request therefore has to prove that it comes from a page of this
//! service, or from no page; and then its sender: this machine, or a client with the token. Host
//! names are checked if no token is required, since another party's name can be pointed at this
//! machine. Requests for figures are checked for the same reason ([`check_host`]).
//!
//! Invariants: a request passes only if each check has passed; only the last check reads the token,
//! in constant time; no error contains any byte of the token.

use std::borrow::Cow;
use std::hint::black_box;
use std::net::{IpAddr, SocketAddr};

use crate::config::{ConfigError, Fault};
use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Request, StatusCode, Uri};

use crate::service::rejection::Denial;

/// The header that every admin request needs. A page of another origin may not send it unless this
/// service allows that, which it never does.
pub(super) const HEADER: &str = "lowtide-admin";

/// Headers added by proxies: the connected peer is then not the client.
const FORWARDED: [&str; 6] =
    ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"];

/// The address of the connected client. The application adds it to the request's extensions.
/// Without it, no request counts as local.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

fn refuse(reason: &'static str, detail: impl Into<Cow<'static, str>>) -> Denial {
    Denial::new(StatusCode::FORBIDDEN, "not allowed", reason, detail)
}

/// Returns the refusal of a request that is not local, for this reason.
fn not_local(reason: &'static str, why: &str) -> Denial {
    refuse(reason, format!("admin requests are local only: {why}"))
}

fn no_host() -> Denial {
    refuse("host", "missing or ambiguous host: expected one Host header")
}

/// Checks the authorization of a request: with the token if there is one, otherwise local only.
pub(super) fn check<B>(request: &Request<B>, token: Option<&AdminToken>) -> Result<(), Denial> {
    let headers = request.headers();
    let host = host(headers, request.uri()).ok_or_else(no_host)?;
    check_site(headers, &host)?;
    if !headers.contains_key(HEADER) {
        return Err(refuse("header", format!("missing header {HEADER}: expected `{HEADER}: 1`")));
    }
    if let Some(token) = token {
        let wrong = "missing or wrong token: expected `Authorization: Bearer <token>`";
        let denial = || Denial::new(StatusCode::UNAUTHORIZED, "token required", "token", wrong);
        return has_token(headers, token).then_some(()).ok_or_else(denial);
    }
    let unknown = "the client's address is unknown (serve with \
                   `into_make_service_with_connect_info::<SocketAddr>()`, or add `Peer` to the \
                   request)";
    let peer = request.extensions().get::<Peer>();
    let peer = peer.ok_or_else(|| not_local("not_loopback", unknown))?.0.ip();
    if !is_loopback(peer) {
        let why = format!("the client is {peer}, expected a loopback address");
        return Err(not_local("not_loopback", &why));
    }
    if FORWARDED.iter().any(|name| headers.contains_key(*name)) {
        return Err(not_local("forwarded", "the request came through a proxy"));
    }
    let expected = "expected localhost or a loopback address as the host";
    // Names of this machine that no other party can assign.
    let is_local = |host: &str| {
        host.eq_ignore_ascii_case("localhost") || address(host).is_some_and(is_loopback)
    };
    is_local(host.host()).then_some(()).ok_or_else(|| not_local("host_name", expected))
}

/// Checks that a request for figures names a known host: an address, `localhost`, or one of these
/// names. A request without a host comes from no browser.
pub(in crate::service) fn check_host<B>(
    request: &Request<B>,
    names: &[String],
) -> Result<(), Denial> {
    let (headers, uri) = (request.headers(), request.uri());
    if !headers.contains_key(HOST) && uri.authority().is_none() {
        return Ok(());
    }
    let host = host(headers, uri).ok_or_else(no_host)?;
    let host = host.host();
    let is_known = address(host).is_some()
        || host.eq_ignore_ascii_case("localhost")
        || names.iter().any(|name| host.eq_ignore_ascii_case(name));
    let expected = "expected localhost, an IP address or a name given to `with_hosts`";
    let unknown = || refuse("unknown_host", format!("unknown host {host:?}: {expected}"));
    is_known.then_some(()).ok_or_else(unknown)
}

/// Returns the single host of a request: from its header, its URI (HTTP/2), or both if equal.
fn host(headers: &HeaderMap, uri: &Uri) -> Option<Authority> {
    let mut named = headers.get_all(HOST).iter();
    let header = match (named.next(), named.next()) {
        (None, _) => None,
        (Some(header), None) => Some(authority(header.to_str().ok()?)?),
        (Some(_), Some(_)) => return None,
    };
    match (header, uri.authority()) {
        (Some(header), uri) => uri.is_none_or(|uri| header == *uri).then_some(header),
        (None, uri) => authority(uri?.as_str()),
    }
}

/// Parses a host with an optional port, without user information.
fn authority(text: &str) -> Option<Authority> {
    text.parse().ok().filter(|authority: &Authority| !authority.as_str().contains('@'))
}

/// Checks the headers with which browsers describe the origin of a request; no page can set them.
fn check_site(headers: &HeaderMap, host: &Authority) -> Result<(), Denial> {
    let is_own_site = headers.get_all("sec-fetch-site").iter().all(|site| site == "same-origin");
    let is_own = |origin: &HeaderValue| {
        let origin: Uri = origin.to_str().ok()?.parse().ok()?;
        let mut ports = [("http", 80), ("https", 443)].into_iter();
        let (_, port) = ports.find(|(scheme, _)| origin.scheme_str() == Some(scheme))?;
        let from = origin.authority()?;
        let ports = [from, host].map(|of| of.port_u16().unwrap_or(port));
        (from.host().eq_ignore_ascii_case(host.host()) && ports[0] == ports[1]).then_some(())
    };
    let is_own_site =
        is_own_site && headers.get_all(ORIGIN).iter().all(|origin| is_own(origin).is_some());
    let foreign = "cross-site request: expected a request from a page of this service";
    is_own_site.then_some(()).ok_or_else(|| refuse("cross_site", foreign))
}

fn has_token(headers: &HeaderMap, token: &AdminToken) -> bool {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(given), None) = (given.next(), given.next()) else { return false };
    let Some((scheme, given)) = given.as_bytes().split_at_checked("Bearer ".len()) else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"Bearer ") && is_secret(token.0.as_bytes(), given)
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Parses an address in the place of a host, IPv6 in brackets.
fn address(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    bare.unwrap_or(host).parse().ok()
}

/// A token of 32 to 256 printable ASCII characters.
pub(in crate::service) struct AdminToken(Box<str>);

/// The name of a token in errors.
const TOKEN: &str = "admin token";

impl AdminToken {
    /// The minimum length in bytes: 128 bits of random hexadecimal digits.
    const LENGTH_MIN: usize = 32;
    /// The maximum length in bytes.
    const LENGTH_MAX: usize = 256;

    /// Creates a token from a text.
    ///
    /// # Errors
    /// [`ConfigError`] if the text is no token. It does not contain the text.
    pub(in crate::service) fn new(text: &str) -> Result<Self, ConfigError> {
        // No value: that is the secret.
        let bad = |problem| Err(ConfigError { faults: vec![Fault::of_name(TOKEN, problem)] });
        let length = text.len();
        if let Some(at) = text.bytes().position(|byte| !byte.is_ascii_graphic()) {
            let expected = "expected printable ASCII characters without spaces";
            return bad(format!("byte {at} of the {TOKEN}: {expected}"));
        }
        if !(Self::LENGTH_MIN..=Self::LENGTH_MAX).contains(&length) {
            let (least, most) = (Self::LENGTH_MIN, Self::LENGTH_MAX);
            return bad(format!("{TOKEN} of {length} bytes: expected {least} to {most} bytes"));
        }
        Ok(Self(text.into()))
    }
}

/// Returns `true` if these bytes are the secret. The time depends only on its length.
pub(in crate::service) fn is_secret(secret: &[u8], given: &[u8]) -> bool {
    let mut difference = u8::from(given.len() != secret.len());
    for (at, byte) in secret.iter().enumerate() {
        difference |= byte ^ given.get(at).copied().unwrap_or(0);
        difference = black_box(difference); // so that no early end is made of it
    }
    difference == 0
}

#[cfg(all(test, not(lowtide_loom)))]
mod tests {
    use super::*;

    #[test]
    fn only_the_same_bytes_are_the_token() {
        let text = "0123456789abcdef0123456789abcdef";
        let token = AdminToken::new(text).expect("long enough");
        let is = |given: &[u8]| is_secret(token.0.as_bytes(), given);
        assert!(is(text.as_bytes()));
        let longer = format!("{text}0");
        for wrong in ["", "0", &text[..31], &longer, "1123456789abcdef0123456789abcdef"] {
            assert!(!is(wrong.as_bytes()), "{wrong}");
        }
        for at in 0..text.len() {
            let mut other = text.as_bytes().to_vec();
            other[at] ^= 1;
            assert!(!is(&other), "byte {at}");
        }
        let zeros = "\0".repeat(32);
        assert!(!is(zeros.as_bytes()));
    }

    #[test]
    fn what_is_no_token_is_said_without_showing_it() {
        let secret = "correct horse battery staple and more";
        let error = |text: &str| AdminToken::new(text).map(drop).expect_err("bad").to_string();
        let expected = "expected printable ASCII characters without spaces";
        assert_eq!(error(secret), format!("byte 7 of the admin token: {expected}"));
        for length in [31, 257] {
            let expected = format!("admin token of {length} bytes: expected 32 to 256 bytes");
            assert_eq!(error(&"a".repeat(length)), expected);
        }
    }
}
