//! The admin command `fit` in a real cgroup; `crates/admission/tests/admission/fits.rs` runs random
//! schedules of it in virtual time.
//!
//! In a run, a service under load in a cgroup of 1 GiB gets the command to fit in 512 MiB, the limit is
//! lowered as soon as it fits, and raised again.

use std::hint::black_box;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Path, State};
use axum::http::StatusCode;
use axum::http::request::Parts;
use axum::routing::get;
use bytes::Bytes;
use common::figures::{Figures, count};
use common::http::{Http, client, send};
use common::process::{Process, usage};
use http::Request;
use lowtide::admission::{Cost, Managed};
use lowtide::service::{Endpoints, MemoryLayer};
use lowtide::{BoxError, ByteSize, Memory};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;

use common::chance::Chance;

/// The longest time until the service fits.
const SECONDS_MAX: f64 = 5.0;

/// The runs in a cgroup.
const RUNS: u64 = 5;

/// Runs the service, and adds the figures.
#[tokio::main]
pub(crate) async fn measure(figures: &mut Figures) -> Result<(), BoxError> {
    let (mut seconds, mut kills) = (0.0_f64, 0);
    for nth in 0..RUNS {
        let (of_run, killed) = run(nth).await?;
        seconds = seconds.max(of_run);
        kills += killed;
    }
    figures.at_most("fleet.fit.seconds", seconds, "s", SECONDS_MAX);
    figures.at_most("fleet.fit.kills", count(kills), "kills", 0.0);
    Ok(())
}

// One run in a real cgroup: a service under load fits in half of its limit, the limit is lowered
// as soon as it says so, and raised again later. The load goes on all the time.
//
// Invariant: the cgroup is gone when the run is over.

/// The limit of the cgroup, and the smaller one.
const LIMIT: ByteSize = ByteSize::gib(1);
const FIT: ByteSize = ByteSize::mib(512);
/// Requests a second. They hold 4.5 MiB for half a second on average: 270 MiB in addition to four
/// models of 100 MiB each.
const RATE: f64 = 120.0;
/// The load before the fit, and in the smaller limit.
const PHASE: Duration = Duration::from_secs(4);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The longest time for something that the service should do at once.
const PATIENCE: Duration = Duration::from_secs(40);

/// Runs it once. Returns the seconds from the command to its success, and the processes that the
/// kernel killed, or 1 if this one has ended.
async fn run(nth: u64) -> Result<(f64, u64), BoxError> {
    let (service, at) = common::serve(&common::own(&["serve", "fit"])?, LIMIT)?;
    let http = client();
    let load = tokio::spawn(load(http.clone(), at, Chance::new(nth)));
    let staged = stage(&service, at, &http).await;
    load.abort();
    let kills = service.end();
    match staged {
        Ok(seconds) => Ok((seconds, kills)),
        // A run that could not go on because the process was killed says so.
        Err(error) if kills > 0 => {
            println!("{error}");
            Ok((f64::NAN, kills))
        }
        Err(error) => Err(error),
    }
}

async fn stage(service: &Process, at: SocketAddr, http: &Http) -> Result<f64, BoxError> {
    let usage = || service.folder().and_then(usage).ok_or("no cgroup can be made here");
    tokio::time::sleep(PHASE).await;
    let before = usage()?;
    let start = Instant::now();
    let told = ask(http, at, "POST", &format!("/memory/fit?limit={}", FIT.get())).await?;
    let id = told["admin_task"].as_u64().ok_or_else(|| told.to_string())?;
    let text = |task: &Value, key: &str| task[key].as_str().unwrap_or_default().to_owned();
    let is_over = |figures: &Value| {
        let list = figures["admin_tasks"]["list"].as_array()?;
        let task = list.iter().find(|task| task["id"] == id)?;
        matches!(&*text(task, "state"), "done" | "failed").then(|| task.clone())
    };
    let task = until(http, at, is_over).await?;
    let seconds = start.elapsed().as_secs_f64();
    let outcome = text(&task, "outcome");
    if text(&task, "state") == "failed" {
        return Err(outcome.into());
    }
    let after = usage()?;
    println!("{outcome}; usage {before} before, {after} after {seconds:.2} s");
    if after >= FIT {
        return Err(format!("a kubelet would refuse: usage {after}").into());
    }
    service.set_limit(FIT)?;
    tokio::time::sleep(PHASE).await;
    service.set_limit(LIMIT)?;
    let follows = |figures: &Value| {
        let ceiling = figures["host"]["budget"]["ceiling_bytes"].as_u64()?;
        (ceiling >= LIMIT.scaled(0.8).get()).then_some(())
    };
    until(http, at, follows).await?;
    Ok(seconds)
}

