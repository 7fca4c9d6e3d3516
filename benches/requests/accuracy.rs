//! What is attributed to requests, beside what they hold.
//!
//! The truth of live bytes is jemalloc's statistics while all requests of a case wait, less the
//! same while requests wait that send the same body to a handler which drops it: so connections do
//! not count. The truth of a peak is known by construction.
//!
//! A peak may be 2 % or 512 KiB off: hyper reads up to some 400 KiB into one buffer.
//!
//! Tests check work on other threads, and peaks without a body.

use std::any::Any;
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use axum::body::{Body, Bytes};
use axum::extract::{Path, State};
use axum::response::{IntoResponse as _, Response};
use axum::routing::any;
use axum::{Router, extract::DefaultBodyLimit};
use common::figures::Figures;
use common::http::client_of;
use common::own;
use common::process::Process;
use futures_util::stream;
use http::Request;
use http_body_util::BodyExt as _;
use lowtide::admission::Cost;
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, RequestPermit};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_core::sync::lock;
use lowtide_heap::{Account, HeapProbe};
use tokio::net::TcpListener;
use tokio::sync::watch;

/// Requests at once.
const AT_ONCE: [usize; 2] = [1, 32];
/// The accepted error of live bytes and of peaks, in percent.
const ERROR_MAX: f64 = 2.0;
/// The accepted error of a peak, and the least bytes with which an error is compared.
const PEAK_ERROR_MAX: f64 = 512.0 * 1024.0;
/// A case whose requests do not arrive fails after this.
const PATIENCE: Duration = Duration::from_secs(120);
/// Two looks at the statistics that find the same.
const LOOK: Duration = Duration::from_millis(25);
/// Bytes of a MiB.
const MIB: usize = 1 << 20;

/// The path of a handler, the bytes of the body, and what a request holds at its peak; `None` if that
/// depends on the speed of the connection.
type Case = (&'static str, usize, Option<usize>);

/// All cases.
const CASES: [Case; 6] = [
    ("collect", 20 * MIB, Some(40 * MIB)),
    ("frames", 5 * MIB, Some(5 * MIB)),
    // And what parsing needs, which is measured apart.
    ("json", 5 * MIB, Some(5 * MIB)),
    ("pass", 20 * MIB, None),
    // The clients read these answers late.
    ("answer", 0, Some(20 * MIB)),
    ("stream", 0, None),
];

/// The memory of one request of a case.
#[derive(Clone, Debug, Default)]
struct Seen {
    /// By jemalloc's statistics.
    held: f64,
    attributed: f64,
    /// Of each request.
    peaks: Vec<f64>,
}

/// Measures all cases, prints them, and adds the figures.
#[tokio::main(worker_threads = 2)]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(ByteSize::gib(20)).device(DeviceChoice::None);
    let memory = memory.start()?;
    // The largest errors of live bytes and of peaks, and the most bytes that a peak is too low.
    let (mut live, mut worst, mut under) = (0.0_f64, 0.0_f64, 0.0_f64);
    let error = |found: f64, truth: f64| ((found - truth) / truth.max(MIB as f64)).abs();
    let mut bases = BTreeMap::new();
    for (path, bytes, peak) in CASES {
        let parsing = if path == "json" { parsing(bytes)? } else { 0.0 };
        for (is_http2, requests) in
            [false, true].into_iter().flat_map(|is| AT_ONCE.map(|n| (is, n)))
        {
            let order = |path: &str| (path.to_owned(), bytes, is_http2, requests);
            // The same without memory of the handler.
            let base = order(if bytes > 0 { "drain" } else { "hello" });
            if !bases.contains_key(&base) {
                let held = seen(&memory, &base).await?.held;
                bases.insert(base.clone(), held);
            }
            let mut seen = seen(&memory, &order(path)).await?;
            seen.held -= bases[&base];
            let peak = peak.map(|peak| (peak as f64 + parsing).max(seen.held));
            let Seen { held, attributed, .. } = seen;
            println!("{:?}: {held:.0}, attributed {attributed:.0}, peak {peak:.0?}", order(path));
            live = live.max(error(seen.attributed, seen.held));
            for (truth, found) in
                peak.iter().flat_map(|peak| seen.peaks.iter().map(move |it| (peak, it)))
            {
                under = under.max(truth - found);
                if (found - truth).abs() > PEAK_ERROR_MAX {
                    worst = worst.max(error(*found, *truth));
                }
            }
        }
    }
    figures.at_most("measured.live_error_percent", 100.0 * live, "percent", ERROR_MAX);
    figures.at_most("measured.peak_error_percent", 100.0 * worst, "percent", ERROR_MAX);
    figures.add("measured.peak_under_kib", under / 1024.0, "KiB");
    Ok(())
}

