//! Attacks that hold memory or connections hostage, and what honest clients get meanwhile.
//!
//! A service runs as a child process with a limit of 256 MiB: the proxy of `examples/proxy`, or a
//! service of HTTP/2 ([`serve`]). Honest clients send requests at a fixed rate that it
//! serves, whether or not the last ones were answered, first alone and then under attack; the ratio
//! of both is the figure. A request is served if its whole answer, with status 200, arrives within
//! five seconds. None is sent twice.

use std::net::SocketAddr;
use std::pin::pin;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::DefaultBodyLimit;
use axum::routing::post;
use common::figures::{Figures, count};
use common::http::{Http, client, client_of, get_json, post as post_to};
use common::process::{Process, free_port, raise_descriptors};
use http::StatusCode;
use hyper_util::rt::{TokioExecutor, TokioIo};
use hyper_util::server::conn::auto;
use hyper_util::service::TowerToHyperService;
use lowtide::service::Connections;
use lowtide::{BoxError, ByteSize, Memory};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, Interest};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::Semaphore;
use tokio::task::JoinSet;
use tokio::time::{interval, sleep, timeout};

/// The limit of each service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// The least part of the goodput alone that honest clients get under attack.
const RATIO_MIN: f64 = 0.90;
/// The time for which honest clients are alone.
const ALONE: Duration = Duration::from_secs(5);
/// The connections that are offered at once.
const OFFERED: usize = 10_000;
/// The time between two honest requests: 20 a second.
const PERIOD: Duration = Duration::from_millis(50);
/// The longest time for a request.
const PATIENCE: Duration = Duration::from_secs(5);
/// The clients that keep their connections.
const KEPT: usize = 10;

/// The time for which an attack lasts.
const LASTS: Duration = Duration::from_secs(12);

/// The forms of attack: the name, the path that honest clients ask for, the number of attackers,
/// and what each does.
const FORMS: [(&str, &str, usize, Attack); 4] = [
    ("slow_bodies", "/words", 25, Attack::SlowBody),
    ("zero_window", "/work", 40, Attack::ZeroWindow),
    ("unread", "/words", 512, Attack::Unread("/bytes/1073741824")),
    ("hung_upstream", "/embed", 512, Attack::Unread("/")),
];

/// Runs the forms and adds their figures.
#[tokio::main]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    raise_descriptors()?;
    // Accepts and never answers.
    let hung = TcpListener::bind("127.0.0.1:0").await?;
    let hung_at = hung.local_addr()?;
    tokio::spawn(async move {
        let mut taken = Vec::new();
        while let Ok((stream, _)) = hung.accept().await {
            taken.push(stream);
        }
    });
    for (name, path, attackers, of) in FORMS {
        let upstream = (name == "hung_upstream").then_some(hung_at);
        let (mut service, to) = if path == "/work" { start()? } else { start_proxy(upstream)? };
        // What is loaded on first use is there.
        drive(to, path, Duration::from_secs(1), None).await;
        let alone = drive(to, path, ALONE, None).await;
        let _attackers: JoinSet<()> = (0..attackers).map(|nth| attack(nth, to, of)).collect();
        let attacked = drive(to, path, LASTS, None).await;
        show(name, alone, attacked, &mut service, figures);
    }
    Ok(())
}

/// Offers 10,000 connections and adds the figures: of clients that had connections before, and of
/// those that connect for each request.
#[tokio::main]
pub(crate) async fn measure_connections(figures: &mut Figures) -> Result<(), BoxError> {
    raise_descriptors()?;
    let (mut service, to) = start()?;
    if service.folder().is_none() {
        println!("no memory cgroup can be made here: the kernel kills nothing");
    }
    let kept: [Http; KEPT] = std::array::from_fn(|_| client_of(true));
    drive(to, "/work", Duration::from_secs(1), Some(&kept)).await;
    let alone = drive(to, "/work", ALONE, Some(&kept)).await;
    let _connections = send_heads(OFFERED, to);
    let attacked = drive(to, "/work", LASTS, Some(&kept));
    let (attacked, newcomers) = tokio::join!(attacked, drive(to, "/work", LASTS, None));
    show("h2", alone, attacked, &mut service, figures);
    figures.add("room.h2.newcomer_part", newcomers, "ratio");
    Ok(())
}

/// Starts the service of HTTP/2.
fn start() -> Result<(Process, SocketAddr), BoxError> {
    common::serve(&common::own(&["serve", "hostage"])?, LIMIT)
}

