//! One poll that needs more than the limit, and small requests meanwhile.
//!
//! In turns, a fresh service in a cgroup and the same one without a limit: 20 clients send small
//! requests with a pause, before and while one request allocates a multiple of the limit in a single
//! poll. What exceeds its claim goes to a file in `LOWTIDE_SPILL_DIR`, or else in the folder of this
//! program. The handler checks every byte that it allocated.

use std::fs;
use std::hint::black_box;
use std::io::{Read as _, Write as _};
use std::os::unix::{fs::MetadataExt as _, process::ExitStatusExt as _};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::time::{Duration, Instant};

use axum::extract::{DefaultBodyLimit, Path};
use axum::routing::{get, post};
use axum::{Json, Router};
use bytes::Bytes;
use common::figures::{Figures, count, median, part, quantile};
use common::http::{client, get as get_from, post as post_to};
use common::process::{self, Process};
use flate2::read::{GzDecoder, GzEncoder};
use futures_util::future::join_all;
use http::StatusCode;
use lowtide::{BoxError, ByteSize, Memory};
use lowtide_admission::{Admission, Budget};
use ruzstd::decoding::StreamingDecoder;
use ruzstd::encoding::{CompressionLevel, compress_to_vec};
use serde_json::Value;
use tokio::runtime::Runtime;
use tokio::task::JoinSet;
use tokio::time::sleep;

use crate::Cli;
use crate::cell::{Cell, LIMIT, Service};

/// What a large request does, and the times of the limit that it takes. The last two are `json.1.5`.
const CASES: [&str; 10] = [
    "json.1.5", "json.2", "json.4", "vec.2.35", "string.2", "concat.2", "gzip.2", "zstd.2",
    "three", "repeat",
];
/// No limit.
const PLENTY: ByteSize = ByteSize::gib(8);
const CLIENTS: usize = 20;
const PAUSE: Duration = Duration::from_millis(20);
/// The time of the small requests alone.
const BEFORE: Duration = Duration::from_secs(1);
/// The time in which memory and disk have to be free again.
const BACK: Duration = Duration::from_secs(10);
/// What a [`Value`] takes for each object of one number.
const OBJECT: usize = 680;
const PIECE: usize = 64 << 10;

/// Serves until standard input ends.
pub(crate) async fn serve() -> Result<(), BoxError> {
    let memory = Memory::start()?;
    let admission = memory.admission().clone();
    let app = Router::new()
        .route("/small", post(async |body: Json<Value>| body.to_string()))
        .route("/big/{kind}/{bytes}", post(big))
        .route("/seen", get(async move || seen(&admission).to_string()))
        .layer(DefaultBodyLimit::disable())
        .layer(memory.layer());
    common::listen(app).await
}

/// Allocates so many bytes in one poll, and checks what they hold.
async fn big(Path((kind, bytes)): Path<(String, usize)>, body: Bytes) -> StatusCode {
    let (piece, mut taken) = (piece(), Vec::new());
    let is_read = match &*kind {
        "json" => serde_json::from_slice::<Vec<Value>>(&body)
            .is_ok_and(|all| all.len() > bytes / OBJECT && all.iter().all(|it| it["a"] == 1)),
        "string" | "concat" => {
            let (mut text, mut lines) = (String::new(), Vec::new());
            for line in (0..bytes / 2048).map(|line| format!("{line:>1024}")) {
                text += if kind == "string" { &*line } else { "" };
                lines.push(line);
            }
            let text = if kind == "string" { text } else { lines.concat() };
            text.as_bytes().chunks(1024).eq(lines.iter().map(String::as_bytes))
        }
        "vec" => (0..bytes / PIECE).all(|_| taken.write_all(&piece).is_ok()),
        "gzip" => GzDecoder::new(&*body).read_to_end(&mut taken).is_ok(),
        _ => StreamingDecoder::new(&*body).is_ok_and(|mut all| all.read_to_end(&mut taken).is_ok()),
    };
    let is_right = is_read && taken.chunks(PIECE).all(|part| part == piece);
    if is_right { StatusCode::OK } else { StatusCode::INTERNAL_SERVER_ERROR }
}

fn piece() -> Vec<u8> {
    (0..251).cycle().take(PIECE).collect()
}

