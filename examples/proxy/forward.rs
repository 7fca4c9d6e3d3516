//! Forwarding: a request goes to the upstream and its answer comes back, both as they stream.
//!
//! It buffers nothing but what the connection needs, follows no redirect and retries nothing.
//! Headers that belong to one connection (RFC 9110, 7.6.1) are dropped, the client's address is
//! added. A dead upstream is answered 502 with the reason.

use std::net::SocketAddr;
use std::time::Duration;

use axum::body::Body;
use axum::extract::Request;
use axum::http::header::{
    CONNECTION, HOST, HeaderName, HeaderValue, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, TE,
    TRAILER, TRANSFER_ENCODING, UPGRADE,
};
use axum::http::uri::{Authority, PathAndQuery, Scheme};
use axum::http::{HeaderMap, StatusCode, Uri, Version};
use axum::response::{IntoResponse, Response};
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::{TokioExecutor, TokioTimer};

/// How long a connection to the upstream may take to stand.
const CONNECT_PATIENCE: Duration = Duration::from_secs(5);
/// How long an idle connection to the upstream is kept.
const KEEP_IDLE: Duration = Duration::from_secs(15);

/// The buffer of a connection at most. hyper's own bound is 408 KiB, which a connection that has
/// once carried a large body keeps while it is idle: memory that no request books.
pub(crate) const BUFFER_MAX: usize = 32 << 10;

static KEEP_ALIVE: HeaderName = HeaderName::from_static("keep-alive");
static FORWARDED_FOR: HeaderName = HeaderName::from_static("x-forwarded-for");

/// The way to the upstream.
#[derive(Clone, Debug)]
pub(crate) struct Forward {
    client: Client<HttpConnector, Body>,
    authority: Authority,
    /// What stands before the path of each request; without a slash at its end.
    base_path: String,
}

impl Forward {
    /// The way to `http://host:port[/path]`; says what was expected of any other address.
    pub(crate) fn new(upstream: &Uri) -> Result<Self, String> {
        let expected = || format!("{upstream}: expected an address such as http://host:port/path");
        if upstream.scheme() != Some(&Scheme::HTTP) {
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
        Ok(Self {
            client,
            authority: upstream.authority().cloned().ok_or_else(expected)?,
            base_path: upstream.path().trim_end_matches('/').to_owned(),
        })
    }

    /// Sends the request on and gives the answer back.
    pub(crate) async fn forward(&self, mut request: Request, from: Option<SocketAddr>) -> Response {
        let Some(target) = self.target(request.uri()) else {
            return (StatusCode::BAD_REQUEST, "the path is none that can be forwarded\n")
                .into_response();
        };
        *request.uri_mut() = target;
        *request.version_mut() = Version::HTTP_11;
        drop_connection_headers(request.headers_mut());
        request.headers_mut().remove(HOST);
        if let Some(from) = from.and_then(|from| HeaderValue::try_from(from.ip().to_string()).ok())
        {
            request.headers_mut().append(&FORWARDED_FOR, from);
        }
        match self.client.request(request).await {
            Ok(answer) => {
                let mut answer = answer.map(Body::new);
                drop_connection_headers(answer.headers_mut());
                answer
            }
            Err(error) => {
                let cause = std::error::Error::source(&error).map(ToString::to_string);
                let cause = cause.unwrap_or_default();
                tracing::warn!(%error, cause, upstream = %self.authority, "the upstream failed");
                let text = format!("the upstream {} failed: {error}: {cause}\n", self.authority);
                (StatusCode::BAD_GATEWAY, text).into_response()
            }
        }
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

/// Drops what belongs to one connection, and what `Connection` names.
fn drop_connection_headers(headers: &mut HeaderMap) {
    let named: Vec<HeaderName> = headers
        .get_all(CONNECTION)
        .iter()
        .filter_map(|value| value.to_str().ok())
        .flat_map(|names| names.split(','))
        .filter_map(|name| name.trim().parse().ok())
        .collect();
    let fixed = [
        &CONNECTION,
        &KEEP_ALIVE,
        &PROXY_AUTHENTICATE,
        &PROXY_AUTHORIZATION,
        &TE,
        &TRAILER,
        &TRANSFER_ENCODING,
        &UPGRADE,
    ];
    for name in named.iter().chain(fixed) {
        headers.remove(name);
    }
}
