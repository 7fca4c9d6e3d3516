//! One run: the service in its own process under the memory limit, and the load on it.
//!
//! A memory cgroup enforces the limit. Without the right to create one, this process watches the
//! service and kills it when its anonymous memory exceeds the limit.

use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use lowtide::{BoxError, ByteSize};

use crate::LIMIT;
use crate::load::{self, Load};
use crate::process::{Process, kernel_value};
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

/// Runs the service in this setup under load, and then without load.
pub(crate) fn run(setup: Setup, lasts: Duration) -> Result<Outcome, BoxError> {
    let mut command = Command::new(std::env::current_exe()?);
    command.args(["--serve", &setup.name()]);
    command.env("_RJEM_MALLOC_CONF", setup.jemalloc_settings());
    let mut service = Process::start_in_group(&command, LIMIT)?;
    let to = service.first_line()?;
    let mut runtime = tokio::runtime::Builder::new_multi_thread();
    let runtime = runtime.worker_threads(1).enable_all().build()?;
    let over = Arc::new(AtomicBool::new(false));
    let (load, (peak, killed_after)) = std::thread::scope(|scope| {
        let watch = scope.spawn(|| watch(&mut service, &over));
        let load = runtime.block_on(load::send(to, lasts, &over));
        over.store(true, Ordering::Relaxed);
        (load, watch.join().unwrap_or_default())
    });
    let after = killed_after.is_none().then(|| {
        std::thread::sleep(QUIET);
        memory(&service, "VmRSS:")
    });
    Ok(Outcome { killed_after, load, peak, after })
}

/// Watches the memory of the service until `over`. Returns its peak, and after how many seconds the
/// service was killed, if it was. That also ends the load.
fn watch(service: &mut Process, over: &AtomicBool) -> (ByteSize, Option<f64>) {
    let (start, mut peak) = (Instant::now(), ByteSize::ZERO);
    while !over.load(Ordering::Relaxed) {
        peak = peak.max(memory(service, "VmRSS:"));
        if service.folder().is_none() && memory(service, "RssAnon:") > LIMIT {
            let _ = service.child.kill();
        }
        if service.ended().is_some() {
            over.store(true, Ordering::Relaxed);
            return (peak, Some(start.elapsed().as_secs_f64()));
        }
        std::thread::sleep(LOOK_EVERY);
    }
    (peak, None)
}

/// The entry of this name in the kernel's account of the process, 0 if the process has ended.
fn memory(service: &Process, name: &str) -> ByteSize {
    let status = format!("/proc/{}/status", service.child.id());
    ByteSize::kib(kernel_value(status, name).unwrap_or(0))
}
