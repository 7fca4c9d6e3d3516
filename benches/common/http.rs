//! Requests over HTTP.

use bytes::Bytes;
use http::request::Builder;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use lowtide::BoxError;

/// A client that keeps connections open.
pub type Http = Client<HttpConnector, Full<Bytes>>;

pub fn client() -> Http {
    client_of(false)
}

/// A client that sends no request twice, over HTTP/1 or HTTP/2.
pub fn client_of(is_http2: bool) -> Http {
    let mut builder = Client::builder(TokioExecutor::new());
    builder.http2_only(is_http2).retry_canceled_requests(false).build_http()
}

/// Sends a request, and reads the whole answer.
pub async fn send(
    http: &Http,
    request: Builder,
    body: impl Into<Bytes>,
) -> Result<(StatusCode, Bytes), BoxError> {
    let response = http.request(request.body(Full::new(body.into()))?).await?;
    let status = response.status();
    Ok((status, response.into_body().collect().await?.to_bytes()))
}

/// Returns the answer to a `GET`, which must be a good one.
pub async fn get(http: &Http, url: &str) -> Result<String, BoxError> {
    let (status, body) = send(http, Request::get(url), Bytes::new()).await?;
    let body = String::from_utf8_lossy(&body).into_owned();
    if status.is_success() { Ok(body) } else { Err(format!("{url}: {status}: {body}").into()) }
}
