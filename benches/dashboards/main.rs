//! The dashboards against live data: the proxy under load, scraped by a real Prometheus, and every
//! query of every panel, annotation and rule asked of it.
//!
//! With `--soak` the proxy runs under the same load for hours, and what grows is judged.
//!
//! Nothing is drawn, and no Grafana takes part. What a panel needs that this machine does not have
//! is named in `judge`, with a reason; what is named there and has it all the same is no fault.
//!
//! Exit codes: 0 all held; 1 something did not, or could not be run, and is named.
//!
//! Invariant: a panel that is not named has series for each of its queries, and one that changes.
#![expect(clippy::print_stdout, clippy::print_stderr, reason = "a program that shows something")]
#![expect(
    clippy::disallowed_methods,
    reason = "real processes, and the time at which they are asked"
)]

mod judge;
mod process;

use std::io::{Seek as _, Write as _};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};
use std::sync::atomic::Ordering::Relaxed;
use std::time::Duration;
use std::{fs, io};

use axum::body::Body;
use bytes::Bytes;
use clap::Parser;
use common::figures::{Figures, count as number, median};
use common::http::{client, get_json};
use common::process::{free_port, kernel_value};
use futures_util::{StreamExt as _, stream::iter};
use lowtide::BoxError;
use tokio::task::JoinSet;
use tokio::time::{Instant, sleep, sleep_until, timeout_at};

use crate::judge::Report;
use crate::process::{ANSWERED, Prometheus, Proxy, post};

/// The proxy, as `cargo build --release --example proxy` makes it.
const PROXY: &str = "target/release/examples/proxy";

/// The dashboards against a real Prometheus and the proxy under load.
#[derive(Debug, Parser)]
struct Cli {
    /// The simulation as a shared library: a second proxy finds its device in it.
    #[arg(long)]
    fake_driver: Option<PathBuf>,
    /// A command to run while Prometheus still answers: `LOWTIDE_PROMETHEUS` is its address,
    /// `LOWTIDE_FROM` and `LOWTIDE_TO` are the seconds of the load.
    #[arg(long)]
    then: Option<String>,
    /// Run the proxy alone under the load for this long, such as 2h, and judge what grows after
    /// the first ten minutes.
    #[arg(long, value_name = "TIME", value_parser = humantime::parse_duration)]
    #[arg(num_args = 0..=1, default_missing_value = "2h")]
    soak: Option<Duration>,
}

fn main() -> ExitCode {
    common::main(|cli: Cli| {
        // Cargo starts a bench in the folder of its package; paths are those of the repository.
        std::env::set_current_dir(root())?;
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
        match cli.soak {
            Some(lasts) => runtime.block_on(soak(lasts)),
            None => {
                let Report(faults) = runtime.block_on(run(&cli))?;
                faults.iter().for_each(|fault| eprintln!("fault: {fault}"));
                Ok(faults.is_empty())
            }
        }
    })
}

/// The folder of the repository.
fn root() -> &'static Path {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/.."))
}

async fn run(cli: &Cli) -> Result<Report, BoxError> {
    let folder = tempfile::tempdir()?;
    let mut targets = vec![free_port()?];
    if cli.fake_driver.is_some() {
        targets.push(free_port()?);
    }
    let mut proxies = vec![Proxy::start(PROXY.as_ref(), targets[0], None)?];
    let prometheus = Prometheus::start(folder.path(), &targets)?;
    let from = judge::now()?;
    let (first, rest) = process::PHASES.split_at(3);
    process::run(&targets[..1], first).await?;
    // A second one comes while the first works, as in a fleet that grows.
    if let Some(library) = &cli.fake_driver {
        proxies.push(Proxy::start(PROXY.as_ref(), targets[1], Some(library))?);
    }
    process::run(&targets, rest).await?;
    // Two scrapes more, so that the end is in.
    sleep(Duration::from_secs(3)).await;
    let (to, mut report) = (judge::now()?, Report::default());
    proxies.iter_mut().try_for_each(Proxy::lives)?;
    check_metrics(&proxies[0].metrics().await?, &mut report)?;
    judge::boards(&prometheus, &(from..to), &mut report).await?;
    judge::rules(&prometheus, &(from..to), &mut report).await?;
    if let Some(command) = &cli.then {
        let status = Command::new("sh")
            .args(["-c", command])
            .env("LOWTIDE_PROMETHEUS", prometheus.url())
            .env("LOWTIDE_FROM", from.to_string())
            .env("LOWTIDE_TO", to.to_string())
            .status()?;
        report.expect(status.success(), || format!("{command}: {status}"));
    }
    Ok(report)
}

