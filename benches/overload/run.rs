//! One run: a service in a fresh cgroup, load on it, and what became of both.
//!
//! The service's death is an outcome, not a fault. Every wait has an end, and the service ends with
//! the run. Invariant: the cgroup is gone when the run is over.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc;
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};
use serde_json::Value;

use crate::cgroup::Group;
use crate::charge;
use crate::corpus::Corpus;
use crate::load::{self, Offer, Tally};
use crate::service::Policy;

/// How long the service may take to listen.
const START_PATIENCE: Duration = Duration::from_secs(10);
/// How long a killed service may take to be gone, and its cgroup to be empty.
const END_PATIENCE: Duration = Duration::from_secs(5);
/// How long it may take to say what it learned.
const ASK_PATIENCE: Duration = Duration::from_secs(1);
/// How often the cgroup is looked at.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Signal 9, by which the kernel kills for memory.
const SIGKILL: i32 = 9;

/// A run to be made.
#[derive(Clone, Debug)]
pub(crate) struct Plan {
    /// What admits requests.
    pub(crate) policy: Policy,
    /// Requests a second that are offered.
    pub(crate) rate: u32,
    /// How long.
    pub(crate) lasts: Duration,
    /// The limit of the cgroup.
    pub(crate) limit: ByteSize,
    /// Seed of the load.
    pub(crate) seed: u64,
}

/// What came of it.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Whether the service ended before it was told to.
    pub(crate) died: bool,
    /// How, and what the kernel says of it.
    pub(crate) end: String,
    /// Highest working set of the cgroup that was seen.
    pub(crate) peak: ByteSize,
    /// Working set before the first request.
    pub(crate) base: ByteSize,
    /// What came back.
    pub(crate) tally: Tally,
    /// What lowtide had learned at the end.
    pub(crate) learned: Option<String>,
}

/// Whether a cgroup with a limit can be made here.
pub(crate) fn check() -> Result<(), String> {
    let group = Group::make(&name("check"), Some(ByteSize::mib(64).get()))?;
    let charge = charge::working_set(&group.folder);
    let seen = charge.is_some() && charge::oom_kills(&group.folder).is_some();
    seen.then_some(()).ok_or_else(|| "its charge and its events cannot be read".to_owned())
}

fn name(what: &str) -> String {
    format!("lowtide-overload-{}-{what}", std::process::id())
}

/// Makes the run.
pub(crate) fn run(plan: &Plan, corpus: &Corpus) -> Result<Outcome, BoxError> {
    let group = Group::make(&name("run"), Some(plan.limit.get()))?;
    let mut service = Service(spawn(plan.policy, &group)?);
    let to = service.address()?;
    let base = charge::working_set(&group.folder).unwrap_or_default();
    let offer = Offer { rate: plan.rate, lasts: plan.lasts, seed: plan.seed };
    let (dead, over, peak) =
        (AtomicBool::new(false), AtomicBool::new(false), AtomicU64::new(base.get()));
    let tally = std::thread::scope(|scope| {
        scope.spawn(|| {
            // Ends with the load.
            while !over.load(Ordering::Relaxed) {
                let seen = charge::working_set(&group.folder).unwrap_or_default();
                peak.fetch_max(seen.get(), Ordering::Relaxed);
                if service.ended().is_some() {
                    dead.store(true, Ordering::Relaxed);
                    break;
                }
                std::thread::sleep(LOOK_EVERY);
            }
        });
        let tally = load::run(to, corpus, offer, &dead);
        over.store(true, Ordering::Relaxed);
        tally
    })?;
    let ended = service.ended();
    let learned = (ended.is_none() && plan.policy == Policy::Lowtide).then(|| learned(to));
    let kills = charge::oom_kills(&group.folder).unwrap_or_default();
    service.end()?;
    remove(&group.folder);
    Ok(Outcome {
        died: ended.is_some(),
        end: ended.map_or_else(|| "survived".to_owned(), |status| how(status, kills)),
        peak: ByteSize::new(peak.into_inner()),
        base,
        tally,
        learned,
    })
}

/// Starts the service inside the cgroup: a shell enters it and becomes the service, so that nothing
/// of the service is charged elsewhere.
fn spawn(policy: Policy, group: &Group) -> Result<Child, BoxError> {
    let enter = "echo $$ >\"$0\" && exec \"$@\"";
    let child = Command::new("/bin/sh")
        .args(["-c", enter])
        .arg(group.entrance())
        .arg(std::env::current_exe()?)
        .args(["--serve", policy.name()])
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()?;
    Ok(child)
}

fn how(status: ExitStatus, kills: u64) -> String {
    if status.signal() == Some(SIGKILL) && kills > 0 {
        "OOM-killed".to_owned()
    } else {
        format!("died ({status}, {kills} OOM kills)")
    }
}

/// The service; it is killed when this is dropped.
struct Service(Child);

impl Service {
    /// Waits until it listens, and says where.
    fn address(&mut self) -> Result<SocketAddr, BoxError> {
        let output = self.0.stdout.take().ok_or("no pipe to the service")?;
        let (tell, told) = mpsc::sync_channel(1);
        // Ends with the first line, or with the service.
        std::thread::spawn(move || {
            let mut line = String::new();
            let read = BufReader::new(output).read_line(&mut line);
            let _ = tell.send(read.map(|_| line));
        });
        let line = told.recv_timeout(START_PATIENCE)??;
        let address = line.trim().strip_prefix("listening ");
        Ok(address.ok_or_else(|| format!("the service said {line:?}"))?.parse()?)
    }

    /// How it ended, where it has.
    fn ended(&mut self) -> Option<ExitStatus> {
        self.0.try_wait().ok().flatten()
    }

    /// Kills it and waits until it is gone.
    fn end(&mut self) -> Result<(), BoxError> {
        let deadline = Instant::now() + END_PATIENCE;
        let _ = self.0.kill();
        while self.ended().is_none() {
            if Instant::now() > deadline {
                return Err("the service cannot be killed".into());
            }
            std::thread::sleep(LOOK_EVERY);
        }
        Ok(())
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.end();
    }
}

/// Removes the cgroup, which may take a moment after its last process.
fn remove(folder: &Path) {
    let deadline = Instant::now() + END_PATIENCE;
    while folder.exists() && Instant::now() < deadline {
        if std::fs::remove_dir(folder).is_err() {
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

/// What the service says of its memory at the end.
fn learned(to: SocketAddr) -> String {
    ask(to).unwrap_or_else(|error| format!("not told: {error}"))
}

fn ask(to: SocketAddr) -> Result<String, BoxError> {
    let mut stream = TcpStream::connect_timeout(&to, ASK_PATIENCE)?;
    stream.set_read_timeout(Some(ASK_PATIENCE))?;
    write!(stream, "GET /memory HTTP/1.1\r\nhost: {to}\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (_, body) = text.split_once("\r\n\r\n").ok_or("no body")?;
    let memory: Value = serde_json::from_str(body)?;
    let k = memory["host"]["budget"]["multiplier"].as_f64().unwrap_or(0.0);
    Ok(format!("K {k:.2}, shed {}", memory["requests"]["shed"]))
}
