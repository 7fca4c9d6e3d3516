//! Clients that hold memory or connections and make no progress. Each connects again at once when
//! it is ended. They speak HTTP/2 in prepared frames (RFC 9113).

use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use common::http::{client, get};
use lowtide::BoxError;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::TcpStream;
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep};

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
    let text = if matches!(attack, Attack::SlowBody) { longest_text(to).await? } else { 0 };
    let mut stream = TcpStream::connect(to).await?;
    match attack {
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
            let length = length.to_string();
            stream.write_all(&preface(&[])).await?;
            stream.write_all(&request(1, "POST", "/work", ("content-length", &length))).await?;
            // Ends with the answer or the connection: headers, or a reset of either.
            while !matches!(frame(&mut stream).await?, 1 | 3 | 7) {}
        }
        Attack::ZeroWindow => {
            // SETTINGS_INITIAL_WINDOW_SIZE
            stream.write_all(&preface(b"\0\x04\0\0\0\0")).await?;
            for id in (1..20).step_by(2) {
                stream.write_all(&request(id, "GET", "/large", ("x", ""))).await?;
            }
            loop {
                frame(&mut stream).await?;
            }
        }
        Attack::Unread(path) => {
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

/// The bytes of the long header.
const LONG: usize = 8 << 10;
/// Connections that are opened at a time.
const AT_ONCE: usize = 256;

/// Opens connections of HTTP/2, each once, and keeps them. Each sends the head of one request with
/// a long header, and no body.
pub(crate) fn send_heads(count: usize, to: SocketAddr) -> JoinSet<Result<(), BoxError>> {
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    let long = "x".repeat(LONG);
    let head = [preface(&[]), request(1, "POST", "/work", ("x", &long))].concat();
    let head: Arc<[u8]> = head.into();
    let all = (0..count).map(|_| {
        let (slots, head) = (Arc::clone(&slots), Arc::clone(&head));
        async move {
            let slot = slots.acquire().await?;
            let mut stream = TcpStream::connect(to).await?;
            let _ = stream.write_all(&head).await;
            drop(slot);
            loop {
                frame(&mut stream).await?;
            }
        }
    });
    all.collect()
}

/// Reads a frame, and returns its type.
async fn frame(stream: &mut TcpStream) -> Result<u8, BoxError> {
    let mut head = [0; 9];
    stream.read_exact(&mut head).await?;
    let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
    tokio::io::copy(&mut stream.take(length.into()), &mut tokio::io::sink()).await?;
    Ok(head[3])
}

/// Returns the preface of HTTP/2 with these settings.
fn preface(settings: &[u8]) -> Vec<u8> {
    let length = u8::try_from(settings.len()).unwrap_or_default();
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", &[length][..], b"\x04\0\0\0\0\0", settings].concat()
}

/// Returns the head of a request on a stream, which a body may follow if it is a `POST`.
fn request(id: u8, method: &str, path: &str, header: (&str, &str)) -> Vec<u8> {
    // RFC 7541: methods and http by their indexes, `:path` and `:authority` by the indexes of their
    // names, and the header by its name.
    let mut block = if method == "POST" { b"\x83\x86".to_vec() } else { b"\x82\x86".to_vec() };
    for (name, value) in [(Ok(4), path), (Ok(1), "h"), (Err(header.0), header.1)] {
        match name {
            Ok(index) => block.push(index),
            Err(name) => {
                block.push(0);
                text(&mut block, name);
            }
        }
        text(&mut block, value);
    }
    let length = u32::try_from(block.len()).unwrap_or_default().to_be_bytes();
    // The end of the head; of the stream too, if there is no body.
    let flags = if method == "POST" { 4 } else { 5 };
    [&length[1..], &[1, flags, 0, 0, 0, id], &block].concat()
}

/// Adds a text with its length, which has a prefix of seven bits.
fn text(block: &mut Vec<u8>, text: &str) {
    let mut rest = text.len();
    if rest < 127 {
        block.extend(u8::try_from(rest));
    } else {
        block.push(127);
        rest -= 127;
        while rest >= 128 {
            block.extend(u8::try_from((rest % 128) | 128));
            rest /= 128;
        }
        block.extend(u8::try_from(rest));
    }
    block.extend(text.bytes());
}
