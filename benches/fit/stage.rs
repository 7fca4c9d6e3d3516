//! One run in a real cgroup: a service under load fits in half of its limit, the limit is lowered
//! as soon as it says so, and raised again later. The load goes on all the time.
//!
//! Invariant: the cgroup is gone when the run is over.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use bytes::Bytes;
use http_body_util::{BodyExt as _, Empty};
use hyper::Request;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use lowtide::{BoxError, ByteSize};
use serde_json::Value;
use tokio::task::JoinSet;

use crate::cgroup::Group;
use crate::chance::Chance;
use crate::charge;
use crate::figures::count;
use crate::service::MODELS;

/// The limit of the cgroup, and the smaller one.
pub(crate) const LIMIT: ByteSize = ByteSize::gib(1);
pub(crate) const FIT: ByteSize = ByteSize::mib(512);
/// Requests a second. They hold 4.5 MiB for half a second on average: 270 MiB beside four models of
/// 100 MiB each.
const RATE: f64 = 120.0;
/// The load before the fit, in the smaller limit, and in the larger one again.
const PHASE: Duration = Duration::from_secs(4);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// The longest time for something that the service should do at once.
const PATIENCE: Duration = Duration::from_secs(40);

type Http = Client<HttpConnector, Empty<Bytes>>;

/// What happened in a run.
#[derive(Clone, Debug, Default)]
pub(crate) struct Run {
    /// The seconds from the command to its success.
    pub(crate) seconds: f64,
    pub(crate) outcome: String,
    /// The processes that the kernel killed, and this one if it has ended.
    pub(crate) kills: u64,
    /// The usage when the command was given, and when the limit was lowered.
    pub(crate) before: ByteSize,
    pub(crate) usage: ByteSize,
    /// The largest usage in the smaller limit.
    pub(crate) peak: ByteSize,
    /// Requests served a second: before, in the smaller limit, in the larger one again.
    pub(crate) served: [f64; 3],
    /// The seconds until admission followed the larger limit.
    pub(crate) follows: f64,
}

/// The service, which ends with this.
struct Service {
    child: Child,
    at: SocketAddr,
}

impl Service {
    fn start(group: &Group) -> Result<Self, BoxError> {
        let mut command = Command::new(std::env::current_exe()?);
        command.arg("serve").arg(group.entrance()).stdin(Stdio::piped()).stdout(Stdio::piped());
        let mut child = command.spawn()?;
        let mut line = String::new();
        BufReader::new(child.stdout.take().ok_or("no pipe")?).read_line(&mut line)?;
        let at = line.trim().strip_prefix("listening ").and_then(|at| at.parse().ok());
        match at {
            Some(at) => Ok(Self { child, at }),
            None => {
                let _ = child.kill();
                let _ = child.wait();
                Err(format!("the service said {line:?}").into())
            }
        }
    }

