//! Who may ask for verbs.
//!
//! A browser sends what any page tells it to, to any address that it reaches, with what the
//! browser knows of this service: so a request has to show that it comes from a page of this
//! service, or from no page. Then who sends it: this machine, or somebody with the token. Names
//! of hosts are looked at where the token is not asked for, since a name of another may be made to
//! lead to this machine. For the same reason those of requests for figures are ([`check_host`]).
//!
//! Invariant: a request passes only where each check has passed; no check looks at the token but
//! the last.

use std::net::{IpAddr, SocketAddr};

use http::header::{AUTHORIZATION, HOST, ORIGIN};
use http::uri::Authority;
use http::{HeaderMap, HeaderValue, Request, Uri};
use thiserror::Error;

use super::token::AdminToken;

/// The header without which no verb is heard. A page of another origin may not send it, unless
/// this service said that it may, which it never does.
pub(super) const HEADER: &str = "lowtide-admin";

/// What a proxy adds: then whoever is connected is not who asks.
const FORWARDED: [&str; 6] =
    ["forwarded", "via", "x-forwarded-for", "x-forwarded-host", "x-forwarded-proto", "x-real-ip"];

/// Who is connected, as the application knows it: put it into a request's extensions. Without it no
/// request counts as one of this machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Peer(pub SocketAddr);

/// Why a request is not heard.
#[derive(Clone, Copy, Debug, Error, PartialEq, Eq)]
pub(super) enum Refused {
    #[error("the request names no host, or more than one: expected one Host header")]
    Host,
    #[error("the request comes from another site")]
    CrossSite,
    #[error("the header {HEADER} is missing: expected `{HEADER}: 1`")]
    Header,
    #[error("admin requests are local only: the client address is another machine's or unknown")]
    NotLoopback,
    #[error("admin requests are local only: the request came through a proxy")]
    Forwarded,
    #[error("admin requests are local only: expected localhost or its address as the host")]
    HostName,
    #[error("unknown host: expected localhost, an IP address or a configured name")]
    UnknownHost,
    #[error("the token is missing or wrong: expected `Authorization: Bearer` and the token")]
    Token,
}

impl Refused {
    pub(super) const fn reason(self) -> &'static str {
        match self {
            Self::Host => "host",
            Self::CrossSite => "cross_site",
            Self::Header => "header",
            Self::NotLoopback => "not_loopback",
            Self::Forwarded => "forwarded",
            Self::HostName => "host_name",
            Self::UnknownHost => "unknown_host",
            Self::Token => "token",
        }
    }
}

/// Whether a request may ask: with the token where there is one, else from this machine.
pub(super) fn check<B>(request: &Request<B>, token: Option<&AdminToken>) -> Result<(), Refused> {
    let headers = request.headers();
    let host = host(headers, request.uri()).ok_or(Refused::Host)?;
    check_site(headers, &host)?;
    if !headers.contains_key(HEADER) {
        return Err(Refused::Header);
    }
    if let Some(token) = token {
        return if has_token(headers, token) { Ok(()) } else { Err(Refused::Token) };
    }
    let peer = request.extensions().get::<Peer>();
    if !peer.is_some_and(|peer| is_loopback(peer.0.ip())) {
        return Err(Refused::NotLoopback);
    }
    if FORWARDED.iter().any(|name| headers.contains_key(*name)) {
        return Err(Refused::Forwarded);
    }
    if is_this_machine(host.host()) { Ok(()) } else { Err(Refused::HostName) }
}

/// Whether a request for figures is to a host by which this service is known: an address,
/// `localhost`, or one of these names. One that names no host comes from no browser.
pub(super) fn check_host<B>(request: &Request<B>, names: &[String]) -> Result<(), Refused> {
    let (headers, uri) = (request.headers(), request.uri());
    if !headers.contains_key(HOST) && uri.authority().is_none() {
        return Ok(());
    }
    let host = host(headers, uri).ok_or(Refused::Host)?;
    let host = host.host();
    let is_known = address(host).is_some()
        || host.eq_ignore_ascii_case("localhost")
        || names.iter().any(|name| host.eq_ignore_ascii_case(name));
    if is_known { Ok(()) } else { Err(Refused::UnknownHost) }
}

/// The one host that a request names: in its header, in its address (HTTP/2), or alike in both.
fn host(headers: &HeaderMap, uri: &Uri) -> Option<Authority> {
    let mut named = headers.get_all(HOST).iter();
    let header = match (named.next(), named.next()) {
        (None, _) => None,
        (Some(header), None) => Some(authority(header.to_str().ok()?)?),
        (Some(_), Some(_)) => return None,
    };
    match (header, uri.authority()) {
        (Some(header), Some(uri)) => (header == *uri).then_some(header),
        (Some(header), None) => Some(header),
        (None, Some(uri)) => authority(uri.as_str()),
        (None, None) => None,
    }
}

/// A host and perhaps a port: nobody's name before it.
fn authority(text: &str) -> Option<Authority> {
    text.parse().ok().filter(|authority: &Authority| !authority.as_str().contains('@'))
}

/// What browsers say of where a request comes from: none of these headers can be set by a page.
fn check_site(headers: &HeaderMap, host: &Authority) -> Result<(), Refused> {
    if headers.get_all("sec-fetch-site").iter().any(|site| site != "same-origin") {
        return Err(Refused::CrossSite);
    }
    let is_own = |origin: &HeaderValue| {
        let origin: Uri = origin.to_str().ok()?.parse().ok()?;
        let scheme = origin.scheme_str()?;
        let port = match scheme {
            "http" => 80,
            "https" => 443,
            _ => return None,
        };
        let from = origin.authority()?;
        let ports = [from, host].map(|of| of.port_u16().unwrap_or(port));
        (from.host().eq_ignore_ascii_case(host.host()) && ports[0] == ports[1]).then_some(())
    };
    if headers.get_all(ORIGIN).iter().all(|origin| is_own(origin).is_some()) {
        Ok(())
    } else {
        Err(Refused::CrossSite)
    }
}

fn has_token(headers: &HeaderMap, token: &AdminToken) -> bool {
    let mut given = headers.get_all(AUTHORIZATION).iter();
    let (Some(given), None) = (given.next(), given.next()) else { return false };
    let Some((scheme, given)) = given.as_bytes().split_at_checked("Bearer ".len()) else {
        return false;
    };
    scheme.eq_ignore_ascii_case(b"Bearer ") && token.is(given)
}

fn is_loopback(address: IpAddr) -> bool {
    address.to_canonical().is_loopback()
}

/// Whether a host is this machine by a name that nobody else can give out.
fn is_this_machine(host: &str) -> bool {
    host.eq_ignore_ascii_case("localhost") || address(host).is_some_and(is_loopback)
}

/// The address that stands in a host's place, IPv6 in brackets.
fn address(host: &str) -> Option<IpAddr> {
    let bare = host.strip_prefix('[').and_then(|host| host.strip_suffix(']'));
    bare.unwrap_or(host).parse().ok()
}
