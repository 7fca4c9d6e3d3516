//! What is attributed to requests, beside what they hold.
//!
//! The truth of live bytes is jemalloc's statistics while all requests of a case wait, less the
//! same while requests wait that send the same body to a handler which drops it: so connections do
//! not count. The truth of a peak is known by construction.
//!
//! A peak may be 2 % or 512 KiB off: hyper reads up to some 400 KiB into one buffer.

use std::any::Any;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::convert::Infallible;
use std::hint::black_box;
use std::process::{Child, Stdio};
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
use futures_util::stream;
use http::Request;
use http_body_util::{BodyExt as _, Full};
use lowtide::admission::Cost;
use lowtide::config::DeviceChoice;
use lowtide::service::{MemoryLayer, RequestPermit, scope, scope_blocking};
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_core::sync::lock;
use lowtide_heap::{Account, HeapProbe};
use serde::{Deserialize, Serialize};
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

/// The memory of one request of a case.
#[derive(Clone, Copy, Debug, Default)]
struct Seen {
    /// By jemalloc's statistics.
    held: f64,
    attributed: f64,
    /// The lowest and the highest peak of a request.
    peaks: [f64; 2],
}

/// Measures all cases, prints them, and adds the figures.
#[tokio::main(worker_threads = 2)]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let memory = Memory::builder().memory_limit(ByteSize::gib(20)).device(DeviceChoice::None);
    let memory = memory.start()?;
    // The largest errors of live bytes and of peaks, and the most bytes that a peak is too low.
    let (mut live, mut worst, mut under) = (0.0_f64, 0.0_f64, 0.0_f64);
    let mut bases = BTreeMap::new();
    for case in &CASES {
        for protocol in [1, 2] {
            for at_once in AT_ONCE {
                let kind = (format!("{:?}", case.upload), protocol, at_once);
                let base = match bases.entry(kind) {
                    Entry::Occupied(entry) => *entry.get(),
                    Entry::Vacant(entry) => {
                        let base = seen(&memory, &case.baseline(), protocol, at_once).await?;
                        *entry.insert(base.held)
                    }
                };
                let mut seen = seen(&memory, case, protocol, at_once).await?;
                seen.held -= base;
                let peak = peak_of(case).map(|peak| peak.max(seen.held));
                println!(
                    "{}, HTTP/{protocol}, {at_once} at once: {peak:.0?}, {seen:.0?}",
                    case.name
                );
                live = live.max(error(seen.attributed, seen.held).abs());
                for (truth, found) in
                    peak.into_iter().flat_map(|truth| seen.peaks.map(|found| (truth, found)))
                {
                    under = under.max(truth - found);
                    if (found - truth).abs() > PEAK_ERROR_MAX {
                        worst = worst.max(error(found, truth).abs());
                    }
                }
            }
        }
    }
    let name = |what: &str| format!("measured.{what}");
    figures.at_most(name("live_error_percent"), 100.0 * live, "percent", ERROR_MAX);
    figures.at_most(name("peak_error_percent"), 100.0 * worst, "percent", ERROR_MAX);
    figures.add(name("peak_under_kib"), under / 1024.0, "KiB");
    Ok(())
}

/// Returns the error as a part of the truth.
fn error(found: f64, truth: f64) -> f64 {
    (found - truth) / truth.max(MIB as f64)
}

/// Returns the peak of a request by construction; `None` if that is unknown.
fn peak_of(case: &Case) -> Option<f64> {
    Some(match case.peak {
        Known(bytes) => bytes as f64,
        Unknown => return None,
        Parsed => {
            let text = body(case.upload);
            let parse = || serde_json::from_slice::<serde_json::Value>(&text);
            let account = Arc::new(Account::new((), |_, _| ()));
            drop(account.run(parse));
            text.len() as f64 + account.memory().peak.get() as f64
        }
    })
}

/// Runs a case. The buffers of connections depend on chance: the median of some runs.
async fn seen(
    memory: &Memory,
    case: &Case,
    protocol: u8,
    at_once: usize,
) -> Result<Seen, BoxError> {
    let mut runs = Vec::new();
    for _ in 0..if at_once == 1 { 5 } else { 3 } {
        runs.push(run(memory, case, protocol, at_once).await?);
    }
    let middle = runs.len() / 2;
    Ok(*runs.select_nth_unstable_by(middle, |one, other| one.held.total_cmp(&other.held)).1)
}

