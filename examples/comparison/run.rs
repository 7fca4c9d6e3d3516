//! One run: the service in its own process under the memory limit, and the load on it.
//!
//! A memory cgroup enforces the limit. Without the right to create one, this process watches the
//! service and kills it when its anonymous memory exceeds the limit.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::LIMIT;
use crate::cgroup::Group;
use crate::load::{self, Load};
use crate::service::Setup;

/// The time between two looks at the service's memory.
const LOOK_EVERY: Duration = Duration::from_millis(2);
/// The time from the end of the load to the last look.
const QUIET: Duration = Duration::from_secs(10);

/// The outcome of one run.
#[derive(Clone, Debug)]
pub(crate) struct Outcome {
    /// Seconds from the first request until the service was killed, if it was.
    pub(crate) killed_after: Option<f64>,
    /// The answers.
    pub(crate) load: Load,
    /// The highest resident memory during the load.
    pub(crate) peak: ByteSize,
    /// Resident memory ten seconds after the load, if the service was not killed.
    pub(crate) after: Option<ByteSize>,
}

/// Returns an error if no memory cgroup can be created here.
pub(crate) fn check_cgroup() -> Result<(), String> {
    group().map(drop)
}

fn group() -> Result<Group, String> {
    Group::make(&format!("lowtide-comparison-{}", std::process::id()), Some(LIMIT.get()))
}

/// Runs the service in this setup under load, and then without load.
pub(crate) fn run(setup: Setup, lasts: Duration) -> Result<Outcome, BoxError> {
    let mut service = Service::start(setup)?;
    let to = service.address()?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build()?;
    let over = Arc::new(AtomicBool::new(false));
    let (load, (peak, killed_after)) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| service.watch(&over));
        let load = runtime.block_on(load::send(to, lasts, &over));
        over.store(true, Ordering::Relaxed);
        (load, watch.join().unwrap_or_default())
    });
    let after = killed_after.is_none().then(|| {
        std::thread::sleep(QUIET);
        service.memory("VmRSS:")
    });
    Ok(Outcome { killed_after, load, peak, after })
}

/// The service's process. Dropping this kills it and then removes its cgroup.
struct Service {
    process: Child,
    group: Option<Group>,
}

impl Service {
    fn start(setup: Setup) -> Result<Self, BoxError> {
        let group = group().ok();
        let program = std::env::current_exe()?;
        let mut command = match &group {
            None => Command::new(program),
            Some(group) => {
                // The shell enters the cgroup and becomes the service.
                let mut shell = Command::new("/bin/sh");
                shell.args(["-c", "echo $$ >\"$0\" && exec \"$@\""]);
                shell.arg(group.entrance()).arg(program);
                shell
            }
        };
        let process = command
            .args(["--serve", setup.name()])
            .env("_RJEM_MALLOC_CONF", setup.jemalloc_settings())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()?;
        Ok(Self { process, group })
    }

    /// Waits until the service listens and returns its address.
    fn address(&mut self) -> Result<std::net::SocketAddr, BoxError> {
        let mut line = String::new();
        let output = self.process.stdout.take().ok_or("the service has no standard output")?;
        BufReader::new(output).read_line(&mut line)?;
        Ok(line.trim().parse().map_err(|_| format!("the service did not start: {line:?}"))?)
    }

    /// Watches the service's memory until `over`. Returns its peak, and after how many seconds the
    /// service was killed, if it was. That also ends the load.
    fn watch(&mut self, over: &AtomicBool) -> (ByteSize, Option<f64>) {
        let (start, mut peak) = (Instant::now(), ByteSize::ZERO);
        while !over.load(Ordering::Relaxed) {
            peak = peak.max(self.memory("VmRSS:"));
            if self.group.is_none() && self.memory("RssAnon:") > LIMIT {
                let _ = self.process.kill();
            }
            if matches!(self.process.try_wait(), Ok(Some(_))) {
                over.store(true, Ordering::Relaxed);
                return (peak, Some(start.elapsed().as_secs_f64()));
            }
            std::thread::sleep(LOOK_EVERY);
        }
        (peak, None)
    }

    /// The entry of this name in the kernel's account of the process, 0 if the process has ended.
    fn memory(&self, name: &str) -> ByteSize {
        let status = fs::read_to_string(format!("/proc/{}/status", self.process.id()));
        let status = status.unwrap_or_default();
        let entry = status.lines().find_map(|line| line.strip_prefix(name));
        let kib = entry.and_then(|text| text.trim().strip_suffix(" kB")?.parse().ok());
        ByteSize::kib(kib.unwrap_or(0))
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}