/// Looks at the figures until this finds something.
async fn until<T>(
    http: &Http,
    at: SocketAddr,
    mut find: impl FnMut(&Value) -> Option<T>,
) -> Result<T, BoxError> {
    let deadline = Instant::now() + PATIENCE;
    loop {
        let figures = ask(http, at, "GET", "/memory?with=admin_tasks").await?;
        if let Some(found) = find(&figures) {
            return Ok(found);
        }
        if Instant::now() > deadline {
            return Err(format!("not within {PATIENCE:?}: {}", figures["admin_tasks"]).into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

async fn ask(http: &Http, at: SocketAddr, method: &str, path: &str) -> Result<Value, BoxError> {
    let request = Request::builder().method(method).uri(format!("http://{at}{path}"));
    let (_, body) = send(http, request.header("lowtide-admin", "1"), Bytes::new()).await?;
    Ok(serde_json::from_slice(&body)?)
}

/// An open loop of requests: half of them use a model, mostly the first.
async fn load(http: Http, at: SocketAddr, mut chance: Chance) {
    let mut requests = JoinSet::new();
    let mut next = Instant::now();
    loop {
        next += Duration::from_secs_f64(chance.gap(RATE));
        tokio::time::sleep_until(next).await;
        while requests.try_join_next().is_some() {}
        let (kib, millis) = (chance.between(1024.0, 8192.0), chance.between(200.0, 800.0));
        let model = match chance.happens(0.5) {
            true if chance.happens(0.8) => 0,
            true => chance.pick(&[1, 2, MODELS - 1]),
            false => MODELS,
        };
        let uri = format!("http://{at}/hold/{kib:.0}/{millis:.0}/{model}");
        let http = http.clone();
        requests.spawn(async move { send(&http, Request::get(uri), Bytes::new()).await.is_ok() });
    }
}

// The service, in a process of its own: models, and requests that hold memory for a while.
//
// `GET /hold/4096/500/1` allocates so many KiB, holds them for so many milliseconds, and uses that
// model meanwhile, if it exists. It ends when its standard input does.

/// The models, and what each holds.
const MODELS: usize = 4;
const WEIGHTS: ByteSize = ByteSize::mib(100);
/// The longest time that a request waits for room.
const MAX_WAIT: Duration = Duration::from_secs(1);

/// Serves. Prints its address.
pub(crate) fn serve() -> Result<(), BoxError> {
    let memory = Memory::builder().without_environment().start()?;
    let models = (0..MODELS).map(|nth| model(&memory, nth)).collect::<Result<Vec<_>, _>>()?;
    let estimate = |head: &Parts| {
        let kib = head.uri.path().split('/').nth(2).and_then(|kib| kib.parse().ok());
        Cost::host(ByteSize::kib(kib.unwrap_or(0)))
    };
    let layer = MemoryLayer::new(memory.admission().clone(), estimate).with_max_wait(MAX_WAIT);
    let endpoints = Endpoints::new(Some(memory)).with_local_admin().into_routes();
    let routes = Router::new()
        .route("/hold/{kib}/{millis}/{model}", get(work))
        .with_state(Arc::<[_]>::from(models))
        .layer(layer)
        .merge(endpoints);
    crate::runtime()?.block_on(common::listen(routes))
}

fn model(memory: &Memory, nth: usize) -> Result<Managed<Vec<u8>>, BoxError> {
    let load = || Ok(vec![1; WEIGHTS.as_usize().unwrap_or_default()]);
    let model = memory.managed(&format!("model-{nth}"), load).cost(Cost::host(WEIGHTS));
    Ok(model.register()?)
}

async fn work(
    State(models): State<Arc<[Managed<Vec<u8>>]>>,
    Path((kib, millis, model)): Path<(usize, u64, usize)>,
) -> StatusCode {
    let guard = match models.get(model) {
        Some(model) => match model.acquire().await {
            Ok(guard) => Some(guard),
            Err(_) => return StatusCode::SERVICE_UNAVAILABLE,
        },
        None => None,
    };
    let held = vec![2_u8; kib << 10];
    tokio::time::sleep(Duration::from_millis(millis)).await;
    drop(black_box((held, guard)));
    StatusCode::OK
}