/// A body whose work takes so many bytes.
fn body(kind: &str, bytes: usize) -> Result<Bytes, BoxError> {
    let (plain, mut packed) = (piece().repeat(bytes / PIECE), Vec::new());
    match kind {
        "json" => packed = format!("[{}{{\"a\":1}}]", "{\"a\":1},".repeat(bytes / OBJECT)).into(),
        "gzip" => drop(GzEncoder::new(&*plain, Default::default()).read_to_end(&mut packed)?),
        "zstd" => packed = compress_to_vec(&*plain, CompressionLevel::Fastest),
        _ => {}
    }
    Ok(packed.into())
}

/// Allocates 64 MiB in one poll. Returns the milliseconds, at most a thousand, after which admission
/// had all but 4 MiB of it less to give.
fn seen(admission: &Admission) -> f64 {
    let ledger = admission.ledger(Budget::Host);
    let left = || ledger.allowance().saturating_sub(ledger.reserved());
    let room = || left().scaled(ledger.correction_factor());
    let (before, held, start) = (room(), black_box(piece().repeat(1024)), Instant::now());
    while before.saturating_sub(room()) < ByteSize::mib(60) && start.elapsed() < BEFORE {}
    drop(held);
    start.elapsed().as_secs_f64() * 1e3
}

/// What came of a run.
#[derive(Debug, Default)]
struct Outcome {
    /// The milliseconds of small requests, before and meanwhile, and of large ones that were served.
    small: [Vec<f64>; 2],
    large: Vec<f64>,
    /// Requests that failed or found other bytes than they wrote, and services that crashed.
    failed: u64,
    kills: u64,
    /// The growth of what the cgroup is charged and of what the file takes on disk, after [`BACK`].
    kept: [ByteSize; 2],
}

/// Runs a service with these variables under this limit. Sends it so many large requests one after
/// the other, and so many at once each time.
fn run_once(
    base: &Cell,
    (limit, variables): (ByteSize, &[(&str, &str)]),
    (path, body): (&str, &Bytes),
    [times, at_once]: [usize; 2],
) -> Result<Outcome, BoxError> {
    let mut command = Cell { service: Service::Poll, ..base.clone() }.command()?;
    let (mut service, to) = common::serve(command.envs(variables.iter().copied()), limit)?;
    let (http, mut of, phase) = (client(), Outcome::default(), Arc::<AtomicUsize>::default());
    Runtime::new()?.block_on(async {
        let small = |_| small(format!("http://{to}/small"), Arc::clone(&phase));
        let clients: JoinSet<_> = (0..CLIENTS).map(small).collect();
        sleep(BEFORE).await;
        let (url, before) = (format!("http://{to}{path}"), used(&service));
        phase.store(1, Relaxed);
        for _ in 0..times {
            let all = (0..at_once).map(|_| post_to(&http, &url, body.clone()));
            for (status, took) in join_all(all).await {
                match status {
                    Some(StatusCode::OK) => of.large.push(took),
                    // There is no room for several, or none once the need is known.
                    Some(StatusCode::SERVICE_UNAVAILABLE) if times * at_once > 1 => {}
                    Some(StatusCode::INTERNAL_SERVER_ERROR) => return Err("wrong bytes"),
                    _ => of.failed += 1,
                }
            }
        }
        phase.store(2, Relaxed);
        for ([before, meanwhile], failed) in clients.join_all().await {
            of.small[0].extend(before);
            of.small[1].extend(meanwhile);
            of.failed += failed;
        }
        if times > 1 {
            sleep(BACK).await;
            let after = used(&service);
            of.kept = std::array::from_fn(|at| after[at].saturating_sub(before[at]));
        }
        Ok(())
    })?;
    if of.failed > 0 {
        let _ = service.finish(); // it may be about to end
    }
    match service.ended() {
        Some(status) if status.success() => {}
        Some(status) if status.signal() != Some(libc::SIGKILL) => {
            return Err(format!("it ended: {status}").into());
        }
        _ => of.kills = service.end(),
    }
    Ok(of)
}

/// Sends small requests in phases 0 and 1. Returns the milliseconds by phases, and how many failed.
async fn small(url: String, phase: Arc<AtomicUsize>) -> ([Vec<f64>; 2], u64) {
    let (http, mut times, mut failed) = (client(), [Vec::new(), Vec::new()], 0);
    while phase.load(Relaxed) < 2 {
        let (status, took) = post_to(&http, &url, "[1,2,3,\"four\"]").await;
        times[phase.load(Relaxed).min(1)].push(took);
        failed += u64::from(status != Some(StatusCode::OK));
        sleep(PAUSE).await;
    }
    (times, failed)
}