/// Starts the proxy, and waits until it accepts connections.
fn start_proxy(upstream: Option<SocketAddr>) -> Result<(Process, SocketAddr), BoxError> {
    let at = free_port()?;
    let mut command = Command::new(common::build_proxy()?);
    command
        .args(["--listen", &at.to_string()])
        .args(upstream.map(|upstream| format!("--upstream=http://{upstream}")))
        .env("LOWTIDE_MEMORY_LIMIT", LIMIT.exact())
        .env("LOWTIDE_DEVICE", "host")
        .env("RUST_LOG", "error");
    let mut service = Process::start_in_group(&command, LIMIT)?;
    service.accepts(at)?;
    Ok((service, at))
}

/// Adds the figures of an attack.
fn show(name: &str, alone: f64, attacked: f64, service: &mut Process, figures: &mut Figures) {
    println!("{name}: {alone:.3} of the requests served alone, {attacked:.3} under attack");
    let ratio = attacked / alone.max(f64::MIN_POSITIVE);
    let of = if name == "h2" { "room.h2".to_owned() } else { format!("room.hostage.{name}") };
    let kills = u8::from(service.ended().is_some());
    figures.at_most(format!("{of}.kills"), kills.into(), "kills", 0.0);
    figures.at_least(format!("{of}.honest_ratio"), ratio, "ratio", RATIO_MIN);
}

/// Sends requests for this long, and waits for their answers. Returns the part that was served.
/// Clients connect for each request, unless these keep their connections.
async fn drive(to: SocketAddr, path: &'static str, lasts: Duration, kept: Option<&[Http]>) -> f64 {
    let text = "the sea draws back and returns ";
    let body = match path {
        "/words" => text.repeat(4096),
        "/embed" => serde_json::json!({ "texts": [text.repeat(4)] }).to_string(),
        _ => text.repeat(8192),
    };
    let body = bytes::Bytes::from(body);
    let (mut ticks, mut asked) = (interval(PERIOD), JoinSet::new());
    let sent = usize::try_from(lasts.as_millis() / PERIOD.as_millis()).unwrap_or_default();
    for nth in 0..sent {
        ticks.tick().await;
        let http = kept.map_or_else(|| client_of(path == "/work"), |kept| kept[nth % KEPT].clone());
        let (url, body) = (format!("http://{to}{path}"), body.clone());
        asked.spawn(async move {
            let answered = timeout(PATIENCE, post_to(&http, &url, body)).await;
            matches!(answered, Ok((Some(StatusCode::OK), _)))
        });
    }
    let served = asked.join_all().await.into_iter().filter(|served| *served).count();
    count(served as u64) / count(sent.max(1) as u64)
}

// A service of HTTP/1 and HTTP/2 behind the memory layer, in a process of its own.
//
// `POST /work` collects its body and answers with its length. `GET /large` answers with 1 MiB that
// lies in memory. It ends when it is killed.

/// The bytes of a large response.
const LARGE: usize = 1 << 20;

/// The connections at once, if they fit.
const CONNECTIONS: usize = 4096;
/// The bytes of request bodies that a connection may buffer, and each stream of it.
const CONNECTION_WINDOW: u32 = 128 << 10;
const STREAM_WINDOW: u32 = 64 << 10;
/// The bytes of a frame at most.
const FRAME: u32 = 16 << 10;
/// The requests of a connection at once.
const STREAMS: u32 = 32;

/// Serves at an address that it prints.
pub(crate) fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    // Estimates of bodies count, as in a service whose handlers reject what exceeds them.
    let work = Router::new()
        .route("/work", post(async |body: String| body.len().to_string()))
        .layer(DefaultBodyLimit::disable())
        .layer(memory.layer().without_slow_start());
    let large = Router::new()
        .route("/large", axum::routing::get(async || vec![b'.'; LARGE]))
        .layer(memory.layer());
    let routes = work.merge(large);
    let connections = Connections::new(memory.admission(), CONNECTIONS)
        .with_estimate(ByteSize::new((CONNECTION_WINDOW + FRAME).into()));
    crate::runtime()?.block_on(async {
        let listener = TcpListener::bind("127.0.0.1:0").await?;
        println!("{}", listener.local_addr()?);
        let mut listener = connections.listen(listener);
        loop {
            let Ok((connection, stream, _)) = listener.accept().await else { continue };
            let service = TowerToHyperService::new(connection.service(routes.clone()));
            tokio::spawn(async move {
                let mut builder = auto::Builder::new(TokioExecutor::new());
                builder
                    .http2()
                    .initial_stream_window_size(STREAM_WINDOW)
                    .initial_connection_window_size(CONNECTION_WINDOW)
                    .max_frame_size(FRAME)
                    .max_concurrent_streams(STREAMS);
                let served = builder.serve_connection(TokioIo::new(stream), service);
                let mut served = pin!(served);
                tokio::select! {
                    _ = served.as_mut() => return,
                    () = connection.closed() => return,
                    () = connection.ending() => served.as_mut().graceful_shutdown(),
                }
                tokio::select! {
                    _ = served => {}
                    () = connection.closed() => {}
                }
            });
        }
    })
}