async fn run(memory: &Memory, case: &Case, protocol: u8, at_once: usize) -> Result<Seen, BoxError> {
    let layer = MemoryLayer::new(memory.admission().clone(), Cost::ZERO);
    let stage = Arc::new(Stage::default());
    let service = routes(Arc::clone(&stage)).layer(layer.without_slow_start());
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let server = listener.local_addr()?;
    let serving = tokio::spawn(async { axum::serve(listener, service).await });
    let before = settled().await?;
    let order = Order {
        server,
        path: case.path.to_owned(),
        protocol,
        requests: at_once,
        upload: case.upload,
        reads_late: case.reads_late(),
    };
    let mut clients = start(&order)?;
    let start = Instant::now();
    while stage.waiting.load(Ordering::Acquire) < at_once {
        if start.elapsed() > PATIENCE {
            return Err(format!(
                "{}: {} of {at_once} arrived",
                case.name,
                stage.waiting.load(Ordering::Acquire)
            )
            .into());
        }
        tokio::time::sleep(LOOK).await;
    }
    let held = (settled().await? - before) / at_once as f64;
    let permits = lock(&stage.permits).clone();
    let attributed = || {
        let all = permits.iter().filter_map(|permit| permit.memory());
        all.map(|memory| memory.live.get() as f64).sum::<f64>() / at_once as f64
    };
    let now = attributed();
    stage.opened.send_replace(true);
    drop(clients.stdin.take());
    let status = tokio::task::spawn_blocking(move || clients.wait()).await??;
    if !status.success() {
        return Err(format!("{}: the clients ended with {status}", case.name).into());
    }
    settled().await?;
    let peaks = permits.iter().filter_map(|permit| permit.memory());
    let peaks: Vec<_> = peaks.map(|memory| memory.peak.get() as f64).collect();
    serving.abort();
    Ok(Seen {
        held,
        attributed: now,
        peaks: [
            peaks.iter().copied().fold(f64::INFINITY, f64::min),
            peaks.iter().copied().fold(0.0, f64::max),
        ],
    })
}

fn start(order: &Order) -> Result<Child, BoxError> {
    let mut command = own()?;
    command.arg("--client").arg(serde_json::to_string(order)?);
    Ok(command.stdin(Stdio::piped()).spawn()?)
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

/// What the clients do, as JSON on the command line of their process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Order {
    server: std::net::SocketAddr,
    path: String,
    protocol: u8,
    requests: usize,
    upload: Upload,
    /// Answers are read when the standard input ends.
    reads_late: bool,
}

/// Is the clients: sends all requests at once, each on a connection of its own, and reads the
/// answers.
#[tokio::main(flavor = "current_thread")]
pub(crate) async fn be_clients(order: Order) -> Result<(), BoxError> {
    let body = body(order.upload);
    let (ended, end) = watch::channel(false);
    std::thread::spawn(move || {
        let _ = std::io::copy(&mut std::io::stdin(), &mut std::io::sink());
        ended.send_replace(true);
    });
    let ask = |mut end: watch::Receiver<bool>, order: Order, body: Bytes| async move {
        let method = if body.is_empty() { "GET" } else { "POST" };
        let request = Request::builder()
            .method(method)
            .uri(format!("http://{}/{}", order.server, order.path))
            .body(Full::new(body))?;
        let http = client_of(order.protocol == 2);
        let mut answer = http.request(request).await?;
        if order.reads_late {
            end.wait_for(|ended| *ended).await?;
        }
        if !answer.status().is_success() {
            return Err(format!("/{}: {}", order.path, answer.status()).into());
        }
        while let Some(frame) = answer.frame().await {
            drop(frame?);
        }
        Ok::<_, BoxError>(())
    };
    let all =
        (0..order.requests).map(|_| tokio::spawn(ask(end.clone(), order.clone(), body.clone())));
    for one in all.collect::<Vec<_>>() {
        one.await??;
    }
    Ok(())
}

