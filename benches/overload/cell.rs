//! One cell: a service in a fresh cgroup, load on it from another process, and what became of both.
//!
//! The service's death is an outcome, not a fault. Every wait has an end, and both processes end
//! with the cell. Invariant: the cgroup is gone when the cell is over.

use std::io::{BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::os::unix::process::ExitStatusExt as _;
use std::path::Path;
use std::process::{ChildStdin, ExitStatus};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::cgroup::Group;
use crate::charge::{self, Ticks};
use crate::load::{Order, Tally};
use crate::process::{self, Process, remove};
use crate::schedule::Offer;
use crate::service::{Report, Settings};

/// The longest time that the service may take to return its report.
const ASK_PATIENCE: Duration = Duration::from_secs(2);
/// The time between two looks at the cgroup.
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Signal 9, by which the kernel kills for memory.
const SIGKILL: i32 = 9;

/// The outcome of a cell.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// The service's exit, if it ended too early.
    pub(crate) death: Option<String>,
    /// The number of processes of the cgroup that the kernel killed for memory.
    pub(crate) oom_kills: u64,
    /// Highest working set of the cgroup that was seen, and what it was made of.
    pub(crate) peak: ByteSize,
    /// As said.
    pub(crate) peak_parts: String,
    /// Working set before the first request.
    pub(crate) base: ByteSize,
    /// The part of the processors' time that was used while load was offered.
    pub(crate) busy: f64,
    /// The outcomes of the requests.
    pub(crate) tally: Tally,
    /// The report of the service; empty if it died.
    pub(crate) report: Report,
}

/// Checks that a cgroup with a limit can be made here.
pub(crate) fn check() -> Result<(), String> {
    let group = Group::make(&name("check"), Some(ByteSize::mib(64).get()))?;
    let charge = charge::working_set(&group.folder);
    let seen = charge.is_some() && charge::oom_kills(&group.folder).is_some();
    seen.then_some(()).ok_or_else(|| "its charge and its events cannot be read".to_owned())
}

fn name(what: &str) -> String {
    format!("lowtide-overload-{}-{what}", std::process::id())
}

/// A service in its cgroup.
pub(crate) struct Bed {
    /// The cgroup.
    pub(crate) group: Group,
    service: Process,
    front: SocketAddr,
    back: SocketAddr,
    base: ByteSize,
}

impl Bed {
    /// Starts the service and waits until it listens.
    pub(crate) fn start(settings: &Settings) -> Result<Self, BoxError> {
        let group = Group::make(&name("run"), Some(settings.limit_bytes))?;
        let mut service = serve(settings, &group)?;
        let (front, back) = service.addresses()?;
        let base = charge::working_set(&group.folder).unwrap_or_default();
        Ok(Self { group, service, front, back, base })
    }

    /// Returns the address of the proxy.
    pub(crate) const fn front(&self) -> SocketAddr {
        self.front
    }

    /// Ends it, and returns the number of processes that the kernel killed.
    pub(crate) fn finish(mut self) -> Result<u64, BoxError> {
        let oom_kills = charge::oom_kills(&self.group.folder).unwrap_or_default();
        self.service.end()?;
        remove(&self.group.folder);
        Ok(oom_kills)
    }

