//! Accepts connections and serves them, within limits: how many, and how long each is waited for.
//! A request that does not name one host is answered 400 (RFC 9112, 3.2).
//!
//! Routes are none of its business. A client that does not read its answer is not timed out, and
//! who opens all connections again and again keeps others waiting: a limit for each address is for
//! what stands in front. Invariant: open connections <= `Limits::connections`.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::pin::pin;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::extract::ConnectInfo;
use axum::http::header::{CONNECTION, HOST};
use axum::http::uri::Authority;
use axum::http::{HeaderValue, StatusCode, Version};
use axum::response::{IntoResponse as _, Response};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{Semaphore, watch};
use tokio::task::{JoinHandle, JoinSet};
use tower::ServiceExt as _;

use super::patience::Patient;
use crate::forward;

/// Descriptors that one connection may take: its own, one to the upstream, and the far end of that
/// where the upstream is in this process.
const DESCRIPTORS: usize = 3;
/// Connections that operators have at once, where they have an address of their own: a Prometheus
/// or two, probes, a browser. Each takes one descriptor.
pub(crate) const OPERATORS: usize = 16;
/// Descriptors that are kept for everything else, operators among it.
const DESCRIPTORS_SPARE: usize = 48;

/// What becomes of connections, one after the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Phase {
    /// They are accepted, and kept between requests.
    Serving,
    /// They are accepted, and each ends with its next answer.
    Draining,
    /// None is accepted, and those that are idle are closed.
    Ending,
}

/// What clients may take.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// How long a body that does not go on is waited for.
    pub(crate) body_patience: Duration,
    /// How long the head of a request is waited for, and so how long a connection may be idle.
    pub(crate) head_patience: Duration,
    /// Open connections at once; others wait to be accepted.
    pub(crate) connections: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            body_patience: Duration::from_secs(10),
            head_patience: Duration::from_secs(10),
            connections: 512,
        }
    }
}

impl Limits {
    /// With as many connections at most as there are descriptors for.
    pub(crate) fn within_descriptors(self) -> Self {
        let files = std::fs::read_to_string("/proc/self/limits").unwrap_or_default();
        let found = connections_within(&files).unwrap_or(usize::MAX);
        if found < self.connections {
            let (wanted, connections) = (self.connections, found);
            tracing::warn!(wanted, connections, "fewer connections: there are few descriptors");
        }
        Self { connections: self.connections.min(found), ..self }
    }
}

/// The connections that the descriptors of `/proc/self/limits` are enough for; `None` where it
/// states no number.
pub(crate) fn connections_within(limits: &str) -> Option<usize> {
    let line = limits.lines().find_map(|line| line.strip_prefix("Max open files"))?;
    let files: usize = line.split_whitespace().next()?.parse().ok()?;
    Some((files.saturating_sub(DESCRIPTORS_SPARE) / DESCRIPTORS).max(1))
}

/// Accepts connections until they are to end, then waits for those that are open. Without limits it
/// trusts its clients.
pub(crate) fn serve(
    listener: TcpListener,
    routes: Router,
    limits: Option<Limits>,
    mut phase: watch::Receiver<Phase>,
) -> JoinHandle<()> {
    let most = limits.map_or(Semaphore::MAX_PERMITS, |limits| limits.connections);
    let places = Arc::new(Semaphore::new(most.min(Semaphore::MAX_PERMITS)));
    tokio::spawn(async move {
        let mut open = JoinSet::new();
        loop {
            let accept = async {
                let place = places.clone().acquire_owned().await;
                (place, listener.accept().await)
            };
            let (place, accepted) = tokio::select! {
                // An error means that the sender is gone, which ends the server as well.
                _ = phase.wait_for(|phase| *phase == Phase::Ending) => break,
                accepted = accept => accepted,
            };
            // Those that have ended are forgotten, so that the set is no larger than what is open.
            while open.try_join_next().is_some() {}
            match accepted {
                Ok((stream, from)) => {
                    let served = connection(stream, from, routes.clone(), limits, phase.clone());
                    open.spawn(async move {
                        let _place = place;
                        served.await;
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "a connection was not accepted");
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
    stream: TcpStream,
    from: SocketAddr,
    routes: Router,
    limits: Option<Limits>,
    mut phase: watch::Receiver<Phase>,
) {
    let now = phase.clone();
    let service = service_fn(move |mut request: hyper::Request<hyper::body::Incoming>| {
        request.extensions_mut().insert(ConnectInfo(from));
        let names_one_host = names_one_host(&request);
        let request = request.map(|body| match limits {
            Some(limits) => Body::new(Patient::new(body, limits.body_patience)),
            None => Body::new(body),
        });
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
    });
    let connection = http1::Builder::new()
        .max_buf_size(forward::BUFFER_MAX)
        .timer(TokioTimer::new())
        .header_read_timeout(limits.map(|limits| limits.head_patience))
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

/// The answer, after which the connection ends; the client is told.
fn closing(mut answer: Response) -> Response {
    answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("close"));
    answer
}

/// Whether a request names its host as HTTP/1.1 has it: once, and with a host. In HTTP/1.0 it need
/// not.
fn names_one_host<B>(request: &hyper::Request<B>) -> bool {
    let mut named = request.headers().get_all(HOST).iter();
    let Some(host) = named.next() else { return request.version() < Version::HTTP_11 };
    let is_host = |host: &Authority| !host.host().is_empty() && !host.as_str().contains('@');
    let host = host.to_str().ok().and_then(|host| host.parse().ok());
    named.next().is_none() && host.as_ref().is_some_and(is_host)
}
