//! Honest clients: requests at a fixed rate, whether or not the last ones were answered.
//!
//! A request is served if its whole answer, with status 200, has arrived within [`PATIENCE`]. None
//! is sent twice.

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{Request, StatusCode};
use http_body_util::{BodyExt as _, Full};
use hyper::client::conn::{http1, http2};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lowtide::BoxError;
use tokio::net::TcpStream;
use tokio::sync::Mutex;
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval, timeout};

/// The time between two requests: 20 a second.
const PERIOD: Duration = Duration::from_millis(50);
/// The longest time for a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// The clients that keep their connections.
const KEPT: usize = 10;

/// The requests of honest clients.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// Texts of 124 KiB for the proxy's own upstream, each on a new connection.
    Words,
    /// Texts for the proxy's model, each on a new connection.
    Embed,
    /// Bodies of 248 KiB over HTTP/2, each on a new connection.
    Http2,
    /// Bodies of 248 KiB over HTTP/2, by clients that keep their connections.
    Http2Kept,
}

/// What came of requests.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Tally {
    pub(crate) sent: u32,
    pub(crate) served: u32,
}

impl Tally {
    /// Returns the served part.
    pub(crate) fn part(self) -> f64 {
        f64::from(self.served) / f64::from(self.sent.max(1))
    }
}

/// A connection that its client keeps.
type Kept = Mutex<Option<http2::SendRequest<Full<Bytes>>>>;

/// The connections that clients keep.
pub(crate) type AllKept = Arc<[Kept; KEPT]>;

/// Sends requests for this long, and waits for their answers.
pub(crate) async fn drive(to: SocketAddr, kind: Kind, lasts: Duration) -> Tally {
    drive_with(to, kind, lasts, &AllKept::default()).await
}

/// Like [`drive`], by clients that have these connections.
pub(crate) async fn drive_with(
    to: SocketAddr,
    kind: Kind,
    lasts: Duration,
    kept: &AllKept,
) -> Tally {
    let mut ticks = interval(PERIOD);
    ticks.set_missed_tick_behavior(MissedTickBehavior::Burst);
    let mut asked = JoinSet::new();
    let mut tally = Tally::default();
    for nth in 0..usize::try_from(lasts.as_millis() / PERIOD.as_millis()).unwrap_or_default() {
        ticks.tick().await;
        tally.sent += 1;
        let kept = Arc::clone(kept);
        asked.spawn(async move {
            let answered = timeout(PATIENCE, ask(to, kind, &kept[nth % KEPT])).await;
            matches!(answered, Ok(Ok(StatusCode::OK)))
        });
    }
    while let Some(served) = asked.join_next().await {
        tally.served += u32::from(served.unwrap_or_default());
    }
    tally
}

async fn ask(to: SocketAddr, kind: Kind, kept: &Kept) -> Result<StatusCode, BoxError> {
    let text = "the sea draws back and returns ";
    let (path, body) = match kind {
        Kind::Words => ("/words", text.repeat(4096)),
        Kind::Embed => ("/embed", serde_json::json!({ "texts": [text.repeat(4)] }).to_string()),
        Kind::Http2 | Kind::Http2Kept => ("/work", text.repeat(8192)),
    };
    let request = Request::post(format!("http://{to}{path}"))
        .header("host", to.to_string())
        .header("content-type", "application/json")
        .body(Full::from(body))?;
    let response = match kind {
        Kind::Words | Kind::Embed => {
            let io = TokioIo::new(TcpStream::connect(to).await?);
            let (mut sender, connection) = http1::handshake(io).await?;
            tokio::spawn(connection);
            let response = sender.send_request(request).await?;
            let status = response.status();
            response.into_body().collect().await?;
            return Ok(status);
        }
        Kind::Http2 => connect(to).await?.send_request(request).await?,
        Kind::Http2Kept => {
            let mut kept = kept.lock().await;
            let mut sender = match kept.take().filter(|sender| !sender.is_closed()) {
                Some(sender) => sender,
                None => connect(to).await?,
            };
            *kept = Some(sender.clone());
            drop(kept);
            sender.send_request(request).await?
        }
    };
    let status = response.status();
    response.into_body().collect().await?;
    Ok(status)
}

async fn connect(to: SocketAddr) -> Result<http2::SendRequest<Full<Bytes>>, BoxError> {
    let io = TokioIo::new(TcpStream::connect(to).await?);
    let (sender, connection) = http2::handshake(TokioExecutor::new(), io).await?;
    tokio::spawn(connection);
    Ok(sender)
}