/// `promtool check metrics` has nothing to say of a live scrape.
fn check_metrics(text: &str, report: &mut Report) -> Result<(), BoxError> {
    let mut file = tempfile::tempfile()?;
    file.write_all(text.as_bytes())?;
    file.rewind()?;
    let output = Command::new("promtool").args(["check", "metrics"]).stdin(file).output();
    let output = output.map_err(|error| format!("promtool: {error}"))?;
    let words = [output.stdout, output.stderr].concat();
    let words = String::from_utf8_lossy(&words);
    let clean = output.status.success() && words.trim().is_empty();
    report.expect(clean, || format!("promtool check metrics: {}", words.trim()));
    Ok(())
}

// The soak: repeats the load of the dashboards for hours, and judges whether the proxy grows.
//
// Once per round, at the end of the longest pause, it counts the proxy's resident memory,
// descriptors, mappings, threads, learned keys and metrics series. A series drifts if it rises
// after the first ten minutes: significantly by Kendall's test (one-sided, .001), and by more than
// its tolerance by Sen's slope.

/// The time before counts are judged: caches and pools fill in it.
const WARM_UP: Duration = Duration::from_secs(600);
/// Requests with a path of their own in a round.
const STRANGERS: usize = 200;
/// The time in a round during which more clients send requests than those of the load.
const GUESTS: Duration = Duration::from_secs(44);
/// The number of phases up to the end of the longest pause.
const BUSY_PHASES: usize = 8;
/// The value of Kendall's statistic above which a series rises: the standard normal deviate that is
/// exceeded with a probability of a thousandth.
const RISES_FROM: f64 = 3.09;

/// The counts, and the tolerance of each.
const SERIES: [(&str, f64); 6] = [
    ("resident_mib", 2.0),
    ("descriptors", 0.5),
    ("mappings", 2.0),
    ("threads", 0.5),
    ("learned_keys", 0.5),
    ("metrics_series", 0.5),
];

/// Runs the soak, and returns `true` if no series drifts.
async fn soak(lasts: Duration) -> Result<bool, BoxError> {
    if lasts < 2 * WARM_UP {
        return Err("expected a soak of at least 20 minutes".into());
    }
    let program = common::build_proxy()?;
    let target = free_port()?;
    let mut proxy = Proxy::start(&program, target, None)?;
    let (start, mut counts) = (Instant::now(), Vec::new());
    while start.elapsed() < lasts {
        let guests = tokio::spawn(guests(target, counts.len()));
        let (busy, rest) = process::PHASES.split_at(BUSY_PHASES);
        process::run(&[target], busy).await?;
        guests.await?;
        proxy.lives()?;
        let counted = count(&proxy, target).await?;
        println!("{:.0?} {counted:.1?}", start.elapsed());
        counts.push((start.elapsed(), counted));
        process::run(&[target], rest).await?;
    }
    let judged = counts.iter().filter(|(at, _)| *at > WARM_UP).map(|(_, counted)| *counted);
    let judged: Vec<_> = judged.collect();
    let mut drifting = 0;
    for (nth, (name, tolerance)) in SERIES.into_iter().enumerate() {
        let values: Vec<_> = judged.iter().map(|counted| counted[nth]).collect();
        let (rises, grows) = (kendall(&values), sen(&values));
        let drifts = rises > RISES_FROM && grows > tolerance;
        drifting += u64::from(drifts);
        let word = if drifts { "DRIFTS" } else { "holds" };
        let ends = [values.first(), values.last()];
        println!("{name:>15} {word:>6}: {ends:.1?}, {grows:+.2} in all, Kendall's z {rises:+.1}");
    }
    let mut figures = Figures::default();
    figures.add("soak.requests", number(ANSWERED.load(Relaxed) as u64), "requests");
    figures.at_most("soak.drift", number(drifting), "series", 0.0);
    Ok(figures.print())
}

