//! Requests over HTTP.

use axum::body::Body;
use bytes::Bytes;
use http::request::Builder;
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use hyper_util::client::legacy::{Client, connect::HttpConnector};
use hyper_util::rt::TokioExecutor;
use lowtide::BoxError;
use serde_json::Value;
use tokio::time::Instant;

/// A client that keeps connections open.
pub type Http = Client<HttpConnector, Body>;

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
    body: impl Into<Body>,
) -> Result<(StatusCode, Bytes), BoxError> {
    let response = http.request(request.body(body.into())?).await?;
    let status = response.status();
    Ok((status, response.into_body().collect().await?.to_bytes()))
}

/// Posts JSON. Returns the status of the answer, `None` without one, and the milliseconds that it
/// took.
pub async fn post(http: &Http, url: &str, body: impl Into<Body>) -> (Option<StatusCode>, f64) {
    let begun = Instant::now();
    let request = Request::post(url).header("content-type", "application/json");
    let status = send(http, request, body).await.ok().map(|(status, _)| status);
    (status, begun.elapsed().as_secs_f64() * 1e3)
}

/// Returns the answer to a `GET`, which must be a good one.
pub async fn get(http: &Http, url: &str) -> Result<String, BoxError> {
    let (status, body) = send(http, Request::get(url), ()).await?;
    let body = String::from_utf8_lossy(&body).into_owned();
    if status.is_success() { Ok(body) } else { Err(format!("{url}: {status}: {body}").into()) }
}

/// Returns the JSON of such an answer.
pub async fn get_json(http: &Http, url: &str) -> Result<Value, BoxError> {
    Ok(serde_json::from_str(&get(http, url).await?)?)
}