/// Returns what parsing a body of JSON needs at its peak.
fn parsing(bytes: usize) -> Result<f64, BoxError> {
    let text = common::json(bytes);
    let account = Arc::new(Account::new((), |_, _| ()));
    account.run(|| serde_json::from_slice::<serde_json::Value>(&text).map(drop))?;
    Ok(account.memory().peak.get() as f64)
}

/// The path of the handler, the bytes of the body, whether over HTTP/2, and how many at once.
type Order = (String, usize, bool, usize);

/// Runs a case. The buffers of connections depend on chance: the median of some runs.
async fn seen(memory: &Memory, order: &Order) -> Result<Seen, BoxError> {
    let mut runs = Vec::new();
    for _ in 0..if order.3 == 1 { 5 } else { 3 } {
        runs.push(run(memory, order).await?);
    }
    runs.sort_by(|one, other| one.held.total_cmp(&other.held));
    Ok(runs.swap_remove(runs.len() / 2))
}

async fn run(memory: &Memory, order: &Order) -> Result<Seen, BoxError> {
    let requests = order.3;
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::ZERO);
    let stage = Arc::new(Stage::default());
    let routes = Router::new().route("/{name}", any(handle)).layer(DefaultBodyLimit::disable());
    let service = routes.with_state(Arc::clone(&stage)).layer(layer.without_slow_start());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let server = listener.local_addr()?;
    let serving = tokio::spawn(async { axum::serve(listener, service).await });
    let before = settled().await?;
    let clients = own(&["--client", &serde_json::to_string(&(server, order))?])?;
    let mut clients = Process::start(clients)?;
    let start = Instant::now();
    while stage.waiting.load(Ordering::Acquire) < requests {
        if start.elapsed() > PATIENCE {
            return Err(format!("{order:?}: not all have arrived").into());
        }
        tokio::time::sleep(LOOK).await;
    }
    let held = (settled().await? - before) / requests as f64;
    let permits = lock(&stage.permits).clone();
    let memories = || permits.iter().filter_map(RequestPermit::memory);
    let attributed = memories().map(|memory| memory.live.get() as f64).sum::<f64>();
    stage.opened.send_replace(true);
    tokio::task::spawn_blocking(move || clients.finish()).await??;
    settled().await?;
    let peaks = memories().map(|memory| memory.peak.get() as f64).collect();
    serving.abort();
    Ok(Seen { held, attributed: attributed / requests as f64, peaks })
}

/// Returns the live bytes of the process when they do not change any more.
async fn settled() -> Result<f64, BoxError> {
    let probe = HeapProbe::new()?;
    let mut last = f64::NAN;
    for _ in 0..200 {
        tokio::time::sleep(LOOK).await;
        let now = probe.snapshot()?.live.get() as f64;
        if (now - last).abs() < 16.0 * 1024.0 {
            return Ok(now);
        }
        last = now;
    }
    Err("the live bytes of the process do not settle".into())
}

