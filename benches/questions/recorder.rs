//! What the recorder costs: CPU and allocations of its thread in a service under steady load, and
//! the memory of an idle service with it, less that of one without.

use std::convert::Infallible;
use std::ffi::CStr;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use axum::Router;
use axum::body::{Body, Bytes};
use axum::http::Request;
use axum::routing::post;
use lowtide::{BoxError, ByteSize, Memory};
use tower::ServiceExt as _;

use crate::common::figures::median;
use crate::common::own;
use crate::common::process::kernel_value;

/// The goals.
const CPU_PERCENT_MAX: f64 = 0.2;
const MEMORY_MAX: ByteSize = ByteSize::kib(1126); // 1.1 MiB

/// After the start, before anything is counted.
const SETTLE: Duration = Duration::from_secs(3);
/// The time over which CPU and allocations are counted.
const COUNTED: Duration = Duration::from_secs(20);
/// Pairs of services whose memory is compared.
const PAIRS: usize = 7;
/// Requests in progress, each with a body that does not end.
const REQUESTS: usize = 64;
/// The length that each declares.
const LENGTH: u64 = 1 << 20;

/// The name of the recorder's thread.
const THREAD: &CStr = c"lowtide-flight";

static ALLOCATIONS: AtomicU64 = AtomicU64::new(0);

/// Returns the number of allocations of the recorder's thread.
fn allocations_made() -> u64 {
    ALLOCATIONS.load(Ordering::Relaxed)
}

/// Counts an allocation if the calling thread is the recorder's.
pub(crate) fn note_allocation() {
    let mut name = [0_u8; 16];
    // SAFETY: the kernel writes at most 16 bytes, with a zero at their end.
    let done = unsafe { libc::prctl(libc::PR_GET_NAME, name.as_mut_ptr()) };
    if done == 0 && CStr::from_bytes_until_nul(&name) == Ok(THREAD) {
        ALLOCATIONS.fetch_add(1, Ordering::Relaxed);
    }
}

/// Is a service under steady load with a recorder. Prints its figures after [`SETTLE`] and
/// [`COUNTED`].
pub(crate) fn serve(recording: &Path) -> Result<(), BoxError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    let builder = Memory::builder().memory_limit(ByteSize::gib(1));
    let memory = builder.flight_recorder(recording).start()?;
    for found in memory.report().diagnostics() {
        eprintln!("{found}");
    }
    let app =
        Router::new().route("/hold", post(|body: Bytes| async move { body.len().to_string() }));
    let app = app.layer(memory.layer().without_slow_start());
    runtime.block_on(async {
        for _ in 0..REQUESTS {
            let first =
                futures_util::stream::iter([Ok::<_, Infallible>(Bytes::from(vec![1; 70_000]))]);
            let body = futures_util::StreamExt::chain(first, futures_util::stream::pending());
            let request = Request::post("/hold").header("content-length", LENGTH);
            tokio::spawn(app.clone().oneshot(request.body(Body::from_stream(body))?));
        }
        tokio::time::sleep(SETTLE).await;
        let held = memory.report().oldest_requests().len();
        let (start, before) = (Instant::now(), (allocations_made(), cpu()));
        while start.elapsed() < COUNTED {
            // Events, of which each changes the recording.
            memory.heap().request_purge();
            drop(std::hint::black_box(vec![1_u8; 8 << 20]));
            tokio::time::sleep(Duration::from_millis(500)).await;
        }
        let took = start.elapsed().as_secs_f64();
        let (allocations, busy) = (allocations_made() - before.0, cpu().zip(before.1));
        let percent = busy.map(|(now, then)| (now - then).as_secs_f64() / took * 100.0);
        println!("{held} {allocations} {}", percent.unwrap_or(f64::NAN));
        Ok::<_, BoxError>(())
    })?;
    Ok(())
}

/// Returns the time that the recorder's thread has run; `None` without one.
fn cpu() -> Option<Duration> {
    let tasks = fs::read_dir("/proc/self/task").ok()?;
    let mut folders = tasks.filter_map(|task| Some(task.ok()?.path()));
    let own = folders.find(|folder| {
        fs::read_to_string(folder.join("comm")).is_ok_and(|name| name.trim() == "lowtide-flight")
    })?;
    let text = fs::read_to_string(own.join("schedstat")).ok()?;
    text.split(' ').next()?.parse().ok().map(Duration::from_nanos)
}

/// Is an idle service, with a recorder if a path is given. Prints its resident memory without
/// that of shared libraries: anonymous pages and mapped files.
pub(crate) fn idle(recording: Option<&Path>) -> Result<(), BoxError> {
    let mut builder = Memory::builder().memory_limit(ByteSize::gib(1));
    if let Some(path) = recording {
        builder = builder.flight_recorder(path);
    }
    let memory = builder.start()?;
    std::thread::sleep(SETTLE);
    let _ = memory.heap().purge()?;
    let kib = |name: &str| kernel_value("/proc/self/status", name);
    println!("{} {}", kib("RssAnon:")?, kib("RssFile:")?);
    Ok(())
}

/// Prints the figures. Returns whether the goals hold, of what was counted alone if it says so.
pub(crate) fn measure(counted: bool) -> Result<bool, BoxError> {
    let folder = tempfile::tempdir()?;
    let path = folder.path().join("recording");
    let text = printed("serve", Some(&path))?;
    let parts: Vec<_> = text.split_whitespace().collect();
    let [held, allocations, percent] = parts[..] else { return Err(text.into()) };
    let (allocations, percent): (u64, f64) = (allocations.parse()?, percent.parse()?);
    println!("{held} requests were listed, each of which the recorder described");
    let (mut with, mut without) = (Vec::new(), Vec::new());
    for _ in 0..PAIRS {
        with.push(resident(Some(&path))?);
        without.push(resident(None)?);
    }
    let added = |kind: fn(&(f64, f64)) -> f64| {
        let [with, without] =
            [&with, &without].map(|all| median(&all.iter().map(kind).collect::<Vec<_>>()));
        ByteSize::kib(1).scaled((with - without).max(0.0))
    };
    let (anonymous, mapped) = (added(|of| of.0), added(|of| of.1));
    let memory = anonymous.saturating_add(mapped);
    println!("anonymous {anonymous}, mapped {mapped}: medians of {PAIRS} pairs");
    println!("figure questions.recorder.cpu_percent {percent:.3} percent");
    println!("figure questions.recorder.allocations {allocations} allocations");
    println!("figure questions.recorder.memory_bytes {} bytes", memory.get());
    Ok((counted || percent <= CPU_PERCENT_MAX) && allocations == 0 && memory <= MEMORY_MAX)
}

fn resident(recording: Option<&Path>) -> Result<(f64, f64), BoxError> {
    let text = printed("idle", recording)?;
    let (anonymous, mapped) = text.trim().split_once(' ').ok_or("no figures")?;
    Ok((anonymous.parse()?, mapped.parse()?))
}

/// Returns what this program prints as such a service.
fn printed(role: &str, recording: Option<&Path>) -> Result<String, BoxError> {
    let mut command = own()?;
    command.args(["--be", role]);
    if let Some(path) = recording {
        command.arg("--recording").arg(path);
    }
    let output = command.output()?;
    if !output.status.success() {
        return Err(String::from_utf8_lossy(&output.stderr).into_owned().into());
    }
    Ok(String::from_utf8(output.stdout)?)
}
