//! Services that real faults killed, in memory cgroups, with clients outside: how often the kernel
//! kills them now, and what becomes of the requests.
//!
//! A process that survives by refusing everything shows in the numbers of requests that were served.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use axum::extract::{DefaultBodyLimit, Path};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use common::figures::{Figures, count};
use common::http::{Http, client, get as get_from, post as post_to};
use common::own;
use common::process::group;
use http::StatusCode;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Level, RejectReason};
use serde::{Deserialize, Serialize};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::sleep;

/// The limit of a service.
const LIMIT: ByteSize = ByteSize::mib(256);
/// Between two requests of a small client, and before one that was refused is sent again.
const PAUSE: Duration = Duration::from_millis(50);
const SMALL: usize = 2 << 10;

#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub(crate) enum Part {
    /// Bodies of JSON that need several times their length.
    Readme,
    /// A request that grows to a hundred times its claim.
    Runaway,
}

/// Runs a part, or both, and adds the figures.
#[tokio::main]
pub(crate) async fn measure(
    part: Option<Part>,
    is_sample: bool,
    figures: &mut Figures,
) -> Result<(), BoxError> {
    if let Err(reason) = group(LIMIT) {
        println!("skipped: {reason}");
        return Ok(());
    }
    if part != Some(Part::Runaway) {
        readme(is_sample, figures).await?;
    }
    if part != Some(Part::Readme) {
        runaway(is_sample, figures).await?;
    }
    Ok(())
}

/// What the clients see.
#[derive(Default)]
struct Counts {
    /// Requests of small clients, and of big ones, that were served.
    served: [AtomicU64; 2],
    refused: AtomicU64,
    /// Requests that got neither an answer of their handler nor a refusal.
    failed: AtomicU64,
    is_over: AtomicBool,
}

/// Starts clients, so many for each body, which send it again and again until it is over.
fn clients(
    http: &Http,
    url: &str,
    bodies: [(usize, &Bytes); 2],
    counts: &Arc<Counts>,
) -> JoinSet<()> {
    let bodies = bodies.into_iter().flat_map(|(clients, body)| vec![body.clone(); clients]);
    let client = |body: Bytes| {
        let (http, url, counts) = (http.clone(), url.to_owned(), Arc::clone(counts));
        async move {
            let is_big = body.len() > 2 * SMALL;
            while !counts.is_over.load(Relaxed) {
                let (status, _) = post_to(&http, &url, body.clone()).await;
                let counter = match status {
                    Some(StatusCode::OK) => &counts.served[usize::from(is_big)],
                    Some(StatusCode::SERVICE_UNAVAILABLE) => &counts.refused,
                    _ => &counts.failed,
                };
                counter.fetch_add(1, Relaxed);
                if !is_big || status != Some(StatusCode::OK) {
                    sleep(PAUSE).await;
                }
            }
        }
    };
    bodies.map(client).collect()
}

/// The service of the README under bodies that need several times their length. The handler keeps
/// the parsed value across a wait, as one does that asks another service.
async fn readme(is_sample: bool, figures: &mut Figures) -> Result<(), BoxError> {
    const BIG: usize = 5 << 20;
    /// The length of a body of small objects, which need 89 times that: less than the limit.
    const OBJECTS: usize = 1 << 20;
    let ones = format!("[{}1]", "1,".repeat(BIG / 2 - 1));
    let object = r#"{"a":1},"#;
    let objects = format!("[{}0]", object.repeat(OBJECTS / object.len()));
    let runs = if is_sample { 2 } else { 20 };
    for (kind, body) in [("ones", Bytes::from(ones)), ("objects", objects.into())] {
        let mut kills = 0;
        for _ in 0..runs {
            let (service, address) = common::serve(&own(&["serve", "faults"])?, LIMIT)?;
            let [small, big] = load_readme(address, &body).await;
            kills += service.end();
            figures.add(format!("faults.readme.{kind}.small_served"), small, "requests/run");
            figures.add(format!("faults.readme.{kind}.big_served"), big, "requests/run");
        }
        figures.at_most(format!("faults.readme.{kind}.kills"), count(kills), "runs", 0.0);
    }
    Ok(())
}

/// Requests served to small clients and to big ones.
async fn load_readme(address: SocketAddr, big: &Bytes) -> [f64; 2] {
    let (counts, url) = (Arc::default(), format!("http://{address}/json"));
    let clients = clients(&client(), &url, [(12, big), (20, &common::json(SMALL))], &counts);
    sleep(Duration::from_secs(5)).await;
    counts.is_over.store(true, Relaxed);
    clients.join_all().await;
    counts.served.each_ref().map(|served| count(served.load(Relaxed)))
}

