//! Accepts connections and serves them, within limits of number and time. A request that does not
//! name exactly one host is answered with 400 (RFC 9112, 3.2).
//!
//! When all connections are open, or memory is short, `lowtide::service::Connections` closes those
//! that make no progress. It knows no routes, and sets no limit per address: put one in front.
//! Invariant: open connections <= `Limits::connections`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::header::{CONNECTION, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, Version};
use axum::response::{IntoResponse as _, Response};
use clap::Args;
use hyper::body::Incoming;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use lowtide::ByteSize;
use lowtide::admission::Admission;
use lowtide::service::{Connection, ConnectionBody, ConnectionStream, Connections};
use tokio::net::TcpListener;
use tokio::sync::watch;
use tokio::task::{JoinHandle, JoinSet};
use tower::{ServiceExt as _, service_fn};

use crate::forward;

/// The descriptors that one connection may use: its own, one to the upstream, and the far end of
/// that if the upstream is in this process. A quarter as many may wait for a place.
const DESCRIPTORS: usize = 3;
/// The connections that operators may have at once, if they have a separate address: one or two
/// Prometheus servers, probes, a browser. Each uses one descriptor.
pub(crate) const OPERATORS: usize = 16;
/// Descriptors that are kept for everything else, operators among it.
const DESCRIPTORS_SPARE: usize = 48;
/// The buffers of a client's connection, one to read into and one to write from.
const BUFFERS: ByteSize = ByteSize::of(2 * forward::BUFFER_MAX);

/// The phases of the server, in order.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// Connections are accepted, and kept between requests.
    Serving,
    /// Connections are accepted, and each ends with its next response.
    Draining,
    /// No connection is accepted, and idle ones are closed.
    Ending,
}

/// The limits for clients.
#[derive(Clone, Copy, Debug, Args)]
pub(crate) struct Limits {
    /// Longest pause in a request body (408) or in a response that the client takes; both must also
    /// keep up 16 KiB/s on average.
    #[arg(long, env = "PROXY_BODY_TIMEOUT", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    pub(crate) body_timeout: Duration,
    /// Timeout for the head of a request, and so for an idle connection.
    #[arg(long, env = "PROXY_HEAD_TIMEOUT", value_parser = humantime::parse_duration)]
    #[arg(default_value = "10s")]
    pub(crate) head_timeout: Duration,
    /// Most connections at once. For a further one, the connection without progress for the longest
    /// time is closed, if that is 1 s; else the new one is, after 1 s. Each uses up to 3 file
    /// descriptors, and a quarter as many may wait: no more than (`ulimit -n` - 48) / 3.25.
    #[arg(long, env = "PROXY_CONNECTIONS", default_value = "512", value_parser = connections)]
    pub(crate) connections: usize,
}

fn connections(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(count) if count > 0 => Ok(count),
        _ => Err("expected a number above 0".to_owned()),
    }
}

impl Limits {
    /// With as many connections at most as there are descriptors for.
    pub(crate) fn within_descriptors(self) -> Self {
        let files = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let found = connections_within(&files).unwrap_or(usize::MAX);
        if found < self.connections {
            let (wanted, connections) = (self.connections, found);
            tracing::warn!(
                wanted,
                connections,
                "too few file descriptors: using fewer connections"
            );
        }
        Self { connections: self.connections.min(found), ..self }
    }
}

/// Returns the number of connections for which the descriptors of `/proc/self/limits` suffice;
/// `None` if it states no number.
pub(crate) fn connections_within(limits: &str) -> Option<usize> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let files: usize = line.split_whitespace().next()?.parse().ok()?;
    Some((4 * files.saturating_sub(DESCRIPTORS_SPARE) / (4 * DESCRIPTORS + 1)).max(1))
}

/// Accepts connections until they are to end, then waits for those that are open. Without limits it
/// trusts its clients.
pub(crate) fn serve(
    listener: TcpListener,
    routes: Router,
    limits: Option<Limits>,
    admission: &Admission,
    mut phase: watch::Receiver<Phase>,
) -> JoinHandle<()> {
    let most = limits.map_or(usize::MAX, |limits| limits.connections);
    let connections = Connections::new(admission, most).with_estimate(BUFFERS);
    let mut listener = connections.listen(listener);
    tokio::spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let accepted = tokio::select! {
                // An error means that the sender is gone, which ends the server as well.
                _ = phase.wait_for(|phase| *phase == Phase::Ending) => break,
                accepted = listener.accept() => accepted,
            };
            // Finished tasks are removed, so that the set is no larger than the open connections.
            while open.try_join_next().is_some() {}
            match accepted {
                Ok((place, stream, from)) => {
                    let (routes, phase) = (routes.clone(), phase.clone());
                    open.spawn(async move {
                        let served = connection(&place, stream, from, routes, limits, phase);
                        tokio::select! {
                            () = served => {}
                            () = place.closed() => {}
                        }
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    // Mostly a shortage of descriptors: some may close meanwhile.
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
        drop(listener);
        while open.join_next().await.is_some() {}
    })
}

/// Serves one connection; once it is to end, it does so after the request under way.
async fn connection(
    place: &Connection,
    stream: ConnectionStream,
    from: SocketAddr,
    routes: Router,
    limits: Option<Limits>,
    mut phase: watch::Receiver<Phase>,
) {
    let now = phase.clone();
    let service = place.service(service_fn(move |mut request: hyper::Request<_>| {
        request.extensions_mut().insert(ConnectInfo(from));
        let names_one_host = names_one_host(&request);
        let request = request.map(Body::new::<ConnectionBody<Incoming>>);
        let (routes, now) = (routes.clone(), now.clone());
        async move {
            if !names_one_host {
                return Ok(closing(
                    (StatusCode::BAD_REQUEST, "expected one Host header, with a host\n")
                        .into_response(),
                ));
            }
            let answer = routes.oneshot(request).await?;
            let is_last = *now.borrow() != Phase::Serving;
            Ok::<_, Infallible>(if is_last { closing(answer) } else { answer })
        }
    }));
    let service = hyper::service::service_fn(move |request| service.clone().oneshot(request));
    let connection = http1::Builder::new()
        .max_buf_size(forward::BUFFER_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(limits.map(|limits| limits.head_timeout))
        .serve_connection(TokioIo::new(stream), service);
    let mut connection = pin!(connection);
    // A broken connection is the client's affair.
    tokio::select! {
        _ = connection.as_mut() => return,
        _ = phase.wait_for(|phase| *phase == Phase::Ending) => {}
    }
    connection.as_mut().graceful_shutdown();
    let _ = connection.await;
}

/// Marks a response as the last of its connection.
fn closing(mut answer: Response) -> Response {
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer
}

/// Returns `true` if a request names its host as HTTP/1.1 requires: once, and with a host. HTTP/1.0
/// does not require it.
fn names_one_host<B>(request: &hyper::Request<B>) -> bool {
    let mut named = request.headers().get_all(HOST).iter();
    let Some(host) = named.next() else { return request.version() < Version::HTTP_11 };
    let is_host = |host: &Authority| !host.host().is_empty() && !host.as_str().contains('@');
    let host = host.to_str().ok().and_then(|host| host.parse().ok());
    named.next().is_none() && host.as_ref().is_some_and(is_host)
}
