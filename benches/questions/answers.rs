//! Stages incidents, and reads the answer where an operator reads it: in `/memory`, `/metrics` and
//! the log.
//!
//! Each incident runs in a process of its own (`--only NAME` runs one), with the real heap, and is
//! answered if the texts that an operator sees name the cause. The eighth question, who holds a
//! GPU, needs a driver: `cargo xtask figures questions` stages it with the tests of the fake
//! driver.

use std::hint::black_box;
use std::io;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::routing::post;
use common::figures::{Figures, count};
use http::Request;
use lowtide::admission::Cost;
use lowtide::clock::{Clock, ManualClock};
use lowtide::config::DeviceChoice;
use lowtide::device::SleepOptions;
use lowtide::service::Endpoints;
use lowtide::{BoxError, ByteSize, Memory};
use serde_json::Value;
use tower::ServiceExt as _;

/// The incidents that the log must name: those of [`LOGGED`], an eviction and rejections.
const NAMED_IN_LOG: f64 = 6.0;
/// The time within which an answer must be found.
const MINUTE: Duration = Duration::from_secs(60);

/// A process that stages an incident, with a sample for each 512 KiB.
fn stage_in_process(name: &str) -> Result<Command, BoxError> {
    let mut command = common::own(&["answers", "--only", name])?;
    command.env("_RJEM_MALLOC_CONF", "lg_prof_sample:19");
    Ok(command)
}

/// Stages this incident, or all of them and prints the figures. Returns `true` if every question was
/// answered.
pub(crate) fn run(only: Option<&str>) -> Result<bool, BoxError> {
    if let Some(name) = only {
        println!("answer: {}", stage(name)?);
        return Ok(true);
    }
    let (mut answered, mut logged) = (0.0, 0.0);
    for (nth, (name, question)) in INCIDENTS.into_iter().chain(LOGGED).enumerate() {
        let begin = Instant::now();
        let child = stage_in_process(name)?.output()?;
        let text = String::from_utf8_lossy(&child.stdout);
        println!("question: {question}\n{text}");
        let in_time = begin.elapsed() <= MINUTE;
        if !child.status.success() || !in_time {
            let error = String::from_utf8_lossy(&child.stderr);
            println!("{name}: not answered (in time: {in_time}): {error}");
        } else if nth < INCIDENTS.len() {
            answered += 1.0;
        }
        logged += f64::from(u8::from(text.contains("\nlog: ")));
    }
    let (all, mut figures) = (count(INCIDENTS.len() as u64), Figures::default());
    figures.at_least("questions.staged_answered", answered, "questions", all);
    figures.at_least("questions.logs.named", logged, "incidents", NAMED_IN_LOG);
    Ok(figures.print())
}

// The incidents: each stages a cause and returns the text that names it.

const MIB: usize = 1 << 20;
/// The time for which an incident waits until its cause is shown.
const PATIENCE: Duration = Duration::from_secs(20);

/// The text that names the cause, and after it the log line that does, if there is one.
type Answer = String;

/// Incidents by name, and the questions of an operator.
const INCIDENTS: [(&str, &str); 7] = [
    ("rss", "Why is RSS so high when little is live?"),
    ("evicted", "Who evicted my model?"),
    ("slow_bodies", "Why are requests rejected at a fraction of the limit?"),
    ("leak", "Is it a leak?"),
    ("route", "Which route uses the memory?"),
    ("smaller_limit", "What happens if I lower the limit?"),
    ("deploy", "Did the last deploy make it worse?"),
];

/// Incidents that only the log must name, besides the eviction and the rejections.
const LOGGED: [(&str, &str); 4] = [
    ("broken_model", "Why is my model not loaded?"),
    ("pressure", "When was memory short?"),
    ("exhausted", "Why does it reject everything?"),
    ("asleep", "Where is my arena?"),
];

/// Stages the incident of a name.
#[tokio::main(flavor = "current_thread")]
async fn stage(name: &str) -> Result<Answer, BoxError> {
    match name {
        "rss" => rss().await,
        "evicted" => evicted().await,
        "slow_bodies" => slow_bodies().await,
        "leak" => leak().await,
        "route" => route().await,
        "smaller_limit" => smaller_limit().await,
        "deploy" => deploy(),
        "deployed" => deployed().await,
        "broken_model" => broken_model(),
        "pressure" => full(0.80, &["pressure level changed", "was=\"none\""]).await,
        "exhausted" => full(0.92, &["memory exhausted", "live heap"]).await,
        "asleep" => asleep(),
        _ => Err(format!("no incident {name:?}").into()),
    }
}