/// Returns a body of about this length.
fn body(upload: Upload) -> Bytes {
    match upload {
        Json(bytes) => common::json(bytes),
        _ => vec![b'x'; upload.bytes()].into(),
    }
}

// The cases: handlers, their bodies, and what their requests hold by construction.

/// Bytes of a MiB.
const MIB: usize = 1 << 20;

/// The body of a request.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
enum Upload {
    Nothing,
    Letters(usize),
    Json(usize),
}

impl Upload {
    const fn bytes(self) -> usize {
        match self {
            Self::Nothing => 0,
            Self::Letters(bytes) | Self::Json(bytes) => bytes,
        }
    }
}

/// The bytes that a request holds at its peak.
#[derive(Clone, Copy, Debug)]
enum Peak {
    Known(usize),
    /// Depends on the speed of the connection.
    Unknown,
    /// The body, and what parsing it needs, which is measured apart.
    Parsed,
}

/// Requests of one kind.
#[derive(Clone, Copy, Debug)]
struct Case {
    name: &'static str,
    /// The path of its handler.
    path: &'static str,
    upload: Upload,
    peak: Peak,
}

const fn case(name: &'static str, path: &'static str, upload: Upload, peak: Peak) -> Case {
    Case { name, path, upload, peak }
}

use Peak::{Known, Parsed, Unknown};
use Upload::{Json, Letters, Nothing};

/// All cases.
const CASES: [Case; 9] = [
    case("collects 20 MiB", "collect", Letters(20 * MIB), Known(40 * MIB)),
    // A Vec doubles its capacity: 16 MiB while 32 are allocated.
    case("reads 20 MiB into a Vec that grows", "growing", Letters(20 * MIB), Known(48 * MIB)),
    case("keeps 5 MiB of frames", "frames", Letters(5 * MIB), Known(5 * MIB)),
    case("parses 5 MiB of JSON", "json", Json(5 * MIB), Parsed),
    case("frees 20 MiB in the same poll", "transient", Nothing, Known(20 * MIB)),
    case("spawn_blocking, scoped", "blocking", Nothing, Known(10 * MIB)),
    case("four tasks, scoped", "tasks", Nothing, Known(12 * MIB)),
    // The clients read these answers late.
    case("answers 20 MiB", "answer", Nothing, Known(20 * MIB)),
    case("streams 20 MiB in pieces of 256 KiB", "stream", Nothing, Unknown),
];

impl Case {
    /// Returns `true` if its client reads the answer late.
    fn reads_late(&self) -> bool {
        self.path.starts_with("answer") || self.path.starts_with("stream")
    }

    /// The case without memory of the handler: it reads the body and drops it, if there is one.
    fn baseline(mut self) -> Self {
        self.path = if self.upload.bytes() > 0 { "drain" } else { "hello" };
        self
    }
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

fn routes(stage: Arc<Stage>) -> Router {
    let routes = Router::new().route("/{name}", any(handle)).layer(DefaultBodyLimit::disable());
    routes.with_state(stage)
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
        "growing" => {
            let mut whole = Vec::new();
            while let Some(frame) = next(&mut body).await {
                whole.extend_from_slice(&frame);
            }
            return Box::new(whole);
        }
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
        "transient" => drop(filled(20 * MIB)),
        "blocking" => {
            let block = || {
                drop(filled(6 * MIB));
                filled(10 * MIB)
            };
            return Box::new(tokio::task::spawn_blocking(scope_blocking(block)).await);
        }
        "tasks" => {
            // All four hold 3 MiB each at the same time.
            let all = Arc::new(tokio::sync::Barrier::new(4));
            let part = async |all: Arc<tokio::sync::Barrier>| {
                let (kept, more) = (filled(2 * MIB), filled(MIB));
                all.wait().await;
                drop(more);
                kept
            };
            let parts: [_; 4] =
                std::array::from_fn(|_| tokio::spawn(scope(part(Arc::clone(&all)))));
            return Box::new(futures_util::future::join_all(parts).await);
        }
        _ => {}
    }
    Box::new(())
}
