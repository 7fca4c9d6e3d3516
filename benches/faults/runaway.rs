//! A request that grows to a hundred times its claim while the service is under load: whether it is
//! ended before the level is critical, and what becomes of the others.
//!
//! Each run is a process of its own in a memory cgroup; the clients are outside. The handler
//! allocates a piece in each poll, and goes on when it is cancelled.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use http::{Request, StatusCode};
use lowtide::{BoxError, Memory};
use lowtide_admission::{Level, RejectReason};
use serde::{Deserialize, Serialize};
use tokio::runtime::Runtime;
use tokio::time::sleep;

use crate::common::http::{Http, client, get as get_from, send};
use crate::{Cli, start};

const RUNS: u32 = 20;
/// The number with `--ci`.
const SAMPLE_RUNS: u32 = 2;
/// Clients whose requests hold twice their body for [`WORK`]: 128 MiB together.
const BIG_CLIENTS: usize = 16;
const BIG: usize = 4 << 20;
const SMALL_CLIENTS: usize = 8;
const SMALL: usize = 2 << 10;
const WORK: Duration = Duration::from_secs(1);
/// Before one that was refused is sent again.
const PAUSE: Duration = Duration::from_millis(100);
/// The imports from which the need is learned, each of one piece.
const LESSONS: usize = 16;
/// The pieces of the one that does not stop, at 50 MiB/s: more than a hundred times the claim.
const RUNAWAY: usize = 400;
const PIECE: usize = 1 << 20;
const EVERY: Duration = Duration::from_millis(20);
/// The name of this part.
const PART: &str = "runaway";

pub(crate) fn run(cli: &Cli) -> Result<(), BoxError> {
    crate::stage(cli, serve, measure)
}

fn measure(runtime: &Runtime, is_sample: bool) -> Result<(), BoxError> {
    let runs = if is_sample { SAMPLE_RUNS } else { RUNS };
    let (mut ended, mut harmed, mut held) = (0, 0, Vec::new());
    let mut refused = Vec::new();
    for run in 1..=runs {
        let (service, address) = start(PART)?;
        let outcome = runtime.block_on(load(address))?;
        let is_killed = service.end() > 0;
        println!("{run}: {outcome:?}{}", if is_killed { ", killed" } else { "" });
        let is_ended = outcome.status.is_some_and(|status| status == 503 || status == 413);
        ended += u32::from(is_ended && !outcome.report.is_critical && !is_killed);
        harmed += outcome.failed + outcome.report.cancelled.saturating_sub(1);
        held.push(outcome.report.held_mib);
        refused.push(outcome.small_refused);
    }
    let median = |mut of: Vec<u64>| {
        of.sort_unstable();
        of.get(of.len() / 2).copied().unwrap_or(0)
    };
    println!("figure measured.runaway.runs {runs} runs");
    println!("figure measured.runaway.ended {ended} runs");
    println!("figure measured.runaway.held {} MiB", median(held));
    println!("figure measured.runaway.others_harmed {harmed} requests");
    println!("figure measured.runaway.small_refused {} requests/run", median(refused));
    match (ended == runs, harmed) {
        (true, 0) => Ok(()),
        _ => Err(format!("ended in {ended} of {runs} runs, {harmed} others harmed").into()),
    }
}

/// What the service saw from the start of the import that does not stop.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    /// `true` if its level was critical.
    is_critical: bool,
    /// The number of cancelled requests.
    cancelled: u64,
    /// The most that the import held.
    held_mib: u64,
}

#[derive(Debug)]
struct Outcome {
    /// The answer to the import; `None` without one.
    status: Option<u16>,
    /// Other requests that got neither an answer of their handler nor a refusal.
    failed: u64,
    small_refused: u64,
    report: Report,
}

/// What the clients saw since the import began.
#[derive(Default)]
struct Counts {
    is_counting: AtomicBool,
    is_over: AtomicBool,
    failed: AtomicU64,
    small_refused: AtomicU64,
}