/// Log lines, as a subscriber writes them.
struct Log(tempfile::NamedTempFile);

impl Log {
    fn start() -> Result<Self, BoxError> {
        let log = tempfile::NamedTempFile::new()?;
        let subscriber = tracing_subscriber::fmt().with_ansi(false);
        subscriber.with_writer(log.reopen()?).try_init()?;
        Ok(Self(log))
    }

    /// Adds the first line with all of these texts to an answer.
    fn find(&self, answer: &str, texts: &[&str]) -> Option<Answer> {
        let log = std::fs::read_to_string(&self.0).ok()?;
        let line = log.lines().find(|line| texts.iter().all(|text| line.contains(text)))?;
        Some(format!("{answer}\nlog: {line}"))
    }
}

fn memory(limit: ByteSize) -> Result<Memory, BoxError> {
    let builder = Memory::builder().memory_limit(limit).device(DeviceChoice::None);
    Ok(builder.max_wait(Duration::ZERO).without_environment().start()?)
}

/// Requests the document with these parts.
fn document(memory: &Memory, parts: &str) -> Result<Value, BoxError> {
    let endpoints = Endpoints::new(Some(memory.clone()));
    let request = Request::get(format!("/memory?with={parts}")).body(())?;
    let answer = endpoints.answer_request(&request).ok_or("/memory is not answered")?;
    Ok(serde_json::from_slice(answer.body())?)
}

