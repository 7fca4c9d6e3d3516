//! Streams: 400 clients whose answers last, and then stop reading while the answers grow.
//!
//! Each client sends a prompt of 100 kB and keeps its connection. Once all are open, each answer gets
//! a MiB in pieces, which its client does not read: together more than the limit. Short requests are
//! sent meanwhile. The service is one of axum under the memory layer and behind `Connections`, cold,
//! and nothing of its routes is known.
//!
//! Two more such services get 24 uploads at once, which their handler drops as they arrive: over as
//! many connections, and over one of HTTP/2, with short requests on the same one. One gets calls of
//! gRPC without a length, whose answers last, one calls whose requests last too, and one 20 bodies
//! that grow to 64 MiB when a layer outside admission unpacks them.

use std::convert::Infallible;
use std::io::Write as _;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::Body;
use axum::extract::{DefaultBodyLimit, State};
use axum::routing::{get, post};
use bytes::Bytes;
use common::figures::{Figures, count, part, quantile};
use common::http::{Http, client, client_of, get as get_from, post as post_to, send};
use flate2::Compression;
use flate2::write::GzEncoder;
use futures_util::StreamExt as _;
use futures_util::future::join_all;
use futures_util::stream::{empty, iter, pending, unfold};
use http::{Request, StatusCode};
use http_body_util::BodyExt as _;
use lowtide::service::{ConnectionApp, Connections, scope};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::Budget;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpSocket, TcpStream};
use tokio::sync::{mpsc, watch};
use tower_http::decompression::RequestDecompressionLayer;

use crate::cell::{Cell, LIMIT, Service};

const STREAMS: usize = 400;
const PROMPT: usize = 100_000;
/// What each answer grows by, and the size of a piece.
const GROWTH: usize = 1 << 20;
const PIECE: usize = 32 << 10;
/// The uploads at once, and the bytes of each.
const UPLOADS: u64 = 24;
const UPLOAD: usize = 16 << 20;
/// The calls of gRPC whose answers last, those whose requests last too, and those on a connection:
/// a server of hyper takes 200.
const CALLS: [usize; 2] = [300, 60];
const CALLS_EACH: usize = 100;
/// A frame of gRPC: no compression, the length, the message.
const FRAME: [u8; 5] = [0, 0, 1, 0, 0];
const MESSAGE: usize = 64 << 10;
const BOMBS: usize = 20;
const BOMB: usize = 64 << 20;
/// The kernel's buffers of a connection: those of the loopback hold 2.5 MiB, more than grows.
const KERNEL: u32 = 16 << 10;
/// The time between two pieces.
const PAUSE: Duration = Duration::from_millis(200);
/// The time for all streams to open, and for which they grow.
const PATIENCE: Duration = Duration::from_secs(10);

/// Serves until standard input ends.
pub(crate) async fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let grow = Arc::new(watch::Sender::new(false));
    let connections = Connections::new(memory.admission(), 2 * STREAMS);
    let app = Router::new()
        .route("/stream", post(stream))
        .route("/hello", post(async || "hello"))
        .route("/upload", post(upload))
        .route("/echo", post(async |body: Body| body))
        .route("/length", post(async |body: Bytes| body.len().to_string()))
        .layer(DefaultBodyLimit::disable())
        .layer(memory.layer())
        .layer(RequestDecompressionLayer::new())
        .route("/grow", get(async |State((_, grow)): State<Shared>| _ = grow.send_replace(true)))
        .route("/booked", get(booked))
        .with_state((memory, grow));
    let socket = TcpSocket::new_v4()?;
    socket.set_send_buffer_size(KERNEL)?;
    socket.bind((Ipv4Addr::LOCALHOST, 0).into())?;
    let listener = socket.listen(1024)?;
    println!("{}", listener.local_addr()?);
    let listener = connections.listen(listener);
    tokio::spawn(async { axum::serve(listener, ConnectionApp::new(app)).await });
    common::told_to_end().await
}

/// The service's memory, and the switch on which answers grow.
type Shared = (Memory, Arc<watch::Sender<bool>>);

/// Answers with a piece at once, and with a MiB in pieces once the switch is set.
async fn stream(State((_, grow)): State<Shared>, _prompt: Bytes) -> Body {
    let (sender, receiver) = mpsc::unbounded_channel();
    let mut grows = grow.subscribe();
    tokio::spawn(scope(async move {
        let _ = sender.send(Bytes::from_static(b"first"));
        if grows.wait_for(|grows| *grows).await.is_ok() {
            for _ in 0..GROWTH / PIECE {
                if sender.send(Bytes::from(vec![1; PIECE])).is_err() {
                    return;
                }
                tokio::time::sleep(PAUSE).await;
            }
            sender.closed().await;
        }
    }));
    Body::from_stream(unfold(receiver, async |mut receiver: mpsc::UnboundedReceiver<Bytes>| {
        receiver.recv().await.map(|data| (Ok::<_, BoxError>(data), receiver))
    }))
}