/// Counts what the proxy holds now.
async fn count(proxy: &Proxy, target: SocketAddr) -> Result<[f64; SERIES.len()], BoxError> {
    let home = format!("/proc/{}", proxy.process.child.id());
    let of = |key: &str| kernel_value(format!("{home}/status"), key).map(number);
    let descriptors = fs::read_dir(format!("{home}/fd"))?.count();
    let mappings = fs::read_to_string(format!("{home}/maps"))?.lines().count();
    let told = get_json(&client(), &format!("http://{target}/memory?with=routes")).await?;
    let keys = told["routes"].as_array().map_or(0, Vec::len);
    let metrics = proxy.metrics().await?;
    let series = metrics.lines().filter(|line| !line.is_empty() && !line.starts_with('#')).count();
    Ok([
        of("VmRSS:")? / 1024.0,
        number(descriptors as u64),
        number(mappings as u64),
        of("Threads:")?,
        number(keys as u64),
        number(series as u64),
    ])
}

/// Sends requests that the load lacks: uploads of megabytes, large JSON, event streams of seconds,
/// unknown paths, slow bodies, and clients that leave early.
async fn guests(target: SocketAddr, round: usize) {
    let (start, end) = (Instant::now(), Instant::now() + GUESTS);
    let (client, of) = (client(), |path: &str| format!("http://{target}{path}"));
    let mut guests = JoinSet::new();
    let upload = Bytes::from(vec![b'a'; 4 << 20]);
    guests.spawn(process::ask(client.clone(), of("/echo"), upload, end));
    let (http, url) = (client.clone(), of("/embed"));
    guests.spawn(async move {
        // After the arena has slept.
        sleep_until(start + GUESTS / 2).await;
        let large = serde_json::json!({ "texts": vec![process::text(16 << 10); 64] }).to_string();
        process::ask(http, url, large.into(), end).await;
    });
    guests.spawn(async move {
        for nth in 0..STRANGERS {
            let url = format!("http://{target}/{round}-{nth}/stranger");
            let body = Bytes::from(vec![b'a'; 40 * nth]);
            let _ = timeout_at(end, post(&client, &url, body)).await;
            sleep(Duration::from_millis(100)).await;
        }
    });
    // The path, the bytes of a part, the number of parts, and whether the client stays.
    for (path, part, parts, stays) in
        [("/echo", 300, 24, true), ("/words", 4 << 10, 32, true), ("/echo", 16 << 10, 3, false)]
    {
        for _ in 0..3 {
            guests.spawn(async move {
                while Instant::now() < end {
                    let _ = timeout_at(end, stream(target, path, part, parts, stays)).await;
                    sleep(Duration::from_millis(100)).await;
                }
            });
        }
    }
    guests.join_all().await;
}

/// Sends a body in parts, one each quarter of a second, and reads the response meanwhile; that of
/// `/echo` is a stream of events. A client that does not stay disconnects before the body ends.
async fn stream(target: SocketAddr, path: &str, part: usize, parts: usize, stays: bool) {
    let left = (!stays).then(|| Err(io::Error::other("the client left")));
    let parts = iter((0..parts).map(move |_| Ok(vec![b'a'; part])).chain(left));
    let body = parts.then(async |part| {
        sleep(Duration::from_millis(250)).await;
        part
    });
    post(&client(), &format!("http://{target}{path}"), Body::from_stream(body)).await;
}

/// Returns all pairs of values, the earlier one first, and their distance.
fn pairs(values: &[f64]) -> impl Iterator<Item = (f64, f64, usize)> {
    values.iter().enumerate().flat_map(move |(at, early)| {
        let later = values.iter().enumerate().skip(at + 1);
        later.map(move |(to, late)| (*early, *late, to - at))
    })
}

/// Returns the statistic of Kendall's test for a trend, in standard deviations. It is not corrected
/// for ties, which make it smaller.
fn kendall(values: &[f64]) -> f64 {
    let signs = pairs(values).map(|(early, late, _)| match late.total_cmp(&early) {
        std::cmp::Ordering::Less => -1.0,
        std::cmp::Ordering::Equal => 0.0,
        std::cmp::Ordering::Greater => 1.0,
    });
    let (sum, of) = (signs.sum::<f64>(), number(values.len() as u64));
    sum / (of * (of - 1.0) * (2.0 * of + 5.0) / 18.0).sqrt().max(1.0)
}

/// Returns the growth over all values by Sen's slope, the median of the slopes of all pairs.
fn sen(values: &[f64]) -> f64 {
    let slopes = pairs(values).map(|(early, late, over)| (late - early) / number(over as u64));
    median(&slopes.collect::<Vec<_>>()) * number(values.len().saturating_sub(1) as u64)
}