/// Is the clients: sends all requests at once, each on a connection of its own, and reads the
/// answers. Those that are large are read when the standard input ends.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn be_clients(order: &str) -> Result<(), BoxError> {
    let (server, (path, bytes, is_http2, requests)): (SocketAddr, Order) =
        serde_json::from_str(order)?;
    let reads_late = path == "answer" || path == "stream";
    let body = if path == "json" { common::json(bytes) } else { vec![b'x'; bytes].into() };
    let (ended, end) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ended.send_replace(true);
    });
    let uri = format!("http://{server}/{path}");
    let ask = |mut end: watch::Receiver<bool>, uri: String, body: Bytes| async move {
        let request = Request::builder().method(if body.is_empty() { "GET" } else { "POST" });
        let request = request.uri(&uri).body(Body::from(body))?;
        let http = client_of(is_http2);
        let mut answer = http.request(request).await?;
        if reads_late {
            end.wait_for(|ended| *ended).await?;
        }
        if !answer.status().is_success() {
            return Err(format!("{uri}: {}", answer.status()).into());
        }
        while let Some(frame) = answer.frame().await {
            drop(frame?);
        }
        Ok::<_, BoxError>(())
    };
    let all = (0..requests).map(|_| tokio::spawn(ask(end.clone(), uri.clone(), body.clone())));
    for one in all.collect::<Vec<_>>() {
        one.await??;
    }
    Ok(())
}

// The handler, which waits where its request holds most.

/// The pieces of a streamed answer.
const PIECE: usize = 256 << 10;

/// What the handler and the measuring task share.
#[derive(Default)]
struct Stage {
    /// Requests that wait.
    waiting: AtomicUsize,
    /// `true` when they may go on.
    opened: watch::Sender<bool>,
    /// The permits of all requests.
    permits: Mutex<Vec<RequestPermit>>,
}

impl Stage {
    /// Notes that a request holds most now.
    fn arrive(&self) {
        lock(&self.permits).extend(RequestPermit::current());
        self.waiting.fetch_add(1, Ordering::Release);
    }

    async fn wait(&self) {
        self.arrive();
        let _ = self.opened.subscribe().wait_for(|opened| *opened).await;
    }
}

fn filled(bytes: usize) -> Vec<u8> {
    black_box(vec![7; bytes])
}

async fn next(body: &mut Body) -> Option<Bytes> {
    body.frame().await?.ok()?.into_data().ok()
}

async fn handle(
    State(stage): State<Arc<Stage>>,
    Path(name): Path<String>,
    request: Request<Body>,
) -> Response {
    match &*name {
        "pass" => return pass(stage, request.into_body()),
        "answer" => {
            let whole = Bytes::from(filled(20 * MIB));
            stage.arrive();
            return whole.into_response();
        }
        "stream" => {
            stage.arrive();
            let piece = |_| Ok::<_, Infallible>(Bytes::from(filled(PIECE)));
            return Body::from_stream(stream::iter((0..20 * MIB / PIECE).map(piece)))
                .into_response();
        }
        _ => {}
    }
    let held = held(&name, request.into_body()).await;
    stage.wait().await;
    drop(black_box(held));
    Response::default()
}

/// Does a handler's work, and returns what it holds.
async fn held(name: &str, mut body: Body) -> Box<dyn Any + Send> {
    match name {
        "drain" => while next(&mut body).await.is_some() {},
        "collect" => return Box::new(body.collect().await.map(|body| body.to_bytes())),
        "frames" => {
            let mut kept = Vec::new();
            while let Some(frame) = next(&mut body).await {
                kept.push(frame);
            }
            return Box::new(kept);
        }
        "json" => {
            let whole = body.collect().await.map(|body| body.to_bytes()).unwrap_or_default();
            return Box::new(serde_json::from_slice::<serde_json::Value>(&whole));
        }
        _ => {}
    }
    Box::new(())
}

/// Answers with the body, and waits when that has passed: before its end.
fn pass(stage: Arc<Stage>, body: Body) -> Response {
    let pieces = stream::unfold((body, Some(stage)), |(mut body, mut stage)| async {
        match next(&mut body).await {
            Some(frame) => Some((Ok::<_, Infallible>(frame), (body, stage))),
            None => {
                stage.take()?.wait().await;
                Some((Ok(Bytes::new()), (body, None)))
            }
        }
    });
    Body::from_stream(pieces).into_response()
}