async fn upload(body: Body) -> String {
    body.into_data_stream().count().await.to_string()
}

/// Returns what requests hold, what they have reserved, and what they may reserve, in bytes; the
/// open streams; and the saturation.
async fn booked(State((memory, _)): State<Shared>) -> String {
    let (state, ledger) = (memory.admission().state(), memory.admission().ledger(Budget::Host));
    let live: ByteSize = state.routes.read().iter().map(|route| route.live).sum();
    let [reserved, allowance] = [ledger.requests(), ledger.allowance()].map(ByteSize::get);
    let saturation = memory.snapshot().saturation;
    let open = memory.admission().stats().held();
    format!("{} {reserved} {allowance} {open} {saturation}", live.get())
}

/// Opens the streams, lets them grow, and adds the figures. Returns `true` if the service survived.
pub(crate) fn run(base: &Cell, figures: &mut Figures) -> Result<bool, BoxError> {
    let cell = Cell { service: Service::Streams, ..base.clone() };
    let (service, to) = cell.start(LIMIT)?;
    let runtime = tokio::runtime::Runtime::new()?;
    runtime.block_on(clients(to, figures))?;
    let kills = service.end();
    figures.at_most("traffic.unread.kills", count(kills), "kills", 0.0);
    let (mut times, mut died) = ([0.0; 2], 0);
    for (time, is_http2) in times.iter_mut().zip([false, true]) {
        let (service, to) = cell.start(LIMIT)?;
        let http = client_of(is_http2);
        let start = Instant::now();
        let body = Bytes::from(vec![b'a'; UPLOAD]);
        let url = format!("http://{to}/upload");
        let uploads = async {
            let uploads = join_all((0..UPLOADS).map(|_| post_to(&http, &url, body.clone()))).await;
            *time = start.elapsed().as_secs_f64();
            uploads.iter().filter(|(status, _)| *status == Some(StatusCode::OK)).count() as u64
        };
        let (served, short) = runtime.block_on(async {
            let short = hello(&http, to, Duration::from_millis(500));
            tokio::join!(uploads, short)
        });
        died += service.end();
        if is_http2 {
            figures.at_least("traffic.h2.served", count(served), "uploads", count(UPLOADS));
            figures.add("traffic.h2.small_ms", short.1, "ms");
        }
    }
    figures.add("traffic.h2.time_ratio", times[1] / times[0], "ratio");
    for (of, many) in [("grpc", CALLS[0]), ("bidi", CALLS[1])] {
        let (service, to) = cell.start(LIMIT)?;
        let path = if of == "grpc" { "stream" } else { "echo" };
        let (open, short) = runtime.block_on(call(to, path, many));
        died += service.end();
        figures.at_least(format!("traffic.{of}.open"), count(open), "calls", count(many as u64));
        figures.at_most(format!("traffic.{of}.hello_failed"), count(short.0), "requests", 0.0);
        figures.add(format!("traffic.{of}.hello_p99_ms"), short.1, "ms");
    }
    let (service, to) = cell.start(LIMIT)?;
    let (served, others) = runtime.block_on(bombs(to))?;
    let bombed = service.end();
    println!("{BOMBS} bombs: {served} served, {others} rejected");
    figures.at_most("traffic.bomb.kills", count(bombed), "kills", 0.0);
    Ok(kills + died + bombed == 0)
}

/// Opens so many calls, whose requests end with the message if the path is that of the streams.
/// Returns how many have begun to be answered, and what came of short requests beside them.
async fn call(to: SocketAddr, path: &str, many: usize) -> (u64, (u64, f64)) {
    let frames = [Bytes::from_static(&FRAME), vec![b'a'; MESSAGE].into()].map(Ok::<_, Infallible>);
    let (last, path) = (path == "echo", &path);
    let calls = (0..many.div_ceil(CALLS_EACH)).flat_map(|nth| {
        std::iter::repeat_n(client_of(true), CALLS_EACH.min(many - nth * CALLS_EACH))
    });
    let begun = join_all(calls.map(|http| {
        let frames = iter(frames.clone());
        let ends = if last { pending().boxed() } else { empty().boxed() };
        let request = Request::post(format!("http://{to}/{path}"))
            .header("content-type", "application/grpc")
            .body(Body::from_stream(frames.chain(ends)));
        tokio::time::timeout(PATIENCE, async move {
            let mut answer = http.request(request?).await?.into_body();
            answer.frame().await.ok_or("no answer")??;
            Ok::<_, BoxError>((answer, http))
        })
    }));
    let open: Vec<_> = begun.await.into_iter().filter_map(|call| call.ok()?.ok()).collect();
    (open.len() as u64, hello(&client_of(true), to, Duration::from_secs(2)).await)
}

