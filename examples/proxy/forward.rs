//! Forwarding: a request goes to the upstream and its response comes back, both streamed.
//!
//! It buffers only as much as the connection needs, follows no redirect and retries nothing.
//! Hop-by-hop headers (RFC 9110, 7.6.1) are dropped. The client's address, the requested host and
//! the scheme are added, replacing the client's own values, and load reports of the upstream are
//! dropped. An upstream that fails is answered with
//! 502 and the reason, one that hangs with 504; an aborted request body with 400. It is not a
//! tunnel: CONNECT is refused, and a request to upgrade is forwarded as a plain one.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::time::Duration;

use axum::body::{Body, Bytes, HttpBody as _};
use axum::extract::Request;
use axum::http::header::{
    CONNECTION, CONTENT_LENGTH, EXPECT, FORWARDED, HOST, HeaderName, HeaderValue,
    PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{HeaderMap, Method, StatusCode, Uri, Version};
use axum::response::{IntoResponse, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

use crate::app::silence::{Answered, Asked, ClientFault, Silence, Silent};

/// The timeout for a connection to the upstream.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// The time that an idle connection to the upstream is kept.
const KEEP_IDLE: Duration = Duration::from_secs(15);

/// The buffer of a connection at most. hyper's own bound is 408 KiB, which a connection that has
/// once carried a large body keeps while it is idle: memory that no request reserves.
pub(crate) const BUFFER_MAX: usize = 32 << 10;

/// ORCA load reports, in heads and in trailers.
const LOAD_REPORTS: [&str; 2] = ["endpoint-load-metrics", "endpoint-load-metrics-bin"];
/// The addresses on the way, the client's own words first: only what proxies added is known.
const FORWARDED_FOR: &str = "x-forwarded-for";
const REAL_IP: &str = "x-real-ip";
/// The headers of one connection (RFC 9110, 7.6.1), and those that stand for such ones.
static OF_CONNECTION: [HeaderName; 8] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    HeaderName::from_static("proxy-connection"),
    TE,
    TRANSFER_ENCODING,
    UPGRADE,
];

/// The way to the upstream.
#[derive(Clone, Debug)]
pub(crate) struct Forward {
    client: Client<HttpConnector, Body>,
    authority: Authority,
    /// The prefix of each request's path, without a trailing slash.
    base_path: String,
    response_timeout: Option<Duration>,
}

impl Forward {
    /// Creates the forwarder to `http://host:port[/path]`; the error describes the expected form of
    /// the address.
    pub(crate) fn new(upstream: &Uri) -> Result<Self, String> {
        let expected = || {
            format!(
                "invalid upstream {upstream}: expected an address such as http://host:port/path"
            )
        };
        let authority = upstream.authority().cloned().ok_or_else(expected)?;
        let strange = upstream.query().is_some() || authority.as_str().contains('@');
        if upstream.scheme() != Some(&Scheme::HTTP) || strange {
            return Err(expected());
        }
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT_PATIENCE));
        connector.set_nodelay(true);
        let client = Client::builder(TokioExecutor::new())
            .pool_timer(TokioTimer::new())
            .pool_idle_timeout(KEEP_IDLE)
            .http1_max_buf_size(BUFFER_MAX)
            .build(connector);
        let base_path = upstream.path().trim_end_matches('/').to_owned();
        Ok(Self { client, authority, base_path, response_timeout: None })
    }

    /// With a bound on how long the upstream may keep a request waiting; `None` for no bound.
    pub(crate) fn with_response_timeout(self, response_timeout: Option<Duration>) -> Self {
        Self { response_timeout, ..self }
    }

    /// Sends the request on and gives the answer back.
    pub(crate) async fn forward(&self, mut request: Request, from: Option<SocketAddr>) -> Response {
        if request.method() == Method::CONNECT {
            let text = "CONNECT is not supported: this proxy is not a tunnel\n";
            return (StatusCode::NOT_IMPLEMENTED, text).into_response();
        }
        let Some(target) = self.target(request.uri()) else {
            return (StatusCode::BAD_REQUEST, "this path cannot be forwarded\n").into_response();
        };
        let asked = std::mem::replace(request.uri_mut(), target);
        *request.version_mut() = Version::HTTP_11;
        prepare(request.headers_mut(), asked.authority(), from);
        // Without a word of it the client library sends no body with GET and HEAD.
        let is_announced = request.headers().contains_key(CONTENT_LENGTH);
        if !is_announced && !request.body().is_end_stream() {
            let chunked = HeaderValue::from_static("chunked");
            request.headers_mut().insert(TRANSFER_ENCODING, chunked);
        }
        let silence = Silence::new(self.response_timeout);
        let request = request.map(|body| Body::new(Asked::new(body, silence.clone())));
        let answer = tokio::select! {
            answer = self.client.request(request) => answer,
            silent = silence.passed() => return self.silent(silent),
        };
        match answer {
            Ok(answer) if answer.status() == StatusCode::SWITCHING_PROTOCOLS => {
                self.failed("it switched protocols without a request to do so")
            }
            Ok(answer) => answer_back(
                answer.map(|body| Body::new(Answered::new(body, silence, drop_load_report))),
            ),
            Err(error) => match ClientFault::of(&error) {
                Some(fault) => broken_off(fault),
                None => self.failed(&whole(&error)),
            },
        }
    }

    fn silent(&self, silent: Silent) -> Response {
        tracing::warn!(cause = %silent, upstream = %self.authority, "upstream failed");
        let text = format!("{}: {silent}\n", self.authority);
        (StatusCode::GATEWAY_TIMEOUT, text).into_response()
    }

    fn failed(&self, cause: &str) -> Response {
        tracing::warn!(cause, upstream = %self.authority, "upstream failed");
        let text = format!("the upstream {} failed: {cause}\n", self.authority);
        (StatusCode::BAD_GATEWAY, text).into_response()
    }

    fn target(&self, asked: &Uri) -> Option<Uri> {
        let path = asked.path_and_query().map_or("/", PathAndQuery::as_str);
        Uri::builder()
            .scheme(Scheme::HTTP)
            .authority(self.authority.clone())
            .path_and_query(format!("{}{path}", self.base_path))
            .build()
            .ok()
    }
}