/// Big requests hold twice their body for [`WORK`]: 128 MiB together.
const BIG: usize = 4 << 20;
const WORK: Duration = Duration::from_secs(1);
/// The imports from which the need is learned, each of one piece.
const LESSONS: usize = 16;
/// The pieces of the one that does not stop, at 50 MiB/s: more than a hundred times the claim.
const RUNAWAY: usize = 400;
const PIECE: usize = 1 << 20;
const EVERY: Duration = Duration::from_millis(20);

/// What the service saw from the start of the import that does not stop.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Report {
    /// `true` if its level was critical.
    is_critical: bool,
    /// The number of cancelled requests.
    cancelled: u64,
}

/// A request that grows to a hundred times its claim while the service is under load: whether it is
/// ended before the level is critical, and what becomes of the others. The handler allocates a
/// piece in each poll, and goes on when it is cancelled.
async fn runaway(is_sample: bool, figures: &mut Figures) -> Result<(), BoxError> {
    let runs = if is_sample { 2 } else { 20 };
    let (mut ended, mut harmed) = (0, 0);
    for run in 1..=runs {
        let (service, address) = common::serve(&own(&["serve", "faults"])?, LIMIT)?;
        let (status, failed, report) = load_runaway(address).await?;
        let is_killed = service.end() > 0;
        println!("{run}: {status:?}, {failed} failed, {report:?}, killed: {is_killed}");
        let is_ended =
            matches!(status, Some(StatusCode::SERVICE_UNAVAILABLE | StatusCode::PAYLOAD_TOO_LARGE));
        ended += u64::from(is_ended && !report.is_critical && !is_killed);
        harmed += failed + report.cancelled.saturating_sub(1);
    }
    figures.add("measured.runaway.runs", count(runs), "runs");
    figures.at_least("measured.runaway.ended", count(ended), "runs", count(runs));
    figures.at_most("measured.runaway.others_harmed", count(harmed), "requests", 0.0);
    Ok(())
}

/// Returns the status of the answer to the import, how many other requests failed, and the report
/// of the service.
async fn load_runaway(address: SocketAddr) -> Result<(Option<StatusCode>, u64, Report), BoxError> {
    let (http, counts) = (client(), Arc::new(Counts::default()));
    let (big, small) = (Bytes::from(vec![1; BIG]), Bytes::from(vec![1; SMALL]));
    let url = |path: &str| format!("http://{address}/{path}");
    let clients = clients(&http, &url("work"), [(16, &big), (8, &small)], &counts);
    for _ in 0..LESSONS {
        while post_to(&http, &url("import/1"), big.slice(..PIECE)).await.0 != Some(StatusCode::OK) {
            sleep(PAUSE).await;
        }
    }
    // Until the load is as large as it becomes.
    sleep(WORK).await;
    let failed_before = counts.failed.load(Relaxed);
    let import = url(&format!("import/{RUNAWAY}"));
    let (status, _) = post_to(&http, &import, big.slice(..PIECE)).await;
    counts.is_over.store(true, Relaxed);
    clients.join_all().await;
    // Without a report it was killed.
    let report = get_from(&http, &url("report")).await;
    let report =
        report.map_or_else(|_| Ok(Report::default()), |text| serde_json::from_str(&text))?;
    Ok((status, counts.failed.load(Relaxed) - failed_before, report))
}

/// The README's service, with handlers for both parts.
#[tokio::main]
pub(crate) async fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let (is_running, is_critical) = (Arc::new(AtomicBool::default()), Arc::default());
    let (admission, running, critical) = (
        memory.admission().clone(),
        Arc::clone(&is_running),
        Arc::<AtomicBool>::clone(&is_critical),
    );
    tokio::spawn(async move {
        loop {
            if running.load(Relaxed) && admission.level() == Level::Critical {
                critical.store(true, Relaxed);
            }
            sleep(Duration::from_millis(1)).await;
        }
    });
    let parse = |Json(value): Json<Value>| async move {
        sleep(Duration::from_millis(50)).await;
        value.as_array().map_or(0, Vec::len).to_string()
    };
    let work = |body: Bytes| async move {
        let copy = body.to_vec();
        sleep(WORK).await;
        if copy == body { StatusCode::OK } else { StatusCode::BAD_REQUEST }
    };
    let import = move |Path(pieces): Path<usize>, _: Bytes| async move {
        let mut held = Vec::new();
        for _ in 0..pieces {
            held.push(vec![1_u8; PIECE]);
            is_running.fetch_or(pieces == RUNAWAY, Relaxed);
            sleep(EVERY).await;
        }
    };
    let admission = memory.admission().clone();
    let report = move || async move {
        let cancelled = admission.stats().rejected_total(RejectReason::Outgrown);
        Json(Report { is_critical: is_critical.load(Relaxed), cancelled })
    };
    let routes = Router::new().route("/json", post(parse)).route("/work", post(work));
    let routes = routes.route("/import/{pieces}", post(import)).layer(memory.layer());
    let routes = routes.layer(DefaultBodyLimit::max(10 << 20)).route("/report", get(report));
    common::listen(routes).await
}