// Clients that hold memory or connections and make no progress. Each connects again at once when
// it is ended. They speak HTTP/2 in prepared frames (RFC 9113).

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
    /// Announces the longest text that the proxy admits now, as it says, and sends it at just
    /// above 16 KiB/s. The attackers begin one after the other.
    SlowBody,
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
    loop {
        if hold(to, attack).await.is_err() {
            sleep(PAUSE).await;
        }
    }
}

/// Holds one connection until the service ends it.
async fn hold(to: SocketAddr, attack: Attack) -> Result<(), BoxError> {
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
        Attack::ZeroWindow => {
            // SETTINGS_INITIAL_WINDOW_SIZE
            stream.write_all(&preface(b"\0\x04\0\0\0\0")).await?;
            for id in (1..20).step_by(2) {
                // The head, which is the end of its stream too.
                stream.write_all(&head(id, 5, GET)).await?;
            }
            until_end(&mut stream).await?;
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
        let mut told = get_json(&client(), &format!("http://{to}/memory")).await?;
        let budget = told["host"]["budget"].take();
        let bytes = |key: &str| budget[key].as_u64().ok_or("the proxy publishes no allowance");
        let free = bytes("allowance_bytes")?.saturating_sub(bytes("reserved_bytes")?);
        // The proxy reserves ten times a text's length, 256 KiB for it, and 128 KiB to forward it.
        let longest = free.saturating_sub(512 << 10) / 10;
        if longest >= TEXT_MIN {
            return Ok(longest);
        }
        sleep(LOOK_EVERY).await;
    }
}

/// Connections that are opened at a time.
const AT_ONCE: usize = 256;

/// Opens connections of HTTP/2, each once, and keeps them. Each sends the head of one request with
/// a long header, and no body.
pub(crate) fn send_heads(count: usize, to: SocketAddr) -> JoinSet<Result<(), BoxError>> {
    let slots = Arc::new(Semaphore::new(AT_ONCE));
    let head = head(1, 4, &[POST, &[b'x'; LONG]].concat());
    let head: Arc<[u8]> = [preface(&[]), head].concat().into();
    let all = (0..count).map(|_| {
        let (slots, head) = (Arc::clone(&slots), Arc::clone(&head));
        async move {
            let slot = slots.acquire().await?;
            let mut stream = TcpStream::connect(to).await?;
            let _ = stream.write_all(&head).await;
            drop(slot);
            until_end(&mut stream).await
        }
    });
    all.collect()
}

/// Reads what comes, until the service ends the connection.
async fn until_end(stream: &mut TcpStream) -> Result<(), BoxError> {
    tokio::io::copy(stream, &mut tokio::io::sink()).await?;
    Err("the service ended the connection".into())
}

/// The bytes of the long header.
const LONG: usize = 8 << 10;
/// The heads of requests (RFC 7541): methods and http by their indexes, `:path` and `:authority` by
/// the indexes of their names. The last one ends in a header `x` whose value, of [`LONG`] bytes,
/// follows.
const GET: &[u8] = b"\x82\x86\x04\x06/large\x01\x01h";
const POST: &[u8] = b"\x83\x86\x04\x05/work\x01\x01h\0\x01x\x7f\x81\x3f";

/// Returns the preface of HTTP/2 with these settings.
fn preface(settings: &[u8]) -> Vec<u8> {
    let length = u8::try_from(settings.len()).unwrap_or_default();
    [b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\0\0", &[length][..], b"\x04\0\0\0\0\0", settings].concat()
}

/// Returns a frame with the head of a request on a stream.
fn head(stream: u8, flags: u8, block: &[u8]) -> Vec<u8> {
    let length = u32::try_from(block.len()).unwrap_or_default().to_be_bytes();
    [&length[1..], &[1, flags, 0, 0, 0, stream], block].concat()
}