    fn has_ended(&mut self) -> bool {
        self.child.try_wait().is_ok_and(|status| status.is_some())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// Runs it once.
pub(crate) async fn run(nth: u64) -> Result<Run, BoxError> {
    let name = format!("lowtide-fit-{}-{nth}", std::process::id());
    let group = Group::make(&name, Some(LIMIT.get()))?;
    let mut service = Service::start(&group)?;
    let (http, at) = (Client::builder(TokioExecutor::new()).build_http(), service.at);
    let served = Arc::new(AtomicU64::new(0));
    let load = tokio::spawn(load(http.clone(), at, Chance::new(nth), Arc::clone(&served)));
    let staged = stage(&group, &mut service, &http, &served).await;
    load.abort();
    let kills = charge::oom_kills(&group.folder).unwrap_or_default();
    let ended = u64::from(service.has_ended());
    drop(service);
    let mut run = match staged {
        Ok(run) => run,
        // A run that could not go on because the process was killed says so.
        Err(error) if kills + ended > 0 => Run { outcome: error.to_string(), ..Run::default() },
        Err(error) => return Err(error),
    };
    run.kills = kills.max(ended);
    // The kernel takes a moment until the cgroup is empty.
    let deadline = Instant::now() + PATIENCE;
    while fs::read_to_string(group.entrance()).is_ok_and(|ids| !ids.is_empty()) {
        if Instant::now() > deadline {
            return Err("the cgroup is not empty".into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    Ok(run)
}

async fn stage(
    group: &Group,
    service: &mut Service,
    http: &Http,
    served: &AtomicU64,
) -> Result<Run, BoxError> {
    let (at, folder) = (service.at, &*group.folder);
    let mut run = Run::default();
    let rate = |since: u64| count(served.load(Ordering::Relaxed) - since) / PHASE.as_secs_f64();
    let since = served.load(Ordering::Relaxed);
    tokio::time::sleep(PHASE).await;
    run.served[0] = rate(since);
    run.before = charge::usage(folder).ok_or("no usage")?;
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
    run.seconds = start.elapsed().as_secs_f64();
    run.outcome = text(&task, "outcome");
    if text(&task, "state") == "failed" {
        return Err(run.outcome.into());
    }
    run.usage = charge::usage(folder).ok_or("no usage")?;
    if run.usage >= FIT {
        return Err(format!("a kubelet would refuse: usage {}", run.usage).into());
    }
    set_limit(folder, FIT)?;
    let since = served.load(Ordering::Relaxed);
    let end = Instant::now() + PHASE;
    while Instant::now() < end {
        run.peak = run.peak.max(charge::usage(folder).unwrap_or_default());
        if service.has_ended() {
            return Err("the service has ended".into());
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
    run.served[1] = rate(since);
    set_limit(folder, LIMIT)?;
    let start = Instant::now();
    let follows = |figures: &Value| {
        let ceiling = figures["host"]["budget"]["ceiling_bytes"].as_u64()?;
        (ceiling >= LIMIT.scaled(0.8).get()).then_some(())
    };
    until(http, at, follows).await?;
    run.follows = start.elapsed().as_secs_f64();
    let since = served.load(Ordering::Relaxed);
    tokio::time::sleep(PHASE).await;
    run.served[2] = rate(since);
    Ok(run)
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
    let answer = http.request(request.header("lowtide-admin", "1").body(Empty::new())?).await?;
    let body = answer.into_body().collect().await?.to_bytes();
    Ok(serde_json::from_slice(&body)?)
}

/// An open loop of requests: half of them use a model, mostly the first.
async fn load(http: Http, at: SocketAddr, mut chance: Chance, served: Arc<AtomicU64>) {
    let mut requests = JoinSet::new();
    let mut next = tokio::time::Instant::now();
    loop {
        next += Duration::from_secs_f64(chance.gap(RATE));
        tokio::time::sleep_until(next).await;
        while requests.try_join_next().is_some() {}
        let (kib, millis) = (chance.between(1024.0, 8192.0), chance.between(200.0, 800.0));
        let mut uri = format!("http://{at}/work?kib={kib:.0}&ms={millis:.0}");
        if chance.happens(0.5) {
            let nth = if chance.happens(0.8) { 0 } else { chance.pick(&[1, 2, MODELS - 1]) };
            uri.push_str(&format!("&model={nth}"));
        }
        let (http, served) = (http.clone(), Arc::clone(&served));
        requests.spawn(async move {
            let Ok(request) = Request::get(uri).body(Empty::new()) else { return };
            if let Ok(answer) = http.request(request).await
                && answer.status().is_success()
                && answer.into_body().collect().await.is_ok()
            {
                served.fetch_add(1, Ordering::Relaxed);
            }
        });
    }
}

/// Changes the limit of a cgroup.
fn set_limit(folder: &Path, limit: ByteSize) -> Result<(), BoxError> {
    let text = limit.get().to_string();
    let v2 = folder.join("memory.max");
    if v2.exists() {
        return Ok(fs::write(v2, text)?);
    }
    // The limit with swap, where it is accounted, is never below that without.
    let (both, one) =
        (folder.join("memory.memsw.limit_in_bytes"), folder.join("memory.limit_in_bytes"));
    let raised = fs::write(&both, &text).is_ok();
    fs::write(&one, &text)?;
    if !raised {
        let _ = fs::write(&both, &text);
    }
    Ok(())
}
