//! Clients that hold memory or connections and make no progress. Each connects again at once when
//! it is ended.

use std::future::pending;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use bytes::Bytes;
use futures_util::stream;
use http::Request;
use http_body::Frame;
use http_body_util::{Empty, StreamBody};
use hyper::client::conn::http2;
use hyper_util::rt::{TokioExecutor, TokioIo};
use lowtide::BoxError;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

/// The bodies that a silent attacker announces: at most, and at least.
const BODY_MAX: u64 = 8 << 20;
const BODY_MIN: u64 = 16 << 10;
/// The least text that a slow attacker announces.
const TEXT_MIN: u64 = 64 << 10;
/// The time between the starts of two slow attackers.
const APART: Duration = Duration::from_millis(400);
/// The time between two looks for room.
const LOOK_EVERY: Duration = Duration::from_millis(100);
/// The pause after an attempt that failed before a connection was open.
const PAUSE: Duration = Duration::from_millis(1);

/// The behaviour of one attacker.
#[derive(Clone, Debug)]
pub(crate) enum Attack {
    /// Announces the longest text that the proxy admits now, by its metrics, and sends it at just
    /// above 16 KiB/s. The attackers begin one after the other.
    SlowBody,
    /// Announces a body over HTTP/2, and sends none. It is half as long each time that it is
    /// refused, so that little room is left.
    SilentBody,
    /// Asks for ten responses over HTTP/2, and lets the server send none of them.
    ZeroWindow,
    /// Sends this head, and reads nothing.
    Unread(&'static str),
}

/// Attackers, which end with the value.
#[derive(Debug)]
pub(crate) struct Attackers {
    _all: JoinSet<()>,
    connections: Arc<AtomicU32>,
}

impl Attackers {
    /// Starts so many attackers.
    pub(crate) fn start(count: usize, to: SocketAddr, attack: &Attack) -> Self {
        let connections = Arc::new(AtomicU32::new(0));
        let all = (0..count).map(|nth| {
            let (attack, connections) = (attack.clone(), Arc::clone(&connections));
            async move {
                if matches!(attack, Attack::SlowBody) {
                    sleep(u32::try_from(nth).unwrap_or_default() * APART).await;
                }
                let mut length = BODY_MAX;
                loop {
                    if hold(to, &attack, length, &connections).await.is_err() {
                        sleep(PAUSE).await;
                    }
                    length = if length > BODY_MIN { length / 2 } else { BODY_MAX };
                }
            }
        });
        Self { _all: all.collect(), connections }
    }