    /// Puts the offered load on it, and ends it.
    pub(crate) fn offer(mut self, offer: Offer) -> Result<Outcome, BoxError> {
        let order = Order { to: self.front, offer };
        let lasts = order.offer.lasts();
        let mut load = generate(&order)?;
        let output = load.0.stdout.take().ok_or("no pipe from the load process")?;
        let looks = Looks::new(self.base);
        let text = std::thread::scope(|scope| {
            let input = load.0.stdin.take();
            scope.spawn(|| looks.look(&self.group.folder, &mut self.service, input, lasts));
            let mut text = String::new();
            let read = BufReader::new(output).read_to_string(&mut text);
            looks.over.store(true, Ordering::Relaxed);
            read.map(|_| text)
        })?;
        load.end()?;
        let ended = self.service.ended();
        let report = if ended.is_none() { ask(self.back)? } else { Report::default() };
        let oom_kills = charge::oom_kills(&self.group.folder).unwrap_or_default();
        self.service.end()?;
        remove(&self.group.folder);
        let busy = looks.busy.into_inner().unwrap_or_default();
        Ok(Outcome {
            death: ended.map(|status| how(status, oom_kills)),
            oom_kills,
            peak: ByteSize::new(looks.peak.into_inner()),
            peak_parts: looks.parts.into_inner().unwrap_or_default(),
            base: self.base,
            busy,
            tally: serde_json::from_str(&text).map_err(|error| format!("no tally: {error}"))?,
            report,
        })
    }
}

/// The values that are watched from outside while load is offered.
struct Looks {
    over: AtomicBool,
    peak: AtomicU64,
    parts: std::sync::Mutex<String>,
    busy: std::sync::Mutex<f64>,
}

impl Looks {
    fn new(base: ByteSize) -> Self {
        Self {
            over: AtomicBool::new(false),
            peak: AtomicU64::new(base.get()),
            parts: std::sync::Mutex::default(),
            busy: std::sync::Mutex::default(),
        }
    }

    /// Looks until the load is over or the service has ended, of which the load process is told by
    /// the end of its input.
    fn look(
        &self,
        folder: &Path,
        service: &mut Process,
        input: Option<ChildStdin>,
        lasts: Duration,
    ) {
        let (start, before) = (Instant::now(), Ticks::now());
        let mut input = input;
        while !self.over.load(Ordering::Relaxed) {
            let seen = charge::working_set(folder).unwrap_or_default().get();
            let highest = self.peak.fetch_max(seen, Ordering::Relaxed);
            if seen > highest + (4 << 20) {
                set(&self.parts, charge::parts(folder));
            }
            if input.is_some() && service.ended().is_some() {
                input = None;
            }
            // Until the load ends: what drains afterwards is no load.
            if start.elapsed() < lasts && input.is_some() {
                set(&self.busy, Ticks::now().busy_since(before));
            }
            std::thread::sleep(LOOK_EVERY);
        }
    }
}

fn set<T>(place: &std::sync::Mutex<T>, value: T) {
    *place.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = value;
}

/// Starts the service inside the cgroup.
fn serve(settings: &Settings, group: &Group) -> Result<Process, BoxError> {
    let mut command = process::entering(group)?;
    command.arg("--serve").arg(serde_json::to_string(settings)?);
    if settings.decay_off {
        command.env("_RJEM_MALLOC_CONF", "dirty_decay_ms:-1,muzzy_decay_ms:-1");
    }
    Process::start(command)
}

/// Starts the load process.
fn generate(order: &Order) -> Result<Process, BoxError> {
    let mut command = process::own()?;
    command.arg("--generate").arg(serde_json::to_string(order)?);
    Process::start(command)
}

fn how(status: ExitStatus, kills: u64) -> String {
    if status.signal() == Some(SIGKILL) && kills > 0 {
        "OOM-killed".to_owned()
    } else {
        format!("died ({status}, {kills} OOM kills)")
    }
}

/// Asks the service for its report.
fn ask(back: SocketAddr) -> Result<Report, BoxError> {
    let mut stream = TcpStream::connect_timeout(&back, ASK_PATIENCE)?;
    stream.set_read_timeout(Some(ASK_PATIENCE))?;
    write!(stream, "GET /report HTTP/1.1\r\nhost: {back}\r\nconnection: close\r\n\r\n")?;
    let mut text = String::new();
    stream.read_to_string(&mut text)?;
    let (_, body) = text.split_once("\r\n\r\n").ok_or("the service's report has no body")?;
    Ok(serde_json::from_str(body)?)
}