/// Waits until a look returns a value.
async fn until<T>(
    what: &str,
    mut look: impl FnMut() -> Result<Option<T>, BoxError>,
) -> Result<T, BoxError> {
    let begin = Instant::now();
    loop {
        if let Some(found) = look()? {
            return Ok(found);
        }
        if begin.elapsed() > PATIENCE {
            return Err(format!("never shown: {what}").into());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
}

/// Returns the sentence about this subject, if it contains the text.
fn finding(told: &Value, about: &str, text: &str) -> Option<String> {
    let findings = told["findings"].as_array()?.iter();
    let mut texts =
        findings.filter(|one| one["about"] == about).filter_map(|one| one["text"].as_str());
    texts.find(|one| one.contains(text)).map(str::to_owned)
}

/// Nine of ten blocks of 48 bytes are freed: their pages stay.
async fn rss() -> Result<Answer, BoxError> {
    let memory = memory(ByteSize::gib(1))?;
    let mut blocks: Vec<Option<Box<[u8; 48]>>> =
        (0..5_000_000).map(|_| Some(Box::new([1; 48]))).collect();
    for (nth, block) in blocks.iter_mut().enumerate() {
        if nth % 10 != 0 {
            *block = None;
        }
    }
    let text = until("fragmentation", || {
        let told = document(&memory, "size_classes,mappings")?;
        let worst = &told["size_classes"][0];
        let is_class = worst["size_bytes"] == 48;
        Ok(finding(&told, "retained", "heap fragmentation").filter(|_| is_class).map(|text| {
            format!("{text} The worst size class is 48 B, with {} free.", worst["slack_bytes"])
        }))
    });
    let text = text.await?;
    drop(black_box(blocks));
    Ok(text)
}

/// Two models that do not fit together.
async fn evicted() -> Result<Answer, BoxError> {
    let log = Log::start()?;
    let memory = memory(ByteSize::gib(1))?;
    let model = |name| memory.managed(name, || Ok(())).cost(Cost::host(ByteSize::mib(500)));
    let first = model("embedder").register()?;
    let second = model("ranker").register()?;
    drop(first.acquire_blocking()?);
    drop(second.acquire_blocking()?);
    let text = until("the eviction", || {
        let told = document(&memory, "events")?;
        let events = told["events"].as_array().ok_or("no events")?;
        let of = |event: &&Value| event["kind"] == "evict" && event["about"] == "embedder";
        let text = events.iter().find(of).and_then(|event| event["text"].as_str());
        Ok(text.filter(|text| text.contains("\"ranker\"")).map(str::to_owned))
    });
    let text = text.await?;
    Ok(log.find(&text, &["resource unloaded", "embedder", "ranker"]).unwrap_or(text))
}

/// A loader that fails.
fn broken_model() -> Result<Answer, BoxError> {
    let log = Log::start()?;
    let memory = memory(ByteSize::gib(1))?;
    let fails = || Err::<(), _>(BoxError::from("no such file: weights.bin"));
    let model = memory.managed("ranker", fails).register()?;
    if model.acquire_blocking().is_ok() {
        return Err("the loader failed".into());
    }
    Ok(log.find("", &["load failed", "ranker", "weights.bin"]).ok_or("not logged")?)
}

/// Live memory that no request owns fills this part of the limit, and requests arrive.
async fn full(part: f64, line: &[&str]) -> Result<Answer, BoxError> {
    let log = Log::start()?;
    let limit = ByteSize::mib(512);
    let memory = memory(limit)?;
    let cache = vec![1_u8; limit.scaled(part).as_usize().ok_or("too large")?];
    let text = until("the line", || {
        drop(memory.admission().try_admit(Cost::host(ByteSize::kib(64))));
        Ok(log.find("", line))
    });
    let text = text.await?;
    drop(black_box(cache));
    Ok(text)
}

/// An arena that sleeps on request.
fn asleep() -> Result<Answer, BoxError> {
    let log = Log::start()?;
    let builder = Memory::builder().memory_limit(ByteSize::gib(1)).device(DeviceChoice::Host);
    let memory = builder.without_environment().start()?;
    let arena = memory.devices().open_arena("embedder")?;
    arena.sleep(SleepOptions::default())?;
    Ok(log.find("", &["arena asleep", "embedder"]).ok_or("not logged")?)
}

/// Bodies that never arrive hold reservations; then further requests are rejected.
async fn slow_bodies() -> Result<Answer, BoxError> {
    let log = Log::start()?;
    let memory = memory(ByteSize::gib(1))?;
    let read = async |body: Bytes| body.len().to_string();
    let app = Router::new().route("/upload", post(read)).layer(memory.layer().without_slow_start());
    let upload = |body| {
        let request = Request::post("/upload").header("content-length", 60 * MIB).body(body);
        request.map(|request| app.clone().oneshot(request))
    };
    for _ in 0..64 {
        let never = futures_util::stream::pending::<Result<Bytes, io::Error>>();
        tokio::spawn(upload(Body::from_stream(never))?);
        tokio::task::yield_now().await;
    }
    let text = until("the rejections", || {
        let told = document(&memory, "events,permits")?;
        Ok(finding(&told, "rejections", "wait for their clients"))
    });
    let text = text.await?;
    Ok(log.find(&text, &["requests rejected", "full"]).unwrap_or(text))
}

#[inline(never)]
fn a_cache_that_only_grows(cache: &mut Vec<Vec<u8>>) {
    cache.push(vec![1; 4 * MIB]);
}

/// Live memory grows from one quiet time to the next; the call site is named.
async fn leak() -> Result<Answer, BoxError> {
    let clock = Arc::new(ManualClock::new());
    let own: Arc<dyn Clock> = clock.clone();
    let builder = Memory::builder().clock(own).memory_limit(ByteSize::gib(4));
    let memory = builder.device(DeviceChoice::None).without_environment().start()?;
    let mut cache = Vec::new();
    for second in 0..150 {
        if second % 5 == 0 {
            a_cache_that_only_grows(&mut cache);
        }
        clock.advance(Duration::from_secs(1));
        tokio::time::sleep(Duration::from_millis(40)).await;
    }
    let told = document(&memory, "leaks")?;
    let leaks = &told["leaks"];
    let growth = leaks["growth_per_hour_bytes"].as_f64().ok_or("no trend")?;
    let frames = leaks["suspects"]["list"].to_string();
    if growth < 1e9 || !frames.contains("a_cache_that_only_grows") {
        return Err(format!("not named: {leaks}").into());
    }
    drop(black_box(cache));
    let grown = ByteSize::new(leaks["suspects"]["list"][0]["growth_bytes"].as_u64().unwrap_or(0));
    let gib = growth / f64::from(1 << 30);
    Ok(format!("live memory grows by {gib:.1} GiB an hour; `a_cache_that_only_grows` by {grown}"))
}

/// One route holds far more than the other.
async fn route() -> Result<Answer, BoxError> {
    let memory = memory(ByteSize::gib(1))?;
    let hold = |mib: usize| {
        async move || {
            let held = black_box(vec![1_u8; mib * MIB]);
            std::future::pending::<()>().await;
            held.len().to_string()
        }
    };
    let routes = Router::new().route("/rerank", post(hold(40))).route("/embed", post(hold(2)));
    let app = routes.layer(memory.layer());
    for path in ["/embed", "/embed", "/rerank", "/embed", "/rerank"] {
        tokio::spawn(app.clone().oneshot(Request::post(path).body(Body::empty())?));
    }
    until("the route", || {
        let told = document(&memory, "routes")?;
        let first = &told["routes"][0];
        let live = first["live_bytes"].as_u64().unwrap_or(0);
        let is_largest = first["route"] == "/rerank" && live >= 70 << 20;
        Ok(is_largest.then(|| format!("POST /rerank holds {}", ByteSize::new(live))))
    })
    .await
}

/// Traffic at 1 GiB that would not fit below 256 MiB.
async fn smaller_limit() -> Result<Answer, BoxError> {
    let memory = memory(ByteSize::gib(1))?;
    let admission = memory.admission();
    // Requests of 4 MiB, of which 64 run at the same time.
    let mut running = std::collections::VecDeque::new();
    let begin = Instant::now();
    while begin.elapsed() < Duration::from_secs(15) {
        for _ in 0..16 {
            running.push_back(admission.try_admit(Cost::host(ByteSize::mib(4))));
            if running.len() > 64 {
                running.pop_front();
            }
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    let told = document(&memory, "limit_advice&limit=256Mi")?;
    let at = &told["limit_advice"]["at"];
    let share = at["rejected_share"].as_f64().ok_or_else(|| format!("no forecast: {told}"))?;
    if share < 0.05 {
        return Err(format!("too few would be rejected: {at}").into());
    }
    Ok(at["sentence"].as_str().unwrap_or_default().to_owned())
}

/// The bytes per request of two versions, as Prometheus would divide the counters.
fn deploy() -> Result<Answer, BoxError> {
    let mut per_request = Vec::new();
    for (version, size) in [("1.4.0", MIB), ("1.5.0", 4 * MIB)] {
        let child = stage_in_process("deployed")?
            .env("QUESTIONS_DEPLOY", format!("{size}"))
            .env("LOWTIDE_SERVICE_VERSION", version)
            .output()?;
        let text = String::from_utf8_lossy(&child.stdout).into_owned();
        let of_version = format!("service_version=\"{version}\"");
        if !text.contains(&of_version) {
            return Err(format!("{of_version} is not among the metrics: {text}").into());
        }
        let sum = |name: &str| -> f64 {
            let lines = text.lines().filter(|line| line.starts_with(name));
            lines.filter_map(|line| line.rsplit(' ').next()?.parse::<f64>().ok()).sum()
        };
        let requests = sum("lowtide_admission_route_requests_total{");
        per_request.push(sum("lowtide_admission_route_peak_bytes_total{") / requests);
    }
    let [before, after] = per_request[..] else { return Err("two versions".into()) };
    let ratio = after / before;
    if !(3.0..5.0).contains(&ratio) {
        return Err(format!("{before} and {after} bytes per request").into());
    }
    Ok(format!("version 1.5.0 needs {ratio:.1} times the bytes per request of 1.4.0"))
}

/// Serves requests that need the bytes of the environment, and prints the metrics.
async fn deployed() -> Result<Answer, BoxError> {
    let size: usize = std::env::var("QUESTIONS_DEPLOY")?.parse()?;
    let builder = Memory::builder().memory_limit(ByteSize::gib(1)).device(DeviceChoice::None);
    let memory = builder.prometheus()?.start()?;
    let work = async move || black_box(vec![1_u8; size]).len().to_string();
    let app = Router::new().route("/embed", post(work)).layer(memory.layer());
    for _ in 0..50 {
        app.clone().oneshot(Request::post("/embed").body(Body::empty())?).await?;
    }
    until("the metrics", || {
        let endpoints = Endpoints::new(Some(memory.clone()));
        let text = endpoints.answer("/metrics").ok_or("no metrics")?.into_body();
        Ok(text.contains("route_requests_total{").then_some(text))
    })
    .await
}