    /// Returns the number of connections that were opened.
    pub(crate) fn connections(&self) -> u32 {
        self.connections.load(Ordering::Relaxed)
    }
}

/// Holds one connection until the service ends it.
async fn hold(
    to: SocketAddr,
    attack: &Attack,
    length: u64,
    connections: &AtomicU32,
) -> Result<(), BoxError> {
    let text = if matches!(attack, Attack::SlowBody) { longest_text(to).await? } else { 0 };
    let mut stream = TcpStream::connect(to).await?;
    connections.fetch_add(1, Ordering::Relaxed);
    match *attack {
        Attack::SlowBody => {
            let head = format!("POST /words HTTP/1.1\r\nhost: h\r\ncontent-length: {text}\r\n\r\n");
            stream.write_all(head.as_bytes()).await?;
            let (mut reader, mut writer) = stream.split();
            let pour = async {
                let mut ticks = interval(Duration::from_millis(50));
                loop {
                    ticks.tick().await;
                    if writer.write_all(&[b' '; 900]).await.is_err() {
                        return;
                    }
                }
            };
            let mut answer = [0; 512];
            tokio::select! {
                () = pour => {}
                _ = reader.read(&mut answer) => {}
            }
        }
        Attack::SilentBody => {
            let (mut sender, connection) =
                http2::handshake(TokioExecutor::new(), TokioIo::new(stream)).await?;
            let connection = tokio::spawn(connection);
            let silence = stream::once(pending::<Result<Frame<Bytes>, std::io::Error>>());
            let request = Request::post(format!("http://{to}/work"))
                .header("content-length", length)
                .body(StreamBody::new(Box::pin(silence)))?;
            let _answer = sender.send_request(request).await?;
            connection.abort();
        }
        Attack::ZeroWindow => {
            let (mut sender, connection) = http2::Builder::new(TokioExecutor::new())
                .initial_stream_window_size(0)
                .handshake(TokioIo::new(stream))
                .await?;
            let connection = tokio::spawn(connection);
            let mut answers = Vec::new();
            for _ in 0..10 {
                sender.ready().await?;
                let request = Request::get(format!("http://{to}/large"));
                let answer = sender.send_request(request.body(Empty::<Bytes>::new())?);
                answers.push(tokio::spawn(answer));
            }
            // Ends with the connection.
            let _ = connection.await;
        }
        Attack::Unread(head) => {
            stream.write_all(head.as_bytes()).await?;
            ended(&stream).await;
        }
    }
    Ok(())
}

/// Waits until the proxy admits a text, and returns the length of the longest.
async fn longest_text(to: SocketAddr) -> Result<u64, BoxError> {
    loop {
        let mut stream = TcpStream::connect(to).await?;
        let head = b"GET /metrics HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n";
        stream.write_all(head).await?;
        let mut text = String::new();
        stream.read_to_string(&mut text).await?;
        let metric = |name| {
            let name = format!("lowtide_admission_{name}_bytes{{budget=\"host\"}} ");
            text.lines().find_map(|line| line.strip_prefix(&name)?.parse::<u64>().ok())
        };
        let (Some(allowance), Some(reserved)) = (metric("allowance"), metric("reserved")) else {
            return Err("the proxy publishes no allowance".into());
        };
        // The proxy reserves ten times a text's length, 256 KiB for it, and 128 KiB to forward it.
        let longest = allowance.saturating_sub(reserved).saturating_sub(512 << 10) / 10;
        if longest >= TEXT_MIN {
            return Ok(longest);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Waits until the service has closed the connection, and reads nothing of what it sends.
async fn ended(stream: &TcpStream) {
    use tokio::io::Interest;
    // An error, or both directions closed: a service that drops a connection with unread bytes of
    // the client resets it.
    let mut look = interval(Duration::from_millis(20));
    loop {
        look.tick().await;
        let Ok(ready) = stream.ready(Interest::READABLE | Interest::ERROR).await else { return };
        if ready.is_read_closed() || ready.is_error() {
            return;
        }
    }
}

/// The bytes of the long header.
const LONG: usize = 8 << 10;

/// Connections of HTTP/2, each opened once and kept. Each sends the head of one request with a long
/// header, and no body.
#[derive(Debug)]
pub(crate) struct Heads {
    _all: JoinSet<()>,
    refused: Arc<AtomicU32>,
    opened: Arc<AtomicU32>,
}

impl Heads {
    /// Starts to connect, so many at a time.
    pub(crate) fn start(count: usize, at_once: usize, to: SocketAddr) -> Self {
        let (refused, opened) = (Arc::new(AtomicU32::new(0)), Arc::new(AtomicU32::new(0)));
        let slots = Arc::new(tokio::sync::Semaphore::new(at_once));
        let head: Arc<[u8]> = head().into();
        let all = (0..count).map(|_| {
            let (refused, opened) = (Arc::clone(&refused), Arc::clone(&opened));
            let (slots, head) = (Arc::clone(&slots), Arc::clone(&head));
            async move {
                let Ok(slot) = slots.acquire().await else { return };
                let stream = TcpStream::connect(to).await;
                let Ok(mut stream) = stream else { return };
                opened.fetch_add(1, Ordering::Relaxed);
                let _ = stream.write_all(&head).await;
                drop(slot);
                let mut answer = [0; 256];
                if !matches!(stream.read(&mut answer).await, Ok(1..)) {
                    refused.fetch_add(1, Ordering::Relaxed);
                    return;
                }
                while matches!(stream.read(&mut answer).await, Ok(1..)) {}
            }
        });
        Self { _all: all.collect(), refused, opened }
    }

    /// Returns the number of connections that were opened, and of those that the service closed
    /// before it sent a byte.
    pub(crate) fn counts(&self) -> (u32, u32) {
        (self.opened.load(Ordering::Relaxed), self.refused.load(Ordering::Relaxed))
    }
}

/// Returns the preface of HTTP/2, empty settings, and the head of `POST /work` on stream 1.
fn head() -> Vec<u8> {
    // RFC 7541: POST, http, `:path` and `:authority` by their index, and `x` by its name. The
    // length has a prefix of seven bits.
    let mut block = b"\x83\x86\x04\x05/work\x01\x01h\x00\x01x\x7f".to_vec();
    let mut rest = LONG - 127;
    while rest >= 128 {
        block.push(u8::try_from(rest % 128).unwrap_or_default() | 128);
        rest /= 128;
    }
    block.push(u8::try_from(rest).unwrap_or_default());
    block.resize(block.len() + LONG, b'x');
    // RFC 9113: settings, and headers that end the head and not the stream.
    let mut bytes = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0\0\x04\0\0\0\0\0".to_vec();
    let length = u32::try_from(block.len()).unwrap_or_default().to_be_bytes();
    bytes.extend(length.into_iter().skip(1).chain(*b"\x01\x04\0\0\0\x01").chain(block));
    bytes
}
