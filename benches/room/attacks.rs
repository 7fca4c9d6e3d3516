//! Clients that hold memory or connections and make no progress. Each connects again at once when
//! it is ended.

use std::convert::Infallible;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use futures_util::future::join_all;
use futures_util::{StreamExt as _, stream};
use http::Request;
use http_body_util::combinators::UnsyncBoxBody;
use http_body_util::{BodyExt as _, Empty, StreamBody};
use hyper::body::Frame;
use hyper::client::conn::http1;
use hyper::client::conn::http2::{Builder, SendRequest};
use hyper_util::rt::{TokioExecutor, TokioIo};
use lowtide::BoxError;
use tokio::io::{AsyncWriteExt as _, Interest};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

use crate::common::http::{client, get};

/// The bodies that a silent attacker announces: at most, and at least.
const BODY_MAX: usize = 8 << 20;
const BODY_MIN: usize = 16 << 10;
/// The least text that a slow attacker announces.
const TEXT_MIN: u64 = 64 << 10;
/// The time between the starts of two slow attackers.
const APART: Duration = Duration::from_millis(400);
/// The time between two looks for room.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The pause after an attempt that failed before a connection was open.
const PAUSE: Duration = Duration::from_millis(1);
/// The window of a stream, unless an attacker sets another one: HTTP/2's default.
const WINDOW: u32 = 65_535;

/// The behaviour of one attacker.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Attack {
    /// Announces the longest text that the proxy admits now, by its metrics, and sends it at just
    /// above 16 KiB/s. The attackers begin one after the other.
    SlowBody,
    /// Announces a body over HTTP/2, and sends none. It is half as long each time that it is
    /// refused, so that little room is left.
    SilentBody,
    /// Asks for ten responses over HTTP/2, and lets the server send none of them.
    ZeroWindow,
    /// Asks for this path, and reads nothing.
    Unread(&'static str),
}

/// Attacks for as long as it is polled.
pub(crate) async fn attack(nth: usize, to: SocketAddr, attack: Attack) {
    if matches!(attack, Attack::SlowBody) {
        sleep(u32::try_from(nth).unwrap_or_default() * APART).await;
    }
    let mut length = BODY_MAX;
    loop {
        if hold(to, attack, length).await.is_err() {
            sleep(PAUSE).await;
        }
        length = if length > BODY_MIN { length / 2 } else { BODY_MAX };
    }
}

/// Holds one connection until the service ends it.
async fn hold(to: SocketAddr, attack: Attack, length: usize) -> Result<(), BoxError> {
    match attack {
        Attack::SlowBody => {
            let pieces = stream::unfold((), async |()| {
                sleep(Duration::from_millis(50)).await;
                Some((Ok(Frame::data(Bytes::from_static(&[b' '; 900]))), ()))
            });
            let text = longest_text(to).await?;
            let stream = TokioIo::new(TcpStream::connect(to).await?);
            let (mut sender, connection) = http1::handshake(stream).await?;
            let _connection = driven(connection);
            let request = Request::post("/words").header("host", "h");
            let request = request.header("content-length", text).body(body(pieces))?;
            // Ends with the answer or the connection.
            sender.send_request(request).await?;
        }
        Attack::SilentBody => {
            let (mut sender, _connection) = connect(to, WINDOW).await?;
            let request = Request::post(format!("http://{to}/work"));
            let request = request.header("content-length", length).body(body(stream::pending()))?;
            // Ends with the answer or the connection.
            sender.send_request(request).await?;
        }
        Attack::ZeroWindow => {
            let (sender, mut connection) = connect(to, 0).await?;
            let asked = (0..10).map(|_| {
                let request = Request::get(format!("http://{to}/large"));
                let request = request.body(Empty::new().boxed_unsync());
                let mut sender = sender.clone();
                async move { Ok::<_, BoxError>(sender.send_request(request?).await?) }
            });
            let _unread = join_all(asked).await;
            connection.join_next().await;
        }
        Attack::Unread(path) => {
            let mut stream = TcpStream::connect(to).await?;
            let head = format!("GET {path} HTTP/1.1\r\nhost: h\r\n\r\n");
            stream.write_all(head.as_bytes()).await?;
            // An error, or both directions closed: a service that drops a connection with unread
            // bytes of the client resets it.
            let mut look = interval(Duration::from_millis(20));
            loop {
                look.tick().await;
                let ready = stream.ready(Interest::READABLE | Interest::ERROR).await?;
                if ready.is_read_closed() || ready.is_error() {
                    break;
                }
            }
        }
    }
    Ok(())
}

/// Waits until the proxy admits a text, and returns the length of the longest.
async fn longest_text(to: SocketAddr) -> Result<u64, BoxError> {
    loop {
        let text = get(&client(), &format!("http://{to}/metrics")).await?;
        let text = String::from_utf8_lossy(&text);
        let metric = |name| {
            let name = format!("lowtide_admission_{name}_bytes{{budget=\"host\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok())
        };
        let (allowance, reserved) = metric("allowance")
            .zip(metric("reserved"))
            .ok_or("the proxy publishes no allowance")?;
        // The proxy reserves ten times a text's length, 256 KiB for it, and 128 KiB to forward it.
        let longest = allowance.saturating_sub(reserved).saturating_sub(512 << 10) / 10;
        if longest >= TEXT_MIN {
            return Ok(longest);
        }
        sleep(LOOK_EVERY).await;
    }
}

type Body = UnsyncBoxBody<Bytes, Infallible>;
type Piece = Result<Frame<Bytes>, Infallible>;

fn body(pieces: impl stream::Stream<Item = Piece> + Send + 'static) -> Body {
    StreamBody::new(pieces.boxed()).boxed_unsync()
}

/// Opens a connection of HTTP/2 whose streams may receive so many bytes. It ends with the second
/// value, and that with it.
async fn connect(
    to: SocketAddr,
    window: u32,
) -> Result<(SendRequest<Body>, JoinSet<()>), BoxError> {
    let stream = TokioIo::new(TcpStream::connect(to).await?);
    let mut builder = Builder::new(TokioExecutor::new());
    let (sender, connection) = builder.initial_stream_window_size(window).handshake(stream).await?;
    Ok((sender, driven(connection)))
}

/// Drives a connection until the value ends.
fn driven(connection: impl Future<Output = hyper::Result<()>> + Send + 'static) -> JoinSet<()> {
    let mut driver = JoinSet::new();
    driver.spawn(async move { drop(connection.await) });
    driver
}

/// The bytes of the long header.
const LONG: usize = 8 << 10;
/// Connections that are opened at a time.
const AT_ONCE: usize = 256;

/// Opens connections of HTTP/2, each once, and keeps them. Each sends the head of one request with a
/// long header, and no body.
pub(crate) fn send_heads(count: usize, to: SocketAddr) -> JoinSet<Result<(), BoxError>> {
    let (slots, long) = (Arc::new(Semaphore::new(AT_ONCE)), "x".repeat(LONG));
    let all = (0..count).map(|_| {
        let (slots, long) = (Arc::clone(&slots), long.clone());
        async move {
            let slot = slots.acquire().await?;
            let (mut sender, mut connection) = connect(to, WINDOW).await?;
            drop(slot);
            let request = Request::post(format!("http://{to}/work")).header("x", long);
            let _ = sender.send_request(request.body(body(stream::pending()))?).await;
            connection.join_next().await;
            Ok(())
        }
    });
    all.collect()
}