async fn load(address: SocketAddr) -> Result<Outcome, BoxError> {
    let client = client();
    let counts = Arc::new(Counts::default());
    let (big, small) = (Bytes::from(vec![1; BIG]), Bytes::from(vec![1; SMALL]));
    let all = (0..BIG_CLIENTS).map(|_| &big).chain((0..SMALL_CLIENTS).map(|_| &small));
    let clients: Vec<_> = all
        .map(|body| tokio::spawn(work(client.clone(), address, body.clone(), Arc::clone(&counts))))
        .collect();
    for _ in 0..LESSONS {
        while post_to(&client, address, "import/1", big.slice(..PIECE)).await != Some(200) {
            sleep(PAUSE).await;
        }
    }
    // Until the load is as large as it becomes.
    sleep(WORK).await;
    counts.is_counting.store(true, Ordering::Relaxed);
    let path = format!("import/{RUNAWAY}");
    let status = post_to(&client, address, &path, big.slice(..PIECE)).await;
    counts.is_over.store(true, Ordering::Relaxed);
    for client in clients {
        client.await?;
    }
    // Without a report it was killed.
    let report = get_from(&client, &format!("http://{address}/report")).await;
    let report =
        report.map_or_else(|_| Ok(Report::default()), |text| serde_json::from_slice(&text))?;
    let of = |count: &AtomicU64| count.load(Ordering::Relaxed);
    let (failed, small_refused) = (of(&counts.failed), of(&counts.small_refused));
    Ok(Outcome { status, failed, small_refused, report })
}

/// Sends the body again and again.
async fn work(client: Http, address: SocketAddr, body: Bytes, counts: Arc<Counts>) {
    while !counts.is_over.load(Ordering::Relaxed) {
        let is_small = body.len() == SMALL;
        let status = post_to(&client, address, "work", body.clone()).await;
        let is_counting = u64::from(counts.is_counting.load(Ordering::Relaxed));
        match status {
            Some(200) if is_small => sleep(PAUSE).await,
            Some(200) => {}
            Some(503) => {
                counts
                    .small_refused
                    .fetch_add(u64::from(is_small) * is_counting, Ordering::Relaxed);
                sleep(PAUSE).await;
            }
            _ => {
                counts.failed.fetch_add(is_counting, Ordering::Relaxed);
                sleep(PAUSE).await;
            }
        }
    }
}

/// Returns the status of the answer; `None` without one.
async fn post_to(client: &Http, address: SocketAddr, path: &str, body: Bytes) -> Option<u16> {
    let request = Request::post(format!("http://{address}/{path}"));
    send(client, request, body).await.ok().map(|(status, _)| status.as_u16())
}

/// What the service sees.
#[derive(Default)]
struct Seen {
    is_running: AtomicBool,
    is_critical: AtomicBool,
    held: AtomicU64,
}

#[tokio::main]
async fn serve() -> Result<(), BoxError> {
    let memory = Memory::builder().start()?;
    let seen = Arc::new(Seen::default());
    watch(&memory, &seen)?;
    let work = |body: Bytes| async move {
        let copy = body.to_vec();
        sleep(WORK).await;
        if copy == body { StatusCode::OK } else { StatusCode::BAD_REQUEST }
    };
    let (importing, told, admission) = (Arc::clone(&seen), seen, memory.admission().clone());
    let import = move |Path(pieces): Path<usize>, _: Bytes| async move {
        import(pieces, &importing).await;
        StatusCode::OK
    };
    let report = move || async move {
        Json(Report {
            is_critical: told.is_critical.load(Ordering::Relaxed),
            cancelled: admission.stats().rejected_total(RejectReason::Outgrown),
            held_mib: told.held.load(Ordering::Relaxed),
        })
    };
    let routes = Router::new()
        .route("/work", post(work))
        .route("/import/{pieces}", post(import))
        .layer(memory.layer())
        .layer(DefaultBodyLimit::max(2 * BIG))
        .route("/report", get(report));
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await?;
    println!("{}", listener.local_addr()?);
    Ok(axum::serve(listener, routes).await?)
}

/// Holds one piece more after each wait.
async fn import(pieces: usize, seen: &Seen) {
    let mut held = Vec::new();
    for _ in 0..pieces {
        held.push(vec![1_u8; PIECE]);
        if pieces == RUNAWAY {
            seen.is_running.store(true, Ordering::Relaxed);
            seen.held.store(held.len() as u64, Ordering::Relaxed);
        }
        sleep(EVERY).await;
    }
}

/// Records whether the level is critical from when the import runs.
#[expect(clippy::disallowed_methods, reason = "it looks at the level at real intervals")]
fn watch(memory: &Memory, seen: &Arc<Seen>) -> std::io::Result<()> {
    let (admission, seen) = (memory.admission().clone(), Arc::clone(seen));
    // Ends with the process.
    let look = move || {
        loop {
            let is_running = seen.is_running.load(Ordering::Relaxed);
            if is_running && admission.level() == Level::Critical {
                seen.is_critical.store(true, Ordering::Relaxed);
            }
            std::thread::sleep(Duration::from_millis(1));
        }
    };
    std::thread::Builder::new().name("watch".to_owned()).spawn(look).map(drop)
}