/// The answer to a client that sent no whole request, if it is still there. Not a warning: nothing
/// of the proxy failed, and clients should not fill the log.
fn broken_off(fault: &ClientFault) -> Response {
    let text = whole(fault);
    tracing::debug!(cause = text, "client request ended early");
    (StatusCode::BAD_REQUEST, format!("{text}\n")).into_response()
}

/// Returns the message of an error and of all its sources.
pub(crate) fn whole(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(error.source(), |cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

/// Prepares the headers for the upstream; the client library sets its host. `asked` is the host in
/// the request line, which takes precedence over the header (RFC 9112, 3.2.2).
fn prepare(headers: &mut HeaderMap, asked: Option<&Authority>, from: Option<SocketAddr>) {
    let trailers = headers.get_all(TE).iter().any(|value| value == "trailers");
    drop_connection_headers(headers);
    if trailers {
        // Ours now, and so is the word that it is for this connection alone.
        headers.insert(TE, HeaderValue::from_static("trailers"));
        headers.insert(CONNECTION, HeaderValue::from_static("te"));
    }
    // Answered here: the client library sends the body whatever the upstream says.
    headers.remove(EXPECT);
    drop_claims(headers);
    let host = headers.remove(HOST);
    if let Some(host) = asked.and_then(|asked| asked.as_str().parse().ok()).or(host) {
        headers.insert("x-forwarded-host", host);
    }
    headers.insert("x-forwarded-proto", HeaderValue::from_static("http"));
    let Some(from) = from else { return };
    if let Ok(from) = HeaderValue::try_from(from.ip().to_string()) {
        headers.insert(REAL_IP, from);
    }
    // One line: some read the first alone, which would be the client's own.
    let before = headers.get_all(FORWARDED_FOR).iter().filter_map(|value| value.to_str().ok());
    let chain: String = before.map(|value| format!("{value}, ")).collect();
    if let Ok(chain) = HeaderValue::try_from(format!("{chain}{}", from.ip())) {
        headers.insert(FORWARDED_FOR, chain);
    }
}

/// Drops what a client wrote of itself in the place of proxies, but for the chain of addresses: an
/// upstream that makes links, decisions or log lines of it would believe it.
fn drop_claims(headers: &mut HeaderMap) {
    let is_claim = |name: &HeaderName| {
        let is_named_so = name.as_str().starts_with("x-forwarded-") && *name != FORWARDED_FOR;
        is_named_so || *name == REAL_IP || *name == FORWARDED
    };
    let claims: Vec<HeaderName> = headers.keys().filter(|name| is_claim(name)).cloned().collect();
    for name in claims {
        headers.remove(name);
    }
}

/// Drops a load report of the upstream, which a load balancer would take for the proxy's.
fn drop_load_report(headers: &mut HeaderMap) {
    for name in LOAD_REPORTS {
        headers.remove(name);
    }
}

/// The answer as the client is to see it.
fn answer_back(mut answer: Response) -> Response {
    drop_connection_headers(answer.headers_mut());
    drop_load_report(answer.headers_mut());
    // Each connection speaks its own version.
    *answer.version_mut() = Version::HTTP_11;
    if answer.body().is_end_stream() && !answer.headers().contains_key(CONTENT_LENGTH) {
        // Of no stated length: to HEAD, or 304, or 204. None is made up here.
        let empty = futures_util::stream::empty::<Result<Bytes, Infallible>>();
        *answer.body_mut() = Body::from_stream(empty);
    }
    answer
}

/// Drops what belongs to one connection, and what `Connection` names. Where both framings stand
/// the length counts for nothing, and must not go on (RFC 9112, 6.3).
fn drop_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    if headers.contains_key(TRANSFER_ENCODING) {
        headers.remove(CONTENT_LENGTH);
    }
    for name in named.iter().chain(&OF_CONNECTION) {
        headers.remove(name);
    }
}