/// Returns what the cgroup of a service is charged with, and what the files without a name that it
/// has open take on disk.
fn used(service: &Process) -> [ByteSize; 2] {
    let files = fs::read_dir(format!("/proc/{}/fd", service.child.id())).into_iter().flatten();
    let files = files.filter_map(|file| fs::metadata(file.ok()?.path()).ok());
    let blocks = files.filter(|file| file.is_file() && file.nlink() == 0).map(|file| file.blocks());
    let charged = service.folder().and_then(process::usage).unwrap_or_default();
    [charged, ByteSize::new(512 * blocks.sum::<u64>())]
}

/// So many runs of each case, and adds the figures; or of one alone, without times. Returns `true` if
/// no service was killed.
pub(crate) fn run(base: &Cell, cli: &Cli, figures: &mut Figures) -> Result<bool, BoxError> {
    let own = std::env::current_exe()?.parent().ok_or("no folder")?.display().to_string();
    let folder = std::env::var("LOWTIDE_SPILL_DIR").unwrap_or(own);
    let (spill, mut all_kills) = ([("LOWTIDE_SPILL_DIR", &*folder)], 0);
    for name in CASES.into_iter().filter(|name| cli.only.as_ref().is_none_or(|only| only == name)) {
        let (kind, of_limit) = name.split_once('.').unwrap_or(("json", "1.5"));
        let sent = [if name == "repeat" { 10 } else { 1 }, if name == "three" { 3 } else { 1 }];
        let taken = LIMIT.scaled(of_limit.parse()?).as_usize().ok_or("no such size here")?;
        let large = (&*format!("/big/{kind}/{taken}"), &body(kind, taken)?);
        let (figure, mut kills, mut failed) = (|end: &str| format!("poll.{name}.{end}"), 0, 0);
        for _ in 0..cli.poll.unwrap_or_default() {
            let ours = run_once(base, (LIMIT, &spill), large, sent)?;
            let seen = [ours.large.len() as u64, ours.failed, ours.kills];
            println!("{name}: served, failed, killed {seen:?}");
            kills += ours.kills;
            failed += if ours.kills > 0 { 0 } else { ours.failed };
            if sent == [1, 1] && ours.kills + ours.failed == 0 && cli.only.is_none() {
                let both = [&ours, &run_once(base, (PLENTY, &[]), large, sent)?];
                let small = both.map(|run| run.small.each_ref().map(|of| quantile(of, 0.99)));
                let time = both.map(|run| median(&run.large));
                println!("{name}, and without a limit: large {time:.0?}, small {small:.1?} ms");
                let most = if name == "json.4" { [2.0, 5.0] } else { [1.5, 4.0] };
                let slower = part(small[0][1], small[1][1]);
                figures.at_most(figure("small_p99_ratio"), slower, "ratio", most[0]);
                figures.at_most(figure("big_time_ratio"), part(time[0], time[1]), "ratio", most[1]);
            } else if sent[0] > 1 && ours.kills == 0 {
                let [memory, disk] = ours.kept.map(|kept| kept.as_f64() / 1_048_576.0);
                figures.add(figure("memory_kept"), memory, "MiB");
                figures.add(figure("disk_kept"), disk, "MiB");
            }
        }
        figures.at_most(figure("kills"), count(kills), "kills", 0.0);
        figures.at_most(figure("failed"), count(failed), "requests", 0.0);
        all_kills += kills;
    }
    if cli.only.is_none() {
        let (start, mut file) = (Instant::now(), tempfile::tempfile_in(&folder)?);
        file.write_all(&vec![1; 256 << 20])?;
        file.sync_all()?;
        println!("the disk writes {:.0} MiB/s", 256.0 / start.elapsed().as_secs_f64());
        let mut command = Cell { service: Service::Poll, ..base.clone() }.command()?;
        let (_service, to) = common::serve(command.envs(spill), LIMIT)?;
        let told = Runtime::new()?.block_on(get_from(&client(), &format!("http://{to}/seen")))?;
        figures.at_most("poll.seen_ms", told.parse()?, "ms", 5.0);
    }
    Ok(all_kills == 0)
}