/// Sends bodies that unpack to many times their length, all at once. Returns how many were
/// served, and how many were not.
async fn bombs(to: SocketAddr) -> Result<(usize, usize), BoxError> {
    let mut packed = GzEncoder::new(Vec::new(), Compression::fast());
    packed.write_all(&vec![0; BOMB])?;
    let (packed, http) = (Bytes::from(packed.finish()?), client());
    let bombs = (0..BOMBS).map(|_| {
        let request = Request::post(format!("http://{to}/length"));
        send(&http, request.header("content-encoding", "gzip"), packed.clone())
    });
    let answers = join_all(bombs).await;
    let served = answers.iter().flatten().filter(|(status, _)| status.is_success()).count();
    Ok((served, BOMBS - served))
}

async fn clients(to: SocketAddr, figures: &mut Figures) -> Result<(), BoxError> {
    let start = Instant::now();
    let opened = join_all((0..STREAMS).map(|_| tokio::time::timeout(PATIENCE, open(to)))).await;
    let time = start.elapsed().as_secs_f64();
    let opened: Vec<_> = opened.into_iter().filter_map(|opened| opened.ok()?.ok()).collect();
    let short = hello(&client(), to, Duration::from_secs(2)).await;
    let idle = look(to).await?;
    figures.at_least("traffic.sse.open", count(opened.len() as u64), "streams", 400.0);
    figures.at_most("traffic.cold_s", time, "s", 10.0);
    figures.at_most("traffic.sse.saturation", idle[4], "ratio", 0.5);
    figures.at_most("traffic.sse.hello_failed", count(short.0), "requests", 0.0);
    figures.add("traffic.sse.hello_p99_ms", short.1, "ms");
    get_from(&client(), &format!("http://{to}/grow")).await?;
    let short = hello(&client(), to, PATIENCE).await;
    let [live, reserved, allowance, open, _] = look(to).await?;
    let ended = count(STREAMS as u64) - open;
    let unbooked = part((live - reserved).max(0.0), live);
    // What ended beyond what had to: as many as hold what is free.
    let beyond = part((allowance - reserved).max(0.0), ended * part(live, open));
    println!("{ended} of {STREAMS} streams ended; {live} bytes are held, {allowance} allowed");
    figures.at_most("traffic.unread.hello_failed", count(short.0), "requests", 0.0);
    figures.add("traffic.unread.hello_p99_ms", short.1, "ms");
    figures.at_most("traffic.unread.unbooked_ratio", unbooked, "ratio", 0.05);
    figures.at_most("traffic.unread.ended_beyond_ratio", beyond, "ratio", 0.05);
    Ok(())
}

/// Sends a prompt, and returns the connection once the answer has begun.
async fn open(to: SocketAddr) -> Result<TcpStream, BoxError> {
    let socket = TcpSocket::new_v4()?;
    socket.set_recv_buffer_size(KERNEL)?;
    let mut connection = socket.connect(to).await?;
    let head = format!("POST /stream HTTP/1.1\r\nhost: a\r\ncontent-length: {PROMPT}\r\n\r\n");
    connection.write_all(head.as_bytes()).await?;
    connection.write_all(&vec![b'a'; PROMPT]).await?;
    let mut start = [0; 12];
    connection.read_exact(&mut start).await?;
    if start.ends_with(b"200") { Ok(connection) } else { Err("rejected".into()) }
}

/// Sends short requests for this time. Returns how many failed, and the time of the slowest
/// hundredth in milliseconds.
async fn hello(http: &Http, to: SocketAddr, time: Duration) -> (u64, f64) {
    let (start, url) = (Instant::now(), format!("http://{to}/hello"));
    let (mut failed, mut times) = (0, Vec::new());
    while start.elapsed() < time {
        let (status, took) = post_to(http, &url, Bytes::new()).await;
        failed += u64::from(status != Some(StatusCode::OK));
        times.push(took);
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    (failed, quantile(&times, 0.99))
}

/// Returns the figures of `booked`.
async fn look(to: SocketAddr) -> Result<[f64; 5], BoxError> {
    let text = get_from(&client(), &format!("http://{to}/booked")).await?;
    let all: Vec<f64> = text.split(' ').map(str::parse).collect::<Result<_, _>>()?;
    all.try_into().map_err(|all| format!("{all:?}: expected five figures").into())
}
